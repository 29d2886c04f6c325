// Elementwise ops on tensors: from any shapes and strides to a call of the engines. Only their interface is
// included here.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>

#include <array>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/elementwise_call.h"

namespace lltm_ext {

// The engines, elementwise.cuh and elementwise_cpu.h. An op instantiates them for its functors.
template <template <typename> class F, typename T, int K>
void run_elementwise(const F<T>& f, const ElementwiseCall<K, 1>& call);
#ifdef LLTM_EXT_WITH_CUDA
template <template <typename> class F, typename T, int K>
cudaError_t launch_elementwise(const F<T>& f, const ElementwiseCall<K, 1>& call, cudaStream_t stream);
#endif

// The memory of the operands of a call, merged into as few dimensions as possible: one, if all are dense and
// in the same order.
template <int K>
class Operands {
 public:
  Operands(const char* op, const at::Tensor& output, const std::array<at::Tensor, K>& inputs) {
    check_memory(op, "output", output);  // a Python mode may replace what a call below it allocates
    bool flat = output.is_non_overlapping_and_dense();
    for (const at::Tensor& x : inputs) {
      flat = flat && x.sizes() == output.sizes() && x.strides() == output.strides();
      TORCH_CHECK(
          !output.is_alias_of(x) || at::get_overlap_status(output, x) != at::MemOverlapStatus::Partial, op,
          ": expected out to share all of its memory with an input or none, got a part");
    }
    call_.n = output.numel();
    call_.strides = nullptr;
    if (!flat) {
      take_strides(op, output, inputs);
    } else {
      call_.outputs[0] = output.mutable_data_ptr();
      for (int k = 0; k < K; ++k) call_.inputs[k] = inputs[k].const_data_ptr();
    }
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  const ElementwiseCall<K, 1>& call() const { return call_; }

 private:
  void take_strides(const char* op, const at::Tensor& output, const std::array<at::Tensor, K>& inputs) {
    at::TensorIteratorConfig config;
    config.resize_outputs(false).check_all_same_dtype(false).add_output(output);
    for (const at::Tensor& x : inputs) config.add_const_input(x);
    const at::TensorIterator iterator = config.build();
    TORCH_CHECK(iterator.ndim() <= kMaxDims, op, ": expected operands of at most ", kMaxDims,
                " dimensions that cannot be merged, got ", iterator.ndim());
    call_.strides = &strides_;
    call_.outputs[0] = iterator.data_ptr(0);
    for (int k = 0; k < K; ++k) call_.inputs[k] = iterator.data_ptr(k + 1);
    strides_.dims = iterator.ndim();
    for (int d = 0; d < iterator.ndim(); ++d) {
      strides_.sizes[d] = iterator.shape()[d];
      for (int p = 0; p <= K; ++p) strides_.of[p][d] = iterator.strides(p)[d] / iterator.element_size(p);
    }
  }

  ElementwiseCall<K, 1> call_;
  Strides<K + 1> strides_;
};

template <typename T, typename P>
auto parameter_for(P x) {
  if constexpr (std::is_floating_point_v<P>) {
    return static_cast<acc_t<T>>(x);
  } else {
    return x;
  }
}

// output = f(inputs...) with the functor F<T>{parameters...}. Inputs are broadcast to the output's sizes.
template <template <typename> class F, int K, bool kComplex = false, typename... P>
void elementwise(const char* op, const at::Tensor& output, const std::array<at::Tensor, K>& inputs,
                 P... parameters) {
  if (output.is_meta() || output.numel() == 0) return;
  const Operands<K> operands(op, output, inputs);
  launch<kComplex>(op, output, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    const F<T> f = {parameter_for<T>(parameters)...};
    if constexpr (sizeof...(stream) > 0) {
      return launch_elementwise(f, operands.call(), stream...);
    } else {
      return run_elementwise(f, operands.call());
    }
  });
}

}  // namespace lltm_ext
