//! From a description to numbered links: each machine's in one piece, those of its GPUs first, so that a link's number is computed
//! from its owner's.

use super::machine::{Machine, Parts, Shape};
use super::{Cluster, Link, LinkId, LinkKind, Node, Part};

/// The links of one GPU, in this order, where its machine has what they are for.
const GPU_PARTS: [Part; 9] = [
    Part::Copy,
    Part::NvLinkOut,
    Part::NvLinkIn,
    Part::NvLinkWork,
    Part::PcieOut,
    Part::PcieIn,
    Part::PcieWork,
    Part::HostWork,
    Part::NetWork,
];
/// The links of one card, likewise.
const NIC_PARTS: [Part; 3] = [Part::NicOut, Part::NicIn, Part::NicWork];

/// Where the links of a kind of machine are, counted from the machine's first.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Layout {
    gpu: Places<{ GPU_PARTS.len() }>,
    nic: Places<{ NIC_PARTS.len() }>,
    first_nic: u32,
    /// `None` where the ranks have no memory in common.
    memory: Option<u32>,
}

/// For each of several parts how many links of its owner are before it (`None`: the owner has no such link), and how many it has.
#[derive(Clone, PartialEq, Debug)]
struct Places<const N: usize> {
    parts: [Part; N],
    at: [Option<u32>; N],
    links: u32,
}

impl<const N: usize> Places<N> {
    fn of(parts: [Part; N], has: impl Fn(Part) -> bool) -> Self {
        let mut links = 0;
        let at = parts.map(|part| {
            let before = links;
            links += u32::from(has(part));
            has(part).then_some(before)
        });
        Self { parts, at, links }
    }

    fn place(&self, part: Part) -> Option<u32> {
        self.parts.iter().zip(&self.at).find(|(p, _)| **p == part).and_then(|(_, at)| *at)
    }
}

impl Layout {
    fn of(machine: &Machine) -> Self {
        let gpu = Places::of(GPU_PARTS, |part| of_gpu(machine, part).is_some());
        let nic = Places::of(NIC_PARTS, |part| of_nic(machine, part).is_some());
        let first_nic = gpu.links.saturating_mul(machine.gpus);
        let memory = first_nic.saturating_add(nic.links.saturating_mul(machine.nic_count()));
        Self { gpu, nic, first_nic, memory: machine.host.is_some().then_some(memory) }
    }

    pub(super) fn gpu(&self, node: &Node, gpu: u32, part: Part) -> Option<LinkId> {
        self.gpu.place(part).map(|at| LinkId(node.first_link + gpu * self.gpu.links + at))
    }

    pub(super) fn nic(&self, node: &Node, nic: u32, part: Part) -> Option<LinkId> {
        self.nic.place(part).map(|at| LinkId(node.first_link + self.first_nic + nic * self.nic.links + at))
    }

    pub(super) fn memory(&self, node: &Node) -> Option<LinkId> {
        self.memory.map(|at| LinkId(node.first_link + at))
    }
}

/// What a link of a GPU is and carries; `None` where the machine has none. What costs nothing is no link.
fn of_gpu(machine: &Machine, part: Part) -> Option<(LinkKind, f64)> {
    let nvlink = machine.nvlink.as_ref().map(|(lane, _)| lane);
    let pcie = machine.pcie.as_ref();
    let host = machine.host.as_ref().map(|(lane, _)| lane);
    let (kind, capacity) = match part {
        // Each byte is read and written.
        Part::Copy => (LinkKind::Host, machine.gpu.hbm_gb_s * 1e9 / 2.0),
        Part::NvLinkOut | Part::NvLinkIn => (LinkKind::NvLink, nvlink?.rate),
        Part::NvLinkWork => (LinkKind::Work, nvlink?.posts),
        Part::PcieOut | Part::PcieIn => (LinkKind::Pcie, pcie?.rate),
        // Nobody copies over the bus where there is something faster.
        Part::PcieWork => (LinkKind::Work, pcie.filter(|_| nvlink.is_none() && host.is_none())?.posts),
        Part::HostWork => (LinkKind::Work, host.filter(|_| nvlink.is_none())?.posts),
        Part::NetWork => (LinkKind::Work, machine.nics.as_ref()?.lane.posts),
        _ => return None,
    };
    capacity.is_finite().then_some((kind, capacity))
}

/// The same of a card.
fn of_nic(machine: &Machine, part: Part) -> Option<(LinkKind, f64)> {
    let nics = machine.nics.as_ref()?;
    let (kind, capacity) = match part {
        Part::NicOut | Part::NicIn => (nics.kind, nics.lane.rate),
        Part::NicWork => (LinkKind::Work, nics.engine),
        _ => return None,
    };
    capacity.is_finite().then_some((kind, capacity))
}

