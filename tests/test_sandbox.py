"""Hostile programs and hostile SQL: each escape is tried and its failure checked by value."""

import concurrent.futures
import hashlib
import os
import re
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import psutil
import pytest
from conftest import need_program
from hypothesis import given, settings
from hypothesis import strategies as st

from common import sandbox
from common.sandbox import SandboxError, run_process, run_sql, sql_tokens


@pytest.fixture
def isolated():
    need_program("bwrap")
    assert sandbox.isolation_problem() == ""


@pytest.fixture
def bare(monkeypatch):
    """No bubblewrap: the limits alone."""
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "switched off by the test")
    monkeypatch.setattr(sandbox, "_warned", True)


def python(code: str, **limits):
    return run_process(["python", "-c", textwrap.dedent(code)], **{"wall_s": 20.0, **limits})


def running(text: str) -> list[int]:
    """Live processes whose command line holds the text."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(text in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Processes: ordinary use


@pytest.mark.usefixtures("isolated")
def test_streams_and_exit_codes():
    result = run_process(["sh", "-c", "cat; echo problem >&2; exit 7"], stdin="line\nsecond ü")
    assert result == sandbox.ProcessResult("line\nsecond ü", "problem\n", 7, False, False, True)
    assert run_process(["true"], stdin="x" * 3_000_000).returncode == 0  # nobody reads the input
    assert run_process(["sh", "-c", "kill -9 $$"]).returncode == 137
    assert run_process(["no-such-program"]).returncode == 127
    assert run_process(["sh", "-c", "exec >&- 2>&-; sleep 0.1; exit 5"]).returncode == 5  # closes its output and goes on


@pytest.mark.usefixtures("isolated")
def test_virtual_environment_is_usable_and_read_only():
    result = python(
        """
        import sys, psutil
        print(sys.prefix, sys.base_prefix, sys.version_info[:2], psutil.__version__)
        for place in (sys.prefix, sys.base_prefix, "/usr", "/usr/bin", "/", "/etc", "/dev"):
            try:
                open(place + "/written", "w"); print("WROTE", place)
            except OSError:
                pass
        """
    )
    assert result.stdout.strip() == f"{sys.prefix} {sys.base_prefix} {sys.version_info[:2]} {psutil.__version__}", result.stderr


@pytest.mark.usefixtures("isolated")
def test_folder_keeps_what_was_written_and_gets_its_owner_back(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "old.txt").write_text("old")
    result = run_process(["sh", "-c", "cat sub/old.txt new/in.txt && echo out > sub/out.txt && pwd"], folder=tmp_path, files={"new/in.txt": "in"})
    assert result.stdout == "oldin/box\n", result.stderr
    assert (tmp_path / "sub" / "out.txt").read_text() == "out\n"
    assert {path.stat().st_uid for path in (tmp_path, *tmp_path.rglob("*"))} == {os.getuid()}


@pytest.mark.usefixtures("isolated")
def test_temporary_folder_is_removed_even_when_hostile(monkeypatch, tmp_path):
    memory = Path("/dev/shm")  # thousands of folders are slow on a disk
    place = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path))
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(place))
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\nprint('deep')"
    assert python(code).stdout == "deep\n"
    assert run_process(["sh", "-c", "mkdir -p a/b && echo x > a/b/c && chmod 000 a/b a"]).returncode == 0
    assert list(place.iterdir()) == []
    place.rmdir()


def test_output_keeps_beginning_and_end():
    output = sandbox._Output(10)
    for piece in (b"abc", b"defgh", b"", b"ijklmnop"):
        output.add(piece)
    assert output.text() == "abcde\n... 6 bytes left out ...\nlmnop"
    short = sandbox._Output(10)
    short.add(b"0123456789")
    assert (short.text(), short.left_out) == ("0123456789", 0)


@given(st.lists(st.binary(max_size=9), max_size=12), st.integers(1, 12))
def test_output_bound(pieces, limit):
    output = sandbox._Output(limit)
    for piece in pieces:
        output.add(piece)
    whole = b"".join(pieces)
    assert len(output.head) + len(output.tail) == min(len(whole), limit)
    assert whole.startswith(bytes(output.head)) and whole.endswith(bytes(output.tail))


@pytest.mark.parametrize("argv", [[], "ls", ["a\0b"], [1]])
def test_bad_arguments(argv):
    with pytest.raises(ValueError, match="argv"):
        run_process(argv if argv != "ls" else [], wall_s=1)
    with pytest.raises(ValueError, match="limit"):
        run_process(["true"], wall_s=0)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "."])
@pytest.mark.usefixtures("isolated")
def test_file_names_stay_below_the_folder(name, tmp_path):
    with pytest.raises(ValueError, match="relative path"):
        run_process(["true"], folder=tmp_path, files={name: "x"})


@pytest.mark.usefixtures("isolated")
def test_links_left_by_a_program_lead_nowhere(tmp_path):
    box, outside = tmp_path / "box", tmp_path / "outside"
    box.mkdir(), outside.mkdir()
    (outside / "precious").write_text("precious")
    os.lchown(outside / "precious", os.getuid(), os.getgid())
    before = (outside / "precious").stat()
    run_process(["sh", "-c", f"ln -s {outside} folder; ln -s {outside}/precious file"], folder=box)
    with pytest.raises(SandboxError, match="symbolic link"):
        run_process(["true"], folder=box, files={"folder/new": "x"})
    run_process(["true"], folder=box, files={"file": "replaced"})
    after = (outside / "precious").stat()
    assert (outside / "precious").read_text() == "precious" and list(outside.iterdir()) == [outside / "precious"]
    assert (after.st_uid, after.st_ctime_ns) == (before.st_uid, before.st_ctime_ns)
    assert (box / "file").read_text() == "replaced"


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Processes: escapes


@pytest.mark.usefixtures("isolated")
def test_nothing_of_the_host_is_visible(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    secret = tmp_path / "secret.txt"  # pytest's folder lies under /tmp, which the box replaces
    secret.write_text("hunter2")
    result = python(
        f"""
        import os, socket
        print(sorted(os.environ))
        print([os.path.exists(p) for p in ({str(secret)!r}, "/etc/passwd", "/etc/shadow", "/home", "/var", "/sys", {str(Path(__file__).parent.resolve())!r})])
        seen = b""
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try:
                    seen += open(f"/proc/{{pid}}/environ", "rb").read()
                except OSError:
                    pass
        print(b"hunter" + b"2" in seen, b"PYTEST" + b"_" in seen)
        print(os.getuid() != 0 or os.geteuid(), os.listdir("/root") if os.path.isdir("/root") and os.access("/root", os.R_OK) else [])
        print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
        """
    )
    lines = result.stdout.splitlines()
    assert "SECRET_KEY" not in lines[0] and "'HOME'" in lines[0]
    assert lines[1] == str([False] * 7)
    assert lines[2] == "False False"
    assert ".ssh" not in lines[3] and lines[3].startswith("True")
    assert lines[4] == "['0', '1', '2'] 4"  # the fourth is the listing itself


@pytest.mark.usefixtures("isolated")
def test_no_network():
    result = python(
        """
        import socket
        listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
        for address in (("1.1.1.1", 53), ("10.0.0.1", 80), ("169.254.169.254", 80)):
            try:
                socket.create_connection(address, 2); print("CONNECTED", address)
            except OSError as error:
                print(type(error).__name__, error.errno)
        print([name for _, name in socket.if_nameindex()])
        """
    )
    lines = result.stdout.splitlines()
    assert "CONNECTED" not in result.stdout and lines[0].startswith("OSError 101") and lines[3] == "['lo']"


@pytest.mark.usefixtures("isolated")
def test_no_privileges():
    status = run_process(["cat", "/proc/self/status"]).stdout
    values = dict(re.findall(r"^(\w+):\s+(\S+)", status, re.MULTILINE))
    assert int(values["CapEff"], 16) == int(values["CapPrm"], 16) == int(values["CapBnd"], 16) == 0 and values["NoNewPrivs"] == "1"
    tries = "mount -t tmpfs x /mnt; chown 0 /box; umount /usr; echo 1 > /proc/sys/kernel/panic; mknod /box/disk b 8 0; su -c id"
    result = run_process(["sh", "-c", f"for n in 1; do {tries}; done; ls -A /box"])
    assert result.stdout == "" and result.stderr.count("\n") >= 5


@pytest.mark.usefixtures("isolated")
def test_fork_bomb_is_bounded_and_gone_afterwards():
    tag = secrets.token_hex(8)
    result = python(
        f"""
        import os, time  # {tag}
        started = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(300)
                started += 1
        except OSError as error:
            print(started, error.errno, flush=True)
        """,
        processes=20,
    )
    assert result.stdout == "19 11\n" and not result.timed_out  # EAGAIN; the parent counts too
    assert running(tag) == []
    assert run_process(["bash", "-c", f": {tag}; bomb() {{ bomb | bomb & }}; bomb; sleep 300"], processes=20, wall_s=1.0).timed_out
    assert running(tag) == []


@pytest.mark.usefixtures("isolated")
def test_nothing_outlives_the_run():
    tag = f"31{secrets.randbelow(10**9):09d}"
    background = f"setsid nohup sleep {tag} >/dev/null 2>&1 & (sleep {tag} &) ; trap '' TERM HUP INT"
    assert run_process(["sh", "-c", f"{background}; echo done"]).stdout == "done\n"
    assert running(tag) == []
    result = run_process(["sh", "-c", f"{background}; echo begun; sleep {tag}"], wall_s=1.0)
    assert (result.timed_out, result.returncode, result.stdout) == (True, 124, "begun\n")
    assert running(tag) == []


@pytest.mark.usefixtures("isolated")
def test_killing_everybody_reaches_only_itself():
    result = run_process(["sh", "-c", "kill -9 1; kill -9 -1; echo alive"])
    assert result.stdout == "alive\n" or result.returncode == 137
    assert psutil.pid_exists(os.getpid())


@pytest.mark.usefixtures("isolated")
def test_resource_limits():
    assert "MemoryError" in python("x = bytearray(10 ** 10)").stderr
    loop = python("while True: pass", cpu_s=1)
    assert loop.returncode == 137 and not loop.timed_out
    big = run_process(["sh", "-c", "dd if=/dev/zero of=big bs=1M count=64 2>/dev/null; wc -c < big"], file_mb=3)
    assert int(big.stdout) == 3 << 20
    memory_disk = run_process(
        ["sh", "-c", "dd if=/dev/zero of=/tmp/a bs=1M count=64 2>/dev/null; dd if=/dev/zero of=/dev/shm/a bs=1M count=64; wc -c < /tmp/a"], memory_mb=16
    )
    assert int(memory_disk.stdout) == 16 << 20 and "No space" in memory_disk.stderr
    flood = run_process(["sh", "-c", "yes & yes >&2"], wall_s=0.5, output_bytes=1000)
    assert flood.timed_out and flood.output_truncated and len(flood.stdout) < 1100 and len(flood.stderr) < 1100


@pytest.mark.usefixtures("isolated")
def test_memory_of_all_processes_together():
    result = python(
        """
        import os, time
        children = []
        for _ in range(8):
            if (pid := os.fork()) == 0:
                held = bytearray(b"x") * (100 << 20)
                time.sleep(300)
            children.append(pid)
        os.wait()
        print("NOT KILLED")
        """,
        memory_mb=400,
    )
    assert result.returncode == 137 and "more than 400 MB" in result.stderr and "NOT KILLED" not in result.stdout


@pytest.mark.usefixtures("isolated")
def test_a_broken_box_is_no_verdict_on_the_program(monkeypatch):
    real = sandbox._bubblewrap_command
    monkeypatch.setattr(sandbox, "_bubblewrap_command", lambda *args: [*real(*args)[:1], "--ro-bind", "/no-such-place", "/x", *real(*args)[1:]])
    with pytest.raises(SandboxError, match="no-such-place"):
        run_process(["true"])


@pytest.mark.usefixtures("isolated")
def test_another_user_gets_the_same_box():
    """Started by an ordinary user, the box uses a user namespace; the limits must hold there too."""
    if os.geteuid() != 0:
        return  # then every other test has shown it
    code = """
        import os, sys, tempfile
        from common import sandbox
        sandbox._interpreter_binds = lambda: []  # a Python under root's home is closed to others
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        tempfile.tempdir = "/tmp"
        print(repr(sandbox.isolation_problem()))
        bomb = "i=0; while [ $i -lt 40 ]; do sleep 300 & i=$((i+1)); done; wait"
        look = "id -u; ls -d /home /root /box 2>/dev/null; for f in /usr/x /x /dev/x /etc/x; do touch $f && echo WROTE; done; cat /proc/1/environ"
        print(sandbox.run_process(["sh", "-c", look], require_isolation=True))
        print("fork" in sandbox.run_process(["sh", "-c", bomb], processes=20, wall_s=2).stderr)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=Path(sandbox.__file__).parents[1], capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert lines and lines[0] == "''", result.stdout + result.stderr
    assert "stdout='65534\\n/box\\n" in lines[1] and "isolated=True" in lines[1] and "WROTE" not in lines[1] and lines[2] == "True"


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Processes: without bubblewrap


