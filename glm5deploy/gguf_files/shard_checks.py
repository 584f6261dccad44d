"""What makes several GGUF files one model: the checks behind :class:`glm5deploy.gguf_files.shards.ShardSet`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.header import ALIGNMENT_KEY, Header, TensorInfo

NO_KEY = "split.no"
COUNT_KEY = "split.count"
TENSORS_KEY = "split.tensors.count"
SPLIT_KEYS = (NO_KEY, TENSORS_KEY, COUNT_KEY)

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_FETCH_AGAIN = "fetch the whole set again from one repository and commit"
_FEWEST_COMPARED = 3
_MOST_FOREIGN = 0.6


def check_set(headers: Sequence[Header], *, check_mix: bool) -> None:
    """Raise :class:`FileFormatError` unless ``headers``, in shard order, are all the files of one model."""
    for header in headers:
        if any(key.startswith("general.split") for key in header.metadata):
            raise FileFormatError(
                f"{header.name}: uses the general.split keys of llama.cpp releases before April 2024",
                hint="merge it with the release that wrote it, or fetch a current quantisation",
            )
    if len(headers) == 1 and not headers[0].metadata.integer(COUNT_KEY, 0):
        return
    for index, header in enumerate(headers):
        _check_numbers(header, index, len(headers))
    _check_names(headers)
    _check_total(headers)
    _check_keys(headers)
    if check_mix:
        _check_types(headers)


def _check_numbers(header: Header, index: int, count: int) -> None:
    number = header.metadata.integer(NO_KEY)
    of = header.metadata.integer(COUNT_KEY)
    if of is None or number is None or TENSORS_KEY not in header.metadata:
        missing = next(key for key in SPLIT_KEYS if key not in header.metadata)
        raise FileFormatError(
            f"{header.name}: is named as shard {index + 1} of {count}, but has no {missing} key", hint=_FETCH_AGAIN
        )
    if of != count:
        raise FileFormatError(
            f"{header.name}: {COUNT_KEY} is {of}, but its name makes it one of {count}",
            hint="give the file its original name back (NAME-00001-of-000NN.gguf), or fetch the set again",
        )
    if number != index:
        raise FileFormatError(
            f"{header.name}: {NO_KEY} is {number}, but its name makes it shard {index + 1}, which has {index}: "
            "shards are swapped or copied over each other",
            hint=_FETCH_AGAIN,
        )


def _check_total(headers: Sequence[Header]) -> None:
    total = sum(len(header.tensors) for header in headers)
    for header in headers:
        said = header.metadata.integer(TENSORS_KEY)
        if said != total:
            raise FileFormatError(
                f"{header.name}: {TENSORS_KEY} is {said}, but the {len(headers)} shards hold {total} tensors",
                hint=_FETCH_AGAIN,
            )


def _check_names(headers: Sequence[Header]) -> None:
    owner: dict[str, Header] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in owner:
                raise FileFormatError(
                    f"tensor {tensor.name!r} is in {owner[tensor.name].name} and in {header.name}", hint=_FETCH_AGAIN
                )
            owner[tensor.name] = header


def _check_keys(headers: Sequence[Header]) -> None:
    """Later shards carry only ``split.*`` as a rule; a model key that contradicts shard 1 comes from another model."""
    first = headers[0].metadata
    for header in headers[1:]:
        for key in header.metadata:
            if key in SPLIT_KEYS or key == ALIGNMENT_KEY or key not in first:
                continue
            if header.metadata.raw(key) != first.raw(key):
                raise FileFormatError(
                    f"{header.name}: {key} differs from its value in {headers[0].name}: "
                    "the shards are of different models",
                    hint=_FETCH_AGAIN,
                )


def _check_types(headers: Sequence[Header]) -> None:
    """Refuse a shard of another quantisation, which has the right names, numbers and count, and the wrong types.

    Quantised sets mix types by layer, so one odd tensor means nothing. But for most kinds of tensor a shard shares its
    type with a layer in some other shard; a shard where most kinds have a type that no other shard gives them does not
    belong. The MTP block (the last one, often left at Q8_0), vectors and F32 say nothing and are left out.
    """
    where: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    blocks = {_block(t) for header in headers for t in header.tensors} - {-1}
    if any(key.endswith(".nextn_predict_layers") for key in headers[0].metadata):
        blocks -= {max(blocks, default=-1)}
    for index, header in enumerate(headers):
        for tensor in header.tensors:
            if _block(tensor) in blocks and len(tensor.shape) > 1 and tensor.type.name != "F32":
                where[_BLOCK.sub("", tensor.name)][tensor.type.name].add(index)
    for index, header in enumerate(headers):
        compared, foreign = 0, []
        for kind, shards_of in where.items():
            own = {name for name, shards in shards_of.items() if index in shards}
            elsewhere = {name for name, shards in shards_of.items() if shards - {index}}
            if not own or not elsewhere:
                continue
            compared += 1
            if not own & elsewhere:
                foreign.append(f"{kind} {'/'.join(sorted(own))} instead of {'/'.join(sorted(elsewhere))}")
        if compared >= _FEWEST_COMPARED and len(foreign) > _MOST_FOREIGN * compared:
            raise FileFormatError(
                f"{header.name}: looks like a shard of another quantisation: {'; '.join(sorted(foreign)[:3])}",
                hint=f"{_FETCH_AGAIN}; if you are sure of the files, `glm5deploy merge --from SHARD --output FILE "
                "--allow-mixed` makes one file of them",
            )


def _block(tensor: TensorInfo) -> int:
    match = _BLOCK.match(tensor.name)
    return int(match[1]) if match else -1
