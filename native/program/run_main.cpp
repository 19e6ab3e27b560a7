// anyprec-run: a model file and images in, outputs out, no Python. docs/cpp.md.
//   anyprec-run net.apm images.npy [--bits 4] [--out y.npy] [--layout NCHW] [--threads 1] [--repeat 1] [--max-bits 8]
//   anyprec-run net.apm                 lists the profiles
//   anyprec-run net.apm ids.npy m.npy   several inputs, in the order of the file; those that are no images as they are
//   --steps                             times every step instead
//   --no-check-finite                   computes NaN and infinity, as ARITHMETIC.md says, instead of refusing them
#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "anyprec/engine.h"
#include "program/npy.h"
#include "run/finite.h"

namespace {

const char *const kUsage =
    "usage: anyprec-run MODEL.apm [INPUT.npy ...] [--bits 1..8|32|PROFILE] [--out OUTPUT.npy] [--layout NCHW|NHWC]\n"
    "                   [--threads N] [--repeat N] [--steps] [--max-bits 1..8] [--no-verify] [--isa NAME]\n"
    "                   [--no-keep-copy] [--no-check-finite]\n";

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

int number(const std::string &option, const std::string &text, int low, int high) {
    char *end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || value < low || value > high)
        throw UsageError(option + " " + text + " is not a number from " + std::to_string(low) + " to " +
                         std::to_string(high));
    return static_cast<int>(value);
}

void list(anyprec::Model &model) {
    std::printf("%s, instruction set %s, input ", model.name().c_str(), model.isa().c_str());
    bool more = false;
    for (const anyprec::InputInfo &input : model.inputs()) {
        std::printf("%s", more ? (", " + input.name + " ").c_str() : "");
        for (size_t i = 0; i < input.shape.size(); ++i)
            std::printf(input.shape[i] ? "%s%d" : "%sany", i ? " x " : "", input.shape[i]);
        more = true;
    }
    const anyprec::Preprocessing how = model.preprocessing();
    if (model.image_height())
        std::printf(", made for %d x %d", model.image_height(), model.image_width());
    if (how.height) // arrays are used as they are: a program that decodes pictures does this
        std::printf(", pictures resized (%s) to %s%d x %d, the middle of it", how.filter.c_str(),
                    how.resize == "cover" ? "cover " : "", how.height, how.width);
    std::printf("\n%-12s %12s %10s\n", "profile", "bytes", "accuracy");
    for (const anyprec::ProfileInfo &p : model.profiles()) {
        std::printf("%-12s %12zu ", p.name.c_str(), p.bytes);
        if (!p.available)
            std::printf("   not loaded\n");
        else if (std::isnan(p.accuracy))
            std::printf("%10s\n", "-");
        else
            std::printf("%8.2f %%\n", p.accuracy);
    }
}

// Default: the widest uniform profile (the last number), or the first profile.
int find_profile(anyprec::Model &model, const std::string &name) {
    std::string known;
    int found = -1, first = -1, index = 0;
    bool in_file = false;
    for (const anyprec::ProfileInfo &p : model.profiles()) {
        const bool uniform = p.name.find_first_not_of("0123456789") == std::string::npos;
        in_file = in_file || p.name == name;
        if (p.available) {
            if (p.name == name || (name.empty() && uniform))
                found = index;
            first = first < 0 ? index : first;
            known += (known.empty() ? "" : ", ") + p.name;
        }
        ++index;
    }
    if (name.empty() && found < 0)
        found = first;
    if (known.empty())
        throw UsageError("--max-bits leaves no profile of this file");
    if (found < 0)
        throw UsageError(
            "--bits " + name +
            (in_file ? " is in this model file but not loaded; there are " : " is not in this model file, which has ") +
            known);
    return found;
}

