//! What holds for links of either kind: all bytes arrive, in order, or an error does.

use std::io::ErrorKind;

use tokio::net::{TcpListener, TcpStream};

use super::*;

/// Byte `at` of a stream that differs everywhere.
fn byte(at: usize) -> u8 {
    ((at >> 16) ^ (at >> 8).wrapping_mul(31) ^ at).to_le_bytes()[0]
}

/// Sends `total` bytes in pieces of odd sizes, then ends the stream.
async fn send(mut to: impl AsyncWrite + Unpin, total: usize, largest: usize) {
    let bytes: Vec<u8> = (0..total).map(byte).collect();
    let mut at = 0;
    let mut size = 1;
    while at < total {
        let piece = &bytes[at..total.min(at + size)];
        to.write_all(piece).await.unwrap();
        at += piece.len();
        size = size * 7 % largest + 1;
    }
    to.shutdown().await.unwrap();
}

/// Reads to the end, in pieces of odd sizes, and compares.
async fn receive(mut from: impl AsyncRead + Unpin, total: usize) {
    let mut buffer = vec![0; 300_000];
    let (mut at, mut size) = (0, 1);
    loop {
        let n = from.read(&mut buffer[..size]).await.unwrap();
        if n == 0 {
            break;
        }
        if let Some(wrong) = (0..n).find(|&i| buffer[i] != byte(at + i)) {
            panic!("byte {} is wrong", at + wrong);
        }
        at += n;
        size = size * 5 % buffer.len() + 1;
    }
    assert_eq!(at, total);
}

async fn over_tcp(client: &Security, server: &Security) -> (Secured<TcpStream>, Secured<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connecting = TcpStream::connect(listener.local_addr().unwrap());
    let (ours, theirs) = tokio::join!(connecting, listener.accept());
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap().0);
    let (a, b) =
        soon(async { tokio::join!(super::super::client(ours, client, None), super::super::server(theirs, server)) })
            .await;
    (a.unwrap(), b.unwrap())
}

#[tokio::test]
async fn sec_64_mib_arrive_in_odd_pieces() {
    for (client, server) in pairs() {
        let (a, b) = over_tcp(&client, &server).await;
        soon(async { tokio::join!(send(a, 64 << 20, 200_003), receive(b, 64 << 20)) }).await;
        let (a, b) = linked(&client, &server).await;
        soon(async { tokio::join!(send(b, 3 << 20, 9_001), receive(a, 3 << 20)) }).await;
    }
}

/// Both directions at once, each by two tasks, with more under way than any buffer holds.
#[tokio::test]
async fn sec_both_directions_at_once() {
    for (client, server) in pairs() {
        let (a, b) = over_tcp(&client, &server).await;
        let ((a_read, a_write), (b_read, b_write)) = (tokio::io::split(a), tokio::io::split(b));
        let tasks = [
            tokio::spawn(send(a_write, 8 << 20, 100_003)),
            tokio::spawn(send(b_write, 9 << 20, 70_001)),
            tokio::spawn(receive(a_read, 9 << 20)),
            tokio::spawn(receive(b_read, 8 << 20)),
        ];
        for task in tasks {
            soon(task).await.unwrap();
        }
    }
}

/// The whole handshake and more, a byte at a time.
#[tokio::test]
async fn sec_a_slow_network_is_only_slow() {
    for (client, server) in pairs() {
        let slow = || Harm { slow: true, ..Harm::default() };
        let (ours, theirs, _) = network(slow(), slow());
        let both =
            async { tokio::join!(super::super::client(ours, &client, None), super::super::server(theirs, &server)) };
        let (a, b) = soon(both).await;
        let (a, b) = (a.unwrap(), b.unwrap());
        soon(async { tokio::join!(send(a, 10_000, 301), receive(b, 10_000)) }).await;
    }
}

/// A client that says nothing, or too little, is a matter of its server's time-out.
#[tokio::test(start_paused = true)]
async fn sec_a_silent_client_is_dropped_by_the_callers_time_out() {
    for (_, server) in pairs() {
        for said in [&b""[..], b"kvsk\x01", b"\x16\x03\x01\x02\x00\x01"] {
            let (mut client, theirs) = duplex(1024);
            client.write_all(said).await.unwrap();
            let link = tokio::time::timeout(Duration::from_secs(5), super::super::server(theirs, &server)).await;
            assert!(!matches!(link, Ok(Ok(_))));
            assert!(link.is_err() || !said.is_empty(), "it waits");
            let mut told = Vec::new();
            client.read_to_end(&mut told).await.unwrap();
            assert!(told.len() <= 7, "an alert at most, and then it is closed");
        }
    }
}

