// Lets a process fork while other threads run models (pthread_atfork). The child has only the forking thread; it finds
// every lock free and the guarded data consistent. Used by engine.cpp; does nothing where there is no fork.
#pragma once

namespace anyprec {

// An object with locks. before_fork takes them all, the other two release them.
class Forkable {
  public:
    virtual ~Forkable() = default;
    virtual void before_fork() = 0;
    virtual void after_fork_in_parent() = 0;
    virtual void after_fork_in_child() = 0;
};

// From add to remove, `part` takes part in every fork. Do not call with one of its locks held.
void add_forkable(Forkable &part);
void remove_forkable(Forkable &part);

} // namespace anyprec
