"""Films for the editing environment: the generator, the JSON layout of a user's own films, its validator, and the tasks that a film gives.

A film is a dict, one JSON file a film (docs/editing.md has the whole layout): story blocks, each with a brief that says what the scene is for, candidate shots
with caption and signal statistics, and the reference edit. Generated films use the same layout, so an exported one can be edited and read back.

Each block gives one task of each family, started from the reference state and not from what another family's episode left: CS sees candidates, NS the
selected shots in a random order, RC the ordered shots whole, FC the locked rough cut.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.envs import DataError

FORMAT = "film-edit-1"
FAMILIES = ("CS", "NS", "RC", "FC")
# R = det * R_det + ref * R_ref + blind * R_blind. CS and NS deterministic, RC mixed, FC judged: the paper; the numbers of RC and FC are [deduced]
WEIGHTS = {
    "CS": {"det": 1.0, "ref": 0.0, "blind": 0.0},
    "NS": {"det": 1.0, "ref": 0.0, "blind": 0.0},
    "RC": {"det": 0.6, "ref": 0.2, "blind": 0.2},
    "FC": {"det": 0.0, "ref": 0.5, "blind": 0.5},
}
JOINS = {"cut": 0.0, "fade": 1.0, "dissolve": 0.5, "lcut": 0.8, "jcut": 0.8, "bridge": 1.5}  # kind of transition -> its usual seconds
ENDS = {"run": "cut", "dark": "fade", "dream": "dissolve", "talk": "lcut", "door": "jcut", "wind": "bridge"}  # how a shot ends -> the transition that fits
MAX_GAIN, MAX_JOIN = 24.0, 3.0  # dB either way, seconds
LEVEL, STEP = -18.0, 6.0  # LUFS of an even shot, dB between soft, even and loud
COMPACT_TURNS = {"CS": 12, "NS": 12, "RC": 12, "FC": 24}  # budgets of compact tasks
SPARE = {"CS": 2.0, "NS": 2.0, "RC": 2.0, "FC": 2.5}  # budget of other tasks over what the expert needs, at least 12 turns [deduced]; calls: twice the turns

TONES = "calm tense sad warm bleak merry".split()
MOTIONS = ("still", "slow", "fast")
PARTS = "talk run wait sing".split()  # no verb of a call among them
HOURS = "dawn noon dusk night".split()
IDS = [c + v for c in "bdfklmpv" for v in "aiu"]
WHO = "sailor nurse thief pianist farmer widow pilot child guard clerk".split()
WHERE = "harbour market chapel garden station attic bridge kitchen meadow office".split()
DOES = {"calm": "rests in", "tense": "hides in", "sad": "weeps in", "warm": "greets a friend in", "bleak": "stands alone in", "merry": "dances in"}
STORY = ("before dawn", "at sunrise", "in the morning", "at noon", "in the afternoon", "at sunset", "at night", "the next day")


@dataclass(frozen=True)
class Size:
    """How large generated films are. ``full`` follows the paper: 43 + 6 films, 716 + 81 tasks, 21 to 36 candidates, 7 shuffled shots."""

    films: tuple[int, int]  # training, validation
    blocks: int
    used: tuple[int, int]  # shots of the reference
    candidates: tuple[int, int]
    tasks: tuple[int, int]  # kept of all, spread evenly over the families; 0: all
    compact: bool


COMPACT = Size((600, 64), 1, (5, 5), (9, 9), (0, 0), True)
FULL = Size((43, 6), 5, (12, 14), (21, 36), (716, 81), False)


# ---------------------------------------------------------------------------------------------------------- generator


def make_film(name: str, size: Size, seed: int = 0) -> dict[str, Any]:
    """A generated film; the same name, size and seed give the same film."""
    rng = random.Random(f"film {seed} {name}")
    blocks = [_compact_block(rng, f"b{i}") if size.compact else _full_block(rng, f"b{i}", size) for i in range(size.blocks)]
    return {"format": FORMAT, "id": name, "title": f"The {rng.choice(WHO)} and the {rng.choice(WHO)}", "blocks": blocks}


def _sound(rng: random.Random, shots: list[dict[str, Any]], level: float, music: float | None) -> dict[str, Any]:
    """The reference sound design of a cut: every shot brought to the brief's level, music off under talk, the transition that fits how a shot ends."""
    sound: dict[str, dict[str, Any]] = {}
    for shot in shots:
        gain = float(round(level - shot["loudness"]))
        sound[shot["id"]] = {"gain": gain, "music": None if music is None or shot["ends"] == "talk" else music}
    joins = {shot["id"]: {"type": ENDS[shot["ends"]], "seconds": JOINS[ENDS[shot["ends"]]]} for shot in shots[:-1] if ENDS[shot["ends"]] != "cut"}
    return {"sound": sound, "joins": joins}


