"""Household tasks by text commands, on ALFWorld's rules: find a thing, perhaps clean, heat or cool it, and put it somewhere.

A response is one command on its last line; what stands before it is thought and is not read, and an <action> tag around the command is dropped:

    take mug from shelf

A command that cannot be done is answered by "Nothing happens." and costs a turn (``info["invalid"]``). The reward is 1 at the goal, else 0.

``load(None)`` makes small scenes of our own in a compact wording, ``load("full")`` larger ones in ALFWorld's wording, ``load(FOLDER)`` plays ALFWorld's own
files (``game.tw-pddl`` and ``traj_data.json``): the official folder with train, valid_seen and valid_unseen, or any folder of games.

``snapshot`` and ``restore`` cost microseconds, a snapshot can be restored in another environment object, and ``oracle_action`` plans from any state.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.envs import DataError, Message, TaskSet
from common.envs.household_engine import CLEAN, COOL, HOT, NOTHING, STATIONS, TOGGLEABLE, UNARY, Action, Game, Goal, Grammar, State, plan
from common.envs.household_files import TASK_TYPES, read_game, read_json, read_traj

HORIZON, ALFWORLD_HORIZON = 20, 50
TRAIN, EVAL = 4000, 256
MAX_CHARS = 20_000  # a longer response is not read

# ---------------------------------------------------------------- environment


class Snapshot(NamedTuple):
    """An episode at one moment. Immutable; holds the task, so any environment of the family can go on from it."""

    task: dict[str, Any]
    state: State
    turn: int
    observation: str
    over: bool


class HouseholdEnv:
    """One episode; see the module's text. ``max_turns`` is the horizon: the step that reaches it without success is truncated."""

    def __init__(self, max_turns: int = HORIZON):
        self.max_turns = max_turns
        self.task: dict[str, Any] | None = None

    def _open(self, task: dict[str, Any]) -> None:
        if task is not self.task:
            self.game = read_cached(task["file"]) if "file" in task else build(task)
            self.task = task

    def reset(self, task: dict[str, Any]) -> list[Message]:
        """System message with the commands, user message with the room and the task."""
        self._open(task)
        self.state, self.turn, self.over = self.game.start, 0, False
        self.observation = self.game.intro()
        return [{"role": "system", "content": instructions(self.game.grammar)}, {"role": "user", "content": self.observation}]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info. Raises RuntimeError outside an episode."""
        if self.task is None or self.over:
            raise RuntimeError("no episode is running; call reset first")
        game, self.turn = self.game, self.turn + 1
        found = game.parse(command_in(action))
        invalid = found is None or not game.allowed(self.state, found)
        if invalid:
            self.observation = NOTHING
        else:
            before, self.state = self.state, game.apply(self.state, found)
            self.observation = game.feedback(before, self.state, found)
        success = game.won(self.state)
        truncated = not success and self.turn >= self.max_turns
        self.over = success or truncated
        info: dict[str, Any] = {"invalid": invalid}
        if self.over:
            info |= {"success": float(success), "rewards": {"goal": float(success)}}
        return self.observation, float(success), success, truncated, info

    def snapshot(self) -> Snapshot:
        return Snapshot(self.task, self.state, self.turn, self.observation, self.over)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from the snapshot: same state, observation, and remaining turns. The episode that it was taken from is not touched."""
        self._open(snapshot.task)
        _, self.state, self.turn, self.observation, self.over = snapshot

    @property
    def remaining(self) -> int:
        """Turns left before the horizon."""
        return self.max_turns - self.turn

    def admissible(self) -> list[str]:
        """Every command that is not answered by "Nothing happens.", sorted."""
        return self.game.admissible(self.state)

    def oracle_plan(self) -> list[str]:
        """Commands from this state to the goal, however it was reached; empty at the goal. Raises RuntimeError where the goal is out of reach."""
        return [self.game.command(action) for action in self._plan()]

    def _plan(self) -> list[Action]:
        actions = plan(self.game, self.state)
        if actions is None:
            raise RuntimeError(f"task {self.task['id']}: the goal cannot be reached from this state")
        return actions

    def oracle_action(self) -> str:
        """The next response of the oracle from this state, in the form of the demonstrations: in generated tasks a line of thought stands before a command
        that treats or delivers a thing. "look" at the goal. Raises RuntimeError where the goal is out of reach."""
        actions = self._plan() or [Action("look")]
        purpose = next((action for action in actions if action.kind not in ("gotolocation", "openobject")), actions[0])
        return ("" if "file" in self.task else aim(self.game, purpose)) + self.game.command(actions[0])

    def state_key(self) -> str:
        """32 hex digits; equal for two moments of a task exactly when every rule and text treats them alike. The number of the turn takes no part."""
        s = self.state
        return hashlib.blake2b(repr((s.at, s.held, s.flags, s.contents, sorted(s.places), sorted(s.left))).encode(), digest_size=16).hexdigest()

    def inventory(self) -> list[str]:
        return [self.game.names[self.state.held]] if self.state.held >= 0 else []

    def close(self) -> None:
        """Nothing to release."""


