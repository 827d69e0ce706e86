#include "faults.h"

#include <stdio.h>
#include <stdlib.h>

#include <mutex>
#include <sstream>
#include <vector>

#include "settings.h"

namespace lookalike {
namespace {

struct Rule {
    std::string name;
    uint64_t from, seen = 0;
    bool and_later;
    Fault fault;

    bool names(const std::string& what) const {
        return name == what || (name == "kernel.*" && what.compare(0, 7, "kernel.") == 0);
    }
};

std::mutex lock;

[[noreturn]] void refuse(const std::string& rule) {
    fprintf(stderr, "lookalike: %s is not a rule; write hipMalloc:3=2, hipMalloc:3+=2, kernel.*:1=hang or hipFree:1=lost\n",
            rule.c_str());
    abort();
}

Rule parse(const std::string& text) {
    size_t colon = text.find(':'), equals = text.find('=');
    if (colon == std::string::npos || equals == std::string::npos || equals < colon + 2) refuse(text);
    Rule rule;
    rule.name = text.substr(0, colon);
    char* end = nullptr;
    rule.from = strtoull(text.c_str() + colon + 1, &end, 10);
    rule.and_later = *end == '+';
    if (rule.and_later) end++;
    if (rule.from == 0 || *end != '=') refuse(text);
    std::string action = text.substr(equals + 1);
    if (action == "hang") rule.fault = {Fault::HANG, 0};
    else if (action == "lost") rule.fault = {Fault::LOST, hipErrorLaunchFailure};
    else {
        unsigned long code = strtoul(action.c_str(), &end, 10);
        if (action.empty() || *end != 0 || code == 0) refuse(text);
        rule.fault = {Fault::RETURN, (Code)code};
    }
    return rule;
}

std::vector<Rule> parse_all(const std::string& script) {
    std::vector<Rule> rules;
    std::istringstream words(script);
    for (std::string word; words >> word;) rules.push_back(parse(word));
    return rules;
}

std::vector<Rule>& rules() {
    static std::vector<Rule>& all = *new std::vector<Rule>(parse_all(settings().faults));
    return all;
}

} // namespace

void set_faults(const std::string& script) {
    std::lock_guard<std::mutex> guard(lock);
    rules() = parse_all(script);
}

Fault next_fault(const std::string& name) {
    std::lock_guard<std::mutex> guard(lock);
    Fault found;
    for (Rule& rule : rules()) {
        if (!rule.names(name)) continue;
        rule.seen++;
        if (rule.seen == rule.from || (rule.and_later && rule.seen > rule.from)) found = rule.fault;
    }
    return found;
}

} // namespace lookalike
