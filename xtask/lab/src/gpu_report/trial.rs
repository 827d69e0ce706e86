//! A short report on the CPU look-alike, for the checks: the command must work before owners of GPUs run it.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xtask::error::{Error, Result};
use xtask::host;

/// Makes a report on this look-alike and checks it. Runs the parts that no other check runs there, and the shortest
/// tests.
///
/// # Errors
/// [`Error::Command`] if a part failed, [`Error::Unexpected`] for a faulty report.
pub fn on_lookalike(library: &Path) -> Result<()> {
    let dir = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let out = dir.path().join("report.md");
    let program = std::env::current_exe().map_err(Error::io("this program"))?;
    let mut command = Command::new(program);
    command.args(["gpu-report", "--only", "kernels,matmul,upload,step", "--out"]).arg(&out);
    host::run(command.env("ROCMFORGE_HIP_LIB", library))?;
    let text = fs::read_to_string(&out).map_err(Error::at(&out))?;
    faults(&text).map_or(Ok(()), |text| Err(Error::Unexpected { what: "the report", text }))
}

/// The first fault of a report on the look-alike.
fn faults(text: &str) -> Option<String> {
    if !text.contains("**This was no GPU.**") {
        return Some("it does not say that this was no GPU".into());
    }
    let json = text.split_once("```json\n").and_then(|(_, rest)| rest.trim_end().strip_suffix("```"));
    let Some(json): Option<Value> = json.and_then(|json| serde_json::from_str(json).ok()) else {
        return Some("it does not end with JSON".into());
    };
    let measured: Vec<&Value> = json["parts"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|part| part["measured"].as_array().into_iter().flatten())
        .collect();
    let missing = ["memory", "decode", "upload", "step"]
        .into_iter()
        .find(|what| !measured.iter().any(|value| value["what"] == *what));
    match missing {
        _ if json["is_amd_gpu"] != false => Some("it reports the look-alike as a GPU".into()),
        Some(what) => Some(format!("it has no measurement of {what}")),
        None => None,
    }
}
