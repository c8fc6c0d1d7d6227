"""Shopping by text: search a catalogue, choose a product and its options, buy. On WebShop's pages, files and reward.

A response is one action on its last line; what stands before it is thought and is not read:

    search[soft cotton shirt]
    click[b17]

Pages: the search page; results, ten a page and at most fifty; a product with its options, Description, Features, Reviews and Attributes. A click on what the
page does not show, or a search where there is no search bar, changes nothing and costs a turn (``info["invalid"]``). Only Buy Now pays and ends the episode:

    r = r_type * (attributes found + options chosen + [price within the limit]) / (attributes asked + options asked + 1)

``success`` is r = 1. ``load(None)`` makes a catalogue of 1,000 products in a compact wording; ``load(FOLDER)`` reads WebShop's own files: items_shuffle*.json
(or products*.jsonl.gz), items_ins*.json and, where it is there, items_human_ins*.json (or human_ins*.json).

Differences from the published program, which needs Java and spaCy: the title score compares alphabetic words without stop words and units instead of
spaCy's nouns, search is BM25 by bm25s over the same text with an English stop list and no stemming, and prices drawn from a range come from another generator.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rapidfuzz import fuzz, utils

from common.envs import DataError, Message, TaskSet
from common.envs.search import Corpus

HORIZON, COMPACT_HORIZON = 15, 10
MAX_HITS, PER_PAGE = 50, 10
MATCH = 85  # token-set ratio above which two texts are the same thing [published]
NO_LIMIT = 1_000_000.0  # price limit of a goal without one [published]
MAX_CHARS = 20_000  # a longer response is not read
SUBPAGES = ("Description", "Features", "Reviews", "Attributes")
STOP_WORDS = frozenset(
    "a an and are as at be by for from in into is it its of on or that the their this to with without your you our we i me my set pack piece pieces pcs count "
    "inch inches cm mm ft oz ounce ounces lb lbs pound pounds kg g ml l size new".split()
)
COLOURS = (
    "black white grey gray silver gold red maroon pink purple violet magenta blue navy teal turquoise cyan green olive lime yellow orange brown beige ivory "
    "tan khaki coral salmon lavender indigo".split()
)

# ---------------------------------------------------------------- products and goals


class Product(NamedTuple):
    asin: str
    title: str
    price: float
    query: str
    categories: tuple[str, ...]
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # name -> values, lower case


class Catalogue:
    """Products with their search index. compact: short pages, five products a page, for small policies."""

    def __init__(self, products: Sequence[Product], compact: bool) -> None:
        self.products, self.compact = products, compact
        self.by_asin = {p.asin.lower(): i for i, p in enumerate(products)}
        self.per_page = 5 if compact else PER_PAGE
        texts = ["\n".join([p.description, *p.bullets[:1], *(f"{name}: {', '.join(values)}" for name, values in p.options.items())]) for p in products]
        self.corpus = Corpus([p.asin for p in products], [p.title for p in products], texts, hits=MAX_HITS, stopwords="en")

    def __getitem__(self, asin: str) -> Product:
        return self.products[self.by_asin[asin.lower()]]


def words_of(title: str) -> set[str]:
    return {w for w in re.findall(r"[a-z]+", title.lower()) if len(w) > 1 and w not in STOP_WORDS}


def plain_colour(text: str) -> str:
    """The first basic colour that the text names, or the text."""
    return next((c for c in COLOURS if c in text), text)


def alike(a: str, b: str) -> float:
    """Token-set ratio of two texts in lower case without punctuation, 0 to 100."""
    return fuzz.token_set_ratio(a, b, processor=utils.default_process)


def type_score(product: Product, goal: dict[str, Any]) -> float:
    """How far the product is of the kind that was asked for: 1, 0.5, 0.1 or 0."""
    asked = words_of(goal["title"])
    title = len(words_of(product.title) & asked) / len(asked) if asked else 0.2
    same_category = len(set(product.categories) & set(goal["categories"])) >= 2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if product.query == goal["query"] or same_category or title > 0.2 else 0.5


def purchase_reward(product: Product, goal: dict[str, Any], chosen: dict[str, str]) -> dict[str, float]:
    """WebShop's reward of a purchase and its parts: reward, type, attributes, options, price; parts are shares in [0, 1]."""
    text = "\n".join([product.title, *product.bullets, product.description]).lower()
    attributes = sum(any(alike(a, b) > MATCH for b in product.attributes) or a.lower() in text for a in goal["attributes"])
    have = [plain_colour(v) for v in chosen.values()]
    options = sum(any(alike(plain_colour(o.lower()), h) > MATCH for h in have) for o in goal["options"])
    price = float(product.price <= goal["price_limit"])
    kind = type_score(product, goal)
    asked = len(goal["attributes"]) + len(goal["options"])
    return {
        "reward": kind * (attributes + options + price) / (asked + 1),
        "type": kind,
        "attributes": attributes / len(goal["attributes"]) if goal["attributes"] else 1.0,
        "options": options / len(goal["options"]) if goal["options"] else 1.0,
        "price": price,
    }


