"""Hostile SQL: each escape is tried and its failure checked by value."""

import concurrent.futures
import hashlib
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import sandbox_sql
from common.sandbox import run_sql, sql_tokens


@pytest.fixture(scope="module", autouse=True)
def less_memory():
    """A quarter of SQLite's memory limit makes the tests that reach it fast; the limit of a process can only be lowered."""
    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {sandbox_sql.HEAP_BYTES // 4}")
    connection.close()


def test_memory_limit_is_set(tmp_path):
    code = """
        import sqlite3, sys
        from common.sandbox_sql import HEAP_BYTES, run_sql
        sqlite3.connect(sys.argv[1]).execute("CREATE TABLE t(a)")
        print(run_sql(sys.argv[1], "SELECT count(*) FROM t").kind, sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit").fetchone()[0] == HEAP_BYTES)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x.sqlite")]
    assert subprocess.run(command, cwd=Path(sandbox_sql.__file__).parents[1], capture_output=True, text=True, check=True).stdout == "ok True\n"


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "odd name ? # %20.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE t(a INTEGER, b TEXT); CREATE VIEW v AS SELECT a FROM t; CREATE VIRTUAL TABLE f USING fts4(x);")
    connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, f"row {i}") for i in range(1000)])
    connection.execute("INSERT INTO t VALUES (1000, CAST(x'61ff62' AS TEXT))")
    connection.commit()
    connection.close()
    return path


GOOD = [
    ("SELECT count(*) FROM t", [(1001,)]),
    ("select a, b from t where a < 2 ;  -- done", [(0, "row 0"), (1, "row 1")]),
    ("SELECT b FROM t WHERE a = 1000", [("ab",)]),  # not UTF-8: the bad byte is left out
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 4) SELECT sum(x) FROM n", [(10,)]),
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 4) SELECT count(*) FROM n", [(4,)]),
    ("SELECT count(*) FROM v", [(1001,)]),
    ("SELECT a, row_number() OVER (ORDER BY a DESC) FROM t WHERE a BETWEEN 3 AND 4", [(4, 1), (3, 2)]),
    ("SELECT strftime('%Y', '2020-05-01'), round(2.567, 1), substr('abc', 2), instr('abc', 'c'), replace('abc', 'b', 'x')", [("2020", 2.6, "bc", 3, "axc")]),
    ("SELECT trim('xxaxx', 'x'), ltrim('xxa', 'x'), rtrim(1.5, '5'), trim('  a '), trim(NULL, 'x')", [("a", "a", "1.", "a", None)]),
    ("SELECT group_concat(a) FROM t WHERE a < 3", [("0,1,2",)]),
    ("SELECT b FROM t WHERE b LIKE 'ROW 99_' LIMIT 1", [("row 990",)]),
    ("SELECT 1 FROM t WHERE a < 0", []),
    ("SELECT tbl_name FROM sqlite_master WHERE name = 't'", [("t",)]),
    ("VALUES (1, 'x')", [(1, "x")]),
    ("SELECT CASE WHEN a > 500 THEN 'high' ELSE 'low' END AS level, count(*) FROM t GROUP BY level", [("high", 500), ("low", 501)]),
    ("SELECT iif(1, cast('12' AS REAL), 0), coalesce(NULL, 3), abs(-2), typeof(x'00')", [(12.0, 3, 2, "blob")]),
]


@pytest.mark.parametrize(("query", "rows"), GOOD)
def test_ordinary_queries(database, query, rows):
    result = run_sql(database, query)
    assert (result.kind, result.error, result.rows) == ("ok", None, rows)
    assert not rows or result.columns == len(rows[0])


BAD = [
    ("SELECT nope FROM t", "error", "no such column: nope"),
    ("SELECT * FROM nope", "error", "no such table: nope"),
    ("SELEC 1", "error", 'near "SELEC": syntax error'),
    ("", "error", "empty query"),
    ("  -- nothing", "error", "empty query"),
    ("SELECT 'a\0b'", "error", "null character"),
    ("SELECT '\ud800'", "error", "surrogates"),
    ("SELECT ?", "error", "bindings"),
    ("SELECT :name", "error", "bindings"),
    ("SELECT readfile('/etc/passwd')", "error", "no such function: readfile"),
    ("SELECT writefile('/tmp/x', 'y')", "error", "no such function: writefile"),
    ("SELECT 1; SELECT 2", "refused", "only one statement"),
    ("SELECT 1; DROP TABLE t", "refused", "only one statement"),
    ("INSERT INTO t VALUES (1, 'x')", "refused", "not authorized"),
    ("UPDATE t SET a = 1", "refused", "not authorized"),
    ("DELETE FROM t", "refused", "not authorized"),
    ("DROP TABLE t", "refused", "not authorized"),
    ("CREATE TABLE x(a)", "refused", "not authorized"),
    ("CREATE TEMP TABLE x(a)", "refused", "not authorized"),
    ("CREATE TEMP VIEW x AS SELECT 1", "refused", "not authorized"),
    ("WITH x AS (SELECT 1) DELETE FROM t", "refused", "not authorized"),
    ("INSERT INTO t SELECT a, b FROM t RETURNING a", "refused", "not authorized"),
    ("ATTACH '/tmp/stolen.sqlite' AS s", "refused", "not authorized"),
    ("DETACH main", "refused", "not authorized"),
    ("PRAGMA table_info(t)", "refused", "not authorized"),
    ("PRAGMA hard_heap_limit = 0", "refused", "not authorized"),
    ("PRAGMA writable_schema = 1", "refused", "not authorized"),
    ("SELECT * FROM pragma_table_info('t')", "refused", "not authorized"),
    ("SELECT * FROM pragma_database_list", "refused", "not authorized"),
    ("VACUUM", "refused", "authorization denied"),
    ("VACUUM INTO '/tmp/stolen.sqlite'", "refused", "authorization denied"),
    ("BEGIN", "refused", "not authorized"),
    ("ROLLBACK", "refused", "not authorized"),
    ("SAVEPOINT s", "refused", "not authorized"),
    ("ANALYZE", "refused", "not authorized"),
    ("REINDEX", "refused", "not authorized"),
    ("SELECT load_extension('/tmp/x.so')", "refused", "load_extension"),
    ("SELECT fts3_tokenizer('simple')", "refused", "fts3_tokenizer"),
    ("SELECT sqlite_compileoption_get(1)", "refused", "sqlite_compileoption_get"),
    ("SELECT randomblob(1000000000)", "refused", "randomblob"),
    ("SELECT zeroblob(1000000000)", "refused", "zeroblob"),
    ("SELECT json_patch('{}', '{}')", "refused", "json_patch"),
    ("SELECT * FROM dbstat", "refused", "dbstat"),
    ("SELECT sql FROM sqlite_stmt", "refused", "sqlite_stmt"),
    ("SELECT * FROM json_each('[1]')", "refused", "json_each"),
    ("SELECT " + " + ".join(["instr(b, 'x')"] * 30) + " + " + " + ".join(["(b LIKE 'x')"] * 40) + " FROM t", "refused", "not authorized"),
    ("SELECT hex(printf('%90000d', 1))", "too_large", "too big"),
    ("SELECT printf('%90000d', 1) || printf('%90000d', 1)", "too_large", "too big"),
    ("SELECT replace(printf('%90000d', 1), ' ', 'xx')", "too_large", "too big"),
    ("SELECT group_concat(x.b) FROM t x, t y", "too_large", "too big"),
    ("SELECT x.a FROM t x, t y", "too_large", "more than 10000 rows"),
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n", "too_large", "more than 10000 rows"),
    ("SELECT printf('%90000d', a) FROM t", "too_large", "larger than"),
    ("SELECT " + ", ".join(["printf('%90000d', a)"] * 300) + " FROM t", "too_large", "larger than"),
    ("SELECT '" + "x" * 30_000 + "'", "too_large", "longer than"),
    ("SELECT x.a FROM t x, t y, t z ORDER BY printf('%9000d', x.a), random()", "too_large", "memory"),
    ("SELECT DISTINCT count(*) OVER () FROM (SELECT DISTINCT printf('%9000d', x.a), y.a FROM t x, t y)", "too_large", "memory"),
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n", "timeout", "interrupted"),
    ("SELECT count(*) FROM t a, t b, t c, t d", "timeout", "interrupted"),
    ("SELECT count(*) FROM t x, t y WHERE printf('%50000d', x.a + y.a) LIKE '%" + "_%" * 60 + "1x'", "timeout", "interrupted"),
    ("SELECT sum(instr(printf('%60000d', x.a), printf('%30000d', 5) || 'x')) FROM t x, t y", "timeout", "interrupted"),
    ("SELECT sum(length(trim(printf('%40000d', x.a), printf('%40000s', 'abc')))) FROM t x, t y", "timeout", "interrupted"),
    ("SELECT sum(length(replace(printf('%40000d', x.a), printf('%20000d', 5) || 'x', 'y'))) FROM t x, t y", "timeout", "interrupted"),
    ("SELECT " + "(" * 400 + "1" + ")" * 400, "error", "parser stack overflow"),
    ("SELECT " + "(SELECT " * 90 + "1" + ")" * 90, "error", "parser stack overflow"),
    ("SELECT " + "+".join(["1"] * 300), "error", "Expression tree is too large"),
    ("SELECT 1" + " UNION ALL SELECT 1" * 200, "error", "too many terms in compound SELECT"),
    ("SELECT " + ", ".join(["1"] * 1500), "error", "too many columns"),
    ("SELECT 1 FROM " + ", ".join(f"t t{i}" for i in range(80)), "error", "at most 64 tables"),
    ("SELECT printf('%1000000000d', 1) IS NULL, max(" + ", ".join(["1"] * 200) + ")", "error", "too many arguments"),
    ("SELECT 'x' LIKE '" + "%" * 300 + "'", "error", "pattern too complex"),
]


@pytest.mark.parametrize(("query", "kind", "error"), BAD, ids=[f"{i}-{q[:30]!r}" for i, (q, _, _) in enumerate(BAD)])
def test_hostile_queries(database, query, kind, error):
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    result = run_sql(database, query, timeout_s=30.0 if kind in ("error", "too_large") else 0.2)
    assert (result.kind, result.rows) == (kind, None) and error in (result.error or "") and len(result.error or "") <= sandbox_sql.MESSAGE_MAX_CHARS
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before and not Path("/tmp/stolen.sqlite").exists()
    assert run_sql(database, "SELECT count(*) FROM t").rows == [(1001,)]  # the connection is still good


def test_only_the_files_own_tables_may_be_read(database):
    connection = sandbox_sql._connection(str(database))
    read = {
        name: connection.authorize(sqlite3.SQLITE_READ, name, "x", "main", None) for name in ("t", "V", "sqlite_master", "dbstat", "sqlite_stmt", "fts5vocab")
    }
    assert [name for name, answer in read.items() if answer == sqlite3.SQLITE_OK] == ["t", "V", "sqlite_master"]
    assert connection.authorize(sqlite3.SQLITE_READ, "n", "", None, None) == sqlite3.SQLITE_OK  # count(*) over an expression


LEVELS = 60
COMPILE_BOMBS = [  # short texts that grow exponentially while SQLite compiles them, when no progress handler runs
    "WITH a0 AS (SELECT 1 x LIMIT 1)" + "".join(f", a{i + 1} AS (SELECT p.x FROM a{i} p, a{i} q LIMIT 1)" for i in range(LEVELS)) + f" SELECT * FROM a{LEVELS}",
    "WITH a0 AS (SELECT a x FROM t)" + "".join(f", a{i + 1} AS (SELECT x + x x FROM a{i})" for i in range(LEVELS)) + f" SELECT x FROM a{LEVELS}",
    "SELECT y + y + y + y + y + y y FROM (" * 13 + "SELECT a y FROM t" + ")" * 13,
]


@pytest.mark.parametrize("query", COMPILE_BOMBS, ids=["copies", "chain", "nest"])
def test_compile_bombs(database, query):
    result = run_sql(database, query, timeout_s=0.2)
    assert (result.kind, result.error) == ("too_large", "query needs too much memory")


def test_a_short_of_memory_neighbour_is_not_punished(database, monkeypatch):
    """A query that another thread's query starved is run again."""
    real, calls = sandbox_sql._run_sql, []

    def starved_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(sandbox_sql, "_run_sql", starved_once)
    assert run_sql(database, "SELECT count(*) FROM t").rows == [(1001,)] and len(calls) == 2


def test_row_and_byte_limits_are_exact(database):
    assert run_sql(database, "SELECT a FROM t", max_rows=1001).kind == "ok"
    assert run_sql(database, "SELECT a FROM t", max_rows=1000).kind == "too_large"
    assert run_sql(database, "SELECT 'abcd'", max_bytes=20).kind == "ok"
    assert run_sql(database, "SELECT 'abcd'", max_bytes=19).kind == "too_large"


def damaged(name: str, folder: Path, database: Path) -> Path:
    path = folder / f"{name}.sqlite"
    content = database.read_bytes()
    if name == "empty":
        path.write_bytes(b"")
    elif name == "text":
        path.write_text("not a database " * 1000)
    elif name == "header":
        path.write_bytes(content[:16] + b"\xff" * 84 + content[100:])
    elif name == "pages":
        path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    elif name == "cut":
        path.write_bytes(content[:4096])
    elif name == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize("name", ["missing", "empty", "text", "header", "pages", "cut", "folder"])
def test_a_bad_file_is_the_databases_fault(name, tmp_path, database):
    path = damaged(name, tmp_path, database)
    for query in ("SELECT a, b FROM t ORDER BY b", "SELECT count(*) FROM t"):
        result = run_sql(path, query)
        assert (result.kind, result.rows) == ("database", None) and str(path) in (result.error or "")


def test_a_locked_file_is_read_and_a_replaced_one_read_anew(tmp_path):
    path = tmp_path / "x.sqlite"
    for value in (1, 2):
        fresh = tmp_path / "fresh.sqlite"
        connection = sqlite3.connect(fresh)
        connection.executescript(f"CREATE TABLE t(a); INSERT INTO t VALUES ({value});")
        connection.close()
        os.replace(fresh, path)
        assert run_sql(path, "SELECT a FROM t").rows == [(value,)]
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    assert run_sql(path, "SELECT a FROM t").rows == [(2,)]
    writer.close()
    path.unlink()
    assert run_sql(path, "SELECT a FROM t").kind == "database"


def test_connections_are_few_and_threads_independent(tmp_path):
    paths = []
    for i in range(sandbox_sql.CONNECTIONS_PER_THREAD + 4):
        paths.append(tmp_path / f"{i}.sqlite")
        connection = sqlite3.connect(paths[-1])
        connection.executescript(f"CREATE TABLE t(a); INSERT INTO t VALUES ({i});")
        connection.close()

    def work(seed: int) -> list[list[tuple]]:
        order = [paths[(i * 7 + seed) % len(paths)] for i in range(60)]
        return [(run_sql(path, "SELECT a FROM t").rows == [(int(path.stem),)], len(sandbox_sql._local.connections)) for path in order]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = [item for batch in pool.map(work, range(8)) for item in batch]
    assert all(good for good, _ in results) and max(count for _, count in results) == sandbox_sql.CONNECTIONS_PER_THREAD


@settings(deadline=None)
@given(
    st.one_of(
        st.none(),
        st.integers(-(2**62), 2**62),
        st.integers(-(10**9), 10**9).map(lambda n: n / 128),
        st.sampled_from([-0.0, 1e20, 2.5e-7]),
        st.text(alphabet="ab .x1é", max_size=6),
    ),
    st.text("ab x1.", max_size=3),
)
def test_own_trim_equals_sqlites(value, characters):
    plain = sqlite3.connect(":memory:")
    own = sqlite3.connect(":memory:")
    for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
        own.create_function(name, 2, sandbox_sql._trim(strip))
        query = f"SELECT {name}(?, ?)"
        assert own.execute(query, (value, characters)).fetchall() == plain.execute(query, (value, characters)).fetchall()
    plain.close(), own.close()


@given(st.text(alphabet="aB1 '\"`[]-/*\n;.<=>!|é", max_size=40))
def test_tokens_give_the_text_back(query):
    tokens = sql_tokens(query)
    assert "".join(text for _, text, _, _ in tokens) == query
    assert all(query[start:end] == text for _, text, start, end in tokens)


def test_token_kinds():
    kinds = [(kind, text) for kind, text, _, _ in sql_tokens("SELECT \"a b\", 'it''s' <> 1.5e3 -- c\n/* d */") if kind != "space"]
    assert kinds == [("word", "SELECT"), ("quoted", '"a b"'), ("op", ","), ("string", "'it''s'"), ("op", "<>"), ("number", "1.5e3")]
