"""Several processes: workers forked from one that has used the modules, first loads at the same time."""

import os

import forks
import pytest
import torch

IN_WORKERS = """
import sys
import torch
import lltm_ext

gradients, device = sys.argv[1] == "gradients", sys.argv[2]


class Computed(torch.utils.data.Dataset):
    layer = lltm_ext.LLTM(3, 5)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((40, 4, 3), 0.1 * i).requires_grad_()
        y = lltm_ext.sigmoid(self.layer(x)[0])
        return torch.autograd.grad(y.sum(), x)[0] if gradients else y.detach()


def items(**options):
    return list(torch.utils.data.DataLoader(Computed(), batch_size=None, **options))


# The modules are used, by as many threads as there are.
large = torch.ones(1_000_000, device=device, requires_grad=True)
lltm_ext.sigmoid(large).sum().backward()
lltm_ext.LLTM(64, 64, device=device)(torch.ones(20, 64, 64, device=device))[0].sum().backward()
expected = items()
found = items(num_workers=2, multiprocessing_context="fork", timeout=60)
print(len(found), all(map(torch.equal, found, expected)))
"""


@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_workers_forked_after_calls_compute_the_same_on_the_cpu(what, device, tmp_path):
    """In a process of its own: torch refuses autograd in a fork of one that used its threads for GPUs."""
    if what == "gradients" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, torch refuses autograd in a fork after a backward")
    done = forks.run("-c", IN_WORKERS, what, device, cwd=tmp_path)
    assert done.stdout == "8 True\n", done.stderr


FIRST_USE = """
import torch, lltm_ext
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.ones(1, 1, 3, device=device)
output, _ = lltm_ext.LLTM(3, 5, device=device)(x)
print(output.isfinite().all().item(), lltm_ext.gemm(x[0], x[0].T).item())
"""


def test_processes_that_load_the_modules_at_the_same_time(tmp_path):
    for process in forks.run("-c", FIRST_USE, cwd=tmp_path, env=[os.environ] * 3):
        assert (process.returncode, process.stdout) == (0, "True 3.0\n"), process.stderr
