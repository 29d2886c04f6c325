// Headers for a binding's Python module. torch's extension build defines TORCH_EXTENSION_NAME; the library
// for C++ programs (CMakeLists.txt) does not, and so neither includes nor links Python.
#pragma once

#ifdef TORCH_EXTENSION_NAME
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#endif
