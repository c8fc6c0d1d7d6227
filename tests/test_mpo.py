"""mpo.py's pure functions: the identities of the method, slow float64 loops, tables worked out by hand."""

import dataclasses
import itertools
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import mpo
from common import envs
from common.arguments import ArgumentError
from common.engine import Sample, Sampling
from common.packing import EMPTY, pack, pack_rows, token_logprobs
from common.policies import PolicyError, tiny_tokenizer
from common.rollout import Episode, Turn, make_layout, turn_seed
from kernels.segment_scan import segment_scan
from mpo import Args

LENGTHS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)  # tokens of each turn of each episode
LAM = st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0])


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def sample(lengths, seed):
    """Layout, values before each token, turn rewards with R(tau) on the last turn."""
    rng = np.random.default_rng(seed)
    layout = make_layout(lengths)
    rewards = torch.zeros(sum(map(len, lengths)), dtype=torch.float64)
    rewards[layout.episode_turns[1:] - 1] = torch.from_numpy(rng.integers(0, 2, len(lengths)).astype(float))
    return layout, torch.from_numpy(rng.normal(0.5, 0.5, sum(map(sum, lengths)))), rewards


def nested(flat, lengths):
    """[N] -> values[episode][turn][token]"""
    values = iter(flat.tolist())
    return [[[next(values) for _ in range(n)] for n in turns] for turns in lengths]


def flatten(x):
    return f64([v for episode in x for turn in episode for v in turn])


def slow(lengths, values, turn_rewards, lam, lam_intra, lam_token, beta):
    """Token residuals, turn advantages, trace, MAE and token GAE by the definitions, one number at a time."""
    out = {"delta": [], "turn": [], "trace": [], "mae": [], "gae": []}
    rewards = iter(turn_rewards.tolist())
    for v in nested(values, lengths):
        r = [next(rewards) for _ in v]
        delta, trace = [], []
        for t, turn in enumerate(v):
            after = v[t + 1][0] if t + 1 < len(v) else 0.0
            delta.append([(r[t] if i == len(turn) - 1 else 0.0) + (turn[i + 1] if i + 1 < len(turn) else after) - turn[i] for i in range(len(turn))])
            trace.append([sum(lam_intra ** (j - i) * delta[t][j] for j in range(i, len(turn))) for i in range(len(turn))])
        whole = [r[t] + (v[t + 1][0] if t + 1 < len(v) else 0.0) - v[t][0] for t in range(len(v))]
        turn_adv = [sum(lam ** (s - t) * whole[s] for s in range(t, len(v))) for t in range(len(v))]
        line = [d for turn in delta for d in turn]
        gae = [sum(lam_token ** (j - i) * line[j] for j in range(i, len(line))) for i in range(len(line))]
        means = [sum(turn) / len(turn) for turn in trace]
        out["delta"].append(delta)
        out["turn"] += turn_adv
        out["trace"].append(trace)
        out["mae"].append([[turn_adv[t] + beta * (x - means[t]) for x in trace[t]] for t in range(len(v))])
        out["gae"] += gae
    return {name: f64(x) if name in ("turn", "gae") else flatten(x) for name, x in out.items()}


def mae(values, rewards, layout, lam=0.8, lam_intra=0.95, beta=1.0):
    turn_adv = mpo.turn_advantages(values, rewards, layout, lam)
    trace = mpo.intra_trace(mpo.token_residuals(values, rewards, layout), layout, lam_intra)
    return turn_adv, mpo.mean_preserving(turn_adv, trace, layout, beta)


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------- (1) to (3) advantages


def test_layout_by_hand():
    layout = make_layout([[2, 1], [3]])
    assert layout.turns.tolist() == [0, 2, 3, 6]
    assert layout.episodes.tolist() == [0, 3, 6]
    assert layout.episode_turns.tolist() == [0, 2, 3]
    assert layout.turn_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert layout.episode_ids.tolist() == [0, 0, 0, 1, 1, 1]
    empty = make_layout([])
    assert [x.tolist() for x in empty] == [[0], [0], [0], [], []]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), LAM, LAM, LAM, st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_estimators_against_loops(lengths, seed, lam, lam_intra, lam_token, beta):
    layout, values, rewards = sample(lengths, seed)
    want = slow(lengths, values, rewards, lam, lam_intra, lam_token, beta)
    delta = mpo.token_residuals(values, rewards, layout)
    assert close(delta, want["delta"])
    turn_adv, a = mae(values, rewards, layout, lam, lam_intra, beta)
    assert close(turn_adv, want["turn"])
    assert close(mpo.intra_trace(delta, layout, lam_intra), want["trace"])
    assert close(a, want["mae"])
    assert close(mpo.token_gae(delta, layout, lam_token), want["gae"])
    assert a.dtype == torch.float64


def test_estimators_by_hand():
    """Two turns of two and one tokens, R = 1, V = 0.2 0.5 | 0.6: residuals 0.3 0.1 | 0.4; of turns 0.4 | 0.4."""
    layout, values, rewards = make_layout([[2, 1]]), f64([0.2, 0.5, 0.6]), f64([0, 1])
    delta = mpo.token_residuals(values, rewards, layout)
    assert close(delta, f64([0.3, 0.1, 0.4]))
    turn_adv, a = mae(values, rewards, layout, lam=0.8, lam_intra=0.5, beta=1.0)
    assert close(turn_adv, f64([0.4 + 0.8 * 0.4, 0.4]))
    # trace 0.3 + 0.5 * 0.1 = 0.35 and 0.1: mean 0.225, so 0.72 +- 0.125
    assert close(a, f64([0.845, 0.595, 0.4]))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), LAM, LAM, st.floats(-3, 3))
