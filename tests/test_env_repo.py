"""Repository repair: tasks that hold what they promise, real test runs that decide, and cheats that do not pay."""

import ast
import json
import os
import random
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from conftest import need_program, real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common import envs, sandbox
from common.envs import DataError, EnvironmentFailed, repo, repo_real, repo_tasks
from common.envs.repo import Action, RepoEnv, Verdict, hidden_verdict, is_protected, parse_action, trusted_grade, trusted_verdict, visible_verdict
from common.sandbox import SandboxError

RIGHT = {"check": "PASS", "exit": "yes"}


@pytest.fixture(scope="module")
def tasks():
    return envs.load("repo")


@pytest.fixture(scope="module")
def box():
    need_program("bwrap")
    assert sandbox.isolation_problem() == ""


def trusted_env() -> RepoEnv:
    return RepoEnv(visible=trusted_verdict, grade=trusted_grade)


def replay(env: RepoEnv, task: dict, conversation: list[dict]) -> list[tuple]:
    """Steps of a conversation's assistant messages; its observations must be the environment's."""
    assert env.reset(task) == conversation[:2]
    steps = []
    for said, seen in zip(conversation[2::2], [*conversation[3::2], None]):
        steps.append(env.step(said["content"]))
        assert seen is None or steps[-1][0] == seen["content"]
    return steps


