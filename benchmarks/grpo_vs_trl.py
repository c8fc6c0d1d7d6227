"""One GRPO update, side by side: TRL's GRPOTrainer and mrtpo.py --credit grpo. Same tiny Llama, prompts, reward and hyperparameters.

    pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 \\
        numpy==2.4.6 tyro safetensors tokenizers jinja2 matplotlib tqdm psutil
    python benchmarks/grpo_vs_trl.py --repeats 10

Both sides run their real program from end to end, each in a process of its own: `GRPOTrainer.train()` here, `mrtpo.main()` there. Nothing is
replaced or left out. The two are only held at the end of each update, so that they take turns and what else the machine does meets both alike.
An update is everything between two such points: data, generation, reward, advantages, forward, backward, optimizer step, logging.

    model      Llama with random weights: width 128, 4 layers, 4 heads (2 of keys), 1,024 tokens: 1.25 M parameters, float32
    data       16 prompts of 50 tokens x 8 samples = 128 completions of exactly 64 tokens: the end token has a logit of about -50, so both sides
               look for it as ever and never find it
    update     one AdamW step (fused, betas 0.9/0.95), clipping by norm 1, token-mean loss, no KL term; TRL without gradient checkpointing and bf16,
               which it turns on by default and which only slow it down on a CPU

First it is checked that both compute the same thing. TRL's first batch (completions, advantages, loss, gradient after clipping) is kept, and
mrtpo's own functions compute advantages, loss and gradient from the same completions and weights.
Memory is the high-water mark of each process's resident set, and how far it lies above what the process held before its first update.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, WIDTH, LAYERS, VOCABULARY = 16, 8, 50, 64, 128, 4, 1024
LEARNING_RATE = 1e-4


# ------------------------------------------------------------------------------------------------------------------- what both sides share


def reward_of(text: str) -> float:
    return float(text.count("o"))


def build(folder: Path) -> None:
    """Model, tokenizer and prompts on disk."""
    import torch
    import transformers

    from common.policies import tiny_tokenizer

    rng = random.Random(0)
    words = ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))) for _ in range(4000)]
    tokenizer = tiny_tokenizer([[{"role": "user", "content": " ".join(words)}]], VOCABULARY)
    tasks = []
    for i in range(PROMPTS):
        content = ""
        while (count := len(tokenizer(content).input_ids) + 3) < PROMPT_TOKENS:  # three tokens of the chat template around it
            longer = f"{content} {rng.choice(words)}"
            content = longer if len(tokenizer(longer).input_ids) + 3 <= PROMPT_TOKENS else content + "!" * (PROMPT_TOKENS - count)
        tasks.append({"id": str(i), "content": content})
    (folder / "tasks.json").write_text(json.dumps(tasks))

    torch.manual_seed(0)
    lm = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():  # the first component of every state is large and positive, and speaks against the end token only
        lm.get_input_embeddings().weight.normal_(std=0.2)[:, 0] = 1.0
        head = lm.get_output_embeddings().weight.normal_(std=0.2)
        head[:, 0] = 0.0
        head[tokenizer.eos_token_id, 0] = -10.0
    print(f"model: {lm.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    lm.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def memory(key: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most."""
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


class Pace:
    """Reports the update that ended and holds the process until the other side had its turn."""

    def __init__(self, pipe) -> None:
        self.pipe, self.before = pipe, memory("VmRSS")

    def wait(self, **report: float) -> None:
        self.pipe.send(report | {"peak": memory("VmHWM"), "before": self.before})
        if not self.pipe.recv():
            os._exit(0)  # measured; the end of the run (last evaluation, checkpoint) is not part of an update
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def spent(self) -> dict[str, float]:
        """Seconds since the turn began: on the clock, and of all threads together."""
        return {"total": time.perf_counter() - self.started, "cpu": time.process_time() - self.cpu}


# -------------------------------------------------------------------------------------------------------------------------------- TRL


