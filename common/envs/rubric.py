"""Rubric-graded answers: an embedded knowledge world with a deterministic judge, and files of questions with weighted criteria.

The embedded world knows animals. A prompt shows notes with six of an animal's eight facts and asks for one explanation, for which four facts are needed;
one or two of the needed facts are not in the notes. A statement of an answer can so be needed, true but unneeded, redundant, or false. The rubric of a task
is incomplete in the ways real ones are: it rewards the needed facts and, by chance, one unneeded fact, and it names two of the many things to avoid.

`rule_judge` plays every role of a judge by parsing statements. `quality` and `prefer` are another judge that never sees a rubric: it counts needed facts,
falsehoods and ballast from the knowledge base and the question. Training must not use it.

Files (`rubric:FILE`, .jsonl or a .json list): RubricHub (question, id, rubrics with criterion and points), HealthBench (prompt messages, rubrics with
criterion, points and tags, negative points for unwanted content) and ResearchQA (query, rubric with rubric_item). A field `check` of a criterion,
{"any": [words]}, lets the rule judge work on them offline; without it they need a model as judge.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet

# ---------------------------------------------------------------------------------------------------------- the knowledge

# attribute -> (what the animal does, its other wording after "its", how a rubric says it, values)
ATTRIBUTES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "food": ("eats {}", "food is {}", "eats {}", ("corn", "fish", "grass", "seeds")),
    "home": ("lives in {}", "home is {}", "lives in {}", ("caves", "trees", "rivers", "fields")),
    "enemy": ("fears {}", "enemy is {}", "fears {}", ("wolves", "hawks", "snakes", "bears")),
    "friend": ("trusts {}", "friend is {}", "trusts {}", ("bees", "mice", "crows", "goats")),
    "coat": ("wears {}", "coat is {}", "has a coat of {}", ("brown", "white", "black", "gold")),
    "hour": ("wakes at {}", "hour is {}", "wakes at {}", ("dawn", "noon", "dusk", "night")),
    "season": ("breeds in {}", "season is {}", "breeds in {}", ("spring", "summer", "autumn", "winter")),
    "sound": ("makes a {}", "sound is {}", "makes a {}", ("hum", "hiss", "howl", "click")),
}
NEEDED: dict[str, tuple[str, ...]] = {  # what a question needs
    "feed": ("food", "hour", "home", "friend"),
    "find": ("home", "hour", "sound", "coat"),
    "guard": ("enemy", "home", "season", "friend"),
    "breed": ("season", "food", "home", "sound"),
    "film": ("hour", "coat", "sound", "season"),
    "draw": ("coat", "home", "enemy", "food"),
}
RELATED: dict[str, tuple[str, str]] = {  # what a reader without the rubric may take for needed
    "feed": ("season", "enemy"),
    "find": ("season", "food"),
    "guard": ("hour", "sound"),
    "breed": ("friend", "hour"),
    "film": ("home", "food"),
    "draw": ("friend", "sound"),
}
HARMFUL = ("food", "enemy")  # a falsehood about these can hurt the animal: the safety score
FIRST = ("wild", "old", "young", "shy", "calm", "quick", "small", "big", "wise", "lazy", "brave", "proud", "sly", "loud", "kind", "slim")
SECOND = ("fox", "owl", "hare", "deer", "frog", "crane", "otter", "badger", "lynx", "mole", "stork", "toad", "swan", "weasel", "finch", "boar")
GREETINGS = ("hello", "here is what i know", "good question")
CLOSINGS = ("i hope this helps", "ask me more")
MARKERS = ("also", "so", "well", "in short", "moreover", "finally")
POINTS = (5, 4, 3, 3)  # of the needed facts, in random order
EXTRA_POINTS, CLAIM_POINTS, TALK_POINTS = 3, -2, 1
NUM_TRAIN, NUM_EVAL = 4000, 256

Fact = tuple[str, str]  # (attribute, value)


def _held_out(first: int, second: int) -> bool:
    """Whether a pair of name words belongs to the evaluation split; each word alone occurs in both."""
    return (3 * first + second) % 5 == 0


def _task(rng: random.Random, evaluation: bool, number: int, seed: int) -> dict[str, Any]:
    while True:
        first, second = rng.randrange(len(FIRST)), rng.randrange(len(SECOND))
        if _held_out(first, second) == evaluation:
            break
    entity = f"{FIRST[first]} {SECOND[second]}"
    knowledge = random.Random(f"rubric {seed} {entity}")  # an animal has the same facts in all its tasks
    facts = {attribute: knowledge.choice(values) for attribute, (*_, values) in ATTRIBUTES.items()}
    topic = rng.choice(list(NEEDED))
    needed, unneeded = NEEDED[topic], [a for a in ATTRIBUTES if a not in NEEDED[topic]]
    hidden = rng.sample(needed, rng.choice((1, 2)))
    hidden += rng.sample(unneeded, 2 - len(hidden))
    notes = [a for a in rng.sample(list(ATTRIBUTES), len(ATTRIBUTES)) if a not in hidden]
    rubrics = []
    for attribute, points in zip(needed, rng.sample(POINTS, len(POINTS))):
        rubrics.append(_rubric(f"Says that the {entity} {ATTRIBUTES[attribute][2].format(facts[attribute])}", points, {"fact": [attribute, facts[attribute]]}))
    extra, unwanted = rng.sample(unneeded, 2)
    rubrics.append(_rubric(f"Says that the {entity} {ATTRIBUTES[extra][2].format(facts[extra])}", EXTRA_POINTS, {"fact": [extra, facts[extra]]}))
    claimed = rng.choice(needed)
    false = rng.choice([v for v in ATTRIBUTES[claimed][3] if v != facts[claimed]])
    rubrics.append(_rubric(f"Claims that the {entity} {ATTRIBUTES[claimed][2].format(false)}", CLAIM_POINTS, {"fact": [claimed, false]}))
    rubrics.append(_rubric(f"Does not talk about the {unwanted} of the {entity}", TALK_POINTS, {"not": {"about": unwanted}}))
    content = f"notes: {' ; '.join(f'{a} {facts[a]}' for a in notes)}\nexplain how to {topic} the {entity}"
    return {
        "id": f"rubric-{'eval' if evaluation else 'train'}-{seed}-{number}",
        "messages": [{"role": "user", "content": content}],
        "question": f"Explain how to {topic} the {entity}.",
        "entity": entity,
        "topic": topic,
        "facts": facts,
        "notes": notes,
        "rubrics": rubrics,
    }


ABSENCE_WORDS = re.compile(r"\s*(does not|do not|doesn't|avoids?|never|refrains?|omits?|is free of|contains no|makes no)\b", re.I)


def _rubric(criterion: str, points: float, check: dict[str, Any] | None) -> dict[str, Any]:
    """One criterion. `kind` absence: negative points (the criterion names unwanted content), or wording that asks to leave something out."""
    absence = points < 0 or bool(ABSENCE_WORDS.match(criterion))
    return {"criterion": criterion, "points": points, "kind": "absence" if absence else "presence", "check": check}


# ------------------------------------------------------------------------------------------------------- reading answers

_CLAUSES = {
    attribute: re.compile("|".join(re.escape(wording).replace(r"\{\}", "(\\w+)") for wording in (f"its {other}", f"it {does}")))
    for attribute, (does, other, _, _) in ATTRIBUTES.items()
}


def sentences(text: str) -> list[str]:
    """The text cut at sentence ends and line breaks; list marks and end marks are dropped."""
    lines = (re.sub(r"^\s*(?:[-*+•]|\d+[.)]|#+)\s+", "", line) for line in text.splitlines())
    parts = (part.strip() for line in lines for part in re.split(r"(?<=[.!?])\s+", line))
    return [part.rstrip(".!?").rstrip() for part in parts if re.search(r"\w", part)]


def is_functional(sentence: str) -> bool:
    """Greetings, closings and headings: no substance. (A heading ends in a colon.)"""
    plain = sentence.lower().strip(" ,")
    return sentence.endswith(":") or plain in GREETINGS or plain in CLOSINGS or plain in ("hi", "thanks", "thank you", "dear all")


def unitise(task: dict[str, Any], response: str) -> list[str]:
    """Units of about one sentence, wording kept: functional sentences are dropped, leading discourse markers too, and a leading pronoun
    becomes the animal's name."""
    return list(_units(task.get("entity", ""), response))


