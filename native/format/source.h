// Source: the bytes of a model file, from a file that may still be growing, or from memory. In: a path, or bytes. Out:
// copies of them. Used by reader.cpp. Files are not mapped into memory: if another program cuts a mapped file, the
// process that reads it is killed, and what the program writes would change a loaded model.
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

// The caller's bytes; they must outlive the source.
std::unique_ptr<Source> memory_source(const uint8_t *bytes, size_t size);

// Bytes of memory of this machine; SIZE_MAX where unknown.
size_t physical_memory();

} // namespace anyprec
