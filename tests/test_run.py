"""The run folder: names, secrets, logs, checkpoints and their damage, resume, signals, full disks, ranks, curves."""

import collections
import dataclasses
import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common import arguments, checkpoints, curves, files, run
from common.arguments import compare_args, parse_args
from common.checkpoints import load_checkpoint
from common.curves import Panel, RunError, read_jsonl
from common.ranks import reduce_metrics
from common.run import Run

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Args:
    env: str = "sql"
    seed: int = 1
    out: str = ""
    resume: str = ""
    track: bool = False
    num_updates: int = 4
    learning_rate: float = 1e-3
    max_new_tokens: int = 64
    betas: tuple[float, float] = (0.9, 0.95)
    judge_api_key: str = ""


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    """Work in an empty folder, and leave the process's signal handlers as they were."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make(args=None, **options):
    options = {"total_updates": 4, "key_metrics": ["eval/success"]} | options
    return Run(args or Args(), "mrtpo", **options)


# ---- folder, arguments, secrets


def test_folder_name_and_contents(monkeypatch):
    monkeypatch.setattr(run.time, "strftime", lambda form: "20261201-120000")
    first = make(Args(env="alfworld:/data/../x y__z"))
    second = make(Args(env="alfworld:/data/../x y__z"))
    assert first.folder == Path("runs/alfworld-data-..-x-y-z__mrtpo__1__20261201-120000")
    assert second.folder == Path("runs/alfworld-data-..-x-y-z__mrtpo__1__20261201-120000-2")  # same second: another folder, nothing overwritten
    assert first.folder.name.count("__") == 3
    assert {p.name for p in first.folder.iterdir()} == {"args.json", "environment.json", "metrics.jsonl", "episodes.jsonl", "checkpoints", ".lock"}
    environment = json.loads((first.folder / "environment.json").read_text())
    assert environment["script"] == "mrtpo" and environment["sessions"][0]["versions"]["torch"] == torch.__version__
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert environment["sessions"][0]["git"].get("commit", "") == commit  # both empty where there is no git
    first.close(), second.close()


@pytest.mark.parametrize("env", ["", "///", "..", "a" * 500, "household"])
def test_folder_name_is_always_one_safe_part(env):
    r = make(Args(env=env))
    assert r.folder.parent == Path("runs") and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,59}__mrtpo__1__\d{8}-\d{6}(-\d+)?", r.folder.name)
    r.close()


def test_out_is_the_folder_and_must_be_empty():
    make(Args(out="there/x")).close()
    assert Path("there/x/args.json").exists()
    with pytest.raises(RunError, match=r"--out there/x is not an empty folder.*--resume there/x"):
        make(Args(out="there/x"))


def test_secrets_never_reach_the_folder(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    monkeypatch.setattr(sys, "argv", ["mrtpo.py", "--judge-api-key", "sk-flag", "--hf-token=hf-flag", "--judge-url", "https://u:pw-flag@h/v1", "--seed", "1"])
    r = make(Args(judge_api_key="sk-field", env="https://me:pw-field@host/x"))
    r.log({"a": 1.0}, 1)
    r.save_checkpoint(1, {})
    r.finish()
    everything = b"".join(p.read_bytes() for p in r.folder.rglob("*") if p.is_file()) + str(r.folder).encode()
    for secret in (b"sk-environment", b"sk-flag", b"hf-flag", b"pw-flag", b"sk-field", b"pw-field"):
        assert secret not in everything
    saved = json.loads((r.folder / "args.json").read_text())
    assert saved["judge_api_key"] == "<redacted>" and saved["max_new_tokens"] == 64 and saved["betas"] == [0.9, 0.95]
    assert json.loads((r.folder / "environment.json").read_text())["sessions"][0]["command"].endswith("--judge-url https://<redacted>@h/v1 --seed 1")


def test_secret_names():
    assert all(arguments.is_secret(name) for name in ("key", "judge_api_key", "hf_token", "--hf-token", "client_secret", "secret_name", "password", "auth"))
    assert not any(arguments.is_secret(name) for name in ("max_new_tokens", "token_level", "key_metrics", "monkey", "tokens", "author"))
    assert arguments.redact("headers", {"api_key": "sk-1", "n": 3}) == {"api_key": "<redacted>", "n": 3}


def test_compare_args():
    saved = {"learning_rate": 1e-3, "num_updates": 10, "save_every": 5, "seed": 1, "gone": 3, "judge_api_key": "<redacted>"}
    new = {"learning_rate": 1e-2, "num_updates": 20, "save_every": 1, "seed": 1, "added": "x", "judge_api_key": ""}
    assert compare_args(saved, new) == ["added: absent in the run, 'x' now", "gone: 3 in the run, absent now", "learning_rate: 0.001 in the run, 0.01 now"]
    assert compare_args(saved, saved) == []
    assert compare_args({"a": 1}, {"a": 2}, {"a"}) == []


def test_parse_args_takes_the_saved_arguments_as_defaults():
    r = make(Args(learning_rate=0.5, betas=(0.1, 0.2), judge_api_key="sk", track=False, out="x"))
    r.close()
    got = parse_args(Args, ["--resume", "x", "--num-updates", "9"])
    assert got == Args(learning_rate=0.5, betas=(0.1, 0.2), judge_api_key="", out="", resume="x", num_updates=9)
    assert parse_args(Args, ["--resume=x/checkpoints/00000001"]).learning_rate == 0.5
    assert parse_args(Args, ["--seed", "3"]) == Args(seed=3)
    with pytest.raises(RunError, match=r"nowhere is no run folder"):
        parse_args(Args, ["--resume", "nowhere"])


# ---- logs


def test_log_lines_and_nonfinite_values():
    r = make()
    r.log(
        {"a": 1.5, "b": float("nan"), "c": torch.tensor(float("inf")), "d": np.float32(2), "e": torch.tensor([1.0, -math.inf]), "f": True, "g": None, "h": "x"},
        0,
    )
    r.log({"a": torch.tensor(3, dtype=torch.bfloat16)}, 1)
    lines = (r.folder / "metrics.jsonl").read_text().splitlines()  # on disk before close
    assert json.loads(lines[0]) == {"step": 0, "a": 1.5, "b": None, "c": None, "d": 2.0, "e": [1.0, None], "f": True, "g": None, "h": "x", "log/nonfinite": 3}
    assert json.loads(lines[1]) == {"step": 1, "a": 3.0}
    assert r.nonfinite == 3
    with pytest.raises(ValueError, match=r"log\(step=0\) after step 1"):
        r.log({}, 0)
    with pytest.raises(TypeError, match="a is a object"):
        r.log({"a": object()}, 1)
    assert len((r.folder / "metrics.jsonl").read_text().splitlines()) == 2  # nothing of the refused calls
    r.close()


def test_episodes_are_token_exact():
    r = make()
    ids = list(range(0, 200_000, 777))
    r.episode({"tokens": torch.tensor(ids), "logprobs": [-0.1, float("nan")], "text": "\ud83d \u2028 </script>", "reward": {"format": np.float64(1)}}, step=3)
    r.episode({"step": 4})
    with pytest.raises(ValueError, match="needs `step`"):
        r.episode({"tokens": []})
    r.close()
    assert read_jsonl(r.folder / "episodes.jsonl") == [
        {"step": 3, "tokens": ids, "logprobs": [-0.1, None], "text": "\ud83d \u2028 </script>", "reward": {"format": 1.0}},
        {"step": 4},
    ]


def test_timers_add_up_and_are_logged_once(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(clock))
    r = make()
    with r.timer("rollout"):
        pass
    with pytest.raises(ZeroDivisionError), r.timer("rollout"):
        raise ZeroDivisionError
    with r.timer("train"):
        pass
    r.log({"time/other": 7.0}, 1)
    r.log({}, 2)
    r.close()
    assert read_jsonl(r.folder / "metrics.jsonl") == [{"step": 1, "time/other": 7.0, "time/rollout": 3.5, "time/train": 1.0}, {"step": 2}]


def test_progress_bar_keeps_the_last_key_figures():
    r = make(key_metrics=["eval/success", "charts/episodic_return", "a/x", "b/x"])
    r.log({"eval/success": 0.25, "charts/episodic_return": 1.0, "a/x": 1}, 1)
    r.log({"charts/episodic_return": 2.0, "b/x": float("nan"), "unlisted": 5.0}, 3)
    assert r.bar.n == 3 and r.bar.total == 4
    assert r.bar.postfix == "success 0.25, episodic_return 2, a/x 1"
    r.close()


def test_torn_and_bad_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"step":3,"a":')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    assert files.cut_jsonl(path, 1) == 2 and path.read_bytes() == b'{"step":1}\n'
    assert files.cut_jsonl(tmp_path / "absent", 1) == 0 and read_jsonl(tmp_path / "absent") == []
    for bad in (b"{oops\n", b"[1]\n", b'{"a":1}\n', b'{"step":"1"}\n', b"\xff\n", b"\n"):
        path.write_bytes(b'{"step":1}\n' + bad + b'{"step":2}\n')
        with pytest.raises(RunError, match=r"m\.jsonl line 2"):
            read_jsonl(path)


@given(st.lists(st.integers(0, 6), max_size=12).map(sorted), st.integers(0, 7), st.binary(max_size=6).filter(lambda b: b"\n" not in b))
@settings(max_examples=50, deadline=None)
def test_cut_keeps_exactly_the_lines_up_to_the_step(tmp_path_factory, steps, last, torn):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    lines = [f'{{"step":{s},"i":{i}}}\n'.encode() for i, s in enumerate(steps)]
    path.write_bytes(b"".join(lines) + torn)
    gone = files.cut_jsonl(path, last)
    assert path.read_bytes() == b"".join(line for line, s in zip(lines, steps) if s <= last)
    assert gone == sum(s > last for s in steps) + bool(torn)


def test_tracker_is_forwarded_and_its_id_survives(monkeypatch):
    calls = []

    class Fake:
        def __init__(self, **options):
            self.options, self.id = options, options["id"] or "new-id"

        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    started = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: started.append(Fake(**options)) or started[-1]))
    r = make(Args(track=True, judge_api_key="sk"))
    r.log({"a": float("nan"), "b": 2}, 1)
    r.save_checkpoint(1, {})
    r.close()
    assert calls == [(1, {"a": None, "b": 2, "log/nonfinite": 1}), "finish"]
    assert started[0].options["config"]["judge_api_key"] == "<redacted>" and started[0].options["name"] == r.folder.name
    assert json.loads((r.folder / "checkpoints/00000001/checkpoint.json").read_text())["tracker_id"] == "new-id"
    again = make(Args(track=True, judge_api_key="sk", resume=str(r.folder)))
    assert started[1].options["id"] == "new-id"
    again.close()


def test_no_tracker_without_the_flag(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    make().close()
    with pytest.raises(RunError, match="--track needs wandb: pip install wandb"):
        make(Args(track=True))


# ---- checkpoints


def draw():
    return random.random(), random.gauss(0, 1), float(np.random.randn()), int(np.random.randint(1 << 30)), torch.randn(3).tolist()


def test_random_states_come_back_bit_for_bit():
    r = make()
    random.gauss(0, 1), np.random.randn()  # both keep a second value in reserve
    r.save_checkpoint(1, {})
    expected = [draw() for _ in range(3)]
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    load_checkpoint(r.folder)
    assert [draw() for _ in range(3)] == expected
    before = checkpoints.rng_state()
    load_checkpoint(r.folder, restore_rng=False)
    after = checkpoints.rng_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    r.close()


def test_checkpoint_is_read_by_the_safe_loader_and_keeps_everything():
    r = make()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.T.contiguous())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "cursor": (3, [1, 2]),
        "none": None,
        5: 2**80,
    }
    path = r.save_checkpoint(2, state)
    assert torch.load(path / "state.pt", weights_only=True)["state"]["cursor"] == (3, [1, 2])
    step, got = load_checkpoint(r.folder)
    assert step == 2 and got[5] == 2**80 and got["none"] is None
    assert isinstance(got["model"], collections.OrderedDict) and all(torch.equal(got["model"][k], v) for k, v in model.state_dict().items())
    assert torch.equal(got["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    info = json.loads((path / "checkpoint.json").read_text())
    assert info["step"] == 2 and info["script"] == "mrtpo" and info["bytes"] == (path / "state.pt").stat().st_size
    assert (r.folder / "checkpoints/latest").read_text() == "00000002\n"
    r.close()


class Sharded(torch.Tensor):
    """Stands for DTensor: a tensor that holds only this rank's part."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, np.float64(2)]}}, r"state\['a'\]\['b'\]\[1\] is a float64"),
        ({"a": np.zeros(2)}, r"state\['a'\] is a ndarray"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\)"),
        ({"a": object()}, r"state\['a'\] is a object"),
        ({"a": torch.zeros(2).as_subclass(Sharded)}, r"state\['a'\] is a Sharded: gather it to a plain tensor"),
        ({"a": collections.defaultdict(int)}, r"state\['a'\] is a defaultdict"),
    ],
)
def test_state_that_a_safe_load_could_not_read_is_refused(state, message):
    r = make()
    with pytest.raises(RunError, match=message):
        r.save_checkpoint(1, state)
    assert checkpoints.checkpoint_folders(r.folder) == [] and list((r.folder / "checkpoints").iterdir()) == []
    r.close()


