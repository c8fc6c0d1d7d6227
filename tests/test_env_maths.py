"""Maths environment: extraction, number, unit and expression grading, hostile answers, the made-up world, setup reading, files and their errors."""

import json
import math
import random
import re
import signal

import pytest
from conftest import need_module, real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common import envs
from common.envs import DataError, maths


@pytest.fixture(scope="module")
def world():
    return envs.load("maths")


@pytest.fixture(scope="module")
def physics():
    return envs.load("maths:physics")


@pytest.fixture(scope="module")
def grader():
    need_module("math_verify")
    grader = maths.Grader()
    yield grader
    grader.close()


def outcome(task, text):
    env = maths.MathsEnv()
    env.reset(task)
    observation, reward, terminated, truncated, info = env.step(text)
    env.close()
    assert (observation, terminated, truncated) == ("", True, False)
    assert reward == info["success"] == info["rewards"]["correct"] or math.isnan(reward)
    return reward, info


# ------------------------------------------------------------------------------------------------------------------ extraction


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1}, no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),  # the last box, with balanced braces
        ("answer: 3\n\\boxed{4}\n#### 5", "4"),  # a box goes first, wherever it stands
        ("answer: 3\n#### 5 \n", "5"),
        ("#### 5\nmore\n#### 1,200\nend", "1,200"),
        ("The answer is 7.", "7"),
        ("Final answer is: **$42** \nDone.", "$42"),
        ("answer: 1\nanswer: 2", "2"),
        ("Answer : 2", "2"),
        ("<think>answer: 1\\boxed{2}</think>answer: 3", "3"),  # only what follows the reasoning
        ("<think>answer: 1</think>", None),
        ("answer:\n18", None),  # not on its line
        ("\\boxed{5", None),  # never closed
        ("\\boxed{}", None),
        ("it is 18", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found_by_the_documented_rules(text, answer):
    assert maths.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"), ("$18", "18"), ("$1,200 dollars", "1200"), ("-5", "-5"), (".5", ".5"), ("3.50", "3.50"), ("50%", "50"), ("18 eggs per day", "18"),
        ("-2,1", "-2,1"), ("12,34", "12,34"), ("5x", "5x"), ("5 x", "5 x"), ("2 pi", "2 pi"), ("5 and a half", "5 and a half"), ("20 or 21", "20 or 21"),
        ("5 times two", "5 times two"), ("x", "x"), ("-", "-"), ("", ""), ("$18$", "18"),
    ],
)  # fmt: skip
def test_a_plain_number_loses_currency_separators_and_words_but_never_mathematics(text, number):
    assert maths.plain_number(text) == number


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_extraction_never_raises(text):
    for part in (text, f"\\boxed{{{text}", f"answer: {text}", f"#### {text}"):
        found = maths.extract_answer(part)
        assert found is None or found == found.strip()
        maths.parse_quantity(part)
        maths.plain_number(part)


# ----------------------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "value", "exponents"),
    [
        ("3 m/s", 3, (1, 0, -1, 0, 0, 0)),
        ("36 km/h", 10, (1, 0, -1, 0, 0, 0)),
        ("2.5e3 J", 2500, (2, 1, -2, 0, 0, 0)),
        ("2.5 kJ", 2500, (2, 1, -2, 0, 0, 0)),
        ("2.5 \\times 10^{3}\\,\\text{J}", 2500, (2, 1, -2, 0, 0, 0)),
        ("2.5\u00d710^-3 A", 0.0025, (0, 0, 0, 1, 0, 0)),
        ("10^3 J", 1000, (2, 1, -2, 0, 0, 0)),
        ("1,200 J", 1200, (2, 1, -2, 0, 0, 0)),
        ("4186 J/(kg K)", 4186, (2, 0, -2, 0, -1, 0)),
        ("4186 J/kg/K", 4186, (2, 0, -2, 0, -1, 0)),
        ("7 kg\u00b7m/s\u00b2", 7, (1, 1, -2, 0, 0, 0)),
        ("12 ms", 0.012, (0, 0, 1, 0, 0, 0)),  # milliseconds, not metre-seconds
        ("12 m s", 12, (1, 0, 1, 0, 0, 0)),
        ("3 min", 180, (0, 0, 1, 0, 0, 0)),
        ("3 mmol", 0.003, (0, 0, 0, 0, 0, 1)),
        ("5 k\\Omega", 5000, (2, 1, -3, -2, 0, 0)),
        ("5 \u03a9", 5, (2, 1, -3, -2, 0, 0)),
        ("-3 m", -3, (1, 0, 0, 0, 0, 0)),
        ("2 m^-1", 2, (-1, 0, 0, 0, 0, 0)),
        ("2 cm^2", 2e-4, (2, 0, 0, 0, 0, 0)),
        ("5", 5, None),
    ],
)
def test_quantities_are_read(text, value, exponents):
    got = maths.parse_quantity(text)
    assert got[0] == pytest.approx(value, rel=1e-12)
    assert got[1] == exponents


