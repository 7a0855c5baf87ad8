//! Handshakes, and what a peer costs that asks for nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvferry::secure::{Material, Security};
use kvferry::{Address, Engine, EngineId, OwnerEvent, PullSpec, Tokens};
use kvferry_benches::engines::{shape, wanted};
use kvferry_benches::instant::Instant as InstantTransport;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::units::Bytes;
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_proto::handshake::{Expected, Greeting, IdentityCheck, LocalSide};
use kvferry_proto::manifest::{EngineManifest, RankContact};
use kvferry_proto::names::{EngineId as Id, Epoch, ModelIdentity};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::wire::{FrameReader, encode_peer};
use kvferry_transport::Transport;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::{KEY, engine, number, of_key, of_tls, print_median, tokens};

/// Certificates and a key for one run.
pub(super) struct Secrets(TempDir);

impl Secrets {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca_key = rcgen::KeyPair::generate().unwrap();
        let root = ca.self_signed(&ca_key).unwrap();
        std::fs::write(folder.path().join("ca.pem"), root.pem()).unwrap();
        let issuer = rcgen::Issuer::new(ca, ca_key);
        for name in ["p", "d"] {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut params = rcgen::CertificateParams::new(vec!["kvferry".into(), name.into()]).unwrap();
            params.extended_key_usages =
                vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth, rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let certificate = params.signed_by(&key, &issuer).unwrap();
            std::fs::write(folder.path().join(format!("{name}.pem")), certificate.pem()).unwrap();
            let path = folder.path().join(format!("{name}.key"));
            std::fs::write(&path, key.serialize_pem()).unwrap();
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        }
        Self(folder)
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    pub(super) fn security(&self, kind: &str, name: &str) -> Security {
        security(kind, name, self.0.path())
    }
}

fn security(kind: &str, name: &str, folder: &Path) -> Security {
    let file = |end: &str| Material::from(folder.join(format!("{name}.{end}")));
    match kind {
        "tls" => of_tls(Material::from(folder.join("ca.pem")), file("pem"), file("key")),
        "key" => of_key("bench", std::array::from_fn(|i| u8::try_from(i).unwrap().wrapping_mul(37) | 0x80)),
        _ => Security::Plaintext,
    }
}

pub(super) fn security_of_child() -> Security {
    let get = |name: &str| std::env::var(name).unwrap_or_default();
    security(&get("KVFERRY_BENCH_SECURITY"), "p", Path::new(&get("KVFERRY_BENCH_SECRETS")))
}

