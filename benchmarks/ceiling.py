"""The device's ceiling: its rate of products of values that stay in registers and shared memory.

The kernels are in Triton, which torch for CUDA depends on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from harness import DTYPES, Bench

# Per block: M, N and K of its tiles, how many steps (for about 3 ms), and how many warps.
TILES = {
    "bfloat16": (128, 256, 128, 200, 8),
    "float16": (128, 256, 128, 200, 8),
    "tf32": (128, 256, 64, 200, 8),
    "float64": (64, 64, 16, 1000, 4),
}
ELEMENTS, UNROLLED, STEPS = 1024, 32, 2000  # of float32, which has no tensor cores
BLOCKS = 12  # per multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tiles(x, y, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TF32: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.arange(0, K)
    a = tl.load(x + tl.arange(0, M)[:, None] * K + k[None, :])
    b = tl.load(y + tl.arange(0, N)[None, :] * K + k[:, None])
    sums = tl.zeros((M, N), dtype=out.dtype.element_ty)
    for _ in range(steps):
        sums = tl.dot(a, b, sums, input_precision="tf32" if TF32 else "ieee", out_dtype=out.dtype.element_ty)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(sums, 0), 0))


@triton.jit  # type: ignore[untyped-decorator]
def multiply_add(x, out, steps, ELEMENTS: tl.constexpr, UNROLLED: tl.constexpr):  # type: ignore[no-untyped-def]
    """s <- s^2 + c, which stays within [-2, 2] for c within [-2, 0]."""
    c = tl.load(x + tl.arange(0, ELEMENTS))
    sums = c
    for _ in range(steps):
        for _ in tl.static_range(UNROLLED):
            sums = tl.fma(sums, sums, c)
    tl.store(out + tl.program_id(0), tl.sum(sums, 0))


def ceiling(bench: Bench, dtype: str) -> dict[str, Any]:
    """The rate for random values. dtype "tf32": float32 on tensor cores; "float32": without them."""
    blocks = BLOCKS * torch.cuda.get_device_properties(bench.device).multi_processor_count
    like = {"dtype": DTYPES.get(dtype, torch.float32), "device": bench.device}
    out = torch.empty(blocks, dtype=torch.promote_types(like["dtype"], torch.float32), device=bench.device)
    if dtype == "float32":
        operations = 2 * ELEMENTS * UNROLLED * STEPS
        c = -2 * torch.rand(ELEMENTS, **like)

        def call() -> None:
            multiply_add[(blocks,)](c, out, STEPS, ELEMENTS, UNROLLED, num_warps=4)
    else:
        m, n, k, steps, warps = TILES[dtype]
        operations = 2 * m * n * k * steps
        x, y = torch.randn(m, k, **like), torch.randn(n, k, **like)

        def call() -> None:
            multiply_tiles[(blocks,)](x, y, out, steps, m, n, k, dtype == "tf32", num_warps=warps)

    milliseconds = bench.milliseconds({dtype: call})[dtype]
    return {"dtype": dtype, "TFLOP/s": operations * blocks / milliseconds / 1e9}
