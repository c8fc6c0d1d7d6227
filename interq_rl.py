# docs: docs/interq_rl.md
"""InterQ-RL: interaction-aware correction of execution mismatch in quantised agentic RL (October 2026).

Rollouts run in 8 bits, the learner in high precision: the same weights are two policies, and over many turns the difference adds up along
the history that led to a state. What departs from GRPO with quantised rollouts, marked (1) to (4) in the code:

(1) the learner's forward pass applies the executor's rounding rules at the same places, gradients pass straight through (QAT);
(2) what is left of the mismatch accumulates: E[t] is the sum of log q_old - log r_exec over the policy tokens so far, of the whole
    trajectory; its exponential, bounded by an envelope that grows with sqrt(tokens), is the prefix weight of token t;
(3) a fixed budget of correction goes to the action segments whose prefix weights are broadly supported (effective sample size), not to
    those where a few tokens carry everything;
(4) the token's loss is multiplied by 1 + alpha[segment] * (prefix weight - 1), detached; without mismatch it is the base loss bit for bit.

Laptop, two CPU cores (about 3 minutes):   python interq_rl.py
Another number format, another correction: python interq_rl.py --rollout-format int4 --preset qat_tis
One GPU:                                   python interq_rl.py --model Qwen/Qwen2.5-1.5B-Instruct --env alfworld:FOLDER --learning-rate 1e-6
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml interq_rl.py --model ... --env ...
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sampling, make_engine
from common.packing import EMPTY, PackedBatch, Policy, check_packing, micro_batches, pack_rows
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.quantized import quantized
from common.ranks import distributed, is_maximum, reduce_metrics
from common.rollout import Episode, Layout, encode, episode_metrics, make_layout, observation_frame, rollout
from common.run import Run
from common.viewer import write_credit_html
from kernels.segment_scan import segment_cumsum, segment_stats


@dataclass
class Args:
    # --- run
    env: str = "household"
    """task: household is generated; real data: alfworld:FOLDER; any other family of several turns (search, automation, ...)"""
    model: str = "tiny"
    """tiny (built and warm-started on first use), smollm2, a folder or a hub id"""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """generation; auto: vllm on CUDA, torch elsewhere, which emulates every format exactly"""
    rollout_format: Literal["bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "fp8_kv"] | None = None
    """numbers of weights, activations and KV cache at generation; bf16: the model's own precision; fp8_kv: only the cache, all that vllm can do on a CPU;
    vllm computes fp8_e4m3 on a GPU; None: by --preset (fp8_e4m3; preset bf16: bf16)"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of training (master weights are always float32); auto: bf16 autocast on CUDA, float32 elsewhere"""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """how several processes share the model"""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """compute common beginnings of episodes once instead of once per episode (exact); auto: on where the model allows it"""
    seed: int = 1
    """seed of data order and sampling; every turn has its own stream from (seed, update, task, sample, turn)"""
    num_updates: int = 16
    """rollout-and-update rounds [paper: 400]"""
    eval_every: int = 4
    """updates between evaluations on the unseen split (0: only at the start and the end)"""
    eval_tasks: int = 128
    """evaluation tasks, greedy decoding by the executor in its rollout format"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__interq_rl__<seed>__<time>"""
    track: bool = False
    """log to Weights & Biases too"""
    # --- training
    groups_per_update: int = 8
    """tasks per update, over all processes"""
    group_size: int = 8
    """episodes per task"""
    max_turns: int = 0
    """assistant messages per episode (0: the environment family's own number)"""
    max_new_tokens: int = 48
    """length limit of one assistant message"""
    temperature: float = 1.0
    """of sampling and of every log-prob in the loss"""
    learning_rate: float = 1e-3
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 5
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 2
    """passes over each rollout; in the first step after a rollout every ratio is exactly 1"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 8192
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float = 0.2
    """ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """ratio is clipped above at 1 + clip_high"""
    kl_coef: float = 0.0
    """coefficient of the k3 estimate of KL(policy || start policy) in the loss, per token, each estimate capped at 10"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """mean over all policy tokens of the update, or mean over each episode, then over episodes"""
    advantage_eps: float = 1e-6
    """added to a group's standard deviation (ddof 1)"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm"""
    # --- InterQ-RL and what it is compared with
    preset: Literal["interq", "bf16", "flash_rl", "ais", "qurl", "qat", "qat_tis", "qat_ais", "prefix", "global"] = "interq"
    """sets --rollout-format, --qat and --correction where they are left at None; an explicit flag wins. flash_rl: token TIS without QAT;
    prefix, global: QAT and that correction"""
    executor_output: Literal["bf16", "float32"] = "bf16"
    """what the torch engine rounds the results of quantised layers to, as the kernels of a GPU do; the learner does not follow it, which leaves a
    mismatch after QAT as there [deduced]"""
    qat: bool | None = None
    """the learner's forward pass follows the rollout format; None: by --preset"""
    correction: Literal["interq", "none", "token_tis", "token_ais", "qurl", "prefix", "global"] | None = None
    """weight of a token's loss: interq; none; min(ratio, cap); adaptively mixed with 1; TIS with QuRL's wider upper clip; the prefix weight in full;
    the same share of it everywhere. None: by --preset"""
    eps_low: float = 0.025
    """lower envelope of the prefix log-ratio, times sqrt(policy tokens so far) [paper]"""
    eps_high: float = 0.05
    """upper envelope, times sqrt(policy tokens so far) [paper]"""
    alpha_g: float = 0.5
    """strength of the correction: its squared displacement is this squared times that of the full prefix weights, over all segments of the update [deduced]"""
    tis_cap: float = 2.0
    """cap of the ratio trainer/executor in token_tis, token_ais and qurl [published values: 2]"""
    ais_scale: float = 0.05
    """token_ais: mean |log-ratio| at which half of the reliable weight is given to the correction [deduced]"""
    uaq_scale: float = 1.5
    """qurl: weights after a norm are divided by this once and the norm's scale multiplied, so that an update is larger against the rounding step [QuRL]"""


