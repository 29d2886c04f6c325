// What the Hopper kernels share around the mainloop: which tile of c a block computes, and how a block
// starts.
#pragma once

#include "common/hopper/launch.h"
#include "common/hopper/pipeline.cuh"
#include "common/math.h"
#include "gemm/gemm_tile_order.h"

namespace lltm_ext {
namespace hopper {

struct TileIndex {
  int row, column, matrix;
};

// The first row and column of c that the block of this rank computes of a cluster's tiles. Ranks increase
// down the columns of a cluster.
template <class Mainloop>
__device__ __forceinline__ TileIndex first_element(const TileOrder& order, int64_t i, uint32_t rank) {
  const TileOrder::Tile tile = order.at(i);
  const int row = static_cast<int>(tile.row), column = static_cast<int>(tile.column);
  return {(row * Mainloop::kClusterM + static_cast<int>(rank % Mainloop::kClusterM)) * Mainloop::kTileM,
          (column * Mainloop::kClusterN + static_cast<int>(rank / Mainloop::kClusterM)) * Mainloop::kTileN,
          static_cast<int>(tile.matrix)};
}

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread; two consumers fit

// By all threads of a cluster, before any of them uses the pipeline.
template <class Mainloop>
__device__ __forceinline__ void start_pipeline(Pipeline<Mainloop>& pipeline, const CUtensorMap* a,
                                               const CUtensorMap* b) {
  if (threadIdx.x == 0) {
    pipeline.init();
    prefetch_tensor_map(a);
    prefetch_tensor_map(b);
  }
  if constexpr (Mainloop::kClusterBlocks > 1) cluster_sync();
  __syncthreads();
}

template <class Mainloop>
__device__ __forceinline__ Pipeline<Mainloop> pipeline_of(unsigned char* stages, unsigned char* barriers) {
  return {stages, *reinterpret_cast<typename Pipeline<Mainloop>::Barriers*>(barriers)};
}

template <class Mainloop>
cudaError_t encode_operands(CUtensorMap& map_a, CUtensorMap& map_b, const GlobalTensor& a,
                            const GlobalTensor& b) {
  using T = typename Mainloop::T;
  const cudaError_t error = encode_tensor_map<T>(map_a, a, Mainloop::kPartA);
  if (error != cudaSuccess) return error;
  return encode_tensor_map<T>(map_b, b, Mainloop::kPartB);
}

}  // namespace hopper
}  // namespace lltm_ext
