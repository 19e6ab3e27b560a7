// The steps of a plan with their times, for `anyprec-run --steps` and the cost model's tests. See model_impl.h.
#include "run/model_impl.h"

#include <algorithm>

namespace anyprec {

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

} // namespace anyprec
