// Prints three continuations of a prompt by a character model from examples/export.py, without Python and
// without the model's code. export.py prints the same texts.
//
//   build/examples/run_exported build/char_lm/char_lm.pt2 "The "
#include <ATen/ATen.h>
#include <lltm_ext/lltm_ext.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iomanip>
#include <iostream>

constexpr int64_t kTexts = 3, kLength = 120;

// The characters of a text in UTF-8, of one or more bytes each.
std::vector<std::string> characters_of(const std::string& text) {
  std::vector<std::string> characters;
  for (const char byte : text) {
    const bool continues = (byte & 0xC0) == 0x80;
    if (continues) {
      characters.back() += byte;
    } else {
      characters.emplace_back(1, byte);
    }
  }
  return characters;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: run_exported MODEL.pt2 PROMPT\n";
    return 2;
  }
  const c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const auto metadata = model.get_metadata();
  const std::vector<std::string> vocabulary = characters_of(metadata.at("vocabulary"));
  const int64_t hidden_size = std::stoll(metadata.at("hidden_size"));
  const at::Device device(metadata.at("AOTI_DEVICE_KEY"));

  std::vector<int64_t> prompt;
  for (const std::string& character : characters_of(argv[2])) {
    const auto found = std::find(vocabulary.begin(), vocabulary.end(), character);
    if (found == vocabulary.end()) {
      std::cerr << "run_exported: the model does not know '" << character << "', a character of the prompt\n";
      return 1;
    }
    prompt.push_back(found - vocabulary.begin());
  }

  // The prompt is a sequence with a batch of one. Then each step is a batch of texts.
  std::vector<std::string> texts(kTexts, argv[2]);
  const at::Tensor zeros = at::zeros({1, 1, hidden_size}, device);
  std::vector<at::Tensor> outputs = model.run({at::tensor(prompt).view({-1, 1}).to(device), zeros, zeros});
  for (at::Tensor& output : outputs) output = output.expand({-1, kTexts, -1}).contiguous();
  at::manual_seed(0);
  double bits = 0;
  for (int64_t i = 0; i < kLength; ++i) {
    const at::Tensor probabilities = outputs[0][-1].to(at::kCPU, at::kDouble).softmax(-1);
    const at::Tensor chosen = probabilities.multinomial(1);
    bits -= probabilities.gather(1, chosen).log2().sum().item<double>();
    for (int64_t b = 0; b < kTexts; ++b) texts[b] += vocabulary[chosen[b].item<int64_t>()];
    outputs = model.run({chosen.view({1, kTexts}).to(device), outputs[1], outputs[2]});
  }
  for (const std::string& text : texts) std::cout << text << "\n----\n";
  std::cout << std::fixed << std::setprecision(6) << bits / (kTexts * kLength) << " bits/char\n";
}
