"""Routed experts with fewer launches against vLLM's own runner: ``python -m tests.support.interpreted_experts FOLDER``.

The real model is built by the real loader, and the runner of a layer takes steps of few and of many tokens. Prints a
JSON object: ``built`` is how runners are built here, ``steps`` has a record for each number of tokens (the largest
relative ``error``, how many ``sums`` took the shared expert, ``watched``: the same while someone records choices),
``ranks`` has how many sums over ranks vLLM's own runner and ours make of a step, and the ``error`` with them,
``one`` has records of steps where one token's shared expert and choice are in the products: besides, how often they
were ``launched`` so, ``obstacles`` says why changed layers would not be fused, ``slots`` and ``choices`` why they would
be without either, ``compiled`` whether torch.compile takes the runner whole, and
``prepared`` names what warm-up launches. Kernels run under Triton's interpreter, so this is a process of its own.
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
from tests.support.built_model import load, single_rank

STEPS = (1, 3, 32, 33)
ONE = (1, 2)


def run(config: Any, runner: Any, x: torch.Tensor) -> torch.Tensor:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with (
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=len(x)),
        torch.inference_mode(),
    ):
        return runner(hidden_states=x.clone(), router_logits=x)  # type: ignore[no-any-return]


def steps(config: Any, runner: Any, launched: list[int]) -> list[dict[str, Any]]:
    records = []
    for tokens in STEPS:
        x = torch.randn(tokens, runner.moe_config.hidden_dim, generator=torch.Generator().manual_seed(tokens))
        runner.fused = False
        expected = run(config, runner, x)
        runner.fused = True
        launched.clear()
        found = run(config, runner, x)
        record = {"tokens": tokens, "error": error(found, expected), "sums": len(launched)}
        seen: list[torch.Tensor] = []
        runner.router.set_capture_fn(seen.append)
        same = torch.allclose(run(config, runner, x), expected, rtol=1e-5, atol=1e-6)
        runner.router.set_capture_fn(None)
        records.append({**record, "watched": same and [len(ids) for ids in seen] == [tokens]})
    return records


def grouped(runner: Any) -> Any:
    """The router that a GPU's engine has."""
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    held = runner.router
    return GroupedTopKRouter(
        held.top_k,
        held.global_num_experts,
        held.num_expert_group,
        held.topk_group,
        held.renormalize,
        held.scoring_func,
        held.routed_scaling_factor,
        held.e_score_correction_bias,
    )


def one(config: Any, runner: Any) -> list[dict[str, Any]]:
    """Kernels compute, and vLLM's router is not asked for what they choose."""
    from glm5deploy.vllm_plugin import quantised_ops

    calls: list[Any] = []

    def launched(x: Any, planes: Any, shared: Any, choice: Any) -> torch.Tensor:
        calls.append(choice)
        return quantised_ops._one_on_gpu(x, planes, shared, choice)

    plain, quantised_ops._one = quantised_ops._one, launched
    records = []
    for tokens in ONE:
        x = torch.randn(tokens, runner.moe_config.hidden_dim, generator=torch.Generator().manual_seed(tokens))
        runner.fused = runner.together = False
        expected = run(config, runner, x)
        runner.fused = runner.together = True
        calls.clear()
        found = run(config, runner, x)
        record = {"tokens": tokens, "error": error(found, expected), "launched": len(calls)}
        seen: list[torch.Tensor] = []
        runner.router.set_capture_fn(seen.append)
        calls.clear()
        same = torch.allclose(run(config, runner, x), expected, rtol=1e-5, atol=1e-6)
        runner.router.set_capture_fn(None)
        records.append({**record, "watched": same and not calls and [len(ids) for ids in seen] == [tokens]})
    quantised_ops._one = plain
    return records


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def over_ranks(config: Any, runner: Any) -> list[dict[str, Any]]:
    """As one of two ranks, by tensor or expert parallelism, with a sum over ranks that gives three times its input."""
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    summed: list[int] = []

    def thrice(part: torch.Tensor) -> torch.Tensor:
        summed.append(len(part))
        return 3 * part

    plain, moe_runner.tensor_model_parallel_all_reduce = moe_runner.tensor_model_parallel_all_reduce, thrice
    parallel, records = runner.moe_config.moe_parallel_config, []
    for kind in ("tp_size", "ep_size"):
        held = getattr(parallel, kind)
        setattr(parallel, kind, 2)
        for tokens in (3, 33):
            x = torch.randn(tokens, runner.moe_config.hidden_dim, generator=torch.Generator().manual_seed(tokens))
            outs, counts = [], []
            for runner.fused in (False, True):
                summed.clear()
                outs.append(run(config, runner, x))
                counts.append(summed.copy())
            records.append({"kind": kind, "tokens": tokens, "sums": counts, "error": error(outs[1], outs[0])})
        setattr(parallel, kind, held)
    moe_runner.tensor_model_parallel_all_reduce = plain
    return records


