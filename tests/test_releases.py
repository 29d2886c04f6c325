"""What earlier releases saved loads, and computes what it did: tests/releases has a file of each.

python tests/test_releases.py    # writes the files of this version, before its release; on a GPU
"""

from pathlib import Path

import pytest
import torch
from op_suite import needs_cuda
from torch import nn
from torch.utils import _pytree as pytree

import lltm_ext
from lltm_ext._version import __version__

FILES = sorted(Path(__file__).parent.glob("releases/*.pt"))
EXPORTED = sorted(Path(__file__).parent.glob("releases/*.pt2"))


def modules():
    """One of each public module, and input for it."""
    sequence, rows = torch.randn(4, 2, 3), torch.randn(2, 3)
    layers = {"num_layers": 2, "bidirectional": True}
    return {
        "LSTM": (lltm_ext.LSTM(3, 5, **layers), sequence),
        "GRU": (lltm_ext.GRU(3, 5, **layers), sequence),
        "RNN": (lltm_ext.RNN(3, 5, **layers), sequence),
        "LLTM": (lltm_ext.LLTM(3, 5, **layers), sequence),
        "LLTMCell": (lltm_ext.LLTMCell(3, 5), rows),
        "Recurrent": (lltm_ext.Recurrent(lltm_ext.cells.ugrnn, 3, 5, **layers), sequence),
        "Linear": (lltm_ext.Linear(3, 5, activation="gelu"), rows),
        "FakeQuantize": (lltm_ext.FakeQuantize(-8, 7, scale=0.1, num_channels=2), rows),
        "StochasticRound": (lltm_ext.StochasticRound(torch.bfloat16), rows.bfloat16().float()),  # not random
        "Sigmoid": (lltm_ext.Sigmoid(), rows),
        "ReLU": (lltm_ext.ReLU(), rows),
        "Round": (lltm_ext.Round(), rows),
        "Floor": (lltm_ext.Floor(), rows),
        "Ceil": (lltm_ext.Ceil(), rows),
        "Trunc": (lltm_ext.Trunc(), rows),
        "Binarize": (lltm_ext.Binarize(), rows),
    }


def saved():
    torch.manual_seed(0)
    return {
        name: {"module": module, "state_dict": module.state_dict(), "input": x, "output": module(x)}
        for name, (module, x) in modules().items()
    }


def assert_same(found, expected):
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pickled_modules_compute_what_they_did(file):
    for entry in torch.load(file, weights_only=False).values():
        assert_same(entry["module"](entry["input"]), entry["output"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_state_dicts_load_into_new_modules(file):
    entries = torch.load(file, weights_only=False)
    for name, (module, _) in modules().items():
        if name in entries:
            entry = entries[name]
            module.load_state_dict(entry["state_dict"])
            assert_same(module(entry["input"]), entry["output"])


def test_the_file_of_this_version_has_each_public_module():
    public = (getattr(lltm_ext, name) for name in lltm_ext.__all__)
    names = {x.__name__ for x in public if isinstance(x, type) and issubclass(x, torch.nn.Module)}
    (file,) = (file for file in FILES if file.stem == __version__)
    assert set(torch.load(file, weights_only=False)) == names == set(modules())


softsign = lltm_ext.elementwise(
    "T softsign(T x, T a)",
    """
        T d = a + fabs(x);
        return x / d;
    """,
    backward={"x": "T d = a + fabs(x);\nreturn grad * a / (d * d);"},
    scalars={"a": 1.0},
)


class Sequences(nn.Module):
    """Cells compiled ahead of time and at run time, with and without resets, and an op made at run time."""

    def __init__(self):
        super().__init__()
        cells = lltm_ext.cells
        self.lstm, self.lltm = lltm_ext.LSTM(3, 8, bidirectional=True), lltm_ext.LLTM(3, 8)
        self.slstm = lltm_ext.Recurrent(cells.slstm, 3, 8)
        self.zoneout = lltm_ext.Recurrent(cells.zoneout_lstm, 3, 8)

    def forward(self, x, reset):
        y = self.lstm(x)[0][..., :8] + self.lltm(x, reset=reset)[0]
        y = y + self.slstm(x, reset=reset, reset_to="initial")[0]
        keep = torch.sigmoid(x.detach())
        return softsign(y + self.zoneout(x, keep_h=keep[..., 0], keep_c=keep[..., 1])[0])


def input_of_sequences():
    torch.manual_seed(0)
    return torch.randn(5, 2, 3, device="cuda"), torch.rand(5, 2, device="cuda") < 0.4


@needs_cuda
@pytest.mark.parametrize("file", EXPORTED, ids=lambda file: file.stem)
def test_exported_programs_compute_what_they_did(file):
    program = torch.export.load(file)
    layers = Sequences().cuda()
    layers.load_state_dict(program.state_dict)
    given = input_of_sequences()
    assert_same(program.module()(*given), layers(*given))


if __name__ == "__main__":
    path = Path(__file__).parent / f"releases/{__version__}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(saved(), path)
    torch.manual_seed(0)
    program = torch.export.export(Sequences().cuda(), input_of_sequences(), strict=False)
    torch.export.save(program, path.with_suffix(".pt2"))
    print(path, path.with_suffix(".pt2"))