int run(const std::vector<std::string> &words, const std::map<std::string, std::string> &options) {
    const auto option = [&](const char *name, const char *otherwise) {
        const auto it = options.find(name);
        return it == options.end() ? std::string(otherwise) : it->second;
    };
    anyprec::OpenOptions open;
    open.max_bits = options.count("--max-bits") ? number("--max-bits", option("--max-bits", ""), 1, 8) : 0;
    open.verify = options.count("--no-verify") == 0;
    open.isa = option("--isa", "");
    open.keep_copy = options.count("--no-keep-copy") == 0;
    const auto model = anyprec::Model::open(words[0], open);
    if (words.size() == 1) {
        list(*model);
        return 0;
    }
    const std::string layout = option("--layout", "NCHW");
    if (layout != "NCHW" && layout != "NHWC")
        throw UsageError("--layout " + layout + " is not known; choose NCHW or NHWC");
    const int threads = number("--threads", option("--threads", "1"), 1, 1024);
    const int repeat = number("--repeat", option("--repeat", "1"), 1, 1000000);
    const int profile = find_profile(*model, option("--bits", ""));

    const std::vector<anyprec::InputInfo> infos = model->inputs();
    if (words.size() - 1 != infos.size())
        throw UsageError(std::to_string(words.size() - 1) + " arrays are given, the model takes " +
                         std::to_string(infos.size()));
    std::vector<anyprec::NpyArray> arrays;
    std::vector<anyprec::InputArray> inputs;
    for (size_t i = 0; i < infos.size(); ++i) {
        arrays.push_back(anyprec::read_npy(words[i + 1]));
        anyprec::NpyArray &array = arrays.back();
        const bool images = infos[i].shape.size() == 3;
        if (images && array.shape.size() == 3)
            array.shape.insert(array.shape.begin(), 1);
        if (images && array.shape.size() != 4)
            throw UsageError(words[i + 1] + " has " + std::to_string(array.shape.size()) +
                             " axes; give images of four (" + layout + "), or one image of three");
        anyprec::InputArray input;
        input.data = array.data.data();
        input.bytes = array.bytes;
        input.channels_first = layout == "NCHW";
        input.shape.assign(array.shape.begin(), array.shape.end());
        inputs.push_back(input);
        if (!input.bytes && !options.count("--no-check-finite"))
            anyprec::refuse_nonfinite(reinterpret_cast<const float *>(array.data.data()), array.data.size() / 4);
    }

    if (options.count("--steps")) {
        for (const anyprec::StepInfo &s : model->steps(inputs, profile, std::max(repeat, 10), threads))
            std::printf("%-32s %-36s %9.1f us %8.1f products/ns\n", s.op.c_str(), s.work.c_str(), 1e6 * s.seconds,
                        static_cast<double>(s.products) / (1e9 * std::max(s.seconds, 1e-9)));
        return 0;
    }
    const std::vector<std::vector<int>> shapes = model->output_shapes(inputs);
    std::vector<std::vector<float>> outputs;
    std::vector<float *> pointers;
    for (const std::vector<int> &s : shapes) {
        size_t count = 1;
        for (int size : s)
            count *= static_cast<size_t>(size);
        outputs.emplace_back(count);
        pointers.push_back(outputs.back().data());
    }
    std::vector<double> times;
    for (int i = 0; i < repeat; ++i) {
        const auto start = std::chrono::steady_clock::now();
        model->run(inputs, profile, threads, pointers.data());
        times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    if (repeat > 1) {
        std::sort(times.begin() + 1, times.end()); // the first call prepares the weights
        std::printf("first %.2f ms, then median %.2f ms, least %.2f ms\n", times[0], times[1 + (times.size() - 1) / 2],
                    times[1]);
    }
    const std::string out = option("--out", "");
    if (!out.empty()) {
        for (size_t i = 0; i < outputs.size(); ++i) {
            std::vector<size_t> shape(shapes[i].begin(), shapes[i].end());
            if (shape.size() == 4 && shape[1] == 1 && shape[2] == 1)
                shape = {shape[0], shape[3]};
            // y.npy, and y.1.npy, y.2.npy for further outputs; NHWC, vectors as (N, C)
            std::string path = out;
            if (i) {
                const size_t dot = path.rfind(".npy");
                path = (dot == std::string::npos ? path : path.substr(0, dot)) + "." + std::to_string(i) + ".npy";
            }
            anyprec::write_npy(path, shape, outputs[i].data());
        }
        return 0;
    }
    const std::vector<std::string> labels = model->labels();
    const int count = shapes[0][0];
    const size_t per_image = outputs[0].size() / static_cast<size_t>(count);
    for (int n = 0; n < std::min(count, 20) && repeat == 1; ++n) { // the best class of each image
        const float *y = outputs[0].data() + per_image * static_cast<size_t>(n);
        const size_t best = static_cast<size_t>(std::max_element(y, y + per_image) - y);
        std::printf("%d: %zu%s%s  %g\n", n, best, best < labels.size() ? " " : "",
                    best < labels.size() ? labels[best].c_str() : "", y[best]);
    }
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    try {
        std::vector<std::string> words;
        std::map<std::string, std::string> options;
        for (int i = 1; i < argc; ++i) {
            const std::string word = argv[i];
            if (word == "--help" || word == "-h") {
                std::fputs(kUsage, stdout);
                return 0;
            }
            if (word.rfind("--", 0) != 0) {
                words.push_back(word);
                continue;
            }
            static const char *const known[] = {"--bits",   "--out",      "--layout", "--threads",
                                                "--repeat", "--max-bits", "--isa"};
            const bool takes_value = std::find(std::begin(known), std::end(known), word) != std::end(known);
            if (!takes_value && word != "--verify" && word != "--no-verify" && word != "--no-keep-copy" &&
                word != "--steps" && word != "--no-check-finite")
                throw UsageError("option " + word + " is not known; see anyprec-run --help");
            if (takes_value && i + 1 == argc)
                throw UsageError("option " + word + " needs a value");
            options[word] = takes_value ? argv[++i] : "";
        }
        if (words.empty()) {
            std::fputs(kUsage, stderr);
            return 2;
        }
        return run(words, options);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "anyprec-run: error: %s\n", error.what());
        return 2;
    }
}