@pytest.mark.parametrize("text", ["", "m", "5 foo", "(3 m", "3 m)", "3 m/", "3 (m", "1e999 m", "3 kmin", "3 m^22", "about 3 m", "3 m or 4 m", "1" * 500 + " m"])
def test_what_is_no_quantity_is_none(text):
    assert maths.parse_quantity(text) is None


def test_five_per_cent_is_the_border_and_the_unit_counts():
    assert maths.same_quantity("100 m", "105 m") == (True, "")
    assert maths.same_quantity("100 m", "95 m") == (True, "")
    assert maths.same_quantity("100 m", "0.1 km") == (True, "")
    assert maths.same_quantity("100 m", "105.1 m") == (False, "other value")
    assert maths.same_quantity("100 m", "94.9 m") == (False, "other value")
    assert maths.same_quantity("100 m", "-100 m") == (False, "other value")
    assert maths.same_quantity("100 m", "100") == (False, "no unit")
    assert maths.same_quantity("100 m", "100 s") == (False, "unit of another dimension")
    assert maths.same_quantity("100 m", "far") == (False, "not a number with a known unit")
    assert maths.same_quantity("5 N", "5 kg m/s^2") == (True, "")
    assert maths.same_quantity("5 W", "5 V A") == (True, "")
    assert maths.same_quantity("5 V/A", "5 ohm") == (True, "")
    with pytest.raises(ValueError, match="reference"):
        maths.same_quantity("100", "100 m")


# --------------------------------------------------------------------------------------------------------------------- grading


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("18", "18", True), ("18", "18.0", True), ("18", "17", False), ("\\frac{1}{2}", "0.5", True), ("\\frac{1}{2}", "1/2", True), ("3", "\\sqrt{9}", True),
        ("x^2+1", "1+x^2", True), ("2", "x=2", True), ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True), ("(3, 4)", "(4, 3)", False),
        ("18", "", False), ("18", "}{", False), ("-2,1", "-2,1", True), ("50\\%", "50", True),
    ],
)  # fmt: skip
def test_expressions_are_compared_by_value(grader, gold, answer, right):
    correct, reason = grader.compare(gold, answer)
    assert correct is right
    assert bool(reason) is not right


@pytest.fixture
def impatient(monkeypatch):
    """A grader whose process gets little processor time."""
    need_module("math_verify")
    serve = "import common.envs.maths as m; m.CPU_SECONDS = 1.0; m.serve()"
    real = maths.subprocess.Popen
    monkeypatch.setattr(maths.subprocess, "Popen", lambda command, **kw: real([command[0], "-c", serve], **kw))
    grader = maths.Grader()
    yield grader
    grader.close()


