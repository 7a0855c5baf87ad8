//! ID cases: names of engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;

use kvferry_proto::handshake::{Greeting, HelloMismatch};
use kvferry_tests::by_hand::{Engine, kv, owner};

#[test]
fn id_06_an_engine_that_meets_its_own_name_refuses() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    // Data-parallel siblings are engines of their own and need names of their own.
    let (_, hello) = Greeting::start(Arc::new(owner("e", 1, &cache)), None);
    let (greeting, _) = Greeting::start(Arc::new(owner("e", 2, &cache)), None);
    let refused = greeting.on_hello(&hello).expect_err("one name for two").0;
    assert!(matches!(refused.as_slice(), [HelloMismatch::OwnEngine { got }] if got.as_str() == "e"), "{refused:?}");
    let (_, hello) = Greeting::start(Arc::new(owner("e-dp1", 1, &cache)), None);
    let (greeting, _) = Greeting::start(Arc::new(owner("e-dp0", 2, &cache)), None);
    assert!(greeting.on_hello(&hello).is_ok());
}
