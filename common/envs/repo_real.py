"""Real tasks of repository repair below a folder: Harbor / Terminal-Bench 2 task folders, and SWE-bench records beside local checkouts.

Harbor: each ``FOLDER/TASK`` has ``task.toml``, ``instruction.md``, ``environment/`` (with a Dockerfile) and ``tests/test.sh``, which writes
``/logs/verifier/reward.txt`` or ``reward.json``. A policy works with shell commands. With a docker daemon tasks run in containers built from their Dockerfile;
else in the sandbox, on what the Dockerfile copies to its working directory (its RUN lines are not executed: the tools are this machine's).

SWE-bench: ``FOLDER/*.jsonl`` with instance_id, problem_statement, test_patch, FAIL_TO_PASS and PASS_TO_PASS (pytest node ids), and for each record its
checkout at base_commit in ``FOLDER/INSTANCE_ID``. A policy works with the actions of ``repo.py``; ``test`` runs the files of PASS_TO_PASS as the checkout has
them; submitting applies test_patch and runs both lists. What the tests import must be installed for this Python.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import tomllib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.envs import DataError, EnvironmentFailed, Message, TaskSet
from common.envs.repo import RepoEnv, Verdict, checked_files, is_protected, report, tree_hash
from common.sandbox import SandboxError, _remove_tree, run_process
from common.sandbox_pytest import PytestResult, run_pytest_in

SHELL_SYSTEM = "Solve the task in a shell. One action a turn: run COMMAND | submit. Further lines belong to the command."
OUTPUT_CHARS = 4000  # of a command, shown
REWARD_BYTES = 65_536
FILE_CHARS = 1_000_000  # of a source file that a policy can see
SWE_LIMITS = {"wall_s": 900.0, "cpu_s": 900, "memory_mb": 4096, "file_mb": 256, "processes": 64}
MAX_TURNS = 40


def load(path: str, seed: int = 0) -> TaskSet:
    """Task set of a folder: Harbor tasks or SWE-bench records, a fifth of them (at least one) for evaluation. Raises DataError."""
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"--env repo:{path}: no such folder; give one with Harbor task folders or SWE-bench records (*.jsonl), or repo:large")
    folders = sorted(p.parent for p in root.glob("*/task.toml"))
    records = sorted(root.glob("*.jsonl"))
    if bool(folders) == bool(records):
        found = "both task.toml folders and *.jsonl files" if folders else "neither TASK/task.toml nor *.jsonl"
        raise DataError(f"--env repo:{path}: {found}; one kind is needed")
    tasks = [harbor_task(folder) for folder in folders] or [task for file in records for task in swe_tasks(file)]
    if len(tasks) < 2:
        raise DataError(f"--env repo:{path}: {len(tasks)} task; at least two are needed, one of them for evaluation")
    random.Random(f"repo-{seed}").shuffle(tasks)
    held_out = max(1, len(tasks) // 5)
    if folders:
        docker = docker_answers()
        make, notes = functools.partial(HarborEnv, docker), {"run in": "docker" if docker else "the sandbox (no docker daemon answers)"}
    else:
        make, notes = RecordEnv, {"records": len(tasks)}
    return TaskSet(
        name=f"repo:{path}", train=tasks[held_out:], eval=tasks[:held_out], make_env=make, max_turns=MAX_TURNS, workers=os.cpu_count() or 2, notes=notes
    )


# ---------------------------------------------------------------- Harbor


def _number(settings: Mapping[str, Any], section: str, key: str, default: float, file: Path) -> float:
    value = settings.get(section, {}).get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(f"{file}: [{section}] {key} is {value!r}, not a number above 0")
    return value


def harbor_task(folder: Path) -> dict[str, Any]:
    """One task folder as a task. Raises DataError that names what is missing or wrong."""
    file = folder / "task.toml"
    try:
        settings = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not TOML: {error}") from error
    if settings.get("steps"):
        raise DataError(f"{file}: tasks with [[steps]] are not supported; use tasks with one instruction")
    for name in ("instruction.md", "environment/Dockerfile", "tests/test.sh"):
        if not (folder / name).is_file():
            raise DataError(f"{folder}: {name} is missing")
    environment = settings.get("environment", {})
    workdir, copies = _dockerfile(folder / "environment" / "Dockerfile")
    return {
        "id": settings.get("task", {}).get("name", folder.name),
        "folder": str(folder.resolve()),
        "instruction": (folder / "instruction.md").read_text().strip(),
        "workdir": environment.get("workdir") or workdir,
        "copies": copies,
        "memory_mb": max(1024, int(_number(settings, "environment", "memory_mb", 2048, file))),
        "verifier_s": _number(settings, "verifier", "timeout_sec", 600.0, file),
        "command_s": _number(settings, "agent", "timeout_sec", 600.0, file),
        "variables": {name: str(value) for name, value in settings.get("verifier", {}).get("env", {}).items()},
    }


def _dockerfile(file: Path) -> tuple[str, list[tuple[str, str]]]:
    """(last WORKDIR, [(source in the build folder, place in the container)] of COPY lines)."""
    workdir, copies = "/app", []
    for line in file.read_text().replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            workdir = os.path.normpath(os.path.join(workdir, rest.strip()))
        elif word.upper() in ("COPY", "ADD"):
            parts = [part for part in shlex.split(rest) if not part.startswith("--")]
            copies += [(source, os.path.normpath(os.path.join(workdir, parts[-1])) + ("/" if parts[-1].endswith("/") else "")) for source in parts[:-1]]
    return workdir, copies


@functools.cache
def docker_answers() -> bool:
    """Whether a docker daemon can be reached."""
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A temporary folder that a hostile program may fill."""
    name = tempfile.mkdtemp(prefix="repo-")
    try:
        yield name
    finally:
        _remove_tree(name)


