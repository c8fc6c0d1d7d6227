"""Tool calling, single-turn: read function docs and a request, answer with calls that are AST-equal to a reference.

Canonical response, one block that holds one JSON list (an empty list means "no function fits"):

    <think>call set_alarm with hour and label</think><tool_call>[{"name":"set_alarm","arguments":{"hour":7,"label":"rain"}}]</tool_call>

Two rewards: ``format`` (the response is exactly that shape) and ``call`` (the calls equal the reference under the rules of the Berkeley Function
Calling Leaderboard v4). ``call`` also reads the other common forms (several blocks, no tags, Python calls), so it does not depend on ``format``.
``success`` is the call reward. Verifier text: ``format`` = the format requirement, ``call`` = the reference call.

Nothing that a model writes is evaluated: calls are read with ``json`` and ``ast`` only.

Reading and comparing calls is in ``tools_calls.py``, the generator of the embedded tasks in ``tools_tasks.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet
from common.envs.tools_calls import (
    ANY_CALL_CATEGORIES,
    AST_CATEGORIES,
    CATEGORIES,
    FORMAT_TEXT,
    MAX_CHARS,
    PYTHON_TYPES,
    calls_match,
    format_ok,
    parse_calls,
    reference_calls,
    render_calls,
)
from common.envs.tools_tasks import careless, demonstrate, embedded_tasks

# ---------------------------------------------------------------- the environment


class ToolsEnv:
    """One-step episodes. ``step`` returns the sum of the two rewards; ``info`` holds both, the verifier texts and ``success`` (the call reward)."""

    def __init__(self) -> None:
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        """Messages of a task as made by ``load``."""
        self.task = task
        return [dict(message) for message in task["messages"]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one response. Raises RuntimeError when no episode is open."""
        if self.task is None:
            raise RuntimeError("step() before reset(), or after the episode's only step")
        task, self.task = self.task, None
        judged = len(action) <= MAX_CHARS and calls_match(parse_calls(action), task["category"], task["functions"], task["answers"])
        rewards = {"format": float(format_ok(action)), "call": float(judged)}
        info = {
            "success": rewards["call"],
            "rewards": rewards,
            "verifier_text": {"format": FORMAT_TEXT, "call": render_calls(reference_calls(task["answers"], task["functions"]))},
        }
        return "", sum(rewards.values()), True, False, info

    def oracle_action(self) -> str:
        """A response with both rewards 1 (for live_relevance, where any call will do, of the first function without arguments)."""
        if self.task is None:
            raise RuntimeError("oracle_action() before reset()")
        calls = reference_calls(self.task["answers"], self.task["functions"])
        if self.task["category"] in ANY_CALL_CATEGORIES:
            calls = [{"name": self.task["functions"][0]["name"], "arguments": {}}]
        return f"<think>call {' and '.join(call['name'] for call in calls) or 'nothing'}</think><tool_call>{render_calls(calls)}</tool_call>"

    def close(self) -> None:
        self.task = None


def regions(text: str) -> list[tuple[str, int, int]]:
    """Spans of a response: ``tags``, ``reasoning``, ``function_name``, ``argument_name``, ``argument_value`` and ``syntax`` (JSON punctuation), in order.

    Reads as far as the text goes, so a broken response still gets spans. Text outside both blocks has no span.
    """
    spans: list[tuple[str, int, int]] = []
    inside = ""
    position = 0
    for tag in re.finditer("</?(?:think|tool_call)>", text):
        if inside == "<think>" and tag.start() > position:
            spans.append(("reasoning", position, tag.start()))
        elif inside == "<tool_call>":
            spans += _call_regions(text, position, tag.start())
        spans.append(("tags", tag.start(), tag.end()))
        inside, position = tag.group(), tag.end()
    if inside == "<think>" and len(text) > position:
        spans.append(("reasoning", position, len(text)))
    elif inside == "<tool_call>":
        spans += _call_regions(text, position, len(text))
    return spans


