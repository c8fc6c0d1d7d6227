"""Office automation: a list of goals that is shown one by one, 15 to 40 tool calls, one reward at the end.

A world of 48 records (bills, orders, clients, cases), some with an outdated twin. One call a turn, on the response's last line; thought may stand before it:

    next              shows the next goal                              find KIND NAME    the ids of the records, each live or old
    open ID           shows a record's fields; it is then open         set FIELD VALUE   changes the open record
    pay AMOUNT        pays the open bill                               send NAME VALUE   tells a person a value
    close ID          closes a record for good                         done              ends the episode

Goals must be reached in order: ``bill anna : pay due`` (not the total), ``order ben : set city rome``, ``order dora : send count to carl``,
``client emma : copy city to order fred``, ``case gina : close``; always the live record. Success is 1 when ``done`` finds every goal reached and nothing else
changed. A payment, a message or a closing that is not the goal that is due cannot be taken back, and the episode is lost, which nobody says before the end; a
wrong ``set`` can be set right again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from common.envs import DataError, Message, TaskSet

INSTRUCTION = (
    "reach all goals in order , one call a turn : next | find KIND NAME | open ID | set FIELD VALUE | pay AMOUNT | send NAME VALUE | "
    "close ID | done . use live ."
)
NAMES = "anna ben carl dora emma fred gina hugo ivan jane kurt lena".split()
KINDS = {"bill": ("total", "due"), "order": ("count", "city"), "client": ("phone", "city"), "case": ("level", "count")}
CITIES = "rome oslo paris berlin lima tokyo".split()
IDS = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou" if c + v not in ("be", "do", "go", "he", "me", "no", "so", "to", "we")]  # no word, no value
NUMBERS = [str(n) for n in range(80, 100)]
CALLS = {"next": 0, "find": 2, "open": 1, "set": 2, "pay": 1, "send": 2, "close": 1, "done": 0}  # words after the verb
TRAIN, EVAL = 6000, 256
TRAIN_GOALS = (1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9)
MIN_TURNS, MAX_TURNS = 15, 40  # of a validation task, by an expert
SPARE_TURNS = 8  # a task's budget beyond what an expert needs
TWINS = 10  # records of the 48 with an outdated twin; find shows either first
SWAPPED_SHARE = 0.25  # records that show their second field first
# the careless expert: opens the first row though it is old, takes the first field's value, leaves a goal out, stops after a goal
TAKES_FIRST_ROW, TAKES_FIRST_FIELD, SKIPS_GOAL, STOPS_EARLY = 0.65, 0.65, 0.02, 0.02
MAX_CHARS = 20_000

# ("pay" | "close", kind, name), ("set", kind, name, field, value), ("tell", kind, name, field, person), ("copy", kind, name, field, kind, name)
Goal = tuple[str, ...]


@dataclass(frozen=True)
class Record:
    kind: str
    name: str
    live: bool
    fields: dict[str, str]  # in the order in which they are shown


@dataclass(frozen=True)
class Step:
    """A goal with its records looked up: the effect that reaches it is (verb, record id or "", field or person, value)."""

    text: str
    source: str  # id of the record that holds the value; of the record itself for close and set
    effect: tuple[str, str, str, str]


@lru_cache(maxsize=512)
def world(seed: str) -> dict[str, Record]:
    """The records of a task: id -> record. Not to be changed."""
    rng = random.Random(seed)
    ids = iter(rng.sample(IDS, len(KINDS) * len(NAMES) + TWINS))
    everything = [(kind, name) for kind in KINDS for name in NAMES]
    twins = set(rng.sample(everything, TWINS))
    records = {}
    for kind, name in everything:
        rows = rng.sample([True, False], 2) if (kind, name) in twins else [True]
        for live in rows:
            first = int(rng.random() * len(NUMBERS))
            second = (first + 1 + int(rng.random() * (len(NUMBERS) - 1))) % len(NUMBERS)  # another number
            a, b = KINDS[kind]
            fields = {a: NUMBERS[first], b: CITIES[int(rng.random() * len(CITIES))] if b == "city" else NUMBERS[second]}
            swapped = rng.random() < SWAPPED_SHARE
            records[next(ids)] = Record(kind, name, live, {b: fields[b], a: fields[a]} if swapped else fields)
    return records


def goal_text(goal: Goal) -> str:
    match goal:
        case "set", kind, name, field, value:
            return f"{kind} {name} : set {field} {value}"
        case "tell", kind, name, field, person:
            return f"{kind} {name} : send {field} to {person}"
        case "copy", kind, name, field, kind2, name2:
            return f"{kind} {name} : copy {field} to {kind2} {name2}"
        case "pay", kind, name:
            return f"{kind} {name} : pay due"
        case "close", kind, name:
            return f"{kind} {name} : close"
    raise DataError(f"goal {goal!r} is none of pay, close, set, tell, copy")


def plan(task: dict[str, Any]) -> tuple[dict[str, Record], list[Step], list[dict[tuple[str, str], str]]]:
    """Records, steps, and the edits (record id, field) -> value that are right before each step and at the end."""
    records = world(task["world"])
    live = {(record.kind, record.name): key for key, record in records.items() if record.live}
    steps, edits = [], [{}]
    for goal in map(tuple, task["goals"]):
        text, verb, key, now = goal_text(goal), goal[0], live[goal[1], goal[2]], dict(edits[-1])

        def value(field: str, key: str = key, now: dict[tuple[str, str], str] = now) -> str:
            return now.get((key, field), records[key].fields[field])

        if verb == "pay":
            effect = ("pay", key, "due", value("due"))
        elif verb == "close":
            effect = ("close", key, "", "")
        elif verb == "tell":
            effect = ("send", "", goal[4], value(goal[3]))
        else:
            target = key if verb == "set" else live[goal[4], goal[5]]
            effect = ("set", target, goal[3], goal[4] if verb == "set" else value(goal[3]))
            now[target, goal[3]] = effect[3]
        steps.append(Step(text, key, effect))
        edits.append({place: v for place, v in now.items() if records[place[0]].fields[place[1]] != v})
    return records, steps, edits


def calls(goals: Sequence[Goal]) -> int:
    """Calls that an expert needs: for each goal the one that shows it and its own, then ``next`` in vain and ``done``."""
    return 2 + sum({"copy": 6, "close": 3}.get(goal[0], 4) for goal in goals)


class AutomationEnv:
    """One episode at a time; nothing but ``done`` or the end of the task's turn budget (truncated, success 0) ends it.

    ``info``: ``invalid`` (the call could not be carried out) on each step; at the end ``success``, ``rewards`` ({"goals": success}), ``goals_reached``
    (a share), ``broken`` and ``verifier_text``.
    """

    def __init__(self) -> None:
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task = task
        self.records, self.steps, self.right_edits = plan(task)
        self.turns = self.reached = self.shown = 0
        self.broken = False
        self.opened = ""
        self.found: frozenset[str] = frozenset()  # ids that find has shown
        self.fresh: frozenset[str] = frozenset()  # those found since the last goal was reached, and below those opened since then
        self.seen: frozenset[str] = frozenset()
        self.closed: frozenset[str] = frozenset()
        self.edits: dict[tuple[str, str], str] = {}  # fields that differ from the start
        return [{"role": "user", "content": INSTRUCTION}]

    def value(self, key: str, field: str) -> str:
        return self.edits.get((key, field), self.records[key].fields[field])

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One call. Raises RuntimeError when no episode is open."""
        self._need_task()
        self.turns += 1
        lines = action.strip().splitlines() if len(action) <= MAX_CHARS else []
        verb, *words = lines[-1].split() if lines and lines[-1].split() else [""]
        if verb == "done" and not words:
            return "", float(self._succeeded()), True, False, {"invalid": False, **self._end(self._succeeded())}
        if verb not in CALLS or len(words) != CALLS[verb]:
            observation, invalid = f"no call {verb} with {len(words)} words" if verb in CALLS else "no call on the last line", True
        else:
            observation = getattr(self, f"_{verb}")(*words)
            invalid = observation.startswith("no ")
        info: dict[str, Any] = {"invalid": invalid}
        truncated = self.turns >= self.task["turns"]
        if truncated:
            info |= self._end(False)
        return observation, 0.0, False, truncated, info

    def _need_task(self) -> None:
        if self.task is None:
            raise RuntimeError("no open episode: reset() first")

    def _succeeded(self) -> bool:
        return self.reached == len(self.steps) and not self.broken and self.edits == self.right_edits[-1]

    def _end(self, success: bool) -> dict[str, Any]:
        self.task = None
        rest = "" if self.reached == len(self.steps) else f"goal {self.reached + 1} {self.steps[self.reached].text} was not reached"
        text = "a payment, message or closing was wrong" if self.broken else rest or ("" if success else "a field has a wrong value, or done was never called")
        extra = {"goals_reached": self.reached / len(self.steps), "broken": self.broken}
        return {"success": float(success), "rewards": {"goals": float(success)}, **extra, "verifier_text": {"goals": text}}

    def _effect(self, verb: str, key: str, what: str, value: str) -> None:
        if self.reached < len(self.steps) and (verb, key, what, value) == self.steps[self.reached].effect:
            self.reached += 1
            self.fresh = self.seen = frozenset()
        elif verb != "set":
            self.broken = True

    def _next(self) -> str:
        self.shown = min(self.shown + 1, len(self.steps) + 1)
        return self.steps[self.shown - 1].text if self.shown <= len(self.steps) else "nothing left"

    def _find(self, kind: str, name: str) -> str:
        rows = {key: record for key, record in self.records.items() if (record.kind, record.name) == (kind, name)}
        self.found |= set(rows)
        self.fresh |= set(rows)
        shown = [f"{'live' if record.live else 'old'} {key}" for key, record in rows.items()]
        return f"{kind} {name} : {' , '.join(shown)}" if rows else f"no {kind} {name}"

    def _open(self, key: str) -> str:
        if key not in self.found or key in self.closed:
            return f"no {key} , it is closed" if key in self.closed else f"no {key} , find it first"
        self.opened, record = key, self.records[key]
        self.seen |= {key}
        return f"{key} {record.kind} {record.name} : " + " , ".join(f"{field} {self.value(key, field)}" for field in record.fields)

    def _set(self, field: str, value: str) -> str:
        key = self.opened
        if not key or field not in self.records[key].fields:
            return f"no {field} here" if key else "no open record"
        self.edits = {place: v for place, v in self.edits.items() if place != (key, field)}
        if value != self.records[key].fields[field]:
            self.edits[key, field] = value
        self._effect("set", key, field, value)
        return f"{field} is {value} now"

    def _pay(self, amount: str) -> str:
        key = self.opened
        if not key or self.records[key].kind != "bill":
            return "no bill is open"
        self._effect("pay", key, "due", amount)
        return f"paid {amount}"

    def _send(self, person: str, value: str) -> str:
        if person not in NAMES:
            return f"no person {person}"
        self._effect("send", "", person, value)
        return f"sent {value} to {person}"

    def _close(self, key: str) -> str:
        if key not in self.found or key in self.closed:
            return f"no {key} , it is closed" if key in self.closed else f"no {key} , find it first"
        self.closed |= {key}
        self.opened = "" if self.opened == key else self.opened
        self._effect("close", key, "", "")
        return f"closed {key}"

    def oracle_action(self) -> str:
        """The next call of an expert, from any state: takes back wrong edits, then works on the goal that is due. ``done`` where the episode is lost."""
        self._need_task()
        if self.broken:
            return "lost\ndone"
        right = self.right_edits[self.reached]
        step = self.steps[self.reached] if self.reached < len(self.steps) else None
        verb, key, what, value = step.effect if step else ("", "", "", "")
        wrong = [place for place in sorted({*self.edits, *right}) if self.edits.get(place) != right.get(place) and (verb, *place) != ("set", key, what)]
        if wrong:
            key, field = wrong[0]
            return self._on(key, f"undo {field}\n") or set_text(field, right.get(wrong[0], self.records[key].fields[field]))
        if self.shown <= self.reached:
            return "next"
        if step is None:
            return "done"
        if verb == "close":
            return find_text(self.records[key]) if key not in self.fresh else f"live {key}\nclose {key}"
        if verb == "set":
            if step.source == key:
                return self._on(key) or set_text(what, value)
            if step.source not in self.seen:  # copy: read the value first
                return self._on(step.source)
            return self._on(key, copy_text(what, value, self.records[key].kind, self.records[key].name)) or set_text(what, value)
        if verb == "pay":
            return self._on(key) or pay_text(value)
        if step.source not in self.seen:
            return self._on(step.source)
        return send_text(self.task["goals"][self.reached][3], value, what)

    def _on(self, key: str, thought: str = "") -> str:
        """The call that leads to having record ``key`` open, found and opened for this goal; "" when it is."""
        if self.opened == key and key in self.seen:
            return ""
        record = self.records[key]
        return open_text("live" if record.live else "old", key) if key in self.fresh else thought + find_text(record)

    def admissible(self) -> list[str]:
        """Calls that can be carried out now; values are those seen for this goal and those that goals named."""
        self._need_task()
        record = self.records.get(self.opened)
        values = {value for key in self.seen for field, start in self.records[key].fields.items() for value in (start, self.value(key, field))}
        values = sorted(values | {goal[4] for goal in self.task["goals"][: self.shown] if goal[0] == "set"})
        result = ["next", *(f"find {kind} {name}" for kind in KINDS for name in NAMES)]
        result += [f"{verb} {key}" for verb in ("open", "close") for key in sorted(self.found - self.closed)]
        result += [f"set {field} {value}" for field in (record.fields if record else ()) for value in values]
        result += [f"pay {value}" for value in values] if record and record.kind == "bill" else []
        return [*result, *(f"send {name} {value}" for name in NAMES for value in values), "done"]

    def snapshot(self) -> tuple[Any, ...]:
        sets = self.found, self.fresh, self.seen, self.closed
        return self.task, self.turns, self.reached, self.shown, self.broken, self.opened, *sets, tuple(self.edits.items())

    def restore(self, state: tuple[Any, ...]) -> None:
        self.task, *_ = state
        if self.task is not None:
            self.records, self.steps, self.right_edits = plan(self.task)
        _, self.turns, self.reached, self.shown, self.broken, self.opened, *sets, edits = state
        self.found, self.fresh, self.seen, self.closed = sets
        self.edits = dict(edits)

    def state_key(self) -> str:
        """Equal for equal states of a task; turns used are not part of it."""
        self._need_task()
        edits = sorted([*place, value] for place, value in self.edits.items())
        sets = [sorted(ids) for ids in (self.found, self.fresh, self.seen, self.closed)]
        return json.dumps([self.task["id"], self.reached, self.shown, self.broken, self.opened, *sets, edits])

    def close(self) -> None:
        self.task = None


