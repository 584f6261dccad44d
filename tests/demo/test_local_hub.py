"""The demo's hub, seen by the real huggingface_hub client."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from glm5deploy.demo.local_hub import LocalHub

REPO = "owner/model-GGUF"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "files"
    (root / "Q4").mkdir(parents=True)
    (root / "README.md").write_text("a model\n")
    (root / "Q4" / "m-00001-of-00002.gguf").write_bytes(os.urandom(50_000))
    (root / "Q4" / "m-00002-of-00002.gguf").write_bytes(os.urandom(30_001))
    return root


@pytest.fixture
def hub(folder: Path) -> Iterator[LocalHub]:
    with LocalHub(page_size=2) as hub:
        hub.publish(REPO, folder)
        yield hub


def test_info_and_listing(hub: LocalHub, folder: Path) -> None:
    api = HfApi(endpoint=hub.endpoint)
    commit = api.model_info(REPO).sha
    assert commit == hub.repositories[REPO].refs["main"]
    assert len(commit) == 40
    files = {e.path: e for e in api.list_repo_tree(REPO, recursive=True, revision=commit) if hasattr(e, "size")}
    assert sorted(files) == ["Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf", "README.md"]
    for path, entry in files.items():
        content = (folder / path).read_bytes()
        assert entry.size == len(content)
        assert entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        assert (entry.lfs.sha256 if entry.lfs else None) == (
            None if path == "README.md" else hashlib.sha256(content).hexdigest()
        )


def test_large_file_redirects_to_another_origin(hub: LocalHub, folder: Path) -> None:
    url = hf_hub_url(REPO, "Q4/m-00001-of-00002.gguf", revision="main", endpoint=hub.endpoint)
    metadata = get_hf_file_metadata(url)
    content = (folder / "Q4" / "m-00001-of-00002.gguf").read_bytes()
    assert metadata.commit_hash == hub.repositories[REPO].refs["main"]
    assert metadata.size == len(content)
    assert metadata.etag == hashlib.sha256(content).hexdigest()
    assert metadata.location.startswith(hub.storage + "/")
    assert httpx.get(metadata.location).content == content


def test_download_of_single_files_and_of_a_snapshot(hub: LocalHub, folder: Path, tmp_path: Path) -> None:
    file = hf_hub_download(REPO, "README.md", local_dir=tmp_path / "one", endpoint=hub.endpoint)
    assert Path(file).read_text() == "a model\n"
    root = Path(snapshot_download(REPO, local_dir=tmp_path / "all", endpoint=hub.endpoint))
    for path in ("README.md", "Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf"):
        assert (root / path).read_bytes() == (folder / path).read_bytes()


@pytest.mark.parametrize(
    ("range_", "if_range", "status", "span"),
    [
        ("bytes=100-", None, 206, (100, 50_000)),
        ("bytes=100-199", None, 206, (100, 200)),
        ("bytes=49999-70000", None, 206, (49_999, 50_000)),
        ("bytes=100-", '"another"', 200, (0, 50_000)),
        ("bytes=50000-", None, 416, None),
    ],
)
def test_ranges(
    hub: LocalHub, folder: Path, range_: str, if_range: str | None, status: int, span: tuple[int, int] | None
) -> None:
    content = (folder / "Q4" / "m-00001-of-00002.gguf").read_bytes()
    headers = {"Range": range_} | ({"If-Range": if_range} if if_range else {})
    answer = httpx.get(hub.sign(hashlib.sha256(content).hexdigest()), headers=headers)
    assert answer.status_code == status
    if span is None:
        assert answer.headers["Content-Range"] == "bytes */50000"
    else:
        assert answer.content == content[slice(*span)]


def test_signed_urls_expire_and_cannot_be_made_up(hub: LocalHub, folder: Path) -> None:
    sha256 = hashlib.sha256((folder / "Q4" / "m-00001-of-00002.gguf").read_bytes()).hexdigest()
    assert httpx.get(f"{hub.storage}/blobs/{sha256}").status_code == 403
    hub.url_lifetime = -1
    assert httpx.get(hub.sign(sha256)).status_code == 403


def test_what_does_not_exist(hub: LocalHub) -> None:
    api = HfApi(endpoint=hub.endpoint)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("owner/other")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        get_hf_file_metadata(hf_hub_url(REPO, "none.gguf", endpoint=hub.endpoint))


def test_private_repositories_need_the_token(folder: Path) -> None:
    with LocalHub(token="hf_secret") as hub:
        hub.publish(REPO, folder)
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.endpoint, token=False).model_info(REPO)
        assert HfApi(endpoint=hub.endpoint, token="hf_secret").model_info(REPO).sha


def test_a_moved_branch_keeps_old_commits_reachable(hub: LocalHub, folder: Path) -> None:
    api = HfApi(endpoint=hub.endpoint)
    old = api.model_info(REPO).sha
    (folder / "README.md").write_text("another model\n")
    new = hub.publish(REPO, folder)
    assert new != old
    assert api.model_info(REPO).sha == new
    assert api.model_info(REPO, revision=old).sha == old


def test_as_a_program(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "served" / "owner" / "model"
    target.parent.mkdir(parents=True)
    folder.rename(target)
    command = [sys.executable, "-m", "glm5deploy.demo.local_hub", str(tmp_path / "served")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip().removeprefix("HF_ENDPOINT=")
        assert HfApi(endpoint=endpoint).model_info("owner/model").sha
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) != 0
