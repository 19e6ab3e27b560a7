// Instruction sets: what this CPU and its operating system can run, and which level the engine uses.
// In: cpuid and xgetbv, and the user's wish in ANYPREC_ISA. Out: feature names, one level name.
// Called by bindings.cpp; no Python in here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace anyprec {

// Names are those of Linux' /proc/cpuinfo, so that a user can compare: "avx2", "avx512_vnni", ...
using Features = std::vector<std::string>;

// The registers that decide, as cpuid(leaf, subleaf) gives them. xcr0 is 0 where the operating system keeps no
// extended state: then none of the features below may be used, whatever cpuid says.
struct CpuidWords {
    uint32_t leaf1_ecx = 0;
    uint32_t leaf7_ebx = 0;
    uint32_t leaf7_ecx = 0;
    uint32_t leaf7_1_eax = 0;
    uint64_t xcr0 = 0;
};

// A wish that cannot be met; the message names the wish, what is allowed and what to do.
struct IsaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Features decode_cpuid(const CpuidWords &words);

// Of the machine we run on. cpu_name is empty where the processor does not tell.
const Features &cpu_features();
std::string cpu_name();

// Level names, slowest first: all we know, and those compiled into this library.
std::vector<std::string> known_isas();
std::vector<std::string> built_isas();

// The wish if `features` suffice for it, or the best built level if the wish is empty. Throws IsaError.
// `source` is what error messages call the place the wish comes from.
std::string choose_isa(const std::string &requested, const Features &features,
                       const std::string &source = "ANYPREC_ISA");

// The level for this process: ANYPREC_ISA, else the best.
std::string isa();

} // namespace anyprec
