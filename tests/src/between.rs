//! What stands between two owners, or at the place of one: a connection that loses, holds back or ends at a message, and a
//! peer that says whatever a test wants.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry::{Address, Reference};
use kvferry_geometry::manifest::Manifest;
use kvferry_proto::handshake::{Expected, Greeting};
use kvferry_proto::names::ModelIdentity;
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::wire::{Frame, FrameReader, decode_peer, encode_peer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::by_hand::owner;
use crate::running::SECOND;

/// Which way a message goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Way {
    /// From whoever has connected, which is the consumer.
    Forth,
    /// To it.
    Back,
}

/// What becomes of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It arrives.
    Pass,
    /// It is lost, and what comes after it is not.
    Lose,
    /// It arrives so late, and what comes after it still later.
    Hold(Duration),
    /// The connection ends instead, for both.
    Cut,
}

/// One message, as a rule sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// The connection, counted from 0.
    pub connection: usize,
    /// Which way it goes.
    pub way: Way,
    /// Its number in that direction of that connection, from 0.
    pub number: usize,
    /// Its kind, of [`kind`](kvferry_proto::wire::kind).
    pub kind: u16,
}

type Rule = dyn Fn(Seen) -> Fate + Send + Sync;

/// Stands between whoever connects to it and an owner.
#[derive(Debug)]
pub struct Between {
    here: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    task: JoinHandle<()>,
}

impl Between {
    /// Begins to listen in front of an owner.
    ///
    /// # Panics
    /// Where that owner is not on TCP.
    pub async fn start(to: Address, rule: impl Fn(Seen) -> Fate + Send + Sync + 'static) -> Self {
        let Address::Tcp(to) = to else { panic!("{to} is not on TCP") };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let here = listener.local_addr().expect("its address");
        let (seen, rule): (Arc<Mutex<Vec<Seen>>>, Arc<Rule>) = (Arc::default(), Arc::new(rule));
        let noted = seen.clone();
        let task = tokio::spawn(async move {
            let mut all = tokio::task::JoinSet::new();
            for connection in 0.. {
                let Ok((consumer, _)) = listener.accept().await else { return };
                let (rule, noted) = (rule.clone(), noted.clone());
                all.spawn(async move {
                    let Ok(producer) = TcpStream::connect(to).await else { return };
                    let ((from_c, to_c), (from_p, to_p)) = (consumer.into_split(), producer.into_split());
                    // Whichever ends first ends both.
                    tokio::select! {
                        () = pump(from_c, to_p, connection, Way::Forth, &*rule, &noted) => {}
                        () = pump(from_p, to_c, connection, Way::Back, &*rule, &noted) => {}
                    }
                });
            }
        });
        Self { here, seen, task }
    }

    /// A reference by way of this.
    ///
    /// # Panics
    /// Never: an address is an address.
    #[must_use]
    pub fn by_way(&self, reference: &Reference) -> Reference {
        let text = reference.to_string();
        let (who, _) = text.split_once('@').expect("a reference has an address");
        format!("{who}@tcp:{}", self.here).parse().expect("a reference")
    }

    /// All messages so far.
    ///
    /// # Panics
    /// Where a rule has panicked.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no rule panics").clone()
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pump(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    connection: usize,
    way: Way,
    rule: &Rule,
    noted: &Mutex<Vec<Seen>>,
) {
    let (mut reader, mut number) = (FrameReader::default(), 0);
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(n @ 1..) = from.read(&mut buffer).await else { return };
        reader.extend(&buffer[..n]);
        while let Ok(Some(frame)) = reader.next_frame() {
            let seen = Seen { connection, way, number, kind: frame.kind };
            number += 1;
            noted.lock().expect("no rule panics").push(seen);
            match rule(seen) {
                Fate::Pass => {}
                Fate::Lose => continue,
                Fate::Hold(time) => tokio::time::sleep(time).await,
                Fate::Cut => return,
            }
            if to.write_all(&bytes(&frame)).await.is_err() {
                return;
            }
        }
    }
}

fn bytes(frame: &Frame) -> Vec<u8> {
    let len = u32::try_from(frame.body.len()).expect("a frame's length");
    [&len.to_le_bytes()[..], &frame.kind.to_le_bytes(), &frame.body].concat()
}

/// A peer in the hands of a test.
#[derive(Debug)]
pub struct Raw {
    stream: TcpStream,
    reader: FrameReader,
}

impl Raw {
    /// Connects, and says nothing.
    ///
    /// # Panics
    /// Where nobody listens on TCP there.
    pub async fn connect(to: &Address) -> Self {
        let Address::Tcp(to) = to else { panic!("{to} is not on TCP") };
        let stream = TcpStream::connect(to).await.expect("somebody listens");
        Self { stream, reader: FrameReader::default() }
    }

    /// Connects and says a hello, as an engine of this name with this cache; gives what the owner answers.
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub async fn meet(to: &Address, id: &str, cache: &Manifest) -> (Self, PeerMessage) {
        let mut raw = Self::connect(to).await;
        let mut local = owner(id, 77, cache);
        local.identity = ModelIdentity::new("model@1").expect("an identity");
        let (_, hello) = Greeting::start(Arc::new(local), Expected::default());
        raw.say(&PeerMessage::Hello(hello)).await;
        let answer = raw.hear().await.expect("an answer");
        (raw, answer)
    }

    /// Says a message.
    ///
    /// # Panics
    /// Where it can't be written.
    pub async fn say(&mut self, message: &PeerMessage) {
        let frame = encode_peer(message).expect("it is short");
        self.stream.write_all(&frame).await.expect("the owner listens");
    }

    /// Sends bytes, as far as they are taken.
    pub async fn send(&mut self, bytes: &[u8]) {
        // It may have been closed meanwhile.
        drop(self.stream.write_all(bytes).await);
    }

    /// The next message; `None` where the owner has closed the connection.
    ///
    /// # Panics
    /// Where neither comes, or it makes no sense.
    pub async fn hear(&mut self) -> Option<PeerMessage> {
        loop {
            if let Some(frame) = self.reader.next_frame().expect("frames") {
                return Some(decode_peer(&frame).expect("a message"));
            }
            let mut buffer = vec![0; 64 << 10];
            let read = tokio::time::timeout(20 * SECOND, self.stream.read(&mut buffer)).await;
            match read.expect("it answers or closes") {
                Ok(n @ 1..) => self.reader.extend(&buffer[..n]),
                _ => return None,
            }
        }
    }
}
