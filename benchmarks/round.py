"""round and binarize, whose gradient goes straight through, against the ways to say so in PyTorch."""

import torch
from elementwise import Mode, draw, run
from harness import OURS
from torch import Tensor

import lltm_ext

__all__ = ["draw"]


def straight_through_round(input: Tensor) -> Tensor:
    """The usual idiom: torch.round alone has gradient 0."""
    return input + (torch.round(input) - input).detach()


def torch_binarize(input: Tensor) -> Tensor:
    return (input > 0.5).to(input.dtype)


# There is no backward to time: ours hands the gradient on and launches nothing.
ROUND = Mode("round", 1, 2, {OURS: lltm_ext.round, "torch": torch.round})
BINARIZE = Mode("binarize", 1, 2, {OURS: lltm_ext.binarize, "torch": torch_binarize})
TRAINED = {OURS: lltm_ext.round, "torch": straight_through_round}

if __name__ == "__main__":
    run("round", __doc__, [ROUND, BINARIZE], TRAINED)
