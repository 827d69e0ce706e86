// Pairs of a row and one of the experts that it chose.
#pragma once
#include "../prelude/prelude.h"

// Expert of the pairs of a padding row: none.
constexpr u32 NO_EXPERT = 0xffffffffu;
