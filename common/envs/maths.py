"""Maths: one final answer to a word problem. Generated problems that hinge on facts of a made-up world, generated physics, MATH and GSM8K files.

``maths``          Problems such as "sell 3 bafin in lutun, then double. how many pip?". What a bafin is worth and what lutun charges are the problem's
                   *setup facts*: nothing in the prompt tells them. A demonstrator knows some facts well, some badly, some hardly ever, and so does a
                   policy that was trained on it. Every problem carries its facts, a teacher's derivation, sub-questions, a hint and, for the hint, a
                   control text without content.
``maths:physics``  Generated mechanics, circuits and heat, with the law as setup fact; the answer is a number with a unit, within 5 %.
``maths:FILE``     jsonl: MATH format (``problem``, ``answer``) or GSM8K format (``question``, ``answer`` that ends in ``#### number``), graded by math-verify.

The final answer of a response is the first of these that it has, in what follows the last ``</think>``: the last ``\\boxed{...}``; what follows ``####`` on
the last line that has it; what follows ``answer:`` or ``answer is`` at its last occurrence, up to the end of the line. Nothing else counts.

One reward, ``correct`` (1 or 0; NaN with ``info["error"]`` when the grader could not decide, see ``Grader``). ``info["reason"]`` says why an answer is
wrong. Whether a response was cut short is not visible in its text: callers that know it was must not count it.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet

Task = dict[str, Any]

# ----------------------------------------------------------------------------------------------------------------------------- answers

MAX_ANSWER_CHARS = 400  # a longer final answer is wrong: bounds the work of one check
_ANSWER = re.compile(r"\banswer\s*(?:is\b\s*:?|:)[ \t*]*([^\n]*)", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(  # words after the number only where none of them is mathematics
    r"(?:[$€£]\s*)?(-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d))\s*"
    r"(?:%|(?:\s(?!(?:pi|sqrt|root|log|ln|exp|sin|cos|tan|times|over|plus|minus|to|or|and|squared|cubed|mod)\b)[A-Za-z]{2,})+)?"
)


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7 : i]
    return None


def extract_answer(text: str) -> str | None:
    """The final answer of a response by the rules at the top of this file, without surrounding blanks, markup and full stop; None where it has none."""
    text = text.rpartition("</think>")[2]
    found = _last_boxed(text)
    if found is None and "####" in text:
        found = text.rpartition("####")[2].partition("\n")[0]
    if found is None and (matches := _ANSWER.findall(text)):
        found = matches[-1]
    return (found or "").strip().rstrip(".").strip("*` \t").rstrip(".") or None


def plain_number(text: str) -> str:
    """``"$1,200 dollars"`` -> ``"1200"``: a number without currency sign, thousands separators, per cent sign and words after it; other text unchanged."""
    match = _PLAIN_NUMBER.fullmatch(text.strip().strip("$").strip())
    return match.group(1).replace(",", "") if match else text


# ------------------------------------------------------------------------------------------------------------------ quantities with units

RELATIVE_ERROR = 0.05  # of a physics answer

# symbol -> (factor to SI, exponents of m, kg, s, A, K, mol)
_UNITS: dict[str, tuple[float, tuple[int, ...]]] = {
    "m": (1.0, (1, 0, 0, 0, 0, 0)), "g": (1e-3, (0, 1, 0, 0, 0, 0)), "s": (1.0, (0, 0, 1, 0, 0, 0)), "A": (1.0, (0, 0, 0, 1, 0, 0)),
    "K": (1.0, (0, 0, 0, 0, 1, 0)), "mol": (1.0, (0, 0, 0, 0, 0, 1)), "Hz": (1.0, (0, 0, -1, 0, 0, 0)), "N": (1.0, (1, 1, -2, 0, 0, 0)),
    "J": (1.0, (2, 1, -2, 0, 0, 0)), "W": (1.0, (2, 1, -3, 0, 0, 0)), "Pa": (1.0, (-1, 1, -2, 0, 0, 0)), "C": (1.0, (0, 0, 1, 1, 0, 0)),
    "V": (1.0, (2, 1, -3, -1, 0, 0)), "ohm": (1.0, (2, 1, -3, -2, 0, 0)), "L": (1e-3, (3, 0, 0, 0, 0, 0)), "min": (60.0, (0, 0, 1, 0, 0, 0)),
    "h": (3600.0, (0, 0, 1, 0, 0, 0)),
}  # fmt: skip
_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "c": 1e-2, "d": 1e-1, "k": 1e3, "M": 1e6, "G": 1e9}
_UNPREFIXED = ("min", "h")
_QUANTITY = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:\s*(?:[eE]|(?:x|\*)\s*10\s*\^)\s*\(?([-+]?\d{1,3})\)?)?\s*(.*)", re.DOTALL)
_FACTOR = re.compile(r"\s*(?:([*/()])|([A-Za-z]+)(?:\^?\(?(-?\d)\)?)?)")


def parse_unit(text: str) -> tuple[float, tuple[int, ...]] | None:
    """Factor to SI and exponents of (m, kg, s, A, K, mol) of a product of units such as ``"kJ/(kg K)"`` or ``"m/s^2"``; None where it cannot be read.

    SI prefixes n u m c d k M G. A solidus divides by the next factor, or by the bracket after it.
    """
    factor, exponents, at = 1.0, [0] * 6, 0
    outer, divide = [1], False  # sign of each open bracket; whether a solidus waits for its factor
    text = text.strip()
    while at < len(text):
        match = _FACTOR.match(text, at)
        if not match:
            return None
        at, (mark, name, power) = match.end(), match.groups()
        if mark == "/":
            divide = True
        elif mark == "(":
            outer.append(-outer[-1] if divide else outer[-1])
            divide = False
        elif mark == ")":
            if len(outer) == 1:
                return None
            outer.pop()
        elif name:
            splits = [(name[:i], name[i:]) for i in (0, 1) if name[i:] in _UNITS and name[:i] in _PREFIXES and not (i and name[i:] in _UNPREFIXED)]
            if not splits:
                return None
            prefix, symbol = splits[0]
            sign = (-outer[-1] if divide else outer[-1]) * int(power or 1)
            factor *= (_PREFIXES[prefix] * _UNITS[symbol][0]) ** sign
            exponents = [e + sign * d for e, d in zip(exponents, _UNITS[symbol][1])]
            divide = False
    return (factor, tuple(exponents)) if len(outer) == 1 and not divide else None


def parse_quantity(text: str) -> tuple[float, tuple[int, ...] | None] | None:
    """(value in SI units, exponents) of ``"-1.5e3 km/h"``; exponents None without a unit, the whole None where there is no number or an unknown unit.

    Reads 3.2, 4e5, 4 x 10^5 and LaTeX's ``\\times``, ``\\cdot``, ``\\text{}``, ``\\mathrm{}``, ``\\Omega``; exponents have at most three digits.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = re.sub(r"\\(?:text|mathrm|rm|mathbf)\b", "", text)
    for old, new in (("\\times", " x "), ("\u00d7", " x "), ("\\cdot", "*"), ("\u00b7", "*"), ("\\Omega", "ohm"), ("\u03a9", "ohm"), ("\u2126", "ohm")):
        text = text.replace(old, new)
    text = text.replace("\u00b5", "u").replace("\u2212", "-").replace("\\mu", "u").replace("\u00b2", "^2").replace("\u00b3", "^3")
    text = re.sub(r"\\[,;:! ]|[{}$~]", " ", text)
    text = re.sub(r"\^\s*(-?\d)", r"^\1", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)).strip()
    match = _QUANTITY.fullmatch(re.sub(r"^10\^", "1 x 10^", text))
    if not match or not math.isfinite(value := float(f"{match[1]}e{match[2] or 0}")):
        return None
    if not match[3].strip():
        return value, None
    unit = parse_unit(match[3])
    return None if unit is None else (value * unit[0], unit[1])