def command_in(text: str) -> str:
    """The command of a response: its last line that is not blank, without an <action> tag."""
    lines = text[-MAX_CHARS:].rpartition("</think>")[2].strip().splitlines()
    return lines[-1].replace("<action>", "").replace("</action>", "").strip() if lines else ""


@lru_cache(maxsize=16)
def instructions(grammar: Grammar) -> str:
    words = {"r": "PLACE", "o": "THING", "co": "THING", "ko": "KNIFE"}
    return "Answer with one command: " + ", ".join(dict.fromkeys(template.format(**words) for template in grammar.templates.values())) + "."


@lru_cache(maxsize=256)
def read_cached(file: str) -> Game:
    return read_game(Path(file))


# ---------------------------------------------------------------- texts of our own scenes

COMMANDS = {
    "gotolocation": "go to {r}",
    "openobject": "open {r}",
    "closeobject": "close {r}",
    "pickupobject": "take {o} from {r}",
    "putobject": "move {o} to {r}",
    "cleanobject": "clean {o} with {r}",
    "heatobject": "heat {o} with {r}",
    "coolobject": "cool {o} with {r}",
    "toggleobject": "use {o}",
    "examinereceptacle": "examine {r}",
    "examineobject": "examine {o}",
    "inventory": "inventory",
    "look": "look",
}
HERE = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
PROPERTIES = (
    ("isclean(o:object) & ishot(o:object)", "hot and clean"),
    ("isclean(o:object) & iscool(o:object)", "cool and clean"),
    ("ishot(o:object)", "hot"),
    ("isclean(o:object)", "clean"),
    ("iscool(o:object)", "cold"),
)


def _grammar(compact: bool) -> Grammar:
    """ALFWorld's wording, or a shorter one in which every word that matters stands alone."""
    listed = "[{o.name | inreceptacle(o:object, r:receptacle)}]" if compact else "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
    opened, shut = "openable(r:receptacle) & opened(r:receptacle)", "openable(r:receptacle)"
    rules = {"list_empty": [("", "nothing")]}
    if compact:
        rules |= {
            "list_separator": [("", "{' '}")],
            "list_last_separator": [("", "{' '}")],
            "intro": [("", "Room: [{r.name | receptacleatlocation(r:receptacle, l:location)}]. Task: #task#")],
            "see": [(opened, f"In {{r.name}}: {listed}."), (shut, "{r.name} is closed."), ("", f"On {{r.name}}: {listed}.")],
            "thing": [*((c, f"{{o.name}} is {word}.") for c, word in PROPERTIES), ("", "{o.name} is nothing special.")],
            "carry": [("holds(a:agent, o:object)", "Holding [{o.name | holds(a:agent, o:object)}]."), ("", "Holding nothing.")],
            "where": [(HERE, f"At [{{r.name | {HERE}}}]."), ("", "In the middle of the room.")],
        }
        answers = ["#see#", "#see#", "{r.name} is closed.", "Took {o.name}.", "Moved {o.name} to {r.name}."]
        answers += ["{o.name} is clean.", "{o.name} is hot.", "{o.name} is cold.", "{o.name} is on.", "#see#", "#thing#", "#carry#", "#where#"]
        answers = [answer + " Task: #task#" for answer in answers]  # a small model does not look back far
    else:
        room = "[{r.indefinite + ' ' + r.name | receptacleatlocation(r:receptacle, l:location)}]"
        around = f"You are in the middle of a room. Looking quickly around you, you see {room}."
        carry = "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}]."
        rules |= {
            "list_separator": [("", ", ")],
            "list_last_separator": [("", ", and ")],
            "intro": [("", "-= Welcome to TextWorld, ALFRED! =-\n\n#where#\n\nYour task is to: #task#")],
            "see": [
                (opened, f"The {{r.name}} is open. In it, you see {listed}."),
                (shut, "The {r.name} is closed."),
                ("", f"On the {{r.name}}, you see {listed}."),
            ],
            "thing": [*((c, f"This is a {word} {{o.name}}.") for c, word in PROPERTIES), ("", "There's nothing special about {o.name}.")],
            "carry": [("holdsany(a:agent)", carry), ("", "You are not carrying anything.")],
            "where": [(HERE, f"You are facing the [{{r.name | {HERE}}}]. Next to it, you see nothing."), ("", around)],
        }
        answers = ["You arrive at {r.name}. #see#", "You open the {r.name}. #see#", "You close the {r.name}."]
        answers += ["You pick up the {o.name} from the {r.name}.", "You move the {o.name} to the {r.name}."]
        answers += [f"You {verb} the {{o.name}} using the {{r.name}}." for verb in ("clean", "heat", "cool")]
        answers += ["You turn on the {o.name}.", "#see#", "#thing#", "#carry#", "#where#"]
    return Grammar(COMMANDS, dict(zip(COMMANDS, answers)), rules, "household")


