// The extension module anyprec._native: the only file that sees Python. It converts and forwards, nothing else.
// Its Python face is typed in src/anyprec/_native.pyi; anyprec.run calls it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"

namespace nb = nanobind;

// Our C++ errors become the classes of anyprec.errors. The import happens when an error is on its way,
// so importing the extension imports nothing else.
static void raise_ours(const std::exception_ptr &pending, void *) {
    try {
        std::rethrow_exception(pending);
    } catch (const anyprec::IsaError &error) {
        nb::object type = nb::module_::import_("anyprec.errors").attr("UnsupportedIsa");
        PyErr_SetString(type.ptr(), error.what());
    }
}

NB_MODULE(_native, m) {
    nb::register_exception_translator(raise_ours);

    m.def("cpu_name", &anyprec::cpu_name);
    m.def("cpu_features", &anyprec::cpu_features);
    m.def("known_isas", &anyprec::known_isas);
    m.def("built_isas", &anyprec::built_isas);
    m.def("isa", &anyprec::isa);
    m.def("choose_isa", &anyprec::choose_isa, nb::arg("wish"), nb::arg("features"));
    m.def(
        "decode_cpuid",
        [](uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_1_eax, uint64_t xcr0) {
            return anyprec::decode_cpuid({leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_1_eax, xcr0});
        },
        nb::arg("leaf1_ecx"), nb::arg("leaf7_ebx"), nb::arg("leaf7_ecx"), nb::arg("leaf7_1_eax"), nb::arg("xcr0"));
}
