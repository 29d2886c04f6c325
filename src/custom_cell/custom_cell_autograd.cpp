// Gradients and autocast of the ops of custom_cell.cpp.
#include <algorithm>

#include "common/differentiable.h"
#include "common/function.h"
#include "common/library.h"
#include "custom_cell/custom_cell.h"
#include "custom_cell/onednn_lstm.h"

namespace lltm_ext {

variable_list call_by_loop(const CellCall& call) {
  static const auto op = find_op<CellSignature>("lltm_ext::custom_cell_by_loop");
  return list_of(call_with(op, call));
}

namespace {

// ---- calls of the ops

TensorsOfDirection tensors_of(const Direction& d) {
  TensorsOfDirection tensors;
  for (const at::Tensor* x : d.tensors()) tensors.push_back(if_defined(*x));
  return tensors;
}

variable_list call_op(const CellCall& call) {
  if (call.directions.size() == 1) {
    static const auto op = find_op<CellSignature>("lltm_ext::custom_cell");
    return list_of(call_with(op, call));
  }
  static const auto op = find_op<BothSignature>("lltm_ext::custom_cell_bidirectional");
  return op.call(call.input, tensors_of(call.directions[0]), tensors_of(call.directions[1]), call.batch_sizes,
                 call.algorithm, call.program);
}

// ---- the node

// The tensors of the directions, one after the other.
variable_list flattened(Directions directions) {
  variable_list all;
  for (const Direction& d : directions) {
    for (const at::Tensor* x : d.tensors()) all.push_back(*x);
  }
  return all;
}

// The defined tensors of `flattened`: autograd takes no undefined ones in a list. Bit i of `which` says
// whether tensor i of all is given.
struct Given {
  variable_list tensors;
  int64_t which = 0;

  explicit Given(const variable_list& all) {
    for (size_t i = 0; i < all.size(); ++i) {
      if (!all[i].defined()) continue;
      tensors.push_back(all[i]);
      which |= int64_t{1} << i;
    }
  }
};
variable_list with_undefined(at::TensorList given, int64_t which, size_t count) {
  variable_list all(count);
  for (size_t i = 0, next = 0; i < count; ++i) {
    if (which >> i & 1) all[i] = given[next++];
  }
  return all;
}

std::vector<Direction> directions_of(at::TensorList all, bool reverse) {
  std::vector<Direction> directions(all.size() / Direction::kTensors);
  size_t next = 0;
  for (Direction& d : directions) {
    d.reverse = reverse || next > 0;
    for (at::Tensor* x : d.tensors()) *x = all[next++];
  }
  return directions;
}

struct CellFunction : Function<CellFunction> {
  static constexpr size_t kOthers = 6;  // arguments after the tensors

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               at::TensorList given, int64_t which, int64_t directions, bool reverse,
                               at::OptionalIntArrayRef batch_sizes, string_view algorithm,
                               string_view program) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list all = with_undefined(given, which, directions * Direction::kTensors);
    const CellCall call = {input, directions_of(all, reverse), batch_sizes, algorithm, program};
    variable_list found;  // for each direction: output, h_n, states_n, gates, extra, h
    if (call.directions.size() == 1) {
      static const auto op = find_op<ForwardSignature>("lltm_ext::custom_cell_forward");
      found = list_of(call_with(op, call));
    } else {
      static const auto op = find_op<BothSignature>("lltm_ext::custom_cell_bidirectional_forward");
      found = op.call(input, tensors_of(call.directions[0]), tensors_of(call.directions[1]), batch_sizes,
                      algorithm, program);
    }
    const bool has_output_apart = CellProgram::get(program).shape.has_output_apart();
    variable_list saved = {input}, outputs;
    append(saved, all);
    for (size_t i = 0; i < found.size(); i += 6) {
      append(outputs, {found[i], found[i + 1], found[i + 2]});
      append(saved, {found[has_output_apart ? i + 5 : i], found[i + 3], found[i + 4]});
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    if (batch_sizes) ctx->saved_data["batch_sizes"] = batch_sizes->vec();
    ctx->saved_data["directions"] = directions;
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->saved_data["program"] = std::string(program);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad_outputs) {
    const size_t count = ctx->saved_data["directions"].toInt(), tensors = 1 + count * Direction::kTensors;
    variable_list gradients(tensors);
    const variable_list all = ctx->get_saved_variables(), inputs(all.begin(), all.begin() + tensors);
    const auto entry = ctx->saved_data.find("batch_sizes");
    std::optional<std::vector<int64_t>> sizes;
    if (entry != ctx->saved_data.end()) sizes = entry->second.toIntVector();
    const bool reverse = ctx->saved_data["reverse"].toBool();
    const std::string algorithm = ctx->saved_data["algorithm"].toStringRef(),
                      program = ctx->saved_data["program"].toStringRef();
    const auto call_of = [&](at::TensorList x) -> CellCall {
      return {x[0], directions_of(x.slice(1), reverse), at::OptionalIntArrayRef(sizes), algorithm, program};
    };
    if (!any_defined(grad_outputs)) {
      // no gradients
    } else if (at::GradMode::is_enabled()) {
      gradients = differentiable_gradients([&](const variable_list& x) { return by_loop(call_of(x)); },
                                           inputs, grad_outputs);
    } else {
      const at::TensorList saved = at::TensorList(all).slice(tensors);
      set_gradients(gradients, call_of(inputs), inputs, saved, grad_outputs);
    }
    variable_list of_given = {gradients[0]};
    for (size_t i = 1; i < tensors; ++i) {
      if (inputs[i].defined()) of_given.push_back(gradients[i]);
    }
    of_given.resize(of_given.size() + kOthers);
    return of_given;
  }

