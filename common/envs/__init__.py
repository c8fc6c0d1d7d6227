"""Environments: one file per family, one protocol, one string to pick one.

The protocol uses Gymnasium's words with text actions:

    messages = env.reset(task)                                    # list of chat messages, ends with the user's turn
    observation, reward, terminated, truncated, info = env.step(action_text)

A single-turn task is an episode of one step. Optional capabilities, offered where they make sense:
``snapshot() -> object``, ``restore(object)``, ``oracle_action() -> str``, ``state_key() -> str``, ``admissible() -> list[str]``.

Keys of ``info`` on the step that ends an episode:

``success``        float in [0, 1], the headline figure of the task;
``rewards``        dict, reward name -> float; a reward that could not be measured is NaN, never 0;
``verifier_text``  dict, reward name -> the text the verifier used for this response ("" where there is none);
``error``          str, present only when the verifier itself failed (the episode is then marked, not scored).
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": str}


class DataError(ValueError):
    """Bad input data. The text names the file, the line or record, the field, and what to do about it."""


class EnvironmentFailed(RuntimeError):
    """The simulator behind an environment died or hangs: this episode cannot be scored. The environment works again after its next reset."""


class Env(Protocol):
    """One episode at a time. Not shared between threads."""

    def reset(self, task: dict[str, Any]) -> list[Message]: ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TaskSet:
    """A family's tasks, split without overlap, and the way to play them.

    ``train`` and ``eval`` hold plain dicts (JSON-serialisable) with a unique ``id``; their order is deterministic.
    ``demonstrate(task, rng)`` returns a whole conversation that solves the task (None for data without a scripted expert).
    ``careless(task, rng)`` is the same by an expert with habits to unlearn: each of its slips is about as likely as the right choice, so that a policy
    trained on it fails most tasks and still reaches every right answer when it samples. For warm starts.
    ``regions(text)`` names character spans of a response for localisation reports: ``[(name, start, end), ...]``.
    """

    name: str
    train: Sequence[dict[str, Any]]
    eval: Sequence[dict[str, Any]]
    make_env: Callable[[], Env]
    demonstrate: Callable[[dict[str, Any], random.Random], list[Message]] | None = None
    regions: Callable[[str], list[tuple[str, int, int]]] | None = None
    careless: Callable[[dict[str, Any], random.Random], list[Message]] | None = None
    max_turns: int = 1
    notes: dict[str, Any] = field(default_factory=dict)  # counts worth logging at start (rows read, rows unusable and why)
    workers: int = 0  # episodes side by side, each stepped by a thread of its own (simulators in other processes); 0: all of them, in one thread


# name -> module with `load(path: str | None, seed: int) -> TaskSet`; imported only when asked for
FAMILIES = {
    "sql": "common.envs.sql",
    "instructions": "common.envs.instructions",
    "tools": "common.envs.tools",
    "reasoning": "common.envs.adapters",
    "search": "common.envs.search",
    "automation": "common.envs.automation",
    "household": "common.envs.household",
    "alfworld": "common.envs.household",
    "webshop": "common.envs.webshop",
    "scienceworld": "common.envs.scienceworld",
    "rubric": "common.envs.rubric",
    "maths": "common.envs.maths",
    "repo": "common.envs.repo",
    "editing": "common.envs.editing",
}


def load(spec: str, seed: int = 0) -> TaskSet:
    """``"sql"`` is the embedded task set of a family, ``"sql:PATH"`` the same family on real data at PATH.

    Raises DataError for an unknown family or unusable data.
    """
    family, _, path = spec.partition(":")
    if family not in FAMILIES:
        raise DataError(f"--env {spec!r}: unknown family {family!r}; choose one of {', '.join(sorted(FAMILIES))}, or FAMILY:PATH for real data")
    if ":" in spec and not path:
        raise DataError(f"--env {spec!r}: nothing after the colon; give a path, or drop the colon for the embedded task set")
    tasks = importlib.import_module(FAMILIES[family]).load(path or None, seed)
    for split, rows in (("training", tasks.train), ("evaluation", tasks.eval)):
        if not rows:
            raise DataError(
                f"--env {spec}: no {split} tasks ({len(tasks.train)} training, {len(tasks.eval)} evaluation); bring more rows or a split of your own"
            )
    return tasks
