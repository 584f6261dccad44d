"""The table serves every launch, fits its files, and scratch sizes cover what launches ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5deploy.kernels import table_file, tuning, warmup
from glm5deploy.kernels.attention import split_workspace_elements
from glm5deploy.kernels.table_file import Measured
from glm5deploy.kernels.tuning import Gpu, LogitsConfig, SparseConfig, SparseRow


def gpus() -> list[Gpu]:
    return [Gpu(a, 100, tuning.family_of(a, limit)) for a, limit in tuning.SHARED_LIMIT.items()]


@pytest.mark.parametrize("of", gpus(), ids=lambda g: f"sm_{g.arch}")
def test_every_launch_has_a_row(of: Gpu) -> None:
    for packed in (False, True):
        for heads in (1, 8, 16, 17, 64, 128):
            for tokens in (1, 2, 3, 8, 64, 1000, 5000, 100_000):
                config = tuning.sparse_config(of, packed, heads, tokens)
                assert config.block_heads >= 16
    fp8 = of.arch >= tuning.FIRST_FP8_ARCH
    assert tuning.ragged_config(of, fp8).block_queries >= 1
    assert tuning.paged_config(of, fp8).block_keys % 64 == 0


@pytest.mark.parametrize(
    ("arch", "shared", "family"),
    [
        (80, 163, "sm80"),
        (87, 163, "sm80"),
        (86, 99, "small"),
        (90, 227, "sm90"),
        (103, 227, "sm90"),
        (120, 99, "small"),
    ],
)
def test_family_follows_the_shared_memory(arch: int, shared: int, family: str) -> None:
    assert tuning.family_of(arch, shared << 10) == family


def test_splits_fill_the_gpu_and_leave_each_program_a_step() -> None:
    config = SparseConfig(16, 64, 4, 2, 2)
    assert config.splits(tokens=1, heads=8, keys=2048, multiprocessors=132) == 32
    assert config.splits(tokens=64, heads=8, keys=2048, multiprocessors=132) == 4
    assert config.splits(tokens=2048, heads=8, keys=2048, multiprocessors=132) == 1
    assert config.splits(tokens=1, heads=8, keys=64, multiprocessors=132) == 1


@pytest.mark.parametrize("heads", [1, 8, 24, 64])
def test_scratch_covers_every_number_of_tokens(heads: int) -> None:
    device = torch.device("cpu")
    of = tuning.gpu(device)
    for packed in (False, True):
        held = split_workspace_elements(heads, 2048, device, packed)
        for tokens in (*range(1, 40), 100, 1000, 5000):
            splits = tuning.sparse_config(of, packed, heads, tokens).splits(tokens, heads, 2048, of.multiprocessors)
            if splits > 1:
                assert tokens * heads * splits * 513 <= held


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path that this process looks for measured rows at."""
    path = tmp_path / "kernels.json"
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(path))
    cached = (tuning.sparse_config, tuning.measured)
    for function in cached:
        function.cache_clear()
    yield path
    for function in cached:
        function.cache_clear()


MINE = Gpu(90, 132, "sm90", "NVIDIA H200")
ROW = SparseRow(("sm90",), False, 8, 4, SparseConfig(16, 128, 8, 2, 1))
RAGGED = LogitsConfig(8, 64, 8, 2, 4)


def test_measured_parameters_come_first(table: Path) -> None:
    table_file.save_table(table, MINE, Measured((ROW,), RAGGED, None, {"heads": 8}, complete=True))
    assert table_file.load_table(table, MINE) == Measured((ROW,), RAGGED, None, {"heads": 8}, True)
    assert tuning.sparse_config(MINE, False, 8, 4) == ROW.config
    assert tuning.sparse_config(MINE, False, 8, 5) != ROW.config
    assert tuning.sparse_config(MINE, True, 8, 4) != ROW.config
    assert tuning.ragged_config(MINE, True) == RAGGED
    assert tuning.paged_config(MINE, True) == tuning.PAGED_TABLE["sm90", True]


