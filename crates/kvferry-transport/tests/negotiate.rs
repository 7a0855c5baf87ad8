//! Several backends of one rank: the suite, the choice, and what is refused.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

mod common;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::blob::Blob;
use kvferry_transport::conformance::sample::scattered;
use kvferry_transport::conformance::{Harness, run};
use kvferry_transport::fault::{Faulty, Script};
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::negotiate::{NegotiateError, Negotiated};
use kvferry_transport::throttle::{Rate, Throttle};
use kvferry_transport::{
    ConnectError, DeregisterError, EndpointId, Event, Fault, OpKind, Region, RegisterError, Submission, Transport,
};

use common::{Mem, plain};

/// Endpoints with different lists of backends, of which every two have one in common.
struct Mixed {
    networks: [MemNetwork; 2],
    lists: Vec<Vec<usize>>,
    made: usize,
    now: Duration,
    clock: Mem,
}

impl Mixed {
    fn new(lists: &[&[usize]]) -> Self {
        Self {
            networks: [MemNetwork::new(1), MemNetwork::named("mem2", 2)],
            lists: lists.iter().map(|l| l.to_vec()).collect(),
            made: 0,
            now: Duration::ZERO,
            clock: Mem::new(MemFaults::default(), plain),
        }
    }

    fn of(&self, list: &[usize]) -> Negotiated {
        let first = self.networks[list[0]].endpoint().unwrap();
        let id = first.endpoint();
        let mut backends: Vec<Box<dyn Transport>> = vec![Box::new(first)];
        for &other in &list[1..] {
            backends.push(Box::new(self.networks[other].endpoint_as(id).unwrap()));
        }
        Negotiated::new(backends).unwrap()
    }
}

impl Harness for Mixed {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        self.made += 1;
        Box::new(self.of(&self.lists[self.made % self.lists.len()]))
    }

    fn region(&mut self, len: usize) -> Region {
        Region::zeroed(len).unwrap()
    }

    fn now(&mut self) -> Duration {
        self.now += Duration::from_micros(500);
        self.now
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        let killed = self.networks.iter().filter(|n| n.kill(victim.endpoint())).count();
        assert!(killed > 0);
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        self.clock.readable(fd)
    }

    fn rounds(&self) -> u64 {
        100
    }
}

#[test]
fn suite_on_lists_of_one_of_two_and_mixed() {
    let cases: [&[&[usize]]; 5] = [&[&[0]], &[&[0, 1]], &[&[0, 1], &[1]], &[&[0, 1], &[1, 0], &[1]], &[&[1], &[1, 0]]];
    for lists in cases {
        let report = run(&mut Mixed::new(lists));
        println!("{lists:?}: {report}");
        assert!(report.holds_except(&[]), "{lists:?}: {report}");
    }
}

#[test]
fn suite_under_a_wrapper_and_over_one() {
    let faults = MemFaults { slice: Some(2000), ..MemFaults::default() };
    let rate = Rate { bytes_per_second: 1_000_000_000, ops_per_second: 0 };
    let other = MemNetwork::named("other", 9);
    let report = run(&mut Mem::new(faults, move |t| {
        let second = other.endpoint_as(t.endpoint()).unwrap();
        let first = Throttle::new(Faulty::new(t, Script::default()), rate);
        Box::new(Faulty::new(Negotiated::new(vec![Box::new(first), Box::new(second)]).unwrap(), Script::default()))
    }));
    assert!(report.holds_except(&[]), "{report}");
}

fn carried(d: &mut Negotiated, p: &Negotiated) -> String {
    let peer = d.connect(&p.blob()).unwrap();
    let backend = d.backend_of(peer).unwrap();
    let detail = d.peer(peer).unwrap().lane.detail;
    d.disconnect(peer).unwrap();
    if d.backends().count() > 1 {
        assert!(detail.starts_with(backend), "{detail}");
    }
    backend.to_owned()
}

