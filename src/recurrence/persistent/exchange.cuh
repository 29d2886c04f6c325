// How the blocks of a group exchange what each needs from all of them: states forward, the gates' gradients
// backward. Three implementations of one interface; the kernels are templates over them.
//
// A block processes one row tile of one step after another. For each it calls
//   begin(h, reset)  once, before the first: h [rows, H] before the first step, or null for zeros, and what
//                    each row loses of it, or null
//   start(source)    to issue the first loads, if that makes sense
//   load(...)        to wait for a lane's vectors of its row
//   store(...)       to write two adjacent values to memory and stage them, or what a row keeps of them, for
//                    the group
//   send()           to send the staged values; all threads call it together
//   advance()        at the end
// An exchange of what products in the middle of a step take has other calls:
//   begin()          once
//   give(...)        as store(...), but only the exchange through L2 writes to memory
//   pass_on()        to send what has been given; all threads call it together. start(...) and load(...)
//                    follow, and a barrier of the block
#pragma once

#include "common/hopper/ptx.cuh"
#include "common/ptx.cuh"
#include "recurrence/persistent/pair.cuh"
#include "recurrence/persistent/product.cuh"

namespace lltm_ext {

// The row that a lane loads.
template <typename T>
struct RowSource {
  const T* row;    // in memory, at the lane's first element; further inputs are a plane apart
  int vectors;     // below the hidden size; the others are zeros
  bool exchanged;  // whether the group's blocks write the row during the kernel
  int element;     // the lane's first element
  int group_row;   // the row's number in the group
};

// A step's values in a block's shared memory: [kRowTile, kInputs, kWidth], with padded rows. They are zeros
// where there is no row or no unit, so reading needs no conditions and its addresses are constants.
template <typename T, int kInputs, int kWidth>
struct ExchangeBuffer {
  static constexpr int kInputBytes = kWidth * sizeof(T), kRowBytes = padded_row_bytes(kInputs * kInputBytes),
                       kBytes = kRowTile * kRowBytes;
  char* data;

  __device__ T* at(int row, int input) const {
    return reinterpret_cast<T*>(data + row * kRowBytes + input * kInputBytes);
  }

