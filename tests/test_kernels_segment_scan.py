"""kernels/segment_scan.py against plain float64 loops, on every backend (Triton under its interpreter)."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_common import LENGTHS, load, nan_memory, offsets, poisoned, ready  # noqa: F401

scan = load("kernels.segment_scan")
RAGGED = [0, 3, 1, 0, 0, 16, 17, 129, 40, 7, 0]


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(params=["numba", "torch", "triton"])
def backend(request, device):
    return ready(request.param, device)


def close(got, want, scale, dtype):
    """|got - want| <= bound * (the same scan of absolute values): for sums without cancellation that is the relative error."""
    bound = 1e-14 if dtype == torch.float64 else 1e-6
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = (got.double().cpu() - want).abs()
    assert bool((error <= bound * scale).all()), float((error / scale.clamp(min=1e-300)).max())


def check_all(lengths, dtype, backend, device, seed=0, flags=None):
    """Sum, scalar and tensor decay, forward and reverse, inclusive and exclusive, masked (NaN under the mask) and not."""
    g = torch.Generator().manual_seed(seed)
    cu = offsets(lengths)
    N = int(cu[-1])
    values, decay = torch.randn(N, generator=g).to(dtype), torch.rand(N, generator=g).to(dtype)
    some = torch.rand(N, generator=g) < 0.7
    for masked, reverse, exclusive in flags or itertools.product((False, True), repeat=3):
        mask = some if masked else None
        v, d = (torch.where(some, x, float("nan")) if masked else x for x in (values, decay))
        on = {"cu_seqlens": cu.to(device), "mask": None if mask is None else poisoned(mask.to(device)), "backend": backend}
        way = {"reverse": reverse, "exclusive": exclusive}
        got = scan.segment_cumsum(poisoned(v.to(device)), **on, **way)
        close(got, *(scan.segment_cumsum_reference(x, cu, mask, **way) for x in (v.double(), v.double().abs())), dtype)
        for rate in (0.5, d):  # 0.5 is exact in every dtype
            rate_here, rate64 = (poisoned(rate.to(device)), rate.double()) if isinstance(rate, torch.Tensor) else (rate, rate)
            got = scan.segment_scan(poisoned(v.to(device)), rate_here, **on, **way)
            close(got, *(scan.segment_scan_reference(x, rate64, cu, mask, **way) for x in (v.double(), v.double().abs())), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ragged_segments(backend, device, dtype):
    few = [(False, True, False), (True, False, True)] if backend == "triton" and dtype != torch.float32 else None
    check_all(RAGGED, dtype, backend, device, flags=few)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_alone(backend, device, length):
    check_all([length], torch.float32, backend, device, seed=length, flags=[(True, True, False), (False, False, True)])


def test_lengths_far_from_the_average(backend, device):
    """Segments much longer than a block beside empty ones."""
    check_all([0, 2500, 0, 0, 1, 2, 0, 0, 0, 0, 3, 0], torch.float32, backend, device, flags=[(True, True, False), (True, False, True)])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_values(backend, device, lengths):
    cu = offsets(lengths, device)
    empty = torch.empty(0, device=device)
    assert scan.segment_cumsum(empty, cu, backend=backend).shape == (0,)
    assert scan.segment_scan(empty, empty, cu, backend=backend).shape == (0,)
    stats = scan.segment_stats(empty, cu, backend=backend)
    assert stats.count.tolist() == [0] * len(lengths) and stats.max.tolist() == [-torch.inf] * len(lengths)
    assert stats.mean.tolist() == stats.second_moment.tolist() == stats.ess.tolist() == [0.0] * len(lengths)


def test_more_segments_than_a_grid_axis_holds(backend, device):
    lengths = torch.arange(70_001) % 4
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.arange(int(cu[-1])).remainder(97).float() - 40  # small integers: every sum is exact
    first = cu[:-1].repeat_interleave(lengths)
    total = torch.cat([torch.zeros(1), values.cumsum(0)])
    here = [x.to(device) for x in (values, cu)]
    assert torch.equal(scan.segment_cumsum(*here, backend=backend).cpu(), total[1:] - total[first])
    stats = scan.segment_stats(*here, backend=backend)
    assert torch.equal(stats.count.cpu(), lengths)
    sums = total[cu[1:]] - total[cu[:-1]]
    assert torch.equal(stats.mean.cpu(), (sums.double() / lengths.clamp(min=1)).float())


def test_small_values_survive_beside_huge_ones(backend, device):
    """Exact equality: a difference of global prefix sums would round the small ones away."""
    tail = [1.0, 2.0, 3.0, 0.5]
    values = torch.tensor([1e8, *tail, -1e8, *tail, 1e8, 3e8], device=device)
    cu = torch.tensor([0, 5, 10, 12], device=device)
    want = [1e8 + 6.5, 6.5, 5.5, 3.5, 0.5, -1e8 + 6.5, 6.5, 5.5, 3.5, 0.5, 4e8, 3e8]
    assert scan.segment_cumsum(values, cu, reverse=True, backend=backend).tolist() == torch.tensor(want).tolist()
    assert scan.segment_scan(values, 1.0, cu, backend=backend).tolist() == torch.tensor(want).tolist()
    forward = scan.segment_cumsum(values, cu, backend=backend)[5:].tolist()
    assert forward == torch.tensor([-1e8, -1e8 + 1, -1e8 + 3, -1e8 + 6, -1e8 + 6.5, 1e8, 4e8]).tolist()


def test_sum_of_many_blocks_does_not_drift(backend, device):
    """float32 running sums of 0.1 would be off by 1e-4 here; the bound is a few rounding errors."""
    n = 100_000 if backend != "triton" else 20_000
    got = scan.segment_cumsum(torch.full((n,), 0.1, device=device), backend=backend).double().cpu()
    want = torch.full((n,), 0.1).double().cumsum(0)
    assert float(((got - want).abs() / want).max()) < 1e-6


def test_padded_rows_are_segments(backend, device):
    g = torch.Generator().manual_seed(1)
    lengths = [5, 0, 12, 1]
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    flat, decay = torch.randn(18, generator=g), torch.rand(18, generator=g)
    padded, padded_decay = torch.full((4, 12), float("nan")), torch.full((4, 12), float("nan"))
    padded[mask], padded_decay[mask] = flat, decay
    padded, padded_decay, m = padded.to(device), padded_decay.to(device), mask.to(device)
    want = scan.segment_scan_reference(flat.double(), decay.double(), offsets(lengths))
    got = scan.segment_scan(padded, padded_decay, mask=m, backend=backend)
    torch.testing.assert_close(got.cpu()[mask].double(), want, rtol=1e-6, atol=1e-6)
    assert got[~m].abs().sum() == 0  # padding after the last token: the carry from the right is still 0
    # a transposed, non-contiguous batch gives the same
    again = scan.segment_scan(padded.T.contiguous().T, padded_decay, mask=m, backend=backend)
    assert torch.equal(again, got)


def test_segments_inside_a_padded_batch(backend, device):
    ids = torch.tensor([[7, 7, 7, 2, 2], [2, 2, 9, 9, 9]], device=device)
    cu = scan.segment_offsets(ids)
    assert cu.tolist() == [0, 3, 5, 7, 10]
    got = scan.segment_cumsum(torch.ones(2, 5, device=device), cu, backend=backend)
    assert got.tolist() == [[1, 2, 3, 1, 2], [1, 2, 1, 2, 3]]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_gradients(backend, device, reverse, exclusive):
    """Against numerical differences in float64; Triton, where those take too long under the interpreter, against autograd through the plain loops."""
    g = torch.Generator().manual_seed(2)
    cu = offsets([0, 4, 1, 9, 0])
    values, decay = (torch.randn(14, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for mask in (None, torch.rand(14, generator=g) < 0.6):
        if backend == "triton":
            leaves = [x.detach().to(device).requires_grad_() for x in (values, decay)]
            on = None if mask is None else mask.to(device)
            weight = torch.randn(14, generator=g, dtype=torch.float64)
            out = scan.segment_scan(*leaves, cu.to(device), on, reverse, exclusive, backend)
            got = torch.autograd.grad(out, leaves, weight.to(device))
            ours = torch.autograd.grad(scan.segment_cumsum(leaves[0], cu.to(device), on, reverse, exclusive, backend), leaves[:1], weight.to(device))
            want = torch.autograd.grad(scan.segment_scan_reference(values, decay, cu, mask, reverse, exclusive), (values, decay), weight)
            want_sum = torch.autograd.grad(scan.segment_scan_reference(values, 1.0, cu, mask, reverse, exclusive), (values,), weight)
            for a, b in zip((*got, *ours), (*want, *want_sum)):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12)
        else:
            on = (cu, mask, reverse, exclusive, backend)
            assert torch.autograd.gradcheck(lambda v, d: scan.segment_scan(v, d, *on), (values, decay))  # noqa: B023
            assert torch.autograd.gradcheck(lambda v: scan.segment_cumsum(v, *on), (values,))  # noqa: B023


def test_gradient_keeps_dtype_and_ignores_masked_positions(backend, device):
    values = torch.tensor([1.0, 2.0, float("nan"), 4.0], dtype=torch.bfloat16, device=device, requires_grad=True)
    mask = torch.tensor([True, True, False, True], device=device)
    scan.segment_cumsum(values, mask=mask, backend=backend).sum().backward()
    assert values.grad.dtype == torch.bfloat16 and values.grad.tolist() == [4, 3, 0, 1]


# -- the estimators that scripts build from these scans, against their definitions as loops --


def gae_loop(rewards, values, mask, gamma, lam):
    """verl's form: masked tokens are skipped, the next value and the trace pass over them. One trajectory."""
    out, trace, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            trace = rewards[t] + gamma * next_value - values[t] + gamma * lam * trace
            next_value = values[t]
        out[t] = trace
    return out


