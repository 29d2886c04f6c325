// Step 2, C++: adds a derivative by hand. One call does a step forward, and another one backward. The ops
// are still torch's, so the code runs on the CPU and on the GPU, and launches as many kernels.
//
// The mistakes that people make here:
//     ValueError: too many values to unpack (expected 5)
//     RuntimeError: function LLTMFunctionBackward returned an incorrect number of gradients (expected 5, got
//     6)
// Cause: backward() returns the gradient of the gates too, as the old tutorial's did in C++, and forward()
// has five inputs. Cure: one gradient for each input.
//     RuntimeError: Function LLTMFunctionBackward returned an invalid gradient at index 0 - got [4, 5] but
//     expected shape compatible with [4, 2]
// Cause: another order than the inputs'. If their shapes are equal, there is no message, and training fails
// to learn. Cure: the inputs' order. gradcheck in run.py finds both mistakes, and wrong formulas.
#include <torch/extension.h>

using torch::Tensor;

// Returns the new h and c, and what the backward reads: activated gates instead of gates, because the
// derivatives of sigmoid, tanh and elu are cheapest from their values.
std::vector<Tensor> forward(const Tensor& x, const Tensor& weights, const Tensor& bias, const Tensor& h,
                            const Tensor& c) {
  const Tensor hx = torch::cat({h, x}, 1);
  const auto gates = torch::linear(hx, weights, bias).chunk(3, 1);
  const Tensor i = gates[0].sigmoid(), o = gates[1].sigmoid(), z = torch::elu(gates[2]);
  const Tensor new_c = c + z * i;
  const Tensor tanh_c = new_c.tanh();
  return {tanh_c * o, new_c, hx, i, o, z, tanh_c};
}

// Returns the gradients of x, weights, bias, h and c.
std::vector<Tensor> backward(const Tensor& grad_h, const Tensor& grad_c, const Tensor& weights,
                             const Tensor& hx, const Tensor& i, const Tensor& o, const Tensor& z,
                             const Tensor& tanh_c) {
  // c reaches the loss in two ways: through h, and as the state of the next step.
  const Tensor grad_new_c = grad_c + grad_h * o * (1 - tanh_c * tanh_c);
  const Tensor grad_i = grad_new_c * z * i * (1 - i);
  const Tensor grad_o = grad_h * tanh_c * o * (1 - o);
  const Tensor grad_z = grad_new_c * i * (1 + z.clamp_max(0));  // elu' is 1, or exp = 1 + elu below 0
  const Tensor grad_gates = torch::cat({grad_i, grad_o, grad_z}, 1);
  const Tensor grad_hx = grad_gates.mm(weights);
  const int64_t hidden = grad_h.size(1);
  return {grad_hx.slice(1, hidden), grad_gates.t().mm(hx), grad_gates.sum(0), grad_hx.slice(1, 0, hidden),
          grad_new_c};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
