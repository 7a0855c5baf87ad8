//! What only a kernel that refuses on demand can show, and what needs a look inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Dim, Nest, PairRun, Part, Section};
use kvferry_geometry::staged::{CostModel, Place, Pools};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::{Event, LostCause, OpKind, Outcome, Region, Submission, TransferError, Transport};
use rustix::io::Errno;

use crate::process::{Kernel, Linux, Span, Way};

mod forks;
mod held;
mod limits;
use crate::window::create;
use crate::{Config, ShmTransport};

const LEN: usize = 4096;

/// The kernel, refusing with an error number unless it is zero.
#[derive(Default)]
struct Refusing(AtomicI32);

impl Kernel for Refusing {
    unsafe fn vm(&self, way: Way, pid: i32, ours: &[Span], peers: &[Span]) -> Result<u64, Errno> {
        match self.0.load(Ordering::Relaxed) {
            // SAFETY: the caller's promise, passed on.
            0 => unsafe { Linux.vm(way, pid, ours, peers) },
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }
}

fn mapped() -> Region {
    mapped_of(LEN)
}

fn mapped_of(len: usize) -> Region {
    let (fd, window) = create("kvferry-unit", len as u64, false).unwrap();
    let start = window.start();
    // SAFETY: the window is `len` mapped bytes that can't shrink, and is the owner given.
    let region = unsafe { Region::from_raw(start, len, kvferry_transport::MemoryKind::Host, Arc::new(window)) };
    region.with_share(Arc::new(fd), 0)
}

/// Plain memory, and an owner whose count tells who holds it.
fn counted(owner: &Arc<Region>) -> Region {
    counted_of(owner, LEN)
}

/// The same of any length; shared if the owner is.
fn counted_of(owner: &Arc<Region>, len: usize) -> Region {
    let start = std::ptr::NonNull::new(owner.as_ptr()).unwrap();
    // SAFETY: the bytes are `owner`'s, which is the owner given.
    let region = unsafe { Region::from_raw(start, len, kvferry_transport::MemoryKind::Host, owner.clone()) };
    match owner.share() {
        Some((fd, offset)) => region.with_share(Arc::new(fd.try_clone_to_owned().unwrap()), offset),
        None => region,
    }
}

/// All of a source region to all of destination region 0.
fn whole(src: u32, sources: usize) -> Arc<BoundedBatch> {
    copy_of(LEN as u64, src, sources)
}

/// The same for one source region of any length.
fn of_len(len: u64) -> Arc<BoundedBatch> {
    copy_of(len, 0, 1)
}

fn copy_of(len: u64, src: u32, sources: usize) -> Arc<BoundedBatch> {
    let base = Base { src_region: RegionId::new(src), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 0 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: len,
        dst_block_stride: len,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(len),
        pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
    };
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    Arc::new(batch.check(&vec![Bytes::new(len); sources], &[Bytes::new(len)]).unwrap())
}

fn hear<R>(d: &mut ShmTransport, p: &mut ShmTransport, mut wanted: impl FnMut(Event) -> Option<R>) -> R {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        d.step(start.elapsed());
        p.step(start.elapsed());
        while let Some(event) = d.next_event() {
            if let Some(got) = wanted(event) {
                return got;
            }
        }
        d.wait(Some(Duration::from_millis(1)));
    }
    panic!("not heard in time");
}