def test_gae_over_observation_tokens(backend, device):
    g = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(5, 40, generator=g).double(), torch.randn(5, 40, generator=g).double()
    mask = (torch.rand(5, 8, generator=g) < 0.6).repeat_interleave(5, 1)
    r, v, m = rewards.to(device), values.to(device), mask.to(device)
    delta = r + 0.99 * scan.segment_scan(v, 0.0, mask=m, exclusive=True, backend=backend) - v
    got = scan.segment_scan(delta, 0.99 * 0.95, mask=m, backend=backend)
    want = torch.stack([gae_loop(*row, 0.99, 0.95) for row in zip(rewards, values, mask)])
    torch.testing.assert_close(got.cpu()[mask], want[mask], rtol=1e-12 if backend != "triton" else 1e-6, atol=1e-12 if backend != "triton" else 1e-6)


def test_mpo_turn_anchor_is_a_token_scan(backend, device):
    """The turn anchor equals a token scan with V_{t,1} broadcast over its turn, inner decay 1 and the turn's last token decaying by lambda."""
    g = torch.Generator().manual_seed(4)
    lengths, lam, reward = [3, 1, 6, 2], 0.8, 1.5
    cu = offsets(lengths)
    first_value = torch.randn(4, generator=g).double()
    turn_delta = torch.cat([first_value[1:], torch.zeros(1).double()]) - first_value
    turn_delta[-1] += reward
    turn = scan.segment_scan(turn_delta.to(device), lam, backend=backend).cpu()
    broadcast = first_value.repeat_interleave(torch.tensor(lengths))
    delta = torch.cat([broadcast[1:], torch.zeros(1).double()]) - broadcast
    delta[-1] += reward
    decay = torch.ones(12).double()
    decay[cu[1:] - 1] = lam
    token = scan.segment_scan(delta.to(device), decay.to(device), backend=backend).cpu()
    torch.testing.assert_close(token, turn.repeat_interleave(torch.tensor(lengths)), rtol=1e-6, atol=1e-6)
    # second pass, cut at turn boundaries
    inner = scan.segment_scan(delta.to(device), 0.95, cu.to(device), backend=backend).cpu()
    for start, end in itertools.pairwise(cu.tolist()):
        for i in range(start, end):
            assert abs(float(inner[i]) - sum(0.95 ** (j - i) * float(delta[j]) for j in range(i, end))) < 1e-6


