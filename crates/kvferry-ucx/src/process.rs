//! Which process a peer is, and the kernel's word that it has ended.
//!
//! A lane that copies by CPU learns of a peer's death only when it touches the peer. So endpoints tell each other what process
//! they live in, and a process on this host is watched through a descriptor of the kernel.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process, as far as it can be told from others: of this life of this host, or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Process {
    /// The host's boot; zero where unknown.
    pub(crate) host: [u8; 16],
    /// The namespace that the number is of.
    pub(crate) namespace: u64,
    pub(crate) pid: u32,
    /// When it started, in the kernel's ticks.
    pub(crate) started: u64,
}

/// What can be known of a peer's process.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Nothing: another host, another namespace, or a kernel without such descriptors.
    Unknown,
    /// It is this one.
    Ourselves,
    /// The descriptor is readable once it has ended, all its threads included.
    Alive { fd: OwnedFd, pid: u32 },
    /// It has ended.
    Gone,
}

impl Process {
    pub(crate) const LEN: usize = 16 + 8 + 4 + 8;

    /// This process.
    pub(crate) fn ours() -> Self {
        let pid = std::process::id();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = boot.chars().filter(char::is_ascii_hexdigit).collect();
        let host = u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes();
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        Self { host, namespace, pid, started: started(pid).unwrap_or(0) }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.host);
        out.extend_from_slice(&self.namespace.to_le_bytes());
        out.extend_from_slice(&self.pid.to_le_bytes());
        out.extend_from_slice(&self.started.to_le_bytes());
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let (host, rest) = bytes.split_at(16);
        let (namespace, rest) = rest.split_at(8);
        let (pid, started) = rest.split_at(4);
        Self {
            host: host.try_into().unwrap_or_default(),
            namespace: u64::from_le_bytes(namespace.try_into().unwrap_or_default()),
            pid: u32::from_le_bytes(pid.try_into().unwrap_or_default()),
            started: u64::from_le_bytes(started.try_into().unwrap_or_default()),
        }
    }

    /// Begins to watch it.
    pub(crate) fn watch(&self, ours: &Self) -> Watch {
        if self == ours {
            return Watch::Ourselves;
        }
        let known = self.host != [0; 16] && self.namespace != 0 && self.started != 0;
        if !known || (self.host, self.namespace) != (ours.host, ours.namespace) {
            return Watch::Unknown;
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Watch::Unknown };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => self.judge(fd, started(self.pid)),
            Err(rustix::io::Errno::SRCH) => Watch::Gone,
            Err(_) => Watch::Unknown,
        }
    }

    /// What a descriptor tells of it that was opened by its number, with the time that the kernel gives for that number.
    fn judge(&self, fd: OwnedFd, started: Option<u64>) -> Watch {
        match started {
            // The descriptor is of whoever has the number now; the time tells whether that is the one that was meant.
            Some(time) if time == self.started => Watch::Alive { fd, pid: self.pid },
            Some(_) => Watch::Gone,
            // Either it has just ended, or we may not look (`hidepid`, another user): then it may be alive, or another.
            None if ended(&fd) => Watch::Gone,
            None => Watch::Unknown,
        }
    }
}

/// Whether the process of a descriptor has ended.
fn ended(fd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&zero)).is_ok_and(|n| n > 0)
}

impl Watch {
    /// Whether it is known to have ended.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Gone => true,
            Self::Unknown | Self::Ourselves => false,
            Self::Alive { fd, .. } => ended(fd),
        }
    }

    /// Whether it is alive as far as is known, but has begun to end: its memory and sockets may be gone, but a thread of it may
    /// still be in a copy. Also of a process whose first thread has left by itself and whose others go on, which the kernel
    /// shows in the same way; no program does that whose `main` returns.
    pub(crate) fn is_dying(&self) -> bool {
        const EXITING: u64 = 0x4; // PF_EXITING of the kernel's sched.h.
        let Self::Alive { fd, pid } = self else { return false };
        // Seven fields behind the name. Where we may not look any more, the descriptor still tells of the end.
        field(*pid, 6).map_or_else(|| ended(fd), |flags| flags & EXITING != 0)
    }
}

/// The 22nd field of `/proc/PID/stat`; the second is in brackets and may hold anything.
fn started(pid: u32) -> Option<u64> {
    field(pid, 19)
}

/// A field of `/proc/PID/stat`, counted from the first behind the name.
fn field(pid: u32, index: usize) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(index)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_start() {
        let ours = Process::ours();
        assert!(ours.host != [0; 16] && ours.namespace != 0 && ours.started != 0);
        let mut bytes = Vec::new();
        ours.encode(&mut bytes);
        assert_eq!(Process::decode(bytes.as_slice().try_into().unwrap()), ours);
        assert!(matches!(ours.watch(&ours), Watch::Ourselves));
        let elsewhere = Process { host: [1; 16], ..ours };
        assert!(matches!(elsewhere.watch(&ours), Watch::Unknown));
        let successor = Process { started: ours.started + 1, ..ours };
        assert!(matches!(successor.watch(&ours), Watch::Gone));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let peer = Process { pid: child.id(), started: started(child.id()).unwrap(), ..ours };
        let watch = peer.watch(&ours);
        assert!(matches!(watch, Watch::Alive { .. }) && !watch.is_gone() && !watch.is_dying());
        // What is seen where the kernel hides others' processes.
        let open = || pidfd_open(Pid::from_raw(child.id().cast_signed()).unwrap(), PidfdFlags::empty()).unwrap();
        assert!(matches!(peer.judge(open(), None), Watch::Unknown));
        assert!(matches!(peer.judge(open(), Some(peer.started + 1)), Watch::Gone));
        let kept = open();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watch.is_dying() && watch.is_gone() && matches!(peer.watch(&ours), Watch::Gone));
        assert!(matches!(peer.judge(kept, None), Watch::Gone));
    }
}
