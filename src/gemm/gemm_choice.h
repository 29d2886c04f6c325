// Which kernel computes a product: the one with the least estimated time, one of ours or the library's.
//
// The estimate is a model of cycles and bytes. A tile of c takes its slices of K one after the other. A slice
// takes what its multiply-adds take, what its bytes take from the L2 cache, and what a block waits for them;
// none hides all of the others, so their squares are added. Tiles run in rounds, as many at a time as the
// multiprocessors hold. Operands cross the memory bus once, and so does c. Times are microseconds at an
// H200's clock, and operands come from memory, as the weights of a model do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "common/device.h"
#include "common/portable.h"

namespace lltm_ext {

enum class Kernel { kLibrary, kDirect, kFfma, kFewRows, kHopper, kBf16x6, kCpu };
constexpr const char* kKernelNames[] = {"library", "direct", "ffma", "few rows", "hopper", "bf16x6", "cpu"};

// How an operand [rows, k] lies in memory.
struct Lines {
  bool along_k;  // whether adjacent elements are neighbours along K
  bool aligned;  // whether lines of them start at multiples of 16 bytes
  bool whole;    // whether lines start at multiples of 128 bytes, a cache line
};

// A product as the estimate sees it.
struct Product {
  int64_t batch, m, n, k;
  int bytes;  // of an element
  bool tf32;  // float32 that may be rounded to TF32
  Lines a, b;
  double operands;  // elements of a and b
  // How often the library's result is read and written again, for what the library cannot add.
  int library_passes;

  int sum_bytes() const { return std::max(bytes, 4); }
  double results() const {
    return static_cast<double>(batch) * static_cast<double>(m) * static_cast<double>(n);
  }
  bool has_aligned_rows() const { return n * bytes % 16 == 0; }
};

struct Choice {
  Kernel kernel = Kernel::kLibrary;
  int tile = 0;    // its place in the kernel's list
  int splits = 1;  // of K
  double time = 0;

