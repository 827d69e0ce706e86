//! Ops and the message each one carries.

use super::messages::*;
use super::{CodecError, Message, WireError, decode};

/// Declares the ops once: enum, number -> op, names, list.
macro_rules! ops {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal,)+) => {
        /// The kind of a frame. Numbers are stable; those of the client are below 0x8000, those of the server above.
        #[repr(u16)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op { $($(#[doc = $doc])+ $name = $number,)+ }

        impl Op {
            /// Every op.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The op of a number, if this version knows it.
            pub const fn from_u16(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)+ _ => None }
            }

            /// The op's name in `PROTOCOL.md`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }
        }
    };
}

ops! {
    /// Client: [`Cancel`]; stops the stream's request. It has no reply: the stream ends with its `Error`, `End` or
    /// `Reply`.
    Cancel = 1,
    /// Client: [`Credit`]. No reply.
    Credit = 2,
    /// Client: [`PingRequest`], answered by [`PingReply`].
    Ping = 16,
    /// Client: [`InfoRequest`], answered by [`InfoReply`].
    Info = 17,
    /// Client: [`ListRequest`], answered by [`ListReply`].
    List = 18,
    /// Client: [`ShowRequest`], answered by [`ShowReply`].
    Show = 19,
    /// Client: [`LoadRequest`], answered by [`LoadReply`].
    Load = 20,
    /// Client: [`UnloadRequest`], answered by [`UnloadReply`].
    Unload = 21,
    /// Client: [`PsRequest`], answered by [`PsReply`].
    Ps = 22,
    /// Client: [`StatusRequest`], answered by [`StatusReply`].
    Status = 23,
    /// Client: [`TokenizeRequest`], answered by [`TokenizeReply`].
    Tokenize = 24,
    /// Client: [`DetokenizeRequest`], answered by [`DetokenizeReply`].
    Detokenize = 25,
    /// Client: [`GenerateRequest`], answered by [`GenerateItem`]s and one [`GenerateEnd`].
    Generate = 26,
    /// Client: [`FailRequest`], answered by an error of the requested code.
    Fail = 27,
    /// Client: [`DoctorRequest`], answered by [`DoctorReply`].
    Doctor = 28,
    /// Client: [`LoadToDeviceRequest`], answered by [`LoadToDeviceItem`]s and one [`LoadToDeviceEnd`].
    LoadToDevice = 29,
    /// Client: [`ClearCacheRequest`], answered by [`ClearCacheReply`].
    ClearCache = 30,
    /// Client: [`PlanRequest`], answered by [`PlanReply`].
    Plan = 31,
    /// Client: [`ResidencyRequest`], answered by [`ResidencyReply`].
    Residency = 32,
    /// Client: [`SetRulesRequest`], answered by [`SetRulesReply`].
    SetRules = 33,
    /// Client: [`SubscribeRequest`], answered by [`SubscribeItem`]s and, when the daemon stops, one [`SubscribeEnd`].
    Subscribe = 34,
    /// Client: [`CancelRequestsRequest`], answered by [`CancelRequestsReply`].
    CancelRequests = 35,
    /// Client: [`LimitUserRequest`], answered by [`LimitUserReply`].
    LimitUser = 36,
    /// Client: [`UsersRequest`], answered by [`UsersReply`].
    Users = 37,
    /// Client: [`SessionsRequest`], answered by [`SessionsReply`].
    Sessions = 38,
    /// Client: [`ForgetSessionRequest`], answered by [`ForgetSessionReply`].
    ForgetSession = 39,
    /// Server: the whole answer; the request's op gives its type. Ends the stream.
    Reply = 0x8000,
    /// Server: one of several; the request's op gives [`GenerateItem`], [`LoadToDeviceItem`] or [`SubscribeItem`].
    /// Takes one credit.
    Item = 0x8001,
    /// Server: after the items; the request's op gives [`GenerateEnd`], [`LoadToDeviceEnd`] or [`SubscribeEnd`]. Ends
    /// the stream.
    End = 0x8002,
    /// Server: [`WireError`]; ends the stream, or on stream 0 the connection.
    Error = 0x8003,
}

