r"""Times each kernel and the library at random products, and says what the choice among them costs.

On a GPU, with the package built in place and CUDA's nvcc (options that it needs to find its headers, such as
-I, are passed on):

    python tools/gemm_times.py --products 200 --seed 1 [NVCC OPTIONS]

For each type it prints the rate of what src/gemm/gemm_choice.h chooses in parts of cuBLAS's, how much longer
that takes than the fastest way, and the products where it is most. Operands come from memory, not from L2.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parents[1] / "src"
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LARGEST, MOST_FLOP, COLD_BYTES = 16_384, 2**38, 256 << 20
# Only our kernels: the library is called through torch.
LIBRARY = """
#include "gemm/gemm_kernel.cu"
#undef INSTANTIATE
#ifdef LLTM_EXT_SM90A
#include "gemm/gemm_hopper.cu"
#include "gemm/gemm_bf16x6.cu"
#endif

using namespace lltm_ext;

struct Sizes {
  int64_t m, n, k, a_row, a_column, b_row, b_column;
};

template <typename T>
GemmArgs<T> arguments(const Sizes& s, const void* a, const void* b, void* c, void* workspace, bool tf32) {
  GemmArgs<T> args = {};
  args.a = {static_cast<const T*>(a), 0, s.a_row, s.a_column};
  args.b = {static_cast<const T*>(b), 0, s.b_row, s.b_column};
  args.c = static_cast<T*>(c);
  args.batch = 1, args.m = s.m, args.n = s.n, args.k = s.k;
  args.precision = tf32 ? Precision::kTf32 : Precision::kIeee;
  args.workspace = workspace;
  return args;
}

template <typename F>
int with_type(int type, const F& f) {
  return type == 0 ? f(float()) : type == 1 ? f(double()) : type == 2 ? f(__nv_bfloat16()) : f(__half());
}

// The choice first, then each of our ways: five numbers each.
extern "C" int candidates(int type, int tf32, const Sizes* s, const void* a, const void* b, void* c,
                          double* to) {
  return with_type(type, [&](auto x) {
    using T = decltype(x);
    const GemmArgs<T> args = arguments<T>(*s, a, b, c, nullptr, tf32);
    DeviceInfo device;
    query_device(device);
    int count = 0;
    const auto add = [&](const Choice& way) {
      const double line[] = {double(int(way.kernel)), double(way.tile), double(way.splits), way.time,
                             double(gemm_workspace_bytes(args, way))};
      std::copy(line, line + 5, to + 5 * count++);
    };
    add(choose_for(args, device));
    consider_ours(product_of(args), device, add);
    return count;
  });
}

extern "C" int run(int type, int tf32, const Sizes* s, const void* a, const void* b, void* c, void* workspace,
                   int kernel, int tile, int splits, double time, void* stream) {
  return with_type(type, [&](auto x) {
    const auto args = arguments<decltype(x)>(*s, a, b, c, workspace, tf32);
    return int(gemm(args, Choice{Kernel(kernel), tile, splits, time}, static_cast<cudaStream_t>(stream)));
  });
}

extern "C" const char* name_of(int kernel) { return kKernelNames[kernel]; }
"""


def compiled(options: list[str]) -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    hopper = (major, minor) == (9, 0)
    architecture = f"sm_{major}{minor}" + ("a" if hopper else "")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "times.cu"), Path(folder, "times.so")
        source.write_text(LIBRARY)
        flags = ["-shared", "-Xcompiler=-fPIC", "-O3", "-std=c++17", "--expt-relaxed-constexpr"]
        flags += [f"-arch={architecture}", f"-I{SOURCES}", "-DLLTM_EXT_WITH_CUDA", *options]
        flags += ["-DLLTM_EXT_SM90A"] if hopper else []
        subprocess.run(["nvcc", *flags, str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found.name_of.restype = ctypes.c_char_p
    return found


def microseconds(call: Callable[[int], object], sets: int) -> float:
    """The least time of a call, of a CUDA graph over all sets of operands."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        with torch.cuda.graph(graph, stream=stream):
            for i in range(sets):
                call(i)
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / sets)
    return min(times[1:])


