"""Builds the tiny policies of the embedded tasks into policies/, replacing what is there: python benchmarks/build_policies.py

Needed after a change to a task's generator, to a script's warm-start text or to TinyConfig (a test says so). One to ten minutes each on two quiet cores,
longest for the tasks of many turns; policies that are still right are kept.
"""

import importlib
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import envs, policies

# script whose warm start it is, environment family
SHIPPED = [
    ("ante_bapo", "repo"),
    ("mrtpo", "sql"),
    ("mrtpo", "instructions"),
    ("mrtpo", "tools"),
    ("mpo", "search"),
    ("mpo", "automation"),
    ("sero", "household"),
    ("fork", "rubric"),
    ("credit_granularity", "editing"),
    ("outcome_probe", "maths"),
]


def main() -> None:
    target = policies.SHIPPED
    right = set()
    for script, env in SHIPPED:
        folder = policies.build_tiny(importlib.import_module(script).warm_start_conversations(envs.load(env)), policies.TinyConfig())
        right.add(folder.name)
        if folder.parent != target:
            shutil.copytree(folder, target / folder.name)
        print(script, env, folder.name, f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB", flush=True)
    for folder in target.glob("tiny-*"):
        if folder.name not in right:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