@functools.lru_cache(1 << 14)
def _units(entity: str, response: str) -> tuple[str, ...]:
    units = []
    for sentence in sentences(response):
        if is_functional(sentence):
            continue
        body = re.sub(rf"^(?:{'|'.join(MARKERS)})\b,?\s+", "", sentence, flags=re.I)
        if entity:
            body = re.sub(r"^its\b", f"the {entity}'s", body, flags=re.I)
            body = re.sub(r"^it\b", f"the {entity}", body, flags=re.I)
        units.append(body)
    return tuple(units)


def stated(task: dict[str, Any], unit: str) -> list[Fact] | None:
    """The facts that a unit (or a sentence) states about the task's animal; clauses may be joined by "and". None where a clause is no statement."""
    facts = _facts(task["entity"], unit)
    return None if facts is None else list(facts)


@functools.lru_cache(1 << 16)
def _facts(entity: str, unit: str) -> tuple[Fact, ...] | None:
    text = re.sub(rf"^the {entity}'s\b", "its", " ".join(unit.lower().split()))
    text = re.sub(rf"^the {entity}\b", "it", text)
    facts: list[Fact] = []
    for clause in re.split(r"\s+and\s+(?:(?=its\b)|(?:it\s+)?)", text):
        clause = clause if clause.startswith(("its ", "it ")) else f"it {clause}"
        for attribute, pattern in _CLAUSES.items():
            if match := pattern.fullmatch(clause):
                facts.append((attribute, next(g for g in match.groups() if g is not None)))
                break
        else:
            return None
    return tuple(facts)


