//! What the two sides of a preflight say to each other beside the lane: JSON in frames of a length and as many bytes, over
//! a socket pair or TCP.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The longest frame: a blob of a few regions is far below it.
const LONGEST: u32 = 4 << 20;
/// How long the other side may take to go on with a frame that it has begun, or to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// What either side expects of the other.
pub(super) const VERSION: u32 = 1;

/// From the side that measures.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Open a transport with one region of so many bytes.
    Open { version: u32, transport: String, bytes: u64 },
    /// Close it.
    Close,
}

/// From the side that is read from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It is open.
    Open { blob: Vec<u8> },
    /// It is closed.
    Closed,
    /// It can't be.
    Failed(String),
}

/// Either kind of stream.
#[derive(Debug)]
pub(super) enum Line {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Line {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self::Unix(stream))
    }

    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub(super) fn say<T: Serialize>(&mut self, message: &T) -> anyhow::Result<()> {
        let text = serde_json::to_vec(message)?;
        let len = u32::try_from(text.len()).ok().filter(|&n| n <= LONGEST).context("a message that is too long")?;
        let frame = [&len.to_le_bytes()[..], &text].concat();
        self.write_all(&frame).context("the other side takes nothing")
    }

    /// The next message; `None` where the other side is gone.
    pub(super) fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        let mut len = [0; 4];
        match self.read_exact(&mut len) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                return Ok(None);
            }
            Err(e) => return Err(e).context("the other side says nothing"),
        }
        let len = u32::from_le_bytes(len);
        if len > LONGEST {
            bail!("the other side announces {len} bytes, {LONGEST} are allowed: it is no preflight of this version");
        }
        let mut text = Vec::new();
        self.take(len.into()).read_to_end(&mut text)?;
        if text.len() as u64 != u64::from(len) {
            return Ok(None);
        }
        serde_json::from_slice(&text).map(Some).context("the other side says what is no message of a preflight")
    }
}

impl Read for Line {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(s) => s.read(buf),
            Self::Tcp(s) => s.read(buf),
        }
    }
}

impl Write for Line {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(s) => s.write(buf),
            Self::Tcp(s) => s.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(s) => s.flush(),
            Self::Tcp(s) => s.flush(),
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(s) => s.as_fd(),
            Self::Tcp(s) => s.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (UnixStream, Line) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, Line::unix(theirs).unwrap())
    }

    #[test]
    fn messages_arrive_as_they_were_said() {
        let (ours, mut theirs) = pair();
        let mut ours = Line::unix(ours).unwrap();
        let ask = Ask::Open { version: VERSION, transport: "ucx".into(), bytes: 5 };
        ours.say(&ask).unwrap();
        ours.say(&Ask::Close).unwrap();
        assert_eq!(theirs.hear::<Ask>().unwrap(), Some(ask));
        assert_eq!(theirs.hear::<Ask>().unwrap(), Some(Ask::Close));
        drop(ours);
        assert_eq!(theirs.hear::<Ask>().unwrap(), None);
    }

    #[test]
    fn what_is_no_message_is_an_error_and_takes_no_memory() {
        for (bytes, expected) in [
            (&b"GET / HTTP/1.1\r\n"[..], "no preflight"),
            (b"\xff\xff\xff\xff", "no preflight"),
            (b"\x02\0\0\0{}", "no message"),
        ] {
            let (mut ours, mut theirs) = pair();
            ours.write_all(bytes).unwrap();
            let error = format!("{:#}", theirs.hear::<Ask>().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        // Cut in the middle: gone.
        let (mut ours, mut theirs) = pair();
        ours.write_all(b"\x09\0\0\0\"Clo").unwrap();
        drop(ours);
        assert_eq!(theirs.hear::<Ask>().unwrap(), None);
    }
}
