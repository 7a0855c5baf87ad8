//! Several backends of one rank: the suite, the choice, and what is refused.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

mod common;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::blob::{Blob, BlobError};
use kvferry_transport::conformance::sample::scattered;
use kvferry_transport::conformance::{Harness, run};
use kvferry_transport::fault::{Faulty, Script};
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::negotiate::{NegotiateError, Negotiated};
use kvferry_transport::throttle::{Rate, Throttle};
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, Fault, MemoryKind, OpId, OpKind, PeerId, PeerInfo,
    Region, RegisterError, Revocation, RevokeError, RevokeScope, Submission, SubmitError, Transport, UnknownOp,
    UnknownPeer,
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

/// A backend with other capabilities, more to say in its blob, and a will of its own when it gives up a region.
struct Odd {
    inner: Box<dyn Transport>,
    capabilities: Capabilities,
    lane: Vec<u8>,
    keeps_regions: bool,
}

impl Odd {
    fn new(inner: impl Transport + 'static) -> Self {
        let capabilities = inner.capabilities().clone();
        Self { inner: Box::new(inner), capabilities, lane: Vec::new(), keeps_regions: false }
    }
}

impl Transport for Odd {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn endpoint(&self) -> EndpointId {
        self.inner.endpoint()
    }
    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.inner.register(region)
    }
    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        if self.keeps_regions {
            return Err(DeregisterError::Busy { region, operations: 1 });
        }
        self.inner.deregister(region)
    }
    fn blob(&self) -> Vec<u8> {
        Blob { lane: self.lane.clone(), ..Blob::decode(&self.inner.blob()).unwrap() }.encode()
    }
    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        self.inner.connect(&Blob { lane: Vec::new(), ..blob }.encode())
    }
    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.inner.disconnect(peer)
    }
    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.inner.peer(peer)
    }
    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        self.inner.submit(submission)
    }
    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        self.inner.cancel(op)
    }
    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.inner.revoke(scope)
    }
    fn step(&mut self, now: Duration) -> Option<Duration> {
        self.inner.step(now)
    }
    fn next_event(&mut self) -> Option<Event> {
        self.inner.next_event()
    }
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inner.wake_fd()
    }
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }
}

/// Two backends of one rank, as they are before they are one.
fn two(world: &Mixed) -> (Odd, Odd) {
    let first = world.networks[0].endpoint().unwrap();
    let second = world.networks[1].endpoint_as(first.endpoint()).unwrap();
    (Odd::new(first), Odd::new(second))
}

fn list(first: Odd, second: Odd) -> Result<Negotiated, NegotiateError> {
    Negotiated::new(vec![Box::new(first), Box::new(second)])
}

#[test]
fn a_list_can_what_all_of_it_can() {
    let world = Mixed::new(&[&[0]]);
    let (mut first, mut second) = two(&world);
    (first.capabilities.max_notify, second.capabilities.max_in_flight) = (100, 1);
    (first.capabilities.revocation, second.capabilities.revocation) = (Revocation::Excludes, Revocation::Fences);
    (first.capabilities.memory, second.capabilities.write) = (vec![MemoryKind::Device(0), MemoryKind::Host], false);
    let mut all = list(first, second).unwrap();
    let can = all.capabilities();
    assert_eq!((can.max_notify, can.max_in_flight, can.revocation), (100, 1, Revocation::Fences));
    assert_eq!((&can.memory[..], can.read, can.write), (&[MemoryKind::Host][..], true, false));
    // Also what the backend that carries the connection could do alone.
    let mut p = world.of(&[1]);
    p.register(Region::zeroed(64).unwrap()).unwrap();
    let peer = all.connect(&p.blob()).unwrap();
    let batch = kvferry_transport::conformance::sample::empty(9, 9).batch;
    let mut submit = |kind, notify: usize| {
        all.submit(Submission { peer, kind, batch: batch.clone(), notify: Some(vec![0; notify]) })
    };
    assert_eq!(submit(OpKind::Read, 101), Err(SubmitError::NotifyTooLong { got: 101, limit: 100 }));
    assert_eq!(submit(OpKind::Write, 0), Err(SubmitError::UnsupportedKind { backend: "any", kind: OpKind::Write }));
    submit(OpKind::Read, 100).unwrap();
    assert_eq!(submit(OpKind::Read, 0), Err(SubmitError::QueueFull { limit: 1 }));
    all.step(Duration::ZERO);
    // Its end, which nobody has taken, makes room.
    all.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();

    let (mut first, second) = two(&world);
    first.capabilities.revocation = Revocation::Unsupported;
    let mut none = list(first, second).unwrap();
    let id = none.register(Region::zeroed(1).unwrap()).unwrap();
    assert_eq!(none.revoke(RevokeScope::Region(id)), Err(RevokeError::Unsupported { backend: "any" }));
    let (mut first, second) = two(&world);
    first.capabilities.memory = vec![MemoryKind::Device(1)];
    let text = list(first, second).unwrap_err().to_string();
    assert!(text.contains("mem has device 1; mem2 has host"), "{text}");
}

