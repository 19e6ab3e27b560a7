// ModelError: what is wrong with a model file, one kind per error class of Python (FORMAT.md, section 4). Thrown by the
// reader, caught by the bindings and by C++ programs.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace anyprec {

// kind_name returns the class name in anyprec.errors.
enum class ModelErrorKind {
    TruncatedFile,
    BadHeader,
    BadTensor,
    BadGraph,
    UnsupportedVersion,
    ChecksumMismatch,
    NotAModelFile,
    ModelFileError, // the file cannot be opened or read at all
};

const char *kind_name(ModelErrorKind kind);

struct ModelError : std::runtime_error {
    ModelErrorKind kind;
    ModelError(ModelErrorKind what_kind, const std::string &message) : std::runtime_error(message), kind(what_kind) {}
};

// Text of a file for an error message: in quotes, at most 60 characters, without control characters.
std::string quote(std::string_view text);

} // namespace anyprec