 private:
  // Runs the cell in torch's ops, which Python implements.
  static variable_list by_loop(const CellCall& call) {
    variable_list outputs;
    for (const Direction& d : call.directions) append(outputs, call_by_loop(call.with({d})));
    return outputs;
  }

  static void set_gradients(variable_list& gradients, const CellCall& call, const variable_list& inputs,
                            at::TensorList saved, const variable_list& grad_outputs) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto needs = [&](size_t i) { return inputs[i].defined() && inputs[i].requires_grad(); };
    bool bias_needs_grad = false;
    for (size_t i = 1; i < inputs.size(); i += Direction::kTensors) {
      bias_needs_grad = bias_needs_grad || needs(i + Direction::kBias) || needs(i + Direction::kBiasHh);
    }
    variable_list found;  // those of input, and per direction of h0, states, weights, bias and parameters
    const Direction& d = call.directions[0];
    if (call.directions.size() == 1) {
      static const auto op = find_op<BackwardSignature<variable_list>>("lltm_ext::custom_cell_backward");
      found = op.call(if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), if_defined(grad_outputs[2]),
                      saved[0], saved[1], saved[2], call.input, if_defined(d.h0), if_defined(d.states),
                      if_defined(d.weight_ih), if_defined(d.weight_hh), if_defined(d.bias),
                      if_defined(d.parameters), if_defined(d.step_inputs), if_defined(d.reset),
                      call.batch_sizes, d.reverse, call.algorithm, call.program, needs(0), bias_needs_grad);
    } else {
      static const auto op = find_op<BothBackwardSignature>("lltm_ext::custom_cell_bidirectional_backward");
      c10::List<OptionalTensor> grads;
      for (const at::Tensor& x : grad_outputs) grads.push_back(if_defined(x));
      found = op.call(grads, call.input, tensors_of(d), tensors_of(call.directions[1]), saved,
                      call.batch_sizes, call.algorithm, call.program, needs(0), bias_needs_grad);
    }
    if (needs(0)) gradients[0] = found[0];
    for (size_t first = 1, next = 1; first < inputs.size();
         first += Direction::kTensors, next += Direction::kParameters + 1) {
      for (size_t i = 0; i <= Direction::kParameters; ++i) {
        if (needs(first + i)) gradients[first + i] = found[next + i];
      }
      // It gets a tensor of its own: a user may scale a gradient in place.
      if (needs(first + Direction::kBiasHh)) {
        const at::Tensor& of_bias = found[next + Direction::kBias];
        gradients[first + Direction::kBiasHh] = needs(first + Direction::kBias) ? of_bias.clone() : of_bias;
      }
    }
  }
};

// Whether autograd must see a call. A node takes no undefined tensor for the input: such a call goes to the
// op, whose checks name it.
bool records(const CellCall& call) {
  if (!call.input.defined()) return false;
  bool records = needs_grad(call.input);
  for (const Direction& d : call.directions) {
    for (const at::Tensor* x : d.tensors()) records = records || needs_grad(*x);
  }
  return records;
}

