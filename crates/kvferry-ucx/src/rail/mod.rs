//! A rail: one UCX context with its two workers, owned by one thread from making to dropping.
//!
//! Two workers, because UCX pairs the endpoints between two workers by their order, whoever made them: with one worker,
//! a connection of ours and the way back to a guest from the same peer could become a pair, and closing the one would
//! break the other. So connections of ours are endpoints of the *caller*, which nobody is told of but those it calls, and guests
//! are answered by the *host*, whose address the blob has.
//!
//! The thread takes orders, makes progress, and sleeps on one `epoll` descriptor for both workers, its mailbox and
//! the ends of its peers' processes when there is nothing to do.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use kvferry_transport::Region;
use rustix::event::{Timespec, epoll};

use crate::config::{Rail as RailConfig, UcxConfig};
use crate::error::UcxError;
use crate::mailbox::Mailbox;
use crate::shared::{Command, Report, Shared};
use crate::sys::{Closing, Context, ContextError, Endpoint, Memory, Status, Worker};
use crate::wire::Ear;

mod conn;
mod guest;
mod run;

use conn::{Conn, Way};
use guest::Guest;
use run::Run;

/// How often things that may take a while are looked after.
const TEND: Duration = Duration::from_millis(10);
/// How long a connection that ends politely may take.
const LINGER: Duration = Duration::from_secs(1);
/// How long the thread sleeps at most while operations are under way; UCX should wake it earlier.
const WATCHFUL: Duration = Duration::from_millis(5);

/// How long the rail waits for UCX at its end.
const CLOSE_WITHIN: Duration = Duration::from_millis(200);

/// How often the caller is driven before anything else is looked at.
const PROGRESS: usize = 8;

/// What readiness the descriptors stand for: the mailbox and the workers; otherwise a connection or a guest with this bit.
const MAILBOX: u64 = 0;
const WORKER: u64 = 1;
const CONN: u64 = 1 << 63;
const GUEST: u64 = 1 << 62;

/// What a rail tells whoever starts it.
#[derive(Debug)]
pub(crate) struct Started {
    /// Of the worker that answers.
    pub(crate) address: Vec<u8>,
    /// The transports that it has to itself, with their devices.
    pub(crate) transports: Vec<(String, String)>,
}

/// A registration at UCX, and the memory that must outlive it.
struct Mapping {
    // Dropped before the region.
    memory: Rc<Memory>,
    _region: Region,
}

/// The thread's state. Fields in the order in which they may go.
pub(crate) struct Rail {
    index: usize,
    runs: VecDeque<Run>,
    conns: BTreeMap<u64, Conn>,
    guests: BTreeMap<u64, Guest>,
    /// By where they are heard.
    conn_ears: HashMap<Ear, u64>,
    guest_ears: HashMap<Ear, u64>,
    closings: Vec<(Closing, Instant)>,
    maps: HashMap<u64, Mapping>,
    caller: Worker,
    host: Worker,
    context: Rc<Context>,
    epoll: OwnedFd,
    orders: VecDeque<Command>,
    /// Operations of UCX that have not ended.
    outstanding: Rc<Cell<u32>>,
    clock: Clock,
    caller_address: Vec<u8>,
    shared: Arc<Shared>,
}

/// What the thread must remember of time and changes.
struct Clock {
    next_guest: u64,
    faults: u64,
    tended: Instant,
    /// Something may take a while and is looked after now and then.
    restless: bool,
    /// Since when it is to end.
    quitting: Option<Instant>,
}

/// The body of a rail's thread: makes everything, tells how that went, and runs until it is told to quit.
pub(crate) fn main(index: usize, shared: &Arc<Shared>, started: &SyncSender<Result<Started, UcxError>>) {
    let mailbox = &shared.mailboxes[index];
    // What runs here includes the destructors of memory's owners, which are not ours.
    let body = || match Rail::new(index, shared.clone()) {
        Ok((rail, report)) => {
            // After a panic the rail is forgotten: UCX may be in the middle of something that needs what would be dropped.
            let mut rail = ManuallyDrop::new(rail);
            if started.send(Ok(report)).is_ok() {
                rail.run();
            }
            drop(ManuallyDrop::into_inner(rail));
        }
        // Whoever asked has given up if this can't be told.
        Err(error) => started.send(Err(error)).unwrap_or(()),
    };
    let ended = catch_unwind(AssertUnwindSafe(body));
    // Orders that nobody will obey must not keep memory, nor whoever waits for a reply.
    let closed = catch_unwind(AssertUnwindSafe(|| mailbox.close()));
    if ended.is_err() || closed.is_err() {
        shared.report(Report::Dead { rail: index });
    }
}