@pytest.mark.parametrize("measured", [8, 16, 64])
def test_rows_are_used_for_the_heads_they_were_measured_with_alone(table: Path, measured: int) -> None:
    table_file.save_table(table, MINE, Measured((replace(ROW, max_heads=measured),)))
    used = [
        heads for heads in (1, 4, 8, 16, 32, 33, 64, 128) if tuning.sparse_config(MINE, False, heads, 4) == ROW.config
    ]
    assert used == [measured]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Gpu(90, 132, "sm90", "NVIDIA H100"), "name NVIDIA H200, here NVIDIA H100"),
        (Gpu(90, 114, "sm90", "NVIDIA H200"), "multiprocessors 132, here 114"),
        (Gpu(89, 132, "small", "NVIDIA H200"), "arch 90, here 89; family sm90, here small"),
    ],
    ids=["name", "size", "architecture"],
)
def test_a_table_of_another_gpu_is_left_alone_with_the_reason(table: Path, other: Gpu, reason: str) -> None:
    table_file.save_table(table, MINE, Measured((ROW,), RAGGED))
    assert table_file.load_table(table, other) == Measured(refused=f"it was measured with {reason}")
    assert tuning.sparse_config(other, False, 8, 4) != ROW.config


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("triton", "3.1.0", "it was measured with triton 3.1.0, here "),
        ("kernels", "0123456789abcdef", "it was measured with kernels 0123456789abcdef, here "),
    ],
)
def test_a_table_of_another_triton_or_code_is_left_alone(table: Path, name: str, value: str, reason: str) -> None:
    table_file.save_table(table, MINE, Measured((ROW,)))
    content = json.loads(table.read_text())
    content["made_for"][name] = value
    table.write_text(json.dumps(content))
    assert table_file.load_table(table, MINE).refused.startswith(reason)
    assert tuning.sparse_config(MINE, False, 8, 4) != ROW.config


def test_a_missing_or_older_table_is_left_alone(table: Path) -> None:
    assert table_file.load_table(table, MINE).refused == "there is no such file"
    table.write_text('{"version": 1, "gpu": {}, "rows": []}')
    assert "version 1" in table_file.load_table(table, MINE).refused


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"block_keys": 128', '"block_keys": 128.0'),
        lambda text: text.replace('"block_keys"', '"block_kyes"'),
        lambda text: text.replace('"max_tokens": 4', '"max_tokens": "4"'),
        lambda text: text.replace('"packed": false', '"packed": "false"'),
        lambda text: text.replace('"packed": false', '"packed": 0'),
        lambda text: text.replace('"sm90"\n', "90\n"),
        lambda text: text.replace('"complete": false', '"complete": "no"'),
        lambda text: "[]",
        lambda text: "",
    ],
    ids=[
        "cut off",
        "not an integer",
        "another name",
        "a text",
        "a text for false",
        "0 for false",
        "a number for a family",
        "a text for no",
        "no object",
        "empty",
    ],
)
def test_a_broken_table_is_refused(table: Path, damage: Callable[[str], str]) -> None:
    table_file.save_table(table, MINE, Measured((ROW,), RAGGED))
    whole = table.read_text()
    assert damage(whole) != whole
    table.write_text(damage(whole))
    with pytest.raises(ValueError, match="delete it or measure again"):
        table_file.load_table(table, MINE)


def test_the_digest_is_of_what_launches_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source in Path(table_file.__file__).parent.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(table_file, "__file__", str(tmp_path / "table_file.py"))
    digests = []
    for name in ("reference", "tune", "tune_run", "attention", "sparse_mla", "tuning"):
        (tmp_path / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text() + "# more")
        table_file.code_digest.cache_clear()
        digests.append(table_file.code_digest())
    table_file.code_digest.cache_clear()
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(("arch", "values"), [(80, torch.bfloat16), (86, torch.bfloat16), (89, torch.float8_e4m3fn)])
def test_warm_up_uses_the_index_values_that_serving_uses(
    arch: int, values: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model's type is; a kernel warmed for another type would compile again under load."""
    used: set[torch.dtype] = set()

    def note(*tensors: torch.Tensor) -> None:
        used.update((tensors[0].dtype, tensors[1].dtype) if tensors[1].dtype != torch.uint8 else (tensors[0].dtype,))

    # The logits are watched in place of run: the interpreter has no bf16 products.
    monkeypatch.setattr(warmup, "gpu", lambda device: Gpu(arch, 4, "small"))
    monkeypatch.setattr(warmup, "ragged_logits", note)
    monkeypatch.setattr(warmup, "paged_logits", note)
    serving = warmup.Serving(2, 4, 16, 8, 32, 16, packed=True, dtype=torch.float16)
    for launch in (*warmup._queries(serving, torch.device("cpu")), *warmup._scores(serving, torch.device("cpu"))):
        launch.call()
    assert used == {values} == {tuning.index_value_dtype(Gpu(arch, 4, "small"))}
