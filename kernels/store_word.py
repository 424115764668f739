"""store_word: write a word with a single writer in memory of a peer or of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import interpreted

# By one thread: Triton does not predicate inline assembly as it does its own scalar stores.
_BY_FIRST_THREAD = """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.ORDER.sys.global.b64 [$1], $2;
    mov.u32 $0, 0;
}"""
_RELEASED = tl.constexpr(_BY_FIRST_THREAD.replace("ORDER", "release"))
_RELAXED = tl.constexpr(_BY_FIRST_THREAD.replace("ORDER", "relaxed"))


@triton.jit
def store_word(pointer, value, RELEASE: tl.constexpr, PTX: tl.constexpr):
    """Store an int64 scalar, visible to the whole system; with RELEASE, after this thread's earlier accesses.

    Compiled to a plain store. Atomic operations on memory of a peer or of the host need native atomics, which PCIe may
    lack. Triton has no ordered store, so targets other than PTX, and the interpreter, exchange.
    """
    if PTX:
        assembly: tl.constexpr = _RELEASED if RELEASE else _RELAXED
        address = pointer.to(tl.int64)
        tl.inline_asm_elementwise(assembly, "=r,l,l", [address, value], dtype=tl.int32, is_pure=False, pack=1)
    elif RELEASE:
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(pointer, value, sem="relaxed", scope="sys")


PTX = torch.version.hip is None and not interpreted(store_word)
"""Whether kernels of this process are compiled to PTX."""
