"""Instruction following, single-turn: each prompt carries constraints that plain code can verify, and each constraint is a binary reward of its own.

Embedded tasks have 5 to 13 constraints out of 45 types of ours, drawn so that a written demonstration satisfies all of them. Real data are IFEval's
(25 types under their published ids, Zhou et al. 2023); verdicts follow its strict rules, ``info["loose"]`` its loose ones (best of eight variants).

``rewards`` is keyed by constraint id (a second occurrence in a real prompt becomes ``id#2``), ``verifier_text`` holds the wording of each constraint, or ""
for the ids in ``UNLOCALISED``: a length has no place in the text. ``success`` = all constraints hold; ``info["instruction_accuracy"]`` = share that holds.

Checks use ``str`` and ``re`` only, with patterns that take linear time; texts over ``MAX_CHARS`` characters get 0 throughout.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet

MAX_CHARS = 20_000
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A constraint type: its wording (filled from the kwargs), its check ``(text, kwargs) -> bool``, and for IFEval the kwargs it needs (name -> type)."""

    wording: str
    check: Callable[[str, Kwargs], bool]
    kwargs: dict[str, type] = field(default_factory=dict)


# ---------------------------------------------------------------- our own types


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _has_phrase(text: str, phrase: str) -> bool:
    """Whether the phrase's words occur one after the other, in any case and whatever stands between them."""
    return f" {' '.join(_words(phrase))} " in f" {' '.join(_words(text))} "


def count_marks(text: str) -> int:
    """Sentences of an embedded task: a mark ``.!?`` before a space, a closing mark or the end; "P.S." and the numbers of a list do not count."""
    return len(re.findall(r"[.!?](?=[\s\"}]|$)", re.sub(r"P\.S\.|^[ \t]*+\d++\.", "", text, flags=re.MULTILINE)))


def _before(text: str, first: str, second: str) -> bool:
    words = _words(text)
    return first in words and second in words and words.index(first) < words.index(second)


def _numbered(text: str, count: int) -> bool:
    """Whether the lines that begin with a number and a dot are 1. to ``count``. in order."""
    return [match.group(1) for line in _lines(text) if (match := re.match(r"(\d{1,9})\. \S", line))] == [str(n + 1) for n in range(count)]


def _wrapped(text: str, first: str, last: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] == first and text[-1] == last


def _final(text: str) -> str:
    """The text without what may close a wrapped response."""
    return text.rstrip(' \t\n"}')


