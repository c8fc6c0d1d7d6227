# Guide, derivations, measured results and figures: docs/collapse_sim.md
"""Collective dynamics of self-reinforcement: why majority-vote self-reward collapses when the question set grows (arXiv 2610.37553).

N problems share one direction, z_i = u_i + lambda v. A batch of problems is answered K times each, the majority vote is the pseudo-label, agreeing answers
get reward 1. What the paper says, and where this file does it:
  (1) local sharpening gets 1/N of the signal, the shared direction all of it: dz_i/dt = (eta/N) F(z_i) + eta lambda^2 <F>      expected_drift, simulate_binary
  (2) a common shift grows while <F'> > 0, that is while problems sit inside the uncertainty window |z| < z*                        window_edge
  (3) total amplification Lambda = lambda^2 N G(a) with G(a) = ln[F(z*)/F(a)]; collapse at N_c = ln(1/delta) / (lambda^2 G)       amplification
  (4) an entropy bonus on the pooled answers removes the uniform mode above beta_c(a) = 3/2 - cosh^2(a/2) <= 1/2                   beta_critical
  (5) in a network: Lambda(N) = G N k_u / (k'_d + N k_s), the k's read off the neural tangent kernel before the first step         kernel_coefficients

No flag needed: the headline phase transition (under a minute on two cores).
    python collapse_sim.py
    python collapse_sim.py --what all                       every sweep of the solvable model: figures, table paper / ours, JSON of all runs
    python collapse_sim.py --what transformer [--full]      small transformers on number comparison, empirical kernel, rescue by entropy
    python collapse_sim.py --what all --resume runs/RUN     an interrupted grid goes on with the cells that are missing
    python collapse_sim.py --measure-llm --model smollm2 --questions questions.jsonl
Everything runs on the CPU; a GPU or a second machine brings nothing here.
"""

import concurrent.futures
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from statistics import NormalDist

import numpy as np
from numba import njit

from common.arguments import parse_args
from common.collapse_tools import (
    adam_flush,
    adam_tables,
    common_constant,
    draw,
    exp_negative,
    exponent,
    fit_threshold,
    mix64,
    nc_row,
    replica_keys,
    row,
    share_row,
    standard_error,
    table,
)
from common.curves import Panel
from common.run import Run


@dataclass
class Args:
    # run
    what: str = "headline"
    """comma-separated: headline estimator lambda confidence answers batch heterogeneous confident fate softmax adam entropy kernel diagram transformer | all"""
    seed: int = 1
    """base seed; every replica of every cell derives its own random stream from it, so results depend neither on the order nor on the thread count"""
    replicas: int = 64
    """independent runs per point of a collapse curve; half above N = 2000, a third above 8000 (deduced)"""
    threads: int = 0
    """worker threads; 0 takes every core; results are bit-identical for any value"""
    out: str = ""
    """run folder; default runs/none__collapse_sim__SEED__TIME"""
    resume: str = ""
    """run folder of an interrupted run: cells found there are not computed again"""
    # solvable model: the setting that the sweeps vary one field of
    lam: float = 0.1
    """coupling lambda of every problem to the shared parameter (deduced from the paper's example, N_c = 536)"""
    init: str = "point:0.5"
    """initial |z|, signs half and half: point:A | uniform:LO,HI | normal:SIGMA | exponential:MEAN | mix:SHARE,A,B (a = 0.5 deduced from N_c = 536)"""
    answers: int = 3
    """sampled answers K per problem and step (paper)"""
    choices: int = 2
    """possible answers M; above 2 the softmax model runs (paper: 2, and 3/4/6)"""
    batch: int = 32
    """problems per step B (deduced); capped at N"""
    eta: float = 4.0
    """learning rate (deduced: 2 to 20 give the paper's N_c = 536; 4 also comes closest to its other thresholds)"""
    estimator: str = "reinforce"
    """reinforce (no baseline) | mean (group-mean baseline) | grpo (group mean and population standard deviation, no epsilon) (paper: all three)"""
    tie: str = "coin"
    """who wins a tied vote: coin (deduced; in the mean also what first-seen gives) | all (both sides rewarded) | none"""
    optimizer: str = "sgd"
    """sgd | adam (moments 0.9, 0.999, dense: a problem keeps moving between its visits) (paper: both)"""
    adam_lr: float = 0.01
    """learning rate of Adam (deduced)"""
    beta: float = 0.0
    """weight of the entropy of the batch-mean answer distribution (paper: beta H(pbar))"""
    ks: float = 0.0
    """sign-mode coupling k_s next to k_u = lambda^2 and k'_d = 1 (paper's kernel form)"""
    horizon: float = 30.0
    """training length as eta * steps / N, 240 epochs at the defaults (deduced); Adam: adam_lr * steps * sqrt(B/N)"""
    sampling: str = "epoch"
    """epoch (shuffled passes, remainder dropped) | step (a fresh subset every step); both without replacement (deduced)"""
    # transformer experiments
    full: bool = False
    """the paper's grid instead of the reduced one"""
    digits: int = 6
    """digits of each of the two numbers compared (paper: six-digit comparison)"""
    width: int = 32
    """embedding width of the transformer (deduced)"""
    layers: int = 1
    """transformer blocks (deduced)"""
    net_seeds: int = 6
    """networks per setting, trained side by side (paper: 6)"""
    net_epochs: int = 60
    """self-reward epochs (deduced)"""
    net_eta: float = 10.0
    """self-reward learning rate in units of 1/k_d, so that one visit moves a logit as in the solvable model (deduced)"""
    pretrain_lr: float = 0.0015
    """Adam learning rate of the supervised steps that make the base networks (deduced)"""
    # language-model measurement
    measure_llm: bool = False
    """measure the window share, <F'> and the kernel coefficients of a causal LM on --questions and print the predicted N_c; a screening, not a guarantee"""
    model: str = "tiny"
    """tiny | smollm2 | transformers folder or hub id"""
    questions: str = ""
    """JSON lines: {"prompt": text, "answers": [text, text]}; the order of the two answers defines the shared direction"""
    llm_samples: int = 16
    """sampled completions per question"""
    llm_max_questions: int = 64
    """questions used"""
    temperature: float = 1.0
    """sampling temperature; the kernel is that of the tempered logits"""


# ------------------------------------------------------------------------------------------------ closed forms
LAMBDA_C = 2.64  # the paper's one fitted constant: collapse when lambda^2 N G reaches it
ESTIMATORS = {"reinforce": 0, "mean": 1, "grpo": 2}
TIES = {"coin": 0, "all": 1, "none": 2}
OPTIMIZERS = {"sgd": 0, "adam": 1}


