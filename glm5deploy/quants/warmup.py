"""What the number of tokens changes about a product's launch: warm-up runs one number of each kind."""

from __future__ import annotations

from collections.abc import Hashable

import triton

from glm5deploy.quants import launch, products
from glm5deploy.quants.planes import Planes


def linear_key(tokens: int, planes: Planes) -> Hashable:
    """Equal for numbers of tokens whose product with a weight runs the same variants."""
    if tokens >= launch.DENSE_TOKENS:
        return "dense"
    return launch.linear_launch(tokens, planes.rows, planes.supers, *products._gpu(planes.low))


def moe_key(tokens: int, gate: Planes, down: Planes, topk: int) -> Hashable:
    """The same for routed experts."""
    pairs, experts, gpu = tokens * topk, gate.experts, products._gpu(gate.low)
    search = triton.next_power_of_2(pairs) if pairs <= launch.SEARCH_PAIRS else 0
    return (
        launch.gate_up_launch(pairs, experts, gate.rows, gate.supers, *gpu),
        launch.down_launch(pairs, experts, down.rows, down.supers, *gpu),
        search,
        pairs <= products.EXACT_TERMS,
    )
