//! Reading a tree like `/sys`.
//!
//! What is missing is left out: a machine without RDMA has no `class/infiniband`. A file is read up to [`MAX_FILE`] bytes, a folder
//! up to [`MAX_ENTRIES`] names; links are followed only for where they lead, and what leads out of the tree has no PCI place.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Accelerator, Nic, NicKind, PciPath, Topology};

/// The most bytes of a file.
pub const MAX_FILE: u64 = 4096;
/// The most names in a folder.
pub const MAX_ENTRIES: usize = 4096;
/// The most steps of a PCI path.
const MAX_DEPTH: usize = 64;

/// A tree that can't be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// The root is no folder that can be read.
    #[error("{} can't be read: {reason}; give the root of a sysfs, such as /sys", .path.display())]
    Root {
        /// The root.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// It has neither of the folders that a sysfs has.
    #[error("{} has neither \"class\" nor \"bus\": it is no sysfs; give its root, such as /sys", .path.display())]
    NotSysfs {
        /// The root.
        path: PathBuf,
    },
    /// A folder has too many names.
    #[error("{} has more than {MAX_ENTRIES} names", .path.display())]
    TooMany {
        /// The folder.
        path: PathBuf,
    },
}

/// What the machine has, by its sysfs at `root`.
///
/// # Errors
/// If there is no sysfs, or a folder of it is absurdly full.
pub fn read(root: &Path) -> Result<Topology, TopologyError> {
    let of_root = |e: std::io::Error| TopologyError::Root { path: root.to_owned(), reason: e.to_string() };
    let root = fs::canonicalize(root).map_err(of_root)?;
    fs::read_dir(&root).map(drop).map_err(of_root)?;
    if !root.join("class").is_dir() && !root.join("bus").is_dir() {
        return Err(TopologyError::NotSysfs { path: root });
    }
    let mut topology = Topology::default();
    let pci = root.join("bus/pci/devices");
    for name in names(&pci)? {
        let folder = pci.join(&name);
        let Some(path) = pci_path(&root, &folder) else { continue };
        let numa = numa_node(&folder);
        if is_accelerator(&folder) {
            topology.accelerators.push(Accelerator { pci: path.clone(), numa });
        }
        topology.devices.push((path, numa));
    }
    let rdma = root.join("class/infiniband");
    for name in names(&rdma)? {
        let folder = rdma.join(&name);
        let device = folder.join("device");
        let up = names(&folder.join("ports"))?.iter().any(|port| {
            // "4: ACTIVE"
            text(&folder.join("ports").join(port).join("state")).is_some_and(|state| state.starts_with("4:"))
        });
        let aliases = names(&device.join("net"))?;
        topology.nics.push(nic(&root, name, NicKind::Rdma, &device, up, aliases));
    }
    let net = root.join("class/net");
    for name in names(&net)? {
        let folder = net.join(&name);
        let device = folder.join("device");
        // Some drivers never say "up", but "unknown", while they carry.
        let state = text(&folder.join("operstate"));
        let carries = text(&folder.join("carrier")).is_some_and(|carrier| carrier == "1");
        let up = state.as_deref() == Some("up") || (state.as_deref() == Some("unknown") && carries);
        let aliases = names(&device.join("infiniband"))?;
        topology.nics.push(nic(&root, name, NicKind::Interface, &device, up, aliases));
    }
    Ok(topology)
}

fn nic(root: &Path, name: String, kind: NicKind, device: &Path, up: bool, aliases: Vec<String>) -> Nic {
    Nic { name, kind, pci: pci_path(root, device), numa: numa_node(device), up, aliases }
}

/// The names in a folder, sorted; none if there is no folder.
fn names(folder: &Path) -> Result<Vec<String>, TopologyError> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries.flatten() {
        if names.len() == MAX_ENTRIES {
            return Err(TopologyError::TooMany { path: folder.to_owned() });
        }
        // Names of devices are ASCII; another could not be told to a library.
        names.extend(entry.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

/// The beginning of a file without white space around it.
fn text(path: &Path) -> Option<String> {
    // A pipe would wait for who never comes.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// -1 is how the kernel says that it doesn't know.
fn numa_node(device: &Path) -> Option<u32> {
    text(&device.join("numa_node"))?.parse().ok()
}

/// By the PCI class: display controllers (03) and processing accelerators (12).
fn is_accelerator(device: &Path) -> bool {
    text(&device.join("class")).is_some_and(|class| class.starts_with("0x03") || class.starts_with("0x12"))
}

/// The PCI steps of where a link leads.
fn pci_path(root: &Path, link: &Path) -> Option<PciPath> {
    let place = fs::canonicalize(link).ok()?;
    let below = place.strip_prefix(root.join("devices")).ok()?;
    let steps = below.components().filter_map(|c| c.as_os_str().to_str());
    let steps: Vec<String> = steps.filter(|s| is_root(s) || is_address(s)).take(MAX_DEPTH).map(str::to_owned).collect();
    steps.iter().any(|s| is_address(s)).then_some(PciPath(steps))
}

/// `pci0000:16`
fn is_root(step: &str) -> bool {
    step.strip_prefix("pci").and_then(|s| s.split_once(':')).is_some_and(|(domain, bus)| hex(domain, 4) && hex(bus, 2))
}

/// `0000:17:00.0`
fn is_address(step: &str) -> bool {
    let mut parts = step.split([':', '.']);
    let fits = [4, 2, 2, 1].iter().all(|&digits| parts.next().is_some_and(|part| hex(part, digits)));
    fits && parts.next().is_none()
}

fn hex(text: &str, least: usize) -> bool {
    text.len() >= least && text.len() <= 8 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_from_other_folders() {
        assert!(is_address("0000:17:00.0") && is_address("10000:e1:1f.7"));
        assert!(!is_address("0000:17:00") && !is_address("0000:17:00.0.1") && !is_address("mlx5_0") && !is_address(""));
        assert!(is_root("pci0000:16") && !is_root("pci0000") && !is_root("0000:16") && !is_root("pcix:yz"));
    }
}
