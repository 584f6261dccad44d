"""The table serves every launch, fits its files, and scratch sizes cover what launches ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5deploy.kernels import tuning, warmup
from glm5deploy.kernels.attention import split_workspace_elements
from glm5deploy.kernels.tuning import Gpu, SparseConfig, SparseRow


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


def test_a_measured_table_comes_first_and_only_on_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = Gpu(90, 132, "sm90"), Gpu(89, 142, "small")
    row = SparseRow(("sm90",), False, 16, 4, SparseConfig(16, 128, 8, 2, 1))
    path = tmp_path / "kernels.json"
    tuning.save_table(path, mine, [row])
    assert tuning.load_table(path, mine) == (row,)
    assert tuning.load_table(path, other) == ()
    assert tuning.load_table(tmp_path / "missing.json", mine) == ()
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(path))
    for cached in (tuning.sparse_config, tuning._measured):
        cached.cache_clear()
    try:
        assert tuning.sparse_config(mine, False, 8, 4) == row.config
        assert tuning.sparse_config(mine, False, 8, 5) != row.config
    finally:
        for cached in (tuning.sparse_config, tuning._measured):
            cached.cache_clear()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2}', '{"version": 1, "gpu": {"arch": 90, "multiprocessors": 1, "family": "sm90"}}']
)
def test_a_broken_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it or measure again"):
        tuning.load_table(path, Gpu(90, 1, "sm90"))


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
    warmup._warm_indexer(serving, torch.device("cpu"))
    assert used == {values} == {tuning.index_value_dtype(Gpu(arch, 4, "small"))}
