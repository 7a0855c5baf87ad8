//! NIXL as it comes: the same descriptors as prepared lists with indices, or as lists made for each transfer; posted once and
//! polled until done. No notifications.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kvferry_transport::Region;
use nixl_sys::{
    Agent, AgentConfig, MemType, MemoryRegion, NixlDescriptor, NotificationMap, Params, RegistrationHandle,
    XferDescList, XferDlistHandle, XferOp, XferRequest,
};

use crate::child::{Memory, Steps, is_source};
use crate::plain::{Move, addresses, moves};
use crate::wire::{Contact, Moved, Side};
use crate::work::Work;

/// What a reader must know of the source: its agent's metadata, and where its regions are.
type Hello = (Vec<u8>, Vec<usize>);

#[derive(Debug)]
struct Memo(Region);

impl MemoryRegion for Memo {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    fn size(&self) -> usize {
        usize::try_from(self.0.len().get()).unwrap_or(usize::MAX)
    }
}

impl NixlDescriptor for Memo {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

/// The way it is used; see [`Rival::Nixl`](crate::wire::Rival).
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) threads: usize,
    pub(crate) progress: bool,
    pub(crate) prepared: bool,
    pub(crate) host: bool,
}

/// An agent with a UCX backend and memory. Fields are dropped in order.
struct Node {
    registered: Vec<RegistrationHandle>,
    agent: Agent,
}

impl Node {
    fn open(name: &str, how: How) -> anyhow::Result<Self> {
        ensure!(!nixl_sys::is_stub(), "libnixl_capi.so isn't found; `cargo xtask native` fetches it");
        let config = AgentConfig { enable_prog_thread: how.progress, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &config)?;
        let mut params = vec![("num_threads", how.threads.to_string())];
        if how.host {
            params.push(("engine_config", "POSIX_ERROR_HANDLING=y,CMA_ERROR_HANDLING=y".to_owned()));
        }
        let params = Params::from(params)?;
        agent.create_backend("UCX", &params)?;
        Ok(Self { registered: Vec::new(), agent })
    }

    fn register(&mut self, regions: &[Region]) -> anyhow::Result<()> {
        for region in regions {
            self.registered.push(self.agent.register_memory(&Memo(region.clone()), None)?);
        }
        Ok(())
    }

    /// Waits for a posted request.
    fn finish(&self, request: &XferRequest, spin: bool) -> anyhow::Result<()> {
        while !self.agent.get_xfer_status(request)?.is_success() {
            if !spin {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }
}

fn list(of: impl Iterator<Item = (usize, usize)>) -> anyhow::Result<XferDescList<'static>> {
    let mut out = XferDescList::new(MemType::Dram)?;
    of.for_each(|(address, len)| out.add_desc(address, len, 0));
    Ok(out)
}

/// Lists in the order of addresses, and where in them each descriptor is.
struct Prepared {
    local: XferDlistHandle,
    remote: XferDlistHandle,
    here: Vec<i32>,
    there: Vec<i32>,
}

/// One process of it.
pub(crate) struct End {
    // Before the agent, whose they are.
    prepared: Option<Prepared>,
    node: Node,
    source: bool,
    how: How,
    own: Vec<usize>,
    peer: Option<(String, Vec<usize>)>,
    work: Vec<Move>,
}

impl End {
    pub(crate) fn new(memory: &Memory, side: Side, how: How) -> anyhow::Result<Self> {
        let source = is_source(side);
        let regions = if source { &memory.src } else { &memory.dst };
        let mut node = Node::open(if source { "source" } else { "reader" }, how)?;
        node.register(regions)?;
        let own = addresses(regions);
        let (peer, work) = (None, Vec::new());
        Ok(Self { prepared: None, node, source, how, own, peer, work })
    }

    fn lists_of(&self) -> anyhow::Result<Prepared> {
        let (peer, _) = self.peer.as_ref().context("not connected")?;
        let (remote, there) = self.sorted(|m| m.from);
        let (local, here) = self.sorted(|m| m.to);
        let agent = &self.node.agent;
        let local = agent.prepare_xfer_dlist("", &list(local.into_iter())?, None)?;
        let remote = agent.prepare_xfer_dlist(peer, &list(remote.into_iter())?, None)?;
        Ok(Prepared { local, remote, here, there })
    }

