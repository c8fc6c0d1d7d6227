"""kernels/fp8.py bit for bit against torch's own casts and an element-by-element loop in numpy (Triton under its interpreter)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_common import load, nan_memory, poisoned, ready  # noqa: F401

fp8 = load("kernels.fp8")
FLOATS = ("fp8_e4m3", "fp8_e5m2")
INTERPRETED = not torch.cuda.is_available()


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(params=["torch", "triton"])
def backend(request, device):
    return ready(request.param, device)


def wide_values(shape, dtype=torch.float32, seed=0):
    """Many magnitudes, with zeros of both signs and a block of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * (3 * torch.randn(shape, generator=g)).exp()).clamp(-6e4, 6e4)
    flat = x.view(-1)
    flat[::7] *= 1e-5
    if flat.numel() > 8:
        flat[3], flat[4] = 0.0, -0.0
    return x.to(dtype)


def same_bits(a, b):
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(view), b.cpu().view(view))


def loop(x, fmt, block, kv=False, static=None):
    """Codes (as float32) and scales, block by block, in numpy float32; the nearest code is found by looking at all of them."""
    f = fp8.FORMATS[fmt]
    if f.mantissa:
        codes = torch.arange(256, dtype=torch.uint8).view(f.dtype).float().numpy()
        codes = np.unique(codes[np.isfinite(codes)])
    else:
        codes = np.arange(-f.max, f.max + 1, dtype=np.float32)
    x = x.float().numpy()
    M, N = x.shape
    scale = np.zeros((math.ceil(M / block[0]), math.ceil(N / block[1])), np.float32)
    out = np.zeros_like(x)
    one, top = np.float32(1), np.float32(f.max)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            amax = np.abs(x[at]).max()
            s = np.float32(static) if static else max(amax / top, np.float32(1e-6)) if kv else max(amax, np.float32(1e-12)) / top
            y = x[at] * (one / s) if kv and not static else x[at] / s
            y = np.clip(y, -top, top)
            above = np.clip(np.searchsorted(codes, y), 1, len(codes) - 1)
            low, high = codes[above - 1].astype(np.float64), codes[above].astype(np.float64)
            tie = (y - low) == (high - y)
            spacing = high - low
            even_low = np.rint(low / spacing) % 2 == 0  # the neighbour whose last bit is 0
            out[at] = np.where(((y - low) < (high - y)) | (tie & even_low), low, high)
            scale[i, j] = s
    return out, scale


SHAPES = [
    ((5, 7), (1, 128)),
    ((3, 257), (1, 128)),
    ((2, 128), (1, 128)),
    ((9, 24), (1, 24)),
    ((4, 130), (1, 5)),
    ((130, 200), (128, 128)),
    ((128, 128), (128, 128)),
    ((1, 1), (128, 128)),
    ((17, 33), (4, 16)),
    ((0, 5), (1, 128)),
    ((5, 0), (1, 128)),
]


