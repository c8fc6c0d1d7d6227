"""Household: ALFWorld's rules and texts against recorded games, oracle, snapshots, admissible commands, generated scenes, game files and hostile ones."""

import json
import random
import re
import shutil
from collections import Counter

import pytest
from conftest import real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs import DataError, household, household_engine, household_files, load
from common.envs.household_engine import ACTIONS, CLEAN, COOL, HOT, NOTHING, OPENED, TOGGLED, plan

TASKS = load("household")
FULL = load("household:full")


@pytest.fixture(scope="session")
def alfworld():
    return load(f"alfworld:{real_data('alfworld_generated')}")


def game_folder(name):
    """The folder of one real game whose path contains the name."""
    return next(path.parent for path in sorted(real_data("alfworld_generated").rglob("game.tw-pddl")) if name in str(path))


def started(task, horizon=10**6):
    env = household.HouseholdEnv(horizon)
    env.reset(task)
    return env


def wander(env, rng, steps):
    """Random admissible commands, first the verb, then one of its commands; stops at the goal."""
    for _ in range(steps):
        commands = env.admissible()
        verb = rng.choice(sorted({c.split()[0] for c in commands}))
        if env.step(rng.choice([c for c in commands if c.split()[0] == verb]))[2]:
            return


def view(env):
    return env.observation, env.admissible(), env.inventory(), env.remaining, env.state_key(), env.over


# ---------------------------------------------------------------- ALFWorld's games


def test_recorded_games_are_replayed_word_for_word(alfworld):
    rows = [*alfworld.train, *alfworld.eval]
    assert len(rows) == 12 and Counter(row["family"] for row in rows) == dict.fromkeys(household.FAMILIES, 2)
    for row in rows:
        recorded = json.loads((real_data("alfworld_generated") / row["id"] / "oracle.json").read_text())
        env = alfworld.make_env()
        assert env.reset(row)[-1] == {"role": "user", "content": recorded["intro"]}
        for command, expected in zip(recorded["walkthrough"], recorded["observations"]):
            assert command in env.admissible()
            observation, reward, terminated, truncated, info = env.step(command)
            assert observation == expected and not truncated and not info["invalid"]
        assert terminated and reward == 1.0 and info["success"] == 1.0 and info["rewards"] == {"goal": 1.0}
        assert env.oracle_plan() == []


def test_oracle_needs_no_more_steps_than_the_planner(alfworld):
    for row in [*alfworld.train, *alfworld.eval]:
        recorded = json.loads((real_data("alfworld_generated") / row["id"] / "oracle.json").read_text())
        assert len(started(row).oracle_plan()) <= len(recorded["walkthrough"])


