//! Reads that are staged at their source.

use kvferry_geometry::digest::Digest;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::staged::{CostModel, Place};
use kvferry_geometry::units::Bytes;
use kvferry_proto::handshake::Abilities;
use kvferry_proto::peer::{Gather, GatherAnswer, Gathered, NotGathered};
use kvferry_proto::rank::Stage;
use kvferry_transport::fault::OpFault;

use super::tests::{
    N, STATE_BYTES, TOKEN_BYTES, attention, destination, engine, held, hybrid, is_there, listed, places, room, source,
};
use super::*;
use crate::FailureCause;
use crate::rank::Way;

const POOL: usize = 1 << 20;

/// TP 2 with heads inside tokens; staging memory for what others read.
fn prefill(pool: Option<usize>) -> Shape {
    Shape { staging: pool.map(|bytes| (bytes, StagingConfig::default())), ..hybrid(2, 1, LayoutStyle::NHD) }
}

/// TP 4 with tokens inside heads, and almost no staging memory of its own.
fn decode(way: Way) -> Shape {
    let staging = Some((16, StagingConfig { way, ..StagingConfig::default() }));
    Shape { staging, ..hybrid(4, 1, LayoutStyle::HND) }
}

fn lent(w: &World) -> u64 {
    w.p.ranks.iter().map(|r| r.staging_lent().get()).sum()
}

fn image(w: &World) -> Vec<Vec<u8>> {
    w.d.memory.iter().flatten().map(|r| r.to_vec().unwrap()).collect()
}

fn all_are(ended: &Ended, place: Place) -> bool {
    places(ended.as_ref().unwrap()).iter().all(|p| *p == place)
}

fn start(w: &mut World, i: u32) -> (Fence, PullId) {
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, destination(i));
    (fence, w.d.owner.pull(wish, w.now))
}

/// Does the producer's gathers that were kept back.
fn gather(w: &mut World) {
    for (rank, work) in std::mem::take(&mut w.p.work) {
        work.permute.run(1);
        w.p.ranks[rank].work_done(work.id, w.now);
    }
}

/// However bytes come, they are the same, all of them are compared in place, and all segments are back when the lease is over.
#[test]
fn gathered_bytes_are_the_direct_ones() {
    let mut images = Vec::new();
    for way in [Way::Direct, Way::Source] {
        let mut w = World::new(prefill(Some(POOL)), decode(way));
        w.p.fill(1, &source());
        let ended = w.pull(N, source(), destination(1));
        assert!(all_are(&ended, if way == Way::Direct { Place::Direct } else { Place::Source }), "{ended:?}");
        let report = ended.as_ref().unwrap().report();
        let all = N * TOKEN_BYTES + STATE_BYTES;
        assert_eq!((report.bytes().get(), report.compared.get(), report.pairs.len()), (all, all, 4));
        assert!(is_there(&w, 1));
        assert_eq!(lent(&w), 0);
        images.push(image(&w));
    }
    assert!(images[0] == images[1], "tails are zeroed alike, and nothing else is touched");
    // Blocks of 64 tokens become blocks of 16.
    images.clear();
    let items: Vec<_> = (0..4).map(|i| attention(&format!("layer {i}"))).collect();
    for way in [Way::Direct, Way::Source] {
        let mut p = engine(&items, &[(&[0, 1, 2, 3], 64)], 2, 1, HeadRule::Split, LayoutStyle::NHD);
        p.staging = Some((POOL, StagingConfig::default()));
        let mut d = engine(&items, &[(&[0, 1, 2, 3], 16)], 4, 1, HeadRule::Split, LayoutStyle::HND);
        d.staging = Some((16, StagingConfig { way, ..StagingConfig::default() }));
        let mut w = World::new(p, d);
        w.p.fill(1, &[held(&[5])]);
        let ended = w.pull(N, vec![held(&[5])], vec![room(&[9, 2, 4], 0)]);
        assert!(all_are(&ended, if way == Way::Direct { Place::Direct } else { Place::Source }), "{ended:?}");
        assert_eq!(w.d.found(1, 0, &listed(&[9, 2, 4]), (0, N)), (N * TOKEN_BYTES, 0));
        assert_eq!(lent(&w), 0);
        images.push(image(&w));
    }
    assert!(images[0] == images[1]);
}

