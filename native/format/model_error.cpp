// See model_error.h.
#include "anyprec/model_error.h"

namespace anyprec {

const char *kind_name(ModelErrorKind kind) {
    switch (kind) {
    case ModelErrorKind::TruncatedFile:
        return "TruncatedFile";
    case ModelErrorKind::BadHeader:
        return "BadHeader";
    case ModelErrorKind::BadTensor:
        return "BadTensor";
    case ModelErrorKind::BadGraph:
        return "BadGraph";
    case ModelErrorKind::UnsupportedVersion:
        return "UnsupportedVersion";
    case ModelErrorKind::ChecksumMismatch:
        return "ChecksumMismatch";
    case ModelErrorKind::NotAModelFile:
        return "NotAModelFile";
    case ModelErrorKind::ModelFileError:
        break;
    }
    return "ModelFileError";
}

std::string quote(std::string_view text) {
    std::string shown(text.substr(0, 60));
    for (char &c : shown)
        if (c < 0x20 || c == 0x7f)
            c = '?';
    return "'" + shown + "'";
}

} // namespace anyprec