def _compact_block(rng: random.Random, name: str) -> dict[str, Any]:
    """Nine shots of one-word facts: five of the scene, two in the tone of the scene before, two others."""
    ids = rng.sample(IDS, 9)
    now, before, *others = rng.sample(TONES, 4)
    keep, skip = rng.sample(PARTS, 2)
    loud = rng.sample([LEVEL - STEP, LEVEL - STEP, LEVEL + STEP, LEVEL + STEP, LEVEL], 5)
    ends = [*rng.sample(["talk", "talk", "dark", "dark", "run"], 4), "run"]
    tones = [now] * 5 + [before, before, *others]
    shots = []
    for i, (key, tone) in enumerate(zip(ids, tones)):
        first = rng.randint(0, 2)
        middle = first + rng.randint(2, 4)
        second = middle + rng.randint(0, 2)
        last = second + rng.randint(2, 4)
        words = [keep, skip] if rng.random() < 0.5 else [skip, keep]
        parts = [{"name": words[0], "in": first, "out": middle}, {"name": words[1], "in": second, "out": last}]
        shots.append(
            {
                "id": key,
                "caption": f"{tone} {HOURS[min(i, 3)] if i < 5 else rng.choice(HOURS)}",
                "duration": last + rng.randint(0, 2),
                "loudness": loud[i] if i < 5 else LEVEL,
                "tone": tone,
                "motion": rng.choice(MOTIONS),
                "story": HOURS[min(i, 3)] if i < 5 else rng.choice(HOURS),
                "ends": ends[i] if i < 5 else "run",
                "parts": parts,
            }
        )
    order = ids[:5]
    spans = {shot["id"]: next([p["in"], p["out"]] for p in shot["parts"] if p["name"] == keep) for shot in shots[:5]}
    some = sorted(rng.sample(range(5), 2))
    tasks = {
        "CS": rng.sample([ids[i] for i in some] + ids[5:], 6),
        "NS": order[:4],
        "RC": order[:3],
        "FC": order,
    }
    brief = {"text": f"before {before} , now {now}", "tone": now, "before": before, "keep": keep, "skip": skip, "level": LEVEL, "music": None}
    brief["target"] = sum(spans[key][1] - spans[key][0] for key in tasks["RC"])
    reference = {"select": order, "order": order, "spans": spans, **_sound(rng, shots[:5], LEVEL, None)}
    return {"id": name, "brief": brief, "shots": shots, "reference": reference, "tasks": tasks}


