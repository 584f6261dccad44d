"""Index keys and head weights from hidden states, opaque to torch.compile as vLLM's own operations are."""

# No `from __future__ import annotations` here: torch derives the operation's schema from annotations that are objects.
import torch
from vllm.utils.torch_utils import direct_register_custom_op


def glm5_index_product(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states [T, hidden] times weight [128 + J, hidden] -> [T, 128 + J]; many tokens are cuBLAS's."""
    from glm5deploy.kernels.row_product import MOST_TOKENS, row_product

    if hidden_states.shape[0] <= MOST_TOKENS and hidden_states.is_contiguous():
        return row_product(hidden_states, weight)
    return torch.nn.functional.linear(hidden_states, weight)


def _fake(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden_states.new_empty((hidden_states.shape[0], weight.shape[0]))


direct_register_custom_op(op_name="glm5_index_product", op_func=glm5_index_product, mutates_args=[], fake_impl=_fake)
OP = torch.ops.vllm.glm5_index_product
