"""ante_bapo.py's pure functions: the identities of the method, slow float64 loops, tables worked out by hand, beliefs token by token."""

import dataclasses
import itertools
import json
import math
import random

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import ante_bapo
import ante_beliefs
import ante_report
from ante_bapo import ACTION, DECISION, FORECAST, SUMMARY, Anticipator, Args
from ante_beliefs import parse_belief, read_trajectories, render
from ante_report import draw_reliability, reliability
from common import envs, policies, sft
from common.arguments import ArgumentError
from common.engine import Sample, Sampling
from common.envs import repo
from common.envs.repo_hindsight import hindsight
from common.packing import pack_rows
from common.rollout import Episode, Turn, make_layout

F64 = torch.float64


def f64(*x):
    return torch.tensor(x, dtype=F64)


def ints(*x):
    return torch.tensor(x, dtype=torch.int64)


def bools(*x):
    return torch.tensor(x, dtype=torch.bool)


# --------------------------------------------------------------------------------------------------------------- (1) beliefs

WHOLE = "note total broken\nexpect FAIL yes TRUST\ntotal is x\nedit cart.py 4: return x"


def test_a_belief_is_read_factor_by_factor():
    b = parse_belief(WHOLE, "ante")
    assert (b.check, b.exit, b.decision, b.well_formed) == ("FAIL", "yes", "TRUST", True)
    assert WHOLE[slice(*b.summary)] == "note total broken\n"
    assert WHOLE[slice(*b.values)] == "FAIL yes"
    assert WHOLE[slice(*b.decided)] == "TRUST"
    assert b.action == "total is x\nedit cart.py 4: return x"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "test",
        "note x\ntest",
        "note x\nexpect MAYBE yes TRUST\ntest",
        "note x\nexpect PASS yes\ntest",
        "note x\nexpect PASS perhaps TRUST\ntest",
        "note x\nexpect PASS yes TRUSTED\ntest",
        "expect PASS yes TRUST\ntest",
        "so\nnote x\nexpect PASS yes TRUST\ntest",
        "note x\n\nexpect PASS yes TRUST\ntest",
    ],
)
def test_malformed_beliefs_commit_to_nothing_and_are_executed_as_they_stand(text):
    b = parse_belief(text, "ante")
    assert (b.check, b.exit, b.decision, b.well_formed) == ("NA", "no", "ABSTAIN", False)
    assert b.action == text


@pytest.mark.parametrize(
    "text, parts",
    [
        ("test", ("", "", "")),
        ("so\nnote x\nexpect PASS yes TRUST\ntest", ("", "", "")),
        ("note x\ntest", ("note x\n", "", "")),
        ("note x\nexpect MAYBE yes TRUST\ntest", ("note x\n", "", "")),
        ("note x\nexpect PASSED yes TRUST\ntest", ("note x\n", "", "")),
        ("note x\nexpect PASS maybe TRUST\ntest", ("note x\n", "PASS", "")),
        ("note x\nexpect PASS yes\ntest", ("note x\n", "PASS yes", "")),
        ("note x\nexpect PASS yes TRUSTED\ntest", ("note x\n", "PASS yes", "")),
        ("note x\nexpect PASS yes TRUST test", ("note x\n", "PASS yes", "TRUST")),
    ],
)
def test_a_malformed_belief_keeps_the_parts_that_stand_there(text, parts):
    """Or the same summary would be trained in bad messages only."""
    b = parse_belief(text, "ante")
    assert not b.well_formed
    assert tuple(text[slice(*span)] for span in (b.summary, b.values, b.decided)) == parts


def test_the_other_kinds_have_no_forecast():
    memory = parse_belief("note total broken\ntest", "retrospective")
    assert (memory.action, memory.well_formed, memory.check) == ("test", True, "NA")
    assert parse_belief("test", "retrospective").action == "test"
    assert parse_belief(WHOLE, "reactive").action == WHOLE


@given(
    st.sampled_from(ante_beliefs.CHECKS), st.sampled_from(ante_beliefs.EXITS), st.sampled_from(ante_beliefs.DECISIONS),
    st.text("ab 1", max_size=8), st.text("ab\n", max_size=8),
)  # fmt: skip
def test_what_is_rendered_is_parsed(check, exit, decision, summary, action):
    b = parse_belief(render("ante", summary, check, exit, decision, action), "ante")
    assert (b.check, b.exit, b.decision, b.action) == (check, exit, decision, action)
    assert parse_belief(render("retrospective", summary, check, exit, decision, action), "retrospective").action == action
    assert render("reactive", summary, check, exit, decision, action) == action


def test_the_environment_sees_the_action_alone_and_the_policy_the_format():
    class Echo:
        def reset(self, task):
            return [{"role": "user", "content": "go"}]

        def step(self, text):
            return text, 0.0, False, False, {}

    env = ante_beliefs.BeliefEnv(Echo(), "ante")
    assert env.reset({}) == [{"role": "system", "content": ante_beliefs.FORMAT["ante"]}, {"role": "user", "content": "go"}]
    assert env.step(WHOLE)[0] == "total is x\nedit cart.py 4: return x"
    assert env.state_key() != env.state_key()  # without states of its own, every one is new
    assert ante_beliefs.BeliefEnv(Echo(), "reactive").reset({}) == [{"role": "user", "content": "go"}]


