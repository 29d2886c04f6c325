// What a header of kernels may count on wherever it is compiled: for the host, by nvcc, or at run time by
// NVRTC, which has no host headers.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define LLTM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LLTM_HOST_DEVICE inline
#endif

// Whether code is compiled for Hopper, which gets forms of some kernels that other chips do without: each
// took up to a megabyte for all of them, and Hopper is where it was measured what they gain.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kForHopper = true;
#else
constexpr bool kForHopper = false;
#endif
