//! One connection over a socket: a task that reads messages and hands them to the driver, a task that writes what the driver gives.
//!
//! All that has come in one read goes to the driver as one piece of news; all that waits to be written goes out in one write.
//! An idle connection has no buffers: what is read is read into its thread's, and kept only as far as it is part of a frame.
//!
//! A peer that sends nonsense, sends slowly or takes nothing harms its own connection only. The reader waits for the driver by
//! itself: it has a few credits, each hands over what one read has brought, and the driver gives it back when it has dealt
//! with that, or later. A frame that has begun must be complete within `FRAME`, or the connection ends; so does one that takes
//! nothing that is written for `WRITE`. What waits to be written is counted in bytes; the connection itself refuses nothing for
//! its length: its owner looks at the count and keeps the credits of whoever fills it. A closed connection lives on for as
//! long as its last piece makes progress and then for `LINGER`, and is counted nowhere.

use std::cell::RefCell;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::FromRank;
use kvferry_proto::wire::{self, Frame, FrameReader};
use kvferry_session::owner::{LinkId, RankLinkId};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinHandle};

use crate::driver::News;
use crate::driver::inbox::Sender;
use crate::owner::options::ConnectionLimits;

mod outbox;
#[cfg(test)]
mod tests;

use outbox::{Outbox, Written};

/// Bytes that wait for a slow reader at the other end: beyond this, whoever fills them should be paused.
pub(crate) const FULL: usize = 16 << 20;
/// When the bytes fall to this, the driver is told that something has [drained](News::Drained).
pub(crate) const DRAINED: usize = 4 << 20;
/// Bytes that are written at a time, and how long they may take.
const CHUNK: usize = 256 << 10;
const WRITE: Duration = Duration::from_secs(30);
/// How long a frame may take from its first byte to its last.
const FRAME: Duration = Duration::from_secs(30);
/// How long the writing of what is left may take after the connection was given up.
pub(crate) const LINGER: Duration = Duration::from_secs(5);
/// Bytes that are read at a time.
const READ: usize = 64 << 10;
/// Reads whose messages may wait for the driver: so that a reader can read while the driver works.
const CREDITS: usize = 2;
/// Bodies longer than this are decoded beside the runtime's threads, and only so many at a time, but for those of our own ranks.
const LONG: usize = 32 << 10;
const LONG_MESSAGES: usize = 2;

/// A socket of either kind, as it is or under protection.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Secured(Box<dyn Duplex>),
}

/// A stream of bytes in both directions.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send + fmt::Debug {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + fmt::Debug> Duplex for S {}

/// What the connections of an owner share.
#[derive(Debug)]
pub(crate) struct Common {
    /// Long messages of strangers that are decoded at a time: each may be a hello of whom nobody knows yet.
    long_of_strangers: Arc<Semaphore>,
    /// The same of peers: strangers don't delay them.
    long_of_peers: Arc<Semaphore>,
    /// The longest message of a stranger.
    stranger_message: usize,
    /// Bytes of unfinished messages of all strangers, and the limit on them.
    stranger_bytes: (AtomicUsize, usize),
}

impl Common {
    pub(crate) fn new(limits: &ConnectionLimits) -> Self {
        Self {
            long_of_strangers: Arc::new(Semaphore::new(LONG_MESSAGES)),
            long_of_peers: Arc::new(Semaphore::new(LONG_MESSAGES)),
            stranger_message: limits.stranger_message,
            stranger_bytes: (AtomicUsize::new(0), limits.stranger_bytes),
        }
    }
}

/// Whom a connection leads to: what its frames mean, and how the driver is told of them.
pub(crate) trait Voice: Copy + Send + Sync + 'static {
    type Message: Send + 'static;
    /// Whether it is trusted from the beginning.
    const TRUSTED: bool;
    fn decode(frame: &Frame) -> Result<Self::Message, String>;
    fn said(self, messages: Vec<Self::Message>) -> News;
    /// What is told of a stranger's long message while it is decoded.
    fn claims(self, _: &Frame) -> Option<News> {
        None
    }
    fn nonsense(self, reason: String) -> News;
    fn closed(self, reason: String) -> News;
}

impl Voice for LinkId {
    type Message = PeerMessage;
    const TRUSTED: bool = false;
    fn decode(frame: &Frame) -> Result<PeerMessage, String> {
        wire::decode_peer(frame).map_err(|e| e.to_string())
    }
    fn said(self, messages: Vec<PeerMessage>) -> News {
        News::PeerSaid(self, messages)
    }
    fn claims(self, frame: &Frame) -> Option<News> {
        wire::claim(frame).map(|claim| News::PeerClaims(self, claim))
    }
    fn nonsense(self, reason: String) -> News {
        News::PeerNonsense(self, reason)
    }
    fn closed(self, reason: String) -> News {
        News::PeerClosed(self, reason)
    }
}

