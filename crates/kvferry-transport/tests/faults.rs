//! What goes wrong on demand, in the reference backend and by script, and that the contract holds under it.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::{Base, Batch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::conformance::sample::{Memory, Rng, Sample, scattered};
use kvferry_transport::fault::{Faulty, OpFault, Script};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork, MemTransport};
use kvferry_transport::observe::{Counters, Observed};
use kvferry_transport::throttle::{Rate, Throttle};
use kvferry_transport::{
    ConnectError, EndpointId, Event, LostCause, OpId, OpKind, Outcome, PeerId, Region, RegisterError, Submission,
    SubmitError, TransferError, Transport,
};

const MS: Duration = Duration::from_millis(1);

/// A submitting endpoint, the one it works on, and memory for the sample.
struct Rig<T> {
    net: MemNetwork,
    near: T,
    far: MemTransport,
    memory: Memory,
    sample: Sample,
    peer: PeerId,
    kind: OpKind,
    now: Duration,
    events: Vec<Event>,
    notices: Vec<Vec<u8>>,
}

impl<T: Transport> Rig<T> {
    fn new(kind: OpKind, sample: Sample, wrap: impl FnOnce(MemTransport) -> T) -> Self {
        let net = MemNetwork::new(7);
        let mut near = wrap(net.endpoint().unwrap());
        let mut far = net.endpoint().unwrap();
        let memory = Memory::new(&sample, &mut Rng::new(3), |len| Region::zeroed(len).unwrap());
        let (ours, theirs) = if kind == OpKind::Read { (&memory.dst, &memory.src) } else { (&memory.src, &memory.dst) };
        near.register(ours[0].clone()).unwrap();
        far.register(theirs[0].clone()).unwrap();
        let peer = near.connect(&far.blob()).unwrap();
        let mut rig =
            Self { net, near, far, memory, sample, peer, kind, now: Duration::ZERO, events: vec![], notices: vec![] };
        rig.step();
        assert_eq!(rig.events.drain(..).collect::<Vec<_>>(), [Event::Connected { peer }]);
        rig
    }

    fn faults(&self, faults: MemFaults) {
        assert!(self.net.set_faults(self.near.endpoint(), faults));
    }

    fn submit(&mut self, notify: &str) -> Result<OpId, SubmitError> {
        let notify = (!notify.is_empty()).then(|| notify.as_bytes().to_vec());
        self.near.submit(Submission { peer: self.peer, kind: self.kind, batch: self.sample.batch.clone(), notify })
    }

    fn step(&mut self) -> Option<Duration> {
        let next = self.near.step(self.now);
        self.far.step(self.now);
        self.events.extend(std::iter::from_fn(|| self.near.next_event()));
        while let Some(event) = self.far.next_event() {
            if let Event::Notification { payload, .. } = event {
                self.notices.push(payload);
            }
        }
        next
    }

    fn run(&mut self, ms: u32) {
        for _ in 0..ms {
            self.now += MS;
            self.step();
        }
    }

    fn outcomes(&self, op: OpId) -> Vec<Outcome> {
        let of = |e: &Event| match e {
            Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of).collect()
    }
}

fn mem(kind: OpKind) -> Rig<MemTransport> {
    Rig::new(kind, scattered(20, 100), |t| t)
}

fn scripted(kind: OpKind, script: Script) -> Rig<Faulty<MemTransport>> {
    Rig::new(kind, scattered(20, 100), |t| Faulty::new(t, script))
}

fn lane(text: &str) -> TransferError {
    TransferError::Lane { reason: text.to_owned() }
}

