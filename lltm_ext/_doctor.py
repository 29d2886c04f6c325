"""`python -m lltm_ext doctor`: what is here, what is wrong with it, and the command that fixes it.

It runs where torch or a module is broken, so it is standard library only and imports neither: what may crash
runs in another process (_probe.py). `look` gathers the facts, `problems` and `notes` judge them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from lltm_ext import _portable, _probe, _record, _toolchain
from lltm_ext._version import major, number

VARIABLES = re.compile(
    r"LLTM_EXT_\w+|CUDA_\w+|TORCH_\w+|MAX_JOBS|CXX|LD_(LIBRARY_PATH|PRELOAD)|PYTHON\w*PATH"
)
# The oldest driver for the modules of a CUDA major version, and the CUDA version that it supports.
# Drivers read compressed device code from CUDA 12.4 on.
OLDEST_DRIVER = {"12": ("550", "12.4"), "13": ("580", "13.0")}


class Finding(NamedTuple):
    what: str
    command: str | None = None


class Gpu(NamedTuple):
    name: str
    capability: str  # compute capability: "9.0"


class Tool(NamedTuple):
    """Something that a build needs."""

    found: str | None
    missing: Finding | None = None


@dataclasses.dataclass
class Here:
    """The facts."""

    package: str = str(_record.PACKAGE)
    record: dict[str, Any] | None = None  # of the build
    unfit: str | None = None  # the ImportError's words, where the record does not fit what is here
    spoilt: str | None = None  # why the record can't be read
    python: str = platform.python_version()
    executable: str = sys.executable
    platform: str = platform.platform()
    torch: str | None = None  # its version
    torch_cuda: str | None = None
    torch_folder: str | None = None
    imports: dict[str, str | None] = dataclasses.field(default_factory=dict)  # its error, or None
    calls: dict[str, str | None] = dataclasses.field(default_factory=dict)  # of ops: its error, or None
    missing: list[str] = dataclasses.field(default_factory=list)  # files of modules
    driver: str | None = None  # its version
    driver_cuda: str | None = None  # the newest CUDA that it runs
    driver_error: str | None = None
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    tools: dict[str, Tool] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


# ---- looking -----------------------------------------------------------------------------------------------


def look() -> Here:
    here = Here(variables={name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)})
    look_for_torch(here)
    look_at_record(here)
    look_at_modules(here)
    look_at_driver(here)
    here.tools = {
        "nvcc": tool(lambda: nvcc(here)),
        "c++": tool(_toolchain.cxx_version),
        "ninja": tool(_toolchain.ninja),
        "Python.h": tool(lambda: str(_toolchain.python_headers())),
    }
    return here


def look_for_torch(here: Here) -> None:
    """Its version, from the file: importing it may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return
    here.torch_folder = str(next(iter(spec.submodule_search_locations or ()), spec.origin))
    try:
        version = runpy.run_path(str(Path(here.torch_folder, "version.py")))
        here.torch, here.torch_cuda = str(version["__version__"]), version["cuda"]
    except Exception:  # half a torch; the error of its import says more
        here.torch = None


def look_at_record(here: Here) -> None:
    try:
        here.record = _record.read()
        if here.torch is not None:
            cuda = SimpleNamespace(cuda=here.torch_cuda)
            here.record = _record.check(SimpleNamespace(__version__=here.torch, version=cuda))  # type: ignore[arg-type]
    except ImportError as error:
        here.unfit = str(error)
    except (ValueError, KeyError) as error:
        here.record, here.spoilt = None, f"{_record.FILE} can't be read ({error})"


