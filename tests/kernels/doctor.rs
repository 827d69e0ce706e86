//! Reports of the GPU probe process on a working device, and on a failing one.

use std::path::Path;
use std::process::Command;

use rocmforge::backend::doctor::{Report, SUBCOMMAND, State};
use rocmforge::backend::hip::Runtime;

use crate::common::skip;
use crate::rig::{is_lookalike, library};

/// The report of the runtime in `library`.
fn report(library: &Path, settings: &[(&str, &str)]) -> Report {
    let output = Command::new(env!("CARGO_BIN_EXE_rocmforged"))
        .arg(SUBCOMMAND)
        .env("ROCMFORGE_HIP_LIB", library)
        .envs(settings.iter().map(|(name, value)| (format!("ROCMFORGE_LOOKALIKE_{name}"), value)))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let json = text
        .lines()
        .find_map(|line| line.strip_prefix("rocmforge-gpus "))
        .expect("the output has no report line");
    serde_json::from_str(json).unwrap()
}

#[test]
fn a_device_that_computes_is_found_to_work() {
    let Some(library) = library() else { return };
    let report = report(&library, &[]);
    let gpu = report.gpus.first().unwrap_or_else(|| panic!("no device: {report:?}"));
    assert!(gpu.works && gpu.memory_bytes > 0 && gpu.wave >= 32, "{report:?}");
    assert!(gpu.arch.starts_with(gpu.code.split('-').next().unwrap()), "{report:?}");
    assert!(report.checks.iter().all(|check| check.state != State::Problem), "{report:?}");
    let runtime = report.checks.iter().find(|check| check.name == "HIP runtime").unwrap();
    assert!(runtime.found.contains(&library.display().to_string()), "{runtime:?}");
}

#[test]
fn a_device_that_does_not_is_a_problem_with_the_drivers_words() {
    let Some(library) = library() else { return };
    if !Runtime::open(&library).is_ok_and(|runtime| is_lookalike(&runtime)) {
        return skip(&format!("{} cannot inject faults", library.display()));
    }
    let broken = report(&library, &[("DEVICES", "2"), ("FAULTS", "kernel.probe_launch:2=719")]);
    let [first, second] = &broken.gpus[..] else { panic!("{broken:?}") };
    assert_eq!((first.works, second.works), (false, true));
    let check = broken.checks.iter().find(|check| check.name == "device 0").unwrap();
    assert_eq!(check.state, State::Problem);
    assert!(check.found.contains("failed with code 719 (hipErrorLaunchFailure)"), "{check:?}");

    let strange = report(&library, &[("ARCH", "gfx803")]);
    let check = strange.checks.iter().find(|check| check.name == "device 0").unwrap();
    assert!(check.state == State::Problem && check.found.contains("no kernels for gfx803"), "{check:?}");
    assert_eq!((strange.gpus[0].code.as_str(), strange.gpus[0].works), ("", false));
}
