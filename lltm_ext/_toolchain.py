"""What a build of the modules compiles with: the CUDA compiler, the architectures, the parallel jobs.

Standard library only, and importable before the modules are built.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# Code for x.y runs on every x.z from y on: 8.9 takes that for 8.6.
ARCHITECTURES = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
BYTES_PER_JOB = 2 * 2**30
ASK_PERSONALITY, ADDR_NO_RANDOMIZE = 0xFFFFFFFF, 0x0040000  # sys/personality.h
PROBE = Path(__file__).with_name("_probe.py")

# What a toolkit must hold, and where each part may stand.
NVCC = "bin/nvcc"
CICC = ("nvvm/bin/cicc", "lib/nvidia-cuda-toolkit/bin/cicc")
HEADER = "include/cuda_runtime.h"
PARTS = (
    (HEADER,),
    ("include/crt/host_config.h",),
    ("include/nv/target", "include/cccl/nv/target"),
    CICC,
)


class ToolchainError(RuntimeError):
    """The modules cannot be built here; the message says why and which command mends it."""


class Cuda(NamedTuple):
    """A complete CUDA toolkit."""

    home: Path
    version: str  # of nvcc, all of it: 13.0.88

    @property
    def nvcc(self) -> Path:
        return self.home / NVCC


def fix_addresses() -> None:
    """Has this process start programs whose memory lies at the same addresses every time.

    nvcc's cicc sorts by address here and there: of one long kernel, 30 runs with random addresses made seven
    kinds of machine code. A container may refuse this (seccomp); then all works, and builds vary.
    """
    libc = ctypes.CDLL(None)
    libc.personality(libc.personality(ASK_PERSONALITY) | ADDR_NO_RANDOMIZE)


PLACE_LENGTH = 30  # of same_place's path: /tmp/lltm_ext- and 16 digits


def mirror(home: Path, place: Path, files: list[Path]) -> None:
    """Links to all that `home` holds, but for `files`: these stand in `place` themselves."""
    place.mkdir()
    for entry in home.iterdir():
        inside = [file for file in files if file.is_relative_to(entry)]
        if entry in inside:
            try:
                os.link(entry.resolve(), place / entry.name)
            except OSError:  # another disk, or another's file
                shutil.copy2(entry, place / entry.name)
        elif inside:
            mirror(entry, place / entry.name, inside)
        else:
            (place / entry.name).symlink_to(entry)


@contextmanager
def same_place(src: Path, cuda: Cuda, build: Path) -> Iterator[Path]:
    """A folder where the sources (src), the compiler (cuda) and what `build` holds (objects) have paths of
    one length, wherever they stand else, unless $TMPDIR is long.

    Names of files and folders lie in cicc's memory, and move what comes after them: in four folders one file
    became up to four kinds of machine code, addresses fixed. The path of cicc itself, too, links followed.
    """
    prefix = f"{tempfile.gettempdir()}/lltm_ext-"
    name = hashlib.sha256(str(build.resolve()).encode()).hexdigest()
    place = Path(prefix + name[: max(8, PLACE_LENGTH - len(prefix))])
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)  # and fails where another user holds the name
    shutil.copytree(src, place / "src")  # with its times, by which ninja knows what to compile again
    programs = [cuda.home / program for program in (NVCC, *CICC)]
    mirror(cuda.home, place / "cuda", [program for program in programs if program.is_file()])
    build.mkdir(parents=True, exist_ok=True)
    shutil.move(build, place / "objects")
    try:
        yield place
    finally:
        shutil.move(place / "objects", build)
        shutil.rmtree(place)


def minor(version: str) -> str:
    """'2.11' of '2.11.0+cu130'."""
    return ".".join(version.split(".")[:2])


def major(version: str) -> str:
    """'13' of '13.0'."""
    return version.split(".")[0]


# ---- CUDA or not -------------------------------------------------------------------------------------------


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


# ---- the C++ compiler and what it needs --------------------------------------------------------------------


def search_path(env: Mapping[str, str] = os.environ) -> str:
    """PATH, led by the folder where pip puts ninja: PATH has it in an activated environment alone."""
    return os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", "")])


def check_host(env: Mapping[str, str] = os.environ, headers: Path | None = None) -> None:
    """Raises where there is no C++ compiler, no ninja, or no headers of Python (in `headers`)."""
    cxx_version(env)
    ninja(env)
    python_headers(headers)


def ninja(env: Mapping[str, str] = os.environ) -> str:
    found = shutil.which("ninja", path=search_path(env))
    if found is None:
        raise ToolchainError("ninja was not found. Run: python -m pip install ninja")
    return found


def python_headers(folder: Path | None = None) -> Path:
    """The folder that has Python.h: Python's own, or one that is given."""
    folder = folder or Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise ToolchainError(f"{folder} lacks Python.h, Python's own header. Run: apt-get install {package}")
    return folder


