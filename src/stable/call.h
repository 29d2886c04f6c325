// Values on their way through torch's stable C ABI, both ways: calls of torch's ops by name, and the ops of
// ours that torch calls.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "stable/array_ref.h"

namespace stable_torch {

class Tensor;
template <typename T>
class List;

// How a type of the bindings crosses: `Stable` is the stable ABI's own type for it, `Held` keeps what came.
template <typename T>
struct Crossing {
  using Stable = T;
  using Held = T;
  static Stable out(const T& x) { return x; }
  static Held in(Stable x) { return x; }
};

template <typename T>
using Plain = std::remove_cv_t<std::remove_reference_t<T>>;
template <typename T>
using StableOf = typename Crossing<Plain<T>>::Stable;
template <typename T>
using HeldOf = typename Crossing<Plain<T>>::Held;

template <typename T>
StableIValue to_stable(const T& x) {
  return ::torch::stable::detail::from(Crossing<Plain<T>>::out(x));
}
template <typename T>
HeldOf<T> from_stable(StableIValue x) {
  return Crossing<Plain<T>>::in(::torch::stable::detail::to<StableOf<T>>(x));
}

template <typename T>
struct Crossing<std::optional<T>> {
  using Stable = std::optional<StableOf<T>>;
  using Held = std::optional<HeldOf<T>>;
  static Stable out(const std::optional<T>& x) {
    return x ? Stable(Crossing<T>::out(*x)) : Stable(std::nullopt);
  }
  static Held in(Stable x) { return x ? Held(Crossing<T>::in(std::move(*x))) : Held(std::nullopt); }
};

template <typename T>
struct Crossing<std::vector<T>> {
  using Stable = std::vector<StableOf<T>>;
  using Held = std::vector<HeldOf<T>>;
  static Stable out(const std::vector<T>& x) {
    Stable found;
    for (const T& each : x) found.push_back(Crossing<T>::out(each));
    return found;
  }
  static Held in(Stable x) {
    Held found;
    for (auto& each : x) found.push_back(Crossing<T>::in(std::move(each)));
    return found;
  }
};

template <typename T>
struct Crossing<ArrayRef<T>> {
  using Stable = typename Crossing<std::vector<T>>::Stable;
  using Held = typename Crossing<std::vector<T>>::Held;
  static Stable out(ArrayRef<T> x) { return Crossing<std::vector<T>>::out(x.vec()); }
  static Held in(Stable x) { return Crossing<std::vector<T>>::in(std::move(x)); }
};

// torch 2.11's conversion to std::string leaks it, so a string's handle is read here.
template <>
struct Crossing<std::string_view> {
  using Stable = StringHandle;
  using Held = std::string;
  static std::string in(StringHandle handle) {
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string found(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return found;
  }
};

// Calls an op of torch's with all of its arguments. Its schema may have no Scalar, which the ABI cannot
// carry.
template <typename R, typename... Args>
R call_op(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack = {to_stable(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return from_stable<R>(stack[0]);
}

// ---- A function of ours as torch calls it: arguments from the stack, results onto it.

template <typename R>
void give_back(StableIValue* stack, const R& result) {
  stack[0] = to_stable(result);
}
template <typename... R>
void give_back(StableIValue* stack, const std::tuple<R...>& results) {
  std::apply([&](const R&... each) { ((*stack++ = to_stable(each)), ...); }, results);
}

template <typename F>
struct Signature;
template <typename R, typename... Args>
struct Signature<R (*)(Args...)> {
  template <auto function, size_t... i>
  static void call(StableIValue* stack, std::index_sequence<i...>) {
    std::tuple<HeldOf<Args>...> held{from_stable<Args>(stack[i])...};
    if constexpr (std::is_void_v<R>) {
      function(std::get<i>(held)...);
    } else {
      give_back(stack, function(std::get<i>(held)...));
    }
  }
  template <auto function>
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    call<function>(stack, std::index_sequence_for<Args...>());
  }
};

}  // namespace stable_torch
