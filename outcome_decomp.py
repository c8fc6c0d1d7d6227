# Guide, derivations, worked example: docs/outcome_decomp.md
"""What outcome RL buys: finishing, reliability, rarely reach (arXiv 2610.34894): an exact account of a gain in pass@k under a token budget B.

A sample counts as finished under B if it ended by itself within B tokens; one that was cut cannot be right. What the paper says, and where this file does it:
  (1) pass@k(B) = fin@k(B) * pass@k(B | fin), so one number mixes "ended in time" with "right once ended"                        linear_terms, account
  (2) delta = F + P + reach: finishing F = dfin * pass_rl(|fin), reliability P = fin_base * dpass(|fin) without reach, reach net of its mirror    account
  (3) a lone win: the other side finished all n samples and all are wrong; matched reliability and robust reach close selection effects       linear_terms
  (4) compare at or above the recipe's own training cap, beside fin@1(B): below it one measures how long a model writes                  reading_budget
  (5) lone wins: symmetry of both directions first, then re-sampling, then a list for a human reader                                          lone_wins
  (6) predictions are written down, dated and hashed before the records exist; failed ones are reported                             preregister, score

    python outcome_decomp.py decompose                                            the shipped, simulated example: tables, report.html, metrics.json
    python outcome_decomp.py decompose --records r.jsonl --base base --cap 8192   your own records (.jsonl .parquet .csv, lm-evaluation-harness logs)
    python outcome_decomp.py preregister --predict "H1: every finishing_share > 0.5 at tight"
    python outcome_decomp.py simulate --problems 300                              records whose truth is known
    python outcome_decomp.py sample --models base=tiny rl=runs/RUN/policy         records of models, on generated or real problems
    python outcome_decomp.py recheck --wins runs/RUN --models base=tiny rl=...    further samples of the losers of lone wins
    python outcome_decomp.py probe --channel hint                                 GSPO under a token cap, with or without outside knowledge
The accounting needs neither a model nor torch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from common.envs import DataError
from outcome_records import PAIRS, RECIPES, Pair, Record, Source, Table, build_tables, pick_budgets, read_pairs, simulate, texts_at, write_records

ROOT = Path(__file__).resolve().parent
EXAMPLE = "examples/outcome_decomp.jsonl"
PAPER_PREDICTIONS = ("H1: every finishing_share > 0.5 at tight", "H2: mean |matched| < 0.03 at tight")  # worded after the paper's H1 and H2


@dataclass
class Decompose:
    """Splits every gain into finishing, reliability and reach; without arguments on the shipped simulated example."""

    records: tuple[str, ...] = ()
    """record files or folders (.jsonl, .parquet, .csv, lm-evaluation-harness samples_*.jsonl; NAME=PATH names a harness model); default: the example"""
    pairs: str = ""
    """JSON file of the pairs compared: [{"rl": name, "base": name, "cap": tokens or null}, ...]; or use --base"""
    base: str = ""
    """name of the base model; every other model in the records is then an RL model of this base"""
    cap: int = 0
    """training cap in tokens of the RL models when --base names the base (0: unknown, and then the comparison rule cannot be checked)"""
    budgets: tuple[int, ...] = ()
    """token budgets; default: 4k to 64k as far as the records reach, or halvings of what they reach; one beyond that is an error [paper: 4k to 64k]"""
    ks: tuple[int, ...] = (1, 2, 4, 8)
    """k of pass@k and fin@k; those above the number of samples are left out"""
    tight: int = 0
    """budgets up to here count as tight; 0: 8192, or a quarter of what the records reach where that is less [paper: 4k and 8k]"""
    cross: Literal["finishing", "half", "reliability"] = "finishing"
    """who gets dfin * dpass(|fin) [paper: finishing; the others are its check of the order]"""
    samples: int = 0
    """use the first so many samples of every problem; 0: all, and then every problem must have the same number [paper: 8 at temperature 0.6]"""
    resamples: int = 2000
    """bootstrap resamples of the problems [deduced]"""
    level: float = 0.95
    """coverage of the bootstrap intervals [deduced]"""
    judge_missing: Literal["error", "matcher"] = "error"
    """records without the second grader's verdict in a model that has it elsewhere: refuse, or take the matcher's"""
    recheck: tuple[str, ...] = ()
    """further samples of the losing side of lone wins (record files): how many of the problems it can solve after all"""
    predictions: str = ""
    """file written by `preregister`; its predictions are scored"""
    lm_metric: str = ""
    """harness logs: the metric, when there are several"""
    lm_filter: str = ""
    """harness logs: the filter, when there are several"""
    tokenizer: str = ""
    """harness logs: tokenizer (folder or hub id) to count tokens with, since the logs hold none"""
    lm_slack: float = 0.01
    """harness logs: an answer whose re-counted length comes within this fraction of max_gen_toks counts as cut [deduced]"""
    seed: int = 1
    """of the bootstrap"""
    out: str = ""
    """folder for report.html, metrics.json, lone_wins.jsonl; default runs/outcome_decomp__TIME"""


@dataclass
class Preregister:
    """Writes predictions with date and hash, before the records exist; `decompose --predictions FILE` scores them, failures included."""

    predict: tuple[str, ...] = PAPER_PREDICTIONS
    """"NAME: every|any|mean METRIC or |METRIC| < NUMBER at BUDGETS|tight|reading|all [on DATASETS] [for RL_MODELS] [k K]", lists with commas"""
    note: str = ""
    """free text that is hashed too: who predicts, which models, where the hash was published"""
    out: str = "predictions.json"
    """file to write; an existing one is never overwritten"""


@dataclass
class Simulate:
    """Writes records of simulated models whose finishing, reliability and reach are known; the shipped example is its default output."""

    problems: int = 48
    """number of problems"""
    samples: int = 8
    """samples a problem"""
    seed: int = 1
    """of everything drawn"""
    out: str = "simulated.jsonl"
    """file to write; the pairs go beside it as *.pairs.json"""


@dataclass
class Sample:
    """Draws and grades samples of one or more models and writes records; a killed run goes on where it stopped."""

    models: tuple[str, ...] = ()
    """NAME=MODEL ...: tiny, smollm2, a folder (a probe leaves RUN/policy) or a hub id, for example base=tiny rl=runs/RUN/policy"""
    env: str = "maths"
    """problems: maths, maths:physics, or maths:FILE (MATH or GSM8K jsonl)"""
    split: Literal["eval", "train", "all"] = "eval"
    """which of them"""
    num_problems: int = 0
    """the first so many (0: all)"""
    dataset: str = ""
    """name of the data set in the records"""
    samples: int = 8
    """samples a problem [paper]"""
    temperature: float = 0.6
    """of sampling [paper]"""
    max_new_tokens: int = 96
    """length limit, the largest budget that can be read; the stop token counts [paper: 65536]"""
    judge: str = ""
    """second grader of finished answers: rule, local:MODEL, openai:MODEL or openai:MODEL@URL (key in JUDGE_API_KEY); empty: none"""
    ungraded: Literal["error", "wrong"] = "error"
    """an answer that math-verify cannot decide in its time: leave it out and fail at the end, or record it as wrong"""
    keep_text: bool = True
    """keep the answers in the records"""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """generation; auto: vllm on CUDA, torch elsewhere"""
    rollout_format: Literal["auto", "bf16", "fp8"] = "auto"
    """number format of generation; auto: FP8 in vllm on CUDA, the model's own elsewhere"""
    batch_problems: int = 16
    """problems generated, graded and written together; the records do not depend on it"""
    seed: int = 1
    """every sample has its own stream from (seed, problem, number)"""
    out: str = "records.jsonl"
    """record file, gone on with when it exists; its settings lie beside it in *.settings.json"""


