#include "settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <thread>

#include "prelude/prelude.h"

namespace lookalike {
namespace {

std::string text(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value ? value : otherwise;
}

// A wrong number ends the process: a test that meant another number must not pass.
uint64_t number(const char* name, uint64_t otherwise, uint64_t most) {
    const char* value = getenv(name);
    if (!value) return otherwise;
    char* end = nullptr;
    errno = 0;
    unsigned long long n = strtoull(value, &end, 10);
    if (errno != 0 || end == value || *end != 0 || n > most) {
        fprintf(stderr, "lookalike: %s=%s is not a number from 0 to %llu\n", name, value, (unsigned long long)most);
        abort();
    }
    return n;
}

Settings read() {
    uint32_t processors = std::thread::hardware_concurrency();
    Settings s;
    s.devices = (uint32_t)number("ROCMFORGE_LOOKALIKE_DEVICES", 1, 8);
    s.memory = number("ROCMFORGE_LOOKALIKE_MEMORY", 4ull << 30, 1ull << 46);
    s.seed = number("ROCMFORGE_LOOKALIKE_SEED", 1, ~0ull);
    s.threads = (uint32_t)number("ROCMFORGE_LOOKALIKE_THREADS", processors ? processors : 1, 256);
    if (s.threads == 0) s.threads = 1;
    s.arch = text("ROCMFORGE_LOOKALIKE_ARCH", WAVE == 32 ? "gfx1100" : "gfx90a:sramecc+:xnack-");
    s.faults = text("ROCMFORGE_LOOKALIKE_FAULTS", "");
    s.report = text("ROCMFORGE_LOOKALIKE_REPORT", "");
    return s;
}

} // namespace

const Settings& settings() {
    static const Settings& read_once = *new Settings(read());
    return read_once;
}

} // namespace lookalike
