// See engine.h. Plans and panels are made on first use under one mutex and are then read-only. Every call takes an
// arena of its own from a pool, so calls do not wait for each other.
#include "anyprec/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <tuple>

#include "anyprec/cpu.h"
#include "format/reader.h"
#include "kernels/kernels.h"
#include "plan/panels.h"
#include "plan/plan.h"
#include "run/execute.h"
#include "run/fork.h"
#include "run/threads.h"

namespace anyprec {
namespace {

// Memory kept for the next call. A larger arena is freed after its call; for tables see drop_large_tables.
constexpr size_t kKeptArena = size_t(64) << 20, kKeptTables = size_t(64) << 20;

struct Arena {
    std::unique_ptr<uint8_t[]> storage; // not cleared: untouched pages cost nothing
    uint8_t *data = nullptr;
    size_t bytes = 0;

    explicit Arena(size_t size) : storage(new uint8_t[size + 64]), data(at_line(storage.get())), bytes(size) {
        if (bytes > kKeptArena)
            use_large_pages(data, bytes);
    }
};

struct PlanKey {
    int profile = 0;
    std::vector<Shape> inputs;
    PlanPart part = PlanPart::whole;
    bool operator==(const PlanKey &o) const { return profile == o.profile && part == o.part && inputs == o.inputs; }
    void set_images(int n) {
        for (Shape &shape : inputs)
            shape.n = n;
    }
};

// A group of images after PlanPart::keeping: its plan, and the arena with the kept values.
struct KeptGroup {
    int first = 0;
    std::shared_ptr<const Plan> plan;
    std::unique_ptr<Arena> arena;
};

// The shape of an array, in the order of the file.
Shape shape_of(const InputArray &array) {
    const size_t rank = array.shape.size();
    if (rank < 2 || rank > size_t(MAX_AXES) + 1)
        throw InputError("an input has " + std::to_string(rank) + " axes; give N and 1 to 6 more");
    Shape shape;
    shape.n = array.shape[0];
    for (size_t i = 1; i < rank; ++i)
        shape.size[shape.rank++] = array.shape[i];
    if (array.channels_first && shape.is_image())
        std::rotate(shape.size, shape.size + 1, shape.size + 3); // C, H, W
    return shape;
}

std::vector<Shape> shapes_of(const std::vector<InputArray> &arrays) {
    std::vector<Shape> shapes;
    for (const InputArray &array : arrays)
        shapes.push_back(shape_of(array));
    return shapes;
}

InputArray as_array(const Images &images) {
    InputArray array;
    array.data = images.data;
    array.bytes = images.bytes;
    array.channels_first = images.channels_first;
    if (images.channels_first)
        array.shape = {images.n, images.c, images.h, images.w};
    else
        array.shape = {images.n, images.h, images.w, images.c};
    return array;
}

void refuse_bad_index(const RunEnd &end) {
    if (end.how == RunEnd::bad_index)
        throw InputError("op '" + end.op->name +
                         "' reads a number that is none of its rows: whole numbers from 0, "
                         "below their number, are needed");
}

// The shape of every output, N first.
std::vector<std::vector<int>> sizes_of_outputs(const Graph &graph, const std::vector<Shape> &inputs) {
    const std::vector<Shape> shapes = infer_shapes(graph, inputs);
    std::vector<std::vector<int>> result;
    for (int value : graph.outputs) {
        const Shape &s = shapes[static_cast<size_t>(value)];
        result.push_back({s.n});
        result.back().insert(result.back().end(), s.size, s.size + s.rank);
    }
    return result;
}

bool all_whole(const float *x, size_t count) {
    bool whole = true;
    for (size_t i = 0; i < count; ++i)
        whole = whole && std::fabs(x[i]) <= 16777216.0f && x[i] == std::nearbyint(x[i]);
    return whole;
}

} // namespace

struct Model::Impl : Forkable {
    std::shared_ptr<ModelFile> file;
    std::string isa;
    const Kernels *kernels = nullptr;
    size_t budget = 0;
    ThreadPool pool;

    std::mutex mutex;                     // guards all members below, and the file's planes
    std::unique_ptr<SharedPrefix> prefix; // made when first needed: then all tables of the file are there
    std::unique_ptr<SharedPrefix> split;  // of a large batch; by the size of the first one's images
    // Plans by last use, most recent first. Plans share ownership of panels; `panels` finds those that exist.
    std::list<std::pair<PlanKey, std::shared_ptr<const Plan>>> plans;
    std::map<std::tuple<int, int, const TileKernel *, int, std::vector<int>>, std::weak_ptr<const Panel>> panels;
    std::vector<std::unique_ptr<Arena>> arenas; // not in use
    size_t arena_total = 0;
    size_t table_total = 0; // of all plans in `plans`
    // uint8 images: the float value of every byte, by channel.
    std::vector<float> byte_values; // [channel][256]

