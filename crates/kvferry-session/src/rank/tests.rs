//! Ranks on the in-memory transport, with the owners' part played by the test.

use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::Request;
use kvferry_geometry::units::Tokens;
use kvferry_proto::manifest::RankContact;
use kvferry_proto::peer::Gathered;
use kvferry_proto::rank::{Assurance, GatherOrder, Pairing, RankReport};
use kvferry_transport::fault::{Faulty, OpFault, Script};
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::preflight::Policy;
use kvferry_transport::{LostCause, Region, TransferError};

use super::*;
use crate::pairing::Direction;
use crate::testing::{Late, TOKEN_BYTES, TOKENS, dst_groups, manifest, shape, src_groups};

/// Two prefill ranks and one decode rank, which reads from both.
struct World {
    p: Vec<RankSession>,
    d: RankSession,
    pairing: Pairing,
    /// The decode rank's name to the prefill ranks.
    consumer: Pairing,
    now: Duration,
    ended: Vec<Result<RankReport, RankFault>>,
    /// Whether the decode rank hears nothing of lanes.
    held: Arc<AtomicBool>,
    /// Whether what the decode rank has in flight takes note of no cancel.
    deaf: Arc<AtomicBool>,
    network: MemNetwork,
}

fn session(id: &str, rank: u32, tp: u32, mut transport: Box<dyn Transport>) -> (RankSession, RankContact) {
    let description = shape(tp).2.swap_remove(rank as usize);
    let memory = description
        .layout
        .regions
        .iter()
        .map(|r| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap())
        .collect();
    let cache = LocalCache::register(&mut *transport, description, memory).unwrap();
    let who = RankIdentity { engine: EngineId::new(id).unwrap(), rank: RankId::new(rank), epoch: Epoch::new(1) };
    let mut session = RankSession::new(who, transport, cache);
    let Some(FromRank::Join(join)) = session.next_message() else { panic!("it joins first") };
    (session, RankContact { epoch: join.epoch, blob: join.blob })
}

impl World {
    fn new(script: Script) -> Self {
        Self::with(script, Policy::default())
    }

