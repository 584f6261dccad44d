"""One measured request, and the questions a benchmark asks a server besides."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from glm5deploy.errors import DeployError
from glm5deploy.server.bench_figures import Trace
from glm5deploy.server.event_stream import answer_events

_READ_LIMIT = 3600.0  # seconds without a byte; a long prompt behind many others waits long for its first token


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """``api_key`` is sent as a bearer token and shown nowhere."""

    base_url: str
    model: str
    api_key: str | None = None

    def connect(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(30.0, read=_READ_LIMIT)
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout, trust_env=False)


def measure(http: httpx.Client, body: dict[str, Any]) -> Trace:
    """Send one streaming completion and note when its tokens arrive; raises DeployError when it fails."""
    arrivals: list[tuple[float, int]] = []
    prompt_tokens = 0
    sent = time.perf_counter()
    try:
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise DeployError(f"POST /v1/completions: status {response.status_code}: {response.text[:300]}")
            for data in answer_events(response):
                at = time.perf_counter()
                event = json.loads(data)
                if "error" in event:
                    raise DeployError(f"the server broke off: {str(event['error'])[:300]}")
                usage = event.get("usage") or {}
                tokens = int(usage.get("completion_tokens") or 0)
                prompt_tokens = int(usage.get("prompt_tokens") or prompt_tokens)
                if tokens > (arrivals[-1][1] if arrivals else 0):
                    arrivals.append((at, tokens))
    except httpx.HTTPError as error:
        raise unreachable(str(http.base_url), error) from None
    except (ValueError, AttributeError) as error:
        raise DeployError(f"the server streamed something that is not its API: {error}") from None
    if not arrivals:
        raise DeployError(
            "the answer carried no token counts",
            hint="the benchmark needs stream_options.continuous_usage_stats, which vLLM has",
        )
    return Trace(sent, tuple(arrivals), prompt_tokens)


def unreachable(url: str, error: httpx.HTTPError) -> DeployError:
    """A transport error as a message with a next step."""
    hint = "start it with glm5deploy serve, or name it with --url"
    return DeployError(f"no answer from {url}: {error or type(error).__name__}", hint=hint)


def get(http: httpx.Client, path: str) -> httpx.Response:
    try:
        response = http.get(path)
    except httpx.HTTPError as error:
        raise unreachable(str(http.base_url), error) from None
    if response.status_code != 200:
        hint = "give the key with --api-key-file or GLM5DEPLOY_API_KEY" if response.status_code == 401 else None
        raise DeployError(f"GET {path}: status {response.status_code}: {response.text[:200]}", hint=hint)
    return response
