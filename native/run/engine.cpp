// See engine.h. Plans and panels are made on first use under one mutex and are then read-only. Every call takes an
// arena of its own from a pool, so calls do not wait for each other.
#include "anyprec/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <tuple>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "anyprec/cpu.h"
#include "execute.h"
#include "fork.h"
#include "kernels.h"
#include "panels.h"
#include "plan.h"
#include "reader.h"
#include "threads.h"

namespace anyprec {
namespace {

const Kernels &kernels_for(const std::string &isa) {
#if defined(__x86_64__) || defined(_M_X64)
    if (isa == "avx512")
        return *kernels_avx512();
    if (isa == "avx2")
        return *kernels_avx2();
#endif
    (void)isa;
    return *kernels_scalar();
}

// Memory kept for the next call. A larger arena is freed after its call; for tables see drop_large_tables.
constexpr size_t kKeptArena = size_t(64) << 20, kKeptTables = size_t(64) << 20;

// For memory that is allocated anew on every call: huge pages (2 MiB) reduce page faults to a tenth of the time (0.1 ms
// per MiB instead of 1).
void use_large_pages([[maybe_unused]] uint8_t *data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kPage = uintptr_t(2) << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
    if (first < end)
        (void)madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE); // only advice
#endif
}

struct Arena {
    std::unique_ptr<uint8_t[]> storage; // not cleared: untouched pages cost nothing
    uint8_t *data = nullptr;
    size_t bytes = 0;

    explicit Arena(size_t size) : storage(new uint8_t[size + 64]), data(at_line(storage.get())), bytes(size) {
        if (bytes > kKeptArena)
            use_large_pages(data, bytes);
    }
};

using PlanKey = std::tuple<int, int, int, int>; // profile, n, h, w

} // namespace

struct Model::Impl : Forkable {
    std::shared_ptr<ModelFile> file;
    std::string isa;
    const Kernels *kernels = nullptr;
    size_t budget = 0;
    ThreadPool pool;

    std::mutex mutex; // guards all members below, and the file's planes
    // Plans by last use, most recent first. Plans share ownership of panels; `panels` finds those that exist.
    std::list<std::pair<PlanKey, std::shared_ptr<const Plan>>> plans;
    std::map<std::tuple<int, int, const TileKernel *, int>, std::weak_ptr<const Panel>> panels;
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
    std::shared_ptr<const Panel> panel(int weight, int bits, const TileKernel *kernel, int groups);
    size_t held() const;
    void keep_to_budget();
    void drop_large_tables();
    std::unique_ptr<Arena> take_arena(size_t bytes);
    void give_back(std::unique_ptr<Arena> arena);
    void check_profile(int profile) const;
    void check_images(const Images &images) const;
    void fill_input(const Plan &plan, const Images &images, uint8_t *arena) const;
    void run_group(const Images &images, int profile, int threads, std::vector<float *> &targets,
                   const CancelToken *cancel);
};

void Model::Impl::after_fork_in_child() {
    pool.after_fork_in_child();
    arena_total = 0; // arenas of calls in other threads are lost
    for (const std::unique_ptr<Arena> &arena : arenas)
        arena_total += arena->bytes;
    mutex.unlock();
}

std::shared_ptr<const Panel> Model::Impl::panel(int weight, int bits, const TileKernel *kernel, int groups) {
    std::weak_ptr<const Panel> &known = panels[{weight, bits, kernel, groups}];
    std::shared_ptr<const Panel> found = known.lock();
    if (!found) {
        const Weight &w = graph().weights[static_cast<size_t>(weight)];
        found = std::make_shared<const Panel>(kernel ? build_panel(graph(), w, *kernel, bits, groups)
                                                     : build_depthwise_panel(graph(), w, bits));
        known = found;
    }
    return found;
}

size_t Model::Impl::held() const {
    size_t bytes = 0;
    for (const auto &entry : panels)
        if (const auto panel = entry.second.lock())
            bytes += panel->bytes;
    return bytes;
}

