"""Records of outcome_decomp.py: one line per sampled answer. Schema, readers (JSON lines, Parquet, CSV, lm-evaluation-harness logs), writer, matrices.

A record says that one model wrote one answer to one problem: how long it got, whether it ended by itself, whether it is right. Nothing is guessed and
nothing is dropped: whatever does not fit raises DataError with file and line.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import erf
from pathlib import Path
from typing import Any

import numpy as np

from common.envs import DataError

BACKTRACKING = re.compile(r"\b(?:wait|actually)\b", re.IGNORECASE)  # the paper's two words
REQUIRED = ("model", "problem", "sample", "tokens", "finished", "correct")
OPTIONAL = ("dataset", "judge", "text")
KNOWN = frozenset(REQUIRED + OPTIONAL)
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


# ---------------------------------------------------------------------------------------------------------------------- readers


@dataclass
class Source:
    """Record files; iterating yields checked Records in file order. Raises DataError with file and line.

    paths        files (.jsonl, .parquet, .csv) or folders of them; NAME=PATH names the model of an lm-evaluation-harness log
    lm_metric    metric of harness logs ("" if they have one), lm_filter: their filter ("" if they have one)
    tokenizer    folder or hub id: counts the tokens of harness logs, which store none
    lm_slack     a harness answer whose re-counted length is within this fraction of its max_gen_toks was cut
    files        filled while reading: Record.file is an index into it
    notes        filled while reading: what the reader decided, and how often
    """

    paths: tuple[str, ...]
    lm_metric: str = ""
    lm_filter: str = ""
    tokenizer: str = ""
    lm_slack: float = 0.01
    files: list[str] = field(default_factory=list)
    notes: Counter = field(default_factory=Counter)
    lm_counts: Counter = field(default_factory=Counter)  # (model, dataset, problem) -> samples so far
    count_tokens: Callable[[str], int] | None = None

    def __iter__(self) -> Iterator[Record]:
        self.files, self.notes, self.lm_counts = [], Counter(), Counter()
        seen = {}
        for name, path in (pair for given in self.paths for pair in self.expand(given)):
            first = seen.setdefault(path.resolve(), path)
            if first is not path:
                raise DataError(f"{path}: given twice; every answer would count double")
            self.files.append(str(path))
            yield from READERS[path.suffix](self, path, name)

    def expand(self, given: str) -> Iterator[tuple[str, Path]]:
        """(model name or "", file) of one entry of `paths`."""
        name, path = "", Path(given)
        if not path.exists() and "=" in given:
            name, _, rest = given.partition("=")
            path = Path(rest)
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; --records takes .jsonl, .parquet or .csv files, or a folder of them")
        found = [path]
        if path.is_dir():
            found = sorted(path.rglob("samples_*.jsonl")) or sorted(p for p in path.iterdir() if p.suffix in READERS)
            if not found:
                raise DataError(f"{path}: the folder has no .jsonl, .parquet or .csv file, and no samples_*.jsonl below it")
        for file in found:
            if file.suffix not in READERS:
                raise DataError(f"{file}: unknown format {file.suffix!r}; give .jsonl, .parquet or .csv")
            yield name, file

    def record(self, row: dict[str, Any], where: str, line: int) -> Record:
        for name in row.keys() - KNOWN:
            self.notes[f"field {name!r} is not part of the schema and was not read"] += 1
        return check_record(row, where, len(self.files) - 1, line)


def read_jsonl(source: Source, path: Path, name: str) -> Iterator[Record]:
    """Our schema, or a harness log when the lines have doc_id and resps."""

    def constant(word: str):
        raise ValueError(f"{word} is not a number")

    empty, docs = True, {}
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path} line {number}"
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=constant)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text (byte {error.start}); convert the file") from None
            except (ValueError, RecursionError) as error:
                cut = " and has no line end: the file was cut there" if not raw.endswith(b"\n") else ""
                raise DataError(f"{where}: not valid JSON ({error}){cut}; delete the line and sample that answer again") from None
            if type(row) is not dict:
                raise DataError(f"{where}: {shown(row)} is not a record; a line is one JSON object")
            empty = False
            if "doc_id" in row and "resps" in row:
                yield from read_harness(source, path, name, row, where, number, docs)
            elif name:
                raise DataError(f"{where}: NAME=PATH is for harness logs; these records name their model themselves, give the path alone")
            else:
                yield source.record(row, where, number)
    if empty:
        raise DataError(f"{path} line 1: the file has no records")


def read_parquet(source: Source, path: Path, name: str) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        absent = [column for column in REQUIRED if column not in file.schema_arrow.names]
        if absent or not file.metadata.num_rows:
            raise DataError(f"{path} row 1: no {'column ' + ', '.join(absent) if absent else 'records'}; the columns are {', '.join(REQUIRED)}")
        number = 0
        for batch in file.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                number += 1
                yield source.record(row, f"{path} row {number}", number)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); write it again") from None


def read_csv(source: Source, path: Path, name: str) -> Iterator[Record]:
    words = {"true": True, "1": True, "false": False, "0": False}

    def cell(column: str, value: str) -> Any:
        if column in ("sample", "tokens"):
            return int(value) if re.fullmatch(r"\d{1,15}", value.strip()) else value
        if column in ("finished", "correct", "judge"):
            return None if column == "judge" and not value.strip() else words.get(value.strip().lower(), value)
        return value

    csv.field_size_limit(2**31 - 1)
    empty = True
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        number = 1
        try:
            header = next(reader, [])
            absent, twice = [column for column in REQUIRED if column not in header], [c for c, count in Counter(header).items() if count > 1]
            if absent or twice:
                raise DataError(
                    f"{path} line 1: "
                    + (f"no column {', '.join(absent)}" if absent else f"column {twice[0]!r} occurs twice")
                    + "; the first line names the columns"
                )
            number = reader.line_num + 1
            for cells in reader:
                where, empty = f"{path} line {number}", False
                if len(cells) != len(header):
                    raise DataError(f"{where}: {len(cells)} cells, the header has {len(header)}; quote cells that hold commas or line ends")
                yield source.record({column: cell(column, value) for column, value in zip(header, cells)}, where, number)
                number = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path} line {number}: not valid CSV ({error}); quote cells that hold commas, quotes or line ends") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} line {number} or later: not UTF-8 text ({error.reason}); convert the file") from None
    if empty:
        raise DataError(f"{path} line 2: the file has no records")


def read_harness(source: Source, path: Path, name: str, row: dict, where: str, line: int, docs: dict) -> Iterator[Record]:
    """Records of one line of an lm-evaluation-harness log (`--log_samples`, version 0.4): a document, its answers, one score per answer.

    Such a log has no finish flag and no token count. Tokens are counted again with --tokenizer; an answer counts as cut when it reaches max_gen_toks (less
    the slack), and then as not correct, whatever the harness said; both are noted. Several files of one model and task are its samples, in file order.
    """
    model = name or path.parent.name
    task = re.fullmatch(r"(?:samples_)?(.+?)(?:_\d{4}-\d\d-\d\dT[\d.:-]+)?\.jsonl", path.name).group(1)
    filters = docs.setdefault("filters", [])
    if row.get("filter") not in filters:
        filters.append(row.get("filter"))
    if source.lm_filter:
        if row.get("filter") != source.lm_filter:
            return
    elif len(filters) > 1:
        raise DataError(f"{where}: the log holds the filters {', '.join(map(str, filters))}; choose one with --lm-filter")
    metrics = row.get("metrics")
    if type(metrics) is not list or not metrics:
        raise DataError(f"{where}: no list 'metrics'; write the log with a recent lm-evaluation-harness and --log_samples")
    metric = source.lm_metric or (metrics[0] if len(metrics) == 1 else "")
    if metric not in row:
        raise DataError(f"{where}: " + (f"no metric {metric!r}" if metric else "several metrics") + f"; choose --lm-metric from {', '.join(map(str, metrics))}")
    resps = row["resps"]
    answers = resps[0] if type(resps) is list and len(resps) == 1 else None
    if type(answers) is not list or not answers or not all(type(a) is str for a in answers):
        raise DataError(f"{where}: resps is not one request with its answers; only generation tasks (generate_until) can be read, not multiple choice")
    scores = row[metric] if type(row[metric]) is list else [row[metric]]
    if len(scores) != len(answers):
        raise DataError(
            f"{where}: {len(answers)} answers but {len(scores)} score of {metric!r} (a filter such as take_first keeps one); "
            f"run the task with repeats: 1 once per seed and give all the files"
        )
    if any(type(s) not in (bool, int, float) or s not in (0, 1) for s in scores):
        raise DataError(f"{where}: {metric} is {shown(row[metric])}; a score must be 0 or 1")
    try:
        limit = row["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"]
    except (KeyError, TypeError):
        limit = None
    if type(limit) is not int or limit <= 0:
        raise DataError(f"{where}: arguments.gen_args_0.arg_1.max_gen_toks is missing, so nobody knows which answers were cut; set max_gen_toks in the task")
    if source.count_tokens is None:
        if not source.tokenizer:
            raise DataError(f"{where}: a harness log stores no token counts; give the models' tokenizer with --tokenizer FOLDER_OR_HUB_ID")
        from transformers import AutoTokenizer  # here: nothing else of the accounting needs it

        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
        source.count_tokens = lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    digest = row.get("doc_hash")
    problem = f"{row['doc_id']}" + (f":{digest[:8]}" if type(digest) is str else "")
    if problem in docs:
        raise DataError(f"{where}: doc_id {row['doc_id']} stands already in line {docs[problem]} of this file; a file has one line per document and filter")
    docs[problem] = line
    for answer, score in zip(answers, scores):
        tokens = source.count_tokens(answer)
        finished = tokens < limit * (1 - source.lm_slack)
        if not finished:
            source.notes[f"harness answers within {source.lm_slack:g} of max_gen_toks count as cut"] += 1
            source.notes["of these the harness scored 1: they count as not correct"] += bool(score)
        number = source.lm_counts[model, task, problem]
        source.lm_counts[model, task, problem] += 1
        fields = {"model": model, "dataset": task, "problem": problem, "sample": number, "tokens": tokens if finished else limit}
        yield source.record(fields | {"finished": finished, "correct": bool(finished and score), "text": answer}, where, line)


READERS = {".jsonl": read_jsonl, ".parquet": read_parquet, ".csv": read_csv}


# ---------------------------------------------------------------------------------------------------------------------- matrices


@dataclass
class Table:
    """One data set as arrays [models, problems, samples], samples in the order of their numbers.

    tokens int64; finished, correct bool; judge int8 (-1: no second grade); backtracks int32 (-1: no text); file, line int32 (where the record stands)
    """

    dataset: str
    models: list[str]
    problems: list[str]
    tokens: np.ndarray
    finished: np.ndarray
    correct: np.ndarray
    judge: np.ndarray
    backtracks: np.ndarray
    file: np.ndarray
    line: np.ndarray

    def limit(self, model: str) -> float:
        """Largest budget that can be read for a model: the shortest length at which one of its answers was cut; infinity when all finished."""
        m = self.models.index(model)
        cut = self.tokens[m][~self.finished[m]]
        return float(cut.min()) if cut.size else float("inf")


def build_tables(source: Source, samples: int = 0, judge_missing: str = "error") -> list[Table]:
    """Complete matrices, one per data set, names sorted.

    samples        0: every (model, problem) must have the same number; n: the n lowest sample numbers of each are used
    judge_missing  error: a model whose records have a judge only here and there is refused; matcher: there the matcher's verdict stands in, noted
    Raises DataError: no record, a duplicate, a missing or uneven cell.
    """
    columns: dict[str, tuple[list, dict, dict]] = {}
    for r in source:
        rows, models, problems = columns.setdefault(r.dataset, ([], {}, {}))
        words = -1 if r.text is None else len(BACKTRACKING.findall(r.text))
        m, p = models.setdefault(r.model, len(models)), problems.setdefault(r.problem, len(problems))
        rows.append((m, p, r.sample, r.tokens, r.finished, r.correct, -1 if r.judge is None else r.judge, words, r.file, r.line))
    tables = []
    for dataset in sorted(columns):
        rows, models, problems = columns[dataset]
        a = np.array(rows, np.int64)  # [records, 10]
        order_m, order_p = sorted(models), sorted(problems)
        a[:, 0] = np.argsort(np.argsort(list(models)))[a[:, 0]]  # codes in sorted order
        a[:, 1] = np.argsort(np.argsort(list(problems)))[a[:, 1]]
        a = a[np.lexsort((a[:, 9], a[:, 8], a[:, 2], a[:, 1], a[:, 0]))]

        def at(row: np.ndarray) -> str:
            return f"{source.files[row[8]]} {'row' if source.files[row[8]].endswith('.parquet') else 'line'} {row[9]}"

        def cell(m: int, p: int, names=(order_m, order_p), dataset=dataset) -> str:
            return f"model {names[0][m]!r}, problem {names[1][p]!r}" + (f", data set {dataset!r}" if dataset else "")

        twice = np.flatnonzero((a[1:, :3] == a[:-1, :3]).all(1))
        if len(twice):
            one, two = a[twice[0]], a[twice[0] + 1]
            raise DataError(
                f"{at(two)}: {cell(two[0], two[1])}: sample {two[2]} stands already in {at(one)}; number the samples 0, 1, ... and keep one of the two"
            )
        counts = np.zeros((len(order_m), len(order_p)), np.int64)
        np.add.at(counts, (a[:, 0], a[:, 1]), 1)
        for m, p in np.argwhere(counts == 0)[:1]:
            other = a[a[:, 1] == p][0]
            have = f"{order_m[other[0]]!r} has it ({at(other)})"
            raise DataError(f"{at(other)}: {cell(m, p)}: no record, while model {have}; sample it too, or take the problem out of every model")
        n = samples or int(np.bincount(counts.ravel()).argmax())
        short = counts < n if samples else counts != n
        for m, p in np.argwhere(short)[:1]:
            first = a[(a[:, 0] == m) & (a[:, 1] == p)][0]
            wanted = f"--samples asks for {n}" if samples else f"most cells have {n}"
            fix = f"sample the missing ones, or read the first of each with --samples {counts.min()}"
            raise DataError(f"{at(first)}: {cell(m, p)}: {counts[m, p]} samples, {wanted}; {fix}")
        if samples:
            rank = np.arange(len(a)) - np.repeat(np.cumsum(counts.ravel()) - counts.ravel(), counts.ravel())
            if (rank >= n).any():
                source.notes[f"samples beyond the first {n} of a problem were left out (--samples {n})"] += int((rank >= n).sum())
            a = a[rank < n]
        cube = a.reshape(len(order_m), len(order_p), n, 10)
        judge = cube[..., 6].copy()
        for m in range(len(order_m)):
            missing = np.argwhere(judge[m] < 0)
            if 0 < len(missing) < judge[m].size:
                if judge_missing == "error":
                    row = cube[m, missing[0][0], missing[0][1]]
                    raise DataError(
                        f"{at(row)}: {cell(m, missing[0][0])}: no field 'judge' ({len(missing)} of the model's {judge[m].size} records lack it); "
                        f"judge them too, drop the field from all, or let the matcher's verdict stand in with --judge-missing matcher"
                    )
                source.notes["records without a judge's verdict took the matcher's (--judge-missing matcher)"] += len(missing)
                judge[m] = np.where(judge[m] < 0, cube[m, ..., 5], judge[m])
        arrays = [cube[..., 3], cube[..., 4].astype(bool), cube[..., 5].astype(bool), judge.astype(np.int8)]
        tables.append(Table(dataset, order_m, order_p, *arrays, *(cube[..., c].astype(np.int32) for c in (7, 8, 9))))
    return tables


def texts_at(source: Source, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Second pass over the files: (file, line) -> text, of the wanted records that have one. Answers are not kept in memory before."""
    return {(r.file, r.line): r.text for r in source if (r.file, r.line) in wanted and r.text is not None} if wanted else {}


