// In place of src/common/hopper/ptx.cuh: on the CPU, those of its functions that exchange data in a cluster.
#pragma once

#include "cuda_on_cpu.h"

namespace lltm_ext {
namespace hopper {

// What the 8 bytes of an mbarrier hold.
struct MBarrier {
  uint8_t count;    // arrivals in a phase
  uint8_t pending;  // of them
  bool odd_phase;
  int32_t bytes;  // expected and not yet written

  void end_phase_if_complete() {
    if (pending > 0 || bytes != 0) return;
    pending = count;
    odd_phase = !odd_phase;
    cuda_on_cpu::note_progress();
  }
};
static_assert(sizeof(MBarrier) == sizeof(uint64_t));

inline MBarrier& state_of(void* barrier) { return *static_cast<MBarrier*>(barrier); }

inline void mbarrier_init(uint64_t* barrier, int count) {
  state_of(barrier) = {static_cast<uint8_t>(count), static_cast<uint8_t>(count), false, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  MBarrier& state = state_of(barrier);
  state.bytes += static_cast<int32_t>(bytes);
  --state.pending;
  state.end_phase_if_complete();
}
inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  const auto ended = [&] { return state_of(barrier).odd_phase != (parity != 0); };
  if (!ended()) cuda_on_cpu::poll();
  return ended();
}

inline int first_block_of_cluster() {
  const int blocks = cuda_on_cpu::launch->grid.cluster_blocks;
  return cuda_on_cpu::current_block().number / blocks * blocks;
}

inline void cluster_sync() {
  const cuda_on_cpu::Grid& grid = cuda_on_cpu::launch->grid;
  const int cluster = cuda_on_cpu::current_block().number / grid.cluster_blocks;
  cuda_on_cpu::launch->clusters[cluster].wait(grid.cluster_blocks * grid.block_threads);
}

// An address in the cluster: the block's rank above, the offset in its shared memory below.
constexpr int kOffsetBits = 24;

inline uint32_t mapa(const void* here, uint32_t rank) {
  const auto* const byte = static_cast<const unsigned char*>(here);
  return rank << kOffsetBits | static_cast<uint32_t>(byte - cuda_on_cpu::current_block().memory());
}
inline void* in_cluster(uint32_t address) {
  const int block = first_block_of_cluster() + static_cast<int>(address >> kOffsetBits);
  return cuda_on_cpu::launch->blocks[block].memory() + (address & ((1u << kOffsetBits) - 1));
}

template <typename T>
const T* in_block(const T* here, uint32_t rank) {
  return static_cast<const T*>(in_cluster(mapa(here, rank)));
}

inline void st_async(uint32_t to, const uint4& x, uint32_t barrier) {
  *static_cast<uint4*>(in_cluster(to)) = x;
  MBarrier& state = state_of(in_cluster(barrier));
  state.bytes -= 16;
  state.end_phase_if_complete();
  cuda_on_cpu::note_progress();
}

}  // namespace hopper
}  // namespace lltm_ext
