"""Tool calling: parser, BFCL v4 comparison (against the official checker where it is installed), embedded tasks, reader of the published files.

The official checker comes from `pip install --no-deps bfcl-eval==2026.3.23` (its dependencies are not needed and pin an old numpy).
"""

import copy
import importlib
import json
import random
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
from conftest import need_module, real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs import DataError, load, tools, tools_calls, tools_tasks

TASKS = load("tools")
WORD = re.compile(r"[a-z]+|\d+")


def play(task, text):
    env = TASKS.make_env()
    env.reset(task)
    observation, reward, terminated, truncated, info = env.step(text)
    assert (observation, terminated, truncated) == ("", True, False)
    assert reward == sum(info["rewards"].values()) and info["success"] == info["rewards"]["call"]
    return info


def respond(calls):
    return f"<think>go</think><tool_call>{json.dumps(calls)}</tool_call>"


ALARM = {
    "category": "simple",
    "messages": [],
    "functions": [
        {"name": "set_alarm", "parameters": {"type": "dict", "properties": {"hour": {"type": "integer"}, "label": {"type": "string"}}, "required": ["hour"]}}
    ],
    "answers": [{"set_alarm": {"hour": [7], "label": ["rain", ""]}}],
}


# ---------------------------------------------------------------- embedded tasks


def test_demonstrations_get_every_reward():
    rng = random.Random(0)
    for task in [*TASKS.train, *TASKS.eval]:
        *prompt, answer = TASKS.demonstrate(task, rng)
        assert prompt == task["messages"] and answer["role"] == "assistant"
        assert play(task, answer["content"])["rewards"] == {"format": 1.0, "call": 1.0}
        assert 5 <= len(re.search("<think>(.*)</think>", answer["content"])[1].split()) <= 36


def test_splits_are_disjoint_in_combinations_and_share_the_words():
    assert (len(TASKS.train), len(TASKS.eval)) == (6000, 256)
    ids = [task["id"] for task in [*TASKS.train, *TASKS.eval]]
    assert len(set(ids)) == len(ids)

    def combinations(tasks):
        # names vary from task to task, so a combination is the function's noun and its values in the document's order
        found = set()
        for task in tasks:
            for call in tools_calls.reference_calls(task["answers"], task["functions"]):
                order = next(f for f in task["functions"] if f["name"] == call["name"])["parameters"]["properties"]
                found.add((call["name"].split("_")[1], *((i, call["arguments"][a]) for i, a in enumerate(order) if a in call["arguments"])))
        return found

    train, evaluation = combinations(TASKS.train), combinations(TASKS.eval)
    assert evaluation and not train & evaluation
    rng = random.Random(0)
    words = [{w for t in split for m in TASKS.demonstrate(t, rng) for w in WORD.findall(m["content"])} for split in (TASKS.train, TASKS.eval)]
    assert words[1] <= words[0] and len(words[0]) < 250
    assert {task["category"] for task in TASKS.eval} == {"simple", "multiple", "parallel", "parallel_multiple"}
    assert len({task["difficulty"] for task in TASKS.eval}) >= 5
    assert len(tools_tasks.FAMILIES) >= 10


def test_deterministic_by_seed_and_serialisable():
    assert load("tools").train == TASKS.train and load("tools", seed=1).train != TASKS.train
    assert json.loads(json.dumps(TASKS.eval[:20])) == TASKS.eval[:20]


