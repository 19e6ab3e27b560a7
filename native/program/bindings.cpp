// The extension module anyprec._native: the only file that sees Python. It only converts and forwards. Its Python
// interface is typed in src/anyprec/_native.pyi; anyprec.run calls it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <memory>
#include <thread>
#include <tuple>

#include "anyprec/cpu.h"
#include "anyprec/engine.h"
#include "format/reader.h"
#include "format/shapes.h"
#include "kernels/kernels.h"
#include "plan/kernel_rates.h"
#include "run/finite.h"
#include "run/json_numbers.h"
#include "run/winograd_training.h"

namespace nb = nanobind;
using anyprec::Model;

// Our C++ errors become the classes of anyprec.errors. The import happens when an error is on its way,
// so importing the extension imports nothing else.
static void raise_ours(const std::exception_ptr &pending, void *) {
    const auto raise = [](const char *name, const std::string &message) {
        nb::object type = nb::module_::import_("anyprec.errors").attr(name);
        // A message may name a path that is not UTF-8: its odd bytes stay as Python keeps those of paths.
        const auto size = static_cast<Py_ssize_t>(message.size());
        nb::object text = nb::steal(PyUnicode_DecodeUTF8(message.data(), size, "surrogateescape"));
        PyErr_SetObject(type.ptr(), text.ptr());
    };
    try {
        std::rethrow_exception(pending);
    } catch (const anyprec::IsaError &error) {
        raise("UnsupportedIsa", error.what());
    } catch (const anyprec::ModelError &error) {
        raise(kind_name(error.kind), error.what());
    } catch (const anyprec::InputError &error) {
        raise("InputError", error.what());
    } catch (const anyprec::Cancelled &error) {
        raise("Cancelled", error.what());
    }
}

// Lets other Python threads run while it lives. When the interpreter ends meanwhile, as it does with a daemon thread
// inside a call, Python up to 3.13 ends this thread where it asks for the GIL: by pthread_exit, which unwinds the stack
// like an exception. That must not leave a destructor (the process would abort, as with nb::gil_scoped_release), so the
// thread stays here until the process ends. Newer Pythons do the same themselves.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;)
                std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

  private:
    PyThreadState *state_;
};

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::numpy, float>;

// Arrays are float32 or uint8, contiguous, N first: anyprec.run.model sees to that.
static anyprec::InputArray as_input(const Array &x, bool channels_first) {
    const bool bytes = x.dtype() == nb::dtype<uint8_t>();
    if (!bytes && x.dtype() != nb::dtype<float>())
        throw nb::type_error("expected an array of float32 or uint8");
    anyprec::InputArray input;
    input.data = x.data();
    input.bytes = bytes;
    input.channels_first = channels_first;
    for (size_t axis = 0; axis < x.ndim(); ++axis) {
        if (x.shape(axis) > INT_MAX)
            throw anyprec::InputError("images are too large: an axis has more than 2^31 - 1 entries");
        input.shape.push_back(static_cast<int>(x.shape(axis)));
    }
    return input;
}

static std::vector<anyprec::InputArray> as_inputs(const std::vector<Array> &arrays, bool channels_first) {
    std::vector<anyprec::InputArray> inputs;
    for (const Array &x : arrays)
        inputs.push_back(as_input(x, channels_first));
    return inputs;
}

// Arrays for outputs of these shapes, and where their numbers go.
struct Outputs {
    nb::list arrays;
    std::vector<float *> data;

    explicit Outputs(const std::vector<std::vector<int>> &shapes) {
        for (const std::vector<int> &sizes : shapes) {
            const std::vector<size_t> shape(sizes.begin(), sizes.end());
            size_t count = 1;
            for (size_t size : shape)
                count *= size;
            float *numbers = new float[count];
            nb::capsule owner(numbers, [](void *p) noexcept { delete[] static_cast<float *>(p); });
            arrays.append(Output(numbers, shape.size(), shape.data(), owner));
            data.push_back(numbers);
        }
    }
};

static void check_numbers(const std::vector<Array> &given, const std::vector<anyprec::InputArray> &inputs) {
    for (size_t i = 0; i < inputs.size(); ++i)
        if (!inputs[i].bytes)
            anyprec::refuse_nonfinite(static_cast<const float *>(inputs[i].data), given[i].size());
}

