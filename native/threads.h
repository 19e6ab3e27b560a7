// Threads: a handful of workers that one call at a time may use. In: a count of tasks and a function; out: when it
// returns, all tasks are done. A second call that comes meanwhile does its tasks itself, so calls never wait for others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace anyprec {

class ThreadPool {
  public:
    ~ThreadPool();
    using Function = void (*)(void *context, int task);
    // Runs tasks 0 .. tasks-1 on at most `threads` threads, the caller among them.
    void run(int threads, int tasks, Function function, void *context);

  private:
    void work(size_t number);
    void take(Function function, void *context, int tasks);

    std::mutex busy_;  // held by the call that has the workers
    std::mutex mutex_; // guards what follows
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    unsigned long round_ = 0;
    size_t wanted_ = 0, running_ = 0;
    bool stop_ = false;
    Function function_ = nullptr;
    void *context_ = nullptr;
    int tasks_ = 0;
    std::atomic<int> next_{0};
};

// A pool and how much of it one call may use.
struct Threads {
    ThreadPool &pool;
    int count;

    template <typename F> void run(int tasks, F &&function) {
        if (count <= 1 || tasks <= 1) {
            for (int task = 0; task < tasks; ++task)
                function(task);
            return;
        }
        using Body = std::remove_reference_t<F>;
        pool.run(count, tasks, [](void *context, int task) { (*static_cast<Body *>(context))(task); }, &function);
    }
};

} // namespace anyprec