    /// One side's ranges in the order of addresses, and where in them each move's is.
    fn sorted(&self, key: fn(&Move) -> usize) -> (Vec<(usize, usize)>, Vec<i32>) {
        let mut order: Vec<usize> = (0..self.work.len()).collect();
        order.sort_by_key(|&i| key(&self.work[i]));
        let mut place = vec![0; order.len()];
        for (at, &i) in (0..).zip(&order) {
            place[i] = at;
        }
        (order.iter().map(|&i| (key(&self.work[i]), self.work[i].len)).collect(), place)
    }

    fn request(&self) -> anyhow::Result<XferRequest> {
        let agent = &self.node.agent;
        Ok(match &self.prepared {
            Some(p) => agent.make_xfer_req(XferOp::Read, &p.local, &p.here, &p.remote, &p.there, None)?,
            None => {
                let (peer, _) = self.peer.as_ref().context("not connected")?;
                let local = list(self.work.iter().map(|m| (m.to, m.len)))?;
                let remote = list(self.work.iter().map(|m| (m.from, m.len)))?;
                agent.create_xfer_req(XferOp::Read, &local, &remote, peer, None)?
            }
        })
    }
}

impl crate::child::End for End {
    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        let hello: Hello = (self.node.agent.get_local_md()?, self.own.clone());
        Ok(serde_json::to_vec(&hello)?)
    }

    fn step(&mut self) -> Option<Duration> {
        if self.source && !self.how.progress {
            // Without a thread of its own it answers peers who connect only when it is asked for news.
            let asked = NotificationMap::new().and_then(|mut map| self.node.agent.get_notifications(&mut map, None));
            return asked.is_ok().then_some(Duration::from_millis(1));
        }
        None
    }

    fn connect(&mut self, _: &Memory, hello: &[u8]) -> anyhow::Result<()> {
        let (metadata, theirs): Hello = serde_json::from_slice(hello)?;
        let name = self.node.agent.load_remote_md(&metadata)?;
        self.node.agent.make_connection(&name, None)?;
        self.peer = Some((name, theirs));
        Ok(())
    }

    fn prepare(&mut self, memory: &Memory, work: Work) -> anyhow::Result<()> {
        self.prepared = None;
        let (_, theirs) = self.peer.as_ref().context("not connected")?;
        self.work = moves(&memory.descriptors(work)?, theirs, &self.own)?;
        self.prepared = if self.how.prepared { Some(self.lists_of()?) } else { None };
        Ok(())
    }

    fn read(&mut self, _: &Memory, _: Work, _: &[u8]) -> anyhow::Result<Moved> {
        let start = Instant::now();
        let request = self.request()?;
        if self.node.agent.post_xfer_req(&request, None)? {
            self.node.finish(&request, self.how.threads == 0)?;
        }
        drop(request);
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        Ok(Moved { ns, descriptors: self.work.len() as u64, lane: String::new() })
    }

    fn contact(&mut self, memory: &Memory, hello: &[u8]) -> anyhow::Result<Contact> {
        let (metadata, theirs): Hello = serde_json::from_slice(hello)?;
        let small = moves(&memory.descriptors(Work::Small)?, &theirs, &self.own)?;
        let mut steps = Steps::new();
        let mut node = Node::open("newcomer", self.how)?;
        let open_ns = steps.next();
        node.register(&memory.dst)?;
        let register_ns = steps.next();
        let name = node.agent.load_remote_md(&metadata)?;
        node.agent.make_connection(&name, None)?;
        let connect_ns = steps.next();
        let local = list(small.iter().map(|m| (m.to, m.len)))?;
        let remote = list(small.iter().map(|m| (m.from, m.len)))?;
        let request = node.agent.create_xfer_req(XferOp::Read, &local, &remote, &name, None)?;
        if node.agent.post_xfer_req(&request, None)? {
            node.finish(&request, true)?;
        }
        Ok(Contact { open_ns, register_ns, connect_ns, first_ns: steps.next() })
    }
}
