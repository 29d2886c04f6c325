"""python examples/lltm_in_steps/1_python/run.py"""

import sys
from functools import partial
from pathlib import Path

import torch
from lltm import LLTM, lltm_cell, steps, train

sys.path.insert(0, str(Path(__file__).parents[1]))
from check import DEVICES, check, report

losses = train(LLTM(4, 32), [torch.rand(10, 16, 4) for _ in range(20)], (torch.zeros(16, 32),) * 2)
assert losses[-1] < losses[0] / 2, losses

sequence = partial(steps, lltm_cell)
for device in DEVICES:
    check(sequence, device)
report("1_python", sequence, DEVICES[-1])
