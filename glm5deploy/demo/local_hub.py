"""A model hub on loopback: folders served as repositories to the real huggingface_hub client.

It speaks the part of the hub's API that downloading uses: model info, recursive tree listing in pages, ``/resolve/``
with HEAD and GET, signed and expiring URLs on a second origin for large files, byte ranges, ETags, xet read tokens.
Run ``python -m glm5deploy.demo.local_hub DIR`` to serve ``DIR/<owner>/<name>/``.
"""

from __future__ import annotations

import argparse
import hmac
import secrets
import sys
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs

from glm5deploy.demo.hub_handler import HubHandler
from glm5deploy.demo.hub_repository import Blob, Repository


class LocalHub:
    """The server. Use as a context manager; ``endpoint`` is what HF_ENDPOINT is set to.

    ``token`` makes every repository private. ``url_lifetime`` is the seconds a signed URL is good for. ``page_size``
    entries come in one page of a listing. ``served`` counts requests and body bytes by kind ("api", "resolve",
    "blob", "bytes").
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        url_lifetime: float = 3600.0,
        page_size: int = 1000,
        handler: type[HubHandler] | None = None,
    ) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = token
        self.url_lifetime = url_lifetime
        self.page_size = page_size
        self.xet_endpoint: str | None = None
        self.served: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._secret = secrets.token_bytes(16)
        self._host = host
        class_ = type("BoundHandler", (handler or HubHandler,), {"hub": self})
        self._api = _Server((host, port), class_)
        self._storage = _Server((host, 0), class_)
        self._threads = [
            threading.Thread(target=s.serve_forever, args=(0.02,), daemon=True) for s in (self._api, self._storage)
        ]

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._api.server_address[1]}"

    @property
    def storage(self) -> str:
        """Origin of the signed URLs: another port, hence one that must never see the token."""
        return f"http://{self._host}:{self._storage.server_address[1]}"

    def repository(self, repo_id: str) -> Repository:
        """The repository of that name, made when it does not exist."""
        return self.repositories.setdefault(repo_id, Repository(repo_id))

    def publish(self, repo_id: str, folder: Path, *, ref: str = "main") -> str:
        """Serve a folder's files as a new commit of a repository; returns the commit's 40 hex digits."""
        return self.repository(repo_id).publish(folder, ref=ref)

    def sign(self, sha256: str) -> str:
        """A storage URL for the blob that expires after ``url_lifetime`` seconds."""
        expires = f"{time.time() + self.url_lifetime:.3f}"
        return f"{self.storage}/blobs/{sha256}?Expires={expires}&Signature={self._signature(sha256, expires)}"

    def signature_holds(self, sha256: str, query: str) -> bool:
        fields = parse_qs(query)
        expires, given = fields.get("Expires", ["0"])[0], fields.get("Signature", [""])[0]
        return hmac.compare_digest(given, self._signature(sha256, expires)) and float(expires) > time.time()

    def _signature(self, sha256: str, expires: str) -> str:
        return hmac.new(self._secret, f"{sha256} {expires}".encode(), "sha256").hexdigest()

    def blob(self, sha256: str) -> Blob | None:
        blobs = (b for r in self.repositories.values() for c in r.commits.values() for b in c.values())
        return next((b for b in blobs if b.is_lfs and b.sha256 == sha256), None)

    def count(self, kind: str, amount: int = 1) -> None:
        with self.lock:
            self.served[kind] += amount

    def start(self) -> LocalHub:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Close both ports; transfers in flight end with their connection."""
        for server in (self._api, self._storage):
            server.shutdown()
            server.server_close()

    def __enter__(self) -> LocalHub:
        return self.start()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in mid-body is ordinary here, not worth a traceback on the terminal."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve ``DIR/<owner>/<name>`` as repositories until interrupted; the endpoint goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m glm5deploy.demo.local_hub", description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with LocalHub(port=arguments.port) as hub:
        for path in sorted(p for p in arguments.folder.glob("*/*") if p.is_dir()):
            repo_id = path.relative_to(arguments.folder).as_posix()
            hub.publish(repo_id, path)
        print(f"HF_ENDPOINT={hub.endpoint}", flush=True)  # noqa: T201  (a program of its own, not the library)
        threading.Event().wait()


if __name__ == "__main__":
    main()
