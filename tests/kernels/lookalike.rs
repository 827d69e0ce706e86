//! The CPU look-alike itself: it must detect misuse that a driver detects, and some that drivers miss. Tests go through
//! the device layer, each in its own process.

use rocmforge::backend::hip::kernels::objects::{CodeObject, CodeSource, generic_of};
use rocmforge::backend::hip::kernels::probe::{ProbeCopy, ProbeLaunch, ProbeRead};
use rocmforge::backend::hip::{
    Device, DeviceOptions, DevicePtr, Graph, Grid, HipError, Purpose, Runtime, Stream, StreamPriority,
};

use crate::child::{Side, child, heal, open, open_plain, release_hung, side};
use crate::random::Random;

const MIB: usize = 1 << 20;
const ONE: Grid = Grid::x(1).threads(64);

fn count_up(device: &Device, stream: &Stream, count: DevicePtr<u32>) -> Result<(), HipError> {
    device.launch(stream, ProbeLaunch::probe_launch, ONE, &ProbeLaunch { count })
}

/// The driver's error code, if a driver call caused the error.
fn code(error: &HipError) -> Option<u32> {
    error.failure().map(|failure| failure.code)
}

#[test]
fn memory_of_one_device_is_no_argument_on_another() {
    let test = "lookalike::memory_of_one_device_is_no_argument_on_another";
    let Some(library) = child(test, &[("DEVICES", "2")]) else { return };
    let [first, second] = [0, 1].map(|index| open_plain(&library, index));
    let [mine, other] = [&first, &second].map(|device| device.stream(StreamPriority::High).unwrap());
    let buffer = first.take(4, Purpose::Scratch).unwrap();
    mine.upload(buffer.all(), &[0u32]).unwrap();
    let error = count_up(&second, &other, buffer.ptr()).and_then(|()| other.synchronize()).unwrap_err();
    assert_eq!((error.is_lost(), code(&error)), (true, Some(700)), "{error}");
    assert_eq!(error.failure().unwrap().device, Some(1));
    // The other device still works, and nothing was written.
    count_up(&first, &mine, buffer.ptr()).unwrap();
    let mut back = [7u32];
    mine.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [1]);
}

#[test]
fn memory_that_went_back_is_no_argument_any_more() {
    let test = "lookalike::memory_that_went_back_is_no_argument_any_more";
    let Some(library) = child(test, &[("DEVICES", "2")]) else { return };
    for index in 0..2 {
        let device = open_plain(&library, index);
        let stream = device.stream(StreamPriority::High).unwrap();
        let buffer = device.take(4, Purpose::Scratch).unwrap();
        let late = buffer.ptr();
        stream.upload(buffer.all(), &[0u32]).unwrap();
        let graph = stream.capture(|| count_up(&device, &stream, late)).unwrap().instantiate().unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize().unwrap();
        drop(buffer);
        device.arena().trim();
        assert_eq!(device.ledger().driver_bytes, 0);
        let used = if index == 0 { count_up(&device, &stream, late) } else { graph.launch(&stream) };
        let error = used.and_then(|()| stream.synchronize()).unwrap_err();
        assert_eq!((error.is_lost(), code(&error)), (true, Some(700)), "{index}: {error}");
    }
}

#[test]
fn an_access_past_the_end_of_an_allocation_ends_the_process() {
    let test = "lookalike::an_access_past_the_end_of_an_allocation_ends_the_process";
    let library = match side(test, &[]) {
        None => return,
        Some(Side::Child(library)) => library,
        Some(Side::Parent(output)) => {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("as far as it goes") && !text.contains("too far"), "{text}");
            assert!(!output.status.success(), "{}", output.status);
            return;
        }
    };
    let device = open_plain(&library, 0);
    let stream = device.stream(StreamPriority::High).unwrap();
    // From 4 MiB on an allocation ends at an inaccessible page; the sanitizers watch smaller ones.
    let [from, to] = [4 * MIB, 5 * MIB].map(|bytes| device.take(bytes, Purpose::Scratch).unwrap());
    let words = from.len() as u64 / 16;
    for (count, then) in [(words, "as far as it goes"), (words + 1, "too far")] {
        let arguments = ProbeCopy { input: from.ptr(), output: to.ptr(), count };
        device.launch(&stream, ProbeCopy::probe_copy, Grid::x(4), &arguments).unwrap();
        stream.synchronize().unwrap();
        println!("{then}");
    }
}

