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
  __device__ SerialScan(const Scan& scan, const ScanVectors& vectors, int stage_steps, void* memory)
      : scan_(scan), vectors_(vectors), stage_steps_(stage_steps), lane_(threadIdx.x) {
    const int values = kScanStages * stage_steps * kScanWarp;
    a_ = static_cast<C*>(memory);
    b_ = reinterpret_cast<T*>(a_ + values);
    h_ = b_ + values;
    const int64_t channel = int64_t{blockIdx.x} * kScanWarp + lane_, last = scan.channels.count - 1;
    exists_ = channel <= last;
    x_ = scan.channel(exists_ ? channel : last);
  }

  __device__ void run() {
    A h = scan_.before_first(x_);
    bool was_reset = Scan::kBackward;  // whether the step before is one whose state backward forgets
    for (int i = 0; i < kScanStages - 1; ++i) copy(i * int64_t{stage_steps_}, i);
    int stage = 0;
    for (int64_t first = 0; first < scan_.steps; first += stage_steps_) {
      cp_async_wait_group<kScanStages - 2>();
      __syncwarp();  // all lanes' copies are here, and all have read the stage before
      copy(first + int64_t{kScanStages - 1} * stage_steps_, (stage + kScanStages - 1) % kScanStages);
      for (int k = 0; k < stage_steps_ && first + k < scan_.steps; k += kScanChunk) {
        const int at = (stage * stage_steps_ + k) * kScanWarp + lane_;
        first + k + kScanChunk <= scan_.steps ? run_chunk<true>(first + k, at, was_reset, h)
                                              : run_chunk<false>(first + k, at, was_reset, h);
      }
      stage = (stage + 1) % kScanStages;
    }
  }

 private:
  // Starts to copy a stage's steps, those that exist.
  __device__ __forceinline__ void copy(int64_t first, int stage) const {
    const int to = stage * stage_steps_ * kScanWarp;
    if (first < scan_.steps) {
      copy_rows(a_ + to, x_.a, scan_.a.step, vectors_.a, first - Scan::kBackward);
      copy_rows(b_ + to, x_.b, scan_.b.step, vectors_.b, first);
      if (Scan::kBackward && x_.h) copy_rows(h_ + to, x_.h, scan_.h.step, vectors_.h, first + 1);
    }
    cp_async_commit_group();
  }
  template <typename E>
  __device__ __forceinline__ void copy_rows(E* to, const E* from, int64_t step, bool vectors,
                                            int64_t first) const {
    const auto exists = [&](int row) { return first + row >= 0 && first + row < scan_.steps; };
    if (vectors) {
      constexpr int kVector = 16 / sizeof(E), kLanes = kScanWarp / kVector;  // lanes of a row
      const int row = lane_ / kLanes, column = lane_ % kLanes * kVector;
      const E* x = from - lane_ + column + (first + row) * step;
      for (int r = row; r < stage_steps_; r += kVector, x += kVector * step) {
        cp_async<16>(to + r * kScanWarp + column, x, exists(r) ? 16 : 0);
      }
    } else {
      const E* x = from + first * step;
#pragma unroll 4
      for (int r = 0; r < stage_steps_; ++r, x += step) {
        E* const place = to + r * kScanWarp + lane_;
        if constexpr (sizeof(E) >= 4) {
          cp_async<sizeof(E)>(place, x, exists(r) ? sizeof(E) : 0);
        } else if (exists(r)) {
          *place = *x;
        }
      }
    }
  }

  // kFull: whether all steps of the chunk exist.
  template <bool kFull>
  __device__ __forceinline__ void run_chunk(int64_t first, int at, bool& was_reset, A& h) {
    C a[kScanChunk];
    T b[kScanChunk], before[kScanChunk];
    bool reset[kScanChunk];
    const bool has_h = Scan::kBackward && x_.h;
    Channel x = scan_.moved(x_, first);
#pragma unroll
    for (int k = 0; k < kScanChunk; ++k) {
      const bool exists = kFull || first + k < scan_.steps;
      a[k] = a_[at + k * kScanWarp];
      b[k] = b_[at + k * kScanWarp];
      if (has_h) before[k] = h_[at + k * kScanWarp];
      reset[k] = x.reset && exists && x.reset[k * scan_.reset.step];
    }
#pragma unroll
    for (int k = 0; k < kScanChunk; ++k) {
      if (!kFull && first + k >= scan_.steps) break;
      h = advance(scan_.factor(a[k]), widen(b[k]), Scan::kBackward ? was_reset : reset[k], h);
      if (exists_) *x.result = narrow<T>(h);
      if constexpr (Scan::kBackward) {
        const bool is_last = first + k + 1 == scan_.steps;
        if (has_h && exists_) {
          *x.grad_a = scan_.gradient_of_a(h, is_last ? scan_.before_all(x) : before[k], reset[k]);
        }
        if (is_last && exists_) scan_.store_grad_initial(x, h, reset[k]);
        was_reset = reset[k];
      }
      x = scan_.moved(x, 1);
    }
  }

  const Scan& scan_;
  const ScanVectors& vectors_;
  const int stage_steps_, lane_;
  C* a_;
  T *b_, *h_;  // [stages * steps, lanes], as a_
  bool exists_;
  Channel x_;  // at its first step
};

}  // namespace lltm_ext
