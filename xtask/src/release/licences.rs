//! Licences of the crates that the programs contain: most ask that their notice goes with every copy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::host;

/// First words of the names of files with licences and notices, in capitals.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// One text: the crates with their licences, then each different text of a licence once.
///
/// # Errors
/// Errors of cargo, and of reading crates' files.
pub fn collect() -> Result<String> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let json = host::read(host::cargo().args([
        "metadata",
        "--format-version=1",
        "--locked",
        "--filter-platform",
        &target,
    ]))?;
    let wrong = |what: &str| Error::Unexpected { what: "cargo metadata", text: what.to_owned() };
    let metadata: Value = serde_json::from_str(&json).map_err(|error| wrong(&error.to_string()))?;
    let packages = metadata["packages"].as_array().ok_or_else(|| wrong("there are no packages"))?;
    let contained = contained(&metadata).ok_or_else(|| wrong("there is no graph"))?;
    // The texts, each with the crates that have it.
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut list = String::new();
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        if !contained.contains(text("id")) {
            continue;
        }
        let name = format!("{} {}", text("name"), text("version"));
        let _ = writeln!(list, "{name}: {}", package["license"].as_str().unwrap_or("see its text below"));
        for licence in of_crate(Path::new(text("manifest_path")))? {
            texts.entry(licence).or_default().insert(name.clone());
        }
    }
    let mut all = format!(
        "The programs contain the crates below, and Rust's standard library (MIT OR Apache-2.0).\n\n{list}"
    );
    for (text, crates) in texts {
        let crates: Vec<String> = crates.into_iter().collect();
        let _ = write!(all, "\n{}\n{}\n\n{}\n", "-".repeat(80), crates.join(", "), text.trim_end());
    }
    Ok(all)
}

/// Ids of the packages that the programs are linked with: what default members depend on, except for building and tests.
fn contained(metadata: &Value) -> Option<BTreeSet<&str>> {
    let nodes: BTreeMap<&str, &Value> = metadata["resolve"]["nodes"]
        .as_array()?
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let mut found = BTreeSet::new();
    let mut next: Vec<&str> =
        metadata["workspace_default_members"].as_array()?.iter().filter_map(Value::as_str).collect();
    while let Some(id) = next.pop() {
        if !found.insert(id) {
            continue;
        }
        for dependency in nodes.get(id)?["deps"].as_array()? {
            let linked = |kind: &Value| kind["kind"].is_null();
            if dependency["dep_kinds"].as_array()?.iter().any(linked) {
                next.push(dependency["pkg"].as_str()?);
            }
        }
    }
    Some(found)
}

/// The licences and notices beside a crate's manifest, in the order of their names.
fn of_crate(manifest: &Path) -> Result<Vec<String>> {
    let dir = manifest.parent().unwrap_or(manifest);
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        let path = entry.map_err(Error::at(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
        if path.is_file() && NAMES.iter().any(|begin| name.starts_with(begin)) {
            paths.push(path);
        }
    }
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).map_err(Error::at(path))?;
        Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n").trim_end().to_owned())
    };
    paths.iter().map(read).collect()
}
