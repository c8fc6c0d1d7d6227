"""Question answering with a search tool: several hops over a closed corpus, one tool call a turn, the answer graded at the end.

A response is one action on its last line; what stands before it is thought and is not read:

    page anna bell boss
    read 34

``search WORDS`` shows the best pages by BM25 (title, id and the beginning of the text), ``read ID`` (or ``read ID 2`` for the second part of a long page) shows
one of the pages found so far, ``answer TEXT`` ends the episode. Success is a normalised exact match with the answer or one of its aliases; the token F1
stands beside it in ``info["f1"]``. Both are SQuAD's.

``load(None)`` makes small corpora of linked facts; ``load(FOLDER)`` reads a real corpus with questions: a BEIR folder, BrowseComp-Plus records, or any
question file and corpus file in JSON lines (see ``load_folder``).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.envs import DataError, Message, TaskSet
from common.envs.corpus import Corpus

MAX_CHARS = 20_000  # a longer response is not read
VERBS = ("search", "read", "answer")
FORMAT_TEXT = "write one action on the last line : search WORDS | read ID | answer TEXT"


# ---------------------------------------------------------------- grading


def normalise(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    return float(normalise(answer) in {normalise(text) for text in accepted})


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Best token F1 over the accepted answers; 1 where both sides are empty after normalising, 0 where one is."""

    def one(reference: str) -> float:
        given, wanted = normalise(answer).split(), normalise(reference).split()
        common = sum((Counter(given) & Counter(wanted)).values())
        return 2 * common / (len(given) + len(wanted)) if given and wanted else float(given == wanted)

    return max(map(one, accepted))


# ---------------------------------------------------------------- the environment


def parse_action(text: str) -> tuple[str, str]:
    """(verb, argument) of the last line; the verb is "" where no action can be read, and the argument then says why."""
    if len(text) > MAX_CHARS:
        return "", f"too long , {FORMAT_TEXT}"
    lines = text.strip().splitlines()
    verb, _, argument = lines[-1].strip().partition(" ") if lines else ("", "", "")
    verb, argument = verb.lower().rstrip(":"), argument.strip()
    if verb not in VERBS:
        return "", f"no action , {FORMAT_TEXT}"
    return (verb, argument) if argument else ("", f"{verb} needs words after it")


