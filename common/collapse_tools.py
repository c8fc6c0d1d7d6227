"""Plumbing of collapse_sim.py that has no opinion on the theory: counter-based random numbers, the tail of a dense Adam, threshold fits and intervals,
figures and the result table, the small number-comparison network, and the sampling and per-example gradients of a causal LM."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import njit

# ------------------------------------------------------------------------------------------------ compiled helpers
# Random numbers are counter-based: draw c of a replica is mix64(key + c * golden ratio), which is SplitMix64 read at an index. A replica's stream depends on
# its key only, so neither the thread count nor the order of the cells changes a result, and NumPy can replay it.


@njit(cache=True, nogil=True)
def mix64(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def replica_keys(seed: int, label: str, replicas: int) -> np.ndarray:
    """uint64 keys (replicas,) from the base seed and the text that names the cell."""
    digest = hashlib.sha256(f"{seed}|{label}".encode()).digest()
    base = int.from_bytes(digest[:8], "little")
    return np.array([int.from_bytes(hashlib.sha256(f"{base}|{r}".encode()).digest()[:8], "little") for r in range(replicas)], np.uint64)


@njit(cache=True, nogil=True, error_model="numpy")
def exp_negative(x, out):
    """out = exp(-x) for x >= 0, within one unit in the last place. This loop becomes vector code, libm's exp does not. Above 700 counts as 700."""
    bits = out.view(np.int64)
    for b in range(len(x)):
        y = x[b] if x[b] < 700.0 else 700.0
        m = y * -1.4426950408889634 + 6755399441055744.0 - 6755399441055744.0  # 1.5 * 2^52: rounds -y / ln 2 to the nearest integer
        r = (-y - m * 6.93147180369123816490e-01) - m * 1.90821492927058770002e-10  # ln 2 in two parts
        tail = 1 / 5040.0 + r * (1 / 40320.0 + r * (1 / 362880.0 + r * (1 / 3628800.0 + r * (1 / 39916800.0 + r / 479001600.0))))
        out[b] = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6.0 + r * (1 / 24.0 + r * (1 / 120.0 + r * (1 / 720.0 + r * tail))))))
        bits[b] += np.int64(m) << 52  # times 2^m


def adam_tables(steps: int) -> np.ndarray:
    """(3, steps + 1) float64: 0.9^t, 0.999^t and A(t) = sum_{j>=1} rho^j c(t+j), rho = 0.9 / sqrt(0.999), c(t) = sqrt(1-0.999^t) / (1-0.9^t).

    A parameter with moments m, v after step t that sees no gradient up to step t+n moves by lr m/sqrt(v) (A(t) - rho^n A(t+n)): dense Adam without visiting
    every parameter at every step. Adam's epsilon is dropped, and a parameter that never saw a gradient rests."""
    t = np.arange(steps + 401.0)
    rho = 0.9 / math.sqrt(0.999)
    c = np.sqrt(1 - 0.999 ** t[1:]) / (1 - 0.9 ** t[1:])
    gain = np.zeros(len(t))
    for i in range(len(c) - 1, -1, -1):
        gain[i] = rho * (c[i] + gain[i + 1])
    return np.stack([0.9**t, 0.999**t, gain])[:, : steps + 1].copy()


@njit(cache=True, nogil=True, error_model="numpy")
def adam_flush(i, now, u, m, v, last, tables, lr):
    """Bring problem i's parameter from step last[i] to step `now` through steps with zero gradient."""
    gap = now - last[i]
    if gap > 0:
        if v[i] > 0.0:
            rho = tables[0, gap] / math.sqrt(tables[1, gap])
            u[i] += lr * m[i] / math.sqrt(v[i]) * (tables[2, last[i]] - rho * tables[2, now])
        m[i] *= tables[0, gap]
        v[i] *= tables[1, gap]
        last[i] = now


