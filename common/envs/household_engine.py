"""Household engine: ALFWorld's rules on an immutable state, its texts from its own grammar language, and an oracle that plans from any state.

The rules are those of ALFWorld's PDDL domain (15 commands below). The texts of a game come from rules in the grammar language that TextWorld reads from
``game.tw-pddl``; here they are compiled once to closures, and only names, constant text and queries over facts can occur in them: nothing is evaluated.

A state is a tuple of tuples: a snapshot is a reference to it, and an action makes a new one. Entities are numbers: receptacles first, then objects, then
locations, then the agent, each kind in the order of its ids, which is the order in which texts list them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.envs import DataError

# properties of a receptacle or an object, one bit each; the first block never changes
UNARY = {
    name: 1 << bit
    for bit, name in enumerate(
        "openable pickupable cleanable heatable coolable sliceable toggleable isreceptacleobject opened isclean ishot iscool issliced istoggled".split()
    )
}
OPENABLE, PICKUPABLE, CLEANABLE, HEATABLE, COOLABLE, SLICEABLE, TOGGLEABLE, _, OPENED, CLEAN, HOT, COOL, SLICED, TOGGLED = UNARY.values()

# PDDL action -> its parameters that a command names; the others follow from the state
ACTIONS = {
    "gotolocation": ("r",),
    "openobject": ("r",),
    "closeobject": ("r",),
    "pickupobject": ("o", "r"),
    "putobject": ("o", "r"),
    "cleanobject": ("o", "r"),
    "heatobject": ("o", "r"),
    "coolobject": ("o", "r"),
    "toggleobject": ("o",),
    "sliceobject": ("co", "ko"),
    "examinereceptacle": ("r",),
    "examineobject": ("o",),
    "look": (),
    "inventory": (),
    "help": (),
}
STATIONS = {"cleanobject": ("sinkbasin", CLEANABLE, CLEAN), "heatobject": ("microwave", HEATABLE, HOT), "coolobject": ("fridge", COOLABLE, COOL)}
KNIVES = {"knife", "butterknife"}
NOTHING = "Nothing happens."
MAX_RULES, MAX_TEXT, MAX_OUTPUT = 200, 4000, 100_000  # a grammar comes out of a file: symbols that multiply each other must not eat the memory


class State(NamedTuple):
    """Everything that rules and texts depend on."""

    at: int  # the agent's location
    held: int  # object in its hand, -1 for none
    flags: tuple[int, ...]  # bits of UNARY for each receptacle and object
    contents: tuple[tuple[int, ...], ...]  # objects in each receptacle, ascending
    places: frozenset[tuple[int, int]]  # (object, location) facts; slicing and "next to it" read them
    left: frozenset[tuple[int, int]]  # (object, receptacle): the object was taken out of it and not put back


class Action(NamedTuple):
    kind: str  # key of ACTIONS
    first: int = -1
    second: int = -1


@dataclass(frozen=True)
class Goal:
    """A wanted thing at a wanted place (``receptacles``), or in the hand next to a lamp that is on (``lamps``)."""

    objects: frozenset[int]  # those of the wanted type that can get the wanted property
    receptacles: tuple[int, ...] = ()
    needs: int = 0  # CLEAN, HOT or COOL
    count: int = 1  # how many of them, in one receptacle
    lamps: tuple[int, ...] = ()
    lamp_by_place: bool = False  # the lamp counts where its location fact says; else where its receptacle stands


# ---------------------------------------------------------------- texts

Binding = dict[str, int]
Piece = Callable[["Game", State, Binding], str]
SYMBOL = re.compile(r"\[\{([^{}\[\]]*)\}\]|\{([^{}]*)\}|#([\w()/!<>\-\s,.]+)#|([^\[\]{}#]+)")
ATOM = re.compile(r"\s*(\w+)\(\s*([^()]*?)\s*\)\s*")
TERM = re.compile(r"\s*(?:'([^']*)'|(\w+)\.(name|indefinite)(?:\s+or\s+\2\.id)?)\s*")
BINARY = {"atlocation", "receptacleatlocation", "inreceptacle", "objectatlocation", "not_inreceptacle", "holds", "inreceptacleobject"}


def _rows(game: Game, s: State, predicate: str, kinds: Sequence[str], bound: Sequence[int | None]) -> Sequence[tuple[int, ...]]:
    """Facts of a predicate that can match the bound arguments, in the order of their arguments."""
    if predicate in UNARY:
        bit, n = UNARY[predicate], game.receptacles
        if bound[0] is not None:
            return ((bound[0],),) if s.flags[bound[0]] & bit else ()
        return [(e,) for e in (range(n) if kinds[0] == "receptacle" else range(n, len(s.flags))) if s.flags[e] & bit]
    if predicate == "inreceptacle":
        if bound[1] is not None:
            return [(o, bound[1]) for o in s.contents[bound[1]]]
        return sorted((o, r) for r, inside in enumerate(s.contents) for o in inside)
    if predicate == "receptacleatlocation":
        return game.stands if bound[1] is None else [(r, bound[1]) for r in game.here.get(bound[1], ())]
    if predicate == "atlocation":
        return ((game.agent, s.at),)
    if predicate == "holds":
        return ((game.agent, s.held),) if s.held >= 0 else ()
    if predicate == "holdsany":
        return ((game.agent,),) if s.held >= 0 else ()
    if predicate == "inreceptacleobject":
        return game.inside
    return sorted({"objectatlocation": s.places, "not_inreceptacle": s.left}.get(predicate, ()))  # not_istoggled is never a fact


Query = list[tuple[str, list[str], list[str]]]  # (predicate, variables, their types)


def _query(text: str, where: str) -> Query:
    atoms: Query = []
    for part in text.split("&"):
        match = ATOM.fullmatch(part)
        arguments = [argument.partition(":") for argument in re.split(r"\s*,\s*", match[2])] if match else []
        if not match or len(arguments) != (2 if match[1] in BINARY else 1) or not all(name for name, _, _ in arguments):
            raise DataError(f"{where}: condition {text!r} is not a conjunction of predicates over variables")
        if match[1] not in BINARY and match[1] not in UNARY and match[1] not in ("holdsany", "not_istoggled"):
            raise DataError(f"{where}: condition {text!r}: predicate {match[1]!r} is not one of {', '.join(sorted([*BINARY, *UNARY, 'holdsany']))}")
        atoms.append((match[1], [name for name, _, _ in arguments], [kind for _, _, kind in arguments]))
    return atoms


def _matches(game: Game, s: State, query: Query, binding: Binding, depth: int = 0, budget: list[int] | None = None) -> Iterator[Binding]:
    """Extensions of the binding under which every atom is a fact; different variables stand for different entities."""
    if depth == len(query):
        yield binding
        return
    budget = budget or [100_000]
    predicate, variables, kinds = query[depth]
    bound = [binding.get(v) for v in variables]
    for row in _rows(game, s, predicate, kinds, bound):
        budget[0] -= 1
        if not budget[0]:
            raise DataError(f"{game.grammar.where}: the condition on {', '.join(p for p, _, _ in query)} has too many matches")
        new = {v: e for v, e, b in zip(variables, row, bound) if b is None}
        if all(b is None or b == e for b, e in zip(bound, row)) and not (new and set(new.values()) & set(binding.values())):
            yield from _matches(game, s, query, {**binding, **new} if new else binding, depth + 1, budget)


class Grammar:
    """The texts of a game.

    templates: PDDL action -> command with ``{parameter}`` in it; feedback: PDDL action -> text; rules: symbol -> [(condition, text), ...], first match counts.
    Text holds ``#symbol#``, ``{variable.name}``, and ``[{expression | query}]`` for a list. Symbol ``task`` is each game's own sentence.
    Raises DataError, with ``where`` in it, for anything else.
    """

    def __init__(self, templates: dict[str, str], feedback: dict[str, str], rules: dict[str, list[tuple[str, str]]], where: str):
        self.rules, self.where = rules, where
        if len(rules) > MAX_RULES or any(len(text) > MAX_TEXT for texts in rules.values() for _, text in texts):
            raise DataError(f"{where}: more than {MAX_RULES} symbols, or a text longer than {MAX_TEXT} characters")
        self.compiled: dict[str, Piece] = {"task": lambda game, s, b: game.task}
        self.templates, self.patterns = {}, []
        for action, template in templates.items():
            # "go to [{r.name | ...}]" names the same receptacle as "go to {r}"
            template = re.sub(r"\[\{\s*(\w+)\.name\s*\|[^{}\[\]]*\}\]", r"{\1}", template)
            if sorted(re.findall(r"\{(\w+)\}", template)) != sorted(ACTIONS[action]) or re.search(r"[\[\]{}]", re.sub(r"\{\w+\}", "", template)):
                raise DataError(f"{where}: template {template!r} of action {action} must name exactly {', '.join(ACTIONS[action]) or 'nothing'}")
            self.templates[action] = template
            pieces = re.split(r"\{(\w+)\}", template)
            self.patterns.append((action, re.compile("".join(f"(?P<{p}>.+)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))))
        if missing := sorted(templates.keys() - feedback.keys()):
            raise DataError(f"{where}: no feedback for action {', '.join(missing)}")
        self.feedback = {action: self._text(feedback[action]) for action in templates}
        self.intro = self._symbol("intro")
        for symbol in ("list_empty", "list_separator", "list_last_separator"):
            self._symbol(symbol)

    def _symbol(self, name: str) -> Piece:
        if name not in self.compiled:
            if name not in self.rules:
                raise DataError(f"{self.where}: symbol {name!r} has no rule")
            # a symbol that needs itself would never end: it is found in the table while it is being compiled
            self.compiled[name] = self._endless(name)
            rules = [(_query(condition, self.where) if condition else [], self._text(text)) for condition, text in self.rules[name]]

            def derive(game: Game, s: State, b: Binding) -> str:
                for query, piece in rules:
                    if not query or next(_matches(game, s, query, b), None) is not None:
                        return piece(game, s, b)
                return ""

            self.compiled[name] = derive
        return self.compiled[name]

    def _endless(self, name: str) -> Piece:
        def fail(game: Game, s: State, b: Binding) -> str:
            raise DataError(f"{self.where}: symbol {name!r} needs itself")

        return fail

    def _text(self, text: str) -> Piece:
        pieces: list[Piece] = []
        text, position = text.lstrip(), 0  # TextWorld drops white space at the start of a rule's text
        while position < len(text):
            match = SYMBOL.match(text, position)
            if not match:
                raise DataError(f"{self.where}: text {text[:80]!r}: cannot read {text[position : position + 20]!r}")
            position = match.end()
            listed, single, symbol, literal = match.groups()
            if symbol is not None:
                pieces.append(self._symbol(symbol))
            elif literal is not None:
                pieces.append(lambda game, s, b, literal=literal: literal)
            else:
                pieces.append(self._expression(single if listed is None else listed, listed is not None))
        if len(pieces) == 1:
            return pieces[0]

        def joined(game: Game, s: State, b: Binding) -> str:
            text = "".join([piece(game, s, b) for piece in pieces])
            if len(text) > MAX_OUTPUT:
                raise DataError(f"{self.where}: a text grows beyond {MAX_OUTPUT} characters")
            return text

        return joined

    def _expression(self, text: str, listed: bool) -> Piece:
        expression, bar, given = text.partition("|")
        query = _query(given, self.where) if bar else []
        if expression.strip().startswith("#"):
            value = self._text(expression.strip())
        else:
            terms = [TERM.fullmatch(term) for term in expression.split("+")]
            if not all(terms):
                raise DataError(f"{self.where}: expression {expression!r} is not made of variable.name, variable.indefinite and quoted text")
            parts = [(t[1], t[2]) if t[3] != "indefinite" else ("a", None) for t in terms]

            def value(game: Game, s: State, b: Binding) -> str:
                return "".join([constant if variable is None else game.names[b[variable]] for constant, variable in parts])

        if not query:
            return value
        separators = [self._symbol(name) for name in ("list_empty", "list_separator", "list_last_separator")] if listed else []

        def display(game: Game, s: State, b: Binding) -> str:
            values, room = [], MAX_OUTPUT
            for match in _matches(game, s, query, b):
                values.append(value(game, s, match))
                room -= len(values[-1])
                if room < 0:
                    raise DataError(f"{self.where}: a list grows beyond {MAX_OUTPUT} characters")
            if not listed:
                return "".join(values)
            if len(values) < 2:
                return values[0] if values else separators[0](game, s, b)
            return separators[1](game, s, b).join(values[:-1]) + separators[2](game, s, b) + values[-1]

        return display


# ---------------------------------------------------------------- rules


@dataclass
class Game:
    """One game: what never changes, the start state, and the rules. Not changed by play (but for memory of what was parsed)."""

    names: tuple[str, ...]  # of every entity, the agent last
    types: tuple[frozenset[str], ...]  # of each receptacle and object, without "type" at the end
    receptacles: int  # entities below this number are receptacles
    where: tuple[tuple[int, ...], ...]  # locations of each receptacle
    accepts: tuple[frozenset[str], ...]  # object types that each receptacle takes
    inside: tuple[tuple[int, int], ...]  # (object, object that it lies in), never changes
    start: State
    goal: Goal
    grammar: Grammar
    task: str  # the sentence that states the goal
    here: dict[int, tuple[int, ...]] = field(init=False)  # location -> receptacles
    stands: list[tuple[int, int]] = field(init=False)  # (receptacle, location)
    parsed: dict[str, Action] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.agent = len(self.names) - 1
        self.stands = [(r, place) for r, places in enumerate(self.where) for place in sorted(places)]
        self.here = {place: tuple(r for r, p in self.stands if p == place) for place in {p for _, p in self.stands}}
        self.numbers = {name: e for e, name in enumerate(self.names[: len(self.types)])}

    def intro(self) -> str:
        return self.grammar.intro(self, self.start, {})

    def parse(self, command: str) -> Action | None:
        """The action that a command names, whether it can be done or not; None where no template fits."""
        action = self.parsed.get(command)
        if action is None and len(command) <= 200:
            for kind, pattern in self.grammar.patterns:
                match = pattern.fullmatch(command)
                found = [self.numbers.get(match[p]) for p in ACTIONS[kind]] if match else [None]
                # examine fits receptacles and objects: the kind of the entity decides
                if None not in found and all((e < self.receptacles) == (p == "r") for e, p in zip(found, ACTIONS[kind])):
                    action = Action(kind, *found)
                    if len(self.parsed) < 20_000:
                        self.parsed[command] = action
                    break
        return action

    def command(self, action: Action) -> str:
        return self.grammar.templates[action.kind].format(**{p: self.names[e] for p, e in zip(ACTIONS[action.kind], action[1:])})

    def shows(self, s: State, r: int) -> bool:
        """Whether the receptacle is open, or has no door."""
        return s.flags[r] & (OPENABLE | OPENED) != OPENABLE

    def puts(self, o: int, r: int) -> bool:
        return not self.types[o].isdisjoint(self.accepts[r])

    def allowed(self, s: State, action: Action) -> bool:
        """Whether the preconditions hold."""
        kind, x, y = action
        if kind not in self.grammar.templates:
            return False
        if kind in ("look", "inventory", "help"):
            return True
        here = self.here.get(s.at, ())
        if kind == "gotolocation":
            return any(place != s.at for place in self.where[x])  # going nowhere is no action
        if kind == "examinereceptacle":
            return x in here
        if kind == "openobject":
            return x in here and s.flags[x] & (OPENABLE | OPENED) == OPENABLE
        if kind == "closeobject":
            return x in here and s.flags[x] & (OPENABLE | OPENED) == OPENABLE | OPENED
        if kind == "pickupobject":
            return y in here and s.held < 0 and x in s.contents[y] and bool(s.flags[x] & PICKUPABLE) and self.shows(s, y)
        if kind == "putobject":
            return s.held == x and y in here and self.shows(s, y) and self.puts(x, y)
        if kind == "examineobject":
            return s.held == x
        if kind in STATIONS:
            station, able, _ = STATIONS[kind]
            return s.held == x and y in here and bool(s.flags[x] & able) and station in self.types[y]
        if kind == "toggleobject":
            return bool(s.flags[x] & TOGGLEABLE) and any(x in s.contents[r] for r in here)
        # sliceobject: the knife is in the hand, the other thing lies at this location, seen or not
        return s.held == y and bool(s.flags[x] & SLICEABLE) and (x, s.at) in s.places and not KNIVES.isdisjoint(self.types[y])

    def apply(self, s: State, action: Action) -> State:
        """The state after an allowed action."""
        kind, x, y = action
        if kind == "gotolocation":
            return s._replace(at=next(place for place in self.where[x] if place != s.at))
        if kind == "pickupobject":
            inside = tuple(o for o in s.contents[y] if o != x)
            contents = (*s.contents[:y], inside, *s.contents[y + 1 :])
            return State(s.at, x, s.flags, contents, s.places - {(x, s.at)}, s.left | {(x, y)})
        if kind == "putobject":
            inside = tuple(sorted({*s.contents[y], x}))
            contents = (*s.contents[:y], inside, *s.contents[y + 1 :])
            return State(s.at, -1, s.flags, contents, s.places | {(x, s.at)}, s.left - {(x, y)})
        bits = s.flags[x] if x >= 0 else 0
        if kind == "openobject":
            bits |= OPENED
        elif kind == "closeobject":
            bits &= ~OPENED
        elif kind == "cleanobject":
            bits |= CLEAN
        elif kind == "heatobject":
            bits = (bits | HOT) & ~COOL
        elif kind == "coolobject":
            bits = (bits | COOL) & ~HOT
        elif kind == "toggleobject":
            bits |= TOGGLED  # once on it counts as on: no action takes it back
        elif kind == "sliceobject":
            bits |= SLICED
        else:
            return s
        return s._replace(flags=(*s.flags[:x], bits, *s.flags[x + 1 :]))

    def feedback(self, before: State, after: State, action: Action) -> str:
        """The text that answers an allowed action."""
        binding = dict(zip(ACTIONS[action.kind], action[1:]))
        binding["a"] = self.agent
        if action.kind == "gotolocation":
            binding["lstart"], binding["lend"] = before.at, after.at
        elif action.kind not in ("inventory", "help", "examinereceptacle", "examineobject"):
            binding["l"] = before.at
        try:
            return self.grammar.feedback[action.kind](self, after, binding)
        except KeyError as error:
            raise DataError(f"{self.grammar.where}: the feedback of {action.kind} names {error}, which is none of {', '.join(binding)}") from error

    def won(self, s: State) -> bool:
        goal = self.goal
        if goal.lamps:
            return s.held in goal.objects and any(s.flags[lamp] & TOGGLED and self.lamp_here(s, lamp) for lamp in goal.lamps)
        for r in goal.receptacles:
            if s.contents[r]:
                found = [o for o in s.contents[r] if o in goal.objects and s.flags[o] & goal.needs == goal.needs]
                if len(found) >= goal.count:
                    return True
        return False

    def lamp_here(self, s: State, lamp: int) -> bool:
        return (lamp, s.at) in s.places if self.goal.lamp_by_place else any(lamp in s.contents[r] for r in self.here.get(s.at, ()))

    def actions(self, s: State) -> list[Action]:
        """Every allowed action, each command once."""
        kinds = self.grammar.templates
        found = [Action(kind) for kind in ("look", "inventory", "help") if kind in kinds]
        found += [Action("gotolocation", r) for r in range(self.receptacles) if any(place != s.at for place in self.where[r])]
        held = s.held
        for r in self.here.get(s.at, ()):
            found.append(Action("examinereceptacle", r))
            if s.flags[r] & OPENABLE:
                found.append(Action("closeobject" if s.flags[r] & OPENED else "openobject", r))
            if held < 0:
                if self.shows(s, r):
                    found += [Action("pickupobject", o, r) for o in s.contents[r] if s.flags[o] & PICKUPABLE]
            else:
                if self.shows(s, r) and self.puts(held, r):
                    found.append(Action("putobject", held, r))
                found += [Action(kind, held, r) for kind, (station, able, _) in STATIONS.items() if station in self.types[r] and s.flags[held] & able]
            found += [Action("toggleobject", o) for o in s.contents[r] if s.flags[o] & TOGGLEABLE]
        if held >= 0:
            found.append(Action("examineobject", held))
            if not KNIVES.isdisjoint(self.types[held]):
                found += [Action("sliceobject", o, held) for o, place in s.places if place == s.at and s.flags[o] & SLICEABLE]
        return found

    def admissible(self, s: State) -> list[str]:
        """Commands that are answered by something else than "Nothing happens.", sorted."""
        return sorted({self.command(action) for action in self.actions(s)})


# ---------------------------------------------------------------- oracle


class _Walk:
    """A plan under construction: allowed actions and the state that they lead to. Methods return False where there is no way."""

    def __init__(self, game: Game, state: State):
        self.game, self.state, self.plan = game, state, []

    def do(self, kind: str, x: int, y: int = -1) -> bool:
        action = Action(kind, x, y)
        if not self.game.allowed(self.state, action):
            return False
        self.state = self.game.apply(self.state, action)
        self.plan.append(action)
        return True

    def go(self, r: int) -> bool:
        return self.state.at in self.game.where[r] or self.do("gotolocation", r)

    def reach(self, r: int) -> bool:
        return self.go(r) and (self.game.shows(self.state, r) or self.do("openobject", r))

    def drop(self, near: int) -> bool:
        """Puts the held thing down where that costs least on the way to receptacle ``near``."""
        s, game = self.state, self.game
        places = [r for r in range(game.receptacles) if game.where[r] and game.puts(s.held, r)]
        if not places:
            return False
        on_way = (s.at, *game.where[near])
        r = min(places, key=lambda r: (on_way[0] not in game.where[r] and not set(on_way) & set(game.where[r])) + (not game.shows(s, r)))
        return self.reach(r) and self.do("putobject", s.held, r)

    def fetch(self, o: int) -> bool:
        if self.state.held == o:
            return True
        r = next((r for r, inside in enumerate(self.state.contents) if o in inside and self.game.where[r]), None)
        if r is None or not self.state.flags[o] & PICKUPABLE or (self.state.held >= 0 and not self.drop(r)):
            return False
        return self.reach(r) and self.do("pickupobject", o, r)

    def treat(self, o: int) -> bool:
        needs = self.game.goal.needs
        if self.state.flags[o] & needs == needs:
            return True
        kind, station = next((kind, station) for kind, (station, _, bit) in STATIONS.items() if bit == needs)
        stations = [r for r in range(self.game.receptacles) if station in self.game.types[r] and self.game.where[r]]
        if not stations or not self.fetch(o):
            return False
        r = min(stations, key=lambda r: self.state.at not in self.game.where[r])
        return self.go(r) and self.do(kind, o, r)

    def deliver(self, o: int, r: int) -> bool:
        """The object, treated as the goal asks, in receptacle r."""
        if not self.treat(o):
            return False
        return o in self.state.contents[r] or (self.fetch(o) and self.reach(r) and self.do("putobject", o, r))

    def light(self, o: int, lamp: int) -> bool:
        if self.state.held == lamp and not self.drop(0):
            return False
        r = next((r for r, inside in enumerate(self.state.contents) if lamp in inside and self.game.where[r]), None)
        if r is None or not self.fetch(o) or not (self.game.lamp_here(self.state, lamp) or self.go(r)):
            return False
        return bool(self.state.flags[lamp] & TOGGLED) or self.do("toggleobject", lamp)


def plan(game: Game, state: State) -> list[Action] | None:
    """Actions from any state to the goal (empty at the goal), the shortest of the scripted ways; None where there is no way."""
    if game.won(state):
        return []
    best: list[Action] | None = None

    def consider(walk: _Walk, reached: bool) -> None:
        nonlocal best
        if reached and game.won(walk.state) and (best is None or len(walk.plan) < len(best)):
            best = walk.plan

    goal, objects = game.goal, sorted(game.goal.objects)
    if goal.lamps:
        for o in objects:
            for lamp in goal.lamps:
                walk = _Walk(game, state)
                consider(walk, walk.light(o, lamp))
        return best
    for r in goal.receptacles:
        walk, remaining, reached = _Walk(game, state), list(objects), True
        for _ in range(goal.count):  # one after the other, each time the object that is ready soonest
            options = []
            for o in remaining:
                step = _Walk(game, walk.state)
                if step.deliver(o, r):
                    options.append((len(step.plan), o, step))
            if not options:
                reached = False
                break
            _, o, step = min(options, key=lambda option: option[:2])
            remaining.remove(o)
            walk.state, walk.plan = step.state, walk.plan + step.plan
        consider(walk, reached)
    return best
