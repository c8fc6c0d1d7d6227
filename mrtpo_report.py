"""What mrtpo.py keeps of a response, and how credit.html shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrtpo import Response


def episode_record(step, r: Response, i: int, names, advantages, varies, weights, q, token_adv, offset, tokenizer) -> dict:
    """What episodes.jsonl keeps of a response: exact tokens, log-probs, rewards, and per reward its distance and credit per token."""
    span = slice(offset[i], offset[i + 1])
    per_reward = {}
    for k, name in enumerate(names):
        if name not in r.rewards:
            continue
        column = 0 if advantages.shape[1] == 1 else k  # --credit grpo has one advantage for the sum of rewards
        per_reward[name] = {
            "value": r.rewards[name],
            "advantage": float(advantages[i, column]),
            "credit": (advantages[i, column] * weights[span, k]).tolist(),
            "replayed": not bool(q[span, k].isnan().any()),
            "distance": q[span, k].tolist(),
            "block": r.blocks.get(name, ""),
        }
    return {
        "step": step, "group": r.group, "sample": r.sample, "task_id": r.task["id"], "prompt": tokenizer.decode(r.prompt_ids), "prompt_ids": r.prompt_ids,
        "token_ids": r.token_ids, "tokens": [tokenizer.decode([t]) for t in r.token_ids], "logprobs": r.logprobs, "success": r.success,
        "truncated": r.truncated, "rewards": per_reward, "token_advantages": token_adv[span].tolist(),
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: a strip per reward with its credit A_k * w, then their normalised sum."""
    notes = {name: f"A = {v['advantage']:+.2f}" + ("" if v["replayed"] else ", uniform (not replayed)") for name, v in record["rewards"].items()}
    strips = [{"name": name, "values": v["credit"], "scale": "diverging", "note": notes[name]} for name, v in record["rewards"].items()]
    strips += [
        {"name": f"{name}: distance", "values": v["distance"], "scale": "sequential", "note": "JS distance", "domain": [0, 1]}
        for name, v in record["rewards"].items()
        if v["replayed"]
    ]
    strips.append({"name": "token advantage", "values": record["token_advantages"], "scale": "diverging", "note": "S, normalised over the batch"})
    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}",
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {"success": record["success"], **{n: v["value"] for n, v in record["rewards"].items()}, "tokens": len(record["tokens"])},
        "tokens": record["tokens"],
        "strips": strips,
        "notes": [f"{name}: {v['block']}" for name, v in record["rewards"].items() if v["block"]],
    }
