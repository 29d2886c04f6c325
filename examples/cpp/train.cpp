// Trains an LLTM from C++ to predict, after each step of a random sequence, the mean of the inputs so far.
// Runs on the GPU if there is one.
//
//   build/examples/train
#include <lltm_ext/lltm_ext.h>
#include <torch/torch.h>

#include <iostream>

constexpr int64_t kSteps = 32, kBatch = 16, kHidden = 64, kTrainingSteps = 60;

struct Model : torch::nn::Module {
  Model() {
    const double bound = 1 / std::sqrt(kHidden);
    const auto uniform = [&](const char* name, at::IntArrayRef sizes) {
      return register_parameter(name, torch::empty(sizes).uniform_(-bound, bound));
    };
    weight_ih = uniform("weight_ih", {3 * kHidden, 1});
    weight_hh = uniform("weight_hh", {3 * kHidden, kHidden});
    bias = uniform("bias", {3 * kHidden});
    head = register_module("head", torch::nn::Linear(kHidden, 1));
  }

  // [T, B, 1] -> [T, B, 1]
  torch::Tensor forward(const torch::Tensor& input) {
    const torch::Tensor zeros = input.new_zeros({input.size(1), kHidden});
    const auto [output, last] = lltm_ext::lltm(input, {zeros, zeros}, weight_ih, weight_hh, bias);
    return head(output);
  }

  torch::Tensor weight_ih, weight_hh, bias;
  torch::nn::Linear head{nullptr};
};

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  std::cout << "lltm_ext " << lltm_ext::version() << " on " << device << "\n";
  torch::manual_seed(0);
  Model model;
  model.to(device);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-2));
  const torch::Tensor counts = torch::arange(1, kSteps + 1, device).view({kSteps, 1, 1});

  float first = 0, loss = 0;
  for (int64_t step = 0; step < kTrainingSteps; ++step) {
    const torch::Tensor input = torch::rand({kSteps, kBatch, 1}, device);
    const torch::Tensor error = torch::mse_loss(model.forward(input), input.cumsum(0) / counts);
    optimizer.zero_grad();
    error.backward();
    optimizer.step();
    loss = error.item<float>();
    if (step == 0) first = loss;
    if (step % 10 == 0) std::cout << "step " << step << ": loss " << loss << "\n";
  }
  std::cout << "step " << kTrainingSteps << ": loss " << loss << ", at first " << first << "\n";
  return loss < first / 4 ? 0 : 1;
}
