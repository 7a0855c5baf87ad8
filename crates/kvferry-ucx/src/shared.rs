//! What the endpoint and its rails' threads share: the registrations, the mailboxes, the reports.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_geometry::units::RegionId;
use kvferry_transport::access::Keeper;
use kvferry_transport::table::RegionTable;
use kvferry_transport::{EndpointId, LostCause, Outcome, PeerId, Region};

use crate::bell::Bell;
use crate::config::UcxConfig;
use crate::part::Part;
use crate::process::Process;
use crate::work::Work;

/// What an endpoint orders from a rail. There are never more in a mailbox than a few for each operation, peer and
/// region, all of which are bounded.
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
    Up { peer: PeerId, rail: usize, lanes: Vec<crate::lane::RailLane> },
    Lost { peer: PeerId, cause: LostCause },
    Ended { op: u64, outcome: Outcome },
    Notice { from: EndpointId, payload: Vec<u8> },
}

/// A rail's orders.
pub(crate) struct Mailbox {
    queue: Mutex<VecDeque<Command>>,
    pub(crate) bell: Bell,
    asleep: AtomicBool,
}

impl Mailbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { queue: Mutex::default(), bell: Bell::new()?, asleep: AtomicBool::new(false) })
    }

    pub(crate) fn post(&self, command: Command) {
        lock(&self.queue).push_back(command);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    pub(crate) fn take(&self, into: &mut VecDeque<Command>) {
        std::mem::swap(&mut *lock(&self.queue), into);
    }

    /// The rail is about to sleep: from now on a command rings. False if there is one already.
    pub(crate) fn lie_down(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let quiet = lock(&self.queue).is_empty();
        if !quiet {
            self.wake_up();
        }
        quiet
    }

    /// The rail is awake.
    pub(crate) fn wake_up(&self) {
        if !self.asleep.swap(false, Ordering::SeqCst) {
            self.bell.silence();
        }
    }
}

/// The registrations, and who has operations open on them.
#[derive(Default)]
pub(crate) struct Books {
    pub(crate) table: RegionTable,
    pub(crate) keeper: Keeper,
}

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
            wake: Bell::new()?,
        })
    }

    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    pub(crate) fn report(&self, report: Report) {
        let mut reports = lock(&self.reports);
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
        std::mem::take(&mut *reports)
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under these locks leaves them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
