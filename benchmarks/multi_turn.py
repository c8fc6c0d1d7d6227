"""Cost of a turn in a long episode: torch engine with kept context (sessions) against computing the whole episode again at every turn.

    python benchmarks/multi_turn.py                      # 32 episodes side by side, 40 turns of 32 observation and 16 sampled tokens, the tiny policy's size
    python benchmarks/multi_turn.py --out multi_turn.png # and a figure

Both ways run in one process, turn by turn in alternation, on the same episodes, so that a busy machine slows both alike. Processor time is reported, and the
tokens that went through the model (Engine.forward_tokens), which no load disturbs. A turn's time is the median over `repeats` passes.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose file names must not shadow packages
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from common.engine import Sampling, make_engine  # noqa: E402


@dataclass
class Args:
    episodes: int = 32  # side by side
    turns: int = 40  # per episode
    prompt_tokens: int = 64  # of the task
    observation_tokens: int = 32  # the environment's answer to a turn
    new_tokens: int = 16  # sampled in a turn
    hidden: int = 128  # width of the model
    layers: int = 3  # its layers
    heads: int = 4  # its attention heads
    kv_heads: int = 2  # its key/value heads
    intermediate: int = 384  # width of its MLP
    vocab: int = 768  # its vocabulary
    threads: int = 2  # torch threads
    repeats: int = 3  # passes
    seed: int = 0  # of weights and tokens
    out: str = ""  # figure to write


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    length = args.prompt_tokens + args.turns * (args.observation_tokens + args.new_tokens)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, max_position_embeddings=length, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    engines = {"kept": make_engine("torch", model), "whole": make_engine("torch", model)}
    sampling = Sampling(1.0, args.new_tokens)
    seconds = {name: [[] for _ in range(args.turns)] for name in engines}
    tokens = {name: [0] * args.turns for name in engines}
    context = [0] * args.turns
    for repeat in range(args.repeats + 1):  # the first pass warms up
        episodes = torch.randint(1, args.vocab, (args.episodes, args.prompt_tokens)).tolist()
        for turn in range(args.turns):
            seeds = [[1000 * repeat + args.episodes * turn + i] for i in range(args.episodes)]
            context[turn] = len(episodes[0])
            results = []
            for name, engine in engines.items():
                before, start = engine.forward_tokens, time.process_time()
                sessions = list(range(args.episodes)) if name == "kept" else None
                results.append([samples[0].token_ids for samples in engine.generate(episodes, sampling, 1, seeds, sessions)])
                if repeat:
                    seconds[name][turn].append(time.process_time() - start)
                tokens[name][turn] = engine.forward_tokens - before
            assert results[0] == results[1], f"turn {turn}: both ways must sample the same"
            observations = torch.randint(1, args.vocab, (args.episodes, args.observation_tokens)).tolist()
            episodes = [e + said + seen for e, said, seen in zip(episodes, results[0], observations)]
        for engine in engines.values():
            engine.end_sessions()
    medians = {name: [statistics.median(x) for x in per_turn] for name, per_turn in seconds.items()}
    print(f"{args.episodes} episodes, {args.threads} threads; tokens through the model and processor seconds of one turn of all episodes")
    print(f"{'turn':>5} {'context':>8} {'kept: tokens':>13} {'s':>8} {'whole: tokens':>14} {'s':>8} {'ratio':>6}")
    for turn in sorted({0, 1, args.turns // 4, args.turns // 2, 3 * args.turns // 4, args.turns - 1}):
        k, w = medians["kept"][turn], medians["whole"][turn]
        print(f"{turn + 1:>5} {context[turn]:>8} {tokens['kept'][turn]:>13} {k:>8.3f} {tokens['whole'][turn]:>14} {w:>8.3f} {w / k:>6.2f}")
    k, w = (sum(medians[name]) for name in ("kept", "whole"))
    print(f"whole episode: {sum(tokens['kept'])} against {sum(tokens['whole'])} tokens, {k:.2f} against {w:.2f} s, ratio {w / k:.2f}")
    if args.out:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for name, label, colour in (("whole", "whole episode again", "#D55E00"), ("kept", "context kept", "#0072B2")):
            axes[0].plot(context, [t / args.episodes for t in tokens[name]], label=label, color=colour)
            axes[1].plot(context, [1000 * s / args.episodes for s in medians[name]], label=label, color=colour)
        for ax, title, unit in zip(axes, ("Tokens through the model", "Processor time"), ("tokens per episode and turn", "ms per episode and turn")):
            ax.set(title=title, xlabel="tokens in the context before the turn", ylabel=unit, ylim=(0, None))
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False)
        figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main(tyro.cli(Args))
