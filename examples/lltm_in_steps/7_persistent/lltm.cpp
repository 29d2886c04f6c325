#include "lltm.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

using at::Tensor;

const float* checked(const Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "lltm: expected contiguous CUDA tensors");
  TORCH_CHECK(x.sizes() == sizes && x.numel() > 0, "lltm: expected shape ", sizes, ", got ", x.sizes());
  const float* const data = x.const_data_ptr<float>();  // raises for another dtype
  TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, "lltm: float4 needs addresses of 16 bytes");
  return data;
}

// As in step 6: h and c of all steps, and the gates.
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& projection, const Tensor& weights, const Tensor& h0,
                                           const Tensor& c0) {
  TORCH_CHECK(projection.dim() == 3 && h0.dim() == 2, "lltm: expected projection [T, B, 3H] and h0 [B, H]");
  const int64_t steps = projection.size(0), batch = projection.size(1), hidden = h0.size(1);
  TORCH_CHECK(hidden == 128 || hidden == 256 || hidden == 512, "lltm: expected H 128, 256 or 512");
  Arguments a = {int(steps), int(batch), int(hidden)};
  a.projection = checked(projection, {steps, batch, 3 * hidden});
  a.weights = checked(weights, {3 * hidden, hidden});
  a.h0 = checked(h0, {batch, hidden});
  a.c0 = checked(c0, {batch, hidden});
  const c10::cuda::CUDAGuard guard(projection.device());
  Tensor output = at::empty({steps, batch, hidden}, projection.options());
  Tensor cells = at::empty_like(output), gates = at::empty_like(projection);
  Tensor arrived = at::zeros({(batch + kRows - 1) / kRows, steps}, projection.options().dtype(at::kInt));
  a.output = output.mutable_data_ptr<float>();
  a.cells = cells.mutable_data_ptr<float>();
  a.gates = gates.mutable_data_ptr<float>();
  a.arrived = reinterpret_cast<unsigned*>(arrived.mutable_data_ptr<int>());
  C10_CUDA_CHECK(launch_forward(a, c10::cuda::getCurrentCUDAStream()));
  return {output, cells, gates};
}

TORCH_LIBRARY(lltm_7, m) {
  m.def("forward(Tensor projection, Tensor weights, Tensor h0, Tensor c0) -> (Tensor, Tensor, Tensor)",
        &forward);
}