/// Where the producer can't gather, bytes come directly: no memory, too little of it, memory that is not for this, and an owner
/// that doesn't know of it, which is not asked.
#[test]
fn whoever_cannot_gather_is_read_directly() {
    let not_for_this = (POOL, StagingConfig { way: Way::Direct, ..StagingConfig::default() });
    for staging in [None, Some((4096, StagingConfig::default())), Some(not_for_this)] {
        let mut w = World::new(Shape { staging, ..prefill(None) }, decode(Way::Source));
        w.p.fill(1, &source());
        let ended = w.pull(N, source(), destination(1));
        assert!(all_are(&ended, Place::Direct), "{staging:?}: {ended:?}");
        assert!(is_there(&w, 1));
        assert_eq!(lent(&w), 0);
    }
    let mut w = World::new(prefill(Some(POOL)), decode(Way::Source));
    w.heard = |m| match m {
        PeerMessage::Hello(mut hello) => {
            hello.abilities = Abilities(0);
            PeerMessage::Hello(hello)
        }
        PeerMessage::GatherAnswer(_) => panic!("it was asked"),
        m => m,
    };
    w.p.fill(1, &source());
    assert!(all_are(&w.pull(N, source(), destination(1)), Place::Direct));
    assert!(is_there(&w, 1));
}

/// Two engines that compute other batches find it out before a byte moves: it is read directly, and the producer is not asked again.
#[test]
fn engines_that_compute_other_batches_do_not_gather() {
    fn more(m: PeerMessage) -> PeerMessage {
        changed(m, |g| g.bytes = Bytes::new(g.bytes.get() + 4096))
    }
    fn other(m: PeerMessage) -> PeerMessage {
        changed(m, |g| g.batch = Digest::from_bytes([1; 32]))
    }
    for asked in [more as Heard, other] {
        let mut w = World::new(prefill(Some(POOL)), decode(Way::Source));
        w.p.fill(1, &source());
        w.asked = asked;
        w.heard = |m| match m {
            PeerMessage::GatherAnswer(GatherAnswer { result: Err(NotGathered::Differs { .. }), .. }) => m,
            PeerMessage::GatherAnswer(other) => panic!("{other:?}"),
            m => m,
        };
        assert!(all_are(&w.pull(N, source(), destination(1)), Place::Direct));
        assert!(is_there(&w, 1));
        assert_eq!(lent(&w), 0);
        w.asked = |m| match m {
            PeerMessage::Gather(_) => panic!("it was asked again"),
            m => m,
        };
        assert!(all_are(&w.pull(N, source(), destination(2)), Place::Direct));
    }
}

fn changed(m: PeerMessage, change: fn(&mut Gathered)) -> PeerMessage {
    match m {
        PeerMessage::Gather(mut question) => {
            change(&mut question.gathered);
            PeerMessage::Gather(question)
        }
        m => m,
    }
}

/// The model weighs all three ways, with the memory of both sides.
#[test]
fn the_cheapest_way_is_taken() {
    for (descriptor_ns, pool, place) in
        [(100, Some(POOL), Place::Direct), (1_000_000, Some(POOL), Place::Source), (1_000_000, None, Place::Direct)]
    {
        let mut d = decode(Way::Auto);
        if let Some((_, config)) = &mut d.staging {
            config.cost = Some(CostModel { descriptor_ns, ..CostModel::default() });
        }
        let mut w = World::new(prefill(pool), d);
        w.p.fill(1, &source());
        let ended = w.pull(N, source(), destination(1));
        assert!(all_are(&ended, place), "{descriptor_ns} {pool:?}: {ended:?}");
        assert!(is_there(&w, 1));
    }
}

