//! What an engine's kvferry is told: as a struct, or from a TOML file.
//!
//! An [`EngineConfig`] has everything that can be chosen and is the same for every run: names, sockets, security, times, limits, and
//! how its workers read. What the engine computes itself (the model's items, block tables, memory) is no part of it. Every field
//! has a default but the engine's id.
//!
//! From a file, each fault is told with file, line and key, all of them at once; a key that isn't known is a fault that names
//! the nearest one that is. Durations and sizes are texts with a unit. The keys are those of the structs' fields;
//! `docs/configuration.md` lists them with an example.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_proto::handshake::IdentityCheck;
use kvferry_proto::names::{EngineId, ModelIdentity};
use kvferry_session::owner::{Backoff, LeaseTerms, Limits};
use kvferry_session::{Admission, Mode};
use kvferry_transport::preflight::Policy;

use crate::address::Address;
use crate::owner::options::ConnectionLimits;
use crate::worker::StagingOptions;

mod check;
mod fault;
mod read;
mod reader;
#[cfg(test)]
mod tests;
mod value;

pub use fault::{ConfigError, ConfigErrors, ConfigFault};

/// The most bytes of a file.
const MAX_FILE: u64 = 1 << 20;

/// Everything that an engine's owner and its workers can be told.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineConfig {
    /// Names the engine to its peers, and must not change between its runs. Each data-parallel replica has one of its own.
    pub id: EngineId,
    /// What the cache's bytes mean: weights revision, position encoding, quantisation. Peers must say the same. Default
    /// `unspecified`.
    pub model_identity: ModelIdentity,
    /// Whether unequal model identities are an error. Default required; without it wrong weights are not noticed.
    pub identity_check: IdentityCheck,
    /// What becomes of items that only one of two engines has. Default: they are a mismatch.
    pub compat: CompatOptions,
    /// Whether one consumer's items are spread over all ranks that hold them alike. Peers must say the same. Default no.
    pub stripe: bool,
    /// Who moves the bytes of pulls that don't say. Default pull.
    pub mode: Mode,
    /// Sockets and their times.
    pub control: ControlOptions,
    /// Who may talk to the engine.
    pub security: SecurityOptions,
    /// How long blocks are kept for others.
    pub lease: LeaseTerms,
    /// How a link that can't be made is tried again.
    pub retry: Backoff,
    /// How much of anything the owner takes on.
    pub limits: Limits,
    /// How much of anything there may be on its sockets.
    pub connections: ConnectionLimits,
    /// How the ranks read.
    pub worker: WorkerOptions,
}

/// The owner's sockets, and how long things may take on them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlOptions {
    /// Where to listen for other owners. Default: nowhere; the engine can pull then, but not offer.
    pub listen: Option<Address>,
    /// The address that references carry. Default: the one listened on.
    pub advertise: Option<Address>,
    /// Where the engine's ranks join: the path of a Unix socket. Default: a fresh name in the directory for temporary files.
    pub rank_socket: Option<PathBuf>,
    /// How long a link may take until both owners know each other. Default 10 s.
    pub handshake_timeout: Duration,
    /// After how long without a request a link that this engine has made is closed and what is known of the peer forgotten; those made
    /// to it, after twice as long; `None`: never. Default 300 s.
    pub idle: Option<Duration>,
    /// How long ranks may take to stop after a pull has failed, before they count as in doubt. Default 2 s.
    pub grace: Duration,
    /// How long blocks stay in quarantine if nothing proves that nobody writes them any more; `None`: until something does. Time proves
    /// nothing: whoever sets it vouches that nothing arrives later. Default `None`.
    pub reclaim_after: Option<Duration>,
}

/// Who may talk to an engine's owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SecurityOptions {
    /// How links are protected. Default: not at all, which is refused where other hosts can connect.
    pub mode: SecurityMode,
    /// Allows to listen without protection where other hosts can connect, and to connect to other hosts: whoever can connect can read
    /// what is offered, and whoever is at a reference's address is believed. Default no.
    pub plaintext_beyond_loopback: bool,
    /// Accepts private keys in files that every user of this host may read; not together with `Plaintext`. Default no.
    pub readable_by_others: bool,
    /// The engines that may link with this one: ids, or beginnings of ids followed by `*`; `None`: any. Without protection a
    /// peer may claim whichever id it likes. Default `None`.
    pub engines: Option<Vec<String>>,
    /// Which engine a peer that proves a name may be; a `*` at a name's end stands for any rest. Empty: with TLS, a certificate has
    /// the name `kvferry` and the engine's id; with shared keys, whoever has one may be any engine. Must be empty with `Plaintext`,
    /// where nobody proves a name. Default empty.
    pub allow: BTreeMap<String, AllowedAs>,
}

