// A warp's product of the recurrent weight and the state.
//
// A warp holds 16 rows of the weight in registers and multiplies them by the states of 8 rows of the batch.
// K is divided into chunks of 64 bytes a row. Lane (g, t) = (lane / 4, lane % 4) holds bytes [16 t, 16 t +
// 16) of a chunk of rows g and g + 8 of the weight and of row g of the state, each in one 16-byte access.
// This permutes K compared with mma.sync's layout, in both operands alike.
//
// The result has mma.sync's accumulator layout: lane (g, t) has
//   {row g, batch 2t}, {row g, batch 2t + 1}, {row g + 8, batch 2t}, {row g + 8, batch 2t + 1}.
#pragma once

#include "common/ptx.cuh"
#include "common/types.h"
#include "recurrence/persistent/shape.h"

namespace lltm_ext {

// Rows g and g + 8 of one chunk of the weight.
struct WeightChunk {
  uint4 upper, lower;
};

// bfloat16 on tensor cores: exact products, accumulated in float32.
struct Bfloat16Product {
  using Type = __nv_bfloat16;
  static constexpr bool kRoundsWeights = false;
  __device__ static void multiply(float (&sum)[4], const WeightChunk& w, const uint4& x) {
    mma_m16n8k16_bf16(sum, w.upper.x, w.lower.x, w.upper.y, w.lower.y, x.x, x.y);
    mma_m16n8k16_bf16(sum, w.upper.z, w.lower.z, w.upper.w, w.lower.w, x.z, x.w);
  }
};

struct Float16Product {
  using Type = __half;
  static constexpr bool kRoundsWeights = false;
  __device__ static void multiply(float (&sum)[4], const WeightChunk& w, const uint4& x) {
    mma_m16n8k16_f16(sum, w.upper.x, w.lower.x, w.upper.y, w.lower.y, x.x, x.y);
    mma_m16n8k16_f16(sum, w.upper.z, w.lower.z, w.upper.w, w.lower.w, x.z, x.w);
  }
};

// float32 on tensor cores, rounded to TF32 first: the tensor cores themselves truncate.
struct Tf32Product {
  using Type = float;
  static constexpr bool kRoundsWeights = true;
  __device__ static uint4 round(const uint4& x) {
    return make_uint4(round(x.x), round(x.y), round(x.z), round(x.w));
  }
  __device__ static void multiply(float (&sum)[4], const WeightChunk& w, const uint4& x) {
    const uint4 b = round(x);
    mma_m16n8k8_tf32(sum, w.upper.x, w.lower.x, w.upper.y, w.lower.y, b.x, b.y);
    mma_m16n8k8_tf32(sum, w.upper.z, w.lower.z, w.upper.w, w.lower.w, b.z, b.w);
  }

 private:
  __device__ static unsigned round(unsigned x) { return cvt_rna_tf32(__uint_as_float(x)); }
};

// IEEE float32, by fused multiply-adds.
struct IeeeProduct {
  using Type = float;
  static constexpr bool kRoundsWeights = false;
};

template <typename T>
struct ProductOf;
template <>
struct ProductOf<float> {
  using type = IeeeProduct;
};
template <>
struct ProductOf<__half> {
  using type = Float16Product;
};
template <>
struct ProductOf<__nv_bfloat16> {
  using type = Bfloat16Product;
};

// A warp's rows of the weights of kCount gates, the first kInRegisters in registers and the others in shared
// memory.
template <int kCount, int kChunks, int kInRegisters>
struct WarpWeights {
  WeightChunk registers[kInRegisters][kChunks];
  uint4* shared;

  __device__ explicit WarpWeights(float* memory)
      : shared(reinterpret_cast<uint4*>(memory) + threadIdx.x % 32) {}

