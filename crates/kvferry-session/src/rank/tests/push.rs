//! Pushes: what is written and when, how they end, and what a consumer's rank does when all is written.

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::request::{BlockTable, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::units::{BlockId, ItemId, TokenRange};
use kvferry_geometry::watermarks::Watermarks;
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_proto::push::{PushId, PushOrder, Ready, Stream, WriterEnd, WriterReport};
use kvferry_transport::conformance::sample::Rng;
use kvferry_transport::{ConnectError, SubmitError};

use super::*;
use crate::testing::other_dst_groups;

const ITEMS: u32 = 2;
/// In no byte of a source.
const UNTOUCHED: u8 = 0xff;
const LEASE: LeaseId = LeaseId::new(5);

/// Ranks that write and ranks that are written to. Only what the first writer's transport does is scripted.
struct Pushing {
    p: Vec<RankSession>,
    d: Vec<RankSession>,
    /// The consumers' engine, to the producers' ranks; and the other way.
    to_d: Pairing,
    to_p: Pairing,
    now: Duration,
    /// By writer: how its orders ended.
    ended: Vec<Vec<(u64, WriterEnd)>>,
    progress: Vec<Vec<u64>>,
    pulled: Vec<Result<RankReport, RankFault>>,
    held: Arc<AtomicBool>,
    deaf: Arc<AtomicBool>,
}

impl Pushing {
    fn new(tp: (u32, u32), script: Script) -> Self {
        Self::with(tp, script, Policy::default())
    }

    fn with(tp: (u32, u32), script: Script, policy: Policy) -> Self {
        let network = MemNetwork::new(4);
        let (held, mut scripted, mut deaf) = (Arc::new(AtomicBool::new(false)), Some(script), Arc::default());
        let mut engine = |id: &str, tp: u32| {
            let (mut ranks, mut contacts) = (Vec::new(), Vec::new());
            for rank in 0..tp {
                let late = Late::new(
                    Faulty::new(network.endpoint().unwrap(), scripted.take().unwrap_or_default()),
                    if id == "p" && rank == 0 { held.clone() } else { Arc::default() },
                );
                if id == "p" && rank == 0 {
                    deaf = late.deaf.clone();
                }
                let (session, contact) = session(id, rank, tp, Box::new(late));
                ranks.push(session);
                contacts.push(contact);
            }
            let cache = (*manifest(tp)).clone();
            (ranks, Arc::new(EngineManifest::new(EngineId::new(id).unwrap(), Epoch::new(1), cache, contacts).unwrap()))
        };
        let ((p, pe), (mut d, de)) = (engine("p", tp.0), engine("d", tp.1));
        let mut p: Vec<_> = p.into_iter().map(|s| s.with_lanes(policy.clone()).unwrap()).collect();
        let direction = Direction::new(pe.cache().clone(), de.cache().clone(), CompatOptions::default());
        let map = direction.unwrap().map(PeerOptions::default()).unwrap().digest();
        for (ranks, own, peer) in [(&mut p, &pe, &de), (&mut d, &de, &pe)] {
            for rank in ranks {
                rank.handle(ToRank::Welcome(own.clone()), Duration::ZERO);
                rank.handle(ToRank::Peer(peer.clone()), Duration::ZERO);
            }
        }
        for region in p.iter().flat_map(|rank| rank.cache.regions()) {
            let bytes: Vec<u8> = (0..region.len().get()).map(|i| (i * 7 % 251).to_le_bytes()[0] + 1).collect();
            region.write(0, &bytes).unwrap();
        }
        d.iter().flat_map(|rank| rank.cache.regions()).for_each(|r| r.fill(0, r.len().get(), UNTOUCHED).unwrap());
        let pairing = |peer: &EngineManifest| Pairing {
            peer: peer.digest(),
            options: PeerOptions::default(),
            compat: CompatOptions::default(),
            peer_map: map,
        };
        let (to_d, to_p) = (pairing(&de), pairing(&pe));
        let (ended, progress) = (vec![Vec::new(); p.len()], vec![Vec::new(); p.len()]);
        Self { p, d, to_d, to_p, now: Duration::ZERO, ended, progress, pulled: Vec::new(), held, deaf }
    }

    fn in_slices(mut self, admission: Admission) -> Self {
        self.p.iter_mut().for_each(|p| p.queue = Queue::new(admission));
        self
    }

    fn order(&self, push: u64) -> PushOrder {
        PushOrder {
            push: PushId(push),
            lease: LEASE,
            attempt: Attempt::FIRST,
            streamed: false,
            pairing: self.to_d,
            request: World::request().into(),
            priority: 100,
            within: 100 * SECOND,
            progress: true,
        }
    }

    fn push(&mut self, order: &PushOrder) {
        self.tell(&ToRank::Push(Box::new(order.clone())));
    }

    /// Tells all writers.
    fn tell(&mut self, message: &ToRank) {
        self.p.iter_mut().for_each(|p| p.handle(message.clone(), self.now));
    }

    /// The stream with this many blocks listed.
    fn stream(&mut self, attempt: Attempt, blocks: usize, sealed: bool) {
        let groups = groups_listed(blocks);
        self.tell(&ToRank::Stream(Stream { lease: LEASE, attempt, groups, sealed }));
    }

    fn ready(&mut self, items: &[u32], tokens: u64) {
        self.tell(&ToRank::Ready(ready(Attempt::FIRST, items, tokens)));
    }

    /// Steps everything so many times, a millisecond each.
    fn steps(&mut self, times: usize) {
        for _ in 0..times {
            for rank in self.d.iter_mut().chain(&mut self.p) {
                rank.step(self.now);
            }
            self.now += Duration::from_millis(1);
            for dst in 0..self.d.len() {
                while let Some(message) = self.d[dst].next_message() {
                    match message {
                        FromRank::Pulled { result, .. } => self.pulled.push(result),
                        FromRank::DigestWanted { pull, src, windows } => {
                            let (pairing, ticket, request) = (self.to_d, pull.0, World::request());
                            let dst = RankId::new(u32::try_from(dst).unwrap());
                            let order = DigestOrder { ticket, pairing, dst, request, windows };
                            self.p[src.index()].handle(ToRank::Digest(order), self.now);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
            for src in 0..self.p.len() {
                while let Some(message) = self.p[src].next_message() {
                    match message {
                        FromRank::Pushed { push, result } => self.ended[src].push((push.0, result)),
                        FromRank::PushProgress { tokens, .. } => self.progress[src].push(tokens.get()),
                        FromRank::Digested { ticket, pieces } => {
                            let src = RankId::new(u32::try_from(src).unwrap());
                            // By its number, a pull is of one rank.
                            let answer = ToRank::DigestAnswer { pull: PullId(ticket), src, pieces };
                            self.d[usize::try_from(ticket).unwrap()].handle(answer, self.now);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }

    fn finish(&mut self, written: bool, assurance: Assurance) {
        for (pull, d) in (0..).map(PullId).zip(&mut self.d) {
            let order = PullOrder {
                pull,
                pairing: self.to_p,
                request: World::request().into(),
                assurance,
                priority: 0,
                deadline: None,
                written,
            };
            d.handle(ToRank::Pull(order), self.now);
        }
        self.steps(100);
    }

    fn memory(&self) -> Vec<Vec<u8>> {
        self.d.iter().flat_map(|d| d.cache.regions()).map(|r| r.to_vec().unwrap()).collect()
    }

    fn reports<'a>(&'a self) -> Vec<&'a WriterReport> {
        let report = |ends: &'a Vec<(u64, WriterEnd)>| match &ends[..] {
            [(1, Ok(report))] => report,
            other => panic!("it ends once, and well: {other:?}"),
        };
        self.ended.iter().map(report).collect()
    }

    /// How the only order of the first writer failed.
    fn fault(&self) -> &RankFault {
        match &self.ended[0][..] {
            [(1, Err(fault))] => fault,
            other => panic!("it fails once: {other:?}"),
        }
    }

    fn flying(&self) -> usize {
        self.p[0].end.ops.len()
    }

    /// Nothing is left of any order.
    fn is_quiet(&self) -> bool {
        self.p.iter().all(|p| {
            let idle = p.end.ops.is_empty() && p.queue.pick().is_none() && p.queue.in_flight() == Bytes::ZERO;
            idle && p.pushes.len() == 0 && p.unposted.is_empty()
        })
    }

    /// The consumers' memory if exactly what is final so far were written.
    fn expected(&self, marks: &Watermarks) -> Vec<Vec<u8>> {
        let (src, dst) = (self.p[0].standing(), self.d[0].standing());
        let (Standing::Member(pe), Standing::Member(de)) = (src, dst) else { panic!("they are members") };
        let way = Direction::new(pe.cache().clone(), de.cache().clone(), CompatOptions::default()).unwrap();
        let request = BoundRequest::new(way.compatible(), World::request()).unwrap();
        let map = way.map(PeerOptions::default()).unwrap();
        let none = Watermarks::none(ITEMS as usize);
        let empty = |r: &Region| vec![UNTOUCHED; usize::try_from(r.len().get()).unwrap()];
        let mut all: Vec<Vec<Vec<u8>>> = self.d.iter().map(|d| d.cache.regions().iter().map(empty).collect()).collect();
        let bytes = |r: &Region| r.to_vec().unwrap();
        let sources: Vec<Vec<Vec<u8>>> = self.p.iter().map(|p| p.cache.regions().iter().map(bytes).collect()).collect();
        for pair in map.pairs() {
            let plan = way.plan(PeerOptions::default(), pair.src(), pair.dst()).unwrap();
            let batch = plan.resolve_between(&request, &none, marks).unwrap();
            let (mut cursor, mut some) = (batch.cursor(), [Descriptor::default(); 32]);
            loop {
                let n = cursor.fill(&mut some);
                if n == 0 {
                    break;
                }
                for d in &some[..n] {
                    let at = |offset: u64| usize::try_from(offset).unwrap()..usize::try_from(offset + d.len).unwrap();
                    let from = &sources[pair.src().index()][d.src_region.index()];
                    all[pair.dst().index()][d.dst_region.index()][at(d.dst_offset)]
                        .copy_from_slice(&from[at(d.src_offset)]);
                }
            }
        }
        all.into_iter().flatten().collect()
    }
}

fn groups_listed(blocks: usize) -> Vec<SrcGroup> {
    let table = BlockTable::new(0, &[3, 0, 6].map(BlockId::new)[..blocks]);
    vec![SrcPaged { table, held: TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS)), tail: Tail::Exact }.into()]
}

fn ready(attempt: Attempt, items: &[u32], tokens: u64) -> Ready {
    let items = items.iter().copied().map(ItemId::new).collect();
    Ready { lease: LEASE, attempt, items, tokens: Tokens::new(tokens) }
}

fn second_attempt() -> Attempt {
    Attempt::new(Attempt::FIRST.get() + 1)
}

/// In slices of so many bytes, at most `ops` in flight.
fn admission(slice: u64, ops: u32) -> Admission {
    Admission { slice: Bytes::new(slice), peer_ops: ops, ops, ..Admission::default() }
}

/// The same for each of the first operations.
fn all(count: u64, fault: &OpFault) -> Script {
    Script { submit: (0..count).map(|k| (k, fault.clone())).collect(), ..Script::default() }
}

const SHAPES: [(u32, u32); 5] = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)];

/// What is pushed is what would be pulled, whoever has which heads and however it is sliced; and the consumer's ranks zero and compare
/// as after a read.
#[test]
fn a_push_moves_what_a_pull_moves() {
    for tp in SHAPES {
        let mut pulled = Pushing::new(tp, Script::default());
        pulled.finish(false, Assurance::Full);
        let total = |reports: &[Result<RankReport, RankFault>]| {
            let all = reports.iter().map(|r| r.as_ref().unwrap());
            all.fold((0, 0, 0), |(bytes, zeroed, compared), r| {
                let of = r.sources.iter().map(|s| s.bytes.get()).sum::<u64>();
                (bytes + of, zeroed + r.zeroed.get(), compared + r.compared.get())
            })
        };
        for slice in [100, 1000, 1 << 20] {
            let mut w = Pushing::new(tp, Script::default()).in_slices(admission(slice, 200));
            w.push(&w.order(1));
            w.steps(100);
            let reports = w.reports();
            let writes = || reports.iter().flat_map(|r| &r.writes);
            assert_eq!(writes().map(|x| x.bytes.get()).sum::<u64>(), TOKENS * TOKEN_BYTES, "{tp:?}");
            assert!(writes().all(|x| x.lane == "in-process: copy inside one process" && x.descriptors > 0));
            let least = (TOKENS * TOKEN_BYTES / u64::from(tp.0)).div_ceil(slice);
            assert!(reports.iter().all(|r| u64::from(r.slices) >= least && u64::from(r.slices) <= 3 * least + 1));
            assert_eq!(w.memory(), w.expected(&Watermarks::whole(ITEMS as usize)), "{tp:?} {slice}");
            assert!(w.is_quiet());
            w.finish(true, Assurance::Full);
            assert_eq!(w.memory(), pulled.memory(), "{tp:?} {slice}");
            assert_eq!(total(&w.pulled), total(&pulled.pulled));
            let sources = w.pulled.iter().flat_map(|r| &r.as_ref().unwrap().sources);
            assert!(sources.clone().all(|s| s.lane.is_empty() && s.took == Duration::ZERO));
            assert!(w.pulled.iter().all(|r| r.as_ref().unwrap().slices == 0));
            assert!(w.d.iter().all(|d| d.lanes().is_empty()), "nothing is read");
            assert!(w.progress.iter().all(|told| told[..] == [TOKENS]), "{:?}", w.progress);
        }
    }
}

/// FR-01, FR-12: a bad end of any slice is one failure of the order, told when nothing is in flight any more; doubt is told.
#[test]
fn fr_12_every_bad_end_of_a_write_is_one_failure() {
    let refused = SubmitError::Refused { reason: "on demand".into() };
    for k in 0..12 {
        for (fault, stage, in_doubt) in [
            (OpFault::Refuse(refused.clone()), Stage::Submit, false),
            (OpFault::Fail(lost()), Stage::Write, false),
            (OpFault::InDoubt(lost()), Stage::Write, true),
            (OpFault::Fail(TransferError::Cancelled), Stage::Write, false),
        ] {
            let mut w = Pushing::new((1, 2), on(k, fault.clone())).in_slices(admission(1024, 4));
            w.push(&w.order(1));
            w.steps(100);
            let got = w.fault();
            assert_eq!((got.stage, got.in_doubt), (stage, in_doubt), "{k} {fault:?}");
            assert!(got.text.starts_with("destination rank "), "{got}");
            assert!(w.is_quiet() && w.progress[0].last() != Some(&TOKENS));
        }
    }
    // The first is told, with all doubt; and not before the last has ended.
    let mut script = all(6, &OpFault::HoldCompletion(SECOND));
    script.submit.insert(2, OpFault::Fail(lost()));
    script.submit.insert(4, OpFault::LoseCompletion);
    script.submit.insert(6, OpFault::Refuse(SubmitError::Refused { reason: "more is posted".into() }));
    let mut w = Pushing::new((1, 1), script).in_slices(admission(1024, 6));
    w.deaf.store(true, Ordering::Relaxed);
    w.push(&w.order(1));
    w.steps(900);
    assert!(w.ended[0].is_empty() && w.flying() == 5);
    w.deaf.store(false, Ordering::Relaxed);
    w.steps(300);
    assert_eq!(w.flying(), 1, "it was asked to stop once, and didn't listen");
    assert!(w.ended[0].is_empty());
    let full = OpFault::Refuse(SubmitError::QueueFull { limit: 1 });
    let script = Script { submit: (1..40).step_by(2).map(|k| (k, full.clone())).collect(), ..Script::default() };
    let mut w = Pushing::new((1, 1), script).in_slices(admission(1024, 4));
    w.push(&w.order(1));
    w.steps(200);
    assert_eq!(w.reports()[0].slices, 20, "a full queue delays");
}

/// FR-09: what was cancelled has stopped when the last slice has ended, not before.
#[test]
fn fr_09_a_cancelled_push_ends_when_its_writes_have() {
    for (fault, in_doubt) in [(OpFault::Delay(60 * SECOND), false), (OpFault::LoseCompletion, true)] {
        let mut w = Pushing::new((1, 2), on(3, fault)).in_slices(admission(512, 2));
        w.push(&w.order(1));
        w.steps(8);
        w.tell(&ToRank::CancelPush(PushId(2)));
        w.tell(&ToRank::CancelPush(PushId(1)));
        let (posted, memory) = (w.flying(), w.memory());
        assert!(posted > 0);
        w.steps(50);
        assert_eq!((w.fault().stage, w.fault().in_doubt), (Stage::Cancelled, in_doubt));
        let touched = |m: &[Vec<u8>]| m.iter().flatten().filter(|b| **b != UNTOUCHED).count();
        assert!(touched(&w.memory()) <= touched(&memory) + 512 * posted, "nothing more is posted");
        assert!(w.is_quiet());
    }
    let mut w = Pushing::new((1, 1), all(9, &OpFault::HoldCompletion(30 * SECOND))).in_slices(admission(512, 2));
    w.deaf.store(true, Ordering::Relaxed);
    w.push(&w.order(1));
    w.steps(5);
    w.tell(&ToRank::CancelPush(PushId(1)));
    w.now = 29 * SECOND;
    w.steps(5);
    assert!(w.ended[0].is_empty() && w.flying() == 2, "its blocks may still be written");
    w.now = 31 * SECOND;
    w.steps(5);
    assert_eq!(w.fault().stage, Stage::Cancelled);
}

/// Nothing is posted when the grant has ended, however much is left; what was posted before goes on to its end.
#[test]
fn nothing_is_posted_after_the_grant() {
    let mut w = Pushing::new((1, 1), all(1000, &OpFault::HoldCompletion(SECOND / 4))).in_slices(admission(512, 1));
    w.push(&PushOrder { within: SECOND, ..w.order(1) });
    w.steps(990);
    assert_eq!((w.flying(), w.ended[0].len()), (1, 0));
    let begun = Duration::from_millis(990);
    assert!(w.p[0].step(begun).unwrap() <= SECOND);
    let touched = w.memory();
    w.steps(300);
    assert_eq!(w.fault().stage, Stage::Submit);
    assert!(w.fault().text.contains("1s") && !w.fault().in_doubt, "{}", w.fault());
    assert!(w.fault().text.starts_with("the grant lasts 1s and 1s have passed"), "{}", w.fault());
    let count = |m: &[Vec<u8>]| m.iter().flatten().filter(|b| **b != UNTOUCHED).count();
    assert_eq!(count(&w.memory()), count(&touched), "the last one was posted before");
    // One that has no time at all, one that waits for its stream, one that waits for its lane.
    for (within, streamed, held) in [(Duration::ZERO, false, false), (SECOND, true, false), (SECOND, false, true)] {
        let mut w = Pushing::new((1, 1), Script::default());
        w.held.store(held, Ordering::Relaxed);
        if streamed {
            w.stream(Attempt::FIRST, 3, false);
        }
        w.push(&PushOrder { within, ..w.order(1) });
        w.steps(900);
        assert_eq!(w.ended[0].len(), usize::from(within.is_zero()));
        // The announcement comes too late by a moment.
        w.now = within;
        w.ready(&[0, 1], 16);
        w.steps(5);
        assert_eq!(w.fault().stage, Stage::Submit);
        assert!(w.memory().iter().flatten().all(|b| *b == UNTOUCHED) && w.is_quiet());
    }
    // One whose last slice was posted in time is done in its own time.
    let mut w = Pushing::new((1, 1), all(1, &OpFault::HoldCompletion(3 * SECOND)));
    w.push(&PushOrder { within: SECOND, ..w.order(1) });
    w.steps(3100);
    assert_eq!(w.reports()[0].slices, 1);
}

/// What is in flight is bounded as for reads, and the more urgent goes first.
#[test]
fn writes_are_admitted_like_reads() {
    let b = Bytes::new;
    for (limits, ops, bytes) in [
        (admission(256, 3), 3, 768),
        (Admission { bytes: b(1000), ..admission(256, 9) }, 3, 768),
        (Admission { peer_bytes: b(600), ..admission(256, 9) }, 2, 512),
        (Admission { peer_bytes: b(64), ..admission(256, 9) }, 1, 64),
    ] {
        let mut w = Pushing::new((1, 2), all(4000, &OpFault::HoldCompletion(SECOND / 500))).in_slices(limits);
        for push in 1..4 {
            let dst = other_dst_groups(u32::try_from(push).unwrap());
            let request = Arc::new(Request { dst, ..World::request() });
            w.push(&PushOrder { request, priority: u8::try_from(push).unwrap(), ..w.order(push) });
        }
        let mut most = (0, 0);
        while w.ended[0].len() < 3 && w.now < 100 * SECOND {
            let flights = w.p[0].end.ops.values();
            let now = (flights.len(), flights.map(|f| f.bytes.get()).sum::<u64>());
            most = (most.0.max(now.0), most.1.max(now.1));
            w.steps(1);
        }
        assert_eq!(most, (ops, bytes), "{limits:?}");
        assert!(w.ended[0].iter().all(|(_, r)| r.is_ok()) && w.is_quiet());
        assert_eq!(w.ended[0].iter().map(|(id, _)| *id).collect::<Vec<_>>(), [3, 2, 1]);
        let queued: Vec<Duration> = w.ended[0].iter().map(|(_, r)| r.as_ref().unwrap().queued).collect();
        assert!(queued.is_sorted() && queued[2] > Duration::ZERO, "{queued:?}");
    }
}

/// A lane that isn't what the policy requires carries nothing.
#[test]
fn a_refused_lane_fails_the_push_with_the_reason() {
    let policy = Policy::new(["rdma"], None).unwrap();
    let mut w = Pushing::with((1, 2), Script::default(), policy);
    for streamed in [false, true] {
        if streamed {
            w.stream(Attempt::FIRST, 3, false);
        }
        w.push(&w.order(1));
        w.steps(10);
        assert_eq!(w.fault().stage, Stage::Connect);
        assert!(w.fault().text.starts_with("destination rank 0: the lane is refused"), "{}", w.fault());
        assert!(w.is_quiet() && w.memory().iter().flatten().all(|b| *b == UNTOUCHED));
        w.ended[0].clear();
    }
    let connect = [(1, ConnectError::Itself)].into();
    let mut w = Pushing::new((1, 2), Script { connect, ..Script::default() });
    w.push(&w.order(1));
    w.steps(10);
    assert_eq!(w.fault().stage, Stage::Connect);
    assert!(w.fault().text.starts_with("destination rank 1: "), "{}", w.fault());
}

/// What doesn't fit is refused before anything is posted, and says what.
#[test]
fn pushes_that_do_not_fit_are_refused() {
    let mut w = Pushing::new((1, 2), Script::default());
    let good = w.order(1);
    let mut map = good.clone();
    map.pairing.peer_map = Digest::from_bytes([0; 32]);
    let mut engine = good.clone();
    engine.pairing.peer = Digest::from_bytes([0; 32]);
    let groups = PushOrder { request: Arc::new(Request { dst: Vec::new(), ..World::request() }), ..good.clone() };
    let short = PushOrder { request: Arc::new(Request { src: groups_listed(2), ..World::request() }), ..good };
    for (order, text) in [(map, "map of peers"), (engine, "unknown engine"), (groups, "groups"), (short, "32")] {
        w.push(&order);
        w.steps(5);
        assert_eq!(w.fault().stage, Stage::Plan);
        assert!(w.fault().text.contains(text), "{}", w.fault());
        w.ended[0].clear();
    }
    assert!(w.is_quiet() && w.memory().iter().flatten().all(|b| *b == UNTOUCHED));
    // A second one of the same name has the end of the first.
    let mut w = Pushing::new((1, 2), Script::default());
    w.push(&w.order(1));
    w.push(&w.order(1));
    w.steps(20);
    assert_eq!(w.reports()[0].writes.len(), 2);
}

/// A named destination of which nothing is needed needs no lane, and stands in the report.
#[test]
fn a_destination_that_needs_nothing_is_named() {
    let cached = |w: &Pushing| {
        let mut order = w.order(1);
        for group in &mut Arc::make_mut(&mut order.request).dst {
            if let kvferry_geometry::request::DstGroup::Paged(g) = group {
                g.cached = Tokens::new(TOKENS);
            }
        }
        order
    };
    for streamed in [false, true] {
        let connect = [(0, ConnectError::Itself), (1, ConnectError::Itself)].into();
        let mut w = Pushing::new((1, 2), Script { connect, ..Script::default() });
        if streamed {
            w.stream(Attempt::FIRST, 3, false);
        }
        w.push(&cached(&w));
        w.ready(&[0, 1], 20);
        w.steps(5);
        assert_eq!(w.ended[0].len(), usize::from(!streamed));
        if streamed {
            w.stream(Attempt::FIRST, 3, true);
            w.steps(5);
        }
        let report = w.reports()[0];
        let writes: Vec<_> = report.writes.iter().map(|x| (x.dst.get(), x.bytes.get(), x.lane.as_str())).collect();
        assert_eq!(writes, [(0, 0, ""), (1, 0, "")]);
        assert_eq!((report.slices, report.queued), (0, Duration::ZERO));
        assert!(w.is_quiet());
    }
}

/// What the other ranks have not finished is missed: the comparison finds it.
#[test]
fn a_byte_that_was_not_written_is_named() {
    let mut w = Pushing::new((2, 1), Script::default());
    w.push(&w.order(1));
    w.steps(20);
    let view = w.d[0].cache.manifest().layout.views[1].as_ref().unwrap().as_paged().unwrap().clone();
    // Block 7 is the first of the consumer's table.
    let at = view.offset.get() + 7 * view.block_stride.get();
    w.d[0].cache.regions()[view.region.index()].fill(at, 1, 0).unwrap();
    w.finish(true, Assurance::Full);
    let [Err(fault)] = &w.pulled[..] else { panic!("{:?}", w.pulled) };
    assert_eq!(fault.stage, Stage::Compare);
    assert_eq!(fault.bad.iter().map(|b| (b.item.as_str(), b.block.get())).collect::<Vec<_>>(), [("layer.1", 7)]);
}

mod streams;
mod table;
