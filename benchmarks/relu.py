"""relu against torch.relu."""

import torch
from elementwise import Mode, draw, run
from harness import OURS

import lltm_ext

__all__ = ["draw"]

FORWARD = Mode("forward", 1, 2, {OURS: lltm_ext.relu, "torch": torch.relu})
BACKWARD = Mode(
    "backward",
    2,
    3,
    {
        OURS: torch.ops.lltm_ext.relu_backward,
        "torch": lambda grad_output, output: torch.ops.aten.threshold_backward(grad_output, output, 0),
    },
)

if __name__ == "__main__":
    run("relu", __doc__, [FORWARD, BACKWARD], FORWARD.candidates)