/// How links between owners are protected.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SecurityMode {
    /// Neither encrypted nor authenticated.
    #[default]
    Plaintext,
    /// TLS 1.3 with certificates at both ends; all in PEM files.
    Tls {
        /// The authorities whose certificates are accepted.
        roots: PathBuf,
        /// This engine's certificate, followed by intermediate ones.
        certificate: PathBuf,
        /// Its private key.
        key: PathBuf,
        /// Certificates that are not accepted any more. Default: none.
        revocation_lists: Option<PathBuf>,
    },
    /// Keys that both ends have.
    SharedKey {
        /// The id of the key that this engine speaks with; not secret.
        id: String,
        /// The file with the key: 32 bytes as they are, as hex or as base64.
        key: PathBuf,
        /// Further keys that peers may speak with, by id, while keys are changed. Default: none.
        also: BTreeMap<String, PathBuf>,
    },
}

/// As which engine a peer is let in, once it has proven a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AllowedAs {
    /// The one whose id is that name.
    Same,
    /// One whose id is another of the names that it proves.
    Fleet,
    /// One of these; a `*` at the end of one stands for any rest.
    Engines(Vec<String>),
}

/// How an engine's workers read. An [`Engine`](crate::Engine) gives them to its ranks; whoever starts workers gives them by
/// [`WorkerBuilder::options`](crate::WorkerBuilder::options).
#[derive(Clone, PartialEq, Debug)]
pub struct WorkerOptions {
    /// How long the owner's socket may take to appear. Default 30 s. Ranks of an [`Engine`](crate::Engine) need no socket.
    pub connect_timeout: Duration,
    /// Staging memory and what goes through it. Default: none.
    pub staging: StagingOptions,
    /// What lanes must be. Default: anything.
    pub lanes: Policy,
    /// How much is read at a time.
    pub admission: Admission,
}

impl EngineConfig {
    /// All defaults.
    #[must_use]
    pub fn new(id: EngineId) -> Self {
        Self {
            id,
            model_identity: ModelIdentity::unspecified(),
            identity_check: IdentityCheck::Required,
            compat: CompatOptions::default(),
            stripe: false,
            mode: Mode::Pull,
            control: ControlOptions::default(),
            security: SecurityOptions::default(),
            lease: LeaseTerms::default(),
            retry: Backoff::default(),
            limits: Limits::default(),
            connections: ConnectionLimits::default(),
            worker: WorkerOptions::default(),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Every fault in it.
    pub fn from_file(path: &Path) -> Result<Self, ConfigErrors> {
        let file = path.display().to_string();
        let mut bytes = Vec::new();
        let reason = match File::open(path).and_then(|f| f.take(MAX_FILE + 1).read_to_end(&mut bytes)) {
            Ok(len) if len as u64 > MAX_FILE => format!("it has more than the {MAX_FILE} bytes that are read"),
            Ok(_) => match String::from_utf8(bytes) {
                Ok(text) => return Self::from_toml(&file, &text),
                Err(error) => format!("it is not UTF-8 text: {error}"),
            },
            Err(error) => error.to_string(),
        };
        let fault = ConfigFault::Unreadable(reason);
        Err(ConfigErrors(vec![ConfigError { file, line: None, key: String::new(), fault }]))
    }

    /// Reads a text; `file` is what messages call it.
    ///
    /// # Errors
    /// Every fault in it.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, ConfigErrors> {
        read::read(file, text).0
    }

    /// What makes no sense in it, although each value could be right. [`from_toml`](Self::from_toml) has done so. Whether other
    /// hosts can connect without protection is not looked at here but at the start: [`security`](crate::OwnerBuilder::security) in
    /// code may protect what a file makes reachable.
    ///
    /// # Errors
    /// Every contradiction.
    pub fn check(&self) -> Result<(), ConfigErrors> {
        let faults = check::contradictions(self).into_iter();
        let error =
            |(key, fault): (&str, _)| ConfigError { file: String::new(), line: None, key: key.to_owned(), fault };
        ConfigErrors::of(faults.map(error).collect())
    }
}

impl Default for ControlOptions {
    fn default() -> Self {
        Self {
            listen: None,
            advertise: None,
            rank_socket: None,
            handshake_timeout: Duration::from_secs(10),
            idle: Some(Duration::from_secs(300)),
            grace: Duration::from_secs(2),
            reclaim_after: None,
        }
    }
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(30),
            staging: StagingOptions::default(),
            lanes: Policy::default(),
            admission: Admission::default(),
        }
    }
}
