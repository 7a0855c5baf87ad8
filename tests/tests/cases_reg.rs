//! REG cases: registrations, and block lists that don't match.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_geometry::request::{BoundRequest, RequestError};
use kvferry_geometry::units::RegionId;
use kvferry_tests::by_hand::{Engine, Pair, kv, request, tokens};
use kvferry_transport::mem::{MemNetwork, MemTransport};
use kvferry_transport::{DeregisterError, MemoryKind, Region, RegisterError, Transport};

fn endpoint() -> MemTransport {
    MemNetwork::new(7).endpoint().expect("an endpoint")
}

#[test]
fn reg_01_a_second_registration_is_an_error_and_leaves_the_first() {
    let mut transport = endpoint();
    let region = Region::zeroed(4096).expect("memory");
    let first = transport.register(region.clone()).expect("registered");
    let again = transport.register(region.clone());
    assert!(matches!(again, Err(RegisterError::Duplicate { existing, .. }) if existing == first), "{again:?}");
    let inner = transport.register(region.part(0, 2048).expect("inside")).expect("overlapping is not identical");
    assert_ne!(inner, first);
    for id in [first, inner] {
        transport.deregister(id).expect("it stands");
        let twice = transport.deregister(id);
        assert!(matches!(twice, Err(DeregisterError::Unknown { region }) if region == id), "{twice:?}");
    }
    transport.register(region).expect("nothing of it is left");
}

#[test]
fn reg_03_no_blocks_on_either_side_is_a_success_without_work() {
    let engine = || Engine::new(vec![kv("a", 2, 2)], 1);
    let pair = Pair::new(&engine(), &engine());
    let bound = pair.bind(request(0, &[], &[]));
    assert!(bound.is_full_hit());
    assert!(pair.batch(0, 0, &bound).is_empty());
    assert!(pair.zeroed(0, &bound).is_empty());
}

#[test]
fn reg_03_lists_of_different_length_are_an_error_with_both_counts() {
    let engine = || Engine::new(vec![kv("a", 2, 2)], 1);
    let pair = Pair::new(&engine(), &engine());
    let refused = BoundRequest::new(&pair.compatible, request(32, &[1, 2], &[3])).expect_err("one block is missing").0;
    let [RequestError::NoRoom { need, room, blocks, .. }] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!((*need, *room, *blocks), (tokens(0, 32), tokens(0, 16), 1));
    let refused = BoundRequest::new(&pair.compatible, request(32, &[1], &[2, 3])).expect_err("one block is missing").0;
    let [RequestError::NotHeld { need, listed, blocks, .. }] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!((*need, *listed, *blocks), (tokens(0, 32), tokens(0, 16), 1));
}

#[test]
fn reg_04_device_memory_is_refused_when_it_is_registered() {
    let mut transport = endpoint();
    let host = Region::zeroed(4096).expect("memory");
    let start = NonNull::new(host.as_ptr()).expect("not null");
    let kind = MemoryKind::Device(0);
    // SAFETY: the bytes live as long as `host`, which is the owner given. They are not device memory, but whatever
    // would treat them as such must refuse them first: that is what is tested.
    let device = unsafe { Region::from_raw(start, 4096, kind, Arc::new(host.clone())) };
    let refused = transport.register(device).expect_err("the transport has no device support");
    assert!(matches!(&refused, RegisterError::UnsupportedMemory { got, supported, .. }
        if *got == kind && *supported == [MemoryKind::Host]));
    assert_eq!(refused.to_string(), "mem cannot reach device 0 memory; it supports host");
    assert_eq!(transport.register(host).expect("host memory still works"), RegionId::ZERO);
}

#[test]
fn reg_05_rounds_of_registration_leave_nothing_behind() {
    let mut transport = endpoint();
    let whole = Region::zeroed(10_000).expect("memory");
    for round in 0..60 {
        let ids: Vec<RegionId> =
            (0..1000).map(|i| transport.register(whole.part(i * 10, 10).expect("inside")).expect("free")).collect();
        assert_eq!(ids.last().map(|id| id.get()), Some(999), "round {round}: ids begin anew once none stands");
        ids.into_iter().for_each(|id| transport.deregister(id).expect("it stands"));
    }
}
