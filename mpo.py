# docs: docs/mpo.md
"""MPO: Multiscale Policy Optimization for long-horizon agents (October 2026, arXiv 2610.35013).

An agent's episode has two clocks: the environment answers once per turn, the policy writes token by token, and one reward comes at
the very end. MPO moves credit between turns on the first clock, refines it inside a turn on the second, and weighs an update by the
ratio of whole turns. What departs from PPO with a token-level GAE, marked (1) to (5) in the code:

(1) the residuals of a turn's tokens add up to a residual of the turn, in which every value inside the turn cancels;
(2) GAE runs over turns: credit decays by lam once per interaction, not once per token;
(3) a trace of the token residuals that stops at the turn's end, centred so that the mean over a turn stays the turn's advantage;
(4) every token is weighted and clipped by the ratio of its whole turn, while its gradient is that of its own log-prob alone;
(5) the critic starts as a copy of the policy, learns the final reward at every token, and warms up before the policy moves.

Laptop, two CPU cores (about 3 minutes):   python mpo.py
Another task, another algorithm:           python mpo.py --env automation --preset ppo
One GPU:                                   python mpo.py --model Qwen/Qwen2.5-1.5B-Instruct --env search:FOLDER --learning-rate 1e-6 --critic-learning-rate 1e-5
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml mpo.py --model ... --env ...
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import comb
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sampling, make_engine
from common.packing import EMPTY, PackedBatch, Policy, check_packing, forward_hidden, micro_batches, pack_rows
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.rollout import Episode, Layout, encode, episode_metrics, make_layout, observation_frame, rollout
from common.run import Run
from common.viewer import write_credit_html
from kernels.segment_scan import segment_scan, segment_stats
from mpo_report import episode_record, viewer_episode


@dataclass
class Args:
    # --- run
    env: str = "search"
    """task: search or automation are generated; real data: search:FOLDER (BEIR layout or question/answer jsonl); any other family of several turns"""
    model: str = "tiny"
    """tiny (built and warm-started on first use), smollm2, a folder or a hub id"""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """generation; auto: vllm on CUDA, torch elsewhere"""
    rollout_format: Literal["auto", "bf16", "fp8", "fp8_kv"] = "auto"
    """number format of rollouts; auto: FP8 weights, activations and KV cache in vllm on CUDA, the model's own elsewhere; fp8_kv: FP8 cache only"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of training (master weights are always float32); auto: bf16 autocast on CUDA, float32 elsewhere"""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """how several processes share policy and critic"""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """compute common beginnings of episodes once instead of once per episode (exact); auto: on where the model allows it"""
    seed: int = 1
    """seed of data order and sampling; every turn has its own stream from (seed, update, task, sample, turn)"""
    num_updates: int = 25
    """rollout-and-update rounds, value warm-up included"""
    eval_every: int = 5
    """updates between evaluations on the unseen split (0: only at the start and the end)"""
    eval_tasks: int = 128
    """evaluation tasks, greedy decoding"""
    eval_samples: int = 8
    """attempts per evaluation task at --temperature, before the first and after the last update: pass@k for k up to it, pass^3 (0: none; the paper: 32)"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__mpo__<seed>__<time>"""
    track: bool = False
    """log to Weights & Biases too"""
    # --- training
    groups_per_update: int = 16
    """tasks per update, over all processes"""
    group_size: int = 8
    """episodes per task [paper]"""
    max_turns: int = 0
    """assistant messages per episode (0: the environment family's own number; the paper: 20 to 50)"""
    max_new_tokens: int = 64
    """length limit of one assistant message"""
    temperature: float = 1.0
    """of sampling and of every log-prob in the loss"""
    learning_rate: float = 5e-4
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 5
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 2
    """passes of the policy over each rollout; in the first step after a rollout every ratio is exactly 1"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 8192
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float | None = None
    """ratio is clipped below at 1 - clip_low; None: by --preset"""
    clip_high: float | None = None
    """ratio is clipped above at 1 + clip_high; None: by --preset (mpo: 0.28 on the product of the turn [deduced])"""
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    kl_coef: float = 0.0
    """coefficient of the k3 estimate of KL(policy || start policy) in the loss, per token, each estimate capped at 10"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] | None = None
    """mean over all policy tokens of the update, or mean over each episode, then over episodes; None: by --preset"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm, of policy and critic apart"""
    # --- MPO and what it is compared with
    preset: Literal["mpo", "mpo_token_is", "ppo", "vapo", "grpo", "dapo", "gspo"] = "mpo"
    """sets every flag below that is left at None, and the clip range and aggregation above; an explicit flag wins"""
    advantage: Literal["mae", "turn", "token", "group"] | None = None
    """mae: turn GAE with centred refinement inside the turn; turn: mae with beta 0; token: token GAE; group: GRPO's, without critic"""
    importance: Literal["turn", "token", "sequence"] | None = None
    """ratio that weighs and clips a token: of its turn (product), its own, or of its episode (geometric mean, GSPO)"""
    beta: float | None = None
    """mae: weight of the centred refinement; 0 broadcasts the turn's advantage [paper: 1]"""
    lam: float | None = None
    """GAE decay per turn (mae, turn) [paper: 0.80] or per token (token)"""
    lam_intra: float | None = None
    """mae: decay per token inside a turn [paper: 0.95]"""
    lam_critic: float | None = None
    """decay per token of the critic's targets; 1: every token regresses to what the episode will still pay [paper: 1]"""
    length_adaptive_alpha: float | None = None
    """token: above 0, lam is 1 - 1 / (alpha * tokens of the episode) instead of --lam [VAPO: 0.05]"""
    whiten: bool | None = None
    """critic-based advantages: subtract the mean and divide by the standard deviation (ddof 1) over the policy tokens of the update"""
    nll_coef: float | None = None
    """weight of the mean negative log-prob over the tokens of successful episodes [VAPO: 0.1]"""
    dynamic_sampling: bool | None = None
    """DAPO: drop groups whose episodes all earned the same, and play further tasks in their place"""
    overlong_buffer: float | None = None
    """DAPO: reward falls linearly by up to 1 over this last share of the context [published: 4096 of 20480 tokens]; 0: off"""
    generation_rounds: int = 10
    """dynamic sampling: most rounds of rollouts per update; then the update uses what is there [DAPO's published value]"""
    clip_scaling: Literal["none", "sqrt_length"] = "none"
    """sqrt_length: the clip bounds of a turn, as logarithms, grow with the square root of its length [deduced]"""
    advantage_eps: float = 1e-6
    """group: added to the group's standard deviation (ddof 1)"""
    critic_learning_rate: float = 1e-3
    """constant; for the tiny policy (paper-size models: about 5e-6) [deduced]"""
    critic_epochs: int = 2
    """passes of the critic over each rollout [deduced]"""
    critic_minibatches: int = 8
    """optimizer steps of the critic per pass, at most one per task [deduced]"""
    value_warmup: int = 5
    """updates in which only the critic learns [paper: as VAPO, which takes about 50; length deduced]"""
    value_clip: float = 0.5
    """a value's change is clipped at this distance from the rollout's value where that raises the loss (0: off) [deduced]"""


