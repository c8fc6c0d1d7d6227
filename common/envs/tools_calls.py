"""Tool calling: reading the calls in a response, and comparing them with a reference under the rules of BFCL v4.

Nothing that a model writes is evaluated: calls are read with ``json`` and ``ast`` only.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any

FORMAT_TEXT = '<think>...</think><tool_call>[{"name":...,"arguments":{...}}]</tool_call>'
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MAX_CHARS = 20_000  # a longer response gets 0 for both rewards: bounds the work of one check
MAX_CALLS = 64  # parallel matching is quadratic in the number of calls
AST_CATEGORIES = (
    "simple",
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
NO_CALL_CATEGORIES = ("irrelevance", "live_irrelevance")
ANY_CALL_CATEGORIES = ("live_relevance",)
CATEGORIES = AST_CATEGORIES + NO_CALL_CATEGORIES + ANY_CALL_CATEGORIES
PYTHON_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}

Call = dict[str, Any]  # {"name": str, "arguments": {str: value}}


# ---------------------------------------------------------------- reading calls


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number is not finite")
    return value


def strict_json(text: str) -> Any:
    """``json.loads`` that refuses NaN, Infinity, overflowing floats and duplicate keys. Raises ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_finite)


def _json_calls(text: str) -> list[Call] | None:
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not (isinstance(item, dict) and item.keys() == {"name", "arguments"} and isinstance(item["name"], str) and isinstance(item["arguments"], dict)):
            return None
    return items


def _literal(node: ast.expr) -> Any:
    """Value of a literal; a bare name stands for a variable and becomes its own text, as in BFCL. Raises ValueError for anything that would need evaluation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value if not isinstance(node.value, float) else _finite(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float):
        return -_literal(node.operand)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item) for item in node.elts)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
        return _unique_keys([(key.value, _literal(value)) for key, value in zip(node.keys, node.values)])
    raise ValueError("not a literal")


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name) or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a plain call")
    arguments = _unique_keys([(keyword.arg, _literal(keyword.value)) for keyword in node.keywords])
    return {"name": ".".join([function.id, *reversed(parts)]), "arguments": arguments}


def _python_calls(text: str) -> list[Call] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a model's string literals are no news
            tree = ast.parse(text, mode="eval").body
        return [_python_call(node) for node in (tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree])]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parse_calls(text: str) -> list[Call] | None:
    """Calls in a response, or None where it holds none that can be read.

    What follows ``</think>`` is read (the whole text without that tag): every ``<tool_call>`` block in turn, or the text itself where there is no block.
    A block is JSON (one call or a list) or Python calls with keyword arguments (``[f(a=1), m.g(b="x")]``). An unreadable block spoils the response.
    """
    if len(text) > MAX_CHARS:
        return None
    before, tag, body = text.partition("</think>")
    body = body if tag else before
    blocks = [part.partition("</tool_call>")[0] for part in body.split("<tool_call>")[1:]] or [body]
    calls: list[Call] = []
    for block in blocks:
        block = block.strip("`\n\t ").removeprefix("json").removeprefix("python").strip()
        found = _json_calls(block)
        found = _python_calls(block) if found is None else found
        if found is None:
            return None
        calls += found
    return calls if len(calls) <= MAX_CALLS else None


def format_ok(text: str) -> bool:
    """Whether the response has the canonical shape: one non-blank think block, then one tool_call block with a JSON list of calls."""
    text = text.strip()
    if len(text) > MAX_CHARS or any(text.count(tag) != 1 for tag in TAGS) or not text.startswith("<think>") or not text.endswith("</tool_call>"):
        return False
    reasoning, _, rest = text.removeprefix("<think>").removesuffix("</tool_call>").partition("</think>")
    rest = rest.lstrip()
    if not reasoning.strip() or not rest.startswith("<tool_call>"):
        return False
    block = rest.removeprefix("<tool_call>").strip()
    return block.startswith("[") and _json_calls(block) is not None


def render_calls(calls: list[Call]) -> str:
    """The canonical JSON list, without spaces between tokens."""
    return json.dumps(calls, ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------- comparing calls (BFCL v4)


def standardize(value: Any) -> Any:
    """Strings without the characters space ``,./-_*^``, lower-cased, single quotes as double quotes; other values unchanged."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value


def _items_typed(value: list[Any], option: Any, item_type: type) -> bool:
    """Whether each item of ``value`` has the declared item type, or the type of the accepted list's first item (then it stands for a variable)."""
    if not isinstance(option, list):
        return True
    other = next((type(item) for item in option if item != ""), None)
    return all(type(item) is item_type or (other is not None and type(item) is other) for item in value)