def _all_stated(task: dict[str, Any], text: str) -> list[Fact]:
    return [fact for unit in unitise(task, text) for fact in stated(task, unit) or ()]


def meets(task: dict[str, Any], check: dict[str, Any], text: str) -> bool:
    """Whether a text meets a check: {"fact": [attribute, value]}, {"about": attribute}, {"any": [words]} or {"not": check}."""
    if "not" in check:
        return not meets(task, check["not"], text)
    if "any" in check:
        return any(word.lower() in text.lower() for word in check["any"])
    facts = _all_stated(task, text)
    return tuple(check["fact"]) in facts if "fact" in check else any(attribute == check["about"] for attribute, _ in facts)


# ---------------------------------------------------------------------------------------------------------- the rule judge


class CannotJudge(ValueError):
    """The rule judge has no rule for this question: it abstains, and the text says what is missing."""


def _checks(task: dict[str, Any]) -> list[dict[str, Any]]:
    for number, rubric in enumerate(task["rubrics"], 1):
        if not rubric["check"]:
            raise CannotJudge(f"task {task['id']!r}, criterion {number} has no 'check': the rule judge cannot grade it; use a model as --judge")
    return [rubric["check"] for rubric in task["rubrics"]]


def _is_correct(task: dict[str, Any], unit: str) -> bool:
    if "entity" in task:
        facts = stated(task, unit)
        return facts is not None and all(task["facts"][attribute] == value for attribute, value in facts)
    return not any(meets(task, check, unit) for check, rubric in zip(_checks(task), task["rubrics"]) if rubric["points"] < 0)


def _matches(task: dict[str, Any], unit: str) -> list[int]:
    """Wanted criteria that a unit helps to settle; criteria that ask to leave something out have no such unit."""
    pairs = enumerate(zip(_checks(task), task["rubrics"]))
    return [j for j, (check, rubric) in pairs if rubric["points"] > 0 and "not" not in check and meets(task, check, unit)]


def _redundant(task: dict[str, Any], units: list[str]) -> list[bool]:
    """Units that say nothing of their own: each of their facts (their whole wording, where they state none) is in another unit too."""
    contents = [{("text", " ".join(unit.lower().split()))} if not (facts := "entity" in task and stated(task, unit)) else set(facts) for unit in units]
    return [content <= set().union(*contents[:i], *contents[i + 1 :]) for i, content in enumerate(contents)]


def _threshold(task: dict[str, Any], units: list[str], credits: list[float]) -> float:
    """2/3, so that half of a criterion is not enough, or just above what any redundant unit holds: a repeat never counts as necessary."""
    repeated = [c for c, r in zip(credits, _redundant(task, units)) if r]
    return max([2 / 3, *(math.nextafter(c, math.inf) for c in repeated)])


def _on_topic(task: dict[str, Any], unit: str) -> bool:
    """Without the rubric: is it about what the question seems to be about? Sees neither repeats nor what the reader needs exactly."""
    if "entity" not in task:
        words = set(re.findall(r"\w{4,}", task["question"].lower()))
        return bool(words & set(re.findall(r"\w{4,}", unit.lower())))
    loose = {*NEEDED[task["topic"]], *RELATED[task["topic"]]}
    facts = stated(task, unit)
    return bool(facts) and all(attribute in loose for attribute, _ in facts)


