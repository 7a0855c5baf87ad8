//! Drives an owner's session: the one task that owns it, and the one place of this crate that reads a clock.
//!
//! All that happens comes in through one inbox: calls of the engine, and news of the connections. The driver deals with all that
//! has come before it looks again, and lets what it has to say go out then, or after a few dozen of them: so many messages are
//! one wake-up, one read and one write. The session's effects go out to connections that never make the driver wait. Listening and connecting are
//! tasks of their own.
//!
//! No rank is dropped because much waits for it: where more than `FULL` bytes wait for a rank, the driver keeps the credits of the
//! peers' links whose messages add to them, until they are written. Only a connection that takes nothing for 30 seconds is given up,
//! and a peer's for which more than the limit waits. Long messages (hellos) are decoded beside the driver, a few at a time.
//! What two engines are to each other (compatible or not, the map of peers) is still computed on the driver, once for each pair
//! of engines and salt.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_geometry::request::SrcGroup;
use kvferry_geometry::units::{ItemId, RankId, TokenRange, Tokens};
use kvferry_proto::handshake::{Allowed, Claim};
use kvferry_proto::lease::Offer;
use kvferry_proto::manifest::{EngineManifest, JoinError};
use kvferry_proto::names::{Attempt, Fence, LeaseId};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, PullId};
use kvferry_session::owner::{LinkId, OfferError, OwnerSession, PullWish, RankLinkId, Ttl};
use kvferry_session::snapshot::Snapshot;
use kvferry_session::{Delivered, Failed, StreamError};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::connection::{Common, LINGER, Stream};
use crate::memory::{MemoryEnd, OwnerEnd};
use crate::metrics::Known;
use crate::owner::options::ConnectionLimits;
use crate::secure::Security;
use crate::spans::PullSpan;

mod effects;
pub(crate) mod events;
pub(crate) mod inbox;
mod links;
mod observe;

use effects::Greeted;
use events::{Events, EventsEnd, OwnerEvent};
use inbox::{Inbox, Sender};
pub(crate) use links::{Listeners, PeerListener, SocketFile};
use links::{Peer, RankLink};
use observe::Observer;

/// How long the driver may be busy before it looks whether something is overdue.
const OVERDUE: Duration = Duration::from_millis(10);
/// After so many messages and calls what they have led to goes out, though more wait: others begin with it meanwhile. With much more
/// at a time engines and ranks take turns instead of working beside each other.
const PIECE: usize = 32;

/// The time since this value was made. The only clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> Duration {
        self.0.elapsed()
    }

    fn at(self, time: Duration) -> tokio::time::Instant {
        // A deadline beyond all reason is as good as none: look again in an hour.
        let soon = self.0.checked_add(time).unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::time::Instant::from_std(soon)
    }
}

/// How far the engine is, for those who wait for it.
#[derive(Clone, Debug)]
pub(crate) enum Progress {
    Joining(Vec<RankId>),
    Ready(Arc<EngineManifest>),
    Refused(JoinError),
}

/// How a pull has ended. In a box, since it passes through several hands.
pub(crate) type Outcome = Box<Result<Delivered, Failed>>;

/// A call of the engine.
#[derive(Debug)]
pub(crate) enum Command {
    Offer {
        lease: LeaseId,
        offer: Offer,
        ttl: Ttl,
        /// Whether its bytes are still being computed.
        streamed: bool,
        reply: oneshot::Sender<Result<Fence, OfferError>>,
    },
    /// Something is said of a lease that is still being computed; the reply is the attempt that runs now.
    Stream {
        lease: LeaseId,
        said: Said,
        reply: oneshot::Sender<Result<Attempt, StreamError>>,
    },
    Withdraw {
        lease: LeaseId,
        reply: oneshot::Sender<bool>,
    },
    /// The `number`-th pull of this owner.
    Pull {
        number: u64,
        wish: Box<PullWish>,
        /// Who wants to know how much is in place.
        progress: Option<watch::Sender<Tokens>>,
        done: oneshot::Sender<Outcome>,
        /// Where somebody wants to see it.
        span: Option<Box<PullSpan>>,
    },
    Cancel {
        pull: PullId,
    },
    Decline {
        address: String,
        fence: Box<Fence>,
    },
    Snapshot {
        reply: oneshot::Sender<Box<Snapshot>>,
    },
    /// The reply comes once nothing is open any more.
    Drain {
        reply: oneshot::Sender<()>,
    },
    Quarantined {
        reply: oneshot::Sender<usize>,
    },
    Shutdown {
        reply: oneshot::Sender<()>,
    },
    /// Nobody can call any more.
    Abandoned,
}

