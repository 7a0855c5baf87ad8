//! One connection: a task that reads frames and hands messages to the driver, a task that writes what the driver gives.
//!
//! A peer that sends nonsense, sends slowly or takes nothing harms its own connection only: the reader waits for the driver
//! by itself, and a write that makes no progress ends the connection. What waits to be written is counted in bytes; the
//! connection itself refuses nothing for its length: its owner looks at the count and pauses whoever fills it. A closed
//! connection lives on for as long as its last frame makes progress and then for `LINGER`, and is counted nowhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvferry_proto::wire::{Frame, FrameReader};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinHandle};

use crate::address::Address;

/// Bytes that wait for a slow reader at the other end: beyond this, whoever fills them should be paused.
pub(crate) const FULL: usize = 16 << 20;
/// When the bytes fall to this, [`Connection::start`]'s `drained` is notified.
pub(crate) const DRAINED: usize = 4 << 20;
/// Bytes that are written at a time, and how long they may take.
const CHUNK: usize = 256 << 10;
const WRITE: Duration = Duration::from_secs(30);
/// How long the writing of what is left may take after the connection was given up.
pub(crate) const LINGER: Duration = Duration::from_secs(5);

/// A socket of either kind.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects to an owner.
    pub(crate) async fn connect(address: &Address) -> std::io::Result<Self> {
        match address {
            Address::Tcp(socket) => TcpStream::connect(socket).await.map(Self::Tcp),
            Address::Unix(path) => UnixStream::connect(path).await.map(Self::Unix),
        }
    }
}

/// What a connection's reader reports.
pub(crate) enum Heard {
    /// A frame.
    Frame(Frame),
    /// The bytes make no sense: why. Nothing more comes.
    Nonsense(String),
    /// It is closed: why. Nothing more comes.
    Closed(String),
}

/// The driver's end of a connection. Dropping it closes the connection once what was given to it is written.
pub(crate) struct Connection {
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    paused: watch::Sender<bool>,
    reader: Reader,
    writer: JoinHandle<()>,
}

/// The reader's task, which ends with this.
struct Reader(AbortHandle);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connection {
    /// Takes over a socket. `tell` hands what is heard to the driver, and gives false when nothing more is wanted. `drained` is
    /// notified when little waits to be written any more, or never will be.
    pub(crate) fn start<F, R>(stream: Stream, drained: Arc<Notify>, tell: F) -> Self
    where
        F: FnMut(Heard) -> R + Send + 'static,
        R: Future<Output = bool> + Send + 'static,
    {
        match stream {
            Stream::Tcp(s) => {
                // Messages are small and answers are awaited. Where it can't be set, it is only slower.
                drop(s.set_nodelay(true));
                // A peer whose host has vanished is noticed in the end. Where it can't be set, only by its silence.
                let _ = rustix::net::sockopt::set_socket_keepalive(&s, true);
                let (read, write) = s.into_split();
                Self::run(read, write, drained, tell)
            }
            Stream::Unix(s) => {
                let (read, write) = s.into_split();
                Self::run(read, write, drained, tell)
            }
        }
    }

    fn run<F, R>(
        read: impl AsyncRead + Unpin + Send + 'static,
        write: impl AsyncWrite + Unpin + Send + 'static,
        drained: Arc<Notify>,
        tell: F,
    ) -> Self
    where
        F: FnMut(Heard) -> R + Send + 'static,
        R: Future<Output = bool> + Send + 'static,
    {
        let (outbox, inbox) = mpsc::unbounded_channel();
        let (paused, gate) = watch::channel(false);
        let waiting = Arc::new(AtomicUsize::new(0));
        let reader = Reader(tokio::spawn(listen(read, gate, tell)).abort_handle());
        let writer = tokio::spawn(speak(write, inbox, waiting.clone(), drained));
        Self { outbox, waiting, paused, reader, writer }
    }

    /// Gives a frame to be written; false if the other end takes nothing any more.
    pub(crate) fn send(&self, frame: Vec<u8>) -> bool {
        self.waiting.fetch_add(frame.len(), Ordering::Relaxed);
        self.outbox.send(frame).is_ok()
    }

