"""credit.html: where each reward's credit sits in a response, as one self-contained page that opens from a disk without network.

The page holds every episode as JSON in an inert block; its script only ever sets text, never markup, and a content policy by hash lets
no other script run. What a model wrote is therefore shown, not executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

SCALES = ("diverging", "sequential", "categorical")


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
        "turns": sorted(turns, key=lambda turn: turn["start"]),
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
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    environment = Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}  # jinja would sort keys and so lose the order of facts
    text = environment.from_string(PAGE).render(
        title=title, subtitle=subtitle, legend=list(legend), data=data, style=STYLE, script=SCRIPT, script_hash=script_hash
    )
    temporary = Path(path).with_name(f".{Path(path).name}.writing")
    temporary.write_text(text, encoding="utf-8", errors="replace")  # titles may hold lone surrogates
    os.replace(temporary, path)
    return Path(path)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{{ script_hash }}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
<header>
  <div class="heading"><h1>{{ title }}</h1>{% if subtitle %}<p>{{ subtitle }}</p>{% endif %}</div>
  <div class="controls">
    <div class="choice" id="view" role="group" aria-label="View">
      <button data-value="text" title="Each strip as shaded running text (v)">Text</button><button data-value="grid" title="Strips aligned token by token (v)">Aligned</button><button
       data-value="numbers" title="Aligned, with the values (v)">Values</button>
    </div>
    <div class="choice" id="scope" role="group" aria-label="Episodes shown">
      <button data-value="one" title="One response (s)">One</button><button data-value="group" title="All responses to this prompt (s)">Side by side</button>
    </div>
    <button id="theme" title="Dark or light (t)">Dark</button>
    <button id="help" title="Keys (?)">?</button>
  </div>
</header>
<div class="columns">
  <nav id="episodes" aria-label="Episodes"></nav>
  <main>
    <section id="legend" aria-label="Legend">{% for line in legend %}<p>{{ line }}</p>{% endfor %}<div id="scales"></div></section>
    <details id="prompt"><summary>Prompt</summary><pre></pre></details>
    <div id="cards"></div>
  </main>
</div>
<div id="tip" role="status" hidden></div>
<dialog id="keys"><h2>Keys</h2><dl>
  <dt>left, right</dt><dd>previous, next episode (or prompt, side by side)</dd><dt>, and .</dt><dd>previous, next token</dd>
  <dt>v</dt><dd>text, aligned, values</dd><dt>s</dt><dd>one response or all of its prompt</dd><dt>p</dt><dd>open or close the prompt</dd>
  <dt>1 to 9</dt><dd>show or hide a strip</dd><dt>t</dt><dd>dark or light</dd><dt>Esc</dt><dd>close</dd>
</dl><form method="dialog"><button>Close</button></form></dialog>
<noscript><p>This page draws its data with its own inline script; allow scripts for this file to see the episodes.</p></noscript>
<script type="application/json" id="data">{{ data|tojson }}</script>
<script>{{ script|safe }}</script>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light; --paper: #fbfbf9; --panel: #ffffff; --ink: #1f2328; --soft: #636a73; --faint: #9aa1a9; --line: #e1e3e0; --mark: #0b6bcb; --chip: #f1f2ef; }
:root[data-theme=dark] { color-scheme: dark; --paper: #111419; --panel: #181c22; --ink: #e6e9ed; --soft: #9ea7b3; --faint: #6a7480; --line: #2b313a; --mark: #79b8ff; --chip: #232931; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
header { display: flex; gap: 24px; align-items: center; justify-content: space-between; flex-wrap: wrap; padding: 14px 22px; border-bottom: 1px solid var(--line); background: var(--panel);
  position: sticky; top: 0; z-index: 5; }
h1 { font-size: 19px; margin: 0; letter-spacing: -0.01em; } header p { margin: 2px 0 0; color: var(--soft); }
button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 4px 11px; cursor: pointer; }
button:hover { border-color: var(--faint); } :focus-visible { outline: 2px solid var(--mark); outline-offset: 1px; }
.controls { display: flex; gap: 10px; flex-wrap: wrap; }
.choice { display: flex; } .choice button { border-radius: 0; margin-left: -1px; } .choice button:first-child { border-radius: 6px 0 0 6px; } .choice button:last-child { border-radius: 0 6px 6px 0; }
.choice button[aria-pressed=true] { background: var(--ink); color: var(--panel); border-color: var(--ink); }
.columns { display: grid; grid-template-columns: 236px minmax(0, 1fr); }
nav { border-right: 1px solid var(--line); padding: 12px 10px; position: sticky; top: 62px; align-self: start; max-height: calc(100vh - 62px); overflow-y: auto; }
nav h2 { font-size: 12px; font-weight: 600; color: var(--soft); margin: 14px 6px 4px; overflow-wrap: anywhere; } nav h2:first-child { margin-top: 0; }
nav button { display: block; width: 100%; text-align: left; border: 1px solid transparent; background: none; padding: 5px 7px; border-radius: 6px; overflow-wrap: anywhere; }
nav button:hover { background: var(--chip); } nav button[aria-current=true] { background: var(--chip); border-color: var(--faint); }
nav .row { display: flex; justify-content: space-between; gap: 8px; } nav .row span:last-child { color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
nav canvas { display: block; width: 100%; margin-top: 4px; border-radius: 2px; }
main { padding: 16px 22px 60px; min-width: 0; }
#legend { color: var(--soft); margin-bottom: 12px; max-width: 1200px; } #legend p { margin: 0 0 4px; }
#scales { display: flex; flex-wrap: wrap; gap: 8px 10px; margin-top: 8px; }
.scale { display: block; text-align: left; padding: 5px 10px 6px; color: var(--ink); } .scale[aria-pressed=false] { opacity: 0.4; }
.scale b { font-weight: 600; } .scale small { color: var(--soft); display: block; font-size: 12px; } .scale .ramp { display: block; height: 9px; border-radius: 2px; margin: 4px 0 1px; min-width: 180px; }
.scale .ends { display: flex; justify-content: space-between; font-size: 11px; color: var(--soft); font-variant-numeric: tabular-nums; gap: 10px; }
.scale .swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
details { border: 1px solid var(--line); border-radius: 8px; background: var(--panel); margin-bottom: 14px; } summary { padding: 7px 12px; cursor: pointer; font-weight: 600; }
pre { margin: 0; padding: 4px 14px 12px; white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; max-height: 40vh; overflow: auto; }
#cards { display: grid; gap: 16px; grid-template-columns: minmax(0, 1fr); } #cards.group { grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); }
article { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px 16px; min-width: 0; }
article h3 { margin: 0; font-size: 15.5px; overflow-wrap: anywhere; } article > p { margin: 6px 0; color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: 6px; margin: 8px 0 10px; } .facts span { background: var(--chip); border-radius: 5px; padding: 2px 8px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.facts i { font-style: normal; color: var(--soft); margin-right: 6px; }
.overview { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 12px; align-items: center; margin-bottom: 14px; }
.overview label { font-size: 12px; color: var(--soft); max-width: 150px; overflow-wrap: anywhere; } .overview canvas { width: 100%; height: 15px; border-radius: 3px; cursor: crosshair; display: block; }
.overview .axis { display: flex; justify-content: space-between; font-size: 11px; color: var(--faint); font-variant-numeric: tabular-nums; }
.strip { display: grid; grid-template-columns: 150px minmax(0, 1fr); gap: 14px; padding: 10px 0; border-top: 1px solid var(--line); } .group .strip { grid-template-columns: minmax(0, 1fr); gap: 3px; }
.strip h4 { margin: 0; font-size: 13px; overflow-wrap: anywhere; } .strip h4 small { display: block; font-weight: 400; color: var(--soft); font-size: 12px; }
.text, .grid { font: 13.5px/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.tok { padding: 2px 0; unicode-bidi: isolate; -webkit-box-decoration-break: clone; box-decoration-break: clone; cursor: default; }
.masked { color: var(--faint) !important; font-style: italic; background: none !important; }
.novalue { background: repeating-linear-gradient(135deg, transparent 0 3px, var(--line) 3px 5px); }
.hot { outline: 2px solid var(--mark); outline-offset: 0; border-radius: 1px; position: relative; z-index: 1; }
.space { background: radial-gradient(circle at center, currentColor 0.7px, transparent 1.1px); } .sign { opacity: 0.55; user-select: none; font-size: 0.88em; }
.odd { border: 1px dashed currentColor; border-radius: 3px; font-size: 0.8em; padding: 0 2px; }
.turn { margin: 8px 0 3px; padding: 2px 9px; border-radius: 4px; font: 600 12px/1.5 system-ui, "DejaVu Sans", sans-serif; display: flex; justify-content: space-between; }
.turnbody { border-left: 3px solid var(--line); padding-left: 9px; }
.grid { overflow-x: auto; } .grid table { border-collapse: separate; border-spacing: 1px 1px; margin-bottom: 9px; } .grid th { font: 11.5px/1.2 system-ui, "DejaVu Sans", sans-serif; color: var(--soft);
  text-align: right; padding-right: 8px; white-space: nowrap; max-width: 128px; min-width: 128px; overflow: hidden; text-overflow: ellipsis; } .group .grid th { min-width: 92px; max-width: 92px; }
.grid td { padding: 0 2px; text-align: center; white-space: pre; border-radius: 2px; } .grid td.cell { height: 15px; font-size: 10px; line-height: 15px; font-variant-numeric: tabular-nums; }
.grid td.turncell { font: 600 10.5px/15px system-ui, "DejaVu Sans", sans-serif; text-align: left; padding: 0 5px; overflow: hidden; max-width: 1px; text-overflow: ellipsis; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--ink); color: var(--paper); border-radius: 7px; padding: 7px 11px; font-size: 12.5px; max-width: 380px; box-shadow: 0 4px 18px rgb(0 0 0 / 0.25); }
#tip table { border-spacing: 0; } #tip td { padding: 1px 8px 1px 0; } #tip td:last-child { text-align: right; font-variant-numeric: tabular-nums; padding: 1px 0; } #tip b { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
#tip .swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; border: 1px solid rgb(128 128 128 / 0.5); }
dialog { border: 1px solid var(--line); border-radius: 10px; background: var(--panel); color: var(--ink); } dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; } dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 800px) { .columns { grid-template-columns: minmax(0, 1fr); } nav { position: static; max-height: 190px; border-right: 0; border-bottom: 1px solid var(--line); } header { position: static; }
  .strip { grid-template-columns: minmax(0, 1fr); gap: 3px; } main { padding: 12px; } }
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent), episodes = data.episodes;
const byId = id => document.getElementById(id);
const el = (name, cls, text) => { const node = document.createElement(name); if (cls) node.className = cls; if (text !== undefined) node.textContent = text; return node; };
const RAMPS = {
  light: { diverging: ["#a8480a", "#e08a3c", "#f8d9b8", "#f6f6f3", "#c9def2", "#5c9fd6", "#17579c"], sequential: ["#f6f6f3", "#cfe6dd", "#83c2af", "#36907e", "#0a5a4f"] },
  dark: { diverging: ["#ffb067", "#bd6c22", "#57371d", "#232931", "#1b4066", "#2f77bd", "#8cc4ff"], sequential: ["#232931", "#17473f", "#1f7b6b", "#3bb8a0", "#96f2db"] },
};
const CATEGORIES = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"];
const wanted = new URLSearchParams(location.hash.slice(1));
const state = { at: Math.max(0, episodes.findIndex(e => e.id === wanted.get("e"))), view: wanted.get("v") || "text", scope: wanted.get("s") || "one",
  theme: wanted.get("t") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"), hidden: new Set(), hot: -1, card: null };

const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
function ramp(stops, x) {
  const p = Math.min(1, Math.max(0, x)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(p)), a = rgb(stops[i]), b = rgb(stops[i + 1]);
  return a.map((v, k) => Math.round(v + (b[k] - v) * (p - i)));
}
function colour(value, scale, domain) {
  if (value === null || value === undefined) return null;
  if (scale === "categorical") return rgb(CATEGORIES[value % CATEGORIES.length]);
  return ramp(RAMPS[state.theme][scale], (value - domain[0]) / (domain[1] - domain[0]));
}
const css = c => `rgb(${c.join(",")})`;
const inkOn = c => { const l = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2] > 0.19 ? "#14171b" : "#ffffff"; };
function paint(node, value, scale, domain, masked) {
  const c = masked ? null : colour(value, scale, domain);
  if (masked) node.classList.add("masked");
  else if (c) { node.style.background = css(c); node.style.color = inkOn(c); }
  else node.classList.add("novalue");
}
const show = v => v === null || v === undefined ? "no value" : typeof v === "number" ? (Object.is(v, -0) ? "0" : String(v)) : String(v);
const short = v => { if (v === null) return ""; const a = Math.abs(v); return a === 0 ? "0" : a >= 100 ? v.toFixed(0) : a >= 10 ? v.toFixed(1) : a >= 0.005 ? v.toFixed(2) : v.toExponential(0); };
const signed = v => typeof v === "number" ? (v > 0 ? "+" : "") + show(v) : show(v);
const valueText = (strip, v) => v !== null && strip.scale === "categorical" && strip.labels[v] ? strip.labels[v] : show(v);

// One token as nodes: spaces get a dot, newlines and tabs a sign, what has no glyph of its own a dashed box.
function fill(node, token, breaks) {
  if (token === "") { node.append(el("span", "sign", "\u2205")); return; }
  let run = "";
  const flush = () => { if (run) { node.append(run); run = ""; } };
  for (const ch of token) {
    const code = ch.codePointAt(0);
    if (ch === " ") { flush(); node.append(el("span", "space", " ")); }
    else if (ch === "\n") { flush(); node.append(el("span", "sign", "\u21b5")); if (breaks) node.append("\n"); }
    else if (ch === "\t") { flush(); node.append(el("span", "sign", "\u21e5")); if (breaks) node.append("\t"); }
    else if (code === 0xfffd || (code >= 0xd800 && code <= 0xdfff)) { flush(); node.append(el("span", "odd", "byte")); }
    else if (code < 32 || (code >= 127 && code < 160) || (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2060 && code <= 0x206f) || code === 0xfeff || code === 0xa0 || code === 0xad)
      { flush(); node.append(el("span", "odd", "U+" + code.toString(16).toUpperCase().padStart(4, "0"))); }
    else run += ch;
  }
  flush();
}
const stripsOf = episode => episode.strips.filter(s => !state.hidden.has(s.name));
const turnAt = (episode, i) => episode.turns.find(t => t.start <= i && i < t.end);
function tokenSpan(episode, strip, i) {
  const node = el("span", "tok");
  node.dataset.i = i;
  fill(node, episode.tokens[i], true);
  paint(node, strip.values[i], strip.scale, strip.domain, episode.masked && episode.masked[i]);
  return node;
}
function turnBar(turn) {
  const bar = el("div", "turn");
  bar.append(el("span", "", turn.name), el("span", "", turn.value === null ? "" : signed(turn.value)));
  paint(bar, turn.value, "diverging", data.turn_domain, false);
  return bar;
}
function flowing(episode, strip) {
  const box = el("div", "text");
  let i = 0;
  const until = (parent, end) => { for (; i < end; i++) parent.append(tokenSpan(episode, strip, i)); };
  for (const turn of episode.turns) {
    if (turn.start > i) until(box.appendChild(el("div", "turnbody")), turn.start);
    box.append(turnBar(turn));
    until(box.appendChild(el("div", "turnbody")), Math.max(i, turn.end));
  }
  if (episode.turns.length && i < episode.tokens.length) until(box.appendChild(el("div", "turnbody")), episode.tokens.length);
  until(box, episode.tokens.length);
  return box;
}
function textBody(episode) {
  const box = el("div");
  for (const strip of stripsOf(episode)) {
    const row = el("section", "strip"), head = el("h4", "", strip.name);
    if (strip.note) head.append(el("small", "", strip.note));
    row.append(head, flowing(episode, strip));
    box.append(row);
  }
  return box;
}
// Lines are laid out by measured width, so that every line repeats the strip names at its left.
const pen = document.createElement("canvas").getContext("2d");
function gridBody(episode, width, numbers) {
  const box = el("div", "grid"), strips = stripsOf(episode);
  pen.font = '13.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
  const room = Math.max(160, width - (state.scope === "group" ? 110 : 150));
  const sizes = episode.tokens.map(t => Math.max(numbers ? 34 : 13, pen.measureText(t === "" ? "0" : t.replace(/[\n\t]/g, "\u21b5")).width + 6));
  let start = 0;
  while (start < episode.tokens.length) {
    let end = start, used = 0;
    while (end < episode.tokens.length && (end === start || used + sizes[end] <= room)) { used += sizes[end]; end++; if (/\n/.test(episode.tokens[end - 1])) break; }
    const table = el("table");
    if (episode.turns.length) {
      const row = el("tr"); row.append(el("th", "", "turn"));
      for (let i = start; i < end;) {
        const turn = turnAt(episode, i);
        let j = i + 1; while (j < end && turnAt(episode, j) === turn) j++;
        const cell = el("td", "turncell"); cell.colSpan = j - i;
        if (turn) { cell.textContent = `${turn.name} ${turn.value === null ? "" : signed(turn.value)}`; cell.title = cell.textContent; paint(cell, turn.value, "diverging", data.turn_domain, false); }
        row.append(cell); i = j;
      }
      table.append(row);
    }
    const head = el("tr"); head.append(el("th", "", `${start}`));
    for (let i = start; i < end; i++) { const cell = el("td"); cell.dataset.i = i; fill(cell, episode.tokens[i], false); if (episode.masked && episode.masked[i]) cell.classList.add("masked"); cell.style.minWidth = `${numbers ? 30 : 9}px`; head.append(cell); }
    table.append(head);
    for (const strip of strips) {
      const row = el("tr"), name = el("th", "", strip.name); name.title = strip.name; row.append(name);
      for (let i = start; i < end; i++) {
        const cell = el("td", "cell"); cell.dataset.i = i;
        const masked = episode.masked && episode.masked[i];
        paint(cell, strip.values[i], strip.scale, strip.domain, masked);
        if (numbers && !masked) cell.textContent = strip.scale === "categorical" ? (strip.labels[strip.values[i]] || show(strip.values[i])).slice(0, 5) : short(strip.values[i]);
        row.append(cell);
      }
      table.append(row);
    }
    box.append(table);
    start = end;
  }
  return box;
}
function barcode(canvas, n, colourAt, height) {
  const width = Math.max(1, Math.round((canvas.clientWidth || 200) * devicePixelRatio)), context = canvas.getContext("2d");
  canvas.width = width; canvas.height = Math.round(height * devicePixelRatio);
  for (let i = 0; i < n; i++) {
    const c = colourAt(i); if (!c) continue;
    context.fillStyle = css(c);
    const left = Math.floor(i * width / n);
    context.fillRect(left, 0, Math.max(1, Math.floor((i + 1) * width / n) - left), canvas.height);
  }
}
const stripColour = (episode, strip) => i => episode.masked && episode.masked[i] ? null : colour(strip.values[i], strip.scale, strip.domain);
function overview(episode) {
  const box = el("div", "overview"), jobs = [];
  const add = (name, colourAt) => {
    const canvas = el("canvas");
    canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", `${name} along the response`); canvas.dataset.bar = 1;
    box.append(el("label", "", name), canvas);
    jobs.push(() => barcode(canvas, episode.tokens.length, colourAt, 15));
  };
  if (episode.turns.length) add("turns", i => { const t = turnAt(episode, i); return t ? colour(t.value, "diverging", data.turn_domain) : null; });
  for (const strip of stripsOf(episode)) add(strip.name, stripColour(episode, strip));
  const axis = el("div", "axis"); axis.append(el("span", "", "token 0"), el("span", "", String(episode.tokens.length - 1)));
  if (episode.tokens.length) box.append(el("span"), axis);
  return [box, jobs];
}
function card(episode, parent) {
  const box = el("article"); box.dataset.id = episode.id;
  box.append(el("h3", "", episode.title));
  const facts = el("div", "facts");
  for (const [name, value] of Object.entries(episode.facts)) { const chip = el("span"); chip.append(el("i", "", name), show(value)); facts.append(chip); }
  box.append(facts);
  for (const note of episode.notes) box.append(el("p", "", note));
  const [bars, jobs] = overview(episode);
  box.append(bars);
  parent.append(box);
  const width = box.clientWidth - 34;
  box.append(state.view === "text" ? textBody(episode) : gridBody(episode, width, state.view === "numbers"));
  for (const job of jobs) job();
}
const members = () => state.scope === "one" ? [episodes[state.at]] : episodes.filter(e => e.group === episodes[state.at].group);
function scales() {
  const box = byId("scales"), seen = new Map(), shown = members();
  box.replaceChildren();
  for (const episode of shown) for (const strip of episode.strips) {
    const key = strip.name + "\u0000" + strip.scale + strip.domain.join();
    if (!seen.has(key)) seen.set(key, strip);
  }
  for (const strip of seen.values()) {
    const node = el("button", "scale");
    node.setAttribute("aria-pressed", String(!state.hidden.has(strip.name))); node.title = "Show or hide this strip";
    node.append(el("b", "", strip.name));
    if (strip.scale === "categorical") {
      const list = el("small"), codes = strip.labels.length ? strip.labels : [...new Set(shown.flatMap(e => e.strips.filter(s => s.name === strip.name).flatMap(s => s.values)))].filter(v => v !== null).sort((a, b) => a - b);
      codes.forEach((label, code) => { const mark = el("span", "swatch"); mark.style.background = CATEGORIES[(strip.labels.length ? code : label) % CATEGORIES.length]; list.append(mark, `${label}  `); });
      node.append(list);
    } else {
      const bar = el("span", "ramp"), ends = el("span", "ends"), [low, high] = strip.domain;
      bar.style.background = `linear-gradient(90deg, ${RAMPS[state.theme][strip.scale].join(",")})`;
      const all = episodes.flatMap(e => e.strips.filter(s => s.name === strip.name && s.scale === strip.scale)).flatMap(s => s.values).filter(v => v !== null);
      const below = all.some(v => v < low), above = all.some(v => v > high), tidy = v => String(Number(v.toPrecision(3)));
      ends.append(el("span", "", (below ? "\u2264 " : "") + tidy(low)), el("span", "", tidy((low + high) / 2)), el("span", "", (above ? "\u2265 " : "") + tidy(high)));
      node.append(bar, ends);
    }
    if (strip.note) node.append(el("small", "", strip.note));
    node.onclick = () => toggle(strip.name);
    box.append(node);
  }
}
function toggle(name) { state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name); draw(); }
function sidebar() {
  const nav = byId("episodes"); nav.replaceChildren();
  let last = null;
  episodes.forEach((episode, index) => {
    if (episode.group !== last) { last = episode.group; if (last) nav.append(el("h2", "", last)); }
    const node = el("button"), row = el("span", "row");
    node.dataset.index = index;
    const [name, value] = Object.entries(episode.facts).find(f => /^(total|return|reward|success|advantage)$/i.test(f[0])) || Object.entries(episode.facts)[0] || ["", ""];
    row.append(el("span", "", episode.title), el("span", "", typeof value === "number" ? short(value) : show(value)));
    row.lastChild.title = name;
    const thumb = el("canvas"); thumb.style.height = `${Math.max(4, 4 * Math.min(6, episode.strips.length))}px`;
    node.append(row, thumb); nav.append(node);
    node.onclick = () => { state.at = index; draw(); scrollTo(0, 0); };
  });
}
function thumbs() {
  document.querySelectorAll("nav button").forEach(node => {
    const episode = episodes[node.dataset.index], canvas = node.querySelector("canvas"), strips = episode.strips.slice(0, 6), n = episode.tokens.length;
    const width = canvas.clientWidth || 200, context = canvas.getContext("2d"); canvas.width = width; canvas.height = Math.max(1, strips.length * 4);
    strips.forEach((strip, k) => { const at = stripColour(episode, strip); for (let i = 0; i < n; i++) { const c = at(i); if (c) { context.fillStyle = css(c); context.fillRect(i * width / n, k * 4, Math.max(1, width / n), 3); } } });
  });
}
function draw() {
  document.documentElement.dataset.theme = state.theme;
  byId("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
  for (const [id, key] of [["view", "view"], ["scope", "scope"]]) for (const node of byId(id).children) node.setAttribute("aria-pressed", String(node.dataset.value === state[key]));
  if (!episodes.length) { byId("cards").replaceChildren(el("p", "", "No episodes were recorded.")); byId("prompt").hidden = true; return; }
  const shown = members(), box = byId("cards");
  document.querySelectorAll("nav button").forEach(node => node.setAttribute("aria-current", String(shown.includes(episodes[node.dataset.index]))));
  state.card = null; state.hot = -1; byId("tip").hidden = true;
  byId("prompt").querySelector("pre").textContent = shown[0].prompt; byId("prompt").hidden = !shown[0].prompt;
  box.className = state.scope === "group" ? "group" : "";
  box.replaceChildren();
  scales();
  for (const episode of shown) card(episode, box);
  thumbs();
  history.replaceState(null, "", "#" + new URLSearchParams({ e: episodes[state.at].id, v: state.view, s: state.scope, t: state.theme }));
}
function heat(article, i, x, y) {
  if (state.card !== article || state.hot !== i) {
    document.querySelectorAll(".hot").forEach(node => node.classList.remove("hot"));
    if (article) article.querySelectorAll(`[data-i="${i}"]`).forEach(node => node.classList.add("hot"));
    state.card = article; state.hot = i;
  }
  const tip = byId("tip");
  if (!article) { tip.hidden = true; return; }
  const episode = episodes.find(e => e.id === article.dataset.id);
  tip.replaceChildren();
  const head = el("div"); head.append(el("b", "", JSON.stringify(episode.tokens[i])), `  token ${i}${episode.masked && episode.masked[i] ? ", not trained on" : ""}`);
  const table = el("table"), turn = turnAt(episode, i);
  const line = (name, text, c) => { const row = el("tr"), first = el("td"), mark = el("span", "swatch"); if (c) mark.style.background = css(c); first.append(mark, name); row.append(first, el("td", "", text)); table.append(row); };
  if (turn) line(turn.name, show(turn.value), colour(turn.value, "diverging", data.turn_domain));
  for (const strip of episode.strips) line(strip.name, valueText(strip, strip.values[i]), colour(strip.values[i], strip.scale, strip.domain));
  tip.append(head, table); tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 8, x + 14))}px`;
  tip.style.top = `${y + 20 + tip.offsetHeight > innerHeight ? Math.max(4, y - tip.offsetHeight - 14) : y + 20}px`;
}
byId("cards").addEventListener("mousemove", event => {
  const article = event.target.closest("article");
  if (!article) return heat(null, -1);
  const bar = event.target.closest("canvas[data-bar]"), token = event.target.closest("[data-i]");
  if (token) return heat(article, Number(token.dataset.i), event.clientX, event.clientY);
  if (bar) { const n = episodes.find(e => e.id === article.dataset.id).tokens.length, box = bar.getBoundingClientRect(); return heat(article, Math.min(n - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * n))), event.clientX, event.clientY); }
  heat(null, -1);
});
byId("cards").addEventListener("mouseleave", () => heat(null, -1));
byId("cards").addEventListener("click", event => { if (event.target.closest("canvas[data-bar]") && state.card) state.card.querySelector(`[data-i="${state.hot}"]`)?.scrollIntoView({ block: "center" }); });
function step(by) {
  if (state.scope === "one") state.at = (state.at + by + episodes.length) % episodes.length;
  else {
    const groups = [...new Set(episodes.map(e => e.group))], next = groups[(groups.indexOf(episodes[state.at].group) + by + groups.length) % groups.length];
    state.at = episodes.findIndex(e => e.group === next);
  }
  draw();
  document.querySelector('nav button[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
}
function moveToken(by) {
  const article = state.card || document.querySelector("article"), n = episodes.find(e => e.id === article.dataset.id).tokens.length;
  if (!n) return;
  const i = state.hot < 0 ? 0 : (state.hot + by + n) % n, node = article.querySelector(`[data-i="${i}"]`);
  if (!node) return;
  node.scrollIntoView({ block: "nearest" });
  const box = node.getBoundingClientRect();
  heat(article, i, box.left, box.bottom - 14);
}
const VIEWS = ["text", "grid", "numbers"];
const actions = { v: () => { state.view = VIEWS[(VIEWS.indexOf(state.view) + 1) % 3]; draw(); }, s: () => { state.scope = state.scope === "one" ? "group" : "one"; draw(); },
  t: () => { state.theme = state.theme === "dark" ? "light" : "dark"; draw(); }, p: () => { byId("prompt").open = !byId("prompt").open; }, "?": () => byId("keys").showModal(),
  ArrowLeft: () => step(-1), ArrowRight: () => step(1), ",": () => moveToken(-1), ".": () => moveToken(1), Escape: () => heat(null, -1) };
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open || !episodes.length) return;
  const digit = /^[1-9]$/.test(event.key) ? episodes[state.at].strips[event.key - 1] : null;
  if (digit) toggle(digit.name);
  else if (Object.hasOwn(actions, event.key)) { actions[event.key](); event.preventDefault(); }
});
byId("view").onclick = event => { if (event.target.dataset.value) { state.view = event.target.dataset.value; draw(); } };
byId("scope").onclick = event => { if (event.target.dataset.value) { state.scope = event.target.dataset.value; draw(); } };
byId("theme").onclick = actions.t;
byId("help").onclick = actions["?"];
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
sidebar();
draw();
"""