// Whether each direction is a node of its own: on the CPU in half types, or if oneDNN's layer runs it.
bool runs_one_by_one(const CellOp& op, const CellCall& call) {
  return op.runs_in_float32(call.input) || OneDnnLstm::takes(op, call);
}

variable_list run_autograd(const CellCall& call) {
  if (!records(call)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_op(call);
  }
  const auto record = [](const CellCall& c) {
    const Given given(flattened(c.directions));
    return CellFunction::apply(c.input, at::TensorList(given.tensors), given.which,
                               static_cast<int64_t>(c.directions.size()), c.directions[0].reverse,
                               c.batch_sizes, c.algorithm, c.program);
  };
  // Kernels take such a call as it is, and their op checks it.
  if (call.input.is_cuda() && is_multiple_of_8(call.directions[0].weight_hh)) return record(call);
  const CellOp op = op_for(call);
  check(op, call);
  if (call.directions.size() > 1 && runs_one_by_one(op, call)) {
    variable_list results;
    for (const Direction& d : call.directions) append(results, run_autograd(call.with({d})));
    return results;
  }
  return run_fitted(op, call, [&](const CellCall& fitted) {
    return OneDnnLstm::takes(op, fitted) ? OneDnnLstm::record(fitted) : record(fitted);
  });
}

// ---- autocast

CellCall cast(CellCall call, const AutocastInputs& to) {
  call.input = to(call.input);
  for (Direction& d : call.directions) {
    for (at::Tensor* x : d.tensors()) {
      if (x->defined() && x != &d.reset) *x = x == &d.states ? to.cell(*x) : to(*x);
    }
  }
  return call;
}

variable_list run_autocast(const CellCall& call) {
  const AutocastInputs to(call.input);
  return call_op(cast(call, to));
}

// The algorithm for the tensors as autocast casts them.
std::string algorithm_autocast(const at::Tensor& input, const OptionalTensor& h0,
                               const OptionalTensor& states, const OptionalTensor& weight_ih,
                               const OptionalTensor& weight_hh, const OptionalTensor& bias,
                               const OptionalTensor& parameters, const OptionalTensor& step_inputs,
                               const OptionalTensor& reset, at::OptionalIntArrayRef batch_sizes, bool reverse,
                               string_view algorithm, string_view program, bool backward) {
  const AutocastInputs to(input);
  return custom_cell_algorithm(to(input), to(h0), to.cell(states), to(weight_ih), to(weight_hh), to(bias),
                               to(parameters), to(step_inputs), reset, batch_sizes, reverse, algorithm,
                               program, backward);
}

// ---- the sum of two biases

// Their gradients are equal, but each has memory of its own: a user may scale one in place.
struct AddBiases : torch::autograd::Function<AddBiases> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& bias_ih,
                            const at::Tensor& bias_hh) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return bias_ih + bias_hh;
  }
  static variable_list backward(torch::autograd::AutogradContext*, const variable_list& grads) {
    return {grads[0], grads[0].clone()};
  }
};

at::Tensor add_biases(const at::Tensor& bias_ih, const at::Tensor& bias_hh) { return bias_ih + bias_hh; }
at::Tensor add_biases_autograd(const at::Tensor& bias_ih, const at::Tensor& bias_hh) {
  return AddBiases::apply(bias_ih, bias_hh);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lltm_ext, m) {
  implement_autograd(m, "custom_cell", Kernel<CellSignature>::of<run_autograd>);
  implement_autograd(m, "custom_cell_bidirectional", Kernel<BothSignature>::of<run_autograd>);
  implement_autocast(m, "custom_cell", Kernel<CellSignature>::of<run_autocast>);
  implement_autocast(m, "custom_cell_bidirectional", Kernel<BothSignature>::of<run_autocast>);
  implement_autocast(m, "custom_cell_algorithm", algorithm_autocast);
  m.def("sum_of_biases(Tensor bias_ih, Tensor bias_hh) -> Tensor", {at::Tag::pt2_compliant_tag});
  implement<add_biases>(m, "sum_of_biases");
  implement_autograd(m, "sum_of_biases", add_biases_autograd);
}

}  // namespace lltm_ext
