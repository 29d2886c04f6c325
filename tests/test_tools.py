"""Tools that know torch's ops take ours too: torch.utils.flop_counter and torch.fx."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lltm_ext

SIZE, H, T, B = 8, 6, 5, 4
ROWS = T * B


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def forward_and_training(module, *inputs):
    """(the operations of a call, and of a call with its backward)"""

    def output():
        found = module(*inputs)
        return found if isinstance(found, torch.Tensor) else found[0]

    return counted(output), counted(lambda: output().sum().backward())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_linear_layer_counts_like_torchs(requires_grad):
    input = torch.randn(T, B, SIZE, requires_grad=requires_grad)
    ours, theirs = (forward_and_training(m(SIZE, H), input) for m in (lltm_ext.Linear, nn.Linear))
    assert ours == theirs


def test_batched_products_count_like_torchs():
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert counted(lambda: lltm_ext.gemm(a, b)) == counted(lambda: torch.bmm(a, b)) == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("name,gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1), ("LLTM", 3)])
def test_a_sequence_counts_its_products(name, gates, directions):
    layer = getattr(lltm_ext, name)(SIZE, H, bidirectional=directions == 2)
    of_input, of_h = (2 * ROWS * gates * H * size * directions for size in (SIZE, H))
    forward = of_input + of_h
    for input, backward in (
        (torch.randn(T, B, SIZE, requires_grad=True), 2 * forward),
        (torch.randn(T, B, SIZE), 2 * forward - of_input),
    ):
        assert forward_and_training(layer, input) == (forward, forward + backward)
    if name in ("GRU", "RNN"):  # of torch's LSTM on the CPU nothing is counted
        peer = getattr(nn, name)(SIZE, H, bidirectional=directions == 2)
        assert counted(lambda: peer(torch.randn(T, B, SIZE))) == forward


def test_a_step_counts_its_products():
    cell, input = lltm_ext.LLTMCell(SIZE, H), torch.randn(B, SIZE, requires_grad=True)
    forward = 2 * B * 3 * H * (SIZE + H)
    assert forward_and_training(cell, input, (torch.zeros(B, H), torch.zeros(B, H))) == (forward, 3 * forward)


MODULES = {
    "Linear": lambda: lltm_ext.Linear(SIZE, H),
    "ReLU": lltm_ext.ReLU,
    "Sigmoid": lltm_ext.Sigmoid,
    "Round": lltm_ext.Round,
    "LLTM": lambda: lltm_ext.LLTM(SIZE, H),
    "Recurrent": lambda: lltm_ext.Recurrent(lltm_ext.cells.ugrnn, SIZE, H, bidirectional=True),
    "LSTM": lambda: lltm_ext.LSTM(SIZE, H),
}


@pytest.mark.parametrize("module", MODULES)
def test_torch_fx_makes_a_node_of_a_module(module):
    model, input = nn.Sequential(nn.Linear(SIZE, SIZE), MODULES[module]()), torch.randn(T, B, SIZE)
    traced = torch.fx.symbolic_trace(model)
    assert [(node.op, str(node.target)) for node in traced.graph.nodes][1:3] == [
        ("call_module", "0"),
        ("call_module", "1"),
    ]
    found, expected = traced(input), model(input)
    torch.testing.assert_close(found, expected)


def test_torch_fx_traces_through_a_module_with_a_forward_of_its_own():
    class Doubled(lltm_ext.ReLU):
        def forward(self, input):
            return 2 * input

    traced = torch.fx.symbolic_trace(nn.Sequential(Doubled()))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]
