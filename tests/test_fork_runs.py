"""fork.py by its command line: what a run's numbers are, that it resumes, stops and fails as it should, with one process and two, and judges that go away.

All runs share one small warm-started policy on the generated rubric task. See script_runner.py for how they are started.
"""

import functools
import json
import math
import re
import socket
import threading

import pytest
import script_runner
import torch
from conftest import real_data
from judge_server import JudgeServer, Reply
from test_fork import ideal

import fork
from common import envs, policies
from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl

script_runner.PRELOAD += ["common.judges", "common.envs.rubric"]  # read when the first run of the session starts the server
LR = 2e-3
BASE = {
    "groups_per_update": 4,
    "group_size": 4,
    "max_new_tokens": 48,
    "num_updates": 2,
    "eval_every": 2,
    "eval_tasks": 4,
    "save_every": 2,
    "learning_rate": LR,
    "lr_warmup_updates": 1,
    "deletion_responses": 3,
}
VARYING = re.compile(r"time/.*|charts/SPS|judge/seconds")  # wall-clock time
JUDGED = re.compile(r"judge/(calls|prompt_tokens|completion_tokens|failures|cache_hit_frac|cost)")  # what differs between judges of one opinion
REWARDS = ("fork", "recall", "generic", "offline_criteria", "online_criteria", "holistic")


class Result:
    def __init__(self, ended, folder):
        self.code, self.output, self.folder, self.ok = ended.code, ended.output, folder, ended.ok

    @functools.cached_property
    def metrics(self):
        return read_jsonl(self.folder / "metrics.jsonl")

    @functools.cached_property
    def lasting(self):
        """The metrics without wall-clock time."""
        return [{k: v for k, v in m.items() if not VARYING.fullmatch(k)} for m in read_jsonl(self.folder / "metrics.jsonl")]

    @property
    def judged(self):
        """The metrics that a judge's opinions decide."""
        return [{k: v for k, v in m.items() if not JUDGED.fullmatch(k)} for m in self.lasting]

    @functools.cached_property
    def state(self):
        return newest_checkpoint(self.folder)[2]["state"]

    @property
    def episodes(self):
        return read_jsonl(self.folder / "episodes.jsonl")


