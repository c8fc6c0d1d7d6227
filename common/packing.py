"""Batches for teacher-forced forward passes, in which the responses of one prompt share that prompt's computation.

A group of n responses repeats its prompt n times in an ordinary padded batch. Here every prompt stands once and every
response once, in one flat row without padding:

    group 0: prompt p, responses a, b          group 1: prompt q, response c
    input_ids     p0 p1 p2 a0 a1 b0 b1 b2 q0 q1 c0 c1
    position_ids   0  1  2  3  4  3  4  5  0  1  2  3
    target_ids             a0 a1 b0 b1 b2       c0 c1        the N response tokens, flat, in the order given
    predict_index           2  3  2  5  6        9 10        the input position whose output predicts each of them

The linear layers see 12 tokens instead of 3 x 6; attention gathers for each response the keys of its prompt and its own.
Exact for models with plain causal attention that dispatch through transformers' attention interface; `check_packing`
compares with an ordinary forward pass and says which layout a model can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION = "shared_prompt"  # the name our attention function is registered under


@dataclass
class PackedBatch:
    """N response tokens of R responses. All index tensors are int64."""

    input_ids: torch.Tensor  # [1, T] shared prompts, or [R, L] padded rows
    position_ids: torch.Tensor  # like input_ids
    attention_mask: torch.Tensor | None  # [R, L] for padded rows; None when prompts are shared
    predict_index: torch.Tensor  # [N] into the flattened input positions
    target_ids: torch.Tensor  # [N]
    response_ids: torch.Tensor  # [N] which response a token belongs to, 0..R-1
    lengths: torch.Tensor  # [R] tokens of each response
    prompt_index: torch.Tensor | None = None  # [P, Lp] flat position of prompt tokens, padded with the first one
    query_index: torch.Tensor | None = None  # [R, Lr] flat position of response tokens, padded with the first one
    key_index: torch.Tensor | None = None  # [R, Lp + Lr] prompt then own tokens
    key_mask: torch.Tensor | None = None  # [R, 1, Lr, Lp + Lr] bool, True = may attend
    output_index: torch.Tensor | None = None  # [T] row of cat([prompt outputs, response outputs]) for each flat position

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(**{f.name: v.to(device) if isinstance(v := getattr(self, f.name), torch.Tensor) else v for f in fields(self)})

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes (without padding)."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def _ramp(lengths: np.ndarray) -> np.ndarray:
    """[2, 3] -> [0, 1, 0, 1, 2]"""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], share_prompts: bool = True, pad_id: int = 0) -> PackedBatch:
    """Groups of (prompt ids, list of response ids) -> one batch. Responses keep their order: group by group, as given.

    Raises ValueError for an empty prompt, a group without responses or an empty response (nothing predicts or is predicted).
    """
    for g, (prompt, responses) in enumerate(groups):
        if not len(prompt) or not len(responses) or not all(len(r) for r in responses):
            raise ValueError(f"group {g}: prompt of {len(prompt)} tokens, responses of {[len(r) for r in responses]} tokens; every one needs at least 1")
    if not groups:
        raise ValueError("no groups to pack")
    prompt_lengths = np.array([len(p) for p, _ in groups])  # [P]
    group_sizes = np.array([len(rs) for _, rs in groups])  # [P]
    responses = [r for _, rs in groups for r in rs]
    lengths = np.array([len(r) for r in responses])  # [R]
    group_of = np.repeat(np.arange(len(groups)), group_sizes)  # [R]
    target_ids = np.concatenate([np.asarray(r, dtype=np.int64) for r in responses])  # [N]
    response_ids = np.repeat(np.arange(len(responses)), lengths)  # [N]
    within = _ramp(lengths)  # [N] 0-based place in its response
    lp, lr = prompt_lengths[group_of], lengths  # both [R]
    common = {"target_ids": target_ids, "response_ids": response_ids, "lengths": lengths}
    if not share_prompts:
        width = int((lp + lr).max())
        input_ids = np.full((len(responses), width), pad_id, dtype=np.int64)
        mask = np.arange(width)[None] < (lp + lr)[:, None]  # [R, L]
        input_ids[mask] = np.concatenate([np.concatenate([groups[g][0], r]) for g, r in zip(group_of, responses)])
        position_ids = np.broadcast_to(np.arange(width), input_ids.shape).copy()
        predict_index = response_ids * width + lp[response_ids] + within - 1
        return _tensors(input_ids=input_ids, position_ids=position_ids, attention_mask=mask.astype(np.int64), predict_index=predict_index, **common)

    group_tokens = prompt_lengths + np.bincount(group_of, weights=lengths, minlength=len(groups)).astype(np.int64)
    prompt_start = np.cumsum(group_tokens) - group_tokens  # [P] flat
    before = np.cumsum(lengths) - lengths  # response tokens before this response, over all groups
    first_of_group = (np.cumsum(group_sizes) - group_sizes)[group_of]
    response_start = prompt_start[group_of] + lp + before - before[first_of_group]  # [R] flat
    total = int(group_tokens.sum())
    input_ids, position_ids = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    prompt_flat = np.repeat(prompt_start, prompt_lengths) + _ramp(prompt_lengths)
    response_flat = np.repeat(response_start, lengths) + within
    input_ids[prompt_flat] = np.concatenate([np.asarray(p, dtype=np.int64) for p, _ in groups])
    input_ids[response_flat] = target_ids
    position_ids[prompt_flat] = _ramp(prompt_lengths)
    position_ids[response_flat] = lp[response_ids] + within
    predict_index = np.where(within == 0, (prompt_start[group_of] + lp - 1)[response_ids], response_flat - 1)

    max_lp, max_lr = int(prompt_lengths.max()), int(lengths.max())
    prompt_index = prompt_start[:, None] + np.minimum(np.arange(max_lp), prompt_lengths[:, None] - 1)  # [P, Lp]
    query_index = response_start[:, None] + np.minimum(np.arange(max_lr), lengths[:, None] - 1)  # [R, Lr]
    key_index = np.concatenate([prompt_index[group_of], query_index], axis=1)  # [R, Lp + Lr]
    sees_prompt = np.broadcast_to((np.arange(max_lp) < lp[:, None])[:, None, None], (len(responses), 1, max_lr, max_lp))
    sees_own = np.broadcast_to(np.tril(np.ones((max_lr, max_lr), dtype=bool)), (len(responses), 1, max_lr, max_lr))
    output_index = np.empty(total, dtype=np.int64)
    output_index[prompt_flat] = np.repeat(np.arange(len(groups)) * max_lp, prompt_lengths) + _ramp(prompt_lengths)
    output_index[response_flat] = len(groups) * max_lp + response_ids * max_lr + within
    return _tensors(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention_mask=None,
        predict_index=predict_index,
        prompt_index=prompt_index,
        query_index=query_index,
        key_index=key_index,
        key_mask=np.concatenate([sees_prompt, sees_own], axis=3),
        output_index=output_index,
        **common,
    )


def _tensors(**arrays: np.ndarray | None) -> PackedBatch:
    return PackedBatch(**{k: None if v is None else torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()})


EMPTY = pack([([0], [[0]])])  # stands in where a process has no data left while others still compute


def pack_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]], share_prompts: bool = True, pad_id: int = 0) -> PackedBatch:
    """(prompt, response) pairs, in order; neighbours with equal prompts share theirs."""
    groups: list[tuple[Sequence[int], list[Sequence[int]]]] = []
    for prompt, response in rows:
        if not groups or groups[-1][0] != prompt:
            groups.append((prompt, []))
        groups[-1][1].append(response)
    return pack(groups, share_prompts, pad_id)


def micro_batches(rows: Sequence[tuple[Sequence[int], Sequence[int]]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of consecutive (prompt, response) pairs that fit max_tokens, an equal neighbouring prompt counted once. One pair always fits."""
    batch: list[int] = []
    tokens, before = 0, None
    for i, (prompt, response) in enumerate(rows):
        cost = len(response) + (0 if batch and prompt == before else len(prompt))
        if batch and tokens + cost > max_tokens:
            yield batch
            batch, tokens, cost = [], 0, len(prompt) + len(response)
        batch.append(i)
        tokens, before = tokens + cost, prompt
    if batch:
        yield batch