# ---------------------------------------------------------------- embedded tasks


def find_text(record: Record) -> str:
    return f"find {record.kind} {record.name}"


def copy_text(field: str, value: str, kind: str, name: str) -> str:
    return f"copy {field} {value} to {kind} {name}\n"


def open_text(state: str, key: str) -> str:
    return f"{state} {key}\nopen {key}"


def set_text(field: str, value: str) -> str:
    return f"{field} to {value}\nset {field} {value}"


def pay_text(value: str) -> str:
    return f"due {value}\npay {value}"


def send_text(field: str, value: str, person: str) -> str:
    return f"{field} {value} to {person}\nsend {person} {value}"


def pairs(split: str) -> list[tuple[str, str]]:
    """(kind, name) of the records that goals of a split are about: every third pair is kept for validation; kinds and names are in both."""
    return [(kind, name) for i, kind in enumerate(KINDS) for j, name in enumerate(NAMES) if ((i + j) % 3 == 0) == (split == "eval")]


def draw_goals(rng: random.Random, split: str, count: int) -> list[Goal]:
    """``count`` goals; no record is changed twice, a closed one is not needed again."""
    free = pairs(split)  # not changed, paid or closed yet
    readable = list(free)
    goals: list[Goal] = []
    while len(goals) < count:
        verb = rng.choice(("pay", "set", "set", "tell", "copy", "close"))
        kinds = {"pay": ("bill",), "close": ("case",), "set": ("order", "client", "case"), "tell": tuple(KINDS), "copy": ("order", "client", "case")}[verb]
        choices = [pair for pair in (readable if verb in ("tell", "copy") else free) if pair[0] in kinds]
        if not choices:
            continue
        pair = rng.choice(choices)
        if verb in ("pay", "close"):
            goals.append((verb, *pair))
        elif verb == "set":
            field = rng.choice(KINDS[pair[0]])
            goals.append((verb, *pair, field, rng.choice(CITIES if field == "city" else NUMBERS)))
        elif verb == "tell":
            goals.append((verb, *pair, rng.choice(KINDS[pair[0]]), rng.choice([name for name in NAMES if name != pair[1]])))
        else:
            targets = [(field, other) for field in KINDS[pair[0]] for other in free if other != pair and other[0] != "bill" and field in KINDS[other[0]]]
            if not targets:
                continue
            field, target = rng.choice(targets)
            goals.append((verb, *pair, field, *target))
            pair = target
        if verb != "tell":
            free.remove(pair)
        if verb == "close":
            readable.remove(pair)
    return goals


