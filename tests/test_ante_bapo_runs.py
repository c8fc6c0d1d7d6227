"""ante_bapo.py by its command line on a small game with checks: what a run's numbers are, that it resumes, stops and fails as it should.

All runs share one small warm-started policy. See script_runner.py for how they are started.
"""

import functools
import itertools
import json
import math
import os
import random
import socket
import subprocess
import sys

import pytest
import script_runner
import torch
from multi_turn_runs import Result, both, equal, flags, near

import ante_bapo
from common import envs, policies

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
        results = [r | {"summary": "dialling", "knowable": r["check"] == "NA" or rng.random() < 0.6} for r in ante_bapo.results_of(tasks, task, conversation)]
        out.append(ante_bapo.annotate(conversation, results, kind)[0])
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
        assert sum(m[f"ante/token_share/{f}"] for f in ante_bapo.FACTORS) == pytest.approx(1)
        assert sum(m[f"ante/verdict/{cell}"] for cell in ante_bapo.VERDICTS) == pytest.approx(1)
        assert m["ante/verdict_accuracy"] == pytest.approx(m["ante/verdict/tp"] + m["ante/verdict/tn"])
        assert m["losses/pred_loss"] > 0
    last = r.metrics[-1]
    assert last["eval/tto/token_ratio"] >= 1
    assert last["eval/tts4/token_ratio"] > 2
    assert 0 <= last["eval/calibration_error"] <= 1
    assert not [k for m in r.metrics[:-1] for k in m if "tto" in k or "tts4" in k]
