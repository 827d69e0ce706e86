// The LDS of the running block. Uninitialised memory reads as NaN; sanitizers refuse the gaps between arrays.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "block.h"

namespace lookalike {

class Lds {
public:
    void start_block(size_t dynamic_bytes);
    // The array of a declaration; the first lane to arrive makes it. Null when the space is used up.
    void* find(const void* place, size_t bytes);
    void* dynamic() { return memory; }
    void end_block();

private:
    struct Array {
        const void* place;
        size_t at;
    };
    static constexpr size_t BYTES = LDS_BYTES, ARRAYS_MAX = 64;
    // Gaps between arrays are inaccessible and do not count as used.
    static constexpr size_t GAP = 32;
    char* open(size_t bytes);

    Array arrays[ARRAYS_MAX];
    size_t count = 0, used = 0, end = 0;
    alignas(128) char memory[BYTES + (ARRAYS_MAX + 1) * (GAP + 16)];
};

} // namespace lookalike
