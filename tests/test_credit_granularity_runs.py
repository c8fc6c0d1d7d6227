"""credit_granularity.py by its command line on editing tasks: schemes that must agree do so bit for bit, runs resume, split and fail as they should."""

import dataclasses
import functools
import json
import math
import random
import re
import shutil
import socket
from pathlib import Path

import pytest
import script_runner
import torch
from conftest import need_program
from judge_server import JudgeServer, Reply
from multi_turn_runs import Result, Workshop, both, equal, flags, near
from test_credit_granularity import write_run

import common.curves
import common.run
import credit_granularity as cg
import credit_report
from common import envs, policies
from common.arguments import parse_args
from common.checkpoints import newest_checkpoint, read_checkpoint
from common.curves import RunError, read_jsonl
from common.envs import editing, editing_films
from common.rollout import Turn

script_runner.PRELOAD += ["common.judges", "common.envs.editing"]  # read when the first run of the session starts the server
PRIVILEGED = ("reference", "turn_advice")


def few_films():
    """A hook, and for this process: the first of the generated films and no curves, so that a run is over at once."""
    editing.COMPACT = dataclasses.replace(editing_films.COMPACT, films=(24, 4))
    common.run.draw_curves = lambda folders, out, group_by=(): None


def curves():
    """A hook."""
    common.run.draw_curves = common.curves.draw_curves


