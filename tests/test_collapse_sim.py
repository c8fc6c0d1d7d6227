"""The collapse theory: closed forms against enumeration, the compiled simulator against a NumPy twin, thresholds, the grid, the networks, LM screening.

`PYTHONPATH=. python tests/test_collapse_sim.py` prints how much faster the compiled simulator is than the twin."""

import concurrent.futures
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import collapse_networks as networks
import collapse_sim as sim
from common import collapse_tools as tools

ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------------------------------------------------------- NumPy twin
def draws(key: int, first: int, count: int) -> np.ndarray:
    """Draws first..first+count-1 of a replica's stream, uint64."""
    with np.errstate(over="ignore"):
        x = np.uint64(key) + np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def batch_of(order: np.ndarray, start: int, bits: np.ndarray) -> np.ndarray:
    """One batch of a Fisher-Yates shuffle of `order`, in place."""
    for b, h in enumerate(bits):
        at = start + b
        j = at + (int(h >> np.uint64(32)) * (len(order) - at) >> 32)
        order[at], order[j] = order[j], order[at]
    return order[start : start + len(bits)].copy()


def votes_of(x: np.ndarray, p_small: np.ndarray, answers: int) -> np.ndarray:
    """Binomial counts of the less likely answer by inversion of its distribution function."""
    pmf = np.stack([math.comb(answers, k) * p_small**k * (1 - p_small) ** (answers - k) for k in range(answers)])
    return (x >= np.cumsum(pmf, 0)).sum(0)


def gradient_of(yes: np.ndarray, p: np.ndarray, answers: int, estimator: str, tie: str, coin: np.ndarray) -> np.ndarray:
    """Straight from the definition: rewards of K answers, baseline, standard deviation, score function."""
    out = np.zeros(len(yes))
    for i, k in enumerate(yes):
        answer = np.array([1.0] * k + [0.0] * (answers - k))
        if 2 * k == answers:
            reward = {"coin": (answer == coin[i]) * 1.0, "all": np.ones(answers), "none": np.zeros(answers)}[tie]
        else:
            reward = (answer == (2 * k > answers)) * 1.0
        advantage = reward - (reward.mean() if estimator != "reinforce" else 0.0)
        if estimator == "grpo":
            advantage = advantage / reward.std() if reward.std() > 0 else 0 * advantage
        out[i] = (advantage * (answer - p[i])).mean()
    return out


def twin_binary(z0, sign, k_d, k_u, k_s, batch, answers, estimator, tie, eta, beta, steps, per_epoch, adam, key, rng=None):
    """NumPy version of simulate_binary for one replica. With `rng` it draws from NumPy's generator instead, and is then as fast as plain NumPy gets."""
    n, lam, mu = len(z0), math.sqrt(k_u), math.sqrt(k_s)
    u, order, c, blocks = z0.copy(), np.arange(n), 1, n // batch
    V = Y = 0.0
    m, v = np.zeros(n + 2), np.zeros(n + 2)
    for t in range(steps):
        start = (t % blocks) * batch if per_epoch else 0
        if rng is None:
            chosen = batch_of(order, start, draws(key, c, batch))
        else:
            order = rng.permutation(n) if start == 0 else order
            chosen = order[start : start + batch]
        z = u[chosen] + V + sign[chosen] * Y
        p = 1 / (1 + np.exp(-z))
        if rng is None:
            h = draws(key, c + batch, batch)
            few = votes_of((h >> np.uint64(11)).astype(float) * 2.0**-53, 1 / (1 + np.exp(np.abs(z))), answers)
            yes = np.where(z > 0, answers - few, few)
            likelier_wins = (h & np.uint64(1)) == 1
            g = gradient_of(yes, p, answers, estimator, tie, np.where(z > 0, likelier_wins, ~likelier_wins) * 1.0)
        else:
            yes = (rng.random((batch, answers)) < p[:, None]).sum(1)
            g = np.where(2 * yes > answers, yes * (1 - p), (yes - answers) * p) / answers
        c += 2 * batch
        if beta > 0:
            pooled = p.mean()
            g = g + beta * p * (1 - p) * math.log((1 - pooled) / pooled)
        if adam:  # dense, every parameter at every step
            grad = np.zeros(n + 2)
            grad[chosen], grad[n], grad[n + 1] = g / batch, lam * g.sum() / batch, mu * (sign[chosen] * g).sum() / batch
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            step = np.divide(m / (1 - 0.9 ** (t + 1)), np.sqrt(v / (1 - 0.999 ** (t + 1))), out=np.zeros(n + 2), where=v > 0) * eta
            u, V, Y = u + step[:n], V + lam * step[n], Y + mu * step[n + 1]
        else:
            u[chosen] += eta / batch * k_d * g
            V += eta / batch * k_u * g.sum()
            Y += eta / batch * k_s * (sign[chosen] * g).sum()
    return u + V + sign * Y


