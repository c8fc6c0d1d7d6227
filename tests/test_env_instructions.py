"""Instruction following: constraint checks by hand-made tables, embedded tasks, IFEval's types against lm-eval where it is installed, reader of the format.

The reference implementation comes from `pip install --no-deps lm-eval==0.4.13 nltk==3.10.4 immutabledict==4.3.1 langdetect==1.0.9 six`.
"""

import importlib
import importlib.util
import json
import random
import re
import sys
import types
from pathlib import Path

import pytest
from conftest import need_module, real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common import envs
from common.envs import DataError, instructions, instructions_checks, instructions_tasks, load

TASKS, OTHER = load("instructions"), load("instructions", 1)


def play(task, text):
    env = TASKS.make_env()
    env.reset(task)
    observation, reward, terminated, truncated, info = env.step(text)
    assert (observation, terminated, truncated) == ("", True, False)
    assert reward == sum(info["rewards"].values()) and info["success"] == float(all(info["rewards"].values()))
    assert info["instruction_accuracy"] == pytest.approx(reward / len(info["rewards"]))
    return info


def follows(name, text, loose=False, /, **kwargs):
    return instructions_checks.follows({"id": name, "kwargs": kwargs}, text, loose)


# ---------------------------------------------------------------- embedded tasks


@pytest.mark.parametrize("tasks", [TASKS, OTHER], ids=["seed 0", "seed 1"])
def test_every_prompt_has_a_demonstration_that_satisfies_all(tasks):
    rng = random.Random(0)
    for task in [*tasks.train, *tasks.eval]:
        *prompt, answer = tasks.demonstrate(task, rng)
        assert prompt == task["messages"]
        info = play(task, answer["content"])
        assert info["success"] == 1.0, (info["rewards"], task["messages"], answer)


def test_the_stored_seed_is_a_solution_when_fresh_compositions_fail(monkeypatch):
    monkeypatch.setattr(instructions_tasks, "MAX_PIECES", 0)  # refuse every fresh one
    for task in [*TASKS.train[:500], *TASKS.eval]:
        assert play(task, TASKS.demonstrate(task, random.Random(5))[-1]["content"])["success"] == 1.0


def test_constraints_of_a_prompt():
    for task in [*TASKS.train, *TASKS.eval]:
        names = [constraint["id"] for constraint in task["constraints"]]
        assert 5 <= len(names) <= 13 and len(set(names)) == len(names) == task["difficulty"]
        for group in instructions_tasks.EXCLUSIVE:
            assert len(group.intersection(names)) <= 1
        assert task["messages"] == [{"role": "user", "content": "\n".join(constraint["text"] for constraint in task["constraints"])}]
    assert {c["id"] for t in TASKS.train for c in t["constraints"]} == set(instructions_checks.KINDS) - set(instructions_checks.HELD_OUT)
    assert {len(t["constraints"]) for t in TASKS.eval} == set(range(5, 14))
    assert len(instructions_checks.KINDS) - len(instructions_checks.HELD_OUT) >= 25


def test_splits():
    assert [len(TASKS.train), len(TASKS.eval)] == [6000, 256 + 64]
    assert [task["split"] for task in TASKS.eval] == ["seen"] * 256 + ["heldout_types"] * 64
    assert all(task["split"] == "seen" for task in TASKS.train)
    ids = [task["id"] for task in [*TASKS.train, *TASKS.eval]]
    assert len(set(ids)) == len(ids)
    sets = [{frozenset(c["id"] for c in t["constraints"]) for t in tasks} for tasks in (TASKS.train, TASKS.eval)]
    assert not sets[0] & sets[1]
    # by rule, not by luck
    places = {name: place for place, name in enumerate(instructions_checks.KINDS)}
    for split, tasks in ((False, TASKS.train), (True, TASKS.eval[:256])):
        assert all((sum(places[c["id"]] for c in task["constraints"]) % 7 == 0) is split for task in tasks)
    assert all(sum(c["id"] in instructions_checks.HELD_OUT for c in t["constraints"]) == 2 for t in TASKS.eval[256:])
    assert load("instructions").eval == TASKS.eval != OTHER.eval
    assert json.loads(json.dumps(TASKS.eval)) == TASKS.eval


