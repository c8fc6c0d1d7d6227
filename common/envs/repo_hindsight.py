"""What is known after the fact about a scripted conversation on a generated repository: what each action's run showed, and what could be known before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from common.envs.repo import RepoEnv, parse_action, trusted_grade, trusted_verdict


def hindsight(task: dict[str, Any], conversation: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """One dict per assistant message, by executing the conversation again: check and exit, as in ``info``; and, because the repaired program is known,

    summary   the functions at fault that are still "broken", and those "edited" since the last test run; "tests pass" after a run that passed;
    knowable  whether a reader of the history could know check and exit. Without a test run, yes. With one: nothing was edited since the last; or a file
              that was read holds a line that differs from the repaired one (its documentation says so); or every file with a function whose
              test failed was read, and none does (unknown where the report left failures out).
    """
    env = RepoEnv(visible=trusted_verdict, grade=trusted_grade)
    env.reset(task)
    home = {name: file for file, text in task["fixed"].items() for name in re.findall(r"^def (\w+)", text, re.MULTILINE)}
    read: set[str] = set()
    edited: list[str] = []
    failing: set[str] = set()
    last, results, more = "", [], False
    for text in (m["content"] for m in conversation if m["role"] == "assistant"):
        wrong = {file for file, fixed in task["fixed"].items() if env.files[file] != fixed}
        broken = [fault["function"] for fault in task["faults"] if fault["function"] not in edited]
        summary = " ".join([*broken, *["broken"] * bool(broken), *edited, *["edited"] * bool(edited)])
        observation, _, _, _, info = env.step(text)
        known = info["check"] == "NA" or not edited or bool(wrong & read) or not (more or {home[name] for name in failing} - read)
        results.append({"check": info["check"], "exit": info["exit"], "summary": "tests pass" if last == "PASS" else summary, "knowable": known})
        action = parse_action(text)
        if action is not None and action.verb == "read":
            read.add(action.file)
        elif action is not None and action.verb == "edit" and action.file in task["fixed"]:
            head = "\n".join(task["fixed"][action.file].splitlines()[: action.first])
            function = re.findall(r"^def (\w+)", head, re.MULTILINE)[-1]
            edited, last = [name for name in edited if name != function] + [function], ""
        elif action is not None and action.verb == "test":
            edited, last, failing = [], info["check"], set(re.findall(r"^test_(\w+):", observation, re.MULTILINE))
            more = bool(re.search(r"^and \d+ more$", observation, re.MULTILINE))
    return results