# ------------------------------------------------------------------------------------------------ statistics
def fit_threshold(sizes, hits, trials) -> dict[str, float]:
    """N_c of a collapse curve: logistic fit P = sigmoid(b (ln N - ln N_c)) to `hits` of `trials`, with Jeffreys' penalty, which keeps it finite when the data
    separate perfectly. Returns nc, its 95 % profile-likelihood interval (low, high), the slope b, and width: N at P 0.98 over N at P 0.02, low, high."""
    x, hits, trials = np.log(np.asarray(sizes, float)), np.asarray(hits, float), np.asarray(trials, float)
    spread = x.max() - x.min() + 1e-9

    def profile(centres, slopes):
        eta = slopes[:, None, None] * (x - centres[:, None])  # (slopes, centres, points)
        loglik = (hits * -np.logaddexp(0, -eta) + (trials - hits) * -np.logaddexp(0, eta)).sum(-1)
        w = trials * np.exp(-np.logaddexp(0, -eta) - np.logaddexp(0, eta))
        total, mean = w.sum(-1), (w * x).sum(-1)
        det = total * (w * x * x).sum(-1) - mean * mean
        return loglik + 0.5 * np.log(np.maximum(det, 1e-300))

    slopes = np.geomspace(0.3, 60, 80)
    centres = np.linspace(x.min() - 0.5 * spread, x.max() + 0.5 * spread, 160)
    for _ in range(2):  # coarse, then fine around the interval
        table = profile(centres, slopes)
        curve = table.max(0)
        inside = np.flatnonzero(curve > curve.max() - 1.9207)  # half the 0.95 quantile of chi-square with one degree of freedom
        low, high = centres[max(inside[0] - 1, 0)], centres[min(inside[-1] + 1, len(centres) - 1)]
        best_slope, best = slopes[np.unravel_index(table.argmax(), table.shape)[0]], centres[curve.argmax()]
        lowest, highest = centres[inside[0]], centres[inside[-1]]
        by_slope = table.max(1)
        steep = slopes[by_slope > by_slope.max() - 1.9207]
        centres = np.linspace(low, high, 160)
    return {
        "nc": math.exp(best),
        "low": math.exp(lowest),
        "high": math.exp(highest),
        "slope": float(best_slope),
        "width": [math.exp(2 * math.log(49) / b) for b in (best_slope, steep[-1], steep[0])],
    }


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """95 % Wilson interval of a share."""
    z2, p = 1.959964**2, hits / trials
    centre, half = p + z2 / (2 * trials), math.sqrt(z2 * (p * (1 - p) / trials + z2 / (4 * trials**2)))
    low, high = (centre - half) / (1 + z2 / trials), (centre + half) / (1 + z2 / trials)
    return 0.0 if hits == 0 else low, 1.0 if hits == trials else high  # exactly: rounding would leave 1e-17 and exclude 0


def bootstrap(statistic: Callable, count: int, draws: int = 1000) -> tuple[float, float]:
    """95 % percentile interval of statistic(indices) over resampled runs, its own fixed stream."""
    rng = np.random.default_rng(0)
    values = [statistic(rng.integers(0, count, count)) for _ in range(draws)]
    return float(np.nanquantile(values, 0.025)), float(np.nanquantile(values, 0.975))


def row(sweep: str, quantity: str, paper, ours: float, low: float = math.nan, high: float = math.nan, note: str = "") -> dict:
    """One line of the table. paper: number, (low, high) range or None; verdict: whether the paper's value lies in our 95 % interval."""
    if paper is None:
        verdict = "no number in the paper"
    else:
        first, last = paper if isinstance(paper, tuple) else (paper, paper)
        ok = low <= last and high >= first if not math.isnan(low) else abs(ours - first) <= 0.5 * 10.0 ** -max(len(f"{first}".partition(".")[2]), 0)
        verdict = "inside" if ok else f"outside, ours/paper {ours / (0.5 * (first + last)):.2f}" if first + last else "outside"
    return {"sweep": sweep, "quantity": quantity, "paper": paper, "ours": ours, "low": low, "high": high, "verdict": verdict, "note": note}


