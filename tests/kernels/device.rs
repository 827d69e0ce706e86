//! The device layer: memory, streams, events, graphs and launches, and the calls that it refuses.

use std::sync::atomic::Ordering;

use rocmforge::backend::hip::kernels::probe::{ProbeCopy, ProbeLaunch, ProbeRead};
use rocmforge::backend::hip::{ArenaOptions, DevicePtr, Grid, HipError, Purpose, StreamPriority};

use crate::rig::{Rig, rig, rig_with};

const MIB: usize = 1 << 20;

fn numbers(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ 0x9e37).collect()
}

#[test]
fn a_kernel_gets_its_arguments_and_its_shape() {
    let Some(rig) = rig() else { return };
    let values = numbers(4 * 1000);
    let (input, output) = (rig.upload(&values), rig.output::<u32>(values.len()));
    let arguments = ProbeCopy { input: input.ptr(), output: output.ptr(), count: 1000 };
    rig.device.launch(&rig.stream, ProbeCopy::probe_copy, Grid::x(3), &arguments).unwrap();
    assert_eq!(rig.download::<u32>(&output), values);

    let blocks = rig.output::<u32>(5);
    let arguments = ProbeRead { input: input.ptr(), output: blocks.ptr(), count: 1000 };
    rig.device.launch(&rig.stream, ProbeRead::probe_read, Grid::x(5), &arguments).unwrap();
    let seen = rig.download::<u32>(&blocks).into_iter().fold(0, |all, block| all ^ block);
    assert_eq!(seen, values.iter().fold(0, |all, value| all ^ value));
    let launches = rig.device.launches();
    assert!(launches.iter().any(|(name, count)| *name == "probe_copy" && *count > 0), "{launches:?}");
}

#[test]
fn a_shape_that_cannot_be_is_refused_before_the_driver_sees_it() {
    let Some(rig) = rig() else { return };
    let counter = rig.upload(&[0u32]);
    let arguments = ProbeLaunch { count: counter.ptr() };
    for grid in [Grid::x(0), Grid::x(1).threads(17), Grid::x(1).lds(u32::MAX), Grid::xy(1, 70_000)] {
        let error = rig.device.launch(&rig.stream, ProbeLaunch::probe_launch, grid, &arguments).unwrap_err();
        assert!(matches!(error, HipError::Refused { what: "probe_launch", .. }), "{error}");
    }
    let grid = Grid::x(4).threads(64);
    rig.device.launch(&rig.stream, ProbeLaunch::probe_launch, grid, &arguments).unwrap();
    assert_eq!(rig.download::<u32>(&counter), [1]);
}

#[test]
fn a_launch_past_a_buffers_end_is_refused_before_the_driver_sees_it() {
    let Some(rig) = rig() else { return };
    let (input, output) = (rig.upload(&numbers(400)), rig.output::<u32>(404));
    let arguments = ProbeCopy { input: input.ptr(), output: output.ptr_at(16).unwrap(), count: 100 };
    let launch = |arguments| rig.device.launch(&rig.stream, ProbeCopy::probe_copy, Grid::x(1), &arguments);
    launch(arguments).unwrap();
    for (wrong, argument, present) in [
        (ProbeCopy { input: input.ptr_at(4).unwrap(), ..arguments }, "input", 399),
        (ProbeCopy { output: output.ptr_at(20).unwrap(), ..arguments }, "output", 399),
        (ProbeCopy { output: DevicePtr::NULL, ..arguments }, "output", 0),
        (ProbeCopy { output: arguments.output.offset(500), ..arguments }, "output", 0),
    ] {
        let error = launch(wrong).unwrap_err();
        let HipError::OutOfBounds(fault) = error else { panic!("{error}") };
        let found = (fault.kernel, fault.argument, fault.need, fault.present);
        assert_eq!(found, ("probe_copy", argument, Some(400), present));
    }
    assert_eq!(rig.download::<u32>(&output)[4..], numbers(400));
}

#[test]
fn ranges_and_pointers_stay_in_their_buffer() {
    let Some(rig) = rig() else { return };
    let buffer = rig.upload(&numbers(10));
    assert!(buffer.range(36, 4).is_ok() && buffer.range(40, 0).is_ok());
    assert!(buffer.range(36, 5).is_err() && buffer.range(usize::MAX, 2).is_err());
    assert!(buffer.ptr_at::<u32>(36).is_ok_and(|ptr| ptr.address() == buffer.ptr::<u32>().address() + 36));
    assert!(buffer.ptr_at::<u32>(37).is_err() && buffer.ptr_at::<u64>(36).is_err());
    let mut few = [0u32; 3];
    assert!(
        rig.stream.download(buffer.all(), &mut few).is_err(),
        "a download of another length was accepted"
    );
    rig.stream.download(buffer.range(4, 12).unwrap(), &mut few).unwrap();
    assert_eq!(few, numbers(10)[1..4]);
    assert!(DevicePtr::<u8>::NULL.is_null() && !buffer.ptr::<u8>().is_null());
}

