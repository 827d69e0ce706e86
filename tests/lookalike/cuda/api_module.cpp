// Exported functions: code objects and launches.
#include "driver.h"

#include <stdlib.h>
#include <string.h>

using namespace lookalike;

namespace {

// Gives a kernel all the dynamic shared memory that a block can get. Without this opt-in it is 48 KiB in all.
CUresult allow_shared_memory(const Driver& cuda, CUfunction function) {
    CUdevice device;
    int most = 0, fixed = 0;
    if (CUresult result = cuda.cuDeviceGet_(&device, current_device)) return result;
    if (CUresult result = cuda.cuDeviceGetAttribute_(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device))
        return result;
    if (CUresult result = cuda.cuFuncGetAttribute_(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) return result;
    return cuda.cuFuncSetAttribute_(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - fixed);
}

// Whether a kernel may start while its predecessor in the stream ends. All kernels here wait where they need its results
// (wait_for_predecessor). ROCMFORGE_CUDA_OVERLAP=off runs them one after the other, as HIP does.
bool launches_overlap() {
    static const bool overlap = [] {
        const char* wanted = getenv("ROCMFORGE_CUDA_OVERLAP");
        return !wanted || strcmp(wanted, "off") != 0;
    }();
    return overlap;
}

} // namespace

LOOKALIKE_API hipModuleLoadData(CUmodule* module, const void* image) {
    if (!module || !image) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuModuleLoadData_(module, image); });
}

LOOKALIKE_API hipModuleUnload(CUmodule module) {
    return device_call([&](const Driver& cuda) { return cuda.cuModuleUnload_(module); });
}

LOOKALIKE_API hipModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    if (!function || !name) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) {
        if (CUresult result = cuda.cuModuleGetFunction_(function, module, name)) return result;
        return allow_shared_memory(cuda, *function);
    });
}

LOOKALIKE_API hipModuleLaunchKernel(CUfunction function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                                    uint32_t block_y, uint32_t block_z, uint32_t lds_bytes, CUstream stream,
                                    void** parameters, void** extra) {
    if (extra) return NOT_SUPPORTED;
    CUlaunchAttribute overlap{};
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid_x, config.gridDimY = grid_y, config.gridDimZ = grid_z;
    config.blockDimX = block_x, config.blockDimY = block_y, config.blockDimZ = block_z;
    config.sharedMemBytes = lds_bytes;
    config.hStream = stream;
    config.attrs = &overlap;
    config.numAttrs = launches_overlap() ? 1 : 0;
    return device_call([&](const Driver& cuda) { return cuda.cuLaunchKernelEx_(&config, function, parameters, nullptr); });
}
