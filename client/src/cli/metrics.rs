//! Metrics for Prometheus: to standard output, or into a file that is replaced at once.

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

/// Writes the page, with a period again and again.
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

/// Who reads the file finds the page before or this one, whole. Readable for all, whatever the umask is.
fn replace(file: &Path, page: &str) -> io::Result<()> {
    let name = file.file_name().ok_or_else(|| io::Error::other("it names no file"))?;
    // What the collector looks for ends in .prom; this does not.
    let beside = file.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let written = fs::write(&beside, page)
        .and_then(|()| fs::set_permissions(&beside, Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&beside, file));
    written.inspect_err(|_| {
        // Where it was never made there is nothing to remove.
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
