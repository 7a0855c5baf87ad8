//! Probes on lanes of known rates, and what they refuse.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

use std::time::{Duration, Instant};

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::fault::{Faulty, OpFault, Script};
use kvferry_transport::mem::{MemFaults, MemNetwork, MemTransport};
use kvferry_transport::preflight::{Policy, PolicyError, Probe, ProbeError, ProbeOptions, Report, run};
use kvferry_transport::throttle::{Rate, Throttle};
use kvferry_transport::{DeregisterError, Event, LaneKind, LostCause, PeerId, Region, TransferError, Transport};

/// A connection of `wrap`ped to an endpoint with one region of so many bytes.
fn pair<T: Transport>(far_len: usize, wrap: impl FnOnce(MemTransport) -> T) -> (T, PeerId, MemTransport, MemNetwork) {
    let network = MemNetwork::new(1);
    let mut far = network.endpoint().unwrap();
    far.register(Region::zeroed(far_len).unwrap()).unwrap();
    let mut near = wrap(network.endpoint().unwrap());
    let peer = near.connect(&far.blob()).unwrap();
    (near, peer, far, network)
}

/// On a clock that goes from one timer to the next: nothing is timed.
fn probe(near: &mut dyn Transport, peer: PeerId, scratch: usize, options: &ProbeOptions) -> Result<Report, ProbeError> {
    let region = near.register(Region::zeroed(scratch).unwrap())?;
    let info = near.peer(peer).map_err(|_| ProbeError::UnknownPeer { peer })?;
    let mut probe = Probe::new(options.clone(), peer, &info, (region, Bytes::new(scratch as u64)))?;
    let mut now = Duration::ZERO;
    for _ in 0..1_000_000 {
        let next = near.step(now);
        while let Some(event) = near.next_event() {
            let ours = probe.on_event(&event, now);
            assert_eq!(ours, matches!(event, Event::Completed { .. }), "{event:?}");
        }
        if let Some(result) = probe.result() {
            assert!(result.is_err() || probe.open().count() == 0);
            return result.clone();
        }
        let mut submitted = false;
        while let Some(submission) = probe.poll(now) {
            match near.submit(submission) {
                Ok(op) => probe.submitted(op),
                Err(error) => probe.refused(&error),
            }
            submitted = true;
        }
        let later = next.filter(|at| !submitted && *at > now);
        now = later.unwrap_or(now + Duration::from_nanos(500));
    }
    panic!("it does not end: {probe:?}");
}

#[test]
fn a_lane_of_a_known_rate_is_measured_at_it() {
    for (bytes_per_second, ops_per_second) in [(1_000_000_000, 100_000), (50_000_000, 10_000)] {
        let rate = Rate { bytes_per_second, ops_per_second };
        let (mut near, peer, _far, _) = pair(20 << 20, |t| Throttle::new(t, rate));
        let options = ProbeOptions::default();
        let report = probe(&mut near, peer, 16 << 20, &options).unwrap();
        println!("{report}");
        let sizes: Vec<_> = report.rates.iter().map(|r| r.size.get()).collect();
        assert_eq!(sizes, [64 << 10, 1 << 20, 16 << 20]);
        for r in &report.rates {
            let exact = r.size.get() as f64 / rate.time_of(r.size.get()).as_secs_f64();
            assert!(
                (r.bytes_per_second / exact - 1.0).abs() < 0.05,
                "{} at {}, not {exact}",
                r.size,
                r.bytes_per_second
            );
            // Within its time, but for the operations that were under way.
            let took = r.operations as f64 * r.size.get() as f64 / r.bytes_per_second;
            assert!(took < 0.25 + 5.0 * rate.time_of(r.size.get()).as_secs_f64(), "{took} s");
        }
        let small = rate.time_of(64);
        assert_eq!(report.small_operations, 201);
        assert!(report.per_operation >= small && report.per_operation < small + Duration::from_micros(20));
        let measured = report.lane.measured.unwrap();
        assert!((measured.bytes_per_second / bytes_per_second as f64 - 1.0).abs() < 0.05, "{measured:?}");
        let minimum = |n| Policy::new(["in-process"], Some(n)).unwrap().check(&report.lane);
        assert_eq!(minimum(bytes_per_second * 9 / 10), Ok(()));
        assert!(matches!(minimum(bytes_per_second * 11 / 10), Err(PolicyError::TooSlow { .. })));
    }
}

#[test]
fn small_regions_are_measured_by_what_they_have() {
    let (mut near, peer, _far, _) = pair(50, |t| t);
    let report = probe(&mut near, peer, 1 << 20, &ProbeOptions::quick()).unwrap();
    assert_eq!((report.small.get(), report.rates.len(), report.rates[0].size.get()), (50, 1, 50));
    let (mut near, peer, _far, _) = pair(1 << 20, |t| t);
    let (start, mut others) = (Instant::now(), Vec::new());
    let scratch = Region::zeroed(100_000).unwrap();
    let quick = ProbeOptions::quick();
    let report = run(&mut near, peer, scratch, &mut || start.elapsed(), &quick, &mut others).unwrap();
    assert_eq!(others, [Event::Connected { peer }], "what is not the probe's is for others");
    near.deregister(RegionId::new(0)).unwrap_err();
    let sizes: Vec<_> = report.rates.iter().map(|r| r.size.get()).collect();
    assert_eq!(sizes, [65_536, 100_000]);
    assert_eq!(report.lane.kind, LaneKind::InProcess);
    let text = report.to_string();
    assert!(text.contains("reads of 64 KiB") && text.contains("registering 100000 B"), "{text}");
}

