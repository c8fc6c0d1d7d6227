"""The experiment of docs/mpo.md: six algorithms on the generated search task, the same five seeds for each, one after the other in one process.

    OMP_NUM_THREADS=1 python benchmarks/mpo.py --out runs/mpo          # a run that is already finished is kept, so it can be continued
    python benchmarks/mpo.py --out runs/mpo --table-only

Every arm makes the same number of policy updates on the same tasks; those with a critic first play `value_warmup` updates in which only the critic learns.
The table gives mean and half width of the 95 % t-interval over seeds, then the paired difference to `mpo` (same seed: same tasks in the same order).
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose file names must not shadow scripts
import mpo  # noqa: E402
from common.curves import read_jsonl, t_quantile  # noqa: E402

ARMS = {
    "mpo": {},
    "mpo_token_is": {"preset": "mpo_token_is"},
    "ppo": {"preset": "ppo"},
    "grpo": {"preset": "grpo"},
    "beta_0": {"beta": 0.0},
    "beta_2": {"beta": 2.0},
}


@dataclass
class Args:
    out: str = "runs/mpo"  # folder of the runs, one folder each: ARM-SEED
    env: str = "search"  # task
    seeds: int = 5  # 1 to this
    arms: tuple[str, ...] = tuple(ARMS)  # which
    policy_updates: int = 12
    value_warmup: int = 5
    table_only: bool = False  # read what is there


def measures(folder: Path) -> dict[str, float]:
    """What one run says: success of sampled training episodes over the run and in its last quarter, evaluations at its end."""
    lines = read_jsonl(folder / "metrics.jsonl")
    updates, last = [line for line in lines if line.get("charts/learning_rate", 0) > 0], lines[-1]  # those that moved the policy
    success = [line["charts/success"] for line in updates]
    tail = updates[-max(1, len(updates) // 4) :]
    found = {
        "train, mean": statistics.mean(success),
        "train, last quarter": statistics.mean(success[-len(tail) :]),
        "pass@1": last["eval/pass@1"],
        "pass@8": last["eval/pass@8"],
        "pass^3": last["eval/pass^3"],
        "greedy": last["eval/success"],
        "turns": statistics.mean(line["charts/turns"] for line in tail),
        "entropy": statistics.mean(line["losses/entropy"] for line in tail),
        "clipped": statistics.mean(line["losses/clipfrac"] for line in tail),
    }
    if "losses/explained_variance" in last:
        found["EV token"] = statistics.mean(line.get("losses/explained_variance", 0.0) for line in tail)
        found["EV turn"] = statistics.mean(line.get("mpo/explained_variance_turns", 0.0) for line in tail)
    return found


def interval(x: list[float]) -> str:
    if len(x) < 2:
        return f"{x[0]:.3f}" if x else "-"
    return f"{statistics.mean(x):.3f} ± {t_quantile(len(x) - 1) * statistics.stdev(x) / len(x) ** 0.5:.3f}"


def table(args: Args) -> str:
    found = {arm: {s: measures(f) for s in range(1, args.seeds + 1) if done(f := Path(args.out) / f"{arm}-{s}", updates_of(arm, args))} for arm in args.arms}
    names = [*measures_of(found)]
    rows = [["arm (seeds)", *names]]
    for arm, runs in found.items():
        rows.append([f"{arm} ({len(runs)})", *(interval([m[n] for m in runs.values() if n in m]) for n in names)])
    for arm, runs in found.items():
        common = sorted(set(runs) & set(found.get("mpo", {})))
        if arm != "mpo" and common:
            pairs = {n: [found["mpo"][s][n] - runs[s][n] for s in common if n in runs[s]] for n in names}
            rows.append([f"mpo - {arm}", *(interval(pairs[n]) for n in names)])
    return "\n".join("| " + " | ".join(row) + " |" + ("\n|" + " --- |" * len(row) if i == 0 else "") for i, row in enumerate(rows))


def measures_of(found: dict) -> list[str]:
    return list(dict.fromkeys(name for runs in found.values() for m in runs.values() for name in m))


def updates_of(arm: str, args: Args) -> int:
    return args.policy_updates + (0 if arm == "grpo" else args.value_warmup)


def done(folder: Path, updates: int) -> bool:
    lines = read_jsonl(folder / "metrics.jsonl")
    return bool(lines) and lines[-1]["step"] == updates


def main(args: Args) -> None:
    common = {"env": args.env, "groups_per_update": 8, "lr_warmup_updates": 3, "eval_every": 0, "eval_tasks": 64, "eval_samples": 8, "save_every": 0}
    for seed in range(1, args.seeds + 1) if not args.table_only else ():
        for arm in args.arms:
            folder = Path(args.out) / f"{arm}-{seed}"
            updates = updates_of(arm, args)
            if not done(folder, updates):
                if (folder / "metrics.jsonl").exists():  # cut off in the middle
                    folder.rename(folder.with_name(f"unfinished-{folder.name}-{len(list(Path(args.out).iterdir()))}"))
                mpo.main(mpo.Args(**common, **ARMS[arm], seed=seed, num_updates=updates, value_warmup=args.value_warmup, out=str(folder)))
    print(table(args))


if __name__ == "__main__":
    main(tyro.cli(Args))
