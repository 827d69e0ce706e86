// Finds the driver, keeps a context for each device, and translates CUDA's results to HIP's.
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

#include <mutex>
#include <vector>

namespace lookalike {

thread_local int current_device = 0;

namespace {

// The names as cuda.h maps them: cuMemAlloc is cuMemAlloc_v2.
#define LOOKALIKE_TEXT_(NAME) #NAME
#define LOOKALIKE_TEXT(NAME) LOOKALIKE_TEXT_(NAME)

struct Loaded {
    Driver driver{};
    Code code = SUCCESS;

    Loaded() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "lookalike: %s\n", dlerror());
            code = NO_DEVICE;
            return;
        }
#define LOOKALIKE_FIND(NAME)                                                                                                   \
    driver.NAME##_ = (decltype(driver.NAME##_))dlsym(library, LOOKALIKE_TEXT(NAME));                                           \
    if (!driver.NAME##_) {                                                                                                     \
        fprintf(stderr, "lookalike: libcuda.so.1 has no %s\n", LOOKALIKE_TEXT(NAME));                                          \
        code = INSUFFICIENT_DRIVER;                                                                                            \
        return;                                                                                                                \
    }
        LOOKALIKE_DRIVER(LOOKALIKE_FIND)
#undef LOOKALIKE_FIND
        code = translated(driver.cuInit_(0));
    }
};

// Contexts by device, made when first needed and kept: other threads may use them.
struct Contexts {
    std::mutex lock;
    std::vector<CUcontext> all;
};

Contexts& contexts() {
    static auto& all = *new Contexts;
    return all;
}

thread_local int entered_device = -1;

} // namespace

const Driver* driver(Code* code) {
    static const Loaded& loaded = *new Loaded;
    *code = loaded.code;
    return loaded.code == SUCCESS ? &loaded.driver : nullptr;
}

Code enter(const Driver** found) {
    Code code = SUCCESS;
    *found = driver(&code);
    if (!*found || entered_device == current_device) return code;
    Contexts& all = contexts();
    std::lock_guard guard(all.lock);
    if (all.all.size() <= (size_t)current_device) all.all.resize((size_t)current_device + 1);
    CUcontext& context = all.all[(size_t)current_device];
    if (!context) {
        CUdevice device;
        if (CUresult result = (*found)->cuDeviceGet_(&device, current_device)) return translated(result);
        if (CUresult result = (*found)->cuDevicePrimaryCtxRetain_(&context, device)) return translated(result);
    }
    if (CUresult result = (*found)->cuCtxSetCurrent_(context)) return translated(result);
    entered_device = current_device;
    return SUCCESS;
}

Code translated(CUresult result) {
    switch (result) {
    case CUDA_SUCCESS: return SUCCESS;
    case CUDA_ERROR_INVALID_VALUE: return INVALID_VALUE;
    case CUDA_ERROR_OUT_OF_MEMORY: return OUT_OF_MEMORY;
    case CUDA_ERROR_NOT_INITIALIZED: return NOT_INITIALIZED;
    case CUDA_ERROR_DEINITIALIZED: return DEINITIALIZED;
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: return INSUFFICIENT_DRIVER;
    case CUDA_ERROR_NO_DEVICE: return NO_DEVICE;
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_INVALID_DEVICE: return INVALID_DEVICE;
    case CUDA_ERROR_INVALID_IMAGE: return INVALID_IMAGE;
    case CUDA_ERROR_INVALID_CONTEXT: return INVALID_CONTEXT;
    case CUDA_ERROR_MAP_FAILED: return MAP_FAILED;
    case CUDA_ERROR_NO_BINARY_FOR_GPU: return NO_BINARY_FOR_GPU;
    case CUDA_ERROR_ECC_UNCORRECTABLE: return ECC_NOT_CORRECTABLE;
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_INVALID_PTX: return INVALID_KERNEL_FILE;
    case CUDA_ERROR_SHARED_OBJECT_INIT_FAILED: return SHARED_OBJECT_INIT_FAILED;
    case CUDA_ERROR_OPERATING_SYSTEM: return OPERATING_SYSTEM;
    case CUDA_ERROR_INVALID_HANDLE: return INVALID_HANDLE;
    case CUDA_ERROR_ILLEGAL_STATE: return ILLEGAL_STATE;
    case CUDA_ERROR_NOT_FOUND: return NOT_FOUND;
    case CUDA_ERROR_NOT_READY: return NOT_READY;
    case CUDA_ERROR_ILLEGAL_ADDRESS: return ILLEGAL_ADDRESS;
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: return LAUNCH_OUT_OF_RESOURCES;
    case CUDA_ERROR_LAUNCH_TIMEOUT: return LAUNCH_TIME_OUT;
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return CONTEXT_IS_DESTROYED;
    case CUDA_ERROR_ASSERT: return ASSERT;
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED: return LAUNCH_FAILURE;
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: return COOPERATIVE_LAUNCH_TOO_LARGE;
    case CUDA_ERROR_NOT_SUPPORTED: return NOT_SUPPORTED;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: return STREAM_CAPTURE_UNSUPPORTED;
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: return STREAM_CAPTURE_INVALIDATED;
    case CUDA_ERROR_STREAM_CAPTURE_MERGE: return STREAM_CAPTURE_MERGE;
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: return STREAM_CAPTURE_UNMATCHED;
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED: return STREAM_CAPTURE_UNJOINED;
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION: return STREAM_CAPTURE_ISOLATION;
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: return STREAM_CAPTURE_IMPLICIT;
    case CUDA_ERROR_CAPTURED_EVENT: return CAPTURED_EVENT;
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: return STREAM_CAPTURE_WRONG_THREAD;
    case CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE: return GRAPH_EXEC_UPDATE_FAILURE;
    default: fprintf(stderr, "lookalike: CUDA's result %d has no code here\n", (int)result); return UNKNOWN;
    }
}

