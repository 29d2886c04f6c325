// From a problem to a launch of the kernels for Hopper: descriptions of matrices for the copy engine, grids.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "gemm/gemm_hopper.cuh"

namespace lltm_ext {
namespace hopper {

// [batch, rows, columns] in memory, with columns side by side.
struct Layout {
  const void* data;
  int64_t columns, rows, batch, row_stride, batch_stride;  // strides in elements
};

// What the copy engine asks of addresses and strides.
inline bool engine_takes(const Layout& x, int element_size) {
  const int64_t limit = int64_t{1} << 40;
  const auto fits = [&](int64_t stride, int64_t size) {
    return size == 1 || (stride > 0 && stride * element_size % 16 == 0 && stride * element_size < limit);
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && fits(x.row_stride, x.rows) &&
         fits(x.batch_stride, x.batch) && std::max({x.columns, x.rows, x.batch}) <= INT32_MAX;
}

using EncodeTiled = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                             const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, by its name: no library to link.
inline EncodeTiled* encode_tiled() {
  static EncodeTiled* const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &status);
    return error == cudaSuccess && status == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled*>(function)
               : nullptr;
  }();
  return found;
}

template <typename T>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kMapType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Boxes of 64 columns and `box_rows` rows.
template <typename T>
cudaError_t describe(CUtensorMap& map, const Layout& x, int box_rows) {
  EncodeTiled* const encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const auto bytes = [](int64_t stride, int64_t size) -> cuuint64_t {
    return size == 1 ? 16 : stride * sizeof(T);  // a stride that nobody takes
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.rows),
                              static_cast<cuuint64_t>(x.batch)};
  const cuuint64_t strides[] = {bytes(x.row_stride, x.rows), bytes(x.batch_stride, x.batch)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1}, steps[] = {1, 1, 1};
  const CUresult result = encode(&map, kMapType<T>, 3, const_cast<void*>(x.data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A product of tiles: for an a of few rows that of the transposes, b^T @ a^T.
template <typename T>
struct Call {
  Layout a, b;
  int m, n, k, batch;
  Epilogue<T> epilogue;  // of c itself
};

template <typename T>
Layout result_layout(const Call<T>& call, const T* data) {
  const int64_t rows = call.epilogue.m, columns = call.epilogue.n;
  return {data, columns, rows, call.batch, columns, rows * columns};
}

template <class Operands, typename T>
cudaError_t describe_operands(CUtensorMap& a, CUtensorMap& b, const Call<T>& call) {
  cudaError_t error = describe<T>(a, call.a, Operands::kSwapA ? 64 : kTileM);
  if (error == cudaSuccess) {
    error = describe<T>(b, call.b, Operands::kSwapB ? 64 : Operands::kTileN / Operands::kShare);
  }
  return error;
}

template <class Kernel, class F, class... Args>
cudaError_t launch_clusters(F* kernel, dim3 grid, dim3 cluster, cudaStream_t stream, const Args&... args) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Kernel::kShared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

inline int tiles_of(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

template <class Operands, typename T>
cudaError_t launch_persistent(const Call<T>& call, int multiprocessors, cudaStream_t stream) {
  using Kernel = Persistent<Operands>;
  CUtensorMap a, b, c = {}, before = {};
  cudaError_t error = describe_operands<Operands>(a, b, call);
  const Layout results = result_layout(call, call.epilogue.c),
               inputs = result_layout(call, call.epilogue.before);
  const bool by_engine = engine_takes(results, sizeof(T)) && engine_takes(inputs, sizeof(T));
  if (error == cudaSuccess && by_engine) error = describe<T>(c, results, 64);
  if (error == cudaSuccess && by_engine && inputs.data) error = describe<T>(before, inputs, 64);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {call.epilogue, tiles_of(call.k, kTileK), call.a.batch > 1, call.b.batch > 1,
                              by_engine};
  constexpr int kShare = Operands::kShare;
  const Schedule schedule = {tiles_of(call.m, kTileM * kShare), tiles_of(call.n, Operands::kTileN),
                             call.batch};
  const int64_t clusters = std::min<int64_t>(schedule.total(), multiprocessors / kShare);
  return launch_clusters<Kernel>(gemm_persistent_kernel<Kernel, T>, dim3(clusters * kShare), dim3(kShare),
                                 stream, a, b, c, before, problem, schedule);
}

template <class Operands, bool kSwap, typename T>
cudaError_t launch_split(const Call<T>& call, int parts, cudaStream_t stream) {
  using Kernel = Split<Operands, kSwap>;
  CUtensorMap a, b;
  const cudaError_t error = describe_operands<Operands>(a, b, call);
  if (error != cudaSuccess) return error;
  const Problem<T> problem = {call.epilogue, tiles_of(call.k, kTileK), call.a.batch > 1, call.b.batch > 1,
                              false};
  const Schedule schedule = {tiles_of(call.m, kTileM), tiles_of(call.n, Operands::kTileN), call.batch};
  return launch_clusters<Kernel>(gemm_split_kernel<Kernel, T>, dim3(schedule.total(), 1, parts),
                                 dim3(1, 1, parts), stream, a, b, problem, schedule);
}

}  // namespace hopper
}  // namespace lltm_ext
