"""A real HTTP server that streams at a known pace, for the arithmetic of timing and for what a terminal shows.

It speaks as much of vLLM's API as benchmark and chat use. No model: whether vLLM really behaves so is what the engine
tests find out.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "paced"


@dataclass
class Pace:
    """Seconds to the first piece, between pieces, and tokens a piece brings (more than one: accepted drafts).

    Where there are ``raw`` pieces, every answer is these bytes, sent one after the other, and nothing else.
    ``sent`` is filled with the moments at which a completion was asked for and its pieces left: on a busy machine
    sleeping takes longer than asked, and the measured times must fit these.
    """

    first: float = 0.1
    between: float = 0.01
    tokens: int = 1
    max_model_len: int = 100_000
    kv_blocks: int = 10_000
    chat: tuple[dict[str, str], ...] = ()
    text: str = "x"
    raw: tuple[bytes, ...] = ()
    break_after: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    drafted: int = 0


class StreamingServer:
    """Context manager; ``url`` is where it listens."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        handler = type("Bound", (_Handler,), {"pace": self.pace})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StreamingServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that hangs up in mid-stream is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    pace: Pace

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"data": [{"id": NAME, "max_model_len": self.pace.max_model_len}]})
        else:
            # Lines as vLLM writes them; the labels are shortened.
            text = (
                "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
                f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{self.pace.kv_blocks}"}} 1.0\n'
                'vllm:num_preemptions_total{engine="0"} 0.0\n'
            )
            if self.pace.drafted:
                text += (
                    f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(self.pace.drafted)}\n'
                    f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.pace.drafted * 0.75}\n'
                )
            self._send(text.encode(), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send({"count": len(body["prompt"].split()), "tokens": [len(w) for w in body["prompt"].split()]})
            return
        self.pace.requests.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(self.pace.first)
        if self.pace.raw:
            for piece in self.pace.raw:
                self.wfile.write(piece)
                self.wfile.flush()
            return
        if self.path == "/v1/completions":
            self._complete(body)
        else:
            self._chat()
        self.wfile.write(b"data: [DONE]\n\n")

    def _complete(self, body: dict[str, Any]) -> None:
        done = 0
        times = [time.perf_counter() - self.pace.first]
        self.pace.sent.append(times)
        while done < body["max_tokens"]:
            if done:
                time.sleep(self.pace.between)
            done = min(done + self.pace.tokens, body["max_tokens"])
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": done}
            times.append(time.perf_counter())
            self._event({"choices": [{"text": self.pace.text, "index": 0}], "usage": usage})
        self.pace.drafted += 100 if self.pace.tokens > 1 else 0
        self._event({"choices": [], "usage": usage})

    def _chat(self) -> None:
        for number, delta in enumerate(self.pace.chat):
            if self.pace.break_after and number == self.pace.break_after:
                self._event({"error": {"message": "out of memory", "code": 500}})
                return
            self._event({"choices": [{"delta": delta, "index": 0}]})
            time.sleep(self.pace.between)

    def _event(self, value: dict[str, Any]) -> None:
        # As vLLM writes it: what JSON need not escape is sent as it is.
        self.wfile.write(f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _send(self, value: dict[str, Any] | bytes, kind: str = "application/json") -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
