//! Cases of the messages about users: their limits and holdings.

use super::*;

/// Every case.
pub fn all() -> Vec<Golden> {
    let limit = |value, origin| LimitInForce { value, origin };
    let entry = UserLimitsEntry {
        uid: 1000,
        requests: limit(4, LimitOrigin::Request),
        connections: limit(4096, LimitOrigin::EveryUser),
        passed_models: limit(8, LimitOrigin::Configuration),
        share: limit(50, LimitOrigin::Request),
        ext: vec![],
    };
    let request = LimitUserRequest {
        uid: Some(1000),
        requests: Some(4),
        share: Some(50),
        ..LimitUserRequest::default()
    };
    let holds = UserEntry {
        uid: 1000,
        connections: 12,
        requests: 40,
        request_bytes: 3 << 20,
        answer_bytes: 70_000,
        descriptors: 2,
        passed_models: 1,
        header_bytes: 9 << 20,
        sequences: 32,
        kv_pages: 260,
        text_us: 150_000,
        frame_us: 4_000,
        device_us_per_s: 498_000,
        ext: vec![],
    };
    let sessions = UserEntry {
        ext: number_ext([(EXT_USER_SESSIONS, 3), (EXT_USER_SESSION_BYTES, 70_000)]),
        ..holds.clone()
    };
    let groups = [
        three(Op::LimitUser, request),
        three(Op::Reply, LimitUserReply { users: vec![entry], ext: vec![] }),
        three(Op::Users, UsersRequest { after: Some(999), ext: vec![] }),
        three(Op::Reply, UsersReply { users: vec![holds], more: true, ext: vec![] }),
    ];
    let later = frame(
        Op::Reply,
        "sessions",
        At { stream: 5, flags: Flags::NONE, n_fds: 0 },
        UsersReply { users: vec![sessions], more: false, ext: vec![] },
    );
    groups.into_iter().flatten().chain([later]).collect()
}