/// Nobody waits for a segment that is lent for as long as a peer likes: the second request goes directly and ends first.
#[test]
fn who_finds_the_pool_lent_does_not_wait() {
    // Each producer's rank gathers for two: one of the first request finds room, the other and the second request do not.
    let one = usize::try_from((N * TOKEN_BYTES + STATE_BYTES) / 4).unwrap().next_multiple_of(4096);
    let mut w = World::new(prefill(Some(one)), decode(Way::Source));
    w.p.fill(1, &source());
    w.p.permutes = false;
    let (_, first) = start(&mut w, 0);
    w.run(10);
    assert_eq!((lent(&w), w.p.work.len()), (2 * one as u64, 2));
    let (_, second) = start(&mut w, 1);
    w.run(40);
    assert!(w.end_of(first).is_none());
    assert!(all_are(&w.end_of(second).expect("it has ended"), Place::Direct));
    assert!(is_there(&w, 1));
    gather(&mut w);
    w.run(40);
    let mut got = places(w.end_of(first).unwrap().as_ref().unwrap());
    got.sort_by_key(|p| *p == Place::Source);
    assert_eq!(got, [Place::Direct, Place::Direct, Place::Source, Place::Source]);
    assert!(is_there(&w, 0));
    assert_eq!(lent(&w), 0);
    // There is room again.
    w.p.permutes = true;
    assert!(places(&w.pull(N, source(), destination(2)).unwrap()).contains(&Place::Source));
}

/// What is given up while it is gathered is freed when the gather has ended, not before.
#[test]
fn a_request_that_is_cancelled_frees_what_was_gathered() {
    let mut w = World::new(prefill(Some(POOL)), decode(Way::Source));
    w.p.fill(1, &source());
    w.p.permutes = false;
    let (_, pull) = start(&mut w, 0);
    w.run(10);
    assert_eq!(w.p.work.len(), 4);
    w.d.owner.cancel(pull, w.now);
    w.run(20);
    assert_eq!(w.end_of(pull).unwrap().unwrap_err().cause, FailureCause::Cancelled);
    assert_eq!(w.p.closed.len(), 1);
    assert!(lent(&w) > 0, "it is being written");
    gather(&mut w);
    w.run(10);
    assert_eq!(lent(&w), 0);
    w.p.permutes = true;
    assert!(all_are(&w.pull(N, source(), destination(1)), Place::Source));
    assert!(is_there(&w, 1));
}

/// Segments are lent for as long as the lease is open: until it is withdrawn under its readers, or they are lost.
#[test]
fn segments_are_lent_as_long_as_the_lease_is_open() {
    for withdrawn in [true, false] {
        let mut d = decode(Way::Source);
        d.script.submit = [(0, OpFault::Delay(Duration::from_secs(1)))].into();
        let mut w = World::new(prefill(Some(POOL)), d);
        w.p.fill(1, &source());
        let (fence, pull) = start(&mut w, 0);
        w.run(30);
        assert!(lent(&w) > 0 && w.end_of(pull).is_none(), "one rank still reads");
        if withdrawn {
            assert!(w.p.owner.withdraw(fence.lease, w.now));
        } else {
            let (ours, theirs) = w.link.take().unwrap();
            w.p.owner.link_closed(theirs, "gone", w.now);
            w.d.owner.link_closed(ours, "gone", w.now);
        }
        w.run(2);
        assert_eq!((lent(&w), w.p.closed.len()), (0, 1));
        w.run(300);
        let failed = w.end_of(pull).expect("it has ended").unwrap_err();
        assert!(!is_fine(&failed), "what was read after the lease is not used: {failed}");
    }
}

/// Whether the bytes of a failed request might be used: never.
fn is_fine(failed: &Failed) -> bool {
    failed.report.faults.is_empty() && failed.report.groups.iter().any(|g| !g.valid.is_empty())
}

