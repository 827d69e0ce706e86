//! Cases of the messages about users: their limits, their holdings, their sessions.

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
    let session = SessionEntry {
        name: "letters".into(),
        model: "smollm2-135m-instruct-q4_1".into(),
        content: SessionContent::Messages(6),
        tokens: 412,
        age_ms: 90_500,
        bytes: 2310,
        in_use: true,
        ext: vec![],
    };
    let forget = ForgetSessionRequest { scope: SessionScope::Name("letters".into()), ext: vec![] };
    let groups = [
        three(Op::LimitUser, request),
        three(Op::Reply, LimitUserReply { users: vec![entry], ext: vec![] }),
        three(Op::Users, UsersRequest { after: Some(999), ext: vec![] }),
        three(Op::Reply, UsersReply { users: vec![holds], more: true, ext: vec![] }),
        three(Op::Sessions, SessionsRequest { ext: vec![] }),
        three(Op::Reply, SessionsReply { sessions: vec![session], ext: vec![] }),
        three(Op::ForgetSession, forget),
        three(Op::Reply, ForgetSessionReply { forgotten: 1, ext: vec![] }),
    ];
    groups.into_iter().flatten().collect()
}