impl Rail {
    fn new(index: usize, shared: Arc<Shared>) -> Result<(Self, Started), UcxError> {
        let ucx = |what| move |status: Status| UcxError::Ucx { what, reason: status.to_string() };
        let none = RailConfig::default();
        let rail = shared.config.rails.get(index).unwrap_or(&none);
        let context = context(index, rail, &shared)?;
        let no_transport = |status: Status| UcxError::NoTransport {
            rail: index,
            transports: rail.transports.clone(),
            devices: rail.devices.clone(),
            reason: status.to_string(),
        };
        let host = Worker::new(&context).map_err(no_transport)?;
        let caller = Worker::new(&context).map_err(ucx("making a worker"))?;
        let address = host.address().map_err(ucx("reading a worker's address"))?;
        let caller_address = caller.address().map_err(ucx("reading a worker's address"))?;
        // A way to ourselves: a list of transports that can't carry messages is found out here.
        let probe = caller.connect(&address).map_err(|status| UcxError::NoMessages {
            rail: index,
            transports: rail.transports.clone(),
            reason: status.to_string(),
        })?;
        let transports = probe.transports();
        let closings = vec![(probe.close(true), Instant::now())];
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(UcxError::system("an epoll descriptor"))?;
        let mailbox = &shared.mailboxes[index];
        let mut sources = vec![(mailbox.bell.as_fd(), MAILBOX)];
        for worker in [&host, &caller] {
            sources.push((worker.event_fd().map_err(ucx("getting a worker's event descriptor"))?, WORKER));
        }
        for (fd, token) in sources {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
                .map_err(UcxError::system("watching a descriptor"))?;
        }
        let clock = Clock { next_guest: 0, faults: 0, tended: Instant::now(), restless: true, quitting: None };
        let rail = Self {
            index,
            runs: VecDeque::new(),
            conns: BTreeMap::new(),
            guests: BTreeMap::new(),
            conn_ears: HashMap::new(),
            guest_ears: HashMap::new(),
            closings,
            maps: HashMap::new(),
            caller,
            host,
            context,
            epoll,
            orders: VecDeque::new(),
            outstanding: Rc::default(),
            clock,
            caller_address,
            shared,
        };
        Ok((rail, Started { address, transports }))
    }

    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.index]
    }

    fn run(&mut self) {
        let mut idle_since: Option<Instant> = None;
        while !self.is_finished() {
            let mut busy = self.take_orders();
            // Guests are not listened to while nobody hears what they have to tell.
            let deaf = self.shared.is_full();
            busy |= !deaf && self.host.progress();
            // Lanes that copy by CPU do one piece a call.
            for _ in 0..PROGRESS {
                if !self.caller.progress() {
                    break;
                }
                busy = true;
            }
            busy |= self.read_letters();
            busy |= self.look_for_faults();
            busy |= self.post_runs();
            if self.clock.restless || busy {
                self.tend();
            }
            if busy {
                idle_since = None;
                continue;
            }
            if self.outstanding.get() > 0 {
                // UCX may have to be driven for what is under way.
                let since = *idle_since.get_or_insert_with(Instant::now);
                if since.elapsed() < self.shared.config.spin {
                    std::hint::spin_loop();
                    continue;
                }
            }
            self.sleep(deaf);
            idle_since = None;
        }
        // Nothing is under way, so UCX touches no memory for what is left. The rest goes in the order of the fields.
        self.close_all();
    }

    fn take_orders(&mut self) -> bool {
        let mut orders = std::mem::take(&mut self.orders);
        self.mailbox().take(&mut orders);
        let busy = !orders.is_empty();
        for order in orders.drain(..) {
            self.obey(order);
        }
        self.orders = orders;
        busy
    }

    fn obey(&mut self, order: Command) {
        match order {
            Command::Map { key, region, reply } => {
                let result = self.map(key, region);
                if reply.send(result).is_err() {
                    // Nobody waits for it any more, so nobody would take it back.
                    self.maps.remove(&key);
                }
            }
            Command::Unmap { key } => drop(self.maps.remove(&key)),
            Command::Ping { reply } => reply.send(()).unwrap_or(()),
            Command::Connect { conn, callee } => self.connect(conn, callee),
            Command::Disconnect { conn } => self.disconnect(conn),
            Command::Lose { conn, cause } => self.lose(conn, &cause, Way::Open),
            Command::Halt { conn } => self.halt(conn),
            #[cfg(test)]
            Command::Break { conn: Some(conn) } => {
                self.lane_broke(conn, kvferry_transport::LostCause::Lane("broken".to_owned()))
            }
            #[cfg(test)]
            Command::Break { conn: None } => self.break_guests(),
            Command::Begin(work) => self.begin(work),
            Command::Share(work, range) => self.start_run(work, range),
            Command::Finish(work) => self.finish(&work),
            Command::Stopped(work) => self.stopped(&work),
            Command::Quit => self.quit(),
        }
    }

    fn map(&mut self, key: u64, region: Region) -> Result<Vec<u8>, String> {
        let len = usize::try_from(region.len().get()).map_err(|e| e.to_string())?;
        // SAFETY: the region keeps its bytes mapped, and is kept until after the registration is dropped.
        let memory = unsafe { self.context.map(region.as_ptr(), len) }.map_err(|status| status.to_string())?;
        let packed = memory.pack().map_err(|status| format!("its key could not be packed: {status}"))?;
        self.maps.insert(key, Mapping { memory: Rc::new(memory), _region: region });
        Ok(packed)
    }

    fn quit(&mut self) {
        self.clock.quitting = Some(Instant::now());
        self.clock.restless = true;
        let conns: Vec<u64> = self.conns.keys().copied().collect();
        conns.into_iter().for_each(|conn| self.disconnect(conn));
        self.say_going();
    }

    /// Whether the thread may end: nothing is under way, no peer has an operation open on our memory, and those who are
    /// to be told that we go were told, or had time enough.
    fn is_finished(&self) -> bool {
        let Some(since) = self.clock.quitting else { return false };
        let works = !self.runs.is_empty() || self.conns.values().any(Conn::has_operations);
        let safe = self.outstanding.get() == 0 && !works && self.guests_are_idle();
        let polite = self.conns.is_empty() && self.guests.is_empty() && self.closings.is_empty();
        safe && (polite || since.elapsed() > LINGER)
    }

    /// Closes everything, when nothing is under way any more.
    fn close_all(&mut self) {
        self.runs.clear();
        for endpoint in std::mem::take(&mut self.conns).into_values().filter_map(Conn::into_endpoint) {
            self.close(endpoint, true);
        }
        let guests: Vec<u64> = self.guests.keys().copied().collect();
        guests.into_iter().for_each(|id| self.forget_guest(id, true));
        self.closings.iter_mut().for_each(|(closing, _)| closing.force());
        let start = Instant::now();
        while start.elapsed() < CLOSE_WITHIN && !self.closings.iter_mut().all(|(closing, _)| closing.done()) {
            self.host.progress();
            self.caller.progress();
        }
        // What UCX has not closed by now it does with its workers.
    }

    /// Reads what came in for both workers.
    fn read_letters(&mut self) -> bool {
        let mut busy = false;
        while let Some((header, body)) = self.host.receive() {
            busy = true;
            self.guest_says(header, &body);
        }
        while let Some((header, body)) = self.caller.receive() {
            busy = true;
            self.peer_says(header, &body);
        }
        busy
    }

    /// Finds the endpoints that UCX has told have failed.
    fn look_for_faults(&mut self) -> bool {
        let faults = self.host.faults() + self.caller.faults();
        if faults == self.clock.faults {
            return false;
        }
        self.clock.faults = faults;
        self.lose_faulted_conns();
        self.mute_faulted_guests();
        true
    }

    /// Looks after what may take a while, and after processes that have ended.
    fn tend(&mut self) {
        if self.clock.tended.elapsed() < TEND {
            return;
        }
        self.clock.tended = Instant::now();
        self.closings.retain_mut(|(closing, since)| {
            if since.elapsed() > LINGER {
                closing.force();
            }
            !closing.done()
        });
        let mut restless = self.tend_conns();
        restless |= self.tend_guests();
        self.hear(Some(Duration::ZERO));
        self.clock.restless = restless || !self.closings.is_empty() || self.clock.quitting.is_some();
    }

    /// Closes an endpoint, which may take a while.
    fn close(&mut self, endpoint: Endpoint, force: bool) {
        self.keep_closing(endpoint.close(force));
    }

    fn keep_closing(&mut self, mut closing: Closing) {
        if !closing.done() {
            self.closings.push((closing, Instant::now()));
            self.clock.restless = true;
        }
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self, deaf: bool) {
        if !self.mailbox().lie_down() {
            return;
        }
        // As UCX asks: progress until nothing is left, arm, sleep only if that says that nothing came in between.
        let host = if deaf { Ok(()) } else { self.host.arm() };
        match host.and_then(|()| self.caller.arm()) {
            Ok(()) => {
                let timeout = if self.outstanding.get() > 0 {
                    Some(WATCHFUL)
                } else if self.clock.restless || deaf {
                    Some(TEND)
                } else {
                    None
                };
                self.hear(timeout);
            }
            Err(Status::BUSY) => {}
            // UCX can't wake us, for whatever reason.
            Err(_) => self.hear(Some(WATCHFUL)),
        }
        self.mailbox().wake_up();
    }

    /// Waits for descriptors, and heeds those of processes that have ended.
    fn hear(&mut self, timeout: Option<Duration>) {
        let mut events = Vec::with_capacity(16);
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        // Interrupted by a signal, there is nothing to heed.
        let heard = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        if heard.is_err() {
            return;
        }
        for event in events {
            let token = event.data.u64();
            if token == MAILBOX {
                // Orders are looked for after this.
                self.mailbox().bell.silence();
            } else if token & CONN != 0 {
                self.conn_process_ended(token & !CONN);
            } else if token & GUEST != 0 {
                self.guest_process_ended(token & !GUEST);
            }
        }
    }
}

