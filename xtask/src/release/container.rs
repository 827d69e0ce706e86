//! The recipe of a container image: a small Debian with the Debian package.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

const RECIPE: &str = include_str!("Containerfile");
const NAME: &str = "Containerfile";

/// Writes the recipe for the package `deb`, which is in the same folder; returns its name.
///
/// # Errors
/// [`Error::Io`].
pub fn write(folder: &Path, deb: &str) -> Result<String> {
    let path = folder.join(NAME);
    fs::write(&path, RECIPE.replace("@DEB@", deb)).map_err(Error::at(&path))?;
    Ok(NAME.to_owned())
}
