// Functions exported for tests, beside the runtime's own names. Tests find them by dlsym; a real runtime has none of them.
#include "api.h"

using namespace lookalike;

#define LOOKALIKE_TEST extern "C" __attribute__((visibility("default")))

// Replaces the script of faults (faults.h); an empty script ends all faults.
LOOKALIKE_TEST void rocmforge_lookalike_faults(const char* script) { set_faults(script); }

// Releases all hung work.
LOOKALIKE_TEST void rocmforge_lookalike_release_hung() {
    Locked guard;
    release_hung();
}

// Repairs devices that failed or were lost, as a new process would find them. Memory and handles stay.
LOOKALIKE_TEST void rocmforge_lookalike_heal() {
    Locked guard;
    for (u32 i = 0; i < devices().size(); i++) lose(i, hipSuccess);
}

// A counter by name (counters.h): "hipMalloc", "bytes.h2d", "kernel.norm_f32", "graph launches".
LOOKALIKE_TEST u64 rocmforge_lookalike_count(const char* name) { return counted(name); }

// Name of kernel `index`, null past the last.
LOOKALIKE_TEST const char* rocmforge_lookalike_kernel(u32 index) {
    host::Kernel* kernel = host::Kernel::all;
    while (kernel && index-- > 0) kernel = kernel->next;
    return kernel ? kernel->name : nullptr;
}
