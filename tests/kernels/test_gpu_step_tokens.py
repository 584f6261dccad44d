"""On a GPU: a step's bookkeeping in one launch, against torch's twelve; and how long both take.

Run there with `pytest -m gpu -s tests/kernels/test_gpu_step_tokens.py`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.step_tokens import step_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("queries", [[1], [1] * 32, [1] * 200 + [0] * 56, [1, 1, 8000, 190]], ids=len)
def test_it_is_what_torch_counts(queries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # filling fresh memory with poison would be timed too
    starts = torch.tensor([0, *queries], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([n + 4000 if n else 0 for n in queries], dtype=torch.int32, device="cuda")
    tokens = sum(queries) + 5  # some of them padding
    token = torch.arange(tokens, dtype=torch.int32, device="cuda")
    expected, request, length = token.repeat(2, 1), token.clone(), token.clone()

    def several() -> None:
        of = torch.searchsorted(starts[1:], token, right=True).clamp_(max=len(queries) - 1)
        expected[0].copy_(of)
        left = starts[1:][of] - token
        expected[1].copy_(torch.where(left > 0, lengths[of] - left + 1, 0).clamp_(min=0))

    several()
    step_tokens(starts, lengths, request, length)
    assert torch.equal(torch.stack((request, length)), expected)
    one = graph_time([lambda: step_tokens(starts, lengths, request, length)])
    print(
        f"\n{tokens} tokens of {len(queries)} requests: one launch {one:.2f} us, several {graph_time([several]):.2f} us"
    )
