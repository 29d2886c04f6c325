"""Cells whose product with h is divided into heads, which persistent kernels run side by side."""

import functools

import pytest
import torch
from cell_examples import CELLS, Example
from op_suite import DOUBLE, FORWARD, Make, assert_all_near, needs_cuda

import lltm_ext
from lltm_ext import cells

pytestmark = needs_cuda

TYPES = (torch.float16, torch.bfloat16, torch.float32)
EXAMPLES = ("slstm", "gru_with_recurrent_dropout", "smoothed_lstm")
on_cuda = functools.partial(Example, device="cuda")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE], ids=str)
@pytest.mark.parametrize("heads,hidden", [(3, 48), (4, 512), (3, 768), (2, 80), (2, 26)])
def test_values_and_gradients_equal_the_loop(name, dtype, heads, hidden):
    on_cuda(CELLS[name], dtype, length=6, batch=11, hidden=hidden, heads=heads).check()


@pytest.mark.parametrize("algorithm", ["stepwise", "cluster", "grid"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_algorithm_equals_the_loop(algorithm, dtype):
    on_cuda(cells.slstm, dtype, length=6, batch=11, hidden=96, heads=4).check(algorithm=algorithm)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_resets_and_packed_rows(name, reset_to):
    example = functools.partial(on_cuda, CELLS[name], hidden=48, reset=True, reset_to=reset_to, heads=3)
    example(length=8, batch=4).check()
    example(sizes=[5, 5, 4, 2, 1]).check(reverse=True)


def test_many_rows_equal_the_loop():
    on_cuda(cells.slstm, torch.float16, length=3, batch=700, hidden=512, heads=4).check()


def test_half_types_run_in_clusters_where_a_dense_product_would_not():
    make = Make(torch.float16, "cuda")
    states = tuple(make(512, 512) for _ in range(4))
    call = make(20, 512, 2048), states, None
    heads, dense = make(2048, 128, scale=0.1), make(2048, 512, scale=0.1)
    for backward in (False, True):
        assert cells.slstm.algorithm(*call, heads, backward=backward) == "cluster"
        assert cells.slstm.algorithm(*call, dense, backward=backward) != "cluster"


def test_both_directions_equal_those_of_a_dense_weight():
    layer, dense = (
        lltm_ext.Recurrent(cells.slstm, 16, 96, heads=heads, bidirectional=True, device="cuda", dtype=DOUBLE)
        for heads in (3, 1)
    )
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        for name, x in dense.named_parameters():
            given = parameters[name]
            if name.startswith("weight_hh"):
                blocks = given.view(4, 3, 32, 32)
                given = torch.cat([torch.block_diag(*gate) for gate in blocks])
            x.copy_(given)
    layer, dense = layer.float(), dense.float()
    input = torch.randn(7, 5, 16, device="cuda")
    (y, final), (expected, final_of_dense) = layer(input), dense(input)
    assert_all_near([y, *final], [expected, *final_of_dense], FORWARD[torch.float32])
