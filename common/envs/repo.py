"""Repository repair: read, edit, run the tests, submit. Real pytest runs in the sandbox decide.

One action a turn: the first line of a response that is one (what stands before it is reasoning).

    list                        the files
    read FILE [FIRST-LAST]      numbered lines
    search TEXT                 lines that contain the text
    edit FILE LINE: NEW         replaces a line (line 1 of a new file makes it); FILE FIRST-LAST: replaces several. Further lines of the response belong
                                to the new text; no text deletes. In place of a single line, text without indentation takes that line's
    test                        runs the visible tests
    submit                      ends the episode: hidden tests grade it

Every step's ``info`` holds what the verifier read off the real run: ``check`` (PASS or FAIL when tests ran, else NA) and ``exit`` (yes or no: the action, or
the test run, ended cleanly; failing tests are clean, a crash, a hang, a syntax error or an early exit is not).

``repo`` is the generated task set (``repo_tasks.py``), ``repo:large`` the same with larger repositories, ``repo:FOLDER`` Harbor task folders or SWE-bench
records (``repo_real.py``).
"""

from __future__ import annotations

import hashlib
import posixpath
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.envs import EnvironmentFailed, Message, TaskSet, repo_tasks
from common.sandbox import SandboxError
from common.sandbox_pytest import PytestResult, run_pytest

SYSTEM = "Repair the code. One action a turn: list | read FILE | search TEXT | edit FILE LINE: NEW | test | submit"
TRAIN_TASKS, EVAL_TASKS, MAX_TURNS = 800, 128, 12
LARGE_TRAIN_TASKS, LARGE_EVAL_TASKS, LARGE_MAX_TURNS = 300, 64, 30
MAX_CHARS = 20_000  # of a response, and of a file after an edit
SHOWN_LINES = 200  # of a file or a search
SHOWN_FAILURES = 4
MESSAGE_CHARS = 120
CACHED_RUNS = 50_000  # verdicts kept, by the hash of all that a run can depend on
LIMITS = {"wall_s": 20.0, "cpu_s": 2, "memory_mb": 1024, "file_mb": 16, "processes": 32}

_ACTION = re.compile(
    r"(?P<verb>list|test|submit)|(?P<read>read) (?P<rfile>\S+)(?: (?P<r1>\d+)(?:-(?P<r2>\d+))?)?|(?P<search>search) (?P<text>\S.*)"
    r"|(?P<edit>edit) (?P<efile>\S+) (?P<e1>\d+)(?:-(?P<e2>\d+))?:(?P<new>.*)"
)


@dataclass(frozen=True)
class Action:
    """One parsed action. Lines count from 1; ``last`` is included, and 0 for a single line."""

    verb: str
    file: str = ""
    first: int = 0
    last: int = 0
    text: str = ""


def parse_action(response: str) -> Action | None:
    """The first line that is an action; None when there is none. Of an edit, all that follows the colon is the new text."""
    lines = response[:MAX_CHARS].splitlines()
    for number, line in enumerate(lines):
        m = _ACTION.fullmatch(line.rstrip())
        if m is None:
            continue
        if m["verb"]:
            return Action(m["verb"])
        if m["read"]:
            return Action("read", m["rfile"], int(m["r1"] or 0), int(m["r2"] or 0))
        if m["search"]:
            return Action("search", text=m["text"])
        new = "\n".join([m["new"], *lines[number + 1 :]]).rstrip()
        return Action("edit", m["efile"], int(m["e1"]), int(m["e2"] or 0), new.removeprefix(" "))
    return None


# ---------------------------------------------------------------- what a policy may not change


def is_protected(name: str) -> bool:
    """Whether a file decides about tests rather than being tested: tests, conftest and the settings of pytest and of Python's start."""
    parts = name.lower().split("/")
    last = parts[-1]
    return (
        any(part in ("tests", "test", "testing") for part in parts[:-1])
        or last.startswith("test_")
        or last.endswith(("_test.py", ".pth"))
        or last in ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "pytest.toml", "sitecustomize.py", "usercustomize.py")
        or any(part.partition(".")[0] in ("pytest", "_pytest", "pluggy") for part in parts)
    )


def checked_files(working: Mapping[str, str], original: Mapping[str, str], tests: Mapping[str, str]) -> dict[str, str]:
    """What a run sees: the policy's sources, and everything that decides about tests as the task had it."""
    files = {name: text for name, text in working.items() if not is_protected(name)}
    files |= {name: text for name, text in original.items() if is_protected(name)}
    return files | dict(tests)


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """What a test run said: PASS or FAIL, whether it ended cleanly, and the text for the policy."""

    check: str
    clean: bool
    text: str


_cache: OrderedDict[str, Future[PytestResult]] = OrderedDict()
_cache_lock = threading.Lock()


