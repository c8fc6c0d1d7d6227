"""interq_rl.py by its command line on a small game: presets, formats, exactness without mismatch, resume, splits, failures."""

import functools
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import script_runner
import torch
from conftest import need_module
from multi_turn_runs import Workshop, equal, near

from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl
from interq_rl import PRESETS


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop("interq_rl.py", tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates):
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is None or math.isfinite(v) for v in m.values()), m
    for m in result.updates:
        assert m["rollout/weight_version"] == m["step"]
        assert m["losses/clipfrac"] == m["losses/approx_kl"] == 0  # with one step every ratio is 1
        assert m["rollout/k3"] >= 0 and 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"]
        assert m["interq/weight_min"] <= m["interq/weight_mean"] <= m["interq/weight_max"]
        assert m["interq/rho_p10"] <= m["interq/rho_p50"] <= m["interq/rho_p90"] <= 1


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets(shop, preset):
    r = shop.run(preset=preset, rollout_format="bf16" if preset == "bf16" else "int4")
    check_numbers(r, 3)
    last = r.metrics[-1]
    assert 0 <= last["eval/success"] <= 1 and 0 <= last["interq/aulc"] <= 1 and last["interq/rollback"] >= 0
    saved = json.loads((r.folder / "args.json").read_text())
    assert (saved["qat"], saved["correction"]) == (PRESETS[preset]["qat"], PRESETS[preset]["correction"])
    for m in r.updates:
        if preset == "bf16":
            assert m["rollout/k3"] < 1e-9 and m["rollout/logprob_absdiff_max"] < 1e-4
        else:
            assert m["rollout/logprob_absdiff_max"] > 1e-4
        if preset in ("bf16", "qat"):
            assert m["interq/weight_min"] == m["interq/weight_max"] == 1
        elif preset in ("flash_rl", "qat_tis", "qurl"):
            assert m["interq/weight_max"] <= 2
        assert ("interq/alpha_p50" in m) == (preset == "interq")
    for e in r.episodes:
        delta, total = np.array(e["delta"]), np.array(e["total"])
        assert np.allclose(np.cumsum(delta), total, atol=1e-9)
        assert len(e["weights"]) == len(e["logprobs"]) == sum(e["policy_mask"])


def test_alignment_brings_executor_and_learner_together(shop):
    """The same weights and episodes in the first update: QAT's mismatch is a small part of the unaligned one."""
    aligned, plain = (shop.run(preset=p, rollout_format="int4", executor_output="float32").updates[0] for p in ("qat", "flash_rl"))
    assert aligned["charts/episodic_return"] == plain["charts/episodic_return"]
    assert aligned["rollout/k3"] < 0.01 * plain["rollout/k3"]


def test_corrections_matter_as_far_as_there_is_a_mismatch(shop):
    plain, corrected = (shop.run(preset="bf16", correction=c) for c in ("none", "interq"))
    for r in (plain, corrected):
        r.ok()
    difference = max(float((a - b).abs().max()) for a, b in zip(plain.state["model"].values(), corrected.state["model"].values()))
    assert difference < 1e-4  # executor and learner differ in the last bits of float32
    assert max(abs(corrected.updates[-1][f"interq/weight_{x}"] - 1) for x in ("min", "max")) < 1e-4
    assert not equal(shop.run(preset="qat", rollout_format="int4").state["model"], shop.run(preset="interq", rollout_format="int4").state["model"])