    /// Bytes that wait to be written.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the reader is to hold back the next frame.
    pub(crate) fn pause(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// Closes it; the handle tells when what was given to it is written.
    pub(crate) fn close(self) -> JoinHandle<()> {
        drop(self.reader);
        self.writer
    }
}

async fn listen<F, R>(mut read: impl AsyncRead + Unpin, mut gate: watch::Receiver<bool>, mut tell: F)
where
    F: FnMut(Heard) -> R,
    R: Future<Output = bool>,
{
    let mut frames = FrameReader::default();
    let mut buffer = vec![0u8; 16 << 10];
    loop {
        let n = match read.read(&mut buffer).await {
            Ok(0) => {
                let reason = match frames.finish() {
                    Ok(()) => "the other end closed it".to_owned(),
                    Err(error) => error.to_string(),
                };
                tell(Heard::Closed(reason)).await;
                return;
            }
            Ok(n) => n,
            Err(error) => {
                tell(Heard::Closed(error.to_string())).await;
                return;
            }
        };
        frames.extend(&buffer[..n]);
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => {
                    if gate.wait_for(|paused| !paused).await.is_err() {
                        return;
                    }
                    if !tell(Heard::Frame(frame)).await {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tell(Heard::Nonsense(error.to_string())).await;
                    return;
                }
            }
        }
    }
}

async fn speak(
    mut write: impl AsyncWrite + Unpin,
    mut inbox: mpsc::UnboundedReceiver<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    drained: Arc<Notify>,
) {
    let mut progress = true;
    while progress && !inbox.is_closed() {
        let Some(frame) = inbox.recv().await else { break };
        // What fails is learnt when the next frame is refused, or from the reader.
        progress = put(&mut write, &frame).await;
        let before = waiting.fetch_sub(frame.len(), Ordering::Relaxed);
        if before > DRAINED && before - frame.len() <= DRAINED {
            drained.notify_one();
        }
    }
    if progress {
        // Given up by our side.
        let rest = async {
            while let Some(frame) = inbox.recv().await {
                write.write_all(&frame).await?;
            }
            write.shutdown().await
        };
        // Closed already is as good.
        drop(tokio::time::timeout(LINGER, rest).await);
    }
    inbox.close();
    drained.notify_one();
}

/// Writes a frame; false if that fails or makes no progress.
async fn put(write: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> bool {
    for chunk in frame.chunks(CHUNK) {
        if !matches!(tokio::time::timeout(WRITE, write.write_all(chunk)).await, Ok(Ok(()))) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use kvferry_proto::peer::PeerMessage;
    use kvferry_proto::wire::encode_peer;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    /// A connection, what it hears, and its other end.
    fn connection(drained: &Arc<Notify>) -> (Connection, mpsc::UnboundedReceiver<bool>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (tell, heard) = mpsc::unbounded_channel();
        let connection = Connection::start(Stream::Unix(ours), drained.clone(), move |heard| {
            let more = tell.send(matches!(heard, Heard::Frame(_))).is_ok();
            async move { more }
        });
        (connection, heard, theirs)
    }

    #[tokio::test]
    async fn a_paused_reader_holds_its_frames_back() {
        let (connection, mut heard, mut theirs) = connection(&Arc::new(Notify::new()));
        let frame = encode_peer(&PeerMessage::Refused(vec!["no".into()])).unwrap();
        connection.pause(true);
        theirs.write_all(&frame).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(100), heard.recv()).await.is_err());
        connection.pause(false);
        assert_eq!(tokio::time::timeout(SOON, heard.recv()).await, Ok(Some(true)));
    }

    /// However much waits, nothing is refused or lost; the count tells, and so does the notice when it is written.
    #[tokio::test]
    async fn what_waits_is_counted_and_written_to_the_end() {
        let drained = Arc::new(Notify::new());
        let (connection, _heard, mut theirs) = connection(&drained);
        let (frames, len) = (3000, 16 << 10);
        for _ in 0..frames {
            assert!(connection.send(vec![7; len]));
        }
        tokio::task::yield_now().await;
        assert!(connection.waiting() > FULL, "nobody has read");
        let reader = tokio::spawn(async move {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).await.map(|_| all.len())
        });
        tokio::time::timeout(SOON, drained.notified()).await.unwrap();
        assert!(connection.waiting() <= DRAINED);
        tokio::time::timeout(SOON, connection.close()).await.unwrap().unwrap();
        assert_eq!(reader.await.unwrap().unwrap(), frames * len);
    }
}
