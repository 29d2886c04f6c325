// scan: the binding. Dispatcher ops lltm_ext::scan and scan_backward; raw bindings lltm_ext._C.scan.forward
// and backward.
#include "scan/scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/optional_tensor.h"
#include "common/python.h"

namespace lltm_ext {
namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// ---- Checks

bool broadcasts_to(c10::SymIntArrayRef sizes, c10::SymIntArrayRef to) {
  if (sizes.size() > to.size()) return false;
  const size_t more = to.size() - sizes.size();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && sizes[d] != to[more + d]) return false;
  }
  return true;
}

bool is_complex(const Tensor& x) {
  return x.scalar_type() == at::kComplexFloat || x.scalar_type() == at::kComplexDouble;
}

void check_coefficient(const char* op, const Tensor& a, const Tensor& like) {
  check_same_device(op, "a", a, like);
  const bool half = like.scalar_type() == at::kHalf || like.scalar_type() == at::kBFloat16;
  if (!half || a.scalar_type() != at::kFloat) check_same_dtype(op, "a", a, like.scalar_type());
}

void check_initial(const char* op, const OptionalTensor& initial, const Tensor& like,
                   c10::SymIntArrayRef steps) {
  if (!initial) return;
  check_same_device(op, "initial", *initial, like);
  check_same_dtype(op, "initial", *initial, like.scalar_type());
  const c10::SymIntArrayRef step = steps.slice(1);
  TORCH_CHECK(broadcasts_to(initial->sym_sizes(), step), op,
              ": expected initial of a shape that broadcasts to a step, ", step, ", got ",
              initial->sym_sizes());
}

// Its dimensions are the first ones of the steps.
void check_reset(const char* op, const OptionalTensor& reset, const Tensor& like, c10::SymIntArrayRef steps) {
  if (!reset) return;
  check_same_device(op, "reset", *reset, like);
  check_same_dtype(op, "reset", *reset, at::kBool);
  const c10::SymIntArrayRef sizes = reset->sym_sizes();
  TORCH_CHECK(
      0 < sizes.size() && sizes.size() <= steps.size() && broadcasts_to(sizes, steps.slice(0, sizes.size())),
      op, ": expected reset of shape [T], [T, B] and so on, where the steps have ", steps, ", got ", sizes);
}

// The sizes of all steps: a and b, broadcast against each other.
c10::SymDimVector check_steps(const char* op, const Tensor& a, const Tensor& b) {
  check_device(op, "b", b);
  check_type(op, "b", b, Types::kFloatingOrComplex);
  check_coefficient(op, a, b);
  const c10::SymIntArrayRef of_a = a.sym_sizes(), of_b = b.sym_sizes();
  TORCH_CHECK(of_a.size() > 0 || of_b.size() > 0, op,
              ": expected a or b with a first dimension, which is time, got two numbers");
  c10::SymDimVector least(std::max(of_a.size(), of_b.size()), c10::SymInt(1));
  for (size_t d = 0; d < least.size(); ++d) {
    for (const c10::SymIntArrayRef sizes : {of_a, of_b}) {
      const size_t missing = least.size() - sizes.size();
      if (d >= missing && sizes[d - missing] != 1) least[d] = sizes[d - missing];
    }
  }
  TORCH_CHECK(broadcasts_to(of_a, least) && broadcasts_to(of_b, least), op,
              ": expected a and b of shapes that broadcast, got ", of_a, " and ", of_b);
  return least;
}

// ---- From tensors to the kernels' arguments

