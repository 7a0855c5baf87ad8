//! The engine's control endpoint, as engines use it.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::manifest::CacheGroup;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::lease::Offer;
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId};
use kvferry_proto::rank::{Assurance, PullId};
use kvferry_session::owner::{Mode, OwnerSession, PullWish, Ttl, USUAL_PRIORITY};
use kvferry_session::pairing::Pairings;
use tokio::sync::{oneshot, watch};

use crate::address::Address;
use crate::config::EngineConfig;
use crate::driver::events::{OwnerEvents, events};
use crate::driver::inbox::{Sender, inbox};
use crate::driver::{Bounds, Command, Driver, Listeners, News, Progress};
use crate::memory::RankPort;
use crate::policy::FailurePolicy;
use crate::pull::PullHandle;
use crate::reference::Reference;
use crate::snapshot::Snapshot;
use crate::spans::PullSpan;
use crate::stream::OfferStream;

mod errors;
mod listen;
pub(crate) mod options;

pub use errors::{CallError, ReadyError, StartError};
use options::{Options, setters};

/// What a prefill engine offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OfferSpec {
    /// The blocks and the tokens held in them, one entry for each group of the engine, in its order.
    pub groups: Vec<SrcGroup>,
    /// What the cache was computed from; see [`ContentKey::of`].
    pub content_key: ContentKey,
    /// How long the offer lasts if nobody reads it. Usually as the owner's [`lease`](OwnerBuilder::lease) says. A consumer that has
    /// bound it extends it by its beats.
    pub ttl: Ttl,
}

impl OfferSpec {
    /// An offer that lasts as long as is usual.
    #[must_use]
    pub fn new(groups: Vec<SrcGroup>, content_key: ContentKey) -> Self {
        Self { groups, content_key, ttl: Ttl::Usual }
    }
}

/// What a decode engine wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullSpec {
    /// Length of the prompt.
    pub tokens: Tokens,
    /// Its blocks and the tokens it has already, one entry for each group of the engine, in its order. The blocks must stay
    /// reserved until the pull ends, and longer for ranks that [`Report::in_doubt`](crate::Report::in_doubt) or
    /// [`Report::writers_in_doubt`](crate::Report::writers_in_doubt) names. A pull that would
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
    /// Requests of a higher priority are read first; 0 is the lowest, [`USUAL_PRIORITY`] usual. Among equals, whoever must be done
    /// first is read first, and peers get fair shares.
    pub priority: u8,
    /// What is done where it fails.
    pub policy: FailurePolicy,
    /// Who moves the bytes; `None`: whoever usually does, as the engine's [configuration](crate::EngineConfig::mode) says.
    pub mode: Option<Mode>,
}

impl PullSpec {
    /// A pull that is fenced, of usual priority and mode, may take 30 s and be tried twice.
    #[must_use]
    pub fn new(tokens: Tokens, groups: Vec<DstGroup>, content_key: ContentKey) -> Self {
        let (assurance, deadline) = (Assurance::Fenced, Duration::from_secs(30));
        Self {
            tokens,
            groups,
            content_key,
            assurance,
            deadline,
            priority: USUAL_PRIORITY,
            policy: FailurePolicy::default(),
            mode: None,
        }
    }

    /// Has the producer's ranks write into the blocks, as soon as there are bytes, also while the prompt is still being computed; the
    /// producer must be able to. For the engine it is as if it pulled: the same handle, the same report, the same certainty.
    #[must_use]
    pub fn push(mut self) -> Self {
        self.mode = Some(Mode::Push { progress: false });
        self
    }

    /// As [`push`](Self::push), and wants to know how much is in place; see [`PullHandle::progress`].
    #[must_use]
    pub fn push_with_progress(mut self) -> Self {
        self.mode = Some(Mode::Push { progress: true });
        self
    }
}

/// Prepares an owner; see [`Owner::builder`].
#[derive(Clone, Debug)]
pub struct OwnerBuilder {
    options: Options,
    ranks: u32,
}

impl OwnerBuilder {
    setters!();

