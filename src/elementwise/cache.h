// Binaries on disk, so that a formula is compiled once and not by every process.
#pragma once

#include <optional>
#include <string>

namespace lltm_ext {

// The entry of a key: a file in $LLTM_EXT_CACHE, else $XDG_CACHE_HOME/lltm_ext, else ~/.cache/lltm_ext. What
// it holds runs on the GPU, so a folder that another user could write is not used, and a file counts only if
// it is whole and of this very key. Where there is no such folder, nothing is kept, and one warning says why.
class Cache {
 public:
  explicit Cache(std::string key);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  std::optional<std::string> read() const;
  // Other processes see all of the entry or nothing of it.
  void write(const std::string& binary) const;

 private:
  std::string content(const std::string& binary) const;

  std::string key_, name_;
  int folder_ = -1;
};

}  // namespace lltm_ext
