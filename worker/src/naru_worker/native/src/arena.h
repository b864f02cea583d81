// Anonymous memory in one piece: weights, KV cache and workspace each own one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace naru {

constexpr size_t kHugeBytes = size_t{1} << 21;

class Arena {
 public:
  Arena() = default;
  ~Arena() { release(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps `bytes`, zeroed, 2 MB aligned, huge pages preferred. False: the machine refused.
  bool reserve(size_t bytes);

  // Maps addresses alone, 2 MB aligned: memory is taken in small pages as it is touched. False: no room for them.
  bool reserve_addresses(size_t bytes);

  // Prefers huge pages for the whole ones inside the first `bytes`.
  void prefer_huge(size_t bytes);

  // Gives back the memory of the whole pages inside; they read as zero until written again.
  void give_back(size_t offset, size_t bytes);

  void release();

  // The next `bytes`, 64-byte aligned; null when the arena is full.
  uint8_t* take(size_t bytes);

  uint8_t* base() const { return base_; }
  size_t size() const { return size_; }
  size_t used() const { return used_; }

 private:
  bool map(size_t bytes, int flags);

  uint8_t* map_ = nullptr;
  size_t map_bytes_ = 0;
  uint8_t* base_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace naru
