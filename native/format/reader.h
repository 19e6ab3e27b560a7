// ModelFile: opens a model file (FORMAT.md), reads the planes that are wanted and checks them. In: a path, a number of
// bits. Out: a Graph whose pointers lead into a copy of the file, or a ModelError. Called by engine.cpp when a model is
// opened, never during inference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "anyprec/model_error.h"
#include "format/graph.h"

namespace anyprec {

// Keeps a copy of what it read: cutting, rewriting, replacing or deleting the file has no effect. Without `keep_copy`,
// release frees the copy of the planes and tails, and need reads them again. Const members may be called from many
// threads. refresh, release and need must not run while the graph's planes and tails are in use.
class ModelFile {
  public:
    // max_bits 1..8: planes of wider widths and the float tail are not read; 0 or 32: read all.
    // verify: compare every tensor that is read with its checksum, now and in refresh.
    // A growing file opens as soon as its narrowest profile is complete; before that, TruncatedFile. If max_bits allows
    // no profile, the file opens with none available.
    static std::shared_ptr<ModelFile> open(const std::string &path, int max_bits = 0, bool verify = true,
                                           bool keep_copy = true);
    // The same for a file in memory, which is copied. `name` is its name in error messages.
    static std::shared_ptr<ModelFile> from_memory(const uint8_t *bytes, size_t size, int max_bits = 0,
                                                  bool verify = true, const std::string &name = "<memory>");
    ~ModelFile();
    ModelFile(const ModelFile &) = delete;
    ModelFile &operator=(const ModelFile &) = delete;

    const Graph &graph() const;

    // Whether every plane (or tail) that this profile needs is loaded.
    bool available(int profile) const;
    // Number of planes, counted from plane 00 without a gap, that are loaded for every weight.
    int planes_available() const;
    // Loads what a growing file gained. True if planes or tails appeared; existing pointers stay valid. Throws
    // ModelError where the new bytes are bad; the graph is then unchanged.
    bool refresh();
    // Frees the copy of all planes and tails, unless it is to be kept; tables and float weights stay.
    void release();
    // Reads the planes that a weight has at `bits`, or its tail (32), again if they were released, and compares them
    // with their checksums. Throws ModelError if the file was cut or rewritten since.
    void need(int weight, int bits);
    bool complete() const; // everything that max_bits allows is loaded: refresh will find nothing more

    // Length of the file prefix that a width (1..8; 32: the float profile) needs; 0: not in the file.
    size_t bytes_for(int bits) const;
    size_t file_bytes() const;   // as the header says; a growing file may be shorter
    size_t loaded_bytes() const; // bytes in memory

  private:
    struct Impl;
    explicit ModelFile(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace anyprec
