"""interq_rl.py's pure functions: against plain loops in float64, a generic convex solver, an enumerable toy environment and the paper's numbers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import interq_rl
from common.rollout import make_layout
from interq_rl import allocate, correction_weights, policy_loss, prefix_weights, segment_support, update_aware_scaling, upper_clip

KINDS = ["interq", "none", "token_tis", "token_ais", "qurl", "prefix", "global"]
DEFAULTS = {"eps_low": 0.025, "eps_high": 0.05, "alpha_g": 0.5, "tis_cap": 2.0, "ais_scale": 0.05}


def random_case(seed, episodes=4, scale=0.05):
    rng = np.random.default_rng(seed)
    turn_lengths = [[int(rng.integers(1, 9)) for _ in range(rng.integers(1, 6))] for _ in range(episodes)]
    layout = make_layout(turn_lengths)
    return torch.from_numpy(rng.normal(0, scale, int(layout.turns[-1]))), turn_lengths, layout


# ---------------------------------------------------------------------------------------------------- (2) prefix weights


def slow_prefix(delta, turn_lengths, eps_low, eps_high):
    """The formula, one token at a time."""
    totals, weights, at = [], [], 0
    for turns in turn_lengths:
        total = 0.0
        for n in range(1, sum(turns) + 1):
            total += delta[at]
            totals.append(total)
            weights.append(math.exp(min(max(total, -eps_low * math.sqrt(n)), eps_high * math.sqrt(n))))
            at += 1
    return totals, weights


@pytest.mark.parametrize("seed", range(5))
def test_prefix_sums_run_over_the_trajectory_and_restart_with_the_next(seed):
    delta, turn_lengths, layout = random_case(seed)
    total, weights = prefix_weights(delta, layout, 0.025, 0.05)
    slow_total, slow_weights = slow_prefix(delta.tolist(), turn_lengths, 0.025, 0.05)
    assert torch.allclose(total, torch.tensor(slow_total, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(weights, torch.tensor(slow_weights, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_envelope_grows_with_the_root_of_the_tokens_so_far():
    layout = make_layout([[2, 2]])
    weights = prefix_weights(torch.full((4,), 9.0), layout, 0.025, 0.05)[1]
    assert weights.log().tolist() == pytest.approx([0.05 * math.sqrt(n) for n in (1, 2, 3, 4)])
    weights = prefix_weights(torch.full((4,), -9.0), layout, 0.025, 0.05)[1]
    assert weights.log().tolist() == pytest.approx([-0.025 * math.sqrt(n) for n in (1, 2, 3, 4)])


# ---------------------------------------------------------------------------------------------------- (3) support and allocation


def slow_support(weights, lengths, eps=1e-8):
    rho, displacement, at = [], [], 0
    for n in lengths:
        w = weights[at : at + n]
        mu, nu = sum(w) / n, sum(x * x for x in w) / n
        ess = n * mu**2 / nu
        rho.append(0.0 if n == 1 else min(max((ess - 1) / (n - 1) * nu / (nu + eps), 0.0), 1.0))
        displacement.append(sum((x - 1) ** 2 for x in w) / n)
        at += n
    return rho, displacement


@pytest.mark.parametrize("seed", range(5))
def test_support_against_a_loop(seed):
    delta, turn_lengths, layout = random_case(seed, scale=0.5)
    weights = delta.exp()
    rho, displacement = segment_support(weights, layout)
    slow_rho, slow_displacement = slow_support(weights.tolist(), [n for turns in turn_lengths for n in turns])
    assert torch.allclose(rho, torch.tensor(slow_rho, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(displacement, torch.tensor(slow_displacement, dtype=torch.float64), rtol=0, atol=1e-12)
    assert rho.min() >= 0 and rho.max() <= 1


def two_level(share, n=24, k=6, displacement=0.1289):
    """Weights under 1 of n tokens: the k most displaced ones carry `share` of the sum of |W - 1|, and mean (W - 1)^2 is `displacement`."""
    heavy, light = share / k, (1 - share) / (n - k)
    scale = math.sqrt(displacement * n / (k * heavy**2 + (n - k) * light**2))
    return torch.tensor([1 - scale * heavy] * k + [1 - scale * light] * (n - k), dtype=torch.float64)


def test_the_papers_two_segments_differ_in_support_and_not_in_size():
    weights = torch.cat([two_level(0.76, displacement=0.128882), two_level(0.26, displacement=0.128889)])
    rho, displacement = segment_support(weights, make_layout([[24, 24]]))
    assert displacement.tolist() == pytest.approx([0.128882, 0.128889], abs=1e-9)
    assert float(rho[1] - rho[0]) == pytest.approx(0.118, abs=0.001)  # as published
    alpha = allocate(rho, displacement, 0.5)
    assert alpha[0] < 0.5 < alpha[1]


def kkt_residual(rho, displacement, alpha, alpha_g):
    """Largest violation of the conditions of: max sum C rho alpha, sum C alpha^2 <= alpha_g^2 sum C, 0 <= alpha <= 1."""
    budget = alpha_g**2 * displacement.sum()
    free = (alpha < 1) & (rho > 0)
    c = float((alpha[free] / rho[free]).mean()) if free.any() else math.inf
    primal = max(float(((displacement * alpha**2).sum() - budget) / budget), float(alpha.max()) - 1, -float(alpha.min()))
    stationary = float((alpha[free] - c * rho[free]).abs().max()) if free.any() else 0.0  # C rho = 2 mu C alpha where no bound holds
    at_bound = max(0.0, float((1 - c * rho[alpha >= 1]).max())) if (alpha >= 1).any() and free.any() else 0.0  # c rho >= 1 there
    slack = abs(float(((displacement * alpha**2).sum() - budget) / budget)) if free.any() else 0.0
    return max(primal, stationary, at_bound, slack)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), alpha_g=st.floats(0.01, 1.0), spread=st.floats(0.1, 12.0))
def test_allocation_satisfies_the_optimality_conditions(seed, n, alpha_g, spread):
    rng = np.random.default_rng(seed)
    rho = torch.from_numpy(np.exp(-spread * rng.random(n)))
    displacement = torch.from_numpy(rng.random(n) ** 3 + 1e-9)
    alpha = allocate(rho, displacement, alpha_g)
    assert kkt_residual(rho, displacement, alpha, alpha_g) < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_allocation_agrees_with_a_generic_solver(seed):
    rng = np.random.default_rng(seed)
    rho, displacement = rng.random(7), rng.random(7) + 0.05
    found = minimize(
        lambda a: -(displacement * rho * a).sum(), np.full(7, 0.3), jac=lambda a: -displacement * rho, method="SLSQP", bounds=[(0, 1)] * 7,
        constraints={"type": "ineq", "fun": lambda a: 0.25 * displacement.sum() - (displacement * a**2).sum(), "jac": lambda a: -2 * displacement * a},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    alpha = allocate(torch.from_numpy(rho), torch.from_numpy(displacement), 0.5).numpy()
    assert np.abs(alpha - found.x).max() < 1e-4 and (displacement * rho * alpha).sum() >= -found.fun - 1e-9


def test_equal_support_gives_the_uniform_share_and_no_support_none():
    displacement = torch.tensor([0.1, 2.0, 0.03], dtype=torch.float64)
    assert allocate(torch.full((3,), 0.7, dtype=torch.float64), displacement, 0.4).tolist() == pytest.approx([0.4] * 3, abs=1e-12)
    assert allocate(torch.zeros(3, dtype=torch.float64), displacement, 0.4).tolist() == [0, 0, 0]
    assert allocate(torch.tensor([0.0, 0.5, 0.2]), displacement, 0.0).tolist() == [0, 0, 0]
    # the budget allows more than the supported segments can take: they get all of their weight
    assert allocate(torch.tensor([0.5, 0.0, 0.2], dtype=torch.float64), displacement, 0.9).tolist() == pytest.approx([1, 0, 1], abs=1e-9)
    assert allocate(torch.tensor([0.3, 0.9]), torch.tensor([1.0, 1.0]), 1.0).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert allocate(torch.empty(0), torch.empty(0), 0.5).shape == (0,)


def test_the_budget_is_one_for_all_processes():
    rng = np.random.default_rng(3)
    rho, displacement = torch.from_numpy(rng.random(10)), torch.from_numpy(rng.random(10))
    whole = allocate(rho, displacement, 0.5)
    # two processes in lockstep: each contributes what the other adds
    import threading

    barrier, box, out = threading.Barrier(2), [None, None], [None, None]

    def process(rank):
        def exchange(x, combine):
            box[rank] = x
            barrier.wait()
            result = combine(box[0], box[1])
            barrier.wait()
            return result

        part = slice(0, 3) if rank == 0 else slice(3, 10)
        out[rank] = allocate(rho[part], displacement[part], 0.5, lambda x: exchange(x, lambda a, b: a + b), lambda x: exchange(x, max))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert torch.allclose(torch.cat(out), whole, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- (4) weights and loss


def loss_of(weights, upper, logprobs, old, advantages, clip_low=0.2):
    return policy_loss(logprobs, old, weights, upper, advantages, torch.full_like(logprobs, 1 / len(logprobs)), clip_low)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_mismatch_the_loss_is_the_base_loss_bit_for_bit(kind):
    _, _, layout = random_case(1)
    n = int(layout.turns[-1])
    delta = torch.zeros(n)
    weights = correction_weights(kind, delta, layout, **DEFAULTS)[0]
    assert torch.equal(weights, torch.ones(n, dtype=torch.float64))
    rng = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(n, generator=rng) * 0.3 for _ in range(3))
    ratio = (logprobs - old).exp()
    base = (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * torch.full_like(logprobs, 1 / n)).sum()
    assert torch.equal(loss_of(weights.float(), upper_clip(kind, delta, 0.2, 2.0).float(), logprobs, old, advantages), base)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_against_the_formulas(kind, seed):
    delta, turn_lengths, layout = random_case(seed, scale=0.4)
    weights, found = correction_weights(kind, delta, layout, **DEFAULTS)
    _, prefix = slow_prefix(delta.tolist(), turn_lengths, 0.025, 0.05)
    prefix, ratio = np.array(prefix), np.minimum(np.exp(delta.numpy()), 2.0)
    if kind == "interq":
        rho, displacement = slow_support(prefix.tolist(), [n for turns in turn_lengths for n in turns])
        alpha = allocate(torch.tensor(rho, dtype=torch.float64), torch.tensor(displacement, dtype=torch.float64), 0.5)
        expected = 1 + alpha.numpy()[layout.turn_ids.numpy()] * (prefix - 1)
        spent, budget = (found["displacement"] * found["alpha"] ** 2).sum(), 0.25 * found["displacement"].sum()
        assert float(spent) == pytest.approx(float(budget), rel=1e-9)
    elif kind == "token_ais":
        reliable, gap = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), np.abs(delta.numpy()).mean()
        expected = 1 + min(max(reliable * gap / (gap + 0.05) / (1 + ratio.var()), 0), 1) * (ratio - 1)
    else:
        expected = {"prefix": prefix, "global": 1 + 0.5 * (prefix - 1), "token_tis": ratio, "qurl": ratio, "none": np.ones_like(ratio)}[kind]
    assert np.abs(weights.numpy() - expected).max() < 1e-12
    assert not weights.requires_grad


def test_gradients_pass_through_the_tokens_own_score_only():
    delta, _, layout = random_case(2, scale=0.3)
    n = len(delta)
    logprobs = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    advantages = torch.linspace(-1, 1, n, dtype=torch.float64)
    weights = correction_weights("interq", delta, layout, **DEFAULTS)[0]
    loss_of(weights, upper_clip("interq", delta, 0.2, 2.0), logprobs, torch.zeros(n, dtype=torch.float64), advantages).backward()
    assert torch.allclose(logprobs.grad, -weights * advantages / n, rtol=0, atol=1e-15)


def test_qurls_upper_clip_is_wider_where_the_cap_bites():
    delta = torch.tensor([0.0, math.log(1.5), math.log(6.0)])
    assert upper_clip("qurl", delta, 0.2, 2.0).tolist() == pytest.approx([1.2, 1.2, 3.6])
    assert upper_clip("token_tis", delta, 0.2, 2.0).tolist() == [1.2, 1.2, 1.2]
    # hand-computed: ratio 3, A = 1, TIS weight 2; the bound 3.6 does not bite
    one = torch.ones(1, dtype=torch.float64)
    loss = policy_loss(one.log() + math.log(3), 0 * one, 2 * one, upper_clip("qurl", delta[2:], 0.2, 2.0), one, one, 0.2)[0]
    assert float(loss) == pytest.approx(-6.0)


def test_update_aware_scaling_leaves_the_function_and_shrinks_the_weights():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    lm = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.arange(9)[None]
    before, weight = lm(input_ids=ids).logits, lm.model.layers[0].mlp.up_proj.weight.detach().clone()
    update_aware_scaling(lm, 1.5)
    assert torch.allclose(lm(input_ids=ids).logits, before, rtol=0, atol=1e-10)
    assert torch.allclose(lm.model.layers[0].mlp.up_proj.weight * 1.5, weight)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises((interq_rl.PolicyError, AttributeError)):
        update_aware_scaling(gpt, 1.5)


# ---------------------------------------------------------------------------------------------------- the identity behind it


def test_the_prefix_ratio_corrects_the_expectation_and_the_token_ratio_does_not():
    """Two turns of two tokens, a random environment: every trajectory enumerated, executor and learner differ at every token."""
    rng = np.random.default_rng(5)
    tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def policies(history):
        if history not in tables:
            logits = rng.normal(size=3)
            tables[history] = tuple(np.exp(x) / np.exp(x).sum() for x in (logits, logits + rng.normal(0, 0.4, 3)))
        return tables[history]  # learner, executor

    chances: dict[tuple, float] = {}
    trajectories = []  # (probability by executor, by learner, q and r of each token)
    for first, second, seen, third, fourth in itertools.product(range(3), range(3), range(2), range(3), range(3)):
        chance = chances.setdefault((first, second), rng.random())
        tokens, history, q, r = (first, second, third, fourth), (), [], []
        for i, token in enumerate(tokens):
            if i == 2:
                history = (*history, "seen", seen)
            learner, executor = policies(history)
            q.append(learner[token])
            r.append(executor[token])
            history = (*history, token)
        environment = chance if seen else 1 - chance
        trajectories.append((environment * np.prod(r), environment * np.prod(q), q, r))
    assert sum(t[0] for t in trajectories) == pytest.approx(1) and sum(t[1] for t in trajectories) == pytest.approx(1)
    layout = make_layout([[2, 2]])
    exact = local = plain = 0.0
    for by_executor, _, q, r in trajectories:
        delta = torch.tensor(np.log(q) - np.log(r))
        total, _ = prefix_weights(delta, layout, 0.025, 0.05)
        f = [math.cos(7 * a + 2 * b) for a, b in zip(np.cumsum(q), q)]  # of the history and the token, as a token's loss is
        exact += by_executor * float((total.exp() * torch.tensor(f, dtype=torch.float64)).sum())
        local += by_executor * float((delta.exp() * torch.tensor(f, dtype=torch.float64)).sum())
        plain += by_executor * sum(f)
    target = sum(t[1] * sum(math.cos(7 * a + 2 * b) for a, b in zip(np.cumsum(t[2]), t[2])) for t in trajectories)
    assert exact == pytest.approx(target, abs=1e-12)
    assert abs(local - target) > 1e-3 and abs(plain - target) > 1e-3


# ---------------------------------------------------------------------------------------------------- layouts and reports


def test_packed_and_padded_layouts_agree():
    """The same trajectories as padded rows [episodes, longest] with a mask, in a plain loop over columns."""
    delta, turn_lengths, layout = random_case(7, scale=0.2)
    _, weights = prefix_weights(delta, layout, 0.025, 0.05)
    rows = delta.split(layout.episodes.diff().tolist())
    longest = max(len(r) + 3 * len(t) for r, t in zip(rows, turn_lengths))
    padded, mask = torch.zeros(len(rows), longest, dtype=torch.float64), torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (row, turns) in enumerate(zip(rows, turn_lengths)):
        at = 0
        for turn, piece in zip(turns, row.split(turns)):  # three environment tokens after each turn
            padded[i, at : at + turn], mask[i, at : at + turn] = piece, True
            padded[i, at + turn : at + turn + 3] = 99.0
            at += turn + 3
    total, n, flat = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.float64), []
    out = torch.zeros_like(padded)
    for t in range(longest):
        total, n = total + torch.where(mask[:, t], padded[:, t], 0.0), n + mask[:, t]
        out[:, t] = torch.maximum(torch.minimum(total, 0.05 * n.sqrt()), -0.025 * n.sqrt()).exp()
    flat = torch.cat([out[i][mask[i]] for i in range(len(rows))])
    assert torch.allclose(weights, flat, rtol=0, atol=1e-12)


def test_log_ratios_by_turn():
    layout = make_layout([[2, 1], [1]])
    delta = torch.tensor([0.1, 0.2, -0.5, 0.4], dtype=torch.float64)
    total = prefix_weights(delta, layout, 1.0, 1.0)[0]
    out = interq_rl.by_turn(delta, total, layout)
    assert out["interq/logratio_current/turn_01"] == pytest.approx((0.7, 2)) and out["interq/logratio_current/turn_02"] == pytest.approx((0.5, 1))
    assert out["interq/logratio_history/turn_01"] == pytest.approx((0.7, 2)) and out["interq/logratio_history/turn_02"] == pytest.approx((0.2, 1))


def test_no_episode_at_all():
    layout = make_layout([])
    for kind in KINDS:
        weights, _ = correction_weights(kind, torch.empty(0), layout, **DEFAULTS)
        assert weights.shape == (0,)
    assert interq_rl.by_turn(torch.empty(0), torch.empty(0, dtype=torch.float64), layout) == {}


@pytest.mark.parametrize("preset", list(interq_rl.PRESETS))
def test_an_explicit_flag_wins_over_the_preset(preset):
    args = interq_rl.resolve(interq_rl.Args(preset=preset, rollout_format="int4", correction="global"))
    assert (args.rollout_format, args.correction, args.qat) == ("int4", "global", interq_rl.PRESETS[preset]["qat"])
