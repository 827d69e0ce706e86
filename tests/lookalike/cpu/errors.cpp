#include "errors.h"

#include <stdarg.h>
#include <stdio.h>

namespace lookalike {

const char* code_name(Code code) {
    switch (code) {
#define LOOKALIKE_NAME(NAME, NUMBER)                                                                                           \
    case NUMBER: return "hip" #NAME;
        LOOKALIKE_CODES(LOOKALIKE_NAME)
#undef LOOKALIKE_NAME
    default: return "hipErrorUnknown";
    }
}

Code complain(Code code, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "lookalike: %s: %s\n", code_name(code), text);
    return code;
}

} // namespace lookalike