/// CPU time of another process so far.
pub(super) fn cpu_of(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks: u64 = [11, 12].iter().filter_map(|&i| fields.get(i)?.parse::<u64>().ok()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Bytes of this process's memory that are in use.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

pub(super) async fn run() {
    println!(
        "peers over a Unix socket, each an engine of its own with a manifest of 2 items, that ask for nothing; the producer's process\n"
    );
    println!("| peers | handshakes/s | memory for each peer |\n|---|---|---|");
    for peers in [1usize, 100, 1000] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("p.sock");
        let mut p = engine("p", 1).listen(format!("unix:{}", socket.display()).parse().unwrap()).start().await.unwrap();
        let mut events = p.take_events().unwrap();
        let mut times = Vec::new();
        let before = resident();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env("KVFERRY_BENCH_ROLE", "peers")
            .env("KVFERRY_BENCH_ADDRESS", &socket)
            .env("KVFERRY_BENCH_PEERS", peers.to_string())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut began = None;
        let mut up = 0;
        while up < peers {
            match events.next().await {
                Some(OwnerEvent::LinkUp { .. }) => {
                    began.get_or_insert_with(Instant::now);
                    up += 1;
                }
                Some(OwnerEvent::LinkFailed { reasons, .. }) => assert!(reasons.is_empty(), "{reasons:?}"),
                _ => {}
            }
        }
        times.push(began.unwrap().elapsed());
        tokio::time::sleep(Duration::from_millis(300)).await;
        let each = resident().saturating_sub(before) / peers as u64;
        let rate = (peers - 1) as f64 / times[0].as_secs_f64();
        let rate = if peers == 1 { "-".into() } else { format!("{rate:.0}") };
        println!("| {peers} | {rate} | {:.1} KiB |", each as f64 / 1024.0);
        drop(child.kill());
        drop(child.wait());
    }
    println!();
}

/// Connects as many engines as it is told to, greets as each, and stays.
pub(super) fn child() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let socket = PathBuf::from(std::env::var("KVFERRY_BENCH_ADDRESS").unwrap());
    let (spec, groups, ranks) = shape(2, 32, 1, 64);
    let hello = |n: usize| {
        let contacts = vec![RankContact { epoch: Epoch::new(3), blob: vec![5; 60].into() }];
        let cache = Manifest::new(spec.clone(), groups.clone(), ranks.clone()).unwrap();
        let id = Id::new(&format!("d{n}")).unwrap();
        let manifest = std::sync::Arc::new(EngineManifest::new(id, Epoch::new(n as u128), cache, contacts).unwrap());
        let (identity, check) = (ModelIdentity::unspecified(), IdentityCheck::Required);
        let side = LocalSide { identity, check, stripe: false, allowed: None, manifest };
        encode_peer(&PeerMessage::Hello(Greeting::start(std::sync::Arc::new(side), Expected::default()).1)).unwrap()
    };
    let hellos: Vec<Vec<u8>> = (0..number("KVFERRY_BENCH_PEERS", 1)).map(hello).collect();
    runtime.block_on(async {
        let mut open = Vec::new();
        // As many at a time as a producer lets connect that it doesn't know.
        for some in hellos.chunks(128) {
            let first = open.len();
            for hello in some {
                let mut stream = UnixStream::connect(&socket).await.unwrap();
                stream.write_all(hello).await.unwrap();
                open.push(stream);
            }
            for stream in &mut open[first..] {
                let mut frames = FrameReader::default();
                let mut buffer = [0; 4096];
                while frames.next_frame().unwrap().is_none() {
                    let n = stream.read(&mut buffer).await.unwrap();
                    assert!(n > 0, "the producer has closed the link");
                    frames.extend(&buffer[..n]);
                }
            }
        }
        // Until it is killed.
        std::future::pending::<()>().await;
    });
}

/// From the first request to an engine never met, until it is refused for its lease; and again, when both know each other.
pub(super) async fn first_contact() {
    println!(
        "100,000 blocks x 100 regions x 8 ranks on both sides, over TCP on loopback: from the call to its refusal\n"
    );
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for round in 0..15u128 {
        let p = large("p", 100 + round).listen(Address::loopback(0)).start().await.unwrap();
        let d = large("d", 200 + round).start().await.unwrap();
        let reference = || {
            let lease = kvferry::LeaseId::new(77);
            let text = format!("kvferry1.{lease}.{}.p@{}", p.epoch(), p.address().unwrap());
            text.parse().unwrap()
        };
        for times in [&mut first, &mut again] {
            let began = Instant::now();
            let spec = PullSpec::new(Tokens::new(tokens()), wanted(&[0, 2, 1]), KEY);
            let refused = d.pull(reference(), spec).await.unwrap().await;
            assert!(refused.is_err());
            times.push(began.elapsed());
        }
        p.shutdown().await;
        d.shutdown().await;
    }
    let exchange: Vec<Duration> = first.iter().zip(&again).map(|(f, a)| f.saturating_sub(*a)).collect();
    println!("| first contact | once met | the handshake alone |\n|---|---|---|");
    println!("| {} | {} | {} |\n", print_median(first), print_median(again), print_median(exchange));
}

fn large(id: &str, name: u128) -> kvferry::EngineBuilder {
    let (spec, groups, ranks) = shape(100, 2, 8, 100_000);
    let mut builder = Engine::builder(EngineId::new(id).unwrap(), spec, groups);
    for (rank, manifest) in (0..).zip(ranks) {
        let len = |r: &kvferry_geometry::layout::Region| usize::try_from(r.len.get()).unwrap();
        // Nothing moves, so it is never touched and costs addresses only.
        let lens: Vec<usize> = manifest.layout.regions.iter().map(len).collect();
        let all = Bytes::new(lens.iter().sum::<usize>() as u64);
        let all = SharedBuffer::new("kvferry bench", all, BufferOptions::default()).unwrap().region();
        let mut at = 0;
        let part = |len| {
            at += len;
            all.part(at - len, len).unwrap()
        };
        let memory = lens.into_iter().map(part).collect();
        let transport: Box<dyn Transport> = Box::new(InstantTransport::new(name * 1000 + rank));
        builder = builder.rank(manifest, memory, transport);
    }
    builder
}
