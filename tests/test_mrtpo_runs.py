"""mrtpo.py by its command line: what the numbers of a run are, that it resumes, stops and fails as it should, on one process and on two.

All runs share one small warm-started policy and one Spider folder of 18 questions. See script_runner.py for how they are started.
"""

import functools
import json
import math
import os
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys

import pytest
import script_runner
import torch
from conftest import need_module

from common import envs, policies
from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl

LR = 1e-3
BASE = {
    "groups_per_update": 4,
    "group_size": 4,
    "max_new_tokens": 32,
    "num_updates": 2,
    "eval_every": 2,
    "eval_tasks": 3,
    "save_every": 2,
    "learning_rate": LR,
    "lr_warmup_updates": 1,
    "beta_warmup": 1,
    "update_epochs": 1,
    "num_minibatches": 1,
}
VARYING = re.compile(r"time/.*|charts/SPS|mrtpo/replay_share")  # wall-clock time


def spider(folder, train=("dog", "club"), held_out=("farm",)):
    """A Spider folder with one database of one table per name, six questions each."""
    questions = {}
    for name in (*train, *held_out):
        path = folder / "database" / name / f"{name}.sqlite"
        path.parent.mkdir(parents=True)
        db = sqlite3.connect(path)
        db.execute(f"create table {name} ( id integer , name text , age integer )")
        db.executemany(f"insert into {name} values (?, ?, ?)", [(i, f"x{i}", i * 7 % 5) for i in range(6)])
        db.commit()
        db.close()
        questions[name] = [
            {"db_id": name, "question": f"show the {what} of each {name} with age over {k}", "query": f"SELECT {what} FROM {name} WHERE age > {k}"}
            for what in ("name", "age")
            for k in (1, 2, 3)
        ]
    (folder / "train_spider.json").write_text(json.dumps([q for name in train for q in questions[name]]))
    (folder / "dev.json").write_text(json.dumps([q for name in held_out for q in questions[name]]))
    return folder


class Result:
    def __init__(self, ended, folder):
        self.code, self.output, self.folder, self.ok = ended.code, ended.output, folder, ended.ok

    @functools.cached_property
    def metrics(self):
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def by_step(self):
        return {m["step"]: m for m in self.metrics}

    @functools.cached_property
    def lasting(self):
        """The metrics without wall-clock time."""
        return [{k: v for k, v in m.items() if not VARYING.fullmatch(k)} for m in read_jsonl(self.folder / "metrics.jsonl")]

    @functools.cached_property
    def state(self):
        return newest_checkpoint(self.folder)[2]["state"]

    @property
    def weights(self):
        return self.state["model"]

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
        self.data = spider(folder / "spider")
        tasks = envs.load(f"sql:{self.data}")
        rng, env = random.Random(0), tasks.make_env()
        answers = [(t, f"<think> {rng.choice(['ok', 'easy'])} </think> <sql> {t['query']} </sql>") for t in tasks.train]
        talks = [[*env.reset(t), {"role": "assistant", "content": a}] for t, a in answers] * 8
        for name in ("tools", "instructions"):
            other = envs.load(name)
            shortest = sorted((other.demonstrate(t, rng) for t in other.train[:400]), key=lambda c: len(c[-1]["content"]))
            talks += shortest[:60]
        config = policies.TinyConfig(
            vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, context=512, steps=120, batch_size=16, learning_rate=1e-2
        )
        lm, tokenizer, _ = policies.train_tiny(talks, config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)
        self.start_weights = {f"lm.{name}": t.clone() for name, t in lm.state_dict().items()}

    def argv(self, out, **changes):
        return flags(**{"model": self.policy, "env": f"sql:{self.data}", "out": out} | BASE | changes)

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def run(self, hook=None, **changes):
        key = (str(hook), tuple(sorted(changes.items())))
        if hook is not None or key not in self.kept:
            out = self.path()
            self.kept[key] = Result(script_runner.run("mrtpo.py", self.argv(out, **changes), out.with_suffix(".log"), hook), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run("mrtpo.py", flags(resume=folder, **changes), self.path().with_suffix(".log")), folder)

    def run_two(self, hook=None, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = flags(**changes) if "resume" in changes else self.argv(out, **changes)
        ended = script_runner.run_ranks("mrtpo.py", argv, out.with_suffix(".log"), 2, port, hook)
        return [Result(e, out) for e in ended]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates):
    """What holds for every finished run with one optimizer step an update."""
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is not None and math.isfinite(v) for v in m.values()), m
        assert "log/nonfinite" not in m
    for m in result.metrics[1:]:
        assert (m["losses/grad_norm"] > 0) == (m["rollout/zero_std_group_frac"] < 1)
        assert 0 <= m["rollout/zero_std_group_frac"] <= 1
        assert 0 < m["charts/episodic_length"] <= 64
        assert m["rollout/error_frac"] == 0
        assert m["rollout/weight_version"] == m["step"]
        assert m["time/rollout"] > 0
        assert m["time/train"] > 0
        assert m["charts/SPS"] > 0
        assert 0 <= m["mrtpo/replay_share"] <= 1
        assert m["charts/learning_rate"] == pytest.approx(LR)
    for m in (result.metrics[0], result.metrics[-1]):
        assert 0 <= m["eval/success"] <= 1
        assert m["eval/error_frac"] == 0


