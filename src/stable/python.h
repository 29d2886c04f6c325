// Handles Ctrl-C, in whichever Python the library runs.
#pragma once

#include "stable/error.h"

extern "C" {
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) int PyErr_CheckSignals();
__attribute__((weak)) void PyErr_Clear();
}

namespace lltm_ext {

// An error after Ctrl-C, which lltm_ext/_portable_bindings.py raises as a KeyboardInterrupt.
inline void check_interrupt() {
  if (!PyErr_CheckSignals) return;
  const int gil = PyGILState_Ensure();
  const bool interrupted = PyErr_CheckSignals() != 0;
  if (interrupted) PyErr_Clear();
  PyGILState_Release(gil);
  TORCH_CHECK(!interrupted, "KeyboardInterrupt: ");
}

}  // namespace lltm_ext
