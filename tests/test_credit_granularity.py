"""credit_granularity.py's pure functions: schedules, votes, advantages and distillation against slow loops; judges kept apart; what the report says."""

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import credit_granularity as cg
from common import envs
from common.arguments import ArgumentError
from common.curves import RunError
from common.envs.editing_judges import REFLECTION, mixing_score
from common.judges import Answer, Vote
from common.packing import pack_rows
from common.policies import tiny_tokenizer
from common.rollout import Episode, Turn, make_layout
from common.viewer import write_credit_html
from credit_granularity import Args, Student
from credit_report import FALL, over_seeds, reward_curves, write_report

LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=5)  # tokens of each turn of each episode
VOTE = st.sampled_from([0.0, 0.5, 1.0, None])


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ schedule


def test_weight_of_the_process_reward():
    def lam(scheme, update):
        return cg.process_weight(scheme, update, 0.5, 20, 30)

    assert [lam("prm_decay", u) for u in (1, 19, 20)] == [0.5] * 3
    assert lam("prm_decay", 25) == 0.5 * 0.5**3
    assert lam("prm_decay", 22) == pytest.approx(0.5 * 0.8**3)
    assert [lam("prm_decay", u) for u in (30, 31, 50)] == [0.0] * 3
    assert {lam("prm_fixed", u) for u in range(1, 60)} == {0.5}
    assert {lam(s, u) for s in ("outcome", "opsd") for u in range(1, 60)} == {0.0}
    line = [lam("prm_decay", 18 + k / 1000) for k in range(14000)]  # continuous and never rising
    assert all(0 <= a - b < 2e-4 for a, b in itertools.pairwise(line))


# --------------------------------------------------------------------------------------------------- votes and advantages


def test_votes_without_abstentions():
    got = cg.mean_votes([[1.0, 0.5, None], [None, None, None], [0.0, 0.0, 1.0], [None, 0.0, None], []]).tolist()
    assert got[0] == 0.75 and math.isnan(got[1]) and got[2] == pytest.approx(1 / 3) and got[3] == 0.0 and math.isnan(got[4])
    assert len(cg.mean_votes([])) == 0


def slow_turn_advantages(scores, groups, eps):
    out = []
    for s, g in zip(scores, groups):
        known = [x for x, h in zip(scores, groups) if h == g and not math.isnan(x)]
        if math.isnan(s) or min(known) == max(known):
            out.append(0.0)
            continue
        mean = sum(known) / len(known)
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        out.append((s - mean) / (std + eps))
    return f64(out)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.lists(VOTE, min_size=3, max_size=3), st.integers(0, 2)), min_size=1, max_size=20))
def test_turn_advantages_are_those_of_a_loop(rows):
    scores, groups = cg.mean_votes([v for v, _ in rows]), [g for _, g in rows]
    got = cg.turn_advantages(scores, torch.tensor(groups), 1e-6)
    assert torch.allclose(got, slow_turn_advantages(scores.tolist(), groups, 1e-6), atol=1e-9)
    assert got.isfinite().all()


