//! Which key goes where.

use kvferry_geometry::compat::Unmatched;
use kvferry_geometry::units::Bytes;
use kvferry_proto::handshake::IdentityCheck;
use kvferry_proto::names::{EngineId, ModelIdentity, NameError};
use kvferry_session::{Mode, Way};
use kvferry_transport::preflight::Policy;

use super::fault::{ConfigErrors, ConfigFault};
use super::reader::Reader;
use super::{AllowedAs, EngineConfig, SecurityMode, check};

/// The configuration, or every fault; and every key that there is.
pub(super) fn read(file: &str, text: &str) -> (Result<EngineConfig, ConfigErrors>, Vec<String>) {
    let mut reader = Reader::new(file, text);
    let id = name(&mut reader, "id", EngineId::new);
    if id.is_none() && !reader.has("id") {
        reader.fault("id", ConfigFault::Missing("it names the engine to its peers, as in id = \"prefill-0\""));
    }
    // Without an id the rest is read all the same, for its faults.
    let config = id.map_or_else(|| EngineId::new("missing"), Ok).map(|id| rest(&mut reader, EngineConfig::new(id)));
    let (faults, known) = reader.finish();
    let config = config.map_err(|_| ConfigErrors(Vec::new()));
    (ConfigErrors::of(faults).and(config), known)
}

fn rest(reader: &mut Reader, mut config: EngineConfig) -> EngineConfig {
    engine(reader, &mut config);
    control(reader, &mut config);
    security(reader, &mut config);
    times(reader, &mut config);
    limits(reader, &mut config);
    connections(reader, &mut config);
    worker(reader, &mut config);
    if reader.is_sound() {
        for (key, fault) in check::contradictions(&config) {
            reader.fault(key, fault);
        }
    }
    config
}

fn name<T>(r: &mut Reader, key: &str, make: impl Fn(&str) -> Result<T, NameError>) -> Option<T> {
    let text = r.text(key)?;
    match make(&text) {
        Ok(name) => Some(name),
        Err(error) => {
            let got = format!("{:?}", text.chars().take(80).collect::<String>());
            r.fault(key, ConfigFault::Invalid { got, why: error.to_string() });
            None
        }
    }
}

fn engine(r: &mut Reader, c: &mut EngineConfig) {
    if let Some(identity) = name(r, "model_identity", ModelIdentity::new) {
        c.model_identity = identity;
    }
    let checks = [("required", IdentityCheck::Required), ("off", IdentityCheck::Off)];
    r.choice("identity_check", "\"required\" or \"off\"", &checks, &mut c.identity_check);
    r.flag("stripe", &mut c.stripe);
    let modes = [("pull", Mode::Pull), ("push", Mode::Push { progress: false })];
    r.choice("mode", "\"pull\" or \"push\"", &modes, &mut c.mode);
    let fates = [("refuse", Unmatched::Refuse), ("ignore", Unmatched::Ignore)];
    let expected = "\"refuse\" or \"ignore\"";
    r.choice("compat.source_only", expected, &fates, &mut c.compat.source_only);
    r.choice("compat.destination_only", expected, &fates, &mut c.compat.destination_only);
}

fn control(r: &mut Reader, c: &mut EngineConfig) {
    let c = &mut c.control;
    c.listen = r.parsed("control.listen");
    c.advertise = r.parsed("control.advertise");
    c.rank_socket = r.path("control.rank_socket");
    r.duration("control.handshake_timeout", &mut c.handshake_timeout);
    r.duration_or_never("control.idle", &mut c.idle);
    r.duration("control.grace", &mut c.grace);
    r.duration_or_never("control.reclaim_after", &mut c.reclaim_after);
}

fn security(r: &mut Reader, c: &mut EngineConfig) {
    let c = &mut c.security;
    r.flag("security.plaintext_beyond_loopback", &mut c.plaintext_beyond_loopback);
    r.flag("security.readable_by_others", &mut c.readable_by_others);
    c.engines = r.texts("security.engines");
    let words = [("same", false), ("fleet", true)];
    let expected = "\"same\", \"fleet\" or a list of engine ids, as in [\"decode-0\"]";
    for (name, allowed) in r.words_or_texts("security.allow", expected, &words) {
        let allowed = match allowed {
            Ok(false) => AllowedAs::Same,
            Ok(true) => AllowedAs::Fleet,
            Err(engines) => AllowedAs::Engines(engines),
        };
        c.allow.insert(name, allowed);
    }
    c.mode = mode(r);
}

