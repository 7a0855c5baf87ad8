//! What the endpoint and its rails' threads share: orders, reports, the books.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_geometry::units::RegionId;
use kvferry_transport::{EndpointId, LostCause, Outcome, PeerId, Region};

use crate::bell::Bell;
use crate::books::Books;
use crate::config::UcxConfig;
use crate::mailbox::Mailbox;
use crate::part::Part;
use crate::process::Process;
use crate::work::Work;

/// What an endpoint, or another rail of it, orders from a rail.
pub(crate) enum Command {
    /// Register a region at UCX; the reply is its packed key.
    Map {
        key: u64,
        region: Region,
        reply: SyncSender<Result<Vec<u8>, String>>,
    },
    /// Take back a registration.
    Unmap {
        key: u64,
    },
    /// Say when everything ordered before is done.
    Ping {
        reply: SyncSender<()>,
    },
    Connect {
        conn: u64,
        callee: Arc<Callee>,
    },
    /// The operations of this connection are told to stop; when they have, it goes.
    Disconnect {
        conn: u64,
    },
    /// Another rail has lost this connection.
    Lose {
        conn: u64,
        cause: LostCause,
    },
    /// At another rail the lane of this connection broke: nothing more is to begin on it, until it is known why.
    Halt {
        conn: u64,
    },
    /// Break the lane of a connection, or the way back to all guests: for tests of what follows.
    #[cfg(test)]
    Break {
        conn: Option<u64>,
    },
    /// Ask for an operation and do it.
    Begin(Arc<Work>),
    /// Do a share of it.
    Share(Arc<Work>, std::ops::Range<u64>),
    /// The last share of an operation has ended.
    Finish(Arc<Work>),
    /// An operation was told to stop.
    Stopped(Arc<Work>),
    Quit,
}

/// Whom to connect to: what its blob says.
#[derive(Debug)]
pub(crate) struct Callee {
    pub(crate) endpoint: EndpointId,
    pub(crate) generation: u64,
    /// Ascending; the part's regions are in this order.
    pub(crate) regions: Vec<RegionId>,
    pub(crate) part: Part,
}

/// What rails tell their endpoint.
#[derive(Debug)]
pub(crate) enum Report {
    Up {
        peer: PeerId,
        rail: usize,
        lanes: Vec<crate::lane::RailLane>,
    },
    Lost {
        peer: PeerId,
        cause: LostCause,
    },
    Ended {
        op: u64,
        outcome: Outcome,
    },
    Notice {
        from: EndpointId,
        payload: Vec<u8>,
    },
    /// A rail's thread has died.
    Dead {
        rail: usize,
    },
}

/// The most bytes of notifications that wait for the endpoint's owner. Beyond that the rails don't listen to guests.
const MAX_NOTICES: usize = 16 << 20;
/// What a notification costs besides its bytes.
const NOTICE: usize = 128;

/// One of these for each endpoint.
pub(crate) struct Shared {
    pub(crate) id: EndpointId,
    /// What callers must know.
    pub(crate) token: [u8; 16],
    pub(crate) process: Process,
    pub(crate) config: UcxConfig,
    pub(crate) mailboxes: Arc<[Mailbox]>,
    books: Mutex<Books>,
    reports: Mutex<VecDeque<Report>>,
    /// Bytes of the notifications among the reports.
    notices: AtomicUsize,
    /// Rings while there are reports that no step has seen.
    pub(crate) wake: Bell,
}

impl Shared {
    pub(crate) fn new(
        id: EndpointId,
        token: [u8; 16],
        config: UcxConfig,
        mailboxes: Arc<[Mailbox]>,
    ) -> rustix::io::Result<Self> {
        Ok(Self {
            id,
            token,
            process: Process::ours(),
            config,
            mailboxes,
            books: Mutex::default(),
            reports: Mutex::default(),
            notices: AtomicUsize::new(0),
            wake: Bell::new()?,
        })
    }

    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    pub(crate) fn report(&self, report: Report) {
        let mut reports = lock(&self.reports);
        if let Report::Notice { payload, .. } = &report {
            self.notices.fetch_add(payload.len() + NOTICE, Ordering::Relaxed);
        }
        reports.push_back(report);
        if reports.len() == 1 {
            self.wake.ring();
        }
    }

    /// All reports so far; the bell is silent until the next.
    pub(crate) fn take_reports(&self) -> VecDeque<Report> {
        let mut reports = lock(&self.reports);
        if reports.is_empty() {
            return VecDeque::new();
        }
        self.wake.silence();
        self.notices.store(0, Ordering::Relaxed);
        std::mem::take(&mut *reports)
    }

    #[cfg(test)]
    pub(crate) fn notice_bytes(&self) -> usize {
        self.notices.load(Ordering::Relaxed)
    }

    /// Whether as many notifications wait as may.
    pub(crate) fn is_full(&self) -> bool {
        self.notices.load(Ordering::Relaxed) > MAX_NOTICES
    }
}

/// A registration at all rails, as the owner of the region that the table and operations hold: once none holds it any more, the
/// rails take it back, and only then let the memory's own owner go.
pub(crate) struct Mapped {
    pub(crate) key: u64,
    pub(crate) mailboxes: Arc<[Mailbox]>,
    /// What the caller registered.
    pub(crate) _region: Region,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.post(Command::Unmap { key: self.key }));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under these locks leaves them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
