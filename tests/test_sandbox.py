"""Hostile programs: each escape is tried and its failure checked by value."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import psutil
import pytest
from conftest import need_program
from hypothesis import given
from hypothesis import strategies as st

from common import sandbox
from common.sandbox import SandboxError, run_process


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
