#include <ATen/ATen.h>
#include <Python.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

using at::Tensor;

std::tuple<Tensor, Tensor> pointwise_cpu(const Tensor& gates, const Tensor& c) {
  const auto parts = gates.chunk(3, 1);
  const Tensor new_c = c + at::elu(parts[2]) * parts[0].sigmoid();
  return {new_c.tanh() * parts[1].sigmoid(), new_c};
}

TORCH_LIBRARY(lltm_wheel, m) { m.def("pointwise(Tensor gates, Tensor c) -> (Tensor, Tensor)"); }
TORCH_LIBRARY_IMPL(lltm_wheel, CPU, m) { m.impl("pointwise", &pointwise_cpu); }

#ifdef WITH_CUDA
template <typename T>
void launch(const T* gates, const T* c, T* new_h, T* new_c, int64_t n, int64_t hidden, cudaStream_t stream);

std::tuple<Tensor, Tensor> pointwise_cuda(const Tensor& gates, const Tensor& c) {
  TORCH_CHECK(gates.is_contiguous() && c.is_contiguous() && c.dim() == 2 && c.numel() > 0 &&
                  c.device() == gates.device() &&
                  gates.sizes() == at::IntArrayRef({c.size(0), 3 * c.size(1)}),
              "lltm: unexpected shapes or strides");
  const c10::cuda::CUDAGuard guard(gates.device());
  Tensor new_h = at::empty_like(c), new_c = at::empty_like(c);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm", [&] {
    launch(gates.const_data_ptr<scalar_t>(), c.const_data_ptr<scalar_t>(), new_h.mutable_data_ptr<scalar_t>(),
           new_c.mutable_data_ptr<scalar_t>(), c.numel(), c.size(1), c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {new_h, new_c};
}

TORCH_LIBRARY_IMPL(lltm_wheel, CUDA, m) { m.impl("pointwise", &pointwise_cuda); }
#endif

// What `import lltm_wheel._C` calls: an empty module. The ops are registered when the library is loaded.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C"};
  return PyModule_Create(&module);
}
