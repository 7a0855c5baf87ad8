//! Two owners stepped by hand, with ranks that say what the test wants: every state of a request with every event.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::request::DstPaged;
use kvferry_geometry::units::{Bytes, Tokens};
use kvferry_proto::handshake::Versions;
use kvferry_proto::lease::Closing;
use kvferry_proto::manifest::RankJoin;
use kvferry_proto::peer::{BindAnswer, BindRefusal, ReleaseAnswer, Verdict};
use kvferry_proto::rank::{PullOrder, RankFault, RankReport, SourceReport, Stage};

use kvferry_proto::names::{ContentKey, ModelIdentity};
use kvferry_proto::rank::Assurance;

use super::*;
use crate::outcome::{Delivered, Failed, FailureCause, Phase};
use crate::testing::{TOKENS, dst_groups, other_dst_groups, shape, shape_by, src_groups};

mod greetings;
mod leases;
mod links;
mod pair;
mod policy;
mod pulls;
mod pushes;
mod random;
mod renewal;
mod retry;
mod service;
mod terms;

const SECOND: Duration = Duration::from_secs(1);

const DEADLINE: Duration = Duration::from_secs(10);

fn key(n: u8) -> ContentKey {
    ContentKey::from_bytes([n; 32])
}

/// Leases without an end, and no retry before the deadline of a request: what needs these says so.
fn config(id: &str, epoch: u128, ranks: u32) -> OwnerConfig {
    let (spec, groups, _) = shape(ranks);
    OwnerConfig {
        identity: ModelIdentity::new("m").unwrap(),
        handshake: SECOND,
        grace: 2 * SECOND,
        lease: LeaseTerms { ttl: None, ..LeaseTerms::default() },
        ..OwnerConfig::new(EngineId::new(id).unwrap(), Epoch::new(epoch), spec, groups, ranks)
    }
}

/// One owner and what it had done.
struct Side {
    session: OwnerSession,
    rank_links: Vec<RankLinkId>,
    orders: Vec<(RankLinkId, ToRank)>,
    to_peer: VecDeque<(LinkId, PeerMessage)>,
    connects: Vec<LinkId>,
    leads_to: BTreeMap<LinkId, String>,
    ended: Vec<(PullId, Result<Delivered, Failed>)>,
    closed: Vec<(Fence, Closing)>,
    lost: Vec<RankId>,
    /// Links that came up, and that did not: whether refused.
    up: Vec<LinkId>,
    failed: Vec<bool>,
    closes: Vec<LinkId>,
    rejected: usize,
    phases: Vec<(PullId, Phase)>,
    down: Vec<LinkId>,
    reasons: Vec<String>,
    /// The epochs in which it was complete.
    ready: Vec<Epoch>,
    versions: Vec<u16>,
    /// Links that it has closed, once the other end was told.
    closed_links: Vec<LinkId>,
    consumers: Vec<Option<EngineId>>,
    manifests: Arc<Vec<RankManifest>>,
    progress: Vec<(PullId, Tokens)>,
    reclaimed: Vec<(PullId, usize)>,
    contradictions: Vec<String>,
}

/// By how many ranks there are, and whether each holds all heads.
type Shapes = BTreeMap<(u32, bool), Arc<Vec<RankManifest>>>;

/// What shapes of engines look like, made once.
fn shared(ranks: u32, rule: HeadRule) -> Arc<Vec<RankManifest>> {
    static MADE: std::sync::Mutex<Shapes> = std::sync::Mutex::new(BTreeMap::new());
    let whole = matches!(rule, HeadRule::Whole);
    let mut made = MADE.lock().unwrap();
    made.entry((ranks, whole)).or_insert_with(|| Arc::new(shape_by(ranks, rule).2)).clone()
}

impl Side {
    fn new(id: &str, epoch: u128, ranks: u32) -> Self {
        Self::with(config(id, epoch, ranks))
    }

    fn with(config: OwnerConfig) -> Self {
        let manifests = shared(config.ranks, HeadRule::Split);
        Self::made_of(config, manifests)
    }

    /// Every rank holds all heads.
    fn replicas(id: &str, epoch: u128, ranks: u32) -> Self {
        let lease = LeaseTerms::default();
        Self::made_of(OwnerConfig { lease, ..config(id, epoch, ranks) }, shared(ranks, HeadRule::Whole))
    }

    fn made_of(config: OwnerConfig, manifests: Arc<Vec<RankManifest>>) -> Self {
        let (id, ranks) = (config.engine.clone(), config.ranks);
        let session = OwnerSession::new(config).unwrap();
        let mut side = Self {
            session,
            rank_links: Vec::new(),
            orders: Vec::new(),
            to_peer: VecDeque::new(),
            connects: Vec::new(),
            leads_to: BTreeMap::new(),
            ended: Vec::new(),
            closed: Vec::new(),
            lost: Vec::new(),
            up: Vec::new(),
            failed: Vec::new(),
            closes: Vec::new(),
            rejected: 0,
            phases: Vec::new(),
            down: Vec::new(),
            reasons: Vec::new(),
            ready: Vec::new(),
            versions: Vec::new(),
            closed_links: Vec::new(),
            consumers: Vec::new(),
            manifests,
            progress: Vec::new(),
            reclaimed: Vec::new(),
            contradictions: Vec::new(),
        };
        for rank in 0..ranks {
            let link = side.join(&id, rank, 0, Duration::ZERO);
            side.rank_links.push(link);
        }
        side.take();
        assert!(side.session.manifest().is_some());
        side.orders.clear();
        side
    }