def test_texts_seen_in_textworld():
    """Answers that TextWorld 1.7.0 with alfworld 0.4.2 gave to these commands."""
    env = started({"id": "x", "file": str(game_folder("cool_then_place_in_recep-Pot") / "game.tw-pddl")})
    for command, expected in [
        ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
        ("inventory", "You are not carrying anything."),
        ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see a cup 1, a knife 1, a lettuce 1, a pot 1, a potato 1, and a tomato 1."),
        ("go to sinkbasin 1", NOTHING),
        ("go to microwave 1", NOTHING),  # it stands at the same location
        ("look", "You are facing the microwave 1, and sinkbasin 1. Next to it, you see nothing."),
        ("examine microwave 1", "The microwave 1 is closed."),
        ("examine pot 1", NOTHING),  # only what is held can be examined: the domain's other way has a comma that makes it void
        ("take cup 1 from sinkbasin 1", "You pick up the cup 1 from the sinkbasin 1."),
        ("inventory", "You are carrying: a cup 1."),
        ("move cup 1 to microwave 1", NOTHING),
        ("open microwave 1", "You open the microwave 1. The microwave 1 is open. In it, you see a bowl 1, a egg 1, and a mug 1."),
        ("move cup 1 to microwave 1", "You move the cup 1 to the microwave 1."),
        ("look", "You are facing the microwave 1, and sinkbasin 1. Next to it, you see a cup 1."),
        ("take knife 1 from sinkbasin 1", "You pick up the knife 1 from the sinkbasin 1."),
        ("slice tomato 1 with knife 1", "You sliced the tomato 1 with the knife 1."),
        ("move knife 1 to sinkbasin 1", "You move the knife 1 to the sinkbasin 1."),
        ("take tomato 1 from sinkbasin 1", "You pick up the tomato 1 from the sinkbasin 1."),
        ("examine tomato 1", "This is a sliced tomato 1."),
        ("clean tomato 1 with sinkbasin 1", "You clean the tomato 1 using the sinkbasin 1."),
        ("heat tomato 1 with microwave 1", "You heat the tomato 1 using the microwave 1."),
        ("examine tomato 1", "This is a hot and clean sliced tomato 1."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("cool tomato 1 with fridge 1", "You cool the tomato 1 using the fridge 1."),
        ("examine tomato 1", "This is a cool and clean sliced tomato 1."),
        ("Examine tomato 1", NOTHING),
        ("examine  tomato 1", NOTHING),
        ("close fridge 1", NOTHING),
    ]:
        observation, _, _, _, info = env.step(command)
        assert observation == expected, command
        assert info["invalid"] == (expected == NOTHING)
    assert env.step("help")[0].startswith("Available commands:\n  look:  ")


def slow_goal(game, state, formula, ids):
    """The goal's formula by loops over all entities of each variable's type, on facts written out one by one."""
    kinds = {"receptacle": range(game.receptacles), "object": range(game.receptacles, len(game.types))}
    kinds |= {"location": range(len(game.types), game.agent), "agent": [game.agent]}
    facts = {("atlocation", game.agent, state.at), ("holds", game.agent, state.held)}
    facts |= {("inreceptacle", o, r) for r, inside in enumerate(state.contents) for o in inside} | {("receptacleatlocation", r, p) for r, p in game.stands}
    facts |= {("objectatlocation", o, p) for o, p in state.places}
    for e, types in enumerate(game.types):
        facts |= {("receptacletype" if e < game.receptacles else "objecttype", e, f"{t}type") for t in types}
        facts |= {(name, e) for name, bit in household_files.UNARY.items() if state.flags[e] & bit}

    def holds(part, bound):
        if part[0] == "and":
            return all(holds(inner, bound) for inner in part[1:])
        if part[0] == "exists":
            variables = [w for w in part[1] if w.startswith("?")]
            types = [part[1][part[1].index(v) + 2] for v in variables]
            assert set(types) <= kinds.keys()

            def choose(i, bound):
                return holds(part[2], bound) if i == len(variables) else any(choose(i + 1, {**bound, variables[i]: e}) for e in kinds[types[i]])

            return choose(0, bound)
        if part[0] == "not":
            return not holds(part[1], bound)
        arguments = [bound.get(w, w) for w in part[1:]]
        return arguments[0] == arguments[1] if part[0] == "=" else (part[0], *arguments) in facts

    return all(holds(part, {}) for part in formula)


def test_goal_agrees_with_slow_evaluation_of_its_formula(alfworld):
    rng = random.Random(0)
    verdicts = Counter()
    for row in [*alfworld.train, *alfworld.eval]:
        problem = household_files.read_pddl(json.loads((game_folder(row["id"]) / "game.tw-pddl").read_text())["pddl_problem"], "x")
        formula = household_files._section(problem, ":goal", "x")
        env = started(row)
        game, state = env.game, env.state
        ways = [plan(game, state)]
        for _ in range(2):
            wander(env, rng, 25)
            ways.append(plan(game, env.state))
            state = env.state
            for action in ways[-1]:
                for s in (state, state._replace(held=-1)):
                    verdict = game.won(s)
                    assert verdict == slow_goal(game, s, formula, None), row["id"]
                    verdicts[row["family"], verdict] += 1
                state = game.apply(state, action)
            assert slow_goal(game, state, formula, None) and game.won(state)
            verdicts[row["family"], True] += 1
            env.reset(row)
    assert all(verdicts[family, verdict] for family in household.FAMILIES for verdict in (True, False))


# ---------------------------------------------------------------- oracle


def assert_oracle_wins(env):
    """Follows one plan to the end, and asks anew at every step."""
    before = env.snapshot()
    commands = env.oracle_plan()
    for command in commands:
        assert not env.over and command in env.admissible()
        _, reward, terminated, _, info = env.step(command)
        assert not info["invalid"]
    assert not commands or (terminated and reward == 1.0)
    env.restore(before)
    for left in range(len(commands), 0, -1):
        assert len(env.oracle_plan()) <= left
        terminated = env.step(env.oracle_action())[2]
    assert not commands or terminated
    return len(commands)


def test_oracle_solves_every_generated_task():
    for task in [*TASKS.train[::3], *TASKS.eval, *FULL.eval]:
        env = started(task)
        assert len(env.oracle_plan()) == task["difficulty"] > 0
        for command in env.oracle_plan():
            terminated = env.step(command)[2]
        assert terminated


@pytest.mark.parametrize("family", household.FAMILIES)
def test_oracle_solves_every_family_from_random_states(family, alfworld):
    rng = random.Random(1)
    for tasks, count in ((TASKS.train, 40), (FULL.train, 15), ([*alfworld.train, *alfworld.eval], 2)):
        for task in [task for task in tasks if task["family"] == family][:count]:
            for _ in range(3):
                env = started(task)
                wander(env, rng, rng.randrange(60))
                if not env.over:
                    assert_oracle_wins(env)


REPAIR = {
    "family": "clean",
    "wording": "compact",
    "layout": ["cabinet", "sink", "microwave", "fridge", "shelf", "table"],
    "things": [["mug", 4], ["pan", 5], ["lamp", 4]],
    "target": {"thing": "mug", "place": "cabinet"},
    "id": "repair",
}


HOME = "; go to cabinet; open cabinet; move mug to cabinet"
GET = "go to shelf; take mug from shelf; "


@pytest.mark.parametrize(
    ("family", "target", "commands", "expected"),
    [
        ("clean", "cabinet", [], GET + "go to sink; clean mug with sink" + HOME),
        ("clean", "cabinet", GET + "go to sink; clean mug with sink", HOME[2:]),
        (  # clean already and at the wrong place
            "clean",
            "cabinet",
            GET + "go to sink; clean mug with sink; go to table; move mug to table",
            "take mug from table" + HOME,
        ),
        (  # dirty at the right place
            "clean",
            "cabinet",
            GET + "go to cabinet; open cabinet; move mug to cabinet; close cabinet; go to table",
            "go to cabinet; open cabinet; take mug from cabinet; go to sink; clean mug with sink; go to cabinet; move mug to cabinet",
        ),
        # something else in the hand
        (
            "pick",
            "cabinet",
            "go to table; take pan from table",
            "go to shelf; move pan to shelf; take mug from shelf" + HOME,
        ),
        (
            "heat",
            "table",
            GET + "go to fridge; cool mug with fridge",
            "go to microwave; heat mug with microwave; go to table; move mug to table",
        ),
        ("cool", "table", GET + "go to fridge; open fridge; cool mug with fridge", "go to table; move mug to table"),
        ("look", "lamp", "go to shelf; use lamp", "take mug from shelf"),
        ("look", "lamp", GET + "go to table", "go to shelf; use lamp"),
        (
            "look",
            "lamp",
            GET + "go to table; move mug to table; go to shelf; use lamp",
            "go to table; take mug from table; go to shelf",
        ),
    ],
)
def test_oracle_repairs(family, target, commands, expected):
    env = started({**REPAIR, "family": family, "target": {"thing": "mug", "place": target}})
    for command in commands.split("; ") if commands else []:
        assert not env.step(command)[4]["invalid"], command
    assert household.command_in(env.oracle_action()) == expected.partition("; ")[0]
    assert "; ".join(env.oracle_plan()) == expected
    assert_oracle_wins(env)


def test_oracle_says_when_there_is_no_way():
    env = started({**REPAIR, "family": "pick", "target": {"thing": "mug", "place": "cabinet"}})
    env.restore(env.snapshot()._replace(state=env.state._replace(contents=((),) * 6)))
    with pytest.raises(RuntimeError, match="repair: the goal cannot be reached"):
        env.oracle_plan()


# ---------------------------------------------------------------- rules


def test_admissible_commands_are_exactly_those_that_are_answered(alfworld):
    rng = random.Random(2)
    for task, walks in ((TASKS.train[0], 4), (TASKS.train[5], 4), (FULL.eval[1], 2), (alfworld.train[0], 2)):
        for _ in range(walks):
            env = started(task)
            wander(env, rng, rng.randrange(25))
            game, snapshot = env.game, env.snapshot()
            if env.over:
                continue
            names = game.names[: len(game.types)]
            every = {c for c in game.grammar.templates.values() if "{" not in c}
            for parameters in set(ACTIONS.values()):
                for x in names if parameters else ():
                    for y in names if len(parameters) > 1 else ("",):
                        words = dict(zip(parameters, (x, y)))
                        every |= {game.grammar.templates[k].format(**words) for k, p in ACTIONS.items() if p == parameters and k in game.grammar.templates}
            answered = set()
            for command in every:
                observation, _, _, _, info = env.step(command)
                assert info["invalid"] == (observation == NOTHING)
                assert not info["invalid"] or env.state == snapshot.state
                if not info["invalid"]:
                    answered.add(command)
                env.restore(snapshot)
            assert sorted(answered) == env.admissible()


def test_different_variables_stand_for_different_entities():
    env = started(REPAIR)
    query = household_engine._query("inreceptacle(o:object, r:receptacle) & inreceptacle(o2:object, r:receptacle)", "x")
    found = [tuple(env.game.names[b[v]] for v in ("o", "o2", "r")) for b in household_engine._matches(env.game, env.state, query, {})]
    assert found == [("mug", "lamp", "shelf"), ("lamp", "mug", "shelf")]


def test_rules_by_hand():
    env = started({**REPAIR, "family": "pick", "things": [["mug", 4], ["book", 4], ["egg", 3], ["lamp", 4]], "target": {"thing": "mug", "place": "table"}})
    for command, expected in [
        ("look", "In the middle of the room."),
        ("take mug from shelf", NOTHING),  # not there
        ("go to shelf", "On shelf: mug book lamp."),
        ("take lamp from shelf", NOTHING),
        ("use mug", NOTHING),
        ("use lamp", "lamp is on."),
        ("use lamp", "lamp is on."),
        ("examine mug", NOTHING),
        ("take mug from shelf", "Took mug."),
        ("take book from shelf", NOTHING),  # one hand
        ("examine shelf", "On shelf: book lamp."),
        ("examine mug", "mug is nothing special."),
        ("go to fridge", "fridge is closed."),
        ("look", "At fridge."),
        ("move mug to fridge", NOTHING),
        ("cool mug with fridge", "mug is cold."),  # through the closed door, as in ALFWorld
        ("clean mug with fridge", NOTHING),
        ("close fridge", NOTHING),
        ("open fridge", "In fridge: egg."),
        ("open fridge", NOTHING),
        ("move mug to fridge", "Moved mug to fridge."),
        ("take egg from fridge", "Took egg."),
        ("examine fridge", "In fridge: mug."),
        ("close fridge", "fridge is closed."),
        ("move egg to fridge", NOTHING),
        ("go to shelf", "On shelf: book lamp."),
        ("move egg to shelf", NOTHING),  # a shelf takes no food
        ("go to sink", "On sink: nothing."),
        ("clean egg with sink", NOTHING),
        ("move egg to sink", "Moved egg to sink."),
        ("inventory", "Holding nothing."),
        ("go to fridge", "fridge is closed."),
        ("take mug from fridge", NOTHING),
        ("open fridge", "In fridge: mug."),
        ("take mug from fridge", "Took mug."),
        ("examine mug", "mug is cold."),
        ("go to microwave", "microwave is closed."),
        ("heat mug with microwave", "mug is hot."),
        ("examine mug", "mug is hot."),
        ("go to sink", "On sink: egg."),
        ("clean mug with sink", "mug is clean."),
        ("examine mug", "mug is hot and clean."),
        ("inventory", "Holding mug."),
        ("go to sink", NOTHING),
        ("heat mug with microwave", NOTHING),
        ("fly to table", NOTHING),
        ("go to lamp", NOTHING),
        ("go to table", "On table: nothing."),
    ]:
        assert env.step(command)[0] == (expected if expected == NOTHING else f"{expected} Task: mug in table."), command
    assert env.step("move mug to table")[:4] == ("Moved mug to table. Task: mug in table.", 1.0, True, False)


def test_full_wording_says_the_same():
    env = started(
        {**REPAIR, "family": "pick", "wording": "full", "things": [["mug", 4], ["book", 4], ["lamp", 4]], "target": {"thing": "mug", "place": "table"}}
    )
    assert env.observation == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a cabinet 1, a sinkbasin 1, "
        "a microwave 1, a fridge 1, a shelf 1, and a diningtable 1.\n\nYour task is to: put a mug in diningtable."
    )
    for command, expected in [
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a mug 1, a book 1, and a desklamp 1."),
        ("take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1."),
        ("inventory", "You are carrying: a mug 1."),
        ("look", "You are facing the shelf 1. Next to it, you see nothing."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see nothing."),
        ("cool mug 1 with fridge 1", "You cool the mug 1 using the fridge 1."),
        ("examine mug 1", "This is a cold mug 1."),
        ("close fridge 1", "You close the fridge 1."),
        ("go to diningtable 1", "You arrive at diningtable 1. On the diningtable 1, you see nothing."),
        ("move mug 1 to diningtable 1", "You move the mug 1 to the diningtable 1."),
    ]:
        assert env.step(command)[0] == expected, command
    assert env.over


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_invariants_of_random_walks(seed):
    rng = random.Random(seed)
    env = started(rng.choice([TASKS, FULL]).train[rng.randrange(1000)])
    game = env.game
    lamps = [o for o in range(game.receptacles, len(game.types)) if game.types[o] == {"lamp"}]
    for _ in range(30):
        before = env.state
        wander(env, rng, 1)
        s = env.state
        objects = [o for inside in s.contents for o in inside] + [s.held] * (s.held >= 0)
        assert sorted(objects) == list(range(game.receptacles, len(game.types)))  # each thing is at one place
        assert all(list(inside) == sorted(inside) for inside in s.contents)
        assert all(game.puts(o, r) or o in lamps for r, inside in enumerate(s.contents) for o in inside)
        assert not any(flags & HOT and flags & COOL for flags in s.flags)
        assert all(not after & ~(before_flags | CLEAN | HOT | COOL | OPENED | TOGGLED) for before_flags, after in zip(before.flags, s.flags))
        assert {o for o, _ in s.places} == set(objects) - {s.held}
        if env.over:
            break


# ---------------------------------------------------------------- snapshots


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_restore_is_exact_and_a_branch_leaves_the_live_episode_alone(seed):
    rng = random.Random(seed)
    tasks = rng.choice([TASKS, FULL])
    task = tasks.train[rng.randrange(1000)]
    live, branch = tasks.make_env(), tasks.make_env()
    live.reset(task)
    wander(live, rng, rng.randrange(12))
    snapshot, seen = live.snapshot(), view(live)
    if rng.random() < 0.5:
        branch.reset(tasks.train[rng.randrange(1000)])  # busy with something else
    branch.restore(snapshot)
    assert view(branch) == seen
    if not branch.over:
        while not branch.over:
            branch.step(branch.oracle_action())
        assert view(live) == seen
        assert snapshot == live.snapshot()
    # the same commands after restoring give the same answers
    branch.restore(snapshot)
    while not live.over:
        command = rng.choice([*live.admissible(), "nonsense"])
        assert live.step(command) == branch.step(command)
        assert view(live) == view(branch)
    live.restore(snapshot)
    assert view(live) == seen


def test_snapshot_holds_a_task_that_the_environment_has_not_opened(alfworld):
    live = alfworld.make_env()
    live.reset(alfworld.train[0])
    live.step(live.oracle_action())
    other = alfworld.make_env()
    other.restore(live.snapshot())
    assert view(other) == view(live) and other.remaining == 49


def test_state_key_is_the_state_not_the_way_to_it():
    env = started(REPAIR)
    keys = [env.state_key()]
    for command in (
        "go to shelf",
        "take mug from shelf",
        "move mug to shelf",
        "look",
        "examine shelf",
        "nonsense",
        "go to cabinet",
        "open cabinet",
        "close cabinet",
    ):
        env.step(command)
        keys.append(env.state_key())
    assert keys[1] == keys[3] == keys[4] == keys[5] == keys[6]
    assert keys[7] == keys[9]
    assert len(set(keys)) == 5 and all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)
    other = started(REPAIR)
    for command in ("go to table", "go to shelf"):
        other.step(command)
    assert other.state_key() == keys[1]