def cached_run(files: Mapping[str, str], tests: tuple[str, ...]) -> PytestResult:
    """``run_pytest``, once for each content. Raises EnvironmentFailed when the sandbox itself failed; that is not kept."""
    key = tree_hash({**files, "\0tests": "\0".join(tests)})
    with _cache_lock:
        found = _cache.get(key)
        mine = found is None
        future = _cache[key] = found or Future()
        _cache.move_to_end(key)
        if len(_cache) > CACHED_RUNS:
            _cache.popitem(last=False)
    if mine:
        try:
            future.set_result(run_pytest(files, tests, **LIMITS))  # type: ignore[arg-type]
        except BaseException as error:
            with _cache_lock:
                _cache.pop(key, None)
            future.set_exception(error)
    try:
        return future.result()
    except SandboxError as error:
        raise EnvironmentFailed(f"the sandbox failed: {error}") from error


def tree_hash(files: Mapping[str, str]) -> str:
    """Hash of names and contents, independent of their order."""
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        for part in (name, text):
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:24]


def failure_line(message: str) -> str:
    """The one line of a failure that says most: pytest's ``assert left == right`` as ``left == right``, an import's error instead of its traceback."""
    lines = message.splitlines() or [""]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[-1] if errors else lines[0]).removeprefix("AssertionError: ").removeprefix("assert ")[:MESSAGE_CHARS]


def report(failures: list[tuple[str, str]], count: int) -> str:
    """The text of a run: ``failures`` are (test, message)."""
    if not failures:
        return f"PASS {count} tests"
    shown = [f"{name}: {failure_line(message)}" for name, message in failures[:SHOWN_FAILURES]]
    more = [f"and {len(failures) - SHOWN_FAILURES} more"] if len(failures) > SHOWN_FAILURES else []
    return "\n".join([f"FAIL {len(failures)} of {count}", *shown, *more])


