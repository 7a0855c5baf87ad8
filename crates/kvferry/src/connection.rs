//! One connection: a task that reads frames and hands messages to the driver, a task that writes what the driver gives.
//!
//! A peer that sends nonsense, sends slowly or takes nothing harms its own connection only: the reader waits for the driver
//! by itself, what is to be written is bounded, and a write that makes no progress ends the connection.

use std::time::Duration;

use kvferry_proto::wire::{Frame, FrameReader};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::address::Address;

/// Frames that wait for a slow reader at the other end, at most.
const OUTBOX: usize = 1024;
/// How long one frame may take to be written.
const WRITE: Duration = Duration::from_secs(30);

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
    outbox: mpsc::Sender<Vec<u8>>,
    reader: AbortHandle,
}

impl Connection {
    /// Takes over a socket. `tell` hands what is heard to the driver, and gives false when nothing more is wanted.
    pub(crate) fn start<F, R>(stream: Stream, tell: F) -> Self
    where
        F: FnMut(Heard) -> R + Send + 'static,
        R: Future<Output = bool> + Send + 'static,
    {
        match stream {
            Stream::Tcp(s) => {
                // Messages are small and answers are awaited. Where it can't be set, it is only slower.
                drop(s.set_nodelay(true));
                let (read, write) = s.into_split();
                Self::run(read, write, tell)
            }
            Stream::Unix(s) => {
                let (read, write) = s.into_split();
                Self::run(read, write, tell)
            }
        }
    }

    fn run<F, R>(
        read: impl AsyncRead + Unpin + Send + 'static,
        write: impl AsyncWrite + Unpin + Send + 'static,
        tell: F,
    ) -> Self
    where
        F: FnMut(Heard) -> R + Send + 'static,
        R: Future<Output = bool> + Send + 'static,
    {
        let (outbox, inbox) = mpsc::channel(OUTBOX);
        let reader = tokio::spawn(listen(read, tell)).abort_handle();
        tokio::spawn(speak(write, inbox));
        Self { outbox, reader }
    }

    /// Gives a frame to be written; false if the other end takes nothing any more.
    pub(crate) fn send(&self, frame: Vec<u8>) -> bool {
        self.outbox.try_send(frame).is_ok()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn listen<F, R>(mut read: impl AsyncRead + Unpin, mut tell: F)
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

async fn speak(mut write: impl AsyncWrite + Unpin, mut inbox: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = inbox.recv().await {
        match tokio::time::timeout(WRITE, write.write_all(&frame)).await {
            Ok(Ok(())) => {}
            // The driver learns of it when its next frame is refused, or from the reader.
            Ok(Err(_)) | Err(_) => return,
        }
    }
    // Closed already is as good.
    drop(write.shutdown().await);
}