def test_run_folder(shop):
    r = shop.run(preset="interq", rollout_format="int4")
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html", "by_turn.png"):
        assert (r.folder / name).stat().st_size > 0, name
    page = (r.folder / "credit.html").read_text()
    assert "<|end|>" not in page
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [s["name"] for s in shown[0]["strips"]] == ["log q / r", "history", "prefix weight - 1", "weight - 1"]
    assert {"interq/logratio_current/turn_01", "interq/logratio_history/turn_02"} <= r.metrics[-1].keys()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_splits_of_the_work(shop, minibatches):
    """Micro-batches of any size and two processes give the gradient of one; the correction's budget is one for all."""
    one = {"num_updates": 1, "max_grad_norm": 1e9, "eval_every": 1, "save_every": 1, "num_minibatches": minibatches, "rollout_format": "int4"}
    found = {}
    for name, changes in (("one", {}), ("small", {"micro_batch_tokens": 1}), ("padded", {"share_prompts": "off"})):
        hook = functools.partial(script_runner.keep_gradients, f"{shop.folder}/g{minibatches}-{name}")
        shop.run(hook=hook, **one, **changes).ok()
        found[name] = torch.load(f"{shop.folder}/g{minibatches}-{name}.0")
    for r in shop.run_two(hook=functools.partial(script_runner.keep_gradients, f"{shop.folder}/g{minibatches}-two"), **one):
        r.ok()
    found["two"] = torch.load(f"{shop.folder}/g{minibatches}-two.0")
    for name, steps in found.items():
        assert len(steps) == minibatches
        mine, want = [g for step in steps for g in step], [g for step in found["one"] for g in step]
        assert max(float(g.abs().max()) for g in want) > 0
        assert near(want, mine, 0.05 if name != "one" else 1e-9), name  # int4: a last bit can cross a rounding edge


def test_two_and_two_are_four(shop):
    options = {"rollout_format": "int4", "eval_every": 2}
    whole = shop.run(num_updates=4, **options)
    whole.ok()
    first = shop.run(num_updates=2, save_every=2, **options)
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)  # the curve of evaluations too
    assert second.lasting == whole.lasting
    killed = shop.run(hook=functools.partial(script_runner.kill_inside_checkpoint, 3), num_updates=4, save_every=1, **options)
    assert killed.code == 137 and newest_checkpoint(killed.folder)[1]["step"] == 2
    again = shop.resume(killed.folder)
    again.ok()
    assert equal(again.state, whole.state)


def test_bad_values(shop):
    for changes, text in (
        ({"qat": True, "rollout_format": "bf16"}, "there is no rounding to follow"),
        ({"alpha_g": 1.5}, "--alpha-g 1.5: must lie in [0, 1]"),
        ({"tis_cap": 0.5}, "--tis-cap 0.5: must be at least 1"),
        ({"engine": "vllm", "rollout_format": "int4"}, "use --engine torch, which emulates it"),
        ({"engine": "vllm", "rollout_format": "fp8_e4m3"}, "need a GPU"),
    ):
        if changes.get("engine") == "vllm":
            need_module("vllm")
        r = shop.run(**changes)
        assert r.code == 1 and text in r.output, (changes, r.output)


def test_real_command_with_vllm_and_its_8_bit_cache(tmp_path):
    """vLLM on a CPU keeps its cache in FP8, truncated, with a scale of 1. A learner that does the same to keys and values gives its log-probs."""
    need_module("vllm")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # vLLM cannot load where Triton is interpreted
    k3 = {}
    for qat in ("True", "False"):
        out = tmp_path / qat
        command = [sys.executable, "interq_rl.py", "--engine", "vllm", "--rollout-format", "fp8_kv", "--qat", qat, "--num-updates", "2"]
        command += ["--groups-per-update", "4", "--group-size", "4", "--eval-tasks", "4", "--max-turns", "6", "--max-new-tokens", "24"]
        command += ["--learning-rate", "1e-5", "--out", str(out)]
        ended = subprocess.run(command, cwd=script_runner.ROOT, env=environment, capture_output=True, text=True, timeout=1500)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
        lines = read_jsonl(out / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 1, 2]
        k3[qat] = max(line["rollout/k3"] for line in lines[1:])
    assert 0 <= k3["True"] < 1e-5 and 3e-5 < k3["False"] < 0.1, k3