def _call_regions(text: str, start: int, end: int) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    depth = 0  # braces open: 1 inside a call, 2 or more inside its arguments
    key = ""  # the last key read at depth 1
    for token in re.compile(r'("(?:[^"\\]|\\.)*+"?|[^\s"{}\[\]:,]+|[{}\[\]:,])(?=(\s*+:)?)', re.DOTALL).finditer(text, start, end):
        piece = token.group(1)
        first, last = token.span(1)
        if piece in "{}[]:,":
            depth += (piece == "{") - (piece == "}")
            spans.append(("syntax", first, last))
            continue
        if depth == 1:
            name = "function_name" if key == "name" and not token.group(2) else "syntax"
            key = piece.strip('"') if token.group(2) else key
        else:
            name = "argument_name" if depth == 2 and token.group(2) else "argument_value" if depth >= 2 else "syntax"
        opened = piece[0] == '"'  # the quotes are syntax
        closed = opened and len(piece) > 1 and piece[-1] == '"'
        parts = [("syntax", first, first + opened), (name, first + opened, last - closed), ("syntax", last - closed, last)]
        spans += [part for part in parts if part[2] > part[1]]
    return spans


# ---------------------------------------------------------------- real data


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) for each line of a JSON-lines file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not valid JSON ({error}); a BFCL file has one JSON object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a {type(row).__name__}, expected a JSON object with id, question and function")
        if not isinstance(row.get("id"), str) or not row["id"]:
            raise DataError(f"{path}:{number}: field 'id' must be a non-empty string, found {row.get('id')!r}")
        rows.append((number, row))
    if not rows:
        raise DataError(f"{path}: no rows; expected one JSON object a line")
    return rows


def _check_row(where: str, row: dict[str, Any], answered: bool) -> None:
    """Raises DataError where a question row lacks what the prompt or the checker needs."""
    turns = row.get("question")
    if not isinstance(turns, list) or not all(isinstance(turn, list) for turn in turns) or not turns:
        raise DataError(f"{where}: field 'question' must be a list of turns, each a list of chat messages")
    if len(turns) != 1:
        raise DataError(f"{where}: field 'question' has {len(turns)} turns; only the single-turn categories are supported ({', '.join(CATEGORIES)})")
    for message in turns[0]:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant") or not isinstance(message.get("content"), str):
            raise DataError(f"{where}: field 'question' has a message without a role system, user or assistant and a text content: {str(message)[:80]}")
    if not turns[0] or turns[0][-1]["role"] != "user":
        raise DataError(f"{where}: field 'question' must end with a message of the user")
    functions = row.get("function")
    if not isinstance(functions, list) or (answered and not functions):
        raise DataError(f"{where}: field 'function' must be a list of function documents (not empty where a call is wanted)")
    for function in functions:
        name = function.get("name") if isinstance(function, dict) else None
        schema = function.get("parameters") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
            raise DataError(f"{where}: field 'function' has a document without a text 'name' or without 'parameters.properties': {str(function)[:80]}")
        for argument, document in schema["properties"].items() if answered else ():
            kind = document.get("type") if isinstance(document, dict) else None
            if kind not in PYTHON_TYPES:
                raise DataError(f"{where}: field 'function', {name}.{argument}: type {kind!r} is none of {', '.join(PYTHON_TYPES)}")
            items = document.get("items")
            if kind in ("array", "tuple") and not (isinstance(items, dict) and items.get("type") in PYTHON_TYPES):
                raise DataError(f"{where}: field 'function', {name}.{argument}: an {kind} needs items.type, one of {', '.join(PYTHON_TYPES)}")


def _check_answer(where: str, row: dict[str, Any], functions: list[dict[str, Any]]) -> None:
    """Raises DataError where a reference cannot be compared with."""
    answers = row.get("ground_truth")
    if not isinstance(answers, list) or not answers:
        raise DataError(f"{where}: field 'ground_truth' must be a non-empty list of calls")
    names = [function["name"] for function in functions]
    for answer in answers:
        if not isinstance(answer, dict) or len(answer) != 1 or not isinstance(next(iter(answer.values())), dict):
            raise DataError(
                f"{where}: field 'ground_truth' must hold objects of the form {{function: {{argument: [accepted values]}}}}, found {str(answer)[:80]}"
            )
        ((name, arguments),) = answer.items()
        if name not in names:
            raise DataError(f"{where}: field 'ground_truth' calls {name!r}, which is not among the question's functions ({', '.join(names)})")
        for argument, options in arguments.items():
            if not isinstance(options, list):
                raise DataError(f"{where}: field 'ground_truth', {name}.{argument}: expected a list of accepted values, found {str(options)[:80]}")
            for inner in [item for option in options for item in (option if isinstance(option, list) else [option]) if isinstance(item, dict)]:
                if not all(isinstance(accepted, list) for accepted in inner.values()):
                    raise DataError(
                        f"{where}: field 'ground_truth', {name}.{argument}: each key of a dict needs a list of accepted values, found {str(inner)[:80]}"
                    )


