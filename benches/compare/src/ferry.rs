//! A backend of kvferry by its transport alone: plan, proof, submission, completion; no owners and no leases.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry_geometry::batch::{Batch, BoundedBatch, Section};
use kvferry_geometry::staged::{Place, Staged};
use kvferry_geometry::units::{BlockId, Bytes, RegionId};
use kvferry_memory::permute::Permute;
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_transport::{Event, OpId, OpKind, PeerId, Region, Submission, Transport};

use crate::child::{Memory, Steps, is_source};
use crate::wire::{Backend, Contact, Moved, Side};
use crate::work::{Scene, Work, proven};

/// Pieces of a request that is staged: the next is on the wire while one is permuted.
const PIECES: usize = 4;
/// Threads that permute.
const PERMUTERS: usize = 2;

/// Opens a backend; `threads` are copy threads, rails or NIXL's threads, 0 for its default.
pub(crate) fn open(backend: Backend, threads: usize) -> anyhow::Result<Box<dyn Transport>> {
    match backend {
        Backend::Shm => {
            let mut config = kvferry_shm::Config::default();
            if threads > 0 {
                config.threads = threads;
            }
            Ok(Box::new(kvferry_shm::ShmTransport::new(config)?))
        }
        #[cfg(feature = "ucx")]
        Backend::Ucx => {
            use kvferry_ucx::UcxConfig;
            let config = if threads > 0 { UcxConfig::with_rails(threads) } else { UcxConfig::default() };
            Ok(Box::new(kvferry_ucx::UcxTransport::new(config)?))
        }
        #[cfg(feature = "nixl")]
        Backend::Nixl => {
            let mut config = kvferry_nixl::NixlConfig::default();
            config.threads = threads;
            Ok(Box::new(kvferry_nixl::NixlTransport::new(config)?))
        }
        #[cfg(not(all(feature = "ucx", feature = "nixl")))]
        other => bail!("{other} is not built in"),
    }
}

/// An endpoint and its clock.
struct Node {
    transport: Box<dyn Transport>,
    start: Instant,
}

impl Node {
    fn open(backend: Backend, threads: usize) -> anyhow::Result<Self> {
        Ok(Self { transport: open(backend, threads)?, start: Instant::now() })
    }

    fn register(&mut self, regions: &[Region]) -> anyhow::Result<()> {
        for region in regions {
            self.transport.register(region.clone())?;
        }
        Ok(())
    }

    /// Drives until an event is what is wanted.
    fn until<R>(&mut self, mut wanted: impl FnMut(Event) -> anyhow::Result<Option<R>>) -> anyhow::Result<R> {
        loop {
            let again = self.transport.step(self.start.elapsed());
            while let Some(event) = self.transport.next_event() {
                if let Some(got) = wanted(event)? {
                    return Ok(got);
                }
            }
            let wait = again.map(|at| at.saturating_sub(self.start.elapsed()));
            if wait != Some(Duration::ZERO) {
                self.transport.wait(wait);
            }
        }
    }

    fn connect(&mut self, blob: &[u8]) -> anyhow::Result<PeerId> {
        let id = self.transport.connect(blob)?;
        self.until(|event| match event {
            Event::Connected { peer } if peer == id => Ok(Some(id)),
            Event::PeerLost { cause, .. } => bail!("lost while connecting: {cause}"),
            _ => Ok(None),
        })
    }

    fn submit(&mut self, peer: PeerId, batch: Arc<BoundedBatch>) -> anyhow::Result<OpId> {
        Ok(self.transport.submit(Submission { peer, kind: OpKind::Read, batch, notify: None })?)
    }

    /// The next operation that ends, and its pieces.
    fn next_end(&mut self) -> anyhow::Result<(OpId, u64)> {
        self.until(|event| match event {
            Event::Completed { op, outcome, .. } => {
                let stats = outcome.done().with_context(|| format!("{outcome:?}"))?;
                Ok(Some((op, stats.descriptors)))
            }
            Event::PeerLost { cause, .. } => bail!("the source is lost: {cause}"),
            _ => Ok(None),
        })
    }
}

/// One process of it.
pub(crate) struct End {
    node: Node,
    backend: Backend,
    threads: usize,
    source: bool,
    /// Registered after the destination's regions.
    staging: Vec<Region>,
    peer: Option<(PeerId, Vec<Bytes>)>,
    prepared: Option<Prepared>,
}

/// What is known of a work before it is asked for.
enum Prepared {
    Batch(Arc<BoundedBatch>),
    Ids([Vec<BlockId>; 2]),
}

impl End {
    pub(crate) fn new(memory: &Memory, side: Side, backend: Backend, threads: usize) -> anyhow::Result<Self> {
        let mut node = Node::open(backend, threads)?;
        let source = is_source(side);
        node.register(if source { &memory.src } else { &memory.dst })?;
        let mut staging = Vec::new();
        if !source && memory.scene == Scene::Wider {
            let whole = Work::Request { contiguous: false, staged: true, wider: true }.bytes();
            let piece = Bytes::new(whole / PIECES as u64);
            for _ in 0..PIECES {
                let options = BufferOptions { touch: true, ..BufferOptions::default() };
                staging.push(SharedBuffer::new("kvferry-compare staging", piece, options)?.region());
            }
            node.register(&staging)?;
        }
        Ok(Self { node, backend, threads, source, staging, peer: None, prepared: None })
    }

    fn lens(&self, memory: &Memory) -> Vec<Bytes> {
        memory.lens[1].iter().copied().chain(self.staging.iter().map(Region::len)).collect()
    }

