"""Work runs on the current stream, forward and backward. (Each op: op_suite.py.)"""

import pytest
import torch
from op_suite import Make, assert_same_bits, needs_cuda
from torch.autograd import DeviceType

import lltm_ext
from lltm_ext import _portable

pytestmark = needs_cuda


def model():
    torch.manual_seed(0)
    return lltm_ext.LLTM(7, 16, num_layers=2, bidirectional=True, device="cuda")


def gradients(layer, input):
    layer.zero_grad()
    layer(input)[0].square().sum().backward()
    return [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("backward_from", ["the same", "another"])
def test_a_training_step_on_a_side_stream_equals_one_on_the_default_stream(backward_from):
    layer, value = model(), Make(device="cuda")(30, 8, 7)
    expected = [g.clone() for g in gradients(layer, value)]
    late = torch.zeros_like(value)
    layer.zero_grad()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(value)
        loss = layer(late)[0].square().sum()
        if backward_from == "the same":
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    if backward_from == "another":
        loss.backward()
    torch.cuda.synchronize()
    assert_same_bits([p.grad for p in layer.parameters()], expected)


def test_four_streams_at_once_do_not_disturb_each_other():
    layer = model()
    inputs = [Make(device="cuda", seed=seed)(30, 8, 7) for seed in range(4)]
    expected = [layer(x)[0].detach().clone() for x in inputs]
    torch.cuda.synchronize()
    found = []
    streams = [torch.cuda.Stream() for _ in inputs]
    for x, stream in zip(inputs, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(layer(x)[0].detach())
    torch.cuda.synchronize()
    assert_same_bits(found, expected)


def test_no_call_waits_for_the_gpu():
    layer, input = model(), Make(device="cuda")(30, 8, 7)
    a = Make(device="cuda")(63, 65)
    lltm_ext.gemm(a, a.T)
    gradients(layer, input)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(layer, input)
        lltm_ext.sigmoid(lltm_ext.relu(lltm_ext.round(lltm_ext.gemm(a, a.T))))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(_portable.in_use, reason="the portable library has no second stream")
def test_two_directions_that_run_stepwise_use_two_streams():
    layer = lltm_ext.LSTM(7, 16, bidirectional=True, device="cuda", dtype=torch.float64)
    input = Make(torch.float64, "cuda")(30, 8, 7)
    layer(input)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        layer(input)
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and "recurrence" in event.name()
    ]
    assert len(kernels) >= 60
    assert len({kernel.device_resource_id() for kernel in kernels}) == 2