def test_outcome_of_environments_with_and_without_checks():
    assert ante_beliefs.outcome({"check": "FAIL", "exit": "no"}) == ("FAIL", "no")
    assert ante_beliefs.outcome({}) == ("NA", "yes")
    assert ante_beliefs.outcome({"invalid": True}) == ("NA", "no")


# -------------------------------------------------------------------------------------------------- (2) hindsight and its leaks


def test_a_summary_leaks_when_it_says_what_only_the_result_could():
    assert ante_beliefs.leaks("bill broken", "total is wrong", "FAIL test_bill: 3 == 4")
    assert not ante_beliefs.leaks("bill broken", "bill is wrong", "FAIL test_bill: 3 == 4")
    assert not ante_beliefs.leaks("bill broken", "total is wrong", "PASS 4 tests")
    assert ante_beliefs.leaks("will FAIL", "total is wrong", "FAIL 1 of 4")


def test_annotation_drops_leaks_and_keeps_the_rest():
    conversation = [
        {"role": "system", "content": "repair"}, {"role": "user", "content": "total is wrong"}, {"role": "assistant", "content": "test"},
        {"role": "user", "content": "FAIL test_bill"}, {"role": "assistant", "content": "submit"},
    ]  # fmt: skip
    results = [{"check": "FAIL", "exit": "yes", "summary": "bill broken", "knowable": True}, {"check": "PASS", "exit": "yes", "summary": "bill broken"}]
    out, dropped = ante_beliefs.annotate(conversation, results, "ante")
    assert dropped == 1
    assert [m["content"] for m in out] == [
        "repair\n" + ante_beliefs.FORMAT["ante"], "total is wrong", "note unsure\nexpect FAIL yes TRUST\ntest", "FAIL test_bill",
        "note bill broken\nexpect PASS yes ABSTAIN\nsubmit",
    ]  # fmt: skip
    assert ante_beliefs.annotate(conversation, results, "reactive")[0] == conversation
    assert [m["content"] for m in ante_beliefs.annotate(conversation, results, "retrospective")[0]][2] == "note unsure\ntest"


@pytest.fixture(scope="module")
def tasks():
    return envs.load("repo")


def test_hindsight_says_what_really_happened_and_when_it_could_be_known(tasks):
    rng = random.Random(3)
    seen = set()
    for task in tasks.train[:60]:
        conversation = tasks.careless(task, rng)
        results = hindsight(task, conversation)
        env = repo.RepoEnv(visible=repo.trusted_verdict, grade=repo.trusted_grade)
        env.reset(task)
        changed, read = False, set()
        for text, r in zip([m["content"] for m in conversation if m["role"] == "assistant"], results, strict=True):
            repaired = all(env.files[name] == text for name, text in task["fixed"].items())
            visible_wrong = any(env.files[name] != task["fixed"][name] for name in read)
            info = env.step(text)[4]
            action = repo.parse_action(text)
            assert (r["check"], r["exit"]) == (info["check"], info["exit"])
            if r["check"] == "NA" or not changed or visible_wrong:
                assert r["knowable"]
            if r["check"] != "NA" and changed and not r["knowable"]:
                assert not visible_wrong
                assert read != set(task["fixed"])  # something was not looked at
            seen.add((r["check"], r["knowable"], repaired))
            if action.verb == "read":
                read.add(action.file)
            changed = action.verb == "edit" or (changed and action.verb != "test")
    assert {(check, known) for check, known, _ in seen} == {("NA", True), ("FAIL", True), ("PASS", True), ("FAIL", False), ("PASS", False)}


def test_warm_starts_of_all_kinds_come_from_the_same_trajectories(tasks):
    few = dataclasses.replace(tasks, train=tasks.train[:12])
    kinds = {kind: ante_bapo.warm_start_conversations(few, kind) for kind in ante_beliefs.FORMAT}
    assert len(kinds["ante"]) == 36
    for ante, memory, reactive in zip(*kinds.values(), strict=True):
        said = [[m["content"] for m in c if m["role"] == "assistant"] for c in (ante, memory, reactive)]
        for a, b, c in zip(*said, strict=True):
            belief = parse_belief(a, "ante")
            assert belief.well_formed
            assert belief.action == c == parse_belief(b, "retrospective").action
            assert a.startswith(b.split("\n")[0] + "\n")
        assert [m for m in ante if m["role"] == "user"] == [m for m in reactive if m["role"] == "user"]
    assert ante_bapo.warm_start_conversations(few) == kinds["ante"]
    for conversation in ante_beliefs.successful_conversations(few, "ante"):
        assert conversation[-1]["content"].endswith("expect PASS yes TRUST\nsubmit")


def test_a_summary_leaks_whatever_its_case_and_ending_and_a_malformed_belief_forecasts_nothing():
    assert ante_beliefs.leaks("all will pass", "test FAIL 1 of 3", "PASS 3 tests PASS") and ante_beliefs.leaks("it failed", "", "FAIL 1")
    assert not ante_beliefs.leaks("tests pass", "PASS 3 tests", "PASS 3 tests")
    step = ante_bapo.Step(parse_belief("nonsense", "ante"), ("NA", "no"), [], float("nan"), 0, [])
    assert not step.right