class Shop(Workshop):
    """Its small policy edits; runs remember their arguments as in Workshop."""

    def __init__(self, folder):
        self.script, self.folder, self.kept, self.count = "credit_granularity.py", folder, {}, 0
        tasks = envs.load("editing")
        talks = [tasks.careless(task, random.Random(i)) for i, task in enumerate(tasks.train * 6)]
        config = policies.TinyConfig(
            vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, context=320, steps=250, batch_size=8, learning_rate=1e-2
        )
        lm, tokenizer, _ = policies.train_tiny(talks, config)
        self.policy = folder / "policy"
        lm.save_pretrained(self.policy)
        tokenizer.save_pretrained(self.policy)
        self.start_weights = {f"lm.{name}": t.clone() for name, t in lm.state_dict().items()}

    def argv(self, out, **changes):
        fewer = {
            "env": "editing",
            "max_new_tokens": 12,
            "max_turns": 6,
            "group_size": 4,
            "eval_tasks": 4,
            "eval_samples": 2,
            "judge_cache": self.folder / "cache",
        }
        if changes.get("scheme") == "opsd":
            fewer["group_size"] = 2
        return [word for word in super().argv(out, **fewer | changes) if str(word)]  # a switch has no value

    def run(self, hook=None, environment=None, **changes):
        key = (str(hook), str(environment), tuple(sorted((k, str(v)) for k, v in changes.items())))
        if hook is not None or key not in self.kept:
            out, hooks = self.path(), functools.partial(both, few_films, *([hook] if hook else []))
            self.kept[key] = Result(script_runner.run(self.script, self.argv(out, **changes), out.with_suffix(".log"), hooks, environment), out)
        return self.kept[key]

    def resume(self, folder, **changes):
        return Result(script_runner.run(self.script, flags(resume=folder, **changes), self.path().with_suffix(".log"), few_films), folder)

    def run_two(self, hook, **changes):
        out = self.path()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        hooks = functools.partial(both, few_films, hook)
        return [Result(e, out) for e in script_runner.run_ranks(self.script, self.argv(out, **changes), out.with_suffix(".log"), 2, port, hooks)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(editing, "COMPACT", editing.COMPACT)  # put back at the end
        patch.setattr(common.run, "draw_curves", common.run.draw_curves)
        few_films()
        yield Shop(tmp_path_factory.mktemp("runs"))


def check_numbers(result, updates):
    result.ok()
    assert [m["step"] for m in result.metrics] == list(range(updates + 1))
    for m in result.metrics:
        assert all(v is None or math.isfinite(v) for v in m.values()), m
    for m in result.updates:
        assert m["rollout/weight_version"] == m["step"]
        assert 0 <= m["rollout/logprob_absdiff_mean"] <= m["rollout/logprob_absdiff_max"] < 1e-4
        assert m["charts/episodic_return"] == m["charts/success"] == m["granularity/success"]
        assert 0 <= m["granularity/process_reward"] <= 1 and m["losses/grad_norm"] >= 0
        assert m["charts/turns"] == m["granularity/turns"] <= 12
    for m in (result.metrics[0], result.metrics[-1]):
        by_family = [m[f"eval/success/{f}"] for f in ("CS", "NS", "RC", "FC")]
        assert m["eval/success"] == pytest.approx(sum(by_family) / 4)  # as many tasks of each
        assert 0 <= m["eval/truncated_frac"] <= 1 and m["eval/error_frac"] == 0


@pytest.mark.parametrize("scheme", ["outcome", "prm_fixed", "prm_decay"])
def test_reward_schemes(shop, scheme):
    r = shop.run(scheme=scheme, decay_start=1, decay_end=3)
    check_numbers(r, 3)
    weights = [m["granularity/process_weight"] for m in r.updates]
    assert weights == {"outcome": [0, 0, 0], "prm_fixed": [0.5] * 3, "prm_decay": [0.5, 0.5 * 0.5**3, 0]}[scheme]
    for m in r.updates:
        assert m["losses/clipfrac"] == m["losses/approx_kl"] == 0  # with one step every ratio is 1
    assert [m["granularity/episodes_so_far"] for m in r.updates] == [16, 32, 48]
    for e in r.episodes:
        for t in e["turns"]:
            assert t["advantage"] == pytest.approx(t["outcome_advantage"] + e["weight"] * t["turn_advantage"])
            assert len(t["votes"]) == 3 and t["judged"] in ("good", "bad", "neutral")


def test_schemes_that_are_one(shop):
    """lambda 0 is the outcome scheme, bit for bit, and so is a weight that has decayed; judging turns for the curves changes nothing."""
    outcome = shop.run(scheme="outcome").ok() and shop.run(scheme="outcome")
    for changes in (
        {"scheme": "prm_fixed", "process_weight": 0.0},
        {"scheme": "prm_decay", "decay_start": 0, "decay_end": 1},
        {"scheme": "outcome", "measure_process": "off"},
    ):
        r = shop.run(**changes)
        r.ok()
        assert equal(r.state, outcome.state), changes
    fixed, late = shop.run(scheme="prm_fixed", decay_start=1, decay_end=3), shop.run(scheme="prm_decay", decay_start=3, decay_end=9)
    assert equal(fixed.state, late.state) and not equal(fixed.state, outcome.state)
    assert "granularity/process_reward" not in shop.run(scheme="outcome", measure_process="off").metrics[-1]


@pytest.mark.parametrize("privileged", PRIVILEGED)
def test_distillation(shop, privileged):
    r = shop.run(scheme="opsd", privileged=privileged)
    check_numbers(r, 3)
    for m in r.updates:
        assert m["granularity/teacher_kl"] == pytest.approx(m["losses/policy_loss"], rel=1e-4)  # the loss is the token mean of KL(teacher || policy)
        assert 0 < m["granularity/tokens_in_top_turns"] < 1 and 0 < m["granularity/kl_in_top_turns"] < 1
        assert m["granularity/clipped_update_frac"] == float(m["losses/grad_norm"] > 1)
        assert m["granularity/teacher_overlong_frac"] == 0
    assert [m["granularity/episodes_so_far"] for m in r.updates] == [8, 16, 24]
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    for e in r.episodes:
        assert "advice :" not in tokenizer.decode(e["prompt_ids"] + e["token_ids"]) and "reference :" not in e["prompt"]  # the student sees neither
        assert len(e["kl"]) == sum(e["policy_mask"]) and sum(t["kl"] for t in e["turns"]) == pytest.approx(sum(e["kl"]))
        assert min(e["kl"]) > -1e-6


def test_variants_of_distillation(shop):
    states = [shop.run(scheme="opsd", privileged=p).ok() and shop.run(scheme="opsd", privileged=p).state for p in PRIVILEGED]
    for changes in ({"distillation": "sampled"}, {"loss_aggregation": "turn_mean"}, {"advice": "expert"}):
        r = shop.run(scheme="opsd", **changes)
        check_numbers(r, 3)
        states.append(r.state)
    assert not any(equal(a, b) for i, a in enumerate(states) for b in states[:i])


def test_the_teacher_is_the_start_policy_with_advice_in_the_students_states(shop):
    """What the run says of an episode's KL, computed again: the student of the checkpoint before, the start policy, and advice from a replay."""
    r = shop.run(scheme="opsd", learning_rate=1e-2, eval_every=1, save_every=1)
    r.ok()
    records = [e for e in r.episodes if e["step"] == 3]
    lm, start = (policies.AutoModelForCausalLM.from_pretrained(shop.policy) for _ in range(2))
    state = read_checkpoint(r.folder / "checkpoints" / "00000002")[1]["state"]["model"]
    assert not equal(state, shop.start_weights)
    student, teacher = cg.Student(lm), cg.Student(start)
    student.load_state_dict(state)
    tokenizer = policies.AutoTokenizer.from_pretrained(shop.policy)
    frame = cg.observation_frame(tokenizer, [tokenizer.eos_token_id])
    tasks = envs.load("editing")
    for record in records:
        task = next(t for t in tasks.train if t["id"] == record["task_id"])
        game, hints = tasks.make_env(), []
        messages = game.reset(task)
        e = cg.Episode(0, 0, task, record["prompt_ids"], record["token_ids"], record["policy_mask"])
        for t in record["turns"]:
            ids = record["token_ids"][t["start"] : t["stop"]]
            cut = ids[-1] != tokenizer.eos_token_id
            hints.append("advice : " + cg.oracle_advice(game, True))
            text = tokenizer.decode(ids if cut else ids[:-1])
            e.turns.append(Turn(t["start"], t["stop"], text, cut, game.step(text)[0]))
        prompt, ids, mask = cg.teacher_row(tokenizer, frame, messages, e, hints)
        with torch.no_grad():
            seen = teacher(cg.pack_rows([(prompt, ids)], masks=[mask]), hidden_only=True)
            row = cg.pack_rows([(e.prompt_ids, e.token_ids)], masks=[e.policy_mask])
            kl = student(row, 1.0, teacher=(seen, teacher.head(), "forward_kl"))[1]
        assert torch.allclose(kl, torch.tensor(record["kl"]), rtol=1e-3, atol=1e-4)
    assert records


def test_run_folder(shop):
    r = shop.run(hook=curves, scheme="prm_fixed", num_updates=2, eval_every=1)
    r.ok()
    for name in ("args.json", "metrics.jsonl", "episodes.jsonl", "curves.png", "credit.html"):
        assert (r.folder / name).stat().st_size > 0, name
    page = (r.folder / "credit.html").read_text()
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [s["name"] for s in shown[0]["strips"]] == ["outcome", "turn", "sum", "process"]
    page = (shop.run(scheme="opsd", privileged="turn_advice").folder / "credit.html").read_text()
    shown = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])["episodes"]
    assert [s["name"] for s in shown[0]["strips"]] == ["KL", "KL of the turn", "process"]


