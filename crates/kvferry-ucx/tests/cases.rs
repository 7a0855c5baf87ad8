//! The cases that name UCX, and volume: threads, many small transfers, registration rounds.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::{
    Event, LaneKind, MemoryKind, OpKind, Outcome, Region, RegisterError, Submission, TransferError, Transport,
};
use kvferry_ucx::{Rail, UcxConfig, UcxError, UcxTransport};
use support::{connected, drive, end_of, endpoint, lane_of, over};

/// Blocks of the batches here.
const BLOCK: u64 = 4096;

fn read(peer: kvferry_transport::PeerId, len: usize, notify: Option<&[u8]>) -> Submission {
    let batch = reversed(len as u64, BLOCK, 0, true).unwrap();
    Submission { peer, kind: OpKind::Read, batch, notify: notify.map(<[u8]>::to_vec) }
}

#[test]
fn uc_01_transports_that_cannot_carry_messages_are_refused_at_the_start() {
    let error = UcxTransport::new(over(&["cma"], 2)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, UcxError::NoMessages { .. }), "{text}");
    assert!(text.contains("cma carries messages") && text.contains("tcp"), "{text}");
    // What this build hasn't got at all.
    let error = UcxTransport::new(over(&["cuda_ipc", "cuda_copy"], 1)).unwrap_err();
    assert!(matches!(error, UcxError::NoTransport { .. } | UcxError::NoMessages { .. }), "{error}");
    assert!(error.to_string().contains("cuda_ipc"), "{error}");
    // And what has all that is needed.
    assert_eq!(lane_of(&over(&["tcp", "self"], 1)), LaneKind::Stream);
    assert_eq!(lane_of(&over(&["posix", "cma"], 1)), LaneKind::CrossProcess);
}

#[test]
fn uc_02_devices_and_settings_that_are_not_there_are_errors_with_a_cure() {
    let mut config = UcxConfig::with_rails(1);
    config.rails[0] = Rail::on(["no_such_device"]).with_transports(["tcp"]);
    let error = UcxTransport::new(config.clone()).unwrap_err();
    assert!(error.to_string().contains("no_such_device"), "{error}");
    config.rails[0] = Rail::default().with_transports(["rc", "gdr_copy"]);
    assert!(matches!(UcxTransport::new(config.clone()).unwrap_err(), UcxError::DeviceList { .. }));
    config.rails[0] = Rail::default();
    config.options = vec![("NO_SUCH_SETTING".to_owned(), "1".to_owned())];
    let error = UcxTransport::new(config.clone()).unwrap_err();
    assert!(matches!(&error, UcxError::Option { option, .. } if option == "NO_SUCH_SETTING=1"), "{error}");
    config.options = vec![("RNDV_THRESH".to_owned(), "1\0".to_owned())];
    assert!(matches!(UcxTransport::new(config).unwrap_err(), UcxError::Option { .. }));
}

#[test]
fn reg_04_device_memory_is_refused_at_registration_and_host_memory_still_works() {
    let mut t = endpoint(1);
    let host = Region::zeroed(4096).unwrap();
    let start = NonNull::new(host.as_ptr()).unwrap();
    // SAFETY: the bytes are those of `host`, which is the owner; nothing touches them here.
    let device = unsafe { Region::from_raw(start, 4096, MemoryKind::Device(0), Arc::new(host.clone())) };
    let error = t.register(device).unwrap_err();
    assert!(matches!(error, RegisterError::UnsupportedMemory { .. }) && error.to_string().contains("host"), "{error}");
    t.register(host).unwrap();
}

#[test]
fn reg_05_the_sixtieth_round_of_registrations_costs_what_the_second_did() {
    const REGIONS: usize = 300;
    let mut t = endpoint(2);
    let whole = Region::zeroed(REGIONS * 4096).unwrap();
    let mut times = Vec::new();
    for _ in 0..60 {
        let begin = Instant::now();
        for i in 0..REGIONS {
            t.register(whole.part(i * 4096, 4096).unwrap()).unwrap();
        }
        for i in 0..REGIONS {
            t.deregister(RegionId::new(u32::try_from(i).unwrap())).unwrap();
        }
        times.push(begin.elapsed());
    }
    let early = *times[1..5].iter().max().unwrap();
    // The machine may be busy at any moment, but not at each of these.
    let late = *times[50..].iter().min().unwrap();
    println!("{REGIONS} regions: early {early:?}, late {late:?}");
    assert!(late <= 2 * early, "{times:?}");
}