# ---------------------------------------------------------------- protocol


def test_episode_ends_at_the_horizon():
    env = TASKS.make_env()
    messages = env.reset(TASKS.train[0])
    assert [m["role"] for m in messages] == ["system", "user"] and messages[1]["content"].startswith("Room: ")
    assert "take THING from PLACE" in messages[0]["content"]
    for turn in range(1, TASKS.max_turns + 1):
        assert env.remaining == TASKS.max_turns + 1 - turn
        observation, reward, terminated, truncated, info = env.step("jump")
        assert (observation, reward, terminated, truncated) == (NOTHING, 0.0, False, turn == TASKS.max_turns)
        assert info["invalid"] and ("success" in info) == truncated
    assert info["success"] == 0.0 and info["rewards"] == {"goal": 0.0}
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")
    env.reset(TASKS.train[1])
    assert not env.step("look")[4]["invalid"]


def test_step_needs_an_episode():
    with pytest.raises(RuntimeError, match="reset"):
        TASKS.make_env().step("look")


def test_success_at_the_last_turn_is_not_truncated():
    task = TASKS.train[0]
    env = household.HouseholdEnv(task["difficulty"])
    env.reset(task)
    while not env.over:
        result = env.step(env.oracle_action())
    assert result[1:4] == (1.0, True, False) and result[4]["success"] == 1.0


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go to shelf", "go to shelf"),
        ("  go to shelf \n", "go to shelf"),
        ("the mug may be on the shelf\ngo to shelf", "go to shelf"),
        ("<think>open cabinet?\n</think>\n<action>go to shelf</action>", "go to shelf"),
        ("<action>\ngo to shelf</action>", "go to shelf"),
        ("", ""),
        ("\n \n", ""),
        ("<think>a</think>", ""),
        ("x" * 5_000_000, "x" * household.MAX_CHARS),
    ],
)
def test_command_of_a_response(text, command):
    assert household.command_in(text) == command
    assert started(REPAIR).step(text)[4]["invalid"] == (command != "go to shelf")


