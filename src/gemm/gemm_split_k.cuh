// Split-K's second kernel: adds the partial sums that blocks left in the workspace, in a fixed order, and
// applies bias and activation.
#pragma once

#include "common/launch.cuh"
#include "gemm/gemm.h"

namespace lltm_ext {

constexpr int kReduceThreads = 256;

// partials [splits, elements of c]. SHARERS warps share the splits of 32 elements.
template <typename T, int SHARERS>
__global__ void __launch_bounds__(kReduceThreads) gemm_reduce_kernel(const GemmArgs<T> args, int splits) {
  using A = acc_t<T>;
  constexpr int kElements = kReduceThreads / SHARERS, kBatch = 8;
  __shared__ A sums[SHARERS][kElements];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t elements = args.batch * args.m * args.n;
  const int in_block = threadIdx.x % kElements, sharer = threadIdx.x / kElements;
  const int64_t element = int64_t{blockIdx.x} * kElements + in_block;
  const A* const partials = static_cast<const A*>(args.workspace) + element;
  A sum = 0;
  for (int first = sharer; first < splits; first += kBatch * SHARERS) {
    A found[kBatch] = {};  // loaded together, to overlap their latencies
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int split = first + i * SHARERS;
      if (split < splits && element < elements) found[i] = partials[split * elements];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += found[i];
  }
  if constexpr (SHARERS > 1) {
    sums[sharer][in_block] = sum;
    __syncthreads();
    if (sharer > 0) return;
#pragma unroll
    for (int i = 1; i < SHARERS; ++i) sum += sums[i][in_block];
  }
  if (element >= elements) return;
  A x[1] = {sum};
  if (args.bias != nullptr) x[0] += widen(args.bias[element % args.n * args.bias_stride]);
  if (args.pre_activation != nullptr) args.pre_activation[element] = narrow<T>(x[0]);
  activate(args.activation, x);
  args.c[element] = narrow<T>(x[0]);
}

template <typename T>
int64_t partial_sum_bytes(const GemmArgs<T>& args, int splits) {
  return splits > 1 ? args.batch * args.m * args.n * splits * int64_t{sizeof(acc_t<T>)} : 0;
}

template <typename T>
cudaError_t launch_reduce(const GemmArgs<T>& args, int splits, bool programmatic, cudaStream_t stream) {
  const auto run = [&](auto sharers) {
    constexpr int kSharers = decltype(sharers)::value;
    const int64_t blocks = ceil_div(args.batch * args.m * args.n, kReduceThreads / kSharers);
    return launch_kernel(gemm_reduce_kernel<T, kSharers>, dim3(static_cast<unsigned>(blocks)),
                         dim3(kReduceThreads), 0, programmatic, stream, args, splits);
  };
  return splits > 8 ? run(std::integral_constant<int, 8>()) : run(std::integral_constant<int, 1>());
}

}  // namespace lltm_ext
