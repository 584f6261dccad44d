"""One wording of sizes for every message."""

from __future__ import annotations

import pytest

from glm5deploy.sizes import human_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.0 kB"),
        (1500, "1.5 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (430_200_000_000, "430.2 GB"),
        (999_960_000_000, "1.00 TB"),
        (1.44e12, "1.44 TB"),
        (-30e9, "-30.0 GB"),
    ],
)
def test_sizes_are_shown_as_hubs_show_them(count: float, text: str) -> None:
    assert human_bytes(count) == text