def test_words_are_few_and_shared():
    rng = random.Random(0)
    seen = [
        {w.lower() for t in split for m in TASKS.demonstrate(t, rng) for w in re.findall(r"[A-Za-z]+|\d+", m["content"])} for split in (TASKS.train, TASKS.eval)
    ]
    assert seen[1] <= seen[0] and len(seen[0]) < 250


def test_verifier_text_is_the_wording_but_for_lengths():
    for task in TASKS.train[:300]:
        texts = play(task, "x")["verifier_text"]
        assert texts == {c["name"]: "" if c["id"] in ("words_max", "words_min", "words_even", "sentences", "lines") else c["text"] for c in task["constraints"]}
    assert TASKS.train[0]["constraints"][0]["text"] == f"write about: {TASKS.train[0]['constraints'][0]['kwargs']['word']}"


def test_a_damaged_response_loses_the_damaged_rewards():
    """Each edit breaks just the constraint it is aimed at, or others too, but never none."""
    rng = random.Random(0)
    aimed = 0
    for task in TASKS.train[:1500]:
        text = TASKS.demonstrate(task, rng)[-1]["content"]
        for constraint in task["constraints"]:
            name, kwargs = constraint["id"], constraint["kwargs"]
            word = str(kwargs.get("word", kwargs.get("number", kwargs.get("name", kwargs.get("second", "")))))
            if name in ("topic", "include", "count", "capital", "number", "greet", "by", "order", "start_word", "end_word"):
                broken = re.sub(rf"\b{word}\b", "zzz", text, flags=re.IGNORECASE)
            elif name in ("avoid", "avoid_small"):
                broken = text + " " + word
            elif name in ("quotes", "braces"):
                broken = text[:-1]
            elif name in ("end_question", "question", "end_exclaim", "exclaims"):
                broken = text.replace("?", ".").replace("!", ".")
            elif name in ("phrase", "echo", "end_phrase"):
                broken = re.sub(re.escape(kwargs["phrase"]), "zzz", text, flags=re.IGNORECASE)
            elif name in ("title", "placeholders", "highlights", "colon", "smiley", "commas", "two_parts", "separator", "bullets"):
                broken = re.sub(r"<<|\[|\*|:|,|^-+ ?", "", text, flags=re.MULTILINE)
            elif name == "numbered":
                broken = text.replace("2. ", "3. ")
            elif name == "postscript":
                broken = text.replace("P.S.", "p.s.")
            elif name == "twice":
                broken = re.sub(r"\b(\w+) \1\b", r"\1", text)
            else:
                broken = {"no_commas": text + ",", "no_digits": text + "3", "lowercase": text + "X", "words_max": text + " go" * 30, "words_min": "go"}.get(
                    name
                )
                broken = broken or {"words_even": text + " go", "sentences": text + " go.", "lines": text + "\ngo"}[name]
            assert play(task, broken)["rewards"][constraint["name"]] == 0.0, (name, text, broken)
            aimed += 1
    assert aimed > 10_000


