//! What an owner can be told before it starts: the same for an [`Owner`](crate::Owner) and for an [`Engine`](crate::Engine).

use std::sync::Arc;

use kvferry_geometry::manifest::CacheGroup;
use kvferry_geometry::spec::ModelSpec;
use kvferry_proto::handshake::Allowed;
use kvferry_proto::names::{Epoch, ModelIdentity};
use kvferry_session::owner::OwnerConfig;

use super::StartError;
use crate::config::{AllowedAs, ConfigErrors, EngineConfig, SecurityMode, SecurityOptions};
use crate::secure::{AllowedPeer, Security, SecurityError, SharedKeyOptions, TlsOptions};

/// Bounds on sockets; what runs is not harmed by what is beyond them. The defaults are for thousands of peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionLimits {
    /// Links to other owners at a time, of both directions. Default 4,096; more are closed at once, and whoever asked tries again.
    pub peers: usize,
    /// Of the links that others have begun, those that have proven nothing yet, and as many again that have, but of which nobody knows
    /// yet which engine they are. Default 256; with one more, the oldest is closed, so that silent clients don't keep others out
    /// for the whole of the handshake's time.
    pub strangers: usize,
    /// Bytes of the longest message of a stranger. Default 8 MiB; links of an engine whose description is longer fail. 16 MiB is the
    /// longest message at all.
    pub stranger_message: usize,
    /// Bytes of unfinished messages of all strangers together. Default 64 MiB; who sends more is closed.
    pub stranger_bytes: usize,
    /// Bytes that wait to be written to one peer. Default 256 MiB; a peer that takes so little is closed, and its requests fail.
    pub waiting: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { peers: 4096, strangers: 256, stranger_message: 8 << 20, stranger_bytes: 64 << 20, waiting: 256 << 20 }
    }
}

/// Everything that can be set.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) config: EngineConfig,
    pub(crate) spec: ModelSpec,
    pub(crate) groups: Vec<CacheGroup>,
    /// Instead of the configuration's.
    pub(crate) identity: Option<String>,
    /// Instead of the configuration's.
    pub(crate) security: Option<Security>,
}

impl Options {
    pub(crate) fn new(config: EngineConfig, spec: ModelSpec, groups: Vec<CacheGroup>) -> Self {
        Self { config, spec, groups, identity: None, security: None }
    }

    /// What makes no sense together. Addresses are judged when they are bound, with how links are protected in the end.
    pub(crate) fn check(&self) -> Result<(), ConfigErrors> {
        let mut config = self.config.clone();
        (config.control.listen, config.control.advertise) = (None, None);
        config.check()
    }

    /// How links are protected.
    pub(crate) fn security(&self) -> Result<Security, SecurityError> {
        self.security.clone().map_or_else(|| security(&self.config.security), Ok)
    }

    /// What the session is told of it.
    pub(crate) fn session(&self, ranks: u32, epoch: Epoch) -> Result<OwnerConfig, StartError> {
        let c = &self.config;
        let allowed = c.security.engines.as_ref().map(|engines| Arc::new(Allowed::new(engines)));
        Ok(OwnerConfig {
            identity: match &self.identity {
                Some(text) => ModelIdentity::new(text)?,
                None => c.model_identity.clone(),
            },
            check: c.identity_check,
            compat: c.compat,
            stripe: c.stripe,
            allowed,
            handshake: c.control.handshake_timeout,
            grace: c.control.grace,
            reclaim_after: c.control.reclaim_after,
            lease: c.lease,
            retry: c.retry,
            idle: c.control.idle,
            limits: c.limits,
            ..OwnerConfig::new(c.id.clone(), epoch, self.spec.clone(), self.groups.clone(), ranks)
        })
    }
}

/// Reads what a configuration names.
fn security(options: &SecurityOptions) -> Result<Security, SecurityError> {
    let allowed = |(name, engines): (&String, &AllowedAs)| match engines {
        AllowedAs::Same => AllowedPeer::name(name),
        AllowedAs::Fleet => AllowedPeer::fleet(name),
        AllowedAs::Engines(engines) => AllowedPeer::name(name).engines(engines),
    };
    let allowed = options.allow.iter().map(allowed);
    match &options.mode {
        SecurityMode::Plaintext => Ok(Security::Plaintext),
        SecurityMode::Tls { roots, certificate, key, revocation_lists } => {
            let mut tls = TlsOptions::builder(roots.as_path(), certificate.as_path(), key.as_path());
            for peer in allowed {
                tls = tls.allow(peer);
            }
            if let Some(lists) = revocation_lists {
                tls = tls.revocation_lists(lists.as_path());
            }
            if options.readable_by_others {
                tls = tls.readable_by_others();
            }
            tls.build().map(Security::from)
        }
        SecurityMode::SharedKey { id, key, also } => {
            let mut shared = SharedKeyOptions::builder(id, key.as_path());
            for (id, key) in also {
                shared = shared.also(id, key.as_path());
            }
            for peer in allowed {
                shared = shared.allow(peer);
            }
            if options.readable_by_others {
                shared = shared.readable_by_others();
            }
            shared.build().map(Security::from)
        }
    }
}