def test_the_mean_over_a_turn_is_the_turns_advantage(lengths, seed, lam, lam_intra, beta):
    layout, values, rewards = sample(lengths, seed)
    turn_adv, a = mae(values, rewards, layout, lam, lam_intra, beta)
    means = torch.stack([part.mean() for part in a.split(layout.turns.diff().tolist())])
    assert float((means - turn_adv).abs().max()) < 1e-14
    flat = mae(values, rewards, layout, lam, lam_intra, 0.0)[1]
    assert torch.equal(flat, turn_adv[layout.turn_ids])  # beta 0 broadcasts, exactly


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), LAM)
def test_token_residuals_add_up_to_the_turns(lengths, seed, lam):
    """(1): inner values cancel, so the sum needs only the values at the turns' beginnings."""
    layout, values, rewards = sample(lengths, seed)
    sums = torch.stack([part.sum() for part in mpo.token_residuals(values, rewards, layout).split(layout.turns.diff().tolist())])
    assert close(segment_scan(sums, lam, layout.episode_turns), mpo.turn_advantages(values, rewards, layout, lam), 1e-11)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), LAM, st.data())
def test_turn_advantages_do_not_see_inside_a_turn(lengths, seed, lam, data):
    """Neither inner critic values nor the number of tokens matter: not by a bit."""
    layout, values, rewards = sample(lengths, seed)
    before = mpo.turn_advantages(values, rewards, layout, lam)
    disturbed = values + torch.from_numpy(np.random.default_rng(seed + 1).normal(0, 100, len(values)))
    disturbed[layout.turns[:-1]] = values[layout.turns[:-1]]
    assert torch.equal(mpo.turn_advantages(disturbed, rewards, layout, lam), before)
    other = [[data.draw(st.integers(1, 9)) for _ in turns] for turns in lengths]  # the same turns in another tokenisation
    changed = make_layout(other)
    again = torch.full((sum(map(sum, other)),), 7.0, dtype=torch.float64)
    again[changed.turns[:-1]] = values[layout.turns[:-1]]
    assert torch.equal(mpo.turn_advantages(again, rewards, changed, lam), before)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), LAM)
def test_turn_anchor_is_a_token_scan(lengths, seed, lam):
    """Token GAE with V[t, 1] standing for every value of the turn, decay 1 inside a turn and lam at its last token."""
    layout, values, rewards = sample(lengths, seed)
    broadcast = values[layout.turns[:-1]][layout.turn_ids]
    decay = torch.ones_like(values)
    decay[layout.turns[1:] - 1] = lam
    scan = segment_scan(mpo.token_residuals(broadcast, rewards, layout), decay, layout.episodes)
    assert close(scan, mpo.turn_advantages(values, rewards, layout, lam)[layout.turn_ids], 1e-11)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6))
def test_all_decays_one_is_monte_carlo_up_to_the_turns_mean(lengths, seed):
    """lam = lam_intra = beta = 1: inside a turn the advantages differ as R - V[t, i] does; their mean is R - V[t, 1], not R - mean_i V[t, i]."""
    layout, values, rewards = sample(lengths, seed)
    a = mae(values, rewards, layout, 1.0, 1.0, 1.0)[1]
    monte_carlo = mpo.token_gae(mpo.token_residuals(values, rewards, layout), layout, 1.0)
    returns = rewards[layout.episode_turns[1:] - 1][layout.episode_ids]
    assert close(monte_carlo, returns - values, 1e-11)
    means = torch.stack([part.mean() for part in values.split(layout.turns.diff().tolist())])
    assert close(a - monte_carlo, (means - values[layout.turns[:-1]])[layout.turn_ids], 1e-11)
    single = make_layout([[1] * sum(turns) for turns in lengths])  # every token a turn of its own: then it is token GAE
    r = torch.zeros_like(values)
    r[layout.turns[1:] - 1] = rewards
    assert close(mae(values, r, single, 1.0, 1.0, 1.0)[1], monte_carlo, 1e-11)


def test_critic_targets_are_the_final_reward():
    """(5): with lam_critic 1 the target of every token is R(tau), whatever the critic says."""
    layout, values, rewards = sample([[2, 3, 1], [4], [1, 1]], 3)
    targets = mpo.token_gae(mpo.token_residuals(values, rewards, layout), layout, 1.0) + values
    assert close(targets, rewards[layout.episode_turns[1:] - 1][layout.episode_ids])
    bootstrapped = mpo.token_gae(mpo.token_residuals(values, rewards, layout), layout, 0.0) + values
    assert close(bootstrapped[layout.episodes[1:] - 1], rewards[layout.episode_turns[1:] - 1])
    assert close(bootstrapped[:-1][:5], values[1:][:5])  # lam_critic 0: the next value


def test_rewards_between_turns():
    """Not the paper's case: a reward earned by an earlier turn's last token."""
    layout, values = make_layout([[1, 2]]), f64([0.0, 0.0, 0.0])
    rewards = f64([0.25, 1.0])
    assert mpo.token_residuals(values, rewards, layout).tolist() == [0.25, 0.0, 1.0]
    assert mpo.turn_advantages(values, rewards, layout, 0.5).tolist() == [0.75, 1.0]


def test_a_wrong_inner_value_reverses_token_credit_and_not_the_turns():
    """The paper's counterexample (Proposition 2): one turn of two tokens, both more likely with theta; it succeeded (R = 1) from a state worth 0.5.
    A critic that errs inside the turn (V = 3) makes PPO's update lower theta; the turn-anchored one raises it by the same amount for any such error."""
    layout, rewards = make_layout([[2]]), f64([1.0])
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def direction(advantages):
        logprobs = torch.nn.functional.logsigmoid(theta).expand(2)
        return float(torch.autograd.grad((advantages * logprobs).sum(), theta)[0])

    for lam, inner in itertools.product((0.5, 0.95, 1.0), (0.5, 3.0, -3.0)):
        values = f64([0.5, inner])
        gae = mpo.token_gae(mpo.token_residuals(values, rewards, layout), layout, lam)
        assert float(gae.sum()) == pytest.approx((1 + lam) * 1.0 - 0.5 - lam * inner)
        assert (direction(gae) > 0) == (inner < 3)
        assert direction(mae(values, rewards, layout)[1]) == pytest.approx(0.5 * 2 * 0.5)  # score 1/2, two tokens, A = R - V[1] = 1/2


