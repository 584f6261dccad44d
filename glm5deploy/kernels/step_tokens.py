"""Which request each token of a step is of, and how many positions it sees, in one launch instead of twelve."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.layout import require

_TOKENS, _REQUESTS = 128, 32  # of a tile


@triton.jit(do_not_specialize=["tokens", "requests"], do_not_specialize_on_alignment=["starts", "seq_lens"])
def step_tokens_kernel(
    starts,  # int32 [R + 1]
    seq_lens,  # int32 [R]
    request_out,  # int32 [T]
    length_out,  # int32 [T]
    tokens,
    requests,
    BT: tl.constexpr,
    BR: tl.constexpr,
):
    """Grid (T / BT). A token's request is the number of requests that end before it or at it."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    b_request = tl.zeros([BT], tl.int32)
    for first in range(0, requests, BR):
        o_r = first + tl.arange(0, BR)
        b_end = tl.load(starts + 1 + o_r, mask=o_r < requests, other=2147483647)
        b_request += tl.sum((b_end[None, :] <= o_t[:, None]).to(tl.int32), axis=1)
    b_request = tl.minimum(b_request, requests - 1)  # padding stays inside the block table
    m_t = o_t < tokens
    b_left = tl.load(starts + 1 + b_request, mask=m_t, other=0) - o_t  # of the request from here on, itself included
    b_length = tl.load(seq_lens + b_request, mask=m_t, other=0) - b_left + 1
    tl.store(request_out + o_t, b_request, mask=m_t)
    tl.store(length_out + o_t, tl.where(b_left > 0, tl.maximum(b_length, 0), 0), mask=m_t)


def step_tokens(
    starts: torch.Tensor, seq_lens: torch.Tensor, request_out: torch.Tensor, length_out: torch.Tensor
) -> None:
    """Into int32 [T] each: the request of a token, and the positions it may see, itself included; 0 for padding.

    starts int32 [R + 1], R > 0: first tokens of requests, and the end of the last; tokens behind it are padding of the
    last request. seq_lens int32 [R]: context lengths with this step's tokens.
    """
    requests, tokens = seq_lens.shape[0], request_out.shape[0]
    everything = (starts, seq_lens, request_out, length_out)
    require(starts.shape == (requests + 1,) and requests > 0, f"starts must be [{requests + 1}], of a request or more")
    require(length_out.shape == (tokens,), f"both outputs must be [{tokens}]")
    require(all(t.dtype == torch.int32 and t.is_contiguous() for t in everything), "all must be contiguous int32")
    if tokens:
        step_tokens_kernel[(triton.cdiv(tokens, _TOKENS),)](
            *everything, tokens, requests, BT=_TOKENS, BR=_REQUESTS, num_warps=4
        )
