// Timing of gemm's kernels, for tools/gemm_tilings.cu and tools/gemm_schedule.cu. Operands come from memory,
// not from the L2 cache, as in the layers of a model: calls take turns among several sets of them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "common/types.h"
#include "gemm/gemm.h"

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// From `from` to `to`, uniformly on a logarithmic scale.
inline int64_t random_size(std::mt19937& random, double from, double to) {
  return std::llround(from * std::pow(to / from, std::uniform_real_distribution(0.0, 1.0)(random)));
}

template <typename T>
__global__ void fill(T* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * 256) {
    to[i] = lltm_ext::narrow<T>(
        static_cast<lltm_ext::acc_t<T>>(static_cast<float>((i * 2654435761u >> 7) % 1024) / 1024 - 0.5f));
  }
}

// In a CUDA graph, so that the host's time does not count. call(i) has the i-th operands.
template <class Call>
double microseconds(cudaStream_t stream, int calls, const Call& call) {
  constexpr int kRounds = 3;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; ++i) check(call(i));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  static const auto events = [] {
    std::array<cudaEvent_t, 2> made;
    for (cudaEvent_t& event : made) check(cudaEventCreate(&event));
    return made;
  }();
  check(cudaGraphLaunch(executable, stream));
  float best = 0;
  for (int i = 0; i < kRounds; ++i) {
    float milliseconds;
    check(cudaEventRecord(events[0], stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(events[1], stream));
    check(cudaEventSynchronize(events[1]));
    check(cudaEventElapsedTime(&milliseconds, events[0], events[1]));
    if (i == 0 || milliseconds < best) best = milliseconds;
  }
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  return best * 1e3 / calls;
}

// Memory for a, b and c of products in T, `elements` each.
template <typename T>
struct Operands {
  static constexpr int kLeastCalls = 4, kMostSets = 64;
  static constexpr double kCacheBytes = 200e6;  // four times the L2 cache of an H100 or H200

  explicit Operands(int64_t elements_) : elements(elements_) {
    for (T*& x : memory) {
      check(cudaMalloc(&x, elements * sizeof(T)));
      fill<<<1024, 256>>>(x, elements);
    }
  }
  ~Operands() {
    for (T* x : memory) cudaFree(x);
  }

  // The time of launch(args), whose operands have so many elements.
  template <class Launch>
  double time(cudaStream_t stream, lltm_ext::GemmArgs<T> args, int64_t of_a, int64_t of_b,
              const Launch& launch) const {
    const auto padded = [](int64_t count) { return (count + 255) / 256 * 256; };
    const std::array<int64_t, 3> sizes = {padded(of_a), padded(of_b), padded(args.batch * args.m * args.n)};
    const auto to_exceed_cache =
        static_cast<int64_t>(kCacheBytes / (sizeof(T) * (sizes[0] + sizes[1] + sizes[2])));
    const int64_t sets = std::min(elements / *std::max_element(sizes.begin(), sizes.end()),
                                  std::clamp<int64_t>(to_exceed_cache, kLeastCalls, kMostSets));
    return microseconds(stream, std::max(static_cast<int>(sets), kLeastCalls), [&](int i) {
      args.a.data = memory[0] + i % sets * sizes[0], args.b.data = memory[1] + i % sets * sizes[1];
      args.c = memory[2] + i % sets * sizes[2];
      return launch(args);
    });
  }

  int64_t elements;
  std::array<T*, 3> memory;
};
