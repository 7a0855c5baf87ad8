//! Clusters: machines with GPUs and network cards, and the links between them with what they carry a second, how long they take
//! and what each message and descriptor costs.
//!
//! | module | what is in it |
//! |---|---|
//! | `read` | descriptions in TOML; `docs/cluster.md` tells of every key |
//! | `preset` | descriptions that come along, each figure with its public source |
//! | `machine` | what a description comes down to |
//! | `layout` | from that to numbered links |
//! | `route` | which links are between two GPUs |
//! | `calibrate` | figures that were measured instead of read |
//! | `fault` | what can be wrong, all faults at once |
//!
//! A [`Cluster`] knows no load and no time. All links are one direction: what is full duplex is two links. Routes follow from the
//! cluster's form, without a search, so that millions of pairs can be asked for.
//!
//! ```
//! use kvferry_topology::cluster::Cluster;
//! let cluster = Cluster::preset("hgx-h100", 2).unwrap();
//! let routes = cluster.routes(cluster.gpu(0), cluster.gpu(8), 1);
//! let names: Vec<String> = routes[0].links.iter().map(|&l| cluster.link_name(l)).collect();
//! assert_eq!(names, ["node0/gpu0/pcie/out", "node0/nic0/out", "node1/nic0/in", "node1/gpu0/pcie/in"]);
//! ```

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

mod calibrate;
mod fault;
mod layout;
mod machine;
mod preset;
mod read;
mod route;

pub use calibrate::{Calibration, Measured};
pub use fault::{ClusterError, ClusterErrors, ClusterFault};
use layout::Layout;
pub use machine::GpuModel;
use machine::{Machine, Parts};

/// The most machines of a cluster.
pub const MAX_NODES: u32 = 65_536;
/// The most GPUs of a cluster; also the most cards, and the most leaf switches.
pub const MAX_GPUS: u32 = 1_048_576;
/// The most bytes of a description or a calibration.
pub const MAX_BYTES: usize = 1 << 20;

/// Machines and links.
#[derive(Clone, PartialEq, Debug)]
pub struct Cluster {
    parts: Parts,
    nodes: Vec<Node>,
    links: Vec<Link>,
    /// Where the links of a machine's parts are, for each of the kinds of machines.
    layouts: Vec<Layout>,
    /// The first link of a leaf, and how many leaves a group of machines has (0: there are none that could be narrow).
    leaves: (u32, u32),
}

/// A machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// Its place in [`Cluster::nodes`].
    pub index: u32,
    /// Its GPUs (or, in a cluster of processes, ranks).
    pub gpus: u32,
    /// Its network cards.
    pub nics: u32,
    /// The number of its first GPU in the cluster.
    pub first_gpu: u32,
    /// Which of the kinds of machines it is.
    kind: u32,
    /// Which NVLink domain it is in; domains of no NVLink are numbered too.
    domain: u32,
    first_link: u32,
}

impl Node {
    /// As links call it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("node{}", self.index)
    }
}

/// A GPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Gpu {
    /// The machine that it is in.
    pub node: u32,
    /// Which one there.
    pub index: u32,
}

/// A link's place in [`Cluster::links`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u32);

impl LinkId {
    /// The place, to index lists with.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a link is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum LinkKind {
    /// A GPU to or from the NVLink switch.
    NvLink,
    /// A GPU to or from its machine's bus.
    Pcie,
    /// An InfiniBand card to or from its leaf switch.
    Nic,
    /// An Ethernet card to or from its leaf switch.
    Ethernet,
    /// All of a leaf's links to or from the spine switches together.
    Uplink,
    /// Memory: a machine's, or a GPU's when it copies to itself.
    Host,
    /// No bytes, but descriptors: what a rank posts, or a card works off.
    Work,
}

impl LinkKind {
    /// As reports write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NvLink => "nvlink",
            Self::Pcie => "pcie",
            Self::Nic => "nic",
            Self::Ethernet => "ethernet",
            Self::Uplink => "uplink",
            Self::Host => "host",
            Self::Work => "work",
        }
    }
}

