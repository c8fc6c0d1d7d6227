"""Low-precision execution of an ordinary model: the numeric path of a quantised rollout engine, in float arithmetic.

    with quantized(lm, "fp8_e4m3"):
        ...                                   # any forward pass through `forward_hidden` or the torch engine

Inside, every linear layer of the decoder sees its input and its weight as the format holds them (inputs in blocks of 1 x 128, weights of 128 x 128), and
attention sees keys (after rotary position) and values as read back from a cache with one scale per token and head (kernels/fp8.py has the rules). The
embedding and the output head stay as they are, as in vLLM. Gradients pass straight through to the weights, which keep their precision and their names:
the same context is the executor's emulation at generation and the learner's forward pass in quantisation-aware training, and both give the same bits
for the same input. Products are summed in the model's own precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from kernels.fp8 import FORMATS, quantize_dequantize, quantize_dequantize_kv

EMULATED = ("bf16", *FORMATS)  # bf16: every value rounded to bfloat16 instead


class _Bfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _TowardZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fmt):
        y = x.float()
        spacing = (y.view(torch.int32) & 0x7F800000).clamp_(min=(127 + fmt.min_exponent) << 23).sub_(fmt.mantissa << 23).view(torch.float32)
        return (torch.trunc(y / spacing) * spacing).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def as_stored(x: torch.Tensor, fmt: str, kind: str, scale: float | None = None, truncate: bool = False) -> torch.Tensor:
    """x as the format holds it, in x's shape and dtype, straight-through gradient. kind: "weight" [M, N], "input" [.., N] or "kv" [.., head_dim].

    scale: fixed scale of kind "kv" instead of one per token and head. truncate: to the next value toward zero instead of the nearest, for an FP8 format and
    a scale that is a power of two.
    Raises ValueError for an unknown format, and (on a CPU) for values that are not finite.
    """
    if fmt == "bf16":
        return _Bfloat16.apply(x)
    if kind == "kv":
        return quantize_dequantize_kv(_TowardZero.apply(x, FORMATS[fmt]) if truncate else x, fmt, scale)
    return quantize_dequantize(x, fmt, (128, 128) if kind == "weight" else (1, 128))


def kv_as_stored(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [.., head_dim] as an attention module reads them back from the cache; unchanged outside of `quantized`."""
    rule = getattr(module, "kv_format", None)
    return (key, value) if rule is None else (as_stored(key, rule[0], "kv", *rule[1:]), as_stored(value, rule[0], "kv", *rule[1:]))


@contextmanager
def quantized(
    lm: torch.nn.Module,
    fmt: str | None,
    linears: bool = True,
    kv: bool = True,
    kv_scale: float | None = None,
    kv_truncate: bool = False,
    output: torch.dtype | None = None,
    through_bf16: bool = False,
    frozen: bool = False,
) -> Iterator[None]:
    """Runs `lm` (a causal LM of transformers, the bare module also where DDP or FSDP2 wraps it) in the format. None: as it is.

    linears, kv: the linear layers, the cache; kv_scale: a fixed scale for the whole cache, as vLLM's "fp8" cache has (1.0), instead of one per token and
    head; kv_truncate: keys and values go to the next value toward zero, as vLLM 0.32's CPU kernels store them. output: dtype that every linear layer's
    result is rounded to, as the kernels of a GPU do. through_bf16: weights are rounded to bfloat16 first, as an engine holds them that was given them so.
    frozen: quantise the weights once, on entry and without gradient, for many forward passes with the same weights.
    Raises ValueError for an unknown format, for a model with weights elsewhere than in linear layers (fused experts), or where a context is already open.
    """
    if fmt is None:
        yield
        return
    if fmt not in EMULATED:
        raise ValueError(f"unknown format {fmt!r}: one of {', '.join(EMULATED)}")
    layers = [m for m in lm.base_model.modules() if isinstance(m, torch.nn.Linear)] if linears else []
    attentions = [m for m in lm.base_model.modules() if hasattr(m, "k_proj") and hasattr(m, "layer_idx")] if kv else []
    if any("forward" in vars(m) for m in layers) or any("kv_format" in vars(m) for m in attentions):
        raise ValueError("this model already runs in a format")
    rounded = {id(p) for m in layers for p in m.parameters()} | {id(p) for p in lm.get_input_embeddings().parameters()}
    if linears and (rest := [n for n, p in lm.base_model.named_parameters() if p.ndim > 1 and id(p) not in rounded]):
        raise ValueError(f"cannot run {type(lm).__name__} in {fmt}: {rest[0]} (and {len(rest) - 1} more) are weights outside of linear layers")
    last: list[torch.Tensor | None] = [None, None]  # q, k and v (gate and up) get the same input: it is quantised once

    def weight_of(module: torch.nn.Linear) -> torch.Tensor:
        return as_stored(_Bfloat16.apply(module.weight) if through_bf16 else module.weight, fmt, "weight")

    def forward_of(module: torch.nn.Linear):
        with torch.no_grad():
            stored = weight_of(module) if frozen else None

        def forward(x: torch.Tensor) -> torch.Tensor:
            if last[0] is not x:
                last[:] = x, as_stored(x, fmt, "input")
            y = F.linear(last[1], weight_of(module) if stored is None else stored, module.bias)
            return y if output is None else y.to(output).to(y.dtype)

        return forward

    try:
        for module in layers:
            module.forward = forward_of(module)
        for module in attentions:
            module.kv_format = fmt, kv_scale, kv_truncate
        yield
    finally:
        for module in layers:
            vars(module).pop("forward", None)
        for module in attentions:
            vars(module).pop("kv_format", None)
