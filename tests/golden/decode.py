#!/usr/bin/env python3
"""Decodes the kept frames, written from PROTOCOL.md alone: shares no code with the implementation, needs no package.

    decode.py check DIR          decode each DIR/*.hex and compare every field with its .json
    decode.py mutate DIR         change each byte of each frame and check that the comparison fails
    decode.py document FILE      compare the field tables below with those of PROTOCOL.md
    decode.py show FILE.hex      print the values of a frame or hello
"""

import json
import pathlib
import struct
import sys
import zlib

# Section 7, one message after another: `struct NAME: field type limits; ...` or `enum NAME: number variant content; ...`.
TABLES = """
struct Cancel: ext Ext
struct Credit: items u32; ext Ext
struct PingRequest: payload [u8] PING; ext Ext
struct PingReply: payload [u8] PING; ext Ext
struct FailRequest: code u16; ext Ext
struct WireError: code u16; retryable bool; retry_after_ms u32; message string ERROR; detail [DetailEntry] DETAILS;
    ext Ext
struct DetailEntry: key string LABEL; value string VALUE
struct InfoRequest: ext Ext
struct InfoReply: version string LABEL; ops [OpInfo] OPS; limits Limits; ext Ext
struct OpInfo: op u16; name string LABEL
struct Limits: frame_bytes_max u32; streams_max u32; fds_max u32; initial_credit u32; context_tokens_max u32;
    stop_texts_max u32; stop_text_bytes_max u32; top_logprobs_max u32; ext Ext
struct ListRequest: after string NAME; ext Ext
struct ListReply: models [ModelSummary] MODELS; more bool; ext Ext
struct ModelSummary: name string NAME; state ModelState; file_bytes u64; architecture string LABEL; sequences u32;
    reason string VALUE; ext Ext
enum ModelState: 0 Registered; 1 Mapped; 2 Draining; 3 Poisoned; 4 Unusable
struct ShowRequest: model string NAME; full bool; skip_metadata u32; skip_tensors u32; ext Ext
struct ShowReply: summary ModelSummary; gguf_version u32; parameters u64; weight_bytes u64; context_length u32;
    hidden u32; layers u32; heads u32; kv_heads u32; head_dim u32; ffn u32; vocab u32; tokenizer string LABEL;
    chat_template bool; end_of_generation [u32] ENDS; types [TypeCount] ENTRIES; metadata_total u32; tensors_total
    u32; metadata [MetadataEntry] ENTRIES; tensors [TensorEntry] ENTRIES; host HostMemory; ext Ext
struct HostMemory: wanted Residency; state PagesState; mapped_bytes u64; resident_bytes u64; locked_bytes u64;
    read_bytes u64; cached_bytes u64?; reason string VALUE; ext Ext
enum Residency: 0 None; 1 Populate; 2 Lock
enum PagesState: 0 AsTheyCome; 1 Coming; 2 Here; 3 GivenBack; 4 Refused; 5 Failed
struct TypeCount: dtype string LABEL; tensors u32; bytes u64
struct MetadataEntry: key string KEY; kind string LABEL; value string VALUE
struct TensorEntry: name string LABEL; dtype string LABEL; dims [u64] DIMS; offset_bytes u64; bytes u64
struct LoadRequest: name string NAME; by_descriptor bool; request_id u128; ext Ext
struct LoadReply: summary ModelSummary; mapped_now bool; elapsed_us u64; ext Ext
struct UnloadRequest: name string NAME; request_id u128; ext Ext
struct UnloadReply: was_mapped bool; draining_sequences u32; ext Ext
enum Preload: 0 All; 1 Critical; 2 First u32; 3 Layers [u32] LAYERS
struct LoadToDeviceRequest: model string NAME; what Preload; ext Ext
struct LoadToDeviceItem: tensors u32; tensors_total u32; device_bytes u64; device_bytes_total u64; bytes_per_second u64;
    ext Ext
struct LoadToDeviceEnd: tensors u32; device_bytes u64; elapsed_us u64; ext Ext
struct ClearCacheRequest: scope CacheScope; ext Ext
struct CancelRequestsRequest: scope RequestScope; ext Ext
enum RequestScope: 0 Id u64; 1 Uid u32
struct CancelRequestsReply: cancelled u32; ext Ext
struct LimitUserRequest: uid u32?; clear bool; requests u32?; connections u32?; passed_models u32?; share u32?; ext Ext
struct LimitUserReply: users [UserLimitsEntry] USERS; ext Ext
struct UserLimitsEntry: uid u32; requests LimitInForce; connections LimitInForce; passed_models LimitInForce;
    share LimitInForce; ext Ext
struct UsersRequest: after u32?; ext Ext
struct UsersReply: users [UserEntry] USERS; more bool; ext Ext
struct UserEntry: uid u32; connections u64; requests u64; request_bytes u64; answer_bytes u64; descriptors u64;
    passed_models u64; header_bytes u64; sequences u64; kv_pages u64; text_us u64; frame_us u64; device_us_per_s u64; ext Ext
struct SessionsRequest: ext Ext
struct SessionsReply: sessions [SessionEntry] SESSIONS; ext Ext
struct SessionEntry: name string LABEL; model string NAME; messages u32?; tokens u64; age_ms u64; bytes u64; in_use bool;
    ext Ext
struct ForgetSessionRequest: scope SessionScope; ext Ext
enum SessionScope: 0 All; 1 Name string LABEL
struct ForgetSessionReply: forgotten u32; ext Ext
struct LimitInForce: value u32; origin LimitOrigin
enum LimitOrigin: 0 EveryUser; 1 Configuration; 2 Request
enum CacheScope: 0 All; 1 Model string NAME
struct ClearCacheReply: parts u64; device_bytes u64; ext Ext
struct PlanRequest: model string NAME; context_tokens u32; ext Ext
struct PlanReply: device u32; context_tokens u32; weight_bytes u64; resident_bytes u64; kv_bytes u64; scratch_bytes u64;
    available_bytes u64; budget_bytes u64; others_bytes u64; fit Fit; leaving [LeavingEntry] MODELS; leaving_bytes u64;
    load_ms u64?; queued u32; ext Ext
enum Fit: 0 Whole; 1 Streamed StreamedFit; 2 No u64
struct StreamedFit: resident_bytes u64; step_bytes u64
struct LeavingEntry: id u64; model string NAME; device_bytes u64
struct ResidencyRequest: after u64; ext Ext
struct ResidencyReply: devices [DeviceMemory] DEVICES; models [ResidencyEntry] MODELS; more bool; ext Ext
struct DeviceMemory: kind string LABEL; device string LABEL; weight_bytes u64; kv_bytes u64; scratch_bytes u64;
    staging_bytes u64; graph_bytes u64; taken_bytes u64; budget_bytes u64; available_bytes u64; total_bytes u64; free_bytes
    u64; others_bytes u64; sequences_running u32; sequences_queued u32; decode_rows u64; prefill_rows u64; loads u64;
    hits u64; load_bytes u64; evictions u64; evicted_bytes u64; load_waits u64; load_wait_us u64; bytes_per_second u64;
    ext Ext
struct ResidencyEntry: id u64; device u32; model string NAME; parts string PARTS; weight_bytes u64; kv_bytes u64;
    scratch_bytes u64; rules Rules; sequences u32; idle_ms u64?; eviction_place u32;
    loading LoadingProgress?; ext Ext
struct LoadingProgress: tensors u32; tensors_total u32; device_bytes u64; device_bytes_total u64
struct Rules: pinned bool; priority u8; layers_min u32; idle_s u32
struct SetRulesRequest: model string NAME; pinned bool?; priority u8?; layers_min u32?; idle_s u32?; ext Ext
struct SetRulesReply: rules Rules; host_pinned bool; host_reason string VALUE; ext Ext
struct SubscribeRequest: ext Ext
struct SubscribeItem: missed u64; events [EventEntry] EVENTS; ext Ext
struct SubscribeEnd: ext Ext
struct EventEntry: kind EventKind; id u64; model string NAME; part u32; parts u32; device_bytes u64; text string ERROR;
    ext Ext
enum EventKind: 0 Loaded; 1 Evicted; 2 DeviceLost; 3 ModelMapped; 4 ModelUnmapped; 5 ModelPoisoned
struct TokenizeRequest: model string NAME; text string TEXT; add_special bool; parse_special bool; ext Ext
struct TokenizeReply: ids [u32] IDS; ext Ext
struct DetokenizeRequest: model string NAME; ids [u32] IDS; show_special bool; ext Ext
struct DetokenizeReply: text string TEXT; ext Ext
struct GenerateRequest: model string NAME; prompt Prompt; max_tokens u32; sampling SamplingOptions; stop [string]
    STOPS STOP; ignore_eog bool; timeout_ms u32; request_id u128; ext Ext
enum Prompt: 0 Text string TEXT; 1 Ids [u32] IDS; 2 Chat [ChatMessage] CHAT
struct ChatMessage: role string ROLE; content string TEXT
struct SamplingOptions: temperature f32; top_k u32; top_p f32; min_p f32; seed u64?; top_logprobs u32
struct GenerateItem: ids [u32] IDS; text string TEXT; logprobs [TokenLogprob] IDS; prompt_ids [u32] IDS; ext Ext
struct TokenLogprob: logprob f32; top [TopToken] TOP
struct TopToken: id u32; logprob f32
struct GenerateEnd: stop_reason StopReason; text string TEXT; usage Usage; timings Timings; seed u64; ext Ext
enum StopReason: 0 EndOfGeneration; 1 MaxTokens; 2 ContextFull; 3 StopText
struct Usage: prompt_tokens u32; generated_tokens u32
struct Timings: queue_us u64; load_us u64; prefill_us u64; decode_us u64
struct PsRequest: after u64; ext Ext
struct PsReply: sequences [SequenceEntry] SEQUENCES; more bool; ext Ext
struct SequenceEntry: id u64; uid u32; model string NAME; state SequenceState; prompt_tokens u32; prefilled_tokens
    u32; generated_tokens u32; max_tokens u32; kv_pages u32; age_ms u64; queue_position u32; ext Ext
enum SequenceState: 0 Queued; 1 Prefill; 2 Decode; 3 Stalled; 4 Preparing
struct StatusRequest: ext Ext
struct StatusReply: version string LABEL; uptime_ms u64; pid u32; draining bool; connections u32; models_mapped u32;
    devices [DeviceStatus] DEVICES; rss_anon_bytes u64; rss_file_bytes u64; host HostStatus; ext Ext
struct HostStatus: locked_bytes u64; lock_bytes_max u64; locks_refused u32; reason string VALUE; pressure string LABEL;
    pressure_events u64; ext Ext
struct DeviceStatus: kind string LABEL; device string LABEL; isa string LABEL; threads u32; activations string
    LABEL; kv_type string LABEL; sequences_running u32; sequences_queued u32; kv_pages_used u32; kv_pages_max u32;
    kv_bytes u64; steps u64; rows u64; decode_rows u64; prefill_rows u64; sequences_done u64; sequences_failed u64;
    sequences_cancelled u64; tensors_loaded u64; tensor_hits u64; device_bytes u64; step_sequences u64; ext Ext
struct DoctorRequest: ext Ext
struct DoctorReply: checks [DoctorCheck] CHECKS; gpus [GpuEntry] DEVICES; ext Ext
struct DoctorCheck: name string LABEL; state CheckState; found string VALUE; advice string VALUE; ext Ext
enum CheckState: 0 Good; 1 Note; 2 Problem
struct GpuEntry: index u32; name string LABEL; arch string LABEL; pci string LABEL; memory_bytes u64; memory_free_bytes
    u64; units u32; wave u32; code string LABEL; works bool; ext Ext
"""