def shared_prompt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedBatch | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface over a flat row: prompts attend causally, responses to their prompt and themselves."""
    if packed is None:
        raise ValueError(f"attention {ATTENTION!r} only runs inside common.packing.forward_hidden")
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        raise ValueError("this model uses sliding-window or soft-capped attention: run with --share-prompts off")
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, D]

    def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # [T, h, D], [B, L] -> [B, h, L, D]
        return x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)

    q, k, v = flat
    gqa = q.shape[1] != k.shape[1]
    on_prompt = F.scaled_dot_product_attention(
        *(gather(x, packed.prompt_index) for x in flat), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=gqa
    )
    on_response = F.scaled_dot_product_attention(
        gather(q, packed.query_index),
        gather(k, packed.key_index),
        gather(v, packed.key_index),
        attn_mask=packed.key_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=gqa,
    )
    rows = torch.cat([on_prompt.transpose(1, 2).reshape(-1, *q.shape[1:]), on_response.transpose(1, 2).reshape(-1, *q.shape[1:])])
    return rows.index_select(0, packed.output_index)[None], None  # [1, T, H, D]


AttentionInterface.register(ATTENTION, shared_prompt_attention)


@contextmanager
def _attention(lm: torch.nn.Module, name: str):
    before = lm.config._attn_implementation
    lm.set_attn_implementation(name)
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def forward_hidden(lm: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Last hidden states that predict the response tokens, [N, D] in the model's dtype: the input of the output head."""
    body = lm.base_model
    if batch.attention_mask is None:
        with _attention(lm, ATTENTION):
            out = body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, packed=batch)
    else:
        out = body(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=batch.attention_mask, use_cache=False)
    return out.last_hidden_state.flatten(0, 1).index_select(0, batch.predict_index)


