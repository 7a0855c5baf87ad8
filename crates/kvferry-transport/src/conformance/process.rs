//! A peer in a process of its own, for the tests of backends that reach other processes.
//!
//! The peer is the very test binary, started again with only one of its tests and an [`Order`] in its environment. That test
//! is a few lines in each backend:
//!
//! ```no_run
//! # use kvferry_transport::conformance::process::{Order, serve};
//! # use kvferry_transport::{Region, mem::MemNetwork};
//! #[test]
//! fn peer_process() {
//!     let Some(order) = Order::from_environment() else { return };
//!     let endpoint = MemNetwork::new(1).endpoint().unwrap(); // The backend's own.
//!     let why = serve(Box::new(endpoint), Region::zeroed(order.bytes).unwrap());
//!     panic!("{why}");
//! }
//! ```
//!
//! and the other tests start it with [`PeerProcess::start`], which is its handle: its blob, the notifications it got, a sum over
//! its memory, and its death by `SIGKILL`. What is shown with it is in [`death`](super::death).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::bytes::{PEER, fill, sum};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::Event;

const ROLE: &str = "KVFERRY_PEER_ROLE";
const BYTES: &str = "KVFERRY_PEER_BYTES";
/// How long the peer may take to say what it was asked.
const PATIENCE: Duration = Duration::from_secs(60);
/// The block of [`PeerProcess::sum`].
pub const SUM_BLOCK: usize = 4096;

/// What a process was started as.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// In the words of who started it; for variants of one backend.
    pub role: String,
    /// Bytes of the region that it serves.
    pub bytes: usize,
}

impl Order {
    /// `None` in a plain run of the tests.
    #[must_use]
    pub fn from_environment() -> Option<Self> {
        let role = std::env::var(ROLE).ok()?;
        let bytes = std::env::var(BYTES).ok()?.parse().ok()?;
        Some(Self { role, bytes })
    }
}

/// Registers the region, fills it with the bytes of [`PEER`], tells the blob, and serves until the process that
/// started this one is gone. Returns only to say what went wrong.
#[must_use]
pub fn serve(mut endpoint: Box<dyn Transport>, region: Region) -> String {
    match try_serve(&mut *endpoint, &region) {
        Ok(()) => "the orders ended".to_owned(),
        Err(why) => why,
    }
}

fn try_serve(endpoint: &mut dyn Transport, region: &Region) -> Result<(), String> {
    fill(region, 0, region.len().get(), PEER)?;
    endpoint.register(region.clone()).map_err(|e| e.to_string())?;
    say(&format!("\nBLOB {}", to_hex(&endpoint.blob())))?;
    let (send, orders) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
        // Who started us is gone, or done with us.
        std::process::exit(0);
    });
    let start = Instant::now();
    loop {
        let next = endpoint.step(start.elapsed());
        while let Some(event) = endpoint.next_event() {
            if let Event::Notification { payload, .. } = event {
                say(&format!("NOTE {}", to_hex(&payload)))?;
            }
        }
        if orders.try_recv().is_ok() {
            say(&format!("SUM {}", sum(region, 0, region.len().get(), SUM_BLOCK)?))?;
        }
        // Short, for the orders that come by another way.
        let rest = next.map_or(Duration::MAX, |at| at.saturating_sub(start.elapsed()));
        endpoint.wait(Some(rest.min(Duration::from_millis(2))));
    }
}

/// By the handle and not by `println`, which the test runner takes.
fn say(line: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| format!("telling who started us: {e}"))
}

/// A peer process, killed when dropped.
#[derive(Debug)]
pub struct PeerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    /// Lines that were read while another was waited for.
    kept: Vec<String>,
    blob: Vec<u8>,
}

impl PeerProcess {
    /// Starts this binary's test of that name as a peer, and waits for its blob.
    ///
    /// # Errors
    /// If it doesn't start or says no blob; what it said instead.
    pub fn start(test: &str, role: &str, bytes: usize) -> Result<Self, String> {
        Self::start_with(test, role, bytes, &[])
    }

    /// As [`start`](Self::start), with more in its environment.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(test: &str, role: &str, bytes: usize, variables: &[(&str, &str)]) -> Result<Self, String> {
        let this = std::env::current_exe().map_err(|e| format!("this binary's path: {e}"))?;
        let mut command = Command::new(this);
        command.args(["--exact", test, "--nocapture", "--test-threads", "1"]);
        command.env(ROLE, role).env(BYTES, bytes.to_string()).envs(variables.iter().copied());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("starting the peer process: {e}"))?;
        let stdout = child.stdout.take().ok_or("no pipe from the peer process")?;
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        let mut peer = Self { child, stdin, lines, kept: Vec::new(), blob: Vec::new() };
        peer.blob = from_hex(&peer.line("BLOB ")?)?;
        Ok(peer)
    }

    /// Its blob, with one region of the bytes that it was started with, full of [`PEER`]'s bytes.
    #[must_use]
    pub fn blob(&self) -> &[u8] {
        &self.blob
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The sum over its region now, in blocks of [`SUM_BLOCK`]; see [`sum`].
    ///
    /// # Errors
    /// If it doesn't answer.
    pub fn sum(&mut self) -> Result<u64, String> {
        let stdin = self.stdin.as_mut().ok_or("no pipe to the peer process")?;
        stdin.write_all(b"sum\n").map_err(|e| format!("asking the peer process: {e}"))?;
        let line = self.line("SUM ")?;
        line.parse().map_err(|_| format!("the peer's sum is {line:?}"))
    }

    /// The next notification that it got.
    ///
    /// # Errors
    /// If none comes.
    pub fn notification(&mut self) -> Result<Vec<u8>, String> {
        let line = self.line("NOTE ")?;
        from_hex(&line)
    }

    /// Notifications that it has told of and nobody has taken.
    #[must_use]
    pub fn notifications_left(&mut self) -> usize {
        self.kept.extend(self.lines.try_iter());
        self.kept.iter().filter(|line| line.starts_with("NOTE ")).count()
    }

    /// Kills it by `SIGKILL`, and does not wait for its end.
    ///
    /// # Errors
    /// If that fails.
    pub fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(|e| format!("killing the peer process: {e}"))
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// If that fails.
    pub fn wait(&mut self) -> Result<(), String> {
        self.child.wait().map(drop).map_err(|e| format!("awaiting the peer process: {e}"))
    }

    /// What follows the prefix on the next line that has it; other lines are kept.
    fn line(&mut self, prefix: &str) -> Result<String, String> {
        if let Some(at) = self.kept.iter().position(|line| line.starts_with(prefix)) {
            return Ok(self.kept.remove(at)[prefix.len()..].to_owned());
        }
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                return Err(format!("the peer process {} says no {prefix:?}; it said {:?}", self.id(), self.kept));
            };
            match line.strip_prefix(prefix) {
                Some(rest) => return Ok(rest.to_owned()),
                None => self.kept.push(line),
            }
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // Both fail only if it is gone already.
        self.child.kill().unwrap_or(());
        self.child.wait().map(drop).unwrap_or(());
    }
}

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [b >> 4, b & 15]).map(|d| char::from(DIGITS[usize::from(d)])).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    let byte = |pair: &[u8]| std::str::from_utf8(pair).ok().and_then(|s| u8::from_str_radix(s, 16).ok());
    text.as_bytes().chunks(2).map(|pair| byte(pair).ok_or_else(|| format!("no hexadecimal: {text:?}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_goes_there_and_back() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)), Ok(bytes));
        assert!(from_hex("0g").is_err());
    }
}