# Section 6: requests by op, and the type of their `Reply`.
REQUESTS = {
    1: ("Cancel", None), 2: ("Credit", None), 16: ("PingRequest", "PingReply"), 17: ("InfoRequest", "InfoReply"),
    18: ("ListRequest", "ListReply"), 19: ("ShowRequest", "ShowReply"), 20: ("LoadRequest", "LoadReply"),
    21: ("UnloadRequest", "UnloadReply"), 22: ("PsRequest", "PsReply"), 23: ("StatusRequest", "StatusReply"),
    24: ("TokenizeRequest", "TokenizeReply"), 25: ("DetokenizeRequest", "DetokenizeReply"),
    26: ("GenerateRequest", None), 27: ("FailRequest", None), 28: ("DoctorRequest", "DoctorReply"),
    29: ("LoadToDeviceRequest", None), 30: ("ClearCacheRequest", "ClearCacheReply"), 31: ("PlanRequest", "PlanReply"),
    32: ("ResidencyRequest", "ResidencyReply"), 33: ("SetRulesRequest", "SetRulesReply"), 34: ("SubscribeRequest", None),
    35: ("CancelRequestsRequest", "CancelRequestsReply"), 36: ("LimitUserRequest", "LimitUserReply"),
    37: ("UsersRequest", "UsersReply"), 38: ("SessionsRequest", "SessionsReply"),
    39: ("ForgetSessionRequest", "ForgetSessionReply"),
}
REPLY, ITEM, END, ERROR = 0x8000, 0x8001, 0x8002, 0x8003
ANSWERS = {
    ITEM: ["GenerateItem", "LoadToDeviceItem", "SubscribeItem"], END: ["GenerateEnd", "LoadToDeviceEnd", "SubscribeEnd"],
    ERROR: ["WireError"],
}
MORE, CRC = 1, 2