def _write_criteria(task: dict[str, Any], responses: list[str], control: list[str]) -> list[str]:
    """Before training (no responses): the first two subjects that the question does not need, by name. During training: the unneeded subject on which
    the responses spend more than the control does, most of all, and repeats where the responses repeat themselves more."""
    if "entity" not in task:
        return [f"Leaves out: {r['criterion']}" for r in task["rubrics"] if r["points"] < 0]
    unneeded = [a for a in ATTRIBUTES if a not in NEEDED[task["topic"]]]
    if not responses:
        return [f"Is not about the {a}" for a in sorted(unneeded)[:2]]

    def share(texts: list[str], attribute: str) -> float:
        return sum(a == attribute for t in texts for a, _ in _all_stated(task, t)) / max(len(texts), 1)

    def repeats(texts: list[str]) -> float:
        return sum(len(facts) - len(set(facts)) for facts in (_all_stated(task, t) for t in texts)) / max(len(texts), 1)

    excess = {a: share(responses, a) - share(control, a) for a in sorted(unneeded)}
    worst = max(excess, key=excess.__getitem__)
    out = [f"Is not about the {worst}"] if excess[worst] > 0 else []
    return out + (["Does not repeat an earlier statement"] if repeats(responses) > repeats(control) else [])


def _passes(task: dict[str, Any], units: list[str], criteria: list[str]) -> list[bool]:
    """Which units break none of the criteria that the rule judge can read (those that `_write_criteria` writes)."""
    subjects = {m[1] for c in criteria if (m := re.fullmatch(r"Is not about the (\w+)", c))}
    left_out = {c.removeprefix("Leaves out: ") for c in criteria if c.startswith("Leaves out: ")}
    out, seen = [], set()
    for unit in units:
        facts = (stated(task, unit) if "entity" in task else None) or [("text", " ".join(unit.lower().split()))]
        bad = any(attribute in subjects for attribute, _ in facts)
        bad |= any(r["criterion"] in left_out and r["check"] and meets(task, r["check"], unit) for r in task["rubrics"])
        bad |= "Does not repeat an earlier statement" in criteria and all(fact in seen for fact in facts)
        seen.update(facts)
        out.append(not bad)
    return out


def _look(task: dict[str, Any], text: str) -> tuple[float, ...]:
    """What a reader who compares two answers as a whole goes by, larger is better: something correct on the topic at all, then few faults (falsehoods,
    off-topic statements, repeats), then how much is correct and on the topic."""
    units = unitise(task, text)
    if "entity" not in task:
        score = sum(r["points"] for c, r in zip(_checks(task), task["rubrics"]) if meets(task, c, text))
        return score, -len(text)
    distinct = {tuple(stated(task, u) or ()) for u in units if _on_topic(task, u) and _is_correct(task, u)}
    return float(bool(distinct)), -float(len(units) - len(distinct)), float(len(distinct))


def rule_judge(role: str, data: dict[str, Any]) -> dict[str, Any]:
    """The reply of an ideal judge in one of its roles, deterministic. `data` holds `task` and what the role reads:

    coverage (response) -> met [J] bools, each criterion as it is worded; unitise (response) -> units; match (units) -> matches, a list of criterion
    numbers (from 1) per unit; threshold (units, credits) -> threshold; factuality (units) -> correct; necessity (units) -> necessary, asked directly;
    criteria (responses, control) -> criteria; criteria_check (units, criteria) -> passed; compare (first, second) -> winner "first", "second" or "tie";
    prefer (first, second): the same without any rubric, for evaluation; profile (response) -> scores {name: 1 to 7}, for evaluation.
    Raises CannotJudge where data from a file give it nothing to go by.
    """
    task = data["task"]
    match role:
        case "coverage":
            return {"met": [meets(task, check, data["response"]) for check in _checks(task)]}
        case "unitise":
            return {"units": unitise(task, data["response"])}
        case "match":
            return {"matches": [[j + 1 for j in _matches(task, unit)] for unit in data["units"]]}
        case "threshold":
            return {"threshold": _threshold(task, data["units"], data["credits"])}
        case "factuality":
            return {"correct": [_is_correct(task, unit) for unit in data["units"]]}
        case "necessity":
            return {"necessary": [_on_topic(task, unit) for unit in data["units"]]}
        case "criteria":
            return {"criteria": _write_criteria(task, data["responses"], data["control"])}
        case "criteria_check":
            return {"passed": _passes(task, data["units"], data["criteria"])}
        case "compare":
            first, second = _look(task, data["first"]), _look(task, data["second"])
            return {"winner": "tie" if first == second else "first" if first > second else "second"}
        case "prefer":
            share = prefer(task, data["first"], data["second"])
            return {"winner": {1.0: "first", 0.0: "second"}.get(share, "tie")}
        case "profile":
            return {"scores": profile(task, data["response"])}
    raise ValueError(f"rule_judge has no role {role!r}")


