"""Torch engine against transformers' `generate`: tokens per second side by side, and peak memory of each.

    python benchmarks/generation.py                      # 16 prompts x 8 samples, 50-token prompts, 64 new tokens, the tiny policy's size
    python benchmarks/generation.py --stop-rate 0.03     # samples of unequal length: the engine drops finished rows

Both run in one process, in turns, so that a busy machine slows both alike; the ratio is the median over pairs. Processor time is reported beside wall time.
Peak memory is measured in a fresh process for each, as the growth of its resident set during one generation.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose file names must not shadow packages
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from common.engine import Sampling, make_engine  # noqa: E402


@dataclass
class Args:
    prompts: int = 16  # different prompts
    samples: int = 8  # samples of each prompt
    prompt_tokens: int = 50  # length of each prompt
    new_tokens: int = 64  # most tokens of a sample
    stop_rate: float = 0.0  # chance of a stop token at each step (by the number of stop tokens among a nearly uniform vocabulary)
    hidden: int = 128  # width of the model
    layers: int = 3  # its layers
    heads: int = 4  # its attention heads
    kv_heads: int = 2  # its key/value heads
    intermediate: int = 512  # width of its MLP
    vocab: int = 1024  # its vocabulary
    threads: int = 2  # torch threads
    repeats: int = 7  # measured pairs
    seed: int = 0  # of weights, prompts and samples


def setup(args: Args):
    """Model, prompts and the two contenders, each a function without arguments that returns the number of tokens it sampled."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.prompt_tokens + args.new_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, args.vocab, (args.prompts, args.prompt_tokens))
    stops = list(range(1, 1 + round(args.stop_rate * args.vocab)))
    engine = make_engine("torch", model)
    sampling = Sampling(1.0, args.new_tokens, tuple(stops))
    batch = ids.repeat_interleave(args.samples, 0)

    def ours() -> int:
        return sum(len(sample.token_ids) for group in engine.generate(ids.tolist(), sampling, args.samples) for sample in group)

    def theirs() -> int:
        # top_k=0 and temperature 1: the same distribution. It returns no log-probs, which the engine does.
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.new_tokens, "eos_token_id": stops or None}
        out = model.generate(batch, attention_mask=torch.ones_like(batch), pad_token_id=0, **options)[:, args.prompt_tokens :]
        return int((out != 0).sum()) if stops else out.numel()

    return ours, theirs


def measure(call) -> tuple[float, float]:
    """Tokens per second of wall time and of processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    tokens = call()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - processor)


def peak_growth(args: Args, contender: int, queue) -> None:
    call = setup(args)[contender]
    before = psutil.Process().memory_info().rss
    call()
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def main(args: Args) -> None:
    contenders = setup(args)
    for call in contenders:
        call()  # warm-up
    runs = [[measure(call) for call in contenders] for _ in range(args.repeats)]
    memory = []
    for contender in range(2):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=peak_growth, args=(args, contender, queue))
        process.start()
        memory.append(queue.get())
        process.join()
    print(f"{args.prompts} prompts x {args.samples} samples, {args.prompt_tokens} + {args.new_tokens} tokens, {args.threads} threads, {args.repeats} pairs")
    print(f"{'':24}{'tokens/s':>12}{'tokens/cpu-s':>14}{'peak MiB':>10}")
    for index, name in enumerate(["torch engine", "transformers generate"]):
        wall, processor = (statistics.median(run[index][i] for run in runs) for i in (0, 1))
        print(f"{name:24}{wall:12,.0f}{processor:14,.0f}{memory[index] / 2**20:10.0f}")
    for i, kind in enumerate(["wall time", "processor time"]):
        ratios = sorted(run[0][i] / run[1][i] for run in runs)
        print(f"ratio by {kind}: median {statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f})")


if __name__ == "__main__":
    main(tyro.cli(Args))
