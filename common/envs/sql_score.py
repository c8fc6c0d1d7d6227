"""Text-to-SQL: the form of a response, its regions, and its score against a reference query.

Equal results are Spider's (rows as a bag, columns in any order) or BIRD's (rows as a set, columns in order).
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.envs import Message
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
KEYWORDS = frozenset(_KEYWORD_LIST.split())


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
        region = "other" if kind == "word" and word in KEYWORDS else clause
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
