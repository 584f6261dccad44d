"""A model's headers, wherever it is: files on this disk, a model folder, or a hub's repository by byte ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5deploy.errors import UsageError
from glm5deploy.gguf_files.header import DEFAULT_ALIGNMENT, Header, parse_header
from glm5deploy.gguf_files.shards import ShardSet

_FOLDER_MANIFEST = "glm5_gguf.json"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """``source`` is what people know it by; ``commit`` is "" for files on this disk. ``largest_file`` in bytes."""

    source: str
    commit: str
    quant: str
    shards: ShardSet
    remote: bool

    @property
    def largest_file(self) -> int:
        return max(header.file_size for header in self.shards.headers)


def open_headers(target: str, revision: str = "main") -> FoundModel:
    """``REPO[:QUANT]``, a GGUF file or shard, a folder with one set, or a model folder. Downloads headers only.

    A path that exists is taken as a path. Raises UsageError, HubError or FileFormatError.
    """
    path = Path(target).expanduser()
    if path.exists():
        shards = ShardSet.open(_weights_of(path))
        return FoundModel(str(path), "", _quant_of(shards), shards, remote=False)
    repo, _, quant = target.partition(":")
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")) or repo.endswith((".gguf", "/")):
        raise UsageError(
            f"{target}: no such file or folder, and not a repository's name",
            hint="give owner/name:QUANT, as in unsloth/GLM-5.2-GGUF:UD-Q4_K_XL, or a path",
        )
    return _remote(repo, quant, revision)


def _remote(repo: str, quant: str, revision: str) -> FoundModel:
    from glm5deploy.hub.choice import choose_set, group_sets
    from glm5deploy.hub.client import Hub
    from glm5deploy.hub.faults import Policy
    from glm5deploy.hub.ranges import HttpsSource, RemoteReader

    hub = Hub()
    commit = hub.commit_of(repo, revision)
    chosen = choose_set(group_sets(hub.files_of(repo, commit)), quant, repo)
    headers: list[Header] = []
    with HttpsSource(hub, repo, commit, Policy()) as source:
        for file in chosen.files:
            # Shards that gguf-py wrote carry no alignment of their own; the first shard's is the model's.
            alignments = (DEFAULT_ALIGNMENT, *{header.alignment for header in headers[:1]} - {DEFAULT_ALIGNMENT})
            reader = RemoteReader(source, file)
            headers.append(parse_header(reader.read_at, file.size, file.path, alignments=alignments))
    # One commit is one set: whatever mix of types it has was meant.
    shards = ShardSet.from_headers(headers, check_mix=False)
    return FoundModel(f"{repo}:{chosen.label}", commit, chosen.label, shards, remote=True)


def _weights_of(path: Path) -> Path:
    """A model folder stands for the files that it names."""
    manifest = path / _FOLDER_MANIFEST
    if not manifest.is_file():
        return path
    from glm5deploy.server.model_facts import read_model_facts

    return read_model_facts(path).weight_files[0][0]


def _quant_of(shards: ShardSet) -> str:
    """The label in the file's name, as far as it has one."""
    from glm5deploy.gguf_files.shard_names import parse_shard_name
    from glm5deploy.hub.names import quant_label

    first = shards.paths[0]
    name = parse_shard_name(first.name)
    return quant_label(name.prefix if name else first.stem) or quant_label(first.parent.name) or ""
