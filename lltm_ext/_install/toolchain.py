"""What a build uses: the CUDA compiler, the architectures, the number of parallel jobs.

It uses only the standard library, so that it can be imported before the modules are built.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lltm_ext._install import probe
from lltm_ext._version import TOOLKIT, major, minor, number

# Code for x.y runs on x.z if z >= y: a GPU of 8.9 runs the code for 8.6.
ARCHITECTURES = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
FAMILIES = ("Turing", "Ampere", "Ada", "Hopper", "Blackwell")  # names that torch has for some of them
BYTES_PER_JOB = 2 * 2**30

# What a toolkit must contain, and where each part can be.
NVCC = "bin/nvcc"
HEADER = "include/cuda_runtime.h"
PARTS = (
    (HEADER,),
    ("include/crt/host_config.h",),
    ("include/nv/target", "include/cccl/nv/target"),
    ("nvvm/bin/cicc", "lib/nvidia-cuda-toolkit/bin/cicc"),
)


class ToolchainError(RuntimeError):
    """The modules cannot be built here; the message says why and which command fixes it."""


class Cuda(NamedTuple):
    """A complete CUDA toolkit."""

    home: Path
    version: str  # as nvcc gives it in full: 13.0.88

    @property
    def nvcc(self) -> Path:
        return self.home / NVCC


def wants_cuda(torch_version: str, torch_cuda: str | None, env: Mapping[str, str] = os.environ) -> bool:
    """Whether to build the CUDA kernels: as torch was built, GPU or not, unless LLTM_EXT_CUDA says so."""
    choice = env.get("LLTM_EXT_CUDA", "")
    if choice not in ("", "0", "1"):
        raise ToolchainError(f"LLTM_EXT_CUDA must be 0 or 1, got {choice!r}. Run: unset LLTM_EXT_CUDA")
    if choice == "1" and torch_cuda is None:
        release = torch_version.split("+")[0]
        raise ToolchainError(
            f"LLTM_EXT_CUDA=1 asks for CUDA kernels, but torch {torch_version} is built without CUDA. "
            f'Run: python -m pip install --force-reinstall "torch=={release}" '
            "--index-url https://download.pytorch.org/whl/cu130"
        )
    return choice != "0" and torch_cuda is not None


def search_path() -> str:
    """PATH, after the folder where pip puts ninja, which is on PATH only in an activated environment."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def ninja() -> str:
    found = shutil.which("ninja", path=search_path())
    if found is None:
        raise ToolchainError("ninja was not found. Run: python -m pip install ninja")
    return found


def python_headers() -> str:
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise ToolchainError(f"{folder} lacks Python.h, Python's own header. Run: apt-get install {package}")
    return str(folder)


def cxx_version() -> str:
    """The first line of the C++ compiler's --version."""
    try:
        return _output(os.environ.get("CXX", "c++"), "--version").splitlines()[0]
    except ToolchainError as error:
        raise ToolchainError(f"{error}. Run: apt-get install g++  (or set CXX to a C++ compiler)") from error


HOST = {"c++": cxx_version, "ninja": ninja, "Python.h": python_headers}


def check_host() -> None:
    """Raises a ToolchainError if there is no C++ compiler, no ninja or no Python.h."""
    for find in HOST.values():
        find()


def find_cuda(
    torch_cuda: str,
    env: Mapping[str, str] = os.environ,
    sys_path: Sequence[str] = sys.path,
    local: Path = Path("/usr/local"),
) -> Cuda:
    """The first complete toolkit of the CUDA major version that torch was built with."""
    looked, problems = [], []
    for origin, home in _candidates(torch_cuda, env, sys_path, local):
        looked.append(f"{origin} ({home})")
        if os.access(home / NVCC, os.X_OK):
            try:
                found = Cuda(home, _complete(home, torch_cuda))
                for passed in looked[:-1]:  # the user's variables come first
                    if passed.startswith("CUDA_"):
                        unused = f"{passed} is no CUDA {torch_cuda} toolkit"
                        warnings.warn(f"{unused}; the build uses {looked[-1]}", stacklevel=2)
                return found
            except ToolchainError as error:
                problems.append(f"{error}, found through {origin}")
    reason = problems[0] if problems else "no compiler (nvcc) was found; looked at " + ", ".join(looked)
    if int(major(torch_cuda)) >= 13:
        remedy = f'python -m pip install "{TOOLKIT}=={torch_cuda}.*"'
    else:  # PyPI has no nvcc of CUDA 12
        remedy = f"conda install -c nvidia cuda-toolkit={torch_cuda} && export CUDA_HOME=$CONDA_PREFIX"
    raise ToolchainError(
        f"torch is built with CUDA {torch_cuda}, but {reason}. "
        f"Run: {remedy}  (or set LLTM_EXT_CUDA=0 to build for the CPU only)"
    )


