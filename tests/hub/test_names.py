"""Shard names, quantisation labels and hostile paths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5deploy.errors import HubError
from glm5deploy.hub.names import check_repository_path, parse_gguf_name, quant_label

STEMS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)


@settings(deadline=None)
@given(st.one_of(st.just(""), STEMS), STEMS, st.integers(1, 99999), st.data())
def test_shard_names_round_trip(folder: str, stem: str, count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, count))
    path = f"{folder}/{stem}-{number:05d}-of-{count:05d}.gguf".lstrip("/")
    name = parse_gguf_name(path)
    assert name is not None
    assert (name.folder, name.stem, name.number, name.count) == (folder, stem, number, count)
    assert name.sibling(number) == path
    other = parse_gguf_name(name.sibling(1))
    assert other is not None
    assert (other.one_set, other.number) == (name.one_set, 1)


@settings(deadline=None)
@given(st.text())
def test_any_text_parses_or_is_no_gguf(path: str) -> None:
    name = parse_gguf_name(path)
    if name is None:
        assert not path.endswith(".gguf") or path.rpartition("/")[2] == ".gguf"
    else:
        assert 1 <= name.number <= name.count <= 999999
        assert name.sibling(name.number) == path or path.startswith("/")


@pytest.mark.parametrize(
    ("path", "stem", "number", "count"),
    [
        ("Q4/m-00002-of-00011.gguf", "m", 2, 11),
        ("m-00012-of-00011.gguf", "m-00012-of-00011", 1, 1),
        ("m-00000-of-00011.gguf", "m-00000-of-00011", 1, 1),
        ("m-01-of-02.gguf", "m", 1, 2),
        ("m.gguf", "m", 1, 1),
    ],
)
def test_numbers_must_make_sense(path: str, stem: str, number: int, count: int) -> None:
    name = parse_gguf_name(path)
    assert name is not None
    assert (name.stem, name.number, name.count, name.sibling(number)) == (stem, number, count, path)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("GLM-5.2-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("GLM-5.2-Q4_K_XL", "Q4_K_XL"),
        ("GLM-5.1.i1-IQ2_XXS", "i1-IQ2_XXS"),
        ("GLM-5.1-smol-IQ4_K", "smol-IQ4_K"),
        ("GLM-5.2-BF16", "BF16"),
        ("GLM-tiny-B-Q8_0", "Q8_0"),
        ("GLM-5.2-TQ1_0", "TQ1_0"),
        ("GLM-5.2", None),
        ("Q4_K_M-draft", None),
    ],
)
def test_labels(name: str, label: str | None) -> None:
    assert quant_label(name) == label


HOSTILE = [
    "../evil.gguf",
    "a/../../evil.gguf",
    "/etc/passwd",
    "//host/share.gguf",
    "a//b.gguf",
    "a/./b.gguf",
    "..",
    "",
    "a/",
    "C:\\evil.gguf",
    "C:evil.gguf",
    "a\\..\\evil.gguf",
    "a\0b.gguf",
    "a\nb.gguf",
    "a\u202eb.gguf",
    ".fetch/plans/x.json",
    "x" * 201 + ".gguf",
    None,
    7,
]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_are_refused(path: object) -> None:
    with pytest.raises(HubError):
        check_repository_path(path)


@settings(deadline=None)
@given(st.text())
def test_accepted_paths_stay_below_the_folder(path: str) -> None:
    from pathlib import Path, PurePosixPath

    try:
        checked = check_repository_path(path)
    except HubError:
        return
    assert checked == path
    assert not PurePosixPath(path).is_absolute()
    root = Path("/srv/download")
    assert (root / path).is_relative_to(root)
    assert ".." not in PurePosixPath(path).parts