def twin_softmax(z0, k_u, batch, answers, estimator, eta, beta, steps, key):
    """NumPy version of simulate_softmax for one replica, epoch sampling."""
    n, m = z0.shape
    u, V, order, c, blocks = z0.copy(), np.zeros(m), np.arange(n), 1, n // batch
    for t in range(steps):
        start, g, p = (t % blocks) * batch, np.zeros((batch, m)), np.zeros((batch, m))
        for b in range(batch):
            h = draws(key, c, answers + 2)
            c += answers + 2
            i = batch_of(order, start + b, h[:1])[0]
            p[b] = np.exp(u[i] + V - (u[i] + V).max())
            p[b] /= p[b].sum()
            picks = [min(int((x >= np.cumsum(p[b])[:-1]).sum()), m - 1) for x in (h[1:-1] >> np.uint64(11)).astype(float) * 2.0**-53]
            counts = np.bincount(picks, minlength=m)
            tied = np.flatnonzero(counts == counts.max())
            winner = tied[int(h[-1] >> np.uint64(32)) * len(tied) >> 32]
            reward = (np.array(picks) == winner) * 1.0
            advantage = reward - (reward.mean() if estimator != "reinforce" else 0.0)
            if estimator == "grpo":
                advantage = advantage / reward.std() if reward.std() > 0 else 0 * advantage
            g[b] = sum(a * (np.eye(m)[k] - p[b]) for a, k in zip(advantage, picks)) / answers
        if beta > 0:
            log_pool = np.log(p.mean(0))
            g += beta * p * ((p @ log_pool)[:, None] - log_pool)
        u[order[start : start + batch]] += eta / batch * g
        V += eta / batch * k_u * g.sum(0)
    return u + V


# ---------------------------------------------------------------------------------------------------------------- closed forms
def test_drift_window_and_gain_in_closed_form():
    z = np.linspace(-6, 6, 101)
    p = 1 / (1 + np.exp(-z))
    assert np.abs(sim.expected_drift(z) - p * (1 - p) * (2 * p - 1)).max() < 1e-12
    assert np.abs(sim.drift_slope(z) - p * (1 - p) * (6 * p * (1 - p) - 1)).max() < 1e-12
    assert abs(sim.window_edge() - math.log(2 + math.sqrt(3))) < 1e-12
    edge = 1 / (6 * math.sqrt(3))  # F at s = 1/6
    for a in (0.15, 0.5, 1.1):
        s = 1 / (2 + 2 * math.cosh(a))
        assert abs(sim.amplification(a) - math.log(edge / (s * math.tanh(a / 2)))) < 1e-12
    assert sim.amplification(1.4) == 0.0
    assert np.abs(sim.expected_drift(z, 3, "grpo") - math.sqrt(2) * sim.expected_drift(z)).max() < 1e-12
    assert np.abs(sim.expected_drift(z, 3, "mean") - 2 / 3 * sim.expected_drift(z)).max() < 1e-12


@pytest.mark.parametrize(
    ("k", "estimator", "edge", "gain"),
    [
        (5, "reinforce", 1.1871, 0.4260),
        (5, "grpo", 1.2132, 0.4431),
        (8, "reinforce", 1.0884, 0.3530),
        (8, "grpo", 1.1721, 0.4073),
        (16, "reinforce", 0.894, 0.2021),
        (16, "grpo", 1.0057, None),
    ],
)
def test_published_edges_and_gains(k, estimator, edge, gain):
    assert sim.window_edge(k, estimator) == pytest.approx(edge, abs=6e-4 if edge == 0.894 else 6e-5)
    if gain:
        assert sim.amplification(0.5, k, estimator) == pytest.approx(gain, abs=6e-5)
    if (k, estimator) == (16, "reinforce"):  # the tie rule matters for even K
        assert sim.amplification(0.5, 16, tie="all") == pytest.approx(0.2288, abs=6e-5)
        assert sim.amplification(0.5, 16, tie="none") == pytest.approx(0.1789, abs=6e-5)


@pytest.mark.parametrize("tie", ["coin", "all", "none"])
@pytest.mark.parametrize("estimator", ["reinforce", "mean", "grpo"])
def test_drift_equals_enumeration_of_all_answer_tuples(estimator, tie):
    for k, z in itertools.product((1, 2, 3, 4, 5), (-1.7, 0.0, 0.6)):
        p, total = np.array([1 / (1 + math.exp(-z))]), 0.0
        for answer in itertools.product((0, 1), repeat=k):
            weight = float(np.prod([p[0] if a else 1 - p[0] for a in answer]))
            for coin in (0.0, 1.0):
                total += 0.5 * weight * gradient_of(np.array([sum(answer)]), p, k, estimator, tie, np.array([coin]))[0]
        assert float(sim.expected_drift(z, k, estimator, tie)) == pytest.approx(total, abs=1e-13)


