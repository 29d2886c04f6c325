// lltm on CUDA: the products of a step of few units, each step's in one launch. There the device takes less
// time than the host does for a call of a library, and forward the cell comes with the product.
//
// All products are of tiles of 16 x 48 through shared memory. Forward, the 48 are three times 16, the gates
// of 16 units: a thread sums the three gates of its unit, and so has what the cell wants. Four groups of
// threads share out the length of the products, since it is their latency that counts.
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "lltm/lltm.h"

namespace lltm_ext {

constexpr int kM = 16, kColumns = 16, kN = 3 * kColumns;
constexpr int kRows = 2;                                      // of a thread
constexpr int kOfGroup = kM / kRows * kColumns, kGroups = 4;  // threads, and groups of a block

// What a thread of a group sums: two rows, and column, column + 16 and column + 32. Neighbours have
// neighbouring rows.
struct Place {
  int row = threadIdx.x % (kM / kRows) * kRows, column = threadIdx.x / (kM / kRows), group = threadIdx.y;
};

// A group's slices of two factors.
template <typename A>
struct Slices {
  static constexpr int kK = 128 / sizeof(A);
  Vec<A, kRows> m[kK][kM / kRows + 1];
  A n[kK][kN + 1];
};
// Those of the block, the same for all products of a kernel.
template <typename A>
__device__ __forceinline__ Slices<A> (&slices_of_block()) [kGroups] {
  __shared__ Slices<A> slices[kGroups];
  return slices;
}

// A factor of a product: load(k, i) gives its value for row or column i of the tile, and 0 outside.
// kAlongK: whether neighbours along k are neighbours in memory.
template <typename A, int kSize, bool kAlongK, class Load>
struct Factor {
  static constexpr int kK = Slices<A>::kK, kOfThread = kK * kSize / kOfGroup;
  Load load;
  A values[kOfThread];

  __device__ static int2 place(int i) {
    i = i * kOfGroup + threadIdx.x;
    return kAlongK ? make_int2(i % kK, i / kK) : make_int2(i / kSize, i % kSize);
  }
  __device__ __forceinline__ void fetch(int k) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) values[i] = load(k + place(i).x, place(i).y);
  }
  __device__ __forceinline__ void put(Vec<A, kRows> (&slice)[kK][kM / kRows + 1]) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int row = place(i).y;
      slice[place(i).x][row / kRows].data[row % kRows] = values[i];
    }
  }
  __device__ __forceinline__ void put(A (&slice)[kK][kN + 1]) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) slice[place(i).x][place(i).y] = values[i];
  }
};
template <typename A, int kSize, bool kAlongK, class Load>
__device__ __forceinline__ Factor<A, kSize, kAlongK, Load> factor(Load load) {
  return {load, {}};
}

// The sums over all groups, in their order, for the first of them, whose threads get true.
template <typename A>
__device__ __forceinline__ bool sum_groups(const Place& place, void* shared, A (&sum)[kRows][3]) {
  auto parts = static_cast<A(*)[kRows * 3][kOfGroup]>(shared);
  for (int i = 0; i < kRows * 3 && place.group > 0; ++i) {
    parts[place.group - 1][i][threadIdx.x] = sum[i / 3][i % 3];
  }
  __syncthreads();
  if (place.group > 0) return false;
  for (int i = 0; i < kRows * 3; ++i) {
    for (int group = 1; group < kGroups; ++group) sum[i / 3][i % 3] += parts[group - 1][i][threadIdx.x];
  }
  return true;
}

// The products over `length` of k, for the threads that get true.
template <typename A, class M, class N>
__device__ __forceinline__ bool multiply(M m, N n, int length, A (&sum)[kRows][3]) {
  constexpr int kK = Slices<A>::kK;
  Slices<A>(&slices)[kGroups] = slices_of_block<A>();
  static_assert(sizeof(A[kGroups - 1][kRows * 3][kOfGroup]) <= sizeof(slices));
  const Place place;
  auto& [m_slice, n_slice] = slices[place.group];
  for (int k = 0; k < length + kK * kGroups; k += kK * kGroups) {
    if (k < length) {  // on their way during the products of the slices before
      m.fetch(k + kK * place.group);
      n.fetch(k + kK * place.group);
    }
#pragma unroll 8
    for (int i = 0; i < kK && k > 0; ++i) {
      const Vec<A, kRows> rows = m_slice[i][place.row / kRows];
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        const A column = n_slice[i][c * kColumns + place.column];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][c] += rows.data[r] * column;
      }
    }
    __syncthreads();
    if (k < length) {
      m.put(m_slice);
      n.put(n_slice);
    }
    __syncthreads();
  }
  return sum_groups(place, slices, sum);
}

