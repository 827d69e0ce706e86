// Exported functions: the library, its devices, its errors.
#include <stdio.h>

#include "api.h"
#include "block.h"

namespace lookalike {

thread_local u32 current_device = 0;
thread_local Code last_error = hipSuccess;

namespace {

constexpr int VERSION = 60443484;
constexpr int UNITS = 4;
constexpr const char* NAME = "ROCmForge CPU look-alike";

// Fills the structure of ROCm 6 and 7, 1472 bytes: only the fields that mean something here, by their offsets.
void fill_properties(char* p, int device) {
    auto put_i32 = [&](size_t at, i32 v) { memcpy(p + at, &v, 4); };
    auto put_u64 = [&](size_t at, u64 v) { memcpy(p + at, &v, 8); };
    memset(p, 0, 1472);
    snprintf(p, 256, "%s", NAME);
    put_u64(288, settings().memory);
    put_u64(296, LDS_BYTES);
    put_i32(308, WAVE);
    put_i32(320, THREADS_MAX);
    put_i32(324, THREADS_MAX);
    put_i32(328, 1);
    put_i32(332, 1);
    put_i32(388, UNITS);
    put_i32(348, 1000000 + device);
    snprintf(p + 1160, 256, "%s", settings().arch.c_str());
}

bool attribute(u32 number, int* value) {
    switch (number) {
    case 3: *value = 1; return true;                                // CanMapHostMemory
    case 8: *value = 1; return true;                                // ConcurrentKernels
    case 16: *value = 0; return true;                               // Integrated
    case 26: case 56: *value = (int)THREADS_MAX; return true;       // MaxBlockDimX, MaxThreadsPerBlock
    case 27: case 28: *value = 1; return true;                      // MaxBlockDimY, Z
    case 29: *value = 0x7fffffff; return true;                      // MaxGridDimX
    case 30: case 31: *value = 65535; return true;                  // MaxGridDimY, Z
    case 63: *value = UNITS; return true;                           // MultiprocessorCount
    case 74: case 76: *value = (int)LDS_BYTES; return true;         // MaxSharedMemoryPerBlock, PerMultiprocessor
    case 87: *value = (int)WAVE; return true;                       // WarpSize
    default: return false;
    }
}

bool is_device(int device) { return device >= 0 && (size_t)device < devices().size(); }

} // namespace
} // namespace lookalike

using namespace lookalike;

LOOKALIKE_API hipInit(u32 flags) {
    return call("hipInit", [&] { return flags == 0 ? hipSuccess : hipErrorInvalidValue; });
}

LOOKALIKE_API hipGetDeviceCount(int* count) {
    if (count) *count = 0;
    return call("hipGetDeviceCount", [&] {
        if (!count) return hipErrorInvalidValue;
        *count = (int)devices().size();
        return hipSuccess;
    });
}

LOOKALIKE_API hipRuntimeGetVersion(int* version) {
    return call("hipRuntimeGetVersion", [&] { return version ? (*version = VERSION, hipSuccess) : hipErrorInvalidValue; });
}

LOOKALIKE_API hipDriverGetVersion(int* version) {
    return call("hipDriverGetVersion", [&] { return version ? (*version = VERSION, hipSuccess) : hipErrorInvalidValue; });
}

LOOKALIKE_API hipSetDevice(int device) {
    return call("hipSetDevice", [&] {
        if (!is_device(device)) return hipErrorInvalidDevice;
        current_device = (u32)device;
        return hipSuccess;
    });
}

LOOKALIKE_API hipGetDevice(int* device) {
    return call("hipGetDevice", [&] { return device ? (*device = (int)current_device, hipSuccess) : hipErrorInvalidValue; });
}

LOOKALIKE_API hipGetDevicePropertiesR0600(void* properties, int device) {
    return call("hipGetDevicePropertiesR0600", [&] {
        if (!properties) return hipErrorInvalidValue;
        if (!is_device(device)) return hipErrorInvalidDevice;
        fill_properties((char*)properties, device);
        return hipSuccess;
    });
}

LOOKALIKE_API hipDeviceGetAttribute(int* value, u32 number, int device) {
    return call("hipDeviceGetAttribute", [&] {
        if (!value) return hipErrorInvalidValue;
        if (!is_device(device)) return hipErrorInvalidDevice;
        return attribute(number, value) ? hipSuccess : hipErrorInvalidValue;
    });
}

LOOKALIKE_API hipDeviceGetName(char* name, int length, int device) {
    return call("hipDeviceGetName", [&] {
        if (!name || length <= 0) return hipErrorInvalidValue;
        if (!is_device(device)) return hipErrorInvalidDevice;
        snprintf(name, (size_t)length, "%s", NAME);
        return hipSuccess;
    });
}

LOOKALIKE_API hipDeviceGetPCIBusId(char* id, int length, int device) {
    return call("hipDeviceGetPCIBusId", [&] {
        if (!id || length < 13) return hipErrorInvalidValue;
        if (!is_device(device)) return hipErrorInvalidDevice;
        snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
        return hipSuccess;
    });
}

LOOKALIKE_API hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return call("hipDeviceGetStreamPriorityRange", [&] {
        if (least) *least = 1;
        if (greatest) *greatest = -1;
        return hipSuccess;
    });
}

LOOKALIKE_API hipDeviceCanAccessPeer(int* can, int device, int peer) {
    return call("hipDeviceCanAccessPeer", [&] {
        if (!can) return hipErrorInvalidValue;
        if (!is_device(device) || !is_device(peer)) return hipErrorInvalidDevice;
        *can = 0;
        return hipSuccess;
    });
}

LOOKALIKE_API hipDeviceSynchronize() {
    return device_call("hipDeviceSynchronize", [](u32 device) -> Code {
        if (Code code = refuse_in_capture("hipDeviceSynchronize")) return code;
        return wait_on(device, [device] { return idle(device); });
    });
}

LOOKALIKE_API hipGetLastError() {
    Code code = last_error;
    last_error = hipSuccess;
    return code;
}

LOOKALIKE_API hipPeekAtLastError() { return last_error; }

extern "C" __attribute__((visibility("default"))) const char* hipGetErrorName(Code code) { return code_name(code); }
extern "C" __attribute__((visibility("default"))) const char* hipGetErrorString(Code code) { return code_name(code); }
