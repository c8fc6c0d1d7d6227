"""Supervised fine-tuning on conversations: the warm start of policies that are not built from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from common.curves import RunError
from common.envs import DataError
from common.packing import EMPTY, Policy, micro_batches, pack_rows
from common.policies import load_policy
from common.processes import Processes, full_weights, no_sync
from common.rollout import encode, observation_frame


def conversation_tokens(tokenizer, conversation: Sequence[dict], stop_token_ids: Sequence[int]) -> tuple[list[int], list[int], list[bool]]:
    """(prompt ids, ids after it, which of these the assistant says): encoded piece by piece as `rollout` does."""
    end, before, after = observation_frame(tokenizer, stop_token_ids)
    first = next(i for i, m in enumerate(conversation) if m["role"] == "assistant")
    ids, mask = [], []
    for m in conversation[first:]:
        said = m["role"] == "assistant"
        piece = tokenizer(m["content"] + end if said else before + m["content"] + after, add_special_tokens=False).input_ids
        ids, mask = ids + piece, mask + [said] * len(piece)
    return encode(tokenizer, conversation[:first]), ids, mask


def fine_tune(
    lm: torch.nn.Module, tokenizer, conversations: Sequence[Sequence[dict]], folder: Path, *, steps: int, batch_size: int, learning_rate: float,
    max_grad_norm: float, micro_batch_tokens: int, seed: int, stop_token_ids: Sequence[int], processes: Processes, parallel: str, share_prompts: bool,
    pad_id: int, bf16: bool,
) -> tuple[torch.nn.Module, dict[str, float]]:  # fmt: skip
    """`steps` optimizer steps (AdamW, learning rate falling linearly to 0) on everything the assistant says, mean over the tokens of a step; then the policy
    as a transformers folder.

    batch_size: conversations per step, over all processes. Returns the policy read back from the folder, and {"sft/loss_first", "sft/loss_last"}, empty
    without steps.

    Conversations longer than the context are left out, with a message. Raises DataError when none is left, RunError at a loss that is not finite.
    """
    bare = Policy(lm)
    policy = processes.wrap(bare, lm.base_model.layers if parallel == "fsdp2" else (), parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=parallel == "ddp")
    rows = [conversation_tokens(tokenizer, c, stop_token_ids) for c in conversations]
    fits = [r for r in rows if len(r[0]) + len(r[1]) <= lm.config.max_position_embeddings]
    if rows and not fits:
        raise DataError(f"stage sft: every trajectory is longer than the policy's context ({lm.config.max_position_embeddings} tokens)")
    if processes.is_main and steps:
        print(f"warm start: {steps} steps on {len(fits)} trajectories ({len(rows) - len(fits)} longer than the context left out)", flush=True)
    order = np.random.default_rng([seed, 1]).permutation(np.resize(np.arange(len(fits)), max(steps * batch_size, 1)) if fits else 0)
    losses: list[float] = []
    policy.train()
    for step in range(steps):
        mine = [fits[i] for i in order[step * batch_size : (step + 1) * batch_size]][processes.rank :: processes.world]
        total = float(processes.all_sum(torch.tensor([float(sum(sum(m) for _, _, m in mine))], dtype=torch.float64))[0])
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        optimizer.zero_grad(set_to_none=True)
        batches = list(processes.rounds(list(micro_batches([(p, ids) for p, ids, _ in mine], micro_batch_tokens))))
        seen = 0.0
        for number, batch in enumerate(batches):
            with no_sync(policy, number < len(batches) - 1):
                chosen = [mine[i] for i in batch]
                inputs = pack_rows([(p, ids) for p, ids, _ in chosen], share_prompts, pad_id, [m for _, _, m in chosen]) if batch else EMPTY
                with torch.autocast(processes.device.type, torch.bfloat16) if bf16 else nullcontext():
                    logprobs, _ = policy(inputs.to(processes.device))
                loss = -logprobs.sum() / total if batch else logprobs.sum() * 0.0
                seen += float(loss.detach())
                (loss * processes.world).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(float(processes.all_sum(torch.tensor([seen], dtype=torch.float64))[0]))
        if not np.isfinite(losses[-1]):
            raise RunError(f"warm start, step {step + 1}: the loss is not finite; lower --sft-learning-rate")
    weights = {name.removeprefix("lm."): w for name, w in full_weights(bare).items()}
    with processes.main_first():
        if processes.is_main:
            lm.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
    metrics = {"sft/loss_first": losses[0], "sft/loss_last": losses[-1]} if losses else {}
    return load_policy(str(folder), device=processes.device)[0], metrics
