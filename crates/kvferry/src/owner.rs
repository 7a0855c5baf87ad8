//! The engine's control endpoint, as engines use it.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::manifest::CacheGroup;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::handshake::IdentityCheck;
use kvferry_proto::lease::{Closing, Offer};
use kvferry_proto::manifest::{EngineManifest, JoinError};
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity, NameError};
use kvferry_proto::rank::Assurance;
use kvferry_session::owner::{OfferError, OwnerConfig, OwnerSession, PullWish};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

use crate::address::Address;
use crate::driver::{Command, Driver, Listeners, Progress, SocketFile};
use crate::pull::PullHandle;
use crate::reference::Reference;

/// Calls that wait for the driver, at most.
const COMMANDS: usize = 1024;

/// An owner could not be started. Nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// An engine can't have so many ranks.
    #[error(transparent)]
    Ranks(#[from] JoinError),
    /// A socket can't be bound.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// Where.
        address: String,
        /// Why.
        error: std::io::Error,
    },
    /// Other hosts could reach it, and it is not authenticated.
    #[error(
        "{address} can be reached from other hosts, and links are neither encrypted nor authenticated yet; listen on \
             loopback or a Unix socket, or say `plaintext_beyond_loopback` where the network is trusted"
    )]
    Exposed {
        /// Where it was to listen.
        address: Address,
    },
    /// Peers can't connect to the address that references would carry.
    #[error("peers cannot connect to {address}: say which address they shall use with `advertise`")]
    Advertise {
        /// The address.
        address: Address,
    },
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(String),
}

/// A call to an owner could not be served.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The owner was shut down.
    #[error("the owner was shut down")]
    Shutdown,
    /// The offer was refused.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// References need an address.
    #[error("this owner does not listen for other owners; give it an address with `listen` to offer blocks")]
    NotListening,
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(String),
}

/// The engine did not become complete.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadyError {
    /// Ranks are missing.
    #[error("ranks {missing:?} did not join within {after:?}")]
    Timeout {
        /// Which.
        missing: Vec<RankId>,
        /// How long it waited.
        after: Duration,
    },
    /// A rank may not join, or all together are unsound.
    #[error(transparent)]
    Join(JoinError),
    /// The owner was shut down.
    #[error("the owner was shut down")]
    Shutdown,
}

/// What a prefill engine offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OfferSpec {
    /// The blocks and the tokens held in them, one entry for each group of the engine, in its order.
    pub groups: Vec<SrcGroup>,
    /// What the cache was computed from; see [`ContentKey::of`].
    pub content_key: ContentKey,
}

/// What a decode engine wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullSpec {
    /// Length of the prompt.
    pub tokens: Tokens,
    /// Its blocks and the tokens it has already, one entry for each group of the engine, in its order. The blocks must stay
    /// reserved until the pull ends, and longer for ranks that [`Report::in_doubt`](crate::Report::in_doubt) names. A pull that would
    /// write blocks that another pull writes, or an open lease of this engine shows, fails at once
    /// ([`Overlap`](crate::FailureCause::Overlap)); so does one into blocks in quarantine.
    pub groups: Vec<DstGroup>,
    /// What the cache must have been computed from; unequal to the offer's is an error.
    pub content_key: ContentKey,
    /// How sure it must be before the bytes count as delivered.
    pub assurance: Assurance,
    /// How long it may take in all, from the call on. At the deadline ranks are asked to stop, and get the owner's
    /// [`grace`](OwnerBuilder::grace) for it.
    pub deadline: Duration,
}

/// What happens at an owner without being asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OwnerEvent {
    /// A lease is over: its blocks are the engine's again.
    Released {
        /// The lease.
        lease: LeaseId,
        /// How it ended.
        how: Closing,
    },
    /// A rank of the complete engine is gone. Pulls and offers fail from now on.
    RankLost {
        /// Which.
        rank: RankId,
        /// What is known.
        reason: String,
    },
    /// A rank was refused.
    JoinRefused(JoinError),
}

/// The events of an owner, in order. Those not taken wait; none is dropped.
#[derive(Debug)]
pub struct OwnerEvents {
    inbox: mpsc::UnboundedReceiver<OwnerEvent>,
}

impl OwnerEvents {
    /// The next event; `None` once the owner is shut down and all were taken.
    pub async fn next(&mut self) -> Option<OwnerEvent> {
        self.inbox.recv().await
    }
}

