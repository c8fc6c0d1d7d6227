"""What a run folder says: its metrics as curves.png and as a table. Reads run folders, never writes to their logs."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# May differ between a run and its resumption: they change where things are written or how long it runs, not what an update computes.
MAY_CHANGE = frozenset({"num_updates", "out", "resume", "track", "wandb_project", "wandb_entity", "save_every", "eval_every", "keep_checkpoints"})


class RunError(RuntimeError):
    """The run folder cannot be used as asked. The text says what is wrong and what to do."""


def run_folder_of(path: str | os.PathLike[str]) -> Path:
    """The run folder for a run folder, its ``checkpoints`` folder or one checkpoint inside it."""
    path = Path(path)
    if path.name == "checkpoints":
        return path.parent
    return path.parent.parent if path.parent.name == "checkpoints" else path


def read_json(path: Path) -> dict[str, Any]:
    """args.json or environment.json of a run folder."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path.parent} is no run folder: it has no {path.name}") from None
    except json.JSONDecodeError as error:
        raise RunError(f"{path} line {error.lineno}: not valid JSON ({error.msg}); restore the file or start a new run") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file. A last line cut short by a killed process is left out; a bad line before it raises RunError."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for i, line in enumerate(lines):
        if i == len(lines) - 1:  # a whole line ends in \n, so what follows the last one is empty or a torn write
            break
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise RunError(f"{path} line {i + 1}: not valid JSON; delete the line or restore the file") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RunError(f"{path} line {i + 1}: no integer field 'step'; delete the line or restore the file")
        records.append(record)
    return records


# ---------------------------------------------------------------------------------------------------------------------- end table


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last part, or the whole key where two share the last part."""
    last = [key.rpartition("/")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last)}


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n] int, values [n] float64) of one metric; lines without it, and nulls, are left out; of two lines with one step the later counts."""
    found = {record["step"]: float(record[key]) for record in records if isinstance(record.get(key), (int, float))}
    steps = sorted(found)
    return np.array(steps, dtype=np.int64), np.array([found[step] for step in steps], dtype=np.float64)


