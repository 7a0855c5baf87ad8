//! Which process an endpoint lives in, and whether that is still there: for peers on the same host.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process, told from every other of every host and time. All zero where that could not be found out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Process {
    /// The boot of the kernel.
    boot: [u8; 16],
    /// The pid namespace.
    namespace: u64,
    pid: u32,
    /// When it started, in the kernel's ticks since the boot.
    started: u64,
}

/// How the end of a process is noticed.
#[derive(Debug)]
pub(crate) enum Watch {
    /// It is this process.
    Here,
    /// Readable once it has ended.
    Process(OwnedFd),
    /// It is on another host or in another namespace, or the kernel doesn't tell.
    Elsewhere,
}

/// It has ended already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ended;

impl Process {
    pub(crate) const LEN: usize = 36;

    /// This process.
    pub(crate) fn this() -> Self {
        let found = || {
            let pid = std::process::id();
            Some(Self { boot: boot()?, namespace: namespace()?, pid, started: started(pid)? })
        };
        found().unwrap_or_default()
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.boot);
        out.extend_from_slice(&self.namespace.to_le_bytes());
        out.extend_from_slice(&self.pid.to_le_bytes());
        out.extend_from_slice(&self.started.to_le_bytes());
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let (boot, rest) = bytes.split_at(16);
        let (namespace, rest) = rest.split_at(8);
        let (pid, started) = rest.split_at(4);
        let number = |b: &[u8]| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        Self {
            boot: boot.try_into().unwrap_or_default(),
            namespace: number(namespace),
            pid: u32::try_from(number(pid)).unwrap_or_default(),
            started: number(started),
        }
    }

    /// Whether this is known to be on the same host as another.
    pub(crate) fn same_host(&self, other: &Self) -> bool {
        self.boot == other.boot && self.boot != [0; 16]
    }

    /// Watches it, as seen from the process `me`.
    pub(crate) fn watch(&self, me: &Self) -> Result<Watch, Ended> {
        if !self.same_host(me) || self.namespace != me.namespace {
            return Ok(Watch::Elsewhere);
        }
        if self == me {
            return Ok(Watch::Here);
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(Watch::Elsewhere) };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => match started(self.pid) {
                Some(at) if at == self.started => Ok(Watch::Process(fd)),
                // The number was given to another since.
                Some(_) => Err(Ended),
                // The kernel hides other users' processes: this may be another.
                None => Ok(Watch::Elsewhere),
            },
            Err(rustix::io::Errno::SRCH) => Err(Ended),
            Err(_) => Ok(Watch::Elsewhere),
        }
    }
}

fn boot() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

fn namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/pid").ok().map(|m| m.ino())
}

/// The start time of a process: the 22nd word of its `stat`, of which the second may hold anything in brackets.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_here_and_a_child_is_watched() {
        let me = Process::this();
        assert_ne!(me, Process::default());
        let mut bytes = Vec::new();
        me.encode(&mut bytes);
        assert_eq!(Process::decode(bytes.as_slice().try_into().unwrap()), me);
        assert!(matches!(me.watch(&me), Ok(Watch::Here)));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let theirs = Process { pid: child.id(), started: started(child.id()).unwrap(), ..me };
        assert!(matches!(theirs.watch(&me), Ok(Watch::Process(_))));
        assert!(matches!(Process { started: theirs.started + 1, ..theirs }.watch(&me), Err(Ended)));
        assert!(matches!(Process { boot: [1; 16], ..theirs }.watch(&me), Ok(Watch::Elsewhere)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(theirs.watch(&me), Err(Ended)));
    }
}