/// A far endpoint with memory, and a near one connected to it with as much.
fn pair(rails: usize, len: usize) -> (UcxTransport, UcxTransport, kvferry_transport::PeerId, [Region; 2]) {
    let (mut near, mut far) = (endpoint(rails), endpoint(rails));
    let memory = [Region::zeroed(len).unwrap(), Region::zeroed(len).unwrap()];
    near.register(memory[0].clone()).unwrap();
    far.register(memory[1].clone()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    connected(&mut [&mut near, &mut far], peer);
    (near, far, peer, memory)
}

#[test]
fn uc_07_eight_threads_read_while_peers_come_and_go() {
    const THREADS: u8 = 8;
    const LEN: usize = 64 * 4096;
    let mut far = endpoint(2);
    let source = Region::zeroed(LEN).unwrap();
    source.fill(0, LEN as u64, 7).unwrap();
    far.register(source).unwrap();
    let blob = far.blob();
    let (stop, notices, reads) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let mut near = endpoint(1);
                    let ours = Region::zeroed(LEN).unwrap();
                    near.register(ours.clone()).unwrap();
                    let peer = near.connect(&blob).unwrap();
                    connected(&mut [&mut near], peer);
                    while !stop.load(Ordering::Relaxed) {
                        ours.fill(0, LEN as u64, 0).unwrap();
                        let op = near.submit(read(peer, LEN, Some(b"x"))).unwrap();
                        assert!(end_of(&mut [&mut near], op).done().is_some());
                        assert!(ours.to_vec().unwrap().iter().all(|b| *b == 7));
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                    near
                })
            })
            .collect();
        let changes = scope.spawn(|| {
            let mut guest = endpoint(2);
            guest.register(Region::zeroed(LEN).unwrap()).unwrap();
            let mut rounds = 0u32;
            while !stop.load(Ordering::Relaxed) {
                let peer = guest.connect(&blob).unwrap();
                if !rounds.is_multiple_of(3) {
                    connected(&mut [&mut guest], peer);
                    guest.submit(read(peer, LEN, None)).unwrap();
                }
                guest.disconnect(peer).unwrap();
                rounds += 1;
            }
            rounds
        });
        let begin = Instant::now();
        let hear = |far: &mut UcxTransport| {
            far.step(begin.elapsed());
            let heard = std::iter::from_fn(|| far.next_event());
            let heard = heard.filter(|e| matches!(e, Event::Notification { .. })).count();
            notices.fetch_add(u32::try_from(heard).unwrap(), Ordering::Relaxed);
            far.wait(Some(Duration::from_millis(2)));
        };
        while begin.elapsed() < Duration::from_secs(2) {
            hear(&mut far);
        }
        stop.store(true, Ordering::Relaxed);
        let rounds = changes.join().unwrap();
        let kept: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        while notices.load(Ordering::Relaxed) < reads.load(Ordering::Relaxed) {
            hear(&mut far);
            assert!(begin.elapsed() < Duration::from_secs(30), "a notification is lost");
        }
        println!("{} reads beside {rounds} connections", reads.load(Ordering::Relaxed));
        assert!(rounds > 3);
        drop(kept);
    });
    assert_eq!(notices.into_inner(), reads.into_inner());
}

