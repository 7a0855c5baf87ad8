//! What the reference backend does wrong on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::rng::Rng;

/// Where and how an operation breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Break {
    /// The bytes of the batch before this position are moved, the others not.
    pub at_byte: u64,
    /// Ends as in doubt instead of failed.
    pub in_doubt: bool,
}

/// Faults and slowness of one endpoint. Operations are counted from 0 in the order of acceptance over the endpoint's
/// life; times are drawn evenly from their range by the network's seed. The default is none and instant.
#[derive(Clone, Debug, Default)]
pub struct MemFaults {
    /// How long an operation waits before its first byte moves. A range reorders operations.
    pub start_delay: Range<Duration>,
    /// How long an end is kept back after the last byte has moved. A range reorders completions.
    pub completion_delay: Range<Duration>,
    /// How long a notification of this endpoint is under way after the last byte has moved.
    pub notify_delay: Range<Duration>,
    /// The most bytes that one operation moves in one step; `None` for all at once.
    pub slice: Option<u64>,
    /// Run the operations of a step in random order.
    pub shuffle: bool,
    /// Operations that break on the way.
    pub fail: BTreeMap<u64, Break>,
    /// Operations whose end is never told by the lane: they stay in flight until cancelled, disconnected or the peer is
    /// lost, and then end in doubt.
    pub lose_completion: BTreeSet<u64>,
    /// Operations whose end is told twice by the lane; the endpoint must report it once.
    pub duplicate_completion: BTreeSet<u64>,
    /// Operations whose notification is lost, although they end well.
    pub drop_notify: BTreeSet<u64>,
}

pub(super) fn draw(rng: &mut Rng, range: &Range<Duration>) -> Duration {
    let span = u64::try_from(range.end.saturating_sub(range.start).as_nanos()).unwrap_or(u64::MAX);
    range.start + Duration::from_nanos(rng.below(span))
}