# what a preset sets
PRESETS: dict[str, dict] = {
    "interq": {"qat": True, "correction": "interq", "rollout_format": "fp8_e4m3"},
    "bf16": {"qat": False, "correction": "none", "rollout_format": "bf16"},
    "flash_rl": {"qat": False, "correction": "token_tis", "rollout_format": "fp8_e4m3"},
    "ais": {"qat": False, "correction": "token_ais", "rollout_format": "fp8_e4m3"},
    "qurl": {"qat": False, "correction": "qurl", "rollout_format": "fp8_e4m3"},
    "qat": {"qat": True, "correction": "none", "rollout_format": "fp8_e4m3"},
    "qat_tis": {"qat": True, "correction": "token_tis", "rollout_format": "fp8_e4m3"},
    "qat_ais": {"qat": True, "correction": "token_ais", "rollout_format": "fp8_e4m3"},
    "prefix": {"qat": True, "correction": "prefix", "rollout_format": "fp8_e4m3"},
    "global": {"qat": True, "correction": "global", "rollout_format": "fp8_e4m3"},
}


def resolve(args: Args) -> Args:
    """The arguments with every None replaced by what the preset says."""
    return replace(args, **{name: value for name, value in PRESETS[args.preset].items() if getattr(args, name) is None})


# ------------------------------------------------------------------------------------------- prompts and message format


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy, by the careless expert: whole episodes, every assistant message of which is trained on."""
    rng = random.Random(seed)
    return [tasks.careless(task, rng) for task in tasks.train]


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


def prefix_weights(delta: torch.Tensor, layout: Layout, eps_low: float, eps_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(2) E[t] = sum_{u <= t} delta[u] over the trajectory's policy tokens, W~[t] = exp(clip(E[t], -eps_low sqrt(n[t]), eps_high sqrt(n[t]))).

    delta [N]: log q_old - log r_exec of the policy tokens, which are all that layout holds: what the environment said adds nothing.
    n[t] counts the trajectory's policy tokens up to t. Returns (E [N] float64, W~ [N] float64).
    """
    total = segment_cumsum(delta.double().clamp(-20, 20), layout.episodes)
    n = torch.arange(1, len(delta) + 1, dtype=torch.float64) - layout.episodes[layout.episode_ids]
    return total, torch.maximum(torch.minimum(total, eps_high * n.sqrt()), -eps_low * n.sqrt()).exp()


