//! The lanes to ranks of other engines: how each stands, and whether it may carry anything.
//!
//! Nothing is posted on a lane before it is up; then it is checked, if a [`Policy`] requires something. Where it asks for a least
//! rate, the lane is probed: a few reads of the peer's memory into scratch memory that no peer is told of, one lane after the
//! other. The reads share the rank's thread and cards with all that it does otherwise, so the rate that they find is one that the
//! lane has at least: the best of a few probes counts, and only after the last of them a lane is refused. It stays so for as long
//! as the connection stands, and each request that would need it fails at once with the reason: nothing goes another way in
//! silence.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::digest::Digest;
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::EngineId;
use kvferry_proto::rank::Stage;
use kvferry_transport::preflight::{Policy, Probe, ProbeError, ProbeOptions, Report};
use kvferry_transport::{
    ConnectError, EndpointId, Event, Lane, Measured, OpId, PeerId, PeerInfo, Region, TransferError,
};

use super::RankSession;
use super::orders::Order;
use crate::cache::CacheError;

/// Bytes of scratch memory: room for what a probe has in flight.
const SCRATCH: usize = 4 << 20;
/// How long a probe may take. On a fast lane it takes some ten milliseconds; the others wait for it.
const WITHIN: Duration = Duration::from_secs(2);
/// How often a lane is probed before it is refused by what that has found.
const TRIES: u32 = 3;
/// How long after a probe the same lane is probed again: what else kept the rank busy may be over by then.
const PAUSE: Duration = Duration::from_millis(50);
/// The most lanes that are shown though they are not there any more.
const MAX_PAST: usize = 64;
/// The most bytes of a lane's text in a report.
const MAX_TEXT: usize = 240;

/// How a lane stands.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LaneStanding {
    /// It is being made.
    Connecting,
    /// It is up and is being measured, or waits for that.
    Probing,
    /// It is up.
    Up,
    /// It is up and not what the policy requires, or could not be measured.
    Refused(String),
    /// It broke. A later request makes it anew.
    Lost(String),
    /// Its engine isn't needed any more, and it was given up.
    Left,
}

impl LaneStanding {
    fn is_past(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Left)
    }
}

/// One lane to a rank of another engine.
#[derive(Clone, PartialEq, Debug)]
pub struct LaneReport {
    /// The engine.
    pub engine: EngineId,
    /// Its rank.
    pub rank: RankId,
    /// The endpoint of that rank.
    pub endpoint: EndpointId,
    /// The name of our transport's backend; of several, the lane's own words name the one that was taken.
    pub backend: &'static str,
    /// What carries the bytes: before it is up, what is intended. With what was measured, if anything was.
    pub lane: Lane,
    /// How it stands.
    pub standing: LaneStanding,
}

/// Whether something may be posted on a lane.
pub(super) enum Gate {
    Open,
    /// Not yet.
    Wait,
    Refused(String),
}

#[derive(Default)]
pub(super) struct Lanes {
    policy: Policy,
    scratch: Option<(RegionId, Bytes)>,
    pub(super) known: BTreeMap<PeerId, Known>,
    probe: Option<Probing>,
    /// Reads of probes that have ended without them: until they end, another probe would share its scratch memory with them.
    left: BTreeSet<OpId>,
    /// Whether a lane was admitted that requests may wait for.
    pub(super) admitted: bool,
    revision: u64,
}

pub(super) struct Known {
    engine: EngineId,
    rank: RankId,
    /// What it was made by. The generation and lengths of the regions are from there, so it is of no use under another.
    blob: Arc<[u8]>,
    pub(super) info: PeerInfo,
    standing: LaneStanding,
    /// Probes that it has not passed.
    pub(super) tries: u32,
    /// When it may be probed.
    probe_at: Duration,
}

struct Probing {
    peer: PeerId,
    probe: Probe,
    begun: Duration,
}

impl Lanes {
    /// Notes a connection.
    pub(super) fn add(&mut self, peer: PeerId, (engine, rank): (&EngineId, RankId), blob: &Arc<[u8]>, info: PeerInfo) {
        self.known.retain(|_, k| !(k.standing.is_past() && k.rank == rank && k.engine == *engine));
        let (engine, blob) = (engine.clone(), blob.clone());
        let standing = LaneStanding::Connecting;
        let known = Known { engine, rank, blob, info, standing, tries: 0, probe_at: Duration::ZERO };
        self.known.entry(peer).or_insert(known);
        self.revision += 1;
    }

