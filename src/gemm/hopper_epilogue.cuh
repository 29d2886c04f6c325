// The way of results out of a block on Hopper: bias, activation, rounding, and stores.
#pragma once

#include "common/activations.cuh"
#include "common/hopper/ptx.cuh"
#include "gemm/gemm.h"

namespace lltm_ext {
namespace hopper {

// What happens to c = a @ b, and where it goes.
template <typename T>
struct Epilogue {
  const T* bias;  // [N], or null
  int64_t bias_stride;
  T* c;       // [batch, M, N], contiguous
  T* before;  // the same before the activation, or null
  int m, n;
  Activation activation;

  __device__ __forceinline__ float bias_at(int column) const {
    return bias && column < n ? widen(bias[column * bias_stride]) : 0.f;
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

// A warpgroup's products [64, kN]. Of each 8 columns a thread has two neighbours in row lane / 4, then the
// same two in the row 8 below. They leave in chunks of 64 columns through two buffers of shared memory.
template <typename T, int kN>
class Store {
  static constexpr int kBufferBytes = 64 * 64 * sizeof(T), kOfThread = (kN + 127) / 128;

 public:
  static constexpr int bytes(int warpgroups) {
    return warpgroups * static_cast<int>(2 * kBufferBytes + kN * sizeof(float));
  }

  // `shared` begins at a multiple of 1,024 bytes: first the buffers of all warpgroups, then their biases.
  __device__ Store(unsigned char* shared, int warpgroup, int warpgroups)
      : buffers_(shared + warpgroup * 2 * kBufferBytes),
        bias_(reinterpret_cast<float*>(shared + warpgroups * 2 * kBufferBytes) + warpgroup * kN),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % 128) {}

  // The bias of the columns from `column`, on its way while the products are.
  __device__ __forceinline__ void fetch_bias(const Epilogue<T>& epilogue, int column) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) coming_[i] = epilogue.bias_at(column + i * 128 + thread_);
  }

  // To rows from `row` and columns from `column` of a matrix: by the copy engine, if there are maps for it.
  __device__ __forceinline__ void run(float (&d)[kN / 2], const Epilogue<T>& epilogue, const CUtensorMap* c,
                                      const CUtensorMap* before, int row, int column, int matrix) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (i * 128 + thread_ < kN) bias_[i * 128 + thread_] = coming_[i];
    }
    warpgroup_sync(warpgroup_);
    if (c && epilogue.activation <= Activation::kRelu) {
#pragma unroll
      for (int chunk = 0; chunk < kN / 64; ++chunk) {
        float x[32];
        take(x, d, chunk);
        if (epilogue.before)
          put<true>(x, epilogue, epilogue.before, before, row, column + 64 * chunk, matrix);
        if (epilogue.activation == Activation::kRelu) {
#pragma unroll
          for (int i = 0; i < 32; ++i) x[i] = relu(x[i]);
        }
        put<true>(x, epilogue, epilogue.c, c, row, column + 64 * chunk, matrix);
      }
      return;
    }
    // The code of all activations and of rows of any length, once, for what goes before them too. A branch
    // for each chunk finds its registers, which have no index.
    const int turns = epilogue.before ? 2 : 1;  // of a chunk
#pragma unroll 1
    for (int i = 0; i < kN / 64 * turns; ++i) {
      const int chunk = i / turns;
      const bool last = i % turns == turns - 1;
      float x[32];
#pragma unroll
      for (int j = 0; j < kN / 64; ++j) {
        if (j == chunk) take(x, d, j);
      }
      if (last) activate<ActivationMath<T>>(epilogue.activation, x);
      put<false>(x, epilogue, last ? epilogue.c : epilogue.before, last ? c : before, row,
                 column + 64 * chunk, matrix);
    }
  }

  // Until shared memory is free again.
  __device__ __forceinline__ void end() const {
    if (thread_ == 0) copies_out_read<0>();
  }

 private:
  __device__ __forceinline__ int column_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  // x: the products of a chunk, with their bias.
  __device__ __forceinline__ void take(float (&x)[32], const float (&d)[kN / 2], int chunk) const {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float2 bias = *reinterpret_cast<const float2*>(bias_ + 64 * chunk + column_of(i));
      const float* const from = d + 32 * chunk + i;
      x[i] = from[0] + bias.x, x[i + 1] = from[1] + bias.y;
      x[i + 2] = from[2] + bias.x, x[i + 3] = from[3] + bias.y;
    }
  }

  // Through shared memory, in lines of 128 bytes as the copy engine's exchange has them.
  template <bool kByEngine>
  __device__ __forceinline__ void put(const float (&x)[32], const Epilogue<T>& epilogue, T* to,
                                      const CUtensorMap* map, int row, int column, int matrix) {
    if (thread_ == 0) copies_out_read<1>();
    warpgroup_sync(warpgroup_);
    unsigned char* buffer = buffers_ + turn_ * kBufferBytes;
    turn_ ^= 1;
    const int lane = thread_ % 32, line = thread_ / 32 * 16 + lane % 16;
    const uint32_t start = shared_address(buffer) + line * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = (2 * j + lane / 16) ^ (line % 8);
      store_matrices(start + piece * 16, pack(x[8 * j], x[8 * j + 1], T()),
                     pack(x[8 * j + 2], x[8 * j + 3], T()), pack(x[8 * j + 4], x[8 * j + 5], T()),
                     pack(x[8 * j + 6], x[8 * j + 7], T()));
    }
    if (kByEngine || map) {
      shared_stores_to_copies();
      warpgroup_sync(warpgroup_);
      if (thread_ == 0) copy_out(map, column, row, matrix, buffer);
      return;
    }
    warpgroup_sync(warpgroup_);
    put_rows(buffer, epilogue, to, row, column, matrix);
  }

  // Rows that are not a multiple of 16 bytes apart: a warp has every fourth, a lane two neighbours. Where the
  // rows begin between multiples of 4 bytes, all of the warp's do: there a lane has its second value and the
  // next lane's first, the last lane the two ends. Which of them it stores is the same in all rows, so that
  // none waits for another: all are read before the first is stored, and no store stands in a branch.
  __device__ __forceinline__ void put_rows(const unsigned char* buffer, const Epilogue<T>& epilogue, T* to,
                                           int row, int column, int matrix) const {
    constexpr int kWarps = 4, kRows = 64 / kWarps;  // of a warp
    const int lane = thread_ % 32, warp = thread_ / 32, columns = epilogue.n - column;
    to += (static_cast<int64_t>(matrix) * epilogue.m + row + warp) * epilogue.n + column;
    const bool shifted = reinterpret_cast<uintptr_t>(to) % 4 != 0;
    const int first = 2 * lane + shifted, second = (first + 1) % 64;
    const bool both = first < second && second < columns, first_alone = !both && first < columns,
               second_alone = !both && second < columns;
    const int64_t apart = static_cast<int64_t>(kWarps) * epilogue.n;
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
    for (int i = 0; i < kRows; ++i, bits += apart) {
      const bool inside = warp + i * kWarps < epilogue.m - row;
      if (inside && both) *reinterpret_cast<uint32_t*>(bits) = pairs[i];
      if (inside && first_alone) bits[0] = static_cast<uint16_t>(pairs[i]);
      if (inside && second_alone) bits[second - first] = static_cast<uint16_t>(pairs[i] >> 16);
    }
  }

  unsigned char* const buffers_;
  float* const bias_;
  const int warpgroup_, thread_;
  float coming_[kOfThread];
  int turn_ = 0;  // of the buffers
};

}  // namespace hopper
}  // namespace lltm_ext
