# docs: docs/ante_bapo.md
"""ANTE: Anticipate, Then Execute, with BAPO (October 2026).

An agent that repairs code is paid once, when it submits. ANTE lets it write down before every action what it expects of it; running the
action shows whether that was right, and forecasts that were checked place the credit. What departs from GRPO, marked (1) to (6) in the code:

(1) a belief before every action: a summary, a forecast of what the action's run will show (check: PASS, FAIL or NA; clean exit: yes or no),
    and a decision, TRUST or ABSTAIN; the verifier reads the same two fields off the real run, and nothing else;
(2) the warm start learns beliefs written in hindsight: forecasts from what really happened, TRUST where it could be known from what had been
    seen, summaries without words of the result to come; RL stays near it by a KL term;
(3) the forecast's value tokens learn by cross-entropy to what happened, and by nothing else; summary tokens learn by nothing;
(4) where a check ran: TRUST and right +alpha, TRUST and wrong -alpha q*/(1 - q*), ABSTAIN -kappa: TRUST pays above an accuracy of about q*;
(5) BAPO: steps of a task that forecast the same are one group; a step's return is compared with its group's mean, and the mean of those
    who decided alike with the mean of all;
(6) at test time, where it abstains or expects FAIL, the policy writes further candidates, and the one whose own belief is best is executed.

Laptop, two CPU cores (not timed yet):     python ante_bapo.py
Credit and belief of the baselines:        python ante_bapo.py --credit task ... --credit gigpo ... --belief reactive
One GPU:                                   python ante_bapo.py --model Qwen/Qwen2.5-1.5B-Instruct --env repo:FOLDER --trajectories FILE --learning-rate 1e-6
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml ante_bapo.py --model ... --env ...
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from ante_beliefs import (
    CHECKS,
    EXITS,
    Belief,
    BeliefEnv,
    annotate,
    outcome,
    parse_belief,
    read_trajectories,
    successful_conversations,
    warm_start_conversations,
)  # fmt: skip
from ante_report import FACTORS, belief_metrics, draw_reliability, episode_record, reliability, viewer_episode, with_verdict
from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sample, Sampling, make_engine
from common.packing import EMPTY, PackedBatch, Policy, check_packing, micro_batches, pack_rows
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids, token_spans
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.rollout import Episode, Layout, Turn, encode, episode_metrics, make_layout, observation_frame, rollout
from common.run import Run
from common.sandbox import isolation_problem
from common.sft import fine_tune
from common.viewer import write_credit_html
from kernels.segment_scan import segment_scan, segment_stats


@dataclass
class Args:
    # --- run
    stage: Literal["all", "sft", "rl", "tto"] = "all"
    """sft: the warm start alone, written to RUN/warm_start; rl: from --model as it is; tto: no training, evaluation only; all: sft, rl, evaluation"""
    env: str = "repo"
    """task: repo is generated, repo:large longer; real data: repo:FOLDER (Harbor tasks or SWE-bench records); any other family of several turns"""
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
    """compute common beginnings of episodes once instead of once per episode (exact); auto: on where the model allows it"""
    require_sandbox: bool = False
    """stop where test runs cannot be isolated (bubblewrap), instead of a warning"""
    seed: int = 1
    """seed of data order and sampling; every turn has its own stream from (seed, update, task, sample, turn)"""
    num_updates: int = 16
    """rollout-and-update rounds"""
    eval_every: int = 4
    """updates between evaluations on the unseen split (0: only at the start and the end)"""
    eval_tasks: int = 96
    """evaluation tasks, greedy decoding"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__ante_bapo__<seed>__<time>"""
    track: bool = False
    """log to Weights & Biases too"""
    # --- training
    groups_per_update: int = 16
    """tasks per update, over all processes"""
    group_size: int = 8
    """episodes per task"""
    max_turns: int = 0
    """assistant messages per episode (0: the environment family's own number)"""
    max_new_tokens: int = 64
    """length limit of one assistant message, belief included"""
    temperature: float = 1.0
    """of sampling and of every log-prob in the loss"""
    learning_rate: float = 2e-4
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 3
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 2
    """passes over each rollout; in the first step after a rollout every ratio is exactly 1"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 8192
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float = 0.2
    """ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.28
    """ratio is clipped above at 1 + clip_high [paper: asymmetric; values deduced]"""
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    kl_coef: float = 0.01
    """coefficient of the k3 estimate of KL(policy || warm start) in the loss, on the tokens of the policy term, each estimate capped at 10 [value deduced]"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """mean over all tokens of the policy term in the update, or mean over each episode, then over episodes"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm"""
    advantage_eps: float = 1e-6
    """added to standard deviations (ddof 1)"""
    # --- ANTE
    belief: Literal["ante", "retrospective", "reactive"] = "ante"
    """before an action: summary, forecast and decision; a summary of what happened only; nothing. From the same trajectories"""
    credit: Literal["bapo", "task", "gigpo", "rebel"] | None = None
    """second term of a step's advantage compares steps with the same forecast; none (GRPO); same state of the environment; same predicate of it
    (last verdict, and whether anything changed since). None: bapo with --belief ante, else task"""
    omega: float = 0.5
    """weight of the second term [paper: 1/2]"""
    decision_term: Literal["q_minus_v", "g_minus_q"] = "q_minus_v"
    """bapo: what is added to g - V: the mean of those who decided alike less the mean of all, or the return less that mean [deduced: the text allows both]"""
    pred_loss: bool = True
    """cross-entropy of the forecast's value tokens to what happened"""
    pred_coef: float = 0.03
    """its weight in the loss, per value token [deduced]"""
    pred_steps: Literal["all", "conclusive"] = "all"
    """steps whose forecast is trained: all that ran, or only those where a check ran [deduced: the text says verifiable]"""
    alpha: float = 0.1
    """decision reward of TRUST and right, where solving the task earns 1 [deduced]"""
    q_star: float = 0.7
    """accuracy from which TRUST pays; TRUST and wrong costs alpha q*/(1 - q*) [formula: paper; value deduced]"""
    kappa: float = 0.005
    """cost of ABSTAIN [deduced]"""
    sft_steps: int | None = None
    """stages sft and all: optimizer steps on annotated successful trajectories; None: 0 for tiny, which is built on annotated trajectories, else 50"""
    sft_batch: int = 8
    """trajectories per step of the warm start [deduced]"""
    sft_learning_rate: float = 2e-5
    """of the warm start, decaying linearly to 0 [deduced]"""
    trajectories: str = ""
    """jsonl of recorded trajectories for the warm start instead of scripted ones: messages, and per assistant message its check and exit (docs/ante_bapo.md)"""
    test_time: Literal["plain", "tto", "tts4", "both"] | None = None
    """at the end, beside plain decoding: tto executes the best of --candidates by their own beliefs where the policy abstains or expects FAIL; tts4 plays four
    whole episodes and hands in the one whose last belief is best. None: tto with --belief ante, else plain"""
    candidates: int = 3
    """tto: beliefs and actions compared at a step, the first of plain decoding included [paper: K = 3]"""


