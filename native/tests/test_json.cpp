// Tests of json: what it reads, what it refuses, and how deep and long.
#include <string>

#include "format/json.h"
#include "small_file.h"

namespace anyprec::tests {

void test_json() {
    auto good = [](const std::string &text) {
        try {
            Json json(text);
            return true;
        } catch (const JsonError &) {
            return false;
        }
    };
    for (const char *text : {"{}", "[]", " [ 1 , 2 ] ", "0", "-0", "1.5e3", "\"\"", "true", "null", "{\"a\":{\"a\":1}}",
                             "\"\\ud83d\\ude00\"", "\"\xf0\x9f\x98\x80\"", "1e-400", "\"\\u0000\"", "[[],{}]"})
        expect(good(text), std::string("good JSON: ") + text);
    for (const char *text : {"",
                             " ",
                             "{",
                             "[",
                             "[1",
                             "[1,",
                             "[1,]",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{a:1}",
                             "01",
                             "1.",
                             ".5",
                             "1e",
                             "+1",
                             "-",
                             "1e999",
                             "NaN",
                             "Infinity",
                             "nul",
                             "truee",
                             "\"",
                             "\"\\\"",
                             "\"\\x\"",
                             "\"\\u12\"",
                             "\"\\ud800\"",
                             "\"\\udc00\"",
                             "\"\\ud800\\u0041\"",
                             "\"\n\"",
                             "\"\xff\"",
                             "\"\xc0\x80\"",
                             "\"\xe0\x80\x80\"",
                             "\"\\udc00\\udc00\"",
                             "\"\xed\xa0\x80\"",
                             "\"\xf4\x90\x80\x80\"",
                             "\"\xe2\x82\"",
                             "{\"a\":1,\"a\":2}",
                             "{\"a\":1,\"\\u0061\":2}",
                             "1 2",
                             "[1}",
                             "{1:2}",
                             "'a'",
                             "/**/1",
                             "\xef\xbb\xbf{}"})
        expect(!good(text), std::string("bad JSON: ") + text);
    expect(good(std::string(64, '[') + std::string(64, ']')), "64 levels");
    expect(!good(std::string(65, '[') + std::string(65, ']')), "65 levels");
    expect(!good(std::string(1000000, '[')), "a million levels");
    expect(!good(std::string("[\0]", 3)), "a NUL");

    std::string text = R"({"a":[1,-25,2.5,true,"x\n\u00e9\ud83d\ude00y"],"b":{"c":null},"big":9223372036854775808})";
    Json json(text);
    auto member = json.root().begin();
    expect(member.key() == "a" && (*member).size() == 5, "first member");
    auto item = (*member).begin();
    expect((*item).integer() == 1, "1");
    ++item;
    expect((*item).integer() == -25, "-25");
    ++item;
    expect((*item).is(Json::Type::real) && (*item).number() == 2.5, "2.5");
    ++item;
    expect((*item).boolean(), "true");
    ++item;
    expect((*item).string() == "x\n\xc3\xa9\xf0\x9f\x98\x80y", "escapes");
    ++item;
    expect(!(item != (*member).end()), "end of the array");
    ++member;
    expect(member.key() == "b" && (*(*member).begin()).is(Json::Type::null), "nested object");
    ++member;
    expect((*member).is(Json::Type::real) && (*member).number() == 9223372036854775808.0, "too large for 64 bit");
}

} // namespace anyprec::tests