/// Wrong places are found before anything is posted, where they leave what the rank has registered, and by comparing where not.
#[test]
fn a_producer_that_lies_about_the_place_harms_its_own_request_only() {
    let lies: [(Heard, Stage); 4] = [
        (|m| moved(m, |_| POOL as u64), Stage::Plan),
        (|m| moved(m, |_| POOL as u64 - 1), Stage::Plan),
        (|m| moved(m, |_| u64::MAX), Stage::Plan),
        (|m| moved(m, |at| at + (POOL / 2) as u64), Stage::Compare),
    ];
    for (lie, stage) in lies {
        let mut w = World::new(prefill(Some(POOL)), decode(Way::Source));
        w.p.fill(1, &source());
        w.heard = lie;
        let before = image(&w);
        let failed = w.pull(N, source(), destination(1)).unwrap_err();
        let faults = &failed.report.faults;
        assert!(faults.iter().any(|(_, f)| f.stage == stage && !f.in_doubt), "{stage}: {failed}");
        if stage == Stage::Plan {
            let text = &faults.iter().find(|(_, f)| f.stage == stage).unwrap().1.text;
            assert!(text.contains("says that it has gathered"), "{text}");
            assert!(before == image(&w), "nothing was read");
        }
        assert_eq!((lent(&w), w.d.owner.quarantined()), (0, 0));
        w.heard = |m| m;
        assert!(all_are(&w.pull(N, source(), destination(1)), Place::Source));
        assert!(is_there(&w, 1));
    }
}

fn moved(m: PeerMessage, to: fn(u64) -> u64) -> PeerMessage {
    match m {
        PeerMessage::GatherAnswer(GatherAnswer { result: Ok(at), fence, src, dst }) => {
            PeerMessage::GatherAnswer(GatherAnswer { fence, src, dst, result: Ok(Bytes::new(to(at.get()))) })
        }
        m => m,
    }
}

/// Answers that nobody asked for, and second ones, change nothing.
#[test]
fn answers_that_nobody_asked_for_are_ignored() {
    let mut w = World::new(prefill(Some(POOL)), decode(Way::Source));
    w.p.fill(1, &source());
    w.p.permutes = false;
    let (fence, pull) = start(&mut w, 1);
    w.run(10);
    let (ours, theirs) = w.link.unwrap();
    let answer = |src, dst| GatherAnswer {
        fence: fence.clone(),
        src: RankId::new(src),
        dst: RankId::new(dst),
        result: Ok(Bytes::new(u64::MAX)),
    };
    for (src, dst) in [(1, 0), (0, 9), (7, 0)] {
        w.d.owner.peer_message(ours, PeerMessage::GatherAnswer(answer(src, dst)), w.now);
    }
    let other = Fence { lease: LeaseId::new(99), ..fence.clone() };
    w.d.owner.peer_message(ours, PeerMessage::GatherAnswer(GatherAnswer { fence: other, ..answer(0, 0) }), w.now);
    // The same question again, and ones for what is not theirs: refused, and the first ones go on.
    let question = |fence: &Fence, src, dst| Gather {
        fence: fence.clone(),
        src: RankId::new(src),
        dst: RankId::new(dst),
        gathered: Gathered { bytes: Bytes::new(1), batch: Digest::from_bytes([0; 32]) },
        tokens: Tokens::new(N),
        groups: destination(1),
    };
    let other = w.offer(source());
    for (fence, src, dst, groups) in [
        (&fence, 0, 0, None),
        (&fence, 1, 0, None),
        (&other, 0, 0, None),
        (&fence, 0, 9, None),
        (&fence, 0, 1, Some(())),
    ] {
        let mut question = question(fence, src, dst);
        if groups.is_some() {
            question.groups.pop();
        }
        w.p.owner.peer_message(theirs, PeerMessage::Gather(question), w.now);
        w.p.step(w.now);
        match w.p.said.pop_back() {
            Some(PeerMessage::GatherAnswer(GatherAnswer { result: Err(_), .. })) => {}
            other => panic!("{other:?}"),
        }
    }
    gather(&mut w);
    w.run(40);
    assert!(all_are(&w.end_of(pull).expect("it has ended"), Place::Source));
    assert!(is_there(&w, 1));
    assert_eq!(lent(&w), 0);
}
