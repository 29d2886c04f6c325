"""How the portable library is compiled: `LLTM_EXT_PORTABLE=1 pip wheel .` (_portable.py describes it).

One shared library on torch's stable C ABI has all ops except those of _portable.IN_PYTHON. CUDA's runtime is
linked statically, so that the CUDA of torch does not matter. The bindings are the native ones: the first
folder of the include path maps each torch header that they include to src/stable/torch.h, and replaces some
of their own: src/common/x.h by src/stable/x.h, src/gemm/x.h by src/stable/gemm/x.h. What only native modules
have is left out: the autograd and autocast of an op, <op>_autograd.cpp, and resize_units.

It uses only the standard library until a torch is passed in, like build_native.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from lltm_ext import _portable
from lltm_ext._install import build_native
from lltm_ext._version import __version__, number

NATIVE_ONLY = re.compile(r"_autograd\.cpp$|/resize_units")
INCLUDED = re.compile(r"^#include <((?:ATen|c10|torch)/[^>]+)>", re.MULTILINE)


def sources(src: Path, cuda: bool) -> list[str]:
    ops = sorted(set(build_native.ops(src)) - set(_portable.IN_PYTHON))
    files = (file for op in ops for file in build_native.sources(src, op, cuda))
    # Some ops share files.
    return [file for file in dict.fromkeys(files) if not NATIVE_ONLY.search(file)]


def replace_headers(src: Path, folder: Path) -> None:
    """Writes a header to `folder` for each header that the bindings include and src/stable replaces."""
    stable, torch = src / "stable", "stable/torch.h"
    bindings = [file for pattern in ("*.h", "*.cpp") for file in src.rglob(pattern)]
    texts = [file.read_text() for file in bindings if stable not in file.parents]
    replaced = {name: [torch] for text in texts for name in INCLUDED.findall(text)}
    for file in stable.rglob("*.h"):
        name = file.relative_to(stable)
        place = name if len(name.parts) > 1 else Path("common", name)
        if (src / place).is_file():
            replaced[place.as_posix()] = [torch, f"stable/{name.as_posix()}"]
    for name, headers in replaced.items():
        header = folder / name
        if not header.is_file():  # writing it again would compile everything again
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text("".join(f'#include "{included}"\n' for included in headers))


def against(torch: ModuleType, src: Path) -> dict[str, Any]:
    """The arguments of setup() that build the library with this torch's headers."""
    target = build_native.Target(torch, src)
    os.environ["MAX_JOBS"] = str(target.jobs)
    from setuptools.command.bdist_wheel import bdist_wheel  # type: ignore[import-untyped]

    oldest = _portable.OLDEST_TORCH
    major, minor = number(oldest)
    library = target.extension(
        "portable",
        sources(src, target.cuda is not None),
        [
            ("LLTM_EXT_STABLE_ABI", None),
            ("TORCH_TARGET_VERSION", f"0x{major:02x}{minor:02x}000000000000ULL"),
        ],
    )
    library.extra_compile_args["cxx"] += ["-Xassembler", f"-I{src.resolve()}"]  # build_native.module says why
    # Nothing calls libtorch.so, but it loads libtorch_cuda.so if torch has it.
    library.extra_link_args += ["-Wl,--no-as-needed", "-ltorch"]
    # torch's build would link more than the library needs.
    library.libraries = ["torch_cpu", *(["cudart_static", "dl", "rt", "pthread"] if target.cuda else [])]

    record = {"portable": True, "torch": oldest, "headers": torch.__version__, "python": "any"}

    class BuildLibrary(target.command("portable", target.record(__version__) | record)):  # type: ignore[misc]
        def get_ext_filename(self, name: str) -> str:
            return f"{Path(*name.split('.'))}.so"  # any Python loads it

        def build_extensions(self) -> None:
            headers = Path(self.build_temp, "torch").resolve()
            replace_headers(src, headers)
            library.include_dirs.insert(0, str(headers))
            super().build_extensions()

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    return {
        "version": __version__,
        "install_requires": [f"torch>={oldest}"],
        "ext_modules": [library],
        "cmdclass": {"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    }
