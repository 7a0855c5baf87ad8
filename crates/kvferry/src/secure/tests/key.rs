//! Shared keys: rotation, wrong ones, recordings.

use super::*;

#[tokio::test]
async fn sec_key_both_ends_know_each_other() {
    let (mut client, mut server) = linked(&shared("k1", 1), &shared("k1", 1)).await;
    for link in [&client, &server] {
        assert_eq!(link.names().unwrap().to_vec(), ["k1"]);
        assert!(link.engines().is_none() && may(link, "anything"));
        assert_eq!(link.kind(), "a shared key");
    }
    server.write_all(b"first the server").await.unwrap();
    client.write_all(b"and the client").await.unwrap();
    let (mut a, mut b) = ([0; 16], [0; 14]);
    soon(client.read_exact(&mut a)).await.unwrap();
    soon(server.read_exact(&mut b)).await.unwrap();
    assert_eq!((&a, &b), (b"first the server", b"and the client"));
}

/// Old and new keys at once: first everybody learns the new one, then everybody speaks with it, then the old one goes.
#[tokio::test]
async fn sec_key_rotation_needs_no_pause() {
    let old = shared("old", 1);
    let both = |first: (&str, u8), second: (&str, u8)| {
        Security::from(
            SharedKeyOptions::builder(first.0, secret(first.1)).also(second.0, secret(second.1)).build().unwrap(),
        )
    };
    let learnt = both(("old", 1), ("new", 2));
    let speaks = both(("new", 2), ("old", 1));
    let new = shared("new", 2);
    for (client, server, id) in [
        (&old, &learnt, Some("old")),
        (&learnt, &old, Some("old")),
        (&learnt, &speaks, Some("old")),
        (&speaks, &learnt, Some("new")),
        (&speaks, &new, Some("new")),
        (&new, &speaks, Some("new")),
        (&old, &new, None),
        (&speaks, &old, None),
    ] {
        let (client, server) = meet(client, server).await;
        match id {
            Some(id) => assert_eq!(
                (client.unwrap().names(), server.unwrap().names().unwrap()[0].as_str()),
                (Some(vec![id.to_owned()].into()), id)
            ),
            None => {
                assert!(matches!(client.unwrap_err(), SecureError::KeyNotKnownThere { .. }));
                assert!(matches!(server.unwrap_err(), SecureError::UnknownKey { known, .. } if !known.is_empty()));
            }
        }
    }
}

#[tokio::test]
async fn sec_key_the_wrong_key_is_told_at_both_ends() {
    let (client, server) = meet(&shared("k1", 1), &shared("k1", 2)).await;
    for error in [client.unwrap_err(), server.unwrap_err()] {
        assert!(matches!(&error, SecureError::WrongKey { id } if id == "k1"), "{error}");
    }
}

#[tokio::test]
async fn sec_key_an_allow_list_binds_keys_to_engines() {
    let of = |first: &str, seed| {
        let allow = |b: SharedKeyBuilder| {
            b.allow(AllowedPeer::name("p-key").engines(["prefill-*"])).allow(AllowedPeer::name("decode-0"))
        };
        allow(
            SharedKeyOptions::builder(first, secret(seed))
                .also("p-key2", secret(1))
                .also("decode-02", secret(2))
                .also("stray2", secret(3)),
        )
    };
    let server: Security = allow_all("p-key", 1).build().unwrap().into();
    let (client, link) = meet(&of("p-key", 1).build().unwrap().into(), &server).await;
    assert!(may(&client.unwrap(), "prefill-9") && may(&link.unwrap(), "prefill-9"));

    let (_client, link) = meet(&of("decode-0", 2).build().unwrap().into(), &server).await;
    let link = link.unwrap();
    assert!(may(&link, "decode-0") && !may(&link, "prefill-9"));

    // Known, but not allowed: by the client's own list, and by the server's.
    let (client, _server) = meet(&of("stray", 3).build().unwrap().into(), &server).await;
    assert!(matches!(client.unwrap_err(), SecureError::NotAllowed { names } if names == ["stray"]));
    let (client, link) = meet(&shared("stray", 3), &server).await;
    assert!(matches!(client.unwrap_err(), SecureError::KeyNotKnownThere { .. }));
    assert!(matches!(link.unwrap_err(), SecureError::NotAllowed { names } if names == ["stray"]));
}

/// Has all three keys, and allows two.
fn allow_all(first: &str, seed: u8) -> SharedKeyBuilder {
    SharedKeyOptions::builder(first, secret(seed))
        .also("decode-0", secret(2))
        .also("stray", secret(3))
        .allow(AllowedPeer::name("p-key").engines(["prefill-*"]))
        .allow(AllowedPeer::name("decode-0"))
}

