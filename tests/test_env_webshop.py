"""The shop: pages and clicks, the published reward on hand cases, the oracle from anywhere, snapshots, WebShop's own files."""

import json
import random

import pytest
from conftest import real_data
from hypothesis import given, settings
from hypothesis import strategies as st

from common import envs
from common.envs import webshop
from common.envs.webshop import Product, parse_action, purchase_reward, type_score, wanted_options


@pytest.fixture(scope="module")
def shop():
    return envs.load("webshop")


SHIRT = Product(
    "b1", "acme soft cotton shirt", 24.0, "shirt", ("shop", "clothes", "shirt"), "a shirt", ("machine wash",), ("soft", "easy care"),
    {"color": ("dark blue", "red"), "size": ("small", "large")},
)  # fmt: skip
GOAL = {
    "asin": "b1", "title": "acme soft cotton shirt", "query": "shirt", "categories": ["shop", "clothes", "shirt"], "attributes": ["soft", "machine wash"],
    "options": ["blue"], "price_limit": 30.0,
}  # fmt: skip


def test_reward_by_hand():
    assert purchase_reward(SHIRT, GOAL, {"color": "dark blue"})["reward"] == 1.0  # 2 attributes (one in a bullet), 1 option by its plain colour, price
    assert purchase_reward(SHIRT, GOAL, {"color": "red"})["reward"] == pytest.approx(3 / 4)
    assert purchase_reward(SHIRT, {**GOAL, "price_limit": 20.0}, {"color": "dark blue"})["reward"] == pytest.approx(3 / 4)
    assert purchase_reward(SHIRT, {**GOAL, "attributes": ["waterproof", "soft"]}, {})["reward"] == pytest.approx(2 / 4)
    parts = purchase_reward(SHIRT, GOAL, {})
    assert (parts["attributes"], parts["options"], parts["price"], parts["type"]) == (1.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "title, query, categories, expected",
    [
        ("soft cotton shirt", "shirt", ("x",), 1.0),  # the same query
        ("acme lamp", "lamp", ("shop", "clothes", "lamp"), 1.0),  # two shared categories
        ("acme lamp", "lamp", ("x",), 1.0),  # a quarter of the title's words
        ("steel lamp", "lamp", ("x",), 0.0),  # nothing in common
    ],
)
def test_kinds_of_products(title, query, categories, expected):
    assert type_score(SHIRT._replace(title=title, query=query, categories=categories), GOAL) == expected


def test_little_in_common_is_worth_little():
    goal = {**GOAL, "title": "one two three four five six seven eight nine ten eleven shirt"}
    assert type_score(SHIRT._replace(query="x", categories=(), title="cotton shirt"), goal) == 0.1
    assert type_score(SHIRT._replace(query="x", categories=(), title="shirt seven"), {**goal, "title": " ".join(goal["title"].split()[4:])}) == 1.0
    assert type_score(SHIRT._replace(query="x", categories=(), title="shirt"), {**goal, "title": "one two three four five six shirt"}) == 0.5


def test_options_match_without_case_and_punctuation():
    product = SHIRT._replace(options={"size": ("small | medium", "large")})
    assert wanted_options(product, ["Small/Medium"]) == {"size": "small | medium"}
    assert purchase_reward(product, {**GOAL, "options": ["small/medium"]}, {"size": "small | medium"})["options"] == 1.0


def test_actions():
    assert parse_action("I look for it\nsearch[red lamp]") == ("search", "red lamp")
    assert parse_action("<think>click[x]</think> CLICK[Buy Now]") == ("click", "Buy Now")
    for text in ("", "search red", "click[", "buy", "search[a] then"):
        assert parse_action(text) == ("", "")


def test_an_episode_by_hand(shop):
    env, task = shop.make_env(), shop.eval[0]
    first = env.reset(task)
    assert first[-1]["content"].startswith(task["instruction"])
    observation, reward, terminated, truncated, info = env.step("click[Buy Now]")
    assert info["invalid"] and observation.startswith("Nothing happens.") and (reward, terminated, truncated) == (0.0, False, False)
    observation, *_, info = env.step(f"search[{task['goal']['title']}]")
    assert not info["invalid"] and task["goal"]["asin"] in observation.split()
    env.step(f"click[{task['goal']['asin'].upper()}]")
    assert env.page.name == "item"
    _, reward, terminated, _, info = env.step("click[Buy Now]")
    assert terminated and info["success"] == float(reward == 1.0) and info["rewards"]["reward"] == reward
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("search[x]")


def test_the_budget_of_turns(shop):
    env = shop.make_env()
    env.reset(shop.eval[0])
    outcomes = [env.step("dance") for _ in range(shop.max_turns)]
    assert [o[3] for o in outcomes] == [False] * (shop.max_turns - 1) + [True]
    assert outcomes[-1][4]["success"] == 0.0 and outcomes[-1][1] == 0.0


