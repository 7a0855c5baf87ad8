//! Fuzz targets as plain functions: bytes in, a panic where a promise is broken.
//!
//! | target | what the bytes are | what must hold |
//! |---|---|---|
//! | [`config`] | a `config.json` | what is accepted makes items, and the items an engine |
//! | [`describe`] | an engine's TOML | what is accepted makes a manifest or is refused with reasons |
//! | [`layout`] | choices that write a spec, placements and views, some of them overwritten by extreme numbers | views of an accepted manifest lie in their regions and apart, and its ranks hold everything |
//! | [`params`] | a router's parameters, a reference, an address | what is read is written, and read as the same |
//! | [`request`] | two such engines and a request | batches lie in the regions, write no byte twice, and staged moves the same bytes as direct |
//! | [`scenario`] | a simulation's or a cluster's TOML | what is accepted has its GPUs, ranks, links and requests |
//! | [`secure`] | what strangers say to an end with a shared key, a key's text, changes to what two ends say | nobody without the key is believed; what arrives is what was said |
//! | [`settings`] | an engine's configuration | what is accepted has no contradiction, what is not has a fault |
//! | [`trace`] | recorded requests | what is accepted is in order and in range |
//! | [`wire`] | frames of each link | what is read is written again as the same bytes |
//!
//! Every target also promises to end soon and to need little memory ([`Target::memory`]), whatever its input says; who runs it
//! watches that by an allocator that counts. The same functions serve both, so that what was found once is
//! looked at in every run of the tests.
//!
//! Not here: the corpus (`tests/data/fuzz`), and what libFuzzer needs (`fuzz/`).
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a broken promise is a panic here")]

pub mod config;
pub mod describe;
mod engine;
pub mod layout;
pub mod mutate;
pub mod params;
mod promise;
mod reader;
pub mod request;
pub mod scenario;
pub mod secure;
pub mod settings;
pub mod trace;
pub mod wire;

use std::collections::BTreeSet;
use std::fmt::{Debug, Display};

pub use reader::Reader;

/// What an input reached, by name: the faults it met, and how far it came. Tells a corpus that covers much from one that doesn't.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reached(BTreeSet<String>);

impl Reached {
    /// Notes a place.
    pub fn at(&mut self, place: &str) {
        self.0.insert(place.into());
    }

    /// Notes a fault by the name of its variant, and looks at its message.
    ///
    /// # Panics
    /// If the message is empty or longer than anybody reads.
    pub fn fault(&mut self, fault: &(impl Debug + Display)) {
        let name: String = format!("{fault:?}").chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let message = fault.to_string();
        assert!(!message.trim().is_empty(), "{name}: a fault without a message");
        assert!(message.len() <= MAX_MESSAGE, "{name}: a message of {} bytes", message.len());
        self.0.insert(name);
    }

    /// The places.
    #[must_use]
    pub fn places(&self) -> &BTreeSet<String> {
        &self.0
    }
}

/// Prints what an input was read as where `KVFERRY_FUZZ_SHOW` is set, for those who look at one.
#[allow(clippy::print_stderr, reason = "it is asked for")]
fn show(what: &str, value: &impl Debug) {
    if std::env::var_os("KVFERRY_FUZZ_SHOW").is_some() {
        eprintln!("{what}: {value:#?}");
    }
}

/// The longest message of one fault, in bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// A target by its name, which is also that of its corpus.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Runs one input; panics where a promise is broken.
    pub run: fn(&[u8]) -> Reached,
    /// Whether its inputs are text.
    pub is_text: bool,
    /// The most bytes that one input may need at a time, [`LONGEST`] bytes long at most.
    pub memory: usize,
    /// Where more is done with what was read than to read it: only reads it, which may need [`DECODER`] bytes at most.
    pub read: Option<fn(&[u8])>,
}

/// The longest input, in bytes, for which a target's [`memory`](Target::memory) is promised.
pub const LONGEST: usize = 4096;

/// What the decoder of an input from a peer, a router or a file of ours may need.
pub const DECODER: usize = 1 << 20;
/// Where an engine is described, described again, planned and compared besides: the list that proves a layout free from overlap is
/// the largest piece.
const WHOLE: usize = 256 << 20;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "config", run: config::run, is_text: true, memory: WHOLE, read: None },
    Target { name: "describe", run: describe::run, is_text: true, memory: WHOLE, read: None },
    Target { name: "layout", run: layout::run, is_text: false, memory: WHOLE, read: None },
    Target { name: "params", run: params::run, is_text: true, memory: DECODER, read: None },
    Target { name: "request", run: request::run, is_text: false, memory: WHOLE, read: None },
    Target { name: "scenario", run: scenario::run, is_text: true, memory: WHOLE, read: None },
    Target { name: "secure", run: secure::run, is_text: false, memory: DECODER, read: None },
    Target { name: "settings", run: settings::run, is_text: true, memory: DECODER, read: None },
    Target { name: "trace", run: trace::run, is_text: true, memory: DECODER, read: None },
    Target { name: "wire", run: wire::run, is_text: false, memory: WHOLE, read: Some(wire::read) },
];

impl Target {
    /// Runs one input under an allocator that counts: `peak` gives what comes of a call, and the most bytes that it had in use.
    ///
    /// # Panics
    /// Where a promise is broken.
    pub fn bounded(&self, data: &[u8], peak: impl Fn(&dyn Fn() -> Reached) -> (Reached, i64)) -> Reached {
        let within = |bytes: i64, most: usize| {
            let kept = data.len() > LONGEST || usize::try_from(bytes).unwrap_or(0) <= most;
            assert!(kept, "{}: an input of {} bytes needs {bytes}, more than {most}", self.name, data.len());
        };
        if let Some(read) = self.read {
            let only = || {
                read(data);
                Reached::default()
            };
            within(peak(&only).1, DECODER);
        }
        let (reached, bytes) = peak(&|| (self.run)(data));
        within(bytes, self.memory);
        reached
    }
}

/// Runs one input of the target of this name, as [`Target::bounded`].
///
/// # Panics
/// Where a promise is broken, or there is no such target.
pub fn bounded(name: &str, data: &[u8], peak: impl Fn(&dyn Fn() -> Reached) -> (Reached, i64)) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    drop(target.bounded(data, peak));
}
