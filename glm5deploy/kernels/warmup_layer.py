"""The launches of :mod:`glm5deploy.kernels.warmup` that take the place of the engine's own around attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from glm5deploy.kernels import row_product
from glm5deploy.kernels.add_norm import add_norm
from glm5deploy.kernels.latent_input import latent_input
from glm5deploy.kernels.layout import INDEX_DIM, LATENT_DIM, QK_DIM
from glm5deploy.kernels.prepare import Launch
from glm5deploy.kernels.query_input import MOST_TOKENS, query_input
from glm5deploy.kernels.slots import Lookup
from glm5deploy.kernels.step_tokens import step_tokens

if TYPE_CHECKING:
    from glm5deploy.kernels.warmup import Serving


def launches(serving: Serving, device: torch.device) -> Iterator[Launch]:
    yield from _inputs(serving, device)
    yield from _norms(serving, device)
    yield from _row_products(serving, device)
    if serving.width:
        yield Launch(("step tokens",), partial(_step_tokens, device))


def _inputs(serving: Serving, device: torch.device) -> Iterator[Launch]:
    """What comes before attention, where the engine does it with kernels of this package."""
    positions = torch.zeros(MOST_TOKENS + 1, dtype=torch.int64, device=device)
    angles = torch.zeros((1, QK_DIM - LATENT_DIM), dtype=serving.dtype, device=device)

    def latents(beside: int) -> None:
        tokens = max(1, beside)
        x = torch.zeros((tokens, serving.query_rank + QK_DIM), dtype=serving.dtype, device=device)
        weights = torch.zeros(serving.query_rank + LATENT_DIM, dtype=serving.dtype, device=device)
        norms = weights[: serving.query_rank].clone(), weights[serving.query_rank :].clone()
        hidden = torch.zeros((tokens, serving.width), dtype=serving.dtype, device=device)
        weight = torch.zeros((INDEX_DIM + serving.index_heads, serving.width), dtype=serving.dtype, device=device)
        multiplied = (hidden, weight, hidden.new_empty((tokens, len(weight)))) if beside else None
        place = positions[:tokens]
        latent_input(x, *norms, 1e-5, place, angles, place, serving.latent_block(device), multiplied)

    def queries(tokens: int, topk: int) -> None:
        width = serving.query_nope + QK_DIM - LATENT_DIM
        q = torch.zeros((tokens, serving.heads, width), dtype=serving.dtype, device=device)
        weight = torch.zeros((serving.heads, serving.query_nope, LATENT_DIM), dtype=serving.dtype, device=device)
        selected, counts = torch.zeros((tokens, topk), dtype=torch.int32, device=device), positions[:tokens].int()
        found = selected.clone(), counts.clone()
        lookup = Lookup(selected, counts, counts[:1, None], serving.block_size, *found, serving.block_size)
        query_input(q, weight, positions[:tokens], angles, lookup if topk else None)

    if serving.query_rank:
        most = row_product.BESIDE_TOKENS if serving.index_at_once and serving.width else 0
        for tokens in range(most + 1):
            yield Launch(("layer input", "latents", tokens), partial(latents, tokens))
    if serving.query_nope:
        for tokens, topk in product((1, MOST_TOKENS + 1), (0, serving.topk) if serving.values else (0,)):
            yield Launch(("layer input", "queries", tokens, topk), partial(queries, tokens, topk))


def _norms(serving: Serving, device: torch.device) -> Iterator[Launch]:
    """Between two parts of a layer; the first layer has nothing to add."""

    def norm(add: bool) -> None:
        x = torch.zeros((1, serving.width), dtype=serving.dtype, device=device)
        add_norm(x, x if add else None, x[0].clone(), 1e-5)

    for add in (True, False) if serving.width else ():
        yield Launch(("norm", add), partial(norm, add))


def _step_tokens(device: torch.device) -> None:
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    request, length = torch.zeros((2, 1), dtype=torch.int32, device=device)
    step_tokens(starts, starts[1:], request, length.clone())


def _row_products(serving: Serving, device: torch.device) -> Iterator[Launch]:
    """Index keys and head weights, and routers' logits, for every number of rows that a program rounds tokens up to."""

    def multiply(tokens: int, outputs: int, dtype: torch.dtype) -> None:
        x = torch.zeros((tokens, serving.width), dtype=serving.dtype, device=device)
        row_product.row_product(x, torch.zeros((outputs, serving.width), dtype=dtype, device=device))

    most = row_product.MOST_TOKENS if serving.index_at_once and serving.width else 0
    for tokens in (2**i for i in range(most.bit_length())):
        yield Launch(
            ("index product", tokens), partial(multiply, tokens, INDEX_DIM + serving.index_heads, serving.dtype)
        )
    most = row_product.ROUTER_TOKENS if serving.experts and serving.width else 0
    for tokens in (2**i for i in range(most.bit_length())):
        yield Launch(("router", tokens), partial(multiply, tokens, serving.experts, torch.float32))
