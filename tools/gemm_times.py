r"""Times each kernel and the library at random products, and says what the choice among them costs.

On a GPU, with the package built in place and CUDA's nvcc (options such as -I for its headers are passed on):

    python tools/gemm_times.py --products 200 --seed 1 [NVCC OPTIONS]

For each type it prints the rate of what src/gemm/gemm_choice.h chooses in parts of cuBLAS's, how much longer
that takes than the fastest way, and the products where it is most. The products are drawn, and the ways are
timed, as in benchmarks/gemm_sizes.py.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from gemm import LAYOUTS, operand  # noqa: E402
from gemm_sizes import LARGEST, shapes  # noqa: E402
from harness import Bench, sets_beyond_cache  # noqa: E402

TYPES = {"float32": 0, "tf32": 0, "float64": 1, "bfloat16": 2, "float16": 3}  # with_type's number
# Only our kernels: the library is called through torch.
PROGRAM = """
#include <vector>
#include "gemm/gemm_kernel.cu"
#undef INSTANTIATE
#ifdef LLTM_EXT_SM90A
#include "gemm/gemm_hopper.cu"
#include "gemm/gemm_bf16x6.cu"
#endif
using namespace lltm_ext;

template <typename F>
int with_type(int type, const F& f) {
  return type == 0 ? f(float()) : type == 1 ? f(double()) : type == 2 ? f(__nv_bfloat16()) : f(__half());
}

// The way at `place`: first the choice, then each of ours. Launches it if there is a workspace.
// s: M, N, K, the strides of a and of b. found: kernel, tile, splits, time, bytes of workspace.
extern "C" int way(int type, int tf32, const int64_t* s, const void* a, const void* b, void* c, int place,
                   double* found, void* workspace, void* stream) {
  return with_type(type, [&](auto x) {
    using T = decltype(x);
    GemmArgs<T> args = {{static_cast<const T*>(a), 0, s[3], s[4]}, {static_cast<const T*>(b), 0, s[5], s[6]}};
    args.c = static_cast<T*>(c), args.batch = 1, args.m = s[0], args.n = s[1], args.k = s[2];
    args.precision = tf32 ? Precision::kTf32 : Precision::kIeee;
    args.workspace = workspace;
    DeviceInfo device;
    query_device(device);
    std::vector<Choice> ways = {choose_for(args, device)};
    consider_ours(product_of(args), device, [&](const Choice& ours) { ways.push_back(ours); });
    if (place >= static_cast<int>(ways.size())) return -1;
    const Choice& way = ways[place];
    const double values[] = {double(way.kernel), double(way.tile), double(way.splits), way.time,
                             double(gemm_workspace_bytes(args, way))};
    std::copy(values, values + 5, found);
    return workspace ? int(gemm(args, way, static_cast<cudaStream_t>(stream))) : 0;
  });
}
extern "C" const char* name_of(int kernel) { return kKernelNames[kernel]; }
"""


def compiled(options: list[str]) -> ctypes.CDLL:
    capability = torch.cuda.get_device_capability()
    hopper = ["-arch=sm_90a", "-DLLTM_EXT_SM90A"]
    flags = hopper if capability == (9, 0) else ["-arch=sm_{}{}".format(*capability)]
    flags += ["-shared", "-Xcompiler=-fPIC", "-O3", "-std=c++17", f"-I{ROOT}/src", "-DLLTM_EXT_WITH_CUDA"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "times.cu"), Path(folder, "times.so")
        source.write_text(PROGRAM)
        subprocess.run(["nvcc", *flags, *options, str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found.name_of.restype = ctypes.c_char_p
    return found


def times_of(library: ctypes.CDLL, name: str, sizes: tuple[int, int, int], layout: str) -> dict[str, float]:
    """Milliseconds of each way, by name; and of the chosen one, as "chosen"."""
    m, k, n = sizes
    bench, dtype = Bench(torch.device("cuda"), 0.05, 3), getattr(torch, name.replace("tf32", "float32"))
    like: dict[str, Any] = {"device": bench.device, "dtype": dtype}
    matrices = ((m, k, layout[0] == "T"), (k, n, layout[1] == "T"), (m, n, False))
    count = sets_beyond_cache((m * k + k * n + m * n) * dtype.itemsize, bench.device)
    sets = [tuple(operand(*matrix, like) for matrix in matrices) for _ in range(count)]
    numbers = (ctypes.c_int64 * 7)(m, n, k, *sets[0][0].stride(), *sets[0][1].stride())
    line = (ctypes.c_double * 5)()

    def way(place: int, memory: torch.Tensor | None, *operands: torch.Tensor) -> bool:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in operands]
        workspace = ctypes.c_void_p(memory.data_ptr() if memory is not None else None)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = library.way(TYPES[name], name == "tf32", numbers, *pointers, place, line, workspace, stream)
        if error > 0:
            raise RuntimeError(f"way {place} of {name} at {sizes} {layout}: CUDA error {error}")
        return bool(error == 0)

    calls: dict[str, Any] = {"library": lambda a, b, c: torch.mm(a, b, out=c)}
    for place in itertools.takewhile(lambda place: way(place, None, *sets[0]), itertools.count()):
        kernel, tile, splits, time, needed = line
        called = library.name_of(int(kernel)).decode() + (f" {tile:.0f} x {splits:.0f}" if kernel else "")
        if place == 0:
            chosen, most = called, 4 * time + 5
        if called not in calls and time <= most:
            memory = torch.empty(int(needed) + 16, dtype=torch.uint8, device="cuda")
            calls[called] = functools.partial(way, place, memory)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    times = bench.device_milliseconds(calls, sets)
    return times | {"chosen": times[chosen]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args, options = parser.parse_known_args()
    library = compiled(options)
    for name in TYPES:
        products = []
        for i, sizes in enumerate(shapes(args.products, LARGEST, args.seed)):
            layout = LAYOUTS[i // 2 % 4]
            times = times_of(library, name, sizes, layout)
            products.append((times["chosen"] / min(times.values()), f"{sizes} {layout}", times))
        rates = sorted(times["library"] / times["chosen"] for *_, times in products)
        low, cost = rates[len(rates) // 20], geometric_mean(cost for cost, *_ in products)
        print(f"{name}: {geometric_mean(rates):.3f} x cuBLAS's rate, 5th percentile {low:.2f},", end=" ")
        print(f"least {rates[0]:.2f}; {cost:.3f} x the time of the fastest way")
        for cost, product, times in sorted(products, key=lambda x: x[0])[-10:]:
            by_time = sorted(times.items(), key=lambda x: x[1])
            print(
                f"  {cost:.2f} at {product}:", ", ".join(f"{way} {1e3 * time:.1f}" for way, time in by_time)
            )


if __name__ == "__main__":
    main()
