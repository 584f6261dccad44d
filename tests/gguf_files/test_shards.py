from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.shard_names import parse_shard_name
from glm5deploy.gguf_files.shards import ShardSet, find_files
from tests.support.data import tiny_glm5
from tests.support.gguf_factory import (
    I32,
    STRING,
    U8,
    U16,
    U32,
    Layout,
    Model,
    Tensor,
    encode,
    small_model,
    split_pairs,
    write_split,
)

SIZES = [0, 8, 11, 11]
MODEL = small_model()


def opened(path: Path) -> ShardSet:
    return ShardSet.open(path)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        ShardSet.open(path)
    for word in words:
        assert word in caught.value.message, caught.value.message


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_split(MODEL, tmp_path / "set", SIZES)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m-00002-of-00013.gguf", ("m", 2, 13, 5)),
        ("m-00001-of-00002-00002-of-00002.gguf", ("m-00001-of-00002", 2, 2, 5)),
        ("m-0002-of-0013.gguf", ("m", 2, 13, 4)),
        ("m-00000-of-00013.gguf", None),
        ("m-00014-of-00013.gguf", None),
        ("m-2-of-3.gguf", None),
        ("m-\u0660\u0661-of-\u0660\u0662.gguf", None),
        ("m-002-of-0003.gguf", None),
        ("-00001-of-00002.gguf", None),
        ("m-00001-of-00002.gguf.part", None),
        ("m.gguf", None),
    ],
)
def test_shard_names(name: str, parts: tuple[str, int, int, int] | None) -> None:
    found = parse_shard_name(name)
    assert (found and (found.prefix, found.number, found.count, found.width)) == parts
    assert found is None or found.sibling(found.number) == name


def test_handed_sets() -> None:
    root = tiny_glm5()
    for folder, files, tensors in (("GLM-tiny-A-GGUF/UD-Q4_K_XL", 4, 112), ("GLM-tiny-B-GGUF/Q4_K_M", 3, 112)):
        found = opened(root / folder)
        assert (len(found.paths), len(found.tensors), len(found.by_name)) == (files, tensors, tensors)
        assert found.metadata["general.architecture"] == "glm-dsa"
    assert len(opened(root / "GLM-tiny-B-GGUF/GLM-tiny-B-Q8_0.gguf").paths) == 1


def test_any_way_to_name_a_set_gives_the_same(shards: list[Path]) -> None:
    sets = [opened(path) for path in (*shards, shards[0].parent)]
    assert all(s.paths == tuple(shards) and s.tensors == sets[0].tensors for s in sets)


def test_tensors_are_where_they_are_said_to_be(shards: list[Path]) -> None:
    found = opened(shards[0])
    assert [t.name for t in found.tensors] == [t.name for t in MODEL.tensors]
    for ours, theirs in zip(found.tensors, MODEL.tensors, strict=True):
        with ours.path.open("rb") as file:
            file.seek(ours.offset)
            assert file.read(ours.nbytes) == theirs.data
        assert (ours.type.name, ours.shape) == (theirs.type, theirs.shape)
    assert found.file_bytes == sum(path.stat().st_size for path in shards)