def test_keeps_the_last_n_and_never_overwrites():
    r = make(keep=2)
    for step in (1, 2, 3):
        r.save_checkpoint(step, {"v": step})
    assert [p.name for p in checkpoints.checkpoint_folders(r.folder)] == ["00000003", "00000002"]
    r.save_checkpoint(3, {"v": 30})
    assert [p.name for p in checkpoints.checkpoint_folders(r.folder)] == ["00000003.2", "00000003"]
    assert load_checkpoint(r.folder) == (3, {"v": 30})
    assert load_checkpoint(r.folder / "checkpoints" / "00000003") == (3, {"v": 3})
    for _ in range(9):
        r.save_checkpoint(3, {"v": 31})
    assert checkpoints.checkpoint_folders(r.folder)[0].name == "00000003.11"  # by number, not by letter
    with pytest.raises(ValueError, match="keep=0"):
        make(keep=0)
    r.close()


def damage(path, how):
    file = path / "state.pt"
    data = file.read_bytes()
    if how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif how == "flipped bit":
        file.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    elif how == "no state":
        file.unlink()
    elif how == "no json":
        (path / "checkpoint.json").unlink()
    elif how == "torn json":
        (path / "checkpoint.json").write_text('{"format": 1, "st')
    elif how == "future":
        info = json.loads((path / "checkpoint.json").read_text())
        (path / "checkpoint.json").write_text(json.dumps(info | {"format": 2}))


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "no state", "no json", "torn json", "future"])
def test_damaged_newest_checkpoint_falls_back(how):
    r = make()
    r.save_checkpoint(1, {"v": 1})
    damage(r.save_checkpoint(2, {"v": 2}), how)
    with pytest.warns(UserWarning, match=r"00000002.*using the checkpoint of update 1 instead"):
        assert load_checkpoint(r.folder) == (1, {"v": 1})
    with pytest.raises(RunError, match=r"no intact checkpoint:\n.*00000002"):
        load_checkpoint(r.folder / "checkpoints" / "00000002")  # the one that was asked for, or none
    damage(r.folder / "checkpoints" / "00000001", how)
    with pytest.raises(RunError, match=r"(?s)no intact checkpoint:.*00000002.*00000001"):
        load_checkpoint(r.folder)
    r.close()


