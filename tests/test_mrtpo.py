"""mrtpo.py's pure functions against slow float64 loops, tables worked out by hand, and properties."""

import dataclasses
import json
import math
import random
import threading

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import mrtpo
from common.engine import Sample, Sampling
from common.packing import EMPTY, forward_hidden, pack
from mrtpo import Args, Response

NAN = math.nan


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def on_two_ranks(work):
    """[work(0, all_sum), work(1, all_sum)] of two threads whose all_sum adds what both pass, in rank order."""
    barrier, box, results = threading.Barrier(2, timeout=20), [None, None], [None, None]

    def run(rank):
        def all_sum(x):
            box[rank] = x
            barrier.wait()
            total = box[0] + box[1]
            barrier.wait()
            return total

        results[rank] = work(rank, all_sum)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


# ------------------------------------------------------------------------------------------------------- (4) credit weights


def slow_weights(q, lengths, beta, cap):
    """The definition, number by number: q is [N][K] of floats."""
    out, at = [], 0
    for n in lengths:
        rows = q[at : at + n]
        columns = []
        for k in range(len(q[0])):
            column = [row[k] for row in rows]
            mean = math.fsum(column) / n if not any(math.isnan(v) for v in column) else NAN
            if math.isnan(mean) or mean < 1e-8:
                columns.append([1.0] * n)
                continue
            w = [min((1 - beta) + beta * v / mean, cap) for v in column]
            centre = math.fsum(w) / n
            columns.append([v / centre for v in w])
        out += [list(row) for row in zip(*columns)]
        at += n
    return out


@st.composite
def distances(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    names = draw(st.integers(1, 3))
    rows = []
    for n in lengths:
        columns = []
        for _ in range(names):
            kind = draw(st.sampled_from(["any", "any", "spike", "nan", "zero", "tiny"]))
            value = {"any": st.floats(0, 1), "spike": st.sampled_from([0.0, 1e-6, 1.0]), "tiny": st.floats(0, 9e-9)}
            column = [NAN] * n if kind == "nan" else [0.0] * n if kind == "zero" else draw(st.lists(value[kind], min_size=n, max_size=n))
            columns.append(column)
        rows += [list(row) for row in zip(*columns)]
    return lengths, rows


@settings(max_examples=60, deadline=None)
@given(distances(), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.sampled_from([1.0, 1.5, 5.0, 1e9]))
def test_credit_weights_against_a_loop(data, beta, cap):
    lengths, q = data
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    w = mrtpo.credit_weights(f64(q), ids, len(lengths), beta, cap)
    assert w.dtype == torch.float64
    assert torch.allclose(w, f64(slow_weights(q, lengths, beta, cap)), rtol=1e-12, atol=1e-12)
    means = torch.stack([part.mean(0) for part in w.split(lengths)])
    assert (means - 1).abs().max() <= 1e-12  # credit is conserved
    assert w.min() >= 1 - beta - 1e-12  # no token falls under its share
    if beta == 0:
        assert torch.equal(w, torch.ones_like(w))


def test_credit_weights_by_hand():
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    q = f64([[0.8, NAN], [0.0, NAN], [0.0, NAN], [0.0, NAN], [0.1, 0.0], [0.3, 0.0]])
    # mean 0.2: 0.5 + 0.5 * 4 = 2.5 and 0.5; second response: mean 0.2, 0.75 and 1.25; no replay, or no distance: 1
    want = f64([[2.5, 1], [0.5, 1], [0.5, 1], [0.5, 1], [0.75, 1], [1.25, 1]])
    assert torch.allclose(mrtpo.credit_weights(q, ids, 2, 0.5, 5.0), want, rtol=0, atol=1e-15)
    # cap 2: 2, 0.5, 0.5, 0.5 have mean 0.875
    capped = mrtpo.credit_weights(q, ids, 2, 0.5, 2.0)[:4, 0]
    assert torch.allclose(capped, f64([2, 0.5, 0.5, 0.5]) / 0.875, rtol=0, atol=1e-15)
    assert mrtpo.credit_weights(torch.empty(0, 2, dtype=torch.float64), torch.empty(0, dtype=torch.int64), 0, 0.5, 5.0).shape == (0, 2)


def test_a_mean_distance_of_1e_8_is_the_border():
    ids = torch.tensor([0, 0])
    assert torch.equal(mrtpo.credit_weights(f64([[0.0], [1.9e-8]]), ids, 1, 0.5, 5.0), torch.ones(2, 1, dtype=torch.float64))
    assert torch.allclose(mrtpo.credit_weights(f64([[0.0], [2.1e-8]]), ids, 1, 0.5, 5.0), f64([[0.5], [1.5]]))


# --------------------------------------------------------------------------------------------------- (1) group advantages


def slow_advantages(rewards, groups, eps):
    out = [[0.0] * len(rewards[0]) for _ in rewards]
    varies = [[False] * len(rewards[0]) for _ in rewards]
    for k in range(len(rewards[0])):
        for g in set(groups):
            rows = [i for i in range(len(rewards)) if groups[i] == g and not math.isnan(rewards[i][k])]
            values = [rewards[i][k] for i in rows]
            if len(set(values)) < 2:
                continue
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            for i in rows:
                out[i][k], varies[i][k] = (rewards[i][k] - mean) / (std + eps), True
    return out, varies


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0.0, 1.0, 0.3, 0.1, -2.5, NAN]), min_size=2, max_size=2)), min_size=1, max_size=14),
    st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_group_advantages_against_a_loop(rows, eps):
    groups, rewards = [7 * g - 5 for g, _ in rows], [r for _, r in rows]
    got, varies = mrtpo.group_advantages(f64(rewards), torch.tensor(groups), eps)
    want, want_varies = slow_advantages(rewards, groups, eps)
    assert torch.allclose(got, f64(want), rtol=1e-12, atol=1e-12)
    assert varies.tolist() == want_varies
    assert bool((got[~varies] == 0).all())  # exactly, not nearly: no replay and no gradient depends on it
    assert not got.isnan().any()


