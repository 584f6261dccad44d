"""The part of the OpenAI-compatible API that the program itself uses, over httpx."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from glm5deploy.errors import DeployError
from glm5deploy.server.event_stream import answer_events


class RequestFailed(DeployError):
    """The server refused a request or answered something that is not its API."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One chat answer. ``seconds`` is the time of the whole request; token counts are the server's."""

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    """(function name, arguments as the model wrote them)"""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    @property
    def text(self) -> str:
        """Everything the model wrote, thinking included."""
        return f"{self.reasoning}\n{self.content}" if self.reasoning else self.content


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer; ``tokens`` is the total so far where the server said it, else 0."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0
    prompt_tokens: int = 0


class Client:
    """Asks one server. The environment's proxies are not used: the server is on this machine or named explicitly."""

    def __init__(self, base_url: str, model: str, api_key: str | None = None, timeout: float = 300.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def healthy(self) -> bool:
        """Whether ``/health`` says 200; False as well while nothing listens yet."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        return list(self.model_lengths())

    def model_lengths(self) -> dict[str, int]:
        """Every model that is offered, with the tokens of its context (0 where the server does not say)."""
        listed = self._json("GET", "/v1/models").get("data")
        models = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        lengths = [(str(entry.get("id")), entry.get("max_model_len")) for entry in models]
        return {name: length if type(length) is int else 0 for name, length in lengths}

    def metrics(self, timeout: float = 10.0) -> str:
        """Prometheus text."""
        try:
            response = self._http.get("/metrics", timeout=timeout)
        except httpx.HTTPError as error:
            raise RequestFailed(f"GET /metrics: {_reason(error)}") from None
        return response.text

    def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Length of the prompt that the chat template makes of ``messages``."""
        count = self._json("POST", "/tokenize", {"model": self.model, "messages": list(messages)}).get("count")
        if type(count) is not int:
            raise RequestFailed("POST /tokenize: the server named no count")
        return count

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """One answer, waited for whole. Raises RequestFailed."""
        begun = time.monotonic()
        body = {"model": self.model, "messages": list(messages), **options}
        reply = self._json("POST", "/v1/chat/completions", body)
        try:
            choice, usage = reply["choices"][0], reply["usage"]
            message = choice["message"]
            calls = tuple(
                (str(call["function"]["name"]), str(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            )
            return Answer(
                content=message.get("content") or "",
                reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
                tool_calls=calls,
                finish_reason=str(choice.get("finish_reason")),
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=int(usage["completion_tokens"]),
                seconds=time.monotonic() - begun,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestFailed(f"POST /v1/chat/completions: the answer lacks {error}") from None

    def stream(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[Delta]:
        """The same, piece by piece; the last piece carries the token counts."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **options,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused("POST /v1/chat/completions", response)
                yield from map(_delta, answer_events(response))
        except httpx.HTTPError as error:
            raise RequestFailed(f"POST /v1/chat/completions: {_reason(error)}") from None
        except ValueError as error:
            raise RequestFailed(f"the server streamed something that is not its API: {error}") from None

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{method} {path}: {_reason(error)}") from None
        if response.status_code != 200:
            raise _refused(f"{method} {path}", response)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RequestFailed(f"{method} {path}: the answer is no JSON object")
        return value


def _delta(text: str) -> Delta:
    try:
        event = json.loads(text)
        if "error" in event:
            raise RequestFailed(f"the server broke off: {_message(event)}")
        usage = event.get("usage") or {}
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        return Delta(
            content=delta.get("content") or "",
            reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
            tokens=int(usage.get("completion_tokens") or 0),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise RequestFailed(f"the server streamed something that is not its API: {text[:200]}") from None


def _refused(request: str, response: httpx.Response) -> RequestFailed:
    try:
        said = _message(response.json())
    except ValueError:
        said = response.text[:300]
    hint = "give the server's key with --api-key-file or GLM5DEPLOY_API_KEY" if response.status_code == 401 else None
    return RequestFailed(f"{request}: status {response.status_code}: {said}", hint=hint)


def _message(value: Any) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or value)[:300]


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
