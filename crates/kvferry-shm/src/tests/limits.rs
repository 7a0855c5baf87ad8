//! Limits and checks that a setting or another user brings, and what is remembered of a refusal.

use super::*;

fn plain_pair(of_p: Config, of_d: Config, regions: usize) -> (ShmTransport, ShmTransport) {
    let mut p = ShmTransport::new(of_p).unwrap();
    let mut d = ShmTransport::new(of_d).unwrap();
    for _ in 0..regions {
        p.register(mapped()).unwrap();
    }
    d.register(mapped()).unwrap();
    (d, p)
}

fn connected(d: &mut ShmTransport, p: &mut ShmTransport) -> kvferry_transport::PeerId {
    let peer = d.connect(&p.blob()).unwrap();
    hear(d, p, |e| (e == Event::Connected { peer }).then_some(()));
    peer
}

fn end(d: &mut ShmTransport, p: &mut ShmTransport, submission: Submission) -> Outcome {
    let op = d.submit(submission).unwrap();
    hear(d, p, |e| match e {
        Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
        _ => None,
    })
}

fn loss(d: &mut ShmTransport, p: &mut ShmTransport) -> LostCause {
    hear(d, p, |e| match e {
        Event::PeerLost { cause, .. } => Some(cause),
        Event::Connected { .. } => panic!("it was let in"),
        _ => None,
    })
}

#[test]
fn mappings_have_a_limit_and_stale_ones_make_room() {
    let (mut d, mut p) = plain_pair(Config::default(), Config { max_mappings: 1, ..Config::default() }, 2);
    let peer = connected(&mut d, &mut p);
    let read = |src| Submission { peer, kind: OpKind::Read, batch: whole(src, 2), notify: None };
    assert!(end(&mut d, &mut p, read(0)).done().is_some());
    for _ in 0..2 {
        let Outcome::Failed(error) = end(&mut d, &mut p, read(1)) else { panic!("mapped beyond the limit") };
        assert!(error.to_string().contains("max_mappings"), "{error}");
    }
    p.deregister(RegionId::new(0)).unwrap();
    let stale = TransferError::Stale { region: RegionId::new(0) };
    assert_eq!(end(&mut d, &mut p, read(0)), Outcome::Failed(stale));
    assert!(
        end(&mut d, &mut p, read(1)).done().is_some(),
        "the stale one is unmapped, and a failure is not remembered"
    );
}

#[test]
fn guests_have_a_limit() {
    let (mut d, mut p) = plain_pair(Config { max_guests: 1, ..Config::default() }, Config::default(), 1);
    let peer = connected(&mut d, &mut p);
    let mut other = ShmTransport::new(Config::default()).unwrap();
    other.connect(&p.blob()).unwrap();
    let cause = loss(&mut other, &mut p);
    assert!(matches!(&cause, LostCause::Refused(text) if text.contains("1 peers are connected")), "{cause}");
    d.disconnect(peer).unwrap();
    d.step(Duration::ZERO);
    p.step(Duration::ZERO);
    let mut third = ShmTransport::new(Config::default()).unwrap();
    connected(&mut third, &mut p);
}

#[test]
fn other_users_are_refused_on_both_sides_unless_they_are_let_in() {
    let (mut d, p) = plain_pair(Config::default(), Config::default(), 1);
    d.pretend_user(12_345);
    let error = d.connect(&p.blob()).unwrap_err().to_string();
    assert!(error.contains("we are 12345"), "{error}");
    let (mut d, mut other) = plain_pair(Config::default(), Config::default(), 1);
    other.pretend_user(12_345);
    d.connect(&other.blob()).unwrap();
    let cause = loss(&mut d, &mut other);
    assert!(matches!(&cause, LostCause::Refused(text) if text.contains("an endpoint of user 12345")), "{cause}");
    let open = || Config { other_users: true, ..Config::default() };
    let (mut d, mut p) = plain_pair(open(), open(), 1);
    d.pretend_user(12_345);
    p.pretend_user(12_346);
    connected(&mut d, &mut p);
}

