// Members of the JSON objects in GRAPH (FORMAT.md, section 2), taken by name and checked against their limits; and
// names as numbers. In: a JSON value. Out: its content, or a ModelError (BadGraph) that names the object and the
// member. Used by GraphParser.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "anyprec/model_error.h"
#include "format/format_limits.h"
#include "format/json.h"

namespace anyprec {

[[noreturn]] inline void bad_graph(const std::string &what) {
    throw ModelError(ModelErrorKind::BadGraph, what);
}

// Names to numbers, by binary search: no choice of names makes it slow.
class NameIndex {
  public:
    void add(std::string_view name, int number) { names_.emplace_back(name, number); }

    // False if a name occurs twice.
    bool sort() {
        std::sort(names_.begin(), names_.end());
        return std::adjacent_find(names_.begin(), names_.end(),
                                  [](const auto &a, const auto &b) { return a.first == b.first; }) == names_.end();
    }

    int find(std::string_view name) const { // -1 if there is none
        auto found = std::lower_bound(names_.begin(), names_.end(), name,
                                      [](const auto &entry, std::string_view wanted) { return entry.first < wanted; });
        return found != names_.end() && found->first == name ? found->second : -1;
    }

  private:
    std::vector<std::pair<std::string_view, int>> names_;
};

// One JSON object, and where it is, for messages. Members are taken by name; done() refuses the rest: an unknown
// attribute may change what the op computes.
class Fields {
  public:
    Fields(Json::Value object, std::string where) : where_(std::move(where)) {
        if (!object.is(Json::Type::object))
            bad_graph(where_ + " is not a JSON object");
        if (object.size() > 64)
            bad_graph(where_ + " has " + std::to_string(object.size()) + " members");
        for (auto member = object.begin(); member != object.end(); ++member)
            members_.push_back({member.key(), *member, false});
    }

    const std::string &where() const { return where_; }
    [[noreturn]] void fail(const char *key, const std::string &allowed) const {
        bad_graph(where_ + ": '" + key + "' must be " + allowed);
    }

    Json::Value take(const char *key) {
        for (Member &member : members_)
            if (member.key == key) {
                member.taken = true;
                return member.value;
            }
        bad_graph(where_ + " has no '" + key + "'");
    }

    // A member that may be left out.
    bool has(const char *key) const {
        return std::any_of(members_.begin(), members_.end(), [&](const Member &member) { return member.key == key; });
    }

    bool flag(const char *key) {
        Json::Value value = take(key);
        if (!value.is(Json::Type::boolean))
            fail(key, "true or false");
        return value.boolean();
    }

    std::string_view text(const char *key) {
        Json::Value value = take(key);
        if (!value.is(Json::Type::string))
            fail(key, "a string");
        return value.string();
    }

    // 1 to 200 printable ASCII characters.
    std::string_view name(const char *key) { return checked_name(take(key), where_ + ": '" + key + "'"); }

    static std::string_view checked_name(Json::Value value, const std::string &where) {
        if (!value.is(Json::Type::string))
            bad_graph(where + " is not a string");
        return checked_name(value.string(), where);
    }

    static std::string_view checked_name(std::string_view name, const std::string &where) {
        bool printable = std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
        if (name.empty() || name.size() > MAX_NAME || !printable)
            bad_graph(where + " is the name " + quote(name) + "; 1 to 200 printable ASCII characters are allowed");
        return name;
    }

    int64_t integer(const char *key, int64_t least, int64_t below) {
        Json::Value value = take(key);
        if (!value.is(Json::Type::integer) || value.integer() < least || value.integer() >= below)
            fail(key, "a whole number from " + std::to_string(least) + ", below " + std::to_string(below));
        return value.integer();
    }

    template <size_t N> void integers(const char *key, int64_t least, int (&into)[N]) {
        Json::Value value = take(key);
        bool good = value.is(Json::Type::array) && value.size() == N;
        size_t i = 0;
        if (good)
            for (Json::Value item : value) {
                good =
                    good && item.is(Json::Type::integer) && item.integer() >= least && item.integer() < DIMENSION_LIMIT;
                into[i++] = good ? int(item.integer()) : 0;
            }
        if (!good)
            fail(key, std::to_string(N) + " whole numbers from " + std::to_string(least) + ", below 2^31");
    }

    void done() const {
        for (const Member &member : members_)
            if (!member.taken)
                bad_graph(where_ + " has " + quote(member.key) + ", which is unknown");
    }

  private:
    struct Member {
        std::string_view key;
        Json::Value value;
        bool taken;
    };
    std::string where_;
    std::vector<Member> members_;
};

} // namespace anyprec
