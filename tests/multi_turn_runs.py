"""A small game of several turns with snapshots and an oracle, and a workshop that runs a script on it by its command line."""

import functools
import itertools
import random
import re
import socket

import script_runner
import torch

from common import envs, policies
from common.checkpoints import newest_checkpoint
from common.curves import read_jsonl

COLOURS = ("red", "blue", "green", "gold")


class Doors:
    """Open the named doors in their order, one a turn: `open red`. A wrong door stays shut; anything else is no action. One reward, when all are open."""

    def reset(self, task):
        self.task, self.opened, self.turns = task, 0, 0
        return [{"role": "user", "content": "doors : " + " ".join(task["doors"])}]

    def step(self, action):
        self.turns += 1
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

    def snapshot(self):
        return self.task, self.opened, self.turns

    def restore(self, snapshot):
        self.task, self.opened, self.turns = snapshot

    def oracle_action(self):
        return f"open {self.task['doors'][self.opened]}"

    def state_key(self):
        return f"{self.task['id']} {self.opened}"

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
    rows = [{"id": f"d{i}", "doors": doors, "split": "seen" if i % 4 == 1 else "unseen", "family": f"of {len(doors)}"} for i, doors in enumerate(orders)]
    return envs.TaskSet("doors", rows[::2], rows[1::2], Doors, lambda t, rng: talk(t, rng, 0.0), None, lambda t, rng: talk(t, rng, 0.4), max_turns=6)


def doors():
    """A hook: --env doors in the run's process."""
    envs.FAMILIES["doors"] = "multi_turn_runs"


def both(*hooks):
    for hook in hooks:
        hook()


BASE = {
    "env": "doors", "groups_per_update": 4, "group_size": 4, "max_new_tokens": 6, "num_updates": 3, "eval_every": 3, "eval_tasks": 6, "save_every": 3,
    "learning_rate": 1e-3, "lr_warmup_updates": 1, "update_epochs": 1, "num_minibatches": 1,
}  # fmt: skip
VARYING = re.compile(r"time/.*|charts/SPS|.*_(time_)?share")  # wall-clock time


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
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}", str(value)]
    return words


class Workshop:
    """Where the runs of one test file live. `run` remembers a run by its arguments."""

    def __init__(self, script, folder):
        self.script, self.folder, self.kept, self.count = script, folder, {}, 0
        tasks, rng = load(), random.Random(0)
        config = policies.TinyConfig(
            vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, context=128, steps=150, batch_size=16, learning_rate=1e-2
        )
        lm, tokenizer, _ = policies.train_tiny([tasks.careless(t, rng) for t in tasks.train for _ in range(8)], config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)

    def argv(self, out, **changes):
        return flags(**{"model": self.policy, "out": out} | BASE | changes)

    def path(self):
        self.count += 1
        return self.folder / f"run{self.count}"

    def run(self, hook=None, **changes):
        key = (str(hook), tuple(sorted((k, str(v)) for k, v in changes.items())))
        if hook is not None or key not in self.kept:
            out = self.path()
            hooks = functools.partial(both, doors, *([hook] if hook else []))
            self.kept[key] = Result(script_runner.run(self.script, self.argv(out, **changes), out.with_suffix(".log"), hooks), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run(self.script, flags(resume=folder, **changes), self.path().with_suffix(".log"), doors), folder)

    def run_two(self, hook=None, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = flags(**changes) if "resume" in changes else self.argv(out, **changes)
        hooks = functools.partial(both, doors, *([hook] if hook else []))
        return [Result(e, out) for e in script_runner.run_ranks(self.script, argv, out.with_suffix(".log"), 2, port, hooks)]


def near(a, b, tolerance):
    """Largest difference of two lists of gradients, relative to the largest entry."""
    scale = max(float(x.abs().max()) for x in a)
    return max(float((x - y).abs().max()) for x, y in zip(a, b)) / scale < tolerance