def test_vagen_two_levels(backend, device):
    """Pass 1 over turn ends; pass 2 inside each turn with the turn's advantage as reward of its last token, which then has exactly that advantage."""
    g = torch.Generator().manual_seed(5)
    lengths, g_high, lam = [4, 2, 5], 0.9, 0.95
    cu = offsets(lengths)
    values, turn_rewards = torch.randn(11, generator=g).double(), torch.randn(3, generator=g).double()
    ends = cu[1:] - 1
    next_end = torch.cat([values[ends][1:], torch.zeros(1).double()])
    high = scan.segment_scan((turn_rewards + g_high * next_end - values[ends]).to(device), g_high * lam, backend=backend).cpu()
    rewards = torch.zeros(11).double()
    rewards[ends] = high + values[ends]
    after = scan.segment_scan(values.to(device), 0.0, cu.to(device), exclusive=True, backend=backend).cpu()
    got = scan.segment_scan((rewards + after - values).to(device), lam, cu.to(device), backend=backend).cpu()
    want_high, trace = [], 0.0
    for t in reversed(range(3)):
        trace = float(turn_rewards[t] + g_high * next_end[t] - values[ends[t]]) + g_high * lam * trace
        want_high.insert(0, trace)
    for turn, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        trace = 0.0
        for i in reversed(range(start, end)):
            next_value = float(values[i + 1]) if i + 1 < end else 0.0
            reward = want_high[turn] + float(values[i]) if i + 1 == end else 0.0
            trace = reward + next_value - float(values[i]) + lam * trace
            assert abs(float(got[i]) - trace) < 2e-6
        assert abs(float(got[end - 1]) - want_high[turn]) < 2e-6


