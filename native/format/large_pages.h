// Large pages for memory that is about to be filled: the model file's copy, panels, large arenas. In: fresh memory.
// Out: the same, with a request to the operating system.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anyprec {

// Huge pages (2 MiB) where the memory has whole ones: page faults take a tenth of the time, 0.1 ms per MiB instead
// of 1.
void use_large_pages(uint8_t *data, size_t bytes);

} // namespace anyprec