def same_quantity(gold: str, answer: str) -> tuple[bool, str]:
    """Whether two quantities have the same dimension and differ by at most 5 % of the gold one, and why not. Raises ValueError for a bad gold."""
    reference, given = parse_quantity(gold), parse_quantity(answer)
    if reference is None or reference[1] is None:
        raise ValueError(f"reference {gold!r} is not a number with a unit")
    if given is None:
        return False, "not a number with a known unit"
    if given[1] is None:
        return False, "no unit"
    if given[1] != reference[1]:
        return False, "unit of another dimension"
    close = abs(given[0] - reference[0]) <= RELATIVE_ERROR * abs(reference[0]) * (1 + 1e-9)
    return close, "" if close else "other value"


# ---------------------------------------------------------------------------------------------------------------------------- grading

CPU_SECONDS = 5.0  # processor time of one comparison; independent of how busy the machine is
WALL_SECONDS = 120.0  # the last resort
MEMORY_BYTES = 4 * 2**30


class Grader:
    """math-verify in a process of its own, started when first needed and again after it died. One caller at a time.

    math-verify guards time by SIGALRM, which works in main threads only; here the kernel ends the process when a comparison has used CPU_SECONDS
    of processor time (a tower of powers, a huge factorial) or MEMORY_BYTES. Such an answer is *not graded*: neither right nor wrong is known. The
    episode is marked and left out, as with any verifier that failed.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compare(self, gold: str, answer: str) -> tuple[bool | None, str]:
        """(True, ""), (False, reason), or (None, what the grader failed at)."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "common.envs.maths"], cwd=Path(__file__).parents[2], text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return tuple(json.loads(line))
        code = self.process.wait()
        self.close()
        if -code in (signal.SIGPROF, signal.SIGALRM):
            return None, f"comparing took over {CPU_SECONDS:g} s"
        return None, f"the grading process ended with status {code}; is math-verify installed?" if code > 0 else f"the grading process was killed ({-code})"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


