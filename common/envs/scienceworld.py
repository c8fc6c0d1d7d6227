"""ScienceWorld: elementary-science tasks in a simulated house, by the package `scienceworld` (needs a Java runtime).

A response is one command on its last line, such as ``pour cup into pot``. The reward of a step is the change of the simulator's score over 100; ``success``
is a score of 100. Focusing on a wrong object ends the episode with a score of -100; the reward "score" counts it as 0.

    scienceworld                    all 30 tasks, the official training and development variations, every simplification that fits ("easy")
    scienceworld:melt,find-plant    these tasks

One environment is one Java process, started at the first reset, with a capped heap. A process that dies, or that does not answer in time, costs its episode
(`EnvironmentFailed`); the next reset starts another. Steps ask for nothing but the text and the score: the list of valid commands, which takes most of the
package's own step, is computed by ``admissible`` alone. The simulator has no save and load: ``restore`` replays the commands and compares what it then sees.
``oracle_action`` follows the gold path of the start, as far as its commands still do something in the present state.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from common.envs import DataError, EnvironmentFailed, Message, TaskSet

HORIZON = 50
SIMPLIFICATIONS = "easy"
JAVA_OPTIONS = "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
PATIENCE = 120.0  # seconds for one answer of the simulator; a gold path of a long task takes about 6
UNKNOWN = "No known action matches that input."
MAX_CHARS = 20_000  # a longer response is not read
PER_TASK = 40  # most variations of a task in each split
_starting = threading.Lock()  # the Java options pass through the environment of this process


def _not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


class Simulator:
    """One Java process. Every call raises EnvironmentFailed once it has died or hung."""

    def __init__(self, patience: float = PATIENCE) -> None:
        from scienceworld import ScienceWorldEnv as Package

        # py4j reports a dead process with a traceback per object that is collected afterwards; that it died is an EnvironmentFailed here
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        if not any(f is _not_py4j for f in logging.getLogger().filters):
            logging.getLogger().addFilter(_not_py4j)
        self.patience = patience
        with _starting:
            before = os.environ.get("JAVA_TOOL_OPTIONS")
            os.environ["JAVA_TOOL_OPTIONS"] = JAVA_OPTIONS
            try:
                self.package = Package("", envStepLimit=10**6)
            except Exception as error:  # py4j raises many kinds
                raise EnvironmentFailed(f"ScienceWorld's Java process did not start: {error}") from error
            finally:
                os.environ.pop("JAVA_TOOL_OPTIONS")
                if before is not None:
                    os.environ["JAVA_TOOL_OPTIONS"] = before
        self.process = self.package._gateway.java_process

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the simulator's Java interface."""
        watchdog = threading.Timer(self.patience, self.process.kill)
        watchdog.start()
        try:
            return getattr(self.package.server, name)(*arguments)
        except Exception as error:
            self.process.kill()
            raise EnvironmentFailed(f"ScienceWorld's Java process failed in {name}: {type(error).__name__}") from error
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """Kills the process. The package's own close would talk to it once more, also when the object is collected."""
        self.package.close = lambda: None
        self.process.kill()
        self.process.wait()
        self.package._gateway.close(keep_callback_server=False, close_callback_server_connections=True)


class Snapshot(NamedTuple):
    task: dict[str, Any]
    commands: tuple[str, ...]
    observation: str
    score: int
    over: bool


