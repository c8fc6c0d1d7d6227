"""Text-to-SQL: one question, one answer, three rewards (format, executes, result).

``load(None)`` builds databases and tasks of our own in the cache folder; ``load(PATH)`` reads a Spider or BIRD folder. Scoring follows the published
evaluations: Spider's test suite (rows as a bag, columns in any order) or BIRD's (rows as a set, columns in order).

The form and the score of a response are in ``sql_score.py``, the generator of the embedded tasks in ``sql_tasks.py``.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet
from common.envs.sql_score import (
    FORMAT_REQUIREMENT,
    KEYWORDS,
    NO_QUERY,
    SQL_CLOSE,
    SQL_OPEN,
    SYSTEM_PROMPT,
    THINK_CLOSE,
    THINK_OPEN,
    Score,
    messages_for,
    normalise_query,
    parse_response,
    reference_result,
    regions,
    score_query,
)
from common.envs.sql_tasks import EVAL_DATABASES, TRAIN_DATABASES, build_embedded, cache_folder, careless, demonstrate, write_atomically


class SqlEnv:
    """One question an episode, one step an episode. The step's reward is the mean of the three rewards (NaN when the database could not be read)."""

    def __init__(self, mode: str = "spider", timeout_s: float = 2.0, max_rows: int = 10_000):
        if mode not in ("spider", "bird"):
            raise ValueError(f"mode {mode!r}: choose 'spider' or 'bird'")
        self.mode, self.timeout_s, self.max_rows = mode, timeout_s, max_rows
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task = task
        return messages_for(task)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Scores a response. Raises RuntimeError when no episode is open."""
        if self.task is None:
            raise RuntimeError("step() without reset(): a text-to-SQL episode has one step")
        task, self.task = self.task, None
        good, query = parse_response(action)
        score = Score(0.0, 0.0, NO_QUERY) if query is None else score_query(task, query, self.mode, self.timeout_s, self.max_rows)
        rewards = {"format": float(good), "executes": score.executes, "result": score.result}
        # the message comes last: prompts that show these texts then share all but their end between the responses of a task
        texts = {"format": FORMAT_REQUIREMENT, "result": task["query"], "executes": score.message}
        info: dict[str, Any] = {"success": score.result, "rewards": rewards, "verifier_text": texts, "query": query}
        if score.error:
            info["error"] = score.error
        return "", sum(rewards.values()) / len(rewards), True, False, info

    def oracle_action(self) -> str:
        """A response with the reference query."""
        if self.task is None:
            raise RuntimeError("oracle_action() without reset()")
        return f"{THINK_OPEN} {THINK_CLOSE} {SQL_OPEN} {self.task['query']} {SQL_CLOSE}"

    def close(self) -> None:
        self.task = None


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Spider and BIRD folders

EVAL_SHARE = 0.2  # of the databases, when a folder has no training file
_DATABASE_FOLDERS = ("database", "dev_databases", "train_databases", "databases")
_BIRD_DIFFICULTY = {"simple": 1, "moderate": 2, "challenging": 3}


def _identifier(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) and name.lower() not in KEYWORDS else '"' + name.replace('"', '""') + '"'


def schema_text(path: Path) -> str:
    """A database's tables in short CREATE form, from the file itself. Raises OSError or sqlite3.Error for an unreadable file."""
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            raise sqlite3.DatabaseError("file is not a database")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        parts = []
        for (table,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"
        ).fetchall():
            columns = connection.execute("SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (table,)).fetchall()
            items = [" ".join([_identifier(name), *([kind.lower()] if kind else []), *(["primary key"] if key else [])]) for name, kind, key in columns]
            for source, target, to in connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?) ORDER BY id, seq', (table,)):
                items.append(f"foreign key ( {_identifier(source)} ) references {_identifier(target)}" + (f" ( {_identifier(to)} )" if to else ""))
            parts.append(f"{_identifier(table)} ( {' , '.join(items)} )")
        return " ;\n".join(parts)
    finally:
        connection.close()