/// One direction of something that carries bytes, or something that works off descriptors.
///
/// It knows its name without holding it: a million GPUs have ten million links.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    capacity: f64,
    /// The machine, or the leaf.
    owner: u32,
    /// Which GPU or card of the machine.
    unit: u16,
    part: Part,
    kind: LinkKind,
}

impl Link {
    /// As `node0/nic3/out`, `node0/gpu2/nvlink/in`, `leaf1/up`.
    #[must_use]
    pub fn name(&self) -> String {
        let (owner, unit) = (self.owner, self.unit);
        let gpu = |what: &str| format!("node{owner}/gpu{unit}/{what}");
        let nic = |what: &str| format!("node{owner}/nic{unit}/{what}");
        match self.part {
            Part::Copy => gpu("copy"),
            Part::NvLinkOut => gpu("nvlink/out"),
            Part::NvLinkIn => gpu("nvlink/in"),
            Part::NvLinkWork => gpu("nvlink/work"),
            Part::PcieOut => gpu("pcie/out"),
            Part::PcieIn => gpu("pcie/in"),
            Part::PcieWork => gpu("pcie/work"),
            Part::HostWork => gpu("host/work"),
            Part::NetWork => gpu("net/work"),
            Part::NicOut => nic("out"),
            Part::NicIn => nic("in"),
            Part::NicWork => nic("work"),
            Part::Memory => format!("node{owner}/memory"),
            Part::Up => format!("leaf{owner}/up"),
            Part::Down => format!("leaf{owner}/down"),
        }
    }

    /// What it is.
    #[must_use]
    pub const fn kind(&self) -> LinkKind {
        self.kind
    }

    /// The machine that it belongs to; `None` for switches.
    #[must_use]
    pub const fn node(&self) -> Option<u32> {
        match self.part {
            Part::Up | Part::Down => None,
            _ => Some(self.owner),
        }
    }

    /// Bytes a second; for [`LinkKind::Work`] descriptors a second. Above 0 and finite.
    #[must_use]
    pub const fn capacity(&self) -> f64 {
        self.capacity
    }
}

/// Which link of its owner it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Copy,
    NvLinkOut,
    NvLinkIn,
    NvLinkWork,
    PcieOut,
    PcieIn,
    PcieWork,
    HostWork,
    NetWork,
    NicOut,
    NicIn,
    NicWork,
    Memory,
    Up,
    Down,
}

/// A way from one GPU to another, or the part of it that goes over one of several cards.
#[derive(Clone, PartialEq, Debug)]
pub struct Route {
    /// What bytes go over, in order from the source to the destination.
    pub links: LinkList,
    /// What each descriptor takes one of where the destination reads (pull): what its rank posts and its card works off.
    pub work: LinkList,
    /// The same where the source writes (push).
    pub push_work: LinkList,
    /// From posting a read until its first byte is there: the request goes there, data come back.
    pub latency: Duration,
    /// What one operation takes beside its bytes and descriptors, at the rank that posts it; the next one can't begin before.
    pub per_message: Duration,
    /// The most bytes a second of one flow over this route, however idle the links are; infinite where there is no such limit.
    pub cap: f64,
    /// The share of the bytes that takes this route. Those of all routes between two GPUs are 1 together.
    pub share: f64,
}

impl Route {
    /// As [`latency`](Self::latency), where the source writes: one way.
    #[must_use]
    pub fn push_latency(&self) -> Duration {
        self.latency / 2
    }
}

/// At most six links, without an allocation of their own. It is used as a slice.
#[derive(Clone, Copy)]
pub struct LinkList {
    ids: [LinkId; 6],
    len: u8,
}

impl LinkList {
    const EMPTY: Self = Self { ids: [LinkId(0); 6], len: 0 };