@dataclass
class Recheck(Sample):
    """Draws further samples of the losers of lone wins and prints which wins survive; `decompose --recheck FILE` takes them in."""

    wins: str = ""
    """lone_wins.jsonl of `decompose`, or its folder"""
    samples: int = 32
    """further samples of the loser for each lone win [paper: 24 to 56]"""
    out: str = "recheck.jsonl"
    """record file of the further samples, gone on with when it exists"""


@dataclass
class Probe:
    """Trains with GSPO under a token cap, plain or with one channel that supplies missing setup knowledge, and measures what stays."""

    # --- run
    env: str = "maths"
    """problems: maths (a made-up world; tiny policy), maths:physics, or maths:FILE (MATH or GSM8K jsonl; channel plain only)"""
    model: str = "tiny"
    """tiny (built and warm-started on first use), smollm2, a folder or a hub id"""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """generation; auto: vllm on CUDA, torch elsewhere"""
    rollout_format: Literal["auto", "bf16", "fp8", "fp8_kv"] = "auto"
    """number format of rollouts; auto: FP8 weights, activations and KV cache in vllm on CUDA, the model's own elsewhere; fp8_kv: FP8 cache only"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of training (master weights are always float32); auto: bf16 autocast on CUDA, float32 elsewhere"""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """how several processes share the model"""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """compute the prompt of a group once instead of once per response (exact); auto: on where the model allows it"""
    seed: int = 1
    """seed of data order and sampling; every sample has its own stream from (seed, update, task, sample)"""
    num_updates: int = 60
    """rollout-and-update rounds [paper]"""
    eval_every: int = 10
    """updates between greedy evaluations on the held-out problems (0: only at the start and the end)"""
    eval_tasks: int = 128
    """held-out problems"""
    save_every: int = 30
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__outcome_probe__<seed>__<time>"""
    track: bool = False
    """log to Weights & Biases too"""
    compare: tuple[str, ...] = ()
    """print these finished run folders side by side (mean over seeds, 95 % t-interval) and train nothing"""
    # --- training
    groups_per_update: int = 16
    """problems per update, over all processes"""
    group_size: int = 8
    """responses per problem [paper: 16]"""
    max_new_tokens: int = 48
    """the token cap: a response that it cuts has reward 0 [paper: 12288]"""
    temperature: float = 1.0
    """of sampling in training and measurements, and of every log-prob in the loss"""
    learning_rate: float = 5e-4
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 5
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 2
    """passes over each rollout; in the first step after a rollout the ratio is exactly 1 [deduced]"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 4096
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float = 3e-4
    """the response's ratio is clipped below at 1 - clip_low [GSPO's published value]"""
    clip_high: float = 4e-4
    """the response's ratio is clipped above at 1 + clip_high [GSPO's published value]"""
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    advantage_eps: float = 1e-4
    """added to a group's standard deviation (ddof 1) [deduced]"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm"""
    # --- the probe
    channel: Literal["plain", "hint", "control", "teacher", "setup", "questions", "reward"] = "plain"
    """hint: setup facts in the prompt; control: a checklist as long in tokens; teacher: the derivation takes the place of one sample where a whole group
    failed; setup: the response must begin with a setup section; questions: supervised steps on sub-questions first; reward: a bonus for stated facts"""
    train_problems: int = 96
    """training problems, seen again and again; none of them uses a fact that is held back"""
    touch_at_most: int = 1
    """a channel helps on problems with at most so many solves among --base-samples of the start policy [deduced]"""
    base_samples: int = 8
    """samples a problem, before training, that choose the touched problems and the bins of prior solves"""
    measure_samples: int = 16
    """further samples a problem, before and after training, that solve rates are read from"""
    question_steps: int = 8
    """channel questions: supervised optimizer steps before the first update [deduced]"""
    setup_coef: float = 0.5
    """channel reward: bonus times the share of setup facts stated rightly anywhere in the response [deduced]"""


