//! Whether what producers say of their leases is true, as far as it can be seen from outside.
//!
//! A lie may do no harm in the world that it is told in, as others would have to believe it at the wrong moment.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_proto::names::LeaseId;
use kvferry_proto::peer::{Left, PeerMessage, Verdict};
use kvferry_session::owner::LinkId;

use super::World;
use crate::violation::Violation;

/// What was said that is needed to judge what is said later.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    /// Leases that were closed as read, of which that has not been said.
    read: BTreeSet<LeaseId>,
    /// Heartbeats by their sender, its life and their number: the leases that they are for.
    beats: BTreeMap<(u32, u32, u64), Vec<LeaseId>>,
}

impl World {
    /// A producer has closed a lease.
    pub(crate) fn witness_closed(&mut self, lease: LeaseId, read: bool) {
        if read {
            self.witness.read.insert(lease);
        }
    }

    /// An owner says something to another.
    pub(crate) fn witness_said(&mut self, engine: u32, link: LinkId, message: &PeerMessage) {
        match message {
            PeerMessage::Heartbeat(beat) => {
                let leases = beat.leases.iter().map(|(lease, _)| *lease).collect();
                self.witness.beats.insert((engine, self.life(engine), beat.beat), leases);
            }
            PeerMessage::HeartbeatAnswer(answer) => {
                let Some(other) = self.other_end(engine, link) else { return };
                let Some(leases) = self.witness.beats.remove(&(other.0, other.1, answer.beat)) else { return };
                let Some(e) = self.engines.get(engine as usize) else { return };
                let open = |lease: &LeaseId| e.leases.contains_key(lease);
                let said = leases.iter().zip(&answer.left);
                let wrong =
                    said.filter(|(lease, left)| **left != Left::Closed && !open(lease)).map(|(lease, _)| *lease);
                if let Some(lease) = wrong.min() {
                    let what = format!("lease {lease} has time left, and it is closed");
                    self.violates(Violation::Untrue { engine, what });
                }
            }
            PeerMessage::ReleaseAnswer(answer) if answer.verdict == Verdict::Held => {
                if !self.witness.read.remove(&answer.fence.lease) {
                    let what =
                        format!("{} was held, and it was not closed as read, or that was said before", answer.fence);
                    self.violates(Violation::Untrue { engine, what });
                }
            }
            _ => {}
        }
    }

    /// Who is at the other end of a link: engine and life.
    fn other_end(&self, engine: u32, link: LinkId) -> Option<(u32, u32)> {
        let e = self.engines.get(engine as usize)?;
        let conn = self.conns.get(e.links.get(&link)?)?;
        let ours = conn.ends.iter().position(|end| {
            let of_link = end.link == Some(link);
            end.engine == engine && of_link
        })?;
        let other = conn.ends.get(1 - ours)?;
        Some((other.engine, other.life))
    }
}
