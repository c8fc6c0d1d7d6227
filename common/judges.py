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
import email.utils
import hashlib
import ipaddress
import json
import math
import os
import random
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import diskcache
import jsonschema

FORMAT = 1  # part of every cache key: raise it when prompts, parsing or seeds change their meaning
MAX_BODY = 8 * 2**20  # bytes of one HTTP reply
MAX_OWN_FAILURES = 10  # of one call at an endpoint that lives; with the waits between them that is over a minute
MAX_BACKOFF = 30.0  # seconds
ENGINE_BATCH = 64  # prompts per call of the engine; finished batches are in the cache when a run is interrupted


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
        """(sum, count) pairs for `common.run.reduce_metrics`; counts come out as the mean over processes."""
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
    names = [repr(float(v)) if _is_number(v) else _canonical(v) for v in values]
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


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _clean(value: Any) -> Any:
    """A JSON value without lone surrogates, which no endpoint accepts. Raises TypeError or ValueError for what is not JSON."""
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))


# ------------------------------------------------------------------------------------------------------------ the judges


@dataclass
class _Job:
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
        address), when no call of the batch got a reply within the patience, or when the cache cannot be used.
        """
        started = time.perf_counter()
        try:
            wanted = [self._jobs(request, f"request {i}") for i, request in enumerate(requests)]
            jobs = {job.key: job for row in wanted for job in row}
            votes = {key: vote for key in jobs if (vote := self._cached(key)) is not None}
            self.usage.votes += len(jobs)
            self.usage.duplicates += sum(len(row) for row in wanted) - len(jobs)
            self.usage.cache_hits += len(votes)

            def done(job: _Job, vote: Vote, keep: bool = True) -> None:
                votes[job.key] = vote
                if keep:
                    self._keep(job.key, vote)
                elif vote.value is None:
                    self.usage.gave_up += 1

            before = self.usage.gave_up
            if to_ask := [job for key, job in jobs.items() if key not in votes]:
                self._call(to_ask, done)
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

    def _call(self, jobs: list[_Job], done: Callable[..., None]) -> None:
        """Calls done(job, vote, keep) for every job, keep being False for what must not enter the cache."""
        raise NotImplementedError

    def _jobs(self, request: Request, where: str) -> list[_Job]:
        try:
            messages, schema = _clean(list(request.messages)), _clean(request.schema)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: messages and schema must be JSON: {error}") from None
        if not messages or any(not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str) for m in messages):
            raise ValueError(f"{where}: messages must be a list of {{'role': text, 'content': text}} with at least one entry")
        if request.votes < 1 or request.max_tokens < 0 or request.combine not in ("majority", "mean"):
            raise ValueError(
                f"{where}: votes={request.votes}, max_tokens={request.max_tokens}, combine={request.combine!r}: votes from 1, max_tokens from 0, majority or mean"
            )
        name = _canonical(schema)
        if name not in self._validators:
            try:
                jsonschema.Draft202012Validator.check_schema(schema)
            except jsonschema.SchemaError as error:
                raise ValueError(f"{where}: not a JSON schema at {error.json_path}: {error.message}") from None
            self._validators[name] = jsonschema.Draft202012Validator(schema)
        count = 1 if self.deterministic else request.votes
        payload = _canonical(_clean(request.payload)) if self.deterministic else None  # a model's key must not depend on what it never sees
        max_tokens = request.max_tokens or self.settings.max_tokens
        temperature = self.settings.temperature if request.votes == 1 else self.settings.vote_temperature
        out = []
        for vote in range(count):
            parts = [FORMAT, self.identity, self.model, self.version, messages, schema, payload, max_tokens, temperature, vote]
            key = hashlib.sha256(_canonical(parts).encode()).hexdigest()
            out.append(_Job(key, messages, schema, self._validators[name], max_tokens, temperature, int(key[:15], 16), request.payload))
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

    def _use_reply(self, job: _Job, text: str, cut: bool, done: Callable[..., None]) -> bool:
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

    def _call(self, jobs: list[_Job], done: Callable[..., None]) -> None:
        for job in jobs:
            value = self.rule(job.payload)
            if value is not None and (error := jsonschema.exceptions.best_match(job.validator.iter_errors(value))) is not None:
                raise ValueError(f"{self.identity} gave a value that its schema refuses at {error.json_path}: {error.message}")
            self.usage.calls += 1
            done(job, Vote(value, "" if value is not None else "abstained"))


class LocalJudge(Judge):
    """A causal language model in this library's engine. Prompts go through its chat template; the schema stands in the prompt.

    Control tokens of the tokenizer inside message contents are broken up, so judged text cannot open a turn of its own.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, model: str, stop_token_ids: tuple[int, ...], context: int, settings: Settings, version: str = "", cache: Any = None
    ) -> None:
        super().__init__(f"local:{model}", model, settings, version, cache)
        self.engine, self.tokenizer, self.stop_token_ids, self.context = engine, tokenizer, stop_token_ids, context
        special = {token for token in [*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values())] if len(token) > 1}
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        super().close()

    def encode(self, job: _Job) -> list[int]:
        """Token ids of the next call of a job."""
        messages = with_schema(job.prompt(), job.schema)
        if self.special is not None:
            messages = [{**m, "content": self.special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", m["content"])} for m in messages]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _call(self, jobs: list[_Job], done: Callable[..., None]) -> None:
        from common.engine import Sampling

        waiting = list(jobs)
        while waiting:
            kind = (waiting[0].temperature, waiting[0].max_tokens)
            batch = [job for job in waiting if (job.temperature, job.max_tokens) == kind][:ENGINE_BATCH]
            taken = {id(job) for job in batch}
            waiting = [job for job in waiting if id(job) not in taken]
            prompts = [self.encode(job) for job in batch]
            fits = [(job, prompt) for job, prompt in zip(batch, prompts) if len(prompt) + job.max_tokens <= self.context]
            for job, prompt in zip(batch, prompts):
                if len(prompt) + job.max_tokens > self.context:
                    done(
                        job,
                        Vote(None, f"rejected: {len(prompt)} prompt tokens and {job.max_tokens} of the reply exceed the context of {self.context}"),
                        keep=False,
                    )
            if not fits:
                continue
            sampling = Sampling(kind[0], kind[1], self.stop_token_ids)
            for (job, prompt), [sample] in zip(fits, self.engine.generate([prompt for _, prompt in fits], sampling, 1, [[job.seed] for job, _ in fits])):
                self.usage.prompt_tokens += len(prompt)
                self.usage.completion_tokens += len(sample.token_ids)
                if not self._use_reply(job, self.tokenizer.decode(sample.token_ids, skip_special_tokens=True), sample.finish_reason == "length", done):
                    waiting.append(job)


def with_schema(messages: list[dict[str, str]], schema: dict[str, Any]) -> list[dict[str, str]]:
    """The messages with the schema after the last one, for a judge whose decoding does not know it."""
    text = f"\n\nReply with one JSON value that fits this JSON schema, and nothing else:\n{json.dumps(schema, ensure_ascii=False)}"
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]


@dataclass
class _Failure(Exception):
    """An attempt without a reply. own: the endpoint lives, the call itself may be at fault. retry_after: seconds the endpoint asked for."""

    reason: str
    own: bool = False
    retry_after: float | None = None


class _Rejected(Exception):
    """The endpoint refuses this one request for good."""


class HTTPJudge(Judge):
    """An endpoint that speaks OpenAI's chat completions. See docs/judges.md for what happens on each kind of failure."""

    def __init__(
        self, model: str, base_url: str, key: str, settings: Settings, cache: diskcache.Cache | None = None,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        super().__init__(f"openai:{model}@{base_url}", model, settings, settings.reply_format, cache)
        self.base_url, self.clock, self.sleep, self._key = base_url, clock, sleep, key
        self._jitter = random.Random()  # of its own: waits must not move the seeded streams of a run
        self._paused_until = -math.inf  # by rate-limit headers
        self._down_since: float | None = None  # first failure after the last reply
        self._replies = 0  # of this batch
        self._ever_replied = False

    def _call(self, jobs: list[_Job], done: Callable[..., None]) -> None:
        self._down_since, self._replies = None, 0
        rejected: list[str] = []
        lost: list[_Failure] = []

        async def everything() -> None:
            import openai

            local = _is_local(urlsplit(self.base_url).hostname or "")
            transport = openai.DefaultAsyncHttpxClient(trust_env=not local, follow_redirects=False)  # no proxy to this machine, no key to another host
            slots = asyncio.Semaphore(self.settings.concurrency)
            async with openai.AsyncOpenAI(
                api_key=self._key or "none", base_url=self.base_url, max_retries=0, timeout=self.settings.timeout, http_client=transport
            ) as client:
                await asyncio.gather(*(self._answer_job(client, slots, job, done, rejected, lost) for job in jobs))

        _run_async(everything)
        if self._replies == 0 and rejected and not lost and not self._ever_replied:
            raise JudgeError(f"judge {self.identity} rejected every request of its first batch: {rejected[0]}")
        if self._replies == 0 and lost and (len(jobs) > 1 or not lost[0].own):
            raise JudgeError(
                f"judge {self.identity}: no reply to any of {len(jobs)} calls ({lost[0].reason}). Earlier answers are in the cache: mend the endpoint and resume the "
                "run, or allow more time with a longer patience"
            )

    async def _answer_job(self, client: Any, slots: asyncio.Semaphore, job: _Job, done: Callable[..., None], rejected: list[str], lost: list[_Failure]) -> None:
        ended = False
        while not ended:
            try:
                text, reason, cut = await self._reply(client, slots, job)
            except _Rejected as error:
                rejected.append(str(error))
                return done(job, Vote(None, f"rejected: {error}"), keep=False)
            except _Failure as error:
                lost.append(error)
                return done(job, Vote(None, f"no reply: {error.reason}"), keep=False)
            if reason:
                self.usage.calls += 1
                return done(job, Vote(None, reason))
            ended = self._use_reply(job, text, cut, done)

    async def _reply(self, client: Any, slots: asyncio.Semaphore, job: _Job) -> tuple[str, str, bool]:
        """(text, why the model gave none, whether it was cut off), after as many attempts as it takes. Raises _Rejected or the last _Failure."""
        failures, own = 0, 0
        while True:
            async with slots:
                while (wait := self._paused_until - self.clock()) > 0:
                    await self.sleep(wait)
                if self._out_of_patience():
                    raise _Failure(f"no reply from the endpoint for {self.settings.patience:g} s")
                try:
                    reply = await self._attempt(client, job)
                except _Failure as error:
                    failure = error
                else:
                    self._down_since = None
                    self._replies += 1
                    self._ever_replied = True
                    return reply
            self.usage.failures += 1
            if self._down_since is None:
                self._down_since = self.clock()
            failures, own = failures + 1, own + failure.own
            if own >= MAX_OWN_FAILURES:
                raise _Failure(f"{failure.reason}, {own} times", own=True)
            wait = max(min(MAX_BACKOFF, 2.0 ** min(failures - 1, 10)) * self._jitter.uniform(0.5, 1.0), failure.retry_after or 0.0)
            left = self._down_since + self.settings.patience - self.clock()
            if left <= 0 or (failure.retry_after or 0.0) > left:
                raise _Failure(f"{failure.reason}, patience of {self.settings.patience:g} s used up", failure.own)
            self.usage.retries += 1
            await self.sleep(min(wait, left))

    def _out_of_patience(self) -> bool:
        return self._down_since is not None and self.clock() - self._down_since > self.settings.patience

    async def _attempt(self, client: Any, job: _Job) -> tuple[str, str, bool]:
        import httpx2
        import openai

        options: dict[str, Any] = {"model": self.model, "messages": job.prompt()}
        options["max_completion_tokens" if self.base_url.startswith("https://api.openai.com/") else "max_tokens"] = job.max_tokens
        if job.temperature is not None:
            options["temperature"] = job.temperature
        if job.temperature:
            options["seed"] = job.seed % 2**31
        if self.settings.reply_format == "json_schema":
            options["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": job.schema}}
        else:
            options["messages"] = with_schema(options["messages"], job.schema)
            if self.settings.reply_format == "json_object":
                options["response_format"] = {"type": "json_object"}
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.timeout):  # of the whole call; the client's own limits only the wait for the next bytes
                async with client.chat.completions.with_streaming_response.create(**options) as response:
                    async for piece in response.iter_bytes():
                        body += piece
                        if len(body) > MAX_BODY:
                            raise _Failure(f"a reply of more than {MAX_BODY} bytes", own=True)
                    self._respect_limits(response.headers)
        except openai.APIStatusError as error:
            self._status_failure(error)
        except (TimeoutError, openai.APITimeoutError):
            raise _Failure(f"no reply within {self.settings.timeout:g} s", own=True) from None
        except (openai.APIConnectionError, httpx2.ConnectError) as error:
            raise _Failure(f"connection failed ({type(error.__cause__ or error).__name__})") from None
        except httpx2.HTTPError as error:
            raise _Failure(f"connection broke off ({type(error).__name__})", own=True) from None
        return self._read_body(bytes(body))

    def _status_failure(self, error: Any) -> None:
        """Raises what an HTTP status means. The endpoint's own text may repeat the key, so it is scrubbed."""
        status, text = error.status_code, self._scrub(str(error.message))[:300]
        self._respect_limits(error.response.headers)
        if status < 400 or status in (401, 403, 404, 405) or (status == 429 and error.code == "insufficient_quota"):
            advice = {401: "check the key in the environment", 404: "check the model's name, and that the address ends like /v1"}.get(status, "")
            raise JudgeError(f"judge {self.identity}: HTTP {status}: {text}" + (f" ({advice})" if advice else "")) from None
        retry_after = _retry_after(error.response.headers)
        if status == 429:
            if retry_after is not None and retry_after <= self.settings.patience:
                self._paused_until = max(self._paused_until, self.clock() + retry_after)  # for every call, not only this one
            raise _Failure("HTTP 429", retry_after=retry_after) from None
        if status in (502, 503, 504):
            raise _Failure(f"HTTP {status}", retry_after=retry_after) from None
        if status >= 500 or status in (408, 409, 425):
            raise _Failure(f"HTTP {status}", own=True, retry_after=retry_after) from None
        raise _Rejected(f"HTTP {status}: {text}") from None

    def _respect_limits(self, headers: Any) -> None:
        """Pauses all calls until the reset that x-ratelimit-* headers name, when they say that nothing is left."""
        for what in ("requests", "tokens"):
            reset = _duration(headers.get(f"x-ratelimit-reset-{what}", ""))
            if headers.get(f"x-ratelimit-remaining-{what}", "").strip() == "0" and reset is not None:
                self._paused_until = max(self._paused_until, self.clock() + min(reset, self.settings.patience))

    def _read_body(self, body: bytes) -> tuple[str, str, bool]:
        try:
            data = json.loads(self._scrub(body.decode("utf-8", "replace")))
            choice = data["choices"][0]
            message, cut = choice["message"], choice.get("finish_reason") == "length"
            text = message.get("content")
            declined = bool(message.get("refusal")) or choice.get("finish_reason") == "content_filter"
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise _Failure("a body that is no chat completion", own=True) from None
        usage = data.get("usage")
        counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
        if all(isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**40 for count in counts):
            self.usage.prompt_tokens += counts[0]
            self.usage.completion_tokens += counts[1]
            self.usage.cost += (counts[0] * self.settings.prompt_price + counts[1] * self.settings.completion_price) / 1e6
        else:
            self.usage.unmetered += 1
        if declined:
            return "", "declined by the model", cut
        return text if isinstance(text, str) else "", "", cut

    def _scrub(self, text: str) -> str:
        return text.replace(self._key, "***") if len(self._key) >= 8 else text  # shorter ones are placeholders such as EMPTY


