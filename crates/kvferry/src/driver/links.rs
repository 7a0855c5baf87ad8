//! Who is connected, and how connections come to be.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvferry_session::owner::{LinkId, RankLinkId};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use super::inbox::Sender;
use super::{Bounds, Clock, Driver, News, Progress, Proven};
use crate::address::{Address, AddressError};
use crate::connection::{Connection, Stream};
use crate::memory::{self, Listening, MemoryEnd, OwnerEnd};
use crate::secure::{self, SecureError, Secured, Security};

/// Of the links that there may be, one in so many may be in the making: references that lead nowhere don't keep others out.
const CONNECTING: usize = 4;
/// How long a TCP peer may be silent before it is asked whether it is there, and again.
const PROBE: Duration = Duration::from_secs(15);
/// How long it may leave anything unacknowledged, in ms.
const UNHEARD_MS: u32 = 30_000;

/// A link to another owner.
pub(super) enum Peer {
    Socket(Connection),
    Memory(MemoryEnd),
}

impl Peer {
    /// Lets go out what was sent; false if nobody is there any more, as far as that is known at once.
    pub(super) fn flush(&mut self) -> bool {
        match self {
            Self::Socket(connection) => {
                connection.flush();
                true
            }
            Self::Memory(end) => end.flush(),
        }
    }

    /// Closes it; the handle tells when all that was said is written.
    pub(super) fn close(self) -> Option<JoinHandle<()>> {
        match self {
            Self::Socket(connection) => Some(connection.close()),
            Self::Memory(_) => None,
        }
    }
}

/// A link to a rank.
pub(super) enum RankLink {
    Socket(Connection),
    Memory(OwnerEnd),
}

impl RankLink {
    /// Lets go out what was sent; false if the rank is gone, as far as that is known at once.
    pub(super) fn flush(&mut self) -> bool {
        match self {
            Self::Socket(connection) => {
                connection.flush();
                true
            }
            Self::Memory(end) => end.flush(),
        }
    }

    pub(super) fn waiting(&self) -> usize {
        match self {
            Self::Socket(connection) => connection.waiting(),
            Self::Memory(end) => end.waiting(),
        }
    }

    pub(super) fn close(self) -> Option<JoinHandle<()>> {
        match self {
            Self::Socket(connection) => Some(connection.close()),
            Self::Memory(_) => None,
        }
    }
}

/// What an owner listens on.
pub(crate) struct Listeners {
    pub(crate) peers: Option<PeerListener>,
    pub(crate) ranks: Option<UnixListener>,
    pub(crate) sockets: Vec<SocketFile>,
}

/// Where other owners connect.
#[derive(Debug)]
pub(crate) enum PeerListener {
    Tcp(TcpListener),
    Unix(UnixListener),
    Memory(Listening),
}

/// The file of a Unix socket that we listen on; it is removed with this, unless it is another one by then.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    made: Option<FileIdentity>,
}

/// Device, inode, and when it was made: the inode's number may be used again, and `chmod` doesn't change the time.
type FileIdentity = (u64, u64, i64, i64);

impl SocketFile {
    /// Of a socket that was just bound.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), made: identity(path) }
    }
}