#[test]
fn pinned_memory_shows_its_bytes_only_when_the_copy_is_over() {
    let Some(rig) = rig() else { return };
    let mut there = rig.device.pinned(4096).unwrap();
    let buffer = rig.output::<u8>(2000);
    for round in 0..4u8 {
        let bytes = there.bytes_mut().unwrap();
        bytes.fill(0);
        bytes[96..2096].fill(round);
        rig.stream.upload_pinned(buffer.all(), &mut there, 96).unwrap();
        // Waits for the copy: the next round must not change what it still reads.
        there.bytes_mut().unwrap().fill(0xff);
        assert!(there.is_idle().unwrap());
        assert!(rig.download::<u8>(&buffer).iter().all(|byte| *byte == round));
    }
    assert!(
        rig.stream.upload_pinned(buffer.all(), &mut there, 2097).is_err(),
        "an upload past the buffer's end was accepted"
    );
}

#[test]
fn an_event_orders_two_streams() {
    let Some(rig) = rig() else { return };
    let other = rig.device.stream(StreamPriority::Low).unwrap();
    let values = numbers(4 * 4096);
    let (input, middle) = (rig.upload(&values), rig.output::<u32>(values.len()));
    let output = rig.output::<u32>(values.len());
    let first = ProbeCopy { input: input.ptr(), output: middle.ptr(), count: 4096 };
    let second = ProbeCopy { input: middle.ptr(), output: output.ptr(), count: 4096 };
    rig.stream.synchronize().unwrap();
    let copied = rig.device.event(false).unwrap();
    rig.device.launch(&other, ProbeCopy::probe_copy, Grid::x(2), &first).unwrap();
    other.record(&copied).unwrap();
    rig.stream.wait(&copied).unwrap();
    rig.device.launch(&rig.stream, ProbeCopy::probe_copy, Grid::x(2), &second).unwrap();
    assert_eq!(rig.download::<u32>(&output), values);
    assert!(copied.is_done().unwrap() && other.is_done().unwrap());
}

#[test]
fn times_are_told_by_events_made_for_it() {
    let Some(rig) = rig() else { return };
    let buffer = rig.output::<u8>(MIB);
    let (start, end) = (rig.device.event(true).unwrap(), rig.device.event(true).unwrap());
    rig.stream.record(&start).unwrap();
    rig.stream.fill(buffer.all(), 1).unwrap();
    rig.stream.record(&end).unwrap();
    end.synchronize().unwrap();
    let milliseconds = end.milliseconds_since(&start).unwrap();
    assert!(milliseconds >= 0.0 && milliseconds.is_finite(), "{milliseconds}");
}

/// Makes one graph of `launches` counting launches and of copies of words in and out.
fn count_in(rig: &Rig, counter: DevicePtr<u32>, launches: u32) -> rocmforge::backend::hip::Graph {
    rig.stream
        .capture(|| -> Result<(), HipError> {
            for _ in 0..launches {
                let grid = Grid::x(1).threads(64);
                rig.device.launch(
                    &rig.stream,
                    ProbeLaunch::probe_launch,
                    grid,
                    &ProbeLaunch { count: counter },
                )?;
            }
            Ok(())
        })
        .unwrap()
}

#[test]
fn a_graph_does_nothing_when_captured_and_all_of_it_at_each_launch() {
    let Some(rig) = rig_with(ArenaOptions::default()) else { return };
    let (first, second) = (rig.upload(&[0u32]), rig.upload(&[0u32]));
    let graph = count_in(&rig, first.ptr(), 3);
    assert_eq!(graph.nodes().unwrap(), 3);
    assert_eq!(rig.download::<u32>(&first), [0]);
    let mut exec = graph.instantiate().unwrap();
    for _ in 0..4 {
        exec.launch(&rig.stream).unwrap();
    }
    assert_eq!(rig.download::<u32>(&first), [12]);
    // The same launches at another address update the graph; another number of launches needs a new one.
    assert!(exec.update(count_in(&rig, second.ptr(), 3)).unwrap());
    exec.launch(&rig.stream).unwrap();
    assert_eq!((rig.download::<u32>(&first), rig.download::<u32>(&second)), (vec![12], vec![3]));
    assert!(!exec.update(count_in(&rig, second.ptr(), 4)).unwrap());
    exec.launch(&rig.stream).unwrap();
    assert_eq!(rig.download::<u32>(&second), [6]);
}

