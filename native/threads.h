// Threads: a handful of workers that one call at a time may use. In: a count of tasks and a function; out: when it
// returns, all tasks are done. A second call that comes meanwhile does its tasks itself, so calls never wait for
// others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace anyprec {

class ThreadPool {
  public:
    ~ThreadPool();
    using Function = void (*)(void *context, int task);
    // Runs tasks 0 .. tasks-1 on at most `threads` threads, the caller among them. Tasks must not throw.
    void run(int threads, int tasks, Function function, void *context);
    // In a forked child, which has only the memory of the workers: forgets them. New ones are started when needed.
    void after_fork_in_child();

  private:
    void work(uint64_t number);
    void run_tasks(int member);

    std::unique_ptr<std::mutex> busy_ = std::make_unique<std::mutex>(); // held by the call that has the workers
    std::vector<std::thread> workers_;
    // What is to be done. Written by run() before it changes the ticket, read by workers after they saw it change.
    Function function_ = nullptr;
    void *context_ = nullptr;
    // Every member of the team (0 is the caller) begins with a run of neighboring tasks of its own, and takes them in
    // order; one that has none left takes the last of another's. So a thread meets the same part of an image in every
    // step, whose lines its core has at hand, and two threads seldom write to one line. Both ends in one word: the
    // next task, and 2^32 times the end.
    struct alignas(64) Share {
        std::atomic<uint64_t> ends{0};
    };
    std::vector<Share> shares_;
    int members_ = 0;
    std::atomic<int> running_{0}; // workers that have not finished this round
    // Number of the round times 2^16, plus how many workers it wants: one word, so that a worker who is late never
    // mixes two rounds. All ones: the end.
    std::atomic<uint64_t> ticket_{0};
    struct Sleep { // where workers wait that have looked in vain
        std::mutex mutex;
        std::condition_variable wake;
    };
    std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
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