fn identity(path: &Path) -> Option<FileIdentity> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.made.is_some() && identity(&self.path) == self.made {
            // Gone already is as good.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Begins to listen; gives what must be kept meanwhile.
pub(super) fn listen(
    listeners: Listeners,
    tasks: &mut JoinSet<()>,
    tell: &Sender<News>,
    security: &Security,
    bounds: &Bounds,
    clock: Clock,
) -> (Vec<SocketFile>, Option<Listening>) {
    if let Some(ranks) = listeners.ranks {
        tasks.spawn(accept_ranks(ranks, tell.clone()));
    }
    let acceptor = match listeners.peers {
        Some(PeerListener::Tcp(listener)) => Acceptor::Tcp(listener),
        Some(PeerListener::Unix(listener)) => Acceptor::Unix(listener),
        Some(PeerListener::Memory(listening)) => return (listeners.sockets, Some(listening)),
        None => return (listeners.sockets, None),
    };
    let bounds = (bounds.limits.strangers, bounds.handshake);
    tasks.spawn(accept_peers(acceptor, tell.clone(), security.clone(), bounds, clock));
    (listeners.sockets, None)
}

impl Driver {
    /// `since`: from when on the time counts that its end may take until both know each other.
    pub(super) fn accept(&mut self, stream: Stream, proven: Proven, since: Duration) {
        if self.links() >= self.bounds.limits.peers {
            return;
        }
        let now = self.clock.now();
        if self.strangers.len() >= self.bounds.limits.strangers
            && let Some(oldest) = self.strangers.first().copied()
        {
            self.drop_peer(oldest);
            self.session.link_closed(oldest, "too many others connect at once", now);
        }
        let link = self.session.accept_after(now.saturating_sub(since), proven, now);
        let peer = self.peer(link, stream);
        self.peers.insert(link, peer);
        self.strangers.insert(link);
    }

    pub(super) fn accept_memory(&mut self, end: MemoryEnd) {
        if self.links() >= self.bounds.limits.peers {
            return;
        }
        let now = self.clock.now();
        let link = self.session.accept(None, now);
        if end.answer(MemoryEnd::new(self.tell.clone(), link)) {
            self.peers.insert(link, Peer::Memory(end));
        } else {
            self.session.link_closed(link, "the owner at the other end has ended", now);
        }
    }

    pub(super) fn accept_rank(&mut self, stream: UnixStream) {
        if self.has_room_for_ranks() {
            let link = self.session.accept_rank(self.clock.now());
            let connection = Connection::start(Stream::Unix(stream), link, self.tell.clone(), self.common.clone());
            self.ranks.insert(link, RankLink::Socket(connection));
            self.another_rank();
        }
    }

    pub(super) fn accept_memory_rank(&mut self, end: OwnerEnd) {
        if self.has_room_for_ranks() {
            let link: RankLinkId = self.session.accept_rank(self.clock.now());
            if end.accept(link) {
                self.ranks.insert(link, RankLink::Memory(end));
                self.another_rank();
            } else {
                self.session.rank_closed(link, "the rank has ended", self.clock.now());
            }
        }
    }

    /// One that was refused may have been the wrong one, or too early: this one may be the right one.
    fn another_rank(&self) {
        if matches!(*self.progress.borrow(), Progress::Refused(_)) {
            self.progress.send_replace(Progress::Joining(self.session.missing()));
        }
    }

    /// Links to other owners: those that are there, and those that are being made.
    fn links(&self) -> usize {
        self.peers.len().saturating_add(self.connecting.len())
    }

    /// Each rank twice (a new one may come before the old one is known to be gone), and some that are refused by name.
    fn has_room_for_ranks(&self) -> bool {
        let ranks = usize::try_from(self.bounds.ranks).unwrap_or(usize::MAX);
        self.ranks.len() < ranks.saturating_mul(2).saturating_add(64)
    }

    /// Closes a link after what was sent on it.
    pub(super) fn drop_peer(&mut self, link: LinkId) {
        self.strangers.remove(&link);
        drop(self.peers.remove(&link));
    }

    pub(super) fn peer(&self, link: LinkId, stream: Stream) -> Peer {
        Peer::Socket(Connection::start(stream, link, self.tell.clone(), self.common.clone()))
    }

    pub(super) fn connect(&mut self, link: LinkId, address: &str) {
        let parsed: Result<Address, AddressError> = address.parse();
        let most = self.bounds.limits.peers;
        if let Ok(to) = &parsed
            && !to.is_local()
            && !self.security.protects()
            && !self.bounds.plaintext_beyond_loopback
        {
            let reason = "it is another host, and links are neither encrypted nor authenticated; say how with `security`, or \
                          say `plaintext_beyond_loopback` where the network is trusted";
            return self.session.link_forbidden(link, reason, self.clock.now());
        }
        let failed = match parsed {
            Ok(_) if self.links() >= most => Some(format!("{most} links are open, which is the limit")),
            Ok(Address::Memory(name)) => memory::connect(&name, MemoryEnd::new(self.tell.clone(), link)).err(),
            Ok(_) if self.connecting.len() >= (most / CONNECTING).max(1) => {
                Some(format!("{} links are being made, which is the limit", self.connecting.len()))
            }
            Ok(address) => {
                self.connecting.insert(link);
                let (tell, security, limit) = (self.tell.clone(), self.security.clone(), self.bounds.handshake);
                self.tasks.spawn(async move {
                    let connected = match tokio::time::timeout(limit, connect(&address, &security)).await {
                        Ok(connected) => connected,
                        Err(_) => Err(format!("not connected within {limit:?}")),
                    };
                    // Refused only when the driver is gone.
                    drop(tell.send(News::Connected(link, connected)));
                });
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = failed {
            self.session.link_closed(link, &reason, self.clock.now());
        }
    }
}

/// Connects, and proves who both ends are.
async fn connect(address: &Address, security: &Security) -> Result<(Stream, Proven), String> {
    let failed = |error: std::io::Error| format!("cannot connect: {error}");
    match address {
        Address::Tcp(socket) => {
            let socket = TcpStream::connect(socket).await.map_err(failed)?;
            secured(secure::client(tuned(socket), security, None).await, Stream::Tcp)
        }
        Address::Unix(path) => {
            let socket = UnixStream::connect(path).await.map_err(failed)?;
            secured(secure::client(socket, security, None).await, Stream::Unix)
        }
        Address::Memory(_) => Err("it is no socket".into()),
    }
}

/// Prepares a socket for small messages whose answers are awaited.
fn tuned(socket: TcpStream) -> TcpStream {
    // Where it can't be set, it is only slower.
    drop(socket.set_nodelay(true));
    // A peer whose host or path has vanished is noticed soon: by what it doesn't acknowledge, or by its silence. Where that can't be
    // set, by the system's own times.
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, PROBE);
    let _ = sockopt::set_tcp_keepintvl(&socket, PROBE);
    let _ = sockopt::set_tcp_user_timeout(&socket, UNHEARD_MS);
    socket
}

/// What a socket has become, and for which engines its credentials stand.
fn secured<S: AsyncRead + AsyncWrite + Unpin + Send + fmt::Debug + 'static>(
    secured: Result<Secured<S>, SecureError>,
    plain: impl FnOnce(S) -> Stream,
) -> Result<(Stream, Proven), String> {
    let secured = secured.map_err(|e| e.to_string())?;
    let proven = secured.engines();
    let stream = match secured.into_plaintext() {
        Ok(socket) => plain(socket),
        Err(secured) => Stream::Secured(Box::new(secured)),
    };
    Ok((stream, proven))
}

async fn accept_ranks(listener: UnixListener, tell: Sender<News>) {
    loop {
        match listener.accept().await {
            // The file's mode says the same; between its making and its mode another user may have come.
            Ok((stream, _)) if !is_ours(&stream) => drop(stream),
            Ok((stream, _)) => {
                if tell.send(News::RankAccepted(stream)).is_err() {
                    return;
                }
            }
            Err(_) => pause().await,
        }
    }
}

/// Whether whoever has connected is our user, or root.
fn is_ours(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|theirs| theirs.uid() == ours || theirs.uid() == 0)
}