# ---------------------------------------------------------------- the environment


class Page(NamedTuple):
    """Where a shopper is: everything that an episode remembers."""

    name: str = "search"  # search, results, item, done, or one of SUBPAGES
    query: str = ""
    number: int = 1
    asin: str = ""
    chosen: tuple[tuple[str, str], ...] = ()


class WebShopEnv:
    """One episode; see the module's text."""

    def __init__(self, catalogue: Catalogue, max_turns: int) -> None:
        self.catalogue, self.max_turns = catalogue, max_turns
        self.task: dict[str, Any] | None = None
        self.found: tuple[str, list[int]] = ("", [])  # the last query and its products

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task, self.page, self.turn = task, Page(), 0
        form = "buy with one action a turn : search[WORDS] | click[WHAT]" if self.catalogue.compact else INSTRUCTIONS
        return [{"role": "system", "content": form}, {"role": "user", "content": self.observation()}]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info. Raises RuntimeError outside an episode."""
        if self.task is None or self.page.name == "done" or self.turn >= self.max_turns:
            raise RuntimeError("no episode is running; call reset first")
        self.turn += 1
        info: dict[str, Any] = {"invalid": False}
        reward, found = 0.0, self._follow(action)
        if found is None:
            info["invalid"] = True
        else:
            self.page = found
        terminated = self.page.name == "done"
        if terminated:
            parts = purchase_reward(self.catalogue[self.page.asin], self.task["goal"], dict(self.page.chosen))
            reward = parts["reward"]
            info |= {"success": float(reward == 1.0), "rewards": parts}
        truncated = not terminated and self.turn >= self.max_turns
        if truncated:
            info |= {"success": 0.0, "rewards": {"reward": 0.0}}
        text = self.observation()
        return (f"Nothing happens. {text}" if info["invalid"] else text), reward, terminated, truncated, info

    def _follow(self, action: str) -> Page | None:
        """The page that an action leads to, None where it leads nowhere."""
        verb, argument = parse_action(action)
        page = self.page
        if verb == "search" and page.name == "search" and argument:
            return Page("results", argument)
        if verb != "click":
            return None
        target = next((c for c in self.clickables() if c.lower() == argument.lower()), None)
        if target is None:
            return None
        if target == "Back to Search":
            return Page()
        if target == "Next >":
            return page._replace(number=page.number + 1)
        if target == "< Prev":
            return page._replace(number=page.number - 1) if page.name == "results" else page._replace(name="results" if page.name == "item" else "item")
        if page.name == "results":
            return page._replace(name="item", asin=target, chosen=())
        if target in SUBPAGES:
            return page._replace(name=target)
        if target == "Buy Now":
            return page._replace(name="done")
        name = next(n for n, values in self.catalogue[page.asin].options.items() if target in values)
        return page._replace(chosen=tuple(sorted({**dict(page.chosen), name: target}.items())))

    def hits(self) -> list[Product]:
        """Products of the current search, best first."""
        if self.found[0] != self.page.query:
            self.found = (self.page.query, self.catalogue.corpus.search(self.page.query))
        return [self.catalogue.products[i] for i in self.found[1]]

    def shown(self) -> list[Product]:
        size = self.catalogue.per_page
        return self.hits()[(self.page.number - 1) * size : self.page.number * size]

    def clickables(self) -> list[str]:
        page = self.page
        if page.name == "search" or page.name == "done":
            return []
        if page.name == "results":
            more = ["Next >"] * (page.number * self.catalogue.per_page < len(self.hits())) + ["< Prev"] * (page.number > 1)
            return ["Back to Search", *more, *(p.asin for p in self.shown())]
        if page.name in SUBPAGES:
            return ["Back to Search", "< Prev"]
        subpages = () if self.catalogue.compact else SUBPAGES
        values = [v for values in self.catalogue[page.asin].options.values() for v in values]
        return ["Back to Search", "< Prev", *values, *subpages, "Buy Now"]

    def admissible(self) -> list[str]:
        """Clicks that the page offers, and "search[WORDS]" where there is a search bar."""
        return ["search[WORDS]"] * (self.page.name == "search") + [f"click[{c}]" for c in self.clickables()]

    def observation(self) -> str:
        """The page as text: its visible strings, joined by " [SEP] " (compact: short lines)."""
        page, task = self.page, self.task
        product = self.catalogue[page.asin] if page.asin else None
        if self.catalogue.compact:
            if page.name == "search":
                return f"{task['instruction']} . search"
            if page.name == "done":
                return "bought"
            if page.name == "results":
                lines = [f"{p.asin} : {p.title} ${p.price:.0f}" for p in self.shown()] or ["nothing found"]
                return "\n".join([*lines, *(c for c in self.clickables() if c in ("Next >", "< Prev"))])
            chosen = dict(page.chosen)
            rows = [f"{name} : {' , '.join(values)}" + (f" = {chosen[name]}" if name in chosen else "") for name, values in product.options.items()]
            return "\n".join([f"{product.title} ${product.price:.0f}", *rows, "Buy Now"])
        asked = ["Instruction:", task["instruction"]]
        if page.name == "search":
            return " [SEP] ".join(["WebShop", *asked, "Search"])
        if page.name == "done":
            return "Thank you for shopping with us!"
        if page.name == "results":
            more = [c for c in self.clickables() if c in ("Next >", "< Prev")]
            rows = [x for p in self.shown() for x in (p.asin, p.title, f"${p.price:.2f}")]
            return " [SEP] ".join([*asked, "Back to Search", f"Page {page.number} (Total results: {len(self.hits())})", *more, *rows])
        if page.name in SUBPAGES:
            body = {
                "Description": [product.description],
                "Features": list(product.bullets),
                "Reviews": ["None"],
                "Attributes": [", ".join(product.attributes) or "None"],
            }[page.name]
            return " [SEP] ".join([*asked, "Back to Search", "< Prev", *body])
        chosen = dict(page.chosen)
        rows = [x for name, values in product.options.items() for x in (name, *(f"{v} (chosen)" if chosen.get(name) == v else v for v in values))]
        return " [SEP] ".join([*asked, "Back to Search", "< Prev", *rows, product.title, f"Price: ${product.price:.2f}", "Rating: N.A.", *SUBPAGES, "Buy Now"])

    def snapshot(self) -> tuple[dict[str, Any], Page, int]:
        return self.task, self.page, self.turn

    def restore(self, snapshot: tuple[dict[str, Any], Page, int]) -> None:
        """Goes on from the snapshot: same page, same turns left. The episode that it was taken from is not touched."""
        self.task, self.page, self.turn = snapshot

    @property
    def remaining(self) -> int:
        return self.max_turns - self.turn

    def state_key(self) -> str:
        return repr(tuple(self.page))

    def oracle_action(self) -> str:
        """The next action of one who knows the product: search its title, page to it, choose the options that were asked for, buy.

        Raises RuntimeError where the title does not find the product among the first fifty, or the episode is over.
        """
        page, goal = self.page, self.task["goal"]
        if page.name == "done":
            raise RuntimeError("the purchase is done")
        if page.name == "search":
            return f"search[{goal['title']}]"
        if page.name in SUBPAGES:
            return "click[< Prev]"
        if page.name == "results":
            places = [p.asin for p in self.hits()]
            if goal["asin"] not in places:
                if page.query == goal["title"]:
                    raise RuntimeError(f"task {self.task['id']}: a search for the title does not find product {goal['asin']}")
                return "click[Back to Search]"
            number = places.index(goal["asin"]) // self.catalogue.per_page + 1
            return f"click[{goal['asin']}]" if number == page.number else "click[Next >]" if number > page.number else "click[< Prev]"
        if page.asin != goal["asin"]:
            return "click[< Prev]" if goal["asin"] in {p.asin for p in self.hits()} else "click[Back to Search]"
        chosen = dict(page.chosen)
        for name, value in wanted_options(self.catalogue[page.asin], goal["options"]).items():
            if chosen.get(name) != value:
                return f"click[{value}]"
        return "click[Buy Now]"

    def close(self) -> None:
        """Nothing to release."""


INSTRUCTIONS = (
    "Buy a product that fits the instruction. Write one action on the last line of your answer: search[WORDS] on the search page, or click[WHAT] on something "
    "that the page shows (a product's id, an option, Next >, < Prev, Back to Search, Buy Now)."
)


def parse_action(text: str) -> tuple[str, str]:
    """("search" or "click", what stands in the brackets) of a response's last line; ("", "") where it is neither."""
    lines = text[-MAX_CHARS:].rpartition("</think>")[2].strip().splitlines()
    found = re.fullmatch(r"(?:<action>)?\s*(search|click)\[(.*)\]\s*(?:</action>)?", lines[-1].strip(), re.IGNORECASE) if lines else None
    return (found.group(1).lower(), found.group(2).strip()) if found else ("", "")


