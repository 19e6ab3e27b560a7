// See cpu.h. Compiled without instruction-set flags: it must run on the oldest CPU.
#include "anyprec/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#define ANYPREC_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#else
#define ANYPREC_X86 0
#endif

#if defined(__aarch64__) || defined(_M_ARM64)
#define ANYPREC_ARM 1
#else
#define ANYPREC_ARM 0
#endif

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif ANYPREC_ARM && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels/kernels.h"
#include "run/amx_permission.h"

namespace anyprec {
namespace {

struct Level {
    std::string name;
    Features needs;
    bool built() const { return find_kernels(name.c_str()) != nullptr; }
};

// Slowest first: the best level is the last one that is built and whose needs are met.
const std::vector<Level> &levels() {
    static const std::vector<Level> table = {
        {"scalar", {}},
        {"neon", {"asimd"}},
        {"dotprod", {"asimd", "asimddp"}},
        {"i8mm", {"asimd", "asimddp", "i8mm"}},
        {"avx2", {"avx2", "fma"}},
        {"avxvnni", {"avx2", "fma", "avx_vnni"}},
        {"avx512vnni", {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}},
        {"avx512",
         {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512vbmi",
          "avx512_vpopcntdq"}},
        {"amx",
         {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512vbmi", "avx512_vpopcntdq",
          "amx_tile", "amx_int8", "amx_permission"}},
    };
    return table;
}

Features missing(const Level &level, const Features &features) {
    Features lacking;
    for (const std::string &need : level.needs)
        if (std::find(features.begin(), features.end(), need) == features.end())
            lacking.push_back(need);
    return lacking;
}

std::string join(const std::vector<std::string> &names) {
    std::string text;
    for (const std::string &name : names)
        text += (text.empty() ? "" : ", ") + name;
    return text;
}

#if ANYPREC_X86
struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero for a leaf that this CPU does not have: cpuid would return another leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Registers r;
#if defined(_MSC_VER)
    int words[4];
    __cpuid(words, static_cast<int>(leaf & 0x80000000u));
    if (static_cast<uint32_t>(words[0]) < leaf)
        return r;
    __cpuidex(words, static_cast<int>(leaf), static_cast<int>(subleaf));
    r.eax = words[0], r.ebx = words[1], r.ecx = words[2], r.edx = words[3];
#else
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
    return r;
}

uint64_t read_xcr0() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    // The _xgetbv intrinsic would need -mxsave, an ISA flag.
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
#endif
}

CpuidWords read_cpuid() {
    const uint32_t osxsave = 1u << 27; // without it xgetbv is an illegal instruction
    CpuidWords words;
    words.leaf1_ecx = cpuid(1).ecx;
    const Registers leaf7 = cpuid(7);
    words.leaf7_ebx = leaf7.ebx;
    words.leaf7_ecx = leaf7.ecx;
    words.leaf7_edx = leaf7.edx;
    if (leaf7.eax >= 1) // eax of (7, 0) is the highest subleaf of 7
        words.leaf7_1_eax = cpuid(7, 1).eax;
    if (words.leaf1_ecx & osxsave)
        words.xcr0 = read_xcr0();
#if defined(ANYPREC_EMULATE) // all that native/emulate does in software
    words.leaf7_ebx |= 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    words.leaf7_ecx |= 1u << 1 | 1u << 11 | 1u << 14;
    words.leaf7_edx |= 1u << 24 | 1u << 25;
    words.leaf7_1_eax |= 1u << 4;
    words.xcr0 |= 0x600e0;
#endif
    return words;
}

Features read_x86_features() {
    Features features = decode_cpuid(read_cpuid());
    const bool tiles = std::find(features.begin(), features.end(), "amx_int8") != features.end();
    if (tiles && amx_permission())
        features.emplace_back("amx_permission");
    return features;
}
#endif

} // namespace

Features decode_cpuid(const CpuidWords &words) {
    const auto bit = [](uint32_t word, int index) { return ((word >> index) & 1u) != 0; };
    const uint64_t ymm_state = 0x06; // SSE and AVX registers are saved on a task switch
    const uint64_t zmm_state = 0xe6; // and the mask registers and both halves of zmm0..31
    const bool ymm = (words.xcr0 & ymm_state) == ymm_state && bit(words.leaf1_ecx, 28);
    const uint64_t tile_state = 0x60000; // tile configuration and tile data
    const bool zmm = ymm && (words.xcr0 & zmm_state) == zmm_state && bit(words.leaf7_ebx, 16);
    const bool tiles = (words.xcr0 & tile_state) == tile_state && bit(words.leaf7_edx, 24);

    Features features;
    const auto add = [&features](bool has, const char *name) {
        if (has)
            features.emplace_back(name);
    };
    add(ymm && bit(words.leaf7_ebx, 5), "avx2");
    add(ymm && bit(words.leaf1_ecx, 12), "fma");
    add(ymm && bit(words.leaf7_1_eax, 4), "avx_vnni");
    add(zmm, "avx512f");
    add(zmm && bit(words.leaf7_ebx, 30), "avx512bw");
    add(zmm && bit(words.leaf7_ebx, 31), "avx512vl");
    add(zmm && bit(words.leaf7_ebx, 17), "avx512dq");
    add(zmm && bit(words.leaf7_ecx, 1), "avx512vbmi");
    add(zmm && bit(words.leaf7_ecx, 11), "avx512_vnni");
    add(zmm && bit(words.leaf7_ecx, 14), "avx512_vpopcntdq");
    add(zmm && bit(words.leaf7_1_eax, 5), "avx512_bf16");
    add(tiles, "amx_tile");
    add(tiles && bit(words.leaf7_edx, 25), "amx_int8");
    return features;
}