def test_a_hostile_answer_is_not_graded_and_the_grader_lives_on(impatient):
    """Towers of powers never end by themselves; math-verify's own guard does not work outside of main threads."""
    task = {"grader": "expression", "answer": "18"}
    for hostile in ("9^{9^{9^9}}", "(10^{9})!"):
        score, reason = maths.grade(task, f"\\boxed{{{hostile}}}", impatient)
        assert math.isnan(score), "neither right nor wrong is known"
        assert "took over" in reason
        assert impatient.process is None
    assert maths.grade(task, "\\boxed{18}", impatient) == (1.0, "")
    first = impatient.process.pid
    assert maths.grade(task, "\\boxed{17}", impatient) == (0.0, "other value")
    assert impatient.process.pid == first, "one process serves many answers"


def test_an_answer_that_fails_the_grader_marks_the_episode(monkeypatch):
    monkeypatch.setattr(maths.Grader, "compare", lambda self, gold, answer: (None, "comparing took over 5 s"))
    reward, info = outcome({"grader": "expression", "answer": "18", "question": "?", "form": ""}, "\\boxed{2^3^4}")
    assert math.isnan(reward)
    assert info["error"] == "comparing took over 5 s"


def test_a_dead_grading_process_is_told_apart_from_a_slow_one(grader):
    assert grader.compare("1", "1")[0]
    grader.process.send_signal(signal.SIGKILL)
    grader.process.wait()
    assert grader.compare("1", "1") == (True, "")  # a dead one is replaced


@pytest.mark.parametrize("text", ["\\boxed{" + "1" * 500 + "}", "answer: " + "9" * 500])
def test_an_overlong_answer_is_wrong_without_asking(text):
    for kind in ("expression", "number", "quantity"):
        score, reason = maths.grade({"grader": kind, "answer": "1 m"}, text, None)
        assert (score, "longer than" in reason) == (0.0, True)


# -------------------------------------------------------------------------------------------------------------- the made-up world


def test_teachers_derivations_are_right_and_begin_with_the_facts(world, physics):
    for tasks in (world, physics):
        for task in [*tasks.train[:300], *tasks.eval[:100]]:
            assert outcome(task, tasks.demonstrate(task, random.Random(0))[-1]["content"])[0] == 1.0
            setup = maths.read_setup(task, task["derivation"])
            assert (setup["declared"], setup["right"], setup["found"]) == (1, 1, 1)
            assert setup["statements"] == (1 if tasks is world else 2)  # physics says "d = numbers" too
            assert task["derivation"].startswith("setup: ")
            assert task["hint"].removeprefix("hint: ") == task["derivation"].splitlines()[0].removeprefix("setup: ")


def test_steps_of_derivations_are_true(world):
    for task in world.train[:500]:
        for line in task["derivation"].splitlines()[1:-1]:
            left, _, right = line.partition("=")
            a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)", left).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right)
            assert 1 <= int(right) < 100


def test_tasks_are_distinct_deterministic_and_facts_do_not_depend_on_the_seed(world):
    again, other = envs.load("maths"), envs.load("maths", seed=1)
    assert (again.train, again.eval) == (world.train, world.eval)
    assert other.train != world.train
    questions = [t["question"] for t in (*world.train, *world.eval)]
    assert len(set(questions)) == len(questions) == 6512
    assert all(maths.WORLD[n]["value"] == int(v) for t in other.train for n, v in t["facts"].items())
    kinds = {(f["familiarity"], f["held_back"]) for f in maths.WORLD.values() if f["kind"] == "unit"}
    assert len(kinds) == 6  # every familiarity among the held-back facts too


def test_the_prompt_tells_no_fact_and_the_derivation_is_short(world):
    for task in world.train[:500]:
        text = maths.prompt(task)[0]["content"]
        assert "=" not in text
        assert all(name in text for name in task["facts"])
        assert len(task["derivation"].splitlines()) <= 7