def check_one_step(result):
    for m in result.metrics[1:]:
        assert m["losses/clipfrac"] == 0  # exactly: with one step the ratio is 1
        assert m["losses/approx_kl"] == 0
        assert m["losses/old_approx_kl"] == 0
        assert m["losses/entropy"] > 0
        assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
        assert 0 <= m["rollout/k3"] < 1e-6
        assert m["rollout/tis_capped_frac"] == 0


# ---------------------------------------------------------------------------------------------------------- every credit


@pytest.mark.parametrize("credit", ["mrtpo", "gdpo", "grpo", "joint", "shuffled"])
def test_credits(shop, credit):
    r = shop.run(credit=credit)
    check_numbers(r, 2)
    check_one_step(r)
    first, second = r.metrics[1:]
    assert (first["mrtpo/beta"], second["mrtpo/beta"]) == (0.0, 0.5)  # beta warms up over one update
    assert first["mrtpo/replayed_pair_frac"] == 0  # no weight, no replay
    assert first["mrtpo/max_weight_max"] == 1
    assert first["charts/episodic_return"] == pytest.approx(sum(first[f"reward/{n}"] for n in ("format", "executes", "result")))
    replays = credit in ("mrtpo", "joint", "shuffled")
    assert (second["mrtpo/replayed_pair_frac"] > 0) == replays
    assert (second["mrtpo/max_weight_max"] > 1) == replays
    assert (second["mrtpo/replay_tokens_per_response_token"] > 0) == replays
    assert second["mrtpo/max_weight_max"] < 5 / 0.5
    keys = [k for k in second if k.startswith(("mrtpo/tokens_for_80pct/", "mrtpo/region_lift/"))]
    assert bool(keys) == replays
    assert all(0 <= second[k] <= 1 for k in keys if "80pct" in k)
    for e in r.episodes:
        for reward in e["rewards"].values():
            assert sum(reward["credit"]) / len(reward["credit"]) == pytest.approx(reward["advantage"], abs=1e-9)  # mean weight 1: credit is conserved
            assert reward["replayed"] == (None not in reward["distance"])
            if reward["replayed"]:
                assert all(0 <= d <= 1 for d in reward["distance"])
    assert any(v["replayed"] for e in r.episodes for v in e["rewards"].values()) == replays


def test_credits_train_different_weights(shop):
    finals = [shop.run(credit=c).weights for c in ("mrtpo", "gdpo", "grpo", "joint", "shuffled")]
    for i, a in enumerate(finals):
        assert not equal(a, shop.start_weights)
        for b in finals[:i]:
            assert not equal(a, b)


def test_beta_zero_is_gdpo_to_the_last_bit(shop):
    gdpo, zero = shop.run(credit="gdpo"), shop.run(beta=0.0)
    zero.ok()
    assert equal(gdpo.state, zero.state)
    assert [{k: v for k, v in m.items() if k != "mrtpo/beta"} for m in gdpo.lasting] == [
        {k: v for k, v in m.items() if k != "mrtpo/beta"} for m in zero.lasting
    ]


