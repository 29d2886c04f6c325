#ifdef LLTM_EXT_WITH_CUDA
#include "common/runtime/kernels.h"

#include <c10/cuda/CUDAException.h>

namespace lltm_ext {

namespace {

// cudaLibraryLoadData is refused during the capture of a graph in this thread's usual mode.
class AllowDuringCapture {
 public:
  AllowDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowDuringCapture(const AllowDuringCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // later the mode before
};

}  // namespace

std::string architecture_of(c10::DeviceIndex device) {
  int major, minor;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

std::vector<cudaKernel_t> load_kernels(const std::string& binary, const std::vector<std::string>& names) {
  const AllowDuringCapture allow_during_capture;
  cudaLibrary_t library;
  C10_CUDA_CHECK(cudaLibraryLoadData(&library, binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  std::vector<cudaKernel_t> kernels;
  for (const std::string& name : names) {
    C10_CUDA_CHECK(cudaLibraryGetKernel(&kernels.emplace_back(), library, name.c_str()));
  }
  return kernels;
}

}  // namespace lltm_ext
#endif
