//! `cargo xtask release`: everything that people install, from one build, with the same bytes for the same commit.
//!
//! A tar archive, a Debian package, an RPM package and a recipe of a container image, which installs the Debian
//! package. Their files are those of the list in Cargo.toml. `documents` writes the changelog and the licences.

pub mod container;
pub mod deb;
pub mod documents;
mod history;
mod licences;
mod rpm;
mod sums;
mod tarball;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::host::{self, Programs};
use crate::install::{self, Place};
use crate::lab;
use history::{Commit, Entry};
use sums::Written;

const EXAMPLES: &str = "\
Examples:
  cargo xtask release                     builds the release programs and writes all packages
  cargo xtask release --no-build          packages what `cargo build --release` built
  cargo xtask release --tested            packages unoptimised programs, to try the packages
  cargo xtask release --json --out DIR    prints names, sizes and digests for a script

Exit status: 0 all packages are written, 1 an error, 130 interrupted.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Write into this folder; packages of an earlier run in it are replaced [default: release-packages in the target
    /// folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package the programs as they lie there
    #[arg(long)]
    no_build: bool,
    /// Package the programs that the tests run instead of release programs
    #[arg(long)]
    tested: bool,
    /// Package a tree with changes that no commit has
    #[arg(long)]
    allow_dirty: bool,
    /// Print one JSON object: version, commit, folder, and each file with its size and SHA-256
    #[arg(long)]
    json: bool,
}

/// The facts that all packages tell.
pub(crate) struct Release {
    pub name: String,
    pub version: String,
    pub description: String,
    /// Several lines, as the Debian package has them.
    pub about: String,
    pub maintainer: String,
    pub licence: String,
    pub commit: Commit,
    /// Changes by version.
    pub history: Vec<Entry>,
    /// The sources.
    pub root: PathBuf,
    /// Where packages are written.
    pub out: PathBuf,
}

/// Builds, packages, and prints what was written.
///
/// # Errors
/// Errors of building, of tools that are missing, of reading and writing.
pub fn run(args: &Args) -> Result<()> {
    let programs = if args.tested { Programs::Tested } else { Programs::Release };
    let out = args.out.clone().unwrap_or_else(|| host::target_dir().join("release-packages"));
    let release = Release::of(host::root(), out)?;
    if !args.allow_dirty {
        history::check_clean(host::root())?;
    }
    let written = write(&release, programs, !args.no_build)?;
    report(&release, &written, args.json);
    Ok(())
}

/// As [`run`], for the check: packages these programs as they are built. Returns the files.
///
/// # Errors
/// As [`run`].
pub fn run_with(programs: Programs, out: PathBuf) -> Result<Vec<PathBuf>> {
    let release = Release::of(host::root(), out)?;
    let written = write(&release, programs, false)?;
    Ok(written.into_iter().map(|file| release.out.join(file.name)).collect())
}

impl Release {
    /// Reads the manifest and the history of the project in `root`.
    fn of(root: &Path, out: PathBuf) -> Result<Self> {
        let path = root.join("Cargo.toml");
        let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
        let wrong = |text: String| Error::Unexpected { what: "Cargo.toml", text };
        let manifest: toml::Table = text.parse().map_err(|e: toml::de::Error| wrong(e.to_string()))?;
        let text = |keys: &[&str]| {
            let mut value = manifest.get(keys[0]);
            for key in &keys[1..] {
                value = value.and_then(|value| value.get(key));
            }
            let found = value.and_then(toml::Value::as_str).map(|text| text.trim().to_owned());
            found.ok_or_else(|| wrong(format!("{} is missing", keys.join("."))))
        };
        fs::create_dir_all(&out).map_err(Error::at(&out))?;
        let version = text(&["workspace", "package", "version"])?;
        let commit = history::last(root)?;
        Ok(Self {
            name: text(&["package", "name"])?,
            description: text(&["package", "description"])?,
            about: text(&["package", "metadata", "deb", "extended-description"])?,
            maintainer: text(&["package", "metadata", "deb", "maintainer"])?,
            licence: text(&["workspace", "package", "license"])?,
            history: history::entries(root, &version, &commit)?,
            version,
            commit,
            root: root.to_owned(),
            out: fs::canonicalize(&out).map_err(Error::at(&out))?,
        })
    }
}

/// Writes all packages. Each step tells its name and then its time.
fn write(release: &Release, programs: Programs, build: bool) -> Result<Vec<Written>> {
    host::ensure("xz", "xz-utils")?;
    host::ensure("rpmbuild", "rpm")?;
    let docs = host::target_dir().join(programs.folder()).join("docs");
    if build {
        step("programs", || build_programs(programs))?;
    }
    step("pages, changelog, licences", || {
        lab::run_aside(["docs".as_ref(), "--out".as_ref(), docs.as_os_str()])
    })?;
    sums::clear(&release.out)?;
    let folder = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let place = |prefix, name| Place::below(host::root(), programs, prefix, folder.path().join(name));
    let (usr, local) = (place("/usr", "usr"), place("/usr/local", "local"));
    let tarball = step("tar archive", || tarball::write(release, &local, &docs))?;
    let deb = step("Debian package", || {
        let name = format!("{}_{}-1_{}.deb", release.name, release.version, deb::architecture()?);
        deb::write(&release.out.join(&name), programs, Some(&release.commit)).map(|()| name)
    })?;
    let rpm = step("RPM package", || rpm::write(release, &usr, &docs))?;
    let recipe = container::write(&release.out, &deb)?;
    let changelog =
        sums::copy(&docs.join("doc/changelog"), &release.out.join("CHANGELOG.md"), "CHANGELOG.md")?;
    sums::write(&release.out, &[tarball, deb, rpm, recipe, changelog])
}

/// Without the paths of this machine, which panics would name: the same bytes wherever the sources lie.
fn build_programs(programs: Programs) -> Result<()> {
    if programs == Programs::Tested {
        return programs.build().map(drop);
    }
    let home = std::env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    );
    let flags = format!(
        "--remap-path-prefix={}=/cargo\u{1f}--remap-path-prefix={}=/rocmforge",
        home.display(),
        host::root().display()
    );
    host::run(host::cargo().args(["build", "--release"]).env("CARGO_ENCODED_RUSTFLAGS", flags))
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("{name} ...");
    let started = Instant::now();
    let done = work()?;
    eprintln!("{name}: done after {:.1} s", started.elapsed().as_secs_f64());
    host::check_interrupted()?;
    Ok(done)
}

fn report(release: &Release, written: &[Written], json: bool) {
    if json {
        let files: Vec<_> = written
            .iter()
            .map(|file| serde_json::json!({ "name": file.name, "bytes": file.bytes, "sha256": file.sha256 }))
            .collect();
        let all = serde_json::json!({
            "version": release.version, "commit": release.commit.id, "time": release.commit.time,
            "folder": release.out, "files": files,
        });
        println!("{all}");
        return;
    }
    println!("{} {} of {}, in {}:", release.name, release.version, release.commit.id, release.out.display());
    for Written { name, bytes, .. } in written {
        println!("{:9.1} kB  {name}", *bytes as f64 / 1e3);
    }
    println!("`sha256sum --check SHA256SUMS` checks them; Containerfile says how to run the image");
}

/// The files of the list as they lie in a system, with their permissions.
fn lay_out(place: &Place) -> Result<()> {
    for file in install::files(place)? {
        place.put(&file)?;
    }
    Ok(())
}

/// `gzip` without the name and the time of its input, so that equal inputs give equal outputs.
fn gzip(path: &Path) -> Result<()> {
    host::run(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(path))
}