    // The child of a fork keeps all plans, panels and free arenas.
    void before_fork() override { mutex.lock(); }
    void after_fork_in_parent() override { mutex.unlock(); }
    void after_fork_in_child() override;

    const Graph &graph() const { return file->graph(); }
    std::shared_ptr<const Plan> plan_for(const PlanKey &key);
    std::shared_ptr<const Panel> panel(int weight, int bits, const TileKernel *kernel, int groups,
                                       const std::vector<int> &tap_order);
    size_t held() const;
    void keep_to_budget();
    void drop_large_tables();
    std::unique_ptr<Arena> take_arena(size_t bytes);
    void give_back(std::unique_ptr<Arena> arena);
    void check_profile(int profile) const;
    void check_arrays(const std::vector<InputArray> &arrays) const;
    void fill_images(const Plan &plan, size_t value, const InputArray &array, uint8_t *arena) const;
    void fill_inputs(const Plan &plan, const std::vector<InputArray> &arrays, uint8_t *arena) const;
    void copy_kept(const KeptGroup &group, int image, const Plan &plan, int to, uint8_t *arena) const;
    void fill_kept(const Plan &plan, const std::vector<KeptGroup> &kept, const int *rows, uint8_t *arena) const;
    using Fill = std::function<void(const Plan &plan, int first, uint8_t *arena)>; // writes images from `first` on
    void run_groups(PlanKey key, int threads, float *const *outs, const CancelToken *cancel, const Fill &fill,
                    std::vector<KeptGroup> *keep = nullptr);
    void run_split(PlanKey key, int group, int threads, std::vector<float *> &targets, const CancelToken *cancel,
                   const Fill &fill);
    void run_group(const PlanKey &key, int first, int threads, std::vector<float *> &targets, const CancelToken *cancel,
                   const Fill &fill, std::vector<KeptGroup> *keep);
    void run_arrays(const std::vector<InputArray> &arrays, PlanKey key, int threads, float *const *outs,
                    const CancelToken *cancel, std::vector<KeptGroup> *keep = nullptr);
};

struct KeptRun::Impl {
    std::shared_ptr<Model> model;
    std::vector<Shape> inputs;
    std::vector<KeptGroup> groups; // by first
};

void Model::Impl::after_fork_in_child() {
    pool.after_fork_in_child();
    arena_total = 0; // arenas of calls in other threads are lost
    for (const std::unique_ptr<Arena> &arena : arenas)
        arena_total += arena->bytes;
    mutex.unlock();
}

std::shared_ptr<const Panel> Model::Impl::panel(int weight, int bits, const TileKernel *kernel, int groups,
                                                const std::vector<int> &tap_order) {
    std::weak_ptr<const Panel> &known = panels[{weight, bits, kernel, groups, tap_order}];
    std::shared_ptr<const Panel> found = known.lock();
    if (!found) {
        const Weight &w = graph().weights[static_cast<size_t>(weight)];
        found = std::make_shared<const Panel>(kernel        ? build_panel(graph(), w, *kernel, bits, groups, tap_order)
                                              : groups == 0 ? build_recurrent_panel(w, kernels->functions->matmul_width)
                                                            : build_depthwise_panel(graph(), w, bits));
        known = found;
    }
    return found;
}

size_t Model::Impl::held() const {
    size_t bytes = 0;
    for (const auto &entry : panels)
        if (const auto panel = entry.second.lock())
            bytes += panel->held();
    return bytes;
}

// Drops the least recently used plans until the panels fit the budget; the most recent one stays. A plan in use lives
// until its call ends.
void Model::Impl::keep_to_budget() {
    // Input sizes times profiles: a server has 8 batch sizes of 20 levels. Plans are small, but a caller may try
    // thousands.
    constexpr size_t kMostPlans = 256;
    while (plans.size() > 1 && (plans.size() > kMostPlans || (budget && held() > budget))) {
        table_total -= plans.back().second->table_bytes;
        plans.pop_back();
    }
    drop_large_tables();
}

// Tables grow with the image: 36 MiB for a 3x3 convolution of 1024 x 1024 pixels. The plan of one huge image is dropped
// when another plan is used, the largest first; a plan that is used repeatedly stays.
void Model::Impl::drop_large_tables() {
    while (table_total > kKeptTables && plans.size() > 1) {
        const auto largest = std::max_element(std::next(plans.begin()), plans.end(), [](const auto &a, const auto &b) {
            return a.second->table_bytes < b.second->table_bytes;
        });
        if (largest->second->table_bytes == 0)
            return;
        table_total -= largest->second->table_bytes;
        plans.erase(largest);
    }
}

std::shared_ptr<const Plan> Model::Impl::plan_for(const PlanKey &key) {
    for (auto it = plans.begin(); it != plans.end(); ++it)
        if (it->first == key) {
            plans.splice(plans.begin(), plans, it);
            drop_large_tables();
            return plans.front().second;
        }
    const bool is_split = key.part == PlanPart::split_prefix || key.part == PlanPart::split_rest;
    if (!is_split && key.part != PlanPart::whole && !prefix)
        prefix = std::make_unique<SharedPrefix>(graph());
    auto plan = std::make_shared<const Plan>(make_plan(
        graph(), key.profile, key.inputs, *kernels,
        [this](int weight, int bits, const TileKernel *kernel, int groups, const std::vector<int> &order) {
            return panel(weight, bits, kernel, groups, order);
        },
        key.part, is_split ? split.get() : prefix.get()));
    plans.emplace_front(key, plan);
    table_total += plan->table_bytes;
    keep_to_budget();
    return plan;
}

std::unique_ptr<Arena> Model::Impl::take_arena(size_t bytes) {
    // The smallest that is large enough. Otherwise a new one replaces the largest of the small ones.
    auto best = arenas.end();
    for (auto it = arenas.begin(); it != arenas.end(); ++it)
        if ((*it)->bytes >= bytes && (best == arenas.end() || (*it)->bytes < (*best)->bytes))
            best = it;
    if (best == arenas.end()) {
        if (!arenas.empty() && bytes <= kKeptArena) {
            arena_total -= arenas.back()->bytes;
            arenas.pop_back();
        }
        auto arena = std::make_unique<Arena>(bytes);
        arena_total += bytes;
        return arena;
    }
    std::unique_ptr<Arena> arena = std::move(*best);
    arenas.erase(best);
    return arena;
}

void Model::Impl::give_back(std::unique_ptr<Arena> arena) {
    std::lock_guard<std::mutex> lock(mutex);
    if (arena->bytes > kKeptArena)
        arena_total -= arena->bytes; // and it is freed
    else
        arenas.push_back(std::move(arena));
}

void Model::Impl::check_profile(int profile) const {
    const auto count = static_cast<int>(graph().profiles.size());
    if (profile < 0 || profile >= count)
        throw InputError("profile number " + std::to_string(profile) + " does not exist; there are " +
                         std::to_string(count));
    if (!file->available(profile))
        throw InputError("profile '" + graph().profiles[static_cast<size_t>(profile)].name +
                         "' needs planes that are not loaded (max_bits, or a file still growing)");
}

void Model::Impl::check_arrays(const std::vector<InputArray> &arrays) const {
    if (arrays.size() != graph().input_count())
        throw InputError("the model takes " + std::to_string(graph().input_count()) + " input(s), not " +
                         std::to_string(arrays.size()));
    for (size_t i = 0; i < arrays.size(); ++i) {
        if (arrays[i].bytes && (i || byte_values.empty()))
            throw InputError(
                "this model file does not say how uint8 images become floats; give float32, or pack it with image=");
        if (graph().input_is_integer(i) &&
            !all_whole(static_cast<const float *>(arrays[i].data), shape_of(arrays[i]).count()))
            throw InputError("the input '" + graph().input_name(i) + "' holds whole numbers from -2^24 to 2^24");
    }
}

// Writes one line of pixels; at(channel, x) gives each value.
template <typename At> void fill_line(float *to, int width, int channels, const At &at) {
    if (channels == 3) {
        for (int x = 0; x < width; ++x, to += 3) {
            to[0] = at(0, x);
            to[1] = at(1, x);
            to[2] = at(2, x);
        }
    } else {
        for (int x = 0; x < width; ++x)
            for (int c = 0; c < channels; ++c)
                *to++ = at(c, x);
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ANYPREC_SHUFFLES
#endif
#endif

// Three planes to pixels of three channels. Four pixels at a time: one by one took 0.1 ms for 224 x 224.
static void interleave(const float *x, size_t plane, int width, float *to) {
    int i = 0;
#if defined(ANYPREC_SHUFFLES)
    typedef float Lanes __attribute__((vector_size(16)));
    typedef float Numbers __attribute__((vector_size(16), aligned(4), may_alias));
    for (; i + 4 <= width; i += 4, to += 12) {
        const Lanes a = *reinterpret_cast<const Numbers *>(x + i);
        const Lanes b = *reinterpret_cast<const Numbers *>(x + plane + i);
        const Lanes c = *reinterpret_cast<const Numbers *>(x + 2 * plane + i);
        const Lanes low = __builtin_shufflevector(a, b, 0, 4, 1, 5), high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        Numbers *out = reinterpret_cast<Numbers *>(to);
        out[0] = __builtin_shufflevector(low, __builtin_shufflevector(c, low, 0, 6, 1, 7), 0, 1, 4, 5);
        out[1] = __builtin_shufflevector(__builtin_shufflevector(low, c, 3, 5, 3, 5), high, 0, 1, 4, 5);
        out[2] = __builtin_shufflevector(__builtin_shufflevector(c, high, 2, 6, 3, 7),
                                         __builtin_shufflevector(high, c, 3, 7, 3, 7), 0, 1, 4, 5);
    }
#endif
    for (; i < width; ++i)
        for (size_t c = 0; c < 3; ++c)
            *to++ = x[plane * c + static_cast<size_t>(i)];
}

void Model::Impl::fill_images(const Plan &plan, size_t value, const InputArray &array, uint8_t *arena) const {
    const Buffer &buffer = plan.buffers[value];
    const Shape &shape = plan.shapes[value];
    const int height = shape.h(), width = shape.w();
    const PaddedInput padded = value ? PaddedInput{0, 0, height, width, false} : plan.padded_input;
    const size_t plane = static_cast<size_t>(height) * width, channels = static_cast<size_t>(shape.c());
    const size_t line = channels * static_cast<size_t>(width),
                 padded_line = channels * static_cast<size_t>(padded.width);
    for (int n = 0; n < shape.n; ++n) {
        uint8_t *image = arena + buffer.offset + buffer.image * static_cast<size_t>(n);
        float *zeros = reinterpret_cast<float *>(image - buffer.shift);
        float *const pixels = reinterpret_cast<float *>(image + buffer.pixel);
        float *to = pixels + padded_line * static_cast<size_t>(padded.top) + channels * padded.left;
        float *const end = pixels + channels * static_cast<size_t>(buffer.pixels);
        std::fill(zeros, to, 0.0f); // the pixel of zeros, and padding up to the first pixel
        for (int y = 0; y < height; ++y, to += padded_line) {
            const size_t at = static_cast<size_t>(n) * plane * channels; // start of the image
            const size_t first = at + static_cast<size_t>(y) * (array.channels_first ? width : line);
            const size_t pixel = array.channels_first ? 1 : channels, channel = array.channels_first ? plane : 1;
            if (array.bytes) {
                const uint8_t *x = static_cast<const uint8_t *>(array.data) + first;
                fill_line(to, width, shape.c(), [&](int c, int i) {
                    return byte_values[static_cast<size_t>(c) * 256 + x[channel * c + pixel * i]];
                });
            } else if (array.channels_first) {
                const float *x = static_cast<const float *>(array.data) + first;
                if (channels == 3)
                    interleave(x, plane, width, to);
                else
                    fill_line(to, width, shape.c(), [&](int c, int i) { return x[plane * c + i]; });
            } else {
                std::memcpy(to, static_cast<const float *>(array.data) + first, 4 * line);
            }
            const bool last = y + 1 == height;
            std::fill(to + line, last ? end : to + padded_line, 0.0f); // padding up to the next line
        }
    }
}

void Model::Impl::fill_inputs(const Plan &plan, const std::vector<InputArray> &arrays, uint8_t *arena) const {
    for (size_t value = 0; value < arrays.size(); ++value) {
        const Buffer &buffer = plan.buffers[value];
        const Shape &shape = plan.shapes[value];
        if (shape.is_image()) {
            fill_images(plan, value, arrays[value], arena);
            continue;
        }
        const size_t bytes = 4 * static_cast<size_t>(shape.product(0, shape.rank));
        for (int n = 0; n < shape.n; ++n) {
            uint8_t *image = arena + buffer.offset + buffer.image * static_cast<size_t>(n);
            std::memset(image - buffer.shift, 0, buffer.shift + buffer.pixel);
            std::memcpy(image + buffer.pixel, static_cast<const uint8_t *>(arrays[value].data) + bytes * n, bytes);
        }
    }
}

// The kept values of one image of a group, to image `to` of a plan's arena. Both plans lay out a kept value alike.
void Model::Impl::copy_kept(const KeptGroup &group, int image, const Plan &plan, int to, uint8_t *arena) const {
    for (int value : plan.kept) {
        const Buffer &from = group.plan->buffers[static_cast<size_t>(value)];
        const Buffer &buffer = plan.buffers[static_cast<size_t>(value)];
        const uint8_t *source = group.arena->data + from.offset + from.image * static_cast<size_t>(image);
        uint8_t *target = arena + buffer.offset + buffer.image * static_cast<size_t>(to);
        std::memset(target - buffer.shift, 0, buffer.shift + buffer.pixel); // the pixel of zeros
        std::memcpy(target + buffer.pixel, source + from.pixel, buffer.pixel * static_cast<size_t>(buffer.pixels));
    }
}

// Kept values of the images rows[0], rows[1], ... as the plan has them.
void Model::Impl::fill_kept(const Plan &plan, const std::vector<KeptGroup> &kept, const int *rows,
                            uint8_t *arena) const {
    for (int n = 0; n < plan.images; ++n) {
        const auto after = std::upper_bound(kept.begin(), kept.end(), rows[n],
                                            [](int row, const KeptGroup &group) { return row < group.first; });
        copy_kept(*std::prev(after), rows[n] - std::prev(after)->first, plan, n, arena);
    }
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
    add_forkable(*impl_);
}
Model::~Model() {
    remove_forkable(*impl_);
}

std::shared_ptr<Model> Model::open(const std::string &path, const OpenOptions &options) {
    auto impl = std::make_unique<Impl>();
    impl->isa = options.isa.empty() ? anyprec::isa() : choose_isa(options.isa, cpu_features(), "isa");
    impl->kernels = find_kernels(impl->isa.c_str()); // choose_isa gave the name of a built one
    impl->budget = options.panel_budget;
    impl->file = ModelFile::open(path, options.max_bits, options.verify);
    const Graph &graph = impl->graph();
    for (size_t c = 0; c < graph.image_scale.size(); ++c)
        for (int b = 0; b < 256; ++b)
            impl->byte_values.push_back(std::fma(static_cast<float>(b), graph.image_scale[c], graph.image_shift[c]));
    return std::shared_ptr<Model>(new Model(std::move(impl)));
}

const std::string &Model::name() const {
    return impl_->graph().name;
}
const std::string &Model::isa() const {
    return impl_->isa;
}
std::vector<std::string> Model::labels() const {
    return impl_->graph().labels;
}
int Model::input_height() const {
    return impl_->graph().input.is_image() ? impl_->graph().input.h() : 0;
}
int Model::input_width() const {
    return impl_->graph().input.is_image() ? impl_->graph().input.w() : 0;
}
int Model::input_channels() const {
    return impl_->graph().input.c();
}
int Model::image_height() const {
    return input_height() ? input_height() : impl_->graph().image_h;
}
int Model::image_width() const {
    return input_width() ? input_width() : impl_->graph().image_w;
}
bool Model::takes_bytes() const {
    return !impl_->byte_values.empty();
}
Preprocessing Model::preprocessing() const {
    const Graph &graph = impl_->graph();
    return {graph.resize, graph.resize_h, graph.resize_w, graph.filter, graph.image_scale, graph.image_shift};
}
size_t Model::file_bytes() const {
    return impl_->file->file_bytes();
}

size_t Model::loaded_bytes() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->file->loaded_bytes();
}

std::vector<ProfileInfo> Model::profiles() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    std::vector<ProfileInfo> infos;
    const Graph &graph = impl_->graph();
    for (size_t p = 0; p < graph.profiles.size(); ++p) {
        const Profile &profile = graph.profiles[p];
        ProfileInfo info;
        info.name = profile.name;
        for (size_t i = 0; i < graph.weights.size(); ++i)
            if (!graph.weights[i].is_float && (!graph.weights[i].fixed_bits || profile.weight_bits[i] == FLOAT_BITS))
                info.weight_bits = std::max<int>(info.weight_bits, profile.weight_bits[i]);
        for (size_t i = 0; i < graph.ops.size(); ++i)
            if (!graph.ops[i].fixed_bits || profile.act_bits[i] == FLOAT_BITS)
                info.act_bits = std::max<int>(info.act_bits, profile.act_bits[i]);
        info.accuracy = profile.accuracy;
        info.available = impl_->file->available(static_cast<int>(p));
        info.bytes = info.weight_bits ? impl_->file->bytes_for(info.weight_bits) : impl_->file->file_bytes();
        infos.push_back(info);
    }
    return infos;
}

std::vector<std::string> Model::outputs() const {
    std::vector<std::string> names;
    for (int value : impl_->graph().outputs)
        names.push_back(value ? impl_->graph().ops[static_cast<size_t>(value) - 1].name : "input");
    return names;
}

bool Model::refresh() {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    const bool more = impl_->file->refresh();
    for (SharedPrefix *part : {impl_->prefix.get(), impl_->split.get()})
        if (part)
            part->graph.weights = impl_->graph().weights; // which know their planes; ops, which plans point to, stay
    return more;
}

std::vector<InputInfo> Model::inputs() const {
    const Graph &graph = impl_->graph();
    std::vector<InputInfo> infos;
    for (size_t i = 0; i < graph.input_count(); ++i) {
        const Shape &shape = graph.input_shape(i);
        infos.push_back({graph.input_name(i), {shape.size, shape.size + shape.rank}, graph.input_is_integer(i)});
    }
    return infos;
}

std::vector<OutputShape> Model::output_shapes(int n, int h, int w) const {
    const std::vector<Shape> shapes = infer_shapes(impl_->graph(), n, h, w);
    std::vector<OutputShape> result;
    for (int value : impl_->graph().outputs) {
        const Shape &s = shapes[static_cast<size_t>(value)];
        if (s.is_image())
            result.push_back({s.n, s.h(), s.w(), s.c()});
        else
            result.push_back({s.n, 1, static_cast<int>(s.pixels()), s.c()});
    }
    return result;
}

std::vector<std::vector<int>> Model::output_shapes(const std::vector<InputArray> &arrays) const {
    return sizes_of_outputs(impl_->graph(), shapes_of(arrays));
}

void Model::run(const Images &images, int profile, int threads, float *const *outs, const CancelToken *cancel) {
    run({as_array(images)}, profile, threads, outs, cancel);
}

void Model::run(const std::vector<InputArray> &arrays, int profile, int threads, float *const *outs,
                const CancelToken *cancel) {
    impl_->run_arrays(arrays, {profile, shapes_of(arrays)}, threads, outs, cancel);
}

std::unique_ptr<KeptRun> Model::run_keeping(const std::vector<InputArray> &arrays, int profile, int threads,
                                            float *const *outs, const CancelToken *cancel) {
    auto kept = std::make_unique<KeptRun::Impl>();
    kept->model = shared_from_this();
    kept->inputs = shapes_of(arrays);
    std::unique_ptr<KeptRun> run(new KeptRun(std::move(kept))); // gives its arenas back, even after an error
    impl_->run_arrays(arrays, {profile, run->impl_->inputs, PlanPart::keeping}, threads, outs, cancel,
                      &run->impl_->groups);
    return run;
}

void Model::Impl::run_arrays(const std::vector<InputArray> &arrays, PlanKey key, int threads, float *const *outs,
                             const CancelToken *cancel, std::vector<KeptGroup> *keep) {
    check_arrays(arrays);
    const int images = key.inputs[0].n;
    for (const Shape &shape : key.inputs)
        if (shape.n != images)
            throw InputError("inputs have " + std::to_string(images) + " and " + std::to_string(shape.n) +
                             " images; give one number of all");
    std::vector<size_t> sizes; // bytes of one image, by input
    key.set_images(1);
    for (size_t i = 0; i < arrays.size(); ++i)
        sizes.push_back(key.inputs[i].count() * (arrays[i].bytes ? 1 : 4));
    key.set_images(images);
    const auto fill = [&](const Plan &plan, int first, uint8_t *arena) {
        std::vector<InputArray> rest = arrays;
        for (size_t i = 0; i < rest.size(); ++i)
            rest[i].data = static_cast<const uint8_t *>(rest[i].data) + sizes[i] * static_cast<size_t>(first);
        fill_inputs(plan, rest, arena);
    };
    run_groups(std::move(key), threads, outs, cancel, fill, keep);
}

// A large batch is computed in groups whose working memory stays near the L2 cache. That is faster than all at once,
// and the memory of a call does not grow with its batch.
void Model::Impl::run_groups(PlanKey key, int threads, float *const *outs, const CancelToken *cancel, const Fill &fill,
                             std::vector<KeptGroup> *keep) {
    constexpr size_t kGroupBytes = size_t(4) << 20;
    const int images = key.inputs[0].n;
    int group = images;
    bool splits = false;
    if (images > 1) {
        std::lock_guard<std::mutex> lock(mutex);
        check_profile(key.profile);
        key.set_images(1);
        const size_t one = std::max<size_t>(plan_for(key)->arena_bytes, 1);
        group = static_cast<int>(std::min<size_t>(static_cast<size_t>(images), std::max<size_t>(kGroupBytes / one, 1)));
        splits = group < images && key.part == PlanPart::whole;
        if (splits && !split)
            split = std::make_unique<SharedPrefix>(graph(), plan_for(key)->shapes);
        splits = splits && !split->empty();
        key.set_images(images);
    }
    std::vector<float *> targets(outs, outs + graph().outputs.size());
    if (splits)
        return run_split(std::move(key), group, threads, targets, cancel, fill);
    for (int first = 0; first < images || first == 0; first += group) {
        key.set_images(std::min(group, images - first));
        run_group(key, first, threads, targets, cancel, fill, keep);
    }
}

// The layers with more weights than image run for many images together: their weights come from memory once. The layers
// before them run in groups, as above.
void Model::Impl::run_split(PlanKey key, int group, int threads, std::vector<float *> &targets,
                            const CancelToken *cancel, const Fill &fill) {
    constexpr size_t kTogetherBytes = size_t(16) << 20;
    const int images = key.inputs[0].n;
    PlanKey prefix_key = key, rest_key = key;
    prefix_key.part = PlanPart::split_prefix;
    rest_key.part = PlanPart::split_rest;
    int together = images;
    {
        std::lock_guard<std::mutex> lock(mutex);
        rest_key.set_images(1);
        const size_t one = std::max<size_t>(plan_for(rest_key)->arena_bytes, 1);
        together = static_cast<int>(std::clamp<size_t>(kTogetherBytes / one, 1, static_cast<size_t>(images)));
    }
    const auto fill_rest = [&](const Plan &rest, int first, uint8_t *arena) {
        struct Made { // gives its arena back, even after an error
            Impl &model;
            std::vector<KeptGroup> groups;
            ~Made() {
                for (KeptGroup &made : groups)
                    model.give_back(std::move(made.arena));
            }
        };
        std::vector<float *> none;
        for (int n = 0; n < rest.images; n += group) {
            Made made{*this, {}};
            prefix_key.set_images(std::min(group, rest.images - n));
            run_group(prefix_key, first + n, threads, none, cancel, fill, &made.groups);
            for (int i = 0; i < prefix_key.inputs[0].n; ++i)
                copy_kept(made.groups[0], i, rest, n + i, arena);
        }
    };
    for (int first = 0; first < images; first += together) {
        rest_key.set_images(std::min(together, images - first));
        run_group(rest_key, first, threads, targets, cancel, fill_rest, nullptr);
    }
}

// Runs one group, and advances the targets past what it wrote.
void Model::Impl::run_group(const PlanKey &key, int first, int threads, std::vector<float *> &targets,
                            const CancelToken *cancel, const Fill &fill, std::vector<KeptGroup> *keep) {
    KeptGroup group;
    group.first = first;
    {
        std::lock_guard<std::mutex> lock(mutex);
        check_profile(key.profile);
        group.plan = plan_for(key);
        group.arena = take_arena(group.plan->arena_bytes);
    }
    const Plan *plan = group.plan.get();
    uint8_t *arena = group.arena->data;
    try {
        fill(*plan, first, arena);
    } catch (...) { // a run of other layers that was cancelled
        give_back(std::move(group.arena));
        throw;
    }
    Threads team{pool, threads};
    const RunEnd end =
        run_plan(*plan, *kernels, arena, team, nullptr, cancel); // does not throw: the arena is always given back
    for (size_t i = 0; end.how == RunEnd::done && i < targets.size(); ++i) {
        const auto value = static_cast<size_t>(graph().outputs[i]);
        const Buffer &buffer = plan->buffers[value];
        const size_t count = static_cast<size_t>(buffer.pixels) * static_cast<size_t>(plan->shapes[value].c());
        for (int n = 0; n < plan->images; ++n, targets[i] += count) {
            const uint8_t *from = arena + buffer.offset + buffer.image * static_cast<size_t>(n) + buffer.pixel;
            if (plan->codes[value])
                std::copy(from, from + count, targets[i]);
            else
                std::memcpy(targets[i], from, 4 * count);
        }
    }
    if (keep)
        keep->push_back(std::move(group));
    else
        give_back(std::move(group.arena));
    if (end.how == RunEnd::cancelled)
        throw Cancelled();
    refuse_bad_index(end);
}

KeptRun::KeptRun(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

KeptRun::~KeptRun() {
    for (KeptGroup &group : impl_->groups)
        impl_->model->impl_->give_back(std::move(group.arena));
}

int KeptRun::images() const {
    return impl_->inputs[0].n;
}

std::vector<std::vector<int>> KeptRun::output_shapes(int images) const {
    std::vector<Shape> inputs = impl_->inputs;
    for (Shape &shape : inputs)
        shape.n = images;
    return sizes_of_outputs(impl_->model->impl_->graph(), inputs);
}

void KeptRun::run(const std::vector<int> &rows, int profile, int threads, float *const *outs,
                  const CancelToken *cancel) const {
    for (int row : rows)
        if (row < 0 || row >= images())
            throw InputError("image " + std::to_string(row) + " was not kept; there are " + std::to_string(images()));
    if (rows.empty())
        return;
    Model::Impl &model = *impl_->model->impl_;
    PlanKey key{profile, impl_->inputs, PlanPart::rest};
    key.set_images(static_cast<int>(rows.size()));
    model.run_groups(std::move(key), threads, outs, cancel, [&](const Plan &plan, int first, uint8_t *arena) {
        model.fill_kept(plan, impl_->groups, rows.data() + first, arena);
    });
}

std::vector<StepInfo> Model::steps(const Images &images, int profile, int repeat, int threads) {
    return steps({as_array(images)}, profile, repeat, threads);
}

namespace {

// Numbers one by one: what has no kernel, and copies of runs below 16 bytes.
bool is_scalar(const Step &s) {
    constexpr size_t kShort = 16;
    const size_t element = s.codes ? 1 : 4;
    const auto run = [&](const Shape &shape, int axis) {
        return element * static_cast<size_t>(shape.product(axis, shape.rank));
    };
    switch (s.kind) {
    case Step::Kind::softmax:
        return true;
    case Step::Kind::transpose: {
        const Permutation &p = s.permutation;
        return std::find(p.stride, p.stride + p.rank, size_t(1)) == p.stride + p.rank;
    }
    case Step::Kind::pick: {
        const bool together = s.op->kind == OpKind::slice && s.op->step == 1;
        return run(together ? s.shape : s.input_shapes[0], s.op->axis + (together ? 0 : 1)) < kShort;
    }
    case Step::Kind::concat: {
        const int axis = s.op->axis < 0 ? s.shape.rank - 1 : s.op->axis;
        return std::any_of(s.input_shapes.begin(), s.input_shapes.end(),
                           [&](const Shape &shape) { return run(shape, axis) < kShort; });
    }
    case Step::Kind::pad:
        return run(s.input_shapes[0], 2) < kShort;
    default:
        return false;
    }
}

} // namespace

std::vector<StepInfo> Model::steps(const std::vector<InputArray> &arrays, int profile, int repeat, int threads) {
    static const char *const kinds[] = {"prepare",   "conv",   "elementwise", "dequantize", "concat", "max_pool",
                                        "avg_pool",  "resize", "softmax",     "flatten",    "pad",    "constant",
                                        "transpose", "slice",  "pointwise",   "binary",     "reduce", "norm",
                                        "softmax",   "matmul", "embedding",   "recurrent"};
    impl_->check_arrays(arrays);
    const PlanKey key{profile, shapes_of(arrays)};
    std::shared_ptr<const Plan> plan;
    {
        std::lock_guard<std::mutex> lock(impl_->mutex);
        impl_->check_profile(profile);
        plan = impl_->plan_for(key);
    }
    Arena arena(plan->arena_bytes);
    Threads team{impl_->pool, threads};
    const size_t count = plan->steps.size();
    std::vector<std::vector<double>> times(count);
    std::vector<double> seconds(count);
    for (int i = 0; i < repeat; ++i) {
        impl_->fill_inputs(*plan, arrays, arena.data);
        refuse_bad_index(run_plan(*plan, *impl_->kernels, arena.data, team, seconds.data()));
        for (size_t s = 0; s < count; ++s)
            times[s].push_back(seconds[s]);
    }
    std::vector<StepInfo> infos;
    for (size_t i = 0; i < count; ++i) {
        const Step &s = plan->steps[i];
        StepInfo info;
        info.op = s.op->name;
        info.work = kinds[static_cast<size_t>(s.kind)];
        info.scalar = impl_->kernels == kernels_scalar() || is_scalar(s);
        if (s.conv) {
            const ConvStep &c = *s.conv;
            info.work = std::string(c.depthwise ? "depth-wise" : c.kernel->name) + (c.has_residual ? ", add" : "") +
                        (c.has_out ? ", float" : "") + (c.has_codes ? ", codes" : "") + (c.fused_pool ? ", pool" : "");
            info.products =
                int64_t(plan->images) * c.out_pixels * c.out_channels * c.op->kernel[0] * c.op->kernel[1] * c.group_in;
        }
        if (s.matmul && s.matmul->codes)
            info.work = s.matmul->codes->kernel->name;
        if (s.matmul)
            info.products = int64_t(plan->images) * s.shape.product(0, s.shape.rank) * s.matmul->k;
        if (s.recurrent)
            info.products = int64_t(plan->images) * s.recurrent->length * s.recurrent->gates * s.recurrent->hidden;
        std::sort(times[i].begin(), times[i].end());
        info.seconds = times[i].empty() ? 0 : times[i][times[i].size() / 2];
        infos.push_back(info);
    }
    return infos;
}

size_t Model::panel_bytes() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->held();
}

size_t Model::arena_bytes() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->arena_total;
}

} // namespace anyprec
