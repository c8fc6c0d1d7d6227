"""docs/fork_a_script.md: the fork that the page holds as a diff applies to mpo.py, runs, and computes what the page says."""

import importlib.util
import itertools
import json
import math
import shutil
import subprocess
import sys

import multi_turn_runs
import numpy as np
import pytest
import torch
from script_runner import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = ROOT / "docs" / "fork_a_script.md"
BETA, CAP, LAM = 0.5, 5.0, 0.8
SMALL = {"eval_samples": 0, "critic_epochs": 1, "critic_minibatches": 1, "num_updates": 2, "eval_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """The forked script, made as the page says: a copy of mpo.py, and git apply on the page."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copy(ROOT / "mpo.py", folder / "mpo_replay.py")
    done = subprocess.run(["git", "apply", str(PAGE)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"the diff of docs/fork_a_script.md no longer fits mpo.py:\n{done.stderr}"
    assert (folder / "mpo_replay.py").read_text() != (ROOT / "mpo.py").read_text()
    return folder / "mpo_replay.py"


@pytest.fixture(scope="module")
def module(fork):
    spec = importlib.util.spec_from_file_location("mpo_replay", fork)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mpo_replay"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mpo_replay"]


def weights_by_loop(q, lengths, beta, cap):
    out, start = [], 0
    for n in lengths:
        part = q[start : start + n]
        start += n
        mean = sum(part) / n
        w = [min(cap, (1 - beta) + beta * x / mean) if mean >= 1e-8 else 1.0 for x in part]
        out += [x / (sum(w) / n) for x in w]
    return out


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_those_of_a_loop(module, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 12).tolist()
    q = rng.random(sum(lengths)) ** 6  # a few large ones, so that the cap binds
    q[: lengths[0]] = 0
    cu = torch.tensor([0, *np.cumsum(lengths)])
    beta, cap = rng.choice([0.0, 0.5, 1.0]), rng.choice([1.5, 5.0])
    w = module.replay_weights(torch.from_numpy(q), cu, beta, cap)
    assert w.tolist() == pytest.approx(weights_by_loop(q.tolist(), lengths, beta, cap), abs=1e-12)
    assert [float(w[a:b].mean()) for a, b in itertools.pairwise(cu)] == pytest.approx([1.0] * 12)  # credit is moved, not made
    assert beta > 0 or w.tolist() == pytest.approx([1.0] * len(q))
    assert w[: lengths[0]].tolist() == pytest.approx([1.0] * lengths[0])  # nothing to tell tokens apart


def doors_with_text():
    """The game's verifier says in which order the doors open."""
    step = multi_turn_runs.Doors.step

    def told(self, action):
        observation, reward, done, cut, info = step(self, action)
        return observation, reward, done, cut, info | ({"verifier_text": {"doors": "open " + " ".join(self.task["doors"])}} if done or cut else {})

    multi_turn_runs.Doors.step = told


@pytest.fixture(scope="module")
def shop(fork, tmp_path_factory):
    shop = multi_turn_runs.Workshop(str(fork), tmp_path_factory.mktemp("runs"))
    config = shop.policy / "config.json"  # room for the verifier's text, whose words this policy's tokenizer spells out
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))
    return shop


@pytest.fixture(scope="module")
def start(shop):
    return AutoModelForCausalLM.from_pretrained(shop.policy, dtype=torch.float64), AutoTokenizer.from_pretrained(shop.policy)


def distances_by_loop(start, record):
    """MRTPO (3) at every policy token of an episode, each position scored on its own in float64."""
    lm, tokenizer = start
    doors = " ".join(next(t["doors"] for t in multi_turn_runs.load().train if t["id"] == record["task_id"]))
    told = f"<|user|>doors : {doors}\n\nVerifier information:\ndoors: open {doors}<|end|><|assistant|>"
    told, out = tokenizer(told, add_special_tokens=False).input_ids, []
    for at in (i for i, own in enumerate(record["policy_mask"]) if own):
        before = record["token_ids"][:at]
        with torch.no_grad():
            p, r = (lm(torch.tensor([prompt + before])).logits[0, -1].softmax(-1).tolist() for prompt in (told, record["prompt_ids"]))
        m = [(a + b) / 2 for a, b in zip(p, r)]
        js = sum(x * math.log2(x / c) / 2 for dist in (p, r) for x, c in zip(dist, m) if x > 0)
        out.append(math.sqrt(max(js, 0.0)))
    return out


