//! `pull`: fetches models over HTTP into a directory of the user's. The daemon has no network, so the client does that.

mod error;
mod hub;
mod part;
mod source;
mod web;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rocmforge_client::printable;
use serde::Serialize;

use super::report::{Failure, Output, show_progress};
use super::tables::{Out, bytes};

pub use error::PullError;
use part::Part;
use source::{Named, Wanted};
use web::Web;

/// Variable with the token that a hub asks for; it is sent to the hub alone.
const TOKEN_VARIABLE: &str = "ROCMFORGE_HUB_TOKEN";

/// A line of progress is written at most so often.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Arguments of `pull`.
#[derive(Debug, Args)]
#[command(
    after_help = "A name of a hub is OWNER/REPOSITORY, with :TAG if it has several models, and with @REVISION. The hub tells each file's\n\
        sha256, which is checked. Of a URL it is checked with --sha256, and printed otherwise.\n\n\
        A transfer that breaks off goes on where it stopped, also with the same command later. The file appears under its name\n\
        when it is whole. A daemon serves it if the directory is one of its `models`; every daemon takes it by `load FILE`.\n\
        A hub's address is read from ROCMFORGE_HUB, its token from ROCMFORGE_HUB_TOKEN.\n\n\
        Examples:\n  rocmforge-client pull OWNER/REPOSITORY:Q4_K_M\n  \
        rocmforge-client pull https://example.org/story.gguf --sha256 9f86d081884c7d65...\n  \
        rocmforge-client pull OWNER/REPOSITORY/story.gguf --json | jq -r '.files[].path'"
)]
pub struct PullArguments {
    /// A URL of a GGUF file, or a name of the hub's
    pub source: String,
    /// Name of the model [default: that of the file]
    #[arg(long)]
    pub name: Option<String>,
    /// Directory to write to [default: $XDG_DATA_HOME/rocmforge/models, or ~/.local/share/rocmforge/models]
    #[arg(long, value_name = "DIRECTORY")]
    pub models: Option<PathBuf>,
    /// The file's sha256; another file is refused
    #[arg(long, value_name = "HEX", value_parser = source::digest)]
    pub sha256: Option<[u8; 32]>,
    /// Address of the hub of names; a URL needs none
    #[arg(long, env = "ROCMFORGE_HUB", value_name = "URL")]
    pub hub: Option<String>,
}

/// The fetched files of a model: one, or its parts.
#[derive(Debug, Serialize)]
pub struct PulledModel {
    /// The model's name for a daemon that serves the directory.
    name: String,
    files: Vec<PulledFile>,
}

/// A file that is whole.
#[derive(Debug, Serialize)]
pub struct PulledFile {
    path: PathBuf,
    url: String,
    bytes: u64,
    sha256: String,
    /// The digest was known before, and is equal.
    checked: bool,
    /// Bytes that were there from an earlier transfer; all of them if the whole file was.
    resumed_bytes: u64,
}

/// Fetches what the arguments name.
///
/// # Errors
/// [`PullError`], as [`Failure::Pull`].
pub fn pull(arguments: &PullArguments, output: Output) -> Result<PulledModel, Failure> {
    let told = !output.json && io::stderr().is_terminal();
    let mut progress = Progress { told, next: Instant::now() };
    let outcome = fetch(arguments, &mut progress);
    // The next message or error begins on a line of its own.
    if told {
        show_progress("");
    }
    outcome.map_err(|error| Failure::Pull(Box::new(error)))
}

fn fetch(arguments: &PullArguments, progress: &mut Progress) -> Result<PulledModel, PullError> {
    let directory = match &arguments.models {
        Some(directory) => directory.clone(),
        None => own_directory()?,
    };
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
    let wanted = match source::parse(&arguments.source)? {
        Named::Url(url) => vec![Wanted::of_url(&url, arguments.sha256)],
        Named::Hub(place) => {
            let no_hub = || PullError::NoHub { repository: place.repository.clone() };
            let hub = arguments.hub.as_deref().filter(|hub| !hub.is_empty()).ok_or_else(no_hub)?;
            let listed = hub::files(hub, &place, token.as_deref())?;
            match (listed.as_slice(), arguments.sha256) {
                ([one], Some(sha256)) => vec![Wanted { sha256: Some(sha256), ..one.clone() }],
                (several, Some(_)) => return Err(PullError::OneDigest { files: several.len() }),
                (_, None) => listed,
            }
        }
    };
    let wanted = source::renamed(wanted, arguments.name.as_deref())?;
    let files = wanted.iter().map(|file| one(file, &directory, token.as_deref(), progress));
    let files = files.collect::<Result<Vec<_>, _>>()?;
    Ok(PulledModel { name: source::model_name(&wanted), files })
}

/// Fetches one file.
fn one(
    wanted: &Wanted,
    directory: &Path,
    token: Option<&str>,
    progress: &mut Progress,
) -> Result<PulledFile, PullError> {
    let path = directory.join(&wanted.file);
    let done = |sha256: [u8; 32], bytes, resumed_bytes| PulledFile {
        path: path.clone(),
        url: wanted.url.clone(),
        bytes,
        sha256: source::hex(&sha256),
        checked: wanted.sha256.is_some(),
        resumed_bytes,
    };
    if path.exists() {
        let (found, bytes) = part::digest_of(&path)?;
        return match wanted.sha256 {
            Some(sha256) if sha256 == found => Ok(done(found, bytes, bytes)),
            sha256 => Err(PullError::Exists { path, other: sha256.is_some() }),
        };
    }
    let web = Web::new(wanted, token)?;
    let mut part = Part::open(&path, wanted)?;
    let resumed = part.len();
    let shown = &mut |bytes, total| progress.show(&wanted.file, bytes, total);
    if let Err(error) = web::transfer(&web, wanted, &mut part, shown) {
        part.leave();
        return Err(error);
    }
    let (sha256, bytes) = part.finish(wanted)?;
    Ok(done(sha256, bytes, resumed.min(bytes)))
}

/// `$XDG_DATA_HOME/rocmforge/models`, else `~/.local/share/rocmforge/models`.
fn own_directory() -> Result<PathBuf, PullError> {
    let named = |variable| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = named("XDG_DATA_HOME").or_else(|| Some(named("HOME")?.join(".local/share")));
    Ok(data.ok_or(PullError::NoDirectory)?.join("rocmforge/models"))
}

/// Writes how far a transfer is.
struct Progress {
    told: bool,
    next: Instant,
}

impl Progress {
    fn show(&mut self, file: &str, done: u64, total: Option<u64>) {
        if !self.told || Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + PROGRESS_EVERY;
        let of = total.map_or(String::new(), |total| {
            let percent = u128::from(done) * 100 / u128::from(total.max(1));
            format!(" of {} ({percent} %)", bytes(total))
        });
        show_progress(&format!("{}: {}{of}", printable(file), bytes(done)));
    }
}

/// Writes the result in words.
pub fn shown(out: Out<'_>, model: &PulledModel) -> io::Result<()> {
    for file in &model.files {
        let digest = if file.checked { "sha256 is right" } else { "not checked" };
        writeln!(
            out,
            "{}: {}, {digest}: {}",
            printable(&file.path.to_string_lossy()),
            bytes(file.bytes),
            file.sha256
        )?;
    }
    writeln!(out, "the model's name is {}", printable(&model.name))
}
