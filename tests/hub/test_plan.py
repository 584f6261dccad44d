"""Plans: pinned to a commit, written down, and kept when a branch moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5deploy.errors import HubError, UsageError
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.plan import FetchPlan, make_plan, plan_path, read_plan, recorded_plans, write_plan
from tests.hub.conftest import QUANT, REPO, SIZES, Fetcher
from tests.support.shard_sets import write_set

HEX = st.text("0123456789abcdef", min_size=40, max_size=40)
FILES = st.builds(
    RemoteFile,
    st.from_regex(r"[a-z]{1,8}/[a-z]{1,8}\.gguf", fullmatch=True),
    st.integers(0, 2**60),
    HEX,
    st.one_of(st.none(), st.text("0123456789abcdef", min_size=64, max_size=64)),
    st.none(),
)


@settings(deadline=None, max_examples=30)  # every example is fsynced
@given(HEX, st.lists(FILES, min_size=1, max_size=5))
def test_plans_round_trip(tmp_path_factory: pytest.TempPathFactory, commit: str, files: list[RemoteFile]) -> None:
    folder = tmp_path_factory.mktemp("plan")
    plan = FetchPlan("o/r", "main", commit, "Q4_K", "Q4_K", tuple(files))
    assert read_plan(write_plan(plan, folder)) == plan
    assert recorded_plans(folder) == [plan]


def test_the_plan_pins_a_commit_with_sizes_and_hashes(fetcher: Fetcher) -> None:
    plan = fetcher.plan()
    assert plan.commit == fetcher.server.repositories[REPO].refs["main"]
    assert [file.size for file in plan.files] == [len(content) for content in fetcher.originals()]
    assert all(file.sha256 is not None for file in plan.files)
    assert plan.label == QUANT


def test_a_moved_branch_is_noticed_and_followed_only_when_asked(fetcher: Fetcher) -> None:
    first = fetcher.plan()
    write_set(fetcher.source / QUANT, "m", SIZES, seed=1)
    moved = fetcher.server.publish(REPO, fetcher.source)
    kept = make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination)
    assert kept.plan == first
    assert len(kept.notices) == 1
    assert moved[:12] in kept.notices[0]
    assert "--refresh" in kept.notices[0]
    followed = make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination, refresh=True)
    assert followed.plan.commit == moved
    assert followed.plan.files != first.files


def test_every_request_names_the_pinned_commit(fetcher: Fetcher) -> None:
    commit = fetcher.plan().commit
    fetcher.run()
    resolved = [path for kind, path, _ in fetcher.server.requests if kind == "resolve"]
    assert resolved
    assert all(f"/resolve/{commit}/" in path for path in resolved)
    trees = [path for kind, path, _ in fetcher.server.requests if kind == "api" and "/tree/" in path]
    assert all(f"/tree/{commit}" in path for path in trees)


def test_a_revision_can_be_a_commit(fetcher: Fetcher) -> None:
    commit = fetcher.server.repositories[REPO].refs["main"]
    plan = make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination, revision=commit).plan
    assert (plan.commit, plan.revision) == (commit, commit)


def test_offline_only_the_recorded_plan_is_known(fetcher: Fetcher) -> None:
    with pytest.raises(HubError, match="no plan for owner/model-GGUF"):
        make_plan(fetcher.hub(offline=True), REPO, QUANT, fetcher.destination)
    plan = fetcher.plan()
    asked = len(fetcher.server.requests)
    assert make_plan(fetcher.hub(offline=True), REPO, QUANT, fetcher.destination).plan == plan
    assert len(fetcher.server.requests) == asked


def test_an_unreachable_hub_does_not_block_a_recorded_plan(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5deploy.hub import client

    monkeypatch.setattr(client, "_ATTEMPTS", 1)
    plan = fetcher.plan()
    dead = client.Hub(endpoint="http://127.0.0.1:9")
    planned = make_plan(dead, REPO, QUANT, fetcher.destination)
    assert planned.plan == plan
    assert "could not look for a newer main" in planned.notices[0]
    with pytest.raises(HubError, match="cannot be reached"):
        make_plan(dead, REPO, QUANT, fetcher.destination, refresh=True)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("commit", "main"),
        ("repo", 5),
        ("files", []),
        ("files", [{"path": "../x.gguf", "size": 1, "git_oid": "0" * 40, "sha256": None, "xet_hash": None}]),
        ("files", [{"path": "x.gguf", "size": -1, "git_oid": "0" * 40, "sha256": None, "xet_hash": None}]),
        ("files", [{"path": "x.gguf"}]),
        ("files", ["x.gguf"]),
        ("version", 2),
    ],
)
def test_a_tampered_plan_is_as_good_as_none(fetcher: Fetcher, change: str, value: object) -> None:
    fetcher.plan()
    path = plan_path(fetcher.destination, REPO, QUANT)
    path.write_text(json.dumps({**json.loads(path.read_text()), change: value}))
    assert read_plan(path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"plan"'])
def test_a_corrupt_plan_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert read_plan(path) is None


def test_an_overloaded_hub_is_asked_again_and_for_how_long_it_says(fetcher: Fetcher) -> None:
    def overloaded(handler) -> bool:  # type: ignore[no-untyped-def]
        handler.respond_error(429, "Overloaded", {"Retry-After": "0"})
        return True

    fetcher.server.api_faults += [overloaded] * 3
    assert fetcher.plan().label == QUANT
    fetcher.server.api_faults += [overloaded] * 8
    with pytest.raises(HubError, match="the hub answered 429") as error:
        make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination, refresh=True)
    assert "try again later" in (error.value.hint or "")


def test_errors_of_the_hub_have_next_steps(fetcher: Fetcher) -> None:
    cases = {
        ("owner/other", "main"): ("does not exist or is private", "HF_TOKEN"),
        (REPO, "v9"): ("no such revision", "--revision"),
        ("not a name!", "main"): ("is not a repository's name", "owner/name"),
    }
    for (repo, revision), (message, hint) in cases.items():
        with pytest.raises(HubError, match=message) as error:
            make_plan(fetcher.hub(), repo, QUANT, fetcher.destination, revision=revision)
        assert hint in (error.value.hint or "")
    with pytest.raises(UsageError, match="has no quantisation 'Q4_K_XL'"):
        make_plan(fetcher.hub(), REPO, "Q4_K_XL", fetcher.destination)


def test_a_listing_with_a_path_outside_is_refused_before_anything_is_written(fetcher: Fetcher) -> None:
    from glm5deploy.demo.hub_repository import Blob

    file = next((fetcher.source / QUANT).iterdir())
    blob = Blob(file, file.stat().st_size)
    fetcher.server.repository("owner/evil").publish({"../../evil-Q4_K.gguf": blob})
    with pytest.raises(HubError, match="leaves the download folder"):
        make_plan(fetcher.hub(), "owner/evil", "Q4_K", fetcher.destination)
    assert not fetcher.destination.exists()


def test_a_commit_that_lost_its_file_asks_for_refresh(fetcher: Fetcher) -> None:
    plan = fetcher.plan()
    fetcher.server.repositories[REPO].commits[plan.commit].clear()
    with pytest.raises(HubError, match="no such file at this commit") as error:
        fetcher.run()
    assert "--refresh" in (error.value.hint or "")
