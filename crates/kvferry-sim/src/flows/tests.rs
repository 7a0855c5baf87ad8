#![allow(clippy::cast_possible_truncation, reason = "small numbers, and times of an hour or so")]

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Flow, FlowId, Flows};
use crate::rng::Rng;

const EVER: f64 = f64::INFINITY;

fn ns(n: u64) -> Duration {
    Duration::from_nanos(n)
}

fn sec(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn flow(size: f64, uses: &[(u32, f64)], cap: f64) -> Flow {
    Flow { size, uses: uses.to_vec(), cap }
}

/// Progressive filling of all flows, link by link, with nothing remembered.
fn filled(capacities: &[f64], flows: &BTreeMap<FlowId, Flow>) -> BTreeMap<FlowId, f64> {
    let mut rates = BTreeMap::new();
    while rates.len() < flows.len() {
        let open = |id: &FlowId| !rates.contains_key(id);
        let mut level = EVER;
        for (link, capacity) in capacities.iter().enumerate() {
            let weight = |f: &Flow| f.uses.iter().filter(|u| u.0 as usize == link).map(|u| u.1).sum::<f64>();
            let taken: f64 = flows.iter().filter_map(|(id, f)| Some(weight(f) * rates.get(id)?)).sum();
            let weights: f64 = flows.iter().filter(|(id, _)| open(id)).map(|(_, f)| weight(f)).sum();
            if weights > 0.0 {
                level = level.min((capacity - taken).max(0.0) / weights);
            }
        }
        let capped = flows.iter().filter(|(id, _)| open(id)).map(|(_, f)| f.cap).fold(EVER, f64::min);
        level = level.min(capped);
        let stops = |f: &Flow| {
            f.cap <= level * (1.0 + 1e-12)
                || f.uses.iter().any(|&(link, own)| {
                    let all: f64 = flows
                        .iter()
                        .map(|(id, f)| {
                            let weight: f64 = f.uses.iter().filter(|u| u.0 == link).map(|u| u.1).sum();
                            weight * rates.get(id).copied().unwrap_or(level)
                        })
                        .sum();
                    own > 0.0 && all >= capacities[link as usize] * (1.0 - 1e-12)
                })
        };
        let fixed: Vec<FlowId> = flows.iter().filter(|(id, f)| open(id) && stops(f)).map(|(id, _)| *id).collect();
        assert!(!fixed.is_empty(), "filling must go on: {level} {flows:?}");
        rates.extend(fixed.into_iter().map(|id| (id, level)));
    }
    rates
}

/// The same as [`Flows`], with everything done anew for all flows whenever anything happens.
struct Naive {
    now: u64,
    capacities: Vec<f64>,
    flows: BTreeMap<FlowId, Flow>,
    left: BTreeMap<FlowId, f64>,
    carried: Vec<f64>,
    ended: BTreeMap<FlowId, u64>,
}

impl Naive {
    fn run_to(&mut self, to: u64) {
        loop {
            let rates = filled(&self.capacities, &self.flows);
            let mut first = (to, None);
            for (id, left) in &self.left {
                let end = (left * 1e9 / rates[id]).ceil();
                let end = if *left <= 0.0 { self.now as f64 } else { self.now as f64 + end };
                // The first of those that end together.
                if end < first.0 as f64 || (end <= first.0 as f64 && first.1.is_none()) {
                    first = (end as u64, Some(*id));
                }
            }
            let seconds = (first.0 - self.now) as f64 / 1e9;
            let mut through = Vec::new();
            for (id, left) in &mut self.left {
                let ends = (*left * 1e9 / rates[id]).ceil() <= (first.0 - self.now) as f64 || *left <= 0.0;
                let moved = if ends { *left } else { rates[id] * seconds };
                *left -= moved;
                for (link, weight) in &self.flows[id].uses {
                    self.carried[*link as usize] += moved * weight;
                }
                if ends {
                    through.push(*id);
                }
            }
            self.now = first.0;
            for id in &through {
                self.ended.insert(*id, self.now);
                self.flows.remove(id);
                self.left.remove(id);
            }
            if through.is_empty() {
                return;
            }
        }
    }
}

/// Links and what is done with them, drawn.
struct Script {
    rng: Rng,
    capacities: Vec<f64>,
    /// Units per byte, of each link.
    weights: Vec<f64>,
}

impl Script {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::of(&[seed, 7]);
        let links = rng.between(1, 14) as usize;
        let mut capacities = Vec::new();
        let mut weights = Vec::new();
        for _ in 0..links {
            let descriptors = rng.chance(2_000);
            weights.push(if descriptors { 1.0 / 65_536.0 } else { 1.0 });
            capacities.push(Self::capacity(&mut rng) * if descriptors { 1.0 / 65_536.0 } else { 1.0 });
        }
        Self { rng, capacities, weights }
    }

    fn capacity(rng: &mut Rng) -> f64 {
        match rng.below(8) {
            0 => 1e9,
            1 => 12.5e9,
            2 | 3 => 50e9,
            4 => 450e9,
            5 if rng.chance(1_000) => 0.0,
            _ => rng.between(500_000_000, 100_000_000_000) as f64,
        }
    }

    fn flow(&mut self) -> Flow {
        let rng = &mut self.rng;
        let mut uses = Vec::new();
        for _ in 0..rng.below(8) {
            let link = rng.below(self.capacities.len() as u64) as u32;
            let own = if rng.chance(3_000) { rng.between(1, 40) as f64 / 10.0 } else { 1.0 };
            uses.push((link, self.weights[link as usize] * own));
        }
        let capped = uses.is_empty() || rng.chance(3_000);
        let cap = if capped { rng.between(500_000_000, 60_000_000_000) as f64 } else { EVER };
        let size = if rng.chance(300) { 0.0 } else { rng.between(1, 200_000_000) as f64 };
        Flow { size, uses, cap }
    }
}

