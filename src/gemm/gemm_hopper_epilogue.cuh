// The epilogue of gemm on Hopper: bias, activation, rounding, and stores.
#pragma once

#include "common/fast_math.cuh"
#include "common/hopper/ptx.cuh"
#include "gemm/gemm.h"

namespace lltm_ext {
namespace hopper {

// c = activation(a @ b + bias), and where it goes.
template <typename T>
struct Epilogue {
  const T* bias;  // [n], or null
  int64_t bias_stride;
  T* c;               // [batch, m, n], contiguous
  T* pre_activation;  // as c, or null
  int m, n;
  Activation activation;

  __device__ __forceinline__ float bias_at(int column) const {
    return bias && column < n ? widen(bias[column * bias_stride]) : 0.f;
  }
  // Calls write(to) to store x before the activation, if wanted, and after it.
  template <int N, class Write>
  __device__ __forceinline__ void finish(float (&x)[N], const Write& write) const {
    if (pre_activation) write(pre_activation);
    activate<ActivationMath<T>>(activation, x);
    write(c);
  }
  __device__ __forceinline__ void write(T* to, int matrix, int row, int column, float x) const {
    if (row < m && column < n) to[(static_cast<int64_t>(matrix) * m + row) * n + column] = narrow<T>(x);
  }
};

__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Stores a warpgroup's accumulators [64, kN], in chunks of 64 columns through two buffers of shared memory.
// Of each 8 columns wgmma gives a thread two neighbours in row lane / 4, and the same two 8 rows below.
template <typename T, int kN>
class EpilogueStore {
  static constexpr int kBufferBytes = 64 * 64 * sizeof(T), kPerThread = (kN + 127) / 128;

 public:
  static constexpr int bytes(int warpgroups) {
    return warpgroups * static_cast<int>(2 * kBufferBytes + kN * sizeof(float));
  }

  // `shared`, aligned to 1,024 bytes: first the buffers of all warpgroups, then their biases.
  __device__ EpilogueStore(unsigned char* shared, int warpgroup, int warpgroups)
      : buffers_(shared + warpgroup * 2 * kBufferBytes),
        bias_(reinterpret_cast<float*>(shared + warpgroups * 2 * kBufferBytes) + warpgroup * kN),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % 128) {}