def launch(
    library: ctypes.CDLL,
    product: tuple[Any, ...],
    pointers: list[list[ctypes.c_void_p]],
    workspace: torch.Tensor,
    ways: Any,
    place: int,
    i: int,
) -> None:
    """Launches the way at `place` for the i-th set of operands."""
    kernel, tile, splits = (int(x) for x in ways[5 * place : 5 * place + 3])
    memory, stream = (
        ctypes.c_void_p(x) for x in (workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    )
    time = ctypes.c_double(ways[5 * place + 3])
    error = library.run(*product, *pointers[i], memory, kernel, tile, splits, time, stream)
    if error != 0:
        raise RuntimeError(f"{library.name_of(kernel)!r} {tile} x {splits}: CUDA error {error}")


def times_of(library: ctypes.CDLL, name: str, sizes: tuple[int, int, int], layout: str) -> dict[str, float]:
    """Of each way, by name; and of the chosen one, as "chosen"."""
    m, k, n = sizes
    dtype = DTYPES[name]
    number, tf32 = [torch.float32, torch.float64, torch.bfloat16, torch.float16].index(dtype), name == "tf32"
    bytes_of_set = (m * k + k * n + m * n) * dtype.itemsize
    sets = min(-(-COLD_BYTES // bytes_of_set) + 1, 50)

    def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(shape, dtype=dtype, device="cuda")
        return x.T if transposed else x

    a = [operand(m, k, layout[0] == "T") for _ in range(sets)]
    b = [operand(k, n, layout[1] == "T") for _ in range(sets)]
    c = [torch.empty(m, n, dtype=dtype, device="cuda") for _ in range(sets)]
    strides = (ctypes.c_int64 * 7)(m, n, k, *a[0].stride(), *b[0].stride())
    ways = (ctypes.c_double * 500)()
    pointers = [[ctypes.c_void_p(x.data_ptr()) for x in (a[i], b[i], c[i])] for i in range(sets)]
    count = library.candidates(number, tf32, strides, *pointers[0], ways)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    found = {"library": microseconds(lambda i: torch.mm(a[i], b[i], out=c[i]), sets)}
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = ""
    for place in range(count):
        kernel, tile, splits, time, workspace = ways[5 * place : 5 * place + 5]
        way = library.name_of(int(kernel)).decode()
        way += f" {int(tile)} x {int(splits)}" if way != "library" else ""
        chosen = chosen or way
        if way in found or time > 4 * ways[3] + 5:
            continue
        memory = torch.empty(int(workspace) + 16, dtype=torch.uint8, device="cuda")
        call = functools.partial(launch, library, (number, tf32, strides), pointers, memory, ways, place)
        found[way] = microseconds(call, sets)
    return found | {"chosen": found[chosen], f"chosen: {chosen}": found[chosen]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args, options = parser.parse_known_args()
    library = compiled(options)
    for name in DTYPES:
        draw, rates, costs = random.Random(args.seed), [], []
        while len(rates) < args.products:
            m, k, n = sizes = [round(LARGEST ** draw.random()) for _ in range(3)]
            if len(rates) % 2:
                m, k, n = sizes = [-(-size // 8) * 8 for size in sizes]
            layout = draw.choice(("NN", "NT", "TN", "TT"))
            if 2 * m * k * n > MOST_FLOP:
                continue
            times = times_of(library, name, (m, k, n), layout)
            rates.append(times["library"] / times["chosen"])
            costs.append((times["chosen"] / min(times.values()), f"{m} x {k} x {n} {layout}", times))
        rates.sort()
        mean = statistics.geometric_mean
        print(
            f"{name}: {mean(rates):.3f} x cuBLAS's rate, 5th percentile {rates[len(rates) // 20]:.2f}, ",
            end="",
        )
        print(f"least {rates[0]:.2f}; {mean(cost for cost, *_ in costs):.3f} x the time of the fastest way")
        for cost, product, times in sorted(costs, key=lambda x: x[0])[-10:]:
            listed = ", ".join(f"{way} {time:.1f}" for way, time in sorted(times.items(), key=lambda x: x[1]))
            print(f"  {cost:.2f} at {product}: {listed}")


if __name__ == "__main__":
    main()
