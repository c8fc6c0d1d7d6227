"""Reader of ALFWorld's game files: ``game.tw-pddl`` (PDDL domain and problem, grammar) and ``traj_data.json`` beside it.

A file is data: PDDL is read as nested lists with a bound on size and depth, the domain's actions must be the ones that the engine plays, the grammar is
compiled by the engine. Raises DataError with file and field for whatever does not fit.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.envs import DataError
from common.envs.household_engine import ACTIONS, CLEAN, COOL, HOT, TOGGLEABLE, UNARY, Game, Goal, Grammar, State

MAX_BYTES = 8_000_000  # of one game file; generated kitchens have 86 kB
MAX_DEPTH = 40
MAX_ENTITIES = 5_000
TASK_TYPES = {
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
# predicate -> types of its arguments; those in IGNORED change nothing that a player can see
PREDICATES = {
    **{name: ("receptacle",) if name in ("openable", "opened") else ("object",) for name in UNARY},
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "inreceptacle": ("object", "receptacle"),
    "inreceptacleobject": ("object", "object"),
    "receptacletype": ("receptacle", "rtype"),
    "objecttype": ("object", "otype"),
    "cancontain": ("rtype", "otype"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
}
IGNORED = {"=", "isreceptacleobjectfull", "wasinreceptacle", "checked", "examined", "full", "moveable", "ison", "holdsanyreceptacleobject"}
# the first 8 hex digits of sha256 over each action of the domain: comments, costs and white space apart, in lower case
DOMAIN = dict(
    zip(
        ACTIONS,
        "0c8dd452 2bc062eb 0e47fbc0 1444ea39 1fbcaa5f 16fcb861 b43c3ff7 4e3bc393 56004d7d 649dd5f1 b3bf4929 30dc940e af35305d 707bf5a9 805c8dba".split(),
    )
)

# ---------------------------------------------------------------- PDDL


def read_pddl(text: str, where: str) -> list[Any]:
    """The one expression in a PDDL text as nested lists of lower-case words. Raises DataError for unbalanced, too deep or empty text."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text).lower()):
        if token == "(":
            stack.append([])
            if len(stack) > MAX_DEPTH:
                raise DataError(f"{where}: parentheses are nested more than {MAX_DEPTH} deep")
        elif token == ")":
            if len(stack) == 1:
                raise DataError(f"{where}: a closing parenthesis too many")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) > 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], list):
        raise DataError(f"{where}: expected one expression in balanced parentheses ({len(stack) - 1} left open)")
    return stack[0][0]


def _section(expression: list[Any], name: str, where: str) -> list[Any]:
    found = [part[1:] for part in expression if isinstance(part, list) and part[:1] == [name]]
    if len(found) != 1:
        raise DataError(f"{where}: expected one section {name}, found {len(found)}")
    return found[0]


def _plain(expression: Any) -> str:
    """One line of text for an expression, without costs."""
    if isinstance(expression, str):
        return expression
    return "(" + " ".join(_plain(part) for part in expression if not (isinstance(part, list) and part[:1] == ["increase"])) + ")"


@lru_cache(maxsize=8)
def check_domain(text: str) -> frozenset[str]:
    """Names of the domain's actions. Raises DataError unless each of them is one that the engine plays."""
    where = "field 'pddl_domain'"
    actions = {part[1]: part for part in read_pddl(text, where) if isinstance(part, list) and part[:1] == [":action"] and len(part) > 1}
    for name, action in actions.items():
        if hashlib.sha256(_plain(action).encode()).hexdigest()[:8] != DOMAIN.get(name):
            raise DataError(f"{where}: action {name} is not ALFWorld's; the engine plays ALFWorld's rules only ({', '.join(DOMAIN)})")
    if missing := sorted(DOMAIN.keys() - actions.keys() - {"help"}):
        raise DataError(f"{where}: action {', '.join(missing)} is missing")
    return frozenset(actions)


def _facts(section: list[Any], types: dict[str, str], where: str) -> dict[str, list[tuple[str, ...]]]:
    facts: dict[str, list[tuple[str, ...]]] = {name: [] for name in PREDICATES}
    for fact in section:
        name = fact[0] if isinstance(fact, list) and fact else None
        if isinstance(name, str) and name in IGNORED:
            continue
        if not isinstance(name, str) or name not in PREDICATES:
            raise DataError(f"{where}: {_plain(fact)[:80]} in :init is not a fact over a predicate of ALFWorld")
        arguments = tuple(fact[1:])
        kinds = tuple(types.get(a, "undeclared") if isinstance(a, str) else "expression" for a in arguments)
        if kinds != PREDICATES[name]:
            raise DataError(f"{where}: {_plain(fact)[:120]} in :init has arguments of type {', '.join(kinds)}; {name} takes {', '.join(PREDICATES[name])}")
        facts[name].append(arguments)
    return facts


