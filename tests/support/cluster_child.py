"""The serve stage over two machines, run on the first of them: asks for a continuation and prints it.

``cluster_child.py WORKDIR FLAGS-JSON PROMPT-IDS-JSON``; the result is the last line of stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.stages.serve import ServerInfo, ServeStage
from tests.stages.serving import serve_context


def main() -> None:
    import httpx

    workdir, flags, ids = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}

    def ask(server: ServerInfo) -> None:
        body = {
            "model": server.model,
            "prompt": ids,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
        tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
        print(json.dumps({"ids": [int(token.partition(":")[2]) for token in tokens]}), flush=True)

    try:
        ServeStage(on_ready=ask).run(serve_context(workdir, tuples))
    except DeployError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)


if __name__ == "__main__":
    main()
