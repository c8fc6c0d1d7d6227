"""Bridges, against the real packages: `pip install skyrl-gym==0.4.0 reasoning-gym==0.1.25` and `pip install --no-deps openenv==0.10.0`."""

import importlib.util
import json
import math
import random
import sys
import types
from pathlib import Path

import pytest
from conftest import need_module

from common.envs import DataError, TaskSet, adapters, load


class Countdown:
    """Two turns at most: the answer "go" ends the episode."""

    def reset(self, task):
        return [{"role": "user", "content": task["question"]}]

    def step(self, action):
        return "again", float(action == "go"), action == "go", False, {"success": float(action == "go")}

    def close(self):
        self.closed = True


TWO_TURNS = TaskSet("countdown", [{"id": "t0", "question": "a"}, {"id": "t1", "question": "b"}], [{"id": "e0", "question": "c"}], Countdown, max_turns=2)


def test_skyrl_gym_plays_our_tasks():
    need_module("skyrl_gym")
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    tasks = load("tools")
    skyrl_gym.register(id="tools-adapter-test", entry_point=adapters.skyrl_env(tasks))
    env = skyrl_gym.make("tools-adapter-test", env_config={}, extras={"task": tasks.eval[0]})
    assert isinstance(env, BaseTextEnv)
    messages, info = env.init([])
    assert messages == tasks.eval[0]["messages"] and info == {"id": tasks.eval[0]["id"]}
    result = env.step(tasks.demonstrate(tasks.eval[0], random.Random(0))[-1]["content"])
    assert (result["reward"], result["done"], result["observations"]) == (2.0, True, [])
    assert result["metadata"]["success"] == 1.0
    with pytest.raises(DataError, match="extras"):
        adapters.skyrl_env(tasks)()


def test_skyrl_gym_turns():
    need_module("skyrl_gym")
    env = adapters.skyrl_env(TWO_TURNS)(extras={"task": TWO_TURNS.eval[0]})
    env.init([])
    first = env.step("no")
    assert (first["done"], first["observations"]) == (False, [{"role": "user", "content": "again"}])
    assert env.step("no")["done"]  # the turn limit
    env.init([])
    assert env.step("go")["done"]
    env.close()
    assert env.env.closed


def openenv_packages(monkeypatch):
    """OpenEnv's interface modules without its package roots, which import the whole server."""
    need_module("openenv")
    root = Path(importlib.util.find_spec("openenv").origin).parent
    for name in ("openenv", "openenv.core", "openenv.core.env_server"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)


def test_openenv_plays_our_tasks(monkeypatch):
    openenv_packages(monkeypatch)
    env = adapters.openenv_environment(TWO_TURNS)
    assert [env.list_splits(), env.num_tasks("train"), env.get_task("eval", 0)] == [["train", "eval"], 2, {"id": "e0", "index": 0}]
    observation = env.reset(episode_id="x", split="eval", index=0)
    assert (observation.messages, observation.done, observation.reward) == ([{"role": "user", "content": "c"}], False, None)
    assert (env.state.episode_id, env.state.step_count, env.state.task_id) == ("x", 0, "e0")
    middle = env.step(env.action_type(text="no"))
    assert (middle.messages, middle.done, middle.reward) == ([{"role": "user", "content": "again"}], False, 0.0)
    last = env.step(env.action_type(text="go"))
    assert (last.messages, last.done, last.reward, last.metadata) == ([], True, 1.0, {"success": 1.0})
    assert env.state.step_count == 2
    env.reset(index=1)
    env.step(env.action_type(text="no"))
    assert env.step(env.action_type(text="no")).done  # the turn limit
    assert len({env.reset(seed=seed).messages[0]["content"] for seed in range(20)}) == 2
    assert env.reset(seed=3).messages == env.reset(seed=3).messages
    with pytest.raises(DataError, match="split 'test'"):
        env.reset(split="test")
    env.close()
    assert env.env.closed


def test_reasoning_gym_as_a_task_set():
    need_module("reasoning_gym")
    tasks = load("reasoning:chain_sum")
    assert len(tasks.eval) == 128 and len(tasks.train) + len(tasks.eval) + tasks.notes["questions_repeated"] == 1128
    questions = [task["messages"][-1]["content"] for task in [*tasks.train, *tasks.eval]]
    assert len(set(questions)) == len(questions)
    assert load("reasoning:chain_sum").train == tasks.train != load("reasoning:chain_sum", 1).train
    assert json.loads(json.dumps(tasks.eval)) == tasks.eval
    env = tasks.make_env()
    for task in [*tasks.eval[:20], *tasks.train[:20]]:
        question = task["messages"][-1]["content"].rpartition(": ")[2].rstrip("= ")
        truth = str(sum(int(term) for term in question.replace("- ", "-").replace("+ ", "+").split()))
        for text, format_reward, score in (
            (f"so <answer>{truth}</answer>", 1.0, 1.0),
            (f"<answer>{truth}</answer> ok", 0.0, 1.0),
            (f"<answer>1</answer><answer> {truth} </answer>", 0.0, 1.0),
            (truth, 0.0, 0.0),
            (f"<answer>{truth}", 0.0, 0.0),
            (f"<answer>{truth}</answer>" + " " * adapters.MAX_CHARS, 0.0, 0.0),
        ):
            assert env.reset(task)[0]["role"] == "system"
            _, reward, terminated, truncated, info = env.step(text)
            assert info["rewards"] == {"format": format_reward, "answer": score} and reward == format_reward + score
            assert (terminated, truncated, info["success"]) == (True, False, score)
            assert info["verifier_text"] == {"format": "<answer>...</answer>", "answer": truth}
        env.reset(task)
        assert env.step("<answer>0.123</answer>")[-1]["success"] < 1.0
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")


def test_a_crash_of_the_scoring_code_is_not_a_zero():
    class Broken:
        def __getitem__(self, index):
            return {"answer": "1"}

        def score_answer(self, answer, entry):
            raise KeyError("boom")

    env = adapters.ReasoningEnv({"train": Broken()})
    env.reset({"id": "x", "messages": [], "split": "train", "index": 0})
    info = env.step("<answer>1</answer>")[-1]
    assert math.isnan(info["rewards"]["answer"]) and math.isnan(info["success"]) and info["error"] == "KeyError: 'boom'"
    assert info["rewards"]["format"] == 1.0


def test_reasoning_gym_errors(monkeypatch):
    need_module("reasoning_gym")
    for spec in ("reasoning", "reasoning:nope", "reasoning:composite"):
        with pytest.raises(DataError, match=r"choose one of ab, acre, "):
            load(spec)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install reasoning-gym==0\.1\.25"):
        load("reasoning:chain_sum")