/// Prepares an owner; see [`Owner::builder`].
#[derive(Clone, Debug)]
pub struct OwnerBuilder {
    engine: EngineId,
    spec: ModelSpec,
    groups: Vec<CacheGroup>,
    ranks: u32,
    identity: String,
    check: IdentityCheck,
    compat: CompatOptions,
    stripe: bool,
    listen: Option<Address>,
    advertise: Option<Address>,
    beyond_loopback: bool,
    rank_socket: Option<PathBuf>,
    handshake: Duration,
    grace: Duration,
}

impl OwnerBuilder {
    /// What the cache's bytes mean: weights revision, position encoding, quantisation. Peers must say the same. The default is
    /// `"unspecified"`.
    #[must_use]
    pub fn model_identity(mut self, identity: &str) -> Self {
        identity.clone_into(&mut self.identity);
        self
    }

    /// Whether unequal model identities are an error (the default).
    #[must_use]
    pub fn identity_check(mut self, check: IdentityCheck) -> Self {
        self.check = check;
        self
    }

    /// What becomes of items that only one of two engines has (the cache of a draft model, say). By default they are a mismatch.
    /// Both engines' owners must let them pass: what one ignores, the other may still refuse, by item name.
    #[must_use]
    pub fn compat(mut self, options: CompatOptions) -> Self {
        self.compat = options;
        self
    }

    /// Whether one consumer's items are spread over all ranks that hold them alike, for more bandwidth from more peers. Peers
    /// must say the same, or the handshake fails and says so. Default no.
    #[must_use]
    pub fn stripe(mut self, stripe: bool) -> Self {
        self.stripe = stripe;
        self
    }

    /// Where to listen for other owners. Without it the owner can pull, but not offer.
    #[must_use]
    pub fn listen(mut self, address: Address) -> Self {
        self.listen = Some(address);
        self
    }

    /// The address that references carry, where it is not the one listened on.
    #[must_use]
    pub fn advertise(mut self, address: Address) -> Self {
        self.advertise = Some(address);
        self
    }

    /// Allows to listen where other hosts can connect, although links are neither encrypted nor authenticated: whoever
    /// can connect can read what is offered.
    #[must_use]
    pub fn plaintext_beyond_loopback(mut self) -> Self {
        self.beyond_loopback = true;
        self
    }

    /// Where this engine's ranks join: the path of a Unix socket. The default is a fresh name in the system's directory for
    /// temporary files; see [`Owner::rank_socket`]. Only the same user can connect. It is removed at shutdown.
    #[must_use]
    pub fn rank_socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.rank_socket = Some(path.into());
        self
    }

    /// How long a link to another owner may take until both know each other. Default 10 s.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake = timeout;
        self
    }

    /// How long ranks may take to stop after a pull has failed, before they count as in doubt. Default 2 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Binds the sockets and starts the owner on the current tokio runtime.
    ///
    /// # Errors
    /// If an option makes no sense or a socket can't be bound; nothing is left running then.
    pub async fn start(self) -> Result<Owner, StartError> {
        let epoch = Epoch::new(random().map_err(StartError::Random)?);
        let session = OwnerSession::new(OwnerConfig {
            engine: self.engine.clone(),
            epoch,
            spec: self.spec.clone(),
            groups: self.groups.clone(),
            ranks: self.ranks,
            identity: ModelIdentity::new(&self.identity)?,
            check: self.check,
            compat: self.compat,
            stripe: self.stripe,
            handshake: self.handshake,
            grace: self.grace,
        })?;
        // Removes the sockets' files on an early end, too.
        let mut sockets = Vec::new();
        let (peers, address) = self.bind_peers(&mut sockets).await?;
        let (ranks, rank_socket) = self.bind_ranks(&mut sockets)?;
        let (commands, command_inbox) = mpsc::channel(COMMANDS);
        let (events, event_inbox) = mpsc::unbounded_channel();
        let (progress, seen) = watch::channel(Progress::Joining((0..self.ranks).map(RankId::new).collect()));
        let listeners = Listeners { peers, ranks, sockets };
        tokio::spawn(Driver::new(session, command_inbox, events, progress, listeners).run());
        let shared = Shared { engine: self.engine, epoch, address, rank_socket };
        Ok(Owner { commands, seen, shared: Arc::new(shared), events: Some(OwnerEvents { inbox: event_inbox }) })
    }

    async fn bind_peers(
        &self,
        sockets: &mut Vec<SocketFile>,
    ) -> Result<(Option<PeerListener>, Option<Address>), StartError> {
        let Some(wanted) = &self.listen else { return Ok((None, None)) };
        if !wanted.is_local() && !self.beyond_loopback {
            return Err(StartError::Exposed { address: wanted.clone() });
        }
        let failed = |error| StartError::Listen { address: wanted.to_string(), error };
        let (listener, bound) = match wanted {
            Address::Tcp(socket) => {
                let listener = TcpListener::bind(socket).await.map_err(failed)?;
                let bound = Address::Tcp(listener.local_addr().map_err(failed)?);
                (PeerListener::Tcp(listener), bound)
            }
            Address::Unix(path) => (PeerListener::Unix(bind_unix(path, sockets).map_err(failed)?), wanted.clone()),
        };
        let address = self.advertise.clone().unwrap_or(bound);
        if !address.is_definite() {
            return Err(StartError::Advertise { address });
        }
        Ok((Some(listener), Some(address)))
    }

    fn bind_ranks(&self, sockets: &mut Vec<SocketFile>) -> Result<(UnixListener, PathBuf), StartError> {
        let path = match &self.rank_socket {
            Some(path) => path.clone(),
            None => {
                let name = format!("kvferry-{:032x}.sock", random().map_err(StartError::Random)?);
                std::env::temp_dir().join(name)
            }
        };
        let failed = |error| StartError::Listen { address: path.display().to_string(), error };
        let listener = bind_unix(&path, sockets).map_err(failed)?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).map_err(failed)?;
        Ok((listener, path))
    }
}