def spread(rows, count):
    return list(rows)[:: max(1, len(rows) // count)][:count]


# ---------------------------------------------------------------- the generator


def test_the_task_set_is_what_the_docs_say(tasks):
    assert (len(tasks.train), len(tasks.eval), tasks.max_turns) == (800, 128, 12)
    everything = [*tasks.train, *tasks.eval]
    assert len({t["id"] for t in everything}) == len(everything) and len({t["family"] for t in everything}) == 10
    kinds = Counter(fault["kind"] for t in everything for fault in t["faults"])
    assert set(kinds) == set(repo_tasks.KINDS) and len(kinds) == 16 and min(kinds.values()) >= 3
    assert {len(t["faults"]) for t in everything} == {1, 2, 3}
    assert 0.3 < sum(t["trap"] is not None for t in everything) / len(everything) < 0.7
    assert json.loads(json.dumps(tasks.train[:20])) == tasks.train[:20]


def test_no_program_is_in_both_splits_and_no_task_twice(tasks):
    programs = {split: {json.dumps(t["fixed"], sort_keys=True) for t in rows} for split, rows in (("train", tasks.train), ("eval", tasks.eval))}
    assert not programs["train"] & programs["eval"]
    for rows in (tasks.train, tasks.eval):
        assert len({json.dumps([t["files"], t["fixed"]], sort_keys=True) for t in rows}) == len(rows)


def test_generation_is_deterministic_and_depends_on_the_seed():
    make = repo_tasks.generate.__wrapped__
    assert make("train", 12, 3) == make("train", 12, 3) and make("train", 12, 3) == make("train", 20, 3)[:12]
    assert make("train", 12, 3) != make("train", 12, 4)


@pytest.mark.parametrize("large", [False, True])
def test_every_fault_shows_and_is_one_line(large):
    for task in repo_tasks.generate("eval", 20 if large else 60, 1, large):
        lines = {name: text.splitlines() for name, text in task["files"].items()}
        for fault in task["faults"]:
            assert lines[fault["file"]][fault["line"] - 1] == fault["old"] != fault["new"]
            lines[fault["file"]][fault["line"] - 1] = fault["new"]
        assert {name: "\n".join(text) + "\n" for name, text in lines.items()} == task["fixed"]
        assert trusted_verdict(task, task["files"]).check == trusted_grade(task, task["files"]).check == "FAIL"
        assert trusted_verdict(task, task["fixed"]).check == trusted_grade(task, task["fixed"]).check == "PASS"
        for fault in task["faults"]:  # each fault alone fails both suites
            broken = {**task["fixed"]}
            text = broken[fault["file"]].splitlines()
            text[fault["line"] - 1] = fault["old"]
            broken[fault["file"]] = "\n".join(text) + "\n"
            assert trusted_verdict(task, broken).check == trusted_grade(task, broken).check == "FAIL"
        assert f"test_{task['issue']}:" in trusted_verdict(task, task["files"]).text or len(task["cases"]) > repo.SHOWN_FAILURES
        if large:
            assert len(task["files"]) == 6 and len(task["faults"]) in (2, 3)


def test_traps_pass_the_target_and_break_another_test(tasks):
    trapped = [t for t in tasks.train if t["trap"]]
    for task in trapped[:150]:
        trap = task["trap"]
        assert trap["helper"] != trap["function"] and trap["function"] in {f["function"] for f in task["faults"]}
        assert trap["helper"] not in {f["function"] for f in task["faults"]}
        files = dict(task["files"])
        text = files[trap["file"]].splitlines()
        assert text[trap["line"] - 1] == trap["old"]
        text[trap["line"] - 1] = trap["new"]
        files[trap["file"]] = "\n".join(text) + "\n"

        def failing(f, cases=task["cases"]):
            values = repo_tasks.evaluate(f, [call for call, _ in cases.values()])
            return {name for name, value in zip(cases, values) if repo_tasks.outcome(value, cases[name][1])}

        before, after = failing(task["files"]), failing(files)
        assert f"test_{trap['function']}" in before - after and after - before
        assert trusted_grade(task, files).check == "FAIL"


def test_words_and_mutations_of_a_function():
    words = {
        "x * 3 + 2": "x times 3 plus 2",
        "2 if x <= 5 else x": "2 when x up to 5 otherwise x",
        "late(x) and late(y)": "late of x both late of y",
        "min(x, 4) - xs[-1]": "least of x with 4 minus last of xs",
        "s[:3] + s": "s until 3 plus s",
    }
    for code, text in words.items():
        assert repo_tasks.in_words(ast.parse(code, mode="eval").body) == text
    made = {}
    for kind, make in repo_tasks.mutations('def f(x, y, k=2):\n    """words"""\n    return g(x, y) - k if x < y or y > 3 else min(x, y)'):
        made.setdefault(kind, set()).add(make().splitlines()[-1].strip() if kind != "default" else make().splitlines()[0])
    assert made["default"] == {"def f(x, y, k=3):", "def f(x, y, k=1):"}
    assert "return g(y, x) - k if x < y or y > 3 else min(x, y)" in made["arguments"]
    assert "return min(x, y)" in made["branch"] and "return x - k if x < y or y > 3 else min(x, y)" in made["call"]
    assert "return min(x, y) if x < y or y > 3 else g(x, y) - k" in made["negation"]
    assert "return k - g(x, y) if x < y or y > 3 else min(x, y)" in made["operands"]
    assert "return g(x, y) if x < y or y > 3 else min(x, y)" in made["operand"]
    assert "return g(x, y) - k if x < y and y > 3 else min(x, y)" in made["boolean"] and "return g(x, y) - k if x < y else min(x, y)" in made["condition"]
    assert {"return g(x, y) - k if x <= y or y > 3 else min(x, y)", "return g(x, y) - k if x < y or y >= 3 else min(x, y)"} == made["boundary"]
    assert (
        "return g(x, y) - k if x < y or y > 3 else max(x, y)" in made["function"] and "return g(x, x) - k if x < y or y > 3 else min(x, y)" in made["variable"]
    )


# ---------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("test", Action("test")),
        ("I think so.\nsubmit  ", Action("submit")),
        ("list", Action("list")),
        ("read a.py", Action("read", "a.py")),
        ("read a/b.py 3", Action("read", "a/b.py", 3)),
        ("read a.py 3-9", Action("read", "a.py", 3, 9)),
        ("search def f(", Action("search", text="def f(")),
        ("edit a.py 3: return x: y", Action("edit", "a.py", 3, 0, "return x: y")),
        ("edit a.py 3:     return x", Action("edit", "a.py", 3, 0, "    return x")),
        ("edit a.py 3-5: if x:\n    return y\n", Action("edit", "a.py", 3, 5, "if x:\n    return y")),
        ("edit a.py 3:", Action("edit", "a.py", 3, 0, "")),
        ("plan: read it\nread a.py\nsubmit", Action("read", "a.py")),
        ("", None),
        ("please submit", None),
        ("read", None),
        ("edit a.py: x", None),
        ("edit a.py x: y", None),
        ("tests", None),
    ],
)
def test_parsing(text, action):
    assert parse_action(text) == action


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_turn(text):
    task = repo_tasks.generate("train", 12, 3)[0]
    env = trusted_env()
    env.reset(task)
    observation, reward, terminated, truncated, info = env.step(text)
    assert isinstance(observation, str) and not truncated and terminated == (info["verb"] == "submit") and reward == 0.0
    assert info["invalid"] == (parse_action(text) is None) and (not info["invalid"] or (info["check"], info["exit"]) == ("NA", "no"))


