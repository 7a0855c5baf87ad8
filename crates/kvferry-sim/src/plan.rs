//! What the engines of a world want of each other, drawn before it begins.

use std::time::Duration;

use crate::faults::{FaultKind, FaultPlan};
use crate::mask::Mask;
use crate::rng::{Rng, ms, us};

/// One request, from a prompt to what becomes of its cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestPlan {
    /// When its prompt arrives at the producer.
    pub at: Duration,
    /// The engine that computes it, counted in the world.
    pub producer: u32,
    /// The engine that reads it.
    pub consumer: u32,
    /// Length of the prompt.
    pub tokens: u64,
    /// Tokens that the consumer has already.
    pub cached: u64,
    /// How long the prefill takes.
    pub prefill: Duration,
    /// How long the consumer keeps what it has read.
    pub decode: Duration,
    /// Tokens that the consumer adds and gives back to the producer; `None`: it gives nothing back.
    pub back: Option<u64>,
    /// Whether all bytes are compared.
    pub full: bool,
    /// How often its reads may be tried.
    pub attempts: u32,
    /// How long its reads may take.
    pub deadline: Duration,
    /// How long the offer lasts; `None`: as the owner says.
    pub ttl: Option<Duration>,
    /// Its priority.
    pub priority: u8,
    /// Whether the producer writes; with whether the consumer is told how far that is.
    pub push: Option<bool>,
    /// How its offer is made while it is still computed, if it is.
    pub stream: Option<StreamPlan>,
    /// Whether the consumer wants to go on from the first hole where it fails.
    pub recompute: bool,
    /// Another engine that has computed the same.
    pub replica: Option<u32>,
    /// How long each phase may take: link, bind, transfer, release.
    pub within: [Option<Duration>; 4],
    /// Whether it is made anew, from the prefill on, where it fails.
    pub again: bool,
    /// What goes wrong with it, and how long after the offer.
    pub wrong: Vec<(FaultKind, Duration)>,
}

/// A prefill that is told of while it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamPlan {
    /// Into how many chunks the prompt is cut.
    pub chunks: u32,
    /// Whether the layers of a chunk are told of one after the other.
    pub layers: bool,
    /// Whether blocks are listed only when they are needed.
    pub late: bool,
    /// Steps after which it begins anew, once.
    pub restart: Option<u32>,
    /// How long a step takes at most.
    pub step: Duration,
}

impl StreamPlan {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            chunks: rng.small(1, 4),
            layers: rng.chance(5000),
            late: rng.chance(5000),
            restart: rng.chance(3000).then(|| rng.small(0, 5)),
            step: rng.time(us(100), ms(30)),
        }
    }
}

impl RequestPlan {
    /// The request of this number in a world of so many engines.
    #[must_use]
    pub fn draw(seed: u64, number: u32, (engines, longest, span): (u32, u64, Duration), faults: &FaultPlan) -> Self {
        let mut rng = Rng::of(&[seed, 0x4e, u64::from(number)]);
        let producer = rng.small(0, engines.saturating_sub(1));
        let apart = rng.small(1, engines.saturating_sub(1).max(1));
        let tokens = rng.between(1, longest);
        let cached = match rng.below(10) {
            0 => tokens,
            1..=3 => rng.below(tokens),
            _ => 0,
        };
        let at = rng.time(Duration::ZERO, span);
        let (prefill, decode) = (rng.time(ms(1), ms(80)), rng.time(ms(1), ms(400)));
        let back = rng.chance(1500).then(|| rng.below(5));
        let mut plan = Self {
            at,
            producer,
            consumer: (producer + apart) % engines.max(1),
            tokens,
            cached,
            prefill,
            decode,
            back,
            full: rng.chance(3000),
            attempts: rng.small(1, 3),
            deadline: rng.time(ms(1000), ms(8000)),
            ttl: rng.chance(5000).then(|| rng.time(ms(300), ms(6000))),
            priority: u8::try_from(rng.below(4) * 60).unwrap_or(0),
            push: None,
            stream: None,
            recompute: false,
            replica: None,
            within: [None; 4],
            again: rng.chance(4000),
            wrong: Vec::new(),
        };
        let mut rng = Rng::of(&[seed, 0x4f, u64::from(number)]);
        plan.push = rng.chance(6000).then(|| rng.chance(5000));
        let streamed = rng.chance(if plan.push.is_some() { 6000 } else { 1500 });
        plan.stream = streamed.then(|| StreamPlan::draw(&mut rng));
        if rng.chance(2000) {
            plan.within = [(); 4].map(|()| rng.chance(4000).then(|| rng.time(ms(100), ms(3000))));
        }
        plan.recompute = rng.chance(4000);
        let other = rng.small(0, engines.saturating_sub(1));
        let replica = rng.chance(2000) && plan.stream.is_none() && other != plan.producer && other != plan.consumer;
        plan.replica = replica.then_some(other);
        let mut rng = Rng::of(&[seed, 0x50, u64::from(number)]);
        for &(kind, _) in FaultKind::OF_REQUESTS {
            let late = matches!(kind, FaultKind::Withdraw | FaultKind::Cancel);
            let after = rng.time(ms(0), ms(if late { 300 } else { 60 }));
            let strikes = rng.below(10_000);
            if strikes < u64::from(faults.rates.get(&kind).copied().unwrap_or(0)) {
                plan.wrong.push((kind, after));
            }
        }
        plan
    }

    /// Whether this goes wrong with it, and how long after the offer.
    #[must_use]
    pub fn goes_wrong(&self, kind: FaultKind, mask: &Mask) -> Option<Duration> {
        self.wrong.iter().find(|(k, _)| *k == kind && mask.has(kind)).map(|(_, after)| *after)
    }
}
