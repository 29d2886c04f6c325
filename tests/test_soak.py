"""Many calls: from 8 threads at once with random sizes, and of each op with large tensors.

pytest tests/test_soak.py --soak-seconds 3600    # an hour; make soak: 2,000 s; without the option ten seconds
"""

import ctypes
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from op_suite import FORWARD, Call, Make, assert_accurate, forward_and_gradients
from sequence_suite import sample

import lltm_ext
from lltm_ext.gemm import gemm_reference
from lltm_ext.lltm import lltm_cell_reference, lltm_reference
from lltm_ext.lstm import lstm_reference

THREADS = 8
MIB = 1 << 20


def of_gemm(make, m, n, k, *_):
    return Call(make(m, k), make(k, n), bias=make(n), activation="tanh")


def of_cell(make, b, i, h, *_):
    return Call(make(b, i), make(3 * h, h + i, scale=0.1), make(3 * h), make(b, h), make(b, h))


# Function, the same in pure PyTorch, arguments for four sizes.
OPS = {
    "sigmoid": (lltm_ext.sigmoid, torch.sigmoid, lambda make, m, n, *_: Call(make(m, n))),
    "relu": (lltm_ext.relu, torch.relu, lambda make, m, n, *_: Call(make(m, n).mT)),
    "gemm": (lltm_ext.gemm, gemm_reference, of_gemm),
    "lltm_cell": (lltm_ext.lltm_cell, lltm_cell_reference, of_cell),
    "lltm": (lltm_ext.lltm, lltm_reference, lambda make, *sizes: sample(3, *sizes)(make)),
    "lstm": (lltm_ext.lstm, lstm_reference, lambda make, *sizes: sample(4, *sizes)(make)),
}


def check(op, dtype, device, sizes, seed):
    """A call, its gradients, and a call that is refused."""
    function, reference, arguments = OPS[op]
    call = arguments(Make(dtype, device, seed), *sizes)
    assert_accurate(function, reference, call, dtype, what=f"{op} {dtype} {sizes} {seed}", factor=3)
    with pytest.raises((TypeError, RuntimeError), match=op):
        function(call.args[0].long(), *call.args[1:], **call.kwargs)


class Mallinfo2(ctypes.Structure):
    """glibc's count of what malloc has given, in all threads; see mallinfo2(3)."""

    _fields_ = [(f"field {i}", ctypes.c_size_t) for i in range(10)]
    _fields_[4] = ("hblkhd", ctypes.c_size_t)  # in mappings of their own
    _fields_[7] = ("uordblks", ctypes.c_size_t)  # in arenas


def memory(device):
    """The bytes in use. The size of the process would include freed ones, which malloc keeps."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("needs glibc 2.33")
    mallinfo2.restype = Mallinfo2
    counted = mallinfo2()
    return counted.uordblks + counted.hblkhd


def aborting(barrier, function):
    """The function, whose failure ends the waiting of the other threads."""

    def run(argument):
        try:
            function(argument)
        except BaseException:
            barrier.abort()
            raise

    return run


def test_mixed_calls_from_threads_are_right_and_keep_no_memory(device, pytestconfig):
    half, used, calls = pytestconfig.getoption("--soak-seconds") / 2, [], []
    all_wait = threading.Barrier(THREADS, action=lambda: used.append(memory(device)))

    def soak(thread):
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            for _ in range(2):  # the same calls: in the first half caches fill with their sizes
                drawn = random.Random(thread)
                until = time.monotonic() + half
                while time.monotonic() < until:
                    sizes = [drawn.randint(8, 48) for _ in range(4)]
                    op, dtype = drawn.choice(list(OPS)), drawn.choice(list(FORWARD))
                    check(op, dtype, device, sizes, drawn.getrandbits(30))
                    calls.append(sizes)
                all_wait.wait()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(aborting(all_wait, soak), range(THREADS)))
    grown = used[1] - used[0]
    print(f"{len(calls)} calls in {2 * half:.0f} s, in the second half {grown / MIB:.3f} MiB more")
    assert len(calls) > 10 * THREADS
    assert grown < 64 * MIB


@pytest.mark.parametrize("op", OPS)
def test_repeated_calls_keep_no_tensor(op, device):
    """Refused ones neither. The smallest tensors are of 16 KiB."""
    function, _, arguments = OPS[op]

    def repeat(count):
        for seed in range(count):
            call = arguments(Make(device=device, seed=seed), 8 if op in ("lltm", "lstm") else 64, 64, 64, 64)
            forward_and_gradients(function, call)
            with pytest.raises((TypeError, RuntimeError), match=op):
                function(call.args[0].long(), *call.args[1:], **call.kwargs)

    repeat(5)
    before = memory(device)
    repeat(30)
    assert memory(device) - before < MIB / 4
