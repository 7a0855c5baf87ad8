//! Peers that say what no endpoint of ours would.

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::access::Message;
use kvferry_transport::blob::Blob;
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::{EndpointId, Event, LostCause, OpKind, Region, Submission, Transport};

use crate::part::Part;
use crate::process::Process;
use crate::sys::{Context, Endpoint, Header, Worker};
use crate::wire::{self, Caller, Ear, Hello, Told};
use crate::{UcxConfig, UcxTransport};

/// A worker that says what it is told to say.
struct Liar {
    // Before its worker.
    way: Option<Endpoint>,
    worker: Worker,
    part: Part,
    target: EndpointId,
}

const LIAR: EndpointId = EndpointId::new([0xaa; 16]);

impl Liar {
    fn new(target: &UcxTransport) -> Self {
        let blob = Blob::decode(&target.blob()).unwrap();
        let part = Part::decode(&blob.lane, blob.regions.iter().map(|(_, len)| len.get())).unwrap();
        let context = Context::new(&crate::rail::settings(&UcxConfig::default()), &[]).unwrap();
        let worker = Worker::new(&context).unwrap();
        let way = Some(worker.connect(&part.rails[0].address).unwrap());
        Self { way, worker, part, target: blob.endpoint }
    }

    fn say(&self, kind: u8, to: Ear, body: Vec<u8>) {
        self.way.as_ref().unwrap().send(Header { kind, to }, body).unwrap();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1) {
            self.worker.progress();
        }
    }

    fn listen(&self, time: Duration) -> Vec<(Header, Vec<u8>)> {
        let start = Instant::now();
        let mut heard = Vec::new();
        while start.elapsed() < time {
            self.worker.progress();
            heard.extend(std::iter::from_fn(|| self.worker.receive()));
        }
        heard
    }

    /// What is heard next.
    fn hear(&self) -> (Header, Vec<u8>) {
        let start = Instant::now();
        loop {
            self.worker.progress();
            if let Some(heard) = self.worker.receive() {
                return heard;
            }
            assert!(start.elapsed() < Duration::from_secs(10));
        }
    }

    fn caller(&self, conn: u64) -> Caller {
        Caller { endpoint: LIAR, conn, rail: 0 }
    }

    fn hello(&self, conn: u64) -> Hello {
        let address = self.worker.address().unwrap();
        Hello {
            token: self.part.token,
            to: self.target,
            ear: ear(conn),
            caller: self.caller(conn),
            process: Process::default(),
            address,
        }
    }

    /// Becomes a guest.
    fn enter(&self, conn: u64) -> Ear {
        self.say(wire::HELLO, [0; 16], self.hello(conn).encode());
        let (header, body) = self.hear();
        assert_eq!((header.kind, header.to), (wire::WELCOME, ear(conn)));
        wire::guest(&body).unwrap()
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        if let Some(way) = self.way.take() {
            let mut closing = way.close(true);
            while !closing.done() {
                self.worker.progress();
            }
        }
    }
}

/// Where a liar's connection hears.
fn ear(conn: u64) -> Ear {
    [u8::try_from(conn).unwrap(); 16]
}

fn begin(op: u64, generation: u64, region: u32) -> Vec<u8> {
    Message::Begin { op, kind: OpKind::Read, generation, regions: vec![RegionId::new(region)] }.encode()
}