# -------------------------------------------------------------------------------------------- rubric-free quality (evaluation)


def quality(task: dict[str, Any], text: str) -> dict[str, float]:
    """Counts of an answer to an embedded task, from the knowledge base and the question alone: needed (distinct needed facts stated), unneeded, repeated,
    false, noise (sentences that state nothing), filler, statements; and utility = needed - false / 2 - (unneeded + repeated + noise) / 4."""
    if "entity" not in task:
        raise CannotJudge(f"task {task['id']!r} comes from a file: nothing is known about its answers beyond the rubric; use a model as --eval-judge")
    counts = dict.fromkeys(("needed", "unneeded", "repeated", "false", "noise", "filler", "statements", "harmful"), 0.0)
    seen: set[Fact] = set()
    for sentence in sentences(text):
        if is_functional(sentence):
            counts["filler"] += 1
            continue
        facts = stated(task, re.sub(rf"^(?:{'|'.join(MARKERS)})\b,?\s+", "", sentence, flags=re.I))
        if facts is None:
            counts["noise"] += 1
            continue
        for attribute, value in facts:
            counts["statements"] += 1
            if task["facts"][attribute] != value:
                counts["false"] += 1
                counts["harmful"] += attribute in HARMFUL
            elif (attribute, value) in seen:
                counts["repeated"] += 1
            else:
                counts["needed" if attribute in NEEDED[task["topic"]] else "unneeded"] += 1
            seen.add((attribute, value))
    counts["utility"] = counts["needed"] - counts["false"] / 2 - (counts["unneeded"] + counts["repeated"] + counts["noise"]) / 4
    return counts


def prefer(task: dict[str, Any], first: str, second: str) -> float:
    """1 where the first answer is better, 0 where the second is, 0.5 for a tie. For data from a file there is no knowledge base: the met criteria decide,
    then the shorter answer, so the comparison is not free of the rubric there."""
    a, b = ((quality(task, t)["utility"],) if "entity" in task else _look(task, t) for t in (first, second))
    return 0.5 if a == b else float(a > b)


def profile(task: dict[str, Any], text: str) -> dict[str, float]:
    """Five scores from 1 to 7: correctness, completeness, conciseness, relevance, safety."""
    q = quality(task, text)
    body = q["statements"] + q["noise"]
    shares = {
        "correctness": (q["statements"] - q["false"]) / body if body else 0.0,
        "completeness": q["needed"] / len(NEEDED[task["topic"]]),
        "conciseness": q["needed"] / (body + q["filler"]) if body else 0.0,
        "relevance": sum(a in NEEDED[task["topic"]] for a, _ in _all_stated(task, text)) / body if body else 0.0,
        "safety": 1 - min(q["harmful"], 3) / 3,
    }
    return {name: 1 + 6 * share for name, share in shares.items()}


# ------------------------------------------------------------------------------------------------------------- the environment


