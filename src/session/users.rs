//! Holdings of each user of everything that users share.

use std::collections::BTreeMap;
use std::time::Duration;

use rocmforge_client::wire::{
    self, EXT_USER_PASSED_BYTES, EXT_USER_SESSION_BYTES, EXT_USER_SESSIONS, Ext, UserEntry, UsersReply,
    UsersRequest, limits,
};

use super::error::Failure;
use super::models::{fill, page_room};
use super::{Call, Service};

/// Encoded size of an entry in bytes.
const ENTRY_BYTES: usize = 108 + 3 * 18;

/// The client's own user; all users that hold anything if the client has [`super::Right::See`].
pub(super) async fn users(call: Call, request: UsersRequest) -> Result<UsersReply, Failure> {
    let peer = call.peer();
    let mut holdings = Holdings::of(call.service()).0;
    holdings.entry(peer.uid).or_default();
    holdings.retain(|uid, _| peer.sees || *uid == peer.uid);
    holdings.retain(|uid, _| request.after.is_none_or(|after| *uid > after));
    let of_all = holdings.len();
    let mut room = page_room(call.connection.limits.max_frame);
    let entries = holdings.into_iter().map(|(uid, entry)| UserEntry { uid, ..entry });
    let users = fill(&mut room, entries.take(limits::USERS_MAX), |_| ENTRY_BYTES);
    Ok(UsersReply { more: users.len() < of_all, users, ext: Ext::new() })
}

/// Entries by user.
struct Holdings(BTreeMap<u32, UserEntry>);

impl Holdings {
    fn of(service: &Service) -> Self {
        let mut all = Self(BTreeMap::new());
        let [request_bytes, answer_bytes, descriptors, requests] = service.budget.holdings();
        all.add(service.connections().holdings(), |user| &mut user.connections);
        all.add(requests, |user| &mut user.requests);
        all.add(request_bytes, |user| &mut user.request_bytes);
        all.add(answer_bytes, |user| &mut user.answer_bytes);
        all.add(descriptors, |user| &mut user.descriptors);
        all.add(service.store.passed().iter().map(|passed| (passed.uid, 1)), |user| &mut user.passed_models);
        all.add(service.store.headers().holdings(), |user| &mut user.header_bytes);
        all.add(service.sequences_by_user(), |user| &mut user.sequences);
        let us = |(uid, time): (u32, Duration)| (uid, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        all.add(service.text_time.used().into_iter().map(us), |user| &mut user.text_us);
        all.add(service.pace.used().into_iter().map(us), |user| &mut user.frame_us);
        let engine = service.engine.snapshot();
        let pages = engine.sequences.iter().map(|sequence| (sequence.uid, sequence.kv_pages.into()));
        all.add(pages, |user| &mut user.kv_pages);
        for (uid, (sessions, bytes)) in service.sessions.holdings() {
            let sessions = [(EXT_USER_SESSIONS, sessions), (EXT_USER_SESSION_BYTES, bytes)];
            all.0.entry(uid).or_default().ext.extend(wire::number_ext(sessions));
        }
        for (uid, bytes) in service.store.passed_bytes() {
            let passed = wire::number_ext([(EXT_USER_PASSED_BYTES, bytes)]);
            all.0.entry(uid).or_default().ext.extend(passed);
        }
        all.add(engine.user_rates.iter().map(|(uid, rate)| (*uid, *rate)), |user| &mut user.device_us_per_s);
        all
    }

    fn add(
        &mut self,
        amounts: impl IntoIterator<Item = (u32, u64)>,
        field: impl Fn(&mut UserEntry) -> &mut u64,
    ) {
        for (uid, amount) in amounts {
            let sum = field(self.0.entry(uid).or_default());
            *sum = sum.saturating_add(amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_users_fits_its_payload_and_wastes_none() {
        let mut room = page_room(wire::PAYLOAD_BYTES_MIN);
        let ext = wire::number_ext(
            [EXT_USER_SESSIONS, EXT_USER_SESSION_BYTES, EXT_USER_PASSED_BYTES].map(|key| (key, 1)),
        );
        let longest = UserEntry { ext, ..UserEntry::default() };
        let users = fill(&mut room, std::iter::repeat_n(longest, 1000), |_| ENTRY_BYTES);
        let encoded = wire::encode(&UsersReply { users, more: true, ext: Ext::new() }).unwrap().len();
        let limit = wire::PAYLOAD_BYTES_MIN as usize;
        assert!(encoded <= limit && encoded + ENTRY_BYTES > limit, "{encoded}");
    }
}