ROW = {
    "messages": [
        {"role": "user", "content": "x is wrong"}, {"role": "assistant", "content": "test"},
        {"role": "user", "content": "FAIL"}, {"role": "assistant", "content": "submit"},
    ],
    "steps": [{"check": "FAIL", "exit": "yes", "summary": "x reported", "knowable": True}, {"check": "PASS", "exit": "yes"}],
}  # fmt: skip


def test_recorded_trajectories(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (ROW, ROW | {"success": 0}, ROW | {"success": 0.5})))
    rows, counts = read_trajectories(str(file), ante_beliefs.CHECKS, ante_beliefs.EXITS)
    assert counts == {"used": 2, "failed": 1}
    assert rows == [(ROW["messages"], ROW["steps"])] * 2


@pytest.mark.parametrize(
    "change, says",
    [
        ("{", "not JSON"),
        ("[]", "no object"),
        ({"success": "yes"}, "field success"),
        ({"messages": []}, "field messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "field messages"),
        ({"messages": [{"role": "tool", "content": "a"}, *ROW["messages"]]}, "field messages: roles ['tool']"),
        ({"messages": ROW["messages"][1:]}, "field messages"),
        ({"messages": ROW["messages"][:3]}, "field messages"),
        ({"messages": [ROW["messages"][0], *ROW["messages"]]}, "two of one role"),
        ({"steps": ROW["steps"][:1]}, "field steps: 1 for 2"),
        ({"steps": "none"}, "field steps"),
        ({"steps": [ROW["steps"][0], {"check": "pass", "exit": "yes"}]}, "step 2: check 'pass'"),
        ({"steps": [ROW["steps"][0], {"check": "PASS", "exit": "0"}]}, "exit '0'"),
        ({"steps": [ROW["steps"][0], ROW["steps"][1] | {"summary": "a\nb"}]}, "summary must be one line"),
        ({"steps": [ROW["steps"][0], ROW["steps"][1] | {"knowable": "no"}]}, "knowable true or false"),
        ({"success": 0}, "no successful trajectory among 2"),
    ],
)
def test_bad_trajectories_name_file_line_and_field(tmp_path, change, says):
    file = tmp_path / "t.jsonl"
    lines = [json.dumps(ROW | {"success": 0}), change if isinstance(change, str) else json.dumps(ROW | change)]
    file.write_text("\n".join(lines))
    with pytest.raises(envs.DataError) as e:
        read_trajectories(str(file), ante_beliefs.CHECKS, ante_beliefs.EXITS)
    assert str(file) in str(e.value)
    assert says in str(e.value)
    assert "line 2" in str(e.value) or "among" in str(e.value)


# ------------------------------------------------------------------------------------------------ tokens of a message


@pytest.fixture(scope="module")
def tokenizer():
    rows = [
        [{"role": "user", "content": f"{c} {d} {x}"}, {"role": "assistant", "content": render("ante", "total broken", c, x, d, "test")}]
        for c, d, x in itertools.product(ante_beliefs.CHECKS, ante_beliefs.DECISIONS, ante_beliefs.EXITS)
    ]
    return policies.tiny_tokenizer(rows * 3, 300)


def as_turn(tokenizer, text, info, start=0):
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return Turn(start, start + len(ids), text, False, info=info), ids


@pytest.mark.parametrize("split", ["whole", "bytes"])
@pytest.mark.parametrize("truth", [("PASS", "yes"), ("FAIL", "yes"), ("NA", "no")])
def test_factors_and_targets_of_tokens(tokenizer, split, truth):
    """Also where a value is many tokens: a tokenizer that knows no words."""
    words = tokenizer if split == "whole" else policies.tiny_tokenizer([[{"role": "user", "content": "a"}]], 262)
    turn, ids = as_turn(words, WHOLE, dict(zip(("check", "exit"), truth)))
    s = ante_bapo.read_step(turn, ids, [-0.1] * len(ids), words, "ante")
    text = {f: "".join(words.decode([i]) for i, g in zip(ids, s.factors) if g == f) for f in range(4)}
    assert text[SUMMARY] == "note total broken\n"
    assert text[FORECAST].strip() == "FAIL yes"
    assert text[DECISION].strip() == "TRUST"
    assert text[ACTION].replace(" ", "").startswith("expect")
    assert text[ACTION].endswith("return x<|end|>")
    values = [i for i, f in enumerate(s.factors) if f == FORECAST]
    assert values == list(range(values[0], values[-1] + 1))
    assert s.first_value == values[0]
    written = words.decode(ids[: s.first_value] + s.target_ids + ids[values[-1] + 1 :])
    assert written == WHOLE.replace("FAIL yes", " ".join(truth)) + "<|end|>"
    assert s.right == (truth == ("FAIL", "yes"))
    assert s.conclusive == (truth[0] != "NA")
    assert s.confidence == pytest.approx(math.exp(-0.1 * len(values)))
    if s.right:
        assert s.target_ids == ids[values[0] : values[-1] + 1]


def test_a_message_without_belief_is_all_action(tokenizer):
    turn, ids = as_turn(tokenizer, "test", {"check": "FAIL", "exit": "yes"})
    for kind in ("ante", "retrospective", "reactive"):
        s = ante_bapo.read_step(turn, ids, [0.0] * len(ids), tokenizer, kind)
        assert s.factors == [ACTION] * len(ids)
        assert s.target_ids == []
        assert math.isnan(s.confidence)


def test_a_malformed_belief_trains_its_summary_and_forecast_by_nothing(tokenizer):
    turn, ids = as_turn(tokenizer, "note total broken\nexpect FAIL yes so\ntest", {"check": "FAIL", "exit": "yes"})
    s = ante_bapo.read_step(turn, ids, [0.0] * len(ids), tokenizer, "ante")
    text = {f: "".join(tokenizer.decode([i]) for i, g in zip(ids, s.factors) if g == f) for f in range(4)}
    assert (text[SUMMARY], text[FORECAST].strip(), text[DECISION]) == ("note total broken\n", "FAIL yes", "")
    assert s.target_ids == []
    assert math.isnan(s.confidence)


def episode_of(tokenizer, messages, group=0, sample=0, reward=0.0):
    """An episode of (text, info) turns with one observation token in between."""
    e = Episode(group, sample, {"id": "t"}, prompt_ids=[5, 6, 7], reward=reward, success=reward)
    for text, info in messages:
        if e.turns:
            e.token_ids.append(9)
            e.policy_mask.append(False)
        turn, ids = as_turn(tokenizer, text, info, len(e.token_ids))
        e.turns.append(turn)
        e.token_ids += ids
        e.policy_mask += [True] * len(ids)
        e.logprobs += [-0.5] * len(ids)
    return e


def read_all(tokenizer, episodes):
    out = []
    for e in episodes:
        at = iter(e.logprobs)
        out.append([ante_bapo.read_step(t, e.token_ids[t.start : t.stop], [next(at) for _ in range(t.stop - t.start)], tokenizer, "ante") for t in e.turns])
    return out


def two_episodes(tokenizer):
    def said(*belief):
        return render("ante", "total broken", *belief, "test")

    a = [(said("FAIL", "yes", "TRUST"), {"check": "FAIL", "exit": "yes"}), (said("PASS", "yes", "TRUST"), {"check": "FAIL", "exit": "yes"})]
    b = [("test", {"check": "FAIL", "exit": "yes"}), (said("NA", "yes", "ABSTAIN"), {"check": "NA", "exit": "no"})]
    return [episode_of(tokenizer, a, 0, 0, 1.0), episode_of(tokenizer, b, 0, 1, 0.0)]


@pytest.mark.parametrize("which, right, replaced", [("all", 1, [1, 1]), ("conclusive", 1, [1, 0]), ("none", 0, [0, 0])])
def test_which_forecasts_are_learned(tokenizer, which, right, replaced):
    episodes = two_episodes(tokenizer)
    beliefs = read_all(tokenizer, episodes)
    layout = make_layout([[t.stop - t.start for t in e.turns] for e in episodes])
    mask, places = ante_bapo.forecast_targets(episodes, beliefs, layout, which, 512)
    first = beliefs[0][0]
    assert mask.nonzero()[:, 0].tolist() == (list(range(first.first_value, first.first_value + len(first.target_ids))) if right else [])
    assert [len(own) for own in places] == replaced
    for e, own in zip(episodes, places):
        for at, ids in own:
            whole = tokenizer.decode(e.token_ids[e.turns[1].start : at] + ids)
            assert whole.strip().endswith(("expect FAIL yes", "expect NA no"))
    if which == "all":
        assert ante_bapo.forecast_targets(episodes, beliefs, layout, which, 10)[1] == [[], []]  # no room for them


def test_who_learns_from_what_on_a_model(tokenizer):
    """(3) Gradients of the real loss through a model's log-probs: exactly 0 on summary tokens; on forecast tokens only from L_pred, with that term's value
    as an ordinary forward pass of the replaced text gives it."""
    episodes = two_episodes(tokenizer)
    beliefs = read_all(tokenizer, episodes)
    layout = make_layout([[t.stop - t.start for t in e.turns] for e in episodes])
    right, replaced = ante_bapo.forecast_targets(episodes, beliefs, layout, "all", 512)
    factors = ints(*[f for own in beliefs for s in own for f in s.factors])
    extra = [(e.prompt_ids, e.token_ids[:at] + ids) for e, own in zip(episodes, replaced) for at, ids in own]
    masks = [e.policy_mask for e in episodes] + [[False] * at + [True] * len(ids) for own in replaced for at, ids in own]
    batch = pack_rows([(e.prompt_ids, e.token_ids) for e in episodes] + extra, True, 0, masks)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, initializer_range=0.3
    )
    lm = transformers.LlamaForCausalLM(config)
    logprobs, _ = ante_bapo.Policy(lm)(batch)
    logprobs.retain_grad()
    n = len(factors)
    weights = ((factors == ACTION) | (factors == DECISION)).float()
    weights = weights / weights.sum()
    policy, _ = ante_bapo.policy_loss(logprobs[:n], logprobs[:n].detach(), torch.full((n,), -0.5), torch.ones(n), weights, 0.2, 0.28, 2.0, torch.zeros(n), 0.1)
    learned = torch.cat([right, torch.ones(len(logprobs) - n, dtype=torch.bool)]).float()
    pred = ante_bapo.forecast_loss(logprobs, learned / learned.sum())
    (policy + 0.3 * pred).backward()
    grad = logprobs.grad
    assert (grad[:n][factors == SUMMARY] == 0).all()
    forecast = (factors == FORECAST).nonzero()[:, 0]
    assert (grad[forecast] == torch.where(right[forecast], -0.3 / learned.sum(), 0.0)).all()
    assert (grad[n:] == -0.3 / learned.sum()).all()
    assert (grad[:n][weights > 0] != 0).all()
    wanted = []
    for e, own in zip(episodes, beliefs):
        for t, s in zip(e.turns, own):
            if s.target_ids:
                head = e.prompt_ids + e.token_ids[: t.start + s.first_value]
                out = lm(torch.tensor([head + s.target_ids]), use_cache=False).logits[0].float().log_softmax(-1)
                wanted += [-out[len(head) + k - 1, i] for k, i in enumerate(s.target_ids)]
    assert len(wanted) == int(learned.sum())
    assert float(pred.detach()) == pytest.approx(float(torch.stack(wanted).mean().detach()), rel=1e-4)