impl Voice for RankLinkId {
    type Message = FromRank;
    const TRUSTED: bool = true;
    fn decode(frame: &Frame) -> Result<FromRank, String> {
        wire::decode_from_rank(frame).map_err(|e| e.to_string())
    }
    fn said(self, messages: Vec<FromRank>) -> News {
        News::RankSaid(self, messages)
    }
    fn nonsense(self, reason: String) -> News {
        News::RankClosed(self, reason)
    }
    fn closed(self, reason: String) -> News {
        News::RankClosed(self, reason)
    }
}

/// The driver's end of a connection. Dropping it closes the connection once what was given to it is written.
pub(crate) struct Connection {
    outbox: Outbox,
    control: Arc<Control>,
    reader: Reader,
    writer: JoinHandle<()>,
}

/// What the driver tells the reader.
#[derive(Debug)]
struct Control {
    credits: Semaphore,
    /// Whether it is known who is at the other end.
    trusted: AtomicBool,
}

/// The reader's task, which ends with this.
struct Reader(AbortHandle);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connection {
    /// Takes over a socket. `news` is where what is heard goes, and word when little waits to be written any more.
    pub(crate) fn start<V: Voice>(stream: Stream, whose: V, news: Sender<News>, common: Arc<Common>) -> Self {
        match stream {
            Stream::Tcp(s) => {
                let (read, write) = s.into_split();
                Self::run(read, write, whose, news, common)
            }
            Stream::Unix(s) => {
                let (read, write) = s.into_split();
                Self::run(read, write, whose, news, common)
            }
            Stream::Secured(s) => {
                let (read, write) = tokio::io::split(s);
                Self::run(read, write, whose, news, common)
            }
        }
    }

    fn run<V: Voice>(
        read: impl AsyncRead + Unpin + Send + 'static,
        write: impl AsyncWrite + Unpin + Send + 'static,
        whose: V,
        news: Sender<News>,
        common: Arc<Common>,
    ) -> Self {
        let (outbox, written) = outbox::outbox();
        let (credits, trusted) = (Semaphore::new(CREDITS), AtomicBool::new(V::TRUSTED));
        let control = Arc::new(Control { credits, trusted });
        let listener = Listener { whose, news: news.clone(), control: control.clone(), common };
        let reader = Reader(tokio::spawn(listener.listen(read)).abort_handle());
        let writer = tokio::spawn(speak(write, written, whose, news));
        Self { outbox, control, reader, writer }
    }

    /// Gives a frame to be written with the next [`flush`](Self::flush); false if the other end takes nothing any more.
    pub(crate) fn send(&mut self, frame: Vec<u8>) -> bool {
        self.outbox.send(frame)
    }

    /// Lets what was sent be written.
    pub(crate) fn flush(&mut self) {
        self.outbox.flush();
    }

    /// Bytes that wait to be written.
    pub(crate) fn waiting(&self) -> usize {
        self.outbox.waiting()
    }

    /// Gives the reader a credit back: one for each piece of news.
    pub(crate) fn credit(&self) {
        self.control.credits.add_permits(1);
    }

    /// From now on it is known who is at the other end, and messages may be as long as any.
    pub(crate) fn trust(&self) {
        self.control.trusted.store(true, Ordering::Relaxed);
    }

    /// Closes it; the handle tells when what was given to it is written.
    pub(crate) fn close(self) -> JoinHandle<()> {
        drop(self.reader);
        drop(self.outbox);
        self.writer
    }
}

struct Listener<V> {
    whose: V,
    news: Sender<News>,
    control: Arc<Control>,
    common: Arc<Common>,
}

/// What a stranger's unfinished message counts for; given back with this.
struct Share<'a> {
    of: &'a AtomicUsize,
    bytes: usize,
}