def _read_records(file: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file}: not readable as JSON ({error}); Spider and BIRD publish a JSON list of questions") from error
    if not isinstance(records, list) or not records:
        raise DataError(f"{file}: expected a non-empty JSON list of questions, found {type(records).__name__}")
    query_field = "SQL" if isinstance(records[0], dict) and "SQL" in records[0] else "query"
    result = []
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{file}: record {number}: expected an object, found {type(record).__name__}")
        for name in ("db_id", "question", query_field):
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise DataError(
                    f"{file}: record {number}: field {name!r} is missing or not a non-empty string (Spider: question, query, db_id; BIRD: question, SQL, db_id)"
                )
        if Path(record["db_id"]).name != record["db_id"] or record["db_id"] in (".", ".."):
            raise DataError(f"{file}: record {number}: field 'db_id' {record['db_id']!r} is not a plain folder name")
        evidence = record.get("evidence") or ""
        if not isinstance(evidence, str):
            raise DataError(f"{file}: record {number}: field 'evidence' is not a string")
        question = f"{record['question'].strip()}\nhint: {evidence.strip()}" if evidence.strip() else record["question"].strip()
        task = {"id": f"{file.stem}-{number:05d}", "db_id": record["db_id"], "question": question, "query": record[query_field].strip().rstrip(";").rstrip()}
        if record.get("difficulty") in _BIRD_DIFFICULTY:
            task["difficulty"] = _BIRD_DIFFICULTY[record["difficulty"]]
        result.append({**task, "bird": query_field == "SQL"})
    return result


def _database_files(folder: Path, db_id: str) -> list[Path]:
    """The main file first, then the others of its folder (a test suite)."""
    for name in _DATABASE_FOLDERS:
        main = folder / name / db_id / f"{db_id}.sqlite"
        if main.is_file():
            return [main, *sorted(path for path in main.parent.glob("*.sqlite") if path != main)]
    return []


