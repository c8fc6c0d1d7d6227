"""Automation: goals, order, what can be taken back and what not, the embedded tasks, the expert from any state, snapshots, bad calls."""

import json
import random
import re
from collections import Counter

import pytest

from common.envs import DataError, automation, load
from common.envs.automation import CALLS, KINDS, NAMES, AutomationEnv, world

TASKS = load("automation")


def ids(task, kind, name):
    """(live id, id of the outdated twin or None)"""
    rows = {record.live: key for key, record in world(task["world"]).items() if (record.kind, record.name) == (kind, name)}
    return rows[True], rows.get(False)


def field(task, kind, name, what):
    return world(task["world"])[ids(task, kind, name)[0]].fields[what]


def small_task(*goals, turns=60):
    """A task in a world where anna's bill and ben's order have outdated twins."""
    seed = next(s for s in map(str, range(10_000)) if all(ids({"world": s}, *pair)[1] for pair in (("bill", "anna"), ("order", "ben"))))
    return {"id": "t", "world": seed, "goals": [list(goal) for goal in goals], "turns": turns, "difficulty": 1}


def run(task, *actions):
    """The last step's result; none but the last may end the episode."""
    env = AutomationEnv()
    env.reset(task)
    for number, action in enumerate(actions, 1):
        result = env.step(action)
        assert (result[2] or result[3]) == (number == len(actions)), (action, result)
        assert result[1] in (0.0, 1.0) and (result[1] == 0.0 or result[2])
    return result


PAY, SET, TELL = ("pay", "bill", "anna"), ("set", "order", "ben", "city", "atlantis"), ("tell", "order", "ben", "count", "carl")
COPY, CLOSE = ("copy", "order", "ben", "city", "client", "dora"), ("close", "case", "emma")
TASK = small_task(PAY, SET, TELL, COPY, CLOSE)
BILL, OLD_BILL = ids(TASK, "bill", "anna")
ORDER, OLD_ORDER = ids(TASK, "order", "ben")
CLIENT, CASE = ids(TASK, "client", "dora")[0], ids(TASK, "case", "emma")[0]
DUE, TOTAL, COUNT = field(TASK, *PAY[1:], "due"), field(TASK, *PAY[1:], "total"), field(TASK, "order", "ben", "count")
PAYING = ["find bill anna", f"open {BILL}", f"pay {DUE}"]
SETTING = ["find order ben", f"open {ORDER}", "set city atlantis"]
TELLING = ["find order ben", f"open {ORDER}", f"send carl {COUNT}"]
COPYING = ["find order ben", f"open {ORDER}", "find client dora", f"open {CLIENT}", "set city atlantis"]
CLOSING = ["find case emma", f"close {CASE}"]
ALL = [*PAYING, *SETTING, *TELLING, *COPYING, *CLOSING, "done"]


def changed(at, *replacement, length=1):
    return [*ALL[:at], *replacement, *ALL[at + length :]]


def test_prompt_and_observations():
    env = AutomationEnv()
    (message,) = env.reset(TASK)
    assert message == {"role": "user", "content": automation.INSTRUCTION}
    assert [env.step("next")[0] for _ in range(7)] == [
        "bill anna : pay due",
        "order ben : set city atlantis",
        "order ben : send count to carl",
        "order ben : copy city to client dora",
        "case emma : close",
        "nothing left",
        "nothing left",
    ]
    said = [env.step(action)[0] for action in ALL[:-1]]
    assert said[0] in (f"bill anna : live {BILL} , old {OLD_BILL}", f"bill anna : old {OLD_BILL} , live {BILL}")
    assert said[1] in (f"{BILL} bill anna : due {DUE} , total {TOTAL}", f"{BILL} bill anna : total {TOTAL} , due {DUE}")
    assert said[2] == f"paid {DUE}" and said[5] == "city is atlantis now" and said[8] == f"sent {COUNT} to carl" and said[-1] == f"closed {CASE}"
    assert "city atlantis" in said[7] and "city atlantis" in said[10]
    observation, reward, terminated, truncated, info = env.step("that was all\ndone")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info == {
        "invalid": False, "success": 1.0, "rewards": {"goals": 1.0}, "goals_reached": 1.0, "broken": False, "verifier_text": {"goals": ""}
    }  # fmt: skip


