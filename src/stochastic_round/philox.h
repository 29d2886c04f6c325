// Counter-based random bits: Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// 2011, https://doi.org/10.1145/2063384.2063405.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// The generator's state at the start of a call. Within a CUDA graph, the state is in memory so that each
// replay sees a new one, and `offset` is added to it.
struct PhiloxState {
  uint64_t seed, offset;
  const int64_t *graph_seed, *graph_offset;
};

struct PhiloxBits {
  uint32_t words[4];
  LLTM_HOST_DEVICE uint32_t half_word(int k) const { return words[k / 2] >> (k % 2 * 16) & 0xffff; }
};

// The 64-bit product of a and b, as two words.
struct Product {
  uint32_t low, high;
  LLTM_HOST_DEVICE Product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    // For a shift by 32, the compiler emits two additions of 0 per round.
    asm("{ .reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(b));
#else
    const uint64_t product = uint64_t{a} * b;
    low = static_cast<uint32_t>(product), high = static_cast<uint32_t>(product >> 32);
#endif
  }
};

// The 128 bits at `offset` (in words, a multiple of 4) of stream number `stream`.
LLTM_HOST_DEVICE PhiloxBits philox(uint64_t seed, uint64_t offset, uint64_t stream) {
  const uint64_t count = offset / 4;
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  PhiloxBits bits = {{static_cast<uint32_t>(count), static_cast<uint32_t>(count >> 32),
                      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const Product a(0xD2511F53, bits.words[0]), b(0xCD9E8D57, bits.words[2]);
    bits = {{b.high ^ bits.words[1] ^ key[0], b.low, a.high ^ bits.words[3] ^ key[1], a.low}};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return bits;
}

}  // namespace lltm_ext