    /// Binds the sockets and starts the owner on the current tokio runtime.
    ///
    /// # Errors
    /// If an option makes no sense or a socket can't be bound; nothing is left running then.
    pub async fn start(self) -> Result<Owner, StartError> {
        start(self.options, self.ranks, true).await
    }
}

/// Starts an owner, with or without a socket for its ranks.
pub(crate) async fn start(options: Options, ranks: u32, rank_socket: bool) -> Result<Owner, StartError> {
    options.check()?;
    let epoch = Epoch::new(random().map_err(StartError::Random)?);
    let pairings = Pairings::default();
    let session = OwnerSession::new(options.session(ranks, epoch)?)?.with_pairings(pairings.clone());
    let security = options.security()?;
    let (news, news_inbox) = inbox();
    // Removes the sockets' files on an early end, too.
    let mut sockets = Vec::new();
    let (peers, address) = listen::peers(&options, &security, &news, &mut sockets).await?;
    let (rank_listener, rank_socket) = if rank_socket || options.config.control.rank_socket.is_some() {
        let (listener, path) = listen::ranks(&options, &mut sockets)?;
        (Some(listener), path)
    } else {
        (None, PathBuf::new())
    };
    let (events_end, events) = events();
    let (progress, seen) = watch::channel(Progress::Joining((0..ranks).map(RankId::new).collect()));
    let listeners = Listeners { peers, ranks: rank_listener, sockets };
    let bounds = Bounds {
        limits: options.config.connections,
        ranks,
        handshake: options.config.control.handshake_timeout,
        plaintext_beyond_loopback: options.config.security.plaintext_beyond_loopback,
    };
    let driver = Driver::new(session, (news.clone(), news_inbox), events_end, progress, bounds, security, listeners);
    tokio::spawn(driver.run());
    let (spec, mode) = (Arc::new(options.spec), options.config.mode);
    let shared = Shared { engine: options.config.id, epoch, address, rank_socket, spec, mode, pairings };
    Ok(Owner { caller: Arc::new(Caller(news)), seen, shared: Arc::new(shared), events: Some(events) })
}

#[derive(Debug)]
struct Shared {
    engine: EngineId,
    epoch: Epoch,
    address: Option<Address>,
    rank_socket: PathBuf,
    /// For ranks of this process.
    pairings: Pairings,
    spec: Arc<ModelSpec>,
    /// Of pulls that don't say.
    mode: Mode,
}

/// An engine's control endpoint: serves its ranks and other engines' owners.
///
/// Dropping it shuts it down as [`shutdown`](Self::shutdown) does, without waiting, once the last [`PullHandle`] and
/// [`OfferStream`] are gone, too.
#[derive(Debug)]
pub struct Owner {
    caller: Arc<Caller>,
    seen: watch::Receiver<Progress>,
    shared: Arc<Shared>,
    events: Option<OwnerEvents>,
}

impl Owner {
    /// Prepares the owner of an engine of `ranks` ranks that caches `spec`'s items in `groups`. Every data-parallel replica
    /// with blocks of its own is an engine of its own, with an id of its own.
    #[must_use]
    pub fn builder(engine: EngineId, spec: ModelSpec, groups: Vec<CacheGroup>, ranks: u32) -> OwnerBuilder {
        Self::from_config(EngineConfig::new(engine), spec, groups, ranks)
    }

