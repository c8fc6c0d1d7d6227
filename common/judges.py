"""Judges: chat messages and a JSON schema in, a validated JSON value or None ("missing") out. Documentation: docs/judges.md.

Three judges with one interface. A rule judge is a plain Python function of the embedded task, a local judge a language model in this
library's engine, an HTTP judge any endpoint that speaks OpenAI's chat completions.

    judge = make_judge("openai:Qwen/Qwen3-8B@http://127.0.0.1:8000/v1", rule)
    schema = object_schema(met={"type": "boolean"})
    [answer] = judge.ask([Request(messages, schema, votes=3, payload={"role": "match", ...})])
    answer.value                    # {"met": True}, or None with the reason in answer.reason

What every judge promises:

- A value fits the schema. What does not fit, after one re-ask, is an abstention; what could not be had is a failure. Both are None, never 0.
- What a model answered is in the cache as soon as it is there, so an interrupted batch loses nothing and a second run makes no call.
  Failures of the endpoint are never cached.
- API keys come from the environment. They are in no log, cache, exception or answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import diskcache
import jsonschema

FORMAT = 1  # part of every cache key: raise it when prompts, parsing or seeds change their meaning


class JudgeError(RuntimeError):
    """The judge cannot be used, or nothing can be had from it any more. The text says why and what to do."""


@dataclass(frozen=True)
class Request:
    """One question to a judge.

    messages: chat messages {"role", "content"}; put text under judgement through `fence`. schema: JSON schema of the reply; give lists of
    labels minItems = maxItems, objects additionalProperties = False (`object_schema`). votes: independent samples; a judge that cannot
    differ from itself (rule) is asked once. combine: "majority" of every leaf of the replies (labels), or the "mean" of numeric leaves
    (scores) and the majority of the others. payload: what the rule judge gets; models never see it. max_tokens: length limit of a reply
    (0: the judge's own).
    """

    messages: Sequence[dict[str, str]]
    schema: dict[str, Any]
    votes: int = 1
    combine: Literal["majority", "mean"] = "majority"
    payload: Any = None
    max_tokens: int = 0


@dataclass(frozen=True)
class Vote:
    """One sample. value None: no usable answer, for the reason given. cached: it came out of the cache."""

    value: Any = None
    reason: str = ""
    cached: bool = False


@dataclass(frozen=True)
class Answer:
    """What became of a request. value None means missing (never a score of 0); reason is "" exactly when there is a value.

    votes: one per sample, abstentions included. cached: every vote came out of the cache.
    """

    value: Any
    reason: str
    votes: tuple[Vote, ...]
    cached: bool


@dataclass(frozen=True)
class Settings:
    """How a judge is asked. See `make_judge`."""

    temperature: float | None = 0.0
    vote_temperature: float | None = 0.7
    max_tokens: int = 512
    concurrency: int = 16
    timeout: float = 120.0
    patience: float = 600.0
    reply_format: Literal["json_schema", "json_object", "text"] = "json_schema"
    prompt_price: float = 0.0
    completion_price: float = 0.0


@dataclass
class Usage:
    """Counters since the judge was made. Subtract an earlier copy for one update's share."""

    requests: int = 0
    missing: int = 0  # requests without a value
    votes: int = 0  # distinct votes that the requests needed
    duplicates: int = 0  # votes equal to another one of their batch, not counted in votes
    cache_hits: int = 0  # votes found in the cache
    abstentions: int = 0  # votes without a usable answer by the judge's own doing, cached ones included
    gave_up: int = 0  # votes that could not be had: outage, repeated failures, rejected by the endpoint
    ties: int = 0  # requests with a tied leaf, decided by the earliest vote
    calls: int = 0  # replies of the model, re-asks included
    reasks: int = 0
    failures: int = 0  # attempts without a reply
    retries: int = 0  # failed attempts that were followed by another one
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unmetered: int = 0  # replies that did not say how many tokens they took
    cost: float = 0.0  # in the currency of the prices
    seconds: float = 0.0  # wall time inside ask()

    def __sub__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(Usage)})

    def copy(self) -> Usage:
        return replace(self)

    def pairs(self, prefix: str = "judge") -> dict[str, tuple[float, float]]:
        """(sum, count) pairs for `common.ranks.reduce_metrics`; counts come out as the mean over processes."""
        shares = {
            "fail_frac": (self.missing, self.requests),
            "abstain_frac": (self.abstentions, self.votes),
            "cache_hit_frac": (self.cache_hits, self.votes),
        }
        counts = {name: (getattr(self, name), 1) for name in ("calls", "prompt_tokens", "completion_tokens", "failures", "cost", "seconds")}
        return {f"{prefix}/{name}": (float(total), float(count)) for name, (total, count) in {**shares, **counts}.items()}