def test_group_advantages_table():
    got = mrtpo.group_advantages(f64([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), 1e-12)[0]
    assert torch.allclose(got[:, 0], f64([1.5, -0.5, -0.5, -0.5]), rtol=0, atol=1e-10)  # ddof 1; ddof 0 would give 1.732
    got = mrtpo.group_advantages(f64([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), 0.5)[0]
    assert torch.allclose(got[:, 0], f64([0.75, -0.25, -0.25, -0.25]), rtol=0, atol=1e-15)  # eps is added to the std of 0.5
    equal = mrtpo.group_advantages(f64([[0.1], [0.1], [0.1]]), torch.zeros(3, dtype=torch.int64), 0.0)[0]  # the mean of three 0.1 is not 0.1
    assert equal.tolist() == [[0.0], [0.0], [0.0]]
    single, varies = mrtpo.group_advantages(f64([[5.0], [1.0], [0.0]]), torch.tensor([0, 1, 1]), 0.0)
    assert single[0].tolist() == [0.0]
    assert varies.tolist() == [[False], [True], [True]]
    empty, _ = mrtpo.group_advantages(torch.empty(0, 3, dtype=torch.float64), torch.empty(0, dtype=torch.int64), 1e-4)
    assert empty.shape == (0, 3)


def test_rewards_are_normalised_one_by_one():
    """(1, 0) and (0, 1) have the same sum; normalised apart they stay different (GDPO), which is what the paper builds on."""
    rewards, groups = f64([[1, 0], [0, 1], [0, 0], [0, 1]]), torch.zeros(4, dtype=torch.int64)
    got = mrtpo.group_advantages(rewards, groups, 0.0)[0]
    assert torch.allclose(got[:, 0], f64([1.5, -0.5, -0.5, -0.5]))
    assert torch.allclose(got[:, 1], f64([-0.5, 0.5, -0.5, 0.5]) * math.sqrt(3))


def test_groups_come_from_their_ids():
    """Two groups whose rows are interleaved and whose rewards are alike: each is normalised alone."""
    rewards, groups = f64([[1], [1], [0], [1], [1], [1]]), torch.tensor([4, 9, 4, 9, 4, 9])
    got, varies = mrtpo.group_advantages(rewards, groups, 0.0)
    assert torch.allclose(got[[0, 2, 4], 0], f64([1, -2, 1]) / math.sqrt(3))
    assert got[[1, 3, 5], 0].tolist() == [0, 0, 0]
    assert varies[:, 0].tolist() == [True, False] * 3


# ------------------------------------------------------------------------------------------------------------------- SAW


def test_saw_weights_by_hand():
    rewards = f64([[1, 1, 5], [0, 1, 5], [1, NAN, 5], [0, 0, 5]])
    cv = [math.sqrt(1 / 3) / 0.5, math.sqrt(1 / 3) / (2 / 3), 0.0]  # ddof 1, over the measured values
    want = [3 * c / sum(cv) for c in cv]
    assert torch.allclose(mrtpo.saw_weights(rewards), f64(want), rtol=1e-7, atol=0)
    negative = mrtpo.saw_weights(f64([[-1, 1], [-3, 3], [-2, 1]]))  # |mean|
    assert bool((negative > 0).all())


def test_saw_of_a_reward_that_nobody_measured():
    got = mrtpo.saw_weights(f64([[1, NAN, 1], [0, NAN, 3]]))
    assert got[1] == 0
    assert got.sum() == pytest.approx(2, rel=1e-6)  # the present rewards share their number
    assert mrtpo.saw_weights(f64([[1, 2], [1, 2]])).tolist() == [0, 0]  # nothing varies: no advantage to weight


def test_saw_weights_over_two_ranks():
    rewards = f64([[1, 0.2], [0, 0.9], [1, 0.4], [0, NAN], [1, 0.1]])
    parts = on_two_ranks(lambda rank, all_sum: mrtpo.saw_weights(rewards[[0, 1]] if rank == 0 else rewards[[2, 3, 4]], all_sum))
    for part in parts:
        assert torch.allclose(part, mrtpo.saw_weights(rewards), rtol=1e-12, atol=0)


# --------------------------------------------------------------------------------------------------------------- shuffled


def test_shuffle_stays_inside_the_response_and_keeps_rewards_together():
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 5, 40, 2]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    w = torch.stack([torch.arange(48.0), torch.arange(48.0) + 100], 1)
    out = mrtpo.shuffle_within(w, ids, torch.rand(48, generator=generator, dtype=torch.float64))
    assert torch.equal(out[:, 1], out[:, 0] + 100)  # one order for all rewards
    for before, after in zip(w[:, 0].split(lengths), out[:, 0].split(lengths)):
        assert sorted(after.tolist()) == before.tolist()
    assert not torch.equal(out[6:46], w[6:46])
    assert out[0].tolist() == [0.0, 100.0]


def test_token_advantages():
    got = mrtpo.token_advantages(f64([[2, -1], [0, 3]]), f64([[1, 1], [0.5, 2], [4, 1]]), torch.tensor([0, 0, 1]))
    assert got.tolist() == [1.0, -1.0, 3.0]


# -------------------------------------------------------------------------------------------------------- normalisation


def test_normalise_tokens_against_a_loop_and_over_two_ranks():
    rng = np.random.default_rng(5)
    s = torch.from_numpy(rng.normal(3, 2, 37))
    values = s.tolist()
    mean = math.fsum(values) / 37
    var = math.fsum((v - mean) ** 2 for v in values) / 36
    want = f64([(v - mean) / math.sqrt(var + 1e-8) for v in values])
    assert torch.allclose(mrtpo.normalise_tokens(s), want, rtol=1e-12, atol=1e-13)
    for cut in (1, 20, 37):  # one rank may have nothing
        parts = on_two_ranks(lambda rank, all_sum, cut=cut: mrtpo.normalise_tokens(s[:cut] if rank == 0 else s[cut:], all_sum))
        assert torch.allclose(torch.cat(parts), want, rtol=1e-12, atol=1e-13)


def test_normalise_tokens_without_spread():
    assert mrtpo.normalise_tokens(torch.full((5,), 0.25, dtype=torch.float64)).tolist() == [0.0] * 5
    assert mrtpo.normalise_tokens(f64([2.0])).tolist() == [0.0]
    assert mrtpo.normalise_tokens(f64([])).tolist() == []
    small = mrtpo.normalise_tokens(f64([0, 1e-4]))  # the 1e-8 stands under the root: var 5e-9
    assert torch.allclose(small, f64([-0.5e-4, 0.5e-4]) / math.sqrt(1.5e-8))


# ------------------------------------------------------------------------------------------------------------- the loss


def slow_loss(lp, old, engine, adv, weight, low, high, cap, ref, kl):
    total, clipped = 0.0, 0
    for t in range(len(lp)):
        ratio = math.exp(max(-20.0, min(20.0, lp[t] - old[t])))
        loss = -min(ratio * adv[t], min(max(ratio, 1 - low), 1 + high) * adv[t])
        if cap > 0:
            loss *= min(math.exp(max(-20.0, min(20.0, old[t] - engine[t]))), cap)
        if ref is not None:
            d = max(-20.0, min(20.0, ref[t] - lp[t]))
            loss += kl * min(math.exp(d) - d - 1, 10.0)
        total += weight[t] * loss
        clipped += (adv[t] > 0 and ratio > 1 + high) or (adv[t] < 0 and ratio < 1 - low)
    return total, clipped / len(lp)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(0.2, 0.2), (0.1, 0.4), (1.0, 0.0)]),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_policy_loss_against_a_loop(seed, clip, cap, kl):
    rng = np.random.default_rng(seed)
    n = 11
    lp, old, engine, ref = (rng.normal(-2, 0.7, n) for _ in range(4))
    lp[0], old[1], ref[2] = old[0], -45.0, 30.0  # ratio 1; beyond the clamp of 20; k3 beyond its cap
    adv, weight = rng.normal(0, 1, n), rng.random(n)
    adv[3] = 0.0
    reference = ref if kl else None
    x = torch.from_numpy(lp).requires_grad_()
    loss, metrics = mrtpo.policy_loss(
        x, *(torch.from_numpy(a) for a in (old, engine, adv, weight)), *clip, cap, None if reference is None else torch.from_numpy(reference), kl
    )
    want, clipfrac = slow_loss(lp, old, engine, adv, weight, *clip, cap, reference, kl)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-10, abs=1e-10)
    total, count = metrics["losses/clipfrac"]
    assert total / count == pytest.approx(clipfrac)
    assert ("losses/kl" in metrics) == bool(kl)
    if kl == 0:
        loss.backward()
        for t in (2, 4, 5):  # token by token: beside the clamped ratio of e^20 a difference of the sums has no digits left

            def alone(move, t=t):
                one = [[x[t]] for x in (old, engine, adv, weight)]
                return slow_loss([lp[t] + move], *one, *clip, cap, None, 0)[0]

            assert float(x.grad[t]) == pytest.approx((alone(1e-6) - alone(-1e-6)) / 2e-6, rel=1e-5, abs=1e-8)