LOST = [  # one thing done otherwise: (actions, broken, goals reached)
    (changed(2, f"pay {TOTAL}"), True, 0),  # the wrong field
    (changed(2, f"pay {DUE}", f"pay {DUE}"), True, 5),  # twice
    (changed(1, f"open {OLD_BILL}"), True, 0),  # the outdated record
    (changed(8, "send carl 99999"), True, 2),
    (changed(8, f"send dora {COUNT}"), True, 2),  # the wrong person
    (changed(8, f"send carl {COUNT}", f"send carl {COUNT}"), True, 5),
    (changed(14, f"find order ben\nclose {ORDER}"), True, 4),
    (changed(15, f"close {ORDER}", f"close {CASE}"), True, 5),
    ([*CLOSING, *ALL[:-3], "done"], True, 4),  # the last goal first
    ([*PAYING, *TELLING, *SETTING, *TELLING[1:], *COPYING, *CLOSING, "done"], True, 5),  # a message before its turn
    ([*ALL[:-3], "done"], False, 4),  # a goal left out
    ([*PAYING, "done"], False, 1),
    (["done"], False, 0),
    ([*PAYING, *TELLING, *COPYING, *CLOSING, "done"], True, 1),
    (changed(4, f"open {OLD_ORDER}"), True, 1),  # the message that follows is then out of order
    ([*ALL[:-1], f"open {ORDER}", "set count 1", "done"], False, 5),  # a stray change at the end
    (changed(5, "set city oz"), True, 1),
]


@pytest.mark.parametrize(("actions", "broken", "reached"), LOST, ids=range(len(LOST)))
def test_what_loses_an_episode(actions, broken, reached):
    _, reward, terminated, _, info = run(TASK, *actions)
    assert (reward, terminated, info["success"], info["broken"]) == (0.0, True, 0.0, broken)
    assert info["goals_reached"] == reached / 5 and info["verifier_text"]["goals"]
    assert ("payment" in info["verifier_text"]["goals"]) == broken
    if not broken and reached < 5:
        assert info["verifier_text"]["goals"].startswith(f"goal {reached + 1} ")


FORGIVEN = [
    changed(1, f"open {OLD_BILL}", f"open {BILL}"),
    changed(0, "find client dora", f"open {CLIENT}", "find bill anna"),
    changed(5, "set city oz", "set city atlantis"),
    changed(5, "set count 1", f"set count {COUNT}", "set city atlantis"),
    changed(4, f"open {OLD_ORDER}", "set city oz", f"set city {world(TASK['world'])[OLD_ORDER].fields['city']}", f"open {ORDER}"),
    [*SETTING, *PAYING, *SETTING[1:], *ALL[6:]],  # a set before its turn does not count, but may be done again
    changed(2, "what", "pay", "find", f"pay {DUE}"),
    ["next", "next", *PAYING, *["next"] * 9, *ALL[3:]],
    [*ALL[:-1], "no call", "done now", "done"],
    [f"thought\n {action} \n" for action in ALL],
]


@pytest.mark.parametrize("actions", FORGIVEN, ids=range(len(FORGIVEN)))
def test_what_can_be_taken_back(actions):
    assert run(TASK, *actions)[4]["success"] == 1.0


def test_a_value_is_that_of_its_moment():
    """A message after a change carries the new value, one before it the old."""
    before, after = (small_task(*goals) for goals in ([(*TELL[:3], "city", "carl"), SET], [SET, (*TELL[:3], "city", "carl")]))
    city = field(TASK, "order", "ben", "city")
    assert run(before, *SETTING[:2], f"send carl {city}", *SETTING[2:], "done")[4]["success"] == 1.0
    assert run(after, *SETTING, "send carl atlantis", "done")[4]["success"] == 1.0
    assert run(after, *SETTING, f"send carl {city}", "done")[4]["broken"]