def mutations(calls, rng):
    """Named wrong or harmless variants of a list of calls [{name, arguments}]."""

    def edited(edit):
        changed = copy.deepcopy(calls)
        edit(changed[rng.randrange(len(changed))])
        return changed

    if not calls:
        return
    yield "unchanged", copy.deepcopy(calls)
    yield "reordered", calls[::-1]
    yield "dropped", calls[1:]
    yield "doubled", [*calls, calls[0]]
    yield "renamed", edited(lambda call: call.update(name=call["name"] + "x"))
    yield "extra", edited(lambda call: call["arguments"].update(zzz=1))
    names = sorted({call["name"] for call in calls})
    yield "swapped names", [{**call, "name": names[(names.index(call["name"]) + 1) % len(names)]} for call in calls]
    for index, call in enumerate(calls):
        for key, value in call["arguments"].items():

            def put(new, index=index, key=key):
                changed = copy.deepcopy(calls)
                changed[index]["arguments"][key] = new
                return changed

            missing = copy.deepcopy(calls)
            del missing[index]["arguments"][key]
            yield "missing", missing
            yield "other type", put(str(value))
            yield "null", put(None)
            yield "listed", put([value])
            yield "as dict", put({"a": value})
            yield "empty text", put("")
            yield "empty list", put([])
            yield "empty dict", put({})
            yield "word", put("zzz")
            if isinstance(value, bool):
                yield "flipped", put(not value)
                yield "as int", put(int(value))
            elif isinstance(value, (int, float)):
                yield "changed number", put(value + 1)
                yield "int for float", put(int(value))
                yield "float for int", put(float(value))
                yield "bool", put(bool(value))
            elif isinstance(value, str):
                yield "case", put(value.swapcase())
                yield "punctuation", put(" ".join(value) + ".-/*^_,")
                yield "semicolon", put(value + ";")
                yield "quote", put("'" + value + '"')
            elif isinstance(value, list) and value:
                yield "list reversed", put(value[::-1])
                yield "list shorter", put(value[:-1])
                yield "list longer", put([*value, value[0]])
                yield "list of text", put([str(item) for item in value])
                yield "list mixed", put([value[0], "zzz", *value[1:]])
                yield "list case", put([item.upper() + " ." if isinstance(item, str) else item for item in value])
                yield "list of bool", put([bool(item) for item in value])
                yield "list of float", put([float(item) if isinstance(item, int) else item for item in value])
                if isinstance(value[0], dict):
                    yield "list of dict, key missing", put([dict(list(value[0].items())[1:]), *value[1:]])
                    yield "list of dict, extra key", put([{**value[0], "zzz": 1}, *value[1:]])
            elif isinstance(value, dict) and value:
                yield "dict key missing", put(dict(list(value.items())[1:]))
                yield "dict extra key", put({**value, "zzz": 1})
                yield "dict value", put(dict.fromkeys(value, "zzz"))
                yield "dict case", put({name: item.upper() + "." if isinstance(item, str) else item for name, item in value.items()})


def test_wrong_calls_get_nothing():
    rng = random.Random(0)
    harmful = {"dropped", "doubled", "renamed", "extra", "null", "word", "flipped", "as int", "changed number", "listed", "semicolon", "missing"}
    for task in TASKS.train[:1500]:
        for name, changed in mutations(tools_calls.reference_calls(task["answers"], task["functions"]), rng):
            if name in harmful | {"unchanged", "reordered"}:
                assert play(task, respond(changed))["rewards"] == {"format": 1.0, "call": float(name not in harmful)}, (name, changed)


def test_verifier_text():
    info = play(ALARM, "nonsense")
    assert info["rewards"] == {"format": 0.0, "call": 0.0}
    assert info["verifier_text"] == {"format": tools_calls.FORMAT_TEXT, "call": '[{"name":"set_alarm","arguments":{"hour":7,"label":"rain"}}]'}


def test_step_needs_an_open_episode():
    env = TASKS.make_env()
    with pytest.raises(RuntimeError, match=r"reset"):
        env.step("x")
    env.reset(ALARM)
    env.step(env.oracle_action())
    with pytest.raises(RuntimeError, match=r"reset"):
        env.step("x")


# ---------------------------------------------------------------- format and parser

