"""pytest on hostile files in warm workers: each escape is tried and its failure checked by value, and the next run finds nothing of it."""

import concurrent.futures
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from conftest import need_program
from test_sandbox import running

from common import sandbox, sandbox_pytest
from common.sandbox import SandboxError
from common.sandbox_pytest import PytestResult, run_pytest

SMALL = {"wall_s": 20.0, "cpu_s": 2, "memory_mb": 512, "file_mb": 4, "processes": 16}
GOOD = {"a.py": "def f(x):\n    return x + 1\n", "test_a.py": "from a import f\n\n\ndef test_f():\n    assert f(1) == 2\n"}


@pytest.fixture
def isolated():
    need_program("bwrap")
    assert sandbox.isolation_problem() == ""
    yield
    after = run_pytest(GOOD, ["test_a.py"], **SMALL)  # whatever a test did, the next run is as good as ever
    assert after == PytestResult({"test_a.py::test_f": "passed"}, {}, "", False, True)


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "switched off by the test")
    monkeypatch.setattr(sandbox, "_warned", True)


@pytest.fixture
def started(monkeypatch):
    """Counts the workers that are started."""
    sandbox_pytest.close_workers()
    count, real = [], sandbox_pytest._Worker.__init__

    def init(self, *args):
        count.append(1)
        real(self, *args)

    monkeypatch.setattr(sandbox_pytest._Worker, "__init__", init)
    return count


def suite(test: str, source: str = "", **limits) -> PytestResult:
    """A run of one test file beside one source file."""
    return run_pytest({"a.py": textwrap.dedent(source), "test_a.py": textwrap.dedent(test)}, ["test_a.py"], **{**SMALL, **limits})


def hostile(source: str, **limits) -> PytestResult:
    """Code that runs when a test imports it, with a test that fails by itself."""
    return suite("import a\n\n\ndef test_one():\n    assert a.f(1) == 2\n", source + "\n\ndef f(x):\n    return 0\n", **limits)


# ---------------------------------------------------------------------------------------------------------------- ordinary use


@pytest.mark.usefixtures("isolated")
def test_outcomes_and_messages():
    result = suite(
        """
        import pytest
        from a import f, missing_name_is_none

        def test_pass(): assert f(1) == 2
        def test_fail(): assert f(1) == 3
        def test_raise(): f(None)
        @pytest.mark.skip
        def test_skip(): pass
        @pytest.fixture
        def broken(): raise ValueError("in set-up")
        def test_setup(broken): pass
        @pytest.fixture
        def late():
            yield
            raise ValueError("in tear-down")
        def test_teardown(late): pass
        @pytest.mark.parametrize("x", [1, 2])
        def test_many(x): assert f(x) == x + 1
        """,
        "missing_name_is_none = None\ndef f(x):\n    return x + 1\n",
    )
    names = {name.removeprefix("test_a.py::test_"): outcome for name, outcome in result.outcomes.items()}
    assert names == {
        "pass": "passed", "fail": "failed", "raise": "failed", "skip": "skipped", "setup": "error", "teardown": "error",
        "many[1]": "passed", "many[2]": "passed",
    }  # fmt: skip
    assert result.clean and not result.passed
    assert result.messages["test_a.py::test_fail"].startswith("assert 2 == 3") and "in tear-down" in result.messages["test_a.py::test_teardown"]


@pytest.mark.usefixtures("isolated")
def test_a_syntax_error_is_no_clean_run_and_spares_other_files():
    files = {**GOOD, "b.py": "def g(:\n", "test_b.py": "import b\n\n\ndef test_g():\n    pass\n"}
    result = run_pytest(files, ["test_a.py", "test_b.py"], **SMALL)
    assert result.outcomes == {"test_a.py::test_f": "passed", "test_b.py": "error"} and result.collection_errors == ("test_b.py",)
    assert not result.clean and not result.passed and not result.problem and "SyntaxError" in result.messages["test_b.py"]


