from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5deploy.errors import DeployError, DiskFullError, FileFormatError, UsageError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_options import MergeOptions
from glm5deploy.gguf_files.merge_plan import Plan, plan_merge
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.progress import Progress
from tests.support.data import REPOSITORY, tiny_glm5
from tests.support.gguf_factory import (
    ARRAY,
    BLOCKS,
    F32,
    I32,
    STRING,
    U8,
    U32,
    Layout,
    Model,
    Pair,
    Tensor,
    encode,
    merged_bytes,
    small_model,
    write_split,
)

SIZES = [0, 8, 11, 11]
SMALL = {"segment_bytes": 20_000, "journal_bytes": 50_000}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_split(small_model(), tmp_path / "set", SIZES)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_sums_of_llama_gguf_split(tmp_path: Path, mode: str) -> None:
    models = json.loads((tiny_glm5() / "manifest.json").read_text())["models"]
    split = {name: model for name, model in models.items() if "merged" in model}
    assert set(split) == {"GLM-tiny-A-UD-Q4_K_XL", "GLM-tiny-B-Q4_K_M"}
    for name, model in split.items():
        output = tmp_path / f"{name}.gguf"
        result = merge(tiny_glm5() / model["shards"][-1], output, MergeOptions(mode=mode))  # type: ignore[arg-type]
        assert (result.mode, result.nbytes) == (mode, model["merged"]["bytes"])
        assert sha256(output) == model["merged"]["sha256"]


names = st.from_regex(r"[a-z_.0-9]{1,20}", fullmatch=True)
values = st.one_of(
    st.tuples(st.just(U32), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(STRING), st.text(max_size=20) | st.binary(max_size=9)),
    st.tuples(st.just(ARRAY), st.tuples(st.just(STRING), st.lists(st.text(max_size=5), max_size=5))),
    st.tuples(st.just(ARRAY), st.tuples(st.just(F32), st.lists(st.floats(width=32), max_size=5))),
    st.tuples(st.just(ARRAY), st.tuples(st.just(I32), st.just([]))),
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, ...]:
    made = {}
    for name in draw(st.lists(names, min_size=1, max_size=9, unique=True)):
        kind = draw(st.sampled_from(sorted(BLOCKS)))
        row = BLOCKS[kind][1] * draw(st.integers(1, 3))
        rest = draw(st.lists(st.integers(1, 3), max_size=3))
        made[name] = Tensor(name, kind, (row, *rest))
    return tuple(made.values())


@st.composite
def sets(draw: st.DrawFn) -> tuple[Model, list[int], dict[int, Layout]]:
    pairs = draw(st.dictionaries(names.filter(lambda n: not n.startswith(("split.", "general."))), values, max_size=5))
    model = Model(tuple(pairs.items()), draw(tensors()), draw(st.sampled_from([8, 16, 32, 32, 32, 64, 4096])))
    sizes, left = [draw(st.integers(0, 1)) * 0], len(model.tensors)
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    layouts = {
        number: Layout(
            version=draw(st.sampled_from([2, 3])),
            pad_last=draw(st.booleans()),
            padding=draw(st.sampled_from([b"\0", b"\xaa"])),
        )
        for number in range(len(sizes))
    }
    return model, sizes, layouts


@settings(max_examples=60, deadline=None)
@given(sets(), st.sampled_from([{}, {"mode": "direct"}, {"verify": True}, {"threads": 3, **SMALL}]))
def test_split_then_merge(made: tuple[Model, list[int], dict[int, Layout]], options: dict[str, object]) -> None:
    """The bytes are right, and gguf-py, which knows nothing of ours, finds every tensor and key of the model."""
    model, sizes, layouts = made
    with tempfile.TemporaryDirectory() as name:
        paths = write_split(model, Path(name), sizes, layouts=layouts)
        output = Path(name) / "out.gguf"
        merge(paths[-1], output, MergeOptions(**options))  # type: ignore[arg-type]
        assert output.read_bytes() == merged_bytes(model)
        assert sorted(p.name for p in Path(name).iterdir()) == sorted([*(p.name for p in paths), "out.gguf"])
        reader = gguf.GGUFReader(output)
        assert [t.name for t in reader.tensors] == [t.name for t in model.tensors]
        for theirs, ours in zip(reader.tensors, model.tensors, strict=True):
            assert theirs.data.tobytes() == ours.data
        assert [k for k in reader.fields if not k.startswith("GGUF.")] == [
            *(k for k, _ in model.all_pairs()),
            "split.no",
            "split.tensors.count",
            "split.count",
        ]