/// One of the modes of security, by number: all keys of all modes are asked for, so that each is known.
fn mode(r: &mut Reader) -> SecurityMode {
    const PLAINTEXT: u8 = 0;
    const TLS: u8 = 1;
    const SHARED_KEY: u8 = 2;
    let words = [("plaintext", PLAINTEXT), ("tls", TLS), ("shared_key", SHARED_KEY)];
    let mut mode = PLAINTEXT;
    r.choice("security.mode", "\"plaintext\", \"tls\" or \"shared_key\"", &words, &mut mode);
    for (table, its) in [("security.tls", TLS), ("security.shared_key", SHARED_KEY)] {
        // A file that has keys but doesn't use them is no file to run with.
        if mode != its && r.has(table) {
            let fault = ConfigFault::Contradiction("is there, but security.mode is another".into());
            r.fault(table, fault);
        }
    }
    let [roots, certificate, key] = ["security.tls.roots", "security.tls.certificate", "security.tls.key"]
        .map(|file| needed(r, file, mode == TLS, "with mode = \"tls\" it is the path of a PEM file"));
    let revocation_lists = r.path("security.tls.revocation_lists");
    let id = needed(r, "security.shared_key.id", mode == SHARED_KEY, "with mode = \"shared_key\" it names the key");
    let shared =
        needed(r, "security.shared_key.key", mode == SHARED_KEY, "with mode = \"shared_key\" it is the key's file");
    let also = r.paths("security.shared_key.also");
    match mode {
        TLS => SecurityMode::Tls {
            roots: roots.into(),
            certificate: certificate.into(),
            key: key.into(),
            revocation_lists,
        },
        SHARED_KEY => SecurityMode::SharedKey { id, key: shared.into(), also },
        _ => SecurityMode::Plaintext,
    }
}

/// A text; a fault if it isn't there but needed.
fn needed(r: &mut Reader, key: &str, is_needed: bool, what: &'static str) -> String {
    let text = r.text(key).filter(|text| !text.is_empty());
    if is_needed && text.is_none() {
        r.fault(key, ConfigFault::Missing(what));
    }
    text.unwrap_or_default()
}

fn times(r: &mut Reader, c: &mut EngineConfig) {
    r.duration_or_never("lease.ttl", &mut c.lease.ttl);
    r.duration("lease.beat", &mut c.lease.beat);
    r.duration("lease.extension", &mut c.lease.extension);
    r.duration("lease.margin", &mut c.lease.margin);
    r.duration("retry.first", &mut c.retry.first);
    r.duration("retry.most", &mut c.retry.most);
}

fn limits(r: &mut Reader, c: &mut EngineConfig) {
    let c = &mut c.limits;
    r.count("limits.pulls", &mut c.pulls, 1);
    r.count("limits.leases", &mut c.leases, 1);
    r.count("limits.bound", &mut c.bound, 1);
    r.count("limits.links", &mut c.links, 1);
    r.count("limits.manifests", &mut c.manifests, 0);
}

fn connections(r: &mut Reader, c: &mut EngineConfig) {
    let c = &mut c.connections;
    r.count("connections.peers", &mut c.peers, 1);
    r.count("connections.strangers", &mut c.strangers, 1);
    length(r, "connections.stranger_message", &mut c.stranger_message);
    length(r, "connections.stranger_bytes", &mut c.stranger_bytes);
    length(r, "connections.waiting", &mut c.waiting);
}

fn worker(r: &mut Reader, c: &mut EngineConfig) {
    let c = &mut c.worker;
    r.duration("worker.connect_timeout", &mut c.connect_timeout);
    bytes(r, "worker.staging.pool", &mut c.staging.pool);
    let ways =
        [("auto", Way::Auto), ("direct", Way::Direct), ("destination", Way::Destination), ("source", Way::Source)];
    let expected = "\"auto\", \"direct\", \"destination\" or \"source\"";
    r.choice("worker.staging.way", expected, &ways, &mut c.staging.way);
    r.count("worker.staging.threads", &mut c.staging.threads, 1);
    let require = r.texts("worker.lanes.require").unwrap_or_default();
    let mut min_rate = None;
    r.rate("worker.lanes.min_rate", &mut min_rate);
    match Policy::new(require, min_rate) {
        Ok(policy) => c.lanes = policy,
        Err(error) => r.fault("worker.lanes.require", ConfigFault::Contradiction(error.to_string())),
    }
    let a = &mut c.admission;
    bytes(r, "worker.admission.slice", &mut a.slice);
    bytes(r, "worker.admission.peer_bytes", &mut a.peer_bytes);
    r.count("worker.admission.peer_ops", &mut a.peer_ops, 1);
    bytes(r, "worker.admission.bytes", &mut a.bytes);
    r.count("worker.admission.ops", &mut a.ops, 1);
}

fn bytes(r: &mut Reader, key: &str, into: &mut Bytes) {
    let mut size = into.get();
    r.size(key, &mut size);
    *into = Bytes::new(size);
}

/// A size of something in this process's memory.
fn length(r: &mut Reader, key: &str, into: &mut usize) {
    let mut size = *into as u64;
    r.size(key, &mut size);
    match usize::try_from(size) {
        Ok(size) => *into = size,
        Err(_) => {
            let why = "that is more than this machine can address".into();
            r.fault(key, ConfigFault::Invalid { got: size.to_string(), why });
        }
    }
}
