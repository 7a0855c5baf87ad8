//! An operation as the rails see it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::{OpKind, Outcome, Region, Stats, TransferError};

/// An accepted operation, shared by the rails that work on it. It owns its regions, and with them their registrations at UCX.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) op: u64,
    /// The connection, by the submitting side's number.
    pub(crate) conn: u64,
    pub(crate) kind: OpKind,
    pub(crate) batch: Arc<BoundedBatch>,
    pub(crate) notify: Option<Vec<u8>>,
    /// Our regions that it names, ascending.
    pub(crate) ours: Vec<Ours>,
    /// The peer's regions that it names, ascending.
    pub(crate) peers: Vec<RegionId>,
    /// The rail that asks for it and ends it.
    pub(crate) home: usize,
    pub(crate) state: State,
}

/// One of our regions.
#[derive(Clone, Debug)]
pub(crate) struct Ours {
    pub(crate) id: RegionId,
    pub(crate) region: Region,
    /// Of its registration at each rail.
    pub(crate) key: u64,
}

/// What changes of an operation.
#[derive(Debug, Default)]
pub(crate) struct State {
    stop: AtomicU8,
    /// Shares that have not ended.
    pub(crate) shares: AtomicUsize,
    descriptors: AtomicU64,
    /// A share ended early.
    cut: AtomicBool,
    failure: Mutex<Option<TransferError>>,
    /// Nothing proves that the peer's memory is not written later.
    doubtful: AtomicBool,
}

/// Why an operation is to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    Cancelled = 1,
    Disconnected = 2,
    Lost = 3,
}

impl Work {
    /// Asks it to stop; the first reason stays.
    pub(crate) fn stop(&self, why: Stop) {
        // An error says that there is a reason already.
        let _: Result<u8, u8> = self.state.stop.compare_exchange(0, why as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether it is to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.state.stop.load(Ordering::Acquire) != 0
    }

    /// What it fails with if it is stopped before its bytes moved; for a lost peer, that is for the connection to say.
    pub(crate) fn stop_error(&self) -> Option<TransferError> {
        match self.state.stop.load(Ordering::Acquire) {
            1 => Some(TransferError::Cancelled),
            2 => Some(TransferError::Disconnected),
            _ => None,
        }
    }

    /// Adds what a share has moved; true for the last of them.
    pub(crate) fn share_ended(&self, descriptors: u64, end: ShareEnd) -> bool {
        self.state.descriptors.fetch_add(descriptors, Ordering::Relaxed);
        match end {
            ShareEnd::Whole => {}
            ShareEnd::Cut => self.state.cut.store(true, Ordering::Relaxed),
            ShareEnd::Failed { error, doubtful } => {
                self.state.cut.store(true, Ordering::Relaxed);
                self.state.doubtful.fetch_or(doubtful, Ordering::Relaxed);
                let mut failure = self.state.failure.lock().unwrap_or_else(PoisonError::into_inner);
                failure.get_or_insert(error);
            }
        }
        // Releases what this share stored to whoever ends the operation.
        self.state.shares.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// How it ended, once all shares have. `lost` is what it fails with if the connection is lost by now.
    pub(crate) fn outcome(&self, lost: Option<TransferError>) -> Outcome {
        let failure = self.state.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let cut = self.state.cut.load(Ordering::Relaxed);
        if !cut && lost.is_none() {
            return Outcome::Done(Stats {
                bytes: self.batch.bytes(),
                descriptors: self.state.descriptors.load(Ordering::Relaxed),
            });
        }
        // What the caller asked for goes before what followed from it.
        let error = self.stop_error().filter(|_| cut).or(lost).or(failure).unwrap_or(TransferError::Cancelled);
        if self.state.doubtful.load(Ordering::Relaxed) { Outcome::InDoubt(error) } else { Outcome::Failed(error) }
    }

    pub(crate) fn bytes(&self) -> Bytes {
        self.batch.bytes()
    }
}

/// How a share ended.
#[derive(Debug)]
pub(crate) enum ShareEnd {
    /// All its bytes are where they belong, visibly.
    Whole,
    /// It was stopped; what it had posted has ended.
    Cut,
    /// An operation of UCX failed; all others have ended too.
    Failed { error: TransferError, doubtful: bool },
}