    /// A connection is given up.
    pub(super) fn leave(&mut self, peer: PeerId) {
        self.end_probe(peer);
        self.set(peer, LaneStanding::Left);
    }

    pub(super) fn gate(&self, peer: PeerId) -> Gate {
        match self.known.get(&peer).map(|k| &k.standing) {
            Some(LaneStanding::Refused(why)) => Gate::Refused(format!("the lane is refused: {why}")),
            // Also where nothing is required: what waits in the transport for a rank that is gone would keep others from posting.
            Some(LaneStanding::Connecting | LaneStanding::Probing) => Gate::Wait,
            // Of one that is lost or forgotten the transport says what there is to say.
            Some(LaneStanding::Up | LaneStanding::Lost(_) | LaneStanding::Left) | None => Gate::Open,
        }
    }

    /// Why a lane was lost, if it was.
    pub(super) fn lost(&self, peer: PeerId) -> Option<String> {
        match &self.known.get(&peer)?.standing {
            LaneStanding::Lost(why) => Some(why.clone()),
            _ => None,
        }
    }

    /// What was measured on a lane.
    pub(super) fn measured(&self, peer: PeerId, lane: &mut Lane) {
        lane.measured = lane.measured.or_else(|| self.known.get(&peer)?.info.lane.measured);
    }

    fn set(&mut self, peer: PeerId, standing: LaneStanding) {
        if let Some(known) = self.known.get_mut(&peer) {
            known.standing = standing;
            self.revision += 1;
        }
        // Connections are counted up, so the first is the oldest.
        while self.known.values().filter(|k| k.standing.is_past()).count() > MAX_PAST {
            let oldest = self.known.iter().find(|(_, k)| k.standing.is_past()).map(|(peer, _)| *peer);
            oldest.and_then(|peer| self.known.remove(&peer));
        }
    }

    /// When probing must be looked at though nothing happens.
    pub(super) fn deadline(&self) -> Option<Duration> {
        match &self.probe {
            Some(probing) => Some(probing.begun.saturating_add(WITHIN + Duration::from_millis(1))),
            // The ends of those that are left are told.
            None if !self.left.is_empty() => None,
            None => self.waiting().map(|(_, k)| k.probe_at).min(),
        }
    }

    fn waiting(&self) -> impl Iterator<Item = (PeerId, &Known)> {
        let waits = |k: &Known| k.standing == LaneStanding::Probing;
        self.known.iter().filter(move |(_, k)| waits(k)).map(|(&peer, k)| (peer, k))
    }

    /// The lane to probe now: one that was probed least, so that one that is stuck holds the others up once.
    fn next_to_probe(&self, now: Duration) -> Option<(PeerId, &Known)> {
        self.waiting().filter(|(_, k)| k.probe_at <= now).min_by_key(|(_, k)| k.tries)
    }

    /// Whether a probe's reads are in flight.
    pub(super) fn is_reading(&self) -> bool {
        !self.left.is_empty() || self.probe.as_ref().is_some_and(|p| p.probe.open().next().is_some())
    }

    fn end_probe(&mut self, peer: PeerId) {
        if let Some(ended) = self.probe.take_if(|p| p.peer == peer) {
            self.left.extend(ended.probe.open());
        }
    }
}

impl RankSession {
    /// The same, with lanes that must be what a policy says. Where that asks for a least rate, scratch memory is made and
    /// registered for the probes; peers are not told of it, as the rank has said already what it has. The best of a few probes
    /// decides whether a lane is taken or refused, for as long as its connection stands: they are read beside all that the rank
    /// does otherwise, so a rate near what the lane can do at all will be missed.
    ///
    /// # Errors
    /// If the scratch memory can't be had or registered.
    pub fn with_lanes(mut self, policy: Policy) -> Result<Self, CacheError> {
        if policy.min_bytes_per_second().is_some() {
            let expected = self.cache.lens().len();
            let region = RegionId::new(u32::try_from(expected).unwrap_or(u32::MAX));
            let memory = Region::zeroed(SCRATCH).ok_or(CacheError::Scratch { bytes: Bytes::new(SCRATCH as u64) })?;
            let len = memory.len();
            let registered = self.end.transport.register(memory);
            let got = registered.map_err(|error| CacheError::Register { region, error })?;
            self.lanes.scratch = Some((got, len));
        }
        self.lanes.policy = policy;
        Ok(self)
    }