/// What an engine says of a stream.
#[derive(Debug)]
pub(crate) enum Said {
    Extend { attempt: Attempt, groups: Vec<SrcGroup> },
    Ready { attempt: Attempt, items: Vec<ItemId>, tokens: TokenRange },
    Seal { attempt: Attempt, groups: Vec<SrcGroup> },
    Restart { groups: Vec<SrcGroup> },
}

/// Who waits for a pull.
#[derive(Debug)]
struct Waiting {
    done: oneshot::Sender<Outcome>,
    progress: Option<watch::Sender<Tokens>>,
}

/// What happens, as the driver is told.
#[derive(Debug)]
pub(crate) enum News {
    /// The engine calls.
    Called(Command),
    /// Another owner has connected, at that time, and has proven what it can.
    Accepted(Stream, Proven, Duration),
    /// Somebody has connected and could not prove who it is.
    NotAccepted(String),
    /// Another owner of this process wants a link.
    MemoryAccepted(MemoryEnd),
    /// An owner that we wanted a link to is connected, or is not.
    Connected(LinkId, Result<(Stream, Proven), String>),
    /// The same for an owner of this process.
    MemoryConnected(LinkId, MemoryEnd),
    PeerSaid(LinkId, Vec<PeerMessage>),
    /// Its hello has begun so, and is still being read.
    PeerClaims(LinkId, Claim),
    PeerNonsense(LinkId, String),
    PeerClosed(LinkId, String),
    /// A rank has connected.
    RankAccepted(UnixStream),
    /// A rank of this process has come.
    RankJoined(OwnerEnd),
    RankSaid(RankLinkId, Vec<FromRank>),
    RankClosed(RankLinkId, String),
    /// Little waits at a connection any more.
    Drained,
}

/// The engines for which a link's credentials stand; `None` where it has none.
pub(crate) type Proven = Option<Arc<Allowed>>;

/// What bounds the driver's sockets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) limits: ConnectionLimits,
    /// How many ranks the engine has.
    pub(crate) ranks: u32,
    /// How long connecting and proving may take.
    pub(crate) handshake: Duration,
    /// Whether links may lead to other hosts in plaintext.
    pub(crate) plaintext_beyond_loopback: bool,
}

/// The driver is to end.
struct End(Option<oneshot::Sender<()>>);

pub(crate) struct Driver {
    session: OwnerSession,
    clock: Clock,
    inbox: Inbox<News>,
    tell: Sender<News>,
    observer: Observer,
    events: Events,
    progress: watch::Sender<Progress>,
    peers: HashMap<LinkId, Peer>,
    ranks: HashMap<RankLinkId, RankLink>,
    pulls: HashMap<PullId, Waiting>,
    /// Links and rank links that something was sent on since the last flush.
    said: (Vec<LinkId>, Vec<RankLinkId>),
    /// Links whose credits are kept until what they have filled is written.
    paused: BTreeSet<LinkId>,
    /// What is said first to engines that were not met before.
    hello: Option<Greeted>,
    /// How much was dealt with since the last flush.
    unflushed: usize,
    /// Whether something that was just sent waits behind too much.
    full: bool,
    /// Links that others have begun and that are not up.
    strangers: BTreeSet<LinkId>,
    /// Links whose sockets are connecting, or prove themselves.
    connecting: HashSet<LinkId>,
    /// Shared by the connections.
    common: Arc<Common>,
    bounds: Bounds,
    security: Security,
    /// Who wait until nothing is open any more.
    drained: Vec<oneshot::Sender<()>>,
    /// What runs beside the driver and ends with it.
    tasks: JoinSet<()>,
    /// Kept for their drops.
    listening: (Vec<SocketFile>, Option<crate::memory::Listening>),
}

