"""sero.py by its command line on a small game: the base algorithm is untouched by the oracle, variants differ, runs resume, split and fail as they should."""

import functools
import json
import math
import re
import shutil

import pytest
import script_runner
import torch
from multi_turn_runs import Doors, Workshop, equal, near

from common import envs, policies
from common.checkpoints import newest_checkpoint


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop("sero.py", tmp_path_factory.mktemp("runs"))


ORACLES = ["sero", "root_only", "full_flat", "short_bridge", "shuffled", "depth_decay", "none"]


def check_numbers(result, updates):
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is None or math.isfinite(v) for v in m.values()), m
    for m in result.updates:
        assert m["rollout/weight_version"] == m["step"]
        assert 1 <= m["charts/turns"] <= 5
        assert m["charts/episodic_return"] == m["charts/success"]
        assert m["losses/clipfrac"] == m["losses/approx_kl"] == 0  # with one step every ratio is 1
        assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
        assert 0 <= m["eval/success"] <= 1 if "eval/success" in m else True


@pytest.mark.parametrize("oracle", ORACLES)
def test_variants(shop, oracle):
    r = shop.run(oracle=oracle, roots_per_group=3, bridge_length=2)
    check_numbers(r, 3)
    for m in r.updates:
        assert ("losses/oracle_loss" in m) == (oracle != "none")
        if oracle == "none":
            assert m["sero/oracle_steps"] == 0
            continue
        assert m["losses/oracle_loss"] > 0
        assert 0 < m["sero/gate"] <= 1 and 0 < m["sero/used_root_frac"] <= 1 and m["sero/no_way_frac"] == 0
        assert m["sero/w/depth_00"] == 1
        depths = [m[k] for k in sorted(m) if k.startswith("sero/w/depth_")]
        assert 1 <= m["sero/effective_depth"] <= m["sero/depth"] <= 3 and all(0 <= w <= 1 for w in depths)
    assert r.updates[-1]["sero/policy_steps"] > r.updates[0]["sero/policy_steps"] > 0
    branches = [e for e in r.episodes if e["kind"] == "branch"]
    assert bool(branches) == (oracle != "none")
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    for b in branches:
        commands = [tokenizer.decode(b["token_ids"][a:e]) for a, e in b["spans"]]
        assert all(re.fullmatch(r"open \w+<\|end\|>", c) for c in commands)
        assert b["gate"] == pytest.approx(min(1.0, (b["oracle_return"] - b["policy_return"]) / 10)) and b["gate"] > 0
        assert b["w"] == pytest.approx([math.prod(b["z"][:k]) for k in range(len(b["z"]))])


def test_variants_train_different_weights_from_the_same_episodes(shop):
    runs = {o: shop.run(oracle=o, roots_per_group=3, bridge_length=2) for o in ORACLES}
    for name in ("charts/episodic_return", "charts/turns", "losses/policy_loss", "rollout/zero_std_group_frac"):  # the first update is before any difference
        assert len({r.updates[0][name] for r in runs.values()}) == 1, name
    finals = [r.state["model"] for r in runs.values()]
    assert all(not equal(a, b) for i, a in enumerate(finals) for b in finals[:i])


def test_with_lambda_zero_the_update_is_that_of_the_base_bit_for_bit(shop):
    a, b = shop.run(oracle="none"), shop.run(oracle="sero", lambda_o=0.0)
    a.ok()
    b.ok()
    assert b.updates[-1]["sero/oracle_steps"] > 0
    assert equal({k: v for k, v in a.state.items() if k != "steps_taken"}, {k: v for k, v in b.state.items() if k != "steps_taken"})


@pytest.mark.parametrize("base", ["grpo", "gigpo", "hgpo", "graphgpo"])
def test_bases(shop, base):
    r = shop.run(base=base, oracle="none")
    check_numbers(r, 3)
    for e in r.episodes:
        assert e["kind"] == "episode" and len({t["advantage"] for t in e["turns"]}) >= 1
        if base == "grpo":
            assert len({t["advantage"] for t in e["turns"]}) == 1