# ---------------------------------------------------------------- generated tasks


def combination(task):
    return task["family"], task["target"]["thing"], task["target"]["place"]


@pytest.mark.parametrize("tasks", [TASKS, FULL], ids=["compact", "full"])
def test_splits(tasks):
    seen, unseen = ([t for t in tasks.eval if t["split"] == split] for split in ("seen", "unseen"))
    assert (len(tasks.train), len(seen), len(unseen)) == (4000, 128, 128)
    assert {t["split"] for t in tasks.train} == {"train"}
    everything = [*tasks.train, *tasks.eval]
    assert len({t["id"] for t in everything}) == len(everything)
    assert len({str((t["layout"], t["things"], t["target"], t["family"])) for t in everything}) == len(everything)
    rooms = {tuple(sorted(t["layout"])) for t in tasks.train}
    assert len(rooms) == household.SCENES and all(tuple(sorted(t["layout"])) in rooms for t in seen)
    assert not {tuple(sorted(t["layout"])) for t in unseen} & rooms
    trained = {combination(t) for t in tasks.train}
    assert not {combination(t) for t in unseen} & trained and len({combination(t) for t in unseen}) > 40
    assert {t["family"] for t in tasks.eval[:12]} == set(household.FAMILIES)
    words = [{w for t in split for m in household.build(t).names for w in m.split()} for split in (tasks.train, tasks.eval)]
    assert words[1] <= words[0]
    assert not any(household.build(t).won(household.build(t).start) for t in tasks.train[:500])
    assert json.loads(json.dumps(tasks.eval[:20])) == tasks.eval[:20]


