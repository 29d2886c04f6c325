// What planners need to know about a device. Host code without torch or CUDA.
#pragma once

namespace lltm_ext {

constexpr int kMostClusterBlocks = 8;

struct DeviceInfo {
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  bool has_sm90a;  // compute capability 9.0, in a build with code for sm_90a
  // At [n], how many multiprocessors clusters of n blocks can fill: a cluster runs inside one GPC, and rarely
  // fills a GPC's last multiprocessors. Clusters of eight fill 120 of an H200's 132.
  int cluster_multiprocessors[kMostClusterBlocks + 1];
  int shared_bytes;  // the most that a block may have
};

}  // namespace lltm_ext