#[test]
fn the_largest_settings_and_times_overflow_nothing() {
    let config = || Config { answer_within: Duration::MAX, max_guests: usize::MAX, ..Config::default() };
    let (mut d, mut p) = plain_pair(config(), config(), 1);
    d.connect(&p.blob()).unwrap();
    for now in [Duration::from_secs(1), Duration::from_secs(2), Duration::MAX, Duration::MAX] {
        d.step(now);
        p.step(now);
    }
    assert!(d.next_event().is_some_and(|e| matches!(e, Event::Connected { .. })));
}

#[test]
fn an_endpoint_connects_once_under_its_own_id() {
    let (mut d, mut p) = plain_pair(Config::default(), Config::default(), 1);
    let peer = connected(&mut d, &mut p);
    let blob = kvferry_transport::blob::Blob::decode(&p.blob()).unwrap();
    let hello = [&[1, 1, 0][..], &blob.endpoint.get(), &blob.lane[1..17], &d.endpoint().get()].concat();
    let board = crate::board::Board::new().unwrap();
    let greet = |p: &mut ShmTransport| {
        let socket = crate::sock::socket().unwrap();
        crate::sock::connect(&socket, &blob.lane[21..]).unwrap();
        crate::sock::send(&socket, &hello, &[], Some(board.fd())).unwrap();
        for _ in 0..4 {
            p.step(Duration::ZERO);
        }
        let mut buffer = [0; 256];
        match crate::sock::receive(&socket, &mut buffer) {
            Ok(crate::sock::Received::Frame(..)) => buffer[0],
            _ => 0,
        }
    };
    assert_eq!(greet(&mut p), 3, "refused while another has this id");
    d.disconnect(peer).unwrap();
    d.step(Duration::ZERO);
    assert_eq!(greet(&mut p), 2, "and welcome once it has left");
    // The endpoint itself may leave and come again at once.
    for _ in 0..20 {
        let peer = connected(&mut d, &mut p);
        d.disconnect(peer).unwrap();
    }
}

#[test]
fn a_notification_is_heard_though_its_sender_left_before_its_question_was_answered() {
    let (mut d, mut p) = plain_pair(Config::default(), Config::default(), 2);
    let peer = connected(&mut d, &mut p);
    let read = |src, notify: Option<&[u8]>| Submission {
        peer,
        kind: OpKind::Read,
        batch: whole(src, 2),
        notify: notify.map(<[u8]>::to_vec),
    };
    assert!(end(&mut d, &mut p, read(0, None)).done().is_some());
    // From here on `p` sleeps: a question, then a notification, then the end wait in its socket.
    d.submit(read(1, None)).unwrap();
    let op = d.submit(read(0, Some(b"release"))).unwrap();
    let start = Instant::now();
    loop {
        d.step(start.elapsed());
        if let Some(Event::Completed { op: id, outcome, .. }) = d.next_event() {
            assert!(id == op && outcome.done().is_some(), "{outcome:?}");
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    d.disconnect(peer).unwrap();
    d.step(start.elapsed());
    let heard: Vec<_> = (0..10)
        .flat_map(|_| {
            p.step(start.elapsed());
            std::iter::from_fn(|| p.next_event()).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(heard, [Event::Notification { from: d.endpoint(), payload: b"release".to_vec() }]);
}

#[test]
fn a_queued_event_ends_a_wait_and_a_signal_does_not() {
    let (mut d, mut p) = plain_pair(Config::default(), Config::default(), 1);
    let peer = connected(&mut d, &mut p);
    let op = d.submit(Submission { peer, kind: OpKind::Read, batch: whole(0, 1), notify: None }).unwrap();
    d.cancel(op).unwrap();
    let start = Instant::now();
    assert!(d.wait(Some(Duration::from_secs(20))) && start.elapsed() < Duration::from_secs(10));

    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing; no other test uses this signal.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    // SAFETY: names the calling thread.
    let sleeper = unsafe { libc::pthread_self() };
    let signals = std::thread::spawn(move || {
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(10));
            // SAFETY: the sleeper joins this thread before it ends.
            unsafe { libc::pthread_kill(sleeper, libc::SIGUSR1) };
        }
    });
    for _ in 0..10 {
        p.step(Duration::ZERO);
    }
    let start = Instant::now();
    assert!(!p.wait(Some(Duration::from_millis(100))));
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
    signals.join().unwrap();
}