INVALID = [
    ("", "no call on the last line"),
    (" \n ", "no call on the last line"),
    ("go home", "no call on the last line"),
    ("find bill", "no call find with 1 words"),
    ("open", "no call open with 0 words"),
    ("done now", "no call done with 1 words"),
    ("next goal", "no call next with 1 words"),
    ("set city", "no call set with 1 words"),
    ("find bill zoe", "no bill zoe"),
    ("find boat anna", "no boat anna"),
    (f"open {BILL}", f"no {BILL} , find it first"),
    (f"close {BILL}", f"no {BILL} , find it first"),
    ("open x", "no x , find it first"),
    ("set city rome", "no open record"),
    ("pay 85", "no bill is open"),
    ("send zoe 85", "no person zoe"),
    ("Done", "no call on the last line"),
    ("__init__", "no call on the last line"),
    ("x" * 30_000 + "\ndone", "no call on the last line"),
]


@pytest.mark.parametrize(("action", "message"), INVALID, ids=range(len(INVALID)))
def test_bad_calls_cost_a_turn_and_change_nothing(action, message):
    env = AutomationEnv()
    env.reset(TASK)
    key = env.state_key()
    assert env.step(action) == (message, 0.0, False, False, {"invalid": True})
    assert env.state_key() == key and env.turns == 1
    assert run(TASK, action, *ALL)[1] == 1.0


def test_bad_calls_later_in_an_episode():
    env = AutomationEnv()
    env.reset(TASK)
    for action in (*SETTING[:2], "set due 85"):
        observation = env.step(action)[0]
    assert observation == "no due here" and env.step("pay 85")[0] == "no bill is open"
    env.step(f"close {ORDER}")
    for action in (f"open {ORDER}", f"close {ORDER}"):
        assert env.step(action)[0] == f"no {ORDER} , it is closed"
    assert env.step("set city rome")[0] == "no open record"


def test_end_of_an_episode():
    short = {**TASK, "turns": 2}
    observation, reward, terminated, truncated, info = run(short, "find bill anna", f"open {BILL}")
    assert observation.startswith(BILL) and (reward, terminated, truncated, info["success"]) == (0.0, False, True, 0.0)
    assert run({**TASK, "turns": len(ALL)}, *ALL)[1:4] == (1.0, True, False)
    assert run({**TASK, "turns": len(ALL) - 1}, *ALL[:-1])[4]["verifier_text"]["goals"] == "a field has a wrong value, or done was never called"
    env = AutomationEnv()
    env.reset(short)
    env.step("done")
    for call in (lambda: env.step("done"), env.oracle_action, env.state_key, env.admissible):
        with pytest.raises(RuntimeError, match="reset"):
            call()


# ---------------------------------------------------------------- embedded tasks


def play(conversation, task):
    env = AutomationEnv()
    assert env.reset(task) == conversation[:1]
    for said, heard in zip(conversation[1::2], [*conversation[2::2], None]):
        observation, reward, terminated, truncated, info = env.step(said["content"])
        assert (truncated, terminated) == (False, heard is None)
        assert heard is None or (heard == {"role": "user", "content": observation} and reward == 0.0)
    return info


def test_demonstrations_solve_every_task_in_the_stated_turns():
    rng = random.Random(0)
    for task in [*TASKS.train[::6], *TASKS.eval]:
        conversation = TASKS.demonstrate(task, rng)
        assert len(conversation) // 2 == task["difficulty"] == task["turns"] - automation.SPARE_TURNS
        assert play(conversation, task)["success"] == 1.0


def test_lengths_and_goal_types():
    assert (len(TASKS.train), len(TASKS.eval)) == (6000, 256)
    held_out = [task["difficulty"] for task in TASKS.eval]
    assert min(held_out) in (15, 16) and max(held_out) in (39, 40) and 24 < sum(held_out) / 256 < 31
    train = [task["difficulty"] for task in TASKS.train]
    assert min(train) == 5 and max(train) <= 40 and sum(d < 15 for d in train) > 1500
    assert max(train) + automation.SPARE_TURNS <= TASKS.max_turns
    types = Counter(goal[0] for task in TASKS.eval for goal in task["goals"])
    assert set(types) == {"pay", "set", "tell", "copy", "close"} and min(types.values()) > 100
    assert len({task["id"] for task in [*TASKS.train, *TASKS.eval]}) == 6256 and json.loads(json.dumps(TASKS.eval)) == TASKS.eval


