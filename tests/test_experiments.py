"""benchmarks/run.py: what it runs, what it keeps, what its table says."""

import importlib
import importlib.util
import math
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from common.arguments import parse_args

SCRIPT = """
import argparse, json, pathlib, sys
p = argparse.ArgumentParser()
for name in ("--seed", "--out", "--gain", "--resume", "--fail"):
    p.add_argument(name)
a = p.parse_args()
out = pathlib.Path(a.out)
out.mkdir(parents=True)
with open(out.parent / "calls", "a") as f:
    f.write(out.name + "\\n")
if a.fail == a.seed:
    sys.exit("the reason stands here")
with open(out / "metrics.jsonl", "w") as f:
    for step in range(5):
        f.write(json.dumps({"step": step, "score": int(a.seed) + step * float(a.gain), "time": 1.0} | ({"late": 7.0} if step == 4 else {})) + "\\n")
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    file = Path(__file__).parents[1] / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setitem(__import__("sys").modules, "benchmarks_run", module)
    spec.loader.exec_module(module)
    (tmp_path / "toy.py").write_text(SCRIPT)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def arguments(bench, tmp_path, **changes):
    given = {
        "out": str(tmp_path / "e"),
        "script": "toy.py",
        "arms": ("a: --gain 1", "b: --gain 2"),
        "seeds": 3,
        "metrics": ("score", "score@mean", "late@head"),
    }
    return bench.Args(**given | changes)


def test_runs_each_arm_with_each_seed_once_and_pairs_by_seed(bench, tmp_path, capsys):
    args = arguments(bench, tmp_path, workers=2)
    assert bench.main(args) == 0
    calls = (tmp_path / "e" / "calls").read_text().split()
    assert sorted(calls) == ["a-1", "a-2", "a-3", "b-1", "b-2", "b-3"]
    assert bench.main(args) == 0 and (tmp_path / "e" / "calls").read_text().split() == calls
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "e" / "table.md").read_text().splitlines()]
    assert rows[0] == ["arm (seeds)", "score", "score@mean", "late@head"]
    half = 4.3027 * statistics.stdev([5, 6, 7]) / math.sqrt(3)
    assert rows[2] == ["a (3)", f"6.000 ± {half:.3f}", f"4.000 ± {half:.3f}", "7.000 ± 0.000"]
    assert rows[4] == ["a - b", "-4.000 ± 0.000", "-2.000 ± 0.000", "0.000 ± 0.000"]
    assert (tmp_path / "e" / "curves.png").stat().st_size > 1000


def test_a_failed_run_is_reported_and_the_others_go_on(bench, tmp_path, capsys):
    args = arguments(bench, tmp_path, flags="--fail 2")
    assert bench.main(args) == 1
    captured = capsys.readouterr()
    assert "a-2: ended with 1" in captured.err and "the reason stands here" in captured.err
    assert "a (2)" in captured.out and "b (2)" in captured.out
    (tmp_path / "toy.py").write_text(SCRIPT.replace("a.fail == a.seed", "False"))
    assert bench.main(args) == 0  # only the missing ones, what was cut off moved aside
    assert (tmp_path / "e" / "calls").read_text().split()[-2:] == ["a-2", "b-2"]
    assert (tmp_path / "e" / "unfinished-1-a-2").is_dir()


def test_other_flags_in_the_same_folder_are_refused(bench, tmp_path):
    bench.main(arguments(bench, tmp_path, seeds=1))
    with pytest.raises(SystemExit, match="choose another --out"):
        bench.main(arguments(bench, tmp_path, seeds=1, arms=("a: --gain 3",)))


def test_print_only_and_sweeps(bench, tmp_path, capsys):
    args = arguments(bench, tmp_path, arms=("x:",), sweep=("gain=1,2", "resume=p q"), seeds=1, print_only=True)
    assert bench.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" --seed")[0] for line in lines] == ["python toy.py --gain 1 --resume 'p q'", "python toy.py --gain 2 --resume 'p q'"]
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"plan": "nothing"}, "--plan nothing: choose from"),
        ({"script": "nowhere.py"}, "no such file"),
        ({"arms": ("a --gain",)}, 'write "NAME: FLAGS"'),
        ({"arms": ("../a: --gain 1",)}, "cannot name a folder"),
        ({"arms": ()}, "nothing to run"),
        ({"sweep": ("gain",)}, "write FLAG=VALUE,VALUE"),
        ({"baseline": "c"}, "no such arm; there are a, b"),
    ],
)
def test_wrong_arguments(bench, tmp_path, changes, text):
    with pytest.raises(SystemExit, match=text):
        bench.main(arguments(bench, tmp_path, **changes))


def test_plans_name_flags_that_their_scripts_have(bench, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", Path(__file__).parents[1])
    for name in bench.PLANS:
        script, arms, baseline, metrics = bench.expand(bench.Args(out="x", plan=name))
        assert baseline in arms and metrics
        for flags in arms.values():
            parse_args(importlib.import_module(script.removesuffix(".py")).Args, [*flags, "--seed", "3"])


def test_a_run_with_a_checkpoint_is_resumed(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "newest_checkpoint", lambda folder: folder)
    folder = tmp_path / "e" / "a-1"
    folder.mkdir(parents=True)
    assert bench.start_or_resume("toy.py", ["--gain", "1"], 1, folder)[2:] == ["--resume", str(folder)]


def test_a_whole_measure_by_hand(bench):
    records = [{"step": i, "x": float(v)} for i, v in enumerate([8, 1, 2, 3, 4, 5, 6, 9])]
    hows = {"": 9.0, "mean": 4.75, "tail": 7.5, "head": 4.5, "sum": 38.0, "max": 9.0}
    assert {how: bench.measure(records, f"x@{how}" if how else "x") for how in hows} == hows
    assert bench.measure(records, "y") is None


def test_machines_share_an_experiment_by_seeds(bench, tmp_path):
    bench.main(arguments(bench, tmp_path, first_seed=3))
    bench.main(arguments(bench, tmp_path, seeds=2))
    assert (tmp_path / "e" / "calls").read_text().split() == ["a-3", "b-3", "a-1", "b-1", "a-2", "b-2"]
    bench.main(arguments(bench, tmp_path, table_only=True))
    assert "a (3)" in (tmp_path / "e" / "table.md").read_text()


def test_pairs_are_of_one_seed_and_a_missing_baseline_leaves_none(bench):
    def run(x):
        return [{"step": 1, "x": float(x)}]

    found = {"base": {1: run(1), 2: run(2)}, "other": {2: run(5), 3: run(9)}, "alone": {3: run(1)}}
    rows = [line.strip("| ").split(" | ") for line in bench.table(found, "base", ("x",)).splitlines()]
    assert ["base - other", "-3.000"] in rows and not any(row[0] == "base - alone" for row in rows)


def test_commands_of_the_docs_are_accepted():
    """As a shell would split them; --flags takes a value that begins with dashes."""
    root = Path(__file__).parents[1]
    text = (root / "benchmarks" / "run.py").read_text()
    commands = [line.strip().partition(" #")[0] for line in text.splitlines() if line.startswith("    python benchmarks/run.py")]
    assert any("--flags" in c for c in commands)
    command = next(c for c in commands if "--flags" in c)
    done = subprocess.run([sys.executable, *shlex.split(command)[1:], "--print-only"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        script, *flags = shlex.split(line)[1:]
        parse_args(importlib.import_module(script.removesuffix(".py")).Args, flags)
