"""Bridges to other projects' environments, each imported only when asked for.

``skyrl_env`` and ``openenv_environment`` offer a task set of ours as skyrl-gym's ``BaseTextEnv`` and OpenEnv's ``Environment``; ``load`` turns a generator
of reasoning-gym into a task set of ours (``--env reasoning:NAME``). Written against skyrl-gym 0.4.0, openenv 0.10.0 and reasoning-gym 0.1.25.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from common.envs import DataError, Message, TaskSet

ANSWER_FORMAT = "<answer>...</answer>"
TRAIN, EVAL = 1000, 128
MAX_CHARS = 20_000  # a longer response is not scored by the generators' own code, and gets 0


def skyrl_env(tasks: TaskSet) -> type:
    """A ``BaseTextEnv`` subclass for ``skyrl_gym.register(id=..., entry_point=CLASS)``.

    Made with ``extras={"task": one of the task set's dicts}``; ``init`` returns the task's own messages, whatever prompt it is given. ``step``'s metadata are
    our info. A reward of an episode whose verifier failed is the environment's own (see ``metadata["error"]``).
    """
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    class TaskSetEnv(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            super().__init__()
            if not extras or "task" not in extras:
                raise DataError(f"skyrl-gym environment of {tasks.name}: extras['task'] is missing; pass one of the task set's tasks")
            self.task, self.max_turns = extras["task"], tasks.max_turns
            self.env = tasks.make_env()

        def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
            self.turns = 0
            return self.env.reset(self.task), {"id": self.task["id"]}

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            text, reward, terminated, truncated, info = self.env.step(action)
            done = terminated or truncated or self.turns >= self.max_turns
            observations = [] if done else [{"role": "user", "content": text}]
            return {"observations": observations, "reward": reward, "done": done, "metadata": info, "postprocessed_action": None}

        def close(self) -> None:
            self.env.close()

    return TaskSetEnv


def openenv_environment(tasks: TaskSet) -> Any:
    """An OpenEnv ``Environment``: ``reset(split="train" | "eval", index=N)`` (a seeded draw without an index), ``step(action)`` with ``action.text``.

    Observations carry ``messages`` (new chat messages), done, reward, and our info as metadata. The action class is the environment's ``action_type``.
    """
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import Field

    class TextAction(Action):
        text: str

    class ChatObservation(Observation):
        messages: list[dict[str, str]] = Field(default_factory=list)

    splits = {"train": tasks.train, "eval": tasks.eval}

    class TaskSetEnvironment(Environment):
        action_type = TextAction

        def __init__(self) -> None:
            super().__init__()
            self.env, self._state = tasks.make_env(), State()

        def reset(self, seed: int | None = None, episode_id: str | None = None, split: str = "train", index: int | None = None, **kwargs: Any) -> Any:
            if split not in splits:
                raise DataError(f"split {split!r} does not exist; choose one of {', '.join(splits)}")
            task = splits[split][random.Random(seed).randrange(len(splits[split])) if index is None else index]
            self._state = State(episode_id=episode_id, step_count=0, task_id=task["id"])
            return ChatObservation(messages=self.env.reset(task))

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            text, reward, terminated, truncated, info = self.env.step(action.text)
            self._state.step_count += 1
            done = terminated or truncated or self._state.step_count >= tasks.max_turns
            messages = [] if done else [{"role": "user", "content": text}]
            return ChatObservation(messages=messages, done=done, reward=reward, metadata=info)

        @property
        def state(self) -> Any:
            return self._state

        def list_splits(self) -> list[str]:
            return list(splits)

        def num_tasks(self, split: str) -> int:
            return len(splits[split])

        def get_task(self, split: str, index: int) -> dict[str, Any]:
            return {"id": splits[split][index]["id"], "index": index}

        def close(self) -> None:
            self.env.close()

    return TaskSetEnvironment()


class ReasoningEnv:
    """One question of a reasoning-gym generator. Rewards: ``format`` (one answer block at the end) and ``answer`` (the generator's own score in [0, 1])."""

    def __init__(self, datasets: dict[str, Any]) -> None:
        self.datasets = datasets  # split -> dataset
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task = task
        return [dict(message) for message in task["messages"]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one response. A crash of the generator's scoring code on it is reported in ``info["error"]`` with a NaN reward, never as 0."""
        if self.task is None:
            raise RuntimeError("step() before reset(), or after the episode's only step")
        task, self.task = self.task, None
        dataset = self.datasets[task["split"]]
        entry = dataset[task["index"]]
        before, opened, rest = action.rpartition("<answer>")
        answer, closed, after = rest.partition("</answer>")
        readable = bool(opened and closed) and len(action) <= MAX_CHARS
        rewards = {"format": float(readable and "</answer>" not in before and "<answer>" not in before and not after.strip()), "answer": 0.0}
        info: dict[str, Any] = {"rewards": rewards, "verifier_text": {"format": ANSWER_FORMAT, "answer": str(entry["answer"])}}
        if readable:
            try:
                rewards["answer"] = min(max(float(dataset.score_answer(answer.strip(), entry)), 0.0), 1.0)
            except Exception as error:  # 106 generators, each with scoring code of its own
                rewards["answer"] = float("nan")
                info["error"] = f"{type(error).__name__}: {error}"
        info["success"] = rewards["answer"]
        return "", sum(rewards.values()), True, False, info

    def close(self) -> None:
        self.task = None


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """A generator of reasoning-gym by name: 1,000 training and 128 validation questions, no validation question in training.

    Raises DataError without a name, for an unknown one, or when reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"--env reasoning:NAME needs the package reasoning-gym ({error}): pip install reasoning-gym==0.1.25") from error
    names = sorted(name for name in DATASETS if name != "composite")
    if path not in names:
        raise DataError(f"--env reasoning:NAME: {path!r} is not a generator of reasoning-gym; choose one of {', '.join(names)}")
    datasets = {split: reasoning_gym.create_dataset(path, size=size, seed=2 * seed + odd) for split, size, odd in (("train", TRAIN, 0), ("eval", EVAL, 1))}
    system = f"Think, then end with the final answer in the form {ANSWER_FORMAT}."
    found: dict[str, list[dict[str, Any]]] = {"eval": [], "train": []}
    questions: set[str] = set()
    for split, tasks in found.items():  # validation first: a training question that occurs in it is left out
        for index, entry in enumerate(datasets[split]):
            if entry["question"] not in questions:
                messages = [{"role": "system", "content": system}, {"role": "user", "content": entry["question"]}]
                tasks.append({"id": f"{path}-{split}-{seed}-{index}", "messages": messages, "split": split, "index": index})
                questions.add(entry["question"])
    repeated = TRAIN + EVAL - len(questions)
    if not found["train"]:
        raise DataError(f"--env reasoning:{path}: every training question also occurs in validation; this generator has too few questions")
    return TaskSet(f"reasoning:{path}", found["train"], found["eval"], partial(ReasoningEnv, datasets), notes={"questions_repeated": repeated})