def records_of(goals):
    return {pair for goal in goals for pair in [tuple(goal[1:3])] + ([tuple(goal[4:6])] if goal[0] == "copy" else [])}


def test_splits_share_no_record():
    train, held_out = ({pair for task in split for pair in records_of(task["goals"])} for split in (TASKS.train, TASKS.eval))
    assert not train & held_out and len(train) == 32 and len(held_out) == 16
    assert {kind for kind, _ in held_out} == set(KINDS) and {name for _, name in train} == set(NAMES)


def test_order_follows_the_seed_and_nothing_else_does(monkeypatch):
    def by_id(tasks):
        return sorted(tasks, key=lambda task: task["id"])

    monkeypatch.setattr(automation, "TRAIN", 200)
    again, same, other = load("automation"), load("automation"), load("automation", 1)
    assert again.train == same.train != other.train and by_id(again.train) == by_id(other.train) == by_id(TASKS.train)[:200]
    assert other.eval == again.eval == TASKS.eval


def test_every_goal_changes_something_and_stays_possible():
    for task in [*TASKS.train[::5], *TASKS.eval]:
        modified, values = [], {}
        for goal in task["goals"]:
            verb, kind, name = goal[:3]
            assert ("close", kind, name) not in modified  # a closed record is not needed again
            target = tuple(goal[4:6]) if verb == "copy" else (kind, name)
            if verb == "tell":
                assert goal[4] != name
                continue
            assert target not in [entry[1:] for entry in modified]
            modified.append((verb, *target))
            if verb in ("set", "copy"):
                what = goal[3]
                value = goal[4] if verb == "set" else values.get((kind, name, what), field(task, kind, name, what))
                assert value != field(task, *target, what)
                values[*target, what] = value


def test_worlds():
    shown, twins = Counter(), []
    for task in TASKS.eval[:60]:
        records = world(task["world"])
        rows = Counter((record.kind, record.name) for record in records.values())
        assert len(rows) == 48 and sum(record.live for record in records.values()) == 48 and len(records) == 58
        twins.append([record.live for record in records.values() if rows[record.kind, record.name] == 2][::2])
        for key, record in records.items():
            assert key in automation.IDS and set(record.fields) == set(KINDS[record.kind])
            numbers = [value for value in record.fields.values() if value.isdigit()]
            assert len(set(numbers)) == len(numbers) and set(numbers) <= set(automation.NUMBERS)
            shown[tuple(record.fields) == KINDS[record.kind]] += 1
    assert 0.2 < shown[False] / sum(shown.values()) < 0.3
    assert 0.4 < sum(live for group in twins for live in group) / sum(map(len, twins)) < 0.6  # either row comes first


def test_careless_conversations_are_played_and_mostly_fail():
    rng = random.Random(0)
    info = [play(TASKS.careless(task, rng), task) for task in TASKS.eval]
    assert 0.05 < sum(i["success"] for i in info) / len(info) < 0.3 and 0.5 < sum(i["broken"] for i in info) / len(info) < 0.95
    short = [task for task in TASKS.train if task["difficulty"] < 10][:300]
    assert 0.4 < sum(play(TASKS.careless(task, rng), task)["success"] for task in short) / 300 < 0.85
    assert [TASKS.careless(t, random.Random(1)) for t in TASKS.eval[:9]] == [TASKS.careless(t, random.Random(1)) for t in TASKS.eval[:9]]


def test_careless_expert_without_slips_is_the_expert(monkeypatch):
    for name in ("TAKES_FIRST_ROW", "TAKES_FIRST_FIELD", "SKIPS_GOAL", "STOPS_EARLY"):
        monkeypatch.setattr(automation, name, 0.0)
    for task in TASKS.eval[:60]:
        assert TASKS.careless(task, random.Random(0)) == TASKS.demonstrate(task, random.Random(0))