# ---------------------------------------------------------------------------------------------------------------------- accounting


def any_of(n: int, k: int) -> np.ndarray:
    """[n + 1]: probability that k of n samples, drawn without replacement, hold at least one of c hits, for c = 0..n: 1 - C(n-c, k) / C(n, k)."""
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])


def counts_within(table: Table, verdict: np.ndarray, budgets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(finished, correct) samples of every problem under every budget. verdict: [M, N, n] bool -> two [M, B, N] int64."""
    inside = [table.finished & (table.tokens <= b) for b in budgets]
    return np.stack([i.sum(-1) for i in inside], 1), np.stack([(i & verdict).sum(-1) for i in inside], 1)


def linear_terms(fin_base: np.ndarray, cor_base: np.ndarray, fin_rl: np.ndarray, cor_rl: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
    """(1)(3) What the account needs of every problem; means over problems enter. Inputs: [..., N] counts among n samples; outputs: the same shape.

    A lone win asks for all n samples of the loser, whatever k is; matched: both sides finished 7/8; robust: the winner solves half [paper: 4 of 8]."""
    some = any_of(n, k)
    pass_base, pass_rl = some[cor_base], some[cor_rl]
    lone_rl = (fin_base == n) & (cor_base == 0) & (cor_rl > 0)
    lone_base = (fin_rl == n) & (cor_rl == 0) & (cor_base > 0)
    robust_rl, robust_base = lone_rl & (2 * cor_rl >= n), lone_base & (2 * cor_base >= n)
    matched = (8 * fin_base >= 7 * n) & (8 * fin_rl >= 7 * n)
    terms = {"fin_base": some[fin_base], "pass_base": pass_base, "fin_rl": some[fin_rl], "pass_rl": pass_rl}
    terms |= {"reach": pass_rl * lone_rl - pass_base * lone_base, "robust_reach": pass_rl * robust_rl - pass_base * robust_base}
    if k == 1:
        terms |= {"matched_share": matched, "m_fin_base": matched * fin_base, "m_cor_base": matched * cor_base}
        terms |= {"m_fin_rl": matched * fin_rl, "m_cor_rl": matched * cor_rl}
        terms |= {"lone_rl": lone_rl, "lone_base": lone_base, "robust_rl": robust_rl, "robust_base": robust_base}
    return terms


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom, NaN where bottom is 0."""
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom > 0)


def account(means: dict[str, np.ndarray], cross: str = "finishing") -> dict[str, np.ndarray]:
    """(2) The split, from means over problems (any shape): delta = finishing + reliability + reach, exactly.

    Where one side finishes nothing its pass(|fin) does not exist; the other side's stands in, so that the whole change is finishing [deduced]."""
    fin_base, fin_rl, pass_base, pass_rl, reach = (means[name] for name in ("fin_base", "fin_rl", "pass_base", "pass_rl", "reach"))
    cond_base, cond_rl = ratio(pass_base, fin_base), ratio(pass_rl, fin_rl)
    given_base = np.nan_to_num(np.where(fin_base > 0, cond_base, cond_rl))
    given_rl = np.nan_to_num(np.where(fin_rl > 0, cond_rl, cond_base))
    to_finishing = {"finishing": 1.0, "half": 0.5, "reliability": 0.0}[cross]
    d_fin, d_pass = fin_rl - fin_base, given_rl - given_base
    finishing = d_fin * (to_finishing * given_rl + (1 - to_finishing) * given_base)
    reliability = d_pass * (to_finishing * fin_base + (1 - to_finishing) * fin_rl) - reach
    moved = abs(finishing) + abs(reliability) + abs(reach)
    out = {name: means[name] for name in ("fin_base", "fin_rl", "pass_base", "pass_rl", "robust_reach")} | {"cond_base": cond_base, "cond_rl": cond_rl}
    out |= {"delta": pass_rl - pass_base, "d_fin": d_fin, "d_cond": cond_rl - cond_base, "finishing": finishing, "reliability": reliability, "reach": reach}
    out["finishing_share"] = ratio(abs(finishing), moved)  # of all movement, so that it is defined where terms cancel [deduced]
    if "matched_share" in means:
        matched_base, matched_rl = ratio(means["m_cor_base"], means["m_fin_base"]), ratio(means["m_cor_rl"], means["m_fin_rl"])
        out |= {"matched_base": matched_base, "matched_rl": matched_rl, "matched": matched_rl - matched_base, "matched_share": means["matched_share"]}
        out |= {name: means[name] for name in ("lone_rl", "lone_base", "robust_rl", "robust_base")}
    return out


