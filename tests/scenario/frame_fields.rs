//! Every number of every kept frame set to every extreme, and frames of random bytes. Each gets one typed error or
//! valid answer, and the daemon stays as it was.
//!
//! `ROCMFORGE_FRAMES=1000000` sends that many random and that many changed frames; the default is some thousand of
//! each.

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::path::Path;
use std::time::Instant;

use rocmforge_client::wire::{
    Cancel, ErrorClass, ErrorCode, Flags, FrameHeader, HEADER_BYTES, Op, PAYLOAD_BYTES_MAX, PingRequest,
    WireError, decode, encode_frame,
};

use crate::forge::Random;
use crate::raw::Raw;
use crate::rig::{Rig, TINY, story};

/// The kept frames that clients send. The payload of a doctor request is not varied, since each starts a process; its
/// header is.
fn kept() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/frames");
    let mut frames = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let Some(case) = name.strip_suffix(".hex") else { continue };
        let asks = case.contains("-request-") || case.starts_with("cancel-") || case.starts_with("credit-");
        if asks && !case.ends_with("-max") {
            let text = fs::read_to_string(&path).unwrap();
            let bytes = text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
            frames.push((case.to_owned(), bytes));
        }
    }
    frames.sort();
    assert!(frames.len() > 30, "{}", frames.len());
    let ping = encode_frame(1, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, &PingRequest::default()).unwrap();
    let generate = encode_frame(1, Op::Generate, Flags::NONE, PAYLOAD_BYTES_MAX, &story(3)).unwrap();
    frames.push(("own ping".into(), ping));
    frames.push((format!("a story of {TINY}"), generate));
    frames
}

/// Extremes of a number of `width` bytes with value `was`, in a frame of `length` bytes.
fn extremes(was: u64, width: usize, length: usize) -> Vec<u64> {
    let max = if width == 8 { u64::MAX } else { (1 << (8 * width)) - 1 };
    let length = length as u64;
    let mut values = vec![0, 1, max, max - 1, max / 2, max / 2 + 1, 1 << 31, 1 << 63];
    values.extend([length.wrapping_sub(1), length, length + 1, was.wrapping_sub(1), was.wrapping_add(1)]);
    values.iter_mut().for_each(|value| *value &= max);
    values.sort_unstable();
    values.dedup();
    values.retain(|&value| value != was);
    values
}

fn number(bytes: &[u8]) -> u64 {
    let mut raw = [0; 8];
    raw[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(raw)
}

/// Outcome of a frame.
#[derive(Debug, PartialEq)]
enum Met {
    /// The stream ended with a reply or an answer.
    Answered,
    /// The stream ended with an error.
    Refused(u16),
    /// The connection ended, with an error code if one was sent.
    Closed(Option<u16>),
}

/// A connection that sends one frame after the other and reads each outcome.
struct Line {
    raw: Raw,
    stream: u32,
}

impl Line {
    fn new(rig: &Rig) -> Self {
        Self { raw: Raw::connect(rig), stream: 0 }
    }

    /// Sends a frame on a new stream and cancels it at once, so that an endless request ends too.
    #[track_caller]
    fn send(&mut self, frame: &[u8]) -> Met {
        self.stream = if self.stream == 0 { 1 } else { self.stream + 2 };
        let mut bytes = frame.to_vec();
        bytes[4..8].copy_from_slice(&self.stream.to_le_bytes());
        bytes.extend(
            encode_frame(self.stream, Op::Cancel, Flags::NONE, PAYLOAD_BYTES_MAX, &Cancel { ext: vec![] })
                .unwrap(),
        );
        if self.raw.0.write_all(&bytes).is_err() {
            return self.rest();
        }
        self.rest()
    }

    /// Reads until the stream or the connection ends.
    #[track_caller]
    fn rest(&mut self) -> Met {
        while let Some((header, payload)) = self.frame() {
            let op = header.known_op().expect("the daemon sent an unknown op");
            if header.stream == 0 {
                return Met::Closed(Some(error_code(&payload)));
            }
            assert_eq!(header.stream, self.stream, "the daemon sent a frame on an ended stream");
            match op {
                Op::Item => {}
                Op::Reply | Op::End => return Met::Answered,
                Op::Error => return Met::Refused(error_code(&payload)),
                other => panic!("the daemon sent {other:?}"),
            }
        }
        Met::Closed(None)
    }

    fn frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        use std::io::Read;
        let mut header = [0; HEADER_BYTES];
        self.raw.0.read_exact(&mut header).ok()?;
        let header = FrameHeader::parse(&header, PAYLOAD_BYTES_MAX).unwrap();
        let mut payload = vec![0; header.len as usize];
        self.raw.0.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }
}

#[track_caller]
fn error_code(payload: &[u8]) -> u16 {
    let error: WireError = decode(payload).unwrap();
    assert!(ErrorCode::from_u16(error.code).is_some() && !error.message.is_empty(), "{error:?}");
    assert_ne!(error.class(), Some(ErrorClass::Internal), "{error:?}");
    error.code
}

