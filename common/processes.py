"""Several processes, one model: the collectives and wrappers that a training script needs. With one process each call is the identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

from common.arguments import ArgumentError


class Processes:
    """Rank, world size and device of this process, and sums, maxima and unions over all of them."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # else accelerate sees one process on a machine without accelerator
        self.device, self.rank, self.world = self.accelerator.device, self.accelerator.process_index, self.accelerator.num_processes
        self.is_main = self.accelerator.is_main_process

    def main_first(self):
        """Context: the main process runs the block before the others do."""
        return self.accelerator.main_process_first()

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over processes, on the CPU in x's dtype."""
        return self.accelerator.reduce(x.to(self.device), "sum").cpu() if self.world > 1 else x

    def all_max(self, x: float) -> float:
        return float(self.accelerator.gather(torch.tensor([x], device=self.device)).max()) if self.world > 1 else x

    def union(self, keys: Iterable[str]) -> list[str]:
        """The same sorted list of distinct keys on every process."""
        return sorted({key for part in (gather_object([list(keys)]) if self.world > 1 else [keys]) for key in part})

    def rounds(self, batches: list[list]) -> Iterator[list]:
        """The batches, then empty lists until every process has had as many: a sharded model makes its passes together."""
        yield from batches + [[]] * (int(self.all_max(float(len(batches)))) - len(batches))

    def wrap(self, policy: torch.nn.Module, layers: Iterable[torch.nn.Module], parallel: str, bf16: bool) -> torch.nn.Module:
        """DDP when there are several processes, or FSDP2 over `layers` and the rest ("fsdp2" also works with one process)."""
        if parallel == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            if not torch.distributed.is_initialized():
                raise ArgumentError("--parallel fsdp2 needs a launcher, for example: torchrun --nproc-per-node 2 SCRIPT.py --parallel fsdp2")
            mesh = init_device_mesh(self.device.type, (self.world,))
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=mixed)
            return fully_shard(policy, mesh=mesh, mp_policy=mixed)
        if self.world > 1:
            return torch.nn.parallel.DistributedDataParallel(policy, device_ids=[self.device.index] if self.device.type == "cuda" else None)
        return policy


def no_sync(policy: torch.nn.Module, hold: bool):
    """Context: DDP keeps the gradients of this pass on the process when `hold`."""
    return policy.no_sync() if hold and isinstance(policy, torch.nn.parallel.DistributedDataParallel) else nullcontext()


def full_weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Unsharded weights on every process, by their plain names. A collective."""
    return get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True))


def training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Unsharded weights and optimizer state on the CPU (complete on the main process only), for a checkpoint. A collective.

    Reading the state of an optimizer that has none yet makes it count a step of zeros, which is undone here and by `load_training_state`.
    """
    fresh = not optimizer.state
    model, optim = get_state_dict(policy, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if fresh:
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optim, "fresh": fresh}


def load_training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict]) -> None:
    """Puts back what `training_state` gave; every process passes the complete state."""
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    if state["fresh"]:
        optimizer.state.clear()