    /// As [`builder`](Self::builder), with all that a configuration says of the owner.
    #[must_use]
    pub fn from_config(config: EngineConfig, spec: ModelSpec, groups: Vec<CacheGroup>, ranks: u32) -> OwnerBuilder {
        OwnerBuilder { options: Options::new(config, spec, groups), ranks }
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &EngineId {
        &self.shared.engine
    }

    /// This life of it: another one each time that a lost rank has come back.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        match &*self.seen.borrow() {
            Progress::Ready(manifest) => manifest.epoch(),
            _ => self.shared.epoch,
        }
    }

    /// The address that references carry; `None` for an owner that doesn't listen.
    #[must_use]
    pub fn address(&self) -> Option<&Address> {
        self.shared.address.as_ref()
    }

    /// Where this engine's ranks join: the path of a Unix socket; an empty one for the owner of an [`Engine`](crate::Engine), whose
    /// ranks need none.
    #[must_use]
    pub fn rank_socket(&self) -> &Path {
        &self.shared.rank_socket
    }

    /// Where ranks of this process can join without a socket.
    #[must_use]
    pub fn rank_port(&self) -> RankPort {
        RankPort::new(self.caller.0.clone(), self.shared.pairings.clone())
    }

    /// Takes the stream of events. `None` the second time.
    pub fn take_events(&mut self) -> Option<OwnerEvents> {
        self.events.take()
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// If they don't within `timeout`, or one may not and no other has connected since, or together they are unsound.
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

    /// Offers blocks. They are lent from now on, until [`OwnerEvent::Released`](crate::OwnerEvent::Released) names the reference's
    /// lease; their bytes must not change until then. Dropping the future before it is done takes the offer back.
    ///
    /// # Errors
    /// If the engine isn't complete, or doesn't listen, or the offer doesn't fit it; then nothing is lent.
    pub async fn offer(&self, spec: OfferSpec) -> Result<Reference, CallError> {
        self.lend(spec, false).await
    }

    /// Offers blocks that the engine still computes: of each group, `held` is what it *will* hold, and blocks and states may be
    /// [listed later](OfferStream::extend). Whoever wants them pushed is written to as they become final. A *pull* of
    /// them is refused until the stream is sealed. The lease's time begins now: where a prefill may take longer than the usual one, give the
    /// offer a longer. Dropping the future before it is done takes the offer back.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub async fn announce(&self, spec: OfferSpec) -> Result<OfferStream, CallError> {
        let reference = self.lend(spec, true).await?;
        Ok(OfferStream::new(reference, self.shared.spec.clone(), self.caller.clone()))
    }

    async fn lend(&self, spec: OfferSpec, streamed: bool) -> Result<Reference, CallError> {
        let address = self.shared.address.clone().ok_or(CallError::NotListening)?;
        let lease = random_lease().map_err(CallError::Random)?;
        let (ttl, offer) = (spec.ttl, Offer { groups: spec.groups, content_key: spec.content_key });
        let mut unseen = Unseen(Some((lease, &self.caller)));
        let offered = self.call(|reply| Command::Offer { lease, offer, ttl, streamed, reply }).await;
        unseen.0 = None;
        let fence: Fence = offered??;
        Ok(Reference::new(address, &fence))
    }

    /// Takes an offer of this engine back (a producer's *release*): its blocks are free when this returns, and whoever reads them is told
    /// *stale*. Gives false where the lease was over already. Leases that were read end by themselves.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn withdraw(&self, lease: LeaseId) -> Result<bool, CallError> {
        self.call(|reply| Command::Withdraw { lease, reply }).await
    }

    /// Tells the producer of a reference that this engine will not read it (a consumer's *release*, say because the request was
    /// given up before a pull): its blocks are free at once, instead of at the offer's end. Where the producer can't be told,
    /// the offer ends by itself.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub fn decline(&self, reference: &Reference) -> Result<(), CallError> {
        let address = reference.address().to_string();
        self.caller.tell(Command::Decline { address, fence: Box::new(reference.fence()) })
    }

    /// Gives a pull up by its [id](PullHandle::id), as [`PullHandle::cancel`] does by its handle: it ends, once, when its ranks have
    /// stopped. Nothing happens where it has ended.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub fn abort(&self, pull: PullId) -> Result<(), CallError> {
        self.caller.tell(Command::Cancel { pull })
    }

    /// Begins to move what a reference names into our own blocks: our ranks read it, or, with a [`push`](PullSpec::push), the producer's
    /// ranks write it. It has begun when this returns, at once: the future never waits.
    ///
    /// # Errors
    /// If the owner was shut down. Everything else is told by the handle.
    pub async fn pull(&self, reference: Reference, spec: PullSpec) -> Result<PullHandle, CallError> {
        let mode = spec.mode.unwrap_or(self.shared.mode);
        let wish = PullWish {
            mode,
            address: reference.address().to_string(),
            fence: reference.fence(),
            tokens: spec.tokens,
            groups: spec.groups,
            content_key: spec.content_key,
            assurance: spec.assurance,
            deadline: spec.deadline,
            priority: spec.priority,
            policy: spec.policy.into(),
        };
        let span = PullSpan::new(&self.shared.engine, &wish.fence, mode).seen();
        let (done, result) = oneshot::channel();
        let (progress, seen) = match mode {
            Mode::Push { progress: true } => Some(watch::channel(Tokens::ZERO)).unzip(),
            _ => (None, None),
        };
        let wish = Box::new(wish);
        let command = |number| News::Called(Command::Pull { number, wish, progress, done, span });
        let number = self.caller.0.send_numbered(command).ok_or(CallError::Shutdown)?;
        Ok(PullHandle::new(PullId(number), result, seen, self.caller.clone()))
    }

    /// How many blocks and slots of this engine no pull and no offer can name, because a rank of a pull that failed may still
    /// write them: one of ours ([`Report::in_doubt`](crate::Report::in_doubt)), or one of the producer's
    /// ([`Report::writers_in_doubt`](crate::Report::writers_in_doubt)).
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn quarantined(&self) -> Result<usize, CallError> {
        self.call(|reply| Command::Quarantined { reply }).await
    }

    /// Every live request and lease, its state, what it waits for and since when.
    ///
    /// # Errors
    /// If the owner was shut down.
    pub async fn snapshot(&self) -> Result<Snapshot, CallError> {
        self.call(|reply| Command::Snapshot { reply }).await.map(|snapshot| Snapshot::from(*snapshot))
    }

    /// Shuts down gracefully: begins nothing more (offers and pulls are refused), lets what has begun go on to its end for
    /// `deadline` at most, then does as [`shutdown`](Self::shutdown). Gives true if nothing had to be cut off.
    pub async fn drain(self, deadline: Duration) -> bool {
        let drained = self.call(|reply| Command::Drain { reply });
        let drained = matches!(tokio::time::timeout(deadline, drained).await, Ok(Ok(())));
        self.shutdown().await;
        drained
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
        self.caller.tell(command(reply))?;
        answer.await.map_err(|_| CallError::Shutdown)
    }
}

