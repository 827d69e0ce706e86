//! Examines the HIP runtime and the devices it reports.

use std::path::Path;

use super::super::DeviceMemoryUse;
use super::super::hip::kernels::objects::{CodeObject, CodeSource};
use super::super::hip::kernels::probe::ProbeLaunch;
use super::super::hip::{
    ArenaOptions, CardMemory, Device, DeviceOptions, Grid, HipError, Library, LibraryError, Purpose, Runtime,
    StreamPriority,
};
use super::{Check, Gpu, State};

/// Most devices examined; the rest are ignored.
const GPUS_MAX: u32 = 64;

/// Launches of the counting kernel.
const LAUNCHES: u32 = 3;

/// Checks of the runtime and of each device, and the devices. A missing runtime is only a note on a machine without
/// an AMD GPU.
pub(super) fn examine(has_amd: bool) -> (Vec<Check>, Vec<Gpu>) {
    let runtime = match Runtime::find() {
        Ok(runtime) => runtime,
        Err(error) => {
            let missing =
                matches!(error, HipError::Library(LibraryError::NotFound { .. }) | HipError::NoDevice);
            let state = if missing && !has_amd { State::Note } else { State::Problem };
            return (vec![Check::new("HIP runtime", state, without_device(&error), "")], vec![]);
        }
    };
    let found =
        format!("{}, {} device(s)", named(&runtime.path(), Some(runtime.version())), runtime.device_count());
    let mut checks = vec![Check::new("HIP runtime", State::Good, found, "")];
    let mut gpus = Vec::new();
    for index in 0..runtime.device_count().min(GPUS_MAX) {
        let name = format!("device {index}");
        match examine_one(&runtime, index) {
            Ok((gpu, check)) => {
                checks.push(Check { name, ..check });
                checks.extend(memory(Path::new("/"), &gpu));
                gpus.push(gpu);
            }
            Err(error) => checks.push(Check::new(name, State::Problem, error.to_string(), "")),
        }
    }
    (checks, gpus)
}

/// Why there is no device, and which runtime said so.
fn without_device(error: &HipError) -> String {
    match (error, Library::find()) {
        (HipError::NoDevice, Ok(library)) => format!("{}: {error}", named(library.path(), library.version())),
        _ => error.to_string(),
    }
}

fn named(path: &Path, number: Option<u32>) -> String {
    format!("{}, version {}", path.display(), number.map_or_else(|| "unknown".into(), version))
}

fn examine_one(runtime: &Runtime, index: u32) -> Result<(Gpu, Check), HipError> {
    let about = runtime.describe(index)?;
    let code = CodeObject::chosen(&CodeSource::Environment, about.arch_name());
    let ran = run_kernel(runtime, index);
    let what = format!("{}, {}", about.name, about.arch);
    let check = match (&code, &ran) {
        (Ok(code), Ok(_)) => {
            Check::new("", State::Good, format!("{what}: runs kernels built for {code}"), "")
        }
        (Err(error), _) => Check::new("", State::Problem, format!("{what}: {error}"), ""),
        (Ok(_), Err(error)) => Check::new("", State::Problem, format!("{what}: {error}"), ""),
    };
    let gpu = Gpu {
        index,
        name: about.name,
        arch: about.arch,
        pci: about.pci,
        memory_bytes: about.memory_bytes,
        memory_free_bytes: ran.as_ref().map_or(0, |free| *free),
        units: about.units,
        wave: about.wave,
        code: code.unwrap_or_default(),
        works: ran.is_ok(),
    };
    Ok((gpu, check))
}

/// Compares the kernel's count of a device's memory with the runtime's. `None` if the kernel does not count it.
fn memory(root: &Path, gpu: &Gpu) -> Option<Check> {
    let card = CardMemory::find(root, &gpu.pci).filter(|_| gpu.works)?;
    let (used, mib) = (card.used()?, |bytes: u64| bytes >> 20);
    let (total, free) = (gpu.memory_bytes, gpu.memory_free_bytes);
    let counted = DeviceMemoryUse { total, free, kernel_used: Some(used), ..Default::default() };
    let (state, found, advice) = match counted.contradiction() {
        None => (State::Good, String::new(), ""),
        Some(text) => (
            State::Note,
            format!("; {text}"),
            "budgets use the runtime's count; set device.memory_mib to fix one",
        ),
    };
    let found = format!("the kernel counts {} of {} MiB in use{found}", mib(used), mib(card.total()));
    Some(Check::new(format!("device {} memory", gpu.index), state, found, advice))
}

/// Launches a counting kernel and reads the count back. Returns the device's free bytes.
fn run_kernel(runtime: &Runtime, index: u32) -> Result<u64, HipError> {
    // Takes little memory: models of this daemon or another program may fill the device.
    let arena = ArenaOptions { chunk_bytes: 0, ..ArenaOptions::default() };
    let device = Device::open(runtime, &DeviceOptions { index, arena, ..DeviceOptions::default() })?;
    let (free, _) = device.memory()?;
    let stream = device.stream(StreamPriority::High)?;
    let counter = device.take(4, Purpose::Scratch)?;
    stream.upload(counter.all(), &[0u32])?;
    let arguments = ProbeLaunch { count: counter.ptr() };
    let threads = 64;
    for _ in 0..LAUNCHES {
        device.launch(&stream, ProbeLaunch::probe_launch, Grid::x(1).threads(threads), &arguments)?;
    }
    let mut count = [0u32];
    stream.download(counter.all(), &mut count)?;
    if count != [LAUNCHES] {
        let why = format!("a kernel launched {LAUNCHES} times counted {}", count[0]);
        return Err(HipError::Refused { what: "the device", why });
    }
    Ok(free)
}

/// AMD's notation: 60443484 is 6.4.43484.
fn version(number: u32) -> String {
    format!("{}.{}.{}", number / 10_000_000, number / 100_000 % 100, number % 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_count_is_told_and_so_is_where_the_runtime_differs() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/class/drm/card1/device");
        std::fs::create_dir_all(&device).unwrap();
        let file = |name: &str, text: &str| std::fs::write(device.join(name), text).unwrap();
        file("uevent", "PCI_SLOT_NAME=0000:03:00.0\n");
        file("mem_info_vram_total", &format!("{}\n", 16u64 << 30));
        file("mem_info_vram_used", &format!("{}\n", 3u64 << 30));
        let gpu = Gpu {
            index: 1,
            name: "card".into(),
            arch: "gfx1100".into(),
            pci: "0000:03:00.0".into(),
            memory_bytes: 16 << 30,
            memory_free_bytes: 13 << 30,
            units: 96,
            wave: 32,
            code: "gfx1100".into(),
            works: true,
        };
        let check = memory(root.path(), &gpu).unwrap();
        assert_eq!((check.name.as_str(), check.state), ("device 1 memory", State::Good));
        assert_eq!(check.found, "the kernel counts 3072 of 16384 MiB in use");
        let more = Gpu { memory_free_bytes: 15 << 30, ..gpu.clone() };
        let check = memory(root.path(), &more).unwrap();
        assert_eq!(check.state, State::Note);
        assert!(
            check.found.contains("the runtime says 1024 MiB are in use, the kernel 3072 MiB"),
            "{}",
            check.found
        );
        assert!(memory(root.path(), &Gpu { pci: "0000:04:00.0".into(), ..gpu }).is_none());
    }

    #[test]
    fn versions_read_as_the_vendor_writes_them() {
        assert_eq!(version(60_443_484), "6.4.43484");
        assert_eq!(version(50_221_153), "5.2.21153");
    }
}
