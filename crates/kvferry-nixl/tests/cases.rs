//! What is refused at construction and how; lanes by configuration; telemetry; many endpoints on many threads; large transfers.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::process::Command;
use std::time::Duration;

use kvferry_nixl::{NixlConfig, NixlError, NixlTransport};
use kvferry_transport::blob::Blob;
use kvferry_transport::{LaneKind, OpKind, Region, Submission, Transport};
use support::{connected, end_of, endpoint, has_nixl, pattern, reverse_blocks, reversed};

const WITHOUT: &str = "KVFERRY_NIXL_TEST_WITHOUT";

/// A test for the runner; started by `no_library_is_an_error` in a process whose loader doesn't find NIXL.
#[test]
fn process_without_nixl() {
    if std::env::var_os(WITHOUT).is_none() {
        println!("no test: the process that another starts is this one with {WITHOUT} set");
        return;
    }
    let error = NixlTransport::new(NixlConfig::default()).unwrap_err();
    assert_eq!(kvferry_nixl::available().unwrap_err(), error);
    let NixlError::NoLibrary { looked_for, cure } = &error else { panic!("{error}") };
    assert!(looked_for.contains("libnixl_capi.so") && looked_for.contains("/nowhere"), "{looked_for}");
    for part in ["cargo xtask native", "nixl-cu12", "LD_LIBRARY_PATH", "NIXL_PLUGIN_DIR"] {
        assert!(cure.contains(part), "{cure}");
    }
    println!("it said: {error}");
}