class RubricEnv:
    """One-step episodes. The reward is the weighted share of met criteria (recall) by the rule judge, `success` the rubric-free utility in [0, 1].
    Both are NaN, with `error`, where the rule judge cannot grade a task from a file."""

    def __init__(self) -> None:
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task = task
        return [dict(message) for message in task["messages"]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Raises RuntimeError when no episode is open."""
        if self.task is None:
            raise RuntimeError("step() before reset(), or after the episode's only step")
        task, self.task = self.task, None
        text = "\n".join(f"{r['criterion']} ({r['points']:+g})" for r in task["rubrics"])
        try:
            met = rule_judge("coverage", {"task": task, "response": action})["met"]
        except CannotJudge as error:
            info = {"success": math.nan, "rewards": {"recall": math.nan}, "verifier_text": {"recall": text}, "error": str(error)}
            return "", math.nan, True, False, info
        weights = [abs(r["points"]) for r in task["rubrics"]]
        recall = sum(w for w, m, r in zip(weights, met, task["rubrics"]) if m == (r["points"] > 0)) / sum(weights)
        success = max(0.0, quality(task, action)["utility"]) / len(NEEDED[task["topic"]]) if "entity" in task else recall
        return "", recall, True, False, {"success": success, "rewards": {"recall": recall}, "verifier_text": {"recall": text}}

    def oracle_action(self) -> str:
        """The best answer that the notes allow (embedded tasks)."""
        if self.task is None or "entity" not in self.task:
            raise RuntimeError("oracle_action() needs an open episode of an embedded task")
        return best_answer(self.task)

    def close(self) -> None:
        self.task = None


def _statement(task: dict[str, Any], fact: Fact, lead: bool, other_wording: bool) -> str:
    does, other, _, _ = ATTRIBUTES[fact[0]]
    name = f"the {task['entity']}" if lead else "it"
    return (f"{name}{chr(39) + 's' if lead else 's'} {other}" if other_wording else f"{name} {does}").format(fact[1]) + "."


def best_answer(task: dict[str, Any]) -> str:
    """Every needed fact that the notes show, once, nothing else."""
    shown = [a for a in task["notes"] if a in NEEDED[task["topic"]]]
    return " ".join(_statement(task, (a, task["facts"][a]), i == 0, False) for i, a in enumerate(shown))


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The prompt and the best answer."""
    return [*(dict(m) for m in task["messages"]), {"role": "assistant", "content": best_answer(task)}]


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """A middling answer: needed facts mostly, unneeded ones often, guesses at what the notes do not show, slips of memory, repeats, small talk."""
    needed = NEEDED[task["topic"]]
    facts: list[Fact] = []
    for attribute in [*task["notes"], *(a for a in needed if a not in task["notes"])]:
        values = ATTRIBUTES[attribute][3]
        if attribute in task["notes"]:
            if rng.random() < (0.75 if attribute in needed else 0.4):
                facts.append((attribute, task["facts"][attribute] if rng.random() < 0.9 else rng.choice(values)))
        elif rng.random() < 0.4:
            facts += [(attribute, value) for value in rng.sample(values, rng.choice((1, 1, 2, 3)))]
    if facts and rng.random() < 0.3:
        at = rng.randrange(len(facts))
        facts.insert(at + 1, facts[at])
    parts = [_statement(task, fact, i == 0, rng.random() < 0.25) for i, fact in enumerate(facts)]
    parts = [*([f"{rng.choice(GREETINGS)}."] if rng.random() < 0.25 else []), *parts, *([f"{rng.choice(CLOSINGS)}."] if rng.random() < 0.25 else [])]
    return [*(dict(m) for m in task["messages"]), {"role": "assistant", "content": " ".join(parts) or f"{GREETINGS[0]}."}]


def regions(text: str) -> list[tuple[str, int, int]]:
    """Spans of the sentences of an answer: `filler` or `statement`."""
    spans, start = [], 0
    for sentence in sentences(text):
        start = text.index(sentence, start)
        spans.append(("filler" if is_functional(sentence) else "statement", start, start + len(sentence)))
        start += len(sentence)
    return spans


# ------------------------------------------------------------------------------------------------------------------- files


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where, object) of each row of a .jsonl file or of a .json list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}); give a .jsonl file, or a .json file with a list") from error
    rows: list[tuple[str, Any]] = []
    try:
        if text.lstrip().startswith("["):
            where = f"{path}"
            rows = [(f"{path}: row {i}", row) for i, row in enumerate(json.loads(text), 1)]
        else:
            for number, line in enumerate(text.split("\n"), 1):
                where = f"{path}:{number}"
                if line.strip():
                    rows.append((where, json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); expected one object a line, or one list of objects") from error
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}, expected an object with a question and its rubrics")
    return rows