# --------------------------------------------------------------------------------------------- (4) the reward of a decision


@given(st.floats(0.01, 1.0), st.floats(0.05, 0.95))
def test_trust_pays_from_the_target_accuracy_on(alpha, q):
    right, wrong, abstain, nothing = ante_bapo.decision_rewards(bools(1, 1, 0, 1), bools(1, 0, 0, 1), bools(1, 1, 1, 0), alpha, q, 0.005).tolist()
    assert (right, abstain, nothing) == (pytest.approx(alpha), -0.005, 0.0)
    assert q * right + (1 - q) * wrong == pytest.approx(0, abs=1e-12)
    assert (q + 0.01) * right + (0.99 - q) * wrong > 0 > (q - 0.01) * right + (1.01 - q) * wrong
    bar = q - 0.005 * (1 - q) / alpha  # TRUST beats ABSTAIN above it
    assert bar * right + (1 - bar) * wrong == pytest.approx(abstain, abs=1e-12)


def test_decision_returns_by_hand():
    layout = make_layout([[2, 1, 3], [1]])
    g = ante_bapo.decision_returns(f64(0.1, -0.2, 0.5, 0.3), f64(1.0, 0.0), layout)
    assert torch.allclose(g, f64(1.4, 1.3, 1.5, 0.3), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------------ (5) BAPO


def slow_terms(g, keys, decisions, groups, how, eps):
    """By the definitions, one step at a time."""
    out = []
    for t in range(len(g)):
        same = [g[u] for u in range(len(g)) if keys[u] == keys[t]]
        alike = [g[u] for u in range(len(g)) if keys[u] == keys[t] and decisions[u] == decisions[t]]
        task = [g[u] for u in range(len(g)) if groups[u] == groups[t]]
        v, q = sum(same) / len(same), sum(alike) / len(alike)
        d = q - v if how == "q_minus_v" else g[t] - q
        mean = sum(task) / len(task)
        std = math.sqrt(sum((x - mean) ** 2 for x in task) / max(len(task) - 1, 1))
        out.append((g[t] - v + d) / (std + eps))
    return out


def test_bapo_on_six_steps_by_hand():
    """One task. Forecast A: steps 0 1 2, g = 1 2 6, of which 0 and 1 trust; B: steps 3 and 4, g = 4 2, trusting and abstaining; C: step 5, g = 3.

    V = 3 3 3 | 3 3 | 3; Q = 1.5 1.5 6 | 4 2 | 3. All g: mean 3, squared deviations 4 1 9 1 1 0, so std = sqrt(16 / 5).
    """
    g, keys, decisions, groups = f64(1, 2, 6, 4, 2, 3), ints(0, 0, 0, 1, 1, 2), ints(1, 1, 0, 1, 0, 1), ints(0, 0, 0, 0, 0, 0)
    std = math.sqrt(16 / 5)
    terms, size = ante_bapo.step_terms(g, keys, decisions, groups, "q_minus_v", 0.0)
    assert torch.allclose(terms * std, f64(-2 - 1.5, -1 - 1.5, 3 + 3, 1 + 1, -1 - 1, 0), atol=1e-12)
    assert size.tolist() == [3, 3, 3, 2, 2, 1]
    terms, _ = ante_bapo.step_terms(g, keys, decisions, groups, "g_minus_q", 0.0)
    assert torch.allclose(terms * std, f64(-2 - 0.5, -1 + 0.5, 3 + 0, 1 + 0, -1 + 0, 0), atol=1e-12)
    terms, _ = ante_bapo.step_terms(g, keys, None, groups, "q_minus_v", 0.0)
    assert torch.allclose(terms * std, f64(-2, -1, 3, 1, -1, 0), atol=1e-12)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.integers(-3, 3)), min_size=1, max_size=14)