#[test]
fn nonsense_is_ignored_and_breaks_only_who_says_it() {
    let mut t = UcxTransport::new(UcxConfig::with_rails(1)).unwrap();
    let memory = Region::zeroed(4096).unwrap();
    t.register(memory.clone()).unwrap();
    let liar = Liar::new(&t);
    // No header of ours, unknown kinds, bodies of any length, guests that there are not.
    for kind in 0..=9 {
        for len in [0, 1, 24, 25, 33, 50, 200, 9000] {
            liar.say(kind, [0x5a; 16], vec![0x5a; len]);
        }
    }
    // A stranger gets no answer, not even with an address that is none.
    liar.say(wire::HELLO, [0; 16], Hello { token: [0; 16], address: vec![1, 2, 3], ..liar.hello(1) }.encode());
    assert_eq!(liar.listen(Duration::from_millis(50)), Vec::new());
    // Who looks for another endpoint is told.
    liar.say(wire::HELLO, [0; 16], Hello { to: EndpointId::new([1; 16]), ..liar.hello(2) }.encode());
    let (header, body) = liar.hear();
    assert_eq!((header.kind, header.to), (wire::REFUSE, ear(2)));
    assert!(String::from_utf8(body).unwrap().contains("fetch its blob anew"));
    // The same connection twice.
    liar.enter(3);
    liar.say(wire::HELLO, [0; 16], liar.hello(3).encode());
    assert_eq!(liar.hear().0, Header { kind: wire::REFUSE, to: ear(3) });
    // A guest that breaks the protocol is thrown out: it gets no answers any more.
    for (conn, nonsense) in
        [(4, vec![9; 40]), (5, Message::Answer { op: 1, answer: kvferry_transport::access::Answer::Granted }.encode())]
    {
        let guest = liar.enter(conn);
        liar.say(wire::ASK, guest, nonsense);
        liar.say(wire::ASK, guest, begin(1, 0, 0));
        assert_eq!(liar.listen(Duration::from_millis(50)), Vec::new());
    }
    // And nobody heard of any of this.
    t.step(Duration::from_secs(1));
    assert_eq!(t.next_event(), None);
    let mut honest = UcxTransport::new(UcxConfig::with_rails(1)).unwrap();
    honest.register(Region::zeroed(4096).unwrap()).unwrap();
    let peer = honest.connect(&t.blob()).unwrap();
    let batch = reversed(4096, 64, 0, true).unwrap();
    let op = honest.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();
    let start = Instant::now();
    loop {
        honest.step(start.elapsed());
        let done = |e| matches!(e, Event::Completed { op: id, outcome, .. } if id == op && outcome.done().is_some());
        if std::iter::from_fn(|| honest.next_event()).any(done) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(10));
        honest.wait(Some(Duration::from_millis(1)));
    }
}

