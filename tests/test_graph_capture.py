"""CUDA graphs: a captured layer runs again on new values, no launch missing. (Each op: op_suite.py.)"""

import copy

import torch
from op_suite import BACKWARD, FORWARD, Make, assert_all_near, assert_near, needs_cuda

import lltm_ext

pytestmark = needs_cuda


def test_a_captured_training_step_equals_eager():
    torch.manual_seed(0)
    layer = lltm_ext.LLTM(7, 16, num_layers=2, bidirectional=True, device="cuda")
    eager = copy.deepcopy(layer)
    input = Make(device="cuda")(20, 8, 7)

    def step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizers = {m: torch.optim.SGD(m.parameters(), 0.1) for m in (layer, eager)}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, optimizers[layer], input)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizers[layer].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(layer, optimizers[layer], input)
    eager.load_state_dict(layer.state_dict())
    for seed in range(1, 4):
        value = Make(device="cuda", seed=seed)(20, 8, 7)
        input.copy_(value)
        graph.replay()
        expected = step(eager, optimizers[eager], value)
        assert_near(loss, expected, BACKWARD[torch.float32])
        assert_all_near(list(layer.parameters()), list(eager.parameters()), BACKWARD[torch.float32])


def test_make_graphed_callables_equals_eager():
    layer = lltm_ext.LLTM(7, 16, device="cuda")
    input = Make(device="cuda")(20, 8, 7)
    plain = copy.deepcopy(layer)

    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0]

    graphed = torch.cuda.make_graphed_callables(Output(), (input.clone(),))
    output = graphed(input)
    assert_near(output, plain(input)[0], FORWARD[torch.float32])
    output.sum().backward()
    plain(input)[0].sum().backward()
    assert_all_near(
        [p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()], BACKWARD[torch.float32]
    )


def test_torch_compile_with_cuda_graphs_equals_eager(fresh_dynamo):
    layer = lltm_ext.LLTM(7, 16, device="cuda")
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        input = Make(device="cuda", seed=seed)(20, 8, 7)
        with torch.no_grad():
            assert_near(compiled(input)[0].clone(), layer(input)[0], FORWARD[torch.float32])
