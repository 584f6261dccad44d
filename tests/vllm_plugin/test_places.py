"""Who gets the machine's cores and GPUs while servers for GPU tests start, and that nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.gpu_servers import Places


def take(places: Places, ranks: int) -> list[str]:
    with places.take(ranks) as gpus:
        return gpus


def test_servers_are_spread_over_gpus_and_wait_for_room() -> None:
    places = Places(["0", "1"])
    places._free = 3
    with places.take(2) as both, places.take(1) as first, ThreadPoolExecutor(2) as pool:
        assert (both, len(first)) == (["0", "1"], 1)
        waiting = [pool.submit(take, places, 1) for _ in range(2)]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.1)
        places.close()
        for future in waiting:
            with pytest.raises(AssertionError, match="the time was up before this server could start"):
                future.result(10)


def test_room_that_is_given_back_is_taken() -> None:
    places = Places(["0", "1"])
    places._free = 1
    with ThreadPoolExecutor(1) as pool:
        with places.take(1) as one:
            waiting = pool.submit(take, places, 1)
        assert len(one) == len(waiting.result(10)) == 1