#[test]
fn more_threads_than_a_kernel_was_made_for_are_refused() {
    let test = "lookalike::more_threads_than_a_kernel_was_made_for_are_refused";
    let Some(library) = child(test, &[]) else { return };
    let device = open(&library);
    let stream = device.stream(StreamPriority::High).unwrap();
    let buffer = device.take(4, Purpose::Scratch).unwrap();
    stream.upload(buffer.all(), &[0u32]).unwrap();
    let arguments = ProbeLaunch { count: buffer.ptr() };
    let error =
        device.launch(&stream, ProbeLaunch::probe_launch, Grid::x(1).threads(128), &arguments).unwrap_err();
    assert!(matches!(&error, HipError::Call { failure } if failure.code == 9), "{error}");
    assert_eq!(error.failure().unwrap().name, "hipErrorInvalidConfiguration");
    count_up(&device, &stream, buffer.ptr()).unwrap();
    let mut back = [7u32];
    stream.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [1]);
}

#[test]
fn hanging_work_holds_its_stream_until_it_is_let_go_or_given_up() {
    let test = "lookalike::hanging_work_holds_its_stream_until_it_is_let_go_or_given_up";
    let script = "kernel.probe_launch:2=hang kernel.probe_launch:4=hang kernel.probe_launch:6=hang";
    let Some(library) = child(test, &[("FAULTS", script)]) else { return };
    let device = open(&library);
    let [stuck, free] = [(); 2].map(|()| device.stream(StreamPriority::High).unwrap());
    let [buffer, other] = [(); 2].map(|()| device.take(4, Purpose::Scratch).unwrap());
    let done = device.event(false).unwrap();
    stuck.upload(buffer.all(), &[0u32]).unwrap();
    count_up(&device, &stuck, buffer.ptr()).unwrap();
    count_up(&device, &stuck, buffer.ptr()).unwrap();
    stuck.record(&done).unwrap();
    // Another stream runs meanwhile, until it waits for the first.
    for value in 1..50u32 {
        let mut back = [0u32];
        free.upload(other.all(), &[value]).unwrap();
        free.download(other.all(), &mut back).unwrap();
        assert_eq!(back, [value]);
        assert!(!stuck.is_done().unwrap() && !done.is_done().unwrap());
    }
    free.wait(&done).unwrap();
    assert!(!free.is_done().unwrap());
    // Repeats, since the work may not have begun to hang.
    let release = || {
        while !stuck.is_done().unwrap() {
            release_hung(&library);
            std::thread::yield_now();
        }
    };
    release();
    free.synchronize().unwrap();
    let mut back = [0u32];
    stuck.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [2], "the released launch did not finish");

    // Launches 3, 4 and 5; launch 4 hangs in the middle of the graph.
    let graph = stuck.capture(|| (0..3).try_for_each(|_| count_up(&device, &stuck, buffer.ptr()))).unwrap();
    let graph = graph.instantiate().unwrap();
    graph.launch(&stuck).unwrap();
    assert!(!stuck.is_done().unwrap());
    release();
    stuck.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [5]);

    count_up(&device, &stuck, buffer.ptr()).unwrap();
    assert!(!stuck.is_done().unwrap());
    let given_up = device.lose("a step", "no answer for 2 s");
    assert!(given_up.is_lost() && given_up.to_string().contains("no answer for 2 s"), "{given_up}");
    // A driver would block in this call for ever.
    assert_eq!(stuck.synchronize().unwrap_err().failure(), given_up.failure());
}

