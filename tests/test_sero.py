"""sero.py's pure functions: hand-computed groups and graphs, plain loops in float64, branches on the household environment."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sero
from common import envs
from common.policies import tiny_tokenizer
from common.rollout import Turn, make_layout
from sero import (
    Args,
    Branch,
    base_advantages,
    command_weights,
    compare,
    continue_by_oracle,
    gate,
    graph_distances,
    hierarchical_advantages,
    history_ids,
    oracle_token_weights,
    reachability,
    reachability_study,
)

F64 = torch.float64


def layout_of(observations):
    return make_layout([[2] * len(o) for o in observations])


# ---------------------------------------------------------------------------------------------------- base algorithms


def test_compare_by_hand():
    values, ids = torch.tensor([10.0, 0, 2, 5, 5, 7], dtype=F64), torch.tensor([3, 3, 3, 8, 8, 1])
    advantages, size = compare(values, ids, False, 1, 1e-6)
    assert advantages.tolist() == [6, -4, -2, 0, 0, 0] and size.tolist() == [3, 3, 3, 2, 2, 1]  # equal values and a group of one give exactly 0
    std = np.std([10, 0, 2], ddof=1)
    assert compare(values, ids, True, 1, 1e-6)[0].tolist() == pytest.approx([6 / std, -4 / std, -2 / std, 0, 0, 0], abs=1e-5)
    assert compare(values[:0], ids[:0], True, 1, 1e-6)[0].shape == (0,)


# two tasks; the first: a solved chain, a detour that loops, an episode that ends elsewhere
OBSERVATIONS = [["s", "a", "b"], ["s", "c", "s", "a"], ["s", "a"], ["x"]]
GROUPS, SOLVED = [0, 0, 0, 1], [True, False, False, False]


def test_graph_distances_by_hand():
    # edges s-a, a-b, b-success; s-c, c-s, s-a, a-a (unsolved: stays); s-a, a-a. Distances: b 1, a 2, s 3, c 4
    assert graph_distances(OBSERVATIONS, SOLVED, GROUPS) == [[2, 1, 0], [4, 3, 2, 2], [2, 2], [1]]
    # without a solved episode every distance is the same
    assert len({d for ds in graph_distances(OBSERVATIONS[1:3], [False, False], [0, 0]) for d in ds}) == 1
    assert graph_distances([[], ["s"]], [False, True], [0, 0]) == [[], [0]]


def test_a_success_chain_has_the_published_step_returns():
    distances = torch.tensor(graph_distances([["p", "q", "r"]], [True], [0])[0], dtype=F64)
    assert (10 * 0.1**distances).tolist() == pytest.approx([0.1, 1, 10])


def test_graphgpo_by_hand():
    layout = layout_of(OBSERVATIONS)
    rewards = torch.tensor([0, 0, 10.0, 0, 0, 0, 0, 0, 0, 0], dtype=F64)
    got = base_advantages("graphgpo", rewards, OBSERVATIONS, SOLVED, GROUPS, layout, Args())
    episode = [20 / 3] * 3 + [-10 / 3] * 4 + [-10 / 3] * 2 + [0]
    returns = [0.1, 1, 10, 1e-3, 0.01, 0.1, 0.1, 0.1, 0.1, 1]
    seen = ["s", "a", "b", "s", "c", "s", "a", "s", "a", "x"]
    step = []
    for r, o in zip(returns, seen):
        group = [x for x, other in zip(returns, seen) if other == o]
        step.append((r - np.mean(group)) / (np.std(group, ddof=1) + 1e-6) if len(group) > 1 else 0.0)
    assert got.tolist() == pytest.approx([a + b for a, b in zip(episode, step)], abs=1e-9)


def test_gigpo_by_hand():
    layout = layout_of(OBSERVATIONS)
    rewards = torch.tensor([0, 0, 10.0, 0, -0.1, 0, 0, 0, 0, 0], dtype=F64)
    got = base_advantages("gigpo", rewards, OBSERVATIONS, SOLVED, GROUPS, layout, Args())
    g = 0.95
    returns = [10 * g**2, 10 * g, 10, -0.1 * g, -0.1, 0, 0, 0, 0, 0]
    totals = [10, -0.1, 0]
    episode = [totals[0] - np.mean(totals)] * 3 + [totals[1] - np.mean(totals)] * 4 + [totals[2] - np.mean(totals)] * 2 + [0]
    seen = ["s", "a", "b", "s", "c", "s", "a", "s", "a", "x"]
    step = [r - np.mean([x for x, o2 in zip(returns, seen) if o2 == o]) for r, o in zip(returns, seen)]
    assert got.tolist() == pytest.approx([a + b for a, b in zip(episode, step)], abs=1e-9)
    # the same words in another task are another state
    apart = base_advantages("gigpo", torch.tensor([1.0, 0.0], dtype=F64), [["s"], ["s"]], [True, False], [0, 1], layout_of([["s"], ["s"]]), Args())
    assert apart.tolist() == [0, 0]


def test_grpo_is_one_number_per_episode():
    layout = layout_of(OBSERVATIONS)
    got = base_advantages("grpo", torch.tensor([0, 0, 10.0] + [0] * 7, dtype=F64), OBSERVATIONS, SOLVED, GROUPS, layout, Args())
    std = np.std([10, 0, 0], ddof=1)
    assert got.tolist() == pytest.approx([20 / 3 / std] * 3 + [-10 / 3 / std] * 6 + [0], abs=1e-6)


def test_histories():
    observations = [["s", "a", "b"], ["c", "a", "b"], ["s", "a"]]
    one, two, three = (history_ids(observations, [0, 0, 0], k).tolist() for k in (1, 2, 3))
    assert one[1] == one[4] == one[7] and one[2] == one[5] and one[0] == one[6] != one[3]
    assert two[0] == two[3] == two[6] == -1 and two[1] == two[7] != two[4] and two[2] == two[5]  # s a twice, a b twice
    assert three[2] != three[5] and three[2] >= 0 and three[1] == -1


def test_hierarchical_advantages_by_hand():
    returns = torch.tensor([4.0, 0, 2, 9], dtype=F64)
    ids = [torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, -1])]
    first = [(x - 2) / (np.std([4, 0, 2]) + 1e-6) for x in (4, 0, 2)]
    second = [(x - 2) / (np.std([4, 0]) + 1e-6) for x in (4, 0)]
    expected = [(2 * first[0] + 3 * second[0]) / 5, (2 * first[1] + 3 * second[1]) / 5, 0.0, 0.0]  # an advantage of exactly 0 leaves the mixture
    assert hierarchical_advantages(returns, ids, 1.0, 1e-6).tolist() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), base=st.sampled_from(["grpo", "gigpo", "hgpo", "graphgpo"]))
def test_advantages_do_not_depend_on_the_order_of_episodes(seed, base):
    rng = random.Random(seed)
    observations = [[rng.choice("stuv") for _ in range(rng.randint(1, 5))] for _ in range(6)]
    groups, solved = [rng.randrange(2) for _ in range(6)], [rng.random() < 0.4 for _ in range(6)]
    rewards = [[0.0] * (len(o) - 1) + [10.0 * s] for o, s in zip(observations, solved)]

    def run(order):
        flat = torch.tensor([r for i in order for r in rewards[i]], dtype=F64)
        obs = [observations[i] for i in order]
        out = base_advantages(base, flat, obs, [solved[i] for i in order], [groups[i] for i in order], layout_of(obs), Args())
        return dict(zip(order, out.split([len(o) for o in obs])))

    one, other = run(list(range(6))), run(rng.sample(range(6), 6))
    assert all(torch.allclose(one[i], other[i], rtol=0, atol=1e-9) for i in range(6))


# ---------------------------------------------------------------------------------------------------- (3) (4) gates and weights


def test_the_gate_is_clipped_and_drops_what_does_not_improve():
    assert gate(torch.tensor([10.0, 10, 0, 5, 10]), torch.tensor([10.0, 0, 10, 0, -5]), 10.0).tolist() == [0, 1, 0, 0.5, 1]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_weights_start_at_one_fall_and_are_the_products_of_the_likelihoods(lengths, seed):
    logprobs = torch.from_numpy(-np.random.default_rng(seed).exponential(0.7, sum(lengths))).requires_grad_()
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    with torch.no_grad():
        z, w = reachability(logprobs, offsets)
    assert not z.requires_grad and not w.requires_grad
    expected = []
    for first, last in itertools.pairwise(offsets.tolist()):
        product = 1.0
        for k in range(first, last):
            expected.append(product)
            product *= float(z[k])
    assert torch.allclose(w, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0)
    assert all(w[i] == 1 for i in offsets[:-1]) and all(
        w[a] >= w[b] for f, e in itertools.pairwise(offsets.tolist()) for a, b in itertools.pairwise(range(f, e))
    )


def test_variants_by_hand():
    offsets, w = torch.tensor([0, 3, 5]), torch.tensor([1, 0.5, 0.2, 1, 0.1], dtype=F64)
    noise = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.2], dtype=F64)
    weights = {o: command_weights(o, w, offsets, 2, noise).tolist() for o in ("sero", "root_only", "full_flat", "short_bridge", "shuffled")}
    assert weights["sero"] == w.tolist() and weights["root_only"] == [1, 0, 0, 1, 0] and weights["full_flat"] == [1] * 5
    assert weights["short_bridge"] == [1, 1, 0, 1, 1] and weights["shuffled"] == [0.5, 0.2, 1, 0.1, 1]  # each branch keeps its own values
    decay = command_weights("depth_decay", w, offsets, 2, noise)
    c = float(decay[1])
    assert decay.tolist() == pytest.approx([1, c, c * c, 1, c]) and float(decay.mean()) == pytest.approx(float(w.mean()), abs=1e-9)


def test_token_weights_by_hand():
    offsets = torch.tensor([0, 2, 3])
    got = oracle_token_weights(torch.tensor([1.0, 0.5], dtype=F64), torch.tensor([1, 0.25, 1], dtype=F64), torch.tensor([2, 4, 1]), offsets, 1.5)
    assert got.tolist() == pytest.approx([1 / 2 / 1.5] * 2 + [0.25 / 4 / 1.5] * 4 + [0.5 / 1.5])
    assert oracle_token_weights(torch.tensor([0.0], dtype=F64), torch.tensor([1.0], dtype=F64), torch.tensor([3]), torch.tensor([0, 1]), 0.0).tolist() == [
        0,
        0,
        0,
    ]


def test_study_by_hand():
    # one branch of three commands, two trials: depth 1 reproduced when command 0 matched, depth 2 when 0 and 1 did
    matches = np.array([[True, False], [True, True], [False, False]])
    out = reachability_study(matches, np.array([0.6, 0.9, 0.1]), np.array([1.0, 0.6, 0.54]), np.array([0, 3]))
    assert out["sero/reproduced/w_0.50_1.00"] == pytest.approx((1 + 0 + 1 + 0) / 4) and out["sero/reproduced/pairs_0.50_1.00"] == 2
    assert np.isnan(out["sero/reproduced/w_0.00_0.05"]) and out["sero/spearman_z"] == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------------------- (2) branches


@pytest.fixture(scope="module")
def household():
    tasks = envs.load("household")
    rng = random.Random(0)
    tokenizer = tiny_tokenizer([tasks.demonstrate(t, rng) for t in tasks.train[:200]], 600)
    return tasks, tokenizer


def gains(reward, info):
    return 10 * reward - 0.1 * bool(info.get("invalid"))


def test_an_action_that_could_not_be_done_leaves_the_state():
    e = sero.Episode(0, 0, {"id": "t"})
    for text, invalid in (("a", False), ("Nothing happens.", True), ("b", False), ("end", False)):
        e.turns.append(Turn(0, 1, "x", False, text, 0.0, {"invalid": invalid}))
    assert sero.states_seen(e) == ["t", "a", "a", "b"]


@pytest.mark.parametrize("number", range(4))
def test_a_branch_solves_the_task_from_a_reached_state_and_leaves_the_episode_alone(household, number):
    tasks, tokenizer = household
    game, task, rng = tasks.make_env(), tasks.train[number * 17], random.Random(number)
    prompt = sero.encode(tokenizer, game.reset(task))
    for _ in range(3):
        game.step(rng.choice(game.admissible()))
    state = game.snapshot()
    before = (game.state_key(), game.admissible(), game.inventory(), game.remaining)
    copy = tasks.make_env()
    copy.restore(state)
    assert (copy.state_key(), copy.admissible(), copy.inventory(), copy.remaining) == before
    branch = Branch(0, 0, 3, task["id"], prompt)
    stops = [tokenizer.convert_tokens_to_ids("<|end|>")]
    assert continue_by_oracle(branch, copy, state, game.remaining, tokenizer, stops, 2048, gains)
    assert branch.oracle_return == 10.0
    assert (game.state_key(), game.admissible(), game.inventory(), game.remaining) == before
    commands = [tokenizer.decode(branch.token_ids[a:b]) for a, b in branch.spans]
    assert all(c.endswith("<|end|>") for c in commands)
    # replayed by hand, every observation in the branch is the real one
    fresh, text = tasks.make_env(), ""
    fresh.restore(state)
    for i, command in enumerate(commands):
        observation = fresh.step(command.removesuffix("<|end|>"))[0]
        text += command + (f"<|user|>{observation}<|end|><|assistant|>" if i < len(commands) - 1 else "")
    assert tokenizer.decode(branch.token_ids) == text
    assert branch.target_mask == [any(a <= i < b for a, b in branch.spans) for i in range(len(branch.token_ids))]


def test_the_horizon_that_is_left_bounds_the_branch(household):
    tasks, tokenizer = household
    game = tasks.make_env()
    prompt = sero.encode(tokenizer, game.reset(tasks.train[5]))
    branch = Branch(0, 0, 0, "t", prompt)
    assert continue_by_oracle(branch, tasks.make_env(), game.snapshot(), 2, tokenizer, [tokenizer.convert_tokens_to_ids("<|end|>")], 2048, gains)
    assert len(branch.spans) == 2 and branch.oracle_return == 0.0
    short = Branch(0, 0, 0, "t", prompt)
    assert not continue_by_oracle(short, tasks.make_env(), game.snapshot(), 9, tokenizer, [tokenizer.convert_tokens_to_ids("<|end|>")], len(prompt) + 1, gains)


def test_an_oracle_without_a_way_and_a_dead_simulator_lose_the_branch(household):
    tasks, tokenizer = household
    stops = [tokenizer.convert_tokens_to_ids("<|end|>")]
    game = tasks.make_env()
    game.reset(tasks.train[5])
    for error, where in (
        (RuntimeError("no way"), "oracle_action"),
        (envs.EnvironmentFailed("died"), "oracle_action"),
        (envs.EnvironmentFailed("died"), "step"),
    ):
        broken = tasks.make_env()
        setattr(broken, where, lambda *_, error=error: (_ for _ in ()).throw(error))
        assert not continue_by_oracle(Branch(0, 0, 0, "t", [5]), broken, game.snapshot(), 9, tokenizer, stops, 2048, gains)


def test_an_oracle_that_knows_no_further_keeps_what_it_gained_and_the_context_bounds_the_branch(household):
    tasks, tokenizer = household
    stops = [tokenizer.convert_tokens_to_ids("<|end|>")]
    game = tasks.make_env()
    prompt = sero.encode(tokenizer, game.reset(tasks.train[5]))
    whole = Branch(0, 0, 0, "t", prompt)
    assert continue_by_oracle(whole, tasks.make_env(), game.snapshot(), 9, tokenizer, stops, 2048, gains)
    stuck, plan, asked = tasks.make_env(), type(game).oracle_action, []

    def two_only():
        asked.append(1)
        if len(asked) > 2:
            raise RuntimeError("no further")
        return plan(stuck)

    stuck.oracle_action = two_only
    for branch, env, context in (
        (Branch(0, 0, 0, "t", prompt), stuck, 2048),
        (Branch(0, 0, 0, "t", prompt), tasks.make_env(), len(prompt) + whole.spans[2][1] - 1),
    ):
        assert continue_by_oracle(branch, env, game.snapshot(), 9, tokenizer, stops, context, gains)
        assert branch.spans == whole.spans[:2] and branch.token_ids == whole.token_ids[: whole.spans[1][1]]
        assert len(branch.target_mask) == len(branch.token_ids)


# ---------------------------------------------------------------------------------------------------- banks


def test_banks_are_checked_line_by_line(tmp_path):
    import json
    from dataclasses import asdict

    good = Branch(0, 0, 1, "t", [1, 2], [3, 4, 9, 5], [True, True, False, True], [(0, 2), (3, 4)], 10.0, 0.0)
    path = tmp_path / "bank.jsonl"
    path.write_text(json.dumps(asdict(good)) + "\n")
    assert sero.read_bank(str(path), 10) == [good]
    for change in ({"token_ids": [3, 4, 99, 5]}, {"spans": [[0, 1]]}, {"target_mask": [True]}, {"spans": []}, {"prompt_ids": []}, {"extra": 1}):
        path.write_text(json.dumps(asdict(good)) + "\n" + json.dumps({**asdict(good), **change}) + "\n")
        with pytest.raises(envs.DataError, match=r"bank.jsonl, line 2: not a branch"):
            sero.read_bank(str(path), 10)
    path.write_text("{")
    with pytest.raises(envs.DataError, match="line 1"):
        sero.read_bank(str(path), 10)
    path.write_text("")
    with pytest.raises(envs.DataError, match="no branch"):
        sero.read_bank(str(path), 10)
    with pytest.raises(envs.DataError, match="--save-bank"):
        sero.read_bank(str(tmp_path / "none"), 10)