  void consider(const Choice& other) {
    if (other.time < time) *this = other;
  }
};

constexpr double kNever = 1e30;
constexpr double kMemory = 4e6, kL2 = 20e6;  // bytes in a microsecond

// ---- Tiles, of ours and of the library

struct TileShape {
  int rows, columns, depth;  // depth: of a slice of K
  int blocks = 1;            // that a multiprocessor holds
  int cluster = 1;           // blocks with different rows that share the columns of b
  double speed = 1;          // of the multiply-adds, in parts of the unit's
  double wait = 1;           // likewise: less with more stages
  bool splits = true;        // whether blocks may split K
};

// A kind of kernel.
struct Unit {
  double speed;   // multiply-adds of a multiprocessor in a microsecond
  double wait;    // for the operands of a slice
  double launch;  // before the first tile and after the last
  double ends;    // the first slice and the epilogue of a tile, for 1,000 elements
};

inline int64_t tiles_in(const Product& p, const TileShape& t) {
  return p.batch * ceil_div(p.m, t.rows * t.cluster) * ceil_div(p.n, t.columns) * t.cluster;
}

// Without the sums of a split K. by_lines: whether lines that are not whole cache lines take more of the L2
// cache's bandwidth.
inline double time_of(const Product& p, const TileShape& t, const Unit& unit, int64_t splits,
                      const DeviceInfo& device, bool by_lines = false) {
  constexpr double kOfPartialLines = 1.6;
  const int64_t places = device.cluster_multiprocessors[t.cluster], blocks = tiles_in(p, t) * splits;
  const auto slices = static_cast<double>(ceil_div(ceil_div(p.k, t.depth), splits));
  const auto traffic_of = [&](const Lines& x, double lines) {
    return lines * t.depth * p.bytes * (by_lines && x.aligned && !x.whole ? kOfPartialLines : 1);
  };
  const double elements = static_cast<double>(t.rows) * t.columns;
  const double work = elements * t.depth / (unit.speed * t.speed), ends = unit.ends * elements / 1000;
  const double bytes = traffic_of(p.a, t.rows) + traffic_of(p.b, static_cast<double>(t.columns) / t.cluster);
  const auto round = [&](int64_t sharers) {  // blocks of a multiprocessor
    const auto at_once = static_cast<double>(std::min(blocks, places * sharers)),
               each = static_cast<double>(sharers);
    return slices * std::hypot(unit.wait * t.wait, work * each, at_once * bytes / kL2) + ends * each;
  };
  double time = static_cast<double>(blocks / (places * t.blocks)) * round(t.blocks);
  if (const int64_t last = ceil_div(blocks % (places * t.blocks), places); last > 0) time += round(last);
  return unit.launch + ends + std::hypot(time, p.operands * p.bytes / kMemory) +
         p.results() * p.bytes / kMemory;
}

// Of partial sums that blocks leave in the workspace, and of the kernel that adds them.
inline double time_of_sums(const Product& p, int64_t splits) {
  constexpr double kSecondKernel = 1.3, kBytes = 2.5e6;
  return splits == 1 ? 0 : kSecondKernel + p.results() * static_cast<double>(splits) * p.sum_bytes() / kBytes;
}

// The fastest number of splits: blocks that fill the multiprocessors once, twice, and so on.
inline Choice best_splits(const Product& p, Kernel kernel, int tile, const TileShape& t, const Unit& unit,
                          const DeviceInfo& device, bool by_lines = false) {
  constexpr int64_t kMostRounds = 4;
  constexpr double kMostSumBytes = 64 << 20;  // in the workspace
  Choice best = {kernel, tile, 1, time_of(p, t, unit, 1, device, by_lines)};
  const int64_t tiles = std::max<int64_t>(tiles_in(p, t), 1), slices = ceil_div(p.k, t.depth);
  const double parts = kMostSumBytes / std::max(p.results() * p.sum_bytes(), 1.0);
  const int64_t most = t.splits && parts >= 2 ? std::min(slices / 2, static_cast<int64_t>(parts)) : 1;
  for (int64_t filled = 1; filled <= kMostRounds * t.blocks; ++filled) {
    const int64_t splits = std::min(device.multiprocessors * filled / tiles, most);
    if (splits < 2) continue;
    const int64_t even = ceil_div(slices, ceil_div(slices, splits));  // as few as are as fast
    best.consider({kernel, tile, static_cast<int>(even),
                   time_of(p, t, unit, even, device, by_lines) + time_of_sums(p, even)});
  }
  return best;
}

// ---- Ours: short sums and small results, in all types

// A thread has rows x columns of c, and `sharers` threads split K.
struct DirectShape {
  int rows, columns, sharers, batch;  // batch: of K, loaded at once
};
constexpr DirectShape kDirectShapes[] = {{4, 4, 1, 4}, {1, 4, 1, 4},  {1, 1, 1, 8},
                                         {1, 1, 4, 8}, {1, 1, 32, 8}, {1, 1, 128, 8}};
constexpr int kDirectThreads = 128;  // of a block

// A chain of loads, batch after batch. Accesses are counted in warps, and each counts more the more sectors
// of 32 bytes it touches. A thread's end takes as long as some accesses.
inline double time_of(const Product& p, const DirectShape& t, const DeviceInfo& device) {
  constexpr double kLaunch = 1, kWait = 0.75, kAccess = 7e-4, kEnd = 20, kOfResult = 10;
  const auto sectors = [&](int64_t lanes, bool adjacent) {
    return adjacent ? std::max(1.0, static_cast<double>(lanes * p.bytes) / 32) : static_cast<double>(lanes);
  };
  const int64_t groups = ceil_div(p.n, t.columns), k = ceil_div(p.k, t.sharers);
  const int64_t threads = p.batch * ceil_div(p.m, t.rows) * groups * t.sharers;
  const int64_t lanes = std::max(1, 32 / t.sharers), across = std::max<int64_t>(std::min(lanes, groups), 1);
  const bool vector = t.columns > 1 && !p.b.along_k && p.n % t.columns == 0;
  const bool lines_in_a_sector = p.b.along_k && p.k * p.bytes <= 32;
  auto of_a = static_cast<double>(std::max<int64_t>(1, lanes / across));
  double of_b = sectors(across * (vector ? t.columns : 1), !p.b.along_k || lines_in_a_sector);
  if (t.sharers > 1) {
    of_a *= sectors(std::min(t.sharers, 32), p.a.along_k);
    of_b = static_cast<double>(across) * sectors(std::min(t.sharers, 32), p.b.along_k);
  }
  const double loads = t.rows * (1 + of_a / 8) + (vector ? 1 : t.columns) * (1 + of_b / 8);
  const double end = kEnd + kOfResult * t.rows * t.columns * std::max(1, p.bytes / 4);
  const double warps = static_cast<double>(ceil_div(threads, 32)) / device.multiprocessors;
  return kLaunch + kWait * static_cast<double>(ceil_div(k, t.batch)) +
         kAccess * warps * (static_cast<double>(k) * loads + end);
}

// f is called with each way to compute the product.
template <class F>
void consider_direct(const Product& p, const DeviceInfo& device, const F& f) {
  for (int i = 0; i < static_cast<int>(std::size(kDirectShapes)); ++i) {
    const DirectShape& t = kDirectShapes[i];
    const double tiles = p.results() / (t.rows * t.columns);
    const bool fits = tiles < UINT32_MAX / 2 && tiles * t.sharers < double{INT32_MAX} * kDirectThreads;
    if (i == 0 || fits) f(Choice{Kernel::kDirect, i, 1, time_of(p, t, device)});
  }
}

// ---- Ours: float32 on the FMA units

// For few columns or none, few rows, many small matrices; the last two have a multiprocessor to themselves.
constexpr TileShape kFfmaTiles[] = {{64, 64, 16, 4, 1, 0.78},     {128, 32, 16, 5, 1, 0.74},
                                    {16, 128, 32, 3, 1, 0.5},     {32, 32, 16, 16, 1, 0.75, 1, false},
                                    {32, 64, 32, 1, 1, 0.9, 0.6}, {128, 64, 32, 1, 1, 0.9}};
constexpr int kFfmaShared[] = {26112, 32256, 58368, 9216, 79872, 76800};  // bytes of shared memory
constexpr Unit kFfma = {2.25e5, 0.5, 1.5, 0.2};

template <class F>
void consider_ffma(const Product& p, const DeviceInfo& device, const F& f) {
  for (int i = 0; i < static_cast<int>(std::size(kFfmaTiles)); ++i) {
    const bool fits = kFfmaShared[i] <= device.shared_bytes && tiles_in(p, kFfmaTiles[i]) <= INT32_MAX;
    if (fits) f(best_splits(p, Kernel::kFfma, i, kFfmaTiles[i], kFfma, device));
  }
}

// ---- Ours: half types

constexpr int kAmpere = 80, kHopperCapability = 90;  // compute capabilities

// A block has 16 columns of c, and reading the weights, b, takes the time. Always for up to 8 rows; for more
// if all blocks run at once and K is not so long that splitting it is faster.
template <class F>
void consider_few_rows(const Product& p, const DeviceInfo& device, const F& f) {
  const int64_t tiles = p.batch * ceil_div(p.n, 16), places = 2 * device.multiprocessors;
  const bool loads_vectors = p.a.along_k && p.b.along_k && p.a.aligned && p.b.aligned && p.k % 8 == 0;
  const bool one_round = tiles <= places && (tiles * 4 >= places || p.k <= 1024);
  const bool few = p.m <= 8 || (one_round && (p.m <= 16 || (p.m <= 32 && p.k <= 4096)));
  const bool fits = std::max({p.n, p.k, tiles}) <= INT32_MAX / 2;
  if (device.compute_capability < kAmpere || !loads_vectors || !few || !fits) return;
  const double read = p.operands * p.bytes / kMemory, loop = 5e-4 * static_cast<double>(p.k);
  const double rounds = static_cast<double>(tiles) / static_cast<double>(places);
  f(Choice{Kernel::kFewRows, 0, 1,
           1.6 + p.results() * p.bytes / 1e6 + std::max({read, loop, 1.45 * (rounds - 1)})});
}

constexpr TileShape kHopperTiles[] = {{64, 64, 64, 1, 1, 1, 1, false},
                                      {64, 128, 64},
                                      {128, 128, 64, 1, 1, 1, 1, false},
                                      {128, 192, 64, 1, 1, 1, 1, false},
                                      {128, 256, 64, 1, 2, 1, 1, false}};
constexpr Unit kWgmma = {3.75e6, 0.16, 1.2, 0.05};

// Of operands that TMA cannot address.
inline double time_of_copies(const Product& p, bool a, bool b) {
  const double elements = static_cast<double>(p.batch) * static_cast<double>(p.k) *
                          static_cast<double>((a ? p.m : 0) + (b ? p.n : 0));
  return a || b ? 0.85 + 0.65e-6 * elements * p.bytes : 0;
}

// Kernels count tiles, and chunks of 8 elements of a copied operand, in an int.
inline bool hopper_fits(const Product& p, const DeviceInfo& device) {
  constexpr double kMost = INT32_MAX / 2;
  const auto chunks = [&](int64_t rows) {
    return static_cast<double>(p.batch) *
           static_cast<double>(std::max(rows * ceil_div(p.k, 8), p.k * ceil_div(rows, 8)));
  };
  const double tiles = static_cast<double>(p.batch) * static_cast<double>(ceil_div(p.m, 16)) *
                       static_cast<double>(ceil_div(p.n, 16));
  return p.bytes == 2 && device.has_sm90a && std::max({p.m, p.n, p.k, p.batch}) <= INT32_MAX / 2 &&
         tiles < kMost && chunks(p.m) + chunks(p.n) < kMost;
}

template <class F>
void consider_tiles(const Product& p, const DeviceInfo& device, const F& f) {
  constexpr double kUnalignedRows = 0.4, kUnalignedResults = 0.17e-6;
  double more = time_of_copies(p, !p.a.aligned, !p.b.aligned);
  if (!p.has_aligned_rows()) more += kUnalignedRows + kUnalignedResults * p.results() * p.bytes;
  for (int i = 0; i < static_cast<int>(std::size(kHopperTiles)); ++i) {
    TileShape t = kHopperTiles[i];
    t.splits = t.splits && p.batch == 1;
    Choice found = best_splits(p, Kernel::kHopper, i, t, kWgmma, device, true);
    found.time += more;
    f(found);
  }
}

// ---- The library

// It has tiles of many sizes, and kernels of another kind where lines do not start at multiples of 16 bytes.
constexpr TileShape kLibraryTiles[] = {{64, 64, 8, 2}, {64, 128, 8, 2}, {128, 128, 8}, {128, 256, 8}};
constexpr Unit kLibraryHalf = {4e6, 0.005, 3, 0.02}, kLibraryHalfUnaligned = {0.75e6, 0.15, 3, 0.02},
               kLibraryTf32 = {1.5e6, 0.035, 3.8, 0.02}, kLibraryTf32Unaligned = {0.5e6, 0.27, 2.3, 0.02},
               kLibraryFloat = {2.1e5, 0.45, 2.8, 0.02}, kLibraryDouble = {2.25e5, 0.05, 2.8, 0.02};

inline double time_of_library(const Product& p, const DeviceInfo& device) {
  constexpr double kPass = 1.5;
  constexpr int64_t kMostSplits = 32;
  const bool aligned = p.a.aligned && p.b.aligned && p.has_aligned_rows();
  const Unit unit = p.bytes == 2   ? (aligned ? kLibraryHalf : kLibraryHalfUnaligned)
                    : p.bytes == 8 ? kLibraryDouble
                    : p.tf32       ? (aligned ? kLibraryTf32 : kLibraryTf32Unaligned)
                                   : kLibraryFloat;
  double best = kNever;
  for (const TileShape& t : kLibraryTiles) {
    for (int64_t splits = 1; splits <= kMostSplits; splits += (splits + 1) / 2) {
      best = std::min(best, time_of(p, t, unit, splits, device) + time_of_sums(p, splits));
    }
  }
  return best + p.library_passes * (kPass + 2 * p.results() * p.bytes / kMemory);
}

// ---- The choice

// Calls f with each of our ways to compute the product.
template <class F>
void consider_ours(const Product& p, const DeviceInfo& device, const F& f) {
  consider_direct(p, device, f);
  if (p.k == 0) return;
  if (p.bytes == 4) consider_ffma(p, device, f);
  if (p.bytes == 2) consider_few_rows(p, device, f);
  if (!hopper_fits(p, device)) return;
  consider_tiles(p, device, f);
}

// The errors of the estimates are some 20 %, and the library's kernels are the better ones where a product
// takes long: so ours has to be clearly faster there, less so if the library needs a pass more. Small
// products are ours unless the library is clearly faster.
inline Choice choose(const Product& p, const DeviceInfo& device) {
  constexpr double kClearly = 0.88, kWithPass = 0.95, kSmall = 0.55;
  Choice best = {Kernel::kDirect, 0, 1, kNever};
  consider_ours(p, device, [&](const Choice& other) { best.consider(other); });
  const double library = p.k > 0 ? time_of_library(p, device) : kNever;
  const double most = library * (p.library_passes > 0 ? kWithPass : kClearly) + kSmall;
  if (best.time > most) best = {Kernel::kLibrary, 0, 1, library};
  return best;
}

}  // namespace lltm_ext
