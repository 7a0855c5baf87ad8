//! Control links with a shared key: what a stranger says to either end, and what somebody between the two does to what they
//! say. Of TLS only the configuration is ours; its records are `rustls`'s.
//!
//! In the tests it is all as it always is. Under `cargo fuzz` (`--cfg fuzzing`) both ends agree on keys without multiplying on the
//! curve, and their random bytes are always the same: a hundred times as many inputs, and each does the same again. What reads a
//! stranger's bytes is the same code, and so are the hashes and the cipher that tell whether somebody changed them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};

use kvferry::secure::{self, Material, Secured, Security, SharedKeyOptions};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{Reached, Reader};

/// A byte for what it is, then: bytes that a server or a client hears; the text of a key; or changes to what two ends say.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let (mut r, mut reached) = (Reader::new(data), Reached::default());
    match r.byte() {
        // Rare, since it costs four agreements of keys where those cost anything.
        choice @ 240.. => tampered(&mut r, choice >= 248, choice % 8 == 7, &mut reached),
        choice if choice % 3 == 0 => heard_by_server(r.rest(), &mut reached),
        choice if choice % 3 == 1 => heard_by_client(r.rest(), &mut reached),
        _ => key(r.rest(), &mut reached),
    }
    reached
}

fn security() -> Security {
    static SECURITY: LazyLock<Security> = LazyLock::new(|| {
        let key: Vec<u8> = (0u8..32).map(|i| i.wrapping_mul(7).wrapping_add(3)).collect();
        SharedKeyOptions::builder("k", Material::bytes(key)).build().expect("a key").into()
    });
    SECURITY.clone()
}

/// Whoever doesn't have the key is not let in, whatever he says.
fn heard_by_server(bytes: &[u8], reached: &mut Reached) {
    let ((stream, _other), security) = (pipe(bytes, Vec::new()), security());
    let mut server = pin!(secure::server(stream, &security));
    match poll(server.as_mut()) {
        Poll::Ready(Ok(_)) => panic!("let in without a key"),
        Poll::Ready(Err(error)) => reached.fault(&error),
        Poll::Pending => reached.at("server waits"),
    }
}

fn heard_by_client(bytes: &[u8], reached: &mut Reached) {
    let ((stream, _other), security) = (pipe(bytes, Vec::new()), security());
    let mut client = pin!(secure::client(stream, &security, None));
    match poll(client.as_mut()) {
        Poll::Ready(Ok(_)) => panic!("it believes one without a key"),
        Poll::Ready(Err(error)) => reached.fault(&error),
        Poll::Pending => reached.at("client waits"),
    }
}

/// What is accepted as a key is 32 bytes, somehow written.
fn key(bytes: &[u8], reached: &mut Reached) {
    match SharedKeyOptions::builder("k", Material::bytes(bytes)).build() {
        Ok(_) => {
            assert!(bytes.len() >= 32, "{} bytes are no key", bytes.len());
            reached.at("key");
        }
        Err(error) => reached.fault(&error),
    }
}

/// Two ends with one key, and changes on the way from the client to the server, or back: what arrives is what was said, as
/// far as it goes, and all of it only if nothing was changed. Much is said, more than a frame, or little, which is as good
/// for most changes.
fn tampered(r: &mut Reader<'_>, back: bool, much: bool, reached: &mut Reached) {
    let most: u64 = if much { 70_000 } else { 6_000 };
    let said: Vec<u8> = (0..r.number() % most).map(|i| i.to_le_bytes()[0]).collect();
    let mut changes: Vec<Change> = Vec::new();
    while !r.is_empty() && changes.len() < 8 {
        let at = r.number() % most;
        changes.push(Change { at, how: r.byte() });
    }
    changes.sort_by_key(|c| c.at);
    let (forth, backwards) = if back { (Vec::new(), changes) } else { (changes, Vec::new()) };
    let (mut client_end, mut server_end) = pipe(&[], forth);
    server_end.changes = backwards;
    let security = security();
    let mut client = pin!(secure::client(&mut client_end, &security, None));
    let mut server = pin!(secure::server(&mut server_end, &security));
    let (mut at_client, mut at_server) = (Poll::Pending, Poll::Pending);
    for _ in 0..4 {
        if at_client.is_pending() {
            at_client = poll(client.as_mut());
        }
        if at_server.is_pending() {
            at_server = poll(server.as_mut());
        }
    }
    let (Poll::Ready(at_client), Poll::Ready(at_server)) = (at_client, at_server) else {
        reached.at("handshake waits");
        return;
    };
    let ends = at_client.and_then(|c| at_server.map(|s| (c, s)));
    let (mut from, mut to) = match ends {
        Ok((client, server)) if back => (server, client),
        Ok(ends) => ends,
        Err(error) => return reached.fault(&error),
    };
    converse(&said, &mut from, &mut to, reached);
}