def _full_block(rng: random.Random, name: str, size: Size) -> dict[str, Any]:
    used, total = rng.randint(*size.used), rng.randint(*size.candidates)
    ids = [f"s{i:02d}" for i in rng.sample(range(1, 99), total)]
    who, where = rng.sample(WHO, 2), rng.sample(WHERE, 2)
    now, before, other = rng.sample(TONES, 3)
    keep, skip, spare = rng.sample(PARTS, 3)
    shots = []
    for i, key in enumerate(ids):
        mine = i < used
        # a distractor shares the person, the place or the tone with the scene, never all three
        person, place, tone = (who[0], where[0], now) if mine else rng.choice(
            [(who[0], where[0], before), (who[0], where[0], other), (who[0], where[1], before), (who[1], where[0], now), (who[1], where[1], rng.choice(TONES))]
        )  # fmt: skip
        hour = STORY[min(i, len(STORY) - 1)] if mine else rng.choice(STORY)
        parts, at = [], round(rng.uniform(0, 1.5), 1)
        for word in rng.sample([keep, skip, spare], rng.choice((2, 3)) if not mine else 3):
            stop = round(at + rng.uniform(1.5, 4.0), 1)
            parts.append({"name": word, "in": at, "out": stop})
            at = round(stop + rng.uniform(0.2, 1.5), 1)
        shots.append(
            {
                "id": key,
                "caption": f"{hour}, the {person} {DOES[tone]} the {place}",
                "duration": round(parts[-1]["out"] + rng.uniform(0.5, 2.0), 1),
                "loudness": float(rng.choice([-30, -27, -24, -21, -18, -15, -12, -10])),
                "tone": tone,
                "motion": rng.choice(MOTIONS),
                "story": hour,
                "ends": rng.choice(list(ENDS)),
                "parts": parts,
            }
        )
    order = ids[:used]
    spans = {shot["id"]: next([p["in"], p["out"]] for p in shot["parts"] if p["name"] == keep) for shot in shots[:used]}
    trimmed = order[:10]
    target = round(sum(spans[key][1] - spans[key][0] for key in trimmed), 1)
    text = (
        f"A {now} scene about the {who[0]} in the {where[0]}; the scene before was {before}. It tells its day in order and shows where they {keep}, not where "
        f"they {skip}. Speech and noise at {LEVEL:g} LUFS; music at -20 dB, none under a shot that ends on talk."
    )
    brief = {"text": text, "tone": now, "before": before, "keep": keep, "skip": skip, "level": LEVEL, "music": -20.0, "target": target}
    reference = {"select": order, "order": order, "spans": spans, **_sound(rng, shots[:used], LEVEL, -20.0)}
    tasks = {"CS": rng.sample(ids, total), "NS": order[:7], "RC": trimmed, "FC": order}
    return {"id": name, "brief": brief, "shots": shots, "reference": reference, "tasks": tasks}


# -------------------------------------------------------------------------------------------------------------- tasks


def make_tasks(film: dict[str, Any], split: str, compact: bool, media: str = "") -> list[dict[str, Any]]:
    """One task of each family for each block. media: folder that the film's ``media`` paths are relative to."""
    return [make_task(film, block, family, split, compact, media) for block in film["blocks"] for family in FAMILIES]


def make_task(film: dict[str, Any], block: dict[str, Any], family: str, split: str, compact: bool, media: str = "") -> dict[str, Any]:
    """A task is JSON: what the agent may see (``brief``, ``shots`` in the order shown, ``material``), the true edit ``true``, its one line ``reference``."""
    name = f"{film['id']}-{block['id']}-{family}"
    reference = block["reference"]
    default = {"CS": [shot["id"] for shot in block["shots"]], "NS": reference["order"], "RC": reference["order"], "FC": reference["order"]}
    ids = list(block.get("tasks", {}).get(family, default[family]))
    rng = random.Random(f"editing {name}")
    if family == "CS":
        true: dict[str, Any] = {"select": [key for key in reference["select"] if key in ids]}
    elif family == "NS":
        true = {"order": list(ids)}
        while ids == true["order"]:
            rng.shuffle(ids)
    elif family == "RC":
        true = {"spans": {key: list(reference["spans"][key]) for key in ids}}
    else:
        true = {
            "sound": {key: {"gain": 0.0, "music": None, **reference["sound"].get(key, {})} for key in ids},
            "joins": {key: full_join(reference["joins"].get(key, {"type": "cut"})) for key in ids[:-1]},
        }
    by_id = {shot["id"]: shot for shot in block["shots"]}
    brief = dict(block["brief"])
    if family == "RC":
        brief["target"] = brief.get("target", round(sum(out - start for start, out in true["spans"].values()), 3))
    task = {
        "id": name, "split": split, "family": family, "film": film["id"], "block": block["id"], "compact": compact, "brief": brief, "shots": ids,
        "material": {key: by_id[key] for key in ids}, "weights": dict(WEIGHTS[family]), "true": true, "reference": describe(family, true, compact),
        "preview": family == "FC" and not compact, "media": media,
    }  # fmt: skip
    if family == "FC":
        task["spans"] = {key: list(reference["spans"][key]) for key in ids}  # of the locked picture
    needed = expert_turns(task)
    turns = COMPACT_TURNS[family] if compact else max(12, math.ceil(SPARE[family] * needed))
    return {**task, "budget": turns, "tools": 2 * turns, "difficulty": needed}


