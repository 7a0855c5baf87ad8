//! One operation of the reference backend, from acceptance to its end.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::Bytes;

use super::faults::{MemFaults, draw};
use super::network::{Notice, Shared};
use crate::admit::Named;
use crate::copy::Copier;
use crate::error::{LostCause, TransferError};
use crate::rng::Rng;
use crate::types::{OpKind, Outcome, PeerId, Stats};

/// How long an operation waits for room in its peer's inbox before it tries again.
const INBOX_RETRY: Duration = Duration::from_millis(1);

/// An accepted operation.
#[derive(Debug)]
pub(super) struct Op {
    /// Counted over the endpoint's life; what faults go by.
    pub(super) index: u64,
    pub(super) peer: PeerId,
    pub(super) kind: OpKind,
    pub(super) named: Named,
    pub(super) batch: Arc<BoundedBatch>,
    pub(super) notify: Option<Vec<u8>>,
    pub(super) cancelled: bool,
    pub(super) stage: Stage,
    pub(super) moved: Stats,
    pub(super) copier: Option<Copier>,
}

/// Where an operation stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Not yet seen by a step.
    Accepted,
    /// Waits for its first byte.
    Waiting { due: Duration },
    /// Moves bytes.
    Moving,
    /// All bytes moved; the notification is not delivered.
    Notifying,
    /// All is done but telling it.
    Ending { due: Duration },
    /// All is done and will never be told.
    Untold,
}

/// What a step came to.
pub(super) enum Progress {
    /// Ended.
    Ended(Outcome),
    /// To be stepped again at that time.
    Again(Duration),
    /// Nothing more will happen by itself.
    Stuck,
}

/// The two endpoints and what disturbs them.
pub(super) struct World<'a> {
    pub(super) now: Duration,
    pub(super) ours: &'a Arc<Shared>,
    pub(super) theirs: &'a Arc<Shared>,
    /// The generation of the peer's registrations that the connection knows.
    pub(super) generation: u64,
    pub(super) faults: &'a MemFaults,
}

impl Op {
    /// The end of an operation that is stopped now for the given reason.
    pub(super) fn stop(&self, why: TransferError) -> Outcome {
        match self.stage {
            Stage::Ending { .. } => Outcome::Done(self.moved),
            Stage::Untold => Outcome::InDoubt(why),
            Stage::Accepted | Stage::Waiting { .. } | Stage::Moving | Stage::Notifying => Outcome::Failed(why),
        }
    }

    /// Goes as far as it can.
    pub(super) fn step(&mut self, world: &World<'_>, rng: &mut Rng) -> Progress {
        if self.cancelled {
            return Progress::Ended(self.stop(TransferError::Cancelled));
        }
        loop {
            match self.stage {
                Stage::Accepted => {
                    self.stage = Stage::Waiting { due: world.now + draw(rng, &world.faults.start_delay) };
                }
                Stage::Waiting { due } if due > world.now => return Progress::Again(due),
                Stage::Waiting { .. } => self.stage = Stage::Moving,
                Stage::Moving => match self.move_slice(world) {
                    Err(outcome) => return Progress::Ended(outcome),
                    Ok(false) => return Progress::Again(world.now),
                    Ok(true) => self.stage = Stage::Notifying,
                },
                Stage::Notifying => {
                    if !self.deliver(world, rng) {
                        return Progress::Again(world.now + INBOX_RETRY);
                    }
                    self.stage = if world.faults.lose_completion.contains(&self.index) {
                        Stage::Untold
                    } else {
                        Stage::Ending { due: world.now + draw(rng, &world.faults.completion_delay) }
                    };
                }
                Stage::Ending { due } if due > world.now => return Progress::Again(due),
                Stage::Ending { .. } => return Progress::Ended(Outcome::Done(self.moved)),
                Stage::Untold => return Progress::Stuck,
            }
        }
    }

    /// Moves one slice; true when all bytes are moved.
    fn move_slice(&mut self, world: &World<'_>) -> Result<bool, Outcome> {
        let total = self.batch.bytes().get();
        let done = self.moved.bytes.get();
        let broken = world.faults.fail.get(&self.index);
        let limit = broken.map_or(total, |b| b.at_byte.min(total));
        let end = world.faults.slice.map_or(limit, |slice| limit.min(done.saturating_add(slice.max(1))));
        self.copy(world, done..end).map_err(Outcome::Failed)?;
        match broken {
            Some(broken) if end == limit => {
                let why = TransferError::Lane { reason: format!("broken on demand at byte {end}") };
                Err(if broken.in_doubt { Outcome::InDoubt(why) } else { Outcome::Failed(why) })
            }
            _ => Ok(end == total),
        }
    }

    /// Copies a range of the batch's bytes, if both endpoints live and the peer allows it.
    fn copy(&mut self, world: &World<'_>, range: std::ops::Range<u64>) -> Result<(), TransferError> {
        // Always in the order of ids: two endpoints that reach for each other must not wait in a circle.
        let (ours, theirs) = if world.ours.id < world.theirs.id {
            let ours = world.ours.read();
            (ours, world.theirs.read())
        } else {
            let theirs = world.theirs.read();
            (world.ours.read(), theirs)
        };
        if !ours.alive {
            return Err(TransferError::Disconnected);
        }
        if !theirs.alive {
            return Err(TransferError::PeerLost(LostCause::Gone));
        }
        theirs.check(world.ours.id, world.generation, &self.named.peers)?;
        if self.copier.is_none() {
            let (src, dst) = match self.kind {
                OpKind::Read => (&theirs.table, &ours.table),
                OpKind::Write => (&ours.table, &theirs.table),
            };
            let made = Copier::new(self.batch.clone(), |id| src.get(id).cloned(), |id| dst.get(id).cloned());
            self.copier = Some(made.map_err(|e| TransferError::Lane { reason: e.to_string() })?);
        }
        if let Some(copier) = &self.copier {
            let stats = copier.copy(range);
            self.moved.bytes = Bytes::new(self.moved.bytes.get() + stats.bytes.get());
            self.moved.descriptors += stats.descriptors;
        }
        Ok(())
    }

    /// Delivers the notification, if there is one; false if there is no room for it.
    fn deliver(&mut self, world: &World<'_>, rng: &mut Rng) -> bool {
        let Some(payload) = self.notify.take() else { return true };
        if world.faults.drop_notify.contains(&self.index) {
            return true;
        }
        let delay = draw(rng, &world.faults.notify_delay);
        match world.theirs.deliver(Notice { from: world.ours.id, payload, delay }) {
            Ok(()) => true,
            Err(notice) => {
                self.notify = Some(notice.payload);
                false
            }
        }
    }
}