class ScienceWorldEnv:
    """One episode; see the module's text."""

    def __init__(self, max_turns: int = HORIZON, patience: float = PATIENCE) -> None:
        self.max_turns, self.patience = max_turns, patience
        self.simulator: Simulator | None = None
        self.task: dict[str, Any] | None = None
        self.loaded: tuple[str, int] | None = None  # task and variation that the simulator holds
        self.over = True

    # -- the simulator

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.simulator is None:
            self.simulator, self.loaded = Simulator(self.patience), None
        try:
            return self.simulator.call(name, *arguments)
        except EnvironmentFailed:
            self._drop()
            raise

    def _drop(self) -> None:
        if self.simulator is not None:
            self.simulator.close()
        self.simulator, self.loaded, self.over = None, None, True

    def _open(self, task: dict[str, Any]) -> None:
        """The simulator at the start of the task, after the first look around, as the package's own reset does it."""
        key = (task["task"], task["variation"])
        if self.loaded != key:
            self._call("load", *key, task["simplifications"], False)
            self.loaded = key
        self._call("reset")
        self.commands: list[str] = []
        self.observation = self._call("step", "look around")
        self.score = 0

    def _do(self, command: str) -> None:
        self.observation = self._call("step", command)
        self.score = round(100 * float(self._call("getScore")))
        self.commands.append(command)

    # -- the environment

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task, self.plan = task, None
        self._open(task)
        self.over = False
        text = f"{self._call('getTaskDescription')}\n\n{self.observation}"
        return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info. Raises RuntimeError outside an episode, EnvironmentFailed when the simulator does not answer."""
        if self.task is None or self.over:
            raise RuntimeError("no episode is running; call reset first")
        if self.simulator is None or self.simulator.process.poll() is not None:
            self._drop()
            raise EnvironmentFailed("ScienceWorld's Java process ended in the middle of the episode")
        before, command = self.score, command_in(action)
        self._do(command)
        terminated = bool(self._call("getCompleted")) or self.score < 0 or self.score >= 100
        truncated = not terminated and len(self.commands) >= self.max_turns
        self.over = terminated or truncated
        info: dict[str, Any] = {"invalid": self.observation.startswith(UNKNOWN)}
        if self.over:
            info |= {"success": float(self.score >= 100), "rewards": {"score": max(self.score, 0) / 100}}
        if self.plan and self.plan[0] == command:
            self.plan.pop(0)
        else:
            self.plan = None  # made for another state
        return self.observation, (self.score - before) / 100, terminated, truncated, info

    def admissible(self) -> list[str]:
        return sorted(set(self._call("getValidActionObjectCombinations")))

    def state_key(self) -> str:
        """Of what can be seen without acting: the room, the inventory, the score."""
        seen = (self.task["task"], self.task["variation"], self._call("freeActionLook"), self._call("freeActionInventory"), self.score)
        return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest()

    @property
    def remaining(self) -> int:
        return self.max_turns - len(self.commands)

    def snapshot(self) -> Snapshot:
        """Costs nothing: the commands so far, and what they led to."""
        return Snapshot(self.task, tuple(self.commands), self.observation, self.score, self.over)

    def restore(self, snapshot: Snapshot) -> None:
        """Replays the commands, about 20 ms each. Raises EnvironmentFailed where that does not lead to what the snapshot saw."""
        key = (snapshot.task["task"], snapshot.task["variation"])
        here = self.simulator is not None and self.task is snapshot.task and tuple(self.commands) == snapshot.commands and self.loaded == key
        self.task, self.plan = snapshot.task, None
        if not here:
            self._replay(snapshot.task, snapshot.commands)
        self.over = snapshot.over
        if (self.observation, self.score) != (snapshot.observation, snapshot.score):
            raise EnvironmentFailed(f"{snapshot.task['id']}: a replay of {len(snapshot.commands)} commands led to another state")

    def _replay(self, task: dict[str, Any], commands: Sequence[str]) -> None:
        self._open(task)
        for command in commands:
            self._do(command)

    # -- the oracle

    def gold_path(self) -> list[str]:
        """The simulator's own solution from the start of this task."""
        key = (self.task["task"], self.task["variation"])
        if self.loaded != (*key, "gold"):
            self._call("load", *key, self.task["simplifications"], True)
            self.loaded = (*key, "gold")
        return list(self._call("getGoldActionSequence"))

    def oracle_plan(self) -> list[str]:
        """Commands that raise the score most from here, found by trying: the gold path as it is, and after a teleport to the room of the start.

        Commands that the simulator does not know in that state are left out, as is everything after the last gain. Tried in this simulator, which is then
        restored. Raises RuntimeError where no command of the gold path raises the score.
        """
        state = self.snapshot()
        gold = self.gold_path()
        self.loaded = None  # the load for the gold path has reset the simulator
        self._open(state.task)
        start = self.observation.partition(" is called the ")[2].partition(".")[0]  # "This room", "This outside location"
        best: tuple[int, list[str]] = (state.score, [])
        for first in ([], [f"teleport to {start}"] if start else []):
            self._replay(state.task, state.commands)
            plan, gained = [], 0
            for command in [*first, *gold]:
                score = self.score
                self._do(command)
                if self.observation.startswith(UNKNOWN):
                    continue
                plan.append(command)
                if self.score > score:
                    gained = len(plan)
                if self.score >= 100 or self.score < 0 or len(plan) >= self.max_turns - len(state.commands):
                    break
            if gained and self.score > best[0]:  # once more without what was left out: a refused command may still have taken time
                self._replay(state.task, [*state.commands, *plan[:gained]])
                if self.score > best[0]:
                    best = (self.score, plan[:gained])
            if best[0] >= 100:
                break
        self._replay(state.task, state.commands)
        self.over = state.over
        if (self.observation, self.score) != (state.observation, state.score):
            raise EnvironmentFailed(f"{state.task['id']}: a replay of {len(state.commands)} commands led to another state")
        if not best[1]:
            raise RuntimeError(f"{state.task['id']}: the gold path gains nothing from this state")
        return best[1]

    def oracle_action(self) -> str:
        """The next command of `oracle_plan`, which is made once and followed while its commands are the ones that are taken."""
        if not self.plan:
            self.plan = self.oracle_plan()
        return self.plan[0]

    def close(self) -> None:
        self._drop()