def test_gain_of_populations():
    assert sim.amplification_mixed(np.array([0.5, -0.5])) == pytest.approx(sim.amplification(0.5), abs=2e-4)
    assert sim.amplification_mixed(np.array([0.2, -0.2]), 5, "grpo") == pytest.approx(sim.amplification(0.2, 5, "grpo"), abs=2e-4)
    assert 0 < sim.amplification_mixed(sim.magnitudes("uniform:0.5,2.5", 4000)) < 1e-3  # <F'> = (F(2.5) - F(0.5)) / 2 = 0.00096 at the start
    assert sim.amplification_mixed(sim.magnitudes("uniform:0.6,2.6", 400)) == 0.0
    assert sim.amplification_softmax(0.5, 2) == pytest.approx(sim.amplification(0.5), abs=1e-3)
    assert sim.amplification_softmax(0.3, 2, 5, "grpo") == pytest.approx(sim.amplification(0.3, 5, "grpo"), abs=1e-3)


def test_softmax_drift_of_three_answers():
    z = np.array([0.4, -0.1, 0.2])
    p = np.exp(z) / np.exp(z).sum()
    total = np.zeros(3)
    for picks in itertools.product(range(3), repeat=3):
        counts = np.bincount(picks, minlength=3)
        tied = np.flatnonzero(counts == counts.max())
        for w in tied:
            score = sum((np.eye(3)[k] - p) for k in picks if k == w) / 3
            total += np.prod(p[list(picks)]) * score / len(tied)
    assert np.abs(sim.softmax_drift(z) - total).max() < 1e-13


def test_critical_entropy_weight():
    assert sim.beta_critical(0.0) == 0.5
    assert sim.beta_critical(0.2) == pytest.approx(0.4900, abs=5e-5) and sim.beta_critical(0.5) == pytest.approx(0.4362, abs=5e-5)
    for a in (0.2, 0.5, 1.0):  # the rate of the uniform mode changes sign there
        z = np.array([a, -a])
        assert sim.amplification_mixed(z, beta=sim.beta_critical(a) + 1e-6) == 0.0
        assert sim.amplification_mixed(z, beta=sim.beta_critical(a) - 1e-2) > 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 30), st.floats(0.1, 5), st.floats(0, 3), st.floats(0, 3), st.integers(0, 10**6))
def test_kernel_coefficients_come_back(n, k_d, k_u, k_s, seed):
    s = np.where(np.random.default_rng(seed).random(n) < 0.4, 1.0, -1.0)
    s[:2] = 1.0, -1.0
    found = sim.kernel_coefficients(k_d * np.eye(n) + k_u + k_s * np.outer(s, s), s)
    m2 = (s.sum() ** 2 / n - 1) / (n - 1)
    if abs(m2) < 0.999:
        assert [found[k] for k in ("k_dp", "k_u", "k_s")] == pytest.approx([k_d, k_u, k_s], abs=1e-6)
        assert found["k_d"] == pytest.approx(k_d + k_u + k_s)


