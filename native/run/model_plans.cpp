// Plans, panels and arenas of a Model: made on first use, kept within the budget. See model_impl.h.
#include "run/model_impl.h"

#include <algorithm>
#include <iterator>

namespace anyprec {

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
        file->need(weight, bits);
        // Within a budget every panel has memory of its own, so that dropping it frees that.
        PanelMemory *memory = budget ? nullptr : &panel_memory;
        found = std::make_shared<const Panel>(
            kernel        ? build_panel(graph(), w, *kernels, *kernel, bits, groups, tap_order, memory)
            : groups == 0 ? build_recurrent_panel(w, kernels->functions->matmul_width)
                          : build_depthwise_panel(graph(), w, bits, *kernels));
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

// Every plan sums their weights anew; all others are read where a panel is built.
void Model::Impl::need_signed_weights(int profile) {
    for (const Op &op : graph().ops)
        if (op.is_signed && op.weight >= 0)
            file->need(op.weight,
                       graph().profiles[static_cast<size_t>(profile)].weight_bits[static_cast<size_t>(op.weight)]);
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
    need_signed_weights(key.profile);
    auto plan = std::make_shared<const Plan>(make_plan(
        graph(), key.profile, key.inputs, *kernels,
        [this](int weight, int bits, const TileKernel *kernel, int groups, const std::vector<int> &order) {
            return panel(weight, bits, kernel, groups, order);
        },
        key.part, is_split ? split.get() : prefix.get()));
    file->release(); // unless it keeps its copy
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

} // namespace anyprec
