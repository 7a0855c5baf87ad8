//! A connection against its other end.

use kvferry_proto::wire::encode_peer;
use tokio::io::AsyncReadExt;

use super::*;
use crate::driver::inbox::{Inbox, inbox};

const SOON: Duration = Duration::from_secs(5);
const LINK: LinkId = LinkId(7);

/// A connection, what it hears, and its other end.
fn connection() -> (Connection, Inbox<News>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (tell, heard) = inbox();
    let connection =
        Connection::start(Stream::Unix(ours), LINK, tell, Arc::new(Common::new(&ConnectionLimits::default())));
    (connection, heard, theirs)
}

async fn next(heard: &Inbox<News>) -> Vec<News> {
    tokio::time::timeout(SOON, heard.filled()).await.unwrap();
    let mut news = Vec::new();
    heard.take(&mut news);
    news
}

fn said(news: &[News]) -> Vec<usize> {
    let count = |n: &News| match n {
        News::PeerSaid(LINK, messages) => messages.len(),
        _ => panic!("it said something else"),
    };
    news.iter().map(count).collect()
}

fn refused() -> Vec<u8> {
    encode_peer(&PeerMessage::Refused(vec!["no".into()])).unwrap()
}

#[tokio::test]
async fn what_comes_in_one_read_is_one_piece_of_news() {
    let (connection, heard, mut theirs) = connection();
    theirs.write_all(&refused().repeat(100)).await.unwrap();
    assert_eq!(said(&next(&heard).await), [100]);
    connection.credit();
    // A frame in two pieces is one message.
    let frame = refused();
    theirs.write_all(&frame[..5]).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), heard.filled()).await.is_err());
    theirs.write_all(&frame[5..]).await.unwrap();
    assert_eq!(said(&next(&heard).await), [1]);
}

#[tokio::test]
async fn a_reader_without_credit_holds_back() {
    let (connection, heard, mut theirs) = connection();
    for _ in 0..CREDITS {
        theirs.write_all(&refused()).await.unwrap();
        assert_eq!(said(&next(&heard).await), [1]);
    }
    theirs.write_all(&refused()).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(100), heard.filled()).await.is_err());
    connection.credit();
    assert_eq!(said(&next(&heard).await), [1]);
}

/// Slowloris: a byte now and then is no frame.
#[tokio::test(start_paused = true)]
async fn hs_06_a_frame_that_does_not_end_ends_the_connection() {
    let (_connection, heard, mut theirs) = connection();
    let frame = refused();
    let begun = tokio::time::Instant::now();
    let drip = tokio::spawn(async move {
        for byte in frame.chunks(1) {
            tokio::time::sleep(Duration::from_secs(8)).await;
            if theirs.write_all(byte).await.is_err() {
                return;
            }
        }
    });
    heard.filled().await;
    let mut news = Vec::new();
    heard.take(&mut news);
    assert!(matches!(&news[..], [News::PeerClosed(LINK, reason)] if reason.contains("not complete")));
    assert!(begun.elapsed() < FRAME + Duration::from_secs(10), "{:?}", begun.elapsed());
    drip.abort();
}

/// However many long messages strangers send, those of peers and ranks don't wait for them.
#[tokio::test]
async fn strangers_do_not_delay_long_messages_of_others() {
    let common = Arc::new(Common::new(&ConnectionLimits::default()));
    let _busy = common.long_of_strangers.acquire_many(2).await.unwrap();
    // Nonsense, which is known only once it is decoded.
    let long = || [&40_000u32.to_le_bytes()[..], &refused()[4..6], &[255; 40_000]].concat();
    let link = |trusted: bool| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (tell, heard) = inbox();
        let connection = Connection::start(Stream::Unix(ours), LINK, tell, common.clone());
        if trusted {
            connection.trust();
        }
        (connection, heard, theirs)
    };
    let (_stranger, of_stranger, mut theirs) = link(false);
    theirs.write_all(&long()).await.unwrap();
    let (_peer, of_peer, mut peers) = link(true);
    peers.write_all(&long()).await.unwrap();
    assert!(matches!(next(&of_peer).await[..], [News::PeerNonsense(..)]));
    let _busy = common.long_of_peers.acquire_many(2).await.unwrap();
    let (ours, mut rank) = UnixStream::pair().unwrap();
    let (tell, of_rank) = inbox();
    let _rank = Connection::start(Stream::Unix(ours), RankLinkId(7), tell, common.clone());
    rank.write_all(&long()).await.unwrap();
    assert!(matches!(next(&of_rank).await[..], [News::RankClosed(..)]));
    assert!(tokio::time::timeout(Duration::from_millis(50), of_stranger.filled()).await.is_err(), "it waits");
}

