//! The device layer when the driver fails: each test in its own process, on the look-alike with a script of faults.

use rocmforge::backend::BackendError;
use rocmforge::backend::hip::kernels::objects::ObjectError;
use rocmforge::backend::hip::kernels::probe::ProbeLaunch;
use rocmforge::backend::hip::{Device, DeviceOptions, Grid, HipError, Purpose, Runtime, StreamPriority};

use crate::child::{calls, child, open};

const MIB: usize = 1 << 20;

#[test]
fn a_lost_device_answers_every_later_call_at_once() {
    let test = "faults::a_lost_device_answers_every_later_call_at_once";
    let Some(library) = child(test, &[("FAULTS", "hipMemcpyAsync:2=lost")]) else { return };
    let device = open(&library);
    let stream = device.stream(StreamPriority::High).unwrap();
    let event = device.event(false).unwrap();
    let buffer = device.take(4, Purpose::Scratch).unwrap();
    stream.upload(buffer.all(), &[1u32]).unwrap();
    let error = stream.upload(buffer.all(), &[2u32]).unwrap_err();
    let failure = error.failure().unwrap().clone();
    assert!(error.is_lost(), "{error}");
    assert_eq!((failure.device, failure.call, failure.code), (Some(0), "hipMemcpyAsync", 719));
    assert_eq!(failure.name, "hipErrorLaunchFailure");
    assert!(
        error.to_string().contains("the device is lost: device 0: hipMemcpyAsync failed with code 719"),
        "{error}"
    );

    let watched = ["hipMalloc", "hipEventRecord", "hipStreamSynchronize", "hipModuleLaunchKernel", "hipFree"];
    let before = watched.map(|name| calls(&library, name));
    let grid = Grid::x(1).threads(64);
    let arguments = ProbeLaunch { count: buffer.ptr() };
    let later = [
        device.alive().unwrap_err(),
        device.take(300 * MIB, Purpose::Kv).unwrap_err(),
        device.take(1, Purpose::Kv).unwrap_err(),
        stream.record(&event).unwrap_err(),
        stream.synchronize().unwrap_err(),
        stream.is_done().unwrap_err(),
        event.synchronize().unwrap_err(),
        device.launch(&stream, ProbeLaunch::probe_launch, grid, &arguments).unwrap_err(),
        device.memory().unwrap_err(),
    ];
    for error in later {
        assert_eq!((error.is_lost(), error.failure()), (true, Some(&failure)), "{error}");
        assert!(matches!(BackendError::from(error), BackendError::DeviceLost { call: "hipMemcpyAsync", .. }));
    }
    drop((buffer, stream, event, device));
    assert_eq!(watched.map(|name| calls(&library, name)), before, "the driver of a lost device was called");
}

#[test]
fn a_kernel_that_fails_while_it_runs_shows_when_it_is_waited_for() {
    let test = "faults::a_kernel_that_fails_while_it_runs_shows_when_it_is_waited_for";
    let Some(library) = child(test, &[("FAULTS", "kernel.probe_launch:2=700")]) else { return };
    let device = open(&library);
    let stream = device.stream(StreamPriority::High).unwrap();
    let buffer = device.take(4, Purpose::Scratch).unwrap();
    stream.upload(buffer.all(), &[0u32]).unwrap();
    let launch = || {
        let arguments = ProbeLaunch { count: buffer.ptr() };
        device.launch(&stream, ProbeLaunch::probe_launch, Grid::x(1).threads(64), &arguments)
    };
    launch().unwrap();
    stream.synchronize().unwrap();
    let seen = launch().and_then(|()| stream.synchronize()).unwrap_err();
    assert!(seen.is_lost() && seen.failure().is_some_and(|failure| failure.code == 700), "{seen}");
}

#[test]
fn an_unknown_code_is_an_error_with_its_number_and_the_device_goes_on() {
    let test = "faults::an_unknown_code_is_an_error_with_its_number_and_the_device_goes_on";
    let Some(library) = child(test, &[("FAULTS", "hipMalloc:1=4711 hipStreamQuery:1=912")]) else { return };
    let device = open(&library);
    let error = device.take(1, Purpose::Scratch).unwrap_err();
    assert!(matches!(&error, HipError::Call { failure } if failure.code == 4711), "{error}");
    assert!(error.to_string().starts_with("device 0: hipMalloc failed with code 4711 ("), "{error}");
    assert!(device.take(1, Purpose::Scratch).is_ok());
    let stream = device.stream(StreamPriority::Low).unwrap();
    assert!(stream.is_done().is_err_and(|error| !error.is_lost()));
    assert!(stream.is_done().unwrap());
}

