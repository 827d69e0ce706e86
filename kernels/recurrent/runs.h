// The rows of each of a step's sequences, and the arrays of its recurrent states.
//
// runs holds RUN_WORDS words for each sequence: its first row, the number of its rows, 0, 0; address of its array before the
// step, 0 for zeros; address of its array after the step, 0 for a padding row, whose results are 0. The rows of a sequence are
// adjacent; there may be none. Arrays are f32 at multiples of 16 bytes, and so is each operation's state in them.
#pragma once
#include "../prelude/prelude.h"

constexpr u32 RUN_WORDS = 8;

struct Run {
    u32 first, rows;
    u64 before, after;

    DEV Run(const u32* runs, u32 sequence) {
        const u32x4 at = load16(runs + (u64)sequence * RUN_WORDS), arrays = load16(runs + (u64)sequence * RUN_WORDS + 4);
        first = at.x;
        rows = at.y;
        before = (u64)arrays.y << 32 | arrays.x;
        after = (u64)arrays.w << 32 | arrays.z;
    }

    // A state, `offset` bytes from the array's start. Not of arrays that are 0.
    DEV const f32* old_state(u64 offset) const { return global_address<const f32>(before + offset); }
    DEV f32* new_state(u64 offset) const { return global_address<f32>(after + offset); }
};
