// Instruction sets: what this CPU and its operating system can run, and which level the engine uses. In: cpuid and
// xgetbv, or on ARM what the system tells, and the environment variable ANYPREC_ISA. Out: feature names, one level
// name. Called by engine.cpp and bindings.cpp.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace anyprec {

// Names as in /proc/cpuinfo on Linux, so that a user can compare: "avx2", "avx512_vnni", "asimddp", ... One is ours:
// "amx_permission", where Linux lets this process use AMX and a product on it gave the right numbers.
using Features = std::vector<std::string>;

// The deciding registers, as cpuid(leaf, subleaf) gives them. xcr0 is 0 where the operating system does not save
// extended registers: then none of the features below can be used, whatever cpuid says.
struct CpuidWords {
    uint32_t leaf1_ecx = 0;
    uint32_t leaf7_ebx = 0;
    uint32_t leaf7_ecx = 0;
    uint32_t leaf7_edx = 0;
    uint32_t leaf7_1_eax = 0;
    uint64_t xcr0 = 0;
};

// A requested level that cannot be used. The message names the request, what is allowed and what to do.
struct IsaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Features decode_cpuid(const CpuidWords &words);
// The same for 64-bit ARM under Linux: AT_HWCAP and AT_HWCAP2 of getauxval.
Features decode_hwcap(uint64_t hwcap, uint64_t hwcap2);

// Of this machine. The first call asks Linux for AMX where the CPU has it. cpu_name is empty where the processor does
// not tell.
const Features &cpu_features();
std::string cpu_name();

// Level names, slowest first: all known levels, and those compiled into this library.
std::vector<std::string> known_isas();
std::vector<std::string> built_isas();

// The requested level if `features` suffice for it, or the best built level if nothing is requested. Throws IsaError.
// `source` names the origin of the request in error messages.
std::string choose_isa(const std::string &requested, const Features &features,
                       const std::string &source = "ANYPREC_ISA");

// The level for this process: ANYPREC_ISA, else the best.
std::string isa();

} // namespace anyprec