def equal(a, b):
    """Nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def flags(**values):
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Workshop:
    """Where the runs of this file live. `run` remembers a run by its arguments."""

    def __init__(self, folder):
        self.folder, self.kept, self.count = folder, {}, 0
        talks = fork.warm_start_conversations(envs.load("rubric"))[:1500]
        config = policies.TinyConfig(
            vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, context=512, steps=150, batch_size=16, learning_rate=1e-2
        )
        lm, tokenizer, _ = policies.train_tiny(talks, config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)
        self.start_weights = {f"lm.{name}": t.clone() for name, t in lm.state_dict().items()}

    def argv(self, out, **changes):
        return flags(**{"model": self.policy, "judge_cache": self.folder / "cache", "out": out} | BASE | changes)

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def run(self, hook=None, environment=None, **changes):
        key = (str(hook), tuple(sorted(changes.items())))
        if hook is not None or environment is not None or key not in self.kept:
            out = self.path()
            self.kept[key] = Result(script_runner.run("fork.py", self.argv(out, **changes), out.with_suffix(".log"), hook, environment), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run("fork.py", flags(resume=folder, **changes), self.path().with_suffix(".log")), folder)

    def run_two(self, hook=None, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = flags(**changes) if "resume" in changes else self.argv(out, **changes)
        return [Result(e, out) for e in script_runner.run_ranks("fork.py", argv, out.with_suffix(".log"), 2, port, hook)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates):
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is not None and math.isfinite(v) for v in m.values()), m
        assert "log/nonfinite" not in m
    for m in result.metrics[1:]:
        assert m["losses/clipfrac"] == m["losses/approx_kl"] == m["losses/old_approx_kl"] == 0  # exactly: with one step the ratio is 1
        assert m["losses/grad_norm"] > 0 and m["losses/entropy"] > 0
        assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
        assert m["rollout/weight_version"] == m["step"]
        assert 0 <= m["rollout/zero_std_group_frac"] < 1
        assert 0 < m["charts/episodic_length"] <= 48
        assert 0 <= m["charts/episodic_return"] <= 1
        assert m["judge/missing_frac"] == m["judge/dropped_frac"] == m["judge/fail_frac"] == 0
        assert m["charts/learning_rate"] == pytest.approx(LR)
    assert result.metrics[0]["eval/success"] == 0.5  # the start policy against itself
    for m in (result.metrics[0], result.metrics[-1]):
        assert all(0 <= m[f"eval/{k}"] <= 1 for k in ("success", "recall", "precision", "f1", "presence", "absence", "necessary_frac", "correct_frac"))
        assert m["eval/f1"] <= (m["eval/precision"] + m["eval/recall"]) / 2
        assert all(1 <= m[f"eval/quality/{k}"] <= 7 for k in fork.PROFILE)
        assert m["eval/missing_frac"] == 0
    assert all(0 <= result.metrics[0][f"eval/deletion/{k}/{x:g}"] <= 1 for k in ("credit", "prompting") for x in fork.DELETED)


# ---------------------------------------------------------------------------------------------------------- every reward


@pytest.mark.parametrize("reward", REWARDS)
def test_rewards(shop, reward):
    r = shop.run(reward=reward)
    check_numbers(r, 2)
    assert not equal(r.state["model"], shop.start_weights)
    m = r.metrics[1]
    assert ("fork/precision" in m) == (reward not in ("recall", "holistic"))
    assert ("fork/threshold" in m) == (reward == "fork")
    if reward == "recall":
        assert m["charts/episodic_return"] == pytest.approx(m["fork/recall"])
    for e in r.episodes:
        assert e["reward"] is not None
        if reward == "fork":
            assert e["reward"] == pytest.approx(fork.combine(e["precision"], e["recall"]))
            held = [u["credit"] for u in e["units"]]
            assert [u["necessary"] for u in e["units"]] == [c >= e["threshold"] for c in held]
            assert sum(held) == pytest.approx(len({j for u in e["units"] for j in u["criteria"]}))
            assert e["precision"] == pytest.approx(sum(u["necessary"] and u["correct"] for u in e["units"]) / max(len(e["units"]), 1))
        if reward == "holistic":
            assert e["reward"] in (0, 0.25, 0.5, 0.75, 1) and e["units"] == []


def test_rewards_train_different_weights(shop):
    runs = [shop.run(reward=x) for x in REWARDS]
    finals = [r.state["model"] for r in runs]
    for i, a in enumerate(finals):
        for b in finals[:i]:
            assert not equal(a, b)
    assert all(r.lasting[0] == runs[0].lasting[0] for r in runs)  # the evaluation at the start depends on no reward


def test_options(shop, tmp_path):
    hook = functools.partial(script_runner.keep_gradients, str(tmp_path / "g"))
    more = {"kl_coef": 0.5, "update_epochs": 2, "num_minibatches": 2, "loss_aggregation": "seq_mean_token_mean", "aggregate": "mean", "tau": 0.3, "seed": 2}
    r = shop.run(hook=hook, **more)
    r.ok()
    assert len(torch.load(tmp_path / "g.0")) == 2 * 4  # optimizer steps
    assert r.metrics[2]["losses/kl"] > 1e-6 and r.metrics[1]["losses/approx_kl"] > 0
    assert r.metrics[0]["eval/length"] != shop.run(reward="fork").metrics[0]["eval/length"]  # another seed
    assert r.metrics[1]["fork/threshold"] == pytest.approx(0.3)
    for e in r.episodes:
        assert e["reward"] == pytest.approx((e["precision"] + e["recall"]) / 2)


# ------------------------------------------------------------------------------------------------------ what a run leaves


def test_run_folder(shop):
    r = shop.run(reward="fork")
    r.ok()
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html", "environment.json"):
        assert (r.folder / name).stat().st_size > 0, name
    assert "eval/success" in r.output
    assert 0 < len(r.episodes) <= 4
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    for e in r.episodes:
        assert e["tokens"] == [tokenizer.decode([t]) for t in e["token_ids"]]
        assert len(e["token_ids"]) == len(e["logprobs"]) == len(e["token_units"])
        for i, unit in enumerate(e["units"]):  # the tokens of a unit are its words
            words = "".join(t for t, owner in zip(e["tokens"], e["token_units"]) if owner == i)
            assert unit["text"].split()[-1] in words
        assert len(e["met"]) == len(e["criteria"]) == 7
    page = (r.folder / "credit.html").read_text()
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [e["tokens"] for e in shown] == [e["tokens"] for e in r.episodes]
    for e, record in zip(shown, r.episodes):
        strips = {s["name"]: s for s in e["strips"]}
        assert list(strips) == ["credit", "necessity", "factuality", "advantage"]
        owners = record["token_units"]
        assert strips["credit"]["values"] == pytest.approx([None if i is None else float(f"{record['units'][i]['credit']:.6g}") for i in owners])
        assert strips["necessity"]["labels"] == ["unnecessary", "necessary"]


def test_learning_rate_zero_keeps_the_win_rate_at_one_half(shop):
    r = shop.run(learning_rate=0.0, eval_every=1)
    r.ok()
    assert {m["eval/success"] for m in r.metrics} == {0.5}
    assert len({m["eval/length"] for m in r.metrics}) == 1


# ----------------------------------------------------------------------------------------- processes, resume, interruption


def test_two_processes_make_the_same_update(shop):
    one, two = {"num_updates": 1, "max_grad_norm": 1e9, "reward": "online_criteria", "eval_every": 1}, {}
    for name, run in (("one", shop.run), ("two", shop.run_two)):
        got = run(hook=functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-{name}"), **one)
        two[name] = got[0] if name == "two" else got
        two[name].ok()
    a, b = (torch.load(f"{shop.folder}/g-{name}.0")[0] for name in ("one", "two"))
    scale = max(float(x.abs().max()) for x in a)
    assert max(float((x - y).abs().max()) for x, y in zip(a, b)) / scale < 2e-5
    for m, n in zip(two["one"].metrics[:2], two["two"].metrics[:2]):
        for key in m:
            if key.startswith(("eval/", "fork/", "charts/episodic", "judge/missing", "rollout/trunc")) and m["step"] == 0:
                assert n[key] == pytest.approx(m[key], abs=1e-12), key
    for key in ("charts/episodic_return", "charts/episodic_length", "fork/recall", "fork/precision", "fork/units", "losses/grad_norm"):
        assert two["two"].metrics[1][key] == pytest.approx(two["one"].metrics[1][key], rel=1e-4), key


@pytest.fixture(scope="module")
def whole(shop):
    """Four updates without interruption, of the reward that needs the start policy's answers too."""
    r = shop.run(num_updates=4, reward="online_criteria")
    check_numbers(r, 4)
    return r


