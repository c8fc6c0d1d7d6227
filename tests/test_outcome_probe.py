"""The probe's pure functions against slow float64 loops and tables worked out by hand; probe, sample and recheck by their real command lines."""

import dataclasses
import functools
import json
import math
import random
import re

import pytest
import script_runner
import torch
from conftest import need_module
from hypothesis import given, settings
from hypothesis import strategies as st

import mrtpo
import outcome_probe
import outcome_sample
from common import envs, policies
from common.arguments import ArgumentError
from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl
from common.envs import DataError, maths
from outcome_decomp import Probe, Recheck, Sample
from outcome_probe import Response
from outcome_records import Source, write_records

NAN = math.nan


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------------------ GSPO


@st.composite
def updates(draw):
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    n = sum(lengths)
    small = st.floats(-0.4, 0.4)
    old = draw(st.lists(st.floats(-3, -0.01), min_size=n, max_size=n))
    shift = draw(st.lists(small, min_size=n, max_size=n))
    engine = draw(st.lists(st.one_of(small, st.just(NAN)), min_size=n, max_size=n))
    advantages = draw(st.lists(st.sampled_from([-1.5, -0.2, 0.0, 0.7, 1.2]), min_size=len(lengths), max_size=len(lengths)))
    return lengths, old, shift, engine, advantages


@settings(max_examples=80, deadline=None)
@given(updates(), st.sampled_from([(3e-4, 4e-4), (0.1, 0.2), (1.0, 9.0)]), st.sampled_from([0.0, 1.05, 2.0]), st.integers(0, 3))
def test_gspo_against_a_loop_and_its_gradient_by_hand(data, clip, cap, more):
    lengths, old, shift, engine, advantages = data
    total = float(len(lengths) + more)  # responses of other processes
    now = f64([o + d for o, d in zip(old, shift)]).requires_grad_()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rollout = f64([o - e for o, e in zip(old, engine)])
    loss, metrics = outcome_probe.gspo_loss(now, f64(old), rollout, f64(advantages), ids, torch.tensor(lengths), total, *clip, cap)
    (gradient,) = torch.autograd.grad(loss, now)

    want, slopes, clipped, at = 0.0, [], 0, 0
    for n, a in zip(lengths, advantages):
        s = math.exp(math.fsum(now.tolist()[at + t] - old[at + t] for t in range(n)) / n)  # one ratio for the whole response
        bounded = min(max(s, 1 - clip[0]), 1 + clip[1])
        value, free = -min(s * a, bounded * a), s * a <= bounded * a
        clipped += (a > 0 and s > 1 + clip[1]) or (a < 0 and s < 1 - clip[0])
        for t in range(n):
            weight = 1.0 if cap == 0 or math.isnan(engine[at + t]) else min(math.exp(engine[at + t]), cap)
            want += weight * value / n / total
            slopes.append(-weight * s * a / n / total if free else 0.0)
        at += n
    assert float(loss.detach()) == pytest.approx(want, rel=1e-10, abs=1e-12)
    assert torch.allclose(gradient, f64(slopes), rtol=1e-9, atol=1e-12)
    assert metrics["losses/clipfrac"] == (clipped, len(lengths))
    assert metrics["losses/policy_loss"][0] == pytest.approx(want, rel=1e-10, abs=1e-12)


def test_the_first_pass_has_ratio_one_and_the_plain_policy_gradient():
    now = f64([-1.0, -2.0, -0.5]).requires_grad_()
    args = (f64([1.0, -1.0]), torch.tensor([0, 0, 1]), torch.tensor([2, 1]), 2.0, 3e-4, 4e-4)
    loss, metrics = outcome_probe.gspo_loss(now, now.detach(), now.detach(), *args)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert now.grad.tolist() == [-0.25, -0.25, 0.5]
    assert metrics["losses/clipfrac"][0] == metrics["losses/approx_kl"][0] == metrics["probe/log_ratio_abs"][0] == 0