#[track_caller]
fn assert_as_before(rig: &mut Rig) {
    rig.eventually("only this connection is open", |status| status.connections == 1);
    rig.assert_idle();
    rig.assert_serves();
}

/// A payload's fields may lie at any byte: each offset is tried as a number of four bytes and of eight.
#[test]
fn no_number_of_a_payload_can_hurt() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let mut line = Line::new(&rig);
    let (mut answered, mut refused, mut closed) = (0, 0, 0);
    for (name, frame) in kept() {
        if name.starts_with("doctor") || name.starts_with("cancel") || name.starts_with("credit") {
            continue;
        }
        let length = frame.len() - HEADER_BYTES;
        // Names, texts and lists are all long: above 100 bytes only every third offset is tried.
        let step = if length > 100 { 3 } else { 1 };
        for at in (HEADER_BYTES..frame.len()).step_by(step) {
            for width in [4, 8] {
                let Some(field) = frame.get(at..at + width) else { continue };
                for value in extremes(number(field), width, length) {
                    let mut bytes = frame.clone();
                    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                    bytes[12..16].fill(0);
                    match line.send(&bytes) {
                        Met::Answered => answered += 1,
                        Met::Refused(_) => refused += 1,
                        Met::Closed(code) => {
                            // A load that announces a descriptor and passes none.
                            assert_eq!(
                                code,
                                Some(ErrorCode::BadDescriptors as u16),
                                "{name} at {at}: {value:#x}"
                            );
                            closed += 1;
                            line = Line::new(&rig);
                        }
                    }
                }
            }
        }
    }
    println!("{answered} answered, {refused} refused, {closed} closed their connection");
    assert!(answered > 100 && refused > 1000);
    drop(line);
    assert_as_before(&mut rig);
}

#[test]
fn no_number_of_a_header_can_hurt() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let mut met = std::collections::BTreeMap::<Option<u16>, u32>::new();
    for (name, frame) in kept() {
        // Length, stream, op, flags, count of descriptors, checksum.
        for (at, width) in [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1), (12, 4)] {
            for value in extremes(number(&frame[at..at + width]), width, frame.len() - HEADER_BYTES) {
                let mut line = Line::new(&rig);
                let mut bytes = frame.clone();
                bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                let header: [u8; HEADER_BYTES] = bytes[..HEADER_BYTES].try_into().unwrap();
                line.stream =
                    FrameHeader::parse(&header, PAYLOAD_BYTES_MAX).map_or(0, |header| header.stream);
                // The daemon may have closed already; its error is read all the same.
                let _ = line.raw.0.write_all(&bytes);
                let _ = line.raw.0.shutdown(Shutdown::Write);
                let code = match line.rest() {
                    Met::Answered => Some(0),
                    Met::Refused(code) => Some(code),
                    Met::Closed(code) => code,
                };
                *met.entry(code).or_default() += 1;
                assert_ne!(code, Some(ErrorCode::Internal as u16), "{name} at {at}: {value:#x}");
            }
        }
    }
    println!("{met:?}");
    for code in
        [ErrorCode::FrameTooLong, ErrorCode::BadFrame, ErrorCode::BadStream, ErrorCode::BadDescriptors]
    {
        assert!(met.contains_key(&Some(code as u16)), "no frame met {code:?}: {met:?}");
    }
    assert_as_before(&mut rig);
}

/// Kept frames with some changed bytes, and frames of random bytes: each invalid one gets an error, and none ends the
/// daemon.
#[test]
fn random_and_changed_frames_harm_nobody() {
    let count = std::env::var("ROCMFORGE_FRAMES").ok().and_then(|text| text.parse().ok()).unwrap_or(3000u32);
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let frames: Vec<_> = kept().into_iter().filter(|(name, _)| !name.starts_with("doctor")).collect();
    let mut random = Random(42);
    let begun = Instant::now();
    let mut line = Line::new(&rig);
    let (mut answered, mut refused, mut closed) = (0, 0, 0);
    let doctor = Op::Doctor as u16;
    for number in 0..2 * count {
        let mut frame = frames[random.draw() as usize % frames.len()].1.clone();
        if number < count {
            // Random bytes after a header with the right length, so that the next frame is aligned again.
            let length = (random.draw() % 64) as u32;
            frame = (0..HEADER_BYTES + length as usize).map(|_| random.draw() as u8).collect();
            frame[..4].copy_from_slice(&length.to_le_bytes());
        } else {
            for _ in 0..=random.draw() % 4 {
                let at = 8 + random.draw() as usize % (frame.len() - 8);
                frame[at] = random.draw() as u8;
            }
        }
        if u16::from_le_bytes([frame[8], frame[9]]) == doctor {
            continue;
        }
        match line.send(&frame) {
            Met::Answered => answered += 1,
            Met::Refused(_) => refused += 1,
            Met::Closed(code) => {
                assert!(code.is_some(), "the connection closed without an error: {frame:?}");
                closed += 1;
                line = Line::new(&rig);
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{answered} answered, {refused} refused, {closed} closed their connection, in {seconds:.1} s");
    assert!(refused > count / 8 && closed > count / 2, "too many random frames were accepted");
    drop(line);
    assert_as_before(&mut rig);
}
