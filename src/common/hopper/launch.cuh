// Launches on Hopper: descriptions of matrices for the copy engine, grids of clusters.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

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

// The driver's functions want a context, which a thread that has called none of the runtime's lacks:
// autograd's, say, whose first call is ours.
inline cudaError_t bind_context() {
  thread_local const cudaError_t bound = [] {
    int device;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaSetDevice(device) : error;
  }();
  return bound;
}

template <>
inline constexpr CUtensorMapDataType kMapType<float> = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

// Boxes of 128 bytes of columns and `box_rows` rows.
template <typename T>
cudaError_t describe(CUtensorMap& map, const Layout& x, int box_rows) {
  EncodeTiled* const encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  if (const cudaError_t error = bind_context(); error != cudaSuccess) return error;
  const auto bytes = [](int64_t stride, int64_t size) -> cuuint64_t {
    return size == 1 ? 16 : stride * sizeof(T);  // a stride that nobody takes
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

// Once before launches of a kernel on the current device.
template <class F>
cudaError_t allow_shared(F* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// early: the kernel may begin before the one before it in the stream has ended, and waits for that itself.
template <class F, class... Args>
cudaError_t launch_clusters(F* kernel, dim3 grid, dim3 cluster, int threads, int shared_bytes, bool early,
                            cudaStream_t stream, const Args&... args) {
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
  config.numAttrs = early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

inline int tiles_of(int64_t size, int tile) { return static_cast<int>((size + tile - 1) / tile); }

}  // namespace hopper
}  // namespace lltm_ext
