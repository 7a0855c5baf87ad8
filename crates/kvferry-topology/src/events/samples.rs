//! How much links have carried by when: at most so many looks, ever farther apart.

use std::time::Duration;

use kvferry_sim::world::World;

use super::{Deployment, Event};
use crate::answer::SLICES;
use crate::cluster::Cluster;
use crate::number::{nearest, short};

/// The most looks that are kept: then every other one is forgotten, and the next are twice as far apart.
const MOST: usize = 4 * SLICES;

/// The looks.
#[derive(Debug)]
pub(super) struct Samples {
    every: Duration,
    /// When, in seconds since the load began, and what each link had carried.
    looks: Vec<(f64, Vec<f64>)>,
}

impl Samples {
    pub(super) fn new(span: Duration) -> Self {
        let every = span / u32::try_from(2 * SLICES).unwrap_or(1);
        Self { every: every.max(Duration::from_micros(100)), looks: Vec::new() }
    }

    /// Of each link: what it has carried in all, and the share of its capacity in each slice of the span.
    pub(super) fn links(&self, cluster: &Cluster, carried: &[f64], span: f64) -> Vec<(u64, Vec<f32>)> {
        // What was carried by a time, between two looks in proportion.
        let by = |link: usize, time: f64| -> f64 {
            let after = self.looks.partition_point(|look| look.0 <= time);
            let look = |at: usize| self.looks.get(at).map(|(t, c)| (*t, c.get(link).copied().unwrap_or(0.0)));
            let all = carried.get(link).copied().unwrap_or(0.0);
            let (t0, c0) = after.checked_sub(1).and_then(look).unwrap_or((0.0, 0.0));
            let (t1, c1) = look(after).unwrap_or((span.max(t0), all));
            if t1 > t0 { c0 + (c1 - c0) * ((time - t0) / (t1 - t0)).clamp(0.0, 1.0) } else { c1 }
        };
        let width = span / SLICES as f64;
        let mut out = Vec::with_capacity(carried.len());
        for (link, (described, all)) in cluster.links().iter().zip(carried).enumerate() {
            let over_time = if *all > 0.0 && width > 0.0 {
                let ends = (0..=SLICES).map(|slice| by(link, width * slice as f64)).collect::<Vec<_>>();
                let share = |pair: &[f64]| match pair {
                    [a, b] => short((b - a) / (width * described.capacity())),
                    _ => 0.0,
                };
                ends.windows(2).map(share).collect()
            } else {
                Vec::new()
            };
            out.push((nearest(*all), over_time));
        }
        out
    }
}

/// Looks at all links, and says when next.
pub(super) fn sample(world: &mut World<Deployment>) {
    let (at, carried) = (super::seconds(world), world.fabric().carried());
    let samples = &mut world.script.samples;
    samples.looks.push((at, carried));
    if samples.looks.len() >= MOST {
        let mut keep = false;
        samples.looks.retain(|_| {
            keep = !keep;
            keep
        });
        samples.every *= 2;
    }
    let every = samples.every;
    if world.script.open > 0 {
        world.later(every, Event::Sample);
    }
}
