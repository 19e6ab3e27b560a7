// See large_pages.h.
#include "format/large_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace anyprec {

void use_large_pages([[maybe_unused]] uint8_t *data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kPage = uintptr_t(2) << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
    if (first < end)
        (void)madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE); // only advice
#endif
}

bool release_pages([[maybe_unused]] uint8_t *data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    return first < end && madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED) == 0;
#else
    return false;
#endif
}

} // namespace anyprec
