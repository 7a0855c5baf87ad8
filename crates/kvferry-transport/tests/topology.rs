//! Fake machines: trees like `/sys` in a folder.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use kvferry_transport::topology::{
    AssignError, Assignment, Distance, MAX_ENTRIES, NicKind, Place, Prefer, RankPlace, Rules, Topology, TopologyError,
    Why, assign, distance, read,
};
use tempfile::TempDir;

/// A tree that is being built.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for folder in ["class/net", "class/infiniband", "bus/pci/devices", "devices/virtual/net"] {
            fs::create_dir_all(tree.path().join(folder)).unwrap();
        }
        tree
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, path: impl AsRef<Path>, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A PCI device below these steps; its folder.
    fn pci(&self, steps: &[&str], class: &str, numa: &str) -> PathBuf {
        let folder = steps.iter().fold(PathBuf::from("devices"), |path, step| path.join(step));
        self.file(folder.join("class"), class);
        self.file(folder.join("numa_node"), numa);
        symlink(self.path().join(&folder), self.path().join("bus/pci/devices").join(steps.last().unwrap())).unwrap();
        folder
    }

    fn gpu(&self, steps: &[&str], numa: &str) {
        self.pci(steps, "0x030200\n", numa);
    }

    /// An RDMA device with its interface.
    fn rdma(&self, name: &str, interface: &str, steps: &[&str], numa: &str, up: bool) {
        let device = self.pci(steps, "0x020700\n", numa);
        let (state, operstate) = if up { ("4: ACTIVE\n", "up\n") } else { ("1: DOWN\n", "down\n") };
        let folder = device.join("infiniband").join(name);
        self.file(folder.join("ports/1/state"), state);
        symlink(self.path().join(&device), self.path().join(&folder).join("device")).unwrap();
        symlink(self.path().join(&folder), self.path().join("class/infiniband").join(name)).unwrap();
        let net = device.join("net").join(interface);
        self.file(net.join("operstate"), operstate);
        symlink(self.path().join(&device), self.path().join(&net).join("device")).unwrap();
        symlink(self.path().join(&net), self.path().join("class/net").join(interface)).unwrap();
    }

    /// An interface without a device.
    fn virtual_interface(&self, name: &str, state: &str) {
        let folder = PathBuf::from("devices/virtual/net").join(name);
        self.file(folder.join("operstate"), state);
        symlink(self.path().join(&folder), self.path().join("class/net").join(name)).unwrap();
    }

    fn read(&self) -> Topology {
        read(self.path()).unwrap()
    }
}

fn gpu_address(i: u32) -> String {
    format!("0000:{:02x}:00.0", 0x10 + i)
}

/// Eight GPUs on two nodes, each below a switch; so many NICs, spread over the switches in order.
fn machine(nics: u32) -> Tree {
    let tree = Tree::new();
    let root = |node: u32| format!("pci0000:{:02x}", 0x10 * (node + 1));
    let switch = |i: u32| format!("0000:{:02x}:01.0", 0x40 + i);
    for i in 0..8 {
        let node = i / 4;
        tree.gpu(&[&root(node), &switch(i), &gpu_address(i)], &format!("{node}\n"));
    }
    for n in 0..nics {
        let below = n * 8 / nics;
        let (node, address) = (below / 4, format!("0000:{:02x}:00.1", 0x80 + n));
        let steps = [&root(node)[..], &switch(below), &address];
        tree.rdma(&format!("mlx5_{n}"), &format!("eth{}", n + 1), &steps, &format!("{node}"), true);
    }
    // The public interface, which serves people and not caches.
    tree.rdma("mlx5_bond", "eth0", &[&root(0), "0000:f0:00.0"], "0", true);
    tree.virtual_interface("lo", "unknown\n");
    tree.virtual_interface("docker0", "up\n");
    tree
}

fn ranks() -> Vec<RankPlace> {
    (0..8).map(|rank| RankPlace { rank, place: Place::Pci(gpu_address(rank)) }).collect()
}