  // Loads the bias of the columns from `column`, during the mainloop.
  __device__ __forceinline__ void prefetch_bias(const Epilogue<T>& epilogue, int column) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) loaded_bias_[i] = epilogue.bias_at(column + i * 128 + thread_);
  }

  // Stores from (row, column) of a matrix on; by TMA, if there are tensor maps.
  __device__ __forceinline__ void run(float (&d)[kN / 2], const Epilogue<T>& epilogue, const CUtensorMap* c,
                                      const CUtensorMap* pre_activation, int row, int column, int matrix) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i * 128 + thread_ < kN) bias_[i * 128 + thread_] = loaded_bias_[i];
    }
    warpgroup_sync(warpgroup_);
    if (c && epilogue.activation <= Activation::kRelu) {
#pragma unroll
      for (int chunk = 0; chunk < kN / 64; ++chunk) {
        float x[32];
        add_bias(x, d, chunk);
        if (epilogue.pre_activation)
          store_chunk<true>(x, epilogue, epilogue.pre_activation, pre_activation, row, column + 64 * chunk,
                            matrix);
        if (epilogue.activation == Activation::kRelu) {
#pragma unroll
          for (int i = 0; i < 32; ++i) x[i] = relu(x[i]);
        }
        store_chunk<true>(x, epilogue, epilogue.c, c, row, column + 64 * chunk, matrix);
      }
      return;
    }
    // The rolled loop has the code of all activations and of rows of any length once, for both results.
    // Registers cannot be indexed, so a branch per chunk selects them.
    const int results = epilogue.pre_activation ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kN / 64 * results; ++i) {
      const int chunk = i / results;
      const bool last = i % results == results - 1;
      float x[32];
#pragma unroll
      for (int j = 0; j < kN / 64; ++j) {
        if (j == chunk) add_bias(x, d, j);
      }
      if (last) activate<ActivationMath<T>>(epilogue.activation, x);
      store_chunk<false>(x, epilogue, last ? epilogue.c : epilogue.pre_activation, last ? c : pre_activation,
                         row, column + 64 * chunk, matrix);
    }
  }

  // Waits until shared memory is free again.
  __device__ __forceinline__ void wait() const {
    if (thread_ == 0) tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ int column_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  // x: the accumulators of a chunk, plus their bias.
  __device__ __forceinline__ void add_bias(float (&x)[32], const float (&d)[kN / 2], int chunk) const {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float2 bias = *reinterpret_cast<const float2*>(bias_ + 64 * chunk + column_of(i));
      const float* const from = d + 32 * chunk + i;
      x[i] = from[0] + bias.x, x[i + 1] = from[1] + bias.y;
      x[i + 2] = from[2] + bias.x, x[i + 3] = from[3] + bias.y;
    }
  }

  // Stages a chunk in shared memory with TMA's 128-byte swizzle, then stores it.
  template <bool kByTma>
  __device__ __forceinline__ void store_chunk(const float (&x)[32], const Epilogue<T>& epilogue, T* to,
                                              const CUtensorMap* map, int row, int column, int matrix) {
    if (thread_ == 0) tma_store_wait_read<1>();
    warpgroup_sync(warpgroup_);
    unsigned char* buffer = buffers_ + buffer_ * kBufferBytes;
    buffer_ ^= 1;
    const int lane = thread_ % 32, line = thread_ / 32 * 16 + lane % 16;
    const uint32_t start = shared_address(buffer) + line * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = (2 * j + lane / 16) ^ (line % 8);
      stmatrix(start + piece * 16, pack(x[8 * j], x[8 * j + 1], T()), pack(x[8 * j + 2], x[8 * j + 3], T()),
               pack(x[8 * j + 4], x[8 * j + 5], T()), pack(x[8 * j + 6], x[8 * j + 7], T()));
    }
    if (kByTma || map) {
      fence_proxy_async();
      warpgroup_sync(warpgroup_);
      if (thread_ == 0) tma_store(map, column, row, matrix, buffer);
      return;
    }
    warpgroup_sync(warpgroup_);
    store_rows(buffer, epilogue, to, row, column, matrix);
  }

  // For row strides that are not a multiple of 16 bytes. A warp has every fourth row, a lane two neighbours.
  // If rows start between multiples of 4 bytes, a lane stores its second value with the next lane's first,
  // and the last lane stores both ends. All rows of a warp have the same pattern, so all are loaded before
  // the first is stored, and stores need no branch.
  __device__ __forceinline__ void store_rows(const unsigned char* buffer, const Epilogue<T>& epilogue, T* to,
                                             int row, int column, int matrix) const {
    constexpr int kWarps = 4, kRows = 64 / kWarps;  // per warp
    const int lane = thread_ % 32, warp = thread_ / 32, columns = epilogue.n - column;
    to += (static_cast<int64_t>(matrix) * epilogue.m + row + warp) * epilogue.n + column;
    const bool shifted = reinterpret_cast<uintptr_t>(to) % 4 != 0;
    const int first = 2 * lane + shifted, second = (first + 1) % 64;
    const bool both = first < second && second < columns, only_first = !both && first < columns,
               only_second = !both && second < columns;
    const int64_t row_stride = static_cast<int64_t>(kWarps) * epilogue.n;
    uint32_t pairs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = warp + i * kWarps, piece = (lane / 4) ^ (r % 8);
      pairs[i] = *reinterpret_cast<const uint32_t*>(buffer + r * 128 + piece * 16 + lane % 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t next = __shfl_sync(~0u, pairs[i], (lane + 1) % 32);
      if (shifted) pairs[i] = __funnelshift_r(pairs[i], next, 16);
    }
    uint16_t* bits = reinterpret_cast<uint16_t*>(to + first);
#pragma unroll
    for (int i = 0; i < kRows; ++i, bits += row_stride) {
      const bool inside = warp + i * kWarps < epilogue.m - row;
      if (inside && both) *reinterpret_cast<uint32_t*>(bits) = pairs[i];
      if (inside && only_first) bits[0] = static_cast<uint16_t>(pairs[i]);
      if (inside && only_second) bits[second - first] = static_cast<uint16_t>(pairs[i] >> 16);
    }
  }

  unsigned char* const buffers_;
  float* const bias_;
  const int warpgroup_, thread_;
  float loaded_bias_[kPerThread];
  int buffer_ = 0;
};

}  // namespace hopper
}  // namespace lltm_ext
