"""A plain forward pass of the reference models in fp32: what an engine must answer, at any length, step after step.

Written from the architecture alone; of this project it uses nothing but, on request, how the packed cache rounds.
Weights come through gguf-py. Its own proof are the reference results (`tests/vllm_plugin/test_oracle.py`), which
another implementation computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear, silu

from glm5deploy.kernels.reference import quantise_latent
from tests.support.compare import logprob_differences
from tests.support.engine import Answer
from tests.support.goldens import SETS

ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}  # of the largest temporary
ROWS = 4096  # positions that pass through a layer at a time
EPSILON, INDEX_EPSILON = 1e-5, 1e-6


@dataclass
class Layer:
    """What a layer keeps of the context: latents [n, 576] and, where it selects, index keys [n, 128]."""

    latent: torch.Tensor
    keys: torch.Tensor | None = None


@dataclass
class State:
    """Context so far; ``selected`` (layer, position) -> positions is filled for the positions in ``watched``."""

    layers: dict[int, Layer] = field(default_factory=dict)
    length: int = 0
    watched: frozenset[int] = frozenset()
    selected: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def fork(self, length: int) -> State:
        """The context's first ``length`` positions, to be continued otherwise."""
        return State(
            {
                i: Layer(kept.latent[:length], None if kept.keys is None else kept.keys[:length])
                for i, kept in self.layers.items()
            },
            length,
        )