INSTRUCTIONS = (
    "You act in a small house to solve a task in elementary science. Write one command on the last line of your answer. Commands: look around, look at THING, "
    "look in THING, inventory, go to PLACE, teleport to PLACE, open THING, close THING, pick up THING, put down THING, move THING to THING, pour THING into "
    "THING, dunk THING into THING, mix THING, use THING on THING, activate THING, deactivate THING, connect THING to THING, disconnect THING, read THING, eat "
    "THING, flush THING, focus on THING (tells which object the task is about; a wrong one ends the episode), wait, wait1, task."
)


def command_in(text: str) -> str:
    """The command of a response: its last line that is not blank, without an <action> tag."""
    lines = text[-MAX_CHARS:].rpartition("</think>")[2].strip().splitlines()
    return lines[-1].replace("<action>", "").replace("</action>", "").strip() if lines else ""


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """Raises DataError without Java or the package, and for a task that does not exist."""
    try:
        import scienceworld  # noqa: F401
    except ImportError as error:
        raise DataError(f"--env scienceworld needs a package: pip install scienceworld==1.2.3 ({error})") from error
    if shutil.which("java") is None:
        raise DataError("--env scienceworld needs a Java runtime on PATH (Debian: apt-get install default-jre-headless)")
    simulator = Simulator()
    try:
        known = list(simulator.call("getTaskNames"))
        wanted = [name.strip() for name in path.split(",")] if path else known
        if missing := [name for name in wanted if name not in known]:
            raise DataError(f"--env scienceworld:{path}: no task {missing[0]!r}; choose among {', '.join(known)}")
        splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
        for name in wanted:
            simulator.call("load", name, 0, SIMPLIFICATIONS, False)
            for split, method in (("train", "getVariationsTrain"), ("eval", "getVariationsDev")):
                for variation in list(simulator.call(method))[:PER_TASK]:
                    task = {"task": name, "variation": int(variation), "simplifications": SIMPLIFICATIONS, "family": name, "split": "unseen"}
                    splits[split].append({"id": f"scienceworld-{name}-{variation}", **task})
    finally:
        simulator.close()
    # tasks in turn, so that a short evaluation meets all of them
    order = {}
    for split, rows in splits.items():
        by_task = [[t for t in rows if t["task"] == name] for name in wanted]
        order[split] = [t for turn in itertools.zip_longest(*by_task) for t in turn if t is not None]
    workers = max(1, min(8, os.cpu_count() or 1))
    return TaskSet("scienceworld", order["train"], order["eval"], partial(ScienceWorldEnv, HORIZON), max_turns=HORIZON, workers=workers)
