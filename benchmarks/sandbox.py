"""Cost of a small pytest run: in a warm worker, in a fresh box, and as a plain process without any; side by side, in turns.

    python benchmarks/sandbox.py                # 20 rounds, one thread
    python benchmarks/sandbox.py --threads 2    # the warm workers also from several threads at once

The suite is a generated repair task's visible tests on its broken files. Wall time is the median over the rounds; processor time, which a busy machine does
not change much, is that of all processes of the runs together.
"""

import concurrent.futures
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])
from common import sandbox_pytest  # noqa: E402
from common.envs import repo_tasks  # noqa: E402
from common.sandbox import run_process  # noqa: E402


@dataclass
class Args:
    rounds: int = 20  # runs of each kind
    threads: int = 1  # threads that ask warm workers at once


def server_seconds() -> float:
    """Processor time so far of the idle warm workers and all their runs."""
    total = 0.0
    for workers in sandbox_pytest._idle.values():
        for worker in workers:
            for process in psutil.Process(worker.process.pid).children(recursive=True):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def main(args: Args) -> None:
    task = repo_tasks.generate("eval", 1, 0)[0]
    files, tests = {**task["files"], **task["tests"]}, list(task["tests"])
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    start = time.perf_counter()
    sandbox_pytest.run_pytest(files, tests)
    first, before = time.perf_counter() - start, server_seconds()
    seconds: dict[str, list[float]] = {"warm worker": [], "fresh box": [], "plain process": []}
    with tempfile.TemporaryDirectory() as name:
        for file, text in files.items():
            Path(name, file).write_text(text)

        def cold() -> None:
            assert "failed" in run_process(plain, files=files, wall_s=60).stdout

        def bare() -> None:
            assert b"failed" in subprocess.run(plain, cwd=name, capture_output=True).stdout

        def warm() -> None:
            assert "failed" in sandbox_pytest.run_pytest(files, tests).outcomes.values()

        for _ in range(args.rounds):
            for kind, run in zip(seconds, (warm, cold, bare)):
                start = time.perf_counter()
                run()
                seconds[kind].append(time.perf_counter() - start)
    used = (server_seconds() - before) / args.rounds
    for kind, values in seconds.items():
        print(f"{kind:<14} {1000 * statistics.median(values):7.1f} ms")
    print(f"warm worker, processor time of a run {1000 * used:.1f} ms; first run with the start of a worker {1000 * first:.0f} ms")
    if args.threads > 1:
        with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
            list(pool.map(lambda _: warm(), range(args.threads)))
            start = time.perf_counter()
            list(pool.map(lambda _: warm(), range(10 * args.threads)))
        print(f"{args.threads} threads: {10 * args.threads / (time.perf_counter() - start):.0f} runs a second")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
