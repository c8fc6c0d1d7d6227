"""Checkpoint folders: what may stand in one, reading the newest intact one, and the states of all random generators."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.curves import RunError, run_folder_of

FORMAT = 1  # of a checkpoint folder; raised when an older reader could not continue from it

# ---------------------------------------------------------------------------------------------------------------------- random states


def rng_state() -> dict[str, Any]:
    """States of python's, numpy's and torch's global generators (CUDA's where it is in use) as tensors and lists, readable without pickle."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the global generators back to ``rng_state()``. Warns when CUDA devices differ: the run goes on, but not bit for bit."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        if torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
        else:
            warnings.warn(
                f"checkpoint holds {len(state['cuda'])} CUDA generator states, this machine has {torch.cuda.device_count()}: they are not restored",
                stacklevel=2,
            )


class HashedFile:
    """The write side of a file that hashes what passes through; keeps the first OSError, which torch.save may turn into something else."""

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115  (closed by save_checkpoint)
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.size += len(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


# ---------------------------------------------------------------------------------------------------------------------- checkpoints


def check_state(value: Any, where: str) -> None:
    """Raises RunError unless ``value`` is made of what torch.load(weights_only=True) reads: tensors, numbers, strings, None, dict, list, tuple."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise RunError(f"{where} is a {type(value).__name__}: gather it to a plain tensor before saving (full state dict)")
    elif type(value) in (dict, collections.OrderedDict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise RunError(f"{where} has the key {key!r} of type {type(key).__name__}; use strings or integers")
            check_state(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            check_state(item, f"{where}[{i}]")
    elif not (value is None or type(value) in (bool, int, float, str, bytes)):
        raise RunError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, dicts, lists and tuples only")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first. ``00000012.2`` is the second one saved at update 12."""
    found = [path for path in (folder / "checkpoints").glob("*") if re.fullmatch(r"\d{8,}(\.\d+)?", path.name)]
    return sorted(found, key=checkpoint_order, reverse=True)


def checkpoint_order(path: Path) -> tuple[int, int]:
    """(step, copy) of a checkpoint folder."""
    step, _, copy = path.name.partition(".")
    return int(step), int(copy or 1)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(checkpoint.json, content of state.pt) of one checkpoint folder. Raises RunError when it is damaged or from an unknown format."""
    try:
        info = json.loads((path / "checkpoint.json").read_text())
        expected, size, version = info["sha256"], info["bytes"], info["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: checkpoint.json is missing or unreadable ({error})") from None
    if version != FORMAT:
        raise RunError(f"{path}: checkpoint format {version}, this code reads format {FORMAT}; resume with the commit named in environment.json")
    try:
        with open(path / "state.pt", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = file.tell()
    except OSError as error:
        raise RunError(f"{path}: state.pt is missing or unreadable ({error})") from None
    if digest != expected:
        raise RunError(f"{path}: state.pt is damaged ({found} bytes, {size} written; checksum differs)")
    return info, torch.load(path / "state.pt", map_location="cpu", weights_only=True)


def newest_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """(folder, checkpoint.json, content of state.pt) of the newest intact checkpoint, or of the checkpoint that ``path`` names. Raises RunError."""
    folder = run_folder_of(path)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    candidates = [Path(path)] if Path(path).parent.name == "checkpoints" else checkpoint_folders(folder)
    if not candidates:
        raise RunError(f"{folder} holds no checkpoint (was it stopped before the first --save-every?); start a new run")
    problems = []
    for candidate in candidates:
        try:
            info, content = read_checkpoint(candidate)
        except RunError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; using the checkpoint of update {info['step']} instead", stacklevel=3)
        return candidate, info, content
    raise RunError("no intact checkpoint:\n  " + "\n  ".join(problems))


def restore_rank(states: list[dict[str, Any]], rank: int) -> None:
    """Puts the global generators of this rank back. A run resumed with more ranks than it was saved with warns: it goes on, but not bit for bit."""
    if rank >= len(states):
        warnings.warn(f"checkpoint of {len(states)} ranks: rank {rank} starts from the random state of rank {rank % len(states)}", stacklevel=3)
    set_rng_state(states[rank % len(states)])


def load_checkpoint(path: str | os.PathLike[str], rank: int = 0, restore_rng: bool = True) -> tuple[int, dict[str, Any]]:
    """(step, state) of the newest intact checkpoint of a run folder, or of the one checkpoint folder named. Tensors arrive on the CPU.

    A damaged newest checkpoint is skipped with a warning. The global generators are put back to the saved state of ``rank``.
    Raises RunError: no run folder, no checkpoint, none intact, or another format. To continue a run use Run.load_checkpoint, which also cuts the logs.
    """
    _, info, content = newest_checkpoint(path)
    if restore_rng:
        restore_rank(content["rng"], rank)
    return info["step"], content["state"]
