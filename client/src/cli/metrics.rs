//! Metrics for Prometheus: to standard output, or to a file that is replaced atomically.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rocmforge_client::{Client, metrics};
use serde::Serialize;

use super::report::{Failure, Output};

/// A page of metrics.
#[derive(Debug, Serialize)]
struct Page {
    prometheus: String,
}

/// Writes the page once, or again after each period.
pub fn run(client: &Client, file: Option<&Path>, period: Option<u32>, output: Output) -> Result<(), Failure> {
    loop {
        let page = Page { prometheus: metrics::prometheus(&client.status()?, &client.residency()?) };
        match file {
            None => output.show(&page, |out, page| out.write_all(page.prometheus.as_bytes()))?,
            Some(file) => replace(file, &page.prometheus)
                .map_err(|error| Failure::File(format!("{}: {error}", file.display())))?,
        }
        match period {
            None => return Ok(()),
            Some(seconds) => std::thread::sleep(Duration::from_secs(seconds.into())),
        }
    }
}

/// Replaces the file by renaming, so that a reader sees the old page or the new one, whole. The file is readable for
/// all, whatever the umask.
fn replace(file: &Path, page: &str) -> io::Result<()> {
    let name = file.file_name().ok_or_else(|| io::Error::other("the path names no file"))?;
    // The collector looks for names that end in .prom; this one does not.
    let beside = file.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let written = fs::write(&beside, page)
        .and_then(|()| fs::set_permissions(&beside, Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&beside, file));
    written.inspect_err(|_| {
        // If it was never created there is nothing to remove.
        let _ = fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_replaces_the_one_before_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rocmforge.prom");
        for page in ["one\n", "two\n"] {
            replace(&file, page).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), page);
        }
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        assert!(replace(&dir.path().join("none/rocmforge.prom"), "x").is_err());
        fs::create_dir(dir.path().join("folder")).unwrap();
        assert!(replace(&dir.path().join("folder"), "x").is_err(), "a folder is not replaced");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the file and the folder");
    }
}
