"""ante_bapo.py by its command line on a small game with checks: what a run's numbers are, that it resumes, stops and fails as it should.

All runs share one small warm-started policy. See script_runner.py for how they are started.
"""

import functools
import itertools
import json
import math
import os
import random
import re
import socket
import subprocess
import sys

import pytest
import script_runner
import torch
from multi_turn_runs import Result, both, equal, flags, near

import ante_bapo
import ante_beliefs
import ante_report
from common import envs, policies
from common.checkpoints import newest_checkpoint

COLOURS = ("red", "blue", "green")


class Safe:
    """Dial the code named in the task, one colour a turn: `dial red`; `try` says whether it is right, `open` ends the game; `hit` hurts your hand."""

    def reset(self, task):
        self.task, self.dialled = task, []
        return [{"role": "system", "content": "safe"}, {"role": "user", "content": "code : " + " ".join(task["code"])}]

    def step(self, action):
        if action == "die":
            raise envs.EnvironmentFailed("the house burnt down")
        words = action.split()
        info = {"check": "NA", "exit": "yes"}
        if words and words[0] == "dial" and words[1:] and words[1] in COLOURS:
            self.dialled = [*self.dialled, words[1]][-len(self.task["code"]) :]
            return "dialled", 0.0, False, False, info
        verdict = "PASS" if self.dialled == self.task["code"] else "FAIL"
        if action == "try":
            return verdict, 0.0, False, False, info | {"check": verdict}
        if action == "open":
            success = float(verdict == "PASS")
            return "", success, True, False, info | {"check": verdict, "success": success, "rewards": {"open": success}}
        return "ouch" if action == "hit" else "dial, try or open", 0.0, False, False, {"check": "NA", "exit": "no", "invalid": action != "hit"}

    def state_key(self):
        return " ".join(self.dialled)

    def close(self):
        pass


def talk(task, rng, slips):
    env = Safe()
    messages = env.reset(task)
    plan = [f"dial {rng.choice(COLOURS) if rng.random() < slips else colour}" for colour in task["code"]]
    for action in [*plan, *["try"] * (rng.random() < 0.5), *["hit"] * (rng.random() < slips / 4), "open"]:
        messages.append({"role": "assistant", "content": action})
        if action != "open":
            messages.append({"role": "user", "content": env.step(action)[0]})
    return messages


def load(path=None, seed=0):
    rows = [{"id": "".join(code), "code": list(code)} for n in (1, 2) for code in itertools.product(COLOURS, repeat=n)]
    careless = None if path == "real" else lambda t, rng: talk(t, rng, 0.4)
    demonstrate = None if path == "real" else lambda t, rng: talk(t, rng, 0.0)
    return envs.TaskSet("safe", rows[::2], rows[1::2], Safe, demonstrate, None, careless, max_turns=5, workers=2 if path == "threads" else 0)


def safe():
    """A hook: --env safe in the run's process."""
    envs.FAMILIES["safe"] = "test_ante_bapo_runs"


def conversations(kind="ante"):
    """Annotated, with decisions of both kinds where a check runs."""
    tasks, rng, out = load(), random.Random(0), []
    for task in [t for t in tasks.train for _ in range(12)]:
        conversation = tasks.careless(task, rng)
        results = [
            r | {"summary": "dialling", "knowable": r["check"] == "NA" or rng.random() < 0.6} for r in ante_beliefs.results_of(tasks, task, conversation)
        ]
        out.append(ante_beliefs.annotate(conversation, results, kind)[0])
    return out


BASE = {
    "env": "safe", "stage": "rl", "groups_per_update": 4, "group_size": 4, "max_new_tokens": 16, "num_updates": 3, "eval_every": 3, "eval_tasks": 6,
    "save_every": 3, "learning_rate": 1e-3, "lr_warmup_updates": 1, "update_epochs": 1, "num_minibatches": 1,
}  # fmt: skip
TINY = policies.TinyConfig(
    vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, context=256, steps=150, batch_size=16, learning_rate=1e-2
)