# ---------------------------------------------------------------------------------------------------------------------- pairs and budgets

GRID = (4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)  # the paper reads 4k to 64k; the steps in between are deduced


@dataclass(frozen=True)
class Pair:
    rl: str
    base: str
    cap: int | None = None  # training cap of the RL recipe in tokens; None: unknown


def read_pairs(tables: list[Table], path: str = "", base: str = "", cap: int = 0) -> list[Pair]:
    """From a JSON file of pairs, or every other model against `base`. Every model named must have records, in the same data sets as its partner."""
    models = sorted({m for t in tables for m in t.models})
    form = '{"rl": name, "base": name, "cap": tokens or null}'
    if path and (base or cap):
        raise DataError("--base and --cap are for records without --pairs; the pairs file (for the example: its own) names bases and caps")
    if path:
        try:
            rows = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"--pairs {path}: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"--pairs {path}: not valid JSON ({error})") from None
        if type(rows) is not list or not rows:
            raise DataError(f"--pairs {path}: a list of pairs is needed: [{form}, ...]")
        for i, row in enumerate(rows, 1):
            ok = type(row) is dict and set(row) <= {"rl", "base", "cap"} and type(row.get("rl")) is str and type(row.get("base")) is str
            if not ok or not (row.get("cap") is None or (type(row["cap"]) is int and row["cap"] > 0)):
                raise DataError(f"--pairs {path}, pair {i}: {shown(row)}; a pair is {form}")
        pairs = [Pair(row["rl"], row["base"], row.get("cap")) for row in rows]
    elif base:
        pairs = [Pair(m, base, cap or None) for m in models if m != base]
        if not pairs:
            raise DataError(f"--base {base}: the records hold no other model ({', '.join(models)})")
    else:
        raise DataError(f"which model is the base? Give --base NAME or --pairs FILE; the records hold {', '.join(models)}")
    for i, pair in enumerate(pairs):
        names = f"pair {pair.rl!r} against {pair.base!r}"
        if pair.rl == pair.base or any((p.rl, p.base) == (pair.rl, pair.base) for p in pairs[:i]):
            raise DataError(f"{names}: " + ("a model against itself" if pair.rl == pair.base else "given twice"))
        for name in (pair.rl, pair.base):
            if name not in models:
                raise DataError(f"{names}: model {name!r} has no records; they hold {', '.join(models)}")
        for t in tables:
            if (pair.rl in t.models) != (pair.base in t.models):
                have, lack = (pair.rl, pair.base) if pair.rl in t.models else (pair.base, pair.rl)
                raise DataError(f"{names}: data set {t.dataset!r} has records of {have!r} but none of {lack!r}; sample them, or leave that data set out")
    return pairs


