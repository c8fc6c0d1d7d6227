"""Recorded trajectories of agents, with what the run of each action showed: for warm starts on annotated episodes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.envs import DataError


def read_trajectories(path: str, checks: Collection[str], exits: Collection[str]) -> tuple[list[tuple[list[dict], list[dict]]], dict[str, int]]:
    """The successful ones, as (messages, steps), and counts {"used", "failed"}. Raises DataError naming file, line and field.

    A line: {"messages": [{"role", "content"}, ...], "steps": [{"check", "exit", "summary", "knowable"}, ...], "success": 1}: a step per assistant message;
    summary (one line) and knowable (true or false) may be missing; a missing success counts as 1.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines would cut at separators inside of strings
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from e
    out, counts = [], {"used": 0, "failed": 0}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            problem = _problem(row, checks, exits) if isinstance(row, dict) else "the line is no object; messages, steps and success are needed"
        except ValueError as e:
            raise DataError(f"{path}, line {number}: not JSON: {e}") from e
        if problem:
            raise DataError(f"{path}, line {number}: {problem}")
        counts["used" if row.get("success", 1) > 0 else "failed"] += 1
        if row.get("success", 1) > 0:
            out.append((row["messages"], row["steps"]))
    if not out:
        raise DataError(f"{path}: no successful trajectory among {len(lines)} lines")
    return out, counts


def _problem(row: dict[str, Any], checks: Collection[str], exits: Collection[str]) -> str:
    """What is wrong with a record, or ""."""
    messages, steps, success = row.get("messages"), row.get("steps"), row.get("success", 1)
    if isinstance(success, str) or not isinstance(success, int | float):
        return f"field success: {success!r} is no number"
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return "field messages: a list of objects with role and content is needed"
    roles = [m.get("role") for m in messages]
    if set(roles) - {"system", "user", "assistant"}:
        return f"field messages: roles {sorted(map(str, set(roles) - {'system', 'user', 'assistant'}))}; choose system, user and assistant"
    if roles[-1] != "assistant" or "user" not in roles[: roles.index("assistant")]:
        return "field messages: they must begin with the task and end with the assistant"
    if any(a == b for a, b in itertools.pairwise(roles)):
        return "field messages: two of one role in a row; join them"
    if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps) or len(steps) != roles.count("assistant"):
        return (
            f"field steps: {len(steps) if isinstance(steps, list) else 'no list'} for {roles.count('assistant')} assistant messages; one object each is needed"
        )
    for i, s in enumerate(steps, 1):
        if s.get("check") not in checks or s.get("exit") not in exits:
            return f"field steps, step {i}: check {s.get('check')!r}, exit {s.get('exit')!r}; choose {', '.join(checks)} and {', '.join(exits)}"
        if not isinstance(s.get("summary", ""), str) or "\n" in s.get("summary", "") or not isinstance(s.get("knowable", True), bool):
            return f"field steps, step {i}: summary must be one line of text, knowable true or false"
    return ""
