"""Writes lltm_ext/_C/*.pyi, the stubs of the modules, from the signatures of the built ones.

    python tools/stubs.py            # after `python setup.py develop`
    python tools/stubs.py --check    # writes nothing; exits 1 where a stub is out of date

Where nothing is built, the check only knows that each src/<op>/ has a stub; tests/test_dispatcher.py checks
the texts against the modules it runs with.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
# What pybind11 accepts, as the type that callers pass.
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


def ops() -> list[str]:
    return sorted(file.parent.name for file in ROOT.glob("src/*/*.cpp") if file.stem == file.parent.name)


def main(check: bool) -> int:
    folder = ROOT / "lltm_ext/_C"
    stubs = {op: folder / f"{op}.pyi" for op in ops()}
    wrong = [f"{stub}: no op of src has this stub" for stub in folder.glob("*.pyi") if stub.stem not in stubs]
    sys.path.insert(0, str(ROOT))
    try:
        modules = {op: importlib.import_module(f"lltm_ext._C.{op}") for op in stubs}
    except ImportError as error:
        if not check:
            raise SystemExit(f"The stubs need a build (python setup.py develop): {error}") from None
        modules = {}
    for op, stub in stubs.items():
        if not check:
            stub.write_text(text(modules[op]))
        elif not stub.is_file() or (modules and not same(stub.read_text(), text(modules[op]))):
            wrong.append(f"{stub}: out of date. Run: python tools/stubs.py")
    if not check:
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", folder])
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
