"""Compiles every kernel with every launch configuration for every supported GPU, without a GPU.

`python -m tests.kernels.compile_all` prints one JSON object a line: kernel, configuration, arch, bytes of shared memory
and of stack (spilled registers). It runs apart from the tests' process, which has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from glm5deploy.kernels.chain import FIRST_CHAINED_ARCH
from glm5deploy.kernels.query_input import REGISTERS
from glm5deploy.kernels.row_product import BESIDE_TOKENS, ROUTER_TOKENS
from glm5deploy.kernels.tuning import (
    FIRST_FP8_ARCH,
    SHARED_LIMIT,
    SPILL_LIMIT,
    Gpu,
    SparseRow,
    family_of,
    paged_config,
    ragged_config,
    sparse_rows,
)
from glm5deploy.kernels.value_output import MOST_ROWS, value_variant
from tests.support.chain_order import WAIT, out_of_order
from tests.support.compiling import kernel_source

# Of the smallest or the usual GPU of an architecture: few multiprocessors mean few splits.
MULTIPROCESSORS = {80: 108, 86: 46, 89: 58, 90: 132, 100: 148, 120: 70, 121: 48}
TOPK = 2048
MOST_TOKENS = 16_384
LONGEST = 202_752  # positions of a context
SPARING_SPILL_LIMIT = 256
BF16, F32, I32, I64, U8, E4M3 = "*bf16", "*fp32", "*i32", "*i64", "*u8", "*fp8e4nv"


@dataclass(frozen=True)
class Job:
    """One compilation: argument types not named are int32; `aligned` arguments are multiples of 16."""

    kernel: str
    arch: int
    warps: int
    stages: int
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = field(default=())
    spill_limit: int = SPILL_LIMIT
    registers: int | None = None


def sparse_jobs(arch: int, family: str) -> Iterator[Job]:
    """All that launches of few and of many heads choose, over every number of tokens and both caches."""
    of = Gpu(arch, MULTIPROCESSORS[arch], family)
    for packed, heads in product((False, True), (8, 16, 64) if arch == 90 else (8, 64)):
        rows = sparse_rows(of, packed, heads)
        reached: dict[tuple[SparseRow, bool], None] = {}
        for tokens in range(1, MOST_TOKENS + 1):
            row = next(row for row in rows if tokens <= row.max_tokens)
            reached[row, row.config.splits(tokens, heads, TOPK, of.multiprocessors) > 1] = None
        for row, split in reached:
            yield hopper_job(row, split) if row.config.wgmma else sparse_job(arch, row, heads, split)
    for splits, dims in ((8, 128), (8, 512), (32, 128), (64, 128)):
        types = {"partial": F32, "partial_lse": F32, "out": BF16, "lse": F32}
        yield Job("sparse_mla.combine_splits_kernel", arch, 4, 3, types, {"BS": splits, "BD": dims}, ("partial", "out"))


def sparse_job(arch: int, row: SparseRow, heads: int, split: bool) -> Job:
    types = {"q_nope": BF16, "q_rope": BF16, "rows": U8 if row.packed else BF16, "ropes": BF16, "slots": I32}
    types |= {"scales": F32 if row.packed else BF16, "counts": I32, "lse": F32, "scale_log2": "fp32"}
    constants = {"H": heads, "BH": row.config.block_heads, "BK": row.config.block_keys, "SPLIT": split}
    constants |= {"KV_FP8": row.packed, "ASM": row.packed, "HAS_COUNTS": True}
    strides = ("stride_nope_t", "stride_nope_h", "stride_rope_t", "stride_rope_h")
    return Job(
        "sparse_mla.sparse_mla_fwd_kernel",
        arch,
        row.config.warps,
        row.config.stages,
        types | {"out": F32 if split else BF16},
        constants,
        ("q_nope", "q_rope", "rows", "scales", "ropes", "out", "lse", *strides),
        row.spill_limit,
    )


def hopper_job(row: SparseRow, split: bool) -> Job:
    types = {"q_nope": BF16, "q_rope": BF16, "rows": U8 if row.packed else BF16, "slots": I32, "counts": I32}
    types |= {"lse": F32, "scale_log2": "fp32"}
    aligned = ("q_nope", "q_rope", "rows", "out", "lse", "stride_nope_t", "stride_nope_h")
    return Job(
        "sparse_mla_hopper.sparse_mla_hopper_kernel",
        90,
        row.config.warps,
        row.config.stages,
        types | {"out": F32 if split else BF16},
        {"H": 64, "BH": row.config.block_heads, "SPLIT": split, "KV_FP8": row.packed, "HAS_COUNTS": True},
        (*aligned, "stride_rope_t", "stride_rope_h"),
        row.spill_limit,
    )


def indexer_jobs(arch: int, family: str) -> Iterator[Job]:
    fp8 = arch >= FIRST_FP8_ARCH
    values = E4M3 if fp8 else BF16
    of = Gpu(arch, 1, family)
    ragged, paged = ragged_config(of, fp8), paged_config(of, fp8)
    types = {"q": values, "k": values, "k_scale": F32, "weights": F32, "starts": I32, "ends": I32, "logits": F32}
    constants = {"J": 32, "BQ": ragged.block_queries, "BS": ragged.block_keys, "HAS_SCALE": fp8}
    yield Job("indexer_logits.ragged_logits_kernel", arch, ragged.warps, ragged.stages, types, constants, ("q", "k"))
    types = {"q": values, "values": E4M3 if fp8 else U8, "scales": F32, "weights": F32}
    types |= {"lengths": I32, "block_table": I32, "logits": F32}
    for next_n in (1, 4):
        constants = {"J": 32, "NQ": next_n, "BS": paged.block_keys, "BLOCK": 64, "KEYS_FP8": fp8}
        yield Job(
            "indexer_logits.paged_logits_kernel",
            arch,
            paged.warps,
            paged.stages,
            types,
            constants,
            ("q", "values", "scales", "stride_block"),
        )
    types = {"q": BF16, "weights": BF16, "positions": I64, "cos_sin": BF16, "weights_out": F32, "factor": "fp32"}
    yield Job(
        "index_cache.prepare_query_kernel",
        arch,
        4,
        3,
        types | {"q_out": U8 if fp8 else BF16},
        {"J": 32, "CODES": fp8},
        ("q", "cos_sin", "q_out", "stride_q_t", "stride_q_j"),
    )
    types = {"k": BF16, "weight": F32, "bias": F32, "positions": I64, "cos_sin": BF16, "k_out": BF16, "eps": "fp32"}
    aligned = ("k", "weight", "bias", "cos_sin", "k_out", "stride_k")
    yield Job("index_cache.prepare_key_kernel", arch, 4, 3, types, {"BT": 4}, aligned)
    types = {"k": BF16, "slots": I64, "values": U8, "scales": F32}
    aligned = ("values", "scales", "stride_block")
    yield Job("index_cache.store_keys_kernel", arch, 4, 3, types, {"BLOCK": 64, "BT": 16}, ("k", "stride_k", *aligned))
    types = {"values": U8, "scales": F32, "block_table": I32, "cumulative": I32, "scale_out": F32}
    yield Job(
        "index_cache.gather_keys_kernel",
        arch,
        4,
        3,
        types | {"k_out": U8 if fp8 else BF16},
        {"BLOCK": 64, "BS": 32, "CODES": fp8},
        ("k_out", *aligned),
    )


def selection_jobs(arch: int, family: str) -> Iterator[Job]:
    """All that selections of any number of rows and any length launch, of few positions and of many."""
    from glm5deploy.kernels import topk_config as topk
    from glm5deploy.kernels.topk import topk_variant

    of = Gpu(arch, MULTIPROCESSORS[arch], family)
    rows = {*range(1, 70), *range(70, topk.MOST_SHARED_ROWS, 8), topk.MOST_SHARED_ROWS, topk.MOST_SHARED_ROWS + 1}
    for k in (TOPK, topk.MAX_K):
        widths = {*range(k + 1, LONGEST, 1024), LONGEST}
        part_warps = topk.topk_config(k, arch).part_warps
        for variant in dict.fromkeys(topk_variant(count, width, k, width, of) for width in widths for count in rows):
            yield from selection_job(arch, variant, part_warps)


def selection_job(arch: int, variant: tuple[str, int, int, int], part_warps: int) -> Iterator[Job]:
    from glm5deploy.kernels import topk_config as topk

    kind, warps, sample, parts = variant
    if kind in ("stream", "parts") and arch != topk.STEPS_ARCH:
        sample = topk.TopkConfig().samples[-1]  # smaller ones need no more: all of them are compiled for one GPU
    types = {"logits": F32, "starts": I32, "lengths": I32, "counts": "*i64", "topk": I32}
    types |= {"lists": "*i64", "held_pairs": "*i64"}
    constants: dict[str, Any] = {"HAS_STARTS": False, "WARPS": warps, "ASM": True}
    early = arch >= FIRST_CHAINED_ARCH
    aligned = ("logits", "lists")
    match kind:
        case "block":
            kernel, registers = "topk_block.topk_block_kernel", topk.BLOCK_REGISTERS
            yield Job(kernel, arch, warps, 3, types, constants, ("logits",), registers=registers)
        case "steps":
            # Of a launch of this kind the last two numbers are groups and registers.
            launch = topk.Steps(warps, sample, parts or None)
            assert launch in (*topk.STEPS, *topk.CROWDED_STEPS)
            chosen = {"HAS_STARTS": False, "WARPS": warps, "GROUPS": launch.groups, "LOG_BINS": launch.log_bins}
            # Two programs a multiprocessor are worth what 16k columns spill: mostly where a row is read again.
            limit = SPARING_SPILL_LIMIT if launch.sparing else SPILL_LIMIT
            chosen |= {"SPARING": launch.sparing}
            kernel = "topk_steps.topk_steps_kernel"
            yield Job(kernel, arch, warps, 3, types, chosen, ("logits",), limit, launch.registers)
        case "stream" | "parts":
            if parts:
                chosen = constants | {"WARPS": part_warps, "SAMPLE": sample, "EARLY": early}
                kernel, registers = "topk_stream.topk_parts_kernel", topk.STREAM_REGISTERS
                yield Job(kernel, arch, part_warps, 3, types, chosen, aligned, registers=registers)
                sample = topk.TopkConfig().samples[1]
            chosen = constants | {"SAMPLE": sample, "EARLY": early and parts > 0}
            chosen |= {"PARTS": parts, "LIST": 512 * part_warps}
            kernel, held = "topk_stream.topk_stream_kernel", (*aligned, "held_pairs")
            yield Job(kernel, arch, warps, 3, types, chosen, held, registers=None if parts else topk.STREAM_REGISTERS)


def other_jobs(arch: int) -> Iterator[Job]:
    types = {"positions": I32, "request_of_token": I64, "block_table": I32, "slots": I32, "counts": I32}
    types_of_tokens = dict.fromkeys(("starts", "seq_lens", "request_out", "length_out"), I32)
    aligned = ("request_out", "length_out")
    yield Job("step_tokens.step_tokens_kernel", arch, 4, 3, types_of_tokens, {"BT": 128, "BR": 32}, aligned)
    yield Job("slots.slots_kernel", arch, 4, 3, types, {"BLOCK": 64, "BK": 2048})
    for packed in (False, True):
        types = {"latent": BF16, "rope": BF16, "slots": I64, "cache": U8 if packed else BF16, "cache_ropes": BF16}
        types |= {"cache_scales": F32 if packed else BF16}
        aligned = ("latent", "rope", "cache", "cache_scales", "cache_ropes")
        yield Job(
            "latent_cache.store_latent_kernel",
            arch,
            4 if packed else 1,
            3,
            types,
            {"BLOCK": 64, "PACKED": packed},
            (*aligned, "stride_latent", "stride_rope", "stride_block"),
        )


def input_jobs(arch: int) -> Iterator[Job]:
    """What comes before attention, for GLM-5's latents and its heads on one and on eight ranks."""
    types = {"positions": I64, "slots": I64, "cos_sin": BF16, "x": BF16, "q_weight": BF16, "kv_weight": BF16}
    types |= {"q_out": BF16, "eps": "fp32"}
    aligned = ("x", "q_weight", "kv_weight", "cos_sin", "q_out", "cache", "cache_scales", "cache_ropes", "stride_x")
    types |= {"hidden": BF16, "weight": BF16, "product": BF16}
    for packed, tokens in product((False, True), (0, *range(1, BESIDE_TOKENS + 1))):
        cache = {"cache": U8 if packed else BF16, "cache_scales": F32 if packed else BF16, "cache_ropes": BF16}
        constants = {"RANK": 2048, "BR": 2048, "BLOCK": 64, "PACKED": packed, "BT": tokens, "BC": 1024}
        constants |= {"K": 6144, "BW": 8} if tokens else {"K": 1, "BW": 1}
        kernel = "latent_input.latent_input_kernel"
        yield Job(kernel, arch, 4, 3, types | cache, constants, (*aligned, "hidden", "weight", "stride_block"))
    types = {"q": BF16, "weight": BF16, "positions": I64, "cos_sin": BF16, "latent_out": BF16, "rope_out": BF16}
    types |= dict.fromkeys(("selected", "request_of_token", "block_table", "slots", "counts"), I32)
    aligned = ("q", "weight", "cos_sin", "latent_out", "rope_out", "stride_q", "stride_weight_h")
    for heads, few in ((8, True), (64, False)):
        for columns in (0, TOPK):
            constants = {"H": heads, "NOPE": 192, "BK": 64, "BN": 32, "BT": 16, "BR": 8, "PRODUCT": few}
            constants |= {"COLUMNS": columns, "BLOCK": 64 if columns else 1}
            yield Job("query_input.query_input_kernel", arch, 4, 3, types, constants, aligned, registers=REGISTERS)
    types = dict.fromkeys(("x", "residual", "weight", "out", "sum_out"), BF16) | {"eps": "fp32"}
    constants = {"N": 6144, "PART": 768, "BR": 4, "BC": 2048, "BN": 1024}
    for add in (True, False):
        yield Job("add_norm.add_norm_kernel", arch, 8, 3, types, constants | {"ADD": add}, tuple(types)[:-1])
    for tokens in (1, 2, 4, 8):
        types = dict.fromkeys(("x", "weight", "out"), BF16)
        constants = {"K": 6144, "BT": tokens, "BR": 4, "BC": 2048}
        yield Job("row_product.row_product_kernel", arch, 8, 3, types, constants, tuple(types))
        if tokens <= ROUTER_TOKENS:
            types |= {"weight": F32, "out": F32}
            yield Job("row_product.row_product_kernel", arch, 8, 3, types, constants, tuple(types))
    fp8 = arch >= FIRST_FP8_ARCH
    types = {"q": BF16, "weights": BF16, "k": BF16, "norm_weight": F32, "norm_bias": F32, "positions": I64}
    types |= {"cos_sin": BF16, "slots": I64, "q_out": U8 if fp8 else BF16, "weights_out": F32, "values": U8}
    types |= {"scales": F32, "factor": "fp32", "eps": "fp32"}
    aligned = ("q", "k", "norm_weight", "norm_bias", "cos_sin", "q_out", "values", "scales")
    strides = ("stride_q_t", "stride_q_j", "stride_k", "stride_block")
    constants = {"J": 32, "CODES": fp8, "BLOCK": 64, "BT": 4}
    yield Job("index_input.index_input_kernel", arch, 4, 3, types, constants, (*aligned, *strides))


