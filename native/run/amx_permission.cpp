// See amx_permission.h. Compiled without instruction-set flags.
#include "run/amx_permission.h"

#if defined(ANYPREC_AMX) // Linux on x86-64

#include <cerrno>
#include <csignal>
#include <initializer_list>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/kernels.h"

namespace anyprec {
namespace {

bool ask() {
#if defined(ANYPREC_EMULATE)
    return true;
#else
    constexpr long kRequestPermission = 0x1023, kTileData = 18; // asm/prctl.h; Linux 5.16 and later
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

} // namespace

// A fork by the system call itself: handlers of pthread_atfork do not run, and without a signal at its end the
// program's own children are not disturbed. The child only computes and exits.
bool true_in_child(bool (*probe)()) {
    const long child = syscall(SYS_clone, 0, 0, 0, 0, 0);
    if (child < 0)
        return false;
    if (child == 0) {
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
        for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT})
            std::signal(number, SIG_DFL);
        syscall(SYS_exit_group, probe() ? 0 : 1);
    }
    int status = 0;
    pid_t ended;
    do
        ended = waitpid(static_cast<pid_t>(child), &status, __WALL);
    while (ended < 0 && errno == EINTR);
    return ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool amx_permission() {
    static const bool granted = ask() && true_in_child(amx_multiplies);
    return granted;
}

} // namespace anyprec

#else

namespace anyprec {

bool true_in_child(bool (*)()) {
    return false;
}
bool amx_permission() {
    return false;
}

} // namespace anyprec

#endif
