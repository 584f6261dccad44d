"""The rebuilt folder against the originals' Hugging Face files, through the real transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.glm_dsa.model_folder import POINTER, write_model_folder
from tests.support.data import SET_A, tiny_glm5
from tests.support.folders import folder_of, write_folder_of

A = "GLM-tiny-A-GGUF/UD-Q4_K_XL"
B_Q8 = "GLM-tiny-B-GGUF/GLM-tiny-B-Q8_0.gguf"
B_Q4 = "GLM-tiny-B-GGUF/Q4_K_M"
CASES = {
    "A": (A, None, "FFFF", "context length"),
    "B-Q8_0": (B_Q8, None, "FSFS", "file"),
    "B-Q4_K_M": (B_Q4, "FSFS", "FSFS", "option"),
}
# Lost in the conversion to GGUF, and without effect on what the model computes. The schedule comes as a pattern.
LOST = {"ep_size", "pretraining_tp", "index_share_for_mtp_iteration", "transformers_version", "_name_or_path"}
SCHEDULE = {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"}


@pytest.fixture(scope="module", params=CASES)
def rebuilt(request, tmp_path_factory):
    """The folder of one set, its original, and what is expected of the schedule."""
    file, override, pattern, source = CASES[request.param]
    folder = write_folder_of(tiny_glm5() / file, tmp_path_factory.mktemp("model"), schedule=override)
    original = tiny_glm5() / "hf" / ("GLM-tiny-A" if request.param == "A" else "GLM-tiny-B")
    return folder, original, pattern, source


def load(path: Path):
    return json.loads(path.read_text())


def test_config_is_the_originals(rebuilt):
    from transformers import AutoConfig

    folder, original, pattern, _ = rebuilt
    ours, theirs = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, original))
    assert {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)} <= LOST | SCHEDULE | {
        "moe_router_dtype"
    }
    assert ours["indexer_types"] == theirs["indexer_types"] == [{"F": "full", "S": "shared"}[c] for c in pattern]


def test_config_says_what_fails_silently_when_left_out(rebuilt):
    folder, _, pattern, _ = rebuilt
    config = load(folder / "config.json")
    assert config["index_topk_pattern"] == pattern
    assert config["scoring_func"] == "sigmoid"
    assert config["topk_method"] == "noaux_tc"
    assert config["indexer_rope_interleave"] is True
    assert config["moe_router_dtype"] == "float32"
    assert config["eos_token_id"] == [1000, 1007, 1009]
    assert (config["bos_token_id"], config["tie_word_embeddings"]) == (None, False)


def test_generation_config_is_the_originals(rebuilt):
    from transformers import GenerationConfig

    folder, original, *_ = rebuilt
    ours, theirs = (GenerationConfig.from_pretrained(path).to_diff_dict() for path in (folder, original))
    theirs.pop("_from_model_config", None)
    assert ours == theirs


def test_tokenizer_gives_the_originals_ids_and_texts(rebuilt):
    from transformers import AutoTokenizer

    folder, original, *_ = rebuilt
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, original))
    golden = load(tiny_glm5() / "goldens" / "text.json")
    assert len(golden["texts"]) == 12
    for case in golden["texts"]:
        assert ours.encode(case["text"]) == case["ids"]
        assert ours.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert ours.decode(case["ids"]) == case["decoded"]
        assert ours.decode(case["ids"], skip_special_tokens=True) == case["decoded_skip_special"]
    for case in golden["chats"]:
        text = ours.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
        assert text == case["text"]
    assert (ours.eos_token_id, ours.pad_token_id, ours.bos_token_id) == (1000, 1000, None)
    assert (ours.model_max_length, ours.padding_side) == (theirs.model_max_length, "left")
    assert type(ours) is type(theirs)
    assert len(ours) == len(theirs) == 1014


def test_tokenizers_library_agrees_on_every_single_token(rebuilt):
    from tokenizers import Tokenizer

    folder, original, *_ = rebuilt
    ours, theirs = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (folder, original))
    assert ours.get_vocab() == theirs.get_vocab()
    samples = [theirs.decode([i], skip_special_tokens=False) for i in range(1014)]
    assert [e.ids for e in ours.encode_batch(samples)] == [e.ids for e in theirs.encode_batch(samples)]


def test_chat_template_keeps_its_bytes(rebuilt):
    folder, original, *_ = rebuilt
    assert (folder / "chat_template.jinja").read_bytes() == (original / "chat_template.jinja").read_bytes()


def test_pointer_names_the_weights(rebuilt):
    folder, _, pattern, source = rebuilt
    pointer = load(folder / POINTER)
    files = [Path(name) for name in pointer["files"]]
    assert all(path.is_absolute() and path.is_file() for path in files)
    assert files == sorted(files)
    assert pointer == {
        "version": 1,
        "files": [str(path) for path in files],
        "sizes": [path.stat().st_size for path in files],
        "index_topk_pattern": pattern,
        "schedule_source": source,
    }


def test_schedule_that_the_file_does_not_say_is_asked_for():
    with pytest.raises(DeployError, match="does not say which of its 4 layers") as caught:
        folder_of(tiny_glm5() / B_Q4)
    assert "--indexer-schedule" in caught.value.hint


def test_bytes_are_reproducible_and_the_merged_file_differs_in_the_pointer_only(tmp_path):
    shards = dict(folder_of(SET_A / A).files)
    assert shards == folder_of(SET_A / A).files
    source = next((SET_A / A).glob("*-00001-of-*"))
    merge(source, tmp_path / "merged.gguf")
    merged = dict(folder_of(tmp_path / "merged.gguf").files)
    assert json.loads(merged.pop(POINTER))["files"] == [str(tmp_path / "merged.gguf")]
    assert len(json.loads(shards.pop(POINTER))["files"]) == 4
    assert merged == shards


def test_unfinished_folder_is_recognisable(tmp_path, monkeypatch):
    """Interrupted at any file, the folder has no pointer; written again, it has the same bytes as ever."""
    files = folder_of(SET_A / A).files
    write_model_folder(tmp_path, files)
    original = Path.replace
    for survivors in range(len(files)):
        renamed = 0

        def replace(self, target, survivors=survivors):
            nonlocal renamed
            if renamed == survivors:
                raise KeyboardInterrupt
            renamed += 1
            return original(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            write_model_folder(tmp_path, files)
        assert not (tmp_path / POINTER).exists()
    monkeypatch.setattr(Path, "replace", original)
    write_model_folder(tmp_path, files)
    assert {name: (tmp_path / name).read_bytes() for name in files} == dict(files)


def test_stale_chat_template_goes_and_other_files_stay(tmp_path):
    files = dict(folder_of(SET_A / A).files)
    write_model_folder(tmp_path, files)
    (tmp_path / "notes.txt").write_text("mine")
    del files["chat_template.jinja"]
    write_model_folder(tmp_path, files)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
