"""Slots from the block table, and the writers of the latent cache."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.layout import PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.slots import slots_from_positions
from tests.kernels.cases import paged_bytes

BLOCK = 16


@pytest.mark.parametrize("columns", [1, 37, 64])
@pytest.mark.parametrize("rows_per_block", [None, 20])
def test_slots(columns: int, rows_per_block: int | None) -> None:
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    positions = torch.randint(-1, 64, (5, columns), dtype=torch.int32)
    positions[0, 0] = 64  # past the table
    positions[1] = -1
    requests = torch.tensor([0, 2, 1, 1, 2])
    slots, counts = torch.empty(5, columns, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    slots_from_positions(positions, requests, table, BLOCK, slots, counts, rows_per_block)
    expected, expected_counts = reference.slots_from_positions(positions, requests, table, BLOCK, rows_per_block)
    assert torch.equal(slots, expected)
    assert torch.equal(counts, expected_counts)


SLOTS = torch.tensor([3, -1, 30, 0, 15, 16, 47])


def test_plain_rows() -> None:
    latent, rope = torch.randn(7, 512).half(), torch.randn(7, 64).half()
    cache = torch.full((3, BLOCK, QK_DIM), 9.0, dtype=torch.float16)
    store_latent(latent, rope, SLOTS, cache)
    kept = SLOTS >= 0
    rows = cache.view(-1, QK_DIM)
    assert torch.equal(rows[SLOTS[kept]], torch.cat((latent, rope), 1)[kept])
    others = [r for r in range(48) if r not in SLOTS.tolist()]
    assert (rows[others] == 9.0).all()


def test_packed_rows_are_the_reference_to_the_byte() -> None:
    # Of numbers that bf16 represents: the interpreter cuts the others off instead of rounding them.
    latent, rope = torch.randn(7, 512).half(), torch.randn(7, 64).bfloat16().half()
    latent[0, :128] *= 300
    latent[2] = 0
    cache = paged_bytes(3, BLOCK, PACKED_ROW_BYTES)
    # The latent part comes as a slice of something wider.
    store_latent(torch.cat((latent, latent), 1)[:, :512], rope, SLOTS, cache)
    expected = reference.pack_fp8_ds_mla(torch.cat((latent, rope), 1).float())
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            row = cache[slot // BLOCK, slot % BLOCK]
            assert torch.equal(row, expected[token])
    untouched = [s for s in range(48) if s not in SLOTS.tolist()]
    assert all((cache[s // BLOCK, s % BLOCK] == 0xFF).all() for s in untouched)
