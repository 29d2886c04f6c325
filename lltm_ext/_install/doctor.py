"""`python -m lltm_ext doctor`: the facts of an installation, its problems, and the commands that fix them.

It must run where torch or a module is broken, so it uses only the standard library and imports neither: what
may crash runs in another process (probe.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lltm_ext._install import build_record, probe, toolchain
from lltm_ext._version import major, number

VARIABLES = re.compile(
    r"LLTM_EXT_\w+|CUDA_\w+|TORCH_\w+|MAX_JOBS|CXX|LD_(LIBRARY_PATH|PRELOAD)|PYTHON\w*PATH"
)
# Modules of a CUDA major version need this driver, which supports this CUDA version.
# Drivers read compressed device code from CUDA 12.4 on.
OLDEST_DRIVER = {"12": ("550", "12.4"), "13": ("580", "13.0")}


class Finding(NamedTuple):
    what: str
    command: str | None = None


@dataclasses.dataclass
class Facts:
    """What is installed. An import or call that was tried has its error, or None."""

    package: str = str(build_record.PACKAGE)
    record: dict[str, Any] | None = None
    unfit: str | None = None  # says why there are no modules for this torch
    python: str = platform.python_version()
    executable: str = sys.executable
    platform: str = platform.platform()
    torch: str | None = None
    torch_cuda: str | None = None
    torch_folder: str | None = None
    imports: dict[str, str | None] = dataclasses.field(default_factory=dict)
    calls: dict[str, str | None] = dataclasses.field(default_factory=dict)
    driver: str | None = None
    driver_cuda: str | None = None  # is the newest CUDA version that the driver supports
    driver_error: str | None = None
    gpus: list[dict[str, str]] = dataclasses.field(default_factory=list)  # have "name" and "capability"
    tools: dict[str, str | None] = dataclasses.field(default_factory=dict)
    missing_tools: list[Finding] = dataclasses.field(default_factory=list)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def builds_at_import(self) -> bool:
        """Whether the next import builds modules that fit."""
        return bool(self.unfit) and self.variables.get("LLTM_EXT_JIT") == "1"


# ---- facts -------------------------------------------------------------------------------------------------


def find_facts() -> Facts:
    facts = Facts(variables={name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)})
    find_torch(facts)
    try:
        facts.record = build_record.read()
        if facts.torch is not None:
            build_record.check(facts.torch, facts.torch_cuda)
    except ImportError as error:
        facts.unfit = str(error)
    if facts.torch_folder and not facts.unfit:
        for step, failure in probe.try_package(str(build_record.PACKAGE.parent)).items():
            (facts.calls if " on " in step else facts.imports)[step] = failure
    find_driver(facts)
    find_tools(facts)
    return facts


def find_torch(facts: Facts) -> None:
    """Reads torch's version from its file, because importing torch may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return
    facts.torch_folder = str(next(iter(spec.submodule_search_locations or ()), spec.origin))
    try:
        version = runpy.run_path(str(Path(facts.torch_folder, "version.py")))
        facts.torch, facts.torch_cuda = str(version["__version__"]), version["cuda"]
    except Exception:  # This torch is incomplete; the error of its import says more.
        facts.torch = None


def find_driver(facts: Facts) -> None:
    found = probe.driver()
    facts.driver, facts.driver_cuda = found.get("version"), found.get("cuda")
    facts.driver_error, facts.gpus = found.get("error"), found.get("gpus", [])


def find_tools(facts: Facts) -> None:
    tools: dict[str, Callable[[], str]] = {"nvcc": lambda: find_nvcc(facts), **toolchain.HOST}
    for name, find in tools.items():
        try:
            facts.tools[name] = find()
        except toolchain.ToolchainError as error:
            facts.tools[name] = None
            facts.missing_tools.append(as_finding(str(error)))


def find_nvcc(facts: Facts) -> str:
    torch_cuda = facts.torch_cuda if facts.torch else (facts.record or {}).get("cuda")
    if not toolchain.wants_cuda(facts.torch or "", torch_cuda) or torch_cuda is None:
        return "not needed for a build without CUDA"
    cuda = toolchain.find_cuda(torch_cuda)
    return f"{cuda.version} in {cuda.home}"


