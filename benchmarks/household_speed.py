"""Steps per second of the household engine on one core, and the cost of its other calls.

    python benchmarks/household_speed.py [FOLDER] [--steps 20000]

Plays random allowed commands in the embedded scenes (compact and full) and, with FOLDER, in the ALFWorld games below it. A step is HouseholdEnv.step with
the command's text: parsing, rules, answer, goal. Commands are drawn outside of the clock. The clock counts the processor time of this process, so
that other work on the machine does not stretch it (much).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import envs


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time_ns()
    value = call()
    return (time.process_time_ns() - start) / 1e9, value


def measure(name: str, tasks: envs.TaskSet, steps: int) -> None:
    rng = random.Random(0)
    env, other = tasks.make_env(), tasks.make_env()
    rows = [*tasks.train, *tasks.eval][:64]
    spent = dict.fromkeys(("reset", "step", "admissible", "snapshot", "restore", "state_key", "oracle_plan"), 0.0)
    count = dict.fromkeys(spent, 0)

    def add(what: str, call: Callable[[], Any]) -> Any:
        seconds, value = timed(call)
        spent[what] += seconds
        count[what] += 1
        return value

    for row in rows:  # files are read once, before the clock runs
        env.reset(row)
    while count["step"] < steps:
        row = rng.choice(rows)
        add("reset", lambda row=row: env.reset(row))
        over = False
        while not over and count["step"] < steps:
            commands = add("admissible", env.admissible)
            if count["step"] % 10 == 0:
                add("oracle_plan", env.oracle_plan)
                add("state_key", env.state_key)
                snapshot = add("snapshot", env.snapshot)
                other.restore(snapshot)
                add("restore", lambda snapshot=snapshot: other.restore(snapshot))
            verbs = sorted({command.split()[0] for command in commands})
            verb = rng.choice(verbs)
            command = rng.choice([command for command in commands if command.split()[0] == verb])
            _, _, terminated, truncated, _ = add("step", lambda command=command: env.step(command))
            over = terminated or truncated
    both = (spent["step"] + spent["admissible"]) / count["step"]
    print(f"{name}: {count['step'] / spent['step']:,.0f} steps/s; {1 / both:,.0f} steps/s with the admissible commands of each state")
    print("  microseconds a call: " + ", ".join(f"{what} {1e6 * spent[what] / count[what]:.1f}" for what in spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder of ALFWorld games")
    parser.add_argument("--steps", type=int, default=20_000, help="steps to time per kind of scene")
    args = parser.parse_args()
    for spec in ["household", "household:full", *([f"alfworld:{args.folder}"] if args.folder else [])]:
        seconds, tasks = timed(lambda spec=spec: envs.load(spec))
        print(f"{spec}: loaded {len(tasks.train)} + {len(tasks.eval)} tasks in {seconds:.2f} s")
        measure(spec.partition(":/")[0], tasks, args.steps)


if __name__ == "__main__":
    main()
