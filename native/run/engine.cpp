// The public functions of engine.h; model_impl.h says which file does the work.
#include "anyprec/engine.h"

#include <algorithm>
#include <cmath>

#include "anyprec/cpu.h"
#include "run/model_impl.h"

namespace anyprec {
namespace {

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

} // namespace

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
    impl->file = ModelFile::open(path, options.max_bits, options.verify, options.keep_copy);
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

size_t Model::panel_bytes() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->held();
}

size_t Model::arena_bytes() const {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    return impl_->arena_total;
}

} // namespace anyprec
