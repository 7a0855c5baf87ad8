//! Staging at the source. At the producer's rank: segments that are filled in the order of a peer's rank and lent until the
//! owner knows that nobody reads them. At the consumer's: asking for that, and reading what is there.
//!
//! Whoever asks reads directly where there is no room, at once: a segment is lent for as long as a peer's request lasts, and two
//! requests that each hold one and wait for another would never end.

use std::collections::BTreeMap;

use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_memory::Permute;
use kvferry_proto::peer::NotGathered;
use kvferry_proto::rank::{FromRank, GatherOrder, PullId, RankFault, Stage};
use kvferry_transport::PeerId;

use super::RankSession;
use super::pull::SourceState;
use super::stage::{Steps, Waiter};
use crate::staging::Segment;

/// What is gathered for peers' reads, by ticket.
pub(super) type Gathers = BTreeMap<u64, Gather>;

/// A segment with what a peer's rank reads.
#[derive(Debug)]
pub(super) struct Gather {
    segment: Segment,
    /// Whether the driver writes it.
    writing: bool,
    /// Whether nobody reads it (any more).
    ended: bool,
}

impl RankSession {
    /// Gathers what a peer's rank reads from this rank, if there is room for it now.
    pub(super) fn start_gather(&mut self, order: GatherOrder) {
        let ticket = order.ticket;
        if let Err(why) = self.try_gather(order) {
            self.out.push_back(FromRank::Gathered { ticket, result: Err(why) });
        }
    }

    fn try_gather(&mut self, order: GatherOrder) -> Result<(), NotGathered> {
        let ticket = order.ticket;
        if self.staging.gathers.contains_key(&ticket) {
            return Err("the gather was ordered twice".into());
        }
        // Room first, by the peer's word: who finds none has cost no plan.
        let stager = self.staging.stager.as_mut().ok_or("the rank does not stage")?;
        let segment = stager.lend(ticket, order.gathered.bytes)?;
        match self.plan_gather(order, &segment) {
            Ok(permute) => {
                self.staging.gathers.insert(ticket, Gather { segment, writing: true, ended: false });
                self.staging.start(Waiter::Gather(ticket), permute);
                Ok(())
            }
            Err(why) => {
                // Nothing has touched it.
                self.free_gather(segment);
                Err(why)
            }
        }
    }

    fn plan_gather(&mut self, order: GatherOrder, segment: &Segment) -> Result<Permute, NotGathered> {
        let direct = self.served(order.pairing, order.dst, order.request)?;
        let stager = self.staging.stager.as_ref().ok_or("the rank does not stage")?;
        stager.gather(direct.batch(), order.gathered, segment, &self.cache)
    }

    /// The driver has gathered.
    pub(super) fn gathered(&mut self, ticket: u64) {
        let Some(gather) = self.staging.gathers.get_mut(&ticket) else { return };
        gather.writing = false;
        if gather.ended {
            return self.end_gather(ticket);
        }
        let result = Ok(gather.segment.offset());
        self.out.push_back(FromRank::Gathered { ticket, result });
    }

    /// Nobody reads what was gathered any more. What is still being written is given back after that.
    pub(super) fn end_gather(&mut self, ticket: u64) {
        let Some(mut gather) = self.staging.gathers.remove(&ticket) else { return };
        if gather.writing {
            gather.ended = true;
            self.staging.gathers.insert(ticket, gather);
        } else {
            self.free_gather(gather.segment);
        }
    }

    pub(super) fn free_gather(&mut self, segment: Segment) {
        if let Some(stager) = &mut self.staging.stager {
            self.staging.granted.extend(stager.release_gather(segment));
        }
    }

    /// Asks for what this pull would like to have gathered.
    pub(super) fn ask_to_gather(&mut self, id: PullId) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let asking = pull.sources.iter().filter(|(_, s)| matches!(s.state, SourceState::Asking { .. }));
        let asking = asking.filter_map(|(&src, s)| Some((src, s.steps.as_ref()?.gathered?)));
        self.out.extend(asking.map(|(src, gathered)| FromRank::GatherWanted { pull: id, src, gathered }));
    }

    /// A rank is not asked to gather any more. Manifests that share its lane share what it computes.
    pub(super) fn stop_gathering(&mut self, src: RankId, lane: PeerId) {
        let sharing = self.peers.values_mut().filter(|k| k.lanes.get(&src) == Some(&lane));
        sharing.for_each(|k| k.gathers = false);
    }

    /// What a source's rank has gathered can be read, or there is nothing: then it is read directly.
    pub(super) fn on_gather_answer(&mut self, id: PullId, src: RankId, result: Result<Bytes, NotGathered>) {
        let asked = self.pulls.get(&id).and_then(|p| match p.sources.get(&src)?.state {
            SourceState::Asking { lane, .. } => Some(lane),
            _ => None,
        });
        if let (Some(lane), Err(NotGathered::Differs { .. })) = (asked, &result) {
            // It won't compute anything else the next time.
            self.stop_gathering(src, lane);
        }
        let (cache, transport) = (&self.cache, &self.end.transport);
        let wire = |steps: &Steps, lane: PeerId, staging: RegionId, at: Bytes| {
            let fault = |stage, text: String| {
                let text = format!("source rank {src}: {text}");
                RankFault { stage, text, in_doubt: false, bad: Vec::new() }
            };
            let info = transport.peer(lane).map_err(|e| fault(Stage::Connect, e.to_string()))?;
            let place = |e| fault(Stage::Plan, format!("it says that it has gathered from byte {} on: {e}", at.get()));
            steps.wire_from_gathered((staging, at), cache, &info.lens()).map_err(place)
        };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let next = pull.on_gathered(src, result, wire);
        self.go_on(id, next);
        self.enqueue(id);
    }
}