@pytest.mark.parametrize(
    ("name", "kwargs", "good", "bad"),
    [
        ("topic", {"word": "cat"}, ["a Cat.", "*cat*"], ["cats", "concat"]),
        ("count", {"word": "cat", "count": 2}, ["cat, cat"], ["cat", "cat cat cat", "cats cat"]),
        ("avoid", {"word": "cat"}, ["cats"], ["the CAT"]),
        ("order", {"first": "cat", "second": "dog"}, ["cat dog", "cat dog cat"], ["dog cat", "cat", "dog cat dog"]),
        ("phrase", {"phrase": "red cat"}, ["a red\ncat.", "Red cat"], ["red, cat", "bored cat", "red cats"]),
        ("capital", {"word": "MOON"}, ["the MOON."], ["the Moon", "MOONS"]),
        ("number", {"number": 7}, ["7 cats"], ["77", "seven"]),
        ("twice", {}, ["go so So on"], ["so is so", "so, so", "- -"]),
        ("greet", {"name": "ben"}, ["Hello, Ben!"], ["hello", "hello anna ben"]),
        ("start_word", {"word": "now"}, ["Now we", '"now'], ["we now", "nowhere"]),
        ("echo", {"phrase": "we see"}, ["We see it", " we see"], ['"we see', "now we see"]),
        ("end_word", {"word": "again"}, ["go again.", 'again!"}'], ["again go", "again [x]"]),
        ("end_phrase", {"phrase": "that is all"}, ["so That is all!", '{that is all."}'], ["that is all now", "what is all"]),
        ("end_question", {}, ["go?", 'go?"', "go? }"], ["go", "go?."]),
        ("end_exclaim", {}, ["go!"], ["go?", ""]),
        ("quotes", {}, ['"go"', ' "go"\n'], ["go", '"go', '""', '"']),
        ("braces", {}, ["{go}"], ["{go", "(go)"]),
        ("postscript", {}, ["go\nP.S. go"], ["go P.S. go", "P.S.", "p.s. go"]),
        ("title", {}, ["<<go>>", "a <<go on>> b"], ["<<>>", "<go>", "<<go\n>>"]),
        ("placeholders", {"count": 2}, ["[a] [b c]"], ["[a]", "[a] []", "[a] [b] [c]", "[a [b"]),
        ("highlights", {"count": 1}, ["*go*"], ["go", "*go", "* go *", "*a* *b*"]),
        ("question", {}, ["a? b."], ["a", "a? b?"]),
        ("exclaims", {"count": 2}, ["a! b!", "a!!"], ["a!"]),
        ("colon", {}, ["a: b"], ["a", "a:b:"]),
        ("smiley", {}, ["a :)"], [":("]),
        ("commas", {"count": 1}, ["a, b"], ["a", "a, b,"]),
        ("no_commas", {}, ["a"], ["a,"]),
        ("no_digits", {}, ["a"], ["a1", "٣"]),
        ("lowercase", {}, ["a 1"], ["A", "1"]),
        ("bullets", {"count": 2}, ["- a\n- b", "x\n - a\n- b\n---"], ["- a", "-a\n-b", "- a\n- b\n- c"]),
        ("numbered", {"count": 2}, ["1. a\n2. b", "x\n1. a\ny\n2. b"], ["1. a", "1. a\n3. b", "2. a\n1. b", "1. a\n2. b\n3. c", "1.a\n2.b"]),
        ("two_parts", {}, ["a\n******\nb"], ["a******a", "******a", "a", "a******b******c"]),
        ("separator", {}, ["a\n---\nb"], ["a --- b", "---\n---"]),
        ("words_max", {"count": 2}, ["a b", "a-b"], ["a b c"]),
        ("words_min", {"count": 2}, ["a b"], ["a"]),
        ("words_even", {}, ["a b"], ["a"]),
        ("sentences", {"count": 2}, ["A b. C d!", '"a. b?"', "a. P.S. b.", "1. x\na. b."], ["a.", "a. b. c.", "a.b"]),
        ("lines", {"count": 2}, ["a\n\nb"], ["a", "a\nb\nc"]),
        ("tag", {"text": "#cat"}, ["a #Cat"], ["cat"]),
    ],
)
def test_own_checks(name, kwargs, good, bad):
    assert [follows(name, text, **kwargs) for text in good] == [True] * len(good)
    assert [follows(name, text, **kwargs) for text in bad] == [False] * len(bad)


def test_empty_and_endless_responses_get_nothing():
    for task in TASKS.train[:200]:
        for text in ("", " \n\t", "a" * (instructions_checks.MAX_CHARS + 1)):
            assert set(play(task, text)["rewards"].values()) == {0.0}
    assert follows("no_commas", "a" * instructions_checks.MAX_CHARS)


def test_step_needs_an_open_episode():
    env = TASKS.make_env()
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")


def test_regions():
    text = '"Now we see.\n<<cat>>\n---\n- the dog\n1. a\nP.S. we like it again!"'
    assert [(name, text[start:end]) for name, start, end in instructions.regions(text)] == [
        ("wrap", '"'),
        ("first_word", "Now"),
        ("rest", "we see."),
        ("title", "<<cat>>"),
        ("divider", "---"),
        ("list", "- the dog"),
        ("list", "1. a"),
        ("postscript", "P.S. we like it"),
        ("last_word", "again!"),
        ("wrap", '"'),
    ]
    assert instructions.regions("go now") == [("first_word", 0, 2), ("last_word", 3, 6)]
    assert instructions.regions(" go ") == [("first_word", 1, 3)]
    assert instructions.regions("") == []


