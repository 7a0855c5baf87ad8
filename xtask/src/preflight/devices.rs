//! The network devices of this host, and which of them are near a place.

use std::path::Path;

use kvferry_transport::topology::{self, Nic, NicKind, Place, RankPlace, Rules, Topology};
use serde_json::{Value, json};

use crate::show;

/// Where Linux tells of devices.
const SYSFS: &str = "/sys";

/// What this host has.
pub(super) fn read() -> anyhow::Result<Topology> {
    Ok(topology::read(Path::new(SYSFS))?)
}

/// The devices for memory at `near`, by distance, as UCX names them, and in words why.
pub(super) fn near(host: &Topology, near: &Place, exclude: &[String]) -> anyhow::Result<(Vec<String>, String)> {
    let ranks = [RankPlace { rank: 0, place: near.clone() }];
    let rules = Rules { exclude: exclude.to_vec(), ..Rules::default() };
    let assignment = topology::assign(host, &ranks, &rules)?;
    let names = assignment.devices(0).into_iter().map(|name| match host.nic(name) {
        // A port belongs to the name of an RDMA device; those with more than one are named by hand.
        Some(nic) if nic.kind == NicKind::Rdma => format!("{name}:1"),
        _ => name.to_owned(),
    });
    Ok((names.collect(), assignment.to_string()))
}

/// A place as it stands on a command line: a PCI address, or `numa:1`.
pub(super) fn place(text: &str) -> Result<Place, String> {
    let wrong = || format!("{text} is neither a PCI address (0000:17:00.0) nor a NUMA node (numa:1)");
    if let Some(node) = text.strip_prefix("numa:") {
        return node.parse().map(Place::Numa).map_err(|_| wrong());
    }
    let is_address = text.len() == 12 && text.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.');
    if is_address { Ok(Place::Pci(text.to_ascii_lowercase())) } else { Err(wrong()) }
}

/// The devices in a table.
pub(super) fn text(host: &Topology) -> String {
    let row = |nic: &Nic| {
        let pci = nic.pci.as_ref().and_then(|p| p.address()).unwrap_or("virtual").to_owned();
        let node = nic.numa.map_or("-".to_owned(), |n| n.to_string());
        vec![
            nic.name.clone(),
            kind(nic).into(),
            if nic.up { "up".into() } else { "down".into() },
            pci,
            node,
            nic.aliases.join(" "),
        ]
    };
    let rows: Vec<Vec<String>> = host.nics.iter().map(row).collect();
    show::table("", &["device", "kind", "link", "place", "NUMA node", "also"], &rows)
}

/// The same for programs.
pub(super) fn json(host: &Topology) -> Value {
    let one = |nic: &Nic| {
        json!({
            "name": nic.name, "kind": kind(nic), "up": nic.up, "numa": nic.numa, "aliases": nic.aliases,
            "pci": nic.pci.as_ref().and_then(|p| p.address()),
        })
    };
    host.nics.iter().map(one).collect()
}

fn kind(nic: &Nic) -> &'static str {
    match nic.kind {
        NicKind::Rdma => "rdma",
        NicKind::Interface => "interface",
    }
}

#[cfg(test)]
mod tests {
    use kvferry_transport::topology::PciPath;

    use super::*;

    fn nic(name: &str, kind: NicKind, root: &str, numa: u32) -> Nic {
        let pci = Some(PciPath(vec![root.to_owned(), format!("0000:{numa}1:00.0")]));
        Nic { name: name.into(), kind, pci, numa: Some(numa), up: true, aliases: Vec::new() }
    }

    #[test]
    fn the_nearest_device_is_named_as_ucx_does() {
        let nics = vec![nic("mlx5_0", NicKind::Rdma, "pci0000:00", 0), nic("mlx5_1", NicKind::Rdma, "pci0000:80", 1)];
        let host = Topology { nics, ..Topology::default() };
        let (names, why) = near(&host, &Place::Numa(1), &[]).unwrap();
        assert_eq!(names, ["mlx5_1:1"]);
        assert!(why.contains("mlx5_1"), "{why}");
        assert_eq!(near(&host, &Place::Numa(1), &["mlx5_1".into()]).unwrap().0, ["mlx5_0:1"]);
        assert!(near(&host, &Place::Numa(1), &["mlx5_*".into()]).is_err());
        assert!(text(&host).contains("mlx5_1  rdma  up"), "{}", text(&host));
        assert_eq!(json(&host)[0]["name"], "mlx5_0");
    }

    #[test]
    fn places_are_addresses_or_nodes() {
        assert_eq!(place("0000:1A:00.0"), Ok(Place::Pci("0000:1a:00.0".into())));
        assert_eq!(place("numa:3"), Ok(Place::Numa(3)));
        for wrong in ["numa:x", "17:00.0", "gpu0", ""] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
