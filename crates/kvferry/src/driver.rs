//! Drives an owner's session: the one task that owns it, and the one place of this crate that reads a clock.
//!
//! All that happens comes in through two bounded channels, calls of the engine and news of the connections; the session's
//! effects go out to connections that never make the driver wait. Listening and connecting are tasks of their own.
//!
//! No rank is dropped because much waits for it: where more than `FULL` bytes wait for a rank, the driver pauses the peers'
//! links whose messages add to them, until they are written. Only a connection that takes nothing for 30 seconds is given up,
//! and a peer's for which more than `TOO_MUCH` waits. What is read is bounded by number, not by bytes: at most `NEWS` messages
//! and one partial frame for each of `CONNECTIONS` connections, and a frame may have 16 MiB. Hellos, which cost the most to
//! read, are read beside the driver, a few at a time. What two engines are to each other (compatible or not, the map of
//! peers) is still computed on the driver, once for each pair of engines and salt.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Offer;
use kvferry_proto::manifest::{EngineManifest, JoinError};
use kvferry_proto::names::{Fence, LeaseId};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, PullId, RankFault, Stage, ToRank};
use kvferry_proto::wire::{self, Frame};
use kvferry_session::owner::{Effect, LinkId, OfferError, OwnerSession, PullWish, RankLinkId};
use kvferry_session::{Delivered, Failed};
use tokio::net::UnixListener;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::address::Address;
use crate::connection::{Connection, DRAINED, FULL, Heard, LINGER, Stream};
use crate::owner::{OwnerEvent, PeerListener};

/// News of connections that wait for the driver, at most; then the connections wait.
const NEWS: usize = 64;
/// Connections of each kind, at most; more are closed at once.
const CONNECTIONS: usize = 4096;
/// Bytes that wait for a peer, at most: one that takes so little is of no use.
const TOO_MUCH: usize = 256 << 20;
/// Hellos that are read at a time: each may be long, and nobody knows yet who sends it.
const HELLOS: usize = 2;
/// How often abandoned pulls are looked for.
const SWEEP: Duration = Duration::from_secs(1);

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

/// A call of the engine.
#[derive(Debug)]
pub(crate) enum Command {
    Offer { lease: LeaseId, offer: Offer, reply: oneshot::Sender<Result<Fence, OfferError>> },
    Withdraw { lease: LeaseId, reply: oneshot::Sender<bool> },
    Pull { wish: Box<PullWish>, done: oneshot::Sender<Result<Delivered, Failed>>, reply: oneshot::Sender<PullId> },
    Cancel { pull: PullId },
    Quarantined { reply: oneshot::Sender<usize> },
    Shutdown { reply: oneshot::Sender<()> },
}

/// News of connections.
enum News {
    Peer(Stream),
    Rank(Stream),
    Connected(LinkId, Result<Stream, String>),
    PeerSaid(LinkId, Box<PeerMessage>),
    PeerNonsense(LinkId, String),
    PeerClosed(LinkId, String),
    RankSaid(RankLinkId, Box<FromRank>),
    RankClosed(RankLinkId, String),
}

/// Why the driver woke.
enum Wake {
    Command(Option<Command>),
    News(News),
    Sweep,
    Time,
}

pub(crate) struct Listeners {
    pub(crate) peers: Option<PeerListener>,
    pub(crate) ranks: UnixListener,
    pub(crate) sockets: Vec<SocketFile>,
}

/// The file of a Unix socket that we listen on; it is removed with this.
#[derive(Debug)]
pub(crate) struct SocketFile(pub(crate) PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Gone already is as good.
        drop(std::fs::remove_file(&self.0));
    }
}