class Oracle:
    """The model of one GGUF file or folder of shards, on ``device``, selecting ``topk`` positions.

    ``schedule`` has a letter a layer: F selects, S reuses the selection of the F before it. Index queries and keys are
    rounded to e4m3 as GPU engines do; with ``packed`` so are latents, 128 values at a time (and their RoPE part to
    bf16), as the fp8_ds_mla cache holds them.
    """

    def __init__(self, gguf: Path, schedule: str, *, topk: int, packed: bool = False, device: str = "cpu") -> None:
        self.device, self.schedule, self.topk, self.packed = device, schedule, topk, packed
        self.weights, facts = _read(gguf, device)
        self.heads, self.experts = facts["attention.head_count"], facts["expert_used_count"]
        self.expert_scale = facts["expert_weights_scale"]
        rope = facts["rope.dimension_count"]
        self.frequencies = (1.0 / facts["rope.freq_base"] ** (torch.arange(0, rope, 2).float() / rope)).to(device)

    @torch.no_grad()
    def extend(self, state: State, ids: Sequence[int], last: int | None = None) -> torch.Tensor:
        """Append ``ids`` to the context; log-probabilities [n, vocabulary] after each of them, or the ``last`` ones."""
        x = self.hidden(state, ids)
        return self.logprobs(x if last is None else x[-last:], "output_norm")

    @torch.no_grad()
    def hidden(self, state: State, ids: Sequence[int]) -> torch.Tensor:
        """Append ``ids`` to the context; the last layer's output [n, hidden], not normalised yet."""
        x = self.weights["token_embd"][torch.tensor(ids, device=self.device)]
        state.layers = state.layers or {i: self._empty() for i in range(len(self.schedule))}
        parts = []
        for start in range(0, len(ids), ROWS):
            part = x[start : start + ROWS]
            first, chosen = state.length, None
            for i, letter in enumerate(self.schedule):
                part, chosen = self.block(state, i, part, first, chosen if letter == "S" else None)
            state.length = first + part.shape[0]
            parts.append(part)
        return torch.cat(parts)

    def logprobs(self, x: torch.Tensor, norm: str) -> torch.Tensor:
        return linear(self._norm(x, norm), self.weights["output"]).log_softmax(dim=-1)

    @torch.no_grad()
    def draft(self, state: State, hidden: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """The MTP block over a whole context: log-probabilities [n, vocabulary] of the token after the next.

        ``hidden`` [n, hidden] is the last layer's output (as :meth:`hidden` gives it), ``ids`` the n tokens that follow
        each position.
        """
        i = len(self.schedule)
        state.layers[i] = self._empty()
        embedded = self.weights["token_embd"][torch.tensor(ids, device=self.device)].clone()
        embedded[0] = 0  # the first position has no embedding there
        pair = (
            self._norm(embedded, f"blk.{i}.nextn.enorm"),
            self._norm(self._norm(hidden, "output_norm"), f"blk.{i}.nextn.hnorm"),
        )
        x = linear(torch.cat(pair, dim=-1), self.weights[f"blk.{i}.nextn.eh_proj"])
        return self.logprobs(self.block(state, i, x, 0, None)[0], f"blk.{i}.nextn.shared_head_norm")

    def block(
        self, state: State, i: int, x: torch.Tensor, first: int, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer ``i`` over positions ``first``..: output and selected positions [n, at most topk], -1 padded."""
        w, kept = (lambda name: self.weights[f"blk.{i}.{name}"]), state.layers[i]
        positions = torch.arange(first, first + x.shape[0], device=self.device)
        h = self._norm(x, f"blk.{i}.attn_norm")
        latent, rope = linear(h, w("attn_kv_a_mqa")).split([512, 64], dim=-1)
        latent = self._norm(latent, f"blk.{i}.attn_kv_a_norm")
        rope = self._rotate(rope, positions)
        if self.packed:
            latent, rope = _packed(latent), rope.bfloat16().float()
        kept.latent = torch.cat((kept.latent, torch.cat((latent, rope), dim=-1)))
        rank = self._norm(linear(h, w("attn_q_a")), f"blk.{i}.attn_q_a_norm")
        if chosen is None:
            chosen = self._select(kept, i, h, rank, positions)
        for row in state.watched & {*range(first, first + x.shape[0])}:
            picked = chosen[row - first]
            state.selected[i, row] = frozenset(picked[picked >= 0].tolist())
        nope, rotated = linear(rank, w("attn_q_b")).view(len(x), self.heads, 256).split([192, 64], dim=-1)
        absorbed = torch.einsum("hln,thn->thl", w("attn_k_b"), nope)
        q = torch.cat((absorbed, self._rotate(rotated, positions)), dim=-1)
        out = torch.einsum("hvl,thl->thv", w("attn_v_b"), self._attend(q, kept.latent, chosen))
        x = x + linear(out.flatten(1), w("attn_output"))
        return x + self._feed_forward(i, self._norm(x, f"blk.{i}.ffn_norm")), chosen

    def _select(
        self, kept: Layer, i: int, h: torch.Tensor, rank: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        w = lambda name: self.weights[f"blk.{i}.indexer.{name}"]  # noqa: E731
        key = layer_norm(linear(h, w("attn_k")), (128,), w("k_norm"), w("k_norm.bias"), INDEX_EPSILON)
        key = _e4m3(torch.cat((self._rotate(key[:, :64], positions), key[:, 64:]), dim=-1))
        assert kept.keys is not None
        kept.keys = torch.cat((kept.keys, key))
        q = linear(rank, w("attn_q_b")).view(len(h), -1, 128)
        q = _e4m3(torch.cat((self._rotate(q[..., :64], positions), q[..., 64:]), dim=-1))
        weights = linear(h, w("proj")) * (q.shape[1] * 128) ** -0.5
        total = int(positions[-1]) + 1
        if total <= self.topk:
            every = torch.arange(total, device=self.device)
            return torch.where(every <= positions[:, None], every, -1)
        chosen = torch.full((len(h), self.topk), -1, device=self.device)
        for part in self._parts(len(h), q.shape[1] * total):
            scores = torch.matmul(q[part], kept.keys.T).relu_()
            scores = torch.einsum("tjs,tj->ts", scores, weights[part])
            later = torch.arange(total, device=self.device) > positions[part, None]
            best = scores.masked_fill_(later, -torch.inf).topk(self.topk, dim=-1, sorted=False).indices
            chosen[part] = torch.where(best <= positions[part, None], best, -1)
        return chosen

    def _attend(self, q: torch.Tensor, latent: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((*q.shape[:2], 512))
        for part in self._parts(len(q), chosen.shape[1] * 576):
            rows = latent[chosen[part].clamp_min(0)]
            scores = torch.einsum("thd,tkd->thk", q[part], rows) * 256**-0.5
            scores.masked_fill_((chosen[part] < 0)[:, None], -torch.inf)
            out[part] = torch.einsum("thk,tkd->thd", scores.softmax(dim=-1), rows[..., :512])
        return out

    def _feed_forward(self, i: int, h: torch.Tensor) -> torch.Tensor:
        if f"blk.{i}.ffn_gate_inp" not in self.weights:
            return self._mlp(h, f"blk.{i}.ffn_{{}}")
        scores = linear(h, self.weights[f"blk.{i}.ffn_gate_inp"]).sigmoid()
        experts = (scores + self.weights[f"blk.{i}.exp_probs_b.bias"]).topk(self.experts, dim=-1).indices
        share = scores.gather(1, experts)
        share = share / share.sum(dim=-1, keepdim=True) * self.expert_scale
        out = self._mlp(h, f"blk.{i}.ffn_{{}}_shexp")
        for expert in range(scores.shape[1]):
            token, place = (experts == expert).nonzero(as_tuple=True)
            out[token] += self._mlp(h[token], f"blk.{i}.ffn_{{}}_exps", expert) * share[token, place, None]
        return out

    def _mlp(self, h: torch.Tensor, name: str, expert: int | None = None) -> torch.Tensor:
        gate, up, down = (self.weights[name.format(part)] for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        return linear(silu(linear(h, gate)) * linear(h, up), down)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON) * self.weights[name]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate neighbouring pairs of the last axis; x [n, 64] or [n, heads, 64]."""
        angle = positions.float()[:, None] * self.frequencies
        cos, sin = (part.view(len(x), *[1] * (x.dim() - 2), -1) for part in (angle.cos(), angle.sin()))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def _parts(self, rows: int, width: int) -> Iterator[slice]:
        step = max(1, ELEMENTS[self.device] // width)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def _empty(self) -> Layer:
        return Layer(torch.empty((0, 576), device=self.device), torch.empty((0, 128), device=self.device))


def step_differences(logprobs: torch.Tensor, served: Sequence[Mapping[int, float]]) -> list[list[float]]:
    """|difference| over the expected top 20 of each step: ``logprobs`` [n, vocabulary] expected, n steps served."""
    best = logprobs.topk(20, dim=-1)
    expected = (zip(t, v, strict=True) for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return [logprob_differences([*top], step) for top, step in zip(expected, served, strict=True)]


def answer_differences(oracle: Oracle, ids: Sequence[int], answer: Answer) -> list[list[float]]:
    """:func:`step_differences` of an answer to the prompt ``ids``, given the tokens that it decoded."""
    logprobs = oracle.extend(State(), [*ids, *answer.ids[:-1]], last=len(answer.ids))
    return step_differences(logprobs, decoded_steps(len(ids), answer))


def decoded_steps(length: int, answer: Answer) -> list[Mapping[int, float]]:
    return [answer.top[length - 1 + i] for i in range(len(answer.ids))]


@cache
def oracle_of(key: str, topk: int, packed: bool = False) -> Oracle:
    """The oracle of a reference set, on a GPU where there is one."""
    chosen, device = SETS[key], "cuda" if torch.cuda.is_available() else "cpu"
    return Oracle(chosen.path, chosen.schedule, topk=topk, packed=packed, device=device)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 over its last axis, with a power of two as scale."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _packed(latent: torch.Tensor) -> torch.Tensor:
    """What rows of the packed cache hold of latents [..., 512]."""
    values, scale = quantise_latent(latent.unflatten(-1, (4, 128)))
    return (values.float() * scale[..., None]).flatten(-2)


def _read(gguf: Path, device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Dequantised tensors by name (".weight" left out), and the architecture's numbers."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for file in sorted(gguf.glob("*.gguf")) if gguf.is_dir() else [gguf]:
        reader = GGUFReader(file)
        for name, value in reader.fields.items():
            if name.startswith("glm-dsa."):
                facts[name.removeprefix("glm-dsa.")] = value.contents()
        for tensor in reader.tensors:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            shape = [int(size) for size in reversed(tensor.shape.tolist())]
            weights[tensor.name.removesuffix(".weight")] = torch.from_numpy(values).view(shape).to(device)
    return weights, facts