// Tensors as operands over the channels of a step, whose dimensions are merged where all strides allow it.
class Operands {
 public:
  // layout: the tensor of all steps whose fastest dimension the channels have too.
  Operands(const Tensor& layout, bool reverse) : sizes_(layout.sizes().vec()), reverse_(reverse) {
    for (int64_t d = 1; d < layout.dim(); ++d) order_.push_back(d);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t p, int64_t q) { return layout.stride(p) > layout.stride(q); });
  }

  // Adds a tensor that broadcasts to the steps by its last dimensions or, if `leading`, by its first ones.
  // Undefined ones are not added.
  void add(const Tensor& x, bool leading = false) {
    if (x.defined()) added_.push_back(strides_of(x, leading ? 0 : dim() - x.dim()));
  }

  // Whether the channels have few enough dimensions. To be called after the last `add`.
  bool merge() {
    for (const int64_t d : order_) {
      if (sizes_[d] == 1) continue;
      const bool continues =
          !dims_.empty() && std::all_of(added_.begin(), added_.end(), [&](const auto& strides) {
            return strides[dims_.back()] == strides[d] * sizes_[d];
          });
      if (continues) {
        merged_.back() *= sizes_[d];
        dims_.back() = d;
      } else {
        merged_.push_back(sizes_[d]);
        dims_.push_back(d);
      }
    }
    return merged_.size() <= kScanDims;
  }

  ScanChannels channels() const {
    ScanChannels channels;
    channels.dims = static_cast<int>(merged_.size());
    for (int d = 0; d < channels.dims; ++d) {
      channels.sizes[d] = Divisor(merged_[d]);
      channels.count *= merged_[d];
    }
    return channels;
  }

  // P: an element type, const for inputs.
  template <typename P>
  ScanOperand<P> operand(const Tensor& x, bool leading = false) const {
    ScanOperand<P> operand;
    if (!x.defined()) return operand;
    if constexpr (std::is_const_v<P>) {
      operand.data = pointer<std::remove_const_t<P>>(x);
    } else {
      operand.data = mutable_pointer<P>(x);
    }
    const auto strides = strides_of(x, leading ? 0 : dim() - x.dim());
    for (size_t d = 0; d < dims_.size(); ++d) operand.strides[d] = strides[dims_[d]];
    operand.step = reverse_ ? -strides[0] : strides[0];
    if (reverse_) operand.data += (sizes_[0] - 1) * strides[0];
    return operand;
  }

 private:
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }

  std::vector<int64_t> strides_of(const Tensor& x, int64_t first_dim) const {
    std::vector<int64_t> strides(sizes_.size(), 0);
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (x.size(d) != 1) strides[first_dim + d] = x.stride(d);
    }
    return strides;
  }

  std::vector<int64_t> sizes_, order_;
  bool reverse_;
  std::vector<std::vector<int64_t>> added_;  // strides
  std::vector<int64_t> merged_, dims_;       // sizes, and the fastest dimension of each
};

// Contiguous copies, in which all dimensions merge.
Tensor contiguous_copy(const Tensor& x, at::IntArrayRef sizes) {
  return at::empty(sizes, x.options()).copy_(x);
}
OptionalTensor contiguous_copy(const OptionalTensor& x, at::IntArrayRef sizes, bool leading = false) {
  if (!x) return x;
  Tensor aligned = *x;
  while (leading && aligned.dim() < static_cast<int64_t>(sizes.size())) {
    aligned = aligned.unsqueeze(aligned.dim());
  }
  return contiguous_copy(aligned, sizes);
}

// Calls f(Type<C>{}) with the type of a; T is that of the other tensors.
template <typename T, typename F>
auto with_coefficient(const Tensor& a, F&& f) {
  if constexpr (sizeof(T) == 2) {
    if (a.scalar_type() == at::kFloat) return f(Type<float>{});
  }
  return f(Type<T>{});
}

template <class Scan>
void run_on(const Tensor&, const Scan& scan) {
  run_scan(scan);
}
#ifdef LLTM_EXT_WITH_CUDA
template <class Scan>
cudaError_t run_on(const Tensor& like, const Scan& scan, cudaStream_t stream) {
  int64_t bytes = 0;
  const cudaError_t error = scan_workspace_bytes(scan, bytes);
  if (error != cudaSuccess) return error;
  const Tensor workspace = at::empty({bytes}, like.options().dtype(at::kByte));
  return run_scan(scan, workspace.mutable_data_ptr(), stream);
}
#endif

// ---- Forward

bool has_nothing_to_compute(const Tensor& x) { return x.is_meta() || x.numel() == 0; }

