// See kernels.h. In: nothing. Out: the tables of kernels that are compiled for this architecture; CMakeLists.txt has
// the same conditions. Whether a CPU can run them is for cpu.cpp to say. Called by cpu.cpp, engine.cpp and
// bench/kernels.cpp.
#include <cstring>

#include "kernels/kernels.h"

namespace anyprec {

const Kernels *const *kernel_tables() {
    static const Kernels *const tables[] = {kernels_scalar(),
#if defined(__x86_64__) || defined(_M_X64)
                                            kernels_avx2(), kernels_avx512(),
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