# ------------------------------------------------------------------------------------------------------- what scripts use


def object_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with exactly these properties, the only kind that hosted endpoints accept in strict mode."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def fence(value: Any, name: str = "response") -> str:
    """Untrusted text, or a JSON value with such text in it, as a block that it cannot end or speak outside of.

    The value is written as JSON (so it cannot start a line of its own), its tokens of chat templates are spelled with escapes (so no
    tokenizer reads them as control tokens), and the block's marks carry a hash of the content: a text cannot contain its own hash. The same
    value gives the same block, which the cache needs. This stops text from leaving its block; it cannot stop a model from obeying it.
    """
    body = json.dumps(_clean(value), ensure_ascii=False, indent=0 if isinstance(value, (list, dict)) else None)
    body = re.sub(r"<(?=[|/a-zA-Z_｜])", r"\\u003c", body)
    body = re.sub(r"\[(?=/?[A-Z_]+\])", r"\\u005b", body)
    mark = hashlib.sha256(body.encode()).hexdigest()[:16]
    return f"<{name} {mark}>\n{body}\n</{name} {mark}>"


def combine_votes(values: Sequence[Any], how: Literal["majority", "mean"] = "majority") -> tuple[Any, bool]:
    """(combined value, whether some leaf was tied) of JSON values; None entries, also inside, are abstentions and take no part.

    Objects with the same keys and lists of the same length are combined leaf by leaf. A tie goes to the earliest of the tied votes: votes
    are exchangeable, so that favours no label. Nothing but None gives None.
    """
    values = [v for v in values if v is not None]
    if not values:
        return None, False
    first = values[0]
    if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        parts = {key: combine_votes([v[key] for v in values], how) for key in first}
        return {key: value for key, (value, _) in parts.items()}, any(tied for _, tied in parts.values())
    if isinstance(first, list) and all(isinstance(v, list) and len(v) == len(first) for v in values):
        rows = [combine_votes(column, how) for column in zip(*values)]
        return [value for value, _ in rows], any(tied for _, tied in rows)
    if how == "mean" and all(_is_number(v) for v in values):
        return math.fsum(values) / len(values), False
    names = [repr(float(v)) if _is_number(v) else canonical(v) for v in values]
    counts = Counter(names)
    most = max(counts.values())
    return values[next(i for i, name in enumerate(names) if counts[name] == most)], sum(count == most for count in counts.values()) > 1


# ------------------------------------------------------------------------------------------------------- reading a reply


class _Malformed(ValueError):
    """A reply that is not JSON of the schema. The text never quotes the reply."""


