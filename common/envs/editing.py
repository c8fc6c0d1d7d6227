"""Film editing: choose shots (CS), restore their order (NS), set in and out points (RC), finish sound and transitions (FC). Documentation: docs/editing.md.

The calls are the last lines of a response, one a line; what stands before them is thought.

    list                     the shots and the working edit             play             plays the working edit: what it adds up to
    look ID ...              what a shot shows and how loud it is        submit           ends the episode with the working edit
    take ID ..., drop ID ... selection (CS)                              write NAME.json JSON, submit NAME.json [PREVIEW.mp4]
    add ID [PLACE], drop ID  puts a shot at a place, or last (NS)        hands in a file that the agent wrote instead of the working edit
    trim ID IN OUT           keeps seconds IN to OUT (RC)
    gain ID DB, music ID DB|off, join ID TYPE [SECONDS], render NAME.mp4 sound, music bed, transition after the shot, preview (FC)

An episode is ended by ``submit`` (terminated, scored) or by the turn or tool budget (truncated, 0). A malformed submission scores 0 with a reason; a file name
that is more than a plain name is refused and the episode goes on. Looking is free but for the budget.

Specs: ``editing`` (compact texts for the tiny policy), ``editing:cs`` and so on (one family), ``editing:full`` (the paper's sizes), ``editing:FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet
from common.envs import editing_render as media
from common.envs.editing_films import (
    COMPACT,
    FAMILIES,
    FULL,
    JOINS,
    LEVEL,
    MAX_GAIN,
    STEP,
    check_join,
    check_span,
    gain_word,
    generated,
    make_film,
    read_folder,
    validate,
)
from common.envs.editing_judges import (
    EXAMPLES,
    TOOLS,
    check_edit,
    compact_shot,
    distance,
    is_place,
    loud_word,
    mixing_score,
    number,
    outcome,
    outcome_prompt,
    parse,
    parts_of_score,
    process_prompt,
    put,
    read_edit,
    rule_outcome,
    rule_process,
    rule_process_votes,
    show_shot,
    sound_of,
    span_of,
    start_edit,
)
from common.envs.editing_render import EditingError, make_clips, render

__all__ = [
    "EditingEnv", "EditingError", "careless", "demonstrate", "load", "make_clips", "mixing_score", "outcome", "outcome_prompt", "process_prompt", "render",
    "rule_outcome", "rule_process", "rule_process_votes", "validate", "with_media",
]  # fmt: skip

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(json|mp4)")
MAX_CHARS = 100_000  # of a response
FRAMES_LOOK, FRAMES_PLAY = 3, 6  # frames that a look at a shot, or a play of the edit, shows in full tasks; 1 in compact ones
ASKS = {"CS": "choose shots", "NS": "order shots by hour", "RC": "trim shots", "FC": "finish sound"}
FULL_ASKS = {
    "CS": "Choose the shots that the scene needs from the candidates.",
    "NS": "The shots are shuffled. Put them into the order of the story.",
    "RC": "The shots are in order. Set in and out points so that the cut keeps what the brief asks for and lasts {target:g} s.",
    "FC": "The picture is locked. Do the sound design and the transitions; hand in edit.json and a rendered preview.mp4.",
}
HELP = {
    "list": "list: the shots and the working edit",
    "look": "look ID [ID ...]: frames, caption and signal statistics of shots",
    "play": "play: plays the working edit",
    "take": "take ID [ID ...]: adds shots to the selection",
    "drop": "drop ID [ID ...]: takes shots out again",
    "add": "add ID [PLACE]: puts a shot at a place of the order, from 1 (what was there is out), or behind the last one",
    "trim": "trim ID IN OUT: keeps the seconds from IN to OUT",
    "gain": "gain ID DB: changes a shot's level, for example gain s07 -4",
    "music": "music ID DB: music bed under a shot, for example music s07 -20; music ID off",
    "join": "join ID TYPE [SECONDS]: transition after a shot; " + ", ".join(JOINS),
    "write": "write NAME.json JSON: writes an edit file in one line",
    "render": "render preview.mp4: renders the working edit",
    "submit": "submit: hands in the working edit; submit NAME.json [PREVIEW.mp4]: hands in files",
}
# the careless expert: a habit for the whole episode (goes on as the scene before did, keeps the order in which shots are listed), single slips, a slip for each
# decision of a fine cut, a second look that is not needed, and a submission before everything is done
HABIT, NOISE, SLIP_GAIN, SLIP_JOIN, CHECKS, STOPS = 0.5, 0.12, 0.55, 0.45, 0.12, 0.02


class EditingEnv:
    """One episode at a time. folder: where clips, frames and previews are made with ffmpeg (None: text only). Raises EditingError without ffmpeg.

    ``info`` of each step: ``invalid`` (nothing, or not all, could be carried out), ``tool`` (the last call's verb, "" without one), ``tool_calls``, ``frames``,
    ``judged`` ("good", "bad" or "neutral": whether the turn moved the edit towards the reference or away from it; not for training), ``score`` (of the working
    edit by the rule judges); with media ``images`` (PNG paths) or ``preview`` (path). At the end: ``success``, ``rewards`` ({"det", "ref", "blind"}, NaN for a
    part that the family does not have), ``reason`` ("" or why a submission scores less than its edit), ``malformed``, ``truncated`` ("", "turns" or "tools"),
    ``blind_run`` (submitted without a look or a play), ``edit`` (what was handed in, None where nothing was) and ``verifier_text``.
    """

    def __init__(self, folder: str | Path | None = None, ffmpeg: str = "ffmpeg") -> None:
        self.task: dict[str, Any] | None = None
        self.ffmpeg = media.find_ffmpeg(ffmpeg) if folder is not None else ""
        self.folder = Path(folder) if folder is not None else None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task = task
        self.edit = start_edit(task)
        self.turns = self.calls = 0
        self.seen: frozenset[str] = frozenset()
        self.looked = False
        self.last = ""  # the shot looked at last
        self.files: dict[str, str] = {}
        self.previews: dict[str, str] = {}  # name of a rendered preview -> the edit that it shows
        self.far = distance(task, self.edit)
        return [{"role": "user", "content": self._prompt()}]

    def _prompt(self) -> str:
        task, brief = self.task, self.task["brief"]
        if task["compact"]:
            aim = {"CS": brief["text"], "NS": "", "RC": f"keep {brief.get('keep')} skip {brief.get('skip')}", "FC": ""}[task["family"]]
            tools = " ".join(verb for verb in TOOLS[task["family"]] if verb not in ("list", "write", "render", "music"))
            return f"{ASKS[task['family']]} {' '.join(task['shots'])}{' , ' + aim if aim else ''} . {tools}"
        tools = "\n".join(HELP[verb] for verb in TOOLS[task["family"]])
        return (
            f"You are a film editor. {FULL_ASKS[task['family']].format(target=brief.get('target', 0.0))}\nBrief: {brief['text']}\n"
            f"Shots: {' '.join(task['shots'])}\n\nThink first, then write your calls as the last lines, one a line:\n{tools}\n\n"
            f"edit.json is an object like {json.dumps(EXAMPLES[task['family']])}. You have {task['budget']} turns and {task['tools']} calls; "
            "without submit before they run out nothing is scored."
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One response with its calls. Raises RuntimeError when no episode is open."""
        task = self._need_task()
        self.turns += 1
        _, calls = parse(action) if len(action) <= MAX_CHARS else ("", [])
        info: dict[str, Any] = {"invalid": not calls, "tool": "", "tool_calls": 0, "frames": 0}
        said, ended, cut = [] if calls else ["no call on the last line"], False, ""
        for verb, rest in calls:
            if self.calls >= task["tools"]:
                cut = "tools"
                break
            self.calls += 1
            info["tool"], info["tool_calls"] = verb, info["tool_calls"] + 1
            if verb == "submit":
                answer = self._submit(rest.split(), info)
                ended = not answer
            elif verb not in TOOLS[task["family"]]:
                answer = f"no call {verb} here"
            elif verb == "write":
                answer = self._write(*[*rest.split(maxsplit=1), "", ""][:2])
            else:
                answer = getattr(self, f"_{verb}")(rest.split(), info)
            info["invalid"] |= answer.startswith("no ")
            said.append(answer)
            if ended:
                break
        cut = cut or ("" if ended else "turns" if self.turns >= task["budget"] else "tools" if self.calls >= task["tools"] else "")
        before, self.far = self.far, distance(task, self.edit)
        info["judged"] = "good" if self.far < before - 1e-9 else "bad" if self.far > before + 1e-9 else "neutral"
        info["score"] = outcome(task, parts_of_score(task, self.edit))
        if ended or cut:
            info["truncated"] = cut
            if cut:
                self._close(info, None, {name: 0.0 if weight else float("nan") for name, weight in task["weights"].items()}, f"the {cut} ran out")
            self.task = None
            return "", info["success"], ended, bool(cut), info
        if not task["compact"]:
            said.append(f"[{task['budget'] - self.turns} turns, {task['tools'] - self.calls} calls left]")
        return "\n".join(said), 0.0, False, False, info

    def _need_task(self) -> dict[str, Any]:
        if self.task is None:
            raise RuntimeError("no open episode: call reset(task) first")
        return self.task

    # ------------------------------------------------------------------------------------------------------- handing in

    def _close(self, info: dict[str, Any], edit: dict[str, Any] | None, parts: dict[str, float], reason: str = "", malformed: bool = False) -> None:
        info |= {"success": outcome(self.task, parts), "rewards": parts, "reason": reason, "malformed": malformed, "edit": edit}
        info |= {"blind_run": not self.looked and edit is not None, "verifier_text": dict.fromkeys(parts, reason)}

    def _submit(self, words: list[str], info: dict[str, Any]) -> str:
        """ "" when the episode is over, else why the submission was refused."""
        task = self.task
        if bad := [word for word in words if not FILE_NAME.fullmatch(word)]:
            return f"no file {bad[0][:40]!r} : plain names only, like edit.json and preview.mp4"
        edit, reason = self.edit, ""
        if words:
            text = self.files.get(words[0])
            edit, reason = read_edit(text) if text is not None else (None, f"there is no file {words[0]}")
            reason = reason or check_edit(task, edit)
        if reason:
            self._close(info, None, {name: 0.0 if weight else float("nan") for name, weight in task["weights"].items()}, f"malformed: {reason}", True)
            info["blind_run"] = not self.looked
            return ""
        parts = parts_of_score(task, edit)
        shown = [self.previews[name] for name in (words[1:2] or list(self.previews)) if name in self.previews]
        if task["preview"] and json.dumps(edit, sort_keys=True) not in shown:
            reason = "no preview of this edit was rendered: nothing to judge blind"
            parts["blind"] = 0.0
        self._close(info, edit, parts, reason)
        return ""

    def _write(self, name: str, text: str) -> str:
        if not FILE_NAME.fullmatch(name) or not name.endswith(".json"):
            return f"no file {name[:40]!r} : plain names only, like edit.json"
        if not text:
            return "no content : write NAME.json JSON in one line"
        self.files = {**self.files, name: text}
        return f"{name} written"

    # ----------------------------------------------------------------------------------------------------- looking

    def _shots(self, words: list[str]) -> str:
        """ "" when the words are shots of the task, else what is wrong."""
        unknown = [word for word in words if word not in self.task["material"]]
        return f"no shot {unknown[0][:20]}" if unknown else "" if words else "no shot named"

    def _list(self, words: list[str], info: dict[str, Any]) -> str:
        shots = self.task["shots"]
        if self.task["compact"]:
            return f"shots {' '.join(shots)}"
        return "\n".join([*(f'{key}: "{self.task["material"][key]["caption"]}"' for key in shots), f"working edit: {json.dumps(self.edit)}"])

    def _look(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words):
            return problem
        self.seen, self.looked, self.last = self.seen | set(words), True, words[-1]
        info["frames"] += len(words) * (1 if self.task["compact"] else FRAMES_LOOK)
        if self.folder is not None:
            clips = [media.clip(self.task, key, self.folder, self.ffmpeg) for key in words]
            info.setdefault("images", []).extend(str(p) for c in clips for p in media.frames(c, FRAMES_LOOK, self.folder / "frames", self.ffmpeg))
        return "\n".join(compact_shot(self.task, key) if self.task["compact"] else show_shot(self.task, key) for key in words)

    def _play(self, words: list[str], info: dict[str, Any]) -> str:
        self.looked = True
        info["frames"] += 1 if self.task["compact"] else FRAMES_PLAY
        if self.folder is not None and (plays := media.timeline(self.task, self.edit)):
            path = self._rendered()
            info.setdefault("images", []).extend(str(p) for p in media.frames(path, min(FRAMES_PLAY, len(plays)), self.folder / "frames", self.ffmpeg))
        return self._state()

    def _render(self, words: list[str], info: dict[str, Any]) -> str:
        name = words[0] if words else "preview.mp4"
        if len(words) > 1 or not FILE_NAME.fullmatch(name) or not name.endswith(".mp4"):
            return f"no file {' '.join(words)[:40]!r} : plain names only, like preview.mp4"
        self.previews = {**self.previews, name: json.dumps(self.edit, sort_keys=True)}
        answer = self._play([], info)
        if self.folder is not None:
            info["preview"] = str(self._rendered())
        return f"{name} rendered , {answer}"

    def _rendered(self) -> Path:
        """The working edit as a video; the same edit of a task is rendered once."""
        return media.cached_render(self.task, self.edit, self.folder, self.ffmpeg)

    def _state(self) -> str:
        """The working edit in one line, as a play of it shows it."""
        task, edit = self.task, self.edit
        if task["family"] in ("CS", "NS"):
            return " ".join(["cut", *(key or "-" for key in next(iter(edit.values())))])
        if task["family"] == "RC":
            total = sum(b - a for a, b in (span_of(task, edit, key) for key in task["shots"]))
            return f"cut {total:g} of {task['brief']['target']:g} seconds"
        levels = {key: task["material"][key]["loudness"] + sound_of(edit, key)[0] for key in task["shots"]}
        if task["compact"]:
            return f"uneven {sum(level != LEVEL for level in levels.values())}"
        made = {key: join["type"] for key, join in edit["joins"].items()}
        return "levels " + ", ".join(f"{key} {level:g}" for key, level in levels.items()) + f" LUFS; transitions {made or 'cuts only'}"

    # ------------------------------------------------------------------------------------------------------ editing

    def _change(self, part: str, key: str, row: Any) -> None:
        self.edit = {**self.edit, part: {**self.edit[part], key: row}}

    def _take(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words):
            return problem
        if again := [word for word in words if word in self.edit["select"]]:
            return f"no need , {again[0]} is taken"
        self.edit = {"select": [*self.edit["select"], *dict.fromkeys(words)]}
        return self._state()

    def _drop(self, words: list[str], info: dict[str, Any]) -> str:
        [(name, rows)] = self.edit.items()
        if problem := self._shots(words):
            return problem
        if missing := [word for word in words if word not in rows]:
            return f"no {missing[0]} in the cut"
        kept = [None if key in words else key for key in rows]
        while kept and kept[-1] is None:
            kept.pop()
        self.edit = {name: kept if name == "order" else [key for key in kept if key]}
        return self._state()

    def _add(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words[:1]):
            return problem
        if not is_place(self.task, words[1:]):
            return f"no place {' '.join(words[1:])[:20]} : add ID , or add ID PLACE from 1 to {len(self.task['shots'])}"
        order = self.edit["order"]
        if len(words) == 1 and (words[0] in order or len(order) == len(self.task["shots"])):
            return f"no need , {words[0]} is in the cut" if words[0] in order else "no place behind the last : add ID PLACE"
        self.edit = {"order": put(order, words[0], int(words[1]) if len(words) > 1 else None)}
        return self._state()

    def _trim(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words[:1]):
            return problem
        span = [number(word) for word in words[1:]]
        if wrong := check_span(span, self.task["material"][words[0]]["duration"]):
            return f"no trim : {wrong}"
        self._change("spans", words[0], span)
        return self._state()

    def _gain(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words[:1]):
            return problem
        gain = {"up": STEP, "down": -STEP, "off": 0.0}.get(words[1], number(words[1])) if len(words) == 2 else None
        if gain is None or abs(gain) > MAX_GAIN:
            return f"no gain : gain ID DB , at most {MAX_GAIN:g} either way"
        self._change("sound", words[0], {"music": None, **self.edit["sound"].get(words[0], {}), "gain": gain})
        return f"gain {words[0]} {gain_word(gain) if self.task['compact'] else f'{gain:g} dB'}"

    def _music(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words[:1]):
            return problem
        music = number(words[1]) if len(words) == 2 else None
        if len(words) != 2 or (words[1] != "off" and (music is None or not -60 <= music <= 0)):
            return "no music : music ID DB , from -60 to 0 , or music ID off"
        self._change("sound", words[0], {"gain": 0.0, **self.edit["sound"].get(words[0], {}), "music": music})
        return f"music {words[0]} {words[1]}"

    def _join(self, words: list[str], info: dict[str, Any]) -> str:
        if problem := self._shots(words[:1]):
            return problem
        if len(words) not in (2, 3) or words[0] == self.task["shots"][-1]:
            return "no join after the last shot" if words[0] == self.task["shots"][-1] else "no join : join ID TYPE"
        join = {"type": words[1], "seconds": number(words[2]) if len(words) == 3 else JOINS.get(words[1])}
        if wrong := check_join(join):
            return f"no join : {wrong}"
        self._change("joins", words[0], join)
        return f"join {words[0]} {words[1]}"

    # ------------------------------------------------------------------------------------------------ optional parts

    def oracle_action(self, aim: dict[str, Any] | None = None) -> str:
        """The next response of an expert that wants the reference edit, or ``aim`` (an edit of the same form), from any state."""
        task = self._need_task()
        aim = task["true"] if aim is None else aim
        return getattr(self, f"_plan_{task['family'].lower()}")(aim)

    def _unseen(self, thought: str = "") -> str:
        """A look at the next shots that were not looked at yet; "" when there are none."""
        unseen = [key for key in self.task["shots"] if key not in self.seen]
        many = 3 if self.task["family"] == "CS" and not self.task["compact"] else 1
        return f"{thought}look {' '.join(unseen[:many])}" if unseen else ""

    def _plan_cs(self, aim: dict[str, Any]) -> str:
        task, chosen = self.task, self.edit["select"]
        if wrong := [key for key in chosen if key not in aim["select"]]:
            return f"drop {' '.join(wrong)}"
        if ready := [key for key in task["shots"] if key in aim["select"] and key in self.seen and key not in chosen]:
            return f"take {' '.join(ready)}" if not task["compact"] else f"take {ready[0]}"
        tone = aim.get("tone", task["brief"].get("tone"))
        return self._unseen(f"want {tone}\n" if not self.seen and tone else "") or "submit"

    def _plan_ns(self, aim: dict[str, Any]) -> str:
        task, order = self.task, self.edit["order"]
        for key in task["shots"] if task["compact"] else ():  # an hour has its place: no need to see the others first
            place = aim["order"].index(key) + 1
            if key not in self.seen:
                return f"look {key}"
            if order[place - 1 : place] != [key]:
                return f"{'next' if 'habit' in aim else task['material'][key]['story']} {place}\nadd {key} {place}"
        if look := self._unseen():
            return look
        for place, key in enumerate(aim["order"], 1):
            if order[place - 1 : place] != [key]:
                story = "next" if "habit" in aim else task["material"][key].get("story", "next")
                return f"{story} {key}\nadd {key}" + (f" {place}" if place != len(order) + 1 or key in order else "")
        return "submit"

    def _plan_rc(self, aim: dict[str, Any]) -> str:
        for key in self.task["shots"]:
            start, stop = aim["spans"][key]
            if key not in self.seen:
                return f"look {key}"
            if span_of(self.task, self.edit, key) != (start, stop):
                name = next((p["name"] for p in self.task["material"][key].get("parts", []) if [p["in"], p["out"]] == [start, stop]), "keep")
                return f"{name} {start:g} {stop:g}\ntrim {key} {start:g} {stop:g}"
        return "submit"

    def _plan_fc(self, aim: dict[str, Any]) -> str:
        task = self.task
        for key in task["shots"]:
            shot, (gain, music), sound = task["material"][key], sound_of(aim, key), self.edit["sound"].get(key, {})
            if key not in self.seen:
                return f"look {key}"
            if sound.get("gain", 0.0) != gain:
                cue, value = (loud_word(shot), gain_word(gain)) if task["compact"] else (f"{shot['loudness']:g} LUFS", f"{gain:g}")
                return f"{cue}\ngain {key} {value}"
            if sound.get("music") != music:
                return f"ends on {shot.get('ends', 'nothing')}\nmusic {key} {'off' if music is None else f'{music:g}'}"
            join, made = aim["joins"].get(key, {"type": "cut", "seconds": 0.0}), self.edit["joins"].get(key, {"type": "cut", "seconds": 0.0})
            if join != made:
                seconds = "" if join["seconds"] == JOINS[join["type"]] else f" {join['seconds']:g}"
                return f"{shot.get('ends', 'on')}\njoin {key} {join['type']}{seconds}"
        if task["preview"] and json.dumps(self.edit, sort_keys=True) not in self.previews.values():
            return "render preview.mp4"
        return "submit"

    def admissible(self) -> list[str]:
        """Single calls that can be carried out now. In and out points are the edges of the parts of a shot, gains the compact words, seconds the usual ones."""
        task = self._need_task()
        shots, family = task["shots"], task["family"]
        result = ["list", "play", *(f"look {key}" for key in shots)]
        if family in ("CS", "NS"):
            [rows] = self.edit.values()
            verb, place = ("take", "") if family == "CS" else ("add", f" {rows.index(None) + 1}" if None in rows else "")
            result += [f"drop {key}" if key in rows else f"{verb} {key}{place}" for key in shots]
        elif family == "RC":
            result += [f"trim {key} {p['in']:g} {p['out']:g}" for key in shots for p in task["material"][key].get("parts", [])]
        else:
            result += [f"gain {key} {word}" for key in shots for word in ("up", "down", "off")] + [f"join {key} {kind}" for key in shots[:-1] for kind in JOINS]
            result += [f"music {key} {word}" for key in shots for word in ("-20", "off")] + ["render preview.mp4"]
        return [*result, "submit"]

    def snapshot(self) -> tuple[Any, ...]:
        return self.task, self.edit, self.turns, self.calls, self.seen, self.looked, self.last, self.files, self.previews, self.far

    def restore(self, state: tuple[Any, ...]) -> None:
        self.task, self.edit, self.turns, self.calls, self.seen, self.looked, self.last, self.files, self.previews, self.far = state

    def state_key(self) -> str:
        """Equal for equal states of a task; turns and calls used are not part of it."""
        return json.dumps([self._need_task()["id"], self.edit, sorted(self.seen), self.looked, self.files, self.previews], sort_keys=True)

    def close(self) -> None:
        self.task = None


# ---------------------------------------------------------------------------------------------------------- experts


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The conversation of an expert that looks at everything once and makes the reference edit."""
    return _played(task, None, rng, 0.0, 0.0)


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert with habits to unlearn. In CS, NS and RC a habit spoils the whole episode as often as not (shots or parts as in the
    scene before; shots left in the order in which they are listed), and single choices slip. In FC each decision slips on its own: everything louder, every
    transition a fade. In between it looks again, plays the edit, and sometimes stops early."""
    return _played(task, slipped(task, rng), rng, CHECKS, STOPS)


def slipped(task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The edit that a careless expert is after."""
    true, material, brief, shots = task["true"], task["material"], task["brief"], task["shots"]
    habit = rng.random() < HABIT
    if task["family"] == "CS":
        tone = brief.get("before") if habit else brief.get("tone")
        wanted = [key for key in shots if material[key].get("tone") == tone] if habit else true["select"]
        return {"select": [key for key in shots if (key in wanted) != (rng.random() < NOISE)], "tone": tone}
    if task["family"] == "NS":
        order = list(shots) if habit else list(true["order"])
        for i in range(len(order) - 1):
            if rng.random() < NOISE:
                order[i], order[i + 1] = order[i + 1], order[i]
        return {"order": order, **({"habit": True} if habit else {})}
    if task["family"] == "RC":
        spans = {}
        for key in shots:
            other = [[p["in"], p["out"]] for p in material[key].get("parts", []) if p["name"] == brief.get("skip")]
            spans[key] = other[0] if other and habit != (rng.random() < NOISE) else true["spans"][key]
        return {"spans": spans}
    sound, joins = {}, {}
    for key in shots:
        gain, music = sound_of(true, key)
        if rng.random() < SLIP_GAIN:
            gain = 0.0 if gain > 0 else STEP
        sound[key] = {"gain": gain, "music": None if music is not None and rng.random() < SLIP_JOIN else music}
        if key in true["joins"]:
            kind = true["joins"][key]["type"]
            wrong = "lcut" if kind == "fade" else "fade"
            joins[key] = {"type": wrong, "seconds": JOINS[wrong]} if rng.random() < SLIP_JOIN else true["joins"][key]
    return {"sound": sound, "joins": joins}


def _played(task: dict[str, Any], aim: dict[str, Any] | None, rng: random.Random, checks: float, stops: float) -> list[Message]:
    env = EditingEnv()
    messages, ended = env.reset(task), False
    while not ended:
        action = env.oracle_action(aim)
        if env.seen and rng.random() < checks:
            action = f"wait\nlook {env.last}" if rng.random() < 0.7 else "play"
        elif env.seen and rng.random() < stops:
            action = "submit"
        observation, _, terminated, truncated, _ = env.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        ended = terminated or truncated
    return messages[:-1]


# ------------------------------------------------------------------------------------------------------------ tasks


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """``None``: compact tasks of 600 + 64 generated films, all families; ``cs``, ``ns``, ``rc``, ``fc``: one of them; ``full``: 716 + 81 tasks of 43 + 6 films
    in the paper's sizes; else a folder of films. ``seed`` orders the training tasks. No film is in both splits. Raises DataError for an unusable folder."""
    notes: dict[str, Any] = {"split": "by film"}
    family = path.upper() if path is not None and path.upper() in FAMILIES and not Path(path).is_dir() else ""
    if path is None or family:
        train, evaluation = generated(COMPACT)
        train, evaluation = ([task for task in tasks if family in ("", task["family"])] for tasks in (train, evaluation))
    elif path == "full":
        train, evaluation = generated(FULL)
    elif Path(path).is_dir():
        train, evaluation, read = read_folder(path)
        notes |= read
    else:
        raise DataError(f"--env editing:{path}: neither cs, ns, rc, fc, full nor a folder of films (docs/editing.md has the layout)")
    random.Random(seed).shuffle(train)
    budget = max(task["budget"] for task in [*train, *evaluation])
    name = f"editing:{path}" if path else "editing"
    return TaskSet(name, train, evaluation, EditingEnv, demonstrate, careless=careless, max_turns=budget, notes=notes)


def with_media(tasks: TaskSet, folder: str | Path | None = None, ffmpeg: str = "ffmpeg") -> TaskSet:
    """The same tasks with pictures and sound (the flag ``--render``): clips are a film's own media or test pictures made from the shots' facts, looks give
    frames, previews are rendered. folder: where all that is kept (None: a temporary folder). Raises EditingError without a working ffmpeg."""
    media.find_ffmpeg(ffmpeg)
    place = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="editing-"))
    place.mkdir(parents=True, exist_ok=True)
    return replace(tasks, make_env=partial(EditingEnv, place, ffmpeg))


