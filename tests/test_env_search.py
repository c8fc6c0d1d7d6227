"""Search: grading against hand-made cases, BM25 against a slow loop, the embedded tasks, the environment, real question folders, bad input."""

import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs import DataError, load, search
from common.envs import corpus as corpora
from common.envs.corpus import K1, B, Corpus
from common.envs.search import SearchEnv, exact_match, f1, normalise, parse_action, split_by_pages

TASKS = load("search")
CORPORA = TASKS.make_env().corpora


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------- grading


@pytest.mark.parametrize(
    ("answer", "accepted", "matched", "overlap"),
    [
        ("The  Anglican Communion.", ["the anglican communion"], 1.0, 1.0),
        ("Anglican Church", ["the Anglican Communion"], 0.0, 0.5),
        ("Stanley Hall", ["G. Stanley Hall", "Stanley Hall"], 1.0, 1.0),
        ("Stanley Hall", ["G. Stanley Hall"], 0.0, 0.8),
        ("rome rome", ["rome"], 0.0, 2 / 3),
        ("35", ["35"], 1.0, 1.0),
        ("35.0", ["35"], 0.0, 0.0),  # punctuation goes, so this is 350
        ("theatre", ["atre"], 0.0, 0.0),  # an article is a whole word
        ("an a the", ["The"], 1.0, 1.0),
        ("the", ["rome"], 0.0, 0.0),
        ("Zürich", ["zürich"], 1.0, 1.0),
    ],
)
def test_grading(answer, accepted, matched, overlap):
    assert exact_match(answer, accepted) == matched and f1(answer, accepted) == pytest.approx(overlap)


@given(st.text(alphabet="ab the.,A", max_size=20), st.text(alphabet="ab the.,A", max_size=20))
def test_grading_properties(left, right):
    assert f1(left, [right]) == pytest.approx(f1(right, [left])) and 0.0 <= f1(left, [right]) <= 1.0
    assert exact_match(left, [left]) == f1(left, [left]) == 1.0 and normalise(normalise(left)) == normalise(left)
    assert exact_match(left, [right]) <= f1(left, [right])


# ---------------------------------------------------------------- search