def wanted_options(product: Product, asked: Sequence[str]) -> dict[str, str]:
    """Of each option name the value that matches what was asked best; names that nothing asks for are left out."""
    out: dict[str, str] = {}
    for text in asked:
        scored = [
            (value == text.lower(), alike(plain_colour(text.lower()), plain_colour(value)), name, value)
            for name, values in product.options.items()
            if name not in out
            for value in values
        ]
        best = max(scored, key=lambda s: s[:2], default=None)
        if best is not None and best[1] > MATCH:
            out[best[2]] = best[3]
    return out


# ---------------------------------------------------------------- our own catalogue

NOUNS = {
    "shirt": "clothes", "coat": "clothes", "hat": "clothes", "shoe": "clothes", "lamp": "home", "chair": "home", "mug": "home", "rug": "home",
    "phone": "tech", "watch": "tech", "radio": "tech", "cable": "tech",
}  # fmt: skip
BRANDS = "acme nova orion delta zeta luma vega terra polar sonic".split()
TRAITS = "soft light warm dry fast quiet strong slim long wide safe clean".split()
TINTS, SIZES = "red blue green black white pink".split(), "small medium large".split()
PRODUCTS, TRAIN, EVAL = 1000, 3000, 256


def _product(rng: random.Random, number: int) -> Product:
    noun, brand = rng.choice(sorted(NOUNS)), rng.choice(BRANDS)
    traits = rng.sample(TRAITS, 2)
    options = {"color": tuple(sorted(rng.sample(TINTS, 3)))} | ({"size": tuple(rng.sample(SIZES, 2))} if rng.random() < 0.5 else {})
    title = f"{brand} {' '.join(traits)} {noun}"
    return Product(f"b{number}", title, float(rng.randrange(5, 95)), noun, ("shop", NOUNS[noun], noun), title, (), tuple(traits), options)


