// Step 7, the persistent kernel: adds one launch for all steps. The weights never change, so they stay in
// registers, and a step reads only h. A warp has one hidden unit for 16 rows of the batch. The blocks of the
// same rows are a group: they exchange h through the L2 cache, and wait for each other at every step.
//
// The mistake that people make here: the program hangs without a message.
// Cause: <<<>>> starts as many blocks as fit. They wait for blocks that start when one of them ends.
// Cure: cudaLaunchCooperativeKernel, which starts all blocks or none. run.py provokes what it says then:
//     CUDA error: too many blocks in cooperative launch
#include <cuda/atomic>

#include "lltm.h"

constexpr int kUnits = 8;  // of a block, one for each warp
constexpr int kThreads = 32 * kUnits;

using Counter = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;

// Says that this block has written its part of a step. The barrier orders all its threads' stores before the
// release, which makes them visible before the count.
__device__ void arrive(unsigned* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) Counter(*arrived).fetch_add(1, cuda::memory_order_release);
}

// Waits until all blocks of the group have written theirs.
__device__ void wait(unsigned* arrived) {
  if (threadIdx.x == 0) {
    while (Counter(*arrived).load(cuda::memory_order_acquire) < gridDim.x) {
    }
  }
  __syncthreads();
}

// Copies the rows of h to shared memory. __ldcg reads from L2: a multiprocessor's L1 does not see what others
// store.
template <int kChunks>
__device__ void load(float4* tile, const float* h, int rows) {
  constexpr int kVectors = 32 * kChunks;  // of a row
  for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
    tile[i] = i < rows * kVectors ? __ldcg(reinterpret_cast<const float4*>(h) + i) : float4{0, 0, 0, 0};
  }
  __syncthreads();
}

// A lane's part of the products of a unit's weights with all rows: it has 4 of every 128 columns.
template <int kChunks>
__device__ void multiply(float (&sums)[kRows], const float4 (&w)[kChunks], const float4* tile) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const float4 x = tile[(row * kChunks + i) * 32 + threadIdx.x % 32];
      sums[row] += w[i].x * x.x + w[i].y * x.y + w[i].z * x.z + w[i].w * x.w;
    }
  }
}

// Adds up the parts of all lanes. Lanes 2 r and 2 r + 1 get the sum of row r: in each round a lane keeps half
// of its rows and gives the others to a lane that keeps those. That takes 16 shuffles; a row after the other
// would take 80. Bounds are constants, so that the array is in registers: hence a template.
template <int kHalf = kRows / 2>
__device__ float sum_over_lanes(float (&sums)[kRows]) {
  if constexpr (kHalf == 0) {
    return sums[0] + __shfl_xor_sync(~0u, sums[0], 1);
  } else {
    const bool keeps_upper = threadIdx.x & (2 * kHalf);
#pragma unroll
    for (int row = 0; row < kHalf; ++row) {
      const float lower = sums[row], upper = sums[row + kHalf];
      const float other = __shfl_xor_sync(~0u, keeps_upper ? lower : upper, 2 * kHalf);
      sums[row] = (keeps_upper ? upper : lower) + other;
    }
    return sum_over_lanes<kHalf / 2>(sums);
  }
}

__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

template <int kChunks>  // H is 128 * kChunks, so that an array in registers can have the weights
__global__ void __launch_bounds__(kThreads) forward_kernel(const Arguments a) {
  constexpr int kHidden = 128 * kChunks;
  extern __shared__ float4 tile[];  // [kRows, H]
  const int lane = threadIdx.x % 32, unit = blockIdx.x * kUnits + threadIdx.x / 32;
  const int first_row = blockIdx.y * kRows, rows = min(kRows, a.batch - first_row);  // the group's
  const int row = lane / 2;  // both lanes compute its cell, and one stores it
  const bool exists = row < rows;
  unsigned* const arrived = a.arrived + int64_t{blockIdx.y} * a.steps;

  float4 w[3][kChunks];
  for (int g = 0; g < 3; ++g) {
    const float4* const from = reinterpret_cast<const float4*>(a.weights + (g * kHidden + unit) * kHidden);
    for (int i = 0; i < kChunks; ++i) w[g][i] = from[32 * i + lane];
  }
  float c = exists ? a.c0[int64_t{first_row + row} * kHidden + unit] : 0;

  for (int t = 0; t < a.steps; ++t) {
    const int64_t first = int64_t{t} * a.batch + first_row, at = (first + row) * kHidden + unit;
    const int64_t gates_at = (first + row) * 3 * kHidden + unit;
    float gates[3] = {};
    for (int g = 0; g < 3 && exists; ++g) gates[g] = a.projection[gates_at + g * kHidden];
    if (t > 0) wait(arrived + t - 1);  // the loads above are on their way meanwhile
    load<kChunks>(tile, t > 0 ? a.output + (first - a.batch) * kHidden : a.h0 + first * kHidden, rows);
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      float sums[kRows] = {};
      multiply(sums, w[g], tile);
      gates[g] += sum_over_lanes(sums);
    }
    c += (gates[2] > 0 ? gates[2] : expm1f(gates[2])) * sigmoid(gates[0]);
    if (exists && lane % 2 == 0) {
      a.output[at] = tanhf(c) * sigmoid(gates[1]);
      a.cells[at] = c;
      for (int g = 0; g < 3; ++g) a.gates[gates_at + g * kHidden] = gates[g];
    }
    arrive(arrived + t);
  }
}

cudaError_t launch_forward(Arguments a, cudaStream_t stream) {
  const dim3 grid(a.hidden / kUnits, (a.batch + kRows - 1) / kRows);
  const auto large = a.hidden == 256 ? forward_kernel<2> : forward_kernel<4>;
  const auto kernel = a.hidden == 128 ? forward_kernel<1> : large;
  void* parameters[] = {&a};
  return cudaLaunchCooperativeKernel(kernel, grid, kThreads, parameters, sizeof(float) * kRows * a.hidden,
                                     stream);
}