def test_length_adaptive_lam():
    layout = make_layout([[60, 40], [20], [4]])
    lam = mpo.length_adaptive_lam(layout, 0.05)
    assert close(lam[[0, 99, 100, 119, 120]], f64([0.8, 0.8, 0.0, 0.0, 0.0]))  # 100 tokens: 0.8; 20 tokens: 0; shorter: 0, not negative


def test_whitening_and_over_two_processes():
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(2, 3, 37))
    want = (x - x.mean()) / (x.var(correction=1) + 1e-8).sqrt()
    assert close(mpo.whitened(x), want)
    for cut in (0, 1, 20):
        parts = on_two_ranks(lambda rank, all_sum, cut=cut: mpo.whitened(x[:cut] if rank == 0 else x[cut:], all_sum))
        assert close(torch.cat(parts), want)
    assert mpo.whitened(torch.full((5,), 0.25, dtype=torch.float64)).tolist() == [0.0] * 5
    assert mpo.whitened(f64([2.0])).tolist() == [0.0]


def on_two_ranks(work):
    """[work(0, all_sum), work(1, all_sum)] of two threads whose all_sum adds what both pass, in rank order."""
    barrier, box = threading.Barrier(2, timeout=20), [None, None]

    def run(rank):
        def all_sum(x):
            box[rank] = x
            barrier.wait()
            total = box[0] + box[1]
            barrier.wait()
            return total

        return work(rank, all_sum)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.1, -2.5])), min_size=1, max_size=14), st.sampled_from([0.0, 1e-6, 1.0]))
def test_group_advantages_against_a_loop(rows, eps):
    groups, rewards = [7 * g - 5 for g, _ in rows], [r for _, r in rows]
    got, varies = mpo.group_advantages(f64(rewards), torch.tensor(groups), eps)
    for i, g in enumerate(groups):
        own = [r for r, h in zip(rewards, groups) if h == g]
        assert bool(varies[i]) == (len(set(own)) > 1)
        mean = math.fsum(own) / len(own)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / max(len(own) - 1, 1))
        assert float(got[i]) == (pytest.approx((rewards[i] - mean) / (std + eps), rel=1e-9) if len(set(own)) > 1 else 0.0)


def test_group_advantages_table():
    got = mpo.group_advantages(f64([1, 0, 0, 0]), torch.zeros(4, dtype=torch.int64), 0.0)[0]
    assert close(got, f64([1.5, -0.5, -0.5, -0.5]))  # ddof 1
    assert mpo.group_advantages(f64([5.0]), torch.tensor([3]), 0.0)[0].tolist() == [0.0]
    assert mpo.group_advantages(f64([]), torch.tensor([], dtype=torch.int64), 0.0)[0].tolist() == []


def test_overlong_penalty():
    """Published example: limit 20480, buffer 4096."""
    lengths = torch.tensor([100, 16384, 18432, 20480])
    assert mpo.overlong_penalty(lengths, 20480, 0.2).tolist() == [0.0, 0.0, -0.5, -1.0]


# ----------------------------------------------------------------------------------------------------------- (4) importance


def toy_policy(lengths, seed):
    """A policy over 5 tokens whose logits depend on parameters theta and the position: log-probs of the chosen tokens, theta."""
    rng = np.random.default_rng(seed)
    n = sum(map(sum, lengths))
    theta = torch.from_numpy(rng.normal(0, 0.3, (4,))).requires_grad_()
    features = torch.from_numpy(rng.normal(0, 1, (n, 5, 4)))
    chosen = torch.from_numpy(rng.integers(0, 5, n))
    logprobs = (features @ theta).log_softmax(-1)[torch.arange(n), chosen]
    return logprobs, theta, torch.from_numpy(rng.normal(0, 0.2, n)), torch.from_numpy(rng.normal(0, 1, n))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 10**6))
def test_forward_is_the_turns_ratio_and_each_gradient_its_own_score(lengths, seed):
    layout = make_layout(lengths)
    logprobs, theta, move, advantages = toy_policy(lengths, seed)
    old = (logprobs + move).detach()
    ratio = mpo.importance_logratio(logprobs - old, "turn", layout).exp()
    rho = torch.stack([part.sum() for part in (logprobs - old).detach().split(layout.turns.diff().tolist())]).exp()[layout.turn_ids]
    assert close(ratio.detach(), rho, 1e-13)
    got = torch.autograd.grad((ratio * advantages).sum(), theta, retain_graph=True)[0]
    want = torch.zeros_like(theta)
    for i in range(len(logprobs)):  # rho_t * A_i * grad log pi(a_i)
        want = want + rho[i] * advantages[i] * torch.autograd.grad(logprobs[i], theta, retain_graph=True)[0]
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def test_a_shared_ratio_cancels_the_refinement():
    """Why (4) needs the stop-gradient: with one differentiable ratio per turn, sum_i rho_t A_i = L rho_t A_t, and beta has no effect at all."""
    lengths = [[3, 1, 4], [2]]
    layout, values, rewards = sample(lengths, 2)
    logprobs, theta, move, _ = toy_policy(lengths, 4)
    logratio = logprobs - (logprobs + move).detach()
    shared = torch.stack([part.sum() for part in logratio.split(layout.turns.diff().tolist())]).exp()[layout.turn_ids]
    own = mpo.importance_logratio(logratio, "turn", layout).exp()

    def gradient(ratio, beta):
        advantages = mae(values, rewards, layout, beta=beta)[1]
        return torch.autograd.grad((ratio * advantages).sum(), theta, retain_graph=True)[0]

    assert torch.allclose(gradient(shared, 0.0), gradient(shared, 1.0), rtol=0, atol=1e-13)
    assert torch.allclose(gradient(shared, 0.0), gradient(shared, 7.0), rtol=0, atol=1e-12)
    assert float((gradient(own, 0.0) - gradient(own, 1.0)).abs().max()) > 1e-2
    turn_adv, counts = mpo.turn_advantages(values, rewards, layout, 0.8), layout.turns.diff()
    rho = shared[layout.turns[:-1]]
    want = torch.autograd.grad((rho * turn_adv * counts).sum(), theta, retain_graph=True)[0]
    assert torch.allclose(gradient(shared, 1.0), want, rtol=0, atol=1e-13)


