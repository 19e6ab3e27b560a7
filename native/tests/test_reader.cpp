// Tests of json, graph_json, shapes and reader. Stands alone: the files are built in memory. Prints what fails, returns
// 1 if anything did. Built by -DANYPREC_TESTS=ON.
#include <cstdio>

#include "small_file.h"

int main() {
    using namespace anyprec::tests;
    test_json();
    test_good_files();
    test_broken_files();
    test_shapes();
    test_format3();
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