# what a preset sets; the first entry holds the defaults of all
PRESETS: dict[str, dict] = {
    "": {
        "advantage": "token", "importance": "token", "beta": 1.0, "lam": 1.0, "lam_intra": 0.95, "lam_critic": 1.0, "length_adaptive_alpha": 0.0,
        "whiten": False, "nll_coef": 0.0, "dynamic_sampling": False, "overlong_buffer": 0.0, "clip_low": 0.2, "clip_high": 0.2,
        "loss_aggregation": "token_mean",
    },
    "mpo": {"advantage": "mae", "importance": "turn", "lam": 0.8, "clip_high": 0.28},
    "mpo_token_is": {"advantage": "mae", "lam": 0.8, "clip_high": 0.28},
    "ppo": {"whiten": True},
    "vapo": {"length_adaptive_alpha": 0.05, "whiten": True, "nll_coef": 0.1, "clip_high": 0.28},
    "grpo": {"advantage": "group", "loss_aggregation": "seq_mean_token_mean"},
    "dapo": {"advantage": "group", "dynamic_sampling": True, "overlong_buffer": 0.2, "clip_high": 0.28},
    "gspo": {"advantage": "group", "importance": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "seq_mean_token_mean"},
}  # fmt: skip


def resolve(args: Args) -> Args:
    """The arguments with every None replaced by what the preset says."""
    chosen = PRESETS[""] | PRESETS[args.preset]
    return replace(args, **{name: value for name, value in chosen.items() if getattr(args, name) is None})


# ------------------------------------------------------------------------------------------- prompts and message format


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy, by the careless expert: whole episodes, every assistant message of which is trained on."""
    rng = random.Random(seed)
    return [tasks.careless(task, rng) for task in tasks.train]


# ------------------------------------------------------------- the paper's functions: tensors in, tensors and metrics out


def token_residuals(values: torch.Tensor, turn_rewards: torch.Tensor, layout: Layout) -> torch.Tensor:
    """delta[t, i] = r[t, i] + V_next - V[t, i]: V_next is the value before the episode's next policy token, across observations, and 0 at the end.

    values [N] float64, before each token; turn_rewards [T], earned by a turn's last token (the paper: R(tau) on the last turn, else 0). -> [N]
    """
    rewards = torch.zeros_like(values).index_put((layout.turns[1:] - 1,), turn_rewards)
    return rewards + segment_scan(values, 0.0, layout.episodes, exclusive=True) - values


def turn_advantages(values: torch.Tensor, turn_rewards: torch.Tensor, layout: Layout, lam: float) -> torch.Tensor:
    """(1) (2) A[t] = sum_l lam^l delta[t + l], delta[t] = r[t] + V[t + 1, 1] - V[t, 1]. Only the value before a turn's first token enters. -> [T]"""
    first = values[layout.turns[:-1]]  # [T]
    residuals = turn_rewards + segment_scan(first, 0.0, layout.episode_turns, exclusive=True) - first  # (1)
    return segment_scan(residuals, lam, layout.episode_turns)  # (2)