const char* code_name(Code code) {
    switch (code) {
    case SUCCESS: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case NOT_INITIALIZED: return "hipErrorNotInitialized";
    case DEINITIALIZED: return "hipErrorDeinitialized";
    case INSUFFICIENT_DRIVER: return "hipErrorInsufficientDriver";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case INVALID_CONTEXT: return "hipErrorInvalidContext";
    case MAP_FAILED: return "hipErrorMapFailed";
    case NO_BINARY_FOR_GPU: return "hipErrorNoBinaryForGpu";
    case ECC_NOT_CORRECTABLE: return "hipErrorECCNotCorrectable";
    case INVALID_KERNEL_FILE: return "hipErrorInvalidKernelFile";
    case SHARED_OBJECT_INIT_FAILED: return "hipErrorSharedObjectInitFailed";
    case OPERATING_SYSTEM: return "hipErrorOperatingSystem";
    case INVALID_HANDLE: return "hipErrorInvalidHandle";
    case ILLEGAL_STATE: return "hipErrorIllegalState";
    case NOT_FOUND: return "hipErrorNotFound";
    case NOT_READY: return "hipErrorNotReady";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case LAUNCH_OUT_OF_RESOURCES: return "hipErrorLaunchOutOfResources";
    case LAUNCH_TIME_OUT: return "hipErrorLaunchTimeOut";
    case CONTEXT_IS_DESTROYED: return "hipErrorContextIsDestroyed";
    case ASSERT: return "hipErrorAssert";
    case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
    case COOPERATIVE_LAUNCH_TOO_LARGE: return "hipErrorCooperativeLaunchTooLarge";
    case NOT_SUPPORTED: return "hipErrorNotSupported";
    case STREAM_CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case STREAM_CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    case STREAM_CAPTURE_MERGE: return "hipErrorStreamCaptureMerge";
    case STREAM_CAPTURE_UNMATCHED: return "hipErrorStreamCaptureUnmatched";
    case STREAM_CAPTURE_UNJOINED: return "hipErrorStreamCaptureUnjoined";
    case STREAM_CAPTURE_ISOLATION: return "hipErrorStreamCaptureIsolation";
    case STREAM_CAPTURE_IMPLICIT: return "hipErrorStreamCaptureImplicit";
    case CAPTURED_EVENT: return "hipErrorCapturedEvent";
    case STREAM_CAPTURE_WRONG_THREAD: return "hipErrorStreamCaptureWrongThread";
    case GRAPH_EXEC_UPDATE_FAILURE: return "hipErrorGraphExecUpdateFailure";
    default: return "hipErrorUnknown";
    }
}

} // namespace lookalike