    /// With lanes of the decode rank that must be what a policy says.
    fn with(script: Script, policy: Policy) -> Self {
        let network = MemNetwork::new(3);
        let (mut p, mut contacts) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            let (session, contact) = session("p", rank, 2, Box::new(network.endpoint().unwrap()));
            p.push(session);
            contacts.push(contact);
        }
        let held = Arc::new(AtomicBool::new(false));
        let faulty = Faulty::new(network.endpoint().unwrap(), script);
        let late = Late::new(faulty, held.clone());
        let deaf = late.deaf.clone();
        let (d, contact) = session("d", 0, 1, Box::new(late));
        let mut d = d.with_lanes(policy).unwrap();
        let engine = |id: &str, tp, contacts| {
            let cache = (*manifest(tp)).clone();
            Arc::new(EngineManifest::new(EngineId::new(id).unwrap(), Epoch::new(1), cache, contacts).unwrap())
        };
        let (pe, de) = (engine("p", 2, contacts), engine("d", 1, vec![contact]));
        let map = Direction::new(pe.cache().clone(), de.cache().clone(), CompatOptions::default())
            .unwrap()
            .map(PeerOptions::default())
            .unwrap()
            .digest();
        d.handle(ToRank::Welcome(de.clone()), Duration::ZERO);
        d.handle(ToRank::Peer(pe.clone()), Duration::ZERO);
        for rank in &mut p {
            rank.handle(ToRank::Welcome(pe.clone()), Duration::ZERO);
            rank.handle(ToRank::Peer(de.clone()), Duration::ZERO);
            for region in rank.cache.regions() {
                let bytes: Vec<u8> = (0..region.len().get()).map(|i| (i * 7 % 251).to_le_bytes()[0] + 1).collect();
                region.write(0, &bytes).unwrap();
            }
        }
        let pairing = Pairing {
            peer: pe.digest(),
            options: PeerOptions::default(),
            compat: CompatOptions::default(),
            peer_map: map,
        };
        let consumer = Pairing { peer: de.digest(), ..pairing };
        Self { p, d, pairing, consumer, now: Duration::ZERO, ended: Vec::new(), held, deaf, network }
    }

    fn request() -> Request {
        Request { tokens: Tokens::new(TOKENS), src: src_groups(), dst: dst_groups() }
    }

    fn order(&self, pull: u64, assurance: Assurance) -> PullOrder {
        PullOrder {
            pull: PullId(pull),
            pairing: self.pairing,
            request: Self::request().into(),
            assurance,
            priority: 100,
            deadline: None,
            written: false,
        }
    }

    fn pull(&mut self, assurance: Assurance) {
        let order = self.order(1, assurance);
        self.d.handle(ToRank::Pull(order), self.now);
    }

    /// Steps everything for a while.
    fn run(&mut self, time: Duration) {
        for _ in 0..200 {
            self.d.step(self.now);
            for p in &mut self.p {
                p.step(self.now);
            }
            while let Some(message) = self.d.next_message() {
                match message {
                    FromRank::Pulled { result, .. } => self.ended.push(result),
                    FromRank::DigestWanted { pull, src, windows } => {
                        let (pairing, dst) = (self.consumer, RankId::new(0));
                        let order = DigestOrder { ticket: pull.0, pairing, dst, request: Self::request(), windows };
                        self.p[src.index()].handle(ToRank::Digest(order), self.now);
                    }
                    other => panic!("{other:?}"),
                }
            }
            for src in 0..2u32 {
                while let Some(message) = self.p[src as usize].next_message() {
                    let FromRank::Digested { ticket, pieces } = message else { panic!("{message:?}") };
                    let answer = ToRank::DigestAnswer { pull: PullId(ticket), src: RankId::new(src), pieces };
                    self.d.handle(answer, self.now);
                }
            }
            self.now += time / 200;
        }
        assert!(self.d.pulls.is_empty() != self.ended.is_empty(), "ended and told are the same");
    }

    fn fault(&self) -> &RankFault {
        match &self.ended[..] {
            [Err(fault)] => fault,
            other => panic!("it fails once: {other:?}"),
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn lost() -> TransferError {
    TransferError::PeerLost(LostCause::Gone)
}

fn on(submission: u64, fault: OpFault) -> Script {
    Script { submit: [(submission, fault)].into(), ..Script::default() }
}

#[test]
fn a_share_is_read_zeroed_and_compared() {
    for assurance in [Assurance::Fenced, Assurance::Full] {
        let mut w = World::new(Script::default());
        w.d.cache.regions().iter().for_each(|r| r.fill(0, r.len().get(), 0xee).unwrap());
        w.pull(assurance);
        w.run(SECOND);
        let [Ok(report)] = &w.ended[..] else { panic!("{:?}", w.ended) };
        let sources: Vec<_> = report.sources.iter().map(|s| (s.src.get(), s.bytes.get())).collect();
        assert_eq!(sources, [(0, TOKENS * TOKEN_BYTES / 2), (1, TOKENS * TOKEN_BYTES / 2)]);
        // Three blocks of 16 tokens, 40 of which have moved.
        assert_eq!(report.zeroed.get(), 8 * TOKEN_BYTES);
        let compared = if assurance == Assurance::Full { TOKENS * TOKEN_BYTES } else { 0 };
        assert_eq!(report.compared.get(), compared);
        assert!(w.d.end.ops.is_empty());
    }
}

/// FR-11, FR-12: every way in which an operation can end badly is one failure of the share, once, and doubt is told.
#[test]
fn fr_12_every_bad_end_is_one_failure() {
    let refused = kvferry_transport::SubmitError::Refused { reason: "on demand".into() };
    for submission in 0..2 {
        for (fault, stage, in_doubt) in [
            (OpFault::Refuse(refused.clone()), Stage::Submit, false),
            (OpFault::Fail(lost()), Stage::Read, false),
            (OpFault::InDoubt(lost()), Stage::Read, true),
            (OpFault::Fail(TransferError::Cancelled), Stage::Read, false),
        ] {
            let mut w = World::new(on(submission, fault.clone()));
            w.pull(Assurance::Full);
            w.run(SECOND);
            let got = w.fault();
            assert_eq!((got.stage, got.in_doubt), (stage, in_doubt), "{submission} {fault:?}");
            assert!(got.text.contains(&format!("source rank {submission}")), "{got}");
        }
    }
    let connect = [(1, kvferry_transport::ConnectError::Itself)].into();
    let mut w = World::new(Script { connect, ..Script::default() });
    w.pull(Assurance::Full);
    w.run(SECOND);
    assert_eq!(w.fault().stage, Stage::Connect);
}

/// FR-01: the share ends when its last operation has ended, not when its first one failed.
#[test]
fn fr_01_a_share_ends_when_nothing_is_in_flight() {
    let mut script = on(0, OpFault::Fail(lost()));
    script.submit.insert(1, OpFault::LoseCompletion);
    let mut w = World::new(script);
    w.pull(Assurance::Fenced);
    w.run(SECOND);
    // The second operation was asked to stop, and its end is in doubt.
    let got = w.fault();
    assert_eq!((got.stage, got.in_doubt), (Stage::Read, true), "the first fault, with all doubt: {got}");
}

#[test]
fn a_cancelled_share_ends_when_its_operations_have() {
    for (fault, in_doubt) in [(OpFault::Delay(60 * SECOND), false), (OpFault::LoseCompletion, true)] {
        let mut w = World::new(on(1, fault));
        w.pull(Assurance::Fenced);
        w.run(SECOND);
        assert!(w.ended.is_empty(), "one operation is in flight");
        w.d.handle(ToRank::Cancel(PullId(1)), w.now);
        w.d.handle(ToRank::Cancel(PullId(2)), w.now);
        w.run(SECOND);
        assert_eq!((w.fault().stage, w.fault().in_doubt), (Stage::Cancelled, in_doubt));
    }
}

#[test]
fn a_full_queue_only_delays() {
    let full = kvferry_transport::SubmitError::QueueFull { limit: 1 };
    let mut w = World::new(on(1, OpFault::Refuse(full)));
    w.pull(Assurance::Full);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
}

/// What doesn't fit is refused before anything is posted, and says what.
#[test]
fn orders_that_do_not_fit_are_refused() {
    let mut w = World::new(Script::default());
    let good = w.order(1, Assurance::Fenced);
    let mut map = good.clone();
    map.pairing.peer_map = Digest::from_bytes([0; 32]);
    let mut salt = good.clone();
    salt.pairing.options.salt = 1;
    let mut engine = good.clone();
    engine.pairing.peer = Digest::from_bytes([0; 32]);
    let mut request = good;
    Arc::make_mut(&mut request.request).dst.clear();
    for (order, text) in
        [(map, "map of peers"), (salt, "map of peers"), (engine, "unknown engine"), (request, "groups")]
    {
        w.d.handle(ToRank::Pull(order), w.now);
        w.run(SECOND / 10);
        assert_eq!(w.fault().stage, Stage::Plan);
        assert!(w.fault().text.contains(text), "{}", w.fault());
        w.ended.clear();
    }
    assert!(w.d.end.ops.is_empty());
}

/// Bytes that changed between read and comparison are found, and named by item and block.
#[test]
fn a_changed_byte_is_named() {
    let mut w = World::new(on(0, OpFault::HoldCompletion(SECOND / 2)));
    w.pull(Assurance::Full);
    w.run(SECOND / 10);
    assert!(w.ended.is_empty());
    // Token 17 of layer.1 at prefill rank 1: block 0, the second of its table.
    let view = w.p[1].cache.manifest().layout.views[1].as_ref().unwrap().as_paged().unwrap().clone();
    let at = view.offset.get() + view.components[0].entry_stride.get();
    let region = &w.p[1].cache.regions()[view.region.index()];
    region.fill(at, 1, 0).unwrap();
    w.run(2 * SECOND);
    let got = w.fault();
    assert_eq!(got.stage, Stage::Compare);
    let bad: Vec<_> = got.bad.iter().map(|b| (b.src.get(), b.item.as_str(), b.block.get())).collect();
    // Block 2 is the second of the consumer's table.
    assert_eq!(bad, [(1, "layer.1", 2)]);
}

#[test]
fn a_producer_that_cannot_digest_fails_the_comparison() {
    let mut w = World::new(Script::default());
    w.pull(Assurance::Full);
    w.d.step(w.now);
    let answer =
        ToRank::DigestAnswer { pull: PullId(1), src: RankId::new(0), pieces: Err("its lease is closed".into()) };
    // Until it compares, nothing is awaited from the producer.
    w.d.handle(answer.clone(), w.now);
    for _ in 0..100 {
        w.d.step(w.now);
        if w.d.pulls.values().any(|p| p.has_work()) {
            break;
        }
    }
    w.d.handle(answer, w.now);
    w.run(SECOND / 10);
    assert_eq!(w.fault().stage, Stage::Compare);
    assert!(w.fault().text.contains("its lease is closed"), "{}", w.fault());
}

/// Who finds no room to gather has cost no plan: the request isn't looked at.
#[test]
fn room_is_looked_at_before_a_plan() {
    let pairing = World::new(Script::default()).consumer;
    let mut transport: Box<dyn Transport> = Box::new(MemNetwork::new(9).endpoint().unwrap());
    let manifest = shape(1).2.swap_remove(0);
    let regions = manifest.layout.regions.iter();
    let regions = regions.map(|r| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap()).collect();
    let cache = LocalCache::register(&mut *transport, manifest, regions).unwrap();
    let cache = cache.with_staging(&mut *transport, Region::zeroed(1 << 16).unwrap()).unwrap();
    let who = RankIdentity { engine: EngineId::new("p").unwrap(), rank: RankId::new(0), epoch: Epoch::new(3) };
    let mut rank = RankSession::new(who, transport, cache).with_staging(StagingConfig::default()).unwrap();
    let _join = rank.next_message();
    for (bytes, reason) in [(1 << 20, "are more than"), (1 << 16, "the engine is not complete")] {
        let gathered = Gathered { bytes: Bytes::new(bytes), batch: Digest::from_bytes([0; 32]) };
        let (dst, request) = (RankId::new(0), World::request());
        let order = GatherOrder { ticket: bytes, pairing, dst, gathered, request };
        rank.handle(ToRank::Gather(order), Duration::ZERO);
        let Some(FromRank::Gathered { result: Err(why), .. }) = rank.next_message() else { panic!("it is refused") };
        assert!(why.to_string().contains(reason), "{why}");
        assert_eq!(rank.staging_lent(), Bytes::ZERO);
    }
}

/// Engines that are forgotten are reached anew when they come back.
#[test]
fn lanes_are_dropped_with_their_engine_and_made_anew() {
    let mut w = World::new(Script::default());
    let engine = w.d.peers.values().next().unwrap().manifest.clone();
    for round in 1..4 {
        w.pull(Assurance::Fenced);
        w.run(SECOND / 10);
        assert_eq!(w.ended.len(), round);
        assert!(w.ended.iter().all(Result::is_ok), "{:?}", w.ended);
        assert_eq!(w.d.peers.values().map(|k| k.lanes.len()).sum::<usize>(), 2);
        w.d.handle(ToRank::Forget(engine.digest()), w.now);
        assert!(w.d.peers.is_empty());
        w.d.handle(ToRank::Peer(engine.clone()), w.now);
    }
}

/// A producer whose digests are all wrong costs a bounded slice at a time, and the request ends.
#[test]
fn a_producer_whose_digests_are_all_wrong_is_named_in_slices() {
    let mut w = World::new(Script::default());
    w.pull(Assurance::Full);
    let mut rounds = 0;
    for _ in 0..10_000 {
        w.d.step(w.now);
        for p in &mut w.p {
            p.step(w.now);
        }
        while let Some(message) = w.d.next_message() {
            match message {
                FromRank::Pulled { result, .. } => w.ended.push(result),
                FromRank::DigestWanted { pull, src, windows } => {
                    rounds += 1;
                    let pieces = windows.iter().map(|x| x.pieces().unwrap()).sum::<u64>();
                    let pieces = Ok(vec![[0xee; 16]; usize::try_from(pieces).unwrap()]);
                    w.d.handle(ToRank::DigestAnswer { pull, src, pieces }, w.now);
                }
                other => panic!("{other:?}"),
            }
        }
        w.now += Duration::from_millis(1);
    }
    assert_eq!(rounds, 4, "two for each source");
    assert_eq!(w.fault().stage, Stage::Compare);
    // Two items, three blocks, two sources.
    assert_eq!(w.fault().bad.len(), 12);
}

/// Digests of each engine in turn, until they are cancelled or the engine is forgotten.
#[test]
fn digest_orders_end_when_they_are_cancelled() {
    let mut w = World::new(Script::default());
    let window = kvferry_proto::peer::Window { start: 0, len: 64, piece: 64 };
    let order = |w: &World, ticket| {
        let (pairing, dst, request) = (w.consumer, RankId::new(0), World::request());
        ToRank::Digest(DigestOrder { ticket, pairing, dst, request, windows: vec![window] })
    };
    for ticket in 1..=3 {
        let order = order(&w, ticket);
        w.p[0].handle(order, w.now);
    }
    w.p[0].handle(ToRank::CancelDigest(2), w.now);
    w.p[0].handle(ToRank::CancelDigest(9), w.now);
    let mut done = Vec::new();
    for _ in 0..10 {
        w.p[0].step(w.now);
        while let Some(message) = w.p[0].next_message() {
            let FromRank::Digested { ticket, pieces } = message else { panic!("{message:?}") };
            assert_eq!(pieces.map(|p| p.len()), Ok(1));
            done.push(ticket);
        }
    }
    assert_eq!(done, [1, 3]);
    let order = order(&w, 4);
    w.p[0].handle(order, w.now);
    w.p[0].handle(ToRank::Forget(w.consumer.peer), w.now);
    assert!(w.p[0].jobs.is_empty());
}

mod lanes;
mod push;
mod slices;
