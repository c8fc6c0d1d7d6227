"""Text-to-SQL: comparison against the published rules, the embedded tasks, the loader, the environment."""

import itertools
import json
import math
import random
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from conftest import real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common.envs import DataError, load, sql, sql_score, sql_tasks
from common.envs.sql import SqlEnv
from common.envs.sql_score import bird_equal, normalise_query, parse_response, score_query, spider_equal

SCRIPT = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, country TEXT, rate REAL);
INSERT INTO singer VALUES (1, 'Ann', 30, 'France', 1.0), (2, 'Bob', 25, 'Spain', 2.5), (3, 'Cid', 41, 'France', 2.0), (4, 'Dee', 25, NULL, 4.0);
CREATE TABLE concert (id INTEGER PRIMARY KEY, singer_id INTEGER REFERENCES singer (id), year INTEGER);
INSERT INTO concert VALUES (1, 1, 2019), (2, 1, 2020), (3, 3, 2020), (4, 3, 2020), (5, 2, 2021);
"""


def make_database(path: Path, script: str = SCRIPT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    return make_database(tmp_path_factory.mktemp("db") / "music.sqlite")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEANAGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load("sql")


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Comparison

NAMES = "SELECT name FROM singer"
CASES = [  # reference, prediction, equal by Spider's rule, equal by BIRD's rule
    (NAMES, "select name from singer", True, True),
    (NAMES, "SELECT name FROM singer;", True, True),
    (NAMES, "SELECT name FROM singer ORDER BY name DESC", True, True),  # the reference has no order
    (NAMES, "SELECT name FROM singer WHERE id < 9", True, True),
    (NAMES, "SELECT name, id FROM singer", False, False),
    (NAMES, "SELECT country FROM singer", False, False),
    (NAMES, "SELECT name FROM singer UNION ALL SELECT 'Ann'", False, True),  # a bag, against a set
    (NAMES, "SELECT DISTINCT name FROM singer", True, True),
    (NAMES, "SELECT upper(name) FROM singer", False, False),
    (NAMES, "SELECT name FROM singer LIMIT 3", False, False),
    (NAMES, "SELECT nme FROM singer", False, False),
    (NAMES, "SELECT name FROM", False, False),
    (NAMES, "", False, False),
    (NAMES, "SELECT name FROM singer; SELECT 1", False, False),
    ("SELECT name, age FROM singer", "SELECT age, name FROM singer", True, False),
    ("SELECT name, age FROM singer", "SELECT name, name FROM singer", False, False),
    ("SELECT name, age, country FROM singer", "SELECT country, age, name FROM singer", True, False),
    ("SELECT id, age FROM singer", "SELECT age, id FROM singer", True, False),
    ("SELECT age, age FROM singer", "SELECT age, id FROM singer", False, False),
    ("SELECT country FROM singer", "SELECT DISTINCT country FROM singer", True, True),  # DISTINCT is dropped from both; a set has none
    ("SELECT count(country) FROM singer", "SELECT count(DISTINCT country) FROM singer", True, False),
    ("SELECT count(DISTINCT country) FROM singer", "SELECT count(DISTINCT country) FROM singer", True, True),
    ("SELECT country FROM singer GROUP BY country", "SELECT country FROM singer", False, True),
    ("SELECT name FROM singer ORDER BY age", "SELECT name FROM singer ORDER BY age", True, True),
    ("SELECT name FROM singer ORDER BY id", "SELECT name FROM singer ORDER BY id DESC", False, True),
    ("SELECT name FROM singer ORDER BY id", "SELECT name FROM singer", True, True),  # the same order by chance
    ("SELECT name, id FROM singer ORDER BY id", "SELECT id, name FROM singer ORDER BY name", True, False),
    ("SELECT id, age FROM singer ORDER BY id", "SELECT age, id FROM singer ORDER BY id", True, False),
    ("SELECT id, age FROM singer ORDER BY id", "SELECT id, age FROM singer ORDER BY age", False, True),
    ("SELECT name FROM singer ORDER BY age DESC LIMIT 1", "SELECT name FROM singer WHERE age = (SELECT max(age) FROM singer)", True, True),
    ("SELECT name FROM singer WHERE id IN (SELECT id FROM singer ORDER BY id)", "SELECT name FROM singer ORDER BY id DESC", False, True),  # "order by" anywhere
    ("SELECT name FROM singer WHERE age > 99", "SELECT id, name FROM singer WHERE age > 98", True, True),  # both empty
    ("SELECT name FROM singer WHERE age > 99", NAMES, False, False),
    ("SELECT count(*) FROM singer", "SELECT count(id) FROM singer", True, True),
    ("SELECT count(*) FROM singer", "SELECT 4", True, True),
    ("SELECT count(*) FROM singer", "SELECT 4.0", True, True),  # numbers are compared by value
    ("SELECT count(*) FROM singer", "SELECT '4'", False, False),
    ("SELECT avg(age) FROM singer", "SELECT sum(age) * 1.0 / count(*) FROM singer", True, True),
    ("SELECT avg(age) FROM singer", "SELECT sum(age) / count(*) FROM singer", False, False),
    ("SELECT NULL", "SELECT NULL", True, True),
    ("SELECT country FROM singer WHERE id = 4", "SELECT 'None'", False, False),
    ("SELECT name FROM singer WHERE age > = 30", "SELECT name FROM singer WHERE age >= 30", True, None),
    ("SELECT name FROM singer WHERE age ! = 25", "SELECT name FROM singer WHERE age < > 25", False, None),  # "< >" is not mended
    ("SELECT id FROM concert WHERE year = YEAR(CURDATE())", "SELECT id FROM concert WHERE year = 2020", True, None),
    ("SELECT id FROM concert WHERE year = 2020", "SELECT id FROM concert WHERE year = year ( curdate ( ) ) ", True, False),
    ("SELECT id, year FROM concert", "SELECT year, id FROM concert ORDER BY year", True, False),
    ("SELECT name FROM singer WHERE country = 'France'", 'SELECT name FROM singer WHERE country = "France"', True, True),
    ("SELECT 'distinct'", "SELECT 'distinct'", True, True),  # the word inside a string stays
    ("SELECT s.name, count(*) FROM singer s JOIN concert c ON c.singer_id = s.id GROUP BY s.id", "SELECT name, 1 FROM singer WHERE id < 4", False, False),
]


@pytest.mark.parametrize(("gold", "prediction", "spider", "bird"), CASES)
def test_hand_made_cases(database, gold, prediction, spider, bird):
    task = {"id": "x", "database": str(database), "query": gold}
    if prediction:
        assert score_query(task, prediction).result == float(spider)
        if bird is not None:
            assert score_query(task, prediction, "bird").result == float(bird)
    env = SqlEnv()
    env.reset({**task, "schema": "", "question": ""})
    assert env.step(f"<think></think><sql>{prediction}</sql>")[4]["success"] == float(spider)


def test_distinct_counts_when_kept(database):
    task = {"id": "x", "database": str(database), "query": "SELECT country FROM singer", "keep_distinct": True}
    assert score_query(task, "SELECT DISTINCT country FROM singer").result == 0.0
    assert score_query(task, "SELECT country FROM singer").result == 1.0


def slow_spider_equal(gold, other, order_matters: bool) -> bool:
    """The published procedure, every column order tried."""
    if not gold and not other:
        return True
    if len(gold) != len(other) or len(gold[0]) != len(other[0]):
        return False

    def rows(table):
        sorted_rows = [tuple(sorted(row, key=lambda v: str(v) + str(type(v)))) for row in table]
        return sorted_rows if order_matters else set(sorted_rows)

    if rows(gold) != rows(other):
        return False
    for order in itertools.permutations(range(len(gold[0]))):
        turned = [tuple(row[i] for i in order) for row in other]
        if (gold == turned) if order_matters else (Counter(gold) == Counter(turned)):
            return True
    return False


values = st.sampled_from([0, 1, 1.0, 2, 2.5, 10, "a", "b", "1", None])


@st.composite
def table_pairs(draw):
    width, height = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    pool = draw(st.lists(values, min_size=1, max_size=4))
    gold = [tuple(draw(st.sampled_from(pool)) for _ in range(width)) for _ in range(height)]
    order = draw(st.permutations(range(width)))
    other = [tuple(row[i] for i in order) for row in (draw(st.permutations(gold)) if draw(st.booleans()) else gold)]
    if other and draw(st.booleans()):  # one cell changed, or two swapped between rows
        i, j, k = draw(st.integers(0, height - 1)), draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
        first, second = list(other[i]), list(other[j])
        first[k], second[k] = (second[k], first[k]) if draw(st.booleans()) else (draw(values), second[k])
        other[i] = tuple(first)
        if i != j:
            other[j] = tuple(second)
    return gold, other


@settings(max_examples=600, deadline=None)
@given(table_pairs(), st.booleans())
def test_comparison_equals_the_published_procedure(pair, order_matters):
    gold, other = pair
    assert spider_equal(gold, other, order_matters) == slow_spider_equal(gold, other, order_matters)
    assert bird_equal(gold, other) == (set(gold) == set(other))


def test_comparison_keeps_the_published_precheck():
    """Rows are first compared with their values sorted as texts with types, where 1.5 stands before 1 and after 1.0."""
    assert not spider_equal([(1, 1.5)], [(1.5, 1.0)], False) and spider_equal([(1, 1.5)], [(1.5, 1)], False)
    assert spider_equal([(2, 10.5)], [(10.5, 2.0)], True)


def test_comparison_of_look_alike_columns_ends():
    rng = random.Random(0)
    gold = [tuple(rng.randrange(2) for _ in range(24)) for _ in range(200)]
    turn = rng.sample(range(24), 24)
    assert spider_equal(gold, [tuple(row[i] for i in turn) for row in rng.sample(gold, 200)], False)
    wide = [tuple(i == j for j in range(40)) for i in range(40)]  # every column has the same values
    assert spider_equal(wide, [tuple(row[::-1]) for row in wide], False)
    worst = [tuple((i * j) % 2 for j in range(30)) for i in range(60)]
    assert not spider_equal(worst, [tuple((i * j + (i == 7) * (j == 3)) % 2 for j in range(30)) for i in range(60)], False)


def test_column_search_is_bounded(monkeypatch):
    rows = [tuple(int(j in (i, (i + 1) % 9)) for j in range(9)) for i in range(9)]
    turned = [tuple(row[j] for j in (4, 2, 0, 7, 1, 8, 3, 6, 5)) for row in rows]
    assert spider_equal(rows, turned, False)
    monkeypatch.setattr(sql_score, "MATCH_STEPS", 3)
    assert not spider_equal(rows, turned, False)


@pytest.mark.parametrize(
    ("query", "keep", "expected"),
    [
        ("SELECT DISTINCT a FROM t", False, "SELECT  a FROM t"),
        ("SELECT DISTINCT a FROM t", True, "SELECT DISTINCT a FROM t"),
        ("select count(distinct a), 'distinct' from distincts", False, "select count( a), 'distinct' from distincts"),
        ("a > = 1 and b < = 2 and c ! = 3", True, "a >= 1 and b <= 2 and c != 3"),
        ("WHERE y = year( CURDATE ( ) ) AND 1", True, "WHERE y = 2020AND 1"),
    ],
)
def test_normalised_queries(query, keep, expected):
    assert normalise_query(query, keep) == expected


def test_test_suite_needs_every_database(tmp_path):
    main = make_database(tmp_path / "music.sqlite")
    other = make_database(tmp_path / "other.sqlite", SCRIPT.replace("'Bob', 25", "'Bob', 44"))
    task = {"id": "x", "database": str(main), "databases": [str(main), str(other)], "query": "SELECT name FROM singer WHERE age > 26"}
    assert score_query(task, "SELECT name FROM singer WHERE age > 26").result == 1.0
    chance = "SELECT name FROM singer WHERE country = 'France'"
    assert score_query({**task, "databases": None}, chance).result == 1.0
    assert score_query(task, chance) == sql_score.Score(1.0, 0.0, sql_score.NO_ERROR)


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Environment

FORMS = [
    ("<think>a</think><sql>SELECT 1</sql>", True, "SELECT 1"),
    (" \n<think> a\nb </think>\n <sql>\nSELECT 1\n</sql> \n", True, "SELECT 1"),
    ("<think></think><sql>SELECT 1</sql>", True, "SELECT 1"),
    ("<think>a</think><sql></sql>", True, None),
    ("<think>a</think> so <sql>SELECT 1</sql>", False, "SELECT 1"),
    ("Sure: <think>a</think><sql>SELECT 1</sql>", False, "SELECT 1"),
    ("<think>a</think><sql>SELECT 1</sql> done", False, "SELECT 1"),
    ("<sql>SELECT 1</sql><think>a</think>", False, "SELECT 1"),
    ("<sql>SELECT 1</sql>", False, "SELECT 1"),
    ("<think>a</think><sql>SELECT 1", False, None),
    ("<think>a</think>SELECT 1</sql>", False, None),
    ("<think>a</think><sql>SELECT 1</sql><sql>SELECT 2</sql>", False, "SELECT 2"),
    ("<think>a<think>b</think><sql>SELECT 1</sql>", False, "SELECT 1"),
    ("<think>a</think><sql><sql>SELECT 1</sql>", False, "SELECT 1"),
    ("<think>a</sql><sql>b</think>", False, None),
    ("<THINK>a</THINK><SQL>SELECT 1</SQL>", False, None),
    ("SELECT 1", False, None),
    ("", False, None),
    ("<think>" + "<sql>" * 30_000 + "</sql>", False, None),
]


@pytest.mark.parametrize(("text", "good", "query"), FORMS, ids=range(len(FORMS)))
def test_response_form(text, good, query):
    assert parse_response(text) == (good, query)


def step(database: Path, text: str, **task):
    env = SqlEnv()
    env.reset({"id": "x", "database": str(database), "query": "SELECT count(*) FROM singer", "schema": "s", "question": "q", **task})
    return env.step(text)


def test_rewards_and_verifier_texts(database):
    observation, reward, terminated, truncated, info = step(database, "<think>a</think><sql>SELECT 4</sql>")
    assert (observation, reward, terminated, truncated, info["success"]) == ("", 1.0, True, False, 1.0)
    assert info["rewards"] == {"format": 1.0, "executes": 1.0, "result": 1.0} and "error" not in info
    assert info["verifier_text"] == {"format": sql_score.FORMAT_REQUIREMENT, "executes": "executed without error", "result": "SELECT count(*) FROM singer"}
    _, reward, _, _, info = step(database, "<think>a</think><sql>SELECT count(*) FROM singers</sql>")
    assert info["rewards"] == {"format": 1.0, "executes": 0.0, "result": 0.0} and reward == pytest.approx(1 / 3)
    assert info["verifier_text"]["executes"] == "no such table: singers"
    info = step(database, "just words")[4]
    assert info["rewards"] == {"format": 0.0, "executes": 0.0, "result": 0.0} and info["verifier_text"]["executes"] == sql_score.NO_QUERY
    info = step(database, "<think></think><sql>DROP TABLE singer</sql>")[4]
    assert info["rewards"] == {"format": 1.0, "executes": 0.0, "result": 0.0} and info["verifier_text"]["executes"] == "not authorized"
    info = step(database, "<think></think><sql>SELECT 1 FROM singer a, singer b, singer c, singer d, singer e, singer f, singer g</sql>")[4]
    assert info["rewards"]["executes"] == 0.0 and "10000 rows" in info["verifier_text"]["executes"]


def test_a_database_failure_is_marked_and_not_scored(database, tmp_path):
    missing = tmp_path / "missing.sqlite"
    _, reward, terminated, _, info = step(missing, "<think>a</think><sql>SELECT 4</sql>")
    assert terminated and math.isnan(reward) and math.isnan(info["success"]) and str(missing) in info["error"]
    assert info["rewards"]["format"] == 1.0 and math.isnan(info["rewards"]["executes"]) and math.isnan(info["rewards"]["result"])
    info = step(database, "<think>a</think><sql>SELECT 4</sql>", query="SELECT nope FROM singer")[4]
    assert math.isnan(info["success"]) and "reference query of task x fails" in info["error"]
    broken = tmp_path / "broken.sqlite"
    content = database.read_bytes()
    broken.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))  # opens, and the reference needs no page of it
    assert math.isnan(step(broken, "<think>a</think><sql>SELECT age FROM singer</sql>", query="SELECT 4")[4]["success"])


def test_a_long_reference_result_allows_a_long_prediction(database):
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 12000) SELECT x FROM n"
    assert step(database, f"<think></think><sql>{many}</sql>", query=many)[4]["rewards"] == {"format": 1.0, "executes": 1.0, "result": 1.0}


def test_one_step_an_episode(database):
    env = SqlEnv()
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")
    env.reset({"id": "x", "database": str(database), "query": "SELECT 1", "schema": "s", "question": "q"})
    assert env.step(env.oracle_action())[4]["success"] == 1.0
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")
    with pytest.raises(ValueError, match="mode"):
        SqlEnv("exact")


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Regions


def named(text: str) -> list[tuple[str, str]]:
    spans = sql_score.regions(text)
    assert all(a < b <= c for (_, a, b), (_, c, _) in itertools.pairwise([*spans, ("", len(text), len(text))]))
    return [(name, text[start:end]) for name, start, end in spans]


def test_regions():
    text = (
        "<think> use age </think> <sql> SELECT DISTINCT a . x , count ( * ) FROM a JOIN b ON b . a_id = a . id WHERE y > 3 GROUP BY x ORDER BY y LIMIT 1 </sql>"
    )
    assert named(text) == [
        ("tags", "<think>"),
        ("reasoning", "use age"),
        ("tags", "</think>"),
        ("tags", "<sql>"),
        ("other", "SELECT DISTINCT"),
        ("columns", "a . x , count ( * )"),
        ("other", "FROM"),
        ("tables", "a"),
        ("other", "JOIN"),
        ("tables", "b"),
        ("other", "ON b . a_id = a . id WHERE"),
        ("conditions", "y > 3"),
        ("other", "GROUP BY"),
        ("conditions", "x"),
        ("other", "ORDER BY"),
        ("conditions", "y"),
        ("other", "LIMIT"),
        ("conditions", "1"),
        ("tags", "</sql>"),
    ]


def test_regions_of_subqueries_and_broken_text():
    assert named("<sql>SELECT x FROM t WHERE id NOT IN (SELECT t_id FROM u WHERE z = 'from')") == [
        ("tags", "<sql>"),
        ("other", "SELECT"),
        ("columns", "x"),
        ("other", "FROM"),
        ("tables", "t"),
        ("other", "WHERE"),
        ("conditions", "id NOT IN ("),
        ("other", "SELECT"),
        ("columns", "t_id"),
        ("other", "FROM"),
        ("tables", "u"),
        ("other", "WHERE"),
        ("conditions", "z = 'from')"),
    ]
    assert named("no tags at all") == [] and named("<think>") == [("tags", "<think>")]


@given(st.lists(st.sampled_from([*sql_score.TAGS, " ", "select", "from", "(", ")", "'", "a"]), max_size=30))
def test_regions_never_overlap(parts):
    named("".join(parts))


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Embedded tasks


def words_of(task) -> set[str]:
    return set(" ".join(message["content"] for message in sql_tasks.demonstrate(task, random.Random(0))).split())


def test_embedded_sets(embedded):
    assert (len(embedded.train), len(embedded.eval)) == (sql_tasks.TRAIN_TASKS, sql_tasks.EVAL_TASKS)
    everything = [*embedded.train, *embedded.eval]
    assert len({task["id"] for task in everything}) == len(everything) == len({(task["db_id"], task["question"]) for task in everything})
    for tasks in (embedded.train, embedded.eval):
        assert set(Counter(task["difficulty"] for task in tasks).values()) == {len(tasks) // 4}
    train, held_out = ({task["db_id"] for task in tasks} for tasks in (embedded.train, embedded.eval))
    assert len(train) == sql_tasks.TRAIN_DATABASES and len(held_out) == sql_tasks.EVAL_DATABASES
    pairs = {frozenset(name.split("_")) for name in train}
    assert not pairs & {frozenset(name.split("_")) for name in held_out}  # in neither role
    json.dumps(everything)


def test_embedded_words_and_lengths(embedded):
    trained = set().union(*map(words_of, embedded.train))
    assert len(trained) < 350 and set().union(*map(words_of, embedded.eval)) <= trained
    rng = random.Random(1)
    prompts, answers, reasons = [], [], []
    for task in embedded.train:
        prompt, answer = (message["content"] for message in embedded.demonstrate(task, rng))
        prompts.append(len(prompt.split())), answers.append(len(answer.split()))
        reasons.append(len(answer.split("</think>")[0].split()) - 1)
    assert max(prompts) <= 60 and max(answers) <= 64 and min(reasons) >= 4 and max(reasons) <= 24 and sum(reasons) / len(reasons) < 12


def test_demonstrations_solve(embedded):
    env, rng = embedded.make_env(), random.Random(2)
    for task in [*embedded.train[:400], *embedded.eval]:
        messages = embedded.demonstrate(task, rng)
        assert messages[:-1] == env.reset(task) and [message["role"] for message in messages] == ["user", "assistant"]
        assert env.step(messages[-1]["content"])[4]["rewards"] == {"format": 1.0, "executes": 1.0, "result": 1.0}


def test_references_discriminate(embedded):
    """Wrong column, dropped condition, wrong operator, value, aggregate, direction: each gives another result, computed here from the text of the query."""
    changes = [
        (r" WHERE .*?(?= GROUP| ORDER|$)", ""),
        (r" > ", " < "),
        (r" = '", " != '"),
        (r"max \(", "min ("),
        (r"avg \(", "sum ("),
        (r"DESC", "ASC"),
        (r" LIMIT \d", ""),
        (r"NOT IN", "IN"),
        (r" HAVING .*", ""),
    ]
    seen = Counter()
    for task in [*embedded.train[:600], *embedded.eval]:
        assert sql_score.reference_result(task["database"], task["query"]).rows
        for pattern, new in changes:
            wrong = re.sub(pattern, new, task["query"], count=1)
            if wrong != task["query"] and "SELECT avg (" not in task["query"].split("FROM", 1)[1]:
                score = score_query(task, wrong)
                seen[pattern] += 1
                assert score.result == 0.0, (task["query"], wrong)
    assert len(seen) == len(changes) and min(seen.values()) >= 5


def test_order_of_training_tasks_follows_the_seed(embedded, monkeypatch):
    monkeypatch.setenv("CLEANAGENTRL_CACHE", str(Path(embedded.train[0]["database"]).parents[2]))
    again, other = load("sql", 0), load("sql", 1)
    assert list(again.train) == list(embedded.train) != list(other.train)
    assert list(again.eval) == list(other.eval) and sorted(t["id"] for t in again.train) == sorted(t["id"] for t in other.train)


def test_generator_is_deterministic_and_repairs_its_cache(tmp_path, monkeypatch):
    for name, value in (("TRAIN_DATABASES", 4), ("EVAL_DATABASES", 2), ("TRAIN_TASKS", 40), ("EVAL_TASKS", 8)):
        monkeypatch.setattr(sql_tasks, name, value)
    contents = []
    for name in ("first", "second"):
        monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path / name))
        sql_tasks.build_embedded()
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()})
    assert contents[0] == contents[1] and len(contents[0]) == 7
    lost = next((tmp_path / "second").rglob("*.sqlite"))
    lost.unlink()
    tasks = sql_tasks.build_embedded()[0]
    assert lost.read_bytes() == contents[0][lost.name] and all(Path(task["database"]).is_file() for task in tasks)


# ---------------------------------------------------------------------------------------------------------------------------------------------------
# Spider and BIRD folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANAGENTRL_CACHE", str(tmp_path / "cache"))


def test_real_spider():
    folder = real_data("spider")
    tasks = load(f"sql:{folder}")
    records = json.loads((folder / "dev.json").read_text())
    everything = [*tasks.train, *tasks.eval]
    assert len(everything) == len(records) == tasks.notes["rows"] and tasks.notes["unusable"] == 0
    names = list(dict.fromkeys(record["db_id"] for record in records))
    assert {task["db_id"] for task in tasks.eval} == set(names[-2:]) and {task["db_id"] for task in tasks.train} == set(names[:-2])
    assert names[-1] in tasks.notes["split"]
    env = tasks.make_env()
    for task in everything:
        env.reset(task)
        assert env.step(env.oracle_action())[4]["rewards"] == {"format": 1.0, "executes": 1.0, "result": 1.0}
        env.reset(task)
        assert env.step("<think></think><sql>SELECT 'never this'</sql>")[4]["success"] == 0.0
    messages = env.reset(next(task for task in everything if task["db_id"] == "concert_singer"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"] and all(tag in messages[0]["content"] for tag in sql_score.TAGS)
    assert "singer ( Singer_ID int primary key , Name text" in messages[-1]["content"]
    assert "foreign key ( Stadium_ID ) references stadium ( Stadium_ID )" in messages[-1]["content"]


def spider_folder(root: Path, records, train=None, databases=("a", "b", "c", "d", "e")) -> Path:
    for name in databases:
        make_database(root / "database" / name / f"{name}.sqlite")
    (root / "dev.json").write_text(json.dumps(records))
    if train is not None:
        (root / "train_spider.json").write_text(json.dumps(train))
    return root


def record(db_id: str, query: str = "SELECT name FROM singer", **more):
    return {"db_id": db_id, "question": "Which names?", "query": query, **more}


def test_training_file_and_split(tmp_path):
    tasks = load(f"sql:{spider_folder(tmp_path / 'x', [record('a')], [record('b'), record('c')])}")
    assert [t["db_id"] for t in tasks.eval] == ["a"] and {t["id"] for t in tasks.train} == {"train_spider-00000", "train_spider-00001"}
    tasks = load(f"sql:{spider_folder(tmp_path / 'y', [record(name) for name in 'eabcd'])}")
    assert [t["db_id"] for t in tasks.eval] == ["d"] and len(tasks.train) == 4


def test_bird_folder(tmp_path):
    root = tmp_path / "bird"
    for folder, name in (("dev_databases", "a"), ("train_databases", "b")):
        make_database(root / folder / name / f"{name}.sqlite")
    row = {"question": "Which?", "evidence": "old means age > 40", "SQL": "SELECT name, age FROM singer", "difficulty": "challenging"}
    (root / "dev.json").write_text(json.dumps([{**row, "db_id": "a"}]))
    (root / "train.json").write_text(json.dumps([{**row, "db_id": "b", "evidence": ""}]))
    tasks = load(f"sql:{root}")
    env = tasks.make_env()
    task = tasks.eval[0]
    assert env.reset(task)[-1]["content"].endswith("Which?\nhint: old means age > 40") and task["difficulty"] == 3 and env.timeout_s == 30.0
    assert "hint" not in env.reset(tasks.train[0])[-1]["content"]
    for query, result in (("SELECT name, age FROM singer UNION ALL SELECT 'Ann', 30", 1.0), ("SELECT age, name FROM singer", 0.0)):
        env.reset(task)
        assert env.step(f"<think></think><sql>{query}</sql>")[4]["success"] == result
    (root / "dev.json").write_text(json.dumps([record("a")]))
    with pytest.raises(DataError, match="mix"):
        load(f"sql:{root}")


def test_several_files_in_a_folder_are_a_test_suite(tmp_path):
    root = spider_folder(tmp_path / "x", [record(name) for name in "abcde"])
    make_database(root / "database" / "e" / "other.sqlite", SCRIPT.replace("'Ann'", "'Eve'"))
    (task,) = load(f"sql:{root}").eval
    assert [Path(path).name for path in task["databases"]] == ["e.sqlite", "other.sqlite"] and Path(task["database"]).name == "e.sqlite"
    assert score_query(task, "VALUES ('Ann'), ('Bob'), ('Cid'), ('Dee')") == sql_score.Score(1.0, 0.0, sql_score.NO_ERROR)


def test_unusable_questions_are_counted_and_printed(tmp_path, capsys):
    records = [record(name) for name in "abcde"] + [record("nowhere"), record("a", "SELECT nope FROM singer"), record("bad")]
    root = spider_folder(tmp_path / "x", records)
    (root / "database" / "bad").mkdir()
    (root / "database" / "bad" / "bad.sqlite").write_text("no database")
    for _ in range(2):  # the second time from the cache of checks
        tasks = load(f"sql:{root}")
        assert tasks.notes["unusable"] == 3 and len(tasks.train) + len(tasks.eval) == 5
        printed = capsys.readouterr().out
        for part in (
            "3 questions left out",
            "dev-00005: no file",
            "nowhere.sqlite",
            "dev-00006: reference query fails on a.sqlite: no such column: nope",
            "file is not a database",
        ):
            assert part in printed and (part in printed.splitlines()[0] or any(part in line for line in tasks.notes["problems"]))


BAD_FILES = [
    ("not json", "not readable as JSON"),
    ("{}", "non-empty JSON list"),
    ("[]", "non-empty JSON list"),
    ("[3]", "record 0: expected an object"),
    (json.dumps([record("a"), {"db_id": "a", "query": "SELECT 1"}]), r"dev.json: record 1: field 'question'"),
    (json.dumps([{"db_id": "a", "question": "q"}]), "record 0: field 'query'"),
    (json.dumps([{"question": "q", "query": "SELECT 1"}]), "record 0: field 'db_id'"),
    (json.dumps([record("a"), record("a", " ")]), "record 1: field 'query'"),
    (json.dumps([record("../a")]), "record 0: field 'db_id' '../a' is not a plain folder name"),
    (json.dumps([record("..")]), "plain folder name"),
    (json.dumps([record("a", evidence=3)]), "record 0: field 'evidence'"),
    (json.dumps([record("a"), record("a")]), "only one usable database, a"),
    (json.dumps([record("zzz")]), "no usable evaluation task"),
    (json.dumps([record("a", "SELECT nope")]), "no such column: nope"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_malformed_files(tmp_path, text, message):
    root = spider_folder(tmp_path / "x", [])
    (root / "dev.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load(f"sql:{root}")


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load(f"sql:{tmp_path / 'none'}")
    with pytest.raises(DataError, match=r"dev.json: missing"):
        load(f"sql:{tmp_path}")


def test_odd_identifiers_are_quoted(tmp_path):
    path = make_database(
        tmp_path / "odd.sqlite", 'CREATE TABLE "order" ("full name" TEXT, "group" INT, plain, PRIMARY KEY (plain)); CREATE TABLE sqlitex(a INT)'
    )
    assert sql.schema_text(path) == '"order" ( "full name" text , "group" int , plain primary key ) ;\nsqlitex ( a int )'
    shutil.copy(path, tmp_path / "copy.sqlite")
    assert sql.schema_text(tmp_path / "copy.sqlite") == sql.schema_text(path)
