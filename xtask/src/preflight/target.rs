//! The side that is read from: it opens what it is asked to, and drives it until it is told otherwise.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry_geometry::units::Bytes;
use kvferry_memory::{BufferOptions, HostBuffer, SharedBuffer};
use kvferry_transport::{Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::line::{Ask, Line, Reply, VERSION};
use crate::backends::{BackendArgs, Wire, Wires};

/// The most memory that the other side may ask for.
pub(super) const MOST: u64 = 1 << 30;

/// Serves one that measures until it is gone.
pub(super) fn serve(mut line: Line, backends: &BackendArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut open: Option<Box<dyn Transport>> = None;
    loop {
        if let Some(transport) = &mut open {
            drive_until_asked(&line, &mut **transport, start)?;
        }
        let Some(ask) = line.hear::<Ask>()? else { return Ok(()) };
        // The one before first: its memory is not needed any more.
        drop(open.take());
        let reply = match ask {
            Ask::Close => Reply::Closed,
            Ask::Open { version, transport, bytes } => match opened(version, &transport, bytes, backends) {
                Ok(transport) => Reply::Open { blob: open.insert(transport).blob() },
                Err(error) => Reply::Failed(format!("{error:#}")),
            },
        };
        line.say(&reply)?;
    }
}

fn opened(version: u32, transport: &str, bytes: u64, backends: &BackendArgs) -> anyhow::Result<Box<dyn Transport>> {
    if version != VERSION {
        bail!("the other side speaks version {version}, this one {VERSION}; build both from one version");
    }
    if bytes == 0 || bytes > MOST {
        bail!("{bytes} bytes were asked for, 1 to {MOST} are allowed");
    }
    let wires: Wires = transport.parse().map_err(anyhow::Error::msg)?;
    let mut transport = backends.open(&wires)?.transport;
    transport.register(memory(&wires, Bytes::new(bytes))?).context("the memory to be read from")?;
    Ok(transport)
}

/// Memory as the transports can best reach it, all pages touched.
pub(super) fn memory(wires: &Wires, len: Bytes) -> anyhow::Result<Region> {
    let options = BufferOptions::default();
    let region = if wires.has(Wire::Shm) {
        SharedBuffer::new("kvferry preflight", len, options)?.region()
    } else {
        HostBuffer::new(len, options)?.region()
    };
    region.fill(0, len.get(), 1)?;
    Ok(region)
}

/// Steps the transport until the other side says something, or is gone.
fn drive_until_asked(line: &Line, transport: &mut dyn Transport, start: Instant) -> anyhow::Result<()> {
    loop {
        let now = start.elapsed();
        let next = transport.step(now);
        while transport.next_event().is_some() {}
        let wait = next.map(|at| at.saturating_sub(start.elapsed()));
        let timeout = wait.map(timespec);
        let mut fds = [PollFd::new(line, PollFlags::IN), PollFd::from_borrowed_fd(transport.wake_fd(), PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
    }
}

fn timespec(d: Duration) -> Timespec {
    // A sleep of years is as good as one of a day.
    let d = d.min(Duration::from_secs(86_400));
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(86_400), tv_nsec: d.subsec_nanos().into() }
}