@pytest.mark.parametrize("changes", [{"scheme": "prm_decay", "decay_start": 1, "decay_end": 4}, {"scheme": "opsd"}], ids=["prm_decay", "opsd"])
def test_two_and_two_are_four(shop, changes):
    whole = shop.run(num_updates=4, eval_every=2, **changes)
    whole.ok()
    first = shop.run(num_updates=2, save_every=2, eval_every=2, **changes)
    first.ok()
    second = shop.resume(first.folder, num_updates=4)
    second.ok()
    assert equal(second.state, whole.state) and second.lasting == whole.lasting  # opsd: the teacher is the start policy again, not the resumed one


@pytest.mark.parametrize("scheme, minibatches", [("prm_fixed", 2), ("opsd", 1)])
def test_splits_of_the_work(shop, scheme, minibatches):
    """Micro-batches of any size, padded rows and two processes give the gradient of one."""
    one = {"num_updates": 1, "max_grad_norm": 1e9, "eval_every": 0, "save_every": 1, "num_minibatches": minibatches, "scheme": scheme}
    found = {}
    for name, changes in (("one", {}), ("small", {"micro_batch_tokens": 1, "share_prompts": "off"})):
        hook = functools.partial(script_runner.keep_gradients, f"{shop.folder}/{scheme}-{name}")
        shop.run(hook=hook, **one, **changes).ok()
        found[name] = torch.load(f"{shop.folder}/{scheme}-{name}.0")
    for r in shop.run_two(functools.partial(script_runner.keep_gradients, f"{shop.folder}/{scheme}-two"), **one):
        r.ok()
    found["two"] = torch.load(f"{shop.folder}/{scheme}-two.0")
    for name, steps in found.items():
        assert len(steps) == minibatches
        mine, want = [g for step in steps for g in step], [g for step in found["one"] for g in step]
        assert max(float(g.abs().max()) for g in want) > 0 and near(want, mine, 1e-4), name


# ------------------------------------------------------------------------------------------------------------ model judges