fn public_excluded() -> Rules {
    Rules { exclude: vec!["eth0".to_owned()], ..Rules::default() }
}

fn given(assignment: &Assignment) -> Vec<String> {
    assignment.choices.iter().map(|c| c.devices.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>().join("+")).collect()
}

#[test]
fn uc_04_eight_gpus_and_two_nics_have_four_each() {
    let topology = machine(2).read();
    assert_eq!((topology.accelerators.len(), topology.nics.len()), (8, 8));
    let assignment = assign(&topology, &ranks(), &public_excluded()).unwrap();
    println!("{assignment}");
    let (first, second) = ("mlx5_0", "mlx5_1");
    assert_eq!(given(&assignment), [first, first, first, first, second, second, second, second]);
    assert!(assignment.to_string().contains("rank 3: mlx5_0 (nearest: below one root complex"), "{assignment}");
}

#[test]
fn uc_04_eight_gpus_and_eight_nics_have_one_each() {
    let topology = machine(8).read();
    let assignment = assign(&topology, &ranks(), &public_excluded()).unwrap();
    assert_eq!(given(&assignment), (0..8).map(|i| format!("mlx5_{i}")).collect::<Vec<_>>());
    assert!(assignment.choices.iter().all(|c| c.devices[0].1 == Why::Nearest(Distance::Bridge(2))), "{assignment}");
    // Two each, if that is wanted: the nearest first.
    let two = Rules { per_rank: 2, ..public_excluded() };
    let assignment = assign(&topology, &ranks(), &two).unwrap();
    for choice in &assignment.choices {
        assert_eq!((choice.devices.len(), choice.devices[0].0.clone()), (2, format!("mlx5_{}", choice.rank)));
    }
    let mut all: Vec<_> = assignment.choices.iter().flat_map(|c| c.devices.iter().map(|(n, _)| n)).collect();
    all.sort();
    assert!(all.chunks(2).all(|pair| pair[0] == pair[1]), "each device has two ranks: {assignment}");
    // More than there are: all of them.
    let many = Rules { per_rank: 99, ..public_excluded() };
    assert!(assign(&topology, &ranks(), &many).unwrap().choices.iter().all(|c| c.devices.len() == 8));
}

#[test]
fn uc_04_an_explicit_list_wins_and_counts() {
    let topology = machine(2).read();
    let mut rules = public_excluded();
    rules.explicit.insert(0, vec!["mlx5_1".to_owned()]);
    rules.explicit.insert(1, vec!["mlx5_1".to_owned(), "mlx5_0".to_owned()]);
    let assignment = assign(&topology, &ranks(), &rules).unwrap();
    assert_eq!(given(&assignment)[..2], ["mlx5_1", "mlx5_1+mlx5_0"]);
    assert_eq!(assignment.devices(1), ["mlx5_1", "mlx5_0"]);
    assert!(assignment.to_string().contains("rank 0: mlx5_1 (as configured)"), "{assignment}");
    let of = |name: &str| given(&assignment).iter().filter(|d| d.contains(name)).count();
    assert!(of("mlx5_0").abs_diff(of("mlx5_1")) <= 1, "{assignment}");
}