def test_deterministic_by_seed():
    again = load("household")
    assert again.train == TASKS.train and again.eval == TASKS.eval
    assert load("household", seed=1).train != TASKS.train


def replay(tasks, conversation, task):
    """Plays the conversation's commands; every observation in it must be the environment's. Returns the last step."""
    env = tasks.make_env()
    messages = env.reset(task)
    assert conversation[:2] == messages
    for said, seen in zip(conversation[2::2], [*conversation[3::2], None]):
        assert said["role"] == "assistant"
        result = env.step(said["content"])
        assert seen is None or (seen == {"role": "user", "content": result[0]} and not env.over)
    return result


@pytest.mark.parametrize("tasks", [TASKS, FULL], ids=["compact", "full"])
def test_demonstrations_solve_their_tasks_within_the_horizon(tasks):
    rng = random.Random(0)
    lengths = []
    for task in [*tasks.train[:200], *tasks.eval]:
        conversation = tasks.demonstrate(task, rng)
        _, reward, terminated, _, _ = replay(tasks, conversation, task)
        assert terminated and reward == 1.0
        lengths.append(sum(m["role"] == "assistant" for m in conversation))
    assert max(lengths) <= tasks.max_turns
    if tasks is TASKS:
        assert 6 <= sum(lengths) / len(lengths) <= 12