#[test]
fn an_unknown_code_of_a_running_kernel_comes_with_every_call_until_the_device_is_healed() {
    let test =
        "lookalike::an_unknown_code_of_a_running_kernel_comes_with_every_call_until_the_device_is_healed";
    let Some(library) = child(test, &[("FAULTS", "kernel.probe_launch:1=4711")]) else { return };
    let device = open(&library);
    let stream = device.stream(StreamPriority::High).unwrap();
    let buffer = device.take(4, Purpose::Scratch).unwrap();
    stream.upload(buffer.all(), &[0u32]).unwrap();
    for error in [
        count_up(&device, &stream, buffer.ptr()).and_then(|()| stream.synchronize()).unwrap_err(),
        stream.is_done().unwrap_err(),
        count_up(&device, &stream, buffer.ptr()).unwrap_err(),
    ] {
        assert_eq!((error.is_lost(), code(&error)), (false, Some(4711)), "{error}");
        assert!(error.to_string().contains("failed with code 4711 (hipErrorUnknown)"), "{error}");
    }
    heal(&library);
    count_up(&device, &stream, buffer.ptr()).unwrap();
    let mut back = [7u32];
    stream.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [1]);
}

#[test]
fn a_runtime_that_does_not_start_is_an_error_with_its_number() {
    let test = "lookalike::a_runtime_that_does_not_start_is_an_error_with_its_number";
    let Some(library) = child(test, &[("FAULTS", "hipInit:1+=4711 hipGetDeviceCount:1+=4711")]) else {
        return;
    };
    let error = Runtime::open(&library).unwrap_err();
    assert!(error.to_string().contains("failed with code 4711"), "{error}");
}

#[test]
fn a_device_has_the_memory_that_was_set() {
    let test = "lookalike::a_device_has_the_memory_that_was_set";
    let Some(library) = child(test, &[("MEMORY", "16777216")]) else { return };
    let device = open_plain(&library, 0);
    let all = 16 * MIB as u64;
    assert_eq!(device.memory().unwrap(), (all, all));
    let first = device.take(10 * MIB, Purpose::Weights).unwrap();
    assert_eq!(device.memory().unwrap(), (all - 10 * MIB as u64, all));
    let error = device.take(6 * MIB + 1, Purpose::Kv).unwrap_err();
    let HipError::OutOfMemory { free_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(free_bytes, 6 * MIB as u64);
    let rest = device.take(6 * MIB, Purpose::Kv).unwrap();
    assert_eq!(device.memory().unwrap(), (0, all));
    drop((first, rest));
    device.arena().trim();
    assert_eq!(device.memory().unwrap(), (all, all));
}

#[test]
fn code_for_another_device_is_refused() {
    let test = "lookalike::code_for_another_device_is_refused";
    let Some(library) = child(test, &[]) else { return };
    let runtime = Runtime::open(&library).unwrap();
    let arch = runtime.describe(0).unwrap().arch_name().to_owned();
    let other = if arch == "gfx1201" { "gfx1100" } else { "gfx1201" };
    assert_ne!(generic_of(other), Some(arch.as_str()));
    let folder = tempfile::tempdir().unwrap();
    for (from, codes) in [(other, Some(209)), (arch.as_str(), None)] {
        let image = CodeObject::choose(&CodeSource::Embedded, from).unwrap().images.remove(0);
        std::fs::write(folder.path().join(format!("{arch}.co")), image).unwrap();
        let code_source = CodeSource::Folder(folder.path().into());
        let opened = Device::open(&runtime, &DeviceOptions { code: code_source, ..DeviceOptions::default() });
        assert_eq!(opened.err().as_ref().and_then(code), codes, "{from} on {arch}");
    }
}

/// Fills half of `to` by a copy, half by a kernel on another stream, then sums all of it into `sum`.
fn fork_and_join(
    device: &Device,
    [stream, other]: [&Stream; 2],
    [from, to, sum]: [&rocmforge::backend::hip::Buffer; 3],
) -> Result<(), HipError> {
    let half = from.len() / 2;
    let (forked, joined) = (device.event(false)?, device.event(false)?);
    stream.fill(to.all(), 0xff)?;
    stream.record(&forked)?;
    other.wait(&forked)?;
    let (input, output) = (from.ptr_at(half)?, to.ptr_at(half)?);
    let arguments = ProbeCopy { input, output, count: half as u64 / 16 };
    device.launch(other, ProbeCopy::probe_copy, Grid::x(3), &arguments)?;
    stream.copy(to.range(0, half)?, from.range(0, half)?)?;
    other.record(&joined)?;
    stream.wait(&joined)?;
    let arguments = ProbeRead { input: to.ptr(), output: sum.ptr(), count: to.len() as u64 / 16 };
    device.launch(stream, ProbeRead::probe_read, Grid::x(2), &arguments)
}

/// A replay gives the results of the single calls, in whatever order the look-alike runs unordered work.
fn replays_are_as_eager(library: &std::path::Path) {
    let device = open_plain(library, 0);
    let [stream, other] = [(); 2].map(|()| device.stream(StreamPriority::High).unwrap());
    let [from, to, sum] = [4096, 4096, 8].map(|bytes| device.take(bytes, Purpose::Scratch).unwrap());
    let mut random = Random::new();
    let buffers = [&from, &to, &sum];
    let streams = [&stream, &other];
    let graph = stream.capture(|| fork_and_join(&device, streams, buffers)).unwrap();
    assert_eq!(graph.nodes().unwrap(), 4);
    let graph = graph.instantiate().unwrap();
    for _ in 0..8 {
        let values: Vec<u32> = (0..1024).map(|_| random.bits() as u32).collect();
        let mut seen = [[0u32; 2], [0u32; 2]];
        for (replayed, sums) in seen.iter_mut().enumerate() {
            stream.upload(from.all(), values.as_slice()).unwrap();
            stream.fill(sum.all(), 0xff).unwrap();
            if replayed == 1 {
                graph.launch(&stream).unwrap();
            } else {
                fork_and_join(&device, streams, buffers).unwrap();
            }
            let mut back = vec![0u32; 1024];
            stream.download(to.all(), back.as_mut_slice()).unwrap();
            assert_eq!(back, values);
            stream.download(sum.all(), sums).unwrap();
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0][0] ^ seen[0][1], values.iter().fold(0, |all, value| all ^ value));
    }
}

