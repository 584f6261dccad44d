"""Every preset is read by `--config`, makes a command that can be started, and fits the GPUs it is named after."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.config import Config, load_config
from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern
from glm5deploy.hardware.gpus import parse_gpus
from glm5deploy.server.command import build_command
from glm5deploy.server.settings import ServeSettings
from glm5deploy.stages.model_headers import open_headers
from glm5deploy.stages.plan_words import Rates
from glm5deploy.stages.planning import make_deployment_plan
from tests.support.data import REPOSITORY
from tests.support.real_headers import write_real_set
from tests.support.serving import facts

CONFIGS = REPOSITORY / "configs"
GPUS = {
    "8x-rtx-pro-6000": "8x RTX PRO 6000",
    "8x-a100-80g": "8x A100 80 GB",
    "8x-h100": "8x H100",
    "8x-h200": "8x H200",
    "4x-rtx-pro-6000": "4x RTX PRO 6000",
    "16x-a100-40g": "16x A100 40 GB",
}
# A mix in the manner of a three-bit file: 4.0 bits a weight over all.
THREE_BITS = {"ffn_gate_exps": "Q3_K", "ffn_up_exps": "Q3_K", "ffn_down_exps": "Q3_K"}


def preset(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.toml", {}, {})


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_set(tmp_path_factory.mktemp("four") / "UD-Q4_K_XL")[0]


@pytest.fixture(scope="module")
def three_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_set(tmp_path_factory.mktemp("three") / "UD-Q3_K_XL", types=THREE_BITS)[0]


def test_no_preset_is_forgotten() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*GPUS, "cpu-demo"}


@pytest.mark.parametrize("name", [*GPUS, "cpu-demo"])
def test_a_preset_is_commented_and_makes_a_command(name: str) -> None:
    assert (CONFIGS / f"{name}.toml").read_text().startswith("# ")
    serve = preset(name).serve
    settings = ServeSettings(
        model_folder=Path("/m"),
        device="cpu" if name == "cpu-demo" else "cuda",
        tp=serve.tp,
        pp=serve.pp,
        host=serve.host,
        context=serve.context or None,
        dtype=serve.dtype,
        kv_dtype=serve.kv_dtype,
        max_seqs=serve.max_num_seqs or None,
        mtp=serve.mtp,
        gpu_memory=serve.gpu_memory or None,
        custom_all_reduce=serve.custom_all_reduce != "off",
        extra=serve.extra,
    )
    model = facts(context=1_048_576, index_topk_pattern=glm_5_2_pattern())
    command = build_command(settings, model, serve.weights, launcher=("vllm", "serve"))
    words = list(command.vllm_arguments)
    assert words[words.index("--tensor-parallel-size") + 1] == str(serve.tp)
    assert words[words.index("--max-model-len") + 1] == str(serve.context)
    assert ("--disable-custom-all-reduce" in words) == (serve.custom_all_reduce == "off")
    assert command.env.get("VLLM_PP_LAYER_PARTITION") == ("38,40" if serve.pp == 2 else None)
    assert settings.loopback_only


@pytest.mark.parametrize("name", GPUS)
def test_a_preset_fits_its_gpus(name: str, four_bits: Path, three_bits: Path, tmp_path: Path) -> None:
    config, group = preset(name), parse_gpus(GPUS[name])
    found = open_headers(str(three_bits if "Q3" in config.model.quant else four_bits))
    plan = make_deployment_plan(found, group, config, tmp_path, Rates())
    assert plan["fits"], plan["notes"]
    assert plan["layout"] == {"tp": config.serve.tp, "pp": config.serve.pp, "ep": False, "obstacles": []}
    assert plan["cache"]["sequences_of_that_context"] >= 1
    assert config.serve.tp * config.serve.pp == group.count


def test_four_gpus_cannot_hold_four_bits(four_bits: Path, tmp_path: Path) -> None:
    plan = make_deployment_plan(
        open_headers(str(four_bits)), parse_gpus("4x RTX PRO 6000"), preset("4x-rtx-pro-6000"), tmp_path, Rates()
    )
    assert not plan["fits"]


def test_pcie_presets_switch_the_custom_all_reduce_off() -> None:
    for name, gpus in GPUS.items():
        if parse_gpus(gpus).gpu.pcie_only:
            assert preset(name).serve.custom_all_reduce == "off", name