def look_at_modules(here: Here) -> None:
    """Imports torch, and if that can work each module and lltm_ext; if that works, calls each op once."""
    modules: dict[str, str | None] = {} if here.torch_folder is None else {"torch": None}
    if modules and here.record is not None and here.unfit is None:
        folder = _record.PACKAGE / "_C"
        portable = "portable" in here.record
        if portable and not _portable.LIBRARY.is_file():
            here.missing.append(str(_portable.LIBRARY))
        for op in [] if portable else sorted(stub.stem for stub in folder.glob("*.pyi")):
            file = folder / f"{op}.{here.record['python']}.so"
            if file.is_file():
                modules[f"lltm_ext._C.{op}"] = str(file)
            else:
                here.missing.append(str(file))
        if not here.missing:
            modules["lltm_ext"] = None
    here.imports = _probe.try_imports(modules)
    if "lltm_ext" in here.imports and not any(here.imports.values()):
        here.calls = _probe.try_ops(str(_record.PACKAGE.parent))


def look_at_driver(here: Here) -> None:
    answers, end = _probe.ask("driver")
    here.driver_error = f"asking the driver failed: {end}" if end else None
    for answer in answers:
        if "cuda" in answer:
            here.driver, here.driver_cuda = answer["version"], answer["cuda"]
        elif "error" in answer:
            here.driver_error = answer["error"]
        else:
            here.gpus.append(Gpu(**answer))


# ---- what a build needs ------------------------------------------------------------------------------------


def tool(find: Callable[[], str]) -> Tool:
    try:
        return Tool(find())
    except _toolchain.ToolchainError as error:
        return Tool(None, as_finding(str(error)))


def nvcc(here: Here) -> str:
    torch_cuda = here.torch_cuda if here.torch else (here.record or {}).get("cuda")
    if not _toolchain.wants_cuda(here.torch or "", torch_cuda) or torch_cuda is None:
        return "not needed for a build without CUDA"
    cuda = _toolchain.find_cuda(torch_cuda)
    return f"{cuda.version} in {cuda.home}"


# ---- judging -----------------------------------------------------------------------------------------------


def problems(here: Here) -> Iterator[Finding]:
    """What keeps lltm_ext, or a GPU, from working: causes, not what follows from them."""
    yield from of_torch(here)
    yield from of_the_package(here)
    yield from of_the_driver(here)
    yield from of_the_gpus(here)
    if here.record is None or builds_itself(here):
        yield from (tool.missing for tool in here.tools.values() if tool.missing)


def notes(here: Here) -> Iterator[Finding]:
    if builds_itself(here):
        what = as_finding(here.unfit or "").what.partition(" (or ")[0]
        yield Finding(f"{what}. LLTM_EXT_JIT=1 has an import of lltm_ext build modules, unless that was done")
        return
    if here.record is None:
        return
    for tool in here.tools.values():
        if tool.missing:
            yield tool.missing._replace(what=f"only to build lltm_ext: {tool.missing.what}")
    if here.record["cuda"] and not here.gpus and not here.driver_error:
        yield no_gpu(here)


def of_torch(here: Here) -> Iterator[Finding]:
    error = here.imports.get("torch")
    install = _record.torch_command(here.record) if here.record else "python -m pip install torch"
    if here.torch_folder is None:
        yield Finding(f"torch is not installed for {here.executable}", install)
    elif error and here.unfit is None:
        again = install if "--force-reinstall" in install else f"{install} --force-reinstall"
        yield Finding(f"torch in {here.torch_folder} does not import: {error}", again)


def of_the_package(here: Here) -> Iterator[Finding]:
    if here.unfit and not builds_itself(here):
        yield as_finding(here.unfit)
    if here.spoilt:
        yield Finding(here.spoilt, reinstall(here))
    if here.missing:
        yield Finding(f"lltm_ext lacks {', '.join(here.missing)}", reinstall(here))
    failed = {name: error for name, error in here.imports.items() if error and name != "torch"}
    for name, error in failed.items():
        # Symbols and libraries that a module lacks are torch's: it is another build of the same version.
        is_torchs = "undefined symbol" in error or "cannot open shared object" in error
        command = _record.torch_command(here.record) if is_torchs and here.record else reinstall(here)
        if name != "lltm_ext" or len(failed) == 1:
            yield Finding(f"{name} does not import: {error}", command)
    failing = [(call, error) for call, error in here.calls.items() if error]
    for call, error in failing[:1]:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        what, command = f"{call} fails: {error}{more}", reinstall(here)
        if "kills the process" in error and here.record:
            what += f"; built by {here.record['compiler']['cxx']}, which may link libstdc++ statically"
            command = from_source(here, "CXX=g++")
        yield Finding(what, command)


