//! The agent and those that it can send to.

use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use kvferry_transport::{EndpointId, Lane};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bell::Bell;
use crate::config::NixlConfig;
use crate::frame::Frame;
use crate::lane::agent_name;
use crate::live;
use crate::process::{Process, Watch};
use crate::sys::{Agent, Fail, Notifications};
use crate::truth::{self, Ucx};

/// How long an endpoint that was busy still looks often, so that nobody needs to ring.
const AWAKE: Duration = Duration::from_micros(100);
/// Remotes that nothing uses, and that NIXL still knows.
const MAX_RESTING: usize = 256;
/// Bytes of metadata of a remote that may be stale, before NIXL forgets it and learns it anew.
const MAX_STALE: usize = 8 << 20;
/// How long NIXL may take to notice that a process has ended, before it forgets it without.
const NOTICE: Duration = Duration::from_secs(10);

/// The agent and the other agents that it knows.
pub(crate) struct Net {
    pub(crate) agent: Agent,
    pub(crate) notifications: Notifications,
    pub(crate) process: Process,
    /// What peers need to answer us.
    pub(crate) metadata: Vec<u8>,
    /// What tells which lanes are used.
    ucx: Option<Ucx>,
    pub(super) bell: Option<Bell>,
    remotes: HashMap<EndpointId, Remote>,
    /// Those that something could not be sent to.
    pub(super) failing: Vec<EndpointId>,
}

/// Another agent that NIXL knows.
///
/// It stays known when nothing uses it any more: UCX does not destroy an endpoint that its peer has connected to before the worker's
/// end, so to forget and learn anew would leave some memory behind each time. Nothing stale is used all the same, since every
/// registration of an agent has a number of its own, which peers learn with the blob.
pub(super) struct Remote {
    pub(super) name: CString,
    watch: Watch,
    /// Connections and requests that need it.
    users: usize,
    /// Bytes of metadata that were loaded.
    loaded: usize,
    /// Its endpoint has ended, or the way to it is broken: it is forgotten as soon as nothing needs it and NIXL has noticed, at the
    /// latest then.
    ended: Option<Instant>,
    /// It was seen to have ended: its process or, in this one, its thread is no more.
    dead: bool,
    /// UCX's handle for it, where it was found.
    ucx: Option<usize>,
    /// It is on this host, and our doorbell reaches it as far as is known.
    rings: bool,
    /// When we last heard of it, or rang.
    touched: Option<Instant>,
}

impl Net {
    pub(crate) fn new(
        agent: Agent,
        notifications: Notifications,
        process: Process,
        metadata: Vec<u8>,
        ucx: Option<Ucx>,
        bell: Option<Bell>,
    ) -> Self {
        Self { agent, notifications, process, metadata, ucx, bell, remotes: HashMap::new(), failing: Vec::new() }
    }

    /// Makes an agent known to NIXL for one more user, by its metadata with `memory` or without.
    pub(super) fn load(
        &mut self,
        endpoint: EndpointId,
        watch: Watch,
        metadata: &[u8],
        memory: bool,
    ) -> Result<(), Fail> {
        let stale = |r: &Remote| r.users == 0 && (r.ended.is_some() || r.loaded + metadata.len() > MAX_STALE);
        if self.remotes.get(&endpoint).is_some_and(stale) {
            self.forget(endpoint);
        }
        if let Some(remote) = self.remotes.get_mut(&endpoint) {
            // How to reach it is known; a blob may have more memory.
            if memory || remote.users == 0 || remote.ended.is_some() {
                self.agent.load(metadata)?;
                remote.loaded += metadata.len();
                // A way that was broken is tried anew.
                remote.ended = None;
            }
            remote.users += 1;
            return Ok(());
        }
        let endpoints = |ucx: &Option<Ucx>| ucx.as_ref().map_or(BTreeSet::new(), Ucx::endpoints);
        let before = endpoints(&self.ucx);
        self.agent.load(metadata)?;
        let ucx = endpoints(&self.ucx).difference(&before).next().copied();
        let rings = !matches!(watch, Watch::Elsewhere);
        let name = agent_name(endpoint);
        let loaded = metadata.len();
        let remote = Remote { name, watch, users: 1, loaded, ended: None, dead: false, ucx, rings, touched: None };
        self.remotes.insert(endpoint, remote);
        Ok(())
    }

    pub(super) fn get(&self, endpoint: EndpointId) -> Option<&Remote> {
        self.remotes.get(&endpoint)
    }

    pub(super) fn everybody(&self) -> Vec<EndpointId> {
        self.remotes.iter().filter(|(_, r)| r.users > 0).map(|(endpoint, _)| *endpoint).collect()
    }

    /// The lane to a remote that has answered.
    pub(super) fn lane(&self, config: &NixlConfig, endpoint: EndpointId) -> Lane {
        truth::lane(config, self.ucx.as_ref(), self.remotes.get(&endpoint).and_then(|remote| remote.ucx))
    }

    /// One user more of a remote that has some.
    pub(super) fn retain(&mut self, endpoint: EndpointId) {
        if let Some(remote) = self.remotes.get_mut(&endpoint) {
            remote.users += 1;
        }
    }