#[test]
fn a_break_at_any_byte_leaves_exactly_the_bytes_before_it() {
    for at_byte in [0, 1, 99, 100, 101, 1234, 1999, 2000] {
        for in_doubt in [false, true] {
            let mut rig = mem(OpKind::Write);
            rig.faults(MemFaults {
                fail: [(0, Break { at_byte, in_doubt })].into(),
                slice: Some(64),
                ..Default::default()
            });
            let op = rig.submit("never").unwrap();
            rig.run(50);
            let why = lane(&format!("broken on demand at byte {at_byte}"));
            let want = if in_doubt { Outcome::InDoubt(why) } else { Outcome::Failed(why) };
            assert_eq!(rig.outcomes(op), [want]);
            assert!(rig.notices.is_empty());
            rig.memory.check_outside(&rig.sample).unwrap();
            // Run i of the order is at destination block 19 - i.
            let (src, dst) = (rig.memory.src[0].to_vec().unwrap(), rig.memory.dst[0].to_vec().unwrap());
            let right = (0..2000).take_while(|b| {
                let (run, byte) = (b / 100, b % 100);
                src[3 + 2 * run * 100 + byte] == dst[5 + (19 - run) * 101 + byte]
            });
            let right = right.count() as u64;
            assert!(right >= at_byte && right < (at_byte + 5).max(1) || at_byte == 2000, "{right} bytes for {at_byte}");
        }
    }
}

/// Every state of the lane maps to one outcome, and none that is not a success maps to `Done`.
#[test]
fn fr_11_every_end_is_told_as_what_it_is() {
    let failed = |why| Outcome::Failed(why);
    let mut rig = mem(OpKind::Read);
    rig.faults(MemFaults {
        fail: [(1, Break { at_byte: 5, in_doubt: false }), (2, Break { at_byte: 5, in_doubt: true })].into(),
        lose_completion: [4, 5].into(),
        ..Default::default()
    });
    let ops: Vec<_> = (0..6).map(|_| rig.submit("").unwrap()).collect();
    rig.near.cancel(ops[3]).unwrap();
    rig.run(3);
    assert!(matches!(rig.outcomes(ops[0])[..], [Outcome::Done(_)]));
    assert!(matches!(rig.outcomes(ops[1])[..], [Outcome::Failed(TransferError::Lane { .. })]));
    assert!(matches!(rig.outcomes(ops[2])[..], [Outcome::InDoubt(TransferError::Lane { .. })]));
    assert_eq!(rig.outcomes(ops[3]), [failed(TransferError::Cancelled)]);
    assert_eq!((rig.outcomes(ops[4]).len(), rig.near.in_flight()), (0, 2));
    rig.near.cancel(ops[4]).unwrap();
    rig.run(1);
    assert_eq!(rig.outcomes(ops[4]), [Outcome::InDoubt(TransferError::Cancelled)]);
    assert!(rig.net.kill(rig.far.endpoint()));
    rig.run(1);
    assert_eq!(rig.outcomes(ops[5]), [Outcome::InDoubt(TransferError::PeerLost(LostCause::Gone))]);
    assert_eq!(rig.near.in_flight(), 0);
}

/// Each call that can fail gives exactly one error and leaves nothing pending.
#[test]
fn fr_12_an_error_at_each_call_ends_the_request_once() {
    let refused = SubmitError::Refused { reason: "on demand".to_owned() };
    let no_memory = RegisterError::Refused { backend: "mem", len: Bytes::new(1), reason: "on demand".to_owned() };
    let no_peer = ConnectError::Unreachable { endpoint: EndpointId::new([1; 16]), reason: "on demand".to_owned() };
    let script = Script {
        register: [(1, no_memory.clone())].into(),
        connect: [(1, no_peer.clone())].into(),
        submit: [
            (0, OpFault::Refuse(refused.clone())),
            (1, OpFault::Fail(lane("post"))),
            (2, OpFault::InDoubt(lane("poll"))),
        ]
        .into(),
        ..Script::default()
    };
    let mut rig = scripted(OpKind::Write, script);
    assert_eq!(rig.near.register(Region::zeroed(1).unwrap()), Err(no_memory));
    assert_eq!(rig.near.connect(&rig.far.blob()), Err(no_peer));
    assert_eq!(rig.submit("a"), Err(refused));
    let ops = [rig.submit("b").unwrap(), rig.submit("c").unwrap(), rig.submit("d").unwrap()];
    rig.run(3);
    assert_eq!(rig.outcomes(ops[0]), [Outcome::Failed(lane("post"))]);
    assert_eq!(rig.outcomes(ops[1]), [Outcome::InDoubt(lane("poll"))]);
    assert!(matches!(rig.outcomes(ops[2])[..], [Outcome::Done(_)]));
    assert_eq!(rig.events.len(), 3);
    rig.near.deregister(RegionId::new(0)).unwrap();
}

