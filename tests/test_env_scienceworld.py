"""ScienceWorld with its real simulator: steps, replayed snapshots, the oracle in the middle of an episode, a process that dies or hangs."""

import random

import pytest
from conftest import need_module, need_program

from common import envs


@pytest.fixture(scope="module")
def tasks():
    need_module("scienceworld")
    need_program("java")
    return envs.load("scienceworld:melt,chemistry-mix")


@pytest.fixture(scope="module")
def env(tasks):
    env = tasks.make_env()
    yield env
    env.close()


def test_tasks(tasks):
    assert {t["family"] for t in [*tasks.train, *tasks.eval]} == {"melt", "chemistry-mix"}
    assert [t["family"] for t in tasks.eval[:4]] == ["melt", "chemistry-mix"] * 2  # in turn
    ids = [t["id"] for t in [*tasks.train, *tasks.eval]]
    assert len(set(ids)) == len(ids) and tasks.workers >= 1
    with pytest.raises(envs.DataError, match="no task 'fly'; choose among"):
        envs.load("scienceworld:melt,fly")


def test_steps_snapshots_and_the_oracle(tasks, env):
    task = next(t for t in tasks.eval if t["family"] == "chemistry-mix")
    messages = env.reset(task)
    assert "Your task is to" in messages[-1]["content"]
    _, reward, terminated, truncated, info = env.step("I think so\nsing a song")
    assert info["invalid"] and reward == 0.0 and not terminated and not truncated
    rng = random.Random(0)
    for _ in range(3):
        env.step(rng.choice([a for a in env.admissible() if not a.startswith("focus")]))
    state, key = env.snapshot(), env.state_key()
    total = env.score / 100
    while True:  # from here to the end
        _, reward, terminated, truncated, info = env.step(env.oracle_action())
        total += reward
        if terminated or truncated:
            break
    assert total == pytest.approx(env.score / 100) and terminated and info["success"] == 1.0 and info["rewards"] == {"score": 1.0}
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("look around")
    env.restore(state)  # another state by now: replayed
    assert env.state_key() == key and env.remaining == env.max_turns - 4
    other = tasks.make_env()
    other.restore(state)
    assert other.state_key() == key and other.admissible() == env.admissible()
    with pytest.raises(envs.EnvironmentFailed, match="led to another state"):
        other.restore(state._replace(commands=state.commands[:-1], observation="something else"))
    other.close()


def test_a_process_that_dies_costs_the_episode_and_no_more(tasks, env):
    env.reset(tasks.eval[0])
    env.simulator.process.kill()
    env.simulator.process.wait()
    with pytest.raises(envs.EnvironmentFailed, match="ended in the middle"):
        env.step("look around")
    env.reset(tasks.eval[0])
    assert " is called the " in env.step("look around")[0]


def test_a_process_that_hangs_is_given_up(tasks, env):
    from common.envs.scienceworld import ScienceWorldEnv

    slow = ScienceWorldEnv(patience=0.0)
    with pytest.raises(envs.EnvironmentFailed, match="Java process failed"):
        slow.reset(tasks.eval[0])
    slow.close()


def test_wrong_focus_ends_the_episode_with_nothing(tasks, env):
    env.reset(tasks.eval[0])
    _, reward, terminated, _, info = env.step("focus on agent")
    assert terminated and reward < 0 and info["rewards"] == {"score": 0.0} and info["success"] == 0.0