#[test]
fn a_graph_keeps_the_words_it_copies() {
    let Some(rig) = rig_with(ArenaOptions::default()) else { return };
    let buffer = rig.output::<u32>(4);
    let words = rig.device.host_words(8).unwrap();
    let exec = {
        let (inner, buffer) = (&words, &buffer);
        let graph = rig.stream.capture(|| rig.stream.upload_words(buffer.all(), inner, 4));
        graph.unwrap().instantiate().unwrap()
    };
    for round in 1..4u32 {
        for (i, word) in words.words()[4..].iter().enumerate() {
            word.store(round * 10 + i as u32, Ordering::Relaxed);
        }
        exec.launch(&rig.stream).unwrap();
        assert_eq!(
            rig.download::<u32>(&buffer),
            [round * 10, round * 10 + 1, round * 10 + 2, round * 10 + 3]
        );
    }
    let kept = std::sync::Arc::downgrade(&words);
    drop(words);
    assert!(kept.upgrade().is_some(), "the graph does not keep the words that it copies");
    exec.launch(&rig.stream).unwrap();
    rig.stream.synchronize().unwrap();
    drop(exec);
    assert!(kept.upgrade().is_none());
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    let Some(rig) = rig_with(ArenaOptions::default()) else { return };
    let failed = rig.stream.capture(|| Err::<(), _>(HipError::NoDevice));
    assert!(matches!(failed, Err(HipError::NoDevice)));
    let counter = rig.upload(&[7u32]);
    let grid = Grid::x(1).threads(64);
    rig.device
        .launch(&rig.stream, ProbeLaunch::probe_launch, grid, &ProbeLaunch { count: counter.ptr() })
        .unwrap();
    assert_eq!(rig.download::<u32>(&counter), [8]);
}

#[test]
fn words_are_seen_by_host_and_kernel_alike() {
    let Some(rig) = rig() else { return };
    let words = rig.device.host_words(4).unwrap();
    words.words()[2].store(41, Ordering::Release);
    let arguments = ProbeLaunch { count: words.device_ptr(2).unwrap() };
    let grid = Grid::x(1).threads(64);
    rig.device.launch(&rig.stream, ProbeLaunch::probe_launch, grid, &arguments).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(words.words()[2].load(Ordering::Acquire), 42);
    assert!(words.device_ptr(4).is_err());
    assert!(rig.device.host_words(0).is_err());
}

#[test]
fn buffers_share_chunks_and_the_ledger_says_whose_they_are() {
    let Some(rig) = rig_with(ArenaOptions { chunk_bytes: 4 * MIB, ..ArenaOptions::default() }) else {
        return;
    };
    let take = |bytes, purpose| rig.device.take(bytes, purpose).unwrap();
    let weights: Vec<_> = (0..7).map(|_| take(MIB - 100, Purpose::Weights)).collect();
    let page = take(1, Purpose::Kv);
    let ledger = rig.device.ledger();
    assert_eq!((ledger.of(Purpose::Weights), ledger.of(Purpose::Kv)), (7 * MIB as u64, 256));
    assert_eq!((ledger.chunks, ledger.driver_bytes), (2, 8 * MIB as u64));
    assert!(weights.iter().all(|buffer| buffer.ptr::<u8>().address() % 256 == 0));
    let large = take(9 * MIB, Purpose::Scratch);
    assert_eq!(rig.device.ledger().chunks, 3);
    drop((weights, page, large));
    let ledger = rig.device.ledger();
    assert_eq!((ledger.used_bytes, ledger.bytes.len()), (0, 0));
    assert_eq!(ledger.peak_bytes, 16 * MIB as u64 + 256);
    assert_eq!(
        (ledger.chunks, ledger.driver_bytes),
        (3, 18 * MIB as u64),
        "the arena did not keep the three empty chunks"
    );
    let many: Vec<_> = (0..6).map(|_| take(4 * MIB, Purpose::Weights)).collect();
    drop(many);
    assert_eq!(rig.device.ledger().chunks, 4, "the arena kept more than four empty chunks");
    rig.device.arena().trim();
    assert_eq!(rig.device.ledger().driver_bytes, 0);
}

#[test]
fn a_limit_is_kept_and_the_error_has_the_numbers() {
    let options = ArenaOptions { chunk_bytes: 4 * MIB, limit_bytes: 6 * MIB as u64 };
    let Some(rig) = rig_with(options) else { return };
    let first = rig.device.take(3 * MIB, Purpose::Weights).unwrap();
    // The limit has no room for a second whole chunk, but for one of the requested size.
    let second = rig.device.take(2 * MIB, Purpose::Weights).unwrap();
    let error = rig.device.take(2 * MIB, Purpose::Kv).unwrap_err();
    let HipError::OutOfMemory { purpose: Purpose::Kv, need_bytes, free_bytes: 0, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(need_bytes, 2 * MIB as u64);
    drop((first, second));
    assert!(rig.device.take(5 * MIB, Purpose::Kv).is_ok(), "empty chunks were not freed to make room");
}

/// When memory is too short for whole chunks, a long-lived small buffer must not take space in a chunk sized for a
/// large one.
#[test]
fn a_chunk_made_to_measure_is_not_cut_for_what_is_small() {
    let options = ArenaOptions { chunk_bytes: 256 * MIB, limit_bytes: 40 * MIB as u64 };
    let Some(rig) = rig_with(options) else { return };
    let take = |bytes| rig.device.take(bytes, Purpose::Weights);
    drop(take(30 * MIB).unwrap());
    let small = take(MIB).unwrap();
    assert_eq!(rig.device.ledger().driver_bytes, 2 * MIB as u64);
    let large = take(30 * MIB).unwrap();
    drop((small, large));
    let half = take(16 * MIB).unwrap();
    assert_eq!(
        rig.device.ledger().driver_bytes,
        32 * MIB as u64,
        "the chunk was not reused for a buffer of half its size"
    );
    drop(half);
}