#[test]
fn each_takes_the_first_of_its_own_that_the_peer_has() {
    let world = Mixed::new(&[&[0]]);
    let (mem, mem2) = (world.of(&[0]), world.of(&[1]));
    let (mut ab, mut ba) = (world.of(&[0, 1]), world.of(&[1, 0]));
    assert_eq!(carried(&mut ab, &ba), "mem");
    assert_eq!(carried(&mut ba, &ab), "mem2");
    assert_eq!((carried(&mut ab, &mem), carried(&mut ab, &mem2)), ("mem".into(), "mem2".into()));
    let mut mem2 = mem2;
    assert_eq!((carried(&mut mem2, &ab), carried(&mut mem2, &ba)), ("mem2".into(), "mem2".into()));
    // A list of one is its backend: a peer that knows of no lists can connect to it, and it to that peer.
    let mut bare = world.networks[0].endpoint().unwrap();
    bare.connect(&mem.blob()).unwrap();
    let mut mem = mem;
    mem.connect(&bare.blob()).unwrap();
    assert_eq!((mem.capabilities().backend, ab.capabilities().backend), ("mem", "any"));
    // And a list takes the blob of a peer that knows of none.
    let peer = ba.connect(&bare.blob()).unwrap();
    assert_eq!(ba.backend_of(peer), Ok("mem"));
}

#[test]
fn no_common_backend_names_both_lists() {
    let world = Mixed::new(&[&[0]]);
    let other = MemNetwork::named("mem3", 3);
    let mut three = Negotiated::new(vec![Box::new(other.endpoint().unwrap())]).unwrap();
    let mut both = world.of(&[0, 1]);
    let error = three.connect(&both.blob()).unwrap_err();
    assert_eq!(
        error,
        ConnectError::NoCommonBackend { ours: vec!["mem3"], offered: vec!["mem".to_owned(), "mem2".to_owned()] }
    );
    assert_eq!(error.fault(), Fault::PeerChoice);
    let text = both.connect(&three.blob()).unwrap_err().to_string();
    assert!(text.contains("mem, mem2") && text.contains("offers mem3"), "{text}");
}

#[test]
fn one_endpoint_is_connected_once_whatever_carries_it() {
    let world = Mixed::new(&[&[0]]);
    let (mut d, p) = (world.of(&[0, 1]), world.of(&[0, 1]));
    let peer = d.connect(&p.blob()).unwrap();
    let plain = Blob { backend: "mem2".into(), lane: Vec::new(), ..Blob::decode(&p.blob()).unwrap() }.encode();
    let endpoint = p.endpoint();
    assert_eq!(d.connect(&plain), Err(ConnectError::AlreadyConnected { endpoint, peer }));
    d.disconnect(peer).unwrap();
    let peer = d.connect(&plain).unwrap();
    assert_eq!(d.backend_of(peer), Ok("mem2"));
}

#[test]
fn an_unreachable_preference_is_passed_over_and_told() {
    let world = Mixed::new(&[&[0]]);
    let p = world.of(&[0, 1]);
    let (first, id) = (world.networks[0].endpoint().unwrap(), EndpointId::new([0; 16]));
    let reason = "it is on another host".to_owned();
    let refused = ConnectError::Unreachable { endpoint: p.endpoint(), reason };
    let second = world.networks[1].endpoint_as(first.endpoint()).unwrap();
    let first = Faulty::new(first, Script { connect: [(0, refused)].into(), ..Script::default() });
    let mut d = Negotiated::new(vec![Box::new(first), Box::new(second)]).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    let detail = d.peer(peer).unwrap().lane.detail;
    assert!(detail.starts_with("mem2: ") && detail.ends_with("not mem: it is on another host"), "{detail}");
    // Nowhere at all: the reasons of both.
    let nobody = Blob { endpoint: id, ..Blob::decode(&p.blob()).unwrap() }.encode();
    let text = d.connect(&nobody).unwrap_err().to_string();
    assert!(text.contains("mem: ") && text.contains("mem2: "), "{text}");
}

