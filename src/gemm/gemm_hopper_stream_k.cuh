// Stream-K: the tiles of the last rounds, which would leave multiprocessors idle, are divided among all
// clusters by slices of K instead of by tiles.
//
// The slices of these tiles, one tile after the other, are cut into as many equal parts as there are
// clusters. A part begins and ends inside of tiles. The cluster that has a tile's last slice stores the tile.
// The others leave their sums in the workspace, and a binary tree, whose root is the last cluster, adds them:
// a cluster adds the sums of those before it by 1, 2, 4 ... clusters, until it leaves its own. So the order
// is fixed.
//
// A cluster takes its part from the end: first the tile that another one stores, last the one that it stores
// itself. It waits only for clusters before it that work on the same tile, and those have taken this tile
// first, so no wait closes a circle.
#pragma once

#include <atomic>
#include <random>

#include "common/hopper/ptx.cuh"
#include "common/portable.h"

namespace lltm_ext {
namespace hopper {

// A flag has the launch's token once its sums have been written, until they have been read. Tokens are random
// numbers of 64 bits, so that memory need not be cleared first; a graph's launches clear it for the next
// replay.
struct StreamK {
  int tiles = 0;  // the last ones of c, which are divided
  uint64_t token;
  uint64_t* flags;  // one for each warpgroup of each cluster
  float4* sums;     // likewise
};

// What the clusters need: `warpgroups` each, whose threads have `sums` accumulators.
struct StreamKShape {
  int64_t clusters;
  int warpgroups, sums;

  constexpr int64_t flag_bytes() const { return ceil_div(clusters * warpgroups, 2) * 16; }
  constexpr int64_t bytes() const { return flag_bytes() + clusters * warpgroups * sums * 128 * 4; }

  // Full rounds of tiles are not divided, except the last one before the incomplete round: a part then has at
  // least one tile's slices.
  constexpr int64_t divided(int64_t tiles) const {
    return tiles < 2 * clusters ? tiles : tiles % clusters + clusters;
  }
  StreamK arguments(int64_t tiles, void* workspace) const {
    static std::atomic<uint64_t> next = [] {
      std::random_device random;
      return uint64_t{random()} << 32 | random();
    }();
    constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;  // all multiples of it differ
    auto* const bytes = static_cast<char*>(workspace);
    return {static_cast<int>(divided(tiles)), next.fetch_add(kOdd), reinterpret_cast<uint64_t*>(bytes),
            reinterpret_cast<float4*>(bytes + flag_bytes())};
  }
};

// What a cluster computes, one after the other: slices [begin, end) of K of a tile. Registers are scarce, so
// what the kernel's arguments say is read from them.
template <bool kDivides>
class StreamKParts {
 public:
  int tile = 0, begin = 0, end = 0;

  __device__ __forceinline__ StreamKParts(const StreamK& stream_k, int tiles, int slices, int cluster,
                                          int clusters)
      : stream_k_(stream_k), tiles_(tiles), slices_(slices), clusters_(clusters), next_(cluster) {
    if constexpr (kDivides) {
      first_slice_ = first_slice_of(cluster), end_slice_ = first_slice_of(cluster + 1);
    }
  }

  __device__ __forceinline__ bool next() {
    const int whole = kDivides ? tiles_ - stream_k_.tiles : tiles_;
    if (next_ < whole) {
      tile = next_, begin = 0, end = slices_;
      next_ += clusters_;
      return true;
    }
    if (!kDivides || end_slice_ <= first_slice_) return false;
    const int divided_tile = (end_slice_ - 1) / slices_, tile_slice = divided_tile * slices_;
    tile = whole + divided_tile;
    end = end_slice_ - tile_slice;
    end_slice_ = max(first_slice_, tile_slice);
    begin = end_slice_ - tile_slice;
    return true;
  }

  // How many clusters after this one also have slices of the tile.
  __device__ __forceinline__ int clusters_after(int cluster) const {
    if (end == slices_) return 0;
    const int64_t tile_end = end_slice_ - begin + slices_;
    return static_cast<int>((tile_end * clusters_ - 1) / (int64_t{stream_k_.tiles} * slices_)) - cluster;
  }
  // Whether a cluster before this one also has slices of the tile.
  __device__ __forceinline__ bool is_shared_with(int cluster) const {
    return begin > 0 && first_slice_of(cluster + 1) > end_slice_ - begin;
  }

 private:
  __device__ __forceinline__ int first_slice_of(int cluster) const {
    return static_cast<int>(int64_t{stream_k_.tiles} * slices_ * cluster / clusters_);
  }

  const StreamK& stream_k_;
  const int tiles_, slices_, clusters_;
  int next_, first_slice_ = 0, end_slice_ = 0;
};

// A warpgroup's accumulators in the workspace.
template <int kCount>
class StreamKSums {
 public:
  __device__ StreamKSums(const StreamK& stream_k, int warpgroups, int warpgroup)
      : stream_k_(stream_k), warpgroups_(warpgroups), warpgroup_(warpgroup) {}

  // barrier: of this warpgroup.
  __device__ __forceinline__ void store(const float (&d)[kCount], int cluster, int barrier) const {
    float4* const to = sums_of(cluster);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      __stcg(to + i * 32, make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]));
    }
    warpgroup_sync(barrier);
    if (threadIdx.x % 128 == 0) st_release(flag_of(cluster), stream_k_.token);
  }

  __device__ __forceinline__ void add(float (&d)[kCount], int cluster, int barrier) const {
    if (threadIdx.x % 128 == 0) {
      uint64_t* const flag = flag_of(cluster);
      while (ld_acquire(flag) != stream_k_.token) {
      }
      *flag = 0;
    }
    warpgroup_sync(barrier);
    const float4* const from = sums_of(cluster);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 x = __ldcg(from + i * 32);
      d[i] += x.x, d[i + 1] += x.y, d[i + 2] += x.z, d[i + 3] += x.w;
    }
  }

 private:
  __device__ __forceinline__ int place(int cluster) const { return cluster * warpgroups_ + warpgroup_; }
  __device__ __forceinline__ uint64_t* flag_of(int cluster) const { return stream_k_.flags + place(cluster); }
  __device__ __forceinline__ float4* sums_of(int cluster) const {
    return stream_k_.sums + int64_t{place(cluster)} * kCount * 32 + threadIdx.x % 128;
  }

  const StreamK& stream_k_;
  const int warpgroups_, warpgroup_;
};

}  // namespace hopper
}  // namespace lltm_ext