def export(folder: str | Path, films: int = 2, compact: bool = False, clips: bool = False, ffmpeg: str = "ffmpeg") -> list[Path]:
    """Writes generated films in the documented layout (``films`` of them, the last one for validation), with clips if asked for: an example to start from."""
    paths = []
    for i in range(films):
        film = make_film(f"film{i:03d}", COMPACT if compact else FULL)
        place = Path(folder) / film["id"]
        place.mkdir(parents=True, exist_ok=True)
        film = make_clips(film, place, ffmpeg) if clips else film
        paths.append(place / "film.json")
        paths[-1].write_text(json.dumps(film, indent=1), encoding="utf-8")
    return paths


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.envs.editing", description="Check a folder of films, or write generated films as an example.")
    parser.add_argument("folder", help="folder with one folder a film, each with a film.json")
    parser.add_argument("--export", type=int, metavar="N", default=0, help="write N generated films into the folder instead of checking it")
    parser.add_argument("--render", action="store_true", help="with --export: make clips too (needs ffmpeg)")
    args = parser.parse_args(arguments)
    if args.export:
        try:
            print("\n".join(map(str, export(args.folder, args.export, clips=args.render))))
        except EditingError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if problems := validate(args.folder):
        print("\n".join(problems))
        return 1
    train, evaluation, notes = read_folder(args.folder)
    print(f"{args.folder}: fine; {len(train)} training and {len(evaluation)} validation tasks; films: {notes['films']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