# Section 2: offsets follow from the sizes. A number n stands for n bytes.
HELLOS = {
    "ClientHello": "magic 4; min_major u16; max_major u16; minor u16; name_len u16; max_frame u32; features u64; name 64",
    "ServerHello": "magic 4; status u16; major u16; minor u16; min_major u16; max_major u16; max_minor u16; features u64; "
    "features_unknown u64; max_frame u32; max_streams u32; initial_credit u32; retry_after_ms u32; server_id 16; boot_id 16",
}

# Section 9.
PAYLOAD_MAX, FDS_MAX = 1048576, 4
LIMITS = {
    "NAME": 255, "LABEL": 255, "KEY": 1024, "VALUE": 4096, "TEXT": 1044480, "IDS": 261120, "PING": 256, "STOPS": 16,
    "STOP": 256, "TOP": 20, "CHAT": 1024, "ROLE": 64, "MODELS": 4096, "SEQUENCES": 8192, "SESSIONS": 64, "USERS": 1024, "DEVICES": 64, "CHECKS": 96, "OPS": 1024,
    "ENTRIES": 16384, "DIMS": 4, "ENDS": 256, "LAYERS": 1024, "PARTS": 1024, "EVENTS": 64,
    "ERROR": 512, "DETAILS": 16, "EXTS": 16, "EXT": 4096, "FORM": 65536, "EXTRAS": 524288, "EMBEDDING": 524288,
    "DOCUMENT": 524288,
}
CRITICAL = 0x8000
FORM, EXTRAS, DOCUMENT, EMBEDDING = 0x8002, 0x8004, 0x8008, 4
KNOWN = {"GenerateRequest": {0x8001, FORM, 0x8003, EXTRAS, 0x8005, 0x8006, 0x8007, DOCUMENT}, "GenerateEnd": {EMBEDDING},
         "ListRequest": {0x8001}, "UnloadRequest": {0x8001}}