// Drops the least recently used plans until the panels fit the budget; the most recent one stays. A plan in use lives
// until its call ends.
void Model::Impl::keep_to_budget() {
    constexpr size_t kMostPlans = 64; // input sizes times profiles; plans are small, but a caller may try thousands
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
    const auto [profile, n, h, w] = key;
    auto plan = std::make_shared<const Plan>(make_plan(
        graph(), profile, n, h, w, *kernels, [this](int weight, int bits, const TileKernel *kernel, int groups) {
            return panel(weight, bits, kernel, groups);
        }));
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

void Model::Impl::check_images(const Images &images) const {
    if (images.c != graph().input_c)
        throw InputError("images have " + std::to_string(images.c) + " channels, the model takes " +
                         std::to_string(graph().input_c));
    if (images.bytes && byte_values.empty())
        throw InputError(
            "this model file does not say how uint8 images become floats; give float32, or pack it with image=");
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

void Model::Impl::fill_input(const Plan &plan, const Images &images, uint8_t *arena) const {
    const Buffer &buffer = plan.buffers[0];
    const PaddedInput &padded = plan.padded_input;
    const size_t plane = static_cast<size_t>(images.h) * images.w, channels = static_cast<size_t>(images.c);
    const size_t line = channels * static_cast<size_t>(images.w),
                 padded_line = channels * static_cast<size_t>(padded.width);
    for (int n = 0; n < images.n; ++n) {
        float *zeros = reinterpret_cast<float *>(arena + buffer.offset + buffer.image * static_cast<size_t>(n));
        float *to = zeros + buffer.pixel / 4 + padded_line * static_cast<size_t>(padded.top) + channels * padded.left;
        float *const end = zeros + buffer.pixel / 4 * (static_cast<size_t>(buffer.pixels) + 1);
        std::fill(zeros, to, 0.0f); // the pixel of zeros, and padding up to the first pixel
        for (int y = 0; y < images.h; ++y, to += padded_line) {
            const size_t at = static_cast<size_t>(n) * plane * channels; // start of the image
            const size_t first = at + static_cast<size_t>(y) * (images.channels_first ? images.w : line);
            const size_t pixel = images.channels_first ? 1 : channels, channel = images.channels_first ? plane : 1;
            if (images.bytes) {
                const uint8_t *x = static_cast<const uint8_t *>(images.data) + first;
                fill_line(to, images.w, images.c, [&](int c, int i) {
                    return byte_values[static_cast<size_t>(c) * 256 + x[channel * c + pixel * i]];
                });
            } else if (images.channels_first) {
                const float *x = static_cast<const float *>(images.data) + first;
                fill_line(to, images.w, images.c, [&](int c, int i) { return x[plane * c + i]; });
            } else {
                std::memcpy(to, static_cast<const float *>(images.data) + first, 4 * line);
            }
            const bool last = y + 1 == images.h;
            std::fill(to + line, last ? end : to + padded_line, 0.0f); // padding up to the next line
        }
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
    impl->kernels = &kernels_for(impl->isa);
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
    return impl_->graph().input_h;
}
int Model::input_width() const {
    return impl_->graph().input_w;
}
int Model::input_channels() const {
    return impl_->graph().input_c;
}
int Model::image_height() const {
    return impl_->graph().input_h ? impl_->graph().input_h : impl_->graph().image_h;
}
int Model::image_width() const {
    return impl_->graph().input_w ? impl_->graph().input_w : impl_->graph().image_w;
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
    return impl_->file->refresh();
}

std::vector<OutputShape> Model::output_shapes(int n, int h, int w) const {
    const std::vector<Shape> shapes = infer_shapes(impl_->graph(), n, h, w);
    std::vector<OutputShape> result;
    for (int value : impl_->graph().outputs) {
        const Shape &s = shapes[static_cast<size_t>(value)];
        result.push_back({s.n, s.h, s.w, s.c});
    }
    return result;
}

void Model::run(const Images &images, int profile, int threads, float *const *outs, const CancelToken *cancel) {
    const Graph &graph = impl_->graph();
    impl_->check_images(images);
    // A large batch is computed in groups whose working memory stays near the L2 cache. That is faster than all at
    // once, and the memory of a call does not grow with its batch.
    constexpr size_t kGroupBytes = size_t(4) << 20;
    int group = images.n;
    if (images.n > 1) {
        std::lock_guard<std::mutex> lock(impl_->mutex);
        impl_->check_profile(profile);
        const size_t one = impl_->plan_for({profile, 1, images.h, images.w})->arena_bytes;
        group =
            static_cast<int>(std::min<size_t>(static_cast<size_t>(images.n), std::max<size_t>(kGroupBytes / one, 1)));
    }
    std::vector<float *> targets(outs, outs + graph.outputs.size());
    const size_t image_bytes = static_cast<size_t>(images.h) * static_cast<size_t>(images.w) *
                               static_cast<size_t>(images.c) * (images.bytes ? 1 : 4);
    for (int first = 0; first < images.n || first == 0; first += group) {
        Images part = images;
        part.n = std::min(group, images.n - first);
        part.data = static_cast<const uint8_t *>(images.data) + image_bytes * static_cast<size_t>(first);
        impl_->run_group(part, profile, threads, targets, cancel);
    }
}

// Runs one group, and advances the targets past what it wrote.
void Model::Impl::run_group(const Images &images, int profile, int threads, std::vector<float *> &targets,
                            const CancelToken *cancel) {
    std::shared_ptr<const Plan> plan;
    std::unique_ptr<Arena> arena;
    {
        std::lock_guard<std::mutex> lock(mutex);
        check_profile(profile);
        plan = plan_for({profile, images.n, images.h, images.w});
        arena = take_arena(plan->arena_bytes);
    }
    fill_input(*plan, images, arena->data);
    Threads team{pool, threads};
    const bool done =
        run_plan(*plan, *kernels, arena->data, team, nullptr, cancel); // does not throw: the arena is always given back
    for (size_t i = 0; done && i < targets.size(); ++i) {
        const auto value = static_cast<size_t>(graph().outputs[i]);
        const Buffer &buffer = plan->buffers[value];
        const size_t count = static_cast<size_t>(buffer.pixels) * static_cast<size_t>(plan->shapes[value].c);
        for (int n = 0; n < images.n; ++n, targets[i] += count) {
            const uint8_t *from = arena->data + buffer.offset + buffer.image * static_cast<size_t>(n) + buffer.pixel;
            if (plan->codes[value])
                std::copy(from, from + count, targets[i]);
            else
                std::memcpy(targets[i], from, 4 * count);
        }
    }
    give_back(std::move(arena));
    if (!done)
        throw Cancelled();
}

std::vector<StepInfo> Model::steps(const Images &images, int profile, int repeat, int threads) {
    static const char *const kinds[] = {"prepare",  "conv",   "elementwise", "dequantize", "concat", "max_pool",
                                        "avg_pool", "resize", "softmax",     "flatten",    "pad"};
    impl_->check_images(images);
    std::shared_ptr<const Plan> plan;
    {
        std::lock_guard<std::mutex> lock(impl_->mutex);
        impl_->check_profile(profile);
        plan = impl_->plan_for({profile, images.n, images.h, images.w});
    }
    Arena arena(plan->arena_bytes);
    Threads team{impl_->pool, threads};
    const size_t count = plan->steps.size();
    std::vector<std::vector<double>> times(count);
    std::vector<double> seconds(count);
    for (int i = 0; i < repeat; ++i) {
        impl_->fill_input(*plan, images, arena.data);
        run_plan(*plan, *impl_->kernels, arena.data, team, seconds.data());
        for (size_t s = 0; s < count; ++s)
            times[s].push_back(seconds[s]);
    }
    std::vector<StepInfo> infos;
    for (size_t i = 0; i < count; ++i) {
        const Step &s = plan->steps[i];
        StepInfo info;
        info.op = s.op->name;
        info.work = kinds[static_cast<size_t>(s.kind)];
        if (s.conv) {
            const ConvStep &c = *s.conv;
            info.work = std::string(c.depthwise ? "depth-wise" : c.kernel->name) + (c.has_residual ? ", add" : "") +
                        (c.has_out ? ", float" : "") + (c.has_codes ? ", codes" : "") + (c.fused_pool ? ", pool" : "");
            info.products =
                int64_t(images.n) * c.out_pixels * c.out_channels * c.op->kernel[0] * c.op->kernel[1] * c.group_in;
        }
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