def test_opsd(shop):
    r = shop.run(credit="opsd")
    check_numbers(r, 2)
    for m in r.metrics[1:]:
        assert 0 < m["losses/policy_loss"] < math.log(2)  # a JS divergence in nats
        assert not [k for k in m if k.startswith(("losses/approx_kl", "losses/clipfrac", "rollout/logprob", "rollout/k3"))]  # nothing stands for what it lacks
    assert not equal(r.weights, shop.start_weights)


def test_saw_weights_the_rewards(shop):
    for credit in ("mrtpo", "grpo"):
        r = shop.run(credit=credit, response_weighting="saw")
        check_numbers(r, 2)
        check_one_step(r)
        assert not equal(r.weights, shop.run(credit=credit).weights)


def test_kl_to_the_start_policy(shop):
    r = shop.run(kl_coef=0.5)
    check_numbers(r, 2)
    check_one_step(r)
    assert r.metrics[1]["losses/kl"] == 0  # the policy is the start policy
    assert r.metrics[2]["losses/kl"] > 1e-6
    assert not equal(r.weights, shop.run().weights)


def test_seq_mean_aggregation(shop):
    r = shop.run(loss_aggregation="seq_mean_token_mean")
    check_numbers(r, 2)
    check_one_step(r)
    assert not equal(r.weights, shop.run().weights)


def test_several_epochs_and_minibatches(shop, tmp_path):
    r = shop.run(hook=functools.partial(script_runner.keep_gradients, str(tmp_path / "g")), update_epochs=2, num_minibatches=2, learning_rate=LR)
    check_numbers(r, 2)
    assert len(torch.load(tmp_path / "g.0")) == 2 * 4  # optimizer steps
    assert {int(s["step"]) for s in r.state["optimizer"]["state"].values()} == {8}
    for m in r.metrics[1:]:
        assert 0 < m["losses/approx_kl"] < 1
        assert 0 <= m["losses/clipfrac"] <= 1
        assert m["rollout/logprob_absdiff_max"] < 1e-4  # the anchor is the policy before the update
    assert not equal(r.weights, shop.run().weights)


# ------------------------------------------------------------------------------------------------------- every environment


@pytest.mark.parametrize(("env", "names"), [("sql", {"format", "executes", "result"}), ("tools", {"format", "call"}), ("instructions", {"topic"})])
def test_embedded_environments(shop, env, names):
    r = shop.run(env=env, max_new_tokens=40, num_updates=2, eval_tasks=4)
    r.ok()
    last = r.metrics[-1]
    assert names <= {k.removeprefix("reward/") for k in last if k.startswith("reward/")}
    assert names <= {k.removeprefix("eval/reward/") for k in last if k.startswith("eval/reward/")}
    assert all(0 <= v <= 1 for k, v in last.items() if k.startswith(("reward/", "eval/reward/")))
    assert all(v is not None and math.isfinite(v) for m in r.metrics for v in m.values())
    check_one_step(r)
    if env == "instructions":
        assert last["mrtpo/replayed_pair_frac"] > 0
        assert len([k for k in last if k.startswith("reward/")]) > 8  # prompts with different sets of constraints


# ------------------------------------------------------------------------------------------------------ what a run leaves


def test_run_folder(shop):
    r = shop.run()
    r.ok()
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html", "environment.json"):
        assert (r.folder / name).stat().st_size > 0, name
    assert json.loads((r.folder / "args.json").read_text())["group_size"] == 4
    assert "eval/success" in r.output
    assert 0 < len(r.episodes) <= 4
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    for e in r.episodes:
        assert e["step"] == 2
        assert e["tokens"] == [tokenizer.decode([t]) for t in e["token_ids"]]
        assert len(e["token_ids"]) == len(e["logprobs"]) == len(e["token_advantages"]) == len(e["tokens"])
        assert all(x <= 0 for x in e["logprobs"])
        assert tokenizer.decode(e["prompt_ids"]) == e["prompt"]
    page = (r.folder / "credit.html").read_text()
    assert "<think>" not in page  # what a model wrote is never markup
    assert "<|end|>" not in page
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [e["tokens"] for e in shown] == [e["tokens"] for e in r.episodes]
    assert any("<|end|>" in e["tokens"] for e in shown)