def visible_verdict(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """The visible tests, in the sandbox."""
    result = cached_run(checked_files(files, task["files"], task["tests"]), tuple(task["tests"]))
    if result.problem:
        return Verdict("FAIL", False, f"STOPPED: {result.problem}")
    failures = [(n.rpartition("::")[2], result.messages.get(n, outcome)) for n, outcome in result.outcomes.items() if outcome in ("failed", "error")]
    return Verdict("PASS" if result.passed else "FAIL", result.clean, report(failures, len(result.outcomes)))


def hidden_verdict(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """The grade. Each hidden test must have just the outcome that the task names: tests with right values pass, tests with wrong values fail."""
    sources = {name: text for name, text in checked_files(files, task["files"], {}).items() if not is_protected(name)}
    result = cached_run({**sources, **task["hidden"]}, tuple(task["hidden"]))
    good = result.clean and result.outcomes == task["outcomes"]
    return Verdict("PASS" if good else "FAIL", result.clean, "")


def trusted_verdict(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """``visible_verdict`` without a process, for the generator's own texts only: what the scripted expert writes. A test compares the two."""
    cases = task["cases"]
    values = repo_tasks.evaluate({name: files[name] for name in task["files"]}, [call for call, _ in cases.values()])
    messages = {name: repo_tasks.outcome(value, expected) for (name, (_, expected)), value in zip(cases.items(), values)}
    failures = [(name, message) for name, message in messages.items() if message]
    return Verdict("FAIL" if failures else "PASS", True, report(failures, len(cases)))


def trusted_grade(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """``hidden_verdict`` without a process, for the same texts."""
    rows = [(call, value) for call, value, expected in task["hidden_cases"] if expected == "passed"]
    values = repo_tasks.evaluate({name: files[name] for name in task["files"]}, [call for call, _ in rows])
    good = not any(repo_tasks.outcome(value, expected) for value, (_, expected) in zip(values, rows))
    return Verdict("PASS" if good else "FAIL", True, "")


# ---------------------------------------------------------------- the environment


class RepoEnv:
    """Episodes on files in memory. ``visible`` and ``grade`` run the tests; the scripted expert replaces the first by ``trusted_verdict``."""

    def __init__(self, visible: Callable[..., Verdict] = visible_verdict, grade: Callable[..., Verdict] = hidden_verdict):
        self.visible, self.grade = visible, grade
        self.task: dict[str, Any] | None = None
        self.files: dict[str, str] = {}
        self.done = True

    def reset(self, task: dict[str, Any]) -> list[Message]:
        """System and user message of a task as made by ``load``."""
        self.task, self.done = task, False
        self.files = {**task["files"], **task["tests"]}
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{task['issue']} is wrong\nfiles: {' '.join(self.files)}"}]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One action. ``info``: check, exit, verb, invalid; at the end also success and rewards {"resolved"}.

        Raises RuntimeError when no episode is open, EnvironmentFailed when the sandbox failed.
        """
        if self.task is None or self.done:
            raise RuntimeError("step() before reset(), or after the episode's end")
        parsed = parse_action(action)
        info: dict[str, Any] = {"check": "NA", "exit": "yes", "verb": parsed.verb if parsed else "", "invalid": parsed is None}
        if parsed is None:
            return "no action; use list, read, search, edit, test or submit", 0.0, False, False, {**info, "exit": "no"}
        if parsed.verb == "submit":
            verdict = self.grade(self.task, self.files)
            self.done, resolved = True, float(verdict.check == "PASS")
            info |= {"check": verdict.check, "exit": "yes" if verdict.clean else "no", "success": resolved, "rewards": {"resolved": resolved}}
            return "", resolved, True, False, info
        if parsed.verb == "test":
            verdict = self.visible(self.task, self.files)
            return verdict.text, 0.0, False, False, {**info, "check": verdict.check, "exit": "yes" if verdict.clean else "no"}
        observation, good = self.look(parsed) if parsed.verb != "edit" else self.edit(parsed)
        return observation, 0.0, False, False, {**info, "exit": "yes" if good else "no"}

    def look(self, action: Action) -> tuple[str, bool]:
        """list, read and search: (observation, whether it worked)."""
        if action.verb == "list":
            more = [f"and {len(self.files) - SHOWN_LINES} more"] if len(self.files) > SHOWN_LINES else []
            return " ".join([*list(self.files)[:SHOWN_LINES], *more]), True
        if action.verb == "search":
            found = [f"{name} {i}: {line.strip()}" for name, text in self.files.items() for i, line in enumerate(text.splitlines(), 1) if action.text in line]
            return "\n".join(found[:SHOWN_LINES]) or "nothing found", bool(found)
        if action.file not in self.files:
            return f"no file {action.file}", False
        numbered = [f"{i} {line}".rstrip() for i, line in enumerate(self.files[action.file].splitlines(), 1)]
        shown = numbered[action.first - 1 : action.last or action.first] if action.first else numbered
        more = [f"... {len(shown) - SHOWN_LINES} more lines"] if len(shown) > SHOWN_LINES else []
        return "\n".join(shown[:SHOWN_LINES] + more) or "no such lines", bool(shown)

    def edit(self, action: Action) -> tuple[str, bool]:
        """Replaces lines. Text without indentation that replaces a single line takes that line's; where a range is given, text is taken as it is."""
        name, last = action.file, action.last or action.first
        if posixpath.isabs(name) or posixpath.normpath(name) != name or name.startswith(".."):
            return f"no file {name}", False
        if is_protected(name):
            return f"{name} may not be changed", False
        if name not in self.files and (action.first, last) != (1, 1):
            return f"no file {name}; line 1 makes one", False
        lines = self.files.get(name, "\n").splitlines()
        if not 1 <= action.first <= last <= len(lines):
            return f"{name} has lines 1 to {len(lines)}", False
        old = lines[action.first - 1]
        new = action.text.splitlines()
        if not action.last and new and new[0] and not new[0][0].isspace():
            new = [_indentation(old) + line if line else line for line in new]
        text = "\n".join([*lines[: action.first - 1], *new, *lines[last:]]) + "\n"
        if len(text) > MAX_CHARS:
            return f"{name} would have more than {MAX_CHARS} characters", False
        self.files[name] = text
        return "edited", True

    def snapshot(self) -> tuple[dict[str, Any] | None, dict[str, str], bool]:
        return self.task, dict(self.files), self.done

    def restore(self, state: tuple[dict[str, Any] | None, dict[str, str], bool]) -> None:
        self.task, files, self.done = state
        self.files = dict(files)

    def state_key(self) -> str:
        """Hash of the working tree."""
        return tree_hash(self.files)

    def oracle_action(self) -> str:
        """The next edit that brings the tree towards the repaired one, from any tree; "submit" when there is none."""
        if self.task is None:
            raise RuntimeError("oracle_action() before reset()")
        for name, fixed in self.task["fixed"].items():
            if (edit := next(differences(name, self.files[name], fixed), None)) is not None:
                return render_edit(*edit)
        return "submit"

    def close(self) -> None:
        self.task, self.done = None, True


def differences(name: str, text: str, fixed: str) -> Iterator[tuple[str, int, int, str]]:
    """(file, first, last, new text) of the edits that turn ``text`` into ``fixed``; last is 0 for a single line whose indentation stays.

    Line by line, or the whole file when lengths or indentations differ.
    """
    old, new = text.splitlines(), fixed.splitlines()
    if len(old) != len(new) or any(_indentation(a) != _indentation(b) for a, b in zip(old, new)):
        yield name, 1, len(old), fixed.rstrip("\n")
        return
    for i, (a, b) in enumerate(zip(old, new), 1):
        if a != b:
            yield name, i, 0, b.strip()


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def render_edit(name: str, first: int, last: int, new: str) -> str:
    return f"edit {name} {first}{f'-{last}' if last else ''}: {new}"


# ---------------------------------------------------------------- the scripted expert


def _function_at(text: str, line: int) -> tuple[str, str]:
    """(name, documentation) of the function that a line belongs to."""
    lines = text.splitlines()
    start = next(i for i in range(line - 1, -1, -1) if lines[i].startswith("def "))
    return lines[start].removeprefix("def ").partition("(")[0], lines[start + 1].strip().strip('"')


def _play(task: dict[str, Any], rng: random.Random, right: float, tested: float, goes_on: float) -> list[Message]:
    """A conversation of an expert who sees the repaired program.

    right: chance that an edit is the right one. Otherwise, half of the time where the task has a trap for this function, it is the trap; else mostly the line
    as it stands, copied in spite of its documentation, and sometimes another mutation of the right line. tested: chance that an edit is tested before the
    next decision. goes_on: chance to go on after tests failed, or with faults left untested.
    """
    env = RepoEnv(visible=trusted_verdict)
    conversation = env.reset(task)

    def say(text: str) -> str:
        observation = env.step(text)[0]
        conversation.extend([{"role": "assistant", "content": text}, {"role": "user", "content": observation}])
        return observation

    say("test")
    while True:
        wrong = [(name, edit) for name, fixed in task["fixed"].items() for edit in differences(name, env.files[name], fixed)]
        if not wrong:
            break
        name = wrong[0][0]
        say(f"read {name}")
        for _, (_, line, _, new) in [row for row in wrong if row[0] == name]:
            function, words = _function_at(task["fixed"][name], line)
            trap = task["trap"] if task["trap"] and task["trap"]["function"] == function else None
            if rng.random() < right:
                say(f"{function} is {words}\n{render_edit(name, line, 0, new)}")
            elif trap and env.files[trap["file"]].splitlines()[trap["line"] - 1] == trap["old"] and rng.random() < 0.5:
                if trap["file"] != name:
                    say(f"read {trap['file']}")
                words = _function_at(env.files[trap["file"]], trap["line"])[1]
                say(f"{trap['helper']} is {words}\n{render_edit(trap['file'], trap['line'], 0, trap['new'].strip())}")
            else:
                same = env.files[name].splitlines()[line - 1].strip()
                say(f"{function} is {words}\n{render_edit(name, line, 0, same if rng.random() < 0.8 else _mistake(task, name, line, rng))}")
        if rng.random() < tested:
            if say("test").startswith("PASS") or rng.random() >= goes_on:
                break
        elif rng.random() >= goes_on:
            break
    conversation.append({"role": "assistant", "content": "submit"})
    return conversation


def _mistake(task: dict[str, Any], name: str, line: int, rng: random.Random) -> str:
    """Another line than the right one: a mutation of it."""
    lines = task["fixed"][name].splitlines()
    start = next(i for i in range(line - 1, -1, -1) if lines[i].startswith("def "))
    function = "\n".join(lines[start : start + 3])
    options = {make().splitlines()[line - 1 - start].strip() for _, make in repo_tasks.mutations(function)} - {lines[line - 1].strip()}
    return rng.choice(sorted(options)) if options else lines[line - 1].strip()


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """A whole conversation that resolves a generated task."""
    return _play(task, rng, right=1.0, tested=1.0, goes_on=1.0)


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The same with habits: edits that change nothing, edits at the wrong place (the trap), submitting untested or in spite of failing tests."""
    return _play(task, rng, right=0.4, tested=0.5, goes_on=0.4)


def load(path: str | None, seed: int = 0) -> TaskSet:
    """The generated tasks (``path`` None or "large"), or Harbor folders and SWE-bench records below a folder. Raises DataError."""
    if path is not None and (path != "large" or Path(path).exists()):
        from common.envs import repo_real

        return repo_real.load(path, seed)
    large = path == "large"
    counts = (LARGE_TRAIN_TASKS, LARGE_EVAL_TASKS) if large else (TRAIN_TASKS, EVAL_TASKS)
    train, evaluation = (list(repo_tasks.generate(split, count, seed, large)) for split, count in zip(("train", "eval"), counts))
    return TaskSet(
        name="repo:large" if large else "repo",
        train=train,
        eval=evaluation,
        make_env=RepoEnv,
        demonstrate=demonstrate,
        careless=careless,
        max_turns=LARGE_MAX_TURNS if large else MAX_TURNS,
        workers=64,
        notes={"traps": sum(t["trap"] is not None for t in train), "faults": sum(len(t["faults"]) for t in train)},
    )
