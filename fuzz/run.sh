#!/bin/sh
# Fuzzes untrusted input: fuzz/run.sh SECONDS [TARGET...]
#
# Builds the targets. For each target: runs the kept corpus once, requires that the planted fault is found, and fuzzes
# for SECONDS. It starts from the kept corpus and the inputs of earlier runs on this machine (fuzz/target/corpus). As
# many targets run at once as there are processors, or JOBS. Exit status 0: every planted fault was found, and no other.
# Findings stay in fuzz/target/findings; once fixed, keep the input in fuzz/corpus under the name of its fault.
#
# Without address sanitizer: parser and frame code hold no unsafe block. With it (RUSTC_BOOTSTRAP=1, -Zsanitizer=address
# beside the flags of .cargo/config.toml; it links and works) the parser runs 14,000 times a second instead of 110,000.
set -eu
cd "$(dirname "$0")"
# A target has no main of Rust's, which ignores this signal: the daemon's write to a client that has left would end it, with status
# 141 and without a finding. Processes that are started from here ignore it too.
trap '' PIPE
built() {
    echo "target/$(rustc -vV | sed -n 's/^host: //p')/release"
}

runs() {
    sed -n 's/^stat::number_of_executed_units: *//p' "$1"
}

# Edges without counts, and short inputs: the corpus stays small, and the comparison that leads to the fault is met
# often. 800 to 1,050,000 runs found it in each target; the limit is seven times that.
planted() {
    log=target/logs/$1-planted.log
    scratch=$(mktemp -d)
    status=0
    "$(built)/$1_planted" -runs=7000000 -max_total_time=300 -use_counters=0 -max_len=256 -timeout=30 -print_final_stats=1 \
        -rss_limit_mb=2048 -artifact_prefix="$scratch/$1-planted-" "$scratch" "corpus/$1" >"$log" 2>&1 || status=$?
    if [ "$status" -eq 0 ]; then
        # A busy machine runs a target with a daemon some ten times a second, in place of a thousand.
        echo "fuzz: $1: the planted fault was not found in $(runs "$log") runs and 300 s at most: $log"
        rm -rf "$scratch"
        return 1
    fi
    if ! grep -aq 'attempt to multiply with overflow' "$log"; then
        # A fault of the program, or its end: by memory, time or a signal. Its input is a finding like another.
        mv "$scratch/$1-planted-"* target/findings/ 2>/dev/null || true
        rm -rf "$scratch"
        grep -a -A3 'panicked\|ERROR: libFuzzer' "$log" || tail -n 20 "$log"
        echo "fuzz: $1: another fault came before the planted one, with status $status: $log"
        return 1
    fi
    rm -rf "$scratch"
    echo "fuzz: $1: planted fault found after $(runs "$log") runs"
}

honest() {
    log=target/logs/$1.log
    mkdir -p "target/corpus/$1"
    if ! "$(built)/$1" -max_total_time="$2" -max_len=4096 -timeout=30 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="target/findings/$1-" "target/corpus/$1" "corpus/$1" >"$log" 2>&1; then
        grep -a -A3 'panicked\|ERROR: libFuzzer' "$log" || tail -n 20 "$log"
        echo "fuzz: $1: a fault was found: $log"
        return 1
    fi
    echo "fuzz: $1: $(runs "$log") runs in $2 s, no fault; corpus of $(ls "target/corpus/$1" | wc -l)"
}

# One target, called by the loop below.
if [ "${1:-}" = --one ]; then
    planted "$3" && honest "$3" "$2"
    exit
fi
seconds=${1:?usage: fuzz/run.sh SECONDS [TARGET...]}
shift
[ $# -gt 0 ] || set -- gguf_parse frame_header message gguf_semantic tokenizer chat_template config session http_body
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_TARGET_DIR # .cargo/config.toml says what is needed
cargo build --release --locked --quiet
mkdir -p target/findings target/logs
printf '%s\n' "$@" | xargs -P "${JOBS:-$(nproc)}" -n 1 sh run.sh --one "$seconds"