// Tiles of 16 rows and 16 units.
template <typename T, typename C>
__global__ void __launch_bounds__(kOfGroup* kGroups)
    lltm_whole_forward_kernel(const WholeForward<T, C> step) {
  using A = acc_t<T>;
  const int batch = static_cast<int>(step.units.batch), hidden = step.X.hidden;
  const int tiles = static_cast<int>(ceil_div(hidden, kColumns));
  const int first = blockIdx.x % tiles * kColumns, row = blockIdx.x / tiles * kM;
  const auto rows = factor<A, kM, true>(
      [&](int k, int i) { return row + i < batch && k < step.X.columns ? step.X.at(row + i, k) : A(0); });
  const auto weights = factor<A, kN, true>([&](int k, int i) {
    const int unit = first + i % kColumns, gate = i / kColumns * hidden + unit;
    return unit < hidden && k < step.X.columns ? widen(step.weights[gate * step.weights_row + k]) : A(0);
  });
  A gates[kRows][3] = {};
  if (!multiply(rows, weights, step.X.columns, gates)) return;
  const Place place;
  const int unit = first + place.column;
  if (unit >= hidden) return;
  A bias[3] = {};
  for (int g = 0; g < 3 && step.bias; ++g) bias[g] = widen(step.bias[g * hidden + unit]);
  // The code of the cell once: the sums move up instead.
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const int b = row + place.row + r;
    if (b >= batch) return;
    for (int g = 0; g < 3; ++g) gates[0][g] += bias[g];
    lltm_unit_of_gates<ExactMath>(step.units, b, unit, gates[0]);
    for (int g = 0; g < 3; ++g) gates[0][g] = gates[1][g];
  }
}

// grad_weights, of tiles of 48 gates and 16 columns.
template <typename T>
__device__ __forceinline__ void grad_weights_tile(const BackwardProducts<T>& step, int tile) {
  using A = acc_t<T>;
  const int gates = 3 * step.X.hidden, tiles = static_cast<int>(ceil_div(gates, kN));
  const int first = tile % tiles * kN, column = tile / tiles * kM;
  const auto columns = factor<A, kM, false>([&](int b, int i) {
    return b < step.batch && column + i < step.X.columns ? step.X.at(b, column + i) : A(0);
  });
  const auto grad_gates = factor<A, kN, false>([&](int b, int i) {
    return b < step.batch && first + i < gates ? widen(step.grad_gates[b * gates + first + i]) : A(0);
  });
  A sum[kRows][3] = {};
  if (!multiply(columns, grad_gates, step.batch, sum)) return;
  const Place place;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const int gate = first + c * kColumns + place.column;
    T* to = step.grad_weights + gate * step.X.columns;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = column + place.row + r;
      if (gate < gates && at < step.X.columns) to[at] = narrow<T>(sum[r][c]);
    }
  }
}

// grad_old_h and grad_input, of tiles of 16 rows and 48 of the columns from `begin` to `end`.
template <typename T>
__device__ __forceinline__ void grad_input_tile(const BackwardProducts<T>& step, int begin, int end,
                                                int tile) {
  using A = acc_t<T>;
  const int hidden = step.X.hidden, gates = 3 * hidden, tiles = static_cast<int>(ceil_div(end - begin, kN));
  const int column = begin + tile % tiles * kN, row = tile / tiles * kM;
  const auto grad_gates = factor<A, kM, true>([&](int k, int i) {
    return row + i < step.batch && k < gates ? widen(step.grad_gates[(row + i) * gates + k]) : A(0);
  });
  const auto weights = factor<A, kN, false>([&](int k, int i) {
    return k < gates && column + i < end ? widen(step.weights[k * step.weights_row + column + i]) : A(0);
  });
  A sum[kRows][3] = {};
  if (!multiply(grad_gates, weights, gates, sum)) return;
  const Place place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int b = row + place.row + r;
    if (b >= step.batch) return;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const int at = column + c * kColumns + place.column;
      if (at >= end) continue;
      T* to = at < hidden ? step.grad_old_h + b * hidden + at
                          : step.grad_input + b * (step.X.columns - hidden) + at - hidden;
      *to = narrow<T>(sum[r][c]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kOfGroup* kGroups)
    lltm_backward_products_kernel(const BackwardProducts<T> step, int of_weights, int begin, int end) {
  const int tile = static_cast<int>(blockIdx.x);
  if (tile < of_weights) {
    grad_weights_tile(step, tile);
  } else {
    grad_input_tile(step, begin, end, tile - of_weights);
  }
}

template <typename T, typename C>
cudaError_t lltm_whole_forward(const WholeForward<T, C>& step, cudaStream_t stream) {
  const int64_t blocks = ceil_div(step.units.batch, kM) * ceil_div(step.X.hidden, kColumns);
  lltm_whole_forward_kernel<<<static_cast<unsigned>(blocks), dim3(kOfGroup, kGroups), 0, stream>>>(step);
  return cudaGetLastError();
}

template <typename T>
cudaError_t lltm_backward_products(const BackwardProducts<T>& step, cudaStream_t stream) {
  const int begin = step.grad_old_h ? 0 : step.X.hidden,
            end = step.grad_input ? step.X.columns : step.X.hidden;
  const int64_t of_weights = ceil_div(3 * step.X.hidden, kN) * ceil_div(step.X.columns, kM);
  const int64_t of_input = begin < end ? ceil_div(step.batch, kM) * ceil_div(end - begin, kN) : 0;
  lltm_backward_products_kernel<<<static_cast<unsigned>(of_weights + of_input), dim3(kOfGroup, kGroups), 0,
                                  stream>>>(step, static_cast<int>(of_weights), begin, end);
  return cudaGetLastError();
}

#define INSTANTIATE(T, C) template cudaError_t lltm_whole_forward(const WholeForward<T, C>&, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(__half, __half)
INSTANTIATE(__half, float)
INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
INSTANTIATE(__nv_bfloat16, float)
#undef INSTANTIATE
#define INSTANTIATE(T) template cudaError_t lltm_backward_products(const BackwardProducts<T>&, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(__half)
INSTANTIATE(__nv_bfloat16)

}  // namespace lltm_ext
