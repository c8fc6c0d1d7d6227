"""How good ante_bapo.py's beliefs were, what it keeps of an episode, and how credit.html and reliability.png show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.rollout import Episode

if TYPE_CHECKING:
    from ante_bapo import Step

FACTORS = ("summary", "forecast", "decision", "action")


def episode_record(step: int, e: Episode, steps: Sequence[Step], turn_adv: Sequence[float], rewards: Sequence[float], tokenizer) -> dict:
    """What episodes.jsonl keeps of an episode: exact tokens, log-probs, and per turn its forecast, decision, what happened, and its advantage."""
    turns = [
        {
            "start": t.start, "stop": t.stop, "reward": t.reward, "advantage": a, "decision_reward": r, "forecast": [s.belief.check, s.belief.exit],
            "decision": s.belief.decision, "well_formed": s.belief.well_formed, "truth": list(s.truth), "factors": s.factors,
        }
        for t, s, a, r in zip(e.turns, steps, turn_adv, rewards)
    ]  # fmt: skip
    return {
        "step": step, "group": e.group, "sample": e.sample, "task_id": e.task["id"], "prompt": tokenizer.decode(e.prompt_ids), "prompt_ids": e.prompt_ids,
        "token_ids": e.token_ids, "tokens": [tokenizer.decode([t]) for t in e.token_ids], "policy_mask": e.policy_mask, "logprobs": e.logprobs,
        "turns": turns, "reward": e.reward, "success": e.success, "truncated": e.truncated,
    }  # fmt: skip


def viewer_episode(record: dict, belief: str) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: a bar per turn with its advantage, named after forecast, decision and truth."""
    factors: list[int | None] = [None] * len(record["tokens"])
    for t in record["turns"]:
        factors[t["start"] : t["stop"]] = t["factors"]

    def name(i: int, t: dict) -> str:
        if belief != "ante":
            return f"turn {i}: {' '.join(t['truth'])}"
        said = f"{' '.join(t['forecast'])} {t['decision']}" if t["well_formed"] else "no belief"
        return f"turn {i}: {said}, was {' '.join(t['truth'])}, decision {t['decision_reward']:+.3f}"

    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}" + (f" (cut: {record['truncated']})" if record["truncated"] else ""),
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {"success": record["success"], "return": record["reward"], "turns": len(record["turns"]), "tokens": len(record["logprobs"])},
        "tokens": record["tokens"],
        "turns": [{"name": name(i, t), "start": t["start"], "end": t["stop"], "value": t["advantage"]} for i, t in enumerate(record["turns"], 1)],
        "masked": [not own for own in record["policy_mask"]],
        "strips": [{"name": "factor", "values": factors, "scale": "categorical", "note": "what the token is part of", "labels": list(FACTORS)}],
    }


def verdict_scores(tp: float, fp: float, fn: float, tn: float) -> dict[str, float]:
    """Accuracy and Matthews correlation of a yes/no verdict; the correlation is nan where one side of the table is empty."""
    total, product = tp + fp + fn + tn, (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return {"accuracy": (tp + tn) / total if total else float("nan"), "mcc": (tp * tn - fp * fn) / product**0.5 if product > 0 else float("nan")}


def belief_metrics(played: Sequence[tuple[Episode, Sequence[Step]]]) -> dict[str, tuple[float, float]]:
    """How good beliefs were, as (sum, count) pairs. The verdict on an episode is its last belief: does it expect PASS?"""
    steps = [s for _, own in played for s in own]
    checked = [s for s in steps if s.conclusive]
    trusted = [s for s in checked if s.belief.decision == "TRUST"]
    n, n_checked, n_trusted = float(len(steps)), float(len(checked)), float(len(trusted))
    verdicts = [(own[-1].belief.check == "PASS", e.success >= 1) for e, own in played if own]
    table = {name: float(sum(v == pair for v in verdicts)) for name, pair in VERDICTS.items()}
    return {
        "hit_rate": (float(sum(s.right for s in checked)), n_checked),
        "hit_rate_all": (float(sum(s.right for s in steps)), n),
        "trust_rate": (n_trusted, n_checked),
        "trust_precision": (float(sum(s.right for s in trusted)), n_trusted),
        "abstain_hit_rate": (float(sum(s.right for s in checked if s.belief.decision == "ABSTAIN")), n_checked - n_trusted),
        "malformed_frac": (float(sum(not s.belief.well_formed for s in steps)), n),
        "checks_per_episode": (n_checked, float(len(played))),
        **{f"verdict/{name}": (count, float(len(verdicts))) for name, count in table.items()},
    }


VERDICTS = {"tp": (True, True), "fp": (True, False), "fn": (False, True), "tn": (False, False)}  # (expected PASS, solved)


def with_verdict(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """The metrics with accuracy and MCC in place of the four cells of the table, which stay as shares of the episodes."""
    cells = [metrics.get(f"{prefix}verdict/{name}") for name in VERDICTS]
    if None in cells:
        return metrics
    return metrics | {f"{prefix}verdict_{name}": value for name, value in verdict_scores(*cells).items() if value == value}


def reliability(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> tuple[list[dict[str, float]], float]:
    """Bins of equal width that have members: {low, high, confidence (mean), accuracy, count}, and the expected calibration error: the gap between
    confidence and accuracy, weighted by count (nan without forecasts)."""
    c, r = np.asarray(confidence, dtype=float), np.asarray(right, dtype=float)
    of = np.minimum((c * bins).astype(int), bins - 1)
    rows = []
    for b in np.unique(of).tolist():
        here = of == b
        rows.append({"low": b / bins, "high": (b + 1) / bins, "confidence": float(c[here].mean()), "accuracy": float(r[here].mean()), "count": int(here.sum())})
    return rows, sum(row["count"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / len(c) if len(c) else float("nan")


def draw_reliability(path: Path, forecasts: Sequence[tuple[float, bool, bool]], threshold: float) -> str:
    """The diagram of forecasts (probability given, came true, trusted), with the accuracy above which trust pays; returns the same in words."""
    from matplotlib.figure import Figure

    rows, error = reliability([f[0] for f in forecasts], [f[1] for f in forecasts])
    figure = Figure(figsize=(4.5, 5), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1)
    top.axhline(threshold, color="#D55E00", linewidth=1)
    top.annotate("q*", (0.01, threshold), color="#D55E00", va="bottom")
    top.plot([row["confidence"] for row in rows], [row["accuracy"] for row in rows], "o-", color="#0072B2")
    top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share that came true", title=f"{len(forecasts)} forecasts of checks, calibration error {error:.3f}")
    for name, which, colour in (("TRUST", True, "#0072B2"), ("ABSTAIN", False, "#E69F00")):
        below.hist([c for c, _, trusted in forecasts if trusted == which], bins=np.linspace(0, 1, 21).tolist(), color=colour, alpha=0.7, label=name)
    below.set(xlabel="probability given to the forecast", ylabel="count")
    below.legend(frameon=False)
    figure.savefig(path, dpi=120)
    lines = "; ".join(f"{row['low']:.1f} to {row['high']:.1f}: {row['accuracy']:.2f} of {row['count']}" for row in rows)
    return f"Reliability at the end (reliability.png), calibration error {error:.3f}. Probability of the forecast: share that came true. {lines}."
