// Exported functions: memory and copies.
#include "driver.h"

using namespace lookalike;

namespace {

// hipHostMallocPortable, hipHostMallocMapped; hipHostRegister's flags are the same.
constexpr uint32_t PORTABLE = 1, MAPPED = 2;

CUdeviceptr address(const void* place) { return (CUdeviceptr)(uintptr_t)place; }

// hipMemcpyKind.
enum Kind : uint32_t { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };

} // namespace

LOOKALIKE_API hipMemGetInfo(size_t* free, size_t* total) {
    if (!free || !total) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuMemGetInfo_(free, total); });
}

LOOKALIKE_API hipMalloc(void** place, size_t bytes) {
    if (!place) return INVALID_VALUE;
    *place = nullptr;
    if (bytes == 0) return SUCCESS;
    return device_call([&](const Driver& cuda) {
        CUdeviceptr got = 0;
        CUresult result = cuda.cuMemAlloc_(&got, bytes);
        *place = (void*)(uintptr_t)got;
        return result;
    });
}

LOOKALIKE_API hipFree(void* place) {
    if (!place) return SUCCESS;
    return device_call([&](const Driver& cuda) { return cuda.cuMemFree_(address(place)); });
}

LOOKALIKE_API hipHostMalloc(void** place, size_t bytes, uint32_t flags) {
    if (!place || (flags & ~(PORTABLE | MAPPED)) != 0) return INVALID_VALUE;
    // HIP's pinned memory is mapped and portable whatever the flags are.
    uint32_t wanted = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    return device_call([&](const Driver& cuda) { return cuda.cuMemHostAlloc_(place, bytes, wanted); });
}

LOOKALIKE_API hipHostFree(void* place) {
    if (!place) return SUCCESS;
    return device_call([&](const Driver& cuda) { return cuda.cuMemFreeHost_(place); });
}

LOOKALIKE_API hipHostGetDevicePointer(void** device, void* host, uint32_t flags) {
    if (!device || flags != 0) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) {
        CUdeviceptr got = 0;
        CUresult result = cuda.cuMemHostGetDevicePointer_(&got, host, 0);
        *device = (void*)(uintptr_t)got;
        return result;
    });
}

LOOKALIKE_API hipHostRegister(void* place, size_t bytes, uint32_t flags) {
    if ((flags & ~(PORTABLE | MAPPED)) != 0) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) {
        // Mapped files are read-only here. Without READ_ONLY the driver refuses them.
        uint32_t wanted = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        CUresult result = cuda.cuMemHostRegister_(place, bytes, wanted | CU_MEMHOSTREGISTER_READ_ONLY);
        return result == CUDA_ERROR_NOT_SUPPORTED ? cuda.cuMemHostRegister_(place, bytes, wanted) : result;
    });
}

LOOKALIKE_API hipHostUnregister(void* place) {
    return device_call([&](const Driver& cuda) { return cuda.cuMemHostUnregister_(place); });
}

LOOKALIKE_API hipMemcpyAsync(void* to, const void* from, size_t bytes, uint32_t kind, CUstream stream) {
    return device_call([&](const Driver& cuda) {
        switch (kind) {
        case HOST_TO_DEVICE: return cuda.cuMemcpyHtoDAsync_(address(to), from, bytes, stream);
        case DEVICE_TO_HOST: return cuda.cuMemcpyDtoHAsync_(to, address(from), bytes, stream);
        case DEVICE_TO_DEVICE: return cuda.cuMemcpyDtoDAsync_(address(to), address(from), bytes, stream);
        default: return CUDA_ERROR_INVALID_VALUE;
        }
    });
}

LOOKALIKE_API hipMemsetAsync(void* to, int value, size_t bytes, CUstream stream) {
    return device_call([&](const Driver& cuda) {
        return cuda.cuMemsetD8Async_(address(to), (unsigned char)value, bytes, stream);
    });
}