def test_the_fork_is_what_the_command_line_is(shop):
    """The one run of this file that pays for a start of Python: same weights as its fork."""
    out = shop.path()
    command = [sys.executable, "mrtpo.py", *shop.argv(out)]
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=os.environ | script_runner.ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    r = Result(script_runner.Ended(0, ended.stdout), out)
    assert equal(r.state, shop.run().state)
    assert r.lasting == shop.run().lasting  # the same seed gives the same run
    assert "run folder:" in ended.stdout


def test_another_seed_is_another_run(shop):
    a, b = shop.run(), shop.run(seed=2)
    check_numbers(b, 2)
    assert a.lasting[0] == b.lasting[0]  # the evaluation at the start is greedy
    assert [e["token_ids"] for e in a.episodes] != [e["token_ids"] for e in b.episodes]
    assert not equal(a.weights, b.weights)


def test_learning_rate_zero_changes_nothing(shop):
    r = shop.run(learning_rate=0.0, num_updates=4, eval_every=1)
    r.ok()
    for name, w in r.weights.items():
        assert torch.equal(w, shop.start_weights[name]), name
    check_one_step(r)
    assert len({m["eval/success"] for m in r.metrics}) == 1
    assert len({m["eval/length"] for m in r.metrics}) == 1
    gaps = [m["rollout/logprob_absdiff_mean"] for m in r.metrics[1:]]
    assert max(gaps) < 1e-5  # flat: it does not grow with the updates
    assert max(gaps) < 5 * min(gaps)


# ----------------------------------------------------------------------------------------- gradients and how work is split


@pytest.fixture(scope="module")
def gradients(shop):
    """name -> (gradients of the first optimizer step, metrics of update 1) of one update under different splits of the work."""
    found = {}

    def keep(name, result, ranks=(0,)):
        for rank in ranks:
            found[f"{name}.{rank}"] = (torch.load(f"{shop.folder}/g-{name}.{rank}")[0], result)

    def hook(name):
        return functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-{name}")

    one = {"num_updates": 1, "beta_warmup": 0, "max_grad_norm": 1e9}
    for name, changes in (("one", {}), ("small", {"micro_batch_tokens": 1}), ("middle", {"micro_batch_tokens": 300}), ("padded", {"share_prompts": "off"})):
        keep(name, shop.run(hook=hook(name), **one, **changes))
    both = shop.run_two(hook=hook("ddp"), **one)
    both[1].ok()
    keep("ddp", both[0], (0, 1))
    out = shop.path()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    command += ["localhost:0", "mrtpo.py", *shop.argv(out, **one, parallel="fsdp2")]
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=os.environ | script_runner.ENVIRONMENT, capture_output=True, text=True, timeout=300)
    found["fsdp2"] = (None, Result(script_runner.Ended(ended.returncode, ended.stdout + ended.stderr), out))
    found["seq"] = [
        torch.load(f"{shop.folder}/g-seq{i}.0")[0]
        for i, tokens in enumerate((16384, 1))
        if shop.run(hook=hook(f"seq{i}"), **one, loss_aggregation="seq_mean_token_mean", micro_batch_tokens=tokens).ok()
    ]
    return found


def close(a, b, tolerance):
    """Largest difference of two lists of gradients, relative to the largest entry."""
    scale = max(float(x.abs().max()) for x in a)
    return max(float((x - y).abs().max()) for x, y in zip(a, b)) / scale < tolerance


SAME = ["charts/episodic_return", "charts/episodic_length", "reward/format", "reward/executes", "reward/result", "rollout/truncated_frac", "eval/success"]
NEAR = ["losses/policy_loss", "losses/entropy", "losses/grad_norm", "mrtpo/max_weight_max", "mrtpo/replayed_pair_frac", "mrtpo/tokens_for_80pct/format"]


@pytest.mark.parametrize("name", ["small.0", "middle.0", "padded.0", "ddp.0", "ddp.1"])
def test_the_split_of_the_work_does_not_change_the_gradient(gradients, name):
    reference, plain = gradients["one.0"]
    got, result = gradients[name]
    result.ok()
    assert close(reference, got, 2e-5)  # float32: the order of a few thousand additions
    for key in SAME:
        assert result.by_step[1][key] == pytest.approx(plain.by_step[1][key], abs=1e-12), key
    for key in NEAR:
        assert result.by_step[1][key] == pytest.approx(plain.by_step[1][key], rel=1e-3, abs=1e-5), key