def test_alignments_and_header_lengths(tmp_path: Path) -> None:
    """64 header lengths each: where the reference tool shifts every tensor by 32 bytes without a word."""
    for alignment in (16, 32, 64, 4096):
        for filler in range(64):
            pairs: tuple[Pair, ...] = (("filler", (STRING, "x" * filler)),)
            model = Model(pairs, tuple(Tensor(f"t{i}", "F32", (16 * i + 16,)) for i in range(3)), alignment)
            paths = write_split(model, tmp_path, [1, 2])
            plan = plan_merge(ShardSet.open(paths[0]))
            expected = merged_bytes(model)
            assert (plan.size, plan.header) == (len(expected), expected[: len(plan.header)])
            for name, copy in plan.tensors.items():
                data = next(t.data for t in model.tensors if t.name == name)
                assert expected[copy.offset : copy.offset + copy.length] == data


def test_strings_with_nul_and_keys_of_later_shards_survive(tmp_path: Path) -> None:
    model = Model(
        (("vocabulary", (ARRAY, (STRING, ["a\0b", "\0"]))), ("text", (STRING, "x\0y"))), small_model().tensors
    )
    late: tuple[Pair, ...] = (("late.key", (U8, 7)), ("text", (STRING, "x\0y")))
    paths = write_split(model, tmp_path, SIZES, extra={2: late})
    merge(paths[0], tmp_path / "out.gguf")
    metadata = ShardSet.open(tmp_path / "out.gguf").metadata
    assert metadata["vocabulary"] == ("a\0b", "\0")
    assert (metadata["text"], metadata["late.key"], metadata["split.count"]) == ("x\0y", 7, 0)
    assert list(metadata) == ["vocabulary", "text", "split.no", "split.tensors.count", "late.key", "split.count"]