/// A socket that other owners connect to.
enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener),
}

enum Accepted {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

impl Acceptor {
    async fn accept(&self) -> std::io::Result<Accepted> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(socket, from)| Accepted::Tcp(socket, from)),
            Self::Unix(listener) => listener.accept().await.map(|(socket, _)| Accepted::Unix(socket)),
        }
    }
}

impl Accepted {
    async fn prove(self, security: &Security) -> Result<(Stream, Proven), String> {
        match self {
            Self::Tcp(socket, from) => secured(secure::server(tuned(socket), security).await, Stream::Tcp)
                .map_err(|reason| format!("from {from}: {reason}")),
            Self::Unix(socket) => secured(secure::server(socket, security).await, Stream::Unix),
        }
    }
}

/// Accepts others, and lets them prove who they are beside each other, so many at a time and in so much time. With one more, the
/// oldest is closed, so that silent clients keep nobody out.
async fn accept_peers(
    acceptor: Acceptor,
    tell: Sender<News>,
    security: Security,
    (at_once, limit): (usize, Duration),
    clock: Clock,
) {
    let mut proving = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            accepted = acceptor.accept() => accepted,
            Some(_) = proving.join_next() => continue,
        };
        let accepted = match accepted {
            Ok(accepted) => accepted,
            Err(_) => {
                pause().await;
                continue;
            }
        };
        let since = clock.now();
        if !security.protects() {
            let Ok((stream, proven)) = accepted.prove(&security).await else { continue };
            if tell.send(News::Accepted(stream, proven, since)).is_err() {
                return;
            }
        } else {
            oldest.retain(|task| !task.is_finished());
            if oldest.len() >= at_once.max(1)
                && let Some(task) = oldest.pop_front()
            {
                task.abort();
            }
            let (tell, security) = (tell.clone(), security.clone());
            oldest.push_back(proving.spawn(async move {
                let news = match tokio::time::timeout(limit, accepted.prove(&security)).await {
                    Ok(Ok((stream, proven))) => News::Accepted(stream, proven, since),
                    Ok(Err(reason)) => News::NotAccepted(reason),
                    Err(_) => News::NotAccepted(format!("it did not prove within {limit:?} who it is")),
                };
                // Refused only when the driver is gone.
                drop(tell.send(news));
            }));
        }
    }
}

/// After a refused accept: the process is out of descriptors, or the caller has gone. Either passes.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Socket(_) => "Peer over a socket",
            Self::Memory(_) => "Peer of this process",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path that drops all silently ends a link in half a minute, not in hours.
    #[tokio::test]
    async fn tcp_peers_that_vanish_are_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = tuned(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), PROBE);
        assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), PROBE);
        assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), 30_000);
    }

    /// Who ends late doesn't take its successor's socket away.
    #[test]
    fn only_the_socket_that_was_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let bind = || std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (first, old) = (bind(), SocketFile::new(&path));
        drop(first);
        std::fs::remove_file(&path).unwrap();
        let (_second, new) = (bind(), SocketFile::new(&path));
        drop(old);
        assert!(path.exists());
        drop(new);
        assert!(!path.exists());
    }
}