def judged_run(shop, outcome, process, **changes):
    with JudgeServer(outcome) as a, JudgeServer(process) as b:
        judges = {"outcome_judge": f"openai:a@{a.url}", "process_judge": f"openai:b@{b.url}", "judge_cache": shop.path(), "judge_patience": 0}
        return shop.run(**judges, **changes), a.calls, b.calls


def say(**value):
    return lambda body, number: Reply(json.dumps(value))


def test_models_as_judges(shop):
    r, asked, voted = judged_run(shop, say(score=0.75), say(score=1.0), scheme="prm_fixed", env="editing:rc")
    r.ok()
    assert all(body["model"] == "a" for body, _ in asked) and all(body["model"] == "b" for body, _ in voted)
    assert "Reference:" in str(asked) and "Reference:" not in str(voted)
    for m in r.updates:
        assert m["granularity/process_reward"] == 1 and m["granularity/unjudged_turn_frac"] == 0
        assert m["judge/process/calls"] > 0 and m["judge/missing_outcome_frac"] == 0
    handed_in = [t for e in r.episodes if not e["truncated"] for t in e["turns"]]
    assert handed_in and all(t["votes"] == [1, 1, 1] for t in handed_in)


def test_a_judge_that_abstains_gives_no_process_reward(shop):
    r, _, voted = judged_run(shop, say(score=0.5), say(score=None), scheme="prm_fixed", num_updates=2)
    plain, _, _ = judged_run(shop, say(score=0.5), say(score=None), scheme="outcome", num_updates=2)
    r.ok()
    assert voted and all(m["granularity/unjudged_turn_frac"] == 1 and "granularity/process_reward" not in m for m in r.updates)
    assert equal(r.state["model"], plain.ok() and plain.state["model"])  # missing, and not a score of 0 that would count


def test_advice_by_a_model(shop):
    r, _, advised = judged_run(shop, say(score=0.5), say(advice="take\nbo"), scheme="opsd", num_updates=1)
    r.ok()
    assert r.updates[0]["granularity/teacher_kl"] > 0 and advised
    assert "reference" in advised[0][0]["messages"][1]["content"]


def test_judges_that_go_away(shop):
    lost, _, _ = judged_run(shop, lambda body, number: Reply(status=503), say(score=1), env="editing:rc", scheme="prm_fixed")
    assert lost.code == 1 and "what was judged is in the cache" in lost.output and "Traceback" not in lost.output
    late, _, _ = judged_run(shop, say(score=0.5), lambda body, number: Reply(status=503), env="editing:rc", scheme="prm_fixed")
    assert late.code == 1 and "go on with --resume" in late.output and newest_checkpoint(late.folder)[1]["step"] == 0


def test_an_evaluation_that_a_judge_left_is_repeated(shop):
    """--resume makes up for it, after the last update too, and reports take the run."""
    changes = {"env": "editing:rc", "scheme": "outcome", "num_updates": 2, "eval_every": 0, "measure_process": "off", "learning_rate": 1e-2}
    there, asked = [True], 0

    def reply(body, number):
        return Reply(json.dumps({"score": 0.5})) if there[0] or number < asked - 1 else Reply(status=503)

    with JudgeServer(reply) as judge:
        changes |= {"outcome_judge": f"openai:a@{judge.url}", "judge_patience": 0}
        whole = shop.run(**changes, judge_cache=shop.path())
        whole.ok()
        asked, there[0] = 2 * len(judge.calls), False  # the calls of the second run are counted on: its last one, of the last evaluation, fails
        lost = shop.run(**changes, judge_cache=shop.path())
        assert lost.code == 1 and "saved after update 2, whose evaluation is missing" in lost.output
        assert [m["step"] for m in lost.metrics] == [0, 1, 2] and "eval/success" not in lost.metrics[-1]
        with pytest.raises(RunError, match="no evaluation of its last update"):
            credit_report.read_runs([lost.folder])
        still = shop.resume(lost.folder)
        assert still.code == 1 and "still missing" in still.output
        there[0] = True
        shop.resume(lost.folder).ok()
        metrics = read_jsonl(lost.folder / "metrics.jsonl")
        assert [m["step"] for m in metrics] == [0, 1, 2, 2]
        assert {k: v for k, v in metrics[-1].items() if k.startswith("eval/")} == {k: v for k, v in whole.metrics[-1].items() if k.startswith("eval/")}
        assert credit_report.read_runs([lost.folder])
        shop.resume(lost.folder).ok()  # nothing is left to do
        assert len(read_jsonl(lost.folder / "metrics.jsonl")) == 4