def _candidates(
    torch_cuda: str, env: Mapping[str, str], sys_path: Sequence[str], local: Path
) -> Iterator[tuple[str, Path]]:
    """Where a toolkit can be, best first: the user's variables, PyPI's packages, PATH, /usr/local."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield name, Path(env[name])
    for entry in sys_path:
        prefix = Path(entry or ".", "nvidia", f"cu{major(torch_cuda)}").absolute()
        if prefix.is_dir():
            yield "the PyPI packages", prefix
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    home = Path(on_path or "/").resolve().parent.parent
    if on_path and (home / HEADER).exists():  # otherwise it is a wrapper script
        yield "nvcc on PATH", home
    others = sorted(local.glob(f"cuda-{major(torch_cuda)}*"), reverse=True)
    for home in (local / f"cuda-{torch_cuda}", local / "cuda", *others):
        if home.is_dir():
            yield "the system", home


def _complete(home: Path, torch_cuda: str) -> str:
    """The version of nvcc in `home`. Raises a ToolchainError if `home` is not a toolkit for this torch."""
    found = re.search(r"V(\d+\.\d+\.\d+)", _output(home / NVCC, "--version"))
    if found is None:
        raise ToolchainError(f"{home / NVCC} --version names no version")
    if major(found[1]) != major(torch_cuda):
        raise ToolchainError(f"the compiler in {home} is of CUDA {minor(found[1])}, another major version")
    for places in PARTS:
        if not any((home / place).exists() for place in places):
            raise ToolchainError(f"the toolkit in {home} lacks {places[0]}")
    return found[1]


def _output(program: str | Path, option: str) -> str:
    try:
        return subprocess.run([program, option], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{program} does not run ({error})") from error


def compiled_for(architectures: list[str]) -> list[str]:
    """Replaces 9.0 by 9.0a, which has Hopper's matrix instructions. No later GPU runs PTX of 9.0a."""
    hopper = {"9.0": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"]}
    return [compiled for listed in architectures for compiled in hopper.get(listed, [listed])]


def smallest_code(nvcc: Path) -> list[str]:
    """The option that compresses device code to a quarter; drivers from CUDA 12.4 on read it."""
    return ["--compress-mode=size"] if "--compress-mode" in _output(nvcc, "--help") else []


def architectures(
    nvcc: Path, env: Mapping[str, str] = os.environ, gpus: Callable[[], list[str]] = probe.gpus
) -> list[str]:
    """TORCH_CUDA_ARCH_LIST, or else those of the GPUs here. `all`, or no GPU: all that nvcc knows."""
    chosen = named_architectures(env)
    if not chosen and (present := gpus()):
        return architectures_of(present, nvcc)
    if chosen in ([], ["all"]):
        return _all_known_to(nvcc)
    for architecture in chosen:
        family = architecture.partition("+")[0]
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", architecture) and family not in FAMILIES:
            raise ToolchainError(
                "TORCH_CUDA_ARCH_LIST must be all, or architectures such as 9.0 or Hopper, "
                f"got {architecture!r}. Run: unset TORCH_CUDA_ARCH_LIST"
            )
    return chosen


def _all_known_to(nvcc: Path) -> list[str]:
    """What nvcc knows of ARCHITECTURES, with PTX of the last for later GPUs."""
    known = _known_to(nvcc)
    *usable, last = (architecture for architecture in ARCHITECTURES if architecture in known)
    return [*usable, f"{last}+PTX"]


def architectures_of(gpus: Sequence[str], nvcc: Path) -> list[str]:
    """What to compile for GPUs of these compute capabilities; PTX for one too new for the compiler."""
    usable = sorted((x for x in _known_to(nvcc) if number(x) >= number(ARCHITECTURES[0])), key=number)
    found = []
    for gpu in gpus:
        if older := [each for each in usable if number(each) <= number(gpu)]:
            found.append(gpu if gpu in older else f"{older[-1]}+PTX")
    if not found:
        raise ToolchainError(
            f"the GPU here has compute capability {', '.join(gpus)}, and the oldest that {nvcc} compiles the "
            f"kernels for is {usable[0]}. Run: export LLTM_EXT_CUDA=0  (to build for the CPU only)"
        )
    return list(dict.fromkeys(found))


def named_architectures(env: Mapping[str, str] = os.environ) -> list[str]:
    return env.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()


def runs_on(architectures: Sequence[str], capability: str) -> bool:
    """Whether a GPU runs code for one of these: for its major version up to its own, or older PTX."""
    for architecture in architectures:
        match = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", architecture)
        if match is None or match[1] == capability:  # a name such as Hopper is trusted
            return True
        older = not match[2] and number(match[1]) <= number(capability)
        if older and (match[3] or major(match[1]) == major(capability)):
            return True
    return False


def _known_to(nvcc: Path) -> set[str]:
    listed = re.findall(r"compute_(\d+)(\d)\b", _output(nvcc, "--list-gpu-arch"))
    return {f"{first}.{last}" for first, last in listed}


def jobs(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """MAX_JOBS, or as many as fit the cores and the memory that this process may use."""
    if chosen := env.get("MAX_JOBS"):
        if not chosen.isdecimal() or int(chosen) == 0:
            raise ToolchainError(f"MAX_JOBS must be a number of jobs, got {chosen!r}. Run: unset MAX_JOBS")
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [cores, int(available[1]) * 1024 // BYTES_PER_JOB if available else 1]
    # A container's limits are '200000 100000' or 'max 100000' (microseconds), and '4294967296' or 'max'.
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    memory = _read(root / "sys/fs/cgroup/memory.max").strip()
    limits += [int(quota) // int(period)] if quota.isdecimal() else []
    limits += [int(memory) // BYTES_PER_JOB] if memory.isdecimal() else []
    return max(1, min(limits))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def source_revision(folder: Path) -> str:
    """The git tree hash of `folder`, without git: in a clean checkout, `git rev-parse HEAD:src`."""

    def git_hash(kind: bytes, content: bytes) -> bytes:
        return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).digest()

    entries = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name + "/" * path.is_dir()):  # git's order
        if path.is_file():
            entries.append(b"100644 %s\0%s" % (path.name.encode(), git_hash(b"blob", path.read_bytes())))
        elif any(path.iterdir()):
            entries.append(b"40000 %s\0%s" % (path.name.encode(), bytes.fromhex(source_revision(path))))
    return git_hash(b"tree", b"".join(entries)).hex()
