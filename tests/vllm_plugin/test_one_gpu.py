"""How two ranks come to share a GPU, as far as that shows without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import one_gpu
from tests.support.engine import node_commands


def test_each_rank_is_a_machine_of_its_own_for_vllm_and_for_nccl() -> None:
    nodes = one_gpu.Joined("sockets", "").nodes()
    (first, env), (second, other) = node_commands(
        ["python", "-m", "serve", "/m", "--tensor-parallel-size", "2"], 2, nodes
    )
    assert first[5:9] == ("2", "--nnodes", "2", "--node-rank")
    assert [words[words.index("--node-rank") + 1] for words in (first, second)] == ["0", "1"]
    assert ("--headless" in first, "--headless" in second) == (False, True)
    assert (env.pop("NCCL_HOSTID"), other.pop("NCCL_HOSTID")) == ("rank0", "rank1")
    assert env == other
    assert {env[name] for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} == {"127.0.0.1", "lo"}


def test_ranks_of_one_host_name_none() -> None:
    first, second = one_gpu.Joined("shared", "").nodes()
    assert first == second
    assert "NCCL_HOSTID" not in first


@pytest.mark.slow
def test_a_trial_that_fails_says_why_for_every_way(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gpu, "_tried", {})  # what was tried for servers stays theirs
    with pytest.raises(AssertionError, match="no server was started") as caught:
        one_gpu.join_ranks("", "shared", {})
    said = capfd.readouterr().out
    for way in ("sockets", "shared"):
        assert f"two ranks on one GPU, {way}: exit statuses " in said
        assert f"'{way}': 'exit statuses " in str(caught.value)


def test_what_nccl_said_is_read_of_every_process(tmp_path: Path) -> None:
    for pid in (1, 2):
        (tmp_path / f"nccl-{pid}.log").write_text(f"said by {pid}\n")
    assert one_gpu.nccl_said(tmp_path) == "said by 1\nsaid by 2\n"
