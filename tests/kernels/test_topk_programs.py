"""The selection kernels as they are compiled, Gluon and assembly included, run instruction by instruction."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.kernels.ptx_program import Program
from tests.support.compiling import compiling


@pytest.mark.timeout(300)
def test_compiled_selection_equals_the_reference() -> None:
    results = [json.loads(line) for line in compiling("-m", "tests.kernels.topk_programs")]
    assert {r["kernel"] for r in results} == {"topk_steps_kernel", "topk_block_kernel", "topk_stream_kernel"}
    assert len(results) == 20
    assert not [r for r in results if r["wrong"]]
    # Lists of equal numbers in which the k-th is are selected from as they lie, too.
    (close,) = [r for r in results if r["kernel"] == "topk_stream_kernel" and r["case"] == "close"]
    assert 4 not in close["searched"]
    assert {row for r in results for row in r["searched"]}, "where lists do not fit, their entries are searched"


EXCHANGE = """
{
ld.param.b64 %rd1, [parameter_0];
mov.u32 %r1, %tid.x;
mov.b32 %r2, global_smem;
shl.b32 %r3, %r1, 2;
add.s32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
BARRIER;
xor.b32 %r5, %r3, 128;
add.s32 %r6, %r2, %r5;
ld.shared.b32 %r7, [%r6];
mad.wide.u32 %rd2, %r1, 4, %rd1;
st.global.b32 [%rd2], %r7;
ret;
}"""


def test_programs_exchange_through_shared_memory() -> None:
    out = np.zeros(64, np.int32)
    Program(EXCHANGE.replace("BARRIER", "bar.sync 0"), 64, 256).run((0,), [out])
    assert (out == np.arange(64) ^ 32).all()


def test_a_missing_barrier_and_memory_of_others_are_noticed() -> None:
    with pytest.raises(AssertionError, match="without a barrier"):
        Program(EXCHANGE.replace("BARRIER;", ""), 64, 256).run((0,), [np.zeros(64, np.int32)])
    with pytest.raises(AssertionError, match="outside of parameter 1"):
        Program(EXCHANGE.replace("BARRIER", "bar.sync 0"), 64, 256).run((0,), [np.zeros(63, np.int32)])
    with pytest.raises(AssertionError, match="outside of shared memory"):
        Program(EXCHANGE.replace("BARRIER", "bar.sync 0"), 64, 252).run((0,), [np.zeros(64, np.int32)])


PACK = """
{
ld.param.b64 %rd1, [parameter_0];
mov.u32 %r1, %tid.x;
add.s32 %r2, %r1, 65535;
cvt.u16.u32 %rs1, %r1;
cvt.u16.u32 %rs2, %r2;
mov.b32 %r3, {%rs1, %rs2};
mov.b64 %rd2, {%r3, %r2};
mov.b64 {%r4, %r5}, %rd2;
mov.b32 {%rs3, %rs4}, %r4;
cvt.u32.u16 %r6, %rs4;
mad.wide.u32 %rd3, %r1, 16, %rd1;
st.global.v2.b32 [%rd3], {%r4, %r5};
st.global.b32 [%rd3+8], %r6;
ret;
}"""


def test_registers_are_packed_from_halves_and_taken_apart() -> None:
    out = np.zeros((32, 4), np.uint32)
    Program(PACK, 32, 0).run((0,), [out])
    low = np.arange(32)
    high = (low + 65535) & 0xFFFF
    assert (out[:, 0] == (low | high << 16)).all()
    assert (out[:, 1] == low + 65535).all()
    assert (out[:, 2] == high).all()
