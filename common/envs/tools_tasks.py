"""Tool calling: function documents, requests and demonstrations of our own."""

from __future__ import annotations

import random
from typing import Any

from common.envs import Message
from common.envs.tools_calls import reference_calls, render_calls

ROOMS = ("kitchen", "hall", "garden", "attic")
PEOPLE = ("anna", "ben", "carl", "dora", "emma", "fred", "gina", "hugo")
CITIES = ("paris", "rome", "berlin", "oslo", "madrid", "vienna", "lisbon", "tokyo")
TITLES = ("rain", "sun", "moon", "river", "night", "summer", "dance", "home")
ITEMS = ("lamp", "chair", "book", "shirt", "cup", "bag", "shoe", "phone")
DISHES = ("soup", "rice", "pasta", "cake", "salad", "pizza")
DAYS = ("monday", "friday", "sunday")
NUMBERS = tuple(range(1, 21))

# (verbs, noun, leads, arguments); an argument is (names, values, phrases, required). A tuple of strings quoted in the request is a free string,
# ENUM marks the closed choices that the document lists, and a boolean has a phrase for true and one for false.
ENUM = "enum"
FAMILIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...], tuple[tuple[tuple[str, ...], Any, Any, bool], ...]], ...] = (
    (
        ("set", "add"),
        "alarm",
        ("wake me", "set an alarm"),
        ((("hour", "time"), NUMBERS, "at {}", True), (("label", "name"), TITLES, 'called "{}"', True), (("loud",), bool, ("loud", "not loud"), False)),
    ),
    (
        ("play", "start"),
        "song",
        ("play some music", "play a song"),
        (
            (("title", "name"), TITLES, 'called "{}"', True),
            (("room", "place"), (ENUM, ROOMS), "in the {}", True),
            (("loop",), bool, ("in a loop", "only one time"), False),
        ),
    ),
    (
        ("send", "write"),
        "note",
        ("send a note", "write a message"),
        ((("person", "to"), PEOPLE, 'to "{}"', True), (("text", "topic"), TITLES, 'about "{}"', True)),
    ),
    (
        ("book", "get"),
        "table",
        ("book a table", "i want to eat"),
        (
            (("city", "place"), CITIES, 'in "{}"', True),
            (("guests", "count"), NUMBERS, "for {} people", True),
            (("inside",), bool, ("inside", "not inside"), False),
        ),
    ),
    (
        ("buy", "order"),
        "item",
        ("buy a thing", "order a thing"),
        (
            (("item", "name"), ITEMS, 'called "{}"', True),
            (("count", "number"), NUMBERS, "{} times", True),
            (("color",), (ENUM, ("red", "blue", "green")), "in {}", False),
        ),
    ),
    (
        ("turn", "set"),
        "light",
        ("change the light", "i need the light"),
        (
            (("room", "place"), (ENUM, ROOMS), "in the {}", True),
            (("on", "power"), bool, ("on", "off"), True),
            (("level",), NUMBERS, "at level {}", False),
        ),
    ),
    (
        ("get", "read"),
        "weather",
        ("tell me the weather", "how is the weather"),
        ((("city", "place"), CITIES, 'in "{}"', True), (("days", "number"), NUMBERS, "for {} days", True)),
    ),
    (
        ("find", "get"),
        "train",
        ("find a train", "i need a train"),
        ((("from", "start"), CITIES, 'from "{}"', True), (("to", "goal"), CITIES, 'to "{}"', True), (("fast",), bool, ("fast", "not fast"), False)),
    ),
    (
        ("add", "plan"),
        "event",
        ("plan an event", "add an event"),
        (
            (("title", "label"), TITLES, 'called "{}"', True),
            (("day", "date"), (ENUM, DAYS), "on {}", True),
            (("hour",), NUMBERS, "at {}", False),
        ),
    ),
    (
        ("cook", "make"),
        "meal",
        ("cook a meal", "make a meal"),
        ((("dish", "name"), DISHES, 'called "{}"', True), (("minutes", "time"), NUMBERS, "for {} minutes", True)),
    ),
    (
        ("rent", "book"),
        "car",
        ("rent a car", "i need a car"),
        (
            (("city", "place"), CITIES, 'in "{}"', True),
            (("days", "time"), NUMBERS, "for {} days", True),
            (("size",), (ENUM, ("small", "large")), "that is {}", False),
        ),
    ),
    (
        ("move", "put"),
        "thing",
        ("move a thing", "put a thing away"),
        ((("item", "thing"), ITEMS, 'called "{}"', True), (("room", "goal"), (ENUM, ROOMS), "to the {}", True)),
    ),
    (
        ("call", "ring"),
        "person",
        ("call a person", "ring a person"),
        ((("person", "name"), PEOPLE, 'called "{}"', True), (("video",), bool, ("with video", "without video"), False)),
    ),
    (
        ("print", "copy"),
        "page",
        ("print a page", "copy a page"),
        (
            (("page", "number"), NUMBERS, "with number {}", True),
            (("copies", "count"), NUMBERS, "{} times", True),
            (("color",), bool, ("in color", "without color"), False),
        ),
    ),
)
FILLERS = ("", "", "ok so i", "let me see", "well then i", "i think i")
POLITE = ("", "", "please", "now")


def _choices(values: Any) -> tuple[Any, ...]:
    return (False, True) if values is bool else values[1] if values[0] == ENUM else values