/// Bytes that go up and down in a whole handshake, and its two ends.
async fn counted(
    client: &Security,
    server: &Security,
    up: Harm,
    down: Harm,
) -> (Result<Secured<DuplexStream>, SecureError>, Result<Secured<DuplexStream>, SecureError>, [Seen; 2]) {
    let (ours, theirs, seen) = network(up, down);
    let both = async { tokio::join!(super::super::client(ours, client, None), super::super::server(theirs, server)) };
    let (a, b) = soon(both).await;
    (a, b, seen)
}

/// 100,000 bytes go up, of which the network loses the end or changes one: the reader gets the beginning, then an error, never an end.
#[tokio::test]
async fn sec_what_is_cut_off_or_tampered_with_is_an_error() {
    const TOTAL: usize = 100_000;
    for (client, server) in pairs() {
        for (offset, flip) in [
            (0, false),
            (1, false),
            (2, false),
            (3, false),
            (17, false),
            (20_000, false),
            (99_999, false),
            (5, true),
            (6, true),
            (19, true),
            (50_000, true),
            (99_000, true),
        ] {
            // A handshake's length varies with its signatures, so each is watched to its end, and the harm is done behind it.
            let (ours, middle) = duplex(1 << 18);
            let (mut far, theirs) = duplex(1 << 18);
            let mut middle = middle;
            let both = async {
                tokio::join!(super::super::client(ours, &client, None), super::super::server(theirs, &server))
            };
            let shaken = async {
                tokio::select! {
                    ends = both => ends,
                    _ = tokio::io::copy_bidirectional(&mut middle, &mut far) => panic!("the network ended"),
                }
            };
            let (a, b) = soon(shaken).await;
            let (mut a, mut b) = (a.unwrap(), b.unwrap());
            let bytes: Vec<u8> = (0..TOTAL).map(byte).collect();
            let harmed = async {
                // Without an end: what is cut is not the last word.
                a.write_all(&bytes).await.unwrap();
                a.flush().await.unwrap();
                let mut sealed = vec![0; 1 << 18];
                let mut n = 0;
                while n < TOTAL + 32 {
                    n += middle.read(&mut sealed[n..]).await.unwrap();
                }
                match flip {
                    true => sealed[offset] ^= 1,
                    false => n = offset,
                }
                far.write_all(&sealed[..n]).await.unwrap();
                drop(far);
            };
            let read = async {
                let mut got = Vec::new();
                (b.read_to_end(&mut got).await, got)
            };
            let (_, (result, got)) = soon(async { tokio::join!(harmed, read) }).await;
            let kind = result.expect_err("never an end").kind();
            let right = if flip {
                kind == ErrorKind::InvalidData || kind == ErrorKind::UnexpectedEof
            } else {
                kind == ErrorKind::UnexpectedEof
            };
            assert!(right, "{offset} {flip}: {kind:?}");
            assert!(got.len() < TOTAL && got == bytes[..got.len()], "{offset} {flip}: {} bytes", got.len());
            // And it stays one, whatever authentic bytes came before it.
            let mut got = got;
            assert!(soon(b.read_to_end(&mut got)).await.is_err());
            assert!(got.len() < TOTAL && got == bytes[..got.len()], "{offset} {flip}: {} bytes", got.len());
        }
    }
}