def test_sequence_ratio_is_the_geometric_mean():
    lengths = [[2, 1], [3]]
    layout = make_layout(lengths)
    x = f64([0.1, 0.2, 0.6, 0.0, -0.3, 0.0]).requires_grad_()
    got = mpo.importance_logratio(x, "sequence", layout)
    assert close(got.detach(), f64([0.3, 0.3, 0.3, -0.1, -0.1, -0.1]))
    assert torch.autograd.grad(got.exp()[1], x)[0].tolist() == pytest.approx([0, math.exp(0.3), 0, 0, 0, 0])
    assert mpo.importance_logratio(x, "token", layout) is x


def test_long_turns_add_up_in_log_space():
    """1000 tokens of +0.001 are a turn ratio of e, a geometric mean of e^0.001, and no sum of ratios."""
    layout = make_layout([[1000]])
    x = torch.full((1000,), 0.001, dtype=torch.float64)
    assert float(mpo.importance_logratio(x, "turn", layout)[5].exp()) == pytest.approx(math.e, rel=1e-12)
    assert float(mpo.importance_logratio(x, "sequence", layout)[5].exp()) == pytest.approx(math.exp(0.001), rel=1e-12)


@pytest.mark.parametrize("kind", ["turn", "token", "sequence"])
def test_first_step_has_ratio_one_exactly(kind):
    layout = make_layout([[3, 5], [30]])
    logprobs = torch.randn(38, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ones = torch.full((38,), 1 / 38)
    _, metrics = mpo.policy_loss(logprobs, logprobs.detach(), logprobs.detach(), torch.randn(38), ones, layout, kind, 0.0, 0.0)
    assert metrics["losses/clipfrac"][0] == metrics["losses/approx_kl"][0] == metrics["losses/old_approx_kl"][0] == 0
    assert metrics["mpo/ratio_max"][0] == 1


# ------------------------------------------------------------------------------------------------------------- the losses


def slow_loss(lengths, lp, old, engine, adv, weight, kind, low, high, scaling, cap, ref, kl):
    """The definition, one token at a time."""
    total, clipped, at = 0.0, [], 0
    for turns in lengths:
        episode = range(at, at + sum(turns))
        for n in turns:
            for t in range(at, at + n):
                span = {"token": [t], "turn": range(at, at + n), "sequence": episode}[kind]
                x = math.fsum(lp[j] - old[j] for j in span) / (len(episode) if kind == "sequence" else 1)
                ratio = math.exp(max(-20.0, min(20.0, x)))
                power = math.sqrt(n) if scaling == "sqrt_length" else 1.0
                bottom, top = (1 - low) ** power, (1 + high) ** power
                loss = -min(ratio * adv[t], min(max(ratio, bottom), top) * adv[t])
                clipped.append((adv[t] > 0 and ratio > top) or (adv[t] < 0 and ratio < bottom))
                if cap > 0:
                    loss *= min(math.exp(max(-20.0, min(20.0, old[t] - engine[t]))), cap)
                if ref is not None:
                    d = max(-20.0, min(20.0, ref[t] - lp[t]))
                    loss += kl * min(math.exp(d) - d - 1, 10.0)
                total += weight[t] * loss
            at += n
    return total, clipped


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["token", "turn", "sequence"]),
    st.sampled_from([(0.2, 0.2), (0.1, 0.4), (1.0, 0.0)]),
    st.sampled_from(["none", "sqrt_length"]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_policy_loss_against_a_loop(seed, kind, clip, scaling, cap, kl):
    rng = np.random.default_rng(seed)
    lengths = [[3, 1], [2, 12, 1]]
    n = 19
    lp, old, engine, ref = (rng.normal(-2, 0.3, n) for _ in range(4))
    old[0], ref[2] = -45.0, 30.0  # beyond the clamp of 20; k3 beyond its cap
    adv, weight = rng.normal(0, 1, n), rng.random(n)
    reference = ref if kl else None
    loss, metrics = mpo.policy_loss(
        *(torch.from_numpy(a) for a in (lp, old, engine, adv, weight)), make_layout(lengths), kind, *clip, scaling, cap,
        None if reference is None else torch.from_numpy(reference), kl,
    )  # fmt: skip
    want, clipped = slow_loss(lengths, lp, old, engine, adv, weight, kind, *clip, scaling, cap, reference, kl)
    assert float(loss) == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert metrics["losses/clipfrac"] == (float(sum(clipped)), n)
    by_length = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("mpo/clipfrac_by_turn_length/")}
    assert by_length["1-8"] == (float(sum(clipped) - sum(clipped[6:18])), 7.0)
    assert by_length["9-16"] == (float(sum(clipped[6:18])), 12.0)
    assert by_length["129+"] == (0.0, 0.0)
    assert ("losses/kl" in metrics) == bool(kl)


def test_clipping_takes_the_whole_turn():
    """Two tokens of +0.15 each: no token leaves 1 +- 0.2, their turn does (e^0.3 = 1.35)."""
    old, layout, ones = f64([-1.0, -1.0]), make_layout([[2]]), f64([1.0, 1.0])
    turn = mpo.policy_loss(old + 0.15, old, old, ones, ones / 2, layout, "turn", 0.2, 0.2)
    token = mpo.policy_loss(old + 0.15, old, old, ones, ones / 2, layout, "token", 0.2, 0.2)
    assert float(turn[0]) == pytest.approx(-1.2)
    assert float(token[0]) == pytest.approx(-math.exp(0.15))
    assert (turn[1]["losses/clipfrac"][0], token[1]["losses/clipfrac"][0]) == (2.0, 0.0)


