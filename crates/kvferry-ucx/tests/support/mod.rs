//! What the tests share: endpoints driven to an event, and batches of scattered blocks.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "tests; each binary uses its part")]

use std::time::{Duration, Instant};

use kvferry_transport::{Event, LaneKind, OpId, Outcome, PeerId, Transport};
use kvferry_ucx::{Rail, UcxConfig, UcxTransport};

/// `rails` rails over these transports.
pub(crate) fn over(transports: &[&str], rails: usize) -> UcxConfig {
    let mut config = UcxConfig::with_rails(rails);
    config.rails.fill(Rail::default().with_transports(transports.iter().copied()));
    config
}

pub(crate) fn endpoint(rails: usize) -> UcxTransport {
    UcxTransport::new(UcxConfig::with_rails(rails)).unwrap()
}

/// Steps the first endpoint, and the others beside it, until it says something that `wanted` accepts.
pub(crate) fn drive<R>(endpoints: &mut [&mut dyn Transport], mut wanted: impl FnMut(&Event) -> Option<R>) -> R {
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
        assert!(start.elapsed() < Duration::from_secs(30), "not heard in time; heard {heard:?}");
        endpoints[0].wait(Some(Duration::from_millis(1)));
    }
}

pub(crate) fn connected(endpoints: &mut [&mut dyn Transport], peer: PeerId) {
    drive(endpoints, |e| (*e == Event::Connected { peer }).then_some(()));
}

pub(crate) fn end_of(endpoints: &mut [&mut dyn Transport], op: OpId) -> Outcome {
    drive(endpoints, |e| match e {
        Event::Completed { op: id, outcome, .. } if *id == op => Some(outcome.clone()),
        _ => None,
    })
}

/// The lane between two endpoints of this process.
pub(crate) fn lane_of(config: &UcxConfig) -> LaneKind {
    let mut near = UcxTransport::new(config.clone()).unwrap();
    let mut far = UcxTransport::new(config.clone()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    connected(&mut [&mut near, &mut far], peer);
    near.peer(peer).unwrap().lane.kind
}
