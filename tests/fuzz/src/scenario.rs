//! What an operator writes for the simulator: a scenario, or a cluster.

use std::path::Path;

use kvferry_topology::cluster::Cluster;
use kvferry_topology::load::MAX_TOKENS;
use kvferry_topology::load::read::Source;
use kvferry_topology::scenario::{Fleet, Scenario};

use crate::{Reached, promise};

/// A load that is drawn has so many requests at most here: those are few enough to be drawn for each input.
const DRAWN: u64 = 1000;

/// A TOML text; bytes that are no UTF-8 are replaced. It is read beside no other file; texts with a path from the root are passed
/// over, as they would be read from this machine.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let mut reached = Reached::default();
    let text = String::from_utf8_lossy(data);
    if text.contains("\"/") || text.contains("'/") {
        return reached;
    }
    match Scenario::from_toml("scenario.toml", &text, Path::new("no such folder")) {
        Ok(scenario) => is_sound(&scenario, &mut reached),
        Err(errors) => {
            assert!(!errors.0.is_empty(), "refused without a fault");
            errors.0.iter().for_each(|error| reached.fault(error));
        }
    }
    match Cluster::from_toml("cluster.toml", &text) {
        Ok(cluster) => {
            reached.at("cluster");
            has_routes(&cluster, &mut reached);
        }
        Err(errors) => {
            assert!(!errors.0.is_empty(), "refused without a fault");
            errors.0.iter().for_each(|error| reached.fault(error));
        }
    }
    reached
}

fn is_sound(scenario: &Scenario, reached: &mut Reached) {
    reached.at("scenario");
    let cluster = &scenario.cluster;
    has_routes(cluster, reached);
    let of = |fleet: &Fleet| {
        assert_eq!(fleet.gpus.len() as u64, u64::from(fleet.engines) * u64::from(fleet.ranks), "a GPU for each rank");
        assert_eq!(fleet.manifest.ranks().len() as u64, u64::from(fleet.ranks));
        for gpu in &fleet.gpus {
            let node = cluster.nodes().get(gpu.node as usize).expect("a GPU of a node");
            assert!(gpu.index < node.gpus, "{gpu:?} of {node:?}");
        }
        promise::manifest(&fleet.manifest);
    };
    of(&scenario.prefill);
    of(&scenario.decode);
    let ends = |fleet: &Fleet| {
        [fleet.gpu(0, 0), fleet.gpu(fleet.engines - 1, fleet.ranks - 1)].map(|gpu| gpu.expect("a rank's GPU"))
    };
    for (p, d) in ends(&scenario.prefill).into_iter().zip(ends(&scenario.decode)) {
        assert!(!cluster.routes(p, d, scenario.transfer.rails).is_empty(), "no way from {p:?} to {d:?}");
    }
    if let Source::Drawn { requests, .. } = &scenario.load.source
        && *requests <= DRAWN
    {
        let load = scenario.requests().expect("what was drawn has no faults");
        assert_eq!(load.requests.len() as u64, *requests);
        assert!(load.requests.is_sorted_by_key(|r| r.at), "requests out of turn");
        let tokens = 1..=MAX_TOKENS;
        assert!(load.requests.iter().all(|r| tokens.contains(&r.prompt) && tokens.contains(&r.output)));
        reached.at("drawn");
    }
}

/// Between GPUs near and far: ways whose links exist, and which carry all of the bytes together, if there are any.
fn has_routes(cluster: &Cluster, reached: &mut Reached) {
    let Some(last) = cluster.gpus().checked_sub(1) else { return };
    for (a, b) in [(0, 0), (0, last.min(1)), (0, last), (last, 0)] {
        let routes = cluster.routes(cluster.gpu(a), cluster.gpu(b), 4);
        for route in &routes {
            assert!(route.links.iter().all(|id| cluster.link(*id).is_some()), "a link that isn't there");
        }
        let shares: f64 = routes.iter().map(|r| r.share).sum();
        if routes.is_empty() {
            reached.at("no way");
        } else {
            assert!((shares - 1.0).abs() < 1e-6, "the ways carry {shares} of the bytes");
        }
    }
}
