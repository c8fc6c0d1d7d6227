"""A real HTTP server on this machine that speaks OpenAI's chat completions and misbehaves on request, and a clock that tests turn by hand."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What the server does with one call. text: the model's answer; body: instead of a chat completion."""

    text: str | None = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str = "stop"
    message: dict = field(default_factory=dict)  # further fields of the message
    usage: dict | None = field(default_factory=lambda: {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12})
    cut: bool = False  # the connection ends in the middle of the body
    hang: bool = False  # no answer until the server closes
    trickle: bool = False  # blanks without end, one at a time, until the server closes

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        if self.status != 200:
            return json.dumps({"error": {"message": self.text or "no", "type": "error", "code": None}}).encode()
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text, **self.message}, "finish_reason": self.finish_reason}
        return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": self.usage}).encode()


class JudgeServer:
    """Runs behave(request body, number of the call) -> Reply for each call, in threads. `calls` keeps (body, headers by lower-case name) of each."""

    def __init__(self, behave: Callable[[dict, int], Reply], start: bool = True) -> None:
        self.behave, self.calls, self.released, self.lock = behave, [], threading.Event(), threading.Lock()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = None
        if start:
            self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.calls)
                    outer.calls.append((body, {name.lower(): value for name, value in self.headers.items()}))
                reply = outer.behave(body, number)
                if reply.hang:
                    outer.released.wait(60)
                    self.close_connection = True
                    return
                if reply.trickle:
                    self.send_response(200)
                    self.send_header("Content-Length", "1000000")
                    self.end_headers()
                    while not outer.released.wait(0.05):
                        self.wfile.write(b" ")
                    return
                data = reply.encoded()
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if reply.cut else data)
                self.close_connection = reply.cut

            def log_message(self, *args) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address) -> None:
                pass  # clients that went away are the point of some tests

        self.server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Clock:
    """Time that passes only in `sleep`. Sleepers that start together sleep together. at: (time, what happens then), run once each."""

    def __init__(self, *at: tuple[float, Callable[[], None]]) -> None:
        self.now, self.waits, self.at = 0.0, [], sorted(at, key=lambda event: event[0])

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        self.waits.append(seconds)
        await asyncio.sleep(0)
        self.now = max(self.now, until)
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1]()
