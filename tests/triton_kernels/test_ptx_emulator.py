"""What the emulator of PTX refuses, with instructions written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.ptx.block import Kernel
from harness.ptx.global_memory import GlobalMemory
from harness.ptx.shared_memory import SharedMemory
from harness.ptx.values import Fault

THREADS = 64  # two warps
PTX = """
.visible .entry a_kernel(
	.param .u64 .ptr .global .align 1 a_kernel_param_0,
	.param .u32 a_kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
$L__func_begin0:
	ld.param.b64 	%rd1, [a_kernel_param_0];
	ld.param.b32 	%r9, [a_kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;   // of this thread
	shl.b32 	%r2, %r1, 2;
	{code}
	st.global.b32 	[%rd3], %r3;
	ret;
$L__tmp1:
$L__func_end0:
}}
"""
NEIGHBOUR = "xor.b32 %r4, %r1, 32; shl.b32 %r5, %r4, 2;"  # of the other warp


COPY = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x4; cp.async.commit_group;"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (f"st.shared.b32 [%r2], %r1; {NEIGHBOUR} ld.shared.b32 %r3, [%r5];", "read before a barrier"),
        (
            f"st.shared.b32 [%r2], %r1; bar.sync 0; {NEIGHBOUR} ld.shared.b32 %r3, [%r5]; st.shared.b32 [%r2], %r1;",
            "overwritten before a barrier",
        ),
        (f"{NEIGHBOUR} st.shared.b32 [%r2], %r1; st.shared.b32 [%r5], %r1;", "by two warps without a barrier"),
        ("st.shared.b32 [0], %r1;", "two threads write different values at one place of shared"),
        ("ld.shared.b32 %r3, [%r2];", "that nothing wrote"),
        ("ld.shared.b32 %r3, [%r2+4];", "shared access of 4 bytes"),
        ("ld.shared.b32 %r3, [%r2+2];", "misaligned"),
        (f"{COPY} ld.shared.b32 %r3, [%r2];", "while cp.async is in flight"),
        (f"{COPY} {COPY}", "where another copy is in flight"),
        ("ld.global.b32 %r3, [%rd3+256];", "outside all tensors: 256 from the first of 256 bytes of out"),
        ("setp.lt.u32 %p1, %r1, 3; @%p1 ld.global.b32 %r3, [%rd3+2];", "misaligned"),
        ("st.global.b32 [%rd1], %r1;", "two threads store different values at one place of out"),
        ("st.global.b32 [%rd3], %r1; ld.global.b32 %r3, [%rd1];", "a thread reads what another has written"),
        ("setp.lt.u32 %p1, %r1, 3; @%p1 bra $L__tmp1;", "branch apart"),
        ("mov.u32 %r3, %ctaid.x;", "overwrites another's value"),  # another block's
    ],
)
def test_what_it_refuses(code: str, fault: str) -> None:
    out = torch.zeros(THREADS, dtype=torch.int32)
    memory = GlobalMemory()
    memory.add(out, "out")
    kernel = Kernel(PTX.format(code=code, threads=THREADS), shared_bytes=4 * THREADS)
    with pytest.raises(Fault, match=fault):
        kernel.launch(2, [out.data_ptr(), 0], memory)


def test_what_wgmma_reads_stays_until_it_is_waited_for() -> None:
    shared, place, warp = SharedMemory(64), np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    shared.write(place, np.ones((1, 1), np.uint8), warp)
    with pytest.raises(Fault, match="written since the last barrier"):
        shared.multiply(place)
    shared.barrier()
    shared.multiply(place)
    shared.commit_products()
    with pytest.raises(Fault, match="overwritten while wgmma reads it"):
        shared.write(place, np.ones((1, 1), np.uint8), warp)
    shared.wait_products(0)
    shared.write(place, np.ones((1, 1), np.uint8), warp)