/// What a stranger's long hello claims is told before it is read, and before nothing else.
#[tokio::test]
async fn a_claim_is_told_before_its_hello_is_read() {
    let short = include_bytes!("../../../../tests/data/wire/v2/00.frame");
    let hello = [&40_000u32.to_le_bytes()[..], &short[4..], &vec![0; 40_006 - short.len()]].concat();
    for (said, claimed) in [(hello.clone(), true), ([&refused()[..], &hello].concat(), false)] {
        let (_connection, heard, mut theirs) = connection();
        theirs.write_all(&said).await.unwrap();
        let mut news = Vec::new();
        while !matches!(news.last(), Some(News::PeerNonsense(..))) {
            news.extend(next(&heard).await);
        }
        match &news[..] {
            [News::PeerClaims(LINK, claim), News::PeerNonsense(..)] => assert!(claimed && claim.versions.max == 2),
            [News::PeerSaid(LINK, said), News::PeerNonsense(..)] => assert!(!claimed && said.len() == 1),
            other => panic!("{other:?}"),
        }
    }
    // Of a peer that is known it is not news.
    let (connection, heard, mut theirs) = connection();
    connection.trust();
    theirs.write_all(&hello).await.unwrap();
    assert!(matches!(&next(&heard).await[..], [News::PeerNonsense(..)]));
}

/// A link whose message takes long to decode.
#[derive(Clone, Copy)]
struct Slow;

impl Voice for Slow {
    type Message = ();
    const TRUSTED: bool = false;
    fn decode(_: &Frame) -> Result<(), String> {
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }
    fn said(self, _: Vec<()>) -> News {
        News::Drained
    }
    fn nonsense(self, reason: String) -> News {
        News::PeerNonsense(LINK, reason)
    }
    fn closed(self, reason: String) -> News {
        News::PeerClosed(LINK, reason)
    }
}

/// However many connect, send something long and are sent away: no more is decoded at a time.
#[tokio::test]
async fn what_is_decoded_counts_after_its_connection() {
    let common = Arc::new(Common::new(&ConnectionLimits::default()));
    let free = || common.long_of_strangers.available_permits();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (tell, _heard) = inbox();
    let connection = Connection::start(Stream::Unix(ours), Slow, tell, common.clone());
    theirs.write_all(&[&40_000u32.to_le_bytes()[..], &[9, 0], &[0; 40_000]].concat()).await.unwrap();
    while free() == LONG_MESSAGES {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(connection);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(free(), LONG_MESSAGES - 1, "it is still being decoded");
    while free() < LONG_MESSAGES {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn what_waits_is_written_in_one_piece() {
    let (mut connection, _heard, mut theirs) = connection();
    for i in 0..100u8 {
        assert!(connection.send(vec![i; 10]));
    }
    assert_eq!(connection.waiting(), 1000);
    let mut got = [0; 2000];
    let early = tokio::time::timeout(Duration::from_millis(50), theirs.read(&mut got)).await;
    assert!(early.is_err(), "nothing is written before a flush");
    connection.flush();
    assert_eq!(theirs.read(&mut got).await.unwrap(), 1000);
}

/// However much waits, nothing is refused or lost; the count tells, and so does the news when it is written.
#[tokio::test]
async fn what_waits_is_counted_and_written_to_the_end() {
    let (mut connection, heard, mut theirs) = connection();
    let (frames, len) = (3000, 16 << 10);
    for _ in 0..frames {
        assert!(connection.send(vec![7; len]));
        connection.flush();
    }
    tokio::task::yield_now().await;
    assert!(connection.waiting() > FULL, "nobody has read");
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.map(|_| all.len())
    });
    assert!(matches!(next(&heard).await[..], [News::Drained]));
    assert!(connection.waiting() <= DRAINED);
    tokio::time::timeout(SOON, connection.close()).await.unwrap().unwrap();
    assert_eq!(reader.await.unwrap().unwrap(), frames * len);
}
