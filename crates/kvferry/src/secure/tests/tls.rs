//! Certificates: who is let in, and who isn't, and what each end is told.

use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::*;

/// An ordinary TLS client, which isn't ours.
fn stranger(authority: &Authority, own: Option<&Issued>, protocol: Option<&[u8]>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(authority.0.der().clone()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match own {
        None => config.with_no_client_auth(),
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap()];
            config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap()).unwrap()
        }
    };
    config.alpn_protocols.extend(protocol.map(<[u8]>::to_vec));
    Arc::new(config).into()
}

/// What the server says of such a client.
async fn server_says(authority: &Authority, stranger: &TlsConnector) -> SecureError {
    let server = authority.tls(&authority.engine("prefill-0"));
    let (a, b) = duplex(1 << 16);
    let name = ServerName::try_from("kvferry").unwrap();
    let (client, link) =
        soon(async { tokio::join!(stranger.connect(name, a), super::super::server(b, &server)) }).await;
    drop(client);
    link.unwrap_err()
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&n| n.to_owned()).collect()
}

#[tokio::test]
async fn sec_tls_both_ends_know_each_other_over_tcp() {
    let authority = Authority::new("fleet");
    let client = authority.tls(&authority.engine("decode-0"));
    let server = authority.tls(&authority.engine("spiffe://kv/prefill-0"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepting = async {
        let (socket, _) = listener.accept().await.unwrap();
        super::super::server(socket, &server).await
    };
    let connecting = async {
        let socket = TcpStream::connect(address).await.unwrap();
        super::super::client(socket, &client, Some("spiffe://kv/prefill-0")).await
    };
    let (d, p) = soon(async { tokio::join!(connecting, accepting) }).await;
    let (mut d, mut p) = (d.unwrap(), p.unwrap());
    assert_eq!(d.names().unwrap().to_vec(), strings(&["kvferry", "spiffe://kv/prefill-0"]));
    assert!(may(&d, "spiffe://kv/prefill-0") && !may(&d, "kvferry"));
    assert_eq!(p.names().unwrap().to_vec(), strings(&["decode-0", "kvferry"]));
    assert!(may(&p, "decode-0") && !may(&p, "kvferry") && !may(&p, "decode-1"));
    assert_eq!((d.kind(), d.get_ref().peer_addr().unwrap()), ("TLS 1.3", address));
    d.write_all(b"hello").await.unwrap();
    d.flush().await.unwrap();
    let mut got = [0; 5];
    soon(p.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"hello");
}

#[tokio::test]
async fn sec_tls_another_fleets_certificate_is_refused_by_either_end() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let (good, bad) = (ours.tls(&ours.engine("a")), theirs.tls(&theirs.engine("b")));
    let (client, server) = meet(&good, &bad).await;
    assert!(matches!(client.unwrap_err(), SecureError::Certificate { reason } if reason.contains("roots")));
    assert!(matches!(server.unwrap_err(), SecureError::Refused { alert, .. } if alert == "UnknownCA"));

    // A client that accepts our server, whose own certificate is of another authority.
    let imposter = theirs.engine("a");
    let client = TlsOptions::builder(
        Material::bytes(ours.0.pem()),
        Material::bytes(imposter.certificate),
        Material::bytes(imposter.key),
    );
    let (client, server) = meet(&client.build().unwrap().into(), &good).await;
    assert!(matches!(server.unwrap_err(), SecureError::Certificate { reason } if reason.contains("roots")));
    let told = refusal(client).await;
    assert!(told.contains("refuses our certificate (UnknownCA): its roots lack"), "{told}");
}

#[tokio::test]
async fn sec_tls_a_client_without_a_certificate_is_refused() {
    let authority = Authority::new("fleet");
    let error = server_says(&authority, &stranger(&authority, None, Some(b"kvferry-control"))).await;
    assert!(matches!(&error, SecureError::Certificate { reason } if reason.contains("none")), "{error:?}");
}

/// Interoperates: what refuses the others is what they lack.
#[tokio::test]
async fn sec_tls_a_certificate_for_another_protocol_does_not_serve_this_one() {
    let authority = Authority::new("fleet");
    let own = authority.engine("decode-0");
    for protocol in [None, Some(&b"h2"[..])] {
        let error = server_says(&authority, &stranger(&authority, Some(&own), protocol)).await;
        let other = matches!(error, SecureError::OtherKind { .. } | SecureError::Broken { .. });
        assert!(other, "{protocol:?}: {error:?}");
    }
    let server = authority.tls(&authority.engine("prefill-0"));
    let (a, b) = duplex(1 << 16);
    let connector = stranger(&authority, Some(&own), Some(b"kvferry-control"));
    let name = ServerName::try_from("kvferry").unwrap();
    let (client, link) =
        soon(async { tokio::join!(connector.connect(name, a), super::super::server(b, &server)) }).await;
    assert!(client.is_ok() && may(&link.unwrap(), "decode-0"));
}

#[tokio::test]
async fn sec_tls_an_expired_certificate_is_refused_by_its_owner_and_by_peers() {
    let authority = Authority::new("fleet");
    for (years, why) in [((2019, 2020), "expired"), ((3999, 4000), "valid only in")] {
        let own = authority.issue(&Wanted { years, ..Wanted::new(&["kvferry", "decode-0"]) });
        let error = authority.builder(&own).build().unwrap_err();
        assert!(matches!(&error, SecurityError::Certificate { reason, .. } if reason.contains(why)), "{error}");
        let error = server_says(&authority, &stranger(&authority, Some(&own), Some(b"kvferry-control"))).await;
        assert!(matches!(&error, SecureError::Certificate { reason } if reason.contains(why)), "{error}");
    }
}

#[tokio::test]
async fn sec_tls_a_certificate_for_servers_only_does_not_serve_a_client() {
    let authority = Authority::new("fleet");
    let purposes = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let own = authority.issue(&Wanted { purposes, ..Wanted::new(&["kvferry", "decode-0"]) });
    let error = authority.builder(&own).build().unwrap_err();
    assert!(error.to_string().contains("lacks clientAuth"), "{error}");
    let error = server_says(&authority, &stranger(&authority, Some(&own), Some(b"kvferry-control"))).await;
    assert!(matches!(&error, SecureError::Certificate { reason } if reason.contains("clientAuth")), "{error}");
    // None said: any purpose, as cert-manager issues them.
    let any = authority.issue(&Wanted { purposes: Vec::new(), ..Wanted::new(&["kvferry", "decode-0"]) });
    let any = authority.tls(&any);
    let (client, server) = meet(&any, &any).await;
    assert!(client.is_ok() && server.is_ok());
}

#[tokio::test]
async fn sec_tls_the_server_is_the_one_that_was_meant() {
    let authority = Authority::new("fleet");
    let (client, server) = (authority.tls(&authority.engine("d")), authority.tls(&authority.engine("prefill-0")));
    let (a, b) = duplex(1 << 16);
    let (link, _server) = soon(async {
        tokio::join!(super::super::client(a, &client, Some("prefill-1")), super::super::server(b, &server))
    })
    .await;
    match link.unwrap_err() {
        SecureError::OtherPeer { expected, names } => {
            assert_eq!((expected.as_str(), names), ("prefill-1", strings(&["kvferry", "prefill-0"])));
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn sec_tls_who_is_not_on_the_allow_list_is_refused_by_either_end() {
    let authority = Authority::new("fleet");
    let decode = authority.issue(&Wanted::new(&["spiffe://c/ns/kv/sa/decode"]));
    let web = authority.issue(&Wanted::new(&["shop.svc.cluster.local", "kvferry.svc"]));
    let only = |name: &str| {
        let own = authority.engine("prefill-0");
        Security::from(authority.builder(&own).allow(AllowedPeer::name(name).engines(["d-*"])).build().unwrap())
    };
    let lenient = |own: &Issued| {
        Security::from(authority.builder(own).allow(AllowedPeer::name("*").engines(["*"])).build().unwrap())
    };
    // The fleet's name is missing, or the entry's.
    for (server, client, allowed) in [
        (authority.tls(&authority.engine("p")), lenient(&web), false),
        (authority.tls(&authority.engine("p")), lenient(&decode), false),
        (only("spiffe://c/ns/kv/*"), lenient(&web), false),
        (only("spiffe://c/ns/kv/sa/decode2"), lenient(&decode), false),
        (only("spiffe://c/ns/kv/sa/decod"), lenient(&decode), false),
        (only("spiffe://c/ns/kv/*"), lenient(&decode), true),
        (only("spiffe://c/ns/kv/sa/decode"), lenient(&decode), true),
    ] {
        let (far, near) = meet(&client, &server).await;
        if allowed {
            assert!(may(near.as_ref().unwrap(), "d-7") && !may(&near.unwrap(), "e"));
            assert!(may(&far.unwrap(), "whatever"));
        } else {
            assert!(matches!(near.unwrap_err(), SecureError::NotAllowed { names } if !names.is_empty()));
            let told = refusal(far).await;
            assert!(told.contains("allow-list there"), "{told}");
        }
        // The same the other way round: the strict end is the client.
        let (near, _far) = meet(&server, &client).await;
        match near {
            Ok(near) => assert!(allowed && may(&near, "d-7")),
            Err(error) => assert!(!allowed && matches!(error, SecureError::NotAllowed { .. }), "{error}"),
        }
    }
}

#[tokio::test]
async fn sec_tls_a_wildcard_proves_no_name() {
    let authority = Authority::new("fleet");
    let wild = authority.issue(&Wanted::new(&["kvferry", "*.kv.svc"]));
    let peer = authority.builder(&wild).allow(AllowedPeer::name("*").engines(["*"])).build().unwrap().into();
    let server = authority.tls(&authority.engine("prefill-0"));
    let (_client, link) = meet(&peer, &server).await;
    let link = link.unwrap();
    assert_eq!(link.names().unwrap().to_vec(), strings(&["kvferry"]));
    assert!(!may(&link, "kvferry") && !may(&link, "a.kv.svc"));
    let only = authority.issue(&Wanted::new(&["*.kv.svc"]));
    let error = authority.builder(&only).build().unwrap_err();
    assert!(error.to_string().contains("no DNS and no URI name"), "{error}");
}

#[tokio::test]
async fn sec_tls_a_revoked_certificate_is_refused() {
    let (authority, other) = (Authority::new("fleet"), Authority::new("other"));
    let issue = |serial| authority.issue(&Wanted { serial, ..Wanted::new(&["kvferry", "decode-0"]) });
    let server = |lists| {
        let own = authority.issue(&Wanted { serial: 1, ..Wanted::new(&["kvferry", "prefill-0"]) });
        Security::from(authority.builder(&own).revocation_lists(lists).build().unwrap())
    };
    for (serial, lists, why) in [
        (8, authority.revocations(&[7, 9]), None),
        (9, authority.revocations(&[7, 9]), Some("revoked")),
        (8, other.revocations(&[]), Some("no revocation list of its authority")),
    ] {
        let (client, link) = meet(&authority.tls(&issue(serial)), &server(lists)).await;
        match (link, why) {
            (Ok(_), None) => {}
            (Err(error), Some(why)) => {
                assert!(error.to_string().to_lowercase().contains(why), "{error}");
                refusal(client).await;
            }
            (link, why) => panic!("{link:?} {why:?}"),
        }
    }
}

/// An authority's certificate that isn't the root's goes along in the engine's file.
#[tokio::test]
async fn sec_tls_intermediate_authorities_are_followed() {
    let root = Authority::new("root");
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(rcgen::DnType::CommonName, "between");
    let between = Authority(CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), &root.0).unwrap());
    let mut own = between.engine("decode-0");
    let without = root.tls(&own);
    own.certificate += &between.0.pem();
    let with = root.tls(&own);
    let server = root.tls(&root.engine("prefill-0"));
    let (_client, link) = meet(&with, &server).await;
    assert!(may(&link.unwrap(), "decode-0"));
    let (_client, link) = meet(&without, &server).await;
    assert!(matches!(link.unwrap_err(), SecureError::Certificate { reason } if reason.contains("intermediate")));
}

/// A stranger's handshake can't make the server hold more than 64 KiB of it.
#[tokio::test]
async fn sec_tls_a_huge_handshake_is_refused() {
    let authority = Authority::new("fleet");
    let server = authority.tls(&authority.engine("prefill-0"));
    let (mut stranger, victim) = duplex(1 << 20);
    let sending = async {
        // A client's hello of 16 MiB, in records of 16 KiB.
        let mut record = vec![0; 5 + (16 << 10)];
        record[..9].copy_from_slice(&[0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff]);
        let mut sent = 0;
        while sent < 4 << 20 && stranger.write_all(&record).await.is_ok() {
            sent += record.len();
            record[5..9].fill(0);
            tokio::task::yield_now().await;
        }
        sent
    };
    let (link, sent) = soon(async { tokio::join!(super::super::server(victim, &server), sending) }).await;
    assert!(link.is_err() && sent < 2 << 20, "{sent}");
}

/// A change of any byte that the handshake protects is noticed. (The versions in the headers of records mean nothing in TLS 1.3.)
#[tokio::test]
async fn sec_tls_a_handshake_that_was_tampered_with_fails() {
    let authority = Authority::new("fleet");
    let (client, server) = (authority.tls(&authority.engine("d")), authority.tls(&authority.engine("p")));
    let places = (5..180).step_by(11).map(|at| (Some(at), None)).chain((5..400).step_by(23).map(|at| (None, Some(at))));
    for (up, down) in places {
        let harm = |flip| Harm { flip, ..Harm::default() };
        let (ours, theirs, _) = network(harm(up), harm(down));
        let limit = Duration::from_millis(200);
        let ends = async {
            let client = tokio::time::timeout(limit, super::super::client(ours, &client, None));
            tokio::join!(client, tokio::time::timeout(limit, super::super::server(theirs, &server)))
        };
        let (client, server) = soon(ends).await;
        assert!(!matches!(server, Ok(Ok(_))) && !matches!(client, Ok(Ok(_))), "up {up:?} down {down:?}");
    }
}
