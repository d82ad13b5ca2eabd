"""Pairs of float32 numbers at places that each element of a tile names.

Before loads and stores of Triton a tile moves through shared memory to a layout in which places
that follow one another are a warp's, and back. Here places follow from counts: on CUDA each thread
reads and writes those of the elements that it holds, by instructions of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from posenc.attention.backends.triton.kernels.memory import INTERPRETED


@triton.jit
def reciprocal(x):
    """``1 / x`` for normal x, with an error of an ulp."""
    if INTERPRETED or not is_cuda():
        inverse = 1 / x
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def load_pairs(start, at):
    """Both numbers of the pairs at places, counted from the pointer ``start``."""
    if INTERPRETED or not is_cuda():
        both = tl.load(start + at)
        first = both.to(tl.uint32).to(tl.float32, bitcast=True)
        second = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [start + at],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second


@triton.jit
def store_pairs(start, at, first, second, mask):
    """Write pairs to places, counted from the pointer ``start``, where the mask holds."""
    if INTERPRETED or not is_cuda():
        low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(start + at, (low | (high << 32)).to(tl.int64, bitcast=True), mask=mask)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ne.s32 chosen, $4, 0;
            @chosen st.global.v2.f32 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,f,f,r",
            [(start + at).to(tl.int64), first, second, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
