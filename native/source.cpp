// See source.h. Files are mapped where the system allows it, so that only what is touched is read.
#include "source.h"

#include <algorithm>
#include <cstring>

#include "model_error.h"

#if defined(_WIN32)
#include <filesystem>
#include <fstream>
#else
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace anyprec {
namespace {

class MemoryPiece : public Piece {
  public:
    MemoryPiece(size_t begin, size_t end) : bytes_(new uint8_t[end - begin]) {
        first_ = bytes_.get();
        begin_ = begin;
    }
    uint8_t *bytes() { return bytes_.get(); }

  private:
    std::unique_ptr<uint8_t[]> bytes_; // new aligns it for floats
};

class MemorySource : public Source {
  public:
    MemorySource(const uint8_t *bytes, size_t size) : bytes_(bytes), size_(size) {}
    size_t size() override { return size_; }
    void read(size_t begin, size_t end, char *into) override { std::memcpy(into, bytes_ + begin, end - begin); }
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        auto made = std::make_unique<MemoryPiece>(begin, end);
        std::memcpy(made->bytes(), bytes_ + begin, end - begin);
        return made;
    }

  private:
    const uint8_t *bytes_; // the caller's: read while opening and never later
    size_t size_;
};

[[noreturn]] void fail_system(const std::string &what, const std::string &reason) {
    throw ModelError(ModelErrorKind::ModelFileError, "cannot be " + what + ": " + reason);
}

#if defined(_WIN32)

// Reads where others map: a mapped file could not be replaced or removed while a model is loaded.
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
    void read(size_t begin, size_t end, char *into) override {
        file_.clear();
        file_.seekg(std::streamoff(begin));
        file_.read(into, std::streamsize(end - begin));
        if (size_t(file_.gcount()) != end - begin)
            throw ModelError(ModelErrorKind::TruncatedFile, "was cut short while it was read; fetch it again");
    }
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        auto made = std::make_unique<MemoryPiece>(begin, end);
        read(begin, end, reinterpret_cast<char *>(made->bytes()));
        return made;
    }

  private:
    std::ifstream file_;
};

#else

size_t page_size() {
    static const size_t size = size_t(sysconf(_SC_PAGESIZE));
    return size;
}

class MappedPiece : public Piece {
  public:
    MappedPiece(int file, size_t begin, size_t end) : skip_(begin % page_size()), length_(end - begin + skip_) {
        void *mapped = mmap(nullptr, length_, PROT_READ, MAP_PRIVATE, file, off_t(begin - skip_));
        if (mapped == MAP_FAILED)
            fail_system("mapped", std::strerror(errno));
        map_ = static_cast<uint8_t *>(mapped);
        first_ = map_ + skip_;
        begin_ = begin;
    }
    ~MappedPiece() override { munmap(map_, length_); }

    // Whole pages alone. A hint: whether it works is all the same.
    void drop(size_t begin, size_t end) const override {
        size_t start = begin > begin_ ? begin - begin_ + skip_ : skip_;
        size_t stop = std::min(end > begin_ ? end - begin_ + skip_ : 0, length_);
        start = (start + page_size() - 1) / page_size() * page_size();
        stop = stop == length_ ? stop : stop / page_size() * page_size();
        if (start < stop)
            madvise(map_ + start, stop - start, MADV_DONTNEED);
    }

  private:
    size_t skip_, length_;
    uint8_t *map_;
};

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
    void read(size_t begin, size_t end, char *into) override {
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
    std::unique_ptr<Piece> piece(size_t begin, size_t end) override {
        return std::make_unique<MappedPiece>(file_, begin, end);
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

} // namespace anyprec