def test_the_split_does_not_change_the_gradient_of_seq_mean(gradients):
    assert close(*gradients["seq"], 2e-5)
    assert not close(gradients["seq"][0], gradients["one.0"][0], 1e-2)


def test_fsdp2_by_torchrun_gives_the_same_update(gradients):
    result, plain = gradients["fsdp2"][1], gradients["one.0"][1]
    result.ok()
    for key in SAME:
        assert result.by_step[1][key] == pytest.approx(plain.by_step[1][key], abs=1e-12), key
    for key in NEAR:
        assert result.by_step[1][key] == pytest.approx(plain.by_step[1][key], rel=1e-3, abs=1e-5), key
    ddp = gradients["ddp.0"][1]
    assert result.weights.keys() == ddp.weights.keys() == plain.weights.keys()
    assert result.state["optimizer"]["state"].keys() == ddp.state["optimizer"]["state"].keys()
    for a in (result, ddp):
        for name, w in plain.weights.items():
            # Adam's first step is learning rate x sign: an entry whose gradient is all rounding may go either way, the others agree to 1e-6
            gap = (a.weights[name] - w).abs()
            assert gap.max() <= 2 * LR + 1e-6
            assert float((gap > 1e-6).double().mean()) < 0.01, name
        for name, moments in plain.state["optimizer"]["state"].items():
            mine = a.state["optimizer"]["state"][name]
            scale = float(moments["exp_avg"].abs().max())
            assert float((mine["exp_avg"] - moments["exp_avg"]).abs().max()) <= 1e-4 * scale + 1e-9


def test_resume_under_two_processes(shop):
    full, part = shop.run_two(num_updates=2, eval_every=1), shop.run_two(num_updates=1, eval_every=1)
    for r in (*full, *part):
        r.ok()
    for r in shop.run_two(resume=part[0].folder, num_updates=2):
        r.ok()
    again = Result(script_runner.Ended(0, ""), part[0].folder)
    assert equal(full[0].state, again.state)
    assert full[0].lasting == again.lasting


def test_groups_must_divide_over_processes(shop):
    for r in shop.run_two(groups_per_update=5):
        assert r.code == 1
        assert "--groups-per-update 5: must be a multiple of 2 processes" in r.output


# -------------------------------------------------------------------------------------------------- resume and interruption


@pytest.fixture(scope="module")
def whole(shop):
    """Four updates without interruption."""
    r = shop.run(num_updates=4)
    check_numbers(r, 4)
    return r


def test_two_and_two_are_four(shop, whole):
    first = shop.run(num_updates=2, seed=1, hook=functools.partial(script_runner.limit_file_size, 2**40))
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)  # weights, optimizer, everything
    assert second.lasting == whole.lasting
    assert second.episodes == whole.episodes


def test_killed_inside_a_checkpoint(shop, whole):
    r = shop.run(hook=functools.partial(script_runner.kill_inside_checkpoint, 3), num_updates=4, save_every=1)
    assert r.code == 137
    assert newest_checkpoint(r.folder)[1]["step"] == 2
    assert [m["step"] for m in r.metrics] == [0, 1, 2, 3]
    second = shop.resume(r.folder)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting  # update 3 stands once


