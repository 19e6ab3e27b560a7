// A strict JSON reader for text that may be hostile. In: bytes. Out: a Json (all values, flat) or a JsonError. Called
// by reader.cpp for the header of a model file and for the GRAPH inside it. Strict: RFC 8259, valid UTF-8, no duplicate
// keys, finite numbers. Never recursive. Memory is bounded by 16 bytes per value, at most MAX_VALUES of them, plus the
// text of strings with escapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace anyprec {

// The message says what is wrong and at which byte.
struct JsonError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Json {
  public:
    enum class Type : uint8_t { null, boolean, integer, real, string, array, object };

  private:
    struct Node {
        Type type = Type::null;
        bool owned = false; // string: it lies in unescaped_, not in text_
        uint32_t size = 0;  // string: bytes; array, object: elements, members (a key and a value each)
        union {
            int64_t integer = 0; // boolean too
            double real;
            uint64_t where; // string: its first byte
            uint64_t after; // array, object: the node after its last one
        };
    };
    friend class JsonParser;

  public:
    static constexpr size_t MAX_DEPTH = 64;
    // A header of 100 MB cannot describe more than about a million tensors, 11 values each.
    static constexpr size_t MAX_VALUES = size_t(1) << 24;

    // One value inside the text: cheap to copy, valid as long as its Json lives and is not moved.
    class Value {
      public:
        Value(const Json *json, size_t at) : json_(json), at_(at) {}
        bool is(Type type) const { return node().type == type; }
        bool boolean() const { return node().integer != 0; }
        int64_t integer() const { return node().integer; }
        double number() const { return is(Type::integer) ? double(node().integer) : node().real; }
        std::string_view string() const {
            return (node().owned ? std::string_view(json_->unescaped_) : json_->text_)
                .substr(node().where, node().size);
        }
        size_t size() const { return node().size; } // elements of an array, members of an object

        // Walks an array, or the members of an object: there key() belongs to the value.
        class Iterator {
          public:
            Iterator(const Json *json, size_t at, bool keyed) : json_(json), at_(at), keyed_(keyed) {}
            bool operator!=(const Iterator &other) const { return at_ != other.at_; }
            Iterator &operator++() {
                at_ = json_->next(at_ + (keyed_ ? 1 : 0));
                return *this;
            }
            Value operator*() const { return Value(json_, at_ + (keyed_ ? 1 : 0)); }
            std::string_view key() const { return Value(json_, at_).string(); }

          private:
            const Json *json_;
            size_t at_;
            bool keyed_;
        };
        Iterator begin() const { return Iterator(json_, at_ + 1, is(Type::object)); }
        Iterator end() const { return Iterator(json_, json_->next(at_), is(Type::object)); }

      private:
        const Node &node() const { return json_->nodes_[at_]; }
        const Json *json_;
        size_t at_;
    };

    // `text` must outlive this: strings without escapes are not copied.
    explicit Json(std::string_view text);
    Json(const Json &) = delete;
    Json &operator=(const Json &) = delete;
    Value root() const { return Value(this, 0); }

  private:
    size_t next(size_t at) const {
        const Node &node = nodes_[at];
        return node.type == Type::array || node.type == Type::object ? size_t(node.after) : at + 1;
    }

    std::string_view text_;
    std::string unescaped_;
    std::vector<Node> nodes_;
};

} // namespace anyprec
