"""What the model folder says about the model, as far as a server's command depends on it.

The folder may come from anyone, so every file is read with a bound and every field is checked for its type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5deploy.errors import DeployError, FileFormatError

_LARGEST_JSON = 64 << 20  # tokenizer.json of the real model has 20 MB
_REAL_HIDDEN_SIZE = 6144  # every published GLM-5 checkpoint; smaller ones are test models with random weights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``weight_files`` with the sizes in bytes that the patch stage saw; ``special_tokens`` of the tokenizer."""

    index_topk: int
    context: int
    heads: int
    hidden_size: int
    mtp_layers: int
    special_tokens: frozenset[str]
    weight_files: tuple[tuple[Path, int], ...]
    has_chat_template: bool = True
    index_topk_pattern: str = ""
    """F or S a layer; empty where the folder names none and every layer has its own indexer."""

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in self.weight_files)

    @property
    def is_test_model(self) -> bool:
        """A model this small holds random weights: it can answer, but nothing sensible can be expected of it."""
        return self.hidden_size < _REAL_HIDDEN_SIZE


def read_model_facts(folder: Path) -> ModelFacts:
    """Read ``config.json``, ``tokenizer.json`` and ``glm5_gguf.json``; check that every weight file is there, whole.

    Raises DeployError when the folder or a weight file is missing or has another size, FileFormatError for content
    that the patch stage does not write.
    """
    if not folder.is_dir():
        raise DeployError(f"model folder {folder} does not exist", hint="glm5deploy patch builds it")
    config = _object(folder / "config.json")
    if config.get("model_type") != "glm_moe_dsa":
        raise FileFormatError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'glm_moe_dsa'",
            hint="glm5deploy patch --force rebuilds the folder from the GGUF file",
        )
    facts = ModelFacts(
        index_topk=_positive(config, "index_topk", folder),
        context=_positive(config, "max_position_embeddings", folder),
        heads=_positive(config, "num_attention_heads", folder),
        hidden_size=_positive(config, "hidden_size", folder),
        mtp_layers=config["num_nextn_predict_layers"] if type(config.get("num_nextn_predict_layers")) is int else 0,
        special_tokens=_special_tokens(folder / "tokenizer.json"),
        weight_files=_weight_files(folder / "glm5_gguf.json"),
        has_chat_template=(folder / "chat_template.jinja").is_file(),
        index_topk_pattern=_pattern(config, folder),
    )
    for path, size in facts.weight_files:
        check_weight_file(path, size)
    return facts


def check_weight_file(path: Path, size: int) -> None:
    """Raise DeployError unless ``path`` is a file of ``size`` bytes."""
    if not path.is_file():
        raise DeployError(f"weight file {path} is missing", hint="glm5deploy status names the stage to run again")
    if (found := path.stat().st_size) != size:
        raise DeployError(
            f"weight file {path} has {found} bytes, the patch stage saw {size}",
            hint="glm5deploy patch, after fetch and merge are up to date",
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise FileFormatError(f"{path} has {size} bytes, more than any model folder's JSON file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DeployError(f"{path} is missing", hint="glm5deploy patch builds the model folder") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not JSON: {error}", hint="glm5deploy patch --force") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path} holds no JSON object", hint="glm5deploy patch --force")
    return value


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise FileFormatError(
            f"{folder / 'config.json'}: {key} is {value!r}, expected a positive integer",
            hint="glm5deploy patch --force",
        )
    return value


def _pattern(config: dict[str, Any], folder: Path) -> str:
    pattern = config.get("index_topk_pattern", "")
    if not isinstance(pattern, str) or set(pattern) - {"F", "S"}:
        raise FileFormatError(
            f"{folder / 'config.json'}: index_topk_pattern is {pattern!r:.100}, expected the letters F and S",
            hint="glm5deploy patch --force",
        )
    return pattern


def _special_tokens(path: Path) -> frozenset[str]:
    added = _object(path).get("added_tokens")
    if not isinstance(added, list):
        return frozenset()
    return frozenset(
        entry["content"] for entry in added if isinstance(entry, dict) and isinstance(entry.get("content"), str)
    )


def _weight_files(path: Path) -> tuple[tuple[Path, int], ...]:
    manifest = _object(path)
    files, sizes = manifest.get("files"), manifest.get("sizes")
    if (
        not isinstance(files, list)
        or not isinstance(sizes, list)
        or not files
        or len(files) != len(sizes)
        or not all(isinstance(name, str) and Path(name).is_absolute() for name in files)
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise FileFormatError(
            f"{path}: files and sizes must be lists of the same length, of absolute paths and of bytes",
            hint="glm5deploy patch --force",
        )
    return tuple((Path(name), size) for name, size in zip(files, sizes, strict=True))
