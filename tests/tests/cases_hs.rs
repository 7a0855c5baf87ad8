//! HS cases: what the handshake's machine can show without a socket.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;

use kvferry_proto::handshake::{Greeting, HelloMismatch, Versions};
use kvferry_proto::names::EngineId;
use kvferry_tests::by_hand::{Engine, kv, owner};

#[test]
fn hs_01_another_engine_than_expected_is_refused_with_both_ids() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    let (expected, got) = (EngineId::new("engine-a").expect("an id"), EngineId::new("engine-b").expect("an id"));
    let (_, hello) = Greeting::start(Arc::new(owner("engine-b", 1, &cache)), None);
    let local = Arc::new(owner("decode", 2, &cache));
    let (greeting, _) = Greeting::start(Arc::clone(&local), Some(expected.clone()));
    let refused = greeting.on_hello(&hello).expect_err("the wrong engine");
    assert_eq!(refused.0, [HelloMismatch::WrongEngine { expected, got: got.clone() }]);
    // Nothing of it is kept: the next link, to the same engine under its own name, is in order.
    let (greeting, _) = Greeting::start(local, Some(got));
    assert!(greeting.on_hello(&hello).is_ok());
}

#[test]
fn hs_11_every_mismatch_is_told_at_once_with_both_values() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    let (_, mut hello) = Greeting::start(Arc::new(owner("p", 1, &cache)), None);
    let theirs = Versions { min: 7, max: 9 };
    hello.versions = theirs;
    hello.identity = kvferry_proto::names::ModelIdentity::new("model@other").expect("an identity");
    let (greeting, _) = Greeting::start(Arc::new(owner("d", 2, &cache)), None);
    let refused = greeting.on_hello(&hello).expect_err("a version and a model apart").0;
    assert_eq!(refused[0], HelloMismatch::Version { ours: Versions::OURS, theirs });
    assert!(matches!(&refused[1], HelloMismatch::Identity { ours, theirs }
        if ours.as_str() == "model@revision" && theirs.as_str() == "model@other"));
    assert_eq!(refused.len(), 2);
}