def trl_side(pipe, folder: Path, threads: int, micro_batch: int) -> None:
    import torch

    torch.set_num_threads(threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tasks = json.loads((folder / "tasks.json").read_text())
    generate, spent = model.generate, [0.0]

    def timed_generate(*args, **kwargs):
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        spent[0] += time.perf_counter() - start
        return out

    model.generate = timed_generate

    def reward(completions, **kwargs):
        return [reward_of(c[0]["content"]) for c in completions]

    first: dict = {"parts": []}

    class Trainer(GRPOTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            if self.state.global_step == 0:
                assert inputs["completion_mask"].all() and inputs["completion_ids"].shape[1] == NEW_TOKENS
                part = {k: inputs[k].clone() for k in ("prompt_ids", "completion_ids", "advantages")}
                first["parts"].append(part | {"loss": loss.detach().clone()})
            return loss

    class Turns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.pace = Pace(pipe)
            self.pace.wait()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 0:
                torch.save(first | {"gradient": {n: p.grad for n, p in model.named_parameters()}}, folder / "trl.pt")
                first["parts"].clear()

        def on_step_end(self, *args, **kwargs):
            self.pace.wait(**self.pace.spent(), generation=spent[0])
            spent[0] = 0.0

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        seed=1,
        max_steps=10_000,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // micro_batch,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    rows = [{"prompt": [{"role": "user", "content": t["content"]}]} for t in tasks]
    Trainer(model, reward, config, Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Turns()]).train()


# ------------------------------------------------------------------------------------------------------------------------------- ours


class Env:
    """One turn: the prompt, then the same reward that TRL's function computes."""

    def reset(self, task: dict) -> list[dict]:
        return [{"role": "user", "content": task["content"]}]

    def step(self, action: str):
        value = reward_of(action)
        return "", value, True, False, {"success": 0.0, "rewards": {"letters": value}}

    def close(self) -> None: ...


def load(path: str | None, seed: int = 0):
    """The task set, found by common.envs as family `benchmark`."""
    from common import envs

    tasks = json.loads(Path(path).read_text())
    return envs.TaskSet("benchmark", tasks, tasks[:1], Env)


def our_side(pipe, folder: Path, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    import mrtpo
    from common import envs

    envs.FAMILIES["benchmark"] = __name__

    class PacedRun(mrtpo.Run):
        def log(self, metrics: dict, step: int) -> None:
            seconds = dict(self.seconds)
            super().log(metrics, step)
            if step == 0:
                self.pace = Pace(pipe)
                self.pace.wait()
                return
            assert metrics["charts/episodic_length"] == NEW_TOKENS and metrics["rollout/truncated_frac"] == 1
            self.pace.wait(**self.pace.spent(), generation=seconds["rollout"], training=seconds["train"])

    mrtpo.Run = PacedRun
    mrtpo.main(
        mrtpo.Args(
            env=f"benchmark:{folder / 'tasks.json'}",
            model=str(folder / "model"),
            engine="torch",
            credit="grpo",
            out=str(folder / "ours"),
            num_updates=10_000,
            eval_every=0,
            eval_tasks=1,
            save_every=0,
            groups_per_update=PROMPTS,
            group_size=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_warmup_updates=0,
            update_epochs=1,
            num_minibatches=1,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.0,
            max_grad_norm=1.0,
        )
    )


def compare(folder: Path) -> str:
    """Advantages, loss and clipped gradient of TRL's first update against mrtpo's functions on the same completions and weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import mrtpo

    kept = torch.load(folder / "trl.pt")
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [
        (prompt.tolist(), answer.tolist(), float(advantage))
        for part in kept["parts"]
        for prompt, answer, advantage in zip(part["prompt_ids"], part["completion_ids"], part["advantages"])
    ]
    rows.sort(key=lambda row: row[0])  # TRL shuffled them; neighbours of one prompt form a group again
    prompts = sorted({tuple(prompt) for prompt, _, _ in rows})
    encoded = sorted(tuple(mrtpo.encode(tokenizer, Env().reset(t))) for t in json.loads((folder / "tasks.json").read_text()))
    assert prompts == encoded and all(len(p) == PROMPT_TOKENS for p in prompts), "the two sides saw different prompts"
    groups = torch.tensor([prompts.index(tuple(prompt)) for prompt, _, _ in rows])
    rewards = torch.tensor([[reward_of(tokenizer.decode(answer))] for _, answer, _ in rows], dtype=torch.float64)
    advantages, _ = mrtpo.group_advantages(rewards, groups, 1e-4)
    theirs = torch.tensor([advantage for _, _, advantage in rows], dtype=torch.float64)
    policy = mrtpo.Policy(lm).train()
    packed = mrtpo.pack_rows([(prompt, answer) for prompt, answer, _ in rows], True, tokenizer.pad_token_id)
    logprobs, _ = policy(packed, 1.0)
    token_advantages = advantages[packed.response_ids, 0].float()
    n = len(logprobs)
    loss, _ = mrtpo.policy_loss(logprobs, logprobs.detach(), logprobs.detach(), token_advantages, torch.full((n,), 1 / n), 0.2, 0.2, 2.0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    mine = torch.cat([p.grad.flatten() for _, p in lm.named_parameters()])
    trl = torch.cat([kept["gradient"][name].flatten() for name, _ in lm.named_parameters()])
    gap, gradient_gap = float((advantages[:, 0] - theirs).abs().max()), float((mine - trl).norm() / trl.norm())
    trl_loss = sum(float(part["loss"]) for part in kept["parts"])
    loss_gap = abs(float(loss.detach()) - trl_loss)
    if theirs.abs().max() == 0 or not (gap < 1e-4 and loss_gap < 1e-6 and gradient_gap < 1e-3):
        raise SystemExit(f"the two sides compute different things: advantages {gap:.2g}, loss {loss_gap:.2g}, gradient {gradient_gap:.2g} (relative)")
    return (
        f"same completions and weights: advantages differ by at most {gap:.1e}, losses {float(loss.detach()):+.2e} and {trl_loss:+.2e}, "
        f"gradients by {gradient_gap:.1e} of their norm {float(trl.norm()):.3f}"
    )


# ------------------------------------------------------------------------------------------------------------------------------- main


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f}  ({min(values):.3f} .. {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measured updates of each side, taking turns")
    parser.add_argument("--warmup", type=int, default=2, help="updates of each side before them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads of each side")
    parser.add_argument("--trl-micro-batch", type=int, default=128, help="completions in one forward pass of TRL (a divisor of 128)")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        build(folder)
        sides = {"TRL": (trl_side, (args.trl_micro_batch,)), "ours": (our_side, ())}
        pipes, children, times, last = {}, [], {side: [] for side in sides}, {}
        for side, (target, extra) in sides.items():
            pipes[side], theirs = context.Pipe()
            child = context.Process(target=target, args=(theirs, folder, args.threads, *extra), daemon=True)
            child.start()
            theirs.close()
            pipes[side].recv()  # ready for its first update
            children.append(child)
        for turn in range(args.warmup + args.repeats):
            for side in sides:
                pipes[side].send(True)
                last[side] = pipes[side].recv()
                if turn >= args.warmup:
                    times[side].append(last[side])
        for pipe, child in zip(pipes.values(), children):
            pipe.send(False)
            child.join()
        print(compare(folder))

    print(f"{args.repeats} updates each, {args.threads} threads; seconds: median (min .. max)")
    for side in sides:
        total, generation = ([t[key] for t in times[side]] for key in ("total", "generation"))
        training = [t["training"] for t in times[side]] if side == "ours" else [t["total"] - t["generation"] for t in times[side]]
        print(f"{side:5} update {spread(total)}   generation {spread(generation)}   {'training' if side == 'ours' else 'the rest'} {spread(training)}")
    ratios = [a["total"] / b["total"] for a, b in zip(times["TRL"], times["ours"])]
    medians = {side: statistics.median(t["total"] for t in times[side]) for side in sides}
    print(f"TRL / ours: {medians['TRL'] / medians['ours']:.2f} by medians; neighbouring pairs {spread(ratios)}")
    cpu = {side: [t["cpu"] for t in times[side]] for side in sides}
    print(f"processor seconds an update (little changed by other load): TRL {spread(cpu['TRL'])}, ours {spread(cpu['ours'])}")
    print(f"TRL / ours: {statistics.median(cpu['TRL']) / statistics.median(cpu['ours']):.2f} by their medians")
    for side in sides:
        peak, before = last[side]["peak"], last[side]["before"]
        print(f"{side:5} memory: {peak:.0f} MiB at most, {peak - before:.0f} MiB above the {before:.0f} MiB before the first update")


if __name__ == "__main__":
    main()
