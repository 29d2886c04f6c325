// Random bits by counting: Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// 2011, https://doi.org/10.1145/2063384.2063405. Any thread can have any of them.
#pragma once

#include "common/portable.h"

namespace lltm_ext {

// Where a call begins in its generator's sequence. Within a CUDA graph the generator's state lies in memory,
// where a replay finds a new one; then `offset` comes on top of it.
struct PhiloxState {
  uint64_t seed, offset;
  const int64_t *seed_at, *offset_at;
};

struct PhiloxBits {
  uint32_t words[4];
  // The k-th of eight.
  LLTM_HOST_DEVICE uint32_t half_word(int k) const { return words[k / 2] >> (k % 2 * 16) & 0xffff; }
};

// The block of 128 bits at `offset` (in words, a multiple of 4) in the stream of this number.
LLTM_HOST_DEVICE PhiloxBits philox(uint64_t seed, uint64_t offset, uint64_t stream) {
  const uint64_t count = offset / 4;
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  PhiloxBits bits = {{static_cast<uint32_t>(count), static_cast<uint32_t>(count >> 32),
                      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * bits.words[0], b = uint64_t{0xCD9E8D57} * bits.words[2];
    bits = {{static_cast<uint32_t>(b >> 32) ^ bits.words[1] ^ key[0], static_cast<uint32_t>(b),
             static_cast<uint32_t>(a >> 32) ^ bits.words[3] ^ key[1], static_cast<uint32_t>(a)}};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return bits;
}

}  // namespace lltm_ext