@pytest.mark.parametrize("fmt", fp8.FORMATS)
@pytest.mark.parametrize("shape,block", SHAPES)
def test_blocks(backend, device, fmt, shape, block):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = wide_values(shape, dtype)
        codes, scale = fp8.quantize(poisoned(x.to(device)), fmt, block, backend=backend)
        want, want_scale = fp8.quantize(x, fmt, block, backend="reference")
        assert codes.shape == x.shape and scale.shape == (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
        assert same_bits(codes, want) and same_bits(scale, want_scale)
        value = fp8.quantize_dequantize(poisoned(x.to(device)), fmt, block, backend=backend)
        back = fp8.dequantize(want, want_scale, block, dtype)
        if dtype == torch.bfloat16 and backend == "triton" and INTERPRETED:  # the interpreter truncates float32 to bfloat16, where machines round
            assert value.dtype == dtype and bool(((value.float() - back.float()).abs() <= back.float().abs() * 2**-7).all())
        else:
            assert same_bits(value, back)


@pytest.mark.parametrize("fmt", fp8.FORMATS)
def test_against_a_loop_over_all_codes(backend, device, fmt):
    x = wide_values((19, 40), seed=1)
    for block, kv, static in (((1, 16), False, None), ((8, 16), False, None), ((1, 40), True, None), ((1, 40), True, 0.37)):
        want, want_scale = loop(x, fmt, block, kv, static)
        here = x.to(device)
        codes, scale = fp8.quantize_kv(here, fmt, static, backend=backend) if kv else fp8.quantize(here, fmt, block, backend=backend)
        assert np.array_equal(codes.float().cpu().numpy(), want) and np.array_equal(scale.cpu().numpy(), want_scale)
        value = fp8.quantize_dequantize_kv(here, fmt, static, backend=backend) if kv else fp8.quantize_dequantize(here, fmt, block, backend=backend)
        wide = np.repeat(np.repeat(want_scale, block[0], 0), block[1], 1)[:19, :40]
        assert np.array_equal(value.cpu().numpy(), want * wide)


@pytest.mark.parametrize("fmt", FLOATS)
def test_every_code_and_every_tie(backend, device, fmt):
    """With scale 1, every code is a fixed point, and each midpoint between neighbours goes to the one with the even last bit."""
    f = fp8.FORMATS[fmt]
    codes = torch.arange(128, dtype=torch.uint8)
    grid = codes.view(f.dtype).float()
    codes, grid = codes[grid.isfinite()], grid[grid.isfinite()]
    assert float(grid[-1]) == f.max
    middle = (grid[1:] + grid[:-1]) / 2
    even = torch.where(codes[1:] % 2 == 0, grid[1:], grid[:-1])
    past, before = torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(0.0))
    x = torch.cat([grid, middle, past, before])
    want = torch.cat([grid, even, grid[1:], grid[:-1]])
    for sign in (1, -1):
        got = fp8.quantize_dequantize_kv(sign * x[None].to(device), fmt, scale=1.0, backend=backend)
        assert same_bits(got, sign * want[None])
    beyond = torch.tensor([[1e9, -1e9, f.max * 1.1, 3.4e38]], device=device)
    assert fp8.quantize_dequantize_kv(beyond, fmt, scale=1.0, backend=backend).tolist() == [[f.max, -f.max, f.max, f.max]]  # clamped, never NaN


def test_scales_by_hand(backend, device):
    x = torch.zeros(2, 256, device=device)
    x[0, 5], x[0, 200], x[1, 255] = -896.0, 44.8, 1e-20
    _, scale = fp8.quantize(x, backend=backend)
    assert torch.equal(scale.cpu(), torch.tensor([[2.0, np.float32(44.8) / np.float32(448)], [np.float32(1e-12) / np.float32(448)] * 2]))
    codes, scale = fp8.quantize_kv(x, backend=backend)
    assert torch.equal(scale.cpu(), torch.tensor([[2.0], [1e-6]]))  # the floor
    assert codes.float()[0, 5] == -448 and codes.float()[1].abs().sum() == 0
    zero = fp8.quantize_dequantize(torch.zeros(3, 300, device=device), block=(1, 128), backend=backend)
    assert zero.abs().sum() == 0  # blocks of zeros stay zero


