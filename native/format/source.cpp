// See source.h.
#include "format/source.h"

#include <cstring>

#include "anyprec/model_error.h"

#if defined(_WIN32)
#include <filesystem>
#include <fstream>
#else
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace anyprec {
namespace {

class MemorySource : public Source {
  public:
    MemorySource(const uint8_t *bytes, size_t size) : bytes_(bytes), size_(size) {}
    size_t size() override { return size_; }
    void read(size_t begin, size_t end, uint8_t *into) override { std::memcpy(into, bytes_ + begin, end - begin); }

  private:
    const uint8_t *bytes_; // the caller's: read while opening and never later
    size_t size_;
};

[[noreturn]] void fail_system(const std::string &what, const std::string &reason) {
    throw ModelError(ModelErrorKind::ModelFileError, "cannot be " + what + ": " + reason);
}

#if defined(_WIN32)

class FileSource : public Source {
  public:
    explicit FileSource(const std::string &path) {
        std::filesystem::path where = std::filesystem::u8path(path);
        std::error_code error;
        if (!std::filesystem::is_regular_file(where, error))
            fail_system("opened", "it is not a regular file");
        file_.open(where, std::ios::binary);
        if (!file_)
            fail_system("opened", "access was refused");
    }
    size_t size() override {
        file_.clear();
        file_.seekg(0, std::ios::end);
        return size_t(file_.tellg());
    }
    void read(size_t begin, size_t end, uint8_t *into) override {
        file_.clear();
        file_.seekg(std::streamoff(begin));
        file_.read(reinterpret_cast<char *>(into), std::streamsize(end - begin));
        if (size_t(file_.gcount()) != end - begin)
            throw ModelError(ModelErrorKind::TruncatedFile, "was cut short while it was read; fetch it again");
    }

  private:
    std::ifstream file_;
};

#else

class FileSource : public Source {
  public:
    explicit FileSource(const std::string &path) {
        if (path.find('\0') != path.npos)
            fail_system("opened", "its path has a NUL in it");
        // Not blocking: a pipe would wait for a writer here, and is refused below.
        file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file_ < 0)
            fail_system("opened", std::strerror(errno));
        struct stat about;
        if (fstat(file_, &about) != 0 || !S_ISREG(about.st_mode)) {
            ::close(file_);
            fail_system("opened", "it is not a regular file");
        }
    }
    ~FileSource() override { ::close(file_); }

    size_t size() override {
        struct stat about;
        if (fstat(file_, &about) != 0)
            fail_system("read", std::strerror(errno));
        return size_t(about.st_size);
    }
    void read(size_t begin, size_t end, uint8_t *into) override {
        while (begin < end) {
            ssize_t got = pread(file_, into, end - begin, off_t(begin));
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                fail_system("read", std::strerror(errno));
            if (got == 0)
                throw ModelError(ModelErrorKind::TruncatedFile, "was cut short while it was read; fetch it again");
            begin += size_t(got);
            into += got;
        }
    }

  private:
    int file_ = -1;
};

#endif

} // namespace

std::unique_ptr<Source> file_source(const std::string &path) {
    return std::make_unique<FileSource>(path);
}

std::unique_ptr<Source> memory_source(const uint8_t *bytes, size_t size) {
    return std::make_unique<MemorySource>(bytes, size);
}

size_t physical_memory() {
#if defined(_SC_PHYS_PAGES) && defined(_SC_PAGESIZE)
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0)
        return size_t(pages) * size_t(page);
#endif
    return SIZE_MAX;
}

} // namespace anyprec
