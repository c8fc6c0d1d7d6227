"""What mpo.py keeps of an episode, and how credit.html shows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.rollout import Episode


def episode_record(step: int, e: Episode, span: slice, turn_adv: Sequence[float], columns: dict[str, torch.Tensor], tokenizer) -> dict:
    """What episodes.jsonl keeps of an episode: exact tokens, log-probs, turns with their advantage, and per policy token its credit and value."""
    return {
        "step": step, "group": e.group, "sample": e.sample, "task_id": e.task["id"], "prompt": tokenizer.decode(e.prompt_ids), "prompt_ids": e.prompt_ids,
        "token_ids": e.token_ids, "tokens": [tokenizer.decode([t]) for t in e.token_ids], "policy_mask": e.policy_mask, "logprobs": e.logprobs,
        "turns": [{"start": t.start, "stop": t.stop, "reward": t.reward, "advantage": a} for t, a in zip(e.turns, turn_adv)],
        "reward": e.reward, "success": e.success, "truncated": e.truncated, **{name: x[span].tolist() for name, x in columns.items()},
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: a bar per turn with A[t]; values, refinement and advantage along the tokens."""

    def strip(name: str, column: str, scale: str, note: str, **more) -> dict:
        values = iter(record[column])
        return {"name": name, "values": [next(values) if own else None for own in record["policy_mask"]], "scale": scale, "note": note, **more}

    strips = [strip("advantage", "advantages", "diverging", "what the loss uses")]
    if "values" in record:
        strips.insert(0, strip("value", "values", "sequential", "critic, before the token"))
        strips.insert(1, strip("refinement", "refinement", "diverging", "centred inside the turn"))
    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}" + (f" (cut: {record['truncated']})" if record["truncated"] else ""),
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {"success": record["success"], "return": record["reward"], "turns": len(record["turns"]), "tokens": len(record["logprobs"])},
        "tokens": record["tokens"],
        "turns": [{"name": f"turn {i + 1}", "start": t["start"], "end": t["stop"], "value": t["advantage"]} for i, t in enumerate(record["turns"])],
        "masked": [not own for own in record["policy_mask"]],
        "strips": strips,
    }
