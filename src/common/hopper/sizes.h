// Sizes in the shared memory of Hopper's kernels. For host and device.
#pragma once

namespace lltm_ext {
namespace hopper {

constexpr int kSwizzleBytes = 128;  // a row of an operand's tile, and its swizzle
constexpr int kBarrierBytes = 256;  // for a pipeline's barriers

// The partial sums of a tile (split.cuh): the floats from one row to the next, which put the rows that a warp
// stores at once in different banks, and the bytes of all.
constexpr int partial_sums_stride(int columns) { return columns + 4; }
constexpr int partial_sums_bytes(int rows, int columns) { return rows * partial_sums_stride(columns) * 4; }

}  // namespace hopper
}  // namespace lltm_ext