def test_the_ratio_is_normalised_by_length():
    """Ten tokens that each moved by 3e-4 are inside the range of 4e-4; the product of their ratios, 1.003, would be outside."""
    old = torch.zeros(10, dtype=torch.float64)
    now = (old + 3e-4).requires_grad_()
    args = (f64([1.0]), torch.zeros(10, dtype=torch.int64), torch.tensor([10]), 1.0, 3e-4, 4e-4)
    loss, metrics = outcome_probe.gspo_loss(now, old, old, *args)
    loss.backward()
    assert metrics["losses/clipfrac"] == (0.0, 1.0)
    assert torch.allclose(now.grad, torch.full((10,), -math.exp(3e-4) / 10, dtype=torch.float64))
    now = (old + 5e-4).requires_grad_()
    loss, metrics = outcome_probe.gspo_loss(now, old, old, *args)
    loss.backward()
    assert metrics["losses/clipfrac"] == (1.0, 1.0)
    assert now.grad.abs().sum() == 0
    assert float(loss.detach()) == pytest.approx(-(1 + 4e-4))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.5, 1.5])), min_size=1, max_size=14), st.sampled_from([0.0, 1e-4, 1.0]))
def test_advantages_are_those_of_the_other_script(rows, eps):
    rewards, groups = f64([r for _, r in rows]), torch.tensor([7 * g - 5 for g, _ in rows])
    assert torch.equal(outcome_probe.group_advantages(rewards, groups, eps), mrtpo.group_advantages(rewards[:, None], groups, eps)[0][:, 0])


# ----------------------------------------------------------------------------------------------------- law of total covariance


def slow_split(x, y, finished, groups):
    through = content = total = 0.0
    for g in set(groups):
        rows = [i for i in range(len(x)) if groups[i] == g]
        mx, my = (math.fsum(v[i] for i in rows) / len(rows) for v in (x, y))
        total += math.fsum((x[i] - mx) * (y[i] - my) for i in rows)
        for ended in (False, True):
            cell = [i for i in rows if finished[i] is ended]
            if cell:
                cx, cy = (math.fsum(v[i] for i in cell) / len(cell) for v in (x, y))
                through += len(cell) * (cx - mx) * (cy - my)
                content += math.fsum((x[i] - cx) * (y[i] - cy) for i in cell)
    return [through, content, total]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=20))
def test_covariance_splits_exactly_and_as_defined(rows):
    groups, finished, x, y = ([row[i] for row in rows] for i in range(4))
    got = outcome_probe.split_covariance(f64(x), f64(y), torch.tensor(finished, dtype=torch.bool), torch.tensor(groups, dtype=torch.int64))
    assert torch.allclose(got, f64(slow_split(x, y, finished, groups)), rtol=0, atol=1e-10)
    assert abs(float(got[0] + got[1] - got[2])) < 1e-10  # the law of total covariance


def test_finishing_share_of_a_group_by_hand():
    """Eight samples, four finished, two of them right: p = 1/4, variance 1/4 * 3/4 = 3/16 a sample; through finishing 1/2 * 1/2 * (1/2)^2 = 1/16."""
    reward = f64([1, 1, 0, 0, 0, 0, 0, 0])
    finished = torch.tensor([True] * 4 + [False] * 4)
    got = outcome_probe.split_covariance(reward, reward, finished, torch.zeros(8, dtype=torch.int64))
    assert torch.allclose(got / 8, f64([1 / 16, 2 / 16, 3 / 16]), rtol=0, atol=1e-15)
    all_right = outcome_probe.split_covariance(finished.double(), finished.double(), finished, torch.zeros(8, dtype=torch.int64))
    assert all_right.tolist() == [2.0, 0.0, 2.0]  # whoever finishes is right: finishing is everything
    pooled = outcome_probe.split_covariance(torch.cat([reward, reward]), torch.cat([reward, reward]), finished.repeat(2), torch.tensor([0] * 8 + [1] * 8))
    assert torch.allclose(pooled, 2 * got)


# -------------------------------------------------------------------------------------------------------- channels and reports


@pytest.fixture(scope="module")
def tasks():
    return envs.load("maths")


@pytest.fixture(scope="module")
def conversations(tasks):
    return outcome_probe.warm_start_conversations(tasks)


