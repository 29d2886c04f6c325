"""Ready cells of :func:`lltm_ext.recurrence`, each a function and a cell for :class:`lltm_ext.Recurrent`.

In the formulas the name of a gate is also the sum of its products and its bias, so ``i = sigmoid(i)`` is
``sigmoid(W_ii x + W_hi h + b_i)``. The weights have a block of rows for each gate, in the order given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lltm_ext._program import compiled
from lltm_ext.recurrence import recurrence
from lltm_ext.spike import spike

__all__ = [
    "cfc",
    "cifg",
    "dreamer_block_gru",
    "dreamer_gru",
    "gru",
    "indrnn",
    "janet",
    "layer_norm_lstm",
    "lif",
    "lltm",
    "lstm",
    "mingru",
    "minlstm",
    "peephole_lstm",
    "rg_lru",
    "rnn_relu",
    "rnn_tanh",
    "slstm",
    "sru",
    "ugrnn",
    "zoneout_lstm",
]


@recurrence(gates=1)
def rnn_tanh(x):
    """``h' = tanh(a)``, as nn.RNN.

    Source: Elman, "Finding Structure in Time", 1990.
    """
    return torch.tanh(x[0])


@recurrence(gates=1)
def rnn_relu(x):
    """``h' = relu(a)``, as nn.RNN with nonlinearity="relu".

    Source: Le et al., "A Simple Way to Initialize Recurrent Networks of Rectified Linear Units", 2015.
    """
    return torch.relu(x[0])


@recurrence(gates=3, separate=True, parameters=("b_hn",))
def gru(x, r, h, p):
    """Gates reset, update and candidate, as in nn.GRU::

        r, z = sigmoid(r), sigmoid(z)
        n = tanh(W_in x + b_n + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, in the form of
    torch.nn.GRU, which multiplies by the reset gate after the product.
    """
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    candidate = torch.tanh(x[2] + reset * (r[2] + p.b_hn))
    return (1 - update) * candidate + update * h


@compiled
@recurrence(gates=4, states=("c",))
def lstm(x, s):
    """Gates input, forget, cell and output, as in :func:`lltm_ext.lstm`::

        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(c')

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, in the form of torch.nn.LSTM.
    """
    i, f, g, o = x
    c = torch.sigmoid(f) * s.c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), (c,)


@compiled
@recurrence(gates=3, states=("c",))
def lltm(x, s):
    """Gates input, output and candidate, as in :func:`lltm_ext.lltm`::

        c' = c + elu(z) * sigmoid(i)
        h' = tanh(c') * sigmoid(o)

    Source: Goldsborough, "Custom C++ and CUDA Extensions", PyTorch tutorials.
    """
    i, o, z = x
    c = s.c + F.elu(z) * torch.sigmoid(i)
    return torch.tanh(c) * torch.sigmoid(o), (c,)


@recurrence(gates=3, states=("c",))
def cifg(x, s):
    """An LSTM whose input gate is 1 minus its forget gate; gates forget, cell and output::

        c' = sigmoid(f) * c + (1 - sigmoid(f)) * tanh(g)
        h' = sigmoid(o) * tanh(c')

    Source: Greff et al., "LSTM: A Search Space Odyssey", 2015 (coupled input and forget gate).
    """
    forget, g, o = torch.sigmoid(x[0]), x[1], x[2]
    c = forget * s.c + (1 - forget) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), (c,)


@recurrence(gates=4, states=("c",), parameters=("w_ci", "w_cf", "w_co"))
def peephole_lstm(x, s, p):
    """An LSTM whose gates see the cell state of their unit; gates input, forget, cell and output::

        i, f = sigmoid(i + w_ci * c), sigmoid(f + w_cf * c)
        c' = f * c + i * tanh(g)
        h' = sigmoid(o + w_co * c') * tanh(c')

    Source: Gers, Schraudolph and Schmidhuber, "Learning Precise Timing with LSTM Recurrent Networks", 2002.
    """
    i, f = torch.sigmoid(x[0] + p.w_ci * s.c), torch.sigmoid(x[1] + p.w_cf * s.c)
    c = f * s.c + i * torch.tanh(x[2])
    return torch.sigmoid(x[3] + p.w_co * c) * torch.tanh(c), (c,)


@recurrence(gates=2)
def ugrnn(x, h):
    """The update gate RNN; gates update and candidate::

        h' = sigmoid(g) * h + (1 - sigmoid(g)) * tanh(c)

    Source: Collins, Sohl-Dickstein and Sussillo, "Capacity and Trainability in Recurrent Neural Networks",
    2017.
    """
    update = torch.sigmoid(x[0])
    return update * h + (1 - update) * torch.tanh(x[1])


@recurrence(gates=2, states=("c",))
def janet(x, s):
    """Just another network: an LSTM with a forget gate only; gates forget and cell::

        c' = sigmoid(f) * c + (1 - sigmoid(f - 1)) * tanh(g)
        h' = c'

    c repeats h, but is not rounded in half types.

    Source: van der Westhuizen and Lasenby, "The Unreasonable Effectiveness of the Forget Gate", 2018, with
    beta = 1.
    """
    c = torch.sigmoid(x[0]) * s.c + (1 - torch.sigmoid(x[0] - 1)) * torch.tanh(x[1])
    return c, (c,)


@recurrence(gates=4, states=("c", "n", "m"))
def slstm(x, s):
    """The scalar LSTM of the xLSTM; gates input, forget, cell and output::

        m' = max(logsigmoid(f) + m, i)
        i, f = exp(i - m'), exp(logsigmoid(f) + m - m')
        c' = f * c + i * tanh(z)
        n' = f * n + i
        h' = sigmoid(o) * c' / n'

    m keeps the exponentials at most 1. The paper's blocks are ``heads`` of a layer.

    Source: Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, with the sigmoid as forget gate.
    """
    i, f, z, o = x
    log_f = F.logsigmoid(f) + s.m
    m = torch.maximum(log_f, i)
    i, f = torch.exp(i - m), torch.exp(log_f - m)
    c, n = f * s.c + i * torch.tanh(z), f * s.n + i
    return torch.sigmoid(o) * c / n, (c, n, m)


@recurrence(gates=1, parameters=("w_hh",), recurrent=False)
def indrnn(x, h, p):
    """``h' = relu(a + w_hh * h)``: each unit sees its own h only. The product has no h.

    Source: Li et al., "Independently Recurrent Neural Network (IndRNN)", 2018.
    """
    return torch.relu(x[0] + p.w_hh * h)


@recurrence(gates=2, recurrent=False)
def mingru(x, h):
    """The minimal GRU, without a product of h; gates update and candidate::

        z = sigmoid(z)
        h' = (1 - z) * h + z * n

    Source: Feng et al., "Were RNNs All We Needed?", 2024.
    """
    update = torch.sigmoid(x[0])
    return (1 - update) * h + update * x[1]


@recurrence(gates=3, recurrent=False)
def minlstm(x, h):
    """The minimal LSTM, without a product of h; gates forget, input and candidate::

        f, i = sigmoid(f), sigmoid(i)
        h' = f / (f + i) * h + i / (f + i) * n

    Source: Feng et al., "Were RNNs All We Needed?", 2024, with gates that sum to 1.
    """
    forget = torch.sigmoid(F.logsigmoid(x[0]) - F.logsigmoid(x[1]))  # f / (f + i), of small gates too
    return forget * h + (1 - forget) * x[2]


@recurrence(gates=4, states=("c",), recurrent=False)
def sru(x, s):
    """The simple recurrent unit, without a product of h; gates candidate, forget, reset and highway::

        f, r = sigmoid(f), sigmoid(r)
        c' = f * c + (1 - f) * n
        h' = r * c' + (1 - r) * y

    The highway y is the input itself in the paper, where both have one size.

    Source: Lei et al., "Simple Recurrent Units for Highly Parallelizable Recurrence", 2018, with gates that
    see the input only, as in its first version of 2017.
    """
    forget, reset = torch.sigmoid(x[1]), torch.sigmoid(x[2])
    c = forget * s.c + (1 - forget) * x[0]
    return reset * c + (1 - reset) * x[3], (c,)


@recurrence(gates=3, parameters={"decay": 6.0}, recurrent=False)
def rg_lru(x, h, p):
    """The real-gated linear recurrent unit; gates recurrence, input and value::

        a = sigmoid(decay) ^ (8 * sigmoid(r))
        h' = a * h + sqrt(1 - a^2) * sigmoid(i) * v

    The value is the unit's input in the paper. ``weight_ih=None`` takes it with the two gates as they are.

    Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language
    Models", 2024.
    """
    log_a = 8 * torch.sigmoid(x[0]) * F.logsigmoid(p.decay)
    scale = torch.sqrt(-torch.expm1(2 * log_a))  # exact for an a near 1
    return torch.exp(log_a) * h + scale * torch.sigmoid(x[1]) * x[2]


@recurrence(gates=1, states=("v",), parameters={"beta": 0.9}, recurrent=False)
def lif(x, h, s, p):
    """The leaky integrate-and-fire neuron: h is 1 in a step with a spike, else 0::

        v' = beta * v + a - h
        h' = 1 if v' > 1 else 0

    A spike lowers the potential v by the threshold, 1, in the next step. In the backward the derivative of h'
    by v' is 1 / (1 + 25 * abs(v' - 1))^2, a surrogate, which counts as a constant in second derivatives.

    Source: Neftci, Mostafa and Zenke, "Surrogate Gradient Learning in Spiking Neural Networks", 2019.
    """
    v = p.beta * s.v + x[0] - h
    return spike(v - 1, "fast_sigmoid", k=25), (v,)


@recurrence(gates=4, states=("c",), inputs=("keep_h", "keep_c"))
def zoneout_lstm(x, h, s, u):
    """An LSTM that keeps some values of the step before; gates input, forget, cell and output::

        h', c' = the step of an LSTM
        h' = keep_h * h + (1 - keep_h) * h'
        c' = keep_c * c + (1 - keep_c) * c'

    keep_h and keep_c are random masks, [T, B, H], in training, and their probabilities in evaluation.

    Source: Krueger et al., "Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations", 2016.
    """
    i, f, g, o = x
    c = torch.sigmoid(f) * s.c + torch.sigmoid(i) * torch.tanh(g)
    new_h = torch.sigmoid(o) * torch.tanh(c)
    return u.keep_h * h + (1 - u.keep_h) * new_h, (u.keep_c * s.c + (1 - u.keep_c) * c,)


@recurrence(gates=4, inputs=("time",))
def cfc(x, u):
    """The closed-form continuous-time cell without backbone, for steps at any distance ``time``, [T, B]::

        t = sigmoid(a * time + b)
        h' = tanh(f) * (1 - t) + tanh(g) * t

    with the gates f, g, a and b.

    Source: Hasani et al., "Closed-form Continuous-time Neural Networks", 2022.
    """
    f, g, a, b = x
    t = torch.sigmoid(a * u.time + b)
    return torch.tanh(f) * (1 - t) + torch.tanh(g) * t


@recurrence(
    gates=4,
    separate=True,
    states=("c",),
    parameters={
        "scale_ih": [1.0] * 4,
        "scale_hh": [1.0] * 4,
        "shift": [0.0] * 4,
        "scale_c": 1.0,
        "shift_c": 0.0,
    },
)
def layer_norm_lstm(x, r, s, p, units):
    """An LSTM with layer norms; gates input, forget, cell and output::

        i, f, g, o = norm(W_ih x + b) * scale_ih + norm(W_hh h) * scale_hh + shift
        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(norm(c') * scale_c + shift_c)

    The first two norms are over all gates of a row, the last one over its units.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    of_input, of_h = units.layer_norm(x, p.scale_ih, p.shift), units.layer_norm(r, p.scale_hh)
    i, f, g, o = (a + b for a, b in zip(of_input, of_h, strict=True))
    c = torch.sigmoid(f) * s.c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(units.layer_norm(c, p.scale_c, p.shift_c)), (c,)


@recurrence(gates=3, parameters={"scale": [1.0] * 3, "shift": [0.0] * 3})
def dreamer_gru(x, h, p, units):
    """DreamerV3's GRU with one norm over all gates of a row; gates reset, candidate and update::

        r, n, z = norm(a) * scale + shift
        z = sigmoid(z - 1)
        h' = z * tanh(sigmoid(r) * n) + (1 - z) * h

    Source: Hafner et al., "Mastering Diverse Domains through World Models", 2023.
    """
    reset, candidate, update = units.layer_norm(x, p.scale, p.shift, eps=1e-3)
    update = torch.sigmoid(update - 1)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h


@recurrence(
    gates=1,
    separate=True,
    parameters={"bias_h": 0.0, "scale_h": 1.0, "scale": 1.0, "bias_gates": [0.0] * 3},
    weights={"block": (1, 1), "features": (1, 1), "gates": (3, 1)},
)
def dreamer_block_gru(x, r, h, p, w, units):
    """DreamerV3's GRU of blocks, which see each other through features of the whole row::

        f = silu(norm(weight_hh h + bias_h) * scale_h)
        y = silu(norm(x + block h + features f) * scale)
        r, n, z = gates y + bias_gates
        z = sigmoid(z - 1)
        h' = z * tanh(sigmoid(r) * n) + (1 - z) * h

    norm is units.rms_norm. The blocks are ``heads={"block": 8, "gates": 8}`` of a layer.

    Source: the code of Hafner et al., "Mastering Diverse Domains through World Models", 2023.
    """
    silu = torch.nn.functional.silu
    features = silu(units.rms_norm(r[0] + p.bias_h, p.scale_h, eps=1e-4))
    y = x[0] + units.linear(h, w.block) + units.linear(features, w.features)
    gates = units.linear(silu(units.rms_norm(y, p.scale, eps=1e-4)), w.gates)
    reset, candidate, update = (gate + bias for gate, bias in zip(gates, p.bias_gates, strict=True))
    update = torch.sigmoid(update - 1)
    return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h
