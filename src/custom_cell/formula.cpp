// Reads a list of instructions (formula.h).
#include "custom_cell/formula.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <unordered_map>

#include "common/runtime/text.h"

namespace lltm_ext {
namespace {

constexpr size_t kMostWords = 1 << 14;

const std::unordered_map<std::string, Formula::Op>& ops() {
  static const auto& known = *new std::unordered_map<std::string, Formula::Op>{
#define LLTM_FORMULA_OP(name, text) {#name, Formula::Op::k_##name},
      LLTM_FORMULA_OPS(LLTM_FORMULA_OP) LLTM_FORMULA_ROW_OPS(LLTM_FORMULA_OP)
#undef LLTM_FORMULA_OP
  };
  return known;
}

// A value of the list: a leaf, a number or an op.
struct Value {
  Strings words;
  size_t last_read = 0;  // the place of the value that reads it last; that of no value, if it is a result
  uint16_t slot = 0;

  bool is_op() const { return ops().count(words[0]) > 0; }
  bool is_bit() const { return words[0] == "bit"; }  // whose second argument is no value
};

class Reader {
 public:
  Reader(const std::string& cell, const CellShape& shape, const std::vector<int>& outputs, bool backward,
         std::string_view text)
      : cell_(cell), shape_(shape), outputs_(outputs), backward_(backward) {
    const Strings words = split(text, ' ');
    TORCH_CHECK_VALUE(words.size() < kMostWords, cell, ": expected fewer instructions, got ", words.size());
    size_t next = 0;
    for (; next < words.size() && words[next] != ">"; ++next) values_.push_back({split(words[next], ',')});
    for (size_t i = 0; i < values_.size(); ++i) {
      for (const uint16_t a : arguments(i)) values_[a].last_read = i;
    }
    for (++next; next < words.size(); ++next) {
      const Strings parts = split(words[next], ',');
      TORCH_CHECK_VALUE(parts.size() == 2, cell, ": expected a result, got '", words[next], "'");
      results_.push_back({parts[0], number(parts[1], values_.size())});
      values_[results_.back().second].last_read = values_.size();
    }
  }

  void read(Formula& formula) {
    // All leaves and numbers are set before the first instruction, so none shares its slot with another
    // value.
    for (Value& value : values_) {
      if (value.is_op()) continue;
      value.slot = static_cast<uint16_t>(formula.slots++);
      const std::string& word = value.words[0];
      if (word[0] == '=') {
        formula.constants.push_back({std::strtod(word.c_str() + 1, nullptr), value.slot});
      } else {
        formula.leaves.push_back(place(word, value.slot, backward_ ? "vgdpuxhq" : "xrhspuq"));
      }
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].is_op()) formula.code.push_back(instruction(i, formula.slots));
    }
    for (const auto& [name, value] : results_) {
      formula.results.push_back(place(name, values_[value].slot, backward_ ? "xrhspfz" : "hsvf"));
    }
  }

 private:
  // A number less than `end`.
  uint16_t number(std::string_view text, size_t end) const {
    size_t value = end;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    TORCH_CHECK_VALUE(error == std::errc() && rest == text.data() + text.size() && value < end, cell_,
                      ": expected instructions as lltm_ext.recurrence writes them, got '", text, "'");
    return static_cast<uint16_t>(value);
  }

  // "x2" as 'x', 2, if x is one of `kinds`, and the cell has so many.
  Formula::Place place(std::string_view name, uint16_t slot, std::string_view kinds) const {
    TORCH_CHECK_VALUE(!name.empty() && kinds.find(name[0]) != std::string_view::npos, cell_,
                      ": expected one of ", kinds, ", got '", name, "'");
    const uint16_t i = number(name.substr(1), count(name[0]));
    return {name[0], i, slot, output(name[0] == 'h' || name[0] == 'g' ? -1 : i)};
  }

  // Which output a state is, h being -1; or -1.
  int output(int state) const {
    const auto found = std::find(outputs_.begin(), outputs_.end(), state);
    return found == outputs_.end() ? -1 : static_cast<int>(found - outputs_.begin());
  }

  size_t count(char kind) const {
    switch (kind) {
      case 'x':
      case 'r':
        return shape_.gates;
      case 's':
      case 'd':
        return shape_.states;
      case 'p':
        return shape_.parameters;
      case 'u':
        return shape_.step_inputs;
      case 'v':
        return shape_.saved;
      case 'q':
        return shape_.products;
      case 'f':
        return backward_ ? shape_.products : shape_.fed;
      case 'z':
        return shape_.fed;
      default:
        return 1;  // h, and its gradient g
    }
  }

  std::vector<uint16_t> arguments(size_t i) const {
    const Value& value = values_[i];
    const size_t count = value.is_bit() ? 2 : value.words.size();
    std::vector<uint16_t> found;
    for (size_t k = 1; k < count; ++k) found.push_back(number(value.words.at(k), values_.size()));
    return found;
  }

  // The instruction of an op. Its result may take the slot of an argument that no later op reads.
  Formula::Instruction instruction(size_t i, int& slots) {
    Value& value = values_[i];
    const std::vector<uint16_t> read = arguments(i);
    for (const uint16_t a : read) {
      TORCH_CHECK_VALUE(a < i, cell_, ": expected arguments before ", value.words[0]);
      if (values_[a].is_op() && values_[a].last_read == i) {
        free_.push_back(values_[a].slot);
        values_[a].last_read = values_.size();  // freed once, also if it is read twice
      }
    }
    if (free_.empty()) free_.push_back(static_cast<uint16_t>(slots++));
    value.slot = free_.back();
    free_.pop_back();
    const auto slot = [&](size_t k) { return k < read.size() ? values_[read[k]].slot : uint16_t{0}; };
    const uint16_t b = value.is_bit() ? number(value.words.at(2), 24) : slot(1);
    return {ops().at(value.words[0]), value.slot, slot(0), b, slot(2)};
  }

  const std::string& cell_;
  const CellShape& shape_;
  const std::vector<int>& outputs_;
  const bool backward_;
  std::vector<Value> values_;
  std::vector<std::pair<std::string, uint16_t>> results_;  // names, and which values
  std::vector<uint16_t> free_;                             // slots
};

}  // namespace

Formula::Formula(const std::string& cell, const CellShape& shape, const std::vector<int>& outputs,
                 bool backward, std::string_view text) {
  Reader(cell, shape, outputs, backward, text).read(*this);
}

}  // namespace lltm_ext
