"""credit.html: where each reward's credit sits in a response, as one self-contained page that opens from a disk without network.

The page holds every episode as JSON in an inert block; its script only ever sets text, never markup, and a content policy by hash lets
no other script run. What a model wrote is therefore shown, not executed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

SCALES = ("diverging", "sequential", "categorical")
PAGE = Path(__file__).parent / "viewer_page"  # page.html (jinja2), page.css, page.js: put inline into every page that is written


class ViewerError(ValueError):
    """An episode record that cannot be shown. The text names the episode, the field and the fix."""


def number(value: Any, where: str) -> float | None:
    """``value`` as a JSON number of 6 significant digits; None for None, NaN and infinities (shown as "no value")."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ViewerError(f"{where} is a {type(value).__name__}; pass a float or None (tensor.tolist() for tensors)")
    return float(f"{value:.6g}") if math.isfinite(value) else None


def strip_domain(values: Sequence[float | None], scale: str) -> tuple[float, float]:
    """Default colour domain for the values of one strip over all episodes.

    diverging: symmetric about 0; sequential: from 0 (or the minimum, where it is negative). The far end is the 99.5 % quantile of |value|,
    so that one outlier does not wash out the page; what lies beyond is drawn in the end colour. categorical: (0, largest code).
    """
    known = sorted(abs(value) if scale == "diverging" else value for value in values if value is not None)
    if not known:
        return (-1.0, 1.0) if scale == "diverging" else (0.0, 1.0)
    if scale == "categorical":
        return 0.0, float(max(known[-1], 0.0))
    top = known[min(len(known) - 1, math.ceil(0.995 * len(known)) - 1)] or known[-1]
    if scale == "diverging":
        top = top or 1.0
        return -top, top
    low = min(0.0, known[0])
    return low, top if top > low else low + 1.0


def check_episode(episode: dict[str, Any], index: int) -> dict[str, Any]:
    """A validated copy of one episode record with rounded numbers. Raises ViewerError."""
    name = f"episode {index} ({episode.get('id', 'no id')!r})"
    for field in ("id", "tokens", "strips"):
        if field not in episode:
            raise ViewerError(f"{name}: field {field!r} is missing")
    tokens = episode["tokens"]
    if not all(isinstance(token, str) for token in tokens):
        raise ViewerError(f"{name}: tokens must be strings; decode the ids one by one")
    strips = []
    for strip in episode["strips"]:
        where = f"{name}, strip {strip.get('name')!r}"
        if strip.get("scale") not in SCALES:
            raise ViewerError(f"{where}: scale is {strip.get('scale')!r}; choose one of {', '.join(SCALES)}")
        if len(strip["values"]) != len(tokens):
            raise ViewerError(f"{where}: {len(strip['values'])} values for {len(tokens)} tokens; give one value a token, None where there is none")
        domain = strip.get("domain")
        if domain is not None and not (len(domain) == 2 and all(map(math.isfinite, domain)) and domain[0] < domain[1]):
            raise ViewerError(f"{where}: domain {domain!r} is not [low, high] with low < high")
        values = [number(value, f"{where}, value {i}") for i, value in enumerate(strip["values"])]
        labels = [str(label) for label in strip.get("labels", ())]
        if strip["scale"] == "categorical" and any(value is not None and (value < 0 or value != int(value)) for value in values):
            raise ViewerError(f"{where}: categorical values are codes 0, 1, 2, ...")
        strips.append(
            {"name": str(strip["name"]), "scale": strip["scale"], "note": str(strip.get("note", "")), "domain": domain, "labels": labels, "values": values}
        )
    turns = []
    for turn in episode.get("turns") or ():
        if not 0 <= turn["start"] <= turn["end"] <= len(tokens):
            raise ViewerError(f"{name}, turn {turn.get('name')!r}: tokens {turn['start']} to {turn['end']} do not lie in 0 to {len(tokens)}")
        value = number(turn.get("value"), f"{name}, turn {turn.get('name')!r}, value")
        turns.append({"name": str(turn.get("name", "")), "start": turn["start"], "end": turn["end"], "value": value})
    turns.sort(key=lambda turn: turn["start"])
    for before, turn in itertools.pairwise(turns):
        if turn["start"] < before["end"]:
            raise ViewerError(f"{name}, turn {turn['name']!r} begins at token {turn['start']}, inside {before['name']!r}, which ends before {before['end']}")
    masked = episode.get("masked")
    if masked is not None and len(masked) != len(tokens):
        raise ViewerError(f"{name}: masked has {len(masked)} entries for {len(tokens)} tokens")
    facts = {}
    for key, value in (episode.get("facts") or {}).items():
        facts[str(key)] = number(value, f"{name}, fact {key!r}") if isinstance(value, float) else value if isinstance(value, (int, type(None))) else str(value)
    return {
        "id": str(episode["id"]),
        "title": str(episode.get("title", episode["id"])),
        "group": str(episode.get("group", "")),
        "prompt": str(episode.get("prompt", "")),
        "facts": facts,
        "tokens": list(tokens),
        "strips": strips,
        "turns": turns,
        "masked": [int(bool(flag)) for flag in masked] if masked is not None else None,
        "notes": [str(note) for note in episode.get("notes") or ()],
    }


def write_credit_html(
    path: str | os.PathLike[str],
    episodes: Sequence[dict[str, Any]],
    title: str,
    subtitle: str = "",
    legend: Sequence[str] = (),
) -> Path:
    """Writes the page, atomically. ``legend``: sentences that explain the quantities. Episodes of one ``group`` are shown side by side.

    An episode is a dict: ``id`` (unique), ``title``, ``group``, ``prompt``, ``facts`` {name: value}, ``tokens`` [T] strings,
    ``strips`` [{"name", "values" [T] floats or None, "scale": diverging | sequential | categorical, "note", "domain" [low, high], "labels" of a
    categorical one}], ``turns`` [{"name", "start", "end" (exclusive), "value"}], ``masked`` [T] (observation tokens), ``notes`` [text].
    Strips without a domain share one over all episodes, by name, so that colours compare. A diverging domain turns at its middle.
    Raises ViewerError naming episode and field.
    """
    checked = [check_episode(episode, i) for i, episode in enumerate(episodes)]
    ids = [episode["id"] for episode in checked]
    for name in ids:
        if ids.count(name) > 1:
            raise ViewerError(f"episode id {name!r} occurs {ids.count(name)} times; ids must be unique")
    pooled: dict[tuple[str, str], list[float | None]] = {}
    for episode in checked:
        for strip in episode["strips"]:
            if strip["domain"] is None:
                pooled.setdefault((strip["name"], strip["scale"]), []).extend(strip["values"])
    shared = {key: strip_domain(values, key[1]) for key, values in pooled.items()}
    turn_values = [turn["value"] for episode in checked for turn in episode["turns"]]
    for episode in checked:
        for strip in episode["strips"]:
            strip["domain"] = list(strip["domain"] or shared[strip["name"], strip["scale"]])
    data = {"episodes": checked, "turn_domain": strip_domain(turn_values, "diverging")}
    html, style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}  # jinja would sort keys and so lose the order of facts
    text = environment.from_string(html).render(
        title=title, subtitle=subtitle, legend=list(legend), data=data, style=style, script=script, script_hash=script_hash
    )
    temporary = Path(path).with_name(f".{Path(path).name}.writing")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")  # titles may hold lone surrogates
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return Path(path)
