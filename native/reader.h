// Opens a model file (FORMAT.md), reads it as far as wanted and checks it.
// In: a path, how many bits are wanted. Out: a Graph whose pointers lead into a copy of the file, or a ModelError.
// Called by engine.cpp; nothing of it runs per inference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "anyprec/model_error.h"
#include "graph.h"

namespace anyprec {

// Keeps a copy of what it read: cutting, rewriting, replacing or deleting the file changes nothing here. Const members
// may be called from many threads at once; refresh may not run beside any other use of the graph's planes and tails.
class ModelFile {
  public:
    // max_bits 1..8: planes of wider widths and the float tail are not read; 0 or 32: all of it.
    // verify: every tensor that is read is compared with its checksum, now and in refresh.
    // A file that is still growing opens as soon as its narrowest profile is complete; until then TruncatedFile. If
    // max_bits leaves no profile at all it opens with none available.
    static std::shared_ptr<ModelFile> open(const std::string &path, int max_bits = 0, bool verify = true);
    // The same for a file in memory, which is copied. `name` is what error messages call it.
    static std::shared_ptr<ModelFile> from_memory(const uint8_t *bytes, size_t size, int max_bits = 0,
                                                  bool verify = true, const std::string &name = "<memory>");
    ~ModelFile();
    ModelFile(const ModelFile &) = delete;
    ModelFile &operator=(const ModelFile &) = delete;

    const Graph &graph() const;

    // Whether every plane (or tail) that this profile needs is loaded.
    bool available(int profile) const;
    // How many planes, counted from plane 00 without a gap, are loaded for every weight.
    int planes_available() const;
    // Looks whether a file that was opened incomplete has grown. True if planes or tails appeared; pointers given out
    // before stay good. Throws ModelError where what came is bad; the graph is then as it was.
    bool refresh();
    bool complete() const; // all that max_bits allows is loaded: refresh will find nothing more

    // Length of the prefix that holds everything a width (1..8; 32: the float profile) needs; 0 if it is not in the
    // file.
    size_t bytes_for(int bits) const;
    size_t file_bytes() const;   // as the header says, though a growing file may be shorter
    size_t loaded_bytes() const; // of it, what is loaded now

  private:
    struct Impl;
    explicit ModelFile(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace anyprec
