"""What fork.py keeps of an answer, and how credit.html shows it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.policies import token_spans

if TYPE_CHECKING:
    from fork import Response


def unit_spans(text: str, units: Sequence[str]) -> list[tuple[int, int]]:
    """Where each unit stands in the response: around the longest piece of its wording, after the unit before where that is possible."""
    spans, start = [], 0
    for unit in units:
        for low in (start, 0):
            match = difflib.SequenceMatcher(None, text[low:].lower(), unit.lower(), autojunk=False).find_longest_match()
            if 2 * match.size >= min(len(unit), 12):
                break
        else:
            spans.append((0, 0))  # not the response's words
            continue
        begin = max(low, low + match.a - match.b)
        begin = max([begin, *(m + 1 for m in (text.rfind(mark, begin, low + match.a) for mark in ".!?\n") if m >= 0)])
        end = low + match.a + match.size
        spans.append((begin, end))
        start = end
    return spans


def episode_record(step: int, r: Response, advantage: float, tokenizer) -> dict:
    """What episodes.jsonl keeps of a response: exact tokens, log-probs, and everything that the judge said about its units."""
    v = r.verdict
    spans = token_spans(tokenizer, r.token_ids)
    placed = unit_spans(r.text, v.units)
    owner = [next((i for i, (a, b) in enumerate(placed) if a < end and start < b), None) for start, end in spans]
    units = [
        {
            "text": unit,
            "credit": float(v.credits[i]) if len(v.credits) else None,
            "criteria": [j + 1 for j in v.matches[i].nonzero()[:, 0].tolist()] if len(v.matches) else [],
            "necessary": v.necessary[i] if v.necessary else None,
            "correct": v.correct[i] if v.correct else None,
        }
        for i, unit in enumerate(v.units)
    ]
    return {
        "step": step, "group": r.group, "sample": r.sample, "task_id": r.task["id"], "prompt": tokenizer.decode(r.prompt_ids), "prompt_ids": r.prompt_ids,
        "token_ids": r.token_ids, "tokens": [tokenizer.decode([t]) for t in r.token_ids], "logprobs": r.logprobs, "truncated": r.truncated, "text": r.text,
        "reward": r.reward, "advantage": advantage, "recall": v.recall, "precision": v.precision, "threshold": v.tau, "missing": v.missing, "units": units,
        "token_units": owner, "criteria": [[c["criterion"], c["points"]] for c in r.task["rubrics"]], "met": v.met,
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: units coloured by credit, necessity and factuality."""
    owner, units = record["token_units"], record["units"]

    def strip(name: str, field_name: str, scale: str, note: str, **more: Any) -> dict:
        values = [None if i is None or units[i][field_name] is None else float(units[i][field_name]) for i in owner]
        return {"name": name, "values": values, "scale": scale, "note": note, **more}

    threshold = record["threshold"]
    strips = [
        strip("credit", "credit", "sequential", "sum of criterion shares" if threshold is None else f"threshold {threshold:.3g}"),
        strip("necessity", "necessary", "categorical", "credit reaches the threshold", labels=["unnecessary", "necessary"], domain=[0, 1]),
        strip("factuality", "correct", "categorical", "everything in it is true", labels=["wrong", "correct"], domain=[0, 1]),
        {"name": "advantage", "values": [record["advantage"]] * len(owner), "scale": "diverging", "note": "the same for every token"},
    ]
    marks = [f"{'+' if met else '-'} {points:+g} {criterion}" for (criterion, points), met in zip(record["criteria"], record["met"])]
    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}",
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {**{k: record[k] for k in ("reward", "recall", "precision")}, "units": len(units), "tokens": len(record["tokens"])},
        "tokens": record["tokens"],
        "strips": strips,
        "notes": ["criteria, + where met:", *marks, *(f"missing: {role}" for role in record["missing"])],
    }
