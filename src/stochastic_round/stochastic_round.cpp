// stochastic_round: the binding. Dispatcher op lltm_ext::stochastic_round; raw bindings
// lltm_ext._C.stochastic_round.forward and backward.
#include "stochastic_round/stochastic_round.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_like.h>

#include <mutex>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/python.h"

#ifdef LLTM_EXT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#endif

namespace lltm_ext {
namespace {

using OptionalGenerator = std::optional<at::Generator>;

void check(const char* op, const at::Tensor& input, at::ScalarType dtype) {
  check_device(op, "input", input);
  check_same_dtype(op, "input", input, at::kFloat);
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16, op,
                   ": expected dtype float16 or bfloat16, got ", c10::getDtypeNames(dtype).first);
}

// Advances the generator, and returns its state before.
PhiloxState next_state(const OptionalGenerator& generator, const at::Tensor& input) {
#ifdef LLTM_EXT_WITH_CUDA
  if (input.is_cuda()) {
    auto* const cuda_generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        generator, at::cuda::detail::getDefaultCUDAGenerator(input.get_device()));
    const std::lock_guard<std::mutex> lock(cuda_generator->mutex_);
    // Each group of elements takes 4 words from its own stream.
    const at::PhiloxCudaState state = cuda_generator->philox_cuda_state(4);
    if (state.captured_) return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
    return {state.seed_.val, state.offset_.val, nullptr, nullptr};
  }
#endif
  auto* const cpu_generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(cpu_generator->mutex_);
  return {cpu_generator->random64(), 0, nullptr, nullptr};
}

template <typename Half, typename BFloat16, typename... Stream>
auto run(const at::Tensor& output, const at::Tensor& input, const PhiloxState& state, Stream... stream) {
  const auto run_as = [&](auto* elements, auto round) {
    return stochastic_round(pointer<float>(input), elements, input.numel(), state, round, stream...);
  };
  return output.scalar_type() == at::kHalf ? run_as(mutable_pointer<Half>(output), RoundToFloat16())
                                           : run_as(mutable_pointer<BFloat16>(output), RoundToBFloat16());
}

at::Tensor forward(const at::Tensor& input, at::ScalarType dtype, const OptionalGenerator& generator) {
  constexpr const char* kOp = "stochastic_round";
  check(kOp, input, dtype);
  const KernelGuard guard(input);
  at::Tensor output = at::empty_like(input, input.options().dtype(dtype));
  if (output.is_meta()) return output;
  TORCH_CHECK(!generator || !generator->defined() || generator->device().type() == input.device().type(), kOp,
              ": expected a generator on ", input.device(), ", got one on ", generator->device());
  if (output.numel() == 0) return output;
  const at::Tensor x = input.strides() == output.strides()
                           ? input
                           : at::empty_like(output, output.options().dtype(at::kFloat)).copy_(input);
  const PhiloxState state = next_state(generator, input);
#ifdef LLTM_EXT_WITH_CUDA
  if (x.is_cuda()) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
    check_launch(kOp, run<__half, __nv_bfloat16>(output, x, state, stream));
    return output;
  }
#endif
  run<at::Half, at::BFloat16>(output, x, state);
  return output;
}

// The op is straight-through: its gradient is the incoming one in float32.
struct Node : torch::autograd::Function<Node> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input, at::ScalarType dtype,
                            const OptionalGenerator& generator) {
    return call_below_autograd<lltm_ext::forward>("lltm_ext::stochastic_round", input, dtype, generator);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grad_outputs) {
    return {grad_outputs[0].to(at::kFloat), at::Tensor(), at::Tensor()};
  }
};

at::Tensor forward_autograd(const at::Tensor& input, at::ScalarType dtype,
                            const OptionalGenerator& generator) {
  if (any_needs_grad(input)) return Node::apply(input, dtype, generator);
  return call_below_autograd<forward>("lltm_ext::stochastic_round", input, dtype, generator);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  m.def("stochastic_round(Tensor input, ScalarType dtype, *, Generator? generator=None) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  implement<forward>(m, "stochastic_round");
  implement_autograd(m, "stochastic_round", forward_autograd);
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward",
        torch::wrap_pybind_function_no_gil(
            [](const at::Tensor& input, at::ScalarType dtype, const OptionalGenerator& generator) {
              check("stochastic_round.forward", input, dtype);
              CHECK_CONTIGUOUS("stochastic_round.forward", input);
              return forward(input, dtype, generator);
            }),
        py::arg("input"), py::arg("dtype"), py::arg("generator") = py::none());
  m.def("backward", torch::wrap_pybind_function_no_gil([](const at::Tensor& grad_output) {
          CHECK_INPUT("stochastic_round.backward", grad_output);
          const KernelGuard guard(grad_output);
          return grad_output.to(at::kFloat);
        }),
        py::arg("grad_output"));
}
#endif

}  // namespace lltm_ext
