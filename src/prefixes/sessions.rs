//! The file of sessions that outlive a restart: their tokens and messages, and none of their keys and values.
//!
//! Little-endian: `RFSESSNS`, version (u32), number of sessions (u32). Per session: user (u32), its name, the model's name,
//! fingerprint of the model's files (32 bytes), tokens (u64), age (u64), kind (u32), count (u32). The age is that at the time
//! of writing, in milliseconds since the last use. Of kind 0 follow that many token ids (u32 each), of kind 1 that many
//! messages: role and content. Then the CRC-32 of all before (u32). A text is its length (u32) and its bytes.

use std::fs;
use std::io;
use std::path::Path;

use super::summed::{self, FileError, In, Out};

/// Name of the file in the folder of kept prefixes.
pub const FILE: &str = "sessions";
const MAGIC: &[u8; 8] = b"RFSESSNS";
/// Changes with the format.
const VERSION: u32 = 1;
const TOKENS: u32 = 0;
const CHAT: u32 = 1;

/// A session in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSession {
    /// Its user.
    pub uid: u32,
    /// Its name.
    pub name: String,
    /// Name of its model.
    pub model: String,
    /// Of the model's files.
    pub fingerprint: [u8; 32],
    /// Tokens after the last request.
    pub tokens: u64,
    /// Milliseconds since the last use, without the time between the two daemons.
    pub age_ms: u64,
    /// Its content.
    pub content: Content,
}

/// The content of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Token ids of prompts and answers.
    Tokens(Vec<u32>),
    /// Chat messages, answers included.
    Chat(Vec<Said>),
}

/// A chat message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Its role.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// Writes the sessions, the least recently used first. Without any, no file is left. Blocks.
///
/// # Errors
/// [`io::Error`]: then the file is as it was.
pub fn write<'a>(dir: &Path, sessions: impl ExactSizeIterator<Item = &'a KeptSession>) -> io::Result<u64> {
    let path = dir.join(FILE);
    if sessions.len() == 0 {
        return match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(0),
        };
    }
    summed::write(&path, MAGIC, VERSION, |out| {
        out.count(sessions.len())?;
        sessions.into_iter().try_for_each(|session| put(out, session))
    })
}

/// Reads the file of an earlier daemon and removes it. `None` if there is none, or none of use. Blocks.
pub fn take(dir: &Path) -> Option<Vec<KeptSession>> {
    let path = dir.join(FILE);
    let sessions = match read(&path) {
        Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read.inspect_err(|error| {
            tracing::warn!(file = %path.display(), %error, "the file of sessions is removed: it cannot be used");
        }),
    };
    super::remove(&path);
    sessions.ok()
}

fn put(out: &mut Out, session: &KeptSession) -> io::Result<()> {
    out.number(session.uid)?;
    out.text(&session.name)?;
    out.text(&session.model)?;
    out.put(&session.fingerprint)?;
    out.wide(session.tokens)?;
    out.wide(session.age_ms)?;
    match &session.content {
        Content::Tokens(ids) => {
            out.number(TOKENS)?;
            out.count(ids.len())?;
            ids.iter().try_for_each(|id| out.number(*id))
        }
        Content::Chat(messages) => {
            out.number(CHAT)?;
            out.count(messages.len())?;
            messages.iter().try_for_each(|message| {
                out.text(&message.role)?;
                out.text(&message.content)
            })
        }
    }
}

fn read(path: &Path) -> Result<Vec<KeptSession>, FileError> {
    summed::read(path, MAGIC, VERSION, |from| {
        let count = from.number()?;
        (0..count).map(|_| session(from)).collect()
    })
}

fn session(from: &mut In) -> Result<KeptSession, FileError> {
    let whole = usize::MAX; // the length of the file bounds it
    Ok(KeptSession {
        uid: from.number()?,
        name: from.text(whole)?,
        model: from.text(whole)?,
        fingerprint: from.array()?,
        tokens: from.wide()?,
        age_ms: from.wide()?,
        content: match from.number()? {
            TOKENS => {
                let count = from.number()?;
                Content::Tokens((0..count).map(|_| from.number()).collect::<Result<_, _>>()?)
            }
            CHAT => {
                let count = from.number()?;
                let said = |from: &mut In| {
                    Ok::<_, FileError>(Said { role: from.text(whole)?, content: from.text(whole)? })
                };
                Content::Chat((0..count).map(|_| said(from)).collect::<Result<_, _>>()?)
            }
            _ => return Err(FileError::Damaged("the kind of a session is unknown")),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::summed::tests::assert_every_byte_counts;
    use super::*;

    fn sessions() -> Vec<KeptSession> {
        let said = |role: &str, content: &str| Said { role: role.into(), content: content.into() };
        let of = |uid, name: &str, content| KeptSession {
            uid,
            name: name.into(),
            model: "tiny".into(),
            fingerprint: [uid as u8; 32],
            tokens: 3,
            age_ms: 1 << 41,
            content,
        };
        vec![
            of(1000, "été", Content::Tokens(vec![1, 0x0102_0304, u32::MAX])),
            of(1001, "b", Content::Chat(vec![said("user", "Hi\n"), said("assistant", "")])),
            of(1001, "c", Content::Tokens(vec![])),
        ]
    }

    #[test]
    fn sessions_are_read_as_they_were_written_and_the_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(take(dir.path()), None);
        let bytes = write(dir.path(), sessions().iter()).unwrap();
        let metadata = fs::metadata(dir.path().join(FILE)).unwrap();
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (bytes, 0o600));
        assert_eq!(take(dir.path()), Some(sessions()));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "neither the file nor a part is left");
        write(dir.path(), sessions().iter()).unwrap();
        write(dir.path(), [].iter()).unwrap();
        assert_eq!(take(dir.path()), None, "without sessions, there is no file");
    }

    #[test]
    fn with_any_byte_changed_or_missing_nothing_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        write(dir.path(), sessions().iter()).unwrap();
        assert_every_byte_counts(&path, || read(&path).is_err());
        assert_eq!((take(dir.path()), path.exists()), (None, false));
    }
}
