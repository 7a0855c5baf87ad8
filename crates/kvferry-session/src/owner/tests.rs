//! Two owners stepped by hand, with ranks that say what the test wants: every state of a request with every event.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::request::DstPaged;
use kvferry_geometry::units::Bytes;
use kvferry_proto::manifest::RankJoin;
use kvferry_proto::peer::{BindAnswer, BindRefusal, ReleaseAnswer, Verdict};
use kvferry_proto::rank::{PullOrder, RankFault, RankReport, SourceReport, Stage};

use super::*;
use crate::outcome::FailureCause;
use crate::testing::{TOKENS, dst_groups, other_dst_groups, shape, src_groups};

const SECOND: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(10);

fn key(n: u8) -> ContentKey {
    ContentKey::from_bytes([n; 32])
}

fn config(id: &str, epoch: u128, ranks: u32) -> OwnerConfig {
    let (spec, groups, _) = shape(ranks);
    OwnerConfig {
        engine: EngineId::new(id).unwrap(),
        epoch: Epoch::new(epoch),
        spec,
        groups,
        ranks,
        identity: ModelIdentity::new("m").unwrap(),
        check: IdentityCheck::Required,
        compat: CompatOptions::default(),
        stripe: false,
        handshake: SECOND,
        grace: 2 * SECOND,
    }
}

/// One owner and what it had done.
struct Side {
    session: OwnerSession,
    rank_links: Vec<RankLinkId>,
    orders: Vec<(RankLinkId, ToRank)>,
    to_peer: VecDeque<(LinkId, PeerMessage)>,
    connects: Vec<LinkId>,
    ended: Vec<(PullId, Result<Delivered, Failed>)>,
    closed: Vec<(Fence, Closing)>,
    lost: Vec<RankId>,
}

impl Side {
    fn new(id: &str, epoch: u128, ranks: u32) -> Self {
        let session = OwnerSession::new(config(id, epoch, ranks)).unwrap();
        let mut side = Self {
            session,
            rank_links: Vec::new(),
            orders: Vec::new(),
            to_peer: VecDeque::new(),
            connects: Vec::new(),
            ended: Vec::new(),
            closed: Vec::new(),
            lost: Vec::new(),
        };
        let (_, _, manifests) = shape(ranks);
        for (rank, manifest) in (0u32..).map(RankId::new).zip(manifests) {
            let link = side.session.accept_rank(Duration::ZERO);
            let (engine, epoch) = (EngineId::new(id).unwrap(), Epoch::new(u128::from(rank.get())));
            let join = RankJoin { engine, rank, epoch, manifest, blob: Arc::from([1]) };
            side.session.rank_message(link, FromRank::Join(join), Duration::ZERO);
            side.rank_links.push(link);
        }
        side.take();
        assert!(side.session.manifest().is_some());
        side.orders.clear();
        side
    }

    fn take(&mut self) -> bool {
        let mut any = false;
        while let Some(effect) = self.session.next_effect() {
            any = true;
            match effect {
                Effect::Connect { link, .. } => self.connects.push(link),
                Effect::SendPeer { link, message } => self.to_peer.push_back((link, message)),
                Effect::SendRank { link, message } => self.orders.push((link, message)),
                Effect::PullEnded { pull, result } => self.ended.push((pull, *result)),
                Effect::LeaseClosed { fence, how } => self.closed.push((fence, how)),
                Effect::RankLost { rank, .. } => self.lost.push(rank),
                Effect::ClosePeer { .. } | Effect::CloseRank { .. } | Effect::Ready(_) => {}
                Effect::JoinRefused(error) => panic!("{error}"),
            }
        }
        any
    }

    /// The pull orders that each rank got.
    fn pulls(&self) -> BTreeMap<RankLinkId, PullOrder> {
        let of = |(link, m): &(RankLinkId, ToRank)| match m {
            ToRank::Pull(order) => Some((*link, order.clone())),
            _ => None,
        };
        self.orders.iter().filter_map(of).collect()
    }
}

/// A producer of four ranks and a consumer of two, one link between them, and one pull.
struct World {
    p: Side,
    d: Side,
    /// The consumer's and the producer's name for the link.
    link: Option<(LinkId, LinkId)>,
    now: Duration,
    fence: Fence,
    pull: PullId,
}

fn is_bind_answer(m: &PeerMessage) -> bool {
    matches!(m, PeerMessage::BindAnswer(_))
}

fn is_release_answer(m: &PeerMessage) -> bool {
    matches!(m, PeerMessage::ReleaseAnswer(_))
}

impl World {
    fn new() -> Self {
        let (mut p, mut d) = (Side::new("p", 1, 4), Side::new("d", 2, 2));
        let offer = Offer { groups: src_groups(), content_key: key(1) };
        let fence = p.session.offer(LeaseId::new(77), offer).unwrap();
        let pull = d.session.pull(wish(&fence), Duration::ZERO);
        d.take();
        Self { p, d, link: None, now: Duration::ZERO, fence, pull }
    }

    fn connect(&mut self) {
        let ours = self.d.connects.remove(0);
        let theirs = self.p.session.accept(self.now);
        self.link = Some((ours, theirs));
        assert!(self.d.session.link_opened(ours, self.now));
    }

