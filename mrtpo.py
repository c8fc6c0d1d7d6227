# docs: docs/mrtpo.md
"""MRTPO: Each Reward to Its Relevant Tokens (multi-reward-to-token policy optimisation, October 2026).

Several verifiers look at different parts of one response, yet GRPO and GDPO pay every token the same. MRTPO replays each
response with and without the text that a verifier used, and moves that reward's advantage to the tokens whose prediction
changes. What departs from GRPO, marked (1) to (5) in the code:

(1) every reward is normalised over its prompt's group on its own (GDPO), never summed first;
(2) what verifier k used is a text block Z_k; the prompt is rebuilt with all blocks and with all but Z_k;
(3) leave-one-out self-replay: q[k, t] is the Jensen-Shannon distance of the two next-token distributions at position t of
    the same response, under the sampling parameters, without gradient or new sampling;
(4) weights w = (1 - beta) + beta * q / mean(q): mean 1 over a response, never below 1 - beta, capped, beta warmed up;
(5) token advantage S_t = sum_k A_k w[k, t], normalised over the batch's tokens; the clipped loss stays as it is.

Laptop, two CPU cores (about 2 minutes):   python mrtpo.py
Another task, another credit rule:         python mrtpo.py --env tools --credit gdpo
One GPU:                                   python mrtpo.py --model Qwen/Qwen2.5-1.5B-Instruct --env sql:SPIDER_FOLDER --learning-rate 1e-6 --max-new-tokens 512
Several GPUs:                              accelerate launch --config_file benchmarks/accelerate/ddp.yaml mrtpo.py --model ... --env ...
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_jsonl
from common.engine import EngineError, Sampling, make_engine
from common.packing import EMPTY, PackedBatch, check_packing, forward_hidden, micro_batches, pack_rows, token_logprobs
from common.policies import PolicyError, TinyConfig, load_policy, stop_token_ids, token_spans
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.run import Run
from common.viewer import write_credit_html
from kernels.js_divergence import js_distance_from_hidden
from mrtpo_report import episode_record, viewer_episode


@dataclass
class Args:
    # --- run
    env: str = "sql"
    """task: sql, instructions or tools are generated; real data: sql:FOLDER (Spider/BIRD layout), instructions:FILE (IFEval jsonl), tools:FOLDER (BFCL v4)"""
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
    num_updates: int = 100
    """rollout-and-update rounds"""
    eval_every: int = 5
    """updates between evaluations on the unseen split (0: only at the start and the end)"""
    eval_tasks: int = 128
    """evaluation tasks, greedy decoding"""
    save_every: int = 25
    """updates between checkpoints (0: only at the end and when interrupted)"""
    resume: str = ""
    """run folder to continue"""
    out: str = ""
    """run folder; empty: runs/<env>__mrtpo__<seed>__<time>"""
    track: bool = False
    """log to Weights & Biases too"""
    # --- training
    groups_per_update: int = 16
    """prompts per update, over all processes"""
    group_size: int = 8
    """responses per prompt"""
    max_new_tokens: int = 96
    """response length limit"""
    temperature: float = 1.0
    """of sampling, of every log-prob in the loss and of the replayed distributions"""
    learning_rate: float = 5e-4
    """constant after the warm-up; for the tiny policy (paper-size models: about 1e-6) [deduced]"""
    lr_warmup_updates: int = 5
    """linear warm-up of the learning rate [deduced]"""
    update_epochs: int = 2
    """passes over each rollout; in the first step after a rollout the ratio is exactly 1"""
    num_minibatches: int = 1
    """optimizer steps per pass"""
    micro_batch_tokens: int = 4096
    """most tokens in one forward pass; gradients do not depend on it"""
    clip_low: float = 0.2
    """ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """ratio is clipped above at 1 + clip_high"""
    tis_cap: float = 2.0
    """per-token truncated importance weight min(trainer/engine, cap), detached, applied after the clip (0: off)"""
    kl_coef: float = 0.0
    """coefficient of the k3 estimate of KL(policy || start policy) in the loss, per token, each estimate capped at 10 (not with opsd)"""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """mean over all response tokens of the update, or mean over each response, then over responses"""
    max_grad_norm: float = 1.0
    """gradient clipping by global norm"""
    # --- MRTPO
    credit: Literal["mrtpo", "gdpo", "grpo", "joint", "shuffled", "opsd"] = "mrtpo"
    """gdpo: uniform weights; grpo: rewards summed, then normalised; joint: one profile from removing all blocks at once; shuffled: the true weights
    permuted inside each response; opsd: no rewards, self-distillation from the start policy that sees the blocks"""
    response_weighting: Literal["none", "saw"] = "none"
    """saw: weight each reward by its coefficient of variation over the batch; composes with every credit but opsd"""
    beta: float = 0.5
    """share of the credit that is redistributed by mrtpo, joint and shuffled [paper]"""
    beta_warmup: int = 10
    """updates over which beta rises linearly from 0 [paper: a warm-up; its length is deduced]"""
    max_weight: float = 5.0
    """cap of a token's weight before the mean is restored to 1, which can lift it again, to max_weight / (1 - beta) at most [paper: a cap; value deduced]"""
    advantage_eps: float = 1e-4
    """added to a group's standard deviation (ddof 1) [deduced: GDPO's published value]"""
    opsd_beta: float = 0.5
    """opsd: mixture weight b of the generalised JS divergence, b KL(T||M) + (1-b) KL(S||M), M = (1-b) S + b T [OPSD's published value]"""
    opsd_temperature: float = 1.1
    """opsd: temperature of both distributions [OPSD's published value]"""


