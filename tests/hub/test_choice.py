"""Which set of files a quantisation's name picks."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5deploy.errors import HubError, UsageError
from glm5deploy.hub.choice import RemoteFile, checked_file, choose_set, group_sets


def remote(path: str, size: int = 1000) -> RemoteFile:
    digest = hashlib.sha256(path.encode()).hexdigest()
    return RemoteFile(path, size, digest[:40], digest)


def split(prefix: str, count: int, size: int = 1000) -> list[RemoteFile]:
    return [remote(f"{prefix}-{n:05d}-of-{count:05d}.gguf", size) for n in range(1, count + 1)]


UNSLOTH = [
    remote("README.md"),
    remote("imatrix_unsloth.gguf"),
    *split("UD-Q4_K_XL/GLM-5.2-UD-Q4_K_XL", 11, 40_000_000_000),
    *split("Q4_K_XL/GLM-5.2-Q4_K_XL", 10, 41_000_000_000),
    *split("UD-IQ2_M/GLM-5.2-UD-IQ2_M", 6, 39_000_000_000),
]
FLAT = [remote("GLM-Q4_K_M.gguf"), remote("GLM-UD-Q4_K_M.gguf"), remote("GLM-Q4_K.gguf"), *split("GLM-Q8_0", 3)]


@pytest.mark.parametrize(
    ("files", "quant", "first"),
    [
        (UNSLOTH, "UD-Q4_K_XL", "UD-Q4_K_XL/GLM-5.2-UD-Q4_K_XL-00001-of-00011.gguf"),
        (UNSLOTH, "Q4_K_XL", "Q4_K_XL/GLM-5.2-Q4_K_XL-00001-of-00010.gguf"),
        (UNSLOTH, "ud-q4_k_xl", "UD-Q4_K_XL/GLM-5.2-UD-Q4_K_XL-00001-of-00011.gguf"),
        (UNSLOTH, "GLM-5.2-Q4_K_XL", "Q4_K_XL/GLM-5.2-Q4_K_XL-00001-of-00010.gguf"),
        (UNSLOTH, "UD-IQ2_M/GLM-5.2-UD-IQ2_M", "UD-IQ2_M/GLM-5.2-UD-IQ2_M-00001-of-00006.gguf"),
        (FLAT, "Q4_K_M", "GLM-Q4_K_M.gguf"),
        (FLAT, "UD-Q4_K_M", "GLM-UD-Q4_K_M.gguf"),
        (FLAT, "Q4_K", "GLM-Q4_K.gguf"),
        (FLAT, "GLM-Q4_K_M.gguf", "GLM-Q4_K_M.gguf"),
        (FLAT, "q8_0", "GLM-Q8_0-00001-of-00003.gguf"),
    ],
)
def test_the_exact_name_picks_one_set(files: list[RemoteFile], quant: str, first: str) -> None:
    assert choose_set(group_sets(files), quant, "o/r").files[0].path == first


@pytest.mark.parametrize("quant", ["K_XL", "Q4", "IQ2_M/", "UD-", "UD-Q4_K_XL ", "4_K_XL"])
def test_part_of_a_name_never_matches_and_the_alternatives_are_listed(quant: str) -> None:
    with pytest.raises(UsageError, match="has no quantisation") as error:
        choose_set(group_sets(UNSLOTH), quant, "o/r")
    assert error.value.hint == (
        "it has UD-IQ2_M (6 shards, 234.0 GB), Q4_K_XL (10 shards, 410.0 GB), UD-Q4_K_XL (11 shards, 440.0 GB)"
    )


def test_case_decides_before_it_is_ignored() -> None:
    sets = group_sets([remote("a/m-Q4_K.gguf"), remote("A/m-Q4_K.gguf")])
    assert choose_set(sets, "A", "o/r").files[0].path == "A/m-Q4_K.gguf"
    with pytest.raises(UsageError, match="2 sets"):
        choose_set(sets, "q4_K", "o/r")


def test_an_ambiguous_name_lists_full_names() -> None:
    sets = group_sets([remote("x/GLM-Q4_K_M.gguf"), remote("y/GLM-Q4_K_M.gguf", 2000)])
    with pytest.raises(UsageError, match="2 sets named 'Q4_K_M'") as error:
        choose_set(sets, "Q4_K_M", "o/r")
    assert error.value.hint == "choose one of x/GLM-Q4_K_M (1.0 kB), y/GLM-Q4_K_M (2.0 kB)"
    assert choose_set(sets, "y/GLM-Q4_K_M", "o/r").size == 2000


def test_the_same_stem_in_two_counts_is_two_sets() -> None:
    with pytest.raises(UsageError, match="2 sets"):
        choose_set(group_sets([*split("m-Q4_K", 2), *split("m-Q4_K", 3)]), "Q4_K", "o/r")


def test_no_name_is_enough_for_a_single_set() -> None:
    assert len(choose_set(group_sets(split("Q4/m-Q4_K", 4)), "", "o/r").files) == 4
    with pytest.raises(UsageError, match="none was named"):
        choose_set(group_sets(FLAT), "", "o/r")


def test_a_repository_without_gguf() -> None:
    with pytest.raises(HubError, match="has no GGUF files"):
        choose_set(group_sets([remote("model.safetensors")]), "Q4_K", "o/r")


def test_missing_shards_are_named() -> None:
    files = [f for f in split("Q4_K/m-Q4_K", 6) if "00003" not in f.path and "00006-of" not in f.path]
    with pytest.raises(
        HubError, match=r"2 of 6 shards are missing: Q4_K/m-Q4_K-00003-of-00006\.gguf, Q4_K/m-Q4_K-00006"
    ):
        choose_set(group_sets(files), "Q4_K", "o/r")


def test_a_huge_count_in_a_name_costs_nothing() -> None:
    sets = group_sets([remote(f"m{n}-00001-of-99999.gguf") for n in range(2000)])
    assert all(len(s.missing) == 3 and s.count == 99999 for s in sets)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["Q4_K", "UD-Q4_K", "Q4_K_XL", "UD-Q4_K_XL", "i1-IQ2_M"]), st.integers(1, 12)),
    st.booleans(),
    st.randoms(),
)
def test_every_label_picks_its_own_complete_set(counts: dict[str, int], folders: bool, shuffler) -> None:  # type: ignore[no-untyped-def]
    files = []
    for label, count in counts.items():
        prefix = f"{label}/" if folders else ""
        shards = [f"-{n:05d}-of-{count:05d}" for n in range(1, count + 1)] if count > 1 else [""]
        files += [remote(f"{prefix}GLM-5.2-{label}{shard}.gguf") for shard in shards]
    shuffler.shuffle(files)
    for label, count in counts.items():
        chosen = choose_set(group_sets(files), label, "o/r")
        assert chosen.label == label
        assert len(chosen.files) == count
        assert list(chosen.files) == sorted(chosen.files, key=lambda f: f.path)


@pytest.mark.parametrize(
    "entry",
    [
        ("a.gguf", -1, "0" * 40, None),
        ("a.gguf", "7", "0" * 40, None),
        ("a.gguf", True, "0" * 40, None),
        ("a.gguf", 7, "short", None),
        ("a.gguf", 7, "0" * 40, "nothex" + "0" * 58),
        ("../a.gguf", 7, "0" * 40, None),
    ],
)
def test_entries_without_size_or_hash_are_refused(entry: tuple[object, ...]) -> None:
    with pytest.raises(HubError):
        checked_file(*entry, None)