def resolve(args: Args) -> Args:
    """The arguments with every None replaced."""
    ante, warm = args.belief == "ante", args.stage in ("sft", "all") and args.model != "tiny"
    return replace(
        args,
        credit=args.credit or ("bapo" if ante else "task"),
        test_time=args.test_time or ("tto" if ante else "plain"),
        sft_steps=50 * warm if args.sft_steps is None else args.sft_steps,
    )


# --------------------------------------------------------------------------------------------------------------- rollout


SUMMARY, FORECAST, DECISION, ACTION = range(4)  # factors of a message; each token belongs to one


@dataclass
class Step:
    """What a turn forecast and what came of it."""

    belief: Belief
    truth: tuple[str, str]  # (check, exit), off the real run
    factors: list[int]  # of each token: SUMMARY, FORECAST, DECISION or ACTION
    confidence: float  # probability that the policy gave to its own forecast; nan without one
    first_value: int  # first of the forecast's value tokens, from the turn's start
    target_ids: list[int]  # (3) what should stand in place of the value tokens; empty without a forecast

    @property
    def right(self) -> bool:
        """Whether both fields came true; a message without a belief forecasts nothing."""
        return self.belief.well_formed and (self.belief.check, self.belief.exit) == self.truth

    @property
    def conclusive(self) -> bool:
        return self.truth[0] != "NA"


def read_step(turn: Turn, token_ids: Sequence[int], logprobs: Sequence[float], tokenizer, kind: str) -> Step:
    """token_ids and logprobs: the turn's own. A token that touches the forecast's values is theirs, so is its whole text."""
    belief, truth = parse_belief(turn.text, kind), outcome(turn.info)
    if kind != "ante":
        return Step(belief, truth, [ACTION] * len(token_ids), float("nan"), 0, [])
    spans = token_spans(tokenizer, token_ids)
    parts = ((FORECAST, belief.values), (SUMMARY, belief.summary), (DECISION, belief.decided))

    def factor(a: int, b: int) -> int:
        return next((name for name, (start, stop) in parts if a < stop and b > start), ACTION)

    factors = [factor(a, b) for a, b in spans]
    if not belief.well_formed:  # what there is of a forecast learns by nothing
        return Step(belief, truth, factors, float("nan"), 0, [])
    at = [i for i, f in enumerate(factors) if f == FORECAST]
    first, last = at[0], at[-1]
    target = list(token_ids[first : last + 1])
    if (belief.check, belief.exit) != truth:
        written = turn.text[spans[first][0] : belief.values[0]] + " ".join(truth) + turn.text[belief.values[1] : spans[last][1]]
        target = tokenizer(written, add_special_tokens=False).input_ids
    return Step(belief, truth, factors, float(np.exp(sum(logprobs[first : last + 1]))), first, target)


def keep_states(states: dict[tuple[int, int], list[str]]) -> Callable[[Episode, BeliefEnv], None]:
    """A hook for `rollout` that keeps the environment's state before each action, by (group, sample)."""
    return lambda e, game: states.setdefault((e.group, e.sample), []).append(game.state_key())