def test_the_importance_weight_is_outside_the_clip():
    """ratio 1.5, A = 1, clip 1.2, trainer twice as likely as the engine: -1.2 * 2. Inside the ratio it would be -min(3, 1.2) = -1.2."""
    one = torch.ones(1, dtype=torch.float64)
    old = f64([-1.0])
    loss, metrics = mrtpo.policy_loss(old + math.log(1.5), old, old - math.log(2), one, one, 0.2, 0.2, tis_cap=5.0)
    assert float(loss) == pytest.approx(-2.4)
    assert metrics["rollout/tis_capped_frac"] == (0.0, 1.0)
    loss, metrics = mrtpo.policy_loss(old + math.log(1.5), old, old - math.log(2), one, one, 0.2, 0.2, tis_cap=1.5)
    assert float(loss) == pytest.approx(-1.8)
    assert metrics["rollout/tis_capped_frac"] == (1.0, 1.0)
    loss, _ = mrtpo.policy_loss(old, old, old + math.log(4), one, one, 0.2, 0.2, tis_cap=2.0)  # small weights are not raised
    assert float(loss) == pytest.approx(-0.25)


def test_both_sides_of_the_clip():
    old, one = f64([-1.0]), torch.ones(1, dtype=torch.float64)

    def value(ratio, adv):
        loss, metrics = mrtpo.policy_loss(old + math.log(ratio), old, old, one * adv, one, 0.1, 0.3)
        return float(loss), metrics["losses/clipfrac"][0]

    assert value(1.5, 1) == (pytest.approx(-1.3), 1.0)
    assert value(1.5, -1) == (pytest.approx(1.5), 0.0)  # the worse of the two: no clip where it would help
    assert value(0.5, 1) == (pytest.approx(-0.5), 0.0)
    assert value(0.5, -1) == (pytest.approx(0.9), 1.0)
    assert value(1.0, 1) == (pytest.approx(-1.0), 0.0)