def parse_reply(text: str, validator: Any) -> Any:
    """The JSON value in a model's reply: the whole text, or all of it inside one code fence, after an optional <think> block.

    Raises ValueError for anything else, for what the schema refuses, and for JSON that readers disagree about: NaN and infinities,
    duplicate keys, integers beyond 18 digits, lone surrogates.
    """
    text = re.sub(r"^\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL).strip()
    fenced = re.fullmatch(r"```[a-zA-Z]*\n(.*?)\n?```", text, flags=re.DOTALL)
    try:
        value = json.loads(
            fenced[1] if fenced else text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_short_int, object_pairs_hook=_no_duplicates
        )
        json.dumps(value, ensure_ascii=False).encode()
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except _Malformed:
        raise
    except RecursionError:
        raise _Malformed("nested too deeply") from None
    except UnicodeEncodeError:
        raise _Malformed("half a surrogate pair in a string") from None
    except ValueError:
        raise _Malformed("not JSON") from None
    if error is not None:
        raise _Malformed(f"{error.json_path[:80]} does not meet {error.validator!r} of the schema")
    return value


def _refuse_constant(name: str) -> None:
    raise _Malformed(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _Malformed("a number out of range")
    return value


def _short_int(text: str) -> int:
    if len(text) > 18:
        raise _Malformed("a number out of range")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(out := dict(pairs)) < len(pairs):
        raise _Malformed("a key twice in one object")
    return out


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _clean(value: Any) -> Any:
    """A JSON value without lone surrogates, which no endpoint accepts. Raises TypeError or ValueError for what is not JSON."""
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))


# ------------------------------------------------------------------------------------------------------------ the judges


@dataclass
class Job:
    """One distinct vote that has to be asked for."""

    key: str
    messages: list[dict[str, str]]
    schema: dict[str, Any]
    validator: Any
    max_tokens: int
    temperature: float | None
    seed: int
    payload: Any = None
    reasked: str = ""  # why the first reply could not be used

    def prompt(self) -> list[dict[str, str]]:
        """Messages of the next call. A re-ask adds to the last message and does not quote the bad reply, which may carry injected text."""
        if not self.reasked:
            return self.messages
        again = f"\n\nAn earlier reply could not be used ({self.reasked}). Reply with one JSON value that fits the schema, and nothing else."
        return [*self.messages[:-1], {**self.messages[-1], "content": self.messages[-1]["content"] + again}]