#[test]
fn uc_04_an_excluded_interface_is_never_used() {
    let topology = machine(2).read();
    // Under either name, by a pattern, and whatever is left.
    for pattern in ["eth0", "mlx5_bond", "mlx5_b*"] {
        let rules = Rules { exclude: vec![pattern.to_owned()], ..Rules::default() };
        let assignment = assign(&topology, &ranks(), &rules).unwrap();
        assert!(!assignment.to_string().contains("bond"), "{assignment}");
        let interfaces = Rules { kind: Some(NicKind::Interface), ..rules };
        let assignment = assign(&topology, &ranks(), &interfaces).unwrap();
        assert!(!given(&assignment).contains(&"eth0".to_owned()), "{assignment}");
        assert!(given(&assignment).contains(&"eth1".to_owned()), "{assignment}");
    }
    let mut rules = public_excluded();
    rules.explicit.insert(0, vec!["mlx5_bond".to_owned()]);
    let error = assign(&topology, &ranks(), &rules).unwrap_err();
    assert_eq!(error, AssignError::Excluded { rank: 0, device: "mlx5_bond".into(), pattern: "eth0".into() });
    let none = Rules { exclude: vec!["mlx5*".to_owned()], kind: Some(NicKind::Rdma), ..Rules::default() };
    let text = assign(&topology, &ranks(), &none).unwrap_err().to_string();
    assert!(text.contains("mlx5_0 is excluded by \"mlx5*\""), "{text}");
    // All that have a device are excluded by their RDMA names: what is left is virtual.
    let none = Rules { exclude: vec!["mlx5*".to_owned()], ..Rules::default() };
    let text = assign(&topology, &ranks(), &none).unwrap_err().to_string();
    assert!(text.contains("docker0 is virtual"), "{text}");
}

#[test]
fn a_far_device_of_ones_own_or_a_near_one_shared() {
    let tree = Tree::new();
    for i in 0..4 {
        tree.gpu(&["pci0000:10", "0000:10:01.0", &gpu_address(i)], "0");
    }
    tree.rdma("near", "ib0", &["pci0000:10", "0000:10:01.0", "0000:80:00.0"], "0", true);
    tree.rdma("far", "ib1", &["pci0000:90", "0000:90:00.0"], "1", true);
    tree.rdma("down", "ib2", &["pci0000:10", "0000:10:01.0", "0000:81:00.0"], "0", false);
    let topology = tree.read();
    let ranks = &ranks()[..4];
    let even = assign(&topology, ranks, &Rules::default()).unwrap();
    assert_eq!(given(&even), ["near", "near", "far", "far"]);
    assert!(
        even.to_string().contains("far (on another NUMA node; near is nearer and has its share of ranks)"),
        "{even}"
    );
    let near = assign(&topology, ranks, &Rules { prefer: Prefer::Near, ..Rules::default() }).unwrap();
    assert_eq!(given(&near), ["near"; 4]);
    let mut rules = Rules::default();
    rules.explicit.insert(0, vec!["down".to_owned()]);
    assert!(matches!(assign(&topology, ranks, &rules), Err(AssignError::Down { rank: 0, .. })));
    rules.explicit.insert(0, vec!["mlx5_9".to_owned()]);
    let text = assign(&topology, ranks, &rules).unwrap_err().to_string();
    assert!(text.contains("\"mlx5_9\"") && text.contains("near"), "{text}");
    for bad in [vec![], vec!["near".to_owned(), "near".to_owned()]] {
        rules.explicit.insert(0, bad);
        assert!(matches!(assign(&topology, ranks, &rules), Err(AssignError::List { rank: 0, .. })));
    }
    let twice = [ranks[0].clone(), ranks[0].clone()];
    assert_eq!(assign(&topology, &twice, &Rules::default()), Err(AssignError::RankTwice { rank: 0 }));
}

#[test]
fn distances_by_bridge_root_and_node() {
    let tree = machine(2);
    let topology = tree.read();
    let from = |place: Place| distance(&topology, &place, topology.nic("mlx5_0").unwrap());
    assert_eq!(from(Place::Pci(gpu_address(0))), Distance::Bridge(2));
    assert_eq!(from(Place::Pci(gpu_address(1))), Distance::Root(4));
    assert_eq!(from(Place::Pci(gpu_address(5))), Distance::Far);
    assert_eq!((from(Place::Numa(0)), from(Place::Numa(1))), (Distance::Node, Distance::Far));
    assert_eq!((from(Place::Unknown), from(Place::Pci("nowhere".into()))), (Distance::Unknown, Distance::Unknown));
    assert!(Distance::Bridge(9) < Distance::Root(0) && Distance::Root(9) < Distance::Node);
    assert!(Distance::Node < Distance::Far && Distance::Far < Distance::Unknown);
    // Nobody knows where they are: shared out all the same.
    let unknown: Vec<_> = (0..8).map(|rank| RankPlace { rank, place: Place::Unknown }).collect();
    let assignment = assign(&topology, &unknown, &public_excluded()).unwrap();
    assert_eq!(given(&assignment).iter().filter(|d| *d == "mlx5_0").count(), 4, "{assignment}");
}