/// Bytes of one side of a good link, said again to a fresh other side.
#[tokio::test]
async fn sec_key_a_recording_opens_nothing() {
    let (ours, theirs, seen) = network(Harm::default(), Harm::default());
    let key = shared("k1", 1);
    let (client, server) =
        soon(async { tokio::join!(super::super::client(ours, &key, None), super::super::server(theirs, &key)) }).await;
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    client.write_all(b"release lease 7").await.unwrap();
    server.write_all(b"held").await.unwrap();
    soon(server.read_exact(&mut [0; 15])).await.unwrap();
    soon(client.read_exact(&mut [0; 4])).await.unwrap();
    let [up, down] = seen.map(|seen| seen.lock().unwrap().clone());

    let (mut attacker, victim) = duplex(1 << 16);
    attacker.write_all(&up).await.unwrap();
    let refused = soon(super::super::server(victim, &key)).await.unwrap_err();
    assert!(matches!(refused, SecureError::WrongKey { .. }), "{refused}");

    let (mut attacker, victim) = duplex(1 << 16);
    attacker.write_all(&down).await.unwrap();
    let refused = soon(super::super::client(victim, &key, None)).await.unwrap_err();
    assert!(matches!(refused, SecureError::WrongKey { .. }), "{refused}");
}

/// The first message alone, which is authentic: nothing is accepted, and nothing but the answer is said.
#[tokio::test]
async fn sec_key_a_recorded_first_message_is_not_yet_a_link() {
    let (ours, theirs, seen) = network(Harm::default(), Harm::default());
    let key = shared("k1", 1);
    let (client, _server) =
        soon(async { tokio::join!(super::super::client(ours, &key, None), super::super::server(theirs, &key)) }).await;
    client.unwrap();
    let hello = seen[0].lock().unwrap()[..6 + 2 + 48].to_vec();
    let (mut attacker, victim) = duplex(1 << 16);
    attacker.write_all(&hello).await.unwrap();
    let mut accepting = Box::pin(super::super::server(victim, &key));
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut accepting).await.is_err(), "it waits for the proof");
    let mut answer = [0; 53];
    soon(attacker.read_exact(&mut answer)).await.unwrap();
    drop(attacker);
    assert!(matches!(soon(accepting).await.unwrap_err(), SecureError::Closed { .. }));
}

/// A change of any byte of the handshake, in either direction, is noticed before anything is said.
#[tokio::test]
async fn sec_key_a_handshake_that_was_tampered_with_fails() {
    let key = shared("k1", 1);
    let (up, down) = (6 + 2 + 48 + 18, 5 + 48);
    let places = (0..up).map(|at| (Some(at), None)).chain((0..down).map(|at| (None, Some(at))));
    for (up, down) in places {
        let harm = |flip| Harm { flip, ..Harm::default() };
        let (ours, theirs, _) = network(harm(up), harm(down));
        let both = async {
            // Whoever fails hangs up, as its caller would on either's time-out.
            let server = tokio::time::timeout(Duration::from_millis(200), super::super::server(theirs, &key));
            tokio::join!(super::super::client(ours, &key, None), server)
        };
        let (client, server) = soon(both).await;
        assert!(!matches!(server, Ok(Ok(_))), "up {up:?} down {down:?}");
        // A client is done when it has said its last message.
        assert!(client.is_err() || up.is_some_and(|at| at >= 56), "up {up:?} down {down:?}");
    }
}

#[tokio::test]
async fn sec_key_garbage_is_refused_at_once() {
    let key = shared("k1", 1);
    let long = [&b"kvsk\x01\xff"[..], &[b'x'; 400]].concat();
    let blank = [&b"kvsk\x01\x00"[..], &[b'x'; 400]].concat();
    let other = [&b"kvsk\x02\x02k1"[..], &[b'x'; 48]].concat();
    let control = [&b"kvsk\x01\x02\n\n"[..], &[b'x'; 48]].concat();
    for (bytes, kind) in [
        (&[0; 64][..], true),
        (b"GET / HTTP/1.1\r\n\r\n", true),
        (b"\x80\x04\x95pickle", true),
        (&long, false),
        (&blank, false),
        (&other, false),
        (&control, false),
    ] {
        let (mut stranger, victim) = duplex(1 << 16);
        stranger.write_all(bytes).await.unwrap();
        let error = soon(super::super::server(victim, &key)).await.unwrap_err();
        let told = matches!(error, SecureError::OtherKind { .. }) == kind
            && matches!(error, SecureError::OtherKind { .. } | SecureError::Broken { .. });
        assert!(told, "{bytes:?}: {error}");
        let (mut stranger, victim) = duplex(1 << 16);
        stranger.write_all(&[&b"kvsk\x09"[..], bytes].concat()).await.unwrap();
        let error = soon(super::super::client(victim, &key, None)).await.unwrap_err();
        assert!(matches!(error, SecureError::Broken { .. }), "{error}");
    }
}
