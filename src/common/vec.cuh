// N elements that are loaded or stored in one aligned access, of at most 16 bytes.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T data[N];
};

template <typename T>
constexpr int kVecWidth = 16 / sizeof(T);

LLTM_HOST_DEVICE bool is_vec_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace lltm_ext