fn converse(said: &[u8], from: &mut Secured<&mut End>, to: &mut Secured<&mut End>, reached: &mut Reached) {
    let cx = &mut Context::from_waker(Waker::noop());
    let (mut sent, mut heard) = (0, Vec::new());
    let mut buffer = vec![0; 5000];
    let mut closed = false;
    loop {
        while sent < said.len() {
            let piece = &said[sent..said.len().min(sent + 40_000)];
            match Pin::new(&mut *from).poll_write(cx, piece) {
                Poll::Ready(Ok(n)) => sent += n,
                other => panic!("a pipe takes everything: {other:?}"),
            }
        }
        if !closed {
            closed = true;
            assert!(matches!(Pin::new(&mut *from).poll_shutdown(cx), Poll::Ready(Ok(()))));
        }
        let mut buf = ReadBuf::new(&mut buffer);
        match Pin::new(&mut *to).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) if buf.filled().is_empty() => {
                reached.at("all arrived");
                assert!(heard == said, "an end that is not the end");
                return;
            }
            Poll::Ready(Ok(())) => {
                heard.extend_from_slice(buf.filled());
                assert!(said.starts_with(&heard), "bytes arrive that nobody has said");
            }
            Poll::Ready(Err(error)) => return reached.fault(&error),
            Poll::Pending => return reached.at("cut off"),
        }
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// A change at a byte of a direction, counted from its first.
#[derive(Debug)]
struct Change {
    at: u64,
    /// A bit flipped, a byte added, one left out, or everything from there on.
    how: u8,
}

type Bytes = Rc<RefCell<VecDeque<u8>>>;

/// One end of a connection that holds whatever was written.
#[derive(Debug)]
struct End {
    input: Bytes,
    output: Bytes,
    /// Bytes written so far.
    written: u64,
    /// Those of what is written here, in order.
    changes: Vec<Change>,
    cut: bool,
}

/// Two ends; what waits for the first already, and what becomes of what it writes.
fn pipe(waiting: &[u8], changes: Vec<Change>) -> (End, End) {
    let (here, there): (Bytes, Bytes) = (Rc::new(RefCell::new(waiting.iter().copied().collect())), Rc::default());
    let end = |input: &Bytes, output: &Bytes, changes| End {
        input: input.clone(),
        output: output.clone(),
        written: 0,
        changes,
        cut: false,
    };
    (end(&here, &there, changes), end(&there, &here, Vec::new()))
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut input = self.input.borrow_mut();
        if input.is_empty() {
            return Poll::Pending;
        }
        let n = input.len().min(buf.remaining());
        let (first, second) = input.as_slices();
        let split = first.len().min(n);
        buf.put_slice(&first[..split]);
        buf.put_slice(&second[..n - split]);
        drop(input.drain(..n));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let mut output = this.output.borrow_mut();
        let mut rest = bytes;
        while !this.cut {
            let unchanged = this.changes.first().map_or(u64::MAX, |c| c.at.saturating_sub(this.written));
            let (as_it_is, others) = rest.split_at(rest.len().min(usize::try_from(unchanged).unwrap_or(usize::MAX)));
            output.extend(as_it_is);
            this.written += as_it_is.len() as u64;
            let Some((&byte, others)) = others.split_first() else { break };
            rest = others;
            this.written += 1;
            let how = this.changes.remove(0).how;
            match how % 4 {
                0 => output.push_back(byte ^ (1 << (how / 4 % 8))),
                1 => output.extend([how, byte]),
                2 => {}
                _ => this.cut = true,
            }
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
