# docs: docs/credit_granularity.md
"""When finer credit helps and hurts: outcome, process and distilled credit for long agent episodes, compared (October 2026).

Not a method but a controlled comparison: four ways to say which turns of an episode were good, on the same tasks, start policy and number of updates. What
differs between them, marked (1) to (4) in the code:

(1) outcome: GRPO, one advantage for every token of an episode;
(2) prm_fixed: plus lambda times an advantage of each turn for its own tokens, from the mean of three votes of a process judge, which sees what a turn looks
    like and must be another model than the judge of the outcome; votes that abstain do not count, a turn without votes has no process reward, which is not 0;
(3) prm_decay: the same with lambda falling from 0.5 to 0 between updates 20 and 30, so that the process reward is a curriculum and no objective;
(4) opsd: no rewards; every token of the policy's own episode is pulled to what the frozen start policy says there when it is told more (the reference edit,
    or advice before each turn). One episode per task against eight.

Beside them what the comparison is about: how good and bad turns mix in an episode, what the policy does with its budget, and where the gradient comes from.

Laptop, two CPU cores (outcome: 4 minutes): python credit_granularity.py --scheme prm_decay
All schemes, three seeds, one report:      python credit_granularity.py --compare --seeds 3
Models as judges:                          python credit_granularity.py --outcome-judge openai:A@http://HOST/v1 --process-judge openai:B@http://HOST/v1
One GPU:                                   python credit_granularity.py --model Qwen/Qwen2.5-1.5B-Instruct --env editing:FOLDER --learning-rate 1e-6
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml credit_granularity.py --model ... --env ...
"""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sampling, make_engine
from common.envs.editing import EditingError
from common.envs.editing_judges import VOTES, parse
from common.envs.editing_render import find_ffmpeg
from common.judges import Judge, JudgeError, make_judge
from common.packing import EMPTY, PackedBatch, Policy, check_packing, forward_hidden, micro_batches, pack_rows
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.rollout import Episode, Layout, encode, make_layout, observation_frame, rollout
from common.run import Run
from common.viewer import write_credit_html
from credit_judging import advice_request, ask_all, check_judges, judge_outcomes, turn_votes
from credit_report import behaviour, compare, episode_record, kl_concentration, viewer_episode, write_previews
from kernels.segment_scan import segment_stats


@dataclass
class Args:
    # --- run
    env: str = "editing"
    """task: editing is generated, editing:cs, ns, rc or fc is one of its families; editing:full has the paper's sizes, for real models; real data:
    editing:FOLDER"""
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
    seed: int = 1
    """seed of data order and sampling; every turn has its own stream from (seed, update, task, sample, turn)"""
    num_updates: int = 50
    """rollout-and-update rounds [paper]"""
    eval_every: int = 25
    """updates between evaluations on the validation films (0: only at the start and the end)"""
    eval_tasks: int = 64
    """evaluation tasks"""
    eval_samples: int = 4
    """independent attempts per evaluation task at --temperature; eval/success is their mean, avg@4 [paper: 4]"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__credit_granularity__<seed>__<time>. With --compare the folder of all runs and of the report"""
    track: bool = False
    """log to Weights & Biases too"""
    render: bool = False
    """write previews of fine cuts of the last evaluation into the run folder, from clips that ffmpeg draws; without ffmpeg a message, and all else as before"""
    # --- training
    groups_per_update: int = 16
    """tasks per update, over all processes"""
    group_size: int | None = None
    """episodes per task; None: 8, and 1 for opsd, which compares no episodes [paper]"""
    max_turns: int = 0
    """assistant messages per episode (0: the largest budget of the environment's tasks; a task's own budget ends it earlier)"""
    max_new_tokens: int = 64
    """length limit of one assistant message"""
    temperature: float = 1.0
    """of sampling and of every log-prob in the loss"""
    learning_rate: float = 5e-4
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 5
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 1
    """passes over each rollout; in the first step after a rollout every ratio is exactly 1"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 8192
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float = 0.2
    """ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """ratio is clipped above at 1 + clip_high"""
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    kl_coef: float = 0.0
    """coefficient of the k3 estimate of KL(policy || start policy) in the loss, per token, each estimate capped at 10 (not with opsd)"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "turn_mean"] = "token_mean"
    """mean over all policy tokens of the update [paper, for opsd]; over each episode, then over episodes; over each turn, then over turns, against the
    dilution of strong signals in long text that the paper suspects [deduced]"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm; updates that exceed it are counted [paper: on, threshold deduced]"""
    # --- what is compared
    scheme: Literal["outcome", "prm_fixed", "prm_decay", "opsd"] = "outcome"
    """where credit comes from: an episode's outcome; plus a fixed share of turn rewards; plus a share that falls to 0; the start policy that is told more"""
    process_weight: float = 0.5
    """lambda, the weight of turn advantages beside the outcome's [paper: 0.5]"""
    decay_start: int = 20
    """prm_decay: last update with the full weight [paper: 20]"""
    decay_end: int = 30
    """prm_decay: first update without process reward; between them lambda falls as (1 - x)^3 [paper: 30, cubic; form deduced]"""
    advantage_eps: float = 1e-6
    """added to standard deviations of groups (ddof 1)"""
    outcome_judge: str = "rule"
    """who scores a submitted edit against the reference and without it: rule, local:MODEL, openai:MODEL or openai:MODEL@http://host:port/v1 (key in
    JUDGE_API_KEY); the deterministic part of a score never needs a judge"""
    process_judge: str = "rule"
    """who votes on turns, and who gives the advice of --privileged turn_advice; the same forms, key in PROCESS_JUDGE_API_KEY. Must be another model than
    --outcome-judge [paper]"""
    process_votes: int = 3
    """votes per turn; their mean without abstentions is the turn's process reward [paper: 3]"""
    measure_process: Literal["auto", "on", "off"] = "auto"
    """judge turns also where the scheme does not use it, for the curves; auto: with the rule judge"""
    judge_tries: int = 2
    """rounds in which judgements that an outage left missing are asked for; the first valid one counts. An episode whose outcome stays missing takes its
    group out of the update [deduced]"""
    judge_patience: float = 600.0
    """seconds without any reply after which an endpoint is given up; the run then saves and ends, and --resume goes on"""
    judge_concurrency: int = 16
    """calls at a time"""
    judge_max_tokens: int = 2048
    """length limit of a judge's reply"""
    judge_reply_format: Literal["json_schema", "json_object", "text"] = "json_schema"
    """what the endpoints support"""
    judge_cache: str = ""
    """folder of the judges' answers; empty: in the user's cache folder"""
    privileged: Literal["reference", "turn_advice"] = "turn_advice"
    """opsd: what the teacher is told besides: the task's reference edit in the prompt, or before each turn the next action that the process judge advises
    (rule: the environment's oracle) in the state that the policy is in"""
    advice: Literal["informed", "expert"] = "informed"
    """turn_advice with the rule: informed knows the reference edit and never advises to look first; expert looks at every shot before it edits [deduced]"""
    distillation: Literal["forward_kl", "reverse_kl", "sampled"] = "forward_kl"
    """opsd: KL(teacher || student) over the full vocabulary [paper], KL(student || teacher), or the latter's gradient from the sampled tokens alone"""
    # --- comparison
    compare: bool = False
    """run outcome, prm_fixed, prm_decay and opsd with both kinds of privileged text, each with --seeds seeds from --seed on, and write report.html,
    report.json and report.png; finished runs in --out are kept, interrupted ones continue"""
    seeds: int = 3
    """--compare: runs of each variant"""