def _tasks(split: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f"automation {split}")
    tasks: list[dict[str, Any]] = []
    while len(tasks) < count:
        wanted = rng.choice(TRAIN_GOALS) if split == "train" else rng.randint(3, 10)
        goals = draw_goals(rng, split, wanted)
        turns = calls(goals)
        if turns > MAX_TURNS or (split == "eval" and turns < MIN_TURNS):
            continue
        name = f"automation-{split}-{len(tasks):04d}"
        task = {
            "id": name,
            "world": f"{name} {rng.getrandbits(32)}",
            "goals": [list(goal) for goal in goals],
            "turns": turns + SPARE_TURNS,
            "difficulty": turns,
        }
        records, steps, _ = plan(task)
        if all(step.effect[0] != "set" or records[step.effect[1]].fields[step.effect[2]] != step.effect[3] for step in steps):  # every set changes something
            tasks.append(task)
    return tasks


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The conversation of an expert that reaches every goal in the fewest calls."""
    env = AutomationEnv()
    messages, ended = env.reset(task), False
    while not ended:
        action = env.oracle_action()
        observation, _, ended, _, _ = env.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    return messages[:-1]


def careless(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert who mostly takes the first row although it is old and the value of the first field although another is asked for, and
    now and then leaves a goal out or stops after one."""
    env = AutomationEnv()
    messages = env.reset(task)

    def act(action: str) -> str:
        observation = env.step(action)[0]
        messages.extend([{"role": "assistant", "content": action}, {"role": "user", "content": observation}])
        return observation

    def find(kind: str, name: str, thought: str = "") -> tuple[str, str]:
        rows = [row.split() for row in act(f"{thought}find {kind} {name}").partition(" : ")[2].split(" , ")]
        live = next(row for row in rows if row[0] == "live")
        return tuple(rows[0] if rng.random() < TAKES_FIRST_ROW else live)

    def read(state: str, key: str, field: str) -> tuple[str, str]:
        """(field, value) that the expert takes; ("", "") from a record that it has closed before."""
        shown = dict(part.split() for part in act(open_text(state, key)).partition(" : ")[2].split(" , ") if part)
        first = next(iter(shown), "")
        return (field, shown.get(field, "")) if first == "" or rng.random() >= TAKES_FIRST_FIELD else (first, shown[first])

    stopped = False
    for goal in map(tuple, task["goals"]):
        act("next")
        if rng.random() < SKIPS_GOAL:
            continue
        state, key = find(goal[1], goal[2])
        match goal:
            case "close", *_:
                act(f"{state} {key}\nclose {key}")
            case "pay", *_:
                field, value = read(state, key, "due")
                act(f"{field} {value}\npay {value}")
            case "tell", _, _, field, person:
                field, value = read(state, key, field)
                act(send_text(field, value, person))
            case "set", _, _, field, value:
                act(open_text(state, key))
                act(set_text(field, value))
            case "copy", _, _, field, kind, name:
                act(open_text(state, key))
                value = env.value(key, field)
                act(open_text(*find(kind, name, copy_text(field, value, kind, name))))
                act(set_text(field, value))
        stopped = rng.random() < STOPS_EARLY
        if stopped:
            break
    if not stopped:
        act("next")
    act("done")
    return messages[:-1]


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded tasks: 6,000 for training (1 to 9 goals, 5 to 40 calls) and 256 for validation (15 to 40 calls). ``seed`` orders the training tasks.

    Goals of validation tasks are about other pairs of kind and name than those of training tasks. Raises DataError for a path: there is no published data in
    this form.
    """
    if path is not None:
        raise DataError(f"--env automation:{path}: automation has embedded tasks only; use --env automation")
    train = _tasks("train", TRAIN)
    random.Random(seed).shuffle(train)
    notes = {"split": "validation goals are about pairs of kind and name that no training goal is about"}
    budget = MAX_TURNS + SPARE_TURNS
    return TaskSet("automation", train, _tasks("eval", EVAL), AutomationEnv, demonstrate, careless=careless, max_turns=budget, notes=notes)