@pytest.mark.usefixtures("isolated")
def test_conftest_files_of_a_run_count_and_are_gone_in_the_next(started):
    files = {
        "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef five():\n    return 5\n",
        "sub/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef six():\n    return 6\n",
        "test_a.py": "def test_a(five):\n    assert five == 5\n",
        "sub/test_b.py": "def test_b(five, six):\n    assert five + six == 11\n",
    }
    assert run_pytest(files, ["test_a.py", "sub"], **SMALL).outcomes == {"test_a.py::test_a": "passed", "sub/test_b.py::test_b": "passed"}
    assert run_pytest({"test_a.py": files["test_a.py"]}, ["test_a.py"], **SMALL).outcomes == {"test_a.py::test_a": "error"}
    assert len(started) == 1


@pytest.mark.usefixtures("isolated")
def test_no_test_is_no_pass():
    result = suite("")
    assert (result.outcomes, result.problem, result.passed) == ({}, "", False)


@pytest.mark.usefixtures("isolated")
def test_a_worker_serves_many_runs_and_each_finds_an_empty_folder(started):
    for i in range(6):
        result = suite(f"""
            import os, sys
            def test_alone():
                assert sorted(os.listdir(".")) == ["a.py", "test_a.py"] and not os.path.exists("/tmp/left") and os.listdir("/dev/shm") == []
                assert not hasattr(sys, "mark")
                sys.mark = {i}
                open("left", "w").write("x"), open("/tmp/left", "w").write("x"), open("/dev/shm/left", "w").write("x")
                os.makedirs("deep/er"); os.symlink("/usr", "deep/link")
        """)  # fmt: skip
        assert result.passed, result
    assert len(started) == 1


@pytest.mark.usefixtures("isolated")
def test_a_worker_whose_interpreter_lies_under_tmp_is_cleaned_all_the_same(started, tmp_path, monkeypatch):
    deep = tmp_path / "venv"
    deep.mkdir()
    (deep / "licence.txt").write_text("read only")
    binds = sandbox._interpreter_binds()
    for folder in ("/tmp/way", "/tmp/way/to"):
        binds += ["--perms", "0755", "--dir", folder]
    monkeypatch.setattr(sandbox, "_interpreter_binds", lambda: [*binds, "--ro-bind", str(deep), "/tmp/way/to/venv"])
    sandbox_pytest.close_workers()
    for _ in range(3):
        result = suite("""
            import os
            def test_alone():
                assert not os.path.exists("/tmp/left") and os.listdir("/tmp/way/to/venv") == ["licence.txt"]
                os.makedirs("/tmp/left/deep"); open("/tmp/left/deep/file", "w").close()
        """)
        assert result.passed, result
    assert len(started) == 1
    sandbox_pytest.close_workers()


@pytest.mark.usefixtures("isolated")
def test_twenty_runs_give_one_result_from_many_threads():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: hostile(""), range(20)))
    assert all(result == results[0] for result in results) and results[0].outcomes == {"test_a.py::test_one": "failed"}


@pytest.mark.usefixtures("isolated")
def test_workers_outlive_the_thread_that_needed_them(started):
    results = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(run_pytest(GOOD, ["test_a.py"], **SMALL)))
        thread.start()
        thread.join()
    assert all(result.passed for result in results) and len(started) == 1


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_file_names_stay_below_the_folder(name):
    with pytest.raises(ValueError, match="relative path"):
        run_pytest({name: "x"}, ["x"], **SMALL)


def test_isolation_can_be_required(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "program bwrap is missing")
    with pytest.raises(SandboxError, match="bwrap is missing"):
        run_pytest(GOOD, ["test_a.py"], require_isolation=True, **SMALL)


@pytest.mark.usefixtures("bare")
def test_without_isolation_the_same_results_come_from_a_process_for_each_run():
    assert run_pytest(GOOD, ["test_a.py"], **SMALL) == PytestResult({"test_a.py::test_f": "passed"}, {}, "", False, False)
    assert hostile("import os; os._exit(0)").problem == "ended with 0 before the report was complete"
    assert hostile("while True: pass", cpu_s=1).problem == "ended with 137 before the report was complete"


def test_without_isolation_a_warning_is_seen(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "program bwrap is missing")
    monkeypatch.setattr(sandbox, "_warned", False)
    with pytest.warns(RuntimeWarning, match="NOT ISOLATED"):
        assert run_pytest(GOOD, ["test_a.py"], **SMALL).isolated is False