/// What must hold of rates that are max-min fair.
fn assert_fair(capacities: &[f64], flows: &BTreeMap<FlowId, Flow>, rates: &BTreeMap<FlowId, f64>) {
    let load = |link: u32| -> f64 {
        flows.iter().flat_map(|(id, f)| f.uses.iter().filter(|u| u.0 == link).map(|u| u.1 * rates[id])).sum()
    };
    let loads: Vec<f64> = (0..capacities.len() as u32).map(load).collect();
    for (capacity, load) in capacities.iter().zip(&loads) {
        assert!(*load <= capacity * (1.0 + 1e-9), "{load} over {capacity}");
    }
    for (id, f) in flows {
        let rate = rates[id];
        let bottleneck = f.uses.iter().any(|&(link, weight)| {
            let most = flows
                .iter()
                .filter(|(_, o)| o.uses.iter().any(|u| u.0 == link && u.1 > 0.0))
                .map(|(o, _)| rates[o])
                .fold(0.0, f64::max);
            let capacity = capacities[link as usize];
            weight > 0.0 && loads[link as usize] >= capacity * (1.0 - 1e-9) && rate >= most * (1.0 - 1e-9)
        });
        assert!(rate >= f.cap * (1.0 - 1e-9) || bottleneck, "nothing keeps {id:?} from more than {rate}: {flows:?}");
    }
}

