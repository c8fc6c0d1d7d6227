"""Report of outcome_decomp.py: terminal tables, metrics.json, lone_wins.jsonl and one self-contained report.html. Computes nothing but positions on paper."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from jinja2 import Environment

PAGE = Path(__file__).parent / "common" / "outcome_page"  # report.html (jinja2, autoescaped), report.css
TERMS = (("finishing", "finishing F"), ("reliability", "reliability P"), ("reach", "reach, net"))
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 430, 250, 46, 10, 14, 38  # of one chart in SVG units


def known(x: float | None) -> bool:
    return x is not None and not math.isnan(x)


def signed(x: float | None, digits: int = 3) -> str:
    return f"{round(x, digits) + 0.0:+.{digits}f}" if known(x) else "-"  # + 0.0: no "-0.000"


def plain(x: float | None, digits: int = 3) -> str:
    return f"{x:.{digits}f}" if known(x) else "-"


def interval(v: list[float] | None, sign: bool = True, digits: int = 3) -> str:
    """ "+0.123 [+0.100, +0.150]"; "-" where the value does not exist."""
    show = signed if sign else plain
    if v is None or not known(v[0]):
        return "-"
    return show(v[0], digits) + (f" [{show(v[1], digits)}, {show(v[2], digits)}]" if known(v[1]) else " [-]")


def tokens(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n / 1000:g}k" if n >= 1000 and n % 100 == 0 else str(n)


def mark(row: dict[str, Any]) -> str:
    """What the comparison rule says about a row: "below cap", "cap?" or nothing; "few" where hardly anything finished."""
    words = ["cap?" if row["below_cap"] is None else "below cap" if row["below_cap"] else ""]
    words += ["few finished" if row["few_finished"] else ""]
    return ", ".join(w for w in words if w)


def grid_text(head: list[str], body: list[list[str]]) -> str:
    """Aligned text; the first column left, the others right."""
    widths = [max(len(r[i]) for r in [head, *body]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))).rstrip() for r in [head, *body])


def pair_name(row: dict[str, Any]) -> str:
    return f"{row['rl']} - {row['base']}" + (f" ({row['dataset']})" if row["dataset"] else "")


# ---------------------------------------------------------------------------------------------------------------------- terminal


def terminal(result: dict[str, Any]) -> str:
    """Summary for a terminal: pass@1 by pair and budget (only tight and reading budgets when there are many), then the checks and the warnings."""
    rows = [r for r in result["rows"] if r["k"] == 1 and r["grader"] == "matcher"]
    shown = rows if len(rows) <= 40 else [r for r in rows if r["reading"]]
    head = ["RL - base", "budget", "fin@1", "pass@1|fin", "change of pass@1", "finishing", "reliability", "reach", ""]
    body = []
    for r in shown:
        t = r["terms"]
        arrow = [f"{plain(t[a][0], 2)} > {plain(t[b][0], 2)}" for a, b in (("fin_base", "fin_rl"), ("cond_base", "cond_rl"))]
        flag = " ".join(w for w in ("<- read here" if r["reading"] else "", mark(r)) if w)
        body.append([pair_name(r), tokens(r["budget"]), *arrow, interval(t["delta"]), *(signed(t[m][0]) for m, _ in TERMS), flag])
    parts = [grid_text(head, body)]
    lines = [text for _, text in summary_lines(result)]
    if result.get("predictions"):
        lines += [
            f"prediction {'held  ' if s['held'] else 'FAILED'}  {s['text']}" + (f"  ({s['why']})" if s["why"] else "") for s in result["predictions"]["scores"]
        ]
        lines += [f"not a pre-registration: {f} is older than the predictions" for f in result["predictions"]["late"]]
    lines += [f"warning: {w}" for w in result["warnings"]] + [f"note: {n}" for n in result["notes"]]
    return "\n".join([*parts, "", *lines])


def summary_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, sentence) of every finding over all pairs."""
    s, pooled, out = result["summary"], result["pooled"], []
    count = pooled["counts"]
    if s["points"]:
        share = interval(s["finishing_share"], False, 2)
        out.append(("finishing", f"finishing is {share} of the movement at budgets up to {tokens(s['tight'])} ({s['points']} points of pair and budget)"))
        if "spearman_delta_finishing" in s:
            out.append(
                (
                    "spearman",
                    f"Spearman there: total change with finishing {interval(s['spearman_delta_finishing'], True, 2)}, "
                    f"log length ratio with change of fin@1 {interval(s['spearman_length_finishing'], True, 2)}",
                )
            )
    out.append(("reach", f"net reach where the pairs are read: mean {signed(s['reach_mean'], 4)}, largest {signed(s['reach_max'], 4)}"))
    if "catch_up" in s:
        c = s["catch_up"]
        then, last = f"base {c['base_then']:.2f}, RL {c['rl_then']:.2f} there", f"base {c['base_last']:.2f}, RL {c['rl_last']:.2f} at the largest budget"
        out.append(("catch_up", f"problems on which RL leads at a tight budget ({c['problems']} cases): {then}; {last}"))
    for r in result["lengths"]:
        if "backtracks_ratio" in r and len(result["lengths"]) <= 6:
            per = f"{r['backtracks_base'][0]:.2f} > {r['backtracks_rl'][0]:.2f} an answer (ratio {interval(r['backtracks_ratio'], False, 2)})"
            rate = f"{r['per_1000_tokens_base']:.2f} > {r['per_1000_tokens_rl']:.2f} per 1,000 tokens"
            out.append(("words", f"wait / actually, {pair_name(r)}: {per}, {rate}; length ratio {interval(r['length_ratio'], False, 2)}"))
    odds = f"sign test p {pooled['p']:.2g}; {pooled['chance']:.1f} each expected if both were one model"
    out.append(("lone", f"lone wins: RL {count['rl']} against base {count['base']} ({odds})"))
    if count["checked_rl"] + count["checked_base"]:
        rates = [f"{s} wins {count[f'recovered_{s}']} of {count[f'checked_{s}']} ({interval(pooled[f'recovery_{s}'], False, 2)})" for s in ("rl", "base")]
        out.append(("recovery", "further samples of the loser solve: " + ", ".join(rates)))
    return out