Tensor empty_steps(const Tensor& a, const Tensor& b, c10::SymIntArrayRef sizes) {
  if (b.sym_sizes().equals(sizes)) return at::empty_like(b);
  if (a.sym_sizes().equals(sizes) && a.scalar_type() == b.scalar_type()) return at::empty_like(a);
  return at::empty_symint(sizes, b.options());
}

Tensor forward(const Tensor& a, const Tensor& b, const OptionalTensor& initial_, const OptionalTensor& reset_,
               bool reverse) {
  constexpr const char* kOp = "scan";
  const c10::SymDimVector sizes = check_steps(kOp, a, b);
  check_initial(kOp, initial_, b, sizes);
  check_reset(kOp, reset_, b, sizes);
  const KernelGuard guard(b);
  const Tensor h = empty_steps(a, b, sizes), initial = or_undefined(initial_), reset = or_undefined(reset_);
  if (has_nothing_to_compute(h)) return h;
  Operands operands(h, reverse);
  for (const Tensor& x : {a, b, initial, h}) operands.add(x);
  operands.add(reset, /*leading=*/true);
  if (!operands.merge()) {
    const at::IntArrayRef all = h.sizes();
    return h.copy_(forward(contiguous_copy(a, all), contiguous_copy(b, all),
                           contiguous_copy(initial_, all.slice(1)),
                           contiguous_copy(reset_, all, /*leading=*/true), reverse));
  }
  launch<true>(kOp, h, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    return with_coefficient<T>(a, [&](auto coefficient) {
      using C = typename decltype(coefficient)::type;
      Scan<T, C, false> scan;
      scan.steps = h.size(0);
      scan.channels = operands.channels();
      scan.a = operands.operand<const C>(a);
      scan.b = operands.operand<const T>(b);
      scan.initial = operands.operand<const T>(initial);
      scan.reset = operands.operand<const bool>(reset, /*leading=*/true);
      scan.result = operands.operand<T>(h);
      return run_on(h, scan, stream...);
    });
  });
  return h;
}

// ---- Backward

