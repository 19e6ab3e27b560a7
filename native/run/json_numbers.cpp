// See json_numbers.h.
#include "run/json_numbers.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace anyprec {
namespace {

char *write_number(char *to, float x) {
    if (!std::isfinite(x)) {
        std::memcpy(to, "null", 4);
        return to + 4;
    }
#if defined(__cpp_lib_to_chars)
    char *end = std::to_chars(to, to + kMostDigits, x).ptr;
#else
    char *end = to + std::snprintf(to, kMostDigits, "%.9g", static_cast<double>(x)); // longer, and as exact
#endif
    for (const char *c = to; c != end; ++c)
        if (*c == '.' || *c == 'e')
            return end;
    *end++ = '.'; // 3.0, not 3: a reader that tells integers from floats shall see a float
    *end++ = '0';
    return end;
}

} // namespace

std::string json_numbers(const float *x, size_t count) {
    std::string text(kMostDigits * count, '\0');
    char *end = &text[0];
    for (size_t i = 0; i < count; ++i) {
        end = write_number(end, x[i]);
        *end++ = ',';
    }
    text.resize(count ? static_cast<size_t>(end - &text[0]) - 1 : 0);
    return text;
}

} // namespace anyprec
