#include "memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <map>

#include "settings.h"

namespace lookalike {
namespace {

constexpr size_t PAGE = 4096, ALIGNMENT = 256;
// Ranges from this size on are mapped: they share the pattern's pages until written.
constexpr size_t MAPPED_FROM = 4 << 20;
constexpr size_t PATTERN_BYTES = 16 << 20;

std::map<uintptr_t, Range>& ranges() {
    static auto& all = *new std::map<uintptr_t, Range>;
    return all;
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// A file of one bits only: NaN in every float format.
int pattern_file() {
    static int file = [] {
        int made = memfd_create("lookalike-nan", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, PATTERN_BYTES) != 0) abort();
        void* at = mmap(nullptr, PATTERN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
        if (at == MAP_FAILED) abort();
        memset(at, 0xff, PATTERN_BYTES);
        munmap(at, PATTERN_BYTES);
        return made;
    }();
    return file;
}

// Private pages over the pattern, and an inaccessible page at the end.
void* map_pattern(size_t bytes) {
    size_t whole = rounded(bytes, PAGE);
    char* at = (char*)mmap(nullptr, whole + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    for (size_t done = 0; done < whole; done += PATTERN_BYTES) {
        size_t part = whole - done < PATTERN_BYTES ? whole - done : PATTERN_BYTES;
        void* got = mmap(at + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, pattern_file(), 0);
        if (got == MAP_FAILED) {
            munmap(at, whole + PAGE);
            return nullptr;
        }
    }
    return at;
}

void* make(size_t bytes) {
    if (bytes >= MAPPED_FROM) return map_pattern(bytes);
    void* at = aligned_alloc(ALIGNMENT, rounded(bytes, ALIGNMENT));
    if (at) memset(at, 0xff, bytes);
    return at;
}

void give_back(void* at, size_t bytes) {
    if (bytes >= MAPPED_FROM) {
        munmap(at, rounded(bytes, PAGE) + PAGE);
        return;
    }
#if __has_feature(address_sanitizer)
    // The sanitizer keeps the range inaccessible for a while.
    free(at);
#else
    // Kept for a while here: a late use meets NaN and not another allocation's values.
    constexpr size_t GRAVEYARD_BYTES = 64 << 20;
    struct Grave {
        void* place;
        size_t bytes;
    };
    static std::deque<Grave>& graves = *new std::deque<Grave>;
    static size_t buried = 0;
    memset(at, 0xff, bytes);
    graves.push_back({at, bytes});
    for (buried += bytes; buried > GRAVEYARD_BYTES; graves.pop_front()) {
        buried -= graves.front().bytes;
        free(graves.front().place);
    }
#endif
}

void add(void* at, size_t bytes, Kind kind, uint32_t device) {
    ranges()[(uintptr_t)at] = {(uintptr_t)at, bytes, kind, device};
}

} // namespace

uint64_t used_bytes(uint32_t device) {
    uint64_t sum = 0;
    for (auto& [start, range] : ranges())
        if (range.kind == Kind::DEVICE && range.device == device) sum += rounded(range.bytes, ALIGNMENT);
    return sum;
}

Code allocate(uint32_t device, size_t bytes, void** place) {
    *place = nullptr;
    if (bytes == 0) return hipSuccess;
    uint64_t free_bytes = settings().memory - used_bytes(device);
    if (bytes > free_bytes || rounded(bytes, ALIGNMENT) > free_bytes) return hipErrorOutOfMemory;
    void* at = make(bytes);
    if (!at) return hipErrorOutOfMemory;
    add(at, bytes, Kind::DEVICE, device);
    *place = at;
    return hipSuccess;
}

Code allocate_pinned(uint32_t device, size_t bytes, void** place) {
    *place = bytes == 0 ? nullptr : make(bytes);
    if (!*place) return bytes == 0 ? hipSuccess : hipErrorOutOfMemory;
    add(*place, bytes, Kind::PINNED, device);
    return hipSuccess;
}

Code release(void* place, Kind kind) {
    if (!place) return hipSuccess;
    auto found = ranges().find((uintptr_t)place);
    if (found == ranges().end() || found->second.kind != kind)
        return complain(hipErrorInvalidValue, "%p was not allocated here, or is free already", place);
    size_t bytes = found->second.bytes;
    ranges().erase(found);
    give_back(place, bytes);
    return hipSuccess;
}

Code register_host(uint32_t device, void* place, size_t bytes) {
    if (!place || bytes == 0) return hipErrorInvalidValue;
    // A driver pins the pages: it reads them in, and fails where a file was truncated.
    uintptr_t first = (uintptr_t)place / PAGE * PAGE;
    int brought = madvise((void*)first, rounded((uintptr_t)place + bytes - first, PAGE), MADV_POPULATE_READ);
    if (brought != 0 && errno != EINVAL) return hipErrorInvalidValue;
    const Range* before = find_range(place);
    auto next = ranges().lower_bound((uintptr_t)place);
    if (before || (next != ranges().end() && next->first < (uintptr_t)place + bytes))
        return hipErrorHostMemoryAlreadyRegistered;
    add(place, bytes, Kind::REGISTERED, device);
    return hipSuccess;
}

Code unregister_host(void* place) {
    auto found = ranges().find((uintptr_t)place);
    if (found == ranges().end() || found->second.kind != Kind::REGISTERED) return hipErrorHostMemoryNotRegistered;
    ranges().erase(found);
    return hipSuccess;
}

const Range* find_range(const void* address) {
    auto next = ranges().upper_bound((uintptr_t)address);
    if (next == ranges().begin()) return nullptr;
    const Range& range = (--next)->second;
    return (uintptr_t)address - range.start < range.bytes ? &range : nullptr;
}

bool reachable(const void* address, size_t bytes) {
    const Range* range = find_range(address);
    return range && bytes <= range->bytes - ((uintptr_t)address - range->start);
}

} // namespace lookalike