def test_careless_expert_fails_often_and_in_every_way():
    rng = random.Random(0)
    solved, total, seen = Counter(), Counter(), Counter()
    for task in TASKS.train[:900]:
        conversation = TASKS.careless(task, rng)
        _, reward, _, _, _ = replay(TASKS, conversation, task)
        solved[task["family"]] += reward
        total[task["family"]] += 1
        commands = [household.command_in(m["content"]) for m in conversation if m["role"] == "assistant"]
        answers = [m["content"] for m in conversation[3::2]]
        closed = [i for i, a in enumerate(answers) if "is closed." in a]
        seen["nothing"] += NOTHING in answers
        seen["passed"] += any(not commands[i + 1].startswith("open") for i in closed)
        seen["untreated"] += task["family"] in household.NEEDS and not any(c.startswith(("clean", "heat", "cool")) for c in commands)
        seen["looked"] += "look" in commands
        seen["repaired"] += reward == 1.0 and commands[-10:].count("look") > 0
    rates = {family: solved[family] / total[family] for family in household.FAMILIES}
    assert all(0.15 < rates[family] < 0.6 for family in ("clean", "heat", "cool", "two")) and rates["pick"] > 0.6, rates
    assert all(seen[way] > 20 for way in ("nothing", "passed", "untreated", "looked", "repaired")), seen


# ---------------------------------------------------------------- game files


def test_names_count_down_in_the_order_of_ids():
    ids = {"desk_bar__minus_00_dot_57", "desk_bar__minus_01_dot_58", "sink_bar_1_bar_sinkbasin", "sink_bar_2", "agent1", "mug_bar__plus_1"}
    assert household_files._names(ids) == {
        "desk_bar__minus_00_dot_57": "desk 2",
        "desk_bar__minus_01_dot_58": "desk 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "sink_bar_2": "sink 1",
        "agent1": "agent1 ",
        "mug_bar__plus_1": "mug 1",
    }


def test_reader_of_expressions():
    assert household_files.read_pddl("(A (b C) ; comment (\n ())", "x") == ["a", ["b", "c"], []]
    for text in ("", "a", "(a", "(a))", "(a) (b)", "(" * 50 + ")" * 50):
        with pytest.raises(DataError, match=r"^x: "):
            household_files.read_pddl(text, "x")


@pytest.fixture
def game(tmp_path):
    """A copy of a real game, and the way to write it changed: field -> function of its text, or its new value."""
    shutil.copytree(game_folder("SoapBar-None-Cabinet-414"), tmp_path / "game")
    file = tmp_path / "game" / "game.tw-pddl"
    original = json.loads(file.read_text())

    def write(**changes):
        file.chmod(0o644)
        data = {**original, **{field: change(original[field]) if callable(change) else change for field, change in changes.items()}}
        file.write_text(json.dumps(data))
        household.read_cached.cache_clear()  # a game is read once, whatever becomes of its file
        return file

    (tmp_path / "game").chmod(0o755)
    write()
    return write


