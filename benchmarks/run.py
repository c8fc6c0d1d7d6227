"""Runs an experiment: a script, some arms (sets of flags), some seeds. Kept runs are not run again, so it can be stopped and continued at any time.

    python benchmarks/run.py --plan sero --out runs/sero --workers 2
    python benchmarks/run.py --script mrtpo.py --arms "span:" "group: --credit grpo" --flags "--num-updates 20" --seeds 3 --out runs/credit
    python benchmarks/run.py --plan sero --out runs/sero --print-only        # the commands, to run them elsewhere
    python benchmarks/run.py --plan sero --out runs/sero --table-only        # table.md and curves.png of what is there

Each run is a process of its own with its folder OUT/ARM-SEED. One that was cut off is resumed from its checkpoint where it has one, else moved aside and
started again. A run that fails is reported with the end of its log, and the others go on. table.md holds mean and half width of the 95 % t-interval over
seeds, then the differences to the baseline, paired by seed (same seed: same tasks in the same order).
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of this folder, whose file names must not shadow scripts
from common.checkpoints import newest_checkpoint  # noqa: E402
from common.curves import STYLE, RunError, mean_interval, read_json, read_jsonl, series, t_quantile  # noqa: E402


@dataclass(frozen=True)
class Plan:
    """An experiment of the docs."""

    script: str
    arms: tuple[str, ...]
    baseline: str
    flags: str
    metrics: tuple[str, ...]


PLANS = {
    "sero": Plan(
        script="sero.py",
        arms=(
            "none: --oracle none",
            "root_only: --oracle root_only",
            "full_flat: --oracle full_flat",
            "sero: --oracle sero",
            "budget: --oracle none --extra-steps 3",
        ),
        baseline="sero",
        flags="--groups-per-update 8 --num-updates 14 --lr-warmup-updates 3 --eval-every 7 --eval-tasks 128 --save-every 7",
        metrics=(
            "eval/success",
            "charts/success@mean",
            "eval/success/seen",
            "eval/success/unseen",
            "charts/success@tail",
            "sero/oracle_steps",
            "sero/effective_depth",
        ),
    ),
    "interq_rl": Plan(
        script="interq_rl.py",
        arms=(
            "bf16: --preset bf16",
            *(f"{preset}: --preset {preset} --rollout-format int4" for preset in ("qat", "qat_tis", "prefix", "global", "interq")),
        ),
        baseline="interq",
        flags="--groups-per-update 8 --num-updates 10 --lr-warmup-updates 3 --eval-every 2 --eval-tasks 64 --save-every 5",
        metrics=(
            "eval/success",
            "interq/rollback",
            "interq/aulc",
            "rollout/k3@head",
            "rollout/k3@tail",
            "charts/success@tail",
            "charts/turns@tail",
        ),
    ),
}


@dataclass
class Args:
    out: str
    """folder of the experiment"""
    plan: str = ""
    """an experiment of the docs: sero, interq_rl; its parts can be replaced one by one by the flags below"""
    script: str = ""
    """the script's file name"""
    arms: tuple[str, ...] = ()
    """each "NAME: FLAGS"; with --plan a bare NAME picks an arm of the plan"""
    baseline: str = ""
    """arm that the others are compared with; default: the first"""
    flags: str = ""
    """flags of every run"""
    sweep: tuple[str, ...] = ()
    """each "FLAG=VALUE,VALUE": multiplies the arms, as --sweep lambda-o=0.1,0.5"""
    seeds: int = 5
    """last seed"""
    first_seed: int = 1
    """first seed: several machines can share one experiment, each with its seeds"""
    metrics: tuple[str, ...] = ()
    """columns: a metric's last value; with @mean over all lines, @tail over the last quarter, @head over the first, @sum, @max"""
    workers: int = 1
    """runs side by side"""
    threads: int = 1
    """threads of each run"""
    print_only: bool = False
    """only print the commands"""
    table_only: bool = False
    """only read what is there"""