# ------------------------------------------------------------------------------------------- prompts and message format

BLOCKS_HEADER = "\n\nVerifier information:"


def with_blocks(messages: list[dict], blocks: dict[str, str]) -> list[dict]:
    """(2) The prompt with the verifiers' text after the user's last message; blocks without text leave no trace. [wording deduced]"""
    text = "".join(f"\n{name}: {block}" for name, block in blocks.items() if block)
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + BLOCKS_HEADER + text}] if text else messages


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy, by the careless expert. A third of them show verifier information (all blocks, or all but
    one; the answer is then right): a policy that never saw such text would be blind to it in the replays."""
    rng = random.Random(seed)
    env = tasks.make_env()
    out = []
    for task in tasks.train:
        *messages, answer = tasks.careless(task, rng)
        if rng.random() < 1 / 3:
            env.reset(task)
            blocks = dict(env.step(answer["content"])[4]["verifier_text"])  # about the careless answer, as in a replay
            if rng.random() < 0.6:
                blocks.pop(rng.choice(list(blocks)))
            *messages, answer = tasks.demonstrate(task, rng)
            messages = with_blocks(messages, blocks)
        out.append([*messages, answer])
    env.close()
    return out


# --------------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Response:
    """One sampled answer and what the verifiers said. `rewards` holds NaN where a verifier could not measure."""

    group: int  # index of its prompt in the update, over all processes
    sample: int  # index in its group
    task: dict
    messages: list[dict]
    prompt_ids: list[int]
    token_ids: list[int]  # sampled ids, stop token included; never re-encoded
    logprobs: list[float]  # of the engine, at the sampling temperature
    truncated: bool
    text: str
    rewards: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    success: float = 0.0
    error: str = ""


def encode(tokenizer, messages: list[dict]) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids


def sample_seed(seed: int, update: int, group: int, sample: int) -> int:
    """Independent stream per sample: results do not depend on how a batch is split over calls or processes."""
    return int(np.random.SeedSequence([seed, update + 1, group, sample]).generate_state(1, np.uint64)[0] >> 1)


def rollout(engine, tokenizer, env, tasks: Sequence[tuple[int, dict]], n: int, sampling: Sampling, seed: int, update: int) -> list[Response]:
    """Samples n answers for each (group index, task) and has them verified. Responses of a group are adjacent."""
    messages = [env.reset(task) for _, task in tasks]
    prompts = [encode(tokenizer, m) for m in messages]
    seeds = [[sample_seed(seed, update, group, j) for j in range(n)] for group, _ in tasks]
    out = []
    for (group, task), m, prompt, samples in zip(tasks, messages, prompts, engine.generate(prompts, sampling, n, seeds)):
        for j, s in enumerate(samples):
            body = s.token_ids[:-1] if s.finish_reason == "stop" else s.token_ids
            text = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            r = Response(group, j, task, m, prompt, s.token_ids, s.logprobs, s.finish_reason == "length", text)
            env.reset(task)
            info = env.step(text)[4]
            r.rewards, r.blocks = dict(info["rewards"]), dict(info.get("verifier_text", {}))
            r.success, r.error = float(info["success"]), info.get("error", "")
            out.append(r)
    return out


# ------------------------------------------------------------- the paper's functions: tensors in, tensors and metrics out


def group_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(1) A[i, k] = (r[i, k] - mean_g) / (std_g + eps) over the group of response i, std with ddof 1.

    rewards [R, K] float64 with NaN where a prompt lacks reward k or its verifier failed: those take no part and get 0.
    A group without variance in k (or with one measured response) gets exactly 0. Returns (advantages [R, K], varies [R, K] bool).
    """
    _, group = torch.unique(group_ids, return_inverse=True)  # [R]
    num_groups = int(group.max()) + 1 if len(group) else 0
    known = ~rewards.isnan()
    r = rewards.nan_to_num(0.0)
    zeros = torch.zeros(num_groups, rewards.shape[1], dtype=torch.float64)
    count = zeros.index_add(0, group, known.double())
    mean = zeros.index_add(0, group, r) / count.clamp(min=1)
    squares = zeros.index_add(0, group, torch.where(known, r - mean[group], 0.0) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    index = group[:, None].expand(-1, rewards.shape[1])
    low = zeros.scatter_reduce(0, index, torch.where(known, r, torch.inf), "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, torch.where(known, r, -torch.inf), "amax", include_self=False)
    varies = known & (high > low)[group]
    return torch.where(varies, (r - mean[group]) / (std[group] + eps), 0.0), varies


def saw_weights(rewards: torch.Tensor, all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """SAW: weight K * CV_k / sum CV of each reward, CV_k = std_k / (|mean_k| + 1e-8) over the batch (std with ddof 1). [R, K] -> [K]."""
    known = ~rewards.isnan()
    count = all_sum(known.double().sum(0))
    mean = all_sum(rewards.nan_to_num(0.0).sum(0)) / count.clamp(min=1)
    squares = all_sum((torch.where(known, rewards - mean, 0.0) ** 2).sum(0))
    cv = (squares / (count - 1).clamp(min=1)).sqrt() / (mean.abs() + 1e-8)
    present = (count > 0).double()
    return present.sum() * cv / (cv.sum() + 1e-8)


def credit_weights(q: torch.Tensor, response_ids: torch.Tensor, num_responses: int, beta: float, max_weight: float) -> torch.Tensor:
    """(4) w = (1 - beta) + beta * q / mean(q), capped at max_weight, then divided by its mean over the response.

    q [N, K] float64, NaN for a (response, reward) pair that was not replayed; response_ids [N]. Returns w [N, K] with mean 1
    over each response and no value under 1 - beta; exactly 1 where there was no replay or the mean distance is under 1e-8.
    """
    zeros = torch.zeros(num_responses, q.shape[1], dtype=torch.float64)
    length = torch.bincount(response_ids, minlength=num_responses).clamp(min=1)[:, None]
    mean = (zeros.index_add(0, response_ids, q) / length)[response_ids]  # NaN stays NaN
    w = ((1 - beta) + beta * q / mean).clamp(max=max_weight)
    w = torch.where(mean >= 1e-8, w, 1.0)  # also where mean is NaN
    return w / (zeros.index_add(0, response_ids, w) / length)[response_ids]


def shuffle_within(w: torch.Tensor, response_ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Control: one random order of the positions of each response, the same for all its rewards [deduced], so only the alignment is lost."""
    return w[torch.from_numpy(np.lexsort((noise.numpy(), response_ids.numpy())))]


def token_advantages(advantages: torch.Tensor, weights: torch.Tensor, response_ids: torch.Tensor) -> torch.Tensor:
    """(5) S_t = sum_k A_k w[k, t]. advantages [R, K], weights [N, K] -> [N] float64."""
    return (advantages[response_ids] * weights).sum(1)


def normalise_tokens(s: torch.Tensor, all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """Batch normalisation over all response tokens of the update: (S - mean) / sqrt(var + 1e-8), var with ddof 1."""
    total, count = all_sum(torch.stack([s.sum(), torch.tensor(float(len(s)), dtype=s.dtype)]))
    mean = total / count.clamp(min=1)
    var = all_sum(((s - mean) ** 2).sum()[None])[0] / (count - 1).clamp(min=1)
    return (s - mean) / (var + 1e-8).sqrt()


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


def generalised_js(student_logits: torch.Tensor, teacher_logits: torch.Tensor, b: float) -> torch.Tensor:
    """OPSD's divergence per position over the full vocabulary: b KL(T || M) + (1 - b) KL(S || M) with M = (1 - b) S + b T. [N, V] -> [N], nats."""
    s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    if b in (0.0, 1.0):  # the limits: KL(T || S), KL(S || T)
        return F.kl_div(s, t, log_target=True, reduction="none").sum(-1) if b == 0 else F.kl_div(t, s, log_target=True, reduction="none").sum(-1)
    m = torch.logsumexp(torch.stack([s + np.log1p(-b), t + np.log(b)]), dim=0)
    return b * F.kl_div(m, t, log_target=True, reduction="none").sum(-1) + (1 - b) * F.kl_div(m, s, log_target=True, reduction="none").sum(-1)


def tokens_for_share(q: torch.Tensor, response_ids: torch.Tensor, num_responses: int, share: float = 0.8) -> torch.Tensor:
    """Localisation: smallest fraction of a response's tokens that hold `share` of its distance. q [N] >= 0 -> [R], NaN where q sums to 0."""
    order = torch.from_numpy(np.lexsort((-q.numpy(), response_ids.numpy())))  # by response, largest distance first
    q, length = q[order], torch.bincount(response_ids, minlength=num_responses)
    total = torch.zeros(num_responses, dtype=q.dtype).index_add(0, response_ids, q)
    start = torch.cumsum(total, 0) - total
    before = torch.cumsum(q, 0) - q - start[response_ids]  # mass of the response's larger tokens
    needed = torch.zeros(num_responses, dtype=q.dtype).index_add(0, response_ids, (before < share * total[response_ids] - 1e-12).to(q.dtype))
    return torch.where(total > 0, needed / length.clamp(min=1), torch.nan)


# ---------------------------------------------------------------------------------------------------------------- policy


class Policy(torch.nn.Module):
    """The language model with its losses' inputs computed inside `forward`, so that DDP and FSDP2 see every use of a weight."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.lm = lm

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = self.lm.get_output_embeddings()
        weight, bias = out.weight, getattr(out, "bias", None)
        return tuple(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (weight, bias))

    def forward(self, batch: PackedBatch, temperature: float = 1.0, teacher: tuple | None = None, hidden_only: bool = False):
        """Log-probs [N] and entropies [N]; hidden states [N, D] with hidden_only; OPSD's divergence [N] with teacher = (hidden, head, b)."""
        hidden = forward_hidden(self.lm, batch)
        if hidden_only:
            return hidden
        weight, bias = self.head()
        if teacher is None:
            return token_logprobs(hidden, weight, bias, batch.target_ids, temperature)
        teacher_hidden, (teacher_weight, teacher_bias), b = teacher

        def chunk(h: torch.Tensor, w: torch.Tensor, th: torch.Tensor) -> torch.Tensor:
            return generalised_js(F.linear(h, w, bias).float() / temperature, F.linear(th, teacher_weight, teacher_bias).float() / temperature, b)

        size = max(1, 2**23 // weight.shape[0])
        parts = zip(hidden.split(size), teacher_hidden.split(size))
        return torch.cat([checkpoint(chunk, h, weight, th, use_reentrant=False) for h, th in parts])


# ------------------------------------------------------------------------------------------------- (3) self-replay


@torch.no_grad()
def replay(
    hidden_of: Callable[[PackedBatch], torch.Tensor],
    head: tuple[torch.Tensor, torch.Tensor | None],
    encode_prompt: Callable[[list[dict]], list[int]],
    responses: Sequence[Response],
    names: Sequence[str],
    wanted: torch.Tensor,  # [R, K] bool: pairs to replay
    joint: bool,
    temperature: float,
    max_tokens: int,
    share: bool,
    pad_id: int,
    rounds: Callable[[list], Iterator] = iter,
    context: int = sys.maxsize,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(3) q [N, K] float64 over the flat response tokens, NaN for pairs that were not replayed.

    Each response is scored once under P_all and once under P_without_k for every wanted k with text; with `joint` once
    under the prompt without any block, for all k. Equal (prompt, response) pairs are computed once. `rounds` lets
    several processes make the same number of passes. A response whose P_all does not fit the context is not replayed, but counted.
    """
    lengths = [len(r.token_ids) for r in responses]
    offset = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    q = torch.full((int(offset[-1]), len(names)), torch.nan, dtype=torch.float64)
    overlong = 0
    encoded: dict[tuple, list[int]] = {}  # (group, removed block, texts) -> prompt ids
    jobs: list[tuple[int, list[int], list[tuple[list[int], list[int]]]]] = []  # response, its P_all, [(columns, P_without)]
    for i, r in enumerate(responses):
        columns = [k for k in range(len(names)) if wanted[i, k] and r.blocks.get(names[k])]
        if not columns:
            continue

        def prompt_without(removed: str | None, r: Response = r) -> list[int]:
            blocks = {} if removed == "*" else {n: t for n, t in r.blocks.items() if n != removed and t}
            key = (r.group, tuple(blocks.items()))
            if key not in encoded:
                encoded[key] = encode_prompt(with_blocks(r.messages, blocks))
            return encoded[key]

        if len(prompt_without(None)) + lengths[i] > context:
            overlong += 1
            continue
        variants = [(columns, prompt_without("*"))] if joint else [([k], prompt_without(names[k])) for k in columns]
        jobs.append((i, prompt_without(None), variants))

    batches, batch, tokens = [], [], 0
    for job in jobs:
        cost = (1 + len(job[2])) * (len(job[1]) + lengths[job[0]])  # an upper bound: shared prompts and repeats cost less
        if batch and tokens + cost > 2 * max_tokens:
            batches.append(batch)
            batch, tokens = [], 0
        batch.append(job)
        tokens += cost
    if batch:
        batches.append(batch)

    forward_tokens, pairs = 0, 0
    for batch in rounds(batches):
        rows: dict[tuple, int] = {}  # (prompt, response) -> its row: equal pairs are computed once
        compared: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # rows under P_all and P_without_k -> [(response, its columns of q)]
        for i, p_all, variants in batch:
            response = tuple(responses[i].token_ids)
            reference = rows.setdefault((tuple(p_all), response), len(rows))
            for columns, prompt in variants:
                compared.setdefault((reference, rows.setdefault((tuple(prompt), response), len(rows))), []).append((i, columns))
                pairs += len(columns)
        packed = pack_rows(list(rows), share, pad_id) if batch else EMPTY
        hidden = hidden_of(packed)  # [M, D]
        if not batch:
            continue
        forward_tokens += packed.num_tokens
        starts = packed.lengths.cumsum(0) - packed.lengths
        spans = [torch.arange(int(packed.lengths[a])) for a, _ in compared]
        at_all, at_without = (torch.cat([starts[pair[side]] + span for pair, span in zip(compared, spans)]).to(hidden.device) for side in (0, 1))
        # responses that begin alike share hidden states: each pair of states is compared once
        states = packed.predict_index.to(hidden.device)
        _, inverse = torch.unique(states[at_all] * packed.input_ids.numel() + states[at_without], return_inverse=True)
        first = torch.empty_like(inverse[: int(inverse.max()) + 1]).scatter_(0, inverse, torch.arange(len(inverse), device=hidden.device))
        weight, bias = (x if x is None else x.to(hidden.dtype) for x in head)
        distance = js_distance_from_hidden(hidden, hidden[at_without[first]], weight, bias=bias, temperature=temperature, ref_index=at_all[first])
        for places, d in zip(compared.values(), distance[inverse].double().cpu().split([len(span) for span in spans])):
            for i, columns in places:
                q[offset[i] : offset[i + 1], columns] = d[:, None]
    return q, {"tokens": float(forward_tokens), "pairs": float(pairs), "responses": float(len(jobs)), "overlong": float(overlong)}


# -------------------------------------------------------------------------------------------------------- reports

PANELS = [
    Panel("Mean reward at evaluations", ("eval/reward_mean",), limits=(0, 1)),
    Panel("Rewards", ("reward/*",), limits=(0, 1)),
    Panel("Tokens that hold 80 % of the distance", ("mrtpo/tokens_for_80pct/*",), limits=(0, 1)),
    Panel("Replay", ("mrtpo/replayed_pair_frac", "mrtpo/replay_share"), limits=(0, 1)),
]


def localisation(q: torch.Tensor, responses: Sequence[Response], names: Sequence[str], response_ids: torch.Tensor) -> dict[str, tuple[float, float]]:
    """`mrtpo/tokens_for_80pct/<reward>` as (sum, count) over replayed responses."""
    out = {}
    for k, name in enumerate(names):
        on = ~q[:, k].isnan()
        share = tokens_for_share(q[on, k], response_ids[on], len(responses)) if on.any() else torch.empty(0)
        share = share[~share.isnan()]
        out[f"mrtpo/tokens_for_80pct/{name}"] = (float(share.sum()), float(len(share)))
    return out


def region_lift(q: torch.Tensor, offset: Sequence[int], responses: Sequence[Response], names: Sequence[str], tokenizer, regions) -> dict[str, float]:
    """`mrtpo/region_lift/<reward>/<region>`: the region's share of the distance over its share of the tokens, pooled over replayed responses."""
    mass: dict[tuple[str, str], list[float]] = {}
    totals = {name: [0.0, 0.0] for name in names}
    for i, r in enumerate(responses):
        part = q[offset[i] : offset[i + 1]]
        columns = [k for k in range(len(names)) if not bool(part[:, k].isnan().any())]
        if not columns:
            continue
        labels = regions(r.text)
        owner = [next((name for name, a, b in labels if a < end and start < b), "other") for start, end in token_spans(tokenizer, r.token_ids)]
        for k in columns:
            values = part[:, k].tolist()
            totals[names[k]][0] += sum(values)
            totals[names[k]][1] += len(values)
            for region, value in zip(owner, values):
                entry = mass.setdefault((names[k], region), [0.0, 0.0])
                entry[0] += value
                entry[1] += 1
    return {f"mrtpo/region_lift/{n}/{g}": (d / totals[n][0]) / (c / totals[n][1]) for (n, g), (d, c) in mass.items() if totals[n][0] > 0}


# ----------------------------------------------------------------------------------------------------------------- main


LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Args) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "save_every": 0, "groups_per_update": 1, "max_new_tokens": 1, "update_epochs": 1,
        "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "beta_warmup": 0, "kl_coef": 0, "tis_cap": 0, "advantage_eps": 0,
        "learning_rate": 0, "clip_high": 0, "seed": 0,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm", "opsd_temperature"), shares=("beta", "opsd_beta", "clip_low"))
    if args.group_size < 2:
        raise ArgumentError(f"--group-size {args.group_size}: group normalisation needs at least 2 responses")
    if not args.max_weight >= 1:
        raise ArgumentError(f"--max-weight {args.max_weight}: a cap under the mean weight 1 cannot keep the mean")
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.credit == "opsd" and (args.response_weighting != "none" or args.kl_coef > 0):
        raise ArgumentError("--credit opsd has neither rewards to weight nor a policy-gradient loss: leave out --response-weighting and --kl-coef")


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
    env = tasks.make_env()
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
    for split, rows in (("train", tasks.train), ("eval", tasks.eval[: args.eval_tasks])):
        for task in rows:
            length = len(encode(tokenizer, env.reset(task)))
            if length + args.max_new_tokens > context:
                raise envs.DataError(
                    f"--env {args.env}: {split} task {task['id']!r} has {length} prompt tokens, with --max-new-tokens {args.max_new_tokens} more than the "
                    f"context of {context} of --model {args.model}: lower --max-new-tokens, take the task out of the data or choose a model with more context"
                )
    sampling = Sampling(args.temperature, args.max_new_tokens, stop_token_ids(lm, tokenizer))
    greedy = Sampling(0.0, args.max_new_tokens, sampling.stop_token_ids)

    # start policy for the KL term and as OPSD's teacher; engine; parallel wrappers; optimizer
    start_policy = Policy(copy.deepcopy(lm)).eval().requires_grad_(False) if args.kl_coef > 0 or args.credit == "opsd" else None
    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    only_kv = args.rollout_format == "fp8_kv"
    engine = make_engine(
        engine_kind, engine_lm, tokenizer, max_model_len=context,
        rollout_format="auto" if only_kv else args.rollout_format, kv_cache_dtype="fp8" if only_kv else None,
    )  # fmt: skip
    bare = Policy(lm)
    policy = processes.wrap(bare, lm.base_model.layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    def teacher_prompt(r: Response) -> list[int]:
        return encode(tokenizer, with_blocks(r.messages, r.blocks))

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    run = Run(
        args,
        "mrtpo",
        total_updates=args.num_updates,
        key_metrics=["eval/success", "eval/reward_mean", "charts/success", "charts/episodic_return", "charts/episodic_length"],
        **distributed(),
    )
    first_update, reached = 0, {}  # reached: reward -> first update whose mean was 0.8
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)
        reached = state["reached"]

    def evaluate() -> dict[str, tuple[float, float]]:
        mine = list(enumerate(tasks.eval[: args.eval_tasks]))[rank::world]
        rs = rollout(engine, tokenizer, env, mine, 1, greedy, args.seed, -1)
        measured = [r for r in rs if not r.error]
        sums = {"eval/success": (sum(r.success for r in measured), len(measured)), "eval/length": (sum(len(r.token_ids) for r in rs), len(rs))}
        sums["eval/error_frac"] = (len(rs) - len(measured), len(rs))
        sums["eval/reward_mean"] = (sum(v for r in measured for v in r.rewards.values()), sum(len(r.rewards) for r in measured))
        for name in processes.union({name for r in rs for name in r.rewards}):
            values = np.array([r.rewards.get(name, np.nan) for r in measured])
            sums[f"eval/reward/{name}"] = (float(np.nansum(values)), float(np.sum(~np.isnan(values))))
        return reduce_metrics(sums)

    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        start = evaluate()
        run.log(start, step=0)
        if len(shown := [key for key in start if key.startswith("eval/reward/")]) <= 4:
            run.key_metrics = [*run.key_metrics, *shown]

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
            everything = rollout(engine, tokenizer, env, mine, args.group_size, sampling, args.seed, update)
        responses = [r for r in everything if not r.error]  # a response whose verifier failed is counted below and takes no part
        overlong = 0.0
        if args.credit == "opsd":  # neither does one that the teacher cannot read
            fits = [r for r in responses if len(teacher_prompt(r)) + len(r.token_ids) <= context]
            responses, overlong = fits, float(len(responses) - len(fits))
        names = processes.union({name for r in everything for name in r.rewards})

        # --- (1) rewards to advantages per reward
        with run.timer("reward"):
            rewards = torch.tensor([[r.rewards.get(n, np.nan) for n in names] for r in responses], dtype=torch.float64).reshape(len(responses), len(names))
            group_ids = torch.tensor([r.group for r in responses], dtype=torch.int64)
            lengths = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64)
            offset = [0, *lengths.cumsum(0).tolist()]
            response_ids = torch.repeat_interleave(torch.arange(len(responses)), lengths)
            scale = saw_weights(rewards, processes.all_sum) if args.response_weighting == "saw" else torch.ones(len(names), dtype=torch.float64)
            if args.credit == "grpo":
                summed = (rewards * scale).nansum(1, keepdim=True)
                advantages, varies = group_advantages(summed, group_ids, args.advantage_eps)  # [R, 1]
            else:
                advantages, varies = group_advantages(rewards, group_ids, args.advantage_eps)  # [R, K]
                advantages = advantages * scale

        # --- (2) (3) (4) replay and weights
        beta = args.beta * min(1.0, update / args.beta_warmup if args.beta_warmup else 1.0)
        q = torch.full((offset[-1], len(names)), torch.nan, dtype=torch.float64)
        spent = {"tokens": 0.0, "pairs": 0.0, "responses": 0.0, "overlong": overlong}
        with run.timer("replay"), amp():
            if args.credit in ("mrtpo", "joint", "shuffled") and beta > 0:
                q, spent = replay(
                    lambda batch: bare(batch.to(device), hidden_only=True), bare.head(), lambda m: encode(tokenizer, m), responses, names, wanted=varies,
                    joint=args.credit == "joint", temperature=args.temperature, max_tokens=args.micro_batch_tokens, share=share, pad_id=pad_id,
                    rounds=processes.rounds, context=context,
                )  # fmt: skip
            weights = credit_weights(q, response_ids, len(responses), beta, args.max_weight)  # [N, K]
            if args.credit == "shuffled":
                noise = [np.random.default_rng([args.seed, update, r.group, r.sample]).random(len(r.token_ids)) for r in responses]
                weights = shuffle_within(weights, response_ids, torch.from_numpy(np.concatenate(noise) if noise else np.empty(0)))

        # --- (5) token advantages
        if args.credit == "grpo":
            token_adv = advantages[response_ids, 0]
        else:
            token_adv = token_advantages(advantages, weights, response_ids)
            if len(names) > 1:
                token_adv = normalise_tokens(token_adv, processes.all_sum)
        token_adv = token_adv.float()
        rollout_logprobs = torch.tensor([x for r in responses for x in r.logprobs], dtype=torch.float32)

        # --- update
        with run.timer("train"):
            lr = args.learning_rate * min(1.0, (update + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            items = [(r.prompt_ids, r.token_ids) for r in responses]
            old_logprobs = torch.zeros(offset[-1])

            def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
                return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

            if args.num_minibatches > 1:  # the ratio's anchor; without minibatches it is the detached value of the first pass
                with torch.no_grad(), amp():
                    for batch in processes.rounds(list(micro_batches(items, args.micro_batch_tokens))):
                        packed = pack_rows([items[i] for i in batch], share, pad_id) if batch else EMPTY
                        logprobs = policy(packed.to(device), args.temperature)[0].cpu()
                        if batch:
                            old_logprobs[token_index(batch)] = logprobs
            policy.train()
            for epoch in range(args.update_epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(args.groups_per_update)
                for part in range(args.num_minibatches):
                    chosen = set(order[part :: args.num_minibatches].tolist()) if args.num_minibatches > 1 else set(range(args.groups_per_update))
                    rows = [i for i, r in enumerate(responses) if r.group in chosen]
                    totals = processes.all_sum(torch.tensor([float(sum(len(items[i][1]) for i in rows)), float(len(rows))], dtype=torch.float64))
                    if totals[0] == 0:  # every verifier failed: no step, which would only follow old momentum
                        continue
                    batches = [[rows[i] for i in b] for b in micro_batches([items[i] for i in rows], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    optimizer.zero_grad(set_to_none=True)
                    for number, batch in enumerate(batches):
                        packed = (pack_rows([items[i] for i in batch], share, pad_id) if batch else EMPTY).to(device)
                        with no_sync(policy, number < len(batches) - 1):
                            if not batch:
                                with amp():
                                    loss = policy(packed, args.temperature)[0].sum() * 0.0
                            else:
                                index = token_index(batch)
                                if args.loss_aggregation == "token_mean":
                                    token_weights = torch.full((len(index),), 1.0 / float(totals[0]))
                                else:
                                    token_weights = 1.0 / (lengths[response_ids[index]] * float(totals[1]))
                                token_weights = token_weights.float().to(device)
                                if args.credit == "opsd":
                                    seen = [(teacher_prompt(responses[i]), items[i][1]) for i in batch]
                                    with torch.no_grad(), amp():
                                        teacher = start_policy(pack_rows(seen, share, pad_id).to(device), hidden_only=True)
                                    with amp():
                                        divergence = policy(packed, args.opsd_temperature, teacher=(teacher, start_policy.head(), args.opsd_beta))
                                    loss = (divergence * token_weights).sum()
                                    add({"losses/policy_loss": (float(loss.detach()), 0.0)})
                                else:
                                    with amp():
                                        logprobs, entropy = policy(packed, args.temperature)
                                    if epoch == 0 and args.num_minibatches == 1:
                                        old_logprobs[index] = logprobs.detach().cpu()
                                    reference = None
                                    if start_policy is not None:
                                        with torch.no_grad(), amp():
                                            reference = start_policy(packed, args.temperature)[0]
                                    old, engine_lp = old_logprobs[index].to(device), rollout_logprobs[index].to(device)
                                    loss, metrics = policy_loss(
                                        logprobs, old, engine_lp, token_adv[index].to(device), token_weights,
                                        args.clip_low, args.clip_high, args.tis_cap, reference, args.kl_coef,
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
        version = engine.weight_version  # of the weights that sampled this update's responses
        with run.timer("sync"):
            sync_engine()

        # --- log
        absdiff = (old_logprobs - rollout_logprobs).abs().double()
        mismatch = (old_logprobs - rollout_logprobs).double().clamp(-20, 20)
        measured_gap = args.credit != "opsd"
        n_tokens, n_all, n = float(offset[-1]), float(len(everything)), float(len(responses))
        no_spread = dict.fromkeys(group_ids.tolist(), True) | {g: False for g, v in zip(group_ids.tolist(), varies.any(1).tolist()) if v}
        add(
            {
                "charts/episodic_return": (float(rewards.nansum()), n),
                "charts/episodic_length": (n_tokens, n),
                "charts/success": (sum(r.success for r in responses), n),
                "charts/learning_rate": (lr, 1.0),
                "rollout/truncated_frac": (float(sum(r.truncated for r in everything)), n_all),
                "rollout/error_frac": (n_all - n, n_all),
                "rollout/zero_std_group_frac": (float(sum(no_spread.values())), float(len(no_spread))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(absdiff.sum()), n_tokens * measured_gap),
                "rollout/logprob_absdiff_max": (float(absdiff.max()) if n else 0.0, n * measured_gap),
                "rollout/k3": (float((mismatch.exp() - 1 - mismatch).sum()), n_tokens * measured_gap),
                "mrtpo/beta": (beta, 1.0),
                "mrtpo/replayed_pair_frac": (spent["pairs"], float((~rewards.isnan()).sum())),
                "mrtpo/replayed_response_frac": (spent["responses"], n),
                "mrtpo/replay_overlong_frac": (spent["overlong"], n_all),
                "mrtpo/replay_tokens_per_response_token": (spent["tokens"], n_tokens),
                "mrtpo/max_weight_max": (float(weights.max()) if n else 0.0, n),
                **{f"reward/{name}": (float(rewards[:, k].nansum()), float((~rewards[:, k].isnan()).sum())) for k, name in enumerate(names)},
                **localisation(q, responses, names, response_ids),
            }
        )
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})
        for name in names:
            if metrics.get(f"reward/{name}", 0.0) >= 0.8:
                reached.setdefault(name, update + 1)
        metrics |= {f"mrtpo/updates_to_0.8/{name}": at for name, at in reached.items()}
        seconds = time.perf_counter() - started
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([n_tokens], dtype=torch.float64))[0]) / seconds  # response tokens per second
        metrics["mrtpo/replay_share"] = run.seconds["replay"] / seconds
        done = update + 1
        if done == args.num_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate()
            if tasks.regions is not None:
                metrics |= region_lift(q, offset, responses, names, tokenizer, tasks.regions)
            shown = next((g for g in group_ids.tolist() if not no_spread[g]), None)
            for i in [i for i, r in enumerate(responses) if r.group == shown][:4]:
                run.episode(episode_record(done, responses[i], i, names, advantages, varies, weights, q, token_adv, offset, tokenizer), step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                run.save_checkpoint(done, {**training_state(bare, optimizer), "reached": reached})
        if stop:
            break

    engine.close()
    env.close()
    if processes.is_main:
        episodes = [viewer_episode(record) for record in read_jsonl(run.folder / "episodes.jsonl")]
        write_credit_html(run.folder / "credit.html", episodes, f"mrtpo.py on {args.env}", f"credit {args.credit}, beta {args.beta}")
    run.finish(PANELS)
    return run


if __name__ == "__main__":
    try:
        sys.exit(main(parse_args(Args)).exit_code)
    except (ArgumentError, envs.DataError, PolicyError, EngineError, RunError) as error:  # what a user can mend; anything else shows its traceback
        sys.exit(f"{type(error).__name__}: {error}")
