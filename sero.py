# docs: docs/sero.md
"""SERO: State-Rooted Executable Rollout Optimization (October 2026).

When every episode of a task fails, group-relative RL has nothing to learn from. SERO asks a training-time oracle how the game goes on from
states the policy really reached, executes that continuation in the environment, and learns it as far as the policy could follow.
What it adds to group-based agent RL, marked (1) to (4) in the code:

(1) the base algorithm (GRPO, GiGPO, HGPO or GraphGPO) sees only the policy's own episodes: the oracle touches no reward, advantage or ratio;
(2) roots are states before an action of the policy; the oracle plays on from there in a restored copy, with the horizon that is left, so
    each of its commands stands after the real observations of the ones before;
(3) a root counts as far as the oracle earned more than the policy did from it: g = clip((G_oracle - G_policy) / c_R, 0, 1);
(4) command k counts as far as the policy would have got there: w[k] = product of z[j], j < k, z the length-normalised likelihood of a command.

Laptop, two CPU cores (about 3 minutes):   python sero.py
The base algorithm alone, another base:    python sero.py --oracle none --base gigpo
One GPU:                                   python sero.py --model Qwen/Qwen2.5-1.5B-Instruct --env alfworld:FOLDER --learning-rate 1e-6
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml sero.py --model ... --env ...
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sampling, make_engine
from common.files import write_atomic
from common.packing import EMPTY, PackedBatch, Policy, check_packing, micro_batches, pack_rows
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.rollout import Episode, Layout, encode, episode_metrics, make_layout, observation_frame, rollout
from common.run import Run
from common.viewer import write_credit_html
from kernels.segment_scan import segment_cumsum, segment_scan, segment_stats
from sero_report import branch_record, episode_record, viewer_episode


@dataclass
class Args:
    # --- run
    env: str = "household"
    """task with an oracle: household is generated; real data: alfworld:FOLDER, webshop:FOLDER, scienceworld"""
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
    num_updates: int = 16
    """rollout-and-update rounds"""
    extra_steps: int = 0
    """further rounds after them: with --oracle none the control that gets as many environment steps as the oracle took [paper: 15]"""
    eval_every: int = 4
    """updates between evaluations on the unseen split (0: only at the start and the end)"""
    eval_tasks: int = 128
    """evaluation tasks, greedy decoding"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__sero__<seed>__<time>"""
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
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    kl_coef: float = 0.0
    """coefficient of the k3 estimate of KL(policy || start policy) in the loss, per token, each estimate capped at 10 [GiGPO: 0.01]"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """mean over all policy tokens of the update, or mean over each episode, then over episodes"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm"""
    # --- base algorithms
    base: Literal["grpo", "gigpo", "hgpo", "graphgpo"] = "graphgpo"
    """advantages: of whole episodes; plus step returns compared where observations repeat; where histories repeat; plus distances in the task's graph"""
    success_reward: float = 10.0
    """return of a solved task, also c_R of the gate [published: 10]"""
    invalid_penalty: float = 0.1
    """return lost by an action that cannot be done [published: 0.1]"""
    gamma: float = 0.95
    """discount of step returns in gigpo and hgpo [published: 0.95]"""
    step_weight: float = 1.0
    """gigpo, graphgpo: weight of the step advantage beside the episode's [published: 1]"""
    normalisation: Literal["mean", "mean_std"] = "mean"
    """gigpo: subtract the group's mean, or also divide by its standard deviation (ddof 1) [published default: mean]"""
    hgpo_history: int = 2
    """hgpo: most previous observations that steps must share [published: 2 or 4]"""
    hgpo_alpha: float = 1.0
    """hgpo: weight (k + 1)^alpha of the group that shares k observations [published: 1]"""
    graph_gamma: float = 0.1
    """graphgpo: step return success_reward * graph_gamma^distance to success [published code: 0.1]"""
    advantage_eps: float = 1e-6
    """added to standard deviations"""
    # --- SERO
    oracle: Literal["sero", "root_only", "full_flat", "short_bridge", "shuffled", "depth_decay", "none"] = "sero"
    """weights of the oracle's commands: reachability; the first command only; all 1; 1 for the first few, which end there; reachability permuted inside
    each branch; c^k with c such that their mean is that of sero; no oracle"""
    lambda_o: float = 0.1
    """weight of the oracle term in the loss [paper: 0.1; 0.1 to 0.5 are stable, 1.0 is too strong]"""
    roots_per_group: int = 4
    """states per task and update from which the oracle plays on, drawn uniformly among those the policy reached [deduced]"""
    bridge_length: int = 3
    """short_bridge: commands of a branch [deduced]"""
    frozen_bank: str = ""
    """take branches from this file (written by --save-bank) instead of executing the oracle: the paper's setting for shuffled and depth_decay"""
    save_bank: str = ""
    """write every executed branch that passed its gate to this file"""
    study: Literal["none", "reachability"] = "none"
    """reachability: after training, how often sampling reproduces a branch's prefix, by w, and the rank correlation of z with the frequency of the command"""