def share_row(sweep: str, quantity: str, paper, hits: int, trials: int, note: str = "") -> dict:
    """A row for a share of runs, with its Wilson interval."""
    return row(sweep, quantity, paper, hits / trials, *wilson(hits, trials), f"{hits} of {trials}{note}")


def nc_row(curve: dict, paper, sweep: str) -> dict:
    note = f"G {curve['g']:.4f}, Lambda_c {curve['lambda_nc']:.2f}"
    note += "" if max(curve["share"]) > 0.5 else f"; extrapolated, at most {max(curve['share']):.2f} collapse up to N {curve['sizes'][-1]}"
    return row(sweep, f"N_c, {curve['name']}", paper, curve["nc"], curve["low"], curve["high"], note)


def standard_error(curve: dict) -> float:
    """Of ln N_c, from the width of the interval."""
    return (math.log(curve["high"]) - math.log(curve["low"])) / (2 * 1.959964)


def exponent(curves: list[dict], field: str = "lam") -> tuple[float, float, float]:
    """Least-squares slope of ln N_c over ln field and its 95 % interval, errors of the N_c carried through."""
    x = np.log([c["setting"][field] for c in curves])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    slope = float(weights @ np.log([c["nc"] for c in curves]))
    half = 1.959964 * float(np.sqrt(weights**2 @ np.array([standard_error(c) for c in curves]) ** 2))
    return slope, slope - half, slope + half


def common_constant(curves: list[dict], values: list[float]) -> tuple[float, float, float]:
    """Geometric mean of N_c times known factors over several curves, with its 95 % interval."""
    logs, errors = np.log(values), np.array([standard_error(c) for c in curves])
    half = 1.959964 * float(np.sqrt((errors**2).sum())) / len(curves)
    return math.exp(logs.mean()), math.exp(logs.mean() - half), math.exp(logs.mean() + half)


# ------------------------------------------------------------------------------------------------ table and figures
def number(value) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, (tuple, list)):
        return f"{number(value[0])} to {number(value[1])}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"


def table(rows: list[dict]) -> str:
    """Markdown: sweep, quantity, paper, ours, 95 % interval, verdict, note."""
    lines = ["| sweep | quantity | paper | ours | 95 % interval | verdict | note |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        interval = "-" if math.isnan(r["low"]) else f"{number(r['low'])} to {number(r['high'])}"
        lines.append(f"| {r['sweep']} | {r['quantity']} | {number(r['paper'])} | {number(r['ours'])} | {interval} | {r['verdict']} | {r['note']} |")
    return "\n".join(lines)


COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000"]


def panels(count: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.grid": True, "grid.color": "#e6e6e6", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    )
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 3.9), layout="constrained", squeeze=False)
    return figure, axes[0]


def shares(axis, curves: list[dict], x: str = "sizes", scale: Callable[[dict], float] = lambda c: 1.0, fit: bool = True):
    """Share of collapsed runs with Wilson bars; logistic fits as lines."""
    for i, c in enumerate(curves):
        colour, at = COLOURS[i % len(COLOURS)], np.array(c[x], float) * scale(c)
        share = np.array(c["share"])
        trials = c.get("trials", [48] * len(share))
        bars = np.array([wilson(round(s * t), t) for s, t in zip(share, trials)]).T
        errors = np.abs(bars - share)
        axis.errorbar(at, share, errors, fmt="o", markersize=3.5, linewidth=0.8, color=colour, label=c["name"])
        if fit and "slope" in c:
            fine = np.geomspace(at.min(), at.max(), 200)
            axis.plot(fine, 1 / (1 + (fine / (c["nc"] * scale(c))) ** -c["slope"]), color=colour, linewidth=1.2)
        elif not fit:
            axis.plot(at, share, color=colour, linewidth=1.0)
    axis.set_ylim(-0.04, 1.04)
    axis.set_ylabel("share of runs that collapse")


