// InputError: images that a model cannot take. Thrown by Model::run, Model::steps and Model::output_shapes.
#pragma once

#include <stdexcept>

namespace anyprec {

// The message names the op and the sizes.
struct InputError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

} // namespace anyprec
