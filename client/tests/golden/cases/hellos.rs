//! Cases of both hellos.

use super::*;

#[derive(Serialize)]
struct ClientHelloFile<'a> {
    message: &'a str,
    magic: &'a str,
    min_major: u16,
    max_major: u16,
    minor: u16,
    name_len: usize,
    max_frame: u32,
    features: u64,
    name: &'a str,
}

fn client_hello(case: &str, hello: ClientHello) -> Golden {
    let message = "ClientHello";
    let json = pretty(&ClientHelloFile {
        message,
        magic: "RFG1",
        min_major: hello.min_major,
        max_major: hello.max_major,
        minor: hello.minor,
        name_len: hello.name.len(),
        max_frame: hello.max_frame,
        features: hello.features,
        name: &hello.name,
    });
    let bytes = hello.to_bytes().unwrap().to_vec();
    let decode = move |bytes: &[u8], _: &str| {
        assert_eq!(ClientHello::parse(bytes.try_into().unwrap()).unwrap(), hello);
    };
    Golden { name: file_name(message, case), message, bytes, json, decode: Box::new(decode) }
}

#[derive(Serialize)]
struct ServerHelloFile<'a> {
    message: &'a str,
    magic: &'a str,
    status: u16,
    major: u16,
    minor: u16,
    min_major: u16,
    max_major: u16,
    max_minor: u16,
    features: u64,
    features_unknown: u64,
    max_frame: u32,
    max_streams: u32,
    initial_credit: u32,
    retry_after_ms: u32,
    server_id: [u8; 16],
    boot_id: [u8; 16],
}

fn server_hello(case: &str, hello: ServerHello) -> Golden {
    let message = "ServerHello";
    let json = pretty(&ServerHelloFile {
        message,
        magic: "RFG1",
        status: hello.status,
        major: hello.major,
        minor: hello.minor,
        min_major: hello.min_major,
        max_major: hello.max_major,
        max_minor: hello.max_minor,
        features: hello.features,
        features_unknown: hello.features_unknown,
        max_frame: hello.limits.max_frame,
        max_streams: hello.limits.max_streams,
        initial_credit: hello.limits.initial_credit,
        retry_after_ms: hello.retry_after_ms,
        server_id: hello.server_id,
        boot_id: hello.boot_id,
    });
    let bytes = hello.to_bytes().to_vec();
    let decode = move |bytes: &[u8], _: &str| {
        assert_eq!(ServerHello::parse(bytes.try_into().unwrap()).unwrap(), hello);
    };
    Golden { name: file_name(message, case), message, bytes, json, decode: Box::new(decode) }
}

/// Every case.
pub fn all() -> Vec<Golden> {
    let largest_client = ClientHello {
        min_major: u16::MAX,
        max_major: u16::MAX,
        minor: u16::MAX,
        max_frame: u32::MAX,
        features: u64::MAX,
        name: "é".repeat(CLIENT_NAME_BYTES_MAX / 2),
    };
    let smallest_client = ClientHello { min_major: 0, max_major: 0, max_frame: 0, ..ClientHello::new("") };
    let offer = ServerOffer {
        server_id: *b"0123456789abcdef",
        boot_id: *b"fedcba9876543210",
        ..ServerOffer::default()
    };
    let typical_client =
        ClientHello { features: FEATURE_CHECKSUM | 1 << 40, ..ClientHello::new("rocmforge-client/0.1.0") };
    let acting_client = ClientHello::new("rocmforge-gateway/0.1.0").acting_as(31_352);
    let largest_server = ServerHello {
        status: u16::MAX,
        major: u16::MAX,
        minor: u16::MAX,
        min_major: u16::MAX,
        max_major: u16::MAX,
        max_minor: u16::MAX,
        features: u64::MAX,
        features_unknown: u64::MAX,
        limits: HelloLimits { max_frame: u32::MAX, max_streams: u32::MAX, initial_credit: u32::MAX },
        retry_after_ms: u32::MAX,
        server_id: [0xff; 16],
        boot_id: [0xff; 16],
    };
    vec![
        client_hello("min", smallest_client),
        client_hello("typical", typical_client.clone()),
        client_hello("max", largest_client),
        client_hello("acting", acting_client.clone()),
        server_hello("min", ServerOffer::default().refuse(ErrorCode::UnsupportedMajor, 0)),
        server_hello("refused", offer.refuse(ErrorCode::Quota, 250)),
        server_hello("typical", offer.answer(&typical_client)),
        server_hello("max", largest_server),
        server_hello("acting", offer.answer(&acting_client)),
    ]
}