def pick_budgets(table: Table, pairs: list[Pair], wanted: tuple[int, ...], warnings: list[str]) -> tuple[list[int], dict[Pair, list[int]]]:
    """All budgets of a data set, and those of every pair: readable ones, since no cut answer of either side is shorter. A readable cap is always among them.

    wanted: the budgets asked for (DataError where one is beyond reach); (): the grid as far as the answers go, or, where that leaves fewer than three,
    what can be read halved four times [deduced]. Grid budgets that cannot be read are named in `warnings`."""
    if any(b <= 0 for b in wanted):
        raise DataError(f"--budgets {' '.join(map(str, wanted))}: a budget is a number of tokens from 1")
    readable = {}
    for pair in pairs:
        name = f"{pair.rl} against {pair.base}" + (f" on {table.dataset}" if table.dataset else "")
        limit = min(table.limit(pair.rl), table.limit(pair.base))
        longest = max(1, int(table.tokens[[table.models.index(pair.rl), table.models.index(pair.base)]].max()))
        for b in wanted:
            if b > limit:
                raise DataError(f"--budgets {b}: {name} can be read up to {limit:.0f} tokens, where an answer was cut; drop that budget or sample longer")
        grid = [b for b in wanted or GRID if b <= limit and (wanted or b < 2 * longest)]
        if not wanted and len(grid) < 3:
            grid = [max(1, int(min(limit, longest)) >> s) for s in range(5)]
        if not wanted and limit < min(GRID[-1], longest):
            warnings.append(f"{name}: budgets above {limit:.0f} tokens cannot be read, an answer was cut there while others got to {longest}")
        elif not wanted and GRID[0] <= limit < GRID[-1]:
            warnings.append(f"{name}: budgets above {limit:.0f} tokens cannot be read, answers were cut there")
        readable[pair] = sorted({*grid, *([pair.cap] if pair.cap and pair.cap <= limit else [])})
    return sorted({b for budgets in readable.values() for b in budgets}), readable


