//! False input: nothing panics, no allocation is out of proportion, and no invalid input is accepted.

#![allow(clippy::panic, clippy::unwrap_used)] // tests

mod allocator;
#[path = "../common/mod.rs"]
mod common;
mod edges;

use std::fmt::Debug;

use allocator::peak_of;
use common::{Largest, Random, Smallest, filled};
use proptest::prelude::*;
use rocmforge_client::wire::*;

/// Runs a generic check for every message of the protocol.
macro_rules! for_every_message {
    ($check:ident) => {
        for_every_message!($check:
            Cancel, Credit, PingRequest, PingReply, InfoRequest, InfoReply, ListRequest, ListReply, ShowRequest, ShowReply,
            LoadRequest, LoadReply, UnloadRequest, UnloadReply, PsRequest, PsReply, CancelRequestsRequest, CancelRequestsReply, StatusRequest, StatusReply,
            DoctorRequest, DoctorReply, LimitUserRequest, LimitUserReply, UsersRequest, UsersReply,
            SessionsRequest, SessionsReply, ForgetSessionRequest, ForgetSessionReply,
            TokenizeRequest, TokenizeReply, DetokenizeRequest, DetokenizeReply, GenerateRequest, GenerateItem, GenerateEnd,
            FailRequest, LoadToDeviceRequest, LoadToDeviceItem, LoadToDeviceEnd, ClearCacheRequest, ClearCacheReply,
            PlanRequest, PlanReply, ResidencyRequest, ResidencyReply, SetRulesRequest, SetRulesReply, SubscribeRequest,
            SubscribeItem, SubscribeEnd, WireError)
    };
    ($check:ident: $($message:ident),+) => { $($check::<$message>();)+ };
}

fn samples<T: Message>() -> impl Iterator<Item = T> {
    let ends = [filled(&mut Smallest), filled(&mut Largest)];
    ends.into_iter().chain((0..200).map(|seed| filled(&mut Random(seed))))
}

fn round_trips<T: Message + PartialEq + Debug>() {
    for (number, message) in samples::<T>().enumerate() {
        let bytes = encode(&message).unwrap();
        assert_eq!(decode::<T>(&bytes).unwrap(), message, "{} sample {number}", T::NAME);
    }
}

#[test]
fn every_message_comes_back_as_it_was() {
    for_every_message!(round_trips);
}

fn refuses_every_other_length<T: Message + PartialEq + Debug>() {
    for message in samples::<T>().take(20) {
        let mut bytes = encode(&message).unwrap();
        for len in 0..bytes.len() {
            assert!(decode::<T>(&bytes[..len]).is_err(), "{} cut to {len} of {}", T::NAME, bytes.len());
        }
        bytes.push(0);
        let error = decode::<T>(&bytes).unwrap_err();
        assert!(matches!(error, CodecError::TrailingBytes { .. }), "{}: {error}", T::NAME);
        assert_eq!(error.code(), ErrorCode::BadPayload);
    }
}

#[test]
fn a_message_cut_short_or_followed_by_bytes_is_refused() {
    for_every_message!(refuses_every_other_length);
}

/// For a false count the decoder reserves at most 1 MiB per level of nested lists. The deepest level is the bytes of
/// an extension of an entry.
const LIE_BYTES: usize = 3 << 20;

/// Elements of an extension take 10 bytes on the wire and 32 in memory. A growing list is copied: twice that, plus
/// the old half.
const TIMES_PAYLOAD: usize = 10;

fn lying_counts_are_cheap<T: Message>() {
    const LIES: [u64; 8] = [1, 0xffff, (1 << 20) - 1, 1 << 20, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX];
    for message in samples::<T>().take(8) {
        let good = encode(&message).unwrap();
        for at in 0..good.len().saturating_sub(7) {
            for lie in LIES {
                let mut bytes = good.clone();
                bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
                let peak = peak_of(|| decode::<T>(&bytes));
                let allowed = LIE_BYTES + TIMES_PAYLOAD * bytes.len() + 1024;
                assert!(peak <= allowed, "{}: {peak} bytes for {lie:#x} at {at}", T::NAME);
            }
        }
    }
}

#[test]
fn a_count_that_lies_allocates_little() {
    for_every_message!(lying_counts_are_cheap);
}

/// Checks that a false count makes the decoder reserve bytes, so that the bound above tests something.
#[test]
fn the_allocator_counts() {
    assert_eq!(peak_of(|| vec![0u8; 5000]), 5000);
    let lie = 0xffff_u64.to_le_bytes();
    assert!(peak_of(|| decode::<TokenizeReply>(&lie)) >= 0xffff);
}

#[test]
fn the_largest_payload_of_many_small_entries_is_bounded() {
    let entries = (PAYLOAD_BYTES_MAX - 8) / 10;
    let mut bytes = u64::from(entries).to_le_bytes().to_vec();
    bytes.resize(8 + 10 * entries as usize, 0);
    let peak = peak_of(|| {
        let error = decode::<Cancel>(&bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::LimitExceeded);
    });
    assert!(peak <= TIMES_PAYLOAD * bytes.len(), "{peak}");
}

#[test]
fn a_header_of_any_length_allocates_nothing() {
    for len in [PAYLOAD_BYTES_MAX + 1, 1 << 30, u32::MAX] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        let mut outcome = None;
        assert_eq!(peak_of(|| outcome = Some(FrameHeader::parse(&bytes, PAYLOAD_BYTES_MAX))), 0);
        assert_eq!(outcome, Some(Err(HeaderError::TooLong { len, max: PAYLOAD_BYTES_MAX })));
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz_frame(&bytes);
    }

    #[test]
    fn no_change_of_a_good_frame_panics(seed: u64, at: prop::sample::Index, byte: u8, count in 0usize..4) {
        let mut random = Random(seed);
        let request: GenerateRequest = filled(&mut random);
        let mut frame = encode_frame(1, Op::Generate, Flags::NONE, PAYLOAD_BYTES_MAX, &request).unwrap();
        for step in 0..count {
            let index = (at.index(frame.len()) + step * 7919) % frame.len();
            frame[index] = byte;
        }
        fuzz_frame(&frame);
    }

    #[test]
    fn a_header_that_parses_has_the_same_bytes_again(bytes: [u8; HEADER_BYTES]) {
        if let Ok(header) = FrameHeader::parse(&bytes, u32::MAX) {
            prop_assert_eq!(header.to_bytes(), bytes);
        }
    }

    #[test]
    fn a_server_hello_has_the_same_bytes_again(bytes in prop::collection::vec(any::<u8>(), SERVER_HELLO_BYTES)) {
        let mut bytes: [u8; SERVER_HELLO_BYTES] = bytes.try_into().unwrap();
        prop_assert!(bytes[..4] == MAGIC || ServerHello::parse(&bytes).is_err());
        bytes[..4].copy_from_slice(&MAGIC);
        prop_assert_eq!(ServerHello::parse(&bytes).unwrap().to_bytes(), bytes);
    }

    #[test]
    fn a_payload_that_decodes_encodes_to_the_same_bytes(seed: u64, at: prop::sample::Index, byte: u8) {
        // One value has one encoding: a changed byte is refused or changes the value.
        let mut bytes = encode(&filled::<GenerateItem>(&mut Random(seed))).unwrap();
        let index = at.index(bytes.len());
        bytes[index] = byte;
        if let Ok(item) = decode::<GenerateItem>(&bytes) {
            prop_assert_eq!(encode(&item).unwrap(), bytes);
        }
    }
}
