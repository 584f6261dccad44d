"""The benchmark's arithmetic on known arrivals, and its measuring against a server that streams at a known pace."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.server.bench import Bench, BenchSettings, Point
from glm5deploy.server.bench_figures import Trace, middle, percentile, summarise
from glm5deploy.server.bench_record import BenchRecord, compare_rates, read_record
from glm5deploy.server.bench_request import BenchTarget, measure
from glm5deploy.server.metrics_text import read_counters
from tests.support.streaming_server import NAME, Pace, StreamingServer


def trace(sent: float, first: float, step: float, count: int, tokens: int = 1) -> Trace:
    return Trace(sent, tuple((first + step * i, tokens * (i + 1)) for i in range(count)), 100)


def test_one_answer() -> None:
    one = trace(10.0, 10.5, 0.1, 11)
    assert (one.ttft, one.tokens, one.tpot) == (0.5, 11, pytest.approx(0.1))
    wave = summarise([one])
    assert wave.seconds == pytest.approx(1.5)
    assert wave.output_rate == pytest.approx(11 / 1.5)
    assert wave.decode_rate == pytest.approx(10)
    assert wave.prefill_rate == pytest.approx(200)


def test_accepted_drafts_count_as_tokens() -> None:
    drafted = trace(0.0, 1.0, 0.1, 11, tokens=3)
    assert drafted.tpot == pytest.approx(1.0 / 30)
    assert summarise([drafted]).decode_rate == pytest.approx(30)


def test_decode_rate_looks_only_where_all_decode() -> None:
    """The second request starts late: alone each makes 10 tok/s, together 20, whatever the waiting."""
    wave = summarise([trace(0.0, 1.0, 0.1, 41), trace(0.0, 3.0, 0.1, 41)])
    assert wave.decode_rate == pytest.approx(20, rel=0.06)
    assert wave.output_rate == pytest.approx(82 / 7)
    assert wave.prefill_rate == pytest.approx(200 / 3)
    assert (wave.ttft_median, wave.ttft_p95) == (pytest.approx(2.0), pytest.approx(2.9))


def test_requests_that_never_overlap_have_no_common_decode_rate() -> None:
    assert summarise([trace(0.0, 1.0, 0.1, 5), trace(0.0, 9.0, 0.1, 5)]).decode_rate is None


def test_an_answer_of_one_piece_has_no_time_per_token() -> None:
    wave = summarise([trace(0.0, 1.0, 0.0, 1, tokens=8)])
    assert (wave.tpot_median, wave.decode_rate, wave.output_tokens) == (None, None, 8)


def test_nothing_is_no_wave() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise([])
    with pytest.raises(ValueError, match="without a token"):
        Trace(0.0, (), 1)


def test_percentile_and_middle() -> None:
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    slow, mid, fast = (summarise([trace(0.0, 1.0, step, 11)]) for step in (0.3, 0.2, 0.1))
    assert middle([fast, slow, mid]) is mid
    assert middle([fast, slow]) is slow


def test_a_server_of_known_pace_measures_as_that_pace() -> None:
    settings = BenchSettings(concurrency=(1, 4), prompts=(200,), output=20)
    with StreamingServer(Pace(first=0.2, between=0.02)) as server, Bench(target(server), settings) as bench:
        points = list(bench.run())
    assert [(p.concurrency, p.prompt) for p in points] == [(1, 200), (4, 200)]
    sent = server.pace.sent[1:]  # the first answer was the warm-up
    for point in points:
        wave = point.wave
        assert wave is not None
        assert wave.prompt_tokens == 200
        assert wave.output_tokens == 20 * point.concurrency
        assert wave.ttft_median > 0.2
        answers, sent = sent[: point.concurrency], sent[point.concurrency :]
        pace = statistics.median((times[-1] - times[1]) / 19 for times in answers)
        assert wave.tpot_median == pytest.approx(pace, rel=0.25)
        assert wave.ttft_median - statistics.median(times[1] - times[0] for times in answers) < 1.0
        assert wave.decode_rate is not None
        assert 0.5 < wave.decode_rate / (point.concurrency / pace) < 1.5
    bodies = server.pace.requests
    assert {len(body["prompt"]) for body in bodies} == {200}
    assert {body["max_tokens"] for body in bodies} == {20}
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)
    assert len({tuple(body["prompt"][:64]) for body in bodies}) == len(bodies), "prompts share a cacheable beginning"


def test_acceptance_comes_from_the_servers_counters() -> None:
    settings = BenchSettings(concurrency=(2,), prompts=(16,), output=12)
    with (
        StreamingServer(Pace(first=0.01, between=0.005, tokens=3)) as server,
        Bench(target(server), settings) as bench,
    ):
        (point,) = bench.run()
    assert point.accepted == pytest.approx(0.75)
    assert point.wave is not None
    assert point.wave.output_tokens == 24


def test_points_that_cannot_fit_are_left_out_with_the_reason() -> None:
    settings = BenchSettings(concurrency=(1, 4), prompts=(100, 2000), output=10)
    pace = Pace(first=0, between=0, max_model_len=1000, kv_blocks=20)
    with StreamingServer(pace) as server, Bench(target(server), settings) as bench:
        notes = {(p.concurrency, p.prompt): p.note for p in bench.run()}
    assert notes[1, 100] == ""
    assert notes[4, 100] == "left out: needs 440 tokens of KV cache, the server has 320"
    assert notes[1, 2000] == "left out: needs a context of 2010 tokens, the server allows 1000"


def test_a_server_that_is_not_there_is_named() -> None:
    bench = Bench(BenchTarget("http://127.0.0.1:9", NAME), BenchSettings())
    with bench, pytest.raises(DeployError, match=r"no answer from http://127\.0\.0\.1:9"):
        list(bench.run())


def test_an_answer_without_counts_is_refused() -> None:
    with (
        StreamingServer(Pace(first=0, raw=(b'data: {"choices": []}\n\ndata: [DONE]\n\n',))) as server,
        target(server).connect() as http,
        pytest.raises(DeployError, match="no token counts"),
    ):
        measure(http, {})


def test_counters_are_summed_over_engines() -> None:
    counters = read_counters(
        'vllm:cache_config_info{block_size="64",num_gpu_blocks="10",other="a\\"b"} 1.0\n'
        'vllm:cache_config_info{block_size="64",num_gpu_blocks="10"} 1.0\n'
        'vllm:num_preemptions_total{engine="0",model_name="m"} 2.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="m"} 1.0\n'
        "python_gc_objects_collected_total 7.0\n"
    )
    assert (counters.kv_tokens, counters.preemptions) == (1280, 3)
    assert counters.accepted_since(counters) is None
    assert read_counters("").kv_tokens is None


def record(decode_step: float, output: int = 11, when: str = "2026-11-29T18:00:00+00:00") -> BenchRecord:
    wave = summarise([trace(0.0, 1.0, decode_step, 11)])
    points = (Point(1, 100, wave, 0.5), Point(4, 100, None, note="left out: too long"))
    return BenchRecord("glm-5", "0.1.0", when, output, points)


def test_a_record_survives_saving(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record(0.1).as_json()))
    assert read_record(path) == record(0.1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bench": 2}', '{"bench": 1, "points": [{}]}', "[" * 100_000])
def test_other_files_are_no_records(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"bench\.json"):
        read_record(path)


def test_comparing_gives_the_ratio_of_rates() -> None:
    rows = compare_rates(record(0.05), record(0.1))
    assert rows == [{"prompt": 100, "c": 1, "tok/s_then": 10.0, "tok/s_now": 20.0, "ratio": 2.0}]
    with pytest.raises(UsageError, match="answers of 64 tokens"):
        compare_rates(record(0.1), record(0.1, output=64))


def target(server: StreamingServer) -> BenchTarget:
    return BenchTarget(server.url, NAME)