def _two_parts(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


KINDS: dict[str, Kind] = {
    # words
    "topic": Kind("write about: {word}", lambda t, k: k["word"] in _words(t)),
    "include": Kind("use the word: {word}", lambda t, k: k["word"] in _words(t)),
    "count": Kind("use {count} times: {word}", lambda t, k: _words(t).count(k["word"]) == k["count"]),
    "avoid": Kind("do not use: {word}", lambda t, k: k["word"] not in _words(t)),
    "avoid_small": Kind("never use: {word}", lambda t, k: k["word"] not in _words(t)),
    "order": Kind("use {first} before {second}", lambda t, k: _before(t, k["first"], k["second"])),
    "phrase": Kind("use the phrase: {phrase}", lambda t, k: re.search(rf"\b{k['phrase']}\b", " ".join(t.lower().split())) is not None),
    "capital": Kind("write in capitals: {word}", lambda t, k: k["word"] in re.findall(r"\w+", t)),
    "number": Kind("use the number: {number}", lambda t, k: str(k["number"]) in _words(t)),
    "twice": Kind("say a word twice in a row", lambda t, k: any(a == b and a.isalnum() for a, b in itertools.pairwise(t.lower().split()))),
    "greet": Kind("say hello to: {name}", lambda t, k: _has_phrase(t, f"hello {k['name']}")),
    "by": Kind("name the writer: by {name}", lambda t, k: _has_phrase(t, f"by {k['name']}")),
    # begin and end
    "start_word": Kind("start with: {word}", lambda t, k: _words(t)[:1] == [k["word"]]),
    "echo": Kind("first repeat: {phrase}", lambda t, k: t.lstrip().lower().startswith(k["phrase"])),
    "end_word": Kind("end with the word: {word}", lambda t, k: _words(t)[-1:] == [k["word"]]),
    "end_phrase": Kind("end with: {phrase}", lambda t, k: f" {' '.join(_words(t))}".endswith(f" {k['phrase']}")),
    "end_question": Kind("end with a question mark", lambda t, k: _final(t).endswith("?")),
    "end_exclaim": Kind("end with an exclamation mark", lambda t, k: _final(t).endswith("!")),
    "quotes": Kind('wrap all in " "', lambda t, k: _wrapped(t, '"', '"')),
    "braces": Kind("wrap all in {{ }}", lambda t, k: _wrapped(t, "{", "}")),
    "postscript": Kind("add a P.S. line", lambda t, k: any(re.match(r"P\.S\. \S", line) for line in _lines(t))),
    # marks
    "title": Kind("add a title in << >>", lambda t, k: re.search(r"<<[^<>\n]++>>", t) is not None),
    "placeholders": Kind("placeholders in [ ]: {count}", lambda t, k: len(re.findall(r"\[[^\[\]\n]++\]", t)) == k["count"]),
    "highlights": Kind("words with * *: {count}", lambda t, k: len(re.findall(r"\*\w++\*", t)) == k["count"]),
    "question": Kind("ask exactly one question", lambda t, k: t.count("?") == 1),
    "exclaims": Kind("exclamation marks: {count}", lambda t, k: t.count("!") == k["count"]),
    "colon": Kind("use one colon", lambda t, k: t.count(":") == 1),
    "smiley": Kind("add a smiley :)", lambda t, k: ":)" in t),
    "commas": Kind("commas: {count}", lambda t, k: t.count(",") == k["count"]),
    "no_commas": Kind("use no commas", lambda t, k: "," not in t),
    "no_digits": Kind("use no digits", lambda t, k: not re.search(r"\d", t)),
    "lowercase": Kind("use only lower case", lambda t, k: t.islower()),
    # layout
    "bullets": Kind("bullets with -: {count}", lambda t, k: sum(line.startswith("- ") for line in _lines(t)) == k["count"]),
    "numbered": Kind("number a list up to: {count}", lambda t, k: _numbered(t, k["count"])),
    "two_parts": Kind("split two parts with ******", lambda t, k: _two_parts(t)),
    "separator": Kind("put one line: ---", lambda t, k: _lines(t).count("---") == 1),
    # lengths
    "words_max": Kind("words at most: {count}", lambda t, k: len(_words(t)) <= k["count"]),
    "words_min": Kind("words at least: {count}", lambda t, k: len(_words(t)) >= k["count"]),
    "words_even": Kind("an even number of words", lambda t, k: len(_words(t)) % 2 == 0),
    "sentences": Kind("sentences: {count}", lambda t, k: count_marks(t) == k["count"]),
    "lines": Kind("lines: {count}", lambda t, k: len(_lines(t)) == k["count"]),
    # kept out of training: new marks around words to copy
    "tag": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "pair": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "arrow": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "parens": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
}
HELD_OUT = ("tag", "pair", "arrow", "parens")  # types that occur in evaluation tasks with split "heldout_types" only
_LENGTHS = ("words_max", "words_min", "words_even", "sentences", "lines")
UNLOCALISED = frozenset((*_LENGTHS, "length_constraints:number_words", "length_constraints:number_sentences"))
_EXCLUSIVE = (  # at most one of each group in a prompt
    {"start_word", "echo"},
    {"echo", "quotes", "braces"},
    {"end_word", "end_phrase"},
    {"end_question", "end_exclaim", "question", "exclaims"},
    {"bullets", "numbered"},
    {"two_parts", "separator"},
    {"two_parts", "highlights"},
    {"commas", "no_commas"},
    {"colon", "smiley"},
    {"avoid", "avoid_small", "echo"},
    {"lowercase", "capital"},
    {"lowercase", "postscript"},
    {"no_digits", "number", "numbered"},
)

_NOUN_WORDS = """cat dog fish bird horse tree river moon sun star house door road boat train car book song letter apple bread soup cake garden flower stone
lake hill bridge window chair table lamp cup ring coat hat shoe"""
NOUNS = _NOUN_WORDS.split()
ADJECTIVES = ("red", "blue", "green", "old", "new", "big", "small", "cold")
NAMES = ("anna", "ben", "carl", "dora", "emma", "fred", "gina", "hugo")
STARTS = ("today", "now", "here", "maybe", "look", "well", "soon", "then")
ENDS = ("again", "outside", "tonight", "together", "slowly", "alone")
END_PHRASES = ("that is all", "see you soon", "so it goes", "have a nice day", "thank you all", "that was fun")
SUBJECTS = ("i", "we", "you", "they")
VERBS = ("see", "like", "find", "keep", "want", "need")
DETERMINERS = ("the", "my", "this")
JOINS = ("and", "or", "with")
PLACEHOLDERS = ("name", "place", "day", "time")
CAPITALS = ("MOON", "STAR", "RIVER", "HOUSE", "SONG", "BREAD")


def _sample_kwargs(rng: random.Random, name: str, nouns: list[str]) -> Kwargs:
    """Fresh kwargs of one type; ``nouns`` is a shuffled list that words are taken from, so that no word is asked for twice."""
    if name in ("topic", "include", "avoid"):
        return {"word": nouns.pop()}
    if name == "count":
        return {"count": rng.choice((2, 3)), "word": nouns.pop()}
    if name == "avoid_small":
        return {"word": rng.choice((*DETERMINERS, *JOINS))}
    if name == "order":
        return {"first": nouns.pop(), "second": nouns.pop()}
    if name == "phrase":
        return {"phrase": f"{rng.choice(ADJECTIVES)} {nouns.pop()}"}
    if name == "capital":
        return {"word": rng.choice([word for word in CAPITALS if word.lower() in nouns])}
    if name == "number":
        return {"number": rng.randint(4, 9)}
    if name in ("greet", "by"):
        return {"name": rng.choice(NAMES)}
    if name == "start_word":
        return {"word": rng.choice(STARTS)}
    if name == "echo":
        return {"phrase": f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(DETERMINERS)} {nouns.pop()}"}
    if name == "end_word":
        return {"word": rng.choice(ENDS)}
    if name == "end_phrase":
        return {"phrase": rng.choice(END_PHRASES)}
    if name in ("placeholders", "highlights", "exclaims", "commas"):
        return {"count": rng.choice((1, 2))}
    if name in ("bullets", "numbered"):
        return {"count": rng.choice((2, 3))}
    if name == "tag":
        return {"text": f"#{nouns.pop()}"}
    if name == "pair":
        return {"text": f"{nouns.pop()}={rng.choice(ADJECTIVES)}"}
    if name == "arrow":
        return {"text": f"{nouns.pop()} -> {nouns.pop()}"}
    if name == "parens":
        return {"text": f"({nouns.pop()})"}
    return {}


def _length_kwargs(rng: random.Random, name: str, text: str) -> Kwargs | None:
    """Kwargs of a length type that the text satisfies, or None where there are none. Word limits are multiples of five."""
    words = len(_words(text))
    if name == "words_max":
        return {"count": 5 * ((words + rng.randrange(5) + 4) // 5)}
    if name == "words_min":
        return {"count": 5 * ((words - rng.randrange(5)) // 5)} if words >= 10 else None
    if name == "words_even":
        return {} if words % 2 == 0 else None
    return {"count": count_marks(text) if name == "sentences" else len(_lines(text))}


def _chunks(constraints: list[dict[str, Any]], rng: random.Random, determiners: list[str], spare: list[str]) -> list[str]:
    """What the sentences talk about, in the order of the prompt."""

    def thing(word: str) -> str:
        return f"{rng.choice(determiners)} {word}"

    chunks: list[str] = []
    for constraint in constraints:
        name, kwargs = constraint["id"], constraint["kwargs"]
        if name in ("topic", "include", "capital"):
            chunks.append(thing(kwargs["word"]))
        elif name == "count":
            chunks += [thing(kwargs["word"]) for _ in range(kwargs["count"])]
        elif name == "order":
            chunks += [thing(kwargs["first"]), thing(kwargs["second"])]
        elif name == "phrase":
            chunks.append(thing(kwargs["phrase"]))
        elif name == "number":
            chunks.append(str(kwargs["number"]))
        elif name == "twice":
            chunks.append(thing(f"{(word := rng.choice(ADJECTIVES))} {word} {spare.pop()}"))
        elif name == "by":
            chunks.append(f"{thing(spare.pop())} by {kwargs['name']}")
        elif name == "smiley":
            chunks.append(f"{thing(spare.pop())} :)")
        elif name == "placeholders":
            chunks += [f"[{rng.choice(PLACEHOLDERS)}]" for _ in range(kwargs["count"])]
        elif name == "highlights":
            chunks += [thing(f"*{spare.pop()}*") for _ in range(kwargs["count"])]
        elif name in HELD_OUT:
            chunks.append(kwargs["text"])
    return chunks


def _mentioned(constraints: list[dict[str, Any]]) -> set[str]:
    return {word for constraint in constraints for value in constraint["kwargs"].values() if isinstance(value, str) for word in _words(value)}


def compose(constraints: list[dict[str, Any]], rng: random.Random) -> str:
    """A response that satisfies every constraint but the numbers of words, which are left to chance.

    ``constraints``: dicts with ``id`` and ``kwargs``, compatible as in ``_EXCLUSIVE``; counts of sentences and lines must come from a composition of the
    same other constraints.
    """
    wanted = {constraint["id"]: constraint["kwargs"] for constraint in constraints}
    unwanted = {wanted[name]["word"] for name in ("avoid", "avoid_small") if name in wanted}
    determiners = [word for word in DETERMINERS if word not in unwanted]
    joins = [word for word in JOINS if word not in unwanted]
    mentioned = _mentioned(constraints)
    spare = [noun for noun in NOUNS if noun not in mentioned]
    rng.shuffle(spare)
    chunks = _chunks(constraints, rng, determiners, spare)

    listed = wanted.get("bullets", wanted.get("numbered", {})).get("count", 0)
    echo, begins = "echo" in wanted, "echo" in wanted or "start_word" in wanted
    several = (
        listed or wanted.keys() & {"separator", "postscript", "two_parts"} or (begins and "title" in wanted) or (echo and wanted.keys() & {"greet", "colon"})
    )
    sentences = max(rng.choice((1, 2, 2, 3)), 2 if several else 1, wanted.get("exclaims", {}).get("count", 1))
    sentences = wanted.get("sentences", {}).get("count", sentences)
    commas_wanted = wanted.get("commas", {}).get("count", 0)
    while len(chunks) < sentences + commas_wanted + listed:
        chunks.insert(rng.randrange(len(chunks) + 1), f"{rng.choice(determiners)} {spare.pop()}")
    # chunks keep the order of the prompt: the sentences before the list, the list, the last sentence
    cuts = [index * (len(chunks) - listed) // sentences for index in range(sentences)]
    items = chunks[cuts[-1] : cuts[-1] + listed]
    shares = [chunks[start:stop] for start, stop in itertools.pairwise(cuts)] + [chunks[cuts[-1] + listed :]]

    # the sentences: a subject and a verb each, then the chunks
    joints = sum(map(len, shares)) - sentences
    if "commas" in wanted:
        commas = set(rng.sample(range(joints), commas_wanted))
    else:
        commas = set() if "no_commas" in wanted or rng.random() < 0.5 else {joint for joint in range(joints) if rng.random() < 0.5}
    bodies, joint = [], 0
    for index, share in enumerate(shares):
        body = f"{wanted['echo']['phrase']} {rng.choice(joins)}" if echo and index == 0 else f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)}"
        body += f" {share[0]}"
        for chunk in share[1:]:
            body += f", {chunk}" if joint in commas else f" {rng.choice(joins)} {chunk}"
            joint += 1
        bodies.append(body)
    lead = [f"hello {wanted['greet']['name']}"] if "greet" in wanted else []
    lead += ["note:"] if "colon" in wanted else []
    place = 1 if echo and lead else 0
    bodies[place] = " ".join([*lead, bodies[place]])
    if "start_word" in wanted:
        bodies[0] = f"{wanted['start_word']['word']} {bodies[0]}"
    ending = wanted.get("end_word", {}).get("word") or wanted.get("end_phrase", {}).get("phrase")
    bodies[-1] += f" {ending}" if ending else ""
    marks = ["."] * sentences
    for index in rng.sample(range(sentences), wanted["exclaims"]["count"]) if "exclaims" in wanted else ():
        marks[index] = "!"
    if "question" in wanted:
        marks[rng.randrange(sentences)] = "?"
    marks[-1] = "?" if "end_question" in wanted else "!" if "end_exclaim" in wanted else marks[-1]
    if "lowercase" not in wanted and rng.random() < 0.5:
        bodies = [body[0].upper() + body[1:] for body in bodies]
    bodies = [body + mark for body, mark in zip(bodies, marks)]

    # the layout: pieces in order, each with whether it must stand on a line of its own
    pieces = [(False, body) for body in bodies]
    if "postscript" in wanted:
        pieces[-1] = (True, f"P.S. {bodies[-1]}")
    inserted = [(True, "******")] if "two_parts" in wanted else [(True, "---")] if "separator" in wanted else []
    inserted += [(True, f"- {item}" if "bullets" in wanted else f"{number}. {item}") for number, item in enumerate(items, 1)]
    pieces[-1:-1] = inserted
    if "title" in wanted:
        pieces.insert(1 if begins else 0, (True, f"<<{spare.pop()}>>"))
    breaks = [first[0] or second[0] for first, second in itertools.pairwise(pieces)]
    free = [index for index, forced in enumerate(breaks) if not forced]
    extra = wanted["lines"]["count"] - 1 - sum(breaks) if "lines" in wanted else len(free) if rng.random() < 0.3 else 0
    for index in rng.sample(free, extra) if 0 < extra <= len(free) else ():
        breaks[index] = True
    text = pieces[0][1] + "".join(("\n" if line else " ") + piece for line, (_, piece) in zip(breaks, pieces[1:]))
    return f'"{text}"' if "quotes" in wanted else f"{{{text}}}" if "braces" in wanted else text


def _pieces(text: str) -> int:
    """Words and marks, a stand-in for the number of tokens."""
    return len(re.findall(r"\w+|[^\w\s]+", text))


_PLACES = {name: place for place, name in enumerate(KINDS)}
_SHOWN = [name for name in KINDS if name not in HELD_OUT and name != "topic"]
_CLASHES = {name: set().union(*(group for group in _EXCLUSIVE if name in group)) for name in KINDS}
MAX_PIECES = 56  # of a demonstration


def _task(rng: random.Random, split: str) -> dict[str, Any] | None:
    """One task, or None where the draw belongs to another split or gets too long."""
    count = rng.randint(5, 13)
    names = ["topic"] + (rng.sample(HELD_OUT, 2) if split == "heldout_types" else [])
    for name in rng.sample(_SHOWN, len(_SHOWN)):
        if len(names) == count:
            break
        if not _CLASHES[name].intersection(names) and not (name in _LENGTHS and sum(other in _LENGTHS for other in names) == 2):
            names.append(name)
    # a set of types is in one split only: which one follows from the places of its types in the table
    if split != "heldout_types" and (sum(_PLACES[name] for name in names) % 7 == 0) != (split == "eval"):
        return None
    rest = names[1:]
    rng.shuffle(rest)
    names = ["topic", *rest]
    nouns = rng.sample(NOUNS, len(NOUNS))
    constraints = [{"id": name, "kwargs": _sample_kwargs(rng, name, nouns)} for name in names if name not in _LENGTHS and name != "capital"]
    if "capital" in names:  # after the others, so that its word is none of theirs
        left = [noun for noun in NOUNS if noun not in _mentioned(constraints)]
        constraints.append({"id": "capital", "kwargs": _sample_kwargs(rng, "capital", left)})
        constraints.sort(key=lambda constraint: names.index(constraint["id"]))
    seed = rng.randrange(2**32)
    text = compose(constraints, random.Random(seed))
    lengths = {name: _length_kwargs(rng, name, text) for name in names if name in _LENGTHS}
    if None in lengths.values():
        return None
    constraints += [{"id": name, "kwargs": kwargs} for name, kwargs in lengths.items()]
    constraints.sort(key=lambda constraint: names.index(constraint["id"]))
    for constraint in constraints:
        constraint["name"] = constraint["id"]
        constraint["text"] = KINDS[constraint["id"]].wording.format(**constraint["kwargs"])
    content = "\n".join(constraint["text"] for constraint in constraints)
    if _pieces(text) > MAX_PIECES or _pieces(content) > 90:
        return None
    return {"messages": [{"role": "user", "content": content}], "constraints": constraints, "split": split, "difficulty": len(constraints), "seed": seed}


def _tasks(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"instructions {split} {seed}")
    tasks: list[dict[str, Any]] = []
    while len(tasks) < count:
        if (task := _task(rng, split)) is not None:
            tasks.append({"id": f"instructions-{split}-{seed}-{len(tasks)}", **task, "split": "seen" if split != "heldout_types" else split})
    return tasks


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The prompt and a response that satisfies every constraint. Fresh compositions are tried first; the one the task was made from always works."""
    lengths = [constraint for constraint in task["constraints"] if constraint["id"] in _LENGTHS]
    for _ in range(10):
        text = compose(task["constraints"], rng)
        if _pieces(text) <= MAX_PIECES and all(KINDS[length["id"]].check(text, length["kwargs"]) for length in lengths):
            break
    else:
        text = compose([constraint for constraint in task["constraints"] if constraint not in lengths], random.Random(task["seed"]))
    return [*(dict(message) for message in task["messages"]), {"role": "assistant", "content": text}]


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert who overlooks each constraint with a probability of 0.15 to 0.6 that depends on its type."""
    seen = [c for c in task["constraints"] if rng.random() > 0.15 + 0.45 * (zlib.crc32(c["id"].encode()) % 97) / 96]
    *messages, answer = demonstrate({**task, "constraints": seen}, rng)
    return [*messages, answer]


# ---------------------------------------------------------------- IFEval's types


def _compare(value: int, relation: str, threshold: int) -> bool:
    return value < threshold if relation == "less than" else value >= threshold


def _count(text: str, keyword: str) -> int:
    """Occurrences as part of a word too, in any case, as IFEval counts. The keyword is plain text, never a pattern."""
    return len(re.findall(re.escape(keyword), text, flags=re.IGNORECASE))


def count_sentences(text: str) -> int:
    """Sentences by a regular expression: an end mark, closing quotes, then space and no lower-case letter; common abbreviations and initials do not end one.

    An approximation of the NLTK punkt model that IFEval uses.
    """
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|No|e\.g|i\.e|[A-Z])\.(?=\s)", r"\1", text)
    return sum(bool(part.strip()) for part in re.split(r"(?<=[.!?])[\"')\]]*+\s++(?![a-z])", text))


def _detected(text: str, language: str) -> bool:
    """Whether langdetect finds the language; a text that it cannot judge passes, as in IFEval."""
    import langdetect  # load() has checked that it is installed

    langdetect.DetectorFactory.seed = 0  # it draws at random otherwise
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return True


def _placeholder_count(text: str) -> int:
    """Matches of ``\\[.*?\\]``, in linear time."""
    found = 0
    for line in text.split("\n"):
        position = 0
        while (start := line.find("[", position)) >= 0 and (end := line.find("]", start)) >= 0:
            found, position = found + 1, end + 1
    return found


def _bullet_count(text: str) -> int:
    """Lines that begin with ``*`` (not ``**``) or with ``-``, as IFEval's two patterns count them."""
    # one run of blank lines is as good as any other, and short runs keep the search linear
    text = re.sub(r"\s+", lambda run: "\n\n" if run.group().count("\n") > 1 else run.group(), text)
    return len(re.findall(r"^\s*+\*[^*].*$", text, flags=re.MULTILINE)) + len(re.findall(r"^\s*+-.*$", text, flags=re.MULTILINE))


def _highlight_count(text: str) -> int:
    single = sum(bool(match.strip("*").strip()) for match in re.findall(r"\*[^\n*]*+\*", text))
    return single + sum(bool(match[2:-2].strip()) for match in re.findall(r"\*\*[^\n*]*+\*\*", text))


def _has_title(text: str) -> bool:
    """A line with ``<<...>>`` around more than brackets and space: from its first ``<<`` to its last ``>>``."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _paragraphs(text: str, count: int) -> bool:
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == count


def _first_word_of_paragraph(text: str, kwargs: Kwargs) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    place = kwargs["nth_paragraph"]
    if place > count or not parts[place - 1].strip():
        return False
    word = parts[place - 1].split()[0].lstrip("'").lstrip('"')
    return count == kwargs["num_paragraphs"] and re.split("[.,?!'\"]", word, maxsplit=1)[0].lower() == kwargs["first_word"].lower()


def _postscript(text: str, marker: str) -> bool:
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker.strip(), re.escape(marker.strip().lower()))
    return re.search(pattern, text.lower()) is not None


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
IFEVAL: dict[str, Kind] = {
    "keywords:existence": Kind("contain the words: {keywords}", lambda t, k: all(_count(t, word) for word in k["keywords"]), {"keywords": list}),
    "keywords:frequency": Kind(
        "use {keyword!r} {relation} {frequency} times",
        lambda t, k: _compare(_count(t, k["keyword"].strip()), k["relation"], k["frequency"]),
        {"keyword": str, "frequency": int, "relation": str},
    ),
    "keywords:forbidden_words": Kind(
        "avoid the words: {forbidden_words}",
        lambda t, k: not any(re.search(rf"\b{re.escape(word)}\b", t, flags=re.IGNORECASE) for word in k["forbidden_words"]),
        {"forbidden_words": list},
    ),
    "keywords:letter_frequency": Kind(
        "use the letter {letter!r} {let_relation} {let_frequency} times",
        lambda t, k: _compare(t.lower().count(k["letter"].strip().lower()), k["let_relation"], k["let_frequency"]),
        {"letter": str, "let_frequency": int, "let_relation": str},
    ),
    "language:response_language": Kind("write in the language {language}", lambda t, k: _detected(t, k["language"]), {"language": str}),
    "length_constraints:number_sentences": Kind(
        "write {relation} {num_sentences} sentences",
        lambda t, k: _compare(count_sentences(t), k["relation"], k["num_sentences"]),
        {"num_sentences": int, "relation": str},
    ),
    "length_constraints:number_paragraphs": Kind(
        "write {num_paragraphs} paragraphs with *** between them", lambda t, k: _paragraphs(t, k["num_paragraphs"]), {"num_paragraphs": int}
    ),
    "length_constraints:number_words": Kind(
        "write {relation} {num_words} words",
        lambda t, k: _compare(len(re.findall(r"\w+", t)), k["relation"], k["num_words"]),
        {"num_words": int, "relation": str},
    ),
    "length_constraints:nth_paragraph_first_word": Kind(
        "write {num_paragraphs} paragraphs with an empty line between them; number {nth_paragraph} starts with {first_word}",
        _first_word_of_paragraph,
        {"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    "detectable_content:number_placeholders": Kind(
        "use {num_placeholders} or more placeholders like [address]", lambda t, k: _placeholder_count(t) >= k["num_placeholders"], {"num_placeholders": int}
    ),
    "detectable_content:postscript": Kind(
        "add a postscript that starts with {postscript_marker}", lambda t, k: _postscript(t, k["postscript_marker"]), {"postscript_marker": str}
    ),
    "detectable_format:number_bullet_lists": Kind(
        "use exactly {num_bullets} bullet points with * or -", lambda t, k: _bullet_count(t) == k["num_bullets"], {"num_bullets": int}
    ),
    "detectable_format:constrained_response": Kind(f"contain one of: {' / '.join(ANSWERS)}", lambda t, k: any(answer in t for answer in ANSWERS)),
    "detectable_format:number_highlighted_sections": Kind(
        "highlight {num_highlights} or more passages like *this*", lambda t, k: _highlight_count(t) >= k["num_highlights"], {"num_highlights": int}
    ),
    "detectable_format:multiple_sections": Kind(
        "write {num_sections} or more sections headed {section_spliter} 1, {section_spliter} 2, ...",
        lambda t, k: len(re.findall(re.escape(k["section_spliter"].strip()) + r"\s?\d++", t)) >= k["num_sections"],
        {"section_spliter": str, "num_sections": int},
    ),
    "detectable_format:json_format": Kind("write everything as JSON", lambda t, k: _is_json(t)),
    "detectable_format:title": Kind("add a title like <<title>>", lambda t, k: _has_title(t)),
    "combination:two_responses": Kind("give two different answers with ****** between them", lambda t, k: _two_responses(t)),
    "combination:repeat_prompt": Kind(
        "first repeat: {prompt_to_repeat}",
        lambda t, k: t.strip().lower().startswith(k["prompt_to_repeat"].strip().lower()),
        {"prompt_to_repeat": str},
    ),
    "startend:end_checker": Kind(
        "end with: {end_phrase}", lambda t, k: t.strip().strip('"').lower().endswith(k["end_phrase"].strip().lower()), {"end_phrase": str}
    ),
    "startend:quotation": Kind("wrap everything in double quotes", lambda t, k: len(t.strip()) > 1 and t.strip()[0] == '"' and t.strip()[-1] == '"'),
    "change_case:capital_word_frequency": Kind(
        "write {capital_relation} {capital_frequency} words in capitals",
        lambda t, k: _compare(sum(word.isupper() for word in re.findall(r"\w+(?:[.'’-]\w+)*+", t)), k["capital_relation"], k["capital_frequency"]),
        {"capital_frequency": int, "capital_relation": str},
    ),
    "change_case:english_capital": Kind("write in English, all in capitals", lambda t, k: t.isupper() and _detected(t, "en")),
    "change_case:english_lowercase": Kind("write in English, all in lower case", lambda t, k: t.islower() and _detected(t, "en")),
    "punctuation:no_comma": Kind("use no commas", lambda t, k: "," not in t),
}
RELATIONS = ("less than", "at least")
ALL_KINDS = {**KINDS, **IFEVAL}


def loose_variants(text: str) -> list[str]:
    """IFEval's eight readings of a response: as it is, without first line, last line or both, each with and without asterisks."""
    lines = text.split("\n")
    cut = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cut, *(variant.replace("*", "") for variant in cut)]


def follows(constraint: dict[str, Any], text: str, loose: bool = False) -> bool:
    """Whether a response satisfies a constraint ``{"id", "kwargs"}``. An empty response satisfies none, one over MAX_CHARS neither."""
    if len(text) > MAX_CHARS:
        return False
    check = ALL_KINDS[constraint["id"]].check
    return any(variant.strip() and check(variant, constraint["kwargs"]) for variant in (loose_variants(text) if loose else [text]))


# ---------------------------------------------------------------- the environment


class InstructionsEnv:
    """One-step episodes. ``step`` returns the sum of the constraint rewards.

    ``info``: success, rewards, verifier_text, instruction_accuracy, split ("seen", "heldout_types" or "ifeval"); with IFEval data also ``loose``, a dict
    name -> 0.0 or 1.0 under the loose rules.
    """

    def __init__(self) -> None:
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        """Messages of a task as made by ``load``."""
        self.task = task
        return [dict(message) for message in task["messages"]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one response. Raises RuntimeError when no episode is open."""
        if self.task is None:
            raise RuntimeError("step() before reset(), or after the episode's only step")
        task, self.task = self.task, None
        rewards = {constraint["name"]: float(follows(constraint, action)) for constraint in task["constraints"]}
        info: dict[str, Any] = {
            "success": float(all(rewards.values())),
            "rewards": rewards,
            "verifier_text": {c["name"]: "" if c["id"] in UNLOCALISED else c["text"] for c in task["constraints"]},
            "instruction_accuracy": sum(rewards.values()) / len(rewards),
            "split": task["split"],
        }
        if task["split"] == "ifeval":
            info["loose"] = {constraint["name"]: float(follows(constraint, action, loose=True)) for constraint in task["constraints"]}
        return "", sum(rewards.values()), True, False, info

    def close(self) -> None:
        self.task = None


def regions(text: str) -> list[tuple[str, int, int]]:
    """Spans of a response, in order and without overlap: ``wrap`` (outer quotes or braces), ``title``, ``list`` (bullets and numbered lines), ``divider``,
    ``postscript``, ``first_word``, ``last_word`` (with its end mark), ``rest``. White space between them has none."""
    spans: list[tuple[str, int, int]] = []
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    wrapped = end - start > 2 and (text[start], text[end - 1]) in (('"', '"'), ("{", "}"))
    inner = (start + 1, end - 1) if wrapped else (start, end)
    spans += [("wrap", start, start + 1)] if wrapped else []
    lines = list(re.compile(r"\S[^\n]*").finditer(text, *inner))
    for index, line in enumerate(lines):
        content = line.group().rstrip()
        first = line.start()
        if content in ("******", "---", "***"):
            name = "divider"
        elif re.match(r"[-*] |\d{1,9}\. ", content):
            name = "list"
        elif content.startswith("<<") and content.endswith(">>"):
            name = "title"
        else:
            name = "postscript" if re.match(r"P\.(P\.)?S", content) else "rest"
        words = [(first + word.start(), first + word.end()) for word in re.finditer(r"\S+", content)]
        parts = []
        if name == "rest" and index == 0:
            parts.append(("first_word", *words.pop(0)))
        if words:
            closing = [("last_word", *words.pop())] if name in ("rest", "postscript") and index == len(lines) - 1 else []
            parts += [(name, words[0][0], words[-1][1])] if words else []
            parts += closing
        spans += parts
    spans += [("wrap", end - 1, end)] if wrapped else []
    return spans


# ---------------------------------------------------------------- real data


def _read_constraint(where: str, name: Any, kwargs: Any) -> dict[str, Any]:
    """Raises DataError for an unknown id or kwargs that its check cannot use."""
    if name not in IFEVAL:
        raise DataError(f"{where}: field 'instruction_id_list': unknown id {name!r}; known ids: {', '.join(IFEVAL)}")
    if not isinstance(kwargs, dict):
        raise DataError(f"{where}: field 'kwargs': the entry of {name} is a {type(kwargs).__name__}, expected an object")
    kwargs = {key: value for key, value in kwargs.items() if value is not None}  # some copies list every key, with null for the unused ones
    needed = IFEVAL[name].kwargs
    if kwargs.keys() != needed.keys():
        raise DataError(f"{where}: field 'kwargs': {name} needs exactly {sorted(needed) or 'no entries'}, found {sorted(kwargs)}")
    for key, value in kwargs.items():
        if isinstance(value, float) and needed[key] is int and value.is_integer():
            kwargs[key] = value = int(value)
        if type(value) is not needed[key]:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be a {needed[key].__name__}, found {value!r}")
        if needed[key] is int and value < 0:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must not be negative, found {value}")
        if key.endswith("relation") and value not in RELATIONS:
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be one of {RELATIONS}, found {value!r}")
        if needed[key] is list and not (value and all(isinstance(word, str) and word for word in value)):
            raise DataError(f"{where}: field 'kwargs': {name}.{key} must be a non-empty list of words, found {value!r}")
        if needed[key] is str and not value.strip():
            raise DataError(f"{where}: field 'kwargs': {name}.{key} is empty")
    if name == "keywords:letter_frequency" and len(kwargs["letter"].strip()) != 1:
        raise DataError(f"{where}: field 'kwargs': {name}.letter must be one character, found {kwargs['letter']!r}")
    if name == "length_constraints:nth_paragraph_first_word" and not 1 <= kwargs["nth_paragraph"] <= kwargs["num_paragraphs"]:
        raise DataError(f"{where}: field 'kwargs': {name}.nth_paragraph must be between 1 and num_paragraphs, found {kwargs['nth_paragraph']}")
    wording = IFEVAL[name].wording.format(**{key: ", ".join(value) if isinstance(value, list) else value for key, value in kwargs.items()})
    return {"id": name, "kwargs": kwargs, "text": wording}


def _load_real(path: Path) -> TaskSet:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}); give a .jsonl file in IFEval's format") from error
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    seen: set[str] = set()
    languages = False
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); IFEval files have one JSON object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}, expected an object with key, prompt, instruction_id_list and kwargs")
        key, prompt, names, kwargs = (row.get(name) for name in ("key", "prompt", "instruction_id_list", "kwargs"))
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            raise DataError(f"{where}: field 'key' must be a number or a text, found {key!r}")
        if str(key) in seen:
            raise DataError(f"{where}: field 'key': {key!r} occurs twice; keys must be unique")
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{where}: field 'prompt' must be a non-empty text, found {str(prompt)[:80]!r}")
        if not isinstance(names, list) or not names:
            raise DataError(f"{where}: field 'instruction_id_list' must be a non-empty list of ids")
        if not isinstance(kwargs, list) or len(kwargs) != len(names):
            found = len(kwargs) if isinstance(kwargs, list) else type(kwargs).__name__
            raise DataError(f"{where}: field 'kwargs' must be a list with one object for each of the {len(names)} ids, found {found}")
        constraints: list[dict[str, Any]] = []
        for name, values in zip(names, kwargs):
            constraint = _read_constraint(where, name, values)
            copies = sum(other["id"] == name for other in constraints)
            constraints.append({**constraint, "name": name if not copies else f"{name}#{copies + 1}"})
            languages |= name in ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
        seen.add(str(key))
        held = hashlib.sha256(str(key).encode()).digest()[0] < 51
        (evaluation if held else train).append(
            {
                "id": f"ifeval-{key}",
                "messages": [{"role": "user", "content": prompt}],
                "constraints": constraints,
                "split": "ifeval",
                "difficulty": len(constraints),
            }
        )
    if not seen:
        raise DataError(f"{path}: no rows; expected one JSON object a line")
    if languages and importlib.util.find_spec("langdetect") is None:
        raise DataError(f"{path}: has constraints on the language of the response, which need the package langdetect: pip install langdetect==1.0.9")
    notes = {"rows": len(seen), "split": "IFEval has no training split: a row is in eval when the first byte of sha256(key) is below 51 (about 20 %)"}
    return TaskSet(f"instructions:{path}", train, evaluation, InstructionsEnv, None, regions, None, 1, notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded task set, or a .jsonl file in IFEval's format (key, prompt, instruction_id_list, kwargs).

    Embedded: 6,000 training tasks; 256 validation tasks whose sets of types never occur in training (task field ``split`` "seen"), followed by 64 with two
    types each that training never shows (``split`` "heldout_types"). Raises DataError for unusable data.
    """
    if path is not None:
        return _load_real(Path(path))
    evaluation = [*_tasks("eval", 256, seed), *_tasks("heldout_types", 64, seed)]
    notes = {"split": 'eval: 256 tasks with unseen sets of types ("seen"), then 64 with types that training never shows ("heldout_types")'}
    return TaskSet("instructions", _tasks("train", 6000, seed), evaluation, InstructionsEnv, demonstrate, regions, careless, 1, notes)