def cxx_version(env: Mapping[str, str] = os.environ) -> str:
    """The first line that the C++ compiler says of itself."""
    try:
        return _output(env.get("CXX", "c++"), "--version").splitlines()[0]
    except ToolchainError as error:
        raise ToolchainError(f"{error}. Run: apt-get install g++  (or set CXX to a C++ compiler)") from error


# ---- the CUDA compiler -------------------------------------------------------------------------------------


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
        if not _is_executable(home / NVCC):
            continue
        problem = _problem(home, torch_cuda)
        if problem is None:
            return Cuda(home, nvcc_version(home / NVCC))
        problems.append(f"{problem}, found through {origin}")
    reason = problems[0] if problems else "no compiler (nvcc) was found; looked at " + ", ".join(looked)
    raise ToolchainError(f"torch is built with CUDA {torch_cuda}, but {reason}. {_remedy(torch_cuda)}")


def _candidates(
    torch_cuda: str, env: Mapping[str, str], sys_path: Sequence[str], local: Path
) -> Iterator[tuple[str, Path]]:
    """Where a toolkit may be, best first: what the user names, what comes with torch, what the system has."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield name, Path(env[name])
    for entry in sys_path:
        prefix = Path(entry or ".", "nvidia", f"cu{major(torch_cuda)}").absolute()
        if prefix.is_dir():
            yield "the PyPI packages", prefix
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    home = Path(on_path or "/").resolve().parent.parent
    if on_path and (home / HEADER).exists():  # without headers it is a wrapper script, of no toolkit here
        yield "nvcc on PATH", home
    exact = local / f"cuda-{torch_cuda}"
    others = sorted(local.glob(f"cuda-{major(torch_cuda)}*"), reverse=True)
    for home in dict.fromkeys([exact, local / "cuda", *others]):
        if home.is_dir():
            yield "the system", home


def _problem(home: Path, torch_cuda: str) -> str | None:
    """Why the toolkit in `home`, which has an nvcc, will not do; None if it will."""
    try:
        version = nvcc_version(home / NVCC)
    except ToolchainError as error:
        return str(error)
    if major(version) != major(torch_cuda):
        return f"the compiler in {home} is of CUDA {minor(version)}, another major version"
    for places in PARTS:
        if not any((home / place).exists() for place in places):
            return f"the toolkit in {home} lacks {places[0]}"
    return None


def _remedy(torch_cuda: str) -> str:
    if int(major(torch_cuda)) >= 13:
        command = f'python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]=={torch_cuda}.*"'
    else:  # PyPI has no nvcc of CUDA 12
        command = f"conda install -c nvidia cuda-toolkit={torch_cuda} && export CUDA_HOME=$CONDA_PREFIX"
    return f"Run: {command}  (or set LLTM_EXT_CUDA=0 to build for the CPU alone)"


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def nvcc_version(nvcc: Path) -> str:
    """'13.0.88': the whole version that `nvcc --version` prints."""
    found = re.search(r"V(\d+\.\d+\.\d+)", _output(nvcc, "--version"))
    if found is None:
        raise ToolchainError(f"{nvcc} --version names no version")
    return found[1]


def _output(program: str | Path, *arguments: str) -> str:
    command = [str(program), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{program} does not run ({error})") from error


def cudart_folder(home: Path, folder: Path) -> Path | None:
    """Where the linker finds libcudart.so; None: in the toolkit itself.

    PyPI's runtime has libcudart.so.13 alone, which -lcudart does not find, so `folder` gets a link to it.
    """
    libraries = next((home / name for name in ("lib64", "lib") if (home / name).is_dir()), home)
    versioned = sorted(libraries.glob("libcudart.so.*"))
    if (libraries / "libcudart.so").exists() or not versioned:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(versioned[0])
    return folder


# ---- architectures -----------------------------------------------------------------------------------------


def compiled_for(architectures: list[str]) -> list[str]:
    """The same with 9.0 as 9.0a: code for that compute capability alone has its matrix instructions.

    PTX of 9.0a would serve no later GPU, so that of 9.0 stays as it is.
    """
    replaced = {"9.0": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"]}
    return [compiled for listed in architectures for compiled in replaced.get(listed, [listed])]


def smallest_code(nvcc: Path) -> list[str]:
    """The option that makes device code a quarter of its size, for a driver of CUDA 12.4 or newer to read."""
    return ["--compress-mode=size"] if "--compress-mode" in _output(nvcc, "--help") else []


def architectures(nvcc: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """TORCH_CUDA_ARCH_LIST, or those of ours that the compiler knows and PTX of the last for later GPUs."""
    chosen = named_architectures(env)
    if chosen:
        return chosen
    known = _known_to(nvcc)
    usable = [architecture for architecture in ARCHITECTURES if architecture in known]
    if not usable:
        raise ToolchainError(
            f"{nvcc} knows none of {', '.join(ARCHITECTURES)}. Run: export TORCH_CUDA_ARCH_LIST={max(known)}"
        )
    return [*usable[:-1], usable[-1] + "+PTX"]


def architectures_of(gpus: Sequence[str], nvcc: Path) -> list[str]:
    """What to compile for GPUs of these compute capabilities; PTX for one too new for the compiler."""
    usable = [each for each in _known_to(nvcc) if _number(each) >= _number(ARCHITECTURES[0])]
    found = []
    for gpu in gpus:
        newest = max((each for each in usable if _number(each) <= _number(gpu)), key=_number, default=None)
        if newest:
            found.append(newest if newest == gpu else f"{newest}+PTX")
    if not found:
        oldest = min(usable, key=_number, default=ARCHITECTURES[0])
        raise ToolchainError(
            f"the GPU here has compute capability {', '.join(gpus)}, and the oldest that {nvcc} compiles the "
            f"kernels for is {oldest}. Run: export LLTM_EXT_CUDA=0  (to build for the CPU alone)"
        )
    return list(dict.fromkeys(found))


def named_architectures(env: Mapping[str, str] = os.environ) -> list[str]:
    """What TORCH_CUDA_ARCH_LIST names."""
    return env.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()


def gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """The compute capabilities of the GPUs that this process may use, as the driver tells; empty without one.

    Asked in a process of its own: where a process has once spoken to the driver, its forks cannot use CUDA.
    """
    command = [sys.executable, "-I", "-S", str(PROBE), "driver", "[]"]
    answer = subprocess.run(command, capture_output=True, text=True, env=dict(env))
    found = {json.loads(line).get("capability") for line in answer.stdout.splitlines()} - {None}
    return sorted(found, key=_number) if answer.returncode == 0 else []


def _known_to(nvcc: Path) -> set[str]:
    listed = re.findall(r"compute_(\d+)(\d)\b", _output(nvcc, "--list-gpu-arch"))
    return {f"{first}.{last}" for first, last in listed}


def _number(architecture: str) -> tuple[int, ...]:
    return tuple(map(int, architecture.split(".")))


# ---- parallel jobs -----------------------------------------------------------------------------------------


def jobs(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """MAX_JOBS, or as many as the cores and the memory that this process may use carry."""
    if env.get("MAX_JOBS"):
        return int(env["MAX_JOBS"])
    return max(1, min(_cores(root), _memory(root) // BYTES_PER_JOB))


def _cores(root: Path) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limit in _cgroup(root, "cpu", "cpu.max"):  # '200000 100000', or 'max 100000'
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _memory(root: Path) -> int:
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [*_cgroup(root, "memory", "memory.max"), *_cgroup(root, "memory", "memory.limit_in_bytes")]
    bytes_ = [int(limit) for limit in limits if limit.isdecimal()]
    return min([int(available[1]) * 1024 if available else BYTES_PER_JOB, *bytes_])


def _cgroup(root: Path, controller: str, name: str) -> Iterator[str]:
    """What the files `name` of this process's control groups and of those above say (version 1 and 2)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                yield _read(folder / name).strip()


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


# ---- the source --------------------------------------------------------------------------------------------


def source_revision(folder: Path) -> str:
    """The git tree hash of `folder`, of the files as they are: in a clean checkout, `git rev-parse HEAD:src`.

    Computed here, so that it says the same in an sdist, without git, and the truth of an edited checkout.
    """
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and any(path.iterdir()):
            entries.append((path.name + "/", b"40000 ", bytes.fromhex(source_revision(path))))
        elif path.is_file():
            entries.append((path.name, b"100644 ", _git_hash(b"blob", path.read_bytes())))
    tree = b"".join(mode + name.rstrip("/").encode() + b"\0" + hash_ for name, mode, hash_ in sorted(entries))
    return _git_hash(b"tree", tree).hex()


def _git_hash(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()