def intra_trace(residuals: torch.Tensor, layout: Layout, lam_intra: float) -> torch.Tensor:
    """(3) A_intra[t, i] = sum_{j >= i} lam_intra^(j - i) delta[t, j], j inside turn t; its last residual still looks at the next turn. [N] -> [N]"""
    return segment_scan(residuals, lam_intra, layout.turns)


def mean_preserving(turn_adv: torch.Tensor, trace: torch.Tensor, layout: Layout, beta: float) -> torch.Tensor:
    """(3) A_mae[t, i] = A[t] + beta * (A_intra[t, i] - mean_i A_intra[t, .]). turn_adv [T], trace [N] -> [N], with mean A[t] over turn t."""
    return turn_adv[layout.turn_ids] + beta * (trace - segment_stats(trace, layout.turns).mean[layout.turn_ids])


def token_gae(residuals: torch.Tensor, layout: Layout, lam: float | torch.Tensor) -> torch.Tensor:
    """PPO's advantage: residuals decayed by lam (number or [N]) per policy token, across turns; observations are skipped. [N] -> [N]"""
    return segment_scan(residuals, lam, layout.episodes)


def length_adaptive_lam(layout: Layout, alpha: float) -> torch.Tensor:
    """VAPO: lam = 1 - 1 / (alpha * tokens of the episode), at least 0. -> [N] float64"""
    return (1 - 1 / (alpha * layout.episodes.diff().double())).clamp(min=0)[layout.episode_ids]


