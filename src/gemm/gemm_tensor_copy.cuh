// How gemm_tensor.cuh brings slices of its operands to shared memory.
//
// A slice is kept in the operand's own layout: lines along the operand's smaller stride (K_MAJOR: along K),
// cut into chunks of 16 bytes, which are permuted so that what a warp reads at once is in different banks.
//
// cp.async copies 16, 8 or 4 bytes, as the operand is aligned. Half types that are aligned less, e.g. if rows
// have an odd number of elements, or whose neighbours along a line are not adjacent in memory, are copied
// through registers: loaded before some products and stored after them. So are all copies before sm_80.
#pragma once

#include "gemm/gemm_tile.cuh"

namespace lltm_ext {

// What a kernel's copies are compiled for: cp.async of 16 bytes for both operands, cp.async, or any operands.
enum class Copies { kVectors, kAsync, kThroughRegisters };

// How an operand is read.
template <typename T>
struct TensorAccess {
  // A line is cut into aligned pieces of this many elements: 16 bytes or less. 0 if none are adjacent.
  int width;
  const T* end;  // past the operand's last element
};

// row_lines: whether x's lines in memory are along its rows.
template <typename T>
TensorAccess<T> access_of(const Matrices<T>& x, bool row_lines, int64_t batch, int64_t rows,
                          int64_t columns) {
  const int64_t stride = row_lines ? x.column_stride : x.row_stride;
  const int64_t line_stride = row_lines ? x.row_stride : x.column_stride;
  const int64_t batch_stride = batch > 1 ? x.batch_stride : 0;
  const int64_t position = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data) / sizeof(T));
  const int64_t multiples = position | line_stride | batch_stride | (row_lines ? columns : rows);
  int width = stride == 1 ? kVecWidth<T> : 0;
  while (width > 1 && multiples % width != 0) width /= 2;
  return {width, x.data + (batch - 1) * batch_stride + (rows - 1) * x.row_stride +
                     (columns - 1) * x.column_stride + 1};
}

template <typename T, class Tile, bool IS_A, bool K_MAJOR_>
struct Slice {
  static constexpr bool K_MAJOR = K_MAJOR_;
  static constexpr int EXTENT = IS_A ? Tile::BM : Tile::BN, BK = Tile::BK;
  static constexpr int kLines = K_MAJOR ? EXTENT : BK, kLength = K_MAJOR ? BK : EXTENT;
  static constexpr int kPitch = kLength * sizeof(T), kBytes = kLines * kPitch;

  // ldmatrix cannot transpose float32: lanes load its elements, of four lines at once.
  static constexpr bool kByElements = !K_MAJOR && sizeof(T) == 4;

  // Two lines of 64 bytes share a row of banks, so the permutation changes with every other line.
  static __device__ __forceinline__ constexpr int permutation(int line) {
    return kByElements ? line % 4 * 32 : (kPitch == 64 ? line / 2 % 4 : line % 8) * 16;
  }
  // In bytes. From a line to another whose number has other bits, or from a chunk to another, it is the XOR
  // with a constant and the addition of another.
  static __device__ __forceinline__ int at(int line, int element) {
    return line * kPitch + (element * static_cast<int>(sizeof(T)) ^ permutation(line));
  }

  // A warp's fragments of 16 lines by 32 bytes of K, from line `first` on: where this lane reads the first,
  // at k 0. Its four matrices of 8 lines by 16 bytes are in the order of the registers of mma.sync.
  static __device__ __forceinline__ int fragment_at(int first) {
    const int lane = threadIdx.x % 32;
    if constexpr (kByElements) return at(lane % 4, first + lane / 4);
    const int low = lane / 8 % 2, high = lane / 16;
    const int line = first + (IS_A ? low : high) * 8, k = (IS_A ? high : low) * kVecWidth<T>;
    return K_MAJOR ? at(line + lane % 8, k) : at(k + lane % 8, line);
  }
  static __device__ __forceinline__ void load(uint32_t (&fragment)[4], uint32_t address, int block, int k) {
    constexpr int kBlockBytes = 16 * sizeof(T);
    if constexpr (K_MAJOR) {
      ldmatrix<false>(fragment, (address ^ k * static_cast<int>(sizeof(T))) + block * 16 * kPitch);
    } else if constexpr (kByElements) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = i % 2, high = i / 2, line = IS_A ? low : high, four_k = IS_A ? high : low;
        fragment[i] = ld_shared((address ^ (block * kBlockBytes + line * 32)) + (k + four_k * 4) * kPitch);
      }
    } else {
      ldmatrix<true>(fragment, (address ^ block * kBlockBytes) + k * kPitch);
    }
  }
};

// A thread's share of the copies of an operand's slices, one slice after the other. A slice is copied in
// kParts parts. Each is started, and finished some time later. depth: how much of K the slice has; the rest
// becomes zeros. Lines or chunks beyond the operand's extent become zeros, too, or anything: sums of them are
// never stored.
template <typename T, class Tile, class Slice, Copies COPIES>
class SliceCopies {
  static constexpr bool K_MAJOR = Slice::K_MAJOR, kThroughRegisters = COPIES == Copies::kThroughRegisters;
  static constexpr int BK = Tile::BK, kParts = Tile::kParts, V = kVecWidth<T>, kLeast = 4 / sizeof(T);

