// ThreadPool: worker threads that one call at a time may use. In: a number of tasks and a function. Out: run returns
// when all tasks are done. If another call holds the workers, a call runs its tasks itself, so calls never wait for
// each other.
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
    // Runs tasks 0 .. tasks-1 on at most `threads` threads, including the caller. Tasks must not throw. Each worker
    // calls `after`, if given, when no task is left for it.
    void run(int threads, int tasks, Function function, void *context, void (*after)());
    // In a forked child the worker threads do not exist: forgets them. New ones start when needed.
    void after_fork_in_child();

  private:
    void work(uint64_t number);
    void run_tasks(int member);

    std::unique_ptr<std::mutex> busy_ = std::make_unique<std::mutex>(); // held by the call that uses the workers
    std::vector<std::thread> workers_;
    // The current work. run() writes it before it changes the ticket; workers read it after they see the change.
    Function function_ = nullptr;
    void *context_ = nullptr;
    void (*after_)() = nullptr;
    // Work stealing: each member of the team (0 is the caller) starts with a run of neighboring tasks and takes them in
    // order. A member without tasks takes the last one of another. So a thread works on the same part of an image in
    // every step, with its data in the core's caches, and two threads rarely write to one cache line. One word holds
    // both ends: the next task, plus 2^32 times the end.
    struct alignas(64) Share {
        std::atomic<uint64_t> ends{0};
    };
    std::vector<Share> shares_;
    int members_ = 0;
    std::atomic<int> running_{0}; // workers that have not finished this round
    // Number of the round times 2^16, plus the number of workers it needs. It is one word, so that a late worker never
    // mixes two rounds. All ones: exit.
    std::atomic<uint64_t> ticket_{0};
    struct Sleep { // where workers sleep after spinning in vain
        std::mutex mutex;
        std::condition_variable wake;
    };
    std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
};

// A pool, and how many of its threads one call may use.
struct Threads {
    ThreadPool &pool;
    int count;
    void (*after)() = nullptr; // what each worker does after its last task

    template <typename F> void run(int tasks, F &&function) {
        if (count <= 1 || tasks <= 1) {
            for (int task = 0; task < tasks; ++task)
                function(task);
            return;
        }
        using Body = std::remove_reference_t<F>;
        pool.run(
            count, tasks, [](void *context, int task) { (*static_cast<Body *>(context))(task); }, &function, after);
    }
};

} // namespace anyprec