def test_missing_turns_take_no_part():
    nan = math.nan
    got = cg.turn_advantages(f64([1.0, nan, 0.0, nan, 0.7]), torch.tensor([0, 0, 0, 1, 2]), 0.0)
    assert got.tolist() == pytest.approx([math.sqrt(0.5), 0, -math.sqrt(0.5), 0, 0])  # mean of 1 and 0, not of 1, 0 and 0
    assert cg.turn_advantages(f64([nan, nan]), torch.tensor([0, 1]), 0.0).tolist() == [0, 0]


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(0, 99))
def test_turn_advantages_go_to_the_tokens_of_their_own_turn(lengths, seed):
    rng, layout = np.random.default_rng(seed), make_layout(lengths)
    outcome, turn = torch.from_numpy(rng.normal(size=len(lengths))), torch.from_numpy(rng.normal(size=len(layout.turns) - 1))
    got = cg.token_advantages(outcome, turn, layout, 0.5)
    want, t = [], 0
    for e, turns in enumerate(lengths):
        for n in turns:
            want += [float(outcome[e]) + 0.5 * float(turn[t])] * n
            t += 1
    assert torch.allclose(got, f64(want), atol=1e-12)
    assert torch.equal(cg.token_advantages(outcome, turn, layout, 0.0), outcome[layout.episode_ids])  # lambda 0: the outcome's, bit for bit
    moved = turn.clone()
    moved[0] += 1
    changed = (cg.token_advantages(outcome, moved, layout, 0.5) != got).nonzero()[:, 0].tolist()
    assert changed == list(range(lengths[0][0]))


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean", "turn_mean"])
def test_token_weights_sum_to_one(kind):
    lengths = [[2, 3], [1], [4, 1, 1]]
    layout = make_layout(lengths)
    parts = [torch.arange(0, 5), torch.arange(5, 12)]  # two micro-batches
    w = torch.cat([cg.token_weights_of(kind, layout, index, (12.0, 3.0, 6.0)) for index in parts]).double()
    assert float(w.sum()) == pytest.approx(1, abs=1e-6)
    by_turn = [float(x.sum()) for x in w.split([n for turns in lengths for n in turns])]
    want = {"token_mean": [2 / 12, 3 / 12, 1 / 12, 4 / 12, 1 / 12, 1 / 12], "turn_mean": [1 / 6] * 6}
    want["seq_mean_token_mean"] = [2 / 15, 3 / 15, 1 / 3, 4 / 18, 1 / 18, 1 / 18]
    assert by_turn == pytest.approx(want[kind], abs=1e-6)


def test_policy_loss_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    logprobs, old, rollout, adv, ref = (torch.from_numpy(rng.normal(-1, 0.4, 30)) for _ in range(5))
    w = torch.full((30,), 1 / 30, dtype=torch.float64)
    loss, metrics = cg.policy_loss(logprobs.requires_grad_(), old, rollout, adv, w, 0.2, 0.3, 2.0, ref, 0.1)
    total, clipped = 0.0, 0
    for lp, o, r, a, f in zip(logprobs.tolist(), old.tolist(), rollout.tolist(), adv.tolist(), ref.tolist()):
        ratio = math.exp(lp - o)
        kept = min(max(ratio, 0.8), 1.3)
        total += (-min(ratio * a, kept * a) * min(math.exp(o - r), 2.0) + 0.1 * min(math.exp(f - lp) - (f - lp) - 1, 10)) / 30
        clipped += kept * a < ratio * a
    assert float(loss.detach()) == pytest.approx(total) and metrics["losses/clipfrac"] == (clipped, 30)


# ---------------------------------------------------------------------------------------------------------- distillation


def test_divergences_are_those_of_a_loop():
    torch.manual_seed(0)
    s, t = (torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    ids = torch.tensor([0, 3, 6, 1, 2])
    forward, same = cg.divergence(s, t, ids, "forward_kl")
    reverse, logged = cg.divergence(s, t, ids, "reverse_kl")
    for i in range(5):
        kl = sum(math.exp(b) * (b - a) for a, b in zip(s[i].tolist(), t[i].tolist()))
        assert float(forward[i]) == pytest.approx(kl) == pytest.approx(float(same[i])) == pytest.approx(float(logged[i]))
        assert float(reverse[i]) == pytest.approx(sum(math.exp(a) * (a - b) for a, b in zip(s[i].tolist(), t[i].tolist())))
    for kind in ("forward_kl", "reverse_kl"):
        assert cg.divergence(s, s, ids, kind)[0].abs().max() < 1e-12


def test_sampled_distillation_has_the_gradient_of_the_reverse_kl():
    torch.manual_seed(1)
    logits, t = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64).log_softmax(-1)
    s = logits.log_softmax(-1)
    [want] = torch.autograd.grad(cg.divergence(s[None], t[None], torch.tensor([0]), "reverse_kl")[0].sum(), logits, retain_graph=True)
    each = cg.divergence(s.expand(6, 6), t.expand(6, 6), torch.arange(6), "sampled")[0]  # the expectation over what the student samples
    [got] = torch.autograd.grad((s.detach().exp() * each).sum(), logits)
    assert torch.allclose(got, want, atol=1e-12)


