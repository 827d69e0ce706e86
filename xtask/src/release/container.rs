//! The recipe of a container image: a small Debian with the Debian package.

use std::fs;

use super::Release;
use crate::error::{Error, Result};

const RECIPE: &str = include_str!("Containerfile");
const NAME: &str = "Containerfile";

/// Writes the recipe for the package `deb`; returns its name.
pub fn write(release: &Release, deb: &str) -> Result<String> {
    let path = release.out.join(NAME);
    fs::write(&path, RECIPE.replace("@DEB@", deb)).map_err(Error::at(&path))?;
    Ok(NAME.to_owned())
}
