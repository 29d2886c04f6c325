// The kernel of a large layer, forward or backward: its warpgroups by their roles.
#pragma once

#include "recurrence/large/cells.cuh"
#include "recurrence/large/loads.cuh"
#include "recurrence/large/products.cuh"

namespace lltm_ext {
namespace hopper {

template <class Config, class Source, class Products, class Cells>
__device__ __forceinline__ void run_large(const typename Source::Arguments& args) {
  const LargeStorage<Config> storage(dynamic_shared());
  const LargePlace<Config> place(args.first_group, args.group_pairs);
  const LargeArrivals<Config> arrivals(args.arrivals, place, args.group_pairs);
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();
  cluster_sync();
  const int warpgroup = uniform_warp() / 4;
  if (warpgroup == Config::kLoaderWarpgroup) {
    setmaxnreg_dec<Config::kTile.loader_registers>();
    LargeLoads<Config, Source>(storage, place, arrivals).run(args);
  } else if (warpgroup == Config::kCellWarpgroup) {
    setmaxnreg_dec<Config::kTile.cell_registers>();
    Cells(args, storage, place).run();
  } else {
    setmaxnreg_inc<Config::kTile.product_registers>();
    Products(storage, place, warpgroup).run(args);
  }
  // Other blocks may still write to this one's shared memory, and arrive at its barriers.
  __syncwarp();
  cluster_sync();
}

}  // namespace hopper
}  // namespace lltm_ext
