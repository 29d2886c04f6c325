// How the blocks of a group hand each other what each needs of all: the states forward, the gates' gradients
// backward. Two ways with one face, a parameter of the kernels.
//
// A block works through items: a tile of rows in a step, then the next tile, then the next step. For each
//   begin(source)    may start to fetch
//   read(...)        waits for a lane's pieces of its row
//   publish(...)     writes two neighbouring values to memory, and keeps them for the group
//   flush()          sends what was kept; all threads together
//   next()           at the item's end
#pragma once

#include "recurrence/persistent/pair.cuh"
#include "recurrence/persistent/product.cuh"

namespace lltm_ext {

enum class Exchange { kL2, kCluster };

// A block's place in its group, as far as an exchange needs it.
struct GroupPlace {
  int hidden;
  int members;  // blocks of the group
  int member;   // this block
  int rows;     // of the batch, in this group
};

// Where a lane finds its row.
template <typename T>
struct Source {
  const T* row;    // in memory, at the lane's first element; further inputs follow `hidden` elements apart
  int valid;       // pieces below the hidden size; the others are zeros
  bool exchanged;  // whether the group's blocks write the row; else it was there before the kernel
  int element;     // of the lane's first, and
  int in_group;    // the row's number in the group
};

// So many looks for what does not come, some ten seconds, before a block gives up on who should send it: the
// kernel ends with an error, which the next CUDA call reports.
constexpr int kMaxLooks = 1 << 24;
inline __device__ __noinline__ void give_up() { __trap(); }

// How many warps, which need the same pieces for different units, share out the fetching of them. One where
// shared memory, through which they pass them on, is short: of room, or because weights in it are read for
// every tile.
constexpr int sharing_warps(bool general, int unit_tiles, int chunks, int inputs) {
  return unit_tiles == 1 || (general && chunks > 4) || inputs * chunks > 24 ? 1 : 2;
}

template <Exchange kWay, typename T, int kIn, int kChunks, int kUnits, int kSharers>
class Exchanger;

// ---- through L2: the data is its own flag
// ---------------------------------------------------------------------
//
// Memory is filled with kUnwritten before the kernel. Every word of it is written once, and whoever needs a
// word reads it until it is no longer kUnwritten. So a step costs one trip through L2 and no barrier, and
// nothing depends on the order in which different words become visible.

// A NaN in every type, and none that arithmetic makes: theirs are 0x7fff and 0x7fffffff.
constexpr unsigned kUnwritten = ~0u;
constexpr int kUnwrittenByte = 0xff;

__device__ __forceinline__ bool is_written(const uint4& x) {
  return max(max(x.x, x.y), max(x.z, x.w)) != kUnwritten;
}

__device__ __forceinline__ uint4 read_relaxed(const void* address) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void write_relaxed(void* address, unsigned x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void write_relaxed(void* address, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(address), "r"(x.x), "r"(x.y)
               : "memory");
}

template <typename T, int kIn, int kChunks, int kUnits, int kSharers>
class Exchanger<Exchange::kL2, T, kIn, kChunks, kUnits, kSharers> {
  static constexpr int kOwn = kChunks / kSharers;  // chunks that a warp fetches
  static_assert(kSharers <= 2 && kChunks % kSharers == 0, "pieces are shared by two at most");

 public:
  static constexpr int kInputsAtOnce = kSharers == 1 ? kIn : 1;
  static constexpr int kPieces = kSharers == 1 ? kIn * kChunks : kIn * kOwn + kChunks;  // in registers
  static constexpr bool kThroughMemory = true;

  static size_t shared_bytes(const GroupPlace&) {
    return kSharers == 1 ? 0 : kWarps * kIn * kOwn * 32 * sizeof(uint4);
  }

  __device__ Exchanger(char* shared, const GroupPlace& place)
      : input_bytes_(place.hidden * sizeof(T)),
        sharer_(kSharers == 1 ? 0 : threadIdx.x / 32 / kSlices),
        slice_(threadIdx.x / 32 % kSlices),
        shared_(reinterpret_cast<uint4*>(shared) + threadIdx.x % 32) {}
  __device__ void flush() {}
  __device__ void next() {}
  __device__ void finish() {}

  // A first look, whose answer comes while the thread has something else to do.
  __device__ __forceinline__ void begin(const Source<T>& source) {
#pragma unroll
    for (int i = 0; i < kIn * kOwn; ++i) {
      looked_[i] = make_uint4(0, 0, 0, 0);
      if (chunk(i) < source.valid) looked_[i] = read_relaxed(address(source, i));
    }
  }