# ------------------------------------------------------------------------------------------- prompts and message format

HINTS = {"reference": "reference : ", "turn_advice": "advice : "}  # what the teacher reads besides, on a line of its own [wording deduced]


def hinted(messages: Sequence[dict], hint: str) -> list[dict]:
    """The messages with the hint on a line of its own after the last one; unchanged without a hint."""
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + hint_line(hint)}]


def hint_line(hint: str) -> str:
    return f"\n{hint}" if hint else ""


def oracle_advice(game: envs.Env, informed: bool) -> str:
    """The call that the environment's oracle makes now, without its thought. Who knows the reference edit needs no look: informed advice is an edit at once."""
    state = game.snapshot()
    if informed:
        game.seen = frozenset(game.task["shots"])
    calls = parse(game.oracle_action())[1]
    game.restore(state)
    return " , ".join(" ".join(call).strip() for call in calls)


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy: whole episodes, three of four by the careless expert, the others by one who is told more. Without those the
    teacher of --scheme opsd would be blind to what it is told."""
    rng = random.Random(seed)
    out = []
    for i, task in enumerate(tasks.train):
        if i % 4 < 3:
            out.append(tasks.careless(task, rng))
        elif i % 8 == 3:
            talk = tasks.demonstrate(task, rng)
            out.append([*hinted(talk[:1], HINTS["reference"] + task["reference"]), *talk[1:]])
        else:
            out.append(advised(tasks, task, rng))
    return out


def advised(tasks: envs.TaskSet, task: dict, rng: random.Random) -> list[dict]:
    """A conversation with advice before every turn, in which the assistant does what is advised and thinks nothing of its own."""
    game = tasks.make_env()
    talk, ended = list(game.reset(task)), False
    while not ended:
        action = oracle_advice(game, informed=rng.random() < 0.5)
        talk = [*hinted(talk, HINTS["turn_advice"] + action), {"role": "assistant", "content": action}]
        observation, _, terminated, truncated, _ = game.step(action)
        ended = terminated or truncated
        talk.append({"role": "user", "content": observation})
    return talk[:-1]


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


def process_weight(scheme: str, update: int, weight: float, decay_start: int, decay_end: int) -> float:
    """lambda at update number `update`, from 1. (2) constant; (3) weight up to decay_start, weight (1 - x)^3 between, 0 from decay_end on; else 0."""
    if scheme not in ("prm_fixed", "prm_decay"):
        return 0.0
    if scheme == "prm_fixed" or update <= decay_start:
        return weight
    return weight * max(0.0, (decay_end - update) / (decay_end - decay_start)) ** 3  # (3)


def mean_votes(votes: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """(2) Process reward of each turn: mean of the votes that do not abstain (None); NaN, which is missing and not 0, where all abstain. -> [T] float64"""
    known = [[v for v in of_turn if v is not None] for of_turn in votes]
    return torch.tensor([math.fsum(k) / len(k) if k else math.nan for k in known], dtype=torch.float64)


def turn_advantages(scores: torch.Tensor, group_ids: torch.Tensor, eps: float) -> torch.Tensor:
    """(2) (score - mean_g) / (std_g + eps) over all judged turns of a task's episodes, std with ddof 1; 0 for a missing score. [T], [T] -> [T] [deduced]"""
    known = ~scores.isnan()
    out = torch.zeros_like(scores)
    if known.any():
        out[known] = group_advantages(scores[known], group_ids[known], eps)[0]
    return out


