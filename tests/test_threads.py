"""Calls from several Python threads at once: modules hold no state and release the GIL."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from op_suite import Make, assert_same_bits

import lltm_ext
from lltm_ext import _C


def training_step(seed, device):
    make = Make(device=device, seed=seed)
    input, h, c = make(20, 8, 7).requires_grad_(), make(8, 16), make(8, 16)
    weights = [x.requires_grad_() for x in (make(48, 7, scale=0.3), make(48, 16, scale=0.3), make(48))]
    output, _ = lltm_ext.lltm(input, (h, c), *weights)
    product = lltm_ext.gemm(output.flatten(0, 1), make(16, 9))
    y = lltm_ext.sigmoid(lltm_ext.relu(product)) + lltm_ext.round(make(9))
    return [y.detach(), *torch.autograd.grad(y.sum(), [input, *weights])]


def test_concurrent_threads_get_the_values_of_a_single_thread(device):
    expected = [training_step(seed, device) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = pool.map(training_step, range(8), [device] * 8)
            for actual, single in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, single)


def test_raw_bindings_release_the_gil():
    """While one thread is inside a long call, another counts."""
    x = torch.randn(20_000_000, dtype=torch.double)
    inside, counts = threading.Event(), []

    def compute():
        inside.set()
        for _ in range(3):
            _C.sigmoid.forward(x)
        counts.append("done")

    worker = threading.Thread(target=compute)
    worker.start()
    inside.wait()
    while worker.is_alive():
        counts.append("tick")
        worker.join(0.001)
    assert counts.count("tick") > 10
    assert_same_bits([_C.sigmoid.forward(x[:5])], [lltm_ext.sigmoid(x[:5])])