def copy_tree(source: Path, target: Path) -> None:
    """Copies files and folders that a hostile program may have made: links as links, pipes and devices not at all."""
    target.mkdir(parents=True, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            place = target / entry.name
            if entry.is_symlink():
                place.symlink_to(os.readlink(entry.path))
            elif entry.is_dir():
                os.chmod(entry.path, entry.stat().st_mode | 0o700)
                copy_tree(Path(entry.path), place)
            elif entry.is_file():
                os.chmod(entry.path, entry.stat().st_mode | 0o600)
                shutil.copy2(entry.path, place, follow_symlinks=False)


def read_reward(folder: Path) -> dict[str, float] | None:
    """Rewards that a verifier left in ``folder``; None when there is no valid one. A link that leads to a file of the host is not followed."""
    for name in ("reward.json", "reward.txt"):
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with open(fd, "rb") as file:
            data = file.read(REWARD_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        try:
            values = json.loads(data) if name.endswith("json") else {"reward": float(data)}
            rewards = {str(key): float(value) for key, value in values.items()}
        except (ValueError, TypeError, AttributeError):
            return None
        return rewards if rewards and all(map(math.isfinite, rewards.values())) else None
    return None


class _Box:
    """The task's working directory as a folder of the host; commands run in the sandbox."""

    def __init__(self, task: Mapping[str, Any]):
        self.task, self.root = task, tempfile.mkdtemp(prefix="repo-")
        self.app = Path(self.root, "app")
        self.app.mkdir()
        self._close = weakref.finalize(self, _remove_tree, self.root)
        workdir, build = task["workdir"], Path(task["folder"], "environment")
        for source, place in task["copies"]:
            if not f"{place}/".startswith(f"{workdir.rstrip('/')}/"):
                raise EnvironmentFailed(f"{build}/Dockerfile copies {source} to {place}, outside its working directory {workdir}: that needs docker")
            target = self.app / os.path.relpath(place, workdir)
            if (build / source).is_dir():
                copy_tree(build / source, target)
            else:
                target = target / Path(source).name if place.endswith("/") or target.is_dir() else target
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(build / source, target)

    def run(self, command: str) -> tuple[str, int]:
        limits = {"wall_s": self.task["command_s"], "cpu_s": math.ceil(self.task["command_s"]), "memory_mb": self.task["memory_mb"]}
        ran = run_process(["bash", "-c", command], folder=self.app, place=self.task["workdir"], output_bytes=4 * OUTPUT_CHARS, require_isolation=True, **limits)
        return ran.stdout + ran.stderr, ran.returncode

    def verify(self) -> tuple[dict[str, float] | None, int]:
        """(rewards or None, exit code of test.sh), on a copy of the working directory."""
        with scratch() as name:
            app, tests, logs = (Path(name, part) for part in ("app", "tests", "logs"))
            copy_tree(self.app, app)
            copy_tree(Path(self.task["folder"], "tests"), tests)
            (logs / "verifier").mkdir(parents=True)
            seconds = self.task["verifier_s"]
            ran = run_process(
                ["bash", "/tests/test.sh"], folder=app, place=self.task["workdir"], mounts={"/tests": tests, "/logs": logs}, require_isolation=True,
                environment=self.task["variables"], wall_s=seconds, cpu_s=math.ceil(seconds), memory_mb=self.task["memory_mb"],
            )  # fmt: skip
            return (None if (logs / "verifier").is_symlink() else read_reward(logs / "verifier")), ran.returncode

    def snapshot(self) -> Any:
        copied = tempfile.mkdtemp(prefix="repo-")
        copy_tree(self.app, Path(copied))
        state = _Copy(Path(copied))
        weakref.finalize(state, _remove_tree, copied)
        return state

    def restore(self, state: Any) -> None:
        _remove_tree(str(self.app))
        copy_tree(state.folder, self.app)

    def key(self) -> str:
        files = {}
        for place, _, names in os.walk(self.app):
            for name in names:
                path = Path(place, name)
                content = os.readlink(path) if path.is_symlink() else path.read_bytes().hex() if path.is_file() else ""
                files[str(path.relative_to(self.app))] = content
        return tree_hash(files)

    def close(self) -> None:
        self._close()


class _Copy:
    """A saved working directory; removed with its last reference."""

    def __init__(self, folder: Path):
        self.folder = folder


class _Container:
    """The task in a docker container without network."""

    def __init__(self, task: Mapping[str, Any]):
        self.task = task
        build = Path(task["folder"], "environment")
        self.image = f"cleanagentrl-{tree_hash({'': task['folder']})}"
        self.call("build", "-q", "-t", self.image, str(build), seconds=1800)
        self.start(self.image)

    def start(self, image: str) -> None:
        limits = ["--network", "none", "--memory", f"{self.task['memory_mb']}m", "--pids-limit", "256", "--workdir", self.task["workdir"]]
        self.name = self.call("run", "-d", "--rm", *limits, image, "sleep", "infinity").strip()
        self._close = weakref.finalize(self, subprocess.run, ["docker", "rm", "-f", self.name], capture_output=True)

    def call(self, *arguments: str, seconds: float = 120.0) -> str:
        try:
            ran = subprocess.run(["docker", *arguments], capture_output=True, text=True, errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailed(f"docker {arguments[0]} took more than {seconds:g} s") from error
        if ran.returncode:
            raise EnvironmentFailed(f"docker {arguments[0]}: {ran.stderr.strip()[-300:]}")
        return ran.stdout

    def execute(self, name: str, command: list[str], seconds: float) -> tuple[str, int]:
        limited = ["timeout", "-k", "5", f"{seconds:g}", *command]
        variables = [part for key, value in self.task["variables"].items() for part in ("-e", f"{key}={value}")]
        try:
            ran = subprocess.run(["docker", "exec", *variables, name, *limited], capture_output=True, text=True, errors="replace", timeout=seconds + 60)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailed(f"docker exec took more than {seconds + 60:g} s") from error
        return ran.stdout + ran.stderr, ran.returncode

    def run(self, command: str) -> tuple[str, int]:
        return self.execute(self.name, ["bash", "-c", command], self.task["command_s"])

    def verify(self) -> tuple[dict[str, float] | None, int]:
        copied = self.snapshot()
        other = self.call("run", "-d", "--rm", "--network", "none", "--workdir", self.task["workdir"], copied, "sleep", "infinity").strip()
        try:
            self.call("cp", f"{self.task['folder']}/tests", f"{other}:/tests")
            self.execute(other, ["mkdir", "-p", "/logs/verifier"], 60)
            _, code = self.execute(other, ["bash", "/tests/test.sh"], self.task["verifier_s"])
            with scratch() as name:
                self.call("cp", f"{other}:/logs/verifier", f"{name}/verifier")
                return (None if Path(name, "verifier").is_symlink() else read_reward(Path(name, "verifier"))), code
        finally:
            self.call("rm", "-f", other)

    def snapshot(self) -> str:
        return self.call("commit", self.name).strip()

    def restore(self, state: str) -> None:
        self._close()
        self.start(state)

    def key(self) -> str:
        listing, _ = self.execute(self.name, ["bash", "-c", "find . -type f -print0 | sort -z | xargs -0 sha256sum"], 120)
        return tree_hash({"": listing})

    def close(self) -> None:
        self._close()


class HarborEnv:
    """Shell episodes: ``run COMMAND`` (all further lines belong to it) and ``submit``. ``check`` is NA until submitting runs the task's own tests."""

    def __init__(self, docker: bool = False):
        self.kind = _Container if docker else _Box
        self.box: Any = None
        self.task: dict[str, Any] = {}
        self.done = True

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.close()
        self.task, self.done = task, False
        self.box = self.kind(task)
        return [{"role": "system", "content": SHELL_SYSTEM}, {"role": "user", "content": task["instruction"]}]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One action. ``info`` as in ``repo.py``; ``success`` is the mean of the verifier's rewards, cut to [0, 1].

        Raises RuntimeError when no episode is open, EnvironmentFailed when the sandbox or docker failed.
        """
        if self.done:
            raise RuntimeError("step() before reset(), or after the episode's end")
        lines = action.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("run ") or line.rstrip() == "submit"), None)
        if first is None:
            return "no action; use run or submit", 0.0, False, False, {"check": "NA", "exit": "no", "verb": "", "invalid": True}
        try:
            if lines[first].rstrip() == "submit":
                rewards, code = self.box.verify()
                self.done = True
                success = min(max(sum((rewards or {}).values()) / max(len(rewards or {}), 1), 0.0), 1.0)
                info = {"check": "PASS" if success == 1.0 else "FAIL", "exit": "yes" if code == 0 and rewards is not None else "no", "verb": "submit"}
                return "", success, True, False, {**info, "invalid": False, "success": success, "rewards": rewards or {"reward": 0.0}}
            output, code = self.box.run("\n".join([lines[first].removeprefix("run "), *lines[first + 1 :]]))
        except SandboxError as error:
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
        if len(output) > OUTPUT_CHARS:
            output = f"{output[: OUTPUT_CHARS // 2]}\n... {len(output) - OUTPUT_CHARS} characters left out ...\n{output[-OUTPUT_CHARS // 2 :]}"
        observation = output.rstrip() + (f"\nexit {code}" if code else "") or "done"
        return observation.lstrip("\n"), 0.0, False, False, {"check": "NA", "exit": "yes" if code == 0 else "no", "verb": "run", "invalid": False}

    def snapshot(self) -> tuple[dict[str, Any], Any, bool]:
        return self.task, self.box.snapshot(), self.done

    def restore(self, state: tuple[dict[str, Any], Any, bool]) -> None:
        self.task, saved, self.done = state
        self.box.restore(saved)

    def state_key(self) -> str:
        """Hash of the working directory."""
        return self.box.key()

    def close(self) -> None:
        if self.box is not None:
            self.box.close()
        self.box, self.done = None, True


# ---------------------------------------------------------------- SWE-bench records


def swe_tasks(file: Path) -> list[dict[str, Any]]:
    """The records of one file. Raises DataError that names file, line and field."""
    tasks = []
    for number, line in enumerate(file.read_text().split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a record must be a JSON object")
        for name in ("instance_id", "problem_statement", "test_patch"):
            if not isinstance(row.get(name), str):
                raise DataError(f"{where}: field {name!r} must be text, not {row.get(name)!r}")
        if not row["instance_id"] or "/" in row["instance_id"] or row["instance_id"].startswith("."):
            raise DataError(f"{where}: instance_id {row['instance_id']!r} cannot name the folder of its checkout")
        lists = {name: _node_ids(row.get(name), f"{where}: field {name!r}") for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        if not lists["FAIL_TO_PASS"]:
            raise DataError(f"{where}: FAIL_TO_PASS is empty: nothing would show that the problem is solved")
        checkout = file.parent / row["instance_id"]
        if not checkout.is_dir():
            raise DataError(f"{where}: no checkout at {checkout}; put the repository at base_commit {row.get('base_commit', '')} there")
        tasks.append(
            {"id": row["instance_id"], "checkout": str(checkout.resolve()), "issue": row["problem_statement"], "test_patch": row["test_patch"], **lists}
        )
    return tasks


def _node_ids(value: Any, where: str) -> list[str]:
    try:
        ids = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where} is not a JSON list: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(name, str) and "::" in name for name in ids):
        raise DataError(f"{where} must be a list of pytest node ids (FILE::TEST), as text or as a list, not {str(value)[:80]!r}")
    return ids


@functools.lru_cache(maxsize=16)
def checkout_files(folder: str) -> dict[str, str]:
    """Text files of a checkout by relative name; links are not followed, other files are left to the run alone."""
    files = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file() or path.stat().st_size > FILE_CHARS:
                continue
            try:
                files[str(path.relative_to(folder))] = path.read_text()
            except UnicodeDecodeError:
                continue
    return files


_record_runs: dict[str, PytestResult] = {}
_record_lock = threading.Lock()


def record_run(task: Mapping[str, Any], files: Mapping[str, str], graded: bool) -> PytestResult:
    """The tests of a record on a policy's files: with test_patch and both lists when graded. Kept by content. Raises EnvironmentFailed."""
    original = checkout_files(task["checkout"])
    mine = checked_files(files, original, {})
    changed = {name: text for name, text in mine.items() if original.get(name) != text}
    key = tree_hash({**changed, "\0": f"{task['id']} {task['checkout']} {graded}"})
    with _record_lock:
        if key in _record_runs:
            return _record_runs[key]
    ids = task["FAIL_TO_PASS"] + task["PASS_TO_PASS"] if graded else task["PASS_TO_PASS"]
    with scratch() as name:
        folder = Path(name, "checkout")
        shutil.copytree(task["checkout"], folder, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        if graded and task["test_patch"]:
            apply_patch(folder, task["test_patch"], task["id"])
        try:
            result = run_pytest_in(folder, changed, sorted({i.partition("::")[0] for i in ids}), **SWE_LIMITS)
        except SandboxError as error:
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
    with _record_lock:
        _record_runs[key] = result
    return result


def apply_patch(folder: Path, patch: str, name: str) -> None:
    """Applies a record's own patch with git, which refuses paths outside the folder and behind links. Raises DataError when it does not apply."""
    if shutil.which("git") is None:
        raise DataError(f"record {name}: test_patch needs the program git")
    command = ["git", "-c", "core.symlinks=false", "apply", "--whitespace=nowarn", "-"]
    ran = subprocess.run(command, cwd=folder, input=patch, text=True, capture_output=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    if ran.returncode:
        raise DataError(f"record {name}: test_patch does not apply to its checkout (is it at base_commit?): {ran.stderr.strip()[:300]}")


def record_visible(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """PASS_TO_PASS as the checkout has it. A record without any has nothing to run: NA."""
    if not task["PASS_TO_PASS"]:
        return Verdict("NA", True, "no visible tests")
    return _record_verdict(record_run(task, files, False), task["PASS_TO_PASS"])


def record_grade(task: Mapping[str, Any], files: Mapping[str, str]) -> Verdict:
    """Resolved: every test of both lists passes with test_patch applied."""
    return _record_verdict(record_run(task, files, True), task["FAIL_TO_PASS"] + task["PASS_TO_PASS"])


def _record_verdict(result: PytestResult, ids: list[str]) -> Verdict:
    if result.problem:
        return Verdict("FAIL", False, f"STOPPED: {result.problem}")
    failures = [(i, result.messages.get(i, result.outcomes.get(i, "did not run"))) for i in ids if result.outcomes.get(i) != "passed"]
    return Verdict("FAIL" if failures else "PASS", result.clean, report(failures, len(ids)))


class RecordEnv(RepoEnv):
    """``RepoEnv`` on a checkout."""

    def __init__(self) -> None:
        super().__init__(visible=record_visible, grade=record_grade)

    def reset(self, task: dict[str, Any]) -> list[Message]:
        full = {**task, "files": checkout_files(task["checkout"]), "tests": {}, "fixed": {}}
        system, _ = super().reset(full)
        names = [name for name in self.files if not is_protected(name)]
        return [system, {"role": "user", "content": f"{task['issue'].strip()}\nfiles: {' '.join(names[:200])}{' ...' if len(names) > 200 else ''}"}]