class Judge:
    """What the three share: checks, votes, duplicates, cache, counters. Use `make_judge`.

    identity: what the cache and reports call this judge. model: which model (or rule) judges, to compare two judges by.
    """

    deterministic = False

    def __init__(self, identity: str, model: str, settings: Settings, version: str = "", cache: diskcache.Cache | None = None) -> None:
        self.identity, self.model, self.settings, self.version, self.cache = identity, model, settings, version, cache
        self.usage = Usage()
        self._validators: dict[str, Any] = {}

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order. Equal requests are asked once.

        Raises ValueError for a request that is wrong in itself, and JudgeError when the endpoint refuses the judge altogether (key, model,
        address), when no call of the batch got a reply within the patience, when every call of the first batch was rejected, or when the
        cache cannot be used. Votes that arrived before an error are in the cache.
        """
        started = time.perf_counter()
        try:
            wanted = [self._jobs(request, f"request {i}") for i, request in enumerate(requests)]
            jobs = {job.key: job for row in wanted for job in row}
            votes = {key: vote for key in jobs if (vote := self._cached(key)) is not None}
            self.usage.votes += len(jobs)
            self.usage.duplicates += sum(len(row) for row in wanted) - len(jobs)
            self.usage.cache_hits += len(votes)

            def done(job: Job, vote: Vote, keep: bool = True) -> None:
                votes[job.key] = vote
                if keep:
                    self._keep(job.key, vote)
                elif vote.value is None:
                    self.usage.gave_up += 1

            before = self.usage.gave_up
            if to_ask := [job for key, job in jobs.items() if key not in votes]:
                self._call(to_ask, done)
                if self.usage.calls == 0:
                    raise JudgeError(f"judge {self.identity}: no answer in its first batch of {len(to_ask)} calls: {votes[to_ask[0].key].reason}")
            self.usage.abstentions += sum(vote.value is None for vote in votes.values()) - (self.usage.gave_up - before)
            answers = [self._answer(request, [votes[job.key] for job in row]) for request, row in zip(requests, wanted)]
            self.usage.requests += len(answers)
            self.usage.missing += sum(answer.value is None for answer in answers)
            return answers
        finally:
            self.usage.seconds += time.perf_counter() - started

    def close(self) -> None:
        """Closes the cache and frees a local judge's model. May be called twice."""
        if self.cache is not None:
            self.cache.close()

    def _call(self, jobs: list[Job], done: Callable[..., None]) -> None:
        """Calls done(job, vote, keep) for every job, keep being False for what must not enter the cache."""
        raise NotImplementedError

    def _jobs(self, request: Request, where: str) -> list[Job]:
        try:
            messages, schema = _clean(list(request.messages)), _clean(request.schema)
            payload = canonical(request.payload) if self.deterministic else None  # a model's key must not depend on what it never sees
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: messages, schema and payload must be JSON: {error}") from None
        if not messages or any(not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str) for m in messages):
            raise ValueError(f"{where}: messages must be a list of {{'role': text, 'content': text}} with at least one entry")
        if request.votes < 1 or request.max_tokens < 0 or request.combine not in ("majority", "mean"):
            raise ValueError(
                f"{where}: votes={request.votes} must be at least 1, max_tokens={request.max_tokens} at least 0, combine={request.combine!r} majority or mean"
            )
        name = canonical(schema)
        if name not in self._validators:
            try:
                jsonschema.Draft202012Validator.check_schema(schema)
            except jsonschema.SchemaError as error:
                raise ValueError(f"{where}: not a JSON schema at {error.json_path}: {error.message}") from None
            self._validators[name] = jsonschema.Draft202012Validator(schema)
        count = 1 if self.deterministic else request.votes
        max_tokens = request.max_tokens or self.settings.max_tokens
        temperature = self.settings.temperature if request.votes == 1 else self.settings.vote_temperature
        out = []
        for vote in range(count):
            parts = [FORMAT, self.identity, self.model, self.version, messages, schema, payload, max_tokens, temperature, vote]
            key = hashlib.sha256(canonical(parts).encode()).hexdigest()
            out.append(Job(key, messages, schema, self._validators[name], max_tokens, temperature, int(key[:15], 16), request.payload))
        return out

    def _answer(self, request: Request, votes: list[Vote]) -> Answer:
        value, tied = combine_votes([vote.value for vote in votes], request.combine)
        self.usage.ties += tied
        reason = "" if value is not None else "; ".join(dict.fromkeys(vote.reason for vote in votes))
        return Answer(value, reason, tuple(votes), all(vote.cached for vote in votes))

    def _cached(self, key: str) -> Vote | None:
        if self.cache is None:
            return None
        try:
            entry = self.cache.get(key, retry=True)
            return None if entry is None else Vote(entry["value"], entry["reason"], cached=True)
        except Exception as error:
            raise JudgeError(f"the judge cache in {self.cache.directory} cannot be read ({type(error).__name__}: {error}): delete that folder") from None

    def _keep(self, key: str, vote: Vote) -> None:
        if self.cache is None:
            return
        try:
            self.cache.set(key, {"value": vote.value, "reason": vote.reason}, retry=True)
        except Exception as error:
            raise JudgeError(f"the judge cache in {self.cache.directory} cannot be written ({type(error).__name__}: {error})") from None

    def _use_reply(self, job: Job, text: str, cut: bool, done: Callable[..., None]) -> bool:
        """Ends the job with what a model replied; False asks for the re-ask."""
        self.usage.calls += 1
        try:
            value = parse_reply(text, job.validator)
        except _Malformed as error:
            if cut:
                done(job, Vote(None, f"cut off at {job.max_tokens} tokens"))
            elif job.reasked:
                done(job, Vote(None, f"malformed: {error}"))
            else:
                job.reasked = str(error)
                self.usage.reasks += 1
                return False
            return True
        done(job, Vote(value, "" if value is not None else "abstained"))
        return True


