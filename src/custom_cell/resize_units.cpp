// lltm_ext::resize_units: copies of tensors with another number of hidden units, for sequences whose hidden
// size the fused kernels do not take (custom_cell/pad_hidden.h). Units are cut off, or added as zeros.
#include "recurrence/resize_units.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/library.h"

namespace lltm_ext {
namespace {

using torch::autograd::variable_list;

bool has_units(int64_t units_in, UnitsIn dimension) { return (units_in & dimension) != 0; }

c10::SymDimVector resized_sizes(const at::Tensor& x, int64_t units_in, int64_t from, int64_t to) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  if (has_units(units_in, kLastDimension)) sizes.back() = sizes.back() / from * to;
  if (has_units(units_in, kFirstDimension)) sizes.front() = sizes.front() / from * to;
  return sizes;
}

at::Tensor resized_on_cpu(const at::Tensor& x, int64_t dim, int64_t from, int64_t to) {
  const at::Tensor groups = x.unflatten(dim, {x.size(dim) / from, from});
  std::vector<int64_t> padding(2 * (x.dim() - dim), 0);  // begins with the last dimension
  padding.back() = to - from;
  return at::constant_pad_nd(groups, padding).flatten(dim, dim + 1);
}

#ifdef LLTM_EXT_WITH_CUDA
void run_on_cuda(at::TensorList from, at::TensorList to, at::IntArrayRef units_in, int64_t from_units,
                 int64_t to_units) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(from[0].get_device());
  ResizeUnitsArguments arguments = {};
  arguments.from = static_cast<int>(from_units);
  arguments.to = static_cast<int>(to_units);
  const auto launch = [&] {
    if (arguments.count > 0) check_launch("resize_units", resize_units(arguments, stream));
    arguments.count = 0;
  };
  for (size_t i = 0; i < from.size(); ++i) {
    if (to[i].numel() == 0) continue;
    const int64_t columns = to[i].size(-1);
    arguments.tensors[arguments.count++] = {pointer<void>(from[i]),
                                            mutable_pointer<void>(to[i]),
                                            to[i].numel() / columns,
                                            static_cast<int>(columns),
                                            static_cast<int>(to[i].element_size()),
                                            has_units(units_in[i], kFirstDimension),
                                            has_units(units_in[i], kLastDimension)};
    if (arguments.count == kMostResized) launch();
  }
  launch();
}
#endif

void check_units(const char* op, const at::Tensor& x, int64_t units_in, int64_t from) {
  TORCH_CHECK_VALUE(0 <= units_in && units_in <= (kLastDimension | kFirstDimension), op,
                    ": expected units_in to be sums of 1 (the last dimension) and 2 (the first), got ",
                    units_in);
  const bool first = has_units(units_in, kFirstDimension), last = has_units(units_in, kLastDimension);
  TORCH_CHECK_VALUE(first ? x.dim() == 2 : x.dim() > 0, op, ": expected tensors with units in the ",
                    first ? "first dimension to be matrices" : "last dimension to have one", ", got shape ",
                    x.sym_sizes());
  const bool whole = (!last || x.sym_sizes().back() % from == 0) && (!first || x.sym_size(0) % from == 0);
  TORCH_CHECK_VALUE(whole, op, ": expected dimensions with units to be multiples of from_units = ", from,
                    ", got shape ", x.sym_sizes());
}

// tensors: on one device; units_in[i]: in which dimensions of tensors[i] there are units (UnitsIn).
variable_list resize_units_of(at::TensorList tensors, at::IntArrayRef units_in, int64_t from, int64_t to) {
  constexpr const char* kOp = "resize_units";
  TORCH_CHECK_VALUE(tensors.size() == units_in.size(), kOp, ": expected units_in to have ", tensors.size(),
                    " numbers, one of each tensor, got ", units_in.size());
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  TORCH_CHECK_VALUE(0 < from && from <= kMost && 0 < to && to <= kMost, kOp,
                    ": expected from_units and to_units to be positive and below 2^31, got ", from, " and ",
                    to);
  variable_list copies;
  if (tensors.empty()) return copies;
  variable_list sources;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_device(kOp, "tensors", tensors[i]);
    check_floating(kOp, "tensors", tensors[i]);
    check_same_device(kOp, "tensors", tensors[i], tensors[0]);
    check_units(kOp, tensors[i], units_in[i], from);
  }
  const KernelGuard guard(tensors[0]);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_cpu()) {
      at::Tensor x = tensors[i].contiguous();
      if (has_units(units_in[i], kLastDimension)) x = resized_on_cpu(x, x.dim() - 1, from, to);
      if (has_units(units_in[i], kFirstDimension)) x = resized_on_cpu(x, 0, from, to);
      copies.push_back(x.is_same(tensors[i]) ? x.clone() : x);
      continue;
    }
    sources.push_back(tensors[i].contiguous());
    copies.push_back(
        at::empty_symint(resized_sizes(tensors[i], units_in[i], from, to), tensors[i].options()));
  }
#ifdef LLTM_EXT_WITH_CUDA
  if (tensors[0].is_cuda()) run_on_cuda(sources, copies, units_in, from, to);
#endif
  return copies;
}

// ---- autograd

variable_list call_resize_units(at::TensorList tensors, at::IntArrayRef units_in, int64_t from, int64_t to) {
  static const auto op = find_op<decltype(resize_units_of)>("lltm_ext::resize_units");
  return op.call(tensors, units_in, from, to);
}

// The gradient of a copy with more units is its copy with fewer, and the reverse.
struct ResizeUnits : torch::autograd::Function<ResizeUnits> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList tensors,
                               at::IntArrayRef units_in, int64_t from, int64_t to) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list copies = call_resize_units(tensors, units_in, from, to), constants;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (!tensors[i].requires_grad()) constants.push_back(copies[i]);
    }
    ctx->mark_non_differentiable(constants);
    ctx->set_materialize_grads(false);
    ctx->saved_data["units_in"] = units_in.vec();
    ctx->saved_data["from"] = from;
    ctx->saved_data["to"] = to;
    return copies;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const std::vector<int64_t> units_in = ctx->saved_data["units_in"].toIntVector();
    std::vector<int64_t> units_in_given;
    variable_list given, gradients(grads.size() + 3);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      given.push_back(grads[i]);
      units_in_given.push_back(units_in[i]);
    }
    const variable_list found = call_resize_units(given, units_in_given, ctx->saved_data["to"].toInt(),
                                                  ctx->saved_data["from"].toInt());
    for (size_t i = 0, next = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) gradients[i] = found[next++];
    }
    return gradients;
  }
};

variable_list resize_units_autograd(at::TensorList tensors, at::IntArrayRef units_in, int64_t from,
                                    int64_t to) {
  for (const at::Tensor& x : tensors) {
    if (needs_grad(x)) return ResizeUnits::apply(tensors, units_in, from, to);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_resize_units(tensors, units_in, from, to);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  m.def("resize_units(Tensor[] tensors, int[] units_in, int from_units, int to_units) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
  implement<resize_units_of>(m, "resize_units");
  implement_autograd(m, "resize_units", resize_units_autograd);
}

}  // namespace lltm_ext