def test_half_written_checkpoint_of_a_killed_process_is_ignored():
    r = make()
    r.save_checkpoint(1, {"v": 1})
    leftover = r.folder / "checkpoints" / ".writing-00000002"
    leftover.mkdir()
    (leftover / "state.pt").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(r.folder) == (1, {"v": 1})
    r.save_checkpoint(2, {"v": 2})
    assert not leftover.exists() and load_checkpoint(r.folder) == (2, {"v": 2})
    r.close()


def test_missing_checkpoints_say_so():
    r = make()
    with pytest.raises(RunError, match="holds no checkpoint"):
        load_checkpoint(r.folder)
    with pytest.raises(RunError, match="no such run folder"):
        load_checkpoint("nowhere")
    with pytest.raises(RunError, match="needs --resume"):
        r.load_checkpoint()
    r.close()


# ---- resume


def train(args, until, stop_after=None):
    """A toy training loop that uses every generator; returns the run after its last update."""
    r = make(args, total_updates=until, may_change=("judge_api_key",))
    torch.manual_seed(args.seed), random.seed(args.seed), np.random.seed(args.seed)
    weight, first = torch.zeros(4, requires_grad=True), 0
    optimizer = torch.optim.Adam([weight], lr=args.learning_rate)
    if args.resume:
        first, state = r.load_checkpoint()
        weight.data.copy_(state["weight"])
        optimizer.load_state_dict(state["optimizer"])
    for update in range(first + 1, until + 1):
        loss = ((weight - torch.randn(4)) ** 2).sum() * (1 + random.random()) + np.random.rand()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        r.log({"loss": loss.item()}, update)
        r.episode({"weight": weight.detach()}, update)
        if update % 2 == 0:
            r.save_checkpoint(update, {"weight": weight.detach(), "optimizer": optimizer.state_dict()})
        if update == stop_after:
            break
    r.close()
    return r


