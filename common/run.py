"""The run folder: arguments, metrics, episodes, curves, checkpoints, clean stops. Nothing here knows the algorithm.

    args = parse_args(Args)                                   # common/arguments.py: tyro; with --resume the saved arguments are the defaults
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

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.arguments import args_dict, compare_args
from common.checkpoints import FORMAT, HashedFile, check_state, checkpoint_folders, checkpoint_order, newest_checkpoint, restore_rank, rng_state
from common.curves import MAY_CHANGE, Panel, RunError, draw_curves, end_table, main, read_json, read_jsonl, run_folder_of, short_names
from common.files import FULL, append_line, cut_jsonl, disk_full, plain, sync_folder, write_atomic, write_synced
from common.surroundings import NoTracker, open_tracker, surroundings


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
            print(f"run folder: {self.folder}   (curves on the way: python -m common.run {self.folder})", file=sys.stderr, flush=True)
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
            pages = [name for name in ("curves.png", "credit.html") if (self.folder / name).exists()]
            print(f"run folder: {self.folder}" + (f"; look at {' and '.join(pages)} in it" if pages else ""))
            if self.exit_code and self.step < self.total_updates:
                print(f"stopped after update {self.step} of {self.total_updates}; to go on: python {self.script}.py --resume {self.folder}")
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