impl Cluster {
    /// The links of a description, whose numbers were found to be within the limits.
    pub(super) fn of(parts: Parts) -> Self {
        let mut nodes: Vec<Node> = Vec::new();
        let mut links: Vec<Link> = Vec::new();
        let mut layouts = Vec::new();
        let (mut first_gpu, mut domain) = (0, 0);
        for (kind, machine) in (0u32..).zip(&parts.machines) {
            layouts.push(Layout::of(machine));
            let together = machine.nvlink.as_ref().map_or(1, |(_, nodes)| *nodes).max(1);
            for i in 0..machine.nodes {
                let index = count(nodes.len());
                let domain = domain + i / together;
                let first_link = count(links.len());
                let (gpus, nics) = (machine.gpus, machine.nic_count());
                nodes.push(Node { index, gpus, nics, first_gpu, kind, domain, first_link });
                first_gpu += machine.gpus;
                of_node(&mut links, index, machine);
            }
            domain += machine.nodes.div_ceil(together);
        }
        let leaves = of_leaves(&mut links, &parts, &nodes);
        Self { parts, nodes, links, layouts, leaves }
    }

    pub(super) fn layout(&self, node: &Node) -> Option<&Layout> {
        self.layouts.get(node.kind as usize)
    }

    /// The leaf that a card hangs on; 0 where there is but one switch.
    pub(super) fn leaf(&self, node: u32, nic: u32) -> u32 {
        let fabric = &self.parts.fabric;
        let group = node / fabric.nodes_per_leaf.max(1);
        match fabric.shape {
            Shape::Switch => 0,
            Shape::Leaves => group,
            Shape::Rails => group * self.leaves.1 + nic,
        }
    }

    /// The links to the spine and from it, where they can be narrow.
    pub(super) fn uplink(&self, leaf: u32) -> Option<[LinkId; 2]> {
        let (first, each) = self.leaves;
        (each > 0).then(|| [LinkId(first + 2 * leaf), LinkId(first + 2 * leaf + 1)])
    }
}

fn of_node(links: &mut Vec<Link>, owner: u32, machine: &Machine) {
    for unit in (0..machine.gpus).map(short) {
        for part in GPU_PARTS {
            links.extend(of_gpu(machine, part).map(|(kind, capacity)| Link { capacity, owner, unit, part, kind }));
        }
    }
    for unit in (0..machine.nic_count()).map(short) {
        for part in NIC_PARTS {
            links.extend(of_nic(machine, part).map(|(kind, capacity)| Link { capacity, owner, unit, part, kind }));
        }
    }
    if let Some((lane, readers)) = &machine.host {
        let (capacity, kind) = (lane.rate * readers, LinkKind::Host);
        links.push(Link { capacity, owner, unit: 0, part: Part::Memory, kind });
    }
}

/// Both directions of each leaf's uplinks; the first link and how many leaves a group has.
fn of_leaves(links: &mut Vec<Link>, parts: &Parts, nodes: &[Node]) -> (u32, u32) {
    let first = count(links.len());
    let each = leaves_of_a_group(parts);
    let per_leaf = parts.fabric.nodes_per_leaf.max(1) as usize;
    if each == 0 {
        return (first, 0);
    }
    for (group, nodes) in (0u32..).zip(nodes.chunks(per_leaf)) {
        for rail in 0..each {
            // A leaf without cards carries nothing; its capacity is something to divide by.
            let below: f64 = nodes.iter().map(|node| hanging(parts, node, rail)).sum();
            let capacity = (below / parts.fabric.oversubscription).max(1.0);
            for part in [Part::Up, Part::Down] {
                let kind = LinkKind::Uplink;
                links.push(Link { capacity, owner: group * each + rail, unit: 0, part, kind });
            }
        }
    }
    (first, each)
}

/// How many leaves a group of machines has; 0 where no leaf's uplinks can be narrow.
pub(super) fn leaves_of_a_group(parts: &Parts) -> u32 {
    let most = parts.machines.iter().map(Machine::nic_count).max().unwrap_or(0);
    match parts.fabric.shape {
        Shape::Switch => 0,
        Shape::Leaves => most.min(1),
        Shape::Rails => most,
    }
}

/// Bandwidth of those cards of a machine that hang on one leaf of its group.
fn hanging(parts: &Parts, node: &Node, rail: u32) -> f64 {
    let Some(nics) = parts.machines.get(node.kind as usize).and_then(|m| m.nics.as_ref()) else { return 0.0 };
    match parts.fabric.shape {
        Shape::Leaves => nics.lane.rate * f64::from(nics.count),
        _ if rail < nics.count => nics.lane.rate,
        _ => 0.0,
    }
}

/// Numbers of things whose limits are far below.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn short(n: u32) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}