class Workshop:
    """Where the runs of this file live. `run` remembers a run by its arguments."""

    def __init__(self, folder):
        self.folder, self.kept, self.count = folder, {}, 0
        for kind in ("ante", "reactive"):
            lm, tokenizer, _ = policies.train_tiny(conversations(kind), TINY)
            lm.save_pretrained(folder / kind)
            tokenizer.save_pretrained(folder / kind)

    def argv(self, out, **changes):
        kind = "reactive" if changes.get("belief") in ("reactive", "retrospective") else "ante"
        return [w for w in flags(**{"model": self.folder / kind, "out": out} | BASE | changes) if w != "flag"]

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def run(self, hook=None, **changes):
        key = (str(hook), tuple(sorted((k, str(v)) for k, v in changes.items())))
        if hook is not None or key not in self.kept:
            out = self.path()
            hooks = functools.partial(both, safe, *([hook] if hook else []))
            self.kept[key] = Result(script_runner.run("ante_bapo.py", self.argv(out, **changes), out.with_suffix(".log"), hooks), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run("ante_bapo.py", flags(resume=folder, **changes), self.path().with_suffix(".log"), safe), folder)

    def run_two(self, hook=None, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = flags(**changes) if "resume" in changes else self.argv(out, **changes)
        hooks = functools.partial(both, safe, *([hook] if hook else []))
        return [Result(e, out) for e in script_runner.run_ranks("ante_bapo.py", argv, out.with_suffix(".log"), 2, port, hooks)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates):
    """What holds for every finished run with one optimizer step an update."""
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is not None and math.isfinite(v) for v in m.values()), m
    for m in result.updates:
        assert m["rollout/weight_version"] == m["step"]
        assert 1 <= m["charts/turns"] <= 5
        assert m["charts/episodic_return"] == m["charts/success"]
        assert m["rollout/truncated_frac"] == pytest.approx(sum(v for k, v in m.items() if k.startswith("rollout/truncated/")))
        assert m["losses/clipfrac"] == m["losses/approx_kl"] == m["losses/old_approx_kl"] == 0  # exactly: with one step every ratio is 1
        assert m["losses/grad_norm"] > 0
        assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
        assert 0 <= m["rollout/k3"] < 1e-6
        assert m["losses/kl"] >= 0
        for name in ("bapo", "gigpo", "rebel"):
            assert 0 <= m[f"ante/coverage/{name}"] <= 1 <= m[f"ante/group_size/{name}"]
    assert result.updates[0]["losses/kl"] == 0  # still at the warm start
    for m in (result.metrics[0], result.metrics[-1]):
        assert 0 <= m["eval/success"] <= 1


def test_ante_bapo_run(shop):
    r = shop.run(test_time="both")
    check_numbers(r, 3)
    for m in r.updates:
        assert m["ante/hit_rate_all"] > m["ante/hit_rate"] > 0  # that dialling checks nothing is easy
        assert 0 < m["ante/trust_rate"] < 1
        assert sum(m[f"ante/token_share/{f}"] for f in ante_report.FACTORS) == pytest.approx(1)
        assert sum(m[f"ante/verdict/{cell}"] for cell in ante_report.VERDICTS) == pytest.approx(1)
        assert m["ante/verdict_accuracy"] == pytest.approx(m["ante/verdict/tp"] + m["ante/verdict/tn"])
        assert m["losses/pred_loss"] > 0
    last = r.metrics[-1]
    assert last["eval/tto/token_ratio"] >= 1
    assert last["eval/tts4/token_ratio"] > 2
    assert 0 <= last["eval/calibration_error"] <= 1
    assert not [k for m in r.metrics[:-1] for k in m if "tto" in k or "tts4" in k]


def test_credit_and_parts_of_the_loss_train_different_weights(shop):
    variants = [
        {}, {"credit": "task"}, {"credit": "gigpo"}, {"credit": "rebel"}, {"decision_term": "g_minus_q"}, {"no_pred_loss": "flag"},
        {"pred_steps": "conclusive"}, {"kl_coef": 0.5}, {"loss_aggregation": "seq_mean_token_mean"}, {"omega": 2.0},
    ]  # fmt: skip
    runs = [shop.run(test_time="plain", **v) for v in variants]
    for r, v in zip(runs, variants):
        check_numbers(r, 3)
        assert ("losses/pred_loss" in r.updates[0]) == ("no_pred_loss" not in v)
        assert ("ante/second_term_abs" in r.updates[0]) == (v.get("credit") != "task")
    for a, b in itertools.combinations(runs, 2):
        assert a.updates[0]["charts/episodic_length"] == b.updates[0]["charts/episodic_length"]  # the same first rollout
        assert not equal(a.state["model"], b.state["model"])


