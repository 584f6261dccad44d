"""One token's experts in three launches: the shared one is among them, and the routed ones are chosen in the first."""

from __future__ import annotations

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants import gpu, launch
from glm5deploy.quants.arguments import kernel_format, pointers
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.moe_kernel import sum_kernel
from glm5deploy.quants.one_token_kernel import one_down_kernel, one_gate_up_kernel
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.routed_experts import SUM_SPAN
from glm5deploy.quants.token_experts import Choice, Shared


def experts(
    x: torch.Tensor,
    gate: Planes,
    up: Planes,
    down: Planes,
    shared: Shared,
    choice: Choice,
    out: torch.Tensor | None = None,
    configs: tuple[launch.Launch, launch.Launch] | None = None,
) -> torch.Tensor:
    """The shared expert's down(silu(gate x) * up x) and the chosen experts', weighted, summed: [1, hidden] as x.

    x bf16 [1, hidden] and planes as of ``moe``, a shared expert that fits and a choice of one token's experts. The sum
    begins with the shared expert, and no term of it is rounded.
    """
    if not (x.shape == (1, gate.columns) and shared.fits(gate, up, down)):
        raise ValueError(f"x of shape {tuple(x.shape)} and a shared expert do not fit experts of {gate.rows} units")
    choice.check(1, gate.experts)
    logits, bias, topk, scale = choice
    n, slots = gate.rows, 1 + topk
    a, b = configs or launch.one_token_launch(topk, n, gate.supers, down.rows, gpu.describe(x.device).processors)
    if out is None:
        out = torch.empty((1, down.rows), dtype=x.dtype, device=x.device)
    ids = torch.empty((1, topk), dtype=torch.int32, device=x.device)
    scores = torch.empty((1, topk), dtype=torch.float32, device=x.device)
    hidden = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    terms = torch.empty((slots, down.rows), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(n, a.bn)
    parts, tickets = part_memory(a.parts, slots, 2 * n, slots * blocks, x.device)
    first, last = shared.gate_up[0], shared.gate_up[-1]
    one_gate_up_kernel[(blocks, slots, a.parts)](
        x, *pointers(gate), *pointers(up), *pointers(first), *pointers(last), ids, scores, logits.contiguous(),
        bias.contiguous(), hidden, parts, tickets, 0, n, first.rows, first.rows - n, gate.columns, gate.supers, a.parts,
        G=kernel_format(gate.format), U=kernel_format(up.format), A=kernel_format(first.format),
        B=kernel_format(last.format), E=gate.experts, EX=max(32, triton.next_power_of_2(gate.experts)), WARPS=a.warps,
        BN=a.bn, BM=a.bm, STAGES=a.stages, EVEN=gate.columns % 256 == 0, PTX=x.dtype == torch.bfloat16,
        **a.options, **chained(x.device),
    )  # fmt: skip
    one_down_kernel[(triton.cdiv(down.rows, b.bn * b.tiles), slots)](
        hidden, *pointers(down), *pointers(shared.down), ids, scores, terms, float(scale), down.rows, n, down.supers,
        b.tiles, FMT=kernel_format(down.format), A=kernel_format(shared.down.format), TOPK=topk,
        SCORES=triton.next_power_of_2(topk), BN=b.bn, BM=b.bm, STAGES=b.stages, ONE=down.supers == 1, EVEN=n % 256 == 0,
        PTX=x.dtype == torch.bfloat16, **b.options, **chained(x.device),
    )  # fmt: skip
    sum_kernel[(1, triton.cdiv(down.rows, SUM_SPAN))](
        terms[1:], ids, terms, out, down.rows, TOPK=topk, BN=SUM_SPAN, ALSO=True, num_warps=4, **chained(x.device)
    )
    return out