def test_observations_of_each_action():
    task = {"issue": "f", "files": {"a.py": "def f(x):\n    return x\n", "b.py": "from a import f\n"}, "tests": {"test_a.py": "import a\n"}}
    env = RepoEnv(visible=lambda t, f: Verdict("FAIL", False, "STOPPED: why"), grade=lambda t, f: Verdict("PASS", True, ""))
    assert env.reset(task)[1]["content"] == "f is wrong\nfiles: a.py b.py test_a.py"
    ok, bad = {"check": "NA", "exit": "yes"}, {"check": "NA", "exit": "no"}
    key = env.state_key()
    for text, observation, expected in [
        ("list", "a.py b.py test_a.py", ok),
        ("read a.py", "1 def f(x):\n2     return x", ok),
        ("read a.py 2", "2     return x", ok),
        ("read a.py 5-6", "no such lines", bad),
        ("read c.py", "no file c.py", bad),
        ("search f", "a.py 1: def f(x):\nb.py 1: from a import f", ok),
        ("search zebra", "nothing found", bad),
        ("edit a.py 4: x", "a.py has lines 1 to 2", bad),
        ("edit a.py 2-1: x", "a.py has lines 1 to 2", bad),
        ("edit c.py 2: x", "no file c.py; line 1 makes one", bad),
        ("edit test_a.py 1: x", "test_a.py may not be changed", bad),
        ("nonsense", "no action; use list, read, search, edit, test or submit", bad),
        ("test", "STOPPED: why", {"check": "FAIL", "exit": "no"}),
    ]:
        seen, reward, terminated, truncated, info = env.step(text)
        assert (seen, reward, terminated, truncated) == (observation, 0.0, False, False), text
        assert {k: info[k] for k in expected} == expected
        assert env.state_key() == key
    assert env.step("edit a.py 2: return x + 1")[0] == "edited" and env.files["a.py"] == "def f(x):\n    return x + 1\n" and env.state_key() != key
    env.step("edit a.py 2: y = x\nreturn y")
    assert env.files["a.py"] == "def f(x):\n    y = x\n    return y\n"
    env.step("edit a.py 2-3:   return x")
    assert env.files["a.py"] == "def f(x):\n  return x\n"
    env.step("edit a.py 2:")
    assert env.files["a.py"] == "def f(x):\n"
    env.step("edit sub/new.py 1: x = 1\ny = 2")
    assert env.files["sub/new.py"] == "x = 1\ny = 2\n"
    _, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["success"], info["rewards"]) == (1.0, True, 1.0, {"resolved": 1.0}) and {k: info[k] for k in RIGHT} == RIGHT
    with pytest.raises(RuntimeError):
        env.step("test")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.py", "a/../../x.py", "./a.py", "a//b.py", "tests/../conftest.py"])
def test_edits_stay_inside(name):
    env = trusted_env()
    env.reset(repo_tasks.generate("train", 12, 3)[0])
    before = dict(env.files)
    observation, *_, info = env.step(f"edit {name} 1: x = 1")
    assert observation == f"no file {name}" and info["exit"] == "no" and env.files == before


@pytest.mark.parametrize(
    "name",
    "test_a.py a_test.py s/conftest.py tests/helper.py pytest.ini setup.cfg pyproject.toml tox.ini sitecustomize.py x.pth pytest.py _pytest/x.py".split(),
)
def test_what_decides_about_tests_is_protected(name):
    assert is_protected(name) and is_protected(name.upper())
    env = trusted_env()
    env.reset(repo_tasks.generate("train", 12, 3)[0])
    assert env.step(f"edit {name} 1: x = 1")[0] == f"{name} may not be changed"


def test_a_run_sees_the_policys_sources_and_the_tasks_own_tests():
    original = {"a.py": "old", "conftest.py": "own", "gone.py": "x", "tests/t.py": "own"}
    working = {"a.py": "new", "conftest.py": "changed", "b.py": "new", "test_new.py": "x", "test_a.py": "changed"}
    assert repo.checked_files(working, original, {"test_a.py": "given"}) == {
        "a.py": "new", "b.py": "new", "conftest.py": "own", "tests/t.py": "own", "test_a.py": "given",
    }  # fmt: skip


def test_sources_are_not_protected():
    assert not any(map(is_protected, ["a.py", "contest.py", "latest.py", "src/testing_tools.py", "protest/a.py", "attest.txt"]))


def test_snapshots_are_exact(tasks):
    task = tasks.train[5]
    env, other = trusted_env(), trusted_env()
    env.reset(task)
    env.step("read " + task["faults"][0]["file"])
    saved, key = env.snapshot(), env.state_key()
    for _ in range(2):
        first = env.step(env.oracle_action())
        assert env.state_key() != key
        env.step("edit new.py 1: x")
        env.step("submit")
        env.restore(saved)
        assert env.state_key() == key and env.step("test")[0].startswith("FAIL")
    other.restore(saved)
    assert other.state_key() == key and other.step(other.oracle_action()) == first and env.state_key() == key


def test_state_key_is_about_names_and_contents():
    assert repo.tree_hash({"a": "1", "b": "2"}) == repo.tree_hash({"b": "2", "a": "1"})
    assert len({repo.tree_hash(t) for t in ({"a": "b"}, {"ab": ""}, {"": "ab"}, {"a": "b", "": ""}, {"a": "1", "b": "2"}, {"a": "2", "b": "1"})}) == 6