Features decode_hwcap(uint64_t hwcap, uint64_t hwcap2) {
    Features features;
    if (hwcap >> 1 & 1)
        features.emplace_back("asimd");
    if (hwcap >> 20 & 1)
        features.emplace_back("asimddp");
    if (hwcap2 >> 13 & 1)
        features.emplace_back("i8mm");
    return features;
}

#if ANYPREC_ARM
namespace {

#if defined(__APPLE__)
// Names of macOS 12 and later. An older one does not know them, and runs the kernels of plain NEON.
bool has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

Features read_arm_features() {
#if defined(__linux__)
    return decode_hwcap(getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#else
    Features features = {"asimd"}; // part of every 64-bit ARM that has an operating system of this kind
#if defined(__APPLE__)
    if (has_feature("hw.optional.arm.FEAT_DotProd"))
        features.emplace_back("asimddp");
    if (has_feature("hw.optional.arm.FEAT_I8MM"))
        features.emplace_back("i8mm");
#endif
    return features;
#endif
}

} // namespace
#endif

const Features &cpu_features() {
#if ANYPREC_X86
    static const Features features = read_x86_features();
#elif ANYPREC_ARM
    static const Features features = read_arm_features();
#else
    static const Features features;
#endif
    return features;
}

std::string cpu_name() {
    std::string name;
#if ANYPREC_X86
    for (uint32_t leaf = 0x80000002u; leaf <= 0x80000004u; ++leaf) { // 3 x 16 letters, padded with zeros
        const Registers r = cpuid(leaf);
        char letters[16];
        std::memcpy(letters, &r.eax, 4);
        std::memcpy(letters + 4, &r.ebx, 4);
        std::memcpy(letters + 8, &r.ecx, 4);
        std::memcpy(letters + 12, &r.edx, 4);
        name.append(letters, sizeof letters);
    }
    name.resize(std::strlen(name.c_str()));
#elif defined(__APPLE__)
    char letters[256] = {};
    size_t size = sizeof letters - 1;
    if (sysctlbyname("machdep.cpu.brand_string", letters, &size, nullptr, 0) == 0)
        name = letters;
#endif
    const size_t first = name.find_first_not_of(' ');
    return first == std::string::npos ? "" : name.substr(first, name.find_last_not_of(' ') - first + 1);
}

std::vector<std::string> known_isas() {
    std::vector<std::string> names;
    for (const Level &level : levels())
        names.push_back(level.name);
    return names;
}

std::vector<std::string> built_isas() {
    std::vector<std::string> names;
    for (const Level &level : levels())
        if (level.built())
            names.push_back(level.name);
    return names;
}

std::string choose_isa(const std::string &requested, const Features &features, const std::string &source) {
    std::vector<std::string> runnable;
    for (const Level &level : levels())
        if (level.built() && missing(level, features).empty())
            runnable.push_back(level.name);
    if (requested.empty())
        return runnable.back(); // never empty: scalar is always built and needs nothing

    const auto level =
        std::find_if(levels().begin(), levels().end(), [&](const Level &l) { return l.name == requested; });
    if (level == levels().end())
        throw IsaError(source + "=" + requested + " is no instruction set anyprec knows (" + join(known_isas()) +
                       "); choose one of " + join(runnable) + ", or unset it");
    if (!level->built())
        throw IsaError(source + "=" + requested + " is not built into this copy of anyprec, which has " +
                       join(built_isas()) + "; choose one of " + join(runnable) + ", or unset it");
    const Features lacking = missing(*level, features);
    if (!lacking.empty())
        throw IsaError(source + "=" + requested + " cannot run on this CPU, which lacks " + join(lacking) +
                       "; choose one of " + join(runnable) + ", or unset it");
    return requested;
}

std::string isa() {
    const char *requested = std::getenv("ANYPREC_ISA");
    return choose_isa(requested ? requested : "", cpu_features());
}

} // namespace anyprec