def obstacles(runner: Any) -> list[str | None]:
    from glm5deploy.vllm_plugin.experts import why_not

    return changed(
        why_not,
        runner,
        (runner, "gate", None),
        (runner.router, "eplb_state", object()),
        (runner, "_shared_experts", None),
        (runner, "routed_scaling_factor", 2.5),
        (runner, "enable_dbo", True),
        (runner.routed_experts, "quant_method", SimpleNamespace()),
    )


def slots(runner: Any) -> list[str | None]:
    from glm5deploy.vllm_plugin.experts_together import shared_obstacle

    layer = runner._shared_experts._layer
    return changed(
        shared_obstacle,
        runner,
        (layer, "act_fn", torch.nn.SiLU()),
        (layer.down_proj, "quant_method", SimpleNamespace()),
        (layer.gate_up_proj, "bias", torch.zeros(1)),
        (layer.down_proj, "reduce_results", True),
        (runner.routed_experts, "_expert_map", torch.zeros(4)),
        (runner._shared_experts, "_layer", halved(layer)),
    )


def halved(layer: Any) -> Any:
    """A shared expert that gives half of what it should, to be refused by its shape."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP

    other = DeepseekV2MLP.__new__(DeepseekV2MLP)
    torch.nn.Module.__init__(other)
    other.act_fn, other.gate_up_proj, other.down_proj = layer.act_fn, layer.gate_up_proj, torch.nn.Module()
    method = type(layer.down_proj.quant_method).__new__(type(layer.down_proj.quant_method))
    whole = layer.down_proj.quant_method.parameters
    (down,) = whole.planes(layer.down_proj)
    half = type(down)(down.format, down.rows // 2, down.columns, down.low, down.high, down.words, down.halves)
    method.parameters = SimpleNamespace(planes=lambda layer: [half])
    other.down_proj.quant_method, other.down_proj.bias, other.down_proj.reduce_results = method, None, False
    return other


def choices(runner: Any) -> list[str | None]:
    from glm5deploy.vllm_plugin.experts_together import choice_obstacle

    router = runner.router
    return changed(
        choice_obstacle,
        runner,
        (router, "num_expert_group", 2),
        (router, "scoring_func", "softmax"),
        (router, "renormalize", False),
        (router, "e_score_correction_bias", None),
        (router, "e_score_correction_bias", router.e_score_correction_bias.bfloat16()),
        (runner.gate, "out_dtype", torch.bfloat16),
        (router, "num_fused_shared_experts", 1),
        (router, "skip_padding", True),
        (runner.routed_experts, "_expert_map", torch.zeros(4)),
        (runner, "router", SimpleNamespace()),
    )


def changed(why: Callable[[Any], str | None], runner: Any, *changes: tuple[Any, str, Any]) -> list[str | None]:
    """What ``why`` says of the runner as a GPU's engine has it, and with one thing after the other changed."""
    found = [why(runner)]
    for part, name, value in changes:
        held = vars(part).get(name, getattr(part, name))
        modules = getattr(part, "_modules", {})
        if name in modules:
            modules[name] = value
        else:
            part.__dict__[name] = value
        found.append(why(runner))
        if name in modules:
            modules[name] = held
        else:
            part.__dict__[name] = held
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
    runner.together = True
    with set_current_vllm_config(config), torch.inference_mode():
        found = experts_warmup.launches(torch.float32)
        for launch in found:
            launch.call()
    return [str(launch.variant[0]) for launch in found]


def main() -> None:
    glm5deploy.vllm_plugin.register()
    from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod

    launched: list[int] = []
    plain = Glm5MoeMethod.sum

    def counted(self: Any, layer: Any, x: Any, weights: Any, ids: Any, beside: Any = None) -> Any:
        if beside is not None:
            launched.append(len(x))
        return plain(self, layer, x, weights, ids, beside)

    Glm5MoeMethod.sum = counted  # type: ignore[method-assign]
    with single_rank():
        config, model = load(Path(sys.argv[1]), "quantised")
        runners = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        report = {
            "built": [runner.fused for runner in runners],
            "obstacles": obstacles(runners[0]),
            "slots": slots(runners[0]),
            "steps": steps(config, runners[0], launched),
            "ranks": over_ranks(config, runners[0]),
            "compiled": compiled(config, runners[0]),
        }
        runners[0].router = grouped(runners[0])
        with torch.compiler.set_stance("force_eager"):  # vLLM compiles its router
            report |= {"choices": choices(runners[0]), "one": one(config, runners[0])}
        report["prepared"] = prepared(config, runners[0])
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
