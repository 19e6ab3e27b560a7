// Lets a process fork while other threads run models: the child, which has only the thread that forked, finds every
// lock free and what it guards whole. Used by engine.cpp; where there is no fork, nothing happens.
#pragma once

namespace anyprec {

// What has locks. before_fork takes them all, the other two give them back.
class Forkable {
  public:
    virtual ~Forkable() = default;
    virtual void before_fork() = 0;
    virtual void after_fork_in_parent() = 0;
    virtual void after_fork_in_child() = 0;
};

// Between the two, `part` takes part in every fork. Not to be called with one of its locks held.
void add_forkable(Forkable &part);
void remove_forkable(Forkable &part);

} // namespace anyprec