def expert_turns(task: dict[str, Any]) -> int:
    """Turns that the scripted expert needs: it looks at each shot (three candidates a turn in large CS tasks), makes each edit, and submits."""
    shots, true = task["shots"], task["true"]
    if task["family"] == "CS":
        at_once = 1 if task["compact"] else 3
        looks = [shots[i : i + at_once] for i in range(0, len(shots), at_once)]
        takes = sum(1 if not task["compact"] else len(set(look) & set(true["select"])) for look in looks if set(look) & set(true["select"]))
        return len(looks) + takes + 1
    if task["family"] in ("NS", "RC"):
        changed = [key for key in shots if task["family"] == "NS" or true["spans"][key] != [0, task["material"][key]["duration"]]]
        return len(shots) + len(changed) + 1
    edits = sum((s["gain"] != 0) + (s["music"] is not None) for s in true["sound"].values()) + sum(j["type"] != "cut" for j in true["joins"].values())
    return len(shots) + edits + 1 + task["preview"]


def describe(family: str, edit: dict[str, Any], compact: bool = False) -> str:
    """An edit in one line, for people and as a teacher's privileged text."""
    if family == "CS":
        return f"take {' '.join(edit['select'])}"
    if family == "NS":
        return f"order {' '.join(edit['order'])}"
    if family == "RC":
        return " , ".join(f"trim {key} {start:g} {stop:g}" for key, (start, stop) in edit["spans"].items())
    parts = []
    for key, sound in edit["sound"].items():
        if sound["gain"]:
            parts.append(f"gain {key} {gain_word(sound['gain'])}" if compact else f"gain {key} {sound['gain']:g}")
        if sound["music"] is not None:
            parts.append(f"music {key} {sound['music']:g}")
        if key in edit["joins"] and edit["joins"][key]["type"] != "cut":
            parts.append(f"join {key} {edit['joins'][key]['type']}")
    return " , ".join(parts) or "leave all as it is"


def full_join(join: dict[str, Any]) -> dict[str, Any]:
    return {"type": join["type"], "seconds": float(join.get("seconds", JOINS[join["type"]]))}


def gain_word(gain: float) -> str:
    return {STEP: "up", -STEP: "down", 0.0: "off"}.get(gain, f"{gain:g}")


