"""The layer-stack benchmark: its model is one rank of eight, its file is sound, its arithmetic on traces right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from glm5deploy.demo.tiny_tokenizer import train
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.tokenizer import byte_alphabet
from glm5deploy.server.bench_figures import Trace
from glm5deploy.vllm_plugin import weights
from glm5deploy.vllm_plugin.loader import main_placements
from glm5deploy.vllm_plugin.model_files import ModelFiles
from scripts.layer_stack import groups, place, report, trace
from scripts.layer_stack.course import Course
from scripts.layer_stack.generate import file_bytes, tensors_of, write_stack
from scripts.layer_stack.measure import steps_of
from scripts.layer_stack.sanity import judge
from scripts.layer_stack.stack import Stack
from scripts.layer_stack.vocabulary import vocabulary
from tests.support.folders import folder_of, write_folder_of
from tests.support.glm_catalogue import real_tensors

# What of a whole tensor's GGUF shape one of eight ranks holds, by the dimension that is cut.
CUT = {
    "token_embd": 1,
    "output": 1,
    "attn_q_b": 1,
    "attn_k_b": 2,
    "attn_v_b": 2,
    "attn_output": 0,
    "ffn_gate": 1,
    "ffn_up": 1,
    "ffn_down": 0,
    "ffn_gate_exps": 1,
    "ffn_up_exps": 1,
    "ffn_down_exps": 0,
    "ffn_gate_shexp": 1,
    "ffn_up_shexp": 1,
    "ffn_down_shexp": 0,
}


def part_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    stem = name.removesuffix(".weight").split(".", 2)[-1] if name.startswith("blk.") else name.removesuffix(".weight")
    cut = CUT.get(stem)
    return tuple(size // 8 if axis == cut else size for axis, size in enumerate(shape))


@pytest.mark.parametrize(("version", "layout"), [("5.2", "full"), ("5", "all")])
def test_the_model_is_an_eighth_of_the_published_one(version: Any, layout: str) -> None:
    published = {t.name: part_of(t.name, t.shape) for t in real_tensors(layout) if not t.name.startswith("blk.78.")}
    assert {t.name: t.shape for t in tensors_of(Stack(version=version))} == published


def test_the_whole_file_is_as_large_as_a_rank_of_a_four_bit_mix() -> None:
    assert 54e9 < file_bytes(Stack()) < 60e9
    weights_read = report.step_bytes(Stack())
    assert 4.4e9 < weights_read < 5.2e9, "8 of 256 experts and all else, once"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stack, tuple[Path, ...]]:
    stack = Stack(4, "small")
    return stack, write_stack(tmp_path_factory.mktemp("stack"), stack)


def test_gguf_py_and_our_reader_see_the_same_file(small: tuple[Stack, tuple[Path, ...]]) -> None:
    stack, files = small
    ours = ShardSet.open(files[0]).by_name
    theirs: dict[str, Any] = {}
    for number, file in enumerate(files):
        reader = gguf.GGUFReader(file)
        assert reader.fields["split.no"].contents() == number
        theirs |= {tensor.name: tensor for tensor in reader.tensors}
    assert ours.keys() == theirs.keys() == {tensor.name for tensor in tensors_of(stack)}
    for name, tensor in theirs.items():
        mine = ours[name]
        assert (mine.shape, mine.type.name) == (tuple(tensor.shape.tolist()), tensor.tensor_type.name)
        raw = np.fromfile(mine.path, np.uint8, mine.nbytes, offset=mine.offset)
        assert np.array_equal(raw, tensor.data.reshape(-1).view(np.uint8)), name


def test_weights_keep_a_products_size_and_layers_differ(small: tuple[Stack, tuple[Path, ...]], tmp_path: Path) -> None:
    stack, files = small
    modelfiles = ModelFiles.open(write_folder_of(files[0], tmp_path))
    plan = modelfiles.plan(modelfiles.pattern)
    assert [p.name for p in plan.dropped] == []
    expected = {tensor.name: tensor for tensor in tensors_of(stack)}
    firsts = set()
    for placement in main_placements(plan, range(4)):
        tensor = modelfiles.shards.by_name[placement.name]
        if len(tensor.shape) < 2:
            continue
        values = weights.Matrix.of(tensor).dense(torch.float32)
        wanted = expected[placement.name].deviation
        assert torch.isfinite(values).all()
        assert float(values.std()) == pytest.approx(wanted, rel=0.06), placement.name
        assert abs(float(values.mean())) < 0.05 * wanted, placement.name
        firsts.add(tuple(values[0, :8].tolist()))
    assert len(firsts) == len([t for t in expected.values() if len(t.shape) > 1])


def test_the_folder_has_the_schedule_and_the_vocabulary(small: tuple[Stack, tuple[Path, ...]]) -> None:
    _, files = small
    folder = folder_of(files[0])
    assert folder.schedule.pattern == "FFFS"
    config = json.loads(folder.files["config.json"])
    assert (config["num_hidden_layers"], config["vocab_size"]) == (4, 2048)


@pytest.mark.parametrize("size", [1024, 19360])
def test_a_vocabulary_of_any_size(size: int) -> None:
    made, tiny = vocabulary(size), train()
    assert len(made.tokens) == len(made.types) == len(set(made.tokens)) == size
    assert set(byte_alphabet()) <= set(made.tokens)
    assert made.merges == tiny.merges
    first_special = made.types.index(3)
    assert set(made.types[:first_special]) == {1}
    assert set(made.types[first_special:]) == {3, 4}, "added tokens have the last ids, or tokenizers moves them"


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        vocabulary(300)


# --- Course ---


def test_a_file_that_does_not_fit_is_cut_to_fewer_layers_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Stack(4, "small")
    room = place.SPARE + file_bytes(Stack(3, "small"))
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: SimpleNamespace(free=room))
    folder, stack = place.choose_folder(Course(tmp_path / "out", 100), wanted, tmp_path)
    assert (folder.parent, stack) == (tmp_path, Stack(3, "small"))
    assert "ONLY 3 OF 4 LAYERS FIT" in capsys.readouterr().out
    room -= 1
    assert place.choose_folder(Course(tmp_path / "out", 100), wanted, tmp_path)[1].layers == 2


def test_a_course_goes_on_after_a_failure_and_leaves_out_what_would_be_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    course, done = Course(tmp_path, 60), []

    def fails() -> None:
        raise RuntimeError("the server broke off")

    course.attempt("first", 1, fails)
    course.attempt("second", 1, lambda: done.append("second"))
    course.attempt("third", 61, lambda: done.append("third"))
    assert done == ["second"]
    assert course.failed == ["first"]
    said = capsys.readouterr().out
    assert "first FAILED: RuntimeError: the server broke off" in said
    assert "third: left out" in said
    assert said == (tmp_path / "report.txt").read_text()


def test_steps_are_those_in_which_all_requests_decode() -> None:
    """Two requests: the second begins a second later; then 10 ms a step, once 30, and two tokens in one piece."""
    early = Trace(0.0, ((0.1, 1), (0.4, 2), (1.0, 3), (1.01, 4), (1.02, 5), (1.05, 6), (1.07, 8)), 100)
    late = Trace(0.0, ((1.0, 1), (1.01, 2), (1.02, 3), (1.05, 4), (1.06, 5), (1.07, 6), (1.20, 7)), 100)
    found = steps_of(2, 100, [early, late])
    assert found.mean == pytest.approx(14.0)
    assert found.median == pytest.approx(10.0)
    with pytest.raises(ValueError, match="never decoded at the same time"):
        steps_of(2, 100, [Trace(0.0, ((0.1, 1), (0.2, 2)), 5), Trace(0.0, ((0.3, 1), (0.4, 2)), 5)])


def answer(tokens: list[int], logprobs: list[float | None]) -> dict[str, Any]:
    return {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": logprobs}


def test_answers_of_a_working_model_are_told_from_others() -> None:
    sound = [answer([5, 7, 5], [-1.0, -2.0, -3.0]), answer([7, 8, 9], [-1.0, -0.5, -1.5])]
    assert judge(sound).startswith("sound: 4 different tokens in 2 greedy answers of 3, mean log-probability -1.50")
    for wrong in (
        [answer([0, 0, 0], [-1.0, -1.0, -1.0]), answer([0, 0, 1], [-1.0, -1.0, -1.0])],
        [sound[0], answer([7, 8, 9], [-1.0, float("nan"), -1.5])],
        [sound[0], answer([7, 8, 9], [-1.0, None, -1.5])],
        [sound[0], sound[0]],
    ):
        with pytest.raises(RuntimeError, match="not the answers of a working model"):
            judge(wrong)


# --- Traces ---


def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": {"stream": 7}}


def step(start: float, batch: int) -> list[dict[str, Any]]:
    """100 µs: two linear products one after the other, a gemm half beside a copy, then nothing for 47."""
    return [
        event("gpu_user_annotation", f"execute_context_0(0)_generation_{batch}({batch})", start, 60),
        event("user_annotation", f"execute_context_0(0)_generation_{batch}({batch})", start - 40, 10),
        event("cpu_op", "aten::mm", start - 30, 5),
        event("kernel", "linear_kernel", start, 10),
        event("kernel", "linear_kernel", start + 10, 20),
        event("kernel", "nvjet_tst_64x8", start + 35, 12),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", start + 41, 12),
    ]


def test_a_step_is_broken_down(tmp_path: Path) -> None:
    events = [e for i in range(5) for e in step(1000 + 100 * i, 1)]
    events += [{"ph": "M", "name": "process_name", "args": {}}, *step(1500, 4)]
    path = tmp_path / "worker.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = trace.breakdown(trace.read_events(path), "execute_context_0(0)_generation_1(", skip=2)
    assert (found.steps, found.step_us, found.busy_us, found.launches) == (3, 100, 48, 4)
    assert found.idle_us == 52
    assert {s.name: (s.us, s.launches) for s in found.kernels} == {
        "linear_kernel": (30, 2),
        "nvjet_tst_64x8": (12, 1),
        "Memcpy DtoD (Device -> Device)": (12, 1),
    }
    grouped = {s.name: s.us for s in found.grouped(groups.group_of)}
    assert grouped == {groups.LINEAR: 30, groups.GEMM: 12, groups.COPY: 12}
    lines = list(report.shares("decode", found))
    assert lines[0] == "decode: 3 steps of 0.100 ms, GPU busy 0.048 ms, idle 0.052 ms, 4 launches"
    assert "GGML linear" in lines[1]
    assert "30.0 %" in lines[1]
    (last,) = trace.steps_of(trace.read_events(path), "execute_context_0(0)_generation_1(", skip=4)
    assert [line.split()[:3] for line in report.sequence(last)][2] == ["35.0", "5.0", "12.00"]


def test_a_step_on_two_streams_is_one_step() -> None:
    """As torch marks it: the second stream's stretches of work once each, inside the first stream's mark."""
    events = []
    for i in range(4):
        at, name = 1000.0 + 100 * i, "execute_context_0(0)_generation_1(1)"
        marks = [(at, 95.0, 7), (at, 20.0, 13), (at + 30, 20.0, 13), (at + 60, 20.0, 13)]
        for start, length, stream in marks:
            events.append(event("gpu_user_annotation", name, start, length) | {"tid": stream})
        events += [event("kernel", "gate_up_kernel", at, 40), event("kernel", "linear_kernel", at + 30, 50)]
    found = trace.breakdown(events, "execute_context_0(0)_generation_1(", skip=1)
    assert (found.steps, found.step_us, found.busy_us, found.launches) == (2, 100, 80, 2)
    assert sum(share.us for share in found.kernels) == 90


def test_a_trace_without_what_is_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="no GPU kernels"):
        trace.breakdown([event("cpu_op", "aten::mm", 1, 1)])
    with pytest.raises(ValueError, match="no whole step"):
        trace.breakdown(step(1000, 1))


def test_a_trace_of_torch_itself_is_read(tmp_path: Path) -> None:
    """torch's own events have the fields that the arithmetic takes; on a CPU there are no kernels among them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    mark = "execute_context_0(0)_generation_1(1)"
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(mark):
        torch.ones(8, 8) @ torch.ones(8, 8)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = trace.read_events(path)
    marked = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == mark]
    assert len(marked) == 1
    assert {"ts", "dur", "name"} <= marked[0].keys()
    with pytest.raises(ValueError, match="no GPU kernels"):
        trace.breakdown(events)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gate_up_kernel", groups.MOE),
        ("integer_gate_up_kernel", groups.MOE),
        ("integer_linear_kernel", groups.LINEAR),
        ("fit_kernel", groups.FITS),
        ("sparse_mla_fwd_kernel", groups.ATTENTION),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, long)", groups.SMALL),
        ("void vllm::moe::grouped_topk_fused_kernel<float, float>(float*, long)", groups.ROUTER),
        ("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT", groups.GEMM),
        ("Memset (Device)", groups.COPY),
        ("_gumbel_sample_kernel", groups.SAMPLER),
        ("mystery", groups.OTHER),
    ],
)
def test_kernels_are_grouped(name: str, group: str) -> None:
    assert groups.group_of(name) == group


def test_every_kernel_of_ours_has_a_group() -> None:
    own = groups.own_kernels()
    assert {"linear_kernel", "gate_up_kernel", "down_kernel", "sparse_mla_fwd_kernel"} <= own.keys()
    assert all(groups.group_of(name) == own[name] for name in own)
    assert not [name for name in own if name.endswith("_kernel") and own[name].startswith("ours: ")]
