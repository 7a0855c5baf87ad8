//! Cases from other systems' bug reports, by their ids, on the reference backend. Those about faults are in `faults.rs`.

// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers")]

mod common;

use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::conformance::sample::scattered;
use kvferry_transport::conformance::{CLAUSES, Harness, Verdict};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork};
use kvferry_transport::{
    DeregisterError, Event, MemoryKind, OpKind, Outcome, Region, RegisterError, Submission, Transport,
};

use common::{Mem, plain};

fn clause(name: &str) {
    let mut harness = Mem::new(MemFaults::default(), plain);
    let (_, clause) = CLAUSES.iter().find(|(n, _)| *n == name).unwrap();
    assert_eq!(clause(&mut harness), Ok(Verdict::Passed));
}

/// The same range twice is an error that leaves the first intact; twice released is one too; nothing leaks.
#[test]
fn reg_01_same_range_registered_and_released_twice() {
    clause("duplicate");
}

/// Device memory is refused at registration, with what is supported; host memory works afterwards.
#[test]
fn reg_04_device_memory_is_refused_at_registration() {
    clause("memory-kind");
    let error = RegisterError::UnsupportedMemory {
        backend: "mem",
        got: MemoryKind::Device(3),
        supported: vec![MemoryKind::Host],
    };
    assert_eq!(error.to_string(), "mem cannot reach device 3 memory; it supports host");
}

/// Ids and tables of every round are as in the first: there is nothing that could slow down.
#[test]
fn reg_05_sixty_rounds_of_ten_thousand_ranges() {
    let mut t = MemNetwork::new(1).endpoint().unwrap();
    let whole = Region::zeroed(30_000).unwrap();
    let empty = t.blob().len();
    for _ in 0..60 {
        for i in 0..10_000u32 {
            let part = whole.part(usize::try_from(i).unwrap(), 20_000).unwrap();
            assert_eq!(t.register(part), Ok(RegionId::new(i)));
        }
        assert_eq!(t.blob().len(), empty + 12 * 10_000);
        for i in 0..10_000 {
            t.deregister(RegionId::new(i)).unwrap();
        }
        assert_eq!(t.blob().len(), empty);
    }
}

/// The first of four operations fails while its siblings go on: their memory stays registered until the last has ended.
#[test]
fn fr_01_a_failed_operation_frees_nothing_under_its_siblings() {
    let net = MemNetwork::new(1);
    let (mut near, mut far) = (net.endpoint().unwrap(), net.endpoint().unwrap());
    let sample = scattered(4, 100);
    let len = |i: &[kvferry_geometry::units::Bytes]| usize::try_from(i[0].get()).unwrap();
    near.register(Region::zeroed(len(&sample.dst_lens)).unwrap()).unwrap();
    far.register(Region::zeroed(len(&sample.src_lens)).unwrap()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    let faults = MemFaults {
        fail: [(0, Break { at_byte: 10, in_doubt: false })].into(),
        slice: Some(200),
        ..MemFaults::default()
    };
    net.set_faults(near.endpoint(), faults);
    for _ in 0..4 {
        let batch = sample.batch.clone();
        near.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();
    }
    let region = RegionId::new(0);
    near.step(Duration::ZERO);
    let ended: Vec<_> = std::iter::from_fn(|| near.next_event()).collect();
    let [Event::Connected { .. }, Event::Completed { outcome: Outcome::Failed(_), .. }] = &ended[..] else {
        panic!("{ended:?}");
    };
    assert_eq!(near.deregister(region), Err(DeregisterError::Busy { region, operations: 3 }));
    near.step(Duration::ZERO);
    assert_eq!(std::iter::from_fn(|| near.next_event()).count(), 3);
    near.deregister(region).unwrap();
}

/// A region or place that isn't registered is refused before anything is posted, on either side.
#[test]
fn sec_03_what_is_not_registered_is_refused_before_posting() {
    clause("bounds");
}

/// A valid blob cut at each byte, with each bit flipped, and random bytes are typed errors.
#[test]
fn int_01_short_and_damaged_blobs_are_typed_errors() {
    clause("blob");
    let mut t = Mem::new(MemFaults::default(), plain).endpoint();
    for len in 0..48 {
        assert!(t.connect(&vec![0xff; len]).is_err());
    }
}