def draw(name: str, r: dict, path: Path) -> None:
    """One figure for one sweep. `r`: what the sweep returned; unknown names raise KeyError."""
    if name == "all_curves":
        figure, (left, right) = panels(2)
        for axis, key in ((left, lambda c: 1.0), (right, lambda c: c["setting"]["lam"] ** 2 * c["g"])):
            for c in r["curves"]:
                axis.plot(np.array(c["sizes"]) * key(c), c["share"], linewidth=0.9, color=COLOURS[r["groups"].index(c["group"]) % len(COLOURS)], alpha=0.8)
            axis.set_xscale("log")
            axis.set_ylabel("share of runs that collapse")
        for i, group in enumerate(r["groups"]):
            left.plot([], [], color=COLOURS[i % len(COLOURS)], label=group)
        left.set(xlabel="number of problems N", title="Every collapse curve of the SGD sweeps")
        right.set(xlabel=r"total amplification $\Lambda = \lambda^2 N G$", title="The same curves over the predicted amplification", xlim=(0.3, 20))
        right.axvline(2.64, color="k", linestyle=":", linewidth=1)
        left.legend(fontsize=7)
    elif name == "fate":
        figure, (left, right) = panels(2)
        for i, (phi, shift) in enumerate(zip(r["phi"], r["shift"])):
            left.plot(r["times"], phi, color=COLOURS[i], label=f"replica {i + 1}")
            right.plot(r["times"], shift, color=COLOURS[i])
        left.axhline(0.9, color="k", linestyle=":", linewidth=1)
        for axis in (left, right):
            axis.axvline(100, color="k", linestyle="--", linewidth=0.8)
            axis.set_xlabel("epoch")
        left.set(ylabel=r"$\Phi = |\langle \mathrm{sign}\, z\rangle|$", title="Four runs at N = 584 (dashed: epoch 100)", ylim=(-0.04, 1.04))
        right.set(ylabel=r"shared shift $V = \lambda v$", title="The shared direction in the same runs")
        left.legend(fontsize=7)
    elif name == "confident":
        figure, (axis,) = panels(1)
        for i, point in enumerate(r["points"]):
            for j, phi in enumerate(point["phi"]):
                axis.plot(np.arange(1, len(phi) + 1) / len(phi), phi, color=COLOURS[i], linewidth=0.9, label=point["name"] if j == 0 else None)
        axis.axhline(0.9, color="k", linestyle=":", linewidth=1)
        axis.set(xlabel="share of a tenfold training", ylabel=r"$\Phi$", title=r"Confident starts, $\lambda^2 N = 1474$: no collapse", ylim=(-0.04, 1.04))
        axis.legend(fontsize=7)
    elif name == "entropy":
        figure, (axis,) = panels(1)
        shares(axis, r["beta_curves"], "betas", fit=False)
        for i, c in enumerate(r["beta_curves"]):
            axis.axvline(c["theory"], color=COLOURS[i], linewidth=1, linestyle="--")
        axis.set(xlabel=r"entropy weight $\beta$", title=r"Collapse ends below $\beta_c(a)$ (dashed: theory at this N)")
        axis.legend(fontsize=7)
    elif name == "kernel":
        figure, (axis,) = panels(1)
        shares(axis, r["kernel_curves"], fit=False)
        axis.set(xscale="log", xlabel="number of problems N", title=r"Sign coupling $k_s$ stops collapse at every N above $G k_u/\Lambda_c$")
        axis.legend(fontsize=7)
    elif name == "diagram":
        figure, (axis,) = panels(1)
        image = axis.pcolormesh(r["sizes"], r["lams"], r["share"], cmap="viridis", vmin=0, vmax=1, shading="nearest")
        fine = np.geomspace(r["sizes"][0], r["sizes"][-1], 50)
        axis.plot(fine, np.sqrt(2.64 / (fine * r["g"])), color="w", linestyle="--", label=r"$\lambda^2 N G = 2.64$")
        axis.set(xscale="log", yscale="log", xlabel="number of problems N", ylabel=r"coupling $\lambda$", title="Share of runs that collapse")
        axis.set_ylim(r["lams"][0] * 0.85, r["lams"][-1] * 1.18)
        axis.grid(False)
        axis.legend(fontsize=7, labelcolor="w", facecolor="#333333")
        figure.colorbar(image)
    elif name == "transformer":
        figure = draw_networks(r)
    else:
        scaling = {"lambda": ("lam", r"coupling $\lambda$"), "adam": ("lam", r"coupling $\lambda$"), "confidence": ("a", "initial |z| = a")}.get(name)
        figure, axes = panels(2 if scaling else 1)
        shares(axes[0], r["curves"])
        axes[0].set(xscale="log", xlabel="number of problems N", title=f"Sweep: {name}")
        axes[0].legend(fontsize=6.5)
        if name == "headline":
            axes[0].axvspan(r["curves"][0]["low"], r["curves"][0]["high"], color="#0072B2", alpha=0.15)
            axes[0].axvline(536, color="k", linestyle=":", label="paper: 536")
            axes[0].set_title("Collapse sets in within a factor of a few in N")
            axes[0].legend(fontsize=7)
        if scaling:
            field, label = scaling
            x = [float(c["setting"]["init"].partition(":")[2]) if field == "a" else c["setting"]["lam"] for c in r["curves"]]
            nc = np.array([[c["nc"], c["nc"] - c["low"], c["high"] - c["nc"]] for c in r["curves"]])
            axes[1].errorbar(x, nc[:, 0], nc[:, 1:].T, fmt="o", color=COLOURS[0], label="ours, 95 %")
            if name == "adam":
                axes[1].plot(x, 35 / np.array(x) ** 2, color="k", linewidth=1, label=r"$35/\lambda^2$")
            else:
                axes[1].plot(x, [2.64 / (c["setting"]["lam"] ** 2 * c["g"]) for c in r["curves"]], color="k", linewidth=1, label=r"$2.64/(\lambda^2 G)$")
            paper = {"lambda": ([0.035, 0.28], [5750, 60]), "confidence": ([0.15, 1.1], [189, 8740])}.get(name)
            if paper:
                axes[1].plot(*paper, "x", color=COLOURS[1], markersize=7, label="paper")
            axes[1].set(xscale="log" if field == "lam" else "linear", yscale="log", xlabel=label, ylabel=r"$N_c$", title="Threshold against theory")
            axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    figure.clear()