    fn offer(&mut self, lease: u128, now: Duration) -> Fence {
        self.session.offer(LeaseId::new(lease), offer(), Ttl::Usual, now).unwrap()
    }

    /// A rank joins, in this life of it.
    fn join(&mut self, engine: &EngineId, rank: u32, life: u128, now: Duration) -> RankLinkId {
        let link = self.session.accept_rank(now);
        let manifest = self.manifests[usize::try_from(rank).unwrap()].clone();
        let epoch = Epoch::new(u128::from(rank) + 1000 * life);
        let join = RankJoin { engine: engine.clone(), rank: RankId::new(rank), epoch, manifest, blob: Arc::from([1]) };
        self.session.rank_message(link, FromRank::Join(join), now);
        link
    }

    fn lose(&mut self, rank: u32, now: Duration) {
        self.session.rank_closed(self.rank_links[usize::try_from(rank).unwrap()], "killed", now);
    }

    /// A rank that was lost joins again, in another life.
    fn rejoin(&mut self, rank: u32, now: Duration) {
        let engine = self.session.config.engine.clone();
        // Links are counted and never used again: so is a life.
        let life = self.rank_links.iter().map(|link| u128::from(link.0)).max().unwrap_or(0) + 1;
        self.rank_links[usize::try_from(rank).unwrap()] = self.join(&engine, rank, life, now);
    }

    fn take(&mut self) -> bool {
        let mut any = false;
        while let Some(effect) = self.session.next_effect() {
            any = true;
            match effect {
                Effect::Connect { link, address } => {
                    self.connects.push(link);
                    self.leads_to.insert(link, address);
                }
                Effect::SendPeer { link, message } => self.to_peer.push_back((link, message)),
                Effect::SendRank { link, message } => self.orders.push((link, message)),
                Effect::PullEnded { pull, result } => self.ended.push((pull, *result)),
                Effect::LeaseClosed { fence, how, consumer, .. } => {
                    self.closed.push((fence, how));
                    self.consumers.push(consumer);
                }
                Effect::LinkUp { link, version, .. } => {
                    self.up.push(link);
                    self.versions.push(version);
                }
                Effect::LinkFailed { refused, reasons, .. } => {
                    self.failed.push(refused);
                    self.reasons.extend(reasons);
                }
                Effect::FenceRejected { .. } => self.rejected += 1,
                Effect::Phase { pull, phase } => self.phases.push((pull, phase)),
                Effect::Progress { pull, tokens } => self.progress.push((pull, tokens)),
                Effect::Reclaimed { pull, blocks } => self.reclaimed.push((pull, blocks)),
                Effect::Contradiction { what, .. } => self.contradictions.push(what),
                Effect::ClosePeer { link } => self.closes.push(link),
                Effect::RankLost { rank, .. } => self.lost.push(rank),
                Effect::LinkDown { link, .. } => self.down.push(link),
                Effect::Ready(manifest) => self.ready.push(manifest.epoch()),
                Effect::CloseRank { .. } => {}
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
        Self::of(Side::new("p", 1, 4), Side::new("d", 2, 2))
    }

    fn of(mut p: Side, mut d: Side) -> Self {
        let fence = p.offer(77, Duration::ZERO);
        let pull = d.session.pull(wish(&fence), Duration::ZERO);
        d.take();
        Self { p, d, link: None, now: Duration::ZERO, fence, pull }
    }

    fn connect(&mut self) {
        let ours = self.d.connects.remove(0);
        let theirs = self.p.session.accept(None, self.now);
        self.link = Some((ours, theirs));
        assert!(self.d.session.link_opened(ours, None, self.now));
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
        mode: Mode::Pull,
        address: "tcp:127.0.0.1:1".into(),
        fence: fence.clone(),
        tokens: Tokens::new(TOKENS),
        groups: dst_groups(),
        content_key: key(1),
        assurance: Assurance::Fenced,
        deadline: DEADLINE,
        priority: USUAL_PRIORITY,
        policy: FailurePolicy::default(),
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
    Ok(RankReport {
        sources,
        zeroed: Bytes::ZERO,
        compared: Bytes::ZERO,
        queued: Duration::ZERO,
        slices: 1,
        took: Duration::ZERO,
    })
}

fn fault(stage: Stage, in_doubt: bool) -> RankFault {
    RankFault { stage, text: "as the test wants".into(), in_doubt, bad: Vec::new() }
}

fn tries(attempts: u32) -> FailurePolicy {
    FailurePolicy { attempts, ..FailurePolicy::default() }
}

fn offer() -> Offer {
    Offer { groups: src_groups(), content_key: key(1) }
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