def test_the_importance_weight_is_outside_the_clip():
    one, old, layout = torch.ones(1, dtype=torch.float64), f64([-1.0]), make_layout([[1]])
    loss, metrics = mpo.policy_loss(old + math.log(1.5), old, old - math.log(2), one, one, layout, "turn", 0.2, 0.2, tis_cap=5.0)
    assert float(loss) == pytest.approx(-2.4)
    assert metrics["rollout/tis_capped_frac"] == (0.0, 1.0)
    loss, metrics = mpo.policy_loss(old + math.log(1.5), old, old - math.log(2), one, one, layout, "turn", 0.2, 0.2, tis_cap=1.5)
    assert float(loss) == pytest.approx(-1.8)
    assert metrics["rollout/tis_capped_frac"] == (1.0, 1.0)


def test_value_loss_by_hand():
    one = f64([1.0])
    assert float(mpo.value_loss(f64([0.9]), f64([0.0]), f64([1.0]), one, 0.0)) == pytest.approx(0.5 * 0.01)
    assert float(mpo.value_loss(f64([0.9]), f64([0.0]), f64([1.0]), one, 0.5)) == pytest.approx(0.5 * 0.25)  # clipped to 0.5: the worse of the two
    assert float(mpo.value_loss(f64([0.4]), f64([0.0]), f64([1.0]), one, 0.5)) == pytest.approx(0.5 * 0.36)
    assert float(mpo.value_loss(f64([-0.9]), f64([0.0]), f64([1.0]), one, 0.5)) == pytest.approx(0.5 * 3.61)  # moving away is never excused
    v = f64([0.9, 0.2]).requires_grad_()
    mpo.value_loss(v, f64([0.0, 0.0]), f64([1.0, 1.0]), f64([0.5, 0.5]), 0.5).backward()
    assert v.grad.tolist() == pytest.approx([0.0, -0.4])


# ------------------------------------------------------------------------------------------------------- measurements


def test_explained_variance():
    v, g = f64([0.0, 0.5, 1.0, 0.25]), f64([0.0, 1.0, 1.0, 0.0])
    want = 1 - float((g - v).var() / g.var())
    assert mpo.explained_variance(v, g) == (pytest.approx(want), 1.0)
    assert mpo.explained_variance(g, g) == (1.0, 1.0)
    assert mpo.explained_variance(v, torch.ones_like(v)) == (0.0, 0.0)  # nothing to explain
    assert mpo.explained_variance(f64([]), f64([])) == (0.0, 0.0)
    for part in on_two_ranks(lambda rank, all_sum: mpo.explained_variance(*((v[:1], g[:1]) if rank == 0 else (v[1:], g[1:])), all_sum)):
        assert part == (pytest.approx(want), 1.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=9), min_size=1, max_size=5), st.sampled_from([0.05, 0.5, 0.95, 1.0, 0.0]))
def test_segment_quantile_is_numpys(parts, q):
    x = f64([v for part in parts for v in part])
    cu = torch.tensor([0, *np.cumsum([len(p) for p in parts])])
    assert torch.allclose(mpo.segment_quantile(x, cu, q), f64([np.quantile(p, q) for p in parts]), rtol=1e-12, atol=1e-12)


def slow_structure(values, lengths):
    shares, jumps, boundary, every = [], [], 0.0, 0.0
    for v in nested(values, lengths):
        line = [x for turn in v for x in turn]
        changes = [(b - a) ** 2 for a, b in itertools.pairwise(line)]
        at_boundary = [(v[t + 1][0] - v[t][-1]) ** 2 for t in range(len(v) - 1)]
        every, boundary = every + sum(changes), boundary + sum(at_boundary)
        if len(v) == 1:
            continue
        total = sum((x - np.mean(line)) ** 2 for x in line)
        if total > 1e-12:
            shares.append(sum(len(turn) * (np.mean(turn) - np.mean(line)) ** 2 for turn in v) / total)
        spans = [np.quantile(turn, 0.95) - np.quantile(turn, 0.05) for turn in v]
        jumps.append(np.mean([math.sqrt(x) for x in at_boundary]) > np.mean(spans))
    return shares, jumps, boundary, every


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), st.booleans())
def test_critic_structure_against_a_loop(lengths, seed, steps):
    layout, values, _ = sample(lengths, seed)
    if steps:  # values that mostly change between turns
        values = values / 50 + layout.turn_ids * 0.3
    got, shares = mpo.critic_structure(values, layout)
    want, jumps, boundary, every = slow_structure(values, lengths)
    assert torch.allclose(shares, f64(want), rtol=1e-8, atol=1e-10)
    assert got["mpo/value_variance_between_turns"] == (pytest.approx(sum(want), abs=1e-9), len(want))
    assert got["mpo/episodes_mostly_between"] == (sum(x > 0.5 for x in want), len(want))
    assert got["mpo/episodes_jump_over_span"] == (sum(jumps), len(jumps))
    assert got["mpo/squared_change_at_boundaries"] == (pytest.approx(boundary, rel=1e-9, abs=1e-12), pytest.approx(every, rel=1e-9, abs=1e-12))


def test_critic_structure_by_hand():
    """Values 0 0 | 1 1: all variance lies between turn means and all change at the boundary. Values 0 1 | 0 1: none and a third."""
    layout = make_layout([[2, 2]])
    got, _ = mpo.critic_structure(f64([0, 0, 1, 1]), layout)
    assert [v[0] / v[1] for v in got.values()] == [1.0, 1.0, 1.0, 1.0]
    got, _ = mpo.critic_structure(f64([0, 1, 0, 1]), layout)
    assert [v[0] / v[1] for v in got.values()] == pytest.approx([0.0, 0.0, 1.0, 1 / 3])  # a jump of 1 is over the span of 0.9
    still, shares = mpo.critic_structure(f64([0.5] * 4), layout)  # a critic that says nothing: no share, not 0
    assert still["mpo/value_variance_between_turns"] == (0.0, 0.0)
    assert len(shares) == 0


def test_pass_at_k_is_the_share_of_subsets():
    for n, c in [(4, 0), (4, 1), (5, 3), (6, 6)]:
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert mpo.pass_at_k(c, n, k) == pytest.approx(np.mean([max(s) for s in subsets]))
            assert mpo.pass_hat_k(c, n, k) == pytest.approx(np.mean([min(s) for s in subsets]))
    assert mpo.pass_at_k(1, 32, 32) == 1.0