def segment_support(weights: torch.Tensor, layout: Layout, eps: float = 1e-8) -> tuple[torch.Tensor, torch.Tensor]:
    """(3) Of each action segment (turn): rho[s] = (ESS - 1) / (n - 1) * nu / (nu + eps), and C[s] = mean (W~ - 1)^2.

    ESS = n mu^2 / nu with mean mu and second moment nu of the segment's prefix weights; rho lies in [0, 1] and is 0 for a segment of one token.
    weights [N] float64 -> (rho [S], C [S])
    """
    stats = segment_stats(weights, layout.turns)
    n, nu = stats.count.double(), stats.second_moment
    rho = ((stats.ess - 1) / (n - 1).clamp(min=1) * nu / (nu + eps)).clamp(0, 1)
    return torch.where(n > 1, rho, 0.0), segment_stats(weights - 1, layout.turns).second_moment


def allocate(
    rho: torch.Tensor,
    displacement: torch.Tensor,
    alpha_g: float,
    all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    all_max: Callable[[float], float] = lambda x: x,
    steps: int = 80,
) -> torch.Tensor:
    """(3) Maximises sum C rho alpha subject to sum C alpha^2 <= alpha_g^2 sum C and 0 <= alpha <= 1. The solution is alpha = min(c rho, 1).

    rho, displacement (C) [S] float64; the budget is one for all processes. c by bisection of its logarithm: at c = alpha_g the budget is kept, since
    no rho is above 1, and at 1 / min rho every alpha is 1. Equal support gives alpha_g everywhere; segments without support get 0, and where they
    put the budget out of reach, all others get 1. -> [S]
    """
    if alpha_g == 0:
        return torch.zeros_like(rho)
    budget = alpha_g**2 * all_sum(displacement.sum()[None])[0]
    low, high = np.log(alpha_g), all_max(float(-rho[rho > 0].min().log()) if (rho > 0).any() else 0.0)
    for _ in range(steps):
        middle = (low + high) / 2
        spent = all_sum((displacement * (np.exp(middle) * rho).clamp(max=1) ** 2).sum()[None])[0]
        low, high = (middle, high) if spent <= budget else (low, middle)
    return (np.exp(low) * rho).clamp(max=1)


