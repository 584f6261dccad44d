"""The fetch stage in its pipeline, and the fetch and verify commands, against a loopback hub."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm5deploy.cli.app import boundary
from glm5deploy.cli.fetch import fetch, verify
from glm5deploy.config import Config, load_config
from glm5deploy.errors import DeployError, DiskFullError, UsageError
from glm5deploy.hub import disk
from glm5deploy.hub.download import folder_lock
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.runner import Pipeline
from glm5deploy.pipeline.status import Stale, UpToDate
from glm5deploy.stages.fetch import FetchStage, verify_fetched
from glm5deploy.stages.merge import MergeStage
from tests.support.data import SET_A, tiny_glm5
from tests.support.faulty_hub import FaultyHub
from tests.support.shard_sets import write_set

REPO, QUANT = "tiny/GLM-tiny-A-GGUF", "UD-Q4_K_XL"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyHub]:
    with FaultyHub() as hub:
        hub.publish(REPO, SET_A / "GLM-tiny-A-GGUF")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def settings(**flags: object) -> Config:
    values = {"model.repo": REPO, "model.quant": QUANT, "merge.mode": "never"}
    return load_config(None, {}, {**values, **{name.replace("__", "."): value for name, value in flags.items()}})


def pipeline(workdir: Path, config: Config, events: list[Event] | None = None, **options: bool) -> Pipeline:
    return Pipeline([FetchStage(**options)], workdir, config, Events(*([events.append] if events is not None else [])))


def test_the_reference_set_is_fetched_and_recorded(hub: FaultyHub, tmp_path: Path) -> None:
    events: list[Event] = []
    line = pipeline(tmp_path, settings(), events)
    (result,) = line.run()
    manifest = json.loads((SET_A / "manifest.json").read_text())
    shards = result.outputs["files"]
    assert isinstance(shards, list)
    assert [Path(s["path"]).name for s in shards] == [
        f"GLM-tiny-A-UD-Q4_K_XL-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)
    ]
    assert result.outputs["commit"] == hub.repositories[REPO].refs["main"]
    assert all(s["sha256"] in json.dumps(manifest) for s in shards)
    assert sum(e.kind == "checkpoint" for e in events) == 5
    assert isinstance(line.statuses()["fetch"], UpToDate)
    served = hub.served["bytes"]
    assert line.run()[0].ran is False
    assert hub.served["bytes"] == served


@pytest.mark.parametrize(
    ("quant", "names"),
    [
        ("Q8_0", ["GLM-tiny-B-Q8_0.gguf"]),
        ("Q4_K_M", [f"Q4_K_M/GLM-tiny-B-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]),
    ],
)
def test_single_files_and_folders_of_the_other_reference_model(
    hub: FaultyHub, tmp_path: Path, quant: str, names: list[str]
) -> None:
    repo, source = "tiny/GLM-tiny-B-GGUF", tiny_glm5() / "GLM-tiny-B-GGUF"
    hub.publish(repo, source)
    (result,) = pipeline(tmp_path, settings(model__repo=repo, model__quant=quant)).run()
    files = result.outputs["files"]
    assert isinstance(files, list)
    folder = tmp_path / "shards" / "tiny--GLM-tiny-B-GGUF"
    assert [f["path"] for f in files] == [str(folder / name) for name in names]
    assert [(folder / name).read_bytes() for name in names] == [(source / name).read_bytes() for name in names]
    with pytest.raises(UsageError, match="2 quantisations and none was named"):
        pipeline(tmp_path / "other", settings(model__repo=repo, model__quant="")).run()


def test_the_plan_for_a_dry_run_writes_nothing(hub: FaultyHub, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    (plan,) = pipeline(workdir, settings()).plans()
    assert plan.plan is not None
    assert plan.plan["quantisation"] == QUANT
    assert plan.plan["missing_bytes"] == plan.plan["total_bytes"] == 18_273_216
    assert plan.plan["merge_bytes"] == 0
    assert isinstance(plan.plan["free_bytes"], int)
    rows = plan.plan["shards"]
    assert isinstance(rows, list)
    assert [row["state"] for row in rows] == ["missing"] * 4
    assert not workdir.exists()
    pipeline(workdir, settings()).run()
    (plan,) = pipeline(workdir, settings()).plans()
    assert plan.plan is not None
    assert plan.plan["missing_bytes"] == 0


def test_status_gives_reasons(hub: FaultyHub, tmp_path: Path) -> None:
    line = pipeline(tmp_path, settings())
    line.run()
    shard = next((tmp_path / "shards").rglob("*-00001-of-*.gguf"))
    os.utime(shard)
    status = line.statuses()["fetch"]
    assert status == Stale((f"{shard} was modified or found damaged",))
    served = hub.served["bytes"]
    line.run()
    assert hub.served["bytes"] == served  # hashed again, not fetched again
    shard.unlink()
    assert line.statuses()["fetch"] == Stale((f"{shard} is missing",))
    line.run()
    assert hub.served["bytes"] == served + shard.stat().st_size
    moved = pipeline(tmp_path, settings(model__revision="v2")).statuses()["fetch"]
    assert moved == Stale(("revision changed from main to v2",))


def test_a_moved_branch_is_a_warning_until_refresh(hub: FaultyHub, tmp_path: Path) -> None:
    pipeline(tmp_path, settings()).run()
    old = hub.repositories[REPO].refs["main"]
    write_set(tmp_path / "newer" / QUANT, f"GLM-tiny-A-{QUANT}", [1000, 2000])
    new = hub.publish(REPO, tmp_path / "newer")
    events: list[Event] = []
    (kept,) = pipeline(tmp_path, settings(), events).run(force=True)
    assert kept.outputs["commit"] == old
    assert any(e.kind == "warning" and new[:12] in e.message for e in events)
    (followed,) = pipeline(tmp_path, settings(), refresh=True).run(force=True)
    assert followed.outputs["commit"] == new
    assert followed.outputs["bytes"] < 10_000


def test_repair_hashes_everything_and_fetches_what_is_wrong(hub: FaultyHub, tmp_path: Path) -> None:
    (result,) = pipeline(tmp_path, settings()).run()
    shards = result.outputs["files"]
    assert isinstance(shards, list)
    path = Path(shards[2]["path"])
    content, before = path.read_bytes(), path.stat()
    path.write_bytes(content[:1000] + b"x" + content[1001:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert isinstance(pipeline(tmp_path, settings()).statuses()["fetch"], UpToDate)  # size and mtime do not tell
    served, events = hub.served["bytes"], list[Event]()
    pipeline(tmp_path, settings(), events, repair=True).run(force=True)
    assert path.read_bytes() == content
    assert hub.served["bytes"] == served + len(content)
    assert any(e.kind == "warning" and path.name in e.message for e in events)


def test_room_for_the_merge_is_part_of_the_preflight(
    hub: FaultyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MOST_SLACK", 0)
    monkeypatch.setattr(disk, "free_bytes", lambda _: 20_000_000)
    with pytest.raises(DiskFullError, match="for the merge"):
        pipeline(tmp_path, settings(merge__mode="always")).run()
    (result,) = pipeline(tmp_path, settings(merge__mode="never")).run()
    assert result.outputs["bytes"] == 18_273_216


def test_local_files_only_asks_no_hub(hub: FaultyHub, tmp_path: Path) -> None:
    pipeline(tmp_path, settings()).run()
    asked = len(hub.requests)
    (result,) = pipeline(tmp_path, settings(fetch__local_files_only=True)).run(force=True)
    assert result.ran
    assert len(hub.requests) == asked


@pytest.mark.parametrize("repo", ["../up", "a/b/c", "model", "/a/b", "a\\b/c"])
def test_bad_names_are_usage_errors(tmp_path: Path, repo: str) -> None:
    with pytest.raises(UsageError, match="is not a repository's name"):
        pipeline(tmp_path, settings(model__repo=repo)).run()


def test_no_name_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model was named"):
        pipeline(tmp_path, load_config(None, {}, {})).run()


def test_no_name_means_the_only_model_that_is_there(hub: FaultyHub, tmp_path: Path) -> None:
    (first,) = pipeline(tmp_path, settings()).run()
    unnamed = load_config(None, {}, {"merge.mode": "never"})
    assert isinstance(pipeline(tmp_path, unnamed).statuses()["fetch"], UpToDate)
    (again,) = pipeline(tmp_path, unnamed).run(force=True)
    assert again.outputs["files"] == first.outputs["files"]


def run_command(command, *arguments: str):  # type: ignore[no-untyped-def]
    import typer

    app = typer.Typer()
    app.command()(boundary(command))
    return CliRunner().invoke(app, list(arguments))


def test_commands(hub: FaultyHub, tmp_path: Path) -> None:
    work = ["--workdir", str(tmp_path)]
    dry = run_command(fetch, f"{REPO}:{QUANT}", *work, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)["fetch"]["missing_bytes"] == 18_273_216
    assert hub.served["bytes"] == 0
    fetched = run_command(fetch, f"{REPO}:{QUANT}", *work)
    assert fetched.exit_code == 0, fetched.output
    assert "4 shards, all hashes match" in fetched.stdout
    sound = run_command(verify, *work, "--json")
    assert sound.exit_code == 0
    assert [row["verdict"] for row in json.loads(sound.stdout)["shards"]] == ["sound"] * 4
    shard = next((tmp_path / "shards").rglob("*-00003-of-*.gguf"))
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    broken = run_command(verify, *work)
    assert broken.exit_code == 1
    assert "damaged, first between bytes 0 and 1048576" in " ".join(broken.stdout.split())
    assert "fetch --repair" in broken.stderr
    assert run_command(fetch, *work, "--repair").exit_code == 0
    assert run_command(verify, *work).exit_code == 0


def test_command_errors_have_exit_codes(hub: FaultyHub, tmp_path: Path) -> None:
    work = ["--workdir", str(tmp_path)]
    unknown = run_command(fetch, f"{REPO}:Q4_K_XL", *work)
    assert unknown.exit_code == 2
    assert "it has UD-Q4_K_XL (4 shards, 18.3 MB)" in unknown.stderr
    nothing = run_command(fetch, "tiny/none:Q4_K", *work)
    assert nothing.exit_code == 1
    assert "does not exist or is private" in nothing.stderr
    assert run_command(verify, f"{REPO}:{QUANT}", *work).exit_code == 1


def test_verify_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="no plan is recorded"):
        verify_fetched(settings(), tmp_path, parallel=None, progress=lambda _: None)


def with_merge(workdir: Path, config: Config, sink: Callable[[Event], None] | None = None, **options: bool) -> Pipeline:
    return Pipeline([FetchStage(**options), MergeStage()], workdir, config, Events(*([sink] if sink else [])))


CONSUMING = {"merge__mode": "always", "merge__consume": True}


def test_released_shards_are_neither_missing_nor_damaged(hub: FaultyHub, tmp_path: Path) -> None:
    config = settings(**CONSUMING)
    line = with_merge(tmp_path, config)
    before = line.run()[0].outputs
    assert list((tmp_path / "shards").rglob("*.gguf")) == []
    served = hub.served["bytes"]
    found = verify_fetched(config, tmp_path, parallel=None, progress=lambda _: None)
    assert found.unrecorded == ""
    assert [row["verdict"] for row in found.rows] == ["released"] * 4
    assert run_command(verify, "--workdir", str(tmp_path), f"{REPO}:{QUANT}").exit_code == 0
    plan = line.plans()[0].plan
    assert plan is not None
    assert (plan["missing_bytes"], plan["merge_bytes"]) == (0, 0)
    assert [row["state"] for row in plan["shards"]] == ["released"] * 4  # type: ignore[attr-defined]
    for options in ({}, {"repair": True}):
        (again,) = with_merge(tmp_path, config, **options).run("fetch", "fetch", force=True)
        assert again.outputs["files"] == before["files"]
        assert "4 of them merged and released" in str(again.outputs["summary"])
    shutil.rmtree(tmp_path / ".glm5deploy")
    with_merge(tmp_path, config).run("fetch", "fetch")
    assert hub.served["bytes"] == served


def test_a_new_commit_is_fetched_whole_although_the_old_shards_were_released(hub: FaultyHub, tmp_path: Path) -> None:
    """Same names, same sizes; one shard even has the same content."""
    config = settings(**CONSUMING)
    write_set(tmp_path / "old" / QUANT, "m", [1000, 2000, 3000])
    hub.publish(REPO, tmp_path / "old")
    with_merge(tmp_path / "work", config).run()
    assert list((tmp_path / "work" / "shards").rglob("*.gguf")) == []
    shards = write_set(tmp_path / "new" / QUANT, "m", [1000, 2000, 3000], seed=1)
    shutil.copy(tmp_path / "old" / QUANT / shards[1].name, shards[1])
    hub.publish(REPO, tmp_path / "new")
    with_merge(tmp_path / "work", config, refresh=True).run("fetch", "fetch", force=True)
    fetched = sorted((tmp_path / "work" / "shards").rglob("*.gguf"))
    assert [path.read_bytes() for path in fetched] == [path.read_bytes() for path in shards]


class Interrupted(Exception):
    pass


def test_no_other_commit_comes_in_place_of_half_released_shards(hub: FaultyHub, tmp_path: Path) -> None:
    config = settings(**CONSUMING)

    def interrupt(event: Event) -> None:
        if event.stage == "merge" and event.kind == "checkpoint":
            raise Interrupted

    with pytest.raises(Interrupted):
        with_merge(tmp_path / "work", config, interrupt).run()
    (journal,) = (tmp_path / "work" / "merged").glob("*.journal")
    write_set(tmp_path / "newer" / QUANT, "m", [1000, 2000])
    new = hub.publish(REPO, tmp_path / "newer")
    other = settings(**CONSUMING, model__revision=new)
    for line in (with_merge(tmp_path / "work", config, refresh=True), with_merge(tmp_path / "work", other)):
        with pytest.raises(UsageError, match="partly released") as error:
            line.run("fetch", "fetch", force=True)
        assert str(journal) in (error.value.hint or "")
    with_merge(tmp_path / "work", config).run()
    assert not journal.exists()
    with_merge(tmp_path / "work", config, refresh=True).run("fetch", "fetch", force=True)


def test_room_that_an_interrupted_merge_has_reserved_counts_once(hub: FaultyHub, tmp_path: Path) -> None:
    line = pipeline(tmp_path, settings(merge__mode="always"))
    partial = tmp_path / "merged" / "GLM-tiny-A-UD-Q4_K_XL.gguf.partial"
    partial.parent.mkdir()
    with partial.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 10_000_000)
    plan = line.plans()[0].plan
    assert plan is not None
    assert plan["merge_bytes"] == 18_273_216 - partial.stat().st_blocks * 512
    assert int(str(plan["merge_bytes"])) < 8_300_000


def test_verify_waits_for_no_fetch_and_disturbs_none(hub: FaultyHub, tmp_path: Path) -> None:
    pipeline(tmp_path, settings()).run()
    folder = tmp_path / "shards" / REPO.replace("/", "--")
    with folder_lock(folder), pytest.raises(DeployError, match="another process is fetching"):
        verify_fetched(settings(), tmp_path, parallel=None, progress=lambda _: None)


def test_a_moved_folder_is_stale_until_its_files_are_proved_where_they_are(hub: FaultyHub, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    pipeline(first, settings()).run()
    first.rename(second)
    line = pipeline(second, settings())
    assert line.statuses()["fetch"] == Stale(("the work folder was moved or copied",))
    (result,) = line.run()
    files = result.outputs["files"]
    assert isinstance(files, list)
    assert all(str(facts["path"]).startswith(str(second)) for facts in files)
    assert hub.served["bytes"] < 2 * sum(int(facts["size"]) for facts in files)


def test_a_mistyped_folder_to_take_over_is_wrong_usage(tmp_path: Path) -> None:
    result = run_command(fetch, "a/b:Q", "--from", str(tmp_path / "none"), "--workdir", str(tmp_path))
    assert result.exit_code == 2