#[test]
fn late_and_reordered_ends_are_measured_too() {
    let ms = |a, b| Duration::from_millis(a)..Duration::from_millis(b);
    let faults = MemFaults { completion_delay: ms(0, 3), shuffle: true, ..MemFaults::default() };
    let (mut near, peer, _far, network) = pair(1 << 20, |t| t);
    network.set_faults(near.endpoint(), faults);
    let report = probe(&mut near, peer, 1 << 20, &ProbeOptions::quick()).unwrap();
    assert!(report.per_operation > Duration::from_micros(500) && report.per_operation < Duration::from_millis(4));
}

/// One read of each size, while a size takes no longer than it is given; then the figure that there is.
#[test]
fn a_slow_lane_has_a_figure_and_is_not_stuck() {
    let rate = Rate { bytes_per_second: 2_000_000, ops_per_second: 0 };
    let (mut near, peer, _far, _) = pair(20 << 20, |t| Throttle::new(t, rate));
    let report = probe(&mut near, peer, 16 << 20, &ProbeOptions::default()).unwrap();
    let sizes: Vec<_> = report.rates.iter().map(|r| (r.size.get(), r.operations)).collect();
    assert_eq!((sizes.len(), sizes[1]), (2, (1 << 20, 1)), "{report}");
    let policy = Policy::new(["in-process"], Some(1_000_000_000)).unwrap();
    let slow = policy.check(&report.lane).unwrap_err().to_string();
    assert!(slow.contains("requires 1.00 GB/s") && slow.contains("measured 1999 kB/s"), "{slow}");
    let mut none = ProbeOptions::quick();
    none.sizes.clear();
    assert_eq!(probe(&mut near, peer, 1 << 20, &none), Err(ProbeError::NoSizes));
}

/// Reads under way are cancelled, so that the scratch region can go.
#[test]
fn a_probe_that_gives_up_leaves_nothing() {
    let lost = Script { submit: [(3, OpFault::LoseCompletion)].into(), ..Script::default() };
    let (mut near, peer, _far, _) = pair(1 << 20, |t| Faulty::new(t, lost));
    let (start, mut others, mut short) = (Instant::now(), Vec::new(), ProbeOptions::quick());
    short.within = Duration::from_millis(50);
    let scratch = Region::zeroed(1 << 20).unwrap();
    let error = run(&mut near, peer, scratch, &mut || start.elapsed(), &short, &mut others).unwrap_err();
    assert!(matches!(error, ProbeError::TooLong { open: 1, .. }), "{error}");
    let region = RegionId::new(0);
    assert_eq!(near.deregister(region), Err(DeregisterError::Unknown { region }), "it was given up");
}

#[test]
fn what_goes_wrong_is_told() {
    let quick = ProbeOptions::quick();
    let network = MemNetwork::new(1);
    let (mut near, far) = (network.endpoint().unwrap(), network.endpoint().unwrap());
    let peer = near.connect(&far.blob()).unwrap();
    assert_eq!(probe(&mut near, peer, 100, &quick), Err(ProbeError::NothingToRead { peer }));
    let nobody = PeerId::new(9);
    assert_eq!(probe(&mut near, nobody, 100, &quick), Err(ProbeError::UnknownPeer { peer: nobody }));

    let cancelled = Script { submit: [(30, OpFault::Fail(TransferError::Cancelled))].into(), ..Script::default() };
    let (mut near, peer, _far, _) = pair(1 << 20, |t| Faulty::new(t, cancelled));
    assert!(matches!(probe(&mut near, peer, 1 << 20, &quick), Err(ProbeError::Failed { .. })));

    let mut lost = Script { submit: [(3, OpFault::LoseCompletion)].into(), ..Script::default() };
    let (mut near, peer, _far, _) = pair(1 << 20, |t| Faulty::new(t, lost.clone()));
    let mut short = quick.clone();
    short.within = Duration::from_millis(2);
    let stuck = probe(&mut near, peer, 1 << 20, &short).unwrap_err();
    assert!(matches!(stuck, ProbeError::TooLong { open: 1, .. }), "{stuck}");

    let (mut near, peer, far, network) = pair(1 << 20, |t| t);
    network.kill(far.endpoint());
    let dead = probe(&mut near, peer, 1 << 20, &quick).unwrap_err();
    let gone = TransferError::PeerLost(LostCause::Gone);
    let told = [ProbeError::PeerLost(LostCause::Gone), ProbeError::Failed { size: Bytes::new(64), reason: gone }];
    assert!(told.contains(&dead), "{dead}");

    lost.submit = [(5, OpFault::Refuse(kvferry_transport::SubmitError::QueueFull { limit: 1 }))].into();
    let (mut near, peer, _far, _) = pair(1 << 20, |t| Faulty::new(t, lost));
    probe(&mut near, peer, 1 << 20, &quick).unwrap();
}
