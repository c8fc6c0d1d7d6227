"""The controlled probe of outcome_decomp.py: GSPO under a token cap, plain or with one way of supplying setup knowledge that the policy lacks.

(1) GSPO: one ratio per response, the length-normalised s = exp(mean(log pi - log pi_old)), clipped to its own narrow range;
(2) a response that the token cap cut has reward 0, so part of a group's reward variance is about finishing: split by the law of total covariance;
(3) a channel helps on *touched* problems only, those that the start policy hardly ever solves;
(4) every problem is measured before and after, without the channel, beside held-out problems on trained and on other facts.

The flags are `Probe` in outcome_decomp.py; what each channel does stands in docs/outcome_decomp.md.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import envs
from common.arguments import ArgumentError, parse_args
from common.checks import check_bounds
from common.curves import Panel, RunError, read_json, read_jsonl, t_quantile
from common.engine import Sampling, make_engine
from common.envs import maths
from common.files import write_atomic
from common.packing import EMPTY, PackedBatch, check_packing, forward_hidden, micro_batches, pack_rows, token_logprobs
from common.policies import TinyConfig, load_policy, stop_token_ids
from common.processes import Processes, full_weights, load_training_state, no_sync, training_state
from common.ranks import distributed, is_maximum, reduce_metrics
from common.run import Run

CHANNELS = ("plain", "hint", "control", "teacher", "setup", "questions", "reward")
NOT_DEMONSTRATED = 1000  # leading training tasks that the warm start does not show: the probe trains on these
FORCED = "setup:"  # channel setup: the response begins with it
MEASURE = 10**6  # stream of the measurements' samples, beside those of updates


# ------------------------------------------------------------------------------------------------------------------ warm start


def warm_start_conversations(tasks: envs.TaskSet, seed: int = 0) -> list[list[dict]]:
    """Demonstrations for the tiny policy, by the careless expert. Some prompts show a hint (which is then copied) or a control text, some answers begin
    with sub-questions: a policy that never saw them would be blind to those channels."""
    rng = random.Random(seed)
    out = []
    for task in tasks.train[NOT_DEMONSTRATED:]:
        kind = rng.random()
        *_, answer = maths.careless(task, rng, hinted=kind < 0.12)
        extra = task["hint"] if kind < 0.12 else ""
        if 0.12 <= kind < 0.16:
            extra = maths.facts_line("list", {word: str(i + 1) for i, word in enumerate(maths.CONTROL_WORDS[: len(task["facts"])])})
        if 0.16 <= kind < 0.2:
            answer = {**answer, "content": f"{task['subquestions']}\n{answer['content']}"}
        out.append([*maths.prompt(task, extra), answer])
    return out


# --------------------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Response:
    """One answer and what it was worth. A spliced one is the teacher's derivation in place of a sample."""

    group: int  # index of its problem in the update, over all processes
    sample: int
    task: dict
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # of the engine at the sampling temperature; NaN for a spliced response
    text: str
    finished: bool
    solved: float  # 0 when not finished
    reward: float  # solved, plus the setup reward of channel reward
    error: str = ""
    spliced: bool = False
    touched: bool = False
    setup: dict[str, float] = field(default_factory=dict)  # maths.read_setup


def encode(tokenizer, messages: list[dict]) -> list[int]:
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids


def sample_seed(seed: int, update: int, group: int, sample: int) -> int:
    """Independent stream per sample: results do not depend on how a batch is split over calls or processes."""
    return int(np.random.SeedSequence([seed, update + 1, group, sample]).generate_state(1, np.uint64)[0] >> 1)


def rollout(engine, tokenizer, env, items: Sequence[tuple[int, dict, list[int], str]], n: int, sampling: Sampling, seed: int, update: int) -> list[Response]:
    """n answers for each (group index, task, prompt ids, forced beginning), graded; a cut answer is wrong. Groups stay together."""
    prompts = [[*prompt, *tokenizer(forced, add_special_tokens=False).input_ids] if forced else prompt for _, _, prompt, forced in items]
    seeds = [[sample_seed(seed, update, group, j) for j in range(n)] for group, *_ in items]
    out = []
    for (group, task, _, forced), prompt, samples in zip(items, prompts, engine.generate(prompts, sampling, n, seeds)):
        for j, s in enumerate(samples):
            finished = s.finish_reason == "stop"
            body = s.token_ids[:-1] if finished else s.token_ids
            text = forced + tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            env.reset(task)
            info = env.step(text)[4] if finished else {"success": 0.0}
            score = float(info["success"])
            r = Response(group, j, task, prompt, s.token_ids, s.logprobs, text, finished, score, score, info.get("error", ""))
            r.setup = maths.read_setup(task, text)
            out.append(r)
    return out


# -------------------------------------------------------------------------------- pure functions: tensors in, tensors and metrics out