def test_reported_kl_estimates():
    """approx_kl is k3 of the step, old_approx_kl is k1, losses/kl is k3 against the reference; by hand for one token."""
    lp, old, ref = -1.0, -1.3, -0.6
    _, metrics = mrtpo.policy_loss(f64([lp]), f64([old]), f64([old]), f64([1.0]), f64([1.0]), 0.2, 0.2, 0.0, f64([ref]), 0.1)
    assert metrics["losses/approx_kl"][0] == pytest.approx(math.exp(0.3) - 1 - 0.3)
    assert metrics["losses/old_approx_kl"][0] == pytest.approx(-0.3)
    assert metrics["losses/kl"][0] == pytest.approx(math.exp(0.4) - 1 - 0.4)


def test_k3_is_the_kl_to_the_reference_on_own_samples():
    """Summed over a 5-token vocabulary under pi, the term of the loss is KL(pi || ref), not the reverse."""
    logp, logr = f64([0.1, 1.0, -0.5, 0.3, 0.0]).log_softmax(0), f64([0.7, 0.2, 0.0, -0.3, 0.4]).log_softmax(0)
    zero = torch.zeros(5, dtype=torch.float64)
    loss, _ = mrtpo.policy_loss(logp, logp, logp, zero, logp.exp(), 0.2, 0.2, 0.0, logr, 1.0)
    assert float(loss) == pytest.approx(float((logp.exp() * (logp - logr)).sum()), rel=1e-10)


# ------------------------------------------------------------------------------------------------------------------ OPSD


def slow_js(s, t, b):
    s, t = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (s, t))
    if b == 0:
        return float((t * np.log(t / s)).sum())
    if b == 1:
        return float((s * np.log(s / t)).sum())
    m = (1 - b) * s + b * t
    return float(b * (t * np.log(t / m)).sum() + (1 - b) * (s * np.log(s / m)).sum())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 0.5, 0.1, 0.83]))
def test_generalised_js_against_numpy(seed, b):
    rng = np.random.default_rng(seed)
    s, t = rng.normal(0, 3, (4, 7)), rng.normal(0, 3, (4, 7))
    got = mrtpo.generalised_js(torch.from_numpy(s), torch.from_numpy(t), b)
    assert torch.allclose(got, f64([slow_js(a, c, b) for a, c in zip(s, t)]), rtol=1e-9, atol=1e-12)
    if b == 0.5:
        assert torch.allclose(got, mrtpo.generalised_js(torch.from_numpy(t), torch.from_numpy(s), 0.5), rtol=1e-12, atol=1e-14)
        assert bool((got <= math.log(2) + 1e-12).all())


def test_generalised_js_extremes():
    a, b = f64([[0.0, -200.0, -400.0]]), f64([[-300.0, 0.0, -200.0]])
    assert float(mrtpo.generalised_js(a, b, 0.5)) == pytest.approx(math.log(2), rel=1e-12)  # disjoint, and nothing underflows to NaN
    assert float(mrtpo.generalised_js(a, a + 7, 0.3)) == pytest.approx(0, abs=1e-12)


# ---------------------------------------------------------------------------------------------------------- localisation


def test_tokens_for_share_by_hand():
    q = f64([0.1, 0.7, 0.1, 0.1, 0, 0, 1, 1, 1, 1, 1, 0.4, 0.4, 0.2])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3])
    got = mrtpo.tokens_for_share(q, ids, 5)
    # 0.7 is not enough, 0.7 + 0.1 is exactly 80 %; no distance: NaN; four of five equal ones; 0.4 + 0.4
    assert torch.allclose(got[[0, 2, 3]], f64([2 / 4, 4 / 5, 2 / 3]))
    assert got[1].isnan()
    assert got[4].isnan()  # a response without tokens here
    assert float(mrtpo.tokens_for_share(f64([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.int64), 1)) == 0.25


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=8), min_size=1, max_size=4))
def test_tokens_for_share_against_a_loop(rows):
    want = []
    for row in rows:
        mass, count, total = 0, 0, sum(row)
        for v in sorted(row, reverse=True):
            if 10 * mass >= 8 * total:
                break
            mass, count = mass + v, count + 1
        want.append(count / len(row) if total else NAN)
    q = f64([v / 20 for row in rows for v in row])
    ids = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    assert torch.allclose(mrtpo.tokens_for_share(q, ids, len(rows)), f64(want), equal_nan=True)


class Letters:
    """A tokenizer with one token per character."""

    def decode(self, ids, **kwargs):
        return "".join(chr(i) for i in ids)


def response(text, group=0, sample=0, stop=False, **kwargs):
    ids = [ord(c) for c in text] + ([ord("$")] if stop else [])
    return Response(group, sample, {"id": "t"}, [{"role": "user", "content": "q"}], [1, 2], ids, [-1.0] * len(ids), not stop, text, **kwargs)


def test_localisation_counts_replayed_responses_only():
    responses = [response("abcd"), response("ab"), response("abc")]
    q = f64([[1, 0], [0, 0], [0, 0], [0, 0], [NAN, 1], [NAN, 1], [1, NAN], [1, NAN], [1, NAN]])
    ids = torch.tensor([0] * 4 + [1] * 2 + [2] * 3)
    got = mrtpo.localisation(q, responses, ["a", "b", "c"][:2], ids)
    assert got["mrtpo/tokens_for_80pct/a"] == (pytest.approx(0.25 + 1.0), 2.0)
    assert got["mrtpo/tokens_for_80pct/b"] == (pytest.approx(1.0), 1.0)  # the first one was replayed without any distance
    none = mrtpo.localisation(torch.full((9, 1), NAN, dtype=torch.float64), responses, ["a"], ids)
    assert none == {"mrtpo/tokens_for_80pct/a": (0.0, 0.0)}