def vote_gradient(k: int, p, answers: int, estimator: str, tie: str = "coin"):
    """Policy gradient of one problem on its logit, (1/K) sum_k A_k (a_k - p), averaged over the tie coin, given that `k` of `answers` votes say yes.

    p: probability of yes, any array (complex too). Rewards are 1 for the majority's answers. grpo divides by the population std (ddof 0), no epsilon; where all
    rewards agree its advantages are 0."""
    yes, no = k / answers, (answers - k) / answers
    if estimator == "reinforce":
        up, down, both = yes * (1 - p), -no * p, yes - p
    else:
        up = yes * no if estimator == "mean" else math.sqrt(yes * no)
        down, both = -up, 0.0
    if 2 * k == answers:
        return {"coin": 0.5 * (up + down), "all": both, "none": 0.0}[tie] + 0 * p
    return (up if 2 * k > answers else down) + 0 * p


def expected_drift(z, answers: int = 3, estimator: str = "reinforce", tie: str = "coin"):
    """(1) Mean drift F(z) by enumeration of the vote counts. REINFORCE with K = 3: p (1-p) (2p-1); `mean` is 2/3 of it and `grpo` sqrt(2) of it."""
    p = 1 / (1 + np.exp(-np.asarray(z)))
    return sum(math.comb(answers, k) * p**k * (1 - p) ** (answers - k) * vote_gradient(k, p, answers, estimator, tie) for k in range(answers + 1))


def drift_slope(z, answers: int = 3, estimator: str = "reinforce", tie: str = "coin"):
    """F'(z), exact to rounding through one complex step."""
    return expected_drift(np.asarray(z, float) + 1e-20j, answers, estimator, tie).imag / 1e-20


def window_edge(answers: int = 3, estimator: str = "reinforce", tie: str = "coin") -> float:
    """(2) z*, where F' changes sign: inside |z| < z* a common shift is amplified. K = 3: ln(2 + sqrt 3)."""
    low, high = 1e-3, 4.0
    for _ in range(100):
        mid = 0.5 * (low + high)
        low, high = (mid, high) if drift_slope(mid, answers, estimator, tie) > 0 else (low, mid)
    return 0.5 * (low + high)


def amplification(a: float, answers: int = 3, estimator: str = "reinforce", tie: str = "coin") -> float:
    """(3) G(a) = ln[F(z*)/F(a)] inside the window, 0 outside: integral of F' along the local path dz = F dt from |z| = a."""
    edge = window_edge(answers, estimator, tie)
    return float(np.log(expected_drift(edge, answers, estimator, tie) / expected_drift(a, answers, estimator, tie))) if abs(a) < edge else 0.0


def amplification_mixed(
    z, answers: int = 3, estimator: str = "reinforce", tie: str = "coin", beta: float = 0.0, dt: float = 0.05, limit: float = 120.0
) -> float:
    """G of a whole population: integral of <F'> - 4 beta <s>^2 (s = p(1-p)) along the local flow until it turns negative; 0 when it is negative at the start.

    z: any array of initial logits. Reduces to `amplification` for one common |z| and beta = 0. (The entropy term is written for the two-answer model.)"""
    z, total, previous = np.asarray(z, float).copy(), 0.0, 0.0

    def drift(y):
        return expected_drift(y, answers, estimator, tie)

    for step in range(int(limit / dt)):
        p = 1 / (1 + np.exp(-z))
        rate = float(drift_slope(z, answers, estimator, tie).mean() - 4 * beta * (p * (1 - p)).mean() ** 2)
        if rate <= 0:
            return total + (0.5 * dt * previous * previous / (previous - rate) if step else 0.0)  # trapezoid up to the linear zero crossing
        total += 0.5 * dt * (previous + rate) if step else 0.0
        previous = rate
        k1 = drift(z)
        k2 = drift(z + 0.5 * dt * k1)
        k3 = drift(z + 0.5 * dt * k2)
        z += dt / 6 * (k1 + 2 * k2 + 2 * k3 + drift(z + dt * k3))
    return total