def test_omega_zero_is_the_task_level_advantage(shop):
    """Bit for bit, whatever decisions earn: they enter by the second term only."""
    task = shop.run(test_time="plain", credit="task").state
    assert equal(shop.run(test_time="plain", omega=0.0).state, task)
    assert equal(shop.run(test_time="plain", omega=0.0, alpha=5.0, kappa=2.0).state, task)
    assert not equal(shop.run(test_time="plain", alpha=5.0).state["model"], shop.run(test_time="plain").state["model"])


def test_reactive_and_retrospective(shop):
    for belief in ("reactive", "retrospective"):
        r = shop.run(belief=belief)
        r.ok()
        saved = json.loads((r.folder / "args.json").read_text())
        assert (saved["credit"], saved["test_time"]) == ("task", "plain")
        assert not [k for m in r.metrics for k in m if "hit_rate" in k or "pred_loss" in k or "decision" in k]
        assert all("ante/coverage/gigpo" in m for m in r.updates)
        assert not (r.folder / "reliability.png").exists()
        assert all(set(t["factors"]) == {ante_bapo.ACTION} for e in r.episodes for t in e["turns"])
    assert shop.run(belief="reactive", credit="gigpo").ok().code == 0


def test_minibatches_have_their_anchor_before_the_update(shop):
    r = shop.run(update_epochs=2, num_minibatches=2, test_time="plain")
    r.ok()
    assert {int(s["step"]) for s in r.state["optimizer"]["state"].values()} == {12}
    assert r.updates[0]["losses/approx_kl"] > 0
    assert r.updates[0]["rollout/logprob_absdiff_max"] < 1e-4


# ------------------------------------------------------------------------------------------------------ what a run leaves


def test_run_folder(shop):
    r = shop.run(test_time="both")
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html", "reliability.png"):
        assert (r.folder / name).stat().st_size > 0, name
    page = (r.folder / "credit.html").read_text()
    assert "<|end|>" not in page
    assert "share that came true" in page
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert len(shown) == len(r.episodes) > 0
    for seen, e in zip(shown, r.episodes):
        assert seen["strips"][0]["labels"] == list(ante_report.FACTORS)
        assert [v is not None for v in seen["strips"][0]["values"]] == e["policy_mask"]
        for bar, t in zip(seen["turns"], e["turns"], strict=True):
            said = f"{' '.join(t['forecast'])} {t['decision']}" if t["well_formed"] else "no belief"
            assert f": {said}, was {' '.join(t['truth'])}, decision" in bar["name"]
            assert bar["value"] == pytest.approx(t["advantage"], rel=1e-4, abs=1e-6)
            conclusive = t["truth"][0] != "NA"
            earned = (0.1 if t["forecast"] == t["truth"] else -0.1 * 0.7 / 0.3) if t["decision"] == "TRUST" else -0.005
            assert t["decision_reward"] == pytest.approx(earned if conclusive else 0.0)
            assert len(t["factors"]) == t["stop"] - t["start"]


def test_advantages_of_a_run_are_those_of_its_tables(shop):
    """Recomputed from what episodes.jsonl says of the whole group: group_size 4, and four episodes are kept."""
    r = shop.run(test_time="both")
    by_task = {}
    for e in r.episodes:
        by_task.setdefault((e["step"], e["group"]), []).append(e)
    for episodes in by_task.values():
        assert len(episodes) == 4
        returns = [e["reward"] for e in episodes]
        mean = sum(returns) / 4
        std = (sum((x - mean) ** 2 for x in returns) / 3) ** 0.5
        rows = []
        for e, ret in zip(episodes, returns):
            rest = [t["decision_reward"] for t in e["turns"]]
            rows += [((ret - mean) / (std + 1e-6), ret + sum(rest[i:]), tuple(t["forecast"]), t["decision"], t["advantage"]) for i, t in enumerate(e["turns"])]
        g = [row[1] for row in rows]
        scale = (sum((x - sum(g) / len(g)) ** 2 for x in g) / (len(g) - 1)) ** 0.5 + 1e-6
        for a, x, y, d, advantage in rows:
            v = [row[1] for row in rows if row[2] == y]
            q = [row[1] for row in rows if row[2:4] == (y, d)]
            v, q = sum(v) / len(v), sum(q) / len(q)
            assert advantage == pytest.approx(a + 0.5 * ((x - v) + (q - v)) / scale, rel=1e-6, abs=1e-6)


