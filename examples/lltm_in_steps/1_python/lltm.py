"""Step 1, Python: the cell in torch's ops. All later steps compute the same, and are compared with it.

The mistake that people make here:
    RuntimeError: Trying to backward through the graph a second time
Cause: the state after one batch is where the next batch starts, and it still has the first batch's graph.
Cure: detach it between the batches, as `train` does.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


def pointwise(gates: Tensor, c: Tensor) -> State:
    """The part of a step without products: gates [B, 3H] and the cell c [B, H] give the new h and c."""
    i, o, z = gates.chunk(3, dim=1)
    c = c + F.elu(z) * torch.sigmoid(i)
    return torch.tanh(c) * torch.sigmoid(o), c


def lltm_cell(x: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> State:
    """One step: x [B, I], weights [3H, H + I], bias [3H], h and c [B, H]."""
    return pointwise(F.linear(torch.cat([h, x], dim=1), weights, bias), c)


def steps(cell, input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor):
    """A sequence: input [T, B, I] gives the output [T, B, H], and h and c after the last step."""
    output = []
    for x in input:
        h, c = cell(x, weights, bias, h, c)
        output.append(h)
    return torch.stack(output), h, c


class LLTM(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3 * hidden_size, hidden_size + input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_size), 1 / math.sqrt(hidden_size))

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        output, h, c = steps(lltm_cell, input, self.weights, self.bias, *state)
        return output, (h, c)


def train(layer: LLTM, batches: list[Tensor], state: State) -> list[float]:
    """Trains the layer to repeat its input, and returns the losses. A batch starts in the last state."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for input in batches:
        output, (h, c) = layer(input, state)
        state = h.detach(), c.detach()  # without this the second backward fails
        loss = F.mse_loss(output[:, :, : input.shape[2]], input)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
