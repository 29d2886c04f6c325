// What the Hopper kernels share around the mainloop: which tile of c a block computes, and how a block
// starts.
#pragma once

#include "common/hopper/launch.h"
#include "common/hopper/pipeline.cuh"
#include "common/math.h"

namespace lltm_ext {
namespace hopper {

struct TileIndex {
  int row, column, matrix;
};

// Tiles of a batch of matrices, `rows` x `columns` each. Bands of kBand tile rows are walked column by
// column, so that blocks that run at the same time share rows of a and columns of b in L2.
struct TileScheduler {
  static constexpr int kBand = 8;
  int rows, columns, batch;

  LLTM_HOST_DEVICE int64_t total() const { return int64_t{rows} * columns * batch; }

  LLTM_HOST_DEVICE TileIndex at(int64_t i) const {
    const int in_matrix = static_cast<int>(i % (int64_t{rows} * columns));
    const int band = in_matrix / (kBand * columns), first = band * kBand;
    const int height = rows - first < kBand ? rows - first : kBand, in_band = in_matrix - first * columns;
    return {first + in_band % height, in_band / height, static_cast<int>(i / (int64_t{rows} * columns))};
  }

  // The same, with the first row and column of c that the block of this rank computes. Ranks increase down
  // the columns of a cluster.
  template <class Mainloop>
  __device__ __forceinline__ TileIndex first_element(int64_t i, uint32_t rank) const {
    TileIndex tile = at(i);
    tile.row = (tile.row * Mainloop::kClusterM + rank % Mainloop::kClusterM) * Mainloop::kTileM;
    tile.column = (tile.column * Mainloop::kClusterN + rank / Mainloop::kClusterM) * Mainloop::kTileN;
    return tile;
  }
};

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