def expand(args: Args) -> tuple[str, dict[str, list[str]], str, tuple[str, ...]]:
    """(script, arm -> its flags, baseline, metrics). Exits with what is wrong with the arguments."""
    if args.plan and args.plan not in PLANS:
        sys.exit(f"--plan {args.plan}: choose from {', '.join(PLANS)}")
    plan = PLANS.get(args.plan, Plan("", (), "", "", ("charts/success@tail", "eval/success")))
    script = args.script or plan.script
    if not (ROOT / script).is_file():
        sys.exit(f"--script {script or '(empty)'}: no such file in {ROOT}; give a script's name, or --plan")
    named = {name.strip(): flags for name, _, flags in (arm.partition(":") for arm in plan.arms)}
    arms: dict[str, list[str]] = {}
    for arm in args.arms or plan.arms:
        name, colon, flags = arm.partition(":")
        if not colon and name not in named:
            sys.exit(f'--arms "{arm}": write "NAME: FLAGS"' + (f", or one of {', '.join(named)}" if named else ""))
        arms[name.strip()] = shlex.split(flags if colon else named[name])
    grids = []
    for one in args.sweep:
        flag, equals, values = one.partition("=")
        if not equals or not values:
            sys.exit(f'--sweep "{one}": write FLAG=VALUE,VALUE')
        grids.append([(f"{flag}={value}", [f"--{flag.lstrip('-')}", value]) for value in values.split(",")])
    if grids:
        arms = {"_".join([name, *(label for label, _ in point)]): flags + [w for _, f in point for w in f]
                for name, flags in (arms or {"run": []}).items() for point in itertools.product(*grids)}  # fmt: skip
    if not arms:
        sys.exit('nothing to run: give --plan, --arms "NAME: FLAGS" or --sweep FLAG=VALUE,VALUE')
    bad = [name for name in arms if not name or "/" in name or name.startswith(".")]
    if bad:
        sys.exit(f"--arms: {bad[0]!r} cannot name a folder")
    baseline = args.baseline or (plan.baseline if plan.baseline in arms else next(iter(arms)))
    if baseline not in arms:
        sys.exit(f"--baseline {baseline}: no such arm; there are {', '.join(arms)}")
    common = shlex.split(args.flags or plan.flags)
    return script, {name: common + flags for name, flags in arms.items()}, baseline, args.metrics or plan.metrics


def finished(folder: Path, flags: list[str]) -> bool:
    """Whether this run is there, whole. Exits where it is there with other flags: one table must not mix them."""
    if not (folder / "finished.json").exists():
        return False
    record = read_json(folder / "finished.json")
    if record["flags"] != flags:
        sys.exit(f"{folder} was run with {shlex.join(record['flags'])}, not {shlex.join(flags)}: choose another --out")
    return True


def start_or_resume(script: str, flags: list[str], seed: int, folder: Path) -> list[str]:
    """Command of a run. Moves a run aside that was cut off before its first checkpoint."""
    base = [sys.executable, str(ROOT / script)]
    if folder.exists():
        try:
            newest_checkpoint(folder)
            return [*base, "--resume", str(folder)]
        except RunError:
            n = next(n for n in itertools.count(1) if not folder.with_name(f"unfinished-{n}-{folder.name}").exists())
            folder.rename(folder.with_name(f"unfinished-{n}-{folder.name}"))
    return [*base, *flags, "--seed", str(seed), "--out", str(folder)]


