"""A model as one file or as a set of shards, behind one interface that only exists for a sound set.

The naming and the three ``split.*`` keys are those of ``llama-gguf-split``: ``NAME-00002-of-00013.gguf`` has
``split.no`` 1 (counted from 0), ``split.count`` 13 and ``split.tensors.count``, the total over all shards. Shard 1 has
all the model's keys and may have no tensor. That tool joins swapped, foreign and cut shards without a word; here every
one of those is an error that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import GgmlType
from glm5deploy.gguf_files.header import DEFAULT_ALIGNMENT, Header, read_header
from glm5deploy.gguf_files.metadata import Metadata
from glm5deploy.gguf_files.shard_checks import check_set
from glm5deploy.gguf_files.shard_names import parse_shard_name

#: appended to the name of a shard that a merge is releasing: it may have holes
CONSUMED = ".consumed"


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor's place on disk: ``nbytes`` bytes at ``offset`` (from the file's start) of ``path``.

    ``shape`` is in GGUF's order, fastest dimension first. ``shard`` counts from 0.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    shard: int


@dataclass(frozen=True)
class ShardSet:
    """All files of one model in shard order, checked: complete, of one set, no tensor twice, no byte out of range."""

    headers: tuple[Header, ...]

    @classmethod
    def open(cls, path: Path, *, check_mix: bool = True) -> ShardSet:
        """The set that ``path`` belongs to: any of its shards, a single file, or a folder that holds exactly one set.

        ``check_mix`` also compares the shards' tensor types with each other, the only trace that a shard of another
        quantisation leaves; turn it off where the files' checksums are known. Raises :class:`FileFormatError`.
        """
        paths = find_files(path)
        first = read_header(paths[0])
        alignments = tuple(dict.fromkeys((DEFAULT_ALIGNMENT, first.alignment)))
        rest = [read_header(other, alignments=alignments) for other in paths[1:]]
        return cls.from_headers([first, *rest], check_mix=check_mix)

    @classmethod
    def from_headers(cls, headers: Sequence[Header], *, check_mix: bool = True) -> ShardSet:
        """The set of these headers, in shard order, each named by its path; for files that are not on this disk."""
        check_set(headers, check_mix=check_mix)
        return cls(tuple(headers))

    @property
    def metadata(self) -> Metadata:
        """The model's keys: those of the first shard."""
        return self.headers[0].metadata

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        return tuple(Path(header.name) for header in self.headers)

    @cached_property
    def tensors(self) -> tuple[ShardTensor, ...]:
        """Every tensor, in file order."""
        return tuple(
            ShardTensor(t.name, t.type, t.shape, path, header.data_start + t.offset, t.nbytes, index)
            for index, (path, header) in enumerate(zip(self.paths, self.headers, strict=True))
            for t in header.tensors
        )

    @cached_property
    def by_name(self) -> Mapping[str, ShardTensor]:
        return MappingProxyType({tensor.name: tensor for tensor in self.tensors})

    @property
    def file_bytes(self) -> int:
        """The files' sizes together."""
        return sum(header.file_size for header in self.headers)


def find_files(path: Path) -> tuple[Path, ...]:
    """The files of the model at ``path``, in shard order; raises :class:`FileFormatError` if any is missing."""
    if path.is_dir():
        path = _only_model(path)
    name = parse_shard_name(path.name)
    if name is None:
        if not path.is_file():
            raise FileFormatError(f"{path}: no such file", hint="name a .gguf file, a shard or a folder with one set")
        return (path,)
    siblings = tuple(path.with_name(name.sibling(number)) for number in range(1, name.count + 1))
    missing = [sibling.name for sibling in siblings if not sibling.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        hint = "`glm5deploy fetch` completes a set; shards already there are kept"
        if any(path.with_name(shard + CONSUMED).exists() for shard in missing):
            hint = "an interrupted `merge --consume` has begun to release them; the same command finishes it"
        raise FileFormatError(f"{path.parent}: {len(missing)} of {name.count} shards are missing: {shown}", hint=hint)
    return siblings


def _only_model(folder: Path) -> Path:
    sets: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        name = parse_shard_name(file.name)
        sets.setdefault(name.sibling(1) if name else file.name, file)
    if not sets:
        raise FileFormatError(f"{folder}: holds no .gguf file", hint="name the folder of one quantisation, or a shard")
    if len(sets) > 1:
        raise FileFormatError(
            f"{folder}: holds {len(sets)} models: {', '.join(list(sets)[:4])}", hint="name one of their files instead"
        )
    return next(iter(sets.values()))
