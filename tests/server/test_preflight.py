from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from glm5deploy.checks import Check, require_no_failure, worst
from glm5deploy.errors import DeployError
from glm5deploy.server.api_key import ApiKey
from glm5deploy.server.preflight import check_exposure, check_host, check_log, check_memory, check_port
from tests.support.serving import facts, free_port, settings

KEY = ApiKey("s3cret", "file /key")


def test_a_port_in_use_names_its_owner_and_another_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_port("127.0.0.1", port)
        everywhere = check_port("0.0.0.0", port)
    assert (check.level, everywhere.level) == ("fail", "fail")
    assert f"process {os.getpid()}" in check.found
    assert str(port + 1) in check.remedy
    assert check_port("127.0.0.1", port).level == "ok"


def test_an_address_of_another_machine() -> None:
    check = check_port("203.0.113.7", free_port())
    assert (check.level, check.found) == ("fail", "this machine has no address 203.0.113.7")


@pytest.mark.parametrize(
    ("host", "key", "level"),
    [("127.0.0.1", None, "ok"), ("127.0.0.1", KEY, "ok"), ("0.0.0.0", KEY, "ok"), ("0.0.0.0", None, "warn")],
)
def test_exposure(host: str, key: ApiKey | None, level: str) -> None:
    check = check_exposure(settings(host=host), key)
    assert check.level == level
    assert "s3cret" not in str(check)


def test_a_key_that_others_can_read_is_warned_about() -> None:
    check = check_exposure(settings(), ApiKey("s3cret", "file /key", readable_by_others=True))
    assert (check.level, check.remedy) == ("warn", "chmod 600 it")


def test_log(tmp_path: Path) -> None:
    assert check_log(tmp_path / "logs" / "serve.log").level == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    check = check_log(tmp_path / "file" / "serve.log")
    assert (check.level, check.remedy) == ("fail", "choose another folder with --workdir")
    assert check.found.endswith("file is no folder")


def test_memory() -> None:
    assert check_memory(settings(), facts()).level == "warn"
    assert check_memory(settings(), facts(weight_files=((Path("/w"), 10**6),))).level == "ok"


def test_every_check_of_the_host_has_a_remedy_when_it_needs_one(tmp_path: Path) -> None:
    checks = check_host(settings(port=free_port()), facts(), tmp_path / "serve.log", None)
    assert [check.name for check in checks] == ["port", "access", "log", "open files", "shared memory", "memory"]
    with pytest.raises(ValueError, match="names no remedy"):
        Check("x", "warn", "y")


def test_failures_are_told_together_with_the_first_remedy() -> None:
    checks = [Check("a", "ok", "fine"), Check("b", "fail", "bad", "mend b"), Check("c", "fail", "worse", "mend c")]
    with pytest.raises(DeployError) as caught:
        require_no_failure(checks)
    assert (caught.value.message, caught.value.hint) == ("b: bad; c: worse", "mend b")
    require_no_failure(checks[:1])
    assert (worst(checks), worst(checks[:1]), worst([])) == ("fail", "ok", "ok")