def test_isolation_can_be_required(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "program bwrap is missing")
    with pytest.raises(SandboxError, match="bwrap is missing"):
        run_process(["true"], require_isolation=True)


def test_missing_isolation_warns_once(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "program bwrap is missing")
    monkeypatch.setattr(sandbox, "_warned", False)
    with pytest.warns(RuntimeWarning, match="NOT ISOLATED.*bwrap is missing"):
        assert run_process(["true"]).isolated is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_process(["true"]).returncode == 0


@pytest.mark.usefixtures("bare")
def test_limits_hold_without_isolation(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    assert "hunter2" not in run_process(["env"]).stdout
    assert "MemoryError" in python("x = bytearray(10 ** 10)").stderr
    assert python("while True: pass", cpu_s=1).returncode == 137
    assert run_process(["sh", "-c", "dd if=/dev/zero of=big bs=1M count=9 2>/dev/null; wc -c < big"], file_mb=3).stdout.split() == [str(3 << 20)]
    assert run_process(["sh", "-c", "kill -9 $$"]).returncode == 137


@pytest.mark.usefixtures("bare")
def test_nothing_outlives_a_bare_run():
    tag = f"32{secrets.randbelow(10**9):09d}"
    assert run_process(["sh", "-c", f"setsid nohup sleep {tag} >/dev/null 2>&1 & (sleep {tag} &) ; echo done"]).stdout == "done\n"
    assert running(tag) == []
    result = run_process(["sh", "-c", f"setsid sleep {tag} & sleep {tag}"], wall_s=0.5)
    assert result.timed_out and running(tag) == []
    bomb = f"import os, time  # {tag}\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(300)\ntime.sleep(300)"
    result = python(bomb, processes=30)
    assert not result.timed_out and (result.returncode == 137 or "BlockingIOError" in result.stderr) and running(tag) == []


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# SQL


@pytest.fixture(scope="module", autouse=True)
def less_memory():
    """A quarter of SQLite's memory limit makes the tests that reach it fast; the limit of a process can only be lowered."""
    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {sandbox.HEAP_BYTES // 4}")
    connection.close()


def test_memory_limit_is_set(tmp_path):
    code = """
        import sqlite3, sys
        from common.sandbox import HEAP_BYTES, run_sql
        sqlite3.connect(sys.argv[1]).execute("CREATE TABLE t(a)")
        print(run_sql(sys.argv[1], "SELECT count(*) FROM t").kind, sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit").fetchone()[0] == HEAP_BYTES)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x.sqlite")]
    assert subprocess.run(command, cwd=Path(sandbox.__file__).parents[1], capture_output=True, text=True, check=True).stdout == "ok True\n"


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
    assert (result.kind, result.rows) == (kind, None) and error in (result.error or "") and len(result.error or "") <= sandbox.MESSAGE_MAX_CHARS
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before and not Path("/tmp/stolen.sqlite").exists()
    assert run_sql(database, "SELECT count(*) FROM t").rows == [(1001,)]  # the connection is still good


def test_only_the_files_own_tables_may_be_read(database):
    connection = sandbox._connection(str(database))
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
    real, calls = sandbox._run_sql, []

    def starved_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(sandbox, "_run_sql", starved_once)
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
    for i in range(sandbox.CONNECTIONS_PER_THREAD + 4):
        paths.append(tmp_path / f"{i}.sqlite")
        connection = sqlite3.connect(paths[-1])
        connection.executescript(f"CREATE TABLE t(a); INSERT INTO t VALUES ({i});")
        connection.close()

    def work(seed: int) -> list[list[tuple]]:
        order = [paths[(i * 7 + seed) % len(paths)] for i in range(60)]
        return [(run_sql(path, "SELECT a FROM t").rows == [(int(path.stem),)], len(sandbox._local.connections)) for path in order]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = [item for batch in pool.map(work, range(8)) for item in batch]
    assert all(good for good, _ in results) and max(count for _, count in results) == sandbox.CONNECTIONS_PER_THREAD


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
        own.create_function(name, 2, sandbox._trim(strip))
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
