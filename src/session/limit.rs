//! Limits of single users, by request.

use rocmforge_client::wire::{
    ErrorCode, Ext, LimitInForce, LimitOrigin, LimitUserReply, LimitUserRequest, UserLimitsEntry,
};

use super::Call;
use super::error::{Failure, failure};
use crate::share::limits::{InForce, Limit, OfOneUser, Origin, UID_MAX, USERS_MAX};

/// Changes the limits of a user, or reports limits.
pub(super) async fn limit(call: Call, request: LimitUserRequest) -> Result<LimitUserReply, Failure> {
    let (peer, users) = (call.peer(), call.service().users());
    let LimitUserRequest { uid, clear, requests, connections, passed_models, share, .. } = request;
    let new = OfOneUser { requests, connections, passed_models, share };
    let changes = clear || new != OfOneUser::default();
    let Some(uid) = uid else {
        if changes {
            return Err(failure(ErrorCode::InvalidArgument, "limits are changed for one user: name its uid"));
        }
        let all = users.all().into_iter().map(|(uid, limits)| entry(uid, &limits));
        return Ok(LimitUserReply { users: all.take(USERS_MAX).collect(), ext: Ext::new() });
    };
    if uid > UID_MAX {
        let text = format!("uid = {uid} is not in 0..={UID_MAX}");
        return Err(failure(ErrorCode::InvalidArgument, &text));
    }
    if changes {
        if !peer.administrator && call.service().policy().names_administrator(uid) {
            let text = format!("uid {uid} is an administrator: only an administrator limits it");
            return Err(failure(ErrorCode::Forbidden, &text));
        }
        new.check().map_err(|error| failure(ErrorCode::InvalidArgument, &error.to_string()))?;
        if !users.request(uid, clear, new) {
            let text = format!("{USERS_MAX} users have limits of their own already: clear some first");
            return Err(failure(ErrorCode::Quota, &text));
        }
        tracing::info!(name: "limited", uid, by = peer.uid, clear, limits = ?new, "limits of a user were changed");
    }
    Ok(LimitUserReply { users: vec![entry(uid, &users.of(uid))], ext: Ext::new() })
}

fn entry(uid: u32, limits: &InForce) -> UserLimitsEntry {
    let limit = |limit: Limit| LimitInForce {
        value: limit.value,
        origin: match limit.origin {
            Origin::EveryUser => LimitOrigin::EveryUser,
            Origin::Configuration => LimitOrigin::Configuration,
            Origin::Request => LimitOrigin::Request,
        },
    };
    UserLimitsEntry {
        uid,
        requests: limit(limits.requests),
        connections: limit(limits.connections),
        passed_models: limit(limits.passed_models),
        share: limit(limits.share),
        ext: Ext::new(),
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire;

    use super::*;
    use crate::share::limits::UserLimits;

    #[test]
    fn all_users_with_limits_fit_the_smallest_frame() {
        assert_eq!(USERS_MAX, wire::limits::USERS_MAX);
        let (limits, own) = (UserLimits::default(), OfOneUser { requests: Some(1), ..OfOneUser::default() });
        assert!((0..USERS_MAX as u32).all(|uid| limits.request(uid, false, own)));
        let users = limits.all().into_iter().map(|(uid, limits)| entry(uid, &limits)).collect();
        let encoded = wire::encode(&LimitUserReply { users, ext: Ext::new() }).unwrap();
        assert!(encoded.len() <= wire::PAYLOAD_BYTES_MIN as usize, "{}", encoded.len());
    }
}
