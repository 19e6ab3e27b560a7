// Where a model file's bytes come from: a file, which may still be growing, or memory.
// In: a path, or bytes. Out: parts of them, copied or mapped into pieces that stay where they are. Used by reader.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace anyprec {

// Bytes begin .. end of the source.
class Piece {
  public:
    virtual ~Piece() = default;
    virtual void drop(size_t, size_t) const {} // gives the memory of begin .. end back, if it can be had again
    const uint8_t *at(size_t offset) const { return first_ + (offset - begin_); }

  protected:
    const uint8_t *first_ = nullptr;
    size_t begin_ = 0;
};

class Source {
  public:
    virtual ~Source() = default;
    virtual size_t size() = 0; // now: a file may grow
    virtual void read(size_t begin, size_t end, char *into) = 0;
    virtual std::unique_ptr<Piece> piece(size_t begin, size_t end) = 0; // begin < end <= size()
};

// Throws ModelError where the file cannot be opened; so may size, read and piece.
std::unique_ptr<Source> file_source(const std::string &path);

// The caller's bytes: they must stay until the last piece is taken.
std::unique_ptr<Source> memory_source(const uint8_t *bytes, size_t size);

} // namespace anyprec
