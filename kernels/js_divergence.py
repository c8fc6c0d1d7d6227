"""Jensen-Shannon distance per position between next-token distributions, from logits or from hidden states.

With p and r the two softmax distributions, m = (p + r) / 2 and delta = log p - log r, the base-2 divergence is

    JSD = 1/2 KL(p || m) + 1/2 KL(r || m) = sum_v m_v phi(delta_v),    phi(x) = 1 - [log(1 + e^-|x|) + |x| / (1 + e^|x|)] / ln 2

(p / m = 2 / (1 + e^-delta), inserted in both terms), and the distance is q = sqrt(JSD), in [0, 1]. Every term is non-negative and second order in delta,
so nothing cancels when p and r are nearly equal, which matters because the square root turns a rounding error of 1e-7 in JSD into 3e-4 in q.
For the same reason delta is built from differences of logits, (a - b) - log(sum e^a / sum e^b), and the last term from expm1, never from two
log-probabilities. No logarithm of a probability is taken, so two sides that both underflow, or logits of -inf, need no special case.

Public: js_distance, js_distance_from_hidden (what scripts call), js_distance_reference (plain float64, what tests compare with).
"""

import importlib.util
import math
import os
from fractions import Fraction

import torch

_TRITON = importlib.util.find_spec("triton") is not None and bool(torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1")
_CHUNK = 2**16  # logits handled at once by the torch path on a CPU: a handful of such buffers stays in a core's L2 cache


def _phi_series(terms: int) -> list[float]:
    """Taylor coefficients of phi(x) * ln 2 = (x/2) tanh(x/2) - log cosh(x/2) in powers of x^2, divided by ln 2."""
    tanh = [Fraction(0)] * (2 * terms)  # tanh' = 1 - tanh^2
    for n in range(2 * terms - 1):
        tanh[n + 1] = (Fraction(n == 0) - sum(tanh[i] * tanh[n - i] for i in range(n + 1))) / (n + 1)
    return [float(tanh[2 * n - 1] * (1 - Fraction(1, 2 * n)) / 4**n) / math.log(2) for n in range(1, terms + 1)]


_PHI = {torch.float32: _phi_series(8), torch.float64: _phi_series(18)}  # |x| < 1: the remainder is below the dtype's rounding


def js_distance_reference(logits_ref: torch.Tensor, logits_var: torch.Tensor, temperature: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
    """What `js_distance` computes, in plain float64 over the whole arrays: logits_ref [T, V], logits_var [K, T, V] or [T, V] -> float64 [K, T] or [T]."""
    lp = torch.log_softmax(logits_var.double() / temperature, -1)
    lr = torch.log_softmax(logits_ref.double() / temperature, -1)
    t = torch.tanh((lp - lr) / 2).nan_to_num(0.0)  # p = m (1 + t), r = m (1 - t); two -inf logits: m = 0
    m = (lp.exp() + lr.exp()) / 2
    terms = m * (torch.special.xlog1py(1 + t, t) + torch.special.xlog1py(1 - t, -t)) / (2 * math.log(2))
    q = terms.sum(-1).clamp(max=1).sqrt()
    return q if mask is None else torch.where(mask, q, 0.0)


if _TRITON:
    import triton
    import triton.language as tl

    PHI1, PHI2, PHI3, PHI4, PHI5, PHI6, PHI7, PHI8 = (tl.constexpr(c) for c in _PHI[torch.float32])

    @triton.jit
    def _expm1_small(x):  # |x| <= 1. Polynomials, because the fast exp and log of GPUs lose the small results that matter here
        s = 1 + x * (1 / 11)
        for n in tl.static_range(10, 1, -1):
            s = 1 + s * x / n
        return s * x

    @triton.jit
    def _log1p_small(x):  # -1/2 <= x <= 1/2, as 2 atanh(x / (2 + x))
        z = x / (2 + x)
        w = z * z
        return 2 * z * (1 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13)))))))

    # One program per (position, variant); the K programs of a position are neighbours, so the reference row comes from cache after the first.
    @triton.jit(do_not_specialize=["T", "K"])
    def js_distance_fwd_kernel(
        ref,  # [T, V]
        var,  # [K, T, V]
        mask,  # [T] bool, or nothing
        out,  # [K, T] float32
        T,
        K,
        V,
        ref_stride,
        var_stride_k,
        var_stride_t,
        inv_temperature,
        HAS_MASK: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        program = tl.program_id(0).to(tl.int64)
        t, k = program // K, program % K
        if HAS_MASK:  # noqa: SIM102 - resolved at compile time, so it stays apart from the test on data
            if tl.load(mask + t) == 0:
                tl.store(out + k * T + t, 0.0)
                return
        ref += t * ref_stride
        var += k * var_stride_k + t * var_stride_t
        lane = tl.arange(0, BLOCK)

        # Pass 1, online: maxima ma, mb, sums sa, sb of e^(a - ma), e^(b - mb), and their difference u = sa - sb summed without cancellation.
        ma, mb = -3.4028234663852886e38, -3.4028234663852886e38
        sa, sb, u = 0.0, 0.0, 0.0
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            a = tl.load(var + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            b = tl.load(ref + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            ma_new, mb_new = tl.maximum(ma, tl.max(a, 0)), tl.maximum(mb, tl.max(b, 0))
            ra, rb = tl.exp((ma - ma_new) * inv_temperature), tl.exp((mb - mb_new) * inv_temperature)
            step = ((ma - ma_new) - (mb - mb_new)) * inv_temperature
            near = tl.abs(step) < 1
            u = ra * u + sb * tl.where(near, rb * _expm1_small(tl.where(near, step, 0.0)), ra - rb)
            ea, eb = tl.exp((a - ma_new) * inv_temperature), tl.exp((b - mb_new) * inv_temperature)
            d = ((a - b) - (ma_new - mb_new)) * inv_temperature
            small = tl.abs(d) < 1
            u += tl.sum(tl.where(small, eb * _expm1_small(tl.where(small, d, 0.0)), ea - eb), 0)
            sa, sb = ra * sa + tl.sum(ea, 0), rb * sb + tl.sum(eb, 0)
            ma, mb = ma_new, mb_new

        # log(sa / sb)
        near = tl.abs(u) < 0.5 * sb
        shift = tl.where(near, _log1p_small(tl.where(near, u / sb, 0.0)), tl.log(sa) - tl.log(sb))

        # Pass 2: sum_v m_v phi(delta_v), the two halves of m divided by their own sums at the end.
        pa, pb = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            a = tl.load(var + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            b = tl.load(ref + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            x = tl.abs(((a - b) - (ma - mb)) * inv_temperature - shift)
            x = tl.where(x < 100, x, 100.0)  # also takes NaN, which is (-inf) - (-inf): such a v has weight 0
            w = x * x
            series = w * (PHI1 + w * (PHI2 + w * (PHI3 + w * (PHI4 + w * (PHI5 + w * (PHI6 + w * (PHI7 + w * PHI8)))))))
            e = tl.exp(-x)
            far = 1 - (_log1p_small(tl.where(x < 1, 0.0, e)) + x * e / (1 + e)) * 1.4426950408889634
            phi = tl.where(x < 1, series, far)
            pa += tl.exp((a - ma) * inv_temperature) * phi
            pb += tl.exp((b - mb) * inv_temperature) * phi
        divergence = 0.5 * (tl.sum(pa, 0) / sa + tl.sum(pb, 0) / sb)
        tl.store(out + k * T + t, tl.sqrt_rn(tl.where(divergence > 1, 1.0, divergence)))


def _distance_triton(ref: torch.Tensor, var: torch.Tensor, inv_temperature: float, mask: torch.Tensor | None) -> torch.Tensor:
    """ref [T, V], var [K, T, V], mask [T] -> float32 [K, T]."""
    ref, var = (x if x.stride(-1) == 1 else x.contiguous() for x in (ref, var))
    K, T, V = var.shape
    out = torch.empty(K, T, dtype=torch.float32, device=ref.device)
    if K * T:
        block = min(4096, max(16, triton.next_power_of_2(V)))
        js_distance_fwd_kernel[(K * T,)](
            ref, var, mask, out, T, K, V, ref.stride(0), var.stride(0), var.stride(1), inv_temperature, HAS_MASK=mask is not None, BLOCK=block, num_warps=8
        )
    return out


def _distance_block(a: torch.Tensor, b: torch.Tensor, inv_temperature: float) -> torch.Tensor:
    """The two passes of the kernel on rows that are held whole: a, b [R, V] float32 or float64 -> [R]."""
    ma, mb = a.amax(-1, keepdim=True), b.amax(-1, keepdim=True)
    ea, eb = (a - ma).mul_(inv_temperature).exp_(), (b - mb).mul_(inv_temperature).exp_()
    d = (a - b).sub_(ma - mb).mul_(inv_temperature)
    sa, sb = ea.sum(-1, keepdim=True), eb.sum(-1, keepdim=True)
    u = torch.where(d.abs() < 1, torch.expm1(d).mul_(eb), ea - eb).sum(-1, keepdim=True)  # sa - sb
    x = d.sub_(torch.where(u.abs() < 0.5 * sb, torch.log1p(u / sb), (sa / sb).log())).abs_()
    x = x.nan_to_num_(0.0).clamp_(max=100)  # NaN here is (-inf) - (-inf): such a v has weight 0
    w = x * x
    *rest, last = _PHI[a.dtype]
    near = torch.full_like(w, last)
    for coefficient in reversed(rest):
        near.mul_(w).add_(coefficient)
    near.mul_(w)
    e = torch.exp(-x)
    far = torch.log1p(e).add_(e.mul(x).div_(e.add_(1))).mul_(-1 / math.log(2)).add_(1)
    phi = torch.where(x < 1, near, far)
    divergence = 0.5 * (ea.mul_(phi).sum(-1) / sa[:, 0] + eb.mul_(phi).sum(-1) / sb[:, 0])
    return divergence.clamp_(max=1).sqrt_()


def _distance_torch(ref: torch.Tensor, var: torch.Tensor, inv_temperature: float, mask: torch.Tensor | None) -> torch.Tensor:
    """ref [T, V], var [K, T, V], mask [T] -> float32 (float64 for float64) [K, T], a block of rows at a time."""
    K, T, V = var.shape
    dtype = torch.promote_types(ref.dtype, torch.float32)
    out = torch.zeros(K, T, dtype=dtype, device=ref.device)
    rows = max(1, (_CHUNK if ref.device.type == "cpu" else 2**24) // V)
    kept = None if mask is None else mask.nonzero()[:, 0]
    for lo in range(0, T if kept is None else len(kept), rows):
        at = slice(lo, min(lo + rows, T)) if kept is None else kept[lo : lo + rows]
        b = ref[at].to(dtype)
        for k in range(K):
            out[k, at] = _distance_block(var[k, at].to(dtype), b, inv_temperature)
    return out


def _pick(backend: str | None, x: torch.Tensor):
    """The implementation for x: Triton for half and single precision on a GPU, torch otherwise; `backend` overrides."""
    if backend is None:
        backend = "triton" if _TRITON and x.is_cuda and x.dtype != torch.float64 else "torch"
    if backend == "triton" and not _TRITON:
        raise RuntimeError("backend='triton' needs the triton package and a GPU build of torch, or TRITON_INTERPRET=1 set before the first import")
    return {"triton": _distance_triton, "torch": _distance_torch}[backend]


def _raise_if_nan(q: torch.Tensor, caller: str) -> torch.Tensor:
    bad = torch.isnan(q)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{caller}: {int(bad.sum())} of {q.numel()} positions have no distribution (a NaN or +inf logit, or every logit -inf), the first at index {first}; "
            "mask these positions or find where the values come from"
        )
    return q


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a positive number, got {temperature}")


def _check_mask(mask: torch.Tensor | None, T: int) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (T,)):
        raise ValueError(f"mask must be bool of shape ({T},), got {mask.dtype} of shape {tuple(mask.shape)}")


def _check_pair(name: str, ref: torch.Tensor, var: torch.Tensor) -> None:
    if ref.ndim != 2 or var.shape[-2:] != ref.shape or var.ndim not in (2, 3):
        raise ValueError(f"{name}_ref must be [T, N] and {name}_var [K, T, N] or [T, N]; got {tuple(ref.shape)} and {tuple(var.shape)}")
    if ref.dtype != var.dtype or not ref.dtype.is_floating_point or ref.device != var.device:
        raise ValueError(f"{name}_ref and {name}_var must share a floating dtype and a device; got {ref.dtype} on {ref.device}, {var.dtype} on {var.device}")


@torch.no_grad()
def js_distance(
    logits_ref: torch.Tensor, logits_var: torch.Tensor, temperature: float = 1.0, mask: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Jensen-Shannon distance sqrt(JSD base 2) in [0, 1] of softmax(logits / temperature), per position.

    logits_ref [T, V], logits_var [K, T, V] (K variants against one reference) or [T, V], same dtype; mask [T] bool, False positions are not read and give 0.
    Returns [K, T] or [T], float32 (float64 for float64). No gradient. Exactly 0 for identical rows, 1 for disjoint supports (-inf logits).
    backend: None picks Triton on a GPU, torch elsewhere; "triton" or "torch" force one.
    Raises ValueError on wrong shapes or dtypes, and where an unmasked row has a NaN or +inf logit or only -inf ones (one host sync on a GPU).
    """
    _check_pair("logits", logits_ref, logits_var)
    _check_temperature(temperature)
    _check_mask(mask, logits_ref.shape[0])
    if logits_ref.shape[1] == 0:
        raise ValueError("logits have an empty vocabulary")
    var = logits_var if logits_var.ndim == 3 else logits_var[None]
    q = _raise_if_nan(_pick(backend, logits_ref)(logits_ref, var, 1 / temperature, mask), "js_distance")
    return q if logits_var.ndim == 3 else q[0]


def _head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits [R, V] of hidden [R, D] in float32 (float64 for float64): products of the inputs' own dtype, accumulated and kept in float32."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == dtype:
        logits = hidden @ weight.T
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=dtype)
    else:  # a CPU has no mixed product: widen a slice of the weight at a time
        hidden = hidden.to(dtype)
        logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=dtype, device=hidden.device)
        for lo in range(0, weight.shape[0], 4096):
            logits[:, lo : lo + 4096] = hidden @ weight[lo : lo + 4096].to(dtype).T
    return logits if bias is None else logits.add_(bias)


@torch.no_grad()
def js_distance_from_hidden(
    hidden_ref: torch.Tensor,
    hidden_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    ref_index: torch.Tensor | None = None,
    max_elements: int = 2**24,
    backend: str | None = None,
) -> torch.Tensor:
    """`js_distance` of the logits hidden @ weight.T + bias, without ever holding more than two blocks of max_elements float32 logits.

    hidden_ref [T, D], hidden_var [K, T, D] or [T, D], weight [V, D], bias [V], all of one dtype; mask [T] bool. Returns [K, T] or [T], float32
    (float64 for float64).
    Ragged variants: with ref_index [M] int64, hidden_var is [M, D], row i is compared with row ref_index[i] of hidden_ref, and the result is [M]
    (concatenate the rows of all variants; any order, repeats allowed; mask is then not accepted). The logits of a reference row are computed once.
    Logits are float32 also for bfloat16 inputs, so the distance has no floor from rounded logits. Rows whose hidden states are bit-identical give exactly 0.
    No gradient. Raises ValueError as js_distance does, and IndexError for a ref_index outside [0, T).
    """
    _check_temperature(temperature)
    T, V = hidden_ref.shape[0], weight.shape[0]
    if ref_index is None:
        _check_pair("hidden", hidden_ref, hidden_var)
        _check_mask(mask, T)
    elif mask is not None or hidden_var.ndim != 2 or ref_index.dtype != torch.int64 or ref_index.shape != hidden_var.shape[:1]:
        raise ValueError(
            f"ref_index must be int64 [M] with hidden_var [M, D] and no mask; got {ref_index.dtype} {tuple(ref_index.shape)}, {tuple(hidden_var.shape)}"
        )
    if weight.ndim != 2 or V == 0 or weight.shape[1] != hidden_ref.shape[-1] or (bias is not None and bias.shape != (V,)):
        raise ValueError(f"weight must be [V, {hidden_ref.shape[-1]}] and bias [V]; got {tuple(weight.shape)}, {None if bias is None else tuple(bias.shape)}")
    if hidden_ref.ndim != 2 or hidden_var.shape[-1] != hidden_ref.shape[1] or not hidden_ref.dtype == hidden_var.dtype == weight.dtype:
        raise ValueError(f"hidden states [.., D] and weight must share D and dtype; got {hidden_ref.dtype}, {hidden_var.dtype}, {weight.dtype}")
    distance, inv_temperature = _pick(backend, hidden_ref), 1 / temperature
    rows = max(1, max_elements // V)

    def compare(ref: torch.Tensor, ref_logits: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        q = distance(ref_logits, _head(var, weight, bias)[None], inv_temperature, None)[0]
        return q.masked_fill_((ref == var).all(-1), 0)  # a product may round differently from call to call; equal states are equal distributions

    if ref_index is not None:
        M = hidden_var.shape[0]
        order = torch.argsort(ref_index, stable=True)
        needed, counts = torch.unique_consecutive(ref_index[order], return_counts=True)
        if M and (int(needed[0]) < 0 or int(needed[-1]) >= T):
            raise IndexError(f"ref_index must lie in [0, {T}), got values from {int(needed[0])} to {int(needed[-1])}")
        ends = [0, *counts.cumsum(0).tolist()]
        local = torch.arange(len(needed), device=order.device).repeat_interleave(counts)  # which needed row each sorted variant row is compared with
        out = torch.empty(M, dtype=torch.promote_types(hidden_ref.dtype, torch.float32), device=hidden_ref.device)
        for lo in range(0, len(needed), rows):
            hi = min(lo + rows, len(needed))
            ref = hidden_ref[needed[lo:hi]]
            ref_logits = _head(ref, weight, bias)
            for start in range(ends[lo], ends[hi], rows):
                at = slice(start, min(start + rows, ends[hi]))
                pick = local[at] - lo
                out[order[at]] = compare(ref[pick], ref_logits[pick], hidden_var[order[at]])
        return _raise_if_nan(out, "js_distance_from_hidden")

    var = hidden_var if hidden_var.ndim == 3 else hidden_var[None]
    out = torch.zeros(var.shape[:2], dtype=torch.promote_types(hidden_ref.dtype, torch.float32), device=hidden_ref.device)
    kept = None if mask is None else mask.nonzero()[:, 0]
    for lo in range(0, T if kept is None else len(kept), rows):
        at = slice(lo, min(lo + rows, T)) if kept is None else kept[lo : lo + rows]
        ref = hidden_ref[at]
        ref_logits = _head(ref, weight, bias)
        for k in range(var.shape[0]):
            out[k, at] = compare(ref, ref_logits, var[k, at])
    _raise_if_nan(out, "js_distance_from_hidden")
    return out if hidden_var.ndim == 3 else out[0]
