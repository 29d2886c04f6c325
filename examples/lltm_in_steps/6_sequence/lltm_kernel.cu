// As in step 3, except that the backward adds the two gradients of h, and updates that of c in place.
#include <cstdint>

template <typename T>
__device__ T sigmoid(T x) {
  return 1 / (1 + exp(-x));
}

template <typename T>
__global__ void forward_kernel(const T* gates, const T* c, T* new_h, T* new_c, int64_t batch,
                               int64_t hidden) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= batch * hidden) return;
  const int64_t at = index / hidden * 3 * hidden + index % hidden;
  const T i = sigmoid(gates[at]), o = sigmoid(gates[at + hidden]), z = gates[at + 2 * hidden];
  new_c[index] = c[index] + (z > 0 ? z : expm1(z)) * i;
  new_h[index] = tanh(new_c[index]) * o;
}

template <typename T>
__global__ void backward_kernel(const T* grad_output, const T* grad_h, const T* gates, const T* new_c,
                                T* grad_gates, T* grad_c, int64_t batch, int64_t hidden) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= batch * hidden) return;
  const int64_t at = index / hidden * 3 * hidden + index % hidden;
  const T i = sigmoid(gates[at]), o = sigmoid(gates[at + hidden]), z = gates[at + 2 * hidden];
  const T tanh_c = tanh(new_c[index]), grad = grad_output[index] + grad_h[index];
  const T grad_cell = grad_c[index] + grad * o * (1 - tanh_c * tanh_c);
  grad_gates[at] = grad_cell * (z > 0 ? z : expm1(z)) * i * (1 - i);
  grad_gates[at + hidden] = grad * tanh_c * o * (1 - o);
  grad_gates[at + 2 * hidden] = grad_cell * i * (z > 0 ? 1 : exp(z));
  grad_c[index] = grad_cell;
}

constexpr int kThreads = 256;
int64_t blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

template <typename T>
void launch_forward(const T* gates, const T* c, T* new_h, T* new_c, int64_t batch, int64_t hidden,
                    cudaStream_t stream) {
  forward_kernel<<<blocks(batch * hidden), kThreads, 0, stream>>>(gates, c, new_h, new_c, batch, hidden);
}
template <typename T>
void launch_backward(const T* grad_output, const T* grad_h, const T* gates, const T* new_c, T* grad_gates,
                     T* grad_c, int64_t batch, int64_t hidden, cudaStream_t stream) {
  backward_kernel<<<blocks(batch * hidden), kThreads, 0, stream>>>(grad_output, grad_h, gates, new_c,
                                                                   grad_gates, grad_c, batch, hidden);
}

template decltype(launch_forward<float>) launch_forward<float>;
template decltype(launch_forward<double>) launch_forward<double>;
template decltype(launch_backward<float>) launch_backward<float>;
template decltype(launch_backward<double>) launch_backward<double>;
