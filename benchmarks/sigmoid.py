"""sigmoid against torch.sigmoid."""

import torch
from elementwise import Mode, draw, run
from harness import OURS

import lltm_ext

__all__ = ["draw"]

FORWARD = Mode("forward", 1, 2, {OURS: lltm_ext.sigmoid, "torch": torch.sigmoid})
BACKWARD = Mode(
    "backward", 2, 3, {OURS: torch.ops.lltm_ext.sigmoid_backward, "torch": torch.ops.aten.sigmoid_backward}
)

if __name__ == "__main__":
    run("sigmoid", __doc__, [FORWARD, BACKWARD], FORWARD.candidates)
