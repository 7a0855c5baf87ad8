//! Two endpoints and their memory, driven together.

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;

use super::Harness;
use super::sample::{Memory, Rng, Sample};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Event, OpId, OpKind, Outcome, PeerId, Submission};

/// How long the suite waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// The endpoint that submits, the one it works on, and everything they said.
pub struct Pair {
    /// Submits.
    pub near: Box<dyn Transport>,
    /// Is read from and written to.
    pub far: Box<dyn Transport>,
    /// Of `near`.
    pub near_events: Vec<Event>,
    /// Of `far`.
    pub far_events: Vec<Event>,
}

impl Pair {
    /// Two fresh endpoints.
    pub fn new(h: &mut dyn Harness) -> Self {
        Self { near: h.endpoint(), far: h.endpoint(), near_events: Vec::new(), far_events: Vec::new() }
    }

    /// Two fresh endpoints with registered memory for a sample that moves in the given direction, and a connection.
    pub fn ready(
        h: &mut dyn Harness,
        sample: &Sample,
        kind: OpKind,
        rng: &mut Rng,
    ) -> Result<(Self, Memory, PeerId), String> {
        let mut pair = Self::new(h);
        let memory = Memory::new(sample, rng, |len| h.region(len));
        pair.register(&memory, kind)?;
        let peer = pair.connect(h)?;
        Ok((pair, memory, peer))
    }

    /// Registers memory on the sides that a direction gives it.
    pub fn register(&mut self, memory: &Memory, kind: OpKind) -> Result<(), String> {
        let (near, far) = match kind {
            OpKind::Read => (&memory.dst, &memory.src),
            OpKind::Write => (&memory.src, &memory.dst),
        };
        register_all(&mut *self.near, near)?;
        register_all(&mut *self.far, far)
    }

    /// Connects near to far and waits for the lane.
    pub fn connect(&mut self, h: &mut dyn Harness) -> Result<PeerId, String> {
        let peer = self.near.connect(&self.far.blob()).map_err(|e| format!("connect: {e}"))?;
        self.drive(h, "Connected", |p| p.near_events.contains(&Event::Connected { peer }))?;
        Ok(peer)
    }

    /// Steps both once and gathers their events.
    pub fn step(&mut self, h: &mut dyn Harness) {
        self.near.step(h.now());
        self.far.step(h.now());
        self.near_events.extend(std::iter::from_fn(|| self.near.next_event()));
        self.far_events.extend(std::iter::from_fn(|| self.far.next_event()));
    }

    /// Steps until something has happened.
    ///
    /// # Errors
    /// If it has not happened after a long while.
    pub fn drive(
        &mut self,
        h: &mut dyn Harness,
        what: &str,
        mut done: impl FnMut(&Self) -> bool,
    ) -> Result<(), String> {
        let start = Instant::now();
        for round in 0u64.. {
            self.step(h);
            if done(self) {
                return Ok(());
            }
            // A backend with threads or a kernel between needs real time now and then.
            if round % 16 == 15 {
                self.near.wait(Some(Duration::from_millis(1)));
            }
            if start.elapsed() > PATIENCE {
                break;
            }
        }
        Err(format!("no {what} after {PATIENCE:?}; near said {:?}, far said {:?}", self.near_events, self.far_events))
    }

    /// Steps a while longer, so that what must not come has time to come.
    pub fn linger(&mut self, h: &mut dyn Harness) {
        for round in 0..60 {
            self.step(h);
            if round % 20 == 19 {
                self.near.wait(Some(Duration::from_millis(1)));
            }
        }
    }

    /// Submits a sample.
    pub fn submit(
        &mut self,
        peer: PeerId,
        kind: OpKind,
        sample: &Sample,
        notify: Option<&[u8]>,
    ) -> Result<OpId, String> {
        self.near.submit(submission(peer, kind, sample, notify)).map_err(|e| format!("submit: {e}"))
    }

    /// Waits for the end of an operation.
    pub fn end_of(&mut self, h: &mut dyn Harness, op: OpId) -> Result<Outcome, String> {
        self.drive(h, "completion", |p| !p.outcomes(op).is_empty())?;
        self.outcomes(op).pop().ok_or_else(|| "no outcome".to_owned())
    }

    /// The ends told of an operation so far.
    pub fn outcomes(&self, op: OpId) -> Vec<Outcome> {
        let of_op = |e: &Event| match e {
            Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
            _ => None,
        };
        self.near_events.iter().filter_map(of_op).collect()
    }

    /// The notifications far has got.
    pub fn notices(&self) -> Vec<&[u8]> {
        self.far_events
            .iter()
            .filter_map(|e| match e {
                Event::Notification { payload, .. } => Some(payload.as_slice()),
                _ => None,
            })
            .collect()
    }
}

/// A submission of a sample.
pub(super) fn submission(peer: PeerId, kind: OpKind, sample: &Sample, notify: Option<&[u8]>) -> Submission {
    Submission { peer, kind, batch: sample.batch.clone(), notify: notify.map(<[u8]>::to_vec) }
}

fn register_all(endpoint: &mut dyn Transport, regions: &[Region]) -> Result<(), String> {
    for (i, region) in regions.iter().enumerate() {
        let id = endpoint.register(region.clone()).map_err(|e| format!("register: {e}"))?;
        if id != RegionId::new(u32::try_from(i).unwrap_or(u32::MAX)) {
            return Err(format!("registration {i} got id {id}"));
        }
    }
    Ok(())
}
