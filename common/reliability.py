"""How well stated probabilities agree with what happened: bins, calibration error, reliability diagram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


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
