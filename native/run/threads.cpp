// See threads.h. One call of a network is about a hundred rounds of tens of microseconds. Waking a sleeping thread for
// each would take as long as the work, so workers spin for a while before they sleep.
#include "run/threads.h"

#include <algorithm>
#include <chrono>

namespace anyprec {
namespace {

constexpr uint64_t kWanted = 0xffff, kRound = 0x10000, kEnd = ~uint64_t(0);
constexpr uint64_t kNext = 0xffffffff, kLast = uint64_t(1) << 32; // fields of Share::ends
constexpr std::chrono::microseconds kSpinTime{100};

// Spins until `ready` is true or kSpinTime has passed; yields the core between checks.
template <typename Ready> bool spin_until(const Ready &ready) {
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 64; ++i)
            if (ready())
                return true;
        std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

} // namespace

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(sleep_->mutex);
        ticket_ = kEnd;
    }
    sleep_->wake.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
}

void ThreadPool::after_fork_in_child() {
    // Leaked, not destroyed: the threads do not exist, but the old objects still record sleepers and lock owners.
    (void)new std::vector<std::thread>(std::move(workers_));
    (void)busy_.release();
    (void)sleep_.release();
    workers_.clear();
    busy_ = std::make_unique<std::mutex>();
    sleep_ = std::make_unique<Sleep>();
    running_ = 0;
    ticket_ = 0;
}

void ThreadPool::run_tasks(int member) {
    for (int i = 0; i < members_; ++i) {
        std::atomic<uint64_t> &ends = shares_[static_cast<size_t>((member + i) % members_)].ends;
        const bool own = i == 0;
        uint64_t now = ends.load(std::memory_order_relaxed);
        while ((now & kNext) < now / kLast) {
            if (!ends.compare_exchange_weak(now, own ? now + 1 : now - kLast, std::memory_order_relaxed))
                continue;
            function_(context_, static_cast<int>(own ? now & kNext : now / kLast - 1));
            now = ends.load(std::memory_order_relaxed);
        }
    }
}

void ThreadPool::work(uint64_t number) {
    uint64_t seen = 0;
    for (;;) {
        const auto changed = [&] { return ticket_.load(std::memory_order_acquire) != seen; };
        if (!spin_until(changed)) {
            std::unique_lock<std::mutex> lock(sleep_->mutex);
            sleep_->wake.wait(lock, changed);
        }
        seen = ticket_.load(std::memory_order_acquire);
        if (seen == kEnd)
            return;
        if (number < (seen & kWanted)) {
            run_tasks(static_cast<int>(number) + 1);
            if (after_)
                after_();
            running_.fetch_sub(1, std::memory_order_release);
        }
    }
}

void ThreadPool::run(int threads, int tasks, Function function, void *context, void (*after)()) {
    std::unique_lock<std::mutex> mine(*busy_, std::try_to_lock);
    if (!mine.owns_lock() || threads <= 1) {
        for (int task = 0; task < tasks; ++task)
            function(context, task);
        return;
    }
    const int wanted = std::min(threads, tasks) - 1;
    while (workers_.size() < static_cast<size_t>(wanted))
        workers_.emplace_back(&ThreadPool::work, this, workers_.size());
    function_ = function, context_ = context, after_ = after;
    members_ = wanted + 1;
    if (shares_.size() < static_cast<size_t>(members_)) // nobody reads them between rounds
        shares_ = std::vector<Share>(static_cast<size_t>(members_));
    for (int i = 0; i < members_; ++i) {
        const auto first = static_cast<uint64_t>(int64_t(tasks) * i / members_);
        const auto end = static_cast<uint64_t>(int64_t(tasks) * (i + 1) / members_);
        shares_[static_cast<size_t>(i)].ends.store(end * kLast + first, std::memory_order_relaxed);
    }
    running_ = wanted;
    {
        std::lock_guard<std::mutex> lock(
            sleep_->mutex); // otherwise a worker could fall asleep between its check and its wait
        const uint64_t round = ticket_.load() / kRound + 1;
        ticket_.store(round * kRound + static_cast<uint64_t>(wanted), std::memory_order_release);
    }
    sleep_->wake.notify_all();
    run_tasks(0);
    const auto done = [&] { return running_.load(std::memory_order_acquire) == 0; };
    while (!spin_until(done)) {
    }
}

} // namespace anyprec
