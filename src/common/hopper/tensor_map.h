// CUtensorMap, which describes a tensor to TMA. For host and device.
#pragma once

#ifdef __CUDACC_RTC__
#include "common/portable.h"

struct alignas(64) CUtensorMap {  // cuda.h's type, because NVRTC does not have that header
  uint64_t opaque[16];
};
#else
#include <cuda.h>
#endif