def logs(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "episodes.jsonl")]


@pytest.mark.parametrize("torn", [False, True])
def test_resume_equals_a_straight_run_bit_for_bit(torn):
    straight = train(Args(out="straight"), 6)
    broken = train(Args(out="broken"), 6, stop_after=5)  # update 5 is logged, the checkpoint is of update 4
    if torn:
        with open("broken/metrics.jsonl", "ab") as file:
            file.write(b'{"step":6,"lo')
    resumed = train(Args(resume="broken"), 6)
    assert resumed.folder == broken.folder
    assert logs(resumed.folder) == logs(straight.folder)
    one, other = (torch.load(folder / "checkpoints/00000006/state.pt", weights_only=True) for folder in (resumed.folder, straight.folder))
    assert torch.equal(one["state"]["weight"], other["state"]["weight"]) and one["rng"][0]["python"] == other["rng"][0]["python"]
    assert torch.equal(one["rng"][0]["torch"], other["rng"][0]["torch"])
    assert len(json.loads(Path("broken/environment.json").read_text())["sessions"]) == 2
    assert json.loads(Path("broken/args.json").read_text())["out"] == "broken"  # where it was first written stays on record


def test_resume_from_an_earlier_checkpoint_sets_later_ones_aside():
    straight = train(Args(out="straight"), 6)
    train(Args(out="again"), 6)
    resumed = train(Args(resume="again/checkpoints/00000004"), 6)
    assert logs(resumed.folder) == logs(straight.folder)
    names = sorted(p.name for p in Path("again/checkpoints").iterdir())
    assert names[:3] == ["00000004", "00000006", "latest"] and re.fullmatch(r"unused-00000006-\d+", names[3])


def test_resume_after_damage_uses_the_checkpoint_before():
    straight = train(Args(out="straight"), 6)
    train(Args(out="hurt"), 6, stop_after=5)
    damage(Path("hurt/checkpoints/00000004"), "truncated")
    with pytest.warns(UserWarning, match="update 2 instead"):
        resumed = train(Args(resume="hurt"), 6)
    assert logs(resumed.folder) == logs(straight.folder)


def test_resume_refuses_arguments_that_change_the_result():
    train(Args(out="x"), 2)
    before = {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file()}
    with pytest.raises(RunError, match=r"(?s)would change the result:\n  learning_rate: 0.001 in the run, 0.1 now\n  seed: 1 in the run, 2 now\nDrop them"):
        train(Args(resume="x", learning_rate=0.1, seed=2, num_updates=99), 4)
    with pytest.raises(RunError, match=r"belongs to mrtpo\.py, not sero\.py"):
        Run(Args(resume="x"), "sero", total_updates=4, key_metrics=[])
    assert {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file()} == before  # a refused resume changes nothing
    assert train(Args(resume="x", num_updates=99, judge_api_key="other"), 4).step == 4


def test_resume_of_a_folder_that_is_none_or_hurt():
    with pytest.raises(RunError, match=r"nowhere is no run folder: it has no args\.json"):
        make(Args(resume="nowhere"))
    train(Args(out="x"), 2)
    Path("x/environment.json").write_text('{"script": "mrtpo",\n oops')
    with pytest.raises(RunError, match=r"x/environment\.json line 2: not valid JSON .*restore the file or start a new run"):
        make(Args(resume="x"))
    Path("x/environment.json").unlink()
    with pytest.raises(RunError, match=r"it has no environment\.json"):
        make(Args(resume="x"))


