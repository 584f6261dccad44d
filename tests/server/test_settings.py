from __future__ import annotations

from typing import Any

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.server.settings import OWN_FLAGS, flag_name
from tests.support.serving import settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "--tp 0"),
        ({"pp": -1}, "--pp -1"),
        ({"mtp": -1}, "--mtp -1"),
        ({"port": 0}, "--port 0"),
        ({"port": 65536}, "--port 65536"),
        ({"context": 0}, "--context 0"),
        ({"max_seqs": 0}, "--max-seqs 0"),
        ({"gpu_memory": 1.01}, "--gpu-memory 1.01"),
        ({"cpu_kv_gib": 0}, "cpu_kv_gib 0"),
        ({"ready_timeout": 0}, "time limits"),
        ({"host": "example.org"}, "'example.org' is not an IP address"),
        ({"name": "--api-key"}, "served model name '--api-key'"),
        ({"name": "a b"}, "served model name 'a b'"),
        ({"extra": ("--seed", "1\0")}, "NUL"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(**changes)
    assert message in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("flag", sorted(OWN_FLAGS))
@pytest.mark.parametrize("spelling", ["{}", "{}=x"])
def test_flags_that_belong_to_the_program_are_refused_with_the_way_to_set_them(flag: str, spelling: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(extra=("--seed", "1", spelling.format(flag)))
    assert caught.value.hint == OWN_FLAGS[flag]


def test_underscores_do_not_smuggle_a_flag_in() -> None:
    with pytest.raises(UsageError, match="--trust-remote-code"):
        settings(extra=("--trust_remote_code",))


def test_remote_code_may_be_forbidden_twice() -> None:
    assert settings(extra=("--no-trust-remote-code",)).extra == ("--no-trust-remote-code",)


@pytest.mark.parametrize(
    ("host", "loopback", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:8000"),
        ("localhost", True, "http://localhost:8000"),
        ("::1", True, "http://[::1]:8000"),
        ("0.0.0.0", False, "http://127.0.0.1:8000"),
        ("::", False, "http://[::1]:8000"),
        ("10.0.0.5", False, "http://10.0.0.5:8000"),
    ],
)
def test_addresses(host: str, loopback: bool, url: str) -> None:
    assert (settings(host=host).loopback_only, settings(host=host).base_url) == (loopback, url)


@pytest.mark.parametrize(
    ("word", "name"),
    [("--max_model_len=8", "--max-model-len"), ("-tp", "-tp"), ("-1", ""), ("-", ""), ("--", ""), ("8", "")],
)
def test_flag_names(word: str, name: str) -> None:
    assert flag_name(word) == name
