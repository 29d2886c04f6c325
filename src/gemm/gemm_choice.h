// Which kernel computes a product: the one with the least estimated time, one of ours or the library's.
//
// The estimate is a model of cycles and bytes: the launch, then rounds of tiles, as many at a time as the
// multiprocessors hold, then operands and results on the memory bus. A tile of c takes its slices of K one
// after the other. A slice takes what its multiply-adds take, what its bytes take from the L2 cache, and what
// a block waits for them; none hides all of the others, so their squares are added. The constants are fitted
// to times on an H200, in microseconds, of operands that come from memory: the library's to its fast
// products, because no model tells which are slow. See docs/design/gemm.md.
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

// The layout of an operand [rows, k] in memory.
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
  bool bfloat16;
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

// ---- Tiles, of ours and of the library

struct TileShape {
  int rows, columns, depth;  // depth: of a slice of K
  int blocks, cluster;       // blocks: that a multiprocessor holds; cluster: those that share columns of b
  double speed;              // multiply-adds of a multiprocessor in a microsecond
  double wait, end;          // microseconds: for the operands of a slice, and from the last slice to the end
  bool splits = true;        // whether blocks may split K
};

// A kind of kernel. Microseconds, and bytes in a microsecond.
struct Unit {
  double launch;                 // before the first tile and after the last
  double second;                 // the kernel that adds the sums of a split K
  double partial;                // from the L2 cache, in lines that are not whole cache lines
  double results;                // to memory
  double unaligned_results = 0;  // what rows between multiples of 16 bytes add, in parts
  double copy = 0;               // an element to shared memory, or a vector of four
  double shared = 0;             // a short line that all blocks read at once, for each of them
  double late = 0;               // a launch that waits for the end of the previous kernel
};

inline int64_t tiles_in(const Product& p, const TileShape& t) {
  return p.batch * ceil_div(p.m, t.rows * t.cluster) * ceil_div(p.n, t.columns) * t.cluster;
}

inline double time_of(const Product& p, const TileShape& t, const Unit& unit, int64_t splits,
                      const DeviceInfo& device) {
  constexpr double kMemory = 4.8e6;
  const int64_t places = device.cluster_multiprocessors[t.cluster], blocks = tiles_in(p, t) * splits;
  const auto slices = static_cast<double>(ceil_div(ceil_div(p.k, t.depth), splits));
  const auto rows = static_cast<double>(std::min<int64_t>(t.rows, p.m)),
             columns = static_cast<double>(std::min<int64_t>(t.columns, p.n));
  const auto copies = [](const Lines& x) { return x.aligned && !x.along_k ? 0.25 : 1; };
  const double work = t.depth * (static_cast<double>(t.rows) * t.columns / t.speed +
                                 unit.copy * (rows * copies(p.a) + columns * copies(p.b)));
  const auto read = [&](const Lines& x, int64_t extent, int tile) {  // microseconds, for each block at once
    const bool is_short = (x.along_k ? p.k : extent) * p.bytes < 128;
    const auto lines = static_cast<double>(x.along_k ? extent : std::min<int64_t>(t.depth, p.k));
    return (x.whole ? 0 : static_cast<double>(tile) * t.depth * p.bytes / unit.partial) +
           (is_short && extent <= tile ? unit.shared * lines : 0);
  };
  const double reads = read(p.a, p.m, t.rows) + read(p.b, p.n, t.columns);
  const auto round = [&](int64_t sharers) {  // blocks of a multiprocessor
    const auto at_once = static_cast<double>(std::min(blocks, places * sharers)),
               each = static_cast<double>(sharers);
    return slices * std::hypot(t.wait, work * each, at_once * reads) + t.end * each;
  };
  double time = static_cast<double>(blocks / (places * t.blocks)) * round(t.blocks);
  if (const int64_t last = ceil_div(blocks % (places * t.blocks), places); last > 0) time += round(last);
  if (blocks > places * t.blocks) time += unit.late;
  const double stores = p.results() * p.bytes * (p.has_aligned_rows() ? 1 : 1 + unit.unaligned_results);
  return unit.launch + t.end + time + p.operands * p.bytes / kMemory + stores / unit.results;
}