  __device__ void clear() const {
    for (int i = threadIdx.x; i < kBytes / 16; i += kBlockThreads) {
      reinterpret_cast<uint4*>(data)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  // Takes what rows keep of the group's h, or leaves zeros if h is null. A kernel's first step reads it
  // from here as all others do: a branch to global memory in the loop makes the compiler wait there for the
  // loads of the next step's inputs, which are in flight.
  template <int kHeads, typename Reset>
  __device__ void set(const T* h, const Reset* reset, int rows, int hidden) const {
    struct alignas(16) Vector {
      T values[16 / sizeof(T)];
    };
    __syncthreads();
    const int vectors = hidden * static_cast<int>(sizeof(T)) / 16;
    for (int i = threadIdx.x; h && i < rows * vectors; i += kBlockThreads) {
      Vector x = reinterpret_cast<const Vector*>(h)[i + i / vectors * (kHeads - 1) * vectors];
      if (reset) {
        for (T& value : x.values) {
          value = narrow<T>(scale_by_mask(mask_of(reset[i / vectors]), float(widen(value))));
        }
      }
      reinterpret_cast<Vector*>(at(i / vectors, 0))[i % vectors] = x;
    }
    __syncthreads();
  }

  // Reads a lane's vectors of its row, from `input` on.
  template <int kLoaded, int kChunks>
  __device__ __forceinline__ void read(uint4 (&vectors)[kLoaded][kChunks], int input,
                                       const RowSource<T>& source) const {
    const char* const from = reinterpret_cast<const char*>(at(source.group_row, input) + source.element);
#pragma unroll
    for (int i = 0; i < kLoaded * kChunks; ++i) {
      vectors[i / kChunks][i % kChunks] =
          *reinterpret_cast<const uint4*>(from + i / kChunks * kInputBytes + i % kChunks * kChunkBytes);
    }
  }
};

// After this many polls, some ten seconds, a block assumes that the sender has failed. The kernel traps, and
// the next CUDA call reports the error.
constexpr int kMaxPolls = 1 << 24;
inline __device__ __noinline__ void trap_on_timeout() { __trap(); }

// kWidth: the most hidden units that the variant takes. kHeads: those whose units a row in memory has.
template <ExchangeThrough kThrough, typename T, int kInputs, int kChunks, int kUnits, int kWidth,
          int kSharingWarps, int kHeads>
class StateExchange;

// ---- through L2: the data is its own flag
//
// The destination is filled with kUnwritten before the kernel. Every word is written once, and a reader polls
// it until it differs from kUnwritten. So a step costs one round trip through L2 and no barrier, and nothing
// depends on the order in which different words become visible.

constexpr unsigned kUnwritten = kUnwrittenByte * 0x01010101u;

__device__ __forceinline__ bool is_written(const uint4& x) {
  return max(max(x.x, x.y), max(x.z, x.w)) != kUnwritten;
}

template <typename T, int kInputs, int kChunks, int kUnits, int kWidth, int kSharingWarps, int kHeads>
class StateExchange<ExchangeThrough::kL2, T, kInputs, kChunks, kUnits, kWidth, kSharingWarps, kHeads> {
  static constexpr int kOwnChunks = kChunks / kSharingWarps;  // chunks that a warp fetches
  static_assert(kSharingWarps <= 2 && kChunks % kSharingWarps == 0, "vectors are shared by two at most");

 public:
  static constexpr bool kThroughL2 = true;

  __device__ StateExchange(char* shared, const Group& group)
      : input_bytes_(kHeads * group.hidden * sizeof(T)),
        sharing_warp_(kSharingWarps == 1 ? 0 : threadIdx.x / 32 / kKSlices),
        k_slice_(threadIdx.x / 32 % kKSlices),
        shared_(reinterpret_cast<uint4*>(shared) + threadIdx.x % 32) {}
  template <typename Reset>
  __device__ void begin(const T*, const Reset*) {}
  __device__ void begin() {}
  __device__ void send() {}
  // Polling before the data can be there slows the traffic that brings it.
  __device__ void pass_on() { __syncthreads(); }
  __device__ void advance() {}
  __device__ void finish() {}

  // Issues the first poll; the thread continues while it is in flight.
  __device__ __forceinline__ void start(const RowSource<T>& source) {
#pragma unroll
    for (int i = 0; i < kInputs * kOwnChunks; ++i) {
      polled_[i] = make_uint4(0, 0, 0, 0);
      if (chunk(i) < source.vectors) polled_[i] = ld_relaxed_gpu(address(source, i));
    }
  }

  // Follows start() with the same source. Calls load the inputs in order, from the first.
  template <int kLoaded>
  __device__ __forceinline__ void load(uint4 (&vectors)[kLoaded][kChunks], int input,
                                       const RowSource<T>& source) {
    if (input == 0) {
      wait(source);
      if (kSharingWarps == 2) share();
    }
#pragma unroll
    for (int i = 0; i < kLoaded * kOwnChunks; ++i) {
      if constexpr (kSharingWarps == 1) {
        vectors[i / kChunks][i % kChunks] = polled_[i];
      } else {
        const uint4 own = polled_[input * kOwnChunks + i],
                    other = shared_[index(1 - sharing_warp_, input * kOwnChunks + i)];
        vectors[0][2 * i] = select(sharing_warp_ == 0, own, other);
        vectors[0][2 * i + 1] = select(sharing_warp_ == 0, other, own);
      }
    }
  }

  __device__ __forceinline__ void store(T* address, float2 x, float2, bool stored, int, int, int) {
    const Pair<T> pair = Pair<T>::of(x.x, x.y);
    if (stored) st_relaxed_gpu(address, *reinterpret_cast<const typename Pair<T>::Word*>(&pair));
  }
  __device__ __forceinline__ void give(T* address, float2 x, bool exists, int, int, int) {
    store(address, x, x, exists, 0, 0, 0);
  }

 private:
  static constexpr int kKSlices = kBlockWarps * 16 / kUnits;

  __device__ __forceinline__ int chunk(int i) const { return i % kOwnChunks * kSharingWarps + sharing_warp_; }
  __device__ __forceinline__ const char* address(const RowSource<T>& source, int i) const {
    return reinterpret_cast<const char*>(source.row) + i / kOwnChunks * input_bytes_ + chunk(i) * kChunkBytes;
  }

  __device__ __forceinline__ void wait(const RowSource<T>& source) {
    for (int polls = 0;; ++polls) {
      bool written = true;
#pragma unroll
      for (int i = 0; i < kInputs * kOwnChunks; ++i) written = written && is_written(polled_[i]);
      if (__all_sync(~0u, written || !source.exchanged)) return;
      if (polls == kMaxPolls) trap_on_timeout();
#pragma unroll
      for (int i = 0; i < kInputs * kOwnChunks; ++i) {
        if (source.exchanged && !is_written(polled_[i])) polled_[i] = ld_relaxed_gpu(address(source, i));
      }
    }
  }

  // The block's barrier in every tile keeps a vector from being overwritten before it is read.
  __device__ __forceinline__ int index(int sharing_warp, int i) const {
    return ((k_slice_ * kSharingWarps + sharing_warp) * kInputs * kOwnChunks + i) * 32;
  }
  __device__ __forceinline__ void share() const {
#pragma unroll
    for (int i = 0; i < kInputs * kOwnChunks; ++i) shared_[index(sharing_warp_, i)] = polled_[i];
    bar_sync<32 * kSharingWarps>(1 + k_slice_);
  }
  __device__ static __forceinline__ uint4 select(bool first, const uint4& a, const uint4& b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
  }

  const int input_bytes_, sharing_warp_, k_slice_;
  uint4* const shared_;  // the lane's first vector
  uint4 polled_[kInputs * kOwnChunks];
};

// ---- through the distributed shared memory of a cluster
//
// The group is a cluster and has one row tile. A block stages its values and sends them into the shared
// memory of all blocks by st.async, in packets of 16 bytes that complete an mbarrier there. Two buffers
// alternate: when a block has the values of a step, all blocks have read the buffer of the step before.

template <typename T, int kInputs, int kChunks, int kUnits, int kWidth, int kSharingWarps, int kHeads>
class StateExchange<ExchangeThrough::kCluster, T, kInputs, kChunks, kUnits, kWidth, kSharingWarps, kHeads> {
 public:
  static constexpr bool kThroughL2 = false;

  __device__ StateExchange(char* shared, const Group& group)
      : staging_(shared),
        first_{shared + kStagingBytes},
        group_(group),
        hidden_bytes_(group.hidden * sizeof(T)),
        packets_(group.rows * kInputs * kPackets),
        first_byte_(group.block * kUnits * sizeof(T)),
        barriers_(reinterpret_cast<uint64_t*>(first_.data + 2 * Buffer::kBytes)) {
    const int sharing = max(1, kBlockWarps / group.blocks), warp = threadIdx.x / 32;
    first_peer_ = warp / sharing;
    first_packet_ = warp % sharing * 32 + threadIdx.x % 32;
    stride_ = sharing * 32;
    if (threadIdx.x == 0) {
      for (int buffer = 0; buffer < 2; ++buffer) hopper::mbarrier_init(&barriers_[buffer], 1);
      hopper::fence_mbarrier_init();
    }
    first_.clear();
    Buffer{first_.data + Buffer::kBytes}.clear();
    hopper::cluster_sync();
    if (threadIdx.x == 0) expect(1);
  }
  // The first step waits as all others do.
  template <typename Reset>
  __device__ void begin(const T* h, const Reset* reset) {
    first_.template set<kHeads>(h, reset, group_.rows, group_.hidden);
    if (threadIdx.x == 0) hopper::mbarrier_arrive(&barriers_[0]);
  }
  // The first values are sent as those of a second step.
  __device__ void begin() {
    if (threadIdx.x > 0) return;
    hopper::mbarrier_arrive(&barriers_[0]);
    expect(0);
  }
  __device__ void start(const RowSource<T>&) {}
  __device__ void pass_on() {
    send();
    advance();
  }
  __device__ void advance() { ++step_; }
  // A block must not exit while others send to it.
  __device__ void finish() { hopper::cluster_sync(); }

  template <int kLoaded>
  __device__ __forceinline__ void load(uint4 (&vectors)[kLoaded][kChunks], int input,
                                       const RowSource<T>& source) {
    if (input == 0) wait();
    received().read(vectors, input, source);
  }
  // The values of which load(...) has read a lane's.
  __device__ __forceinline__ ExchangeBuffer<T, kInputs, kWidth> received() const {
    return {first_.data + (step_ & 1) * Buffer::kBytes};
  }

  __device__ __forceinline__ void store(T* address, float2 x, float2 sent, bool stored, int row, int input,
                                        int unit) {
    if (!stored) return;
    stage(sent, row, input, unit);
    write_pair(address, x.x, x.y);
  }
  __device__ __forceinline__ void give(T*, float2 x, bool exists, int row, int input, int unit) {
    if (exists) stage(x, row, input, unit);
  }

  // A warp sends to one block at a time, maybe with other warps: packets to one destination travel together.
  __device__ __forceinline__ void send() {
    __syncthreads();
    const int buffer = (step_ + 1) & 1;
    for (int peer = first_peer_; peer < group_.blocks; peer += kBlockWarps) {
      const uint32_t there = hopper::mapa(first_.data, peer), to = there + buffer * Buffer::kBytes,
                     barrier = there + 2 * Buffer::kBytes + 8 * buffer;
#pragma unroll 4
      for (unsigned i = first_packet_; i < packets_; i += stride_) {
        const unsigned input = i / kPackets % kInputs, row = i / kPackets / kInputs,
                       byte = first_byte_ + i % kPackets * 16;
        if (byte < hidden_bytes_) {
          hopper::st_async(to + row * Buffer::kRowBytes + input * Buffer::kInputBytes + byte,
                           *reinterpret_cast<const uint4*>(staging_ + i * 16), barrier);
        }
      }
    }
  }

 private:
  using Buffer = ExchangeBuffer<T, kInputs, kWidth>;
  static constexpr int kStagingBytes = kRowTile * kInputs * kUnits * sizeof(T);
  static constexpr int kPackets = kUnits * sizeof(T) / 16;  // packets of a row of one input

  __device__ __forceinline__ void stage(float2 x, int row, int input, int unit) {
    char* const staged = staging_ + ((row * kInputs + input) * kUnits + unit) * sizeof(T);
    write_pair(reinterpret_cast<T*>(staged), x.x, x.y);
  }
  // A phase ends with this arrival and the bytes of a step.
  __device__ __forceinline__ void expect(int buffer) const {
    hopper::mbarrier_arrive_expect_tx(&barriers_[buffer], group_.rows * kInputs * hidden_bytes_);
  }

  __device__ __forceinline__ void wait() const {
    const int buffer = step_ & 1, parity = step_ >> 1 & 1;
    for (int polls = 0; !hopper::mbarrier_try_wait(&barriers_[buffer], parity); ++polls) {
      if (polls == kMaxPolls) trap_on_timeout();
    }
    if (threadIdx.x == 0) expect(buffer);
  }

  char* const staging_;
  const Buffer first_;  // the first of two; the other follows it
  const Group group_;
  const unsigned hidden_bytes_, packets_, first_byte_;
  uint64_t* const barriers_;  // one for each buffer
  int first_peer_;            // the packets that this thread sends, and their destination
  unsigned first_packet_, stride_;
  int step_ = 0;
};

// ---- within a block that has all units
//
// A step's values replace those of the step before, which all warps have read when the cell runs.

template <typename T, int kInputs, int kChunks, int kUnits, int kWidth, int kSharingWarps, int kHeads>
class StateExchange<ExchangeThrough::kBlock, T, kInputs, kChunks, kUnits, kWidth, kSharingWarps, kHeads> {
 public:
  static constexpr bool kThroughL2 = false;

  __device__ StateExchange(char* shared, const Group& group) : buffer_{shared}, group_(group) {
    buffer_.clear();
  }
  template <typename Reset>
  __device__ void begin(const T* h, const Reset* reset) {
    buffer_.template set<kHeads>(h, reset, group_.rows, group_.hidden);
  }
  __device__ void begin() {}
  __device__ void start(const RowSource<T>&) {}
  __device__ void send() {}
  __device__ void pass_on() { __syncthreads(); }
  __device__ void advance() { __syncthreads(); }
  __device__ void finish() {}

  template <int kLoaded>
  __device__ __forceinline__ void load(uint4 (&vectors)[kLoaded][kChunks], int input,
                                       const RowSource<T>& source) {
    buffer_.read(vectors, input, source);
  }

  __device__ __forceinline__ void store(T* address, float2 x, float2 sent, bool stored, int row, int input,
                                        int unit) {
    if (!stored) return;
    write_pair(buffer_.at(row, input) + unit, sent.x, sent.y);
    write_pair(address, x.x, x.y);
  }
  __device__ __forceinline__ void give(T*, float2 x, bool exists, int row, int input, int unit) {
    if (exists) write_pair(buffer_.at(row, input) + unit, x.x, x.y);
  }

 private:
  const ExchangeBuffer<T, kInputs, kWidth> buffer_;
  const Group group_;
};

}  // namespace lltm_ext