def _dict_matches(value: Any, option: Any) -> bool:
    """A dict against one accepted dict, whose values are lists of accepted values; only a key that accepts "" may be missing."""
    if not isinstance(value, dict) or not isinstance(option, dict):
        return False
    for key, item in value.items():
        if key not in option or standardize(item) not in [standardize(accepted) for accepted in option[key]]:
            return False
    return all(key in value or "" in accepted for key, accepted in option.items())


def argument_matches(value: Any, accepted: list[Any], schema: dict[str, Any]) -> bool:
    """One argument against its accepted values.

    ``schema`` is the parameter's document: ``type``, and ``items.type`` for arrays and tuples. Types must agree exactly, except that an integer passes for
    a float and a tuple for a list; a value that has the type of the accepted values instead of the declared one counts as a variable.
    """
    kind = schema["type"]
    expected = PYTHON_TYPES[kind]
    item_type = PYTHON_TYPES[schema["items"]["type"]] if kind in ("array", "tuple") else None
    if kind == "tuple" and isinstance(value, tuple):
        value = list(value)
    if kind == "float" and type(value) is int:
        if abs(value) > 2**1000:  # float() would overflow
            return False
        value = float(value)
    accepted_type = next((type(option) for option in accepted if option != ""), None)
    variable = accepted_type not in (None, expected)
    if type(value) is expected:
        if item_type is not None and not any(_items_typed(value, option, item_type) for option in accepted):
            return False
    elif type(value) is accepted_type:
        variable = True
    else:
        return False
    if variable:
        return value in accepted
    if expected is dict:
        return any(_dict_matches(value, option) for option in accepted)
    if item_type is dict:
        # a list of dicts is compared in order; the entry "" (may be left out) has length 0 and so accepts an empty list, as in BFCL
        return any(isinstance(option, (list, str)) and len(value) == len(option) and all(map(_dict_matches, value, option)) for option in accepted)
    if expected is str:
        return standardize(value) in [standardize(option) for option in accepted if isinstance(option, str)]
    if expected is list:
        return [standardize(item) for item in value] in [[standardize(item) for item in option] for option in accepted if isinstance(option, (list, str))]
    return value in accepted


def call_matches(call: Call, answer: dict[str, dict[str, list[Any]]], functions: list[dict[str, Any]]) -> bool:
    """One call against one reference ``{function: {argument: [accepted values]}}``; ``functions`` are the documents shown."""
    ((name, accepted),) = answer.items()
    schema = next(function for function in functions if function["name"] == name)["parameters"]
    arguments = call["arguments"]
    if call["name"] != name or any(required not in arguments for required in schema.get("required", [])):
        return False
    for argument, value in arguments.items():
        if argument not in schema["properties"] or argument not in accepted or not argument_matches(value, accepted[argument], schema["properties"][argument]):
            return False
    return all(argument in arguments or "" in options for argument, options in accepted.items())


def calls_match(calls: list[Call] | None, category: str, functions: list[dict[str, Any]], answers: list[dict[str, Any]]) -> bool:
    """The ``call`` verdict of a BFCL v4 single-turn category.

    ``calls`` is what ``parse_calls`` returned. Parallel categories take the calls in any order (each reference takes the first call left that matches it);
    irrelevance wants no readable call, live_relevance at least one; otherwise exactly one call.
    """
    if category in NO_CALL_CATEGORIES:
        return not calls
    if category in ANY_CALL_CATEGORIES:
        return bool(calls)
    if calls is None or len(calls) != len(answers) or len(calls) > MAX_CALLS:
        return False
    left = list(calls)
    for answer in answers:
        match = next((index for index, call in enumerate(left) if call_matches(call, answer, functions)), None)
        if match is None:
            return False
        del left[match]
    return True


def _inner_reference(value: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: options[0] for key, options in value.items() if options[0] != ""}


def reference_calls(answers: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[Call]:
    """One concrete answer: the first accepted value of each argument; an argument is left out where that is "" and its document does not require it."""
    calls = []
    for answer in answers:
        ((name, accepted),) = answer.items()
        required = next(function for function in functions if function["name"] == name)["parameters"].get("required", [])
        arguments: dict[str, Any] = {}
        for key, options in accepted.items():
            if not options or (options[0] == "" and key not in required):
                continue
            value = next((option for option in options if option != ""), "")
            if isinstance(value, dict):
                value = _inner_reference(value)
            elif isinstance(value, list):
                value = [_inner_reference(item) if isinstance(item, dict) else item for item in value]
            arguments[key] = value
        calls.append({"name": name, "arguments": arguments})
    return calls
