"""A small real HTTP server in a process of its own, for faults in a server's life that an engine cannot be asked for.

Run as a script: ``http_child.py PORT MODE``. It listens like vLLM, starts a worker process, and then, by MODE:
``serve`` answers; ``slow`` is healthy after two seconds; ``crash`` prints a traceback and ends with 1; ``hang`` never
gets healthy; ``stubborn`` ignores SIGTERM, and so does its worker; ``silent`` is healthy and never answers a question;
``wrong`` answers every question with the same nonsense; ``leave`` ends by itself and leaves its worker behind;
``dense`` answers, but its indexer leaves nothing out; ``uncounted`` answers without an indexer; ``dies`` ends when it
is asked a question. On ``/metrics`` ``stall`` has a request running and counters that stand still, ``busy`` has one
running and counters that move.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

NAME = "tiny"


def reply_to(path: str, body: dict[str, Any], mode: str) -> dict[str, Any]:
    if path == "/v1/models":
        return {"data": [{"id": NAME, "max_model_len": 4096}]}
    words = sum(len(message["content"].split()) for message in body["messages"])
    if path == "/tokenize":
        return {"count": words}
    text = body["messages"][-1]["content"]
    message: dict[str, Any] = {"content": "it is 42"}
    if mode == "wrong":
        message = {"content": "xyzzy"}
    elif "lighthouse" in text:
        message = {"content": text.split("password of the lighthouse is ")[1].split(".")[0]}
    elif "tools" in body:
        call = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
        message = {"content": None, "tool_calls": [call]}
    return {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": words, "completion_tokens": 3},
    }


class Handler(BaseHTTPRequestHandler):
    mode = ""
    begun = 0.0
    counted: ClassVar[dict[str, int]] = {"calls": 0, "rows": 0, "sparse_rows": 0}

    def do_GET(self) -> None:
        healthy = self.mode != "hang" and (self.mode != "slow" or time.monotonic() - self.begun > 2)
        if self.path == "/health":
            self._send(200 if healthy else 503, {})
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._send(200, reply_to(self.path, {}, self.mode))

    def _metrics(self) -> None:
        running = int(self.mode in ("stall", "busy"))
        moved = time.monotonic() if self.mode == "busy" else 17.0
        text = (
            "# HELP vllm:num_requests_running Number of requests\n"
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {moved}\n'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        if self.mode == "silent" and self.path != "/tokenize":
            time.sleep(3600)
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._send(401, {"error": "Unauthorized"})
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            self._chat_seen(body)
        self._send(200, reply_to(self.path, body, self.mode))

    def _chat_seen(self, body: dict[str, Any]) -> None:
        """Count like the plugin's indexer, or fail like an engine."""
        if self.mode == "dies":
            print("(EngineCore pid=7) ERROR 11-29 17:00:00 [core.py:1] RuntimeError: CUDA out of memory", flush=True)
            os._exit(1)
        folder = os.environ.get("GLM5DEPLOY_STATUS_DIR")
        if folder and self.mode != "uncounted":
            long = len(body["messages"][-1]["content"].split()) > 64 and self.mode != "dense"
            Handler.counted = {
                "calls": Handler.counted["calls"] + 2,
                "rows": Handler.counted["rows"] + 10,
                "sparse_rows": Handler.counted["sparse_rows"] + 5 * long,
            }
            counts = json.dumps({**Handler.counted, "layers": [0, 1]})
            Path(folder, "indexer-rank0.json").write_text(counts)

    def _send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, mode = int(sys.argv[1]), sys.argv[2]
    Handler.mode, Handler.begun = mode, time.monotonic()
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    worker = ignore if mode == "stubborn" else "import time; time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", worker])
    print(f"INFO 11-29 17:00:00 [api.py:1] worker {child.pid} on port {port}", flush=True)
    if mode == "crash":
        raise ValueError("KV cache is needed, which is larger than the available one")
    if mode == "leave":
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:

        def stop(*_: object) -> None:
            child.terminate()
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
