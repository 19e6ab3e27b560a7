// See threads.h.
#include "threads.h"

#include <algorithm>

namespace anyprec {

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
}

void ThreadPool::take(Function function, void *context, int tasks) {
    for (int task = next_.fetch_add(1); task < tasks; task = next_.fetch_add(1))
        function(context, task);
}

void ThreadPool::work(size_t number) {
    unsigned long seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || (round_ != seen && number < wanted_); });
        if (stop_)
            return;
        seen = round_;
        const Function function = function_;
        void *context = context_;
        const int tasks = tasks_;
        lock.unlock();
        take(function, context, tasks);
        lock.lock();
        if (--running_ == 0)
            done_.notify_one();
    }
}

void ThreadPool::run(int threads, int tasks, Function function, void *context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine.owns_lock() || threads <= 1) {
        for (int task = 0; task < tasks; ++task)
            function(context, task);
        return;
    }
    const size_t helpers = static_cast<size_t>(std::min(threads, tasks) - 1);
    std::unique_lock<std::mutex> lock(mutex_);
    while (workers_.size() < helpers)
        workers_.emplace_back(&ThreadPool::work, this, workers_.size());
    function_ = function, context_ = context, tasks_ = tasks;
    next_ = 0;
    wanted_ = running_ = helpers;
    ++round_;
    lock.unlock();
    wake_.notify_all();
    take(function, context, tasks);
    lock.lock();
    done_.wait(lock, [&] { return running_ == 0; });
}

} // namespace anyprec