def _category(path: Path) -> str:
    match = re.fullmatch(r"BFCL_v\d+_(\w+)\.jsonl?", path.name)
    if not match:
        raise DataError(f"{path}: the category is read from the file name; expected BFCL_v4_<category>.json with one of {', '.join(CATEGORIES)}")
    return match.group(1)


def _read_file(path: Path) -> list[dict[str, Any]]:
    category = _category(path)
    if category not in CATEGORIES:
        hint = "Java and JavaScript answers need converters for those languages' literals" if category in ("simple_java", "simple_javascript") else ""
        raise DataError(f"{path}: category {category!r} is not supported; choose one of {', '.join(CATEGORIES)}. {hint}".rstrip())
    answered = category in AST_CATEGORIES
    answer_path = path.parent / "possible_answer" / path.name
    if answered and not answer_path.is_file():
        raise DataError(f"{answer_path}: missing; category {category!r} needs the reference answers of {path.name} there")
    answers = {row["id"]: (number, row) for number, row in _rows(answer_path)} if answered else {}
    tasks = []
    for number, row in _rows(path):
        where = f"{path}:{number}"
        _check_row(where, row, answered)
        truth: list[dict[str, Any]] = []
        if answered:
            if row["id"] not in answers:
                raise DataError(f"{where}: field 'id': {row['id']!r} has no line in {answer_path}")
            answer_number, answer = answers[row["id"]]
            _check_answer(f"{answer_path}:{answer_number}", answer, row["function"])
            truth = answer["ground_truth"]
        documents = "\n".join(json.dumps(function, ensure_ascii=False) for function in row["function"])
        system = f"Functions you can call, one JSON document a line:\n{documents}\n\nAnswer in the form {FORMAT_TEXT}, with an empty list if no function fits."
        turns = row["question"][0]
        given = [message["content"] for message in turns if message["role"] == "system"]
        messages = [{"role": "system", "content": "\n\n".join([*given, system])}]
        messages += [{"role": message["role"], "content": message["content"]} for message in turns if message["role"] != "system"]
        tasks.append(
            {
                "id": row["id"],
                "messages": messages,
                "functions": row["function"],
                "answers": truth,
                "category": category,
                "difficulty": len(row["function"]) + 2 * max(len(truth) - 1, 0),
            }
        )
    return tasks


def _load_real(path: Path) -> TaskSet:
    skipped: list[str] = []
    if path.is_dir():
        files = sorted(path.glob("BFCL_v*_*.json"))
        skipped = [file.name for file in files if _category(file) not in CATEGORIES]
        files = [file for file in files if file.name not in skipped]
        if not files:
            raise DataError(f"{path}: no file BFCL_v4_<category>.json of a supported category ({', '.join(CATEGORIES)})")
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: no such file or folder; give a BFCL v4 folder or one BFCL_v4_<category>.json")
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    seen: set[str] = set()
    unsolvable: list[str] = []  # the benchmark's own reference fails its rules (5 of 3,491 rows upstream); kept, so that scores stay comparable
    for file in files:
        for task in _read_file(file):
            if task["id"] in seen:
                raise DataError(f"{file}: field 'id': {task['id']!r} occurs twice")
            seen.add(task["id"])
            solved = task["category"] not in AST_CATEGORIES or calls_match(
                reference_calls(task["answers"], task["functions"]), task["category"], task["functions"], task["answers"]
            )
            unsolvable += [] if solved else [task["id"]]
            held = hashlib.sha256(task["id"].encode()).digest()[0] < 51
            (evaluation if held else train).append(task)
    notes = {
        "rows": len(seen),
        "files": [file.name for file in files],
        "files_skipped": skipped,
        "unsolvable": unsolvable,
        "split": "BFCL has no training split: a row is in eval when the first byte of sha256(id) is below 51 (about 20 %)",
    }
    return TaskSet(f"tools:{path}", train, evaluation, ToolsEnv, None, regions, None, 1, notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded task set (6,000 training and 256 validation tasks), or BFCL v4 data: a folder with BFCL_v4_<category>.json and
    possible_answer/, or one such file.

    Embedded validation tasks use argument values that never occur together in a training call of the same family. Raises DataError for unusable data.
    """
    if path is not None:
        return _load_real(Path(path))
    notes = {"split": "one in seven combinations of a function family and its argument values occurs in validation only"}
    return TaskSet("tools", embedded_tasks("train", 6000, seed), embedded_tasks("eval", 256, seed), ToolsEnv, demonstrate, regions, careless, 1, notes)
