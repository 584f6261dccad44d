"""Asking the hub: revision → commit, what a commit holds, and where a file's bytes are to be had."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from glm5deploy.errors import HubError
from glm5deploy.hub.choice import RemoteFile, checked_file
from glm5deploy.hub.faults import Policy, TransferFault, retry_after

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TIMEOUT = 30.0
_ATTEMPTS = 4
T = TypeVar("T")
_TRUE = {"1", "ON", "YES", "TRUE"}
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file's bytes are. ``headers`` may hold the token and go to this URL's own origin only."""

    url: str
    headers: dict[str, str] = field(repr=False)
    xet_hash: str | None = None
    xet_refresh: str | None = None


class Hub:
    """A hub as HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE (read when this is made) describe it.

    Proxies are the HTTP libraries' business: both honour HTTP_PROXY, HTTPS_PROXY and NO_PROXY.
    """

    def __init__(self, *, endpoint: str | None = None, token: str | None = None, offline: bool = False) -> None:
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.offline = offline or any(
            os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        )
        self._given_token = token

    @property
    def token(self) -> str | None:
        """The token given here, else HF_TOKEN, else the one that ``hf auth login`` stored."""
        from huggingface_hub import get_token

        return self._given_token or get_token()

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        if self.offline:
            raise HubError(
                "the hub was not asked: working offline",
                hint="unset HF_HUB_OFFLINE and leave out --local-files-only to download",
            )
        return HfApi(endpoint=self.endpoint, token=self.token or False)

    def commit_of(self, repo: str, revision: str) -> str:
        """The 40 hex digits that a branch, tag or commit stands for now."""
        api, what = self._api(), f"{repo}@{revision}"
        commit = _patiently(what, lambda: api.model_info(repo, revision=revision, timeout=_TIMEOUT).sha)
        if not isinstance(commit, str) or len(commit) != 40 or set(commit) - set("0123456789abcdef"):
            raise HubError(f"{without_query(self.endpoint)} gave no commit for {repo}@{revision}: {commit!r}")
        return commit

    def files_of(self, repo: str, commit: str) -> list[RemoteFile]:
        """All files of a commit, with checked paths.

        :raises HubError: unreachable, refused, or a listing that names a path twice or outside the repository.
        """
        api, what = self._api(), f"{repo}@{commit[:12]}"
        entries = _patiently(what, lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)))
        files = [_remote_file(entry) for entry in entries if hasattr(entry, "blob_id")]
        if len({file.path for file in files}) != len(files):
            raise HubError(f"{repo}@{commit[:12]}: the listing names the same file twice")
        return files

    def locate(self, repo: str, commit: str, file: RemoteFile) -> Location:
        """Resolve a file of exactly this commit; a signed URL in the answer lives for minutes only.

        :raises TransferFault: an answer that is worth asking again (429, 5xx, a broken connection).
        :raises HubError: refused, or the hub contradicts its own listing.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        self._api()  # refuses when offline
        what = f"{repo}@{commit[:12]}/{file.path}"
        url = hf_hub_url(repo, file.path, revision=commit, endpoint=self.endpoint)
        with _translated(what):
            found = get_hf_file_metadata(url, token=self.token or False, timeout=_TIMEOUT, endpoint=self.endpoint)
        if found.commit_hash is not None and found.commit_hash != commit:
            raise HubError(f"{what}: the hub answered with commit {found.commit_hash[:12]}", hint="run fetch again")
        expected = file.sha256 or file.git_oid
        if found.etag is not None and len(found.etag) == len(expected) and found.etag != expected:
            raise HubError(
                f"{what}: the hub offers content {found.etag[:12]}, its listing said {expected[:12]}",
                hint="list again with --refresh",
            )
        if found.size is not None and found.size != file.size:
            raise HubError(
                f"{what}: the hub offers {found.size} bytes, its listing said {file.size}",
                hint="list again with --refresh",
            )
        own = same_origin(found.location, self.endpoint)
        headers = {"Authorization": f"Bearer {self.token}"} if own and self.token else {}
        xet = found.xet_file_data
        return Location(found.location, headers, xet.file_hash if xet else None, xet.refresh_route if xet else None)


def same_origin(url: str, other: str) -> bool:
    """Scheme, host and port agree: the condition for sending the token."""
    ports = {"http": 80, "https": 443}
    a, b = urlsplit(url), urlsplit(other)
    return (a.scheme, a.hostname, a.port or ports.get(a.scheme)) == (
        b.scheme,
        b.hostname,
        b.port or ports.get(b.scheme),
    )


def without_query(url: str) -> str:
    """A URL that may be shown: what follows ``?`` is a signature, what stands before ``@`` a password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _remote_file(entry: Any) -> RemoteFile:
    size, sha256 = (entry.lfs.size, entry.lfs.sha256) if entry.lfs else (entry.size, None)
    return checked_file(entry.path, size, entry.blob_id, sha256, getattr(entry, "xet_hash", None))


def _patiently(what: str, call: Callable[[], T]) -> T:
    """Ask a few times before giving up on an overloaded or unreachable hub."""
    policy = Policy()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _translated(what):
                return call()
        except TransferFault as fault:
            if attempt == _ATTEMPTS:
                hint = "check the connection, HF_ENDPOINT and the proxy settings, or try again later"
                raise HubError(f"{what}: {fault.reason}", hint=hint) from fault
            time.sleep(policy.wait_after(attempt) if fault.wait is None else fault.wait)
    raise AssertionError("unreachable")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The client library's errors as ours; those worth another attempt as :class:`TransferFault`."""
    import httpx
    from huggingface_hub import errors

    # huggingface_hub 1.x speaks through httpx, 2.x through httpx2, a successor with the same names.
    modules = [httpx]
    try:
        import httpx2

        modules.append(httpx2)
    except ImportError:
        pass
    network = tuple(module.TransportError for module in modules)
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{what} is gated", hint="accept its terms on the hub's page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{what} does not exist or is private", hint="check the name; set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what}: no such revision", hint="choose a branch, tag or commit with --revision") from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{what}: no such file at this commit", hint="list again with --refresh") from error
    except errors.HFValidationError as error:
        raise HubError(f"{what} is not a repository's name", hint="it has the form owner/name") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError("the hub was not asked: HF_HUB_OFFLINE is set", hint="unset it to download") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in _RETRIED:
            raise TransferFault(f"the hub answered {status}", wait=retry_after(error.response.headers)) from error
        hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later"
        raise HubError(f"{what}: the hub answered {status}", hint=hint) from error
    except network as error:
        raise TransferFault(f"the hub cannot be reached ({type(error).__name__})") from error