def of_the_driver(here: Here) -> Iterator[Finding]:
    built = (here.record or {}).get("cuda")
    if here.driver_error:
        what = f"the NVIDIA driver does not work: {here.driver_error} (if nvidia-smi fails too, reboot)"
        yield Finding(what, "nvidia-smi")
    if not built or not here.driver_cuda:
        return
    driver, cuda = OLDEST_DRIVER.get(major(built), (None, major(built)))
    if number(here.driver_cuda) < number(cuda):
        yield Finding(
            f"the NVIDIA driver ({here.driver}) runs CUDA {here.driver_cuda} at most, "
            f"lltm_ext is built with CUDA {built}" + (f" and needs {cuda}" if driver else ""),
            f"apt-get install nvidia-driver-{driver}" if driver else None,
        )


def of_the_gpus(here: Here) -> Iterator[Finding]:
    if here.record is None or not here.gpus:
        return
    if here.record["cuda"] is None:
        if here.torch_cuda:
            what = f"lltm_ext {here.record['version']} is built for the CPU alone, and here is a GPU"
            yield Finding(what, from_source(here, "LLTM_EXT_CUDA=1"))
        return
    listed = " ".join(here.record["architectures"])
    for i, gpu in enumerate(here.gpus):
        if _toolchain.runs_on(here.record["architectures"], gpu.capability):
            continue
        what = f"GPU {i}, {gpu.name}, has compute capability {gpu.capability}; lltm_ext is built for {listed}"
        if number(gpu.capability) < number(_toolchain.ARCHITECTURES[0]):
            what += f", and can be for {_toolchain.ARCHITECTURES[0]} and newer"
            yield Finding(what, f"export CUDA_VISIBLE_DEVICES={able(here)}")
        else:
            yield Finding(what, from_source(here, f"TORCH_CUDA_ARCH_LIST={gpu.capability}"))


def builds_itself(here: Here) -> bool:
    """Whether an import builds at run time what does not fit."""
    return bool(here.unfit) and here.variables.get("LLTM_EXT_JIT") == "1"


def no_gpu(here: Here) -> Finding:
    if "CUDA_VISIBLE_DEVICES" in here.variables:
        hidden = f"CUDA_VISIBLE_DEVICES={here.variables['CUDA_VISIBLE_DEVICES']} shows no GPU"
        return Finding(f"{hidden}: CPU tensors only", "unset CUDA_VISIBLE_DEVICES")
    if here.driver_cuda is None:
        what = "no NVIDIA driver: CPU tensors only. A container sees it with"
        return Finding(what, "docker run --gpus all")
    return Finding("the NVIDIA driver shows no GPU: CPU tensors only", "nvidia-smi --list-gpus")


def able(here: Here) -> str:
    """CUDA_VISIBLE_DEVICES of the GPUs for which there is code."""
    assert here.record is not None
    chosen = here.variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = chosen if len(chosen) == len(here.gpus) else [str(i) for i in range(len(here.gpus))]
    fit = (_toolchain.runs_on(here.record["architectures"], gpu.capability) for gpu in here.gpus)
    return ",".join(name for name, fits in zip(names, fit, strict=True) if fits)


# ---- fixing ------------------------------------------------------------------------------------------------


def as_finding(message: str) -> Finding:
    """An error of ours, which ends in the command that fixes it."""
    what, _, command = message.partition(" Run: ")
    command, _, alternative = command.partition("  (")
    return Finding(what.removesuffix(".") + (alternative and f" ({alternative}"), command or None)


def reinstall(here: Here) -> str:
    """The same lltm_ext again, from where it came."""
    if is_checkout():
        return f"cd {_record.PACKAGE.parent} && python setup.py develop"
    version = f"=={here.record['version']}" if here.record else ""
    wheel = shlex.quote(origin() or f"lltm_ext{version}")
    return f"python -m pip install --force-reinstall --no-deps {wheel}"


