"""Ranks' parts of a file: the right bytes in the right planes, each taken once, and no more of the file than that."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.tensor_names import TensorPlan, plan_tensors
from glm5deploy.quants.planes import Planes, empty_planes, repack
from glm5deploy.quants.reference import dequantize_planes
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin import rank_files, weights
from glm5deploy.vllm_plugin.device_memory import without_limit
from glm5deploy.vllm_plugin.loader import main_placements
from glm5deploy.vllm_plugin.model_files import ModelFiles
from glm5deploy.vllm_plugin.quantised_linear import Glm5LinearMethod, share
from glm5deploy.vllm_plugin.quantised_loading import left_over
from glm5deploy.vllm_plugin.quantised_modules import Module, quantised_modules
from glm5deploy.vllm_plugin.rank_files import Files
from glm5deploy.vllm_plugin.rank_reader import Progress, Reader
from glm5deploy.vllm_plugin.slabs import Piece, Slab, Source, pieces
from tests.quants.blocks import QUANTISED, random_rows
from tests.support.glm_catalogue import real_metadata, real_tensors
from tests.vllm_plugin.conftest import Run
from tests.vllm_plugin.test_quantised import Rank, expert_layer


def stored(path: Path, name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray) -> ShardTensor:
    """Append a tensor's bytes to a file."""
    with path.open("ab") as file:
        offset = file.tell()
        file.write(raw.tobytes())
    return ShardTensor(name, TYPES_BY_NAME[kind], shape, path, offset, raw.nbytes, 0)


def random_tensor(path: Path, kind: str, columns: int, rows: int, experts: int = 1, seed: int = 1) -> ShardTensor:
    if kind == "IQ1_S":
        raw = np.random.default_rng(seed).integers(0, 255, (rows * experts, columns // 256, 50), dtype=np.uint8)
        raw[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    else:
        raw = random_rows(kind, rows * experts, columns, seed).numpy()
    shape = (columns, rows) if experts == 1 else (columns, rows, experts)
    return stored(path, f"{kind}.{seed}", kind, shape, raw)


def numbers(tensor: ShardTensor) -> torch.Tensor:
    """A tensor's values by gguf-py, fp32 [experts, rows, columns]."""
    raw = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    rows = math.prod(tensor.shape[1:])
    values = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(tensor.type.id))
    return torch.from_numpy(values).view(-1, tensor.shape[1], tensor.shape[0])


def filled(slab: Slab, piece: int) -> torch.Tensor:
    Reader(torch.device("cpu"), most=piece).fill([slab])
    return dequantize_planes(slab.target)


@pytest.mark.parametrize("kind", QUANTISED)
def test_planes_of_a_slice_are_the_slice_of_planes(kind: str, tmp_path: Path) -> None:
    """Rows, columns and experts cut at once, read in pieces, against gguf-py's values of the whole tensor."""
    tensor = random_tensor(tmp_path / "w", kind, 1024, 24, 5)
    target = empty_planes(kind, 8, 512, 2)
    slab = Slab(Source(tensor, "w", 24, 5), target, (4, 1), range(8, 16), range(512, 1024))
    for piece in (3 * 512, 1 << 20):
        for plane in target.tensors:
            plane.fill_(1)
        assert torch.equal(filled(slab, piece), numbers(tensor)[[4, 1], 8:16, 512:])
    raw = np.fromfile(tensor.path, np.uint8).reshape(5, 24, -1)[[4, 1], 8:16]
    width = raw.shape[2] // 2
    expected = repack(kind, torch.from_numpy(raw[:, :, width:].copy()))
    assert all(torch.equal(a, b) for a, b in zip(target.tensors, expected.tensors, strict=True))


def test_neighbouring_experts_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones alone: part of every expert's rows is not one part of the file."""
    tensor = random_tensor(tmp_path / "w", "Q4_K", 256, 6, 9)
    reads: list[int] = []
    read, experts = rank_files._read, (2, 3, 4, 0, 8, 7)

    def counted(file: FileIO, out: np.ndarray, offset: int) -> None:
        reads.append(out.size)
        read(file, out, offset)

    monkeypatch.setattr(rank_files, "_read", counted)
    for rows, expected in ((range(6), [3, 1, 1, 1]), (range(1, 6), [1] * 6)):
        reads.clear()
        target = empty_planes("Q4_K", len(rows), 256, 6)
        slab = Slab(Source(tensor, "w", 6, 9), target, experts, rows, range(256))
        assert torch.equal(filled(slab, 1 << 20), numbers(tensor)[list(experts)][:, rows.start :])
        assert reads == [count * len(rows) * 144 for count in expected]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "IQ1_S"])
