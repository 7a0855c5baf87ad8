//! The cluster as the simulated data plane sees it.

use std::sync::Arc;

use kvferry_sim::fabric::{Path, Wires};
use kvferry_transport::OpKind;

use crate::cluster::{Cluster, Gpu};
use crate::scenario::Scenario;

/// Which rank is on which GPU, and what is between them.
#[derive(Debug)]
pub(super) struct ClusterWires {
    cluster: Arc<Cluster>,
    /// By engine of the world: ranks of each, and its first GPU in the list.
    engines: Vec<(u32, usize)>,
    gpus: Vec<Gpu>,
    rails: u32,
}

impl ClusterWires {
    pub(super) fn new(s: &Scenario) -> Self {
        let mut engines = Vec::new();
        let mut first = 0;
        for fleet in [&s.prefill, &s.decode] {
            for _ in 0..fleet.engines {
                engines.push((fleet.ranks, first));
                first += fleet.ranks as usize;
            }
        }
        let gpus = s.prefill.gpus.iter().chain(&s.decode.gpus).copied().collect();
        Self { cluster: s.cluster.clone(), engines, gpus, rails: s.transfer.rails }
    }

    fn gpu(&self, (engine, rank): (u32, u32)) -> Option<Gpu> {
        let (ranks, first) = self.engines.get(engine as usize)?;
        self.gpus.get(first + rank as usize).copied().filter(|_| rank < *ranks)
    }
}

impl Wires for ClusterWires {
    fn capacities(&self) -> Vec<f64> {
        self.cluster.links().iter().map(|l| l.capacity()).collect()
    }

    fn paths(&self, src: (u32, u32), dst: (u32, u32), kind: OpKind) -> Vec<Path> {
        let (Some(src), Some(dst)) = (self.gpu(src), self.gpu(dst)) else { return Vec::new() };
        let routes = self.cluster.routes(src, dst, self.rails);
        let path = |route: &crate::cluster::Route| Path {
            share: route.share,
            links: route.links.iter().map(|l| l.0).collect(),
            work: if kind == OpKind::Read { &route.work } else { &route.push_work }.iter().map(|l| l.0).collect(),
            latency: route.push_latency(),
            per_message: route.per_message,
            cap: route.cap,
        };
        routes.iter().map(path).collect()
    }
}
