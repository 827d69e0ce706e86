use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::tensor::{DType, MappedFile, Shape};

/// A load that the test completes or fails.
#[derive(Clone)]
struct Fake(Rc<Cell<u8>>, u64);

impl Fake {
    fn new(bytes: u64) -> Self {
        Self(Rc::default(), bytes)
    }
}

impl Flight for Fake {
    fn state(&self) -> LoadState {
        match self.0.get() {
            0 => LoadState::Loading,
            1 => LoadState::Resident,
            _ => LoadState::Failed(BackendError::Batch("a planted fault")),
        }
    }

    fn tensor(&self) -> LoadedTensor {
        LoadedTensor { address: 1, bytes: self.1 }
    }
}

fn wanted(count: u32) -> (VecDeque<Wanted>, u64) {
    let file = MappedFile::map(std::fs::File::open("/proc/self/exe").unwrap()).unwrap();
    let shape = Shape::new(&[4]).unwrap();
    let lazy = |n: u32| LazyTensor::new(&format!("t{n}"), DType::F32, shape, 0..16, file.clone()).unwrap();
    let one = |n| Wanted { tensor: Tensor { lazy: lazy(n), residence: Residence::Device }, part: n };
    ((0..count).map(one).collect(), u64::from(count) * 16)
}

/// Runs a turn in which each allowed load begins, with this many bytes. Returns the loads begun and the requests ended.
fn turn(loads: &mut Loads<Fake>, bytes: u64) -> (Vec<Fake>, Vec<Ended>) {
    let (mut begun, mut ended) = (Vec::new(), Vec::new());
    loads.look();
    loop {
        match loads.next() {
            None => return (begun, ended),
            Some(Action::Wake(_)) => {}
            Some(Action::End(end)) => ended.push(end),
            Some(Action::Begin { .. }) => {
                begun.push(Fake::new(bytes));
                loads.begun(Begun::Flying(begun[begun.len() - 1].clone()));
            }
        }
    }
}

#[test]
fn a_request_ends_when_all_has_arrived_and_counts_on_the_way() {
    let mut loads = Loads::default();
    let (progress, watched) = watch::channel(LoadProgress::default());
    loads.ask(ModelId(1), wanted(3), progress);
    let (flights, ended) = turn(&mut loads, 16);
    assert_eq!((flights.len(), ended.len(), loads.are_in_flight()), (3, 0, true));
    flights[0].0.set(1);
    flights[2].0.set(1); // an earlier load is still in flight, so this one counts later
    assert!(loads.look());
    let reached = watched.borrow().clone();
    assert_eq!((reached.tensors, reached.tensors_total, reached.bytes, reached.bytes_total), (1, 3, 16, 48));
    flights[1].0.set(1);
    let (_, ended) = turn(&mut loads, 16);
    assert_eq!((ended.len(), ended[0].error.is_none(), loads.is_empty()), (1, true, true));
    ended.into_iter().for_each(Ended::tell);
    assert!(matches!(watched.borrow().ended, Some(Ok(()))));
}

#[test]
fn bytes_in_flight_are_bounded_and_requests_take_turns() {
    let mut loads = Loads::default();
    let (first, _kept) = watch::channel(LoadProgress::default());
    let (second, _kept_too) = watch::channel(LoadProgress::default());
    loads.ask(ModelId(1), wanted(9), first);
    loads.ask(ModelId(2), wanted(1), second);
    let (flights, _) = turn(&mut loads, IN_FLIGHT_BYTES / 2);
    assert_eq!(flights.len(), 3, "two of the first request, and the second's one");
    assert_eq!(turn(&mut loads, 1).0.len(), 0, "no room until a load arrives");
    flights[0].0.set(1);
    assert_eq!(turn(&mut loads, IN_FLIGHT_BYTES).0.len(), 1);
}

#[test]
fn a_failed_load_ends_its_request_alone_and_what_it_left_in_flight_is_watched() {
    let mut loads = Loads::default();
    let (first, _kept) = watch::channel(LoadProgress::default());
    let (second, _kept_too) = watch::channel(LoadProgress::default());
    loads.ask(ModelId(1), wanted(2), first);
    loads.ask(ModelId(2), wanted(1), second);
    let (flights, _) = turn(&mut loads, 16);
    flights[0].0.set(2);
    let (_, ended) = turn(&mut loads, 16);
    assert_eq!((ended.len(), ended[0].model, ended[0].error.is_some()), (1, ModelId(1), true));
    assert!(loads.strays_failed(), "the failed one is cleared");
    assert!(!loads.strays_failed(), "once");
    flights[1].0.set(2);
    assert!(loads.strays_failed(), "its neighbour's failure after the end is noticed");
    assert!(!loads.is_empty(), "the other request goes on");
}

#[test]
fn a_request_without_room_waits_and_one_without_listeners_is_dropped() {
    let mut loads: Loads<Fake> = Loads::default();
    let (progress, watched) = watch::channel(LoadProgress::default());
    loads.ask(ModelId(1), wanted(2), progress);
    loads.look();
    assert!(matches!(loads.next(), Some(Action::Begin { .. })));
    loads.begun(Begun::Blocked);
    assert!(loads.next().is_none(), "no further action in this turn");
    loads.look();
    assert!(matches!(loads.next(), Some(Action::Begin { .. })), "tried again");
    drop(watched);
    loads.look();
    assert!(loads.next().is_none() && loads.is_empty());
}