# ------------------------------------------------------------------------------------------- prompts and message format


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy, by the careless expert: whole episodes, every assistant message of which is trained on."""
    rng = random.Random(seed)
    return [tasks.careless(task, rng) for task in tasks.train]


# --------------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Branch:
    """(2) The oracle's continuation from a state the policy reached. prompt_ids is the policy's history up to there."""

    group: int
    sample: int
    root: int  # the turn before whose action the state was
    task_id: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)  # command 0, observation, command 1, ...
    target_mask: list[bool] = field(default_factory=list)  # like token_ids: True at the oracle's commands
    spans: list[tuple[int, int]] = field(default_factory=list)  # tokens of each command, the stop token included
    oracle_return: float = 0.0
    policy_return: float = 0.0  # of the policy, from the same state with the same horizon
    update: int = 0  # in which it was executed


def continue_by_oracle(
    branch: Branch, game: envs.Env, state: object, horizon: int, tokenizer, stop_token_ids: Sequence[int], context: int, gains: Callable[[float, dict], float]
) -> bool:
    """(2) Restores `state` in `game` and lets the oracle play at most `horizon` turns, filling the branch. False where it finds no way, or the game fails.

    Commands are tokenised as the policy's own answers are: the text and the token that ends a message. gains(reward, info) is a turn's return.
    """
    end, before, after = observation_frame(tokenizer, stop_token_ids)
    stop = tokenizer.convert_tokens_to_ids(end)
    try:
        game.restore(state)
        for number in range(horizon):
            command = game.oracle_action()
            ids = [*tokenizer(command, add_special_tokens=False).input_ids, stop]
            if len(branch.prompt_ids) + len(branch.token_ids) + len(ids) > context:
                break
            branch.spans.append((len(branch.token_ids), len(branch.token_ids) + len(ids)))
            branch.token_ids += ids
            branch.target_mask += [True] * len(ids)
            observation, reward, terminated, truncated, info = game.step(command)
            branch.oracle_return += gains(reward, info)
            if terminated or truncated or number == horizon - 1:
                break
            seen = tokenizer(before + observation + after, add_special_tokens=False).input_ids
            branch.token_ids += seen
            branch.target_mask += [False] * len(seen)
    except envs.EnvironmentFailed:
        return False
    except RuntimeError:  # the oracle knows no further: what it gained until here counts
        pass
    length = branch.spans[-1][1] if branch.spans else 0  # an observation that nobody answered takes no part
    del branch.token_ids[length:], branch.target_mask[length:]
    return bool(branch.spans)


def read_bank(path: str, vocab_size: int) -> list[Branch]:
    """Branches of --save-bank. Raises DataError naming file and line for records that are none, or of another tokenizer."""
    out = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as e:
        raise envs.DataError(f"--frozen-bank {path}: {e.strerror or e}; write one with --save-bank") from e
    for number, line in enumerate(lines, 1):
        try:
            branch = Branch(**json.loads(line))
            branch.spans = [(int(a), int(b)) for a, b in branch.spans]
            ids = [*branch.prompt_ids, *branch.token_ids]
            good = all(type(t) is int and 0 <= t < vocab_size for t in ids) and len(branch.target_mask) == len(branch.token_ids) and branch.prompt_ids
            covered = sorted(t for a, b in branch.spans for t in range(a, b))
            if not good or not branch.spans or covered != [i for i, m in enumerate(branch.target_mask) if m]:
                raise ValueError("tokens outside of this model's vocabulary, or spans and mask that disagree")
        except (TypeError, ValueError, KeyError) as e:
            raise envs.DataError(f"--frozen-bank {path}, line {number}: not a branch of --save-bank with this model ({e})") from e
        out.append(branch)
    if not out:
        raise envs.DataError(f"--frozen-bank {path}: no branch in it; run longer with --save-bank")
    return out


def trim_bank(path: Path, updates: int) -> None:
    """Keeps the branches of a bank's first `updates` updates: what an interrupted run wrote after its checkpoint comes again, a torn last line too."""
    kept = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            if line.endswith("\n") and json.loads(line)["update"] < updates:
                kept.append(line)
        except (ValueError, TypeError, KeyError) as e:
            raise envs.DataError(f"--save-bank {path}, line {number}: not a branch of --save-bank ({e}); name the file of the resumed run") from e
    write_atomic(path, "".join(kept).encode())


# ------------------------------------------------------------- the paper's functions: tensors in, tensors and metrics out