def whitened(a: torch.Tensor, all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the policy tokens of the update, var with ddof 1. [N] -> [N]"""
    total, count = all_sum(torch.stack([a.sum(), torch.tensor(float(len(a)), dtype=a.dtype)]))
    mean = total / count.clamp(min=1)
    var = all_sum(((a - mean) ** 2).sum()[None])[0] / (count - 1).clamp(min=1)
    return (a - mean) / (var + 1e-8).sqrt()


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


def overlong_penalty(lengths: torch.Tensor, limit: int, buffer: float) -> torch.Tensor:
    """DAPO's soft punishment min(-(length - (limit - b)) / b, 0), b = buffer * limit tokens. lengths [E] -> [E] float64"""
    b = buffer * limit
    return (-(lengths.double() - (limit - b)) / b).clamp(max=0)


def importance_logratio(logratio: torch.Tensor, kind: str, layout: Layout) -> torch.Tensor:
    """(4) log of the ratio that weighs each token. logratio [N] with gradient: log pi - log pi_old of the token itself. -> [N]

    turn: log rho~[t, i] = log rho[t, i] + sg(sum_{j != i} log rho[t, j]), so rho~ is the turn's ratio rho[t], and its gradient
    rho[t] * grad log pi(a[t, i]). sequence: the geometric mean over the episode, with the same gradient trick (GSPO). token: as it is.
    """
    if kind == "token":
        return logratio
    stats = segment_stats(logratio.detach(), layout.turns if kind == "turn" else layout.episodes)
    whole = (stats.mean * stats.count)[layout.turn_ids] if kind == "turn" else stats.mean[layout.episode_ids]
    return whole + (logratio - logratio.detach())  # the bracket is exactly 0


def policy_loss(
    logprobs: torch.Tensor,  # [N] with gradient
    old_logprobs: torch.Tensor,  # [N] trainer, before the update
    rollout_logprobs: torch.Tensor,  # [N] engine
    advantages: torch.Tensor,  # [N]
    token_weights: torch.Tensor,  # [N] they sum to 1 over the optimizer step, all processes together
    layout: Layout,
    importance: str,
    clip_low: float,
    clip_high: float,
    clip_scaling: str = "none",
    tis_cap: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """Clipped policy-gradient loss, weighted sum over tokens. Metrics are (sum, count) pairs."""
    own = logprobs - old_logprobs
    ratio = importance_logratio(own, importance, layout).clamp(-20, 20).exp()
    lengths = layout.turns.diff()[layout.turn_ids]  # [N]
    power = lengths.to(ratio.dtype).sqrt() if clip_scaling == "sqrt_length" else 1.0
    bounds = [torch.full_like(ratio, x) ** power for x in (1 - clip_low, 1 + clip_high)]
    loss = -torch.minimum(ratio * advantages, torch.clamp(ratio, *bounds) * advantages)
    mismatch = (old_logprobs - rollout_logprobs).clamp(-20, 20)
    if tis_cap > 0:
        loss = loss * mismatch.exp().clamp(max=tis_cap)
    with torch.no_grad():
        n = float(len(loss))
        clipped = (advantages > 0) & (ratio > bounds[1]) | (advantages < 0) & (ratio < bounds[0])
        own = own.clamp(-20, 20)
        metrics = {
            "losses/policy_loss": (float((loss * token_weights).sum()), 0.0),  # counted once per optimizer step by the caller
            "losses/approx_kl": (float((own.exp() - 1 - own).sum()), n),
            "losses/old_approx_kl": (float(-own.sum()), n),
            "losses/clipfrac": (float(clipped.sum()), n),
            "mpo/ratio_max": (float(ratio.max()), n),
            "rollout/tis_capped_frac": (float((mismatch.exp() > tis_cap).sum()) if tis_cap > 0 else 0.0, n),
        }
        for low, high in itertools.pairwise(LENGTHS):
            here = (lengths > low) & (lengths <= high)
            metrics[f"mpo/clipfrac_by_turn_length/{length_name(low, high)}"] = (float(clipped[here].sum()), float(here.sum()))
    if ref_logprobs is not None:
        d = (ref_logprobs - logprobs).clamp(-20, 20)
        k3 = (d.exp() - d - 1).clamp(max=10)
        loss = loss + kl_coef * k3
        metrics["losses/kl"] = (float(k3.detach().sum()), n)
    return (loss * token_weights).sum(), metrics


LENGTHS = (0, 8, 16, 32, 64, 128, sys.maxsize)  # turn lengths whose clip fraction is reported apart, in tokens


def length_name(low: int, high: int) -> str:
    return f"{low + 1}-{high}" if high < sys.maxsize else f"{low + 1}+"


def value_loss(values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor, clip: float) -> torch.Tensor:
    """(5) 0.5 max((V - G)^2, (V_clipped - G)^2), V_clipped within `clip` of the rollout's value; weighted sum. All [N]."""
    error = (values - targets) ** 2
    if clip > 0:
        error = torch.maximum(error, (torch.clamp(values, old_values - clip, old_values + clip) - targets) ** 2)
    return (0.5 * error * token_weights).sum()


# ---------------------------------------------------------------------------------------- what the design rests on: measurements


def explained_variance(values: torch.Tensor, targets: torch.Tensor, all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> tuple[float, float]:
    """1 - Var(G - V) / Var(G) over all processes as (value, 1), or (0, 0) where G does not vary. values, targets [n] float64"""
    x = torch.stack([targets, targets - values])  # [2, n]
    count = all_sum(torch.tensor([float(x.shape[1])], dtype=torch.float64)).clamp(min=1)
    centred = x - (all_sum(x.sum(1)) / count)[:, None]
    var, left = all_sum((centred**2).sum(1)).tolist()
    return (1 - left / var, 1.0) if var > 1e-12 else (0.0, 0.0)


def segment_quantile(x: torch.Tensor, cu: torch.Tensor, q: float) -> torch.Tensor:
    """Quantile q of each segment by linear interpolation. x [N], cu [S + 1] without empty segments -> [S]"""
    ids = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
    ordered = x[torch.from_numpy(np.lexsort((x.numpy(), ids.numpy())))]
    at = q * (cu.diff() - 1).double()
    low = at.floor().long()
    a, b = ordered[cu[:-1] + low], ordered[cu[:-1] + torch.minimum(low + 1, cu.diff() - 1)]
    return a + (at - low) * (b - a)


def critic_structure(values: torch.Tensor, layout: Layout) -> tuple[dict[str, tuple[float, float]], torch.Tensor]:
    """The paper's three statistics of where values change, over episodes of several turns. values [N] float64.

    between: sum_t L_t (mean_t - mean)^2 / sum (V - mean)^2 of an episode, the share of its value variance between turn means;
    boundary jump: |V[t + 1, 1] - V[t, L_t]|, against V[t, i + 1] - V[t, i] inside turns. Returns metrics as (sum, count) pairs and
    the between shares of the episodes whose values vary [e].
    """
    at_turn, at_episode = segment_stats(values, layout.turns).mean, segment_stats(values, layout.episodes).mean
    square = (values - at_episode[layout.episode_ids]) ** 2
    square_between = (at_turn[layout.turn_ids] - at_episode[layout.episode_ids]) ** 2
    count = layout.episodes.diff()
    total, between = (segment_stats(x, layout.episodes).mean * count for x in (square, square_between))
    several = layout.episode_turns.diff() > 1
    varies = several & (total > 1e-12)
    shares = between[varies] / total[varies]
    change = segment_scan(values, 0.0, layout.episodes, exclusive=True) - values  # [N], wrong at an episode's last token
    inner = torch.ones(len(values), dtype=torch.bool).index_put((layout.episodes[1:][count > 0] - 1,), torch.tensor(False))
    boundary = inner.clone() & False
    boundary[layout.turns[1:] - 1] = True
    boundary &= inner
    jump = segment_stats(change.abs(), layout.episodes, boundary).mean  # [E]
    span = segment_quantile(values, layout.turns, 0.95) - segment_quantile(values, layout.turns, 0.05)  # [T]
    span = segment_stats(span, layout.episode_turns).mean  # [E]
    metrics = {
        "mpo/value_variance_between_turns": (float(shares.sum()), float(len(shares))),
        "mpo/episodes_mostly_between": (float((shares > 0.5).sum()), float(len(shares))),
        "mpo/episodes_jump_over_span": (float((jump > span)[several].sum()), float(several.sum())),
        "mpo/squared_change_at_boundaries": (float((change[boundary] ** 2).sum()), float((change[inner] ** 2).sum())),
    }
    return metrics, shares


def pass_at_k(solved: int, attempts: int, k: int) -> float:
    """Unbiased probability that one of k attempts solves the task: 1 - C(n - c, k) / C(n, k); attempts >= k."""
    return 1 - comb(attempts - solved, k) / comb(attempts, k)


def pass_hat_k(solved: int, attempts: int, k: int) -> float:
    """Unbiased probability that k attempts all solve the task: C(c, k) / C(n, k); attempts >= k."""
    return comb(solved, k) / comb(attempts, k)


# ---------------------------------------------------------------------------------------------------- policy and critic


class Critic(torch.nn.Module):
    """(5) A copy of the policy's backbone with a linear value head, which starts at 0. [paper; zero start deduced]"""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.body = copy.deepcopy(lm.base_model)
        weight = next(self.body.parameters())
        self.head = torch.nn.Linear(lm.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Values [N] float32 of the states before each policy token."""
        return self.head(forward_hidden(self.body, batch)).squeeze(-1).float()


# -------------------------------------------------------------------------------------------------------- reports

PANELS = [
    Panel("Success of training episodes", ("charts/success",), limits=(0, 1)),
    Panel("Explained variance", ("losses/explained_variance", "mpo/explained_variance_turns")),
    Panel("Where values vary", ("mpo/value_variance_between_turns", "mpo/squared_change_at_boundaries", "mpo/episodes_jump_over_span"), limits=(0, 1)),
    Panel("Clipped tokens by turn length", ("mpo/clipfrac_by_turn_length/*",)),
    Panel("Turns per episode", ("charts/turns",)),
    Panel("Cut episodes", ("rollout/truncated_frac", "rollout/truncated/*"), limits=(0, 1)),
]


# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate or --critic-learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded. `args` after `resolve`."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "eval_samples": 0, "save_every": 0, "groups_per_update": 1, "group_size": 1, "max_turns": 0,
        "max_new_tokens": 1, "update_epochs": 1, "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "kl_coef": 0, "tis_cap": 0,
        "advantage_eps": 0, "learning_rate": 0, "critic_learning_rate": 0, "critic_epochs": 1, "critic_minibatches": 1, "value_warmup": 0, "value_clip": 0,
        "clip_high": 0, "beta": 0, "length_adaptive_alpha": 0, "nll_coef": 0, "generation_rounds": 1, "seed": 0,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm"), shares=("lam", "lam_intra", "lam_critic", "clip_low", "overlong_buffer"))
    if (args.advantage == "group" or args.dynamic_sampling) and args.group_size < 2:
        raise ArgumentError(f"--group-size {args.group_size}: --advantage group and --dynamic-sampling compare the episodes of a task and need at least 2")
    if args.clip_scaling != "none" and args.importance != "turn":
        raise ArgumentError(f"--clip-scaling {args.clip_scaling}: scales the bounds of a turn's ratio; it needs --importance turn, not {args.importance}")
    if args.advantage != "group" and args.value_warmup >= args.num_updates:
        raise ArgumentError(f"--value-warmup {args.value_warmup}: with --num-updates {args.num_updates} the policy would never move")
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")


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
    if processes.is_main:
        print(f"preset {args.preset}: " + ", ".join(f"{name} {getattr(args, name)}" for name in PRESETS[""]), flush=True)

    # tasks and policy
    tasks = envs.load(args.env)
    max_turns = args.max_turns or tasks.max_turns
    games = [tasks.make_env() for _ in range(tasks.workers or args.groups_per_update // world * args.group_size)]
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

    # start policy for the KL term; engine; critic; parallel wrappers; optimizers
    start_policy = Policy(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 else None
    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    only_kv = args.rollout_format == "fp8_kv"
    engine = make_engine(
        engine_kind, engine_lm, tokenizer, max_model_len=context,
        rollout_format="auto" if only_kv else args.rollout_format, kv_cache_dtype="fp8" if only_kv else None,
    )  # fmt: skip

    def wrap(module: torch.nn.Module, layers: Sequence[torch.nn.Module], lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped = processes.wrap(module, layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    bare, bare_critic, critic, critic_optimizer = Policy(lm), None, None, None
    if args.advantage != "group":
        bare_critic = Critic(lm)
        critic, critic_optimizer = wrap(bare_critic, bare_critic.body.layers, args.critic_learning_rate)
    policy, optimizer = wrap(bare, lm.base_model.layers, args.learning_rate)
    warmup = args.value_warmup if critic is not None else 0

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    def play(numbered: Sequence[tuple[int, dict]], n: int, how: Sampling, update: int) -> list[Episode]:
        return rollout(engine, tokenizer, games, tasks.workers, numbered, n, how, max_turns, context, args.seed, update)

    run = Run(
        args,
        "mpo",
        total_updates=args.num_updates,
        key_metrics=["eval/success", "charts/success", "charts/episodic_return", "charts/episodic_length", "charts/turns"],
        **distributed(),
    )

    def state_of(module: torch.nn.Module, opt: torch.optim.Optimizer) -> dict:
        """For a checkpoint. Reading the state of an optimizer that has none yet makes it count a step of zeros, which is undone."""
        fresh = not opt.state
        state = training_state(module, opt) | {"fresh": fresh}
        if fresh:
            opt.state.clear()
            opt.zero_grad(set_to_none=True)
        return state

    def load_state(module: torch.nn.Module, opt: torch.optim.Optimizer, state: dict) -> None:
        load_training_state(module, opt, state)
        if state["fresh"]:
            opt.state.clear()

    first_update, cursor = 0, 0  # cursor: tasks played so far
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_state(bare, optimizer, state)
        if critic is not None:
            load_state(bare_critic, critic_optimizer, state["critic"])
        cursor = state["cursor"]

    def evaluate() -> dict[str, float]:
        """Greedy success on the unseen split."""
        everything = play(list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world], 1, greedy, -1)
        es = [e for e in everything if not e.error]
        sums = {"eval/success": (sum(e.success for e in es), len(es)), "eval/error_frac": (len(everything) - len(es), len(everything))}
        sums["eval/turns"] = (sum(len(e.turns) for e in es), len(es))
        sums["eval/length"] = (sum(len(e.logprobs) for e in es), len(es))
        sums["eval/truncated_frac"] = (sum(bool(e.truncated) for e in es), len(es))
        for name in processes.union({name for e in es for name in e.rewards}):
            values = np.array([e.rewards.get(name, np.nan) for e in es])
            sums[f"eval/reward/{name}"] = (float(np.nansum(values)), float(np.sum(~np.isnan(values))))
        return reduce_metrics(sums)

    def evaluate_attempts() -> dict[str, float]:
        """pass@k and pass^3 of several attempts per task, at the sampling temperature."""
        mine = list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world]
        solved: dict[int, list[bool]] = {}  # failed simulators leave a task with fewer attempts
        for e in play(mine, args.eval_samples, sampling, -1):
            if not e.error:
                solved.setdefault(e.group, []).append(e.success >= 1)
        estimates = {f"pass@{k}": (pass_at_k, k) for k in range(1, args.eval_samples + 1)} | {"pass^3": (pass_hat_k, 3)}
        sums = {}
        for name, (estimate, k) in estimates.items():
            found = [estimate(sum(x), len(x), k) for x in solved.values() if len(x) >= k]
            sums[f"eval/{name}"] = (sum(found), len(found))
        return reduce_metrics(sums)

    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        run.log(evaluate() | (evaluate_attempts() if args.eval_samples else {}), step=0)

    for update in range(first_update, args.num_updates):
        started = time.perf_counter()
        sums: dict[str, tuple[float, float]] = {}

        def add(metrics: dict[str, tuple[float, float]], sums: dict[str, tuple[float, float]] = sums) -> None:
            for key, (total, count) in metrics.items():
                old = sums.get(key, (0.0, 0.0))
                sums[key] = (max(old[0], total) if is_maximum(key) else old[0] + total, old[1] + count)

        # --- roll out; with dynamic sampling until enough groups differ in what they earned
        everything: list[Episode] = []
        kept: list[int] = []  # groups that train, over all processes
        flat: list[bool] = []  # of this process's groups: all episodes earned the same
        rounds_played = 0
        with run.timer("rollout"):
            while len(kept) < args.groups_per_update and rounds_played < (args.generation_rounds if args.dynamic_sampling else 1):
                stream = [divmod(cursor + g, len(tasks.train)) for g in range(args.groups_per_update)]
                orders = {epoch: np.random.default_rng([args.seed, epoch]).permutation(len(tasks.train)) for epoch, _ in stream}
                numbers = range(rounds_played * args.groups_per_update, (rounds_played + 1) * args.groups_per_update)
                played = play([(g, tasks.train[orders[epoch][at]]) for g, (epoch, at) in zip(numbers, stream)][rank::world], args.group_size, sampling, update)
                earned: dict[int, list[float]] = {}
                for e in played:
                    if not e.error and e.turns:
                        earned.setdefault(e.group, []).append(e.reward)
                same = {g: min(rewards) == max(rewards) for g, rewards in earned.items()}
                kept += processes.union(g for g in earned if not (args.dynamic_sampling and same[g]))
                flat += same.values()
                everything += played
                cursor, rounds_played = cursor + args.groups_per_update, rounds_played + 1
        kept = kept[: args.groups_per_update]
        measured = [e for e in everything if not e.error]  # an episode whose environment failed is counted below and takes no part
        episodes = [e for e in measured if e.turns and e.group in set(kept)]
        items, masks = [(e.prompt_ids, e.token_ids) for e in episodes], [e.policy_mask for e in episodes]
        turn_lengths = [[t.stop - t.start for t in e.turns] for e in episodes]
        layout = make_layout(turn_lengths)
        offset = layout.episodes.tolist()
        rollout_logprobs = torch.tensor([x for e in episodes for x in e.logprobs], dtype=torch.float32)

        def packed(batch: list[int], items: list = items, masks: list = masks) -> PackedBatch:
            return (pack_rows([items[i] for i in batch], share, pad_id, [masks[i] for i in batch]) if batch else EMPTY).to(device)

        def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
            return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

        # --- rewards; values of the critic as it is now, for everything below
        with run.timer("reward"):
            turn_rewards = torch.tensor([t.reward for e in episodes for t in e.turns], dtype=torch.float64)
            penalty = torch.zeros(len(episodes), dtype=torch.float64)
            if args.overlong_buffer > 0:
                penalty = overlong_penalty(torch.tensor([len(p) + len(ids) for p, ids in items]), context, args.overlong_buffer)
                turn_rewards[layout.episode_turns[1:] - 1] += penalty
        values = torch.zeros(offset[-1], dtype=torch.float64)
        with run.timer("values"), torch.no_grad(), amp():
            for batch in processes.rounds(list(micro_batches(items, args.micro_batch_tokens))) if critic is not None else ():
                v = critic(packed(batch)).double().cpu()
                if batch:
                    values[token_index(batch)] = v

        # --- (1) (2) (3) advantages
        residuals = token_residuals(values, turn_rewards, layout)
        turn_adv = turn_advantages(values, turn_rewards, layout, args.lam)  # [T]
        token_adv = mean_preserving(turn_adv, intra_trace(residuals, layout, args.lam_intra), layout, args.beta if args.advantage == "mae" else 0.0)
        if args.advantage == "token":
            lam = length_adaptive_lam(layout, args.length_adaptive_alpha) if args.length_adaptive_alpha > 0 else args.lam
            token_adv = token_gae(residuals, layout, lam)
        elif args.advantage == "group":
            returns = torch.tensor([e.reward for e in episodes], dtype=torch.float64) + penalty
            per_episode = group_advantages(returns, torch.tensor([e.group for e in episodes], dtype=torch.int64), args.advantage_eps)[0]
            token_adv = per_episode[layout.episode_ids]
        if args.advantage != "mae":  # for the viewer: a turn's bar is the mean over its tokens
            turn_adv = segment_stats(token_adv, layout.turns).mean
        refinement = token_adv - turn_adv[layout.turn_ids]
        raw_adv = token_adv
        if args.whiten and critic is not None:
            token_adv = whitened(token_adv, processes.all_sum)
        token_adv = token_adv.float()
        targets = token_gae(residuals, layout, args.lam_critic) + values  # (5) lam_critic 1: what the episode will still pay

        # --- update
        slot = {g: i for i, g in enumerate(kept)}

        def minibatches(
            epochs: int, parts: int, update: int = update, slot: dict = slot, episodes: list = episodes, items: list = items, offset: list = offset
        ):
            """(pass, global (tokens, episodes, tokens of successful episodes), micro-batches) of each optimizer step; the same steps on every process."""
            for epoch in range(epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(len(slot))
                for part in range(parts):
                    chosen = set(order[part::parts].tolist())
                    rows = [i for i, e in enumerate(episodes) if slot[e.group] in chosen]
                    count = [sum(offset[i + 1] - offset[i] for i in rows), len(rows)]
                    count.append(sum(offset[i + 1] - offset[i] for i in rows if episodes[i].success >= 1))
                    totals = processes.all_sum(torch.tensor(count, dtype=torch.float64)).tolist()
                    if totals[0] > 0:  # nothing to learn from: no step, which would only follow old momentum
                        batches = [[rows[i] for i in b] for b in micro_batches([items[i] for i in rows], args.micro_batch_tokens)]
                        yield epoch, totals, list(processes.rounds(batches))

        def step(module: torch.nn.Module, opt: torch.optim.Optimizer, name: str, update: int = update) -> None:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), args.max_grad_norm)
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            if not np.isfinite(norm):
                raise RunError(f"update {update + 1}: the gradient is not finite ({norm}); {LOWER_LR}")
            add({name: (norm, 1.0)})
            opt.step()
            if not all(bool(p.isfinite().all()) for p in module.parameters()):
                raise RunError(f"update {update + 1}: the weights are no longer finite; {LOWER_LR}")

        # (5) the critic
        with run.timer("critic"):
            for _, totals, batches in minibatches(args.critic_epochs, min(args.critic_minibatches, args.groups_per_update)) if critic is not None else ():
                critic_optimizer.zero_grad(set_to_none=True)
                for number, batch in enumerate(batches):
                    with no_sync(critic, number < len(batches) - 1):
                        with amp():
                            v = critic(packed(batch))
                        loss = v.sum() * 0.0
                        if batch:
                            index = token_index(batch)
                            old, goal = values[index].float().to(device), targets[index].float().to(device)
                            loss = value_loss(v, old, goal, torch.full_like(v, 1.0 / totals[0]), args.value_clip)
                            add({"losses/value_loss": (float(loss.detach()), 0.0)})
                        (loss * world).backward()  # gradients are averaged over processes; token weights are global
                add({"losses/value_loss": (0.0, 1.0 / world)})
                step(critic, critic_optimizer, "losses/critic_grad_norm")

        # (4) the policy
        moves = update >= warmup
        old_logprobs = torch.zeros(offset[-1])
        lr = args.learning_rate * min(1.0, (update - warmup + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0) if moves else 0.0
        with run.timer("train"):
            for group in optimizer.param_groups:
                group["lr"] = lr
            if moves and args.num_minibatches > 1:  # the ratio's anchor; without minibatches it is the detached value of the first pass
                with torch.no_grad(), amp():
                    for batch in processes.rounds(list(micro_batches(items, args.micro_batch_tokens))):
                        logprobs = policy(packed(batch), args.temperature)[0].cpu()
                        if batch:
                            old_logprobs[token_index(batch)] = logprobs
            policy.train()
            for epoch, totals, batches in minibatches(args.update_epochs, args.num_minibatches) if moves else ():
                optimizer.zero_grad(set_to_none=True)
                for number, batch in enumerate(batches):
                    with no_sync(policy, number < len(batches) - 1):
                        rows = packed(batch)
                        with amp():
                            logprobs, entropy = policy(rows, args.temperature)
                        loss = logprobs.sum() * 0.0
                        if batch:
                            index, here = token_index(batch), make_layout([turn_lengths[i] for i in batch]).to(device)
                            token_weights = torch.full_like(logprobs, 1.0 / totals[0])
                            if args.loss_aggregation == "seq_mean_token_mean":
                                token_weights = (1.0 / (here.episodes.diff()[here.episode_ids] * totals[1])).float()
                            if epoch == 0 and args.num_minibatches == 1:
                                old_logprobs[index] = logprobs.detach().cpu()
                            reference = None
                            if start_policy is not None:
                                with torch.no_grad(), amp():
                                    reference = start_policy(rows, args.temperature)[0]
                            loss, metrics = policy_loss(
                                logprobs, old_logprobs[index].to(device), rollout_logprobs[index].to(device), token_adv[index].to(device), token_weights, here,
                                args.importance, args.clip_low, args.clip_high, args.clip_scaling, args.tis_cap, reference, args.kl_coef,
                            )  # fmt: skip
                            if args.nll_coef > 0 and totals[2] > 0:
                                good = torch.tensor([episodes[i].success >= 1 for i in batch], device=device)[here.episode_ids]
                                loss = loss - args.nll_coef * logprobs[good].sum() / totals[2]
                            add({**metrics, "losses/entropy": (float(entropy.sum()), len(index))})
                        (loss * world).backward()
                add({"losses/policy_loss": (0.0, 1.0 / world)})
                step(policy, optimizer, "losses/grad_norm")
            policy.eval()
        version = engine.weight_version  # of the weights that sampled this update's episodes
        with run.timer("sync"):
            sync_engine()

        # --- log
        absdiff = (old_logprobs - rollout_logprobs).abs().double()
        mismatch = (old_logprobs - rollout_logprobs).double().clamp(-20, 20)
        n_gap = float(offset[-1]) * moves
        add(
            {
                **episode_metrics(measured, everything),
                "charts/learning_rate": (lr, 1.0),
                "rollout/zero_std_group_frac": (float(sum(flat)), float(len(flat))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(absdiff.sum()), n_gap),
                "rollout/logprob_absdiff_max": (float(absdiff.max()) if n_gap else 0.0, n_gap),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_gap),
                "mpo/generation_rounds": (float(rounds_played), 1.0),
                "mpo/training_groups": (float(len(kept)), 1.0),
            }
        )
        for name in {name for e in measured for name in e.rewards}:
            found = np.array([e.rewards.get(name, np.nan) for e in measured])
            add({f"reward/{name}": (float(np.nansum(found)), float(np.sum(~np.isnan(found))))})
        structure: dict[str, float] = {}
        if critic is not None:
            add({"losses/explained_variance": explained_variance(values, targets, processes.all_sum)})
            first = layout.turns[:-1]
            add({"mpo/explained_variance_turns": explained_variance(values[first], targets[first], processes.all_sum)})
            found, shares = critic_structure(values, layout)
            add(found)
            if every := [x for part in run.gather(shares.tolist()) for x in part]:
                structure["mpo/value_variance_between_turns_median"] = float(np.median(every))
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)}) | structure
        played_tokens = float(sum(len(e.logprobs) for e in everything))
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([played_tokens], dtype=torch.float64))[0]) / (time.perf_counter() - started)
        done = update + 1
        if done == args.num_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate()
                if args.eval_samples and done == args.num_updates:
                    metrics |= evaluate_attempts()
            columns = {"advantages": raw_adv, **({"values": values, "refinement": refinement} if critic is not None else {})}
            spread = [i for i, e in enumerate(episodes) if e.sample < 4 and not (flat and flat[0] and e.group == kept[0])]
            for i in [i for i in spread if episodes[i].group == episodes[spread[0]].group]:
                turns = slice(int(layout.episode_turns[i]), int(layout.episode_turns[i + 1]))
                span = slice(offset[i], offset[i + 1])
                run.episode(episode_record(done, episodes[i], span, turn_adv[turns].tolist(), columns, tokenizer), step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                of_critic = state_of(bare_critic, critic_optimizer) if critic is not None else {}
                run.save_checkpoint(done, {**state_of(bare, optimizer), "critic": of_critic, "cursor": cursor})
        if stop:
            break

    engine.close()
    for game in games:
        game.close()
    if processes.is_main:
        episodes = [viewer_episode(record) for record in read_jsonl(run.folder / "episodes.jsonl")]
        legend = ["Bars: advantage of each turn.", "Values and credit stand at the policy's own tokens; what the environment said is grey."]
        subtitle = f"{args.preset}: advantage {args.advantage}, importance {args.importance}, beta {args.beta}, lam {args.lam}"
        write_credit_html(run.folder / "credit.html", episodes, f"mpo.py on {args.env}", subtitle, legend)
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        sys.exit(main(parse_args(Args)).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, RunError) as error:  # what a user can mend; anything else shows its traceback
        sys.exit(f"{type(error).__name__}: {error}")
