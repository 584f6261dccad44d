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
    assert len(results) == 13
    assert not [r for r in results if r["wrong"]]


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
    Program(EXCHANGE.replace("BARRIER", "bar.sync 0"), 64).run(0, [out])
    assert (out == np.arange(64) ^ 32).all()


def test_a_missing_barrier_and_memory_of_others_are_noticed() -> None:
    with pytest.raises(AssertionError, match="without a barrier"):
        Program(EXCHANGE.replace("BARRIER;", ""), 64).run(0, [np.zeros(64, np.int32)])
    with pytest.raises(AssertionError, match="outside"):
        Program(EXCHANGE.replace("BARRIER", "bar.sync 0"), 64).run(0, [np.zeros(63, np.int32)])
