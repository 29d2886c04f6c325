"""The portable library: its build from the native bindings, and its choice at import.

The other files test its ops when the portable wheel is installed.
"""

import ast
import json
from pathlib import Path

import pytest
import torch

import lltm_ext
from lltm_ext import _portable
from lltm_ext._install import build_native, build_portable, build_record

SRC = build_native.source_folder()
PORTABLE_ONLY = pytest.mark.skipif(not _portable.in_use, reason="native modules are in use")


@pytest.fixture
def portable(tmp_path, monkeypatch):
    """An install of the portable library, as far as the check of its record goes."""
    monkeypatch.setattr(_portable, "LIBRARY", tmp_path / "portable.so")
    monkeypatch.setattr(build_record, "FILE", tmp_path / "_build_record.json")
    _portable.LIBRARY.touch()
    record = {"version": "1", "torch": "2.10", "cuda": None, "python": "any", "portable": True}
    build_record.FILE.write_text(json.dumps(record))


@pytest.mark.parametrize("version", ["2.10.0", "2.10.1+cu128", "2.99.0", "3.0.0"])
def test_it_fits_any_newer_torch(portable, version):
    assert build_record.check(version, None)["portable"]
    assert not build_record.modules_fit(version, None)  # so that LLTM_EXT_JIT=1 builds native ones


def test_an_older_torch_is_named(portable):
    with pytest.raises(ImportError, match=r"built for torch 2\.10 and newer.* this is torch 2\.9\.1"):
        build_record.check("2.9.1", None)


def test_a_missing_library_is_named(portable):
    _portable.LIBRARY.unlink()
    with pytest.raises(ImportError, match=r"^lltm_ext lacks .*/portable\.so\. Run: .* --force-reinstall"):
        _portable.load(torch)


def test_every_torch_header_that_a_binding_includes_is_replaced(tmp_path):
    build_portable.replace_headers(SRC, tmp_path)
    for name in ("ATen/core/Tensor.h", "c10/util/Exception.h", "torch/library.h"):
        assert (tmp_path / name).read_text() == '#include "stable/torch.h"\n'
    assert not list(tmp_path.glob("torch/csrc/stable/*"))  # which src/stable itself includes
    library = tmp_path / "common/library.h"
    assert library.read_text() == '#include "stable/torch.h"\n#include "stable/library.h"\n'
    assert not (tmp_path / "common/checks.h").exists()  # serves both


def test_every_op_is_in_it_or_in_python():
    built = {Path(file).parent.name for file in build_portable.sources(SRC, cuda=False)}
    assert built - {"runtime"} == set(build_native.ops(SRC)) - set(_portable.IN_PYTHON)


@PORTABLE_ONLY
def test_it_has_every_public_name_of_a_native_build():
    names = {
        name
        for file in build_record.PACKAGE.glob("[a-bd-z]*.py")  # cells are in a namespace
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    assert len(names) > 40
    assert names <= set(lltm_ext.__all__)


@PORTABLE_ONLY
@pytest.mark.parametrize("allowed", [False, True])
def test_the_library_can_ask_for_nn_lstms_tf32_switch(allowed):
    torch.backends.cudnn.allow_tf32 = allowed
    assert torch.ops.lltm_ext.rnn_allows_tf32() == allowed


@PORTABLE_ONLY
def test_it_links_to_no_cuda_library():
    content = _portable.LIBRARY.read_bytes()
    libraries = (b"libcudart.so", b"libcublas", b"libtorch_cuda", b"libc10")
    assert not [name for name in libraries if name in content]