/// Operations start, end and are told in any order, and still no notification comes before its data.
#[test]
fn fr_14_no_notification_overtakes_its_data() {
    for (count, run) in [(1, 1), (1, 65_536), (1000, 16)] {
        for seed in 0..20 {
            let mut rig = Rig::new(OpKind::Write, scattered(count, run), |t| t);
            let upto = |ms: u32| Duration::ZERO..MS * ms;
            rig.faults(MemFaults {
                start_delay: upto(5),
                completion_delay: upto(if seed % 2 == 0 { 8 } else { 0 }),
                notify_delay: upto(if seed % 3 == 0 { 8 } else { 0 }),
                slice: Some(100 + 997 * seed),
                shuffle: true,
                ..Default::default()
            });
            let op = rig.submit("look").unwrap();
            let mut told = 0;
            for _ in 0..70_000 {
                rig.now += MS;
                rig.step();
                if rig.notices.len() > told {
                    told = rig.notices.len();
                    rig.memory.check(&rig.sample).unwrap();
                }
                if told > 0 && !rig.outcomes(op).is_empty() {
                    break;
                }
            }
            rig.run(20);
            assert_eq!((rig.notices.len(), rig.outcomes(op).len()), (1, 1), "seed {seed}");
        }
    }
}

#[test]
fn delays_really_reorder() {
    let mut rig = mem(OpKind::Read);
    rig.faults(MemFaults { start_delay: Duration::ZERO..MS * 20, ..Default::default() });
    let ops: Vec<_> = (0..20).map(|i| rig.submit(&format!("{i:02}")).unwrap()).collect();
    rig.run(30);
    let ended: Vec<_> =
        rig.events.iter().map(|e| if let Event::Completed { op, .. } = e { *op } else { panic!() }).collect();
    assert_eq!(ended.len(), ops.len());
    assert_ne!(ended, ops);
    let mut sorted = rig.notices.clone();
    sorted.sort();
    assert_ne!(sorted, rig.notices);
    assert_eq!(sorted.len(), 20);
}

#[test]
fn the_same_seed_gives_the_same_events() {
    let run = || {
        let mut rig = mem(OpKind::Read);
        let upto = |ms: u32| Duration::ZERO..MS * ms;
        rig.faults(MemFaults { start_delay: upto(9), completion_delay: upto(9), shuffle: true, ..Default::default() });
        for i in 0..30 {
            rig.submit(&format!("{i}")).unwrap();
        }
        rig.run(40);
        (rig.near.endpoint(), rig.events, rig.notices)
    };
    assert_eq!(run(), run());
}

#[test]
fn fr_15_the_kth_notification_is_lost_and_nothing_else() {
    for k in 0..6 {
        let mut rig = mem(OpKind::Write);
        rig.faults(MemFaults { drop_notify: [k].into(), ..Default::default() });
        let mut scripted =
            scripted(OpKind::Write, Script { submit: [(k, OpFault::DropNotify)].into(), ..Script::default() });
        for i in 0..6 {
            rig.submit(&format!("{i}")).unwrap();
            scripted.submit(&format!("{i}")).unwrap();
        }
        rig.run(3);
        scripted.run(3);
        let rest: Vec<_> = (0..6).filter(|i| *i != k).map(|i| format!("{i}").into_bytes()).collect();
        assert_eq!((&rig.notices, rig.events.len()), (&rest, 6));
        assert_eq!((&scripted.notices, scripted.events.len()), (&rest, 6));
    }
}

#[test]
fn received_notifications_are_dropped_by_script() {
    let net = MemNetwork::new(1);
    let mut far = Faulty::new(net.endpoint().unwrap(), Script { drop_received: [1].into(), ..Script::default() });
    let mut near = net.endpoint().unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    let batch = Arc::new(Batch::default().check(&[], &[]).unwrap());
    for i in 0..3u8 {
        near.submit(Submission { peer, kind: OpKind::Write, batch: batch.clone(), notify: Some(vec![i]) }).unwrap();
    }
    near.step(Duration::ZERO);
    far.step(Duration::ZERO);
    let got: Vec<_> = std::iter::from_fn(|| far.next_event()).collect();
    let from = near.endpoint();
    assert_eq!(got, [0, 2].map(|i| Event::Notification { from, payload: vec![i] }));
}

