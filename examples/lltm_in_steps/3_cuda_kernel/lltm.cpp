// Step 3, a CUDA kernel: adds one kernel for all that follows a step's product, and one for its backward.
//
// The mistake that people make here:
//     ImportError: .../lltm_3_cuda_kernel.so: undefined symbol: _Z14launch_forwardIdEvPKT_S2_PS0_S3_ll...
// `c++filt _Z14...` names the function: launch_forward<double>. Cause: nothing defines it. The .cu file is
// not among the sources, does not instantiate the template for double, or declares it otherwise (in a
// namespace, with an int). A shared library links without it; only the import looks for it.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/pybind.h>  // torch/extension.h takes three times as long: it has all of torch.nn

using at::Tensor;

template <typename T>
void launch_forward(const T* gates, const T* c, T* new_h, T* new_c, int64_t batch, int64_t hidden,
                    cudaStream_t stream);
template <typename T>
void launch_backward(const T* grad_h, const T* grad_c, const T* gates, const T* new_c, T* grad_gates,
                     T* grad_old_c, int64_t batch, int64_t hidden, cudaStream_t stream);

// A kernel reads where it is told to: what is not checked here is a wrong value there, or a crash.
void check(const Tensor& x, int64_t rows, int64_t columns) {
  const bool fits = x.is_cuda() && x.is_contiguous() && x.sizes() == at::IntArrayRef({rows, columns});
  TORCH_CHECK(fits && x.numel() > 0, "lltm: expected a CUDA tensor of shape [", rows, ", ", columns, "]");
}

std::tuple<Tensor, Tensor> forward(const Tensor& gates, const Tensor& c) {
  const int64_t batch = c.size(0), hidden = c.size(1);
  check(gates, batch, 3 * hidden);
  check(c, batch, hidden);
  const c10::cuda::CUDAGuard guard(gates.device());  // the tensors' GPU, which need not be the current one
  Tensor new_h = at::empty_like(c), new_c = at::empty_like(c);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm", [&] {
    launch_forward(gates.const_data_ptr<scalar_t>(), c.const_data_ptr<scalar_t>(),
                   new_h.mutable_data_ptr<scalar_t>(), new_c.mutable_data_ptr<scalar_t>(), batch, hidden,
                   c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // otherwise a later call reports the error
  return {new_h, new_c};
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_h, const Tensor& grad_c, const Tensor& gates,
                                    const Tensor& new_c) {
  const int64_t batch = new_c.size(0), hidden = new_c.size(1);
  check(gates, batch, 3 * hidden);
  for (const Tensor& x : {grad_h, grad_c, new_c}) check(x, batch, hidden);
  const c10::cuda::CUDAGuard guard(gates.device());
  Tensor grad_gates = at::empty_like(gates), grad_old_c = at::empty_like(new_c);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm", [&] {
    launch_backward(grad_h.const_data_ptr<scalar_t>(), grad_c.const_data_ptr<scalar_t>(),
                    gates.const_data_ptr<scalar_t>(), new_c.const_data_ptr<scalar_t>(),
                    grad_gates.mutable_data_ptr<scalar_t>(), grad_old_c.mutable_data_ptr<scalar_t>(), batch,
                    hidden, c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {grad_gates, grad_old_c};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