class SearchEnv:
    """Episodes over the corpora of a task set; ``max_turns`` actions at most, then the episode is truncated with success 0.

    A step returns reward 1 for a right answer, 0 for every other step. ``info``: ``invalid`` (the action could not be carried out) on each step; at the end
    ``success``, ``rewards`` ({"answer": exact match}), ``f1`` and ``verifier_text``.
    """

    def __init__(self, corpora: Mapping[str, Corpus], instruction: str, max_turns: int) -> None:
        self.corpora, self.instruction, self.max_turns = corpora, instruction, max_turns
        self.task: dict[str, Any] | None = None

    def reset(self, task: dict[str, Any]) -> list[Message]:
        self.task, self.turns = task, 0
        self.found: frozenset[str] = frozenset()  # ids that a search has shown
        self.seen: frozenset[str] = frozenset()  # ids that were read, of those
        return [{"role": "user", "content": f"{self.instruction}\n{task['question']}"}]

    @property
    def corpus(self) -> Corpus:
        if self.task is None:
            raise RuntimeError("no open episode: reset() first")
        return self.corpora[self.task["corpus"]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One action. Raises RuntimeError when no episode is open."""
        corpus, task = self.corpus, self.task
        self.turns += 1
        verb, argument = parse_action(action)
        if verb == "answer":
            return "", exact_match(argument, accepted(task)), True, False, {"invalid": False, **self._end(argument)}
        observation, invalid = argument, verb == ""
        if verb == "search":
            hits = corpus.search(argument)
            self.found |= {corpus.ids[number] for number in hits}
            observation = "\n".join(map(corpus.hit_line, hits)) or "no page has these words"
        elif verb == "read":
            observation, invalid = self._read(argument)
        info: dict[str, Any] = {"invalid": invalid}
        truncated = self.turns >= self.max_turns
        if truncated:
            info |= self._end(None)
        return observation, 0.0, False, truncated, info

    def _read(self, argument: str) -> tuple[str, bool]:
        corpus = self.corpus
        key, *rest = argument.split()
        part = rest[0] if rest else "1"
        if len(rest) > 1 or key not in corpus.place:
            return f"no page {argument} , read needs an id that a search has shown", True
        if key not in self.found:
            return f"page {key} was not found yet , search first", True
        number = corpus.place[key]
        text = corpus.texts[number]
        parts = max(1, -(-len(text) // corpus.page_chars))
        if not part.isascii() or not part.isdigit() or not 1 <= int(part) <= parts:
            return f"page {key} has the parts 1 to {parts} , not {part}", True
        self.seen |= {key}
        shown = text[(int(part) - 1) * corpus.page_chars : int(part) * corpus.page_chars].strip()
        return (f"{corpus.titles[number]} , part {part} of {parts}\n{shown}" if parts > 1 else shown), False

    def _end(self, answer: str | None) -> dict[str, Any]:
        task, self.task = self.task, None
        matched, overlap = (exact_match(answer, accepted(task)), f1(answer, accepted(task))) if answer is not None else (0.0, 0.0)
        return {"success": matched, "rewards": {"answer": matched}, "f1": overlap, "verifier_text": {"answer": f"the answer is {task['answer']}"}}

    def oracle_action(self) -> str:
        """The next action of an expert who knows the supporting pages: finds and reads each that was not read, in order, then answers."""
        corpus, task = self.corpus, self.task
        for before, hop in zip([None, *task["hops"]], task["hops"]):
            if hop["id"] in self.seen:
                continue
            if "relation" in hop:
                query = f"{hop['entity']} {hop['relation']}"
                return read_text(query, hop["id"]) if hop["id"] in self.found else search_text(before and before["relation"], hop["entity"], hop["relation"])
            if hop["id"] in self.found:
                return f"read {hop['id']}"
            query = oracle_query(corpus, corpus.place[hop["id"]])
            if query:
                return f"search {query}"
        last = task["hops"][-1] if task["hops"] else {}
        return answer_text(last["relation"], last["value"]) if "relation" in last else f"answer {task['answer']}"

    def snapshot(self) -> tuple[Any, ...]:
        return self.task, self.turns, self.found, self.seen

    def restore(self, state: tuple[Any, ...]) -> None:
        self.task, self.turns, self.found, self.seen = state

    def state_key(self) -> str:
        """Equal for episodes of a task that have found and read the same pages; turns used are not part of it."""
        if self.task is None:
            raise RuntimeError("no open episode: reset() first")
        return json.dumps([self.task["id"], sorted(self.found), sorted(self.seen)])

    def close(self) -> None:
        self.task = None


def accepted(task: dict[str, Any]) -> list[str]:
    return [task["answer"], *task["aliases"]]


def oracle_query(corpus: Corpus, number: int) -> str:
    """A query that shows the page: its title, or its first words with or without the title; "" where none of them does."""
    first = " ".join(corpus.texts[number].split()[:40])
    for query in (corpus.titles[number].strip(), f"{corpus.titles[number]} {first}".strip(), first):
        if query and number in corpus.search(query):
            return " ".join(query.split())
    return ""


# ---------------------------------------------------------------- embedded tasks

INSTRUCTION = "find the answer , one action a turn : search WORDS | read ID | answer NAME . a former page is wrong ."
FIRST_NAMES = "anna ben carl dora emma fred gina hugo ivan jane kurt lena".split()
LAST_NAMES = "ash bell cole dunn ford gray hill king lake moss page reed".split()
PEOPLE_RELATIONS = ("boss", "friend", "teacher", "doctor")
VALUES = {
    "city": "rome oslo paris berlin lima tokyo".split(),
    "pet": "cat dog horse fish bird snake".split(),
    "color": "red blue green black white pink".split(),
}
RELATIONS = (*PEOPLE_RELATIONS, *VALUES)
MONTHS = "may june july".split()
TRAIN_CORPORA, EVAL_CORPORA = 120, 16
TRAIN_PER_CORPUS, EVAL_PER_CORPUS = 50, 16
PERSONS = 7  # of a corpus
FORMER_SHARE, TRAP_SHARE = 0.6, 0.6  # of the facts with an outdated page beside the true one; of those, how many where search shows the outdated page first
MAX_TURNS = 16
# the careless expert: reads the first hit though it is outdated, answers after a hop too few, leaves a hop out
READS_FIRST, ANSWERS_EARLY, SKIPS_HOP = 0.65, 0.2, 0.12


def people(split: str) -> list[str]:
    """Every third pair of a first and a last name belongs to validation; each single name is in both splits."""
    pairs = [(i, j) for i in range(len(FIRST_NAMES)) for j in range(len(LAST_NAMES))]
    return [f"{FIRST_NAMES[i]} {LAST_NAMES[j]}" for i, j in pairs if ((i + j) % 3 == 0) == (split == "eval")]


def search_text(before: str | None, entity: str, relation: str) -> str:
    return f"{before or 'start'} {entity} , next {relation}\nsearch {entity} {relation}"


def read_text(title: str, key: str) -> str:
    return f"page {title}\nread {key}"


def answer_text(relation: str, value: str) -> str:
    return f"{relation} {value} , last\nanswer {value}"


def make_corpus(split: str, number: int, attempt: int = 0) -> tuple[Corpus, dict[tuple[str, str], str], list[str]]:
    """A small corpus of facts, one a page: (corpus, (person, relation) -> value, persons). Pages have two-digit ids.

    An outdated fact has a page of its own, marked "former" in title and text; the shorter page of the two ranks first. A search for a person and a relation
    shows the page of that fact; drawn again where one does not.
    """
    rng = random.Random(f"search corpus {split} {number} {attempt}")
    names = people(split)
    firsts, lasts = rng.sample(FIRST_NAMES, 6), rng.sample(LAST_NAMES, 6)  # shared parts of names: near misses
    near = [name for name in names if name.split()[0] in firsts and name.split()[1] in lasts]
    persons = rng.sample(near if len(near) >= PERSONS else names, PERSONS)
    facts: dict[tuple[str, str], str] = {}
    for person in persons:
        others = rng.sample([other for other in persons if other != person], len(PEOPLE_RELATIONS))
        facts |= {(person, relation): other for relation, other in zip(PEOPLE_RELATIONS, others)}
        facts |= {(person, relation): rng.choice(values) for relation, values in VALUES.items()}
    pages = []
    outdated = set(rng.sample(sorted(facts), round(FORMER_SHARE * len(facts))))
    for (person, relation), value in facts.items():
        trap = rng.random() < TRAP_SHARE
        filler = f" , told in {rng.choice(MONTHS)}"
        pages.append((f"{person} {relation}", f"{relation} of {person} is {value}" + filler * trap))
        if (person, relation) in outdated:
            other = rng.choice([v for v in VALUES.get(relation, persons) if v not in (value, person)])
            pages.append((f"{person} former {relation}", f"former {relation} of {person} is {other}" + filler * (not trap)))
    rng.shuffle(pages)
    keys = [str(key) for key in rng.sample(range(10, 100), len(pages))]
    corpus = Corpus(keys, [title for title, _ in pages], [text for _, text in pages])
    shown = all(f"{person} {relation}" in [corpus.titles[hit] for hit in corpus.search(f"{person} {relation}")] for person, relation in facts)
    return (corpus, facts, persons) if shown else make_corpus(split, number, attempt + 1)


def _embedded(split: str, corpora: dict[str, Corpus], count: int, per_corpus: int) -> list[dict[str, Any]]:
    tasks = []
    for number in range(count):
        corpus, facts, persons = make_corpus(split, number)
        name = f"{split}-{number}"
        corpora[name] = corpus
        keys = dict(zip(corpus.titles, corpus.ids))
        rng = random.Random(f"search questions {split} {number}")
        asked: set[str] = set()
        while len(asked) < per_corpus:
            length = 2 + len(asked) % 3
            relations = [*rng.sample(PEOPLE_RELATIONS, length - 1)]
            relations.append(rng.choice([relation for relation in RELATIONS if relation not in relations]))
            entity, hops = rng.choice(persons), []
            for relation in relations:
                value = facts[entity, relation]
                hops.append({"entity": entity, "relation": relation, "value": value, "id": keys[f"{entity} {relation}"]})
                entity = value
            question = "'s ".join([hops[0]["entity"], *relations]) + " ?"
            if question in asked or len({hop["entity"] for hop in hops} | {entity}) <= length:  # a chain that comes back to itself has short cuts
                continue
            asked.add(question)
            task = {"id": f"search-{name}-{len(asked):02d}", "corpus": name, "question": question, "answer": entity, "aliases": []}
            tasks.append({**task, "hops": hops, "difficulty": length})
    return tasks


def demonstrate(corpora: Mapping[str, Corpus], task: dict[str, Any], rng: random.Random) -> list[Message]:
    """The conversation of an expert: search, read and go on, then answer."""
    env = SearchEnv(corpora, INSTRUCTION, MAX_TURNS)
    messages, ended = env.reset(task), False
    while not ended:
        action = env.oracle_action()
        observation, _, ended, _, _ = env.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    return messages[:-1]


def careless(corpora: Mapping[str, Corpus], task: dict[str, Any], rng: random.Random) -> list[Message]:
    """Like ``demonstrate``, by an expert who mostly reads the first hit although it is outdated, and now and then leaves out a hop or answers too early."""
    env = SearchEnv(corpora, INSTRUCTION, MAX_TURNS)
    messages = env.reset(task)

    def act(action: str) -> str:
        observation = env.step(action)[0]
        messages.extend([{"role": "assistant", "content": action}, {"role": "user", "content": observation}])
        return observation

    relations = [hop["relation"] for hop in task["hops"]]
    before, entity, at = None, task["hops"][0]["entity"], 0
    while at < len(relations):
        if at + 1 < len(relations) and rng.random() < SKIPS_HOP:
            at += 1
        hits = [line.split(" : ") for line in act(search_text(before, entity, relations[at])).splitlines()]
        right = next(hit for hit in hits if hit[0] == f"{entity} {relations[at]}")
        chosen = hits[0] if rng.random() < READS_FIRST else right
        entity = re.search(r" is ([a-z ]+?)(?: ,|$)", act(read_text(*chosen)))[1]
        before, at = relations[at], at + 1
        if at < len(relations) and rng.random() < ANSWERS_EARLY:
            break
    act(answer_text(before, entity))
    return messages[:-1]


# ---------------------------------------------------------------- real data

REAL_INSTRUCTION = """Answer the question at the end by searching. Every turn, write at most one short line of thought and then one action on a line of its own:
search WORDS (shows the best pages with their ids)
read ID (shows a page; read ID 2 shows its second part)
answer TEXT (your final answer in a few words; ends the episode)
Example: first "search Marie Curie birthplace", then "read 812", then "answer Warsaw".
You have {turns} actions."""
REAL_TURNS = 20  # [paper: 20 to 50]
EVAL_SHARE = 0.2  # of the questions, where the files name no split
_ID_FIELDS = ("_id", "id", "docid", "doc_id", "query_id", "qid")
_GOLD_FIELDS = ("evidence_docs", "gold_docs", "evidence_ids", "gold_ids")


def read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """("FILE:LINE", object) for each line. Raises DataError for a line that is no JSON object, and for a file without any."""
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{path}:{number}: not readable as JSON ({error}); one object a line is expected") from error
                    if not isinstance(row, dict):
                        raise DataError(f"{path}:{number}: expected an object, found {type(row).__name__}")
                    rows.append((f"{path}:{number}", row))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as UTF-8 text ({error})") from error
    if not rows:
        raise DataError(f"{path}: empty; one JSON object a line is expected")
    return rows


def _string(where: str, row: dict[str, Any], names: Sequence[str], fix: str) -> str:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None or not isinstance(row[name], str) or not row[name].strip():
        raise DataError(f"{where}: field {name or names[0]!r} is missing or not a non-empty string; {fix}")
    return row[name].strip()


def _key(where: str, row: dict[str, Any], seen: dict[str, str]) -> str | None:
    """The record's id as text, None without one. ``seen`` (id -> place) grows; a second time is an error."""
    name = next((name for name in _ID_FIELDS if row.get(name) is not None), None)
    if name is None:
        return None
    key = str(row[name]) if isinstance(row[name], (str, int)) else ""
    if not key or key.split() != [key]:
        raise DataError(f"{where}: field {name!r} is {row[name]!r}; an id is a number or a text without spaces")
    if key in seen:
        raise DataError(f"{where}: field {name!r}: the id {key!r} is taken by {seen[key]}; ids must be unique")
    seen[key] = where
    return key


def read_corpus(path: Path) -> Corpus:
    """Pages from JSON lines: ``text`` (or ``contents``), perhaps ``title``, an id (``_id``, ``id``, ``docid``); without ids a page's number is its id."""
    ids, titles, texts, seen = [], [], [], {}
    for number, (where, row) in enumerate(read_jsonl(path)):
        key = _key(where, row, seen)
        if number and (key is None) == bool(seen.keys() - {key}):
            raise DataError(f"{where}: field '_id' is missing here or before; give every page an id, or none")
        text = row.get("text", row.get("contents"))
        title = row.get("title") or ""
        if not isinstance(text, str) or not isinstance(title, str):
            name = "title" if isinstance(text, str) else "text"
            raise DataError(f"{where}: field {name!r} is missing or not a string; a page has text and may have a title")
        ids.append(str(number) if key is None else key)
        titles.append(" ".join(title.split()) or " ".join(text.split()[:8]) or "(empty)")
        texts.append(text)
    return Corpus(ids, titles, texts, hits=5, snippet_chars=150, page_chars=1500, stopwords="english", cached=True)


def _answers(where: str, row: dict[str, Any]) -> list[str]:
    found: list[str] = []
    metadata = row.get("metadata")
    for source in (row, metadata if isinstance(metadata, dict) else {}):
        for name in ("answer", "answers", "answer_aliases", "aliases"):
            value = source.get(name)
            values = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in values):
                raise DataError(f"{where}: field {name!r} is not a text or a list of texts")
            if not found and name in ("answer_aliases", "aliases"):
                continue
            found += [str(item).strip() for item in values]
    found = list(dict.fromkeys(text for text in found if text))
    if not found or not normalise(found[0]):
        raise DataError(
            f"{where}: the question has no answer text (more than articles and punctuation); add a field 'answer' (or 'answers', or either inside "
            "'metadata'): relevance judgements alone cannot grade an answer"
        )
    return found