GOOD = '<think>a b</think><tool_call>[{"name":"f","arguments":{"a":1}}]</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, True),
        (f" {GOOD}\n", True),
        (GOOD.replace("</think>", "</think>\n\n"), True),
        ("<think>none fits</think><tool_call>[]</tool_call>", True),
        (GOOD.replace("a b", " "), False),
        (GOOD.replace("<think>a b</think>", ""), False),
        (GOOD + "x", False),
        ("x" + GOOD, False),
        (GOOD.replace("</think>", "</think>x"), False),
        (GOOD.replace("[", "").replace("]", ""), False),  # one bare call is not a list
        (GOOD.replace('{"name"', '"name"'), False),
        (GOOD.replace('"arguments":{"a":1}', '"arguments":[1]'), False),
        (GOOD.replace('"arguments"', '"parameters"'), False),
        (GOOD.replace('{"a":1}', '{"a":1,"a":2}'), False),
        (GOOD.replace(":1", ":NaN"), False),
        (GOOD.replace(":1", ":-Infinity"), False),
        (GOOD.replace(":1", ":1e999"), False),
        (GOOD + GOOD, False),
        (GOOD.replace("a b", "a <think> b"), False),
        ("<think>a</think><tool_call>[f(a=1)]</tool_call>", False),
        ("<tool_call>[]</tool_call><think>a</think>", False),
        ("", False),
    ],
)
def test_format(text, expected):
    assert tools_calls.format_ok(text) is expected


F1 = [{"name": "f", "arguments": {"a": 1}}]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (GOOD, F1),
        ('[{"name":"f","arguments":{"a":1}}]', F1),
        ('{"name":"f","arguments":{"a":1}}', F1),
        ('```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', F1),
        ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n<tool_call>[f(a=1)]</tool_call>', F1 * 2),
        ('<tool_call>{"name":"f","arguments":{"a":1}}', F1),
        ("f(a=1)", F1),
        ("[f(a=1), f(a=1)]", F1 * 2),
        ("<think>[g(a=2)]</think>[f(a=1)]", F1),
        (
            "[m.g(a=-1, b='x', c=[1, 2.5], d=(1, 'y'), e={'k': True}, f=None, g=name)]",
            [{"name": "m.g", "arguments": {"a": -1, "b": "x", "c": [1, 2.5], "d": (1, "y"), "e": {"k": True}, "f": None, "g": "name"}}],
        ),
        ("[]", []),
        ("<tool_call>[]</tool_call>", []),
        ("I cannot do that.", None),
        ("f(1)", None),
        ("f(a=1, a=2)", None),
        ("f(**{'a': 1})", None),
        ("f(a=g(b=1))", None),
        ("f(a=__import__('os').system('true'))", None),
        ("f(a=1+1)", None),
        ("f(a=2**10)", None),
        ("f(a=[i for i in x])", None),
        ("f(a=1e999)", None),
        ("f(a={'k': 1, 'k': 2})", None),
        ("f(a=b'x')", None),
        ("f(a=1j)", None),
        ("f[0](a=1)", None),
        ("x = f(a=1)", None),
        ('[{"name":"f","arguments":{"a":1}}, 3]', None),
        ('<tool_call>[f(a=1)]</tool_call><tool_call>{"name":</tool_call>', None),
    ],
)
def test_parser(text, calls):
    assert tools_calls.parse_calls(text) == calls


def test_python_and_json_forms_agree():
    for task in TASKS.train[:300]:
        calls = tools_calls.reference_calls(task["answers"], task["functions"])
        python = "[" + ", ".join(f"{c['name']}({', '.join(f'{k}={v!r}' for k, v in c['arguments'].items() if k != 'from')})" for c in calls) + "]"
        if "from" not in {key for call in calls for key in call["arguments"]}:  # a Python keyword
            assert play(task, python)["rewards"] == {"format": 0.0, "call": 1.0}


HOSTILE = [
    "[" * 19_000,
    "<tool_call>" + "[" * 900 + "]" * 900 + "</tool_call>",
    '{"a":' * 3000 + "1" + "}" * 3000,
    "<tool_call>" * 1800,
    "<think>" + "</think>" * 2000,
    "f(a=" + "(" * 5000,
    "f(a=" + "-" * 15_000 + "1)",
    "f(a=" + "1+" * 9000 + "1)",
    "f" + ".a" * 9000 + "(b=1)",
    "f(a=" + "9" * 10_000 + ")",
    '[{"name":"set_alarm","arguments":{"hour":' + "9" * 10_000 + "}}]",
    '"' + "\\" * 15_001,
    "\x00f(a=1)",
    "f(a='\ud800')",
    "ｆ(ａ=1)\u202e",
    "x" * 5_000_000,
    '[{"name":"f","arguments":{"a":' + "[" * 900 + "]" * 900 + "}}]",
    "\n" * 19_000 + "]",
    "<think>a</think><tool_call>" + "[f(a=1)," * 2000 + "</tool_call>",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_just_wrong(text):
    assert play(ALARM, text)["rewards"] == {"format": 0.0, "call": 0.0}
    spans = tools.regions(text[:20_000])
    assert all(0 <= start < end <= len(text) for _, start, end in spans)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*'<>/[]{}():,="\\ \nfa1.', *tools_calls.TAGS, "name", "arguments"]) | st.characters(), max_size=60).map("".join))