#[test]
fn region_ids_stay_equal_when_one_backend_refuses() {
    let world = Mixed::new(&[&[0]]);
    let refusal = |text: &str| RegisterError::Refused { backend: "mem2", len: Bytes::new(9), reason: text.to_owned() };
    let make = |script: Script| {
        let first = world.networks[0].endpoint().unwrap();
        let second = world.networks[1].endpoint_as(first.endpoint()).unwrap();
        Negotiated::new(vec![Box::new(first), Box::new(Faulty::new(second, script))]).unwrap()
    };
    let region = || Region::zeroed(9).unwrap();
    // The second of three is refused once: the others are the same everywhere.
    let mut t = make(Script { register: [(1, refusal("full"))].into(), ..Script::default() });
    let keep = region();
    assert_eq!(t.register(region()), Ok(RegionId::new(0)));
    assert_eq!(t.register(keep.clone()), Err(refusal("full")));
    assert_eq!(t.register(keep), Ok(RegionId::new(2)));
    assert_eq!(Blob::decode(&t.blob()).unwrap().regions.len(), 2);
    // It can't even count: nothing more until all are gone, then all is well.
    let mut t = make(Script { register: (1..3).map(|k| (k, refusal("full"))).collect(), ..Script::default() });
    t.register(region()).unwrap();
    t.register(region()).unwrap_err();
    let text = t.register(region()).unwrap_err().to_string();
    assert!(text.contains("deregister all regions"), "{text}");
    t.deregister(RegionId::new(0)).unwrap();
    assert_eq!(t.register(region()), Ok(RegionId::new(0)));
    assert_eq!(t.deregister(RegionId::new(5)), Err(DeregisterError::Unknown { region: RegionId::new(5) }));
}

/// After ids began anew in both, a peer with the old blob is refused over either lane.
#[test]
fn a_new_generation_is_one_over_each_lane() {
    for list in [[0], [1]] {
        let world = Mixed::new(&[&[0]]);
        let (mut d, mut p) = (world.of(&list), world.of(&[0, 1]));
        let sample = scattered(4, 32);
        let lens = |l: &[Bytes]| usize::try_from(l[0].get()).unwrap();
        d.register(Region::zeroed(lens(&sample.dst_lens)).unwrap()).unwrap();
        p.register(Region::zeroed(lens(&sample.src_lens)).unwrap()).unwrap();
        let peer = d.connect(&p.blob()).unwrap();
        p.deregister(RegionId::new(0)).unwrap();
        p.register(Region::zeroed(lens(&sample.src_lens)).unwrap()).unwrap();
        let submission = Submission { peer, kind: OpKind::Read, batch: sample.batch.clone(), notify: None };
        d.submit(submission).unwrap();
        d.step(Duration::ZERO);
        let events: Vec<_> = std::iter::from_fn(|| d.next_event()).collect();
        let [Event::Connected { .. }, Event::Completed { outcome, .. }] = &events[..] else { panic!("{events:?}") };
        assert!(format!("{outcome:?}").contains("Stale"), "{outcome:?}");
    }
}

#[test]
fn lists_that_cannot_be_one_say_why() {
    let (a, b) = (MemNetwork::new(1), MemNetwork::named("mem2", 2));
    let one = |network: &MemNetwork| Box::new(network.endpoint().unwrap()) as Box<dyn Transport>;
    assert_eq!(Negotiated::new(Vec::new()).unwrap_err(), NegotiateError::Count { got: 0 });
    assert_eq!(Negotiated::new((0..17).map(|_| one(&a)).collect()).unwrap_err(), NegotiateError::Count { got: 17 });
    assert_eq!(
        Negotiated::new(vec![Box::new(a.endpoint_as(EndpointId::new([7; 16])).unwrap()), one(&a)]).unwrap_err(),
        NegotiateError::Twice { name: "mem" }
    );
    let text = Negotiated::new(vec![one(&a), one(&b)]).unwrap_err().to_string();
    assert!(text.contains("configure mem2 with the endpoint id of mem"), "{text}");
    let mut used = one(&a);
    used.register(Region::zeroed(8).unwrap()).unwrap();
    assert_eq!(Negotiated::new(vec![used]).unwrap_err(), NegotiateError::Registered { name: "mem", regions: 1 });
    let world = Mixed::new(&[&[0]]);
    let nested = Negotiated::new(vec![Box::new(world.of(&[0, 1]))]).unwrap_err();
    assert_eq!(nested, NegotiateError::Nested);
}
