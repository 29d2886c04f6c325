"""Writes lltm_ext/_C/*.pyi, the stubs of the modules, from the signatures of the built ones.

    python tools/stubs.py    # after `python setup.py develop`

tests/test_dispatcher.py compares them with the modules, and tools/check_wheel.py expects one for each op.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
# pybind11 names what it accepts; a stub names the type that callers pass.
TYPES = {
    "typing.SupportsInt": "int",
    "typing.SupportsFloat": "float",
    " | typing.SupportsIndex": "",
    "torch.Tensor": "Tensor",
    "collections.abc.Sequence": "Sequence",
}
IMPORTS = {
    "Sequence[": "from collections.abc import Sequence\n\n",
    "torch.": "import torch\n",
    "Tensor": "from torch import Tensor\n",
}


def text(module: ModuleType) -> str:
    """The stub of a module."""
    functions = [function(f.__doc__) for f in vars(module).values() if callable(f)]
    if not functions:
        return "# No bindings: importing the module registers its dispatcher ops.\n"
    body = "\n".join(functions)
    imports = "".join(line for name, line in IMPORTS.items() if name in body)
    return f"{imports}\n{body}\n"


def function(signature: str) -> str:
    """The stub of a binding, from the first line of its docstring."""
    signature = signature.partition("\n")[0]
    for theirs, ours in TYPES.items():
        signature = signature.replace(theirs, ours)
    return f"def {signature}: ...".replace(" = []", " = ...")


def same(one: str, other: str) -> bool:
    """Whether two stubs differ at most in their format."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def main() -> None:
    folder = ROOT / "lltm_ext/_C"
    sys.path.insert(0, str(ROOT))
    ops = [file.stem for file in ROOT.glob("src/*/*.cpp") if file.stem == file.parent.name]
    stubs = {folder / f"{op}.pyi": text(importlib.import_module(f"lltm_ext._C.{op}")) for op in ops}
    for stub in set(folder.glob("*.pyi")) - set(stubs):
        stub.unlink()
    for stub, content in stubs.items():
        stub.write_text(content)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", folder])


if __name__ == "__main__":
    main()