def test_any_text_gets_a_verdict_and_ordered_regions(text):
    assert set(play(ALARM, text)["rewards"].values()) <= {0.0, 1.0}
    end = 0
    for _, start, stop in tools.regions(text):
        assert end <= start < stop <= len(text)
        end = stop


def test_huge_integer_for_a_float_is_wrong():
    assert tools_calls.argument_matches(10**400, [1.5], {"type": "float"}) is False
    assert tools_calls.argument_matches(2, [2.0], {"type": "float"}) is True


def test_too_many_calls_are_refused():
    assert tools_calls.parse_calls(json.dumps(F1 * tools_calls.MAX_CALLS)) == F1 * tools_calls.MAX_CALLS
    assert tools_calls.parse_calls(json.dumps(F1 * (tools_calls.MAX_CALLS + 1))) is None


def test_regions():
    text = '<think>go on</think><tool_call>[{"name":"f","arguments":{"a":1,"bc":"x \\" y","d":[2,{"e":true}]}}]</tool_call>'
    spans = tools.regions(text)
    named = {}
    for name, start, end in spans:
        named.setdefault(name, []).append(text[start:end])
    assert named["tags"] == list(tools_calls.TAGS)
    assert named["reasoning"] == ["go on"]
    assert named["function_name"] == ["f"]
    assert named["argument_name"] == ["a", "bc", "d"]
    assert named["argument_value"] == ["1", 'x \\" y', "2", "e", "true"]
    assert "".join(text[start:end] for _, start, end in spans) == text  # every character is in one span
    assert tools.regions("<think>ab") == [("tags", 0, 7), ("reasoning", 7, 9)]
    assert ("function_name", 21, 24) in tools.regions('<tool_call>[{"name":"set')


# ---------------------------------------------------------------- comparison rules


@pytest.mark.parametrize(
    ("value", "accepted", "schema", "expected"),
    [
        ("New York, NY", ["new york ny"], {"type": "string"}, True),
        ("it's", ['it"s'], {"type": "string"}, True),
        ("a;b", ["ab"], {"type": "string"}, False),
        (5, [5], {"type": "integer"}, True),
        (5.0, [5], {"type": "integer"}, False),
        (True, [1], {"type": "integer"}, False),
        (1, [True], {"type": "boolean"}, False),
        (5, [5.0], {"type": "float"}, True),
        ("5", [5.0], {"type": "float"}, False),
        ("radius", ["radius"], {"type": "float"}, True),  # a variable: compared exactly
        ("Radius", ["radius"], {"type": "float"}, False),
        (["A, b"], [["ab"]], {"type": "array", "items": {"type": "string"}}, True),
        ([1, 2], [[2, 1]], {"type": "array", "items": {"type": "integer"}}, False),
        ((1, 2), [[1, 2]], {"type": "tuple", "items": {"type": "integer"}}, True),
        ((1, 2), [[1, 2]], {"type": "array", "items": {"type": "integer"}}, False),
        ([], [[1], ""], {"type": "array", "items": {"type": "integer"}}, True),  # upstream's own quirk
        ({"a": "X"}, [{"a": ["x"], "b": [1, ""]}], {"type": "dict"}, True),
        ({"a": "X"}, [{"a": ["x"], "b": [1]}], {"type": "dict"}, False),
        ({"a": "x", "c": 1}, [{"a": ["x"]}], {"type": "dict"}, False),
        ([{"a": 1}, {"a": 2}], [[{"a": [1]}, {"a": [2, 3]}]], {"type": "array", "items": {"type": "dict"}}, True),
        ([{"a": 2}, {"a": 1}], [[{"a": [1]}, {"a": [2, 3]}]], {"type": "array", "items": {"type": "dict"}}, False),
        (["x"], ["x"], {"type": "array", "items": {"type": "string"}}, False),
        (["zzz"], [[1], 5], {"type": "array", "items": {"type": "integer"}}, False),  # an accepted value of another shape does not crash
    ],
)
def test_argument_rules(value, accepted, schema, expected):
    assert tools_calls.argument_matches(value, accepted, schema) is expected