def test_what_no_kernel_reads_becomes_bf16(kind: str, tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path / "w", kind, 512, 6, 3)
    source = Source(tensor, "w", 6, 3)
    assert source.dense
    target = empty_planes(source.planes_type, 6, 256, 3)
    slab = Slab(source, target, range(3), range(6), range(256, 512))
    assert torch.equal(filled(slab, 1000), numbers(tensor)[:, :, 256:].to(torch.bfloat16).float())


def test_gate_and_up_stacked_in_one_tensor(tmp_path: Path) -> None:
    """Rows of gate, then of up, within each expert; the second of two ranks."""
    tensor = random_tensor(tmp_path / "w", "Q4_K", 256, 16, 3)
    for first in (0, 8):
        target = empty_planes("Q4_K", 4, 256, 3)
        slab = Slab(Source(tensor, "w", 8, 3, first, 16), target, range(3), range(4, 8), range(256))
        assert torch.equal(filled(slab, 1 << 20), numbers(tensor)[:, first + 4 : first + 8])


def test_rows_that_only_pad_are_zero(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path / "w", "Q6_K", 256, 10)
    target = empty_planes("Q6_K", 16, 256)
    for plane in target.tensors:
        plane.fill_(3)
    found = filled(Slab(Source(tensor, "w", 10), target, (0,), range(10), range(256)), 1000)[0]
    assert torch.equal(found[:10], numbers(tensor)[0])
    assert not found[10:].any()


def test_a_cut_inside_a_block_is_refused(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path / "w", "Q4_K", 512, 2)
    with pytest.raises(FileFormatError, match="columns 0 to 128 cut a block of 256 Q4_K") as e:
        Slab(Source(tensor, "w", 2), empty_planes("Q4_K", 2, 128), (0,), range(2), range(128))
    assert "--enable-expert-parallel" in str(e.value.hint)
    with pytest.raises(DeployError, match="512 cannot be dealt out in parts of 200"):
        share(Source(tensor, "w", 2), 512, 200, 0)


def test_a_reader_that_fails_says_so(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path / "w", "Q4_K", 256, 2)
    beyond = ShardTensor("w", tensor.type, (256, 2), tensor.path, tensor.offset + 200, tensor.nbytes, 0)
    with pytest.raises(FileFormatError, match="ends inside of w"):
        filled(Slab(Source(beyond, "w", 2), empty_planes("Q4_K", 2, 256), (0,), range(2), range(256)), 1000)


