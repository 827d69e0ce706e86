// The runtime's result codes that this library returns, by their numbers.
#pragma once

#include <stdint.h>

namespace lookalike {

typedef uint32_t Code;

#define LOOKALIKE_CODES(CODE)                                                                                                  \
    CODE(Success, 0)                                                                                                           \
    CODE(ErrorInvalidValue, 1)                                                                                                 \
    CODE(ErrorOutOfMemory, 2)                                                                                                  \
    CODE(ErrorInvalidConfiguration, 9)                                                                                         \
    CODE(ErrorInvalidDevicePointer, 17)                                                                                        \
    CODE(ErrorInvalidMemcpyDirection, 21)                                                                                      \
    CODE(ErrorNoDevice, 100)                                                                                                   \
    CODE(ErrorInvalidDevice, 101)                                                                                              \
    CODE(ErrorInvalidImage, 200)                                                                                               \
    CODE(ErrorNoBinaryForGpu, 209)                                                                                             \
    CODE(ErrorInvalidHandle, 400)                                                                                              \
    CODE(ErrorNotFound, 500)                                                                                                   \
    CODE(ErrorNotReady, 600)                                                                                                   \
    CODE(ErrorIllegalAddress, 700)                                                                                             \
    CODE(ErrorHostMemoryAlreadyRegistered, 712)                                                                                \
    CODE(ErrorHostMemoryNotRegistered, 713)                                                                                    \
    CODE(ErrorLaunchFailure, 719)                                                                                              \
    CODE(ErrorNotSupported, 801)                                                                                               \
    CODE(ErrorStreamCaptureUnsupported, 900)                                                                                   \
    CODE(ErrorStreamCaptureInvalidated, 901)                                                                                   \
    CODE(ErrorStreamCaptureMerge, 902)                                                                                         \
    CODE(ErrorStreamCaptureUnmatched, 903)                                                                                     \
    CODE(ErrorStreamCaptureUnjoined, 904)                                                                                      \
    CODE(ErrorCapturedEvent, 907)                                                                                              \
    CODE(ErrorGraphExecUpdateFailure, 910)                                                                                     \
    CODE(ErrorUnknown, 999)

#define LOOKALIKE_CONSTANT(NAME, NUMBER) constexpr Code hip##NAME = NUMBER;
LOOKALIKE_CODES(LOOKALIKE_CONSTANT)
#undef LOOKALIKE_CONSTANT

// "hipErrorUnknown" for a number without a name, as in the real runtime.
const char* code_name(Code code);

// Logs the caller's mistake to stderr and returns the code.
Code complain(Code code, const char* format, ...) __attribute__((format(printf, 2, 3)));

} // namespace lookalike
