"""Routed experts with fewer launches against vLLM's own runner: ``python -m tests.support.interpreted_experts FOLDER``.

The real model is built by the real loader, and the runner of a layer takes steps of few and of many tokens. Prints a
JSON object: ``built`` is how runners are built here, ``steps`` has a record for each number of tokens (the largest
relative ``error``, how often the ``router`` was launched, ``watched``: the same while someone records choices),
``chosen`` the difference between our router's choice and that of vLLM's router classes, ``obstacles`` says why changed
layers would not be fused, ``compiled`` whether torch.compile takes the runner whole, and ``prepared`` names what
warm-up launches. The kernel runs under Triton's interpreter, so this is a process of its own.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter, before anything imports Triton

import torch  # isort: skip
import glm5deploy.vllm_plugin
from glm5deploy.quants import router
from tests.support.built_model import load, single_rank

STEPS = (1, 3, 8, 9, 32, 33)


def run(config: Any, runner: Any, x: torch.Tensor) -> torch.Tensor:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with (
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=len(x)),
        torch.inference_mode(),
    ):
        return runner(hidden_states=x.clone(), router_logits=x)  # type: ignore[no-any-return]


def unpack_router(runner: Any) -> None:
    """vLLM's CPU engine packs the router's weights for its own product and leaves none; a GPU's keeps them."""
    with torch.inference_mode():
        rows = runner.gate(torch.eye(runner.moe_config.hidden_dim))[0]
    runner.gate.weight = torch.nn.Parameter(rows.T.contiguous(), requires_grad=False)


def steps(config: Any, runner: Any, launched: list[int]) -> list[dict[str, Any]]:
    records = []
    for tokens in STEPS:
        x = torch.randn(tokens, runner.moe_config.hidden_dim, generator=torch.Generator().manual_seed(tokens))
        runner.fused = False
        expected = run(config, runner, x)
        runner.fused = True
        launched.clear()
        found = run(config, runner, x)
        record = {"tokens": tokens, "error": error(found, expected), "router": len(launched)}
        launched.clear()
        seen: list[torch.Tensor] = []
        runner.router.set_capture_fn(seen.append)
        same = torch.allclose(run(config, runner, x), expected, rtol=1e-5, atol=1e-6)
        runner.router.set_capture_fn(None)
        records.append({**record, "watched": same and not launched and [len(ids) for ids in seen] == [tokens]})
    return records


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def grouped_router(runner: Any) -> Any:
    """The router that vLLM builds on a GPU, over the layer's own parameters."""
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    own = runner.router
    return GroupedTopKRouter(
        top_k=own.top_k,
        global_num_experts=own.global_num_experts,
        num_expert_group=1,
        topk_group=1,
        renormalize=own.renormalize,
        scoring_func=own.scoring_func,
        routed_scaling_factor=own.routed_scaling_factor,
        e_score_correction_bias=own.e_score_correction_bias,
    )


def by_expert(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros(len(ids), experts).scatter_(1, ids.long(), weights)


def chosen(config: Any, runner: Any) -> dict[str, float]:
    """The largest difference of a weight between ours and each of vLLM's classes: an expert more or less is one."""
    from vllm.config import set_current_vllm_config

    experts, found = len(runner.gate.weight), {}
    x = torch.randn(64, runner.moe_config.hidden_dim, generator=torch.Generator().manual_seed(3))
    with set_current_vllm_config(config), torch.inference_mode():
        ours = torch.cat([by_expert(*runner.select(part), experts) for part in x.split(router.MOST_TOKENS)])
        logits = runner.gate(x)[0]
        for other in (runner.router, grouped_router(runner)):
            weights, ids = other.select_experts(hidden_states=x, router_logits=logits)
            theirs = by_expert(ids, weights, experts)
            found[type(other).__name__] = float((ours - theirs).abs().max() / theirs.max())
    return found


def obstacles(runner: Any) -> list[str | None]:
    """Of the runner as a GPU's engine has it, and with one thing after the other changed."""
    from glm5deploy.vllm_plugin.experts import why_not

    own, runner.router = runner.router, grouped_router(runner)
    found = [why_not(runner)]
    for part, name, value in (
        (runner.router, "scoring_func", "softmax"),
        (runner.router, "eplb_state", object()),
        (runner.gate.weight, "data", runner.gate.weight.data.bfloat16()),
        (runner, "_shared_experts", None),
        (runner, "routed_scaling_factor", 2.5),
        (runner, "enable_dbo", True),
        (runner.routed_experts, "quant_method", SimpleNamespace()),
        (runner, "router", own),
    ):
        before = getattr(part, name)
        part.__dict__[name] = value
        if name == "data":
            part.data = value
        found.append(why_not(runner))
        part.__dict__[name] = before
        if name == "data":
            part.data = before
    runner.router = own
    return found


def compiled(config: Any, runner: Any) -> bool:
    """Whether torch.compile takes the runner whole, for any number of tokens, and gives the same numbers."""
    runner.fused = True
    plain: Callable[..., Any] = runner.forward
    x = torch.randn(12, runner.moe_config.hidden_dim)
    expected = [run(config, runner, x[:n]) for n in (12, 5)]
    runner.forward = torch.compile(plain, backend="eager", fullgraph=True, dynamic=True)
    found = [run(config, runner, x[:n]) for n in (12, 5)]
    del runner.forward
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def prepared(config: Any, runner: Any) -> list[str]:
    from vllm.config import set_current_vllm_config

    from glm5deploy.vllm_plugin import experts, experts_warmup

    experts.fused.append(weakref.ref(runner))
    with set_current_vllm_config(config), torch.inference_mode():
        found = experts_warmup.launches(20, torch.float32)
        for launch in found:
            launch.call()
    return [str(launch.variant[0]) for launch in found]


def main() -> None:
    glm5deploy.vllm_plugin.register()
    launched: list[int] = []
    plain = router.router

    def counted(*arguments: Any) -> Any:
        launched.append(0)
        return plain(*arguments)

    router.router = counted
    with single_rank():
        config, model = load(Path(sys.argv[1]), "quantised")
        runners = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        unpack_router(runners[0])
        report = {
            "built": [runner.fused for runner in runners],
            "obstacles": obstacles(runners[0]),
            "steps": steps(config, runners[0], launched),
            "chosen": chosen(config, runners[0]),
            "compiled": compiled(config, runners[0]),
            "prepared": prepared(config, runners[0]),
        }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