def generated(size: Size, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training tasks, validation tasks) of generated films; no film is in both."""
    result = []
    for split, films, wanted in zip(("train", "eval"), size.films, size.tasks):
        tasks = [task for i in range(films) for task in make_tasks(make_film(f"{split}{i:03d}", size, seed), split, size.compact)]
        if wanted:  # every family gets the same number, up to the remainder; which ones is drawn
            rng = random.Random(f"editing sample {seed} {split}")
            kept = set()
            for i, family in enumerate(FAMILIES):
                ids = [task["id"] for task in tasks if task["family"] == family]
                kept.update(rng.sample(ids, wanted // 4 + (i >= 4 - wanted % 4)))
            tasks = [task for task in tasks if task["id"] in kept]
        result.append(tasks)
    return result[0], result[1]


# ------------------------------------------------------------------------------------------------------- a user's films


def read_folder(folder: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(training tasks, validation tasks, notes) of a folder of films in the documented layout.

    The split is by film: split.json ({"train": [ids], "eval": [ids]}), else the last films by name, 6 in 49 as in the paper and at least one.
    Raises DataError that lists every problem (up to ten) with file, field and remedy.
    """
    folder = Path(folder)
    if problems := validate(folder):
        more = f"\n... and {len(problems) - 10} more; python -m common.envs.editing {folder} lists all" if len(problems) > 10 else ""
        raise DataError(f"--env editing:{folder}: {len(problems)} problem(s)\n" + "\n".join(problems[:10]) + more)
    films = {film["id"]: (film, path.parent) for path in sorted(folder.glob("*/film.json")) for film in [json.loads(path.read_text())]}
    split_file = folder / "split.json"
    if split_file.exists():
        split = json.loads(split_file.read_text())
    else:
        held = max(1, round(len(films) * 6 / 49))
        split = {"train": sorted(films)[:-held], "eval": sorted(films)[-held:]}
    parts = [[task for key in split[name] for task in make_tasks(films[key][0], name, False, str(films[key][1].resolve()))] for name in ("train", "eval")]
    unused = sorted(set(films) - {*split["train"], *split["eval"]})
    return parts[0], parts[1], {"films": {name: list(split[name]) for name in ("train", "eval")}, "films in neither split": unused}


def validate(folder: str | Path) -> list[str]:
    """Every problem of a folder of films, each with file, field and what is wanted; an empty list when it can be used."""
    folder = Path(folder)
    files = sorted(folder.glob("*/film.json"))
    if not files:
        return [f"{folder}: no */film.json in it; each film is a folder of its own with a film.json (docs/editing.md has the layout)"]
    problems: list[str] = []
    films: dict[str, Path] = {}
    for path in files:
        try:
            film = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            problems.append(f"{path}: cannot be read as JSON ({error})")
            continue
        found = check_film(film, path.parent)
        problems += [f"{path}: {text}" for text in found]
        key = film.get("id") if isinstance(film, dict) else None
        if isinstance(key, str):
            if key in films:
                problems.append(f"{path}: id {key!r} is also that of {films[key]}; give each film an id of its own")
            films[key] = path
    split_file = folder / "split.json"
    if split_file.exists():
        problems += _check_split(split_file, set(films))
    elif len(files) < 2:
        problems.append(f"{folder}: one film only; the split is by film, so bring at least two (or repeat none: a film may not be in both)")
    return problems


def _check_split(path: Path, films: set[str]) -> list[str]:
    try:
        split = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return [f"{path}: cannot be read as JSON ({error})"]
    if not isinstance(split, dict) or any(not isinstance(split.get(name), list) or not split[name] for name in ("train", "eval")):
        return [f'{path}: wants {{"train": [film ids], "eval": [film ids]}}, both with at least one film']
    names = [*split["train"], *split["eval"]]
    problems = [f"{path}: {key!r} is no film of this folder" for key in names if key not in films]
    if both := sorted({str(key) for key in split["train"]} & {str(key) for key in split["eval"]}):
        problems.append(f"{path}: {', '.join(both)} in both train and eval; a film may be in one only")
    return problems


# identifiers become parts of file names
PLAIN_NAME, PLAIN = re.compile(r"\w[\w .-]{0,79}"), "a name of letters, digits, blanks, dots and dashes, at most 80"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12  # neither NaN nor an integer that no float holds


def check_film(film: Any, folder: Path | None = None) -> list[str]:
    """Problems of one film. folder: where its ``media`` files lie (None: not looked for)."""
    if not isinstance(film, dict) or film.get("format") != FORMAT:
        return [f'format: wants an object with "format": "{FORMAT}"']
    problems = [] if isinstance(film.get("title"), str) and film["title"] else ["title: a text that is not empty"]
    problems += [] if isinstance(film.get("id"), str) and PLAIN_NAME.fullmatch(film["id"]) else [f"id: {PLAIN}"]
    blocks = film.get("blocks")
    if not isinstance(blocks, list) or not blocks:
        return [*problems, "blocks: a list with at least one block"]
    seen: set[str] = set()
    for i, block in enumerate(blocks):
        where = f"blocks[{i}]"
        if not isinstance(block, dict) or not isinstance(block.get("id"), str) or not PLAIN_NAME.fullmatch(block["id"]) or block["id"] in seen:
            problems.append(f"{where}.id: {PLAIN}, of its own")
            continue
        seen.add(block["id"])
        problems += [f"{where}.{text}" for text in _check_block(block, folder)]
    return problems