@pytest.fixture(scope="module")
def tokenizer(conversations):
    return policies.tiny_tokenizer(conversations, policies.TinyConfig().vocab_size)


def test_hint_and_control_are_of_equal_length_for_the_tiny_tokenizer(tasks, tokenizer):
    def count(text):
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    for task in tasks.train[:400]:
        prompts = [outcome_probe.training_prompt(task, channel, True, count)[0] for channel in ("hint", "control")]
        hinted, controlled = ([t for m in p for t in outcome_probe.encode(tokenizer, [m])] for p in prompts)
        assert len(hinted) == len(controlled)
        assert task["hint"] in prompts[0][0]["content"]
        assert not any(v in prompts[1][0]["content"].partition("\n")[2] for v in (f"{n}=" for n in task["facts"]))
    assert all(count(f" {name}") == 1 for name in maths.WORLD)  # one token each, or the tiny policy cannot copy them


def test_channels_change_touched_problems_only(tasks):
    task = tasks.train[0]
    for channel in outcome_probe.CHANNELS:
        messages, forced = outcome_probe.training_prompt(task, channel, False, len)
        assert (messages, forced) == (maths.prompt(task), "")
        messages, forced = outcome_probe.training_prompt(task, channel, True, len)
        assert (messages != maths.prompt(task)) == (channel in ("hint", "control"))
        assert bool(forced) == (channel == "setup")
    assert outcome_probe.touched_problems(torch.tensor([0.0, 1.0, 2.0]), 1).tolist() == [True, True, False]


def test_the_warm_start_shows_every_channel_and_keeps_the_training_problems_apart(tasks, conversations):
    prompts, answers = [c[0]["content"] for c in conversations], [c[-1]["content"] for c in conversations]
    shares = [sum(part in p for p in prompts) / len(prompts) for part in ("\nhint: ", "\nlist: ")]
    shares.append(sum(a.startswith("ask: ") for a in answers) / len(answers))
    assert shares == pytest.approx([0.12, 0.04, 0.04], abs=0.015)
    shown = {p.partition("\n")[0] for p in prompts}
    assert not shown & {t["question"] for t in (*tasks.train[: outcome_probe.NOT_DEMONSTRATED], *tasks.eval)}


def response(group, solved=0.0, task=None, touched=True, text="", finished=True, error=""):
    task = task or {"id": "t", "facts": {"brin": "7"}, "derivation": "setup: brin=7\nanswer: 7"}
    r = Response(group, 0, task, [1], [2, 3], [-1.0, -1.0], text, finished, solved, solved, error, touched=touched)
    r.setup = maths.read_setup(task, text)
    return r


def test_the_teachers_derivation_replaces_the_last_sample_of_failed_touched_groups():
    rs = [
        response(0),
        response(0, 1.0),
        response(1),
        response(1),
        response(2, touched=False),
        response(2, touched=False),
        response(3, error="slow"),
        response(3),
    ]
    assert outcome_probe.splice(rs, lambda task: [5, 6, 7], 3) == 2
    assert [r.spliced for r in rs] == [False] * 3 + [True] + [False] * 3 + [True]
    taught = rs[3]
    assert (taught.token_ids, taught.solved, taught.reward, taught.finished) == ([5, 6, 7], 1.0, 1.0, True)
    assert all(math.isnan(x) for x in taught.logprobs)
    assert len(taught.logprobs) == 3
    assert taught.setup["right"] == 1
    again = [response(0), response(0)]
    assert outcome_probe.splice(again, lambda task: [5, 6, 7], 2) == 0  # longer than the cap: it could not have been sampled


def test_gains_by_prior_solves_by_hand():
    prior = torch.tensor([0, 0, 1, 6, 7, 8])
    before, after = f64([0.0, 0.1, 0.2, 0.6, 0.9, 1.0]), f64([0.0, 0.2, 0.5, 0.8, 0.9, 0.9])
    rows = outcome_probe.gain_by_prior_solves(prior, 8, before, after)
    assert [(r["prior_solves"], r["problems"]) for r in rows] == [("0", 2), ("1-6", 2), ("7-8", 2)]
    assert [r["gain"] for r in rows] == pytest.approx([0.05, 0.25, -0.05])
    assert outcome_probe.gain_by_prior_solves(prior[:2], 8, before[:2], after[:2])[1] == {
        "prior_solves": "1-6", "problems": 0, "before": None, "after": None, "gain": None,
    }  # fmt: skip


