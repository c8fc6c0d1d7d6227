"""Text-to-SQL: databases, questions and demonstrations of our own, built once in the cache folder. The same for every seed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.envs import Message, sql_score
from common.envs.sql_score import SQL_CLOSE, SQL_OPEN, THINK_CLOSE, THINK_OPEN, messages_for, spider_equal
from common.sandbox import run_sql

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
WRONG_KEPT = 3  # wrong queries kept with a task
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


def write_atomically(path: Path, content: bytes) -> None:
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
    sources = [Path(__file__), Path(sql_score.__file__)]  # what decides which tasks exist
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + sqlite3.sqlite_version.encode()).hexdigest()[:16]
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
            write_atomically(folder / f"{schema.db_id}.sqlite", data)
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
    write_atomically(listing, json.dumps(content, indent=0).encode())
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