/// Runs a script on both, and compares. Gives what ended when.
fn run(seed: u64, steps: u64) -> Vec<(FlowId, u64)> {
    let mut script = Script::new(seed);
    let mut fast = Flows::new(script.capacities.clone());
    let links = script.capacities.len();
    let mut naive = Naive {
        now: 0,
        capacities: script.capacities.clone(),
        flows: BTreeMap::new(),
        left: BTreeMap::new(),
        carried: vec![0.0; links],
        ended: BTreeMap::new(),
    };
    let mut live: BTreeMap<FlowId, Flow> = BTreeMap::new();
    let mut ended = Vec::new();
    let mut now = 0;
    for step in 0..=steps {
        // The last step lets all end that can.
        if step == steps {
            now += 4_000_000_000_000;
        } else if script.rng.chance(7_000) {
            now += script.rng.between(1, 6_000_000);
        }
        naive.run_to(now);
        while let Some(at) = fast.next().filter(|at| *at <= ns(now)) {
            for id in fast.advance(at) {
                assert!(live.remove(&id).is_some(), "{id:?} ended twice");
                ended.push((id, at.as_nanos() as u64));
            }
            check(&naive.capacities, &live, &mut fast);
        }
        assert_eq!(fast.advance(ns(now)), [], "next() tells them all");
        if step == steps {
            break;
        }
        match script.rng.below(10) {
            0..=6 => {
                let flow = script.flow();
                let id = fast.begin(ns(now), flow.clone());
                naive.left.insert(id, flow.size);
                naive.flows.insert(id, flow.clone());
                live.insert(id, flow);
            }
            7 | 8 => {
                let ids: Vec<FlowId> = live.keys().copied().collect();
                if let Some(id) = script.rng.pick(&ids) {
                    let left = fast.stop(ns(now), *id).unwrap();
                    naive.flows.remove(id);
                    let expected = naive.left.remove(id).unwrap_or(0.0);
                    assert!((left - expected).abs() <= 20_000.0, "seed {seed}: {left}, not {expected}");
                    live.remove(id);
                }
            }
            _ => {
                let link = script.rng.below(links as u64) as usize;
                let capacity = Script::capacity(&mut script.rng) * script.weights[link];
                fast.set_capacity(ns(now), link as u32, capacity);
                naive.capacities[link] = capacity;
            }
        }
        // Several changes at one instant are one sharing; now and then it is asked for between them.
        if script.rng.chance(5_000) {
            check(&naive.capacities, &live, &mut fast);
        }
    }
    for (id, at) in &ended {
        let expected = naive.ended.get(id).unwrap_or_else(|| panic!("seed {seed}: {id:?} must not end"));
        let off = at.abs_diff(*expected);
        assert!(off <= 100, "seed {seed}: {id:?} ends at {at}, not {expected}");
    }
    assert!(live.keys().eq(naive.flows.keys()), "seed {seed}: the same never end");
    for link in 0..links {
        let (carried, expected) = (fast.carried(link as u32), naive.carried[link]);
        assert!((carried - expected).abs() <= expected * 1e-5 + 1e-6, "seed {seed}: {carried}, not {expected}");
    }
    ended
}

/// Rates and the next end, against filling anew.
fn check(capacities: &[f64], live: &BTreeMap<FlowId, Flow>, fast: &mut Flows) {
    let rates: BTreeMap<FlowId, f64> = live.keys().map(|id| (*id, fast.rate(*id).unwrap())).collect();
    assert_fair(capacities, live, &rates);
    let mut first: Option<u64> = None;
    for (id, expected) in filled(capacities, live) {
        let rate = rates[&id];
        assert!((rate - expected).abs() <= expected * 1e-9, "{rate}, not {expected}");
        let left = fast.left(id).unwrap();
        if expected > 0.0 || left <= 0.0 {
            let ends = if left > 0.0 { (left * 1e9 / expected).ceil() as u64 } else { 0 };
            let end = fast.now + ends;
            first = Some(first.map_or(end, |f| f.min(end)));
        }
    }
    match (fast.next(), first) {
        (None, None) => {}
        (Some(next), Some(first)) => {
            let off = (next.as_nanos() as u64).abs_diff(first);
            assert!(off <= 1, "the next ends at {next:?}, not {first} ns");
        }
        (next, first) => panic!("the next ends at {next:?}, not {first:?} ns"),
    }
    assert_eq!(fast.len(), live.len());
}

#[test]
fn filling_everything_anew_gives_the_same() {
    let mut ends = 0;
    for seed in 0..240 {
        ends += run(seed, 60).len();
    }
    assert!(ends > 4_500, "{ends} flows ended");
}

#[test]
fn it_runs_the_same_every_time() {
    for seed in 1_000..1_020 {
        assert_eq!(run(seed, 80), run(seed, 80));
    }
}