  // After begin() with the same source; of several inputs, one after the other from the first.
  __device__ __forceinline__ void read(uint4 (&pieces)[kInputsAtOnce][kChunks], int input,
                                       const Source<T>& source) {
    if (input == 0) {
      wait(source);
      if (kSharers == 2) share();
    }
#pragma unroll
    for (int i = 0; i < kInputsAtOnce * kOwn; ++i) {
      if constexpr (kSharers == 1) {
        pieces[i / kChunks][i % kChunks] = looked_[i];
      } else {
        const uint4 own = looked_[input * kOwn + i], other = shared_[index(1 - sharer_, input * kOwn + i)];
        pieces[0][2 * i] = choose(sharer_ == 0, own, other);
        pieces[0][2 * i + 1] = choose(sharer_ == 0, other, own);
      }
    }
  }

  __device__ __forceinline__ void publish(T* address, float a, float b, bool stored, int, int, int) {
    const Pair<T> pair = Pair<T>::of(a, b);
    if (stored) write_relaxed(address, *reinterpret_cast<const typename Pair<T>::Word*>(&pair));
  }

 private:
  static constexpr int kWarps = 8, kSlices = kWarps * 16 / kUnits;

  __device__ __forceinline__ int chunk(int i) const { return i % kOwn * kSharers + sharer_; }
  __device__ __forceinline__ const char* address(const Source<T>& source, int i) const {
    return reinterpret_cast<const char*>(source.row) + i / kOwn * input_bytes_ + chunk(i) * kChunkBytes;
  }

  __device__ __forceinline__ void wait(const Source<T>& source) {
    for (int looks = 0;; ++looks) {
      bool written = true;
#pragma unroll
      for (int i = 0; i < kIn * kOwn; ++i) written = written && is_written(looked_[i]);
      if (__all_sync(~0u, written || !source.exchanged)) return;
      if (looks == kMaxLooks) give_up();
#pragma unroll
      for (int i = 0; i < kIn * kOwn; ++i) {
        if (source.exchanged && !is_written(looked_[i])) looked_[i] = read_relaxed(address(source, i));
      }
    }
  }

  // The block's barrier in every item keeps a piece from being overwritten before it is read.
  __device__ __forceinline__ int index(int sharer, int i) const {
    return ((slice_ * kSharers + sharer) * kIn * kOwn + i) * 32;
  }
  __device__ __forceinline__ void share() const {
#pragma unroll
    for (int i = 0; i < kIn * kOwn; ++i) shared_[index(sharer_, i)] = looked_[i];
    asm volatile("bar.sync %0, %1;" : : "r"(1 + slice_), "n"(32 * kSharers) : "memory");
  }
  __device__ static __forceinline__ uint4 choose(bool first, const uint4& a, const uint4& b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
  }

  const int input_bytes_, sharer_, slice_;
  uint4* const shared_;  // the lane's
  uint4 looked_[kIn * kOwn];
};

// ---- through the distributed shared memory of a cluster
// -------------------------------------------------------
//
// The group is a cluster, and has one tile of rows. A block collects its values and sends them straight into
// the shared memory of all blocks, in packets of 16 bytes that tell a barrier there of their arrival. Two
// buffers take turns: a block writes into the one that all others have read, because it has their values of
// the step since.

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Bytes of a row in shared memory: rows lie half of the banks apart, so that the two rows which a quarter of
// a warp reads do not meet.
__host__ __device__ constexpr int padded_row_bytes(int bytes) { return (bytes + 127) / 128 * 128 + 64; }

constexpr int kMaxClusterSize = 16;

template <typename T, int kIn, int kChunks, int kUnits, int kSharers>
class Exchanger<Exchange::kCluster, T, kIn, kChunks, kUnits, kSharers> {
 public:
  static constexpr int kInputsAtOnce = kIn * kChunks <= 12 ? kIn : 1;
  static constexpr int kPieces = kInputsAtOnce * kChunks;  // in registers
  static constexpr bool kThroughMemory = false;

  static size_t shared_bytes(const GroupPlace& place) {
    return kOwnBytes + 2 * kRowTile * padded_row_bytes(kIn * place.hidden * static_cast<int>(sizeof(T))) +
           2 * 8;
  }

