// See json.h.
#include "format/json.h"

#include <algorithm>
#include <charconv>
#include <locale>
#include <sstream>
#include <system_error>

namespace anyprec {

class JsonParser {
  public:
    JsonParser(std::string_view text, Json &json) : text_(text), json_(json) {}

    void parse() {
        if (text_.size() > UINT32_MAX)
            fail("a text of more than 4 GB");
        skip_space();
        parse_value();
        while (!open_.empty()) {
            skip_space();
            continue_container();
        }
        skip_space();
        if (at_ != text_.size())
            fail("more text after the end");
    }

  private:
    using Type = Json::Type;
    using Node = Json::Node;

    [[noreturn]] void fail(const std::string &what) const { throw JsonError(what + " at byte " + std::to_string(at_)); }

    // 0 at the end of the text: a NUL byte is nowhere allowed, so both end in the same error.
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void skip_space() {
        while (at_ < text_.size() &&
               (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
            at_++;
    }

    Node &add(Type type) {
        if (json_.nodes_.size() >= Json::MAX_VALUES)
            fail("more than " + std::to_string(Json::MAX_VALUES) + " values");
        json_.nodes_.emplace_back();
        json_.nodes_.back().type = type;
        return json_.nodes_.back();
    }

    void parse_value() {
        switch (peek()) {
        case '{':
            open(Type::object);
            break;
        case '[':
            open(Type::array);
            break;
        case '"':
            parse_string();
            break;
        case 't':
            expect_word("true");
            add(Type::boolean).integer = 1;
            break;
        case 'f':
            expect_word("false");
            add(Type::boolean).integer = 0;
            break;
        case 'n':
            expect_word("null");
            add(Type::null);
            break;
        default:
            parse_number();
        }
    }

    void expect_word(std::string_view word) {
        if (text_.substr(at_, word.size()) != word)
            fail("not a value");
        at_ += word.size();
    }

    // Open containers are on an explicit stack: hostile text must not cause deep recursion.
    void open(Type type) {
        if (open_.size() >= Json::MAX_DEPTH)
            fail("more than " + std::to_string(Json::MAX_DEPTH) + " levels");
        open_.push_back(json_.nodes_.size());
        add(type);
        at_++;
    }

    // Inside the innermost open container, before its first value or after one.
    void continue_container() {
        Node &container = json_.nodes_[open_.back()];
        bool keyed = container.type == Type::object;
        if (peek() == (keyed ? '}' : ']')) {
            close();
            return;
        }
        if (container.size > 0) {
            if (peek() != ',')
                fail(keyed ? "expected ',' or '}'" : "expected ',' or ']'");
            at_++;
            skip_space();
        }
        container.size++;
        if (keyed) {
            if (peek() != '"')
                fail("expected a key");
            parse_string();
            skip_space();
            if (peek() != ':')
                fail("expected ':'");
            at_++;
            skip_space();
        }
        parse_value();
    }

    void close() {
        at_++;
        size_t at = open_.back();
        open_.pop_back();
        json_.nodes_[at].after = json_.nodes_.size();
        if (json_.nodes_[at].type == Type::object)
            check_keys(Json::Value(&json_, at));
    }

    // Sorting, not hashing: no choice of keys makes it slow.
    void check_keys(Json::Value object) {
        keys_.clear();
        for (auto member = object.begin(); member != object.end(); ++member)
            keys_.push_back(member.key());
        std::sort(keys_.begin(), keys_.end());
        auto twice = std::adjacent_find(keys_.begin(), keys_.end());
        if (twice != keys_.end())
            fail("the key \"" + printable(*twice) + "\" stands twice in the object that ends");
    }

    static std::string printable(std::string_view text) {
        std::string shown(text.substr(0, 60));
        for (char &c : shown)
            if (c < 0x20 || c == 0x7f)
                c = '?';
        return shown;
    }

    void parse_string() {
        at_++;
        size_t begin = at_;
        while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\')
            step_character();
        Node string;
        string.type = Type::string;
        if (peek() == '"') {
            string.where = begin;
            string.size = uint32_t(at_ - begin);
        } else {
            string.owned = true;
            string.where = json_.unescaped_.size();
            json_.unescaped_.append(text_, begin, at_ - begin);
            unescape();
            string.size = uint32_t(json_.unescaped_.size() - string.where);
        }
        at_++; // the closing quote
        add(Type::string) = string;
    }

    // From the first backslash to the closing quote.
    void unescape() {
        std::string &out = json_.unescaped_;
        while (peek() != '"') {
            if (at_ >= text_.size())
                fail("a string without end");
            size_t begin = at_;
            if (text_[at_] != '\\') {
                step_character();
                out.append(text_, begin, at_ - begin);
                continue;
            }
            at_++;
            static const std::string_view names = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
            char c = peek();
            if (c == 'u') {
                append_utf8(parse_code_point());
            } else if (size_t i = names.find(c); i != names.npos) {
                out += meanings[i];
                at_++;
            } else {
                fail("an unknown escape");
            }
        }
    }

    uint32_t parse_hex4() {
        uint32_t code = 0;
        at_++; // the u
        for (int i = 0; i < 4; i++, at_++) {
            char c = peek();
            if (c >= '0' && c <= '9')
                code = code * 16 + uint32_t(c - '0');
            else if ((c | 32) >= 'a' && (c | 32) <= 'f')
                code = code * 16 + uint32_t((c | 32) - 'a' + 10);
            else
                fail("expected four hex digits");
        }
        return code;
    }

    // At the u of an escape with four hex digits; characters past U+FFFF come as a pair of them.
    uint32_t parse_code_point() {
        uint32_t high = parse_hex4();
        if (high < 0xd800 || high > 0xdfff)
            return high;
        if (high > 0xdbff || text_.substr(at_, 2) != "\\u")
            fail("half a surrogate pair");
        at_++;
        uint32_t low = parse_hex4();
        if (low < 0xdc00 || low > 0xdfff)
            fail("half a surrogate pair");
        return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
    }

    void append_utf8(uint32_t code) {
        std::string &out = json_.unescaped_;
        if (code < 0x80) {
            out += char(code);
        } else if (code < 0x800) {
            out += char(0xc0 | (code >> 6));
            out += char(0x80 | (code & 63));
        } else if (code < 0x10000) {
            out += char(0xe0 | (code >> 12));
            out += char(0x80 | ((code >> 6) & 63));
            out += char(0x80 | (code & 63));
        } else {
            out += char(0xf0 | (code >> 18));
            out += char(0x80 | ((code >> 12) & 63));
            out += char(0x80 | ((code >> 6) & 63));
            out += char(0x80 | (code & 63));
        }
    }

    // One character of a string: refuses control characters, and UTF-8 that is cut, overlong, a surrogate or past
    // U+10FFFF. The bounds of the second byte say all of that (RFC 3629, section 4).
    void step_character() {
        auto byte = [this](size_t i) { return i < text_.size() ? uint8_t(text_[i]) : uint8_t(0); };
        uint8_t first = byte(at_);
        if (first < 0x20)
            fail("a control character in a string");
        size_t more = 0;
        uint8_t low = 0x80, high = 0xbf;
        if (first < 0x80) {
            more = 0;
        } else if (first >= 0xc2 && first <= 0xdf) {
            more = 1;
        } else if (first >= 0xe0 && first <= 0xef) {
            more = 2;
            low = first == 0xe0 ? 0xa0 : 0x80;
            high = first == 0xed ? 0x9f : 0xbf;
        } else if (first >= 0xf0 && first <= 0xf4) {
            more = 3;
            low = first == 0xf0 ? 0x90 : 0x80;
            high = first == 0xf4 ? 0x8f : 0xbf;
        } else {
            fail("bytes that are not UTF-8");
        }
        for (size_t i = 1; i <= more; i++, low = 0x80, high = 0xbf)
            if (byte(at_ + i) < low || byte(at_ + i) > high)
                fail("bytes that are not UTF-8");
        at_ += 1 + more;
    }

    size_t skip_digits() {
        size_t begin = at_;
        while (peek() >= '0' && peek() <= '9')
            at_++;
        return at_ - begin;
    }

    void parse_number() {
        size_t begin = at_;
        if (peek() == '-')
            at_++;
        size_t digits_at = at_, digits = skip_digits();
        if (digits == 0)
            fail("not a value");
        if (digits > 1 && text_[digits_at] == '0')
            fail("a number with leading zeros");
        bool whole = true;
        if (peek() == '.') {
            whole = false;
            at_++;
            if (skip_digits() == 0)
                fail("expected digits after the point");
        }
        if (peek() == 'e' || peek() == 'E') {
            whole = false;
            at_++;
            if (peek() == '+' || peek() == '-')
                at_++;
            if (skip_digits() == 0)
                fail("expected digits of an exponent");
        }
        std::string_view number = text_.substr(begin, at_ - begin);
        if (whole && digits <= 18) { // below 10^18 nothing overflows
            int64_t value = 0;
            for (char c : number.substr(digits_at - begin))
                value = value * 10 + (c - '0');
            add(Type::integer).integer = digits_at > begin ? -value : value;
        } else if (whole && digits > 24) { // 2^64 has 20; the Python reader has the same limit
            fail("a whole number of more than 24 digits");
        } else {
            add(Type::real).real = to_double(number);
        }
    }

    // strtod would read "0.5" as 0 where the user's locale has a comma. from_chars is missing for doubles in some
    // standard libraries of C++17, and does not tell too small (which is 0) from too large: then a stream, 20 times
    // slower.
    double to_double(std::string_view number) const {
        if (number.size() > 400) // longer than any double needs, exponent and all
            fail("a number of more than 400 characters");
#if defined(__cpp_lib_to_chars)
        double quick = 0;
        if (std::from_chars(number.data(), number.data() + number.size(), quick).ec == std::errc())
            return quick;
#endif
        std::istringstream stream{std::string(number)};
        stream.imbue(std::locale::classic());
        double value = 0;
        if (!(stream >> value))
            fail("a number out of range");
        return value;
    }

    std::string_view text_;
    Json &json_;
    size_t at_ = 0;
    std::vector<size_t> open_;
    std::vector<std::string_view> keys_;
};

Json::Json(std::string_view text) : text_(text) {
    JsonParser(text, *this).parse();
}

} // namespace anyprec