def table(rows):
    groups, forecast, decisions, g = zip(*rows)
    return f64(*[x / 4 for x in g]), ante_bapo.key_ids(list(zip(groups, forecast))), ints(*decisions), ints(*groups)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.sampled_from(["q_minus_v", "g_minus_q"]))
def test_terms_against_loops(rows, how):
    g, keys, decisions, groups = table(rows)
    got, size = ante_bapo.step_terms(g, keys, decisions, groups, how, 1e-6)
    want = slow_terms(g.tolist(), keys.tolist(), decisions.tolist(), groups.tolist(), how, 1e-6)
    assert got.tolist() == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert size.tolist() == [keys.tolist().count(k) for k in keys.tolist()]
    assert (got[size == 1] == 0).all()  # exactly: nothing to compare with


@settings(max_examples=60, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_group_means_do_not_depend_on_the_order_of_episodes(rows, rng):
    order = list(range(len(rows)))
    rng.shuffle(order)
    g, keys, decisions, groups = table(rows)
    mixed = ante_bapo.step_terms(g[order], keys[order], decisions[order], groups[order], "q_minus_v", 1e-6)[0]
    assert mixed.tolist() == pytest.approx(ante_bapo.step_terms(g, keys, decisions, groups, "q_minus_v", 1e-6)[0][order].tolist(), rel=1e-9, abs=1e-9)


def test_one_forecast_one_decision_leaves_no_decision_term():
    g, keys, groups = f64(1, 2, 6), ints(0, 0, 0), ints(0, 0, 0)
    both, alone = (ante_bapo.step_terms(g, keys, d, groups, "q_minus_v", 1e-6)[0] for d in (ints(1, 1, 1), None))
    assert torch.equal(both, alone)
    equal = ante_bapo.step_terms(f64(0.1, 0.1, 0.1), keys, ints(1, 0, 1), groups, "q_minus_v", 1e-6)[0]
    assert (equal == 0).all()


def test_group_mean_of_equal_values_is_exact():
    x = f64(*[0.1] * 7, 0.3)
    mean, size = ante_bapo.group_mean(x, ints(*[4] * 7, 0))
    assert torch.equal(mean, x)
    assert size.tolist() == [7] * 7 + [1]
    assert ante_bapo.group_mean(f64(), ints())[0].shape == (0,)


def test_coverage_asks_for_another_episode():
    keys, episodes = ints(0, 0, 1, 1, 2, 2), ints(0, 0, 0, 1, 1, 2)
    assert ante_bapo.coverage(keys, episodes).tolist() == [False, False, True, True, True, True]


def test_keys_of_steps(tokenizer):
    def said(*belief):
        return render("ante", "total broken", *belief, "test")

    fail, na, passed = {"check": "FAIL", "exit": "yes"}, {"check": "NA", "exit": "yes"}, {"check": "PASS", "exit": "yes"}
    a = episode_of(tokenizer, [(said("FAIL", "yes", "TRUST"), fail), (said("NA", "yes", "TRUST"), na), (said("PASS", "yes", "TRUST"), passed)], 0, 0)
    b = episode_of(tokenizer, [("test", fail), (said("PASS", "yes", "ABSTAIN"), fail)], 0, 1)
    c = episode_of(tokenizer, [(said("FAIL", "yes", "TRUST"), fail)], 1, 0)
    episodes = [a, b, c]
    keys = ante_bapo.step_keys(episodes, read_all(tokenizer, episodes), {(0, 0): ["s", "s", "t"], (0, 1): ["s", "u"], (1, 0): ["s"]})
    assert keys["bapo"].tolist() == [0, 1, 2, 3, 2, 4]  # the malformed belief of b groups as (NA, no)
    assert keys["gigpo"].tolist() == [0, 0, 1, 0, 2, 3]
    assert keys["rebel"].tolist() == [0, 1, 2, 0, 2, 3]  # no verdict; FAIL and the same state; FAIL and another


# -------------------------------------------------------------------------------------------------------------------- the loss


def test_policy_loss_by_hand():
    """Ratios 1.5 and 0.5 with advantages of both signs: clipped above at 1.28, below at 0.8; the TIS weight multiplies what is left; weight 0 is silent."""
    old = f64(-1, -1, -1, -1, -1)
    logprobs = (old + torch.log(f64(1.5, 1.5, 0.5, 0.5, 7.0))).requires_grad_()
    rollout = old - torch.log(f64(1, 1, 1, 1.5, 1))
    loss, metrics = ante_bapo.policy_loss(logprobs, old, rollout, f64(1, -1, 1, -1, 5), f64(0.25, 0.25, 0.25, 0.25, 0.0), 0.2, 0.28, 2.0)
    assert float(loss) == pytest.approx(0.25 * (-1.28 + 1.5 - 0.5 + 1.5 * 0.8))
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0.25 * 1.5, -0.25 * 0.5, 0, 0])
    assert metrics["losses/clipfrac"] == (2.0, 4.0)
    with_kl, metrics = ante_bapo.policy_loss(logprobs.detach(), old, old, f64(0, 0, 0, 0, 0), f64(0.25, 0.25, 0.25, 0.25, 0), 0.2, 0.28, 0.0, old, 2.0)
    k3 = [1 / r - 1 + math.log(r) for r in (1.5, 1.5, 0.5, 0.5)]
    assert float(with_kl) == pytest.approx(2.0 * sum(k3) / 4)
    assert metrics["losses/kl"] == (pytest.approx(sum(k3)), 4.0)


