//! Which links are between two GPUs, in closed form.
//!
//! | from and to | way |
//! |---|---|
//! | the same GPU | a copy in its own memory |
//! | one NVLink domain, of one machine or several | NVLink |
//! | one machine without NVLink | the memory that its ranks share, or else the bus |
//! | two machines | each side's nearest cards; over the spine unless both cards hang on one leaf |
//!
//! With several rails the `k`-th nearest card of the one goes to the `k`-th nearest of the other. Nothing is forwarded over NVLink to a
//! GPU that has a card on the wanted leaf (NCCL calls that PXN): one-sided reads and writes of a transport go to the memory where
//! the bytes belong.

use std::time::Duration;

use super::layout::Layout;
use super::machine::{Lane, Machine, Nics};
use super::{Cluster, Gpu, LinkId, LinkList, Node, Part, Route};

/// One end of a route.
#[derive(Clone, Copy)]
struct End<'a> {
    node: &'a Node,
    gpu: u32,
    machine: &'a Machine,
    layout: &'a Layout,
}

impl End<'_> {
    fn link(&self, part: Part) -> Option<LinkId> {
        self.layout.gpu(self.node, self.gpu, part)
    }
}

impl Cluster {
    /// The routes from one GPU to another, one for each card used: at most `rails`, and no more than the side with fewer cards has
    /// (0 is taken as 1). Empty where one of the GPUs doesn't exist.
    #[must_use]
    pub fn routes(&self, src: Gpu, dst: Gpu, rails: u32) -> Vec<Route> {
        let (Some(from), Some(to)) = (self.end(src), self.end(dst)) else { return Vec::new() };
        if src == dst {
            let copy = list([from.link(Part::Copy)]);
            let (latency, per_message) = (Duration::ZERO, Duration::ZERO);
            let (work, push_work) = (LinkList::EMPTY, LinkList::EMPTY);
            return vec![Route { links: copy, work, push_work, latency, per_message, cap: f64::INFINITY, share: 1.0 }];
        }
        if let (Some((a, _)), Some((b, _))) = (&from.machine.nvlink, &to.machine.nvlink)
            && from.node.domain == to.node.domain
        {
            let links = list([from.link(Part::NvLinkOut), to.link(Part::NvLinkIn)]);
            return vec![over(links, Part::NvLinkWork, (&from, a), (&to, b))];
        }
        if from.node.index == to.node.index {
            return within(&from, &to).into_iter().collect();
        }
        self.between(&from, &to, rails)
    }

    /// Over the network.
    fn between(&self, from: &End<'_>, to: &End<'_>, rails: u32) -> Vec<Route> {
        let (Some(a), Some(b)) = (&from.machine.nics, &to.machine.nics) else { return Vec::new() };
        let rails = rails.clamp(1, a.count.min(b.count).max(1));
        (0..rails).map(|k| self.over_card((from, a), (to, b), k, 1.0 / f64::from(rails))).collect()
    }

    fn over_card(&self, (from, a): (&End<'_>, &Nics), (to, b): (&End<'_>, &Nics), k: u32, share: f64) -> Route {
        let (out, into) = (from.machine.nic_near(from.gpu, k), to.machine.nic_near(to.gpu, k));
        let leaves = [self.leaf(from.node.index, out), self.leaf(to.node.index, into)];
        let spine = if leaves[0] == leaves[1] { None } else { self.uplink(leaves[0]).zip(self.uplink(leaves[1])) };
        let links = list([
            from.link(Part::PcieOut),
            from.layout.nic(from.node, out, Part::NicOut),
            spine.map(|(up, _)| up[0]),
            spine.map(|(_, down)| down[1]),
            to.layout.nic(to.node, into, Part::NicIn),
            to.link(Part::PcieIn),
        ]);
        let mut route = over(links, Part::NetWork, (from, &a.lane), (to, &b.lane));
        to.layout.nic(to.node, into, Part::NicWork).into_iter().for_each(|id| route.work.push(id));
        from.layout.nic(from.node, out, Part::NicWork).into_iter().for_each(|id| route.push_work.push(id));
        let switches = if spine.is_some() { 3 } else { 1 };
        route.latency += 2 * switches * self.parts.fabric.switch;
        route.share = share;
        route
    }

    fn end(&self, gpu: Gpu) -> Option<End<'_>> {
        let node = self.nodes.get(gpu.node as usize).filter(|n| gpu.index < n.gpus)?;
        Some(End { node, gpu: gpu.index, machine: self.machine(node)?, layout: self.layout(node)? })
    }
}

/// Between two GPUs of one machine without NVLink.
fn within(from: &End<'_>, to: &End<'_>) -> Option<Route> {
    if let Some((lane, _)) = &from.machine.host {
        let links = list([from.layout.memory(from.node)]);
        return Some(over(links, Part::HostWork, (from, lane), (to, lane)));
    }
    let lane = from.machine.pcie.as_ref()?;
    let links = list([from.link(Part::PcieOut), to.link(Part::PcieIn)]);
    Some(over(links, Part::PcieWork, (from, lane), (to, lane)))
}

fn over(links: LinkList, work: Part, from: (&End<'_>, &Lane), to: (&End<'_>, &Lane)) -> Route {
    Route {
        links,
        work: list([to.0.link(work)]),
        push_work: list([from.0.link(work)]),
        latency: 2 * from.1.latency.max(to.1.latency),
        per_message: from.1.per_message.max(to.1.per_message),
        cap: from.1.flow.min(to.1.flow),
        share: 1.0,
    }
}

fn list<const N: usize>(links: [Option<LinkId>; N]) -> LinkList {
    let mut list = LinkList::EMPTY;
    links.into_iter().flatten().for_each(|id| list.push(id));
    list
}