def token_advantages(outcome_adv: torch.Tensor, turn_adv: torch.Tensor, layout: Layout, weight: float) -> torch.Tensor:
    """(1) (2) A[t, i] = A_out + lambda A_turn[t], each for the policy tokens of its episode and its turn. [E], [T] -> [N]"""
    return outcome_adv[layout.episode_ids] + weight * turn_adv[layout.turn_ids]


def token_weights_of(kind: str, layout: Layout, index: torch.Tensor, totals: Sequence[float]) -> torch.Tensor:
    """Weights of the tokens `index` in the loss, which sum to 1 over the optimizer step. totals: its tokens, episodes and turns. -> [n] float32"""
    if kind == "seq_mean_token_mean":
        return (1.0 / (layout.episodes.diff()[layout.episode_ids[index]] * totals[1])).float()
    if kind == "turn_mean":
        return (1.0 / (layout.turns.diff()[layout.turn_ids[index]] * totals[2])).float()
    return torch.full((len(index),), 1.0 / totals[0])


def policy_loss(
    logprobs: torch.Tensor,  # [N] with gradient
    old_logprobs: torch.Tensor,  # [N] trainer, before the update
    rollout_logprobs: torch.Tensor,  # [N] engine
    advantages: torch.Tensor,  # [N]
    token_weights: torch.Tensor,  # [N] they sum to 1 over the optimizer step, all processes together
    clip_low: float,
    clip_high: float,
    tis_cap: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """Clipped policy-gradient loss, weighted sum over tokens. Metrics are (sum, count) pairs."""
    logratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = logratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    mismatch = (old_logprobs - rollout_logprobs).clamp(-20, 20)
    if tis_cap > 0:
        loss = loss * mismatch.exp().clamp(max=tis_cap)
    with torch.no_grad():
        n = float(len(loss))
        clipped = (advantages > 0) & (ratio > 1 + clip_high) | (advantages < 0) & (ratio < 1 - clip_low)
        metrics = {
            "losses/policy_loss": (float((loss * token_weights).sum()), 0.0),  # counted once per optimizer step by the caller
            "losses/approx_kl": (float((ratio - 1 - logratio).sum()), n),
            "losses/old_approx_kl": (float(-logratio.sum()), n),
            "losses/clipfrac": (float(clipped.sum()), n),
            "rollout/tis_capped_frac": (float((mismatch.exp() > tis_cap).sum()) if tis_cap > 0 else 0.0, n),
        }
    if ref_logprobs is not None:
        d = (ref_logprobs - logprobs).clamp(-20, 20)
        k3 = (d.exp() - d - 1).clamp(max=10)
        loss = loss + kl_coef * k3
        metrics["losses/kl"] = (float(k3.detach().sum()), n)
    return (loss * token_weights).sum(), metrics


def divergence(student: torch.Tensor, teacher: torch.Tensor, target_ids: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(4) Per token: what the loss minimises, with gradient to the student, and KL(teacher || student) without. Log-probs [n, V] of both -> [n], [n], nats.

    sampled: sg(log S - log T) log S at the sampled token, whose expected gradient over the student's samples is that of KL(student || teacher).
    """
    forward = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    if kind == "forward_kl":
        return forward, forward.detach()
    if kind == "reverse_kl":
        return F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1), forward.detach()
    s, t = (x.gather(1, target_ids[:, None]).squeeze(1) for x in (student, teacher))
    return (s - t).detach() * s, forward.detach()


# -------------------------------------------------------------------------------- what the comparison is about: measurements


def kl_by_turn(kl: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of KL, tokens) of each turn. kl [N] >= 0 -> [T], [T]"""
    if not len(kl):
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    stats = segment_stats(kl, layout.turns)
    return (stats.mean * stats.count).double(), stats.count.double()


# --------------------------------------------------------------------------------------------------------------- judging


def judge_turns(judge: Judge | None, episodes: Sequence[Episode], votes: int, tries: int, seed: int, update: int) -> None:
    """(2) Puts votes and process reward of every turn into its info; without a judge by the rule, which reads what a judge reads."""
    found = turn_votes(judge, episodes, votes, tries, seed, update)
    for turn, row, mean in zip([t for e in episodes for t in e.turns], found, mean_votes(found).tolist(), strict=True):
        turn.info |= {"votes": row, "process": mean}


# ---------------------------------------------------------------------------------------------------- policy and teacher


class Student(Policy):
    """(4) The policy beside a teacher that predicts the same tokens after other texts."""

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = self.lm.get_output_embeddings()
        return tuple(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out.weight, getattr(out, "bias", None)))

    def forward(self, batch: PackedBatch, temperature: float = 1.0, teacher: tuple | None = None, hidden_only: bool = False):
        """As Policy; hidden states [N, D] with hidden_only; with teacher = (hidden [N, D], head, kind) `divergence`, log-probs and entropies, all [N]."""
        if teacher is None and not hidden_only:
            return super().forward(batch, temperature)
        hidden = forward_hidden(self.lm, batch)
        if hidden_only:
            return hidden
        (weight, bias), (teacher_hidden, (teacher_weight, teacher_bias), kind) = self.head(), teacher

        def chunk(h: torch.Tensor, w: torch.Tensor, th: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            s = (F.linear(h, w, bias).float() / temperature).log_softmax(-1)
            t = (F.linear(th, teacher_weight, teacher_bias).float() / temperature).log_softmax(-1)
            with torch.no_grad():
                logprobs, entropy = s.gather(1, ids[:, None]).squeeze(1).clone(), -(s.exp() * s).sum(-1)
            return *divergence(s, t, ids, kind), logprobs, entropy

        size = max(1, 2**23 // weight.shape[0])
        rows = zip(hidden.split(size), teacher_hidden.split(size), batch.target_ids.split(size))
        parts = [checkpoint(chunk, h, weight, th, ids, use_reentrant=False) for h, th, ids in rows]
        return tuple(torch.cat(column) for column in zip(*parts))


def teacher_row(tokenizer, frame: tuple[str, str, str], messages: Sequence[dict], e: Episode, hints: Sequence[str]) -> tuple[list[int], list[int], list[bool]]:
    """(4) The episode as the teacher reads it: the policy's own tokens, hints[t] told before turn t; without hints the policy's own row.

    Returns the prompt's ids, those after it, and which of them the policy sampled.
    """
    end, before, after = frame
    ids: list[int] = []
    mask: list[bool] = []
    for i, turn in enumerate(e.turns):
        if i:
            closing = end if e.turns[i - 1].unfinished else ""
            seen = closing + before + e.turns[i - 1].observation + hint_line(hints[i]) + after
            ids += tokenizer(seen, add_special_tokens=False).input_ids
            mask += [False] * (len(ids) - len(mask))
        ids += e.token_ids[turn.start : turn.stop]
        mask += [True] * (turn.stop - turn.start)
    return encode(tokenizer, hinted(messages, hints[0])), ids, mask


# -------------------------------------------------------------------------------------------------------- reports


PANELS = [
    Panel("Evaluation by family: avg@4", ("eval/success/*",), limits=(0, 1)),
    Panel("Outcome and process reward", ("charts/success", "granularity/process_reward"), limits=(0, 1)),
    Panel("Cut episodes", ("rollout/truncated_frac", "eval/truncated_frac"), limits=(0, 1)),
    Panel("Tool calls, looks, turns per episode", ("granularity/tool_calls", "granularity/frames", "granularity/turns")),
    Panel("Thoughts", ("granularity/reasoning_chars",), "characters per turn"),
    Panel("Turns with reflection, blind episodes", ("granularity/reflection_frac", "granularity/blind_frac"), limits=(0, 1)),
    Panel("Mixing of good and bad turns", ("granularity/mixing", "granularity/mixing_process"), limits=(0, 1)),
    Panel("KL to the informed teacher", ("granularity/teacher_kl",), "nats per token", log=True),
    Panel("Most divergent 5 % of turns", ("granularity/kl_in_top_turns", "granularity/tokens_in_top_turns"), limits=(0, 1)),
]


# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def resolve(args: Args) -> Args:
    """The arguments with every None replaced by what the scheme says."""
    return replace(args, group_size=(1 if args.scheme == "opsd" else 8) if args.group_size is None else args.group_size)


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded. `args` after `resolve`."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "eval_samples": 1, "save_every": 0, "groups_per_update": 1, "group_size": 1, "max_turns": 0,
        "max_new_tokens": 1, "update_epochs": 1, "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "kl_coef": 0, "tis_cap": 0,
        "advantage_eps": 0, "learning_rate": 0, "clip_high": 0, "seed": 0, "process_weight": 0, "decay_start": 0, "process_votes": 1, "judge_tries": 1,
        "judge_patience": 0, "judge_concurrency": 1, "judge_max_tokens": 1, "seeds": 1,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm"))
    if not 0 <= args.clip_low <= 1:
        raise ArgumentError(f"--clip-low {args.clip_low}: must lie in [0, 1]")
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.scheme != "opsd" and args.group_size < 2:
        raise ArgumentError(f"--group-size {args.group_size}: --scheme {args.scheme} compares the episodes of a task and needs at least 2")
    if args.decay_end <= args.decay_start:
        raise ArgumentError(f"--decay-end {args.decay_end}: must be above --decay-start {args.decay_start}")
    if args.process_judge == "rule" and args.process_votes > VOTES:
        raise ArgumentError(f"--process-votes {args.process_votes}: --process-judge rule has {VOTES}")
    if args.scheme == "opsd" and args.kl_coef > 0:
        raise ArgumentError("--scheme opsd has no policy-gradient loss to add a KL term to: leave out --kl-coef")
    if args.scheme == "opsd" and args.distillation == "sampled" and args.update_epochs * args.num_minibatches > 1:
        raise ArgumentError("--distillation sampled holds for the policy that sampled: use --update-epochs 1 and --num-minibatches 1")
    if args.measure_process == "off" and args.scheme in ("prm_fixed", "prm_decay"):
        raise ArgumentError(f"--measure-process off: --scheme {args.scheme} needs the process reward")
    check_judges(args.outcome_judge, args.process_judge)


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
    bf16 = args.precision == "bf16" or (args.precision == "auto" and device.type == "cuda")
    amp = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext
    distils, advises = args.scheme == "opsd", args.scheme == "opsd" and args.privileged == "turn_advice"

    # tasks, judges and policy
    tasks = envs.load(args.env)
    if not all("weights" in task for task in (*tasks.train, *tasks.eval)):
        raise ArgumentError(f"--env {args.env}: its tasks are no editing tasks, which the judges could judge; use editing or editing:FOLDER")
    judges_turns = (
        args.scheme in ("prm_fixed", "prm_decay") or args.measure_process == "on" or (args.measure_process == "auto" and args.process_judge == "rule")
    )
    judge_options: dict[str, Any] = {
        "cache": args.judge_cache or None, "patience": args.judge_patience, "concurrency": args.judge_concurrency, "max_tokens": args.judge_max_tokens,
        "reply_format": args.judge_reply_format, "device": device,
    }  # fmt: skip
    outcome_judge = None if args.outcome_judge == "rule" else make_judge(args.outcome_judge, flag="--outcome-judge", **judge_options)
    process_judge = None
    if args.process_judge != "rule" and (judges_turns or advises):
        process_judge = make_judge(args.process_judge, flag="--process-judge", key_variable="PROCESS_JUDGE_API_KEY", **judge_options)
    judges = {name: judge for name, judge in (("outcome", outcome_judge), ("process", process_judge)) if judge is not None}
    max_turns = args.max_turns or tasks.max_turns
    side_by_side = max(args.groups_per_update * args.group_size, 64) // world
    games = [tasks.make_env() for _ in range(tasks.workers or side_by_side)]
    if args.render and processes.is_main:
        try:
            find_ffmpeg("ffmpeg")
        except EditingError as e:
            print(f"--render: {e}", file=sys.stderr)
    with processes.main_first():
        demonstrations = (lambda: warm_start_conversations(tasks)) if tasks.careless else None
        lm, tokenizer, _ = load_policy(args.model, demonstrations, TinyConfig(), device=device)
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
    frame = observation_frame(tokenizer, sampling.stop_token_ids)  # refuses a chat template that cannot go on after a message
    for split, rows in (("train", tasks.train), ("eval", tasks.eval[: args.eval_tasks])) if not tasks.workers else ():  # a simulator's reset takes too long
        for task in rows:
            length = len(encode(tokenizer, games[0].reset(task)))
            if length + args.max_new_tokens > context:
                raise envs.DataError(
                    f"--env {args.env}: {split} task {task['id']!r} has {length} prompt tokens, with --max-new-tokens {args.max_new_tokens} more than the "
                    f"context of {context} of --model {args.model}: lower --max-new-tokens, take the task out of the data or choose a model with more context"
                )

    # start policy as teacher or for the KL term, before a checkpoint replaces the weights; engine; parallel wrappers; optimizer
    start_policy = Student(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 or distils else None
    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    only_kv = args.rollout_format == "fp8_kv"
    engine = make_engine(
        engine_kind, engine_lm, tokenizer, max_model_len=context,
        rollout_format="auto" if only_kv else args.rollout_format, kv_cache_dtype="fp8" if only_kv else None,
    )  # fmt: skip
    bare = Student(lm)
    policy = processes.wrap(bare, lm.base_model.layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    advice: dict[tuple[int, int], list[str]] = {}  # (group, sample) -> what the oracle advises before each turn

    def ask_oracle(episode: Episode, game: envs.Env) -> None:
        advice.setdefault((episode.group, episode.sample), []).append(oracle_advice(game, args.advice == "informed"))

    def play(numbered: Sequence[tuple[int, dict]], n: int, update: int, on_turn: Callable | None = None) -> list[Episode]:
        return rollout(engine, tokenizer, games, tasks.workers, numbered, n, sampling, max_turns, context, args.seed, update, on_turn)

    def judge_all(episodes: Sequence[Episode], update: int, turns: bool, informs: bool = False) -> tuple[dict[tuple[int, int], list[str]], str]:
        """Outcomes, with `turns` process rewards, with `informs` what the teacher is told before each turn by (group, sample). The second value says why a
        judge was given up: "" unless that happened on some process, and then one text on all."""
        hints, failure = {}, ""
        try:
            if outcome_judge is not None:
                judge_outcomes(outcome_judge, episodes, args.judge_tries)
            if turns:
                judge_turns(process_judge, episodes, args.process_votes, args.judge_tries, args.seed, update)
            if informs and advises and process_judge is not None:
                texts = ["\n".join(m["content"] for m in games[0].reset(e.task)) for e in episodes]
                requests = [advice_request(text, e.task["reference"], e.turns[:k]) for e, text in zip(episodes, texts) for k in range(len(e.turns))]
                told = iter(ask_all(process_judge, requests, args.judge_tries))
                for e in episodes:  # without an answer the teacher knows no more than the policy
                    votes = [next(told) for _ in e.turns]
                    advice[e.group, e.sample] = [" ".join(v[0]["advice"].split()) if v and v[0] is not None else "" for v in votes]
            for e in episodes if informs else ():
                own = advice[e.group, e.sample] if advises else [e.task["reference"]] + [""] * (len(e.turns) - 1)
                hints[e.group, e.sample] = [HINTS[args.privileged] + text if text else "" for text in own]
        except JudgeError as error:
            failure = str(error)
        return hints, next(iter(processes.union([failure] if failure else [])), "")

    run = Run(
        args,
        "credit_granularity",
        total_updates=args.num_updates,
        key_metrics=["eval/success", "charts/success", "granularity/process_reward", "rollout/truncated_frac", "granularity/tool_calls", "granularity/frames"],
        **distributed(),
    )
    first_update = 0
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)

    def families(episodes: Sequence[Episode], prefix: str, keys: Sequence[str] = ()) -> dict[str, tuple[float, float]]:
        """`behaviour` of all episodes, and of each task family apart."""
        of_family = {f: [e for e in episodes if e.task["family"] == f] for f in {e.task["family"] for e in episodes}}
        sums = {f"{prefix}/{key}": pair for key, pair in behaviour(episodes).items()}
        for name, members in of_family.items():
            sums |= {f"{prefix}/{key}/{name}": pair for key, pair in behaviour(members).items() if not keys or key in keys}
        return sums

    def evaluate(last: bool = False) -> tuple[dict[str, float], str]:
        """avg@4 on the validation films, and what the policy does there; why a judge was given up."""
        everything = play(list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world], args.eval_samples, -1)
        played = [e for e in everything if not e.error]
        _, failure = judge_all(played, -1, judges_turns and (process_judge is None or args.measure_process == "on"))
        es = [e for e in played if not math.isnan(e.success)]
        sums = families(es, "eval") | {"eval/error_frac": (float(len(everything) - len(es)), float(len(everything)))}
        sums["eval/length"] = (float(sum(len(e.logprobs) for e in es)), float(len(es)))
        if last and args.render and processes.is_main:
            write_previews([e for e in es if e.task["family"] == "FC" and e.turns[-1].info.get("edit") is not None][:4], run.folder / "previews")
        return reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)}), failure

    def evaluation_due(done: int) -> bool:
        return done == args.num_updates or bool(args.eval_every and done % args.eval_every == 0)

    engine.weight_version = first_update
    sync_engine()
    if not args.resume:
        start, failure = evaluate()
        if failure:
            raise JudgeError(f"{failure}\nnothing is lost: what was judged is in the cache, start the same command again")
        run.log(start, step=0)
    elif evaluation_due(first_update) and not any(row["step"] == first_update and "eval/success" in row for row in read_jsonl(run.folder / "metrics.jsonl")):
        again, failure = evaluate(first_update == args.num_updates)  # a judge was given up there: a line of its own beside that of the update
        if failure:
            raise JudgeError(f"{failure}\nthe evaluation after update {first_update} is still missing; go on with --resume {run.folder}")
        run.log(again, step=first_update)

    def save(done: int) -> None:
        with run.timer("save"):
            run.save_checkpoint(done, training_state(bare, optimizer) | {"totals": totals_so_far})

    totals_so_far = state["totals"] if args.resume else {"episodes": 0.0, "tokens": 0.0}
    for update in range(first_update, args.num_updates):
        started = time.perf_counter()
        usage = {name: judge.usage.copy() for name, judge in judges.items()}
        sums: dict[str, tuple[float, float]] = {}

        def add(metrics: dict[str, tuple[float, float]], sums: dict[str, tuple[float, float]] = sums) -> None:
            for key, (total, count) in metrics.items():
                old = sums.get(key, (0.0, 0.0))
                sums[key] = (max(old[0], total) if is_maximum(key) else old[0] + total, old[1] + count)

        # --- roll out
        with run.timer("rollout"):
            stream = [divmod(update * args.groups_per_update + g, len(tasks.train)) for g in range(args.groups_per_update)]
            orders = {epoch: np.random.default_rng([args.seed, epoch]).permutation(len(tasks.train)) for epoch, _ in stream}
            mine = [(g, tasks.train[orders[epoch][at]]) for g, (epoch, at) in enumerate(stream)][rank::world]
            advice.clear()
            everything = play(mine, args.group_size, update, ask_oracle if advises and process_judge is None else None)
        measured = [e for e in everything if not e.error and e.turns]  # an episode whose environment failed is counted below and takes no part

        # --- (1) (2) outcomes and process rewards; a group with a missing outcome takes no part
        with run.timer("reward"):
            hints, failure = judge_all(measured, update, judges_turns, distils)
            if failure:
                save(update)
                raise JudgeError(f"{failure}\nsaved after update {update}: what was judged is in the cache, go on with --resume {run.folder}")
            missing = set() if distils else {e.group for e in measured if math.isnan(e.reward)}
            episodes = [e for e in measured if e.group not in missing]
            rows = [teacher_row(tokenizer, frame, games[0].reset(e.task), e, hints[e.group, e.sample]) for e in episodes] if distils else []
            if distils:  # neither does an episode that the teacher cannot read to its end
                fits = [len(prompt) + len(ids) <= context for prompt, ids, _ in rows]
                add({"granularity/teacher_overlong_frac": (float(len(fits) - sum(fits)), float(len(fits)))})
                episodes, rows = [e for e, fit in zip(episodes, fits) if fit], [row for row, fit in zip(rows, fits) if fit]
            layout = make_layout([[t.stop - t.start for t in e.turns] for e in episodes])
            offset = layout.episodes.tolist()
            group_ids = torch.tensor([e.group for e in episodes], dtype=torch.int64)
            returns = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
            weight = process_weight(args.scheme, update + 1, args.process_weight, args.decay_start, args.decay_end)
            scores = torch.tensor([t.info.get("process", math.nan) for e in episodes for t in e.turns], dtype=torch.float64)
            outcome_adv, varies = group_advantages(returns, group_ids, args.advantage_eps)  # (1)
            turn_adv = turn_advantages(scores, torch.repeat_interleave(group_ids, layout.episode_turns.diff()), args.advantage_eps)  # (2)
            token_adv = token_advantages(outcome_adv, turn_adv, layout, weight).float()
        items, masks = [(e.prompt_ids, e.token_ids) for e in episodes], [e.policy_mask for e in episodes]
        rollout_logprobs = torch.tensor([x for e in episodes for x in e.logprobs], dtype=torch.float32)

        def packed(batch: list[int], items: list = items, masks: list = masks) -> PackedBatch:
            return (pack_rows([items[i] for i in batch], share, pad_id, [masks[i] for i in batch]) if batch else EMPTY).to(device)

        def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
            return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

        # --- update
        old_logprobs, kl = torch.zeros(offset[-1]), torch.zeros(offset[-1], dtype=torch.float64)
        with run.timer("train"):
            lr = args.learning_rate * min(1.0, (update + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if args.num_minibatches > 1:  # the ratio's anchor; without minibatches it is the detached value of the first pass
                with torch.no_grad(), amp():
                    for batch in processes.rounds(list(micro_batches(items, args.micro_batch_tokens))):
                        logprobs = policy(packed(batch), args.temperature)[0].cpu()
                        if batch:
                            old_logprobs[token_index(batch)] = logprobs
            policy.train()
            for epoch in range(args.update_epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(args.groups_per_update)
                for part in range(args.num_minibatches):
                    chosen = set(order[part :: args.num_minibatches].tolist())
                    picked = [i for i, e in enumerate(episodes) if e.group in chosen]
                    count = [sum(offset[i + 1] - offset[i] for i in picked), len(picked), sum(len(episodes[i].turns) for i in picked)]
                    totals = processes.all_sum(torch.tensor(count, dtype=torch.float64)).tolist()
                    if totals[0] == 0:  # nothing to learn from: no step, which would only follow old momentum
                        continue
                    batches = [[picked[i] for i in b] for b in micro_batches([items[i] for i in picked], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    optimizer.zero_grad(set_to_none=True)
                    for number, batch in enumerate(batches):
                        with no_sync(policy, number < len(batches) - 1):
                            inputs = packed(batch)
                            if not batch:
                                with amp():
                                    loss = policy(inputs, args.temperature)[0].sum() * 0.0
                            else:
                                index = token_index(batch)
                                token_weights = token_weights_of(args.loss_aggregation, layout, index, totals).to(device)
                                if distils:  # (4)
                                    told = pack_rows([rows[i][:2] for i in batch], share, pad_id, [rows[i][2] for i in batch]).to(device)
                                    with torch.no_grad(), amp():
                                        seen = start_policy(told, hidden_only=True)
                                    with amp():
                                        found = policy(inputs, args.temperature, teacher=(seen, start_policy.head(), args.distillation))
                                    objective, forward, logprobs, entropy = found
                                    loss, metrics = (objective * token_weights).sum(), {}
                                    metrics["losses/policy_loss"] = (float(loss.detach()), 0.0)
                                    if epoch == 0:
                                        kl[index] = forward.double().cpu()
                                else:
                                    with amp():
                                        logprobs, entropy = policy(inputs, args.temperature)
                                if epoch == 0 and args.num_minibatches == 1:
                                    old_logprobs[index] = logprobs.detach().cpu()
                                if not distils:
                                    reference = None
                                    if start_policy is not None:
                                        with torch.no_grad(), amp():
                                            reference = start_policy(inputs, args.temperature)[0]
                                    loss, metrics = policy_loss(
                                        logprobs, old_logprobs[index].to(device), rollout_logprobs[index].to(device), token_adv[index].to(device),
                                        token_weights, args.clip_low, args.clip_high, args.tis_cap, reference, args.kl_coef,
                                    )  # fmt: skip
                                add({**metrics, "losses/entropy": (float(entropy.sum()), len(index))})
                            (loss * world).backward()  # gradients are averaged over processes; token_weights are global
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                    if not np.isfinite(norm):
                        raise RunError(f"update {update + 1}: the gradient is not finite ({norm}); {LOWER_LR}")
                    add({"losses/grad_norm": (norm, 1.0), "losses/policy_loss": (0.0, 1.0 / world)})
                    add({"granularity/clipped_update_frac": (float(norm > args.max_grad_norm), 1.0)})
                    optimizer.step()
            policy.eval()
            if not all(bool(p.isfinite().all()) for p in policy.parameters()):
                raise RunError(f"update {update + 1}: the weights are no longer finite; {LOWER_LR}")
        version = engine.weight_version  # of the weights that sampled this update's episodes
        with run.timer("sync"):
            sync_engine()

        # --- log
        absdiff = (old_logprobs - rollout_logprobs).abs().double()
        mismatch = (old_logprobs - rollout_logprobs).double().clamp(-20, 20)
        n_tokens, n_all, n, n_turns = float(offset[-1]), float(len(everything)), float(len(measured)), float(sum(len(e.turns) for e in measured))
        scored = [e for e in measured if not math.isnan(e.reward)]
        flat = {e.group: True for e in episodes} | {e.group: False for e, v in zip(episodes, varies.tolist()) if v}
        add(
            {
                **families(scored, "granularity", ("success", "process_reward", "truncated_frac", "mixing", "mixing_process")),
                **({"granularity/teacher_kl": (float(kl.sum()), n_tokens)} if distils else {}),
                "granularity/process_weight": (weight, 1.0),
                "granularity/unjudged_turn_frac": (float(scores.isnan().sum()), float(len(scores))),
                "charts/episodic_return": (math.fsum(e.reward for e in scored), float(len(scored))),
                "charts/episodic_length": (float(sum(len(e.logprobs) for e in measured)), n),
                "charts/context_length": (float(sum(len(e.prompt_ids) + len(e.token_ids) for e in measured)), n),
                "charts/turns": (n_turns, n),
                "charts/success": (math.fsum(e.success for e in scored), float(len(scored))),
                "charts/learning_rate": (lr, 1.0),
                "rollout/truncated_frac": (float(sum(bool(e.truncated) for e in measured)), n),
                **{f"rollout/truncated/{why}": (float(sum(e.truncated == why for e in measured)), n) for why in ("turns", "context", "padding", "environment")},
                "rollout/unfinished_turn_frac": (float(sum(t.unfinished for e in measured for t in e.turns)), n_turns),
                "rollout/error_frac": (float(sum(bool(e.error) for e in everything)), n_all),
                "rollout/zero_std_group_frac": (float(sum(flat.values())), float(len(flat))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(absdiff.sum()), n_tokens),
                "rollout/logprob_absdiff_max": (float(absdiff.max()) if n_tokens else 0.0, n_tokens),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_tokens),
                "judge/missing_outcome_frac": (n - len(scored), n),
                **{key: pair for name, judge in judges.items() for key, pair in (judge.usage - usage[name]).pairs(f"judge/{name}").items()},
            }
        )
        if distils:  # the most divergent turns are those of the whole update, over all processes
            parts = run.gather(kl_by_turn(kl, layout)) if world > 1 else [kl_by_turn(kl, layout)]
            concentration = kl_concentration(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
            add({key: (value / world, count / world) for key, (value, count) in concentration.items()})
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})
        played = processes.all_sum(torch.tensor([n_all, float(sum(len(e.logprobs) for e in everything))], dtype=torch.float64)).tolist()
        for (key, so_far), more in zip(list(totals_so_far.items()), played):
            totals_so_far[key] = so_far + more
            metrics[f"granularity/{key}_so_far"] = totals_so_far[key]
        metrics["charts/SPS"] = played[1] / (time.perf_counter() - started)
        done = update + 1
        if evaluation_due(done):
            with run.timer("eval"):
                measured_there, failure = evaluate(done == args.num_updates)
                metrics |= {} if failure else measured_there
            shown = next((e.group for e, v in zip(episodes, varies.tolist()) if v), episodes[0].group if episodes else None)
            for i in [i for i, e in enumerate(episodes) if e.group == shown][:4]:
                turns = slice(int(layout.episode_turns[i]), int(layout.episode_turns[i + 1]))
                own = kl[offset[i] : offset[i + 1]].tolist() if distils else None
                run.episode(episode_record(done, episodes[i], float(outcome_adv[i]), turn_adv[turns].tolist(), weight, own, tokenizer), step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or failure or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            save(done)
        if failure:
            raise JudgeError(f"{failure}\nsaved after update {done}, whose evaluation is missing; go on with --resume {run.folder}")
        if stop:
            break

    engine.close()
    for judge in judges.values():
        judge.close()
    for game in games:
        game.close()
    if processes.is_main:
        episodes = [viewer_episode(record) for record in read_jsonl(run.folder / "episodes.jsonl")]
        legend = [
            "Bars: KL of each turn to the informed teacher." if distils else "Bars: advantage of each turn, the sum of outcome and turn.",
            "Good, bad and neutral in a turn's name say whether it moved the true score. What the environment said is grey.",
        ]
        subtitle = f"scheme {args.scheme}" + (f", privileged {args.privileged}" if distils else "")
        write_credit_html(run.folder / "credit.html", episodes, f"credit_granularity.py on {args.env}", subtitle, legend)
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        arguments = parse_args(Args)
        sys.exit(compare(arguments, resolve, check_args, __file__) if arguments.compare else main(arguments).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, JudgeError, RunError) as error:  # what a user can mend; anything else: its traceback
        sys.exit(f"{type(error).__name__}: {error}")
