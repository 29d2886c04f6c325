// A cache of binaries on disk, so that a kernel is compiled once and not by every process.
#pragma once

#include <optional>
#include <string>

namespace lltm_ext {

// The cache entry of a key: a file in $LLTM_EXT_CACHE, $XDG_CACHE_HOME/lltm_ext or ~/.cache/lltm_ext. Its
// content runs on the GPU, so a folder that other users can write to is not used, and an entry is valid only
// if its checksum and key match. Without a usable folder, nothing is cached and one warning gives the reason.
class Cache {
 public:
  explicit Cache(std::string key);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  std::optional<std::string> read() const;
  // Atomic: other processes see the whole entry or none.
  void write(const std::string& binary) const;

 private:
  std::string content(const std::string& binary) const;

  std::string key_, name_;
  int folder_ = -1;
};

}  // namespace lltm_ext