def _check_block(block: dict[str, Any], folder: Path | None) -> list[str]:
    problems = []
    brief = block.get("brief")
    if not isinstance(brief, dict) or not isinstance(brief.get("text"), str) or not brief["text"]:
        problems.append("brief.text: what the scene is for, a text that is not empty")
    elif not is_number(brief.get("level")):
        problems.append("brief.level: loudness that the mix aims at, in LUFS, for example -18")
    elif "target" in brief and not (is_number(brief["target"]) and brief["target"] > 0):
        problems.append("brief.target: seconds of the rough cut, above 0 (leave it out for the reference's own)")
    elif brief.get("music") is not None and not is_number(brief["music"]):
        problems.append("brief.music: level of a music bed in dB, or null for none")
    shots = block.get("shots")
    if not isinstance(shots, list) or not shots:
        return [*problems, "shots: a list with at least one shot"]
    ids: dict[str, dict[str, Any]] = {}
    for i, shot in enumerate(shots):
        where = f"shots[{i}]"
        if not isinstance(shot, dict) or not isinstance(shot.get("id"), str) or not PLAIN_NAME.fullmatch(shot["id"]) or " " in shot["id"] or shot["id"] in ids:
            problems.append(f"{where}.id: {PLAIN}, without blanks, that no other shot of the block has")
            continue
        ids[shot["id"]] = shot
        problems += [f"{where}.{text}" for text in _check_shot(shot, folder)]
    if problems:  # the reference speaks of shots that are not sound yet
        return problems
    problems += _check_reference(block.get("reference"), ids)
    if problems:
        return problems
    reference, tasks = block["reference"], block.get("tasks", {})
    if not isinstance(tasks, dict) or not set(tasks) <= set(FAMILIES):
        return [f"tasks: an object with keys out of {', '.join(FAMILIES)}"]
    for family, names in tasks.items():
        pool = list(ids) if family == "CS" else reference["order"]
        if not isinstance(names, list) or len(set(map(str, names))) != len(names) or any(key not in pool for key in names):
            problems.append(f"tasks.{family}: different shots of {'the block' if family == 'CS' else 'reference.order'}")
        elif family != "CS" and names != [key for key in reference["order"] if key in names]:
            problems.append(f"tasks.{family}: in the order of reference.order")
    chosen = {family: tasks.get(family, list(ids) if family == "CS" else reference["order"]) for family in FAMILIES}
    if not problems and not set(chosen["CS"]) & set(reference["select"]):
        problems.append("tasks.CS: at least one shot of reference.select")
    problems += [f"tasks.{f}: at least {n} shot(s)" for f, n in (("NS", 2), ("RC", 1), ("FC", 1)) if not problems and len(chosen[f]) < n]
    return problems


