// Runs CUDA kernels on the CPU, so that they can be tested without a GPU.
//
// Every CUDA thread is a fiber: a stack of its own, on which <ucontext.h> starts it and longjmp continues
// it. All fibers of all blocks run in one thread of the process, in turn. A fiber runs until it waits for
// others: at a barrier, in an exchange with its warp, or after a poll of memory. So a kernel gives the same
// result every time.
//
// What is emulated: threadIdx and blockIdx, barriers of a block, of some of its warps, of a warp and of a
// cluster, shuffles, votes and atomicAdd, shared memory, also that of other blocks in the cluster. The
// headers in common/ replace those of src/common that contain PTX: mma.sync, wgmma, mbarriers, TMA's loads,
// st.async, relaxed accesses.
//
// What is not: the order in which memory accesses become visible, because every store is visible at once;
// races between threads that a GPU would run at the same time; bank conflicts, registers and speed; the
// approximate functions of fast_math.cuh. A kernel that passes here can still be wrong on a GPU.
//
// Nothing here needs the CUDA toolkit. The built-in types are defined below, with CUDA's names and layouts.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

// After the standard headers, because they use __noinline__ as an attribute.
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

// ---- vector types

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline int __double2hiint(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<int>(bits >> 32);
}

// ---- half types, rounded to nearest, ties to even

struct __half {
  uint16_t bits;

  __half() = default;
  explicit __half(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::abs(x);
    if (size != size) {
      bits = 0x7fff;
    } else if (size >= 65520) {
      bits = sign | 0x7c00;
    } else {
      // The spacing of float16 at this size. In units of it, the value is at most 2048.
      const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
      const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
      bits = sign | static_cast<uint16_t>(((exponent + 14) << 10) + units);
    }
  }
  explicit operator float() const {
    const unsigned sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (size & 0x3ff) << 13);
    const float x = __uint_as_float(size << 13) * 0x1p112f;
    return sign ? -x : x;
  }
};

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const unsigned of_float = __float_as_uint(x);
    bits = x != x ? 0x7fff : (of_float + 0x7fff + (of_float >> 16 & 1)) >> 16;
  }
  explicit operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};

struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float2 __half22float2(__half2 pair) {
  return {static_cast<float>(pair.x), static_cast<float>(pair.y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {static_cast<float>(pair.x), static_cast<float>(pair.y)};
}
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }

// ---- fibers

inline uint3 threadIdx, blockIdx;  // of the fiber that runs

namespace cuda_on_cpu {

constexpr int kWarpThreads = 32, kMaxWarps = 32, kNamedBarriers = 16;
constexpr size_t kStackBytes = 1 << 16;

[[noreturn]] inline void fail(const char* reason) {
  std::printf("%s\n", reason);
  std::fflush(stdout);
  std::_Exit(2);
}

struct Block;

struct Fiber {
  ucontext_t start;
  jmp_buf resume;  // switches without the system calls of swapcontext
  bool started = false;
  uint3 thread;
  Block* block;
  bool odd_exchange = false;  // which of the warp's slots it used last
};

// Some fibers wait here until all have come.
class Barrier {
 public:
  void wait(int fibers);

 private:
  std::vector<Fiber*> waiting_;
};

struct Warp {
  Barrier barrier;
  // What the lanes exchange. Two sets alternate: while a lane still reads one, others write the other.
  alignas(16) unsigned char slots[2][kWarpThreads][32];
};

// Shared memory is uninitialised on a GPU. Here it is NaN in every floating-point type.
struct alignas(128) SharedLine {
  static constexpr unsigned char kFill = 0xff;
  unsigned char bytes[128];
};

struct Block {
  uint3 index;
  int number;                      // in the grid
  std::vector<SharedLine> shared;  // ends with a line that no thread may write
  Barrier barriers[kNamedBarriers];
  Warp warps[kMaxWarps];
  bool any = false;  // of __syncthreads_or

  unsigned char* memory() { return shared.front().bytes; }
};

struct Grid {
  int blocks, block_threads, cluster_blocks;
  size_t shared_bytes;
  int blocks_y = 1;

  int all_blocks() const { return blocks * blocks_y; }
};

// The kernel that runs.
struct Launch {
  Grid grid;
  std::function<void()> kernel;
  std::vector<Block> blocks;
  std::vector<Barrier> clusters;
  std::vector<Fiber> fibers;
  std::deque<Fiber*> ready;
  Fiber* current = nullptr;
  ucontext_t caller;
  size_t done = 0, polls = 0;  // polls since a thread wrote for others or ended
};
inline Launch* launch;

inline Block& current_block() { return *launch->current->block; }
inline void note_progress() { launch->polls = 0; }

// Continues with a fiber that is ready, or ends the launch if none is.
inline void suspend() {
  Fiber* const from = launch->current;
  if (_setjmp(from->resume) != 0) return;
  if (launch->ready.empty()) setcontext(&launch->caller);
  Fiber* const to = launch->ready.front();
  launch->ready.pop_front();
  launch->current = to;
  threadIdx = to->thread, blockIdx = to->block->index;
  if (to->started) _longjmp(to->resume, 1);
  to->started = true;
  setcontext(&to->start);
}

// Lets all others run first. For loops that wait until another thread has written.
inline void poll() {
  if (++launch->polls > 1000 * launch->fibers.size()) fail("The kernel polls forever");
  launch->ready.push_back(launch->current);
  suspend();
}

inline void Barrier::wait(int fibers) {
  if (static_cast<int>(waiting_.size()) + 1 < fibers) {
    waiting_.push_back(launch->current);
    return suspend();
  }
  launch->ready.insert(launch->ready.end(), waiting_.begin(), waiting_.end());
  waiting_.clear();
}

inline void run_fiber() {
  launch->kernel();
  ++launch->done;
  note_progress();
  suspend();
}

inline void start_fiber(Fiber& fiber, Block& block, unsigned thread, char* stack) {
  fiber.thread = {thread, 0, 0};
  fiber.block = &block;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stack;
  fiber.start.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.start, run_fiber, 0);
  launch->ready.push_back(&fiber);
}

// Stacks are kept for the next launch.
inline char* stack(size_t number) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= number) stacks.emplace_back(new char[kStackBytes]);
  return stacks[number].get();
}

inline void start_block(Block& block, int number) {
  const Grid& grid = launch->grid;
  block.index = {static_cast<unsigned>(number % grid.blocks), static_cast<unsigned>(number / grid.blocks), 0};
  block.number = number;
  block.shared.resize((grid.shared_bytes + sizeof(SharedLine) - 1) / sizeof(SharedLine) + 1);
  std::memset(block.memory(), SharedLine::kFill, block.shared.size() * sizeof(SharedLine));
  for (int thread = 0; thread < grid.block_threads; ++thread) {
    const size_t fiber = static_cast<size_t>(number) * grid.block_threads + thread;
    start_fiber(launch->fibers[fiber], block, thread, stack(fiber));
  }
}

inline void check_end_of_shared_memory(const Block& block) {
  for (unsigned char byte : block.shared.back().bytes) {
    if (byte != SharedLine::kFill) fail("A thread wrote beyond the block's shared memory");
  }
}

// Runs a grid. Each fiber calls `kernel`.
inline void run(const Grid& grid, std::function<void()> kernel) {
  Launch here;
  launch = &here;
  here.grid = grid;
  here.kernel = std::move(kernel);
  here.blocks = std::vector<Block>(grid.all_blocks());
  here.clusters = std::vector<Barrier>(grid.blocks / grid.cluster_blocks);
  here.fibers = std::vector<Fiber>(static_cast<size_t>(grid.all_blocks()) * grid.block_threads);
  for (int i = 0; i < grid.all_blocks(); ++i) start_block(here.blocks[i], i);
  here.current = here.ready.front();
  here.ready.pop_front();
  here.current->started = true;
  threadIdx = here.current->thread, blockIdx = here.current->block->index;
  swapcontext(&here.caller, &here.current->start);
  if (here.done < here.fibers.size()) fail("Deadlock: the threads left wait at barriers");
  for (const Block& block : here.blocks) check_end_of_shared_memory(block);
}

