//! The `Doctor` request: what the daemon found out about its GPUs.

use rocmforge_client::wire::{CheckState, DoctorCheck, DoctorReply, Ext, GpuEntry, cut_text, limits};

use super::error::Failure;
use super::{Call, Right};
use crate::backend::doctor::{Check, Gpu, Report, State};

pub(super) async fn doctor(call: Call) -> Result<DoctorReply, Failure> {
    let mut report = call.blocking(|call| Ok(call.service().doctor.report())).await?;
    report.checks.extend(uploads(&call));
    report.checks.push(rights(&call));
    report.checks.extend(locks(&call));
    report.checks.extend(files(&call));
    Ok(reply(&report))
}

/// The upload method in use, once weights were uploaded.
fn uploads(call: &Call) -> Option<Check> {
    let device = call.service().engine.snapshot().device;
    let rate = device.upload_rates.iter().find(|rate| rate.in_use && device.uploads > 0)?;
    let found = rate.to_string();
    Some(Check { name: "weights to the device".into(), state: State::Good, found, advice: String::new() })
}

/// The client's rights under the policy.
fn rights(call: &Call) -> Check {
    let advice = "the daemon's administrator can change this in [policy] of its configuration";
    let limited = !call.may(Right::Run) || !call.may(Right::Load);
    Check {
        name: "you may".into(),
        state: if limited { State::Note } else { State::Good },
        found: call.rights(),
        advice: if limited { advice.to_owned() } else { String::new() },
    }
}

/// Models that should be locked in memory and are not.
fn locks(call: &Call) -> Option<Check> {
    let (count, refusal) = call.service().store.locks_refused();
    let found = format!("{count} models are not locked: {}", refusal?);
    let advice = "raise LimitMEMLOCK= of the unit, or host.lock_mib; then pin them again".to_owned();
    Some(Check { name: "locked memory".into(), state: State::Problem, found, advice })
}

/// File systems whose servers do not answer.
fn files(call: &Call) -> Option<Check> {
    let lost = call.service().lost_threads();
    let found =
        format!("{lost} threads wait for file systems that do not answer; the log names their models");
    let advice = "mend the file system's server, or unmount it (umount -f)".to_owned();
    (lost > 0).then(|| Check { name: "model files".into(), state: State::Problem, found, advice })
}

fn reply(report: &Report) -> DoctorReply {
    DoctorReply {
        checks: report.checks.iter().take(limits::CHECKS_MAX).map(check).collect(),
        gpus: report.gpus.iter().take(limits::DEVICES_MAX).map(gpu).collect(),
        ext: Ext::new(),
    }
}

fn check(check: &Check) -> DoctorCheck {
    DoctorCheck {
        name: label(&check.name),
        state: match check.state {
            State::Good => CheckState::Good,
            State::Note => CheckState::Note,
            State::Problem => CheckState::Problem,
        },
        found: cut_text(&check.found, limits::VALUE_BYTES_MAX).to_owned(),
        advice: cut_text(&check.advice, limits::VALUE_BYTES_MAX).to_owned(),
        ext: Ext::new(),
    }
}

fn gpu(gpu: &Gpu) -> GpuEntry {
    GpuEntry {
        index: gpu.index,
        name: label(&gpu.name),
        arch: label(&gpu.arch),
        pci: label(&gpu.pci),
        memory_bytes: gpu.memory_bytes,
        memory_free_bytes: gpu.memory_free_bytes,
        units: gpu.units,
        wave: gpu.wave,
        code: label(&gpu.code),
        works: gpu.works,
        ext: Ext::new(),
    }
}

fn label(text: &str) -> String {
    cut_text(text, limits::LABEL_BYTES_MAX).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_found_fits_the_wire() {
        let long = "é".repeat(9000);
        let check =
            Check { name: long.clone(), state: State::Problem, found: long.clone(), advice: long.clone() };
        let gpu = Gpu {
            index: 1,
            name: long.clone(),
            arch: long.clone(),
            pci: long.clone(),
            memory_bytes: 2,
            memory_free_bytes: 1,
            units: 3,
            wave: 64,
            code: long,
            works: true,
        };
        let reply = reply(&Report { checks: vec![check; 200], gpus: vec![gpu; 100] });
        assert_eq!((reply.checks.len(), reply.gpus.len()), (limits::CHECKS_MAX, limits::DEVICES_MAX));
        let bytes = rocmforge_client::wire::encode(&reply).expect("within all limits");
        assert_eq!(rocmforge_client::wire::decode::<DoctorReply>(&bytes).expect("as encoded"), reply);
    }
}
