// Step 4, autograd and opcheck: adds the dispatcher. An op that it knows works with torch.compile,
// torch.export and opcheck, and its derivative is registered (run.py) instead of a Function that callers have
// to use.
//
// The mistakes that people make here:
//     NotImplementedError: Could not run 'lltm_4::pointwise' with arguments from the 'CPU' backend.
// Cause: m.def with a schema only declares the op. Cure: m.impl for each device, below.
//     AttributeError: '_OpNamespace' 'lltm_4' object has no attribute 'pointwise'
// Cause: the library has not been loaded, or has another namespace.
//     ImportError: dynamic module does not define module export function (PyInit_lltm_4_autograd)
// Cause: the library has no Python module, which PYBIND11_MODULE would make. Cure: is_python_module=False in
// `load`; step 5 has the other way.
#include <ATen/ATen.h>
#include <torch/library.h>

using at::Tensor;

std::tuple<Tensor, Tensor> pointwise(const Tensor& gates, const Tensor& c) {
  const auto parts = gates.chunk(3, 1);
  const Tensor new_c = c + at::elu(parts[2]) * parts[0].sigmoid();
  return {new_c.tanh() * parts[1].sigmoid(), new_c};
}

std::tuple<Tensor, Tensor> pointwise_backward(const Tensor& grad_h, const Tensor& grad_c, const Tensor& gates,
                                              const Tensor& new_c) {
  const auto parts = gates.chunk(3, 1);
  const Tensor i = parts[0].sigmoid(), o = parts[1].sigmoid(), z = at::elu(parts[2]), tanh_c = new_c.tanh();
  const Tensor grad_cell = grad_c + grad_h * o * (1 - tanh_c * tanh_c);
  const Tensor grad_i = grad_cell * z * i * (1 - i), grad_o = grad_h * tanh_c * o * (1 - o);
  return {at::cat({grad_i, grad_o, grad_cell * i * (1 + z.clamp_max(0))}, 1), grad_cell};
}

TORCH_LIBRARY(lltm_4, m) {
  m.def("pointwise(Tensor gates, Tensor c) -> (Tensor, Tensor)");
  m.def("pointwise_backward(Tensor grad_h, Tensor grad_c, Tensor gates, Tensor new_c) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lltm_4, CPU, m) {
  m.impl("pointwise", &pointwise);
  m.impl("pointwise_backward", &pointwise_backward);
}

// torch's ops run on both devices. The functions of step 3 would be registered in the same way.
TORCH_LIBRARY_IMPL(lltm_4, CUDA, m) {
  m.impl("pointwise", &pointwise);
  m.impl("pointwise_backward", &pointwise_backward);
}
