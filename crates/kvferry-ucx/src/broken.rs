//! Lanes that break, threads that die and endpoints that go, while both processes live and bytes move.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::blob::Blob;
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::{
    Event, LostCause, MemoryKind, OpId, OpKind, Outcome, PeerId, Region, RegisterError, Submission, TransferError,
    Transport,
};

use crate::part::Part;
use crate::process::Process;
use crate::{Rail, UcxConfig, UcxTransport};

const LEN: usize = 96 << 20;

/// Memory whose owner can be seen, and what its end does.
struct Owner {
    _region: Region,
    panics: bool,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let at_a_rail = std::thread::current().name().is_some_and(|name| name.starts_with("kvferry-ucx"));
        assert!(!(self.panics && at_a_rail), "an owner that panics");
    }
}

fn owned(len: usize, panics: bool) -> (Region, Weak<Owner>) {
    let region = Region::zeroed(len).unwrap();
    let start = NonNull::new(region.as_ptr()).unwrap();
    let owner = Arc::new(Owner { _region: region, panics });
    let weak = Arc::downgrade(&owner);
    // SAFETY: the owner holds the region that the bytes are of.
    (unsafe { Region::from_raw(start, len, MemoryKind::Host, owner) }, weak)
}

/// Two endpoints over tcp, of which the near one takes the far one's process for `process`; with a region each.
struct Scene {
    near: UcxTransport,
    far: Option<UcxTransport>,
    peer: PeerId,
    ours: Region,
    theirs: Weak<Owner>,
    start: Instant,
    events: Vec<Event>,
}

impl Scene {
    fn new(process: Option<Process>) -> Self {
        let mut config = UcxConfig::with_rails(2);
        config.rails.fill(Rail::default().with_transports(["tcp"]));
        let open = || UcxTransport::new(config.clone()).unwrap();
        let (mut near, mut far) = (open(), open());
        let ours = Region::zeroed(LEN).unwrap();
        near.register(ours.clone()).unwrap();
        let (region, theirs) = owned(LEN, false);
        region.fill(0, LEN as u64, 3).unwrap();
        far.register(region).unwrap();
        let mut blob = Blob::decode(&far.blob()).unwrap();
        let mut part = Part::decode(&blob.lane, blob.regions.iter().map(|(_, len)| len.get())).unwrap();
        part.process = process.unwrap_or(part.process);
        blob.lane = part.encode();
        let peer = near.connect(&blob.encode()).unwrap();
        let start = Instant::now();
        let mut scene = Self { near, far: Some(far), peer, ours, theirs, start, events: Vec::new() };
        scene.until(|events| events.contains(&Event::Connected { peer }));
        scene
    }

    fn begin(&mut self, kind: OpKind) -> OpId {
        let batch = reversed(LEN as u64, 64 << 10, 0, kind == OpKind::Read).unwrap();
        self.near.submit(Submission { peer: self.peer, kind, batch, notify: Some(b"done".to_vec()) }).unwrap()
    }

    fn step(&mut self) {
        self.near.step(self.start.elapsed());
        self.events.extend(std::iter::from_fn(|| self.near.next_event()));
        self.near.wait(Some(Duration::from_millis(1)));
    }

    fn until(&mut self, done: impl Fn(&[Event]) -> bool) {
        let begin = Instant::now();
        while !done(&self.events) {
            self.step();
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", self.events);
        }
    }

    /// Until bytes of a read have arrived.
    fn until_it_moves(&mut self) {
        let begin = Instant::now();
        let moved = |ours: &Region| {
            let mut byte = [0];
            (0..LEN as u64 >> 16).any(|block| {
                ours.read(block << 16, &mut byte).unwrap();
                byte != [0]
            })
        };
        while !moved(&self.ours) {
            self.step();
            assert!(begin.elapsed() < Duration::from_secs(20));
        }
    }

    /// The end is said to the peer, and then told here.
    fn until_it_ends_which_the_owner_outlives(&mut self) {
        let begin = Instant::now();
        let mut freed: Option<(Instant, Vec<u8>)> = None;
        while !self.events.iter().any(|e| matches!(e, Event::Completed { .. })) {
            if freed.is_none() && self.theirs.strong_count() == 0 {
                freed = Some((Instant::now(), self.ours.to_vec().unwrap()));
            }
            self.step();
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", self.events);
        }
        if let Some((since, bytes)) = freed {
            assert!(since.elapsed() < Duration::from_secs(2), "it was let go long before the end was told");
            assert!(bytes == self.ours.to_vec().unwrap(), "it was let go while bytes moved");
        }
    }

    fn end_of(&mut self, op: OpId) -> Outcome {
        let end = |events: &[Event]| {
            events.iter().find_map(|e| match e {
                Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
                _ => None,
            })
        };
        self.until(|events| end(events).is_some());
        end(&self.events).unwrap()
    }