@functools.cache
def answer_tuples(choices: int, answers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All M**K answer tuples (T, K), their counts (T, M), each answer's chance to win the vote under fair ties (T, M), and the winner's share (T,)."""
    tuples = np.array(list(np.ndindex(*(choices,) * answers)))
    counts = (tuples[:, :, None] == np.arange(choices)).sum(1)
    top = counts == counts.max(1, keepdims=True)
    return tuples, counts, top / top.sum(1, keepdims=True), counts.max(1) / answers


def softmax_drift(z: np.ndarray, answers: int = 3, estimator: str = "reinforce") -> np.ndarray:
    """Mean drift of M logits by enumeration of all answer tuples; tied votes go to a fair draw. z: (M,) float or complex -> (M,)."""
    z = np.asarray(z)
    tuples, counts, wins, share = answer_tuples(len(z), answers)
    p = np.exp(z - z.real.max())
    p = p / p.sum()
    g = share[:, None] * (wins - (p if estimator == "reinforce" else counts / answers))  # (T, M)
    if estimator == "grpo":
        g = g / np.sqrt(np.where(share < 1, share * (1 - share), 1))[:, None]  # unanimous: g is 0 already
    return np.prod(p[tuples], 1) @ g


def amplification_softmax(a: float, choices: int, answers: int = 3, estimator: str = "reinforce", dt: float = 0.05) -> float:
    """G for M answers: every problem prefers one answer by a logit gap a, all M preferences equally common.

    By symmetry the population-mean Jacobian on shifts that sum to zero is mu(t) times the identity, mu = trace / (M - 1); G integrates mu along the local flow
    while it is positive."""
    gap, total, previous = a, 0.0, 0.0

    def logits(y):
        z = np.zeros(choices)
        z[0] = y
        return z

    def velocity(y):
        f = softmax_drift(logits(y), answers, estimator)
        return f[0] - f[1]

    for step in range(4000):
        jacobian = np.stack([softmax_drift(logits(gap) + 1e-20j * (np.arange(choices) == j), answers, estimator).imag / 1e-20 for j in range(choices)], 1)
        centre = np.eye(choices) - 1 / choices
        rate = float(np.trace(centre @ jacobian @ centre)) / (choices - 1)
        if rate <= 0:
            return total + (0.5 * dt * previous * previous / (previous - rate) if step else 0.0)
        total += 0.5 * dt * (previous + rate) if step else 0.0
        previous = rate
        gap += dt * velocity(gap + 0.5 * dt * velocity(gap))
    return total


def beta_critical(a: float) -> float:
    """(4) Weight of the pooled-entropy bonus at which the uniform mode stops growing, common |z| = a, K = 3, REINFORCE: 3/2 - cosh^2(a/2)."""
    return 1.5 - math.cosh(a / 2) ** 2


def kernel_coefficients(kernel: np.ndarray, sign: np.ndarray) -> dict[str, float]:
    """(5) Four numbers of an N x N kernel: k_d its mean diagonal, k_u on the uniform direction, k_s on the sign direction, k_dp = k'_d = k_d - k_u - k_s.

    k_u and k_s come from off-diagonal entries only, so they carry no self terms (deduced); on K = k'_d I + k_u 11' + k_s ss' all four come back exactly."""
    n = len(kernel)
    off = kernel - np.diag(np.diag(kernel))
    k_d, k_u, k_s = float(np.trace(kernel)) / n, float(off.sum()) / (n * (n - 1)), float(sign @ off @ sign) / (n * (n - 1))
    m2 = (float(sign.sum()) ** 2 / n - 1) / (n - 1)  # mean of s_i s_j over pairs: how far the two directions overlap when the signs are not balanced
    if abs(m2) < 1 - 1e-9:
        k_u, k_s = (k_u - m2 * k_s) / (1 - m2 * m2), (k_s - m2 * k_u) / (1 - m2 * m2)
    return {"k_d": k_d, "k_u": k_u, "k_s": k_s, "k_dp": k_d - k_u - k_s}


def kernel_amplification(g: float, n: float, k_u: float, k_dp: float, k_s: float) -> float:
    """(5) Lambda(N) = G N k_u / (k'_d + N k_s). Its limit G k_u / k_s bounds it: below Lambda_c no number of problems collapses."""
    return g * n * k_u / (k_dp + n * k_s)


# ------------------------------------------------------------------------------------------------ compiled simulator
@njit(cache=True, nogil=True, error_model="numpy")
def simulate_binary(z0, sign, k_d, k_u, k_s, batch, answers, estimator, tie, eta, beta, steps, per_epoch, adam, tables, keys, records):
    """Two-answer model, one replica per key. z0, sign: (N,) float64 initial logits and their signs; integer codes as in ESTIMATORS, TIES, OPTIMIZERS.

    Logit of problem i: u_i + V + sign_i Y, where V = sqrt(k_u) v is the shared shift and Y = sqrt(k_s) y the sign mode. beta > 0 adds the pooled entropy.
    Returns final z (R, N), Phi (R, records) and V (R, records) at `records` evenly spaced steps."""
    n, replicas = z0.shape[0], keys.shape[0]
    gamma, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    blocks, inv, scale = n // batch, 1.0 / answers, eta / batch
    lam, mu = math.sqrt(k_u), math.sqrt(k_s)
    ratio = np.array([(answers - k) / (k + 1.0) for k in range(answers)])
    z_out, phi_out, shift_out = np.empty((replicas, n)), np.empty((replicas, records)), np.empty((replicas, records))
    order, chosen, bits = np.empty(n, np.int32), np.empty(batch, np.int64), np.empty(batch, np.uint64)
    z, size, e, q = np.empty(batch), np.empty(batch), np.empty(batch), np.empty(batch)
    x, mass, votes, g = np.empty(batch), np.empty(batch), np.empty(batch), np.empty(batch)
    first, second, last = np.zeros(n if adam else 1), np.zeros(n if adam else 1), np.zeros(n if adam else 1, np.int64)
    for r in range(replicas):
        key, c = keys[r], one
        u = z0.copy()
        for i in range(n):
            order[i] = i
        first[:] = 0.0
        second[:] = 0.0
        last[:] = 0
        V, Y, m_v, v_v, m_y, v_y, done = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0
        for t in range(steps):
            start = (t % blocks) * batch if per_epoch else 0
            for b in range(batch):
                bits[b] = mix64(key + (c + np.uint64(b)) * gamma) >> np.uint64(32)
            c += np.uint64(batch)
            for b in range(batch):  # Fisher-Yates, one batch of it: no problem twice in a batch (nor in an epoch)
                at = start + b
                j = at + np.int64((bits[b] * np.uint64(n - at)) >> np.uint64(32))
                i = order[j]
                order[j] = order[at]
                order[at] = i
                chosen[b] = i
                if adam:
                    adam_flush(i, t, u, first, second, last, tables, eta)
                z[b] = u[i] + V + sign[i] * Y
            for b in range(batch):
                size[b] = abs(z[b])
            exp_negative(size, e)
            for b in range(batch):
                h = mix64(key + (c + np.uint64(b)) * gamma)
                x[b] = np.float64(np.int64(h >> np.uint64(11))) * 1.1102230246251565e-16  # uniform in [0, 1), 53 bits
                bits[b] = h & one  # an unused bit: the coin of a tied vote
                q[b] = 1.0 / (1.0 + e[b])  # probability of the likelier answer; e q that of the other one
                mass[b] = q[b]
                votes[b] = 0.0
            c += np.uint64(batch)
            for _ in range(answers - 1):
                for b in range(batch):
                    mass[b] *= q[b]
            for k in range(answers):  # votes for the less likely answer, by inverting the binomial distribution
                for b in range(batch):
                    votes[b] += np.float64(x[b] >= mass[b])
                    x[b] -= mass[b]
                    mass[b] *= ratio[k] * e[b]
            for b in range(batch):  # sums of products instead of branches: half of them would be mispredicted
                k, lead = votes[b], answers - 2.0 * votes[b]
                won = np.float64((lead > 0.0) | ((lead == 0.0) & (bits[b] == one)))
                if estimator == 0:
                    g[b] = (won * (answers - k) * e[b] - (1.0 - won) * k) * (inv * q[b])
                else:
                    gb = k * (answers - k) * inv * inv
                    g[b] = (2.0 * won - 1.0) * (math.sqrt(gb) if estimator == 2 else gb)
            if tie > 0:
                for b in range(batch):
                    if 2.0 * votes[b] == answers:
                        g[b] = 0.5 - q[b] if tie == 1 and estimator == 0 else 0.0
            for b in range(batch):
                g[b] *= math.copysign(1.0, z[b])
            if beta > 0.0:  # (4) pooled entropy: d[beta H(P)]/dz_i = (1/B) beta s_i ln((1 - P) / P), P the batch mean of p
                pooled = 0.0
                for b in range(batch):
                    pooled += (q[b] if z[b] >= 0.0 else e[b] * q[b]) / batch
                pooled = min(max(pooled, 1e-12), 1.0 - 1e-12)
                pull = beta * math.log((1.0 - pooled) / pooled)
                for b in range(batch):
                    g[b] += pull * e[b] * q[b] * q[b]
            sum_g, sum_sg = 0.0, 0.0
            for b in range(batch):  # (1) a problem learns from its own votes, the shared modes from everyone's
                i = chosen[b]
                sum_g += g[b]
                sum_sg += sign[i] * g[b]
                if adam:
                    first[i] = 0.9 * first[i] + 0.1 * g[b] / batch
                    second[i] = 0.999 * second[i] + 0.001 * (g[b] / batch) ** 2
                    last[i] = t + 1
                    if second[i] > 0.0:
                        u[i] += eta * first[i] / math.sqrt(second[i]) * math.sqrt(1.0 - tables[1, t + 1]) / (1.0 - tables[0, t + 1])
                else:
                    u[i] += scale * k_d * g[b]
            if adam:
                fix = eta * math.sqrt(1.0 - tables[1, t + 1]) / (1.0 - tables[0, t + 1])
                m_v, v_v = 0.9 * m_v + 0.1 * lam * sum_g / batch, 0.999 * v_v + 0.001 * (lam * sum_g / batch) ** 2
                m_y, v_y = 0.9 * m_y + 0.1 * mu * sum_sg / batch, 0.999 * v_y + 0.001 * (mu * sum_sg / batch) ** 2
                V += lam * fix * m_v / math.sqrt(v_v) if v_v > 0.0 else 0.0
                Y += mu * fix * m_y / math.sqrt(v_y) if v_y > 0.0 else 0.0
            else:
                V += scale * k_u * sum_g
                Y += scale * k_s * sum_sg
            if (t + 1) * records >= (done + 1) * steps:
                total = 0
                for i in range(n):
                    if adam:
                        adam_flush(i, t + 1, u, first, second, last, tables, eta)
                    z_out[r, i] = u[i] + V + sign[i] * Y
                    total += (z_out[r, i] > 0.0) - (z_out[r, i] < 0.0)
                phi_out[r, done] = abs(total) / n
                shift_out[r, done] = V
                done += 1
    return z_out, phi_out, shift_out


@njit(cache=True, nogil=True, error_model="numpy")
def simulate_softmax(z0, k_u, batch, answers, estimator, eta, beta, steps, per_epoch, keys, records):
    """M-answer model: logits u_im + V_m, plurality vote, ties to a fair draw. z0: (N, M). Returns final logits (R, N, M) and Phi (R, records),
    Phi = (largest share of one answer among the problems' modes - 1/M) / (1 - 1/M), which is |mean sign z| for M = 2."""
    n, m = z0.shape
    replicas = keys.shape[0]
    gamma, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    blocks, scale, inv = n // batch, eta / batch, 1.0 / answers
    z_out, phi_out = np.empty((replicas, n, m)), np.empty((replicas, records))
    order = np.empty(n, np.int32)
    counts, totals, V = np.empty(m), np.empty(m), np.empty(m)
    p, g = np.empty((batch, m)), np.empty((batch, m))
    for r in range(replicas):
        key, c = keys[r], np.uint64(0)
        u = z0.copy()
        for i in range(n):
            order[i] = i
        V[:] = 0.0
        done = 0
        for t in range(steps):
            start = (t % blocks) * batch if per_epoch else 0
            totals[:] = 0.0
            for b in range(batch):
                c += one
                h = mix64(key + c * gamma)
                at = start + b
                j = at + np.int64(((h >> np.uint64(32)) * np.uint64(n - at)) >> np.uint64(32))
                i = order[j]
                order[j] = order[at]
                order[at] = i
                top = -1e300
                for l in range(m):
                    top = max(top, u[i, l] + V[l])
                norm = 0.0
                for l in range(m):
                    p[b, l] = math.exp(u[i, l] + V[l] - top)
                    norm += p[b, l]
                for l in range(m):
                    p[b, l] /= norm
                    totals[l] += p[b, l]
                counts[:] = 0.0
                for _ in range(answers):
                    c += one
                    h = mix64(key + c * gamma)
                    x = np.float64(h >> np.uint64(11)) * 1.1102230246251565e-16
                    l = 0
                    while l < m - 1 and x >= p[b, l]:
                        x -= p[b, l]
                        l += 1
                    counts[l] += 1.0
                best, tied = counts.max(), 0
                for l in range(m):
                    tied += counts[l] == best
                c += one
                pick = np.int64(((mix64(key + c * gamma) >> np.uint64(32)) * np.uint64(tied)) >> np.uint64(32))
                share = best * inv
                norm = math.sqrt(share * (1.0 - share)) if estimator == 2 and share < 1.0 else 1.0
                for l in range(m):
                    wins = 0.0
                    if counts[l] == best:
                        wins = 1.0 if pick == 0 else 0.0
                        pick -= 1
                    g[b, l] = share * (wins - (p[b, l] if estimator == 0 else counts[l] * inv)) / norm
            if beta > 0.0:
                for b in range(batch):
                    mean_log = 0.0
                    for l in range(m):
                        mean_log += p[b, l] * math.log(max(totals[l] / batch, 1e-300))
                    for l in range(m):
                        g[b, l] += beta * p[b, l] * (mean_log - math.log(max(totals[l] / batch, 1e-300)))
            for b in range(batch):
                for l in range(m):
                    u[order[start + b], l] += scale * g[b, l]
                    V[l] += scale * k_u * g[b, l]
            if (t + 1) * records >= (done + 1) * steps:
                totals[:] = 0.0
                for i in range(n):
                    for l in range(m):
                        z_out[r, i, l] = u[i, l] + V[l]
                    totals[np.argmax(z_out[r, i])] += 1.0
                phi_out[r, done] = (totals.max() / n - 1.0 / m) / (1.0 - 1.0 / m)
                done += 1
    return z_out, phi_out


# ------------------------------------------------------------------------------------------------ one cell, one curve
SETTING_FIELDS = ["lam", "init", "answers", "choices", "batch", "eta", "estimator", "tie", "optimizer", "adam_lr", "beta", "ks", "horizon", "sampling"]
Setting = make_dataclass("Setting", SETTING_FIELDS, frozen=True)  # what a solvable-model run depends on besides N and its stream; fields as in Args


def setting_of(args: Args) -> Setting:
    return Setting(*(getattr(args, name) for name in SETTING_FIELDS))


def check_setting(s: Setting) -> None:
    """Clear errors for values that have no meaning, before any cell runs."""
    for name, value, allowed in (("estimator", s.estimator, ESTIMATORS), ("tie", s.tie, TIES), ("optimizer", s.optimizer, OPTIMIZERS)):
        if value not in allowed:
            raise ValueError(f"--{name} {value}: choose one of {', '.join(allowed)}")
    if s.sampling not in ("epoch", "step"):
        raise ValueError(f"--sampling {s.sampling}: choose epoch or step")
    if s.answers < 1 or s.choices < 2 or s.batch < 1 or s.lam < 0 or s.ks < 0 or s.eta <= 0 or s.adam_lr <= 0 or s.horizon <= 0 or s.beta < 0:
        raise ValueError(f"{s}: answers and batch start at 1, choices at 2; rates and horizon are positive, lam, ks and beta not negative")
    if s.choices > 2 and (s.optimizer != "sgd" or s.tie != "coin" or s.ks != 0 or not s.init.startswith("point:")):
        raise ValueError("--choices above 2 runs with --optimizer sgd, --tie coin, --ks 0 and --init point:A")
    magnitudes(s.init, 4)


def magnitudes(init: str, count: int) -> np.ndarray:
    """Initial |z| at the mid-quantiles of the named distribution, so that no luck of the draw unbalances the population. -> (count,) float64."""
    name, _, text = init.partition(":")
    q = (np.arange(count) + 0.5) / count
    try:
        values = [float(part) for part in text.split(",")]
        if name == "point" and len(values) == 1:
            return np.full(count, values[0])
        if name == "uniform" and len(values) == 2:
            return values[0] + (values[1] - values[0]) * q
        if name == "normal" and len(values) == 1:
            return values[0] * np.array([NormalDist().inv_cdf((1 + x) / 2) for x in q])
        if name == "exponential" and len(values) == 1:
            return -values[0] * np.log(1 - q)
        if name == "mix" and len(values) == 3:
            return np.where(q < values[0], values[1], values[2])
    except ValueError:
        pass
    raise ValueError(f"--init {init}: write point:A, uniform:LO,HI, normal:SIGMA, exponential:MEAN or mix:SHARE,A,B with numbers")


@functools.cache
def gain_of(s: Setting) -> float:
    """G of a setting's initial population."""
    if s.choices > 2:
        return amplification_softmax(float(s.init.partition(":")[2]), s.choices, s.answers, s.estimator)
    if s.init.startswith("point:") and s.beta == 0:
        return amplification(float(s.init.partition(":")[2]), s.answers, s.estimator, s.tie)
    return amplification_mixed(magnitudes(s.init, 400), s.answers, s.estimator, s.tie, s.beta)


def steps_of(s: Setting, n: int) -> int:
    batch = min(s.batch, n)
    return math.ceil(s.horizon * n / s.eta) if s.optimizer == "sgd" else math.ceil(s.horizon * math.sqrt(n / batch) / s.adam_lr)


def simulate(s: Setting, n: int, keys: np.ndarray, pool: concurrent.futures.Executor, workers: int, records: int = 1):
    """Runs one replica per key, shared out over the pool's threads. -> final z (R, N[, M]), Phi (R, records), V (R, records; zeros for M > 2)."""
    steps, batch, per_epoch = steps_of(s, n), min(s.batch, n), s.sampling == "epoch"
    if s.choices > 2:
        if n % s.choices:
            raise ValueError(f"N = {n} is not a multiple of {s.choices} answers")
        z0 = np.zeros((n, s.choices))
        z0[np.arange(n), np.arange(n) % s.choices] = float(s.init.partition(":")[2])

        def work(part):
            z, phi = simulate_softmax(z0, s.lam**2, batch, s.answers, ESTIMATORS[s.estimator], s.eta, s.beta, steps, per_epoch, part, records)
            return z, phi, np.zeros_like(phi)
    else:
        if n % 2:
            raise ValueError(f"N = {n} is odd: half of the problems start positive, half negative")
        sign = np.repeat([1.0, -1.0], n // 2)
        z0 = sign * np.tile(magnitudes(s.init, n // 2), 2)
        adam = s.optimizer == "adam"
        rate, tables = (s.adam_lr, adam_tables(steps)) if adam else (s.eta, np.ones((3, 1)))
        codes = ESTIMATORS[s.estimator], TIES[s.tie]

        def work(part):
            return simulate_binary(z0, sign, 1.0, s.lam**2, s.ks, batch, s.answers, *codes, rate, s.beta, steps, per_epoch, adam, tables, part, records)

    parts = list(pool.map(work, [part for part in np.array_split(keys, workers) if len(part)]))
    return tuple(np.concatenate([part[i] for part in parts]) for i in range(3))


class Stopped(Exception):
    """Ctrl-C or SIGTERM arrived; every finished cell is on disk."""


@dataclass
class Grid:
    """Cells of one run folder: each is one JSON file, written beside its place and renamed, so an interrupted sweep goes on where it stopped."""

    run: Run
    args: Args
    pool: concurrent.futures.Executor
    workers: int
    logged: int = 0  # lines that metrics.jsonl already holds
    bases: dict = field(default_factory=dict)  # base networks of this process
    step: int = 0

    def cell(self, label: str, compute: Callable[[], dict], metrics: Callable[[dict], dict]) -> dict:
        """The stored record of `label`, computed first if it is not there yet. Raises Stopped after a signal."""
        path = self.run.folder / "cells" / f"{hashlib.sha256(label.encode()).hexdigest()[:20]}.json"
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            record = {"label": label, **compute()}
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps(record))
            os.replace(path.with_suffix(".tmp"), path)
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); delete this file, its cell is computed again") from None
        self.step += 1
        if self.step > self.logged:
            self.run.log(metrics(record), step=self.step)
        if self.run.should_stop():
            raise Stopped
        return record

    def point(self, s: Setting, n: int, replicas: int = 0, records: int = 1) -> dict:
        """Replicas of one setting at one N: Phi of every replica at `records` times, mean |z| at the end, collapse count (Phi > 0.9)."""
        replicas = replicas or self.args.replicas
        label = json.dumps({**asdict(s), "n": n, "replicas": replicas, "seed": self.args.seed, "records": records, "version": 1}, sort_keys=True)

        def compute():
            z, phi, shift = simulate(s, n, replica_keys(self.args.seed, label, replicas), self.pool, self.workers, records)
            hits = int((phi[:, -1] > 0.9).sum())
            return {"n": n, "trials": replicas, "hits": hits, "phi": phi.round(6).tolist(), "shift": shift.round(6).tolist(), "size": float(np.abs(z).mean())}

        return self.cell(label, compute, lambda r: {"collapse/n": n, "collapse/share": r["hits"] / r["trials"], "collapse/mean_abs_z": r["size"]})

    def curve(self, name: str, s: Setting, centre: float = 0.0) -> dict:
        """Collapse curve over N around the predicted N_c (or `centre`), widened until it starts below 0.15 and ends above 0.85, and its logistic fit."""
        unit = s.choices if s.choices > 2 else 2
        if s.lam == 0 or gain_of(s) == 0:
            raise ValueError(
                f"lambda {s.lam:g}, {s.init}: Lambda = lambda^2 N G is 0 for every N, so there is no threshold to look for; --what confident shows such starts"
            )
        centre = centre or LAMBDA_C / (s.lam**2 * gain_of(s))
        points = {}

        def add(j):
            n = max(unit, unit * round(centre * 2 ** (j / 3) / unit))
            if n not in points:
                points[n] = self.point(s, n, self.args.replicas // (1 if n <= 2000 else 2 if n <= 8000 else 3))
            return points[n]["hits"] / points[n]["trials"], n

        low, high = -3, 3
        for j in range(low, high + 1):
            add(j)
        while low > -12 and add(low)[0] > 0.15 and add(low)[1] > unit:
            low -= 1
        while high < 10 and add(high)[0] < 0.85:
            high += 1
        table = [points[n] for n in sorted(points)]
        fit = fit_threshold(*[[p[key] for p in table] for key in ("n", "hits", "trials")])
        g = gain_of(s)
        lambdas = {f"lambda_{key}": s.lam**2 * fit[key] * g for key in ("nc", "low", "high")}
        counts = {"sizes": sorted(points), "share": [p["hits"] / p["trials"] for p in table], "trials": [p["trials"] for p in table]}
        return {"name": name, "setting": asdict(s), "g": g, **fit, **lambdas, **counts}


# ------------------------------------------------------------------------------------------------ rows of the result table
# ------------------------------------------------------------------------------------------------ sweeps: (args, grid, base setting) -> {"rows", "curves", ...}
ADAM_HORIZON = 12.0  # adam_lr * steps * sqrt(B / N) (deduced)


def sweep_headline(args, grid, base):
    curve = grid.curve(f"lambda {base.lam:g}, {base.init}, K {base.answers}, {base.estimator}", base)
    default = base == setting_of(Args())
    rows = [nc_row(curve, 536 if default else None, "headline")]
    rows.append(row("headline", "N at P = 0.98 over N at P = 0.02", (3, 4) if default else None, *curve["width"], "from the fitted slope"))
    return {"rows": rows, "curves": [curve]}


def sweep_estimator(args, grid, base):
    rows, curves = [], []
    for estimator, factor, paper in (("mean", 2 / 3, None), ("grpo", math.sqrt(2), 548)):
        z = np.linspace(-3, 3, 13)[[0, 3, 5, 8, 11]]
        ratio = expected_drift(z, 3, estimator) / expected_drift(z, 3)
        rows.append(
            row("estimator", f"F of {estimator} over F of reinforce, K 3", round(factor, 4), float(ratio.mean()), note=f"exact, spread {np.ptp(ratio):.0e}")
        )
        curves.append(grid.curve(f"{estimator}", replace(base, estimator=estimator)))
        rows.append(nc_row(curves[-1], paper, "estimator"))
    return {"rows": rows, "curves": curves}


def sweep_lambda(args, grid, base):
    papers = {0.035: 5750, 0.28: 60}
    curves = [grid.curve(f"lambda {lam:g}", replace(base, lam=lam)) for lam in (0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28)]
    rows = [nc_row(c, papers.get(c["setting"]["lam"]), "lambda") for c in curves]
    rows.append(row("lambda", "exponent of N_c in lambda", -2.22, *exponent(curves)))
    return {"rows": rows, "curves": curves}


def sweep_confidence(args, grid, base):
    papers = {0.15: 189, 1.1: 8740}
    curves = [grid.curve(f"a {a:g}", replace(base, init=f"point:{a}")) for a in (0.15, 0.3, 0.5, 0.7, 0.9, 1.1)]
    rows = [nc_row(c, papers.get(float(c["setting"]["init"][6:])), "confidence") for c in curves]
    mean = common_constant(curves, [c["lambda_nc"] for c in curves])
    spread = f"single values {min(c['lambda_nc'] for c in curves):.2f} to {max(c['lambda_nc'] for c in curves):.2f}"
    rows.append(row("confidence", "one Lambda_c for the whole curve", 2.64, *mean, note=spread))
    return {"rows": rows, "curves": curves}


def sweep_answers(args, grid, base):
    rows, curves = [], []
    exact = {(3, "reinforce"): (1.317, 0.514), (16, "grpo"): (1.006, None), (16, "reinforce"): (None, 0.202)}
    papers = {5: 793, 8: 876, 16: 1557}
    for k in (3, 5, 8, 16):
        for estimator in ("reinforce", "grpo"):
            edge, g = exact.get((k, estimator), (None, None))
            rows.append(row("answers", f"z*, K {k}, {estimator}", edge, window_edge(k, estimator), note="enumeration, coin ties"))
            rows.append(row("answers", f"G_K(0.5), K {k}, {estimator}", g, amplification(0.5, k, estimator), note="enumeration, coin ties"))
            if k > 3:
                curves.append(grid.curve(f"K {k}, {estimator}", replace(base, answers=k, estimator=estimator)))
                rows.append(nc_row(curves[-1], papers[k], "answers"))
    return {"rows": rows, "curves": curves}


def sweep_batch(args, grid, base):
    curves = []
    for rule in ("fixed", "linear"):
        for b in (8, 32, 128):
            eta = base.eta * (b / 32 if rule == "linear" else 1)
            curves.append(grid.curve(f"B {b}, eta {eta:g} ({rule})", replace(base, batch=b, eta=eta)))
    rows = [nc_row(c, None, "batch") for c in curves]
    for rule, first, last, paper in (("fixed eta", 0, 2, 2.2), ("eta proportional to B", 3, 5, 1.0)):
        ratio = math.log(curves[last]["nc"] / curves[first]["nc"])
        half = 1.959964 * math.hypot(standard_error(curves[first]), standard_error(curves[last]))
        rows.append(row("batch", f"N_c at B 128 over N_c at B 8, {rule}", paper, math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half)))
    return {"rows": rows, "curves": curves}


HETEROGENEOUS = ("uniform:0.25,0.75", "uniform:0,1", "normal:1", "exponential:1", "uniform:0,1.5", "uniform:0,2", "mix:0.3,0.3,2")  # deduced


def sweep_heterogeneous(args, grid, base):
    curves = [grid.curve(init, replace(base, init=init)) for init in HETEROGENEOUS]
    rows = [nc_row(c, None, "heterogeneous") for c in curves]
    lowest, highest = min(curves, key=lambda c: c["nc"]), max(curves, key=lambda c: c["nc"])
    rows.append(row("heterogeneous", "smallest N_c of the seven", 455, lowest["nc"], lowest["low"], lowest["high"], lowest["name"]))
    rows.append(row("heterogeneous", "largest N_c: the 30 % mixture", 14700, highest["nc"], highest["low"], highest["high"], highest["name"]))
    for end in (min, max):
        c = end(curves, key=lambda c: c["lambda_nc"])
        rows.append(row("heterogeneous", f"{end.__name__} Lambda_c", (2.0, 2.8), c["lambda_nc"], c["lambda_low"], c["lambda_high"], c["name"]))
    s = replace(base, init="uniform:0.5,2.5")
    slope, g = float((expected_drift(2.5) - expected_drift(0.5)) / 2), gain_of(s)
    verdict = "inside" if slope < 0 else "outside: the paper says negative; too small to matter"
    start = row("heterogeneous", "<F'> at the start, uniform:0.5,2.5", None, slope, note=f"(F(2.5) - F(0.5)) / 2, exact; G {g:.1e}")
    p = grid.point(s, 24000, 24)
    rows += [start | {"verdict": verdict}, share_row("heterogeneous", "share collapsed, uniform:0.5,2.5, N 24000", 0.0, p["hits"], p["trials"])]
    return {"rows": rows, "curves": curves}


def sweep_confident(args, grid, base):
    rows, points = [], []
    for a in (1.4, 1.6, 2.0):
        s = replace(base, init=f"point:{a}", lam=0.28, horizon=10 * base.horizon)
        p = grid.point(s, 2 * round(1474 / 0.28**2 / 2), 8, 10)
        points.append({"name": f"a {a:g}", "phi": p["phi"]})
        rows.append(share_row("confident", f"share collapsed, a {a:g} > z*, lambda^2 N 1474, 10x training", 0.0, p["hits"], p["trials"]))
    return {"rows": rows, "curves": [], "points": points}


def sweep_fate(args, grid, base):
    n, records = 584, 48
    epochs = steps_of(base, n) * base.batch / n
    four, many = grid.point(base, n, 4, records), grid.point(base, n, args.replicas, records)
    phi, times = np.array(many["phi"]), epochs * np.arange(1, records + 1) / records
    at = min(int(np.searchsorted(times, 100 - 1e-9)), records - 1)
    same = int(((phi[:, at] > 0.5) == (phi[:, -1] > 0.5)).sum())
    rows = [share_row("fate", f"share of runs whose side at epoch {times[at]:.0f} is final (N {n})", 1.0, same, len(phi))]
    frozen = times[np.abs(phi - phi[:, -1:]).max(0) > 0.05]  # times at which some run is still away from its final Phi
    rows.append(row("fate", "epoch from which every run stays within 0.05 of its final Phi", 100, float(frozen.max() if len(frozen) else times[0])))
    return {"rows": rows, "curves": [], "times": times.tolist(), "phi": four["phi"], "shift": four["shift"], "all_phi": many["phi"]}


def sweep_softmax(args, grid, base):
    curves = [grid.curve(f"M {m}", replace(base, choices=m)) for m in (3, 4, 6)]
    rows = [nc_row(c, None, "softmax") for c in curves]
    rows += [row("softmax", f"Lambda_c, {c['name']}", (2.1, 2.2), c["lambda_nc"], c["lambda_low"], c["lambda_high"]) for c in curves]
    return {"rows": rows, "curves": curves}


def sweep_adam(args, grid, base):
    adam = replace(base, optimizer="adam", horizon=ADAM_HORIZON)
    curves = [grid.curve(f"Adam, lambda {lam:g}", replace(adam, lam=lam), 35 / lam**2) for lam in (0.1, 0.14, 0.2, 0.28)]
    rows = [row("adam", f"lambda^2 N_c, {c['name']}", (34, 36), *(c["setting"]["lam"] ** 2 * c[k] for k in ("nc", "low", "high"))) for c in curves]
    rows.append(row("adam", "exponent of N_c in lambda", -2.06, *exponent(curves)))
    scaled = common_constant(curves, [math.sqrt(c["setting"]["lam"] ** 2 * c["nc"]) * c["g"] for c in curves])[0]
    rows.append(row("adam", "lambda sqrt(N_c) G", None, scaled))
    return {"rows": rows, "curves": curves}


def measured_growth(base: Setting, a: float, w: float, grid: Grid, n: int = 200_000, replicas: int = 24) -> tuple[float, float]:
    """<F'> of the uniform mode measured in the simulator itself: one full-batch step from +-a shifted by +w and by -w; growth of V over eta lambda^2 w.

    Returns the estimate and its standard error; w is finite, so a bias of order w^2 remains."""
    sign = np.repeat([1.0, -1.0], n // 2)
    grown = []
    for side in (1.0, -1.0):
        keys = replica_keys(grid.args.seed, f"growth {a} {side}", replicas)
        codes = ESTIMATORS[base.estimator], TIES[base.tie]

        def work(part, z0=sign * a + side * w, codes=codes):
            return simulate_binary(z0, sign, 1.0, 1.0, 0.0, n, base.answers, *codes, 1.0, 0.0, 1, True, False, np.ones((3, 1)), part, 1)[2]

        grown.append(side * np.concatenate(list(grid.pool.map(work, [p for p in np.array_split(keys, grid.workers) if len(p)])))[:, 0] / w)
    values = 0.5 * (grown[0] + grown[1])
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(replicas))


def sweep_entropy(args, grid, base):
    rows, curves = [], []
    for a, paper in ((0.2, 0.49), (0.5, 0.44)):
        s4 = 4 * (1 / (2 + 2 * math.cosh(a))) ** 2  # 4 <s>^2
        rows.append(row("entropy", f"beta_c({a:g}), closed form", paper, beta_critical(a)))

        def compute(a=a):
            return dict(zip(("rate", "error"), measured_growth(base, a, 0.05, grid)))

        label = json.dumps({**asdict(base), "growth": a, "seed": args.seed})
        rate = grid.cell(label, compute, lambda r: {"collapse/growth_rate": r["rate"]})
        beta, half = rate["rate"] / s4, 1.959964 * rate["error"] / s4
        rows.append(row("entropy", f"beta_c({a:g}), growth rate of a common shift measured in the simulator", beta_critical(a), beta, beta - half, beta + half))
        for n in (1000, 4000):
            betas = np.linspace(0.0, 0.6, 13)
            points = [grid.point(replace(base, init=f"point:{a}", beta=float(round(b, 4))), n, args.replicas // 2) for b in betas]
            hits, trials = [p["hits"] for p in points], [p["trials"] for p in points]
            fit = fit_threshold(np.exp(-betas), hits, trials)  # P falls with beta: fitted in ln x = -beta
            half_beta, low, high = -math.log(fit["nc"]), -math.log(fit["high"]), -math.log(fit["low"])
            low_b, high_b = 0.0, 0.6
            for _ in range(40):  # theory at finite N: the beta whose remaining amplification equals Lambda_c
                mid = 0.5 * (low_b + high_b)
                more = base.lam**2 * n * amplification_mixed(np.array([a, -a]), base.answers, base.estimator, base.tie, mid) > LAMBDA_C
                low_b, high_b = (mid, high_b) if more else (low_b, mid)
            note = f"theory with Lambda_c = 2.64: {mid:.3f}; N to infinity: {beta_critical(a):.3f}"
            rows.append(row("entropy", f"beta at P = 0.5, a {a:g}, N {n}", None, half_beta, low, high, note))
            share = [h / t for h, t in zip(hits, trials)]
            curves.append({"name": f"a {a:g}, N {n}", "betas": betas.tolist(), "share": share, "trials": trials, "theory": mid})
            above = [p for p, b in zip(points, betas) if b >= 0.5 - 1e-9]
            hits, trials = sum(p["hits"] for p in above), sum(p["trials"] for p in above)
            rows.append(share_row("entropy", f"share collapsed at beta >= 1/2, a {a:g}, N {n}", 0.0, hits, trials))
    return {"rows": rows, "curves": [], "beta_curves": curves}


def sweep_kernel(args, grid, base):
    k_u, g, curves, rows = base.lam**2, gain_of(base), [], []
    sizes = [2 * round(100 * 2 ** (j / 2)) // 2 * 2 for j in range(15)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5):  # k_s in units of the bound G k_u / Lambda_c
        k_s = share * g * k_u / 2.64
        points = [grid.point(replace(base, ks=k_s), n, args.replicas // 2) for n in sizes if n <= (12800 if share else 3200)]
        hits, trials, used = ([p[k] for p in points] for k in ("hits", "trials", "n"))
        name = f"k_s = {share:g} G k_u / 2.64"
        curves.append({"name": name, "sizes": used, "share": [h / t for h, t in zip(hits, trials)], "trials": trials})
        predicted = f"N_c = {2.64 / (g * k_u - 2.64 * k_s):.0f}" if share < 1 else "no N collapses"
        if hits[-1] > 0.6 * trials[-1]:
            fit = fit_threshold(used, hits, trials)
            rows.append(row("kernel", f"N_c, {name}", None, fit["nc"], fit["low"], fit["high"], f"theory: {predicted}"))
        else:
            note = f"; theory: {predicted}; Lambda there {kernel_amplification(g, used[-1], k_u, 1.0, k_s):.2f}"
            rows.append(share_row("kernel", f"share collapsed at N {used[-1]}, {name}", 0.0 if share > 1 else None, hits[-1], trials[-1], note))
    return {"rows": rows, "curves": [], "kernel_curves": curves}


def sweep_diagram(args, grid, base):
    sizes, lams = [2**j for j in range(5, 14)], [0.02 * 2 ** (j / 2) for j in range(9)]
    share = [[grid.point(replace(base, lam=round(lam, 6)), n, 16)["hits"] / 16 for n in sizes] for lam in lams]
    return {"rows": [], "curves": [], "sizes": sizes, "lams": lams, "share": share, "g": gain_of(base)}


# ------------------------------------------------------------------------------------------------ main
def sweep_transformer(args, grid, base):
    import collapse_networks  # here: nothing else in this file needs torch

    return collapse_networks.sweep_transformer(args, grid)


SWEEPS = {name.removeprefix("sweep_"): value for name, value in list(globals().items()) if name.startswith("sweep_")}
CELLS = {"lambda": 49, "confidence": 42, "answers": 42, "batch": 42, "heterogeneous": 50, "confident": 3, "fate": 2, "softmax": 21, "adam": 28, "entropy": 54}
CELLS |= {"kernel": 95, "diagram": 81, "estimator": 14, "transformer": 19}  # rough, for the progress bar


def main(args: Args) -> int:
    """Runs what --what names and returns the exit code."""
    if args.measure_llm:
        import collapse_networks

        collapse_networks.measure_llm(args)
        return 0
    names = [name for word in args.what.split(",") for name in ([n for n in SWEEPS if n != "transformer"] if word.strip() == "all" else [word.strip()])]
    unknown = [name for name in names if name not in SWEEPS]
    if unknown or not names:
        raise ValueError(f"--what {args.what}: {', '.join(unknown)} unknown; choose all or some of {', '.join(SWEEPS)}")
    base = setting_of(args)
    check_setting(base)
    workers = args.threads or os.cpu_count() or 1
    run = Run(args, "collapse_sim", total_updates=sum(CELLS.get(n, 7) for n in names), key_metrics=["collapse/share", "net/share"], may_change=["threads"])
    logged = run.load_checkpoint()[0] if args.resume else 0
    if not args.resume:
        run.save_checkpoint(0, {})
    results, started = {}, time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        grid = Grid(run, args, pool, workers, logged)
        try:
            for name in names:
                before = time.perf_counter()
                results[name] = SWEEPS[name](args, grid, base) | {"seconds": round(time.perf_counter() - before, 2)}
                draw(name, results[name], run.folder / f"{name}.png")
                run.save_checkpoint(max(grid.step, logged), {})
        except Stopped:
            run.save_checkpoint(grid.step, {})
    everything = [{**c, "group": name} for name, r in results.items() for c in r["curves"] if name != "adam" and "kernel" not in name]
    if len(everything) > 3:
        draw("all_curves", {"curves": everything, "groups": sorted({c["group"] for c in everything})}, run.folder / "all_curves.png")
    rows = [r for result in results.values() for r in result["rows"]]
    (run.folder / "results.json").write_text(json.dumps(results, indent=1))
    (run.folder / "table.md").write_text(table(rows) + "\n")
    run.finish([Panel("Share of runs that collapse, by cell", ("collapse/share", "net/share"), "share", (0.0, 1.0))])
    print(table(rows))
    print(f"{time.perf_counter() - started:.1f} s; figures, table.md, results.json and every cell in {run.folder}")
    if run.exit_code:
        print(f"stopped early; go on with --resume {run.folder}")
    return run.exit_code


if __name__ == "__main__":
    sys.exit(main(parse_args(Args)))
