//! A link that was secured, whichever way.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvferry_proto::handshake::Allowed;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;
use tokio_rustls::rustls::Error as TlsError;

use super::frames::KeyedStream;
use super::{noise, tls};

/// Who is at the other end.
#[derive(Clone, Default, Debug)]
pub(super) struct Peer {
    pub(super) names: Option<Arc<[String]>>,
    pub(super) engines: Option<Arc<Allowed>>,
}

/// A link whose other end is known, as far as its [`Security`](super::Security) goes, and whose bytes are protected by it.
///
/// It may be divided by [`tokio::io::split`], so that one task reads and another writes. What was written may wait until it is
/// flushed: flush after the last write of a burst. Shut it down to end it well; an end that the other end didn't announce is an
/// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) at the reader's (but for plaintext, which can't tell).
pub struct Secured<S> {
    way: Way<S>,
    peer: Peer,
}

enum Way<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
    Keyed(Box<KeyedStream<S>>),
}

impl<S> Secured<S> {
    pub(super) fn plain(stream: S) -> Self {
        Self { way: Way::Plain(stream), peer: Peer::default() }
    }

    pub(super) fn tls((stream, peer): (TlsStream<S>, Peer)) -> Self {
        Self { way: Way::Tls(Box::new(stream)), peer }
    }

    pub(super) fn keyed((stream, peer): (KeyedStream<S>, Peer)) -> Self {
        Self { way: Way::Keyed(Box::new(stream)), peer }
    }

    /// What protects it, for people.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self.way {
            Way::Plain(_) => "plaintext",
            Way::Tls(_) => tls::KIND,
            Way::Keyed(_) => noise::KIND,
        }
    }

    /// What the other end has proven: the DNS and URI names of its certificate, or the id of its key. `None` for plaintext.
    #[must_use]
    pub fn names(&self) -> Option<Arc<[String]>> {
        self.peer.names.clone()
    }

    /// The engines that the other end may say it is; `None` if any.
    #[must_use]
    pub fn engines(&self) -> Option<Arc<Allowed>> {
        self.peer.engines.clone()
    }

    /// The socket.
    #[must_use]
    pub fn get_ref(&self) -> &S {
        match &self.way {
            Way::Plain(stream) => stream,
            Way::Tls(stream) => stream.get_ref().0,
            Way::Keyed(stream) => stream.get_ref(),
        }
    }

    /// The socket itself, if nothing protects it: it can be divided without a lock.
    ///
    /// # Errors
    /// This link, if something does.
    pub fn into_plaintext(self) -> Result<S, Self> {
        match self.way {
            Way::Plain(stream) => Ok(stream),
            way => Err(Self { way, peer: self.peer }),
        }
    }
}

impl<S> fmt::Debug for Secured<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("kind", &self.kind()).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// TLS's errors tell what to do about them; others stay as they are.
fn told(result: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
    match result {
        Poll::Ready(Err(error)) if error.get_ref().is_some_and(|e| e.is::<TlsError>()) => {
            Poll::Ready(Err(io::Error::new(error.kind(), tls::failure(error))))
        }
        other => other,
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Secured<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.way {
            Way::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Way::Tls(stream) => told(Pin::new(&mut **stream).poll_read(cx, buf)),
            Way::Keyed(stream) => Pin::new(&mut **stream).poll_read(cx, buf),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Secured<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.way {
            Way::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Way::Tls(stream) => Pin::new(&mut **stream).poll_write(cx, bytes),
            Way::Keyed(stream) => Pin::new(&mut **stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.way {
            Way::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Way::Tls(stream) => told(Pin::new(&mut **stream).poll_flush(cx)),
            Way::Keyed(stream) => Pin::new(&mut **stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.way {
            Way::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Way::Tls(stream) => told(Pin::new(&mut **stream).poll_shutdown(cx)),
            Way::Keyed(stream) => Pin::new(&mut **stream).poll_shutdown(cx),
        }
    }
}