def test_gaps_and_tensors_out_of_order_are_laid_out_anew(tmp_path: Path) -> None:
    model = Model(tensors=tuple(Tensor(f"t{i}", "F32", (8,)) for i in range(4)))
    paths = write_split(model, tmp_path, [0, 4])
    data = paths[1].read_bytes()[:-128]
    shuffled = (
        b"".join(model.tensors[i].data for i in (2, 0)) + bytes(64) + b"".join(model.tensors[i].data for i in (3, 1))
    )
    offsets = {"t2": 0, "t0": 32, "t3": 128, "t1": 160}
    head = write_split(model, tmp_path, [0, 4], layouts={1: Layout(offsets=offsets)})[1].read_bytes()[:-128]
    assert len(head) == len(data)
    paths[1].write_bytes(head + shuffled)
    merge(paths[0], tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == merged_bytes(model)


def test_one_run_a_shard(shards: list[Path]) -> None:
    plan = plan_merge(ShardSet.open(shards[0]))
    assert [copy.source for copy in plan.copies] == [1, 2, 3]
    again = Plan.restore(json.loads(json.dumps(plan.describe())), plan.header)
    assert again == plan
    assert again.digest == plan.digest
    assert replace(plan, zeros=plan.zeros[1:]).digest != plan.digest


def test_verify_gives_every_tensor_s_sum(shards: list[Path], tmp_path: Path) -> None:
    result = merge(shards[0], tmp_path / "out.gguf", MergeOptions(verify=True))
    assert result.sha256 == {t.name: hashlib.sha256(t.data).hexdigest() for t in small_model().tensors}


def test_a_finished_merge_is_not_repeated_and_another_file_not_replaced(shards: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    assert merge(shards[0], output).copied > 0
    written = output.stat()
    again = merge(shards[0], output)
    assert (again.mode, again.copied, output.stat().st_mtime_ns) == ("none", 0, written.st_mtime_ns)
    assert merge(shards[0], output, MergeOptions(existing="redo")).copied > 0
    output.write_bytes(b"something else")
    with pytest.raises(UsageError, match="exists and is not the merge of these shards"):
        merge(shards[0], output)
    assert output.read_bytes() == b"something else"
    assert merge(shards[0], output, MergeOptions(existing="replace")).copied > 0
    assert output.read_bytes() == merged_bytes(small_model())


def test_a_changed_shard_makes_the_merge_stale(shards: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    merge(shards[0], output)
    os.utime(shards[2])
    with pytest.raises(UsageError, match="is not the merge of these shards"):
        merge(shards[0], output)


def test_outputs_that_are_refused(shards: list[Path], tmp_path: Path) -> None:
    before = {path: sha256(path) for path in shards}
    (tmp_path / "hard.gguf").hardlink_to(shards[1])
    (tmp_path / "soft.gguf").symlink_to(shards[2])
    (tmp_path / "out.gguf.partial").symlink_to(shards[2])
    for output, words in (
        (shards[1], "is named like a shard"),
        (tmp_path / "new-00002-of-00004.gguf", "is named like a shard"),
        (tmp_path / "hard.gguf", "is the shard"),
        (tmp_path / "soft.gguf", "is the shard"),
        (tmp_path / "out.gguf", "out.gguf.partial: is the shard"),
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "out.gguf", "no such folder"),
    ):
        for existing in ("refuse", "redo"):
            with pytest.raises(UsageError, match=words):
                merge(shards[0], output, MergeOptions(existing=existing))  # type: ignore[arg-type]
    assert {path: sha256(path) for path in shards} == before


def test_a_shard_cut_while_it_is_copied(shards: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    size = shards[3].stat().st_size

    def cut(event: str) -> None:
        if event == "begun":
            os.truncate(shards[3], size - 20_001)

    for mode in ("buffered", "direct"):
        options = MergeOptions(mode=mode, **SMALL)  # type: ignore[arg-type]
        with pytest.raises(FileFormatError, match=rf"{shards[3].name}: at offset {size - 20_001}: the file ends"):
            merge(shards[0], output, options, checkpoint=cut)
        assert not output.exists()
        write_split(small_model(), shards[0].parent, SIZES)
    assert merge(shards[0], output).resumed_at == 0, "the shards are not those of the interrupted merge"
    assert output.read_bytes() == merged_bytes(small_model())


def test_two_merges_into_one_file(shards: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"

    def second(event: str) -> None:
        if event == "begun":
            with pytest.raises(DeployError, match="another merge is writing this file"):
                merge(shards[0], output)

    merge(shards[0], output, checkpoint=second)
    assert output.read_bytes() == merged_bytes(small_model())


def test_interrupted_by_the_user(shards: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"

    def interrupt(event: str) -> None:
        if event.startswith("recorded"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(shards[0], output, MergeOptions(**SMALL), checkpoint=interrupt)  # type: ignore[arg-type]
    assert not output.exists()
    result = merge(shards[0], output, MergeOptions(**SMALL))  # type: ignore[arg-type]
    assert 0 < result.resumed_at < result.nbytes
    assert output.read_bytes() == merged_bytes(small_model())


def test_progress_reaches_the_end(shards: list[Path], tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = merge(shards[0], tmp_path / "out.gguf", MergeOptions(**SMALL), progress=seen.append)  # type: ignore[arg-type]
    assert {(p.task, p.total, p.unit) for p in seen} == {("out.gguf", result.nbytes, "bytes")}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done >= result.nbytes - 32


def test_no_room(shards: list[Path], tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: reserving fails before anything is copied, and leaves nothing."""
    size = len(merged_bytes(small_model()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="the merged file needs"):
            merge(shards[0], tmp_path / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out.gguf").exists()
    merge(shards[0], tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == merged_bytes(small_model())


@pytest.mark.parametrize("chunk", [1, 4095, 4097, -4096, 32 << 20])
def test_odd_chunks_are_refused(chunk: int) -> None:
    with pytest.raises(UsageError, match="is not possible"):
        MergeOptions(chunk_bytes=chunk)


def test_memory_stays_small(tmp_path: Path) -> None:
    """Tensors of 300 MB in holes under a vocabulary of GLM-5's size: peak memory is the header and the buffers."""
    words: tuple[Pair, ...] = (
        ("tokens", (ARRAY, (STRING, [f"token{i}" for i in range(154_880)]))),
        ("merges", (ARRAY, (STRING, [f"ab{i} cd{i}" for i in range(321_649)]))),
    )
    big = Model(words, (Tensor("a", "F32", (8,)), Tensor("b", "F32", (8,))))
    count = 75_000_000
    layout = Layout(dimensions={"a": (count,), "b": (count,)})
    for mode in ("buffered", "direct"):
        paths = write_split(big, tmp_path, [1, 1], layouts={0: layout, 1: layout})
        for path in paths:
            os.truncate(path, path.stat().st_size + 4 * count)
        script = (
            "import sys, pathlib; from glm5deploy.gguf_files.copy import merge\n"
            "from glm5deploy.gguf_files.merge_options import MergeOptions\n"
            "merge(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), MergeOptions(mode=sys.argv[3]))\n"
            "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])\n"
        )
        output = tmp_path / "out.gguf"
        command = [sys.executable, "-c", script, str(paths[0]), str(output), mode]
        printed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        assert int(printed) < 100 * 1024, "KiB"
        output.unlink()


def test_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(encode(small_model().pairs, small_model().tensors, 32))
    with pytest.raises(UsageError, match="is a single file already"):
        merge(path, tmp_path / "out.gguf")
