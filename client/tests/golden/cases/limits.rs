//! Cases of the messages about users' limits.

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
    let groups =
        [three(Op::LimitUser, request), three(Op::Reply, LimitUserReply { users: vec![entry], ext: vec![] })];
    groups.into_iter().flatten().collect()
}