    /// The lanes to ranks of other engines: those that there are, and some that there were, the last one to each rank.
    #[must_use]
    pub fn lanes(&self) -> Vec<LaneReport> {
        let backend = self.end.transport.capabilities().backend;
        let report = |k: &Known| LaneReport {
            engine: k.engine.clone(),
            rank: k.rank,
            endpoint: k.info.endpoint,
            backend,
            lane: k.info.lane.clone(),
            standing: k.standing.clone(),
        };
        self.lanes.known.values().map(report).collect()
    }

    /// Grows with every change of [`lanes`](Self::lanes).
    #[must_use]
    pub fn lanes_revision(&self) -> u64 {
        self.lanes.revision
    }

    /// The lane to another engine's rank, connected now if there is none; or in words, why there is none.
    ///
    /// One that exists may be taken for it only if it was made to the same rank of an engine of that name, by the same blob: an
    /// endpoint's id is what a peer says it is, and two ranks with equal layouts could be read or written in each other's place.
    pub(super) fn lane(&mut self, peer: Digest, rank: RankId, manifest: &EngineManifest) -> Result<PeerId, String> {
        let known = self.peers.get(&peer).ok_or("the engine was forgotten")?;
        if let Some(lane) = known.lanes.get(&rank) {
            return Ok(*lane);
        }
        let contact = manifest.contact(rank).ok_or_else(|| format!("the engine has no rank {rank}"))?;
        let engine = manifest.engine();
        let unable = |e: &dyn std::fmt::Display| e.to_string();
        let (lane, is_new) = match self.end.connect(&contact.blob) {
            Ok(lane) => (lane, true),
            Err(ConnectError::AlreadyConnected { endpoint, peer: lane }) => {
                match self.lanes.known.get(&lane).filter(|k| !k.standing.is_past()) {
                    Some(k) if k.engine == *engine && k.rank == rank && k.blob == contact.blob => (lane, false),
                    // Its engine has made its regions anew at the same endpoint.
                    Some(k) if k.engine == *engine && k.rank == rank => {
                        self.leave_lane(lane, "the rank is reached by another blob now".into());
                        (self.end.connect(&contact.blob).map_err(|e| unable(&e))?, true)
                    }
                    other => {
                        let whose = other.map_or("nobody that is known".into(), |k| {
                            format!("rank {} of engine {}", k.rank, k.engine)
                        });
                        return Err(format!(
                            "rank {rank} of engine {engine} names the endpoint {endpoint}, which is connected already as that of \
                             {whose}; give each rank of each engine an endpoint id of its own"
                        ));
                    }
                }
            }
            Err(error) => return Err(unable(&error)),
        };
        if is_new {
            let info = self.end.transport.peer(lane).map_err(|e| unable(&e))?;
            self.lanes.add(lane, (engine, rank), &contact.blob, info);
        }
        if let Some(known) = self.peers.get_mut(&peer) {
            known.lanes.insert(rank, lane);
        }
        Ok(lane)
    }

    pub(super) fn on_connected(&mut self, peer: PeerId) {
        let Ok(info) = self.end.transport.peer(peer) else { return };
        let checked = self.lanes.policy.check_kind(&info.lane);
        if let Some(known) = self.lanes.known.get_mut(&peer) {
            known.info = info;
        }
        match checked {
            Err(error) => self.refuse_lane(peer, error.to_string()),
            Ok(()) if self.lanes.scratch.is_some() => self.lanes.set(peer, LaneStanding::Probing),
            Ok(()) => self.admit_lane(peer),
        }
    }

    /// A lane is of no use any more. A later order makes it anew, by the blob that its engine has then.
    pub(super) fn leave_lane(&mut self, peer: PeerId, why: String) {
        for known in self.peers.values_mut() {
            known.lanes.retain(|_, lane| *lane != peer);
        }
        self.lanes.end_probe(peer);
        // Those in flight end by themselves; what wasn't posted never would.
        self.fail_unposted(peer, &why);
        self.lanes.set(peer, LaneStanding::Lost(why));
        self.end.disconnect(peer);
    }

