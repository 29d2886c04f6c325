// The dispatcher ops of a cell with a name of its own: lltm_ext::<name>, <name>_forward, <name>_backward,
// <name>_algorithm, and for both directions of a layer <name>_bidirectional and so on.
#pragma once

#include <string>

#include "common/library.h"

namespace lltm_ext {

inline void define_built_in(torch::Library& m, const std::string& name) {
  const std::string weights = "Tensor weight_ih, Tensor weight_hh, ",
                    inputs = "Tensor input, Tensor? h0, Tensor? c0, " + weights,
                    directions = "Tensor input, Tensor[] forward_direction, Tensor[] reverse_direction, ";
  const auto def = [&](const char* suffix, const std::string& signature) {
    m.def((name + suffix + signature).c_str(), {at::Tag::pt2_compliant_tag});
  };
  def("", "(" + inputs +
              "Tensor? bias=None, int[]? batch_sizes=None, bool reverse=False, str algorithm='auto', "
              "Tensor? reset=None, Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor)");
  def("_forward", "(" + inputs +
                      "Tensor? bias, int[]? batch_sizes, bool reverse, str algorithm, Tensor? reset=None, "
                      "Tensor? bias_hh=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("_backward",
      "(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, " + inputs +
          "Tensor output, Tensor gates, Tensor extra, int[]? batch_sizes, bool reverse, str algorithm, "
          "bool input_needs_grad, bool bias_needs_grad, Tensor? reset=None) "
          "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("_algorithm",
      "(Tensor input, Tensor h0, Tensor c0, " + weights +
          "Tensor? bias=None, int[]? batch_sizes=None, str algorithm='auto', bool backward=False) -> str");
  def("_bidirectional", "(" + directions + "int[]? batch_sizes=None, str algorithm='auto') -> Tensor[]");
  def("_bidirectional_forward", "(" + directions + "int[]? batch_sizes, str algorithm) -> Tensor[]");
  def("_bidirectional_backward",
      "(Tensor?[] grad_outputs, " + directions +
          "Tensor[] saved, int[]? batch_sizes, str algorithm, bool input_needs_grad, bool bias_needs_grad) "
          "-> Tensor[]");
}

}  // namespace lltm_ext