// ---- a warp

inline int lane() { return threadIdx.x % kWarpThreads; }
inline Warp& current_warp() { return current_block().warps[threadIdx.x / kWarpThreads]; }
// The last warp of a block may have fewer threads.
inline int current_warp_threads() {
  const int first = static_cast<int>(threadIdx.x) / kWarpThreads * kWarpThreads;
  return std::min(kWarpThreads, launch->grid.block_threads - first);
}

// What all lanes have passed.
template <class V>
class WarpValues {
 public:
  explicit WarpValues(const V& mine) {
    Warp& warp = current_warp();
    Fiber& fiber = *launch->current;
    fiber.odd_exchange = !fiber.odd_exchange;
    slots_ = warp.slots[fiber.odd_exchange];
    static_assert(sizeof(V) <= sizeof(slots_[0]));
    std::memcpy(slots_[lane()], &mine, sizeof(V));
    warp.barrier.wait(current_warp_threads());
  }
  V of(int lane) const {
    V value;
    std::memcpy(&value, slots_[lane], sizeof(V));
    return value;
  }

 private:
  unsigned char (*slots_)[32];
};

}  // namespace cuda_on_cpu

// ---- built-in functions

using std::max;
using std::min;

inline void __syncthreads() {
  cuda_on_cpu::current_block().barriers[0].wait(cuda_on_cpu::launch->grid.block_threads);
}
inline int __syncthreads_or(int predicate) {
  cuda_on_cpu::Block& block = cuda_on_cpu::current_block();
  block.any = block.any || predicate;
  __syncthreads();
  const bool any = block.any;
  __syncthreads();
  block.any = false;
  __syncthreads();
  return any;
}
inline int __syncthreads_and(int predicate) { return !__syncthreads_or(!predicate); }
inline void __nanosleep(unsigned) {}
inline void __syncwarp() { cuda_on_cpu::current_warp().barrier.wait(cuda_on_cpu::current_warp_threads()); }

template <class V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  return cuda_on_cpu::WarpValues<V>(value).of(cuda_on_cpu::lane() ^ mask);
}

template <class V>
V __shfl_sync(unsigned, V value, int lane) {
  return cuda_on_cpu::WarpValues<V>(value).of(lane);
}

// The lanes below `lanes` keep their values.
template <class V>
V __shfl_up_sync(unsigned, V value, int lanes) {
  const int lane = cuda_on_cpu::lane();
  return cuda_on_cpu::WarpValues<V>(value).of(lane < lanes ? lane : lane - lanes);
}
// The last `lanes` lanes keep theirs.
template <class V>
V __shfl_down_sync(unsigned, V value, int lanes) {
  const int from = cuda_on_cpu::lane() + lanes;
  return cuda_on_cpu::WarpValues<V>(value).of(from < cuda_on_cpu::kWarpThreads ? from : from - lanes);
}

inline int __all_sync(unsigned, bool predicate) {
  const cuda_on_cpu::WarpValues<bool> predicates(predicate);
  bool all = true;
  for (int lane = 0; lane < cuda_on_cpu::kWarpThreads; ++lane) all = all && predicates.of(lane);
  return all;
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  const cuda_on_cpu::WarpValues<bool> predicates(predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < cuda_on_cpu::kWarpThreads; ++lane)
    ballot |= unsigned{predicates.of(lane)} << lane;
  return ballot;
}

// Polls are counted instead.
inline long long clock64() { return 0; }

template <class V>
V __ldg(const V* address) {
  return *address;
}

inline unsigned atomicAdd(unsigned* address, unsigned x) {
  const unsigned before = *address;
  *address += x;
  return before;
}

[[noreturn]] inline void __trap() { cuda_on_cpu::fail("The kernel trapped"); }