static nb::list run(Model &model, const std::vector<Array> &given, int profile, int threads, bool channels_first,
                    bool check_finite, const anyprec::CancelToken *cancel) {
    const std::vector<anyprec::InputArray> inputs = as_inputs(given, channels_first);
    Outputs outputs(model.output_shapes(inputs));
    {
        WithoutGil released;
        if (check_finite)
            check_numbers(given, inputs);
        model.run(inputs, profile, threads, outputs.data.data(), cancel);
    }
    return outputs.arrays;
}

static nb::tuple run_keeping(Model &model, const std::vector<Array> &given, int profile, int threads,
                             bool channels_first, bool check_finite, const anyprec::CancelToken *cancel) {
    const std::vector<anyprec::InputArray> inputs = as_inputs(given, channels_first);
    Outputs outputs(model.output_shapes(inputs));
    std::unique_ptr<anyprec::KeptRun> kept;
    {
        WithoutGil released;
        if (check_finite)
            check_numbers(given, inputs);
        kept = model.run_keeping(inputs, profile, threads, outputs.data.data(), cancel);
    }
    return nb::make_tuple(outputs.arrays, nb::cast(std::move(kept)));
}

static nb::list run_kept(const anyprec::KeptRun &kept,
                         const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &rows,
                         int profile, int threads, const anyprec::CancelToken *cancel) {
    std::vector<int> numbers;
    for (size_t i = 0; i < rows.size(); ++i)
        numbers.push_back(static_cast<int>(std::min<int64_t>(std::max<int64_t>(rows(i), -1), INT_MAX)));
    Outputs outputs(kept.output_shapes(static_cast<int>(numbers.size())));
    {
        WithoutGil released;
        kept.run(numbers, profile, threads, outputs.data.data(), cancel);
    }
    return outputs.arrays;
}

// Numbers of a JSON array, without its brackets. Made without the GIL: a server's other threads go on meanwhile.
static nb::bytes json_numbers(const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> &x) {
    std::string text;
    {
        WithoutGil released;
        text = anyprec::json_numbers(x.data(), x.size());
    }
    return nb::bytes(text.data(), text.size());
}

using Floats4 = nb::ndarray<const float, nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using WritableFloats4 = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

// x (N, H, W, from), y or its gradient (N, H, W, to), kernel or its gradient (3, 3, from, to).
template <typename X, typename Y, typename K>
static anyprec::WinogradSizes winograd_sizes(const X &x, const Y &y, const K &kernel, int threads) {
    bool fit = kernel.shape(0) == 3 && kernel.shape(1) == 3 && kernel.shape(2) == x.shape(3) &&
               kernel.shape(3) == y.shape(3) && threads > 0;
    for (size_t axis = 0; axis < 3; ++axis)
        fit = fit && x.shape(axis) == y.shape(axis) && x.shape(axis) <= INT_MAX / 64;
    if (!fit || x.size() > INT_MAX || y.size() > INT_MAX || kernel.size() > INT_MAX / 64)
        throw nb::value_error("expected x (N, H, W, from), y (N, H, W, to) and kernel (3, 3, from, to)");
    const auto size = [](size_t n) { return static_cast<int>(n); };
    return {size(x.shape(0)), size(x.shape(1)), size(x.shape(2)), size(x.shape(3)), size(y.shape(3))};
}

static void require_bf16(bool bf16) {
    if (bf16 && !anyprec::winograd_has_bf16())
        throw nb::value_error("this CPU, or the instruction set in use, does not multiply bfloat16 (avx512_bf16)");
}

