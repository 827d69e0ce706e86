#include "lds.h"

#include <string.h>

#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

namespace lookalike {

void Lds::start_block(size_t dynamic_bytes) {
    count = used = end = 0;
    ASAN_POISON_MEMORY_REGION(memory, sizeof memory);
    open(dynamic_bytes);
}

char* Lds::open(size_t bytes) {
    char* at = memory + end;
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
    // All ones is a NaN in every float format.
    memset(at, 0xff, bytes);
    size_t rounded = (bytes + 15) / 16 * 16;
    used += rounded;
    end += rounded + GAP;
    return at;
}

void* Lds::find(const void* place, size_t bytes) {
    for (size_t i = 0; i < count; i++)
        if (arrays[i].place == place) return memory + arrays[i].at;
    if (count == ARRAYS_MAX || used + bytes > BYTES) return nullptr;
    arrays[count++] = {place, end};
    return open(bytes);
}

void Lds::end_block() { ASAN_UNPOISON_MEMORY_REGION(memory, sizeof memory); }

} // namespace lookalike