def draw_networks(r: dict):
    """Four panels: collapse by readout and N, dose response of the output bias, predicted against seen, kernel spectrum."""
    figure, axes = panels(4)
    for i, (name, sizes, share) in enumerate(r["by_size"]):
        axes[0].plot(sizes, share, "o-", markersize=3.5, color=COLOURS[i % len(COLOURS)], label=name)
    axes[0].set(xscale="log", xlabel="number of problems N", ylabel="share of runs that collapse", title="Collapse by readout", ylim=(-0.04, 1.04))
    axes[0].legend(fontsize=7)
    for i, (name, doses, share) in enumerate(r["by_dose"]):
        axes[1].plot(doses, share, "o-", markersize=3.5, color=COLOURS[i % len(COLOURS)], label=name)
    axes[1].set(
        xscale="log",
        xlabel=r"dose $\rho_b = \lambda_b^2/k_d$ of the output bias",
        ylabel="share of runs that collapse",
        title="Bias put back",
        ylim=(-0.04, 1.04),
    )
    axes[1].legend(fontsize=7)
    for i, readout in enumerate(("plain", "antisymmetric", "controlled")):
        dots = [(run["predicted"], run["phi"]) for run in r["runs"] if run["readout"] == readout]
        if dots:
            jitter = np.random.default_rng(0).uniform(-0.01, 0.01, (len(dots), 2))
            axes[2].plot(*(np.array(dots) + jitter).T, ".", color=COLOURS[i], alpha=0.6, label=readout)
    axes[2].set(xlabel="share of surrogate runs that collapse", ylabel=r"$\Phi$ of the network at the end", title="Prediction from the initial kernel")
    axes[2].legend(fontsize=7)
    for i, (name, values) in enumerate(r["spectrum"].items()):
        axes[3].plot(np.arange(1, len(values) + 1), values, "o-", markersize=3, color=COLOURS[i], label=name)
    axes[3].axhline(r["self_kernel"], color="k", linestyle=":", linewidth=1, label=r"$k_d$ (plain)")
    axes[3].set(yscale="log", xlabel="collective mode", ylabel="eigenvalue of the initial kernel", title="A ladder of collective modes")
    axes[3].legend(fontsize=7)
    return figure