#[test]
fn an_ended_flow_has_carried_its_size() {
    let mut rng = Rng::of(&[3]);
    for _ in 0..200 {
        let mut flows = Flows::new(vec![7e9, 3.3e9, 11e9]);
        let mut bytes = [0.0; 3];
        for _ in 0..rng.between(1, 30) {
            let size = rng.between(1, 1 << 30) as f64;
            let uses: Vec<(u32, f64)> = (0..3).filter(|_| rng.chance(6_000)).map(|link| (link, 1.0)).collect();
            for (link, _) in &uses {
                bytes[*link as usize] += size;
            }
            let at = flows.next().unwrap_or_default();
            flows.begin(at, Flow { size, uses, cap: 1e9 });
        }
        flows.advance(sec(1_000_000));
        assert!(flows.is_empty());
        for (link, bytes) in bytes.iter().enumerate() {
            // Each addition may round.
            assert!((flows.carried(link as u32) - bytes).abs() <= bytes * 1e-12, "{link} {bytes}");
        }
    }
}

#[test]
fn what_is_not_connected_is_not_shared_anew() {
    let mut flows = Flows::new(vec![1e9, 1e9, 1e12]);
    let begin = |flows: &mut Flows, at, link| flows.begin(at, flow(1e9, &[(link, 1.0), (2, 1.0)], EVER));
    for link in [0, 0, 1, 1, 1] {
        begin(&mut flows, sec(0), link);
    }
    assert_eq!(flows.next(), Some(sec(2)));
    // Link 2 has room for all: it connects none.
    assert_eq!(flows.shares(), (2, 5));
    begin(&mut flows, sec(1), 0);
    let second = begin(&mut flows, sec(1), 0);
    assert_eq!(flows.shares(), (2, 5), "not before it is asked for");
    assert_eq!(flows.rate(second), Some(0.25e9));
    assert_eq!(flows.shares(), (3, 9), "four on one link, once for both changes");
    flows.stop(sec(1), second);
    assert_eq!(flows.next(), Some(sec(2) + ns(500_000_000)));
    assert_eq!(flows.shares(), (4, 12));
    // Where it could be full it connects all.
    flows.set_capacity(sec(1), 2, 1e9);
    flows.next();
    assert_eq!(flows.shares(), (5, 18));
    // And where no longer, all are shared once more, apart.
    flows.set_capacity(sec(1), 2, 1e12);
    flows.next();
    assert_eq!(flows.shares(), (7, 24));
}

#[test]
fn flows_that_end_together_are_told_together() {
    let mut flows = Flows::new(vec![4e9]);
    let ids: Vec<FlowId> = (0..4).map(|_| flows.begin(sec(0), flow(1e9, &[(0, 1.0)], EVER))).collect();
    assert_eq!(flows.next(), Some(sec(1)));
    assert_eq!(flows.advance(sec(1)), ids);
    assert_eq!((flows.next(), flows.shares()), (None, (1, 4)));
    assert!((flows.carried(0) - 4e9).abs() < 1e-3);
}

#[test]
fn a_late_call_finds_what_happened_in_between() {
    let mut flows = Flows::new(vec![1e9]);
    let first = flows.begin(sec(0), flow(1e9, &[(0, 1.0)], EVER));
    let second = flows.begin(sec(0), flow(2e9, &[(0, 1.0)], EVER));
    // Both are over by then, the first at 2 s, the second at 3 s; the third has the link to itself.
    let third = flows.begin(sec(5), flow(1e9, &[(0, 1.0)], EVER));
    assert_eq!(flows.stop(sec(5), second), None);
    assert_eq!(flows.next(), Some(sec(5)), "there is something to tell");
    assert_eq!(flows.advance(sec(5)), [first, second]);
    assert_eq!(flows.next(), Some(sec(6)));
    // Time doesn't go back.
    assert_eq!(flows.stop(sec(1), third), Some(1e9));
    assert_eq!((flows.carried(0), flows.len()), (3e9, 0));
}