#[test]
fn a_replayed_graph_gives_what_its_calls_give_one_by_one() {
    let test = "lookalike::a_replayed_graph_gives_what_its_calls_give_one_by_one";
    if let Some(library) = child(test, &[("SEED", "1")]) {
        replays_are_as_eager(&library);
    }
}

#[test]
fn a_replayed_graph_gives_the_same_in_another_order() {
    let test = "lookalike::a_replayed_graph_gives_the_same_in_another_order";
    if let Some(library) = child(test, &[("SEED", "20250707")]) {
        replays_are_as_eager(&library);
    }
}

#[test]
fn a_capture_refuses_what_cannot_be_replayed() {
    let test = "lookalike::a_capture_refuses_what_cannot_be_replayed";
    let Some(library) = child(test, &[]) else { return };
    let device = open_plain(&library, 0);
    let [stream, other] = [(); 2].map(|()| device.stream(StreamPriority::High).unwrap());
    let buffer = device.take(4, Purpose::Scratch).unwrap();
    let outside = device.event(false).unwrap();
    other.record(&outside).unwrap();
    let forked = device.event(false).unwrap();
    stream.upload(buffer.all(), &[0u32]).unwrap();
    type Work<'a> = &'a dyn Fn() -> Result<(), HipError>;
    let wrong: [(&str, u32, Work<'_>); 5] = [
        ("waits for its own stream", 900, &|| stream.synchronize()),
        ("asks how far it is", 900, &|| stream.is_done().map(drop)),
        ("asks for memory", 900, &|| device.take(MIB, Purpose::Scratch).map(drop)),
        ("waits for an event from outside", 900, &|| stream.wait(&outside)),
        ("leaves a forked stream alone", 904, &|| {
            stream.record(&forked)?;
            other.wait(&forked)?;
            count_up(&device, &other, buffer.ptr())
        }),
    ];
    for (what, want, work) in wrong {
        let done: Result<Graph, HipError> = stream.capture(|| {
            count_up(&device, &stream, buffer.ptr())?;
            work()
        });
        let error = done.err().unwrap_or_else(|| panic!("a capture that {what} was accepted"));
        assert_eq!((error.is_lost(), code(&error)), (false, Some(want)), "{what}: {error}");
    }
    // The refused captures ran nothing, and both streams are usable.
    count_up(&device, &stream, buffer.ptr()).unwrap();
    stream.synchronize().unwrap();
    count_up(&device, &other, buffer.ptr()).unwrap();
    let mut back = [7u32];
    other.download(buffer.all(), &mut back).unwrap();
    assert_eq!(back, [2]);
}