def test_kernel_amplification_saturates():
    assert sim.kernel_amplification(0.5, 536, 0.01, 1.0, 0.0) == pytest.approx(0.01 * 536 * 0.5)
    assert sim.kernel_amplification(0.5, 1e12, 0.01, 1.0, 0.002) == pytest.approx(2.5, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------- simulator
CASES = [  # answers, estimator, tie, adam, beta, k_s, per_epoch, k_d
    (3, "reinforce", "coin", False, 0.0, 0.0, True, 1.0),
    (3, "reinforce", "coin", False, 0.4, 0.02, False, 0.7),
    (4, "reinforce", "coin", False, 0.0, 0.0, True, 1.0),
    (4, "reinforce", "all", False, 0.0, 0.0, True, 1.0),
    (4, "grpo", "none", False, 0.0, 0.0, False, 1.0),
    (5, "grpo", "coin", False, 0.0, 0.01, True, 1.0),
    (16, "mean", "coin", False, 0.2, 0.0, True, 1.0),
    (3, "reinforce", "coin", True, 0.0, 0.01, True, 1.0),
    (8, "grpo", "coin", True, 0.3, 0.0, False, 1.0),
]


@pytest.mark.parametrize(("answers", "estimator", "tie", "adam", "beta", "k_s", "per_epoch", "k_d"), CASES)
def test_simulator_equals_numpy_twin(answers, estimator, tie, adam, beta, k_s, per_epoch, k_d):
    n, batch, steps = 37, 8, 150
    rng = np.random.default_rng(3)
    z0 = rng.normal(0, 0.8, n)
    sign, keys, eta = np.where(z0 > 0, 1.0, -1.0), tools.replica_keys(1, "twin", 2), 0.03 if adam else 6.0
    codes = sim.ESTIMATORS[estimator], sim.TIES[tie]
    tables = tools.adam_tables(steps) if adam else np.ones((3, 1))
    z, phi, shift = sim.simulate_binary(z0, sign, k_d, 0.05, k_s, batch, answers, *codes, eta, beta, steps, per_epoch, adam, tables, keys, 3)
    for r, key in enumerate(keys):
        twin = twin_binary(z0, sign, k_d, 0.05, k_s, batch, answers, estimator, tie, eta, beta, steps, per_epoch, adam, int(key))
        assert np.abs(z[r] - twin).max() < 1e-9
        assert phi[r, -1] == pytest.approx(abs(np.sign(twin).mean()))
    assert np.abs(z[0] - z[1]).max() > 0.1 and shift.shape == phi.shape == (2, 3)


@pytest.mark.parametrize(("estimator", "beta"), [("reinforce", 0.0), ("mean", 0.3), ("grpo", 0.0)])
def test_softmax_simulator_equals_numpy_twin(estimator, beta):
    rng = np.random.default_rng(4)
    z0, keys = rng.normal(0, 0.5, (23, 4)), tools.replica_keys(1, "soft", 2)
    z, phi = sim.simulate_softmax(z0, 0.05, 5, 3, sim.ESTIMATORS[estimator], 4.0, beta, 60, True, keys, 2)
    for r, key in enumerate(keys):
        twin = twin_softmax(z0, 0.05, 5, 3, estimator, 4.0, beta, 60, int(key))
        assert np.abs(z[r] - twin).max() < 1e-9
        share = np.bincount(twin.argmax(1), minlength=4).max() / 23
        assert phi[r, -1] == pytest.approx((share - 0.25) / 0.75)


def test_simulator_is_statistically_equal_to_plain_numpy():
    n, steps, rng = 60, 600, np.random.default_rng(0)
    sign = np.repeat([1.0, -1.0], n // 2)
    keys = tools.replica_keys(2, "stat", 400)
    fast = sim.simulate_binary(0.5 * sign, sign, 1.0, 0.04, 0.0, 20, 3, 0, 0, 5.0, 0.0, steps, True, False, np.ones((3, 1)), keys, 1)[1][:, 0]
    plain = (0.5 * sign, sign, 1.0, 0.04, 0.0, 20, 3, "reinforce", "coin", 5.0, 0.0, steps, True, False, 0, rng)
    slow = [abs(np.sign(twin_binary(*plain)).mean()) for _ in range(60)]
    assert abs(fast.mean() - np.mean(slow)) < 4 * math.hypot(fast.std() / 20, np.std(slow) / math.sqrt(60))


def test_mean_drift_and_growth_of_a_common_shift():
    n = 200_000
    for z in (-0.9, 0.3, 1.8):
        for estimator, answers in (("reinforce", 3), ("grpo", 8), ("mean", 5)):
            keys, z0 = tools.replica_keys(5, f"{z}{estimator}", 1), np.full(n, z)
            rest = (sim.ESTIMATORS[estimator], 0, n * 1.0, 0.0, 1, True, False, np.ones((3, 1)), keys, 1)
            end = sim.simulate_binary(z0, np.ones(n), 1.0, 0.0, 0.0, n, answers, *rest)[0][0]
            steps = end - z0
            assert abs(steps.mean() - float(sim.expected_drift(z, answers, estimator))) < 4.5 * steps.std() / math.sqrt(n)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        grid = sim.Grid(None, sim.Args(), pool, 1)
        rate, error = sim.measured_growth(sim.setting_of(sim.Args()), 0.5, 0.05, grid, 100_000, 8)
    assert error < 0.006 and abs(rate - float(sim.drift_slope(0.5))) < 4 * error  # in units of eta lambda^2


def test_results_do_not_depend_on_the_thread_count():
    s = sim.setting_of(sim.Args(horizon=2.0))
    keys = tools.replica_keys(1, "threads", 7)
    for setting, n in ((s, 64), (sim.replace(s, choices=3), 66), (sim.replace(s, optimizer="adam", horizon=0.5), 64)):
        found = []
        for workers in (1, 3, 7):
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                found.append(sim.simulate(setting, n, keys, pool, workers, 2))
        assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
        alone = sim.simulate(setting, n, keys[3:4], concurrent.futures.ThreadPoolExecutor(1), 1, 2)
        assert np.array_equal(alone[0][0], found[0][0][3])  # a replica does not know its neighbours


def test_exponential_and_adam_tables():
    x = np.concatenate([np.linspace(0, 5, 1001), np.linspace(5, 699, 1001)])
    out = np.empty_like(x)
    tools.exp_negative(x, out)
    assert np.abs(out / np.exp(-x) - 1).max() < 5e-16
    assert len(set(tools.replica_keys(1, "a", 50)) | set(tools.replica_keys(1, "b", 50)) | set(tools.replica_keys(2, "a", 50))) == 150


# ---------------------------------------------------------------------------------------------------------------- statistics
def test_threshold_fit_recovers_the_truth():
    rng, sizes = np.random.default_rng(0), np.geomspace(150, 1600, 9)
    p = 1 / (1 + (sizes / 500) ** -3.0)
    fits = [tools.fit_threshold(sizes, rng.binomial(60, p), [60] * 9) for _ in range(60)]
    assert np.mean([np.log(f["nc"] / 500) for f in fits]) == pytest.approx(0, abs=0.03)
    assert 0.85 < np.mean([f["low"] <= 500 <= f["high"] for f in fits]) <= 1.0
    assert np.median([f["slope"] for f in fits]) == pytest.approx(3.0, rel=0.15)
    assert np.median([f["width"][0] for f in fits]) == pytest.approx(math.exp(2 * math.log(49) / 3), rel=0.25)
    sharp = tools.fit_threshold([100, 200, 400, 800], [0, 0, 20, 20], [20] * 4)  # perfectly separated
    assert 200 < sharp["low"] < sharp["nc"] < sharp["high"] < 400


def test_intervals_and_verdicts():
    assert tools.wilson(0, 24)[0] == 0.0 and tools.wilson(24, 24)[1] == 1.0
    assert tools.wilson(0, 24) == pytest.approx((0.0, 0.1380), abs=1e-3)
    assert tools.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert tools.row("s", "q", 536, 520.0, 500.0, 540.0)["verdict"] == "inside"
    assert tools.row("s", "q", 600, 500.0, 480.0, 520.0)["verdict"] == "outside, ours/paper 0.83"
    assert tools.row("s", "q", (2.0, 2.8), 2.9, 2.75, 3.1)["verdict"] == "inside"
    assert tools.row("s", "q", 0.514, 0.51390)["verdict"] == "inside" and tools.row("s", "q", 0.514, 0.5150)["verdict"].startswith("outside")
    assert tools.row("s", "q", None, 1.0)["verdict"] == "no number in the paper"
    curves = [{"setting": {"lam": x}, "nc": 5 * x**-2.1, "low": 4.9 * x**-2.1, "high": 5.1 * x**-2.1} for x in (0.1, 0.2, 0.4)]
    slope, low, high = tools.exponent(curves)
    assert slope == pytest.approx(-2.1) and low < -2.1 < high
    score, outcome = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    assert networks.auc(score, outcome) == pytest.approx(3.5 / 4)


# ---------------------------------------------------------------------------------------------------------------- the command line
def test_default_run_finds_the_headline(tmp_path):
    out = tmp_path / "run"
    done = subprocess.run([sys.executable, str(ROOT / "collapse_sim.py"), "--out", str(out), "--threads", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((out / "results.json").read_text())["headline"]
    curve = result["curves"][0]
    assert abs(curve["nc"] / 536 - 1) < 0.10 and curve["low"] < curve["nc"] < curve["high"]
    assert curve["share"][0] < 0.15 and curve["share"][-1] > 0.85
    assert result["rows"][0]["paper"] == 536 and "536" in (out / "table.md").read_text()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(curve["sizes"]) and {line["collapse/n"] for line in lines} == set(curve["sizes"])
    assert (out / "headline.png").stat().st_size > 10_000 and (out / "args.json").exists()


def small_args(out, **more):
    return sim.Args(what="headline,batch,kernel", replicas=4, lam=0.25, horizon=3.0, threads=2, out=str(out), **more)


def results_of(folder):
    results = json.loads((Path(folder) / "results.json").read_text())
    return {name: {k: v for k, v in r.items() if k != "seconds"} for name, r in results.items()}


def test_interrupted_sweep_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sim.main(small_args(tmp_path / "whole")) == 0
    computed, stop, original = [], [9], sim.simulate

    def counting(s, n, keys, *rest):
        computed.append((s, n))
        return original(s, n, keys, *rest)

    def stopping(self):
        stop[0] -= 1
        self.exit_code = 130 if stop[0] == 0 else self.exit_code
        return stop[0] == 0

    monkeypatch.setattr(sim, "simulate", counting)
    with monkeypatch.context() as patch:
        patch.setattr(sim.Run, "should_stop", stopping)
        assert sim.main(small_args(tmp_path / "part")) == 130
    first = len(computed)
    assert first == 9 and len(list((tmp_path / "part" / "cells").glob("*.json"))) == len(set(computed))
    saved = json.loads((tmp_path / "part" / "args.json").read_text())
    assert sim.main(sim.Args(**{**saved, "resume": str(tmp_path / "part"), "threads": 1})) == 0
    assert len(computed) == len(set(computed))  # nothing twice
    assert results_of(tmp_path / "part") == results_of(tmp_path / "whole")
    assert (tmp_path / "part" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    cell = next((tmp_path / "part" / "cells").glob("*.json"))
    cell.write_text('{"broken"')
    with pytest.raises(ValueError, match=f"{cell.name}.*delete this file"):
        sim.main(sim.Args(**{**saved, "resume": str(tmp_path / "part")}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "headline,phase"}, "phase unknown"),
        ({"estimator": "ppo"}, "--estimator ppo: choose one of reinforce, mean, grpo"),
        ({"init": "point"}, "--init point: write point:A"),
        ({"init": "mix:0.3,1"}, "write point:A"),
        ({"choices": 3, "optimizer": "adam"}, "--choices above 2"),
        ({"eta": 0.0}, "rates and horizon are positive"),
        ({"sampling": "random"}, "choose epoch or step"),
    ],
)
def test_bad_arguments(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sim.main(sim.Args(out=str(tmp_path / "x"), **change))
    assert not (tmp_path / "x").exists()


def test_no_threshold_to_look_for(tmp_path):
    with pytest.raises(ValueError, match=r"lambda 0.1, point:1.4: Lambda = lambda\^2 N G is 0"):
        sim.main(sim.Args(out=str(tmp_path / "x"), init="point:1.4", threads=1))


def test_initial_distributions():
    q = (np.arange(1000) + 0.5) / 1000
    assert np.allclose(sim.magnitudes("uniform:0.5,2.5", 1000), 0.5 + 2 * q)
    assert sim.magnitudes("normal:2", 20001).mean() == pytest.approx(2 * math.sqrt(2 / math.pi), rel=1e-3)
    assert sim.magnitudes("exponential:0.7", 20001).mean() == pytest.approx(0.7, rel=1e-3)
    assert (sim.magnitudes("mix:0.3,0.5,2", 1000) == 0.5).sum() == 300


# ---------------------------------------------------------------------------------------------------------------- networks
def tiny_args(**more):
    return sim.Args(digits=2, width=8, net_seeds=2, **more)


def test_number_pairs():
    labels = np.array([1.0, -1.0] * 50)
    tokens = tools.number_pairs(np.random.default_rng(0), labels, 3)
    values = tokens.reshape(100, 2, 3) @ np.array([100, 10, 1])
    assert np.array_equal(np.sign(values[:, 0] - values[:, 1]), labels) and tokens.min() >= 0 and tokens.max() <= 9


def test_readouts():
    args = tiny_args(layers=2)
    net = tools.init_network([5, 6], 2, 8, 2)
    net["bias"] += 0.7
    x = torch.tensor(tools.number_pairs(np.random.default_rng(0), np.ones(6), 2))[None].expand(2, -1, -1)
    swapped, scale = torch.cat([x[..., 2:], x[..., :2]], -1), torch.tensor([[2.0], [0.0]])
    anti, dosed = networks.readout_logit(net, x, "antisymmetric", scale), networks.readout_logit(net, x, "controlled", scale)
    assert torch.allclose(anti, -networks.readout_logit(net, swapped, "antisymmetric", scale), atol=1e-5) and anti.abs().max() > 1e-3
    assert torch.allclose(dosed[0], anti[0] + 1.4, atol=1e-5) and torch.allclose(dosed[1], anti[1], atol=1e-6)
    assert torch.allclose(networks.readout_logit(net, x, "plain", scale), tools.network_score(net, x) + 0.7)
    one = networks.readout_logit({k: v[1:] for k, v in net.items()}, x[1:], "plain", scale[1:])
    assert torch.allclose(one[0], networks.readout_logit(net, x, "plain", scale)[1], atol=1e-6)
    base = networks.pretrain(args, [5, 6], "plain", (0, 60))
    again = networks.pretrain(args, [6], "plain", (60,))
    assert all(torch.allclose(base[60][k][1], again[60][k][0], atol=1e-5) for k in net)  # a network does not know its neighbours
    truth = np.repeat([1.0, -1.0], 200)
    tests = torch.tensor(tools.number_pairs(np.random.default_rng(1), truth, 2))[None].expand(2, -1, -1)
    accuracy = [((networks.readout_logit(base[b], tests, "plain", scale).numpy() > 0) == (truth > 0)).mean() for b in (0, 60)]
    assert accuracy[1] > accuracy[0] + 0.1


def test_empirical_kernel_equals_a_plain_loop():
    net = {k: v[0] for k, v in tools.init_network([3], 2, 8, 1).items()}
    x = torch.tensor(tools.number_pairs(np.random.default_rng(0), np.array([1.0, -1.0] * 4), 2))
    for readout, dose in (("plain", 0.0), ("antisymmetric", 0.0), ("controlled", 1.5)):
        rows = []
        for i in range(len(x)):
            leaf = {k: v.clone().requires_grad_() for k, v in net.items()}
            z = networks.readout_logit({k: v[None] for k, v in leaf.items()}, x[None, i : i + 1], readout, torch.full((1, 1), dose))[0, 0]
            grads = torch.autograd.grad(z, list(leaf.values()), allow_unused=True)
            rows.append(torch.cat([torch.zeros(v.numel()) if g is None else g.reshape(-1) for g, v in zip(grads, leaf.values())]).double())
        loop = (torch.stack(rows) @ torch.stack(rows).T).numpy()
        found = networks.empirical_kernel(net, x, readout, dose)
        assert np.allclose(found, loop, rtol=1e-4, atol=1e-4 * np.abs(loop).max())
        if readout == "antisymmetric":
            plain = found
    assert np.allclose(found, plain + 1.5**2, rtol=1e-4, atol=1e-4 * np.abs(loop).max())  # the dose lands in k_u alone


def test_self_reward_replicas_are_independent_and_follow_the_policy_gradient():
    net = networks.pretrain(tiny_args(), [1, 2], "plain", (20,))[20]
    tokens = torch.tensor(np.stack([tools.number_pairs(np.random.default_rng(i), np.repeat([1.0, -1.0], 8), 2) for i in range(2)]))
    rates, scale = torch.tensor([0.05, 0.02]), torch.zeros(2, 1)
    both, phi = networks.self_reward(net, tokens, "plain", scale, rates, np.array([1.0, 2.0]), 0.0, 6, [np.random.default_rng(i) for i in range(2)], 8)
    second = {k: v[1:] for k, v in net.items()}
    alone, phi1 = networks.self_reward(second, tokens[1:], "plain", scale[1:], rates[1:], np.array([2.0]), 0.0, 6, [np.random.default_rng(1)], 8)
    assert all(torch.allclose(both[k][1], alone[k][0], atol=1e-5) for k in net) and np.allclose(phi[1], phi1[0])
    # one full-batch step moves the bias by rate / tau times the mean vote gradient
    one, _ = networks.self_reward(net, tokens, "plain", scale, rates, np.array([1.0, 2.0]), 0.0, 1, [np.random.default_rng(i) for i in range(2)], 16, 3, 1)
    for r, tau in enumerate((1.0, 2.0)):
        rng = np.random.default_rng(r)
        order = rng.permutation(16)
        p = 1 / (1 + np.exp(-networks.readout_logit(net, tokens, "plain", scale)[r].numpy()[order] / tau))
        yes = rng.binomial(3, p.astype(np.float32).astype(float))
        g = gradient_of(yes, p, 3, "reinforce", "coin", np.zeros(16))
        assert float((one["bias"] - net["bias"])[r]) == pytest.approx(float(rates[r]) * g.mean() / tau, rel=1e-3, abs=1e-7)


def test_network_sweep_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "REDUCED_SIZES", (8, 16))
    monkeypatch.setattr(networks, "RESCUE_SIZE", 16)
    args = tiny_args(what="transformer", net_epochs=2, threads=1, out=str(tmp_path / "net"))
    assert sim.main(args) == 0
    result = json.loads((tmp_path / "net" / "results.json").read_text())["transformer"]
    runs = result["runs"]
    assert len(runs) == 2 * 2 * (2 + 2 * 2 + 3)  # sizes x seeds x (antisymmetric bases + bases x doses + temperatures)
    anti = [r for r in runs if r["readout"] == "antisymmetric"]
    assert max(abs(r["k_u"]) / r["k_d"] for r in anti) < 0.1 and all(0 <= r["phi"] <= 1 and 0 <= r["predicted"] <= 1 and 0 <= r["accuracy"] <= 1 for r in runs)
    dosed = {(r["base"], r["seed"], r["dose"]): r for r in runs if r["readout"] == "controlled" and r["n"] == 8}
    for (base, seed, dose), r in dosed.items():
        free = next(a for a in anti if (a["base"], a["seed"], a["n"]) == (base, seed, 8))
        assert r["k_u"] - free["k_u"] == pytest.approx(dose * free["k_d"], rel=0.05)
    assert any("rho_b" in r["quantity"] for r in result["rows"]) and (tmp_path / "net" / "transformer.png").exists()


# ---------------------------------------------------------------------------------------------------------------- causal LM
@pytest.fixture(scope="module")
def small_lm(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.policies import tiny_tokenizer

    torch.manual_seed(0)
    talks = [[{"role": "user", "content": f"is {i} even?"}, {"role": "assistant", "content": "yes" if i % 2 == 0 else "no"}] for i in range(40)]
    tokenizer = tiny_tokenizer(talks, 300)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    lm = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("lm")
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lm, tokenizer, folder


def test_answer_logit_and_gradient_kernel(small_lm):
    lm, tokenizer, _ = small_lm
    prompt, (yes, no) = tools.encode_question(tokenizer, "is 4 even?", ("yes", "no"))
    z = tools.answer_logit(lm, prompt, [yes, no], 2.0)
    by_hand = 0.0
    for sign, answer in ((1, yes), (-1, no)):
        for i in range(len(answer)):
            by_hand += sign * float(torch.log_softmax(lm(torch.tensor([prompt + answer[:i]])).logits[0, -1].double() / 2.0, -1)[answer[i]])
    assert float(z) == pytest.approx(by_hand, abs=1e-4)
    parameters = list(lm.parameters())
    questions = [tools.encode_question(tokenizer, f"is {i} even?", ("yes", "no")) for i in range(3)]
    logits = [lambda q=q: tools.answer_logit(lm, *q, 1.0) for q in questions]
    rows = [torch.cat([g.reshape(-1) for g in torch.autograd.grad(f(), parameters)]).double() for f in logits]
    exact = (torch.stack(rows) @ torch.stack(rows).T).numpy()
    assert np.allclose(tools.gradient_kernel(parameters, logits), exact, rtol=1e-4)
    folded = tools.gradient_kernel(parameters, logits, width=1024, limit=1)
    assert np.abs(folded - exact).max() < 5 * np.abs(exact).max() / math.sqrt(1024) and not np.allclose(folded, exact, rtol=1e-6)


def test_screening_numbers():
    for z in (-1.0, 0.4):  # the estimate of <F'> from counts is unbiased: expectation over the binomial equals F'
        p, n = 1 / (1 + math.exp(-z)), 7
        mean = 0.0
        for k in range(n + 1):
            found = networks.screen(np.array([[k, n - k]] * 2), np.array([z, -z]), np.eye(2) + 0.1)["F' sampled"]
            mean += math.comb(n, k) * p**k * (1 - p) ** (n - k) * found
        assert mean == pytest.approx(float(sim.drift_slope(z)), abs=1e-12)
    sign = np.repeat([1.0, -1.0], 20)
    z = 0.5 * sign
    result = networks.screen(np.tile([9, 7], (40, 1)), z, 1.0 * np.eye(40) + 0.02 + 0.001 * np.outer(sign, sign))
    g = sim.amplification_mixed(z)
    assert result["predicted N_c"] == pytest.approx(2.64 / (g * 0.02 - 2.64 * 0.001), rel=1e-6) and result["window share"] == 1.0
    assert networks.screen(np.tile([9, 7], (40, 1)), z, np.eye(40) + 0.02 + 0.01 * np.outer(sign, sign))["predicted N_c"] == math.inf


def test_measure_llm_command(small_lm, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"is {i} even?", "answers": ["yes", "no"]}) + "\n" for i in range(6)))
    command = [sys.executable, str(ROOT / "collapse_sim.py"), "--measure-llm", "--model", str(small_lm[2]), "--questions", str(path), "--llm-samples", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line[:22].strip(): float(line[22:]) for line in done.stdout.splitlines() if len(line) > 23 and line[22] == " "}
    assert found["questions"] == 6 and found["k_d"] > 0 and 0 <= found["window share"] <= 1 and 0 <= found["matched samples"] <= 1
    assert "A screening, not a guarantee" in done.stdout


def test_question_file_errors(tmp_path):
    path = tmp_path / "q.jsonl"
    good = '{"prompt": "a?", "answers": ["x", "y"]}\n'
    for text, message in (
        (good + "{", "line 2: not valid JSON"),
        (good + '{"answers": ["x", "y"]}\n', "line 2: field 'prompt'"),
        (good + '{"prompt": "b", "answers": ["x"]}\n', "line 2: field 'answers'"),
        (good, "1 questions; a kernel needs at least 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            tools.read_questions(str(path), 10)
    with pytest.raises(ValueError, match="no such file"):
        tools.read_questions("", 10)


def speed() -> None:
    """Prints seconds per 10^6 problem visits of the compiled simulator (one thread) and of the NumPy twin, same setting, side by side."""
    n, batch, steps = 536, 32, 1000
    sign = np.repeat([1.0, -1.0], n // 2)
    args = (0.5 * sign, sign, 1.0, 0.01, 0.0, batch, 3, 0, 0, 4.0, 0.0)
    keys = tools.replica_keys(1, "speed", 20)
    sim.simulate_binary(*args, 3, True, False, np.ones((3, 1)), keys, 1)
    for _ in range(3):
        start = time.process_time()
        sim.simulate_binary(*args, steps, True, False, np.ones((3, 1)), keys, 1)
        fast = (time.process_time() - start) / (20 * steps * batch)
        start = time.process_time()
        twin_binary(*args[:7], "reinforce", "coin", 4.0, 0.0, steps, True, False, 0, np.random.default_rng(0))
        slow = (time.process_time() - start) / (steps * batch)
        print(f"compiled {fast * 1e9:.1f} ns, NumPy twin {slow * 1e9:.0f} ns a problem visit (CPU time, one thread): {slow / fast:.0f} times faster")


if __name__ == "__main__":
    speed()