// Of partial sums that blocks leave in the workspace, and of the kernel that adds them.
inline double time_of_sums(const Product& p, int64_t splits, const Unit& unit) {
  constexpr double kSplit = 0.0023, kBytes = 8.22e5;
  const auto parts = static_cast<double>(splits);
  return splits == 1 ? 0 : unit.second + parts * (kSplit + p.results() * p.sum_bytes() / kBytes);
}

// The fastest number of splits: blocks that fill the multiprocessors once, twice, and so on.
inline Choice best_splits(const Product& p, Kernel kernel, int tile, const TileShape& t, const Unit& unit,
                          const DeviceInfo& device) {
  constexpr int64_t kMostRounds = 4;
  constexpr double kMostSumBytes = 64 << 20;  // in the workspace
  Choice best = {kernel, tile, 1, time_of(p, t, unit, 1, device)};
  const int64_t tiles = std::max<int64_t>(tiles_in(p, t), 1), slices = ceil_div(p.k, t.depth);
  const double parts = kMostSumBytes / std::max(p.results() * p.sum_bytes(), 1.0);
  const int64_t most = t.splits && parts >= 2 ? std::min(slices / 2, static_cast<int64_t>(parts)) : 1;
  for (int64_t filled = 1; filled <= kMostRounds * t.blocks; ++filled) {
    const int64_t splits = std::min(device.multiprocessors * filled / tiles, most);
    if (splits < 2) continue;
    const int64_t even = ceil_div(slices, ceil_div(slices, splits));  // as few as are as fast
    best.consider({kernel, tile, static_cast<int>(even),
                   time_of(p, t, unit, even, device) + time_of_sums(p, even, unit)});
  }
  return best;
}

// ---- Ours: short sums and small results, in all types

// A thread has `columns` elements of c, and `sharers` threads split K.
struct DirectShape {
  int columns, sharers, batch;  // batch: of K, loaded at once
  double wait[3];               // for a batch, in half types, float32 and float64
};
constexpr DirectShape kDirectShapes[] = {{4, 1, 4, {0.7, 0.32, 0.54}},
                                         {1, 1, 8, {0.47, 0.24, 0.34}},
                                         {1, 4, 8, {0.53, 0.72, 0.37}},
                                         {1, 32, 8, {0.63, 0.82, 0.45}},
                                         {1, 128, 8, {0.6, 0.35, 0.45}}};
constexpr int kDirectThreads = 128;  // of a block

// Chains of loads, batch after batch. Accesses of a warp take longer the more cache lines of 128 bytes they
// touch, and the more of those lines start in the same bank. Microseconds of a multiprocessor.
inline double time_of(const Product& p, const DirectShape& t, const DeviceInfo& device) {
  constexpr double kLaunch = 0.83, kAccess = 11.1e-4, kLine = 1.6e-4, kFarLine = 4.4e-4, kEnd = 0.0135;
  const double bank = 3.7e-6 * p.bytes * p.bytes;
  const int type = p.bytes / 4;
  const int64_t groups = ceil_div(p.n, t.columns), threads = p.batch * p.m * groups * t.sharers;
  const int64_t lanes = std::max(1, 32 / t.sharers), across = std::min(lanes, groups),
                down = std::min(lanes / std::max<int64_t>(across, 1), p.m);
  const int64_t k = std::min<int64_t>({t.sharers, 32, p.k});
  // A warp reads `part` of each of `count` lines in memory of `length` elements.
  const auto access = [&](int64_t count, int64_t length, int64_t part) {
    constexpr int64_t kLineBytes = 128;
    const int64_t pitch = length * p.bytes, span = part * p.bytes;
    const auto touched = [&](int64_t apart) {
      return std::max(1.0,
                      static_cast<double>(count * std::max(std::min(apart, kLineBytes), span)) / kLineBytes);
    };
    return kAccess + (t.sharers > 32 ? kFarLine : kLine) * touched(pitch) + bank * touched(pitch & -pitch);
  };
  const double of_a = p.a.along_k ? access(down, p.k, k) : access(k, p.m, down);
  const double of_b = p.b.along_k ? access(across, p.k * t.columns, k) : access(k, p.n, across * t.columns);
  const bool vector = !p.b.along_k && p.n % t.columns == 0;
  const double warps = static_cast<double>(ceil_div(threads, 32)) / device.multiprocessors;
  const int64_t length = ceil_div(p.k, t.sharers);
  return kLaunch + t.wait[type] * static_cast<double>(ceil_div(length, t.batch)) +
         warps * (static_cast<double>(length) * (of_a + of_b * (vector ? 1 : t.columns)) +
                  kEnd * (1 + t.columns));
}

