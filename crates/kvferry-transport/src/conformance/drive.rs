//! Endpoints driven to an event: for tests of backends beside the suite.

use std::time::{Duration, Instant};

use crate::transport::Transport;
use crate::types::{Event, OpId, Outcome, PeerId};

/// How long an event may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Steps all endpoints until the first one says something that `wanted` accepts.
///
/// # Panics
/// If it isn't said in 30 s; with what was said.
pub fn drive<R>(endpoints: &mut [&mut dyn Transport], mut wanted: impl FnMut(&Event) -> Option<R>) -> R {
    let start = Instant::now();
    let mut heard = Vec::new();
    loop {
        for endpoint in endpoints.iter_mut() {
            endpoint.step(start.elapsed());
        }
        for event in std::iter::from_fn(|| endpoints[0].next_event()) {
            if let Some(got) = wanted(&event) {
                return got;
            }
            heard.push(event);
        }
        assert!(start.elapsed() < PATIENCE, "not heard in time; heard {heard:?}");
        endpoints[0].wait(Some(Duration::from_millis(1)));
    }
}

/// Drives until the first endpoint's connection is up.
pub fn connected(endpoints: &mut [&mut dyn Transport], peer: PeerId) {
    drive(endpoints, |e| (*e == Event::Connected { peer }).then_some(()));
}

/// Drives until an operation of the first endpoint has ended.
pub fn end_of(endpoints: &mut [&mut dyn Transport], op: OpId) -> Outcome {
    drive(endpoints, |e| match e {
        Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
        _ => None,
    })
}
