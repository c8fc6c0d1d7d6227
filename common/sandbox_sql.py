"""One read-only query that a model wrote: run in this process through the stdlib's sqlite3, with an allow-list, limits and a deadline."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

SQL_MAX_LENGTH = 20_000  # characters of a query
VALUE_MAX_BYTES = 100_000  # one string, blob or row inside SQLite; bounds what a single opcode can cost, which no progress handler interrupts
MESSAGE_MAX_CHARS = 200
HEAP_BYTES = 256 << 20  # of SQLite in this whole process: sorting, and what repeated subqueries grow to while a query is compiled, which nothing interrupts
HEAVY_CALLS = 64  # mentions of functions that can take length x length steps in one opcode
CONNECTIONS_PER_THREAD = 16
PROGRESS_OPCODES = 100

# Error codes that speak of the file or the machine, not of the query.
_DATABASE_CODES = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOTADB,
}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE_MAX_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * SQL_MAX_LENGTH,
    sqlite3.SQLITE_LIMIT_COLUMN: 1_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# Functions a question about data can need. Left out: whatever reaches files, extensions, the library itself, or costs more than linear time (json_patch).
_FUNCTION_NAMES = """abs avg ceil ceiling changes char coalesce concat concat_ws count cume_dist current_date current_time current_timestamp date
datetime degrees dense_rank exp first_value floor format glob group_concat hex ifnull iif instr julianday lag last_value
last_insert_rowid lead length like likelihood likely ln log log10 log2 lower ltrim max min mod nth_value ntile nullif octet_length
percent_rank pi pow power printf quote radians random rank replace round row_number rtrim sign sin cos tan asin acos atan atan2
sinh cosh tanh soundex sqrt strftime string_agg substr substring subtype sum time timediff total trim trunc typeof unicode
unixepoch unlikely upper"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_HEAVY_FUNCTIONS = frozenset({"glob", "instr", "like", "ltrim", "replace", "rtrim", "trim"})
_ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}
_SCHEMA_TABLES = {"sqlite_master", "sqlite_schema", "sqlite_sequence"}

