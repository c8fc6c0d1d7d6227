"""Scores of edits, the embedded judges, and the questions to a model as judge, for the editing environment. Documentation: docs/editing.md.

The outcome is R = w_det R_det + w_ref R_ref + w_blind R_blind (`WEIGHTS`): a deterministic verifier, a judge that compares with the reference edit, and a judge
that sees the edit alone. The process judge grades turns by what they look like: it sees texts and observations, never the reference or a score. It likes
material that was looked at, edits that fit what was seen, words and second thoughts, and it does not count how often. That is useful for learning to edit with
care, and it pays as much for looking once more as for anything else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from common.envs.editing_films import ENDS, HOURS, JOINS, LEVEL, STEP, STORY, check_join, check_sound, check_span, describe
from common.judges import Request, fence, object_schema

LOOKING = ("list", "look", "play", "render")
TOOLS = {  # verbs of a family; JSON of `write` and `submit` are everybody's
    "CS": ("list", "look", "play", "take", "drop", "write", "submit"),
    "NS": ("list", "look", "play", "add", "drop", "write", "submit"),
    "RC": ("list", "look", "play", "trim", "write", "submit"),
    "FC": ("list", "look", "play", "gain", "music", "join", "write", "render", "submit"),
}
VERBS = tuple(dict.fromkeys(verb for verbs in TOOLS.values() for verb in verbs))
REFLECTION = re.compile(r"\b(?:wait|hmm|reconsider|re-?think|on second thought|my mistake|i was wrong|(?:check|look) again|double[- ]check)\b", re.I)
GAIN_NEAR, MUSIC_NEAR, JOIN_NEAR, SPAN_NEAR = 1.5, 3.0, 0.5, 0.5  # dB, dB, seconds, seconds: as good as the reference's [deduced]
SHORTEST = 1.0  # seconds; a blind judge calls a shorter shot a flash frame
# what the process judge's rule gives a turn, before noise
INVALID, UNSEEN, UNFIT, FIT, LOOK, SUBMIT, BLIND, THOUGHT, SECOND_THOUGHT = 0.0, 0.1, 0.4, 0.8, 0.8, 0.5, 0.0, 0.1, 0.2
ABSTAINS = 0.03
VOTES = 3


def parse(text: str) -> tuple[str, list[list[str]]]:
    """(thought, calls) of a response: the calls are its last lines, as many as start with a verb; each is [verb, the rest of the line]."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    first = len(lines)
    while first and lines[first - 1].split()[0] in VERBS:
        first -= 1
    return "\n".join(lines[:first]), [[*line.split(maxsplit=1), ""][:2] for line in lines[first:]]


# -------------------------------------------------------------------------------------------------------------- edits


def start_edit(task: dict[str, Any]) -> dict[str, Any]:
    """The state that an episode starts from; the structure of edit.json."""
    return {"CS": {"select": []}, "NS": {"order": []}, "RC": {"spans": {}}, "FC": {"sound": {}, "joins": {}}}[task["family"]]


EXAMPLES = {
    "CS": {"select": ["s01", "s07"]},
    "NS": {"order": ["s07", "s01"]},
    "RC": {"spans": {"s01": [0.5, 3.0]}},
    "FC": {"sound": {"s01": {"gain": -4, "music": -20}}, "joins": {"s01": {"type": "lcut", "seconds": 0.8}}},
}


def check_edit(task: dict[str, Any], edit: Any) -> str:
    """ "" for an edit that can be scored, else what is malformed. Shots that an edit does not speak of are left as they were."""
    wanted = start_edit(task)
    if not isinstance(edit, dict) or set(edit) != set(wanted):
        return f"edit.json must be an object with {' and '.join(wanted)} only"
    shots, material = task["shots"], task["material"]
    for name, value in edit.items():
        if not isinstance(value, type(wanted[name])):
            return f"{name} must be {'a list' if isinstance(wanted[name], list) else 'an object'}"
        keys = [key for key in value if key is not None] if name == "order" else list(value)  # null in an order: an empty place
        for key in keys:
            if key not in shots:
                return f"{name}: no shot {str(key)[:40]!r}"
        if isinstance(value, list):
            if len(set(keys)) < len(keys) or len(value) > len(shots):
                return f"{name}: a shot twice" if len(set(keys)) < len(keys) else f"{name}: more than {len(shots)} places"
            continue
        for key, row in value.items():
            if name == "spans":
                problem = check_span(row, material[key]["duration"])
            elif name == "sound":
                problem = check_sound(row)
            else:
                problem = check_join(row) if key != shots[-1] else "the last shot has no transition after it"
            if problem:
                return f"{name}.{key}: {problem}"
    return ""