# ---------------------------------------------------------------------------------------------------------------------- charts


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that cover low to high."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def scale(low: float, high: float, start: float, end: float):
    return lambda x: round(start + (x - low) / (high - low) * (end - start), 2)


def stack(terms: dict[str, list[float]], at) -> tuple[list[dict[str, Any]], float, float]:
    """Segments of one stacked bar: positive terms away from 0 on one side, negative ones on the other."""
    up = down = 0.0
    parts = []
    for name, label in TERMS:
        value = terms[name][0]
        start = up if value >= 0 else down
        parts.append({"name": name, "from": at(start), "to": at(start + value), "tip": f"{label} {interval(terms[name])}"})
        up, down = (up + value, down) if value >= 0 else (up, down + value)
    return parts, down, up


def bars(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stacked bars, one per budget."""
    spread = [stack(r["terms"], float)[1:] for r in rows]
    whisker = [x for r in rows for x in r["terms"]["delta"] if known(x)]
    marks = ticks(min([0.0, *whisker, *(d for d, _ in spread)]), max([0.0, 0.01, *whisker, *(u for _, u in spread)]))
    y = scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(rows)
    out = []
    for i, r in enumerate(rows):
        delta = r["terms"]["delta"]
        tip = f"change of pass@1 {interval(delta)}"
        bar = {
            "x": round(LEFT + (i + 0.18) * width, 2),
            "width": round(0.64 * width, 2),
            "middle": round(LEFT + (i + 0.5) * width, 2),
            "label": tokens(r["budget"]),
        }
        whiskers = [y(delta[1]), y(delta[2])] if known(delta[1]) else None
        out.append(bar | {"parts": stack(r["terms"], y)[0], "dot": y(delta[0]), "whisker": whiskers, "tip": tip, "reading": r["reading"]})
    below = sum(bool(r["below_cap"]) for r in rows)
    return {"bars": out, "zero": y(0), "ticks": [(y(t), f"{t:+g}" if t else "0") for t in marks], "below": round(below * width, 2) if below else 0}


def curves(rows: list[dict[str, Any]], names: tuple[str, str]) -> dict[str, Any]:
    """Base and RL over the budgets (log scale), with bands."""
    budgets = [math.log(r["budget"]) for r in rows]
    span = (budgets[0], budgets[-1]) if len(rows) > 1 else (budgets[0] - 1, budgets[0] + 1)
    x, y = scale(*span, LEFT + 12, WIDTH - RIGHT - 12), scale(0, 1, HEIGHT - BOTTOM, TOP)
    lines = []
    for name, side in zip(names, ("base", "rl")):
        values = [(x(b), r["terms"][name], tokens(r["budget"])) for b, r in zip(budgets, rows) if known(r["terms"][name][0])]
        banded = [(at, v) for at, v, _ in values if known(v[1])]
        band = " ".join(f"{at},{y(v[2])}" for at, v in banded) + " " + " ".join(f"{at},{y(v[1])}" for at, v in reversed(banded))
        dots = [{"x": at, "y": y(v[0]), "tip": f"{side} at {label}: {interval(v, False)}"} for at, v, label in values]
        lines.append({"side": side, "points": " ".join(f"{d['x']},{d['y']}" for d in dots), "dots": dots, "band": band})
    cap = next((math.log(r["cap"]) for r in rows if r["cap"]), None)
    labels, last = [], -math.inf
    for b, r in zip(budgets, rows):
        if x(b) - last >= 30:
            labels.append((x(b), tokens(r["budget"])))
            last = x(b)
    return {
        "lines": lines,
        "ticks": [(y(t / 4), f"{t / 4:g}") for t in range(5)],
        "labels": labels,
        "cap": x(cap) if cap and span[0] <= cap <= span[1] else None,
    }


def overview(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Horizontal stacked bars, one per pair at its reading budget."""
    spread = [stack(r["terms"], float)[1:] for r in rows]
    whisker = [x for r in rows for x in r["terms"]["delta"] if known(x)]
    marks = ticks(min([0.0, *whisker, *(d for d, _ in spread)]), max([0.0, 0.01, *whisker, *(u for _, u in spread)]))
    x = scale(marks[0], marks[-1], 250, 880)
    out = []
    for i, r in enumerate(rows):
        delta, top = r["terms"]["delta"], 12 + 30 * i
        note = f"at {tokens(r['budget'])}" + (f", {mark(r)}" if mark(r) else "")
        whiskers = [x(delta[1]), x(delta[2])] if known(delta[1]) else None
        line = {"y": top, "name": pair_name(r), "note": note, "parts": stack(r["terms"], x)[0], "dot": x(delta[0]), "whisker": whiskers}
        out.append(line | {"tip": f"change of pass@1 {interval(delta)}"})
    return {"rows": out, "zero": x(0), "height": 12 + 30 * len(rows) + 26, "ticks": [(x(t), f"{t:+g}" if t else "0") for t in marks]}


# ---------------------------------------------------------------------------------------------------------------------- files


def without_nan(value: Any) -> Any:
    """The same with NaN and infinities as None, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    return [without_nan(v) for v in value] if isinstance(value, (list, tuple)) else value


def sections(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page shows of every pair and data set."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in result["rows"]:
        groups.setdefault((r["dataset"], r["rl"], r["base"]), []).append(r)
    out = []
    for key, rows in groups.items():
        first = [r for r in rows if r["k"] == 1 and r["grader"] == "matcher"]
        at = next(r for r in first if r["reading"])
        judged = next((r for r in rows if r["k"] == 1 and r["grader"] == "judge" and r["reading"]), None)
        charts = {"bars": bars(first), "fin": curves(first, ("fin_base", "fin_rl")), "cond": curves(first, ("cond_base", "cond_rl"))}
        more = [r for r in rows if r["k"] > 1 and r["grader"] == "matcher"]
        catch = [c for c in result["catch_up"] if (c["dataset"], c["rl"], c["base"]) == key]
        out.append({"name": pair_name(at), "at": at, "rows": first, "more": more, "judged": judged, "charts": charts, "catch": catch})
    return out


def write(folder: Path, result: dict[str, Any], args: Any, files: list[str]) -> None:
    """report.html, metrics.json, lone_wins.jsonl, each replaced in one step."""

    def put(name: str, text: str) -> None:
        temporary = folder / f".{name}.writing"
        try:
            temporary.write_text(text, encoding="utf-8", errors="replace")
            os.replace(temporary, folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    wins = result["lone_wins"]
    metrics = {"args": dataclasses.asdict(args), "files": files, **{k: v for k, v in result.items() if k != "lone_wins"}}
    put("metrics.json", json.dumps(without_nan(metrics), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    put("lone_wins.jsonl", "".join(json.dumps(without_nan(w), ensure_ascii=False, allow_nan=False) + "\n" for w in wins))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"interval": interval, "signed": signed, "plain": plain, "tokens": tokens, "mark": mark, "pair_name": pair_name}
    environment.globals |= {"W": WIDTH, "H": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM, "TERMS": TERMS}
    reading = [r for r in result["rows"] if r["k"] == 1 and r["grader"] == "matcher" and r["reading"]]
    page = environment.from_string((PAGE / "report.html").read_text(encoding="utf-8"))
    style = (PAGE / "report.css").read_text(encoding="utf-8")
    put(
        "report.html",
        page.render(
            r=result,
            args=args,
            files=files,
            style=style,
            overview=overview(reading),
            sections=sections(result),
            findings=summary_lines(result),
            wins=wins[:400],
        ),
    )
