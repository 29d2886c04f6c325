// In place of src/common/fast_math.cuh, whose approximations are PTX: exact functions for every type.
#pragma once

#include "common/math.h"

namespace lltm_ext {

template <typename T>
struct MathOf {
  using type = ExactMath;
};

template <typename T>
using ActivationMath = ExactMath;
using FastMath = ExactMath;
using Tf32Math = ExactMath;
using LargeTf32Math = ExactMath;

}  // namespace lltm_ext