# ---------------------------------------------------------------------------------------------------------------- resources


@pytest.mark.usefixtures("isolated")
def test_endless_loops_end():
    assert hostile("while True: pass", cpu_s=1).problem == "ended with -9 before the report was complete"
    slept = hostile("import time; time.sleep(300)", wall_s=1.0)
    assert slept.timed_out and slept.problem == "over the time limit" and not slept.clean


@pytest.mark.usefixtures("isolated")
def test_ten_gigabytes_of_memory_and_of_files():
    memory = suite("def test_x():\n    x = bytearray(10 ** 10)\n")
    assert memory.messages == {"test_a.py::test_x": "MemoryError"} and memory.clean
    file = suite("def test_x():\n    with open('big', 'wb') as f:\n        for _ in range(10_000):\n            f.write(bytes(1 << 20))\n")
    assert file.outcomes == {"test_a.py::test_x": "failed"} and "File too large" in file.messages["test_a.py::test_x"]
    many = suite("def test_x():\n    for i in range(3000):\n        open(str(i), 'wb').write(bytes(4 << 20))\n")
    assert "No space left" in many.messages["test_a.py::test_x"]


@pytest.mark.usefixtures("isolated")
def test_memory_of_all_processes_together():
    result = hostile(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (90 << 20)\n        time.sleep(300)\ntime.sleep(300)"
    )
    assert "more than 512 MB" in result.problem


@pytest.mark.usefixtures("isolated")
def test_fork_bomb_is_bounded_and_gone_afterwards():
    tag = secrets.token_hex(8)
    result = suite(f"""
        import os, subprocess, time
        def test_x():
            started = []
            try:
                while True:
                    started.append(subprocess.Popen(["sh", "-c", "sleep 300; true {tag}"]))
            except OSError as error:
                assert len(started) <= 15 and error.errno == 11
            else:
                assert False
    """)
    assert result.passed and running(tag) == []
    bomb = hostile(f"import os\nwhile True:  # {tag}\n    try:\n        os.fork()\n    except OSError:\n        pass", wall_s=1.0, processes=8)
    assert bomb.problem and running(tag) == []


@pytest.mark.usefixtures("isolated")
def test_nothing_outlives_the_run(started):
    tag = f"33{secrets.randbelow(10**9):09d}"
    result = suite(f"""
        import subprocess
        def test_x():
            subprocess.Popen("setsid nohup sleep {tag} >/dev/null 2>&1 & trap '' TERM; sleep {tag}", shell=True)
    """)
    assert result.passed and running(tag) == []
    run_pytest(GOOD, ["test_a.py"], **SMALL)
    assert len(started) == 2  # what a run leaves behind ends its worker


@pytest.mark.usefixtures("isolated")
def test_a_flood_of_reports_ends_the_run():
    result = hostile("import os\nwhile True:\n    os.write(3, b'x' * 60000 + b'\\n')")
    assert result.problem in ("more reports than a run may write", "a report that the run's reporter did not write") and not result.passed


# ---------------------------------------------------------------------------------------------------------------- the host, the worker, other runs