def test_categories():
    functions, answers = ALARM["functions"], ALARM["answers"]
    right = [{"name": "set_alarm", "arguments": {"hour": 7}}]
    other = [{"name": "set_alarm", "arguments": {"hour": 8}}]
    assert tools_calls.calls_match(right, "simple", functions, answers)
    assert not tools_calls.calls_match(right * 2, "simple", functions, answers)
    two = [*answers, {"set_alarm": {"hour": [8]}}]
    assert tools_calls.calls_match(other + right, "live_parallel", functions, two)
    assert not tools_calls.calls_match(right + right, "parallel", functions, two)
    for calls, none_wanted, any_wanted in ((None, True, False), ([], True, False), (right, False, True)):
        assert tools_calls.calls_match(calls, "irrelevance", functions, []) is none_wanted
        assert tools_calls.calls_match(calls, "live_relevance", functions, []) is any_wanted


# ---------------------------------------------------------------- the official checker


def official_checker(monkeypatch):
    need_module("bfcl_eval")
    stub = types.ModuleType("bfcl_eval.constants.model_config")  # the real one imports every vendor's client
    stub.MODEL_CONFIG_MAPPING = {"plain": types.SimpleNamespace(underscore_to_dot=False)}
    monkeypatch.setitem(sys.modules, "bfcl_eval.constants.model_config", stub)
    module = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def verdict(task, calls):
        output = [{call["name"]: call["arguments"]} for call in calls]
        try:
            return module.ast_checker(task["functions"], output, task["answers"], python, task["category"], "plain")["valid"]
        except (AttributeError, TypeError, KeyError):  # it crashes on some malformed values: no credit
            return False

    return verdict, Path(module.__file__).parents[2] / "data"


def compare(verdict, tasks):
    rng, pairs, positive = random.Random(0), 0, 0
    for task in tasks:
        for name, calls in mutations(tools_calls.reference_calls(task["answers"], task["functions"]), rng):
            theirs = verdict(task, calls)
            assert tools_calls.calls_match(calls, task["category"], task["functions"], task["answers"]) is theirs, (task["id"], name, calls)
            pairs += 1
            positive += theirs
    return pairs, positive


def test_agrees_with_the_official_checker(monkeypatch):
    """Every answered item of the wheel (2,351) and of the sample, about 50 variants each."""
    verdict, folder = official_checker(monkeypatch)
    for source in (real_data("bfcl_v4"), folder):
        loaded = tools.load(str(source))
        tasks = [task for task in [*loaded.train, *loaded.eval] if task["category"] in tools_calls.AST_CATEGORIES]
        pairs, positive = compare(verdict, tasks)
        assert pairs > 20 * len(tasks) and positive > len(tasks)
    assert len(tasks) == 2351 and pairs > 100_000
    assert len(loaded.notes["unsolvable"]) == 5
    embedded, _ = compare(verdict, TASKS.train[:200])
    assert embedded > 3000


# ---------------------------------------------------------------- the published files


def test_reads_the_sample():
    folder = real_data("bfcl_v4")
    tasks = tools.load(str(folder))
    everything = [*tasks.train, *tasks.eval]
    assert len(everything) == tasks.notes["rows"] == 149 and 15 <= len(tasks.eval) <= 45
    assert not {t["id"] for t in tasks.train} & {t["id"] for t in tasks.eval}
    assert "sha256" in tasks.notes["split"] and tasks.notes["unsolvable"] == []
    env = tasks.make_env()
    for task in everything:
        messages = env.reset(task)
        assert messages[0]["role"] == "system" and all(json.dumps(f, ensure_ascii=False) in messages[0]["content"] for f in task["functions"])
        assert env.step(env.oracle_action())[4]["rewards"] == {"format": 1.0, "call": 1.0}
        env.reset(task)
        assert env.step("no idea")[4]["rewards"]["call"] == float(task["category"] == "irrelevance")
    one = tools.load(str(folder / "BFCL_v4_parallel.json"))
    assert len(one.train) + len(one.eval) == 20
    assert [t["id"] for t in one.eval] == [t["id"] for t in tasks.eval if t["category"] == "parallel"]


