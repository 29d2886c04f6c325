"""What training does around a layer: loss scaling, other parameters in a call, activations kept elsewhere."""

import pytest
import torch
from op_suite import BACKWARD, DOUBLE, Make, assert_all_near, assert_same_bits, sum_of_squares

import lltm_ext
from lltm_ext.cells import ugrnn

LAYERS = {
    "LSTM": lambda **options: lltm_ext.LSTM(3, 5, **options),
    "LLTM": lambda **options: lltm_ext.LLTM(3, 5, **options),
    "GRU": lambda **options: lltm_ext.GRU(3, 5, **options),
    "RNN": lambda **options: lltm_ext.RNN(3, 5, **options),
    "own cell": lambda **options: lltm_ext.Recurrent(ugrnn, 3, 5, **options),
}
of_each_layer = pytest.mark.parametrize("name", LAYERS)


@of_each_layer
def test_grad_scaler_skips_steps_that_overflow_and_then_gives_the_gradients(name, device):
    layer, input = LAYERS[name](device=device), Make(device=device)(6, 4, 3)
    start = [p.detach().clone() for p in layer.parameters()]
    sum_of_squares(layer(input)[0]).backward()
    expected = [p.grad.clone() for p in layer.parameters()]

    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler, skipped = torch.amp.GradScaler(device, init_scale=2.0**20), 0
    while True:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            output = layer(input)[0]
        scaler.scale(sum_of_squares(output.float())).backward()
        scaler.unscale_(optimizer)
        gradients = [p.grad.clone() for p in layer.parameters()]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == scale:
            break
        skipped += 1
        assert_same_bits(list(layer.parameters()), start)
    assert 1 <= skipped < 20
    assert_all_near(gradients, expected, 3 * BACKWARD[torch.float16], "gradient")
    assert not torch.equal(layer.weight_hh_l0, start[1])


@of_each_layer
def test_functional_call_computes_with_the_given_parameters(name, device):
    layer, other = (LAYERS[name](device=device, dtype=DOUBLE) for _ in range(2))
    input = Make(DOUBLE, device)(6, 4, 3)
    before = [p.detach().clone() for p in layer.parameters()]
    given = {key: p.detach().clone().requires_grad_() for key, p in other.named_parameters()}
    output, _ = torch.func.functional_call(layer, given, (input,))
    gradients = torch.autograd.grad(sum_of_squares(output), list(given.values()))
    expected, _ = other(input)
    assert_same_bits([output], [expected])
    assert_same_bits(gradients, torch.autograd.grad(sum_of_squares(expected), list(other.parameters())))
    assert_same_bits(list(layer.parameters()), before)
    assert all(p.grad is None for p in layer.parameters())


@of_each_layer
def test_activations_may_be_kept_elsewhere(name, device):
    layer, input = LAYERS[name](device=device, dtype=DOUBLE), Make(DOUBLE, device)(6, 4, 3)
    expected = torch.autograd.grad(sum_of_squares(layer(input)[0]), list(layer.parameters()))
    kept = []

    def elsewhere(x):
        kept.append(x)
        return x.cpu().clone()

    with torch.autograd.graph.saved_tensors_hooks(elsewhere, lambda x: x.to(device)):
        loss = sum_of_squares(layer(input)[0])
    assert kept
    assert_same_bits(torch.autograd.grad(loss, list(layer.parameters())), expected)