  __device__ Exchanger(char* shared, const GroupPlace& place)
      : own_(shared),
        buffers_(shared + kOwnBytes),
        input_bytes_(place.hidden * sizeof(T)),
        row_bytes_(padded_row_bytes(kIn * input_bytes_)),
        buffer_bytes_(kRowTile * row_bytes_),
        members_(place.members),
        step_bytes_(place.rows * kIn * input_bytes_),
        packets_(place.rows * kIn * kPackets),
        first_byte_(place.member * kUnits * sizeof(T)),
        address_(shared_address(buffers_)) {
    const int sharing = max(1, kWarps / members_), warp = threadIdx.x / 32;
    first_peer_ = warp / sharing;
    first_packet_ = warp % sharing * 32 + threadIdx.x % 32;
    stride_ = sharing * 32;
    if (threadIdx.x == 0) {
      for (int buffer = 0; buffer < 2; ++buffer) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(address_ + barrier(buffer)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    }
    synchronize();
    if (threadIdx.x == 0) {
      for (int buffer = 0; buffer < 2; ++buffer) expect(buffer);
    }
  }
  __device__ void begin(const Source<T>&) {}
  __device__ void next() { ++step_; }
  // A block stays until nobody sends to it any more.
  __device__ void finish() { synchronize(); }

  template <int kInputs>
  __device__ __forceinline__ void read(uint4 (&pieces)[kInputs][kChunks], int input,
                                       const Source<T>& source) {
    if (source.exchanged && input == 0) wait();
    const char* from = source.exchanged
                           ? buffers_ + (step_ & 1) * buffer_bytes_ + source.in_group * row_bytes_ +
                                 source.element * static_cast<int>(sizeof(T))
                           : reinterpret_cast<const char*>(source.row);
#pragma unroll
    for (int i = 0; i < kInputs * kChunks; ++i) {
      uint4& piece = pieces[i / kChunks][i % kChunks];
      piece = make_uint4(0, 0, 0, 0);
      if (i % kChunks < source.valid) {
        piece = *reinterpret_cast<const uint4*>(from + (input + i / kChunks) * input_bytes_ +
                                                i % kChunks * kChunkBytes);
      }
    }
  }

  __device__ __forceinline__ void publish(T* address, float a, float b, bool stored, int row, int input,
                                          int unit) {
    const Pair<T> pair = Pair<T>::of(a, b);
    if (!stored) return;
    *reinterpret_cast<Pair<T>*>(own_ + ((row * kIn + input) * kUnits + unit) * sizeof(T)) = pair;
    *reinterpret_cast<Pair<T>*>(address) = pair;
  }

  // Sends what the block has collected. Each warp has a block, or a share of one, to send to: a warp's
  // packets to one place travel together.
  __device__ __forceinline__ void flush() {
    __syncthreads();
    const int buffer = (step_ + 1) & 1;
    for (int peer = first_peer_; peer < members_; peer += kWarps) {
      const unsigned there = peer_address(peer), bar = there + barrier(buffer),
                     to = there + buffer * buffer_bytes_;
#pragma unroll 4
      for (int i = first_packet_; i < packets_; i += stride_) {
        const int input = i / kPackets % kIn, row = i / kPackets / kIn,
                  byte = first_byte_ + i % kPackets * 16;
        if (byte < input_bytes_) {
          send(*reinterpret_cast<const uint4*>(own_ + i * 16),
               to + row * row_bytes_ + input * input_bytes_ + byte, bar);
        }
      }
    }
  }

 private:
  static constexpr int kWarps = 8;
  static constexpr int kOwnBytes = kRowTile * kIn * kUnits * sizeof(T);
  static constexpr int kPackets = kUnits * sizeof(T) / 16;  // of an input of a row

  __device__ __forceinline__ unsigned peer_address(int peer) const {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_), "r"(peer));
    return there;
  }

  __device__ static void synchronize() {
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" : : : "memory");
  }

  __device__ __forceinline__ int barrier(int buffer) const { return 2 * buffer_bytes_ + 8 * buffer; }

  // One arrival, this one, and the bytes of a step complete a phase.
  __device__ __forceinline__ void expect(int buffer) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(address_ + barrier(buffer)), "r"(step_bytes_)
                 : "memory");
  }

  __device__ __forceinline__ void wait() {
    const int buffer = step_ & 1, parity = (step_ - 1) >> 1 & 1;
    unsigned done = 0;
    for (int looks = 0; !done; ++looks) {
      asm volatile(
          "{\n .reg .pred p;\n"
          " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          " selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address_ + barrier(buffer)), "r"(parity)
          : "memory");
      if (looks == kMaxLooks) give_up();
    }
    if (threadIdx.x == 0) expect(buffer);
  }

  __device__ static __forceinline__ void send(const uint4& packet, unsigned to, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%4], {%0, %1, %2, %3}, [%5];"
        :
        : "r"(packet.x), "r"(packet.y), "r"(packet.z), "r"(packet.w), "r"(to), "r"(barrier)
        : "memory");
  }

  char *const own_, *const buffers_;
  const int input_bytes_, row_bytes_, buffer_bytes_, members_, step_bytes_, packets_, first_byte_;
  const unsigned address_;                  // of the buffers
  int first_peer_, first_packet_, stride_;  // what this thread sends, and to which block
  int step_ = 0;
};

}  // namespace lltm_ext