def test_two_and_two_are_four(shop, whole):
    first = shop.run(num_updates=2, reward="online_criteria", hook=functools.partial(script_runner.limit_file_size, 2**40))
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting
    assert second.episodes == whole.episodes


def test_ctrl_c_saves_and_resumes(shop, whole):
    generations = 1 + 4 + 1 + 2  # start answers for evaluations, for each update, evaluation, updates 1 and 2 (counted from 0)
    hook = functools.partial(script_runner.interrupt_after_generate, generations - 1)
    r = shop.run(hook=hook, num_updates=4, save_every=0, reward="online_criteria")
    assert r.code == 130
    assert "stopping after this update, with a checkpoint" in r.output
    assert newest_checkpoint(r.folder)[1]["step"] == 2
    assert (r.folder / "credit.html").exists()
    second = shop.resume(r.folder)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting


# ------------------------------------------------------------------------------------------------------------ real judges


def http(server):
    return {"judge": f"openai:m@{server.url}", "eval_judge": f"openai:e@{server.url}"}


def test_an_endpoint_of_the_same_opinion_gives_the_same_run_and_a_second_run_makes_no_call(shop):
    rule = shop.run(reward="fork")
    tasks = envs.load("rubric")
    with JudgeServer(ideal((*tasks.train, *tasks.eval))) as server:
        first = shop.run(environment={"JUDGE_API_KEY": "sk-very-secret"}, reward="fork", judge_cache=shop.folder / "cache-http", **http(server))
        first.ok()
        assert all("sk-very-secret" in headers["authorization"] for _, headers in server.calls)
        for file in [*first.folder.rglob("*"), first.folder.with_suffix(".log")]:
            assert not file.is_file() or b"sk-very-secret" not in file.read_bytes(), file
        calls = len(server.calls)
        assert equal(first.state, rule.state)
        assert first.judged == rule.judged
        assert first.metrics[1]["judge/prompt_tokens"] > 0
        keys = {body["model"] for body, _ in server.calls}
        assert keys == {"m", "e"}
        again = shop.run(reward="fork", judge_cache=shop.folder / "cache-http", judge_concurrency=4, **http(server))
        again.ok()
        assert len(server.calls) == calls  # everything came out of the cache
        assert again.metrics[1]["judge/calls"] == 0 and again.metrics[1]["judge/cache_hit_frac"] == 1
        assert equal(again.state, rule.state) and again.judged == rule.judged


