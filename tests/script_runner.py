"""Runs a script's command line without its start-up time: forks a server that has the heavy imports, then does what `python SCRIPT ARGS` does.

Each run is a process of its own, with its own exit code, signals, limits and output. A hook may change modules, limits or environment before the script
starts: that is how a test kills a process inside a checkpoint, takes a database away in mid-run, or looks at the gradients.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
PRELOAD = ["script_runner", "common.engine_torch", "common.run", "common.policies", "common.processes", "common.viewer", "common.envs.sql", "common.envs.tools"]
PRELOAD += ["common.envs.instructions", "kernels.js_divergence", "transformers.models.llama.modeling_llama", "matplotlib.pyplot", "tyro"]
TIMEOUT = 300  # seconds; only a hanging run reaches it


@dataclass
class Ended:
    code: int  # as a shell sees it: 137 after SIGKILL
    output: str  # stdout and stderr

    def ok(self) -> Ended:
        assert self.code == 0, f"exit code {self.code}\n{self.output}"
        return self


def _child(script: str, argv: list[str], log: str, hook: Callable[[], object] | None, environment: dict[str, str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(ENVIRONMENT | environment)
    os.chdir(Path(log).parent)
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *argv]
    if hook is not None:
        hook()
    runpy.run_path(str(ROOT / script), run_name="__main__")


def start(script: str, argv: Sequence[object], log: Path, hook: Callable[[], object] | None = None, environment: dict[str, str] | None = None):
    """The started process; `finish` waits for it. Its working folder is that of `log`, the file for its output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "PYTHONPATH")}
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    try:  # the server is started by the first call, with this environment
        process = context.Process(target=_child, args=(script, [str(word) for word in argv], str(log), hook, environment or {}))
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    process.log = log
    return process


def finish(process) -> Ended:
    process.join(TIMEOUT)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"still running after {TIMEOUT} s:\n{process.log.read_text(errors='replace')}")
    code = process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
    return Ended(code, process.log.read_text(errors="replace") if process.log.exists() else "")


def run(script: str, argv: Sequence[object], log: Path, hook: Callable[[], object] | None = None, environment: dict[str, str] | None = None) -> Ended:
    return finish(start(script, argv, log, hook, environment))


def run_ranks(script: str, argv: Sequence[object], log: Path, world: int, port: int, hook: Callable[[], object] | None = None) -> list[Ended]:
    """The same command on `world` processes, with the environment a launcher gives them."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [start(script, argv, log.with_suffix(f".{r}"), hook, common | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
    return [finish(process) for process in started]


# ---------------------------------------------------------------------------------------------------------------------- hooks


def kill_inside_checkpoint(number: int) -> None:
    """SIGKILL in the moment before the checkpoint number `number` (from 1) is renamed to its final place."""
    real, seen = os.rename, [0]

    def rename(source, target, **keywords):
        if Path(source).name.startswith(".writing-"):
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(source, target, **keywords)

    os.rename = rename


def interrupt_after_generate(number: int) -> None:
    """Ctrl-C when answers were sampled for the time `number`."""
    after_generate(number, lambda: os.kill(os.getpid(), signal.SIGINT))


def limit_file_size(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def after_generate(number: int, act: Callable[[], object]) -> None:
    """Acts when answers were sampled for the time `number` (from 0, evaluations count) and before they are verified."""
    from common.engine_torch import TorchEngine

    real, seen = TorchEngine.generate, [-1]

    def generate(self, *args, **keywords):
        samples = real(self, *args, **keywords)
        seen[0] += 1
        if seen[0] == number:
            act()
        return samples

    TorchEngine.generate = generate


def remove_after_generate(number: int, path: str) -> None:
    after_generate(number, lambda: os.remove(path))


def verifier_fails_after_generate(number: int) -> None:
    """From then on every SQL verdict is an error."""
    from common.envs.sql import SqlEnv

    def step(self, action):
        names = ("format", "executes", "result")
        nan = float("nan")
        return "", nan, True, False, {"success": nan, "rewards": dict.fromkeys(names, nan), "verifier_text": dict.fromkeys(names, ""), "error": "gone"}

    after_generate(number, lambda: setattr(SqlEnv, "step", step))


def keep_gradients(path: str) -> None:
    """Writes the gradients that every optimizer step of this process gets, unsharded, as a list of lists of tensors."""
    import torch

    real, kept = torch.optim.AdamW.step, []

    def step(self, *args, **keywords):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        kept.append([(g.full_tensor() if hasattr(g, "full_tensor") else g).detach().cpu().clone() for g in gradients])
        torch.save(kept, f"{path}.{os.environ.get('RANK', '0')}")
        return real(self, *args, **keywords)

    torch.optim.AdamW.step = step