@pytest.mark.usefixtures("isolated")
def test_nothing_of_the_host_is_visible(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    (tmp_path / "secret.txt").write_text("hunter2")
    places = [str(tmp_path / "secret.txt"), "/etc/passwd", "/etc/shadow", "/home", "/var", "/sys", str(Path(__file__).parent.resolve())]
    names = {*sandbox._environment("/tmp"), "PYTEST_CURRENT_TEST", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_VERSION", "PYTHONHASHSEED"}
    result = suite(f"""
        import glob, os
        names = {names}
        def test_environment():
            shells = {{"PWD", "SHLVL", "_", "OLDPWD"}}
            assert set(os.environ) - shells == names
        def test_places():
            assert [os.path.exists(p) for p in {places}] == [False] * {len(places)}
            assert not os.path.isdir("/root") or set(os.listdir("/root")) <= {set(Path(sys.base_prefix).parts)}
        def test_processes():
            seen = b""
            for path in glob.glob("/proc/[0-9]*/environ"):
                try:
                    seen += open(path, "rb").read()
                except OSError:
                    pass
            assert b"hunter" + b"2" not in seen
            assert {{int(n) for n in os.listdir("/proc") if n.isdigit()}} == {{1, os.getpid()}}
        def test_user():
            assert os.getuid() != 0 and set(os.popen("grep Cap /proc/self/status").read().split()[1::2]) == {{"0" * 16}}
    """)  # fmt: skip
    assert result.passed, result


@pytest.mark.usefixtures("isolated")
def test_no_network():
    result = suite("""
        import socket
        import pytest
        @pytest.mark.parametrize("address", [("1.1.1.1", 53), ("10.0.0.1", 80), ("169.254.169.254", 80)])
        def test_connect(address):
            with pytest.raises(OSError) as error:
                socket.create_connection(address, 2)
            assert error.value.errno == 101
    """)
    assert result.passed and len(result.outcomes) == 3


@pytest.mark.usefixtures("isolated")
def test_nothing_outside_can_be_written():
    places = [sys.prefix, sys.base_prefix, "/usr", "/usr/bin", "/", "/etc", "/dev", "/proc/sys/kernel", "/proc/1", "/root"]
    result = suite(f"""
        import os
        import pytest
        @pytest.mark.parametrize("place", {places})
        def test_write(place):
            with pytest.raises(OSError):
                open(place + "/written", "w")
            os.symlink(place, "link")
            with pytest.raises(OSError):
                open("link/written", "w")
            os.unlink("link")
    """)
    assert result.passed and len(result.outcomes) == len(places), result


PROTECTED_SERVER = """
        import ctypes, os, signal
        import pytest
        def test_descriptors():
            assert sorted(map(int, os.listdir("/proc/self/fd")))[:4] == [0, 1, 2, 3]
            assert {os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)} == {"/dev/null"}
            assert len(os.listdir("/proc/self/fd")) == 5  # reports, and the listing itself
        def test_kill():
            for number in range(1, 65):
                if number not in (32, 33):
                    os.kill(1, number)
        def test_trace():
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.ptrace(16, 1, 0, 0) == -1 and ctypes.get_errno() == 1
            for name in ("mem", "environ", "maps", "fd/0", "fd/1", "cwd/x"):
                with pytest.raises(OSError):
                    open(f"/proc/1/{name}", "rb").read(1)
            assert libc.syscall(438, os.pidfd_open(1), 0, 0) == -1 and ctypes.get_errno() == 1
"""


@pytest.mark.usefixtures("isolated")
def test_the_server_can_be_neither_killed_nor_read(started):
    result = suite(PROTECTED_SERVER)
    assert result.passed, result
    run_pytest(GOOD, ["test_a.py"], **SMALL)
    assert len(started) == 1


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "code",
    [
        "resource.prlimit(1, resource.RLIMIT_FSIZE, (0, resource.prlimit(1, resource.RLIMIT_FSIZE)[1]))",
        "resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "os.sched_setaffinity(1, {min(os.sched_getaffinity(1))}) if len(os.sched_getaffinity(1)) > 1 else os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "ctypes.CDLL(None).shmget(77, 4096, 0o1666)",
        "ctypes.CDLL(None).msgget(77, 0o1666)",
        "os.makedirs('a/b'), os.chmod('a', 0)",
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]",
    ],
)
def test_what_a_later_run_would_inherit_ends_the_worker(code, started):
    assert suite(f"import ctypes, os, resource\ndef test_x():\n    {code}\n").outcomes == {"test_a.py::test_x": "passed"}
    for _ in range(2):
        assert run_pytest(GOOD, ["test_a.py"], **SMALL).passed
    assert len(started) == 2