# ------------------------------------------------------------------------------------------------ the small network (torch, imported on use)
def number_pairs(rng: np.random.Generator, labels: np.ndarray, digits: int) -> np.ndarray:
    """Two different uniform numbers of `digits` digits, side by side, highest digit first; label +1: the left one is larger. -> (N, 2 digits) int64."""
    left = rng.integers(0, 10**digits, len(labels))
    right = (left + rng.integers(1, 10**digits, len(labels))) % 10**digits  # never equal
    high, low = np.maximum(left, right), np.minimum(left, right)
    left, right = np.where(labels > 0, high, low), np.where(labels > 0, low, high)
    places = 10 ** np.arange(digits - 1, -1, -1)
    return np.concatenate([left[:, None] // places % 10, right[:, None] // places % 10], 1)


def feature_signs(tokens: np.ndarray, digits: int) -> list[np.ndarray]:
    """Simple rules a network may have adopted instead of the task, as +-1 over the inputs: a digit above 4, a digit odd, last digits of equal parity."""
    above, odd = np.where(tokens > 4, 1, -1), np.where(tokens % 2, 1, -1)
    return [*above.T, *odd.T, odd[:, digits - 1] * odd[:, -1]]


def init_network(seeds: list[int], digits: int, width: int, layers: int) -> dict:
    """Parameters of len(seeds) networks, stacked on the first axis, float32. Every seed gives its own network whatever the other seeds are."""
    import torch

    shapes = {"embed": (10, width), "place": (2 * digits, width), "head": (width, 1), "bias": (1, 1)}
    for i in range(layers):
        shapes |= {f"qkv{i}": (width, 3 * width), f"out{i}": (width, width), f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
    nets = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        net = {name: torch.randn(shape, generator=generator) * (1.0 if name in ("embed", "place") else shape[0] ** -0.5) for name, shape in shapes.items()}
        nets.append(net | {"bias": torch.zeros(1, 1)})
    return {name: torch.stack([net[name] for net in nets]) for name in shapes}


def network_score(net: dict, tokens, heads: int = 2):
    """h(x) without the output bias: pre-norm transformer, mean over places, linear head. tokens: (R, B, L) int64, net stacked on R -> (R, B) float32."""
    import torch
    import torch.nn.functional as F

    replicas, batch, length = tokens.shape
    width, layers = net["embed"].shape[-1], sum(name.startswith("qkv") for name in net)

    def linear(x, name):
        return torch.matmul(x.reshape(replicas, batch * length, -1), net[name]).reshape(replicas, batch, length, -1)

    def norm(x):
        return F.layer_norm(x, (width,))

    x = linear((tokens[..., None] == torch.arange(10)).to(net["embed"].dtype), "embed") + net["place"][:, None]
    for i in range(layers):
        q, k, v = linear(norm(x), f"qkv{i}").reshape(replicas * batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // heads) ** -0.5, -1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(replicas, batch, length, width), f"out{i}")
        x = x + linear(F.gelu(linear(norm(x), f"up{i}")), f"down{i}")
    return torch.matmul(norm(x).mean(2), net["head"]).squeeze(-1)


# ------------------------------------------------------------------------------------------------ causal language models (torch, imported on use)
def read_questions(path: str, limit: int) -> list[tuple[str, tuple[str, str]]]:
    """(prompt, (answer, answer)) of the first `limit` lines. Raises ValueError naming file, line, field and the fix."""
    if not path or not Path(path).is_file():
        raise ValueError(f'--questions {path!r}: no such file; pass JSON lines like {{"prompt": "Is 7 prime?", "answers": ["yes", "no"]}}')
    questions = []
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {i}: not valid JSON ({error})") from None
        prompt, answers = (record.get("prompt"), record.get("answers")) if isinstance(record, dict) else (None, None)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{path} line {i}: field 'prompt' must be a text")
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(a, str) and a.strip() for a in answers)) or answers[0] == answers[1]:
            raise ValueError(f"{path} line {i}: field 'answers' must be a list of two different texts, in the same order on every line")
        questions.append((prompt, (answers[0].strip(), answers[1].strip())))
    if len(questions) < 2:
        raise ValueError(f"{path}: {len(questions)} questions; a kernel needs at least 2")
    return questions[:limit]


def encode_question(tokenizer, prompt: str, answers: tuple[str, str]) -> tuple[list[int], list[list[int]]]:
    """Prompt token ids through the chat template, and the ids of both answers."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    return list(ids), [tokenizer(a, add_special_tokens=False)["input_ids"] for a in answers]


def answer_logit(lm, prompt: list[int], answers: list[list[int]], temperature: float):
    """z = log p(first answer) - log p(second) under the tempered policy, teacher-forced. -> scalar tensor with gradient."""
    import torch

    total = 0.0
    for sign, answer in zip((1.0, -1.0), answers):
        logits = lm(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float() / temperature
        total = total + sign * torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None]).sum()
    return total


def sample_answers(lm, tokenizer, prompt: list[int], answers: tuple[str, str], count: int, temperature: float, tokens: int, seed: int) -> tuple[int, int]:
    """(samples that begin with the first answer, with the second) among `count`; the rest matched neither. The longer answer is tried first."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens, "num_return_sequences": count}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = torch.tensor([prompt])
        out = lm.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=pad, **settings)[:, len(prompt) :]
    found = [0, 0]
    for text in tokenizer.batch_decode(out, skip_special_tokens=True):
        for index in sorted((0, 1), key=lambda j: -len(answers[j])):
            if text.strip().startswith(answers[index]):
                found[index] += 1
                break
    return found[0], found[1]


def gradient_kernel(parameters: list, logits: list[Callable], width: int = 2**18, limit: int = 2**27) -> np.ndarray:
    """Kernel of per-example gradients, K_ij = grad z_i . grad z_j. logits: one function per example that returns the scalar z. -> (N, N) float64.

    Exact while N times the parameter count stays under `limit`; beyond, gradients are folded into `width` buckets with random signs: inner products stay
    unbiased, with an error near the product of the norms over sqrt(width)."""
    import torch

    size = sum(p.numel() for p in parameters)
    exact = len(logits) * size <= limit
    signs = (
        [] if exact else [torch.randint(0, 2, p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.int8) * 2 - 1 for i, p in enumerate(parameters)]
    )
    rows = torch.zeros(len(logits), size if exact else width)
    for i, logit in enumerate(logits):
        gradients = torch.autograd.grad(logit(), parameters, allow_unused=True)
        at = 0
        for j, (p, g) in enumerate(zip(parameters, gradients)):
            if exact:
                rows[i, at : at + p.numel()] = 0.0 if g is None else g.reshape(-1).float()
                at += p.numel()
            elif g is not None:
                flat = (g.float() * signs[j]).reshape(-1)
                whole = len(flat) // width * width
                rows[i] += flat[:whole].reshape(-1, width).sum(0)
                rows[i, : len(flat) - whole] += flat[whole:]
    return (rows.double() @ rows.double().T).numpy() if exact else (rows @ rows.T).double().numpy()
