//! Which network card is near which device: read from sysfs, decided by pure functions.
//!
//! [`read`] takes a tree like `/sys` and gives a [`Topology`]: network interfaces, RDMA devices and accelerators with their place on
//! the PCI tree, their NUMA node and whether they are up. [`distance`] compares two places; [`assign`] gives every rank its network
//! devices, by an explicit map or by distance, and says why.
//!
//! It opens no device and knows no library: the names it gives are those that backends take (`mlx5_0`, `eth0`). What links inside
//! of accelerators (NVLink) connect is not in sysfs and not here.
//!
//! Invariants: reading is bounded, whatever the tree is; an excluded interface is never given to a rank, under neither of its
//! names; the same tree and rules give the same answer.
//!
//! ```no_run
//! use kvferry_transport::topology::{Place, RankPlace, Rules, assign, read};
//! let topology = read("/sys".as_ref())?;
//! let rank = |rank, gpu: &str| RankPlace { rank, place: Place::Pci(gpu.to_owned()) };
//! let ranks = [rank(0, "0000:17:00.0"), rank(1, "0000:65:00.0")];
//! let assignment = assign(&topology, &ranks, &Rules { exclude: vec!["eth*".to_owned()], ..Rules::default() })?;
//! println!("{assignment}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assign;
mod read;

use std::fmt;

pub use assign::{AssignError, Assignment, Choice, Prefer, RankPlace, Rules, Why, assign};
pub use read::{MAX_ENTRIES, MAX_FILE, TopologyError, read};

/// What a network device is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NicKind {
    /// An RDMA device (`mlx5_0`): InfiniBand or RoCE.
    Rdma,
    /// A network interface (`eth0`).
    Interface,
}

/// A place on the PCI tree: from the root complex (`pci0000:16`) by bridges to the device (`0000:17:00.0`).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct PciPath(pub Vec<String>);

impl PciPath {
    /// The device's own address; `None` for a path of nothing.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.0.last().map(String::as_str)
    }
}

/// A network device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nic {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: NicKind,
    /// Where it is; `None` for virtual ones.
    pub pci: Option<PciPath>,
    /// Its NUMA node, if the system knows.
    pub numa: Option<u32>,
    /// Whether it can carry anything now.
    pub up: bool,
    /// Its other names: the interfaces of an RDMA device, the RDMA devices of an interface.
    pub aliases: Vec<String>,
}

/// An accelerator or display device on the PCI tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Accelerator {
    /// Where it is.
    pub pci: PciPath,
    /// Its NUMA node, if the system knows.
    pub numa: Option<u32>,
}

/// What a machine has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Topology {
    /// Network devices: RDMA devices first, by name.
    pub nics: Vec<Nic>,
    /// Accelerators by address.
    pub accelerators: Vec<Accelerator>,
    /// The PCI devices' paths and NUMA nodes by address; a rank's device is looked up here.
    pub devices: Vec<(PciPath, Option<u32>)>,
}

impl Topology {
    /// Path and node of a PCI device.
    #[must_use]
    pub fn device(&self, address: &str) -> Option<&(PciPath, Option<u32>)> {
        self.devices.iter().find(|(path, _)| path.address() == Some(address))
    }

    /// A network device by name.
    #[must_use]
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }
}

/// Where the memory of a rank is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// On the PCI device of this address.
    Pci(String),
    /// In host memory of this NUMA node.
    Numa(u32),
    /// Not known.
    Unknown,
}

/// How far two devices are from each other; nearer is less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Distance {
    /// Below one PCI bridge or switch: so many steps by it.
    Bridge(u32),
    /// Below one root complex: so many steps by it.
    Root(u32),
    /// On one NUMA node.
    Node,
    /// On different NUMA nodes.
    Far,
    /// The system doesn't say.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridge(steps) => write!(f, "below one PCI bridge, {steps} steps"),
            Self::Root(steps) => write!(f, "below one root complex, {steps} steps"),
            Self::Node => f.write_str("on one NUMA node"),
            Self::Far => f.write_str("on another NUMA node"),
            Self::Unknown => f.write_str("at an unknown distance"),
        }
    }
}

/// How far a rank's memory is from a network device: by their common PCI ancestors, else by their NUMA nodes.
#[must_use]
pub fn distance(topology: &Topology, place: &Place, nic: &Nic) -> Distance {
    let (path, node) = match place {
        Place::Pci(address) => match topology.device(address) {
            Some((path, node)) => (Some(path), *node),
            None => return Distance::Unknown,
        },
        Place::Numa(node) => (None, Some(*node)),
        Place::Unknown => return Distance::Unknown,
    };
    if let (Some(path), Some(other)) = (path, &nic.pci) {
        let common = path.0.iter().zip(&other.0).take_while(|(a, b)| a == b).count();
        let steps = u32::try_from(path.0.len() + other.0.len() - 2 * common).unwrap_or(u32::MAX);
        match common {
            0 => {}
            1 => return Distance::Root(steps),
            _ => return Distance::Bridge(steps),
        }
    }
    match (node, nic.numa) {
        (Some(a), Some(b)) if a == b => Distance::Node,
        (Some(_), Some(_)) => Distance::Far,
        _ => Distance::Unknown,
    }
}
