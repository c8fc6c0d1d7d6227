"""pytest on files that a model wrote: a pool of warm workers, each a bubblewrap namespace of its own with a process that forks a child for each run.

One run at a time in a worker, so runs never meet; what a run leaves behind ends the worker. Outcomes come as reports of single tests that carry a token
of the run, and count only when the run ended by itself and every collected test was reported. That stops early exits, faked output and half-finished runs.
It cannot stop code that rewrites pytest from inside the process that runs it: whoever grades gives tests that must pass and tests that must fail
(``envs/repo.py``), restored from the original task.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import sandbox
from common.sandbox import SandboxError

WORKER = (Path(__file__).parent / "pytest_worker.py").read_text()
REPORT_BYTES = 4 << 20  # of one run
START_S = 120.0  # seconds for a worker to import pytest, on a busy machine
# Options of a suite without settings of its own; the parts of pytest that it does not need cost half of a small run.
_UNUSED = "debugging doctest junitxml logging pastebin setuponly setupplan stepwise threadexception unraisableexception warnings"
ISOLATED = ("-c", os.devnull, "--continue-on-collection-errors", *(part for name in _UNUSED.split() for part in ("-p", f"no:{name}")))
WORKERS = max(2, min(16, os.cpu_count() or 2))  # side by side; about 40 MB each


@dataclass(frozen=True)
class PytestResult:
    """What a run of pytest gave.

    outcomes: node id -> passed, failed, skipped or error (set-up, tear-down or collection; a file that could not be collected has its own id).
    messages: node id -> the beginning of the failure's text. problem: "" when the run ended by itself with a full report, else why it does not count.
    ``clean``: no problem, and every file could be collected.
    """

    outcomes: dict[str, str]
    messages: dict[str, str]
    problem: str
    timed_out: bool
    isolated: bool
    collection_errors: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.problem and not self.collection_errors

    @property
    def passed(self) -> bool:
        """Every test passed (skipped ones aside), at least one did, and the run was clean."""
        return self.clean and "passed" in self.outcomes.values() and set(self.outcomes.values()) <= {"passed", "skipped"}


def _same(message: str) -> str:
    """Without addresses, which differ from run to run."""
    return re.sub(r"\b0x[0-9a-f]+", "0x", message)


@dataclass
class _Report:
    """Reads the lines of a run that may be forged."""

    token: bytes
    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    collection_errors: list[str] = field(default_factory=list)
    collected: list[str] | None = None
    finished: int | None = None
    problem: str = ""
    rest: bytes = b""
    size: int = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if not self.problem and not self.take(line):
                self.problem = "a report that the run's reporter did not write"

    def take(self, line: bytes) -> bool:
        """One report; False for what cannot come from the reporter at this point."""
        if not line.startswith(self.token) or self.finished is not None:
            return False
        try:
            kind, *values = json.loads(line.removeprefix(self.token))
            if kind == "collect":
                [name, message] = values
                self.collection_errors.append(str(name))
                self.outcomes[name], self.messages[name] = "error", _same(message)
            elif kind == "collected" and self.collected is None:
                [self.collected] = values
            elif kind == "test" and values[0] in (self.collected or ()):
                name, when, outcome, message = values
                if when == "call" and name in self.outcomes:
                    return False
                self.outcomes[name] = "error" if outcome == "failed" and when != "call" else str(outcome)
                if message:
                    self.messages[name] = _same(message)
            elif kind == "finished":
                [self.finished] = values
            else:
                return False
        except (ValueError, TypeError, IndexError):
            return False
        return True

    def result(self, status: int | None, timed_out: bool, isolated: bool, killed: str = "") -> PytestResult:
        """status: exit code of the process, negative after a signal, None when it had to be ended."""
        problem = killed or ("over the time limit" if timed_out else self.problem)
        if not problem and (self.collected is None or self.finished is None or self.rest):
            problem = f"ended with {status} before the report was complete"
        if not problem and status != self.finished:
            problem = f"ended with {status} after reporting {self.finished}"
        if not problem and self.finished not in (0, 1, 5):  # all passed, some failed, nothing collected
            problem = f"pytest ended with {self.finished}"
        missing = set(self.collected or ()) - set(self.outcomes)
        if not problem and missing:
            problem = f"no outcome of {min(missing)}"
        return PytestResult(self.outcomes, self.messages, problem, timed_out, isolated, tuple(self.collection_errors))


class _Worker:
    """One namespace. Raises SandboxError when it cannot be started or is found dead before a run."""

    def __init__(self, memory_mb: int, file_mb: int, processes: int):
        self.memory_mb = memory_mb
        uid = sandbox._free_uid() if os.geteuid() == 0 else None
        variables = {**sandbox._environment("/tmp"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0"}
        shell = "exec 3>&{report}; exec {report}>&-; ulimit -c 0; ulimit -f {file_blocks}; ulimit -v {memory_kb}; "
        shell += '{{ ulimit -u {processes} || ulimit -p {processes}; }} 2>/dev/null; exec "$@"'
        control_read, control_write = os.pipe()
        report_read, report_write = os.pipe()
        status_read, status_write = os.pipe()
        limits = shell.format(report=report_write, file_blocks=file_mb * 2048, memory_kb=memory_mb * 1024, processes=processes)
        command = sandbox._bubblewrap_command({}, memory_mb, uid, variables)
        command = [command[0], "--as-pid-1", "--json-status-fd", str(status_write), *command[1:]]
        command += ["bash", "-c", limits, "bash", sys.executable, "-sPB", "-c", WORKER, "serve", *ISOLATED]
        try:
            self.process = _keeper().submit(
                subprocess.Popen, command, stdin=subprocess.PIPE, stdout=control_write, stderr=subprocess.PIPE, cwd="/", start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)}, pass_fds=(report_write, status_write),
            ).result()  # fmt: skip
        except OSError as error:
            for fd in (control_read, report_read, status_read):
                os.close(fd)
            raise SandboxError(f"cannot start {command[0]}: {error}") from error
        finally:
            for fd in (control_write, report_write, status_write):
                os.close(fd)
        self.control, self.report, self.first = control_read, report_read, None
        try:
            line = self.line(time.monotonic() + START_S)
            if line != b"ready":
                raise SandboxError(f"a pytest worker did not start: {self.errors()}")
            self.first = os.pidfd_open(json.loads(os.read(status_read, 4096).split(b"\n")[0])["child-pid"])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(status_read)

    def errors(self) -> str:
        self.process.kill()
        return self.process.stderr.read(4000).decode(errors="replace").strip()[-300:]  # type: ignore[union-attr]

    def line(self, deadline: float) -> bytes:
        """The server's next line; what there is of it at its end or at the deadline."""
        data = b""
        while not data.endswith(b"\n") and select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(self.control, 256)
            if not piece:
                return data
            data += piece
        return data.removesuffix(b"\n")

    def run(self, request: bytes, token: bytes, wall_s: float) -> tuple[PytestResult, bool]:
        """(result, whether the worker may serve again)."""
        report, killed, deadline = _Report(token), "", time.monotonic() + wall_s
        try:
            self.process.stdin.write(b"%016x" % len(request) + request)  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            raise SandboxError(f"a pytest worker died: {self.errors()}") from error
        look = time.monotonic() + sandbox._POLL_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return report.result(None, True, True), False
            if report.size > REPORT_BYTES:
                return report.result(None, False, True, "more reports than a run may write"), False
            if now >= look:
                if sandbox._tree(self.process.pid)[1] > self.memory_mb << 20:
                    return report.result(None, False, True, f"the processes together took more than {self.memory_mb} MB"), False
                look = now + sandbox._POLL_S
            ready = select.select([self.report, self.control], [], [], max(0.0, min(look, deadline) - now))[0]
            if self.report in ready and (data := os.read(self.report, 65_536)):
                report.feed(data)
            elif self.control in ready:
                line = self.line(deadline)
                break
        while select.select([self.report], [], [], 0)[0] and (data := os.read(self.report, 65_536)):
            report.feed(data)  # its writers are gone: what is left now is all there will be
        if line.count(b" ") != 1:
            return report.result(None, False, True, "the run ended its worker"), False
        status, good = map(int, line.split())
        return report.result(os.waitstatus_to_exitcode(status), False, True, killed), bool(good)

    def close(self) -> None:
        """Ends the namespace and waits until nothing in it lives."""
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.stderr.close()  # type: ignore[union-attr]
        if self.first is not None:
            select.select([self.first], [], [], sandbox._GRACE_S)
            os.close(self.first)
        os.close(self.control)
        os.close(self.report)