def test_short_for_a_tiny_policy():
    """Words as tokens: with every word, number, line end and mark a token, one for the space before a number, and four of the template a turn."""
    for task in TASKS.eval:
        tokens = sum(4 + len(re.findall(r"[a-z]+| \d|\d+|[^\w\s]|\n", message["content"])) for message in TASKS.demonstrate(task, random.Random(0)))
        assert tokens < 32 * task["difficulty"] + 60


# ---------------------------------------------------------------- from any state


def random_action(env, rng, harmless):
    record = env.records.get(env.opened)
    options = [f"find {rng.choice(list(KINDS))} {rng.choice(NAMES)}", "what", env.oracle_action(), env.oracle_action()]
    options += [f"open {rng.choice(sorted(env.found))}"] if env.found else []
    options += [f"set {rng.choice(list(record.fields))} {rng.choice(automation.NUMBERS)}"] * 2 if record else []
    if not harmless:
        options += [f"send {rng.choice(NAMES)} 85", "pay 85", f"close {rng.choice(sorted(env.found) or ['1'])}"]
    return rng.choice(options)


def test_oracle_from_any_state_that_is_not_lost():
    rng = random.Random(0)
    edited = 0
    for task in TASKS.eval:
        env = AutomationEnv()
        env.reset({**task, "turns": 500})
        ended = False
        for _ in range(rng.randrange(60)):
            action = random_action(env, rng, harmless=True)
            if action.endswith("done"):
                break
            env.step(action)
        edited += bool(env.edits)
        assert not env.broken
        while not ended:
            _, reward, ended, truncated, info = env.step(env.oracle_action())
            assert not truncated and not info["invalid"]
        assert reward == 1.0
    assert edited > 100


def test_oracle_gives_up_a_lost_episode():
    env = AutomationEnv()
    env.reset(TASK)
    env.step("send anna 85")
    assert env.step(env.oracle_action())[1:3] == (0.0, True)


def test_admissible_calls_can_be_carried_out_and_hold_the_expert_s():
    rng = random.Random(0)
    for task in TASKS.eval[:12]:
        env = AutomationEnv()
        env.reset(task)
        while not env.oracle_action().endswith("done"):
            calls = env.admissible()
            assert len(set(calls)) == len(calls) and env.oracle_action().splitlines()[-1] in calls
            state = env.snapshot()
            for call in rng.sample(calls, 8):
                result = env.step(call)
                assert not result[4]["invalid"] and result[2] == (call == "done")
                env.restore(state)
            assert {call.split()[0] for call in calls} <= set(CALLS)
            env.step(env.oracle_action())


def test_snapshots_are_exact():
    rng = random.Random(1)
    for task in TASKS.eval[:60]:
        env = AutomationEnv()
        env.reset(task)
        for _ in range(rng.randrange(task["difficulty"])):
            env.step(random_action(env, rng, rng.random() < 0.9).replace("done", "what"))
        state, key = env.snapshot(), env.state_key()
        actions = []
        results = []
        while True:
            actions.append(random_action(env, rng, False))
            results.append(env.step(actions[-1]))
            if results[-1][2] or results[-1][3]:
                break
        env.restore(state)
        assert env.state_key() == key and [env.step(action) for action in actions] == results
        other = AutomationEnv()
        other.reset(TASKS.eval[77])
        other.restore(state)
        assert other.state_key() == key and [other.step(action) for action in actions] == results


def test_state_key_tells_states_apart():
    env = AutomationEnv()
    env.reset(TASK)
    keys = [env.state_key()]
    for action in ["next", *ALL[:-1], f"open {BILL}", "set due 85"]:
        env.step(action)
        keys.append(env.state_key())
    assert len(set(keys)) == len(keys)
    env.step(f"set due {DUE}")
    assert env.state_key() == keys[-2]  # taken back


def test_no_real_data():
    with pytest.raises(DataError, match="embedded tasks only"):
        load("automation:/somewhere")
    env = AutomationEnv()
    with pytest.raises(DataError, match=r"goal \('fly', 'bill', 'anna'\)"):
        env.reset(small_task(("fly", "bill", "anna")))