def test_region_lift_by_hand():
    responses = [response("ab cd", stop=True), response("abcd")]
    q = f64([[0.4], [0.2], [0.1], [0.2], [0.0], [0.1], [NAN], [NAN], [NAN], [NAN]])
    lift = mrtpo.region_lift(q, [0, 6, 10], responses, ["r"], Letters(), lambda text: [("head", 0, 2), ("tail", 3, 5)] if " " in text else [("no", 0, 4)])
    # mass 1.0 over 6 tokens: head 0.6 of it on 2, tail 0.2 on 2, other (the blank and the stop token) 0.2 on 2
    assert lift == {
        "mrtpo/region_lift/r/head": pytest.approx(0.6 / (2 / 6)),
        "mrtpo/region_lift/r/tail": pytest.approx(0.2 / (2 / 6)),
        "mrtpo/region_lift/r/other": pytest.approx(0.2 / (2 / 6)),
    }


# -------------------------------------------------------------------------------------------------------- token log-probs


@pytest.mark.parametrize("bias", [False, True])
def test_token_logprobs_in_chunks_equal_the_naive_ones(bias):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 6, generator=generator, requires_grad=True)
    weight = torch.randn(29, 6, generator=generator, requires_grad=True)
    offset = torch.randn(29, generator=generator, requires_grad=True) if bias else None
    target = torch.randint(0, 29, (13,), generator=generator)
    up = torch.randn(13, generator=generator)
    leaves = [hidden, weight] + ([offset] if bias else [])
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), None if offset is None else offset.double()) / 0.7
    logp = logits.log_softmax(-1)
    want = logp.gather(1, target[:, None])[:, 0]
    grads = torch.autograd.grad((want * up).sum(), leaves)
    for elements in (29, 29 * 4 + 5, 29 * 13, 2**24, 1):  # one row, four rows and an uneven rest, exactly all, everything, less than a row
        got, entropy = mrtpo.token_logprobs(hidden, weight, offset, target, 0.7, max_elements=elements)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=2e-6)
        assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=2e-5)  # of logits up to about 10, float32
        assert not entropy.requires_grad
        for g, w in zip(torch.autograd.grad((got * up).sum(), leaves), grads):
            assert torch.allclose(g, w, rtol=1e-4, atol=1e-5)