_SQL_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
      |(?P<string>'(?:[^']|'')*(?:'|\Z))
      |(?P<quoted>"(?:[^"]|"")*(?:"|\Z)|`(?:[^`]|``)*(?:`|\Z)|\[[^\]]*(?:\]|\Z))
      |(?P<number>\d[\w.]*)
      |(?P<word>[^\W\d][\w$]*)
      |(?P<op><=|>=|<>|!=|==|\|\||.)""",
    re.VERBOSE | re.DOTALL,
)


def sql_tokens(query: str) -> list[tuple[str, str, int, int]]:
    """Tokens of a query as (kind, text, start, end); kinds: space (with comments), string, quoted, number, word, op. Joined, the texts give the query back."""
    return [(m.lastgroup or "op", m.group(), m.start(), m.end()) for m in _SQL_TOKEN.finditer(query)]


@dataclass(frozen=True)
class SqlResult:
    """What one query gave. ``rows`` is None unless kind is ``ok``; ``error`` is None when it is.

    kind: ``ok``; ``error`` (SQLite refused or failed it); ``timeout``; ``too_large`` (rows, bytes, a value or the program over its limit); ``refused``
    (outside the allow-list: a write, ATTACH, PRAGMA, a second statement, ...); ``database`` (the file is missing, unreadable or damaged: nothing was learned
    about the query).
    """

    columns: int
    rows: list[tuple[Any, ...]] | None
    error: str | None
    kind: str


class _Connection:
    """An open read-only database with what its callbacks share. Belongs to one thread."""

    def __init__(self, path: str, identity: tuple[int, ...]):
        self.identity = identity
        self.deadline = 0.0
        self.denied = False
        self.heavy_calls = 0
        with open(path, "rb") as file:
            if file.read(16) != b"SQLite format 3\0":  # an empty file would open as an empty database
                raise sqlite3.DatabaseError("file is not a database")
        # isolation_level None: the sqlite3 module must not begin transactions of its own
        self.handle = sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro&immutable=1", uri=True, isolation_level=None, cached_statements=64)
        self.handle.text_factory = lambda raw: raw.decode(errors="ignore")
        try:
            self.handle.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
            self.handle.execute("PRAGMA temp_store = MEMORY")  # under the heap limit, where temporary files could fill the disk
            self.tables = {row[0].lower() for row in self.handle.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")} | _SCHEMA_TABLES
        except sqlite3.Error:
            self.handle.close()
            raise
        for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
            self.handle.create_function(name, 2, _trim(strip), deterministic=True)  # SQLite's own takes length x length steps in one opcode
        for limit, value in _LIMITS.items():
            self.handle.setlimit(limit, value)
        self.handle.set_authorizer(self.authorize)
        self.handle.set_progress_handler(self.expired, PROGRESS_OPCODES)

    def authorize(self, action: int, arg1: str | None, arg2: str | None, _database: str | None, _source: str | None) -> int:
        if action == sqlite3.SQLITE_READ:
            allowed = arg2 == "" or (arg1 or "").lower() in self.tables  # no column: SQLite reports count(*) over any FROM item, expressions included
        elif action == sqlite3.SQLITE_FUNCTION:
            name = (arg2 or "").lower()
            self.heavy_calls += name in _HEAVY_FUNCTIONS
            allowed = name in _FUNCTIONS and self.heavy_calls <= HEAVY_CALLS
        else:
            allowed = action in _ALLOWED_ACTIONS
        if allowed:
            return sqlite3.SQLITE_OK
        self.denied = True
        return sqlite3.SQLITE_DENY

    def expired(self) -> bool:
        return time.monotonic() > self.deadline


def _trim(strip: Any) -> Any:
    def trim(value: Any, characters: Any) -> Any:
        if value is None or characters is None:
            return None
        return strip(_as_text(value), _as_text(characters))

    return trim


def _as_text(value: Any) -> str:
    """A value as SQLite casts it to text."""
    if isinstance(value, bytes):
        return value.decode(errors="ignore")
    if isinstance(value, float):
        text = f"{value + 0.0:.15g}"  # the sum turns -0.0 into 0.0
        mantissa, e, exponent = text.partition("e")
        return text if "." in mantissa or mantissa.lstrip("-") in ("inf", "nan") else f"{mantissa}.0{e}{exponent}"
    return str(value)


_local = threading.local()


def _connection(path: str) -> _Connection:
    """This thread's open connection to the file, opened anew when the file has changed. Raises OSError or sqlite3.Error."""
    stat = os.stat(path)
    identity = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    cache: OrderedDict[str, _Connection] = _local.__dict__.setdefault("connections", OrderedDict())
    found = cache.pop(path, None)
    if found is not None and found.identity != identity:
        found.handle.close()
        found = None
    cache[path] = found = found or _Connection(path, identity)
    if len(cache) > CONNECTIONS_PER_THREAD:
        cache.popitem(last=False)[1].handle.close()
    return found


_memory_lock = threading.Lock()


def run_sql(database: Path | str, query: str, *, timeout_s: float = 2.0, max_rows: int = 10_000, max_bytes: int = 20_000_000) -> SqlResult:
    """Runs one read-only query and never raises for what the query or the file does.

    The time limit is checked every ``PROGRESS_OPCODES`` steps of SQLite's machine; the limits on value length bound what one step can cost, the limit on
    SQLite's memory (of the process: a query that meets it runs once more, alone among such) what compiling can. Connections stay open, a few per thread, so a
    small query costs about 0.02 ms. Text that is not UTF-8 is decoded with errors ignored. Error texts are SQLite's, cut to ``MESSAGE_MAX_CHARS``.
    """
    try:
        return _run_sql(database, query, timeout_s, max_rows, max_bytes)
    except MemoryError:  # SQLITE_NOMEM, also for a program over SQLITE_LIMIT_VDBE_OP; another thread's query may have taken the memory
        with _memory_lock:
            try:
                return _run_sql(database, query, timeout_s, max_rows, max_bytes)
            except MemoryError:
                return SqlResult(0, None, "query needs too much memory", "too_large")


def _run_sql(database: Path | str, query: str, timeout_s: float, max_rows: int, max_bytes: int) -> SqlResult:
    path = os.fspath(database)
    try:
        connection = _connection(path)
    except (OSError, sqlite3.Error, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return SqlResult(0, None, f"cannot read database {path}: {reason}", "database")
    if len(query) > SQL_MAX_LENGTH:
        return SqlResult(0, None, f"query longer than {SQL_MAX_LENGTH} characters", "too_large")
    connection.denied, connection.heavy_calls = False, 0
    connection.deadline = time.monotonic() + timeout_s
    cursor = connection.handle.cursor()
    try:
        cursor.execute(query)
        if cursor.description is None:
            return SqlResult(0, None, "empty query", "error")
        rows, size = [], 0
        for row in cursor:
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, str | bytes)) + 16 * len(row)
            if len(rows) > max_rows:
                return SqlResult(0, None, f"more than {max_rows} rows", "too_large")
            if size > max_bytes:
                return SqlResult(0, None, f"result larger than {max_bytes} bytes", "too_large")
        return SqlResult(len(cursor.description), rows, None, "ok")
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
        message = " ".join(str(error).split())
        message = message if len(message) <= MESSAGE_MAX_CHARS else message[: MESSAGE_MAX_CHARS - 3] + "..."
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended part
        if "one statement at a time" in message:
            return SqlResult(0, None, "only one statement is allowed", "refused")
        if connection.denied:
            return SqlResult(0, None, message, "refused")
        if code == sqlite3.SQLITE_INTERRUPT:
            return SqlResult(0, None, f"interrupted after {timeout_s:g} s", "timeout")
        if code in _DATABASE_CODES:
            return SqlResult(0, None, f"cannot read database {path}: {message}", "database")
        return SqlResult(0, None, message, "too_large" if code == sqlite3.SQLITE_TOOBIG else "error")
    finally:
        cursor.close()
