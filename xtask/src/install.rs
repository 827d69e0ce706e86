//! `cargo xtask install` and `uninstall`: installs the files of the Debian package on systems without dpkg.
//!
//! The list of files is the package's, in Cargo.toml. The commands print what the package's scripts would do, but do
//! not do it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::host::{self, Programs};
use crate::lab;

#[derive(clap::Args)]
pub struct Args {
    /// Where programs, pages and units go; with /usr or /usr/local the configuration is in /etc, else in PREFIX/etc
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Install below this directory, to be moved into place by another tool
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
    /// Use the existing output of `cargo build --release` and `cargo xtask docs`
    #[arg(long)]
    no_build: bool,
}

/// A file of the package.
#[derive(Debug, PartialEq)]
pub struct File {
    /// Path below the project's root; `target/release/` is where release builds are.
    pub source: String,
    /// Path from the root of a system, without the first `/`.
    dest: String,
    mode: u32,
}

/// Sources and destinations of the files.
pub struct Place {
    root: PathBuf,
    /// Where programs were built, and pages written.
    built: PathBuf,
    prefix: PathBuf,
    /// The root of a system, or a folder in its place.
    pub destdir: PathBuf,
}

impl Args {
    fn place(&self) -> Result<Place> {
        if !self.prefix.is_absolute() {
            let text = format!("{} is not an absolute path", self.prefix.display());
            return Err(Error::Unexpected { what: "--prefix", text });
        }
        let destdir = self.destdir.clone().unwrap_or_else(|| PathBuf::from("/"));
        Ok(Place {
            root: host::root().to_owned(),
            built: host::target_dir().join("release"),
            prefix: self.prefix.clone(),
            destdir,
        })
    }
}

/// Builds outdated files and installs every file.
///
/// # Errors
/// Errors of building, reading or writing.
pub fn install(args: &Args) -> Result<()> {
    let place = args.place()?;
    if !args.no_build {
        host::build_release()?;
        lab::run(["docs"])?;
    }
    let files = files(&place)?;
    for file in &files {
        if place.put(file)? {
            println!("{}", place.of(file).display());
        } else {
            println!("{} is kept: it was changed", place.of(file).display());
        }
    }
    if args.destdir.is_none() {
        println!(
            "\n{} files installed. To run it as a service: systemd-sysusers, systemd-tmpfiles --create, systemctl daemon-reload, then\n\
             systemctl enable --now rocmforged.socket",
            files.len()
        );
    }
    Ok(())
}

/// Removes what [`install`] with the same arguments installed.
///
/// # Errors
/// Errors of removing files.
pub fn uninstall(args: &Args) -> Result<()> {
    let place = args.place()?;
    for file in files(&place)? {
        if place.take_away(&file)? {
            println!("removed {}", place.of(&file).display());
        }
    }
    Ok(())
}

/// Every file of the package.
///
/// # Errors
/// The list cannot be read, or a pattern matches nothing.
pub fn files(place: &Place) -> Result<Vec<File>> {
    let path = place.root.join("Cargo.toml");
    let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
    let mut files = Vec::new();
    for file in listed(&text)? {
        files.extend(place.expand(file)?);
    }
    Ok(files)
}

/// The package's list. Sources may end in a pattern with one `*`; destinations may end in `/`.
///
/// # Errors
/// [`Error::Unexpected`] if the manifest has no such list.
pub fn listed(manifest: &str) -> Result<Vec<File>> {
    let wrong = |text: String| Error::Unexpected { what: "the package's assets in Cargo.toml", text };
    let manifest: toml::Table =
        manifest.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let deb = manifest.get("package").and_then(|package| package.get("metadata")?.get("deb"));
    let assets = deb.and_then(|deb| deb.get("assets")?.as_array());
    let file = |asset: &toml::Value| {
        let text = |at: usize| asset.get(at)?.as_str();
        let (source, dest) = (text(0)?.to_owned(), text(1)?.to_owned());
        Some(File { source, dest, mode: u32::from_str_radix(text(2)?, 8).ok()? })
    };
    let assets = assets.ok_or_else(|| wrong("there are no assets".into()))?;
    assets.iter().map(|asset| file(asset).ok_or_else(|| wrong(asset.to_string()))).collect()
}

impl Place {
    /// The project's files as installed with this prefix, in a folder in place of a system's root.
    pub fn below(root: &Path, programs: Programs, prefix: &str, destdir: PathBuf) -> Self {
        let built = host::target_dir().join(programs.folder());
        Self { root: root.to_owned(), built, prefix: prefix.into(), destdir }
    }