pub(crate) struct Driver {
    session: OwnerSession,
    clock: Clock,
    commands: mpsc::Receiver<Command>,
    news: mpsc::Receiver<News>,
    tell: mpsc::Sender<News>,
    events: mpsc::UnboundedSender<OwnerEvent>,
    progress: watch::Sender<Progress>,
    peers: HashMap<LinkId, Connection>,
    ranks: HashMap<RankLinkId, Connection>,
    pulls: HashMap<PullId, oneshot::Sender<Result<Delivered, Failed>>>,
    /// Links that wait until what they have filled is written.
    paused: HashSet<LinkId>,
    /// Whether something that was just sent waits behind too much.
    full: bool,
    drained: Arc<Notify>,
    hellos: Arc<Semaphore>,
    /// What runs beside the driver and ends with it.
    tasks: JoinSet<()>,
    _sockets: Vec<SocketFile>,
}

impl Driver {
    pub(crate) fn new(
        session: OwnerSession,
        commands: mpsc::Receiver<Command>,
        events: mpsc::UnboundedSender<OwnerEvent>,
        progress: watch::Sender<Progress>,
        listeners: Listeners,
    ) -> Self {
        let (tell, news) = mpsc::channel(NEWS);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept_ranks(listeners.ranks, tell.clone()));
        if let Some(listener) = listeners.peers {
            tasks.spawn(accept_peers(listener, tell.clone()));
        }
        Self {
            session,
            clock: Clock::start(),
            commands,
            news,
            tell,
            events,
            progress,
            peers: HashMap::new(),
            ranks: HashMap::new(),
            pulls: HashMap::new(),
            paused: HashSet::new(),
            full: false,
            drained: Arc::new(Notify::new()),
            hellos: Arc::new(Semaphore::new(HELLOS)),
            tasks,
            _sockets: listeners.sockets,
        }
    }

    /// Until the engine shuts the owner down or drops it.
    pub(crate) async fn run(mut self) {
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.carry_out();
            let deadline = self.session.step(self.clock.now());
            self.carry_out();
            self.resume();
            match self.wake(deadline, &mut sweep).await {
                Wake::Command(Some(Command::Shutdown { reply })) => {
                    self.shut_down().await;
                    // Whoever asked need not wait for it.
                    let _ = reply.send(());
                    return;
                }
                Wake::Command(Some(command)) => self.command(command),
                Wake::Command(None) => return self.shut_down().await,
                Wake::News(news) => {
                    self.heard(news);
                    // What has come meanwhile needs no timer of its own.
                    for _ in 0..64 {
                        let Ok(news) = self.news.try_recv() else { break };
                        self.carry_out();
                        self.heard(news);
                    }
                }
                Wake::Sweep => self.sweep(),
                Wake::Time => {}
            }
        }
    }

    /// Sleeps until something happens.
    async fn wake(&mut self, deadline: Option<Duration>, sweep: &mut tokio::time::Interval) -> Wake {
        let sleep = tokio::time::sleep_until(self.clock.at(deadline.unwrap_or(Duration::MAX)));
        tokio::select! {
            command = self.commands.recv() => Wake::Command(command),
            Some(news) = self.news.recv() => Wake::News(news),
            () = self.drained.notified(), if !self.paused.is_empty() => Wake::Time,
            () = sleep, if deadline.is_some() => Wake::Time,
            _ = sweep.tick(), if !self.pulls.is_empty() => Wake::Sweep,
            Some(_) = self.tasks.join_next() => Wake::Time,
        }
    }

    fn command(&mut self, command: Command) {
        let now = self.clock.now();
        // Whoever has dropped the other end doesn't want the answer.
        match command {
            Command::Offer { lease, offer, reply } => {
                let offered = self.session.offer(lease, offer);
                let open = offered.is_ok();
                if reply.send(offered).is_err() && open {
                    // Nobody will ever know the reference.
                    self.session.withdraw(lease);
                }
            }
            Command::Withdraw { lease, reply } => {
                let _ = reply.send(self.session.withdraw(lease));
            }
            Command::Pull { wish, done, reply } => {
                let pull = self.session.pull(*wish, now);
                self.pulls.insert(pull, done);
                if reply.send(pull).is_err() {
                    self.session.cancel(pull, now);
                }
            }
            Command::Cancel { pull } => self.session.cancel(pull, now),
            Command::Quarantined { reply } => {
                let _ = reply.send(self.session.quarantined());
            }
            Command::Shutdown { .. } => {}
        }
    }

    fn heard(&mut self, news: News) {
        let now = self.clock.now();
        match news {
            News::Peer(stream) => {
                if self.peers.len() < CONNECTIONS {
                    let link = self.session.accept(now);
                    let connection = self.peer(link, stream);
                    self.peers.insert(link, connection);
                }
            }
            News::Rank(stream) => {
                if self.ranks.len() < CONNECTIONS {
                    let link = self.session.accept_rank(now);
                    let connection = self.rank(link, stream);
                    self.ranks.insert(link, connection);
                }
            }
            News::Connected(link, Ok(stream)) => {
                if self.session.link_opened(link, now) {
                    let connection = self.peer(link, stream);
                    self.peers.insert(link, connection);
                }
            }
            News::Connected(link, Err(reason)) => self.session.link_closed(link, &reason, now),
            News::PeerSaid(link, message) => {
                self.full = false;
                self.session.peer_message(link, *message, now);
                self.carry_out();
                if self.full
                    && let Some(connection) = self.peers.get(&link)
                {
                    connection.pause(true);
                    self.paused.insert(link);
                }
            }
            News::PeerNonsense(link, reason) => self.session.link_fault(link, &reason, now),
            News::PeerClosed(link, reason) => {
                self.peers.remove(&link);
                self.session.link_closed(link, &reason, now);
            }
            News::RankSaid(link, message) => self.session.rank_message(link, *message, now),
            News::RankClosed(link, reason) => {
                self.ranks.remove(&link);
                self.session.rank_closed(link, &reason, now);
            }
        }
    }

    fn peer(&self, link: LinkId, stream: Stream) -> Connection {
        let (tell, hellos) = (self.tell.clone(), self.hellos.clone());
        Connection::start(stream, self.drained.clone(), move |heard| {
            let (tell, hellos) = (tell.clone(), hellos.clone());
            async move {
                let news = match heard {
                    Heard::Frame(frame) => match read_peer(frame, &hellos).await {
                        Ok(message) => News::PeerSaid(link, Box::new(message)),
                        Err(reason) => News::PeerNonsense(link, reason),
                    },
                    Heard::Nonsense(reason) => News::PeerNonsense(link, reason),
                    Heard::Closed(reason) => News::PeerClosed(link, reason),
                };
                let more = matches!(news, News::PeerSaid(..));
                tell.send(news).await.is_ok() && more
            }
        })
    }

    fn rank(&self, link: RankLinkId, stream: Stream) -> Connection {
        let tell = self.tell.clone();
        Connection::start(stream, self.drained.clone(), move |heard| {
            let news = match heard {
                Heard::Frame(frame) => match wire::decode_from_rank(&frame) {
                    Ok(message) => News::RankSaid(link, Box::new(message)),
                    Err(error) => News::RankClosed(link, error.to_string()),
                },
                Heard::Nonsense(reason) | Heard::Closed(reason) => News::RankClosed(link, reason),
            };
            let more = matches!(news, News::RankSaid(..));
            let tell = tell.clone();
            async move { tell.send(news).await.is_ok() && more }
        })
    }

    /// Does what the session wants done. Failures come back to the session, which may want more.
    fn carry_out(&mut self) {
        while let Some(effect) = self.session.next_effect() {
            match effect {
                Effect::Connect { link, address } => self.connect(link, &address),
                Effect::SendPeer { link, message } => self.send_peer(link, &message),
                Effect::ClosePeer { link } => drop(self.peers.remove(&link)),
                Effect::SendRank { link, message } => self.send_rank(link, message),
                Effect::CloseRank { link } => drop(self.ranks.remove(&link)),
                Effect::Ready(manifest) => {
                    self.progress.send_replace(Progress::Ready(manifest));
                }
                Effect::JoinRefused(error) => {
                    self.progress.send_if_modified(|p| {
                        let joining = matches!(p, Progress::Joining(_));
                        if joining {
                            *p = Progress::Refused(error.clone());
                        }
                        joining
                    });
                    self.event(OwnerEvent::JoinRefused(error));
                }
                Effect::RankLost { rank, reason } => self.event(OwnerEvent::RankLost { rank, reason }),
                Effect::LeaseClosed { fence, how } => {
                    self.event(OwnerEvent::Released { lease: fence.lease, how });
                }
                Effect::PullEnded { pull, result } => {
                    if let Some(done) = self.pulls.remove(&pull) {
                        // Nobody waits for an abandoned pull.
                        drop(done.send(*result));
                    }
                }
                // The session knows no other effects; a newer one would be for a newer driver.
                _ => {}
            }
        }
        self.progress.send_if_modified(|p| match p {
            Progress::Joining(missing) => {
                let now_missing = self.session.missing();
                let changed = *missing != now_missing && !now_missing.is_empty();
                if changed {
                    *missing = now_missing;
                }
                changed
            }
            _ => false,
        });
    }

    fn send_rank(&mut self, link: RankLinkId, message: ToRank) {
        let now = self.clock.now();
        match wire::encode_to_rank(&message) {
            Ok(frame) => {
                let sent = self.ranks.get(&link).filter(|connection| connection.send(frame)).map(Connection::waiting);
                match sent {
                    Some(waiting) => self.full |= waiting > FULL,
                    None => {
                        self.ranks.remove(&link);
                        self.session.rank_closed(link, "its connection takes nothing any more", now);
                    }
                }
            }
            // The order fails, not the rank.
            Err(error) => {
                if let Some(answer) = not_ordered(&message, &error.to_string()) {
                    self.session.rank_message(link, answer, now);
                }
            }
        }
    }

    fn send_peer(&mut self, link: LinkId, message: &PeerMessage) {
        let sent = match wire::encode_peer(message) {
            Ok(frame) => match self.peers.get(&link) {
                Some(connection) if connection.send(frame) && connection.waiting() <= TOO_MUCH => {
                    self.full |= connection.waiting() > FULL;
                    Ok(())
                }
                _ => Err("its connection takes nothing any more".to_owned()),
            },
            Err(error) => Err(error.to_string()),
        };
        if let Err(reason) = sent {
            self.peers.remove(&link);
            self.session.link_closed(link, &reason, self.clock.now());
        }
    }

    fn connect(&mut self, link: LinkId, address: &str) {
        let tell = self.tell.clone();
        let address: Result<Address, _> = address.parse();
        self.tasks.spawn(async move {
            let connected = match address {
                Ok(address) => Stream::connect(&address).await.map_err(|e| format!("cannot connect: {e}")),
                Err(error) => Err(error.to_string()),
            };
            // Refused only when the driver is gone.
            drop(tell.send(News::Connected(link, connected)).await);
        });
    }

    /// Gives up the pulls that nobody waits for.
    fn sweep(&mut self) {
        let now = self.clock.now();
        let abandoned: Vec<PullId> = self.pulls.iter().filter(|(_, d)| d.is_closed()).map(|(id, _)| *id).collect();
        for pull in abandoned {
            self.session.cancel(pull, now);
        }
    }

    fn event(&self, event: OwnerEvent) {
        // The engine may have dropped its stream of events.
        drop(self.events.send(event));
    }

    /// Lets the paused links go on once little waits for the ranks.
    fn resume(&mut self) {
        if self.paused.is_empty() || self.ranks.values().any(|c| c.waiting() > DRAINED) {
            return;
        }
        let peers = &self.peers;
        self.paused.retain(|link| match peers.get(link) {
            Some(connection) if connection.waiting() > DRAINED => true,
            Some(connection) => {
                connection.pause(false);
                false
            }
            None => false,
        });
    }

    /// Ends all requests, and waits a little until all that was said is written.
    async fn shut_down(&mut self) {
        self.session.shut_down(self.clock.now());
        self.carry_out();
        let peers = self.peers.drain().map(|(_, connection)| connection.close());
        let writers: Vec<_> = peers.chain(self.ranks.drain().map(|(_, connection)| connection.close())).collect();
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

/// Reads a peer's message; a hello beside the driver, and only a few at a time.
async fn read_peer(frame: Frame, hellos: &Semaphore) -> Result<PeerMessage, String> {
    let read = |frame: &Frame| wire::decode_peer(frame).map_err(|e| e.to_string());
    if frame.kind != wire::kind::HELLO {
        return read(&frame);
    }
    let _permit = hellos.acquire().await.map_err(|e| e.to_string())?;
    tokio::task::spawn_blocking(move || read(&frame)).await.map_err(|e| e.to_string())?
}

/// What a rank would have answered to an order that can't be written.
fn not_ordered(message: &ToRank, why: &str) -> Option<FromRank> {
    let fault = || RankFault { stage: Stage::Plan, text: why.to_owned(), in_doubt: false, bad: Vec::new() };
    match message {
        ToRank::Pull(order) => Some(FromRank::Pulled { pull: order.pull, result: Err(fault()) }),
        ToRank::Digest(order) => Some(FromRank::Digested { ticket: order.ticket, pieces: Err(why.to_owned()) }),
        ToRank::Gather(order) => Some(FromRank::Gathered { ticket: order.ticket, result: Err(why.into()) }),
        // All others are shorter than what they were made from, which came in a frame.
        _ => None,
    }
}

async fn accept_ranks(listener: UnixListener, tell: mpsc::Sender<News>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if tell.send(News::Rank(Stream::Unix(stream))).await.is_err() {
                    return;
                }
            }
            Err(_) => pause().await,
        }
    }
}

