// Exported functions: code objects and launches. This library runs its own code; an image is only checked, as a driver would.
#include <unordered_map>
#include <unordered_set>

#include "api.h"

using namespace lookalike;

namespace {

struct Module {
    std::unordered_map<std::string, host::Kernel*> functions;
};

std::unordered_set<void*>& modules() {
    static auto& all = *new std::unordered_set<void*>;
    return all;
}

// Functions of unloaded modules stay in memory but leave this set.
std::unordered_set<void*>& functions() {
    static auto& all = *new std::unordered_set<void*>;
    return all;
}

struct Function {
    host::Kernel* kernel;
    Module* module;
};

// EF_AMDGPU_MACH of the targets that code objects are built for.
struct Machine {
    const char* name;
    u8 number;
};
constexpr Machine MACHINES[] = {
    {"gfx906", 0x2f},       {"gfx908", 0x30},          {"gfx90a", 0x3f},          {"gfx942", 0x4c},        {"gfx950", 0x4f},
    {"gfx1030", 0x36},      {"gfx1100", 0x41},         {"gfx1101", 0x46},         {"gfx1151", 0x4a},       {"gfx1200", 0x48},
    {"gfx1201", 0x4e},      {"gfx9-4-generic", 0x5f},  {"gfx10-3-generic", 0x53}, {"gfx11-generic", 0x54}, {"gfx12-generic", 0x59},
};
constexpr u16 EM_AMDGPU = 224;

// The generic target that a runtime from ROCm 6.4.1 on accepts for this target.
std::string generic_of(const std::string& arch) {
    if (arch == "gfx942" || arch == "gfx950") return "gfx9-4-generic";
    if (arch.rfind("gfx103", 0) == 0) return "gfx10-3-generic";
    if (arch.rfind("gfx11", 0) == 0) return "gfx11-generic";
    if (arch.rfind("gfx12", 0) == 0) return "gfx12-generic";
    return "";
}

Code check_image(const u8* image) {
    if (memcmp(image, "\x7f" "ELF", 4) != 0) return complain(hipErrorInvalidImage, "the image is not an ELF file");
    u16 machine;
    u32 flags;
    memcpy(&machine, image + 18, 2);
    memcpy(&flags, image + 48, 4);
    if (machine != EM_AMDGPU) return complain(hipErrorInvalidImage, "the image is for machine %u", machine);
    const std::string& all = settings().arch;
    std::string arch = all.substr(0, all.find(':')), generic = generic_of(arch);
    for (const Machine& known : MACHINES)
        if (known.number == (flags & 0xff) && (known.name == arch || known.name == generic)) return hipSuccess;
    return complain(hipErrorNoBinaryForGpu, "the image is for machine 0x%x, this is %s", flags & 0xff, arch.c_str());
}

} // namespace

LOOKALIKE_API hipModuleLoadData(void** module, const void* image) {
    return device_call("hipModuleLoadData", [&](u32) -> Code {
        if (!module || !image) return hipErrorInvalidValue;
        if (Code code = check_image((const u8*)image)) return code;
        Module* made = new Module;
        for (host::Kernel* kernel = host::Kernel::all; kernel; kernel = kernel->next) made->functions[kernel->name] = kernel;
        modules().insert(made);
        *module = made;
        return hipSuccess;
    });
}

LOOKALIKE_API hipModuleUnload(void* module) {
    return device_call("hipModuleUnload", [&](u32) -> Code {
        if (modules().erase(module) == 0) return complain(hipErrorInvalidHandle, "%p is no module", module);
        std::erase_if(functions(), [&](void* f) { return ((Function*)f)->module == module; });
        return hipSuccess;
    });
}

LOOKALIKE_API hipModuleGetFunction(void** function, void* module, const char* name) {
    return device_call("hipModuleGetFunction", [&](u32) -> Code {
        if (!function || !name) return hipErrorInvalidValue;
        if (!modules().count(module)) return complain(hipErrorInvalidHandle, "%p is no module", module);
        auto& known = ((Module*)module)->functions;
        auto found = known.find(name);
        if (found == known.end()) return complain(hipErrorNotFound, "no kernel is called %s", name);
        Function* made = new Function{found->second, (Module*)module};
        functions().insert(made);
        *function = made;
        return hipSuccess;
    });
}

LOOKALIKE_API hipModuleLaunchKernel(void* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x, u32 block_y, u32 block_z,
                                    u32 lds_bytes, void* handle, void** parameters, void** extra) {
    return stream_call("hipModuleLaunchKernel", handle, [&](Stream& stream) -> Code {
        if (!functions().count(function)) return complain(hipErrorInvalidHandle, "%p is no function", function);
        u32 grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
        Work work;
        if (Code code = make_launch(stream.device, ((Function*)function)->kernel, grid, block, lds_bytes, parameters, extra, work))
            return code;
        return submit(stream, work);
    });
}

namespace lookalike {
// For kernel nodes of graphs.
host::Kernel* kernel_of(void* function) { return functions().count(function) ? ((Function*)function)->kernel : nullptr; }
void* function_of(host::Kernel* kernel) {
    for (void* f : functions())
        if (((Function*)f)->kernel == kernel) return f;
    return nullptr;
}
} // namespace lookalike