    /// As [`Place::below`], of a made-up project with programs of its own.
    #[cfg(test)]
    pub fn of_project(root: &Path, prefix: &str, destdir: PathBuf) -> Self {
        Self { root: root.to_owned(), built: root.join("target/release"), prefix: prefix.into(), destdir }
    }

    fn source(&self, file: &File) -> PathBuf {
        match file.source.strip_prefix("target/release/") {
            Some(built) => self.built.join(built),
            None => self.root.join(&file.source),
        }
    }

    /// The files that match a pattern.
    fn expand(&self, file: File) -> Result<Vec<File>> {
        let (folder, pattern) = file.source.rsplit_once('/').unwrap_or(("", &file.source));
        let Some((begin, end)) = pattern.split_once('*') else {
            let dest =
                if file.dest.ends_with('/') { format!("{}{pattern}", file.dest) } else { file.dest.clone() };
            return Ok(vec![File { dest, ..file }]);
        };
        let dir = self.source(&File { source: folder.to_owned(), dest: String::new(), mode: 0 });
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(Error::at(&dir))? {
            let name = entry.map_err(Error::at(&dir))?.file_name().to_string_lossy().into_owned();
            if name.starts_with(begin) && name.ends_with(end) && name.len() >= begin.len() + end.len() {
                let (source, dest) = (format!("{folder}/{name}"), format!("{}{name}", file.dest));
                found.push(File { source, dest, mode: file.mode });
            }
        }
        if found.is_empty() {
            let text = format!("no file in {} matches {pattern}: run `cargo xtask docs`", dir.display());
            return Err(Error::Unexpected { what: "the documentation", text });
        }
        found.sort_by(|a, b| a.source.cmp(&b.source));
        Ok(found)
    }

    /// Directory of configurations.
    fn etc(&self) -> PathBuf {
        let system = ["/usr", "/usr/local"].iter().any(|prefix| self.prefix == Path::new(prefix));
        if system { PathBuf::from("/etc") } else { self.prefix.join("etc") }
    }

    /// Path of a file in the installed system.
    fn installed(&self, file: &File) -> PathBuf {
        match (file.dest.strip_prefix("usr/"), file.dest.strip_prefix("etc/")) {
            // Debian's zsh looks for packages' completions elsewhere than all others do.
            (Some(rest), _) if self.prefix != Path::new("/usr") => {
                self.prefix.join(rest.replace("zsh/vendor-completions", "zsh/site-functions"))
            }
            (Some(rest), _) => self.prefix.join(rest),
            (_, Some(rest)) => self.etc().join(rest),
            _ => Path::new("/").join(&file.dest),
        }
    }

    /// Path of a file now, below `destdir`.
    pub fn of(&self, file: &File) -> PathBuf {
        let installed = self.installed(file);
        self.destdir.join(installed.strip_prefix("/").unwrap_or(&installed))
    }

    /// Content of an installed file: units get the real paths of programs and configuration.
    fn content(&self, file: &File) -> Result<Vec<u8>> {
        let source = self.source(file);
        let content = fs::read(&source).map_err(Error::at(&source))?;
        if !file.source.starts_with("systemd/") || self.prefix == Path::new("/usr") {
            return Ok(content);
        }
        let text = String::from_utf8_lossy(&content);
        let bin = format!("{}/rocmforge", self.prefix.join("bin").display());
        let etc = format!("{}/rocmforge", self.etc().display());
        let mut text = text.replace("/usr/bin/rocmforge", &bin).replace("/etc/rocmforge", &etc);
        for folder in ["lib", "share"] {
            let ours = format!("{}/rocmforge", self.prefix.join(folder).display());
            text = text.replace(&format!("/usr/{folder}/rocmforge"), &ours);
        }
        Ok(text.into_bytes())
    }

    /// Whether the administrator changed a configuration file.
    fn is_changed(&self, file: &File) -> Result<bool> {
        let to = self.of(file);
        if !file.dest.starts_with("etc/") {
            return Ok(false);
        }
        match fs::read(&to) {
            Ok(there) => Ok(there != self.content(file)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::at(&to)(error)),
        }
    }

    /// Installs a file. Returns false if it keeps an administrator's changed configuration. A running program is
    /// replaced, not overwritten.
    ///
    /// # Errors
    /// Errors of reading and writing.
    pub fn put(&self, file: &File) -> Result<bool> {
        if self.is_changed(file)? {
            return Ok(false);
        }
        let to = self.of(file);
        let folder = to.parent().unwrap_or(&self.destdir);
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
        let mut name = to.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let beside = to.with_file_name(name);
        fs::write(&beside, self.content(file)?).map_err(Error::at(&beside))?;
        // Stripped like the package's files; without strip, the file is only larger.
        if file.source.starts_with("target/") && file.mode & 0o111 != 0 {
            let _ = host::works(Command::new("strip").arg(&beside));
        }
        fs::set_permissions(&beside, fs::Permissions::from_mode(file.mode)).map_err(Error::at(&beside))?;
        fs::rename(&beside, &to).map_err(Error::at(&to))?;
        Ok(true)
    }

