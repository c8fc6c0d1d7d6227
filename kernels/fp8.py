"""Exact emulation of the low-precision rules of a rollout engine: block-wise weights and activations, per-token-per-head KV cache, in FP8, int8 and int4.

Blocks (weights 128 x 128, activations 1 x 128 along the reduction axis):  s = max(amax, 1e-12) / max_fmt,   code = cast(clamp(x / s, +-max_fmt))
KV cache, per token and head (vLLM's fp8_per_token_head):                  s = max(amax / max_fmt, 1e-6),    code = cast(clamp(x * (1 / s), +-max_fmt))
KV cache, one static scale s (vLLM's per-tensor path, 1.0 by default):                                       code = cast(clamp(x / s, +-max_fmt))
Everything in float32, cast rounds to nearest even, the dequantised value is code * s. The clamp comes before the cast, because an FP8 cast turns larger
values into NaN on one machine and saturates on another; KV multiplies by the reciprocal, because a division differs in the last bit of the code. Edge
blocks are as large as what is left.

Formats: fp8_e4m3 (E4M3fn, max 448), fp8_e5m2 (max 57344), int8 (+-127), int4 (+-7, one code per int8). The floor 1e-12 and the symmetric integer ranges
are deduced. NaN and infinity raise on a CPU; on a GPU, where looking would stop the queue at every layer, they make the scale of their block NaN or
infinite and its dequantised values NaN (a static scale keeps NaN where it is and clamps infinity); `check=True` raises there too.
"""

import importlib.util
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

_TRITON = importlib.util.find_spec("triton") is not None and bool(torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1")
_CHUNK = 2**17  # values handled at once on a CPU


class Format(NamedTuple):
    dtype: torch.dtype  # of the codes
    max: float
    mantissa: int = 0  # stored bits; 0 for integers
    min_exponent: int = 0  # of normal numbers


FORMATS = {
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448.0, 3, -6),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344.0, 2, -14),
    "int8": Format(torch.int8, 127.0),
    "int4": Format(torch.int8, 7.0),
}


class _Rule(NamedTuple):
    fmt: Format
    rows: int  # block height
    cols: int  # block width
    kv: bool = False
    static: float | None = None  # fixed scale