impl Share<'_> {
    /// Counts so many bytes instead; gives what all strangers have then.
    fn set(&mut self, bytes: usize) -> usize {
        let before = std::mem::replace(&mut self.bytes, bytes);
        let all = self.of.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
        self.of.fetch_sub(before, Ordering::Relaxed);
        all.wrapping_sub(before)
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<V: Voice> Listener<V> {
    /// Reads until the connection ends, one way or the other, and says how.
    async fn listen(self, mut read: impl AsyncRead + Unpin) {
        let mut frames = FrameReader::new(self.common.stranger_message);
        let (of, most) = &self.common.stranger_bytes;
        let mut share = Some(Share { of, bytes: 0 });
        let mut slow = None;
        let last = loop {
            let came = match &mut slow {
                None => read_some(&mut read, &mut frames).await,
                Some(late) => {
                    tokio::select! {
                        came = read_some(&mut read, &mut frames) => came,
                        () = late => break self.whose.closed(format!("a frame was not complete within {FRAME:?}")),
                    }
                }
            };
            match came {
                Ok(0) => {
                    let reason = frames.finish().map_or_else(|e| e.to_string(), |()| "the other end closed it".into());
                    break self.whose.closed(reason);
                }
                Ok(_) => {}
                Err(error) => break self.whose.closed(error.to_string()),
            }
            if share.is_some() && self.control.trusted.load(Ordering::Relaxed) {
                frames.set_limit(wire::MAX_FRAME);
                share = None;
            }
            let (messages, fault) = self.messages(&mut frames).await;
            if !messages.is_empty() {
                slow = None;
                let Ok(credit) = self.control.credits.acquire().await else { return };
                credit.forget();
                if self.news.send(self.whose.said(messages)).is_err() {
                    return;
                }
            }
            if let Some(reason) = fault {
                break self.whose.nonsense(reason);
            }
            let unfinished = frames.waiting();
            if unfinished == 0 {
                slow = None;
            } else if slow.is_none() {
                slow = Some(Box::pin(tokio::time::sleep(FRAME)));
            }
            if share.as_mut().is_some_and(|share| share.set(unfinished) > *most) {
                break self
                    .whose
                    .closed(format!("those who have not said who they are have sent more than {most} bytes"));
            }
        };
        // Refused only when the driver is gone.
        drop(self.news.send(last));
    }

    /// The messages that are complete, and what is wrong with what follows them.
    async fn messages(&self, frames: &mut FrameReader) -> (Vec<V::Message>, Option<String>) {
        let mut messages = Vec::new();
        loop {
            let frame = match frames.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => return (messages, None),
                Err(error) => return (messages, Some(error.to_string())),
            };
            match self.decode(frame, messages.is_empty()).await {
                Ok(message) => messages.push(message),
                Err(reason) => return (messages, Some(reason)),
            }
        }
    }

    /// Decodes a frame; a long one beside the runtime's threads, and only a few at a time. Our ranks wait for nobody. What a stranger
    /// [claims](Voice::claims) is told meanwhile, but not before what came `first` in the same read.
    async fn decode(&self, frame: Frame, first: bool) -> Result<V::Message, String> {
        if frame.body.len() <= LONG {
            return V::decode(&frame);
        }
        let stranger = !V::TRUSTED && !self.control.trusted.load(Ordering::Relaxed);
        let pool = match V::TRUSTED {
            true => None,
            false if stranger => Some(&self.common.long_of_strangers),
            false => Some(&self.common.long_of_peers),
        };
        let permit = match pool {
            Some(pool) => Some(pool.clone().acquire_owned().await.map_err(|e| e.to_string())?),
            None => None,
        };
        if stranger
            && first
            && let Some(news) = self.whose.claims(&frame)
        {
            // Refused only when the driver is gone.
            drop(self.news.send(news));
        }
        // What is being decoded counts until it is, also where the connection ends meanwhile.
        let decode = move || {
            let _permit = permit;
            V::decode(&frame)
        };
        tokio::task::spawn_blocking(decode).await.map_err(|e| e.to_string())?
    }
}

thread_local! {
    /// What is read lies here until it has been given to its frame reader, within one poll.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into());
}

/// Reads what has come, at least a byte, into `frames`; gives how many bytes, 0 at the end. Nothing is lost where it is dropped.
async fn read_some(read: &mut (impl AsyncRead + Unpin), frames: &mut FrameReader) -> std::io::Result<usize> {
    std::future::poll_fn(|cx| {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buffer = ReadBuf::new(scratch);
            match Pin::new(&mut *read).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) => {
                    let came = buffer.filled();
                    if !came.is_empty() {
                        frames.extend(came);
                    }
                    Poll::Ready(Ok(came.len()))
                }
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            }
        })
    })
    .await
}

async fn speak<V: Voice>(mut write: impl AsyncWrite + Unpin, mut outbox: Written, whose: V, news: Sender<News>) {
    let mut rest = Vec::new();
    let mut progress = true;
    'pieces: while let Some(piece) = outbox.next().await {
        let mut at = 0;
        while at < piece.len() {
            if outbox.is_closing() {
                rest = piece;
                rest.drain(..at);
                break 'pieces;
            }
            let chunk = &piece[at..piece.len().min(at + CHUNK)];
            let write = async {
                write.write_all(chunk).await?;
                write.flush().await
            };
            match tokio::time::timeout(WRITE, write).await {
                Ok(Ok(())) => {}
                failed => {
                    progress = false;
                    // A broken connection is the reader's to tell: the other end may have said why before it closed.
                    if failed.is_err() {
                        drop(news.send(whose.closed(format!("it has taken nothing for {WRITE:?}"))));
                    }
                    break 'pieces;
                }
            }
            at += chunk.len();
            if outbox.written(chunk.len(), DRAINED) {
                // Refused only when the driver is gone.
                drop(news.send(News::Drained));
            }
        }
        outbox.recycle(piece);
    }
    if progress {
        // Given up by our side.
        rest.append(&mut outbox.rest());
        let rest = async {
            write.write_all(&rest).await?;
            write.shutdown().await
        };
        // Closed already is as good.
        drop(tokio::time::timeout(LINGER, rest).await);
    }
    outbox.end();
    drop(news.send(News::Drained));
}