def _gold(where: str, row: dict[str, Any], corpus: Corpus, by_title: dict[str, list[int]]) -> list[str]:
    """Ids of the supporting pages that a question record names itself, in order."""
    found = []
    for name in _GOLD_FIELDS:
        for item in row.get(name) or []:
            key = str(next((item[field] for field in _ID_FIELDS if field in item), "")) if isinstance(item, dict) else str(item)
            if key not in corpus.place:
                raise DataError(f"{where}: field {name!r}: no page of the corpus has the id {key!r}")
            found.append(key)
    for hop in row.get("hops") or []:
        title = hop.get("title") if isinstance(hop, dict) else None
        if title is None:
            continue
        places = by_title.get(" ".join(str(title).split()))
        if not places:
            raise DataError(f"{where}: field 'hops': no page of the corpus has the title {title!r}")
        answer = normalise(str(hop.get("answer", "")))  # several passages can share a title: the one that holds the hop's answer
        found.append(corpus.ids[next((place for place in places if answer in normalise(corpus.texts[place])), places[0])])
    return list(dict.fromkeys(found))


def read_qrels(path: Path, questions: Mapping[str, Any], corpus: Corpus) -> dict[str, list[str]]:
    """Question id -> ids of the pages with a score above 0, from a BEIR file (query-id, corpus-id, score; tab-separated, with a header line)."""
    found: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as UTF-8 text ({error})") from error
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if not line.strip() or (number == 1 and columns[-1].strip() == "score"):
            continue
        if len(columns) != 3 or not re.fullmatch(r"-?\d+", columns[2].strip()):
            raise DataError(f"{path}:{number}: expected query-id, corpus-id and an integer score, separated by tabs, found {line!r}")
        question, page, score = (column.strip() for column in columns)
        if question not in questions:
            raise DataError(f"{path}:{number}: no question has the id {question!r}")
        if page not in corpus.place:
            raise DataError(f"{path}:{number}: no page of the corpus has the id {page!r}")
        found.setdefault(question, []).extend([page] if int(score) > 0 else [])
    return found


