// From a problem to a launch of the kernels for Hopper: descriptions of matrices for the copy engine, grids.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/hopper/launch.cuh"
#include "gemm/gemm_hopper.cuh"

namespace lltm_ext {
namespace hopper {

// A product of tiles: for an a of few rows that of the transposes, b^T @ a^T.
template <typename T>
struct Call {
  Layout a, b;
  int m, n, k, batch;
  Epilogue<T> epilogue;  // of c itself
  void* workspace;       // for `split_in_memory`
};

template <typename T>
Layout result_layout(const Call<T>& call, const T* data) {
  const int64_t rows = call.epilogue.m, columns = call.epilogue.n;
  return {data, columns, rows, call.batch, columns, rows * columns};
}

template <class Operands, typename T>
cudaError_t describe_operands(CUtensorMap& a, CUtensorMap& b, const Call<T>& call) {
  cudaError_t error = describe<T>(a, call.a, Operands::kSwapA ? 64 : Operands::kTileM);
  if (error == cudaSuccess) {
    error = describe<T>(b, call.b, Operands::kSwapB ? 64 : Operands::kTileN / Operands::kShare);
  }
  return error;
}

template <class Operands, typename T>
cudaError_t launch_persistent(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  using Kernel = Persistent<Operands>;
  CUtensorMap a, b, c = {}, before = {};
  cudaError_t error = describe_operands<Operands>(a, b, call);
  const Layout results = result_layout(call, call.epilogue.c),
               inputs = result_layout(call, call.epilogue.before);
  const bool is_fused = engine_takes(results, sizeof(T)) && engine_takes(inputs, sizeof(T));
  if (error == cudaSuccess && is_fused) error = describe<T>(c, results, 64);
  if (error == cudaSuccess && is_fused && inputs.data) error = describe<T>(before, inputs, 64);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {call.epilogue, tiles_of(call.k, kTileK), call.a.batch > 1, call.b.batch > 1,
                              is_fused};
  constexpr int kShare = Operands::kShare;
  const Schedule schedule = {tiles_of(call.m, Operands::kTileM * kShare), tiles_of(call.n, Operands::kTileN),
                             call.batch};
  const int64_t clusters = std::min<int64_t>(schedule.total(), multiprocessors / kShare);
  const auto kernel = gemm_persistent_kernel<Kernel, T>;
  error = allow_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, dim3(clusters * kShare), dim3(kShare), Kernel::kThreads, Kernel::kShared,
                         /*early=*/true, stream, a, b, c, before, problem, schedule);
}

template <class Operands, bool kSwap, typename T>
cudaError_t launch_split(const Call<T>& call, int parts, cudaStream_t stream) {
  using Kernel = Split<Operands, kSwap>;
  CUtensorMap a, b;
  cudaError_t error = describe_operands<Operands>(a, b, call);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {call.epilogue, tiles_of(call.k, kTileK), call.a.batch > 1, call.b.batch > 1,
                              false};
  const Schedule schedule = {tiles_of(call.m, Operands::kTileM), tiles_of(call.n, Operands::kTileN),
                             call.batch};
  const auto kernel = gemm_split_kernel<Kernel, T>;
  error = allow_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, dim3(schedule.total(), 1, parts), dim3(1, 1, parts), Kernel::kThreads,
                         Kernel::kShared, /*early=*/true, stream, a, b, problem, schedule);
}

template <class Operands>
int64_t split_in_memory_bytes(int64_t m, int64_t n, int64_t batch, int parts) {
  constexpr int kRows = Operands::kTileM * Operands::kShare, kColumns = Operands::kTileN;
  return int64_t{tiles_of(m, kRows)} * kRows * tiles_of(n, kColumns) * kColumns * batch * parts *
         sizeof(float);
}

template <class Operands, bool kSwap, typename T>
cudaError_t launch_split_in_memory(const Call<T>& call, int parts, cudaStream_t stream) {
  using Kernel = SplitInMemory<Operands, kSwap>;
  CUtensorMap a, b;
  cudaError_t error = describe_operands<Operands>(a, b, call);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {call.epilogue, tiles_of(call.k, kTileK), call.a.batch > 1, call.b.batch > 1,
                              false};
  constexpr int kShare = Operands::kShare;
  const Schedule schedule = {tiles_of(call.m, Operands::kTileM * kShare), tiles_of(call.n, Operands::kTileN),
                             call.batch};
  const int64_t tiles = schedule.total() * kShare;
  const auto kernel = gemm_split_in_memory_kernel<Kernel, T>;
  error = allow_shared(kernel, Kernel::kShared);
  if (error != cudaSuccess) return error;
  float4* const products = static_cast<float4*>(call.workspace);
  error = launch_clusters(kernel, dim3(tiles, 1, parts), dim3(kShare), Kernel::kThreads, Kernel::kShared,
                          /*early=*/true, stream, a, b, problem, schedule, products);
  if (error != cudaSuccess) return error;
  return launch_clusters(gemm_split_sum_kernel<Kernel, T>,
                         dim3(tiles * Kernel::kPieces / Kernel::kPiecesOfBlock), dim3(1), Kernel::kSumThreads,
                         0, /*early=*/true, stream, static_cast<const float4*>(products), call.epilogue,
                         schedule, parts);
}

}  // namespace hopper
}  // namespace lltm_ext