    fn direct(&mut self, batch: Arc<BoundedBatch>) -> anyhow::Result<u64> {
        let (peer, _) = self.peer.as_ref().context("not connected")?;
        self.node.submit(*peer, batch)?;
        Ok(self.node.next_end()?.1)
    }

    /// Whole source pages into staging memory, and from there into place.
    fn staged(&mut self, memory: &Memory, whole: &Batch) -> anyhow::Result<u64> {
        let (peer, theirs) = self.peer.clone().context("not connected")?;
        let ours = self.lens(memory);
        let mut locals = Vec::new();
        for (piece, index) in pieces(whole).into_iter().zip(memory.dst.len()..) {
            let region = RegionId::new(u32::try_from(index)?);
            let staged = Staged::new(&piece, Place::Destination, region).context("it can't be staged")?;
            let op = self.node.submit(peer, proven(staged.wire, &theirs, &ours)?)?;
            locals.push((op, proven(staged.local, &ours, &ours)?));
        }
        let region = |id: RegionId| memory.dst.iter().chain(&self.staging).nth(id.index()).cloned();
        let mut descriptors = 0;
        for _ in 0..locals.len() {
            let (ended, count) = self.node.next_end()?;
            descriptors += count;
            let local = locals.iter().find(|(op, _)| *op == ended).context("an operation of nobody's")?;
            let permute =
                Permute::new(local.1.clone(), region, region).ok().context("a local step that doesn't fit")?;
            permute.run(PERMUTERS);
        }
        Ok(descriptors)
    }
}

/// A batch in pieces of about as many members.
fn pieces(whole: &Batch) -> Vec<Batch> {
    let part = |of: usize| {
        let share = |s: &Section| {
            let (n, all) = (s.bases.len().div_ceil(PIECES), &s.bases);
            let bases = all.get(of * n..((of + 1) * n).min(all.len())).unwrap_or_default();
            Section { bases: bases.into(), parts: s.parts.clone() }
        };
        Batch::new(whole.sections().iter().map(share).filter(|s| !s.bases.is_empty()).collect())
    };
    (0..PIECES).map(part).filter(|b| !b.is_empty()).collect()
}

impl crate::child::End for End {
    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        Ok(self.node.transport.blob())
    }

    fn step(&mut self) -> Option<Duration> {
        let again = self.node.transport.step(self.node.start.elapsed());
        while self.node.transport.next_event().is_some() {}
        again.map(|at| at.saturating_sub(self.node.start.elapsed()))
    }

    fn wake(&self) -> Option<BorrowedFd<'_>> {
        Some(self.node.transport.wake_fd())
    }

    fn connect(&mut self, _: &Memory, hello: &[u8]) -> anyhow::Result<()> {
        let id = self.node.connect(hello)?;
        self.peer = Some((id, self.node.transport.peer(id)?.lens()));
        Ok(())
    }

    fn prepare(&mut self, memory: &Memory, work: Work) -> anyhow::Result<()> {
        self.prepared = Some(match work {
            Work::Request { contiguous, .. } => Prepared::Ids(memory.scene.ids(contiguous)),
            _ => {
                let (_, theirs) = self.peer.as_ref().context("not connected")?;
                Prepared::Batch(proven(work.batch(memory.scene, None)?, theirs, &self.lens(memory))?)
            }
        });
        Ok(())
    }

    fn read(&mut self, memory: &Memory, work: Work, _: &[u8]) -> anyhow::Result<Moved> {
        let start = Instant::now();
        let descriptors = match self.prepared.as_ref().context("not prepared")? {
            Prepared::Batch(batch) => self.direct(batch.clone())?,
            Prepared::Ids(ids) => {
                let batch = memory.engines.as_ref().context("no engines")?.resolve(ids)?;
                if matches!(work, Work::Request { staged: true, .. }) {
                    self.staged(memory, &batch)?
                } else {
                    let (_, theirs) = self.peer.as_ref().context("not connected")?;
                    self.direct(proven(batch, theirs, &self.lens(memory))?)?
                }
            }
        };
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        let (peer, _) = self.peer.as_ref().context("not connected")?;
        let lane = self.node.transport.peer(*peer)?.lane;
        let lane = if lane.transports.is_empty() { lane.kind.to_string() } else { lane.transports.join("+") };
        Ok(Moved { ns, descriptors, lane })
    }

    fn contact(&mut self, memory: &Memory, hello: &[u8]) -> anyhow::Result<Contact> {
        if self.source {
            bail!("the source meets nobody");
        }
        let small = Work::Small.batch(memory.scene, None)?;
        let mut steps = Steps::new();
        let mut node = Node::open(self.backend, self.threads)?;
        let open_ns = steps.next();
        node.register(&memory.dst)?;
        let register_ns = steps.next();
        let peer = node.connect(hello)?;
        let connect_ns = steps.next();
        let theirs = node.transport.peer(peer)?.lens();
        node.submit(peer, proven(small, &theirs, &memory.lens[1])?)?;
        node.next_end()?;
        Ok(Contact { open_ns, register_ns, connect_ns, first_ns: steps.next() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_whole() {
        let scene = Scene::Wider;
        let work = Work::Request { contiguous: false, staged: true, wider: true };
        let whole = work.batch(scene, Some(&scene.engines().unwrap())).unwrap();
        let all = pieces(&whole);
        assert_eq!(all.len(), PIECES);
        assert_eq!(all.iter().map(|p| p.bytes().get()).sum::<u64>(), whole.bytes().get());
        assert!(all.iter().all(|p| p.bytes().get() <= work.bytes() / PIECES as u64));
    }
}