def value_jobs(arch: int) -> Iterator[Job]:
    """GLM-5's values behind attention, for every number of rows and splits."""
    types = {"partial": F32, "partial_lse": F32, "weight": BF16, "out": BF16}
    aligned = (*types, "stride_weight_h")
    for splits, columns, warps in {
        value_variant(r, s, 256): None for r in range(1, MOST_ROWS + 1) for s in (2, 32, 64)
    }:
        constants = {"VALUES": 256, "BS": splits, "BV": columns}
        yield Job("value_output.value_output_kernel", arch, warps, 3, types, constants, aligned)


def jobs() -> list[Job]:
    """Every job once: rows of the table that differ in their numbers of tokens alone share a compilation."""
    found: dict[str, Job] = {}
    for arch, limit in SHARED_LIMIT.items():
        family = family_of(arch, limit)
        for job in (
            *sparse_jobs(arch, family),
            *indexer_jobs(arch, family),
            *selection_jobs(arch, family),
            *other_jobs(arch),
        ):
            found.setdefault(repr(job), job)
        for job in (*input_jobs(arch), *value_jobs(arch)):
            found.setdefault(repr(job), job)
    return list(found.values())


def compile_one(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    module, name = job.kernel.split(".")
    kernel = getattr(import_module(f"glm5deploy.kernels.{module}"), name)
    constants = job.constants | ({"CHAINED": job.arch >= FIRST_CHAINED_ARCH} if "CHAINED" in kernel.arg_names else {})
    source = kernel_source(kernel, job.types, constants, job.aligned)
    options = {"num_warps": job.warps, "num_stages": job.stages, "maxnreg": job.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, 32), options=options)
    facts = {
        "kernel": name,
        "arch": job.arch,
        "spill_limit": job.spill_limit,
        "warps": job.warps,
        "stages": job.stages,
        **constants,
    }
    early = out_of_order(compiled.asm["ptx"], source.signature) if constants.get("CHAINED") else []
    facts |= {"waits": WAIT in compiled.asm["ptx"], "early": early}
    return {**facts, "shared": compiled.metadata.shared, "stack": stack_bytes(compiled.asm["cubin"])}


def stack_bytes(cubin: bytes) -> int:
    """Bytes of local memory a thread needs, from the binary's own resource table."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"STACK:(\d+)", printed)
    assert found is not None, f"no resource table in {printed!r}"
    return int(found[1])


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for result in pool.map(compile_one, jobs()):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
