// Conversion of arguments and results for torch's stable C ABI, both when the package calls torch's ops by
// name and when torch calls the package's ops.
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

// How a type of the bindings is converted. Stable is the ABI's type for it; Owned is the type that holds a
// received argument.
template <typename T>
struct Converter {
  using Stable = T;
  using Owned = T;
  static Stable send(const T& x) { return x; }
  static Owned receive(Stable x) { return x; }
};

template <typename T>
using ConverterOf = Converter<std::remove_cv_t<std::remove_reference_t<T>>>;
template <typename T>
using OwnedOf = typename ConverterOf<T>::Owned;

template <typename T>
StableIValue to_stable(const T& x) {
  return ::torch::stable::detail::from(ConverterOf<T>::send(x));
}
template <typename T>
OwnedOf<T> from_stable(StableIValue x) {
  return ConverterOf<T>::receive(::torch::stable::detail::to<typename ConverterOf<T>::Stable>(x));
}

template <typename T>
struct Converter<std::optional<T>> {
  using Stable = std::optional<typename Converter<T>::Stable>;
  using Owned = std::optional<OwnedOf<T>>;
  static Stable send(const std::optional<T>& x) {
    return x ? Stable(Converter<T>::send(*x)) : Stable(std::nullopt);
  }
  static Owned receive(Stable x) {
    return x ? Owned(Converter<T>::receive(std::move(*x))) : Owned(std::nullopt);
  }
};

template <typename T>
struct Converter<std::vector<T>> {
  using Stable = std::vector<typename Converter<T>::Stable>;
  using Owned = std::vector<OwnedOf<T>>;
  static Stable send(ArrayRef<T> x) {
    Stable list;
    for (const T& item : x) list.push_back(Converter<T>::send(item));
    return list;
  }
  static Owned receive(Stable x) {
    Owned list;
    for (auto& item : x) list.push_back(Converter<T>::receive(std::move(item)));
    return list;
  }
};

template <typename T>
struct Converter<ArrayRef<T>> : Converter<std::vector<T>> {};

// torch 2.11's own conversion to std::string leaks memory.
template <>
struct Converter<std::string_view> {
  using Stable = StringHandle;
  using Owned = std::string;
  static Owned receive(Stable handle) {
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

// Calls an op of torch with all of its arguments. The ABI cannot carry a Scalar, so ops with one in their
// schema cannot be called.
template <typename R, typename... Args>
R call_op(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args) + 1> stack = {to_stable(args)...};  // room for a result
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return from_stable<R>(stack[0]);
}

// ---- The package's functions as torch calls them: arguments from the stack, results onto it

template <typename R>
void push_result(StableIValue* stack, const R& result) {
  stack[0] = to_stable(result);
}
template <typename... R>
void push_result(StableIValue* stack, const std::tuple<R...>& results) {
  std::apply([&](const R&... result) { ((*stack++ = to_stable(result)), ...); }, results);
}

template <typename F>
struct Signature;
template <typename R, typename... Args>
struct Signature<R (*)(Args...)> {
  template <auto function, size_t... i>
  static void call(StableIValue* stack, std::index_sequence<i...>) {
    std::tuple<OwnedOf<Args>...> args{from_stable<Args>(stack[i])...};
    if constexpr (std::is_void_v<R>) {
      function(std::get<i>(args)...);
    } else {
      push_result(stack, function(std::get<i>(args)...));
    }
  }
  template <auto function>
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    call<function>(stack, std::index_sequence_for<Args...>());
  }
};

}  // namespace stable_torch