@torch.no_grad()
def check_packing(lm: torch.nn.Module, share_prompts: bool, tolerance: float = 1e-3) -> None:
    """Compares log-probs out of `forward_hidden` and the output head with an ordinary forward pass of the model.

    Raises ValueError if they differ by more than `tolerance` (times 30 in half precision): the model then does something
    to its attention or logits that the packed path does not know.
    """
    device = next(lm.parameters()).device
    vocab = lm.get_input_embeddings().num_embeddings
    ids = (torch.arange(23) * 7919 % vocab).tolist()
    groups = [(ids[:5], [ids[5:9], ids[9:10]]), (ids[3:10], [ids[10:17]])]
    was_training = lm.training
    lm.eval()
    try:
        batch = pack(groups, share_prompts).to(device)
        logits = lm.get_output_embeddings()(forward_hidden(lm, batch)).float()
        got = logits.log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
        want = []
        for prompt, responses in groups:
            for response in responses:
                row = torch.tensor([prompt + response], device=device)
                logp = lm(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                want.append(logp.gather(1, torch.tensor(response, device=device)[:, None])[:, 0])
        gap = float((got - torch.cat(want)).abs().max())
    finally:
        lm.train(was_training)
    limit = tolerance if logits.dtype == torch.float32 and next(lm.parameters()).dtype == torch.float32 else 30 * tolerance
    if not gap <= limit:
        raise ValueError(
            f"log-probs of {type(lm).__name__} differ by {gap:.2g} from its own forward pass ({'shared prompts' if share_prompts else 'padded rows'}): "
            + ("run with --share-prompts off" if share_prompts else "the model transforms its logits after the output head, which this script cannot reproduce")
        )
