"""kernels/js_divergence.py against float64, on every backend (Triton under its interpreter)."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_common import load, nan_memory, poisoned, ready  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

js = load("kernels.js_divergence")
INF = float("inf")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(params=["torch", "triton"])
def backend(request, device):
    return ready(request.param, device)


def pair(T, V, spread, seed=0, K=None, scale=5.0):
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(T, V, generator=g) * scale
    return ref, ref + torch.randn(*(() if K is None else (K,)), T, V, generator=g) * spread


def relative_error(got, want):
    assert got.dtype == torch.float32 and bool((got >= 0).all()) and bool((got <= 1).all())
    return float(((got.double().cpu() - want).abs() / want.clamp(min=1e-300)).max())


def test_reference_agrees_with_fifty_digits():
    """The textbook formula, mixture and logarithms, in 50 digits: what the float64 reference is worth, also where p and r nearly coincide."""
    mpmath.mp.dps = 50
    for spread, bound in ((1e-6, 1e-8), (1e-3, 1e-11), (1.0, 1e-14), (30.0, 1e-14)):
        ref, var = pair(2, 9, spread)
        for row, got in zip(zip(ref, var), js.js_distance_reference(ref, var, temperature=0.7).tolist()):
            p, r = ([mpmath.e ** (mpmath.mpf(float(x)) / mpmath.mpf(0.7)) for x in side] for side in row)
            p, r = [x / sum(p) for x in p], [x / sum(r) for x in r]
            half = [sum(x * mpmath.log(2 * x / (a + b), 2) for x, a, b in zip(side, p, r)) / 2 for side in (p, r)]
            want = mpmath.sqrt(sum(half))
            assert abs(got - want) / want < bound


@pytest.mark.parametrize("spread", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 30.0])
@pytest.mark.parametrize("V", [2, 7, 8, 15, 16, 17, 129, 1000, 4097])
def test_relative_error(backend, device, V, spread):
    for temperature in (1.0, 0.7):
        ref, var = pair(3, V, spread, seed=V)
        got = js.js_distance(poisoned(ref.to(device)), poisoned(var.to(device)), temperature, backend=backend)
        assert relative_error(got, js.js_distance_reference(ref, var, temperature)) < 1e-6


@pytest.mark.parametrize("V", [49_152, 50_257, 151_936])
def test_large_vocabularies(backend, device, V):
    for spread, scale in ((1e-4, 5.0), (1.0, 0.1)):
        ref, var = pair(1, V, spread, scale=scale)
        got = js.js_distance(poisoned(ref.to(device)), poisoned(var.to(device)), backend=backend)
        assert relative_error(got, js.js_distance_reference(ref, var)) < 1e-6


def test_one_word_vocabulary(backend, device):
    assert js.js_distance(torch.zeros(3, 1, device=device), torch.ones(3, 1, device=device), backend=backend).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_lose_nothing_more(backend, device, dtype):
    """Logits as given are exact; everything after is float32."""
    ref, var = (x.to(dtype) for x in pair(3, 500, 0.5))
    assert relative_error(js.js_distance(ref.to(device), var.to(device), backend=backend), js.js_distance_reference(ref, var)) < 1e-6


def test_float64_stays_float64():
    ref, var = (x.double() for x in pair(3, 500, 1e-3))
    got = js.js_distance(ref, var, 0.9)
    assert got.dtype == torch.float64
    assert float(((got - js.js_distance_reference(ref, var, 0.9)).abs() / got).max()) < 1e-11


def test_variants_against_one_reference(backend, device):
    ref, var = pair(5, 40, 1.0, K=3)
    var[1] = ref
    got = js.js_distance(ref.to(device), var.to(device), backend=backend)
    assert got.shape == (3, 5) and got[1].tolist() == [0.0] * 5
    for k in range(3):
        assert torch.equal(got[k], js.js_distance(ref.to(device), var[k].to(device), backend=backend))
    want = js.js_distance_reference(ref, var)
    assert relative_error(got[::2], want[::2]) < 1e-6


def test_views_are_read_by_their_strides(backend, device):
    ref, var = pair(6, 30, 1.0, K=2)
    wide = torch.full((2, 12, 60), float("nan"))
    wide[:, ::2, :30] = var
    got = js.js_distance(ref.to(device), wide.to(device)[:, ::2, :30], backend=backend)
    assert torch.equal(got, js.js_distance(ref.to(device), var.to(device), backend=backend))
    columns = var.permute(2, 0, 1).contiguous().to(device).permute(1, 2, 0)  # the vocabulary is not the last stride
    torch.testing.assert_close(js.js_distance(ref.to(device), columns, backend=backend), got, rtol=3e-7, atol=0)


def test_identical_disjoint_and_symmetric(backend, device):
    ref, var = (x.to(device) for x in pair(4, 300, 2.0))
    assert js.js_distance(ref, ref.clone(), backend=backend).tolist() == [0.0] * 4
    forward, back = js.js_distance(ref, var, backend=backend), js.js_distance(var, ref, backend=backend)
    torch.testing.assert_close(forward, back, rtol=3e-7, atol=0)
    a, b = ref.clone(), ref.clone()
    a[:, ::2], b[:, 1::2] = -INF, -INF
    assert js.js_distance(a, b, backend=backend).tolist() == [1.0] * 4
    assert js.js_distance(ref, ref + 3, backend=backend).max() < 1e-6  # softmax ignores a constant


def test_both_sides_underflow(backend, device):
    """log p = log r = -200 and beyond, where exp is 0 in float32 (Liger-Kernel issue 1453), and -inf on one side or both."""
    ref = torch.tensor([[0.0, -200.0, -200.0, 1.0], [0.0, -INF, -INF, 1.0], [0.0, -INF, -200.0, -1e4], [0.0, -3.4e38, 5.0, -3.4e38]])
    var = torch.tensor([[0.5, -200.0, -210.0, 1.0], [0.5, -INF, -3.0, -INF], [0.5, -200.0, -INF, -1e4], [0.5, -3.4e38, -3.4e38, 3.0]])
    got = js.js_distance(ref.to(device), var.to(device), backend=backend)
    want = js.js_distance_reference(ref, var)
    assert bool(torch.isfinite(want).all()) and float((got.cpu() - want).abs().max()) < 3e-7


def test_masks_written_with_the_smallest_float(backend, device):
    low = torch.finfo(torch.float32).min
    ref, var = pair(2, 50, 1.0)
    ref[:, 10:30] = var[:, 20:40] = low
    got = js.js_distance(ref.to(device), var.to(device), backend=backend)
    assert relative_error(got, js.js_distance_reference(ref, var)) < 1e-6


def test_late_maxima(backend, device):
    """Maxima that rise from block to block, differently on the two sides, rescale what was summed before."""
    V = 9000
    ramp = torch.arange(V) * 0.02
    ref, var = ramp[None].clone(), ramp[None] + 0.5 * torch.sin(torch.arange(V) / 50)
    for b, a in ((ref, var), (ref, ref.flip(1)), (ref + 40, var), (ref, ref + 1e-4 * (torch.arange(V) % 3))):
        got = js.js_distance(b.to(device), a.to(device), backend=backend)
        assert relative_error(got, js.js_distance_reference(b, a)) < 3e-6  # ref + 40 loses digits in the subtraction of logits


@given(st.lists(st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 2), min_size=2, max_size=20), st.floats(0.1, 10))
@settings(max_examples=150, deadline=None)
def test_any_logits(rows, temperature):
    ref, var = torch.tensor(rows).T.contiguous()[:, None]
    got = js.js_distance(ref, var, temperature)
    want = js.js_distance_reference(ref, var, temperature)
    assert 0 <= float(got) <= 1 and abs(float(got) - float(want)) < 2e-3  # logits of 1e4 have steps of 1e-3 in float32
    assert abs(float(got) - float(js.js_distance(var, ref, temperature))) < 2e-3


def test_mask(backend, device):
    ref, var = pair(6, 40, 1.0, K=2)
    mask = torch.tensor([True, False, True, True, False, False])
    want = js.js_distance_reference(ref, var, mask=mask)
    ref[~mask], var[:, ~mask] = float("nan"), INF
    got = js.js_distance(ref.to(device), var.to(device), mask=poisoned(mask.to(device)), backend=backend)
    assert got[:, ~mask.to(device)].abs().sum() == 0 and relative_error(got[:, mask], want[:, mask]) < 1e-6
    assert js.js_distance(ref.to(device), var.to(device), mask=torch.zeros(6, dtype=torch.bool, device=device), backend=backend).tolist() == [[0.0] * 6] * 2


def test_no_positions(backend, device):
    assert js.js_distance(torch.zeros(0, 5, device=device), torch.zeros(3, 0, 5, device=device), backend=backend).shape == (3, 0)
    assert js.js_distance(torch.zeros(4, 5, device=device), torch.zeros(0, 4, 5, device=device), backend=backend).shape == (0, 4)


@pytest.mark.parametrize("bad", [float("nan"), INF, "all"])
def test_what_has_no_distribution_is_reported(backend, device, bad):
    ref, var = pair(4, 30, 1.0, K=2)
    if bad == "all":
        var[1, 2] = -INF
    else:
        var[1, 2, 29] = bad
    with pytest.raises(ValueError, match=r"1 of 8 positions have no distribution .* first at index \(1, 2\)"):
        js.js_distance(ref.to(device), var.to(device), backend=backend)
    ref[3, 0] = float("nan")
    with pytest.raises(ValueError, match="3 of 8 positions"):
        js.js_distance(ref.to(device), var.to(device), backend=backend)


def test_bad_arguments():
    ref, var = pair(4, 30, 1.0)
    for args, message in (
        ((ref[None], var), "must be"),
        ((ref, var[:3]), "must be"),
        ((ref, var[:, :7]), "must be"),
        ((ref, var.double()), "share a floating dtype"),
        ((ref.long(), var.long()), "floating"),
        ((ref[:, :0], var[:, :0]), "empty vocabulary"),
        ((ref, var, 0.0), "temperature"),
        ((ref, var, float("nan")), "temperature"),
        ((ref, var, 1.0, torch.ones(4)), "mask"),
        ((ref, var, 1.0, torch.ones(3, dtype=torch.bool)), "mask"),
    ):
        with pytest.raises(ValueError, match=message):
            js.js_distance(*args)


# -- from hidden states --


def hidden(T, D, V, spread, K=2, dtype=torch.float32):
    g = torch.Generator().manual_seed(7)
    ref = torch.randn(T, D, generator=g)
    var = ref + spread * torch.randn(K, T, D, generator=g)
    return tuple(x.to(dtype) for x in (ref, var, torch.randn(V, D, generator=g) * 0.3, torch.randn(V, generator=g)))


def exact(ref, var, weight, bias, temperature=1.0):
    head = lambda h: h.double() @ weight.double().T + bias.double()  # noqa: E731
    return js.js_distance_reference(head(ref), head(var), temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_hidden_states(backend, device, dtype):
    """Absolute bound: logits are accumulated in float32, so near q = 0 what is left is their rounding, about 1e-6; bfloat16 inputs do not raise it."""
    backend = "torch" if dtype == torch.float64 else backend
    for spread in (1e-3, 0.3):
        parts = hidden(13, 24, 333, spread, dtype=dtype)
        want = exact(*parts, 0.8)
        here = [x.to(device) for x in parts]
        for rows in (1, 5, 13, 100):
            got = js.js_distance_from_hidden(*here, 0.8, max_elements=rows * 333, backend=backend)
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert float((got.cpu() - want).abs().max()) < (1e-12 if dtype == torch.float64 else 2e-6)


def test_hidden_equal_states_are_exactly_zero(backend, device):
    for dtype in (torch.float32, torch.bfloat16):
        ref, var, weight, bias = (x.to(device) for x in hidden(9, 24, 333, 0.1, dtype=dtype))
        var[0] = ref
        var[1, 4] = ref[4]
        got = js.js_distance_from_hidden(ref, var, weight, bias, max_elements=4 * 333, backend=backend)
        assert got[0].tolist() == [0.0] * 9 and got[1, 4] == 0 and bool((got[1, :4] > 0).all())
        single = js.js_distance_from_hidden(ref, var[1], weight, bias, max_elements=4 * 333, backend=backend)
        assert torch.equal(single, got[1])


def test_hidden_equal_states_are_zero_however_products_round(monkeypatch):
    """Two calls of a matrix product need not round alike; here they never do."""
    ref, var, weight, bias = hidden(9, 24, 333, 0.1)
    var[0] = ref
    head, calls = js._head, iter(range(1000))
    monkeypatch.setattr(js, "_head", lambda *a: head(*a) * (1 + 1e-5 * next(calls)))
    assert js.js_distance_from_hidden(ref, var, weight, bias)[0].tolist() == [0.0] * 9
    ragged = js.js_distance_from_hidden(ref, var.reshape(18, 24), weight, bias, ref_index=torch.arange(9).repeat(2))
    assert ragged[:9].tolist() == [0.0] * 9 and bool((ragged[9:] > 0).all())


def test_hidden_mask(backend, device):
    ref, var, weight, bias = hidden(9, 24, 333, 0.1)
    mask = torch.tensor([True, False, True, True, False, False, True, True, False])
    want = exact(ref, var, weight, bias)
    ref[~mask] = float("nan")
    got = js.js_distance_from_hidden(*(x.to(device) for x in (ref, var, weight, bias)), mask=mask.to(device), max_elements=2 * 333, backend=backend).cpu()
    assert got[:, ~mask].abs().sum() == 0 and float((got[:, mask] - want[:, mask]).abs().max()) < 2e-6


def test_hidden_ragged_variants(backend, device):
    """Each variant was replayed for some responses only: any order, repeats, rows never compared."""
    ref, var, weight, bias = hidden(11, 24, 333, 0.2, K=3)
    index = torch.tensor([9, 0, 0, 4, 9, 9, 3, 10, 0, 4])
    k = torch.tensor([0, 1, 2, 0, 2, 1, 1, 0, 0, 1])
    ref[5] = float("nan")  # not asked for, not looked at
    flat = var[k, index]
    flat[3] = ref[4]
    want = exact(ref[index], flat, weight, bias)
    here = [x.to(device) for x in (ref, flat, weight, bias)]
    for rows in (1, 2, 100):
        got = js.js_distance_from_hidden(*here, ref_index=index.to(device), max_elements=rows * 333, backend=backend).cpu()
        assert got.shape == (10,) and float((got - want).abs().max()) < 2e-6 and got[3] == 0
    nothing = js.js_distance_from_hidden(here[0], here[1][:0], *here[2:], ref_index=index[:0].to(device), backend=backend)
    assert nothing.shape == (0,)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made, and how many multiply-adds went into matrix products."""

    elements, products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.products += out.numel()
        return out