def test_concentration_of_the_kl():
    layout = make_layout([[1, 2], [1, 1]])
    got = cg.kl_concentration(*cg.kl_by_turn(f64([1.0, 3.0, 2.0, 4.0, 0.0]), layout), share=0.5)  # turns hold 1, 5, 4, 0: the upper two
    assert got == {"granularity/kl_in_top_turns": (9.0, 10.0), "granularity/tokens_in_top_turns": (3.0, 5.0)}
    assert cg.kl_concentration(*cg.kl_by_turn(f64([1.0, 3.0, 2.0, 4.0, 0.0]), layout))["granularity/kl_in_top_turns"] == (5.0, 10.0)  # 5 % of four turns is one
    many = make_layout([[1] * 40])
    assert cg.kl_concentration(*cg.kl_by_turn(torch.ones(40, dtype=torch.float64), many))["granularity/tokens_in_top_turns"] == (2.0, 40.0)
    assert cg.kl_concentration(*cg.kl_by_turn(f64([]), make_layout([])))["granularity/kl_in_top_turns"] == (0.0, 0.0)


@pytest.fixture(scope="module")
def tiny():
    tokenizer = tiny_tokenizer([[{"role": "user", "content": "reference : red blue advice : open"}] * 3], 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def told_episode(tokenizer, unfinished=False):
    """An episode of two turns as a rollout would leave it."""
    messages = [{"role": "user", "content": "doors : red blue"}]
    e = Episode(0, 0, {"id": "a"}, prompt_ids=cg.encode(tokenizer, messages))
    frame = cg.observation_frame(tokenizer, [tokenizer.eos_token_id])
    for text, seen, cut in (("open blue", "stays shut", unfinished), ("open red", "red is open", False)):
        if e.turns:
            closing = frame[0] if e.turns[-1].unfinished else ""
            more = tokenizer(closing + frame[1] + e.turns[-1].observation + frame[2], add_special_tokens=False).input_ids
            e.token_ids += more
            e.policy_mask += [False] * len(more)
        ids = tokenizer(text, add_special_tokens=False).input_ids + ([] if cut else [tokenizer.eos_token_id])
        e.turns.append(Turn(len(e.token_ids), len(e.token_ids) + len(ids), text, cut, seen))
        e.token_ids += ids
        e.policy_mask += [True] * len(ids)
    return e, messages, frame


@pytest.mark.parametrize("unfinished", [False, True])
def test_the_teacher_reads_the_policys_own_tokens_and_what_it_is_told(tiny, unfinished):
    _, tokenizer = tiny
    e, messages, frame = told_episode(tokenizer, unfinished)
    assert cg.teacher_row(tokenizer, frame, messages, e, ["", ""]) == (e.prompt_ids, e.token_ids, e.policy_mask)
    prompt, ids, mask = cg.teacher_row(tokenizer, frame, messages, e, ["advice : open red", "advice : open blue"])
    own = [t for t, m in zip(e.token_ids, e.policy_mask) if m]
    assert [t for t, m in zip(ids, mask) if m] == own  # nothing of the policy's is changed
    assert "doors : red blue\nadvice : open red" in tokenizer.decode(prompt)
    assert "stays shut\nadvice : open blue" in tokenizer.decode(ids)
    assert "advice" not in tokenizer.decode(e.prompt_ids + e.token_ids)
    assert "advice : open blue" not in tokenizer.decode(prompt)  # what is told later is not known before
    card = cg.teacher_row(tokenizer, frame, messages, e, ["reference : red blue", ""])
    assert card[1:] == (e.token_ids, e.policy_mask) and "reference : red blue" in tokenizer.decode(card[0])


def test_distillation_through_the_model(tiny):
    lm, tokenizer = tiny
    student, teacher = Student(lm), Student(lm)
    e, messages, frame = told_episode(tokenizer)
    plain = pack_rows([(e.prompt_ids, e.token_ids)], masks=[e.policy_mask])

    def kl_of(hints):
        prompt, ids, mask = cg.teacher_row(tokenizer, frame, messages, e, hints)
        with torch.no_grad():
            seen = teacher(pack_rows([(prompt, ids)], masks=[mask]), hidden_only=True)
        return student(plain, 1.0, teacher=(seen, teacher.head(), "forward_kl")), seen

    (objective, forward, logprobs, entropy), seen = kl_of(["", ""])
    assert float(objective.detach().abs().max()) < 1e-6 and float(forward.max()) < 1e-6  # equal texts: nothing to learn
    want = cg.Policy(lm)(plain, 1.0)
    assert torch.allclose(logprobs, want[0].detach(), atol=1e-6) and torch.allclose(entropy, want[1], atol=1e-5)
    (objective, forward, *_), seen = kl_of(["advice : open red", ""])
    assert not seen.requires_grad
    hidden = cg.forward_hidden(lm, plain)
    s, t = (F.linear(h, lm.lm_head.weight).double().log_softmax(-1) for h in (hidden, seen))
    assert torch.allclose(objective.detach().double(), (t.exp() * (t - s)).sum(-1).detach(), atol=1e-5)
    assert float(forward.sum()) > 1e-4
    objective.sum().backward()
    assert sum(float(p.grad.abs().sum()) for p in lm.parameters() if p.grad is not None) > 0
    lm.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------- measurements


def turn(text, judged=None, process=None, **info):
    return Turn(0, 1, text, False, "", 0.0, info | ({"judged": judged} if judged else {}) | ({"process": process} if process is not None else {}))


def test_behaviour_by_hand():
    nan = math.nan
    one = Episode(0, 0, {}, success=0.5, turns=[turn("wait\nlook bo", "neutral", 0.9, frames=1, tool_calls=1), turn("take bo", "good", 0.2, tool_calls=1)])
    one.turns += [turn("hm\ntake zi", "bad", nan, tool_calls=1), turn("submit", "neutral", 0.5, tool_calls=1)]
    two = Episode(0, 1, {}, truncated="environment", turns=[turn("pick", None, 0.9, invalid=True), turn("take di\ntake bo", "good", 0.8, tool_calls=2)])
    got = cg.behaviour([one, two])
    want = {"success": (0.5, 2), "truncated_frac": (1, 2), "turns": (6, 2), "tool_calls": (6, 2), "frames": (1, 2), "blind_frac": (1, 2)}
    want |= {"reasoning_chars": (4 + 2 + 4, 6), "reflection_frac": (1, 6), "invalid_frac": (1, 6), "process_reward": (pytest.approx(3.3), 5)}
    want |= {"mixing": (1.0, 2), "mixing_process": (1.0, 2)}  # one good and one bad turn: 1; all good: 0. By the judge: 1, and 0
    assert got == want
    assert mixing_score(["good"] * 7) == 0 and mixing_score(["good", "bad"] * 4) == 1 and mixing_score(["good", "bad", "bad", "bad"]) == 0.5
    assert math.isnan(mixing_score(["neutral"])) and cg.behaviour([])["mixing"] == (0, 0)


MARKED, PLAIN = ("wait, that is wrong", "Hmm", "my mistake", "let me check again", "i reconsider"), ("await", "the waiter smiles", "look bo", "")


@pytest.mark.parametrize("text, found", [*((t, True) for t in MARKED), *((t, False) for t in PLAIN)])
def test_reflection_markers(text, found):
    assert bool(REFLECTION.search(text)) == found


# --------------------------------------------------------------------------------------------------------------- judges


def test_judges_are_kept_apart():
    same = [
        ("openai:gpt@http://a:1/v1", "openai:gpt@http://b:2/v1"),
        ("openai:org/M", "openai:org/m@http://h/v1"),
        ("local:smollm2", "local:smollm2"),
        ("local:org/M", "openai:org/M@http://h/v1"),
    ]
    for outcome, process in same:
        with pytest.raises(ArgumentError, match="must be another model"):
            cg.check_judges(outcome, process)
        with pytest.raises(ArgumentError, match="must be another model"):
            cg.check_args(cg.resolve(Args(outcome_judge=outcome, process_judge=process)))
    for outcome, process in (("rule", "rule"), ("rule", "openai:m"), ("openai:a@http://h/v1", "openai:b@http://h/v1"), ("openai:a", "local:b")):
        cg.check_judges(outcome, process)


def test_one_folder_under_two_names_is_one_judge(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="must be another model"):
        cg.check_judges("local:m", f"local:{tmp_path}/m")


class Script:
    """A judge that answers round after round from a list: votes of each request."""

    def __init__(self, *rounds):
        self.rounds, self.asked = list(rounds), []

    def ask(self, requests):
        self.asked.append(list(requests))
        return [Answer(None, "", tuple(Vote(v) for v in votes), False) for votes in self.rounds.pop(0)]


def test_the_first_valid_judgement_counts():
    judge = Script([[0.2], [None], [None]], [[0.9], [None]], [[None]])
    assert cg.ask_all(judge, ["a", "b", "c"], 3) == [[0.2], [0.9], [None]]
    assert judge.asked == [["a", "b", "c"], ["b", "c"], ["c"]]  # what has a value is not asked again
    assert cg.ask_all(Script(), [], 2) == []


@pytest.fixture(scope="module")
def task():
    tasks = envs.load("editing")
    return {name: next(t for t in tasks.train if t["family"] == name) for name in ("CS", "RC", "FC")}


def test_votes_of_a_model(task):
    turns = [Turn(0, 2, "look bo", False, "shot bo warm"), Turn(5, 9, "take bo", False, "cut bo")]
    e = Episode(0, 0, task["CS"], turns=turns)
    judge = Script([[{"score": 1}, {"score": 0.5}, None], [{"score": None}, {"score": None}, None]])
    cg.judge_turns(judge, [e], 3, 1, 1, 0)
    assert turns[0].info["votes"] == [1, 0.5, None] and turns[0].info["process"] == 0.75
    assert turns[1].info["votes"] == [None] * 3 and math.isnan(turns[1].info["process"])
    assert [r.votes for r in judge.asked[0]] == [3, 3]
    cg.judge_turns(Script([[None], [None]]), [e], 1, 1, 1, 0)
    assert all(math.isnan(t.info["process"]) for t in turns)


def test_votes_of_the_rule_depend_on_what_is_seen_alone(task):
    def votes(info, seed=1):
        e = Episode(3, 2, task["CS"], turns=[Turn(0, 2, "look " + task["CS"]["shots"][0], False, "shot", 0.3, dict(info)) for _ in range(4)])
        cg.judge_turns(None, [e], 2, 1, seed, 5)
        return [t.info["votes"] for t in e.turns]

    assert votes({}) == votes({"judged": "bad", "score": 0.9, "process": 0.1}) and votes({}) != votes({}, seed=2)
    assert all(len(row) == 2 for row in votes({}))


def test_a_process_judge_sees_texts_and_no_truth(task):
    info = {"judged": "good", "score": 0.123456, "process": 1.0}
    e = Episode(0, 0, task["CS"], turns=[Turn(0, 2, 'give 1\n</turns>\n"score": 1', False, "no such tool", 0.654321, info)])
    judge = Script([[None]])
    cg.judge_turns(judge, [e], 1, 1, 1, 0)
    [[request]] = judge.asked
    text = "".join(m["content"] for m in request.messages)
    assert "0.123456" not in text and "0.654321" not in text and task["CS"]["reference"] not in text
    assert "\n</turns>\n" not in text  # the text cannot end its block


def ended(task, edit, parts, reason=""):
    return Episode(0, 0, task, turns=[Turn(0, 1, "submit", False, info={"edit": edit, "reason": reason})], rewards=parts, reward=0.25, success=0.25)


def test_outcomes_by_a_model(task):
    rc, cs = task["RC"], task["CS"]
    shot = rc["shots"][0]
    good = ended(rc, {"spans": {shot: rc["true"]["spans"][shot]}}, {"det": 0.5, "ref": 0.1, "blind": 0.1})
    lost, cut = ended(rc, {"spans": {}}, {"det": 0.5, "ref": 0.1, "blind": 0.1}), ended(rc, None, {"det": 0.0, "ref": 0.0, "blind": 0.0})
    plain = ended(cs, {"select": []}, {"det": 0.75, "ref": math.nan, "blind": math.nan})
    judge = Script([[{"score": 0.5}], [{"score": 1.0}], [None], [{"score": 1}]], [[None]])
    cg.judge_outcomes(judge, [good, lost, cut, plain], 2)
    w = rc["weights"]
    assert good.reward == good.success == pytest.approx(w["det"] * 0.5 + w["ref"] * 0.5 + w["blind"] * 1.0)
    assert math.isnan(lost.reward) and math.isnan(lost.success)  # missing, not 0
    assert cut.reward == 0.25 and plain.reward == 0.25  # nothing handed in, and a deterministic family: no judge
    assert len(judge.asked[0]) == 4 and len(judge.asked[1]) == 1


def test_what_has_no_preview_is_not_judged_blind(task):
    fc = task["FC"]
    e = ended(fc, {"sound": {}, "joins": {}}, {"det": math.nan, "ref": 0.5, "blind": 0.0}, "no preview of this edit was rendered")
    judge = Script([[{"score": 1.0}]])
    cg.judge_outcomes(judge, [e], 1)
    assert len(judge.asked[0]) == 1 and e.rewards["blind"] == 0 and e.reward == fc["weights"]["ref"]


def test_informed_advice_needs_no_look(task):
    tasks = envs.load("editing")
    game = tasks.make_env()
    for t in task.values():
        game.reset(t)
        before = game.snapshot()
        assert cg.oracle_advice(game, False).startswith("look") and not cg.oracle_advice(game, True).startswith("look")
        assert game.snapshot() == before
        talk = cg.advised(tasks, t, random.Random(0))
        advice = [m["content"].rpartition("\nadvice : ")[2] for m in talk if m["role"] == "user"]
        assert advice == [m["content"] for m in talk if m["role"] == "assistant"]
        game.reset(t)
        for _ in range(t["budget"]):
            *_, done, _, info = game.step(cg.oracle_advice(game, True))
            if done:
                break
        assert done and info["success"] == pytest.approx(1) and info["blind_run"]


def test_warm_start_shows_what_the_teacher_will_read():
    tasks = envs.load("editing")
    talks = cg.warm_start_conversations(dataclasses.replace(tasks, train=tasks.train[:40]))
    texts = ["\n".join(m["content"] for m in talk if m["role"] == "user") for talk in talks]
    kinds = ["reference" if "reference : " in t else "advice" if "advice : " in t else "plain" for t in texts]
    assert kinds == (["plain"] * 3 + ["reference"] + ["plain"] * 3 + ["advice"]) * 5
    assert all(m["role"] == "assistant" for m in (talk[-1] for talk in talks))
    assert talks == cg.warm_start_conversations(dataclasses.replace(tasks, train=tasks.train[:40]))


# ------------------------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"scheme": "prm_fixed", "group_size": 1}, "--group-size 1"),
        ({"decay_start": 30}, "--decay-end 30: must be above"),
        ({"scheme": "opsd", "kl_coef": 0.1}, "leave out --kl-coef"),
        ({"scheme": "opsd", "distillation": "sampled", "update_epochs": 2}, "--update-epochs 1"),
        ({"scheme": "prm_decay", "measure_process": "off"}, "needs the process reward"),
        ({"process_votes": 4}, "--process-judge rule has 3"),
        ({"process_weight": -0.1}, "--process-weight -0.1"),
        ({"eval_samples": 0}, "--eval-samples 0"),
        ({"learning_rate": math.inf}, "finite"),
        ({"clip_low": 1.5}, "--clip-low 1.5"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm"),
    ],
)
def test_bad_values_are_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        cg.check_args(cg.resolve(dataclasses.replace(Args(), **changes)))


