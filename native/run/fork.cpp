// See fork.h.
#include "run/fork.h"

#include <algorithm>
#include <mutex>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace anyprec {
namespace {

struct Registry {
    std::mutex mutex; // taken before the locks of the parts
    std::vector<Forkable *> parts;
};

// Never destroyed: a process may fork, and a model end, after the destructors of globals have run.
Registry &registry() {
    static Registry *const one = [] {
        auto *made = new Registry;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(
            [] {
                registry().mutex.lock();
                for (Forkable *part : registry().parts)
                    part->before_fork();
            },
            [] {
                for (Forkable *part : registry().parts)
                    part->after_fork_in_parent();
                registry().mutex.unlock();
            },
            [] {
                for (Forkable *part : registry().parts)
                    part->after_fork_in_child();
                registry().mutex.unlock();
            });
#endif
        return made;
    }();
    return *one;
}

} // namespace

void add_forkable(Forkable &part) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().parts.push_back(&part);
}

void remove_forkable(Forkable &part) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto &parts = registry().parts;
    parts.erase(std::remove(parts.begin(), parts.end(), &part), parts.end());
}

} // namespace anyprec