def split_by_pages(tasks: Sequence[dict[str, Any]]) -> set[str]:
    """Ids of about a fifth of the tasks; tasks that share a supporting page are on the same side. The choice depends on ids alone."""
    parent = {task["id"]: task["id"] for task in tasks}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    owner: dict[str, str] = {}
    for task in tasks:
        for hop in task["hops"]:
            parent[root(task["id"])] = root(owner.setdefault(hop["id"], task["id"]))
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(root(task["id"]), []).append(task["id"])
    held: set[str] = set()
    for group in sorted(groups.values(), key=lambda ids: hashlib.sha256(min(ids).encode()).digest()):
        if len(held) + len(group) <= max(1, round(EVAL_SHARE * len(tasks))):
            held |= set(group)
    return held


def load_folder(folder: Path) -> TaskSet:
    """Questions with answers over one corpus.

    Corpus: ``corpus.jsonl``, else the only .jsonl file with "corpus" in its name. Questions: ``queries.jsonl``, else every other .jsonl file; each record has
    a question (``question``, ``query`` or ``text``) and an answer, and may name its supporting pages (``gold_docs`` and ``evidence_docs`` as in
    BrowseComp-Plus, ``hops`` with titles as in MuSiQue). Split: BEIR's ``qrels/train.tsv`` and the other files of that folder (a question without a line there
    is left out and counted); or question files with "train" in their name and the others; else a fifth of the questions is held out, so that no supporting
    page is on both sides. Raises DataError for malformed files.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give one with corpus.jsonl and queries.jsonl, or a question file and a corpus file in JSON lines")
    files = sorted(folder.glob("*.jsonl"))
    named = [file for file in files if file.name == "corpus.jsonl"] or [file for file in files if "corpus" in file.stem.lower()]
    if len(named) != 1:
        raise DataError(f"{folder}: {len(named)} corpus files among {[file.name for file in files]}; name one corpus.jsonl")
    question_files = [file for file in files if file.name == "queries.jsonl"] or [file for file in files if file not in named]
    if not question_files:
        raise DataError(f"{folder}: no question file beside {named[0].name}; BEIR's name is queries.jsonl, another .jsonl file will do")
    corpus = read_corpus(named[0])
    by_title: dict[str, list[int]] = {}
    for number, title in enumerate(corpus.titles):
        by_title.setdefault(title, []).append(number)

    tasks: dict[str, dict[str, Any]] = {}
    origin: dict[str, str] = {}
    seen: dict[str, str] = {}
    for file in question_files:
        for where, row in read_jsonl(file):
            question = _string(where, row, ("question", "query", "text"), "a question record has 'question', 'query' or 'text'")
            key = _key(where, row, seen) or f"{file.stem}-{where.rpartition(':')[2]}"
            answer, *aliases = _answers(where, row)
            gold = [{"id": page} for page in _gold(where, row, corpus, by_title)]
            tasks[key] = {"id": key, "corpus": "corpus", "question": f"Question: {question}", "answer": answer, "aliases": aliases, "hops": gold}
            origin[key] = file.stem
    notes: dict[str, Any] = {"pages": len(corpus.ids), "questions": len(tasks), "files": [named[0].name, *(file.name for file in question_files)]}

    judged = {file.stem: read_qrels(file, tasks, corpus) for file in sorted((folder / "qrels").glob("*.tsv"))}
    if judged:
        for pages in judged.values():
            for key, gold in pages.items():
                known = {hop["id"] for hop in tasks[key]["hops"]}
                tasks[key]["hops"] += [{"id": page} for page in dict.fromkeys(gold) if page not in known]
        origin = {key: name for name, pages in judged.items() for key in pages}
        notes["without_qrels"] = len(tasks) - len(origin)
        if notes["without_qrels"]:
            print(f"{folder}: {notes['without_qrels']} questions left out, they have no line in qrels")
    chosen = [tasks[key] for key in tasks if key in origin]
    training = {key for key, name in origin.items() if "train" in name.lower()}
    if training and len(training) < len(origin):
        notes["split"] = "by files"
    elif len(set(origin.values())) > 1:
        raise DataError(f"{folder}: several question files {sorted(set(origin.values()))}, none or all of them for training; put 'train' in the name of one")
    else:
        training = set(origin) - split_by_pages(chosen)
        notes["split"] = f"{len(origin) - len(training)} of {len(origin)} questions held out, no supporting page on both sides"
    for task in chosen:
        task["difficulty"] = len(task["hops"])
    corpus.scores("build the index now")
    make_env = partial(SearchEnv, {"corpus": corpus}, REAL_INSTRUCTION.format(turns=REAL_TURNS), REAL_TURNS)
    train, held_out = ([task for task in chosen if (task["id"] in training) == wanted] for wanted in (True, False))
    return TaskSet(f"search:{folder}", train, held_out, make_env, max_turns=REAL_TURNS, notes=notes)


def load(path: str | None = None, seed: int = 0) -> TaskSet:
    """The embedded tasks, or questions over a real corpus in a folder (``load_folder``). ``seed`` orders the training tasks and changes nothing else.

    Embedded: corpora of 78 facts about people, questions of 2 to 4 hops ("anna bell's boss's city ?"). People of validation questions are in no training
    corpus. A corpus of its own for every 50 questions: the same person has other facts in each, so nothing can be learnt by heart.
    """
    if path is not None:
        tasks = load_folder(Path(path))
    else:
        corpora: dict[str, Corpus] = {}
        train = _embedded("train", corpora, TRAIN_CORPORA, TRAIN_PER_CORPUS)
        held_out = _embedded("eval", corpora, EVAL_CORPORA, EVAL_PER_CORPUS)
        make_env, expert, slips = partial(SearchEnv, corpora, INSTRUCTION, MAX_TURNS), partial(demonstrate, corpora), partial(careless, corpora)
        notes = {"corpora": len(corpora), "split": "people of validation questions are in no training corpus"}
        tasks = TaskSet("search", train, held_out, make_env, expert, careless=slips, max_turns=MAX_TURNS, notes=notes)
    order = list(tasks.train)
    random.Random(seed).shuffle(order)
    return replace(tasks, train=order)