    /// One user less.
    pub(super) fn release(&mut self, endpoint: EndpointId) {
        let Some(remote) = self.remotes.get_mut(&endpoint) else { return };
        remote.users = remote.users.saturating_sub(1);
        if remote.users == 0 && self.remotes.values().filter(|r| r.users == 0).count() > MAX_RESTING {
            self.forget(endpoint);
        }
    }

    /// A remote has ended or can't be reached; `dead` if it was seen to have ended, which its word is not.
    pub(super) fn ended(&mut self, endpoint: EndpointId, dead: bool) {
        if let Some(remote) = self.remotes.get_mut(&endpoint) {
            remote.dead |= dead;
            remote.ended.get_or_insert_with(|| Instant::now() + NOTICE);
        }
    }

    /// Forgets those that have ended: once something can't be sent to them, NIXL closes their connections for good.
    pub(super) fn bury(&mut self, now: Instant) {
        let due = |r: &Remote| r.users == 0 && r.ended.is_some();
        let dead: Vec<EndpointId> = self.remotes.iter().filter(|(_, r)| due(r)).map(|(e, _)| *e).collect();
        for endpoint in dead {
            let Some(remote) = self.remotes.get(&endpoint) else { continue };
            let late = remote.ended.is_some_and(|until| now > until);
            let noticed =
                matches!(remote.watch, Watch::Here) || self.agent.notify(&remote.name, &Frame::Ping.encode()).is_err();
            if late || noticed {
                self.forget(endpoint);
            }
        }
    }

    fn forget(&mut self, endpoint: EndpointId) {
        if let Some(remote) = self.remotes.remove(&endpoint) {
            // NIXL may have forgotten it by itself, when it lost it.
            let _ = self.agent.forget(&remote.name);
        }
    }

    /// Sends; who can't be reached is noted, and looked after soon.
    pub(super) fn send(&mut self, to: EndpointId, frame: &Frame<'_>) -> bool {
        let remote = self.remotes.get_mut(&to);
        let sent = remote.is_some_and(|remote| {
            let sent = self.agent.notify(&remote.name, &frame.encode()).is_ok();
            // Whoever was heard of just now looks again soon.
            if let Some(bell) = self.bell.as_ref().filter(|_| sent && remote.rings)
                && remote.touched.is_none_or(|at| at.elapsed() > AWAKE)
            {
                remote.rings = bell.ring(to);
                remote.touched = Some(Instant::now());
            }
            sent
        });
        if !sent && !self.failing.contains(&to) {
            self.failing.push(to);
        }
        sent
    }

    /// Something came from an endpoint.
    pub(super) fn touch(&mut self, from: EndpointId, now: Instant) {
        if let Some(remote) = self.remotes.get_mut(&from) {
            remote.touched = Some(now);
        }
    }

    /// Whether all that may send to us ring.
    pub(super) fn all_ring(&self) -> bool {
        let mut used = self.remotes.values().filter(|r| r.users > 0).peekable();
        self.bell.is_some() && used.peek().is_some() && used.all(|r| r.rings)
    }

    /// What becomes readable when a remote's process ends.
    pub(super) fn watched(&self) -> Vec<PollFd<'_>> {
        self.watches().map(|(_, fd)| fd).collect()
    }

    /// Remotes that have ended since the last time.
    pub(super) fn found_ended(&self) -> Vec<EndpointId> {
        let here = self.remotes.iter().filter(|(_, r)| !r.dead && matches!(r.watch, Watch::Here));
        let mut ended: Vec<EndpointId> = here.map(|(e, _)| *e).filter(|e| live::has_ended(*e)).collect();
        let (endpoints, mut fds): (Vec<EndpointId>, Vec<PollFd<'_>>) = self.watches().unzip();
        if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0) {
            ended.extend(endpoints.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(e, _)| *e));
        }
        ended
    }

    /// Whether a remote was seen to have ended.
    pub(super) fn is_dead(&self, endpoint: EndpointId) -> bool {
        self.remotes.get(&endpoint).is_some_and(|remote| remote.dead) || self.found_ended().contains(&endpoint)
    }

    /// Whether a remote was given up already: it said farewell, or the way to it is broken.
    pub(super) fn is_given_up(&self, endpoint: EndpointId) -> bool {
        self.remotes.get(&endpoint).is_some_and(|remote| remote.ended.is_some())
    }

    /// Whether a remote's end shows by itself.
    pub(super) fn is_watched(&self, endpoint: EndpointId) -> bool {
        self.remotes.get(&endpoint).is_some_and(|remote| !matches!(remote.watch, Watch::Elsewhere))
    }

    fn watches(&self) -> impl Iterator<Item = (EndpointId, PollFd<'_>)> {
        let alive = self.remotes.iter().filter(|(_, r)| !r.dead);
        alive.filter_map(|(endpoint, remote)| match &remote.watch {
            Watch::Process(fd) => Some((*endpoint, PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))),
            Watch::Here | Watch::Elsewhere => None,
        })
    }
}