def test_kv_multiplies_by_the_reciprocal(backend, device):
    """A case where x * (1 / s) and x / s round to different codes; the engine's kernel multiplies."""
    rows = torch.rand(300, 1, generator=torch.Generator().manual_seed(3)) + 0.5
    s = rows / 448
    ties = torch.arange(17, 448, dtype=torch.float32)[None] * s  # many lie next to a midpoint of the grid
    x = torch.cat([rows, ties], 1)
    got = fp8.quantize_kv(x.to(device), backend=backend)[0].float().cpu()
    multiplied = (x * s.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    divided = (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert bool((multiplied != divided).any()) and torch.equal(got, multiplied)


def test_kv_is_per_token_and_head(backend, device):
    x = wide_values((2, 3, 4, 24), seed=2)
    codes, scale = fp8.quantize_kv(x.to(device), backend=backend)
    assert codes.shape == x.shape and scale.shape == (2, 3, 4, 1)
    alone, alone_scale = fp8.quantize_kv(x[1, 2, 3].to(device), backend=backend)
    assert same_bits(codes[1, 2, 3], alone) and scale[1, 2, 3] == alone_scale


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=12), st.sampled_from([*fp8.FORMATS]))
@settings(max_examples=200, deadline=None)
def test_error_is_half_a_step(values, fmt):
    """|dq - x| <= half the format's spacing at x / s, times s."""
    x = torch.tensor([values])
    f = fp8.FORMATS[fmt]
    codes, scale = fp8.quantize(x, fmt, (1, 16))
    error = (fp8.dequantize(codes, scale, (1, 16)) - x).abs().double()
    y = (x.double() / scale.double()).abs()
    spacing = 2.0 ** (torch.floor(torch.log2(y.clamp(min=2.0**f.min_exponent))) - f.mantissa) if f.mantissa else torch.ones_like(y)
    assert bool((error <= (0.5 * spacing + 3e-7 * y) * scale.double()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_straight_through_gradient(backend, device, dtype):
    x = wide_values((4, 200), dtype).to(device).requires_grad_()
    weight = torch.arange(800, device=device, dtype=dtype).view(4, 200)
    for f in (fp8.quantize_dequantize, fp8.quantize_dequantize_kv):
        (grad,) = torch.autograd.grad(f(x, backend=backend), x, weight)
        assert torch.equal(grad, weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("static", [None, 1.0])
def test_not_finite(backend, device, bad, static):
    """Raises where checked; unchecked the whole block comes out as NaN: a maximum that skips NaN would hide it."""
    x = wide_values((3, 256)).to(device)
    x[1, 130] = bad
    calls = [lambda **k: fp8.quantize_dequantize_kv(x, scale=static, backend=backend, **k)]
    if static is None:
        calls += [lambda **k: fp8.quantize_dequantize(x, backend=backend, **k), lambda **k: fp8.dequantize(*fp8.quantize(x, backend=backend, **k))]
    for call in calls:
        with pytest.raises(ValueError, match="1 of 768 values are NaN or infinite"):
            call(check=True)
        if static is None:
            value = call(check=False)
            assert value[1, 128:].isnan().all() and bool(value[[0, 2]].isfinite().all())
    if device == "cpu":
        with pytest.raises(ValueError):
            fp8.quantize(x, backend=backend)


def test_bad_arguments():
    x = torch.ones(2, 3, 4)
    for call, message in (
        (lambda: fp8.quantize(x, "fp4"), "one of fp8_e4m3"),
        (lambda: fp8.quantize(x, block=(128, 128)), r"\[M, N\]"),
        (lambda: fp8.quantize(x[0], block=(3, 4)), "power of two"),
        (lambda: fp8.quantize(x[0], block=(1, 0)), "power of two"),
        (lambda: fp8.quantize(x.long()), "floating"),
        (lambda: fp8.quantize(torch.tensor(1.0)), "floating"),
        (lambda: fp8.quantize_kv(x, scale=0.0), "scale"),
        (lambda: fp8.quantize_kv(x, scale=float("inf")), "scale"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_many_row_groups_on_a_cpu():
    """More rows than one pass of the CPU path holds, with a ragged last group of blocks."""
    x = wide_values((128 * 9 + 5, 300), seed=4)
    whole = fp8.quantize_dequantize(x, block=(128, 128))
    for lo in range(0, len(x), 128):
        assert same_bits(whole[lo : lo + 128], fp8.quantize_dequantize(x[lo : lo + 128], block=(128, 128)))
