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

import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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
        with evaluating(model), torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + sample.token_ids], device=device)).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(sample.token_ids, device=device)[:, None])[:, 0].cpu()
        gap = (torch.tensor(sample.logprobs) - expected).abs().max().item()
        return gap if math.isfinite(gap) else math.inf


def named_full_tensors(source: torch.nn.Module | Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, full tensor) pairs. Parameters sharded by FSDP2 are gathered one at a time, a collective that every rank must enter."""
    pairs = source.named_parameters() if isinstance(source, torch.nn.Module) else source
    for name, tensor in pairs:
        yield name, (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def check_fits(name: str, tensor: torch.Tensor, shapes: dict[str, torch.Size]) -> None:
    if shapes.get(name) != tensor.shape:
        here = tuple(shapes[name]) if name in shapes else "no parameter of that name"
        raise EngineError(f"sync: {name} {tuple(tensor.shape)} does not fit the engine's model ({here})")


@contextmanager
def evaluating(model: torch.nn.Module):
    """eval() inside; afterwards each submodule gets back the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def pad_token(tokenizer: Any) -> int | None:
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
    rollout_format: "auto" (vLLM on a GPU with FP8 units: fp8; else the model's own precision), "bf16", "fp8" (vLLM on a GPU: W8A8 and FP8 cache, its own
    scales) or "fp8_e4m3" (the same with a scale per block, and per token and head in the cache). The torch engine emulates fp8_e4m3 (also as fp8),
    fp8_e5m2, int8 and int4 bit by bit (common/quantized.py); bf16 is the model's own precision there.
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
        from common.engine_torch import TorchEngine

        return TorchEngine(model, tokenizer, max_model_len=max_model_len, emulate=emulate, **engine_options)
    if kind != "vllm":
        raise EngineError(f"--engine {kind!r}: choose torch or vllm")
    if rollout_format in FORMATS and rollout_format != "fp8_e4m3":
        raise EngineError(f"--rollout-format {rollout_format}: vLLM computes in fp8 (E4M3) or bf16; use --engine torch, which emulates it")
    from common.engine_vllm import make_vllm

    return make_vllm(
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
