"""Logs as vLLM, NCCL and the kernel write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5deploy.server.diagnosis import FAULTS, find_faults, telling_lines

CHAIN = """\
INFO 11-29 17:00:00 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=12) ERROR 11-29 17:00:09 [core.py:1100] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-29 17:00:09 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 17:00:09 [core.py:1100]   File "core.py", line 1, in run
(EngineCore pid=12) ERROR 11-29 17:00:09 [core.py:1100] glm5deploy.errors.DeployError: 3 tensors are missing: a, b, c
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12) glm5deploy.errors.DeployError: 3 tensors are missing: a, b, c
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.location"
"""


def test_the_root_cause_comes_out_of_a_chain(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text(CHAIN)
    assert telling_lines(log) == ["glm5deploy.errors.DeployError: 3 tensors are missing: a, b, c"]


def test_usage_errors_and_plain_ends(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("usage: api [-h]\napi: error: unrecognized arguments: --nope\n")
    assert telling_lines(log) == ["api: error: unrecognized arguments: --nope"]
    log.write_text("one\ntwo\n\nthree\nnanobind: leaked 1 instances!\n")
    assert telling_lines(log, most=2) == ["two", "three"]
    log.write_text("RuntimeError: Engine core initialization failed.\n")
    assert telling_lines(log) == ["RuntimeError: Engine core initialization failed."]
    assert telling_lines(tmp_path / "missing") == []


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_bytes(b"ValueError: early\n" + b"x" * (1 << 20) + b"\n\xff\xfeValueError late\n")
    assert "early" not in str(telling_lines(log))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has", "GPU out of memory"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "GPU out of memory"),
        (
            "ValueError: To serve at least one request, 9.1 GiB KV cache is needed, which is larger",
            "KV cache too small",
        ),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate", "host out of memory"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7", "NCCL time-out"),
        ("torch.distributed.DistBackendError: NCCL error: ncclUnhandledCudaError", "NCCL time-out"),
        ("[12345.6] NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.", "GPU error (Xid)"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "illegal memory access"),
        ("TimeoutError: Timed out waiting for engine core to be ready", "load took too long"),
        ("OSError: [Errno 28] No space left on device", "disk full"),
        ("OSError: [Errno 98] Address already in use", "port in use"),
        ("Bus error (core dumped)", "shared memory too small"),
    ],
)
def test_known_faults_are_named_with_a_remedy(line: str, name: str) -> None:
    found = find_faults(["nothing", f"(Worker_TP0 pid=9) ERROR 11-29 17:00:00 [w.py:1] {line}", line])
    assert [fault.name for fault, _ in found] == [name]
    assert found[0][0].remedy
    assert found[0][1] == line


def test_ordinary_lines_are_no_faults() -> None:
    assert find_faults([CHAIN.splitlines()[0], "INFO Using max model len 4096", "GPU KV cache size: 9 tokens"]) == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