GRAMMARS = {"compact": _grammar(True), "full": _grammar(False)}

# ---------------------------------------------------------------- scenes

# receptacle -> (ALFWorld's word, has a door, kinds of things that it takes)
RECEPTACLES = {
    "sink": ("sinkbasin", False, "food dish bath"),
    "microwave": ("microwave", True, "food dish"),
    "fridge": ("fridge", True, "food dish"),
    "cabinet": ("cabinet", True, "dish bath"),
    "drawer": ("drawer", True, "small bath"),
    "safe": ("safe", True, "small"),
    "shelf": ("shelf", False, "dish small bath"),
    "desk": ("desk", False, "dish small"),
    "table": ("diningtable", False, "food dish small"),
    "counter": ("countertop", False, "food dish bath"),
    "sofa": ("sofa", False, "small"),
    "bin": ("garbagecan", False, "food bath"),
    "cart": ("cart", False, "dish bath"),
    "stand": ("sidetable", False, "food small"),
}
STATION = {"clean": "sink", "heat": "microwave", "cool": "fridge"}
# thing -> (ALFWorld's word, kind, what can be done with it: c clean, h heat, f cool in the fridge)
THINGS = {
    "mug": ("mug", "dish", "chf"),
    "cup": ("cup", "dish", "chf"),
    "plate": ("plate", "dish", "chf"),
    "bowl": ("bowl", "dish", "cf"),
    "pan": ("pan", "dish", "cf"),
    "apple": ("apple", "food", "chf"),
    "potato": ("potato", "food", "chf"),
    "tomato": ("tomato", "food", "chf"),
    "egg": ("egg", "food", "hf"),
    "bread": ("bread", "food", "hf"),
    "soap": ("soapbar", "bath", "c"),
    "cloth": ("cloth", "bath", "c"),
    "book": ("book", "small", ""),
    "pen": ("pen", "small", ""),
    "watch": ("watch", "small", ""),
    "phone": ("cellphone", "small", ""),
}
FAMILIES = ("pick", "look", "clean", "heat", "cool", "two")
NEEDS = {"clean": (CLEAN, "c", "clean"), "heat": (HOT, "h", "hot"), "cool": (COOL, "f", "cool")}
ABLE = {"c": UNARY["cleanable"], "h": UNARY["heatable"], "f": UNARY["coolable"]}
SIZES = {"compact": (5, 5), "full": (12, 12)}  # receptacles, things besides the ones that the task names
SCENES = 20  # rooms of the training split; as many others are for the unseen evaluation


def takes(receptacle: str, thing: str) -> bool:
    return THINGS[thing][1] in RECEPTACLES[receptacle][2].split()