# -- statistics --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", [RAGGED, LENGTHS])
def test_stats(backend, device, dtype, lengths):
    g = torch.Generator().manual_seed(6)
    cu = offsets(lengths)
    values = (torch.rand(int(cu[-1]), generator=g) + 0.1).to(dtype)
    some = torch.rand(len(values), generator=g) < 0.5
    for mask in (None, some):
        v = values if mask is None else torch.where(mask, values, float("nan"))
        got = scan.segment_stats(poisoned(v.to(device)), cu.to(device), None if mask is None else poisoned(mask.to(device)), backend=backend)
        want = scan.segment_stats_reference(v.double(), cu, mask)
        assert torch.equal(got.count.cpu(), want.count)
        for a, b in zip(got[1:], want[1:]):
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0)


def test_stats_by_hand(backend, device):
    w = torch.tensor([1.0, 1.0, 3.0, -2.0, 0.0, 0.0], device=device)
    s = scan.segment_stats(w, torch.tensor([0, 3, 4, 6], device=device), backend=backend)
    assert s.count.tolist() == [3, 1, 2]
    assert s.mean.tolist() == pytest.approx([5 / 3, -2, 0])
    assert s.second_moment.tolist() == pytest.approx([11 / 3, 4, 0])
    assert s.ess.tolist() == pytest.approx([25 / 11, 1, 0])
    assert s.max.tolist() == [3, -2, 0]


def test_stats_of_extreme_values(backend, device):
    w = torch.tensor([1e25, 1e25, -1e25, 1e-30, 1e-30, 1e8, 1.0], device=device)
    s = scan.segment_stats(w, torch.tensor([0, 2, 5, 7], device=device), backend=backend)
    assert s.ess.tolist() == pytest.approx([2.0, 1.0, 1.0])  # the squares leave float32, the ratio does not
    assert s.mean.tolist() == pytest.approx([1e25, -1e25 / 3, (1e8 + 1) / 2], rel=1e-6)


# -- what is refused --