# ---- problems ----------------------------------------------------------------------------------------------


def problems(facts: Facts) -> Iterator[Finding]:
    """What keeps lltm_ext or a GPU from working: causes, without their consequences."""
    if facts.torch_folder is None:
        install = build_record.install_torch(facts.record) if facts.record else "python -m pip install torch"
        yield Finding(f"torch is not installed for {facts.executable}", install)
    if facts.unfit and not facts.builds_at_import:
        yield as_finding(facts.unfit)
    yield from failed_step(facts)
    yield from driver_problems(facts)
    yield from gpu_problems(facts)
    if facts.record is None or facts.builds_at_import:
        yield from facts.missing_tools


def notes(facts: Facts) -> Iterator[Finding]:
    if facts.builds_at_import:
        what = as_finding(facts.unfit or "").what.partition(" (or ")[0]
        yield Finding(f"{what}. With LLTM_EXT_JIT=1, an import of lltm_ext builds modules that fit, once")
    elif facts.record is not None:
        for what, command in facts.missing_tools:
            yield Finding(f"only to build lltm_ext: {what}", command)
        if facts.record["cuda"] and not facts.gpus and not facts.driver_error:
            yield no_gpu(facts)


def failed_step(facts: Facts) -> Iterator[Finding]:
    """The first import or call that fails. What mends it usually mends the others."""
    failed = [(step, error) for step, error in (facts.imports | facts.calls).items() if error]
    if not failed or facts.record is None:
        return
    (step, error), more = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    fails = "does not import" if step in facts.imports else "fails"
    where = f" in {facts.torch_folder}" if step == "torch" else ""
    what, command = f"{step}{where} {fails}: {error}{more}", build_record.reinstall(facts.record)
    if step == "torch":
        command = build_record.install_torch(facts.record)
        command += "" if "--force-reinstall" in command else " --force-reinstall"
    elif "undefined symbol" in error or "cannot open shared object" in error:
        command = build_record.install_torch(facts.record)  # this one is another build of its version
    elif step in facts.calls and "kills the process" in error:
        what += f"; built by {facts.record['compiler']['cxx']}, which may link libstdc++ statically"
        command = build_record.from_source(facts.record, "CXX=g++")
    yield Finding(what, command)


def driver_problems(facts: Facts) -> Iterator[Finding]:
    if facts.driver_error:
        what = f"the NVIDIA driver does not work: {facts.driver_error} (if nvidia-smi fails too, reboot)"
        yield Finding(what, "nvidia-smi")
    built = (facts.record or {}).get("cuda")
    if not built or not facts.driver_cuda:
        return
    driver, cuda = OLDEST_DRIVER.get(major(built), (None, major(built)))
    if number(facts.driver_cuda) < number(cuda):
        yield Finding(
            f"the NVIDIA driver ({facts.driver}) runs CUDA {facts.driver_cuda} at most, "
            f"lltm_ext is built with CUDA {built}" + (f" and needs {cuda}" if driver else ""),
            f"apt-get install nvidia-driver-{driver}" if driver else None,
        )


def gpu_problems(facts: Facts) -> Iterator[Finding]:
    record, oldest = facts.record, toolchain.ARCHITECTURES[0]
    if record is None or not facts.gpus:
        return
    if record["cuda"] is None:
        if facts.torch_cuda:
            what = f"lltm_ext {record['version']} is built for the CPU only, but there is a GPU"
            yield Finding(what, build_record.from_source(record, "LLTM_EXT_CUDA=1"))
        return
    supported = [toolchain.runs_on(record["architectures"], gpu["capability"]) for gpu in facts.gpus]
    names = facts.variables.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(facts.gpus))))
    visible = ",".join(name for name, runs in zip(names.split(","), supported, strict=False) if runs)
    for i, (gpu, runs) in enumerate(zip(facts.gpus, supported, strict=True)):
        built, capability = " ".join(record["architectures"]), gpu["capability"]
        what = f"GPU {i}, {gpu['name']}, has compute capability {capability}; lltm_ext is built for {built}"
        if not runs and number(capability) < number(oldest):
            what += f", and can be built for {oldest} and newer"
            yield Finding(what, f"export CUDA_VISIBLE_DEVICES={visible}")
        elif not runs:
            yield Finding(what, build_record.from_source(record, f"TORCH_CUDA_ARCH_LIST={capability}"))


