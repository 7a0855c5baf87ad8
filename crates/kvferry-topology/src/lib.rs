//! What a deployment would do before it is deployed: from the planner that moves the bytes, for a model, two kinds of engines, a
//! cluster and a load.
//!
//! | module | what it is |
//! |---|---|
//! | [`cluster`] | machines, their cards, and the links between them |
//! | [`load`] | when requests arrive, how long they are, and what is cached already |
//! | [`blocks`] | which blocks a request gets |
//! | [`answer`] | what comes out, whichever engine made it |
//! | [`report`] | that as tables of text, and as a page |
//!
//! It moves no byte and knows no clock but the simulated one.
#![forbid(unsafe_code)]

pub mod analytic;
pub mod answer;
pub mod blocks;
pub mod cluster;
pub mod events;
mod lives;
pub mod load;
mod number;
pub mod report;
pub mod run;
pub mod scenario;
pub mod sweep;
pub mod traffic;
mod warn;
