"""The judges that are models: one in this library's engine, one behind an endpoint that speaks OpenAI's chat completions. See judges.py."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import importlib.util
import ipaddress
import json
import logging
import math
import os
import random
import re
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import diskcache

from common.judges import Job, Judge, JudgeError, Settings, Vote, canonical

MAX_BODY = 8 * 2**20  # bytes of one HTTP reply
MAX_OWN_FAILURES = 10  # of one call at an endpoint that lives; with the waits between them that is over a minute
MAX_BACKOFF = 30.0  # seconds
ENGINE_BATCH = 64  # prompts per call of the engine; finished batches are in the cache when a run is interrupted


def with_schema(messages: list[dict[str, str]], schema: dict[str, Any]) -> list[dict[str, str]]:
    """The messages with the schema after the last one, for a judge whose decoding does not know it."""
    text = f"\n\nReply with one JSON value that fits this JSON schema, and nothing else:\n{json.dumps(schema, ensure_ascii=False)}"
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]


# ----------------------------------------------------------------------------------------------------------- local model


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

    def encode(self, job: Job) -> list[int]:
        """Token ids of the next call of a job."""
        messages = with_schema(job.prompt(), job.schema)
        if self.special is not None:
            messages = [{**m, "content": self.special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", m["content"])} for m in messages]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _call(self, jobs: list[Job], done: Callable[..., None]) -> None:
        from common.engine import Sampling

        waiting = list(jobs)
        while waiting:
            kind = (waiting[0].temperature, waiting[0].max_tokens)
            batch = [job for job in waiting if (job.temperature, job.max_tokens) == kind][:ENGINE_BATCH]
            taken = {id(job) for job in batch}
            waiting = [job for job in waiting if id(job) not in taken]
            fits = []
            for job in batch:
                prompt = self.encode(job)
                if len(prompt) + job.max_tokens <= self.context:
                    fits.append((job, prompt))
                else:
                    why = f"rejected: {len(prompt)} prompt tokens and {job.max_tokens} of the reply exceed the context of {self.context}"
                    done(job, Vote(None, why), keep=False)
            sampling = Sampling(kind[0], kind[1], self.stop_token_ids)
            samples = self.engine.generate([prompt for _, prompt in fits], sampling, 1, [[job.seed] for job, _ in fits])
            for (job, prompt), [sample] in zip(fits, samples):
                self.usage.prompt_tokens += len(prompt)
                self.usage.completion_tokens += len(sample.token_ids)
                if not self._use_reply(job, self.tokenizer.decode(sample.token_ids, skip_special_tokens=True), sample.finish_reason == "length", done):
                    waiting.append(job)


def make_local(name: str, settings: Settings, cache: diskcache.Cache | None, kind: str, device: Any, flag: str) -> LocalJudge:
    """The judge of `local:name`, its model loaded. Raises JudgeError when it cannot be."""
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
    version = hashlib.sha256(canonical(stamp).encode()).hexdigest()  # weights that changed in place are another judge
    context = lm.config.max_position_embeddings
    kind = ("vllm" if "cuda" in str(device) else "torch") if kind == "auto" else kind
    settings = replace(settings, temperature=settings.temperature or 0.0, vote_temperature=settings.vote_temperature or 1.0)
    made = make_engine(kind, lm.eval(), tokenizer, max_model_len=context, rollout_format="bf16" if "cuda" in str(device) else "auto")
    return LocalJudge(made, tokenizer, name, stop_token_ids(lm, tokenizer), context, settings, version, cache)


# --------------------------------------------------------------------------------------------------------- HTTP endpoint


@dataclass(eq=False)
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
        if importlib.util.find_spec("openai") is None:
            raise JudgeError(f'judge {self.identity}: needs the package openai: pip install -c constraints.txt -e ".[judges]"')
        self.base_url, self.clock, self.sleep, self._key = base_url, clock, sleep, key
        self._jitter = random.Random()  # of its own: waits must not move the seeded streams of a run
        self._paused_until = -math.inf  # by rate-limit headers
        self._down_since: float | None = None  # first failure after the last reply
        self._replies = 0  # of this batch

    def _call(self, jobs: list[Job], done: Callable[..., None]) -> None:
        self._down_since, self._replies = None, 0
        lost: list[_Failure] = []

        async def everything() -> None:
            import openai

            for name in ("openai", "httpx2", "httpcore2"):  # at lower levels they log headers, which an endpoint may fill with the key
                logging.getLogger(name).setLevel(logging.WARNING)
            local = _is_local(urlsplit(self.base_url).hostname or "")
            transport = openai.DefaultAsyncHttpxClient(trust_env=not local, follow_redirects=False)  # no proxy to this machine, no key to another host
            slots = asyncio.Semaphore(self.settings.concurrency)
            async with openai.AsyncOpenAI(
                api_key=self._key or "none", base_url=self.base_url, max_retries=0, timeout=self.settings.timeout, http_client=transport
            ) as client:
                tasks = [asyncio.create_task(self._answer_job(client, slots, job, done, lost)) for job in jobs]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        _run_async(everything)
        if self._replies == 0 and lost and (len(jobs) > 1 or not lost[0].own):
            raise JudgeError(
                f"judge {self.identity}: no reply to any of {len(jobs)} calls ({lost[0].reason}). Earlier answers are in the cache: mend the endpoint and "
                "resume the run, or allow more patience"
            )

    async def _answer_job(self, client: Any, slots: asyncio.Semaphore, job: Job, done: Callable[..., None], lost: list[_Failure]) -> None:
        ended = False
        while not ended:
            try:
                text, reason, cut = await self._reply(client, slots, job)
            except _Rejected as error:
                return done(job, Vote(None, f"rejected: {error}"), keep=False)
            except _Failure as error:
                lost.append(error)
                return done(job, Vote(None, f"no reply: {error.reason}"), keep=False)
            if reason:
                self.usage.calls += 1
                return done(job, Vote(None, reason))
            ended = self._use_reply(job, text, cut, done)

    async def _reply(self, client: Any, slots: asyncio.Semaphore, job: Job) -> tuple[str, str, bool]:
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

    async def _attempt(self, client: Any, job: Job) -> tuple[str, str, bool]:
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


def check_url(url: str, flag: str) -> str:
    """The address without a trailing slash. Errors do not repeat parts that may hold credentials."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise JudgeError(f"{flag}: the address cannot be read; it must look like http://host:port/v1") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise JudgeError(f"{flag}: the address may hold neither user:password@ nor ?query nor #fragment, which would be logged; keys come from the environment")
    if not host or any(character.isspace() for character in url):
        raise JudgeError(f"{flag}: {url!r} has no host; it must look like http://host:port/v1")
    return url.rstrip("/")


def endpoint_key(base_url: str, variable: str, flag: str) -> str:
    """The key for this address out of the environment, "" where none is needed. OpenAI's own variable goes to OpenAI only."""
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