#[test]
fn a_refusal_of_all_memory_is_told_at_connect() {
    for (errno, words) in [
        (Errno::PERM, "PR_SET_DUMPABLE"),
        (Errno::NOSYS, "CONFIG_CROSS_MEMORY_ATTACH"),
        (Errno::SRCH, "pid namespace"),
        (Errno::FAULT, "not mapped"),
    ] {
        let kernel = Arc::new(Refusing(AtomicI32::new(errno.raw_os_error())));
        let mut d = ShmTransport::with_kernel(Config::default(), kernel).unwrap();
        let mut p = ShmTransport::new(Config::default()).unwrap();
        p.register(Region::zeroed(LEN).unwrap()).unwrap();
        d.connect(&p.blob()).unwrap();
        let cause = hear(&mut d, &mut p, |e| match e {
            Event::PeerLost { cause, .. } => Some(cause),
            _ => None,
        });
        // The causes depend on the machine; the error number and the way out are always named.
        let text = cause.to_string();
        assert!(matches!(cause, LostCause::Lane(_)) && text.contains("memfd"), "{text}");
        assert!(text.contains(words) || text.contains("ptrace_scope") || text.contains("seccomp"), "{text}");
    }
}

#[test]
fn a_refusal_of_some_memory_fails_what_needs_it() {
    let kernel = Arc::new(Refusing(AtomicI32::new(Errno::PERM.raw_os_error())));
    let mut d = ShmTransport::with_kernel(Config::default(), kernel.clone()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    p.register(mapped()).unwrap();
    p.register(Region::zeroed(LEN).unwrap()).unwrap();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    let lane = d.peer(peer).unwrap().lane.detail;
    assert_eq!(lane, "1 of 2 regions by process_vm_readv/writev, which is refused, the others mapped");
    let mut read = |d: &mut ShmTransport, src| {
        let submission = Submission { peer, kind: OpKind::Read, batch: whole(src, 2), notify: None };
        let op = d.submit(submission).unwrap();
        hear(d, &mut p, |e| match e {
            Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
            _ => None,
        })
    };
    assert!(read(&mut d, 0).done().is_some());
    let Outcome::Failed(TransferError::Lane { reason }) = read(&mut d, 1) else { panic!("not refused") };
    assert!(reason.contains("process_vm_readv"), "{reason}");
}

#[test]
fn a_region_that_is_given_up_waits_for_those_inside() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    let id = p.register(counted(&memory)).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    // As a copy thread of `d` that is inside a slice.
    let slot = d.slot(0);
    let inside = slot.enter();
    p.deregister(id).unwrap();
    let second = Duration::from_secs(1);
    for pause in [1, 2, 4, 8, 16, 32, 64, 100, 100] {
        let again = second + Duration::from_millis(pause);
        assert_eq!(p.step(second), Some(again), "it is looked at again, less and less often");
        assert_eq!(Arc::strong_count(&memory), 2);
    }
    drop(inside);
    assert_eq!(p.step(Duration::from_secs(1)), None);
    assert_eq!(Arc::strong_count(&memory), 1);
    // A peer that is gone is not waited for.
    let id = p.register(counted(&memory)).unwrap();
    let inside = slot.enter();
    p.deregister(id).unwrap();
    p.step(Duration::from_secs(1));
    assert_eq!(Arc::strong_count(&memory), 2);
    d.disconnect(peer).unwrap();
    p.step(Duration::from_secs(1));
    p.step(Duration::from_secs(1));
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(inside);
}

#[test]
fn a_region_given_up_or_registered_anew_is_stale_to_those_who_knew_it() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let (one, other) = (p.register(mapped()).unwrap(), p.register(Region::zeroed(LEN).unwrap()).unwrap());
    d.register(mapped()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    let read = |d: &mut ShmTransport, p: &mut ShmTransport, src| {
        let submission = Submission { peer, kind: OpKind::Read, batch: whole(src, 2), notify: None };
        let op = d.submit(submission).unwrap();
        hear(d, p, |e| match e {
            Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
            _ => None,
        })
    };
    let stale = |region| Outcome::Failed(TransferError::Stale { region });
    assert!(read(&mut d, &mut p, 0).done().is_some() && read(&mut d, &mut p, 1).done().is_some());
    p.deregister(one).unwrap();
    assert_eq!(read(&mut d, &mut p, 0), stale(one));
    assert!(read(&mut d, &mut p, 1).done().is_some(), "the other one stands");
    p.deregister(other).unwrap();
    assert_eq!(p.register(mapped()).unwrap(), one, "a new generation");
    assert_eq!(read(&mut d, &mut p, 0), stale(one));
    assert_eq!(read(&mut d, &mut p, 1), stale(other));
}