    /// Carries messages both ways until none is left, but for those of a kind: they are lost.
    fn carry(&mut self, lose: impl Fn(&PeerMessage) -> bool) {
        loop {
            let moved = self.p.take() | self.d.take();
            let Some((ours, theirs)) = self.link else { return };
            for (_, m) in std::mem::take(&mut self.d.to_peer) {
                if !lose(&m) {
                    self.p.session.peer_message(theirs, m, self.now);
                }
            }
            for (_, m) in std::mem::take(&mut self.p.to_peer) {
                if !lose(&m) {
                    self.d.session.peer_message(ours, m, self.now);
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn say(&mut self, rank: usize, result: Result<RankReport, RankFault>) {
        let message = FromRank::Pulled { pull: self.pull, result };
        self.d.session.rank_message(self.d.rank_links[rank], message, self.now);
    }

    fn all_read(&mut self) {
        self.say(0, report(&[0, 1]));
        self.say(1, report(&[2, 3]));
    }

    /// Lets ranks stop where they were told to, and time pass.
    fn settle(&mut self) {
        for _ in 0..3 {
            self.carry(|_| false);
            for rank in 0..2 {
                let link = self.d.rank_links[rank];
                let told = |(l, m): &(RankLinkId, ToRank)| *l == link && matches!(m, ToRank::Cancel(_));
                if self.d.orders.iter().any(told) {
                    self.say(rank, Err(fault(Stage::Cancelled, false)));
                }
            }
            self.now += 20 * SECOND;
            self.d.session.step(self.now);
            self.p.session.step(self.now);
        }
        self.carry(|_| false);
    }

    fn ended(&self) -> String {
        match &self.d.ended[..] {
            [] => "-".into(),
            [(pull, Ok(_))] if *pull == self.pull => "Delivered".into(),
            [(pull, Err(failed))] if *pull == self.pull => name(&failed.cause),
            other => panic!("a request ends once: {other:?}"),
        }
    }
}

fn name(cause: &FailureCause) -> String {
    format!("{cause:?}").split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().into()
}

fn wish(fence: &Fence) -> PullWish {
    PullWish {
        address: "tcp:127.0.0.1:1".into(),
        fence: fence.clone(),
        tokens: Tokens::new(TOKENS),
        groups: dst_groups(),
        content_key: key(1),
        assurance: Assurance::Fenced,
        deadline: DEADLINE,
    }
}

fn report(sources: &[u32]) -> Result<RankReport, RankFault> {
    let source = |&src: &u32| SourceReport {
        src: RankId::new(src),
        bytes: Bytes::new(100),
        rows: 1,
        descriptors_before: 2,
        descriptors_after: 1,
        place: kvferry_geometry::staged::Place::Direct,
        lane: String::new(),
        took: Duration::ZERO,
    };
    let sources = sources.iter().map(source).collect();
    Ok(RankReport { sources, zeroed: Bytes::ZERO, compared: Bytes::ZERO, took: Duration::ZERO })
}

fn fault(stage: Stage, in_doubt: bool) -> RankFault {
    RankFault { stage, text: "as the test wants".into(), in_doubt, bad: Vec::new() }
}

const STATES: [&str; 5] = ["Linking", "Asking", "Reading", "Stopping", "Releasing"];

/// A world whose one pull is in a state.
fn reach(state: &str) -> World {
    let mut w = World::new();
    if state == "Linking" {
        return w;
    }
    w.connect();
    if state == "Asking" {
        w.carry(is_bind_answer);
        return w;
    }
    w.carry(|_| false);
    assert_eq!(w.d.pulls().len(), 2, "each rank was ordered to read");
    match state {
        "Stopping" => w.d.session.cancel(w.pull, w.now),
        "Releasing" => {
            w.all_read();
            w.carry(is_release_answer);
        }
        _ => {}
    }
    w.carry(|_| false);
    w
}

fn happen(w: &mut World, event: &str) {
    let (now, pull) = (w.now, w.pull);
    let link = w.link.map(|(ours, _)| ours).or(w.d.connects.first().copied()).unwrap();
    match event {
        "cancel" => w.d.session.cancel(pull, now),
        "deadline" => {
            w.now += DEADLINE;
            w.d.session.step(w.now);
        }
        "link lost" => {
            w.d.session.link_closed(link, "cut", now);
            if let Some((_, theirs)) = w.link.take() {
                w.p.session.link_closed(theirs, "cut", now);
            }
        }
        "rank lost" => w.d.session.rank_closed(w.d.rank_links[1], "killed", now),
        "rank failed" => w.say(1, Err(fault(Stage::Read, false))),
        "rank not named" => {
            let message = FromRank::Pulled { pull: PullId(999), result: report(&[0, 1]) };
            w.d.session.rank_message(w.d.rank_links[0], message, now);
        }
        "bound again" | "refused" | "refused, other lease" => {
            let mut fence = w.fence.clone();
            if event == "refused, other lease" {
                fence.lease = LeaseId::new(78);
            }
            let answer = if event == "bound again" {
                let groups = src_groups();
                BindAnswer::Bound(kvferry_proto::peer::Grant { fence, groups, time_left: None })
            } else {
                BindAnswer::Refused { fence, reason: BindRefusal::WrongContent }
            };
            // A peer that is not greeted says nothing that counts.
            w.d.session.peer_message(link, PeerMessage::BindAnswer(answer), now);
        }
        "held" | "stale" => {
            let verdict = if event == "held" { Verdict::Held } else { Verdict::Stale };
            let answer = ReleaseAnswer { fence: w.fence.clone(), verdict };
            w.d.session.peer_message(link, PeerMessage::ReleaseAnswer(answer), now);
        }
        "shut down" => w.d.session.shut_down(now),
        other => panic!("no event {other}"),
    }
    w.p.take();
    w.d.take();
}

/// For each event: what a pull in each state has ended as right after it, and at last.
#[test]
fn pull_state_by_event() {
    let table: [(&str, [(&str, &str); 5]); 12] = [
        // Linking, Asking, Reading, Stopping (cancelled before), Releasing
        (
            "cancel",
            [
                ("Cancelled", "Cancelled"),
                ("Cancelled", "Cancelled"),
                ("-", "Cancelled"),
                ("-", "Cancelled"),
                ("Cancelled", "Cancelled"),
            ],
        ),
        (
            "deadline",
            [
                ("Link", "Link"),
                ("Deadline", "Deadline"),
                ("-", "Deadline"),
                ("Cancelled", "Cancelled"),
                ("Deadline", "Deadline"),
            ],
        ),
        ("link lost", [("Link", "Link"), ("Link", "Link"), ("-", "Link"), ("-", "Cancelled"), ("Link", "Link")]),
        (
            "rank lost",
            [
                ("RankLost", "RankLost"),
                ("RankLost", "RankLost"),
                ("-", "Ranks"),
                ("-", "Cancelled"),
                ("RankLost", "RankLost"),
            ],
        ),
        ("rank failed", [("-", "Link"), ("-", "Deadline"), ("-", "Ranks"), ("-", "Cancelled"), ("-", "Deadline")]),
        (
            "rank not named",
            [("-", "Link"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "bound again",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "refused",
            [
                ("Handshake", "Handshake"),
                ("Refused", "Refused"),
                ("-", "Deadline"),
                ("-", "Cancelled"),
                ("-", "Deadline"),
            ],
        ),
        (
            "refused, other lease",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "held",
            [
                ("Handshake", "Handshake"),
                ("-", "Deadline"),
                ("-", "Deadline"),
                ("-", "Cancelled"),
                ("Delivered", "Delivered"),
            ],
        ),
        (
            "stale",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("Stale", "Stale")],
        ),
        ("shut down", [("Shutdown", "Shutdown"); 5]),
    ];
    for (event, columns) in table {
        for (state, (at_once, at_last)) in STATES.into_iter().zip(columns) {
            let mut w = reach(state);
            assert_eq!(w.ended(), "-", "{state}");
            happen(&mut w, event);
            assert_eq!(w.ended(), at_once, "{state}, {event}: at once");
            w.settle();
            assert_eq!(w.ended(), at_last, "{state}, {event}: at last");
            assert!(w.p.closed.len() <= 1, "a lease ends once");
            let reads = ["Reading", "Stopping"].contains(&state);
            let expected: &[u32] = match event {
                "rank lost" if reads => &[1],
                "shut down" if reads => &[0, 1],
                // The ranks had not stopped when the grace was over, too.
                "deadline" if state == "Stopping" => &[0, 1],
                _ => &[],
            };
            let expected: Vec<RankId> = expected.iter().map(|&rank| RankId::new(rank)).collect();
            let in_doubt = w.d.ended[0].1.as_ref().err().map(|f| f.report.in_doubt.clone()).unwrap_or_default();
            assert_eq!(in_doubt, expected, "{state}, {event}: in doubt");
            let (pulls, leases) = (&w.d.session.pulls, &w.p.session.leases);
            let lied = (state, event) == ("Asking", "refused");
            assert!(pulls.is_empty() && (leases.is_idle() || lied), "{state}, {event}: nothing is left over");
            // A producer that has bound and then says that it has not gets its blocks back when the link ends.
            if state != "Linking" && !lied {
                assert_eq!(w.p.closed.len(), 1, "{state}, {event}: nothing is read any more, so the lease is over");
            }
        }
    }
}

#[test]
fn the_way_through_ends_as_delivered_and_frees_the_lease() {
    let mut w = reach("Reading");
    for (link, order) in w.d.pulls() {
        assert_eq!(order.pull, w.pull);
        assert_eq!(order.request.src, src_groups(), "the producer's blocks, as it offered them");
        let told = |(l, m): &(RankLinkId, ToRank)| *l == link && matches!(m, ToRank::Peer(_));
        assert_eq!(w.d.orders.iter().filter(|o| told(o)).count(), 1, "a rank is told of an engine once");
    }
    w.say(0, report(&[0, 1]));
    w.carry(|_| false);
    assert_eq!((w.ended(), w.p.closed.len()), ("-".into(), 0), "one rank still reads");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Delivered");
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Read)]);
    // The lease is over for good.
    let again = w.d.session.pull(wish(&w.fence), w.now);
    w.carry(|_| false);
    let last = w.d.ended.last().unwrap();
    assert_eq!(last.0, again);
    let cause = &last.1.as_ref().unwrap_err().cause;
    assert_eq!(*cause, FailureCause::Refused(BindRefusal::UnknownLease));
}

/// FR-01: a request does not end while a sibling of the failed rank still reads, and all faults are told.
#[test]
fn fr_01_a_request_ends_when_the_last_rank_has_stopped() {
    let mut w = reach("Reading");
    w.say(0, Err(fault(Stage::Read, false)));
    w.carry(|_| false);
    assert_eq!((w.ended(), w.p.closed.len()), ("-".into(), 0));
    let cancelled = |(l, m): &(RankLinkId, ToRank)| *l == w.d.rank_links[1] && *m == ToRank::Cancel(w.pull);
    assert!(w.d.orders.iter().any(cancelled), "the sibling is told to stop");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Ranks");
    let failed = w.d.ended[0].1.as_ref().unwrap_err();
    assert_eq!(failed.report.faults, [(RankId::new(0), fault(Stage::Read, false))]);
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
}

/// A rank that says that it read other sources than the map names delivers nothing.
#[test]
fn other_sources_than_the_named_ones_are_no_delivery() {
    for sources in [&[2][..], &[2, 3, 0], &[0, 1], &[]] {
        let mut w = reach("Reading");
        w.say(0, report(&[0, 1]));
        w.say(1, report(sources));
        w.carry(|_| false);
        assert_eq!(w.ended(), "NotAssured", "{sources:?}");
        assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
    }
}

#[test]
fn ranks_that_do_not_stop_in_time_are_in_doubt() {
    let mut w = reach("Stopping");
    w.say(0, Err(fault(Stage::Cancelled, false)));
    w.now += 2 * SECOND;
    w.d.session.step(w.now);
    w.carry(|_| false);
    assert_eq!(w.ended(), "Cancelled");
    assert_eq!(w.d.ended[0].1.as_ref().unwrap_err().report.in_doubt, [RankId::new(1)]);
    // Its three blocks are nobody else's until the rank says that it has stopped, and knows it.
    let overlaps = |w: &mut World| {
        let fence = w.p.session.offer(LeaseId::new(u128::from(w.d.ended.len() as u64)), offer()).unwrap();
        let pull = w.d.session.pull(wish(&fence), w.now);
        w.d.take();
        let ended = w.d.ended.iter().find(|(id, _)| *id == pull);
        ended.is_some_and(|(_, r)| matches!(&r.as_ref().unwrap_err().cause, FailureCause::Overlap(_)))
    };
    assert_eq!(w.d.session.quarantined(), 3);
    assert!(overlaps(&mut w));
    w.say(0, Err(fault(Stage::Cancelled, false)));
    w.say(1, Err(fault(Stage::Read, true)));
    assert_eq!(w.d.session.quarantined(), 3, "rank 0 was not waited for, and rank 1 doesn't know");
    w.say(1, Err(fault(Stage::Cancelled, false)));
    assert_eq!(w.d.session.quarantined(), 0);
    assert!(!overlaps(&mut w));
}

fn offer() -> Offer {
    Offer { groups: src_groups(), content_key: key(1) }
}

/// Ranks that have stopped are told as they ended, ranks that have not, or are gone, are in doubt.
#[test]
fn shut_down_tells_of_every_rank() {
    let in_doubt = |w: &World| {
        let failed = w.d.ended[0].1.as_ref().unwrap_err();
        assert_eq!(failed.cause, FailureCause::Shutdown);
        (failed.report.in_doubt.clone(), failed.report.pairs.len())
    };
    let ranks = |list: &[u32]| list.iter().map(|&r| RankId::new(r)).collect::<Vec<_>>();
    let mut w = reach("Reading");
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[0, 1]), 0));
    let mut w = reach("Reading");
    w.say(0, report(&[0, 1]));
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[1]), 2), "what was read is told");
    // A rank that died while it read is not forgotten.
    let mut w = reach("Reading");
    w.d.session.rank_closed(w.d.rank_links[0], "killed", w.now);
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[0, 1]), 0));
    let mut w = reach("Stopping");
    w.say(0, Err(fault(Stage::Read, true)));
    w.say(1, Err(fault(Stage::Cancelled, false)));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Cancelled");
    assert_eq!(w.d.ended[0].1.as_ref().unwrap_err().report.in_doubt, ranks(&[0]));
    let mut w = reach("Releasing");
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (Vec::new(), 4));
}