// f is called with each way to compute the product. The estimate is of operands that stay in caches, so of
// matrices whose product is short.
template <class F>
void consider_direct(const Product& p, const DeviceInfo& device, const F& f) {
  constexpr double kLongest = 10;
  for (int i = 0; i < static_cast<int>(std::size(kDirectShapes)); ++i) {
    const DirectShape& t = kDirectShapes[i];
    const double tiles = p.results() / t.columns;
    const double time = time_of(p, t, device), most = kLongest * static_cast<double>(p.batch);
    const bool fits = tiles < UINT32_MAX / 2 && tiles * t.sharers < double{INT32_MAX} * kDirectThreads;
    if ((fits && time < most) || (i == 0 && p.k == 0)) f(Choice{Kernel::kDirect, i, 1, time});
  }
}

// ---- Ours: float32 on the FMA units

// For few rows, few tiles, and many.
constexpr TileShape kFfmaTiles[] = {{16, 128, 32, 3, 1, 1.47e5, 0.42, 0},
                                    {32, 64, 32, 1, 1, 1.74e5, 0, 0.11},
                                    {128, 64, 32, 1, 1, 2.53e5, 0.38, 1.46}};
constexpr int kFfmaShared[] = {58368, 79872, 76800};  // bytes of shared memory
constexpr Unit kFfma = {1.91, 1.05, kNever, 2.5e6, 0.58, 4.66e-5, 0, 2.05};

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
  constexpr double kStart = 1.6, kRound = 0.8, kReads = 4.4e6, kStores = 8.8e4, kStep = 6.9e-4;
  const auto rounds = static_cast<double>(ceil_div(tiles, places));
  const double read = p.operands * p.bytes / kReads, loop = kStep * static_cast<double>(p.k) * rounds;
  f(Choice{Kernel::kFewRows, 0, 1,
           kStart + kRound * (rounds - 1) + p.results() * p.bytes / kStores + std::max(read, loop)});
}

constexpr TileShape kHopperTiles[] = {{64, 64, 64, 1, 1, 4.06e6, 0.12, 0.61, false},
                                      {64, 128, 64, 1, 1, 4.06e6, 0.136, 0.78},
                                      {128, 128, 64, 1, 1, 4.06e6, 0, 0.99, false},
                                      {128, 192, 64, 1, 1, 4.06e6, 0, 1.25, false},
                                      {128, 256, 64, 1, 2, 4.06e6, 0, 1.59, false}};
constexpr Unit kWgmma = {0.5, 1.02, 12.4e6, 6.75e6, 2.44, 0, 0.42e-4};