class Bad(Exception):
    """The bytes break a rule, or hold another value than expected."""


def need(holds, why):
    if not holds:
        raise Bad(why)


def parse_tables(text):
    """{name: ("struct" or "enum", [(first word, second word, rest)...])}"""
    tables = {}
    for entry in " ".join(text.split()).replace(" struct ", "\nstruct ").replace(" enum ", "\nenum ").splitlines():
        head, fields = entry.split(":", 1)
        kind, name = head.split()
        tables[name] = (kind, [tuple(field.split()) for field in fields.split(";")])
    return tables


SHAPES = parse_tables(TABLES)


class Reader:
    """Reads values from a payload in order."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        need(count <= len(self.data) - self.at, f"{count} bytes at offset {self.at} reach past the end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size):
        return int.from_bytes(self.take(size), "little")

    def count(self, limit, what):
        count = self.number(8)
        need(count <= limit, f"{count} {what}, at most {limit}")
        return count

    def value(self, kind, limits=()):
        if kind in ("u8", "u16", "u32", "u64", "u128"):
            return self.number(int(kind[1:]) // 8)
        if kind == "f32":
            return struct.unpack("<f", self.take(4))[0]
        if kind == "bool":
            return bool(self.choice(2))
        if kind == "string":
            try:
                return self.take(self.count(LIMITS[limits[0]], "bytes")).decode("utf-8")
            except UnicodeDecodeError as error:
                raise Bad(str(error)) from error
        if kind.endswith("?"):
            return self.value(kind[:-1], limits) if self.choice(2) else None
        if kind.startswith("["):
            count = self.count(LIMITS[limits[0]], "elements")
            return [self.value(kind[1:-1], limits[1:]) for _ in range(count)]
        return self.shape(kind)

    def choice(self, count):
        byte = self.number(1)
        need(byte < count, f"{byte} where 0 or 1 is expected")
        return byte

    def extension(self, known):
        key = self.number(2)
        long = {FORM: "FORM", EXTRAS: "EXTRAS", DOCUMENT: "DOCUMENT", EMBEDDING: "EMBEDDING"}
        limit = LIMITS[long.get(key, "EXT") if key in known else "EXT"]
        return [key, list(self.take(self.count(limit, "bytes")))]

    def extensions(self, known):
        pairs = [self.extension(known) for _ in range(self.count(LIMITS["EXTS"], "extensions"))]
        keys = [key for key, _ in pairs]
        need(len(set(keys)) == len(keys), "an extension occurs twice")
        need(not any(key & CRITICAL and key not in known for key in keys), "an unknown critical extension")
        return pairs

    def shape(self, name):
        kind, rows = SHAPES[name]
        if kind == "struct":
            return {field: self.extensions(KNOWN.get(name, ())) if kind == "Ext" else self.value(kind, limits)
                    for field, kind, *limits in rows}
        number = self.number(4)
        for row_number, variant, *content in rows:
            if int(row_number) == number:
                return {variant: self.value(content[0], content[1:])} if content else variant
        raise Bad(f"{name} has no variant {number}")


def decode_payload(message, data):
    reader = Reader(data)
    value = reader.shape(message)
    need(reader.at == len(data), f"{len(data) - reader.at} bytes after the message")
    return value


def decode_frame(message, data):
    need(len(data) >= 16, "the header is incomplete")
    length, stream, op, flags, n_fds, crc = struct.unpack("<IIHBBI", data[:16])
    payload = data[16:]
    need(length <= PAYLOAD_MAX, "the payload length {length} exceeds {PAYLOAD_MAX}")
    need(length == len(payload), f"{len(payload)} bytes of payload, the header says {length}")
    need(flags & ~(MORE | CRC) == 0, f"unknown flags {flags:#x}")
    need(n_fds <= FDS_MAX, f"{n_fds} descriptors, at most {FDS_MAX}")
    need(bool(flags & MORE) == (op == ITEM), "MORE must be set on Item and on nothing else")
    need(crc == (zlib.crc32(data[:12] + payload) if flags & CRC else 0), "the checksum is wrong")
    replies = [reply for _, reply in REQUESTS.values() if reply]
    fits = message in (replies if op == REPLY else ANSWERS.get(op, REQUESTS.get(op, [None])[:1]))
    need(fits, f"op {op:#x} does not carry {message}")
    header = {"len": length, "stream": stream, "op": op, "flags": flags, "n_fds": n_fds, "crc_or_zero": crc}
    return {"message": message, "header": header, "payload": decode_payload(message, payload)}


def decode_hello(message, data):
    value = {"message": message}
    reader = Reader(data)
    for field in HELLOS[message].split(";"):
        name, kind = field.split()
        value[name] = reader.number(int(kind[1:]) // 8) if kind[0] == "u" else reader.take(int(kind))
    need(reader.at == len(data), "there are bytes after the hello")
    need(value["magic"] == b"RFG1", "the magic is wrong")
    value["magic"] = "RFG1"
    if message == "ClientHello":
        need(value["name_len"] <= 64 and not any(value["name"][value["name_len"] :]), "the name is invalid")
        try:
            value["name"] = value["name"][: value["name_len"]].decode("utf-8")
        except UnicodeDecodeError as error:
            raise Bad(str(error)) from error
    else:
        value["server_id"], value["boot_id"] = list(value["server_id"]), list(value["boot_id"])
    return value


def decode(message, data):
    return decode_hello(message, data) if message in HELLOS else decode_frame(message, data)


def same(found, expected):
    """Whether every field is equal, in both directions; floats by their bits, since JSON writes f32 in decimal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return struct.pack("<f", found) == struct.pack("<f", expected)
    return type(found) is type(expected) and found == expected