/// A request with one reply.
pub trait Call: Message {
    /// The request's op.
    const OP: Op;
    /// The reply, in a frame of op [`Op::Reply`].
    type Reply: Message;
}

/// Ties ops to messages: [`ClientMessage`], [`Call`], [`Message`].
macro_rules! mapping {
    (
        alone { $($alone:ident: $alone_type:ident,)+ }
        calls { $($call:ident: $request:ident => $reply:ident,)+ }
        others { $($other:ident,)+ }
    ) => {
        $(impl Message for $alone_type { const NAME: &'static str = stringify!($alone_type); })+
        $(impl Message for $request { const NAME: &'static str = stringify!($request); })+
        $(impl Message for $reply { const NAME: &'static str = stringify!($reply); })+
        $(impl Message for $other { const NAME: &'static str = stringify!($other); })+
        $(impl Call for $request { const OP: Op = Op::$call; type Reply = $reply; })+

        /// Any message of a client, decoded.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // named as their ops
        pub enum ClientMessage { $($alone($alone_type),)+ $($call($request),)+ }

        impl ClientMessage {
            /// Decodes a client's frame.
            ///
            /// # Errors
            /// [`CodecError`]: the stream's request fails with its code; the connection goes on.
            pub fn decode(op: u16, payload: &[u8]) -> Result<Self, CodecError> {
                match Op::from_u16(op) {
                    $(Some(Op::$alone) => decode(payload).map(Self::$alone),)+
                    $(Some(Op::$call) => decode(payload).map(Self::$call),)+
                    _ => Err(CodecError::UnknownOp { op }),
                }
            }

            /// The message's op.
            pub const fn op(&self) -> Op {
                match self { $(Self::$alone(_) => Op::$alone,)+ $(Self::$call(_) => Op::$call,)+ }
            }
        }

        /// Decodes the `Reply` to a request of `op`, for tools that only check its validity.
        ///
        /// # Errors
        /// As [`decode`]; [`CodecError::UnknownOp`] for ops without a `Reply`.
        pub fn reply_of(op: Op, payload: &[u8]) -> Result<(), CodecError> {
            match op {
                $(Op::$call => decode::<$reply>(payload).map(drop),)+
                other => Err(CodecError::UnknownOp { op: other as u16 }),
            }
        }

        pub(super) fn fuzz_every_message(payload: &[u8]) {
            $(let _ = decode::<$alone_type>(payload);)+
            $(let _ = decode::<$request>(payload);)+
            $(let _ = decode::<$reply>(payload);)+
            $(let _ = decode::<$other>(payload);)+
            let _ = decode::<WireError>(payload);
        }
    };
}

mapping! {
    alone {
        Cancel: Cancel,
        Credit: Credit,
        Generate: GenerateRequest,
        Fail: FailRequest,
        LoadToDevice: LoadToDeviceRequest,
        Subscribe: SubscribeRequest,
    }
    calls {
        Ping: PingRequest => PingReply,
        Info: InfoRequest => InfoReply,
        List: ListRequest => ListReply,
        Show: ShowRequest => ShowReply,
        Load: LoadRequest => LoadReply,
        Unload: UnloadRequest => UnloadReply,
        Ps: PsRequest => PsReply,
        CancelRequests: CancelRequestsRequest => CancelRequestsReply,
        LimitUser: LimitUserRequest => LimitUserReply,
        Users: UsersRequest => UsersReply,
        Sessions: SessionsRequest => SessionsReply,
        ForgetSession: ForgetSessionRequest => ForgetSessionReply,
        Status: StatusRequest => StatusReply,
        Doctor: DoctorRequest => DoctorReply,
        ClearCache: ClearCacheRequest => ClearCacheReply,
        Plan: PlanRequest => PlanReply,
        Residency: ResidencyRequest => ResidencyReply,
        SetRules: SetRulesRequest => SetRulesReply,
        Tokenize: TokenizeRequest => TokenizeReply,
        Detokenize: DetokenizeRequest => DetokenizeReply,
    }
    others {
        GenerateItem,
        GenerateEnd,
        LoadToDeviceItem,
        LoadToDeviceEnd,
        SubscribeItem,
        SubscribeEnd,
    }
}