# ---------------------------------------------------------------- the expert


def test_the_expert_resolves_everything(tasks):
    for i, task in enumerate([*tasks.train[:200], *tasks.eval]):
        steps = replay(trusted_env(), task, tasks.demonstrate(task, random.Random(i)))
        assert steps[-1][1] == 1.0 and len(steps) <= tasks.max_turns and not any(s[4]["invalid"] or s[4]["exit"] == "no" for s in steps)


def test_the_careless_expert_fails_often_and_in_every_way(tasks):
    success, checks = [], Counter()
    for i, task in enumerate(tasks.train[:400]):
        steps = replay(trusted_env(), task, tasks.careless(task, random.Random(i)))
        success.append(steps[-1][1])
        checks.update(s[4]["check"] for s in steps if s[4]["verb"] == "test")
        checks["untested"] += steps[-2][4]["verb"] != "test"
        checks["in spite"] += steps[-2][4]["check"] == "FAIL"
        trap = task["trap"]
        checks["trap"] += trap is not None and any(
            f"edit {trap['file']} {trap['line']}: {trap['new'].strip()}" in repr(s) for s in tasks.careless(task, random.Random(i))
        )
    assert 0.2 < sum(success) / len(success) < 0.6
    assert min(checks[k] for k in ("PASS", "FAIL", "untested", "in spite", "trap")) >= 20


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 199), st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", "return 0", "x = 1\ny = 2", "def g(): pass"])), max_size=4))
def test_the_oracle_repairs_any_tree(number, edits):
    task = repo_tasks.generate("train", 200, 7)[number]
    env = trusted_env()
    env.reset(task)
    for line, text in edits:
        env.step(f"edit {task['faults'][0]['file']} {line}: {text}")
    for _ in range(20):
        action = env.oracle_action()
        if action == "submit":
            break
        assert env.step(action)[0] == "edited"
    assert {name: env.files[name] for name in task["fixed"]} == task["fixed"] and env.step(action)[1] == 1.0


