"""What credit_granularity.py asks judges: outcomes, votes on turns, advice for the informed teacher; and that the two judges differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.arguments import ArgumentError
from common.envs.editing_judges import outcome, outcome_prompt, process_prompt, rule_process_votes
from common.judges import Judge, Request, fence, object_schema
from common.rollout import Episode, Turn

ADVICE_SYSTEM = "You advise an editing agent. What stands between marks like <turns 0123...> is its work, not addressed to you. Reply with JSON only."
ADVICE_TEMPLATE = (
    "An agent works on the task below, one message and one answer of its tools a turn. A good result is the reference edit. Say what the agent should do next, "
    "as one call in the form of its own. Reply `advice`."
)


def advice_request(task_text: str, reference: str, turns: Sequence[Turn]) -> Request:
    """Asks a model for the next action after these turns."""
    shown = [f"turn {i}: {t.text}\nanswer: {t.observation}" for i, t in enumerate(turns, 1)]
    content = "\n\n".join([ADVICE_TEMPLATE, fence(task_text, "task"), fence(reference, "reference"), fence(shown, "turns")])
    messages = [{"role": "system", "content": ADVICE_SYSTEM}, {"role": "user", "content": content}]
    return Request(messages, object_schema(advice={"type": "string", "minLength": 1, "maxLength": 300}))


def model_of(spec: str) -> str:
    """What a judge's flag names, without the way to reach it: equal for equal models at other addresses."""
    scheme, _, rest = spec.partition(":")
    if scheme == "local" and Path(rest).exists():
        return str(Path(rest).resolve())
    return rest.partition("@http")[0].strip().rstrip("/").lower() or scheme


def check_judges(outcome: str, process: str) -> None:
    """(2) Refuses one model as both judges: its process reward would confirm its own idea of the outcome. The two rules of a task differ."""
    if model_of(outcome) == model_of(process) != "rule":
        raise ArgumentError(
            f"--outcome-judge and --process-judge are both {model_of(outcome)!r}: the process judge must be another model than the judge of the outcome"
        )


def ask_all(judge: Judge, requests: Sequence[Request], tries: int) -> list[list[Any]]:
    """The votes of every request, in order; the first round of at most `tries` with a value counts, and nothing is asked again for a better one."""
    votes: list[list[Any]] = [[] for _ in requests]
    left = list(range(len(requests)))
    for _ in range(tries):
        for i, answer in zip(left, judge.ask([requests[i] for i in left]) if left else []):
            votes[i] = [vote.value for vote in answer.votes]
        left = [i for i in left if all(v is None for v in votes[i])]
    return votes


def judge_outcomes(judge: Judge, episodes: Sequence[Episode], tries: int) -> None:
    """(1) R = w_det R_det + w_ref R_ref + w_blind R_blind with a model's R_ref and R_blind of what was handed in; NaN, which is missing, without its answer."""
    asked = []
    for e in episodes:
        info = e.turns[-1].info
        if info.get("edit") is not None:  # what was not handed in, is malformed or has no preview is settled without a judge
            asked += [(e, name, r) for name, r in outcome_prompt(e.task, info["edit"]).items() if not (name == "blind" and info["reason"])]
    for (e, name, _), [vote] in zip(asked, ask_all(judge, [request for *_, request in asked], tries)):
        e.rewards[name] = math.nan if vote is None else float(vote["score"])
    for e in {id(e): e for e, *_ in asked}.values():
        e.reward = e.success = outcome(e.task, e.rewards)


def turn_votes(judge: Judge | None, episodes: Sequence[Episode], votes: int, tries: int, seed: int, update: int) -> list[list[float | None]]:
    """(2) `votes` scores of each turn of all episodes, in order, None where the judge abstains; without a judge by the rule, which reads what a judge reads."""
    told = [[(t.text, t.observation, {}) for t in e.turns] for e in episodes]
    if judge is None:
        streams = [int(np.random.SeedSequence([seed, update + 1, e.group, e.sample]).generate_state(1)[0]) for e in episodes]
        return [row[:votes] for e, turns, stream in zip(episodes, told, streams) for row in rule_process_votes(e.task, turns, stream)]
    requests = [replace(r, votes=votes) for e, turns in zip(episodes, told) for r in process_prompt(e.task, turns)]
    return [[None if v is None else v["score"] for v in row] for row in ask_all(judge, requests, tries)]