# -------------------------------------------------------------------------------------------------------------- measurements


def test_verdict_scores_by_hand():
    assert ante_report.verdict_scores(4, 1, 2, 3) == {"accuracy": 0.7, "mcc": pytest.approx((12 - 2) / math.sqrt(5 * 6 * 4 * 5))}
    assert math.isnan(ante_report.verdict_scores(4, 1, 0, 0)["mcc"])
    assert ante_report.with_verdict({"x/verdict/tp": 0.5, "x/verdict/fp": 0.0, "x/verdict/fn": 0.0, "x/verdict/tn": 0.5}, "x/")["x/verdict_mcc"] == 1
    assert "verdict_mcc" not in ante_report.with_verdict({"a": 1.0}, "")


def test_belief_metrics_by_hand(tokenizer):
    episodes = two_episodes(tokenizer)
    m = ante_report.belief_metrics(list(zip(episodes, read_all(tokenizer, episodes))))
    assert m["hit_rate"] == (1.0, 3.0)  # FAIL came; PASS did not; the malformed one said NA
    assert m["hit_rate_all"] == (1.0, 4.0)
    assert m["trust_rate"] == (2.0, 3.0)
    assert m["trust_precision"] == (1.0, 2.0)
    assert m["abstain_hit_rate"] == (0.0, 1.0)
    assert m["malformed_frac"] == (1.0, 4.0)
    assert m["checks_per_episode"] == (3.0, 2.0)
    assert [m[f"verdict/{name}"] for name in ante_report.VERDICTS] == [(1.0, 2.0), (0.0, 2.0), (0.0, 2.0), (1.0, 2.0)]