def wander(env, rng, steps):
    for _ in range(steps):
        choices = [a for a in env.admissible() if a != "click[Buy Now]"]
        env.step(rng.choice(choices).replace("WORDS", rng.choice(["soft shirt", "lamp", "zzz"])))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_oracle_buys_right_from_anywhere_and_a_branch_leaves_the_episode_alone(shop, seed):
    rng = random.Random(seed)
    env, task = shop.make_env(), rng.choice([*shop.eval, *shop.train])
    env.reset(task)
    wander(env, rng, rng.randrange(4))
    state, key, text = env.snapshot(), env.state_key(), env.observation()
    branch = shop.make_env()
    branch.restore(state)
    assert (branch.state_key(), branch.observation(), branch.remaining, branch.admissible()) == (key, text, env.remaining, env.admissible())
    branch.max_turns = 30  # the way back from a far page may be long
    while True:
        _, reward, terminated, truncated, info = branch.step(branch.oracle_action())
        if terminated or truncated:
            break
    assert reward == 1.0 == info["success"]
    assert (env.state_key(), env.observation()) == (key, text)


def test_splits_and_experts(shop):
    bought = {t["goal"]["asin"] for t in shop.train}
    for task in shop.eval:
        assert (task["goal"]["asin"] in bought) <= (task["split"] == "seen")
    assert len({t["id"] for t in [*shop.train, *shop.eval]}) == len(shop.train) + len(shop.eval)
    assert [t["id"] for t in envs.load("webshop").eval] == [t["id"] for t in shop.eval]
    rates = {}
    for name in ("demonstrate", "careless"):
        env, solved = shop.make_env(), 0.0
        for task in shop.train[:150]:
            env.reset(task)
            for message in getattr(shop, name)(task, random.Random(task["id"])):
                if message["role"] == "assistant":
                    last = env.step(message["content"])
            solved += last[4]["success"]
        rates[name] = solved / 150
    assert rates["demonstrate"] > 0.7 > 0.5 > rates["careless"] > 0.1


# ---------------------------------------------------------------------------------------------------- WebShop's files


def folder(tmp_path, **changes):
    files = {
        "items_shuffle_3.json": [
            {"asin": f"A{i}", "name": f"Thing {i} lamp", "pricing": "$12.99$25.00" if i else "", "product_category": "Home › Light", "query": "lamp",
             "small_description": ["bright"], "customization_options": {"Color": [{"value": " Red/Blue "}]}}
            for i in range(12)
        ],
        "items_ins_3.json": {f"A{i}": {"attributes": ["bright"], "instruction": f"find lamp {i}", "instruction_attributes": ["bright"]} for i in range(12)},
    }  # fmt: skip
    for name, content in (files | changes).items():
        if content is not None:
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_reads_the_published_layout(tmp_path):
    tasks = envs.load(f"webshop:{folder(tmp_path)}")
    assert len(tasks.train) + len(tasks.eval) == 12 and tasks.notes["products"] == 12
    env = tasks.make_env()
    text = env.reset(tasks.eval[0])[-1]["content"]
    assert text.startswith("WebShop [SEP] Instruction: [SEP] find lamp") and text.endswith("[SEP] Search")
    assert env.step("search[thing lamp]")[0].count("Thing") == 10 and "Next >" in env.clickables()
    env.step("click[Next >]")
    assert len(env.shown()) == 2
    env.step("click[< Prev]")
    env.step(f"click[{env.shown()[0].asin}]")
    assert "red | blue" in env.clickables() and "(chosen)" in env.step("click[red | blue]")[0]
    product = env.catalogue["a0"]
    assert product.price == 100.0 and 12.99 <= env.catalogue["a1"].price <= 25.0
    for task in tasks.eval:
        limit = task["goal"]["price_limit"]
        assert limit % 10 == 0 and env.catalogue[task["goal"]["asin"]].price < limit and f"lower than {limit:.2f} dollars" in task["instruction"]


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"items_shuffle_3.json": None}, "no file items_shuffle"),
        ({"items_ins_3.json": None}, "no file items_ins"),
        ({"items_shuffle_3.json": "[{"}, "not JSON"),
        ({"items_shuffle_3.json": "{}"}, "expected a list of products"),
        ({"items_shuffle_3.json": [{"asin": "A"}]}, r"product 1: needs the text fields 'asin' and 'name'"),
        ({"items_shuffle_3.json": [{"asin": "A", "name": "x", "pricing": ["cheap"]}]}, "field 'pricing'"),
        ({"items_shuffle_3.json": [{"asin": "A", "name": "x", "customization_options": [1]}]}, "field 'customization_options'"),
        ({"items_ins_3.json": "[]"}, "expected an object asin"),
        ({"items_ins_3.json": {"A1": {"attributes": []}}}, "no goal about any of the 12 products"),
    ],
)
def test_bad_files(tmp_path, changes, text):
    with pytest.raises(envs.DataError, match=text):
        envs.load(f"webshop:{folder(tmp_path, **changes)}")


def test_no_such_folder():
    with pytest.raises(envs.DataError, match="not a folder"):
        envs.load("webshop:/no/such")


def test_the_small_published_set():
    tasks = envs.load(f"webshop:{real_data('webshop_1000')}")
    assert tasks.notes == {"products": 1000, "goals": len(tasks.train) + len(tasks.eval), "human_goals": 13}
    assert not {t["goal"]["asin"] for t in tasks.train} & {t["goal"]["asin"] for t in tasks.eval}
    env, solved = tasks.make_env(), 0
    for task in tasks.eval[:40]:
        env.reset(task)
        while True:
            _, reward, terminated, truncated, _ = env.step(env.oracle_action())
            if terminated or truncated:
                break
        solved += reward == 1.0
    assert solved == 40
    assert webshop.MATCH == 85