/// Listens on a Unix socket. A socket that an owner has left behind when it was killed is replaced.
fn bind_unix(path: &Path, sockets: &mut Vec<SocketFile>) -> std::io::Result<UnixListener> {
    let bound = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_left_behind(path) => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }?;
    sockets.push(SocketFile(path.to_owned()));
    Ok(bound)
}

/// Whether nobody listens on this socket any more.
fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let refused = |e: std::io::Error| e.kind() == ErrorKind::ConnectionRefused;
    is_socket && std::os::unix::net::UnixStream::connect(path).err().is_some_and(refused)
}

/// A socket that other owners connect to.
#[derive(Debug)]
pub(crate) enum PeerListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

#[derive(Debug)]
struct Shared {
    engine: EngineId,
    epoch: Epoch,
    address: Option<Address>,
    rank_socket: PathBuf,
}

/// An engine's control endpoint: serves its ranks and other engines' owners.
///
/// Dropping it shuts it down as [`shutdown`](Self::shutdown) does, without waiting, once the last [`PullHandle`] is gone
/// too.
#[derive(Debug)]
pub struct Owner {
    commands: mpsc::Sender<Command>,
    seen: watch::Receiver<Progress>,
    shared: Arc<Shared>,
    events: Option<OwnerEvents>,
}

impl Owner {
    /// Prepares the owner of an engine of `ranks` ranks that caches `spec`'s items in `groups`. Every data-parallel replica
    /// with blocks of its own is an engine of its own, with an id of its own.
    #[must_use]
    pub fn builder(engine: EngineId, spec: ModelSpec, groups: Vec<CacheGroup>, ranks: u32) -> OwnerBuilder {
        OwnerBuilder {
            engine,
            spec,
            groups,
            ranks,
            identity: "unspecified".into(),
            check: IdentityCheck::Required,
            compat: CompatOptions::default(),
            stripe: false,
            listen: None,
            advertise: None,
            beyond_loopback: false,
            rank_socket: None,
            handshake: Duration::from_secs(10),
            grace: Duration::from_secs(2),
        }
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &EngineId {
        &self.shared.engine
    }

    /// This life of it.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.shared.epoch
    }

    /// The address that references carry; `None` for an owner that doesn't listen.
    #[must_use]
    pub fn address(&self) -> Option<&Address> {
        self.shared.address.as_ref()
    }

    /// Where this engine's ranks join.
    #[must_use]
    pub fn rank_socket(&self) -> &Path {
        &self.shared.rank_socket
    }

