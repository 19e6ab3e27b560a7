// Tests of what surrounds AMX. On every x86 CPU under Linux: whether a probe in a process of its own survives a crash.
// In a build with ANYPREC_EMULATE: whether the emulated instructions refuse what a CPU refuses. Prints what fails,
// returns 1 if anything did. Built by -DANYPREC_TESTS=ON.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "anyprec/cpu.h"
#include "kernels/kernels.h"
#include "run/amx_permission.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/wait.h>
#include <unistd.h>
#endif
#if defined(ANYPREC_EMULATE)
#include "emulate/amx.h"
#endif

namespace {

int failures = 0;
void check(bool right, const char *what) {
    if (!right)
        std::printf("FAILED: %s\n", what), ++failures;
}

#if defined(__linux__) && defined(__x86_64__)

volatile sig_atomic_t handled = 0;
void note(int) {
    handled = 1;
}

void test_probe() {
    if (!anyprec::true_in_child([] { return true; })) {
        std::printf("no AMX in this build\n");
        return;
    }
    check(!anyprec::true_in_child([] { return false; }), "a probe that gives a wrong answer");
    std::signal(SIGILL, note);
    std::signal(SIGCHLD, note);
    check(!anyprec::true_in_child([] {
        __asm__ volatile("ud2");
        return true;
    }),
          "an illegal instruction in a probe");
    check(!anyprec::true_in_child([]() -> bool { std::abort(); }), "a probe that aborts");
    check(!handled, "no handler of this process ran, and no child of its own seemed to end");
    std::signal(SIGCHLD, SIG_IGN);
    check(anyprec::true_in_child([] { return true; }), "a probe where children are ignored");
    std::signal(SIGCHLD, SIG_DFL);
    std::signal(SIGILL, SIG_DFL);
    check(waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD, "no child is left behind");
}

// Whatever this CPU is: asking for AMX, or for its absence, does not end the process.
void test_dispatch() {
    const anyprec::Features features = anyprec::cpu_features();
    bool cpu = false, permission = false;
    for (const std::string &name : features) {
        cpu = cpu || name == "amx_int8";
        permission = permission || name == "amx_permission";
    }
#if defined(ANYPREC_AMX) && !defined(ANYPREC_EMULATE) // the instructions themselves
    check(cpu || !anyprec::true_in_child(anyprec::amx_multiplies), "AMX on a CPU without it");
#endif
    check(cpu || !permission, "no permission is asked for where the CPU has no AMX");
#if defined(ANYPREC_EMULATE)
    check(permission, "the emulated CPU has AMX");
    check(anyprec::choose_isa("", features) == "amx", "and uses it");
#endif
}

#endif

#if defined(ANYPREC_EMULATE)

struct Config {
    unsigned char bytes[64] = {1};
    Config &tile(int number, int rows, int row_bytes) {
        bytes[16 + 2 * number] = static_cast<unsigned char>(row_bytes);
        bytes[48 + number] = static_cast<unsigned char>(rows);
        return *this;
    }
};
// Sums of 5 rows and 16 columns in tile 0, codes in 1, weights of 12 terms in 2.
Config good() {
    return Config().tile(0, 5, 64).tile(1, 5, 12).tile(2, 3, 64);
}
bool accepts(const Config &config) {
    static Config given;
    given = config;
    return anyprec::true_in_child([] {
        std::fclose(stderr); // what the emulator says is expected here
        _tile_loadconfig(&given);
        _tile_release();
        return true;
    });
}
bool multiplies(const Config &config, int sums = 0, int codes = 1, int weights = 2) {
    static Config given;
    static int numbers[3];
    given = config;
    numbers[0] = sums, numbers[1] = codes, numbers[2] = weights;
    return anyprec::true_in_child([] {
        std::fclose(stderr);
        _tile_loadconfig(&given);
        _tile_dpbusd(numbers[0], numbers[1], numbers[2]);
        _tile_release();
        return true;
    });
}

void test_emulator() {
    check(accepts(good()) && multiplies(good()), "a good configuration");
    Config other = good();
    other.bytes[0] = 2;
    check(!accepts(other), "a palette that does not exist");
    other = good();
    other.bytes[5] = 1;
    check(!accepts(other), "a reserved byte");
    check(!accepts(good().tile(3, 17, 64)), "17 rows");
    check(!accepts(good().tile(3, 16, 68)), "68 bytes a row");
    check(!accepts(good().tile(3, 0, 64)) && !accepts(good().tile(3, 4, 0)), "half of a shape");
    check(!accepts(good().tile(8, 1, 4)), "a ninth tile");
    check(!multiplies(good().tile(1, 4, 12)), "other rows of codes than of sums");
    check(!multiplies(good().tile(1, 5, 16)), "other terms of codes than of weights");
    check(!multiplies(good().tile(2, 3, 60)), "other columns of weights than of sums");
    check(!multiplies(good(), 0, 1, 1) && !multiplies(good(), 0, 0, 2), "one tile twice");
    check(!multiplies(good(), 0, 1, 3), "a tile without a shape");
    check(!anyprec::true_in_child([] {
        std::fclose(stderr);
        _tile_zero(0);
        return true;
    }),
          "no configuration");

    // 3 x 200 x -100 + 255 x 127, by hand; the sign of weights and the size of codes matter.
    const Config config = Config().tile(0, 1, 4).tile(1, 1, 4).tile(2, 1, 4);
    const unsigned char codes[4] = {200, 200, 200, 255};
    const signed char weights[4] = {-100, -100, -100, 127};
    int sum = 0;
    _tile_loadconfig(&config);
    _tile_loadd(1, codes, 4);
    _tile_loadd(2, weights, 4);
    _tile_dpbusd(0, 1, 2);
    _tile_dpbusd(0, 1, 2);
    _tile_stored(0, &sum, 4);
    _tile_release();
    check(sum == 2 * (-60000 + 32385), "a product");
}

#endif

} // namespace

int main() {
#if defined(__linux__) && defined(__x86_64__)
    test_probe();
    test_dispatch();
#endif
#if defined(ANYPREC_EMULATE)
    test_emulator();
#endif
    std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
