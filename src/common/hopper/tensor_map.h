// CUtensorMap, which describes a tensor to TMA. For host and device.
#pragma once

#ifdef __CUDACC_RTC__
#include "common/portable.h"

struct alignas(64) CUtensorMap {  // as in cuda.h, which NVRTC does not have
  uint64_t opaque[16];
};
#else
#include <cuda.h>
#endif
