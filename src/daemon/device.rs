//! Chooses the device: the GPU if the configuration allows it and one works, else the CPU with the reason.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::backend::cpu::{CpuBackend, CpuOptions, Isa};
use crate::backend::hip::{HipBackend, HipOptions};
use crate::backend::{Backend, BackendError, cpu, hip};
use crate::config::{BackendChoice, Config, Graphs, Simd};
use crate::program::Program;

/// Name of the note in [`info`](Backend::info) that says why no GPU is used.
pub const REASON: &str = "no GPU";

/// Returns a function that opens the configured device, for [`Engine::start`](crate::scheduler::Engine::start), which
/// calls it again when the device was lost. It does not retry a lost GPU in this process: the GPU's runtime does not
/// recover.
pub fn factory(config: &Config) -> impl Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static {
    let (choice, cpu, hip) = (config.device.backend, cpu_options(config), hip_options(config));
    let lost: Arc<OnceLock<BackendError>> = Arc::clone(&hip.lost);
    move || {
        let open_cpu = || CpuBackend::new(cpu);
        if choice == BackendChoice::Cpu {
            return Ok(Box::new(open_cpu()?) as Box<dyn Backend>);
        }
        let before = lost.get().cloned();
        let opened = before.map_or_else(|| HipBackend::open(hip.clone()), Err);
        match opened {
            Ok(gpu) => {
                let info = gpu.info();
                tracing::info!(device = info.device, isa = info.isa, "computing on the GPU");
                Ok(Box::new(gpu))
            }
            Err(error) if choice == BackendChoice::Hip => Err(error),
            Err(error) => {
                tracing::warn!(%error, "no GPU is used: computing on the CPU");
                Ok(Box::new(open_cpu()?.with_note(REASON, error.to_string())))
            }
        }
    }
}

/// Names what the configured device cannot compute, without opening it. Where the CPU may take a GPU's place, that is what
/// the CPU cannot.
pub fn refuses(choice: BackendChoice) -> fn(&Program) -> Option<BackendError> {
    match choice {
        BackendChoice::Hip => hip::refuses,
        BackendChoice::Auto | BackendChoice::Cpu => cpu::refuses,
    }
}

fn cpu_options(config: &Config) -> CpuOptions {
    CpuOptions {
        threads: (config.cpu.threads > 0).then_some(config.cpu.threads),
        isa: match config.cpu.simd {
            Simd::Auto => None,
            Simd::Portable => Some(Isa::Portable),
            Simd::Avx2 => Some(Isa::Avx2),
            Simd::Avx512Vnni => Some(Isa::Avx512Vnni),
            Simd::Neon => Some(Isa::Neon),
        },
        activations: config.cpu.activations,
        kv: config.kv.kind,
        unfused: false,
    }
}

fn hip_options(config: &Config) -> HipOptions {
    let device = &config.device;
    HipOptions {
        index: device.index,
        activations: device.activations,
        kv: config.kv.kind,
        upload: device.upload,
        reads: device.reads,
        upload_threads: device.upload_threads,
        graphs: device.graphs == Graphs::Auto,
        deterministic: device.deterministic,
        memory_bytes: device.memory_mib << 20,
        patience: Duration::from_secs(device.patience_s.into()),
        ..HipOptions::default()
    }
}
