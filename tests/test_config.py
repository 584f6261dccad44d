from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.config import load_config
from glm5deploy.errors import UsageError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "glm5deploy.toml"
    file.write_text(text)
    return file


def test_flags_beat_variables_beat_the_file_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[serve]\ntp = 2\nport = 1\nhost = "::1"\nextra = ["--seed", "1"]\n[fetch]\nstall_seconds = 5\n'
    )
    environment = {"GLM5DEPLOY_SERVE_PORT": "2", "GLM5DEPLOY_SERVE_TP": "4", "GLM5DEPLOY_MERGE_CONSUME": "yes"}
    config = load_config(file, environment, {"serve.tp": 8, "serve.pp": None})
    assert (config.serve.tp, config.serve.port, config.serve.host, config.serve.pp) == (8, 2, "::1", 1)
    assert config.serve.extra == ("--seed", "1")
    assert config.merge.consume is True
    assert config.fetch.stall_seconds == 5.0
    assert config.origin("serve.tp") == "flag"
    assert config.origin("serve.port") == "variable GLM5DEPLOY_SERVE_PORT"
    assert config.origin("serve.host") == f"file {file}"
    assert config.origin("serve.pp") == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serv]\ntp = 1", r"unknown section \[serv\]"),
        ("[serve]\ntpp = 1", "unknown setting serve.tpp"),
        ("tp = 1", r"unknown section \[tp\]"),
        ('[serve]\ntp = "two"', "serve.tp must be a int, not 'two'"),
        ("[serve]\ntp = true", "serve.tp must be a int"),
        ('[merge]\nmode = "sometimes"', "must be one of always, auto, never"),
        ("[serve]\nextra = [1]", "must be a list of strings"),
        ("[serve", "not valid TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        load_config(write(tmp_path, text), {}, {})
    assert str(tmp_path) in raised.value.message


def test_a_misspelt_setting_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        load_config(write(tmp_path, "[serve]\nprot = 1"), {}, {})
    assert raised.value.hint == "did you mean serve.port?"


@pytest.mark.parametrize(("value", "message"), [("many", "must be a number"), ("1.5", "must be a number")])
def test_a_bad_variable_is_named(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"GLM5DEPLOY_SERVE_TP {message}"):
        load_config(None, {"GLM5DEPLOY_SERVE_TP": value}, {})


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load_config(tmp_path / "none.toml", {}, {})


def test_an_earlier_flag_stands_below_everything_else(tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\nquant = "B"\n')
    earlier = {"model.repo": "a/b", "model.quant": "A", "patch.gone": 1}
    config = load_config(file, {}, {}, earlier)
    assert (config.model.repo, config.model.quant) == ("a/b", "B")
    assert config.origin("model.repo") == "earlier flag"


def test_a_misspelt_variable_is_refused_and_other_variables_are_not_settings() -> None:
    with pytest.raises(UsageError, match="GLM5DEPLOY_SERVE_TPP") as raised:
        load_config(None, {"GLM5DEPLOY_SERVE_TPP": "8"}, {})
    assert raised.value.hint == "did you mean GLM5DEPLOY_SERVE_TP?"
    load_config(None, {"GLM5DEPLOY_WORKDIR": "/x", "GLM5DEPLOY_API_KEY": "k", "GLM5DEPLOY_TRACE_DIR": "/t"}, {})
