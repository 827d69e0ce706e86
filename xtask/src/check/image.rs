//! The container image of a release, built by its recipe. `tests/boot/image` says how it is tried.

use std::fs;
use std::process::Command;

use crate::error::{Error, Result};
use crate::host::{self, Programs};
use crate::{boot, release};

/// Programs that the script calls, with their Debian packages.
const TOOLS: [(&str, &str); 3] = [("podman", "podman"), ("crun", "crun"), ("mmdebstrap", "mmdebstrap")];

/// Builds the image with release programs, and asks a model through it.
pub fn run() -> Result<()> {
    if !host::is_root() {
        return Err(Error::Root { what: "an image from a base that is made here" });
    }
    for (program, package) in TOOLS {
        host::ensure(program, package)?;
    }
    let folder = host::target_dir().join("check-image");
    fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
    let deb = "rocmforge.deb";
    boot::package(&folder.join(deb), Programs::Release)?;
    release::container::write(&folder, deb)?;
    let programs = host::target_dir().join(Programs::Release.folder());
    let model = host::root().join("tests/models").join(boot::MODEL);
    let mut script = Command::new(host::root().join("tests/boot/image"));
    host::run(script.args([folder, programs.join("rocmforge-client"), model]))
}
