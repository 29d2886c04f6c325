// Step 6, a fused sequence: adds an op for all steps. The products that do not depend on h, of the input and
// of the weights' gradients, are one large product each (run.py). What is left of a step is one product and
// one kernel, in a loop without Python. Nothing in it waits for the GPU, so a CUDA graph can hold all of it.
//
// The mistake that people make here has no message: the results are right, until the call is on another
// stream, or in a CUDA graph, whose replays then repeat old values.
// Cause: kernel<<<blocks, threads>>> launches on the legacy default stream, and torch's ops run on the
// current one. So the kernel may run before the product has ended, and the graph does not contain it. Cure:
// pass c10::cuda::getCurrentCUDAStream(). run.py compares a replay with step 1.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

using at::Tensor;

template <typename T>
void launch_forward(const T* gates, const T* c, T* new_h, T* new_c, int64_t batch, int64_t hidden,
                    cudaStream_t stream);
template <typename T>
void launch_backward(const T* grad_output, const T* grad_h, const T* gates, const T* new_c, T* grad_gates,
                     T* grad_c, int64_t batch, int64_t hidden, cudaStream_t stream);

template <typename T>
T* data(const Tensor& x) {
  return x.mutable_data_ptr<T>();
}

// The cell of one step. On the CPU torch's ops compute it, so that the loops can be checked without a GPU.
void forward_cell(const Tensor& gates, const Tensor& c, const Tensor& new_h, const Tensor& new_c) {
  if (gates.is_cuda()) {
    AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm", [&] {
      launch_forward(data<scalar_t>(gates), data<scalar_t>(c), data<scalar_t>(new_h), data<scalar_t>(new_c),
                     c.size(0), c.size(1), c10::cuda::getCurrentCUDAStream());
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  const auto parts = gates.chunk(3, 1);
  new_c.copy_(c + at::elu(parts[2]) * parts[0].sigmoid());
  new_h.copy_(new_c.tanh() * parts[1].sigmoid());
}

// h reaches the loss as an output, and through the next step's product. grad_c is updated in place.
void backward_cell(const Tensor& grad_output, const Tensor& grad_h, const Tensor& gates, const Tensor& new_c,
                   const Tensor& grad_gates, const Tensor& grad_c) {
  if (gates.is_cuda()) {
    AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm", [&] {
      launch_backward(data<scalar_t>(grad_output), data<scalar_t>(grad_h), data<scalar_t>(gates),
                      data<scalar_t>(new_c), data<scalar_t>(grad_gates), data<scalar_t>(grad_c),
                      new_c.size(0), new_c.size(1), c10::cuda::getCurrentCUDAStream());
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  const auto parts = gates.chunk(3, 1);
  const Tensor i = parts[0].sigmoid(), o = parts[1].sigmoid(), z = at::elu(parts[2]), tanh_c = new_c.tanh();
  const Tensor grad = grad_output + grad_h;
  grad_c.add_(grad * o * (1 - tanh_c * tanh_c));
  const Tensor grad_i = grad_c * z * i * (1 - i), grad_o = grad * tanh_c * o * (1 - o);
  grad_gates.copy_(at::cat({grad_i, grad_o, grad_c * i * (1 + z.clamp_max(0))}, 1));
}

void check(const Tensor& x, at::IntArrayRef sizes, const Tensor& like) {
  TORCH_CHECK(x.sizes() == sizes && x.numel() > 0, "lltm: expected shape ", sizes, ", got ", x.sizes());
  TORCH_CHECK(x.is_contiguous() && x.device() == like.device() && x.scalar_type() == like.scalar_type(),
              "lltm: expected contiguous tensors of one device and dtype");
}

// projection [T, B, 3H] is what the gates get from the input and the bias, weights [3H, H] multiply h.
// Returns h and c of all steps, and the gates.
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& projection, const Tensor& weights, const Tensor& h0,
                                           const Tensor& c0) {
  const int64_t steps = projection.size(0), batch = projection.size(1), hidden = weights.size(1);
  check(projection, {steps, batch, 3 * hidden}, projection);
  check(weights, {3 * hidden, hidden}, projection);
  for (const Tensor& state : {h0, c0}) check(state, {batch, hidden}, projection);
  const c10::OptionalDeviceGuard guard(projection.device());
  Tensor output = at::empty({steps, batch, hidden}, projection.options());
  Tensor cells = at::empty_like(output), gates = at::empty_like(projection);
  for (int64_t t = 0; t < steps; ++t) {
    Tensor gates_t = gates[t];
    at::addmm_out(gates_t, projection[t], t == 0 ? h0 : output[t - 1], weights.t());
    forward_cell(gates_t, t == 0 ? c0 : cells[t - 1], output[t], cells[t]);
  }
  return {output, cells, gates};
}

// Returns the gradients of the gates of all steps, and of c0.
std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& grad_c, const Tensor& weights,
                                    const Tensor& gates, const Tensor& cells) {
  check(grad_output, cells.sizes(), gates);
  check(grad_c, cells[0].sizes(), gates);
  const c10::OptionalDeviceGuard guard(gates.device());
  Tensor grad_gates = at::empty_like(gates), grad_c0 = grad_c.clone(), grad_h = at::zeros_like(grad_c);
  for (int64_t t = gates.size(0) - 1; t >= 0; --t) {
    backward_cell(grad_output[t], grad_h, gates[t], cells[t], grad_gates[t], grad_c0);
    if (t > 0) at::mm_out(grad_h, grad_gates[t], weights);
  }
  return {grad_gates, grad_c0};
}

TORCH_LIBRARY(lltm_6, m) {
  m.def("forward(Tensor projection, Tensor weights, Tensor h0, Tensor c0) -> (Tensor, Tensor, Tensor)",
        &forward);
  m.def(
      "backward(Tensor grad_output, Tensor grad_c, Tensor weights, Tensor gates, Tensor cells) -> (Tensor, "
      "Tensor)",
      &backward);
}
