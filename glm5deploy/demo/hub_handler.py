"""The hub's HTTP answers: model info, listings in pages, ``/resolve/``, byte ranges of stored files."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

from glm5deploy.demo.hub_repository import Blob

if TYPE_CHECKING:
    from glm5deploy.demo.local_hub import LocalHub

API = re.compile(
    r"/api/models/(?P<repo>[^/]+(?:/[^/]+)?)(?:/(?P<what>revision|tree|xet-read-token)/(?P<revision>[^/]+))?"
)
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
BLOB = re.compile(r"/blobs/(?P<sha256>[0-9a-f]{64})")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HubHandler(BaseHTTPRequestHandler):
    """One connection. Tests subclass it to misbehave: ``respond_blob`` and ``send_body`` are the places to do so."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are written apart
    server_version = "glm5deploy-local-hub"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are counted in ``hub.served``; nothing is printed."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if match := BLOB.fullmatch(url.path):
            self.hub.count("blob")
            self.respond_blob(match["sha256"], url.query)
        elif self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.respond_error(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif match := API.match(url.path):
            self.hub.count("api")
            self.respond_api(unquote(match["repo"]), match["what"], unquote(match["revision"] or "main"), url.query)
        elif match := RESOLVE.fullmatch(url.path):
            self.hub.count("resolve")
            self.respond_resolve(match["repo"], unquote(match["revision"]), unquote(match["path"]))
        else:
            self.respond_error(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def respond_api(self, repo_id: str, what: str | None, revision: str, query: str) -> None:
        repository = self.hub.repositories.get(repo_id)
        commit = repository.resolve(revision) if repository else None
        if repository is None or commit is None:
            self.respond_error(HTTPStatus.NOT_FOUND, "RevisionNotFound" if repository else "RepoNotFound")
        elif what == "tree":
            entries = list(tree_entries(repository.commits[commit]))
            start = int(parse_qs(query).get("cursor", ["0"])[0])
            end = start + self.hub.page_size
            next_page = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={end}"
            self.respond_json(entries[start:end], {"Link": f'<{next_page}>; rel="next"'} if end < len(entries) else {})
        elif what == "xet-read-token":
            endpoint, expires = self.hub.xet_endpoint or "", int(time.time()) + 3600
            headers = {"X-Xet-Cas-Url": endpoint, "X-Xet-Access-Token": "read", "X-Xet-Token-Expiration": str(expires)}
            self.respond_json({"casUrl": endpoint, "accessToken": "read", "exp": expires}, headers)
        else:
            siblings = [{"rfilename": path} for path in repository.commits[commit]]
            self.respond_json(
                {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "siblings": siblings}
            )

    def respond_resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(repo_id)
        commit = repository.resolve(revision) if repository else None
        blob = repository.commits[commit].get(path) if repository and commit else None
        if blob is None or commit is None:
            missing = "EntryNotFound" if commit else "RevisionNotFound" if repository else "RepoNotFound"
            self.respond_error(HTTPStatus.NOT_FOUND, missing)
            return
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.etag}"'}
        if not blob.is_lfs:
            self.send_range(blob, f'"{blob.etag}"', headers)
            return
        if blob.xet_hash:
            headers["X-Xet-Hash"] = blob.xet_hash
            headers["X-Xet-Refresh-Route"] = f"{self.hub.endpoint}/api/models/{quote(repo_id)}/xet-read-token/{commit}"
        self.respond_empty(HTTPStatus.FOUND, {**headers, "Location": self.hub.sign(blob.sha256)})

    def respond_blob(self, sha256: str, query: str) -> None:
        blob = self.hub.blob(sha256)
        if blob is None:
            self.respond_error(HTTPStatus.NOT_FOUND, "EntryNotFound")
        elif not self.hub.signature_holds(sha256, query):
            self.respond_error(HTTPStatus.FORBIDDEN, "ExpiredSignature")
        else:
            # Object stores have their own ETags, which are not the sha256 that the hub announces.
            self.send_range(blob, f'"{hashlib.md5(sha256.encode(), usedforsecurity=False).hexdigest()}"', {})

    def send_range(self, blob: Blob, etag: str, headers: dict[str, str]) -> None:
        """The whole file, or what ``Range`` asks for unless ``If-Range`` names another version."""
        start, end, status = 0, blob.size, HTTPStatus.OK
        wanted = RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted and self.headers.get("If-Range", etag) == etag:
            start = int(wanted[1])
            end = min(int(wanted[2]) + 1, blob.size) if wanted[2] else blob.size
            if start >= blob.size:
                self.respond_empty(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{blob.size}"}
                )
                return
            status = HTTPStatus.PARTIAL_CONTENT
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{blob.size}"}
        self.send_response(status)
        for name, value in {**headers, "ETag": etag, "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(blob, start, end)

    def send_body(self, blob: Blob, start: int, end: int) -> None:
        """Bytes ``start`` to ``end`` (exclusive) of the file, straight from the page cache."""
        self.hub.count("bytes", end - start)  # before a client that has them all can ask for the count
        with blob.source.open("rb") as file:
            file.seek(start)
            try:
                if end > start:
                    self.connection.sendfile(file, start, end - start)
            finally:
                self.hub.count("bytes", file.tell() - end)  # sendfile leaves the position where it got to

    def respond_json(self, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(HTTPStatus.OK)
        for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def respond_empty(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def respond_error(self, status: HTTPStatus, code: str, headers: dict[str, str] | None = None) -> None:
        self.respond_empty(status, {**(headers or {}), "X-Error-Code": code, "X-Error-Message": code})


def tree_entries(files: dict[str, Blob]) -> Iterator[dict[str, object]]:
    """A recursive listing as the hub gives it: folders, and files with size, git id and LFS sha256."""
    folders = {parent.as_posix() for path in files for parent in Path(path).parents if parent != Path()}
    for folder in sorted(folders):
        oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
        yield {"type": "directory", "path": folder, "oid": oid, "size": 0}
    for path, blob in sorted(files.items()):
        entry: dict[str, object] = {"type": "file", "path": path, "size": blob.size, "oid": blob.git_oid}
        if blob.is_lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
        if blob.xet_hash:
            entry["xetHash"] = blob.xet_hash
        yield entry
