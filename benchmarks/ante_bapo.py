"""The experiment of docs/ante_bapo.md: beliefs and credit on the generated repositories, the same five seeds for each arm, one after the other in one process.

    OMP_NUM_THREADS=1 python benchmarks/ante_bapo.py --out runs/ante      # a run that is already finished is kept, so it can be continued
    python benchmarks/ante_bapo.py --out runs/ante --table-only

The first run of an arm with another belief builds its warm start from the same trajectories (once, about ten minutes). The table gives mean and half width of
the 95 % t-interval over seeds, then the paired difference to `ante_bapo` (same seed: same tasks in the same order).
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose file names must not shadow scripts
import ante_bapo  # noqa: E402
from common.curves import read_jsonl, t_quantile  # noqa: E402

MAIN = "ante_bapo"
ARMS = {
    MAIN: {"test_time": "both"},
    "ante_task": {"credit": "task", "test_time": "both"},
    "ante_gigpo": {"credit": "gigpo"},
    "reactive": {"belief": "reactive"},
    "retrospective": {"belief": "retrospective"},
    "ante_rebel": {"credit": "rebel"},
    "no_pred_loss": {"pred_loss": False},
}
AT_THE_END = {  # column -> metric of the last line
    "greedy": "eval/success", "tto": "eval/tto/success", "tto tokens": "eval/tto/token_ratio", "tts4": "eval/tts4/success",
    "tts4 tokens": "eval/tts4/token_ratio",
    "hits": "eval/hit_rate", "trust": "eval/trust_rate", "precision": "eval/trust_precision", "ECE": "eval/calibration_error",
    "verdict": "eval/verdict_accuracy", "MCC": "eval/verdict_mcc", "turns": "eval/turns", "tokens": "eval/length",
}  # fmt: skip


@dataclass
class Args:
    out: str = "runs/ante"  # folder of the runs, one folder each: ARM-SEED
    env: str = "repo"  # task
    seeds: int = 5  # 1 to this
    arms: tuple[str, ...] = tuple(ARMS)[:4]  # which
    num_updates: int = 12
    table_only: bool = False  # read what is there


def measures(folder: Path) -> dict[str, float]:
    """What one run says: success of sampled training episodes over the run and in its last quarter, hit rate of forecasts in its first and last quarter,
    evaluations at its end."""
    lines = read_jsonl(folder / "metrics.jsonl")
    updates, last = lines[1:], lines[-1]
    quarter = max(1, len(updates) // 4)
    success = [line["charts/success"] for line in updates]
    found = {"train, mean": statistics.mean(success), "train, last quarter": statistics.mean(success[-quarter:])}
    if "ante/hit_rate" in last:
        hits = [line["ante/hit_rate"] for line in updates]
        found |= {"hits, first quarter": statistics.mean(hits[:quarter]), "hits, last quarter": statistics.mean(hits[-quarter:])}
        for name in ("bapo", "gigpo"):
            found[f"compared by {name}"] = statistics.mean(line[f"ante/coverage/{name}"] for line in updates)
    return found | {name: last[key] for name, key in AT_THE_END.items() if key in last}


def interval(x: list[float]) -> str:
    if len(x) < 2:
        return f"{x[0]:.3f}" if x else "-"
    return f"{statistics.mean(x):.3f} ± {t_quantile(len(x) - 1) * statistics.stdev(x) / len(x) ** 0.5:.3f}"


def table(args: Args) -> str:
    found = {arm: {s: measures(f) for s in range(1, args.seeds + 1) if done(f := Path(args.out) / f"{arm}-{s}", args)} for arm in args.arms}
    names = list(dict.fromkeys(name for runs in found.values() for m in runs.values() for name in m))
    rows = [["arm (seeds)", *names]]
    for arm, runs in found.items():
        rows.append([f"{arm} ({len(runs)})", *(interval([m[n] for m in runs.values() if n in m]) for n in names)])
    for arm, runs in found.items():
        common = sorted(set(runs) & set(found.get(MAIN, {})))
        if arm != MAIN and common:
            pairs = {n: [found[MAIN][s][n] - runs[s][n] for s in common if n in runs[s] and n in found[MAIN][s]] for n in names}
            rows.append([f"{MAIN} - {arm}", *(interval(pairs[n]) for n in names)])
    return "\n".join("| " + " | ".join(row) + " |" + ("\n|" + " --- |" * len(row) if i == 0 else "") for i, row in enumerate(rows))


def done(folder: Path, args: Args) -> bool:
    lines = read_jsonl(folder / "metrics.jsonl")
    return bool(lines) and lines[-1]["step"] == args.num_updates


def main(args: Args) -> None:
    common = {"env": args.env, "num_updates": args.num_updates, "eval_every": 0, "save_every": 0}
    for seed in range(1, args.seeds + 1) if not args.table_only else ():
        for arm in args.arms:
            folder = Path(args.out) / f"{arm}-{seed}"
            if not done(folder, args):
                if (folder / "metrics.jsonl").exists():  # cut off in the middle
                    folder.rename(folder.with_name(f"unfinished-{folder.name}-{len(list(Path(args.out).iterdir()))}"))
                ante_bapo.main(ante_bapo.Args(**common, **ARMS[arm], seed=seed, out=str(folder)))
    print(table(args))


if __name__ == "__main__":
    main(tyro.cli(Args))
