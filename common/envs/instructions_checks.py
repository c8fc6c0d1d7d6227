"""Instruction following: the types of constraints, ours and IFEval's, and their checks.

Checks use ``str`` and ``re`` only, with patterns that take linear time; texts over ``MAX_CHARS`` characters satisfy nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_CHARS = 20_000
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A constraint type: its wording (filled from the kwargs), its check ``(text, kwargs) -> bool``, and for IFEval the kwargs it needs (name -> type)."""

    wording: str
    check: Callable[[str, Kwargs], bool]
    kwargs: dict[str, type] = field(default_factory=dict)


# ---------------------------------------------------------------- our own types


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _has_phrase(text: str, phrase: str) -> bool:
    """Whether the phrase's words occur one after the other, in any case and whatever stands between them."""
    return f" {' '.join(words_of(phrase))} " in f" {' '.join(words_of(text))} "


def count_marks(text: str) -> int:
    """Sentences of an embedded task: a mark ``.!?`` before a space, a closing mark or the end; "P.S." and the numbers of a list do not count."""
    return len(re.findall(r"[.!?](?=[\s\"}]|$)", re.sub(r"P\.S\.|^[ \t]*+\d++\.", "", text, flags=re.MULTILINE)))


def _before(text: str, first: str, second: str) -> bool:
    words = words_of(text)
    return first in words and second in words and words.index(first) < words.index(second)


def _numbered(text: str, count: int) -> bool:
    """Whether the lines that begin with a number and a dot are 1. to ``count``. in order."""
    return [match.group(1) for line in lines_of(text) if (match := re.match(r"(\d{1,9})\. \S", line))] == [str(n + 1) for n in range(count)]


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
    "topic": Kind("write about: {word}", lambda t, k: k["word"] in words_of(t)),
    "include": Kind("use the word: {word}", lambda t, k: k["word"] in words_of(t)),
    "count": Kind("use {count} times: {word}", lambda t, k: words_of(t).count(k["word"]) == k["count"]),
    "avoid": Kind("do not use: {word}", lambda t, k: k["word"] not in words_of(t)),
    "avoid_small": Kind("never use: {word}", lambda t, k: k["word"] not in words_of(t)),
    "order": Kind("use {first} before {second}", lambda t, k: _before(t, k["first"], k["second"])),
    "phrase": Kind("use the phrase: {phrase}", lambda t, k: re.search(rf"\b{k['phrase']}\b", " ".join(t.lower().split())) is not None),
    "capital": Kind("write in capitals: {word}", lambda t, k: k["word"] in re.findall(r"\w+", t)),
    "number": Kind("use the number: {number}", lambda t, k: str(k["number"]) in words_of(t)),
    "twice": Kind("say a word twice in a row", lambda t, k: any(a == b and a.isalnum() for a, b in itertools.pairwise(t.lower().split()))),
    "greet": Kind("say hello to: {name}", lambda t, k: _has_phrase(t, f"hello {k['name']}")),
    "by": Kind("name the writer: by {name}", lambda t, k: _has_phrase(t, f"by {k['name']}")),
    # begin and end
    "start_word": Kind("start with: {word}", lambda t, k: words_of(t)[:1] == [k["word"]]),
    "echo": Kind("first repeat: {phrase}", lambda t, k: t.lstrip().lower().startswith(k["phrase"])),
    "end_word": Kind("end with the word: {word}", lambda t, k: words_of(t)[-1:] == [k["word"]]),
    "end_phrase": Kind("end with: {phrase}", lambda t, k: f" {' '.join(words_of(t))}".endswith(f" {k['phrase']}")),
    "end_question": Kind("end with a question mark", lambda t, k: _final(t).endswith("?")),
    "end_exclaim": Kind("end with an exclamation mark", lambda t, k: _final(t).endswith("!")),
    "quotes": Kind('wrap all in " "', lambda t, k: _wrapped(t, '"', '"')),
    "braces": Kind("wrap all in {{ }}", lambda t, k: _wrapped(t, "{", "}")),
    "postscript": Kind("add a P.S. line", lambda t, k: any(re.match(r"P\.S\. \S", line) for line in lines_of(t))),
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
    "bullets": Kind("bullets with -: {count}", lambda t, k: sum(line.startswith("- ") for line in lines_of(t)) == k["count"]),
    "numbered": Kind("number a list up to: {count}", lambda t, k: _numbered(t, k["count"])),
    "two_parts": Kind("split two parts with ******", lambda t, k: _two_parts(t)),
    "separator": Kind("put one line: ---", lambda t, k: lines_of(t).count("---") == 1),
    # lengths
    "words_max": Kind("words at most: {count}", lambda t, k: len(words_of(t)) <= k["count"]),
    "words_min": Kind("words at least: {count}", lambda t, k: len(words_of(t)) >= k["count"]),
    "words_even": Kind("an even number of words", lambda t, k: len(words_of(t)) % 2 == 0),
    "sentences": Kind("sentences: {count}", lambda t, k: count_marks(t) == k["count"]),
    "lines": Kind("lines: {count}", lambda t, k: len(lines_of(t)) == k["count"]),
    # kept out of training: new marks around words to copy
    "tag": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "pair": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "arrow": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
    "parens": Kind("use: {text}", lambda t, k: k["text"] in t.lower()),
}
HELD_OUT = ("tag", "pair", "arrow", "parens")  # types that occur in evaluation tasks with split "heldout_types" only
LENGTHS = ("words_max", "words_min", "words_even", "sentences", "lines")
UNLOCALISED = frozenset((*LENGTHS, "length_constraints:number_words", "length_constraints:number_sentences"))

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