    /// Adds one. No route has more than there is room for.
    fn push(&mut self, id: LinkId) {
        if let Some(slot) = self.ids.get_mut(usize::from(self.len)) {
            *slot = id;
            self.len += 1;
        }
    }
}

impl Deref for LinkList {
    type Target = [LinkId];

    fn deref(&self) -> &[LinkId] {
        self.ids.get(..usize::from(self.len)).unwrap_or(&self.ids)
    }
}

impl<'a> IntoIterator for &'a LinkList {
    type Item = &'a LinkId;
    type IntoIter = std::slice::Iter<'a, LinkId>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for LinkList {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
impl Eq for LinkList {}

impl fmt::Debug for LinkList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|l| l.0)).finish()
    }
}

impl Cluster {
    /// A cluster of so many machines of one kind; [`preset_names`](Self::preset_names) has the kinds.
    ///
    /// # Errors
    ///
    /// There is no such preset, or it can't be so many machines.
    pub fn preset(name: &str, nodes: u32) -> Result<Self, ClusterErrors> {
        read::preset(name, nodes).map(Self::of)
    }

    /// The presets that there are.
    #[must_use]
    pub fn preset_names() -> Vec<&'static str> {
        preset::PRESETS.iter().map(|p| p.name).collect()
    }

    /// The text of a preset, a description as [`from_toml`](Self::from_toml) reads it, with each figure's source.
    #[must_use]
    pub fn preset_text(name: &str) -> Option<&'static str> {
        preset::text(name)
    }

    /// Reads a description. `file` is what faults call it.
    ///
    /// # Errors
    ///
    /// Every fault of the values at once; or the first of the text's form, with its line.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, ClusterErrors> {
        read::file(file, text).map(Self::of)
    }

    /// The same cluster with what was measured instead of what was written: see [`Calibration`].
    #[must_use]
    pub fn calibrated(self, calibration: &Calibration) -> Self {
        let mut parts = self.parts;
        calibrate::apply(&mut parts, calibration);
        Self::of(parts)
    }

    /// What the description calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.parts.name
    }

    /// The machines.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// GPUs of all machines together.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.nodes.last().map_or(0, |n| n.first_gpu + n.gpus)
    }

    /// The `n`-th GPU of the cluster, machine by machine. Beyond the last one it is in a machine that there isn't, to which there are no
    /// routes.
    #[must_use]
    pub fn gpu(&self, n: u32) -> Gpu {
        let after = self.nodes.partition_point(|node| node.first_gpu <= n);
        match self.nodes.get(after.wrapping_sub(1)) {
            Some(node) if n - node.first_gpu < node.gpus => Gpu { node: node.index, index: n - node.first_gpu },
            _ => Gpu { node: u32::MAX, index: 0 },
        }
    }

    /// All links; a route's ids are places in it.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// One link.
    #[must_use]
    pub fn link(&self, id: LinkId) -> Option<&Link> {
        self.links.get(id.index())
    }

    /// A link's name; `link7?` for one that there isn't.
    #[must_use]
    pub fn link_name(&self, id: LinkId) -> String {
        self.link(id).map_or_else(|| format!("link{}?", id.0), Link::name)
    }

    /// How long a message of the control plane takes from a process of one machine to one of another, or of the same: one way, until
    /// it is read.
    #[must_use]
    pub fn control_latency(&self, a: u32, b: u32) -> Duration {
        if a == b { self.parts.control.same_node } else { self.parts.control.other_node }
    }

    /// The GPUs of a machine. All zeros where there is no such machine.
    #[must_use]
    pub fn gpu_model(&self, node: u32) -> &GpuModel {
        static NONE: GpuModel = GpuModel { name: String::new(), hbm_gib: 0.0, hbm_gb_s: 0.0, bf16_tflops: 0.0 };
        let machine = self.nodes.get(node as usize).and_then(|n| self.machine(n));
        machine.map_or(&NONE, |m| &m.gpu)
    }

    fn machine(&self, node: &Node) -> Option<&Machine> {
        self.parts.machines.get(node.kind as usize)
    }
}
