"""One process or many: what Run needs of torch.distributed, and metrics reduced over all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from common.curves import RunError


def distributed() -> dict[str, Any]:
    """Keyword arguments of Run for this process: ``Run(args, ..., **distributed())``. Uses torch.distributed when it is initialised."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {}

    def broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(value: Any) -> list[Any]:
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, value)
        return boxes

    return {"is_main": dist.get_rank() == 0, "rank": dist.get_rank(), "broadcast": broadcast, "gather": gather}


def all_reduce(values: torch.Tensor, op: str) -> torch.Tensor:
    """``reduce_fn`` of reduce_metrics over torch.distributed; the tensor itself without it. values: [n] float64 on the CPU; op: "sum" or "max"."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return values
    moved = values.to("cuda") if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(moved, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return moved.cpu()


def is_maximum(key: str) -> bool:
    """Whether a metric is reduced by maximum: ``..._max``, unless it is a reward of that name, which is a mean like every other reward."""
    return key.endswith("_max") and "reward/" not in key


def reduce_metrics(sums: dict[str, tuple[float, float]], reduce_fn: Callable[[torch.Tensor, str], torch.Tensor] = all_reduce) -> dict[str, float]:
    """Metrics over all ranks, each from (sum, count): the mean over everything counted, not a mean of means.

    A key for which ``is_maximum`` holds gives (largest value, count) and is reduced by maximum. A key whose count is 0 on every rank is left out.
    Every rank passes the same keys, with count 0 where it has nothing; else RunError.
    """
    keys = sorted(sums)
    digest = float(int.from_bytes(hashlib.sha256("\n".join(keys).encode()).digest()[:6], "big"))  # 48 bits: exact in float64
    low_high = reduce_fn(torch.tensor([-digest, digest], dtype=torch.float64), "max")
    if -low_high[0] != low_high[1]:
        raise RunError(f"reduce_metrics: ranks passed different keys; this rank passed {keys}. Pass every key on every rank, with count 0 for nothing")
    pairs = torch.tensor([sums[key] for key in keys], dtype=torch.float64).reshape(len(keys), 2)
    is_max = [is_maximum(key) for key in keys]
    largest = torch.tensor([pair[0] if flag and pair[1] > 0 else -math.inf for pair, flag in zip(pairs.tolist(), is_max)], dtype=torch.float64)
    pairs[:, 0] = torch.where(pairs[:, 1] > 0, pairs[:, 0], 0.0)
    largest, pairs = reduce_fn(largest, "max"), reduce_fn(pairs.flatten(), "sum").reshape(len(keys), 2)
    means = [largest[i].item() if is_max[i] else (pairs[i, 0] / pairs[i, 1]).item() for i in range(len(keys))]
    return {key: means[i] for i, key in enumerate(keys) if pairs[i, 1] > 0}