def test_tallies_and_rates_by_hand():
    rs = [
        response(0, 1.0, text="ask: brin?\nsetup: brin=7\nanswer: 7"),
        response(0, text="wait\nsetup: brin=6\nwait", finished=False),
        response(0, text="actually", error="slow"),  # not graded: no part in any rate
    ]
    sums = outcome_probe.tally(rs)
    assert dict(zip(outcome_probe.COLUMNS, sums.tolist())) == {
        "samples": 2, "solved": 1, "finished": 1, "declared": 2, "right": 1, "asked": 1, "backtracks": 2, "statements": 2, "tokens": 4,
    }  # fmt: skip
    assert outcome_probe.rates(sums)["solved_of_finished"] == 1.0
    assert outcome_probe.rates(sums)["tokens"] == 2.0
    assert outcome_probe.rates(torch.zeros(0, 9, dtype=torch.float64)) == {}
    train, held = torch.stack([sums, sums, 2 * sums]), torch.stack([sums, sums])
    flag = [torch.tensor(v) for v in ([True, True, False], [True, False, True], [False, True])]
    parts = outcome_probe.splits(train, held, *flag)
    assert {name: part["samples"] for name, part in parts.items()} == {
        "touched": 4, "touched, unknown facts": 2, "other training": 4, "held out": 4, "held out, trained facts": 2, "held out, other facts": 2,
    }  # fmt: skip


