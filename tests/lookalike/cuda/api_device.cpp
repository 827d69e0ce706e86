// Exported functions: the library, its devices, its errors.
#include <stdio.h>
#include <string.h>

#include "driver.h"

using namespace lookalike;

namespace {

// CUDA's attribute for hipDeviceAttribute_t `number`; the numbers are unrelated.
bool attribute_of(uint32_t number, CUdevice_attribute* attribute) {
    switch (number) {
    case 3: *attribute = CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY; return true;
    case 5: *attribute = CU_DEVICE_ATTRIBUTE_CLOCK_RATE; return true;
    case 8: *attribute = CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS; return true;
    case 10: *attribute = CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH; return true;
    case 16: *attribute = CU_DEVICE_ATTRIBUTE_INTEGRATED; return true;
    case 19: *attribute = CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE; return true;
    case 26: *attribute = CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X; return true;
    case 27: *attribute = CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y; return true;
    case 28: *attribute = CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z; return true;
    case 29: *attribute = CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X; return true;
    case 30: *attribute = CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y; return true;
    case 31: *attribute = CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z; return true;
    case 56: *attribute = CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK; return true;
    case 57: *attribute = CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR; return true;
    case 63: *attribute = CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT; return true;
    // The most that a block gets after opting in, as hipModuleGetFunction here does for every kernel.
    case 74: *attribute = CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN; return true;
    case 76: *attribute = CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR; return true;
    case 87: *attribute = CU_DEVICE_ATTRIBUTE_WARP_SIZE; return true;
    default: return false;
    }
}

CUresult number_of(const Driver& cuda, CUdevice_attribute attribute, CUdevice device, int32_t* value) {
    return cuda.cuDeviceGetAttribute_(value, attribute, device);
}

// Fills the structure of ROCm 6 and 7, 1472 bytes: only the fields that mean something here, by their offsets.
CUresult fill_properties(const Driver& cuda, CUdevice device, char* p) {
    memset(p, 0, 1472);
    if (CUresult result = cuda.cuDeviceGetName_(p, 256, device)) return result;
    size_t memory = 0;
    if (CUresult result = cuda.cuDeviceTotalMem_(&memory, device)) return result;
    memcpy(p + 288, &memory, 8);
    struct {
        size_t at;
        CUdevice_attribute attribute;
    } numbers[] = {
        {308, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
        {320, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
        {388, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
    };
    int32_t value = 0;
    for (auto& number : numbers) {
        if (CUresult result = number_of(cuda, number.attribute, device, &value)) return result;
        memcpy(p + number.at, &value, 4);
    }
    int32_t major = 0, minor = 0;
    if (CUresult result = number_of(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device, &major)) return result;
    if (CUresult result = number_of(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device, &minor)) return result;
    snprintf(p + 1160, 256, "sm_%d%d", (int)major, (int)minor);
    return CUDA_SUCCESS;
}

} // namespace

LOOKALIKE_API hipInit(uint32_t flags) {
    if (flags != 0) return INVALID_VALUE;
    return call([](const Driver&) { return CUDA_SUCCESS; });
}

LOOKALIKE_API hipGetDeviceCount(int* count) {
    if (!count) return INVALID_VALUE;
    *count = 0;
    return call([&](const Driver& cuda) { return cuda.cuDeviceGetCount_(count); });
}

// The CUDA driver's version in HIP's digits: 13.0 is 130000000.
LOOKALIKE_API hipRuntimeGetVersion(int* version) {
    if (!version) return INVALID_VALUE;
    return call([&](const Driver& cuda) {
        int cuda_version = 0;
        CUresult result = cuda.cuDriverGetVersion_(&cuda_version);
        *version = cuda_version / 1000 * 10000000 + cuda_version % 1000 / 10 * 100000;
        return result;
    });
}

LOOKALIKE_API hipSetDevice(int device) {
    int count = 0;
    if (Code code = hipGetDeviceCount(&count)) return code;
    if (device < 0 || device >= count) return INVALID_DEVICE;
    current_device = device;
    return device_call([](const Driver&) { return CUDA_SUCCESS; });
}

LOOKALIKE_API hipGetDevicePropertiesR0600(void* properties, int index) {
    if (!properties) return INVALID_VALUE;
    return call([&](const Driver& cuda) {
        CUdevice device;
        if (CUresult result = cuda.cuDeviceGet_(&device, index)) return result;
        return fill_properties(cuda, device, (char*)properties);
    });
}

LOOKALIKE_API hipDeviceGetAttribute(int* value, uint32_t number, int index) {
    CUdevice_attribute attribute;
    if (!value || !attribute_of(number, &attribute)) return INVALID_VALUE;
    return call([&](const Driver& cuda) {
        CUdevice device;
        if (CUresult result = cuda.cuDeviceGet_(&device, index)) return result;
        return number_of(cuda, attribute, device, value);
    });
}

LOOKALIKE_API hipDeviceGetPCIBusId(char* id, int length, int index) {
    if (!id || length < 13) return INVALID_VALUE;
    return call([&](const Driver& cuda) {
        CUdevice device;
        if (CUresult result = cuda.cuDeviceGet_(&device, index)) return result;
        return cuda.cuDeviceGetPCIBusId_(id, length, device);
    });
}

LOOKALIKE_API hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return device_call([&](const Driver& cuda) { return cuda.cuCtxGetStreamPriorityRange_(least, greatest); });
}

LOOKALIKE_API hipDeviceSynchronize() {
    return device_call([](const Driver& cuda) { return cuda.cuCtxSynchronize_(); });
}

extern "C" __attribute__((visibility("default"))) const char* hipGetErrorName(Code code) { return code_name(code); }