def test_symlinked_shards_of_a_cache(shards: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for number, path in enumerate(shards):
        blob = tmp_path / f"blob{number}"
        path.rename(blob)
        (cache / path.name).symlink_to(blob)
    assert len(opened(cache / shards[2].name).tensors) == len(MODEL.tensors)


def test_missing_shards_are_all_named(shards: list[Path]) -> None:
    shards[1].unlink()
    shards[3].unlink()
    refused(shards[0], "2 of 4 shards are missing", shards[1].name, shards[3].name)
    refused(shards[1], "2 of 4 shards are missing")


def test_swapped(shards: list[Path], tmp_path: Path) -> None:
    shards[1].rename(tmp_path / "x")
    shards[2].rename(shards[1])
    (tmp_path / "x").rename(shards[2])
    refused(shards[0], shards[1].name, "split.no is 2, but its name makes it shard 2, which has 1", "swapped")


def test_copied_over(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    refused(shards[0], shards[2].name, "split.no is 1", "copied over")


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_truncated(shards: list[Path], cut: int) -> None:
    unpadded = write_split(MODEL, shards[0].parent, SIZES, layouts={2: Layout(pad_last=False)})[2]
    data = unpadded.read_bytes()
    unpadded.write_bytes(data[:-cut])
    refused(shards[0], unpadded.name, f"but the file ends at {len(data) - cut}")


@pytest.mark.parametrize("size", [0, 3, 40, 200])
def test_metadata_cut(shards: list[Path], size: int) -> None:
    shards[2].write_bytes(shards[2].read_bytes()[:size])
    refused(shards[0], shards[2].name, "the file ends at")


def test_padding_cut_off_is_no_loss(shards: list[Path]) -> None:
    sound = opened(shards[0])
    write_split(MODEL, shards[0].parent, SIZES, layouts={1: Layout(pad_last=False), 3: Layout(tail=bytes(1000))})
    assert opened(shards[0]).tensors == sound.tensors


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ((("split.no", (U16, 2)), ("split.tensors.count", (I32, 30)), ("split.count", (U16, 5))), "split.count is 5"),
        ((("split.no", (U16, 3)), ("split.tensors.count", (I32, 30)), ("split.count", (U16, 4))), "split.no is 3"),
        ((("split.no", (U16, 2)), ("split.tensors.count", (I32, 31)), ("split.count", (U16, 4))), "is 31, but the 4"),
        ((("split.no", (STRING, "2")), *split_pairs(2, 4, 30)[1:]), "must be an integer, but is string"),
        ((("split.no", (U16, 2)), ("split.count", (U16, 4))), "has no split.tensors.count key"),
        ((), "has no split.no key"),
        ((("general.split", (U8, 2)), ("general.split_count", (U8, 4))), "general.split keys"),
    ],
)
def test_wrong_split_keys(shards: list[Path], pairs: tuple[object, ...], words: str) -> None:
    shards[2].write_bytes(encode(pairs, MODEL.tensors[8:19], 32))  # type: ignore[arg-type]
    refused(shards[0], shards[2].name, words)


def test_wrong_total_in_the_first_shard(shards: list[Path]) -> None:
    pairs = (*MODEL.pairs, *split_pairs(0, 4, 29))
    shards[0].write_bytes(encode(pairs, (), 32))
    refused(shards[0], shards[0].name, "split.tensors.count is 29, but the 4 shards hold 30 tensors")


def test_split_counts_of_other_integer_types_are_fine(shards: list[Path]) -> None:
    pairs = (*MODEL.pairs, ("split.no", (U32, 0)), ("split.tensors.count", (U16, 30)), ("split.count", (I32, 4)))
    shards[0].write_bytes(encode(pairs, (), 32))
    assert len(opened(shards[0]).tensors) == 30


def test_a_tensor_in_two_shards_names_both(tmp_path: Path) -> None:
    tensors = list(MODEL.tensors)
    tensors[20] = replace(tensors[20], name=tensors[3].name)
    paths = write_split(replace(MODEL, tensors=tuple(tensors)), tmp_path, SIZES)
    refused(paths[0], f"tensor {tensors[3].name!r} is in {paths[1]} and in {paths[3]}")


def test_a_shard_of_another_quantisation(shards: list[Path], tmp_path: Path) -> None:
    other = write_split(small_model(quant="Q8_0"), tmp_path / "other", SIZES)
    for number in (1, 2, 3):
        sound = shards[number].read_bytes()
        shutil.copy(other[number], shards[number])
        refused(shards[0], "looks like a shard of another quantisation", "Q8_0")
        assert len(ShardSet.open(shards[0], check_mix=False).tensors) == 30
        shards[number].write_bytes(sound)
    opened(shards[0])


