"""Batches for teacher-forced forward passes in which every distinct prefix is computed once.

The n responses of a prompt repeat it n times in an ordinary padded batch, the variants of a prompt repeat their common
beginning, and samples of a confident policy repeat each other up to the token where they part. Here all of that stands once
in one flat row without padding (the sequences form a tree of prefixes):

    sequence 0: prompt p0 p1 p2, response a0 a1        sequence 1: same prompt, response a0 b1 b2
    input_ids     p0 p1 p2 a0 a1 b1 b2
    position_ids   0  1  2  3  4  4  5
    target_ids             a0 a1        a0 b1 b2       the N response tokens, flat, in the order given
    predict_index           2  3         2  3  5       the input position whose output predicts each of them

The linear layers see 7 tokens instead of 2 x 6; attention gathers for each token the keys of its own sequence. Exact, with
exact gradients, for models with plain causal attention that dispatch through transformers' attention interface;
`check_packing` compares with an ordinary forward pass and says which layout a model can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.quantized import kv_as_stored

ATTENTION = "shared_prefix_training"  # the names our attention functions are registered under
PADDED_ATTENTION = "padded_training"


@dataclass
class PackedBatch:
    """N response tokens of R responses (with masks: those that are marked). All index tensors are int64."""

    input_ids: torch.Tensor  # [1, T] distinct prefixes, or [R, L] padded rows
    position_ids: torch.Tensor  # like input_ids
    attention_mask: torch.Tensor | None  # [R, L] for padded rows; None when prefixes are shared
    predict_index: torch.Tensor  # [N] into the flattened input positions
    target_ids: torch.Tensor  # [N]
    response_ids: torch.Tensor  # [N] which response a token belongs to, 0..R-1
    lengths: torch.Tensor  # [R] tokens of each response
    # shared prefixes: rows of similar length, each (query_index [r, q], key_index [r, k], mask [r, 1, q, k] bool)
    buckets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    output_index: torch.Tensor | None = None  # [T] row of the concatenated bucket outputs for each flat position

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {f.name: v.to(device) if isinstance(v := getattr(self, f.name), torch.Tensor) else v for f in fields(self)}
        return PackedBatch(**{**moved, "buckets": [tuple(x.to(device) for x in bucket) for bucket in self.buckets]})

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes (without padding)."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def _ramp(lengths: np.ndarray) -> np.ndarray:
    """[2, 3] -> [0, 1, 0, 1, 2]"""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    share_prompts: bool = True,
    pad_id: int = 0,
    masks: Sequence[Sequence[bool]] | None = None,
) -> PackedBatch:
    """Groups of (prompt ids, list of response ids) -> one batch. Responses keep their order: group by group, as given.

    masks: one per response, as long as it; only marked tokens are predicted, the others (what an environment answered) are context.
    Raises ValueError for an empty prompt, a group without responses or an empty response (nothing predicts or is predicted), a mask of another length.
    """
    for g, (prompt, responses) in enumerate(groups):
        if not len(prompt) or not len(responses) or not all(len(r) for r in responses):
            raise ValueError(f"group {g}: prompt of {len(prompt)} tokens, responses of {[len(r) for r in responses]} tokens; every one needs at least 1")
    if not groups:
        raise ValueError("no groups to pack")
    rows = [(prompt, response) for prompt, responses in groups for response in responses]
    lengths = np.array([len(r) for _, r in rows])  # [R]
    prompt_lengths = np.array([len(p) for p, _ in rows])  # [R]
    total = prompt_lengths + lengths
    target_ids = np.concatenate([np.asarray(r, dtype=np.int64) for _, r in rows])  # [N]
    response_ids = np.repeat(np.arange(len(rows)), lengths)  # [N]
    position = np.repeat(prompt_lengths, lengths) + _ramp(lengths)  # [N] place of each response token in its sequence
    tokens = np.full((len(rows), int(total.max())), -1, dtype=np.int64)  # [R, L]
    tokens[np.arange(tokens.shape[1]) < total[:, None]] = np.concatenate([np.concatenate([p, r]).astype(np.int64) for p, r in rows])
    if masks is not None:
        if [len(m) for m in masks] != lengths.tolist():
            raise ValueError(f"masks of {[len(m) for m in masks]} tokens for responses of {lengths.tolist()} tokens")
        kept = np.concatenate([np.asarray(m, dtype=bool) for m in masks])
        target_ids, response_ids, position = target_ids[kept], response_ids[kept], position[kept]
        lengths = np.bincount(response_ids, minlength=len(rows))
    common = {"target_ids": target_ids, "response_ids": response_ids, "lengths": lengths}
    if not share_prompts:
        mask = tokens >= 0
        position_ids = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        predict_index = response_ids * tokens.shape[1] + position - 1
        return _tensors(
            input_ids=np.where(mask, tokens, pad_id), position_ids=position_ids, attention_mask=mask.astype(np.int64), predict_index=predict_index, **common
        )

    order = np.lexsort(tokens.T[::-1])  # sequences that share a prefix become neighbours
    t, n = tokens[order], total[order]
    width = np.arange(t.shape[1])
    same = np.minimum.accumulate(t[1:] == t[:-1], axis=1) & (width < np.minimum(n[1:], n[:-1])[:, None])
    shared = np.concatenate([[0], same.sum(1)])  # [R] leading tokens that the neighbour before has too
    fresh = n - shared  # [R] tokens this sequence adds
    start = np.cumsum(fresh) - fresh
    # the sequence that first computed the token at each place: the last one, up to here, that shares less than that
    owner = np.maximum.accumulate(np.where(width >= shared[:, None], np.arange(len(n))[:, None], 0), axis=0)  # [R, L]
    flat = start[owner] + width - shared[owner]  # [R, L] flat position, where width < n

    is_fresh = (width >= shared[:, None]) & (width < n[:, None])
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows))
    buckets, output_index, done = [], np.empty(int(fresh.sum()), dtype=np.int64), 0
    size_class = np.ceil(np.log2(np.maximum(fresh, 1))).astype(int)
    for c in np.unique(size_class[fresh > 0]):
        members = np.flatnonzero((size_class == c) & (fresh > 0))
        most, longest = int(fresh[members].max()), int(n[members].max())
        at = np.minimum(shared[members, None] + np.arange(most), n[members, None] - 1)  # [r, q] places of the queries, padded with the last
        query_index = np.take_along_axis(flat[members], at, axis=1)
        key_index = np.where(np.arange(longest) < n[members, None], flat[members, :longest], flat[members, :1])
        buckets.append((query_index, key_index, (np.arange(longest) <= at[:, :, None])[:, None]))
        output_index[np.repeat(start[members], fresh[members]) + _ramp(fresh[members])] = (
            done + np.repeat(np.arange(len(members)) * most, fresh[members]) + _ramp(fresh[members])
        )
        done += len(members) * most
    batch = _tensors(
        input_ids=t[is_fresh][None],
        position_ids=np.broadcast_to(width, t.shape)[is_fresh][None],
        attention_mask=None,
        predict_index=flat[place[response_ids], position - 1],
        output_index=output_index,
        **common,
    )
    batch.buckets = [tuple(torch.from_numpy(x) for x in bucket) for bucket in buckets]
    return batch


def _tensors(**arrays: np.ndarray | None) -> PackedBatch:
    return PackedBatch(**{k: None if v is None else torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()})


EMPTY = pack([([0], [[0]])], share_prompts=False)  # stands in where a process has no data left while others still compute; any model can run it


def pack_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], share_prompts: bool = True, pad_id: int = 0, masks: Sequence[Sequence[bool]] | None = None
) -> PackedBatch:
    """(prompt, response) pairs, in order; neighbours with equal prompts share theirs. masks as in `pack`."""
    groups: list[tuple[Sequence[int], list[Sequence[int]]]] = []
    for prompt, response in rows:
        if not groups or groups[-1][0] != prompt:
            groups.append((prompt, []))
        groups[-1][1].append(response)
    return pack(groups, share_prompts, pad_id, masks)


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


def shared_prefix_attention(
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
    """Attention of transformers' interface over the flat row: each token attends to its own sequence up to itself."""
    if packed is None:
        raise ValueError(f"attention {ATTENTION!r} only runs inside common.packing.forward_hidden")
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        raise ValueError("this model uses sliding-window or soft-capped attention: run with --share-prompts off")
    q, k, v = (x[0].transpose(0, 1) for x in (query, *kv_as_stored(module, key, value)))  # [T, heads, D]

    def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # [T, h, D], [r, l] -> [r, h, l, D]
        return x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)

    outputs = [
        F.scaled_dot_product_attention(
            gather(q, query_index),
            gather(k, key_index),
            gather(v, key_index),
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        .transpose(1, 2)
        .reshape(-1, *q.shape[1:])
        for query_index, key_index, mask in packed.buckets
    ]
    return torch.cat(outputs).index_select(0, packed.output_index)[None], None  # [1, T, H, D]


def padded_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object):
    """transformers' scaled dot product attention over keys and values as a quantised cache holds them."""
    return sdpa_attention_forward(module, query, *kv_as_stored(module, key, value), *args, **kwargs)


