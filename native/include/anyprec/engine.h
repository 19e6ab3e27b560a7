// The C++ interface of anyprec (docs/cpp.md): Model runs a model file. In: a path; arrays and a profile per call. Out:
// float outputs. The header needs only the standard library. Calls from many threads are safe, each with its own
// profile. Results do not depend on threads, batch or instruction set.
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

#include "cpu.h"
#include "input_error.h"
#include "model_error.h"

namespace anyprec {

struct OpenOptions {
    int max_bits = 0;        // 1..8: read only planes of widths up to this; 0: all
    bool verify = true;      // compare every tensor that is read with its checksum
    size_t panel_budget = 0; // bytes of prepared weights to keep beyond the profile in use; 0: no limit
    std::string isa;         // empty: ANYPREC_ISA, else the best this CPU can run
    bool keep_copy = true;   // false: free the file's bytes once weights are prepared; another width reads them again
};

// Images as the caller has them: float32, or uint8 that the file's scale and shift turn into floats.
struct Images {
    const void *data = nullptr;
    bool bytes = false;          // uint8 instead of float32
    bool channels_first = false; // NCHW instead of NHWC
    int n = 0, h = 0, w = 0, c = 0;
};

struct OutputShape {
    int n = 0, h = 0, w = 0, c = 0; // vectors have h = w = 1; values that are no images have their pixels as w
};

// One input as the caller has it: float32; the first may be uint8 images. Arrays of three axes besides N are images.
struct InputArray {
    const void *data = nullptr;
    bool bytes = false;          // uint8 instead of float32
    bool channels_first = false; // images: (N, C, H, W) instead of (N, H, W, C)
    std::vector<int> shape;      // N first
};

struct InputInfo {
    std::string name;       // "input" is the first
    std::vector<int> shape; // without N; images are H, W, C; 0: any size
    bool integer = false;   // whole numbers from -2^24 to 2^24, as floats
};

struct ProfileInfo {
    std::string name;
    int weight_bits = 0, act_bits = 0; // the widest of all layers, without layers that are always 8 bit
    double accuracy = 0;               // NaN where unknown
    bool available = false;            // all its planes are loaded
    size_t bytes = 0;                  // of the file prefix it needs
};

// How a picture becomes an image for the network: ARITHMETIC.md, section 7. A caller that decodes pictures follows it.
struct Preprocessing {
    std::string resize;              // "cover", "stretch", "none" (keep the size); empty: the file does not say
    int height = 0, width = 0;       // size to cover or stretch to; then crop the middle image_height x image_width
    std::string filter;              // "nearest", "bilinear", "bicubic", "lanczos"
    std::vector<float> scale, shift; // uint8 values become fma(u8, scale, shift), per channel; empty: no uint8 images
};

// One step of a run: an op, and the ops fused with it.
struct StepInfo {
    std::string op;       // name in the graph
    std::string work;     // "vpdpbusd, add, quantize", "max_pool", ...
    int64_t products = 0; // multiplications of a convolution
    double seconds = 0;
    bool scalar = false; // its inner loop handles numbers one by one, also where there are vectors
};

// Ends a run early: by cancel(), from any thread, or after a timeout. A run checks it between two steps.
class CancelToken {
  public:
    CancelToken() = default;
    explicit CancelToken(double timeout_s) // from now; 0 or less: cancelled at once
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

// Thrown by a cancelled run. Its outputs are incomplete.
class Cancelled : public std::runtime_error {
  public:
    Cancelled() : std::runtime_error("the run was cancelled") {}
};

class KeptRun;

class Model : public std::enable_shared_from_this<Model> {
  public:
    // Throws ModelError, IsaError.
    static std::shared_ptr<Model> open(const std::string &path, const OpenOptions &options = {});
    ~Model();

    const std::string &name() const;
    const std::string &isa() const;
    std::vector<std::string> labels() const;
    int input_height() const, input_width() const, input_channels() const; // of images; 0: any size, or no image
    int image_height() const, image_width() const; // size it was made for; 0: any, and the file does not say
    bool takes_bytes() const;
    Preprocessing preprocessing() const;
    std::vector<ProfileInfo> profiles() const;
    std::vector<InputInfo> inputs() const;
    std::vector<std::string> outputs() const;

    // Loads planes that arrived since (a file that is still being downloaded); returns whether there are more now.
    bool refresh();

    // Throws InputError for sizes the graph cannot take.
    std::vector<OutputShape> output_shapes(int n, int h, int w) const;
    // Writes output i to outs[i], NHWC. `profile` is an index into profiles(). Throws InputError, Cancelled,
    // std::bad_alloc.
    void run(const Images &images, int profile, int threads, float *const *outs, const CancelToken *cancel = nullptr);

    // The same for models with several inputs, or inputs that are no images: arrays in the order of inputs(), all of
    // one N. Shapes of outputs have N first; images are NHWC.
    std::vector<std::vector<int>> output_shapes(const std::vector<InputArray> &arrays) const;
    void run(const std::vector<InputArray> &arrays, int profile, int threads, float *const *outs,
             const CancelToken *cancel = nullptr);
    std::vector<StepInfo> steps(const std::vector<InputArray> &arrays, int profile, int repeat, int threads);
    // The same as `run`, and keeps what no profile changes, such as the output of a float stem: some of the images can
    // then run at another profile without computing it again.
    std::unique_ptr<KeptRun> run_keeping(const std::vector<InputArray> &arrays, int profile, int threads,
                                         float *const *outs, const CancelToken *cancel = nullptr);

    // The steps of a profile for these images, each with its median time over `repeat` runs.
    std::vector<StepInfo> steps(const Images &images, int profile, int repeat, int threads);
    size_t panel_bytes() const; // prepared weights in memory
    size_t arena_bytes() const; // working memory
    size_t file_bytes() const;
    size_t loaded_bytes() const; // bytes of the file in memory

  private:
    friend class KeptRun;
    struct Impl;
    explicit Model(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// What Model::run_keeping has kept of a batch. It holds memory of its model, and the model open, until it is destroyed.
// Calls from many threads are safe.
class KeptRun {
  public:
    ~KeptRun();
    int images() const;
    std::vector<std::vector<int>> output_shapes(int images) const;
    // Runs the images of these numbers, in this order, at a profile; outputs are those of Model::run for them, bit for
    // bit. Throws InputError for a number that is no image's; otherwise as Model::run.
    void run(const std::vector<int> &rows, int profile, int threads, float *const *outs,
             const CancelToken *cancel = nullptr) const;

  private:
    friend class Model;
    struct Impl;
    explicit KeptRun(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace anyprec
