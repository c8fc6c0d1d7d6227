"""ante_bapo.py's messages: (1) what a belief looks like and how it is read, (2) beliefs written in hindsight for the warm start, by scripts or of a file."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import envs
from common.envs.repo_hindsight import hindsight
from common.policies import PolicyError

# --------------------------------------------------------------------------------------- (1) beliefs and message format

CHECKS, EXITS, DECISIONS = ("PASS", "FAIL", "NA"), ("yes", "no"), ("TRUST", "ABSTAIN")  # best first: the order in which (6) ranks
FORMAT = {
    "ante": "Before it two lines: note WHAT IS KNOWN, then expect PASS|FAIL|NA yes|no TRUST|ABSTAIN",
    "retrospective": "Before it a line: note WHAT IS KNOWN",
    "reactive": "",
}
_BELIEF = re.compile(r"\s*note(?P<summary>[^\n]*)\nexpect (?P<check>PASS|FAIL|NA) (?P<exit>yes|no) (?P<decision>TRUST|ABSTAIN)[ \t]*(?:\n|$)")
_BEGUN = re.compile(r"\s*note(?P<summary>[^\n]*)(?:\nexpect (?P<check>PASS|FAIL|NA)\b(?: (?P<exit>yes|no)\b(?: (?P<decision>TRUST|ABSTAIN)\b)?)?)?")
_NOTE = re.compile(r"\s*note(?P<summary>[^\n]*)(?:\n|$)")


class Belief(NamedTuple):
    """(1) What a message says beside its action. Malformed beliefs say (NA, no, ABSTAIN), and all of the message is executed; their spans are those of the
    parts that stand there, so that a token's factor does not depend on what follows it. Spans are character ranges of the message, (0, 0) where absent."""

    check: str
    exit: str
    decision: str
    summary: tuple[int, int]
    values: tuple[int, int]  # from the check's first to the exit's last character
    decided: tuple[int, int]
    action: str  # what the environment sees
    well_formed: bool


def parse_belief(text: str, kind: str) -> Belief:
    """kind: ante, retrospective or reactive. Only ante has a forecast; the others are well-formed when their action can be found."""
    if kind != "ante":
        m = _NOTE.match(text) if kind == "retrospective" else None
        return Belief("NA", "no", "ABSTAIN", (0, 0), (0, 0), (0, 0), text[m.end() :] if m else text, True)
    m = _BELIEF.match(text)
    found = m or _BEGUN.match(text)
    if found is None:
        return Belief("NA", "no", "ABSTAIN", (0, 0), (0, 0), (0, 0), text, False)
    values = (found.start("check"), found.end("exit" if found["exit"] else "check")) if found["check"] else (0, 0)
    spans = (0, found.end("summary") + 1), values, found.span("decision") if found["decision"] else (0, 0)
    return Belief(m["check"], m["exit"], m["decision"], *spans, text[m.end() :], True) if m else Belief("NA", "no", "ABSTAIN", *spans, text, False)


def render(kind: str, summary: str, check: str, exit: str, decision: str, action: str) -> str:
    """The message of a belief and an action."""
    note = f"note {summary}".rstrip() + "\n" if kind != "reactive" else ""
    return note + (f"expect {check} {exit} {decision}\n" if kind == "ante" else "") + action


def outcome(info: dict[str, Any]) -> tuple[str, str]:
    """(check, exit) that the verifier read off a step's run. Environments without these fields check nothing; invalid actions do not end cleanly."""
    return info.get("check", "NA"), info.get("exit", "no" if info.get("invalid") else "yes")


_new_states = itertools.count()


class BeliefEnv:
    """An environment for a policy that writes beliefs: the first message says how, and what is executed is the message without its belief."""

    def __init__(self, env: envs.Env, kind: str):
        self.env, self.kind = env, kind

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        return with_format(self.env.reset(task), self.kind)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.env.step(parse_belief(text, self.kind).action)

    def state_key(self) -> str:
        """What the environment's own says; without one, every state is new."""
        return self.env.state_key() if hasattr(self.env, "state_key") else f"state {next(_new_states)}"

    def close(self) -> None:
        self.env.close()


def with_format(messages: list[dict[str, str]], kind: str) -> list[dict[str, str]]:
    """The conversation with the belief's format in its system message."""
    if not FORMAT[kind]:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": FORMAT[kind]}, *messages]
    return [{"role": "system", "content": f"{messages[0]['content']}\n{FORMAT[kind]}"}, *messages[1:]]


# ------------------------------------------------------------------------------------------- (2) beliefs written in hindsight


def words_of(text: str) -> set[str]:
    """Words and numbers, whatever their case and, for verdicts, their ending."""
    words = set(re.findall(r"[a-z]+|\d+", text.casefold()))
    return {next((verdict for verdict in ("pass", "fail") if word in (verdict, f"{verdict}s", f"{verdict}es", f"{verdict}ed")), word) for word in words}


def leaks(summary: str, seen: str, result: str) -> bool:
    """(2) Whether a summary says what only the result to come could tell: a word of it that had not been seen before."""
    return bool(words_of(summary) & words_of(result) - words_of(seen))


