// What a binding needs to be a Python module too. TORCH_EXTENSION_NAME is the module's name, which torch's
// build of Python extensions defines. In the library for C++ programs (CMakeLists.txt) it is not defined, and
// an op has its dispatcher ops alone: nothing of Python is included or linked there.
#pragma once

#ifdef TORCH_EXTENSION_NAME
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#endif