def test_episodes_are_short_enough_for_a_tiny_policy(tasks):
    turns, characters = [], []
    for i, task in enumerate(tasks.train[:200]):
        conversation = tasks.careless(task, random.Random(i))
        turns.append(len(conversation) // 2 - 1 + len(conversation) % 2)
        characters.append(sum(len(m["content"]) for m in conversation))
    assert 3 <= sum(turns) / len(turns) <= 8 and sum(characters) / len(characters) < 1200


# ---------------------------------------------------------------- real runs


@pytest.mark.usefixtures("box")
def test_real_runs_agree_with_the_experts_shortcut(tasks):
    """The expert writes its conversations without processes: pytest in the sandbox says the same, text for text."""
    for task in [*spread(tasks.eval, 12), *repo_tasks.generate("eval", 20, 1, True)[:2]]:
        trees = [task["files"], task["fixed"]]
        if task["trap"]:
            trees.append({**task["files"], task["trap"]["file"]: task["files"][task["trap"]["file"]].replace(task["trap"]["old"], task["trap"]["new"])})
        for files in trees:
            assert visible_verdict(task, files) == trusted_verdict(task, files)
            assert hidden_verdict(task, files) == trusted_grade(task, files)


@pytest.mark.usefixtures("box")
def test_whole_episodes_with_real_runs(tasks):
    for i, task in enumerate(spread(tasks.eval, 6)):
        for expert in (tasks.demonstrate, tasks.careless):
            conversation = expert(task, random.Random(i))
            assert [s[1:] for s in replay(tasks.make_env(), task, conversation)] == [s[1:] for s in replay(trusted_env(), task, conversation)]


@pytest.mark.usefixtures("box")
def test_the_same_action_gives_the_same_verdict_twenty_times(tasks, monkeypatch):
    env = tasks.make_env()
    env.reset(tasks.eval[0])
    env.step(env.oracle_action().partition(":")[0] + ": return object()")  # its representation holds an address
    saved, seen = env.snapshot(), set()
    for _ in range(20):
        repo._cache.clear()
        env.restore(saved)
        observation, *_, info = env.step("test")
        seen.add((observation, info["check"], info["exit"]))
        env.restore(saved)
        *_, info = env.step("submit")
        seen.add((info["check"], info["exit"]))
    assert len(seen) == 2 and ("FAIL", "yes") in seen


@pytest.mark.usefixtures("box")
def test_verdicts_are_run_once_for_each_content(tasks, monkeypatch):
    runs = []
    real = repo.run_pytest
    monkeypatch.setattr(repo, "run_pytest", lambda *args, **limits: runs.append(1) or real(*args, **limits))
    repo._cache.clear()
    task = tasks.eval[1]
    for _ in range(3):
        env = tasks.make_env()
        env.reset(task)
        env.step("test"), env.step("edit extra.py 1: x = 1"), env.step("test"), env.step("submit")
    assert len(runs) == 3


def test_a_broken_sandbox_is_no_verdict(tasks, monkeypatch):
    def broken(*args, **limits):
        raise SandboxError("no box")

    env = tasks.make_env()
    env.reset(tasks.eval[2])
    with monkeypatch.context() as patch:
        patch.setattr(repo, "run_pytest", broken)
        repo._cache.clear()
        with pytest.raises(EnvironmentFailed, match="no box"):
            env.step("test")
    assert not repo._cache


@pytest.mark.usefixtures("box")
def test_crashes_and_hangs_are_not_clean(tasks, monkeypatch):
    monkeypatch.setitem(repo.LIMITS, "cpu_s", 1)
    task = tasks.eval[3]
    name = next(iter(task["files"]))
    for line, said in [("def broken(:", "SyntaxError"), ("import os; os._exit(0)", "STOPPED: ended with 0"), ("while True: pass", "STOPPED: ended with -9")]:
        env = tasks.make_env()
        env.reset(task)
        env.step(f"edit {name} 1-{task['files'][name].count(chr(10))}: {line}")
        observation, *_, info = env.step("test")
        assert said in observation and (info["check"], info["exit"]) == ("FAIL", "no")
        _, reward, _, _, info = env.step("submit")
        assert (reward, info["check"], info["exit"]) == (0.0, "FAIL", "no")


# ---------------------------------------------------------------- cheats

ANYTHING = """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
"""
PASS_ALL = """
import gc, os
for thing in gc.get_objects():
    if type(thing).__name__ == "Reporter" and hasattr(thing, "send"):
        import sys
        frame = sys._getframe()
        while frame and "session" not in frame.f_locals:
            frame = frame.f_back
        names = __NAMES__
        thing.send("collected", names)
        for name in names:
            thing.send("test", name, "call", "passed", "")
        thing.send("finished", 0)
        os._exit(0)
"""
CHEATS = {
    "patched runtest": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n",
    "patched reports": "import _pytest.runner as r\nold = r.TestReport.from_item_and_call.__func__\n"
    "def new(cls, item, call):\n    call.excinfo = None\n    return old(cls, item, call)\nr.TestReport.from_item_and_call = classmethod(new)\n",
    "values equal to everything": ANYTHING,
    "forged report": PASS_ALL,
    "exit 0": "import os\nos._exit(0)\n",
    "exit 0 at the first call": None,
    "skip": "import pytest\npytest.skip('no', allow_module_level=True)\n",
}


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize("cheat", CHEATS)
def test_code_that_bends_the_test_run_is_not_resolved(cheat, tasks):
    task = next(t for t in tasks.eval if t["family"] == "shop")
    names = list(task["outcomes"])
    head = (CHEATS[cheat] or "").replace("__NAMES__", repr(names))
    body = {"values equal to everything": "return Any()", "exit 0 at the first call": "import os; os._exit(0)"}.get(cheat, "return 0")
    files = {
        name: head + "\n".join(f"    {body}" if line.startswith("    return") else line for line in text.splitlines()) + "\n"
        for name, text in task["files"].items()
    }
    verdict = hidden_verdict(task, files)
    assert verdict.check == "FAIL"
    if cheat in ("patched runtest", "values equal to everything"):  # what a suite without tests that must fail would have said
        result = repo.cached_run({**files, **task["hidden"]}, tuple(task["hidden"]))
        assert result.passed and set(result.outcomes.values()) == {"passed"}


@pytest.mark.usefixtures("box")
def test_a_patch_of_tests_or_settings_is_not_seen_by_any_run(tasks):
    task = tasks.eval[4]
    test = next(iter(task["tests"]))
    everything_passes = (
        "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    outcome = yield\n    outcome.force_result(True)\n"
    )
    patched = {
        **task["files"],
        test: "def test_nothing():\n    pass\n",
        "conftest.py": everything_passes,
        "test_hidden.py": "def test_nothing():\n    pass\n",
        "pytest.ini": "[pytest]\naddopts = -k nothing\n",
        "sitecustomize.py": "import os; os._exit(0)",
    }
    assert visible_verdict(task, patched) == visible_verdict(task, task["files"]) and visible_verdict(task, patched).check == "FAIL"
    assert hidden_verdict(task, patched).check == "FAIL"
    assert hidden_verdict(task, {**patched, **task["fixed"]}).check == "PASS"


@pytest.mark.usefixtures("box")
def test_hidden_tests_catch_code_made_for_the_visible_ones(tasks):
    """Functions that know the visible calls by heart pass the visible tests only."""
    for task in spread(tasks.eval, 4):
        files = dict(task["files"])
        for fault in task["faults"]:
            call, value = task["cases"][f"test_{fault['function']}"]
            lines = files[fault["file"]].splitlines()
            lines[fault["line"] - 1] = f"    return {value!r}" if not fault["old"].startswith("def") else fault["new"]
            files[fault["file"]] = "\n".join(lines) + "\n"
        if any(fault["old"].startswith("def") for fault in task["faults"]):
            continue
        assert hidden_verdict(task, files).check == "FAIL", call


# ---------------------------------------------------------------- Harbor folders


@pytest.fixture(scope="module")
def harbor(box):
    return envs.load(f"repo:{real_data('harbor_own')}")


@pytest.mark.usefixtures("box")
def test_harbor_reward_is_0_before_and_1_after_the_solution(harbor):
    everything = [*harbor.train, *harbor.eval]
    assert sorted(t["id"] for t in everything) == ["local/fix-invoice-total", "local/interval-merge", "local/log-report"] and len(harbor.eval) == 1
    for task in everything:
        env = repo_real.HarborEnv()
        assert env.reset(task)[1]["content"] == Path(task["folder"], "instruction.md").read_text().strip()
        saved, key = env.snapshot(), env.state_key()
        _, reward, terminated, _, info = env.step("submit")
        assert (reward, terminated, info["check"], info["exit"], info["rewards"]) == (0.0, True, "FAIL", "yes", {"reward": 0.0})
        env.restore(saved)
        assert env.state_key() == key
        observation, *_, info = env.step("I run the solution.\nrun " + Path(task["folder"], "solution/solve.sh").read_text())
        assert (observation, info["check"], info["exit"]) == ("done", "NA", "yes") and env.state_key() != key
        _, reward, _, _, info = env.step("submit")
        assert (reward, info["success"], info["check"]) == (1.0, 1.0, "PASS")
        env.close()


@pytest.mark.usefixtures("box")
def test_harbor_commands(harbor):
    env = repo_real.HarborEnv()
    env.reset(harbor.train[0])
    assert env.step("run echo a; pwd; exit 3")[0] == "a\n/app\nexit 3"
    assert env.step("run cat <<X\ntwo\nlines\nX")[0] == "two\nlines"
    assert env.step("run ls /tests /logs /solution")[4]["exit"] == "no"
    assert env.step("please")[4] == {"check": "NA", "exit": "no", "verb": "", "invalid": True}
    assert len(env.step("run seq 100000")[0]) < repo_real.OUTPUT_CHARS + 100
    folder = env.box.root
    env.close()
    assert not Path(folder).exists()


@pytest.mark.usefixtures("box")
def test_harbor_links_lead_nowhere(harbor, tmp_path):
    """What a policy leaves in its folder cannot make the host read or write elsewhere."""
    (tmp_path / "reward.txt").write_text("1")
    env = repo_real.HarborEnv()
    env.reset(harbor.train[0])
    env.step(f"run ln -s {tmp_path} out; ln -s {tmp_path}/reward.txt reward.txt; mkfifo pipe; mkdir -p deep/er; chmod 0 deep/er")
    saved = env.snapshot()
    assert sorted(os.listdir(saved[1].folder)) == sorted({*os.listdir(env.box.app)} - {"pipe"}) and (saved[1].folder / "out").is_symlink()
    assert env.step("submit")[1] == 0.0 and (tmp_path / "reward.txt").read_text() == "1" and list(tmp_path.iterdir()) == [tmp_path / "reward.txt"]
    env.restore(saved)
    env.close()


@pytest.mark.parametrize(
    ("files", "rewards"),
    [
        ({"reward.txt": "1\n"}, {"reward": 1.0}),
        ({"reward.txt": "0.25"}, {"reward": 0.25}),
        ({"reward.json": '{"a": 1, "b": 0.5}', "reward.txt": "0"}, {"a": 1.0, "b": 0.5}),
        ({"reward.txt": "nan"}, None),
        ({"reward.txt": "inf"}, None),
        ({"reward.txt": "yes"}, None),
        ({"reward.json": "[1]"}, None),
        ({"reward.json": "{}"}, None),
        ({"reward.json": '{"a": "x"}'}, None),
        ({}, None),
    ],
)
def test_rewards_are_finite_numbers(files, rewards, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert repo_real.read_reward(tmp_path) == rewards


def test_a_reward_behind_a_link_or_pipe_is_none(tmp_path):
    (tmp_path / "elsewhere").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "elsewhere")
    assert repo_real.read_reward(tmp_path) is None
    (tmp_path / "reward.txt").unlink()
    os.mkfifo(tmp_path / "reward.txt")
    assert repo_real.read_reward(tmp_path) is None


def harbor_folder(root: Path, name: str, **changes: str | None) -> None:
    files = {"task.toml": "", "instruction.md": "Do it.", "environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY . /app/\n", "tests/test.sh": "true"}
    for file, text in {**files, **{k.replace("__", "/").replace("_toml", ".toml"): v for k, v in changes.items()}}.items():
        if text is not None:
            (root / name / file).parent.mkdir(parents=True, exist_ok=True)
            (root / name / file).write_text(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_toml": "x = "}, "task.toml: not TOML"),
        ({"task_toml": "[[steps]]\nname='a'"}, r"\[\[steps\]\] are not supported"),
        ({"task_toml": "[verifier]\ntimeout_sec = -1"}, r"\[verifier\] timeout_sec is -1"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"environment/Dockerfile": None}, "environment/Dockerfile is missing"),
    ],
)
def test_bad_harbor_folders_are_named(changes, message, tmp_path):
    harbor_folder(tmp_path, "a")
    harbor_folder(tmp_path, "b", **changes)
    with pytest.raises(DataError, match=f"b.*{message}"):
        envs.load(f"repo:{tmp_path}")


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        envs.load(f"repo:{tmp_path}/none")
    with pytest.raises(DataError, match=r"neither TASK/task.toml nor"):
        envs.load(f"repo:{tmp_path}")
    harbor_folder(tmp_path, "a")
    with pytest.raises(DataError, match="1 task; at least two"):
        envs.load(f"repo:{tmp_path}")
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(DataError, match="both"):
        envs.load(f"repo:{tmp_path}")


