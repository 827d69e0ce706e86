//! Documents that only packages have: the changelog in each one's form, and licences of what programs contain.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::history::Entry;
use super::{gzip, licences};
use crate::error::{Error, Result};
use crate::host;

/// Writes `changelog`, `changelog.Debian.gz` and `third-party-licences.gz` into `dir`.
///
/// # Errors
/// Errors of git, cargo and gzip, of reading and writing.
pub fn write(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(Error::at(dir))?;
    let release = super::Release::of(host::root(), dir.to_owned())?;
    let debian = of_debian(&release.name, &release.maintainer, &release.history)?;
    for (name, text) in [
        ("changelog", of_people(&release.history)?),
        ("changelog.Debian", debian),
        ("third-party-licences", licences::collect()?),
    ] {
        let path = dir.join(name);
        fs::write(&path, text).map_err(Error::at(&path))?;
        if name != "changelog" {
            gzip(&path)?;
        }
    }
    Ok(())
}

/// Compresses the files of `dir`, as packages have manual pages.
///
/// # Errors
/// Errors of reading the folder, and of gzip.
pub fn compress(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        gzip(&entry.map_err(Error::at(dir))?.path())?;
    }
    Ok(())
}

/// As people read it, in Markdown.
pub(super) fn of_people(entries: &[Entry]) -> Result<String> {
    let mut text = "# Changes\n".to_owned();
    for entry in entries {
        let _ = writeln!(text, "\n## {} ({})\n", entry.version, date(entry.time, "+%Y-%m-%d")?);
        entry.changes.iter().for_each(|change| {
            let _ = writeln!(text, "- {change}");
        });
    }
    Ok(text)
}

/// In the form of deb-changelog(5).
pub(super) fn of_debian(name: &str, maintainer: &str, entries: &[Entry]) -> Result<String> {
    let mut text = String::new();
    for entry in entries {
        let _ = writeln!(text, "{name} ({}-1) unstable; urgency=medium\n", entry.version);
        entry.changes.iter().for_each(|change| {
            let _ = writeln!(text, "  * {}", wrapped(change, 76).join("\n    "));
        });
        let _ = writeln!(text, "\n -- {maintainer}  {}\n", date(entry.time, "+%a, %d %b %Y %H:%M:%S +0000")?);
    }
    Ok(text)
}

/// Lines of at most `width` characters, unless a word has more.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// In the form of an RPM's specification.
pub(super) fn of_rpm(maintainer: &str, entries: &[Entry]) -> Result<String> {
    let mut text = "%changelog\n".to_owned();
    for entry in entries {
        let date = date(entry.time, "+%a %b %d %Y")?;
        let _ = writeln!(text, "* {date} {maintainer} - {}-1", entry.version);
        entry.changes.iter().for_each(|change| {
            let _ = writeln!(text, "- {}", change.replace('%', "%%"));
        });
        text.push('\n');
    }
    Ok(text)
}

/// A moment in UTC, in English, in the form of date(1).
fn date(time: u64, form: &str) -> Result<String> {
    let mut command = Command::new("date");
    command.args(["--utc", &format!("--date=@{time}"), form]).env("LC_ALL", "C");
    host::read(&mut command).map(|text| text.trim_end().to_owned())
}