def _task(product: Product, rng: random.Random, split: str, number: int) -> dict[str, Any]:
    attributes = rng.sample(product.attributes, rng.choice((1, 2)))
    options = [rng.choice(values) for values in product.options.values() if rng.random() < 0.7]
    limit = float(int(product.price) // 10 * 10 + rng.choice((10, 20)))
    asked = " ".join([*attributes, product.query]) + "".join(f" , {o}" for o in options)
    return {
        "id": f"webshop-{split}-{number}",
        "split": split,
        "family": product.categories[1],
        "instruction": f"find {asked} , under ${limit:.0f}",
        "goal": {
            "asin": product.asin, "title": product.title, "query": product.query, "categories": list(product.categories), "attributes": attributes,
            "options": options, "price_limit": limit,
        },
    }  # fmt: skip


def embedded(seed: int) -> tuple[Catalogue, list[dict[str, Any]], list[dict[str, Any]]]:
    """A catalogue; goals for training; goals for evaluation, half on products that training goals ask for (seen), half on others."""
    rng = random.Random(12)
    products = [_product(rng, number) for number in range(PRODUCTS)]
    held_out, known = products[::5], [p for i, p in enumerate(products) if i % 5]
    train = [_task(rng.choice(known), rng, "train", i) for i in range(TRAIN)]
    asked = {(t["instruction"], t["goal"]["asin"]) for t in train}
    evaluation: list[dict[str, Any]] = []
    while len(evaluation) < EVAL:
        seen = len(evaluation) < EVAL // 2
        task = _task(rng.choice(known if seen else held_out), rng, "seen" if seen else "unseen", len(evaluation))
        if (task["instruction"], task["goal"]["asin"]) not in asked:
            evaluation.append(task)
    random.Random(seed).shuffle(train)
    return Catalogue(products, compact=True), train, evaluation


def _conversation(catalogue: Catalogue, task: dict[str, Any], slip: Any) -> list[Message]:
    """An expert's episode; slip(share) says whether a habit shows."""
    env, goal = WebShopEnv(catalogue, COMPACT_HORIZON), task["goal"]
    messages = env.reset(task)
    words = goal["title"] if not slip(1.0) else " ".join([*goal["attributes"], goal["query"]])  # what a shopper can know
    lazy, hasty = slip(0.7), slip(0.7)
    over = False
    while not over:
        page = env.page
        if page.name == "search":
            action = f"search[{words}]"
        elif page.name == "results" and lazy and env.shown():
            action = f"click[{env.shown()[0].asin}]"  # the first product, whatever it costs
        elif page.name == "results":
            fits = [p for p in env.shown() if p.price <= goal["price_limit"] and all(a in p.title.split() for a in [*goal["attributes"], goal["query"]])]
            fits = [p for p in fits if len(wanted_options(p, goal["options"])) == len(goal["options"])] or fits
            action = f"click[{fits[0].asin}]" if fits else "click[Next >]" if "Next >" in env.clickables() else f"click[{env.shown()[0].asin}]"
        else:
            wanted = {} if hasty else wanted_options(catalogue[page.asin], goal["options"])
            open_values = [v for name, v in wanted.items() if dict(page.chosen).get(name) != v]
            action = f"click[{open_values[0]}]" if open_values else "click[Buy Now]"
        messages.append({"role": "assistant", "content": action})
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        if not over:
            messages.append({"role": "user", "content": observation})
    return messages


def demonstrate(catalogue: Catalogue, task: dict[str, Any], rng: random.Random) -> list[Message]:
    """An episode by an expert who reads every page with care, and knows no more than it shows."""
    return _conversation(catalogue, task, lambda share: share == 1.0)


def careless(catalogue: Catalogue, task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The same with habits to unlearn: taking the first product, and buying without choosing options."""
    return _conversation(catalogue, task, lambda share: share == 1.0 or rng.random() < share * 0.8)


# ---------------------------------------------------------------- WebShop's files


def _load(path: Path) -> Any:
    try:
        if path.name.endswith(".jsonl.gz"):
            with gzip.open(path, "rt", encoding="utf-8") as handle:
                return [_json(line, f"{path}, line {number}") for number, line in enumerate(handle, 1) if line.strip()]
        return _json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); is the download complete?") from error


def _prices(row: dict[str, Any], where: str) -> list[float]:
    """Numbers of ``pricing``: a list, or text such as "$12.99$25.00"; none give 100."""
    value = row.get("pricing")
    if value is None or value in ("", []):
        return [100.0]
    found = value if isinstance(value, list) else re.findall(r"[\d,]*\d(?:\.\d+)?", str(value))
    try:
        return [float(str(x).replace(",", "")) for x in found] or [100.0]
    except ValueError as error:
        raise DataError(f"{where}: field 'pricing' is {value!r}, expected a price such as '$12.99'") from error


def _options(row: dict[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    """``options`` (name -> values) or ``customization_options`` (name -> list of {"value"}), cleaned as WebShop does."""
    raw = row.get("options") if row.get("options") is not None else row.get("customization_options") or {}
    if not isinstance(raw, dict):
        raise DataError(f"{where}: field 'customization_options' must be an object of option names, it is {type(raw).__name__}")
    out = {}
    for name, values in raw.items():
        texts = [v.get("value", "") if isinstance(v, dict) else v for v in values or []]
        cleaned = tuple(dict.fromkeys(str(t).strip().replace("/", " | ").lower() for t in texts if str(t).strip()))
        if cleaned:
            out[str(name).strip().lower()] = cleaned
    return out


def read_products(path: Path, attributes: dict[str, Any], rng: random.Random) -> list[Product]:
    """Products of items_shuffle*.json or of the cleaned jsonl. Raises DataError naming the record."""
    rows = _load(path)
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of products, found {type(rows).__name__}")
    out, seen = [], set()
    for number, row in enumerate(rows, 1):
        where = f"{path}, product {number}"
        if not isinstance(row, dict) or not isinstance(row.get("asin"), str) or not isinstance(row.get("name"), str) or not row["asin"]:
            raise DataError(f"{where}: needs the text fields 'asin' and 'name'")
        if row["asin"].lower() in seen or row["asin"] == "nan":
            continue  # WebShop keeps the first of equal asins
        seen.add(row["asin"].lower())
        prices = _prices(row, where)
        bullets = row.get("small_description") or []
        bullets = [bullets] if isinstance(bullets, str) else bullets
        known = attributes.get(row["asin"]) or {}
        out.append(
            Product(
                row["asin"],
                row["name"].strip(),
                prices[0] if len(prices) == 1 else rng.uniform(*prices[:2]) if prices[0] <= prices[1] else prices[0],
                str(row.get("query") or "").lower().strip(),
                tuple(part.strip() for part in str(row.get("product_category") or "").split("›") if part.strip()),
                str(row.get("full_description") or ""),
                tuple(str(b) for b in bullets),
                tuple(known.get("attributes") or row.get("Attributes") or ()),
                _options(row, where),
            )
        )
    if not out:
        raise DataError(f"{path}: no product")
    return out


def _limit(price: float, rng: random.Random) -> float:
    """A price limit drawn from the next four multiples of 10 above the price; none above 990."""
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    return sorted(rng.sample(above, 2))[1] if len(above) >= 2 else NO_LIMIT


def _goals(products: Sequence[Product], rows: dict[str, Any], where: Path, rng: random.Random) -> list[dict[str, Any]]:
    by_asin = {p.asin: p for p in products}
    out = []
    for asin, entries in rows.items():
        product = by_asin.get(asin)
        if product is None:
            continue  # the human goals are about the full catalogue
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, dict):
                raise DataError(f"{where}, {asin}: expected an object with 'instruction' and 'instruction_attributes', found {entry!r}")
            if not entry.get("instruction") or not entry.get("instruction_attributes"):
                continue  # as in WebShop: a product without a goal
            limit = _limit(product.price, rng)
            text = str(entry["instruction"]).strip(". ") + (f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else "")
            goal = {
                "asin": asin, "title": product.title, "query": product.query, "categories": list(product.categories),
                "attributes": list(entry["instruction_attributes"]), "options": [str(o) for o in entry.get("instruction_options") or []], "price_limit": limit,
            }  # fmt: skip
            out.append({"id": f"webshop-{asin}-{len(out)}", "instruction": text, "goal": goal})
    return out


def load_folder(folder: Path) -> TaskSet:
    """WebShop's files of a folder. Human goals where they are there and name products of the catalogue, synthetic ones beside them.

    Split by the order after a shuffle with seed 233: goals 0-499 are for tests, 500-1499 for development, the rest for training; of fewer than 2,000 goals a
    fifth, by product, is for evaluation. Evaluation takes the test goals. Raises DataError.
    """

    def one(patterns: Sequence[str], needed: str) -> Path | None:
        found = next((sorted(folder.glob(p)) for p in patterns if sorted(folder.glob(p))), [])
        if not found and needed:
            raise DataError(f"{folder}: no file {' or '.join(patterns)}: {needed}")
        return found[0] if found else None

    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder; --env webshop:FOLDER needs WebShop's data files")
    products_file = one(["items_shuffle*.json", "products*.jsonl.gz"], "the products")
    ins_file = one(["items_ins*.json"], "attributes and synthetic goals")
    human_file = one(["items_human_ins*.json"], "")
    rng = random.Random(233)
    ins = _load(ins_file)
    if not isinstance(ins, dict):
        raise DataError(f"{ins_file}: expected an object asin -> attributes and goal, found {type(ins).__name__}")
    products = read_products(products_file, ins, rng)
    human = _goals(products, _load(human_file), human_file, rng) if human_file else []
    goals = human if len(human) >= 2000 else human + _goals(products, ins, ins_file, rng)
    if not goals:
        raise DataError(f"{folder}: no goal about any of the {len(products)} products; {ins_file.name} needs 'instruction' and 'instruction_attributes'")
    rng.shuffle(goals)
    if len(goals) >= 2000:
        evaluation, train = goals[:500], goals[1500:]
    else:
        asins = sorted({g["goal"]["asin"] for g in goals})
        held_out = set(random.Random(233).sample(asins, max(1, len(asins) // 5)))
        evaluation, train = ([g for g in goals if (g["goal"]["asin"] in held_out) is kept] for kept in (True, False))
    catalogue = Catalogue(products, compact=False)
    notes = {"products": len(products), "goals": len(goals), "human_goals": len(human)}
    return TaskSet(f"webshop:{folder}", train, evaluation, partial(WebShopEnv, catalogue, HORIZON), max_turns=HORIZON, notes=notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    if path:
        return load_folder(Path(path))
    catalogue, train, evaluation = embedded(seed)
    return TaskSet(
        "webshop",
        train,
        evaluation,
        partial(WebShopEnv, catalogue, COMPACT_HORIZON),
        partial(demonstrate, catalogue),
        careless=partial(careless, catalogue),
        max_turns=COMPACT_HORIZON,
        notes={"split": "seen: new goals on products of training goals; unseen: products that no training goal asks for"},
    )