def swap(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("pddl_domain", "", "field 'pddl_domain' must be a non-empty text"),
        ("pddl_problem", 3, "field 'pddl_problem' must be a non-empty text"),
        ("grammar", None, "field 'grammar' must be a non-empty text"),
        ("pddl_domain", swap("(not (holdsAny ?a))", ""), "field 'pddl_domain': action pickupobject is not ALFWorld's"),
        ("pddl_domain", swap("(:action OpenObject", "(:action Unlock"), "field 'pddl_domain': action unlock is not ALFWorld's"),
        ("pddl_domain", lambda text: "(define (domain alfred))", "field 'pddl_domain': action .* is missing"),
        ("pddl_domain", lambda text: text + ")", "field 'pddl_domain': a closing parenthesis too many"),
        ("pddl_problem", swap("(:goal", "(:aim"), "field 'pddl_problem': expected one section :goal, found 0"),
        ("pddl_problem", swap("(:init", "(:init (haunted agent1)"), r"\(haunted agent1\) in :init is not a fact over a predicate of ALFWorld"),
        ("pddl_problem", swap("(:init", "(:init (opened agent1)"), r"\(opened agent1\) in :init has arguments of type agent; opened takes receptacle"),
        ("pddl_problem", swap("(:init", "(:init (opened ghost)"), r"arguments of type undeclared"),
        ("pddl_problem", swap("(:init", "(:init (opened (a b))"), r"arguments of type expression"),
        ("pddl_problem", swap("(:init", "(:init word"), r"word in :init is not a fact"),
        ("pddl_problem", swap("(:init", "(:init (holdsAny agent1)"), "holds and holdsAny in :init disagree"),
        ("pddl_problem", swap("(atLocation agent1", "(checked agent1"), "expected one agent at one location, found 0 and 0"),
        ("pddl_problem", swap("agent1 - agent", "agent1 -"), "is not a name|has no type|without names"),
        ("pddl_problem", swap("agent1 - agent", "- agent"), "a dash without names before it"),
        ("pddl_problem", lambda text: re.sub(r"\) *\(:init", " orphan) (:init", re.sub(r"\s+", " ", text)), "orphan in :objects has no type"),
        ("pddl_problem", swap("(isClean ?o)", "(not (isClean ?o))"), r"only and, exists, not \(= a b\) and facts are understood"),
        ("pddl_problem", swap("(isClean ?o)", "(isSliced ?o)"), ":goal is none of the six families"),
        ("pddl_problem", swap("(isClean ?o)", "(isClean ?o) (isHot ?o)"), ":goal is none of the six families"),
        ("pddl_problem", swap("(inReceptacle ?o ?r)\n", "\n(inReceptacle ?o ?o)\n"), None),
        ("pddl_problem", swap("(objectType ?o SoapBarType)", "(objectType ?o KettleType)"), "no object or no receptacle in this game has the type"),
        ("pddl_problem", lambda text: "(" * 100_000, "nested more than 40 deep"),
        ("grammar", swap("action look {", "action stare {"), "no template for action look"),
        ("grammar", swap("action look {", "wait look {"), "cannot read 'wait look"),
        ("grammar", swap('template :: "open {r}"', 'template :: "open {o}"'), "template 'open {o}' of action openobject must name exactly r"),
        ("grammar", swap("#OpenObject.feedback#", "#nowhere#"), "symbol 'nowhere' has no rule"),
        ("grammar", swap('"rhs": "You close the {r.name}."', '"lhs": "You close the {r.name}."'), "symbol 'CloseObject.feedback' must have a list of objects"),
        ("grammar", swap('"rhs": "TODO"', '"rhs": "TODO",'), "a grammar block is not valid JSON"),
        ("grammar", swap("Your task is to: ", "Your task is to: {o.name}"), "symbol 'task' must have one plain text"),
        (
            "grammar",
            swap("openable(r:receptacle) & opened(r:receptacle)", "openable(r:receptacle) or opened(r:receptacle)"),
            "is not a conjunction of predicates",
        ),
        ("grammar", swap("openable(r:receptacle) & opened(r:receptacle)", "haunted(r:receptacle)"), "predicate 'haunted' is not one of"),
        ("grammar", swap("{o.indefinite + ' ' + o.name |", "{o.indefinite + ' ' + o.colour |"), "is not made of variable.name"),
        ("grammar", swap("You close the {r.name}.", "You close the {r.name."), "cannot read '{r.name.'"),
    ],
)
def test_bad_game_names_file_and_field(game, field, change, message):
    file = game(**{field: change})
    if message is None:
        with pytest.raises(DataError) as error:
            household_files.read_game(file)
    else:
        with pytest.raises(DataError, match=message) as error:
            household_files.read_game(file)
    assert str(error.value).startswith(str(file))


def test_bad_json_and_traj(game, tmp_path):
    file = game()
    traj = file.with_name("traj_data.json")
    traj.chmod(0o644)
    good = traj.read_text()
    for text, message in [
        ("{", r"traj_data.json: not valid JSON"),
        ("[" * 200_000, r"traj_data.json: not valid JSON"),
        ("[]", r"traj_data.json: a list, expected a JSON object"),
        ("{}", r"traj_data.json: field 'task_type' must be a non-empty text"),
        ('{"task_type": "x"}', r"traj_data.json: field 'pddl_params' must be an object with a true or false 'object_sliced'"),
    ]:
        traj.write_text(text)
        with pytest.raises(DataError, match=message):
            load(f"household:{tmp_path}")
    traj.write_text(good)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"game.tw-pddl: not valid JSON"):
        load(f"household:{tmp_path}")
    file.write_bytes(b" " * (household_files.MAX_BYTES + 1))
    with pytest.raises(DataError, match=r"game.tw-pddl: 8000001 bytes, more than the 8000000"):
        load(f"household:{tmp_path}")
    with pytest.raises(DataError, match="no such folder"):
        load(f"alfworld:{tmp_path}/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no game that can be played below it \(no traj_data.json\)"):
        load(f"alfworld:{tmp_path}/empty")


def laughs(text):
    """Symbols that each stand for ten of the next: 10**12 characters."""
    rules = {f"l{i}": [{"rhs": f"#l{i + 1}#" * 10}] for i in range(12)} | {"l12": [{"rhs": "ha"}]}
    return swap("You close the {r.name}.", "#l0#")(text) + f'\ngrammar :: """{json.dumps(rules)}""";'