def end_table(records: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    """Text table: metric, first value, last value, best value and the update it was reached. Best is the largest; losses and times have none."""
    rows = [("metric", "start", "end", "best", "at update")]
    for key in keys:
        steps, values = series(records, key)
        if not len(values):
            rows.append((key, "-", "-", "-", "-"))
            continue
        ranked = not key.startswith(("losses/", "time/", "rollout/", "charts/learning_rate"))
        best = int(values.argmax())
        rows.append((key, f"{values[0]:.4g}", f"{values[-1]:.4g}", f"{values[best]:.4g}" if ranked else "-", str(steps[best]) if ranked else "-"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows)


# ---------------------------------------------------------------------------------------------------------------------- curves


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small plot. ``keys`` are metric keys or patterns ("mrtpo/reward_*"); a panel without data is left out."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    limits: tuple[float, float] | None = None
    log: bool = False
    shares: bool = False  # stacked shares of their sum instead of lines


HEADLINE = Panel("Evaluation: success rate", ("eval/success",), "share of tasks", (0.0, 1.0))
PANELS = (
    Panel("Episodic return", ("charts/episodic_return",), "return"),
    Panel("Rewards by verifier", ("reward/*",), "mean reward"),
    Panel("Response length", ("charts/episodic_length",), "tokens"),
    Panel("Losses", ("losses/policy_loss", "losses/value_loss"), "loss"),
    Panel("Entropy", ("losses/entropy",), "nats per token"),
    Panel("KL to the rollout policy", ("losses/approx_kl",), "nats per token"),
    Panel("Clipped tokens", ("losses/clipfrac",), "share"),
    Panel("Engine-trainer gap", ("rollout/logprob_absdiff_mean", "rollout/logprob_absdiff_max"), "|log-prob difference|", log=True),
    Panel("Gradient norm", ("losses/grad_norm",), "L2 norm"),
    Panel("Time by phase", ("time/*",), "share of update", (0.0, 1.0), shares=True),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")  # Okabe and Ito: safe for colour-blind readers
MANY = 20  # points from which a line is smoothed
# two-sided 95 % quantiles of Student's t for 1..10 degrees of freedom; further on a series in 1/df is exact to 1e-3
CROWD = 8  # more metrics than this in one plot are drawn as thin lines with their mean
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t with ``df`` degrees of freedom (Cornish-Fisher expansion beyond 10)."""
    if df <= len(T_95):
        return T_95[df - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)


def smooth(values: np.ndarray) -> np.ndarray:
    """Bias-corrected exponential average over about a twentieth of the points. values: [n] -> [n]."""
    decay = 1 - 1 / max(2.0, len(values) / 20)
    total, mass, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, mass = decay * total + (1 - decay) * value, decay * mass + (1 - decay)
        out[i] = total / mass
    return out


def mean_interval(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean, half width of the 95 % t-interval) over runs, at the steps that every run has: a run that ended early must not bend the mean.

    runs: pairs (steps [n], values [n]). The half width is NaN for a single run.
    """
    common = sorted(set.intersection(*[set(steps.tolist()) for steps, _ in runs]))
    table = np.array([[values[np.searchsorted(steps, step)] for step in common] for steps, values in runs]).reshape(len(runs), len(common))
    n = len(runs)
    half = t_quantile(n - 1) * table.std(axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.full(len(common), math.nan)
    return np.array(common, dtype=np.int64), table.mean(axis=0), half


def matching(keys: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Keys that fit the patterns, in the patterns' order, then by name."""
    found: dict[str, None] = {}
    for pattern in patterns:
        found |= dict.fromkeys(sorted(key for key in keys if fnmatch.fnmatchcase(key, pattern)))
    return list(found)


def load_runs(folders: Sequence[str | os.PathLike[str]], group_by: Sequence[str] = ()) -> dict[str, list[tuple[Path, list[dict[str, Any]]]]]:
    """Group label -> [(folder, metric records)]. Groups share the arguments ``group_by``, or, without it, every argument but the seed."""
    paths = [run_folder_of(folder) for folder in folders]
    arguments = []
    for path in paths:
        environment = read_json(path / "environment.json") if (path / "environment.json").exists() else {}
        arguments.append({"script": environment.get("script", "")} | (read_json(path / "args.json") if len(paths) > 1 or group_by else {}))
    unknown = [name for name in group_by if not any(name in one for one in arguments)]
    if unknown:
        raise RunError(f"--group-by {' '.join(unknown)}: no run has such an argument; there are {', '.join(sorted(arguments[0]))}")
    names = list(group_by)
    if not names:
        every = sorted(set().union(*arguments) - MAY_CHANGE - {"seed"})
        names = [name for name in every if len({json.dumps(one.get(name)) for one in arguments}) > 1]
    groups: dict[str, list[tuple[Path, list[dict[str, Any]]]]] = {}
    seeds: dict[str, list[Any]] = {}
    for path, one in zip(paths, arguments):
        label = ", ".join(f"{name} {one.get(name, '-')}" for name in names)
        if len(names) == 1:
            label = str(one.get(names[0], "-"))
        taken = seeds.setdefault(label, [])
        if one.get("seed") is not None and one["seed"] in taken:
            warnings.warn(f"{path}: a second run with seed {one['seed']} in group {label!r}; its interval will look narrower than it is", stacklevel=2)
        taken.append(one.get("seed"))
        groups.setdefault(label, []).append((path, read_jsonl(path / "metrics.jsonl")))
    return groups


STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#444444",
    "grid.color": "#e6e6e6",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}


def draw_curves(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], group_by: Sequence[str] = ()) -> Path:
    """Draws metrics.jsonl of one run, or of several over each other, as one picture of small plots at ``out`` (the ending picks the format).

    One run: faint raw line and its smoothed line. Several: one colour a group, mean over the group's runs and a band of the 95 % t-interval.
    Missing metrics, nulls, a single point and an empty file are fine. Raises RunError for folders without a run.
    """
    import matplotlib  # heavy, and only needed here
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    groups = load_runs(folders, group_by)
    overlay = len(folders) > 1
    plots = choose_plots(groups, overlay)
    with matplotlib.rc_context(STYLE):
        # the headline takes two by two cells, the others fill the grid around and below it
        rest = max(0, len(plots) - 1)
        columns = 2 if rest == 0 else 3 if rest <= 2 else 4
        rows = 2 + max(0, math.ceil((rest - 2 * (columns - 2)) / columns))
        places = [(row, column) for row in range(2) for column in range(2, columns)] + [(row, column) for row in range(2, rows) for column in range(columns)]
        places = [(1, 0), *places[:rest]]
        figure = Figure(figsize=(3.5 * columns, 2.3 * rows + 0.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06, hspace=0.02, wspace=0.03)
        grid = figure.add_gridspec(rows, columns)
        figure.suptitle(figure_title(groups, overlay), x=0.01, ha="left", fontsize=11)
        if not plots:
            figure.text(0.5, 0.5, "no metrics logged yet", ha="center", fontsize=12, color="#666666")
        for (row, column), (panel, found) in zip(places, plots):
            big = (row, column) == (1, 0)
            axes = figure.add_subplot(grid[0:2, 0:2] if big else grid[row, column])
            width = 2.2 if big else 1.5
            several = len(panel.keys) > 1 or "*" in panel.keys[0]  # then the title does not name the key
            corner, corner_colour = "", "#666666"
            if overlay:
                entries = draw_groups(axes, groups, found[0], width)
                entries = entries if big else []  # one legend for the whole picture
                corner = found[0].rpartition("/")[2] if several else ""
            elif panel.shares:
                entries = draw_shares(axes, next(iter(groups.values()))[0][1], found)
            else:
                entries = draw_lines(axes, next(iter(groups.values()))[0][1], found, width)
                if len(entries) == 1:  # one line needs no legend: its last value stands in the corner
                    (corner_colour, text), entries = entries[0], []
                    corner = text if several else text.rpartition(" ")[2]
            if panel.log and all((series(records, key)[1] > 0).all() for key in found for group in groups.values() for _, records in group):
                axes.set_yscale("log")
            if panel.limits:
                low, high = panel.limits
                slack = 0.0 if panel.shares else 0.02 * (high - low)
                axes.set_ylim(low - slack, high + slack)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if big else 5))
            axes.margins(x=0.02)
            axes.set_ylabel(panel.unit)
            if not any(other[0] > row and other[1] in ((0, 1) if big else (column,)) for other in places[: len(plots)]):
                axes.set_xlabel("update")
            legend_rows = legend_above(axes, entries, 100 if big else 46)
            # a title character is about 5.6 points wide (7.2 in the headline), one in the corner 4.9 (6.6), the axes 200 (450); too long: two lines
            title_width, corner_width, room = (7.2, 6.6, 450) if big else (5.6, 4.9, 200)
            pad = 6 + 11 * legend_rows
            longest = int(room / title_width) + 3
            title = panel.title if len(panel.title) <= longest else panel.title[: longest - 3] + "..."
            if corner and title_width * len(title) + corner_width * len(corner) > room:
                title += "\n "  # matplotlib has one height for both titles, so the left one moves up by an empty line
            axes.set_title(title, loc="left", pad=pad, fontsize=12 if big else None)
            axes.set_title(corner, loc="right", pad=pad, color=corner_colour, fontsize=12 if big else 8.5, fontweight="normal")
        temporary = Path(out).with_name(f".{Path(out).name}")
        try:
            figure.savefig(temporary, dpi=130, format=Path(out).suffix.lstrip(".") or "png")
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
    return Path(out)


def choose_plots(groups: dict[str, list[tuple[Path, list[dict[str, Any]]]]], overlay: bool) -> list[tuple[Panel, list[str]]]:
    """(panel, its metric keys) for every panel that has data, the run's own (figure.json) after the usual ones. In an overlay every key gets its own plot."""
    members = [member for group in groups.values() for member in group]
    keys = {key for _, records in members for record in records for key, value in record.items() if isinstance(value, (int, float))}
    file = members[0][0] / "figure.json"
    own = [Panel(**{**one, "keys": tuple(one["keys"])}) for one in (json.loads(file.read_text()) if file.exists() else [])]
    usual = [HEADLINE, *PANELS]
    replaced = {panel.keys: panel for panel in own}  # a run's own panel of the same keys stands in the usual one's place
    panels = [replaced.get(panel.keys, panel) for panel in usual] + [panel for panel in own if panel.keys not in {one.keys for one in usual}]
    plots = []
    for panel in panels:
        found = matching(sorted(keys), panel.keys)
        if overlay and panel.shares:  # shares of several runs cannot be stacked: draw the times themselves
            panel = dataclasses.replace(panel, unit="s", shares=False, limits=None)
        if overlay:
            plots += [(panel, [key]) for key in found if len(found) <= CROWD]  # one plot a key; a crowd of them would bury the rest
        elif found:
            plots.append((panel, found))
    return plots


def figure_title(groups: dict[str, list[tuple[Path, list[dict[str, Any]]]]], overlay: bool) -> str:
    paths = [path for group in groups.values() for path, _ in group]
    if overlay:
        return f"{len(paths)} runs in {len(groups)} group{'s' if len(groups) > 1 else ''}: mean and 95 % t-interval over seeds"
    parts = paths[0].resolve().name.split("__")
    return f"{parts[1]}  on  {parts[0]}  (seed {parts[2]}, {parts[3]})" if len(parts) == 4 else paths[0].resolve().name


def cycle_colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def draw_lines(axes: Any, records: list[dict[str, Any]], found: Sequence[str], width: float) -> list[tuple[str, str]]:
    """One run. Few points: a line with markers; many: the raw line faint, the smoothed line over it. Returns legend entries with the last value."""
    if len(found) > CROWD:
        return draw_crowd(axes, records, found)
    names, entries = short_names(found), []
    for colour, key in zip(cycle_colours(len(found)), found):
        steps, values = series(records, key)
        if len(values) < MANY:
            axes.plot(steps, values, color=colour, linewidth=width, marker="o", markersize=1.6 * width)
        else:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
            axes.plot(steps, smooth(values), color=colour, linewidth=width)
        entries.append((colour, f"{names[key]} {values[-1]:.3g}"))
    return entries


def draw_groups(axes: Any, groups: dict[str, list[tuple[Path, list[dict[str, Any]]]]], key: str, width: float) -> list[tuple[str, str]]:
    """Several runs: mean and 95 % t-interval of each group, of smoothed values where there are many. Returns legend entries with the number of runs."""
    entries, lows, highs = [], [], []
    longest = max(int(steps[-1]) for group in groups.values() for _, records in group for steps, _ in [series(records, key)] if len(steps))
    for colour, (label, group) in zip(cycle_colours(len(groups)), groups.items()):
        curves = [(steps, smooth(values) if len(values) >= MANY else values) for steps, values in (series(records, key) for _, records in group) if len(steps)]
        if not curves:
            continue
        steps, mean, half = mean_interval(curves)
        axes.plot(steps, mean, color=colour, linewidth=width, marker="o" if len(steps) < MANY else None, markersize=1.6 * width)
        axes.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.16, linewidth=0)
        short = f", to update {steps[-1] if len(steps) else 0}" if not len(steps) or steps[-1] < longest else ""
        entries.append((colour, f"{label or 'all runs'} (n={len(curves)}{short})"))
        lows, highs = [*lows, *mean], [*highs, *mean]
    if lows:  # an interval over two or three seeds can be wider than everything there is to see: it may leave the plot
        low, high = min(lows), max(highs)
        room = 0.35 * (high - low) or max(abs(high), 1e-3) * 0.1
        axes.set_ylim(low / 1.5 if low > 0 and low - room < 0 else low - room, high + room)
    return entries


def draw_crowd(axes: Any, records: list[dict[str, Any]], found: list[str]) -> list[tuple[str, str]]:
    """More keys than a legend can name: each one as a thin grey line, smoothed, and their mean at every step in colour."""
    at_step: dict[int, list[float]] = {}
    for key in found:
        steps, values = series(records, key)
        axes.plot(steps, smooth(values), color="#999999", linewidth=0.5, alpha=0.5)
        for step, value in zip(steps.tolist(), values.tolist()):
            at_step.setdefault(step, []).append(value)
    steps = np.array(sorted(at_step))
    mean = np.array([np.mean(at_step[step]) for step in steps.tolist()])
    axes.plot(steps, smooth(mean) if len(mean) >= MANY else mean, color=COLOURS[0], linewidth=1.8)
    return [(COLOURS[0], f"mean of {len(found)} {mean[-1]:.3g}"), ("#999999", "each of them")]


def draw_shares(axes: Any, records: list[dict[str, Any]], found: Sequence[str]) -> list[tuple[str, str]]:
    """Stacked shares of the keys' sum at every step that has any of them; returns legend entries with the overall share."""
    steps = sorted({int(step) for key in found for step in series(records, key)[0]})
    table = np.zeros((len(found), len(steps)))
    for i, key in enumerate(found):
        at, values = series(records, key)
        table[i, np.searchsorted(steps, at)] = values
    total = table.sum(axis=0)
    share = np.divide(table, total, out=np.zeros_like(table), where=total > 0)
    colours = cycle_colours(len(found))
    if len(steps) == 1:  # a stack of width zero would be invisible
        steps, share = [steps[0] - 0.5, steps[0] + 0.5], np.repeat(share, 2, axis=1)
    axes.stackplot(steps, share, colors=colours, alpha=0.85, linewidth=0)
    axes.grid(False)
    names = short_names(found)
    overall = table.sum(axis=1) / max(table.sum(), 1e-12)
    return [(colour, f"{names[key]} {part:.0%}") for colour, key, part in zip(colours, found, overall)]


def legend_above(axes: Any, entries: list[tuple[str, str]], characters: int) -> int:
    """A legend between title and plot, in as many columns as fit; returns its number of rows."""
    from matplotlib.lines import Line2D

    if not entries:
        return 0
    labels = [text if len(text) <= 40 else text[:20] + "..." + text[-17:] for _, text in entries]
    columns = max(1, min(len(labels), characters // (max(map(len, labels)) + 4)))
    order = [i for column in range(columns) for i in range(column, len(labels), columns)]  # matplotlib fills columns first; readers go along rows
    handles, labels = [Line2D([], [], color=entries[i][0], linewidth=3) for i in order], [labels[i] for i in order]
    axes.legend(
        handles,
        labels,
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        frameon=False,
        fontsize=7.5,
        borderaxespad=0.1,
        borderpad=0.2,
        handlelength=1.0,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.25,
    )
    return math.ceil(len(labels) / columns)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``python -m common.run``."""
    parser = argparse.ArgumentParser(prog="python -m common.run", description="Redraw the curves of a run, or lay several runs over each other.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--group-by", nargs="+", default=[], metavar="ARG", help="arguments that make a group (default: every argument that differs, but the seed)"
    )
    parser.add_argument("--out", default="", help="picture to write (default: curves.png in the run folder; for several runs curves.png here)")
    args = parser.parse_args(argv)
    try:
        out = draw_curves(args.runs, args.out or (run_folder_of(args.runs[0]) / "curves.png" if len(args.runs) == 1 else "curves.png"), args.group_by)
    except RunError as error:
        parser.exit(2, f"{error}\n")
    print(out)