impl Driver {
    pub(crate) fn new(
        session: OwnerSession,
        (tell, inbox): (Sender<News>, Inbox<News>),
        events: EventsEnd,
        progress: watch::Sender<Progress>,
        bounds: Bounds,
        security: Security,
        listeners: Listeners,
    ) -> Self {
        let mut tasks = JoinSet::new();
        let clock = Clock::start();
        let listening = links::listen(listeners, &mut tasks, &tell, &security, &bounds, clock);
        let observer = Observer::new(session.snapshot(Duration::ZERO).engine);
        Self {
            session,
            observer,
            clock,
            inbox,
            tell,
            events: Events::new(events),
            progress,
            peers: HashMap::new(),
            ranks: HashMap::new(),
            pulls: HashMap::new(),
            said: (Vec::new(), Vec::new()),
            paused: BTreeSet::new(),
            hello: None,
            unflushed: 0,
            full: false,
            strangers: BTreeSet::new(),
            connecting: HashSet::new(),
            common: Arc::new(Common::new(&bounds.limits)),
            bounds,
            security,
            drained: Vec::new(),
            tasks,
            listening,
        }
    }

    /// Until the engine shuts the owner down or drops it.
    pub(crate) async fn run(mut self) {
        let mut news = Vec::new();
        let mut stepped = Duration::ZERO;
        let sleep = tokio::time::sleep_until(self.clock.at(Duration::ZERO));
        tokio::pin!(sleep);
        // When the sleep ends: waking too early is cheaper than to set it each time.
        let mut armed = Duration::ZERO;
        loop {
            self.inbox.take(&mut news);
            let idle = news.is_empty();
            for one in news.drain(..) {
                let end = self.heard(one);
                self.dealt_with();
                if let Some(End(reply)) = end {
                    self.shut_down().await;
                    // Whoever asked need not wait for it.
                    let _ = reply.map(|reply| reply.send(()));
                    return;
                }
            }
            self.flush();
            if !idle && self.clock.now() < stepped.saturating_add(OVERDUE) {
                // Others of this runtime want their turn, too.
                tokio::task::coop::consume_budget().await;
                continue;
            }
            stepped = self.clock.now();
            let deadline = self.session.step(stepped);
            self.carry_out();
            self.flush();
            // Not before the step: the last of it may just have come to the end of its time.
            if !self.drained.is_empty() && self.session.is_drained() {
                for reply in self.drained.drain(..) {
                    // Whoever asked need not wait for it.
                    let _ = reply.send(());
                }
            }
            self.resume();
            while self.tasks.try_join_next().is_some() {}
            let quarantined = self.session.quarantined();
            let known = Known {
                quarantined,
                by_writers: self.observer.by_writers(quarantined, || self.session.snapshot(stepped)),
                bound: self.session.bound_leases(),
                ranks: self.bounds.ranks as usize,
                missing: self.session.missing().len(),
            };
            self.observer.standing(stepped, known);
            let Some(deadline) = deadline.into_iter().chain(self.observer.due()).min() else {
                self.inbox.filled().await;
                continue;
            };
            if deadline < armed || armed <= stepped {
                armed = deadline;
                sleep.as_mut().reset(self.clock.at(deadline));
            }
            tokio::select! {
                () = self.inbox.filled() => {}
                () = &mut sleep => armed = Duration::ZERO,
            }
        }
    }

    fn command(&mut self, command: Command) -> Option<End> {
        let now = self.clock.now();
        // Whoever has dropped the other end doesn't want the answer.
        match command {
            Command::Offer { lease, offer, ttl, streamed, reply } => {
                let offered = if streamed {
                    self.session.announce(lease, offer, ttl, now)
                } else {
                    self.session.offer(lease, offer, ttl, now)
                };
                self.observer.offered(&offered);
                let open = offered.is_ok();
                if reply.send(offered).is_err() && open {
                    // Nobody will ever know the reference.
                    self.session.withdraw(lease, now);
                }
            }
            Command::Stream { lease, said, reply } => {
                let said = match said {
                    Said::Extend { attempt, groups } => {
                        self.session.extend(lease, attempt, groups, now).map(|()| attempt)
                    }
                    Said::Ready { attempt, items, tokens } => {
                        self.session.region_ready(lease, attempt, &items, tokens, now).map(|()| attempt)
                    }
                    Said::Seal { attempt, groups } => self.session.seal(lease, attempt, groups, now).map(|()| attempt),
                    Said::Restart { groups } => self.session.restart(lease, groups, now),
                };
                drop(reply.send(said));
            }
            Command::Withdraw { lease, reply } => {
                let _ = reply.send(self.session.withdraw(lease, now));
            }
            Command::Pull { number, wish, progress, done, span } => {
                let mode = wish.mode;
                let pull = self.session.pull(wish, now);
                debug_assert_eq!(pull, PullId(number), "pulls are counted alike here and there");
                self.pulls.insert(pull, Waiting { done, progress });
                self.observer.pulling(pull, mode, span);
            }
            Command::Cancel { pull } => self.session.cancel(pull, now),
            Command::Decline { address, fence } => self.session.decline(&address, *fence, now),
            Command::Snapshot { reply } => {
                drop(reply.send(Box::new(self.session.snapshot(now))));
            }
            Command::Drain { reply } => {
                self.session.drain();
                self.drained.push(reply);
            }
            Command::Quarantined { reply } => {
                let _ = reply.send(self.session.quarantined());
            }
            Command::Shutdown { reply } => return Some(End(Some(reply))),
            Command::Abandoned => return Some(End(None)),
        }
        None
    }

