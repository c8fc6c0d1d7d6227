"""Instruction following: prompts of our own with constraints that a written demonstration satisfies."""

from __future__ import annotations

import itertools
import random
import re
import zlib
from typing import Any

from common.envs import Message
from common.envs.instructions_checks import HELD_OUT, KINDS, LENGTHS, Kwargs, count_marks, lines_of, words_of

EXCLUSIVE = (  # at most one of each group in a prompt
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
    words = len(words_of(text))
    if name == "words_max":
        return {"count": 5 * ((words + rng.randrange(5) + 4) // 5)}
    if name == "words_min":
        return {"count": 5 * ((words - rng.randrange(5)) // 5)} if words >= 10 else None
    if name == "words_even":
        return {} if words % 2 == 0 else None
    return {"count": count_marks(text) if name == "sentences" else len(lines_of(text))}


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
    return {word for constraint in constraints for value in constraint["kwargs"].values() if isinstance(value, str) for word in words_of(value)}


def compose(constraints: list[dict[str, Any]], rng: random.Random) -> str:
    """A response that satisfies every constraint but the numbers of words, which are left to chance.

    ``constraints``: dicts with ``id`` and ``kwargs``, compatible as in ``EXCLUSIVE``; counts of sentences and lines must come from a composition of the
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
_CLASHES = {name: set().union(*(group for group in EXCLUSIVE if name in group)) for name in KINDS}
MAX_PIECES = 56  # of a demonstration


def _task(rng: random.Random, split: str) -> dict[str, Any] | None:
    """One task, or None where the draw belongs to another split or gets too long."""
    count = rng.randint(5, 13)
    names = ["topic"] + (rng.sample(HELD_OUT, 2) if split == "heldout_types" else [])
    for name in rng.sample(_SHOWN, len(_SHOWN)):
        if len(names) == count:
            break
        if not _CLASHES[name].intersection(names) and not (name in LENGTHS and sum(other in LENGTHS for other in names) == 2):
            names.append(name)
    # a set of types is in one split only: which one follows from the places of its types in the table
    if split != "heldout_types" and (sum(_PLACES[name] for name in names) % 7 == 0) != (split == "eval"):
        return None
    rest = names[1:]
    rng.shuffle(rest)
    names = ["topic", *rest]
    nouns = rng.sample(NOUNS, len(NOUNS))
    constraints = [{"id": name, "kwargs": _sample_kwargs(rng, name, nouns)} for name in names if name not in LENGTHS and name != "capital"]
    if "capital" in names:  # after the others, so that its word is none of theirs
        left = [noun for noun in NOUNS if noun not in _mentioned(constraints)]
        constraints.append({"id": "capital", "kwargs": _sample_kwargs(rng, "capital", left)})
        constraints.sort(key=lambda constraint: names.index(constraint["id"]))
    seed = rng.randrange(2**32)
    text = compose(constraints, random.Random(seed))
    lengths = {name: _length_kwargs(rng, name, text) for name in names if name in LENGTHS}
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


def embedded_tasks(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"instructions {split} {seed}")
    tasks: list[dict[str, Any]] = []
    while len(tasks) < count:
        if (task := _task(rng, split)) is not None:
            tasks.append({"id": f"instructions-{split}-{seed}-{len(tasks)}", **task, "split": "seen" if split != "heldout_types" else split})
    return tasks


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The prompt and a response that satisfies every constraint. Fresh compositions are tried first; the one the task was made from always works."""
    lengths = [constraint for constraint in task["constraints"] if constraint["id"] in LENGTHS]
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