def _run_async(main: Callable[[], Awaitable[None]]) -> None:
    """asyncio.run, in a thread when this one already runs a loop (notebooks). Whatever interrupts it, no task survives."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(main())).result()


def _duration(text: str) -> float | None:
    """Seconds of "1.5", "250ms", "6m0s" or "1h2m3s"; None for anything else."""
    if found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*", text):
        return float(found[1])
    if not re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:ms|[hms]))+\s*", text):
        return None
    unit = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
    return sum(float(number) * unit[name] for number, name in re.findall(r"(\d+(?:\.\d+)?)(ms|[hms])", text))


def _retry_after(headers: Any) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None without one that can be read."""
    if (milliseconds := _duration(headers.get("retry-after-ms", ""))) is not None:
        return milliseconds / 1000
    text = headers.get("retry-after", "")
    if (seconds := _duration(text)) is not None:
        return seconds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        return _make_local(rest, settings, _open_cache(cache), engine, device, flag)
    if scheme == "openai" and rest:
        found = re.fullmatch(r"(.+?)(?:@(https?://.*))?", rest)
        if "@http" in rest and not found[2]:
            raise JudgeError(f"{flag}: the address after @ must look like http://host:port/v1")
        base_url = _check_url(found[2] or "https://api.openai.com/v1", flag)
        return HTTPJudge(found[1], base_url, _key(base_url, key_variable, flag), settings, _open_cache(cache), clock, sleep)
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


