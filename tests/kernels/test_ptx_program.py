"""What the tests that run compiled kernels rely on: copies to shared memory, matrices, fp16."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ptx_program import Program

# Two warps copy 16 bytes a thread, but for the last four, which get zeros, and read what the other warp copied.
COPIES = """
{
ld.param.b64 %rd1, [parameter_0];
ld.param.b64 %rd2, [parameter_1];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mov.b32 %r3, global_smem;
add.s32 %r4, %r3, %r2;
cvt.u64.u32 %rd3, %r2;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
setp.lt.u32 %p1, %r1, 60;
selp.b32 %r5, 16, 0, %p1;
cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10, %r5;
cp.async.commit_group;
SECOND
cp.async.commit_group;
cp.async.wait_group 0x1;
bar.sync 0;
xor.b32 %r6, %r2, 512;
add.s32 %r7, %r3, %r6;
ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r7];
st.global.v4.b32 [%rd5], {%r8, %r9, %r10, %r11};
LAST
ret;
}"""
COPY = "cp.async.cg.shared.global [ %r4 + PLACE ], [ %rd4 + 0 ], 0x10, %r5;"
AGAIN, SECOND = COPY.replace("PLACE", "0"), COPY.replace("PLACE", "1024")
OF_SECOND = "ld.shared.b32 %r12, [%r4+1024];"


def run_copies(text: str, second: str = "", last: str = "") -> None:
    given = np.arange(240, dtype=np.int32)
    out = np.zeros(256, np.int32)
    Program(text.replace("SECOND", second).replace("LAST", last), 64, 2048).run((0,), [given, out])
    expected = np.concatenate((given, np.zeros(16, np.int32))).reshape(2, -1)[::-1].reshape(-1)
    assert (out == expected).all()


def test_copies_arrive() -> None:
    run_copies(COPIES)
    run_copies(COPIES, SECOND)
    run_copies(COPIES, SECOND, "cp.async.wait_group 0x0;" + OF_SECOND)
    run_copies(COPIES, SECOND, "bar.sync 0;" + AGAIN)


@pytest.mark.parametrize(
    ("old", "new", "second", "last", "message"),
    [
        ("wait_group 0x1", "wait_group 0x2", SECOND, "", "not waited for"),
        ("bar.sync 0;", "", SECOND, "", "another thread's copy"),
        ("", "", SECOND, OF_SECOND, "not waited for"),
        ("", "", SECOND, "bar.sync 0;" + OF_SECOND, "not waited for"),
        ("", "", SECOND, AGAIN, "write and read without a barrier"),
        ("cp.async.commit_group;\ncp.async.wait", "cp.async.wait", "", "", "not waited for"),
        ("0x10, %r5", "0x10, 0x10", "", "", "outside of parameter 1"),
    ],
)
def test_copies_touched_too_early_are_noticed(old: str, new: str, second: str, last: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_copies(COPIES.replace(old, new) if old else COPIES, second, last)


# A 16 x 16 and a 16 x 8 matrix, fp16, times each other, plus 1, each half of the rows through a stmatrix.
PRODUCT = """
{
ld.param.b64 %rd1, [parameter_0];
ld.param.b64 %rd2, [parameter_1];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
cvt.u64.u32 %rd3, %r2;
add.s64 %rd4, %rd1, %rd3;
mov.b32 %r3, global_smem;
add.s32 %r4, %r3, %r2;
cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10, 0x10;
setp.lt.u32 %p1, %r1, 16;
@%p1 cp.async.cg.shared.global [ %r4 + 512 ], [ %rd4 + 512 ], 0x10, 0x10;
cp.async.commit_group;
cp.async.wait_group 0;
bar.warp.sync -1;
and.b32 %r5, %r1, 15;
shl.b32 %r6, %r5, 5;
and.b32 %r7, %r1, 16;
or.b32 %r8, %r6, %r7;
add.s32 %r9, %r3, %r8;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r9];
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r4+512];
mov.b32 %f1, 0f3F800000;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, ONES;
cvt.rn.f16x2.f32 %r20, %f3, %f2;
cvt.rn.f16x2.f32 %r21, %f5, %f4;
stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4+512], {%r20, %r21};
shl.b32 %r22, %r1, 3;
add.s32 %r23, %r3, %r22;
ld.shared.v2.b32 {%r24, %r25}, [%r23+512];
mad.wide.u32 %rd5, %r1, 8, %rd2;
st.global.v2.b32 [%rd5], {%r24, %r25};
ret;
}""".replace("ONES", "{%f1, %f1, %f1, %f1}")


def test_matrices_are_multiplied() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + 1).astype(np.float32).astype(np.float16)
    given, out = np.concatenate((a.reshape(-1), b.reshape(-1))), np.zeros((16, 8), np.float16)
    Program(PRODUCT, 32, 768).run((0,), [given, out])
    assert (out == expected).all()
    Program(PRODUCT.replace("x2.shared", "x2.trans.shared"), 32, 768).run((0,), [given, out])
    assert (out == np.concatenate((expected[:8].T, expected[8:].T))).all()


SMALL = """
{
ld.param.b64 %rd1, [parameter_0];
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
fma.rn.f16x2 %r5, %r1, %r2, %r3;
st.global.b32 [%rd1], %r5;
{ .reg .b32 t; add.rn.f16x2 t, %r1, %r3; st.global.b32 [%rd1+4], t; }
mov.b32 {%rs1, %rs2}, %r4;
cvt.f32.f16 %f1, %rs2;
cvt.rn.bf16x2.f32 %r6, %f1, 0f3F808000;
st.global.b32 [%rd1+8], %r6;
{ .reg .b32 t; st.global.b32 [%rd1+12], t; }
ret;
}"""


def test_small_numbers_are_rounded_once() -> None:
    given = np.array([1023 / 1024, 300, 1025 * 2**-21, 300, 1 + 2**-10, 1.5, 0, -2], np.float16)
    Program(SMALL, 1, 0).run((0,), [given])
    # The exact sum lies 2^-31 below the middle of two neighbours, for which fp32 would take it.
    assert given[:2].tolist() == [1 + 2**-10, np.inf]
    assert given[2:4].tolist() == [2, 301.5]
    assert given.view(np.uint16)[4:6].tolist() == [0x3F80, 0xC000]
    assert np.isnan(given[6:]).all(), "another block's register"
