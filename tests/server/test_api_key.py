from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.server.api_key import find_api_key
from glm5deploy.server.endpoint import curl_example
from tests.support.serving import settings


def test_a_file_goes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o600)
    key = find_api_key(file, {"GLM5DEPLOY_API_KEY": "from-env"})
    assert key is not None
    assert (key.value, key.source, key.readable_by_others) == ("from-file", f"file {file}", False)
    assert key.variables == {"VLLM_API_KEY": "from-file"}
    other = find_api_key(None, {"GLM5DEPLOY_API_KEY": "from-env"})
    assert other is not None
    assert (other.value, other.source) == ("from-env", "variable GLM5DEPLOY_API_KEY")
    assert find_api_key(None, {}) is None


def test_the_value_is_never_shown(tmp_path: Path) -> None:
    key = find_api_key(None, {"GLM5DEPLOY_API_KEY": "s3cret"})
    assert key is not None
    assert "s3cret" not in repr(key)
    assert "s3cret" not in curl_example(settings(), key)


def test_a_file_others_can_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abc")
    file.chmod(0o644)
    key = find_api_key(file, {})
    assert key is not None
    assert key.readable_by_others


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"caf\xc3\xa9", b"tab\tbed", b"x" * 5000])
def test_keys_that_cannot_be_sent_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(UsageError):
        find_api_key(file, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nokey: No such file"):
        find_api_key(tmp_path / "nokey", {})


def test_curl_without_and_with_a_key(tmp_path: Path) -> None:
    plain = curl_example(settings(), None)
    assert plain.startswith("curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{")
    file = tmp_path / "a key"
    file.write_text("s3cret")
    assert curl_example(settings(), find_api_key(file, {})) == (
        f"""printf 'Authorization: Bearer %s' "$(cat '{file}')" | curl -H @- {plain.removeprefix("curl ")}"""
    )
    from_variable = curl_example(settings(), find_api_key(None, {"GLM5DEPLOY_API_KEY": "s3cret"}))
    assert from_variable.startswith("""printf 'Authorization: Bearer %s' "$GLM5DEPLOY_API_KEY" | curl -H @- """)
