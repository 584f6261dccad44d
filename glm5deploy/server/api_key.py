"""The server's API key: from a file or the environment, handed to vLLM in its environment, shown nowhere."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm5deploy.errors import UsageError

KEY_VARIABLE = "GLM5DEPLOY_API_KEY"
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``source`` may be shown, ``value`` never is: it is left out of ``repr``."""

    value: str = field(repr=False)
    source: str
    readable_by_others: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The environment that gives vLLM the key."""
        return {"VLLM_API_KEY": self.value}


def find_api_key(file: Path | None, environment: Mapping[str, str]) -> ApiKey | None:
    """The key in ``file``, else in ``GLM5DEPLOY_API_KEY``, else None.

    Raises UsageError for a file that cannot be read or holds no key.
    """
    if file is None:
        text = environment.get(KEY_VARIABLE, "")
        return ApiKey(_checked(text, f"variable {KEY_VARIABLE}"), f"variable {KEY_VARIABLE}") if text else None
    try:
        with file.open(encoding="ascii") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            text = opened.read(_LONGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read the API key file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the API key in {file} is not plain ASCII") from None
    return ApiKey(_checked(text.strip(), f"file {file}"), f"file {file}", bool(mode & 0o077))


def _checked(text: str, source: str) -> str:
    if not text or len(text) > _LONGEST or not all("!" <= character <= "~" for character in text):
        raise UsageError(
            f"{source} holds no usable API key",
            hint="one line of printable ASCII without spaces, for example: openssl rand -hex 32 > key",
        )
    return text