# --------------------------------------------------------------------------------------------------------- presets and checks


def test_presets():
    table = {}
    for name in ("mpo", "mpo_token_is", "ppo", "vapo", "grpo", "dapo", "gspo"):
        a = mpo.resolve(Args(preset=name))
        assert not [f.name for f in dataclasses.fields(a) if getattr(a, f.name) is None], name
        mpo.check_args(a)
        table[name] = (a.advantage, a.importance, a.lam, a.clip_low, a.clip_high, a.loss_aggregation, a.whiten, a.dynamic_sampling)
    assert table == {
        "mpo": ("mae", "turn", 0.8, 0.2, 0.28, "token_mean", False, False),
        "mpo_token_is": ("mae", "token", 0.8, 0.2, 0.28, "token_mean", False, False),
        "ppo": ("token", "token", 1.0, 0.2, 0.2, "token_mean", True, False),
        "vapo": ("token", "token", 1.0, 0.2, 0.28, "token_mean", True, False),
        "grpo": ("group", "token", 1.0, 0.2, 0.2, "seq_mean_token_mean", False, False),
        "dapo": ("group", "token", 1.0, 0.2, 0.28, "token_mean", False, True),
        "gspo": ("group", "sequence", 1.0, 3e-4, 4e-4, "seq_mean_token_mean", False, False),
    }
    paper = mpo.resolve(Args())
    assert (paper.beta, paper.lam, paper.lam_intra, paper.lam_critic, paper.group_size) == (1.0, 0.8, 0.95, 1.0, 8)
    a = mpo.resolve(Args(preset="ppo", lam=0.9, whiten=False, beta=0.0))  # an explicit flag wins, also one that is 0 or False
    assert (a.lam, a.whiten, a.beta, a.advantage) == (0.9, False, 0.0, "token")
    assert mpo.resolve(a) == a


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lam": 1.5}, "--lam 1.5: must lie in [0, 1]"),
        ({"lam_intra": -0.1}, "--lam-intra -0.1: must lie in [0, 1]"),
        ({"beta": -1.0}, "--beta -1.0: must be at least 0"),
        ({"learning_rate": math.nan}, "--learning-rate nan: must be a finite number"),
        ({"temperature": 0.0}, "--temperature 0.0: must be above 0"),
        ({"preset": "grpo", "group_size": 1}, "--group-size 1: --advantage group and --dynamic-sampling compare"),
        ({"preset": "ppo", "dynamic_sampling": True, "group_size": 1}, "--group-size 1"),
        ({"preset": "ppo", "clip_scaling": "sqrt_length"}, "it needs --importance turn, not token"),
        ({"value_warmup": 25}, "--value-warmup 25: with --num-updates 25 the policy would never move"),
        ({"num_minibatches": 17}, "--num-minibatches 17: more than the 16 groups"),
        ({"critic_minibatches": 0}, "--critic-minibatches 0: must be at least 1"),
        ({"overlong_buffer": 2.0}, "--overlong-buffer 2.0: must lie in [0, 1]"),
    ],
)
def test_check_args(changes, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        mpo.check_args(mpo.resolve(Args(**changes)))


def test_checks_let_these_pass():
    mpo.check_args(mpo.resolve(Args(preset="ppo", group_size=1)))  # a critic needs no group
    mpo.check_args(mpo.resolve(Args(preset="grpo", value_warmup=60)))  # no critic, no warm-up


# ---------------------------------------------------------------------------------------------------------------- rollout


WORDS = ["open red", "open blue", "open green gold", "red is open", "blue stays shut", "doors : red blue", "say open and a colour"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer([[{"role": "user", "content": w} for w in WORDS]], 300)


class Scripted:
    """An engine that says what a script holds: script[(group, sample)] is a list of token lists. Checks that a session only ever grows."""

    pad_token_id = 0

    def __init__(self, script):
        self.script, self.seen, self.seeds, self.ended = script, {}, [], 0

    def generate(self, prompts, sampling, n, seeds, session_ids):
        assert n == 1
        out = []
        for prompt, [seed], name in zip(prompts, seeds, session_ids):
            before = self.seen.get(name, [])
            assert prompt[: len(before)] == before  # token in, token out: nothing that was sampled is encoded again
            turn = sum(1 for key in self.seeds if key[0] == name)
            self.seeds.append((name, seed))
            ids = self.script[name][turn]
            assert len(ids) <= sampling.max_new_tokens
            stop = ids[-1] in sampling.stop_token_ids
            out.append([Sample(ids, [-0.1 * (i + 1) for i in range(len(ids))], "stop" if stop else "length", 1)])
            self.seen[name] = prompt + ids
        return out

    def end_sessions(self):
        self.ended += 1


class Game:
    """Answers with what the task lists, then ends as the task says."""

    def reset(self, task):
        self.task, self.heard = task, []
        if task.get("fails") == 0:
            raise envs.EnvironmentFailed("no start")
        return [{"role": "user", "content": task["prompt"]}]

    def step(self, action):
        self.heard.append(action)
        turn = len(self.heard)
        if self.task.get("fails") == turn:
            raise envs.EnvironmentFailed("gone")
        answers = self.task["answers"]
        if turn <= len(answers):
            return answers[turn - 1], 0.0, False, False, {}
        info = {"success": 1.0, "rewards": {"r": 1.0}} | ({"error": "verifier"} if self.task.get("error") else {})
        return "", 1.0, not self.task.get("cut"), bool(self.task.get("cut")), info


def play(tokenizer, tasks, said, n=1, games=8, max_turns=6, context=200, max_new_tokens=8, threads=0, **kwargs):
    """Rollout of tasks [(group, task)] in which (group, sample) says the texts said[...] (token lists stay as they are)."""
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    script = {k: [t if isinstance(t, list) else [*tokenizer(t, add_special_tokens=False).input_ids, end] for t in ts] for k, ts in said.items()}
    engine = Scripted(script)
    sampling = Sampling(1.0, max_new_tokens, (end,))
    return mpo.rollout(engine, tokenizer, [Game() for _ in range(games)], threads, tasks, n, sampling, max_turns, context, 1, 0, **kwargs), engine


def conversation(task, said):
    """The messages of an episode as the chat template would see them."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for text, answer in itertools.zip_longest(said, task["answers"]):
        messages += [{"role": "assistant", "content": text}] + ([{"role": "user", "content": answer}] if answer is not None else [])
    return messages


@pytest.mark.parametrize("threads", [0, 3])
def test_an_episode_is_the_chat_template_with_the_policys_tokens_marked(tokenizer, threads):
    task = {"prompt": "doors : red blue", "answers": ["red is open", "blue stays shut"]}
    said = ["open red", "open green gold", "open blue"]
    [e], engine = play(tokenizer, [(0, task)], {(0, 0): said}, threads=threads)
    whole = tokenizer.apply_chat_template(conversation(task, said), tokenize=False)
    assert tokenizer.decode(e.prompt_ids + e.token_ids) == whole
    assert [t.text for t in e.turns] == said
    own = [t for t, mine in zip(e.token_ids, e.policy_mask) if mine]
    assert own == [i for ids in engine.script[0, 0] for i in ids]  # the sampled ids, stop tokens included
    assert len(e.logprobs) == len(own)
    assert [e.token_ids[t.start : t.stop] for t in e.turns] == engine.script[0, 0]
    assert all(e.policy_mask[t.start : t.stop] == [True] * (t.stop - t.start) for t in e.turns)
    assert (e.terminated, e.truncated, e.reward, e.success, e.rewards) == (True, "", 1.0, 1.0, {"r": 1.0})
    assert engine.ended == 1
    batch = pack_rows([(e.prompt_ids, e.token_ids)], masks=[e.policy_mask])
    assert batch.target_ids.tolist() == own  # what training predicts is what was sampled, in the order of the log-probs


def test_sampled_ids_are_kept_however_they_would_be_encoded(tokenizer):
    """Every way to split `open red` into tokens stays as sampled; the observation after it is encoded on its own."""
    letters = [tokenizer.convert_tokens_to_ids(c) for c in tokenizer.tokenize("open red")]
    task = {"prompt": "doors : red blue", "answers": ["red is open"]}
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ways = [[tokenizer.convert_tokens_to_ids(c) for c in "openĠred"], letters]
    for first, second in itertools.product(ways, ways):
        [e], _ = play(tokenizer, [(0, task)], {(0, 0): [[*first, end], [*second, end]]}, max_new_tokens=12)
        assert [t.text for t in e.turns] == ["open red", "open red"]
        assert e.token_ids[: len(first) + 1] == [*first, end]
        assert e.token_ids[-len(second) - 1 :] == [*second, end]


def test_a_message_without_an_end_is_closed_for_the_environment_and_not_trained(tokenizer):
    task = {"prompt": "doors : red blue", "answers": ["red is open"]}
    red = tokenizer("open red", add_special_tokens=False).input_ids
    [e], _ = play(tokenizer, [(0, task)], {(0, 0): [red, "open blue"]}, max_new_tokens=max(len(red), 6))
    assert [t.unfinished for t in e.turns] == [True, False]
    assert tokenizer.decode(e.token_ids) == "open red<|end|><|user|>red is open<|end|><|assistant|>open blue<|end|>"
    assert e.token_ids[e.turns[0].stop] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert e.policy_mask[e.turns[0].stop] is False


def test_cut_by_turns_context_padding_and_environment(tokenizer):
    task = {"prompt": "doors : red blue", "answers": ["red is open"] * 9}
    long = {(0, 0): ["open red"] * 9}
    [e], _ = play(tokenizer, [(0, task)], long, max_turns=3)
    assert (e.truncated, e.terminated, len(e.turns), e.reward, e.success) == ("turns", False, 3, 0.0, 0.0)
    assert e.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|end|>")  # ends with the policy's last message, without an unanswered observation
    assert len(e.policy_mask) == len(e.token_ids)
    step = len(play(tokenizer, [(0, task)], long, max_turns=2)[0][0].token_ids) - len(play(tokenizer, [(0, task)], long, max_turns=1)[0][0].token_ids)
    start = len(e.prompt_ids)
    for room, turns in ((start + 8 - 1, 0), (start + 8, 1), (start + step + 8 - 1, 1), (start + step + 8, 2)):
        [e], _ = play(tokenizer, [(0, task)], long, context=room)
        assert (e.truncated, len(e.turns)) == ("context", turns)
        assert len(e.prompt_ids) + len(e.token_ids) <= max(room, start)
    [e], _ = play(tokenizer, [(0, task)], {(0, 0): [[7, 0, tokenizer.eos_token_id], "open red"]})
    assert (e.truncated, len(e.turns)) == ("padding", 1)
    [e], _ = play(tokenizer, [(0, {**task, "answers": [], "cut": True})], long)
    assert (e.truncated, e.terminated, e.success) == ("environment", False, 1.0)


def test_failures_are_marked_and_do_not_stop_the_others(tokenizer):
    task = {"prompt": "doors : red blue", "answers": ["red is open"]}
    tasks = [(0, {**task, "fails": 0}), (1, {**task, "fails": 2}), (2, {**task, "error": True}), (3, task)]
    for games in (1, 2, 8):
        es, engine = play(tokenizer, tasks, {(g, 0): ["open red"] * 3 for g in range(4)}, games=games)
        assert [e.error for e in es] == ["no start", "gone", "verifier", ""]
        assert [len(e.turns) for e in es] == [0, 2, 2, 2]
        assert es[3].success == 1
        assert engine.ended == -(-4 // games)


def test_groups_are_adjacent_and_every_turn_has_its_own_stream(tokenizer):
    task = {"prompt": "doors : red blue", "answers": ["red is open"]}
    said = {(g, j): ["open red", "open blue"] for g in (3, 5) for j in range(3)}
    all_seeds = []
    for games in (1, 4, 6):
        heard = []

        def on_turn(e, game, heard=heard):
            heard.append((e.group, e.sample, len(e.turns)))

        es, engine = play(tokenizer, [(3, task), (5, task)], said, n=3, games=games, on_turn=on_turn)
        assert [(e.group, e.sample) for e in es] == [(g, j) for g in (3, 5) for j in range(3)]
        assert sorted(heard) == [(g, j, t) for g in (3, 5) for j in range(3) for t in (1, 2)]
        assert len({seed for _, seed in engine.seeds}) == 12
        all_seeds.append(sorted(engine.seeds))
    assert all_seeds[0] == all_seeds[1] == all_seeds[2]  # however the episodes are split over games
    assert turn_seed(1, 0, Episode(0, 0, {})) != turn_seed(2, 0, Episode(0, 0, {})) != turn_seed(2, 1, Episode(0, 0, {}))


def test_a_template_that_cannot_go_on_is_refused(tokenizer):
    assert mpo.observation_frame(tokenizer, (1,)) == ("<|end|>", "<|user|>", "<|end|><|assistant|>")
    with pytest.raises(PolicyError, match="starts with none of the stop tokens"):
        mpo.observation_frame(tokenizer, (7,))


# ------------------------------------------------------------------------------------------------------- policy and critic


def tiny_model(seed=0, **kwargs):
    config = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | kwargs)).eval()
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # a fresh model is almost uniform: sharper distributions show a misplaced token
    torch.set_rng_state(state)
    return lm


MASKED = [(([5, 9], [33, 60, 7, 8]), [True, False, False, True]), (([5, 9], [33, 12]), [True, True])]


@pytest.mark.parametrize("share", [True, False])
def test_log_probs_and_values_stand_before_each_policy_token(share):
    lm = tiny_model()
    critic = mpo.Critic(lm)
    assert critic(EMPTY).tolist() == [0.0]  # starts at zero
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(1)))
        critic.head.bias.fill_(0.3)
    batch = pack_rows([row for row, _ in MASKED], share, masks=[m for _, m in MASKED])
    logprobs, entropy = mpo.Policy(lm)(batch, 0.8)
    values = critic(batch)
    want_lp, want_v, want_h = [], [], []
    for (prompt, ids), mask in MASKED:
        out = lm(input_ids=torch.tensor([prompt + ids]), output_hidden_states=True)
        logp = (out.logits[0].double() / 0.8).log_softmax(-1)
        for i, own in enumerate(mask):
            if own:
                at = len(prompt) + i - 1  # the state before token i
                want_lp.append(logp[at, ids[i]])
                want_h.append(-(logp[at].exp() * logp[at]).sum())
                want_v.append(critic.head(out.hidden_states[-1][0, at])[0])
    assert torch.allclose(logprobs.double(), torch.stack(want_lp), atol=1e-5)
    assert torch.allclose(entropy.double(), torch.stack(want_h), atol=1e-5)
    assert torch.allclose(values, torch.stack(want_v), atol=1e-5)
    assert values.dtype == torch.float32


def test_the_critic_is_a_copy_with_its_own_weights():
    lm = tiny_model()
    critic = mpo.Critic(lm)
    for p, q in zip(lm.base_model.parameters(), critic.body.parameters()):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()
    before = [p.clone() for p in lm.parameters()]
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1)
    batch = pack([([5], [[9, 33]])])
    for _ in range(2):
        optimizer.zero_grad()
        mpo.value_loss(critic(batch), torch.zeros(2), torch.ones(2), torch.full((2,), 0.5), 0.0).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, lm.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(lm.base_model.parameters(), critic.body.parameters()))


@pytest.mark.parametrize("bias", [False, True])
def test_token_logprobs_in_chunks_equal_the_naive_ones(bias):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((13, 6), (29, 6)))
    offset = torch.randn(29, generator=generator, requires_grad=True) if bias else None
    target, up = torch.randint(0, 29, (13,), generator=generator), torch.randn(13, generator=generator)
    leaves = [hidden, weight] + ([offset] if bias else [])
    logp = (torch.nn.functional.linear(hidden, weight, offset).double() / 0.7).log_softmax(-1)
    want = logp.gather(1, target[:, None])[:, 0]
    grads = torch.autograd.grad((want * up).sum(), leaves)
    for elements in (29, 29 * 4 + 5, 2**24, 1):
        got, _ = token_logprobs(hidden, weight, offset, target, 0.7, max_elements=elements)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=2e-6)
        for g, w in zip(torch.autograd.grad((got * up).sum(), leaves), grads):
            assert torch.allclose(g, w, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- reports


def test_viewer_episode_puts_values_at_the_policys_tokens():
    e = Episode(2, 1, {"id": "t"}, [5], [10, 11, 12, 13, 14], [True, True, False, False, True], [-1.0, -2.0, -3.0])
    e.turns = [Turn(0, 2, "a", False), Turn(4, 5, "b", False)]
    columns = {"advantages": f64([9, 0.5, 0.1, -0.2]), "values": f64([9, 0.3, 0.4, 0.8]), "refinement": f64([9, 0.2, -0.2, 0.0])}

    class Decoder:
        def decode(self, ids):
            return "".join(f"<{i}>" for i in ids)

    record = mpo.episode_record(7, e, slice(1, 4), [0.3, -0.2], columns, Decoder())
    assert json.loads(json.dumps(record)) == record
    page = mpo.viewer_episode(record)
    assert page["turns"] == [{"name": "turn 1", "start": 0, "end": 2, "value": 0.3}, {"name": "turn 2", "start": 4, "end": 5, "value": -0.2}]
    assert page["masked"] == [False, False, True, True, False]
    assert {s["name"]: s["values"] for s in page["strips"]} == {
        "value": [0.3, 0.4, None, None, 0.8],
        "refinement": [0.2, -0.2, None, None, 0.0],
        "advantage": [0.5, 0.1, None, None, -0.2],
    }