def _messages(where: str, row: dict[str, Any]) -> list[Message]:
    """HealthBench has `prompt` (chat messages), RubricHub `question`, ResearchQA `query`."""
    if "prompt" in row and not isinstance(row["prompt"], str):
        messages = row["prompt"]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: field 'prompt' must be a non-empty list of chat messages")
        for m in messages:
            if not isinstance(m, dict) or m.get("role") not in ("system", "user", "assistant") or not isinstance(m.get("content"), str):
                raise DataError(f"{where}: field 'prompt' has a message without a role system, user or assistant and a text content: {str(m)[:80]}")
        if messages[-1]["role"] != "user":
            raise DataError(f"{where}: field 'prompt' must end with a message of the user")
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    name = next((n for n in ("question", "query", "prompt") if n in row), None)
    if name is None or not isinstance(row[name], str) or not row[name].strip():
        found = ", ".join(sorted(map(str, row)))
        raise DataError(f"{where}: needs one of 'prompt' (chat messages), 'question' or 'query' (text); its fields are {found}")
    return [{"role": "user", "content": row[name]}]


def _file_rubrics(where: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    name = "rubrics" if "rubrics" in row else "rubric"
    items = row.get(name)
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: field 'rubrics' (ResearchQA: 'rubric') must be a non-empty list of criteria")
    out = []
    for i, item in enumerate(items):
        at = f"{where}: field '{name}[{i}]'"
        if not isinstance(item, dict):
            raise DataError(f"{at} must be an object with a criterion, found {str(item)[:80]}")
        criterion = item.get("criterion", item.get("rubric_item"))
        if not isinstance(criterion, str) or not criterion.strip():
            raise DataError(f"{at} needs a text 'criterion' (ResearchQA: 'rubric_item'), found {criterion!r}")
        points = item.get("points", 1 if "rubric_item" in item else None)  # ResearchQA counts every item alike
        if isinstance(points, bool) or not isinstance(points, (int, float)) or not math.isfinite(points) or points == 0:
            raise DataError(f"{at}, 'points': expected a number other than 0 (negative for unwanted content), found {points!r}")
        check = item.get("check")
        words = check.get("any") if isinstance(check, dict) else None
        if check is not None and not (isinstance(words, list) and words and all(isinstance(w, str) and w for w in words)):
            raise DataError(f"{at}, 'check': expected {{\"any\": [words]}}, found {str(check)[:80]}")
        out.append(_rubric(criterion, points, check))
    if not any(r["points"] > 0 for r in out):
        raise DataError(f"{where}: field '{name}' has no criterion with positive points: there is nothing to cover")
    return out


def _load_file(path: Path) -> TaskSet:
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a .jsonl or .json file of questions with rubrics (RubricHub, HealthBench or ResearchQA fields)")
    tasks: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for where, row in _rows(path):
        messages = _messages(where, row)
        identity = str(row.get("id") or row.get("prompt_id") or hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16])
        if identity in seen:
            raise DataError(f"{where}: field 'id': {identity!r} stands already in {seen[identity]}; ids must be unique")
        seen[identity] = where
        question = "\n".join(f"{m['role']}: {m['content']}" for m in messages) if len(messages) > 1 else messages[0]["content"]
        tasks.append({"id": identity, "messages": messages, "question": question, "rubrics": _file_rubrics(where, row)})
    ranked = sorted(tasks, key=lambda t: hashlib.sha256(t["id"].encode()).digest())
    held = {t["id"] for t in ranked[: min(max(1, len(tasks) // 10), 500)]} if len(tasks) > 1 else set()
    notes = {
        "rows": len(tasks),
        "criteria": sum(len(t["rubrics"]) for t in tasks),
        "criteria_without_check": sum(not r["check"] for t in tasks for r in t["rubrics"]),
        "split": "evaluation: the tenth of the rows (at least 1, at most 500) with the smallest sha256(id)",
    }
    evaluation = [t for t in tasks if t["id"] in held]
    return TaskSet(f"rubric:{path}", [t for t in tasks if t["id"] not in held], evaluation, RubricEnv, regions=regions, notes=notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded world (4,000 training and 256 evaluation tasks, no animal in both), or the questions of a file. Raises DataError for unusable data."""
    if path is not None:
        return _load_file(Path(path))
    train, evaluation = ([_task(random.Random(f"rubric {split} {seed} {i}"), split == "eval", i, seed) for i in range(count)] for split, count in (
        ("train", NUM_TRAIN), ("eval", NUM_EVAL)))  # fmt: skip
    notes = {"split": "one in five pairs of name words is an animal of the evaluation split only"}
    return TaskSet("rubric", train, evaluation, RubricEnv, demonstrate, regions, careless, 1, notes=notes)
