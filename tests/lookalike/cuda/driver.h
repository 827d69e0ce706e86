// The CUDA driver, loaded at the first call. This library links nothing of NVIDIA's and builds without a GPU.
#pragma once

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#define LOOKALIKE_API extern "C" __attribute__((visibility("default"))) lookalike::Code

namespace lookalike {

// A result of the HIP runtime, as a number.
typedef uint32_t Code;

// Codes of hipError_t that this library returns.
enum : Code {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    INSUFFICIENT_DRIVER = 35,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    NO_BINARY_FOR_GPU = 209,
    ECC_NOT_CORRECTABLE = 214,
    INVALID_KERNEL_FILE = 218,
    SHARED_OBJECT_INIT_FAILED = 303,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_TIME_OUT = 702,
    CONTEXT_IS_DESTROYED = 709,
    ASSERT = 710,
    LAUNCH_FAILURE = 719,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_MERGE = 902,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_UNJOINED = 904,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
    GRAPH_EXEC_UPDATE_FAILURE = 910,
    UNKNOWN = 999,
};

// HIP's code for CUDA's. The numbers are similar but not the same, so each is listed.
Code translated(CUresult result);
const char* code_name(Code code);

// Every driver function that is used. cuda.h maps the plain names to the versions that it declares.
#define LOOKALIKE_DRIVER(X)                                                                                                    \
    X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute)              \
    X(cuDeviceTotalMem) X(cuDeviceGetPCIBusId) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize)              \
    X(cuCtxGetStreamPriorityRange) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost)               \
    X(cuMemHostGetDevicePointer) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)         \
    X(cuMemcpyDtoDAsync) X(cuMemsetD8Async) X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamQuery)                  \
    X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuEventCreate)                 \
    X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuGraphDestroy)           \
    X(cuGraphGetNodes) X(cuGraphInstantiateWithFlags) X(cuGraphExecDestroy) X(cuGraphExecUpdate) X(cuGraphLaunch)              \
    X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuLaunchKernelEx)

struct Driver {
#define LOOKALIKE_FIELD(NAME) decltype(&::NAME) NAME##_;
    LOOKALIKE_DRIVER(LOOKALIKE_FIELD)
#undef LOOKALIKE_FIELD
};

// The driver; null, with the reason in `code`, where no driver has all of these functions.
const Driver* driver(Code* code);

// Makes the context of the calling thread's device current, for a call that needs a context.
Code enter(const Driver** found);

extern thread_local int current_device;

// Calls `body(driver)` with the thread's device current; returns the translated result.
template <class F> Code device_call(F body) {
    const Driver* found = nullptr;
    if (Code code = enter(&found)) return code;
    return translated(body(*found));
}

// As device_call, without a device.
template <class F> Code call(F body) {
    Code code = SUCCESS;
    const Driver* found = driver(&code);
    return found ? translated(body(*found)) : code;
}

} // namespace lookalike
