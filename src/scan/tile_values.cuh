// A tile's values of an operand: how they move between global and shared memory, and how they lie there.
#pragma once

#include "common/vec.cuh"
#include "scan/scan.h"

namespace lltm_ext {

// How a tile's values of an operand move between global and shared memory.
enum class TileMove : int8_t {
  kElements,         // each thread moves those of its own steps
  kChannelVectors,   // vectors of adjacent channels
  kElementsBySteps,  // as kElements, but they are replaced by results that move by steps
  kStepElements,     // adjacent steps are neighbours in memory: a warp moves successive ones
  kStepVectors,      // likewise, as vectors
};
// Whether the steps of a thread follow each other in a stage.
LLTM_HOST_DEVICE bool is_by_steps(TileMove move) { return move >= TileMove::kElementsBySteps; }
// Whether it holds the operand's own steps, also where a step reads that of another.
LLTM_HOST_DEVICE bool is_unshifted(TileMove move) { return move >= TileMove::kStepElements; }

struct TileMoves {
  TileMove a, b, h, result, grad_a;
};

template <typename E, class Scan>
TileMove tile_move_of(const Scan& scan, const ScanOperand<E>& x, int width) {
  if (!x.data) return TileMove::kElements;
  if (x.has_vectors(scan.channels, width)) return TileMove::kChannelVectors;
  const bool backward = x.step == -1;
  if (scan.channels.dims > 1 || scan.steps == 1 || !(x.step == 1 || backward)) return TileMove::kElements;
  constexpr int kVector = kVecWidth<E>;
  const bool has_vectors = scan.steps % kVector == 0 && x.strides[0] % kVector == 0 &&
                           is_vec_aligned(x.data - (backward ? kVector - 1 : 0));
  return has_vectors ? TileMove::kStepVectors : TileMove::kStepElements;
}
template <class Scan>
TileMoves tile_moves_of(const Scan& scan, const ScanPlan& plan) {
  const auto of = [&](const auto& x) { return tile_move_of(scan, x, plan.width); };
  const auto replaced_by = [](TileMove result, TileMove x) {
    return is_by_steps(result) && !is_by_steps(x) ? TileMove::kElementsBySteps : x;
  };
  TileMoves moves;
  moves.result = of(scan.result), moves.grad_a = of(scan.grad_a);
  moves.a = replaced_by(moves.grad_a, of(scan.a));
  moves.b = replaced_by(moves.result, of(scan.b));
  moves.h = of(scan.h);
  return moves;
}

// A tile's values of type E in a stage, kSteps a thread. By channels, the step k of all threads follows
// that of k - 1. By steps, the thread's steps follow each other, and 16 bytes are a vector; each thread has
// its vectors in an order of its own, so that the threads of a warp use all banks at once.
template <typename E, int kSteps>
struct TileValues {
  static constexpr int kVector = kVecWidth<E>, kVectors = kSteps / kVector;
  static constexpr int kOrders = kVectors < 8 ? kVectors : 8;  // 8 vectors are all banks
  E* data;
  int threads;
  bool by_steps, reversed;  // reversed: of a vector, later steps come first

  LLTM_HOST_DEVICE static int bytes(int threads) { return threads * kSteps * static_cast<int>(sizeof(E)); }

  __device__ __forceinline__ E* vector_at(unsigned thread, unsigned vector) const {
    return data + thread * kSteps + (vector ^ (thread * kVectors / 8 & (kOrders - 1))) * kVector;
  }
  __device__ __forceinline__ E& at(unsigned thread, unsigned k) const {
    if (!by_steps) return data[k * threads + thread];
    const unsigned i = k % kVector;
    return vector_at(thread, k / kVector)[reversed ? kVector - 1 - i : i];
  }
  // The steps k to k + kCount - 1 of a thread. k and kCount are multiples of kVector.
  template <int kCount>
  __device__ __forceinline__ void read(int thread, int k, E (&values)[kCount]) const {
    if (by_steps) {
#pragma unroll
      for (int v = 0; v < kCount; v += kVector) {
        const auto x = *reinterpret_cast<const Vec<E, kVector>*>(vector_at(thread, (k + v) / kVector));
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const E first = x.data[i], last = x.data[kVector - 1 - i];
          values[v + i] = reversed ? last : first;
        }
      }
    } else {
      const E* x = data + k * threads + thread;
#pragma unroll
      for (int i = 0; i < kCount; ++i, x += threads) values[i] = *x;
    }
  }
  // By steps.
  template <int kCount>
  __device__ __forceinline__ void write(int thread, int k, const E (&values)[kCount]) const {
#pragma unroll
    for (int v = 0; v < kCount; v += kVector) {
      Vec<E, kVector> x;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const E first = values[v + i], last = values[v + kVector - 1 - i];
        x.data[i] = reversed ? last : first;
      }
      *reinterpret_cast<Vec<E, kVector>*>(vector_at(thread, (k + v) / kVector)) = x;
    }
  }
};

}  // namespace lltm_ext