def test_full_disk_at_resume_loses_nothing(monkeypatch):
    train(Args(out="x"), 3)
    before = {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file() and p.name != ".lock"}

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x/args.json")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device: 'x/args\.json'\. Free space there and start the same command again"):
            make(Args(resume="x"))
    assert {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_a_resumed_run_must_load_first():
    train(Args(out="x"), 2)
    r = make(Args(resume="x"))
    with pytest.raises(RunError, match=r"must call load_checkpoint\(\) before it logs"):
        r.log({"a": 1}, 3)
    with pytest.raises(RunError, match=r"must call load_checkpoint\(\) before it saves"):
        r.save_checkpoint(3, {})
    r.close()


def test_two_processes_cannot_write_one_run():
    r = make(Args(out="x"))
    r.save_checkpoint(1, {})

    def files():  # without the lock itself: opening and closing it here would give it up
        return {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()

    def second():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                make(Args(resume="x"))
            except RunError as error:
                code = 2 if str(error) == "another process is writing to x; stop it first" else 3
            os._exit(code)
        return os.WEXITSTATUS(os.waitpid(child, 0)[1])

    assert second() == 2 and files() == before
    r.close()
    assert second() == 1


# ---- signals


def test_first_signal_asks_second_ctrl_c_aborts(monkeypatch, capfd):
    clock = [100.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    r = make()
    assert not r.should_stop() and r.exit_code == 0
    os.kill(os.getpid(), signal.SIGINT)
    assert r.stop_requested and r.should_stop() and r.exit_code == 130
    assert "stopping after this update" in capfd.readouterr().err
    clock[0] += 0.5
    os.kill(os.getpid(), signal.SIGINT)  # the launcher's copy of the same key press
    clock[0] += 60
    os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat itself while the checkpoint is being written
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    r.close()


def test_sigterm_gives_143_and_close_gives_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    r = make()
    os.kill(os.getpid(), signal.SIGTERM)
    assert r.should_stop() and r.exit_code == 143
    r.close()
    r.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_stop_on_any_rank_stops_all():
    r = make(gather=lambda value: [value, 143])
    assert r.should_stop() and r.exit_code == 143 and not r.stop_requested
    r.close()


def test_forked_worker_dies_of_sigterm_and_ignores_ctrl_c():
    r = make()
    results = []
    for number in (signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
            os._exit(7)
        results.append(os.waitpid(child, 0)[1])
    assert os.WIFSIGNALED(results[0]) and os.WTERMSIG(results[0]) == signal.SIGTERM
    assert os.WIFEXITED(results[1]) and os.WEXITSTATUS(results[1]) == 7
    assert not r.stop_requested
    r.close()


def loop(args, said):
    """A flat main loop; writes the update of every checkpoint to the pipe ``said``."""
    r = Run(args, "loop", total_updates=args.num_updates, key_metrics=[])
    random.seed(1)
    first = r.load_checkpoint()[0] if args.resume else 0
    for update in range(first + 1, args.num_updates + 1):
        r.log({"x": random.random()}, update)
        r.episode({"y": update}, update)
        stop = r.should_stop()
        if stop or update % 10 == 0 or update == args.num_updates:
            r.save_checkpoint(update, {})
            os.write(said, b"%d\n" % update)
        if stop:
            break
    r.close()
    return r.exit_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_real_process_stopped_anywhere_continues_bit_for_bit(number):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os._exit(loop(Args(out="x", num_updates=10**6), theirs))
        finally:
            os._exit(99)
    os.close(theirs)
    said = b""
    while said.count(b"\n") < 3:
        said += os.read(ours, 100)
    os.kill(child, number)
    while piece := os.read(ours, 1000):
        said += piece
    status = os.waitpid(child, 0)[1]
    if number == signal.SIGKILL:
        assert os.WTERMSIG(status) == number
    else:
        assert os.WEXITSTATUS(status) == 128 + number
        latest = int(Path("x/checkpoints/latest").read_text())
        assert read_jsonl(Path("x/metrics.jsonl"))[-1]["step"] == latest == int(said.split()[-1])  # nothing done is lost
    end = checkpoints.checkpoint_order(checkpoints.checkpoint_folders(Path("x"))[0])[0] + 15
    assert loop(Args(resume="x", num_updates=end), os.open(os.devnull, os.O_WRONLY)) == 0
    generator = random.Random(1)
    assert read_jsonl(Path("x/metrics.jsonl")) == [{"step": u, "x": generator.random()} for u in range(1, end + 1)]
    assert read_jsonl(Path("x/episodes.jsonl")) == [{"y": u, "step": u} for u in range(1, end + 1)]


# ---- full disk


def test_log_line_is_whole_or_absent_when_the_disk_is_full(monkeypatch):
    r = make(Args(out="x"))
    r.save_checkpoint(1, {})
    r.log({"a": 1}, 1)

    class Full:
        """The log file on a disk with room for 5 more bytes."""

        name = "x/metrics.jsonl"

        def __init__(self, file):
            self.file, self.left = file, 5

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            n, self.left = self.file.write(data[: self.left]), 0
            return n

        def __getattr__(self, name):
            return getattr(self.file, name)

    real, r.metrics_file = r.metrics_file, Full(r.metrics_file)
    with pytest.raises(
        RunError, match=r"could not write x/metrics\.jsonl: no space left.*checkpoint of update 1 is intact: make room, then continue with --resume x"
    ):
        r.log({"a": 2}, 2)
    assert Path("x/metrics.jsonl").read_bytes() == b'{"step":1,"a":1}\n'
    r.metrics_file = real
    r.log({"a": 3}, 3)
    assert read_jsonl(Path("x/metrics.jsonl")) == [{"step": 1, "a": 1}, {"step": 3, "a": 3}]
    r.close()


def test_checkpoint_on_a_full_disk_leaves_the_previous_one(tmp_path):
    """A real refusal by the kernel in a child process: no file may grow beyond 2 MB, as on a disk with that much room."""
    program = textwrap.dedent("""
        import dataclasses, resource, sys, torch
        from common.checkpoints import load_checkpoint
        from common.curves import RunError
        from common.run import Run
        @dataclasses.dataclass
        class Args:
            out: str = "x"
        r = Run(Args(), "mrtpo", total_updates=4, key_metrics=[])
        r.save_checkpoint(1, {"w": torch.ones(1000)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
        try:
            r.save_checkpoint(2, {"w": torch.ones(1_000_000)})
        except RunError as error:
            print(error)
        print(sorted(p.name for p in (r.folder / "checkpoints").iterdir()), load_checkpoint("x")[0])
        r.save_checkpoint(3, {"w": torch.ones(1000)})  # there is room for this one
        print(load_checkpoint("x")[0])
    """)
    got = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert got.returncode == 0, got.stderr
    lines = got.stdout.splitlines()
    assert re.match(r"could not write the checkpoint of update 2, at least [45]\.\d MB: the file-size limit .*update 1 is intact.*--resume x", lines[0])
    assert lines[1:] == ["['00000001', 'latest'] 1", "3"]


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_enospc_at_any_step_of_a_checkpoint(monkeypatch, call):
    r = make(Args(out="x"))
    r.save_checkpoint(1, {"v": 1})

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(RunError, match=r"could not write the checkpoint of update 2.*no space left on the disk of x.*MB free"):
            r.save_checkpoint(2, {"v": 2})
    assert sorted(p.name for p in Path("x/checkpoints").iterdir()) == ["00000001", "latest"]
    assert load_checkpoint("x") == (1, {"v": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
        with pytest.raises(OSError, match="broken disk"):  # not a full disk: not disguised as one
            r.save_checkpoint(2, {"v": 2})
    assert sorted(p.name for p in Path("x/checkpoints").iterdir()) == ["00000001", "latest"]
    r.close()


def test_finish_survives_a_full_disk(monkeypatch, capsys):
    r = make()
    r.log({"eval/success": 0.5}, 1)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run, "draw_curves", full)
    r.finish()
    said = capsys.readouterr()
    assert "python -m common.run" in said.err and "eval/success" in said.out


# ---- ranks


def test_reduce_is_a_mean_over_everything_counted():
    sums = {"b": (6.0, 3), "a_max": (5.0, 2), "none": (0.0, 0), "none_max": (0.0, 0), "nan": (float("nan"), 0)}
    assert reduce_metrics(sums) == {"b": 2.0, "a_max": 5.0}
    assert reduce_metrics({"eval/reward/words_max": (3.0, 4), "reward/words_max": (1.0, 2)}) == {"eval/reward/words_max": 0.75, "reward/words_max": 0.5}
    assert reduce_metrics({}) == {}


@given(st.lists(st.lists(st.floats(-100, 100), max_size=4), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_reduce_over_ranks_equals_the_pooled_value(ranks):
    tables = [{"m": (math.fsum(values) if values else math.nan, len(values)), "m_max": (max(values, default=0.0), len(values))} for values in ranks]
    partial = [[], [], []]
    for table in tables:  # first pass: what each rank contributes to each of the three reductions

        def record(tensor, op, calls=iter(range(3))):  # noqa: B008  (one iterator per definition is the point)
            partial[next(calls)].append(tensor)
            return tensor

        reduce_metrics(table, record)
    combined = [torch.stack(partial[0]).amax(0), torch.stack(partial[1]).amax(0), torch.stack(partial[2]).sum(0)]
    results = iter(combined)
    got = reduce_metrics(tables[0], lambda tensor, op: next(results))
    pooled = [value for values in ranks for value in values]
    if not pooled:
        assert got == {}
    else:
        assert got["m"] == pytest.approx(math.fsum(pooled) / len(pooled), abs=1e-9) and got["m_max"] == max(pooled)


def test_ranks_share_one_run(tmp_path):
    """Two processes over gloo: one folder, one writer, own random states, agreed errors and stops."""
    program = tmp_path / "two.py"
    program.write_text(
        textwrap.dedent("""
        import dataclasses, os, random, sys
        from datetime import timedelta
        import torch
        from common.curves import RunError
        from common.ranks import distributed, reduce_metrics
        from common.run import Run
        @dataclasses.dataclass
        class Args:
            env: str = "sql"
            resume: str = ""
        store = "file://" + os.path.abspath("store")
        torch.distributed.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2, timeout=timedelta(seconds=60))
        rank = torch.distributed.get_rank()
        r = Run(Args(), "mrtpo", total_updates=4, key_metrics=[], **distributed())
        random.seed(rank)
        r.log({"a": rank}, 1)
        r.episode({"rank": rank}, 1)
        r.save_checkpoint(1, {"v": 1})
        next_value = random.random()
        r.log({"a": rank}, 2)
        print("mean", reduce_metrics({"x": (rank * 4.0, 1 + rank), "y_max": (float(rank), 1), "z": (0.0, 0), "half": (3.0 * rank, rank)}))
        try:
            reduce_metrics({"x": (1.0, 1)} if rank else {"y": (1.0, 1)})
        except RunError as error:
            print("keys", "different keys" in str(error))
        r.stop_requested, r.exit_code = rank == 1, 143 if rank == 1 else 0
        print("stop", r.should_stop(), r.exit_code)
        r.close()
        try:
            r.save_checkpoint(2, {"v": object()} if rank == 0 else {"v": 2})
        except RunError as error:
            print("save", "is a object" in str(error))
        again = Run(Args(resume=str(r.folder)), "mrtpo", total_updates=4, key_metrics=[], **distributed())
        random.seed(77)
        print("load", again.load_checkpoint(), random.random() == next_value, again.folder)
        again.log({"a": rank}, 2)
        again.close()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen([sys.executable, str(program), str(rank)], cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True) for rank in (0, 1)]
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said[0][0] == said[1][0]
    folder = next(iter(Path("runs").iterdir()))
    assert said[0][0].splitlines() == [
        f"mean {{'half': 3.0, 'x': {4 / 3}, 'y_max': 1.0}}",
        "keys True",
        "stop True 143",
        "save True",
        f"load (1, {{'v': 1}}) True {folder}",
    ]
    assert len(list(Path("runs").iterdir())) == 1
    assert read_jsonl(folder / "metrics.jsonl") == [{"step": 1, "a": 0}, {"step": 2, "a": 0}] and read_jsonl(folder / "episodes.jsonl") == [
        {"rank": 0, "step": 1}
    ]


def test_other_ranks_need_broadcast_and_write_nothing(tmp_path):
    with pytest.raises(RunError, match="needs `broadcast`"):
        make(is_main=False)
    main = make(Args(out="x"))
    other = make(Args(out="x"), is_main=False, rank=1, broadcast=lambda value: ("x", None))
    size = (main.folder / "metrics.jsonl").stat().st_size
    with other.timer("rollout"):
        pass
    other.log({"a": 1}, 1)
    other.episode({"a": 1})
    other.finish()
    assert other.folder == main.folder and (main.folder / "metrics.jsonl").stat().st_size == size and other.seconds == {}
    with pytest.raises(RunError, match="the main rank's trouble"):
        make(is_main=False, rank=1, broadcast=lambda value: (None, "the main rank's trouble"))
    main.close()


def test_more_ranks_than_saved_warns():
    r = make()
    r.save_checkpoint(1, {})
    with pytest.warns(UserWarning, match="checkpoint of 1 ranks: rank 3 starts from the random state of rank 0"):
        load_checkpoint(r.folder, rank=3)
    r.close()


# ---- end table and curves


def test_end_table():
    records = [
        {"step": 1, "eval/success": 0.1, "losses/entropy": 2.0},
        {"step": 2, "eval/success": 0.7},
        {"step": 3, "eval/success": None},
        {"step": 4, "eval/success": 0.5},
    ]
    lines = curves.end_table(records, ["eval/success", "losses/entropy", "absent"]).splitlines()
    assert [line.split() for line in lines] == [
        ["metric", "start", "end", "best", "at", "update"],
        ["eval/success", "0.1", "0.5", "0.7", "2"],
        ["losses/entropy", "2", "2", "-", "-"],
        ["absent", "-", "-", "-", "-"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_series_takes_the_later_of_two_lines_and_skips_nulls():
    steps, values = curves.series([{"step": 2, "a": 1.0}, {"step": 2, "a": 3}, {"step": 3, "a": None}, {"step": 4}, {"step": 5, "a": "x"}], "a")
    assert steps.tolist() == [2] and values.tolist() == [3.0]


def test_t_interval():
    for df, value in ((1, 12.7062), (2, 4.3027), (10, 2.2281), (11, 2.2010), (20, 2.0860), (30, 2.0423), (120, 1.9799)):  # printed tables
        assert curves.t_quantile(df) == pytest.approx(value, abs=1e-3)
    a, b = (np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), (np.array([2, 3, 4]), np.array([4.0, 5.0, 9.0]))
    steps, mean, half = curves.mean_interval([a, b])
    assert steps.tolist() == [2, 3] and mean.tolist() == [3.0, 4.0]
    assert half == pytest.approx([12.7062 * math.sqrt(2) / math.sqrt(2)] * 2)  # values 2 and 4: sd sqrt 2
    assert np.isnan(curves.mean_interval([a])[2]).all() and curves.mean_interval([a])[1].tolist() == [1.0, 2.0, 3.0]
    assert len(curves.mean_interval([a, (np.array([9]), np.array([1.0]))])[0]) == 0


def test_smoothing_keeps_constants_and_has_no_pull_to_zero():
    assert curves.smooth(np.full(100, 3.0)) == pytest.approx(np.full(100, 3.0))
    values = np.arange(200.0)
    out = curves.smooth(values)
    assert out[0] == 0.0 and (out <= values).all() and out[-1] == pytest.approx(199 - 9, abs=0.01)  # decay 0.9 lags a ramp by 0.9 / 0.1


def texts(monkeypatch, folders, **options):
    """Draws and returns the figure's axes as (title, corner, y label, number of lines), through matplotlib's own objects."""
    seen = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), real(self, *a, **k))[1])
    out = curves.draw_curves(folders, "out.png", **options)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and not Path(".out.png").exists()
    return seen[-1]


def no_overlap(figure):
    """No two pieces of text lie on each other, and none leaves the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = []
    for axes in figure.axes:
        items = [axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label]
        items += axes.get_legend().get_texts() if axes.get_legend() else []
        for item in items:
            if item.get_text().strip():
                box = item.get_window_extent(renderer)
                if item.get_text().endswith("\n "):  # the empty second line of a lifted title is meant to lie beside the corner text
                    box = type(box).from_extents(box.x0, box.y0 + 0.5 * box.height, box.x1, box.y1)
                boxes.append((item.get_text(), box))
    for i, (text, box) in enumerate(boxes):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, f"{text!r} leaves the picture"
        for other, second in boxes[:i]:
            width, height = min(box.x1, second.x1) - max(box.x0, second.x0), min(box.y1, second.y1) - max(box.y0, second.y0)
            assert width <= 1 or height <= 1, f"{text!r} lies on {other!r}"


def fill(r, n, shift=0.0, full=True):
    generator = random.Random(int(shift * 100))
    for u in range(1, n + 1):
        m = {"charts/episodic_return": u / n + shift + generator.gauss(0, 0.1)}
        if full:
            m |= {f"reward/constraint_{i:02d}_of_the_prompt": generator.random() for i in range(13)}
            m |= {
                "losses/policy_loss": generator.gauss(0, 1),
                "losses/value_loss": 1.0,
                "losses/entropy": 1.0,
                "losses/approx_kl": 0.01,
                "losses/clipfrac": 0.0,
            }
            m |= {"rollout/logprob_absdiff_mean": 1e-7, "rollout/logprob_absdiff_max": 1e-5, "losses/grad_norm": float("nan") if u % 3 else 1.0}
            m |= {
                "charts/episodic_length": 30.0,
                "time/rollout": 2.0,
                "time/train": 1.0,
                "time/sync": 1.0,
                "mrtpo/replayed_frac": 0.2,
                "mrtpo/localisation_of_a_long_name": 0.3,
            }
        if u % 5 == 0:
            m["eval/success"] = min(1.0, u / n + shift)
        r.log(m, u)


def test_curves_of_one_run(monkeypatch, capsys):
    r = make(total_updates=40)
    fill(r, 40)
    r.finish(
        [
            Panel("Replayed response-reward pairs", ("mrtpo/replayed_frac",), "share"),
            Panel("Rewards", ("reward/*",)),
            Panel("A title that is far too long to stand in one small plot of the picture", ("mrtpo/local*",)),
        ]
    )
    assert (r.folder / "curves.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "eval/success  0.125    1     1         40" in out and str(r.folder) in out
    figure = texts(monkeypatch, [r.folder])
    shown = {axes._left_title.get_text().strip(): axes for axes in figure.axes}
    assert next(iter(shown)) == "Evaluation: success rate" and figure.axes[0].bbox.width > 1.8 * figure.axes[1].bbox.width
    assert len(shown) == 13 and shown["Evaluation: success rate"]._right_title.get_text() == "1"
    assert [t.get_text() for t in shown["Time by phase"].get_legend().get_texts()] == ["rollout 50%", "sync 25%", "train 25%"]
    assert shown["Engine-trainer gap"].get_yscale() == "log" and len(shown["Rewards"].lines) == 14  # 13 thin lines and their mean
    no_overlap(figure)


@pytest.mark.parametrize(
    "records", ["", '{"step":0,"eval/success":0.5}\n', '{"step":3,"eval/success":null,"time/rollout":0.0}\n', '{"step":1,"x":"text"}\n{"st']
)
def test_curves_of_almost_nothing(monkeypatch, records):
    r = make()
    r.close()
    (r.folder / "metrics.jsonl").write_text(records)
    no_overlap(texts(monkeypatch, [r.folder]))
    only = Path("only")
    only.mkdir()
    (only / "metrics.jsonl").write_text(records)  # redrawn from metrics.jsonl alone
    no_overlap(texts(monkeypatch, [only]))


def test_overlay_groups_by_what_differs(monkeypatch):
    folders = []
    for rate in (0.1, 0.2):
        for seed in (1, 2, 3):
            r = make(Args(learning_rate=rate, seed=seed, out=f"r{rate}-{seed}", num_updates=seed), total_updates=20)
            fill(r, 20 if seed > 1 else 15, shift=rate * seed, full=seed == 1)
            r.close()
            folders.append(r.folder)
    groups = curves.load_runs(folders)
    assert {label: len(group) for label, group in groups.items()} == {"0.1": 3, "0.2": 3}
    assert set(curves.load_runs(folders[:3], ["seed"])) == {"1", "2", "3"}
    assert set(curves.load_runs(folders, ["learning_rate", "env"])) == {"learning_rate 0.1, env sql", "learning_rate 0.2, env sql"}
    with pytest.raises(RunError, match=r"--group-by lr: no run has such an argument; there are .*learning_rate"):
        curves.load_runs(folders, ["lr"])
    figure = texts(monkeypatch, folders)
    headline = figure.axes[0]
    assert [t.get_text() for t in headline.get_legend().get_texts()] == ["0.1 (n=3, to update 15)", "0.2 (n=3, to update 15)"]
    assert headline.lines[0].get_xdata().tolist() == [5, 10, 15]
    # at update 5: seeds give 5/15 + .1, 5/20 + .2, 5/20 + .3
    assert headline.lines[0].get_ydata()[0] == pytest.approx((1 / 3 + 0.1 + 0.25 + 0.2 + 0.25 + 0.3) / 3)
    no_overlap(figure)
    with pytest.warns(UserWarning, match="a second run with seed 1 in group"):
        curves.load_runs([folders[0], folders[0]])


def test_command_line_redraws(capsys):
    r = make(Args(out="x"))
    fill(r, 5)
    r.close()
    command = [sys.executable, "-m", "common.run", "x"]
    got = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert got.returncode == 0 and got.stdout == "x/curves.png\n" and Path("x/curves.png").exists(), got.stderr
    with pytest.warns(UserWarning, match="a second run with seed 1"):
        curves.main(["x", "x/checkpoints", "--group-by", "learning_rate", "--out", "two.png"])
    assert capsys.readouterr().out == "two.png\n" and Path("two.png").exists()
    with pytest.raises(SystemExit) as stop:
        curves.main(["x", "nowhere"])
    assert stop.value.code == 2 and capsys.readouterr().err == "nowhere is no run folder: it has no args.json\n"


def test_a_crowd_of_metrics_is_drawn_as_thin_lines_and_their_mean():
    from matplotlib.figure import Figure

    records = [{"step": step, **{f"reward/r{i}": (i + step) / 100 for i in range(12)}} for step in (1, 2)]
    records[1]["reward/r11"] = None  # a null takes no part in that step's mean
    axes = Figure().add_subplot()
    entries = curves.draw_lines(axes, records, [f"reward/r{i}" for i in range(12)], 1.5)
    assert [text for _, text in entries] == ["mean of 12 0.07", "each of them"]
    assert len(axes.lines) == 13
    assert axes.lines[-1].get_ydata().tolist() == pytest.approx([0.065, 0.07])
