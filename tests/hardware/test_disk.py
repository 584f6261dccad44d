from __future__ import annotations

import os
import time
from pathlib import Path

from glm5deploy.hardware.disk import read_rate


def test_the_rate_of_a_real_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(8 << 20))
    assert read_rate(file, sample=6 << 20) > 1e6


def test_a_small_file_and_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    (tmp_path / "empty").write_bytes(b"")
    assert read_rate(tmp_path / "small") > 0
    assert read_rate(tmp_path / "empty") == 0


def test_the_time_limit_holds(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as opened:
        opened.truncate(1 << 38)
    begun = time.monotonic()
    assert read_rate(file, sample=1 << 37, seconds=0.2) > 0
    assert time.monotonic() - begun < 6.0  # all of the sample takes ten seconds at least