def _check_shot(shot: dict[str, Any], folder: Path | None) -> list[str]:
    problems = [] if isinstance(shot.get("caption"), str) and shot["caption"] else ["caption: a text that is not empty"]
    if not is_number(shot.get("duration")) or shot["duration"] <= 0:
        return [*problems, "duration: seconds, above 0"]
    if not is_number(shot.get("loudness")):
        problems.append("loudness: in LUFS, for example -21.5")
    problems += [f"{name}: a text, or left out" for name in ("tone", "motion", "story") if name in shot and not isinstance(shot[name], str)]
    if "ends" in shot and not (isinstance(shot["ends"], str) and shot["ends"] in ENDS):
        problems.append(f"ends: one of {', '.join(ENDS)}, or left out")
    parts = shot.get("parts", [])
    if not isinstance(parts, list) or any(
        not isinstance(p, dict) or not isinstance(p.get("name"), str) or check_span([p.get("in"), p.get("out")], shot["duration"]) for p in parts
    ):
        problems.append('parts: a list of {"name": text, "in": seconds, "out": seconds} inside the shot')
    if "media" in shot:
        name = shot["media"]
        if not isinstance(name, str) or not inside(name):
            problems.append(f"media: {name!r} must be a path inside the film's folder, without .. and not absolute")
        elif folder is not None and not (folder / name).is_file():
            problems.append(f"media: no file {folder / name}")
    return problems


def inside(name: str) -> bool:
    """Whether a relative path stays inside its folder."""
    path = Path(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name and name not in (".", "./")


def check_span(span: Any, duration: float) -> str:
    """ "" for [in, out] with 0 <= in < out <= duration (seconds), else what is wrong."""
    if not isinstance(span, (list, tuple)) or len(span) != 2 or not all(map(is_number, span)):
        return "wants two numbers, in and out, in seconds"
    return "" if 0 <= span[0] < span[1] <= duration else f"{span[0]:g} to {span[1]:g} is not inside 0 to {duration:g}"


def check_sound(sound: Any) -> str:
    if not isinstance(sound, dict) or not set(sound) <= {"gain", "music"}:
        return "an object with gain and music"
    if not is_number(sound.get("gain", 0.0)) or abs(sound.get("gain", 0.0)) > MAX_GAIN:
        return f"gain in dB, at most {MAX_GAIN:g} either way"
    music = sound.get("music")
    return "" if music is None or (is_number(music) and -60 <= music <= 0) else "music from -60 to 0 dB, or null"


def check_join(join: Any) -> str:
    if not isinstance(join, dict) or not set(join) <= {"type", "seconds"} or not isinstance(join.get("type"), str) or join["type"] not in JOINS:
        return f"type out of {', '.join(JOINS)}"
    seconds = join.get("seconds", JOINS[join["type"]])
    if not is_number(seconds) or not 0 <= seconds <= MAX_JOIN or (join["type"] == "cut") != (seconds == 0):
        return f"seconds above 0 and at most {MAX_JOIN:g} (0 for a cut)"
    return ""


def _check_reference(reference: Any, shots: dict[str, dict[str, Any]]) -> list[str]:
    if not isinstance(reference, dict):
        return ["reference: an object with select, order, spans, sound, joins"]
    for name in ("select", "order"):
        rows = reference.get(name)
        if not isinstance(rows, list) or not rows or len(set(map(str, rows))) != len(rows) or any(key not in shots for key in rows):
            return [f"reference.{name}: different shots of the block, at least one"]
    if set(reference["select"]) != set(reference["order"]):
        return ["reference.order: the shots of reference.select, in order"]
    problems = []
    tables = {name: reference.get(name, {}) for name in ("spans", "sound", "joins")}
    for name, table in tables.items():
        if not isinstance(table, dict) or any(key not in reference["order"] for key in table):
            return [f"reference.{name}: an object whose keys are shots of reference.order"]
    problems += [f"reference.spans.{key}: missing" for key in reference["order"] if key not in tables["spans"]]
    problems += [f"reference.spans.{k}: {text}" for k, span in tables["spans"].items() if (text := check_span(span, shots[k]["duration"]))]
    problems += [f"reference.sound.{k}: {text}" for k, sound in tables["sound"].items() if (text := check_sound(sound))]
    problems += [f"reference.joins.{k}: {text}" for k, join in tables["joins"].items() if (text := check_join(join))]
    if reference["order"][-1] in tables["joins"]:
        problems.append(f"reference.joins.{reference['order'][-1]}: the last shot has no transition after it")
    return [*problems, *(f"reference.{name}: missing ({{}} where nothing is changed)" for name in ("sound", "joins") if name not in reference)]