    fn heard(&mut self, news: News) -> Option<End> {
        let now = self.clock.now();
        match news {
            News::Called(command) => return self.command(command),
            News::Accepted(stream, proven, since) => self.accept(stream, proven, since),
            News::NotAccepted(reason) => {
                let told = self.events.may_tell_of_stranger(now);
                self.observer.not_accepted(&reason, told);
                if told {
                    self.events.push(OwnerEvent::LinkFailed { address: None, reasons: vec![reason], refused: true });
                }
            }
            News::MemoryAccepted(end) => self.accept_memory(end),
            News::Connected(link, Ok((stream, proven))) => {
                self.connecting.remove(&link);
                if self.session.link_opened(link, proven, now) {
                    let peer = self.peer(link, stream);
                    self.peers.insert(link, peer);
                }
            }
            News::Connected(link, Err(reason)) => {
                self.connecting.remove(&link);
                self.session.link_closed(link, &reason, now);
            }
            News::MemoryConnected(link, end) => {
                // Dropped, it closes the link.
                if self.session.link_opened(link, None, now) {
                    self.peers.insert(link, Peer::Memory(end));
                }
            }
            News::PeerSaid(link, messages) => self.peer_said(link, messages),
            News::PeerClaims(link, claim) => self.session.peer_claims(link, &claim, now),
            News::PeerNonsense(link, reason) => self.session.link_fault(link, &reason, now),
            News::PeerClosed(link, reason) => {
                self.drop_peer(link);
                self.session.link_closed(link, &reason, now);
            }
            News::RankAccepted(stream) => self.accept_rank(stream),
            News::RankJoined(end) => self.accept_memory_rank(end),
            News::RankSaid(link, messages) => {
                for message in messages {
                    self.observer.rank_said(&message);
                    self.session.rank_message(link, message, now);
                    self.dealt_with();
                }
                if let Some(RankLink::Socket(connection)) = self.ranks.get(&link) {
                    connection.credit();
                }
            }
            News::RankClosed(link, reason) => {
                self.ranks.remove(&link);
                self.session.rank_closed(link, &reason, now);
            }
            News::Drained => {}
        }
        None
    }

    fn peer_said(&mut self, link: LinkId, messages: Vec<PeerMessage>) {
        let now = self.clock.now();
        self.full = false;
        for message in messages {
            self.observer.heard(link, &message);
            self.session.peer_message(link, message, now);
            self.dealt_with();
        }
        if let Some(Peer::Socket(connection)) = self.peers.get(&link) {
            if self.full {
                self.paused.insert(link);
            } else {
                connection.credit();
            }
        }
    }

    /// Ends all requests, and waits a little until all that was said is written. Nobody can connect from the beginning of that on,
    /// and whatever was listened on is free when it is done.
    async fn shut_down(&mut self) {
        // The listeners are the tasks' own: they are closed when the tasks have ended, not when they are told to.
        self.tasks.shutdown().await;
        self.listening = (Vec::new(), None);
        self.session.shut_down(self.clock.now());
        self.carry_out();
        self.flush();
        let peers = self.peers.drain().filter_map(|(_, peer)| peer.close());
        let writers: Vec<_> = peers.chain(self.ranks.drain().filter_map(|(_, rank)| rank.close())).collect();
        let written = async {
            for writer in writers {
                // However it ended, it has.
                drop(writer.await);
            }
        };
        // Who takes nothing doesn't get it.
        drop(tokio::time::timeout(LINGER, written).await);
    }
}