#[test]
fn no_library_is_an_error() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "process_without_nixl", "--nocapture"])
        .env(WITHOUT, "1")
        .env("LD_LIBRARY_PATH", "/nowhere");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    if text.contains("it said") {
        assert!(output.status.success(), "{text}");
    } else {
        // NIXL is installed where the loader looks anyway.
        assert!(kvferry_nixl::available().is_ok(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        kvferry_tests::skip("no nixl", "the loader finds NIXL without being told where");
    }
}

fn refused(change: impl FnOnce(&mut NixlConfig)) -> NixlError {
    let mut config = NixlConfig::default();
    change(&mut config);
    NixlTransport::new(config).unwrap_err()
}

#[test]
fn plugins_that_serve_no_peer_are_refused() {
    if !has_nixl() {
        return;
    }
    let error = refused(|c| c.plugin = "NOT_THERE".to_owned());
    assert!(matches!(&error, NixlError::NoPlugin { available, .. } if available.contains("UCX")), "{error}");
    for storage in ["POSIX", "OBJ"] {
        let error = refused(|c| c.plugin = storage.to_owned());
        assert!(matches!(&error, NixlError::NotBetweenAgents { .. }), "{error}");
        assert!(error.to_string().contains("use UCX"), "{error}");
    }
    let error = refused(|c| c.params = vec![("ucx_error_handling_mode".to_owned(), "perhaps".to_owned())]);
    assert!(matches!(&error, NixlError::Plugin { params, .. } if params.contains("perhaps")), "{error}");
    // And then one that can work does.
    assert_eq!(endpoint().capabilities().backend, "nixl");
}

fn pair(change: impl Fn(&mut NixlConfig)) -> (NixlTransport, NixlTransport) {
    let mut config = NixlConfig::default();
    change(&mut config);
    (NixlTransport::new(config.clone()).unwrap(), NixlTransport::new(config).unwrap())
}

/// Moves bytes both ways and checks them; the lane is what the peer's entry says.
fn moved(
    mut d: NixlTransport,
    mut p: NixlTransport,
    len: usize,
    block: usize,
) -> (NixlTransport, kvferry_transport::Lane) {
    let (ours, theirs) = (Region::zeroed(len).unwrap(), Region::zeroed(len).unwrap());
    d.register(ours.clone()).unwrap();
    p.register(theirs.clone()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    connected(&mut [&mut d, &mut p], peer);
    for (kind, from, to) in [(OpKind::Read, &theirs, &ours), (OpKind::Write, &ours, &theirs)] {
        let bytes = pattern(len as u64 + u64::from(kind == OpKind::Read), len);
        from.write(0, &bytes).unwrap();
        let op = d.submit(Submission { peer, kind, batch: reversed(len, block), notify: None }).unwrap();
        let stats = end_of(&mut [&mut d, &mut p], op).done().unwrap();
        assert_eq!(stats.bytes.get(), len as u64);
        assert!(to.to_vec().unwrap() == reverse_blocks(&bytes, block), "{kind}");
    }
    let lane = d.peer(peer).unwrap().lane;
    println!("{lane:?}");
    (d, lane)
}

#[test]
fn the_lane_is_the_one_that_ucx_uses() {
    if !has_nixl() {
        return;
    }
    let (d, p) = pair(|c| c.ucx = vec![("TLS".to_owned(), "tcp".to_owned())]);
    let (_d, lane) = moved(d, p, 3 << 20, 1 << 14);
    assert_eq!((lane.kind, lane.transports), (LaneKind::Stream, vec!["tcp".to_owned()]), "{}", lane.detail);
    let (d, p) = pair(|_| {});
    let (_d, lane) = moved(d, p, 3 << 20, 1 << 14);
    assert!(matches!(lane.kind, LaneKind::CrossProcess | LaneKind::SharedMemory), "{lane:?}");
    assert!(lane.detail.contains("plugin UCX"), "{lane:?}");
}

#[test]
fn threads_of_the_plugin_and_cuts_and_telemetry() {
    if !has_nixl() {
        return;
    }
    let (d, p) = pair(|c| {
        (c.threads, c.telemetry) = (2, true);
        c.cutting.request_descriptors = 2000;
    });
    let (d, _) = moved(d, p, 32 << 20, 4096);
    let t = d.telemetry();
    assert_eq!((t.bytes, t.descriptors), (64 << 20, 2 * (8 << 10)));
    assert_eq!(t.requests, 2 * 5);
    assert!(t.moving > Duration::ZERO && t.posting > Duration::ZERO, "{t:?}");
    // Cut inside a descriptor, too, and all on one thread.
    let (d, p) = pair(|c| (c.threads, c.cutting.request_bytes) = (0, 100_000));
    let (d, _) = moved(d, p, 1 << 20, 1 << 19);
    assert_eq!((d.telemetry().requests, d.telemetry().moving), (2 * 11, Duration::ZERO));
}

#[test]
fn blobs_of_another_plugin_or_process_life_are_refused() {
    if !has_nixl() {
        return;
    }
    let (mut d, mut p) = pair(|_| {});
    p.register(Region::zeroed(4096).unwrap()).unwrap();
    let blob = p.blob();
    let parsed = Blob::decode(&blob).unwrap();
    assert_eq!((parsed.backend.as_str(), parsed.regions.len()), ("nixl", 1));
    let at = parsed.lane.windows(3).position(|w| w == b"UCX").unwrap();
    let mut other = parsed.clone();
    other.lane[at..at + 3].copy_from_slice(b"XYZ");
    let error = d.connect(&other.encode()).unwrap_err().to_string();
    assert!(error.contains("XYZ") && error.contains("same on both sides"), "{error}");
    drop(p);
    let error = d.connect(&blob).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
}

/// Notifications of agents that are no endpoints of ours are counted and otherwise nothing.
#[test]
fn foreign_notifications_are_dropped() {
    if !has_nixl() {
        return;
    }
    let mut t = endpoint();
    t.register(Region::zeroed(4096).unwrap()).unwrap();
    let lane = Blob::decode(&t.blob()).unwrap().lane;
    // Version, process, the plugin's name with its length; then NIXL's metadata with its length.
    let (len, rest) = lane[1 + 36 + 1 + 3..].split_first_chunk::<4>().unwrap();
    let metadata = &rest[..u32::from_le_bytes(*len) as usize];
    let stranger = nixl_sys::Agent::new("a stranger").unwrap();
    let (_, params) = stranger.get_plugin_params("UCX").unwrap();
    let _backend = stranger.create_backend("UCX", &params).unwrap();
    let name = stranger.load_remote_md(metadata).unwrap();
    for bytes in [&b"hello"[..], b"kvfN\x01", b"kvfN\x01\x02garbage"] {
        stranger.send_notification(&name, bytes, None).unwrap();
    }
    let start = std::time::Instant::now();
    while t.telemetry().foreign < 3 && start.elapsed() < Duration::from_secs(10) {
        t.step(start.elapsed());
        assert_eq!(t.next_event(), None);
        t.wait(Some(Duration::from_millis(1)));
    }
    assert_eq!(t.telemetry().foreign, 3);
}

/// Eight endpoints on eight threads, each of which reads from the next and is read by the one before.
#[test]
fn a_ring_of_eight_threads() {
    const LEN: usize = 1 << 20;
    const ROUNDS: usize = 20;
    if !has_nixl() {
        return;
    }
    let (blobs, ring): (Vec<_>, Vec<_>) = (0..8u64)
        .map(|i| {
            let mut t = endpoint();
            let (ours, given) = (Region::zeroed(LEN).unwrap(), Region::zeroed(LEN).unwrap());
            given.write(0, &pattern(i, LEN)).unwrap();
            t.register(given).unwrap();
            let blob = t.blob();
            t.register(ours.clone()).unwrap();
            (blob, (t, ours))
        })
        .unzip();
    let barrier = std::sync::Barrier::new(ring.len());
    std::thread::scope(|scope| {
        for (i, (mut t, ours)) in ring.into_iter().enumerate() {
            let (blobs, barrier) = (&blobs, &barrier);
            scope.spawn(move || {
                let next = (i + 1) % blobs.len();
                let peer = t.connect(&blobs[next]).unwrap();
                connected(&mut [&mut t], peer);
                let batch = support::reversed_into(LEN, 1 << 13, 1);
                for _ in 0..ROUNDS {
                    let op =
                        t.submit(Submission { peer, kind: OpKind::Read, batch: batch.clone(), notify: None }).unwrap();
                    assert!(end_of(&mut [&mut t], op).done().is_some());
                }
                assert!(ours.to_vec().unwrap() == reverse_blocks(&pattern(next as u64, LEN), 1 << 13));
                barrier.wait();
            });
        }
    });
}