def correction_weights(
    kind: str,
    delta: torch.Tensor,
    layout: Layout,
    eps_low: float,
    eps_high: float,
    alpha_g: float,
    tis_cap: float,
    ais_scale: float,
    all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    all_max: Callable[[float], float] = lambda x: x,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(2) (3) (4) The detached weight of every token's loss, [N] float64, exactly 1 where delta is 0 all along, and what led to it.

    kind: interq 1 + alpha[s] (W~ - 1); prefix W~; global 1 + alpha_g (W~ - 1); token_tis and qurl min(exp(delta), cap); token_ais
    1 + a (min(exp(delta), cap) - 1) with one a = ESS/n * D / (D + ais_scale) / (1 + var) for the update, D = mean |delta| [deduced]; none 1.
    The second value holds E and W~ [N], and rho, C and alpha of every segment [S] (alpha: NaN unless kind is interq).
    """
    delta = delta.double().clamp(-20, 20)
    total, prefix = prefix_weights(delta, layout, eps_low, eps_high)
    rho, displacement = segment_support(prefix, layout)
    alpha = torch.full_like(rho, torch.nan)
    ratio = delta.exp().clamp(max=tis_cap)
    if kind == "interq":
        alpha = allocate(rho, displacement, alpha_g, all_sum, all_max)
        weights = 1 + alpha[layout.turn_ids] * (prefix - 1)  # (4)
    elif kind == "prefix":
        weights = prefix
    elif kind == "global":
        weights = 1 + alpha_g * (prefix - 1)
    elif kind in ("token_tis", "qurl"):
        weights = ratio
    elif kind == "token_ais":
        n, first, second, moved = all_sum(torch.stack([torch.tensor(float(len(delta)), dtype=torch.float64), ratio.sum(), (ratio**2).sum(), delta.abs().sum()]))
        mean_gap, variance = moved / n.clamp(min=1), second / n.clamp(min=1) - (first / n.clamp(min=1)) ** 2
        reliable = first**2 / (n * second).clamp(min=1e-30)
        share = (reliable * mean_gap / (mean_gap + ais_scale + 1e-30) / (1 + variance)).clamp(0, 1)
        weights = 1 + share * (ratio - 1)
    else:
        weights = torch.ones_like(delta)
    return weights, {"total": total, "prefix": prefix, "rho": rho, "displacement": displacement, "alpha": alpha}


def policy_loss(
    logprobs: torch.Tensor,  # [N] with gradient
    old_logprobs: torch.Tensor,  # [N] learner, before the update
    weights: torch.Tensor,  # [N] of the correction, without gradient
    upper: torch.Tensor,  # [N] upper clip of the ratio
    advantages: torch.Tensor,  # [N]
    token_weights: torch.Tensor,  # [N] they sum to 1 over the optimizer step, all processes together
    clip_low: float,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """(4) Clipped policy-gradient loss times the correction's weight, weighted sum over tokens. Metrics are (sum, count) pairs."""
    logratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = logratio.exp()
    loss = -torch.minimum(ratio * advantages, torch.minimum(ratio.clamp(min=1 - clip_low), upper) * advantages)
    loss = loss * weights
    with torch.no_grad():
        n = float(len(loss))
        clipped = (advantages > 0) & (ratio > upper) | (advantages < 0) & (ratio < 1 - clip_low)
        metrics = {
            "losses/policy_loss": (float((loss * token_weights).sum()), 0.0),  # counted once per optimizer step by the caller
            "losses/approx_kl": (float((ratio - 1 - logratio).sum()), n),
            "losses/old_approx_kl": (float(-logratio.sum()), n),
            "losses/clipfrac": (float(clipped.sum()), n),
        }
    if ref_logprobs is not None:
        d = (ref_logprobs - logprobs).clamp(-20, 20)
        k3 = (d.exp() - d - 1).clamp(max=10)
        loss = loss + kl_coef * k3
        metrics["losses/kl"] = (float(k3.detach().sum()), n)
    return (loss * token_weights).sum(), metrics


def upper_clip(kind: str, delta: torch.Tensor, clip_high: float, tis_cap: float) -> torch.Tensor:
    """1 + clip_high, and for QuRL (1 + clip_high) / r with r = min(exp(delta), cap) / exp(delta) <= 1. [N] -> [N] float64"""
    ratio = delta.double().clamp(-20, 20).exp()
    return (1 + clip_high) * (ratio / ratio.clamp(max=tis_cap) if kind == "qurl" else torch.ones_like(ratio))


def update_aware_scaling(lm: torch.nn.Module, scale: float) -> None:
    """QuRL: divides the weights of the layers that read a norm's output by `scale` and multiplies that norm by it, in place. The function the model
    computes stays the same, up to rounding.

    Raises PolicyError for a model whose decoder layers are not built like Llama's.
    """
    with torch.no_grad():
        for layer in lm.base_model.layers:
            try:
                readers = {
                    layer.input_layernorm: (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                    layer.post_attention_layernorm: (layer.mlp.gate_proj, layer.mlp.up_proj),
                }
            except AttributeError as e:
                raise PolicyError(f"--correction qurl: {type(lm).__name__} has other decoder layers than Llama ({e}); use --uaq-scale 1") from e
            for norm, linears in readers.items():
                if "Gemma" in type(norm).__name__:  # multiplies by 1 + weight
                    raise PolicyError(f"--correction qurl: {type(norm).__name__} cannot be rescaled; use --uaq-scale 1")
                norm.weight.mul_(scale)
                for linear in linears:
                    linear.weight.div_(scale)


# -------------------------------------------------------------------------------------------------------- reports

PANELS = [
    Panel("Success of training episodes", ("charts/success",), limits=(0, 1)),
    Panel("Executor and learner: K3", ("rollout/k3",), log=True),
    Panel("Weights of the correction", ("interq/weight_min", "interq/weight_mean", "interq/weight_max")),
    Panel("Support and share of the correction", ("interq/rho_p*", "interq/alpha_p*"), limits=(0, 1)),
    Panel("Turns", ("charts/turns", "interq/turns_of_successes")),
    Panel("Cut episodes", ("rollout/truncated_frac", "rollout/truncated/*"), limits=(0, 1)),
]


def by_turn(delta: torch.Tensor, total: torch.Tensor, layout: Layout) -> dict[str, tuple[float, float]]:
    """Mean |log-ratio| by interaction turn: of the current action alone, and of the whole history up to and with it, as (sum, count) pairs."""
    stats = segment_stats(delta.double(), layout.turns)
    current, history = (stats.mean * stats.count).abs(), total[layout.turns[1:] - 1].abs()
    number = torch.arange(len(current)) - torch.repeat_interleave(layout.episode_turns[:-1], layout.episode_turns.diff())
    count = torch.bincount(number)
    out = {}
    for name, values in {"current": current, "history": history}.items():
        sums = torch.zeros(len(count), dtype=torch.float64).index_add(0, number, values)
        out |= {f"interq/logratio_{name}/turn_{k + 1:02d}": (s, c) for k, (s, c) in enumerate(zip(sums.tolist(), count.tolist()))}
    return out


def draw_by_turn(rows: Sequence[dict], path) -> None:
    """The mean |log-ratio| of the current action and of the history, by interaction turn, over the last quarter of the updates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("history", "history up to the turn"), ("current", "current action")):
        found: dict[int, list[float]] = {}
        for row in rows[-max(1, len(rows) // 4) :]:
            for key, value in row.items():
                if key.startswith(f"interq/logratio_{name}/turn_") and value is not None:
                    found.setdefault(int(key.rpartition("_")[2]), []).append(value)
        axes.plot(sorted(found), [float(np.mean(found[k])) for k in sorted(found)], marker="o", label=label)
    axes.set(title="Mismatch by interaction turn", xlabel="turn", ylabel="mean |log q_old - log r_exec|, nats")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def episode_record(step: int, e: Episode, span: slice, segments: slice, advantage: float, found: dict[str, torch.Tensor], tokenizer) -> dict:
    """What episodes.jsonl keeps of an episode: exact tokens, log-probs of executor and learner, weights, and of each turn its support and share."""
    per_turn = {name: found[name][segments].tolist() for name in ("rho", "displacement", "alpha")}
    return {
        "step": step, "group": e.group, "sample": e.sample, "task_id": e.task["id"], "prompt": tokenizer.decode(e.prompt_ids), "prompt_ids": e.prompt_ids,
        "token_ids": e.token_ids, "tokens": [tokenizer.decode([t]) for t in e.token_ids], "policy_mask": e.policy_mask, "logprobs": e.logprobs,
        "turns": [
            {"start": t.start, "stop": t.stop, "reward": t.reward, **{name: values[i] for name, values in per_turn.items()}} for i, t in enumerate(e.turns)
        ],
        "reward": e.reward, "success": e.success, "truncated": e.truncated, "advantage": advantage,
        **{name: found[name][span].tolist() for name in ("delta", "total", "prefix", "weights")},
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: a bar per turn with its share alpha; log-ratios and weights along the tokens."""

    def strip(name: str, values: Sequence[float], note: str, **more) -> dict:
        rest = iter(values)
        return {"name": name, "values": [next(rest) if own else None for own in record["policy_mask"]], "scale": "diverging", "note": note, **more}

    share = "rho" if any(t["alpha"] is None for t in record["turns"]) else "alpha"
    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}" + (f" (cut: {record['truncated']})" if record["truncated"] else ""),
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {
            "success": record["success"], "return": record["reward"], "advantage": round(record["advantage"], 3), "turns": len(record["turns"]),
            "tokens": len(record["logprobs"]),
        },
        "tokens": record["tokens"],
        "turns": [
            {"name": f"turn {i + 1}: rho {t['rho']:.2f}, C {t['displacement']:.1e}", "start": t["start"], "end": t["stop"], "value": t[share]}
            for i, t in enumerate(record["turns"])
        ],
        "masked": [not own for own in record["policy_mask"]],
        "strips": [
            strip("log q / r", record["delta"], "this token's log-ratio"),
            strip("history", record["total"], "sum of the log-ratios so far"),
            strip("prefix weight - 1", [w - 1 for w in record["prefix"]], "after the envelope"),
            strip("weight - 1", [w - 1 for w in record["weights"]], "what the loss is multiplied by, less 1"),
        ],
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded. `args` after `resolve`."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "save_every": 0, "groups_per_update": 1, "group_size": 2, "max_turns": 0, "max_new_tokens": 1,
        "update_epochs": 1, "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "kl_coef": 0, "tis_cap": 1, "advantage_eps": 0,
        "learning_rate": 0, "clip_high": 0, "eps_low": 0, "eps_high": 0, "ais_scale": 0, "seed": 0,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm", "uaq_scale"), shares=("clip_low", "alpha_g"))
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.qat and args.rollout_format == "bf16":
        raise ArgumentError("--qat with --rollout-format bf16: there is no rounding to follow; use --qat False, or an 8-bit or 4-bit format")


def main(args: Args) -> Run:
    args = resolve(args)
    check_args(args)
    processes = Processes()
    device, world, rank = processes.device, processes.world, processes.rank
    if args.groups_per_update % world or args.groups_per_update // world < args.num_minibatches:
        raise ArgumentError(f"--groups-per-update {args.groups_per_update}: must be a multiple of {world} processes, --num-minibatches or more groups each")
    engine_kind = ("vllm" if device.type == "cuda" else "torch") if args.engine == "auto" else args.engine
    only_kv = args.rollout_format == "fp8_kv"
    bf16 = args.precision == "bf16" or (args.precision == "auto" and device.type == "cuda")
    amp = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext
    if processes.is_main:
        print(f"preset {args.preset}: " + ", ".join(f"{name} {getattr(args, name)}" for name in PRESETS["interq"]), flush=True)

    # tasks and policy
    tasks = envs.load(args.env)
    max_turns = args.max_turns or tasks.max_turns
    games = [tasks.make_env() for _ in range(tasks.workers or args.groups_per_update // world * args.group_size)]
    with processes.main_first():
        demonstrations = (lambda: warm_start_conversations(tasks)) if tasks.careless else None
        lm, tokenizer, _ = load_policy(args.model, demonstrations, TinyConfig(), device=device)
    if args.correction == "qurl" and args.uaq_scale != 1:
        update_aware_scaling(lm, args.uaq_scale)
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

    # start policy for the KL term; executor; parallel wrappers; optimizer
    start_policy = Policy(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 else None
    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    emulated = {"emulate_linears": not only_kv, "emulate_output": torch.bfloat16 if args.executor_output == "bf16" else None}
    options = emulated if engine_kind == "torch" else {"kv_cache_dtype": "fp8"} if only_kv else {}
    rollout_format = ("auto" if engine_kind == "vllm" else "fp8_e4m3") if only_kv else args.rollout_format
    engine = make_engine(engine_kind, engine_lm, tokenizer, max_model_len=context, rollout_format=rollout_format, **options)
    rules = (
        {"fmt": "fp8_e4m3", "linears": False, "kv_scale": 1.0 if engine_kind == "vllm" else None, "kv_truncate": engine_kind == "vllm" and device.type == "cpu"}
        if only_kv
        else {"fmt": args.rollout_format, "through_bf16": engine_kind == "vllm"}
    )

    def learner(model: torch.nn.Module = lm) -> ExitStack:
        """(1) The context of every forward pass of the learner: mixed precision, and the executor's rounding with --qat."""
        stack = ExitStack()
        stack.enter_context(amp())
        if args.qat:
            stack.enter_context(quantized(model, **rules))
        return stack

    bare = Policy(lm)
    policy = processes.wrap(bare, lm.base_model.layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    def play(numbered: Sequence[tuple[int, dict]], n: int, how: Sampling, update: int) -> list[Episode]:
        return rollout(engine, tokenizer, games, tasks.workers, numbered, n, how, max_turns, context, args.seed, update)

    run = Run(
        args,
        "interq_rl",
        total_updates=args.num_updates,
        key_metrics=["eval/success", "charts/success", "charts/turns", "rollout/k3", "interq/aulc", "interq/rollback"],
        **distributed(),
    )
    first_update, curve = 0, []  # curve: (update, success) of every evaluation
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)
        curve = state["curve"]

    def evaluate(at: int) -> dict[str, float]:
        """Greedy success of the executor on the unseen split; the curve's normalised area so far, and how far it is under its peak."""
        everything = play(list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world], 1, greedy, -1)
        es = [e for e in everything if not e.error]
        sums = {"eval/success": (sum(e.success for e in es), len(es)), "eval/error_frac": (len(everything) - len(es), len(everything))}
        sums["eval/turns"] = (sum(len(e.turns) for e in es), len(es))
        sums["eval/turns_of_successes"] = (sum(len(e.turns) for e in es if e.success >= 1), sum(e.success >= 1 for e in es))
        sums["eval/length"] = (sum(len(e.logprobs) for e in es), len(es))
        sums["eval/truncated_frac"] = (sum(bool(e.truncated) for e in es), len(es))
        for split in processes.union({e.task["split"] for e in es if "split" in e.task}):
            of = [e for e in es if e.task.get("split") == split]
            sums[f"eval/success/{split}"] = (sum(e.success for e in of), len(of))
        metrics = reduce_metrics(sums)
        if metrics.get("eval/success") is not None:
            curve.append((at, metrics["eval/success"]))
            metrics["interq/rollback"] = max(y for _, y in curve) - curve[-1][1]
            if at > 0:
                metrics["interq/aulc"] = float(np.trapezoid([y for _, y in curve], [x for x, _ in curve]) / at)
        return metrics

    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        run.log(evaluate(0), step=0)

    for update in range(first_update, args.num_updates):
        started = time.perf_counter()
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
            everything = play(mine, args.group_size, sampling, update)
        measured = [e for e in everything if not e.error]  # an episode whose environment failed is counted below and takes no part
        episodes = [e for e in measured if e.turns]
        items, masks = [(e.prompt_ids, e.token_ids) for e in episodes], [e.policy_mask for e in episodes]
        layout = make_layout([[t.stop - t.start for t in e.turns] for e in episodes])
        offset = layout.episodes.tolist()
        rollout_logprobs = torch.tensor([x for e in episodes for x in e.logprobs], dtype=torch.float32)

        def packed(batch: list[int], items: list = items, masks: list = masks) -> PackedBatch:
            return (pack_rows([items[i] for i in batch], share, pad_id, [masks[i] for i in batch]) if batch else EMPTY).to(device)

        def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
            return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

        with run.timer("reward"):
            returns = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
            advantages, varies = group_advantages(returns, torch.tensor([e.group for e in episodes], dtype=torch.int64), args.advantage_eps)
        token_adv = advantages[layout.episode_ids].float()

        # --- (1) log-probs of the learner before the update: the ratio's anchor, and one side of the mismatch
        old_logprobs = torch.zeros(offset[-1])
        with run.timer("train"), torch.no_grad(), learner():
            for batch in processes.rounds(list(micro_batches(items, args.micro_batch_tokens))):
                logprobs = policy(packed(batch), args.temperature)[0].cpu()
                if batch:
                    old_logprobs[token_index(batch)] = logprobs

        # --- (2) (3) weights of the correction
        with run.timer("correction"):
            delta = old_logprobs.double() - rollout_logprobs.double()
            exact_weights, found = correction_weights(
                args.correction, delta, layout, args.eps_low, args.eps_high, args.alpha_g, args.tis_cap, args.ais_scale, processes.all_sum, processes.all_max
            )
            weights, upper = exact_weights.float(), upper_clip(args.correction, delta, args.clip_high, args.tis_cap).float()

        # --- update
        with run.timer("train"):
            lr = args.learning_rate * min(1.0, (update + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            policy.train()
            for epoch in range(args.update_epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(args.groups_per_update)
                for part in range(args.num_minibatches):
                    chosen = set(order[part :: args.num_minibatches].tolist())
                    rows = [i for i, e in enumerate(episodes) if e.group in chosen]
                    totals = processes.all_sum(torch.tensor([float(sum(offset[i + 1] - offset[i] for i in rows)), float(len(rows))], dtype=torch.float64))
                    if totals[0] == 0:  # nothing to learn from: no step, which would only follow old momentum
                        continue
                    batches = [[rows[i] for i in b] for b in micro_batches([items[i] for i in rows], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    optimizer.zero_grad(set_to_none=True)
                    for number, batch in enumerate(batches):
                        with no_sync(policy, number < len(batches) - 1):
                            inputs = packed(batch)
                            with learner():
                                logprobs, entropy = policy(inputs, args.temperature)
                            loss = logprobs.sum() * 0.0
                            if batch:
                                index = token_index(batch)
                                token_weights = torch.full((len(index),), 1.0 / float(totals[0]))
                                if args.loss_aggregation == "seq_mean_token_mean":
                                    token_weights = 1.0 / (layout.episodes.diff()[layout.episode_ids[index]] * float(totals[1]))
                                reference = None
                                if start_policy is not None:
                                    with torch.no_grad(), learner(start_policy.lm):
                                        reference = start_policy(inputs, args.temperature)[0]
                                loss, metrics = policy_loss(
                                    logprobs, old_logprobs[index].to(device), weights[index].to(device), upper[index].to(device), token_adv[index].to(device),
                                    token_weights.float().to(device), args.clip_low, reference, args.kl_coef,
                                )  # fmt: skip
                                add({**metrics, "losses/entropy": (float(entropy.sum()), len(index))})
                            (loss * world).backward()  # gradients are averaged over processes; token_weights are global
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                    if not np.isfinite(norm):
                        raise RunError(f"update {update + 1}: the gradient is not finite ({norm}); {LOWER_LR}")
                    add({"losses/grad_norm": (norm, 1.0), "losses/policy_loss": (0.0, 1.0 / world)})
                    optimizer.step()
            policy.eval()
            if not all(bool(p.isfinite().all()) for p in policy.parameters()):
                raise RunError(f"update {update + 1}: the weights are no longer finite; {LOWER_LR}")
        version = engine.weight_version  # of the weights that sampled this update's episodes
        with run.timer("sync"):
            sync_engine()

        # --- log
        mismatch = delta.clamp(-20, 20)
        n_tokens = float(offset[-1])
        flat = {e.group: True for e in episodes} | {e.group: False for e, v in zip(episodes, varies.tolist()) if v}
        solved = [e for e in measured if e.success >= 1]
        add(
            {
                **episode_metrics(measured, everything),
                "charts/learning_rate": (lr, 1.0),
                "rollout/zero_std_group_frac": (float(sum(flat.values())), float(len(flat))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(delta.abs().sum()), n_tokens),
                "rollout/logprob_absdiff_max": (float(delta.abs().max()) if n_tokens else 0.0, n_tokens),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_tokens),
                "interq/turns_of_successes": (float(sum(len(e.turns) for e in solved)), float(len(solved))),
                "interq/weight_mean": (float(exact_weights.sum()), n_tokens),
                "interq/weight_max": (float(exact_weights.max()) if n_tokens else 0.0, n_tokens),
                "interq/displacement": (float(((exact_weights - 1) ** 2).sum()), n_tokens),
                "interq/envelope_frac": (float((found["prefix"].log() - found["total"]).abs().gt(1e-9).sum()), n_tokens),
                **by_turn(delta, found["total"], layout),
            }
        )
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})
        metrics["interq/weight_min"] = -processes.all_max(float(-exact_weights.min()) if n_tokens else -np.inf)
        for name in ("rho", "displacement", "alpha"):
            every = np.array([x for part in run.gather(found[name].tolist()) for x in part])
            if len(every) and np.isfinite(every).all():
                metrics |= {f"interq/{name}_p{q}": float(np.percentile(every, q)) for q in (10, 50, 90)}
        seconds = time.perf_counter() - started
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([n_tokens], dtype=torch.float64))[0]) / seconds
        metrics["interq/correction_share"] = run.seconds["correction"] / seconds
        done = update + 1
        if done == args.num_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate(done)
            found |= {"delta": delta, "weights": exact_weights}
            shown = next((e.group for e, v in zip(episodes, varies.tolist()) if v), None)
            for i in [i for i, e in enumerate(episodes) if e.group == shown][:4]:
                segments = slice(int(layout.episode_turns[i]), int(layout.episode_turns[i + 1]))
                record = episode_record(done, episodes[i], slice(offset[i], offset[i + 1]), segments, float(advantages[i]), found, tokenizer)
                run.episode(record, step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                run.save_checkpoint(done, {**training_state(bare, optimizer), "curve": curve})
        if stop:
            break

    engine.close()
    for game in games:
        game.close()
    if processes.is_main:
        episodes = [viewer_episode(record) for record in read_jsonl(run.folder / "episodes.jsonl")]
        legend = [
            "Bars: share of the correction that a turn received (without interq: its support).",
            "Log-ratios and weights stand at the policy's own tokens; what the environment said is grey.",
        ]
        subtitle = f"{args.preset}: rollouts {args.rollout_format}, QAT {'on' if args.qat else 'off'}, correction {args.correction}"
        write_credit_html(run.folder / "credit.html", episodes, f"interq_rl.py on {args.env}", subtitle, legend)
        draw_by_turn(read_jsonl(run.folder / "metrics.jsonl"), run.folder / "by_turn.png")
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        sys.exit(main(parse_args(Args)).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, RunError) as error:  # what a user can mend; anything else shows its traceback
        sys.exit(f"{type(error).__name__}: {error}")
