//! A rival as the driver has it: two processes that are stopped while others have their turn, so that a thread which polls
//! without pause costs only its own side.

use std::io::{BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use crate::wire::{Answer, Contact, Moved, Order, Rival, Side, Start};
use crate::work::{Scene, Work};

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// CPU time that a process has used so far, all threads.
pub(crate) fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both places are ours and live through the calls.
    unsafe {
        let pid = libc::pid_t::try_from(pid)?;
        ensure!(libc::clock_getcpuclockid(pid, &raw mut clock) == 0, "process {pid} has no clock");
        ensure!(libc::clock_gettime(clock, &raw mut time) == 0, "process {pid}: {}", std::io::Error::last_os_error());
    }
    Ok(Duration::new(u64::try_from(time.tv_sec)?, u32::try_from(time.tv_nsec)?))
}

/// Tells a process to stop or to go on.
pub(crate) fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("process 0")?;
    Ok(kill_process(pid, signal)?)
}

/// A line of a pipe, if it comes in time.
pub(crate) fn line(from: &mut BufReader<ChildStdout>, patience: Duration) -> anyhow::Result<String> {
    let deadline = Instant::now() + patience;
    let mut out = Vec::new();
    loop {
        if from.buffer().is_empty() {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
            let mut fds = [PollFd::from_borrowed_fd(from.get_ref().as_fd(), PollFlags::IN)];
            ensure!(poll(&mut fds, Some(&left))? > 0, "no answer in {patience:?}");
        }
        let mut byte = [0];
        match from.read(&mut byte)? {
            0 => bail!("it is gone"),
            _ if byte[0] == b'\n' => return Ok(String::from_utf8(out)?),
            _ => out.push(byte[0]),
        }
    }
}

/// A process of ours.
struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    fn start(start: &Start) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["child", &serde_json::to_string(start)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if std::env::var_os("KVFERRY_COMPARE_LOUD").is_some() { Stdio::inherit() } else { Stdio::null() })
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
        Ok(Self { child, stdin, stdout: BufReader::new(stdout) })
    }

    fn hear(&mut self) -> anyhow::Result<Answer> {
        loop {
            let said = line(&mut self.stdout, PATIENCE)?;
            // Libraries may print.
            match serde_json::from_str(&said) {
                Ok(Answer::Failed(why)) => bail!("{why}"),
                Ok(answer) => return Ok(answer),
                Err(_) if !said.starts_with('{') && !said.starts_with('"') => {}
                Err(error) => bail!("{error}: {said}"),
            }
        }
    }

    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        match self.hear()? {
            Answer::Hello(hello) => Ok(hello),
            other => bail!("{other:?} where a hello was due"),
        }
    }

    fn ask(&mut self, order: &Order) -> anyhow::Result<Answer> {
        let mut text = serde_json::to_vec(order)?;
        text.push(b'\n');
        self.stdin.write_all(&text)?;
        self.hear()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// One timed operation with what it cost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// From the order to the last byte.
    pub(crate) wall: Duration,
    /// Of the reader's process.
    pub(crate) cpu_reader: Duration,
    /// Of the source's process.
    pub(crate) cpu_source: Duration,
    pub(crate) descriptors: u64,
    pub(crate) lane: String,
}

/// The source's process and the reader's.
pub(crate) struct Pair {
    pub(crate) rival: Rival,
    hello: Vec<u8>,
    reader: Process,
    source: Process,
    prepared: Option<Work>,
}

impl Pair {
    /// Starts both and connects them. They run until [`rest`](Self::rest).
    pub(crate) fn start(rival: Rival, scene: Scene, memory: &[std::path::PathBuf; 2]) -> anyhow::Result<Self> {
        let start = |side| Process::start(&Start { rival, side, scene, memory: memory.clone() });
        let mut source = start(Side::Prefill)?;
        let hello = source.hello()?;
        let mut reader = start(Side::Decode)?;
        reader.hello()?;
        reader.ask(&Order::Connect(hello.clone()))?;
        Ok(Self { rival, hello, reader, source, prepared: None })
    }