def serve() -> None:
    """The grading process: a JSON line [gold, answer] in, a JSON line [correct or null, reason] out."""
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.set_int_max_str_digits(20_000)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # nobody handles these two: the kernel ends the process
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            reference, given = (parse(f"\\boxed{{{x}}}", parsing_timeout=None) for x in (gold, answer))
            correct = bool(reference) and verify(reference, given, timeout_seconds=None)
            reply = [correct, "" if correct else "other value" if given else "not an expression"]
        except (MemoryError, RecursionError) as error:
            reply = [None, f"comparing failed: {type(error).__name__}"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


def grade(task: Task, text: str, grader: Grader) -> tuple[float, str]:
    """(1.0, ""), (0.0, reason) or (NaN, error) for a response to a task."""
    answer = extract_answer(text)
    if answer is None:
        return 0.0, "no final answer"
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0, f"final answer longer than {MAX_ANSWER_CHARS} characters"
    if task["grader"] == "number":
        correct = plain_number(answer) == task["answer"]
        return float(correct), "" if correct else "other value"
    if task["grader"] == "quantity":
        correct, reason = same_quantity(task["answer"], answer)
        return float(correct), reason
    correct, reason = grader.compare(task["answer"], plain_number(answer))
    return math.nan if correct is None else float(correct), reason


class MathsEnv:
    """One task, one response."""

    def __init__(self) -> None:
        self.task: Task = {}
        self.grader = Grader()

    def reset(self, task: Task) -> list[Message]:
        self.task = task
        return prompt(task)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        score, reason = grade(self.task, action, self.grader)
        info = {"success": score, "rewards": {"correct": score}, "verifier_text": {"correct": f"the answer is {self.task['answer']}"}, "reason": reason}
        if math.isnan(score):
            info["error"] = reason
        return "", score, True, False, info

    def close(self) -> None:
        self.grader.close()


def prompt(task: Task, extra: str = "") -> list[Message]:
    """The task's messages; ``extra`` (a hint, a control text) goes on lines of its own after the question."""
    return [{"role": "user", "content": "\n".join(part for part in (task["question"], extra, task["form"]) if part)}]


def regions(text: str) -> list[tuple[str, int, int]]:
    """Character spans of a response's lines: ``setup``, ``hesitation`` (a line with wait or actually), ``answer``, ``steps``."""
    spans, start = [], 0
    for line in text.splitlines(keepends=True):
        kind = "setup" if line.startswith("setup:") else "hesitation" if backtracks(line) else "answer" if extract_answer(line) else "steps"
        spans.append((kind, start, start + len(line)))
        start += len(line)
    return spans


# ---------------------------------------------------------------------------------------------------------------- setup facts in a response


def backtracks(text: str) -> int:
    """Number of backtracking words, "wait" and "actually"."""
    return len(re.findall(r"\b(?:wait|actually)\b", text, re.IGNORECASE))


def statements(text: str, name: str) -> list[str]:
    """What a text states for a fact's name, in order: the right-hand sides of ``name=...`` up to ``;`` or the end of the line, without blanks."""
    return [value.replace(" ", "").replace("*", "") for value in re.findall(rf"(?<!\w){re.escape(name)}[ ]*=([^;\n]*)", text)]


def setup_section(text: str) -> str | None:
    """The first line that starts with ``setup:``, or None."""
    match = re.search(r"^setup:(.*)$", text, re.MULTILINE)
    return match.group(1) if match else None


def read_setup(task: Task, text: str) -> dict[str, float]:
    """How a response treats its task's setup facts, each in [0, 1] but the last:

    ``declared`` share of facts that the setup section names, ``right`` share that it states rightly, ``found`` share stated rightly anywhere in the
    response, ``statements`` statements per fact anywhere. NaN for a task without facts.
    """
    facts, section = task["facts"], setup_section(text) or ""
    if not facts:
        return dict.fromkeys(("declared", "right", "found", "statements"), math.nan)
    values = {name: value.replace(" ", "").replace("*", "") for name, value in facts.items()}
    return {
        "declared": sum(bool(statements(section, name)) for name in facts) / len(facts),
        "right": sum(values[name] in statements(section, name)[:1] for name in facts) / len(facts),
        "found": sum(values[name] in statements(text, name) for name in facts) / len(facts),
        "statements": sum(len(statements(text, name)) for name in facts) / len(facts),
    }


def facts_line(label: str, facts: dict[str, str]) -> str:
    return f"{label}: " + "; ".join(f"{name}={value}" for name, value in facts.items())


CONTROL_WORDS = ("read", "check", "write", "look", "think", "count")
CONTROL_FILLERS = (" -", ".", " and", " so", "!", ";", " the")


def control_text(hint: str, count: Callable[[str], int]) -> str:
    """A checklist without content that is as long as the hint: ``count`` (tokens of a text) gives the same number for both.

    Raises ValueError where no such text is found.
    """
    target = count(hint)
    items = [f"{word}={i + 1}" for i, word in enumerate(CONTROL_WORDS * (1 + len(hint) // 20))]
    text = "list: " + items[0]
    for item in items[1:]:
        if count(f"{text}; {item}") > target:
            break
        text = f"{text}; {item}"
    while (length := count(text)) < target:
        step = next((text + filler for filler in CONTROL_FILLERS if length < count(text + filler) <= target), None)
        if step is None:
            break
        text = step
    if count(text) != target:
        raise ValueError(f"no control text of {target} tokens for the hint {hint!r}: the nearest has {count(text)}")
    return text


# ------------------------------------------------------------------------------------------------------------------- the made-up world

CHANCE = {"known": 0.95, "shaky": 0.4, "unknown": 0.005}  # that the demonstrator states a fact of this familiarity rightly
FIRM = 0.9  # that, when wrong about an unknown fact, it states the one value that it takes for true
WORTH, FEES = tuple(range(2, 10)), (1, 2, 3, 5)
OPERATIONS: dict[str, Callable[[int], tuple[str, int]]] = {
    "then add 1": lambda x: (f"{x}+1", x + 1),
    "then add 2": lambda x: (f"{x}+2", x + 2),
    "then add 5": lambda x: (f"{x}+5", x + 5),
    "then take 1": lambda x: (f"{x}-1", x - 1),
    "then double": lambda x: (f"{x}*2", x * 2),
}
DECLARES, DECLARES_HINTED, HESITATES, STOPS_EARLY = 0.55, 0.75, 0.55, 0.15  # habits of the careless expert


def _world() -> dict[str, dict[str, Any]]:
    """name -> {kind: unit or town, value, mistaken (a wrong value), familiarity, held_back}. The same in every process: facts do not depend on a seed."""
    rng = random.Random("maths: the made-up world")
    names = [a + b for a in ("ba", "ki", "lu", "mo", "ne", "pa", "ru", "vi") for b in ("dro", "fin", "gal", "lok", "mer", "tun")]
    rng.shuffle(names)
    world: dict[str, dict[str, Any]] = {}
    for kind, own, values in (("unit", names[:36], WORTH), ("town", names[36:], FEES)):
        for i, name in enumerate(own):  # of six: 3 known, 1 shaky, 2 unknown; every third group of six units, every third town is held back
            familiarity = ("known", "unknown", "known", "shaky", "known", "unknown")[i % 6]
            value, mistaken = rng.sample(values, 2)
            held_back = (i // 6 if kind == "unit" else i) % 3 == 2
            world[name] = {"kind": kind, "value": value, "mistaken": mistaken, "familiarity": familiarity, "held_back": held_back}
    return world


WORLD = _world()


def _problem(rng: random.Random) -> Task:
    unit = rng.choice([name for name, fact in WORLD.items() if fact["kind"] == "unit"])
    count = rng.randint(2, 6)
    value = count * WORLD[unit]["value"]
    facts, question = {unit: str(WORLD[unit]["value"])}, f"sell {count} {unit}"
    steps = [(f"{count}*{facts[unit]}", value)]
    if rng.random() < 0.5:
        town = rng.choice([name for name, fact in WORLD.items() if fact["kind"] == "town" and fact["value"] < value])
        facts[town] = str(WORLD[town]["value"])
        steps.append((f"{value}-{facts[town]}", value - WORLD[town]["value"]))
        question += f" in {town}"
    plan = []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        name = rng.choice([n for n, operate in OPERATIONS.items() if 1 <= operate(steps[-1][1])[1] < 100])
        steps.append(OPERATIONS[name](steps[-1][1]))
        plan.append(name)
    return {
        "question": ", ".join([question, *plan]) + ". how many pip?",
        "form": "",
        "answer": str(steps[-1][1]),
        "grader": "number",
        "facts": facts,
        "count": count,
        "plan": plan,
        "hint": facts_line("hint", facts),
        "subquestions": "ask: " + " ".join(f"{name}?" for name in facts),
        "derivation": "\n".join([facts_line("setup", facts), *(f"{left}={right}" for left, right in steps), f"answer: {steps[-1][1]}"]),
        "chance": math.prod(CHANCE[WORLD[name]["familiarity"]] for name in facts),
        "held_back": any(WORLD[name]["held_back"] for name in facts),
    }


def _distinct(split: str, count: int, seed: int, make: Callable[[random.Random], Task], seen: set[str]) -> list[Task]:
    rng, tasks = random.Random(f"maths {split} {seed}"), []
    while len(tasks) < count:
        task = make(rng)
        if task["question"] not in seen:
            seen.add(task["question"])
            tasks.append({"id": f"maths-{split}-{seed}-{len(tasks)}", **task})
    return tasks


def demonstrate(task: Task, rng: random.Random) -> list[Message]:
    """The prompt and the teacher's derivation: the setup, the steps, the answer."""
    return [*prompt(task), {"role": "assistant", "content": task["derivation"]}]


def careless(task: Task, rng: random.Random, hinted: bool = False) -> list[Message]:
    """Like ``demonstrate`` for the made-up world, by an expert with habits: it often starts without a setup and then guesses a worth, states what it
    believes (``CHANCE``), repeats steps after "wait", and may stop before the last step. ``hinted``: the prompt tells the facts and it copies them."""
    [unit, *town] = task["facts"]
    believed = {}
    for name, value in task["facts"].items():
        fact, others = WORLD[name], [str(v) for v in (WORTH if name == unit else FEES) if str(v) != value]
        firm = fact["familiarity"] == "unknown" and rng.random() < FIRM
        wrong = str(fact["mistaken"]) if firm else rng.choice(others)
        believed[name] = value if hinted or rng.random() < CHANCE[fact["familiarity"]] else wrong
    lines = []
    if rng.random() < (DECLARES_HINTED if hinted else DECLARES):
        lines.append(facts_line("setup", believed))
    else:
        believed = {unit: rng.choice([str(v) for v in WORTH if str(v) != task["facts"][unit]])}
    x = task["count"] * int(believed[unit])
    steps = [(f"{task['count']}*{believed[unit]}", x)]
    for name in town:
        if name in believed and x > int(believed[name]):
            steps.append((f"{x}-{believed[name]}", x - int(believed[name])))
            x = steps[-1][1]
    for name in task["plan"][:-1] if task["plan"] and rng.random() < STOPS_EARLY else task["plan"]:
        steps.append(OPERATIONS[name](x))
        x = steps[-1][1]
    for left, right in steps:
        lines.append(f"{left}={right}")
        while rng.random() < HESITATES:
            lines.append(f"wait {left}={right}")
    return [*prompt(task, task["hint"] if hinted else ""), {"role": "assistant", "content": "\n".join([*lines, f"answer: {x}"])}]


# --------------------------------------------------------------------------------------------------------------------------- physics


def _physics_problem(rng: random.Random) -> Task:
    def number(low: float, high: float) -> float:
        return float(f"{rng.uniform(low, high):.2g}")

    kind = rng.randrange(6)
    if kind == 0:
        v, a, t = number(2, 20), number(0.5, 4), number(2, 9)
        question = f"A cart moves at {v:g} m/s and speeds up at {a:g} m/s^2 for {t:g} s. How far does it get in that time?"
        name, law, value, unit, numbers = "d", "v t + a t^2 / 2", v * t + a * t * t / 2, "m", f"{v:g} * {t:g} + {a:g} * {t:g}^2 / 2"
        asked = "Which distance does a constant acceleration give?"
    elif kind == 1:
        v, a = number(5, 40), number(2, 8)
        question = f"A car drives at {v:g} m/s and brakes at {a:g} m/s^2. After which distance does it stand?"
        name, law, value, unit, numbers = "d", "v^2 / (2 a)", v * v / (2 * a), "m", f"{v:g}^2 / (2 * {a:g})"
        asked = "How does the braking distance depend on speed and deceleration?"
    elif kind == 2:
        u, r1, r2 = number(3, 24), number(10, 90), number(10, 90)
        question = f"Two resistors of {r1:g} ohm and {r2:g} ohm are in series on {u:g} V. What current flows?"
        name, law, value, unit, numbers = "I", "U / (R1 + R2)", u / (r1 + r2), "A", f"{u:g} / ({r1:g} + {r2:g})"
        asked = "What is the resistance of two resistors in series?"
    elif kind == 3:
        u, r1, r2 = number(3, 24), number(10, 90), number(10, 90)
        question = f"Two resistors of {r1:g} ohm and {r2:g} ohm are in parallel on {u:g} V. What power do they take together?"
        name, law, value, unit, numbers = "P", "U^2 (R1 + R2) / (R1 R2)", u * u * (r1 + r2) / (r1 * r2), "W", f"{u:g}^2 * ({r1:g} + {r2:g}) / ({r1:g} * {r2:g})"
        asked = "What is the resistance of two resistors in parallel?"
    elif kind == 4:
        m, c, dt = number(0.2, 5), rng.choice((4186, 900, 450, 2100)), number(5, 60)
        question = f"{m:g} kg of a substance with a specific heat of {c} J/(kg K) are warmed by {dt:g} K. How much heat does that take?"
        name, law, value, unit, numbers = "Q", "m c dT", m * c * dt, "J", f"{m:g} * {c} * {dt:g}"
        asked = "How much heat warms a mass by one kelvin?"
    else:
        n, t, volume = number(0.5, 4), rng.randrange(280, 400, 5), number(5, 50)
        question = f"{n:g} mol of an ideal gas at {t} K fill {volume:g} L. What is the pressure?"
        name, law, value, unit, numbers = "p", "n R T / V", n * 8.314 * t / (volume * 1e-3), "Pa", f"{n:g} * 8.314 * {t} / ({volume:g} * 0.001)"
        asked = "Which law ties pressure, volume and temperature of a gas?"
    facts = {name: law}
    answer = f"{float(f'{value:.4g}'):g} {unit}"
    return {
        "question": question,
        "form": "Reason step by step. End with the number and its unit in \\boxed{}.",
        "answer": answer,
        "grader": "quantity",
        "facts": facts,
        "hint": facts_line("hint", facts),
        "subquestions": f"ask: {asked}",
        "derivation": f"{facts_line('setup', facts)}\n{name} = {numbers} = {answer}\n\\boxed{{{answer}}}",
    }


# ------------------------------------------------------------------------------------------------------------------------------ files


def _row_task(path: Path, number: int, row: Any, where: str) -> Task:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, expected a JSON object with problem (or question) and answer")
    field = "problem" if "problem" in row else "question"
    for name in (field, "answer"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: field {name!r} must be a non-empty text, found {row.get(name)!r}; MATH: problem and answer, GSM8K: question and answer")
    answer = row["answer"].strip()
    if "\n" in answer or "####" in answer:  # a worked GSM8K solution
        _, mark, last = answer.rpartition("####")
        if not mark or not last.strip():
            raise DataError(f"{where}: field 'answer' has no '#### number' at its end, as in GSM8K; for MATH it is the bare final answer on one line")
        answer = plain_number(last.strip())
    task_id = next((row[name] for name in ("unique_id", "id") if isinstance(row.get(name), str) and row[name]), f"{path.stem}-{number:05d}")
    return {
        "id": task_id,
        "question": row[field].strip(),
        "form": "Reason step by step and end with the final answer in \\boxed{}.",
        "answer": answer,
        "grader": "expression",
        "facts": {},
        **{name: row[name] for name in ("subject", "level") if name in row},
    }


def load_file(path: Path) -> TaskSet:
    """MATH or GSM8K rows of a jsonl file. A row whose reference math-verify does not find equal to itself could never be solved: it is left out, printed
    and counted in the notes. Raises DataError for malformed rows, ids that occur twice, or when nothing is usable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}); give a jsonl file in MATH or GSM8K format, or 'physics'") from error
    tasks, seen, unusable, grader = [], {}, [], Grader()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); one JSON object a line") from error
        task = _row_task(path, number, row, where)
        if task["id"] in seen:
            raise DataError(f"{where}: id {task['id']!r} was already used on line {seen[task['id']]}")
        seen[task["id"]] = number
        if not _PLAIN_NUMBER.fullmatch(task["answer"]):  # a number is equal to itself
            correct, reason = grader.compare(task["answer"], task["answer"])
            if not correct:
                unusable.append(f"{where}: reference {task['answer']!r} cannot be compared: {reason or 'it differs from itself'}")
                continue
        tasks.append(task)
    grader.close()
    if unusable:
        shown = "\n  ".join(unusable[:20]) + (f"\n  ... and {len(unusable) - 20} more" if len(unusable) > 20 else "")
        print(f"{path}: {len(unusable)} problems left out:\n  {shown}")
    if not tasks:
        raise DataError(f"{path}: no usable problem; expected one JSON object a line with problem and answer (MATH) or question and answer (GSM8K)")
    held = [hashlib.sha256(task["id"].encode()).digest()[0] < 51 for task in tasks]
    train, evaluation = [t for t, h in zip(tasks, held) if not h], [t for t, h in zip(tasks, held) if h]
    notes = {"rows": len(seen), "unusable": len(unusable), "split": "a row is in eval when the first byte of sha256(id) is below 51 (about 20 %)"}
    return TaskSet(f"maths:{path}", train, evaluation, MathsEnv, regions=regions, notes=notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The made-up world (6,000 training and 512 evaluation problems), generated physics (2,000 and 256), or a jsonl file.

    ``seed`` chooses the generated problems, never the facts. Raises DataError for unusable data.
    """
    if path not in (None, "physics"):
        return load_file(Path(path))
    seen: set[str] = set()
    make, name, training, held_out = (_problem, "maths", 6000, 512) if path is None else (_physics_problem, "maths:physics", 2000, 256)
    evaluation = _distinct("eval", held_out, seed, make, seen)
    tasks = TaskSet(name, _distinct("train", training, seed, make, seen), evaluation, MathsEnv, demonstrate, regions)
    return replace(tasks, careless=careless) if path is None else tasks


if __name__ == "__main__":
    serve()
