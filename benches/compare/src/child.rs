//! A process of a rival: does what it is told, and otherwise what its rival does when nothing is asked of it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry_geometry::units::Bytes;
use kvferry_transport::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::memory::{self, GUARD};
use crate::wire::{Answer, Contact, Moved, Order, Rival, Side, Start};
use crate::work::{self, Engines, Scene, Work};
use crate::{ferry, plain};

/// The memory of one scene, as one process has it.
pub(crate) struct Memory {
    pub(crate) scene: Scene,
    pub(crate) lens: [Vec<Bytes>; 2],
    pub(crate) src: Vec<Region>,
    pub(crate) dst: Vec<Region>,
    pub(crate) engines: Option<Engines>,
}

impl Memory {
    fn new(start: &Start) -> anyhow::Result<Self> {
        let lens = start.scene.lens();
        let engines = if start.scene == Scene::Blocks { None } else { Some(start.scene.engines()?) };
        // A source has nothing to do with the destination; a reader has the source's memory to compare with, and to copy from where
        // that is all it does.
        let source = is_source(start.side);
        let copies = matches!(start.rival, Rival::Memcpy { .. });
        let src = memory::regions(&memory::open(&start.memory[0], source || copies)?, &lens[0])?;
        let dst = if source { Vec::new() } else { memory::regions(&memory::open(&start.memory[1], true)?, &lens[1])? };
        Ok(Self { scene: start.scene, src, dst, lens, engines })
    }

    /// The contiguous moves of a work.
    pub(crate) fn descriptors(&self, work: Work) -> anyhow::Result<Vec<kvferry_geometry::batch::Descriptor>> {
        work::descriptors(&work.batch(self.scene, self.engines.as_ref())?)
    }
}

/// Either end of a rival.
pub(crate) trait End {
    /// What the other end needs to connect.
    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// What is to be done now; gives the time until it must be called again.
    fn step(&mut self) -> Option<Duration> {
        None
    }

    /// What wakes it.
    fn wake(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The reader: connects.
    fn connect(&mut self, _memory: &Memory, _hello: &[u8]) -> anyhow::Result<()> {
        Ok(())
    }

    /// The reader: prepares what may be prepared.
    fn prepare(&mut self, _memory: &Memory, _work: Work) -> anyhow::Result<()> {
        Ok(())
    }

    /// The source: offers.
    fn offer(&mut self, _memory: &Memory, _work: Work) -> anyhow::Result<Vec<u8>> {
        bail!("it offers nothing")
    }

    /// The reader: moves the bytes.
    fn read(&mut self, memory: &Memory, work: Work, offer: &[u8]) -> anyhow::Result<Moved>;

    /// The reader: a fresh endpoint meets the source.
    fn contact(&mut self, _memory: &Memory, _hello: &[u8]) -> anyhow::Result<Contact> {
        bail!("there is nothing to meet")
    }
}

/// Runs a process until it is told to quit.
pub(crate) fn run(start: &Start) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut out = std::io::stdout();
    let mut say = |answer: &Answer| -> anyhow::Result<()> {
        serde_json::to_writer(&mut out, answer)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    };
    let made = Memory::new(start).and_then(|memory| Ok((end(start, &memory)?, memory)));
    let (mut end, memory) = match made {
        Ok(made) => made,
        Err(error) => return say(&Answer::Failed(format!("{error:#}"))),
    };
    match end.hello() {
        Ok(hello) => say(&Answer::Hello(hello))?,
        Err(error) => return say(&Answer::Failed(format!("{error:#}"))),
    }
    let stdin = std::io::stdin();
    let mut lines = BufReader::new(stdin.as_fd().try_clone_to_owned().map(std::fs::File::from)?);
    loop {
        let again = end.step();
        if again.is_some_and(|t| t.is_zero()) && !readable(&[stdin.as_fd()], Some(Duration::ZERO))? {
            continue;
        }
        let waited_for: Vec<BorrowedFd<'_>> = std::iter::once(stdin.as_fd()).chain(end.wake()).collect();
        if !readable(&waited_for, again)? {
            continue;
        }
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let order = serde_json::from_str(&line).context("an order that is none")?;
        if matches!(order, Order::Quit) {
            return Ok(());
        }
        say(&obey(&mut *end, &memory, order).unwrap_or_else(|error| Answer::Failed(format!("{error:#}"))))?;
    }
}

/// Whether the first is readable, once any is or the time is over.
fn readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> anyhow::Result<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = timeout.map(Timespec::try_from).transpose()?;
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Ok(polled.first().is_some_and(|fd| !fd.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn end(start: &Start, memory: &Memory) -> anyhow::Result<Box<dyn End>> {
    let side = start.side;
    Ok(match start.rival {
        Rival::Memcpy { threads } => Box::new(plain::Memcpy::new(threads)),
        Rival::ProcessVm { ranges, threads } => Box::new(plain::ProcessVm::new(memory, ranges, threads)),
        #[cfg(feature = "ucx")]
        Rival::Ucx { workers } => Box::new(crate::raw_ucx::End::new(memory, side, workers)?),
        #[cfg(feature = "nixl")]
        Rival::Nixl { threads, progress, prepared, host } => {
            let how = crate::raw_nixl::How { threads, progress, prepared, host };
            Box::new(crate::raw_nixl::End::new(memory, side, how)?)
        }
        Rival::Ferry { backend, threads } => Box::new(ferry::End::new(memory, side, backend, threads)?),
        #[cfg(feature = "engines")]
        Rival::Engine { backend, threads } => crate::engine::end(memory, side, backend, threads)?,
        #[cfg(not(all(feature = "ucx", feature = "nixl", feature = "engines")))]
        other => bail!("{other} is not built in"),
    })
}

fn obey(end: &mut dyn End, memory: &Memory, order: Order) -> anyhow::Result<Answer> {
    Ok(match order {
        Order::Connect(hello) => {
            end.connect(memory, &hello)?;
            Answer::Ok
        }
        Order::Prepare(work) => {
            end.prepare(memory, work)?;
            Answer::Ok
        }
        Order::Offer(work) => Answer::Hello(end.offer(memory, work)?),
        Order::Read(work, offer) => Answer::Moved(end.read(memory, work, &offer)?),
        Order::Clear => {
            memory.dst.iter().try_for_each(|r| r.fill(0, r.len().get(), GUARD))?;
            Answer::Ok
        }
        Order::Verify(work) => Answer::Wrong(work::wrong_bytes(&memory.descriptors(work)?, &memory.src, &memory.dst)?),
        Order::Contact(hello) => Answer::Met(end.contact(memory, &hello)?),
        Order::Quit => Answer::Ok,
    })
}

/// Which side a process is, where that is all it needs to know.
pub(crate) fn is_source(side: Side) -> bool {
    side == Side::Prefill
}

/// Times of steps, one after the other.
pub(crate) struct Steps(Instant);

impl Steps {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Nanoseconds since the last one.
    pub(crate) fn next(&mut self) -> u64 {
        let now = Instant::now();
        let ns = now.duration_since(self.0).as_nanos();
        self.0 = now;
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}