@pytest.mark.parametrize("ragged", [False, True])
def test_length_times_vocabulary_never_exists(ragged):
    T, V, K, limit = 400, 500, 3, 8000
    ref, var, weight, bias = hidden(T, 8, V, 0.2, K=K)
    index = torch.arange(T).repeat(K)
    with Largest() as seen:
        if ragged:
            js.js_distance_from_hidden(ref, var.reshape(-1, 8), weight, bias, ref_index=index, max_elements=limit)
        else:
            js.js_distance_from_hidden(ref, var, weight, bias, max_elements=limit)
    assert seen.elements <= max(limit, K * T * 8)
    assert seen.products == (K + 1) * T * V  # the reference's logits are computed once


def test_hidden_bad_arguments():
    ref, var, weight, bias = hidden(5, 8, 20, 0.1)
    index = torch.arange(5)
    for args, kw, message in (
        ((ref, var[:, :3], weight), {}, "must be"),
        ((ref, var, weight[:, :3]), {}, "weight must be"),
        ((ref, var, weight, bias[:3]), {}, "bias"),
        ((ref, var, weight.double()), {}, "dtype"),
        ((ref, var, weight), {"mask": torch.ones(4, dtype=torch.bool)}, "mask"),
        ((ref, var, weight), {"ref_index": index}, "ref_index"),
        ((ref, var[0], weight), {"ref_index": index.int()}, "int64"),
        ((ref, var[0], weight), {"ref_index": index, "mask": torch.ones(5, dtype=torch.bool)}, "no mask"),
        ((ref, var[0] * float("nan"), weight), {}, "5 of 5 positions"),
        ((ref, var, weight), {"temperature": -1.0}, "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            js.js_distance_from_hidden(*args, **kw)
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=r"\[0, 5\)"):
            js.js_distance_from_hidden(ref, var[0], weight, ref_index=torch.full((5,), wrong))


def test_no_gradient_is_recorded():
    ref, var, weight, bias = (x.requires_grad_() for x in hidden(5, 8, 20, 0.1))
    assert not js.js_distance_from_hidden(ref, var, weight, bias).requires_grad
    assert not js.js_distance(ref, var).requires_grad


def test_series_is_phi():
    """phi near 0 against its closed form in 40 digits."""
    mpmath.mp.dps = 40
    for terms, bound in ((js._PHI[torch.float32], 3e-8), (js._PHI[torch.float64], 1e-16)):
        for x in (1e-3, 0.3, 0.7, 1.0):
            y = mpmath.mpf(x)
            want = 1 - (mpmath.log(1 + mpmath.e**-y) + y / (1 + mpmath.e**y)) / mpmath.log(2)
            got = sum(mpmath.mpf(c) * y ** (2 * n) for n, c in enumerate(terms, 1))
            assert abs(got / want - 1) < bound
    assert math.isclose(js._PHI[torch.float32][0], 1 / 8 / math.log(2))