def test_chunks_keep_the_peak_down():
    """The logits of all tokens never exist at once: the largest tensor that appears has max_elements numbers."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor))
            return out

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    with Watch():
        logp, _ = mrtpo.token_logprobs(hidden, weight, None, torch.zeros(64, dtype=torch.int64), 1.0, max_elements=1000)
        logp.sum().backward()
    assert max(seen) <= 1000
    assert len(seen) > 6  # it did look


def tiny_model(seed=0, dtype=torch.float64, **kwargs):
    config = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | kwargs)).to(dtype).eval()
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # a fresh model is almost uniform: sharper distributions show a misplaced token
    torch.set_rng_state(state)
    return lm


@pytest.mark.parametrize("share", [True, False])
def test_first_answer_token_is_trained(share):
    """4 tokens: log-probs and gradients are those of positions 1..3 of the whole sequence when the prompt has one token, none shifted."""
    lm = tiny_model(dtype=torch.float32)
    policy = mrtpo.Policy(lm)
    ids = [5, 9, 33, 60]
    got, entropy = policy(pack([([5], [ids[1:]])], share), 0.8)
    logp = (lm(input_ids=torch.tensor([ids])).logits[0].double() / 0.8).log_softmax(-1)
    want = torch.stack([logp[t, ids[t + 1]] for t in range(3)])
    assert torch.allclose(got.double(), want, atol=1e-5)
    assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(-1)[:3], atol=1e-5)
    got[0].backward()  # the first answer token alone moves the weights
    assert lm.lm_head.weight.grad.abs().sum() > 0


def test_opsd_divergence_in_chunks_and_its_gradient(monkeypatch):
    student, teacher = tiny_model(1, torch.float32), tiny_model(2, torch.float32)
    batch = pack([([1, 2, 3], [[4, 5], [6, 7, 8]])])
    seen = pack([([1, 9, 2, 3], [[4, 5], [6, 7, 8]])])
    policy, start = mrtpo.Policy(student), mrtpo.Policy(teacher).requires_grad_(False)
    with torch.no_grad():
        hidden = start(seen, hidden_only=True)
    got = policy(batch, 1.1, teacher=(hidden, start.head(), 0.5))

    def logits(lm, prompt, answer):
        return lm(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double() / 1.1

    rows = [([1, 2, 3], [1, 9, 2, 3], a) for a in ([4, 5], [6, 7, 8])]
    want = torch.cat([mrtpo.generalised_js(logits(student, p, a), logits(teacher, t, a), 0.5) for p, t, a in rows])
    assert torch.allclose(got.double(), want, atol=1e-5)
    grads = torch.autograd.grad(got.sum(), list(student.parameters()), retain_graph=True)
    for g, w in zip(grads, torch.autograd.grad(want.sum(), list(student.parameters()))):
        assert torch.allclose(g, w.float(), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- (2) prompts


def test_with_blocks():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    out = mrtpo.with_blocks(messages, {"a": "one", "empty": "", "b": "two"})
    assert out == [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\nVerifier information:\na: one\nb: two"}]
    assert messages[-1]["content"] == "q"  # the input stays
    assert mrtpo.with_blocks(messages, {}) == messages == mrtpo.with_blocks(messages, {"a": ""})


def test_warm_start_shows_information_with_and_without_a_gap():
    tasks = mrtpo.envs.load("tools")
    few = dataclasses.replace(tasks, train=tasks.train[:300], eval=[])
    conversations = mrtpo.warm_start_conversations(few)
    assert conversations == mrtpo.warm_start_conversations(few)
    assert len(conversations) == 300
    shown = [c[-2]["content"].partition(mrtpo.BLOCKS_HEADER)[2] for c in conversations]
    assert 70 < sum(map(bool, shown)) < 130  # a third
    assert 0.2 < sum("\nformat: " in x and "\ncall: " in x for x in shown) / sum(map(bool, shown)) < 0.6  # all blocks in two fifths of them
    env = tasks.make_env()
    for task, conversation, text in zip(few.train, conversations, shown):
        if text:  # where information is shown the answer is right
            env.reset(task)
            assert env.step(conversation[-1]["content"])[4]["success"] == 1


# ------------------------------------------------------------------------------------------------------------- (3) replay


def encode_words(messages):
    """One prompt id below 61 per word."""
    return [sum(map(ord, word)) * 7 % 60 + 1 for word in " ".join(m["content"] for m in messages).split()]


def replay_case():
    def make(group, sample, ids, blocks):
        messages = [{"role": "user", "content": f"question {group} " + "x " * group}]
        return Response(group, sample, {"id": str(group)}, messages, encode_words(messages), ids, [0.0] * len(ids), False, "", blocks=blocks)

    names = ["format", "executes", "result", "length"]
    a = {"format": "tags", "executes": "no such column", "result": "select a", "length": ""}
    b = {"format": "tags", "executes": "executed without error", "result": "select a", "length": ""}
    c = {"format": "tags", "executes": "near from", "result": "select bb from c", "length": ""}
    responses = [make(0, 0, [3, 4, 5], a), make(0, 1, [7], b), make(0, 2, [9, 8, 7, 6, 5, 4, 3], b), make(2, 0, [11, 12], c), make(2, 1, [13, 14, 15, 16], c)]
    wanted = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    return names, responses, wanted


def naive_distance(lm, first, second, answer, temperature):
    """JS distance per response token from two ordinary forward passes, from the textbook formula in float64."""
    rows = []
    for prompt in (first, second):
        logits = lm(input_ids=torch.tensor([list(prompt) + list(answer)])).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(answer)].double()
        rows.append((logits / temperature).softmax(-1))
    p, r = rows
    m = (p + r) / 2
    return (0.5 * (p * (p / m).log2()).sum(-1) + 0.5 * (r * (r / m).log2()).sum(-1)).clamp(min=0).sqrt()


def do_replay(lm, names, responses, wanted, joint=False, temperature=1.0, max_tokens=10_000, share=True, encode=encode_words, hidden_of=None):
    head = (lm.lm_head.weight, lm.lm_head.bias)
    hidden_of = hidden_of or (lambda batch: forward_hidden(lm, batch))
    return mrtpo.replay(hidden_of, head, encode, responses, names, wanted, joint, temperature, max_tokens, share, 0)


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_replay_is_aligned(share, temperature, max_tokens):
    """q at position t belongs to the distribution that produced response token t, for prompts of different length."""
    lm = tiny_model()
    names, responses, wanted = replay_case()
    q, spent = do_replay(lm, names, responses, wanted, temperature=temperature, share=share, max_tokens=max_tokens)
    at, pairs = 0, 0
    with torch.no_grad():
        for i, r in enumerate(responses):
            part, at = q[at : at + len(r.token_ids)], at + len(r.token_ids)
            everything = encode_words(mrtpo.with_blocks(r.messages, r.blocks))
            for k, name in enumerate(names):
                if not wanted[i, k] or not r.blocks[name]:
                    assert bool(part[:, k].isnan().all())
                    continue
                without = encode_words(mrtpo.with_blocks(r.messages, {n: t for n, t in r.blocks.items() if n != name}))
                want = naive_distance(lm, everything, without, r.token_ids, temperature)
                assert torch.allclose(part[:, k], want, rtol=0, atol=1e-9)
                assert want.max() > 0.05  # the case tells positions apart
                pairs += 1
    assert at == len(q)
    assert spent["pairs"] == pairs == 8
    assert spent["responses"] == 4


@pytest.mark.parametrize("share", [True, False])
def test_joint_replay_removes_all_blocks_at_once(share):
    lm = tiny_model()
    names, responses, wanted = replay_case()
    q, spent = do_replay(lm, names, responses, wanted, joint=True, share=share)
    at = 0
    with torch.no_grad():
        for i, r in enumerate(responses):
            part, at = q[at : at + len(r.token_ids)], at + len(r.token_ids)
            want = naive_distance(lm, encode_words(mrtpo.with_blocks(r.messages, r.blocks)), encode_words(r.messages), r.token_ids, 1.0)
            for k, name in enumerate(names):
                if wanted[i, k] and r.blocks[name]:
                    assert torch.allclose(part[:, k], want, rtol=0, atol=1e-9)
                else:
                    assert bool(part[:, k].isnan().all())
    assert spent["pairs"] == 8


def test_without_text_or_with_the_same_text_nothing_moves():
    lm = tiny_model()
    names, responses, wanted = replay_case()
    for r in responses:
        r.blocks = dict.fromkeys(names, "")
    q, spent = do_replay(lm, names, responses, wanted)
    assert bool(q.isnan().all())
    assert spent == {"tokens": 0.0, "pairs": 0.0, "responses": 0.0, "overlong": 0.0}  # no forward pass
    w = mrtpo.credit_weights(q, torch.repeat_interleave(torch.arange(5), torch.tensor([3, 1, 7, 2, 4])), 5, 0.5, 5.0)
    assert torch.equal(w, torch.ones_like(w))  # uniform credit
    names, responses, wanted = replay_case()
    q, spent = do_replay(lm, names, responses, wanted, encode=lambda messages: encode_words(messages)[:2])  # blocks come after: same prompt
    assert bool((q[~q.isnan()] == 0).all())  # exactly
    assert (~q.isnan()).any()
    assert spent["pairs"] == 8


@pytest.mark.parametrize("share", [True, False])
def test_what_is_not_wanted_costs_nothing_and_repeats_cost_once(share):
    lm = tiny_model()
    names, responses, wanted = replay_case()
    calls = []

    def counting(batch):
        calls.append(batch.num_tokens)
        return forward_hidden(lm, batch)

    _, nothing = do_replay(lm, names, responses, torch.zeros_like(wanted), share=share, hidden_of=counting)
    assert calls == []
    assert nothing["tokens"] == 0
    q, spent = do_replay(lm, names, responses, wanted, share=share, hidden_of=counting)
    unique = set()
    for i, r in enumerate(responses):
        columns = [n for k, n in enumerate(names) if wanted[i, k] and r.blocks[n]]
        for removed in [None, *columns] if columns else []:
            unique.add((tuple(encode_words(mrtpo.with_blocks(r.messages, {n: t for n, t in r.blocks.items() if n != removed}))), tuple(r.token_ids)))
    rows = [p + a for p, a in unique]
    expected = len({row[:n] for row in rows for n in range(1, len(row) + 1)}) if share else sum(map(len, rows))  # each distinct prefix once, or each row
    assert calls == [expected]
    assert spent["tokens"] == expected
    # a second, equal response of the same prompt adds nothing but gets its numbers
    twin = Response(**{**vars(responses[2]), "sample": 9})
    calls.clear()
    again, spent = do_replay(lm, names, [*responses, twin], torch.cat([wanted, wanted[2:3]]), share=share, hidden_of=counting)
    assert calls == [expected]
    assert torch.equal(again[-7:].nan_to_num(-1), again[4:11].nan_to_num(-1))
    assert torch.equal(again[:-7].nan_to_num(-1), q.nan_to_num(-1))
    assert spent["pairs"] == 9


@pytest.mark.parametrize("training", [True, False])
def test_replay_touches_nothing(training):
    lm = tiny_model()
    lm.train(training)
    lm.model.layers[1].train(not training)
    modes = [m.training for m in lm.modules()]
    before = [p.detach().clone() for p in lm.parameters()]
    attention = lm.config._attn_implementation
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seen = []

    def hidden_of(batch):
        seen.append(torch.is_grad_enabled())
        return forward_hidden(lm, batch)

    q, _ = do_replay(lm, *replay_case(), hidden_of=hidden_of)
    assert seen == [False]
    assert not q.requires_grad
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, lm.parameters()))
    assert [m.training for m in lm.modules()] == modes
    assert lm.config._attn_implementation == attention
    assert torch.equal(states[0], torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(states[1], np.random.get_state()))
    assert random.getstate() == states[2]


def test_replay_with_nothing_left_still_makes_its_passes():
    """A sharded model: a process without work joins the passes of the others."""
    lm, calls = tiny_model(), []

    def hidden_of(batch):
        calls.append(batch)
        return forward_hidden(lm, batch)

    q, spent = mrtpo.replay(
        hidden_of, (lm.lm_head.weight, None), encode_words, [], ["a"], torch.zeros(0, 1, dtype=torch.bool), False, 1.0, 100, True, 0, lambda b: [*b, [], []]
    )
    assert q.shape == (0, 1)
    assert [c is EMPTY for c in calls] == [True, True]
    assert spent["tokens"] == 0


# --------------------------------------------------------------------------------------------------------------- rollout


class StubEngine:
    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, n, seeds):
        self.calls.append((prompts, sampling, n, seeds))
        stop = Sample([ord("h"), ord("i"), ord("$")], [-0.5, -0.25, -0.125], "stop", 1)
        cut = Sample([ord("n"), ord("o")], [-1.0, -2.0], "length", 1)
        return [[stop, cut][:n] for _ in prompts]


class StubTokenizer(Letters):
    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        return messages[-1]["content"]

    def __call__(self, text, add_special_tokens=False):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(c) for c in text])


class StubEnv:
    def reset(self, task):
        return [{"role": "user", "content": task["id"]}]

    def step(self, text):
        info = {"success": float(text == "hi"), "rewards": {"ok": float(text == "hi")}, "verifier_text": {"ok": f"saw {text}"}}
        return "", 0.0, True, False, info | ({"error": "broken"} if text == "no" else {})


def test_rollout_is_token_exact():
    engine = StubEngine()
    out = mrtpo.rollout(engine, StubTokenizer(), StubEnv(), [(3, {"id": "ab"}), (5, {"id": "c"})], 2, Sampling(1.0, 4, (36,)), seed=7, update=2)
    prompts, _, n, seeds = engine.calls[0]
    assert prompts == [[97, 98], [99]]
    assert n == 2
    assert len({s for row in seeds for s in row}) == 4
    assert [(r.group, r.sample) for r in out] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    assert out[0].token_ids == [104, 105, 36]  # the stop token is trained
    assert out[0].logprobs == [-0.5, -0.25, -0.125]
    assert (out[0].text, out[0].truncated, out[0].success, out[0].error) == ("hi", False, 1.0, "")  # and not shown to the verifier
    assert (out[1].text, out[1].truncated, out[1].error, out[1].blocks) == ("no", True, "broken", {"ok": "saw no"})


def test_sample_seeds_depend_on_everything_and_on_nothing_else():
    seeds = {mrtpo.sample_seed(s, u, g, j) for s in (0, 1, 2) for u in (-1, 0, 1) for g in (0, 1) for j in (0, 1)}
    assert len(seeds) == 36
    assert all(0 <= s < 2**63 for s in seeds)
    assert mrtpo.sample_seed(1, 0, 2, 3) == mrtpo.sample_seed(1, 0, 2, 3)


# --------------------------------------------------------------------------------------------------------------- reports


def test_episode_record_and_its_viewer_entry():
    r = response("ab", stop=True, rewards={"x": 1.0, "y": 0.0}, blocks={"x": "block <x>", "y": ""}, success=1.0)
    advantages, varies = f64([[2.0, 0.0, -1.0]]), torch.tensor([[True, False, True]])
    weights, q = f64([[0.5, 1, 1], [2, 1, 1], [0.5, 1, 1]]), f64([[0.1, NAN, NAN], [0.4, NAN, NAN], [0.1, NAN, NAN]])
    record = mrtpo.episode_record(4, r, 0, ["x", "y", "z"], advantages, varies, weights, q, torch.tensor([1.0, -2.0, 0.5]), [0, 3], Letters())
    assert record["tokens"] == ["a", "b", "$"]
    assert set(record["rewards"]) == {"x", "y"}  # z belongs to other prompts
    assert record["rewards"]["x"]["credit"] == [1.0, 4.0, 1.0]  # A * w
    assert record["rewards"]["x"]["distance"] == [0.1, 0.4, 0.1]
    assert [record["rewards"][n]["replayed"] for n in "xy"] == [True, False]
    entry = mrtpo.viewer_episode(json.loads(json.dumps(record)))
    assert [s["name"] for s in entry["strips"]] == ["x", "y", "x: distance", "token advantage"]
    assert all(len(s["values"]) == 3 for s in entry["strips"])
    assert entry["facts"] == {"success": 1.0, "x": 1.0, "y": 0.0, "tokens": 3}
    assert entry["notes"] == ["x: block <x>"]
    summed = mrtpo.episode_record(4, r, 0, ["x", "y", "z"], advantages[:, :1], varies[:, :1], weights, q, torch.zeros(3), [0, 3], Letters())
    assert [summed["rewards"][n]["advantage"] for n in "xy"] == [2.0, 2.0]  # --credit grpo: the advantage of the sum


# -------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("num_updates", 0),
        ("eval_every", -1),
        ("eval_tasks", 0),
        ("save_every", -1),
        ("groups_per_update", 0),
        ("max_new_tokens", 0),
        ("update_epochs", 0),
        ("num_minibatches", 0),
        ("micro_batch_tokens", 0),
        ("lr_warmup_updates", -1),
        ("beta_warmup", -1),
        ("seed", -1),
        ("kl_coef", -0.1),
        ("kl_coef", NAN),
        ("tis_cap", -1.0),
        ("advantage_eps", -1e-9),
        ("temperature", 0.0),
        ("learning_rate", -1e-9),
        ("learning_rate", NAN),
        ("max_grad_norm", 0.0),
        ("opsd_temperature", 0.0),
        ("beta", 1.01),
        ("beta", -0.01),
        ("beta", NAN),
        ("opsd_beta", 1.5),
        ("clip_low", 1.1),
        ("clip_low", -0.1),
        ("clip_high", -0.1),
        ("clip_high", NAN),
        ("group_size", 1),
        ("max_weight", 0.99),
        ("max_weight", NAN),
        ("num_minibatches", 17),
    ],
)
def test_check_args_names_the_flag_and_the_value(name, bad):
    with pytest.raises(mrtpo.ArgumentError, match=rf"^--{name.replace('_', '-')} {bad}: "):
        mrtpo.check_args(Args(**{name: bad}))


def test_check_args_at_the_bounds():
    mrtpo.check_args(Args())
    mrtpo.check_args(Args(beta=0.0, clip_low=1.0, clip_high=0.0, tis_cap=0.0, group_size=2, max_weight=1.0, learning_rate=0.0, num_minibatches=16, seed=0))
    mrtpo.check_args(Args(beta=1.0, opsd_beta=0.0, eval_every=0, save_every=0, beta_warmup=0, lr_warmup_updates=0, num_updates=1))
    with pytest.raises(mrtpo.ArgumentError, match="--credit opsd has neither rewards to weight"):
        mrtpo.check_args(Args(credit="opsd", response_weighting="saw"))


def test_a_response_that_does_not_fit_the_context_with_its_blocks_is_counted_and_left_uniform():
    lm = tiny_model()
    names, responses, wanted = replay_case()
    needed = [len(encode_words(mrtpo.with_blocks(r.messages, r.blocks))) + len(r.token_ids) for r in responses]
    replayed = [i for i in range(len(responses)) if any(wanted[i, k] and responses[i].blocks[n] for k, n in enumerate(names))]
    context = sorted(needed[i] for i in replayed)[-1] - 1
    whole, _ = do_replay(lm, names, responses, wanted)
    head = (lm.lm_head.weight, lm.lm_head.bias)
    q, spent = mrtpo.replay(lambda b: forward_hidden(lm, b), head, encode_words, responses, names, wanted, False, 1.0, 10_000, True, 0, context=context)
    too_long = [i for i in replayed if needed[i] > context]
    assert spent["overlong"] == len(too_long) >= 1
    at = 0
    for i, r in enumerate(responses):
        part, full, at = q[at : at + len(r.token_ids)], whole[at : at + len(r.token_ids)], at + len(r.token_ids)
        assert bool(part.isnan().all()) if i in too_long else torch.equal(part.isnan(), full.isnan())


def test_opsd_refuses_the_flags_it_would_not_use():
    with pytest.raises(mrtpo.ArgumentError, match="--credit opsd has neither rewards to weight"):
        mrtpo.check_args(mrtpo.Args(credit="opsd", kl_coef=0.1))


def test_infinite_values_are_refused():
    with pytest.raises(mrtpo.ArgumentError, match="--tis-cap inf: must be a finite number"):
        mrtpo.check_args(mrtpo.Args(tis_cap=float("inf")))
