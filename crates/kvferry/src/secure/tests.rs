//! Both kinds of security, end to end: a fleet's authority, two ends, and a network between them that can do harm.

mod files;
mod key;
mod stream;
mod tls;

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_proto::names::EngineId;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, ExtendedKeyUsagePurpose,
    IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason, RevokedCertParams, SanType, SerialNumber,
    date_time_ymd,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

/// Nothing here takes as long.
const SOON: Duration = Duration::from_secs(60);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("it hangs")
}

/// A fleet's authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key in PEM.
#[derive(Clone)]
struct Issued {
    certificate: String,
    key: String,
}

/// A certificate to be issued: by default one that is fine.
struct Wanted {
    names: Vec<String>,
    years: (i32, i32),
    purposes: Vec<ExtendedKeyUsagePurpose>,
    serial: u64,
}

impl Wanted {
    fn new(names: &[&str]) -> Self {
        let both = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        Self { names: names.iter().map(|&n| n.into()).collect(), years: (2020, 4000), purposes: both, serial: 7 }
    }
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn issue(&self, wanted: &Wanted) -> Issued {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = wanted
            .names
            .iter()
            .map(|name| match name.contains(':') {
                true => SanType::URI(name.as_str().try_into().unwrap()),
                false => SanType::DnsName(name.as_str().try_into().unwrap()),
            })
            .collect();
        params.not_before = date_time_ymd(wanted.years.0, 1, 1);
        params.not_after = date_time_ymd(wanted.years.1, 1, 1);
        params.extended_key_usages.clone_from(&wanted.purposes);
        params.serial_number = Some(SerialNumber::from(wanted.serial));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Issued { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// A certificate of an engine of the fleet.
    fn engine(&self, id: &str) -> Issued {
        self.issue(&Wanted::new(&["kvferry", id]))
    }

    fn builder(&self, own: &Issued) -> TlsBuilder {
        TlsOptions::builder(
            Material::bytes(self.0.pem()),
            Material::bytes(own.certificate.as_str()),
            Material::bytes(own.key.as_str()),
        )
    }

    fn tls(&self, own: &Issued) -> Security {
        self.builder(own).build().unwrap().into()
    }

    fn revocations(&self, serials: &[u64]) -> Material {
        let revoked = |&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2025, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Material::bytes(params.signed_by(&self.0).unwrap().pem().unwrap())
    }
}

/// 32 bytes that look random.
fn secret(seed: u8) -> Material {
    Material::bytes((0..32).map(|i: u8| i.wrapping_mul(37).wrapping_add(seed)).collect::<Vec<u8>>())
}

fn shared(id: &str, seed: u8) -> Security {
    SharedKeyOptions::builder(id, secret(seed)).build().unwrap().into()
}

/// Two ends of each kind that trust each other, the client first.
fn pairs() -> Vec<(Security, Security)> {
    let authority = Authority::new("fleet");
    vec![
        (authority.tls(&authority.engine("decode-0")), authority.tls(&authority.engine("prefill-0"))),
        (shared("k1", 1), shared("k1", 1)),
    ]
}

type Link = Result<Secured<DuplexStream>, SecureError>;

/// Two ends meet over a pipe.
async fn meet(client: &Security, server: &Security) -> (Link, Link) {
    let (a, b) = duplex(1 << 16);
    soon(async { tokio::join!(super::client(a, client, None), super::server(b, server)) }).await
}

/// Whether the other end may say that it is this engine.
fn may<S>(link: &Secured<S>, engine: &str) -> bool {
    link.engines().is_none_or(|engines| engines.has(&EngineId::new(engine).unwrap()))
}

/// Two ends that must come to an agreement.
async fn linked(client: &Security, server: &Security) -> (Secured<DuplexStream>, Secured<DuplexStream>) {
    let (client, server) = meet(client, server).await;
    (client.unwrap(), server.unwrap())
}

/// What a client learns when it is refused: in the handshake, or from its first read.
async fn refusal(link: Link) -> String {
    match link {
        Err(error) => error.to_string(),
        Ok(mut link) => soon(link.read_u8()).await.unwrap_err().to_string(),
    }
}

/// What the network does to one direction.
#[derive(Clone, Default)]
struct Harm {
    /// It ends after so many bytes.
    cut: Option<usize>,
    /// The byte at this place is changed.
    flip: Option<usize>,
    /// Bytes go one by one.
    slow: bool,
}

/// All bytes that went through.
type Seen = Arc<Mutex<Vec<u8>>>;

/// Two ends with a network between them: what the first writes goes up, what the second writes down.
fn network(up: Harm, down: Harm) -> (DuplexStream, DuplexStream, [Seen; 2]) {
    let (ours, near) = duplex(1 << 16);
    let (far, theirs) = duplex(1 << 16);
    let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(near), tokio::io::split(far));
    let seen = [Seen::default(), Seen::default()];
    tokio::spawn(relay(near_read, far_write, up, seen[0].clone()));
    tokio::spawn(relay(far_read, near_write, down, seen[1].clone()));
    (ours, theirs, seen)
}

async fn relay(
    mut from: tokio::io::ReadHalf<DuplexStream>,
    mut to: tokio::io::WriteHalf<DuplexStream>,
    harm: Harm,
    seen: Seen,
) {
    let mut buffer = vec![0; if harm.slow { 1 } else { 4096 }];
    let mut at = 0;
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        let n = harm.cut.map_or(n, |cut| n.min(cut - at));
        let bytes = &mut buffer[..n];
        if let Some(flip) = harm.flip.filter(|flip| (at..at + n).contains(flip)) {
            bytes[flip - at] ^= 0x10;
        }
        seen.lock().unwrap().extend_from_slice(bytes);
        if to.write_all(bytes).await.is_err() {
            return;
        }
        at += n;
        if harm.cut == Some(at) {
            break;
        }
        if harm.slow {
            tokio::task::yield_now().await;
        }
    }
    drop(to.shutdown().await);
}