def test_reliability_by_hand(tmp_path):
    rows, error = reliability([0.05, 0.95, 0.91, 1.0], [False, True, False, True])
    assert [(r["low"], r["count"], r["accuracy"]) for r in rows] == [(0.0, 1, 0.0), (0.9, 3, pytest.approx(2 / 3))]
    assert error == pytest.approx((0.05 + abs(0.95 + 0.91 + 1.0 - 2)) / 4)
    assert math.isnan(reliability([], [])[1])
    words = draw_reliability(tmp_path / "r.png", [(0.05, False, False), (0.95, True, True)], 0.7)
    assert "0.9 to 1.0: 1.00 of 1" in words
    assert (tmp_path / "r.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------------- (6) anticipation


class Scripted:
    """An engine that says what it is told: `first` greedy, then `more` when it is asked for candidates."""

    pad_token_id = 0

    def __init__(self, tokenizer, first, more):
        self.tokenizer, self.first, self.more, self.calls = tokenizer, first, more, []

    def end_sessions(self):
        pass

    def sample(self, text):
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        return Sample(ids, [0.0] * len(ids), "stop", 0)

    def generate(self, prompts, sampling, n, seeds, session_ids=None):
        self.calls.append((len(prompts), n, sampling.temperature))
        texts = [[t] for t in self.first] if session_ids is not None else self.more
        return [[self.sample(t) for t in row] for row in texts[: len(prompts)]]


def says(check, exit="yes", decision="TRUST", action="test"):
    return render("ante", "x", check, exit, decision, action)


def anticipate(tokenizer, first, more, candidates=3):
    engine = Scripted(tokenizer, first, more)
    by = Anticipator(engine, tokenizer, "ante", candidates, 1.0)
    out = by.generate([[1]] * len(first), Sampling(0.0, 64, (tokenizer.eos_token_id,)), 1, [[7 + i] for i in range(len(first))], list(range(len(first))))
    assert all(len(row) == 1 for row in out)  # one message a turn goes on to the environment, whatever was considered
    return [tokenizer.decode(row[0].token_ids[:-1]) for row in out], by, engine


@pytest.mark.parametrize(
    "first, more, chosen",
    [
        (says("FAIL"), [says("NA", action="read a"), says("PASS")], 2),
        (says("FAIL"), [says("NA", "no"), says("NA", action="read a")], 2),
        (says("PASS", decision="ABSTAIN"), [says("PASS", action="submit"), says("PASS", action="list")], 0),
        (says("PASS", "no", "ABSTAIN"), [says("PASS", action="submit"), says("PASS", action="list")], 1),
        (says("FAIL"), [says("FAIL", action="submit"), "nonsense"], 2),
        ("nonsense", [says("FAIL"), "more nonsense"], 0),
    ],
)
def test_the_candidate_with_the_best_own_belief_is_executed(tokenizer, first, more, chosen):
    said, by, engine = anticipate(tokenizer, [first], [more])
    assert said == [[first, *more][chosen]]
    assert (by.asked, by.changed) == (1, int(chosen > 0))
    assert engine.calls == [(1, 1, 0.0), (1, 2, 1.0)]
    assert by.tokens == sum(len(tokenizer(t).input_ids) + 1 for t in (first, *more))


def test_without_a_trigger_it_is_plain_decoding(tokenizer):
    texts = [says("PASS"), says("NA", "no"), says("NA", action="read a")]
    said, by, engine = anticipate(tokenizer, texts, [])
    assert said == texts
    assert engine.calls == [(3, 1, 0.0)]
    assert (by.asked, by.changed) == (0, 0)
    said, by, engine = anticipate(tokenizer, [says("FAIL")], [], candidates=1)
    assert said == [says("FAIL")]
    assert engine.calls == [(1, 1, 0.0)]


def test_only_those_who_ask_are_asked_again(tokenizer):
    said, _, engine = anticipate(tokenizer, [says("PASS"), says("FAIL"), says("NA")], [[says("NA", action="read a"), says("FAIL")]])
    assert said == [says("PASS"), says("NA", action="read a"), says("NA")]
    assert engine.calls == [(3, 1, 0.0), (1, 2, 1.0)]


def test_one_candidate_a_step_is_executed(tokenizer):
    """Through `rollout`, with an environment that counts."""

    class Counting:
        executed = 0

        def reset(self, task):
            return [{"role": "user", "content": "go"}]

        def step(self, text):
            Counting.executed += 1
            return "go on", 0.0, False, False, {"check": "FAIL", "exit": "yes"}

    class Always(Scripted):
        def generate(self, prompts, sampling, n, seeds, session_ids=None):
            self.first, self.more = [says("FAIL")] * len(prompts), [[says("NA", action="read a"), says("PASS")]] * len(prompts)
            return super().generate(prompts, sampling, n, seeds, session_ids)

    by = Anticipator(Always(tokenizer, [], []), tokenizer, "ante", 3, 1.0)
    games = [ante_beliefs.BeliefEnv(Counting(), "ante") for _ in range(2)]
    sampling = Sampling(0.0, 32, (tokenizer.eos_token_id,))
    episodes = ante_bapo.rollout(by, tokenizer, games, 0, [(0, {"id": "a"}), (1, {"id": "b"})], 1, sampling, 3, 2048, 1, 0)
    assert Counting.executed == sum(len(e.turns) for e in episodes) == 6
    assert by.asked == by.changed == 6
    assert all(t.text == says("PASS") for e in episodes for t in e.turns)


# ------------------------------------------------------------------------------------------------------- the verifier


def test_the_verifier_says_the_same_twenty_times(tasks):
    task = tasks.train[0]
    env = repo.RepoEnv()
    env.reset(task)
    here = env.snapshot()
    said = set()
    for _ in range(20):
        env.restore(here)
        repo._cache.clear()  # a real run each time
        said.add(ante_beliefs.outcome(env.step("test")[4]))
    assert said == {("FAIL", "yes")}


@pytest.mark.parametrize("bad", ["while True: pass", "import os; os.fork(); os._exit(0)"])
def test_a_run_that_hangs_or_forks_away_is_no_clean_exit(tasks, bad, monkeypatch):
    task = tasks.train[0]
    monkeypatch.setitem(repo.LIMITS, "wall_s", 3.0)
    env = ante_beliefs.BeliefEnv(repo.RepoEnv(), "ante")
    env.reset(task)
    name = next(iter(task["files"]))
    env.step(render("ante", "", "NA", "yes", "TRUST", f"edit {name} 1-1: {bad}"))
    info = env.step(says("FAIL", "no"))[4]
    assert ante_beliefs.outcome(info) == ("FAIL", "no")


# ----------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "changes, says_",
    [
        ({"belief": "reactive", "credit": "bapo"}, "--credit bapo"),
        ({"belief": "retrospective", "test_time": "tto"}, "--test-time tto"),
        ({"q_star": 1.0}, "--q-star 1.0"),
        ({"omega": -0.1}, "--omega -0.1"),
        ({"alpha": float("nan")}, "--alpha nan"),
        ({"group_size": 1}, "--group-size 1"),
        ({"stage": "sft", "model": "smollm2", "sft_steps": 0}, "--sft-steps 0"),
        ({"stage": "rl", "trajectories": "x"}, "--stage rl"),
        ({"stage": "tto", "sft_steps": 3}, "--stage tto"),
        ({"clip_low": 1.5}, "--clip-low 1.5"),
        ({"num_minibatches": 17}, "--num-minibatches 17"),
        ({"temperature": 0.0}, "--temperature 0.0"),
    ],
)
def test_bad_arguments(changes, says_):
    with pytest.raises(ArgumentError, match=says_):
        ante_bapo.check_args(ante_bapo.resolve(Args(**changes)))


def test_what_is_left_open_is_resolved():
    assert ante_bapo.resolve(Args()).credit == "bapo"
    assert ante_bapo.resolve(Args()).test_time == "tto"
    assert ante_bapo.resolve(Args()).sft_steps == 0
    r = ante_bapo.resolve(Args(belief="reactive", model="smollm2"))
    assert (r.credit, r.test_time, r.sft_steps) == ("task", "plain", 50)
    assert ante_bapo.resolve(Args(model="smollm2", stage="rl")).sft_steps == 0
    ante_bapo.check_args(r)


def test_conversations_are_encoded_as_a_rollout_does(tokenizer):
    c = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "test"},
        {"role": "user", "content": "FAIL"},
        {"role": "assistant", "content": "x"},
    ]
    prompt, ids, mask = sft.conversation_tokens(tokenizer, c, (tokenizer.eos_token_id,))
    want = policies.assistant_tokens(tokenizer, c)
    assert (prompt, ids, mask) == want