#[test]
fn what_cannot_move_never_ends() {
    let mut flows = Flows::new(vec![0.0, 1e9, f64::NAN, -1.0]);
    let broken = [0, 2, 3, 99].map(|link| flows.begin(sec(0), flow(1.0, &[(link, 1.0), (1, 1.0)], EVER)));
    for cap in [0.0, -1.0, f64::NAN] {
        flows.begin(sec(0), flow(1.0, &[(1, 1.0)], cap));
    }
    flows.begin(sec(0), flow(EVER, &[(1, 0.5)], EVER));
    flows.begin(sec(0), flow(1.0, &[(1, EVER)], EVER));
    flows.begin(sec(0), flow(1e300, &[], 1e-300));
    assert_eq!(flows.next(), None);
    assert_eq!(flows.advance(Duration::MAX), []);
    assert_eq!(flows.len(), 10);
    assert!(flows.carried(1).is_finite() && flows.carried(1) > 1e9, "what moves for ever");
    assert_eq!((flows.carried(99), flows.capacity(99)), (0.0, 0.0));

    let mut flows = Flows::new(vec![0.0]);
    let waits = flows.begin(sec(0), flow(1e9, &[(0, 1.0)], EVER));
    assert_eq!((flows.rate(waits), flows.next()), (Some(0.0), None));
    flows.set_capacity(sec(7), 0, 1e9);
    flows.set_capacity(sec(7), 99, 1e9);
    assert_eq!(flows.next(), Some(sec(8)));
    flows.set_capacity(sec(7) + ns(500_000_000), 0, 0.0);
    assert_eq!((flows.next(), flows.left(waits)), (None, Some(0.5e9)));
    assert_eq!(flows.stop(sec(9), broken[3]), None, "another's");
}

#[test]
fn what_nothing_limits_ends_at_once() {
    let mut flows = Flows::new(vec![1e9, EVER]);
    let ids = [
        flows.begin(sec(1), flow(0.0, &[(0, 1.0)], EVER)),
        flows.begin(sec(1), flow(-5.0, &[(0, 1.0)], 1.0)),
        flows.begin(sec(1), flow(f64::NAN, &[(0, 1.0)], 0.0)),
        flows.begin(sec(1), flow(1e9, &[], EVER)),
        flows.begin(sec(1), flow(1e9, &[(1, 2.0)], EVER)),
        flows.begin(sec(1), flow(1e9, &[(0, 0.0), (0, -1.0), (0, f64::NAN)], EVER)),
    ];
    assert_eq!(flows.next(), Some(sec(1)));
    assert_eq!(flows.advance(sec(1)), ids);
    assert_eq!((flows.next(), flows.carried(0), flows.carried(1)), (None, 0.0, 2e9));
}

#[test]
fn an_end_is_rounded_up_and_takes_a_nanosecond_at_least() {
    let mut flows = Flows::new(vec![50e9, 3.0]);
    let tiny = flows.begin(sec(0), flow(1.0, &[(0, 1.0)], EVER));
    let third = flows.begin(sec(0), flow(1.0, &[(1, 1.0)], EVER));
    assert_eq!(flows.next(), Some(ns(1)));
    assert_eq!(flows.advance(ns(333_333_333)), [tiny]);
    assert_eq!(flows.advance(ns(333_333_334)), [third]);
    assert_eq!((flows.carried(0), flows.carried(1)), (1.0, 1.0));
}

#[test]
fn entries_that_are_out_of_date_do_not_pile_up() {
    let mut flows = Flows::new(vec![1e9]);
    flows.begin(sec(0), flow(1e15, &[(0, 1.0)], EVER));
    for i in 0..10_000 {
        let id = flows.begin(ns(i), flow(1e12, &[(0, 1.0)], EVER));
        flows.next();
        flows.stop(ns(i), id);
        flows.next();
    }
    assert!(flows.ends.len() < 100, "{}", flows.ends.len());
}

#[test]
fn weights_of_very_different_size_share_one_link() {
    let mut flows = Flows::new(vec![1e6, 1e3]);
    for _ in 0..1_000 {
        flows.begin(sec(0), flow(1e9, &[(0, 1.0), (1, 1.0)], EVER));
    }
    let light = flows.begin(sec(0), flow(1e9, &[(0, 1e-7)], EVER));
    // The heavy ones have 1 each on link 1, so 999,000 units of link 0 are left, at 1e-7 a byte.
    let rate = flows.rate(light).unwrap();
    assert!((rate - 9.99e12).abs() < 1e3, "{rate}");
}