class RuleJudge(Judge):
    """rule(payload) -> a value of the schema, or None to abstain. Deterministic: asked once whatever the votes, never cached.

    An exception of the rule, or a value that the schema refuses, is a bug of the task and is raised.
    """

    deterministic = True

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        name = f"rule:{getattr(rule, '__module__', '')}.{getattr(rule, '__qualname__', type(rule).__name__)}"
        super().__init__(name, name, Settings())
        self.rule = rule

    def _call(self, jobs: list[Job], done: Callable[..., None]) -> None:
        for job in jobs:
            value = self.rule(job.payload)
            if value is not None and (error := jsonschema.exceptions.best_match(job.validator.iter_errors(value))) is not None:
                raise ValueError(f"{self.identity} gave a value that its schema refuses at {error.json_path}: {error.message}")
            self.usage.calls += 1
            done(job, Vote(value, "" if value is not None else "abstained"))


# ------------------------------------------------------------------------------------------------------------ make_judge


def make_judge(
    spec: str,
    rule: Callable[[Any], Any] | None = None,
    *,
    flag: str = "--judge",
    cache: str | Path | None = None,
    key_variable: str = "JUDGE_API_KEY",
    temperature: float | None = 0.0,
    vote_temperature: float | None = 0.7,
    max_tokens: int = 512,
    concurrency: int = 16,
    timeout: float = 120.0,
    patience: float = 600.0,
    reply_format: Literal["json_schema", "json_object", "text"] = "json_schema",
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
    engine: Literal["auto", "torch", "vllm"] = "auto",
    device: Any = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Judge:
    """The judge that a flag names: `rule`, `local:MODEL`, `openai:MODEL` (OpenAI itself) or `openai:MODEL@http://host:port/v1`.

    rule: the task's rule, for `rule`. flag: what errors call the flag. cache: folder of the answers (None: in the user's cache folder,
    "": off). key_variable: environment variable with the endpoint's key; OpenAI itself falls back to OPENAI_API_KEY.
    temperature, vote_temperature: for one vote, and for several (None: leave it to the endpoint). max_tokens: of a reply.
    concurrency: calls at a time. timeout: seconds of one call. patience: seconds without any reply after which the endpoint is given up.
    reply_format: what the endpoint supports; the schema stands in the prompt unless it is json_schema. Prices: per million tokens.
    engine, device: for local judges. clock, sleep: replaced by tests.

    Raises JudgeError for a spec that cannot be used.
    """
    settings = Settings(temperature, vote_temperature, max_tokens, concurrency, timeout, patience, reply_format, prompt_price, completion_price)
    _check_settings(settings, flag)
    scheme, _, rest = spec.partition(":")
    if spec == "rule":
        if rule is None:
            raise JudgeError(f"{flag} rule: this task has no rule judge; use local:MODEL or openai:MODEL@http://host:port/v1")
        return RuleJudge(rule)
    if scheme == "local" and rest:
        from common.judge_models import make_local

        return make_local(rest, settings, _open_cache(cache), engine, device, flag)
    if scheme == "openai" and rest:
        from common.judge_models import HTTPJudge, check_url, endpoint_key

        found = re.fullmatch(r"(.+?)(?:@(https?://.*))?", rest)
        if "@http" in rest and not found[2]:
            raise JudgeError(f"{flag}: the address after @ must look like http://host:port/v1")
        base_url = check_url(found[2] or "https://api.openai.com/v1", flag)
        return HTTPJudge(found[1], base_url, endpoint_key(base_url, key_variable, flag), settings, _open_cache(cache), clock, sleep)
    raise JudgeError(f"{flag} {spec if '@' not in spec else scheme + ':...'}: use rule, local:MODEL, openai:MODEL or openai:MODEL@http://host:port/v1")


def _check_settings(s: Settings, flag: str) -> None:
    for name in ("temperature", "vote_temperature"):
        value = getattr(s, name)
        if value is not None and not (value == 0 or 0.01 <= value < math.inf):
            raise JudgeError(f"{flag}: {name}={value}: 0, or at least 0.01")
    if s.vote_temperature == 0:
        raise JudgeError(f"{flag}: vote_temperature=0 would repeat one vote; use a value above 0")
    bounds = {"max_tokens": 1, "concurrency": 1, "timeout": 1e-3, "patience": 0, "prompt_price": 0, "completion_price": 0}
    for name, low in bounds.items():
        if not low <= getattr(s, name) < math.inf:
            raise JudgeError(f"{flag}: {name}={getattr(s, name)}: must be a finite number of at least {low}")
    if s.reply_format not in ("json_schema", "json_object", "text"):
        raise JudgeError(f"{flag}: reply_format={s.reply_format!r}: json_schema, json_object or text")


def _open_cache(folder: str | Path | None) -> diskcache.Cache | None:
    if folder == "":
        return None
    if folder is None:
        from common.policies import cache_folder

        folder = cache_folder() / "judges"
    try:  # JSON, not pickle: reading a cache must not run code; no eviction: a cached run makes no call
        return diskcache.Cache(str(folder), disk=diskcache.JSONDisk, eviction_policy="none", size_limit=2**50)
    except Exception as error:
        raise JudgeError(f"the judge cache in {folder} cannot be opened ({type(error).__name__}: {error})") from None


# ------------------------------------------------------------------------------------------------------------- agreement


@dataclass(frozen=True)
class Agreement:
    """How one judge agrees with the combined references. NaN where a measure is undefined."""

    judge: str
    items: int  # judged by the candidate and decided by the references
    missing: int  # left out: the candidate abstained, or no (or a tied) reference
    pearson: float  # numbers and booleans only
    percent: float  # share of equal labels in [0, 1], "labels" only
    kappa: float  # Cohen's, "labels" only


def agreement(judgements: dict[str, Sequence[Any]], references: Sequence[str], kind: Literal["labels", "scores"] = "labels") -> list[Agreement]:
    """Each judge against the majority (labels) or mean (scores) of the references other than itself, item by item.

    judgements: judge name -> one label or score per item, None where it abstained; all of one length. A tied majority decides nothing, so
    its item is left out. Raises ValueError for unknown names or unequal lengths.
    """
    lengths = {len(row) for row in judgements.values()}
    if len(lengths) > 1:
        raise ValueError(f"judgements differ in length: { ({name: len(row) for name, row in judgements.items()}) }")
    if unknown := [name for name in references if name not in judgements]:
        raise ValueError(f"references {unknown} are not among the judges {list(judgements)}")
    out = []
    for name, row in judgements.items():
        pairs = []
        for i, value in enumerate(row):
            others = [judgements[r][i] for r in references if r != name]
            target, tied = combine_votes(others, "mean" if kind == "scores" else "majority")
            if value is not None and target is not None and not tied:
                pairs.append((value, target))
        percent = kappa = math.nan
        if kind == "labels" and pairs:
            mine, theirs = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
            percent = sum(a == b for a, b in pairs) / len(pairs)
            chance = sum(mine[label] * theirs[label] for label in mine) / len(pairs) ** 2
            kappa = (percent - chance) / (1 - chance) if chance < 1 else math.nan
        numeric = all(isinstance(x, (int, float)) for pair in pairs for x in pair)
        out.append(Agreement(name, len(pairs), len(row) - len(pairs), _pearson(pairs) if numeric else math.nan, percent, kappa))
    return out


def _pearson(pairs: Sequence[tuple[float, float]]) -> float:
    """Correlation of two columns, NaN for fewer than two rows or a constant column."""
    if len(pairs) < 2:
        return math.nan
    try:
        return statistics.correlation(*([float(x) for x in column] for column in zip(*pairs)))
    except statistics.StatisticsError:  # a constant column
        return math.nan


def agreement_table(rows: Sequence[Agreement]) -> str:
    """The report as text, best correlation first."""
    lines = [f"{'judge':<40} {'items':>6} {'missing':>7} {'Pearson':>8} {'agree':>7} {'kappa':>7}"]
    for r in sorted(rows, key=lambda r: -r.pearson if r.pearson == r.pearson else math.inf):
        lines.append(f"{r.judge:<40} {r.items:>6} {r.missing:>7} {r.pearson:>8.3f} {r.percent:>7.3f} {r.kappa:>7.3f}")
    return "\n".join(lines)
