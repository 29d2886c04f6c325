// The host side of Hopper kernels: TMA tensor maps and cluster launches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "common/shared_memory.h"

namespace lltm_ext {
namespace hopper {

// [batch, rows, columns] in global memory; columns are contiguous.
struct GlobalTensor {
  const void* data;
  int64_t columns, rows, batch, row_stride, batch_stride;  // strides in elements
};

// Whether TMA can address the tensor.
inline bool tma_supports(const GlobalTensor& x, int element_size) {
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

// Looks the function up at run time, so that nothing links to libcuda.
inline EncodeTiled* find_encode_tiled() {
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

// Driver functions need a context. A thread without a runtime call so far, such as autograd's, has none.
inline cudaError_t bind_context() {
  thread_local const cudaError_t bound = [] {
    int device;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaSetDevice(device) : error;
  }();
  return bound;
}

// Encodes a map with boxes of `box_rows` rows by 128 bytes of columns, in the 128-byte swizzle.
template <typename T>
cudaError_t encode_tensor_map(CUtensorMap& map, const GlobalTensor& x, int box_rows) {
  EncodeTiled* const encode = find_encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  if (const cudaError_t error = bind_context(); error != cudaSuccess) return error;
  const auto bytes = [](int64_t stride, int64_t size) -> cuuint64_t {
    return size == 1 ? 16 : stride * sizeof(T);  // any valid stride, if it is never used
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.rows),
                              static_cast<cuuint64_t>(x.batch)};
  const cuuint64_t strides[] = {bytes(x.row_stride, x.rows), bytes(x.batch_stride, x.batch)};
  const cuuint32_t box[] = {128 / sizeof(T), static_cast<cuuint32_t>(box_rows), 1}, steps[] = {1, 1, 1};
  const CUresult result = encode(&map, kMapType<T>, 3, const_cast<void*>(x.data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The maps of a mainloop's operands (pipeline.cuh).
template <class Mainloop>
cudaError_t encode_operands(CUtensorMap& map_a, CUtensorMap& map_b, const GlobalTensor& a,
                            const GlobalTensor& b) {
  using T = typename Mainloop::T;
  const cudaError_t error =
      encode_tensor_map<T>(map_a, a, Mainloop::kMnMajorA ? Mainloop::kTileK : Mainloop::kTileM);
  if (error != cudaSuccess) return error;
  return encode_tensor_map<T>(map_b, b, Mainloop::kPartB);
}

// Launches a __global__ function or a cudaKernel_t. programmatic: see launch_kernel of common/launch.cuh.
inline cudaError_t launch_clusters(const void* kernel, dim3 grid, dim3 cluster, int threads, int shared_bytes,
                                   bool programmatic, cudaStream_t stream, const void** arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = programmatic ? 2 : 1;
  return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
}

template <class... Parameters>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads,
                            int shared_bytes, bool programmatic, cudaStream_t stream,
                            const std::common_type_t<Parameters>&... args) {
  const void* arguments[] = {&args...};
  return launch_clusters(reinterpret_cast<const void*>(kernel), grid, cluster, threads, shared_bytes,
                         programmatic, stream, arguments);
}

inline int tiles_of(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

}  // namespace hopper
}  // namespace lltm_ext