def test_the_oracle_helps_where_the_policy_fails(shop):
    """With the policy's own reward out of reach, only the oracle's continuations can teach."""
    plain, helped = (shop.run(hook=out_of_reach, oracle=o, num_updates=12, learning_rate=3e-3, lambda_o=1.0, eval_every=12) for o in ("none", "sero"))
    assert plain.metrics[-1]["charts/success"] == 0
    assert plain.updates[-1]["rollout/zero_std_group_frac"] > 0.9
    assert helped.metrics[-1]["sero/z"] > helped.updates[0]["sero/z"] + 0.2  # the commands have become likely
    assert helped.metrics[-1]["sero/effective_depth"] > helped.updates[0]["sero/effective_depth"]


def out_of_reach():
    """The policy's answers are garbled on their way to the game; the oracle's, which come after a restore, are not."""
    from multi_turn_runs import Doors

    step = Doors.step
    Doors.step = lambda self, action: step(self, "mumble")
    Doors.restore_plain = Doors.restore

    def restore(self, snapshot):
        self.restore_plain(snapshot)
        self.step = lambda action: step(self, action)

    def reset(self, task, plain=Doors.reset):
        vars(self).pop("step", None)
        return plain(self, task)

    Doors.restore, Doors.reset = restore, reset


def test_frozen_bank(shop):
    bank = shop.folder / "bank.jsonl"
    first = shop.run(save_bank=str(bank), roots_per_group=3)
    first.ok()
    lines = bank.read_text().splitlines()
    assert len(lines) == sum(round(m["sero/used_root_frac"] * 12) for m in first.updates)
    r = shop.run(frozen_bank=str(bank), oracle="shuffled")
    check_numbers(r, 3)
    assert r.updates[-1]["sero/oracle_steps"] == 0 and r.updates[0]["losses/oracle_loss"] > 0
    bank.write_text(lines[0] + "\n" + lines[0][:40] + "\n")
    r = shop.run(frozen_bank=str(bank), oracle="sero", seed=3)
    assert r.code == 1 and "bank.jsonl, line 2: not a branch" in r.output


def test_a_resumed_run_writes_each_branch_once(shop):
    bank = shop.folder / "resumed.jsonl"
    run = shop.run(save_bank=str(bank), num_updates=4, save_every=2, eval_every=2)
    run.ok()
    whole = bank.read_bytes()
    assert {json.loads(line)["update"] for line in whole.splitlines()} == {0, 1, 2, 3}
    shutil.rmtree(newest_checkpoint(run.folder)[0])  # as if it had been stopped in its third update, while it wrote a branch
    bank.write_bytes(whole + whole[:50])
    again = shop.resume(run.folder)
    again.ok()
    assert bank.read_bytes() == whole
    shutil.rmtree(newest_checkpoint(run.folder)[0])
    bank.write_text("something else\n")
    again = shop.resume(run.folder)
    assert again.code == 1 and "resumed.jsonl, line 1: not a branch" in again.output


def test_study(shop):
    r = shop.run(study="reachability", roots_per_group=3)
    r.ok()
    last = r.metrics[-1]
    pairs = [last[f"sero/reproduced/pairs_{a}_{b}"] for a, b in (("0.00", "0.05"), ("0.05", "0.25"), ("0.25", "0.50"), ("0.50", "1.00"))]
    assert sum(pairs) > 0
    assert -1 <= last["sero/spearman_z"] <= 1


def test_extra_steps_go_on(shop):
    r = shop.run(num_updates=2, extra_steps=1, oracle="none")
    check_numbers(r, 3)
    assert equal(r.state["model"], shop.run(oracle="none").state["model"])