def _objects(section: list[Any], where: str) -> dict[str, str]:
    """Name -> type, from ``a b - object c - location``."""
    types: dict[str, str] = {}
    waiting: list[str] = []
    words = iter(section)
    for word in words:
        if not isinstance(word, str):
            raise DataError(f"{where}: {_plain(word)[:80]} in :objects is not a name")
        if word != "-":
            waiting.append(word)
            continue
        kind = next(words, None)
        if not isinstance(kind, str) or not waiting:
            raise DataError(f"{where}: a dash without names before it or a type after it in :objects")
        types.update(dict.fromkeys(waiting, kind))
        waiting = []
    if waiting:
        raise DataError(f"{where}: {waiting[0]} in :objects has no type")
    if len(types) > MAX_ENTITIES:
        raise DataError(f"{where}: {len(types)} names in :objects, more than {MAX_ENTITIES}")
    return types


def _names(ids: set[str]) -> dict[str, str]:
    """ALFWorld's names: the word before the position, "basin" for basins, and a number that counts down in the order of ids."""
    words = {}
    for name in sorted(ids):
        text = name
        for code, sign in (("_bar_", "|"), ("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
            text = text.replace(code, sign)
        word, bar, _ = text.partition("|")
        words[name] = (word + ("basin" if "basin" in name else ""), bool(bar))
    left: dict[str, int] = {}
    for word, numbered in words.values():
        left[word] = left.get(word, 0) + numbered
    names = {}
    for name, (word, numbered) in words.items():
        names[name] = f"{word} {left[word]}" if numbered else f"{word} "
        left[word] -= numbered
    return names


# ---------------------------------------------------------------- goals


def _conjuncts(expression: Any, where: str) -> list[list[Any]]:
    """Atoms of a goal made of ``and`` and ``exists``; scopes are renamed apart, so that a variable of two scopes is two variables."""
    atoms: list[list[Any]] = []
    count = 0

    def walk(part: Any, scope: dict[str, str]) -> None:
        nonlocal count
        if not isinstance(part, list) or not part or not isinstance(part[0], str):
            raise DataError(f"{where}: {_plain(part)[:80]!r} in :goal is not a formula")
        if part[0] == "and":
            for inner in part[1:]:
                walk(inner, scope)
        elif part[0] == "exists" and len(part) == 3 and isinstance(part[1], list):
            count += 1
            walk(part[2], {**scope, **{v: f"{v}{count}" for v in part[1] if isinstance(v, str) and v.startswith("?")}})
        elif part[0] == "not" and len(part) == 2 and isinstance(part[1], list) and len(part[1]) == 3 and part[1][0] == "=":
            atoms.append(["differ", *(scope.get(v, v) for v in part[1][1:] if isinstance(v, str))])
        elif all(isinstance(word, str) for word in part):
            atoms.append([part[0], *(scope.get(word, word) for word in part[1:])])
        else:
            raise DataError(f"{where}: {_plain(part)[:80]} in :goal: only and, exists, not (= a b) and facts are understood")

    walk(expression, {})
    return atoms


def _goal(section: list[Any], facts: dict[str, list[tuple[str, ...]]], number: dict[str, int], flags: dict[str, int], where: str) -> Goal:
    """The goal as one of the six families. Raises DataError for any other."""
    atoms = [atom for part in section for atom in _conjuncts(part, where)]
    typed: dict[str, str] = {a[1]: a[2] for a in atoms if a[0] in ("objecttype", "receptacletype") and len(a) == 3}
    unary: dict[str, int] = {}
    for name, *arguments in atoms:
        if name in UNARY and len(arguments) == 1:
            unary[arguments[0]] = unary.get(arguments[0], 0) | UNARY[name]
    wanted = sorted((name, *arguments) for name, *arguments in atoms if name not in UNARY and name not in ("objecttype", "receptacletype"))

    def of_type(predicate: str, variable: str, bits: int = 0) -> list[int]:
        return sorted({number[e] for e, kind in facts[predicate] if kind == typed.get(variable) and flags.get(e, 0) & bits == bits})

    placed = [a[1:] for a in wanted if a[0] == "inreceptacle" and len(a) == 3]
    held = [a[2] for a in wanted if a[0] == "holds" and len(a) == 3]
    changes = CLEAN | HOT | COOL
    able = UNARY["cleanable"] | UNARY["heatable"] | UNARY["coolable"]
    if placed and not held:
        (first, r), *others = placed
        needs = unary.get(first, 0) & changes
        distinct = [("differ", *pair) for o, _ in others for pair in ((first, o), (o, first))]
        rest = [a for a in wanted if a[0] != "inreceptacle" and a not in distinct]
        plain = all(unary[v] & ~(changes | able) == 0 for v in unary) and len(set(typed.values())) == 2
        if (
            plain
            and needs in (0, CLEAN, HOT, COOL)
            and not rest
            and len(placed) <= 2
            and len({typed.get(o) for o, _ in placed}) == 1
            and all(q == r for _, q in placed)
            and (not others or (len(wanted) == 3 and not unary))
        ):
            objects = of_type("objecttype", first, unary.get(first, 0) & able)
            return Goal(frozenset(objects), tuple(of_type("receptacletype", r)), needs, len(placed))
    if len(held) == 1:
        lamps = [v for v, bits in unary.items() if bits == UNARY["istoggled"] | TOGGLEABLE]
        rest = [a for a in wanted if a[0] not in ("holds", "atlocation")]
        if len(lamps) == 1 and len(unary) == 1 and lamps[0] in typed and held[0] in typed:
            lamp = lamps[0]
            by_place = len(rest) == 1 and rest[0][:2] == ("objectatlocation", lamp)
            in_receptacle = len(rest) == 2 and rest[0][:2] == ("inreceptacle", lamp) and rest[1][:2] == ("receptacleatlocation", rest[0][2])
            locations = {a[2] for a in wanted if a[0] == "atlocation"} | ({rest[-1][2]} if rest else set())
            if (by_place or in_receptacle) and len(locations) == 1:
                lamps_there = tuple(of_type("objecttype", lamp, TOGGLEABLE))
                return Goal(frozenset(of_type("objecttype", held[0])), lamps=lamps_there, lamp_by_place=by_place)
    raise DataError(f"{where}: :goal is none of the six families ({', '.join(TASK_TYPES)}): {' '.join(_plain(a) for a in atoms)[:300]}")


# ---------------------------------------------------------------- grammar

STRING = r'"(?:""(?:.|\n)*?""|[^"]*)"'
FIELD = re.compile(rf"\s*(template|feedback|grammar|pddl)\s*::\s*({STRING})\s*;")


def _rules(block: str, rules: dict[str, list[tuple[str, str]]], where: str) -> None:
    lines = "\n".join(line for line in block.split("\n") if not line.lstrip().startswith("#"))
    try:
        data = json.loads(lines)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: a grammar block is not valid JSON ({error})") from error
    for symbol, texts in data.items() if isinstance(data, dict) else ():
        good = isinstance(texts, list) and all(isinstance(t, dict) and isinstance(t.get("rhs"), str) and isinstance(t.get("condition", ""), str) for t in texts)
        if not good:
            raise DataError(f"{where}: symbol {symbol!r} must have a list of objects with a text 'rhs' and perhaps a text 'condition'")
        rules[symbol] = [(t.get("condition", ""), t["rhs"]) for t in texts]
    if not isinstance(data, dict):
        raise DataError(f"{where}: a grammar block must be a JSON object, symbol -> list of rules")


def read_grammar(text: str, actions: frozenset[str]) -> tuple[Grammar, str]:
    """The compiled grammar and the task sentence of one game."""
    where = "field 'grammar'"
    rules: dict[str, list[tuple[str, str]]] = {}
    templates, feedback = {}, {}
    position = 0
    head = re.compile(r"\s*action\s+([\w/-]+)\s*\{")
    while text[position:].strip():
        if match := FIELD.match(text, position):
            if match[1] == "grammar":
                _rules(match[2][3:-3], rules, where)
            position = match.end()
            continue
        match = head.match(text, position)
        if not match:
            raise DataError(f"{where}: cannot read {text[position:].strip()[:60]!r}; expected a grammar block or an action")
        name, position = match[1].lower(), match.end()
        while found := FIELD.match(text, position):
            if found[1] == "template":
                templates[name] = found[2].strip('"')
            elif found[1] == "feedback":
                feedback[name] = found[2].strip('"')
            elif found[1] == "grammar":
                _rules(found[2][3:-3], rules, where)
            position = found.end()
        close = re.compile(r"\s*\}").match(text, position)
        if not close:
            raise DataError(f"{where}: action {name}: cannot read {text[position:].strip()[:60]!r}")
        position = close.end()
    if missing := sorted(actions - templates.keys()):
        raise DataError(f"{where}: no template for action {', '.join(missing)}")
    task = rules.pop("task", [])
    if len(task) != 1 or task[0][0] or re.search(r"[\[\]{}#]", task[0][1]):
        raise DataError(f"{where}: symbol 'task' must have one plain text, the task sentence")
    key = json.dumps([{a: templates[a] for a in sorted(actions)}, {a: feedback.get(a) for a in sorted(actions)}, rules], sort_keys=True)
    return _compiled(key), task[0][1]


@lru_cache(maxsize=8)
def _compiled(key: str) -> Grammar:
    """All official games share their grammar but for the task sentence: it is compiled once."""
    templates, feedback, rules = json.loads(key)
    try:
        return Grammar(templates, {a: f for a, f in feedback.items() if f is not None}, rules, "field 'grammar'")
    except RecursionError as error:
        raise DataError("field 'grammar': symbols are nested too deep") from error


# ---------------------------------------------------------------- files


def read_json(path: Path, fields: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object with text in the named fields. Raises DataError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_BYTES} of a game file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: a {type(data).__name__}, expected a JSON object")
    for name in fields:
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise DataError(f"{path}: field '{name}' must be a non-empty text")
    return data


def read_game(path: Path) -> Game:
    """The game in a ``game.tw-pddl``. Raises DataError naming file and field."""
    data = read_json(path, ("pddl_domain", "pddl_problem", "grammar"))
    try:
        return _game(data)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _game(data: dict[str, Any]) -> Game:
    grammar, task = read_grammar(data["grammar"], check_domain(data["pddl_domain"]))
    where = "field 'pddl_problem'"
    problem = read_pddl(data["pddl_problem"], where)
    types = _objects(_section(problem, ":objects", where), where)
    facts = _facts(_section(problem, ":init", where), types, where)
    mentioned = {argument for rows in facts.values() for row in rows for argument in row}
    names = _names(mentioned)
    kinds = {kind: sorted(e for e in mentioned if types[e] == kind) for kind in ("receptacle", "object", "location", "agent")}
    if len(kinds["agent"]) != 1 or len(facts["atlocation"]) != 1:
        raise DataError(f"{where}: expected one agent at one location, found {len(kinds['agent'])} and {len(facts['atlocation'])}")
    if not kinds["receptacle"] or not kinds["object"]:
        raise DataError(f"{where}: {len(kinds['receptacle'])} receptacles and {len(kinds['object'])} objects; a game needs both")
    if len(facts["holds"]) > 1 or len(facts["holds"]) != len(facts["holdsany"]):
        raise DataError(f"{where}: facts holds and holdsAny in :init disagree, or more than one object is held")
    ids = [*kinds["receptacle"], *kinds["object"], *kinds["location"], *kinds["agent"]]
    number = {name: i for i, name in enumerate(ids)}
    things = ids[: len(kinds["receptacle"]) + len(kinds["object"])]
    flags = dict.fromkeys(things, 0)
    for name, bit in UNARY.items():
        for (entity,) in facts[name]:
            flags[entity] |= bit
    typed: dict[str, set[str]] = {entity: set() for entity in things}
    for entity, kind in facts["receptacletype"] + facts["objecttype"]:
        typed[entity].add(kind)
    takes: dict[str, set[str]] = {}
    for receptacle_type, object_type in facts["cancontain"]:
        takes.setdefault(receptacle_type, set()).add(object_type.removesuffix("type"))
    contents: list[set[int]] = [set() for _ in kinds["receptacle"]]
    for o, r in facts["inreceptacle"]:
        contents[number[r]].add(number[o])
    where_stands: list[set[int]] = [set() for _ in kinds["receptacle"]]
    for r, place in facts["receptacleatlocation"]:
        where_stands[number[r]].add(number[place])
    start = State(
        at=number[facts["atlocation"][0][1]],
        held=number[facts["holds"][0][1]] if facts["holds"] else -1,
        flags=tuple(flags.values()),
        contents=tuple(tuple(sorted(inside)) for inside in contents),
        places=frozenset((number[o], number[place]) for o, place in facts["objectatlocation"]),
        left=frozenset(),
    )
    game = Game(
        names=tuple(names[e] for e in ids),
        types=tuple(frozenset(kind.removesuffix("type") for kind in typed[e]) for e in things),
        receptacles=len(kinds["receptacle"]),
        where=tuple(tuple(sorted(places)) for places in where_stands),
        accepts=tuple(frozenset().union(*(takes.get(kind, ()) for kind in typed[r])) for r in kinds["receptacle"]),
        inside=tuple(sorted((number[a], number[b]) for a, b in facts["inreceptacleobject"])),
        start=start,
        goal=_goal(_section(problem, ":goal", where), facts, number, flags, where),
        grammar=grammar,
        task=task,
    )
    if not game.goal.objects or not (game.goal.receptacles or game.goal.lamps):
        raise DataError(f"{where}: no object or no receptacle in this game has the type that :goal asks for")
    game.intro()  # a text that cannot be derived shows here
    return game


def read_traj(path: Path) -> dict[str, Any]:
    """``traj_data.json``: task_type, and whether the target is sliced. Raises DataError."""
    data = read_json(path, ("task_type",))
    parameters = data.get("pddl_params")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("object_sliced"), bool):
        raise DataError(f"{path}: field 'pddl_params' must be an object with a true or false 'object_sliced'")
    return data
