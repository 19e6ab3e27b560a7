// Engine: a model file ready to be called. In: a path; images and a profile per call. Out: float outputs.
// This header needs nothing but the standard library: it is the C++ interface of anyprec (docs/cpp.md). Calls from many
// threads at once are safe, each with its own profile; results do not depend on threads, batch or instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace anyprec {

struct OpenOptions {
    int max_bits = 0;        // 1..8: read only so many planes; 0: all
    bool verify = true;      // compare every tensor that is read with its checksum
    size_t panel_budget = 0; // most bytes of prepared weights to keep beyond the profile in use; 0: no limit
    std::string isa;         // empty: ANYPREC_ISA, else the best this CPU can run
};

// Images as the caller has them: float32, or uint8 that the file's scale and shift turn into floats.
struct Images {
    const void *data = nullptr;
    bool bytes = false;          // uint8 instead of float32
    bool channels_first = false; // NCHW instead of NHWC
    int n = 0, h = 0, w = 0, c = 0;
};

struct OutputShape {
    int n = 0, h = 0, w = 0, c = 0; // vectors have h = w = 1
};

struct ProfileInfo {
    std::string name;
    int weight_bits = 0, act_bits = 0; // the widest of any layer, but for those 8 bit in all
    double accuracy = 0;               // NaN where unknown
    bool available = false;            // all its planes are there
    size_t bytes = 0;                  // length of the prefix of the file it needs
};

// How a picture becomes an image of the network: FORMAT.md section 2. Whoever decodes pictures follows it.
struct Preprocessing {
    std::string resize;        // "cover", "stretch", "none" (a picture keeps its size); empty: the file does not say
    int height = 0, width = 0; // what is covered or stretched to; then the middle image_height x image_width
    std::string filter;        // "nearest", "bilinear", "bicubic", "lanczos"
    std::vector<float> scale, shift; // uint8 values become fma(u8, scale, shift), per channel; empty: not taken
};

// One step of a run: an op, with those that were fused into it.
struct StepInfo {
    std::string op;       // name in the graph
    std::string work;     // "vpdpbusd, add, quantize", "max_pool", ...
    int64_t products = 0; // multiplications of a convolution
    double seconds = 0;
};

// Ends a run before it is done: by cancel(), from any thread, or because its time is up. A run looks between two steps.
class CancelToken {
  public:
    CancelToken() = default;
    explicit CancelToken(double timeout_s) // from now; 0 or less: at once
        : limited_(true),
          end_(Clock::now() +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(timeout_s, 1e8)))) {}
    void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed) || (limited_ && Clock::now() >= end_); }

  private:
    using Clock = std::chrono::steady_clock;
    std::atomic<bool> cancelled_{false};
    bool limited_ = false;
    Clock::time_point end_{};
};

// What a cancelled run throws; its outputs are not written, or not all of them.
class Cancelled : public std::runtime_error {
  public:
    Cancelled() : std::runtime_error("the run was cancelled") {}
};

class Model {
  public:
    // Throws ModelError (model_error.h), IsaError (cpu.h).
    static std::shared_ptr<Model> open(const std::string &path, const OpenOptions &options = {});
    ~Model();

    const std::string &name() const;
    const std::string &isa() const;
    std::vector<std::string> labels() const;
    int input_height() const, input_width() const, input_channels() const; // 0: free
    int image_height() const, image_width() const; // that it was made for; 0: free, and the file does not say
    bool takes_bytes() const;
    Preprocessing preprocessing() const;
    std::vector<ProfileInfo> profiles() const;
    std::vector<std::string> outputs() const;

    // Looks for planes that arrived since (a file still being downloaded); true if there are more now.
    bool refresh();

    // Throws InputError (shapes.h) for sizes the graph cannot take.
    std::vector<OutputShape> output_shapes(int n, int h, int w) const;
    // Writes output i to outs[i], NHWC. Profile is a number of profiles(). Throws InputError, Cancelled,
    // std::bad_alloc.
    void run(const Images &images, int profile, int threads, float *const *outs, const CancelToken *cancel = nullptr);

    // The steps a profile takes for these images, each with the median time of `repeat` runs.
    std::vector<StepInfo> steps(const Images &images, int profile, int repeat, int threads);
    size_t panel_bytes() const; // prepared weights held now
    size_t arena_bytes() const; // working memory held now
    size_t file_bytes() const;
    size_t loaded_bytes() const; // of the file, held in memory now

  private:
    struct Impl;
    explicit Model(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace anyprec
