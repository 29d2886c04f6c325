"""What earlier releases saved loads, and computes what it did: tests/releases has a file of each.

python tests/test_releases.py    # writes the file of this version, before its release
"""

from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import lltm_ext
from lltm_ext._version import __version__

FILES = sorted(Path(__file__).parent.glob("releases/*.pt"))


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


if __name__ == "__main__":
    path = Path(__file__).parent / f"releases/{__version__}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(saved(), path)
    print(path)