def run_one(script: str, arm: str, flags: list[str], seed: int, args: Args) -> bool:
    """Runs one arm with one seed to its end. False when it failed; its log stays beside its folder."""
    folder = Path(args.out) / f"{arm}-{seed}"
    if finished(folder, flags):
        return True
    command = start_or_resume(script, flags, seed, folder)
    log, started = folder.with_suffix(folder.suffix + ".log"), time.time()
    with open(log, "ab") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)}).returncode
    if code:
        print(f"{folder.name}: ended with {code}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]), file=sys.stderr, flush=True)
        return False
    (folder / "finished.json").write_text(json.dumps({"flags": flags, "seed": seed, "seconds": round(time.time() - started, 1)}))
    print(f"{folder.name}: {time.time() - started:.0f} s", flush=True)
    return True


def measure(records: list[dict], metric: str) -> float | None:
    """One number of one run; None where it was never logged."""
    key, _, how = metric.partition("@")
    values = series(records, key)[1].tolist()
    if not values:
        return None
    quarter = max(1, len(values) // 4)
    return {
        "": lambda: values[-1], "mean": lambda: statistics.fmean(values), "tail": lambda: statistics.fmean(values[-quarter:]),
        "head": lambda: statistics.fmean(values[:quarter]), "sum": lambda: float(sum(values)), "max": lambda: max(values),
    }[how]()  # fmt: skip


def interval(x: list[float]) -> str:
    """Mean and half width of the 95 % t-interval; three decimals, or three digits where the numbers are very small or large."""
    if not x:
        return "-"
    mean, half = statistics.fmean(x), t_quantile(len(x) - 1) * statistics.stdev(x) / len(x) ** 0.5 if len(x) > 1 else None
    size = max(abs(mean), half or 0.0)
    form = ".3f" if size == 0 or 0.005 <= size < 1000 else ".3g"
    return f"{mean:{form}}" + (f" ± {half:{form}}" if half is not None else "")


def table(found: dict[str, dict[int, list[dict]]], baseline: str, metrics: tuple[str, ...]) -> str:
    """Markdown. found: arm -> seed -> metric records."""
    values = {arm: {s: {m: measure(r, m) for m in metrics} for s, r in runs.items()} for arm, runs in found.items()}
    rows = [["arm (seeds)", *metrics]]
    for arm, runs in values.items():
        rows.append([f"{arm} ({len(runs)})", *(interval([v[m] for v in runs.values() if v[m] is not None]) for m in metrics)])
    for arm, runs in values.items():
        both = [(values[baseline][s], v) for s, v in runs.items() if s in values[baseline]]
        if arm != baseline and both:
            rows.append([f"{baseline} - {arm}", *(interval([b[m] - v[m] for b, v in both if None not in (b[m], v[m])]) for m in metrics)])
    return "\n".join("| " + " | ".join(row) + " |" + ("\n|" + " --- |" * len(row) if i == 0 else "") for i, row in enumerate(rows)) + "\n"


def draw(found: dict[str, dict[int, list[dict]]], metrics: tuple[str, ...], out: Path) -> None:
    """Learning curves: mean over seeds and a band of the 95 % t-interval, at the steps that all runs of an arm have."""
    import matplotlib  # heavy, and only needed here
    from matplotlib.figure import Figure

    keys = [k for k in dict.fromkeys(m.partition("@")[0] for m in metrics) if any(len(series(r, k)[1]) > 1 for runs in found.values() for r in runs.values())]
    if not keys:
        return
    with matplotlib.rc_context(STYLE):
        columns = min(3, len(keys))
        figure = Figure(figsize=(4.2 * columns, 2.9 * -(-len(keys) // columns)), layout="constrained")
        for place, key in enumerate(keys, 1):
            axes = figure.add_subplot(-(-len(keys) // columns), columns, place)
            for number, (arm, runs) in enumerate(found.items()):
                curves = [c for c in (series(r, key) for r in runs.values()) if len(c[0])]
                if curves:
                    steps, mean, half = mean_interval(curves)
                    (line,) = axes.plot(steps, mean, label=f"{arm} ({len(curves)})", color=f"C{number % 10}", linewidth=1.6)
                    axes.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.12, linewidth=0)
            axes.set_title(key, loc="left")
            if place == 1:
                axes.legend(fontsize=7, frameon=False)
        figure.supxlabel("update", fontsize=8)
        figure.savefig(out, dpi=130)


def main(args: Args) -> int:
    script, arms, baseline, metrics = expand(args)
    jobs = [(arm, flags, seed) for seed in range(args.first_seed, args.seeds + 1) for arm, flags in arms.items()]
    out = Path(args.out)
    if args.print_only:
        for arm, flags, seed in jobs:
            print(shlex.join(["python", script, *flags, "--seed", str(seed), "--out", str(out / f"{arm}-{seed}")]))
        return 0
    good = True
    if not args.table_only:
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.workers) as pool:
            good = all([*pool.map(lambda job: run_one(script, *job, args), jobs)])
    places = {arm: {s: out / f"{arm}-{s}" for s in range(1, args.seeds + 1)} for arm in arms}
    found = {arm: {s: read_jsonl(f / "metrics.jsonl") for s, f in folders.items() if finished(f, arms[arm])} for arm, folders in places.items()}
    if any(found.values()):
        text = table(found, baseline, metrics)
        (out / "table.md").write_text(text)
        draw(found, metrics, out / "curves.png")
        print(text, end="")
    return 0 if good else 1


def joined(argv: list[str]) -> list[str]:
    """The command line with `--flags "--a 1"` written as `--flags=--a 1`: a value that begins with dashes would be read as a flag."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] == "--flags":
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, args=joined(sys.argv[1:]))))