@pytest.mark.usefixtures("box")
def test_what_only_docker_can_do_is_said(tmp_path):
    harbor_folder(tmp_path, "a", **{"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY data.txt /etc/data.txt\n"})
    harbor_folder(tmp_path, "b")
    task = next(t for t in (repo_real.harbor_task(tmp_path / name) for name in "ab") if t["copies"][0][0] == "data.txt")
    with pytest.raises(EnvironmentFailed, match=r"copies data.txt to /etc/data.txt, outside .* needs docker"):
        repo_real.HarborEnv().reset(task)


def test_docker_is_used_through_its_command_line(tmp_path, monkeypatch):
    """A stand-in for the docker client that keeps each container as a folder: the calls and what is read back."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/bash
            root={tmp_path}/containers
            echo "$1" >> {tmp_path}/calls
            case "$1" in
              info) exit 0;;
              build) mkdir -p $root/image; cp -r "${{@: -1}}"/app/. $root/image;;
              run) for a in "$@"; do [ -d "$root/$a" ] && from="$a"; done; n=c$RANDOM; cp -r "$root/$from" "$root/$n"; mkdir -p "$root/$n/logs"; echo $n;;
              commit) n=i$RANDOM; cp -r "$root/$2" "$root/$n"; echo $n;;
              rm) rm -rf "$root/$3";;
              cp) if [[ "$2" == *:/logs/verifier ]]; then cp -r "$root/${{2%%:*}}/logs/verifier" "$3"; else cp -r "$2" "$root/${{3%%:*}}/tests"; fi;;
              exec) shift; while [ "$1" = -e ]; do shift 2; done; cd "$root/$1"; shift 5
                    for a in "$@"; do shift; a="${{a//\\/logs/logs}}"; set -- "$@" "${{a//\\/tests/tests}}"; done; exec "$@";;
            esac
            """
        )
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    repo_real.docker_answers.cache_clear()
    try:
        for name in "ab":
            harbor_folder(
                tmp_path / "tasks", name, **{"tests/test.sh": "grep -q good value && echo 1 > logs/verifier/reward.txt || echo 0 > logs/verifier/reward.txt"}
            )
            (tmp_path / "tasks" / name / "environment" / "app").mkdir()
            (tmp_path / "tasks" / name / "environment" / "app" / "value").write_text("bad\n")
        monkeypatch.setattr(repo_real._Container, "__init__", _named_image)
        tasks = envs.load(f"repo:{tmp_path / 'tasks'}")
        assert tasks.notes == {"run in": "docker"}
        env = tasks.make_env()
        env.reset(tasks.train[0])
        saved, key = env.snapshot(), env.state_key()
        assert env.step("run cat value; exit 4")[0] == "bad\nexit 4"
        assert env.step("run echo good > value")[0] == "done" and env.state_key() != key
        assert env.step("submit")[1] == 1.0
        env.restore(saved)
        assert env.state_key() == key and env.step("submit")[1] == 0.0
        env.close()
        assert {"build", "run", "exec", "commit", "cp", "rm"} <= set((tmp_path / "calls").read_text().split())
    finally:
        repo_real.docker_answers.cache_clear()