def _failing_references(folder: Path, tasks: list[dict[str, Any]], files: dict[str, list[Path]]) -> dict[str, str]:
    """Task id -> the error of its reference query. Kept in the cache folder: a large BIRD set takes minutes to check."""
    stats = sorted((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for paths in files.values() for path in paths)
    content = json.dumps([stats, [(task["id"], task["db_id"], task["query"]) for task in tasks], sqlite3.sqlite_version])
    kept = cache_folder() / "sql-checks" / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    if len(tasks) > 2_000:
        print(f"{folder}: running {len(tasks)} reference queries once")
    failing: dict[str, str] = {}
    database_failed = False
    for task in tasks:
        query = task["query"] if task["bird"] else normalise_query(task["query"], keep_distinct=False)
        for path in files[task["db_id"]]:
            result = reference_result(str(path), query)
            if result.kind != "ok":
                failing[task["id"]] = f"{path.name}: {result.error}"
                database_failed |= result.kind in ("database", "timeout")
                break
    if not database_failed:  # a busy or broken machine may be well again the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(failing).encode())
    return failing


def _usable(folder: Path, tasks: list[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """The tasks whose databases are readable and whose reference query runs; a line for each other one is added to ``problems``."""
    files: dict[str, list[Path]] = {}
    schemas: dict[str, str] = {}
    broken: dict[str, str] = {}
    readable = []
    for task in tasks:
        db_id = task["db_id"]
        if db_id not in files:
            files[db_id] = _database_files(folder, db_id)
            try:
                schemas[db_id] = schema_text(files[db_id][0]) if files[db_id] else ""
            except (OSError, sqlite3.Error) as error:
                schemas[db_id], broken[db_id] = "", str(error)
        if not files[db_id]:
            problems.append(f"{task['id']}: no file {folder / _DATABASE_FOLDERS[0] / db_id / f'{db_id}.sqlite'}")
        elif not schemas[db_id]:
            problems.append(f"{task['id']}: {files[db_id][0]}: {broken.get(db_id, 'no table inside')}")
        else:
            readable.append(task)
    failing = _failing_references(folder, readable, files)
    problems += [f"{task['id']}: reference query fails on {failing[task['id']]}: {task['query']}" for task in readable if task["id"] in failing]
    result = []
    for task in readable:
        if task["id"] not in failing:
            fields = {name: value for name, value in task.items() if name != "bird"}
            paths = [str(path) for path in files[task["db_id"]]]
            result.append({**fields, "database": paths[0], "databases": paths, "schema": schemas[task["db_id"]], "system": SYSTEM_PROMPT})
    return result


def load_folder(folder: Path) -> TaskSet:
    """A Spider folder (dev.json, train_spider.json) or a BIRD folder (dev.json, train.json) with ``database/ID/ID.sqlite``.

    BIRD's folder names ``dev_databases`` and ``train_databases`` are read too. Without a training file the last fifth of the databases, in the order of
    dev.json, is held out. Every reference query is run once; those that fail are printed and counted in the notes. Raises DataError for malformed files, or
    when nothing is usable.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a Spider or BIRD folder with dev.json and database/ID/ID.sqlite")
    dev_file = folder / "dev.json"
    train_file = next((folder / name for name in ("train_spider.json", "train.json") if (folder / name).is_file()), None)
    if not dev_file.is_file():
        raise DataError(f"{dev_file}: missing; a Spider or BIRD folder has dev.json, its questions")
    dev = _read_records(dev_file)
    train = _read_records(train_file) if train_file else []
    kinds = {task["bird"] for task in (*dev, *train)}
    if len(kinds) > 1:
        raise DataError(f"{folder}: {dev_file.name} and {train_file.name if train_file else ''} mix Spider's field 'query' and BIRD's 'SQL'")
    bird = kinds.pop()
    notes: dict[str, Any] = {"rows": len(dev) + len(train), "comparison": "bird" if bird else "spider"}
    problems: list[str] = []
    held_out, train = _usable(folder, dev, problems), _usable(folder, train, problems)
    if train_file is None and held_out:
        names = list(dict.fromkeys(task["db_id"] for task in held_out))
        if len(names) < 2:
            raise DataError(
                f"{dev_file}: only one usable database, {names[0]}, so it cannot be split by database; add a training file (train_spider.json or train.json)"
                + "".join(f"\n  {problem}" for problem in problems[:20])
            )
        kept = set(names[-max(1, round(EVAL_SHARE * len(names))) :])
        train, held_out = [t for t in held_out if t["db_id"] not in kept], [t for t in held_out if t["db_id"] in kept]
        notes["split"] = f"no training file: dev.json split by database, held out {', '.join(sorted(kept))}"
    notes["unusable"] = len(problems)
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else "")
        if not train or not held_out:
            raise DataError(f"{folder}: no usable {'training' if held_out else 'evaluation'} task:\n  {shown}")
        print(f"{folder}: {len(problems)} questions left out:\n  {shown}")
        notes["problems"] = problems
    make_env = partial(SqlEnv, "bird", 30.0) if bird else SqlEnv
    return TaskSet(f"sql:{folder}", train, held_out, make_env, regions=regions, notes=notes)


def load(path: str | None, seed: int = 0) -> TaskSet:
    """The embedded tasks (path None) or a Spider/BIRD folder. ``seed`` orders the training tasks; what the tasks are does not depend on it."""
    if path is None:
        train, held_out = build_embedded()
        tasks = TaskSet(
            "sql", train, held_out, SqlEnv, demonstrate=demonstrate, regions=regions, careless=careless, notes={"databases": TRAIN_DATABASES + EVAL_DATABASES}
        )
    else:
        tasks = load_folder(Path(path))
    order = list(tasks.train)
    random.Random(seed).shuffle(order)
    return replace(tasks, train=order)
