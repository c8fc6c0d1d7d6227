"""The torch engine: generation by the trainer's own module, in process. See common/engine.py for what engines promise."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from common.engine import Engine, EngineError, Sample, Sampling, check_fits, evaluating, named_full_tensors, pad_token
from common.quantized import as_stored, quantized

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
    emulate: a format of common/quantized.py that the cache and (emulate_linears) the linear layers compute in, on the fast path only; emulate_output:
    dtype that the results of those layers are rounded to, as by the kernels of a GPU.
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
        emulate_linears: bool = True,
        emulate_output: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise EngineError(
                "the torch engine runs the module itself and cannot use sharded (FSDP2) parameters: give it an unsharded copy, or use --engine vllm"
            )
        super().__init__(model.get_input_embeddings().weight.shape[0], max_model_len, pad_token(tokenizer), seed)
        self.model = model
        self.max_batch_size = max_batch_size  # rows decoded together; more are split, whole prompts at a time
        self.prefill_tokens = prefill_tokens  # most tokens in one prefill forward
        self.fast_path = _is_plain_causal(model) if fast_path is None else fast_path
        if self.fast_path and not _is_plain_causal(model):
            raise EngineError(f"fast_path=True: {type(model).__name__} is not a plainly causal decoder; leave fast_path at None")
        if emulate and not self.fast_path:
            raise EngineError(f"{emulate} cannot be emulated for {type(model).__name__}: only for {', '.join(sorted(PLAIN_CAUSAL))} without attention windows")
        self.emulate, self.emulate_linears, self.emulate_output = emulate, emulate_linears, emulate_output
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
                    check_fits(name, tensor, shapes)
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
            evaluating(self.model),
            torch.inference_mode() if self.fast_path else torch.no_grad(),
            quantized(self.model, self.emulate, linears=self.emulate_linears, output=self.emulate_output, frozen=True),
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
        cache = SharedPrefixCache(lengths, n, sampling.max_new_tokens, device, self.emulate)
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


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