AttentionInterface.register(ATTENTION, shared_prefix_attention)
AttentionInterface.register(PADDED_ATTENTION, padded_attention)
AttentionMaskInterface.register(PADDED_ATTENTION, sdpa_mask)


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
        with _attention(lm, PADDED_ATTENTION) if any(hasattr(m, "kv_format") for m in lm.modules()) else nullcontext():
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


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target_ids: torch.Tensor, temperature: float, max_elements: int = 2**24
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] and entropies [N] (no gradient) of the temperature-scaled full distribution, float32.

    hidden [N, D], weight [V, D]. Works through the tokens in chunks whose logits hold at most max_elements numbers and
    recomputes them in the backward pass, so N x V numbers never stand in memory.
    """

    def chunk(h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(h, w, bias).float()  # [n, V]
        logp = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -logp.exp().mul_(logp).sum(-1)
        return logp.gather(1, ids[:, None]).squeeze(1).clone(), entropy  # FSDP2 hooks want no views

    size = max(1, max_elements // weight.shape[0])
    if len(hidden) <= size:
        return chunk(hidden, weight, target_ids)
    parts = [checkpoint(chunk, h, weight, ids, use_reentrant=False) for h, ids in zip(hidden.split(size), target_ids.split(size))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class Policy(torch.nn.Module):
    """The language model with its loss's inputs computed inside `forward`, so that DDP and FSDP2 see every use of a weight."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [N] and entropies [N] of the policy tokens."""
        hidden, out = forward_hidden(self.lm, batch), self.lm.get_output_embeddings()
        weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out.weight, getattr(out, "bias", None)))
        return token_logprobs(hidden, weight, bias, batch.target_ids, temperature)