# every mark that some check looks for, and characters that stress patterns
ALPHABET = [
    *'ab Z.,?!:*<>[]{}()-"#\\\n\t1',
    "\r",
    "\x1c",
    "\u2028",
    "é",
    "中",
    "P.S. ",
    "P.P.S",
    "******",
    "***",
    "- ",
    "1. ",
    "<<",
    ">>",
    "cat",
    "\ud800",
    "\u202e",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET) | st.characters(), max_size=40).map("".join))
def test_any_text_gets_verdicts_and_ordered_regions(text):
    for task in (TASKS.train[0], TASKS.train[1], TASKS.eval[-1]):
        play(task, text)
    end = 0
    for _, start, stop in instructions.regions(text):
        assert end <= start < stop <= len(text)
        end = stop


HOSTILE = [
    "[",
    "<<",
    ">>",
    "*",
    "* ",
    "**",
    "\n",
    " \n",
    "\t",
    ".",
    ". ",
    "?!",
    '"',
    "1. ",
    "1",
    "- ",
    "a ",
    "a-",
    "p.",
    "Section ",
    "{",
    "a",
    "A.",
    "a'",
    "\n*",
    "\r",
    '{"a":',
    "P.S. ",
    " ",
]
KWARGS = {
    str: "ab",
    int: 3,
    list: ["ab", "cd"],
}


def arguments(name):
    kwargs = {key: KWARGS[kind] for key, kind in instructions_checks.ALL_KINDS[name].kwargs.items()}
    kwargs |= {key: "at least" for key in kwargs if key.endswith("relation")}
    own = {"word": "cat", "count": 3, "first": "cat", "second": "dog", "phrase": "red cat", "number": 7, "name": "ben", "text": "#cat"}
    return kwargs if name in instructions_checks.IFEVAL else own


def test_work_is_bounded_on_hostile_text():
    """No pattern backtracks: with one that does, a text of this length keeps this test busy for minutes."""
    detecting = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
    for unit in HOSTILE:
        text = (unit * instructions_checks.MAX_CHARS)[: instructions_checks.MAX_CHARS - 1] + "x"
        for name in instructions_checks.ALL_KINDS:
            if name not in detecting:
                assert follows(name, text, **arguments(name)) in (True, False)
                assert follows(name, text, True, **arguments(name)) in (True, False)


# ---------------------------------------------------------------- IFEval's types


