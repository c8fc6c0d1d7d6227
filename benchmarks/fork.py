"""The experiment of docs/fork.md: rewards of fork.py over seeds, and its table with 95 % t-intervals.

    python benchmarks/fork.py runs/fork                                    # every arm and seed that is not there yet, then the table
    python benchmarks/fork.py runs/fork --arms fork recall --seeds 1 2     # a part of it
    python benchmarks/fork.py runs/fork --table --figure fork.png          # the table and a picture of recall and fork

One process and one thread per run.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common.curves import mean_interval, read_jsonl, series, t_quantile

ROOT = Path(__file__).parent.parent
ARMS = {
    "recall": ["--reward", "recall"],
    "fork": ["--reward", "fork"],
    "mean": ["--reward", "fork", "--aggregate", "mean"],
    "F2": ["--reward", "fork", "--f-beta", "2"],
    "generic": ["--reward", "generic"],
    "holistic": ["--reward", "holistic"],
    "offline": ["--reward", "offline_criteria"],
    "online": ["--reward", "online_criteria"],
}
COLUMNS = {
    "win rate": "eval/success", "recall": "eval/recall", "precision": "eval/precision", "F1": "eval/f1", "presence": "eval/presence",
    "absence": "eval/absence", "tokens": "eval/length", "conciseness": "eval/quality/conciseness", "safety": "eval/quality/safety",
    "completeness": "eval/quality/completeness",
}  # fmt: skip


def interval(values: list[float]) -> str:
    """Mean and half width of the 95 % t-interval."""
    mean = statistics.mean(values)
    digits = 1 if abs(mean) >= 8 else 3
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def draw(runs: dict[str, list[list[dict]]], path: Path) -> None:
    """Six measures of two or more arms over updates, mean and 95 % t-interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True, layout="constrained")
    for axis, name in zip(axes.flat, ("win rate", "recall", "precision", "tokens", "absence", "conciseness")):
        for arm, members in runs.items():
            x, mean, half = mean_interval([series(records, COLUMNS[name]) for records in members])
            axis.plot(x, mean, marker=".", label=f"--reward {arm} ({len(members)} seeds)")
            axis.fill_between(x, mean - half, mean + half, alpha=0.2)
        axis.set_title({"win rate": "win rate against the start policy", "tokens": "tokens per answer", "absence": "absence criteria"}.get(name, name))
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("update")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--figure", type=Path, help="picture of recall and fork to write")
    args = parser.parse_args()
    if not args.table:
        for seed in args.seeds:
            for arm in args.arms:
                out = args.out / arm / str(seed)
                if not (out / "credit.html").exists():  # written last
                    command = [sys.executable, str(ROOT / "fork.py"), *ARMS[arm], "--seed", str(seed), "--save-every", "0", "--out", str(out)]
                    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = {arm: [read_jsonl(p.parent / "metrics.jsonl") for p in sorted((args.out / arm).glob("*/credit.html"))] for arm in ARMS}
    print("| arm | seeds |", " | ".join(COLUMNS), "|")
    print("| --- " * (len(COLUMNS) + 2) + "|")
    starts = [run[0] for runs in rows.values() for run in runs]
    unique = {run["eval/recall"]: run for run in starts}.values()  # the start depends on the seed only
    print(f"| start | {len(unique)} |", " | ".join(interval([run[key] for run in unique]) for key in COLUMNS.values()), "|")
    for arm, runs in rows.items():
        if runs:
            print(f"| {arm} | {len(runs)} |", " | ".join(interval([run[-1][key] for run in runs]) for key in COLUMNS.values()), "|")
    if args.figure:
        draw({arm: rows[arm] for arm in ("recall", "fork") if rows[arm]}, args.figure)


if __name__ == "__main__":
    main()