    fn admit_lane(&mut self, peer: PeerId) {
        self.lanes.set(peer, LaneStanding::Up);
        self.lanes.admitted = true;
    }

    fn refuse_lane(&mut self, peer: PeerId, why: String) {
        let text = format!("the lane is refused: {why}");
        self.lanes.set(peer, LaneStanding::Refused(why));
        self.fail_unposted(peer, &text);
    }

    /// Fails the orders that would still use a lane.
    pub(super) fn fail_unposted(&mut self, peer: PeerId, why: &str) {
        let pulls = self.pulls.iter().filter_map(|(&id, p)| Some((Order::Pull(id), p.still_uses(peer)?)));
        let pushes = self.pushes.iter().filter_map(|(id, p)| Some((Order::Push(id), p.still_uses(peer)?)));
        let failed: Vec<(Order, RankId)> = pulls.chain(pushes).collect();
        for (order, rank) in failed {
            self.fail_order(order, order.other(rank).fault(Stage::Connect, why));
        }
    }

    /// Shows the probe an event; true if it was a probe's.
    pub(super) fn probe_event(&mut self, event: &Event) -> bool {
        let left = matches!(event, Event::Completed { op, .. } if self.lanes.left.remove(op));
        let probes = left || self.lanes.probe.as_mut().is_some_and(|p| p.probe.on_event(event, self.now));
        self.end.full &= !probes;
        probes
    }

    /// Goes on with probing: posts its reads, judges what it has found, begins the next.
    pub(super) fn probe(&mut self) {
        let Some(scratch) = self.lanes.scratch else { return };
        loop {
            if self.lanes.probe.is_none() && self.lanes.left.is_empty() {
                let Some((peer, known)) = self.lanes.next_to_probe(self.now) else { return };
                let mut options = ProbeOptions::quick();
                options.within = WITHIN;
                match Probe::new(options, peer, &known.info, scratch) {
                    Ok(probe) => self.lanes.probe = Some(Probing { peer, probe, begun: self.now }),
                    Err(error) => {
                        // The others that wait have nobody else who would begin with them.
                        self.refuse_lane(peer, format!("it can't be measured: {error}"));
                        continue;
                    }
                }
            }
            let Some(Probing { peer, probe, .. }) = &mut self.lanes.probe else { return };
            let peer = *peer;
            while let Some(submission) = probe.poll(self.now) {
                match self.end.submit(submission) {
                    Ok(op) => probe.submitted(op),
                    Err(error) => {
                        probe.refused(&error);
                        break;
                    }
                }
            }
            let Some(result) = probe.result().cloned() else { return };
            self.lanes.end_probe(peer);
            for op in self.lanes.left.clone() {
                self.end.cancel(op);
            }
            self.probed(peer, result);
        }
    }

    fn probed(&mut self, peer: PeerId, result: Result<Report, ProbeError>) {
        let why = match result {
            Ok(report) => {
                let Some(known) = self.lanes.known.get_mut(&peer) else { return };
                let rate = |m: &Option<Measured>| m.map_or(0.0, |m| m.bytes_per_second);
                if rate(&report.lane.measured) >= rate(&known.info.lane.measured) {
                    known.info.lane.measured = report.lane.measured;
                }
                match self.lanes.policy.check_rate(&known.info.lane) {
                    Ok(()) => return self.admit_lane(peer),
                    Err(error) => error.to_string(),
                }
            }
            // As where a request's read finds it.
            Err(ProbeError::Failed { reason: reason @ TransferError::Stale { .. }, .. }) => {
                return self.leave_lane(peer, reason.to_string());
            }
            Err(error) => format!("it can't be measured: {error}"),
        };
        let Some(known) = self.lanes.known.get_mut(&peer) else { return };
        known.tries += 1;
        known.probe_at = self.now.saturating_add(PAUSE);
        if known.tries == TRIES {
            self.refuse_lane(peer, why);
        }
    }
}

/// A lane in words: its kind, what the library calls what carries the bytes, and what the backend says of it.
pub(super) fn text(lane: &Lane) -> String {
    let mut text = lane.kind.to_string();
    if !lane.transports.is_empty() {
        text = format!("{text} ({})", lane.transports.join(", "));
    }
    if !lane.detail.is_empty() {
        text = format!("{text}: {}", lane.detail);
    }
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    text.truncate(end);
    text
}