@pytest.mark.usefixtures("isolated")
def test_another_user_gets_the_same_box():
    """Started by an ordinary user, a worker lives in a user namespace: the same protection of its server, the same limit of processes."""
    if os.geteuid() != 0:
        return  # then every other test has shown it
    place = tempfile.mkdtemp(prefix="box-")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        if spec := importlib.util.find_spec(name):
            source = Path(spec.origin)
            if spec.submodule_search_locations:
                shutil.copytree(source.parent, Path(place, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)
    code = f"""
        import os, sys
        from common import sandbox, sandbox_pytest
        reachable = not sys.base_prefix.startswith("/root")  # else a system's Python, with copies of what it needs
        if not reachable:
            sandbox_pytest.sys = type("Python", (), {{"executable": "/usr/bin/python3"}})
            sandbox._interpreter_binds = lambda: []
        binds, variables = sandbox._interpreter_binds, sandbox._environment
        sandbox._interpreter_binds = lambda: [*binds(), "--dir", "/opt", "--ro-bind", {place!r}, "/opt/copies"]
        sandbox._environment = lambda home: {{**variables(home), "PYTHONPATH": "/opt/copies"}}
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        test = {textwrap.dedent(PROTECTED_SERVER)!r}
        test += "def test_user():\\n    assert os.getuid() == 65534\\n"
        test += "def test_forks():\\n    try:\\n        while os.fork(): pass\\n"
        test += "        signal.pause()\\n    except OSError as error:\\n        assert error.errno == 11\\n"
        result = sandbox_pytest.run_pytest({{"test_a.py": test}}, ["test_a.py"], memory_mb=512, processes=16, require_isolation=True)
        print(result.passed, len(result.outcomes), result)
    """
    try:
        os.chmod(place, 0o755)
        command = [sys.executable, "-c", textwrap.dedent(code)]
        result = subprocess.run(command, cwd=Path(sandbox.__file__).parents[1], capture_output=True, text=True, timeout=300)
        assert result.stdout.startswith("True 5 "), result.stdout + result.stderr
    finally:
        shutil.rmtree(place)


@pytest.mark.usefixtures("isolated")
def test_no_trace_of_an_earlier_run_in_memory(started):
    secret = secrets.token_hex(16)
    assert suite(f"def test_x():\n    assert len('{secret}') == 32\n").passed
    half = secret[:16], secret[16:]
    result = suite(f"""
        def test_x():
            wanted, found = "{half[0]}".encode(), 0
            with open("/proc/self/mem", "rb", 0) as memory:
                for line in open("/proc/self/maps"):
                    place, mode = line.split()[:2]
                    first, last = (int(part, 16) for part in place.split("-"))
                    if mode.startswith("rw"):
                        memory.seek(first)
                        try:
                            found += memory.read(last - first).count(wanted + b"{half[1]}")
                        except (OSError, ValueError, OverflowError):
                            pass
            assert found == 0
    """)  # fmt: skip
    assert result.passed and len(started) == 1, result


@pytest.mark.usefixtures("isolated")
def test_a_worker_that_died_while_idle_is_replaced(started):
    run_pytest(GOOD, ["test_a.py"], **SMALL)
    [worker] = next(iter(w for w in sandbox_pytest._idle.values() if w))
    signal.pidfd_send_signal(worker.first, signal.SIGKILL)
    worker.process.wait()
    assert run_pytest(GOOD, ["test_a.py"], **SMALL).passed and len(started) == 2


@pytest.mark.usefixtures("isolated")
def test_closed_workers_leave_no_process(started):
    run_pytest(GOOD, ["test_a.py"], **SMALL)
    [worker] = next(iter(w for w in sandbox_pytest._idle.values() if w))
    family = [worker.process.pid, *(p.pid for p in psutil.Process(worker.process.pid).children(recursive=True))]
    assert len(family) >= 2
    sandbox_pytest.close_workers()
    left = [pid for pid in family if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert left == [] and not any(sandbox_pytest._idle.values())


@pytest.mark.usefixtures("isolated")
def test_a_killed_host_takes_its_runs_with_it():
    tag = f"34{secrets.randbelow(10**9):09d}"
    test = f"import os, subprocess\ndef test_x():\n    subprocess.run(['sleep', '{tag}'])\n"
    code = f"from common.sandbox_pytest import run_pytest; run_pytest({{'test_a.py': {test!r}}}, ['test_a.py'], wall_s=500)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(sandbox.__file__).parents[1]) as host:
        while not (sleeping := running(f"{tag}")) or not any(psutil.Process(pid).name() == "sleep" for pid in sleeping):
            assert host.poll() is None
        host.kill()
    while running(tag):
        pass


@pytest.mark.usefixtures("isolated")
def test_a_broken_box_is_no_verdict(monkeypatch):
    sandbox_pytest.close_workers()
    real = sandbox._bubblewrap_command
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_bubblewrap_command", lambda *args: [*real(*args)[:1], "--ro-bind", "/no-such-place", "/x", *real(*args)[1:]])
        with pytest.raises(SandboxError, match="no-such-place"):
            run_pytest(GOOD, ["test_a.py"], **SMALL)


# ---------------------------------------------------------------------------------------------------------------- verdicts that code would like to choose


FAKES = {
    "exit 0 at import": "import os\nos._exit(0)",
    "exit 0 in the function": "import os\n\n\ndef f(x):\n    os._exit(0)\n\n\ng = f",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "exit of pytest": "import pytest\npytest.exit('done', 0)",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "success on the output": "import os, sys\nprint('1 passed'); sys.stdout.flush(); os.write(1, b'1 passed'); os._exit(0)",
    "junk on the report": "import os\nos.write(3, b'[\"finished\", 0]\\n')\nos._exit(0)",
    "exit in the child only": "import os, time\nif os.fork():\n    os._exit(0)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)",
    "thread that exits": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.001), os._exit(0))).start()\ntime.sleep(1)",
    "closed report": "import os\nos.close(3)",
}


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("code", FAKES.values(), ids=FAKES)
def test_early_exits_and_faked_output_do_not_pass(code):
    result = hostile(code) if "g = f" not in code else suite("import a\n\n\ndef test_one():\n    assert a.g(1) == 2\n", code)
    assert not result.passed
    if "atexit" not in code:
        assert not result.clean or result.outcomes == {}