@pytest.mark.parametrize(
    ("name", "kwargs", "good", "bad"),
    [
        ("keywords:existence", {"keywords": ["cat", "c++"]}, ["Cats C++"], ["cat c"]),
        ("keywords:frequency", {"keyword": " cat ", "frequency": 2, "relation": "at least"}, ["cat concat"], ["cat"]),
        ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, ["cat"], ["cat cat"]),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["cats"], ["a Cat."]),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, ["# #"], ["#"]),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 2, "relation": "at least"},
            ["Dr. A went. He left!", 'He said "no." Then left.'],
            ["Dr. A went e.g. home."],
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***a***b***"], ["a", "a***\n***b", "a***b***c"]),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a b c", "a-b-c"]),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Cat"},
            ["a\n\ncat, b", "a\n\n'\"Cat."],
            ["a\n\ncats", "cat\n\nb", "a\n\nb\n\ncat", "a"],
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b]", "[[a] []"], ["[a", "[a\n] [b]"]),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a p. p.s x", "P.P.S"], ["P.S."]),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["a p. s."], ["ps", "P.P.S"]),
        ("detectable_content:postscript", {"postscript_marker": "Note ("}, ["note (a)"], ["note"]),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": 2},
            ["* a\n- b", "*a\n\n\n  -b", "-\n-", "*\n* a\n* b", "*\n\n* a", "*\n\n\n\n* a"],
            ["** a\n* b", "* a", "*\n* a"],
        ),
        ("detectable_format:constrained_response", {}, ["So: My answer is no."], ["My answer is"]),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* *b*", "**a**\n*b*"], ["*a*", "* * *a*"]),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1 Section2"],
            ["Section 1", "section 1 section 2"],
        ),
        ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": [1]}\n```', "3"], ["{a: 1}", "[" * 5000, ""]),
        ("detectable_format:title", {}, ["<<a>>", "x <<<a>>>"], ["<<>>", "<< >>", "<<a\n>>", "<a>", ">>a<<", "<<a", "a>>"]),
        ("combination:two_responses", {}, ["a******b", "******a******b******"], ["a******a", "a", "a************b", "a******b******c"]),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say Hi. "}, [" say hi. Hi"], ["Hi. Say hi."]),
        ("startend:end_checker", {"end_phrase": "The end."}, ['a the END."', "The end.\n"], ["The end.x"]),
        ("startend:quotation", {}, ['"a"', '""'], ['"a', '"']),
        ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["I am A cat", "U.S. UK"], ["One TWO"]),
        (
            "change_case:english_capital",
            {},
            ["THIS IS A SENTENCE IN THE ENGLISH LANGUAGE."],
            ["This is English, not capital.", "DAS IST EIN SATZ IN DEUTSCHER SPRACHE."],
        ),
        ("change_case:english_lowercase", {}, ["this is a sentence in the english language."], ["This is not.", "das ist ein satz in deutscher sprache."]),
        ("language:response_language", {"language": "de"}, ["Das ist ein Satz in deutscher Sprache.", "123"], ["This is a sentence in the English language."]),
        ("punctuation:no_comma", {}, ["a"], ["a,"]),
    ],
)
def test_ifeval_checks(name, kwargs, good, bad):
    if name.startswith(("language", "change_case:english")):
        need_module("langdetect")
    assert [follows(name, text, **kwargs) for text in good] == [True] * len(good)
    assert [follows(name, text, **kwargs) for text in bad] == [False] * len(bad)


def test_loose_reads_eight_variants():
    assert not follows("startend:quotation", 'Sure:\n"a"\nBye', False) and follows("startend:quotation", 'Sure:\n"a"\nBye', True)
    assert follows("startend:quotation", '*"a"*', True) and follows("startend:quotation", 'x\n"a"', True) and follows("startend:quotation", '"a"\nx', True)
    assert not follows("startend:quotation", 'x\ny\n"a"', True)
    assert len(instructions_checks.loose_variants("a\nb")) == 8