def test_same_seed_same_run_and_another_seed_another(shop):
    first = shop.run(test_time="plain")
    again = shop.run(hook=functools.partial(script_runner.limit_file_size, 2**40), test_time="plain")
    assert equal(again.state, first.state)
    assert again.lasting == first.lasting
    assert not equal(shop.run(seed=2, test_time="plain").state["model"], again.state["model"])


# ------------------------------------------------------------------------------------------------------------------ stages


def test_stage_sft_then_tto(shop):
    """Two steps of fine-tuning change the weights; the folder is what the next stage starts from; three stages in one run do the same."""
    tuned = shop.run(stage="sft", sft_steps=6, sft_learning_rate=1e-3, test_time="plain")
    tuned.ok()
    [m] = tuned.metrics
    assert m["sft/loss_last"] < m["sft/loss_first"]
    weights = policies.load_policy(str(tuned.folder / "warm_start"))[0].state_dict()
    start = policies.load_policy(str(shop.folder / "ante"))[0].state_dict()
    assert not equal(dict(weights), dict(start))
    alone = shop.run(stage="tto", model=tuned.folder / "warm_start", test_time="both")
    alone.ok()
    [n] = alone.metrics
    assert n["eval/success"] == m["eval/success"]
    assert n["eval/tto/token_ratio"] >= 1
    assert (alone.folder / "reliability.png").exists()
    both = shop.run(stage="all", sft_steps=6, sft_learning_rate=1e-3, test_time="plain")
    check_numbers(both, 3)
    assert both.metrics[0]["eval/success"] == m["eval/success"]
    later = shop.run(stage="rl", model=tuned.folder / "warm_start", test_time="plain")
    assert equal(later.ok() and later.state, both.state)


def test_stage_all_resumes_from_its_own_warm_start(shop):
    options = {"stage": "all", "sft_steps": 3, "sft_learning_rate": 1e-3, "test_time": "plain", "eval_every": 2}
    whole, first = shop.run(num_updates=4, **options), shop.run(num_updates=2, save_every=2, **options)
    whole.ok()
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting


def test_warm_start_on_recorded_trajectories(shop, tmp_path):
    rng = random.Random(1)
    rows = []
    for task in load().train * 3:
        conversation = talk(task, rng, 0.0)
        rows.append({"messages": conversation, "steps": ante_beliefs.results_of(load(), task, conversation), "success": 1})
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0] | {"success": 0}]))
    r = shop.run(stage="sft", env="safe:real", sft_steps=4, trajectories=file, test_time="plain")
    r.ok()
    assert f"{{'used': {len(rows)}, 'failed': 1}}" in r.output
    assert r.metrics[0]["sft/loss_last"] > 0


# ------------------------------------------------------------------------------------------------------------- going on


def test_two_and_two_are_four(shop):
    options = {"test_time": "plain", "eval_every": 2}
    whole = shop.run(num_updates=4, **options)
    whole.ok()
    first = shop.run(num_updates=2, save_every=2, **options)
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting
    killed = shop.run(hook=functools.partial(script_runner.kill_inside_checkpoint, 3), num_updates=4, save_every=1, **options)
    assert killed.code == 137
    assert newest_checkpoint(killed.folder)[1]["step"] == 2
    again = shop.resume(killed.folder)
    again.ok()
    assert equal(again.state, whole.state)


def test_interrupt(shop):
    r = shop.run(hook=functools.partial(script_runner.interrupt_after_generate, 12), num_updates=4, test_time="plain")
    assert r.code == 130
    assert newest_checkpoint(r.folder)[1]["step"] < 4