def agrees(data, expected):
    """Why the bytes do not match the expected value; None if they do."""
    try:
        found = decode(expected["message"], data)
    except Bad as error:
        return str(error)
    return None if same(found, expected) else "the value differs"


def kept(folder):
    for path in sorted(pathlib.Path(folder).glob("*.hex")):
        data = bytes.fromhex(path.read_text())
        yield path.name, data, json.loads(path.with_suffix(".json").read_text("utf-8"))


def check(folder):
    count = 0
    for name, data, expected in kept(folder):
        why = agrees(data, expected)
        need(why is None, f"{name}: {why}")
        count += 1
    print(f"{count} frames agree")


def mutate(folder):
    count = 0
    for name, data, expected in kept(folder):
        need(agrees(data, expected) is None, f"{name}: the frame is wrong before any change")
        for at in range(len(data)):
            for change in (0x01, 0x80):
                changed = bytearray(data)
                changed[at] ^= change
                need(agrees(bytes(changed), expected) is not None, f"{name}: byte {at} ^ {change:#x} goes unnoticed")
            count += 1
    print(f"{count} bytes, each change is seen")


def document(path):
    """Compares the page's tables with those above. The page has one field per line; the tables above have semicolons."""
    text = pathlib.Path(path).read_text("utf-8")
    entries = []
    for block in text.split("```fields\n")[1:]:
        for line in block.split("```")[0].splitlines():
            if line.startswith("  "):
                entries[-1].append(line.strip())
            else:
                entries.append([line])
    found = parse_tables(" ".join(f"{head}: {'; '.join(fields)}" for head, *fields in entries))
    for name in {**found, **SHAPES}:
        need(found.get(name) == SHAPES.get(name), f"{name}: the page and the decoder differ")
    for name, limit in LIMITS.items():
        need(f"| {name} | {limit} |" in text, f"the page has no limit {name} = {limit}")
    print(f"the document agrees: {len(found)} shapes")


def show(path):
    data = bytes.fromhex(pathlib.Path(path).read_text())
    names = list(HELLOS) if data[:4] == b"RFG1" else [name for name in SHAPES if name.endswith(("Request", "Reply", "Item", "End"))]
    for name in names + ["Cancel", "Credit", "WireError"]:
        try:
            print(json.dumps(decode(name, data), indent=2, ensure_ascii=False))
        except Bad:
            pass


def main():
    commands = {"check": check, "mutate": mutate, "document": document, "show": show}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    try:
        commands[sys.argv[1]](sys.argv[2])
    except Bad as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
