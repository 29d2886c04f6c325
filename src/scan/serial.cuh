// The scan of many channels: a thread runs all steps of one, a block is a warp.
//
// A step computes little, so memory sets the speed, and few warps have little of it on the way: 4096 channels
// are one warp for each multiprocessor of an H200. So a warp copies what later steps read to a ring in shared
// memory, without waiting for it.
#pragma once

#include "common/ptx.cuh"
#include "scan/scan.h"

namespace lltm_ext {

template <class Scan>
class SerialScan {
  using A = typename Scan::A;
  using T = typename Scan::T;
  using C = typename Scan::C;
  using Channel = typename Scan::Channel;

 public:
  // memory: kScanStages * stage_steps * kScanStepBytes<Scan> bytes.
  __device__ __forceinline__ SerialScan(const Scan& scan, const ScanVectors& vectors, int stage_steps,
                                        void* memory)
      : scan_(scan), vectors_(vectors), stage_steps_(stage_steps), lane_(threadIdx.x) {
    const int values = kScanStages * stage_steps * kScanWarp;
    a_ = static_cast<C*>(memory);
    b_ = reinterpret_cast<T*>(a_ + values);
    h_ = b_ + values;
    const int64_t first_channel = int64_t{blockIdx.x} * kScanWarp;
    channels_ = static_cast<int>(min(scan.channels.count - first_channel, int64_t{kScanWarp}));
    exists_ = lane_ < channels_;
    first_ = scan.channel(first_channel + min(lane_, channels_ - 1));
    result_ = first_.result, grad_a_ = first_.grad_a, reset_ = first_.reset;
  }

  __device__ __forceinline__ void run() {
    state_ = scan_.before_first(first_);
    int stage = 0;
    const int64_t ahead = int64_t{kScanStages - 1} * stage_steps_;
    for (int64_t first = -ahead; first < scan_.steps; first += stage_steps_) {
      cp_async_wait_group<kScanStages - 2>();
      __syncwarp();  // all lanes' copies are here, and all have read the stage before
      copy(first + ahead, (stage + kScanStages - 1) % kScanStages);
      if (first >= 0) run_stage(first, stage);
      stage = (stage + 1) % kScanStages;
    }
    if (Scan::kBackward && exists_) {
      scan_.store_grad_initial(scan_.moved(first_, scan_.steps - 1), state_, was_reset_);
    }
  }

 private:
  __device__ __forceinline__ void run_stage(int64_t first, int stage) {
    for (int k = 0; k < stage_steps_ && first + k < scan_.steps; k += kScanChunk) {
      const int at = (stage * stage_steps_ + k) * kScanWarp + lane_;
      const int64_t left = scan_.steps - (first + k);
      left > kScanChunk ? run_chunk<true>(at, kScanChunk) : run_chunk<false>(at, static_cast<int>(left));
    }
  }

  // Starts to copy a stage's steps, those that exist.
  __device__ __forceinline__ void copy(int64_t first, int stage) const {
    const int to = stage * stage_steps_ * kScanWarp;
    if (first < scan_.steps) {
      copy_rows(a_ + to, first_.a, scan_.a.step, vectors_.a, first - Scan::kBackward);
      copy_rows(b_ + to, first_.b, scan_.b.step, vectors_.b, first);
      if (Scan::kBackward && first_.h) copy_rows(h_ + to, first_.h, scan_.h.step, vectors_.h, first + 1);
    }
    cp_async_commit_group();
  }
  template <typename E>
  __device__ __forceinline__ void copy_rows(E* to, const E* from, int64_t step, bool vectors,
                                            int64_t first) const {
    const int begin = first < 0 ? 1 : 0;
    const auto end = static_cast<int>(clamped<int64_t>(scan_.steps - first, 0, stage_steps_));
    if (vectors) {
      constexpr int kVector = 16 / sizeof(E), kLanes = kScanWarp / kVector;  // lanes of a row
      const int row = lane_ / kLanes, column = lane_ % kLanes * kVector;
      if (column >= channels_) return;
      const E* x = from + (column - min(lane_, channels_ - 1)) + (first + row) * step;
      E* place = to + row * kScanWarp + column;
#pragma unroll 4
      for (int r = row; r < end; r += kVector, x += kVector * step, place += kVector * kScanWarp) {
        if (r >= begin) cp_async<16>(place, x, 16);
      }
    } else {
      const E* x = from + (first + begin) * step;
#pragma unroll 4
      for (int r = begin; r < end; ++r, x += step) {
        E* const place = to + r * kScanWarp + lane_;
        if constexpr (sizeof(E) >= 4) {
          cp_async<sizeof(E)>(place, x, sizeof(E));
        } else {
          *place = __ldg(x);
        }
      }
    }
  }

  // Runs `count` steps. kFull: a whole chunk, without the last step of all.
  template <bool kFull>
  __device__ __forceinline__ void run_chunk(int at, int count) {
    C a[kScanChunk];
    T b[kScanChunk], before[kScanChunk];
    bool reset[kScanChunk] = {};
    const bool has_h = Scan::kBackward && first_.h;
#pragma unroll
    for (int k = 0; k < kScanChunk; ++k) {
      a[k] = a_[at + k * kScanWarp];
      b[k] = b_[at + k * kScanWarp];
      if (has_h) before[k] = h_[at + k * kScanWarp];
    }
    if (reset_) {
#pragma unroll
      for (int k = 0; k < kScanChunk; ++k) {
        if (kFull || k < count) reset[k] = *reset_;
        reset_ += scan_.reset.step;
      }
    }
#pragma unroll
    for (int k = 0; k < kScanChunk; ++k) {
      if (!kFull && k >= count) break;
      state_ = advance(scan_.factor(a[k]), widen(b[k]), Scan::kBackward ? was_reset_ : reset[k], state_);
      if (exists_) *result_ = narrow<T>(state_);
      result_ += scan_.result.step;
      if constexpr (Scan::kBackward) {
        const bool is_last = !kFull && k + 1 == count;
        if (has_h) {
          const C grad =
              scan_.gradient_of_a(state_, is_last ? scan_.before_all(first_) : before[k], reset[k]);
          if (exists_) *grad_a_ = grad;
          grad_a_ += scan_.grad_a.step;
        }
        was_reset_ = reset[k];
      }
    }
  }

  const Scan& scan_;
  const ScanVectors& vectors_;
  const int stage_steps_, lane_;
  C* a_;
  T *b_, *h_;      // [stages * steps, lanes], as a_
  int channels_;   // of the block
  bool exists_;    // whether the lane has a channel, and need not repeat the last one
  Channel first_;  // its first step
  T* result_;      // those of the next step to run
  C* grad_a_;
  const bool* reset_;
  A state_;
  bool was_reset_ = true;  // backward: whether the step before forgets those after it
};

}  // namespace lltm_ext