class Anticipator:
    """(6) Stands between `rollout` and the engine. Where the message abstains or expects FAIL, `candidates` - 1 more are sampled, and the one whose own belief
    ranks first is handed on; the others are executed nowhere. `tokens` counts all that was sampled, `asked` and `changed` the messages it was done for."""

    def __init__(self, engine, tokenizer, kind: str, candidates: int, temperature: float):
        self.engine, self.tokenizer, self.kind, self.candidates, self.temperature = engine, tokenizer, kind, candidates, temperature
        self.pad_token_id, self.end_sessions = engine.pad_token_id, engine.end_sessions
        self.tokens = self.asked = self.changed = 0

    def belief(self, sample: Sample) -> Belief:
        body = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        return parse_belief(self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False), self.kind)

    def generate(self, prompts, sampling: Sampling, n: int, seeds, session_ids) -> list[list[Sample]]:
        samples = self.engine.generate(prompts, sampling, n, seeds, session_ids)
        asked = [i for i, [s] in enumerate(samples) if asks(self.belief(s))]
        extra = [[int(x) for x in np.random.default_rng([seeds[i][0]]).integers(0, 2**62, self.candidates - 1)] for i in asked]
        hotter = replace(sampling, temperature=self.temperature)
        more = self.engine.generate([prompts[i] for i in asked], hotter, self.candidates - 1, extra) if asked and self.candidates > 1 else [[] for _ in asked]
        self.tokens += sum(len(s.token_ids) for row in (*samples, *more) for s in row)
        for i, row in zip(asked, more):
            options = [*samples[i], *row]
            best = min(options, key=lambda s: belief_rank(self.belief(s)))  # the first of equals: plain decoding's own
            self.changed += best is not options[0]
            samples[i] = [best]
        self.asked += len(asked)
        return samples


def asks(belief: Belief) -> bool:
    """(6) Whether a belief triggers further candidates."""
    return belief.decision == "ABSTAIN" or belief.check == "FAIL"


def belief_rank(belief: Belief) -> tuple[int, int]:
    """(6) PASS before NA before FAIL, then clean exit."""
    return ("PASS", "NA", "FAIL").index(belief.check), EXITS.index(belief.exit)


# ------------------------------------------------------------- the paper's functions: tensors in, tensors and metrics out