#[test]
fn a_delayed_operation_is_pinned_cancellable_and_in_time() {
    let script = Script {
        submit: [(0, OpFault::Delay(MS * 10)), (1, OpFault::Delay(MS * 10)), (2, OpFault::HoldCompletion(MS * 30))]
            .into(),
        ..Script::default()
    };
    let mut rig = scripted(OpKind::Write, script);
    let ops = [rig.submit("a").unwrap(), rig.submit("b").unwrap(), rig.submit("c").unwrap()];
    assert_eq!(rig.step(), Some(MS * 10));
    rig.near.cancel(ops[0]).unwrap();
    rig.run(9);
    assert_eq!(rig.outcomes(ops[0]), [Outcome::Failed(TransferError::Cancelled)]);
    assert_eq!(rig.notices, [b"c"]);
    assert!(rig.near.deregister(RegionId::new(0)).is_err());
    rig.run(1);
    assert!(matches!(rig.outcomes(ops[1])[..], [Outcome::Done(_)]));
    rig.run(19);
    assert!(rig.outcomes(ops[2]).is_empty());
    rig.run(1);
    assert!(matches!(rig.outcomes(ops[2])[..], [Outcome::Done(_)]));
    rig.near.deregister(RegionId::new(0)).unwrap();
}

#[test]
fn a_lost_completion_ends_in_doubt_when_something_forces_it() {
    for how in 0..3 {
        let script = Script { submit: [(0, OpFault::LoseCompletion)].into(), ..Script::default() };
        let mut rig = scripted(OpKind::Write, script);
        let op = rig.submit("data is there").unwrap();
        rig.run(100);
        assert!(rig.outcomes(op).is_empty());
        assert_eq!(rig.notices.len(), 1);
        let why = match how {
            0 => {
                rig.near.cancel(op).unwrap();
                TransferError::Cancelled
            }
            1 => {
                rig.near.disconnect(rig.peer).unwrap();
                TransferError::Disconnected
            }
            _ => {
                rig.net.kill(rig.far.endpoint());
                TransferError::PeerLost(LostCause::Gone)
            }
        };
        rig.run(1);
        assert_eq!(rig.outcomes(op), [Outcome::InDoubt(why)]);
        rig.run(5);
        assert_eq!(rig.outcomes(op).len(), 1);
    }
}

#[test]
fn a_lost_completion_under_a_disconnect_before_its_end_still_ends() {
    let script = Script { submit: [(0, OpFault::LoseCompletion)].into(), ..Script::default() };
    let mut rig = scripted(OpKind::Write, script);
    rig.faults(MemFaults { start_delay: MS * 50..MS * 51, ..Default::default() });
    let op = rig.submit("").unwrap();
    rig.run(3);
    rig.near.disconnect(rig.peer).unwrap();
    rig.run(3);
    assert_eq!(rig.outcomes(op), [Outcome::Failed(TransferError::Disconnected)]);
}

#[test]
fn a_throttle_keeps_its_rate_and_its_clock() {
    // 2,000 bytes at 1 MB/s and 1,000 operations a second: 3 ms each.
    let rate = Rate { bytes_per_second: 1_000_000, ops_per_second: 1000 };
    let mut rig = Rig::new(OpKind::Read, scattered(20, 100), |t| Throttle::new(t, rate));
    rig.run(100);
    let ops: Vec<_> = (0..5).map(|_| rig.submit("").unwrap()).collect();
    assert_eq!(rig.step(), Some(MS * 103));
    for (i, op) in ops.iter().enumerate() {
        rig.run(2);
        assert!(rig.outcomes(*op).is_empty(), "operation {i} is early");
        rig.run(1);
        assert!(matches!(rig.outcomes(*op)[..], [Outcome::Done(_)]), "operation {i} is late");
    }
    // A pause is no credit.
    rig.run(1000);
    let op = rig.submit("").unwrap();
    rig.step();
    rig.run(2);
    assert!(rig.outcomes(op).is_empty());
    rig.run(1);
    assert_eq!(rig.outcomes(op).len(), 1);
    rig.memory.check(&rig.sample).unwrap();
}