// Of operands that TMA cannot address.
inline double time_of_copies(const Product& p, bool a, bool b) {
  const double elements = static_cast<double>(p.batch) * static_cast<double>(p.k) *
                          static_cast<double>((a ? p.m : 0) + (b ? p.n : 0));
  return a || b ? 1.4 + 0.49e-6 * elements * p.bytes : 0;
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
void consider_tiles(Product p, const DeviceInfo& device, const F& f) {
  constexpr double kUnalignedRows = 0.53;
  const double more =
      time_of_copies(p, !p.a.aligned, !p.b.aligned) + (p.has_aligned_rows() ? 0 : kUnalignedRows);
  p.a.whole |= !p.a.aligned, p.b.whole |= !p.b.aligned;  // their copies are
  for (int i = 0; i < static_cast<int>(std::size(kHopperTiles)); ++i) {
    TileShape t = kHopperTiles[i];
    t.splits = t.splits && p.batch == 1;
    Choice found = best_splits(p, Kernel::kHopper, i, t, kWgmma, device);
    found.time += more;
    f(found);
  }
}

// ---- The library

// It has tiles of many sizes, and kernels of another kind where lines do not start at multiples of 16 bytes.
struct LibraryKind {
  double speed, wait, end;  // of its tiles; end: of 1,000 elements
  Unit unit;
  double clearly;  // see clearly_faster: less, where its time is harder to estimate
};
constexpr LibraryKind kLibraryHalf = {4.06e6, 0.0097, 0.0087, {2.36, 3.42, kNever, 2.88e6}, 0.85},
                      kLibraryBfloat16Unaligned = {8.64e5, 0.081, 0, {3.36, 2.31, 4.31e6, 1.46e6}, 0.86},
                      kLibraryFloat16Unaligned = {8.96e5, 0.041, 0.118, {2.32, 3.71, 4.3e6, 4.8e6}, 0.79},
                      kLibraryTf32 = {2.03e6, 0.042, 0.053, {3.38, 1.59, kNever, 4.8e6}, 0.86},
                      kLibraryTf32Unaligned = {6.82e5, 0.076, 0.129, {2.87, 3.13, 12.6e6, 4.8e6}, 0.83},
                      kLibraryFloat = {2.27e5, 0.124, 0.0012, {2.54, 3.26, kNever, 2.75e6}, 0.81},
                      kLibraryDouble = {2.54e5, 0.032, 0.235, {1.91, 3.64, kNever, 4.8e6}, 0.8};

inline const LibraryKind& library_kind(const Product& p) {
  const bool aligned = p.a.aligned && p.b.aligned && p.has_aligned_rows();
  if (p.bytes == 8) return kLibraryDouble;
  if (p.bytes == 4 && !p.tf32) return kLibraryFloat;
  if (p.bytes == 4) return aligned ? kLibraryTf32 : kLibraryTf32Unaligned;
  if (aligned) return kLibraryHalf;
  return p.bfloat16 ? kLibraryBfloat16Unaligned : kLibraryFloat16Unaligned;
}

inline double time_of_library(const Product& p, const DeviceInfo& device) {
  constexpr double kPass = 1.5, kPassBytes = 4e6, kVector = 2.7, kVectorBytes = 2.8e6;
  constexpr double kSmallTiles = 0.78;  // in parts of the speed of others
  constexpr int64_t kMostSplits = 32;
  const LibraryKind& kind = library_kind(p);
  double best = kNever;
  for (const int rows : {32, 64, 128}) {
    for (const int columns : {rows, 2 * rows}) {
      const double speed = kind.speed * (rows < 128 ? kSmallTiles : 1),
                   end = kind.end * rows * columns / 1000;
      const TileShape t = {rows, columns, 8, 128 / rows, 1, speed, kind.wait, end};
      for (int64_t splits = 1; splits <= kMostSplits; splits += (splits + 1) / 2) {
        best = std::min(best, time_of(p, t, kind.unit, splits, device) + time_of_sums(p, splits, kind.unit));
      }
    }
  }
  // It has kernels for a matrix times a vector.
  if (std::min(p.m, p.n) == 1) best = kVector + p.operands * p.bytes / kVectorBytes;
  return best + p.library_passes * (kPass + 2 * p.results() * p.bytes / kPassBytes);
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

// The part of the library's time that ours may take to be chosen: all where the library needs a pass more.
// The estimates' errors are smallest if no tile is partial along N and K, and largest for a long K in half
// types, which the library splits in many ways.
inline double clearly_faster(const Product& p, const Choice& ours) {
  constexpr double kWholeTiles = 0.94, kLongHalf = 0.72;
  if (p.library_passes > 0) return 1;
  if (p.n % 128 == 0 && p.k % 128 == 0 && ours.splits == 1) return kWholeTiles;
  return p.bytes == 2 && p.k > 1024 ? kLongHalf : library_kind(p).clearly;
}

inline Choice choose(const Product& p, const DeviceInfo& device) {
  Choice best = {Kernel::kDirect, 0, 1, kNever};
  consider_ours(p, device, [&](const Choice& other) { best.consider(other); });
  if (p.k == 0) return best;
  const double library = time_of_library(p, device);
  return best.time < clearly_faster(p, best) * library ? best : Choice{Kernel::kLibrary, 0, 1, library};
}

}  // namespace lltm_ext