def test_the_careless_expert_has_its_habits(world):
    rng = random.Random(1)
    declared, right, hesitates, solved = [], {"known": [], "shaky": [], "unknown": []}, [], []
    for task in world.train[:3000]:
        text = world.careless(task, rng)[-1]["content"]
        setup = maths.setup_section(text)
        declared.append(setup is not None)
        hesitates.append(maths.backtracks(text) > 0)
        solved.append(outcome(task, text)[0])
        if setup is None:
            continue
        for name, value in task["facts"].items():
            right[maths.WORLD[name]["familiarity"]].append(maths.statements(setup, name) == [value])
    assert sum(declared) / 3000 == pytest.approx(maths.DECLARES, abs=0.03)
    assert sum(hesitates) / 3000 > 0.5
    for familiarity, hits in right.items():
        assert sum(hits) / len(hits) == pytest.approx(maths.CHANCE[familiarity], abs=0.05)
    assert 0.1 < sum(solved) / 3000 < 0.3


def test_without_a_setup_the_careless_expert_is_never_right_about_the_worth(world):
    rng = random.Random(2)
    for task in world.train[:1000]:
        text = world.careless(task, rng)[-1]["content"]
        if maths.setup_section(text) is None:
            worth = task["facts"][next(iter(task["facts"]))]
            assert not text.startswith(f"{task['count']}*{worth}=")


def test_a_hinted_expert_copies_the_hint(world):
    rng, declared = random.Random(3), 0
    for task in world.train[:300]:
        messages = maths.careless(task, rng, hinted=True)
        assert messages[0]["content"].endswith("\n" + task["hint"])
        section = maths.setup_section(messages[-1]["content"])
        declared += section is not None
        assert section is None or maths.read_setup(task, messages[-1]["content"])["right"] == 1
    assert 0.6 < declared / 300 < 0.9


# --------------------------------------------------------------------------------------------------------------------- setup


def test_read_setup_by_hand():
    task = {"facts": {"brin": "7", "dovo": "3"}}
    both = maths.read_setup(task, "setup: brin=7; dovo=4\n3*7=21\nanswer: 21")
    assert both == {"declared": 1, "right": 0.5, "found": 0.5, "statements": 1}
    listed = maths.read_setup(task, "setup: brin=2; brin=7; dovo=3\nwait brin=5\nanswer: 1")
    assert listed == {"declared": 1, "right": 0.5, "found": 1, "statements": 2}  # the first statement counts as the setup, any one is found
    later = maths.read_setup(task, "3*7=21\nbrin=7\nsetup: dovo=3")
    assert later == {"declared": 0.5, "right": 0.5, "found": 1, "statements": 1}
    assert maths.read_setup(task, "answer: 3") == {"declared": 0, "right": 0, "found": 0, "statements": 0}
    assert maths.statements("abrin=7; brin =8", "brin") == ["8"]  # whole names
    assert all(math.isnan(v) for v in maths.read_setup({"facts": {}}, "setup: x=1").values())
    assert maths.backtracks("Wait, actually no. waiting") == 2


def test_regions_cover_a_response_in_order():
    text = "setup: brin=7\n3*7=21\nwait 3*7=21\nanswer: 21"
    spans = maths.regions(text)
    assert [name for name, *_ in spans] == ["setup", "steps", "hesitation", "answer"]
    assert "".join(text[a:b] for _, a, b in spans) == text


@pytest.mark.parametrize("count", [len, lambda t: len(t.split()), lambda t: len(re.findall(r"\w+|\W", t)), lambda t: len(re.findall(r"\d|[a-z]{1,3}| ?\W", t))])
def test_the_control_text_is_as_long_as_the_hint_and_says_nothing(world, physics, count):
    for task in [*world.train[:200], *physics.train[:50]]:
        control = maths.control_text(task["hint"], count)
        assert count(control) == count(task["hint"])
        assert not any(maths.statements(control, name) for name in task["facts"])


def test_a_control_text_that_cannot_be_made_is_an_error():
    with pytest.raises(ValueError, match="no control text of 1 tokens"):
        maths.control_text("hint", lambda t: 1 if t == "hint" else 100)


