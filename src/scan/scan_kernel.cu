// scan and its backward on CUDA: the launches.
#include "scan/scan_kernel.cuh"

namespace lltm_ext {
namespace {

template <bool kExchange, class Scan>
__global__ void __launch_bounds__(kScanThreads, 3)
    scan_kernel(const __grid_constant__ Scan scan, const __grid_constant__ ScanPlan plan,
                const __grid_constant__ ScanLinks<wide_t<Scan>> links) {
  __shared__ ScanShared<Scan> shared;
  scan_block<kExchange>(scan, plan, links, shared);
}

template <class Scan>
__global__ void __launch_bounds__(kScanSerialThreads) scan_serial_kernel(const __grid_constant__ Scan scan) {
  scan_channel(scan);
}

}  // namespace

template <class Scan>
cudaError_t run_scan(const Scan& scan, void* memory, cudaStream_t stream) {
  using Links = ScanLinks<wide_t<Scan>>;
  const ScanPlan plan = plan_of(scan);
  if (plan.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Links links = Links::in(memory, plan);
  if (plan.tiles > 1) {
    const cudaError_t error = cudaMemsetAsync(links.known, 0, Links::flag_bytes(plan), stream);
    if (error != cudaSuccess) return error;
  }
  const auto blocks = static_cast<unsigned>(plan.blocks());
  if (plan.serial) {
    scan_serial_kernel<<<blocks, kScanSerialThreads, 0, stream>>>(scan);
    return cudaGetLastError();
  }
  if constexpr (kScanExchanges<Scan>) {
    if (scan.time_is_fastest()) {
      scan_kernel<true><<<blocks, kScanThreads, 0, stream>>>(scan, plan, links);
      return cudaGetLastError();
    }
  }
  scan_kernel<false><<<blocks, kScanThreads, 0, stream>>>(scan, plan, links);
  return cudaGetLastError();
}

#define LLTM_SCAN(T, C)                                                              \
  template cudaError_t run_scan(const ScanForward<T, C>& scan, void*, cudaStream_t); \
  template cudaError_t run_scan(const ScanBackward<T, C>& scan, void*, cudaStream_t);
LLTM_SCAN(float, float)
LLTM_SCAN(double, double)
LLTM_SCAN(__half, __half)
LLTM_SCAN(__half, float)
LLTM_SCAN(__nv_bfloat16, __nv_bfloat16)
LLTM_SCAN(__nv_bfloat16, float)
LLTM_SCAN(Complex<float>, Complex<float>)
LLTM_SCAN(Complex<double>, Complex<double>)
#undef LLTM_SCAN

}  // namespace lltm_ext
