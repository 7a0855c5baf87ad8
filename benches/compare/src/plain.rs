//! What the machine does without any library: copies between mappings, and the kernel's copies between processes.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use kvferry_geometry::batch::Descriptor;
use kvferry_transport::Region;

use crate::child::{End, Memory};
use crate::wire::Moved;
use crate::work::Work;

/// A move by addresses.
#[derive(Clone, Copy)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

/// The same by the addresses where the regions begin.
pub(crate) fn moves(list: &[Descriptor], src: &[usize], dst: &[usize]) -> anyhow::Result<Vec<Move>> {
    let one = |d: &Descriptor| {
        let from = src.get(d.src_region.index()).context("no such source region")?;
        let to = dst.get(d.dst_region.index()).context("no such destination region")?;
        Ok(Move {
            from: from + usize::try_from(d.src_offset)?,
            to: to + usize::try_from(d.dst_offset)?,
            len: usize::try_from(d.len)?,
        })
    };
    list.iter().map(one).collect()
}

/// Where regions begin.
pub(crate) fn addresses(regions: &[Region]) -> Vec<usize> {
    regions.iter().map(Region::address).collect()
}

/// Equal shares, one for each thread.
fn shared_out<T: Sync>(list: &[T], threads: usize, each: impl Fn(&[T]) + Sync) {
    let mut shares = list.chunks(list.len().div_ceil(threads.max(1)).max(1));
    let own = shares.next().unwrap_or_default();
    let each = &each;
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || each(share));
        }
        each(own);
    });
}

fn moved(start: Instant, pieces: usize, lane: &str) -> anyhow::Result<Moved> {
    let ns = u64::try_from(start.elapsed().as_nanos())?;
    Ok(Moved { ns, descriptors: pieces as u64, lane: lane.to_owned() })
}

/// Both memories are mapped here.
pub(crate) struct Memcpy {
    threads: usize,
    prepared: Vec<Move>,
}

impl Memcpy {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, prepared: Vec::new() }
    }
}

impl End for Memcpy {
    fn prepare(&mut self, memory: &Memory, work: Work) -> anyhow::Result<()> {
        self.prepared = moves(&memory.descriptors(work)?, &addresses(&memory.src), &addresses(&memory.dst))?;
        Ok(())
    }

    fn read(&mut self, _: &Memory, _: Work, _: &[u8]) -> anyhow::Result<Moved> {
        let start = Instant::now();
        shared_out(&self.prepared, self.threads, |share| {
            for m in share {
                let from = std::ptr::with_exposed_provenance::<u8>(m.from);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(m.to);
                // SAFETY: the batch was made for these regions, which are mapped as long as the process lives, and source and
                // destination are different files.
                unsafe { std::ptr::copy_nonoverlapping(from, to, m.len) };
            }
        });
        moved(start, self.prepared.len(), "mapped")
    }
}

/// The source is another process's.
pub(crate) struct ProcessVm {
    ranges: usize,
    threads: usize,
    own: Vec<usize>,
    peer: i32,
    theirs: Vec<usize>,
    prepared: Vec<Move>,
}

impl ProcessVm {
    pub(crate) fn new(memory: &Memory, ranges: usize, threads: usize) -> Self {
        Self { ranges, threads, own: addresses(&memory.src), peer: 0, theirs: Vec::new(), prepared: Vec::new() }
    }
}

impl End for ProcessVm {
    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        Ok(serde_json::to_vec(&(std::process::id(), &self.own))?)
    }

    fn connect(&mut self, _: &Memory, hello: &[u8]) -> anyhow::Result<()> {
        (self.peer, self.theirs) = serde_json::from_slice(hello)?;
        Ok(())
    }

    fn prepare(&mut self, memory: &Memory, work: Work) -> anyhow::Result<()> {
        self.prepared = moves(&memory.descriptors(work)?, &self.theirs, &addresses(&memory.dst))?;
        Ok(())
    }

    fn read(&mut self, _: &Memory, _: Work, _: &[u8]) -> anyhow::Result<Moved> {
        let start = Instant::now();
        let failed = std::sync::atomic::AtomicBool::new(false);
        shared_out(&self.prepared, self.threads, |share| {
            let range =
                |base: usize, len| libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(base), iov_len: len };
            for part in share.chunks(self.ranges) {
                let to: Vec<libc::iovec> = part.iter().map(|m| range(m.to, m.len)).collect();
                let from: Vec<libc::iovec> = part.iter().map(|m| range(m.from, m.len)).collect();
                let wanted: usize = part.iter().map(|m| m.len).sum();
                // SAFETY: the local ranges are inside regions that are mapped as long as the process lives; the remote ones the
                // kernel checks.
                let got = unsafe {
                    let n = part.len() as libc::c_ulong;
                    libc::process_vm_readv(self.peer, to.as_ptr(), n, from.as_ptr(), n, 0)
                };
                if usize::try_from(got) != Ok(wanted) {
                    failed.store(true, std::sync::atomic::Ordering::Relaxed);
                }
            }
        });
        let result = moved(start, self.prepared.len(), "cma");
        ensure!(!failed.into_inner(), "process_vm_readv: {}", std::io::Error::last_os_error());
        result
    }
}