def reference_registry(monkeypatch):
    """lm-eval's 25 classes, without its package roots (they import datasets and much else) and without its download."""
    for name in ("lm_eval", "nltk", "immutabledict", "langdetect"):
        need_module(name)
    root = Path(importlib.util.find_spec("lm_eval").origin).parent
    for name, folder in (("lm_eval", root), ("lm_eval.tasks", root / "tasks")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(importlib.import_module("nltk"), "download", lambda *args, **kwargs: None)
    registry = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    return registry


def candidates(row, rng):
    """Texts of many shapes: empty-like, structured, with and without what the prompt asks for."""
    sentence = "the answer is here and we like it. Dear friend, this is A test! Is it? YES it is."
    words = sentence.split()
    base = " ".join(rng.choice(words) for _ in range(rng.choice((3, 30, 120, 420))))
    asked = [str(v) for kwargs in row["kwargs"] for value in kwargs.values() if value for v in (value if isinstance(value, list) else [value])]
    rng.shuffle(asked)
    pool = [
        "* one",
        "- two",
        "*",
        "**bold** text",
        "*mark* and **more**",
        "<<Title>>",
        "<< >>",
        "[name] and [place]",
        "P.S. thanks",
        "p.p.s more",
        "***",
        "******",
        "Section 1",
        "SECTION 2",
        "PARAGRAPH 3",
        "",
        "   ",
        "My answer is maybe.",
        '"quoted"',
        *asked,
        base.upper(),
        base.lower(),
        "Das ist ein deutscher Satz und er ist lang genug.",
    ]
    yield base
    yield row["prompt"] + "\n" + base
    yield row["prompt"].upper()
    yield f'"{base}"'
    yield base + " " + " ".join(asked)
    yield base.replace(",", "") + "\n\n" + "\n\n".join(asked)
    yield "```json\n" + json.dumps({"a": asked}) + "\n```"
    yield base.upper().replace(",", "")
    yield base.lower()
    for join in ("\n", "\n\n", " ", "\n \n", "\n***\n", "******"):
        yield join.join(rng.choice(pool) for _ in range(rng.randint(1, 9)))
        yield join.join(rng.sample(pool, rng.randint(2, 6)))
    yield "\n".join(f"{mark} item" for mark in rng.choices(("*", "-", " *", "\t-", "**", "*\n"), k=rng.randint(1, 8)))
    yield "".join(rng.choices([*"*[]<>\"'-. \n", "***", "P.S.", "a", "B", "[x]", "<<", ">>", "\n\n"], k=rng.randint(1, 40)))


def test_agrees_with_lm_eval(monkeypatch):
    registry = reference_registry(monkeypatch)
    assert set(registry) == set(instructions_checks.IFEVAL)
    rows = {f"ifeval-{row['key']}": row for row in map(json.loads, (real_data("ifeval") / "input_data.jsonl").read_text().splitlines())}
    tasks = load(f"instructions:{real_data('ifeval') / 'input_data.jsonl'}")
    rng = random.Random(0)
    unavailable = ("length_constraints:number_sentences", "change_case:capital_word_frequency")  # they need NLTK's punkt model
    detecting = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
    compared, positive = {}, {}
    for task in [*tasks.train, *tasks.eval]:
        texts = list(candidates(rows[task["id"]], rng))
        for constraint in task["constraints"]:
            name, kwargs = constraint["id"], constraint["kwargs"]
            if name in unavailable or (name == "keywords:letter_frequency" and not kwargs["letter"].isalpha()):  # theirs draws a random letter then
                continue
            checker = registry[name](name)
            checker.build_description(**kwargs)
            for text in texts[:8] if name in detecting else texts:
                theirs = bool(text.strip() and checker.check_following(text))
                assert instructions_checks.follows(constraint, text) is theirs, (name, kwargs, text)
                compared[name] = compared.get(name, 0) + 1
                positive[name] = positive.get(name, 0) + theirs
    assert len(compared) == 23 and sum(compared.values()) > 12_000
    assert all(0 < positive[name] < compared[name] for name in compared), {name: (positive[name], compared[name]) for name in compared}


def test_loose_agrees_with_lm_eval(monkeypatch):
    reference_registry(monkeypatch)
    utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
    quick = [f for f in instructions_checks.IFEVAL if not f.startswith(("language", "change_case", "length_constraints:number_sentences"))]
    rng = random.Random(1)
    for line in (real_data("ifeval") / "input_data.jsonl").read_text().splitlines()[:150]:
        row = json.loads(line)
        kept = [i for i, name in enumerate(row["instruction_id_list"]) if name in quick and row["kwargs"][i].get("letter", "a").isalpha()]
        names, kwargs = [row["instruction_id_list"][i] for i in kept], [row["kwargs"][i] for i in kept]
        for text in candidates(row, rng):
            example = utils.InputExample(row["key"], names, row["prompt"], kwargs)
            for loose, judge in ((False, utils.test_instruction_following_strict), (True, utils.test_instruction_following_loose)):
                theirs = judge(example, text).follow_instruction_list
                assert [instructions_checks.follows({"id": n, "kwargs": k}, text, loose) for n, k in zip(names, kwargs)] == theirs, (row["key"], loose, text)


# ---------------------------------------------------------------- IFEval's file format


def test_reads_the_published_file():
    path = real_data("ifeval") / "input_data.jsonl"
    need_module("langdetect")
    tasks = load(f"instructions:{path}")
    everything = [*tasks.train, *tasks.eval]
    assert len(everything) == tasks.notes["rows"] == 541 and 80 <= len(tasks.eval) <= 140
    assert len({task["id"] for task in everything}) == 541
    assert sum(len(task["constraints"]) for task in everything) == 834
    assert {c["id"] for t in everything for c in t["constraints"]} == set(instructions_checks.IFEVAL)
    double = next(task for task in everything if task["id"] == "ifeval-1203")
    assert [constraint["name"] for constraint in double["constraints"]] == ["keywords:frequency", "keywords:frequency#2"]
    info = play(double, "a text")
    assert set(info["loose"]) == set(info["rewards"]) and info["split"] == "ifeval" and all(info["verifier_text"].values())
    lengths = next(t for t in everything if [c["id"] for c in t["constraints"]] == ["length_constraints:number_words"])
    assert set(play(lengths, "a")["verifier_text"].values()) == {""}


ROW = {"key": 1, "prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def one(name, **kwargs):
    return {**ROW, "instruction_id_list": [name], "kwargs": [kwargs]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"rows\.jsonl:1: not valid JSON"),
        ("[]", r":1: a list, expected an object"),
        ("", "no rows"),
        ({**ROW, "key": None}, r":1: field 'key'"),
        ({**ROW, "prompt": " "}, r":1: field 'prompt'"),
        ({**ROW, "instruction_id_list": []}, r":1: field 'instruction_id_list'"),
        ({**ROW, "kwargs": [{}, {}]}, r":1: field 'kwargs' must be a list with one object for each of the 1 ids, found 2"),
        ({**ROW, "kwargs": {}}, r":1: field 'kwargs' must be a list .* found dict"),
        ({**ROW, "kwargs": [3]}, r":1: field 'kwargs': the entry of punctuation:no_comma is a int"),
        (one("no_comma"), r":1: field 'instruction_id_list': unknown id 'no_comma'"),
        (one("punctuation:no_comma", x=1), r":1: field 'kwargs': punctuation:no_comma needs exactly no entries, found \['x'\]"),
        (one("keywords:existence"), r"keywords:existence needs exactly \['keywords'\], found \[\]"),
        (one("keywords:existence", keywords="cat"), r"keywords must be a list, found 'cat'"),
        (one("keywords:existence", keywords=[]), r"keywords must be a non-empty list of words"),
        (one("length_constraints:number_words", num_words=2.5, relation="at least"), r"num_words must be a int, found 2\.5"),
        (one("length_constraints:number_words", num_words=True, relation="at least"), r"num_words must be a int, found True"),
        (one("length_constraints:number_words", num_words=-2, relation="at least"), r"num_words must not be negative"),
        (one("length_constraints:number_words", num_words=2, relation="at most"), r"relation must be one of"),
        (one("keywords:letter_frequency", letter="ab", let_frequency=1, let_relation="at least"), r"letter must be one character"),
        (one("startend:end_checker", end_phrase=" "), r"end_phrase is empty"),
        (one("length_constraints:nth_paragraph_first_word", num_paragraphs=2, nth_paragraph=3, first_word="a"), r"nth_paragraph must be between 1 and"),
    ],
)
def test_bad_data_names_the_place(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(DataError, match=message):
        load(f"instructions:{tmp_path / 'rows.jsonl'}")


def test_accepts_null_kwargs_whole_floats_and_text_keys(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**one("length_constraints:number_words", num_words=2.0, relation="at least", keyword=None), "key": "a"}) + "\n\n")
    (task,) = [*instructions.load(str(path)).train, *instructions.load(str(path)).eval]  # one row: envs.load would refuse the empty split
    assert task["constraints"][0]["kwargs"] == {"num_words": 2, "relation": "at least"} and task["id"] == "ifeval-a"


def test_other_reading_errors(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match="cannot be read"):
        load(f"instructions:{path}")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        load(f"instructions:{path}")
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW))
    with pytest.raises(DataError, match=r":2: field 'key': 1 occurs twice"):
        load(f"instructions:{path}")
    path.write_text(json.dumps(one("change_case:english_capital")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install langdetect"):
        load(f"instructions:{path}")


def test_a_file_too_short_to_split_is_refused(tmp_path):
    rows = [{"key": k, "prompt": "Say yes.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for k in (1, 2)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    with pytest.raises(DataError, match="bring more rows"):
        envs.load(f"instructions:{tmp_path / 'few.jsonl'}")