def annotate(conversation: Sequence[dict[str, str]], results: Sequence[dict[str, Any]], kind: str) -> tuple[list[dict[str, str]], int]:
    """(2) The conversation with a belief before each of its actions, and how many summaries the filter dropped.

    results: per assistant message {"check", "exit"} of its run, and where there are "summary" and "knowable" (whether a reader of the history could
    know the result; without it: where no check ran).
    """
    out, seen, dropped, step = [], "", 0, iter(results)
    for message, after in zip(conversation, [*conversation[1:], {"content": ""}]):
        text = message["content"]
        if message["role"] == "assistant":
            r = next(step)
            summary = r.get("summary", "")
            if leaks(summary, seen, f"{after['content']} {r['check']}"):
                summary, dropped = "unsure", dropped + 1
            text = render(kind, summary, r["check"], r["exit"], "TRUST" if r.get("knowable", r["check"] == "NA") else "ABSTAIN", text)
        out.append({"role": message["role"], "content": text})
        seen += message["content"] + "\n"
    return with_format(out, kind), dropped


def results_of(tasks: envs.TaskSet, task: dict[str, Any], conversation: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """(2) What each action of a scripted conversation led to, for `annotate`, by executing it again."""
    if "faults" in task:  # a generated repository, whose repaired program is known
        return hindsight(task, conversation)
    env = tasks.make_env()
    env.reset(task)
    infos = [env.step(m["content"])[4] for m in conversation if m["role"] == "assistant"]
    env.close()
    return [dict(zip(("check", "exit"), outcome(info))) for info in infos]


def warm_start_conversations(tasks: envs.TaskSet, kind: str = "ante", seed: int = 0) -> list[list[dict]]:
    """(2) Annotated trajectories for the tiny policy, by the careless expert: whole episodes, every assistant message of which is trained on.

    Successful and failed ones: with successes alone it would have nothing left to learn from RL. All three kinds get the same trajectories.
    """
    rng = random.Random(seed)
    played = [(task, tasks.careless(task, rng)) for task in tasks.train for _ in range(3)]
    return [annotate(conversation, results_of(tasks, task, conversation), kind)[0] for task, conversation in played]


def successful_conversations(tasks: envs.TaskSet, kind: str, seed: int = 0) -> list[list[dict]]:
    """(2) Annotated successful trajectories, for fine-tuning a model that is not built from nothing."""
    if tasks.demonstrate is None:
        raise PolicyError("the warm start needs scripted demonstrations or --trajectories FILE; without either: --stage rl, or --sft-steps 0")
    rng = random.Random(seed)
    played = [(task, tasks.demonstrate(task, rng)) for task in tasks.train]
    return [annotate(conversation, results_of(tasks, task, conversation), kind)[0] for task, conversation in played]


# ------------------------------------------------------------------------------------------------- recorded trajectories


def read_trajectories(path: str, checks: Collection[str], exits: Collection[str]) -> tuple[list[tuple[list[dict], list[dict]]], dict[str, int]]:
    """The successful ones, as (messages, steps), and counts {"used", "failed"}. Raises DataError naming file, line and field.

    A line: {"messages": [{"role", "content"}, ...], "steps": [{"check", "exit", "summary", "knowable"}, ...], "success": 1}: a step per assistant message;
    summary (one line) and knowable (true or false) may be missing; a missing success counts as 1.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines would cut at separators inside of strings
    except (OSError, UnicodeDecodeError) as e:
        raise envs.DataError(f"{path}: cannot be read: {e}") from e
    out, counts = [], {"used": 0, "failed": 0}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            problem = _problem(row, checks, exits) if isinstance(row, dict) else "the line is no object; messages, steps and success are needed"
        except ValueError as e:
            raise envs.DataError(f"{path}, line {number}: not JSON: {e}") from e
        if problem:
            raise envs.DataError(f"{path}, line {number}: {problem}")
        counts["used" if row.get("success", 1) > 0 else "failed"] += 1
        if row.get("success", 1) > 0:
            out.append((row["messages"], row["steps"]))
    if not out:
        raise envs.DataError(f"{path}: no successful trajectory among {len(lines)} lines")
    return out, counts


def _problem(row: dict[str, Any], checks: Collection[str], exits: Collection[str]) -> str:
    """What is wrong with a record, or ""."""
    messages, steps, success = row.get("messages"), row.get("steps"), row.get("success", 1)
    if isinstance(success, str) or not isinstance(success, int | float):
        return f"field success: {success!r} is no number"
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return "field messages: a list of objects with role and content is needed"
    roles = [m.get("role") for m in messages]
    if set(roles) - {"system", "user", "assistant"}:
        return f"field messages: roles {sorted(map(str, set(roles) - {'system', 'user', 'assistant'}))}; choose system, user and assistant"
    if roles[-1] != "assistant" or "user" not in roles[: roles.index("assistant")]:
        return "field messages: they must begin with the task and end with the assistant"
    if any(a == b for a, b in itertools.pairwise(roles)):
        return "field messages: two of one role in a row; join them"
    if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps) or len(steps) != roles.count("assistant"):
        return (
            f"field steps: {len(steps) if isinstance(steps, list) else 'no list'} for {roles.count('assistant')} assistant messages; one object each is needed"
        )
    for i, s in enumerate(steps, 1):
        if s.get("check") not in checks or s.get("exit") not in exits:
            return f"field steps, step {i}: check {s.get('check')!r}, exit {s.get('exit')!r}; choose {', '.join(checks)} and {', '.join(exits)}"
        if not isinstance(s.get("summary", ""), str) or "\n" in s.get("summary", "") or not isinstance(s.get("knowable", True), bool):
            return f"field steps, step {i}: summary must be one line of text, knowable true or false"
    return ""