# ---------------------------------------------------------------------------------------------------------------------- simulator


@dataclass(frozen=True)
class Recipe:
    """A simulated model: how it differs from the problem's own length and solve probability."""

    name: str
    length: float = 1.0  # factor on the typical length
    logit: float = 0.0  # added to the log-odds of being right, where that is possible at all
    learned: float = 0.0  # share of the problems impossible for the base that this model solves with probability 0.6
    backtracks: float = 0.4  # waits and actuallys per 1,000 tokens


RECIPES = (Recipe("base"), Recipe("rl-8k", 0.35, 0.15, 0.0, 0.2), Recipe("rl-48k", 1.3, 0.7), Recipe("rl-new", 1.0, 0.2, 0.5))
PAIRS = ({"rl": "rl-8k", "base": "base", "cap": 8192}, {"rl": "rl-48k", "base": "base", "cap": 49152}, {"rl": "rl-new", "base": "base", "cap": 32768})


@dataclass
class Planted:
    """What the simulator drew from: solve [M, N] probability of a right answer given that it finishes, log_length [M, N], spread of the log length."""

    models: list[str]
    solve: np.ndarray
    log_length: np.ndarray
    spread: float

    def finish(self, budget: float) -> np.ndarray:
        """[M, N] probability to finish within a budget."""
        z = (np.log(budget) - self.log_length) / (self.spread * 2**0.5)
        return 0.5 * (1 + np.vectorize(erf)(z))


