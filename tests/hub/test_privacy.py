"""The token: sent to the hub, to nobody else, and never shown. Offline and proxy settings."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glm5deploy.errors import HubError
from glm5deploy.hub.client import Hub, Location, same_origin, without_query
from glm5deploy.hub.plan import make_plan
from tests.hub.conftest import QUANT, REPO, Fetcher
from tests.support.faulty_hub import Fault, FaultyHub, status

TOKEN = "hf_this-is-a-secret"


def test_the_token_goes_to_the_hub_alone_and_is_never_logged(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetcher.server.token = TOKEN
    fetcher.server.inject(status(503))
    with caplog.at_level(logging.DEBUG):
        fetcher.run()
    sent = {
        kind: {h.get("Authorization") or h.get("authorization") for k, _, h in fetcher.server.requests if k == kind}
        for kind in ("api", "resolve", "blob")
    }
    assert sent == {"api": {f"Bearer {TOKEN}"}, "resolve": {f"Bearer {TOKEN}"}, "blob": {None}}
    everything = caplog.text + "".join(fetcher.notes) + "".join(p.note for p in fetcher.progress)
    assert TOKEN not in everything
    assert "Signature=" not in "".join(r.getMessage() for r in caplog.records if r.name.startswith("httpx"))
    stored = [path.read_text() for path in (fetcher.destination / ".fetch").rglob("*.json")]
    assert stored
    assert not any(TOKEN in text or "Signature" in text for text in stored)


def test_a_redirect_to_another_host_does_not_get_the_token(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file is answered by the hub itself; when that answer redirects elsewhere the token must stay."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    plan = fetcher.plan()
    sha = plan.files[0].sha256 or ""

    def redirect(handler, _blob) -> None:  # type: ignore[no-untyped-def]
        handler.respond_empty(302, {"Location": fetcher.server.sign(sha)})

    fetcher.server.inject(Fault(answer=redirect), match=sha)
    fetcher.run()
    assert all("authorization" not in {k.lower() for k in h} for k, _, h in fetcher.server.requests if k == "blob")


def test_a_private_repository_without_token(fetcher: Fetcher) -> None:
    fetcher.server.token = TOKEN
    with pytest.raises(HubError, match="does not exist or is private") as error:
        fetcher.run()
    assert "HF_TOKEN" in (error.value.hint or "")


def test_a_location_does_not_show_its_headers() -> None:
    assert TOKEN not in repr(Location("https://hub/x", {"Authorization": f"Bearer {TOKEN}"}))
    assert without_query("https://user:pw@host:1/a/b?Signature=x#y") == "https://host:1/a/b"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("https://hub/x", "https://hub:443/y", True),
        ("https://hub/x", "http://hub/x", False),
        ("https://hub/x", "https://hub:8443/x", False),
        ("https://hub/x", "https://hub.evil/x", False),
        ("https://hub@evil/x", "https://hub/x", False),
        ("http://HUB/x", "http://hub/x", True),
    ],
)
def test_same_origin(a: str, b: str, same: bool) -> None:
    assert same_origin(a, b) is same


def test_endpoint_and_offline_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hub().endpoint == "https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:1234/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = Hub()
    assert (hub.endpoint, hub.offline) == ("http://mirror:1234", True)
    with pytest.raises(HubError, match="working offline"):
        hub.commit_of(REPO, "main")


def test_proxies_are_used(fetcher: Fetcher) -> None:
    """Listing, resolving and transfer all go through HTTP_PROXY, in a process that starts with it."""
    with _Proxy() as proxy:
        script = (
            "import sys; from pathlib import Path\n"
            "from glm5deploy.hub.client import Hub\n"
            "from glm5deploy.hub.download import Download\n"
            "from glm5deploy.hub.plan import make_plan\n"
            "hub, where = Hub(), Path(sys.argv[1])\n"
            f"plan = make_plan(hub, {REPO!r}, {QUANT!r}, where).plan\n"
            "Download(hub, plan, where).run()\n"
        )
        environment = {**os.environ, "HF_ENDPOINT": fetcher.server.endpoint, "HTTP_PROXY": proxy.url, "NO_PROXY": ""}
        subprocess.run([sys.executable, "-c", script, str(fetcher.destination)], env=environment, check=True)
        assert fetcher.fetched() == fetcher.originals()
        targets = "".join(proxy.asked)
        assert fetcher.server.endpoint in targets
        assert fetcher.server.storage in targets


class _Proxy:
    """An HTTP proxy of the simplest kind: one absolute-form request a connection, passed on as it came."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> _Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(65536)
            method, url, rest = head.split(b" ", 2)
            self.asked.append(url.decode())
            origin, _, path = url.removeprefix(b"http://").partition(b"/")
            host, _, port = origin.partition(b":")
            rest = rest.replace(b"onnection: keep-alive", b"onnection: close")
            with socket.create_connection((host.decode(), int(port))) as server:
                server.sendall(method + b" /" + path + b" " + rest)
                while data := server.recv(65536):
                    client.sendall(data)


def test_the_plan_of_a_private_repository_needs_the_token_once(tmp_path: Path, fetcher: Fetcher) -> None:
    with FaultyHub(token=TOKEN) as server:
        server.publish(REPO, fetcher.source)
        plan = make_plan(Hub(endpoint=server.endpoint, token=TOKEN), REPO, QUANT, tmp_path / "x").plan
        assert len(plan.files) == 3


def test_a_password_in_the_endpoint_is_not_shown(fetcher: Fetcher) -> None:
    def odd(handler) -> bool:  # type: ignore[no-untyped-def]
        handler.respond_json({"id": REPO, "sha": "not a commit"})
        return True

    fetcher.server.api_faults.append(odd)
    hub = Hub(endpoint=fetcher.server.endpoint.replace("://", "://user:secret@"))
    with pytest.raises(HubError, match=f"{fetcher.server.endpoint} gave no commit") as error:
        hub.commit_of(REPO, "main")
    assert "secret" not in str(error.value)
