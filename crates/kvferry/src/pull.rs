//! A pull that is under way, as the engine holds it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvferry_geometry::units::Tokens;
use kvferry_proto::rank::PullId;
use kvferry_session::{Delivered, Failed};
use tokio::sync::{oneshot, watch};

use crate::driver::{Command, Outcome};
use crate::owner::{CallError, Caller};

/// A pull in progress: a future of how it ends. Dropping it gives the pull up; its blocks may be written for a little while
/// longer, so await it after [`cancel`](Self::cancel) instead where they are to be used again.
#[derive(Debug)]
pub struct PullHandle {
    id: PullId,
    result: Option<oneshot::Receiver<Outcome>>,
    progress: Option<watch::Receiver<Tokens>>,
    caller: Arc<Caller>,
}

impl PullHandle {
    pub(crate) fn new(
        id: PullId,
        result: oneshot::Receiver<Outcome>,
        progress: Option<watch::Receiver<Tokens>>,
        caller: Arc<Caller>,
    ) -> Self {
        Self { id, result: Some(result), progress, caller }
    }

    /// Names the pull in [snapshots](crate::Owner::snapshot), and for [`Owner::abort`](crate::Owner::abort).
    #[must_use]
    pub fn id(&self) -> PullId {
        self.id
    }

    /// How much is in place, for a pull that was asked for [with progress](crate::PullSpec::push_with_progress); `None` for others.
    #[must_use]
    pub fn progress(&self) -> Option<PullProgress> {
        self.progress.clone().map(PullProgress)
    }

    /// Asks to give the pull up, as soon as the future is polled; it never waits. Await the handle for the pull's end. To ask without a
    /// future: [`Owner::abort`](crate::Owner::abort), or drop the handle.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn cancel(&self) -> Result<(), CallError> {
        self.caller.tell(Command::Cancel { pull: self.id })
    }
}

/// How much of a pushed request is in place: it only grows, but for an attempt that begins anew. What is in place is not *delivered*,
/// and must not be used, before the pull has ended so: it is good for preparing what follows.
#[derive(Clone, Debug)]
pub struct PullProgress(watch::Receiver<Tokens>);

impl PullProgress {
    /// The tokens before this one are in place as far as they are to be written, of all items, from all writers.
    #[must_use]
    pub fn tokens(&self) -> Tokens {
        *self.0.borrow()
    }

    /// The same, once it has changed since it was last asked for here; `None` when the pull has ended.
    pub async fn next(&mut self) -> Option<Tokens> {
        self.0.changed().await.ok()?;
        Some(*self.0.borrow_and_update())
    }
}

impl Future for PullHandle {
    type Output = Result<Delivered, PullError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(result) = &mut self.result else { return Poll::Ready(Err(PullError::Shutdown)) };
        let polled = Pin::new(result).poll(cx);
        polled.map(|answer| {
            self.result = None;
            match answer {
                Ok(result) => (*result).map_err(|failed| PullError::Failed(Box::new(failed))),
                Err(_) => Err(PullError::Shutdown),
            }
        })
    }
}

impl Drop for PullHandle {
    fn drop(&mut self) {
        if self.result.is_some() {
            // With the owner ends the pull.
            drop(self.caller.tell(Command::Cancel { pull: self.id }));
        }
    }
}

/// A pull did not deliver.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PullError {
    /// It failed: why, and what happened until then.
    #[error(transparent)]
    Failed(Box<Failed>),
    /// The owner is gone without a word about it: all blocks of the pull are in doubt, and may still be written until the
    /// engine's ranks have ended.
    #[error("the owner was shut down")]
    Shutdown,
}