#[test]
fn what_files_say_is_at_most_left_out() {
    let tree = Tree::new();
    let device = tree.pci(&["pci0000:00", "0000:00:05.0"], "0x0302", "-1\n");
    for (name, text) in [("a", ""), ("b", "4294967296"), ("c", "-7"), ("d", "zero"), ("e", &"9".repeat(100_000))] {
        tree.file(format!("devices/pci0000:00/{name}/numa_node"), text);
        tree.file(format!("devices/pci0000:00/{name}/net/{name}/operstate"), &text.repeat(3));
        let (folder, link) = (format!("devices/pci0000:00/{name}/net/{name}"), format!("class/net/{name}"));
        symlink(tree.path().join(format!("devices/pci0000:00/{name}")), tree.path().join(&folder).join("device"))
            .unwrap();
        symlink(tree.path().join(&folder), tree.path().join(link)).unwrap();
    }
    // Folders for files, links to nowhere, to themselves, and out of the tree; names that are no text; bytes that are none.
    fs::create_dir_all(tree.path().join("class/net/folder/operstate")).unwrap();
    symlink("nowhere", tree.path().join("class/net/dangling")).unwrap();
    symlink("loop", tree.path().join("class/net/loop")).unwrap();
    fs::create_dir_all(tree.path().join("class/net/escapes")).unwrap();
    symlink("/proc/self", tree.path().join("class/net/escapes/device")).unwrap();
    let odd = std::ffi::OsString::from_vec(vec![0xff, 0xfe]);
    fs::create_dir_all(tree.path().join("class/net").join(odd)).unwrap();
    fs::write(tree.path().join(&device).join("class"), [0x30, 0x78, 0xff, 0xfe]).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, tree.path().join("class/net/escapes/operstate"), rustix::fs::Mode::RWXU)
        .unwrap();
    let topology = tree.read();
    assert_eq!(topology.accelerators, []);
    assert_eq!(topology.devices.len(), 1);
    assert!(topology.nics.iter().all(|nic| nic.numa.is_none() && !nic.up && nic.pci.is_none()), "{:#?}", topology.nics);
    assert_eq!(topology.nics.len(), 9);
    let text = assign(&topology, &ranks(), &Rules::default()).unwrap_err().to_string();
    assert!(text.contains("folder is virtual"), "{text}");
}

#[test]
fn what_is_no_sysfs_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(read(empty.path()), Err(TopologyError::NotSysfs { .. })));
    let gone = read(&empty.path().join("nothing")).unwrap_err();
    assert!(gone.to_string().contains("such as /sys"), "{gone}");
    fs::write(empty.path().join("file"), "").unwrap();
    assert!(matches!(read(&empty.path().join("file")), Err(TopologyError::Root { .. })));
    let tree = Tree::new();
    for i in 0..=MAX_ENTRIES {
        fs::create_dir(tree.path().join(format!("class/net/n{i}"))).unwrap();
    }
    assert!(matches!(read(tree.path()), Err(TopologyError::TooMany { .. })));
    let topology = Tree::new().read();
    assert_eq!(topology, Topology::default());
    let none = assign(&topology, &ranks(), &Rules::default()).unwrap_err();
    assert_eq!(none.to_string(), "no network device can be given: there is none");
    assert_eq!(assign(&topology, &[], &Rules::default()), Ok(Assignment::default()));
}

/// Whatever this machine is, it can be read.
#[test]
fn this_machine() {
    match read("/sys".as_ref()) {
        Ok(topology) => println!("{topology:#?}"),
        Err(error) => println!("{error}"),
    }
}
