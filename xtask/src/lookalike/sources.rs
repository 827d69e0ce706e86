//! The kernel files, and the compilation units made from them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::host;

/// The folder `kernels/` of the repository.
pub fn dir() -> PathBuf {
    host::root().join("kernels")
}

/// Sorted names of the kernel files, without extension.
pub fn names() -> Result<Vec<String>> {
    let dir = dir();
    let mut names = Vec::new();
    for entry in fs::read_dir(&dir).map_err(Error::at(&dir))? {
        let path = entry.map_err(Error::at(&dir))?.path();
        if path.extension().is_some_and(|ending| ending == "hip") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// Headers of `prelude/` that begin with these are for look-alikes and NVIDIA.
const OTHER_MACHINES: [&str; 2] = ["host", "nvidia"];

/// Every file that code objects may be made from, sorted: kernel files and headers.
pub fn inputs(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(Error::at(&folder))? {
            let path = entry.map_err(Error::at(&folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_source = path.extension().is_some_and(|ending| ending == "hip" || ending == "h");
            let is_others = folder == dir.join("prelude")
                && OTHER_MACHINES.iter().any(|machine| name.starts_with(machine));
            if path.is_dir() {
                folders.push(path);
            } else if is_source && !is_others {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// C++ without comments to the end of a line, blank lines and trailing blanks: equal for two files that compile alike. Code
/// objects hold no line numbers, so a reworded comment makes none of them stale.
pub fn without_comments(text: &str) -> String {
    let mut code = String::new();
    for line in text.lines() {
        // A `//` inside a string has an odd number of quotes before it.
        let comment = line.match_indices("//").find(|(at, _)| line[..*at].matches('"').count() % 2 == 0);
        let line = comment.map_or(line, |(at, _)| &line[..at]).trim_end();
        if !line.is_empty() {
            code.push_str(line);
            code.push('\n');
        }
    }
    code
}

/// Writes `<into>/kernel_<name>.<ending>`, which holds the kernel file in a namespace of its own. So helpers of the
/// same name in two files do not collide. Entry points are `extern "C"` and keep their names.
pub fn write_unit(into: &Path, name: &str, ending: &str) -> Result<PathBuf> {
    fs::create_dir_all(into).map_err(Error::at(into))?;
    let path = into.join(format!("kernel_{name}.{ending}"));
    let text = format!(
        "#include \"prelude/prelude.h\"\nnamespace file_{name} {{\n#include \"kernels/{name}.hip\"\n}}\n"
    );
    // An unchanged file keeps its modification time.
    if fs::read_to_string(&path).is_ok_and(|old| old == text) {
        return Ok(path);
    }
    fs::write(&path, text).map_err(Error::at(&path))?;
    Ok(path)
}

/// Include paths of `prelude/...` and `kernels/x.hip`, for the kernels of `root`.
pub fn include_flags(root: &Path) -> [String; 4] {
    ["-I".into(), root.join("kernels").display().to_string(), "-I".into(), root.display().to_string()]
}
