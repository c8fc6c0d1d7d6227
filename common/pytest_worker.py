"""Runs inside the box, as a text given to ``python -c``: pytest on hostile files. The host's side is ``sandbox_pytest.py``; this project is not imported.

``serve``: the first process of a process namespace. It holds a pytest session that has not collected anything yet and forks it for each run. It never reads
a run's files (the child does), so that its memory, which every later child inherits, holds nothing of earlier runs. It cannot be killed or traced from
inside: the kernel drops signals to the first process of a namespace, and it is not dumpable. When a run leaves anything behind (a process, shared memory,
files that cannot be removed, other limits of this process) it ends, and the host starts a fresh one.
``once``: one run in the present folder, in a process that the host started for it.

A request on stdin: 16 hexadecimal digits of length, then JSON {"token", "files", "tests", "cpu_s"}. Further words of the command line are pytest's options.
Reports on REPORT_FD: lines of JSON that begin with the run's token. ``serve`` ends each run with one line on stdout: the child's wait status and 1, or 0 when
it will serve no more.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import termios

import pytest

REPORT_FD = 3
FOLDER = "/tmp/box"
MESSAGE_CHARS = 2000
ROOTS = ("/tmp", "/dev/shm")
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler", "--capture=no")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
prctl = ctypes.CDLL(None, use_errno=True).prctl


def read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := os.read(0, size - len(data))):
        data += piece
    return data


class Reporter:
    """pytest plugin: each test's outcome, as soon as it is known, to the host."""

    def __init__(self, serving: bool, folder: str):
        self.serving, self.folder = serving, folder

    def begin(self, config) -> None:
        """Reads the request: from here on this process is the run's."""
        request = json.loads(read_exactly(int(read_exactly(16), 16)))
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the first two were the way to the server's host
            os.dup2(null, fd)
        if self.serving:
            os.closerange(REPORT_FD + 1, 4096)
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"]))
        for name, text in request["files"].items():
            path = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        sys.path.insert(0, self.folder)
        config.args[:] = request["tests"]
        token, owner, write = request["token"], os.getpid(), os.write

        def send(*record: object) -> None:
            if os.getpid() == owner:  # a forked copy of the session stays silent
                line = (token + json.dumps(record) + "\n").encode()
                while line:
                    line = line[write(REPORT_FD, line) :]

        self.send = send

    def message(self, report: object) -> str:
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        text = crash.message if crash is not None else getattr(report, "longreprtext", "")
        return text.replace(self.folder + "/", "")[:MESSAGE_CHARS]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session):
        if self.serving:
            serve()  # returns in the child
        self.begin(session.config)

    def pytest_collectreport(self, report):
        if report.failed:
            self.send("collect", report.nodeid, self.message(report))

    def pytest_collection_finish(self, session):
        self.send("collected", [item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report):
        # a test is what its call says, unless its set-up or tear-down did not pass
        if report.when == "call" or report.outcome != "passed":
            self.send("test", report.nodeid, report.when, report.outcome, self.message(report) if report.failed else "")

    def pytest_sessionfinish(self, exitstatus):
        self.send("finished", int(exitstatus))


def limits() -> list[object]:
    """What a process of the same user may change in another one, and its later children would inherit."""
    kinds = sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    return [*(resource.getrlimit(kind) for kind in kinds), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))]


def paths() -> set[str]:
    """Everything under the roots, as far as their own file systems reach: a mounted interpreter is named, not entered."""
    found, folders = set(), list(ROOTS)
    while folders:
        folder = folders.pop()
        device = os.lstat(folder).st_dev
        for entry in os.scandir(folder):
            found.add(entry.path)
            if entry.is_dir(follow_symlinks=False) and os.lstat(entry.path).st_dev == device:
                folders.append(entry.path)
    return found


def clean_up(kept: set[str]) -> bool:
    """Removes what a run left, but for `kept` (the way to an interpreter under /tmp) and the empty work folder. Whether nothing else is there any more."""
    for path in sorted(paths() - kept):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):  # it may have gone with its folder
            os.unlink(path)
    os.mkdir(FOLDER)
    for kind in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{kind}") as file:
            if len(file.readlines()) > 1:
                return False
    return paths() == kept | {FOLDER} and [name for name in os.listdir("/proc") if name.isdigit()] == ["1"]


def waiting() -> bool:
    """Blocks until a request has begun to arrive; False when the host has closed the pipe. Reads nothing: every byte belongs to the child."""
    select.select([0], [], [])
    return struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, bytes(4)))[0] > 0


def wait_for(child: int) -> int:
    """Wait status of the child. Orphans of the run end here too. When the host is gone, so is everything in the namespace."""
    done = os.pidfd_open(child)
    poll = select.poll()
    poll.register(done, select.POLLIN)
    poll.register(0, 0)  # only its other end's closing
    while True:
        if any(fd == 0 and event & select.POLLHUP for fd, event in poll.poll(1000)):
            os._exit(1)
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid not in (0, child):
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            os.close(done)
            return status


def serve() -> None:
    """Forks a child for each request, which returns; the server itself never does."""
    before, kept = limits(), paths() - {FOLDER}
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    while waiting():
        child = os.fork()
        if child == 0:
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            os.chdir(FOLDER)
            return
        status, strays = wait_for(child), 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in the namespace but this process
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                strays += 1
        good = False
        with contextlib.suppress(Exception):
            good = clean_up(kept) and not strays and limits() == before
        os.write(1, b"%d %d\n" % (status, good))
        if not good:
            break
    os._exit(0)


def main(mode: str, options: list[str]) -> None:
    folder = os.getcwd()
    if mode == "serve":
        if os.getpid() != 1 or prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
            sys.exit("not the first process of a namespace")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler would make the signal deliverable from inside
        os.set_inheritable(REPORT_FD, True)
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
        folder, kept = FOLDER, paths()
        with open("/tmp/test_warm.py", "w") as file:  # a session imports much late: here, once
            file.write("def test_warm():\n    assert [1] == [2]\n")
        pytest.main([*OPTIONS, *options, "--rootdir", "/tmp", "--confcutdir", "/tmp", "/tmp/test_warm.py"])
        sys.modules.pop("test_warm")
        if not clean_up(kept):
            sys.exit("the box is not empty at its start")
        os.chdir(folder)  # pytest looks for tests from here
    else:
        os.dup2(1, REPORT_FD)
    # Where pytest looks first for conftest files, it remembers that there is none: in a folder that stays as it is, not in the runs'.
    elsewhere = ["/dev"] if mode == "serve" else []
    try:
        code = pytest.main([*OPTIONS, *options, "--rootdir", folder, "--confcutdir", folder, *elsewhere], plugins=[Reporter(mode == "serve", folder)])
    except BaseException:
        code = 70  # pytest reports its own breakdown with 3; this one came from below it
    os._exit(int(code))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
