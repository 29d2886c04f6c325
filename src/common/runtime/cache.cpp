// An entry is the checksum of what follows it, the key's length in 16 digits, the key and the binary. Files
// are opened relative to the folder's descriptor, so the folder that was checked is the one that is used.
#include "common/runtime/cache.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace lltm_ext {
namespace {

// FNV-1a of 128 bits, in hexadecimal.
std::string checksum(const std::string& text) {
  using Uint128 = unsigned __int128;
  constexpr Uint128 kPrime = (Uint128(1) << 88) + 0x13b;
  Uint128 hash = Uint128(0x6c62272e07bb0142) << 64 | 0x62b821756295c58d;
  for (const unsigned char c : text) hash = (hash ^ c) * kPrime;
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(hash >> 64),
                static_cast<unsigned long long>(hash));
  return digits;
}

std::string folder_path() {
  const std::pair<const char*, const char*> candidates[] = {
      {"LLTM_EXT_CACHE", ""}, {"XDG_CACHE_HOME", "/lltm_ext"}, {"HOME", "/.cache/lltm_ext"}};
  for (const auto& [variable, suffix] : candidates) {
    const char* const value = std::getenv(variable);
    if (value && *value) return std::string(value) + suffix;
  }
  return "";
}

// Creates the folder if necessary, and returns its descriptor, or -1 and the reason.
int open_folder(std::string& reason) {
  const std::string path = folder_path();
  if (path.empty()) {
    reason = "no folder is known; set LLTM_EXT_CACHE to one";
    return -1;
  }
  std::error_code ignored;  // if creation fails, opening fails
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  mkdir(path.c_str(), 0700);
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat status;
  if (folder < 0 || fstat(folder, &status) != 0) {
    reason = path + ": " + std::strerror(errno);
  } else if (status.st_uid != geteuid()) {
    reason = path + " belongs to another user";
  } else if (status.st_mode & (S_IWGRP | S_IWOTH)) {
    reason = path + " can be written by other users (chmod 700 fixes this)";
  } else {
    return folder;
  }
  if (folder >= 0) close(folder);
  return -1;
}

std::optional<std::string> read_file(int folder, const std::string& name) {
  const int file = openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return std::nullopt;
  std::optional<std::string> text;
  struct stat status;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid()) {
    text.emplace();
    char buffer[1 << 16];
    ssize_t size;
    while ((size = ::read(file, buffer, sizeof buffer)) > 0) text->append(buffer, size);
    if (size < 0) text.reset();
  }
  close(file);
  return text;
}

bool write_file(int folder, const std::string& name, const std::string& text) {
  const int file = openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return false;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t size = ::write(file, text.data() + written, text.size() - written);
    if (size < 0) break;
    written += size;
  }
  return close(file) == 0 && written == text.size();
}

}  // namespace

Cache::Cache(std::string key) : key_(std::move(key)), name_(checksum(key_)) {
  std::string reason;
  folder_ = open_folder(reason);
  if (folder_ < 0) {
    TORCH_WARN_ONCE("lltm_ext: ops made at run time are compiled by every process and not cached: ", reason);
  }
}

Cache::~Cache() {
  if (folder_ >= 0) close(folder_);
}

std::string Cache::content(const std::string& binary) const {
  std::string length = std::to_string(key_.size());
  length.insert(0, 16 - length.size(), '0');
  const std::string text = length + key_ + binary;
  return checksum(text) + text;
}

std::optional<std::string> Cache::read() const {
  if (folder_ < 0) return std::nullopt;
  const std::optional<std::string> file = read_file(folder_, name_);
  const size_t header = content("").size();
  if (!file || file->size() <= header) return std::nullopt;
  std::string binary = file->substr(header);
  if (content(binary) != *file) return std::nullopt;
  return binary;
}

void Cache::write(const std::string& binary) const {
  if (folder_ < 0) return;
  static std::atomic<int> count = 0;
  const std::string temporary =
      name_ + "." + std::to_string(getpid()) + "." + std::to_string(count++) + ".tmp";
  if (write_file(folder_, temporary, content(binary)) &&
      renameat(folder_, temporary.c_str(), folder_, name_.c_str()) == 0) {
    return;
  }
  TORCH_WARN_ONCE("lltm_ext: cannot write a compiled op to the cache ", folder_path(), ": ",
                  std::strerror(errno));
  unlinkat(folder_, temporary.c_str(), 0);
}

}  // namespace lltm_ext