if _TRITON:
    import triton
    import triton.language as tl

    # One program per block column and ROWS rows, which are one block (PER_ROW false) or one block each.
    @triton.jit(do_not_specialize=["M"])
    def block_quantize_kernel(
        x,  # [M, N]
        value,  # [M, N], the dequantised values, or nothing
        code,  # [M, N] int8 or the FP8 bits as uint8, or nothing
        scale,  # [ceil(M / block rows), ceil(N / cols)] float32
        M,
        N,
        static,
        COLS: tl.constexpr,
        MAX: tl.constexpr,
        MANTISSA: tl.constexpr,
        MIN_EXPONENT: tl.constexpr,
        KV: tl.constexpr,
        STATIC: tl.constexpr,
        PER_ROW: tl.constexpr,
        VALUE: tl.constexpr,
        CODE: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,  # COLS rounded up to a power of two
    ):
        blocks = tl.cdiv(N, COLS)
        program = tl.program_id(0).to(tl.int64)
        group, column = program // blocks, program % blocks
        row = group * ROWS + tl.arange(0, ROWS)[:, None]
        lane = tl.arange(0, WIDTH)[None, :]
        inside = (row < M) & (lane < COLS) & (column * COLS + lane < N)
        at = row * N + column * COLS + lane
        v = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        if STATIC:
            s = tl.full([ROWS, 1], static, tl.float32)
        else:
            top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)  # of the bits: a float maximum would skip NaN
            if not PER_ROW:
                top = tl.zeros([ROWS, 1], tl.int32) + tl.max(top, 0, keep_dims=True)
            amax = top.to(tl.float32, bitcast=True)
            if KV:
                s = tl.div_rn(amax, MAX)
                s = tl.where(s < 1e-6, 1e-6, s)
            else:
                s = tl.div_rn(tl.where(amax < 1e-12, 1e-12, amax), MAX)
        y = v * tl.div_rn(1.0, s) if KV and not STATIC else tl.div_rn(v, s + tl.zeros_like(v))
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))
        # To nearest even on a grid of spacing 2^(exponent - MANTISSA): adding 1.5 * 2^23 spacings drops the bits below it.
        bits = y.to(tl.int32, bitcast=True)
        if MANTISSA > 0:
            exponent = tl.maximum(bits & 0x7F800000, (127 + MIN_EXPONENT) << 23)
            shift = 1.5 * (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
            r = (y + shift) - shift
            r = ((r.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (bits & -2147483648)).to(tl.float32, bitcast=True)  # keeps the sign of -0
        else:
            r = (y + 12582912.0) - 12582912.0
        if VALUE:
            tl.store(value + at, (r * s).to(value.dtype.element_ty), mask=inside)
        if CODE:
            if MANTISSA > 0:
                magnitude = r.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                normal = (magnitude >> (23 - MANTISSA)) - ((126 + MIN_EXPONENT) << MANTISSA)
                tiny = tl.abs(r)
                subnormal = (tl.where(tiny < 1, tiny, 0.0) * (2.0 ** (MANTISSA - MIN_EXPONENT))).to(tl.int32)
                byte = tl.where(magnitude >= ((127 + MIN_EXPONENT) << 23), normal, subnormal)
                byte = tl.where(r == r, byte, 127)  # NaN
                tl.store(code + at, (byte | ((bits >> 24) & 128)).to(tl.uint8), mask=inside)
            else:
                tl.store(code + at, r.to(tl.int8), mask=inside)
        block = row if PER_ROW else row // ROWS
        tl.store(scale + block * blocks + column, s, mask=(row < M) & (block * (1 if PER_ROW else ROWS) == row))


def _run_triton(x: torch.Tensor, rule: _Rule, want_value: bool, want_code: bool):
    M, N = x.shape
    fmt = rule.fmt
    value = torch.empty_like(x) if want_value else None
    code = torch.empty(M, N, dtype=torch.uint8 if fmt.mantissa else torch.int8, device=x.device) if want_code else None
    scale = torch.empty(-(-M // rule.rows), -(-N // rule.cols), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(rule.cols)
    rows = min(max(1, 4096 // width), triton.next_power_of_2(M)) if rule.rows == 1 else rule.rows
    if x.numel():
        static = rule.static is not None
        sizes = {"COLS": rule.cols, "ROWS": rows, "WIDTH": width, "PER_ROW": rule.rows == 1}
        grid = {"MAX": fmt.max, "MANTISSA": fmt.mantissa, "MIN_EXPONENT": fmt.min_exponent, "KV": rule.kv, "STATIC": static}
        block_quantize_kernel[(-(-M // rows) * scale.shape[1],)](
            x, value, code, scale, M, N, rule.static or 0.0, **sizes, **grid, VALUE=want_value, CODE=want_code, num_warps=8
        )
    return value, code if code is None else code.view(fmt.dtype), scale


def _round(y: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float32 y, |y| <= fmt.max, to the nearest value of the format, ties to even: bit-equal to a cast there and back, several times faster on a CPU."""
    if not fmt.mantissa:
        return torch.round(y).add_(0.0)  # integers have no -0
    # The spacing of the grid is 2^(exponent - mantissa): adding 1.5 * 2^23 spacings drops the bits below it.
    shift = (y.view(torch.int32) & 0x7F800000).clamp_(min=(127 + fmt.min_exponent) << 23).add_((23 - fmt.mantissa) << 23).view(torch.float32).mul_(1.5)
    return y.add(shift).sub_(shift).copysign_(y)  # keeps the sign of -0


def _cast(y: torch.Tensor, fmt: Format) -> torch.Tensor:
    """What `_round` computes, by torch's own casts."""
    return (y if fmt.mantissa else torch.round(y)).to(fmt.dtype).float()


def _run_torch(x: torch.Tensor, rule: _Rule, want_value: bool, want_code: bool, rounding=_round):
    M, N = x.shape
    fmt, bm, bn = rule.fmt, rule.rows, rule.cols
    columns = -(-N // bn)
    value = torch.empty_like(x) if want_value else None
    code = torch.empty(M, N, dtype=fmt.dtype, device=x.device) if want_code else None
    scale = torch.empty(-(-M // bm), columns, dtype=torch.float32, device=x.device)
    step = bm * max(1, _CHUNK // max(1, bm * N)) if x.device.type == "cpu" else max(1, M)
    for lo in range(0, M, step):
        part = x[lo : lo + step].float()
        height = part.shape[0]
        if height % bm or N % bn:
            part = F.pad(part, (0, -N % bn, 0, -height % bm))
        part = part.reshape(-1, bm, columns, bn)
        if rule.static is not None:
            s = torch.full((part.shape[0], 1, columns, 1), rule.static, dtype=torch.float32, device=x.device)
        else:
            amax = part.abs().amax((1, 3), keepdim=True)
            s = amax.div_(fmt.max).clamp_(min=1e-6) if rule.kv else amax.clamp_(min=1e-12).div_(fmt.max)
        y = part * s.reciprocal() if rule.kv and rule.static is None else part / s
        r = rounding(y.clamp_(-fmt.max, fmt.max), fmt)
        group = slice(lo // bm, lo // bm + part.shape[0])
        scale[group] = s[:, 0, :, 0]
        if want_code:
            code[lo : lo + height] = r.reshape(-1, columns * bn)[:height, :N].to(fmt.dtype)
        if want_value:
            value[lo : lo + height] = r.mul_(s).reshape(-1, columns * bn)[:height, :N]
    return value, code, scale


def _run(x: torch.Tensor, rule: _Rule, want_value: bool, want_code: bool, check: bool | None, backend: str | None):
    """Blocks over the last axis of [.., N] (height 1), or over [M, N]."""
    if backend is None:
        backend = "triton" if _TRITON and x.is_cuda else "torch"
    if backend == "triton" and not _TRITON:
        raise RuntimeError("backend='triton' needs the triton package and a GPU build of torch, or TRITON_INTERPRET=1 set before the first import")
    run = {"triton": _run_triton, "torch": _run_torch, "reference": lambda *a: _run_torch(*a, rounding=_cast)}[backend]
    value, code, scale = run(x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1]).contiguous(), rule, want_value, want_code)
    if check if check is not None else x.device.type == "cpu":
        seen = x if rule.static is not None else scale  # amax carries a NaN or an infinity into its scale
        if not torch.isfinite(seen.sum()) and not torch.isfinite(x).all():
            raise ValueError(f"cannot quantise: {int((~torch.isfinite(x)).sum())} of {x.numel()} values are NaN or infinite")
    shape = x.shape
    return (
        None if value is None else value.reshape(shape),
        None if code is None else code.reshape(shape),
        scale.reshape(*shape[:-1], scale.shape[1]) if rule.rows == 1 else scale,
    )


def _block_rule(x: torch.Tensor, fmt: str, block: tuple[int, int]) -> _Rule:
    if fmt not in FORMATS:
        raise ValueError(f"unknown format {fmt!r}: one of {', '.join(FORMATS)}")
    rows, cols = block
    if not x.dtype.is_floating_point or x.ndim == 0 or (rows > 1 and x.ndim != 2):
        raise ValueError(f"x must be floating, [.., N] for blocks of height 1 and [M, N] for taller ones; got {x.dtype} {tuple(x.shape)} with block {block}")
    if rows < 1 or cols < 1 or rows & (rows - 1):
        raise ValueError(f"block must be (power of two, positive), got {block}")
    return _Rule(FORMATS[fmt], rows, cols)


def _kv_rule(x: torch.Tensor, fmt: str, scale: float | None) -> _Rule:
    rule = _block_rule(x, fmt, (1, max(1, x.shape[-1] if x.ndim else 1)))
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive number, got {scale}")
    return rule._replace(kv=True, static=scale)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rule, check, backend):
        return _run(x, rule, True, False, check, backend)[0]

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


@torch.no_grad()
def quantize(
    x: torch.Tensor, fmt: str = "fp8_e4m3", block: tuple[int, int] = (1, 128), check: bool | None = None, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the block rule.

    x [.., N] floating for block (1, n) (activations), [M, N] for block (m, n) (weights: (128, 128)); fmt a key of FORMATS.
    Returns codes of x's shape (float8_e4m3fn, float8_e5m2 or int8) and float32 scales [.., ceil(N / n)] or [ceil(M / m), ceil(N / n)].
    check: raise on NaN or infinity (None: on a CPU only). backend: None picks Triton on a GPU, torch elsewhere; "triton", "torch" or "reference" (torch's
    own casts) force one.
    Raises ValueError on an unknown format, a wrong shape or block, and on non-finite values where checked.
    """
    return _run(x, _block_rule(x, fmt, block), False, True, check, backend)[1:]


@torch.no_grad()
def dequantize(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (1, 128), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """codes * scale of `quantize` with the same block, multiplied in float32 and given in dtype."""
    rows, cols = block
    N = codes.shape[-1]
    wide = scale.repeat_interleave(cols, -1)[..., :N]
    if rows > 1:
        wide = wide.repeat_interleave(rows, 0)[: codes.shape[0]]
    return (codes.float() * wide).to(dtype)


def quantize_dequantize(
    x: torch.Tensor, fmt: str = "fp8_e4m3", block: tuple[int, int] = (1, 128), check: bool | None = None, backend: str | None = None
) -> torch.Tensor:
    """dequantize(*quantize(x)) in one pass, in x's shape and dtype; the gradient passes straight through. Arguments and errors as in `quantize`."""
    return _StraightThrough.apply(x, _block_rule(x, fmt, block), check, backend)


@torch.no_grad()
def quantize_kv(
    x: torch.Tensor, fmt: str = "fp8_e4m3", scale: float | None = None, check: bool | None = None, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the KV-cache rule, one scale per token and head, or the given static scale.

    x [.., heads, head_dim]: keys after RoPE, or values. Returns codes of x's shape and float32 scales [.., heads, 1]. The rest as in `quantize`.
    """
    return _run(x, _kv_rule(x, fmt, scale), False, True, check, backend)[1:]


def quantize_dequantize_kv(
    x: torch.Tensor, fmt: str = "fp8_e4m3", scale: float | None = None, check: bool | None = None, backend: str | None = None
) -> torch.Tensor:
    """What reading back a quantised KV cache gives, in x's shape and dtype; the gradient passes straight through. Arguments and errors as in `quantize_kv`."""
    return _StraightThrough.apply(x, _kv_rule(x, fmt, scale), check, backend)