  // How many lines are between this thread's pieces of `width` elements, and how many pieces are in a part.
  static __device__ __forceinline__ constexpr int step(int width) {
    return Tile::kThreads * width / Slice::kLength;
  }
  static constexpr int pieces(int width) { return Slice::kLines / step(width) / kParts; }
  static constexpr int kHeld = kThroughRegisters ? pieces(V) : 1;
  static_assert(Tile::kThreads % (Slice::kLength / kLeast) == 0 && pieces(V) > 0);
  static_assert((step(V) & (step(V) - 1)) == 0,
                "so that lines of a thread differ in other bits than threads'");
  static_assert(!kThroughRegisters || sizeof(T) == 2);

 public:
  __device__ __forceinline__ SliceCopies(const OperandTile<T>& x, const T* begin,
                                         const TensorAccess<T>& access)
      : begin_(begin), end_(access.end), width_(COPIES == Copies::kVectors ? V : access.width) {
    const int width = kThroughRegisters ? V
                      : width_ < kLeast ? kLeast
                                        : width_,
              per_line = Slice::kLength / width;
    const int line = threadIdx.x / per_line, element = threadIdx.x % per_line * width;
    const int64_t line_stride = K_MAJOR ? x.stride : x.k_stride;
    stride_ = K_MAJOR ? x.k_stride : x.stride;
    from_ = x.data + line * line_stride + element * stride_;
    step_ = step(width) * line_stride;
    next_slice_ = K_MAJOR ? BK * stride_ - Slice::kLines / step(width) * step_ : 0;
    to_ = Slice::at(line, element);
    k_ = K_MAJOR ? element : line;
    extent_ = x.extent - (K_MAJOR ? line : element);
    if (kThroughRegisters && width_ > 0) {
      shift_ = static_cast<int>(reinterpret_cast<uintptr_t>(from_) / sizeof(T) % 8);
      from_ -= shift_;
    }
    keep_in_register(to_);
    if (COPIES == Copies::kVectors) {  // the others have no registers left
      keep_in_register(k_);
      keep_in_register(extent_);
    }
  }

  __device__ __forceinline__ void start(int part, uint32_t slice, int depth) {
    if (depth == 0) return;
    if constexpr (kThroughRegisters) {
      load(part, depth);
    } else if (COPIES == Copies::kVectors || width_ == V) {
      copy<V>(part, slice, depth);
    } else if (width_ == V / 2) {
      copy<V / 2>(part, slice, depth);
    } else {
      copy<V / 4>(part, slice, depth);
    }
    if (part == kParts - 1) from_ += next_slice_;
  }

  __device__ __forceinline__ void finish(int part, uint32_t slice, int depth) {
    if constexpr (kThroughRegisters) {
      if (depth == 0) return;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        st_shared(slice + to_ + (part * kHeld + i) * step(8) * Slice::kPitch,
                  is_window_[i] ? window(held_[i]) : packed(held_[i]));
      }
    }
  }

 private:
  template <int WIDTH>
  __device__ __forceinline__ void copy(int part, uint32_t slice, int depth) {
    constexpr int kStep = step(WIDTH), kPieces = pieces(WIDTH), kBytes = WIDTH * sizeof(T);
    const int length = K_MAJOR ? depth - k_ : extent_;
    const int lines = length <= 0 ? 0 : K_MAJOR ? extent_ : depth - k_;
#pragma unroll
    for (int i = 0; i < kPieces; ++i, from_ += step_) {
      const int line = (part * kPieces + i) * kStep;
      cp_async<kBytes>((slice + to_ ^ Slice::permutation(line)) + line * Slice::kPitch, from_,
                       line < lines ? kBytes : 0);
    }
  }

  // Loads 8 elements of each of kHeld lines: as part of a window, i.e. of two aligned vectors, if that is
  // inside the operand, or one by one.
  __device__ __forceinline__ void load(int part, int depth) {
    const int lines = (K_MAJOR ? extent_ : depth - k_) - part * kHeld * step(8);
    const int length = K_MAJOR ? depth - k_ : extent_;
#pragma unroll
    for (int i = 0; i < kHeld; ++i, from_ += step_) {
      const int valid = i * step(8) < lines ? length : 0;
      is_window_[i] =
          width_ > 0 && depth == BK && valid > 0 && from_ >= begin_ && from_ + (shift_ > 0 ? 16 : 8) <= end_;
      uint32_t (&x)[8] = held_[i];
      if (is_window_[i]) {
        const uint4* const vectors = reinterpret_cast<const uint4*>(from_);
        const uint4 low = __ldg(vectors), high = shift_ > 0 ? __ldg(vectors + 1) : uint4{};
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
      } else {
        const auto* const elements = reinterpret_cast<const uint16_t*>(from_ + shift_);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = j < valid ? __ldg(elements + j * stride_) : 0;
      }
    }
  }

  // 8 of a window's 16 elements, from element shift_ on.
  __device__ __forceinline__ uint4 window(uint32_t (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 6; ++i) x[i] = shift_ & 4 ? x[i + 2] : x[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) x[i] = shift_ & 2 ? x[i + 1] : x[i];
    const auto pair = [&](int i) { return __funnelshift_r(x[i], x[i + 1], shift_ % 2 * 16); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }

  static __device__ __forceinline__ uint4 packed(const uint32_t (&x)[8]) {
    const auto pair = [&](int i) { return __byte_perm(x[2 * i], x[2 * i + 1], 0x5410); };
    return {pair(0), pair(1), pair(2), pair(3)};
  }

  const T* from_;  // this thread's next piece
  const T *begin_, *end_;
  int64_t stride_, step_, next_slice_;
  int to_, k_, extent_;  // extent_, and depth less k_, count from this thread's first element
  int width_, shift_ = 0;
  uint32_t held_[kHeld][8];
  bool is_window_[kHeld];
};

}  // namespace lltm_ext
