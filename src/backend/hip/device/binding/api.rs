//! The table of runtime functions.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Symbol;

use super::sys::{
    self, hipDeviceAttribute_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t,
    hipGraphNode_t, hipMemcpyKind, hipModule_t, hipStream_t, hipStreamCaptureMode,
};

/// A result code. Not hip-sys' enum: newer runtimes return codes that it lacks.
pub(in crate::backend::hip) type Raw = u32;

/// Looks up the function `name`. The library must stay loaded while the pointer is used.
///
/// # Safety
/// `F` must be a pointer to a function of the type that `name` has.
unsafe fn function<F: Copy>(library: &libloading::Library, name: &str) -> Option<F> {
    // SAFETY: the caller guarantees the type.
    let symbol: Symbol<'_, F> = unsafe { library.get(name) }.ok()?;
    Some(*symbol)
}

/// Declares the table once: fields, comparison of each type with hip-sys, and loading.
macro_rules! api {
    ($( $name:ident ( $($arg:ty),* ) ),* $(,)?) => {
        /// The functions of one loaded runtime. A table exists only when all of them were found.
        #[allow(non_snake_case)] // the runtime's own names
        #[derive(Clone, Copy)]
        pub(in crate::backend::hip) struct Api {
            $( pub $name: unsafe extern "C" fn($($arg),*) -> Raw, )*
            /// `hipGetErrorName`. The argument is a number, because the function accepts codes it does not know.
            pub hipGetErrorName: unsafe extern "C" fn(Raw) -> *const c_char,
        }

        // Fails to compile unless the arguments match hip-sys. Nothing is linked.
        $( const _: unsafe extern "C" fn($($arg),*) -> hipError_t = sys::$name; )*
        const _: unsafe extern "C" fn(hipError_t) -> *const c_char = sys::hipGetErrorName;
        const _: () = assert!(size_of::<hipError_t>() == size_of::<Raw>());

        impl Api {
            /// Looks up every function in `library`. On failure returns the name of the first missing one.
            pub(super) fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $( $name: {
                        type Function = unsafe extern "C" fn($($arg),*) -> Raw;
                        // SAFETY: the type is the one that hip-sys declares for this name, as compared above. The
                        // result is taken as the u32 that the C enum is.
                        let found: Option<Function> = unsafe { function(library, stringify!($name)) };
                        found.ok_or(stringify!($name))?
                    }, )*
                    hipGetErrorName: {
                        type Function = unsafe extern "C" fn(Raw) -> *const c_char;
                        // SAFETY: as above; the argument is a C enum, passed as the u32 that it is.
                        let found: Option<Function> = unsafe { function(library, "hipGetErrorName") };
                        found.ok_or("hipGetErrorName")?
                    },
                })
            }
        }
    };
}

api! {
    hipInit(c_uint),
    hipRuntimeGetVersion(*mut c_int),
    hipGetDeviceCount(*mut c_int),
    hipSetDevice(c_int),
    hipDeviceGetAttribute(*mut c_int, hipDeviceAttribute_t, c_int),
    hipDeviceGetPCIBusId(*mut c_char, c_int, c_int),
    hipDeviceSynchronize(),
    hipMemGetInfo(*mut usize, *mut usize),
    hipMalloc(*mut *mut c_void, usize),
    hipFree(*mut c_void),
    hipHostMalloc(*mut *mut c_void, usize, c_uint),
    hipHostFree(*mut c_void),
    hipHostRegister(*mut c_void, usize, c_uint),
    hipHostUnregister(*mut c_void),
    hipHostGetDevicePointer(*mut *mut c_void, *mut c_void, c_uint),
    hipMemcpyAsync(*mut c_void, *const c_void, usize, hipMemcpyKind, hipStream_t),
    hipMemsetAsync(*mut c_void, c_int, usize, hipStream_t),
    hipStreamCreateWithPriority(*mut hipStream_t, c_uint, c_int),
    hipDeviceGetStreamPriorityRange(*mut c_int, *mut c_int),
    hipStreamDestroy(hipStream_t),
    hipStreamQuery(hipStream_t),
    hipStreamSynchronize(hipStream_t),
    hipStreamWaitEvent(hipStream_t, hipEvent_t, c_uint),
    hipStreamBeginCapture(hipStream_t, hipStreamCaptureMode),
    hipStreamEndCapture(hipStream_t, *mut hipGraph_t),
    hipEventCreateWithFlags(*mut hipEvent_t, c_uint),
    hipEventDestroy(hipEvent_t),
    hipEventRecord(hipEvent_t, hipStream_t),
    hipEventQuery(hipEvent_t),
    hipEventSynchronize(hipEvent_t),
    hipEventElapsedTime(*mut f32, hipEvent_t, hipEvent_t),
    hipGraphDestroy(hipGraph_t),
    hipGraphGetNodes(hipGraph_t, *mut hipGraphNode_t, *mut usize),
    hipGraphInstantiate(*mut hipGraphExec_t, hipGraph_t, *mut hipGraphNode_t, *mut c_char, usize),
    hipGraphExecDestroy(hipGraphExec_t),
    hipGraphExecUpdate(hipGraphExec_t, hipGraph_t, *mut hipGraphNode_t, *mut sys::hipGraphExecUpdateResult),
    hipGraphLaunch(hipGraphExec_t, hipStream_t),
    hipModuleLoadData(*mut hipModule_t, *const c_void),
    hipModuleUnload(hipModule_t),
    hipModuleGetFunction(*mut hipFunction_t, hipModule_t, *const c_char),
    hipModuleLaunchKernel(
        hipFunction_t, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, hipStream_t, *mut *mut c_void,
        *mut *mut c_void
    ),
}