def _named_image(self, task):
    self.task, self.image = task, "image"
    self.call("build", "-q", "-t", "image", str(Path(task["folder"], "environment")))
    self.start("image")


# ---------------------------------------------------------------- SWE-bench records


def records(root: Path, count: int = 2, **changes) -> None:
    rows = []
    for i in range(count):
        checkout = root / f"demo-{i}"
        (checkout / "tests").mkdir(parents=True)
        (checkout / "pkg").mkdir()
        (checkout / "pkg/__init__.py").write_text("")
        (checkout / "pkg/area.py").write_text("def area(w, h):\n    return w + h\n\n\ndef side(a):\n    return a\n")
        (checkout / "tests/test_area.py").write_text("from pkg.area import side\n\n\ndef test_side():\n    assert side(3) == 3\n")
        (checkout / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
        (checkout / "logo.bin").write_bytes(b"\xff\xfe\x00")
        (checkout / "outside").symlink_to("/etc/passwd")
        patch = (
            "--- a/tests/test_area.py\n+++ b/tests/test_area.py\n@@ -1,5 +1,9 @@\n-from pkg.area import side\n+from pkg.area import area, side\n \n \n"
            " def test_side():\n     assert side(3) == 3\n+\n+\n+def test_area():\n+    assert area(2, 5) == 10\n"
        )
        rows.append(
            {
                "instance_id": f"demo-{i}", "repo": "demo/demo", "base_commit": "0" * 40, "problem_statement": "area adds", "patch": "", "test_patch": patch,
                "FAIL_TO_PASS": json.dumps(["tests/test_area.py::test_area"]), "PASS_TO_PASS": ["tests/test_area.py::test_side"], **changes,
            }
        )  # fmt: skip
    (root / "records.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.mark.usefixtures("box")
def test_a_record_is_resolved_by_its_own_tests(tmp_path):
    need_program("git")
    records(tmp_path)
    tasks = envs.load(f"repo:{tmp_path}")
    assert (len(tasks.train), len(tasks.eval)) == (1, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()}
    env = tasks.make_env()
    message = env.reset(tasks.train[0])[1]["content"]
    assert message == "area adds\nfiles: pkg/__init__.py pkg/area.py"
    assert env.step("list")[0] == "pyproject.toml pkg/__init__.py pkg/area.py tests/test_area.py"
    assert env.step("read outside")[0] == "no file outside" and env.step("edit tests/test_area.py 1: x")[0].endswith("may not be changed")
    observation, *_, info = env.step("test")
    assert observation == "PASS 1 tests" and {k: info[k] for k in RIGHT} == RIGHT
    saved = env.snapshot()
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["check"], info["exit"]) == (0.0, "FAIL", "yes")
    env.restore(saved)
    assert env.step("edit pkg/area.py 2: return w * h")[0] == "edited"
    env.step("edit pkg/area.py 6: return a + 1")  # breaks PASS_TO_PASS
    observation, *_, info = env.step("test")
    assert "assert" not in observation and "test_side: 4 == 3" in observation and (info["check"], info["exit"]) == ("FAIL", "yes")
    saved = env.snapshot()
    assert env.step("submit")[1] == 0.0
    env.restore(saved)
    env.step("edit pkg/area.py 6: return a")
    assert env.step("submit")[1] == 1.0
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_statement": None}, "records.jsonl:1: field 'problem_statement' must be text"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "tests"}, "'FAIL_TO_PASS' is not a JSON list"),
        ({"PASS_TO_PASS": ["test_a (app.Tests)"]}, "'PASS_TO_PASS' must be a list of pytest node ids"),
        ({"instance_id": "../up"}, "instance_id '../up' cannot name"),
        ({"instance_id": "other"}, "no checkout at .*other; put the repository at base_commit 0000"),
    ],
)
def test_bad_records_are_named(changes, message, tmp_path):
    records(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        envs.load(f"repo:{tmp_path}")


def test_a_patch_that_does_not_apply_is_said_and_none_leaves_the_checkout(tmp_path):
    need_program("git")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.py").write_text("x = 1\n")
    (tmp_path / "repo/link").symlink_to(tmp_path)
    for patch in (
        "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 2\n+x = 3\n",
        "--- /dev/null\n+++ b/../out.py\n@@ -0,0 +1 @@\n+x\n",
        "--- /dev/null\n+++ b/link/out.py\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/new b/new\nnew file mode 120000\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+/etc/passwd\n\\ No newline at end of file\n"
        "diff --git a/new/x b/new/x\nnew file mode 100644\n--- /dev/null\n+++ b/new/x\n@@ -0,0 +1 @@\n+x\n",
    ):
        with pytest.raises(DataError, match="record r: test_patch does not apply"):
            repo_real.apply_patch(tmp_path / "repo", patch, "r")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["repo"] and not (tmp_path / "repo/new").exists()
    assert subprocess.run(["git", "--version"], capture_output=True).returncode == 0