# --------------------------------------------------------------------------------------------------------------------- files


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_both_formats_are_read(tmp_path):
    need_module("math_verify")
    rows = [{"problem": f"p{i}?", "answer": a, "unique_id": f"u{i}", "level": 3} for i, a in enumerate(["\\frac{1}{2}", "7", "x+1"])]
    rows += [{"question": f"q{i}?", "answer": f"work <<1+1=2>>\nmore\n#### {i},000"} for i in range(1, 8)]
    tasks = envs.load(f"maths:{write(tmp_path / 'two.jsonl', *rows)}")
    found = {t["id"]: t for t in (*tasks.train, *tasks.eval)}
    assert len(found) == 10
    assert found["u0"]["answer"] == "\\frac{1}{2}"
    assert found["u0"]["level"] == 3
    assert found["two-00010"]["answer"] == "7000"
    assert not {t["id"] for t in tasks.train} & {t["id"] for t in tasks.eval}
    assert outcome(found["two-00010"], "so \\boxed{7000}")[0] == 1.0
    assert outcome(found["two-00010"], "#### 7,000")[0] == 1.0
    assert outcome(found["two-00010"], "The answer is $7,000.00.")[0] == 1.0
    assert outcome(found["two-00010"], "The answer is 700.")[0] == 0.0
    reward, info = outcome(found["u0"], "no idea")
    assert (reward, info["reason"]) == (0.0, "no final answer")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "x.jsonl:2: not valid JSON"),
        ("[1]", "x.jsonl:2: a list"),
        ({"problem": "p"}, "x.jsonl:2: field 'answer'"),
        ({"answer": "3"}, "x.jsonl:2: field 'question'"),
        ({"problem": " ", "answer": "3"}, "x.jsonl:2: field 'problem'"),
        ({"problem": "p", "answer": 3}, "x.jsonl:2: field 'answer'"),
        ({"question": "p", "answer": "work\nmore"}, "x.jsonl:2: field 'answer' has no '#### number'"),
        ({"question": "p", "answer": "work\n####  "}, "x.jsonl:2: field 'answer' has no '#### number'"),
        ({"question": "p", "answer": "1", "id": "a"}, "x.jsonl:2: id 'a' was already used on line 1"),
    ],
)
def test_malformed_rows_are_errors_with_file_line_and_field(tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", {"question": "q", "answer": "1", "id": "a"}, row)
    with pytest.raises(DataError, match=re.escape(message)):
        maths.load(str(path))


def test_a_reference_that_cannot_be_compared_is_left_out_loudly(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(maths.Grader, "compare", lambda self, gold, answer: (False, "") if gold == "??" else (None, "slow") if gold == "!!" else (True, ""))
    rows = [{"problem": f"p{i}", "answer": a} for i, a in enumerate(["1", "??", "!!", "x"])]
    tasks = maths.load(str(write(tmp_path / "x.jsonl", *rows)))
    assert len(tasks.train) + len(tasks.eval) == 2
    assert tasks.notes["unusable"] == 2
    out = capsys.readouterr().out
    assert "x.jsonl:2: reference '??' cannot be compared" in out
    assert "x.jsonl:3: reference '!!' cannot be compared: slow" in out
    with pytest.raises(DataError, match="no usable problem"):
        maths.load(str(write(tmp_path / "y.jsonl", rows[1])))


def test_missing_files_are_errors(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        maths.load(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        maths.load(str(tmp_path / "bad.jsonl"))


def test_real_math500_references_are_found_in_their_own_solutions(grader):
    path = real_data("math500") / "test.jsonl"
    tasks = envs.load(f"maths:{path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_question = {t["question"]: t for t in (*tasks.train, *tasks.eval)}
    assert len(by_question) == len(rows) == 250
    for row in rows[::5]:
        assert maths.grade(by_question[row["problem"].strip()], row["solution"], grader) == (1.0, "")


def test_real_gsm8k_solutions_are_right(grader):
    path = real_data("gsm8k") / "test.jsonl"
    tasks = envs.load(f"maths:{path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_question = {t["question"]: t for t in (*tasks.train, *tasks.eval)}
    assert len(by_question) == 660
    for row in rows[::20]:
        assert maths.grade(by_question[row["question"].strip()], row["answer"], grader) == (1.0, "")