def _sentence(family: str, thing: str, target: str, compact: bool) -> str:
    if compact:
        first = "two " if family == "two" else NEEDS[family][2] + " " if family in NEEDS else ""
        return f"{first}{thing} {'at' if family == 'look' else 'in'} {target}."
    if family == "look":
        return f"examine the {thing} with the {target}."
    if family == "two":
        return f"put two {thing} in {target}."
    return f"put a {NEEDS[family][2] + ' ' if family in NEEDS else ''}{thing} in {target}."


def build(task: dict[str, Any]) -> Game:
    """The game of a generated task: its receptacles in the order of the layout, its things in the order of ``things``."""
    compact, layout = task["wording"] == "compact", task["layout"]
    words = [(r if compact else RECEPTACLES[r][0]) for r in layout]
    words += [(("lamp" if compact else "desklamp") if thing == "lamp" else thing if compact else THINGS[thing][0]) for thing, _ in task["things"]]
    many, seen, names = Counter(words), Counter(), []
    for word in words:
        seen[word] += 1
        names.append(word if compact and many[word] == 1 else f"{word} {seen[word]}")
    n = len(layout)
    things = [thing for thing, _ in task["things"]]
    flags = [UNARY["openable"] if RECEPTACLES[r][1] else 0 for r in layout]
    flags += [TOGGLEABLE if t == "lamp" else UNARY["pickupable"] | sum(ABLE[c] for c in THINGS[t][2]) for t in things]
    family, thing, target = task["family"], task["target"]["thing"], task["target"]["place"]
    wanted = frozenset(n + i for i, t in enumerate(things) if t == thing)
    lamps = tuple(n + i for i, t in enumerate(things) if t == "lamp") if family == "look" else ()
    places = tuple(r for r, name in enumerate(layout) if name == target)
    goal = Goal(wanted, places, NEEDS.get(family, (0,))[0], 2 if family == "two" else 1, lamps)
    first = n + len(things)  # the number of the first location; one in front of each receptacle, and the middle of the room
    contents = tuple(tuple(n + i for i, (_, place) in enumerate(task["things"]) if place == r) for r in range(n))
    start = State(first + n, -1, tuple(flags), contents, frozenset((n + i, first + place) for i, (_, place) in enumerate(task["things"])), frozenset())
    shown = (thing, target) if compact else (THINGS[thing][0], "desklamp" if family == "look" else RECEPTACLES[target][0])
    return Game(
        names=(*names, *(f"loc {i}" for i in range(n + 1)), "agent"),
        types=(*(frozenset({RECEPTACLES[r][0]}) for r in layout), *(frozenset({t}) for t in things)),
        receptacles=n,
        where=tuple((first + r,) for r in range(n)),
        accepts=tuple(frozenset(t for t in THINGS if takes(r, t)) for r in layout),
        inside=(),
        start=start,
        goal=goal,
        grammar=GRAMMARS[task["wording"]],
        task=_sentence(family, *shown, compact),
    )


