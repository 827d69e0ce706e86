//! The tar archive: programs that run where it is unpacked, and a script that installs them into /usr/local.

use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Release, lay_out};
use crate::error::{Error, Result};
use crate::host;
use crate::install::Place;

const INSTALLER: &str = include_str!("install.sh");

/// Writes the archive of the files that `place` puts below /usr/local; returns its name.
pub fn write(release: &Release, place: &Place, docs: &Path) -> Result<String> {
    let folder = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let top = format!("{}-{}-linux-{ARCH}", release.name, release.version);
    let root = folder.path().join(&top);
    lay_out(place)?;
    fs::rename(place.destdir.join("usr/local"), &root).map_err(Error::at(&root))?;
    fs::rename(place.destdir.join("etc"), root.join("etc")).map_err(Error::at(&root))?;
    let project = &release.root;
    for (from, name) in [
        (project.join("README.md"), "README.md"),
        (project.join("SECURITY.md"), "SECURITY.md"),
        (project.join("LICENSE-MIT"), "LICENSE-MIT"),
        (project.join("LICENSE-APACHE"), "LICENSE-APACHE"),
        (docs.join("doc/changelog"), "CHANGELOG.md"),
    ] {
        fs::copy(&from, root.join(name)).map_err(Error::at(&from))?;
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o644)).map_err(Error::at(&root))?;
    }
    let installer = root.join("install.sh");
    fs::write(&installer, INSTALLER).map_err(Error::at(&installer))?;
    fs::set_permissions(&installer, fs::Permissions::from_mode(0o755)).map_err(Error::at(&installer))?;
    let name = format!("{top}.tar.xz");
    pack(folder.path(), &top, &release.out.join(&name), release.commit.time)?;
    Ok(name)
}

/// Packs a folder: names in order, one owner, one time, and no number of threads that could change the bytes.
fn pack(folder: &Path, top: &str, to: &Path, time: u64) -> Result<()> {
    let file = fs::File::create(to).map_err(Error::at(to))?;
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(folder).args([
        "--create",
        "--format=ustar",
        "--sort=name",
        "--owner=root:0",
        "--group=root:0",
    ]);
    tar.args([&format!("--mtime=@{time}"), "--mode=u+rwX,go+rX,go-w", top])
        .env("LC_ALL", "C")
        .stdout(Stdio::piped());
    let shown = host::shown(&tar);
    let mut packing = tar.spawn().map_err(Error::io(shown.clone()))?;
    let mut xz = Command::new("xz");
    xz.args(["-6", "--threads=1", "--stdout"]).stdout(file);
    if let Some(packed) = packing.stdout.take() {
        xz.stdin(packed);
    }
    let compressed = host::run(&mut xz);
    let status = packing.wait().map_err(Error::io(shown.clone()))?;
    compressed?;
    if status.success() { Ok(()) } else { Err(Error::Command { command: shown, status }) }
}