    /// Removes a file. Returns false if there is none, or if an administrator changed it. Our own folders are removed
    /// with their last file.
    fn take_away(&self, file: &File) -> Result<bool> {
        if self.is_changed(file)? {
            return Ok(false);
        }
        let to = self.of(file);
        match fs::remove_file(&to) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            removed => removed.map_err(Error::at(&to))?,
        }
        let named = |part: &std::ffi::OsStr| part.to_string_lossy().starts_with("rocmforge");
        let ours =
            |folder: &&Path| folder.strip_prefix(&self.destdir).is_ok_and(|below| below.iter().any(named));
        for folder in to.ancestors().skip(1).take_while(ours) {
            if fs::remove_dir(folder).is_err() {
                break; // the folder is not empty
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use std::collections::BTreeSet;

    use super::*;

    /// The real list, with made-up files in a project of its own.
    fn project(prefix: &str) -> (tempfile::TempDir, Place) {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().join("project");
        let manifest = fs::read_to_string(host::root().join("Cargo.toml")).expect("Cargo.toml");
        for file in listed(&manifest).expect("a list") {
            let path = root.join(file.source.replace('*', "made-up"));
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(
                &path,
                format!("{}\nExecStart=/usr/bin/rocmforged --config /etc/rocmforge/c\n", file.source),
            )
            .expect("a file");
        }
        fs::write(root.join("Cargo.toml"), manifest).expect("Cargo.toml");
        let place = Place {
            built: root.join("target/release"),
            root,
            prefix: prefix.into(),
            destdir: dir.path().join("system"),
        };
        (dir, place)
    }

    fn found(below: &Path) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut folders = vec![below.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else {
                    let path = entry.path();
                    let below = path.strip_prefix(below).expect("below");
                    found.insert(below.to_string_lossy().into_owned());
                }
            }
        }
        found
    }

    #[test]
    fn installed_files_are_those_of_the_package_and_go_again() {
        let (_dir, place) = project("/usr");
        let files = files(&place).expect("a list");
        for file in &files {
            assert!(place.put(file).expect("written"));
        }
        let manifest = fs::read_to_string(host::root().join("Cargo.toml")).expect("Cargo.toml");
        let packaged: BTreeSet<String> = listed(&manifest)
            .expect("a list")
            .into_iter()
            .map(|file| match file.dest.strip_suffix('/') {
                Some(folder) => {
                    let name = file.source.rsplit('/').next().expect("a name").replace('*', "made-up");
                    format!("{folder}/{name}")
                }
                None => file.dest,
            })
            .collect();
        assert_eq!(found(&place.destdir), packaged);
        for file in &files {
            let to = place.of(file);
            assert_eq!(fs::read(&to).expect("there"), fs::read(place.source(file)).expect("there"));
            assert_eq!(
                fs::metadata(&to).expect("there").permissions().mode() & 0o7777,
                file.mode,
                "{file:?}"
            );
        }
        let config = place.destdir.join("etc/rocmforge/config.toml");
        fs::write(&config, "mine").expect("written");
        for file in &files {
            let changed = file.dest == "etc/rocmforge/config.toml";
            assert_eq!(place.put(file).expect("written"), !changed, "{file:?}");
            place.take_away(file).expect("removed");
        }
        assert_eq!(found(&place.destdir), BTreeSet::from(["etc/rocmforge/config.toml".to_owned()]));
        assert_eq!(fs::read_to_string(&config).expect("kept"), "mine");
    }

    #[test]
    fn units_name_what_lies_elsewhere() {
        for (prefix, etc) in [("/usr/local", "/etc"), ("/opt/forge", "/opt/forge/etc")] {
            let (_dir, place) = project(prefix);
            let files = files(&place).expect("a list");
            let unit = files.iter().find(|file| file.source.ends_with("rocmforged.service")).expect("a unit");
            let text = String::from_utf8(place.content(unit).expect("read")).expect("text");
            let start = format!("ExecStart={prefix}/bin/rocmforged --config {etc}/rocmforge/c\n");
            assert!(text.ends_with(&start), "{text}");
            let config = files.iter().find(|file| file.dest.starts_with("etc/")).expect("a configuration");
            assert_eq!(place.installed(config), Path::new(etc).join("rocmforge/config.toml"));
        }
    }
}