@pytest.mark.parametrize("where", ["values", "decay"])
def test_nan_is_reported(backend, device, where):
    values, decay = torch.ones(6, device=device), torch.ones(6, device=device)
    {"values": values, "decay": decay}[where][3] = float("nan")
    with pytest.raises(ValueError, match=r"segment_scan: NaN at 1 of 6 positions, the first at flat index 3"):
        scan.segment_scan(values, decay, reverse=False, backend=backend)
    if where == "values":
        for f in (scan.segment_cumsum, scan.segment_stats):
            with pytest.raises(ValueError, match="NaN at 1 of 6"):
                f(values, backend=backend)


def test_infinities_pass(backend, device):
    out = scan.segment_cumsum(torch.tensor([1.0, float("inf"), 2.0], device=device), backend=backend)
    assert out.tolist() == [1, torch.inf, torch.inf]


def test_bad_arguments():
    x = torch.ones(6)
    for cu, message in (
        (torch.tensor([0, 6], dtype=torch.int32), "int64"),
        (torch.tensor([0, 5]), "from 0 to the number of values, 6"),
        (torch.tensor([1, 6]), "got 1 to 6"),
        (torch.tensor([0, 4, 3, 6]), "without falling"),
        (torch.zeros(0, dtype=torch.int64), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            scan.segment_cumsum(x, cu)
    with pytest.raises(ValueError, match="floating"):
        scan.segment_cumsum(torch.ones(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask must be bool"):
        scan.segment_cumsum(x, mask=torch.ones(6))
    with pytest.raises(ValueError, match="mask must be bool"):
        scan.segment_stats(x, mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="decay"):
        scan.segment_scan(x, torch.ones(5))


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_offsets_are_the_runs(rows, data):
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    want = [0]
    for row in rows:
        for _, run in itertools.groupby(row):
            want.append(want[-1] + len(list(run)))
    assert scan.segment_offsets(ids).tolist() == want
    inner = sorted(data.draw(st.lists(st.integers(0, ids.numel()), max_size=3)))
    cut = scan.segment_offsets(ids.reshape(-1), torch.tensor([0, *inner, ids.numel()]))
    flat = ids.reshape(-1).tolist()
    breaks = {0, ids.numel(), *inner} | {i for i in range(1, len(flat)) if flat[i] != flat[i - 1]}
    assert cut.tolist() == sorted(breaks)


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 2**20), st.booleans(), st.booleans(), st.sampled_from(["numba", "torch"]))
@settings(max_examples=80, deadline=None)
def test_any_layout(lengths, seed, reverse, exclusive, backend):
    ready(backend, "cpu")
    g = torch.Generator().manual_seed(seed)
    cu = offsets(lengths)
    v, d = (torch.randn(int(cu[-1]), generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(len(v), generator=g) < 0.5
    got = scan.segment_scan(v, d, cu, mask, reverse, exclusive, backend)
    torch.testing.assert_close(got, scan.segment_scan_reference(v, d, cu, mask, reverse, exclusive), rtol=1e-10, atol=1e-10)


# -- cost --


def test_importing_needs_neither_triton_nor_numba():
    code = "import sys, kernels.segment_scan, kernels.js_divergence, kernels.fp8; assert not {'triton', 'numba'} & set(sys.modules)"
    import os

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if not torch.cuda.is_available():
        subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_extra_memory_is_at_most_three_times_the_input():
    code = """
import torch
from kernels import segment_scan as s
def peak():  # bytes
    return 1024 * next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
y, d, m = torch.rand(2**24), torch.rand(2**24), torch.ones(2**24, dtype=torch.bool)
cu = torch.arange(0, 2**24 + 1, 256)
small = (y[:512], d[:512], cu[:3], m[:512])
calls = (lambda y, d, cu, m: s.segment_scan(y, d, cu, m), lambda y, d, cu, m: s.segment_cumsum(y, cu, m), lambda y, d, cu, m: s.segment_stats(y, cu, m))
for call in calls: call(*small)
open('/proc/self/clear_refs', 'w').write('5')  # the peak starts again from here
before = peak()
for call in calls: call(y, d, cu, m)
print((peak() - before) / (4 * 2**24))
"""
    ready("numba", "cpu")
    ratio = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0.5 < ratio < 3  # the output alone is 1
