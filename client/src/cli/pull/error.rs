//! Why a model could not be fetched.

use std::io;
use std::path::PathBuf;

use super::source::hex;

/// Why a model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The source is neither a URL nor a name.
    #[error("{source_text:?} is neither a URL nor a name of a hub, OWNER/REPOSITORY: {reason}")]
    Source {
        /// The argument.
        source_text: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// The file would have a name that no model can have.
    #[error("{file:?} cannot be a model's file: {reason}; give it a name with --name")]
    Name {
        /// The name.
        file: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// A name of a hub, and no hub is named.
    #[error(
        "{repository} is a name of a hub, and no hub is known: set ROCMFORGE_HUB or --hub to its address, or give the file's URL"
    )]
    NoHub {
        /// Owner and repository.
        repository: String,
    },
    /// One digest for several files.
    #[error(
        "--sha256 is of one file, and the model has {files}: the hub's own digests are checked without it"
    )]
    OneDigest {
        /// Number of the model's files.
        files: usize,
    },
    /// A URL that anybody on the way can answer, without a digest that would tell.
    #[error(
        "{url} is not encrypted, so anybody on the way could send another file: use https, or give --sha256"
    )]
    Unprotected {
        /// The URL.
        url: String,
    },
    /// Neither `XDG_DATA_HOME` nor `HOME` is set.
    #[error("there is no directory for your models, because HOME is not set: name one with --models")]
    NoDirectory,
    /// A file of that name is there.
    #[error(
        "{path} is there already{}: remove it, or choose another --name",
        if *other { ", with other content" } else { "" }
    )]
    Exists {
        /// Its path.
        path: PathBuf,
        /// Its digest is not the wanted one.
        other: bool,
    },
    /// Another process fetches the same file.
    #[error("another process is fetching {path}: wait for it")]
    InProgress {
        /// The file's path.
        path: PathBuf,
    },
    /// A file or directory could not be used.
    #[error("{path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The disk has less room than the file needs.
    #[error(
        "{path} needs {need} bytes more, and its disk has {free}: make room, or name another directory with --models"
    )]
    NoRoom {
        /// The file's path.
        path: PathBuf,
        /// Bytes that are still to come.
        need: u64,
        /// Bytes that the user may still write there.
        free: u64,
    },
    /// The server could not be asked.
    #[error("{url}: {reason}")]
    Web {
        /// The URL.
        url: String,
        /// The cause.
        reason: String,
    },
    /// The server's certificate is not one to trust.
    #[error("{url}: the server's certificate is refused: {reason}; nothing was fetched")]
    Certificate {
        /// The URL.
        url: String,
        /// Why.
        reason: String,
    },
    /// The server answered with an error.
    #[error("{url}: the server answers {status}{}", advice(*status))]
    Status {
        /// The URL.
        url: String,
        /// The status of HTTP.
        status: u16,
    },
    /// The transfer broke off, again and again.
    #[error(
        "{url}: the transfer broke off after {bytes} bytes ({reason}); they are kept, and the same command goes on"
    )]
    BrokenOff {
        /// The URL.
        url: String,
        /// Bytes that are there.
        bytes: u64,
        /// Why it broke off.
        reason: String,
    },
    /// The server sent no GGUF file.
    #[error("{url} is not a GGUF file: it begins with {found:?}")]
    NotAModel {
        /// The URL.
        url: String,
        /// The first bytes.
        found: String,
    },
    /// The server sent another file.
    #[error("{url} has sha256 {}, and {} was wanted: what came was deleted", hex(found), hex(wanted))]
    Digest {
        /// The URL.
        url: String,
        /// Of what came.
        found: [u8; 32],
        /// The digest of the arguments or of the hub.
        wanted: [u8; 32],
    },
    /// The file has another size than the hub tells.
    #[error("{url} has {found} bytes, and {wanted} were wanted: what came was deleted")]
    Size {
        /// The URL.
        url: String,
        /// Bytes that came.
        found: u64,
        /// Bytes that the hub tells.
        wanted: u64,
    },
    /// The hub's list is none, or has no such model.
    #[error("{repository}: {reason}")]
    Hub {
        /// Owner and repository.
        repository: String,
        /// The missing part, and the models that are there.
        reason: String,
    },
}

impl PullError {
    /// The error's name for scripts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Source { .. } => "Source",
            Self::Name { .. } => "Name",
            Self::NoHub { .. } => "NoHub",
            Self::OneDigest { .. } => "OneDigest",
            Self::Unprotected { .. } => "Unprotected",
            Self::NoDirectory => "NoDirectory",
            Self::Exists { .. } => "Exists",
            Self::InProgress { .. } => "InProgress",
            Self::File { .. } => "File",
            Self::NoRoom { .. } => "NoRoom",
            Self::Web { .. } => "Web",
            Self::Certificate { .. } => "Certificate",
            Self::Status { .. } => "Status",
            Self::BrokenOff { .. } => "BrokenOff",
            Self::NotAModel { .. } => "NotAModel",
            Self::Digest { .. } => "Digest",
            Self::Size { .. } => "Size",
            Self::Hub { .. } => "Hub",
        }
    }

    /// The arguments are wrong, whatever the server says.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Source { .. }
                | Self::Name { .. }
                | Self::NoHub { .. }
                | Self::OneDigest { .. }
                | Self::Unprotected { .. }
                | Self::NoDirectory
        )
    }
}

fn advice(status: u16) -> &'static str {
    match status {
        401 | 403 => ": the hub may ask for a token, which ROCMFORGE_HUB_TOKEN holds",
        404 => ": there is no such file",
        _ => "",
    }
}