/// Who can call the driver: the owner and its handles. With the last of them the owner ends.
#[derive(Debug)]
pub(crate) struct Caller(Sender<News>);

impl Caller {
    pub(crate) fn tell(&self, command: Command) -> Result<(), CallError> {
        self.0.send(News::Called(command)).map_err(|_| CallError::Shutdown)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // Ended already is as good.
        drop(self.tell(Command::Abandoned));
    }
}

/// An offer that its caller has not seen yet; dropped with it, the offer is taken back.
struct Unseen<'a>(Option<(LeaseId, &'a Caller)>);

impl Drop for Unseen<'_> {
    fn drop(&mut self) {
        let Some((lease, caller)) = self.0.take() else { return };
        let (reply, _) = oneshot::channel();
        // With the owner ends the lease.
        drop(caller.tell(Command::Withdraw { lease, reply }));
    }
}

/// A number that nobody can guess.
pub(crate) fn random() -> Result<u128, String> {
    Ok(randoms::<1>()?[0])
}

fn randoms<const N: usize>() -> Result<[u128; N], String> {
    let mut bytes = [[0; 16]; N];
    getrandom::fill(bytes.as_flattened_mut()).map_err(|e| e.to_string())?;
    Ok(bytes.map(u128::from_le_bytes))
}

thread_local! {
    /// Numbers for leases that were drawn and not given out: each offer needs one, and drawing is a system call. For nothing else, as
    /// a forked process has the same ones; an owner is of no use there.
    static LEASES: RefCell<Vec<u128>> = const { RefCell::new(Vec::new()) };
}

fn random_lease() -> Result<LeaseId, String> {
    LEASES.with_borrow_mut(|left| {
        if let Some(number) = left.pop() {
            return Ok(LeaseId::new(number));
        }
        let [number, others @ ..] = randoms::<16>()?;
        left.extend(others);
        Ok(LeaseId::new(number))
    })
}
