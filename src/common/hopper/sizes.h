// Sizes in the shared memory of Hopper's kernels. For host and device.
#pragma once

namespace lltm_ext {
namespace hopper {

constexpr int kSwizzleBytes = 128;  // of a row of an operand's tile: its swizzle
constexpr int kBarrierBytes = 256;  // for a pipeline's barriers

// Of the partial sums of a tile (split.cuh): floats from one row to the next, which puts the rows that a warp
// stores at once in different banks, and bytes.
constexpr int partial_sums_stride(int columns) { return columns + 4; }
constexpr int partial_sums_bytes(int rows, int columns) { return rows * partial_sums_stride(columns) * 4; }

}  // namespace hopper
}  // namespace lltm_ext
