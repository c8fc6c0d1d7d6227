"""Records of outcome_decomp.py: one line per sampled answer. Schema, readers (JSON lines, Parquet, CSV, lm-evaluation-harness logs), writer, matrices.

A record says that one model wrote one answer to one problem: how long it got, whether it ended by itself, whether it is right. Nothing is guessed and
nothing is dropped: whatever does not fit raises DataError with file and line.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.envs import DataError

BACKTRACKING = re.compile(r"\b(?:wait|actually)\b", re.IGNORECASE)  # the paper's two words
TEXT_FIELDS = ("model", "problem", "dataset", "text")
REQUIRED = ("model", "problem", "sample", "tokens", "finished", "correct")
OPTIONAL = ("dataset", "judge", "text")
COUNT_LIMIT = 2**40  # a token count or sample number beyond it is a mistake, not a measurement


@dataclass(slots=True)
class Record:
    """One sampled answer.

    model      who wrote it
    problem    id of the problem, unique inside its dataset
    sample     number of the sample, 0, 1, ...; unique per (model, dataset, problem)
    tokens     length of the answer in tokens of that model, at least 0
    finished   True: it ended by itself after `tokens` tokens; False: it was cut there (then every budget up to `tokens` can be read, none beyond)
    correct    the matcher's verdict; False when not finished
    dataset    "" when there is only one
    judge      verdict of a second grader; None: this record has none
    text       the answer; None: not kept
    file, line where the record stands (index into the list of files read, line or row from 1)
    """

    model: str
    problem: str
    sample: int
    tokens: int
    finished: bool
    correct: bool
    dataset: str = ""
    judge: bool | None = None
    text: str | None = None
    file: int = 0
    line: int = 0


def check_record(row: dict[str, Any], where: str, file: int = 0, line: int = 0) -> Record:
    """A Record from a plain dict of the schema's fields. Raises DataError that starts with `where` and names the field and the fix."""
    for name in REQUIRED:
        if row.get(name) is None:
            hint = "; write true if the answer ended by itself, false if it was cut" if name == "finished" else ""
            raise DataError(f"{where}: field {name!r} is {'null' if name in row else 'missing'}{hint}. A record has {', '.join(REQUIRED)}")
    text, judge, dataset = row.get("text"), row.get("judge"), row.get("dataset")
    dataset = "" if dataset is None else dataset
    model, problem, sample, tokens, finished, correct = (row[name] for name in REQUIRED)
    if type(problem) is int:
        problem = str(problem)
    if type(model) is not str or not model or type(problem) is not str or not problem or type(dataset) is not str or type(text) not in (str, type(None)):
        for name, value in (("model", model), ("problem", problem), ("dataset", dataset), ("text", text)):
            if type(value) is not str or (not value and name in ("model", "problem")):
                raise DataError(f"{where}: {name} is {shown(value)}; give a string" + (" that is not empty" if value == "" else ""))
    for name, value in (("sample", sample), ("tokens", tokens)):
        if type(value) is not int or not 0 <= value < COUNT_LIMIT:
            raise DataError(f"{where}: {name} is {shown(value)}; give a whole number from 0")
    if type(finished) is not bool or type(correct) is not bool or type(judge) not in (bool, type(None)):
        for name, value in (("finished", finished), ("correct", correct), ("judge", judge)):
            if type(value) is not bool:
                hint = "; unknown is not allowed: sample it again, or take it from the engine's finish reason (stop: true, length: false)"
                raise DataError(f"{where}: {name} is {shown(value)}; give true or false" + (hint if name == "finished" else ""))
    if not finished and (correct or judge):
        name = "correct" if correct else "judge"
        raise DataError(
            f"{where}: {name} is true but finished is false; an answer that was cut is not an answer: "
            f"set {name} to false, or finished to true if the model did end there"
        )
    return Record(model, problem, sample, tokens, finished, correct, dataset, judge, text, file, line)


def shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def write_records(path: str | os.PathLike[str], records: Iterable[Record], append: bool = False) -> int:
    """Writes records as JSON lines and returns how many; every one is checked first. Fields at their default (dataset, judge, text) are left out."""
    count = 0
    with open(path, "a" if append else "w", encoding="utf-8") as out:
        for r in records:
            row = {name: getattr(r, name) for name in (*REQUIRED, *OPTIONAL)}
            check_record(row, f"record {count + 1} for {path}")
            row = {name: value for name, value in row.items() if name in REQUIRED or value not in (None, "") or (name == "text" and value is not None)}
            out.write(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n")
            count += 1
    return count
