// Where a model file's bytes come from: a file, which may still be growing, or memory.
// In: a path, or bytes. Out: copies of them. Used by reader.cpp.
// Nothing is mapped: the system ends a process that touches mapped bytes which another program cut off, and what that
// program writes into the file would change the answers of a model that is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace anyprec {

class Source {
  public:
    virtual ~Source() = default;
    virtual size_t size() = 0;                                      // now: a file may grow
    virtual void read(size_t begin, size_t end, uint8_t *into) = 0; // TruncatedFile if it ends before `end`
};

// Throws ModelError where the file cannot be opened; so may size and read.
std::unique_ptr<Source> file_source(const std::string &path);

// The caller's bytes: they must stay as long as the source.
std::unique_ptr<Source> memory_source(const uint8_t *bytes, size_t size);

// How many bytes this machine has in all; SIZE_MAX where the system does not say.
size_t physical_memory();

} // namespace anyprec
