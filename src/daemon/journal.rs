//! Writes to the systemd journal by its native protocol: messages with searchable fields (`journalctl RF_UID=1000`),
//! not only lines of text as from standard error.
//!
//! Fields of an event become `RF_` fields: `RF_UID`, `RF_REQUEST`, `RF_MODEL`, `RF_CODE` and so on. Named events have a
//! `MESSAGE_ID` that is the same in all versions: [`IDS`]. No event contains prompts or answers.

use std::fmt::{Debug, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sendto, socket_with};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

const SOCKET: &str = "/run/systemd/journal/socket";

/// Longest value: one datagram must hold all fields of an event and fit a socket's buffer (212,992 bytes by default).
const VALUE_BYTES_MAX: usize = 4096;

/// Message ids of named events; `journalctl MESSAGE_ID=...` finds them.
const IDS: [(&str, &str); 6] = [
    ("serving", "1041b4c183b1449db19986ebab1e57f7"),
    ("stopping", "793e7d3aa487478b979799aef6dfacb0"),
    ("reloaded", "cd6438ed2a3e42cfb9088f5e12b2c760"),
    ("refused", "5ec83ae661e44b91961e5964573eaac8"),
    ("failed", "22cd7ceb23de4d3288063d1bb93e30d4"),
    ("answered", "fc2436546704444b8b6852b80ca6b367"),
];

/// Writes events to the journal.
#[derive(Debug)]
pub struct Journal {
    socket: OwnedFd,
    address: SocketAddrUnix,
}

impl Journal {
    /// The journal, if standard error goes there (`$JOURNAL_STREAM`, systemd.exec(5)).
    pub fn of_stderr() -> Option<Self> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let stderr = std::fs::metadata("/proc/self/fd/2").ok()?;
        if stream != format!("{}:{}", stderr.dev(), stderr.ino()) {
            return None;
        }
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
        Some(Self { socket, address: SocketAddrUnix::new(SOCKET).ok()? })
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut entry = Entry::new(event.metadata());
        event.record(&mut entry);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // If the journal is full or gone, the message goes to standard error.
        if sendto(&self.socket, &entry.to_bytes(), flags, &self.address).is_err() {
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", entry.message));
        }
    }
}

/// One message under construction.
#[derive(Debug)]
struct Entry {
    message: String,
    /// The event's other fields as readable text, after the message.
    rest: String,
    fields: Vec<(String, String)>,
}

impl Entry {
    fn new(metadata: &Metadata<'_>) -> Self {
        let priority = match *metadata.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut fields = vec![
            ("PRIORITY".to_owned(), priority.to_string()),
            ("SYSLOG_IDENTIFIER".to_owned(), "rocmforged".to_owned()),
            ("RF_TARGET".to_owned(), metadata.target().to_owned()),
        ];
        if let Some((_, id)) = IDS.iter().find(|(name, _)| *name == metadata.name()) {
            fields.push(("MESSAGE_ID".to_owned(), (*id).to_owned()));
        }
        Self { message: String::new(), rest: String::new(), fields }
    }

    fn add(&mut self, field: &Field, value: &str) {
        let value = rocmforge_client::wire::cut_text(value, VALUE_BYTES_MAX);
        if field.name() == "message" {
            self.message = value.to_owned();
            return;
        }
        let _ = write!(self.rest, " {}={value}", field.name()); // writing to a String cannot fail
        // Journal field names: letters, digits, `_`, at most 64 bytes.
        let name: String =
            field.name().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(60).collect();
        self.fields.push((format!("RF_{}", name.to_ascii_uppercase()), value.to_owned()));
    }

    /// Encodes the journal's native protocol: `NAME=value` lines; a value with line ends is preceded by its length
    /// instead.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let message = ("MESSAGE".to_owned(), format!("{}{}", self.message, self.rest));
        for (name, value) in std::iter::once(&message).chain(&self.fields) {
            bytes.extend_from_slice(name.as_bytes());
            if value.contains('\n') {
                bytes.push(b'\n');
                bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
            } else {
                bytes.push(b'=');
            }
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(b'\n');
        }
        bytes
    }
}

impl Visit for Entry {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Keeps the bytes that would be sent.
    struct Kept(Arc<Mutex<Vec<Vec<u8>>>>);

    impl<S: Subscriber> Layer<S> for Kept {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut entry = Entry::new(event.metadata());
            event.record(&mut entry);
            self.0.lock().unwrap().push(entry.to_bytes());
        }
    }

    #[test]
    fn events_have_fields_and_those_with_a_name_a_number() {
        let sent = Arc::default();
        let subscriber = tracing_subscriber::registry().with(Kept(Arc::clone(&sent)));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(name: "refused", uid = 1000, model = "tiny", error = %"two\nlines", "a request was refused");
            tracing::debug!("plain {}", 1);
        });
        let sent = sent.lock().unwrap();
        let first = String::from_utf8(sent[0].clone()).unwrap();
        for line in [
            "\nPRIORITY=4\n",
            "\nSYSLOG_IDENTIFIER=rocmforged\n",
            "\nMESSAGE_ID=5ec83ae661e44b91961e5964573eaac8\n",
            "\nRF_UID=1000\n",
            "\nRF_MODEL=tiny\n",
            "\nRF_ERROR\n\u{9}\0\0\0\0\0\0\0two\nlines\n",
        ] {
            assert!(first.contains(line), "{line:?} is not in {first:?}");
        }
        assert!(first.starts_with("MESSAGE\n"), "{first:?}");
        assert!(first.contains("a request was refused uid=1000 model=tiny error=two\nlines\n"), "{first:?}");
        let second = String::from_utf8(sent[1].clone()).unwrap();
        assert!(
            second.starts_with("MESSAGE=plain 1\nPRIORITY=7\n") && !second.contains("MESSAGE_ID"),
            "{second:?}"
        );
    }

    #[test]
    fn numbers_are_128_bits_and_each_its_own() {
        for (name, id) in IDS {
            assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
            assert_eq!(IDS.iter().filter(|(_, other)| *other == id).count(), 1, "{name}");
        }
    }
}