def killed_at(process, moment):
    """SIGKILL as soon as ``moment()`` holds; returns the exit code, 0 if the run was through first."""
    while process.is_alive() and not moment():
        process.join(0.001)
    process.kill()
    return script_runner.finish(process).code


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments(shop, whole, seed):
    """kill -9 three times, each time when a line of a log, a begun checkpoint or a finished one appears, drawn anew; then the run ends as if undisturbed."""
    rng, out = random.Random(seed), shop.path()
    argv = shop.argv(out, num_updates=4, save_every=1)

    def moment(done):
        """A test for the drawn moment, which lies after update ``done`` and before the checkpoint of ``done + 2`` is complete."""
        log, lines = out / "metrics.jsonl", done + rng.choice((2, 2, 3))
        episodes = (out / "episodes.jsonl").stat().st_size if (out / "episodes.jsonl").exists() else 0
        saved = out / "checkpoints" / f"{done + 1:08d}"
        begun = out / "checkpoints" / f".writing-{saved.name}"
        started = lambda: done == 0 or (out / "checkpoints" / f"{done:08d}").exists()  # noqa: E731
        kinds = {
            "metrics line": lambda: log.exists() and log.read_bytes().count(b"\n") >= lines,
            "episode": lambda: (out / "episodes.jsonl").exists() and (out / "episodes.jsonl").stat().st_size > episodes,
            "checkpoint begun": begun.exists,
            "checkpoint": saved.exists,
        }
        kind = rng.choice(sorted(kinds)) if done else "checkpoint"  # a run without a checkpoint cannot be resumed
        return lambda: started() and kinds[kind]()

    codes = [killed_at(script_runner.start("mrtpo.py", argv, out.with_suffix(".log")), moment(0))]
    for _ in range(2):
        done = newest_checkpoint(out)[1]["step"]
        codes.append(killed_at(script_runner.start("mrtpo.py", flags(resume=out), shop.path().with_suffix(".log")), moment(done)))
    assert codes.count(137) >= 2 and set(codes) <= {0, 137}, codes
    last = shop.resume(out)
    last.ok()
    assert equal(last.state, whole.state)
    assert last.lasting == whole.lasting


def test_ctrl_c_saves_and_resumes(shop, whole):
    r = shop.run(hook=functools.partial(script_runner.interrupt_after_generate, 3), num_updates=4, save_every=0)
    assert r.code == 130
    assert "stopping after this update, with a checkpoint" in r.output
    assert newest_checkpoint(r.folder)[1]["step"] == 2  # generations: evaluation, update 1, update 2, evaluation
    assert (r.folder / "credit.html").exists()
    second = shop.resume(r.folder)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting


# ------------------------------------------------------------------------------------------------------ things that fail


def model_copy(shop, name):
    folder = shop.folder / name
    shutil.copytree(shop.policy, folder)
    return folder


def break_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("'<|assistant|>'", "'<|assistant|><think></think>'"))
    return folder


def edit_json(path, **changes):
    record = json.loads(path.read_text())
    record |= changes
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def test_bad_values_and_flags(shop):
    for changes, code, text in (
        ({"credit": "both"}, 2, "credit"),
        ({"group_size": "x"}, 2, "group-size"),
        ({"no_such_flag": 1}, 2, "no-such-flag"),
        ({"group_size": 1}, 1, "ArgumentError: --group-size 1: group normalisation needs at least 2 responses"),
        ({"beta": 1.5}, 1, "ArgumentError: --beta 1.5: must lie in [0, 1]"),
        ({"temperature": 0.0}, 1, "ArgumentError: --temperature 0.0: must be above 0"),
        ({"env": "sql:/no/such/folder"}, 1, "DataError: /no/such/folder: no such folder"),
        ({"env": "poetry"}, 1, "unknown family 'poetry'"),
        ({"parallel": "fsdp2"}, 1, "--parallel fsdp2 needs a launcher, for example: torchrun"),
        ({"resume": "/no/such/run"}, 1, "/no/such/run"),
    ):
        r = shop.run(**changes)
        assert r.code == code, (changes, r.output)
        assert text in re.sub(r"\s*\n?[│|]\s*", " ", r.output), (changes, r.output)
        assert not r.folder.exists() or not list(r.folder.rglob("metrics.jsonl"))  # refused before a run folder is filled


def test_bad_models(shop):
    short = model_copy(shop, "short")
    edit_json(short / "config.json", max_position_embeddings=64)
    mute = model_copy(shop, "mute")
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    broken = break_template(model_copy(shop, "broken"))
    other = model_copy(shop, "other")
    (other / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}))
    for model, text in (
        (short, r"train task '\S+' has \d+ prompt tokens, with --max-new-tokens 32 more than the context of 64 of --model"),
        (mute, r"has no chat template"),
        (broken, r"does not keep the prompt as a prefix of the conversation"),
        (other, r"not a folder or hub id of a causal language model"),
        ("tiny", r"--model tiny needs an environment with scripted demonstrations"),
    ):
        r = shop.run(model=model)
        assert r.code == 1
        assert re.search(text, r.output), r.output


