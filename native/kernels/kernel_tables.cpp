// See kernels.h. In: nothing. Out: the tables of kernels that are compiled for this architecture; CMakeLists.txt has
// the same conditions. Whether a CPU can run them is for cpu.cpp to say. Called by cpu.cpp, engine.cpp and
// bench/kernels.cpp. Compiled without instruction-set flags: it runs on every CPU.
#include <cstring>

#include "kernels/kernels.h"

namespace anyprec {

#if defined(__x86_64__) || defined(_M_X64)
namespace {

bool is_lookup(const TileKernel &kernel) {
    return kernel.input == Input::lookup || kernel.input == Input::lookup_pairs;
}

// The table of `base`, with kernels of `more` beside those that `keeps` keeps.
class DerivedTable {
  public:
    DerivedTable(const Kernels &base, const IntegerKernels &more, bool (*keeps)(const TileKernel &)) : table(base) {
        const TileKernel **to = integer_;
        for (const TileKernel *const *kernel = base.integer; *kernel; ++kernel)
            if (keeps(**kernel))
                *to++ = *kernel;
        for (const TileKernel *const *kernel = more.integer; *kernel; ++kernel)
            *to++ = *kernel;
        table.isa = more.isa;
        table.integer = integer_;
        table.winograd = more.winograd ? more.winograd : base.winograd;
        table.release = more.release;
        table.measured = base.measured || more.measured;
        table.pack_bits = more.pack_bits ? more.pack_bits : base.pack_bits;
    }

  private:
    const TileKernel *integer_[16] = {}; // ends with nullptr

  public:
    Kernels table;
};

} // namespace

// vpermb looks up more than vpshufb.
const Kernels *kernels_avx512() {
    static const DerivedTable derived(*kernels_avx512vnni(), integer_vbmi,
                                      [](const TileKernel &kernel) { return !is_lookup(kernel); });
    return &derived.table;
}
#if defined(ANYPREC_AVXVNNI)
// Lookups stay; vpdpbusd is faster than all products of AVX2.
const Kernels *kernels_avxvnni() {
    static const DerivedTable derived(*kernels_avx2(), integer_avxvnni, is_lookup);
    return &derived.table;
}
#endif
#if defined(ANYPREC_AMX)
const Kernels *kernels_amx() {
    static const DerivedTable derived(*kernels_avx512(), integer_amx, [](const TileKernel &) { return true; });
    return &derived.table;
}
#endif
#endif

const Kernels *const *kernel_tables() {
    static const Kernels *const tables[] = {kernels_scalar(),
#if defined(__x86_64__) || defined(_M_X64)
                                            kernels_avx2(),
#if defined(ANYPREC_AVXVNNI)
                                            kernels_avxvnni(),
#endif
                                            kernels_avx512vnni(),
                                            kernels_avx512(),
#if defined(ANYPREC_AMX)
                                            kernels_amx(),
#endif
#elif defined(__aarch64__) && !defined(_MSC_VER) // to MSVC all NEON vectors are one type
                                            kernels_neon(), kernels_dotprod(), kernels_i8mm(),
#endif
                                            nullptr};
    return tables;
}

const Kernels *find_kernels(const char *isa) {
    for (const Kernels *const *table = kernel_tables(); *table; ++table)
        if (std::strcmp((*table)->isa, isa) == 0)
            return *table;
    return nullptr;
}

} // namespace anyprec
