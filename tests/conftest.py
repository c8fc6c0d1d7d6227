"""Shared test helpers: where the small real data lie, and dependencies that may not be missing in CI."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

IN_VLLM_PROCESS = os.environ.get("CLEANAGENTRL_VLLM_TESTS") == "1"  # set by test_vllm_suite_passes_in_its_own_process
IN_CI = os.environ.get("CLEANAGENTRL_CI") == "1"  # set by .ci/run: a missing dependency fails instead of skipping


if not IN_VLLM_PROCESS and importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton decides at its first import whether its own functions are interpreted, and transformers may import it before the kernel tests do
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401


def missing(what: str) -> None:
    """Skip on a developer's machine, fail in CI."""
    if IN_CI:
        pytest.fail(f"{what} is missing, and CI must have it")
    pytest.skip(f"{what} is missing")


def need_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        missing(f"Python package {name}")


def need_program(name: str) -> None:
    if shutil.which(name) is None:
        missing(f"program {name}")


def real_data(folder: str) -> Path:
    """Folder of small real data, found through CLEANAGENTRL_TEST_DATA."""
    root = os.environ.get("CLEANAGENTRL_TEST_DATA", "")
    path = Path(root) / folder
    if not root or not path.is_dir():
        missing(f"real data {folder!r} (set CLEANAGENTRL_TEST_DATA)")
    return path


def pytest_collection_modifyitems(config, items):
    """vLLM cannot load in a process that has imported Triton, as the kernel tests do: its tests run in a child, started by a test in test_engine.py."""
    if not IN_VLLM_PROCESS:
        there = [item for item in items if item.path.name == "test_engine.py" and "vllm" in item.name and "own_process" not in item.name]
        items[:] = [item for item in items if item not in there]
        config.hook.pytest_deselected(items=there)