def bootstrap_weights(problems: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """[resamples + 1, N] weights whose rows sum to 1: row 0 is the sample itself, the others draw N problems with replacement."""
    drawn = rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    return np.concatenate([np.ones((1, problems)), drawn]) / problems


def resampled(terms: dict[str, np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Means over problems under every row of weights: {name: [B, N]} and [R, N] -> {name: [B, R]}. One matrix product."""
    stacked = np.stack([np.asarray(v, float) for v in terms.values()])  # [Q, B, N]
    sums = stacked.reshape(-1, stacked.shape[-1]) @ weights.T
    return dict(zip(terms, sums.reshape(*stacked.shape[:-1], len(weights))))


def intervals(draws: np.ndarray, level: float) -> np.ndarray:
    """[..., R] with the value itself at 0 -> [..., 3]: value, low, high (percentiles of the rest; NaN when over a twentieth of them is undefined)."""
    rest, tail = draws[..., 1:], (1 - level) / 2
    missing = np.isnan(rest)
    low_high = np.quantile(np.where(missing, 0.0, rest), [tail, 1 - tail], axis=-1)
    for at in np.argwhere(missing.any(-1)):
        at = tuple(at)
        known = rest[at][~missing[at]]
        low_high[:, *at] = np.quantile(known, [tail, 1 - tail]) if len(known) > 0.95 * rest.shape[-1] else np.nan
    return np.stack([draws[..., 0], low_high[0], low_high[1]], -1)


def ranks(x: np.ndarray) -> np.ndarray:
    """Average ranks along the last axis. [R, P] -> [R, P]."""
    return np.stack([(x < column[:, None]).sum(-1) + 0.5 * (x == column[:, None]).sum(-1) + 0.5 for column in x.T], -1)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rank correlation over points, for every resample. [R, P] twice -> [R]; NaN where one side has no spread."""
    a, b = (r - r.mean(-1, keepdims=True) for r in (ranks(x), ranks(y)))
    return ratio((a * b).sum(-1), np.sqrt((a * a).sum(-1) * (b * b).sum(-1)))


def reading_budget(budgets: Sequence[int], cap: int | None) -> int:
    """(4) Where a pair is read: the first budget at or above the recipe's training cap; the largest when the cap is unknown or out of reach."""
    return next((b for b in budgets if cap and b >= cap), budgets[-1])


# ---------------------------------------------------------------------------------------------------------------------- lone wins


def sign_test(a: int, b: int) -> float:
    """Two-sided exact probability of a split at least as uneven as a : b when both directions are equally likely; 1 when a + b = 0."""
    return min(1.0, 2 * sum(math.comb(a + b, i) for i in range(min(a, b) + 1)) / 2 ** (a + b))


def chance_wins(fin: np.ndarray, cor: np.ndarray, n: int) -> float:
    """Lone wins per direction to expect if both sides were one model on every problem: their 2n samples dealt out anew. fin, cor: [2, N] counts."""
    total, wrong = cor.sum(0), (fin - cor).sum(0)
    return float(sum(math.comb(int(w), n) / math.comb(2 * n, n) for w, c in zip(wrong, total) if c > 0))


def wilson(hits: int, trials: int) -> tuple[float, float, float]:
    """(share, low, high) at 95 %; NaN without trials."""
    if not trials:
        return (math.nan,) * 3
    z, p = 1.959964, hits / trials
    centre, half = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return p, (centre - half) / (1 + z * z / trials), (centre + half) / (1 + z * z / trials)


def lone_wins(table: Table, verdict: np.ndarray, pair: Pair, budget: int, extra: dict[tuple[str, str, str], list[Record]]) -> list[dict[str, Any]]:
    """(5) Every lone win of a pair at one budget, robust and unrecovered ones first. extra: further samples by (data set, model, problem)."""
    n = table.tokens.shape[-1]
    fin, cor = (c[:, 0] for c in counts_within(table, verdict, [budget]))  # [M, N]
    found = []
    for direction, winner, loser in (("rl", pair.rl, pair.base), ("base", pair.base, pair.rl)):
        w, l = table.models.index(winner), table.models.index(loser)
        for p in np.flatnonzero((fin[l] == n) & (cor[l] == 0) & (cor[w] > 0)):
            more = extra.get((table.dataset, loser, table.problems[p]), [])
            for r in more:
                if not r.finished and r.tokens < budget:
                    raise DataError(
                        f"--recheck, model {loser!r}, problem {r.problem!r}: a sample was cut at {r.tokens} tokens, below the budget {budget}; sample longer"
                    )
            where = [(int(table.file[m, p, j]), int(table.line[m, p, j])) for m in (w, l) for j in range(n)]
            row = {"dataset": table.dataset, "rl": pair.rl, "base": pair.base, "budget": budget, "problem": table.problems[p], "direction": direction}
            row |= {"winner": winner, "loser": loser, "winner_correct": int(cor[w, p]), "samples": n, "robust": bool(2 * cor[w, p] >= n)}
            row |= {"checked": len(more), "recovered": sum(r.correct and r.tokens <= budget for r in more), "records": where}
            found.append(row)
    return sorted(found, key=lambda r: (r["recovered"] > 0, not r["robust"], r["direction"] != "rl", r["problem"]))


def symmetry(rows: Sequence[dict[str, Any]], chance: float) -> dict[str, Any]:
    """Both directions beside each other: counts, sign test, what chance would give, and how often the loser solves the problem with further samples."""
    counts, recovery = {}, {}
    for direction in ("rl", "base"):
        mine = [r for r in rows if r["direction"] == direction]
        checked = [r for r in mine if r["checked"]]
        hits = sum(r["recovered"] > 0 for r in checked)
        counts |= {direction: len(mine), f"robust_{direction}": sum(r["robust"] for r in mine)}
        counts |= {f"checked_{direction}": len(checked), f"recovered_{direction}": hits}
        recovery[f"recovery_{direction}"] = list(wilson(hits, len(checked)))
    return {"counts": counts, "p": sign_test(counts["rl"], counts["base"]), "chance": chance, **recovery}


# ---------------------------------------------------------------------------------------------------------------------- predictions

METRICS = "delta finishing reliability reach robust_reach finishing_share fin_base fin_rl pass_base pass_rl cond_base cond_rl d_fin d_cond".split()
AT_K_1 = "matched matched_base matched_rl matched_share".split()
PREDICTION = re.compile(
    r"(?P<name>[\w.-]+):\s*(?P<quantifier>every|any|mean)\s+(?P<metric>\|\w+\||\w+)\s*(?P<op><=|>=|<|>)\s*(?P<value>[+-]?\d*\.?\d+(?:e[+-]?\d+)?)\s+"
    r"at\s+(?P<budgets>tight|reading|all|\d+(?:,\d+)*)(?:\s+on\s+(?P<datasets>\S+))?(?:\s+for\s+(?P<models>\S+))?(?:\s+k\s+(?P<k>\d+))?\s*"
)


def parse_prediction(text: str) -> dict[str, Any]:
    match = PREDICTION.fullmatch(text)
    form = "NAME: every|any|mean METRIC < NUMBER at BUDGETS|tight|reading|all [on DATASETS] [for RL_MODELS] [k K]"
    if not match:
        raise DataError(f"prediction {text!r} is not of the form {form}")
    k, metric = int(match["k"] or 1), match["metric"].strip("|")
    if metric not in METRICS + AT_K_1:
        raise DataError(f"prediction {text!r}: unknown metric {metric!r}; choose from {', '.join(METRICS + AT_K_1)}, or |METRIC| for its size")
    if metric in AT_K_1 and k != 1:
        raise DataError(f"prediction {text!r}: {metric} exists at k = 1 only")
    lists = {name: match[name].split(",") if match[name] else [] for name in ("datasets", "models")}
    return {
        "text": text,
        **{name: match[name] for name in ("name", "quantifier", "metric", "op", "budgets")},
        "value": float(match["value"]),
        **lists,
        "k": k,
    }


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of a predictions file's content without its own hash, in canonical JSON."""
    return hashlib.sha256(json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def preregister(args: Preregister) -> int:
    predictions = [parse_prediction(text) for text in args.predict]
    names = [p["name"] for p in predictions]
    if len(set(names)) < len(names) or not names:
        raise DataError("--predict: give at least one prediction, each under a name of its own")
    content = {"format": 1, "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "note": args.note, "predictions": list(args.predict)}
    content["sha256"] = digest(content)
    try:
        with open(args.out, "x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise DataError(f"--out {args.out} exists; a registered prediction is never overwritten, choose another name") from None
    except OSError as error:
        raise DataError(f"--out {args.out}: {error.strerror}") from None
    print(f"{args.out}: {len(names)} predictions, {content['written']}, sha256 {content['sha256']}")
    print("Put the hash where others can date it (a commit, a mail, a public note) before the first record is sampled.")
    return 0


def read_predictions(path: str, files: Sequence[str]) -> dict[str, Any]:
    """Content of a predictions file. A changed one raises DataError; record files older than it are named under "late"."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        written, texts = datetime.datetime.fromisoformat(content["written"]), list(content["predictions"])
    except OSError as error:
        raise DataError(f"--predictions {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"--predictions {path}: not a file written by `preregister` ({error})") from None
    if content.get("sha256") != digest(content):
        raise DataError(f"--predictions {path}: content and hash disagree: the file was changed after it was written; score the original")
    late = [f for f in files if os.path.getmtime(f) < written.timestamp()]
    return content | {"parsed": [parse_prediction(text) for text in texts], "late": late}


def score(prediction: dict[str, Any], rows: Sequence[dict[str, Any]], tight: int) -> dict[str, Any]:
    """(6) Whether a prediction held on the rows of the account (first grader). What cannot be measured counts as failed."""
    metric, value = prediction["metric"].strip("|"), prediction["value"]
    rows = [r for r in rows if r["k"] == prediction["k"] and r["grader"] == "matcher"]
    for field, key in (("datasets", "dataset"), ("models", "rl")):
        absent = [name for name in prediction[field] if name not in {r[key] for r in rows}]
        if absent:
            return {"text": prediction["text"], "held": False, "why": f"no rows for {', '.join(absent)}", "rows": 0, "failing": []}
        rows = [r for r in rows if not prediction[field] or r[key] in prediction[field]]
    why = ""
    if prediction["budgets"] in ("tight", "reading", "all"):
        rows = [r for r in rows if prediction["budgets"] == "all" or r["reading" if prediction["budgets"] == "reading" else "tight"]]
    else:
        budgets = [int(b) for b in prediction["budgets"].split(",")]
        pairs = {(r["dataset"], r["rl"], r["base"]) for r in rows}
        rows = [r for r in rows if r["budget"] in budgets]
        if len(rows) < len(pairs) * len(budgets):
            why = "not every pair can be read at every budget"
    values = [(abs if "|" in prediction["metric"] else float)(r["terms"][metric][0]) for r in rows]

    def holds(x: float) -> bool:  # false for NaN
        return {"<": x < value, ">": x > value, "<=": x <= value, ">=": x >= value}[prediction["op"]]

    failing = [{"dataset": r["dataset"], "rl": r["rl"], "base": r["base"], "budget": r["budget"], "value": v} for r, v in zip(rows, values) if not holds(v)]
    mean = sum(values) / len(values) if values else math.nan
    held = {"every": not failing, "any": len(failing) < len(rows), "mean": holds(mean)}[prediction["quantifier"]]
    why = why or ("nothing to test" if not rows else "not measurable" if not held and any(math.isnan(v) for v in values) else "")
    return {"text": prediction["text"], "held": held and not why, "why": why, "rows": len(rows), "failing": failing, "mean": mean}


# ---------------------------------------------------------------------------------------------------------------------- decompose


def analyse(args: Decompose, tables: Sequence[Table], pairs: Sequence[Pair], extra: dict[tuple[str, str, str], list[Record]]) -> dict[str, Any]:
    """The whole account as one JSON-like dict: rows (pair x budget x k x grader), summary, catch_up, lengths, lone wins, warnings."""
    rng, warnings = np.random.default_rng(args.seed), []
    rows, points, catch, lengths, wins, tests = [], [], [], [], [], []
    tight = args.tight or min(8192, max(1, int(min(max(t.tokens.max() for t in tables), min(t.limit(m) for t in tables for m in t.models)) // 4)))
    for table in tables:
        here = [p for p in pairs if {p.rl, p.base} <= set(table.models)]
        if not here:
            continue
        n, problems = table.tokens.shape[-1], len(table.problems)
        budgets, readable = pick_budgets(table, here, args.budgets, warnings)
        weights = bootstrap_weights(problems, args.resamples, rng)  # one draw of problems for all pairs, so that sums over pairs keep their correlation
        fin, cor = counts_within(table, table.correct, budgets)  # [M, B, N]
        judged = counts_within(table, table.judge > 0, budgets)[1]
        name = f" on {table.dataset}" if table.dataset else ""
        for pair in here:
            b, r = table.models.index(pair.base), table.models.index(pair.rl)
            mine = [budgets.index(x) for x in readable[pair]]
            reading = reading_budget(readable[pair], pair.cap)
            if not pair.cap:
                warnings.append(f"{pair.rl}{name}: training cap unknown, so the comparison rule cannot be checked; read at {reading}")
            elif reading < pair.cap:
                warnings.append(f"{pair.rl}{name}: no budget at or above its training cap {pair.cap} can be read; every row of it is below the rule")
            for grader, right in (("matcher", cor), ("judge", judged)):
                if grader == "judge" and (table.judge[[b, r]] < 0).any():
                    continue
                for k in [k for k in sorted(set(args.ks)) if k <= n]:
                    draws = account(resampled(linear_terms(fin[b, mine], right[b, mine], fin[r, mine], right[r, mine], n, k), weights), args.cross)
                    bounds = dict(zip(draws, intervals(np.stack(list(draws.values())), args.level).tolist()))  # name -> [B][value, low, high]
                    for i, budget in enumerate(readable[pair]):
                        row = {"dataset": table.dataset, "rl": pair.rl, "base": pair.base, "cap": pair.cap, "budget": budget, "k": k, "grader": grader}
                        row |= {"problems": problems, "samples": n, "reading": budget == reading, "tight": budget <= tight}
                        row |= {"below_cap": None if not pair.cap else budget < pair.cap, "terms": {m: v[i] for m, v in bounds.items()}}
                        row["few_finished"] = max(row["terms"]["fin_base"][0], row["terms"]["fin_rl"][0]) < 0.06
                        rows.append(row)
                        if k == 1 and grader == "matcher" and budget <= tight:
                            points.append({m: draws[m][i] for m in ("delta", "finishing", "reliability", "reach", "d_fin")} | {"pair": (table.dataset, pair)})
            total, words = table.tokens[[b, r]].sum(-1), table.backtracks[[b, r]]  # [2, N], [2, N, n]
            means = resampled({"base": total[:1] / n, "rl": total[1:] / n}, weights)
            log_ratio = np.log(np.maximum(means["rl"][0], 1) / np.maximum(means["base"][0], 1))
            for point in points:
                if point["pair"] == (table.dataset, pair):
                    point["length"] = log_ratio
            line = {
                "dataset": table.dataset,
                "rl": pair.rl,
                "base": pair.base,
                "tokens_base": float(means["base"][0, 0]),
                "tokens_rl": float(means["rl"][0, 0]),
            }
            line["length_ratio"] = intervals(np.exp(log_ratio), args.level).tolist()
            has = words >= 0
            line |= {"with_text_base": int(has[0].sum()), "with_text_rl": int(has[1].sum()), "answers": problems * n}
            if has.any((1, 2)).all():
                sums = {"words": (words * has).sum(-1), "answers": has.sum(-1), "tokens": (table.tokens[[b, r]] * has).sum(-1)}
                s = {key: resampled({"both": v}, weights)["both"] for key, v in sums.items()}  # [2, R]
                per_answer, per_token = ratio(s["words"], s["answers"]), 1000 * ratio(s["words"], s["tokens"])
                for i, side in enumerate(("base", "rl")):
                    line |= {f"backtracks_{side}": intervals(per_answer[i], args.level).tolist(), f"per_1000_tokens_{side}": float(per_token[i, 0])}
                line["backtracks_ratio"] = intervals(ratio(per_answer[1], per_answer[0]), args.level).tolist()
            lengths.append(line)
            last = mine[-1]
            for i in [i for i in mine[:-1] if budgets[i] <= tight]:
                ahead = cor[r, i] > cor[b, i]
                parts = {"base_then": cor[b, i], "rl_then": cor[r, i], "base_last": cor[b, last], "rl_last": cor[r, last]}
                sums = resampled({"set": ahead[None], **{key: (ahead * v / n)[None] for key, v in parts.items()}}, weights)
                shares = {key: intervals(ratio(sums[key][0], sums["set"][0]), args.level).tolist() for key in parts}
                where = {"dataset": table.dataset, "rl": pair.rl, "base": pair.base, "budget": budgets[i], "last": budgets[last], "problems": int(ahead.sum())}
                catch.append(where | shares)
            found = lone_wins(table, table.correct, pair, reading, extra)
            i = budgets.index(reading)
            test = symmetry(found, chance_wins(fin[[b, r], i], cor[[b, r], i], n))
            tests.append({"dataset": table.dataset, "rl": pair.rl, "base": pair.base, "budget": reading} | test)
            wins += found
    summary: dict[str, Any] = {"tight": tight, "points": len(points)}
    if points:
        stack = {m: np.stack([p[m] for p in points], -1) for m in ("delta", "finishing", "reliability", "reach", "d_fin", "length")}  # [R, points]
        moved = {m: abs(stack[m]).sum(-1) for m in ("finishing", "reliability", "reach")}
        values = {f"{m}_share": ratio(v, sum(moved.values())) for m, v in moved.items()}
        net = stack["delta"].sum(-1)
        values["finishing_of_net"] = np.divide(stack["finishing"].sum(-1), net, out=np.full(len(net), np.nan), where=net != 0)
        if len(points) > 2:
            values["spearman_delta_finishing"] = spearman(stack["delta"], stack["finishing"])
            values["spearman_length_finishing"] = spearman(stack["length"], stack["d_fin"])
        summary |= {key: intervals(v, args.level).tolist() for key, v in values.items()}
    at_cap = [r["terms"]["reach"][0] for r in rows if r["reading"] and r["k"] == 1 and r["grader"] == "matcher"]
    summary |= {"reach_mean": sum(at_cap) / len(at_cap), "reach_max": max(at_cap)}
    cases = sum(c["problems"] for c in catch)
    if cases:
        names = ("base_then", "rl_then", "base_last", "rl_last")
        summary["catch_up"] = {m: sum(c[m][0] * c["problems"] for c in catch if c["problems"]) / cases for m in names} | {"problems": cases}
    pooled = symmetry(wins, sum(t["chance"] for t in tests))
    return {
        "rows": rows,
        "summary": summary,
        "lengths": lengths,
        "catch_up": catch,
        "symmetry": tests,
        "pooled": pooled,
        "lone_wins": wins,
        "warnings": warnings,
    }


def check_flags(args: Decompose) -> None:
    if not 0.5 <= args.level < 1:
        raise DataError(f"--level {args.level}: the coverage of an interval lies between 0.5 and 1")
    if args.resamples < 100:
        raise DataError(f"--resamples {args.resamples}: an interval needs at least 100")
    if not args.ks or min(args.ks) < 1 or 1 not in args.ks:
        raise DataError(f"--ks {' '.join(map(str, args.ks))}: whole numbers from 1, and 1 among them: the report reads at k = 1")
    if args.samples < 0 or args.cap < 0 or args.tight < 0 or not 0 <= args.lm_slack < 1:
        raise DataError("--samples, --cap and --tight are 0 or more, --lm-slack is from 0 to below 1")


def read_recheck(args: Decompose, files: Sequence[str]) -> dict[tuple[str, str, str], list[Record]]:
    """Further samples by (data set, model, problem). A sample given twice, or a file that is among the records too, raises DataError."""
    source = Source(args.recheck, args.lm_metric, args.lm_filter, args.tokenizer, args.lm_slack)
    extra: dict[tuple[str, str, str], list[Record]] = {}
    used = {Path(f).resolve() for f in files}
    for path in (path for given in args.recheck for _, path in source.expand(given)):
        if path.resolve() in used:
            raise DataError(f"--recheck {path}: the file is among --records too; further samples stand in a file of their own")
    for r in source:
        known = extra.setdefault((r.dataset, r.model, r.problem), [])
        if any(k.sample == r.sample for k in known):
            raise DataError(f"{source.files[r.file]} line {r.line}: sample {r.sample} of model {r.model!r}, problem {r.problem!r} is given twice in --recheck")
        known.append(r)
    return extra


def decompose(args: Decompose) -> int:
    """Reads, accounts, prints the summary, writes report.html, metrics.json and lone_wins.jsonl."""
    import outcome_report  # here: jinja2 is not needed by those who import the functions

    started = time.perf_counter()
    check_flags(args)
    source = Source(args.records or (str(ROOT / EXAMPLE),), args.lm_metric, args.lm_filter, args.tokenizer, args.lm_slack)
    tables = build_tables(source, args.samples, args.judge_missing)
    files, notes = list(source.files), [f"{text}: {count}" for text, count in source.notes.items() if count]
    pairs = read_pairs(tables, args.pairs or ("" if args.records else str(ROOT / EXAMPLE.replace(".jsonl", ".pairs.json"))), args.base, args.cap)
    registered = read_predictions(args.predictions, files) if args.predictions else None
    extra = read_recheck(args, files)
    unpaired = sorted({m for t in tables for m in t.models} - {m for p in pairs for m in (p.rl, p.base)})
    notes += [f"models without a pair, not accounted: {', '.join(unpaired)}"] if unpaired else []
    result = analyse(args, tables, pairs, extra)
    if not args.records:
        notes.insert(0, "these records are simulated (python outcome_decomp.py simulate), not measurements of any model")
    result["notes"] = notes
    if registered:
        scores = [score(p, result["rows"], result["summary"]["tight"]) for p in registered["parsed"]]
        result["predictions"] = {key: registered[key] for key in ("written", "sha256", "note", "late")} | {"scores": scores}
    texts = texts_at(source, {tuple(w) for row in result["lone_wins"] for w in row["records"]})
    for row in result["lone_wins"]:
        where = [tuple(w) for w in row["records"]]
        row["records"] = [f"{files[f]}:{line}" for f, line in where]
        if any(w in texts for w in where):
            row["texts"] = {"winner": [texts.get(w, "") for w in where[: row["samples"]]], "loser": [texts.get(w, "") for w in where[row["samples"] :]]}
    result["seconds"] = round(time.perf_counter() - started, 2)
    folder = Path(args.out or f"runs/outcome_decomp__{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"--out {folder} is not an empty folder; choose another one")
    folder.mkdir(parents=True, exist_ok=True)
    outcome_report.write(folder, result, args, files)
    print(outcome_report.terminal(result))
    print(f"{time.perf_counter() - started:.1f} s; report.html, metrics.json and lone_wins.jsonl in {folder}")
    return 0


def simulate_command(args: Simulate) -> int:
    if args.problems < 1 or args.samples < 1:
        raise DataError("--problems and --samples: whole numbers from 1")
    records, _ = simulate(args.seed, args.problems, args.samples)
    pairs = Path(args.out).with_suffix(".pairs.json")
    try:
        count = write_records(args.out, records)
        pairs.write_text(json.dumps(PAIRS, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"--out {args.out}: {error.strerror}") from None
    print(f"{count} simulated records of {len(RECIPES)} models in {args.out}, the pairs in {pairs}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------- subcommands


def sample(args: Sample) -> int:
    import outcome_sample

    return outcome_sample.guarded(outcome_sample.sample, args)


def recheck(args: Recheck) -> int:
    import outcome_sample

    return outcome_sample.guarded(outcome_sample.recheck, args)


def probe(args: Probe) -> int:
    import outcome_probe
    import outcome_sample

    return outcome_sample.guarded(outcome_probe.command, args)


# Name, its flags, what it does. Commands that need torch import it inside their function.
COMMANDS: dict[str, tuple[Any, Any]] = {
    "decompose": (Decompose, decompose),
    "preregister": (Preregister, preregister),
    "simulate": (Simulate, simulate_command),
    "sample": (Sample, sample),
    "recheck": (Recheck, recheck),
    "probe": (Probe, probe),
}


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand, `decompose` when none is named, and returns the exit code; bad data: a message and 2."""
    import tyro

    cls: Any = None
    for name, (flags, _) in COMMANDS.items():
        one = Annotated[flags, tyro.conf.subcommand(name=name)]
        cls = one if cls is None else cls | one
    try:
        if list(argv[:1]) == ["probe"] and any(word.partition("=")[0] == "--resume" for word in argv):
            import outcome_probe

            return probe(outcome_probe.resumed(Probe, argv[1:]))
        args = tyro.cli(cls, args=list(argv) or ["decompose"], prog="outcome_decomp.py", description=__doc__)
        return next(run for flags, run in COMMANDS.values() if type(args) is flags)(args)
    except DataError as error:
        print(f"DataError: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