def simulate(
    seed: int, problems: int, samples: int, recipes: tuple[Recipe, ...] = RECIPES, limit: int = 65536, dataset: str = ""
) -> tuple[list[Record], Planted]:
    """Records of models whose finishing, reliability and reach are known. Lengths are log-normal and independent of being right.

    A fifth of the problems is impossible for a recipe with learned = 0; the others have a Beta(2, 1.2) solve probability. Answers longer than `limit` are cut.
    """
    rng = np.random.default_rng(seed)
    spread = 0.35
    typical = rng.normal(np.log(9000), 0.6, problems)
    p = rng.beta(2, 1.2, problems)
    impossible = np.arange(problems) % 5 == 0
    learn = rng.random(problems)
    odds = np.log(p / (1 - p))
    solve = np.array([np.where(impossible, np.where(learn < r.learned, 0.6, 0.0), 1 / (1 + np.exp(-odds - r.logit))) for r in recipes])
    log_length = np.array([typical + np.log(r.length) for r in recipes])
    records = []
    for m, recipe in enumerate(recipes):
        tokens = np.exp(rng.normal(log_length[m][:, None], spread, (problems, samples))).astype(int) + 1  # [N, n]
        finished = tokens <= limit
        tokens = np.minimum(tokens, limit)
        correct = finished & (rng.random((problems, samples)) < solve[m][:, None])
        judge = correct | (finished & (rng.random((problems, samples)) < 0.03))
        waits = rng.poisson(recipe.backtracks * tokens / 1000)
        for i in range(problems):
            for j in range(samples):
                text = "simulated" + " wait" * int(waits[i, j])
                row = (recipe.name, f"p{i:03d}", j, int(tokens[i, j]), bool(finished[i, j]), bool(correct[i, j]), dataset, bool(judge[i, j]), text)
                records.append(Record(*row))
    return records, Planted([r.name for r in recipes], solve, log_length, spread)
