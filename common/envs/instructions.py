"""Instruction following, single-turn: each prompt carries constraints that plain code can verify, and each constraint is a binary reward of its own.

Embedded tasks have 5 to 13 constraints out of 45 types of ours, drawn so that a written demonstration satisfies all of them. Real data are IFEval's
(25 types under their published ids, Zhou et al. 2023); verdicts follow its strict rules, ``info["loose"]`` its loose ones (best of eight variants).

``rewards`` is keyed by constraint id (a second occurrence in a real prompt becomes ``id#2``), ``verifier_text`` holds the wording of each constraint, or ""
for the ids in ``UNLOCALISED``: a length has no place in the text. ``success`` = all constraints hold; ``info["instruction_accuracy"]`` = share that holds.

Checks use ``str`` and ``re`` only, with patterns that take linear time; texts over ``MAX_CHARS`` characters get 0 throughout.

The types and their checks are in ``instructions_checks.py``, the generator of the embedded tasks in ``instructions_tasks.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet
from common.envs.instructions_checks import IFEVAL, RELATIONS, UNLOCALISED, follows
from common.envs.instructions_tasks import careless, demonstrate, embedded_tasks

# ---------------------------------------------------------------- the environment


class InstructionsEnv:
    """One-step episodes. ``step`` returns the sum of the constraint rewards.

    ``info``: success, rewards, verifier_text, instruction_accuracy, split ("seen", "heldout_types" or "ifeval"); with IFEval data also ``loose``, a dict
    name -> 0.0 or 1.0 under the loose rules.
    """

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
        rewards = {constraint["name"]: float(follows(constraint, action)) for constraint in task["constraints"]}
        info: dict[str, Any] = {
            "success": float(all(rewards.values())),
            "rewards": rewards,
            "verifier_text": {c["name"]: "" if c["id"] in UNLOCALISED else c["text"] for c in task["constraints"]},
            "instruction_accuracy": sum(rewards.values()) / len(rewards),
            "split": task["split"],
        }
        if task["split"] == "ifeval":
            info["loose"] = {constraint["name"]: float(follows(constraint, action, loose=True)) for constraint in task["constraints"]}
        return "", sum(rewards.values()), True, False, info

    def close(self) -> None:
        self.task = None


def regions(text: str) -> list[tuple[str, int, int]]:
    """Spans of a response, in order and without overlap: ``wrap`` (outer quotes or braces), ``title``, ``list`` (bullets and numbered lines), ``divider``,
    ``postscript``, ``first_word``, ``last_word`` (with its end mark), ``rest``. White space between them has none."""
    spans: list[tuple[str, int, int]] = []
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    wrapped = end - start > 2 and (text[start], text[end - 1]) in (('"', '"'), ("{", "}"))
    inner = (start + 1, end - 1) if wrapped else (start, end)
    spans += [("wrap", start, start + 1)] if wrapped else []
    lines = list(re.compile(r"\S[^\n]*").finditer(text, *inner))
    for index, line in enumerate(lines):
        content = line.group().rstrip()
        first = line.start()
        if content in ("******", "---", "***"):
            name = "divider"
        elif re.match(r"[-*] |\d{1,9}\. ", content):
            name = "list"
        elif content.startswith("<<") and content.endswith(">>"):
            name = "title"
        else:
            name = "postscript" if re.match(r"P\.(P\.)?S", content) else "rest"
        words = [(first + word.start(), first + word.end()) for word in re.finditer(r"\S+", content)]
        parts = []
        if name == "rest" and index == 0:
            parts.append(("first_word", *words.pop(0)))
        if words:
            closing = [("last_word", *words.pop())] if name in ("rest", "postscript") and index == len(lines) - 1 else []
            parts += [(name, words[0][0], words[-1][1])] if words else []
            parts += closing
        spans += parts
    spans += [("wrap", end - 1, end)] if wrapped else []
    return spans


# ---------------------------------------------------------------- real data


def _read_constraint(where: str, name: Any, kwargs: Any) -> dict[str, Any]:
    """Raises DataError for an unknown id or kwargs that its check cannot use."""
    if name not in IFEVAL:
        raise DataError(f"{where}: field 'instruction_id_list': unknown id {name!r}; known ids: {', '.join(IFEVAL)}")
    if not isinstance(kwargs, dict):
        raise DataError(f"{where}: field 'kwargs': the entry of {name} is a {type(kwargs).__name__}, expected an object")
    kwargs = {key: value for key, value in kwargs.items() if value is not None}  # some copies list every key, with null for the unused ones
    needed = IFEVAL[name].kwargs
    if kwargs.keys() != needed.keys():
        raise DataError(f"{where}: field 'kwargs': {name} needs exactly {sorted(needed) or 'no entries'}, found {sorted(kwargs)}")
    for key, value in kwargs.items():
        if isinstance(value, float) and needed[key] is int and value.is_integer():
            kwargs[key] = value = int(value)
        if type(value) is not needed[key]:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be a {needed[key].__name__}, found {value!r}")
        if needed[key] is int and value < 0:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must not be negative, found {value}")
        if key.endswith("relation") and value not in RELATIONS:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be one of {RELATIONS}, found {value!r}")
        if needed[key] is list and not (value and all(isinstance(word, str) and word for word in value)):
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be a non-empty list of words, found {value!r}")
        if needed[key] is str and not value.strip():
            raise DataError(f"{where}: field 'kwargs': {name}.{key} is empty")
    if name == "keywords:letter_frequency" and len(kwargs["letter"].strip()) != 1:
        raise DataError(f"{where}: field 'kwargs': {name}.letter must be one character, found {kwargs['letter']!r}")
    if name == "length_constraints:nth_paragraph_first_word" and not 1 <= kwargs["nth_paragraph"] <= kwargs["num_paragraphs"]:
        raise DataError(f"{where}: field 'kwargs': {name}.nth_paragraph must be between 1 and num_paragraphs, found {kwargs['nth_paragraph']}")
    wording = IFEVAL[name].wording.format(**{key: ", ".join(value) if isinstance(value, list) else value for key, value in kwargs.items()})
    return {"id": name, "kwargs": kwargs, "text": wording}


def _load_real(path: Path) -> TaskSet:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}); give a .jsonl file in IFEval's format") from error
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    seen: set[str] = set()
    languages = False
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); IFEval files have one JSON object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}, expected an object with key, prompt, instruction_id_list and kwargs")
        key, prompt, names, kwargs = (row.get(name) for name in ("key", "prompt", "instruction_id_list", "kwargs"))
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            raise DataError(f"{where}: field 'key' must be a number or a text, found {key!r}")
        if str(key) in seen:
            raise DataError(f"{where}: field 'key': {key!r} occurs twice; keys must be unique")
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{where}: field 'prompt' must be a non-empty text, found {str(prompt)[:80]!r}")
        if not isinstance(names, list) or not names:
            raise DataError(f"{where}: field 'instruction_id_list' must be a non-empty list of ids")
        if not isinstance(kwargs, list) or len(kwargs) != len(names):
            found = len(kwargs) if isinstance(kwargs, list) else type(kwargs).__name__
            raise DataError(f"{where}: field 'kwargs' must be a list with one object for each of the {len(names)} ids, found {found}")
        constraints: list[dict[str, Any]] = []
        for name, values in zip(names, kwargs):
            constraint = _read_constraint(where, name, values)
            copies = sum(other["id"] == name for other in constraints)
            constraints.append({**constraint, "name": name if not copies else f"{name}#{copies + 1}"})
            languages |= name in ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
        seen.add(str(key))
        held = hashlib.sha256(str(key).encode()).digest()[0] < 51
        (evaluation if held else train).append(
            {
                "id": f"ifeval-{key}",
                "messages": [{"role": "user", "content": prompt}],
                "constraints": constraints,
                "split": "ifeval",
                "difficulty": len(constraints),
            }
        )
    if not seen:
        raise DataError(f"{path}: no rows; expected one JSON object a line")
    if languages and importlib.util.find_spec("langdetect") is None:
        raise DataError(f"{path}: has constraints on the language of the response, which need the package langdetect: pip install langdetect==1.0.9")
    notes = {"rows": len(seen), "split": "IFEval has no training split: a row is in eval when the first byte of sha256(key) is below 51 (about 20 %)"}
    return TaskSet(f"instructions:{path}", train, evaluation, InstructionsEnv, None, regions, None, 1, notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded task set, or a .jsonl file in IFEval's format (key, prompt, instruction_id_list, kwargs).

    Embedded: 6,000 training tasks; 256 validation tasks whose sets of types never occur in training (task field ``split`` "seen"), followed by 64 with two
    types each that training never shows (``split`` "heldout_types"). Raises DataError for unusable data.
    """
    if path is not None:
        return _load_real(Path(path))
    evaluation = [*embedded_tasks("eval", 256, seed), *embedded_tasks("heldout_types", 64, seed)]
    notes = {"split": 'eval: 256 tasks with unseen sets of types ("seen"), then 64 with types that training never shows ("heldout_types")'}
    return TaskSet("instructions", embedded_tasks("train", 6000, seed), evaluation, InstructionsEnv, demonstrate, regions, careless, 1, notes)
