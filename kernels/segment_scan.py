"""Prefix sums, decayed scans and statistics over ragged segments, the linear-time core of GAE, MPO, VAGEN and prefix-ratio corrections.

Segments: either cu_seqlens, int64 [S + 1] cumulative lengths from 0 to the number of values (empty segments allowed, also for values of shape [B, T], which
are then read row after row), or no cu_seqlens: every row of [B, T], or the whole of [N], is one segment.
Masked positions (mask False) are skipped: their values and decays are never read into a result, the running value passes over them unchanged and is also
what stands there in the output. This is the "skip" form of GAE over observation tokens and padding.
Results are float32 (float64 for float64 values); every backend accumulates in float64, which costs nothing where memory is the limit, so a result is the
exact one rounded once, whatever the length. Nothing is computed by subtracting prefix sums, so small values beside 1e8 survive.
"""

import functools
import importlib.util
import os
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

_TRITON = importlib.util.find_spec("triton") is not None and bool(torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1")
_NUMBA = importlib.util.find_spec("numba") is not None

# What a scan writes at a position with value v and decay d, c being the carry from the positions before it in scan order:
_INCLUSIVE = 0  # c = v + d c, write c
_EXCLUSIVE = 1  # write c, c = v + d c
_TRANSPOSED = 2  # c = v + c, write c, c = d c      (the adjoint of _INCLUSIVE, in the other direction)


class SegmentStats(NamedTuple):
    """Per segment [S]: number of unmasked values, their mean, mean square, effective sample size (sum w)^2 / sum w^2, and maximum."""

    count: torch.Tensor  # int64
    mean: torch.Tensor  # 0 where count is 0
    second_moment: torch.Tensor  # 0 where count is 0
    ess: torch.Tensor  # 0 where every value is 0 or count is 0
    max: torch.Tensor  # -inf where count is 0


def segment_scan_reference(
    values: torch.Tensor, decay: torch.Tensor | float, cu_seqlens: torch.Tensor | None = None, mask=None, reverse: bool = True, exclusive: bool = False
) -> torch.Tensor:
    """What `segment_scan` computes, as two plain loops in the dtype of `values`."""
    flat, cu, mask, shape = _flatten(values, cu_seqlens, mask)
    decay = torch.as_tensor(decay, dtype=values.dtype).expand(shape).reshape(-1)
    out = [torch.zeros(())] * flat.numel()
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
        carry = flat.new_zeros(())
        for i in reversed(range(start, end)) if reverse else range(start, end):
            before = carry
            if mask is None or mask[i]:
                carry = flat[i] + decay[i] * carry
            out[i] = before if exclusive else carry
    return torch.stack(out).reshape(shape) if out else flat.reshape(shape)


def segment_cumsum_reference(
    values: torch.Tensor, cu_seqlens: torch.Tensor | None = None, mask: torch.Tensor | None = None, reverse: bool = False, exclusive: bool = False
) -> torch.Tensor:
    """What `segment_cumsum` computes, as a plain loop of torch.cumsum over segments, in the dtype of `values`."""
    flat, cu, mask, shape = _flatten(values, cu_seqlens, mask)
    flat = flat if mask is None else torch.where(mask, flat, 0)
    out = torch.empty_like(flat)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
        part = flat[start:end].flip(0) if reverse else flat[start:end]
        total = part.cumsum(0)
        if exclusive:
            total = torch.cat([total.new_zeros(1), total])[:-1]
        out[start:end] = total.flip(0) if reverse else total
    return out.reshape(shape)


def segment_stats_reference(values: torch.Tensor, cu_seqlens: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> SegmentStats:
    """What `segment_stats` computes, as a plain loop over segments, in the dtype of `values`."""
    flat, cu, mask, _ = _flatten(values, cu_seqlens, mask)
    rows = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
        w = flat[start:end] if mask is None else flat[start:end][mask[start:end]]
        zero = flat.new_zeros(())
        mean, second = (w.mean(), (w * w).mean()) if len(w) else (zero, zero)
        rows.append((len(w), mean, second, len(w) * mean**2 / second if second else zero, w.max() if len(w) else zero - torch.inf))
    count, *rest = zip(*rows) if rows else ([],) * 5
    return SegmentStats(torch.tensor(count, dtype=torch.int64), *(torch.stack(r) if rows else flat.new_zeros(0) for r in rest))


if _TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _then(d1, x1, d2, x2):  # c -> x2 + d2 (x1 + d1 c)
        return d1 * d2, x2 + d2 * x1

    # One program per ROWS segments, walking over them BLOCK positions at a time in scan order.
    @triton.jit(do_not_specialize=["S", "N"])
    def segment_scan_fwd_kernel(
        values,  # [N]
        decay,  # [N], or [1] with DECAY = 1
        cu,  # [S + 1] int64
        mask,  # [N] bool, or nothing
        out,  # [N]
        S,
        N,
        DECAY: tl.constexpr,  # 0 none (a sum), 1 one number, 2 per position
        HAS_MASK: tl.constexpr,
        MASK_VALUES: tl.constexpr,
        REVERSE: tl.constexpr,
        ORDER: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        start = tl.maximum(tl.load(cu + row, mask=row < S, other=0), 0)
        end = tl.minimum(tl.load(cu + row + 1, mask=row < S, other=0), N)  # wrong offsets must not leave the array
        length = end - start
        longest = tl.max(length, 0)
        first = tl.where(REVERSE, end - 1, start)
        step = tl.where(REVERSE, -1, 1)
        carry = tl.zeros([ROWS], tl.float64)
        lane = tl.arange(0, BLOCK)
        for base in range(0, longest, BLOCK):
            j = base + lane[None, :].to(tl.int64)
            inside = j < length[:, None]
            at = first[:, None] + j * step
            v = tl.load(values + at, mask=inside, other=0).to(tl.float64)
            if HAS_MASK and MASK_VALUES:
                v = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, v, 0)
            if DECAY == 0:
                x = tl.cumsum(v, 1)
                result = x + carry[:, None]
            else:
                # position whose decay multiplies the carry that arrives here
                at_d = at - step if ORDER == 2 else at
                inside_d = inside & (j > 0) if ORDER == 2 else inside
                d = tl.load(decay + (at_d if DECAY == 2 else at_d * 0), mask=inside_d, other=1).to(tl.float64)
                if HAS_MASK:
                    d = tl.where(tl.load(mask + at_d, mask=inside_d, other=0) != 0, d, 1)
                product, x = tl.associative_scan((d, v), 1, _then)
                result = x + product * carry[:, None]
            carry = tl.sum(tl.where(lane[None, :] == BLOCK - 1, result, 0), 1)
            if ORDER == 1:
                tl.store(out + at + step, result.to(out.dtype.element_ty), mask=inside & (j + 1 < length[:, None]))
                tl.store(out + at, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=inside & (j == 0))
            else:
                tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["S", "N"])
    def segment_stats_fwd_kernel(values, cu, mask, count, mean, second, ess, largest, S, N, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        dtype = mean.dtype.element_ty
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        start = tl.maximum(tl.load(cu + row, mask=row < S, other=0), 0)
        end = tl.minimum(tl.load(cu + row + 1, mask=row < S, other=0), N)
        longest = tl.max(end - start, 0)
        n = tl.zeros([ROWS], tl.int64)
        s1, s2 = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
        high = tl.full([ROWS], -float("inf"), dtype)
        for base in range(0, longest, BLOCK):
            at = start[:, None] + base + tl.arange(0, BLOCK)[None, :]
            on = at < end[:, None]
            if HAS_MASK:
                on = on & (tl.load(mask + at, mask=on, other=0) != 0)
            v = tl.load(values + at, mask=on, other=0).to(dtype)
            high = tl.maximum(high, tl.max(tl.where(on, v, -float("inf")), 1))
            v = v.to(tl.float64)
            n += tl.sum(on.to(tl.int64), 1)
            s1 += tl.sum(v, 1)
            s2 += tl.sum(v * v, 1)
        some = tl.maximum(n, 1).to(tl.float64)
        tl.store(count + row, n, mask=row < S)
        tl.store(mean + row, s1 / some, mask=row < S)
        tl.store(second + row, s2 / some, mask=row < S)
        tl.store(ess + row, tl.where(s2 > 0, s1 * s1 / tl.where(s2 > 0, s2, 1.0), s2), mask=row < S)
        tl.store(largest + row, high, mask=row < S)


def _tile(S: int, N: int) -> tuple[int, int]:
    """Segments per program and positions per step: powers of two, so that lengths do not cause recompilation."""
    block = min(1024, max(16, triton.next_power_of_2(-(-N // max(S, 1)))))
    return max(1, 1024 // block), block


def _scan_triton(values, decay, cu, mask, mask_values, reverse, order):
    out = torch.empty(values.shape, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device)
    S, N = cu.numel() - 1, values.numel()
    kind = 0 if decay is None else 1 if decay.numel() == 1 and N != 1 else 2
    if S and N:
        rows, block = _tile(S, N)
        segment_scan_fwd_kernel[(-(-S // rows),)](
            values, decay, cu, mask, out, S, N, kind, mask is not None, mask_values, reverse, order, ROWS=rows, BLOCK=block, num_warps=4
        )
    return out


def _stats_triton(values, cu, mask):
    S, N = cu.numel() - 1, values.numel()
    count = torch.empty(S, dtype=torch.int64, device=values.device)
    parts = [torch.empty(S, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device) for _ in range(4)]
    if S:
        rows, block = _tile(S, N)
        segment_stats_fwd_kernel[(-(-S // rows),)](values, cu, mask, count, *parts, S, N, mask is not None, ROWS=rows, BLOCK=block, num_warps=4)
    return SegmentStats(count, *parts)


@functools.cache
def _numba_loops():
    """Compiled on first use and cached on disk beside this file. Selects instead of branches: masks change often, and a wrong guess costs more than an add."""
    import numba
    import numpy as np

    @numba.njit(cache=True, nogil=True)
    def scan(values, decay, decay_step, cu, mask, has_mask, mask_values, reverse, order, out):
        for s in range(len(cu) - 1):
            i = cu[s + 1] - 1 if reverse else cu[s]
            step = -1 if reverse else 1
            carry = 0.0
            for _ in range(cu[s + 1] - cu[s]):
                v = np.float64(values[i])
                d = np.float64(decay[i * decay_step])
                if has_mask:
                    on = mask[i]
                    v = v if on or not mask_values else 0.0
                    d = d if on else 1.0
                if order == 0:
                    carry = v + d * carry
                    out[i] = carry
                elif order == 1:
                    out[i] = carry
                    carry = v + d * carry
                else:
                    carry = v + carry
                    out[i] = carry
                    carry = d * carry
                i += step

    @numba.njit(cache=True, nogil=True)
    def cumsum(values, cu, mask, has_mask, exclusive, out):
        # Four positions at a time, so that only every fourth addition waits for the one before; unsigned, so that no index is tested for being negative.
        for s in range(len(cu) - 1):
            y, on, x = values[cu[s] : cu[s + 1]], mask[cu[s] : cu[s + 1]], out[cu[s] : cu[s + 1]]
            carry = 0.0
            for j in range(len(y) // 4):
                i0 = np.uint64(4 * j)
                i1, i2, i3 = i0 + np.uint64(1), i0 + np.uint64(2), i0 + np.uint64(3)
                a, b, c, d = np.float64(y[i0]), np.float64(y[i1]), np.float64(y[i2]), np.float64(y[i3])
                if has_mask:
                    a = a if on[i0] else 0.0
                    b = b if on[i1] else 0.0
                    c = c if on[i2] else 0.0
                    d = d if on[i3] else 0.0
                ab = a + b
                after = carry + (ab + (c + d))
                if exclusive:
                    x[i0] = carry
                    x[i1] = carry + a
                    x[i2] = carry + ab
                    x[i3] = carry + (ab + c)
                else:
                    x[i0] = carry + a
                    x[i1] = carry + ab
                    x[i2] = carry + (ab + c)
                    x[i3] = after
                carry = after
            for j in range(len(y) - len(y) % 4, len(y)):
                a = np.float64(y[j])
                if has_mask:
                    a = a if on[j] else 0.0
                x[j] = carry if exclusive else carry + a
                carry += a

    @numba.njit(cache=True, nogil=True)
    def stats(values, cu, mask, has_mask, count, mean, second, ess, largest):
        for s in range(len(cu) - 1):
            n = 0
            s1 = 0.0
            s2 = 0.0
            high = -np.inf
            for i in range(cu[s], cu[s + 1]):
                on = mask[i] if has_mask else True
                v = np.float64(values[i])
                high = v if on and v > high else high
                v = v if on else 0.0
                n += on
                s1 += v
                s2 += v * v
            some = n if n else 1
            count[s], mean[s], second[s], largest[s] = n, s1 / some, s2 / some, high
            ess[s] = s1 * s1 / s2 if s2 > 0 else s2

    return scan, cumsum, stats


def _scan_numba(values, decay, cu, mask, mask_values, reverse, order):
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    out = torch.empty_like(values)
    on = torch.ones(1, dtype=torch.bool) if mask is None else mask
    scan, cumsum, _ = _numba_loops()
    if decay is None:  # then a transposed scan is an inclusive one, and a reverse one reads views from the end
        arrays = [x.numpy()[::-1] if reverse else x.numpy() for x in (values, on, out)]
        starts = (values.numel() - cu.flip(0)) if reverse else cu
        cumsum(arrays[0], starts.numpy(), arrays[1], mask is not None and mask_values, order == _EXCLUSIVE, arrays[2])
        return out
    decay = decay.to(torch.promote_types(decay.dtype, torch.float32))
    step = int(decay.numel() != 1)
    scan(values.numpy(), decay.contiguous().numpy(), step, cu.numpy(), on.numpy(), mask is not None, mask_values, reverse, order, out.numpy())
    return out


def _stats_numba(values, cu, mask):
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    S = cu.numel() - 1
    result = SegmentStats(torch.empty(S, dtype=torch.int64), *(torch.empty(S, dtype=values.dtype) for _ in range(4)))
    on = torch.ones(1, dtype=torch.bool) if mask is None else mask
    _numba_loops()[2](values.numpy(), cu.numpy(), on.numpy(), mask is not None, *(r.numpy() for r in result))
    return result


def _groups(cu: torch.Tensor, size: int):
    """Ranges of consecutive segments that take about `size` places when padded to their longest."""
    lengths = (cu[1:] - cu[:-1]).tolist()
    lo = 0
    while lo < len(lengths):
        hi, longest = lo + 1, lengths[lo]
        while hi < len(lengths) and max(longest, lengths[hi]) * (hi + 1 - lo) <= size:
            longest = max(longest, lengths[hi])
            hi += 1
        yield lo, hi, longest
        lo = hi


def _scan_torch(values, decay, cu, mask, mask_values, reverse, order):
    """Without numba or Triton, in float64: groups of segments padded to [rows, longest] in scan order; with a decay, log2(longest) doubling steps."""
    out = torch.empty(values.shape, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device)
    for lo, hi, longest in _groups(cu, 2**16 if values.device.type == "cpu" else 2**24):
        if longest == 0:
            continue
        j = torch.arange(longest, device=values.device)
        inside = j < (cu[lo + 1 : hi + 1] - cu[lo:hi])[:, None]
        at = torch.where(inside, cu[lo + 1 : hi + 1, None] - 1 - j if reverse else cu[lo:hi, None] + j, 0)
        used = inside if mask is None or not mask_values else inside & mask[at]
        x = torch.where(used, values[at].double(), 0.0)
        if decay is None:
            x = x.cumsum(1)
        else:
            d = (decay if decay.numel() == 1 else decay[at]).double().expand(x.shape)
            d = d.clone() if mask is None else torch.where(mask[at], d, 1.0)
            if order == _TRANSPOSED:
                d = d.roll(1, 1)  # the decay that lands in the first column multiplies nothing
            k = 1
            while k < longest:
                x[:, k:] = x[:, k:] + d[:, k:] * x[:, :-k]
                d[:, k:] = d[:, k:] * d[:, :-k]
                k *= 2
        if order == _EXCLUSIVE:
            x = torch.cat([x.new_zeros(len(x), 1), x[:, :-1]], 1)
        out[at[inside]] = x[inside].to(out.dtype)
    return out


def _stats_torch(values, cu, mask):
    S = cu.numel() - 1
    dtype = torch.promote_types(values.dtype, torch.float32)
    count = torch.zeros(S, dtype=torch.int64, device=values.device)
    sums = torch.zeros(2, S, dtype=torch.float64, device=values.device)
    high = torch.full((S,), -torch.inf, dtype=dtype, device=values.device)
    for lo, hi, _ in _groups(cu, 2**16 if values.device.type == "cpu" else 2**24):
        start, end = int(cu[lo]), int(cu[hi])
        segment = torch.arange(lo, hi, device=values.device).repeat_interleave(cu[lo + 1 : hi + 1] - cu[lo:hi])
        v = values[start:end].to(dtype)
        if mask is not None:
            v, segment = v[mask[start:end]], segment[mask[start:end]]
        count.index_add_(0, segment, torch.ones_like(segment))
        high.scatter_reduce_(0, segment, v, "amax")
        v = v.double()
        sums.index_add_(1, segment, torch.stack([v, v * v]))
    some = count.clamp(min=1)
    s1, s2 = sums
    ess = torch.where(s2 > 0, s1 * s1 / torch.where(s2 > 0, s2, 1.0), s2)
    return SegmentStats(count, (s1 / some).to(dtype), (s2 / some).to(dtype), ess.to(dtype), high)


_SCAN = {"triton": _scan_triton, "numba": _scan_numba, "torch": _scan_torch}
_STATS = {"triton": _stats_triton, "numba": _stats_numba, "torch": _stats_torch}


def _pick(backend: str | None, x: torch.Tensor) -> str:
    """Triton on a GPU, numba on a CPU where it is installed, else torch; `backend` overrides."""
    if backend is None:
        return "triton" if _TRITON and x.is_cuda else "numba" if _NUMBA and x.device.type == "cpu" else "torch"
    if backend == "triton" and not _TRITON:
        raise RuntimeError("backend='triton' needs the triton package and a GPU build of torch, or TRITON_INTERPRET=1 set before the first import")
    return backend


def _flatten(values: torch.Tensor, cu_seqlens: torch.Tensor | None, mask: torch.Tensor | None):
    """Checked flat values, offsets, flat mask, and the shape to give back."""
    if values.ndim not in (1, 2) or not values.dtype.is_floating_point:
        raise ValueError(f"values must be a floating tensor [N] or [B, T], got {values.dtype} of shape {tuple(values.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != values.shape or mask.device != values.device):
        raise ValueError(f"mask must be bool of the shape and device of values {tuple(values.shape)}, got {mask.dtype} {tuple(mask.shape)} on {mask.device}")
    N = values.numel()
    if cu_seqlens is None:
        B, T = (1, N) if values.ndim == 1 else values.shape
        cu_seqlens = torch.arange(B + 1, device=values.device) * T
    elif cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int64 or cu_seqlens.numel() == 0 or cu_seqlens.device != values.device:
        raise ValueError(f"cu_seqlens must be int64 [S + 1] on {values.device}, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device}")
    elif cu_seqlens.device.type == "cpu" and (cu_seqlens[0] != 0 or cu_seqlens[-1] != N or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any())):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of values, {N}, without falling; got {cu_seqlens[0]} to {cu_seqlens[-1]}")
    return values.reshape(-1).contiguous(), cu_seqlens.contiguous(), None if mask is None else mask.reshape(-1).contiguous(), values.shape


def _raise_if_nan(total: torch.Tensor, caller: str, values: torch.Tensor, decay: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    if torch.isfinite(total):
        return
    bad = torch.isnan(values) if decay is None or decay.numel() == 1 else torch.isnan(values) | torch.isnan(decay)
    bad = bad if mask is None else bad & mask
    if bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{caller}: NaN at {int(bad.sum())} of {bad.numel()} positions, the first at flat index {first}; mask them or find where they come from"
        )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, decay, cu, mask, reverse, exclusive, backend):
        ctx.save_for_backward(values, decay, cu, mask)
        ctx.reverse, ctx.exclusive, ctx.backend = reverse, exclusive, backend
        return _SCAN[backend](values, decay, cu, mask, True, reverse, _EXCLUSIVE if exclusive else _INCLUSIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # With G the gradient of the carry after each position, the gradients are G for the value and G times the carry before it for the decay.
        values, decay, cu, mask = ctx.saved_tensors
        scan, order = _SCAN[ctx.backend], _EXCLUSIVE if ctx.exclusive else _TRANSPOSED
        grad = scan(grad.contiguous(), decay, cu, mask, False, not ctx.reverse, order)
        grad = grad if mask is None else torch.where(mask, grad, 0)
        to_decay = None
        if ctx.needs_input_grad[1]:
            to_decay = (grad * scan(values, decay, cu, mask, True, ctx.reverse, _EXCLUSIVE)).to(decay.dtype)
        return grad.to(values.dtype), to_decay, None, None, None, None, None


def _scan(caller, values, decay, cu_seqlens, mask, reverse, exclusive, backend):
    flat, cu, mask, shape = _flatten(values, cu_seqlens, mask)
    if isinstance(decay, torch.Tensor):
        if decay.device != values.device or not decay.dtype.is_floating_point or decay.shape not in (values.shape, ()):
            raise ValueError(f"decay must be a number or a floating tensor of values' shape {tuple(shape)} and device, got {decay.dtype} {tuple(decay.shape)}")
        decay = decay.expand(shape).reshape(-1).contiguous()
    elif decay is not None:
        decay = torch.tensor([decay], dtype=torch.float64, device=values.device)
    out = _Scan.apply(flat, decay, cu, mask, reverse, exclusive, _pick(backend, values))
    _raise_if_nan(out.detach().sum(), caller, flat, decay, mask)
    return out.reshape(shape)


def segment_cumsum(
    values: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reverse: bool = False,
    exclusive: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Masked prefix sum of every segment: x_t = x_{t-1} + m_t y_t (reverse: x_t = x_{t+1} + m_t y_t).

    values [N] or [B, T] floating; cu_seqlens [S + 1] int64; mask bool of values' shape. exclusive gives the sum before t is added, 0 at the first position.
    Returns values' shape, float32 (float64 for float64); differentiable. backend: None picks, "triton", "numba" or "torch" force one.
    Raises ValueError on wrong shapes, dtypes or offsets (offsets are checked on a CPU only), and on NaN at unmasked positions.
    """
    return _scan("segment_cumsum", values, None, cu_seqlens, mask, reverse, exclusive, backend)


def segment_scan(
    values: torch.Tensor,
    decay: torch.Tensor | float,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    reverse: bool = True,
    exclusive: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Decayed scan of every segment: x_t = y_t + d_t x_{t+1} from the right, or with reverse=False x_t = y_t + d_t x_{t-1}; masked t: x_t is passed on.

    values [N] or [B, T] floating; decay a number or a tensor of values' shape; cu_seqlens [S + 1] int64; mask bool of values' shape.
    exclusive returns the neighbour's x (x_{t+1}, 0 past the end) instead of x_t: with decay 0.0 that is the next unmasked value, the V_{t+1} of a TD residual.
    GAE: delta = r + gamma * segment_scan(V, 0.0, cu, mask, exclusive=True) - V; A = segment_scan(delta, gamma * lam, cu, mask).
    Returns values' shape, float32 (float64 for float64); differentiable once in values and in a tensor decay. backend and errors as in segment_cumsum.
    """
    return _scan("segment_scan", values, decay, cu_seqlens, mask, reverse, exclusive, backend)


@torch.no_grad()
def segment_stats(values: torch.Tensor, cu_seqlens: torch.Tensor | None = None, mask: torch.Tensor | None = None, backend: str | None = None) -> SegmentStats:
    """Count, mean, second moment, effective sample size (sum w)^2 / sum w^2 and maximum of each segment's unmasked values, [S] each. No gradient.

    values [N] or [B, T] floating, cu_seqlens [S + 1] int64, mask bool of values' shape. Count is int64, the rest float32 (float64 for float64).
    Raises as segment_cumsum.
    """
    flat, cu, mask, _ = _flatten(values, cu_seqlens, mask)
    result = _STATS[_pick(backend, values)](flat, cu, mask)
    _raise_if_nan(result.second_moment.sum(), "segment_stats", flat, None, mask)
    return result


def segment_offsets(ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """cu_seqlens int64 of the maximal runs of equal ids, which never cross a row of [B, T] or a boundary of cu_seqlens.

    ids: [N] or [B, T], any dtype: turn_ids give turns, a policy mask gives its runs of True and of False. No segment is empty.
    """
    flat = ids.reshape(-1)
    first = torch.ones(flat.numel() + 1, dtype=torch.bool, device=ids.device)
    first[1:-1] = flat[1:] != flat[:-1]
    if ids.ndim == 2:
        first[:: max(1, ids.shape[1])] = True
    if cu_seqlens is not None:
        first[cu_seqlens] = True
    return first.nonzero()[:, 0]