#[test]
fn a_full_device_gives_what_fits_and_says_what_is_missing() {
    let test = "faults::a_full_device_gives_what_fits_and_says_what_is_missing";
    let Some(library) = child(test, &[("MEMORY", "67108864")]) else { return };
    let device = open(&library);
    // No chunk of 256 MiB fits, so the arena requests smaller ones.
    let first = device.take(20 * MIB, Purpose::Weights).unwrap();
    let second = device.take(30 * MIB, Purpose::Weights).unwrap();
    let error = device.take(30 * MIB, Purpose::Kv).unwrap_err();
    let HipError::OutOfMemory { device: 0, purpose: Purpose::Kv, need_bytes, free_bytes } = error else {
        panic!("{error}");
    };
    assert_eq!(need_bytes, 30 * MIB as u64);
    assert!(free_bytes <= 14 * MIB as u64, "{free_bytes}");
    assert!(BackendError::from(error).to_string().contains("bytes are needed for KV pages"));
    drop((first, second));
    assert!(device.take(60 * MIB, Purpose::Kv).is_ok(), "empty chunks were not returned to the driver");
}

#[test]
fn no_device_and_no_code_are_said_in_words() {
    let test = "faults::no_device_and_no_code_are_said_in_words";
    let Some(library) = child(test, &[("ARCH", "gfx803:xnack-")]) else { return };
    let runtime = Runtime::open(&library).unwrap();
    assert_eq!(runtime.describe(0).unwrap().arch_name(), "gfx803");
    let error = Device::open(&runtime, &DeviceOptions::default()).unwrap_err();
    assert!(
        matches!(&error, HipError::Object(ObjectError::NotBuilt { arch, .. }) if arch == "gfx803"),
        "{error}"
    );
    let missing = DeviceOptions { index: 3, ..DeviceOptions::default() };
    assert!(matches!(
        Device::open(&runtime, &missing).unwrap_err(),
        HipError::NoSuchDevice { device: 3, count: 1 }
    ));
}

#[test]
fn a_runtime_without_a_device_is_told_from_a_missing_one() {
    let test = "faults::a_runtime_without_a_device_is_told_from_a_missing_one";
    let Some(library) = child(test, &[("DEVICES", "0")]) else { return };
    let error = Runtime::open(&library).unwrap_err();
    assert!(matches!(error, HipError::NoDevice), "{error}");
    assert!(error.to_string().contains("/dev/kfd"), "{error}");
}

#[test]
fn two_devices_keep_their_streams_and_memory_apart() {
    let test = "faults::two_devices_keep_their_streams_and_memory_apart";
    let Some(library) = child(test, &[("DEVICES", "2")]) else { return };
    let runtime = Runtime::open(&library).unwrap();
    let [first, second] = [0, 1]
        .map(|index| Device::open(&runtime, &DeviceOptions { index, ..DeviceOptions::default() }).unwrap());
    let streams = [&first, &second].map(|device| device.stream(StreamPriority::High).unwrap());
    let buffers = [&first, &second].map(|device| device.take(4, Purpose::Scratch).unwrap());
    let grid = Grid::x(1).threads(64);
    for round in 1..4u32 {
        // Alternates devices, with a query of the other in between: each call must first select its own device on the
        // thread.
        assert_eq!(runtime.describe(round % 2).unwrap().index, round % 2);
        for (device, (stream, buffer)) in [&first, &second].into_iter().zip(streams.iter().zip(&buffers)) {
            stream.upload(buffer.all(), &[round]).unwrap();
            let arguments = ProbeLaunch { count: buffer.ptr() };
            device.launch(stream, ProbeLaunch::probe_launch, grid, &arguments).unwrap();
            let mut back = [0u32];
            stream.download(buffer.all(), &mut back).unwrap();
            assert_eq!(back, [round + 1]);
        }
    }
    let arguments = ProbeLaunch { count: buffers[0].ptr() };
    let error = first.launch(&streams[1], ProbeLaunch::probe_launch, grid, &arguments).unwrap_err();
    assert!(matches!(error, HipError::Refused { what: "probe_launch", .. }), "{error}");
    assert_eq!((first.ledger().used_bytes, second.ledger().used_bytes), (256, 256));
}