ROW = {"id": "a", "question": [[{"role": "user", "content": "hi"}]], "function": [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}]}
ANSWER = {"id": "a", "ground_truth": [{"f": {"x": [1]}}]}


def write(folder, row, answer, category="simple_python"):
    (folder / "possible_answer").mkdir(exist_ok=True)
    for place, content in ((folder, row), (folder / "possible_answer", answer)):
        (place / f"BFCL_v4_{category}.json").write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    return str(folder / f"BFCL_v4_{category}.json")


def altered(base, **changes):
    return {**base, **changes}


@pytest.mark.parametrize(
    ("row", "answer", "message"),
    [
        ("{", ANSWER, r"python\.json:1: not valid JSON"),
        ("\n[]", ANSWER, r"python\.json:2: a list, expected a JSON object"),
        ("", ANSWER, "no rows"),
        (altered(ROW, id=3), ANSWER, r":1: field 'id'"),
        (altered(ROW, id="b"), ANSWER, r":1: field 'id': 'b' has no line in .*possible_answer"),
        (altered(ROW, question="hi"), ANSWER, r":1: field 'question'"),
        (altered(ROW, question=[[{"role": "tool", "content": ""}]]), ANSWER, r":1: field 'question' has a message"),
        (altered(ROW, question=[[]]), ANSWER, r":1: field 'question' must end"),
        (altered(ROW, question=ROW["question"] * 2), ANSWER, r":1: field 'question' has 2 turns"),
        (altered(ROW, function=[]), ANSWER, r":1: field 'function'"),
        (altered(ROW, function=[{"name": "f"}]), ANSWER, r":1: field 'function' has a document"),
        (altered(ROW, function=[{"name": "f", "parameters": {"properties": {"x": {"type": "long"}}}}]), ANSWER, r"f\.x: type 'long'"),
        (altered(ROW, function=[{"name": "f", "parameters": {"properties": {"x": {"type": "array"}}}}]), ANSWER, r"f\.x: an array needs items\.type"),
        (ROW, altered(ANSWER, ground_truth=[]), r"possible_answer.*:1: field 'ground_truth' must be"),
        (ROW, altered(ANSWER, ground_truth=[{"f": [1]}]), r":1: field 'ground_truth' must hold"),
        (ROW, altered(ANSWER, ground_truth=[{"g": {}}]), r":1: field 'ground_truth' calls 'g'"),
        (ROW, altered(ANSWER, ground_truth=[{"f": {"x": 1}}]), r"f\.x: expected a list"),
        (ROW, altered(ANSWER, ground_truth=[{"f": {"x": [{"k": 1}]}}]), r"f\.x: each key of a dict needs a list"),
    ],
)
def test_bad_data_names_the_place(tmp_path, row, answer, message):
    with pytest.raises(DataError, match=message):
        load("tools:" + write(tmp_path, row, answer))


def test_bad_paths(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load(f"tools:{tmp_path}/missing")
    with pytest.raises(DataError, match="no file BFCL_v4"):
        load(f"tools:{tmp_path}")
    path = write(tmp_path, ROW, ANSWER, "simple_java")
    with pytest.raises(DataError, match=r"'simple_java' is not supported.*Java"):
        load(f"tools:{path}")
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(DataError, match="category is read from the file name"):
        load(f"tools:{tmp_path}/rows.json")
    write(tmp_path, ROW, ANSWER)
    assert tools.load(str(tmp_path)).notes["files_skipped"] == ["BFCL_v4_simple_java.json"]
    write(tmp_path, ROW, ANSWER, "multiple")
    with pytest.raises(DataError, match="'a' occurs twice"):
        load(f"tools:{tmp_path}")
    shutil.rmtree(tmp_path / "possible_answer")
    with pytest.raises(DataError, match="missing; category 'multiple' needs the reference answers"):
        load(f"tools:{tmp_path}")