/// With a shared key: a frame left out, said twice, or two of them exchanged.
#[tokio::test]
async fn sec_key_frames_keep_their_order() {
    for order in [&[1, 2][..], &[0, 0], &[1, 0], &[0, 2], &[0, 1, 1]] {
        let (mut ours, mut middle) = duplex(1 << 16);
        let (mut far, theirs) = duplex(1 << 16);
        let key = shared("k", 5);
        let both =
            async { tokio::join!(super::super::client(&mut ours, &key, None), super::super::server(theirs, &key)) };
        let shaken = async {
            tokio::select! {
                ends = both => ends,
                _ = tokio::io::copy_bidirectional(&mut middle, &mut far) => panic!("the network ended"),
            }
        };
        let (a, b) = soon(shaken).await;
        let (mut a, mut b) = (a.unwrap(), b.unwrap());
        let mut frames = Vec::new();
        for text in [b"one", b"two", b"six"] {
            a.write_all(text).await.unwrap();
            let mut frame = vec![0; 2 + 3 + 16];
            soon(middle.read_exact(&mut frame)).await.unwrap();
            frames.push(frame);
        }
        for &i in order {
            far.write_all(&frames[i]).await.unwrap();
        }
        let mut got = Vec::new();
        let error = soon(b.read_to_end(&mut got)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{order:?}");
        let wanted = order.iter().enumerate().take_while(|&(at, &i)| at == i).count();
        assert_eq!(got, b"onetwosix"[..3 * wanted], "{order:?}");
    }
}

/// An end that was said is an end, and what comes the other way still comes.
#[tokio::test]
async fn sec_an_end_that_was_said_is_an_end() {
    for (client, server) in pairs() {
        let (mut a, mut b) = linked(&client, &server).await;
        a.write_all(b"last").await.unwrap();
        a.shutdown().await.unwrap();
        let mut got = Vec::new();
        soon(b.read_to_end(&mut got)).await.unwrap();
        assert_eq!(got, b"last");
        assert_eq!(b.read(&mut [0; 8]).await.unwrap(), 0);
        b.write_all(b"answer").await.unwrap();
        b.shutdown().await.unwrap();
        got.clear();
        soon(a.read_to_end(&mut got)).await.unwrap();
        assert_eq!(got, b"answer");
        assert!(a.write_all(b"more").await.is_err());
    }
}

/// Nothing goes over the network as it is.
#[tokio::test]
async fn sec_bytes_are_encrypted() {
    for (client, server) in pairs() {
        let (a, b, seen) = counted(&client, &server, Harm::default(), Harm::default()).await;
        let (mut a, mut b) = (a.unwrap(), b.unwrap());
        let text = b"the engine's block tables";
        a.write_all(text).await.unwrap();
        soon(b.read_exact(&mut [0; 25])).await.unwrap();
        let seen = seen[0].lock().unwrap();
        assert!(seen.len() > text.len() && !seen.windows(8).any(|w| w == &text[..8]));
    }
}

/// Every pair of different kinds: both ends fail, and at least one says that the other speaks something else.
#[tokio::test]
async fn sec_ends_of_different_kinds_do_not_meet() {
    let kinds = || pairs().into_iter();
    let (tls, key) = (kinds().next().unwrap(), kinds().nth(1).unwrap());
    for (client, server) in [(&tls.0, &key.1), (&key.0, &tls.1)] {
        let (client, server) = meet(client, server).await;
        let (client, server) = (client.unwrap_err(), server.unwrap_err());
        let other = |e: &SecureError| matches!(e, SecureError::OtherKind { .. });
        assert!(other(&server), "{server}");
        assert!(other(&client) || matches!(client, SecureError::Closed { .. }), "{client}");
    }
    for secured in [&tls.1, &key.1] {
        // A plaintext client speaks first: a frame of the protocol.
        let (client, server) = duplex(1 << 16);
        let mut client = super::super::client(client, &Security::Plaintext, None).await.unwrap();
        client.write_all(&[200, 0, 0, 0, 1, 0, 3, 0, 3, 0]).await.unwrap();
        let error = soon(super::super::server(server, secured)).await.unwrap_err();
        assert!(matches!(error, SecureError::OtherKind { .. }), "{error}");
        // A plaintext server sees a frame that is too long or of no kind, and hangs up.
        let (client, server) = duplex(1 << 16);
        let mut server = super::super::server(server, &Security::Plaintext).await.unwrap();
        let hang_up = async {
            let mut first = [0; 6];
            server.read_exact(&mut first).await.unwrap();
            drop(server);
            let [a, b, c, d, kind @ ..] = first;
            u32::from_le_bytes([a, b, c, d]) > 16 << 20 || u16::from_le_bytes(kind) > 255
        };
        let (link, nonsense) = soon(async { tokio::join!(super::super::client(client, secured, None), hang_up) }).await;
        assert!(nonsense);
        assert!(matches!(link.unwrap_err(), SecureError::Closed { .. }));
    }
}

/// Plaintext is told as that: nobody is known, and whoever expects somebody is refused.
#[tokio::test]
async fn sec_plaintext_proves_nothing() {
    let (a, _b) = duplex(64);
    let link = super::super::client(a, &Security::Plaintext, None).await.unwrap();
    assert!(link.names().is_none() && link.engines().is_none() && may(&link, "anything"));
    assert!(!Security::Plaintext.protects() && link.into_plaintext().is_ok());
    let (a, _b) = duplex(64);
    let error = super::super::client(a, &Security::Plaintext, Some("prefill-0")).await.unwrap_err();
    assert!(matches!(error, SecureError::OtherPeer { .. }));
}