def slow_bm25(documents: list[list[str]], query: list[str]) -> list[float]:
    """Lucene's BM25 as it is written down, in float64."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in query:
            df = sum(term in other for other in documents)
            tf = document.count(term)
            score += math.log(1 + (len(documents) - df + 0.5) / (df + 0.5)) * tf / (tf + K1 * (1 - B + B * len(document) / mean))
        scores.append(score)
    return scores


def slow_search(documents, query, hits):
    scores = np.array(slow_bm25(documents, query))
    return [i for i in sorted(range(len(documents)), key=lambda i: (-scores[i], i)) if scores[i] > 0][:hits], scores


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="abc ", min_size=1, max_size=30), min_size=1, max_size=12), st.text(alphabet="abcd ", max_size=12))
def test_bm25_equals_the_slow_loop(texts, query):
    texts = [f"{text} a" for text in texts]
    corpus = Corpus([str(i) for i in range(len(texts))], ["b"] * len(texts), texts, hits=4)
    documents = [["b", *text.split()] for text in texts]
    expected, scores = slow_search(documents, query.split(), 4)
    np.testing.assert_allclose(corpus.scores(query), scores, rtol=1e-5, atol=1e-6)
    found = corpus.search(query)
    assert len(found) == len(expected)
    # float32 may order scores that differ by rounding only in another way
    assert scores[found] == pytest.approx(scores[expected], rel=1e-5)
    exact = corpus.scores(query)
    assert found == sorted(found, key=lambda i: (-exact[i], i))


def test_bm25_on_an_embedded_corpus():
    corpus = CORPORA["train-3"]
    documents = [re.findall(r"\w+", f"{title} {text}") for title, text in zip(corpus.titles, corpus.texts)]
    for title in corpus.titles:
        np.testing.assert_allclose(corpus.scores(title), slow_bm25(documents, title.split()), rtol=1e-5)
        assert [corpus.titles[i] for i in corpus.search(title)] == [corpus.titles[i] for i in slow_search(documents, title.split(), 3)[0]]


def test_equal_scores_keep_the_order_of_the_corpus():
    corpus = Corpus([str(i) for i in range(50)], ["same"] * 50, ["words here"] * 50, hits=5)
    assert corpus.search("words") == [0, 1, 2, 3, 4]
    assert corpus.search("nothing") == corpus.search("") == corpus.search("?!") == []
    assert Corpus(["x"], ["t"], [""], hits=3).search("t") == [0]


def test_stopwords_are_not_searched():
    corpus = Corpus(["1", "2"], ["a", "b"], ["the cat is here", "the dog"], stopwords="english")
    assert corpus.search("is the") == [] and corpus.search("the dog") == [1]


# ---------------------------------------------------------------- cache


def index_of(folder: Path) -> Corpus:
    write_folder(folder)
    return load(f"search:{folder}").make_env().corpora["corpus"]


def cached(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache" / "search").iterdir())


def test_index_is_cached_by_content_and_repaired(tmp_path, monkeypatch, capsys):
    corpus = index_of(tmp_path / "a")
    (kept,) = cached(tmp_path)
    files = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert "sizes.json" in files and len(files) >= 5
    expected = corpus.scores("page three").tolist()
    built = []
    build = Corpus._build
    monkeypatch.setattr(Corpus, "_build", lambda self: built.append(1) or build(self))
    assert index_of(tmp_path / "b").scores("page three").tolist() == expected and not built  # the same content elsewhere
    write_folder(tmp_path / "c", corpus=[*PAGES, {"_id": "new", "title": "New", "text": "another"}])
    load(f"search:{tmp_path / 'c'}")
    assert len(cached(tmp_path)) == 2 and len(built) == 1
    capsys.readouterr()
    for name in files:  # each file cut, lost, or overwritten in place
        for broken in (files[name][: len(files[name]) // 2], None, b"\0" * len(files[name]) if name.endswith(".json") else files[name] + b"x"):
            (kept / name).unlink()
            if broken is not None:
                (kept / name).write_bytes(broken)
            built.clear()
            assert index_of(tmp_path / "a").scores("page three").tolist() == expected
            assert built and "broken index" in capsys.readouterr().out
            assert {path.name: path.stat().st_size for path in kept.iterdir()} == {name: len(content) for name, content in files.items()}
    assert len(cached(tmp_path)) == 2  # no temporary folders are left


def test_a_large_corpus_is_mapped(tmp_path, monkeypatch):
    expected = index_of(tmp_path / "a").scores("page three").tolist()
    monkeypatch.setattr(corpora, "MMAP_FROM", 2)
    for _ in range(2):  # from the cache, then built
        corpus = index_of(tmp_path / "a")
        assert isinstance(corpus.index.scores["data"], np.memmap) and corpus.scores("page three").tolist() == expected
        monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path / "other"))


def test_two_writers_of_one_index(tmp_path, monkeypatch):
    """The second to finish keeps what the first has put there."""
    build = Corpus._build

    def build_while_another_finishes(self):
        monkeypatch.setattr(Corpus, "_build", build)
        index_of(tmp_path / "a")
        return build(self)

    monkeypatch.setattr(Corpus, "_build", build_while_another_finishes)
    assert index_of(tmp_path / "a").search("three") and len(cached(tmp_path)) == 1


# ---------------------------------------------------------------- embedded tasks


def play(conversation, task):
    env = TASKS.make_env()
    assert env.reset(task) == conversation[:1]
    for said, heard in zip(conversation[1::2], [*conversation[2::2], None]):
        observation, reward, terminated, truncated, info = env.step(said["content"])
        assert (said["role"], truncated, terminated) == ("assistant", False, heard is None)
        assert heard is None or (heard == {"role": "user", "content": observation} and reward == 0.0 and "success" not in info)
    assert reward == info["success"] == info["rewards"]["answer"]
    return info


def test_demonstrations_solve_every_task_in_the_fewest_turns():
    rng = random.Random(0)
    for task in [*TASKS.train[::6], *TASKS.eval]:
        conversation = TASKS.demonstrate(task, rng)
        assert len(conversation) == 1 + 2 * (2 * task["difficulty"] + 1) - 1
        info = play(conversation, task)
        assert info["success"] == info["f1"] == 1.0 and info["verifier_text"] == {"answer": f"the answer is {task['answer']}"}
        assert "invalid" in info and not info["invalid"]


def test_answers_follow_from_the_pages():
    """The chain is read off the pages' text, without the generator's own tables."""
    for task in [*TASKS.train[::50], *TASKS.eval]:
        corpus = CORPORA[task["corpus"]]
        facts = dict(zip(corpus.titles, corpus.texts))
        entity, *relations = task["question"].removesuffix(" ?").split("'s ")
        assert 2 <= len(relations) == task["difficulty"] <= 4
        chain = [entity]
        for relation in relations:
            entity = re.fullmatch(rf"{relation} of {entity} is ([a-z ]+?)( , told in \w+)?", facts[f"{entity} {relation}"])[1]
            chain.append(entity)
        assert entity == task["answer"] and len(set(chain)) == len(chain)
        assert [corpus.place[hop["id"]] for hop in task["hops"]] == [corpus.titles.index(f"{e} {r}") for e, r in zip(chain, relations)]


def test_splits_share_no_person():
    train, held_out = ({person for task in split for person in people_of(task)} for split in (TASKS.train, TASKS.eval))
    assert held_out and train and not train & held_out
    everyone = [{name for title in CORPORA[task["corpus"]].titles for name in [" ".join(title.split()[:2])]} for task in TASKS.eval]
    assert all(not names & set(search.people("train")) for names in everyone)
    parts = [{part for person in group for part in person.split()} for group in (train, held_out)]
    assert parts[1] <= parts[0]  # no word of validation is new
    assert (len(TASKS.train), len(TASKS.eval)) == (6000, 256) and {task["difficulty"] for task in TASKS.eval} == {2, 3, 4}
    ids = [task["id"] for task in [*TASKS.train, *TASKS.eval]]
    assert len(set(ids)) == len(ids)
    assert json.loads(json.dumps(TASKS.eval)) == TASKS.eval


def people_of(task):
    entities = {hop["entity"] for hop in task["hops"]} | {task["answer"]}
    return {entity for entity in entities if " " in entity}


def by_id(tasks):
    return sorted(tasks, key=lambda task: task["id"])


def test_order_follows_the_seed_and_nothing_else_does(monkeypatch):
    monkeypatch.setattr(search, "TRAIN_CORPORA", 8)
    again, same, other = load("search"), load("search"), load("search", 1)
    assert again.train == same.train != other.train and by_id(again.train) == by_id(other.train)
    assert other.eval == again.eval == TASKS.eval
    assert by_id(again.train) == by_id(task for task in TASKS.train if int(task["id"].split("-")[2]) < 8)
    assert again.make_env().corpora["train-7"].texts == CORPORA["train-7"].texts


def test_every_fact_is_found_and_often_below_an_outdated_one():
    ranks = Counter()
    for name in list(CORPORA)[::8]:
        corpus = CORPORA[name]
        assert len(corpus.ids) == 78 and all(10 <= int(key) < 100 for key in corpus.ids)
        for title in corpus.titles:
            if "former" not in title:
                shown = [corpus.titles[i] for i in corpus.search(title)]
                ranks[shown.index(title)] += 1
                first, last, relation = title.split()
                old = f"{first} {last} former {relation}"
                if old in corpus.titles:
                    values = [corpus.texts[corpus.titles.index(t)].partition(" is ")[2].split(" ,")[0] for t in (title, old)]
                    assert values[0] != values[1]
    assert 0.25 < ranks[1] / sum(ranks.values()) < 0.5


def test_careless_conversations_are_played_and_mostly_fail():
    rng = random.Random(0)
    tasks = TASKS.train[:1500]
    conversations = [TASKS.careless(task, rng) for task in tasks]
    success = [play(conversation, task)["success"] for conversation, task in zip(conversations, tasks)]
    assert 0.25 < sum(success) / len(success) < 0.45
    early = sum(len(c) < len(TASKS.demonstrate(t, rng)) for c, t in zip(conversations, tasks)) / len(tasks)
    outdated = sum("former" in m["content"].splitlines()[0] for c in conversations for m in c if m["content"].startswith("page "))
    assert 0.2 < early < 0.6 and outdated > 500
    assert [TASKS.careless(t, random.Random(1)) for t in tasks[:9]] == [TASKS.careless(t, random.Random(1)) for t in tasks[:9]]


def test_short_for_a_tiny_policy():
    """Words as tokens: with every word, number, line end and mark a token, and four of the template a turn."""
    for task in TASKS.train[:300]:
        conversation = TASKS.demonstrate(task, random.Random(0))
        tokens = sum(4 + len(re.findall(r"\w+|[^\w\s]|\n", message["content"])) for message in conversation)
        assert tokens < {2: 250, 3: 350, 4: 450}[task["difficulty"]]


# ---------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search anna bell", ("search", "anna bell")),
        ("some thought\n\n Search:  anna  bell \n", ("search", "anna  bell")),
        ("search one\nread 2", ("read", "2")),
        ("ANSWER the Anglican Communion.", ("answer", "the Anglican Communion.")),
        ("answer: rome", ("answer", "rome")),
    ],
)
def test_actions(text, expected):
    assert parse_action(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no action"),
        ("  \n \n", "no action"),
        ("rome", "no action"),
        ("find rome", "no action"),
        ("searching rome", "no action"),
        ("search", "search needs words"),
        ("search   ", "search needs words"),
        ("thought\nanswer", "answer needs words"),
        ("read", "read needs words"),
        ("search x\nthat was my action", "no action"),
        ("search " + "x" * 20_000, "too long"),
        ('{"name": "search", "arguments": {"query": "x"}}', "no action"),
    ],
)
def test_actions_that_do_not_parse_cost_a_turn(text, message):
    env = TASKS.make_env()
    env.reset(TASKS.eval[0])
    observation, reward, terminated, truncated, info = env.step(text)
    assert message in observation and (reward, terminated, truncated, info) == (0.0, False, False, {"invalid": True}) and env.turns == 1
    assert env.step("search anna")[4] == {"invalid": False}


def small_env(turns=6, **options):
    corpus = Corpus(["a", "b", "c"], ["Alpha", "Beta", "Gamma"], ["one two", "two " + "x" * 25, ""], page_chars=10, **options)
    env = SearchEnv({"k": corpus}, "do it", turns)
    env.reset({"id": "t", "corpus": "k", "question": "q", "answer": "one", "aliases": ["uno"], "hops": [{"id": "a"}]})
    return env


def test_reading():
    env = small_env(20)
    assert env.step("read a")[0] == "page a was not found yet , search first" and env.step("read zzz")[4] == {"invalid": True}
    assert env.step("search two")[0] == "Alpha : a\nBeta : b"
    assert env.step("read a")[:1] == ("one two",) and env.step("read c")[4] == {"invalid": True}
    assert env.step("read b")[0] == "Beta , part 1 of 3\ntwo xxxxxx" and env.step("read b 3")[0] == "Beta , part 3 of 3\nxxxxxxxxx"
    for wrong in ("b 0", "b 4", "b x", "b ²", "b -1", "b 1 1", "a 2"):
        observation, _, _, _, info = env.step(f"read {wrong}")
        assert info == {"invalid": True} and ("part" in observation or "no page" in observation), wrong
    assert env.step("search gamma")[0] == "Gamma : c" and env.step("read c")[0] == ""
    assert env.step("search zzz")[0] == "no page has these words"
    assert small_env(snippet_chars=5).step("search two")[0] == "Alpha : a | one t\nBeta : b | two x"


def test_end_of_an_episode():
    env = small_env()
    observation, reward, terminated, truncated, info = env.step("answer Uno!")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info == {"invalid": False, "success": 1.0, "rewards": {"answer": 1.0}, "f1": 1.0, "verifier_text": {"answer": "the answer is one"}}
    for call in (lambda: env.step("answer one"), env.oracle_action, env.state_key):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    env = small_env()
    _, reward, terminated, truncated, info = env.step("answer one two")
    assert (reward, terminated, info["success"], info["f1"]) == (0.0, True, 0.0, pytest.approx(2 / 3))
    env = small_env(3)
    assert [env.step("search two")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    env = small_env(1)
    observation, reward, terminated, truncated, info = env.step("search two")
    assert observation.startswith("Alpha") and (reward, terminated, truncated, info["success"], info["f1"]) == (0.0, False, True, 0.0, 0.0)
    assert small_env(1).step("answer one")[2:4] == (True, False)  # an answer on the last turn counts


def random_action(env, rng):
    title, known = rng.choice(env.corpus.titles), sorted(env.found) or ["0"]
    return rng.choice([f"search {title}", f"search {title.split()[0]}", f"read {rng.choice(env.corpus.ids)}", f"read {rng.choice(known)}", "hm"])


def test_oracle_from_any_state():
    rng = random.Random(0)
    for task in TASKS.eval[:120]:
        env = TASKS.make_env()
        env.reset(task)
        for _ in range(rng.randrange(7)):
            env.step(random_action(env, rng))
        ended = False
        while not ended:
            _, reward, ended, truncated, _ = env.step(env.oracle_action())
            assert not truncated
        assert reward == 1.0


def test_snapshots_are_exact():
    rng = random.Random(1)
    for task in TASKS.eval[:40]:
        env = TASKS.make_env()
        env.reset(task)
        for _ in range(rng.randrange(8)):
            env.step(random_action(env, rng))
        state, key = env.snapshot(), env.state_key()
        actions = [random_action(env, rng) for _ in range(20 - env.turns)]

        def run(env, actions=actions):
            results = []
            for action in actions:
                results.append((env.step(action), env.turns))
                if results[-1][0][2] or results[-1][0][3]:
                    break
            return results

        first = run(env)
        assert first[-1][0][3]
        env.restore(state)
        assert env.state_key() == key and run(env) == first
        other = TASKS.make_env()
        other.reset(TASKS.eval[77])
        other.restore(state)
        assert other.state_key() == key and run(other) == first and other.snapshot() == env.snapshot()


def test_state_key_tells_states_apart():
    env, keys = small_env(20), []
    for action in ("hm", "search one", "read a", "search two", "read b"):
        env.step(action)
        keys.append(env.state_key())
    assert len(set(keys)) == 5
    env = small_env(20)
    for action in ("search two", "read b", "hm", "hm", "read a"):
        env.step(action)
    assert env.state_key() == keys[-1]  # the way and the turns do not matter


# ---------------------------------------------------------------- real data

PAGES = [{"_id": f"d{i}", "title": f"Page {i}", "text": f"text of page {word}"} for i, word in enumerate("zero one two three four five six seven".split())]
QUESTIONS = [{"_id": f"q{i}", "text": f"Which is page {i}?", "answer": page["text"].split()[-1]} for i, page in enumerate(PAGES)]


def write_folder(folder: Path, corpus=PAGES, queries=QUESTIONS, qrels=None, names=("corpus.jsonl", "queries.jsonl")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(names, (corpus, queries)):
        if rows is not None:
            (folder / name).write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    for name, rows in (qrels or {}).items():
        (folder / "qrels").mkdir(exist_ok=True)
        (folder / "qrels" / f"{name}.tsv").write_text(rows if isinstance(rows, str) else "query-id\tcorpus-id\tscore\n" + "".join(f"{r}\n" for r in rows))
    return folder


def solve(tasks):
    env = tasks.make_env()
    for task in [*tasks.train, *tasks.eval]:
        env.reset(task)
        ended = False
        while not ended:
            _, reward, ended, truncated, info = env.step(env.oracle_action())
            assert not truncated and not info["invalid"]
        assert reward == 1.0, task


def test_real_musique():
    folder = real_data("multihop_qa")
    tasks = load(f"search:{folder}")
    records = {record["id"]: record for record in map(json.loads, (folder / "musique_100.jsonl").read_text().splitlines())}
    everything = [*tasks.train, *tasks.eval]
    assert {task["id"] for task in everything} == set(records) and len(everything) == 100 and len(tasks.eval) == 20
    assert tasks.notes["pages"] == 1890 and tasks.demonstrate is None and tasks.max_turns == 20
    corpus = tasks.make_env().corpora["corpus"]
    for task in everything:
        record = records[task["id"]]
        assert (task["answer"], task["aliases"]) == (record["answer"], [a for a in record["answer_aliases"] if a != record["answer"]])
        titles = list(dict.fromkeys(hop["title"] for hop in record["hops"]))
        assert list(dict.fromkeys(corpus.titles[int(hop["id"])] for hop in task["hops"])) == titles
    sides = [{hop["id"] for task in split for hop in task["hops"]} for split in (tasks.train, tasks.eval)]
    assert not sides[0] & sides[1]
    solve(tasks)
    env = tasks.make_env()
    (message,) = env.reset(records and everything[0])
    assert message["role"] == "user" and all(verb in message["content"] for verb in search.VERBS) and message["content"].endswith(everything[0]["question"])
    observation = env.step(f"search {corpus.titles[5]}")[0]
    assert len(observation.splitlines()) == 5 and corpus.ids[5] in observation
    documents = [re.findall(r"\w+", f"{t} {x}".lower()) for t, x in zip(corpus.titles[:300], corpus.texts[:300])]
    part = Corpus(corpus.ids[:300], corpus.titles[:300], corpus.texts[:300])
    np.testing.assert_allclose(part.scores("journal of physics 1960"), slow_bm25(documents, ["journal", "of", "physics", "1960"]), rtol=1e-4, atol=1e-6)


def test_beir_folder(tmp_path):
    qrels = {"train": [f"q{i}\td{i}\t1" for i in range(5)], "test": ["q5\td5\t2", "q5\td6\t0", "q6\td6\t1"]}
    tasks = load(f"search:{write_folder(tmp_path / 'x', qrels=qrels)}")
    assert sorted(task["id"] for task in tasks.train) == [f"q{i}" for i in range(5)] and [task["id"] for task in tasks.eval] == ["q5", "q6"]
    assert [task["hops"] for task in tasks.eval] == [[{"id": "d5"}], [{"id": "d6"}]] and tasks.notes["without_qrels"] == 1
    solve(tasks)
    single = load(f"search:{write_folder(tmp_path / 'y', qrels={'test': [f'q{i}{chr(9)}d{i}{chr(9)}1' for i in range(8)]})}")
    assert len(single.eval) == 2 and len(single.train) == 6
    metadata = [{"_id": i, "text": "q?", "metadata": {"answer": "x", "supporting_facts": []}} for i in range(8)]
    tasks = load(f"search:{write_folder(tmp_path / 'z', queries=metadata)}")
    assert {task["id"] for task in [*tasks.train, *tasks.eval]} == {str(i) for i in range(8)} and tasks.train[0]["answer"] == "x"
    solve(tasks)


def test_browsecomp_plus_records(tmp_path):
    pages = [{"docid": str(i), "text": f"page number {i}", "url": "u"} for i in range(9)]
    rows = [
        {
            "query_id": str(i),
            "query": "q",
            "answer": f"a{i}",
            "gold_docs": [{"docid": str(i), "text": "", "url": ""}],
            "evidence_docs": [{"docid": "0"}, {"docid": str(i)}] if i < 3 else [{"docid": str(i)}],
            "negative_docs": [],
        }
        for i in range(8)
    ]
    folder = write_folder(tmp_path / "x", pages, rows, names=("my_corpus.jsonl", "browsecomp_plus_decrypted.jsonl"))
    tasks = load(f"search:{folder}")
    hops = {task["id"]: [hop["id"] for hop in task["hops"]] for task in [*tasks.train, *tasks.eval]}
    assert hops["2"] == ["0", "2"] and hops["0"] == ["0"] and hops["5"] == ["5"]
    assert len(tasks.eval) == 2 and not {"0", "1", "2"} & {task["id"] for task in tasks.eval}  # these three share a page
    solve(tasks)


def test_question_files_name_the_split(tmp_path):
    folder = write_folder(tmp_path / "x", queries=QUESTIONS[:5], names=("corpus.jsonl", "hotpot_train.jsonl"))
    write_folder(folder, queries=QUESTIONS[5:], names=("corpus.jsonl", "hotpot_dev.jsonl"))
    tasks = load(f"search:{folder}")
    assert len(tasks.train) == 5 and len(tasks.eval) == 3 and tasks.notes["split"] == "by files"
    without_ids = [{"text": "t1"}, {"text": "t2"}]
    numbered = [{"question": "q", "answers": ["x", "y"]}, {"question": "q", "answer": 35}]
    tasks = load(f"search:{write_folder(tmp_path / 'y', without_ids, numbered)}")
    assert {task["id"]: (task["answer"], task["aliases"]) for task in [*tasks.train, *tasks.eval]} == {"queries-1": ("x", ["y"]), "queries-2": ("35", [])}
    assert tasks.make_env().corpora["corpus"].ids == ["0", "1"]


def test_split_keeps_shared_pages_together():
    rng = random.Random(0)
    tasks = [{"id": str(i), "hops": [{"id": str(rng.randrange(150))} for _ in range(2)]} for i in range(100)]
    held = split_by_pages(tasks)
    assert 0 < len(held) <= 20 and held == split_by_pages(tasks[::-1])
    sides = [{hop["id"] for task in tasks if (task["id"] in held) == side for hop in task["hops"]} for side in (True, False)]
    assert not sides[0] & sides[1]
    lonely = [{"id": str(i), "hops": []} for i in range(100)]
    assert len(split_by_pages(lonely)) == 20


BAD = [
    # corpus, queries, qrels, names, message
    ("", QUESTIONS, {}, r"corpus.jsonl: empty"),
    ("\n\n", QUESTIONS, {}, r"corpus.jsonl: empty"),
    ('{"_id": "a", "text": "x"}\n{"_id": ', QUESTIONS, {}, r"corpus.jsonl:2: not readable as JSON"),
    ("[1]", QUESTIONS, {}, r"corpus.jsonl:1: expected an object, found list"),
    ([{"_id": "a", "text": "x"}, {"_id": "a", "text": "y"}], QUESTIONS, {}, r"corpus.jsonl:2: field '_id': the id 'a' is taken by .*corpus.jsonl:1"),
    ([{"_id": "a", "text": "x"}, {"_id": 7, "text": "y"}, {"_id": "7", "text": "y"}], QUESTIONS, {}, r"corpus.jsonl:3: .*'7' is taken"),
    ([{"_id": "a", "text": "x"}, {"text": "y"}], QUESTIONS, {}, r"corpus.jsonl:2: field '_id' is missing"),
    ([{"text": "x"}, {"_id": "a", "text": "y"}], QUESTIONS, {}, r"corpus.jsonl:2: .*give every page an id, or none"),
    ([{"_id": "a b", "text": "x"}], QUESTIONS, {}, r"corpus.jsonl:1: field '_id' is 'a b'"),
    ([{"_id": [], "text": "x"}], QUESTIONS, {}, r"corpus.jsonl:1: field '_id' is \[\]"),
    ([{"_id": "a"}], QUESTIONS, {}, r"corpus.jsonl:1: field 'text' is missing"),
    ([{"_id": "a", "text": "x", "title": 3}], QUESTIONS, {}, r"corpus.jsonl:1: field 'title'"),
    (PAGES, "", {}, r"queries.jsonl: empty"),
    (PAGES, "nope", {}, r"queries.jsonl:1: not readable as JSON"),
    (PAGES, [QUESTIONS[0], {"_id": "q9", "text": "Who?"}], {}, r"queries.jsonl:2: the question has no answer text .*; add a field 'answer'"),
    (PAGES, [{"_id": "q9", "text": "Who?", "answer": " "}], {}, r"queries.jsonl:1: the question has no answer text"),
    (PAGES, [{"_id": "q9", "text": "Who?", "answer": "..."}], {}, r"queries.jsonl:1: the question has no answer text"),
    (PAGES, [{"_id": "q9", "text": "Who?", "answer_aliases": ["x"]}], {}, r"queries.jsonl:1: the question has no answer text"),
    (PAGES, [{"_id": "q9", "text": "Who?", "answer": {"a": 1}}], {}, r"queries.jsonl:1: field 'answer' is not a text"),
    (PAGES, [{"_id": "q9", "text": "Who?", "answer": True}], {}, r"queries.jsonl:1: field 'answer' is not a text"),
    (PAGES, [{"_id": "q9", "answer": "x"}], {}, r"queries.jsonl:1: field 'question' is missing"),
    (PAGES, [{"_id": "q9", "text": "  ", "answer": "x"}], {}, r"queries.jsonl:1: field 'text' is missing or not a non-empty string"),
    (PAGES, [QUESTIONS[0], QUESTIONS[0]], {}, r"queries.jsonl:2: field '_id': the id 'q0' is taken"),
    (PAGES, [{**QUESTIONS[0], "gold_docs": ["zz"]}], {}, r"queries.jsonl:1: field 'gold_docs': no page of the corpus has the id 'zz'"),
    (PAGES, [{**QUESTIONS[0], "evidence_docs": [{"text": "t"}]}], {}, r"queries.jsonl:1: field 'evidence_docs'"),
    (PAGES, [{**QUESTIONS[0], "hops": [{"title": "Nowhere"}]}], {}, r"queries.jsonl:1: field 'hops': no page of the corpus has the title 'Nowhere'"),
    (PAGES, QUESTIONS, {"test": ["q1\td1"]}, r"test.tsv:2: expected query-id"),
    (PAGES, QUESTIONS, {"test": ["q1\td1\tyes"]}, r"test.tsv:2: expected query-id"),
    (PAGES, QUESTIONS, {"test": ["q1\td1\t1", "q77\td1\t1"]}, r"test.tsv:3: no question has the id 'q77'"),
    (PAGES, QUESTIONS, {"test": ["q1\td77\t1"]}, r"test.tsv:2: no page of the corpus has the id 'd77'"),
    (PAGES, QUESTIONS[:1], {}, r"no training tasks"),
]


@pytest.mark.parametrize(("corpus", "queries", "qrels", "message"), BAD, ids=range(len(BAD)))
def test_bad_folders(tmp_path, corpus, queries, qrels, message):
    with pytest.raises(DataError, match=message):
        load(f"search:{write_folder(tmp_path / 'x', corpus, queries, qrels)}")


def test_missing_and_ambiguous_files(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load(f"search:{tmp_path / 'none'}")
    with pytest.raises(DataError, match="0 corpus files"):
        load(f"search:{write_folder(tmp_path / 'a', corpus=None)}")
    with pytest.raises(DataError, match="no question file"):
        load(f"search:{write_folder(tmp_path / 'b', queries=None)}")
    folder = write_folder(tmp_path / "c", names=("corpus_a.jsonl", "q.jsonl"))
    (folder / "corpus_b.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"2 corpus files among .*corpus_b"):
        load(f"search:{folder}")
    folder = write_folder(tmp_path / "d", names=("corpus.jsonl", "one.jsonl"))
    write_folder(folder, queries=[{**q, "_id": q["_id"] + "x"} for q in QUESTIONS], names=("corpus.jsonl", "two.jsonl"))
    with pytest.raises(DataError, match=r"several question files \['one', 'two'\]"):
        load(f"search:{folder}")
    (folder / "one.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(DataError, match=r"one.jsonl: not readable as UTF-8"):
        load(f"search:{folder}")


def test_a_corpus_needs_pages():
    with pytest.raises(DataError, match="empty"):
        Corpus([], [], [])
    with pytest.raises(DataError, match="two pages with the id 'a'"):
        Corpus(["a", "b", "a"], ["t"] * 3, ["x"] * 3)
