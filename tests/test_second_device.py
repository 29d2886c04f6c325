"""Tensors on a device that is not current, and on two devices in one call. (Each op: op_suite.py.)"""

import pytest
import torch
from op_suite import FORWARD, Call, Make, assert_all_near, needs_cuda, needs_two_gpus

import lltm_ext
from lltm_ext import _C


@needs_two_gpus
@pytest.mark.parametrize("layer", [lltm_ext.LLTM, lltm_ext.LSTM, lltm_ext.GRU, lltm_ext.RNN])
def test_a_layer_runs_on_a_device_that_is_not_current(layer):
    torch.cuda.set_device(0)
    layer = layer(7, 16, num_layers=2, bidirectional=True, device="cuda:1")
    input = Make(device="cuda:1")(20, 8, 7)
    output, _ = layer(input)
    output.sum().backward()
    assert torch.cuda.current_device() == 0
    on_current = layer.to("cuda:0")
    assert_all_near([output], [on_current(input.to("cuda:0"))[0]], FORWARD[torch.float32])


@needs_two_gpus
def test_raw_bindings_run_on_a_device_that_is_not_current():
    torch.cuda.set_device(0)
    x = Make(device="cuda:1")(63, 5)
    assert_all_near([_C.sigmoid.forward(x)], [x.sigmoid()], FORWARD[torch.float32])
    c = torch.empty(63, 63, device="cuda:1")
    _C.gemm.gemm(c, x, x.t().contiguous())
    assert_all_near([c], [x.double() @ x.double().t()], FORWARD[torch.float32])


MIXED = {
    "gemm": (lltm_ext.gemm, lambda make: Call(make(4, 3), make(3, 5)), ("a", "b")),
    "bias": (lltm_ext.gemm, lambda make: Call(make(4, 3), make(3, 5), bias=make(5)), ("a", "b", "bias")),
    "lltm_cell": (
        lltm_ext.lltm_cell,
        lambda make: Call(make(4, 3), make(15, 8), make(15), make(4, 5), make(4, 5)),
        ("input", "weights", "bias", "old_h", "old_cell"),
    ),
    "lltm": (
        lltm_ext.lltm,
        lambda make: Call(make(6, 4, 3), (make(4, 5), make(4, 5)), make(15, 3), make(15, 5), make(15)),
        ("input", "h0", "c0", "weight_ih", "weight_hh", "bias"),
    ),
}


def assert_each_argument_is_refused(mixed, device, other_device):
    """Each argument on `other_device`, the others on `device`."""
    function, make_call, names = MIXED[mixed]
    call = make_call(Make(device=device))
    for i, name in enumerate(names):
        tensors = [x.to(other_device) if i == j else x for j, x in enumerate(call.tensors)]
        # The others are compared with the first, so the message names one of them if the first is bad.
        argument = r"\w+" if i == 0 else name
        with pytest.raises(RuntimeError, match=rf"^\w+: expected {argument} on \S+, got \S+"):
            call.with_tensors(tensors).run(function)


@needs_cuda
@pytest.mark.parametrize("mixed", MIXED)
def test_a_cpu_tensor_among_cuda_tensors_is_refused(mixed):
    assert_each_argument_is_refused(mixed, "cuda", "cpu")


@needs_two_gpus
@pytest.mark.parametrize("mixed", MIXED)
def test_tensors_of_two_gpus_are_refused(mixed):
    assert_each_argument_is_refused(mixed, "cuda:0", "cuda:1")


@pytest.mark.parametrize("mixed", MIXED)
def test_a_meta_tensor_among_cpu_tensors_is_refused(mixed):
    assert_each_argument_is_refused(mixed, "cpu", "meta")
