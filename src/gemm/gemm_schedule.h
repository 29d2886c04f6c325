// Which kernel computes a product, with which tile of c a block, and how many blocks split K: the choice with
// the least estimated time. The constants are microseconds on an H200, fitted to random sizes with splits of
// all kinds (docs/design/gemm.md). They are not fitted to other GPUs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/device.h"
#include "common/portable.h"

namespace lltm_ext {

struct GemmSizes {
  int64_t batch, m, n, k;
  int bytes, sum_bytes;       // of an element, and of a partial sum
  double operands;            // elements of a and b
  bool a_along_k, b_along_k;  // whether neighbours in memory are neighbours along K
  int width;                  // how many elements of both operands' lines can be copied at once
};

// A kernel's tile, whose blocks copy slices of K to shared memory.
struct TileCost {
  int rows, columns, depth;   // depth: of a slice
  int blocks;                 // that a multiprocessor runs at once
  double wait, work;          // for a slice: what a block waits, and what a multiprocessor computes per block
  double ends;                // a block's launch, first slice and epilogue
  double store;               // more for each further block of a multiprocessor
  double pieces = 1;          // by how much these take longer if copies are of 4 or 8 bytes
  double latency = 0;         // more wait for a slice if copies are of 2 bytes, through registers
  bool in_clusters = false;   // whether there is a kernel for Hopper whose clusters split K
  bool batches_only = false;  // for many small matrices
};

// A thread's tile in the kernel without shared memory (gemm_direct.cuh).
struct DirectCost {
  int rows, columns, sharers, batch;  // batch: of K, loaded at once
  double ends, wait, work, store;     // for 10^5 memory accesses of warps, and 10^6 bytes of c
};

// A block's tile in the kernel that keeps all K in shared memory (gemm_outer.cuh).
struct OuterCost {
  int rows, columns, most_k;
  double ends, depth;  // depth: for each k
  double work, store;  // for 10^9 multiply-adds, and 10^6 bytes of c
};

struct Schedule {
  int tile;    // its place among the tiles, then the direct ones, then the outer ones
  int splits;  // of K
  double time;
  bool programmatic;        // whether its blocks may start while the previous kernel still runs
  bool in_cluster = false;  // whether the blocks that split K are a cluster, which adds their sums
};

constexpr int kHopper = 90;                           // compute capability
constexpr int64_t kMostRounds = 6;                    // of blocks that split K
constexpr int64_t kMostSumBytes = int64_t{64} << 20;  // of partial sums in the workspace

// Operands come from memory, not from the L2 cache, as the weights of a model do.
constexpr double kMemory = 0.25;  // for 10^6 bytes
inline double time_of_operands(const GemmSizes& sizes) {
  return kMemory * sizes.operands * sizes.bytes / 1e6;
}
inline double time_of_result(const GemmSizes& sizes) {
  return kMemory * static_cast<double>(sizes.batch * sizes.m * sizes.n) * sizes.bytes / 1e6;
}

// Of writing partial sums, and of the kernel that adds them; or of adding them in a cluster.
inline double time_of_sums(const GemmSizes& sizes, int64_t splits, bool in_cluster = false) {
  constexpr double kSecondKernel = 1.2, kBytesPerMicrosecond = 5e6, kInCluster = 1.15;
  if (splits == 1) return 0;
  if (in_cluster) return kInCluster;
  const double bytes = static_cast<double>(sizes.batch * sizes.m * sizes.n * splits) * sizes.sum_bytes;
  return kSecondKernel + 2 * bytes / kBytesPerMicrosecond;
}

// The time of a product whose tiles are multiplied in `splits` parts each.
inline double time_of(const GemmSizes& sizes, const TileCost& cost, int64_t tiles, int64_t splits,
                      bool in_cluster, const DeviceInfo& device) {
  constexpr double kLaunch = 1.5;
  const int multiprocessors = in_cluster ? device.cluster_multiprocessors[splits] : device.multiprocessors;
  const int64_t slices = ceil_div(ceil_div(sizes.k, cost.depth), splits);
  const int copied = sizes.width * sizes.bytes;  // at once
  const double slower = copied == 16 || copied < 4 ? 1 : cost.pieces;
  const int64_t at_once = int64_t{multiprocessors} * cost.blocks, blocks = tiles * splits;
  const double wait = slower * cost.wait + (copied < 4 ? cost.latency : 0);
  // Of a multiprocessor. Neither hides all of the other, so their squares are added.
  const auto multiply = [&](int64_t blocks) {
    return static_cast<double>(slices) * std::hypot(wait, slower * cost.work * static_cast<double>(blocks));
  };
  const auto start_and_end = [&](int64_t blocks) {
    return slower * cost.ends - kLaunch + cost.store * static_cast<double>(blocks - 1);
  };
  const auto full = static_cast<double>(blocks / at_once);
  double products = full * multiply(cost.blocks), rest = full * start_and_end(cost.blocks);
  if (const int64_t last = ceil_div(blocks % at_once, multiprocessors); last > 0) {
    products += multiply(last);
    rest += start_and_end(last);
  }
  return kLaunch + std::hypot(products, time_of_operands(sizes)) + rest + time_of_result(sizes) +
         time_of_sums(sizes, splits, in_cluster);
}

// Memory accesses are counted in warps, and each counts more the more sectors of 32 bytes it touches.
inline double time_of(const GemmSizes& sizes, const DirectCost& cost, int64_t splits) {
  const auto sectors = [&](int64_t lanes, bool adjacent) {
    return adjacent ? std::max(1.0, static_cast<double>(lanes * sizes.bytes) / 32)
                    : static_cast<double>(lanes);
  };
  const int64_t groups = ceil_div(sizes.n, cost.columns);
  const int64_t threads = sizes.batch * ceil_div(sizes.m, cost.rows) * groups * cost.sharers;
  const int64_t k = ceil_div(sizes.k, cost.sharers * splits), batches = ceil_div(k, cost.batch);
  const int64_t lanes = std::max(1, 32 / cost.sharers), across = std::min(lanes, groups),
                down = std::max<int64_t>(1, lanes / across);
  const bool vector = cost.columns > 1 && !sizes.b_along_k && sizes.n % cost.columns == 0;
  const bool lines_in_a_sector = sizes.b_along_k && sizes.k * sizes.bytes <= 32;
  double of_a = static_cast<double>(down),
         of_b = sectors(across * (vector ? cost.columns : 1), !sizes.b_along_k || lines_in_a_sector);
  if (cost.sharers > 1) {
    of_a *= sectors(std::min(cost.sharers, 32), sizes.a_along_k);
    of_b = static_cast<double>(across) * sectors(std::min(cost.sharers, 32), sizes.b_along_k);
  }
  const double accesses =
      static_cast<double>(k) * (cost.rows * (1 + of_a / 8) + (vector ? 1 : cost.columns) * (1 + of_b / 8));
  const double warps = static_cast<double>(ceil_div(threads, 32) * splits);
  // Threads store half types no faster than float32.
  const double result =
      static_cast<double>(sizes.batch * sizes.m * sizes.n * std::max<int64_t>(sizes.bytes, sizeof(float)));
  return cost.ends + cost.wait * static_cast<double>(batches) + cost.work * warps * accesses / 1e5 +
         cost.store * result / 1e6 + time_of_sums(sizes, splits);
}

inline double time_of(const GemmSizes& sizes, const OuterCost& cost, int64_t tiles) {
  const double multiply_adds = static_cast<double>(tiles * cost.rows * cost.columns * sizes.k);
  const double result = static_cast<double>(sizes.batch * sizes.m * sizes.n * sizes.bytes);
  return cost.ends + cost.depth * static_cast<double>(sizes.k) + cost.work * multiply_adds / 1e9 +
         time_of_operands(sizes) + cost.store * result / 1e6;
}

// With an early start (PDL), blocks start while the previous kernel still runs, wherever it leaves room. Some
// multiprocessors then get more blocks than others, which costs more than the early start gains if the blocks
// take long. In more than one round they would take the places of the previous kernel's last round. Where
// several share a multiprocessor, a product of 48 us took 63 even though they filled all places.
inline bool starts_early(const TileCost& cost, int64_t blocks, const DeviceInfo& device, double time) {
  constexpr double kLong = 10, kVeryLong = 30;
  const int multiprocessors = device.multiprocessors;
  const bool one_round = blocks <= int64_t{multiprocessors} * cost.blocks;
  const bool evenly = blocks > int64_t{multiprocessors} * (cost.blocks - 1);
  return one_round && (time < kLong || (evenly && (cost.blocks == 1 || time < kVeryLong)));
}

// A tile may be split so that its blocks fill the multiprocessors once, twice, and so on: several rounds of
// short blocks leave less of the last one idle than one of long blocks.
// slower: by how much tiles take longer than estimated.
inline Schedule best_schedule(const TileCost* tiles, int tile_count, double slower, const DirectCost* direct,
                              int direct_count, const OuterCost* outer, int outer_count,
                              const GemmSizes& sizes, const DeviceInfo& device) {
  const int multiprocessors = device.multiprocessors;
  constexpr int64_t kMostSplits = 512;
  Schedule best = {0, 1, -1, false};
  const auto consider = [&](const Schedule& schedule) {
    if (best.time < 0 || schedule.time < best.time) best = schedule;
  };
  const int64_t elements = sizes.batch * sizes.m * sizes.n, sum_bytes = elements * sizes.sum_bytes;
  for (int i = 0; i < tile_count; ++i) {
    const TileCost& cost = tiles[i];
    if (cost.batches_only && sizes.batch == 1) continue;
    const int64_t count = sizes.batch * ceil_div(sizes.m, cost.rows) * ceil_div(sizes.n, cost.columns);
    const int64_t slices = ceil_div(sizes.k, cost.depth);
    const int64_t most = std::min({slices, kMostSumBytes / std::max<int64_t>(sum_bytes, 1), kMostSplits});
    const auto consider_splits = [&](int64_t splits, bool in_cluster) {
      const double time = slower * time_of(sizes, cost, count, splits, in_cluster, device);
      const bool early = starts_early(cost, count * splits, device, time);
      consider({i, static_cast<int>(splits), time, early, in_cluster});
    };
    const auto as_few_as_are_as_fast = [&](int64_t splits) {
      return ceil_div(slices, ceil_div(slices, splits));
    };
    consider_splits(1, false);
    for (int64_t filled = 1, before = 1; filled <= kMostRounds * cost.blocks && before < most; ++filled) {
      const int64_t splits = std::min(multiprocessors * filled / std::max<int64_t>(count, 1), most);
      if (splits > before) consider_splits(as_few_as_are_as_fast(splits), false);
      before = std::max(before, splits);
    }
    if (!cost.in_clusters || device.compute_capability != kHopper) continue;
    for (int64_t splits = 2; splits <= std::min<int64_t>(slices, kMostClusterBlocks); ++splits) {
      const bool at_once = count * splits <= int64_t{device.cluster_multiprocessors[splits]} * cost.blocks;
      if (at_once && as_few_as_are_as_fast(splits) == splits) consider_splits(splits, true);
    }
  }
  constexpr int64_t kMostDirectElements = int64_t{1} << 26;  // they fit a grid with 128 threads each
  for (int i = 0; i < direct_count && elements <= kMostDirectElements; ++i) {
    const int64_t most =
        std::min({sizes.k / direct[i].batch, kMostSumBytes / std::max<int64_t>(sum_bytes, 1), int64_t{64}});
    for (int64_t splits = 1; splits == 1 || splits <= most; splits *= 4) {
      if (splits > 1 && direct[i].sharers > 1) break;
      consider({tile_count + i, static_cast<int>(splits), time_of(sizes, direct[i], splits), true});
    }
  }
  for (int i = 0; i < outer_count; ++i) {
    const OuterCost& cost = outer[i];
    const int64_t count = sizes.batch * ceil_div(sizes.m, cost.rows) * ceil_div(sizes.n, cost.columns);
    if (sizes.k > cost.most_k || count > INT32_MAX) continue;
    consider({tile_count + direct_count + i, 1, time_of(sizes, cost, count),
              count <= int64_t{multiprocessors} * 2});
  }
  return best;
}

}  // namespace lltm_ext