NB_MODULE(_native, m) {
    nb::register_exception_translator(raise_ours);
    nb::set_leak_warnings(false); // at exit, a daemon thread inside a call still has its model: no fault, and no news

    m.def(
        "all_finite",
        [](const nb::ndarray<const float, nb::ro, nb::c_contig, nb::device::cpu> &x) {
            return anyprec::all_finite(x.data(), x.size());
        },
        nb::arg("x"));
    m.def("cpu_name", &anyprec::cpu_name);
    m.def("cpu_features", &anyprec::cpu_features);
    m.def("known_isas", &anyprec::known_isas);
    m.def("built_isas", &anyprec::built_isas);
    m.def("isa", &anyprec::isa);
    // [(kernel, vectors of a block, products per cycle)], as the cost model has them. Refused where this CPU cannot run
    // the instruction set.
    m.def("kernel_rates", [](const std::string &isa) {
        const std::string usable = anyprec::choose_isa(isa, anyprec::cpu_features(), "isa");
        const anyprec::Kernels &kernels = *anyprec::find_kernels(usable.c_str());
        std::vector<std::tuple<std::string, int, double>> rates;
        for (const anyprec::TileKernel *const *kernel = kernels.integer; *kernel; ++kernel)
            for (int log2 = 0; log2 <= (*kernel)->max_log2_vectors; ++log2)
                rates.emplace_back((*kernel)->name, 1 << log2, anyprec::products_per_cycle(kernels, **kernel, log2));
        return rates;
    });
    m.def("choose_isa", &anyprec::choose_isa, nb::arg("wish"), nb::arg("features"), nb::arg("source") = "ANYPREC_ISA");
    m.def(
        "decode_cpuid",
        [](uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx, uint32_t leaf7_1_eax,
           uint64_t xcr0) {
            return anyprec::decode_cpuid({leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax, xcr0});
        },
        nb::arg("leaf1_ecx"), nb::arg("leaf7_ebx"), nb::arg("leaf7_ecx"), nb::arg("leaf7_edx"), nb::arg("leaf7_1_eax"),
        nb::arg("xcr0"));
    m.def("decode_hwcap", &anyprec::decode_hwcap, nb::arg("hwcap"), nb::arg("hwcap2"));

    nb::class_<anyprec::ProfileInfo>(m, "ProfileInfo")
        .def_ro("name", &anyprec::ProfileInfo::name)
        .def_ro("weight_bits", &anyprec::ProfileInfo::weight_bits)
        .def_ro("act_bits", &anyprec::ProfileInfo::act_bits)
        .def_ro("accuracy", &anyprec::ProfileInfo::accuracy)
        .def_ro("available", &anyprec::ProfileInfo::available)
        .def_ro("bytes", &anyprec::ProfileInfo::bytes);

    nb::class_<anyprec::StepInfo>(m, "StepInfo")
        .def_ro("op", &anyprec::StepInfo::op)
        .def_ro("work", &anyprec::StepInfo::work)
        .def_ro("products", &anyprec::StepInfo::products)
        .def_ro("seconds", &anyprec::StepInfo::seconds)
        .def_ro("scalar", &anyprec::StepInfo::scalar);

    nb::class_<anyprec::Preprocessing>(m, "Preprocessing")
        .def_ro("resize", &anyprec::Preprocessing::resize)
        .def_ro("height", &anyprec::Preprocessing::height)
        .def_ro("width", &anyprec::Preprocessing::width)
        .def_ro("filter", &anyprec::Preprocessing::filter)
        .def_ro("scale", &anyprec::Preprocessing::scale)
        .def_ro("shift", &anyprec::Preprocessing::shift);

    nb::class_<anyprec::InputInfo>(m, "InputInfo")
        .def_ro("name", &anyprec::InputInfo::name)
        .def_ro("shape", &anyprec::InputInfo::shape)
        .def_ro("integer", &anyprec::InputInfo::integer);

    nb::class_<anyprec::CancelToken>(
        m, "CancelToken",
        "Ends a call between two steps of the network: cancel() from any thread, or timeout_s after it was made.")
        .def(nb::init<>())
        .def(nb::init<double>(), nb::arg("timeout_s"))
        .def("cancel", &anyprec::CancelToken::cancel)
        .def_prop_ro("cancelled", &anyprec::CancelToken::cancelled);

    m.def("json_numbers", &json_numbers, nb::arg("x"));

    m.def(
        "winograd_convolve",
        [](const Floats4 &x, const Floats4 &kernel, const WritableFloats4 &y, int threads, bool bf16) {
            const anyprec::WinogradSizes sizes = winograd_sizes(x, y, kernel, threads);
            require_bf16(bf16);
            const WithoutGil others;
            anyprec::winograd_convolve(x.data(), kernel.data(), y.data(), sizes, threads, bf16);
        },
        nb::arg("x"), nb::arg("kernel"), nb::arg("y").noconvert(), nb::arg("threads"), nb::arg("bf16") = false);
    m.def(
        "winograd_kernel_gradient",
        [](const Floats4 &x, const Floats4 &grad, const WritableFloats4 &gradient, int threads, bool bf16) {
            const anyprec::WinogradSizes sizes = winograd_sizes(x, grad, gradient, threads);
            require_bf16(bf16);
            const WithoutGil others;
            anyprec::winograd_kernel_gradient(x.data(), grad.data(), gradient.data(), sizes, threads, bf16);
        },
        nb::arg("x"), nb::arg("grad"), nb::arg("gradient").noconvert(), nb::arg("threads"), nb::arg("bf16") = false);
    m.def("winograd_has_bf16", &anyprec::winograd_has_bf16);

    nb::class_<Model>(m, "Model")
        .def_static(
            "open",
            [](const nb::bytes &path, int max_bits, bool verify, size_t panel_budget, const std::string &isa,
               bool keep_copy) {
                const std::string name(path.c_str(), path.size());
                WithoutGil released;
                return Model::open(name, {max_bits, verify, panel_budget, isa, keep_copy});
            },
            nb::arg("path"), nb::arg("max_bits") = 0, nb::arg("verify") = true, nb::arg("panel_budget") = 0,
            nb::arg("isa") = "", nb::arg("keep_copy") = true)
        .def_prop_ro("name", &Model::name)
        .def_prop_ro("isa", &Model::isa)
        .def_prop_ro("labels", &Model::labels)
        .def_prop_ro("input_height", &Model::input_height)
        .def_prop_ro("input_width", &Model::input_width)
        .def_prop_ro("input_channels", &Model::input_channels)
        .def_prop_ro("image_height", &Model::image_height)
        .def_prop_ro("image_width", &Model::image_width)
        .def_prop_ro("takes_bytes", &Model::takes_bytes)
        .def_prop_ro("preprocessing", &Model::preprocessing)
        .def_prop_ro("inputs", &Model::inputs)
        .def_prop_ro("outputs", &Model::outputs)
        .def_prop_ro("panel_bytes", &Model::panel_bytes)
        .def_prop_ro("arena_bytes", &Model::arena_bytes)
        .def_prop_ro("file_bytes", &Model::file_bytes)
        .def_prop_ro("loaded_bytes", &Model::loaded_bytes)
        .def("profiles", &Model::profiles)
        .def("refresh", &Model::refresh, nb::call_guard<WithoutGil>())
        .def(
            "output_shapes",
            [](const Model &model, const std::vector<std::vector<int>> &shapes) { // N first, images NHWC
                std::vector<anyprec::InputArray> inputs(shapes.size());
                for (size_t i = 0; i < shapes.size(); ++i)
                    inputs[i].shape = shapes[i];
                return model.output_shapes(inputs);
            },
            nb::arg("shapes"))
        .def(
            "steps",
            [](Model &model, const std::vector<Array> &x, int profile, int repeat, int threads, bool channels_first) {
                const std::vector<anyprec::InputArray> inputs = as_inputs(x, channels_first);
                WithoutGil released;
                return model.steps(inputs, profile, repeat, threads);
            },
            nb::arg("x"), nb::arg("profile"), nb::arg("repeat"), nb::arg("threads"), nb::arg("channels_first"))
        .def("run", &run, nb::arg("x"), nb::arg("profile"), nb::arg("threads"), nb::arg("channels_first"),
             nb::arg("check_finite") = true, nb::arg("cancel") = nb::none())
        .def("run_keeping", &run_keeping, nb::arg("x"), nb::arg("profile"), nb::arg("threads"),
             nb::arg("channels_first"), nb::arg("check_finite") = true, nb::arg("cancel") = nb::none());

    nb::class_<anyprec::KeptRun>(m, "KeptRun",
                                 "What Model.run_keeping has kept of a batch: some of it can run at another profile.")
        .def_prop_ro("images", &anyprec::KeptRun::images)
        .def("run", &run_kept, nb::arg("rows"), nb::arg("profile"), nb::arg("threads"), nb::arg("cancel") = nb::none());
}