    fn both(&self) -> [u32; 2] {
        [self.source.child.id(), self.reader.child.id()]
    }

    /// Nothing of it runs until [`wake`](Self::wake).
    pub(crate) fn rest(&self) -> anyhow::Result<()> {
        self.both().into_iter().try_for_each(|pid| signal(pid, Signal::STOP))
    }

    /// It may run.
    pub(crate) fn wake(&self) -> anyhow::Result<()> {
        self.both().into_iter().try_for_each(|pid| signal(pid, Signal::CONT))
    }

    /// The source's offer of a work, from those who make offers.
    fn offer(&mut self, work: Work) -> anyhow::Result<Option<Vec<u8>>> {
        if !matches!(self.rival, Rival::Engine { .. }) {
            return Ok(None);
        }
        match self.source.ask(&Order::Offer(work))? {
            Answer::Hello(offer) => Ok(Some(offer)),
            other => bail!("{other:?} where an offer was due"),
        }
    }

    /// Moves a work's bytes once.
    pub(crate) fn read(&mut self, work: Work) -> anyhow::Result<Sample> {
        if self.prepared != Some(work) {
            self.reader.ask(&Order::Prepare(work))?;
            self.prepared = Some(work);
        }
        let offer = self.offer(work)?.unwrap_or_default();
        let [source, reader] = self.both();
        let before = (cpu_of(source)?, cpu_of(reader)?);
        let Answer::Moved(Moved { ns, descriptors, lane }) = self.reader.ask(&Order::Read(work, offer))? else {
            bail!("it did not say how it went");
        };
        Ok(Sample {
            wall: Duration::from_nanos(ns),
            cpu_reader: cpu_of(reader)?.saturating_sub(before.1),
            cpu_source: cpu_of(source)?.saturating_sub(before.0),
            descriptors,
            lane,
        })
    }

    /// Clears the destination, moves once more and compares every byte; how many are wrong.
    pub(crate) fn verify(&mut self, work: Work) -> anyhow::Result<u64> {
        self.reader.ask(&Order::Clear)?;
        self.read(work)?;
        match self.reader.ask(&Order::Verify(work))? {
            Answer::Wrong(bytes) => Ok(bytes),
            other => bail!("{other:?} where a verdict was due"),
        }
    }

    /// A fresh endpoint in the reader's process meets the source.
    pub(crate) fn contact(&mut self) -> anyhow::Result<Contact> {
        let hello = self.offer(Work::Small)?.unwrap_or_else(|| self.hello.clone());
        match self.reader.ask(&Order::Contact(hello))? {
            Answer::Met(contact) => Ok(contact),
            other => bail!("{other:?} where a meeting was due"),
        }
    }

    /// Cores used while nothing is asked of it, by the source and by the reader.
    pub(crate) fn idle(&self, span: Duration) -> anyhow::Result<[f64; 2]> {
        idle(self.both(), span)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Ask first: libraries leave files behind if they are killed.
        drop(self.wake());
        for process in [&mut self.reader, &mut self.source] {
            drop(serde_json::to_writer(&mut process.stdin, &Order::Quit));
            drop(process.stdin.write_all(b"\n"));
            let deadline = Instant::now() + Duration::from_secs(2);
            while Instant::now() < deadline && matches!(process.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Cores that processes use while nothing is asked of them.
pub(crate) fn idle<const N: usize>(pids: [u32; N], span: Duration) -> anyhow::Result<[f64; N]> {
    // What was left to do is done first.
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    let mut used = [Duration::ZERO; N];
    for (used, pid) in used.iter_mut().zip(pids) {
        *used = cpu_of(pid)?;
    }
    std::thread::sleep(span);
    let took = start.elapsed().as_secs_f64();
    let mut cores = [0.0; N];
    for ((cores, used), pid) in cores.iter_mut().zip(used).zip(pids) {
        *cores = cpu_of(pid)?.saturating_sub(used).as_secs_f64() / took;
    }
    Ok(cores)
}
