// Reads a list of instructions (formula.h).
#include "custom_cell/formula.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <unordered_map>

#include "common/runtime/text.h"

namespace lltm_ext {
namespace {

constexpr size_t kMostValues = 1 << 14;

const std::unordered_map<std::string, Formula::Op>& ops() {
  static const auto& known = *new std::unordered_map<std::string, Formula::Op>{
#define LLTM_FORMULA_OP(name, text) {#name, Formula::Op::k_##name},
      LLTM_FORMULA_OPS(LLTM_FORMULA_OP)
#undef LLTM_FORMULA_OP
  };
  return known;
}

// A number that is less than `end`.
uint16_t number(const std::string& cell, std::string_view text, size_t end) {
  size_t value = end;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(error == std::errc() && rest == text.data() + text.size() && value < end, cell,
                    ": expected instructions as lltm_ext.recurrence writes them, got '", text, "'");
  return static_cast<uint16_t>(value);
}

}  // namespace

Formula::Formula(const std::string& cell, std::string_view text) {
  struct Value {
    Strings words;
    size_t last = 0;  // the value that reads it last
    uint16_t slot = 0;
  };
  std::vector<Value> values;
  const Strings words = split(text, ' ');
  TORCH_CHECK_VALUE(words.size() < kMostValues, cell, ": expected fewer instructions, got ", words.size());
  size_t next = 0;
  for (; next < words.size() && words[next] != ">"; ++next) values.push_back({split(words[next], ',')});
  const size_t count = values.size();
  const auto arguments = [&](size_t i) {
    std::vector<uint16_t> found;
    for (size_t k = 1; k < values[i].words.size(); ++k)
      found.push_back(number(cell, values[i].words[k], count));
    if (values[i].words[0] == "bit") found.resize(1);
    return found;
  };
  for (size_t i = 0; i < count; ++i) {
    for (const uint16_t a : arguments(i)) values[a].last = i;
  }
  std::vector<std::pair<std::string, uint16_t>> named;
  for (size_t i = next + 1; i < words.size(); ++i) {
    const Strings parts = split(words[i], ',');
    TORCH_CHECK_VALUE(parts.size() == 2 && parts[0].size() > 1, cell, ": expected a result, got '", words[i],
                      "'");
    named.push_back({parts[0], number(cell, parts[1], count)});
    values[named.back().second].last = count;
  }
  std::vector<uint16_t> free;
  const auto slot = [&] {
    if (free.empty()) return static_cast<uint16_t>(slots++);
    const uint16_t found = free.back();
    free.pop_back();
    return found;
  };
  const auto place = [&](const std::string& name, uint16_t of) {
    return Place{name[0], number(cell, std::string_view(name).substr(1), 64), of};
  };
  // Leaves and constants are set before the first instruction, so they share no slot with others.
  for (Value& value : values) {
    const std::string& word = value.words[0];
    if (ops().count(word) > 0) continue;
    value.slot = slot();
    if (word[0] == '=') {
      constants.push_back({std::strtod(word.c_str() + 1, nullptr), value.slot});
    } else {
      leaves.push_back(place(word, value.slot));
    }
  }
  for (size_t i = 0; i < count; ++i) {
    Value& value = values[i];
    const auto op = ops().find(value.words[0]);
    if (op == ops().end()) continue;
    const std::vector<uint16_t> read = arguments(i);
    for (const uint16_t a : read) {
      TORCH_CHECK_VALUE(a < i, cell, ": expected arguments before ", value.words[0]);
      const bool computes = ops().count(values[a].words[0]) > 0;
      if (computes && values[a].last == i) {
        free.push_back(values[a].slot);
        values[a].last = count + 1;  // if it is read twice
      }
    }
    value.slot = slot();
    const auto at = [&](size_t k) { return k < read.size() ? values[read[k]].slot : uint16_t{0}; };
    code.push_back({op->second, value.slot, at(0), at(1), at(2)});
    if (op->second == Op::k_bit) code.back().b = number(cell, value.words.at(2), 24);
  }
  for (const auto& [name, value] : named) results.push_back(place(name, values[value].slot));
}

}  // namespace lltm_ext
