// What is behind a Model of engine.h: the file, plans and panels made on first use, arenas of calls. Plans and panels
// are made under one mutex and are then read-only. Every call takes an arena of its own from a pool, so calls do not
// wait for each other. model_plans.cpp makes and keeps plans and arenas, model_inputs.cpp fills an arena, model_run.cpp
// runs a batch in groups, model_steps.cpp times steps; engine.cpp has the public functions.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "anyprec/engine.h"
#include "format/large_pages.h"
#include "format/reader.h"
#include "kernels/kernels.h"
#include "plan/panels.h"
#include "plan/plan.h"
#include "run/execute.h"
#include "run/fork.h"
#include "run/threads.h"

namespace anyprec {

// Memory kept for the next call. A larger arena is freed after its call; for tables see drop_large_tables.
constexpr size_t kKeptArena = size_t(64) << 20, kKeptTables = size_t(64) << 20;
constexpr size_t kLargePagesFrom = size_t(4)
                                   << 20; // of an arena; a small one would pay for pages that it does not fill

struct Arena {
    std::unique_ptr<uint8_t[]> storage; // not cleared: untouched pages cost nothing
    uint8_t *data = nullptr;
    size_t bytes = 0;

    explicit Arena(size_t size) : storage(new uint8_t[size + 64]), data(at_line(storage.get())), bytes(size) {
        if (bytes >= kLargePagesFrom)
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
Shape shape_of(const InputArray &array);
std::vector<Shape> shapes_of(const std::vector<InputArray> &arrays);
InputArray as_array(const Images &images);
void refuse_bad_index(const RunEnd &end);

struct Model::Impl : Forkable {
    std::shared_ptr<ModelFile> file;
    std::string isa;
    const Kernels *kernels = nullptr;
    size_t budget = 0;
    PanelMemory panel_memory;
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
    void need_signed_weights(int profile);
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

} // namespace anyprec