def group_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, eps: float) -> torch.Tensor:
    """A = (r - mean_g) / (std_g + eps), std with ddof 1; exactly 0 in a group without variance or of one. rewards [R] float64 -> [R]."""
    _, group = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    count = zeros.index_add(0, group, torch.ones_like(rewards)).clamp(min=1)
    mean = zeros.index_add(0, group, rewards) / count
    std = (zeros.index_add(0, group, (rewards - mean[group]) ** 2) / (count - 1).clamp(min=1)).sqrt()
    low = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    return torch.where((high > low)[group], (rewards - mean[group]) / (std[group] + eps), 0.0)


def gspo_loss(
    logprobs: torch.Tensor,  # [N] with gradient
    old_logprobs: torch.Tensor,  # [N] trainer, before the update
    rollout_logprobs: torch.Tensor,  # [N] engine; NaN for tokens that it did not sample
    advantages: torch.Tensor,  # [R]
    response_ids: torch.Tensor,  # [N] in [0, R)
    lengths: torch.Tensor,  # [R]
    num_responses: float,  # of the optimizer step, over all processes
    clip_low: float,
    clip_high: float,
    tis_cap: float = 0.0,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """(1) Mean over responses of -min(s A, clip(s) A), s = exp(mean over the response's tokens of log pi - log pi_old).

    Token form: log s_t = sg[log s] + log pi - sg[log pi], at most 10; the value is that of s, the gradient of a response is s A mean(grad log pi).
    tis_cap: truncated importance weight min(trainer / engine, cap) per token, detached, after the clip. Metrics are (sum, count) pairs.
    """
    logratio = logprobs - old_logprobs
    sequence = torch.zeros_like(lengths, dtype=logratio.dtype).index_add(0, response_ids, logratio.detach()) / lengths  # [R] log s
    s = (sequence[response_ids] + logprobs - logprobs.detach()).clamp(max=10).exp()  # [N]
    a = advantages[response_ids]
    loss = -torch.minimum(s * a, s.clamp(1 - clip_low, 1 + clip_high) * a)
    mismatch = (old_logprobs - rollout_logprobs).nan_to_num(0.0).clamp(-20, 20)
    if tis_cap > 0:
        loss = loss * mismatch.exp().clamp(max=tis_cap)
    with torch.no_grad():
        n, k = float(len(logprobs)), float(len(lengths))
        ratio = sequence.exp()
        clipped = (advantages > 0) & (ratio > 1 + clip_high) | (advantages < 0) & (ratio < 1 - clip_low)
        bounded = logratio.clamp(-20, 20)
        metrics = {
            "losses/approx_kl": (float((bounded.exp() - 1 - bounded).sum()), n),
            "losses/old_approx_kl": (float(-logratio.sum()), n),
            "losses/clipfrac": (float(clipped.sum()), k),
            "probe/log_ratio_abs": (float(sequence.abs().sum()), k),
            "rollout/tis_capped_frac": (float((mismatch.exp() > tis_cap).sum()) if tis_cap > 0 else 0.0, n),
        }
    loss = (loss / (lengths[response_ids] * num_responses)).sum()
    metrics["losses/policy_loss"] = (float(loss.detach()), 0.0)  # counted once per optimizer step by the caller
    return loss, metrics


def split_covariance(x: torch.Tensor, y: torch.Tensor, finished: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(2) [through finishing, content, total] of the within-group covariance of x and y, summed over responses.

    Law of total covariance inside each group: Cov(x, y) = Cov(E[x | finished], E[y | finished]) + E[Cov(x, y | finished)]; total = the sum of both.
    x, y [R] float64, finished [R] bool, group_ids [R]. With x = y = reward the first over the last is finishing's share of the variance.
    """

    def centred(v: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, index = torch.unique(ids, return_inverse=True)
        zeros = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.float64)
        mean = (zeros.index_add(0, index, v) / zeros.index_add(0, index, torch.ones_like(v)).clamp(min=1))[index]
        return v - mean, mean

    cells = group_ids * 2 + finished.long()
    (x_total, _), (y_total, _) = centred(x, group_ids), centred(y, group_ids)
    (x_content, x_cell), (y_content, y_cell) = centred(x, cells), centred(y, cells)
    (x_between, _), (y_between, _) = centred(x_cell, group_ids), centred(y_cell, group_ids)
    return torch.stack([(x_between * y_between).sum(), (x_content * y_content).sum(), (x_total * y_total).sum()])


def gain_by_prior_solves(prior: torch.Tensor, samples: int, before: torch.Tensor, after: torch.Tensor) -> list[dict[str, Any]]:
    """Mean gain of solve rate over problems with 0, 1 to n-2, n-1 or n solves among n samples that are not those of `before`, so that chance in the
    choice does not return as a gain. prior [T] counts, before and after [T] rates, NaN for a problem without a graded answer, which takes no part."""
    bins = [("0", 0, 0), (f"1-{samples - 2}", 1, samples - 2), (f"{samples - 1}-{samples}", samples - 1, samples)]
    rows = []
    for name, low, high in bins:
        chosen = (prior >= low) & (prior <= high) & ~(before.isnan() | after.isnan())
        count = int(chosen.sum())
        mean = {key: float(v[chosen].mean()) if count else None for key, v in (("before", before), ("after", after), ("gain", after - before))}
        rows.append({"prior_solves": name, "problems": count, **mean})
    return rows


# ---------------------------------------------------------------------------------------------------------------------- policy


class Policy(torch.nn.Module):
    """The language model with its loss's inputs computed inside `forward`, so that DDP and FSDP2 see every use of a weight."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [N] and entropies [N] of the batch's response tokens."""
        hidden = forward_hidden(self.lm, batch)
        out = self.lm.get_output_embeddings()
        weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out.weight, getattr(out, "bias", None)))
        return token_logprobs(hidden, weight, bias, batch.target_ids, temperature)


# -------------------------------------------------------------------------------------------------------------------- channels


def touched_problems(prior: torch.Tensor, touch_at_most: int) -> torch.Tensor:
    """(3) Problems that a channel helps on: at most so many solves of the start policy. [T] bool."""
    return prior <= touch_at_most


def training_prompt(task: dict, channel: str, touched: bool, count: Callable[[str], int]) -> tuple[list[dict], str]:
    """(3) Messages and forced beginning of the response under a channel."""
    if channel == "hint" and touched:
        return maths.prompt(task, task["hint"]), ""
    if channel == "control" and touched:
        return maths.prompt(task, maths.control_text(task["hint"], count)), ""
    return maths.prompt(task), FORCED if channel == "setup" and touched else ""


def splice(responses: list[Response], derivation_ids: Callable[[dict], list[int]], max_new_tokens: int) -> int:
    """(3) Channel teacher: in each touched group without a success the last sample becomes the teacher's derivation, if the cap admits it. Returns how many."""
    count = 0
    for group in dict.fromkeys(r.group for r in responses if r.touched):
        members = [r for r in responses if r.group == group]
        ids = derivation_ids(members[-1].task)
        if any(r.solved > 0 for r in members) or len(ids) > max_new_tokens:
            continue
        last = members[-1]
        last.token_ids, last.logprobs, last.text = ids, [float("nan")] * len(ids), last.task["derivation"]
        last.finished, last.solved, last.reward, last.error, last.spliced = True, 1.0, 1.0, "", True
        last.setup = maths.read_setup(last.task, last.text)
        count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------- measurements

COLUMNS = ("samples", "solved", "finished", "declared", "right", "asked", "backtracks", "statements", "tokens")


def tally(responses: Sequence[Response]) -> torch.Tensor:
    """Sums over responses, in the order of COLUMNS; an answer that could not be graded is left out. [9] float64."""
    rows = []
    for r in responses:
        if not r.error:
            about = (r.setup["declared"], r.setup["right"], r.text.startswith("ask:"), maths.backtracks(r.text), r.setup["statements"])
            rows.append([1.0, r.solved, r.finished, *about, len(r.token_ids)])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(COLUMNS)).nan_to_num(0.0).sum(0)


def rates(sums: torch.Tensor) -> dict[str, float]:
    """Means per response of a [T, 9] or [9] table of sums, and the solve rate of finished responses. Empty without samples."""
    total = sums.reshape(-1, len(COLUMNS)).sum(0).tolist()
    if not total[0]:
        return {}
    out = {name: value / total[0] for name, value in zip(COLUMNS[1:], total[1:])}
    return {**out, "solved_of_finished": total[1] / total[2] if total[2] else 0.0, "samples": total[0]}


def splits(train: torch.Tensor, held: torch.Tensor, touched: torch.Tensor, unknown: torch.Tensor, other_facts: torch.Tensor) -> dict[str, dict[str, float]]:
    """(4) Rates of the touched training problems, of those among them whose facts were hardly ever demonstrated, of the other training problems, and of
    held-out problems on trained and on other facts. train [T, 9], held [H, 9], touched [T], unknown [T], other_facts [H] bool."""
    parts = {"touched": train[touched], "touched, unknown facts": train[touched & unknown], "other training": train[~touched], "held out": held}
    if bool(other_facts.any()):
        parts |= {"held out, trained facts": held[~other_facts], "held out, other facts": held[other_facts]}
    return {name: measured for name, part in parts.items() if (measured := rates(part))}


def phases(records: Sequence[dict], updates: int) -> dict[str, list[float | None]]:
    """[first sixth, last sixth] of the updates: means of the probe's training metrics (finish_share: ratio of means over logged updates)."""
    width = max(1, updates // 6)
    out = {}
    for key in ("probe/declared", "probe/right", "probe/asked", "probe/finished", "probe/backtracks", "probe/statements", "probe/touched_success",
                "probe/finish_share", "probe/setup_solve_corr", "charts/success", "charts/episodic_length"):  # fmt: skip
        parts = [[r[key] for r in records if low < r["step"] <= high and key in r] for low, high in ((0, width), (updates - width, updates))]
        out[key.partition("/")[2]] = [float(np.mean(part)) if part else None for part in parts]
    return out


def print_report(report: dict[str, Any]) -> None:
    print(f"\nchannel {report['channel']}, cap {report['cap']} tokens; measured without the channel, {report['measure_samples']} samples a problem")
    print(f"{'':26}{'problems':>9}{'solved':>16}{'finished':>16}{'setup declared':>16}{'setup right':>16}{'asked':>14}{'tokens':>14}")
    for name, before in report["before"].items():
        after = report["after"][name]
        pairs = [f"{before[key]:.3f} -> {after[key]:.3f}" for key in ("solved", "finished", "declared", "right")]
        pairs += [f"{before['asked']:.2f} -> {after['asked']:.2f}", f"{before['tokens']:.1f} -> {after['tokens']:.1f}"]
        print(f"{name:26}{report['problems'][name]:>9}" + "".join(f"{p:>{w}}" for p, w in zip(pairs, (16, 16, 16, 16, 14, 14))))
    for row in report["gain_by_prior_solves"]:
        if row["problems"]:
            print(f"gain of problems with {row['prior_solves']:>4} prior solves of {report['base_samples']}: {row['gain']:+.3f} ({row['problems']} problems)")
    for name, (first, last) in report["training"].items():
        if first is not None and last is not None:
            print(f"in training, {name:18} {first:.3f} -> {last:.3f}")


def compare(folders: Sequence[str]) -> None:
    """Prints finished runs side by side: per channel the mean over seeds, with the half width of the 95 % t-interval, and the difference to plain by seed."""
    reports: dict[str, list[dict]] = {}
    for folder in folders:
        if not (Path(folder) / "probe.json").is_file():
            raise RunError(f"--compare {folder}: no probe.json there; name run folders of finished probes")
        report = read_json(Path(folder) / "probe.json")
        reports.setdefault(report["channel"], []).append(report)

    def shown(values: list[float | None]) -> str:
        v = [x for x in values if x is not None]
        if not v:
            return "-"
        half = f" ± {t_quantile(len(v) - 1) * np.std(v, ddof=1) / len(v) ** 0.5:.3f}" if len(v) > 1 else ""
        return f"{np.mean(v):.3f}{half}"

    plain = {r["seed"]: r for r in reports.get("plain", [])}
    names = ("touched", "touched, unknown facts", "other training", "held out, trained facts", "held out, other facts", "held out")
    rows = []
    for channel in [c for c in CHANNELS if c in reports]:
        rs = reports[channel]
        row = {"channel": channel, "seeds": str(len(rs))}
        row["declared in training, first"], row["declared, last"] = (shown([r["training"]["declared"][i] for r in rs]) for i in (0, 1))
        for name in names:
            if all(name in r["after"] for r in rs):
                row[f"{name}: before"], row[f"{name}: after"] = (shown([r[when][name]["solved"] for r in rs]) for when in ("before", "after"))
        for name in ("other training", "held out"):
            pairs = [(r["after"].get(name), plain[r["seed"]]["after"].get(name)) for r in rs if r["seed"] in plain]
            row[f"{name} against plain"] = shown([a["solved"] - b["solved"] for a, b in pairs if a and b])
        row["held out: tokens before"], row["held out: tokens after"] = (shown([r[when]["held out"]["tokens"] for r in rs]) for when in ("before", "after"))
        row["asked after"] = shown([r["after"]["held out"]["asked"] for r in rs])
        row["statements per fact, last"] = shown([r["training"]["statements"][1] for r in rs])
        row["setup-solve correlation, first"], row["correlation, last"] = (shown([r["training"]["setup_solve_corr"][i] for r in rs]) for i in (0, 1))
        row["finishing's share, first"], row["share, last"] = (shown([r["training"]["finish_share"][i] for r in rs]) for i in (0, 1))
        for i, bin_ in enumerate(rs[0]["gain_by_prior_solves"]):
            row[f"gain after {bin_['prior_solves']} prior solves"] = shown([r["gain_by_prior_solves"][i]["gain"] for r in rs])
        rows.append(row)
    for key in rows[0]:
        print(f"| {key} | " + " | ".join(row.get(key, "-") for row in rows) + " |")
        if key == "channel":
            print("| --- " * (len(rows) + 1) + "|")


# ------------------------------------------------------------------------------------------------------------------------ main

PANELS = [
    Panel("Finished, setup declared, setup right", ("probe/finished", "probe/declared", "probe/right"), limits=(0, 1)),
    Panel("Touched problems solved in training", ("probe/touched_success",), limits=(0, 1)),
    Panel("Finishing's share of the reward variance", ("probe/finish_share",), limits=(0, 1)),
    Panel("Backtracking words a response", ("probe/backtracks",)),
]
LOWER_LR = "the last checkpoint is intact: lower --learning-rate, or --max-grad-norm, and start again from it or anew"


def check_args(args: Any) -> None:
    """Raises ArgumentError for values that cannot work, before anything is loaded."""
    bounds = {
        "num_updates": 1, "eval_every": 0, "eval_tasks": 1, "save_every": 0, "groups_per_update": 1, "max_new_tokens": 1, "update_epochs": 1,
        "num_minibatches": 1, "micro_batch_tokens": 1, "lr_warmup_updates": 0, "tis_cap": 0, "advantage_eps": 0, "learning_rate": 0, "clip_high": 0,
        "seed": 0, "train_problems": 1, "touch_at_most": 0, "base_samples": 3, "measure_samples": 1, "question_steps": 0, "setup_coef": 0, "group_size": 2,
    }  # fmt: skip
    check_bounds(args, bounds, above_zero=("temperature", "max_grad_norm"))
    if not 0 <= args.clip_low <= 1:
        raise ArgumentError(f"--clip-low {args.clip_low}: must lie in [0, 1]")
    if args.num_minibatches > args.groups_per_update:
        raise ArgumentError(f"--num-minibatches {args.num_minibatches}: more than the {args.groups_per_update} groups of an update")
    if args.env.partition(":")[0] != "maths":
        raise ArgumentError(
            f"--env {args.env}: the probe needs setup facts, hints and derivations; choose maths, maths:physics, or maths:FILE for channel plain"
        )


def main(args: Any) -> Run:
    """Trains and measures; see the top of this file. Returns the run."""
    check_args(args)
    processes = Processes()
    device, world, rank = processes.device, processes.world, processes.rank
    if args.groups_per_update % world or args.groups_per_update // world < args.num_minibatches:
        raise ArgumentError(f"--groups-per-update {args.groups_per_update}: must be a multiple of {world} processes, --num-minibatches or more groups each")
    engine_kind = ("vllm" if device.type == "cuda" else "torch") if args.engine == "auto" else args.engine
    if args.rollout_format == "fp8_kv" and engine_kind == "torch":
        raise ArgumentError("--rollout-format fp8_kv: the torch engine keeps its cache in the model's precision; use --engine vllm")
    bf16 = args.precision == "bf16" or (args.precision == "auto" and device.type == "cuda")
    amp = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext

    # problems and policy
    tasks = envs.load(args.env)
    env = tasks.make_env()
    problems = [task for task in tasks.train[:NOT_DEMONSTRATED] if not task.get("held_back")][: args.train_problems]
    held_out = list(tasks.eval[: args.eval_tasks])
    if len(problems) < args.train_problems:
        raise ArgumentError(f"--train-problems {args.train_problems}: --env {args.env} has {len(problems)}")
    if args.channel != "plain" and not all(task["facts"] for task in problems):
        raise ArgumentError(
            f"--channel {args.channel}: the problems of --env {args.env} tell no setup facts; use --channel plain, or --env maths or maths:physics"
        )
    with processes.main_first():
        demonstrations = (lambda: warm_start_conversations(tasks)) if tasks.careless else None
        lm, tokenizer, _ = load_policy(args.model, demonstrations, TinyConfig(), device=device)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    share = args.share_prompts != "off"
    try:
        check_packing(lm, share)
    except (ValueError, TypeError) as e:
        if not share or args.share_prompts == "on":
            raise
        if processes.is_main:
            print(f"shared prompts are off: {e}", file=sys.stderr)
        share = False
        check_packing(lm, share)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    context = lm.config.max_position_embeddings
    bare_prompts = {task["id"]: encode(tokenizer, maths.prompt(task)) for task in (*problems, *held_out)}
    longest = max(len(p) for p in bare_prompts.values())
    if args.channel in ("hint", "control", "setup"):
        for task in problems:
            messages, forced = training_prompt(task, args.channel, True, count_tokens)
            longest = max(longest, len(encode(tokenizer, messages)) + count_tokens(forced))
    if longest + args.max_new_tokens > context:
        raise envs.DataError(
            f"--env {args.env}: the longest prompt has {longest} tokens, with --max-new-tokens {args.max_new_tokens} more than the context of {context} of "
            f"--model {args.model}: lower --max-new-tokens or choose a model with more context"
        )
    sampling = Sampling(args.temperature, args.max_new_tokens, stop_token_ids(lm, tokenizer))
    greedy = Sampling(0.0, args.max_new_tokens, sampling.stop_token_ids)

    engine_lm = copy.deepcopy(lm) if args.parallel == "fsdp2" and engine_kind == "torch" else lm
    only_kv = args.rollout_format == "fp8_kv"
    engine = make_engine(
        engine_kind, engine_lm, tokenizer, max_model_len=context,
        rollout_format="auto" if only_kv else args.rollout_format, kv_cache_dtype="fp8" if only_kv else None,
    )  # fmt: skip
    bare = Policy(lm)
    policy = processes.wrap(bare, lm.base_model.layers if args.parallel == "fsdp2" else (), args.parallel, bf16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=args.parallel == "ddp")

    def sync_engine() -> None:
        if args.parallel == "fsdp2":
            engine.sync([(name.removeprefix("lm."), tensor) for name, tensor in full_weights(bare).items()])
        else:
            engine.sync(lm)

    def derivation_ids(task: dict) -> list[int]:
        return [*tokenizer(task["derivation"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    def evaluate() -> dict[str, float]:
        mine = [(g, task, bare_prompts[task["id"]], "") for g, task in enumerate(held_out)][rank::world]
        rs = rollout(engine, tokenizer, env, mine, 1, greedy, args.seed, -1)
        measured = [r for r in rs if not r.error]
        sums = {"eval/success": (sum(r.solved for r in measured), len(measured)), "eval/length": (sum(len(r.token_ids) for r in rs), len(rs))}
        sums |= {"eval/finished": (sum(r.finished for r in rs), len(rs)), "eval/error_frac": (len(rs) - len(measured), len(rs))}
        return reduce_metrics(sums)

    def measure(chosen: list[dict], n: int, stream: int) -> torch.Tensor:
        """(4) Tally of n samples for each problem, without the channel. [T, 9]."""
        mine = [(g, task, bare_prompts[task["id"]], "") for g, task in enumerate(chosen)][rank::world]
        table = torch.zeros(len(chosen), len(COLUMNS), dtype=torch.float64)
        rs = rollout(engine, tokenizer, env, mine, n, sampling, args.seed, MEASURE + stream)
        for i, (g, *_) in enumerate(mine):
            table[g] = tally(rs[i * n : (i + 1) * n])
        return processes.all_sum(table)

    run = Run(
        args,
        "outcome_probe",
        total_updates=args.num_updates,
        key_metrics=["eval/success", "charts/success", "probe/finished", "probe/declared", "charts/episodic_length"],
        **distributed(),
    )
    first_update, base = 0, {}
    if args.resume:
        first_update, state = run.load_checkpoint()
        load_training_state(bare, optimizer, state)
        base = state["base"]
    engine.weight_version = first_update
    sync_engine()
    if first_update == 0:
        run.log(evaluate(), step=0)
        base = {
            "prior": measure(problems, args.base_samples, 0)[:, COLUMNS.index("solved")],
            "train": measure(problems, args.measure_samples, 1),
            "held": measure(held_out, args.measure_samples, 2),
        }
    touched = touched_problems(base["prior"], args.touch_at_most)

    def optimizer_step(what: str) -> float:
        """Clips the gradient, checks it, steps; returns its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not np.isfinite(norm):
            raise RunError(f"{what}: the gradient is not finite ({norm}); {LOWER_LR}")
        optimizer.step()
        return norm

    def question_step(number: int) -> None:
        """(3) Channel questions: one supervised step on the sub-questions of touched problems, without the answer that follows them."""
        chosen = torch.nonzero(touched).flatten().tolist()
        picks = np.random.default_rng([args.seed, MEASURE, number]).choice(chosen, args.groups_per_update)[rank::world]
        rows = [(bare_prompts[problems[i]["id"]], tokenizer(problems[i]["subquestions"] + "\n", add_special_tokens=False).input_ids) for i in picks]
        total = float(processes.all_sum(torch.tensor([float(sum(len(a) for _, a in rows))], dtype=torch.float64))[0])
        optimizer.zero_grad(set_to_none=True)
        batches = list(processes.rounds(list(micro_batches(rows, args.micro_batch_tokens))))
        for at, batch in enumerate(batches):
            with no_sync(policy, at < len(batches) - 1):
                with amp():
                    logprobs = policy((pack_rows([rows[i] for i in batch], share, pad_id) if batch else EMPTY).to(device))[0]
                (-logprobs.sum() / total * (world if batch else 0.0)).backward()
        optimizer_step(f"question step {number + 1}")

    for update in range(first_update, args.num_updates):
        started = time.perf_counter()
        sums: dict[str, tuple[float, float]] = {}

        def add(metrics: dict[str, tuple[float, float]], sums: dict[str, tuple[float, float]] = sums) -> None:
            for key, (total, count) in metrics.items():
                old = sums.get(key, (0.0, 0.0))
                sums[key] = (max(old[0], total) if is_maximum(key) else old[0] + total, old[1] + count)

        lr = args.learning_rate * min(1.0, (update + 1) / args.lr_warmup_updates if args.lr_warmup_updates else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr

        if args.channel == "questions" and update == 0 and bool(touched.any()):
            for number in range(args.question_steps):
                question_step(number)
            engine.weight_version = update  # the first update's weights, with or without question steps before it
            sync_engine()

        # --- roll out
        with run.timer("rollout"):
            stream = [divmod(update * args.groups_per_update + g, len(problems)) for g in range(args.groups_per_update)]
            orders = {epoch: np.random.default_rng([args.seed, epoch]).permutation(len(problems)) for epoch, _ in stream}
            mine = [(g, int(orders[epoch][at])) for g, (epoch, at) in enumerate(stream)][rank::world]
            items = []
            for g, p in mine:
                messages, forced = training_prompt(problems[p], args.channel, bool(touched[p]), count_tokens)
                items.append((g, problems[p], encode(tokenizer, messages), forced))
            everything = rollout(engine, tokenizer, env, items, args.group_size, sampling, args.seed, update)
            helped = {g: bool(touched[p]) for g, p in mine}
            for r in everything:
                r.touched = helped[r.group]
                if args.channel == "reward" and r.touched:
                    r.reward += args.setup_coef * r.setup["found"]
        sampled, cut = [copy.copy(r) for r in everything if not r.error], sum(not r.finished for r in everything)  # as sampled: what is reported
        spliced = splice(everything, derivation_ids, args.max_new_tokens) if args.channel == "teacher" else 0
        responses = [r for r in everything if not r.error]

        # --- advantages, and (2) where the rewards differ
        with run.timer("reward"):
            rewards = torch.tensor([r.reward for r in responses], dtype=torch.float64)
            group_ids = torch.tensor([r.group for r in responses], dtype=torch.int64)
            advantages = group_advantages(rewards, group_ids, args.advantage_eps).float()  # [R]
            lengths = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64)
            offset = [0, *lengths.cumsum(0).tolist()]
            rollout_logprobs = torch.tensor([x for r in responses for x in r.logprobs], dtype=torch.float32)

        # --- update
        with run.timer("train"):
            rows = [(r.prompt_ids, r.token_ids) for r in responses]
            old_logprobs = torch.zeros(offset[-1])

            def token_index(batch: list[int], offset: list[int] = offset) -> torch.Tensor:
                return torch.cat([torch.arange(offset[i], offset[i + 1]) for i in batch])

            if args.num_minibatches > 1:  # the ratio's anchor; without minibatches it is the detached value of the first pass
                with torch.no_grad(), amp():
                    for batch in processes.rounds(list(micro_batches(rows, args.micro_batch_tokens))):
                        logprobs = policy((pack_rows([rows[i] for i in batch], share, pad_id) if batch else EMPTY).to(device), args.temperature)[0].cpu()
                        if batch:
                            old_logprobs[token_index(batch)] = logprobs
            policy.train()
            for epoch in range(args.update_epochs):
                order = np.random.default_rng([args.seed, update, epoch]).permutation(args.groups_per_update)
                for part in range(args.num_minibatches):
                    chosen = set(order[part :: args.num_minibatches].tolist())
                    members = [i for i, r in enumerate(responses) if r.group in chosen]
                    total = float(processes.all_sum(torch.tensor([float(len(members))], dtype=torch.float64))[0])
                    if total == 0:  # nothing could be graded: no step, which would only follow old momentum
                        continue

                    optimizer.zero_grad(set_to_none=True)
                    batches = [[members[i] for i in b] for b in micro_batches([rows[i] for i in members], args.micro_batch_tokens)]
                    batches = list(processes.rounds(batches))
                    for number, batch in enumerate(batches):
                        packed = (pack_rows([rows[i] for i in batch], share, pad_id) if batch else EMPTY).to(device)
                        with no_sync(policy, number < len(batches) - 1):
                            with amp():
                                logprobs, entropy = policy(packed, args.temperature)
                            if batch:
                                index = token_index(batch)
                                if epoch == 0 and args.num_minibatches == 1:
                                    old_logprobs[index] = logprobs.detach().cpu()
                                response_ids = torch.repeat_interleave(torch.arange(len(batch)), lengths[batch])
                                given = (old_logprobs[index], rollout_logprobs[index], advantages[batch], response_ids, lengths[batch])
                                loss, metrics = gspo_loss(logprobs, *(x.to(device) for x in given), total, args.clip_low, args.clip_high, args.tis_cap)
                                add({**metrics, "losses/entropy": (float(entropy.sum()), len(index))})
                            else:
                                loss = logprobs.sum() * 0.0
                            (loss * world).backward()  # gradients are averaged over processes; the loss is divided by all processes' responses
                    norm = optimizer_step(f"update {update + 1}")
                    add({"losses/grad_norm": (norm, 1.0), "losses/policy_loss": (0.0, 1.0 / world)})
            policy.eval()
            if not all(bool(p.isfinite().all()) for p in policy.parameters()):
                raise RunError(f"update {update + 1}: the weights are no longer finite; {LOWER_LR}")
        version = engine.weight_version
        with run.timer("sync"):
            sync_engine()

        # --- log
        gap = (old_logprobs - rollout_logprobs).double()[~rollout_logprobs.isnan()].clamp(-20, 20)
        x = torch.tensor([[r.reward, r.setup["right"], r.solved] for r in sampled], dtype=torch.float64).reshape(-1, 3).nan_to_num(0.0)
        ids, ended = torch.tensor([r.group for r in sampled], dtype=torch.int64), torch.tensor([r.finished for r in sampled], dtype=torch.bool)
        through, content, _ = split_covariance(x[:, 0], x[:, 0], ended, ids).tolist()
        between = [split_covariance(x[:, a], x[:, b], ended, ids)[2] for a, b in ((1, 2), (1, 1), (2, 2))]
        cov, var_setup, var_solved = processes.all_sum(torch.stack(between)).tolist()
        n_all, n, n_tokens = float(len(everything)), float(len(sampled)), float(sum(len(r.token_ids) for r in sampled))
        of_touched = [r for r in sampled if r.touched]
        with_facts = [r for r in sampled if r.task["facts"]]
        no_spread = [g for g in dict.fromkeys(group_ids.tolist()) if not bool((advantages[group_ids == g] != 0).any())]
        add(
            {
                "charts/episodic_return": (sum(r.reward for r in sampled), n),
                "charts/episodic_length": (n_tokens, n),
                "charts/success": (sum(r.solved for r in sampled), n),
                "charts/learning_rate": (lr, 1.0),
                "rollout/truncated_frac": (float(cut), n_all),
                "rollout/error_frac": (n_all - n, n_all),
                "rollout/zero_std_group_frac": (float(len(no_spread)), float(len(set(group_ids.tolist())))),
                "rollout/weight_version": (float(version), 1.0),
                "rollout/logprob_absdiff_mean": (float(gap.abs().sum()), float(len(gap))),
                "rollout/logprob_absdiff_max": (float(gap.abs().max()) if len(gap) else 0.0, float(len(gap))),
                "rollout/k3": (float((gap.exp() - 1 - gap).sum()), float(len(gap))),
                "probe/finished": (float(sum(r.finished for r in sampled)), n),
                "probe/backtracks": (float(sum(maths.backtracks(r.text) for r in sampled)), n),
                "probe/asked": (float(sum(r.text.startswith("ask:") for r in sampled)), n),
                **{f"probe/{k}": (sum(r.setup[k] for r in with_facts), float(len(with_facts))) for k in ("declared", "right", "statements")},
                "probe/finish_share": (through, through + content),
                "probe/touched_frac": (float(len(of_touched)), n),
                "probe/touched_success": (sum(r.solved for r in of_touched), float(len(of_touched))),
                "probe/touched_declared": (sum(r.setup["declared"] for r in with_facts if r.touched), float(sum(r.touched for r in with_facts))),
                "probe/spliced_frac": (float(spliced), n_all),
            }
        )
        metrics = reduce_metrics({key: sums.get(key, (0.0, 0.0)) for key in processes.union(sums)})
        if var_setup > 0 and var_solved > 0:
            metrics["probe/setup_solve_corr"] = cov / (var_setup * var_solved) ** 0.5
        metrics["charts/SPS"] = float(processes.all_sum(torch.tensor([n_tokens], dtype=torch.float64))[0]) / (time.perf_counter() - started)
        done = update + 1
        if done == args.num_updates or (args.eval_every and done % args.eval_every == 0):
            with run.timer("eval"):
                metrics |= evaluate()
            for r in responses[: args.group_size]:
                record = {name: getattr(r, name) for name in ("group", "sample", "text", "token_ids", "finished", "solved", "reward", "spliced", "touched")}
                run.episode({"step": done, "task_id": r.task["id"], "prompt": tokenizer.decode(r.prompt_ids), **record}, step=done)
        run.log(metrics, step=done)

        # --- checkpoint, stop
        stop = run.should_stop()
        if stop or done == args.num_updates or (args.save_every and done % args.save_every == 0):
            with run.timer("save"):
                run.save_checkpoint(done, {**training_state(bare, optimizer), "base": base})
        if stop:
            break

    if run.exit_code == 0:  # (4) not after an interruption
        after = {"train": measure(problems, args.measure_samples, 3), "held": measure(held_out, args.measure_samples, 4)}
        other_facts = torch.tensor([bool(task.get("held_back")) for task in held_out])
        unknown = torch.tensor([task.get("chance", 1.0) < 0.01 for task in problems])
        weights = {name.removeprefix("lm."): tensor for name, tensor in full_weights(bare).items()}
        if processes.is_main:
            lm.save_pretrained(run.folder / "policy", state_dict=weights)
            tokenizer.save_pretrained(run.folder / "policy")
            before, now = (splits(m["train"], m["held"], touched, unknown, other_facts) for m in (base, after))
            rate = [m["train"][:, 1] / m["train"][:, 0] for m in (base, after)]  # NaN without a graded answer

            def measured(x: torch.Tensor) -> float | None:
                return None if x.isnan() else float(x)

            report = {
                "channel": args.channel, "seed": args.seed, "cap": args.max_new_tokens, "updates": args.num_updates, "base_samples": args.base_samples,
                "measure_samples": args.measure_samples, "before": before, "after": now,
                "problems": {name: round(part["samples"] / args.measure_samples) for name, part in before.items()},
                "gain_by_prior_solves": gain_by_prior_solves(base["prior"], args.base_samples, *rate),
                "training": phases(read_jsonl(run.folder / "metrics.jsonl"), args.num_updates),
                "per_problem": [
                    {"id": task["id"], "prior_solves": int(k), "touched": bool(t), "before": measured(b), "after": measured(a)}
                    for task, k, t, b, a in zip(problems, base["prior"], touched, *rate)
                ],
            }  # fmt: skip
            write_atomic(run.folder / "probe.json", (json.dumps(report, indent=1) + "\n").encode())
            print_report(report)
    engine.close()
    env.close()
    run.finish(PANELS)
    return run


def resumed(flags: type, argv: Sequence[str]) -> Any:
    """`Probe` from a command line with --resume: the run's saved arguments are the defaults. Raises DataError when it names no run."""
    try:
        return parse_args(flags, argv)
    except RunError as error:
        raise envs.DataError(str(error)) from None


def command(args: Any) -> int:
    """`outcome_decomp.py probe`: compares finished runs, or trains."""
    if args.compare:
        compare(args.compare)
        return 0
    return main(args).exit_code