def test_run_folder(shop):
    r = shop.run(oracle="sero", roots_per_group=3, bridge_length=2)
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html"):
        assert (r.folder / name).stat().st_size > 0, name
    page = (r.folder / "credit.html").read_text()
    assert "<|end|>" not in page
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert len(shown) == len(r.episodes)
    last = r.metrics[-1]
    assert {"eval/success/seen", "eval/success/unseen", "eval/success_by_family/of 2", "eval/success_unseen/of 2"} <= last.keys()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_splits_of_the_work(shop, minibatches):
    """Micro-batches of any size and two processes give the gradient of one."""
    one = {"num_updates": 1, "max_grad_norm": 1e9, "eval_every": 1, "save_every": 1, "num_minibatches": minibatches, "lambda_o": 1.0}
    found = {}
    for name, changes in (("one", {}), ("small", {"micro_batch_tokens": 1}), ("padded", {"share_prompts": "off"})):
        hook = functools.partial(script_runner.keep_gradients, f"{shop.folder}/g{minibatches}-{name}")
        shop.run(hook=hook, **one, **changes).ok()
        found[name] = torch.load(f"{shop.folder}/g{minibatches}-{name}.0")
    two = shop.run_two(hook=functools.partial(script_runner.keep_gradients, f"{shop.folder}/g{minibatches}-two"), **one)
    for r in two:
        r.ok()
    found["two"], found["two.1"] = (torch.load(f"{shop.folder}/g{minibatches}-two.{rank}") for rank in (0, 1))
    for name, steps in found.items():
        assert len(steps) == minibatches
        mine, want = [g for step in steps for g in step], [g for step in found["one"] for g in step]
        assert max(float(g.abs().max()) for g in want) > 0
        assert near(want, mine, 5e-5), name


def test_two_and_two_are_four(shop):
    whole = shop.run(num_updates=4, eval_every=2)
    whole.ok()
    first = shop.run(num_updates=2, eval_every=2, save_every=2)
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting
    killed = shop.run(hook=functools.partial(script_runner.kill_inside_checkpoint, 3), num_updates=4, eval_every=2, save_every=1)
    assert killed.code == 137 and newest_checkpoint(killed.folder)[1]["step"] == 2
    again = shop.resume(killed.folder)
    again.ok()
    assert equal(again.state, whole.state)


def dying():
    """The simulator dies in some episodes, and under the oracle in some branches."""
    from multi_turn_runs import Doors

    step = Doors.step

    def fail(self, action):
        if self.task["doors"][0] == "red" and self.turns == 1:
            raise envs.EnvironmentFailed("gone")
        return step(self, action)

    Doors.step = fail


def test_a_simulator_that_dies_costs_its_episode(shop):
    r = shop.run(hook=dying, num_updates=2)
    r.ok()
    assert any(0 < m["rollout/error_frac"] < 1 for m in r.updates)
    assert all(e["prompt"].find("doors : red") < 0 for e in r.episodes)


def test_bad_values(shop):
    for changes, text in (
        ({"oracle": "none", "study": "reachability"}, "--oracle none makes no branches"),
        ({"frozen_bank": "a", "save_bank": "b"}, "come from a file, or go into one"),
        ({"lambda_o": -1}, "--lambda-o -1.0: must be at least 0"),
        ({"roots_per_group": 0}, "--roots-per-group 0"),
        ({"frozen_bank": "/no/such"}, "write one with --save-bank"),
        ({"env": "sql"}, "no snapshot, restore; the oracle needs them"),
    ):
        r = shop.run(**changes)
        assert r.code == 1 and text in r.output, (changes, r.output)


def test_the_game_has_what_the_oracle_needs():
    env = Doors()
    env.reset({"id": "x", "doors": ["red", "blue"]})
    env.step("open red")
    state = env.snapshot()
    env.step("open blue")
    other = Doors()
    other.restore(state)
    assert other.state_key() == "x 1" and other.oracle_action() == "open blue"