def test_an_endpoint_that_is_down_for_a_while_loses_nothing(shop):
    """Refused connections, errors, rate limits and cut replies in the middle of updates: the run waits, and its numbers are those without the outage."""
    rule = shop.run(reward="fork")
    tasks = envs.load("rubric")
    honest = ideal((*tasks.train, *tasks.eval))
    bad = [Reply(status=500), Reply(status=503), Reply(status=429, headers={"retry-after": "0"}), Reply("x", cut=True)]

    def behave(request, number):
        if number == 30:  # the whole server goes away for a second
            threading.Thread(target=lambda: (server.close(), threading.Event().wait(1.0), server.start())).start()
        return bad[number % 4] if 60 <= number < 76 else honest(request, number)

    with JudgeServer(behave) as server:
        r = shop.run(reward="fork", judge_cache=shop.folder / "cache-outage", **http(server))
        r.ok()
    assert equal(r.state, rule.state)
    assert r.judged == rule.judged
    assert sum(m.get("judge/failures", 0) for m in r.metrics) > 0


@pytest.mark.parametrize(("answers", "where"), [(37, "whose evaluation is missing"), (45, "what was judged is in the cache")])
def test_a_judge_that_is_gone_saves_the_run(shop, whole, answers, where):
    """No reply within the patience: a checkpoint, a message, and the resumed run is the one without the outage, from the cache where it was judged."""
    tasks = envs.load("rubric")
    honest = ideal((*tasks.train, *tasks.eval))
    gone = threading.Event()

    def behave(request, number):
        model = request["model"]
        if model == "m" and sum("Split the response" in b["messages"][-1]["content"] for b, _ in server.calls) > answers:
            # 4 answers are judged at the start, 16 in each update, 4 in the evaluation after the second
            gone.set()
        return Reply(status=500) if gone.is_set() else honest(request, number)

    with JudgeServer(behave) as server:
        r = shop.run(reward="online_criteria", num_updates=4, save_every=0, judge_cache=shop.folder / f"cache-{answers}", judge_patience=0.5, **http(server))
        assert r.code == 1, r.output
        assert re.search(rf"JudgeError: .*saved after update 2.*{where}.*--resume", r.output, re.S), r.output
        assert newest_checkpoint(r.folder)[1]["step"] == 2
        assert [m["step"] for m in r.metrics] == [0, 1, 2]
        server.behave = honest
        gone.clear()
        second = shop.resume(r.folder)
        second.ok()
    assert equal(second.state, whole.state)
    assert [{k: v for k, v in m.items() if not k.startswith("eval/")} for m in second.judged] == [
        {k: v for k, v in m.items() if not k.startswith("eval/")} for m in whole.judged
    ]