// The gradients of a, if h is given, and of b, both of all steps, and of the initial state, if wanted; else
// without elements.
Gradients backward(const Tensor& grad, const Tensor& a, const OptionalTensor& initial_,
                   const OptionalTensor& reset_, const OptionalTensor& h_, bool reverse, bool of_initial) {
  constexpr const char* kOp = "scan_backward";
  check_device(kOp, "grad", grad);
  check_type(kOp, "grad", grad, Types::kFloatingOrComplex);
  const c10::SymIntArrayRef sizes = grad.sym_sizes();
  TORCH_CHECK(!sizes.empty(), kOp, ": expected grad with a first dimension, which is time, got none");
  check_coefficient(kOp, a, grad);
  TORCH_CHECK(broadcasts_to(a.sym_sizes(), sizes), kOp, ": expected a of a shape that broadcasts to ", sizes,
              ", got ", a.sym_sizes());
  check_initial(kOp, initial_, grad, sizes);
  check_reset(kOp, reset_, grad, sizes);
  if (h_) {
    check_same_device(kOp, "h", *h_, grad);
    check_same_dtype(kOp, "h", *h_, grad.scalar_type());
    check_shape(kOp, "h", *h_, sizes, "of grad");
  }
  const auto none = [&] { return at::empty({0}, grad.options()); };
  // Where a is real and the same at all steps, this is a scan from the last step to the first. It reads less.
  const bool same_a = a.dim() < grad.dim() || a.sym_size(0) == 1;
  if (same_a && !is_complex(grad) && !h_ && !reset_ && !of_initial) {
    return {none(), forward(a, grad, {}, {}, !reverse), none()};
  }
  const KernelGuard guard(grad);
  const Tensor initial = or_undefined(initial_), reset = or_undefined(reset_), h = or_undefined(h_);
  const Tensor grad_b = at::empty_like(h_ ? h : grad);
  Tensor grad_a, grad_initial;
  if (h_) {
    grad_a = a.scalar_type() == grad.scalar_type() ? at::empty_like(h) : at::empty_symint(sizes, a.options());
  }
  if (of_initial) grad_initial = at::empty_symint(sizes.slice(1), grad.options());
  const auto results = [&] {
    return Gradients(grad_a.defined() ? grad_a : none(), grad_b,
                     grad_initial.defined() ? grad_initial : none());
  };
  if (has_nothing_to_compute(grad)) {
    if (of_initial) grad_initial.zero_();
    return results();
  }
  Operands operands(grad_b, !reverse);
  for (const Tensor& x : {grad, a, initial, h, grad_a, grad_b, grad_initial}) operands.add(x);
  operands.add(reset, /*leading=*/true);
  if (!operands.merge()) {
    const at::IntArrayRef all = grad.sizes();
    const auto [of_a, of_b, of_first] = backward(
        contiguous_copy(grad, all), contiguous_copy(a, all), contiguous_copy(initial_, all.slice(1)),
        contiguous_copy(reset_, all, /*leading=*/true), contiguous_copy(h_, all), reverse, of_initial);
    grad_b.copy_(of_b);
    if (h_) grad_a.copy_(of_a);
    if (of_initial) grad_initial.copy_(of_first);
    return results();
  }
  launch<true>(kOp, grad, [&](auto type, auto... stream) {
    using T = typename decltype(type)::type;
    return with_coefficient<T>(a, [&](auto coefficient) {
      using C = typename decltype(coefficient)::type;
      Scan<T, C, true> scan;
      scan.steps = grad.size(0);
      scan.channels = operands.channels();
      scan.a = operands.operand<const C>(a);
      scan.b = operands.operand<const T>(grad);
      scan.initial = operands.operand<const T>(initial);
      scan.h = operands.operand<const T>(h);
      scan.reset = operands.operand<const bool>(reset, /*leading=*/true);
      scan.grad_a = operands.operand<C>(grad_a);
      scan.result = operands.operand<T>(grad_b);
      scan.grad_initial = operands.operand<T>(grad_initial);
      return run_on(grad, scan, stream...);
    });
  });
  return results();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("scan(Tensor a, Tensor b, Tensor? initial=None, Tensor? reset=None, bool reverse=False) -> Tensor",
        tags);
  // They have no defaults: calls from Python would leave out arguments that are equal to them.
  const std::string backward_schema =
      "(Tensor grad, Tensor a, Tensor? initial, Tensor? reset, Tensor? h, bool reverse, bool of_initial) -> "
      "(Tensor, Tensor, Tensor)";
  m.def(("scan_backward" + backward_schema).c_str(), tags);
  m.def(("scan_backward_composed" + backward_schema).c_str(), tags);
  implement<forward>(m, "scan");
  implement<backward>(m, "scan_backward");
}

#ifdef TORCH_EXTENSION_NAME
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto initial = py::arg("initial") = py::none(), reset = py::arg("reset") = py::none(),
             reverse = py::arg("reverse") = false;
  m.def("forward",
        torch::wrap_pybind_function_no_gil([](const Tensor& a, const Tensor& b, const OptionalTensor& initial,
                                              const OptionalTensor& reset, bool reverse) {
          CHECK_INPUT("scan.forward", a);
          CHECK_INPUT("scan.forward", b);
          if (initial) CHECK_PLAIN("scan.forward", *initial);
          if (reset) CHECK_PLAIN("scan.forward", *reset);
          return forward(a, b, initial, reset, reverse);
        }),
        py::arg("a"), py::arg("b"), initial, reset, reverse);
  m.def("backward",
        torch::wrap_pybind_function_no_gil([](const Tensor& grad, const Tensor& a, const Tensor& h,
                                              const OptionalTensor& initial, const OptionalTensor& reset,
                                              bool reverse) {
          CHECK_INPUT("scan.backward", grad);
          CHECK_INPUT("scan.backward", a);
          CHECK_INPUT("scan.backward", h);
          if (initial) CHECK_PLAIN("scan.backward", *initial);
          if (reset) CHECK_PLAIN("scan.backward", *reset);
          return backward(grad, a, initial, reset, h, reverse, /*of_initial=*/true);
        }),
        py::arg("grad"), py::arg("a"), py::arg("h"), initial, reset, reverse);
}
#endif

}  // namespace lltm_ext