def crowd(text):
    """A list over all quadruples of objects: 20 ** 4 texts of 1,000 characters, in every room listing."""
    query = " & ".join(f"objectatlocation(o{i}:object, l{i}:location)" for i in range(6))
    return swap("#look.feedback#\\n\\n#task#", "[{'" + "x" * 1000 + "' | " + query + "}]")(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap("{o.indefinite + ' ' + o.name |", "{__import__('os').mkdir('OWNED') |"), "is not made of variable.name"),
        (swap("You close the {r.name}.", "{open('OWNED', 'w').name}"), "is not made of variable.name"),
        (swap("You close the {r.name}.", "{r.name.__class__}"), "is not made of variable.name"),
        (swap('template :: "open {r}"', 'template :: "open {r.__class__}"'), "must name exactly r"),
        (swap('template :: "open {r}"', 'template :: "open {r!r:>999999999}"'), "must name exactly r"),
        (laughs, "a text grows beyond 100000 characters"),
        (crowd, "has too many matches|a list grows beyond"),
        (swap("You close the {r.name}.", "#CloseObject.feedback#"), "symbol 'CloseObject.feedback' needs itself"),
        (swap("You close the {r.name}.", "{q.name}"), "the feedback of closeobject names 'q'"),
        (swap("You close the {r.name}.", "x" * 5000), "a text longer than 4000 characters"),
        (lambda text: text + 'grammar :: """' + "[" * 200_000 + '""";', "is not valid JSON"),
    ],
)
def test_hostile_grammar_does_nothing(game, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    file = game(grammar=change)
    with pytest.raises(DataError, match=message) as error:
        env = started({"id": "x", "file": str(file)})
        for command in ("go to drawer 1", "open drawer 1", "close drawer 1"):
            env.step(command)
    assert len(str(error.value)) < 2000
    assert not list(tmp_path.glob("**/OWNED"))


def test_hostile_problem_is_refused_quickly(game):
    many = " ".join(f"o{i}" for i in range(20_000))
    with pytest.raises(DataError, match=r"names in :objects, more than 5000"):
        household_files.read_game(game(pddl_problem=swap("(:objects", f"(:objects {many} - object")))


def test_older_wording_is_played_too(game):
    """Games made before 0.4 say "put X in/on Y" and where one arrives."""

    def older(text):
        text = swap('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"')(text)
        text = swap("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}.")(text)
        return swap("You arrive at {r.name}.", "You arrive at {lend.name}.")(text)

    env = started({"id": "x", "file": str(game(grammar=older))})
    assert "put THING in/on PLACE" in env.reset(env.task)[0]["content"]
    observations = [env.step(command)[0] for command in env.oracle_plan()]
    assert re.fullmatch(r"You arrive at loc \d+\. The drawer 1 is closed\.", observations[0])
    assert observations[-1] == "You put the soapbar 1 in/on the cabinet 9." and env.over
    env.reset(env.task)
    assert env.step("move soapbar 1 to cabinet 9")[0] == NOTHING


def test_an_object_in_two_receptacles_and_a_full_hand(game):
    """Facts of ALFRED's scenes: an object lies on a shelf that lies in a cabinet; and the start may be in the middle of things."""
    text = json.loads(game().read_text())["pddl_problem"]
    soap = re.search(r"SoapBar_\S+", text)[0]
    drawer = re.search(r"Drawer_\S+", text)[0]
    counter = re.search(r"CounterTop_\S+", text)[0]
    twice = started({"id": "x", "file": str(game(pddl_problem=swap("(:init", f"(:init (inReceptacle {soap} {counter})")))})
    assert sum(twice.game.numbers["soapbar 1"] in inside for inside in twice.state.contents) == 2
    assert_oracle_wins(twice)
    moved = swap(f"(inReceptacle {soap} {drawer})", f"(holds agent1 {soap}) (holdsAny agent1) (isClean {soap}) (opened {drawer})")
    held = started({"id": "y", "file": str(game(pddl_problem=moved))})
    assert held.inventory() == ["soapbar 1"] and len(held.oracle_plan()) <= 3
    assert held.step("go to drawer 1")[0] == "You arrive at drawer 1. The drawer 1 is open. In it, you see nothing."
    assert_oracle_wins(held)


def test_official_layout(tmp_path):
    source = real_data("alfworld_generated")
    folders = sorted(path.parent for path in source.rglob("game.tw-pddl"))
    for split, part in (("train", folders[:5]), ("valid_seen", folders[5:7]), ("valid_unseen", folders[7:9])):
        for folder in part:
            shutil.copytree(folder, tmp_path / split / folder.relative_to(source))
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755)
    extra = tmp_path / "train" / "pick_and_place_with_movable_recep-Pen-Mug-Desk-308" / "trial_1"
    shutil.copytree(folders[0], extra)
    unsolvable = tmp_path / "train" / "other" / "trial_2"
    shutil.copytree(folders[0], unsolvable)
    bare = tmp_path / "train" / "other" / "trial_3"
    shutil.copytree(folders[0], bare)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    (bare / "game.tw-pddl").unlink()
    data = json.loads((unsolvable / "game.tw-pddl").read_text())
    (unsolvable / "game.tw-pddl").write_text(json.dumps({**data, "solvable": False}))
    tasks = load(f"alfworld:{tmp_path}")
    assert (len(tasks.train), len(tasks.eval), tasks.max_turns) == (5, 4, 50)
    assert [t["split"] for t in tasks.eval] == ["seen", "seen", "unseen", "unseen"]
    assert tasks.train[0]["id"].startswith("train/") and {t["split"] for t in tasks.train} == {"train"}
    assert tasks.notes["games"] == 9
    assert tasks.notes["skipped"] == {"movable receptacle or sliced object": 1, "not marked solvable": 1, "no game.tw-pddl": 1}
    env = tasks.make_env()
    assert env.max_turns == 50 and len(env.reset(tasks.eval[0])) == 2


def test_other_folders_split_by_path(alfworld):
    assert alfworld.train and alfworld.eval and not {t["id"] for t in alfworld.train} & {t["id"] for t in alfworld.eval}
    assert {t["split"] for t in alfworld.eval} <= {"seen", "unseen"}