    /// Takes the stream of events. `None` the second time.
    pub fn take_events(&mut self) -> Option<OwnerEvents> {
        self.events.take()
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// If they don't within `timeout`, or one may not, or together they are unsound.
    pub async fn ready(&self, timeout: Duration) -> Result<Arc<EngineManifest>, ReadyError> {
        let mut seen = self.seen.clone();
        let wait = async {
            let done = seen.wait_for(|p| !matches!(p, Progress::Joining(_))).await;
            match done.map_err(|_| ReadyError::Shutdown)?.clone() {
                Progress::Ready(manifest) => Ok(manifest),
                Progress::Refused(error) => Err(ReadyError::Join(error)),
                Progress::Joining(_) => Err(ReadyError::Shutdown),
            }
        };
        match tokio::time::timeout(timeout, wait).await {
            Ok(result) => result,
            Err(_) => {
                let missing = match &*self.seen.borrow() {
                    Progress::Joining(missing) => missing.clone(),
                    _ => Vec::new(),
                };
                Err(ReadyError::Timeout { missing, after: timeout })
            }
        }
    }

    /// Offers blocks. They are lent from now on, until [`OwnerEvent::Released`] names the reference's lease; their bytes must not
    /// change until then. Dropping the future before it is done takes the offer back.
    ///
    /// # Errors
    /// If the engine isn't complete, or doesn't listen, or the offer doesn't fit it; then nothing is lent.
    pub async fn offer(&self, spec: OfferSpec) -> Result<Reference, CallError> {
        let address = self.shared.address.clone().ok_or(CallError::NotListening)?;
        let lease = LeaseId::new(random().map_err(CallError::Random)?);
        let offer = Offer { groups: spec.groups, content_key: spec.content_key };
        let mut unseen = Unseen(Some((lease, self.commands.clone())));
        let offered = self.call(|reply| Command::Offer { lease, offer, reply }).await;
        unseen.0 = None;
        let fence: Fence = offered??;
        Ok(Reference::new(address, &fence))
    }

    /// Takes an offer back: its blocks are free when this returns, and whoever reads them is told *stale*. Gives false where the
    /// lease was over already.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn withdraw(&self, lease: LeaseId) -> Result<bool, CallError> {
        self.call(|reply| Command::Withdraw { lease, reply }).await
    }

    /// Begins to read what a reference names into our own blocks. Dropping the future before it is done gives the pull up, if
    /// it has begun; whether it has, nobody can tell then, so its blocks must not be used again for a while. Await it.
    ///
    /// # Errors
    /// If the owner was shut down. Everything else is told by the handle.
    pub async fn pull(&self, reference: Reference, spec: PullSpec) -> Result<PullHandle, CallError> {
        let wish = PullWish {
            address: reference.address().to_string(),
            fence: reference.fence(),
            tokens: spec.tokens,
            groups: spec.groups,
            content_key: spec.content_key,
            assurance: spec.assurance,
            deadline: spec.deadline,
        };
        let (done, result) = oneshot::channel();
        let id = self.call(|reply| Command::Pull { wish: Box::new(wish), done, reply }).await?;
        Ok(PullHandle::new(id, result, self.commands.clone()))
    }

    /// How many blocks and slots of this engine no pull and no offer can name, because a rank of a pull that failed may still
    /// write them ([`Report::in_doubt`](crate::Report::in_doubt)).
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn quarantined(&self) -> Result<usize, CallError> {
        self.call(|reply| Command::Quarantined { reply }).await
    }

    /// Ends all requests and leases and closes all links. Pulls that are still open fail as
    /// [`Shutdown`](crate::FailureCause::Shutdown). When this returns, all that was said on the links is written, but for
    /// those who took nothing for 5 seconds.
    pub async fn shutdown(self) {
        // Shut down already is as good.
        drop(self.call(|reply| Command::Shutdown { reply }).await);
    }

    async fn call<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, CallError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| CallError::Shutdown)?;
        answer.await.map_err(|_| CallError::Shutdown)
    }
}

/// An offer that its caller has not seen yet; dropped with it, the offer is taken back.
struct Unseen(Option<(LeaseId, mpsc::Sender<Command>)>);

impl Drop for Unseen {
    fn drop(&mut self) {
        let Some((lease, commands)) = self.0.take() else { return };
        let (reply, _) = oneshot::channel();
        if let Err(TrySendError::Full(command)) = commands.try_send(Command::Withdraw { lease, reply })
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { commands.send(command).await.is_ok() });
        }
    }
}

pub(crate) fn random() -> Result<u128, String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| e.to_string())?;
    Ok(u128::from_le_bytes(bytes))
}