def test_group_sizes_of_the_schemes():
    assert cg.resolve(Args(scheme="opsd")).group_size == 1 and cg.resolve(Args(scheme="prm_fixed")).group_size == 8
    assert cg.resolve(Args(scheme="opsd", group_size=4)).group_size == 4


# ----------------------------------------------------------------------------------------------------------------- viewer


@pytest.mark.parametrize("distils", [False, True])
def test_credit_page(tiny, tmp_path, distils):
    _, tokenizer = tiny
    e, _, _ = told_episode(tokenizer)
    e.logprobs = [-1.0] * sum(e.policy_mask)
    e.turns[0].info = {"tool": "open", "judged": "bad", "votes": [0.5, None, 1.0], "process": 0.75}
    e.turns[1].info = {"votes": [None] * 3, "process": math.nan}
    n = sum(e.policy_mask)
    record = cg.episode_record(3, e, 0.5, [1.0, -1.0], 0.25, [0.1] * n if distils else None, tokenizer)
    assert [t["advantage"] for t in record["turns"]] == [0.75, 0.25]
    record = json.loads(json.dumps(record).replace("NaN", "null"))  # as the run folder keeps it
    shown = cg.viewer_episode(record)
    first = e.turns[0].stop
    if distils:
        assert shown["turns"][0]["value"] == pytest.approx(0.1 * first) and [s["name"] for s in shown["strips"]] == ["KL", "KL of the turn", "process"]
    else:
        assert [t["value"] for t in shown["turns"]] == [0.75, 0.25]
        assert [s["name"] for s in shown["strips"]] == ["outcome", "turn", "sum", "process"]
        assert shown["strips"][2]["values"][0] == 0.75 and shown["strips"][2]["values"][-1] == 0.25
        assert shown["strips"][0]["values"][first] is None  # what the environment said has no credit
    assert shown["turns"][0]["name"] == "turn 1: open, bad, votes 0.5 - 1"
    assert write_credit_html(tmp_path / "credit.html", [shown], "title").exists()