def test_a_file_that_is_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path / "w", "Q4_K", 256, 40)
    slab = Slab(Source(tensor, "w", 40), empty_planes("Q4_K", 40, 256), (0,), range(40), range(256))
    (piece,) = pieces(slab, 1 << 20)
    files = Files()
    files.open([tensor.path])
    os.truncate(tensor.path, tensor.nbytes // 2)
    with pytest.raises(FileFormatError, match="became shorter"):
        files.copy(piece, np.empty(piece.shape, np.uint8))


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "IQ4_XS", "Q3_K"), ("Q8_0", "BF16", "IQ1_S")])
def test_experts_of_three_types(types: tuple[str, str, str], tmp_path: Path) -> None:
    """Gate, up and down of different types and a rank in the middle, against products of gguf-py's numbers."""
    gate, up, down = (
        random_tensor(tmp_path / "w", kind, columns, rows, 4, seed)
        for seed, (kind, columns, rows) in enumerate(zip(types, (256, 256, 512), (512, 512, 256), strict=True))
    )
    parts = tuple(Source(tensor, tensor.name, tensor.shape[1], 4) for tensor in (gate, up, down))
    layer = expert_layer(Module("experts", parts), 4, [0, 1, 2, 3], (1, 2))
    Reader(torch.device("cpu")).fill(list(layer.quant_method.slabs(layer)))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    ids, shares = torch.tensor([[0, 3], [2, 1], [3, 2]]), torch.tensor([[0.5, 1.5], [1.0, 0.25], [2.0, 1.0]])
    w1, w3, w2 = (numbers(t) if t.type.name != "IQ1_S" else numbers(t).bfloat16().float() for t in (gate, up, down))
    expected = torch.zeros(3, 256)
    for token in range(3):
        for slot in range(2):
            e = int(ids[token, slot])
            hidden = nn.functional.silu(w1[e, 256:] @ x[token]) * (w3[e, 256:] @ x[token])
            expected[token] += shares[token, slot] * (w2[e][:, 256:] @ hidden)
    found = layer.quant_method.apply(layer, x, shares, ids, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_a_fused_module_of_two_types(tmp_path: Path) -> None:
    parts = [random_tensor(tmp_path / "w", kind, 256, rows) for kind, rows in (("Q5_K", 32), ("Q8_0", 48))]
    module = Module("fused", tuple(Source(tensor, tensor.name, tensor.shape[1]) for tensor in parts))
    layer, method = Rank(0, 1), Glm5LinearMethod(module)
    method.create_weights(layer, 256, [32, 48], 256, 80, torch.float32)
    Reader(torch.device("cpu")).fill(list(method.slabs(layer)))
    x = torch.randn(2, 3, 256)
    whole = torch.cat([numbers(tensor)[0] for tensor in parts])
    torch.testing.assert_close(method.apply(layer, x), x @ whole.T, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in layer.named_parameters()] == list(method.parameters.names)


def test_a_pipeline_stage_asks_for_nothing_of_other_stages(model_folder: Callable[[Run], Path]) -> None:
    """The second of two stages has neither the embedding nor the first layers, and needs none of their bytes."""
    files = ModelFiles.open(model_folder(Run("A")))
    plan = files.plan(files.pattern)
    stage = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": PPMissingLayer(), "norm": nn.Identity()})})
    stage["lm_head"] = nn.Identity()
    here = main_placements(plan, range(2, 4))
    rest = left_over(stage, here, {"model.layers.2.self_attn.o_proj.weight"})
    names = {p.hf_name for p in here} - {p.hf_name for p in rest}
    assert names == {"model.embed_tokens.weight", "model.layers.2.self_attn.o_proj.weight"}


def test_only_the_limit_on_splitting_is_taken_out_of_the_allocators_settings() -> None:
    """As vLLM's worker writes it: behind whatever the user has set, which may hold commas of its own."""
    users = "expandable_segments:False,roundup_power2_divisions:[256:1,512:2,>:8]"
    assert without_limit(f"{users},max_split_size_mb:20") == users
    assert without_limit("max_split_size_mb:20") == ""
    assert without_limit("") == ""


@pytest.mark.gpu
def test_the_device_needs_little_more_than_the_planes(tmp_path: Path) -> None:
    """With vLLM's limit on splitting set: 100 pieces whose temporary tensors are just below 20 MiB."""
    tensor = random_tensor(tmp_path / "w", "Q6_K", 256, 6144, 13)
    target = empty_planes("Q6_K", 6144, 256, 13, "cuda")
    slab = Slab(Source(tensor, "w", 6144, 13), target, range(13), range(6144), range(256))
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    try:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        Reader(torch.device("cuda")).fill([slab] * 100)
        assert torch.cuda.max_memory_reserved() - held < 1.5 * 2**30
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
    assert torch.equal(dequantize_planes(target).cpu(), numbers(tensor))


def test_what_bounds_the_rate_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading that takes long is what the feeding thread waits for, and what the readers do."""
    tensor = random_tensor(tmp_path / "w", "Q8_0", 256, 64)
    copy = Files.copy

    def slow(self: Files, piece: Piece, out: np.ndarray) -> int:
        time.sleep(0.05)
        return copy(self, piece, out)

    monkeypatch.setattr(Files, "copy", slow)
    reader = Reader(torch.device("cpu"), most=272 * 16)
    reader.fill([Slab(Source(tensor, "w", 64), empty_planes("Q8_0", 64, 256), range(1), range(64), range(256))])
    assert reader.times.read > 4 * 0.05
    assert 0.03 < reader.times.waited <= reader.times.read
    assert reader.times.device < 0.05
    assert "readers read for 0." in str(reader.times)


def test_progress_speaks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("glm5deploy.vllm_plugin.rank_reader.time.monotonic", lambda: now[0])
    lines: list[str] = []
    progress = Progress(lines.append)
    for second in range(1, 21):
        now[0] = float(second)
        progress(second * 10**9, 20 * 10**9)
    assert lines[0] == "5.0 of 20.0 GB, 1.00 GB/s, 15 s left"
    assert len(lines) == 4
    assert lines[-1] == "20.00 GB of quantised weights read in 20.0 s (1.00 GB/s)"


# --- How much of a file of GLM-5's own shapes a rank takes ---

EXPERTS = 32
_KEPT = ("token_embd", "output.", "output_norm", "blk.2.", "blk.3.")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[TensorPlan, dict[str, ShardTensor]]:
    """A dense and a routed layer of GLM-5's own shapes (32 of 256 experts), embedding and head; all bytes are holes."""
    path = tmp_path_factory.mktemp("sparse") / "glm-5.gguf"
    table: dict[str, ShardTensor] = {}
    offset = 1 << 20
    catalogue = real_tensors("all")
    for entry in catalogue:
        shape = tuple(EXPERTS if size == 256 and "exp" in entry.name else size for size in entry.shape)
        shape = (6144, EXPERTS) if "ffn_gate_inp" in entry.name else shape
        nbytes = entry.type.nbytes(math.prod(shape))
        table[entry.name] = ShardTensor(entry.name, entry.type, shape, path, offset, nbytes, 0)
        if entry.name.startswith(_KEPT):
            offset += -(-nbytes // 32) * 32
    with path.open("wb") as file:
        file.truncate(offset)
    hparams = read_hparams(real_metadata("5.2", expert_count=EXPERTS), table)
    plan = plan_tensors(table.values(), hparams, IndexerSchedule("F" * 78, "option"), use_mtp=False)
    return TensorPlan(tuple(p for p in plan.used if p.name.startswith(_KEPT)), (), False), table


def rank_slabs(module: Module, rank: int, tp: int, ep: bool) -> list[Slab]:
    """What the methods read on one rank, for layers cut as vLLM cuts them."""
    name = module.prefix.rsplit(".", 1)[-1]
    if module.experts:
        mine = [*range(rank * EXPERTS // tp, (rank + 1) * EXPERTS // tp)] if ep else [*range(EXPERTS)]
        layer = expert_layer(module, EXPERTS, mine, (0, 1) if ep else (rank, tp))
        return list(layer.quant_method.slabs(layer))
    whole = name in ("fused_qkv_a_proj", "wq_b")
    layer = Rank(0, 1) if whole else Rank(rank, tp)
    method = Glm5LinearMethod(module)
    by_rows = not whole and name not in ("o_proj", "down_proj")
    columns = module.parts[0].columns
    inputs = columns if whole or by_rows else columns // tp
    method.create_weights(layer, inputs, [p.rows // (tp if by_rows else 1) for p in module.parts], 0, 0, torch.float32)
    return list(method.slabs(layer))


@pytest.mark.parametrize(("tp", "ep"), [(1, False), (2, False), (4, False), (8, False), (8, True)])
def test_a_rank_takes_its_share_of_the_file_and_no_more(
    tp: int,
    ep: bool,
    sparse: tuple[TensorPlan, dict[str, ShardTensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every byte copied out of the mapping or dequantised is counted, on the last rank; memory stays bounded."""
    plan, table = sparse
    rank, taken = tp - 1, Files()
    modules = quantised_modules(main_placements(plan, range(78)), table)
    with torch.device("meta"):
        slabs = [slab for module in modules.values() for slab in rank_slabs(module, rank, tp, ep)]
    taken.open({slab.source.tensor.path for slab in slabs})
    before, most, total = resident(), 0, 0
    for slab in slabs:
        for piece in pieces(slab, 1 << 24):
            total += taken.copy(piece, np.empty(piece.shape, np.uint8))
            most = max(most, resident() - before)
    assert total == sum(slab.nbytes for slab in slabs)
    assert most < 300 << 20, "pages are not given back"

    dense = []
    monkeypatch.setattr(weights, "dequantize", lambda raw, kind: dense.append(raw.nbytes) or dequantize(raw, kind))
    done = {slab.source.name for slab in slabs}
    rest = tuple(p for p in plan.used if p.hf_name not in done)
    assert {p.kind.gguf for p in rest} >= {"attn_k_b.weight", "attn_v_b.weight", "ffn_gate_inp.weight"}
    for _ in weights.stream(rest, table, torch.bfloat16, weights.Rank(rank, tp, ep)):
        pass
    share_bytes = sum(table[p.name].nbytes / (1 if p.kind.cut == "none" else tp) for p in plan.used)
    print(f"TP {tp}{' EP' if ep else ''}: {total + sum(dense)} of {share_bytes:.0f} bytes")
    assert 0.999 <= (total + sum(dense)) / share_bytes <= 1.15


def resident() -> int:
    """Bytes of this process in memory, mapped pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_flat_planes_come_back_as_they_were() -> None:
    made: list[Planes] = [empty_planes(kind, 32, 256) for kind in ("MXFP4", "Q6_K", "BF16", "IQ4_XS")]
    spec = ",".join(ops.describe(p.format, 32, 256) for p in made)
    found = ops.assemble(spec, [tensor for p in made for tensor in p.tensors])
    assert [p.tensors for p in found] == [p.tensors for p in made]