def from_source(here: Here, variable: str) -> str:
    if is_checkout():
        return f"cd {_record.PACKAGE.parent} && {variable} python setup.py develop"
    version = here.record["version"].split("+")[0] if here.record else ""
    pip = "python -m pip install --force-reinstall --no-deps --no-binary lltm_ext"
    return f"{variable} {pip} lltm_ext=={version}"


def is_checkout() -> bool:
    return (_record.PACKAGE.parent / "setup.py").is_file()


def origin() -> str | None:
    """The file or address that pip installed this lltm_ext from, where it was no index."""
    for distribution in importlib.metadata.distributions(name="lltm_ext"):
        if Path(str(distribution.locate_file("lltm_ext"))) == _record.PACKAGE:
            url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
            file = Path(url.removeprefix("file://"))
            return str(file) if file.exists() else None if url.startswith("file:") else url or None
    return None


def exact(command: str) -> str:
    """With this Python, where `python` is another."""
    python = shutil.which("python")
    if python and Path(python).absolute() == Path(sys.executable).absolute():
        return command
    return re.sub(r"\bpython (?=-m |setup\.py)", f"{shlex.quote(sys.executable)} ", command)


# ---- saying ------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, look: Callable[[], Here] = look) -> int:
    here = look()
    wrong, known = (
        [finding._replace(command=finding.command and exact(finding.command)) for finding in findings(here)]
        for findings in (problems, notes)
    )
    print(as_json(here, wrong, known) if args.json else "\n".join(as_text(here, wrong, known)))
    return 1 if wrong else 0


def as_json(here: Here, wrong: list[Finding], known: list[Finding]) -> str:
    facts = dataclasses.asdict(here)
    facts["gpus"] = [gpu._asdict() for gpu in here.gpus]
    facts["tools"] = {name: tool.found for name, tool in here.tools.items()}
    judged = {"problems": [f._asdict() for f in wrong], "notes": [f._asdict() for f in known]}
    return json.dumps({"ok": not wrong} | judged | facts, indent=2)


def as_text(here: Here, wrong: list[Finding], known: list[Finding]) -> Iterator[str]:
    for name, value in facts(here):
        yield f"{name:<10} {value}"
    for title, finding in [("wrong", finding) for finding in wrong] + [("note", note) for note in known]:
        yield f"\n{title}: {finding.what}"
        if finding.command:
            yield f"    {finding.command}"
    yield f"\n{len(wrong)} found wrong" if wrong else "\nall is well"


def facts(here: Here) -> Iterator[tuple[str, str]]:
    yield "Python", f"{here.python}, {here.executable}, {here.platform}"
    record = here.record
    yield "lltm_ext", f"{record['version'] if record else 'not built'}, {here.package}"
    if record:
        compiler = record["compiler"]
        nvcc = f", nvcc {compiler['nvcc']}" if compiler["nvcc"] else ""
        yield "built for", _record.built_for(record)
        yield "GPU code", " ".join(record["architectures"]) or "none"
        yield "built by", f"{compiler['cxx']}{nvcc}, source {record['source'][:12]}"
    torch = _record.named(here.torch or "of unknown version", here.torch_cuda)
    yield "torch", f"{torch}, {here.torch_folder}" if here.torch_folder else "none"
    if here.imports:
        tried = {name.rpartition(".")[2]: error for name, error in here.imports.items()}
        yield "import", ", ".join(f"{name} FAILS" if error else name for name, error in tried.items())
    if here.calls:
        failed = ", ".join(f"{call} FAILS" for call, error in here.calls.items() if error)
        yield "calls", failed or f"{len(here.calls)}, none fails"
    yield "driver", f"{here.driver or 'unknown'}, CUDA {here.driver_cuda}" if here.driver_cuda else "none"
    yield from (
        (f"GPU {i}", f"{gpu.name}, compute capability {gpu.capability}") for i, gpu in enumerate(here.gpus)
    )
    yield from ((name, tool.found or "none") for name, tool in here.tools.items())
    yield from (("variable", f"{name}={value}") for name, value in here.variables.items())
