"""Ready cells of :func:`lltm_ext.recurrence`, each a function and a cell for :class:`lltm_ext.Recurrent`."""

from __future__ import annotations

import torch

from lltm_ext.recurrence import recurrence


@recurrence(gates=3, separate=True, parameters=("b_hn",))
def gru(x, r, h, p):
    """Gates in the order reset, update, candidate, as in nn.GRU::

        r, z = sigmoid(W_ih x + b + W_hh h)
        n = tanh(W_in x + b_n + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, in the form of
    torch.nn.GRU, which multiplies by the reset gate after the product.
    """
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    candidate = torch.tanh(x[2] + reset * (r[2] + p.b_hn))
    return (1 - update) * candidate + update * h