def compare(values: torch.Tensor, ids: torch.Tensor, std: bool, ddof: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value less the mean over its group, with `std` divided by the group's standard deviation + eps; exactly 0 in groups of one or of equal values.

    values [M] float64, ids [M] int64 -> (advantages [M], size of each value's group [M])
    """
    _, group = torch.unique(ids, return_inverse=True)
    number = int(group.max()) + 1 if len(group) else 0
    count = torch.bincount(group, minlength=number)
    zeros = torch.zeros(number, dtype=torch.float64)
    centred = values - (zeros.index_add(0, group, values) / count.clamp(min=1))[group]
    low = zeros.scatter_reduce(0, group, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, values, "amax", include_self=False)
    if std:
        deviation = (zeros.index_add(0, group, centred**2) / (count - ddof).clamp(min=1)).sqrt()
        centred = centred / (deviation + eps)[group]
    return torch.where((high > low)[group], centred, 0.0), count[group]


def states_seen(e: Episode) -> list[str]:
    """What each turn saw before it acted: the task, then the latest observation. An action that could not be done leaves the state, and so the observation
    that stands for it, as it was; its answer is the same text in every state. [deduced]"""
    seen = [str(e.task["id"])]
    for turn in e.turns[:-1]:
        seen.append(seen[-1] if turn.info.get("invalid") else turn.observation)
    return seen


def history_ids(observations: Sequence[Sequence[str]], groups: Sequence[int], length: int) -> torch.Tensor:
    """One number for all turns of a task that share their last `length` observations, the current one included; -1 where fewer have been seen. [T]"""
    known: dict[tuple, int] = {}
    out = []
    for episode, group in zip(observations, groups):
        for t in range(len(episode)):
            key = (group, *episode[t + 1 - length : t + 1])
            out.append(known.setdefault(key, len(known)) if t + 1 >= length else -1)
    return torch.tensor(out, dtype=torch.int64)


def hierarchical_advantages(step_returns: torch.Tensor, ids: Sequence[torch.Tensor], alpha: float, eps: float) -> torch.Tensor:
    """HGPO: sum_k w_k A_k, w_k in proportion to (k + 1)^alpha over the nested groups of a step that hold others and where A_k is not 0.

    ids[k - 1] [T]: groups of steps that share k observations, -1 for none. A_k is normalised with ddof 0. -> [T]
    """
    total, weight = torch.zeros_like(step_returns), torch.zeros_like(step_returns)
    for k, group in enumerate(ids, 1):
        own = torch.where(group < 0, len(group) + torch.arange(len(group)), group)  # those without a group are alone
        advantage, _ = compare(step_returns, own, True, 0, eps)
        share = (k + 1.0) ** alpha * (advantage != 0)
        total, weight = total + share * advantage, weight + share
    return total / (weight + eps)


def graph_distances(observations: Sequence[Sequence[str]], solved: Sequence[bool], groups: Sequence[int]) -> list[list[int]]:
    """GraphGPO: per episode and turn, the distance of what came next from success, in steps of any episode of the task.

    Nodes are observations, every turn is an edge to the next observation, the last turn of a solved episode leads to success (distance 0), that
    of another episode leads nowhere new: it keeps its own observation. From where success cannot be reached the distance is the largest finite one + 1.
    """
    out: list[list[int]] = [[] for _ in observations]
    for group in dict.fromkeys(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        into: dict[object, set[str]] = {}  # node -> nodes with an edge to it; None is success
        for i in members:
            path: list[object] = [*observations[i], None if solved[i] else observations[i][-1]] if observations[i] else []
            for a, b in itertools.pairwise(path):
                into.setdefault(b, set()).add(a)
        distance: dict[object, int] = {None: 0}
        queue = deque([None])
        while queue:
            node = queue.popleft()
            for source in into.get(node, ()):
                if source not in distance:
                    distance[source] = distance[node] + 1
                    queue.append(source)
        unreachable = max(distance.values()) + 1
        for i in members:
            following = [*observations[i][1:], None if solved[i] else observations[i][-1]] if observations[i] else []
            out[i] = [distance.get(node, unreachable) for node in following]
    return out


def base_advantages(
    base: str, step_rewards: torch.Tensor, observations: Sequence[Sequence[str]], solved: Sequence[bool], groups: Sequence[int], layout: Layout, args: Args
) -> torch.Tensor:
    """(1) Advantage of every turn. step_rewards [T] float64; observations: what each turn of each episode saw before it acted. -> [T]"""
    group_ids = torch.tensor(list(groups), dtype=torch.int64)
    turns = layout.episode_turns
    stats = segment_stats(step_rewards, turns)
    episode_of = torch.repeat_interleave(torch.arange(len(groups)), turns.diff())
    returns = stats.mean * stats.count  # [E]
    if base == "grpo":
        return compare(returns, group_ids, True, 1, args.advantage_eps)[0][episode_of]
    std = args.normalisation == "mean_std"
    episode_adv = compare(returns, group_ids, std, 1, args.advantage_eps)[0][episode_of]
    seen = history_ids(observations, groups, 1)
    if base == "graphgpo":
        distances = torch.tensor([d for ds in graph_distances(observations, solved, groups) for d in ds], dtype=torch.float64)
        step_returns = args.success_reward * args.graph_gamma**distances
        return episode_adv + args.step_weight * compare(step_returns, seen, True, 1, args.advantage_eps)[0]
    step_returns = segment_scan(step_rewards, args.gamma, turns)
    if base == "gigpo":
        return episode_adv + args.step_weight * compare(step_returns, seen, std, 1, args.advantage_eps)[0]
    return hierarchical_advantages(
        step_returns, [history_ids(observations, groups, k) for k in range(1, args.hgpo_history + 2)], args.hgpo_alpha, args.advantage_eps
    )


def gate(oracle_return: torch.Tensor, policy_return: torch.Tensor, scale: float) -> torch.Tensor:
    """(3) g = clip((G_oracle - G_policy) / c_R, 0, 1). [B] -> [B]"""
    return ((oracle_return - policy_return) / scale).clamp(0, 1)


def reachability(command_logprobs: torch.Tensor, branches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(4) z[k] = exp(mean token log-prob of command k), w[k] = prod_{j < k} z[j], 1 at the root.

    command_logprobs [K] float64: mean over each command's tokens under the policy before the update; branches [B + 1]: first command of each.
    """
    return command_logprobs.exp(), segment_cumsum(command_logprobs, branches, exclusive=True).exp()


def repeated_steps(observations: Sequence[Sequence[str]], groups: Sequence[int]) -> tuple[float, float]:
    """(turns whose observation another turn of the task shares, turns)"""
    ids = history_ids(observations, groups, 1)
    return float((torch.bincount(ids)[ids] > 1).sum()) if len(ids) else 0.0, float(len(ids))


def decay_to_match(depth: torch.Tensor, w: torch.Tensor, all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, steps: int = 60) -> float:
    """c in [0, 1] such that the c^depth add up to what the w do, over all processes; depth [K] int64, w [K]."""
    target, low, high = all_sum(w.sum()[None])[0], 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if all_sum((middle ** depth.double()).sum()[None])[0] <= target else (low, middle)
    return low


def command_weights(
    oracle: str, w: torch.Tensor, branches: torch.Tensor, bridge_length: int, noise: torch.Tensor,
    all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:  # fmt: skip
    """What each command counts under a variant; w [K] of `reachability`, branches [B + 1], noise [K] (shuffled). -> [K]"""
    depth = torch.arange(len(w)) - torch.repeat_interleave(branches[:-1], branches.diff())
    if oracle == "root_only":
        return (depth == 0).double()
    if oracle == "full_flat":
        return torch.ones_like(w)
    if oracle == "short_bridge":
        return (depth < bridge_length).double()
    if oracle == "shuffled":
        of = torch.repeat_interleave(torch.arange(len(branches) - 1), branches.diff())
        return w[torch.from_numpy(np.lexsort((noise.numpy(), of.numpy())))]
    if oracle == "depth_decay":
        return decay_to_match(depth, w, all_sum) ** depth.double()
    return w


def oracle_token_weights(gates: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor, branches: torch.Tensor, total_gate: float) -> torch.Tensor:
    """Weight of each command token in L_SERO: g[r] w[k] / tokens of command k / sum of gates [the last deduced].

    gates [B], weights [K], lengths [K] tokens of each command, branches [B + 1] -> [sum of lengths]
    """
    per_command = gates[torch.repeat_interleave(torch.arange(len(gates)), branches.diff())] * weights / lengths / max(total_gate, 1e-12)
    return torch.repeat_interleave(per_command, lengths)


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


BUCKETS = (0.0, 0.05, 0.25, 0.5, 1.0)  # of w: [0, .05), [.05, .25), [.25, .5), [.5, 1]


def reachability_study(matches: np.ndarray, z: np.ndarray, w: np.ndarray, branches: np.ndarray) -> dict[str, float]:
    """How often sampling reproduces the prefix before a command, by buckets of w, and Spearman's correlation of z with how often it gives the command.

    matches [K, trials] bool: trial i, at the state after the first k commands, gave command k. Histories are equal while all commands were, so trial i
    reproduces the prefix of length k exactly if it matched at every j < k. Depth 0 has no prefix and takes no part in the buckets.
    """
    out = {}
    prefix = np.ones_like(matches)
    for first, last in itertools.pairwise(branches.tolist()):
        prefix[first + 1 : last] = np.cumprod(matches[first : last - 1], axis=0)
    inner = np.ones(len(w), dtype=bool)
    inner[branches[:-1][np.diff(branches) > 0]] = False
    for i, (low, high) in enumerate(itertools.pairwise(BUCKETS)):
        here = inner & (w >= low) & ((w < high) | (i == len(BUCKETS) - 2))
        out[f"sero/reproduced/w_{low:.2f}_{high:.2f}"] = float(prefix[here].mean()) if here.any() else float("nan")
        out[f"sero/reproduced/pairs_{low:.2f}_{high:.2f}"] = float(here.sum())
    varied = len(z) > 2 and len(set(z.tolist())) > 1 and len(set(matches.mean(1).tolist())) > 1
    out["sero/spearman_z"] = float(spearmanr(z, matches.mean(1)).statistic) if varied else float("nan")
    return out


# -------------------------------------------------------------------------------------------------------- reports

PANELS = [
    Panel("Success by split", ("eval/success/seen", "eval/success/unseen"), limits=(0, 1)),
    Panel("Success by family", ("eval/success_by_family/*",), limits=(0, 1)),
    Panel("Success of training episodes", ("charts/success",), limits=(0, 1)),
    Panel("Weight w by depth", ("sero/w/depth_*",), limits=(0, 1)),
    Panel("Effective depth of a branch", ("sero/effective_depth", "sero/depth"), unit="commands"),
    Panel("Gate and branches used", ("sero/gate", "sero/used_root_frac"), limits=(0, 1)),
    Panel("Turns per episode", ("charts/turns",)),
]


# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded."""
    bounds = {
        "num_updates": 1, "extra_steps": 0, "eval_every": 0, "eval_tasks": 1, "save_every": 0, "groups_per_update": 1, "group_size": 2, "max_turns": 0,
        "max_new_tokens": 1, "update_epochs": 1, "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "kl_coef": 0, "tis_cap": 0,
        "advantage_eps": 0, "learning_rate": 0, "clip_high": 0, "seed": 0, "invalid_penalty": 0, "step_weight": 0, "hgpo_history": 0, "hgpo_alpha": 0,
        "lambda_o": 0, "roots_per_group": 1, "bridge_length": 1,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm", "success_reward"), shares=("clip_low", "gamma", "graph_gamma"))
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.oracle == "none" and (args.frozen_bank or args.save_bank or args.study != "none"):
        raise ArgumentError("--oracle none makes no branches: leave out --frozen-bank, --save-bank and --study")
    if args.frozen_bank and args.save_bank:
        raise ArgumentError("--frozen-bank and --save-bank: branches come from a file, or go into one")


def main(args: Args) -> Run:
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
    # tasks and policy
    tasks = envs.load(args.env)
    max_turns = args.max_turns or tasks.max_turns
    total_updates = args.num_updates + args.extra_steps
    games = [tasks.make_env() for _ in range(tasks.workers or args.groups_per_update // world * args.group_size)]
    missing = [name for name in ("snapshot", "restore", "oracle_action") if not hasattr(games[0], name)]
    if args.oracle != "none" and not args.frozen_bank and missing:
        raise ArgumentError(f"--env {args.env}: no {', '.join(missing)}; the oracle needs them, choose household, alfworld, webshop or scienceworld")
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

    bank = read_bank(args.frozen_bank, lm.get_input_embeddings().num_embeddings) if args.frozen_bank else []

    # start policy for the KL term; engine; parallel wrappers; optimizer
    start_policy = Policy(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 else None
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

    def play(numbered: Sequence[tuple[int, dict]], n: int, how: Sampling, update: int, keep: Callable | None = None) -> list[Episode]:
        return rollout(engine, tokenizer, games, tasks.workers, numbered, n, how, max_turns, context, args.seed, update, keep)

    def gains(reward: float, info: dict) -> float:
        """Return of one turn."""
        return args.success_reward * reward - args.invalid_penalty * bool(info.get("invalid"))

    run = Run(
        args,
        "sero",
        total_updates=total_updates,
        key_metrics=["eval/success", "eval/success/seen", "eval/success/unseen", "charts/success", "sero/effective_depth"],
        **distributed(),
    )
    if args.save_bank and not args.resume and Path(args.save_bank).exists():
        raise ArgumentError(f"--save-bank {args.save_bank}: the file exists; two runs in one bank would not tell apart, choose another name")
    first_update, steps_taken = 0, {"policy": 0.0, "oracle": 0.0}  # environment steps so far
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)
        steps_taken = state["steps_taken"]
        if args.save_bank and processes.is_main and Path(args.save_bank).exists():
            trim_bank(Path(args.save_bank), first_update)

    def evaluate() -> dict[str, float]:
        """Greedy success on the evaluation split: seen and unseen scenes, task families."""
        everything = play(list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world], 1, greedy, -1)
        es = [e for e in everything if not e.error]
        sums = {"eval/success": (sum(e.success for e in es), len(es)), "eval/error_frac": (len(everything) - len(es), len(everything))}
        sums["eval/score"] = (sum(max(e.reward, 0.0) for e in es), len(es))
        sums["eval/turns"] = (sum(len(e.turns) for e in es), len(es))
        sums["eval/length"] = (sum(len(e.logprobs) for e in es), len(es))
        sums["eval/truncated_frac"] = (sum(bool(e.truncated) for e in es), len(es))
        for e in es:
            split, family = e.task.get("split"), e.task.get("family")
            for name in [f"eval/success/{split}"] * (split is not None) + [f"eval/success_by_family/{family}", f"eval/success_{split}/{family}"] * bool(family):
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + e.success, count + 1)
        return reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})

    def command_logprobs(branches: Sequence[Branch]) -> torch.Tensor:
        """Mean token log-prob of every command under the policy as it is, [K] float64."""
        rows, masks = [(b.prompt_ids, b.token_ids) for b in branches], [b.target_mask for b in branches]
        out: list[torch.Tensor] = []
        with torch.no_grad(), amp():
            for batch in processes.rounds(list(micro_batches(rows, args.micro_batch_tokens))):
                inputs = (pack_rows([rows[i] for i in batch], share, pad_id, [masks[i] for i in batch]) if batch else EMPTY).to(device)
                logprobs = policy(inputs, args.temperature)[0].double().cpu()
                if batch:
                    lengths = torch.tensor([b - a for i in batch for a, b in branches[i].spans])
                    out.append(segment_stats(logprobs, F.pad(lengths.cumsum(0), (1, 0))).mean)
        return torch.cat(out) if out else torch.zeros(0, dtype=torch.float64)

    def branch_out(episodes: Sequence[Episode], states: dict[tuple[int, int], list], update: int) -> tuple[list[Branch], int, int]:
        """(2) Draws roots and executes the oracle from them, in the games whose episodes are over. Also how many branches were lost, and all steps taken."""
        chosen = []
        for group in dict.fromkeys(e.group for e in episodes):
            reached = [(e, t) for e in episodes if e.group == group for t in range(len(e.turns))]
            rng = np.random.default_rng([args.seed, update, group])
            for pick in sorted(rng.choice(len(reached), min(args.roots_per_group, len(reached)), replace=False).tolist()):
                e, t = reached[pick]
                own = sum(gains(turn.reward, turn.info) for turn in e.turns[t:])
                history = e.prompt_ids + e.token_ids[: e.turns[t].start]
                chosen.append((Branch(group, e.sample, t, e.task["id"], history, policy_return=own, update=update), e))

        def execute(pair: tuple[tuple[Branch, Episode], envs.Env]) -> bool:
            (branch, e), game = pair
            state = states[e.group, e.sample][branch.root]
            return continue_by_oracle(branch, game, state, max_turns - branch.root, tokenizer, sampling.stop_token_ids, context, gains)

        found: list[bool] = []
        with ThreadPoolExecutor(max(tasks.workers, 1)) as pool:
            for first in range(0, len(chosen), len(games)):
                found += (pool.map if tasks.workers else map)(execute, zip(chosen[first : first + len(games)], games))
        steps = sum(len(b.spans) for b, _ in chosen)  # those of lost branches were taken too
        return [b for (b, _), works in zip(chosen, found) if works], len(found) - sum(found), steps

    def study(branches: Sequence[Branch], sampling: Sampling, at: int, trials: int = 8) -> dict[str, float]:
        """Samples `trials` answers at every state along the branches of one update and compares them with the oracle's commands."""
        places = [(i, a, b) for i, branch in enumerate(branches) for a, b in branch.spans]
        prompts = [branches[i].prompt_ids + branches[i].token_ids[:a] for i, a, _ in places]
        keep = [len(p) + args.max_new_tokens <= context for p in prompts]
        seeds = [[int(x) for x in np.random.default_rng([args.seed, at, n]).integers(0, 2**62, trials)] for n in range(len(prompts))]
        samples = iter(engine.generate([p for p, k in zip(prompts, keep) if k], sampling, trials, [s for s, k in zip(seeds, keep) if k]))
        matches = np.zeros((len(places), trials), dtype=bool)  # a state without room for an answer reproduces nothing
        for row, ((i, a, b), k) in enumerate(zip(places, keep)):
            if k:
                matches[row] = [s.token_ids == branches[i].token_ids[a:b] for s in next(samples)]
        z, w = reachability(command_logprobs(branches), F.pad(torch.tensor([len(b.spans) for b in branches], dtype=torch.int64).cumsum(0), (1, 0)))
        offsets = np.cumsum([0, *(len(b.spans) for b in branches)])
        parts = run.gather((matches, z.numpy(), w.numpy(), np.diff(offsets))) if world > 1 else [(matches, z.numpy(), w.numpy(), np.diff(offsets))]
        joined = [np.concatenate([part[column] for part in parts]) for column in range(4)]
        return reachability_study(joined[0], joined[1], joined[2], np.cumsum([0, *joined[3].tolist()]))

    def append_bank(branches: Sequence[Branch]) -> None:
        if processes.is_main:
            with open(args.save_bank, "a") as handle:
                handle.writelines(json.dumps(asdict(b)) + "\n" for b in branches)

    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        run.log(evaluate(), step=0)

    for update in range(first_update, total_updates):
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
            states: dict[tuple[int, int], list] = {}  # of each episode, before each of its actions

            def keep(e: Episode, game: envs.Env, states: dict = states) -> None:
                states.setdefault((e.group, e.sample), []).append(game.snapshot())

            everything = play(mine, args.group_size, sampling, update, keep if args.oracle != "none" and not bank else None)
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

        # --- (1) advantages of the base algorithm, from the policy's own episodes
        with run.timer("reward"):
            step_rewards = torch.tensor([gains(t.reward, t.info) for e in episodes for t in e.turns], dtype=torch.float64)
            observations = [states_seen(e) for e in episodes]
            groups = [e.group for e in episodes]
            turn_adv = base_advantages(args.base, step_rewards, observations, [e.success >= 1 for e in episodes], groups, layout, args)
        token_adv = turn_adv[layout.turn_ids].float()
        old_logprobs = torch.zeros(offset[-1])

        # --- (2) (3) (4) branches of the oracle, their gates and weights
        branches, lost, oracle_steps = [], 0, 0
        with run.timer("oracle"):
            if bank:
                wanted = args.roots_per_group * args.groups_per_update
                picked = np.random.default_rng([args.seed, update]).choice(len(bank), wanted, replace=wanted > len(bank))
                branches = [replace(bank[i], group=n // args.roots_per_group) for n, i in enumerate(picked.tolist())][rank::world]
            elif args.oracle != "none":
                branches, lost, oracle_steps = branch_out(episodes, states, update)
            gates = gate(
                *(torch.tensor([getattr(b, f"{who}_return") for b in branches], dtype=torch.float64) for who in ("oracle", "policy")), args.success_reward
            )
        tried = len(branches) + lost
        mean_gate = float(gates.sum())
        used = [i for i, g in enumerate(gates.tolist()) if g > 0]
        branches, gates = [branches[i] for i in used], gates[used]
        if args.oracle == "short_bridge":  # judged by how it ends, learned as far as the bridge goes
            for b in branches:
                b.spans = b.spans[: args.bridge_length]
                del b.token_ids[b.spans[-1][1] :], b.target_mask[b.spans[-1][1] :]
        if args.save_bank:
            append_bank([b for part in run.gather(branches) for b in part] if world > 1 else branches)
        with run.timer("oracle"):
            commands = F.pad(torch.tensor([len(b.spans) for b in branches], dtype=torch.int64).cumsum(0), (1, 0))  # [B + 1]
            noise = np.concatenate(
                [np.random.default_rng([args.seed, update, b.group, b.sample, b.root]).random(len(b.spans)) for b in branches] or [np.empty(0)]
            )
            z, w = reachability(command_logprobs(branches) if args.oracle != "none" else torch.zeros(0, dtype=torch.float64), commands)
            weights = command_weights(args.oracle, w, commands, args.bridge_length, torch.from_numpy(noise), processes.all_sum)
            command_lengths = torch.tensor([b - a for branch in branches for a, b in branch.spans], dtype=torch.int64)

        def oracle_loss(
            step_branches: list[int], total_gate: float, scale: float,
            branches: list[Branch] = branches, commands: torch.Tensor = commands, gates: torch.Tensor = gates, weights: torch.Tensor = weights,
            command_lengths: torch.Tensor = command_lengths,
        ) -> None:  # fmt: skip
            """Adds the gradient of lambda_O * L_SERO over these branches to the policy's, in micro-batches."""
            rows = [(branches[i].prompt_ids, branches[i].token_ids) for i in step_branches]
            for batch in processes.rounds([[step_branches[i] for i in b] for b in micro_batches(rows, args.micro_batch_tokens)]):
                with no_sync(policy, True):
                    inputs = EMPTY if not batch else pack_rows(
                        [(branches[i].prompt_ids, branches[i].token_ids) for i in batch], share, pad_id, [branches[i].target_mask for i in batch]
                    )  # fmt: skip
                    with amp():
                        logprobs, _ = policy(inputs.to(device), args.temperature)
                    loss = logprobs.sum() * 0.0
                    if batch:
                        index = torch.cat([torch.arange(int(commands[i]), int(commands[i + 1])) for i in batch])
                        local = F.pad(torch.tensor([len(branches[i].spans) for i in batch]).cumsum(0), (1, 0))
                        token_weights = oracle_token_weights(gates[batch], weights[index], command_lengths[index], local, total_gate)
                        loss = -(logprobs * token_weights.float().to(device)).sum()
                        add({"losses/oracle_loss": (float(loss.detach()), 0.0)})
                    (args.lambda_o * loss * scale).backward()
            add({"losses/oracle_loss": (0.0, 1.0 / world)})

        # --- update
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
                    rows = [i for i, e in enumerate(episodes) if e.group in chosen]
                    totals = processes.all_sum(torch.tensor([float(sum(offset[i + 1] - offset[i] for i in rows)), float(len(rows))], dtype=torch.float64))
                    if totals[0] == 0:  # nothing to learn from: no step, which would only follow old momentum
                        continue
                    batches = [[rows[i] for i in b] for b in micro_batches([items[i] for i in rows], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    optimizer.zero_grad(set_to_none=True)
                    step_branches = [i for i, b in enumerate(branches) if b.group in chosen]
                    total_gate = float(processes.all_sum(gates[step_branches].sum()[None])[0])
                    if args.lambda_o > 0 and total_gate > 0:  # before the base term: the last micro-batch of the step sends the gradients
                        oracle_loss(step_branches, total_gate, float(world))
                    for number, batch in enumerate(batches):
                        with no_sync(policy, number < len(batches) - 1):
                            inputs = packed(batch)
                            with amp():
                                logprobs, entropy = policy(inputs, args.temperature)
                            loss = logprobs.sum() * 0.0
                            if batch:
                                index = token_index(batch)
                                token_weights = torch.full((len(index),), 1.0 / float(totals[0]))
                                if args.loss_aggregation == "seq_mean_token_mean":
                                    token_weights = 1.0 / (layout.episodes.diff()[layout.episode_ids[index]] * float(totals[1]))
                                if epoch == 0 and args.num_minibatches == 1:
                                    old_logprobs[index] = logprobs.detach().cpu()
                                reference = None
                                if start_policy is not None:
                                    with torch.no_grad(), amp():
                                        reference = start_policy(inputs, args.temperature)[0]
                                loss, metrics = policy_loss(
                                    logprobs, old_logprobs[index].to(device), rollout_logprobs[index].to(device), token_adv[index].to(device),
                                    token_weights.float().to(device), args.clip_low, args.clip_high, args.tis_cap, reference, args.kl_coef,
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
        delta = old_logprobs.double() - rollout_logprobs.double()
        mismatch = delta.clamp(-20, 20)
        n_tokens = float(offset[-1])
        earned: dict[int, list[float]] = {}
        for e in episodes:
            earned.setdefault(e.group, []).append(e.reward)
        steps_taken["policy"] += float(processes.all_sum(torch.tensor([float(sum(len(e.turns) for e in measured))], dtype=torch.float64))[0])
        steps_taken["oracle"] += float(processes.all_sum(torch.tensor([float(oracle_steps)], dtype=torch.float64))[0])
        depth = torch.arange(len(w)) - torch.repeat_interleave(commands[:-1], commands.diff())
        add(
            {
                **episode_metrics(measured, everything),
                "charts/learning_rate": (lr, 1.0),
                "rollout/zero_std_group_frac": (float(sum(min(r) == max(r) for r in earned.values())), float(len(earned))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(delta.abs().sum()), n_tokens),
                "rollout/logprob_absdiff_max": (float(delta.abs().max()) if n_tokens else 0.0, n_tokens),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_tokens),
                "sero/gate": (mean_gate, float(tried - lost)),
                "sero/used_root_frac": (float(len(branches)), float(tried)),
                "sero/no_way_frac": (float(lost), float(tried)),
                "sero/depth": (float(len(w)), float(len(branches))),
                "sero/effective_depth": (float(w.sum()), float(len(branches))),
                "sero/z": (float(z.sum()), float(len(z))),
                "sero/oracle_token_share": (float(command_lengths.sum()), float(command_lengths.sum()) + n_tokens),
                "sero/repeated_observation_frac": repeated_steps(observations, groups),
                **{f"sero/w/depth_{k:02d}": (float(w[depth == k].sum()), float((depth == k).sum())) for k in range(int(depth.max()) + 1 if len(w) else 0)},
            }
        )
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})
        metrics |= {f"sero/{who}_steps": n for who, n in steps_taken.items()}  # environment steps since the start
        seconds = time.perf_counter() - started
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([n_tokens], dtype=torch.float64))[0]) / seconds
        metrics["sero/oracle_time_share"] = run.seconds["oracle"] / seconds
        done = update + 1
        if done == total_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate()
            shown = next((g for g, r in earned.items() if min(r) < max(r)), None)
            for i in [i for i, e in enumerate(episodes) if e.group == shown][:4]:
                turns = slice(int(layout.episode_turns[i]), int(layout.episode_turns[i + 1]))
                run.episode(episode_record(done, episodes[i], turn_adv[turns].tolist(), tokenizer), step=done)
            for i, b in list(enumerate(branches))[:2]:
                span = slice(int(commands[i]), int(commands[i + 1]))
                record = branch_record(done, i + 1, b, float(gates[i]), z[span].tolist(), w[span].tolist(), weights[span].tolist(), tokenizer)
                run.episode(record, step=done)
            if done == total_updates and args.study == "reachability":
                metrics |= study(branches, sampling, done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == total_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                run.save_checkpoint(done, {**training_state(bare, optimizer), "steps_taken": steps_taken})
        if stop:
            break

    engine.close()
    for game in games:
        game.close()
    if processes.is_main:
        episodes = [viewer_episode(record) for record in read_jsonl(run.folder / "episodes.jsonl")]
        legend = [
            "Episodes: a bar per turn with its advantage. Branches: a bar per command of the oracle with gate times weight.",
            "Grey: what the environment said; a branch's prompt holds the policy's history up to the root.",
        ]
        subtitle = f"base {args.base}, oracle {args.oracle}, lambda {args.lambda_o}"
        write_credit_html(run.folder / "credit.html", episodes, f"sero.py on {args.env}", subtitle, legend)
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        sys.exit(main(parse_args(Args)).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, RunError) as error:  # what a user can mend; anything else shows its traceback
        sys.exit(f"{type(error).__name__}: {error}")
