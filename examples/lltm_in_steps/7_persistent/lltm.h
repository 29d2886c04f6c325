// What the binding and the kernel share: T steps, B rows of the batch, H units; float32, contiguous.
#pragma once
#include <cuda_runtime_api.h>

struct Arguments {
  int steps, batch, hidden;
  const float* projection;        // [T, B, 3H]: what the gates get from the input and the bias
  const float* weights;           // [3H, H]
  const float *h0, *c0;           // [B, H]
  float *output, *cells, *gates;  // [T, B, H], [T, B, H], [T, B, 3H]
  unsigned* arrived;  // [groups, T]: how many blocks of a group have written a step; zeros at first
};

constexpr int kRows = 16;  // of the batch, in a group of blocks

cudaError_t launch_forward(Arguments arguments, cudaStream_t stream);