def is_place(task: dict[str, Any], words: list[str]) -> bool:
    """Whether the words after a shot name a place of an order: none, or one from 1 to the number of shots."""
    return not words or (len(words) == 1 and words[0] in map(str, range(1, len(task["shots"]) + 1)))


def put(order: Sequence[str | None], key: str, place: int | None) -> list[str | None]:
    """An order with a shot at a place (from 1; what was there is out), or, without a place, behind the last one. A shot that was elsewhere leaves that place
    empty."""
    order = [None if k == key else k for k in order]
    while order and order[-1] is None:
        order.pop()
    place = len(order) + 1 if place is None else place
    order += [None] * (place - len(order))
    order[place - 1] = key
    return order


def span_of(task: dict[str, Any], edit: dict[str, Any], key: str) -> tuple[float, float]:
    start, stop = edit["spans"].get(key, (0.0, task["material"][key]["duration"]))
    return float(start), float(stop)


def sound_of(edit: dict[str, Any], key: str) -> tuple[float, float | None]:
    row = edit["sound"].get(key, {})
    return float(row.get("gain", 0.0)), row.get("music")


def join_of(edit: dict[str, Any], key: str) -> tuple[str, float]:
    row = edit["joins"].get(key, {"type": "cut"})
    return row["type"], float(row.get("seconds", JOINS[row["type"]]))


def number(word: str) -> float | None:
    """A finite decimal number in plain notation, else None."""
    return float(word) if re.fullmatch(r"[+-]?\d{1,6}(\.\d{1,6})?", word, re.ASCII) else None