def _check_url(url: str, flag: str) -> str:
    """The address without a trailing slash. Errors do not repeat parts that may hold credentials."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise JudgeError(f"{flag}: the address cannot be read: {error}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise JudgeError(f"{flag}: the address may hold neither user:password@ nor ?query nor #fragment, which would be logged; keys come from the environment")
    if not host or any(character.isspace() for character in url):
        raise JudgeError(f"{flag}: {url!r} has no host; it must look like http://host:port/v1")
    return url.rstrip("/")


def _key(base_url: str, variable: str, flag: str) -> str:
    parts = urlsplit(base_url)
    openai_itself = parts.hostname == "api.openai.com"
    key = os.environ.get(variable, "") or (os.environ.get("OPENAI_API_KEY", "") if openai_itself else "")
    if not key and parts.scheme == "https":
        raise JudgeError(f"{flag}: no key for {base_url}: set the environment variable {variable}" + (" or OPENAI_API_KEY" if openai_itself else ""))
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise JudgeError(f"{flag}: the key in the environment variable has blanks or characters that an HTTP header cannot carry")
    if key and parts.scheme == "http" and not _is_local(parts.hostname):
        warnings.warn(f"{flag}: the key travels unencrypted to {parts.hostname}; use https", stacklevel=3)
    return key


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


def _make_local(name: str, settings: Settings, cache: diskcache.Cache | None, kind: str, device: Any, flag: str) -> LocalJudge:
    import torch

    from common.engine import make_engine
    from common.policies import PolicyError, load_policy, stop_token_ids

    if name == "tiny":
        raise JudgeError(f"{flag} local:tiny: the tiny policy knows one task only; use local:smollm2, a folder or a hub id")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        lm, tokenizer, path = load_policy(name, device=device, dtype=torch.bfloat16 if "cuda" in str(device) else torch.float32)
    except PolicyError as error:
        raise JudgeError(f"{flag} local:{name}: {error}") from None
    files = sorted(path.iterdir()) if path.is_dir() else []
    stamp = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files] or getattr(lm.config, "_commit_hash", None)
    version = hashlib.sha256(_canonical(stamp).encode()).hexdigest()  # weights that changed in place are another judge
    context = lm.config.max_position_embeddings
    kind = ("vllm" if "cuda" in str(device) else "torch") if kind == "auto" else kind
    settings = replace(settings, temperature=settings.temperature or 0.0, vote_temperature=settings.vote_temperature or 1.0)
    made = make_engine(kind, lm.eval(), tokenizer, max_model_len=context)
    return LocalJudge(made, tokenizer, name, stop_token_ids(lm, tokenizer), context, settings, version, cache)


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
