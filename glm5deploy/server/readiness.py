"""READY means it answered: a short prompt, a prompt beyond index_topk, a tool call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glm5deploy.errors import DeployError
from glm5deploy.progress import Progress, ProgressSink
from glm5deploy.server.client import Answer, Client, RequestFailed
from glm5deploy.server.model_facts import ModelFacts

_FACT = "cobalt-heron-71"
_ANSWER_TOKENS = 1024  # room for a model that thinks although it is asked not to
_TEST_MODEL_TOKENS = 8

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class NotReady(DeployError):
    """The server runs but does not answer as it should; the message says what was asked and what came back."""


class NoAnswer(NotReady):
    """A question was not answered at all."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``note`` says what was seen, or why the check could not be made (``skipped``) or not judged (``answered``)."""

    name: str
    outcome: Literal["passed", "answered", "skipped"]
    note: str
    seconds: float


def wait_for_health(
    client: Client,
    deadline: float,
    check_alive: Callable[[], None],
    progress: ProgressSink,
    last_line: Callable[[], str],
    poll: float = 0.5,
) -> float:
    """Wait until ``/health`` answers; return the seconds it took.

    ``check_alive`` raises when the server has ended. Raises NotReady after ``deadline`` seconds.
    """
    begun = time.monotonic()
    while not client.healthy():
        check_alive()
        waited = time.monotonic() - begun
        if waited > deadline:
            raise NotReady(
                f"the server did not come up within {deadline:.0f} s; its log ends with: {last_line()}",
                hint="give it more time with --ready-timeout",
            )
        progress(Progress("starting the server", int(waited), int(deadline), "seconds", last_line()))
        time.sleep(poll)
    return time.monotonic() - begun


def prove_answers(client: Client, model: ModelFacts, *, context: int, tools: bool) -> list[CheckResult]:
    """Ask what a user would ask, in three ways. ``context`` is what is served, in tokens.

    A test model's random weights can answer but know nothing: it must produce tokens, and what they say is not judged.
    Raises NotReady with what came back.
    """
    if client.model not in (listed := client.models()):
        raise NotReady(f"the server offers {', '.join(listed) or 'no model'}, not {client.model}")
    results = [_short(client, model, context), _beyond_topk(client, model, context)]
    if tools:
        results.append(_tool_call(client, model, context))
    else:
        results.append(CheckResult("tool call", "skipped", "no tool parser is configured", 0.0))
    return results


def _short(client: Client, model: ModelFacts, context: int) -> CheckResult:
    question = "What is 17 + 25? Answer with the number alone."
    answer = _ask(client, model, context, "short prompt", question)
    return _judge("short prompt", model, answer, found="42" in answer.text, wanted="42")


def _beyond_topk(client: Client, model: ModelFacts, context: int) -> CheckResult:
    """Only past index_topk tokens does the indexer leave tokens out: a fact in the middle must still be found."""
    name = f"prompt beyond {model.index_topk} tokens"
    room = context - min(_ANSWER_TOKENS, context // 4)
    if room < model.index_topk * 5 // 4:
        return CheckResult(name, "skipped", f"the context of {context} tokens leaves no room for it", 0.0)
    question, length = _long_question(client, model.index_topk, room)
    answer = _ask(client, model, context, name, question)
    if answer.prompt_tokens <= model.index_topk:
        raise NotReady(f"{name}: the prompt of {length} tokens was cut to {answer.prompt_tokens}")
    result = _judge(name, model, answer, found=_FACT in answer.text.lower(), wanted=_FACT)
    return CheckResult(name, result.outcome, f"{answer.prompt_tokens} tokens; {result.note}", result.seconds)


def _long_question(client: Client, topk: int, room: int) -> tuple[str, int]:
    """A prompt of about 1.5 × ``topk`` tokens, over ``topk`` and at most ``room``, and its length."""
    low, high, lines = 0, 0, 8
    for _ in range(24):
        question = _log_with_fact(lines)
        length = client.count_tokens(_user(question))
        if topk * 9 // 8 < length <= min(room, topk * 2 + 128):
            return question, length
        if length > topk * 9 // 8:
            high = lines
        else:
            low = lines
        lines = (low + high) // 2 if high else lines * 2
        if lines in (low, high):
            break
    raise NotReady(f"no prompt between {topk} and {room} tokens could be made with this tokenizer")


def _log_with_fact(lines: int) -> str:
    """Lines that differ and mean little, the fact among them, and the question at the end."""
    rows = [f"Day {day}: wind {day * 7 % 23} knots, {day * 5 % 11} ships passed." for day in range(1, lines + 1)]
    rows.insert(lines // 3, f"The password of the lighthouse is {_FACT}.")
    return "\n".join([*rows, "What is the password of the lighthouse? Answer with the password alone."])


def _tool_call(client: Client, model: ModelFacts, context: int) -> CheckResult:
    name = "tool call"
    question = "What is the weather in Oslo right now? Use the tool."
    answer = _ask(client, model, context, name, question, tools=[WEATHER_TOOL])
    called = [arguments for tool, arguments in answer.tool_calls if tool == "get_weather"]
    return _judge(name, model, answer, found=any(map(_names_oslo, called)), wanted='get_weather({"city": "Oslo"})')


def _names_oslo(arguments: str) -> bool:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return False
    return isinstance(parsed, dict) and "oslo" in str(parsed.get("city")).lower()


def _ask(client: Client, model: ModelFacts, context: int, name: str, question: str, **options: Any) -> Answer:
    limit = _TEST_MODEL_TOKENS if model.is_test_model else min(_ANSWER_TOKENS, context // 4)
    if not model.is_test_model:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    try:
        answer = client.chat(_user(question), max_tokens=limit, temperature=0.0, **options)
    except RequestFailed as error:
        raise NoAnswer(f"{name}: {error.message}", hint=error.hint) from None
    if answer.completion_tokens < 1:
        raise NotReady(f"{name}: the answer has no token (finish reason {answer.finish_reason})")
    return answer


def _judge(name: str, model: ModelFacts, answer: Answer, *, found: bool, wanted: str) -> CheckResult:
    if found:
        return CheckResult(name, "passed", f"answered {wanted}", answer.seconds)
    if model.is_test_model:
        note = f"{answer.completion_tokens} tokens; random weights, the content is not judged"
        return CheckResult(name, "answered", note, answer.seconds)
    seen = repr(answer.text[:200]) if not answer.tool_calls else str(answer.tool_calls[:2])
    raise NotReady(
        f"{name}: expected {wanted}, got {seen}",
        hint="the weights load but the model does not make sense: glm5deploy install checks the kernels on this GPU",
    )


def _user(question: str) -> Sequence[dict[str, str]]:
    return [{"role": "user", "content": question}]
