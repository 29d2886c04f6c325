// The scan of many channels: a thread runs all steps of one, and a block has 32 channels at a time.
//
// A step needs little arithmetic, so memory bandwidth limits the kernel. With few channels too few bytes are
// in flight: 4096 channels are one block for each multiprocessor of an H200. So each block has three warps.
// The producer copies later steps to the stages of a ring in shared memory, the consumer runs the steps of a
// stage, and the third warp writes the results of the stage before.
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
  static constexpr int kChunk = kScanChunk<Scan>;

 public:
  // group: of channels. memory: serial_bytes<Scan>(plan).
  __device__ __forceinline__ SerialScan(const Scan& scan, const ScanVectors& vectors, const SerialPlan& plan,
                                        int64_t group, void* memory)
      : scan_(scan), vectors_(vectors), plan_(plan), lane_(static_cast<int>(threadIdx.x) % kScanWarp) {
    const int values = kScanStages * plan.stage_steps * kScanWarp;
    a_ = static_cast<C*>(memory);
    b_ = reinterpret_cast<T*>(a_ + values);
    h_ = b_ + values;
    resets_ = reinterpret_cast<bool*>(h_ + (Scan::kBackward ? values : 0));
    const int64_t first_channel = group * kScanWarp;
    channels_ = static_cast<int>(min(scan.channels.count - first_channel, int64_t{kScanWarp}));
    own_ = min(lane_, channels_ - 1);
    channel_ = scan.channel(first_channel + own_);
  }

  __device__ __forceinline__ void run() {
    constexpr int kAhead = kScanStages - 2;
    const int warp = static_cast<int>(threadIdx.x) / kScanWarp;
    A state = scan_.before_first(channel_);
    bool was_reset = true;
    for (int64_t first = -int64_t{kAhead} * plan_.stage_steps; first - plan_.stage_steps < scan_.steps;
         first += plan_.stage_steps) {
      const int stage = next_;
      next_ = (next_ + 1) % kScanStages;
      if (warp == 0) {
        copy_stage(first + int64_t{kAhead} * plan_.stage_steps, (stage + kAhead) % kScanStages);
        cp_async_wait_group<kAhead - 1>();  // the next stage has arrived
      } else if (warp == 1) {
        if (0 <= first && first < scan_.steps && lane_ < channels_) run_stage(first, stage, state, was_reset);
      } else if (first >= plan_.stage_steps) {
        write_stage(first - plan_.stage_steps, (stage + kScanStages - 1) % kScanStages);
      }
      __syncthreads();
    }
    if (Scan::kBackward && warp == 1 && lane_ < channels_) {
      scan_.store_grad_initial(scan_.moved(channel_, scan_.steps - 1), state, was_reset);
    }
  }

 private:
  __device__ __forceinline__ int steps_from(int64_t first) const {
    return static_cast<int>(clamped<int64_t>(scan_.steps - first, 0, plan_.stage_steps));
  }
  __device__ __forceinline__ int place_of(int stage) const { return stage * plan_.stage_steps * kScanWarp; }

  // Starts to copy a stage's steps, those that exist.
  __device__ __forceinline__ void copy_stage(int64_t first, int stage) const {
    const int to = place_of(stage);
    if (first < scan_.steps) {
      // An `a` that is the same at all steps stays in the ring, unless its gradients replace it.
      const bool a_stays = scan_.a.step == 0 && !(Scan::kBackward && channel_.h);
      if (!a_stays || first < int64_t{kScanStages} * plan_.stage_steps) {
        copy_rows(a_ + to, channel_.a, scan_.a, vectors_.a, first - Scan::kBackward);
      }
      copy_rows(b_ + to, channel_.b, scan_.b, vectors_.b, first);
      if (Scan::kBackward && channel_.h) copy_rows(h_ + to, channel_.h, scan_.h, vectors_.h, first + 1);
      if (channel_.reset) copy_resets(resets_ + to, first);
    }
    cp_async_commit_group();
  }
  template <typename E>
  __device__ __forceinline__ void copy_rows(E* to, const E* from, const ScanOperand<const E>& operand,
                                            bool vectors, int64_t first) const {
    const int begin = first < 0 && operand.step != 0, end = steps_from(first);
    for_each_vector(from, operand, vectors, first, begin, end, [&](int at, const E* x, auto vector) {
      copy_to_shared<decltype(vector)::kBytes>(to + at, x);
    });
  }

  // Bytes that a lane copies at once.
  template <int kBytes_>
  struct Vector {
    static constexpr int kBytes = kBytes_;
  };
  // Calls f(place, x, Vector<>) for what a lane has of rows [begin, end) from step `first` on.
  template <typename E, class G>
  __device__ __forceinline__ void for_each_vector(E* x, const ScanOperand<E>& operand, bool vectors,
                                                  int64_t first, int begin, int end, const G& f) const {
    constexpr int kVector = 16 / sizeof(E), kLanes = kScanWarp / kVector;  // lanes of a row
    const int row = vectors ? lane_ / kLanes : 0, column = vectors ? lane_ % kLanes * kVector : lane_;
    if (column >= channels_) return;
    x += (first + row) * operand.step + (column - own_);  // that is 0 for single elements
    int at = row * kScanWarp + column;
    if (vectors) {
#pragma unroll 4
      for (int r = row; r < end; r += kVector, x += kVector * operand.step, at += kVector * kScanWarp) {
        if (r >= begin) f(at, x, Vector<16>());
      }
    } else {
#pragma unroll 4
      for (int r = 0; r < end; ++r, x += operand.step, at += kScanWarp) {
        if (r >= begin) f(at, x, Vector<sizeof(E)>());
      }
    }
  }
  __device__ __forceinline__ void copy_resets(bool* to, int64_t first) const {
    const auto* x = reinterpret_cast<const unsigned char*>(channel_.reset + first * scan_.reset.step);
    const int end = steps_from(first);
#pragma unroll 16
    for (int r = 0; r < end; ++r, x += scan_.reset.step) to[r * kScanWarp + lane_] = __ldg(x);
  }

  __device__ __forceinline__ void write_stage(int64_t first, int stage) const {
    const int from = place_of(stage);
    write_rows(b_ + from, channel_.result, scan_.result, vectors_.result, first);
    if (Scan::kBackward && channel_.h) {
      write_rows(a_ + from, channel_.grad_a, scan_.grad_a, vectors_.grad_a, first);
    }
  }
  template <typename E>
  __device__ __forceinline__ void write_rows(const E* from, E* to, const ScanOperand<E>& operand,
                                             bool vectors, int64_t first) const {
    for_each_vector(to, operand, vectors, first, 0, steps_from(first), [&](int at, E* x, auto vector) {
      if constexpr (decltype(vector)::kBytes == 16) {
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(from + at);
      } else {
        *x = from[at];
      }
    });
  }

  // Leaves the results of a stage in its place: those of b, and the gradients of a.
  __device__ __forceinline__ void run_stage(int64_t first, int stage, A& state, bool& was_reset) const {
    const int steps = steps_from(first);
    int at = place_of(stage) + lane_;
    if (Scan::kBackward && channel_.h && first + steps == scan_.steps) {
      h_[at + (steps - 1) * kScanWarp] = scan_.before_all(channel_);
    }
    // Steps are read while those before them run.
    int left = steps;
    if (left >= kChunk) {
      Steps<kChunk> now = read<kChunk>(at);
      for (; left >= 2 * kChunk; left -= kChunk, at += kChunk * kScanWarp) {
        const Steps<kChunk> next = read<kChunk>(at + kChunk * kScanWarp);
        run_steps(now, at, state, was_reset);
        now = next;
      }
      run_steps(now, at, state, was_reset);
      left -= kChunk, at += kChunk * kScanWarp;
    }
    for (; left > 0; --left, at += kScanWarp) run_steps(read<1>(at), at, state, was_reset);
  }

  template <int kSteps>
  struct Steps {
    A a[kSteps], b[kSteps], before[kSteps];
    bool reset[kSteps];
  };
  template <int kSteps>
  __device__ __forceinline__ Steps<kSteps> read(int at) const {
    Steps<kSteps> steps;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int place = at + k * kScanWarp;
      steps.a[k] = scan_.factor(a_[place]), steps.b[k] = widen(b_[place]);
      if (Scan::kBackward && channel_.h) steps.before[k] = widen(h_[place]);
      steps.reset[k] = channel_.reset && resets_[place];
    }
    return steps;
  }
  template <int kSteps>
  __device__ __forceinline__ void run_steps(const Steps<kSteps>& steps, int at, A& state,
                                            bool& was_reset) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int place = at + k * kScanWarp;
      const bool reset = steps.reset[k];
      state = advance(steps.a[k], steps.b[k], Scan::kBackward ? was_reset : reset, state);
      b_[place] = narrow<T>(state);
      if (Scan::kBackward && channel_.h) a_[place] = scan_.gradient_of_a(state, steps.before[k], reset);
      was_reset = reset;
    }
  }

  const Scan& scan_;
  const ScanVectors& vectors_;
  const SerialPlan& plan_;
  const int lane_;
  C* a_;  // [stages * steps, lanes]
  T *b_, *h_;
  bool* resets_;
  int channels_;     // of the block
  int own_;          // which of them the lane copies and runs: the last one, if there are fewer
  Channel channel_;  // at its first step
  int next_ = 0;     // stage
};

}  // namespace lltm_ext
