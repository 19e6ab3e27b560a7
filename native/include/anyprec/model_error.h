// What can be wrong with a model file: one kind for each error class of Python (FORMAT.md section 4).
// Thrown by the parts of the reader, caught by the bindings and by C++ programs.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace anyprec {

// kind_name gives the class of anyprec.errors that stands for it.
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

// Text of a file as a message shows it: in quotes, at most 60 characters, none of them a control character.
std::string quote(std::string_view text);

} // namespace anyprec
