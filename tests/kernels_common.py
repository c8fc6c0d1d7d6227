"""Shared by the kernel tests: modules with their Triton kernels under the interpreter, poisoned inputs, and error bounds."""

import importlib.util

import pytest
import torch
from conftest import need_module

HAVE_GPU = torch.cuda.is_available()
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 128, 129, 1000, 4097]


def load(name: str):
    """A kernel module; without a GPU its Triton kernels run in Python. Triton decides that when it defines a kernel, so a module loaded before is reloaded."""
    if HAVE_GPU or importlib.util.find_spec("triton") is None:
        return importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:  # the scripts that other tests start must not inherit it
        patch.setenv("TRITON_INTERPRET", "1")
        import triton

        triton.knobs.runtime.interpret = True  # parts of Triton that are imported later look again
        module = importlib.import_module(name)
        return module if module._TRITON else importlib.reload(module)


def ready(backend: str, device: str) -> str:
    """backend, once what it needs is there; on a GPU machine Triton is tested for real, in test_kernels_gpu.py."""
    if backend in ("triton", "numba"):
        need_module(backend)
    if backend == "triton" and device == "cpu" and HAVE_GPU:
        pytest.skip("runs for real in test_kernels_gpu.py")
    return backend


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """x inside a larger allocation full of NaN (True, or huge, for other types), so that a read past either end shows."""
    junk = float("nan") if x.is_floating_point() else True if x.dtype == torch.bool else 2**40
    store = torch.full((x.numel() + 4096,), junk, dtype=x.dtype, device=x.device)
    inner = store[2048 : 2048 + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner


def offsets(lengths, device="cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


@pytest.fixture(autouse=True)
def nan_memory():
    """Fresh torch.empty memory holds NaN: an output that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