async fn accept_peers(listener: PeerListener, tell: mpsc::Sender<News>) {
    loop {
        let accepted = match &listener {
            PeerListener::Tcp(l) => l.accept().await.map(|(s, _)| Stream::Tcp(s)),
            PeerListener::Unix(l) => l.accept().await.map(|(s, _)| Stream::Unix(s)),
        };
        match accepted {
            Ok(stream) => {
                if tell.send(News::Peer(stream)).await.is_err() {
                    return;
                }
            }
            Err(_) => pause().await,
        }
    }
}

/// After a refused accept: the process is out of descriptors, or the caller has gone. Either passes.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::compat::CompatOptions;
    use kvferry_geometry::digest::Digest;
    use kvferry_geometry::peers::PeerOptions;
    use kvferry_geometry::request::Request;
    use kvferry_geometry::units::{Bytes, Tokens};
    use kvferry_proto::peer::Gathered;
    use kvferry_proto::rank::{Assurance, DigestOrder, GatherOrder, Pairing, PullOrder};

    use super::*;

    /// Whoever waits for what an order brings hears that it was not written.
    #[test]
    fn every_order_that_cannot_be_written_has_an_answer() {
        let digest = Digest::from_bytes([0; 32]);
        let (options, compat) = (PeerOptions::default(), CompatOptions::default());
        let pairing = Pairing { peer: digest, options, compat, peer_map: digest };
        let request = Request { tokens: Tokens::ZERO, src: Vec::new(), dst: Vec::new() };
        let (dst, ticket, why) = (RankId::new(0), 7, "it is too long");
        let order = PullOrder { pull: PullId(7), pairing, request: request.clone(), assurance: Assurance::Fenced };
        let answer = not_ordered(&ToRank::Pull(order), why);
        assert!(matches!(answer, Some(FromRank::Pulled { pull: PullId(7), result: Err(f) }) if f.text == why));
        let order = DigestOrder { ticket, pairing, dst, request: request.clone(), windows: Vec::new() };
        let answer = not_ordered(&ToRank::Digest(order), why);
        assert!(matches!(answer, Some(FromRank::Digested { ticket: 7, pieces: Err(text) }) if text == why));
        let gathered = Gathered { bytes: Bytes::ZERO, batch: digest };
        let order = GatherOrder { ticket, pairing, dst, gathered, request };
        let answer = not_ordered(&ToRank::Gather(order), why);
        assert!(matches!(answer, Some(FromRank::Gathered { ticket: 7, result: Err(e) }) if e.to_string() == why));
        assert_eq!(not_ordered(&ToRank::GatherEnd(7), why), None);
    }
}
