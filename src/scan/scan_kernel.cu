// scan and its backward on CUDA: the launches.
#include "common/device.cuh"
#include "common/ptx.cuh"
#include "common/shared_memory.h"
#include "scan/serial.cuh"
#include "scan/tiles.cuh"

namespace lltm_ext {
namespace {

template <class Scan>
__global__ void __launch_bounds__(kScanSerialThreads, kScanSerialBlocks)
    serial_scan_kernel(const __grid_constant__ Scan scan, const __grid_constant__ ScanVectors vectors,
                       const __grid_constant__ SerialPlan plan) {
  for (int64_t group = blockIdx.x; group < plan.groups; group += gridDim.x) {
    SerialScan<Scan>(scan, vectors, plan, group, dynamic_shared_floats()).run();
  }
}

template <class Scan>
__global__ void __launch_bounds__(kScanThreads<Scan>, kScanBlocks)
    tiled_scan_kernel(const __grid_constant__ Scan scan, const __grid_constant__ ScanPlan plan,
                      const __grid_constant__ TileLinks<Affine<wide_t<Scan>>> links,
                      const __grid_constant__ TileMoves<Scan> moves) {
  TiledScan<Scan>(scan, plan, links, moves, gridDim.x, reinterpret_cast<char*>(dynamic_shared_floats()))
      .run();
}

template <class Scan>
cudaError_t run_serially(const Scan& scan, const DeviceInfo& device, cudaStream_t stream) {
  const SerialPlan plan = plan_serial(scan, device);
  const int bytes = serial_bytes<Scan>(plan);
  const auto kernel = serial_scan_kernel<Scan>;
  if (const cudaError_t error = set_max_dynamic_shared(kernel, bytes); error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.blocks), kScanSerialThreads, bytes, stream>>>(
      scan, vectors_of(scan, kScanWarp), plan);
  return cudaGetLastError();
}

template <class Scan>
cudaError_t run_tiles(const Scan& scan, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  using F = Affine<wide_t<Scan>>;
  using Links = TileLinks<F>;
  const TileMoves<Scan> moves(scan);
  const ScanPlan plan = plan_of(scan, moves, device.shared_bytes);
  if (plan.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = tiled_scan_kernel<Scan>;
  const int bytes = tile_shared_bytes(plan.threads, moves);
  const int64_t link_bytes = Links::bytes(plan.groups, plan.tiles, plan.width);
  cudaError_t error = set_max_dynamic_shared(kernel, bytes);
  if (error == cudaSuccess && link_bytes > 0) error = cudaMemsetAsync(workspace, 0xff, link_bytes, stream);
  if (error != cudaSuccess) return error;
  // More blocks than run at once would be right, too: the last ones would find no tile left.
  const int64_t at_once =
      int64_t{device.multiprocessors} * std::min(kScanBlocks, device.shared_bytes / bytes);
  const int64_t blocks = std::min(plan.blocks(), at_once);
  kernel<<<static_cast<unsigned>(blocks), plan.threads, bytes, stream>>>(
      scan, plan, Links::in(workspace, plan.groups, plan.tiles, plan.width), moves);
  return cudaGetLastError();
}

}  // namespace

template <class Scan>
cudaError_t scan_workspace_bytes(const Scan& scan, int64_t& bytes) {
  DeviceInfo device;
  if (const cudaError_t error = current_device_info(device); error != cudaSuccess) return error;
  const ScanPlan plan = plan_of(scan, TileMoves<Scan>(scan), device.shared_bytes);
  bytes =
      runs_serially(scan) ? 0 : TileLinks<Affine<wide_t<Scan>>>::bytes(plan.groups, plan.tiles, plan.width);
  return cudaSuccess;
}

template <class Scan>
cudaError_t run_scan(const Scan& scan, void* workspace, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t error = current_device_info(device); error != cudaSuccess) return error;
  if (runs_serially(scan)) return run_serially(scan, device, stream);
  return run_tiles(scan, workspace, device, stream);
}

#define LLTM_SCAN_OF(T, C, BACKWARD)                                                     \
  template cudaError_t scan_workspace_bytes(const Scan<T, C, BACKWARD>& scan, int64_t&); \
  template cudaError_t run_scan(const Scan<T, C, BACKWARD>& scan, void*, cudaStream_t);
#define LLTM_SCAN(T, C) LLTM_SCAN_OF(T, C, false) LLTM_SCAN_OF(T, C, true)
LLTM_SCAN(float, float)
LLTM_SCAN(double, double)
LLTM_SCAN(__half, __half)
LLTM_SCAN(__half, float)
LLTM_SCAN(__nv_bfloat16, __nv_bfloat16)
LLTM_SCAN(__nv_bfloat16, float)
LLTM_SCAN(Complex<float>, Complex<float>)
LLTM_SCAN(Complex<double>, Complex<double>)
#undef LLTM_SCAN
#undef LLTM_SCAN_OF

}  // namespace lltm_ext
