//! What one kind of machine is made of, and what joins them: the figures that a description comes down to.

use std::time::Duration;

use super::LinkKind;

/// What the prefill's speed and the room for a cache depend on.
#[derive(Clone, PartialEq, Debug)]
pub struct GpuModel {
    /// As `H100 SXM 80GB`.
    pub name: String,
    /// Memory in GiB.
    pub hbm_gib: f64,
    /// The memory's bandwidth in 10^9 bytes a second.
    pub hbm_gb_s: f64,
    /// Dense (not sparse) BF16 matrix operations in 10^12 a second.
    pub bf16_tflops: f64,
}

/// A way between two GPUs. All links of it are alike.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Lane {
    /// Bytes a second and direction that transfers really get.
    pub(super) rate: f64,
    /// One way, without switches.
    pub(super) latency: Duration,
    /// What one operation costs beside its bytes, whatever its descriptors.
    pub(super) per_message: Duration,
    /// Descriptors a second that one rank can post; infinite where they cost nothing.
    pub(super) posts: f64,
    /// The most bytes a second of one flow.
    pub(super) flow: f64,
}

/// The network cards of a machine, all alike.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Nics {
    pub(super) count: u32,
    /// [`LinkKind::Nic`] or [`LinkKind::Ethernet`].
    pub(super) kind: LinkKind,
    pub(super) lane: Lane,
    /// Descriptors a second that one card works off.
    pub(super) engine: f64,
}

/// One kind of machine, and how many there are in a row.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Machine {
    pub(super) nodes: u32,
    pub(super) gpus: u32,
    pub(super) gpu: GpuModel,
    /// With the number of machines in a row that are one NVLink domain.
    pub(super) nvlink: Option<(Lane, u32)>,
    /// From a GPU to its machine's bus: to cards, and to other GPUs where there is no NVLink.
    pub(super) pcie: Option<Lane>,
    /// Memory that all ranks of a machine share, and how many of them copy at full speed at the same time.
    pub(super) host: Option<(Lane, f64)>,
    pub(super) nics: Option<Nics>,
}

impl Machine {
    pub(super) fn nic_count(&self) -> u32 {
        self.nics.as_ref().map_or(0, |n| n.count)
    }

    /// The card that is `k`-th nearest to a GPU: its own first, then by the bits in which their numbers differ, as cards are
    /// paired below a switch, switches below a socket. Where the number of cards is no power of two, the next in turn.
    pub(super) fn nic_near(&self, gpu: u32, k: u32) -> u32 {
        let (nics, gpus) = (self.nic_count().max(1), self.gpus.max(1));
        let own = u64::from(gpu) * u64::from(nics) / u64::from(gpus);
        let own = u32::try_from(own).unwrap_or(0) % nics;
        let k = k % nics;
        if nics.is_power_of_two() { own ^ k } else { (own + k) % nics }
    }
}

/// How machines' cards are joined.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Shape {
    /// One switch that never is the narrow place.
    Switch,
    /// Card `i` of each machine of a group hangs on leaf `i` of the group.
    Rails,
    /// All cards of a group of machines hang on one leaf.
    Leaves,
}

/// The network between machines.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Fabric {
    pub(super) shape: Shape,
    pub(super) nodes_per_leaf: u32,
    /// Bandwidth of a leaf's cards over that of its uplinks.
    pub(super) oversubscription: f64,
    /// Of one switch.
    pub(super) switch: Duration,
}

/// How long a message between two processes takes that are no ranks moving bytes.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Control {
    pub(super) same_node: Duration,
    pub(super) other_node: Duration,
}

/// Everything that a description says.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Parts {
    pub(super) name: String,
    /// In order of their nodes; never empty.
    pub(super) machines: Vec<Machine>,
    pub(super) fabric: Fabric,
    pub(super) control: Control,
}