#[test]
fn a_full_listener_is_dialled_again() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let name = kvferry_transport::blob::Blob::decode(&p.blob()).unwrap().lane[21..].to_vec();
    let mut strangers = Vec::new();
    loop {
        let socket = crate::sock::socket().unwrap();
        match crate::sock::connect(&socket, &name) {
            Ok(()) => strangers.push(socket),
            Err(Errno::AGAIN) => break,
            Err(e) => panic!("{e}"),
        }
    }
    let peer = d.connect(&p.blob()).unwrap();
    let due = d.step(Duration::ZERO).unwrap();
    assert!(due <= Duration::from_millis(5), "{due:?}");
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
}

#[test]
fn settings_out_of_range_are_refused() {
    let with = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        ShmTransport::new(config).map(|_| ()).unwrap_err().to_string()
    };
    assert!(with(|c| c.threads = 0).contains("threads is 0, allowed is 1 to 32"));
    assert!(with(|c| c.threads = 33).contains("threads is 33"));
    assert!(with(|c| c.name = Some("n".repeat(108))).contains("is 108, allowed is 1 to 107"));
    let config = Config { name: Some(format!("kvferry-unit-{}", std::process::id())), ..Config::default() };
    let _first = ShmTransport::new(config.clone()).unwrap();
    assert!(ShmTransport::new(config).unwrap_err().to_string().contains("is taken"));
}

#[test]
fn writes_go_where_they_are_granted() {
    let closed = Config { grant_writes: false, ..Config::default() };
    for (config, read_only) in [(closed, false), (Config::default(), true)] {
        let mut d = ShmTransport::new(Config::default()).unwrap();
        let mut p = ShmTransport::new(config).unwrap();
        let region = mapped();
        if read_only {
            p.register_read_only(region).unwrap()
        } else {
            p.register(region).unwrap()
        };
        d.register(mapped()).unwrap();
        let peer = d.connect(&p.blob()).unwrap();
        for (kind, granted) in [(OpKind::Write, false), (OpKind::Read, true)] {
            let op = d.submit(Submission { peer, kind, batch: whole(0, 1), notify: None }).unwrap();
            let end = hear(&mut d, &mut p, |e| match e {
                Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
                _ => None,
            });
            assert_eq!(end.done().is_some(), granted, "{kind}: {end:?}");
        }
    }
}

/// Short runs in another order at the other end are what staging is for over a network card; here it would be a second copy.
#[test]
fn no_shape_is_cheaper_staged() {
    let cost = ShmTransport::new(Config::default()).unwrap().capabilities().cost;
    for run in [16u64, 64, 128, 256, 4096] {
        let (tokens, heads, blocks) = (16, 8, 4096);
        let dims = [
            Dim { count: tokens, src_stride: heads * run, dst_stride: run },
            Dim { count: heads, src_stride: run, dst_stride: tokens * run },
        ];
        let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset: 0, dst_offset: 0 };
        let block = tokens * heads * run;
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: block,
            dst_block_stride: block,
            src_step: 1,
            dst_step: 1,
            nest: Nest { dims: dims.into_iter().collect(), run },
            pairs: (0..blocks).map(|i| PairRun { src: blocks - 1 - i, dst: i, count: 1 }).collect::<Vec<_>>().into(),
        };
        let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
        let pools = Pools { source: 1 << 40, destination: 1 << 40 };
        let choice = cost.compare(&batch, pools);
        assert_eq!(choice.best.place, Place::Direct, "{run}: {choice:?}");
        assert!(choice.destination.is_some_and(|c| c.fits), "it could be staged");
        let card = CostModel::default().compare(&batch, pools).best.place;
        assert_eq!(card == Place::Direct, run == 4096, "{run}: over a card it is {card}");
    }
}