    fn is_freed(&self, within: Duration) -> bool {
        let begin = Instant::now();
        while self.theirs.strong_count() > 0 && begin.elapsed() < within {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.theirs.strong_count() == 0
    }
}

/// Some process that lives, for a peer that the kernel is asked about.
struct Bystander(std::process::Child);

impl Bystander {
    fn new() -> (Self, Process) {
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let started = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
        let process = Process { pid: child.id(), started, ..Process::ours() };
        (Self(child), process)
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_lane_that_breaks_at_one_rail_ends_what_all_rails_do_and_nothing_is_let_go_before() {
    // At the rail that asked, and at the other one.
    for rail in [0, 1] {
        let (bystander, process) = Bystander::new();
        let mut scene = Scene::new(Some(process));
        let op = scene.begin(OpKind::Read);
        scene.until_it_moves();
        scene.far.as_mut().unwrap().deregister(RegionId::ZERO).unwrap();
        scene.near.break_for_tests(rail, Some(scene.peer));
        scene.until_it_ends_which_the_owner_outlives();
        let end = scene.end_of(op);
        assert!(matches!(&end, Outcome::Failed(TransferError::PeerLost(LostCause::Lane(_)))), "{end:?}");
        let peer = scene.peer;
        scene.until(|events| events.iter().any(|e| matches!(e, Event::PeerLost { peer: p, .. } if *p == peer)));
        // At the other rail the end can still be said; otherwise only the end of this process proves anything.
        assert_eq!(scene.is_freed(Duration::from_secs(if rail == 1 { 10 } else { 0 })), rail == 1, "rail {rail}");
        drop(bystander);
    }
}

#[test]
fn a_guest_that_cannot_be_spoken_to_keeps_what_it_reads() {
    for rail in [0, 1] {
        let mut scene = Scene::new(None);
        let op = scene.begin(OpKind::Read);
        scene.until_it_moves();
        let far = scene.far.as_mut().unwrap();
        far.deregister(RegionId::ZERO).unwrap();
        far.break_for_tests(rail, None);
        scene.until_it_ends_which_the_owner_outlives();
        match scene.end_of(op) {
            Outcome::Done(_) => assert!(scene.ours.to_vec().unwrap().iter().all(|b| *b == 3)),
            Outcome::Failed(_) | Outcome::InDoubt(_) => {}
        }
    }
}

#[test]
fn an_endpoint_that_goes_while_it_is_written_to_keeps_its_memory_until_that_has_stopped() {
    let mut scene = Scene::new(None);
    scene.ours.fill(0, LEN as u64, 8).unwrap();
    let op = scene.begin(OpKind::Write);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(15) {
        scene.step();
    }
    // Dropping may wait for us, so it is done elsewhere.
    let far = scene.far.take().unwrap();
    let going = std::thread::spawn(move || drop(far));
    scene.until_it_ends_which_the_owner_outlives();
    let end = scene.end_of(op);
    // It lives, so that it is gone proves nothing: only that all was flushed would.
    let fine = match &end {
        Outcome::Done(_) => true,
        Outcome::Failed(error) | Outcome::InDoubt(error) => *error == TransferError::PeerLost(LostCause::Gone),
    };
    assert!(fine, "{end:?}");
    going.join().unwrap();
    assert!(scene.is_freed(Duration::from_secs(10)), "after {end:?} it is kept");
}

#[test]
fn a_rail_that_dies_blocks_nobody() {
    let mut t = UcxTransport::new(UcxConfig::with_rails(2)).unwrap();
    let far = UcxTransport::new(UcxConfig::with_rails(1)).unwrap();
    let peer = t.connect(&far.blob()).unwrap();
    // Whoever lets go last drops the owner; a rail dies of it.
    for _ in 0..1000 {
        let Ok(bad) = t.register(owned(4096, true).0) else { break };
        t.deregister(bad).unwrap();
    }
    let start = Instant::now();
    let mut heard = Vec::new();
    while !heard.iter().any(|e| matches!(e, Event::PeerLost { peer: p, cause: LostCause::Lane(_) } if *p == peer)) {
        t.step(start.elapsed());
        heard.extend(std::iter::from_fn(|| t.next_event()));
        assert!(start.elapsed() < Duration::from_secs(10), "{heard:?}");
        t.wait(Some(Duration::from_millis(1)));
    }
    let (region, owner) = owned(4096, false);
    let refused = t.register(region);
    assert!(matches!(&refused, Err(RegisterError::Refused { reason, .. }) if reason.contains("ended")), "{refused:?}");
    let begin = Instant::now();
    while owner.strong_count() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(10), "a dead mailbox keeps it");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(t.connect(&UcxTransport::new(UcxConfig::with_rails(1)).unwrap().blob()).is_err());
    drop(t);
}