#[test]
fn what_is_revoked_is_revoked_over_each_lane() {
    let world = Mixed::new(&[&[0]]);
    let sample = scattered(4, 32);
    let lens = |l: &[Bytes]| usize::try_from(l[0].get()).unwrap();
    let mut p = world.of(&[0, 1]);
    p.register(Region::zeroed(lens(&sample.src_lens)).unwrap()).unwrap();
    let ends = |p: &Negotiated, one: &[usize]| {
        let mut d = world.of(one);
        d.register(Region::zeroed(lens(&sample.dst_lens)).unwrap()).unwrap();
        let peer = d.connect(&p.blob()).unwrap();
        d.submit(Submission { peer, kind: OpKind::Read, batch: sample.batch.clone(), notify: None }).unwrap();
        d.step(Duration::ZERO);
        format!("{:?}", std::iter::from_fn(|| d.next_event()).last())
    };
    assert!(ends(&p, &[0]).contains("Done") && ends(&p, &[1]).contains("Done"));
    p.revoke(RevokeScope::Region(RegionId::new(0))).unwrap();
    assert!(ends(&p, &[0]).contains("Revoked") && ends(&p, &[1]).contains("Revoked"));
}

#[test]
fn large_lanes_of_several_backends_are_one_blob() {
    let world = Mixed::new(&[&[0]]);
    let (mut first, mut second) = two(&world);
    (first.lane, second.lane) = (vec![1; 1 << 20], vec![2; 700 << 10]);
    let p = list(first, second).unwrap();
    let (first, second) = two(&world);
    let mut d = list(first, second).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    assert_eq!((d.backend_of(peer), d.passed(peer)), (Ok("mem"), Ok(&[][..])));
    let one = Blob { backend: "mem".to_owned(), ..Blob::decode(&p.blob()).unwrap() }.encode();
    assert!(matches!(Blob::decode(&one), Err(BlobError::Field { field: "lane", .. })), "one backend has less");
}

/// Under a right checksum, whatever is in the lanes is a typed error and blames the peer.
#[test]
fn offers_by_a_hostile_hand_are_typed_errors() {
    let world = Mixed::new(&[&[0]]);
    let (mut d, p) = (world.of(&[0, 1]), world.of(&[0, 1]));
    let good = Blob::decode(&p.blob()).unwrap();
    let mut refused = 0;
    for at in 0..good.lane.len() {
        for value in [0, 1, 2, 0x7f, 0x80, 0xff] {
            let mut lane = good.lane.clone();
            lane[at] = value;
            match d.connect(&Blob { lane, ..good.clone() }.encode()) {
                Ok(peer) => d.disconnect(peer).unwrap(),
                Err(error) => {
                    assert!(matches!(error.fault(), Fault::PeerBytes | Fault::PeerChoice), "{at}, {value}: {error}");
                    refused += 1;
                }
            }
        }
        let cut = Blob { lane: good.lane[..at].to_vec(), ..good.clone() }.encode();
        assert!(matches!(d.connect(&cut), Err(ConnectError::BadLane { backend: "any", .. })));
    }
    assert!(refused > 50, "{refused}");
}

#[test]
fn a_backend_that_keeps_a_region_does_not_hold_up_the_others() {
    let world = Mixed::new(&[&[0]]);
    let (first, mut second) = two(&world);
    second.keeps_regions = true;
    let mut t = list(first, second).unwrap();
    let id = t.register(Region::zeroed(8).unwrap()).unwrap();
    t.deregister(id).unwrap();
    assert_eq!(t.deregister(id), Err(DeregisterError::Unknown { region: id }));
    let text = t.register(Region::zeroed(8).unwrap()).unwrap_err().to_string();
    assert!(text.contains("open a new endpoint"), "{text}");
    // What it still has is offered to nobody.
    let mut only = world.of(&[1]);
    let error = only.connect(&t.blob()).unwrap_err();
    assert!(matches!(error, ConnectError::NoCommonBackend { .. }), "{error}");
}