/// The setters of [`Options`], for a builder that has them in its field `options`.
macro_rules! setters {
    () => {
        /// What the cache's bytes mean: weights revision, position encoding, quantisation. Peers must say the same. The default is
        /// `"unspecified"`.
        #[must_use]
        pub fn model_identity(mut self, identity: &str) -> Self {
            self.options.identity = Some(identity.to_owned());
            self
        }

        /// Whether unequal model identities are an error (the default).
        #[must_use]
        pub fn identity_check(mut self, check: $crate::IdentityCheck) -> Self {
            self.options.config.identity_check = check;
            self
        }

        /// What becomes of items that only one of two engines has (the cache of a draft model, say). By default they are a mismatch.
        /// Both engines' owners must let them pass: what one ignores, the other may still refuse, by item name.
        #[must_use]
        pub fn compat(mut self, options: $crate::CompatOptions) -> Self {
            self.options.config.compat = options;
            self
        }

        /// Whether one consumer's items are spread over all ranks that hold them alike, for more bandwidth from more peers. Peers
        /// must say the same, or the handshake fails and says so. Default no.
        #[must_use]
        pub fn stripe(mut self, stripe: bool) -> Self {
            self.options.config.stripe = stripe;
            self
        }

        /// Where to listen for other owners. Without it the owner can pull, but not offer.
        #[must_use]
        pub fn listen(mut self, address: $crate::Address) -> Self {
            self.options.config.control.listen = Some(address);
            self
        }

        /// The address that references carry, where it is not the one listened on.
        #[must_use]
        pub fn advertise(mut self, address: $crate::Address) -> Self {
            self.options.config.control.advertise = Some(address);
            self
        }

        /// Allows to listen where other hosts can connect, and to connect to other hosts, although links are neither encrypted nor
        /// authenticated: whoever can connect can read what is offered, and whoever is at a reference's address is believed. Not
        /// needed with [`security`](Self::security).
        #[must_use]
        pub fn plaintext_beyond_loopback(mut self) -> Self {
            self.options.config.security.plaintext_beyond_loopback = true;
            self
        }

        /// Where this engine's ranks join: the path of a Unix socket. The default is a fresh name in the system's directory for
        /// temporary files; see [`Owner::rank_socket`]. Only the same user can connect. It is removed at shutdown.
        #[must_use]
        pub fn rank_socket(mut self, path: impl Into<std::path::PathBuf>) -> Self {
            self.options.config.control.rank_socket = Some(path.into());
            self
        }

        /// How long a link to another owner may take until both know each other. Default 10 s.
        #[must_use]
        pub fn handshake_timeout(mut self, timeout: std::time::Duration) -> Self {
            self.options.config.control.handshake_timeout = timeout;
            self
        }

        /// How long ranks may take to stop after a pull has failed, before they count as in doubt. Default 2 s.
        #[must_use]
        pub fn grace(mut self, grace: std::time::Duration) -> Self {
            self.options.config.control.grace = grace;
            self
        }

        /// How long blocks stay in quarantine if nothing proves that nobody writes them any more; `None`, the default: until something
        /// does (the ranks in question say that they have stopped, or are seen to live anew). **Time proves nothing**: with this set you
        /// vouch that no write of a rank that nothing is heard of, and nothing that its transport has accepted, arrives later
        /// than so long after the request's end. What is let go so is an [event](crate::OwnerEvent::Reclaimed) and counted.
        #[must_use]
        pub fn reclaim_after(mut self, age: Option<std::time::Duration>) -> Self {
            self.options.config.control.reclaim_after = age;
            self
        }

        /// Who moves the bytes of pulls that don't say. Default [`Mode::Pull`]($crate::Mode::Pull).
        #[must_use]
        pub fn mode(mut self, mode: $crate::Mode) -> Self {
            self.options.config.mode = mode;
            self
        }

        /// How links to other owners are protected, instead of what the configuration says. Default: not at all, which is refused
        /// where other hosts can connect. What is set here counts on loopback and on Unix sockets, too; a link within the
        /// process has none.
        #[must_use]
        pub fn security(mut self, security: impl Into<$crate::secure::Security>) -> Self {
            self.options.security = Some(security.into());
            self
        }

        /// The engines that may link with this one: ids, or beginnings of ids followed by `*`. Default: any. Without
        /// [`security`](Self::security) a peer may claim whichever id it likes.
        #[must_use]
        pub fn allow_engines<S: Into<String>>(mut self, engines: impl IntoIterator<Item = S>) -> Self {
            self.options.config.security.engines = Some(engines.into_iter().map(Into::into).collect());
            self
        }

        /// How long leases last, as producer and as consumer. Default: 30 s, beats every 5 s that extend to 20 s, 1 s at least left
        /// to read. A shorter time frees blocks sooner that nobody comes for; a consumer whose beats don't arrive for
        /// so long loses what it reads.
        #[must_use]
        pub fn lease(mut self, terms: $crate::LeaseTerms) -> Self {
            self.options.config.lease = terms;
            self
        }

        /// When a link that could not be made is tried again. Default: after 100 ms, then twice as long each time, 5 s at most.
        /// Requests wait for it until their own deadlines.
        #[must_use]
        pub fn retry(mut self, backoff: $crate::Backoff) -> Self {
            self.options.config.retry = backoff;
            self
        }

        /// After how long without a request a link that this engine has made is closed and its peer forgotten; those made to it, after
        /// twice as long, so that no request meets their end. `None`: never. Default 300 s. The next request makes a new one.
        #[must_use]
        pub fn idle_timeout(mut self, timeout: Option<std::time::Duration>) -> Self {
            self.options.config.control.idle = timeout;
            self
        }

        /// How many requests, leases and remembered peers there may be. Default: 65,536 requests, 1,048,576 leases, 65,536 bound by one
        /// engine, 4 links made by one engine, 64 manifests of engines met. What is beyond is refused by name, but for a
        /// link, if another one of its engine has no lease bound: then that is closed.
        #[must_use]
        pub fn limits(mut self, limits: $crate::Limits) -> Self {
            self.options.config.limits = limits;
            self
        }

        /// How many sockets there may be, and how much strangers may send.
        #[must_use]
        pub fn connections(mut self, limits: $crate::ConnectionLimits) -> Self {
            self.options.config.connections = limits;
            self
        }
    };
}
pub(crate) use setters;