def fail_roles(share):
    """The rule abstains on a share of its questions, by their content; nothing else of the run changes."""
    import hashlib

    from common.envs import rubric

    real = rubric.rule_judge

    def rule_judge(role, data):
        text = json.dumps([role, data.get("response"), data.get("units")])
        if role in ("factuality", "coverage") and hashlib.sha256(text.encode()).digest()[0] < 256 * share:
            raise rubric.CannotJudge("lost")
        return real(role, data)

    rubric.rule_judge = rule_judge


def test_missing_judgements_leave_with_their_group_and_are_counted(shop):
    r = shop.run(hook=functools.partial(fail_roles, 0.03), num_updates=3, group_size=4, groups_per_update=8, reward="fork")
    r.ok()
    missing = [m["judge/missing_frac"] for m in r.metrics[1:]]
    dropped = [m["judge/dropped_frac"] for m in r.metrics[1:]]
    assert 0 < sum(missing) < 1 and all(d >= m for d, m in zip(dropped, missing)) and sum(dropped) > sum(missing)
    assert all(round(d * 8) == pytest.approx(d * 8) for d in dropped)  # whole groups of 8 in an update
    assert all(v is not None and math.isfinite(v) for m in r.metrics for v in m.values())


def test_nothing_judged_is_no_step(shop):
    r = shop.run(hook=functools.partial(fail_roles, 1.1), reward="fork")
    r.ok()
    assert equal({k.removeprefix("x"): v for k, v in r.state["model"].items()}, shop.start_weights)
    for m in r.metrics[1:]:
        assert m["judge/missing_frac"] == m["judge/dropped_frac"] == 1
        assert not [k for k in m if k.startswith(("losses/", "fork/recall", "charts/episodic"))]
    assert "eval/recall" not in r.metrics[0] and r.metrics[0]["eval/missing_frac"] == 1
    assert r.metrics[0]["eval/success"] == 0.5  # comparisons were not affected


# --------------------------------------------------------------------------------------------------- files and bad input


def test_a_file_of_questions(shop):
    """The rule judge with check words; start and trained answers are compared by the criteria, as the documentation says."""
    data = real_data("rubrics_own") / "rubrics_8.jsonl"
    r = shop.run(env=f"rubric:{data}", groups_per_update=2, reward="fork")
    r.ok()
    assert r.metrics[-1]["eval/success"] == 0.5 or 0 <= r.metrics[-1]["eval/success"] <= 1
    assert not [k for k in r.metrics[0] if k.startswith("eval/quality/")]  # nothing is known, nothing is reported
    assert all(v is not None and math.isfinite(v) for m in r.metrics for v in m.values())


def test_bad_values_and_flags(shop, tmp_path):
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"id": str(i), "question": "q", "rubrics": [{"criterion": "c", "points": 1}]}) + "\n" for i in range(3)))
    for changes, code, text in (
        ({"reward": "both", "group_size": "x", "no_such_flag": 1}, 2, "reward"),
        ({"group_size": 1}, 1, "ArgumentError: --group-size 1: group normalisation needs at least 2 responses"),
        ({"judge": "oracle"}, 1, "JudgeError: --judge"),
        ({"env": f"rubric:{bare}"}, 1, "criterion 1 has no field 'check', so --judge rule cannot grade it"),
    ):
        r = shop.run(**changes)
        assert r.code == code, (changes, r.output)
        assert text in re.sub(r"\s*\n?[│|]\s*", " ", r.output), (changes, r.output)
        assert not r.folder.exists() or not list(r.folder.rglob("metrics.jsonl"))  # refused before a run folder is filled