def test_mixed_types_within_a_sound_set_are_fine(tmp_path: Path) -> None:
    """One tensor a shard, alternating types, an MTP block left at Q8_0, a first layer with better types."""
    model = small_model(layers=5)
    better = {"blk.4.": "Q8_0", "blk.0.attn_q_a": "Q6_K", "blk.0.ffn_up": "Q6_K"}
    model = replace(model, pairs=(*model.pairs, ("glm-dsa.nextn_predict_layers", (U32, 1))))
    tensors = tuple(
        replace(t, type=next((to for start, to in better.items() if t.name.startswith(start)), t.type))
        if len(t.shape) > 1
        else t
        for t in model.tensors
    )
    count = len(tensors)
    cuts = ([0] + [1] * count, [count - 9, 9], [1, 7, 7, count - 15], [7] * (count // 7) + [count % 7])
    for number, sizes in enumerate(cuts):
        paths = write_split(replace(model, tensors=tensors), tmp_path / str(number), sizes)
        assert len(opened(paths[0]).tensors) == count


def test_keys_of_another_model(shards: list[Path]) -> None:
    extra = {2: (("general.architecture", (STRING, "llama")),)}
    write_split(MODEL, shards[0].parent, SIZES, extra=extra)  # type: ignore[arg-type]
    refused(shards[0], shards[2].name, "general.architecture differs from its value in", shards[0].name)


def test_renamed_shards(shards: list[Path]) -> None:
    renamed = shards[0].with_name("model.gguf")
    shards[0].rename(renamed)
    refused(renamed, "split.count is 4, but its name makes it one of 1")
    refused(shards[1], "1 of 4 shards are missing")


def test_named_as_a_shard_but_not_split(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(encode(MODEL.pairs, MODEL.tensors, 32))
    assert len(opened(path).tensors) == 30
    (tmp_path / "n-00001-of-00002.gguf").write_bytes(encode(MODEL.pairs, (), 32))
    (tmp_path / "n-00002-of-00002.gguf").write_bytes(encode(MODEL.pairs, MODEL.tensors, 32))
    refused(tmp_path / "n-00001-of-00002.gguf", "is named as shard 1 of 2, but has no split.no key")


def test_shards_joined_with_cat(shards: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in shards[1:]))
    refused(joined, "another GGUF file is appended")


def test_folders(shards: list[Path], tmp_path: Path) -> None:
    refused(tmp_path, "holds no .gguf file")
    refused(tmp_path / "nothing.gguf", "no such file")
    (shards[0].parent / "other.gguf").write_bytes(encode(MODEL.pairs, MODEL.tensors, 32))
    refused(shards[0].parent, "holds 2 models", "other.gguf", shards[0].name)


def test_later_shards_without_the_alignment_key(tmp_path: Path) -> None:
    """As gguf-py writes them: laid out by the first shard's alignment, which only the first shard states."""
    for alignment in (8, 16, 64, 4096):
        for filler in range(0, 70, 6):
            model = replace(small_model(alignment=alignment), pairs=(("k", (STRING, "x" * filler)),))
            for pad in (True, False):
                paths = write_split(model, tmp_path, SIZES, layouts={1: Layout(pad_last=pad)})
                for ours, theirs in zip(opened(paths[0]).tensors, model.tensors, strict=True):
                    data = ours.path.read_bytes()[ours.offset : ours.offset + ours.nbytes]
                    assert data == theirs.data


def test_no_alignment_fits(tmp_path: Path) -> None:
    model = Model(tensors=tuple(Tensor(f"t{i}", "F32", (13,)) for i in range(4)), alignment=4096)
    paths = write_split(model, tmp_path, [0, 2, 2])
    paths[1].write_bytes(paths[1].read_bytes() + bytes(7))
    refused(paths[0], paths[1].name, "carries no general.alignment, and its size")


def test_find_files_reads_nothing(shards: list[Path]) -> None:
    for path in shards:
        path.write_bytes(b"")
    assert find_files(shards[2]) == tuple(shards)