# region group_advantages
def group_advantages(returns: torch.Tensor, group_ids: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO: (R - mean_g) / (std_g + eps), std with ddof 1; exactly 0 in a group whose episodes all earned the same.

    returns [E] float64, group_ids [E] -> (advantages [E], varies [E] bool)
    """
    order = torch.argsort(group_ids, stable=True)
    groups = F.pad(torch.unique_consecutive(group_ids[order], return_counts=True)[1].cumsum(0), (1, 0))  # [G + 1]
    r, of = returns[order], torch.repeat_interleave(torch.arange(len(groups) - 1), groups.diff())
    high, low = segment_stats(r, groups).max, -segment_stats(-r, groups).max
    centred = r - segment_stats(r, groups).mean[of]
    std = (segment_stats(centred, groups).second_moment * groups.diff() / (groups.diff() - 1).clamp(min=1)).sqrt()
    varies = (high > low)[of]
    back = torch.argsort(order)
    return torch.where(varies, centred / (std[of] + eps), 0.0)[back], varies[back]


# endregion


def decision_rewards(trusts: torch.Tensor, right: torch.Tensor, conclusive: torch.Tensor, alpha: float, q_star: float, kappa: float) -> torch.Tensor:
    """(4) TRUST: alpha when right, -alpha q*/(1 - q*) when wrong; ABSTAIN: -kappa; 0 where no check ran. All [T] bool -> [T] float64"""
    earns = torch.tensor([alpha, -alpha * q_star / (1 - q_star), -kappa, 0.0], dtype=torch.float64)
    return earns[torch.where(conclusive, torch.where(trusts, (~right).long(), 2), 3)]


def decision_returns(rewards: torch.Tensor, task_rewards: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(5) g[i, t] = decision rewards from step t on + the task reward of episode i. rewards [T], task_rewards [E] -> [T] [task reward's part deduced]"""
    return segment_scan(rewards, 1.0, layout.episode_turns) + torch.repeat_interleave(task_rewards, layout.episode_turns.diff())


def key_ids(keys: Sequence[Any]) -> torch.Tensor:
    """One number for each distinct key, in order of appearance. [T] int64"""
    known: dict[Any, int] = {}
    return torch.tensor([known.setdefault(key, len(known)) for key in keys], dtype=torch.int64)


def group_mean(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over each value's group and the group's size; exactly the value itself where all of a group are equal. values [T] float64, ids [T] -> [T], [T]"""
    number = int(ids.max()) + 1 if len(ids) else 0
    size = torch.bincount(ids, minlength=number)
    zeros = torch.zeros(number, dtype=torch.float64)
    base = zeros.scatter_reduce(0, ids, values, "amin", include_self=False)
    return (base + zeros.index_add(0, ids, values - base[ids]) / size.clamp(min=1))[ids], size[ids]


def step_terms(
    g: torch.Tensor, keys: torch.Tensor, decisions: torch.Tensor | None, groups: torch.Tensor, decision_term: str, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(5) ((g - V) + D) / (std + eps): V the mean of g over the steps of a key, Q over those of them that decided alike, D = Q - V or g - Q; std (ddof 1) of g
    over the steps of a task. Without decisions D is 0 (keys that are no forecasts). 0 for a key with one step.

    g [T] float64; keys, decisions, groups (task) [T] int64, equal keys only within a task -> (terms [T], size of each step's group [T])
    """
    v, size = group_mean(g, keys)
    d = torch.zeros_like(g)
    if decisions is not None:
        q = group_mean(g, key_ids(list(zip(keys.tolist(), decisions.tolist()))))[0]
        d = q - v if decision_term == "q_minus_v" else g - q
    mean, count = group_mean(g, groups)
    std = (group_mean((g - mean) ** 2, groups)[0] * count / (count - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, (g - v + d) / (std + eps), 0.0), size


def coverage(keys: torch.Tensor, episodes: torch.Tensor) -> torch.Tensor:
    """Whether a step of another episode has the same key, so that a comparison between episodes exists. keys, episodes [T] int64 -> [T] bool"""
    pairs = torch.unique(torch.stack([keys, episodes]), dim=1)
    return torch.bincount(pairs[0], minlength=1)[keys] > 1


def policy_loss(
    logprobs: torch.Tensor,  # [N] with gradient
    old_logprobs: torch.Tensor,  # [N] trainer, before the update
    rollout_logprobs: torch.Tensor,  # [N] engine
    advantages: torch.Tensor,  # [N]
    token_weights: torch.Tensor,  # [N] 0 on summary and forecast tokens; they sum to 1 over the optimizer step, all processes together
    clip_low: float,
    clip_high: float,
    tis_cap: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """Clipped policy-gradient loss with the KL term, weighted sum over tokens. Metrics are (sum, count) pairs over tokens of weight above 0."""
    logratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = logratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    mismatch = (old_logprobs - rollout_logprobs).clamp(-20, 20)
    if tis_cap > 0:
        loss = loss * mismatch.exp().clamp(max=tis_cap)
    with torch.no_grad():
        own = token_weights > 0
        n = float(own.sum())
        clipped = (advantages > 0) & (ratio > 1 + clip_high) | (advantages < 0) & (ratio < 1 - clip_low)
        metrics = {
            "losses/policy_loss": (float((loss * token_weights).sum()), 0.0),  # counted once per optimizer step by the caller
            "losses/approx_kl": (float((ratio - 1 - logratio)[own].sum()), n),
            "losses/old_approx_kl": (float(-logratio[own].sum()), n),
            "losses/clipfrac": (float(clipped[own].sum()), n),
            "rollout/tis_capped_frac": (float((mismatch.exp() > tis_cap)[own].sum()) if tis_cap > 0 else 0.0, n),
        }
    if ref_logprobs is not None:
        d = (ref_logprobs - logprobs).clamp(-20, 20)
        k3 = (d.exp() - d - 1).clamp(max=10)
        loss = loss + kl_coef * k3
        metrics["losses/kl"] = (float(k3.detach()[own].sum()), n)
    return (loss * token_weights).sum(), metrics


def forecast_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(3) L_pred: cross-entropy of the value tokens of what really happened, -sum weight * log-prob; weights sum to 1 over the optimizer step. Both [M]"""
    return -(logprobs * weights).sum()


# ---------------------------------------------------------------------------------------------------------- measurements


def forecast_targets(
    episodes: Sequence[Episode], beliefs: Sequence[Sequence[Step]], layout: Layout, which: str, context: int
) -> tuple[torch.Tensor, list[list[tuple[int, list[int]]]]]:
    """(3) The tokens that L_pred is about: [N] bool, value tokens of forecasts that came true, as they stand; and for each episode what is to stand in place
    of the others, (place in its token_ids, target ids). which: all, conclusive or none. A target that goes beyond the context is left out."""
    right = torch.zeros(len(layout.turn_ids), dtype=torch.bool)
    replaced: list[list[tuple[int, list[int]]]] = [[] for _ in episodes]
    start = iter(layout.turns.tolist())
    for e, steps, places in zip(episodes, beliefs, replaced):
        for turn, s, first in zip(e.turns, steps, start):
            at = turn.start + s.first_value
            if not s.target_ids or which == "none" or (which == "conclusive" and not s.conclusive):
                continue
            if s.right:
                right[first + s.first_value : first + s.first_value + len(s.target_ids)] = True
            elif len(e.prompt_ids) + at + len(s.target_ids) <= context:
                places.append((at, s.target_ids))
    return right, replaced


def step_keys(episodes: Sequence[Episode], beliefs: Sequence[Sequence[Step]], states: dict[tuple[int, int], list[str]]) -> dict[str, torch.Tensor]:
    """Group keys of every step, all within its task: the forecast (bapo); the state before the action (gigpo); the last verdict before it and whether the
    state changed since (rebel). -> name -> [T] int64"""
    found: dict[str, list[tuple]] = {"bapo": [], "gigpo": [], "rebel": []}
    for e, steps in zip(episodes, beliefs):
        verdict, judged = "none", None
        for s, state in zip(steps, states[e.group, e.sample]):
            found["bapo"].append((e.group, s.belief.check, s.belief.exit))
            found["gigpo"].append((e.group, state))
            found["rebel"].append((e.group, verdict, judged is not None and state != judged))
            if s.conclusive:
                verdict, judged = s.truth[0], state
    return {name: key_ids(keys) for name, keys in found.items()}


# ---------------------------------------------------------------------------------------------------------------- policy


# -------------------------------------------------------------------------------------------------------- reports

PANELS = [
    Panel("Forecasts that came true", ("ante/hit_rate", "ante/trust_precision", "ante/abstain_hit_rate"), limits=(0, 1)),
    Panel("Trusted forecasts", ("ante/trust_rate",), limits=(0, 1)),
    Panel("Success of training episodes", ("charts/success",), limits=(0, 1)),
    Panel("Verdict on the own episode", ("ante/verdict_accuracy", "ante/verdict_mcc"), limits=(-1, 1)),
    Panel("Steps with a comparison", ("ante/coverage/*",), limits=(0, 1)),
    Panel("Cross-entropy of forecasts", ("losses/pred_loss",), unit="nats per token"),
    Panel("Turns per episode", ("charts/turns",)),
]
# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded. `args` after `resolve`."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "save_every": 0, "groups_per_update": 1, "group_size": 2, "max_turns": 0, "max_new_tokens": 1,
        "update_epochs": 1, "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "kl_coef": 0, "tis_cap": 0, "advantage_eps": 0,
        "learning_rate": 0, "clip_high": 0, "seed": 0, "omega": 0, "pred_coef": 0, "alpha": 0, "kappa": 0, "sft_steps": 0, "sft_batch": 1,
        "sft_learning_rate": 0, "candidates": 1,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm"))
    if not 0 <= args.clip_low <= 1:
        raise ArgumentError(f"--clip-low {args.clip_low}: must lie in [0, 1]")
    if not 0 <= args.q_star < 1:
        raise ArgumentError(f"--q-star {args.q_star}: must lie in [0, 1); at 1 a wrong TRUST would cost infinitely much")
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.belief != "ante" and args.credit == "bapo":
        raise ArgumentError(f"--credit bapo: groups steps by their forecasts, and --belief {args.belief} writes none; choose task, gigpo or rebel")
    if args.belief != "ante" and args.test_time != "plain":
        raise ArgumentError(f"--test-time {args.test_time}: chooses by beliefs, and --belief {args.belief} writes none; choose plain")
    if args.stage == "sft" and args.model != "tiny" and args.sft_steps == 0:
        raise ArgumentError(f"--stage sft with --sft-steps 0: nothing would be trained for --model {args.model}")
    if (args.trajectories or args.sft_steps) and args.stage in ("rl", "tto"):
        raise ArgumentError(f"--stage {args.stage}: has no warm start; leave out --trajectories and --sft-steps, or choose sft or all")


def main(args: Args) -> Run:
    args = resolve(args)
    check_args(args)
    processes = Processes()
    device, world, rank = processes.device, processes.world, processes.rank
    if args.groups_per_update % world or args.groups_per_update // world < args.num_minibatches:
        raise ArgumentError(f"--groups-per-update {args.groups_per_update}: must be a multiple of {world} processes, --num-minibatches or more groups each")
    engine_kind = ("vllm" if device.type == "cuda" else "torch") if args.engine == "auto" else args.engine
    if args.rollout_format == "fp8_kv" and engine_kind == "torch":
        raise ArgumentError("--rollout-format fp8_kv: the torch engine keeps its cache in the model's precision; use --engine vllm")
    if args.require_sandbox and (problem := isolation_problem()):
        raise ArgumentError(f"--require-sandbox: {problem}")
    bf16 = args.precision == "bf16" or (args.precision == "auto" and device.type == "cuda")
    amp = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext
    trains = args.stage in ("all", "rl")
    if processes.is_main:
        print(f"stage {args.stage}: belief {args.belief}, credit {args.credit}, test time {args.test_time}, warm-start steps {args.sft_steps}", flush=True)

    # tasks and policy
    tasks = envs.load(args.env)
    max_turns = args.max_turns or tasks.max_turns
    games = [BeliefEnv(tasks.make_env(), args.belief) for _ in range(tasks.workers or args.groups_per_update // world * args.group_size)]
    if args.credit in ("gigpo", "rebel") and not hasattr(games[0].env, "state_key"):
        raise ArgumentError(f"--credit {args.credit}: needs to tell states apart, and --env {args.env} has no state_key; choose bapo or task")
    recorded: list[list[dict]] = []
    if args.trajectories:
        found, counts = read_trajectories(args.trajectories, CHECKS, EXITS)
        annotated = [annotate(messages, steps, args.belief) for messages, steps in found]
        recorded = [conversation for conversation, _ in annotated]
        if processes.is_main:
            print(f"--trajectories {args.trajectories}: {counts}, summaries dropped for leaks: {sum(n for _, n in annotated)}", flush=True)
    with processes.main_first():
        scripted = (lambda: recorded or warm_start_conversations(tasks, args.belief)) if recorded or tasks.careless else None
        lm, tokenizer, _ = load_policy(args.model, scripted, TinyConfig(), device=device)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    share = args.share_prompts != "off"
    try:
        check_packing(lm, share)
    except (ValueError, TypeError) as e:
        if not share or args.share_prompts == "on":
            raise
        if processes.is_main:
            print(f"shared prompts are off: {e}", file=sys.stderr)
        share = False
        check_packing(lm, share)
    context = lm.config.max_position_embeddings
    sampling = Sampling(args.temperature, args.max_new_tokens, stop_token_ids(lm, tokenizer))
    greedy = Sampling(0.0, args.max_new_tokens, sampling.stop_token_ids)
    observation_frame(tokenizer, sampling.stop_token_ids)  # refuses a chat template that cannot go on after a message
    for split, rows in (("train", tasks.train), ("eval", tasks.eval[: args.eval_tasks])) if not tasks.workers else ():  # a simulator's reset takes too long
        for task in rows:
            length = len(encode(tokenizer, games[0].reset(task)))
            if length + args.max_new_tokens > context:
                raise envs.DataError(
                    f"--env {args.env}: {split} task {task['id']!r} has {length} prompt tokens, with --max-new-tokens {args.max_new_tokens} more than the "
                    f"context of {context} of --model {args.model}: lower --max-new-tokens, take the task out of the data or choose a model with more context"
                )

    run = Run(
        args,
        "ante_bapo",
        total_updates=args.num_updates if trains else 0,
        key_metrics=["eval/success", "charts/success", "ante/hit_rate", "ante/trust_precision", f"eval/{args.test_time}/success"],
        **distributed(),
    )

    # --- (2) warm start
    warm_folder, sft_metrics = run.folder / "warm_start", {}
    if (args.sft_steps or args.stage == "sft") and not args.resume:
        with run.timer("sft"):
            chosen = recorded or (successful_conversations(tasks, args.belief) if args.sft_steps else [])
            lm, sft_metrics = fine_tune(
                lm, tokenizer, chosen, warm_folder, steps=args.sft_steps, batch_size=args.sft_batch, learning_rate=args.sft_learning_rate,
                max_grad_norm=args.max_grad_norm, micro_batch_tokens=args.micro_batch_tokens, seed=args.seed, stop_token_ids=sampling.stop_token_ids,
                processes=processes, parallel=args.parallel, share_prompts=share, pad_id=pad_id, bf16=bf16,
            )  # fmt: skip
    if args.sft_steps and args.resume:
        lm = load_policy(str(warm_folder), device=device)[0]

    # start policy for the KL term; engine; parallel wrappers; optimizer
    start_policy = Policy(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 and trains else None
    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    only_kv = args.rollout_format == "fp8_kv"
    engine = make_engine(
        engine_kind, engine_lm, tokenizer, max_model_len=context,
        rollout_format="auto" if only_kv else args.rollout_format, kv_cache_dtype="fp8" if only_kv else None,
    )  # fmt: skip
    bare = Policy(lm)
    policy = processes.wrap(bare, lm.base_model.layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    def play(numbered: Sequence[tuple[int, dict]], n: int, how: Sampling, update: int, keep: Callable | None = None, by: Any = engine) -> list[Episode]:
        return rollout(by, tokenizer, games, tasks.workers, numbered, n, how, max_turns, context, args.seed, update, keep)

    def read(episodes: Sequence[Episode]) -> list[list[Step]]:
        """Beliefs and outcomes of all turns."""
        out = []
        for e in episodes:
            at = iter(e.logprobs)
            logprobs = [[next(at) for _ in range(t.stop - t.start)] for t in e.turns]
            out.append([read_step(t, e.token_ids[t.start : t.stop], lp, tokenizer, args.belief) for t, lp in zip(e.turns, logprobs)])
        return out

    first_update = 0
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)
    forecasts: list[tuple[float, bool, bool]] = []  # (confidence, right, trusted) on checked steps of the newest evaluation

    def evaluate(last: bool) -> dict[str, float]:
        """Greedy success on the unseen split and how good beliefs were; at the last evaluation also what --test-time asks for."""
        numbered = list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world]
        everything = play(numbered, 1, greedy, -1)
        es = [e for e in everything if not e.error]
        spent = sum(len(e.logprobs) for e in everything)  # token ratios count all that was sampled, also where an environment failed later
        sums = {"eval/success": (sum(e.success for e in es), len(es)), "eval/error_frac": (len(everything) - len(es), len(everything))}
        sums["eval/turns"] = (sum(len(e.turns) for e in es), len(es))
        sums["eval/length"] = (sum(len(e.logprobs) for e in es), len(es))
        sums["eval/truncated_frac"] = (sum(bool(e.truncated) for e in es), len(es))
        for name in {name for e in es for name in e.rewards}:
            found = np.array([e.rewards.get(name, np.nan) for e in es])
            sums[f"eval/reward/{name}"] = (float(np.nansum(found)), float(np.sum(~np.isnan(found))))
        if args.belief == "ante":
            beliefs = read(es)
            sums |= {f"eval/{name}": value for name, value in belief_metrics(list(zip(es, beliefs))).items()}
            mine = [(s.confidence, s.right, s.belief.decision == "TRUST") for own in beliefs for s in own if s.conclusive and s.target_ids]
            forecasts[:] = [f for part in run.gather(mine) for f in part]
        if last and args.test_time in ("tto", "both"):
            chooser = Anticipator(engine, tokenizer, args.belief, args.candidates, args.temperature)
            all_chosen = play(numbered, 1, greedy, -1, by=chooser)
            chosen, turns = [e for e in all_chosen if not e.error], sum(len(e.turns) for e in all_chosen)
            sums["eval/tto/success"] = (sum(e.success for e in chosen), len(chosen))
            sums["eval/tto/token_ratio"] = (chooser.tokens, spent)
            sums["eval/tto/asked_frac"], sums["eval/tto/changed_frac"] = (chooser.asked, turns), (chooser.changed, turns)
        if last and args.test_time in ("tts4", "both"):
            all_four = play(numbered, 4, sampling, -1)
            four = [e for e in all_four if not e.error]
            picked = {}
            for e, _ in sorted(zip(four, read(four)), key=lambda pair: belief_rank(pair[1][-1].belief) if pair[1] else (3, 0)):
                picked.setdefault(e.group, e)
            sums["eval/tts4/success"] = (sum(e.success for e in picked.values()), len(picked))
            sums["eval/tts4/mean_success"] = (sum(e.success for e in four), len(four))
            sums["eval/tts4/token_ratio"] = (sum(len(e.logprobs) for e in all_four), spent)
        metrics = with_verdict(reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)}), "eval/")
        if forecasts:
            metrics["eval/calibration_error"] = reliability([f[0] for f in forecasts], [f[1] for f in forecasts])[1]
        return metrics

    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        run.log(evaluate(not trains) | sft_metrics, step=0)

    for update in range(first_update, args.num_updates) if trains else ():
        started = time.perf_counter()
        sums: dict[str, tuple[float, float]] = {}

        def add(metrics: dict[str, tuple[float, float]], sums: dict[str, tuple[float, float]] = sums) -> None:
            for key, (total, count) in metrics.items():
                old = sums.get(key, (0.0, 0.0))
                sums[key] = (max(old[0], total) if is_maximum(key) else old[0] + total, old[1] + count)

        # --- roll out
        states: dict[tuple[int, int], list[str]] = {}
        with run.timer("rollout"):
            stream = [divmod(update * args.groups_per_update + g, len(tasks.train)) for g in range(args.groups_per_update)]
            orders = {epoch: np.random.default_rng([args.seed, epoch]).permutation(len(tasks.train)) for epoch, _ in stream}
            mine = [(g, tasks.train[orders[epoch][at]]) for g, (epoch, at) in enumerate(stream)][rank::world]
            everything = play(mine, args.group_size, sampling, update, keep_states(states))
        measured = [e for e in everything if not e.error]  # an episode whose environment failed is counted below and takes no part
        episodes = [e for e in measured if e.turns]
        items = [(e.prompt_ids, e.token_ids) for e in episodes]
        layout = make_layout([[t.stop - t.start for t in e.turns] for e in episodes])
        offset = layout.episodes.tolist()
        rollout_logprobs = torch.tensor([x for e in episodes for x in e.logprobs], dtype=torch.float32)

        # --- (1) (4) what was forecast, what happened, what it earns
        with run.timer("reward"):
            beliefs = read(episodes)
            flat = [s for own in beliefs for s in own]
            factors = torch.tensor([f for s in flat for f in s.factors], dtype=torch.int64)  # [N]
            trusts, right, conclusive = (
                torch.tensor(x, dtype=torch.bool) for x in ([s.belief.decision == "TRUST" for s in flat], [s.right for s in flat], [s.conclusive for s in flat])
            )
            forecasting = conclusive if args.belief == "ante" else torch.zeros_like(conclusive)
            rewards = decision_rewards(trusts, right, forecasting, args.alpha, args.q_star, args.kappa)

        # --- (5) advantages
        returns = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
        group_ids = torch.tensor([e.group for e in episodes], dtype=torch.int64)
        task_adv, varies = group_advantages(returns, group_ids, args.advantage_eps)
        episode_of = torch.repeat_interleave(torch.arange(len(episodes)), layout.episode_turns.diff())  # [T]
        keys = step_keys(episodes, beliefs, states)
        step_adv = task_adv[episode_of]
        if args.credit != "task":
            g = decision_returns(rewards, returns, layout)
            by = trusts.long() if args.credit == "bapo" else None
            term, _ = step_terms(g, keys[args.credit], by, group_ids[episode_of], args.decision_term, args.advantage_eps)
            step_adv = step_adv + args.omega * term
            add({"ante/second_term_abs": (float(term.abs().sum()), float(len(term)))})
        token_adv = step_adv[layout.turn_ids].float()
        for name, ids in keys.items():
            compared = coverage(ids, episode_of) if len(ids) else ids.bool()
            add(
                {f"ante/coverage/{name}": (float(compared.sum()), float(len(ids))), f"ante/group_size/{name}": (float(len(ids)), float(len(set(ids.tolist()))))}
            )

        # --- (3) which tokens learn by what
        has_policy_term = (factors == ACTION) | (factors == DECISION)
        right_tokens, replaced = forecast_targets(episodes, beliefs, layout, args.pred_steps if args.pred_loss else "none", context)
        policy_tokens, pred_tokens = (torch.bincount(layout.episode_ids[x], minlength=len(episodes)) for x in (has_policy_term, right_tokens))
        pred_tokens = pred_tokens + torch.tensor([sum(len(ids) for _, ids in own) for own in replaced], dtype=torch.int64)
        costs = [sum(len(ids) + (0 if share else len(e.prompt_ids) + at) for at, ids in own) for e, own in zip(episodes, replaced)]
        sizes = [(p, range(len(ids) + cost)) for (p, ids), cost in zip(items, costs)]  # for `micro_batches`, which takes lengths

        def packed(batch: list[int], episodes: list = episodes, items: list = items, replaced: list = replaced) -> PackedBatch:
            """The episodes' own tokens, then the targets of their replaced forecasts."""
            extra = [(items[i][0], items[i][1][:at] + ids) for i in batch for at, ids in replaced[i]]
            masks = [episodes[i].policy_mask for i in batch] + [[False] * at + [True] * len(ids) for i in batch for at, ids in replaced[i]]
            return (pack_rows([items[i] for i in batch] + extra, share, pad_id, masks) if batch else EMPTY).to(device)

        def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
            return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

        # --- update
        old_logprobs = torch.zeros(offset[-1])
        with run.timer("train"):
            lr = args.learning_rate * min(1.0, (update + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if args.num_minibatches > 1:  # the ratio's anchor; without minibatches it is the detached value of the first pass
                with torch.no_grad(), amp():
                    for batch in processes.rounds(list(micro_batches(sizes, args.micro_batch_tokens))):
                        logprobs = policy(packed(batch), args.temperature)[0].cpu()
                        if batch:
                            old_logprobs[token_index(batch)] = logprobs[: sum(offset[i + 1] - offset[i] for i in batch)]
            policy.train()
            for epoch in range(args.update_epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(args.groups_per_update)
                for part in range(args.num_minibatches):
                    chosen = set(order[part :: args.num_minibatches].tolist())
                    rows = [i for i, e in enumerate(episodes) if e.group in chosen]
                    counted = torch.stack([policy_tokens[rows].sum(), (policy_tokens[rows] > 0).sum(), pred_tokens[rows].sum()]).double()
                    totals = processes.all_sum(counted).tolist()
                    if totals[0] == 0:  # nothing to learn from: no step, which would only follow old momentum
                        continue
                    batches = [[rows[i] for i in b] for b in micro_batches([sizes[i] for i in rows], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    optimizer.zero_grad(set_to_none=True)
                    for number, batch in enumerate(batches):
                        with no_sync(policy, number < len(batches) - 1):
                            inputs = packed(batch)
                            with amp():
                                logprobs, entropy = policy(inputs, args.temperature)
                            loss = logprobs.sum() * 0.0
                            if batch:
                                index = token_index(batch)
                                n = len(index)
                                token_weights = has_policy_term[index].double() / totals[0]
                                if args.loss_aggregation == "seq_mean_token_mean":
                                    token_weights = has_policy_term[index] / (policy_tokens[layout.episode_ids[index]].clamp(min=1) * totals[1])
                                if epoch == 0 and args.num_minibatches == 1:
                                    old_logprobs[index] = logprobs[:n].detach().cpu()
                                reference = None
                                if start_policy is not None:
                                    with torch.no_grad(), amp():
                                        reference = start_policy(inputs, args.temperature)[0][:n]
                                loss, metrics = policy_loss(
                                    logprobs[:n], old_logprobs[index].to(device), rollout_logprobs[index].to(device), token_adv[index].to(device),
                                    token_weights.float().to(device), args.clip_low, args.clip_high, args.tis_cap, reference, args.kl_coef,
                                )  # fmt: skip
                                if totals[2] > 0:
                                    learned = torch.cat([right_tokens[index], torch.ones(len(logprobs) - n, dtype=torch.bool)])
                                    pred = forecast_loss(logprobs, (learned.double() / totals[2]).float().to(device))
                                    loss = loss + args.pred_coef * pred
                                    add({"losses/pred_loss": (float(pred.detach()), 0.0)})
                                add({**metrics, "losses/entropy": (float(entropy[:n].sum()), n)})
                            (loss * world).backward()  # gradients are averaged over processes; token weights are global
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                    if not np.isfinite(norm):
                        raise RunError(f"update {update + 1}: the gradient is not finite ({norm}); {LOWER_LR}")
                    add({"losses/grad_norm": (norm, 1.0), "losses/policy_loss": (0.0, 1.0 / world), "losses/pred_loss": (0.0, (totals[2] > 0) / world)})
                    optimizer.step()
            policy.eval()
            if not all(bool(p.isfinite().all()) for p in policy.parameters()):
                raise RunError(f"update {update + 1}: the weights are no longer finite; {LOWER_LR}")
        version = engine.weight_version  # of the weights that sampled this update's episodes
        with run.timer("sync"):
            sync_engine()

        # --- log
        delta = old_logprobs.double() - rollout_logprobs.double()
        mismatch = delta.clamp(-20, 20)
        n_tokens, n = float(offset[-1]), float(len(measured))
        add(
            {
                **episode_metrics(measured, everything),
                "charts/learning_rate": (lr, 1.0),
                "rollout/zero_std_group_frac": (float((~varies).sum()), float(len(varies))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(delta.abs().sum()), n_tokens),
                "rollout/logprob_absdiff_max": (float(delta.abs().max()) if n_tokens else 0.0, n_tokens),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_tokens),
            }
        )
        if args.belief == "ante":
            add({f"ante/{name}": value for name, value in belief_metrics(list(zip(episodes, beliefs))).items()})
            add({"ante/decision_reward": (float(rewards.sum()), n)})
            shares = {name: float((factors == code).sum()) for code, name in enumerate(FACTORS)}
            add({f"ante/token_share/{name}": (count, n_tokens) for name, count in shares.items()})
        for name in {name for e in measured for name in e.rewards}:
            found = np.array([e.rewards.get(name, np.nan) for e in measured])
            add({f"reward/{name}": (float(np.nansum(found)), float(np.sum(~np.isnan(found))))})
        metrics = with_verdict(reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)}), "ante/")
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([n_tokens], dtype=torch.float64))[0]) / (time.perf_counter() - started)
        done = update + 1
        if done == args.num_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate(done == args.num_updates)
            shown = next((e.group for e, v in zip(episodes, varies.tolist()) if v), None)
            for i in [i for i, e in enumerate(episodes) if e.group == shown][:4]:
                turns = slice(int(layout.episode_turns[i]), int(layout.episode_turns[i + 1]))
                run.episode(episode_record(done, episodes[i], beliefs[i], step_adv[turns].tolist(), rewards[turns].tolist(), tokenizer), step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                run.save_checkpoint(done, training_state(bare, optimizer))
        if stop:
            break

    engine.close()
    for game in games:
        game.close()
    if processes.is_main:
        shown = [viewer_episode(record, args.belief) for record in read_jsonl(run.folder / "episodes.jsonl")]
        legend = ["Bars: advantage of each turn; their names hold forecast (check, clean exit), decision, what happened and the decision's reward."]
        legend.append("Forecast tokens learn by cross-entropy only, summary tokens by nothing, decision and action tokens by the policy term.")
        if forecasts:
            legend.append(draw_reliability(run.folder / "reliability.png", forecasts, args.q_star))
        subtitle = f"belief {args.belief}, credit {args.credit}, omega {args.omega}, q* {args.q_star}"
        write_credit_html(run.folder / "credit.html", shown, f"ante_bapo.py on {args.env}", subtitle, legend)
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        sys.exit(main(parse_args(Args)).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, RunError) as error:  # what a user can mend; anything else shows its traceback
        sys.exit(f"{type(error).__name__}: {error}")
