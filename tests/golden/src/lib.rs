//! Recorded transfers of another connector, held against kvferry's plans.
//!
//! A record has two engines as they registered their caches, block lists of requests, and what the connector made of them:
//! descriptor lists with indices, or a refusal. This crate rebuilds both engines as manifests ([`engine`]), the request from
//! the lists ([`blocks`]), plans it ([`ours`]), expands what was recorded ([`vllm`]), and compares the two *byte
//! relations* by content ([`relation`], [`same`]): which producer bytes land on which consumer bytes, up to the choice
//! among replicas. [`judge`] says what must come of each scenario; where there is nothing to compare with, the oracle
//! proves our plan.
//!
//! It is a test: it holds no record to be right. Every accepted scenario is also held against what the consumer needs by
//! its own layout, so that an agreement in error is found too. It opens files that it is given and nothing else, keeps
//! few records in memory, and turns everything that a record can say wrongly into an error.
//!
//! ```no_run
//! use kvferry_golden::run::run;
//! run("tests/data/golden".as_ref(), 2, &mut |judged| println!("{} {:?}", judged.name, judged.outcome))?;
//! # Ok::<(), kvferry_golden::read::ReadError>(())
//! ```
#![forbid(unsafe_code)]

pub mod blocks;
pub mod contents;
pub mod engine;
pub mod judge;
pub mod known;
pub mod model;
pub mod ours;
pub mod pair;
pub mod read;
pub mod relation;
pub mod run;
pub mod same;
pub mod schema;
pub mod synth;
pub mod vllm;