def line(token: str, *record) -> bytes:
    return (token + json.dumps(record) + "\n").encode()


@pytest.mark.parametrize(
    ("records", "status", "problem"),
    [
        ([("collected", ["a"]), ("test", "a", "call", "passed", ""), ("finished", 0)], 0, ""),
        ([("collected", ["a"]), ("test", "a", "call", "failed", "x"), ("finished", 1)], 1, ""),
        ([("collected", ["a"]), ("test", "a", "call", "passed", ""), ("finished", 0)], 1, "ended with 1 after reporting 0"),
        ([("collected", ["a"]), ("test", "a", "call", "passed", ""), ("finished", 0)], -9, "ended with -9 after reporting 0"),
        ([("collected", ["a", "b"]), ("test", "a", "call", "passed", ""), ("finished", 0)], 0, "no outcome of b"),
        ([("collected", ["a"]), ("test", "a", "call", "passed", "")], 0, "ended with 0 before the report was complete"),
        ([("test", "a", "call", "passed", ""), ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("collected", ["a"]), ("test", "b", "call", "passed", ""), ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("collected", ["a"]), *[("test", "a", "call", "passed", "")] * 2, ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("collected", ["a"]), ("collected", ["a"]), ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("collected", []), ("finished", 0), ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("collected", ["a"]), ("test", "a"), ("finished", 0)], 0, "a report that the run's reporter did not write"),
        ([("other",)], 0, "a report that the run's reporter did not write"),
        ([("collected", []), ("finished", 3)], 3, "pytest ended with 3"),
    ],
)
def test_a_report_counts_only_when_it_is_whole(records, status, problem):
    report = sandbox_pytest._Report(b"token")
    data = b"".join(line("token", *record) for record in records)
    for i in range(0, len(data), 7):  # in pieces
        report.feed(data[i : i + 7])
    assert report.result(status, False, True).problem == problem


def test_a_report_needs_the_token():
    report = sandbox_pytest._Report(b"token")
    report.feed(line("token", "collected", ["a"]) + line("wrong", "test", "a", "call", "passed", ""))
    assert report.result(0, False, True).problem == "a report that the run's reporter did not write"
    assert re.fullmatch("[0-9a-f]{32}", secrets.token_hex(16)) and os.path.exists(sandbox_pytest.__file__)