def test_bad_input(shop, tmp_path):
    for changes, text in (
        ({"outcome_judge": "openai:m@http://127.0.0.1:9/v1", "process_judge": "openai:M@http://127.0.0.1:8/v1"}, "must be another model"),
        ({"env": "search"}, "no editing tasks"),
        ({"max_new_tokens": 400}, "prompt tokens"),
    ):
        r = shop.run(**{"scheme": "prm_fixed"} | changes)
        assert r.code == 1 and text in r.output and "Traceback" not in r.output, (changes, r.output)


def test_without_ffmpeg_all_else_works(shop, tmp_path):
    r = shop.run(environment={"PATH": str(tmp_path)}, num_updates=1, render="")
    r.ok()
    assert "ffmpeg was not found" in r.output and not (r.folder / "previews").exists()


def test_previews(shop):
    need_program("ffmpeg")
    r = shop.run(num_updates=1, eval_every=1, max_turns=24, env="editing:fc", eval_tasks=8, render="")
    r.ok()
    handed_in = r.metrics[-1]["eval/truncated_frac"] < 1
    assert len(list((r.folder / "previews").glob("*.mp4"))) > 0 if handed_in else True


# -------------------------------------------------------------------------------------------------------------- comparison


def test_comparison(tmp_path, monkeypatch, capsys):
    """Runs every variant with every seed by a command line that means the same arguments, keeps what is finished, goes on with what is not."""
    args = cg.Args(
        env="editing:rc", num_updates=4, seeds=2, seed=5, learning_rate=1e-3, out=str(tmp_path / "all"), compare=True, judge_cache="x y", render=True
    )
    ran = []

    class Child:
        """Stands for a run: writes its folder; the second one sees Ctrl-C while it works, and is waited for."""

        def __init__(self, words):
            ran.append(words[2:])
            self.interrupted = len(ran) == 2
            folder = words[words.index("--resume" if "--resume" in words else "--out") + 1]
            if "--resume" in words:
                meant = json.loads((Path(folder) / "args.json").read_text())
                shutil.rmtree(folder)
            else:
                meant = vars(cg.resolve(parse_args(cg.Args, words[2:])))
            name, _, seed = folder.rpartition("/")[2].rpartition("__")
            self.code = 3 if len(ran) == 4 else 0
            rows = 2 if self.code else 4
            write_run(Path(folder), updates=rows, seed=int(seed), **credit_report.VARIANTS[name], num_updates=4, env=args.env)
            (Path(folder) / "args.json").write_text(json.dumps(meant))
            (Path(folder) / "checkpoints" / f"{rows:08d}").mkdir(parents=True)

        def wait(self):
            if self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt
            return self.code

    monkeypatch.setattr(credit_report.subprocess, "Popen", Child)
    assert cg.compare(args, cg.resolve, cg.check_args, cg.__file__) == 3 and len(ran) == 4
    assert "goes on from here" in capsys.readouterr().err
    assert cg.compare(args, cg.resolve, cg.check_args, cg.__file__) == 0
    assert ran[4][:2] == ["--resume", str(tmp_path / "all" / "opsd_reference__5")] and len(ran) == 11
    assert cg.compare(args, cg.resolve, cg.check_args, cg.__file__) == 0 and len(ran) == 11
    meant = [parse_args(cg.Args, words) for words in ran if "--resume" not in words]
    assert [(a.scheme, a.seed) for a in meant[:3]] == [("outcome", 5), ("prm_fixed", 5), ("prm_decay", 5)]
    for a in meant:
        assert (a.env, a.learning_rate, a.num_updates, a.judge_cache, a.render, a.compare) == ("editing:rc", 1e-3, 4, "x y", True, False)
    result = json.loads((tmp_path / "all" / "report.json").read_text())
    assert list(result["variants"]) == ["outcome", "prm_fixed", "prm_decay", "opsd reference", "opsd turn_advice"]
    assert (tmp_path / "all" / "report.html").exists()
    early = tmp_path / "all" / "prm_decay__6"
    shutil.rmtree(early / "checkpoints")
    (early / "metrics.jsonl").write_text("")
    assert cg.compare(args, cg.resolve, cg.check_args, cg.__file__) == 0 and len(ran) == 12 and (tmp_path / "all" / "prm_decay__6.unfinished-1").is_dir()
    with pytest.raises(RunError, match="was run with other arguments"):
        cg.compare(cg.replace(args, learning_rate=2e-3), cg.resolve, cg.check_args, cg.__file__)
