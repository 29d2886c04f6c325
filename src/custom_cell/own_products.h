// The products of a step with a cell's own weights, besides that of weight_hh with h. The blocks [H, H] of
// these weights follow those of the gates in the rows of weight_hh.
#pragma once

#include <vector>

#include "common/matmul.h"
#include "custom_cell/program.h"

namespace lltm_ext {

class OwnProducts {
 public:
  OwnProducts(const CellShape& shape, const std::vector<CellProduct>& products, int64_t hidden)
      : products_(products), first_row_(shape.gates * hidden), hidden_(hidden) {}

  bool any() const { return !products_.empty(); }

  // The gates' part of weight_hh or of its gradient.
  at::Tensor of_gates(const at::Tensor& weight_hh) const {
    return any() ? weight_hh.narrow(0, 0, first_row_) : weight_hh;
  }

  // Writes the products of a stage to `to` [n, products * H], of the values `fed` [n, fed * H]. Those of one
  // value with blocks in a row are one product.
  void multiply(const Matmul& matmul, int stage, const at::Tensor& fed, const at::Tensor& weight_hh_t,
                const at::Tensor& to) const {
    for (size_t i = 0, end; i < products_.size(); i = end) {
      const CellProduct& first = products_[i];
      for (end = i + 1; end < products_.size(); ++end) {
        const CellProduct& next = products_[end];
        const int count = static_cast<int>(end - i);
        if (next.stage != first.stage || next.fed != first.fed || next.block != first.block + count) break;
      }
      if (first.stage != stage) continue;
      const int64_t width = (end - i) * hidden_;
      matmul(to.narrow(1, i * hidden_, width), planes(fed, first.fed),
             weight_hh_t.narrow(1, first_row_ + first.block * hidden_, width));
    }
  }

  // Writes the gradients of what the products take to `to` [n, products * H], of those of the products
  // [n, products * H] that a stage has found.
  void multiply_back(const Matmul& matmul, int stage, const at::Tensor& grads, const at::Tensor& weight_hh,
                     const at::Tensor& to) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      if (products_[i].back_stage != stage) continue;
      matmul(planes(to, i), planes(grads, i), block_of(weight_hh, products_[i]));
    }
  }

  // Adds the gradients of the blocks, which are sums over rows, to that of weight_hh.
  void add_weight_gradients(const Matmul& matmul, const at::Tensor& grad_weight_hh, const at::Tensor& grads,
                            const at::Tensor& fed) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      at::Tensor to = block_of(grad_weight_hh, products_[i]);
      matmul.add_weight_gradient(to, planes(grads, i), planes(fed, products_[i].fed));
    }
  }

 private:
  at::Tensor planes(const at::Tensor& x, int64_t i) const { return x.narrow(1, i * hidden_, hidden_); }
  at::Tensor block_of(const at::Tensor& weight_hh, const CellProduct& x) const {
    return weight_hh.narrow(0, first_row_ + x.block * hidden_, hidden_);
  }

  const std::vector<CellProduct>& products_;
  const int64_t first_row_, hidden_;
};

}  // namespace lltm_ext