def test_first_and_last_sixth_of_training():
    records = [{"step": i, "probe/declared": float(i)} for i in range(13)]
    records[12]["probe/setup_solve_corr"] = 0.5
    got = outcome_probe.phases(records, 12)
    assert got["declared"] == [1.5, 11.5]  # updates 1, 2 and 11, 12; step 0 is before training
    assert got["setup_solve_corr"] == [None, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "--group-size 1: must be at least 2"),
        ({"temperature": 0.0}, "--temperature 0.0: must be above 0"),
        ({"clip_low": 1.5}, "--clip-low 1.5: must lie in"),
        ({"learning_rate": NAN}, "--learning-rate nan: must be a finite number"),
        ({"num_minibatches": 17}, "--num-minibatches 17: more than the 16 groups"),
        ({"env": "sql"}, "--env sql: the probe needs"),
        ({"base_samples": 2}, "--base-samples 2: must be at least 3"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_loaded(change, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        outcome_probe.main(dataclasses.replace(Probe(), **change))


# ---------------------------------------------------------------------------------------------------------- by command line

SMALL = {
    "groups_per_update": 4, "group_size": 4, "max_new_tokens": 40, "num_updates": 4, "eval_every": 2, "eval_tasks": 6, "save_every": 2, "learning_rate": 1e-3,
    "lr_warmup_updates": 1, "train_problems": 8, "base_samples": 4, "measure_samples": 3, "question_steps": 2,
}  # fmt: skip
VARYING = re.compile(r"time/.*|charts/SPS")


def flags(**values):
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Workshop:
    """One small policy for all runs of this file; `probe` runs in this process, once for the same arguments, `command` as a user does."""

    def __init__(self, folder, conversations):
        self.folder, self.count = folder, 0
        config = policies.TinyConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, context=256, steps=250, learning_rate=1e-2)
        lm, tokenizer, _ = policies.train_tiny(conversations[:2000], config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def command(self, *words, hook=None):
        return script_runner.run("outcome_decomp.py", words, self.path().with_suffix(".log"), hook)

    @functools.lru_cache  # noqa: B019  (lives as long as the tests)
    def kept(self, changes):
        out = self.path()
        assert outcome_probe.main(Probe(**{"model": str(self.policy), "out": str(out)} | SMALL | dict(changes))).exit_code == 0
        return out

    def probe(self, **changes):
        return self.kept(tuple(sorted(changes.items())))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Runs in this process are compared bit by bit with runs of the command line, which use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shop(tmp_path_factory, conversations):
    return Workshop(tmp_path_factory.mktemp("probe"), conversations)


def lasting(folder):
    return [{k: v for k, v in m.items() if not VARYING.fullmatch(k)} for m in read_jsonl(folder / "metrics.jsonl")]


def weights(folder):
    return newest_checkpoint(folder)[2]["state"]["model"]


@pytest.mark.parametrize("channel", outcome_probe.CHANNELS)
def test_every_channel_runs_and_reports(shop, channel):
    folder = shop.probe(channel=channel)
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    for m in metrics[1:]:
        assert all(v is not None and math.isfinite(v) for v in m.values()), m
        assert m["rollout/logprob_absdiff_max"] < 1e-4
        assert m["rollout/truncated_frac"] == pytest.approx(1 - m["probe/finished"])
        assert 0 <= m["charts/success"] <= m["probe/finished"] <= 1
        assert (m["probe/spliced_frac"] > 0) <= (channel == "teacher")
        assert m["charts/episodic_return"] == m["charts/success"] or channel == "reward"
        assert 0 <= m.get("probe/finish_share", 0) <= 1
    report = json.loads((folder / "probe.json").read_text())
    assert report["channel"] == channel
    assert report["before"].keys() == report["after"].keys()
    assert report["problems"]["held out"] == 6
    assert len(report["per_problem"]) == 8
    assert sum(r["problems"] for r in report["gain_by_prior_solves"]) == 8
    assert (folder / "curves.png").stat().st_size > 1000
    lm, *_ = policies.load_policy(str(folder / "policy"))
    trained = weights(folder)
    assert all(torch.equal(t, trained[f"lm.{name}"]) for name, t in lm.state_dict().items() if f"lm.{name}" in trained)


def test_channels_do_what_they_say(shop):
    reports = {c: json.loads((shop.probe(channel=c) / "probe.json").read_text()) for c in outcome_probe.CHANNELS}
    assert len({json.dumps(r["before"]) for r in reports.values()}) == 1  # the start is measured without the channel
    assert reports["plain"]["problems"]["touched"] > 0
    first = {c: read_jsonl(shop.probe(channel=c) / "metrics.jsonl")[1] for c in reports}
    assert first["setup"]["probe/touched_declared"] > first["plain"]["probe/touched_declared"]
    assert first["teacher"]["probe/spliced_frac"] > 0
    assert first["reward"]["charts/episodic_return"] > first["reward"]["charts/success"]
    assert first["plain"]["charts/success"] == first["teacher"]["charts/success"] == first["reward"]["charts/success"]  # same samples, as sampled
    texts = {c: [e["prompt"] for e in read_jsonl(shop.probe(channel=c) / "episodes.jsonl")] for c in reports}
    assert any("hint: " in t for t in texts["hint"])
    assert any("list: " in t for t in texts["control"])
    assert not any("hint: " in t or "list: " in t for t in texts["plain"])


def test_question_steps_teach_the_habit_of_asking(shop):
    runs = {"plain": shop.probe(channel="plain"), "questions": shop.probe(channel="questions", question_steps=30, num_updates=1)}
    asked = {name: read_jsonl(folder / "metrics.jsonl")[1]["probe/asked"] for name, folder in runs.items()}
    assert asked["plain"] < 0.3 < 0.6 < asked["questions"]


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(shop):
    """By the command line: 4 updates = 2 + 2, question steps and the measured start included."""
    whole, out = shop.probe(channel="questions"), shop.path()
    shop.command("probe", *flags(**{"model": shop.policy, "out": out, "channel": "questions"} | SMALL | {"num_updates": 2})).ok()
    shop.command("probe", *flags(resume=out, num_updates=4)).ok()
    assert lasting(out) == lasting(whole)
    one, other = (newest_checkpoint(f)[2]["state"] for f in (out, whole))
    assert all(torch.equal(t, other["model"][name]) for name, t in one["model"].items())
    assert json.loads((out / "probe.json").read_text()) == json.loads((whole / "probe.json").read_text())


def test_ctrl_c_leaves_a_checkpoint_and_no_report(shop):
    out = shop.path()
    ended = shop.command("probe", *flags(**{"model": shop.policy, "out": out} | SMALL), hook=functools.partial(script_runner.interrupt_after_generate, 5))
    assert ended.code == 130
    assert newest_checkpoint(out)[1]["step"] == 2
    assert not (out / "probe.json").exists()
    shop.command("probe", *flags(resume=out)).ok()
    assert lasting(out) == lasting(shop.probe(channel="plain"))


def test_micro_batches_do_not_change_the_gradient(shop):
    one, other = (weights(shop.probe(micro_batch_tokens=m, num_updates=1)) for m in (4096, 400))
    assert all(torch.allclose(t, other[name], atol=2e-5) for name, t in one.items())


def test_compare_prints_channels_side_by_side(shop):
    runs = [shop.probe(channel=c) for c in ("plain", "hint")]
    output = shop.command("probe", "--compare", *runs).ok().output
    assert "| channel | plain | hint |" in output
    assert "| held out against plain | 0.000 | " in output
    ended = shop.command("probe", "--compare", shop.folder)
    assert ended.code == 2
    assert "no probe.json" in ended.output


def test_a_probe_that_cannot_work_says_so(shop, tmp_path):
    rows = "".join(json.dumps({"question": f"{i}+1?", "answer": f"so\n#### {i + 1}"}) + "\n" for i in range(40))
    (tmp_path / "x.jsonl").write_text(rows)
    base = {"model": shop.policy, "out": tmp_path / "r"} | SMALL
    for change, message in (
        ({"env": f"maths:{tmp_path / 'x.jsonl'}", "channel": "hint"}, "tell no setup facts"),
        ({"train_problems": 10_000}, "--train-problems 10000"),
        ({"max_new_tokens": 250}, "context of 256"),
    ):
        ended = shop.command("probe", *flags(**base | change))
        assert ended.code == 2, ended.output
        assert message in ended.output
        assert "Traceback" not in ended.output
    ended = shop.command("probe", "--resume", tmp_path / "none")
    assert (ended.code, "Traceback" in ended.output) == (2, False)


# ------------------------------------------------------------------------------------------------------------ sample, recheck


def sampling(shop, out, **changes):
    return dataclasses.replace(
        Sample(models=(f"base={shop.policy}",), num_problems=10, samples=4, max_new_tokens=40, batch_problems=3, out=str(out)), **changes
    )


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(path):
    return sorted(path.read_text().splitlines())


def test_sample_writes_records_that_the_account_reads(shop, tmp_path, tasks):
    assert outcome_sample.sample(sampling(shop, tmp_path / "r.jsonl", judge="rule")) == 0
    records = list(Source((str(tmp_path / "r.jsonl"),)))
    assert len(records) == 40
    assert {r.problem for r in records} == {t["id"] for t in tasks.eval[:10]}
    by_id = {t["id"]: t for t in tasks.eval}
    for r in records:
        assert r.finished or (r.tokens == 40 and not r.correct)
        right = maths.grade(by_id[r.problem], r.text, None)[0] == 1.0
        assert r.correct == (right and r.finished) == r.judge
    assert 0 < sum(r.finished for r in records) < 40


def test_a_killed_sample_goes_on_without_doubles(shop, tmp_path, monkeypatch):
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert outcome_sample.sample(sampling(shop, whole, batch_problems=7)) == 0
    calls = []

    def dies(path, records, append):
        calls.append(write_records(path, records, append))
        if len(calls) == 2:
            with open(path, "r+") as file:
                file.truncate(len(file.read()) - 40)  # in the middle of a line
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(outcome_sample, "write_records", dies)
        with pytest.raises(KeyboardInterrupt):
            outcome_sample.sample(sampling(shop, torn))
    assert outcome_sample.sample(sampling(shop, torn)) == 0
    assert lines(torn) == lines(whole)  # whatever the batches were
    size = torn.stat().st_mtime_ns
    assert outcome_sample.sample(sampling(shop, torn)) == 0
    assert torn.stat().st_mtime_ns == size or lines(torn) == lines(whole)
    assert outcome_sample.sample(sampling(shop, torn, models=(f"base={shop.policy}", f"rl={shop.probe(channel='plain') / 'policy'}"))) == 0
    assert len(lines(torn)) == 80
    assert {json.loads(line)["model"] for line in lines(torn)} == {"base", "rl"}


def test_samples_do_not_depend_on_the_other_problems(shop, tmp_path):
    assert outcome_sample.sample(sampling(shop, tmp_path / "a.jsonl", num_problems=3)) == 0
    assert outcome_sample.sample(sampling(shop, tmp_path / "b.jsonl", num_problems=10)) == 0
    assert set(lines(tmp_path / "a.jsonl")) < set(lines(tmp_path / "b.jsonl"))


def test_other_settings_or_another_file_are_refused(shop, tmp_path):
    out = tmp_path / "r.jsonl"
    assert outcome_sample.sample(sampling(shop, out, num_problems=1)) == 0
    for change, message in (
        ({"temperature": 0.7}, "temperature: 0.6 in the file, 0.7 now"),
        ({"models": ("base=smollm2",)}, "model base"),
        ({"seed": 2}, "seed"),
    ):
        with pytest.raises(DataError, match=message):
            outcome_sample.sample(sampling(shop, out, num_problems=1, **change))
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="was not written by this command"):
        outcome_sample.sample(sampling(shop, tmp_path / "other.jsonl"))


def test_answers_that_cannot_be_graded_are_never_silently_wrong(shop, tmp_path, monkeypatch, capsys):
    out = tmp_path / "r.jsonl"
    real = maths.MathsEnv.step

    def step(self, text):
        if random.Random(text).random() < 0.5:
            return "", NAN, True, False, {"success": NAN, "rewards": {"correct": NAN}, "reason": "comparing took over 5 s", "error": "slow"}
        return real(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(maths.MathsEnv, "step", step)
        assert outcome_sample.sample(sampling(shop, out)) == 1
        assert "could not be graded" in capsys.readouterr().err
        left = rows_of(tmp_path / "r.jsonl.ungraded.jsonl")
        assert {row["reason"] for row in left} == {"comparing took over 5 s"}
        assert len(lines(out)) + len(left) == 40
    assert outcome_sample.sample(sampling(shop, out)) == 0  # the grader is well again: only what is missing is drawn, and drawn alike
    assert len(lines(out)) == 40
    assert outcome_sample.sample(sampling(shop, tmp_path / "whole.jsonl")) == 0
    assert lines(out) == lines(tmp_path / "whole.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(maths.MathsEnv, "step", step)
        assert outcome_sample.sample(sampling(shop, tmp_path / "wrong.jsonl", ungraded="wrong")) == 0
    assert len(lines(tmp_path / "wrong.jsonl")) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "--models is missing"),
        ({"models": ("tiny",)}, "--models tiny: write NAME=MODEL"),
        ({"models": ("a=tiny", "a=smollm2")}, "each NAME once"),
        ({"samples": 0}, "--samples 0"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"num_problems": 100_000}, "--num-problems 100000"),
        ({"env": "sql"}, "--env sql: choose maths"),
    ],
)
def test_sampling_flags_that_cannot_work_are_refused(change, message, tmp_path):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        outcome_sample.sample(dataclasses.replace(Sample(models=("base=tiny",), out=str(tmp_path / "r")), **change))