/// What every endpoint needs of UCX, by names without the prefix; what this UCX doesn't know, it doesn't need.
pub(crate) fn settings(config: &UcxConfig) -> Vec<(&'static str, String)> {
    vec![
        // Without these, lanes of shared memory can't be used by endpoints that want to hear of a peer's death.
        ("POSIX_ERROR_HANDLING", "y".to_owned()),
        ("SYSV_ERROR_HANDLING", "y".to_owned()),
        ("CMA_ERROR_HANDLING", "y".to_owned()),
        ("XPMEM_ERROR_HANDLING", "y".to_owned()),
        // All our messages are eager. UCX leaves cma and its like to endpoints with error handling only if it is sure that no
        // rendezvous runs over them, which a peer's death could leave half done.
        ("RNDV_THRESH", "inf".to_owned()),
        // A cache would keep memory registered that was deregistered, and patch the C library's functions to learn of memory
        // that goes; what is read and written here is registered by itself, for as long as it is.
        ("RCACHE_ENABLE", "n".to_owned()),
        ("KEEPALIVE_INTERVAL", format!("{}us", config.keepalive.as_micros())),
    ]
}

fn context(index: usize, rail: &RailConfig, shared: &Shared) -> Result<Rc<Context>, UcxError> {
    let config = &shared.config;
    let mut hard = Vec::new();
    if !rail.transports.is_empty() {
        hard.push(("TLS".to_owned(), rail.transports.join(",")));
    }
    if !rail.devices.is_empty() {
        hard.push(("NET_DEVICES".to_owned(), rail.devices.join(",")));
    }
    hard.extend(config.options.iter().cloned());
    Context::new(&settings(config), &hard).map_err(|error| match error {
        ContextError::Option(option, status) => UcxError::Option { option, reason: status.to_string() },
        ContextError::Init(Status::NO_DEVICE) => UcxError::NoTransport {
            rail: index,
            transports: rail.transports.clone(),
            devices: rail.devices.clone(),
            reason: Status::NO_DEVICE.to_string(),
        },
        ContextError::Init(status) => UcxError::Ucx { what: "making a context", reason: status.to_string() },
    })
}
