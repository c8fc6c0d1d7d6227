"""What credit_granularity.py measures and keeps of episodes, how credit.html shows them, and the comparison of schemes: report.json, report.png and one
self-contained report.html out of run folders.

    python credit_report.py runs/a runs/b ... --out FOLDER

Runs of one scheme (opsd: and one kind of privileged text) are joined over their seeds: mean and 95 % t-interval. Reads metrics only, never a model.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment
from scipy.stats import spearmanr

from common.arguments import compare_args
from common.checkpoints import checkpoint_folders
from common.curves import COLOURS, MAY_CHANGE, STYLE, RunError, mean_interval, read_json, read_jsonl, run_folder_of, series, smooth, t_quantile
from common.envs.editing import EditingError, render
from common.envs.editing_judges import REFLECTION, mixing_score, parse
from common.rollout import Episode


def kl_concentration(total: torch.Tensor, tokens: torch.Tensor, share: float = 0.05) -> dict[str, tuple[float, float]]:
    """Share of the KL, and of the tokens, in the most divergent `share` of turns, by the sum of KL over a turn (at least one turn). total, tokens [T]"""
    top = torch.argsort(total, descending=True, stable=True)[: math.ceil(share * len(total) - 1e-9)]
    return {
        "granularity/kl_in_top_turns": (float(total[top].sum()), float(total.sum())),
        "granularity/tokens_in_top_turns": (float(tokens[top].sum()), float(tokens.sum())),
    }


def behaviour(episodes: Sequence[Episode]) -> dict[str, tuple[float, float]]:
    """What the policy does with its budget, as (sum, count) pairs. Turns count as good or bad by the true score, and by the process judge's side of 0.5."""
    turns = [t for e in episodes for t in e.turns]
    thoughts = [parse(t.text)[0] for t in turns]
    process = [t.info["process"] for t in turns if not math.isnan(t.info.get("process", math.nan))]
    frames = [sum(t.info.get("frames", 0) for t in e.turns) for e in episodes]
    true = [[t.info.get("judged") for t in e.turns] for e in episodes]
    seen = [[t.info.get("process", math.nan) for t in e.turns] for e in episodes]
    mixing = {
        "mixing": [mixing_score(row) for row in true],
        "mixing_process": [mixing_score(["good" if x > 0.5 else "bad" if x < 0.5 else "" for x in row]) for row in seen],
    }
    n, n_turns = float(len(episodes)), float(len(turns))
    return {
        "success": (math.fsum(e.success for e in episodes), n),
        "truncated_frac": (float(sum(bool(e.truncated) for e in episodes)), n),
        "turns": (n_turns, n),
        "tool_calls": (float(sum(t.info.get("tool_calls", 0) for t in turns)), n),
        "frames": (float(sum(frames)), n),
        "blind_frac": (float(sum(f == 0 for f in frames)), n),
        "reasoning_chars": (float(sum(map(len, thoughts))), n_turns),
        "reflection_frac": (float(sum(REFLECTION.search(text) is not None for text in thoughts)), n_turns),
        "invalid_frac": (float(sum(bool(t.info.get("invalid")) for t in turns)), n_turns),
        "process_reward": (math.fsum(process), float(len(process))),
        **{name: (math.fsum(x for x in row if x == x), float(sum(x == x for x in row))) for name, row in mixing.items()},
    }