/// A rank that dies after it has read its share fails the request, since nobody can use its bytes.
#[test]
fn a_rank_that_dies_after_its_share_fails_the_request() {
    let mut w = reach("Reading");
    w.say(0, report(&[0, 1]));
    w.d.session.rank_closed(w.d.rank_links[0], "killed", w.now);
    w.carry(|_| false);
    assert_eq!(w.ended(), "-", "the other still reads");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "RankLost");
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
    let failed = w.d.ended[0].1.as_ref().unwrap_err();
    assert!(failed.report.in_doubt.is_empty(), "both had stopped");
}

/// A question that lists other groups than its engine has, or too many blocks, is answered and goes to no rank.
#[test]
fn digest_questions_that_do_not_fit_are_refused() {
    let mut w = reach("Reading");
    let (_, theirs) = w.link.unwrap();
    let many = kvferry_geometry::request::BlockTable::new(
        0,
        &vec![kvferry_geometry::units::BlockId::ZERO; usize::try_from(MAX_REQUEST_BLOCKS).unwrap() + 1],
    );
    for groups in
        [Vec::new(), [dst_groups(), dst_groups()].concat(), vec![DstPaged { table: many, cached: Tokens::ZERO }.into()]]
    {
        let question = question(&w, groups);
        w.p.orders.clear();
        w.p.session.peer_message(theirs, PeerMessage::RunDigest(question), w.now);
        w.p.take();
        assert!(w.p.orders.is_empty());
        let Some((_, PeerMessage::RunDigestAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert!(answer.pieces.is_err());
    }
}

fn question(w: &World, groups: Vec<DstGroup>) -> kvferry_proto::peer::RunDigest {
    let (src, dst, tokens) = (RankId::new(0), RankId::new(0), Tokens::new(TOKENS));
    let windows = vec![kvferry_proto::peer::Window { start: 0, len: 64, piece: 64 }];
    kvferry_proto::peer::RunDigest { fence: w.fence.clone(), src, dst, tokens, groups, windows }
}

/// An engine that no frame can describe is refused when it is complete, and its ranks live on.
#[test]
fn an_engine_too_long_for_a_frame_is_a_join_error() {
    let ranks = 16;
    let mut p = OwnerSession::new(config("p", 1, ranks)).unwrap();
    for (rank, manifest) in (0u32..).map(RankId::new).zip(shape(ranks).2) {
        let link = p.accept_rank(Duration::ZERO);
        let engine = EngineId::new("p").unwrap();
        let blob = vec![7; kvferry_proto::manifest::MAX_BLOB].into();
        let join = RankJoin { engine, rank, epoch: Epoch::new(0), manifest, blob };
        p.rank_message(link, FromRank::Join(join), Duration::ZERO);
    }
    let mut refused = 0;
    while let Some(effect) = p.next_effect() {
        match effect {
            Effect::JoinRefused(JoinError::TooLong(_)) => refused += 1,
            Effect::SendRank { message: ToRank::Refused(_), .. } | Effect::CloseRank { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((refused, p.missing()), (1, vec![RankId::new(ranks - 1)]));
}

/// Digests are asked for once at a time, for pairs of the map only, and not after the lease is closed. Answers go to a
/// rank only if it has asked.
#[test]
fn digest_questions_are_one_for_each_pair_and_end_with_the_lease() {
    let mut w = reach("Reading");
    let (ours, theirs) = w.link.unwrap();
    let ask = |w: &mut World, src: u32, dst: u32| {
        let mut q = question(w, dst_groups());
        (q.src, q.dst) = (RankId::new(src), RankId::new(dst));
        w.p.orders.clear();
        w.p.session.peer_message(theirs, PeerMessage::RunDigest(q), w.now);
        w.p.take();
        w.p.orders.iter().filter(|(_, m)| matches!(m, ToRank::Digest(_))).count()
    };
    assert_eq!(ask(&mut w, 0, 0), 1);
    assert!(w.p.to_peer.is_empty());
    assert_eq!(ask(&mut w, 0, 0), 0, "the same again");
    assert_eq!(ask(&mut w, 0, 1), 0, "rank 1 reads nothing from rank 0");
    assert_eq!(ask(&mut w, 0, 77), 0, "no such rank");
    assert_eq!(w.p.to_peer.len(), 3, "each is told why");
    w.p.to_peer.clear();
    w.p.orders.clear();
    assert!(w.p.session.withdraw(w.fence.lease));
    w.p.take();
    assert_eq!(w.p.orders, [(w.p.rank_links[0], ToRank::CancelDigest(1))]);
    assert!(w.p.session.leases.is_idle());
    let Some((_, PeerMessage::RunDigestAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
    assert!(answer.pieces.is_err());
    // Nobody at the consumer has asked.
    w.d.orders.clear();
    w.d.session.peer_message(ours, PeerMessage::RunDigestAnswer(answer.clone()), w.now);
    w.d.take();
    assert!(w.d.orders.is_empty(), "{:?}", w.d.orders);
    let wanted = FromRank::DigestWanted { pull: w.pull, src: RankId::new(0), windows: Vec::new() };
    w.d.session.rank_message(w.d.rank_links[0], wanted, w.now);
    for expected in [1, 0] {
        w.d.take();
        w.d.orders.clear();
        w.d.session.peer_message(ours, PeerMessage::RunDigestAnswer(answer.clone()), w.now);
        w.d.take();
        assert_eq!(w.d.orders.len(), expected, "one answer for one question");
    }
}

/// A bind with another salt than the lease's is refused, and makes no map for it.
#[test]
fn invented_salts_are_refused() {
    let mut w = reach("Asking");
    let (_, theirs) = w.link.unwrap();
    let again = Offer { groups: src_groups(), content_key: key(1) };
    let fence = w.p.session.offer(LeaseId::new(5), again).unwrap();
    let due = kvferry_proto::names::pairing_salt(&EngineId::new("d").unwrap(), fence.lease);
    let peer_map =
        w.p.session.serving(theirs).unwrap().1.unwrap().map(PeerOptions { salt: due, stripe: false }).unwrap().digest();
    for (salt, bound) in [(due + 1, false), (u64::MAX, false), (due, true)] {
        let bind = kvferry_proto::peer::Bind { fence: fence.clone(), content_key: key(1), salt, peer_map };
        w.p.take();
        w.p.to_peer.clear();
        w.p.session.peer_message(theirs, PeerMessage::Bind(bind), w.now);
        w.p.take();
        let Some((_, PeerMessage::BindAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert_eq!(matches!(answer, BindAnswer::Bound(_)), bound, "{answer:?}");
    }
}

/// Every lease ends once, also with the owner.
#[test]
fn shut_down_ends_every_lease() {
    let mut w = reach("Reading");
    let fence = w.p.session.offer(LeaseId::new(5), Offer { groups: src_groups(), content_key: key(1) }).unwrap();
    w.p.session.shut_down(w.now);
    w.p.take();
    assert_eq!(w.p.closed, [(fence, Closing::Withdrawn), (w.fence.clone(), Closing::Withdrawn)]);
}

/// A timeout beyond all reason is as good as none.
#[test]
fn endless_timeouts_are_no_overflow() {
    let mut config = config("p", 1, 4);
    (config.handshake, config.grace) = (Duration::MAX, Duration::MAX);
    let mut p = OwnerSession::new(config).unwrap();
    p.accept(SECOND);
    p.accept_rank(SECOND);
    assert_eq!(p.step(SECOND), Some(Duration::MAX));
    let mut w = reach("Reading");
    w.d.session.config.grace = Duration::MAX;
    w.d.session.cancel(w.pull, SECOND);
    w.carry(|_| false);
    assert_eq!(w.ended(), "-");
}

/// HS-10: a hello that comes before our own ranks have joined waits for them.
#[test]
fn hs_10_a_hello_before_the_ranks_waits() {
    let mut d = Side::new("d", 2, 2);
    let mut p = OwnerSession::new(config("p", 1, 4)).unwrap();
    let link = p.accept(Duration::ZERO);
    let fence = kvferry_proto::lease::first_attempt(EngineId::new("p").unwrap(), Epoch::new(1), LeaseId::new(1));
    d.session.pull(wish(&fence), Duration::ZERO);
    d.take();
    let ours = d.connects.remove(0);
    assert!(d.session.link_opened(ours, Duration::ZERO));
    d.take();
    let (_, hello) = d.to_peer.pop_front().unwrap();
    p.peer_message(link, hello, Duration::ZERO);
    assert!(p.next_effect().is_none(), "no answer yet, and no refusal");
    let (_, _, manifests) = shape(4);
    for (rank, manifest) in (0u32..).map(RankId::new).zip(manifests) {
        let rank_link = p.accept_rank(Duration::ZERO);
        let engine = EngineId::new("p").unwrap();
        let join = RankJoin { engine, rank, epoch: Epoch::new(0), manifest, blob: Arc::from([1]) };
        p.rank_message(rank_link, FromRank::Join(join), Duration::ZERO);
    }
    let mut answered = false;
    while let Some(effect) = p.next_effect() {
        if let Effect::SendPeer { message, .. } = effect {
            assert!(matches!(message, PeerMessage::Hello(_)));
            answered = true;
        }
    }
    assert!(answered);
    // And it was heard: a bind is answered now, if only by a refusal.
    let bind = kvferry_proto::peer::Bind { fence, content_key: key(1), salt: 0, peer_map: Digest::from_bytes([0; 32]) };
    p.peer_message(link, PeerMessage::Bind(bind), Duration::ZERO);
    assert!(matches!(p.next_effect(), Some(Effect::SendPeer { message: PeerMessage::BindAnswer(_), .. })));
}

/// RS-01: the producer was restarted at its old address. What its former life offered is stale, and it can be read anew.
#[test]
fn rs_01_a_restarted_producer_is_a_new_one() {
    let mut w = reach("Reading");
    let before = w.fence.clone();
    happen(&mut w, "link lost");
    w.settle();
    assert_eq!(w.ended(), "Link");
    w.p = Side::new("p", 100, 4);
    let stale = w.d.session.pull(wish(&before), w.now);
    w.d.take();
    w.connect();
    w.carry(|_| false);
    let cause = |w: &World, pull| {
        let ended = w.d.ended.iter().find(|e| e.0 == pull).unwrap();
        name(&ended.1.as_ref().unwrap_err().cause)
    };
    assert_eq!(cause(&w, stale), "StaleEpoch");
    let offer = Offer { groups: src_groups(), content_key: key(1) };
    let fence = w.p.session.offer(LeaseId::new(5), offer).unwrap();
    w.d.orders.clear();
    w.pull = w.d.session.pull(wish(&fence), w.now);
    w.carry(|_| false);
    w.all_read();
    w.carry(|_| false);
    assert!(w.d.ended.iter().any(|(pull, result)| *pull == w.pull && result.is_ok()));
}

/// SEC-03: messages about leases that the sender has not bound do nothing.
#[test]
fn sec_03_another_peers_lease_cannot_be_released_or_digested() {
    let mut w = reach("Reading");
    // A third engine, greeted in order.
    let mut e = Side::new("e", 3, 2);
    let theirs = w.p.session.accept(w.now);
    let mut other = wish(&w.fence);
    other.content_key = key(2);
    e.session.pull(other, w.now);
    e.take();
    let ours = e.connects.remove(0);
    assert!(e.session.link_opened(ours, w.now));
    for _ in 0..4 {
        e.take();
        for (_, m) in std::mem::take(&mut e.to_peer) {
            w.p.session.peer_message(theirs, m, w.now);
        }
        w.p.take();
        for (link, m) in std::mem::take(&mut w.p.to_peer) {
            assert_eq!(link, theirs, "nothing is said to the one who reads");
            e.session.peer_message(ours, m, w.now);
        }
    }
    e.take();
    let cause = &e.ended[0].1.as_ref().unwrap_err().cause;
    assert_eq!(*cause, FailureCause::Refused(BindRefusal::AlreadyBound));
    let release =
        kvferry_proto::peer::Release { fence: w.fence.clone(), reads: kvferry_proto::peer::ReadsEnd::Complete };
    w.p.session.peer_message(theirs, PeerMessage::Release(release), w.now);
    w.p.take();
    let (_, answer) = w.p.to_peer.pop_front().unwrap();
    assert!(matches!(answer, PeerMessage::ReleaseAnswer(ReleaseAnswer { verdict: Verdict::Stale, .. })));
    let digest = kvferry_proto::peer::RunDigest {
        fence: w.fence.clone(),
        src: RankId::new(0),
        dst: RankId::new(0),
        tokens: Tokens::new(TOKENS),
        groups: dst_groups(),
        windows: Vec::new(),
    };
    w.p.orders.clear();
    w.p.session.peer_message(theirs, PeerMessage::RunDigest(digest), w.now);
    w.p.take();
    assert!(w.p.orders.is_empty(), "no rank digests for it");
    w.p.to_peer.clear();
    // The one who has bound it is none the worse.
    w.all_read();
    w.carry(|_| false);
    assert_eq!(w.ended(), "Delivered");
}

/// HS-08: every request that waits for a link fails once when there is none, and the next one tries again.
#[test]
fn hs_08_all_who_wait_for_a_link_fail_once() {
    let mut d = Side::new("d", 2, 2);
    let fence =
        |lease| kvferry_proto::lease::first_attempt(EngineId::new("p").unwrap(), Epoch::new(1), LeaseId::new(lease));
    let blocks = |lease: u32| PullWish { groups: other_dst_groups(lease), ..wish(&fence(lease.into())) };
    let pulls: Vec<PullId> = (0..3).map(|lease| d.session.pull(blocks(lease), Duration::ZERO)).collect();
    d.take();
    assert_eq!(d.connects.len(), 1, "one link for all");
    d.session.link_closed(d.connects[0], "connection refused", SECOND);
    d.take();
    let failed: Vec<_> = d.ended.iter().map(|(pull, r)| (*pull, name(&r.as_ref().unwrap_err().cause))).collect();
    assert_eq!(failed, pulls.iter().map(|pull| (*pull, "Link".to_owned())).collect::<Vec<_>>());
    d.session.link_closed(d.connects[0], "again", SECOND);
    assert!(!d.session.link_opened(d.connects[0], SECOND), "what comes too late is not wanted");
    d.session.pull(wish(&fence(9)), SECOND);
    d.take();
    assert_eq!((d.ended.len(), d.connects.len()), (3, 2), "the next one begins anew");
}

/// Whoever connects and says nothing is sent away, and harms nobody.
#[test]
fn silent_links_are_closed_in_time() {
    let mut p = Side::new("p", 1, 4);
    let (link, rank_link) = (p.session.accept(SECOND), p.session.accept_rank(SECOND));
    assert_eq!(p.session.step(SECOND), Some(2 * SECOND));
    while p.session.next_effect().is_some() {}
    assert_eq!(p.session.step(2 * SECOND), None);
    let (mut peer_closed, mut rank_closed) = (false, false);
    while let Some(effect) = p.session.next_effect() {
        peer_closed |= matches!(effect, Effect::ClosePeer { link: l } if l == link);
        rank_closed |= matches!(effect, Effect::CloseRank { link: l } if l == rank_link);
    }
    assert!(peer_closed && rank_closed);
}

/// A small generator, so that a seed is all that a failure needs.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Random stories of many requests: messages delayed, ranks that fail, links cut, leases taken back, engines that give up.
/// However it goes, every request ends once, delivered means held, and nothing is left over.
#[test]
fn whatever_happens_every_request_ends_once_and_delivered_means_held() {
    let (mut delivered, mut failed, mut quarantined) = (0, 0, 0);
    for seed in 1..=1500u64 {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut w = World::new();
        let mut pulls = vec![(w.pull, w.fence.clone())];
        // The dialogue in flight, in order in each direction.
        let (mut to_p, mut to_d) = (VecDeque::new(), VecDeque::new());
        // Who read when its rank, or the owner, went away, by rank.
        let mut doubtful: Vec<(PullId, RankId)> = Vec::new();
        let mut lost = false;
        for _ in 0..120 {
            w.p.take();
            w.d.take();
            to_p.extend(w.d.to_peer.drain(..).map(|(_, m)| m));
            to_d.extend(w.p.to_peer.drain(..).map(|(_, m)| m));
            let (pull, fence) = pulls[usize::try_from(dice.below(pulls.len() as u64)).unwrap()].clone();
            match dice.below(100) {
                0..=29 => {
                    if let (Some((_, theirs)), Some(m)) = (w.link, to_p.pop_front()) {
                        w.p.session.peer_message(theirs, m, w.now);
                    }
                }
                30..=59 => {
                    if let (Some((ours, _)), Some(m)) = (w.link, to_d.pop_front()) {
                        w.d.session.peer_message(ours, m, w.now);
                    }
                }
                60..=79 => {
                    let rank = usize::try_from(dice.below(2)).unwrap();
                    let sources: [u32; 2] = if rank == 0 { [0, 1] } else { [2, 3] };
                    let result = match dice.below(12) {
                        0 => {
                            let in_doubt = dice.below(2) == 0;
                            let waits = w.d.session.pulls.pending(RankId::new(u32::try_from(rank).unwrap()));
                            if in_doubt && !(lost && rank == 1) && waits.contains(&pull) {
                                doubtful.push((pull, RankId::new(u32::try_from(rank).unwrap())));
                            }
                            Err(fault(Stage::Read, in_doubt))
                        }
                        1 => report(&sources[..1]),
                        _ => report(&sources),
                    };
                    w.d.session.rank_message(w.d.rank_links[rank], FromRank::Pulled { pull, result }, w.now);
                }
                80..=87 => {
                    let lease = LeaseId::new(u128::from(1000 + dice.below(u64::MAX / 2)));
                    let offer = Offer { groups: src_groups(), content_key: key(1) };
                    let fence = w.p.session.offer(lease, offer).unwrap();
                    let groups = other_dst_groups(u32::try_from(pulls.len()).unwrap());
                    pulls.push((w.d.session.pull(PullWish { groups, ..wish(&fence) }, w.now), fence));
                }
                88..=93 if w.link.is_none() => {
                    if !w.d.connects.is_empty() {
                        let theirs = w.p.session.accept(w.now);
                        let ours = w.d.connects.remove(0);
                        if w.d.session.link_opened(ours, w.now) {
                            w.link = Some((ours, theirs));
                        }
                    }
                }
                88..=93 => w.now += SECOND / 10,
                94 => w.d.session.cancel(pull, w.now),
                95 => drop(w.p.session.withdraw(fence.lease)),
                96 => {
                    if let Some((ours, theirs)) = w.link.take() {
                        w.d.session.link_closed(ours, "cut", w.now);
                        w.p.session.link_closed(theirs, "cut", w.now);
                        (to_p, to_d) = (VecDeque::new(), VecDeque::new());
                    }
                }
                97 => {
                    let wanted = FromRank::DigestWanted { pull, src: RankId::new(0), windows: Vec::new() };
                    w.d.session.rank_message(w.d.rank_links[0], wanted, w.now);
                }
                98 if seed % 4 == 0 && dice.below(4) == 0 => {
                    let rank = RankId::new(1);
                    if !lost {
                        doubtful.extend(w.d.session.pulls.pending(rank).into_iter().map(|pull| (pull, rank)));
                    }
                    lost = true;
                    w.d.session.rank_closed(w.d.rank_links[1], "killed", w.now);
                }
                _ => w.now += SECOND,
            }
            w.d.session.step(w.now);
            w.p.session.step(w.now);
        }
        w.link = None;
        if seed % 3 == 0 {
            for rank in [0, 1].map(RankId::new) {
                doubtful.extend(w.d.session.pulls.pending(rank).into_iter().map(|pull| (pull, rank)));
            }
            w.d.session.shut_down(w.now);
            assert!(w.d.session.pulls.is_empty(), "seed {seed}: a shutdown ends them all");
        }
        for _ in 0..3 {
            w.now += 20 * SECOND;
            w.d.session.step(w.now);
        }
        w.d.take();
        w.p.take();
        let mut ended: Vec<PullId> = w.d.ended.iter().map(|(pull, _)| *pull).collect();
        ended.sort_unstable();
        let mut expected: Vec<PullId> = pulls.iter().map(|(pull, _)| *pull).collect();
        expected.sort_unstable();
        assert_eq!(ended, expected, "seed {seed}: every request ends once");
        let mut closed: Vec<&Fence> = w.p.closed.iter().map(|(fence, _)| fence).collect();
        closed.sort_unstable();
        closed.dedup();
        assert_eq!(closed.len(), w.p.closed.len(), "seed {seed}: a lease ends once");
        for (pull, result) in &w.d.ended {
            let (_, fence) = pulls.iter().find(|(p, _)| p == pull).unwrap();
            match result {
                Ok(_) => {
                    delivered += 1;
                    let read = (fence.clone(), Closing::Read);
                    assert!(w.p.closed.contains(&read), "seed {seed}: delivered, but not held to the end");
                }
                Err(told) => {
                    failed += 1;
                    let expected = doubtful.iter().filter(|(p, _)| p == pull);
                    for (_, rank) in expected {
                        assert!(told.report.in_doubt.contains(rank), "seed {seed}: {pull} forgets rank {rank}");
                    }
                }
            }
        }
        assert!(w.d.session.pulls.is_empty(), "seed {seed}: nothing is left over");
        // Blocks are lent no longer, but for those that a rank has been silent about.
        let doubt = w.d.ended.iter().any(|(_, r)| r.as_ref().is_err_and(|f| !f.report.in_doubt.is_empty()));
        let loans = &w.d.session.loans;
        assert!(loans.is_empty() || (doubt && loans.quarantined() > 0), "seed {seed}: {loans:?}");
        quarantined += usize::from(loans.quarantined() > 0);
        for (_, fence) in &pulls {
            w.p.session.withdraw(fence.lease);
        }
        assert!(w.p.session.loans.is_empty(), "seed {seed}: {:?}", w.p.session.loans);
    }
    assert!(quarantined > 50, "{quarantined}");
    assert!(delivered > 500 && failed > 500, "both kinds of ends are common: {delivered} and {failed}");
}
