//! What a rank says is final of a stream, straight to its worker: nothing crosses a socket before the first byte is written.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_geometry::units::{ItemId, Tokens};
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_proto::push::Ready;
use kvferry_session::RankSession;

/// Promises that wait to be taken, at most: with more, the oldest are forgotten, which a later one or the seal makes up for.
const WAITING: usize = 1 << 16;
/// How long the owner's word of a stream may take to arrive after the first promise of it.
const EARLY: Duration = Duration::from_secs(10);

/// Where a rank says that bytes of its own are final; cheap to clone, to be used from any thread, never blocking.
///
/// It is the short way beside [`OfferStream::region_ready`](crate::OfferStream::region_ready), for a rank that knows before the
/// engine's scheduler does: from the stream where its layers run. What is said here counts for this rank alone. It may be said
/// again by the scheduler, or not: the seal makes all of it final.
#[derive(Clone, Debug)]
pub struct ReadyPort {
    waiting: Arc<Mutex<VecDeque<Ready>>>,
    wake: Arc<UnixStream>,
}

impl ReadyPort {
    /// Promises that this rank's bytes of all tokens before `tokens` are final, of these items: they don't change before the lease is
    /// over, or its prefill begins anew. `attempt` is the run of the prefill that has computed them,
    /// [`OfferStream::attempt`](crate::OfferStream::attempt): what is said of another is ignored, and so are items that the model
    /// doesn't have, and what is final already. False if the worker has ended.
    pub fn region_ready(
        &self,
        lease: LeaseId,
        attempt: Attempt,
        items: impl IntoIterator<Item = ItemId>,
        tokens: Tokens,
    ) -> bool {
        let ready = Ready { lease, attempt, items: items.into_iter().collect(), tokens };
        let mut waiting = locked(&self.waiting);
        if waiting.len() >= WAITING {
            waiting.pop_front();
        }
        waiting.push_back(ready);
        drop(waiting);
        match (&*self.wake).write_all(&[1]) {
            Ok(()) => true,
            // It has enough to wake up from.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct Readies {
    waiting: Arc<Mutex<VecDeque<Ready>>>,
    /// Shut down by whoever wants the worker to stop.
    pub(super) woken: UnixStream,
    /// Of streams that the owner has said nothing of yet, and when they came.
    early: VecDeque<(Duration, Ready)>,
}

/// Both ends.
pub(super) fn ready_port() -> std::io::Result<(ReadyPort, Readies)> {
    let (wake, woken) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    woken.set_nonblocking(true)?;
    let waiting = Arc::new(Mutex::new(VecDeque::new()));
    let port = ReadyPort { waiting: waiting.clone(), wake: Arc::new(wake) };
    Ok((port, Readies { waiting, woken, early: VecDeque::new() }))
}

impl ReadyPort {
    /// Ends the worker's loop.
    pub(super) fn stop(&self) {
        // Stopped already is as good.
        drop(self.wake.shutdown(std::net::Shutdown::Both));
    }
}

impl Readies {
    /// Hears why it was woken; true to stop.
    pub(super) fn hear(&self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match (&self.woken).read(&mut bytes) {
                Ok(0) => return true,
                Ok(n) if n == bytes.len() => {}
                Ok(_) => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }

    /// Hands over what waits; `heard`: the owner may have said what was waited for.
    pub(super) fn hand_over(&mut self, session: &mut RankSession, heard: bool, now: Duration) {
        if heard {
            self.early.retain(|(since, ready)| now.saturating_sub(*since) < EARLY && !session.ready(ready, now));
        }
        let new = std::mem::take(&mut *locked(&self.waiting));
        for ready in new {
            if !session.ready(&ready, now) {
                if self.early.len() >= WAITING {
                    self.early.pop_front();
                }
                self.early.push_back((now, ready));
            }
        }
    }
}

fn locked(waiting: &Mutex<VecDeque<Ready>>) -> MutexGuard<'_, VecDeque<Ready>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}