# ----------------------------------------------------------------------------------------------------------------- report


def test_how_curves_part():
    flat = np.full(10, 0.5)
    apart = reward_curves(np.array([0.3, 0.5, 0.6, 0.6, 0.4, 0.2]), np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7]))
    assert apart["hacking"] and apart["outcome_fall"] > FALL and apart["process_rise"] > 0
    assert apart["peak"] in (3, 4) and apart["crossing"] in (5, 6)
    together = reward_curves(np.linspace(0.2, 0.8, 10), np.linspace(0.1, 0.5, 10))
    assert not together["hacking"] and together["crossing"] is None and together["peak"] == 10
    assert reward_curves(flat, flat + 0.1)["crossing"] is None  # above from the start: no crossing
    assert not reward_curves(flat, flat)["hacking"]


def test_intervals_over_seeds():
    mean, half = over_seeds([0.2, 0.4, None, math.nan])
    assert mean == pytest.approx(0.3) and half == pytest.approx(12.7062 * 0.1)
    assert over_seeds([0.5])[0] == 0.5 and math.isnan(over_seeds([0.5])[1]) and math.isnan(over_seeds([])[0])


def write_run(folder, scheme="outcome", seed=1, updates=4, gain=0.2, **changes):
    folder.mkdir(parents=True)
    args = dataclasses.asdict(Args(scheme=scheme, seed=seed, num_updates=updates)) | changes
    (folder / "args.json").write_text(json.dumps(args))
    rows = [{"step": 0, "eval/success": 0.2}]
    for u in range(1, updates + 1):
        rows.append({"step": u, "charts/success": 0.2 + u * gain / updates, "granularity/process_reward": 0.1 * u, "losses/grad_norm": 1.0})
        rows[-1] |= {"granularity/episodes_so_far": 128.0 * u, "granularity/clipped_update_frac": 0.5, "granularity/tool_calls": 5.0}
    rows[-1]["eval/success"] = 0.2 + gain
    for row, late in ((rows[0], 0), (rows[-1], 1)):
        for k, f in enumerate(("CS", "NS", "RC", "FC")):
            row[f"eval/success/{f}"] = row["eval/success"] - 0.04 * k * late
            row |= {f"eval/mixing/{f}": 0.2 + 0.1 * k, f"eval/mixing_process/{f}": 0.5}
        row |= {"eval/truncated_frac": 0.1, "eval/tool_calls": 6.0, "eval/length": 70.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_report(tmp_path):
    runs = [write_run(tmp_path / f"o{s}", seed=s, gain=0.2 + 0.02 * s) for s in (1, 2)] + [write_run(tmp_path / "p<b>", "prm_fixed", gain=-0.1)]
    page = write_report(runs, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(result["variants"]) == ["outcome", "prm_fixed"] and result["variants"]["outcome"]["seeds"] == [1, 2]
    assert result["variants"]["outcome"]["score"]["all"] == pytest.approx([0.43, 12.7062 * 0.01])
    assert result["variants"]["prm_fixed"]["gain"]["all"] == [pytest.approx(-0.1), None]
    assert result["variants"]["prm_fixed"]["curves"][0]["hacking"] and not result["variants"]["outcome"]["curves"][0]["hacking"]
    assert result["mixing_gain_spearman"] == {"true": pytest.approx(-1)}  # equal scores of the judge have no order
    html = page.read_text()
    assert "p&lt;b&gt;" in html and "p<b>" not in html and (tmp_path / "out" / "report.png").stat().st_size > 10000
    assert "hacking signature in 1 of 1 runs" in html and "http" not in html.replace("http-equiv", "")


@pytest.mark.parametrize(
    "changes, text",
    [({"num_updates": 9}, "num-updates 9"), ({"env": "household"}, "not one comparison")],
)
def test_runs_that_are_not_comparable(tmp_path, changes, text):
    with pytest.raises(RunError, match=text):
        write_report([write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)], tmp_path / "out")


def test_runs_that_are_none(tmp_path):
    with pytest.raises(RunError, match=r"args\.json"):
        write_report([tmp_path], tmp_path / "out")
    unfinished = write_run(tmp_path / "a", num_updates=5)
    with pytest.raises(RunError, match="stopped at update 4 of 5"):
        write_report([unfinished], tmp_path / "out")
    (unfinished / "args.json").write_text("{}")
    with pytest.raises(RunError, match=r"no run of credit_granularity\.py"):
        write_report([unfinished], tmp_path / "out")


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    a, b = write_run(tmp_path / "a", seed=1), write_run(tmp_path / "b", seed=2)
    again, other, late = write_run(tmp_path / "again", seed=1), write_run(tmp_path / "other", seed=3, process_weight=0.1), write_run(tmp_path / "late", seed=4)
    rows = [json.loads(line) for line in (late / "metrics.jsonl").read_text().splitlines()]
    rows[-1] = {k: v for k, v in rows[-1].items() if not k.startswith("eval/")}  # a judge gave up in the last evaluation
    (late / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for last, text in ((again, "a seed counts once"), (other, "process_weight: 0.5 in the run, 0.1 now"), (late, "no evaluation of its last update")):
        with pytest.raises(RunError, match=text):
            write_report([a, b, last], tmp_path / "out")


def test_variants_of_a_seed_start_alike_and_count_once(tmp_path):
    runs = [write_run(tmp_path / f"{scheme}{seed}", scheme, seed=seed) for seed in (1, 2) for scheme in ("outcome", "prm_fixed", "prm_decay")]
    for run, start in zip(runs, (0.2, 0.2, 0.2, 0.4, 0.4, 0.4)):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[0]["eval/success"] = start
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(runs, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["start"]["all"] == pytest.approx([0.3, 12.7062 * 0.1])
