"""What sero.py keeps of episodes and branches, and how credit.html shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from common.rollout import Episode

if TYPE_CHECKING:
    from sero import Branch


def episode_record(step: int, e: Episode, turn_adv: Sequence[float], tokenizer) -> dict:
    """What episodes.jsonl keeps of an episode: exact tokens, log-probs, turns with their advantage."""
    return {
        "kind": "episode", "step": step, "group": e.group, "sample": e.sample, "task_id": e.task["id"], "prompt": tokenizer.decode(e.prompt_ids),
        "prompt_ids": e.prompt_ids, "token_ids": e.token_ids, "tokens": [tokenizer.decode([t]) for t in e.token_ids], "policy_mask": e.policy_mask,
        "logprobs": e.logprobs, "turns": [{"start": t.start, "stop": t.stop, "reward": t.reward, "advantage": a} for t, a in zip(e.turns, turn_adv)],
        "reward": e.reward, "success": e.success, "truncated": e.truncated,
    }  # fmt: skip


def branch_record(step: int, number: int, b: Branch, g: float, z: Sequence[float], w: Sequence[float], weights: Sequence[float], tokenizer) -> dict:
    return {
        "kind": "branch", "step": step, "number": number, **asdict(b), "prompt": tokenizer.decode(b.prompt_ids),
        "tokens": [tokenizer.decode([t]) for t in b.token_ids],
        "gate": g, "z": list(z), "w": list(w), "weights": list(weights),
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: an episode with a bar per turn (advantage), or a branch with a bar per command (weight)."""
    if record["kind"] == "episode":
        return {
            "id": f"u{record['step']} g{record['group']} s{record['sample']}",
            "title": f"update {record['step']}, sample {record['sample']}" + (f" (cut: {record['truncated']})" if record["truncated"] else ""),
            "group": f"update {record['step']}, {record['task_id']}",
            "prompt": record["prompt"],
            "facts": {"success": record["success"], "return": record["reward"], "turns": len(record["turns"]), "tokens": len(record["logprobs"])},
            "tokens": record["tokens"],
            "turns": [{"name": f"turn {i + 1}", "start": t["start"], "end": t["stop"], "value": t["advantage"]} for i, t in enumerate(record["turns"])],
            "masked": [not own for own in record["policy_mask"]],
            "strips": [],
        }
    per_token: dict[str, list] = {name: [None] * len(record["tokens"]) for name in ("z", "weights")}
    for k, (start, stop) in enumerate(record["spans"]):
        for name, values in per_token.items():
            values[start:stop] = [record[name][k]] * (stop - start)
    return {
        "id": f"u{record['step']} branch {record['number']} of {record['task_id']}, s{record['sample']} root {record['root'] + 1}",
        "title": f"update {record['step']}, oracle from turn {record['root'] + 1} of sample {record['sample']}",
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {
            "gate": round(record["gate"], 3), "oracle return": round(record["oracle_return"], 3), "policy return": round(record["policy_return"], 3),
            "commands": len(record["spans"]),
        },
        "tokens": record["tokens"],
        "turns": [
            {"name": f"command {k + 1}: z {record['z'][k]:.2f}, w {record['w'][k]:.2f}", "start": a, "end": b, "value": record["gate"] * record["weights"][k]}
            for k, (a, b) in enumerate(record["spans"])
        ],
        "masked": [not target for target in record["target_mask"]],
        "strips": [
            {"name": "z", "values": per_token["z"], "scale": "sequential", "note": "likelihood of the command, per token", "domain": [0, 1]},
            {"name": "weight", "values": per_token["weights"], "scale": "sequential", "note": "what the command counts", "domain": [0, 1]},
        ],
    }  # fmt: skip
