//! The streams: leases of ours whose bytes are still being computed, and how far those are final.
//!
//! A stream is known from the owner's first word of it until its end; what is said to be final of one that isn't known, or of
//! another attempt, is not kept. Its marks only grow. A higher attempt begins it anew: then orders of the one before fail, and
//! what they have in flight is asked to stop.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::request::SrcGroup;
use kvferry_geometry::watermarks::Watermarks;
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_proto::push::{Ready, Stream};
use kvferry_proto::rank::Stage;

use super::orders::fault;
use super::{RankSession, Standing};

/// By lease.
pub(super) type Streams = BTreeMap<LeaseId, Streamed>;

/// What is known of a stream.
#[derive(Debug)]
pub(super) struct Streamed {
    pub(super) attempt: Attempt,
    /// Our blocks, as far as they are listed.
    pub(super) groups: Vec<SrcGroup>,
    /// Whether that is all, and everything is final.
    pub(super) sealed: bool,
    /// How far the bytes of each item are final.
    pub(super) marks: Arc<Watermarks>,
}

impl RankSession {
    /// Takes what the engine says is final of a stream, as [`ToRank::Ready`](kvferry_proto::rank::ToRank::Ready) does, where it is
    /// known in the rank's process first. False where the rank doesn't know the stream, or it is at another attempt: then nothing
    /// has changed. Call [`step`](Self::step) after it, as after `handle`.
    pub fn ready(&mut self, ready: &Ready, now: Duration) -> bool {
        self.now = now;
        let taken = self.on_ready(ready);
        self.expire();
        self.pump();
        taken
    }

    pub(super) fn on_ready(&mut self, ready: &Ready) -> bool {
        let stream = self.streams.get_mut(&ready.lease).filter(|s| s.attempt == ready.attempt);
        let Some(stream) = stream else { return false };
        let marks = Arc::make_mut(&mut stream.marks);
        let mut grown = false;
        for &item in &ready.items {
            let before = marks.get(item);
            // One that the model doesn't have, or that is further already, says nothing new.
            grown |= marks.advance([item], ready.tokens).is_ok() && marks.get(item) != before;
        }
        if grown {
            for push in self.pushes.of(ready.lease) {
                self.advance(push);
            }
        }
        true
    }

    pub(super) fn on_stream(&mut self, stream: Stream) {
        let Standing::Member(engine) = &self.standing else { return };
        let Stream { lease, attempt, groups, sealed } = stream;
        let items = engine.cache().spec().iter().len();
        let known = self.streams.get(&lease);
        if known.is_some_and(|s| s.attempt > attempt || (s.attempt == attempt && s.sealed)) {
            return;
        }
        let marks = match known {
            _ if sealed => Arc::new(Watermarks::whole(items)),
            Some(same) if same.attempt == attempt => same.marks.clone(),
            _ => Arc::new(Watermarks::none(items)),
        };
        self.streams.insert(lease, Streamed { attempt, groups, sealed, marks });
        for id in self.pushes.of(lease) {
            let Some(push) = self.pushes.get_mut(id) else { continue };
            let of = push.order.attempt;
            if of < attempt {
                let text = format!("the prefill began anew: the order is of attempt {of}, and it is at {attempt} now");
                self.fail_push(id, fault(Stage::Cancelled, text));
            } else {
                push.request = push.request.take().filter(|_| !push.streamed);
                self.advance(id);
            }
        }
    }

    pub(super) fn end_stream(&mut self, lease: LeaseId) {
        self.streams.remove(&lease);
        for push in self.pushes.of(lease) {
            self.fail_push(push, fault(Stage::Cancelled, "the lease was closed"));
        }
    }
}
