//! Authentication and encryption of control links, over any stream.
//!
//! ```no_run
//! # async fn example(socket: tokio::net::TcpStream) -> Result<(), Box<dyn std::error::Error>> {
//! use kvferry::secure::{self, AllowedPeer, Security, TlsOptions};
//!
//! let security: Security = TlsOptions::builder("/etc/kvferry/ca.crt", "/etc/kvferry/tls.crt", "/etc/kvferry/tls.key")
//!     .allow(AllowedPeer::name("spiffe://cluster.local/ns/kv/sa/decode").engines(["decode-*"]))
//!     .build()?
//!     .into();
//! // The caller bounds the time; dropping the future closes the socket.
//! let link = tokio::time::timeout(std::time::Duration::from_secs(5), secure::server(socket, &security)).await??;
//! println!("{} proves {:?} and may be {:?}", link.kind(), link.names(), link.engines());
//! # Ok(()) }
//! ```
//!
//! Both ends prove who they are before either takes a byte of the protocol, by certificates ([`TlsOptions`]) or by a key that
//! both have ([`SharedKeyOptions`]). Nothing of it is home-made: `rustls` with `ring` does TLS, because it is the most used TLS in
//! Rust and needs a C compiler only; `snow` does Noise, the most used pre-shared-key handshake that `rustls` has no match for.
//!
//! Invariants:
//! - What a stranger can make this module allocate is one TLS handshake message (64 KiB) or 118 bytes with a shared key.
//! - A link never falls back to something weaker, and is never resumed: each proves anew.
//! - A link that was cut off or tampered with reads as an error, never as an end.
//! - No secret is printed, by `Debug` or in an error.
//!
//! It is not: authorisation beyond [who may be which engine](AllowedPeer), a limit on connections or time (its caller's), or
//! protection of the data lanes, which have their own transports. `docs/security.md` has the whole picture.

#![allow(unexpected_cfgs, reason = "`cargo fuzz` sets `fuzzing`")]

mod allow;
#[cfg(fuzzing)]
mod cheap;
mod error;
mod frames;
mod key;
mod material;
mod noise;
mod stream;
#[cfg(test)]
mod tests;
mod tls;
mod verify;

use tokio::io::{AsyncRead, AsyncWrite};

pub use allow::{AllowedPeer, FLEET};
pub use error::{SecureError, SecurityError};
pub use key::{MAX_KEY_ID, SharedKeyBuilder, SharedKeyOptions};
pub use material::Material;
pub use stream::Secured;
pub use tls::{TlsBuilder, TlsOptions};

/// How control links are authenticated and encrypted. Both ends need the same kind.
///
/// Clones share what [`reload`](Self::reload) reads: keep one to renew certificates while the engine runs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Security {
    /// Not at all: whoever can connect is believed.
    Plaintext,
    /// TLS 1.3 with certificates at both ends.
    Tls(TlsOptions),
    /// A key that both ends have.
    SharedKey(SharedKeyOptions),
}

impl Security {
    /// Whether the other end is authenticated and the bytes are encrypted.
    #[must_use]
    pub fn protects(&self) -> bool {
        !matches!(self, Self::Plaintext)
    }

    /// Reads the files again. Links made from now on use what is in them; links that are up stay as they are.
    ///
    /// # Errors
    /// As when it was built; what was read before stays in use then.
    pub fn reload(&self) -> Result<(), SecurityError> {
        match self {
            Self::Plaintext => Ok(()),
            Self::Tls(options) => options.reload(),
            Self::SharedKey(options) => options.reload(),
        }
    }
}

impl From<TlsOptions> for Security {
    fn from(options: TlsOptions) -> Self {
        Self::Tls(options)
    }
}

impl From<SharedKeyOptions> for Security {
    fn from(options: SharedKeyOptions) -> Self {
        Self::SharedKey(options)
    }
}

/// Secures a connection that this end made. `expected`: a name that the other end has to prove besides being on the allow-list, for
/// whoever knows which engine is to be at that address.
///
/// With TLS, this end is sure of the other when this returns, and learns from its first read whether the other refuses it.
///
/// # Errors
/// If the other end can't be authenticated, isn't the expected one, or the connection fails. The connection is closed then.
pub async fn client<S>(stream: S, security: &Security, expected: Option<&str>) -> Result<Secured<S>, SecureError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let secured = match security {
        Security::Plaintext => Secured::plain(stream),
        Security::Tls(options) => Secured::tls(options.connect(stream).await?),
        Security::SharedKey(options) => Secured::keyed(noise::connect(stream, options).await?),
    };
    match expected {
        Some(expected) if !secured.names().is_some_and(|names| names.iter().any(|n| n == expected)) => {
            let names = secured.names().map(|names| names.to_vec()).unwrap_or_default();
            Err(SecureError::OtherPeer { expected: expected.into(), names })
        }
        _ => Ok(secured),
    }
}

/// Secures a connection that the other end made.
///
/// # Errors
/// If the other end can't be authenticated or isn't on the allow-list, or the connection fails. The connection is closed then.
pub async fn server<S>(stream: S, security: &Security) -> Result<Secured<S>, SecureError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match security {
        Security::Plaintext => Ok(Secured::plain(stream)),
        Security::Tls(options) => options.accept(stream).await.map(Secured::tls),
        Security::SharedKey(options) => noise::accept(stream, options).await.map(Secured::keyed),
    }
}
