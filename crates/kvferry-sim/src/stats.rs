//! What has happened in a world.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_transport::{OpKind, Outcome};

use crate::faults::FaultKind;

/// Counts of one world, or of many.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Worlds.
    pub worlds: u64,
    /// Things that happened: messages, timers, ends, strikes.
    pub events: u64,
    /// Calls of sessions' `step`.
    pub steps: u64,
    /// Messages that arrived.
    pub messages: u64,
    /// Strips of operations that moved.
    pub strips: u64,
    /// Operations, by kind.
    pub reads: u64,
    /// As `reads`.
    pub writes: u64,
    /// Bytes that operations were to move.
    pub bytes: u64,
    /// Operations that ended well, failed, and in doubt.
    pub ends: (u64, u64, u64),
    /// Writes that were posted for a lease that had ended unread, or to a process that was gone.
    pub unwanted: u64,
    /// Faults that struck.
    pub faults: BTreeMap<FaultKind, u64>,
    /// How requests ended.
    pub outcomes: BTreeMap<String, u64>,
    /// How leases ended.
    pub leases: BTreeMap<String, u64>,
    /// The world's time.
    pub time: Duration,
    /// Bytes that were compared after a delivery.
    pub compared: u64,
}

impl Stats {
    pub(crate) fn fault(&mut self, kind: FaultKind) {
        *self.faults.entry(kind).or_default() += 1;
    }

    pub(crate) fn outcome(&mut self, how: &str) {
        *self.outcomes.entry(how.to_owned()).or_default() += 1;
    }

    pub(crate) fn op_begun(&mut self, kind: OpKind, bytes: u64) {
        match kind {
            OpKind::Read => self.reads += 1,
            OpKind::Write => self.writes += 1,
        }
        self.bytes += bytes;
    }

    pub(crate) fn op_ended(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Done(_) => self.ends.0 += 1,
            Outcome::Failed(_) => self.ends.1 += 1,
            Outcome::InDoubt(_) => self.ends.2 += 1,
        }
    }

    /// How many faults there were in all.
    #[must_use]
    pub fn all_faults(&self) -> u64 {
        self.faults.values().sum()
    }

    /// Adds those of another world, or part of one.
    pub fn add(&mut self, other: &Self) {
        let sum = |into: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>| {
            for (name, count) in from {
                *into.entry(name.clone()).or_default() += count;
            }
        };
        self.worlds += other.worlds;
        self.events += other.events;
        self.steps += other.steps;
        self.messages += other.messages;
        self.strips += other.strips;
        self.reads += other.reads;
        self.writes += other.writes;
        self.bytes += other.bytes;
        self.ends.0 += other.ends.0;
        self.ends.1 += other.ends.1;
        self.ends.2 += other.ends.2;
        self.unwanted += other.unwanted;
        self.time += other.time;
        self.compared += other.compared;
        for (kind, count) in &other.faults {
            *self.faults.entry(*kind).or_default() += count;
        }
        sum(&mut self.outcomes, &other.outcomes);
        sum(&mut self.leases, &other.leases);
    }
}
