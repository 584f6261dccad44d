"""What a GGUF model that this project writes has beside its numbers: metadata, and which tensors it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from glm5deploy.demo.tiny_tokenizer import CHAT_TEMPLATE, TinyTokenizer
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE
from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.tensor_names import Placement, place, required_names

if TYPE_CHECKING:
    import gguf

Keys = Mapping[str, int | float | bool]
"""The architecture's keys, without its prefix."""

_SCHEDULE = f"{ARCHITECTURE}.attention.indexer.types"


def metadata_of(keys: Keys, schedule: Sequence[bool]) -> dict[str, object]:
    """The keys that hyper-parameters are read from; ``schedule`` says which layers have an indexer of their own."""
    named = {f"{ARCHITECTURE}.{name}": value for name, value in keys.items()}
    return {"general.architecture": ARCHITECTURE, **named, _SCHEDULE: tuple(schedule)}


def add_metadata(
    writer: gguf.GGUFWriter, name: str, keys: Keys, schedule: Sequence[bool], tokenizer: TinyTokenizer
) -> None:
    """Every key that a converted model has."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_sampling_temp(1.0)
    writer.add_sampling_top_p(0.95)
    for key, value in keys.items():
        full = f"{ARCHITECTURE}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_float32(full, value)
    writer.add_array(_SCHEDULE, list(schedule))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types(list(tokenizer.types))
    writer.add_token_merges(list(tokenizer.merges))
    writer.add_eos_token_id(tokenizer.id_of("<|endoftext|>"))
    writer.add_eot_token_id(tokenizer.id_of("<|user|>"))
    writer.add_eom_token_id(tokenizer.id_of("<|observation|>"))
    writer.add_pad_token_id(tokenizer.id_of("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_quantization_version(2)
    writer.add_file_type(15)


def required(hparams: Hparams, schedule: Sequence[bool], *, use_mtp: bool) -> list[str]:
    """Names of the tensors that loading demands, layer by layer; the output head is not among them."""
    indexers = {f"blk.{layer}.indexer.attn_k.weight" for layer, full in enumerate(schedule) if full}
    groups = required_names(hparams, resolve_schedule(hparams, indexers), use_mtp=use_mtp)
    return [name for group in groups for name in group[0].split("+")]


def placements(names: Iterable[str], hparams: Hparams) -> Iterator[Placement]:
    for name in names:
        placement = place(name, hparams)
        assert placement is not None
        yield placement
