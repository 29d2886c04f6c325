"""Random arguments for recurrent cells."""

import torch
from op_suite import Call

# The gradient jumps where relu and maximum do, and half types round values to the other side. With these
# amounts, added to the bias of a gate and subtracted in every other unit, all units stay far from there.
SIDES = {"rnn_relu": (8,), "indrnn": (8,), "slstm": (6, -6, 0, 0)}


def arguments_of(cell, make, steps, batch, hidden, input_size, bias=True):
    """A Call of input, states, weight_ih, weight_hh, bias, parameters. `steps`: [T, B], or [N] if packed."""
    rows = cell.gates * hidden
    states = [make(batch, hidden, scale=0.5).abs() + 0.1 for _ in cell.state_names]
    weight_ih = make(rows, input_size, scale=0.5 * input_size**-0.5)
    weight_hh = make(rows, hidden, scale=0.5 * hidden**-0.5) if cell.recurrent else None
    biases = make(rows) if bias else None
    if bias and cell.__name__ in SIDES and make.dtype.itemsize == 2:
        sign = torch.tensor([1.0, -1.0]).repeat(hidden)[:hidden]
        biases += torch.outer(torch.tensor(SIDES[cell.__name__]), sign).flatten().to(biases)
        weight_hh = None if weight_hh is None else 0.4 * weight_hh
    parameters = [make(hidden, scale=0.1) for _ in cell.parameters]  # larger peepholes are chaotic
    return Call(make(*steps, input_size), states, weight_ih, weight_hh, biases, parameters)
