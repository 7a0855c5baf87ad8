//! What the demo itself says to its ranks: lines of JSON over a socket pair. The cache's own control messages and bytes
//! don't come this way.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::image::Verdict;
use super::wire::Moved;

/// From the demo to a rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Compute a request anew: its cache is filled with the bytes of its so-manieth computation.
    Prefill {
        /// Which request.
        request: usize,
        /// Which computation of it; the first is 0 and fills the memory at the start.
        turn: u32,
        /// Only these items of it; null for all.
        items: Option<Vec<u32>>,
    },
    /// What was written since this was last asked for.
    Log,
    /// Compare every byte, at the decode engine with the computations that were delivered, one for each request.
    Verify {
        /// Those that are not the first; none means that all are.
        turns: Vec<u32>,
    },
    /// Make ready to copy the same runs by memcpy, in memory that has been touched.
    Prepare,
    /// Copy them.
    Copy,
    /// Stop.
    Quit,
}

/// From a rank to the demo.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Memory is filled and registered, the owner is joined.
    Ready,
    /// The answer to `Prefill`.
    Prefilled,
    /// The answer to `Log`.
    Log(Vec<Moved>),
    /// The outcome of `Verify`.
    Verdict(Verdict),
    /// The answer to `Prepare`.
    Prepared,
    /// The outcome of `Copy`.
    Copied {
        /// Bytes copied.
        bytes: u64,
        /// How long it took.
        seconds: f64,
    },
    /// The rank can't go on.
    Failed(String),
}

/// One end of the line.
#[derive(Debug)]
pub(crate) struct Link {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Link {
    pub(crate) fn new(stream: UnixStream) -> anyhow::Result<Self> {
        let writer = stream.try_clone()?;
        Ok(Self { reader: BufReader::new(stream), writer })
    }

    pub(crate) fn say<T: Serialize>(&mut self, message: &T) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        Ok(self.writer.write_all(line.as_bytes())?)
    }

    /// The next message; `None` when the other end is gone.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            // Killed in the middle of a line: gone, too.
            Ok(_) if !line.ends_with('\n') => Ok(None),
            Ok(_) => Ok(Some(serde_json::from_str(&line).context("a line that is no message")?)),
            // Killed with unread data in the socket: gone all the same.
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}
