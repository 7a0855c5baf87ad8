//! What a probe has found.

use std::fmt;
use std::time::Duration;

use kvferry_geometry::units::Bytes;

use super::policy::{rate, whole};
use crate::types::{EndpointId, Lane, Measured};

/// Operations of one size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// Bytes of each, in one run.
    pub size: Bytes,
    /// How many.
    pub operations: u64,
    /// Bytes of all over the time from the first submission to the last end.
    pub bytes_per_second: f64,
}

/// What registering memory takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registration {
    /// Bytes of the region.
    pub size: Bytes,
    /// To register it.
    pub register: Duration,
    /// To deregister it.
    pub deregister: Duration,
}

/// What a probe has found.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// The peer.
    pub endpoint: EndpointId,
    /// The lane, with what was measured.
    pub lane: Lane,
    /// Bytes of a small operation.
    pub small: Bytes,
    /// Median time of one, alone on the lane.
    pub per_operation: Duration,
    /// How many there were.
    pub small_operations: u64,
    /// By size, ascending; at least one. On a slow lane the larger sizes are left out.
    pub rates: Vec<Rate>,
    /// What registering took, if that was measured.
    pub registration: Option<Registration>,
}

impl Report {
    /// For [`Lane::measured`]: the rate of the largest operations, and the time of a small one.
    #[must_use]
    pub fn measured(&self) -> Measured {
        let bytes_per_second = self.rates.last().map_or(0.0, |r| r.bytes_per_second);
        Measured { bytes_per_second, per_operation: self.per_operation }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.lane.kind)?;
        if !self.lane.transports.is_empty() {
            write!(f, " ({})", self.lane.transports.join(", "))?;
        }
        writeln!(f, ", {}, to {}", self.lane.detail, self.endpoint)?;
        let row = |f: &mut fmt::Formatter<'_>, what: String, value: String, over: String| {
            writeln!(f, "  {what:<24} {value:>12}  {over}")
        };
        let (small, count) = (self.small.get(), self.small_operations);
        row(f, format!("one read of {small} B"), micros(self.per_operation), format!("median of {count}"))?;
        for r in &self.rates {
            let over = format!("{} operations", r.operations);
            row(f, format!("reads of {}", size(r.size)), rate(whole(r.bytes_per_second)), over)?;
        }
        let Some(r) = self.registration else { return Ok(()) };
        let over = format!("and {} to deregister", micros(r.deregister));
        row(f, format!("registering {}", size(r.size)), micros(r.register), over)
    }
}

fn micros(time: Duration) -> String {
    let ns = time.as_nanos();
    format!("{}.{:01} us", ns / 1000, ns % 1000 / 100)
}

fn size(bytes: Bytes) -> String {
    let n = bytes.get();
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}
