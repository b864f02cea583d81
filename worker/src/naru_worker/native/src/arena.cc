#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

namespace naru {

bool Arena::map(size_t bytes, int flags) {
  release();
  if (bytes == 0) bytes = 64;
  if (bytes > (size_t{1} << 46)) return false;
  map_bytes_ = ((bytes + kHugeBytes - 1) & ~(kHugeBytes - 1)) + kHugeBytes;
  void* p = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (p == MAP_FAILED) {
    map_bytes_ = 0;
    return false;
  }
  map_ = static_cast<uint8_t*>(p);
  base_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map_) + kHugeBytes - 1) & ~(kHugeBytes - 1));
  size_ = bytes;
  return true;
}

bool Arena::reserve(size_t bytes) {
  // Without MAP_NORESERVE, so that a size beyond the machine is refused here and not met at the first touch.
  if (!map(bytes, 0)) return false;
  prefer_huge(bytes);
  return true;
}

bool Arena::reserve_addresses(size_t bytes) {
  if (!map(bytes, MAP_NORESERVE)) return false;
  // Even where the system is set to huge pages everywhere: the owner says where they may be.
  madvise(map_, map_bytes_, MADV_NOHUGEPAGE);
  return true;
}

void Arena::prefer_huge(size_t bytes) {
  // Only whole huge pages inside: the tail stays small pages, so that no more memory is touched than asked.
  const size_t whole = bytes & ~(kHugeBytes - 1);
  if (whole != 0) madvise(base_, whole, MADV_HUGEPAGE);
}

void Arena::give_back(size_t offset, size_t bytes) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(base_ + offset);
  const uintptr_t begin = (first + page - 1) & ~(page - 1), end = (first + bytes) & ~(page - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
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
