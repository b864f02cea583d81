#include "arena.h"

#include <sys/mman.h>

namespace naru {
namespace {
constexpr size_t kHuge = size_t{1} << 21;
}

bool Arena::reserve(size_t bytes) {
  release();
  if (bytes == 0) bytes = 64;
  if (bytes > (size_t{1} << 46)) return false;
  map_bytes_ = ((bytes + kHuge - 1) & ~(kHuge - 1)) + kHuge;
  // Without MAP_NORESERVE, so that a size beyond the machine is refused here and not met at the first touch.
  void* p = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    map_bytes_ = 0;
    return false;
  }
  map_ = static_cast<uint8_t*>(p);
  base_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map_) + kHuge - 1) & ~(kHuge - 1));
  size_ = bytes;
  used_ = 0;
  // Only whole huge pages inside the arena: the tail stays small pages, so that no more memory is touched than asked.
  const size_t whole = bytes & ~(kHuge - 1);
  if (whole != 0) madvise(base_, whole, MADV_HUGEPAGE);
  return true;
}

void Arena::release() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
  map_ = base_ = nullptr;
  map_bytes_ = size_ = used_ = 0;
}

uint8_t* Arena::take(size_t bytes) {
  const size_t start = (used_ + 63) & ~size_t{63};
  if (start > size_ || bytes > size_ - start) return nullptr;
  used_ = start + bytes;
  return base_ + start;
}

}  // namespace naru