_lock = threading.Lock()
_places = threading.BoundedSemaphore(WORKERS)
_idle: dict[tuple[int, int, int], list[_Worker]] = {}
_keeper_thread: ThreadPoolExecutor | None = None


def _keeper() -> ThreadPoolExecutor:
    """The thread that starts the workers: they die with the thread that started them, and a rollout's threads are short-lived."""
    global _keeper_thread
    with _lock:
        _keeper_thread = _keeper_thread or ThreadPoolExecutor(1, "pytest-workers")
        return _keeper_thread


def close_workers() -> None:
    """Ends every idle worker; the next run starts a fresh one."""
    with _lock:
        workers = [worker for kept in _idle.values() for worker in kept]
        _idle.clear()
    for worker in workers:
        worker.close()


atexit.register(close_workers)


def run_pytest(
    files: Mapping[str, str],
    tests: Sequence[str],
    *,
    wall_s: float = 20.0,
    cpu_s: int = 4,
    memory_mb: int = 1024,
    file_mb: int = 16,
    processes: int = 32,
    require_isolation: bool = False,
) -> PytestResult:
    """Runs the tests (files or node ids) of a folder that holds just these files (relative path -> text), in a warm worker; from any number of threads.

    The limits are those of ``run_process``, for the run. Without bubblewrap a process is started for each run, under limits only, and a RuntimeWarning
    says so once. Raises SandboxError when isolation is required and missing or the box itself fails, ValueError for a file name that leads elsewhere.
    """
    for name in files:
        if Path(name).is_absolute() or not Path(name).parts or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"file name {name!r} is not a relative path below the folder")
    token = secrets.token_hex(16)
    request = {"token": token, "files": dict(files), "tests": list(tests), "cpu_s": cpu_s}
    body = json.dumps(request).encode()
    if sandbox.isolation_problem():
        limits = {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mb": memory_mb, "file_mb": file_mb, "processes": processes}
        return _run_cold(body, token, ISOLATED, None, require_isolation=require_isolation, **limits)
    with _places:
        return _run_warm(body, token, wall_s, (memory_mb, file_mb, processes))


def _run_warm(body: bytes, token: str, wall_s: float, key: tuple[int, int, int]) -> PytestResult:
    for attempt in (0, 1):
        with _lock:
            worker = _idle[key].pop() if _idle.get(key) else None
        worker = worker or _Worker(*key)
        good = False
        try:
            result, good = worker.run(body, token.encode(), wall_s)
            return result
        except SandboxError:  # an idle worker that died meanwhile
            if attempt:
                raise
        finally:
            with _lock:
                keep = good and sum(map(len, _idle.values())) < WORKERS
                if keep:
                    _idle.setdefault(key, []).append(worker)
            if not keep:
                worker.close()
    raise AssertionError("unreachable")


def run_pytest_in(folder: Path, files: Mapping[str, str], tests: Sequence[str], **limits: Any) -> PytestResult:
    """Runs tests in a folder of the host that the run may change, with the folder's own pytest settings, in a process of its own. ``files`` are written there
    first, inside the box. limits: those of ``run_process``. Raises SandboxError when the box itself fails."""
    token = secrets.token_hex(16)
    request = {"token": token, "files": dict(files), "tests": list(tests), "cpu_s": limits.get("cpu_s", 10)}
    return _run_cold(json.dumps(request).encode(), token, ("--continue-on-collection-errors",), folder, **limits)


def _run_cold(body: bytes, token: str, options: Sequence[str], folder: Path | None, **limits: Any) -> PytestResult:
    variables = {"PYTHONHASHSEED": "0", **({} if folder else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})}
    command, stdin = [sys.executable, "-sPB", "-c", WORKER, "once", *options], f"{len(body):016x}{body.decode()}"
    ran = sandbox.run_process(command, folder=folder, stdin=stdin, environment=variables, output_bytes=REPORT_BYTES, **limits)
    report = _Report(token.encode())
    report.feed(ran.stdout.encode())
    return report.result(ran.returncode, ran.timed_out, ran.isolated, "more reports than a run may write" if ran.output_truncated else "")
