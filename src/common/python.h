// Headers for a binding's Python module. torch's extension build defines TORCH_EXTENSION_NAME; the library
// for C++ programs (CMakeLists.txt) does not, and so neither includes nor links Python. The portable build
// has src/stable/python.h in its place.
#pragma once

#ifdef TORCH_EXTENSION_NAME
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace lltm_ext {

// Wraps a function so that it runs without the GIL, and its string becomes bytes in Python.
template <typename... Args>
auto returning_bytes(std::string (*function)(Args...)) {
  return [function](Args... args) {
    const auto call = [&] {
      const py::gil_scoped_release no_gil;
      return function(args...);
    };
    return py::bytes(call());
  };
}

}  // namespace lltm_ext
#endif

namespace lltm_ext {

// Raises KeyboardInterrupt after Ctrl-C, if this is Python's main thread.
inline void check_interrupt() {
#ifdef TORCH_EXTENSION_NAME
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
#endif
}

}  // namespace lltm_ext
