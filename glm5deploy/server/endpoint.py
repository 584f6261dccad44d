"""What a person needs to use a server that is ready: its address and a request to paste."""

from __future__ import annotations

import json
import shlex

from glm5deploy.server.api_key import KEY_VARIABLE, ApiKey
from glm5deploy.server.settings import ServeSettings


def curl_example(settings: ServeSettings, key: ApiKey | None) -> str:
    """A chat request. A key goes through a pipe: as an argument of curl it would show in ``ps``."""
    body = json.dumps(
        {"model": settings.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
        ensure_ascii=False,
    )
    request = f"{settings.base_url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    if key is None:
        return f"curl {request}"
    kind, _, name = key.source.partition(" ")
    value = f'"$(cat {shlex.quote(name)})"' if kind == "file" else f'"${KEY_VARIABLE}"'
    return f"printf 'Authorization: Bearer %s' {value} | curl -H @- {request}"
