"""Running what a model wrote: a process in a box. Programs are treated as hostile.

``run_process`` starts a program in bubblewrap namespaces (or, with a visible warning, under plain resource limits) and always comes back.
Warm workers for pytest are in ``sandbox_pytest.py``, queries on a read-only database in ``sandbox_sql.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import re
import secrets
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.sandbox_sql import SqlResult, run_sql, sql_tokens

__all__ = ["ProcessResult", "SandboxError", "SqlResult", "isolation_problem", "run_process", "run_sql", "sql_tokens"]


class SandboxError(RuntimeError):
    """The box itself failed or is not to be had: nothing was learned about the program."""


@dataclass(frozen=True)
class ProcessResult:
    """What a run left. ``returncode`` is 128 + n after signal n, 124 after the wall-clock limit; of long output the beginning and the end are kept."""

    stdout: str
    stderr: str
    returncode: int
    timed_out: bool
    output_truncated: bool
    isolated: bool


_BOX_MARK = "CLEANAGENTRL_BOX"  # environment variable that finds a run's stray processes where there is no process namespace
_POLL_S = 0.2  # how often memory and process count of the whole tree are looked at
_GRACE_S = 10.0  # how long killed processes may take to vanish
_uid_counter = itertools.count()
_warned = False

# sh enters the folder (root's bubblewrap may not any more) and sets the limits, then becomes the program.
# dash spells the process limit -p, bash -u. File blocks are 512 bytes in POSIX mode.
_LIMIT_SCRIPT = (
    "cd {folder} || exit 125; ulimit -c 0; ulimit -t {cpu_s}; ulimit -f {file_blocks}; ulimit -v {memory_kb}; "
    '{{ ulimit -u {processes} || ulimit -p {processes}; }} 2>/dev/null; exec "$@"'
)


def _free_uid() -> int:
    """A user id that no account has, another one for each run at a time: the kernel counts processes by user. Needs root."""
    slot = os.getpid() * 64 + next(_uid_counter) % 64
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    if any(inside <= 1 << 30 and inside + count >= 1 << 31 for inside, _, count in ranges):
        return (1 << 30) + slot % (1 << 30)
    return 20_000 + slot % 40_000  # inside a container with 65,536 ids


def _interpreter_binds() -> list[str]:
    """Read-only binds that make this Python, its virtual environment and its base usable inside, in folders that any user may pass (root's home is not)."""
    binds: list[str] = []
    for place in dict.fromkeys(p for prefix in (sys.base_prefix, sys.prefix) for p in (Path(prefix), Path(prefix).resolve())):
        if place != Path("/") and not place.is_relative_to("/usr"):
            for parent in reversed(place.parents[:-1]):
                binds += ["--perms", "0755", "--dir", str(parent)]
            binds += ["--ro-bind", str(place), str(place)]
    return binds


def _bubblewrap_command(folders: Mapping[str, Path], memory_mb: int, uid: int | None, environment: Mapping[str, str]) -> list[str]:
    """The command line up to the program. ``folders``: place inside -> folder of the host, writable. ``uid``: root gives the program this user; others are
    themselves, in a user namespace."""
    size = str(memory_mb << 20)
    command = ["bwrap", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if uid is None:
        command += ["--unshare-all"]
    else:  # no user namespace, or setpriv could not change the user; it drops these three capabilities too
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if (link := Path("/", name)).is_symlink():
            command += ["--symlink", os.readlink(link), str(link)]
        elif link.is_dir():
            command += ["--ro-bind", str(link), str(link)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for name in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", size, "--tmpfs", name]
    command += _interpreter_binds()  # after /tmp, which would hide them
    for inside, folder in folders.items():
        command += ["--bind", str(folder), inside]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    if uid is not None:
        command += ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
    return command


@functools.cache
def isolation_problem() -> str:
    """Why programs cannot be isolated here, or "" when they can. Tried once per process."""
    if platform.system() != "Linux":
        return "bubblewrap needs Linux"
    for program in ("bwrap", *(["setpriv"] if os.geteuid() == 0 else [])):
        if shutil.which(program) is None:
            return f"program {program} is missing (Debian packages bubblewrap and util-linux)"
    with tempfile.TemporaryDirectory(prefix="box-") as name:
        command = _bubblewrap_command({"/box": Path(name)}, 16, _free_uid() if os.geteuid() == 0 else None, {"PATH": "/usr/bin:/bin"})
        tried = subprocess.run([*command, "true"], env={"PATH": os.environ.get("PATH", os.defpath)}, capture_output=True, text=True, timeout=60)
    return "" if tried.returncode == 0 else f"bubblewrap does not work here: {tried.stderr.strip()[:200]}"


class _Output:
    """The first and the last half of at most ``limit`` bytes of a stream."""

    def __init__(self, limit: int):
        self.head, self.tail, self.total = bytearray(), bytearray(), 0
        self.head_limit, self.tail_limit = limit - limit // 2, limit // 2

    def add(self, data: bytes) -> None:
        self.total += len(data)
        taken = min(len(data), self.head_limit - len(self.head))
        self.head += data[:taken]
        self.tail += data[taken:]
        del self.tail[: max(0, len(self.tail) - self.tail_limit)]

    @property
    def left_out(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        gap = f"\n... {self.left_out} bytes left out ...\n".encode() if self.left_out else b""
        return (bytes(self.head) + gap + bytes(self.tail)).decode(errors="replace")


def _write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes files below a folder that an earlier program may have filled with symbolic links: none is followed out of it."""
    for name, content in files.items():
        target = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts or target == folder:
            raise ValueError(f"file name {name!r} is not a relative path below the folder")
        if not target.parent.resolve().is_relative_to(folder):
            raise SandboxError(f"{name!r} lies behind a symbolic link that leads out of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content.encode() if isinstance(content, str) else content)


def _give(folder: Path, uid: int, gid: int) -> None:
    """Hands a tree to a user: links themselves, not what they point to."""
    os.lchown(folder, uid, gid)
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.lchown(os.path.join(place, name), uid, gid)


def _remove_tree(root: str) -> None:
    """Removes a hostile tree. Its folders may be closed by their modes, and deeper than shutil.rmtree can recurse or a path can be long: each is moved up."""
    flat = tempfile.mkdtemp(prefix="box-")
    waiting, moved = [root], itertools.count()
    while waiting:
        place = waiting.pop()
        with os.scandir(place) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    waiting.append(os.path.join(flat, str(next(moved))))
                    os.rename(entry.path, waiting[-1])
                else:
                    os.unlink(entry.path)
        os.rmdir(place)
    os.rmdir(flat)


@contextlib.contextmanager
def _work_folder(folder: Path | None, files: Mapping[str, str | bytes], uid: int | None) -> Iterator[Path]:
    """The caller's folder or a temporary one, filled, and owned by ``uid`` while the program runs."""
    made = None if folder is not None else tempfile.mkdtemp(prefix="box-")
    place = Path(made or folder or "").resolve()
    try:
        if not place.is_dir():
            raise SandboxError(f"work folder {place} does not exist")
        _write_files(place, files)
        owner = place.stat()
        if uid is not None:
            _give(place, uid, uid)
        try:
            yield place
        finally:
            if uid is not None and made is None:
                _give(place, owner.st_uid, owner.st_gid)
    finally:
        if made is not None:
            _remove_tree(made)


def _environment(home: str) -> dict[str, str]:
    """All that a program in the box sees of an environment."""
    return {
        "PATH": ":".join(dict.fromkeys((str(Path(sys.prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin"))),
        "HOME": home,
        "TMPDIR": home,
        "USER": "box",
        "LOGNAME": "box",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",  # numeric libraries would start a thread for each core, against the process limit
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_process(
    argv: Sequence[str],
    *,
    folder: Path | None = None,
    place: str = "/box",
    mounts: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    stdin: str = "",
    wall_s: float = 10.0,
    cpu_s: int = 10,
    memory_mb: int = 1024,
    file_mb: int = 64,
    processes: int = 64,
    output_bytes: int = 65_536,
    require_isolation: bool = False,
) -> ProcessResult:
    """Runs a program that may be hostile, and returns once it and everything it started are gone.

    folder: writable at ``place``, the working directory (a temporary one, removed afterwards, when None). files: relative path -> content, written there first.
    mounts: more folders, place inside -> folder, writable; they need isolation. environment: more variables (nothing of the caller's is inherited).
    wall_s: seconds until everything is killed. cpu_s: CPU seconds of each process. memory_mb: address space of each process, resident memory of all together
    (looked at five times a second), size of /tmp. file_mb: one file. processes: processes and threads. output_bytes: kept of stdout and of stderr.

    Isolated (Linux with bubblewrap): no network, read-only /usr and Python, private /tmp and /proc, empty environment, no capabilities. Started by root, the
    program gets a user id of its own and the folder belongs to that id until the end. Without bubblewrap only the limits hold: the program sees the host's
    files and network, and a RuntimeWarning says so once per process.

    Raises SandboxError when isolation is required and missing, or when the box itself fails; ValueError for bad arguments.
    """
    if not argv or not all(isinstance(part, str) and "\0" not in part for part in argv):
        raise ValueError(f"argv must be a non-empty list of strings without null characters, not {argv!r}")
    if min(wall_s, cpu_s, memory_mb, file_mb, processes, output_bytes) <= 0:
        raise ValueError("every limit must be above zero")
    problem = isolation_problem()
    if problem and require_isolation:
        raise SandboxError(f"isolation is required and not to be had: {problem}")
    if problem:
        _warn_once(problem)
    isolated = not problem
    if mounts and not isolated:
        raise SandboxError(f"folders can only be mounted where programs are isolated: {problem}")
    uid = _free_uid() if isolated and os.geteuid() == 0 else None
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_work_folder(folder, files or {}, uid))
        folders = {place: work, **{inside: stack.enter_context(_work_folder(outside, {}, uid)) for inside, outside in (mounts or {}).items()}}
        variables = {**_environment("/tmp" if isolated else str(work)), **(environment or {})}
        # The kernel counts a user's processes: those of the box alone for a user id or (from Linux 5.14) a user namespace of its own, else all of the user's.
        others = 0 if isolated and (uid is not None or _kernel() >= (5, 14)) else _threads_of_user()
        limits = _LIMIT_SCRIPT.format(
            folder=place if isolated else ".", cpu_s=cpu_s, file_blocks=file_mb * 2048, memory_kb=memory_mb * 1024, processes=processes + others
        )
        command = ["sh", "-c", limits, "sh", *argv]
        run = _Run(wall_s, memory_mb, processes, output_bytes)
        if isolated:
            return run([*_bubblewrap_command(folders, memory_mb, uid, variables), *command], {"PATH": os.environ.get("PATH", os.defpath)}, "/", stdin, "")
        mark = secrets.token_hex(16)
        return run(command, {**variables, _BOX_MARK: mark}, str(work), stdin, mark)


def _warn_once(problem: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        text = f"NOT ISOLATED: programs written by the model see this machine's files and network ({problem}); --require-sandbox refuses this"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])


def _threads_of_user() -> int:
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                total += process.num_threads()
    return total


def _tree(pid: int) -> tuple[int, int]:
    """(processes, bytes of resident memory) below a process."""
    count = memory = 0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                memory += child.memory_info().rss
                count += 1
    return count, memory


def _kill_marked(mark: str) -> None:
    """Kills every process whose environment carries the mark, until none is left."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_BOX_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()


class _Run:
    """Starts one command line, feeds it, reads it, ends it."""

    def __init__(self, wall_s: float, memory_mb: int, processes: int, output_bytes: int):
        self.deadline = time.monotonic() + wall_s
        self.memory_mb, self.processes = memory_mb, processes
        self.stdout, self.stderr, self.status = _Output(output_bytes), _Output(output_bytes), _Output(4096)
        self.selector = selectors.DefaultSelector()

    def __call__(self, command: list[str], environment: dict[str, str], cwd: str, stdin: str, mark: str) -> ProcessResult:
        """mark: "" for a bubblewrap command line, whose status pipe tells whether the program really ran; else the mark in the environment."""
        isolated = not mark
        status_read, status_write = os.pipe()
        if isolated:
            command = [command[0], "--json-status-fd", str(status_write), *command[1:]]
        try:
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=cwd, start_new_session=True, pass_fds=(status_write,) if isolated else ()
            )
        except OSError as error:
            os.close(status_read)
            raise SandboxError(f"cannot start {command[0]}: {error}") from error
        finally:
            os.close(status_write)
        killed, timed_out = "", False
        with self.selector, process.stdout, process.stderr, open(status_read, "rb", buffering=0) as status:  # type: ignore[union-attr]
            for file, output in ((process.stdout, self.stdout), (process.stderr, self.stderr), (status, self.status)):
                self.selector.register(file, selectors.EVENT_READ, output)
            if stdin:
                os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
                self.selector.register(process.stdin, selectors.EVENT_WRITE, bytearray(stdin.encode(errors="replace")))  # type: ignore[arg-type]
            else:
                process.stdin.close()  # type: ignore[union-attr]
            try:
                killed, timed_out = self.watch(process, isolated)
            finally:  # after an interrupt of the caller too: nothing may stay behind
                self.end(process, mark)
                drained = time.monotonic() + 1.0
                while self.selector.get_map() and time.monotonic() < drained and self.pump(0.0):
                    pass
                if not process.stdin.closed:  # type: ignore[union-attr]
                    with contextlib.suppress(OSError):
                        process.stdin.close()  # type: ignore[union-attr]
        if isolated and not timed_out and not killed and "exit-code" not in self.events():
            raise SandboxError(f"bubblewrap failed before the program ended: {self.stderr.text().strip()[:300]}")
        returncode = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ProcessResult(
            self.stdout.text(),
            self.stderr.text() + killed,
            124 if timed_out else 137 if killed else returncode,
            timed_out,
            bool(self.stdout.left_out or self.stderr.left_out),
            isolated,
        )

    def watch(self, process: subprocess.Popen[bytes], isolated: bool) -> tuple[str, bool]:
        """Until the program ends or has to be ended: (why it has to be killed or "", whether the time is over)."""
        look = time.monotonic() + _POLL_S
        while process.poll() is None:
            now = time.monotonic()
            if now >= self.deadline:
                return "", True
            if now >= look:
                count, memory = _tree(process.pid)
                if memory > self.memory_mb << 20:
                    return f"\nkilled: the processes together took more than {self.memory_mb} MB", False
                if not isolated and count > self.processes:
                    return f"\nkilled: more than {self.processes} processes", False
                look = time.monotonic() + _POLL_S
            rest = max(0.0, min(self.deadline, look) - now)
            if self.selector.get_map():
                self.pump(min(rest, 0.05))
            else:  # the program closed its output and goes on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(rest)
        return "", False

    def pump(self, seconds: float) -> bool:
        """One round of reading and writing; whether anything moved."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            if isinstance(key.data, _Output):
                data = os.read(key.fd, 65_536)
                key.data.add(data)
                if not data:
                    self.selector.unregister(key.fileobj)
                continue
            try:
                del key.data[: os.write(key.fd, key.data[:65_536])]
            except BlockingIOError:
                continue
            except OSError:  # the program closed its end
                key.data.clear()
            if not key.data:
                self.selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        return bool(ready)

    def events(self) -> dict[str, int]:
        """What bubblewrap reported: ``child-pid`` once the namespaces stand, ``exit-code`` once the program ended."""
        events: dict[str, int] = {}
        for line in self.status.text().splitlines():
            with contextlib.suppress(ValueError):
                events.update(json.loads(line))
        return events

    def end(self, process: subprocess.Popen[bytes], mark: str) -> None:
        """Kills what is left and waits until it is gone. bubblewrap's death kills the first process of its namespace, and that one's end is the end of all."""
        while self.selector.get_map() and not mark and "child-pid" not in self.events() and self.pump(0.0):
            pass
        first = None
        if not mark and (pid := self.events().get("child-pid")):
            with contextlib.suppress(OSError):
                first = os.pidfd_open(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if mark:
            _kill_marked(mark)
        if first is not None:
            try:
                select.select([first], [], [], _GRACE_S)
            finally:
                os.close(first)
