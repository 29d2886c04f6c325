// The persistent kernels that are compiled, and the shape of their grids. For host and device.
#pragma once

namespace lltm_ext {

enum class Algorithm { kAuto, kStepwise, kCluster, kGrid };

// A persistent kernel: how its blocks exchange states, and the share of the weights that a block holds.
struct PersistentVariant {
  Algorithm algorithm;
  bool any_rows;   // takes several row tiles a group, and steps of different numbers of rows
  int unit_tiles;  // tiles of 16 hidden units that a block has
  int chunks;      // chunks of 64 bytes of K that a warp multiplies
  bool on_hopper_only = false;
  bool tf32 = false;           // rounds float32 operands to TF32
  bool row_per_block = false;  // a block has one row and all units (row_per_block.cuh)
};

// The planner takes the first one that fits and pays off. Small blocks mean many blocks and a slow exchange,
// large ones more work per step; the order is measured on Hopper (docs/design/recurrence.md). Variants that
// another one can replace are compiled for Hopper only: for all architectures they were a fifth of the wheel.
// In the half types' cluster variants for Hopper only, a block has all units.
constexpr PersistentVariant kHalfVariants[] = {
    {Algorithm::kCluster, false, 2, 0, true, false, true},
    {Algorithm::kCluster, false, 4, 0, true, false, true},
    {Algorithm::kCluster, false, 6, 0, true, false, true},
    {Algorithm::kCluster, false, 4, 1, true},
    {Algorithm::kCluster, false, 8, 4, true},
    {Algorithm::kCluster, false, 16, 8, true},
    {Algorithm::kCluster, false, 8, 16, true},
    {Algorithm::kCluster, false, 8, 8, true},
    {Algorithm::kCluster, false, 2, 2},
    {Algorithm::kGrid, false, 2, 4, true},
    {Algorithm::kGrid, false, 1, 4, true},
    {Algorithm::kGrid, false, 2, 8, true},
    {Algorithm::kGrid, false, 1, 8},
    {Algorithm::kCluster, false, 4, 8},
    {Algorithm::kGrid, true, 2, 4},
    {Algorithm::kGrid, true, 2, 8},
    {Algorithm::kGrid, true, 1, 8, true},
};
constexpr PersistentVariant kFloatVariants[] = {
    // IEEE, which is no slower than TF32 for few units
    {Algorithm::kCluster, false, 2, 0, true, false, true},
    {Algorithm::kCluster, false, 4, 0, true, false, true},
    {Algorithm::kCluster, false, 6, 0, true, false, true},
    {Algorithm::kCluster, false, 8, 0, true, false, true},
    // TF32 on tensor cores, if it is allowed
    {Algorithm::kCluster, false, 4, 2, true, true},
    {Algorithm::kGrid, false, 1, 1, true, true},
    {Algorithm::kCluster, false, 2, 2, true, true},
    {Algorithm::kCluster, false, 4, 4, true, true},
    {Algorithm::kCluster, false, 8, 16, true, true},
    {Algorithm::kGrid, false, 1, 2, true, true},
    {Algorithm::kGrid, false, 2, 4, true, true},
    {Algorithm::kGrid, false, 1, 4, true, true},
    {Algorithm::kGrid, false, 2, 8, true, true},
    {Algorithm::kGrid, false, 1, 8, true, true},
    {Algorithm::kGrid, true, 2, 8, true, true},
    {Algorithm::kGrid, true, 1, 8, true, true},
    // IEEE
    {Algorithm::kCluster, false, 4, 2, true},
    {Algorithm::kCluster, false, 4, 4},
    {Algorithm::kCluster, false, 8, 16, true},
    {Algorithm::kGrid, false, 1, 2, true},
    {Algorithm::kGrid, false, 1, 4, true},
    {Algorithm::kGrid, false, 1, 8, true},
    {Algorithm::kGrid, true, 1, 1, true},
    {Algorithm::kGrid, true, 1, 4},
    {Algorithm::kGrid, true, 1, 8},
    {Algorithm::kCluster, false, 1, 2},
};

template <typename T>
constexpr const PersistentVariant* variants_of() {
  return sizeof(T) == 2 ? kHalfVariants : kFloatVariants;
}

// In memory through which blocks exchange values, every word that is not yet written has only bytes of this
// value: a NaN in every type, but not one that arithmetic produces.
constexpr int kUnwrittenByte = 0xff;

// `groups` groups of blocks, each with `rows` rows of the batch. The blocks of a group share the hidden units
// and exchange states; different groups never communicate.
struct GroupGrid {
  int group_blocks, groups, rows;
};
// Of a cell whose units read more than their own values.
struct GroupGridOfRows : GroupGrid {
  int first_group;  // of this launch, if several have parts of the groups
  void* row_parts;  // of zeros, row_parts_bytes() for each group
  void* given;      // [sequences, N, calls, H] not yet written: what calls of products take forward; or null
};

}  // namespace lltm_ext