def test_disk_full_while_saving(shop):
    r = shop.run(hook=functools.partial(script_runner.limit_file_size, 300_000))
    assert r.code == 1
    assert "RunError: could not write the checkpoint of update 2" in r.output
    assert "file-size limit" in r.output
    assert [m["step"] for m in read_jsonl(r.folder / "metrics.jsonl")] == [0, 1, 2]
    assert list((r.folder / "checkpoints").iterdir()) == []  # nothing half written


def test_a_database_that_vanishes(shop):
    """Its responses are counted and take no part; the other database's still train, and nothing becomes NaN."""
    data = spider(shop.folder / "vanishing")
    hook = functools.partial(script_runner.remove_after_generate, 2, str(data / "database" / "dog" / "dog.sqlite"))
    r = shop.run(hook=hook, env=f"sql:{data}", num_updates=4, groups_per_update=6)
    r.ok()
    fractions = [m["rollout/error_frac"] for m in r.metrics[1:]]
    assert fractions[0] == 0
    assert 0.5 < fractions[2] + fractions[3] <= 1  # the six dogs among the twelve questions of a pass; an answer without a query needs no database
    assert max(fractions) < 1
    assert all(v is not None and math.isfinite(v) for m in r.metrics for v in m.values())
    assert all(bool(w.isfinite().all()) for w in r.weights.values())
    last = r.metrics[-1]
    assert 0 <= last["reward/format"] <= 1
    assert last["losses/grad_norm"] > 0


def test_every_response_fails(shop):
    """No data, no step: the weights stay, and the run goes on."""
    hook = functools.partial(script_runner.verifier_fails_after_generate, 2)
    r = shop.run(hook=hook, num_updates=3, save_every=1, eval_every=0)
    r.ok()
    assert [m["rollout/error_frac"] for m in r.metrics[1:]] == [0, 1, 1]
    assert r.metrics[-1]["eval/error_frac"] == 1
    assert "eval/success" not in r.metrics[-1]  # unknown is not 0
    assert "charts/success" not in r.metrics[-1]
    assert "losses/grad_norm" not in r.metrics[-1]
    assert "reward/format" not in r.metrics[-1]
    assert all(v is not None and math.isfinite(v) for m in r.metrics for v in m.values())
    checkpoints = sorted((r.folder / "checkpoints").glob("0*"))
    assert [c.name for c in checkpoints] == ["00000002", "00000003"]
    assert equal(*(newest_checkpoint(c)[2]["state"] for c in checkpoints))


def test_real_command_with_vllm(tmp_path):
    """The script with the real engine in a process of its own: the gap stays small after each weight sync, so each sync reached vLLM."""
    need_module("vllm")
    out = tmp_path / "run"
    command = [sys.executable, "mrtpo.py", "--env", "tools", "--engine", "vllm", "--num-updates", "3", "--groups-per-update", "2", "--group-size", "4"]
    command += ["--eval-tasks", "4", "--eval-every", "0", "--beta-warmup", "0", "--learning-rate", "0.003", "--lr-warmup-updates", "0", "--out", str(out)]
    ended = subprocess.run(command, cwd=script_runner.ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in updates] == [1, 2, 3]
    assert all(line["rollout/logprob_absdiff_max"] < 1e-2 and line["rollout/logprob_absdiff_mean"] < 1e-3 for line in updates)
    assert [line["rollout/weight_version"] for line in updates] == [1, 2, 3]
    assert any(line["losses/grad_norm"] > 0 for line in updates)  # weights really moved between the syncs


def test_weights_that_overflow_stop_the_run_before_they_are_saved(shop):
    r = shop.run(learning_rate=1e38, num_updates=3, save_every=1)
    assert r.code == 1
    assert "RunError: update 1: the weights are no longer finite" in r.output
    assert not list((r.folder / "checkpoints").glob("0*"))


def test_resume_refuses_another_folder(shop):
    first = shop.run()
    before = (first.folder / "metrics.jsonl").read_bytes()
    elsewhere = shop.path()
    r = shop.resume(first.folder, out=elsewhere)
    assert r.code == 1
    assert "a resumed run goes on in its own folder; drop --out" in r.output
    assert not elsewhere.exists() and (first.folder / "metrics.jsonl").read_bytes() == before