def write_previews(episodes: Sequence[Episode], folder: Path) -> None:
    """Previews (mp4) of what episodes handed in, as far as ffmpeg can make them; says why not."""
    for e in episodes:
        try:
            render(e.task, e.turns[-1].info["edit"], folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', e.task['id']).lstrip('.')}-{e.sample}.mp4")
        except EditingError as error:
            print(f"--render: {error}", file=sys.stderr)
            return


def episode_record(step: int, e: Episode, outcome_adv: float, turn_adv: Sequence[float], weight: float, kl: Sequence[float] | None, tokenizer) -> dict:
    """What episodes.jsonl keeps of an episode: exact tokens, log-probs, and of each turn its credit from outcome and process, its votes, or its KL."""
    turns, first = [], 0
    for t, a in zip(e.turns, turn_adv):
        own = slice(first, first := first + t.stop - t.start)
        turns.append(
            {
                "start": t.start, "stop": t.stop, "tool": t.info.get("tool", ""), "judged": t.info.get("judged"), "process": t.info.get("process"),
                "votes": t.info.get("votes"), "outcome_advantage": outcome_adv, "turn_advantage": a, "advantage": outcome_adv + weight * a,
                "kl": None if kl is None else float(np.sum(kl[own])),
            }
        )  # fmt: skip
    return {
        "step": step, "group": e.group, "sample": e.sample, "task_id": e.task["id"], "prompt": tokenizer.decode(e.prompt_ids), "prompt_ids": e.prompt_ids,
        "token_ids": e.token_ids, "tokens": [tokenizer.decode([t]) for t in e.token_ids], "policy_mask": e.policy_mask, "logprobs": e.logprobs,
        "turns": turns, "reward": e.reward, "success": e.success, "truncated": e.truncated, "weight": weight, "kl": None if kl is None else list(kl),
    }  # fmt: skip


def viewer_episode(record: dict) -> dict:
    """One line of episodes.jsonl as an entry of credit.html: a bar per turn with its advantage, or its KL; where it comes from along the tokens."""
    own, distils = record["policy_mask"], record["kl"] is not None

    def strip(name: str, key: str, scale: str, note: str) -> dict:
        values: list[float | None] = [None] * len(own)
        for t in record["turns"]:
            values[t["start"] : t["stop"]] = [t[key]] * (t["stop"] - t["start"])
        return {"name": name, "values": values, "scale": scale, "note": note}

    if distils:
        rest = iter(record["kl"])
        strips = [{"name": "KL", "values": [next(rest) if o else None for o in own], "scale": "sequential", "note": "teacher to policy, nats"}]
        strips.append(strip("KL of the turn", "kl", "sequential", "sum over its tokens"))
    else:
        strips = [
            strip("outcome", "outcome_advantage", "diverging", "advantage of the episode"),
            strip("turn", "turn_advantage", "diverging", f"advantage of the turn, weight {record['weight']:.3g}"),
            strip("sum", "advantage", "diverging", "what the loss uses"),
        ]
    if any(t["process"] is not None for t in record["turns"]):
        strips.append(strip("process", "process", "sequential", "mean of the votes") | {"domain": [0, 1]})

    def name(i: int, t: dict) -> str:
        votes = "" if t["votes"] is None else ", votes " + " ".join("-" if v is None else f"{v:g}" for v in t["votes"])
        return f"turn {i}: {t['tool'] or 'no action'}, {t['judged'] or 'not judged'}{votes}"

    return {
        "id": f"u{record['step']} g{record['group']} s{record['sample']}",
        "title": f"update {record['step']}, sample {record['sample']}" + (f" (cut: {record['truncated']})" if record["truncated"] else ""),
        "group": f"update {record['step']}, {record['task_id']}",
        "prompt": record["prompt"],
        "facts": {"outcome": record["success"], "turns": len(record["turns"]), "tokens": len(record["logprobs"])},
        "tokens": record["tokens"],
        "turns": [
            {"name": name(i, t), "start": t["start"], "end": t["stop"], "value": t["kl" if distils else "advantage"]} for i, t in enumerate(record["turns"], 1)
        ],
        "masked": [not o for o in own],
        "strips": strips,
    }


# ------------------------------------------------------------------------------------------------- comparison of schemes

VARIANTS: dict[str, dict] = {
    "outcome": {"scheme": "outcome"},
    "prm_fixed": {"scheme": "prm_fixed"},
    "prm_decay": {"scheme": "prm_decay"},
    "opsd_reference": {"scheme": "opsd", "privileged": "reference"},
    "opsd_turn_advice": {"scheme": "opsd", "privileged": "turn_advice"},
}
ORDER = ("outcome", "prm_fixed", "prm_decay", "opsd reference", "opsd turn_advice")
FAMILIES = ("CS", "NS", "RC", "FC")
BEHAVIOUR = {  # evaluation metric -> heading
    "truncated_frac": "cut", "turns": "turns", "tool_calls": "tool calls", "frames": "frames", "blind_frac": "blind",
    "reasoning_chars": "characters of thought a turn", "reflection_frac": "turns with reflection", "length": "tokens",
}  # fmt: skip
FALL = 0.02  # by how much the smoothed outcome must fall from its peak, while the process reward rises, to be called hacking

Value = tuple[float, float]  # mean over seeds, half width of the 95 % interval; NaN where there is none


def variant_of(args: dict[str, Any]) -> str:
    return f"opsd {args['privileged']}" if args["scheme"] == "opsd" else args["scheme"]


def over_seeds(values: Sequence[float | None]) -> Value:
    """Mean and half width of the t-interval over runs; missing values are left out."""
    x = np.array([v for v in values if v is not None and math.isfinite(v)])
    if not len(x):
        return math.nan, math.nan
    return float(x.mean()), float(t_quantile(len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def reward_curves(outcome: np.ndarray, process: np.ndarray) -> dict[str, Any]:
    """How the smoothed curves of outcome and process reward [U], one value an update, part.

    crossing: first update from which process stays above outcome to the end, None where it is never above at the end or always was; peak: update of the
    highest outcome; outcome_fall, process_rise: change from there to the end; hacking: the outcome fell by more than FALL while the process reward rose.
    """
    if len(outcome) == 0:
        return {"crossing": None, "peak": None, "outcome_fall": math.nan, "process_rise": math.nan, "hacking": False}
    o, p = smooth(outcome), smooth(process)
    below = np.flatnonzero(p <= o)
    crossing = int(below[-1]) + 2 if len(below) and below[-1] < len(o) - 1 else None
    peak = int(o.argmax())
    fall, rise = float(o[peak] - o[-1]), float(p[-1] - p[peak])
    return {"crossing": crossing, "peak": peak + 1, "outcome_fall": fall, "process_rise": rise, "hacking": fall > FALL and rise > 0}


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> dict[str, list[tuple[Path, dict, list[dict]]]]:
    """variant -> [(folder, arguments, metric records)], in the report's order. Raises RunError for what is no run of this script, or not comparable."""
    found: dict[str, list[tuple[Path, dict, list[dict]]]] = {}
    first: tuple[Path, dict] | None = None
    for given in folders:
        folder = run_folder_of(given)
        args, rows = read_json(folder / "args.json"), read_jsonl(folder / "metrics.jsonl")
        if "scheme" not in args or "privileged" not in args:
            raise RunError(f"{folder} is no run of credit_granularity.py: its args.json has no scheme")
        if not rows or not any("eval/success" in row for row in rows):
            raise RunError(f"{folder}: metrics.jsonl has no evaluation yet; let the run finish")
        first = first or (folder, args)
        for name in ("env", "model", "num_updates", "groups_per_update", "eval_tasks", "eval_samples"):
            if args.get(name) != first[1].get(name):
                raise RunError(f"{folder} has --{name.replace('_', '-')} {args.get(name)}, {first[0]} has {first[1].get(name)}: not one comparison")
        if rows[-1]["step"] < args["num_updates"]:
            raise RunError(f"{folder} stopped at update {rows[-1]['step']} of {args['num_updates']}: continue it with --resume {folder}")
        if rows[-1].get("eval/success") is None:
            raise RunError(f"{folder} has no evaluation of its last update (a judge gave up): continue it with --resume {folder}")
        group = found.setdefault(variant_of(args), [])
        if any(other["seed"] == args["seed"] for _, other, _ in group):
            raise RunError(f"{folder}: a second run of {variant_of(args)} with seed {args['seed']}; a seed counts once")
        if group and (problems := compare_args(group[0][1], args, MAY_CHANGE | {"seed"})):
            raise RunError(f"{folder} and {group[0][0]} are not two seeds of one variant: {'; '.join(problems)}")
        group.append((folder, args, rows))
    return {name: found[name] for name in sorted(found, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER))}


def end(rows: Sequence[dict], key: str, which: int = -1) -> float | None:
    values = series(rows, key)[1]
    return float(values[which]) if len(values) else None


def mean_of(rows: Sequence[dict], key: str) -> float | None:
    values = series(rows, key)[1]
    return float(values.mean()) if len(values) else None


def summarise(runs: dict[str, list[tuple[Path, dict, list[dict]]]]) -> dict[str, Any]:
    """Everything that the report says, as JSON: per variant scores, behaviour, cost, reward curves and KL; mixing against gain by family."""
    members = [rows for group in runs.values() for _, _, rows in group]
    families = [f for f in FAMILIES if any(f"eval/success/{f}" in row for rows in members for row in rows)]
    keys = {"all": "eval/success", **{f: f"eval/success/{f}" for f in families}}
    variants: dict[str, Any] = {}
    for name, group in runs.items():
        every = [rows for _, _, rows in group]
        curves = [
            {"seed": args["seed"]} | reward_curves(*(series(rows, key)[1] for key in ("charts/success", "granularity/process_reward")))
            for _, args, rows in group
            if measured(rows)
        ]
        steps = ("teacher_kl", "kl_in_top_turns", "tokens_in_top_turns")
        variants[name] = {
            "seeds": [args["seed"] for _, args, _ in group],
            "score": {f: over_seeds([end(rows, key) for rows in every]) for f, key in keys.items()},
            "gain": {f: over_seeds([end(rows, key) - end(rows, key, 0) for rows in every if end(rows, key) is not None]) for f, key in keys.items()},
            "behaviour": {key: over_seeds([end(rows, f"eval/{key}") for rows in every]) for key in BEHAVIOUR},
            "cost": {key: over_seeds([end(rows, f"granularity/{key}_so_far") for rows in every]) for key in ("episodes", "tokens")},
            "gradient": {
                "norm": over_seeds([mean_of(rows, "losses/grad_norm") for rows in every]),
                "clipped": over_seeds([mean_of(rows, "granularity/clipped_update_frac") for rows in every]),
            },
            "kl": {key: over_seeds([mean_of(rows, f"granularity/{key}") for rows in every]) for key in steps},
            "curves": curves,
        }

    def at_start(key: str) -> Value:
        """Variants of a seed begin with the same policy on the same tasks: one value a seed."""
        of_seed: dict[int, list[float]] = {}
        for group in runs.values():
            for _, args, rows in group:
                of_seed.setdefault(args["seed"], []).extend([x for x in [end(rows, key, 0)] if x is not None])
        return over_seeds([float(np.mean(x)) for x in of_seed.values() if x])

    start = {f: at_start(key) for f, key in keys.items()}
    kinds = {"true": "mixing", "process": "mixing_process"}
    mixing = {f: {kind: at_start(f"eval/{name}/{f}") for kind, name in kinds.items()} for f in families}
    relation = {}
    if "outcome" in variants and len(families) > 2:
        gains = [variants["outcome"]["gain"][f][0] for f in families]
        for kind in kinds:
            scores = [mixing[f][kind][0] for f in families]
            if len(set(scores)) > 1 and len(set(gains)) > 1 and all(map(math.isfinite, scores)):
                relation[kind] = float(spearmanr(scores, gains).statistic)
    return {"families": families, "start": start, "variants": variants, "mixing": mixing, "mixing_gain_spearman": relation}


def measured(rows: Sequence[dict]) -> bool:
    return len(series(rows, "granularity/process_reward")[1]) == len(series(rows, "charts/success")[1]) > 0


# ---------------------------------------------------------------------------------------------------------------------- paper


def draw(runs: dict[str, list[tuple[Path, dict, list[dict]]]], result: dict[str, Any]) -> bytes:
    """The figure as PNG: scores by family, and curves over the updates, one colour a variant."""
    import matplotlib  # heavy, and only needed here
    from matplotlib.figure import Figure

    colour = dict(zip(runs, COLOURS))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 7), layout="constrained")
        axes = figure.subplots(2, 4).flatten()
        places = ["all", *result["families"]]
        columns = [("start", "#BBBBBB", result["start"]), *((name, colour[name], v["score"]) for name, v in result["variants"].items())]
        for i, (name, c, score) in enumerate(columns):
            x = np.arange(len(places)) + (i - (len(columns) - 1) / 2) * 0.8 / len(columns)
            half = [0.0 if math.isnan(score[p][1]) else score[p][1] for p in places]
            axes[0].bar(x, [score[p][0] for p in places], 0.8 / len(columns), yerr=half, color=c, label=name, error_kw={"linewidth": 0.8})
        axes[0].set_xticks(range(len(places)), places)
        axes[0].set_title("avg@4 by family", loc="left")
        axes[0].grid(axis="x", visible=False)
        plots = [
            ("charts/success", "Outcome reward of training episodes", False),
            ("granularity/process_reward", "Process reward (outcome dotted)", False),
            ("rollout/truncated_frac", "Cut episodes", False),
            ("granularity/tool_calls", "Tool calls an episode", False),
            ("granularity/reasoning_chars", "Characters of thought a turn", False),
            ("losses/grad_norm", "Gradient norm before clipping", True),
            ("granularity/teacher_kl", "KL(teacher || policy), nats a token", True),
        ]
        for ax, (key, title, log) in zip(axes[1:], plots):
            for name, group in runs.items():
                found = [(steps, smooth(values)) for steps, values in (series(rows, key) for _, _, rows in group) if len(steps)]
                if not found:
                    continue
                steps, mean, half = mean_interval(found)
                ax.plot(steps, mean, color=colour[name], linewidth=1.5)
                ax.fill_between(steps, mean - half, mean + half, color=colour[name], alpha=0.15, linewidth=0)
                if key == "granularity/process_reward":  # where they cross
                    steps, mean, _ = mean_interval([(steps, smooth(values)) for steps, values in (series(rows, "charts/success") for _, _, rows in group)])
                    ax.plot(steps, mean, color=colour[name], linewidth=1.2, linestyle=":")
            ax.set_title(title, loc="left")
            ax.set_xlabel("update")
            if log and ax.lines and all((line.get_ydata() > 0).all() for line in ax.lines):
                ax.set_yscale("log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        out = io.BytesIO()
        figure.savefig(out, dpi=120, format="png")
    return out.getvalue()


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Credit granularity</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: .6rem 0 1.6rem }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { font-weight: 600; white-space: normal; vertical-align: bottom } td:first-child, th:first-child { text-align: left }
small { color: #777 } img { max-width: 100% } p.soft { color: #555; max-width: 90ch } .scroll { overflow-x: auto }
</style></head><body>
<h1>When finer credit helps and hurts</h1>
<p class="soft">{{ what }} Values are means over seeds, with the half width of the 95 % t-interval where there are several. Runs: {{ names|join(", ") }}.</p>
<ul>{% for line in findings %}<li>{{ line }}</li>{% endfor %}</ul>
<img alt="Scores by family, and curves over the updates" src="data:image/png;base64,{{ figure }}">
{% for title, note, head, body in tables %}
<h2>{{ title }}</h2><p class="soft">{{ note }}</p>
<div class="scroll"><table><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in body %}<tr>{% for text, half in row %}<td>{{ text }}{% if half %} <small>&plusmn; {{ half }}</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
</body></html>
"""


def shown(v: Value | float | str | None, digits: int = 3) -> tuple[str, str]:
    """Text of a value and of its half width."""
    if isinstance(v, str):
        return v, ""
    mean, half = v if isinstance(v, tuple) else (math.nan if v is None else v, math.nan)
    return "-" if math.isnan(mean) else f"{mean:.{digits}f}", "" if math.isnan(half) else f"{half:.{digits}f}"


def tables_of(result: dict[str, Any]) -> list[tuple[str, str, list[str], list[list[tuple[str, str]]]]]:
    """(title, note, head, body) of every table."""
    v, places = result["variants"], ["all", *result["families"]]
    scores = [[shown("start policy"), *(shown(result["start"][p]) for p in places)]]
    scores += [[shown(name), *(shown(one["score"][p]) for p in places)] for name, one in v.items()]
    digits = {"turns": 1, "tool_calls": 1, "frames": 1, "reasoning_chars": 0, "length": 0}
    behaviour = [[shown(name), *(shown(one["behaviour"][k], digits.get(k, 3)) for k in BEHAVIOUR)] for name, one in v.items()]
    curves = []
    for name, one in v.items():
        for c in one["curves"]:
            crossing = "-" if c["crossing"] is None else str(c["crossing"])
            cells = [crossing, str(c["peak"]), c["outcome_fall"], c["process_rise"], "yes" if c["hacking"] else "no"]
            curves.append([shown(f"{name}, seed {c['seed']}"), *map(shown, cells)])
    gradient = []
    for name, one in v.items():
        cells = [*(shown(x, 4) for x in one["kl"].values()), *map(shown, one["gradient"].values()), *(shown(x, 0) for x in one["cost"].values())]
        gradient.append([shown(name), *cells])
    mixing = []
    for f in result["families"]:
        gain = v["outcome"]["gain"][f] if "outcome" in v else None
        mixing.append([shown(f), *map(shown, result["mixing"][f].values()), shown(gain)])
    parts_note = (
        "Smoothed curves of training episodes. Crossing: update from which the process reward stays above the outcome. Hacking: the outcome fell by more "
    )
    parts_note += f"than {FALL:g} from its peak while the process reward rose."
    gradient_note = "Means over updates. Most divergent turns: the 5 % with the most KL. Episodes and tokens: what training played; recipes differ in it."
    mixing_note = "Of the start policy's evaluation episodes, by the true score and by the process judge; gain: of the scheme outcome."
    gradient_head = ["KL(teacher || policy)", "KL in most divergent turns", "tokens in them", "gradient norm", "clipped updates", "episodes", "tokens"]
    return [
        ("Scores", "avg@4 on validation films; the first valid judgement of every attempt counts.", ["", *places], scores),
        ("Behaviour", "Last evaluation.", ["", *BEHAVIOUR.values()], behaviour),
        ("Process against outcome reward", parts_note, ["", "crossing", "peak of outcome", "fall since", "rise of process since", "hacking"], curves),
        ("Gradient and distillation", gradient_note, ["", *gradient_head], gradient),
        ("Mixing of good and bad turns", mixing_note, ["", "mixing", "by the judge", "gain"], mixing),
    ]


def findings_of(result: dict[str, Any]) -> list[str]:
    """Sentences on what was measured, nothing else."""
    v, out = result["variants"], []
    for name, one in v.items():
        parts = ", ".join(f"{p} {shown(one['score'][p])[0]}" for p in result["families"])
        out.append(
            f"{name}: {shown(result['start']['all'])[0]} to {shown(one['score']['all'])[0]} ({parts}); {100 * one['behaviour']['truncated_frac'][0]:.1f} % cut"
        )
    for name in ("prm_fixed", "prm_decay"):
        if name in v and v[name]["curves"]:
            out.append(f"{name}: hacking signature in {sum(c['hacking'] for c in v[name]['curves'])} of {len(v[name]['curves'])} runs")
    for kind, r in result["mixing_gain_spearman"].items():
        out.append(f"Spearman of mixing ({kind}) and the gain of outcome over {len(result['families'])} families: {r:+.2f}")
    return out


def write_report(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Writes report.json, report.png and report.html into `out`; returns the page. Raises RunError."""
    runs = read_runs(folders)
    result, out = summarise(runs), Path(out)
    picture = draw(runs, result)
    args = next(iter(runs.values()))[0][1]
    what = f"{args['env']}, model {args['model']}, {args['num_updates']} updates of {args['groups_per_update']} tasks, {args['eval_tasks']} evaluation tasks."
    page = Environment(autoescape=True).from_string(PAGE)
    html = page.render(
        what=what, names=[str(folder.name) for group in runs.values() for folder, _, _ in group], findings=findings_of(result), tables=tables_of(result),
        figure=base64.b64encode(picture).decode(),
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    (out / "report.png").write_bytes(picture)
    (out / "report.html").write_text(html)
    return out / "report.html"


def plain(value: Any) -> Any:
    """JSON without NaN: null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(args: Any, resolve: Callable[[Any], Any], check_args: Callable[[Any], None], script: str) -> int:
    """Runs every variant with every seed, one after the other, and writes the report. The exit code: of the first run that failed, or 0.

    args: the script's, as given; resolve, check_args: the script's own; script: its path.
    """
    new = type(args)
    for changes in VARIANTS.values():
        check_args(resolve(replace(args, **changes)))
    folder = Path(args.out or f"runs/{args.env.replace('/', '_').replace(':', '-')}__compare__{args.seed}")
    default, folders = new(), []
    for seed in range(args.seed, args.seed + args.seeds):
        for name, changes in VARIANTS.items():
            out = folder / f"{name}__{seed}"
            folders.append(out)
            rows = read_jsonl(out / "metrics.jsonl")
            chosen = vars(args) | changes | {"seed": seed, "out": str(out), "compare": False, "seeds": default.seeds}
            if (out / "args.json").exists() and (problems := compare_args(read_json(out / "args.json"), vars(resolve(new(**chosen))))):
                raise RunError(f"{out} was run with other arguments ({'; '.join(problems)}): give them again, or choose another --out")
            if rows and rows[-1]["step"] >= args.num_updates and rows[-1].get("eval/success") is not None:
                continue
            words = [str(Path(script).resolve())]
            for name_, value in chosen.items():
                flag = name_.replace("_", "-")
                if value != getattr(default, name_):
                    words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            if checkpoint_folders(out):  # interrupted: goes on from its last checkpoint
                words = [words[0], "--resume", str(out), "--num-updates", str(args.num_updates)]
            elif out.exists():  # interrupted before its first checkpoint: kept aside, started again
                out.rename(next(p for n in itertools.count(1) if not (p := out.with_name(f"{out.name}.unfinished-{n}")).exists()))
            print(f"--- {name}, seed {seed}", flush=True)
            child = subprocess.Popen([sys.executable, *words])
            while True:
                try:
                    code = child.wait()
                    break
                except KeyboardInterrupt:  # the run got it too: it finishes its update and saves
                    continue
            if code:
                print(f"{name}, seed {seed} ended with code {code}; the same command goes on from here", file=sys.stderr)
                return code if code > 0 else 128 - code
    print(write_report(folders, folder))
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python credit_report.py", description="Comparison report out of runs of credit_granularity.py.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", default=".", help="folder for report.json, report.png and report.html")
    given = parser.parse_args(argv)
    try:
        page = write_report(given.runs, given.out)
    except RunError as error:
        parser.exit(2, f"{error}\n")
    print("\n".join([*findings_of(summarise(read_runs(given.runs))), str(page)]))


if __name__ == "__main__":
    main()