#[test]
fn counters_add_up_for_each_peer() {
    let counters = Counters::new();
    let mut rig = Rig::new(OpKind::Write, scattered(20, 100), |t| Observed::new(t, counters.clone()));
    rig.faults(MemFaults { fail: [(1, Break { at_byte: 9, in_doubt: false })].into(), ..Default::default() });
    for _ in 0..3 {
        rig.submit("n").unwrap();
    }
    assert_eq!(counters.peer(rig.peer).in_flight(), 3);
    rig.run(2);
    let batch = Arc::new(Batch::default().check(&[], &[]).unwrap());
    let nobody = PeerId::new(99);
    rig.near.submit(Submission { peer: nobody, kind: OpKind::Read, batch, notify: None }).unwrap_err();
    let counts = counters.peer(rig.peer);
    assert_eq!((counts.posted, counts.done, counts.failed, counts.in_flight()), (3, 2, 1, 0));
    assert_eq!((counts.bytes, counts.descriptors), (4000, 40));
    assert_eq!((counters.peer(nobody).refused, counters.total().refused, counters.total().posted), (1, 1, 3));
    counters.forget(rig.peer);
    assert_eq!((counters.peer(rig.peer).posted, counters.total().posted), (0, 3));
}

/// A run longer than 2 GiB is one descriptor, and all of it arrives.
#[test]
fn int_03_one_run_above_two_gib() {
    const RUN: u64 = 40_000 * 65_536;
    let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 0 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: 65_536,
        dst_block_stride: 65_536,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(65_536),
        pairs: vec![PairRun { src: 0, dst: 0, count: 40_000 }].into(),
    };
    let len = usize::try_from(RUN).unwrap();
    // The source is all but three pages the zero page, so that this takes 2.6 GB once and not twice.
    let (Some(src), Some(dst)) = (Region::zeroed(len), Region::zeroed(len)) else {
        panic!("2 x {RUN} B of address space are needed");
    };
    let marks = [(0, 1u8), (RUN / 2 + 4096, 2), ((1 << 31) - 1, 3), (1 << 31, 4), (RUN - 1, 5)];
    for (at, mark) in marks {
        src.fill(at, 1, mark).unwrap();
    }
    let net = MemNetwork::new(1);
    let (mut p, mut d) = (net.endpoint().unwrap(), net.endpoint().unwrap());
    p.register(src).unwrap();
    d.register(dst.clone()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    let batch = Arc::new(batch.check(&d.peer(peer).unwrap().lens(), &[dst.len()]).unwrap());
    let op = d.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();
    d.step(Duration::ZERO);
    let events: Vec<_> = std::iter::from_fn(|| d.next_event()).collect();
    let Some(Event::Completed { op: ended, outcome: Outcome::Done(stats), .. }) = events.last() else {
        panic!("{events:?}");
    };
    assert_eq!((*ended, stats.bytes.get(), stats.descriptors), (op, 2_621_440_000, 1));
    for (at, mark) in marks {
        let mut got = [0];
        dst.read(at, &mut got).unwrap();
        assert_eq!(got, [mark], "byte {at}");
    }
}

#[test]
fn a_held_operation_ends_with_its_connection() {
    let script = Script { submit: [(0, OpFault::Delay(MS * 50))].into(), ..Script::default() };
    let mut rig = scripted(OpKind::Write, script);
    let op = rig.submit("never").unwrap();
    rig.run(3);
    rig.near.disconnect(rig.peer).unwrap();
    rig.near.deregister(RegionId::new(0)).unwrap();
    rig.run(60);
    assert_eq!(rig.outcomes(op), [Outcome::Failed(TransferError::Disconnected)]);
    rig.memory.check_untouched().unwrap();
}