#[test]
fn uc_08_a_notification_arrives_without_traffic_of_the_receiver() {
    const LEN: usize = 4 << 20;
    let (mut near, mut far, peer, memory) = pair(2, LEN);
    let batch = reversed(LEN as u64, 64 << 10, 0, false).unwrap();
    let clock = Instant::now();
    let mut worst = Duration::ZERO;
    for round in 0..50u8 {
        memory[0].fill(0, LEN as u64, round).unwrap();
        let notify = Some(vec![round]);
        let op = near.submit(Submission { peer, kind: OpKind::Write, batch: batch.clone(), notify }).unwrap();
        // Far does nothing but sleep until it is woken.
        let gap = std::thread::scope(|scope| {
            let far = scope.spawn(|| {
                loop {
                    assert!(far.wait(Some(Duration::from_secs(10))), "no wake");
                    far.step(clock.elapsed());
                    while let Some(event) = far.next_event() {
                        if let Event::Notification { payload, .. } = event {
                            assert_eq!(payload, [round]);
                            // What is told is visible.
                            assert!(memory[1].to_vec().unwrap().iter().all(|b| *b == round));
                            return clock.elapsed();
                        }
                    }
                }
            });
            assert!(end_of(&mut [&mut near], op).done().is_some());
            let done = clock.elapsed();
            far.join().unwrap().saturating_sub(done)
        });
        worst = worst.max(gap);
    }
    println!("at most {worst:?} between done and told, the check of {LEN} bytes included");
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[test]
fn a_hundred_thousand_small_transfers_each_end_once() {
    const OPS: u32 = 100_000;
    const WINDOW: usize = 512;
    let (mut near, mut far, peer, _memory) = pair(2, 4096);
    let begin = Instant::now();
    let (mut submitted, mut ended, mut told) = (0, 0, vec![false; OPS as usize]);
    let mut open = VecDeque::new();
    let mut heard = 0;
    while ended < OPS || heard < OPS {
        while submitted < OPS && open.len() < WINDOW {
            open.push_back(near.submit(read(peer, 4096, Some(&submitted.to_le_bytes()))).unwrap());
            submitted += 1;
        }
        near.step(begin.elapsed());
        while let Some(event) = near.next_event() {
            if let Event::Completed { op, outcome, .. } = event {
                assert!(outcome.done().is_some(), "{outcome:?}");
                let at = open.iter().position(|o| *o == op).unwrap();
                open.remove(at);
                ended += 1;
            }
        }
        far.step(begin.elapsed());
        while let Some(event) = far.next_event() {
            if let Event::Notification { payload, .. } = event {
                let index = u32::from_le_bytes(payload.try_into().unwrap());
                assert!(!std::mem::replace(&mut told[index as usize], true), "{index} was told twice");
                heard += 1;
            }
        }
        near.wait(Some(Duration::from_micros(200)));
        assert!(begin.elapsed() < Duration::from_secs(60), "{ended} ends, {heard} notifications");
    }
    println!("{OPS} in {:?}", begin.elapsed());
}

/// A cancelled write over tcp is over when it is told to be, at the peer, too, which copies what it is sent.
#[test]
fn a_write_that_was_cancelled_writes_no_more() {
    const LEN: usize = 32 << 20;
    let config = over(&["tcp"], 2);
    let mut near = UcxTransport::new(config.clone()).unwrap();
    let mut far = UcxTransport::new(config).unwrap();
    let memory = [Region::zeroed(LEN).unwrap(), Region::zeroed(LEN).unwrap()];
    near.register(memory[0].clone()).unwrap();
    far.register(memory[1].clone()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    connected(&mut [&mut near, &mut far], peer);
    let batch = reversed(LEN as u64, 64 << 10, 0, false).unwrap();
    memory[0].fill(0, LEN as u64, 9).unwrap();
    let mut cancelled = 0;
    for micros in [500, 2000, 4000, 8000] {
        let submission = Submission { peer, kind: OpKind::Write, batch: batch.clone(), notify: None };
        let op = near.submit(submission).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(micros) {
            std::hint::spin_loop();
        }
        let cut = near.cancel(op).is_ok();
        let end = end_of(&mut [&mut near, &mut far], op);
        if cut && end == Outcome::Failed(TransferError::Cancelled) {
            cancelled += 1;
            memory[1].fill(0, LEN as u64, 1).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert!(memory[1].to_vec().unwrap().iter().all(|b| *b == 1), "written after {end:?}");
        }
    }
    assert!(cancelled > 0);
}

#[test]
fn an_operation_cut_at_any_moment_leaves_the_rest_working() {
    const LEN: usize = 16 << 20;
    let (mut near, mut far, peer, memory) = pair(2, LEN);
    memory[1].fill(0, LEN as u64, 9).unwrap();
    let mut ends = [0; 2];
    for micros in (0..4000).step_by(250) {
        let op = near.submit(read(peer, LEN, Some(b"cut"))).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(micros) {
            std::hint::spin_loop();
        }
        if near.cancel(op).is_ok() {
            match end_of(&mut [&mut near, &mut far], op) {
                Outcome::Done(_) => ends[0] += 1,
                Outcome::Failed(TransferError::Cancelled) => {
                    ends[1] += 1;
                    // Nothing is written any more.
                    memory[0].fill(0, LEN as u64, 1).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                    assert!(memory[0].to_vec().unwrap().iter().all(|b| *b == 1));
                }
                other => panic!("{other:?}"),
            }
        }
    }
    println!("{} done, {} cancelled", ends[0], ends[1]);
    assert!(ends[1] > 0);
    memory[0].fill(0, LEN as u64, 0).unwrap();
    let op = near.submit(read(peer, LEN, Some(b"whole"))).unwrap();
    assert!(end_of(&mut [&mut near], op).done().is_some());
    assert!(memory[0].to_vec().unwrap().iter().all(|b| *b == 9));
    let mut cut = 0;
    drive(&mut [&mut far], |e| match e {
        Event::Notification { payload, .. } if payload == b"whole" => Some(()),
        Event::Notification { .. } => {
            cut += 1;
            None
        }
        _ => None,
    });
    assert_eq!(cut, ends[0]);
}