#[test]
fn what_a_guest_has_open_ends_with_it_and_its_last_words_are_awaited() {
    let mut t = UcxTransport::new(UcxConfig::with_rails(1)).unwrap();
    let memory = Region::zeroed(4096).unwrap();
    let id = t.register(memory.clone()).unwrap();
    let liar = Liar::new(&t);
    let guest = liar.enter(1);
    liar.say(wire::ASK, guest, begin(1, 0, 0));
    liar.say(wire::ASK, guest, begin(2, 0, 0));
    for _ in 0..2 {
        assert_eq!(liar.hear().0, Header { kind: wire::ANSWER, to: ear(1) });
    }
    assert_eq!(t.shared_for_tests().books().open(), 2);
    t.deregister(id).unwrap();
    // It leaves before its last notification has come, as messages may overtake each other.
    let end = |op, notify| Message::End { op, notify }.encode();
    liar.say(wire::LEAVE, guest, 2u64.to_le_bytes().to_vec());
    liar.say(wire::ASK, guest, end(1, None));
    liar.say(wire::ASK, guest, end(2, Some(&b"last"[..])));
    // The second time it isn't a guest any more.
    liar.say(wire::ASK, guest, end(2, Some(&b"last"[..])));
    assert!(t.wait(Some(Duration::from_secs(10))));
    t.step(Duration::ZERO);
    assert_eq!(t.next_event(), Some(Event::Notification { from: LIAR, payload: b"last".to_vec() }));
    liar.listen(Duration::from_millis(20));
    t.step(Duration::ZERO);
    assert_eq!((t.next_event(), t.shared_for_tests().books().open()), (None, 0));
    // One that leaves with something open, in disorder.
    let guest = liar.enter(2);
    t.register(memory.clone()).unwrap();
    liar.say(wire::ASK, guest, begin(3, 1, 0));
    assert_eq!(liar.hear().0, Header { kind: wire::ANSWER, to: ear(2) });
    liar.say(wire::LEAVE, guest, 1u64.to_le_bytes().to_vec());
    liar.say(wire::ASK, guest, end(3, None));
    let start = Instant::now();
    while t.shared_for_tests().books().open() > 0 {
        liar.listen(Duration::from_millis(1));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn a_peer_that_answers_nonsense_or_nothing_is_lost() {
    let mut config = UcxConfig::with_rails(1);
    config.connect_within = Duration::from_millis(200);
    let mut t = UcxTransport::new(config).unwrap();
    let liar = Liar::new(&t);
    // The liar's blob: its worker's address, and no regions.
    let process = Process::default();
    let rails = vec![crate::part::RailPart { address: liar.worker.address().unwrap(), keys: Vec::new() }];
    let lane = Part { token: [1; 16], process, rails, regions: Vec::new() }.encode();
    let blob = Blob { backend: "ucx".to_owned(), endpoint: LIAR, generation: 0, regions: Vec::new(), lane }.encode();
    let mut lost = |says: &[(u8, &[u8])]| {
        let peer = t.connect(&blob).unwrap();
        let start = Instant::now();
        let mut ways = Vec::new();
        let cause = loop {
            for (_, body) in
                liar.listen(Duration::from_millis(2)).iter().filter(|(header, _)| header.kind == wire::HELLO)
            {
                let hello = Hello::decode(body).unwrap();
                let way = liar.worker.connect(&hello.address).unwrap();
                for (kind, body) in says {
                    way.send(Header { kind: *kind, to: hello.ear }, body.to_vec()).unwrap();
                }
                ways.push(way);
            }
            t.step(start.elapsed());
            match t.next_event() {
                Some(Event::PeerLost { peer: id, cause }) if id == peer => break cause,
                Some(Event::Connected { .. }) | None => assert!(start.elapsed() < Duration::from_secs(10)),
                Some(other) => panic!("{other:?}"),
            }
        };
        t.disconnect(peer).unwrap();
        let mut closing: Vec<_> = ways.into_iter().map(|way| way.close(true)).collect();
        while !closing.iter_mut().all(crate::sys::Closing::done) {
            liar.worker.progress();
        }
        cause
    };
    let silent = |cause: &LostCause| matches!(cause, LostCause::Lane(why) if why.contains("not answered"));
    let cause = lost(&[]);
    assert!(silent(&cause), "{cause}");
    // None of these is an answer to a connection.
    let cause = lost(&[(wire::WELCOME, &[1; 8]), (wire::HELLO, &[2; 100]), (wire::ASK, &[3; 20]), (99, b"")]);
    assert!(silent(&cause), "{cause}");
    let welcome = (wire::WELCOME, &[0u8; 16][..]);
    let long = vec![b'x'; 100_000];
    let cause = lost(&[(wire::REFUSE, &long)]);
    assert!(matches!(&cause, LostCause::Refused(why) if why.len() == 500), "{cause}");
    for nonsense in [&[5u8; 30][..], b"", &begin(1, 0, 0)] {
        let cause = lost(&[welcome, (wire::ANSWER, nonsense)]);
        assert!(matches!(cause, LostCause::Protocol(_)), "{cause}");
    }
    // An answer to a question that wasn't asked is nothing.
    let granted = Message::Answer { op: 77, answer: kvferry_transport::access::Answer::Granted }.encode();
    let told = Told { op: 77, told: true }.encode();
    let nothing = [welcome, (wire::ANSWER, &granted), (wire::TOLD, &told), (wire::TOLD, b"x"), (wire::GOING, b"")];
    assert_eq!(lost(&nothing), LostCause::Gone);
}

#[test]
fn notifications_that_nobody_takes_are_bounded_and_none_is_lost() {
    const COUNT: u64 = 400;
    let mut t = UcxTransport::new(UcxConfig::with_rails(1)).unwrap();
    t.register(Region::zeroed(4096).unwrap()).unwrap();
    let liar = Liar::new(&t);
    let guest = liar.enter(1);
    let notice = vec![7; 60 << 10];
    for op in 0..COUNT {
        liar.say(wire::ASK, guest, begin(op, 0, 0));
        liar.say(wire::ASK, guest, Message::End { op, notify: Some(&notice) }.encode());
    }
    liar.listen(Duration::from_millis(300));
    let waiting = t.shared_for_tests().notice_bytes();
    assert!(waiting < 20 << 20, "{waiting} bytes wait");
    let (mut heard, start) = (0, Instant::now());
    while heard < COUNT {
        liar.listen(Duration::from_millis(1));
        t.step(start.elapsed());
        let told = |e: &Event| matches!(e, Event::Notification { payload, .. } if *payload == notice);
        heard += std::iter::from_fn(|| t.next_event()).filter(told).count() as u64;
        assert!(start.elapsed() < Duration::from_secs(20), "{heard} of {COUNT}");
    }
    // One that is too long is none, and who says it is not spoken to any more.
    liar.say(wire::ASK, guest, begin(COUNT, 0, 0));
    let long = vec![7; crate::transport::MAX_NOTIFY + 1];
    liar.say(wire::ASK, guest, Message::End { op: COUNT, notify: Some(&long) }.encode());
    liar.listen(Duration::from_millis(50));
    liar.say(wire::ASK, guest, begin(COUNT + 1, 0, 0));
    assert!(liar.listen(Duration::from_millis(50)).is_empty());
    t.step(start.elapsed());
    // Its process is none that could be watched, and it has no lane any more: so it holds nothing.
    assert_eq!((t.next_event(), t.shared_for_tests().books().open()), (None, 0));
}