def win(problem, direction="rl", budget=40, loser="base", winner="rl"):
    return {"dataset": "", "rl": "rl", "base": "base", "budget": budget, "problem": problem, "direction": direction, "loser": loser, "winner": winner}


def test_recheck_draws_the_losers_again_and_says_what_survives(shop, tmp_path, tasks, capsys):
    easy = [t["id"] for t in tasks.eval if t["chance"] > 0.9 and len(t["derivation"].splitlines()) <= 4][:6]
    hard = [t["id"] for t in tasks.eval if t["chance"] < 1e-4][:3]
    (tmp_path / "lone_wins.jsonl").write_text("".join(json.dumps(win(p)) + "\n" for p in [*easy, *hard]))
    args = Recheck(models=(f"base={shop.policy}",), wins=str(tmp_path), samples=24, max_new_tokens=40, out=str(tmp_path / "further.jsonl"))
    assert outcome_sample.recheck(args) == 0
    records = list(Source((str(tmp_path / "further.jsonl"),)))
    assert len(records) == 9 * 24
    solved = {r.problem for r in records if r.correct}
    printed = capsys.readouterr().out
    assert f"the loser solves {len(solved)} of them" in printed
    assert all((f"survives: {p}," in printed) == (p not in solved) for p in [*easy, *hard])
    assert len(solved & set(easy)) > len(solved & set(hard))
    # its samples are not those of `sample`
    plain = sampling(shop, tmp_path / "r.jsonl", num_problems=0, samples=2)
    ids = {t["id"] for t in tasks.eval}
    assert set(easy) <= ids
    seeds = {outcome_sample.sample_seed(1, stream, easy[0], 0) for stream in (0, outcome_sample.FURTHER)}
    assert len(seeds) == 2
    assert plain.seed == args.seed
    budget = min(r.tokens for r in records if r.correct)  # a smaller budget: only what came within it counts
    (tmp_path / "lone_wins.jsonl").write_text("".join(json.dumps(win(p, budget=budget - 1)) + "\n" for p in easy))
    assert outcome_sample.recheck(args) == 0
    assert "the loser solves 0 of them" in capsys.readouterr().out