  __device__ __forceinline__ void set(int gate, int c, const WeightChunk& w) {
    if (gate < kInRegisters) {
      registers[gate][c] = w;
    } else {
      uint4* at = shared + ((gate - kInRegisters) * kChunks + c) * 64;
      at[0] = w.upper;
      at[32] = w.lower;
    }
  }
  __device__ __forceinline__ WeightChunk get(int gate, int c) const {
    if (gate < kInRegisters) return registers[gate][c];
    const uint4* at = shared + ((gate - kInRegisters) * kChunks + c) * 64;
    return {at[0], at[32]};
  }
};

// sums[i] += weights[first + i * kIn + j] @ x[j] over all j < kIn, by a warp. `scratch` is shared memory of
// this warp, as large as PersistentShape says.
template <class Product, int kOut, int kIn, int kChunks>
struct WarpProduct {
  template <class Weights>
  __device__ static __forceinline__ void multiply(float (&sums)[kOut][4], const Weights& weights, int first,
                                                  const uint4 (&x)[kIn][kChunks], float*, int) {
    // Independent accumulators, so that products don't wait for each other.
    float accumulators[kOut * kIn][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kOut * kIn; ++i)
        Product::multiply(accumulators[i], weights.get(first + i, c), x[i % kIn][c]);
    }
#pragma unroll
    for (int i = 0; i < kOut * kIn; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[i / kIn][r] += accumulators[i][r];
    }
  }
};

// Lane (g, t) sums over its quarter of K for all rows of the batch, which it reads from `scratch`. Then the
// four lanes of a row exchange their sums. Groups of few rows are common, so they do not compute all.
template <int kOut, int kIn, int kChunks>
struct WarpProduct<IeeeProduct, kOut, kIn, kChunks> {
  static constexpr int kStride = scratch_stride(kIn * kChunks);

  template <class Weights>
  __device__ static __forceinline__ void multiply(float (&sums)[kOut][4], const Weights& weights, int first,
                                                  const uint4 (&x)[kIn][kChunks], float* scratch, int rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kIn * kChunks; ++i) {
      *reinterpret_cast<uint4*>(scratch + g * kStride + i * 16 + t * 4) = x[i / kChunks][i % kChunks];
    }
    __syncwarp();
    if (rows == 1) {
      multiply_rows<1>(sums, weights, first, scratch, t);
    } else if (rows == 2) {
      multiply_rows<2>(sums, weights, first, scratch, t);
    } else if (rows <= 4) {
      multiply_rows<4>(sums, weights, first, scratch, t);
    } else {
      multiply_rows<kRowTile>(sums, weights, first, scratch, t);
    }
    __syncwarp();
  }

 private:
  template <int kRows, class Weights>
  __device__ static __forceinline__ void multiply_rows(float (&sums)[kOut][4], const Weights& weights,
                                                       int first, const float* scratch, int t) {
#pragma unroll
    for (int out = 0; out < kOut; ++out) {
      float wide[2][kRows] = {};
#pragma unroll
      for (int i = 0; i < kIn * kChunks; ++i) {
        const WeightChunk w = weights.get(first + out * kIn + i / kChunks, i % kChunks);
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
          const float4 h = *reinterpret_cast<const float4*>(scratch + b * kStride + i * 16 + t * 4);
          add_products(wide[0][b], w.upper, h);
          add_products(wide[1][b], w.lower, h);
        }
      }
      exchange(sums[out], wide, t);
    }
  }

  __device__ static void add_products(float& sum, const uint4& w, const float4& h) {
    sum = fmaf(__uint_as_float(w.x), h.x, sum);
    sum = fmaf(__uint_as_float(w.y), h.y, sum);
    sum = fmaf(__uint_as_float(w.z), h.z, sum);
    sum = fmaf(__uint_as_float(w.w), h.w, sum);
  }

  // Leaves each lane with the total sums of batch rows 2t and 2t + 1.
  __device__ static void exchange(float (&sum)[4], const float (&wide)[2][kRowTile], int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float half[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float keep = t < 2 ? wide[r][b] : wide[r][b + 4], give = t < 2 ? wide[r][b + 4] : wide[r][b];
        half[b] = keep + __shfl_xor_sync(~0u, give, 2);
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float keep = t % 2 ? half[b + 2] : half[b], give = t % 2 ? half[b] : half[b + 2];
        sum[2 * r + b] += keep + __shfl_xor_sync(~0u, give, 1);
      }
    }
  }
  // As above. For few rows this is less code, though each lane adds up all of them.
  template <int kRows>
  __device__ static void exchange(float (&sum)[4], const float (&wide)[2][kRows], int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int b = 0; b < kRows; ++b) {
        const float half = wide[r][b] + __shfl_xor_sync(~0u, wide[r][b], 2);
        const float total = half + __shfl_xor_sync(~0u, half, 1);
        if (b / 2 == t) sum[2 * r + b % 2] += total;
      }
    }
  }
};

}  // namespace lltm_ext
