"""Peak memory of the two places where tokens meet the vocabulary, over vocabulary size and number of response tokens.

    python benchmarks/update_memory.py
    python benchmarks/update_memory.py --vocabularies 1000 32000 150000 --tokens 1024 8192

update    mrtpo.token_logprobs (log-probs and entropies) with its backward pass, against log_softmax of all logits at once
replay    kernels.js_distance_from_hidden, against js_distance of both full arrays of logits

Each figure is the high-water mark of a process of its own above what it held just before: MiB of resident memory, hidden states and output weight
excluded. Freshly computed gradients are part of it; `floor` is their size (update) or that of the result (replay), which no method can do without.
A cell whose full logits have more than --naive-limit numbers is left out of the full computation and shows their bare size with a > before it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import mrtpo
from kernels.js_divergence import js_distance, js_distance_from_hidden

WIDTH = 128


def resident(key: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most."""
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def update(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> None:
    logp, entropy = mrtpo.token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), None, ids, 1.0)
    logp.mean().backward()
    assert entropy.isfinite().all() and hidden.grad.isfinite().all()


def update_full(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> None:
    logp = (hidden.requires_grad_() @ weight.requires_grad_().T).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    logp.gather(1, ids[:, None]).mean().backward()
    assert entropy.isfinite().all() and hidden.grad.isfinite().all()


def replay(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> None:
    assert js_distance_from_hidden(hidden, hidden.flip(0), weight).isfinite().all()


def replay_full(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> None:
    assert js_distance(hidden @ weight.T, hidden.flip(0) @ weight.T).isfinite().all()


def child(pipe, work: Callable, vocabulary: int, tokens: int) -> None:
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(tokens, WIDTH), torch.randn(vocabulary, WIDTH) * 0.1, torch.randint(vocabulary, (tokens,))
    work(hidden[:2].clone(), weight[:16].clone(), ids[:2] % 16)  # what a first call allocates for good
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    work(hidden, weight, ids)
    pipe.send(resident("VmHWM") - before)


def peak(work: Callable, vocabulary: int, tokens: int) -> float:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, work, vocabulary, tokens))
    process.start()
    theirs.close()
    value = mine.recv()
    process.join()
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1_000, 8_000, 32_000, 150_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--naive-limit", type=int, default=2**28, help="most logits that the full computation may hold at once")
    parser.add_argument("--skip-above", type=int, default=2**29, help="vocabulary x tokens above which a cell is not run at all (it takes minutes)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'vocabulary':>10} {'tokens':>6} {'logits':>8} | {'update':>7} {'floor':>6} {'full':>7} | {'replay':>7} {'floor':>6} {'full':>7}   MiB")
    for vocabulary in args.vocabularies:
        for tokens in args.tokens:
            numbers = vocabulary * tokens
            if numbers > args.skip_above:
                continue
            logits = numbers * 4 / 2**20
            full = [f"{peak(work, vocabulary, tokens):.0f}" if numbers <= args.naive_limit else f">{logits:.0f}" for work in (update_full, replay_full)]
            floor = (vocabulary + tokens) * WIDTH * 4 / 2**20
            print(
                f"{vocabulary:10} {tokens:6} {logits:8.0f} | {peak(update, vocabulary, tokens):7.0f} {floor:6.0f} {full[0]:>7} | "
                f"{peak(replay, vocabulary, tokens):7.0f} {tokens * 4 / 2**20:6.1f} {full[1]:>7}",
                flush=True,
            )


if __name__ == "__main__":
    main()