def _validation_values(family: int, values: dict[int, Any]) -> bool:
    """Which split a combination of a family's argument values belongs to: one in seven is kept for validation, and each single value is in both."""
    ranks = [(index + 1) * (1 + _choices(FAMILIES[family][3][index][1]).index(value)) for index, value in values.items()]
    return sum(ranks) % 7 == 0


def _sample_values(rng: random.Random, family: int, validation: bool) -> dict[int, Any]:
    """Argument index -> value, from the wanted split; optional arguments are present half the time."""
    while True:
        values = {index: rng.choice(_choices(values)) for index, (_, values, _, required) in enumerate(FAMILIES[family][3]) if required or rng.random() < 0.5}
        if _validation_values(family, values) == validation:
            return values


def _document(rng: random.Random, family: int) -> tuple[dict[str, Any], list[str], str]:
    """A function document with freshly chosen names: (BFCL document, argument names by index, the compact line of the prompt)."""
    verbs, noun, _, arguments = FAMILIES[family]
    name, names, properties, shown = f"{rng.choice(verbs)}_{noun}", [], {}, []
    for options, values, _, required in arguments:
        names.append(rng.choice(options))
        kind = "boolean" if values is bool else "integer" if isinstance(values[0], int) else "string"
        properties[names[-1]] = {"type": kind}
        words = {"boolean": "bool", "integer": "int", "string": "str"}[kind]
        if values is not bool and values[0] == ENUM:
            properties[names[-1]]["enum"] = list(values[1])
            words = "|".join(values[1])
        shown.append(f"{names[-1]}{'' if required else '?'}:{words}")
    required_names = [name for name, (_, _, _, required) in zip(names, arguments) if required]
    document = {"name": name, "description": "", "parameters": {"type": "dict", "properties": properties, "required": required_names}}
    return document, names, f"{name}({','.join(shown)})"


def _request(rng: random.Random, family: int, values: dict[int, Any]) -> str:
    _, _, leads, arguments = FAMILIES[family]
    phrases = []
    for index, value in values.items():
        phrase = arguments[index][2]
        phrases.append((phrase[0] if value else phrase[1]) if arguments[index][1] is bool else phrase.format(value))
    rng.shuffle(phrases)
    return " ".join([rng.choice(leads), *phrases])


def _task(rng: random.Random, validation: bool) -> dict[str, Any]:
    documents = rng.choice((1, 2, 2, 3))
    shown = rng.sample(range(len(FAMILIES)), documents)
    wanted = [rng.choice(shown) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
    described = {family: _document(rng, family) for family in shown}
    answers, requests, optional = [], [], 0
    for family in wanted:
        values = _sample_values(rng, family, validation)
        document, names, _ = described[family]
        answers.append({document["name"]: {names[index]: [value] for index, value in values.items()}})
        requests.append(_request(rng, family, values))
        optional += sum(not FAMILIES[family][3][index][3] for index in values)
    polite = rng.choice(POLITE)
    request = " and then ".join(requests) + (f" {polite}" if polite else "")
    content = "\n".join([*(described[family][2] for family in shown), f"request: {request}"])
    category = ("parallel_multiple" if documents > 1 else "parallel") if len(wanted) > 1 else ("multiple" if documents > 1 else "simple")
    return {
        "messages": [{"role": "user", "content": content}],
        "functions": [described[family][0] for family in shown],
        "answers": answers,
        "category": category,
        "difficulty": (documents - 1) + 2 * (len(wanted) - 1) + optional,
    }


def embedded_tasks(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"tools {split} {seed}")
    tasks: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(tasks) < count:
        task = _task(rng, split == "eval")
        if task["messages"][0]["content"] not in seen:
            seen.add(task["messages"][0]["content"])
            tasks.append({"id": f"tools-{split}-{seed}-{len(tasks)}", **task})
    return tasks


def _spoken(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The prompt and a scripted response with both rewards 1: a short plan with the values it found, sometimes with filler, then the reference call."""
    calls = reference_calls(task["answers"], task["functions"])
    plans = [f"{call['name']} with {' , '.join(f'{k} {_spoken(v)}' for k, v in call['arguments'].items()) or 'nothing'}" for call in calls]
    thought = "call " + " and then call ".join(plans)
    filler = rng.choice(FILLERS)
    thought = f"{filler} {thought}" if filler else thought
    response = f"<think>{thought}</think><tool_call>{render_calls(calls)}</tool_call>"
    return [*(dict(message) for message in task["messages"]), {"role": "assistant", "content": response}]


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert who about half of the time quotes numbers, writes booleans as text, leaves out an optional argument that was
    asked for, stops after the first of two calls or forgets the closing tag."""
    *messages, answer = demonstrate(task, rng)
    calls = reference_calls(task["answers"], task["functions"])
    quote, spell, omit, stop = (rng.random() < p for p in (0.5, 0.5, 0.5, 0.4))
    required = {name: set(f["parameters"]["required"]) for f in task["functions"] for name in [f["name"]]}
    careless_calls = []
    for call in calls[:1] if stop else calls:
        arguments = {}
        for name, value in call["arguments"].items():
            if omit and name not in required[call["name"]]:
                continue
            if isinstance(value, bool):
                value = ("yes" if value else "no") if spell else value
            elif isinstance(value, int) and quote:
                value = str(value)
            arguments[name] = value
        careless_calls.append({"name": call["name"], "arguments": arguments})
    text = answer["content"].replace(render_calls(calls), render_calls(careless_calls))
    return [*messages, {"role": "assistant", "content": text.removesuffix("</tool_call>") if rng.random() < 0.55 else text}]