def _rooms(rng: random.Random, wording: str) -> tuple[list[list[str]], list[list[str]]]:
    """The receptacles of the rooms for training and of those for the unseen evaluation; no two rooms have the same. Large rooms have some of them twice."""
    others = [r for r in RECEPTACLES if r not in STATION.values()]
    more = SIZES[wording][0] - len(STATION)
    found: set[tuple[str, ...]] = set()
    while len(found) < 2 * SCENES:
        chosen = rng.sample(others, more if wording == "compact" else more * 2 // 3)
        # the appliances take food and dishes; small things need a place too, and a lamp a surface
        if any("small" in RECEPTACLES[r][2] for r in chosen) and any(not RECEPTACLES[r][1] for r in chosen):
            found.add(tuple(sorted([*STATION.values(), *chosen, *chosen[: more - len(chosen)]])))
    rooms = sorted(found)
    rng.shuffle(rooms)
    return [list(room) for room in rooms[:SCENES]], [list(room) for room in rooms[SCENES:]]


def _held_out(family: str, thing: str, target: str) -> bool:
    """One in five combinations of family, thing and place is for the unseen evaluation only."""
    return hashlib.sha256(f"{family} {thing} {target}".encode()).digest()[0] < 51


def _task(rng: random.Random, room: list[str], scene: str, wording: str, held_out: bool, family: str) -> dict[str, Any] | None:
    """A task in a room whose receptacles stand in a new order, or None where this draw gives none."""
    layout = rng.sample(room, len(room))
    kinds = [t for t in THINGS if family not in NEEDS or NEEDS[family][1] in THINGS[t][2]]
    thing = rng.choice(kinds)
    if family == "look":
        target = "lamp"
    else:
        # a thing is not put back into the appliance that treats it
        targets = [r for r in layout if takes(r, thing) and r != STATION.get(family)]
        if not targets:
            return None
        target = rng.choice(targets)
    if _held_out(family, thing, target) != held_out:
        return None
    sources = [i for i, r in enumerate(layout) if takes(r, thing) and r != target]
    surfaces = [i for i, r in enumerate(layout) if not RECEPTACLES[r][1] and r not in STATION.values()]
    count = 2 if family == "two" else 1
    if not sources:
        return None
    things = [[thing, rng.choice(sources)] for _ in range(count)]
    for other in rng.sample([t for t in THINGS if t != thing], SIZES[wording][1]):
        spots = [i for i, r in enumerate(layout) if takes(r, other)]
        if spots:
            things.append([other, rng.choice(spots)])
    things.append(["lamp", rng.choice(surfaces)])
    rng.shuffle(things)
    return {"family": family, "wording": wording, "scene": scene, "layout": layout, "things": things, "target": {"thing": thing, "place": target}}


def _tasks(seed: int, wording: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = random.Random(f"household {wording} {seed}")
    known, unknown = _rooms(rng, wording)
    drawn: set[str] = set()

    def draw(split: str, rooms: list[list[str]], held_out: bool, number: int) -> dict[str, Any]:
        while True:
            i = rng.randrange(len(rooms))
            task = _task(rng, rooms[i], f"{'new' if held_out else 'known'}-{i}", wording, held_out, FAMILIES[number % len(FAMILIES)])
            if task is not None and str(task) not in drawn:
                drawn.add(str(task))
                return {"id": f"household-{wording}-{split}-{seed}-{number}", "split": split, **task, "difficulty": len(plan(build(task), build(task).start))}

    train = [draw("train", known, False, i) for i in range(TRAIN)]
    pairs = [(draw("seen", known, False, i), draw("unseen", unknown, True, i)) for i in range(EVAL // 2)]
    return train, [task for pair in pairs for task in pair]


# ---------------------------------------------------------------- demonstrations

# habits of the careless expert: the chance of each slip where it can happen
SKIPS_TREATMENT, STOPS_AT_ONE, WRONG_STATION, WRONG_PLACE, PASSES_DOOR, FORGETS_DOOR = 0.7, 0.7, 0.4, 0.35, 0.1, 0.1
LOOKS_ABOUT, NOTICES, GUESSES = 0.02, 0.1, 0.12
OTHER_STATION = {"sink": "fridge", "microwave": "fridge", "fridge": "microwave"}


class _Over(Exception):
    """The episode ended."""


class _Expert:
    """Knows what it has seen: searches the receptacles in the order of the room and remembers what lay where. ``slip(p)`` says whether to make a slip."""

    def __init__(self, task: dict[str, Any], slip: Callable[[float], bool]):
        self.env, self.slip = HouseholdEnv(HORIZON if task["wording"] == "compact" else ALFWORLD_HORIZON), slip
        self.messages = self.env.reset(task)
        self.game, self.family, self.layout = self.env.game, task["family"], task["layout"]
        self.known: dict[int, int] = {}  # thing -> receptacle in which it was seen
        self.searched: set[int] = set()
        self.aim = ""  # the thought before the next commands

    def do(self, kind: str, *entities: int) -> None:
        """Executes a command, perhaps looks about. Raises _Over at the end of the episode."""
        thought = "" if kind == "look" else self.aim
        self.messages.append({"role": "assistant", "content": thought + self.game.command(Action(kind, *entities))})
        observation, _, terminated, truncated, _ = self.env.step(self.messages[-1]["content"])
        if terminated or truncated:
            raise _Over
        self.messages.append({"role": "user", "content": observation})
        if kind != "look" and self.slip(LOOKS_ABOUT):
            self.do("look")

    def go(self, r: int) -> None:
        if self.env.state.at not in self.game.where[r]:
            self.do("gotolocation", r)

    def closed(self, r: int) -> bool:
        return not self.game.shows(self.env.state, r)

    def search(self) -> None:
        """Looks into the next receptacle of the room that was not searched; all of them again when none is left, for doors may have been passed."""
        n = len(self.layout)
        self.searched = self.searched if len(self.searched) < n else set()
        here = next((r for r in range(n) if self.env.state.at in self.game.where[r]), n - 1)
        r = next(r % n for r in range(here + 1, here + 1 + n) if r % n not in self.searched)
        self.go(r)
        self.enter(r, PASSES_DOOR)

    def enter(self, r: int, forgets: float = 0.0) -> None:
        """Opens the receptacle that it stands at, unless it forgets to, and sees what is in it."""
        self.searched.add(r)
        if self.closed(r):
            if self.slip(forgets):
                return
            self.do("openobject", r)
        self.known |= dict.fromkeys(self.env.state.contents[r], r)

    def locate(self, wanted: Collection[int]) -> int:
        """One of the wanted things, in front of its open receptacle; the one at hand where there are several."""
        self.aim = ""
        while not (found := [o for o in sorted(wanted) if o in self.known]):
            self.search()
            if self.known.keys().isdisjoint(wanted) and self.slip(GUESSES):  # as if it were there: what to do after a refusal is learned too
                self.do("pickupobject", min(wanted), next(r for r in range(len(self.layout)) if self.env.state.at in self.game.where[r]))
        thing = min(found, key=lambda o: self.env.state.at not in self.game.where[self.known[o]])
        self.go(self.known[thing])
        self.enter(self.known[thing])
        return thing

    def take(self, wanted: Collection[int]) -> int:
        thing = self.locate(wanted)
        self.do("pickupobject", thing, self.known.pop(thing))
        return thing

    def bring(self, wanted: Collection[int], target: int) -> int:
        """Fetches one of the wanted things, treats it if the task asks for that and it is not treated yet, and puts it to the target."""
        thing = self.take(wanted)
        if self.family in NEEDS and not self.env.state.flags[thing] & NEEDS[self.family][0] and not self.slip(SKIPS_TREATMENT):
            station = STATION[self.family]
            r = self.layout.index(OTHER_STATION[station] if self.slip(WRONG_STATION) else station)
            treatment = Action(f"{self.family}object", thing, r)
            self.aim = aim(self.game, treatment)
            self.go(r)
            self.do(*treatment)
        if self.slip(WRONG_PLACE):
            target = next((r for r in range(len(self.layout)) if r != target and self.game.puts(thing, r)), target)
        self.aim = aim(self.game, Action("putobject", thing, target))
        self.go(target)
        if self.closed(target) and self.slip(FORGETS_DOOR):
            self.do("putobject", thing, target)
        self.enter(target)
        self.do("putobject", thing, target)
        self.known[thing] = target
        return thing

    def solve(self) -> None:
        goal = self.game.goal
        if goal.lamps:
            self.take(goal.objects)
            self.do("toggleobject", self.locate(goal.lamps))
        target, wanted = goal.receptacles[0], set(goal.objects)
        wanted.remove(self.bring(wanted, target))
        if wanted and goal.count == 2 and not self.slip(STOPS_AT_ONE):
            self.bring(wanted, target)
        # the episode goes on, so something is wrong; mostly the expert does not see what
        for _ in range(2):
            self.do("look")
            if self.slip(NOTICES):
                self.slip = lambda p: False
                for thing in sorted(goal.objects):
                    if self.known.get(thing) != target or self.family in NEEDS:
                        self.bring([thing], target)


def aim(game: Game, action: Action) -> str:
    """The line of thought before commands that lead to this action: in a treatment and a delivery the words that they need, nothing in a search."""
    kind, o, r = action
    if kind == "putobject":
        return f"put {game.names[o]} {game.names[r]}\n"
    return f"{kind.removesuffix('object')} {game.names[o]}\n" if kind in STATIONS else ""


def _conversation(task: dict[str, Any], slip: Callable[[float], bool]) -> list[Message]:
    expert = _Expert(task, slip)
    with contextlib.suppress(_Over):
        expert.solve()
    return expert.messages if expert.messages[-1]["role"] == "assistant" else expert.messages[:-1]


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """A whole episode that reaches the goal, by an expert who sees no more than a player does."""
    return _conversation(task, lambda p: False)


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The same expert with habits: passes closed doors, skips the treatment or tries it at the wrong appliance, brings things to the first place that takes
    them, stops after one of two things, reaches for the thing where it is not; it rarely notices that the task is not done, and looks about."""
    return _conversation(task, lambda p: rng.random() < p)


# ---------------------------------------------------------------- ALFWorld's files

SPLITS = {"train": "train", "valid_seen": "seen", "valid_unseen": "unseen"}


def _games(folder: Path, skipped: Counter[str]) -> list[dict[str, Any]]:
    """Tasks of every game below a folder, chosen as ALFWorld chooses them; the others are counted by reason."""
    tasks = []
    for file in sorted(folder.rglob("traj_data.json")):
        game = file.with_name("game.tw-pddl")
        traj = read_traj(file)
        if "movable" in str(file.parent) or "Sliced" in str(file.parent) or traj["pddl_params"]["object_sliced"]:
            skipped["movable receptacle or sliced object"] += 1
        elif traj["task_type"] not in TASK_TYPES:
            skipped[f"task type {traj['task_type']}"] += 1
        elif not game.is_file():
            skipped["no game.tw-pddl"] += 1
        elif read_json(game, ()).get("solvable") is not True:
            skipped["not marked solvable"] += 1
        else:
            read_game(game)
            tasks.append({"id": str(file.parent.relative_to(folder)), "family": TASK_TYPES[traj["task_type"]], "file": str(game)})
            tasks[-1]["scene"] = str(traj.get("scene", {}).get("scene_num", ""))
    return tasks


def load_folder(path: Path) -> TaskSet:
    """The official layout (train, valid_seen, valid_unseen), or any folder of games, split by a hash of their path. Raises DataError."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; give a folder with ALFWorld games (game.tw-pddl and traj_data.json), or with train, valid_seen, valid_unseen")
    skipped: Counter[str] = Counter()
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    official = [name for name in SPLITS if (path / name).is_dir()]
    for name in official:
        tasks = [{**task, "id": f"{name}/{task['id']}", "split": SPLITS[name]} for task in _games(path / name, skipped)]
        (train if name == "train" else evaluation).extend(tasks)
    if not official:
        for task in _games(path, skipped):
            held = hashlib.sha256(task["id"].encode()).digest()[0] < 51
            (evaluation if held else train).append(task)
        scenes = {task["scene"] for task in train}
        train = [{**task, "split": "train"} for task in train]
        evaluation = [{**task, "split": "seen" if task["scene"] in scenes else "unseen"} for task in evaluation]
    if not train and not evaluation:
        raise DataError(f"{path}: no game that can be played below it ({dict(skipped) or 'no traj_data.json'})")
    split = f"folders {', '.join(official)}" if official else "no official folders: a game is in eval when the first byte of sha256(path) is below 51"
    notes = {"games": len(train) + len(evaluation), "skipped": dict(skipped), "split": split}
    return TaskSet(f"alfworld:{path}", train, evaluation, partial(HouseholdEnv, ALFWORLD_HORIZON), max_turns=ALFWORLD_HORIZON, notes=notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """Generated scenes (4,000 training tasks; 256 for evaluation, seen and unseen in turn) in ``compact`` (default) or ``full`` size and wording, or a folder
    of ALFWorld games. Raises DataError for unusable data."""
    if path is not None and path not in SIZES:
        return load_folder(Path(path))
    wording = path or "compact"
    train, evaluation = _tasks(seed, wording)
    notes = {"split": "seen: new tasks in the rooms of training; unseen: new rooms, and combinations of family, thing and place that training never asks for"}
    horizon = HORIZON if wording == "compact" else ALFWORLD_HORIZON
    name = "household" if wording == "compact" else f"household:{wording}"
    return TaskSet(name, train, evaluation, partial(HouseholdEnv, horizon), demonstrate, careless=careless, max_turns=horizon, notes=notes)
