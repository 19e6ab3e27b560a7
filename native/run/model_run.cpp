// A batch runs in groups of images, the layers with many weights for many groups together. See model_impl.h.
#include "run/model_impl.h"

#include <algorithm>
#include <cstring>

namespace anyprec {

void refuse_bad_index(const RunEnd &end) {
    if (end.how == RunEnd::bad_index)
        throw InputError("op '" + end.op->name +
                         "' reads a number that is none of its rows: whole numbers from 0, "
                         "below their number, are needed");
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

} // namespace anyprec