def test_splits_of_the_work(shop):
    """Micro-batches of any size, padded rows and two processes give the gradient of one."""
    one = {"num_updates": 1, "max_grad_norm": 1e9, "eval_every": 1, "save_every": 1, "test_time": "plain"}
    found = {}
    for name, changes in (("one", {}), ("small", {"micro_batch_tokens": 1}), ("padded", {"share_prompts": "off"}), ("middle", {"micro_batch_tokens": 300})):
        hook = functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-{name}")
        shop.run(hook=hook, **one, **changes).ok()
        found[name] = torch.load(f"{shop.folder}/g-{name}.0")
    pair = shop.run_two(hook=functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-two"), **one)
    for r in pair:
        r.ok()
    found["two"] = torch.load(f"{shop.folder}/g-two.0")
    single = shop.run(hook=functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-again"), **one)
    for key, value in single.ok() and single.lasting[1].items():
        assert pair[0].metrics[1][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    [want] = found["one"]
    assert max(float(g.abs().max()) for g in want) > 0
    for name, [mine] in found.items():
        assert near(want, mine, 1e-4), name


def test_two_processes_share_the_warm_start(shop):
    options = {"stage": "all", "sft_steps": 2, "sft_learning_rate": 1e-3, "test_time": "plain", "num_updates": 1, "eval_every": 1, "save_every": 1}
    pair = shop.run_two(**options)
    for r in pair:
        r.ok()
    single = shop.run(**options)
    single.ok()
    assert pair[0].metrics[0]["sft/loss_last"] == pytest.approx(single.metrics[0]["sft/loss_last"], rel=1e-4)
    a, b = (policies.load_policy(str(x.folder / "warm_start"))[0].state_dict() for x in (pair[0], single))
    assert all(torch.allclose(a[k], b[k], atol=2e-3) for k in a)


def test_threads_play_the_same_episodes(shop):
    """Other batches in generation, so the last bits differ; what is said and played does not."""
    threads, one = (shop.run(env=env, groups_per_update=1, test_time="plain", num_updates=1, eval_every=1) for env in ("safe:threads", "safe"))
    threads.ok(), one.ok()
    assert [e["token_ids"] for e in threads.episodes] == [e["token_ids"] for e in one.episodes] != []
    for key in ("charts/success", "charts/episodic_length", "ante/hit_rate", "ante/decision_reward", "ante/coverage/bapo"):
        assert threads.updates[0][key] == one.updates[0][key], key


# ------------------------------------------------------------------------------------------------------------- bad input


def test_bad_values(shop, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}')
    for changes, text in (
        ({"belief": "reactive", "credit": "bapo"}, "--credit bapo: groups steps by their forecasts"),
        ({"q_star": 1.0}, "--q-star 1.0: must lie in [0, 1)"),
        ({"sft_steps": 3}, "--stage rl: has no warm start"),
        ({"max_new_tokens": 250}, "more than the context of 256"),
        ({"stage": "sft", "sft_steps": 1, "trajectories": bad}, "line 1: field messages"),
        ({"stage": "sft", "sft_steps": 1, "trajectories": tmp_path / "none.jsonl"}, "cannot be read"),
        ({"stage": "all", "sft_steps": 1, "env": "safe:real"}, "the warm start needs scripted demonstrations or --trajectories"),
        ({"env": "rubbish"}, "unknown family"),
        ({"env": "sql", "credit": "gigpo"}, "has no state_key"),
    ):
        r = shop.run(**changes)
        assert r.code == 1 and text in r.output, (changes, r.output)
        assert "Traceback" not in r.output


def test_require_sandbox(shop):
    r = shop.run(hook=no_bubblewrap, require_sandbox="flag", num_updates=1)
    assert r.code == 1 and "--require-sandbox: no box today" in r.output


def no_bubblewrap():
    from common import sandbox

    sandbox.isolation_problem = lambda: "no box today"


def test_the_fork_is_what_the_command_line_is(shop, tmp_path):
    """The one run of this file that pays for a start of Python, on generated repositories with real test runs, by a policy that knows nothing of them."""
    command = [
        sys.executable,
        "ante_bapo.py",
        *shop.argv(tmp_path / "r", env="repo", num_updates=1, max_turns=2, eval_tasks=2, groups_per_update=1, group_size=2),
    ]
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=os.environ | script_runner.ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode in (0, 1), ended.stderr
    if ended.returncode:
        assert "more than the context of 256" in ended.stderr
    else:
        assert "run folder:" in ended.stdout
