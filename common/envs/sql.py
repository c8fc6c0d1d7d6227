"""Text-to-SQL: one question, one answer, three rewards (format, executes, result).

``load(None)`` builds databases and tasks of our own in the cache folder; ``load(PATH)`` reads a Spider or BIRD folder. Scoring follows the published
evaluations: Spider's test suite (rows as a bag, columns in any order) or BIRD's (rows as a set, columns in order).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import sqlite3
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.envs import DataError, Message, TaskSet
from common.sandbox import SqlResult, run_sql, sql_tokens

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SQL_OPEN, SQL_CLOSE = "<sql>", "</sql>"
TAGS = (THINK_OPEN, THINK_CLOSE, SQL_OPEN, SQL_CLOSE)
MATCH_STEPS = 2_000  # partial column matches tried for one comparison
REFERENCES_KEPT, REFERENCE_KEPT_ROWS = 512, 100_000
REWARDS = ("format", "executes", "result")
FORMAT_REQUIREMENT = f"write {THINK_OPEN} reasoning {THINK_CLOSE} {SQL_OPEN} query {SQL_CLOSE} and nothing else"
NO_QUERY = "no query found"
RESPONSE_MAX_CHARS = 100_000
NO_ERROR = "executed without error"
SYSTEM_PROMPT = (
    "You write one SQLite query that answers the question about the database below. First reason briefly, then give the query: "
    f"{THINK_OPEN} your reasoning {THINK_CLOSE} {SQL_OPEN} your query {SQL_CLOSE}. Each tag once, in this order, and no other text."
)
WORKED_EXAMPLE = [  # stands before the question: small models follow a shown answer sooner than a described one
    {"role": "user", "content": "pet ( Pet_ID int primary key , Name text , Weight int ) ;\nHow many pets weigh more than 3?"},
    {
        "role": "assistant",
        "content": f"{THINK_OPEN} table pet , rows with Weight over 3 {THINK_CLOSE} {SQL_OPEN} SELECT count(*) FROM pet WHERE Weight > 3 {SQL_CLOSE}",
    },
]

# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Embedded tasks: words

_TABLE_WORDS = """singer concert student school teacher course player team book author movie actor club museum shop worker car driver dog owner farm hotel
train pilot"""
TABLES = _TABLE_WORDS.split()
NUMBERS = ["age", "year", "size", "price", "rank", "score", "weight", "height", "speed", "salary", "cost", "level"]  # columns that hold integers
CATEGORIES = {  # columns that hold words, and the words
    "city": ["'paris'", "'london'", "'rome'", "'tokyo'", "'berlin'"],
    "color": ["'red'", "'blue'", "'green'", "'black'", "'white'"],
    "type": ["'small'", "'large'", "'basic'", "'open'", "'closed'"],
    "country": ["'france'", "'japan'", "'italy'", "'spain'", "'brazil'"],
    "status": ["'new'", "'old'", "'active'", "'lost'", "'sold'"],
    "region": ["'north'", "'south'", "'east'", "'west'", "'center'"],
}
FIRST = ["anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana", "ivan", "joan", "karl", "lena"]
LAST = ["ash", "bell", "cole", "dunn", "eck", "ford", "gray", "hill"]
THRESHOLDS = list(range(10, 95, 5))
FILLERS = ["ok", "let me see", "look at the schema", "this is easy", "step by step", "write the query"]

TRAIN_DATABASES, EVAL_DATABASES = 64, 16
TRAIN_TASKS, EVAL_TASKS = 6_000, 256
WRONG_KEPT = 3  # wrong queries kept with a task, for mistakes in a warm start
GENERATOR_SEED = 20_261


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[str, ...]  # id first


@dataclass(frozen=True)
class Schema:
    db_id: str
    parent: Table
    child: Table  # its second column is PARENT_id

    @property
    def link(self) -> str:
        return f"{self.parent.name}_id"

    @property
    def text(self) -> str:
        return " ; ".join(f"{table.name} ( {' , '.join(table.columns)} )" for table in (self.parent, self.child))


def make_schemas(rng: random.Random, count: int, taken: set[frozenset[str]]) -> list[Schema]:
    """``count`` two-table schemas; no pair of tables (in either role) that is in ``taken``, which grows."""
    schemas: list[Schema] = []
    parents: list[str] = []
    while len(schemas) < count:
        if not parents:
            parents = rng.sample(TABLES, len(TABLES))  # every table is a parent about as often, so that every PARENT_id occurs
        parent, child = parents[-1], rng.choice(TABLES)
        if parent == child or frozenset((parent, child)) in taken:
            continue
        parents.pop()
        taken.add(frozenset((parent, child)))
        numbers, words = rng.sample(NUMBERS, 4), rng.sample(sorted(CATEGORIES), 3)
        parent_columns = [*numbers[:2], words[0]]
        child_columns = [*numbers[2:], words[1]]
        rng.shuffle(parent_columns)
        rng.shuffle(child_columns)
        schemas.append(Schema(f"{parent}_{child}", Table(parent, ("id", "name", *parent_columns)), Table(child, ("id", f"{parent}_id", *child_columns))))
    return schemas


def schema_script(schema: Schema, rng: random.Random) -> str:
    """The SQL text that builds and fills a database. Numbers are distinct in a column, so that an order has no ties."""
    statements = ["PRAGMA page_size = 1024"]
    sizes = {schema.parent.name: rng.randint(16, 20), schema.child.name: rng.randint(34, 40)}
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], sizes[schema.parent.name])
    parents = rng.sample(range(1, sizes[schema.parent.name] + 1), 12)  # the others have no child
    for table in (schema.parent, schema.child):
        kinds = [f"{c} {'TEXT' if c == 'name' or c in CATEGORIES else 'INTEGER'}" for c in table.columns[1:]]
        foreign = [f"FOREIGN KEY ({schema.link}) REFERENCES {schema.parent.name} (id)"] if table is schema.child else []
        statements.append(f"CREATE TABLE {table.name} ({', '.join(['id INTEGER PRIMARY KEY', *kinds, *foreign])})")
        numbers = {column: rng.sample(range(1, 100), sizes[table.name]) for column in table.columns if column in NUMBERS}
        weights = {column: rng.sample([5, 4, 3, 2, 1], 5) for column in table.columns if column in CATEGORIES}
        for i in range(sizes[table.name]):
            row = []
            for column in table.columns:
                if column == "id":
                    row.append(str(i + 1))
                elif column == "name":
                    row.append(f"'{names[i]}'")
                elif column in NUMBERS:
                    row.append(str(numbers[column][i]))
                elif column in CATEGORIES:
                    row.append(rng.choices(CATEGORIES[column], weights[column])[0])
                else:
                    row.append(str(rng.choices(parents, range(1, 13))[0]))
            statements.append(f"INSERT INTO {table.name} VALUES ({', '.join(row)})")
    return ";\n".join(statements) + ";\n"


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Embedded tasks: questions


@dataclass(frozen=True)
class Query:
    """The parts of a query, so that wrong variants can be made by changing one part. ``tables`` holds one name or (child, parent) for a join."""

    select: tuple[str, ...]
    tables: tuple[str, ...]
    where: tuple[tuple[str, str, str], ...] = ()  # (left, operator, right)
    distinct: bool = False
    group: str = ""
    having: tuple[str, str] = ()  # type: ignore[assignment]  # (operator, number) on count ( * )
    order: tuple[str, str] = ()  # type: ignore[assignment]  # (expression, ASC or DESC)
    limit: int = 0

    def sql(self) -> str:
        parts = ["SELECT", *(["DISTINCT"] if self.distinct else []), " , ".join(self.select), "FROM", self.tables[0]]
        if len(self.tables) == 2:
            child, parent = self.tables
            parts += ["JOIN", parent, "ON", f"{child} . {parent}_id = {parent} . id"]
        if self.where:
            parts += ["WHERE", " AND ".join(" ".join(condition) for condition in self.where)]
        if self.group:
            parts += ["GROUP BY", self.group]
        if self.having:
            parts += ["HAVING", "count ( * )", *self.having]
        if self.order:
            parts += ["ORDER BY", *self.order]
        if self.limit:
            parts += ["LIMIT", str(self.limit)]
        return " ".join(parts)


@dataclass(frozen=True)
class Draft:
    """A candidate task: the question, the query, and the columns that the reasoning names, shown ones and those of conditions."""

    question: str
    query: Query
    columns: tuple[str, ...]
    difficulty: int
    filter: tuple[str, ...] = ()


AGGREGATES = {"max": "maximum", "min": "minimum", "avg": "average", "sum": "total"}
OPERATORS = {">": "over", "<": "under"}


def _of(function: str, column: str) -> str:
    return f"{function} ( {column} )"


def _condition(table: Table, rng: random.Random, prefix: str = "", avoid: Sequence[str] = ()) -> tuple[tuple[str, str, str], str, str]:
    """A condition on one column: (the SQL parts, the English, the column)."""
    column = rng.choice([c for c in table.columns if (c in NUMBERS or c in CATEGORIES) and c not in avoid])
    if column in CATEGORIES:
        value = rng.choice(CATEGORIES[column])
        if rng.random() < 0.2:
            return (prefix + column, "!=", value), f"{column} not {value}", column
        return (prefix + column, "=", value), f"{column} {value}", column
    operator, number = rng.choice(list(OPERATORS)), str(rng.choice(THRESHOLDS))
    return (prefix + column, operator, number), f"{column} {OPERATORS[operator]} {number}", column


def _numbers(table: Table) -> list[str]:
    return [c for c in table.columns if c in NUMBERS]


def _words(table: Table) -> list[str]:
    return [c for c in table.columns if c in CATEGORIES]


def draft(schema: Schema, difficulty: int, rng: random.Random) -> Draft:
    """A random question: 1 one table, at most one condition; 2 aggregates, two conditions, order with limit; 3 groups, subqueries; 4 joins."""
    table = rng.choice((schema.parent, schema.child))
    shown = [c for c in table.columns if c != "id" and not c.endswith("_id")]
    every = rng.choice(("every", "each"))
    show = rng.choice(("show", "list", "give"))
    t = table.name
    if difficulty == 1:
        kind = rng.choice(("columns", "where", "where", "where2", "order", "count"))
        if kind == "columns":
            columns = tuple(rng.sample(shown, 2))
            return Draft(f"{show} the {columns[0]} and {columns[1]} of {every} {t}", Query(columns, (t,)), columns, 1)
        if kind == "count":
            condition, english, column = _condition(table, rng)
            question = rng.choice((f"how many {t} rows have {english}", f"count the {t} rows with {english}"))
            return Draft(question, Query(("count ( * )",), (t,), (condition,)), (), 1, (column,))
        if kind == "order":
            shown_column, by = rng.choice(shown), rng.choice(_numbers(table))
            direction = rng.choice(("ASC", "DESC"))
            english = "ascending" if direction == "ASC" else "descending"
            return Draft(
                f"{show} the {shown_column} of {every} {t} by {english} {by}", Query((shown_column,), (t,), order=(by, direction)), (shown_column,), 1, (by,)
            )
        columns = tuple(rng.sample(shown, 2 if kind == "where2" else 1))
        condition, english, column = _condition(table, rng, avoid=[c for c in columns if c in CATEGORIES])
        return Draft(f"{show} the {' and '.join(columns)} of {every} {t} with {english}", Query(columns, (t,), (condition,)), columns, 1, (column,))
    if difficulty == 2:
        kind = rng.choice(("aggregate", "aggregate", "and", "between", "limit", "distinct"))
        if kind == "aggregate":
            function, column = rng.choice(list(AGGREGATES)), rng.choice(_numbers(table))
            condition, english, other = _condition(table, rng, avoid=(column,))
            question = rng.choice(("what is", show)) + f" the {AGGREGATES[function]} {column} of {every} {t} with {english}"
            return Draft(question, Query((_of(function, column),), (t,), (condition,)), (column,), 2, (other,))
        column = rng.choice(shown)
        if kind == "and":
            words = (column,) if column in CATEGORIES else ()
            first, english1, column1 = _condition(table, rng, avoid=words)
            second, english2, column2 = _condition(table, rng, avoid=(*words, column1))
            question = f"{show} the {column} of {every} {t} with {english1} and {english2}"
            return Draft(question, Query((column,), (t,), (first, second)), (column,), 2, (column1, column2))
        by = rng.choice(_numbers(table))
        if kind == "between":
            low, high = sorted(rng.sample(THRESHOLDS, 2))
            question = f"{show} the {column} of {every} {t} with {by} between {low} and {high}"
            return Draft(question, Query((column,), (t,), ((by, "BETWEEN", f"{low} AND {high}"),)), (column,), 2, (by,))
        if kind == "limit":
            top, limit = rng.choice((True, False)), rng.randint(1, 5)
            question = f"{show} the {column} of the {limit} {t} rows with the {'highest' if top else 'lowest'} {by}"
            return Draft(question, Query((column,), (t,), order=(by, "DESC" if top else "ASC"), limit=limit), (column,), 2, (by,))
        column = rng.choice(_words(table))
        condition, english, other = _condition(table, rng, avoid=(column,))
        return Draft(
            f"{show} the different {column} values of {every} {t} with {english}", Query((column,), (t,), (condition,), distinct=True), (column,), 2, (other,)
        )
    if difficulty == 3:
        kind = rng.choice(("count", "aggregate", "having", "most", "average"))
        group = rng.choice(_words(table))
        if kind == "count":
            condition, english, other = _condition(table, rng, avoid=(group,))
            question = f"how many {t} rows with {english} are there for {every} {group}"
            return Draft(question, Query((group, "count ( * )"), (t,), (condition,), group=group), (group,), 3, (other,))
        by = rng.choice(_numbers(table))
        if kind == "aggregate":
            function = rng.choice(list(AGGREGATES))
            question = rng.choice(("what is", show)) + f" the {AGGREGATES[function]} {by} of {t} for {every} {group}"
            return Draft(question, Query((group, _of(function, by)), (t,), group=group), (group, by), 3)
        if kind == "having":
            number = rng.randint(2, 9)
            operator = rng.choice(list(OPERATORS))
            english = "more" if operator == ">" else "less"
            question = f"which {group} values have {english} than {number} {t} rows"
            return Draft(question, Query((group,), (t,), group=group, having=(operator, str(number))), (group,), 3)
        if kind == "most":
            top = rng.choice((True, False))
            question = f"which {group} has the {'most' if top else 'fewest'} {t} rows"
            return Draft(question, Query((group,), (t,), group=group, order=("count ( * )", "DESC" if top else "ASC"), limit=1), (group,), 3)
        column, operator = rng.choice(shown), rng.choice(list(OPERATORS))
        english = "above" if operator == ">" else "below"
        question = f"{show} the {column} of {every} {t} with {by} {english} the average"
        return Draft(question, Query((column,), (t,), ((by, operator, f"( SELECT avg ( {by} ) FROM {t} )"),)), (column,), 3, (by,))
    parent, child = schema.parent, schema.child
    p, c = parent.name, child.name
    both = (c, p)
    kind = rng.choice(("child", "parent", "group", "aggregate", "none", "count"))
    unique = ["name", *_numbers(parent)]  # columns whose values differ in every row: the same answer with and without DISTINCT over a join
    if kind == "child":
        column = rng.choice([x for x in child.columns if x in NUMBERS or x in CATEGORIES])
        condition, english, other = _condition(parent, rng, prefix=f"{p} . ")
        return Draft(
            f"{show} the {column} of {every} {c} that belongs to a {p} with {english}", Query((f"{c} . {column}",), both, (condition,)), (column,), 4, (other,)
        )
    if kind == "parent":
        column = rng.choice(unique)
        condition, english, other = _condition(child, rng, prefix=f"{c} . ")
        query = Query((f"{p} . {column}",), both, (condition,), distinct=True)
        return Draft(f"{show} the {column} of {every} {p} that has a {c} with {english}", query, (column,), 4, (other,))
    if kind == "group":
        condition, english, other = _condition(child, rng, prefix=f"{c} . ")
        query = Query((f"{p} . name", "count ( * )"), both, (condition,), group=f"{p} . name")
        return Draft(f"how many {c} rows with {english} are there for {every} {p} name", query, ("name",), 4, (other,))
    if kind == "aggregate":
        function, by, group = rng.choice(list(AGGREGATES)), rng.choice(_numbers(child)), rng.choice(["name", *_words(parent)])
        key = f"{p} . {group}"
        question = rng.choice(("what is", show)) + f" the {AGGREGATES[function]} {c} {by} for {every} {p} {group}"
        return Draft(question, Query((key, _of(function, f"{c} . {by}")), both, group=key), (group, by), 4)
    if kind == "none":
        column = rng.choice(unique)
        condition, english, other = _condition(child, rng)
        inner = f"( SELECT {schema.link} FROM {c} WHERE {' '.join(condition)} )"
        question = f"{show} the {column} of {every} {p} that has no {c} with {english}"
        return Draft(question, Query((column,), (p,), (("id", "NOT IN", inner),)), (column,), 4, (other,))
    condition, english, other = _condition(parent, rng, prefix=f"{p} . ")
    return Draft(f"how many {c} rows belong to a {p} with {english}", Query(("count ( * )",), both, (condition,)), (), 4, (other,))


_OPPOSITE = {">": "<", "<": ">", "=": "!=", "!=": "=", "NOT IN": "IN", "BETWEEN": "NOT BETWEEN"}


def _swaps(text: str, schema: Schema, tables: Sequence[str]) -> list[str]:
    """``text`` with its column replaced by each other column of the same table that holds the same kind of value (name counts as a word)."""
    result = []
    for table in (schema.parent, schema.child):
        if table.name not in tables:
            continue
        for kind in (NUMBERS, ("name", *CATEGORIES)):
            for column in table.columns:
                pattern = rf"\b{column}\b"
                qualified = re.search(r"(\w+) \. (\w+)", text)
                if column in kind and re.search(pattern, text) and not (qualified and qualified.group(1) != table.name):
                    result += [re.sub(pattern, other, text) for other in table.columns if other in kind and other != column]
    return result


def wrong_variants(query: Query, schema: Schema) -> list[str]:
    """Common mistakes as SQL texts: each differs from the query in one part. A good task gives each of them another result."""
    wrong: list[Query] = []
    for i, item in enumerate(query.select):
        others = _swaps(item, schema, query.tables)
        function = item.split(" ", 1)[0]
        if function in AGGREGATES:
            others += [item.replace(function, other, 1) for other in AGGREGATES if other != function]
        wrong += [replace(query, select=(*query.select[:i], other, *query.select[i + 1 :])) for other in others if other not in query.select]
        if len(query.select) > 1:
            wrong.append(replace(query, select=(*query.select[:i], *query.select[i + 1 :])))
    for i, (left, operator, right) in enumerate(query.where):
        others: list[tuple[str, str, str] | None] = [None, (left, _OPPOSITE[operator], right)]
        if " WHERE " in right:
            others.append((left, operator, right.split(" WHERE ")[0] + " )"))
        column = left.split(" ")[-1]
        if column in NUMBERS:
            others += [(swapped, operator, right) for swapped in _swaps(left, schema, query.tables)]
        if column in CATEGORIES:
            others += [(left, operator, value) for value in CATEGORIES[column] if value != right]
        wrong += [replace(query, where=(*query.where[:i], *([other] if other else []), *query.where[i + 1 :])) for other in others]
    if query.distinct:
        wrong.append(replace(query, distinct=False))
    if query.group:
        wrong += [replace(query, group=other) for other in _swaps(query.group, schema, query.tables)]
    if query.having:
        operator, number = query.having
        wrong += [replace(query, having=()), replace(query, having=(_OPPOSITE[operator], number)), replace(query, having=(operator, str(int(number) + 1)))]
    if query.order:
        by, direction = query.order
        wrong += [replace(query, order=(other, direction)) for other in _swaps(by, schema, query.tables)]
        wrong += [replace(query, order=()), replace(query, order=(by, "ASC" if direction == "DESC" else "DESC"))]
    if query.limit:
        wrong += [replace(query, limit=0), replace(query, limit=query.limit + 1)]
    return [variant.sql() for variant in wrong]


def discriminate(query: Query, schema: Schema, database: str) -> list[str] | None:
    """The common mistakes that run, when the reference gives rows that none of them also gives and that do not hang on a tie; else None."""
    gold = run_sql(database, query.sql())
    if gold.kind != "ok" or gold.rows is None:
        raise RuntimeError(f"generated query fails on {database}: {query.sql()}: {gold.error}")
    if not gold.rows or any(value is None or value == 0 for row in gold.rows for value in row):
        return None
    if query.limit and query.order[0].startswith("count"):
        counts = run_sql(database, replace(query, select=(query.order[0],), limit=2).sql()).rows
        if counts is None or len(counts) < 2 or counts[0] == counts[1]:
            return None
    running = []
    for variant in wrong_variants(query, schema):
        result = run_sql(database, variant)
        if result.kind == "ok" and result.rows is not None:
            if spider_equal(gold.rows, result.rows, bool(query.order)):
                return None
            running.append(variant)
    return running or None


def _write_atomically(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _database_bytes(script: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(script)
        return connection.serialize()
    finally:
        connection.close()


def cache_folder() -> Path:
    return Path(os.environ.get("CLEANAGENTRL_CACHE") or "~/.cache/cleanagentrl").expanduser()


def build_embedded() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The embedded training and validation tasks. The first call builds the databases and checks every task (some seconds); later ones read the cache."""
    key = hashlib.sha256(Path(__file__).read_bytes() + sqlite3.sqlite_version.encode()).hexdigest()[:16]
    folder = cache_folder() / "sql" / key
    listing = folder / "tasks.json"
    if listing.is_file():
        tasks = json.loads(listing.read_text())
        if all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in tasks["files"].items()):
            return tuple([{**task, "database": str(folder / f"{task['db_id']}.sqlite")} for task in tasks[split]] for split in ("train", "eval"))  # type: ignore[return-value]
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(GENERATOR_SEED)
    taken: set[frozenset[str]] = set()
    content: dict[str, Any] = {"files": {}}
    for split, databases, count in (("train", TRAIN_DATABASES, TRAIN_TASKS), ("eval", EVAL_DATABASES, EVAL_TASKS)):
        schemas = make_schemas(rng, databases, taken)
        for schema in schemas:
            data = _database_bytes(schema_script(schema, rng))
            _write_atomically(folder / f"{schema.db_id}.sqlite", data)
            content["files"][f"{schema.db_id}.sqlite"] = len(data)
        tasks, seen = [], set()
        while len(tasks) < count:
            schema, difficulty = schemas[len(tasks) // 4 % databases], len(tasks) % 4 + 1
            item = draft(schema, difficulty, rng)
            database = str(folder / f"{schema.db_id}.sqlite")
            if (schema.db_id, item.question) in seen or (wrong := discriminate(item.query, schema, database)) is None:
                continue
            seen.add((schema.db_id, item.question))
            tasks.append(
                {
                    "id": f"{split}-{len(tasks):04d}",
                    "db_id": schema.db_id,
                    "question": item.question,
                    "schema": schema.text,
                    "query": item.query.sql(),
                    "difficulty": difficulty,
                    "keep_distinct": True,
                    "wrong": rng.sample(wrong, min(WRONG_KEPT, len(wrong))),
                    "names": {"tables": list(reversed(item.query.tables)), "columns": list(item.columns), "filter": list(item.filter)},
                }
            )
        content[split] = tasks
    _write_atomically(listing, json.dumps(content, indent=0).encode())
    return build_embedded()


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """A whole conversation that solves an embedded task. The reasoning names tables and columns; half of the time it also carries words that change nothing."""
    names = task["names"]
    parts = [f"{word} {' and '.join(names[key])}" for word, key in (("table", "tables"), ("column", "columns"), ("filter", "filter")) if names[key]]
    if rng.random() < 0.5:
        parts.insert(0, rng.choice(FILLERS))
    if rng.random() < 0.25:
        parts.append(rng.choice(FILLERS))
    answer = f"{THINK_OPEN} {' , '.join(parts)} {THINK_CLOSE} {SQL_OPEN} {task['query']} {SQL_CLOSE}"
    return [*messages_for(task), {"role": "assistant", "content": answer}]


# (pattern, replacement, probability) of each habit of `careless`: what it breaks is in the name of the group
HABITS = {
    "executes": [(r"GROUP BY", "GROUP", 0.4), (r"ORDER BY", "ORDER", 0.4), (r"'(\w+)'", r"\1", 0.5), (r"BETWEEN (\d+) AND", r"BETWEEN \1 ,", 0.5)],
    "result": [
        (r" DESC\b", "", 0.5),
        (r"DISTINCT ", "", 0.5),
        (r"\bavg \(", "sum (", 0.5),
        (r"\bmax \(", "min (", 0.5),
        (r"NOT IN", "IN", 0.5),
        (r" > (\d+)", r" < \1", 0.45),
        (r" AND (?!\d)[^()]*$", "", 0.4),
    ],
}


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert who forgets the closing tag half of the time and has the HABITS."""
    *messages, answer = demonstrate(task, rng)
    query = task["query"]
    for pattern, replacement, probability in (habit for group in HABITS.values() for habit in group):
        if rng.random() < probability:
            query = re.sub(pattern, replacement, query)
    text = answer["content"].replace(task["query"], query)
    if rng.random() < 0.55:
        text = text.removesuffix(" " + SQL_CLOSE)
    return [*messages, {"role": "assistant", "content": text}]


MISTAKES = ("column", "table", "format", "result")


def mistake(task: dict[str, Any], rng: random.Random, kind: str = "") -> list[Message]:
    """Like ``demonstrate``, with one mistake (of ``MISTAKES``, drawn when not given): an unknown ``column`` or ``table``, which SQLite reports; a broken
    ``format``; a query that runs and gives another ``result``. For warm starts that must have seen the verifier texts of failures.
    """
    kind = kind or rng.choice(MISTAKES)
    *messages, answer = demonstrate(task, rng)
    text = answer["content"]
    if kind == "format":
        tag = rng.choice(TAGS)
        text = rng.choice((text.replace(tag + " ", "").replace(" " + tag, ""), text.replace(tag, f"{tag} {tag}"), f"{text} {rng.choice(FILLERS)}"))
    else:
        known = set(re.findall(r"\w+", task["schema"]))
        query = task["query"]
        tables, columns = [w for w in TABLES if w in known], [w for w in ("name", *NUMBERS, *CATEGORIES) if re.search(rf"\b{w}\b", query)]
        if kind == "table":
            old = rng.choice([w for w in tables if re.search(rf"\b{w}\b", query)])
            query = re.sub(rf"\b{old}\b", rng.choice([w for w in TABLES if w not in known]), query)
        elif kind == "column" and columns:
            query = re.sub(rf"\b{rng.choice(columns)}\b", rng.choice([w for w in NUMBERS if w not in known]), query)
        elif kind == "column":
            query = query.replace("*", rng.choice([w for w in NUMBERS if w not in known]), 1)
        else:
            query = rng.choice(task["wrong"])
        text = text.replace(task["query"], query)
    return [*messages, {"role": "assistant", "content": text}]


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Comparing results


def _row_key(value: Any) -> str:
    return str(value) + str(type(value))


def spider_equal(gold: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]], order_matters: bool) -> bool:
    """Spider's test-suite equality of two results: same rows the same number of times (in the same order if ``order_matters``) under some order of the
    columns.

    Two empty results are equal whatever their columns. The official search over column orders tries them all; here columns are matched one by one and a
    partial match whose rows already differ is dropped at once. Past ``MATCH_STEPS`` partial matches (only reachable with many look-alike columns) the
    answer is False.
    """
    if not gold and not other:
        return True
    if len(gold) != len(other) or len(gold[0]) != len(other[0]):
        return False
    if list(gold) == list(other):
        return True
    width = len(gold[0])
    # The official pre-check, kept because it decides too: it sorts the values of a row by their text and type, so 1 and 1.0 can part a pair that == would join.
    first, second = ([tuple(sorted(row, key=_row_key)) for row in rows] for rows in (gold, other))
    if (first != second) if order_matters else (set(first) != set(second)):
        return False
    if width == 1:
        return Counter(gold) == Counter(other)
    codes: dict[Any, int] = {}
    left, right = (np.array([[codes.setdefault(value, len(codes)) for value in row] for row in rows], dtype=np.int64) for rows in (gold, other))
    if order_matters:  # the columns as bags: equal ones are interchangeable
        return Counter(left[:, i].tobytes() for i in range(width)) == Counter(right[:, j].tobytes() for j in range(width))
    theirs = [np.sort(right[:, j]).tobytes() for j in range(width)]
    candidates = [[j for j in range(width) if theirs[j] == np.sort(left[:, i]).tobytes()] for i in range(width)]
    if not all(candidates):
        return False
    turn = sorted(range(width), key=lambda i: (len(candidates[i]), -len(np.unique(left[:, i]))))
    steps = 0

    def match(depth: int, groups: np.ndarray, used: int) -> bool:
        """groups: int64 [2 * rows], the class of each row by the columns matched so far, gold's rows first."""
        nonlocal steps
        if depth == width:
            return True
        tried = set()
        for j in candidates[turn[depth]]:
            content = right[:, j].tobytes()
            if used >> j & 1 or content in tried:
                continue
            tried.add(content)  # an equal column would fail the same way
            steps += 1
            if steps > MATCH_STEPS:
                return False
            _, refined = np.unique(groups * len(codes) + np.concatenate((left[:, turn[depth]], right[:, j])), return_inverse=True)
            rows, classes = len(left), int(refined.max()) + 1
            if np.array_equal(np.bincount(refined[:rows], minlength=classes), np.bincount(refined[rows:], minlength=classes)) and match(
                depth + 1, refined, used | 1 << j
            ):
                return True
        return False

    return match(0, np.zeros(2 * len(gold), dtype=np.int64), 0)


def bird_equal(gold: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> bool:
    """BIRD's equality: the same set of rows, columns in order."""
    return set(gold) == set(other)


def normalise_query(query: str, keep_distinct: bool) -> str:
    """What Spider's evaluation does to both queries: split comparison operators joined, YEAR(CURDATE()) read as 2020, DISTINCT dropped unless kept."""
    query = query.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    query = re.sub(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", "2020", query, flags=re.IGNORECASE)
    if keep_distinct:
        return query
    return "".join(text for _, text, _, _ in sql_tokens(query) if text.lower() != "distinct")


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# The environment


def parse_response(text: str) -> tuple[bool, str | None]:
    """(whether the response has exactly the asked form, the query or None). The query is what the last complete pair of sql tags holds, in any surroundings."""
    if len(text) > RESPONSE_MAX_CHARS:
        return False, None
    form = rf"\s*{THINK_OPEN}.*{THINK_CLOSE}\s*{SQL_OPEN}.*{SQL_CLOSE}\s*"
    good = all(text.count(tag) == 1 for tag in TAGS) and re.fullmatch(form, text, re.DOTALL) is not None
    head, closed, _ = text.rpartition(SQL_CLOSE)
    _, opened, query = head.rpartition(SQL_OPEN)
    return good, (query.strip() or None) if opened and closed else None


def messages_for(task: dict[str, Any]) -> list[Message]:
    user = {"role": "user", "content": f"{task['schema']}\n{task['question']}"}
    return [{"role": "system", "content": task["system"]}, *WORKED_EXAMPLE, user] if task.get("system") else [user]


@dataclass(frozen=True)
class Score:
    """executes and result are 0, 1, or NaN when the database could not be read (``error`` then says why)."""

    executes: float
    result: float
    message: str
    error: str = ""


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


def score_query(task: dict[str, Any], query: str, mode: str = "spider", timeout_s: float = 2.0, max_rows: int = 10_000) -> Score:
    """Runs a query against the task's reference on the task's database, and on every other database file of the task's ``databases`` list."""
    paths = task.get("databases") or [task["database"]]
    keep = mode == "bird" or bool(task.get("keep_distinct"))
    change: Callable[[str], str] = (lambda text: text) if mode == "bird" else (lambda text: normalise_query(text, keep))
    gold_query, model_query = change(task["query"]), change(query)
    order_matters = "order by" in gold_query.lower()
    executes = run_sql(paths[0], query if keep else model_query, timeout_s=timeout_s, max_rows=max_rows)
    for i, path in enumerate(paths):
        gold = reference_result(path, gold_query)
        if gold.kind != "ok" or gold.rows is None:
            return Score(math.nan, math.nan, "", f"reference query of task {task['id']} fails: {gold.error}")
        limit = max(max_rows, 2 * len(gold.rows))
        result = executes if i == 0 and limit == max_rows else run_sql(path, model_query, timeout_s=timeout_s, max_rows=limit)
        if result.kind == "database":
            return Score(math.nan, math.nan, "", result.error or "")
        if result.kind != "ok" or result.rows is None:
            return Score(0.0, 0.0, result.error or "") if i == 0 else Score(1.0, 0.0, NO_ERROR)
        if not (bird_equal(gold.rows, result.rows) if mode == "bird" else spider_equal(gold.rows, result.rows, order_matters)):
            return Score(1.0, 0.0, NO_ERROR)
    return Score(1.0, 1.0, NO_ERROR)


_references: OrderedDict[tuple[Any, ...], SqlResult] = OrderedDict()
_references_lock = threading.Lock()


def reference_result(path: str, query: str) -> SqlResult:
    """The result of a trusted query, with wide limits, kept for the next responses to the same task."""
    try:
        stat = os.stat(path)
    except OSError as error:
        return SqlResult(0, None, f"cannot read database {path}: {error.strerror}", "database")
    key = (path, stat.st_mtime_ns, stat.st_size, query)
    with _references_lock:
        if key in _references:
            _references.move_to_end(key)
            return _references[key]
    result = run_sql(path, query, timeout_s=60.0, max_rows=1_000_000, max_bytes=500_000_000)
    if result.rows is not None and len(result.rows) <= REFERENCE_KEPT_ROWS:
        with _references_lock:
            _references[key] = result
            while len(_references) > REFERENCES_KEPT:
                _references.popitem(last=False)
    return result


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Regions of a response

_CLAUSE_REGION = {
    "select": "columns",
    "from": "tables",
    "join": "tables",
    "where": "conditions",
    "group": "conditions",
    "having": "conditions",
    "order": "conditions",
    "limit": "conditions",
}
_KEYWORD_LIST = """select distinct all from join inner left right full outer cross natural on using where group by having order asc desc limit offset union
intersect except as with recursive"""
_KEYWORDS = frozenset(_KEYWORD_LIST.split())


def regions(text: str) -> list[tuple[str, int, int]]:
    """Character spans of a response, in order and without overlap; text outside the tags belongs to none.

    ``tags``, ``reasoning``, and in the query ``columns`` (the select lists), ``tables`` (after FROM and JOIN), ``conditions`` (after WHERE, GROUP BY, HAVING,
    ORDER BY, LIMIT) and ``other`` (keywords, join keys).
    """
    spans: list[tuple[str, int, int]] = []
    tags = [(match.start(), match.end(), match.group()) for match in re.finditer("|".join(map(re.escape, TAGS)), text)]
    for (start, end, tag), (following, _, _) in zip(tags, [*tags[1:], (len(text), 0, "")]):
        spans.append(("tags", start, end))
        content = text[end:following]
        inside_start, inside_end = end + len(content) - len(content.lstrip()), end + len(content.rstrip())
        if inside_end <= inside_start:
            continue
        if tag == THINK_OPEN:
            spans.append(("reasoning", inside_start, inside_end))
        elif tag == SQL_OPEN:
            spans += _query_regions(text[inside_start:inside_end], inside_start)
    return spans


def _query_regions(query: str, offset: int) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    clause, stack = "other", []
    for kind, token, start, end in sql_tokens(query):
        if kind == "space":
            continue
        word = token.lower()
        region = "other" if kind == "word" and word in _KEYWORDS else clause
        if kind == "word" and word in _CLAUSE_REGION:
            clause = _CLAUSE_REGION[word]
        elif kind == "word" and word in ("on", "using", "union", "intersect", "except", "with"):
            clause = "other"
        elif token == "(":
            stack.append(clause)
        elif token == ")" and stack:
            clause = region = stack.pop()
        if spans and spans[-1][0] == region:
            spans[-1] = (region, spans[-1][1], offset + end)
        else:
            spans.append((region, offset + start, offset + end))
    return spans


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Spider and BIRD folders

EVAL_SHARE = 0.2  # of the databases, when a folder has no training file
_DATABASE_FOLDERS = ("database", "dev_databases", "train_databases", "databases")
_BIRD_DIFFICULTY = {"simple": 1, "moderate": 2, "challenging": 3}


def _identifier(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) and name.lower() not in _KEYWORDS else '"' + name.replace('"', '""') + '"'


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
        _write_atomically(kept, json.dumps(failing).encode())
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