def no_gpu(facts: Facts) -> Finding:
    if "CUDA_VISIBLE_DEVICES" in facts.variables:
        hidden = f"CUDA_VISIBLE_DEVICES={facts.variables['CUDA_VISIBLE_DEVICES']} shows no GPU"
        return Finding(f"{hidden}: CPU tensors only", "unset CUDA_VISIBLE_DEVICES")
    if facts.driver_cuda is None:
        what = "no NVIDIA driver: CPU tensors only. To give a container access to the host's GPUs"
        return Finding(what, "docker run --gpus all")
    return Finding("the NVIDIA driver shows no GPU: CPU tensors only", "nvidia-smi --list-gpus")


def as_finding(message: str) -> Finding:
    """An error message of this package, which ends in the command that fixes it."""
    what, _, command = message.partition(" Run: ")
    command, _, alternative = command.partition("  (")
    return Finding(what.removesuffix(".") + (alternative and f" ({alternative}"), command or None)


def with_this_python(command: str) -> str:
    """The command with this Python's path for `python`, which may be another one, or none, on PATH."""
    return re.sub(r"\bpython (?=-m |setup\.py)", f"{shlex.quote(sys.executable)} ", command)


# ---- output ------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, find_facts: Callable[[], Facts] = find_facts) -> int:
    facts = find_facts()
    wrong, known = (
        [Finding(what, command and with_this_python(command)) for what, command in findings(facts)]
        for findings in (problems, notes)
    )
    print(as_json(facts, wrong, known) if args.json else "\n".join(as_text(facts, wrong, known)))
    return 1 if wrong else 0


def as_json(facts: Facts, wrong: list[Finding], known: list[Finding]) -> str:
    judged = {"problems": [f._asdict() for f in wrong], "notes": [f._asdict() for f in known]}
    facts.missing_tools = []  # They are among the problems or the notes.
    return json.dumps({"ok": not wrong} | judged | dataclasses.asdict(facts), indent=2)


def as_text(facts: Facts, wrong: list[Finding], known: list[Finding]) -> Iterator[str]:
    for name, value in table(facts):
        yield f"{name:<10} {value}"
    for title, findings in (("problem", wrong), ("note", known)):
        for what, command in findings:
            yield f"\n{title}: {what}" + (f"\n    {command}" if command else "")
    yield f"\nproblems: {len(wrong) or 'none'}"


def table(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "Python", f"{facts.python}, {facts.executable}, {facts.platform}"
    record = facts.record
    yield "lltm_ext", f"{record['version'] if record else 'not built'}, {facts.package}"
    if record:
        compiler = record["compiler"]
        nvcc = f", nvcc {compiler['nvcc']}" if compiler["nvcc"] else ""
        yield "built for", build_record.built_for(record)
        yield "GPU code", " ".join(record["architectures"]) or "none"
        yield "built by", f"{compiler['cxx']}{nvcc}, source {record['source'][:12]}"
    torch = build_record.describe(facts.torch or "of unknown version", facts.torch_cuda)
    yield "torch", f"{torch}, {facts.torch_folder}" if facts.torch_folder else "none"
    if facts.imports:
        tried = {name.rpartition(".")[2]: error for name, error in facts.imports.items()}
        yield "import", ", ".join(f"{name} FAILS" if error else name for name, error in tried.items())
    if facts.calls:
        failed = ", ".join(f"{call} FAILS" for call, error in facts.calls.items() if error)
        yield "calls", failed or f"{len(facts.calls)} passed"
    driver = f"{facts.driver or 'unknown'}, CUDA {facts.driver_cuda}"
    yield "driver", driver if facts.driver_cuda else "none"
    for i, gpu in enumerate(facts.gpus):
        yield f"GPU {i}", f"{gpu['name']}, compute capability {gpu['capability']}"
    for name, tool in facts.tools.items():
        yield name, tool or "none"
    for name, value in facts.variables.items():
        yield "variable", f"{name}={value}"