def turn_advantages_by_loop(record, lam):
    """MPO (1) (2): only the value before a turn's first token enters."""
    first, at = [], 0
    for t in record["turns"]:
        first.append(record["values"][at])
        at += t["stop"] - t["start"]
    out, after, value = [], 0.0, 0.0
    for v, t in zip(first[::-1], record["turns"][::-1]):
        after = t["reward"] + value - v + lam * after
        value = v
        out.append(after)
    return out[::-1]


def test_turn_advantage_times_replay_weight_is_that_of_a_loop(shop, start):
    """In the second update the critic has learnt and the policy is still the start policy, so everything can be computed again from the run's records."""
    r = shop.run(hook=doors_with_text, preset="mpo", refine="replay", value_warmup=1, **SMALL)
    r.ok()
    assert r.updates[-1]["replay/weight_max"] > 1
    assert "replay/weight_max" not in r.updates[0]  # the policy does not move there
    records = r.episodes
    assert records
    for e in records:
        lengths = [t["stop"] - t["start"] for t in e["turns"]]
        turns = turn_advantages_by_loop(e, LAM)
        w = weights_by_loop(distances_by_loop(start, e), lengths, BETA, CAP)
        expected = [a for a, n in zip(turns, lengths) for _ in range(n)]
        assert e["advantages"] == pytest.approx([a * x for a, x in zip(expected, w)], rel=1e-3, abs=1e-5)
        assert max(w) > 1.05
        at = 0
        for a, n in zip(turns, lengths):  # MPO's promise holds: the mean over a turn is the turn's advantage
            assert sum(e["advantages"][at : at + n]) / n == pytest.approx(a, abs=1e-6)
            at += n


def test_group_advantage_times_replay_weight_is_that_of_a_loop(shop, start):
    """MRTPO with one reward on episodes of several turns: the weights have mean 1 over the whole episode."""
    r = shop.run(hook=doors_with_text, preset="grpo", refine="replay", **SMALL | {"num_updates": 1, "eval_every": 1, "save_every": 1})
    r.ok()
    records = r.episodes
    assert len(records) == 4  # the whole group
    returns = [e["reward"] for e in records]
    mean = sum(returns) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in returns) / 3)
    for e in records:
        w = weights_by_loop(distances_by_loop(start, e), [len(e["logprobs"])], BETA, CAP)
        assert e["advantages"] == pytest.approx([(e["reward"] - mean) / (std + 1e-6) * x for x in w], rel=1e-3, abs=1e-5)


def test_without_the_flag_the_fork_is_mpo(shop):
    plain = multi_turn_runs.Workshop.__new__(multi_turn_runs.Workshop)
    plain.__dict__.update(shop.__dict__ | {"script": "mpo.py", "kept": {}, "folder": shop.folder / "plain"})
    plain.folder.mkdir()
    a, b = (s.run(preset="mpo", value_warmup=1, **SMALL) for s in (shop, plain))
    a.ok(), b.ok()
    assert multi_turn_runs.equal(a.state, b.state)
    assert a.lasting == b.lasting


def test_without_verifier_text_only_the_turn_advantage_is_left(shop):
    a, b = shop.run(preset="mpo", refine="replay", value_warmup=1, **SMALL), shop.run(preset="mpo", beta=0.0, value_warmup=1, **SMALL)
    a.ok(), b.ok()
    assert multi_turn_runs.equal(a.state, b.state)


def test_token_advantages_are_refused(shop):
    r = shop.run(preset="ppo", refine="replay", value_warmup=1, **SMALL)
    assert r.code == 1
    assert "ArgumentError: --refine replay" in r.output