def test_recheck_refuses_what_does_not_fit(shop, tmp_path, tasks):
    path = tmp_path / "lone_wins.jsonl"
    args = Recheck(models=(f"base={shop.policy}",), wins=str(path), max_new_tokens=40, out=str(tmp_path / "f.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        outcome_sample.recheck(args)
    for content, message in (
        ("", "no lone win"),
        ("{}\n", "lone_wins.jsonl:1: not a row"),
        (json.dumps(win("nobody")) + "\n", "no problem 'nobody'"),
        (json.dumps(win(tasks.eval[0]["id"], dataset_ := "rl")).replace('"dataset": ""', f'"dataset": "{dataset_}"') + "\n", "no row of --dataset"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            outcome_sample.recheck(args)
    path.write_text(json.dumps(win(tasks.eval[0]["id"], loser="other")) + "\n")
    with pytest.raises(ArgumentError, match="other are not among them"):
        outcome_sample.recheck(args)
    path.write_text(json.dumps(win(tasks.eval[0]["id"], budget=41)) + "\n")
    with pytest.raises(ArgumentError, match="read at up to 41 tokens"):
        outcome_sample.recheck(args)


def test_sample_decompose_recheck_by_command_line(shop, tmp_path):
    """The whole way: records of a start and a trained policy, their account, further samples of the losers, the account with them."""
    need_module("jinja2")
    records, report = tmp_path / "records.jsonl", tmp_path / "report"
    models = [f"base={shop.policy}", f"rl={shop.probe(channel='plain') / 'policy'}"]
    common = flags(max_new_tokens=96, samples=4)
    shop.command("sample", "--models", *models, *common, *flags(num_problems=60, out=records)).ok()
    shop.command("decompose", *flags(records=records, base="base", cap=96, out=report), "--budgets", "24", "48", "96", *flags(resamples=200)).ok()
    assert rows_of(report / "lone_wins.jsonl"), "the test needs lone wins; take more problems"
    further = tmp_path / "further.jsonl"
    ended = shop.command("recheck", "--models", *models, *flags(wins=report, samples=6, max_new_tokens=96, out=further)).ok()
    assert "survive" in ended.output
    again = tmp_path / "again"
    arguments = flags(records=records, base="base", cap=96, out=again, recheck=further)
    shop.command("decompose", *arguments, "--budgets", "24", "48", "96", *flags(resamples=200)).ok()
    assert all(row["checked"] == 6 for row in rows_of(again / "lone_wins.jsonl"))
    recovered = re.findall(r"solves (\d+) of them", ended.output)
    assert sum(row["recovered"] > 0 for row in rows_of(again / "lone_wins.jsonl")) == sum(map(int, recovered))