def read_edit(text: str) -> tuple[Any, str]:
    """(the JSON value, "") or (None, what is wrong); NaN and infinities are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse), ""
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, f"not JSON ({error})"


# ------------------------------------------------------------------------------------------------------------- scorers


def f1(chosen: Sequence[str], true: Sequence[str]) -> float:
    """F1 of two sets; 0 where they share nothing."""
    hits = len(set(chosen) & set(true))
    return 2 * hits / (len(set(chosen)) + len(set(true))) if hits else 0.0


def order_score(order: Sequence[str | None], true: Sequence[str]) -> float:
    """0.5 max(0, (C - D) / P) + 0.5 A [deduced]: C and D count the pairs of placed shots in the right and in the wrong order, P all pairs of the reference
    (Kendall's tau when every shot is placed), A is the share of the reference's n - 1 neighbours that follow each other. Shots left out earn nothing."""
    rank = {key: i for i, key in enumerate(true)}
    ranks = [rank[key] for key in order if key is not None]
    pairs = len(true) * (len(true) - 1) // 2
    agree = sum((a < b) - (a > b) for i, a in enumerate(ranks) for b in ranks[i + 1 :])
    neighbours = sum(b == a + 1 for a, b in itertools.pairwise(ranks))
    return 0.5 * max(0.0, agree / pairs) + 0.5 * neighbours / (len(true) - 1)


def cut_scores(task: dict[str, Any], edit: dict[str, Any]) -> dict[str, float]:
    """det: half duration, max(0, 1 - |total - target| / target), half overlap, the mean over shots of intersection over union of the kept span with the
    reference's. ref: share of shots whose in and out are both within half a second of the reference's. blind: mean of three shares: total within a tenth of
    the target, shots of at least a second, shots whose in and out are the edges of a part (where parts are known). An edit that touches nothing has blind 0.
    """
    true, total, overlap, near, long, clean = task["true"]["spans"], 0.0, 0.0, 0, 0, 0
    for key, (a, b) in true.items():
        start, stop = span_of(task, edit, key)
        total += stop - start
        overlap += max(0.0, min(b, stop) - max(a, start)) / (max(b, stop) - min(a, start))
        near += abs(start - a) <= SPAN_NEAR and abs(stop - b) <= SPAN_NEAR
        long += stop - start >= SHORTEST
        parts = task["material"][key].get("parts", [])
        clean += not parts or any(abs(start - p["in"]) <= SPAN_NEAR and abs(stop - p["out"]) <= SPAN_NEAR for p in parts)
    off, n = abs(total - task["brief"]["target"]) / task["brief"]["target"], len(true)
    blind = ((off <= 0.1) + long / n + clean / n) / 3 if edit["spans"] else 0.0
    return {"det": 0.5 * max(0.0, 1 - off) + 0.5 * overlap / n, "ref": near / n, "blind": blind}


def gained(matches: float, untouched: float, total: float) -> float:
    """What an edit adds to the rough cut: 0 for one that leaves it as it was (or makes it worse), 1 where everything is right."""
    if total == untouched:
        return max(0.0, 1 - (total - matches) / max(total, 1))
    return max(0.0, (matches - untouched) / (total - untouched))


def _right_sound(task: dict[str, Any], edit: dict[str, Any]) -> int:
    """How many decisions (a gain for each shot, music where the brief has it, a transition between shots) are as in the reference."""
    right = 0
    for key in task["shots"]:
        (gain, music), (true_gain, true_music) = sound_of(edit, key), sound_of(task["true"], key)
        right += abs(gain - true_gain) <= GAIN_NEAR
        if task["brief"].get("music") is not None:
            right += music == true_music if music is None or true_music is None else abs(music - true_music) <= MUSIC_NEAR
    for key in task["shots"][:-1]:
        (kind, seconds), (true_kind, true_seconds) = join_of(edit, key), join_of(task["true"], key)
        right += kind == true_kind and abs(seconds - true_seconds) <= JOIN_NEAR
    return right


def _heard(task: dict[str, Any], edit: dict[str, Any]) -> tuple[float, int]:
    """(mean distance of the shots' loudness from the brief's level in dB, transitions and music that fit how each shot ends), without the reference."""
    shots, material, fit = task["shots"], task["material"], 0
    off = sum(abs(material[key]["loudness"] + sound_of(edit, key)[0] - task["brief"]["level"]) for key in shots) / len(shots)
    for i, key in enumerate(shots):
        ends = material[key].get("ends", "run")
        fit += i < len(shots) - 1 and join_of(edit, key)[0] == ENDS[ends]
        fit += task["brief"].get("music") is not None and (sound_of(edit, key)[1] is None) == (ends == "talk")
    return off, fit


def fine_scores(task: dict[str, Any], edit: dict[str, Any]) -> dict[str, float]:
    """What a fine cut adds to the rough cut (`gained`). ref: decisions as in the reference. blind: half evenness, 1 - the mean distance from the brief's level
    over the rough cut's own, half transitions and music that fit how the shots end."""
    rough, n = start_edit(task), len(task["shots"])
    music = task["brief"].get("music") is not None
    ref = gained(_right_sound(task, edit), _right_sound(task, rough), n + n * music + n - 1)
    (off, fit), (off_rough, fit_rough) = _heard(task, edit), _heard(task, rough)
    even = max(0.0, 1 - off / off_rough) if off_rough else float(off == 0)
    return {"det": math.nan, "ref": ref, "blind": 0.5 * even + 0.5 * gained(fit, fit_rough, n - 1 + n * music)}


def parts_of_score(task: dict[str, Any], edit: dict[str, Any]) -> dict[str, float]:
    """{"det", "ref", "blind"} of an edit that is not malformed, by the verifier and the rule judges; NaN for a part that the family does not have."""
    if task["family"] == "CS":
        return {"det": f1(edit["select"], task["true"]["select"]), "ref": math.nan, "blind": math.nan}
    if task["family"] == "NS":
        return {"det": order_score(edit["order"], task["true"]["order"]), "ref": math.nan, "blind": math.nan}
    return cut_scores(task, edit) if task["family"] == "RC" else fine_scores(task, edit)


def outcome(task: dict[str, Any], parts: dict[str, float | None]) -> float:
    """R = w_det R_det + w_ref R_ref + w_blind R_blind; NaN where a part that has weight is missing (None or NaN)."""
    return float(sum(w * (math.nan if parts.get(name) is None else parts[name]) for name, w in task["weights"].items() if w))


def distance(task: dict[str, Any], edit: dict[str, Any]) -> float:
    """How far an edit is from the reference, finer than the score, so that each turn can be said to move towards it or away from it.

    CS: shots in one selection only. NS: 1 for an empty place, 2 for a wrong one. RC: seconds by which in and out points are off. FC: dB / 6 of gain, 1 for
    music on or off wrongly (dB / 20 else), 1 for a transition not made and 1.5 for a wrong one.
    """
    true = task["true"]
    if task["family"] == "CS":
        return float(len(set(edit["select"]) ^ set(true["select"])))
    if task["family"] == "NS":
        placed = list(edit["order"])
        placed += [None] * (len(true["order"]) - len(placed))
        return float(sum(1 if got is None else 0 if got == key else 2 for got, key in zip(placed, true["order"])))
    if task["family"] == "RC":
        return sum(abs(x - y) for key in true["spans"] for x, y in zip(span_of(task, edit, key), true["spans"][key]))
    total = 0.0
    for key in task["shots"]:
        (gain, music), (true_gain, true_music) = sound_of(edit, key), sound_of(true, key)
        total += abs(gain - true_gain) / 6
        total += float(music != true_music) if music is None or true_music is None else abs(music - true_music) / 20
    for key in task["shots"][:-1]:
        (kind, seconds), (true_kind, true_seconds) = join_of(edit, key), join_of(true, key)
        total += abs(seconds - true_seconds) / 3 if kind == true_kind else 1.0 if kind == "cut" else 1.5
    return total


def mixing_score(judged: Sequence[str]) -> float:
    """2 min(n+, n-) / (n+ + n-) over the turns judged "good" or "bad" (paper, section 3.3): 0 when all are alike, 1 when half are bad, NaN without any."""
    good, bad = sum(j == "good" for j in judged), sum(j == "bad" for j in judged)
    return 2 * min(good, bad) / (good + bad) if good + bad else math.nan


# ------------------------------------------------------------------------------------------------- the process judge's rule


def _fits(task: dict[str, Any], verb: str, words: list[str], placed: list[str | None]) -> bool:
    """Whether an edit goes with what a look at its shot shows. What a film does not say cannot speak against it."""
    key, brief = words[0], task["brief"]
    shot = task["material"][key]
    if verb in ("take", "drop") and task["family"] == "CS":
        tone = shot.get("tone")
        return tone is None or brief.get("tone") is None or (tone == brief["tone"]) == (verb == "take")
    if verb == "add":  # after no earlier hour of the shots placed so far, before no later one
        hours = HOURS if task["compact"] else STORY
        at = placed.index(key)
        order = [hours.index(story) if (story := task["material"][k].get("story") if k else None) in hours else None for k in placed]
        mine = order[at]
        return mine is None or all(r is None or (r <= mine if i < at else r >= mine) for i, r in enumerate(order) if i != at)
    if verb == "trim":  # which part was wanted a judge does not check: any clean cut looks right
        parts = shot.get("parts", [])
        return not parts or any([f"{p['in']:g}", f"{p['out']:g}"] == words[1:3] for p in parts)
    if verb == "gain":
        change = {"up": 1.0, "down": -1.0}.get(words[1], 0.0) if words[1].isalpha() else float(words[1])
        return change * (brief["level"] - shot["loudness"]) > 0 or (change == 0 and shot["loudness"] == brief["level"])
    if verb == "music":
        return (words[1] == "off") == (shot.get("ends") == "talk")
    if verb == "join":
        return words[1] == ENDS.get(shot.get("ends", ""), words[1])
    return True


def _makes_sense(task: dict[str, Any], verb: str, words: list[str]) -> bool:
    """Whether a call can be carried out, as far as its words tell."""
    if verb not in TOOLS[task["family"]]:
        return False
    if verb in ("list", "play", "write", "submit", "render"):
        return True
    shots = words if verb in ("look", "take", "drop") else words[:1]
    enough = len(words) >= {"trim": 3, "gain": 2, "music": 2, "join": 2}.get(verb, 1)
    good = {"gain": lambda: words[1].isalpha() or number(words[1]) is not None, "add": lambda: is_place(task, words[1:])}.get(verb, lambda: True)
    return enough and all(key in task["material"] for key in shots) and good()


def _grade(task: dict[str, Any], text: str, observation: str, seen: set[str], placed: list[str | None]) -> float:
    """How good a turn looks, in [0, 1]. ``seen`` and ``placed`` hold what earlier turns showed, and are brought up to date."""
    thought, calls = parse(text)
    if not calls or any(line.startswith("no ") for line in observation.splitlines()):
        return INVALID
    grades = []
    for verb, rest in calls:
        words = rest.split()
        if not _makes_sense(task, verb, words):  # the turn that ends an episode shows no answer that says so
            grades.append(INVALID)
        elif verb in LOOKING:
            grades.append(LOOK)
            seen.update(words if verb == "look" else ["play"])
        elif verb == "submit":
            grades.append(SUBMIT if seen else BLIND)
        elif verb == "write":
            grades.append(FIT if seen else UNSEEN)
        else:
            if verb == "add":
                placed[:] = put(placed, words[0], int(words[1]) if len(words) > 1 else None)
            for key in words if verb in ("take", "drop") else words[:1]:
                grades.append((FIT if _fits(task, verb, [key, *words[1:]], placed) else UNFIT) if key in seen else UNSEEN)
                if verb == "drop":
                    placed[:] = [None if k == key else k for k in placed]
    extra = SECOND_THOUGHT if REFLECTION.search(thought) else THOUGHT if thought else 0.0
    return min(1.0, sum(grades) / len(grades) + extra)


def rule_process_votes(task: dict[str, Any], turns: Sequence[tuple[str, str, dict[str, Any]]], seed: int = 0) -> list[list[float | None]]:
    """Three votes out of 0, 0.5, 1 and None (abstention) for each turn (text, observation, info); info is not read.

    A turn's grade (docs/editing.md has the table) is rounded up or down by chance so that the mean vote is the grade; one vote in 33 abstains.
    Deterministic given the task, the turns so far and the seed.
    """
    seen: set[str] = set()
    placed: list[str | None] = []
    result = []
    history = hashlib.sha256(f"{seed} {task['id']}".encode())
    for text, observation, *_ in turns:
        history.update(f"{text}\0{observation}\0".encode("utf-8", "replace"))
        rng = random.Random(history.hexdigest())
        grade = _grade(task, text, observation, seen, placed)
        result.append([None if rng.random() < ABSTAINS else math.floor(2 * grade + rng.random()) / 2 for _ in range(VOTES)])
    return [[None if vote is None else min(vote, 1.0) for vote in votes] for votes in result]


# ------------------------------------------------------------------------------------------------------- models as judges

SCORE = {"type": "number", "minimum": 0, "maximum": 1}


def show_shot(task: dict[str, Any], key: str) -> str:
    """Everything that a look at a shot tells a text model, in one line."""
    shot = task["material"][key]
    parts = [f'{key}: "{shot["caption"]}"', f"{shot['duration']:g} s", f"{shot['loudness']:g} LUFS"]
    parts += [f"{name} {shot[name]}" for name in ("tone", "motion", "story") if name in shot]
    parts += [f"ends on {shot['ends']}"] if "ends" in shot else []
    parts += [f"{p['name']} {p['in']:g} to {p['out']:g} s" for p in shot.get("parts", [])]
    return " | ".join(parts)


def loud_word(shot: dict[str, Any]) -> str:
    return {LEVEL - STEP: "soft", LEVEL: "even", LEVEL + STEP: "loud"}.get(shot["loudness"], f"{shot['loudness']:g} LUFS")


def compact_shot(task: dict[str, Any], key: str) -> str:
    """What the family's decision needs, in as few words as possible."""
    shot = task["material"][key]
    if task["family"] == "CS":
        return f"shot {key} {shot['tone']}"
    if task["family"] == "NS":
        return f"{shot['story']} {key}"
    if task["family"] == "RC":
        return f"shot {key} " + " , ".join(f"{p['name']} {p['in']:g} {p['out']:g}" for p in shot["parts"])
    return f"shot {key} {loud_word(shot)} ends {shot['ends']}"


JUDGE_INTRO = {
    "CS": "The editor chose shots for a scene.",
    "NS": "The editor put shuffled shots into the order of the story.",
    "RC": "The editor set in and out points of ordered shots to reach a target duration.",
    "FC": "The editor did sound and transitions on a locked cut: gain for each shot in dB, music under it, the transition after it.",
}


def _about(task: dict[str, Any]) -> str:
    brief = task["brief"]
    extra = f" Target: {brief['target']:g} s." if task["family"] == "RC" else f" Level: {brief['level']:g} LUFS." if task["family"] == "FC" else ""
    return f"{JUDGE_INTRO[task['family']]}\nBrief: {brief['text']}{extra}\nMaterial:\n" + "\n".join(show_shot(task, key) for key in task["shots"])


def outcome_prompt(task: dict[str, Any], edit: dict[str, Any]) -> dict[str, Request]:
    """Questions to the outcome judge about an edit that is not malformed: "ref" (sees the reference edit) and "blind" (does not), those that have weight.

    The reply is {"score": 0 to 1}; one vote, so the first valid judgement counts. `outcome` puts the parts together. `rule_outcome` answers the payloads.
    """
    questions = {
        "ref": "Compare with the reference edit of the same material. 1: as good in every decision. 0: adds nothing to the untouched material.\n"
        f"Reference: {describe(task['family'], task['true'], task['compact'])}",
        "blind": "Judge the edit by itself: does it serve the brief, are levels even, are transitions and cuts motivated by the shots? 1: could be released. "
        "0: adds nothing to the untouched material.",
    }
    result = {}
    for name, question in questions.items():
        if task["weights"][name]:
            text = f"{_about(task)}\n\n{question}\n\nThe edit:\n{fence(edit, 'edit')}\nReply with a JSON object: score, a number from 0 to 1."
            messages = [{"role": "user", "content": text}]
            result[name] = Request(messages, object_schema(score=SCORE), payload={"role": name, "task": task, "edit": edit})
    return result


def rule_outcome(payload: dict[str, Any]) -> dict[str, float]:
    """The embedded outcome judge: `make_judge("rule", rule_outcome)` answers the questions of `outcome_prompt`."""
    return {"score": parts_of_score(payload["task"], payload["edit"])[payload["role"]]}


def process_prompt(task: dict[str, Any], turns: Sequence[tuple[str, str, dict[str, Any]]], seed: int = 0) -> list[Request]:
    """One question to the process judge for each turn, with all turns up to it: three votes, averaged; {"score": 0 to 1 or null}. Never the reference."""
    schema = object_schema(score={"anyOf": [SCORE, {"type": "null"}]})
    intro = f"{_about(task)}\nBudget: {task['budget']} turns.\n\nAn editing agent works on this task. Turns so far, the last one to be graded:"
    ask = (
        "Grade the last turn only: is it a sensible step (looks at the material it decides on, reasons from what it saw, makes an edit that fits the brief, "
        "corrects itself)? 1: good. 0.5: neither. 0: bad. Reply with a JSON object: score, or null if it cannot be judged."
    )
    rows = [{"agent": text, "result": observation} for text, observation, *_ in turns]
    pairs = [[text, observation] for text, observation, *_ in turns]
    requests = []
    for i in range(len(rows)):
        messages = [{"role": "user", "content": f"{intro}\n{fence(rows[: i + 1], 'turns')}\n{ask}"}]
        payload = {"role": "process", "task": task, "turns": pairs[: i + 1], "seed": seed}
        requests.append(Request(messages, schema, votes=VOTES, combine="mean", payload=payload))
    return requests


def rule_process(payload: dict[str, Any]) -> dict[str, float] | None:
    """The embedded process judge: the mean of the votes of `rule_process_votes` for the last turn, None where all three abstain."""
    votes = [v for v in rule_process_votes(payload["task"], payload["turns"], payload["seed"])[-1] if v is not None]
    return {"score": sum(votes) / len(votes)} if votes else None
