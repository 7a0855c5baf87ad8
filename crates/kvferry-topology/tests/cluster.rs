//! Clusters: what presets say, and which links are between two GPUs, for presets and for clusters drawn by chance.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation, reason = "a failed test panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use kvferry_sim::rng::Rng;
use kvferry_topology::cluster::{Cluster, Gpu, Link, LinkKind, Route};

/// What is joined by links, as the names of links tell it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Gpu(u32, u32),
    NvSwitch(u32),
    Bus(u32),
    Leaf(u32),
    Spine,
}

/// What a test knows of a cluster beside the cluster itself.
#[derive(Clone, Debug)]
struct Known {
    /// Cards of a leaf's group, by node: `"switch"`, `"rails"` or `"leaves"`.
    fabric: &'static str,
    nodes_per_leaf: u32,
    oversubscription: u32,
    /// The number of the NVLink domain of each node; `None` where it has no NVLink.
    domains: Vec<Option<u32>>,
    /// Whether cards are reached over a bus.
    pcie: Vec<bool>,
    nics: Vec<u32>,
}

impl Known {
    fn leaf(&self, node: u32, nic: u32) -> u32 {
        let group = node / self.nodes_per_leaf;
        let rails = self.nics.iter().copied().max().unwrap();
        match self.fabric {
            "switch" => 0,
            "leaves" => group,
            _ => group * rails + nic,
        }
    }

    /// Where a link begins and ends, by its name alone; `at` is where the route is before it.
    fn ends(&self, name: &str, at: Place) -> (Place, Place) {
        let parts: Vec<&str> = name.split('/').collect();
        let number = |text: &str, prefix: &str| text.strip_prefix(prefix).unwrap().parse::<u32>().unwrap();
        if let [leaf, way] = parts[..]
            && leaf.starts_with("leaf")
        {
            let leaf = Place::Leaf(number(leaf, "leaf"));
            return if way == "up" { (leaf, Place::Spine) } else { (Place::Spine, leaf) };
        }
        let node = number(parts[0], "node");
        if parts[1] == "memory" {
            // Whichever rank of the machine.
            return (at, Place::Bus(node));
        }
        if let Some(nic) = parts[1].strip_prefix("nic") {
            let leaf = Place::Leaf(self.leaf(node, nic.parse().unwrap()));
            return if parts[2] == "out" { (Place::Bus(node), leaf) } else { (leaf, Place::Bus(node)) };
        }
        let gpu = Place::Gpu(node, number(parts[1], "gpu"));
        match parts[2..] {
            ["copy"] => (gpu, gpu),
            ["nvlink", "out"] => (gpu, Place::NvSwitch(self.domains[node as usize].unwrap())),
            ["nvlink", "in"] => (Place::NvSwitch(self.domains[node as usize].unwrap()), gpu),
            ["pcie", "out"] => (gpu, Place::Bus(node)),
            ["pcie", "in"] => (Place::Bus(node), gpu),
            _ => panic!("{name} carries no bytes"),
        }
    }

    /// Whether two places are one: without a bus of its own a GPU is where its machine's cards are.
    fn same(&self, a: Place, b: Place) -> bool {
        let bus =
            |gpu, bus| matches!((gpu, bus), (Place::Gpu(n, _), Place::Bus(m)) if n == m && !self.pcie[m as usize]);
        a == b || bus(a, b) || bus(b, a)
    }

    fn check(&self, cluster: &Cluster, src: Gpu, dst: Gpu, route: &Route) {
        let names: Vec<String> = route.links.iter().map(|&l| cluster.link_name(l)).collect();
        let mut at = Place::Gpu(src.node, src.index);
        for (id, name) in route.links.iter().zip(&names) {
            let (begin, end) = self.ends(name, at);
            assert!(self.same(at, begin), "{src:?} to {dst:?}: {name} of {names:?} doesn't begin at {at:?}");
            at = end;
            let link = cluster.link(*id).unwrap();
            assert!(link.capacity() > 0.0 && link.capacity().is_finite(), "{name}");
            let touched = [None, Some(src.node), Some(dst.node)];
            assert!(touched.contains(&link.node()), "{src:?} to {dst:?}: {name} is somebody else's");
            assert_ne!(link.kind(), LinkKind::Work);
        }
        let arrived = self.same(at, Place::Gpu(dst.node, dst.index));
        assert!(arrived || at == Place::Bus(dst.node), "{src:?} to {dst:?}: {names:?} ends at {at:?}");
        for (list, gpu) in [(&route.work, dst), (&route.push_work, src)] {
            for &id in list {
                let link = cluster.link(id).unwrap();
                assert_eq!((link.kind(), link.node()), (LinkKind::Work, Some(gpu.node)), "{}", link.name());
            }
        }
        assert_eq!(route.push_latency() * 2, route.latency);
        assert!(route.cap > 0.0 && route.share > 0.0);
    }
}

/// What the same way back would be called.
fn mirrored(name: &str) -> String {
    let (front, way) = name.rsplit_once('/').unwrap();
    let way = match way {
        "out" => "in",
        "in" => "out",
        "up" => "down",
        "down" => "up",
        other => other,
    };
    format!("{front}/{way}")
}

/// Everything that holds of all routes of a cluster.
fn check_all(cluster: &Cluster, known: &Known, pairs: impl IntoIterator<Item = (u32, u32, u32)>) {
    for (a, b, rails) in pairs {
        let (src, dst) = (cluster.gpu(a), cluster.gpu(b));
        let routes = cluster.routes(src, dst, rails);
        assert!(!routes.is_empty(), "{src:?} to {dst:?}");
        let sum: f64 = routes.iter().map(|r| r.share).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{sum}");
        let fewer = known.nics[src.node as usize].min(known.nics[dst.node as usize]).max(1);
        assert!(routes.len() as u32 <= rails.max(1).min(fewer));
        let back = cluster.routes(dst, src, rails);
        assert_eq!(routes.len(), back.len());
        let mut outs = BTreeSet::new();
        for (there, back) in routes.iter().zip(&back) {
            known.check(cluster, src, dst, there);
            let names = |r: &Route| r.links.iter().map(|&l| cluster.link_name(l)).collect::<Vec<_>>();
            let mut expected: Vec<String> = names(there).iter().map(|n| mirrored(n)).collect();
            expected.reverse();
            assert_eq!(names(back), expected);
            assert_eq!((back.latency, back.per_message), (there.latency, there.per_message));
            assert_eq!((&*back.push_work, &*back.work), (&*there.work, &*there.push_work));
            outs.insert(there.links.to_vec());
        }
        assert_eq!(outs.len(), routes.len(), "two rails are the same");
        // The spine is crossed only between leaves.
        for route in &routes {
            let leaves: BTreeSet<u32> =
                route.links.iter().filter_map(|&l| leaf_of(&cluster.link_name(l), known)).collect();
            let crosses = route.links.iter().any(|&l| cluster.link(l).unwrap().kind() == LinkKind::Uplink);
            assert_eq!(crosses, leaves.len() > 1, "{leaves:?}");
        }
    }
}

/// A leaf's uplinks have as much as its cards, over what the file says.
fn check_uplinks(cluster: &Cluster, known: &Known) {
    let mut below: BTreeMap<u32, f64> = BTreeMap::new();
    for link in cluster.links().iter().filter(|l| l.kind() == LinkKind::Nic && l.name().ends_with("/out")) {
        *below.entry(leaf_of(&link.name(), known).unwrap()).or_default() += link.capacity();
    }
    for link in cluster.links().iter().filter(|l| l.kind() == LinkKind::Uplink) {
        let name = link.name();
        let leaf = name.split('/').next().unwrap().strip_prefix("leaf").unwrap().parse().unwrap();
        // One byte a second where there is no card.
        let expected = below.get(&leaf).map_or(1.0, |sum| sum / f64::from(known.oversubscription));
        assert!((link.capacity() / expected - 1.0).abs() < 1e-9, "{name}: {} and not {expected}", link.capacity());
    }
}

/// The leaf that a card's link ends at.
fn leaf_of(name: &str, known: &Known) -> Option<u32> {
    let (node, rest) = name.strip_prefix("node")?.split_once('/')?;
    let (nic, _) = rest.strip_prefix("nic")?.split_once('/')?;
    Some(known.leaf(node.parse().ok()?, nic.parse().ok()?))
}

fn known(preset: &str, nodes: u32) -> Known {
    let (fabric, nodes_per_leaf, domain, pcie, nics) = match preset {
        "hgx-h100" | "hgx-h200" => ("rails", 32, Some(1), true, 8),
        "gb200-nvl72" => ("rails", 18, Some(18), true, 4),
        "a100-4nic" => ("leaves", 5, Some(1), true, 4),
        "tcp-pair" | "tcp-pair-8" => ("switch", 1, None, true, 1),
        "local" => ("switch", 1, None, false, 0),
        other => panic!("what is {other}?"),
    };
    let n = nodes as usize;
    let domains = (0..nodes).map(|i| domain.map(|d: u32| i / d)).collect();
    Known { fabric, nodes_per_leaf, oversubscription: 1, domains, pcie: vec![pcie; n], nics: vec![nics; n] }
}

#[test]
fn every_preset_reads_and_all_its_routes_hold_together() {
    for name in Cluster::preset_names() {
        // Enough for a second leaf or domain where there are such.
        let nodes = match name {
            "local" => 1,
            "gb200-nvl72" => 19,
            "hgx-h100" | "hgx-h200" => 33,
            _ => 6,
        };
        let cluster = Cluster::preset(name, nodes).unwrap();
        assert_eq!(cluster.name(), name);
        assert_eq!(cluster.nodes().len() as u32, nodes);
        let as_file = Cluster::from_toml("mine.toml", &format!("preset = {name:?}\nnodes = {nodes}")).unwrap();
        assert_eq!(as_file, cluster);
        // The preset's own text is a file too.
        Cluster::from_toml(name, Cluster::preset_text(name).unwrap()).unwrap();
        let model = cluster.gpu_model(nodes - 1);
        assert!(model.hbm_gib > 1.0 && model.hbm_gb_s > 1.0 && model.bf16_tflops >= 1.0, "{model:?}");
        // From the first machines to all.
        let (all, few) = (cluster.gpus(), cluster.nodes()[0].gpus);
        let pairs =
            (0..few).flat_map(|a| (0..all).map(move |b| (a, b))).flat_map(|(a, b)| [(a, b, 1), (a, b, 2), (a, b, 99)]);
        check_all(&cluster, &known(name, nodes), pairs);
    }
}

#[test]
fn names_are_unique_and_say_what_a_link_is() {
    for name in Cluster::preset_names() {
        let cluster = Cluster::preset(name, if name == "local" { 1 } else { 3 }).unwrap();
        let mut kinds: BTreeMap<String, LinkKind> = BTreeMap::new();
        for link in cluster.links() {
            assert!(kinds.insert(link.name(), link.kind()).is_none(), "{} twice", link.name());
        }
        for (name, kind) in kinds {
            let expected: &[&str] = match kind {
                LinkKind::NvLink => &["/nvlink/out", "/nvlink/in"],
                LinkKind::Pcie => &["/pcie/out", "/pcie/in"],
                LinkKind::Nic | LinkKind::Ethernet => &["/out", "/in"],
                LinkKind::Uplink => &["/up", "/down"],
                LinkKind::Host => &["/copy", "/memory"],
                LinkKind::Work => &["/work"],
                _ => panic!("{name}: {kind:?}"),
            };
            assert!(expected.iter().any(|end| name.ends_with(end)), "{name}: {kind:?}");
        }
    }
}

fn names(cluster: &Cluster, a: u32, b: u32, rails: u32) -> Vec<Vec<String>> {
    let routes = cluster.routes(cluster.gpu(a), cluster.gpu(b), rails);
    routes.iter().map(|r| r.links.iter().map(|&l| cluster.link_name(l)).collect()).collect()
}

#[test]
fn the_same_rail_crosses_no_uplink_and_another_one_does() {
    let cluster = Cluster::preset("hgx-h100", 64).unwrap();
    let same = names(&cluster, 3, 8 + 3, 1);
    assert_eq!(same, [["node0/gpu3/pcie/out", "node0/nic3/out", "node1/nic3/in", "node1/gpu3/pcie/in"]]);
    let other = names(&cluster, 3, 8 + 5, 1);
    assert_eq!(other[0][2..4], ["leaf3/up", "leaf5/down"]);
    // The 33rd machine is of the next group, whose leaf of the same rail is another.
    let far = names(&cluster, 3, 32 * 8 + 3, 1);
    assert_eq!(far[0][2..4], ["leaf3/up", "leaf11/down"]);
    let [near, over] = [8 + 3, 8 + 5].map(|b| cluster.routes(cluster.gpu(3), cluster.gpu(b), 1)[0].latency);
    // Two switches more, there and back.
    assert_eq!((over - near).as_nanos(), 4 * 330);
}

#[test]
fn gpus_that_share_a_card_share_its_links_and_rails_spread() {
    let cluster = Cluster::preset("a100-4nic", 2).unwrap();
    let cards = |gpu: u32, rails| -> Vec<String> {
        names(&cluster, gpu, 8 + gpu, rails).iter().map(|n| n[1].clone()).collect()
    };
    assert_eq!(cards(0, 1), ["node0/nic0/out"]);
    assert_eq!(cards(1, 1), ["node0/nic0/out"]);
    assert_eq!(cards(7, 1), ["node0/nic3/out"]);
    assert_eq!(cards(1, 2), ["node0/nic0/out", "node0/nic1/out"]);
    assert_eq!(cards(7, 4), ["node0/nic3/out", "node0/nic2/out", "node0/nic1/out", "node0/nic0/out"]);
    assert_eq!(cards(7, 0), cards(7, 1));
    let routes = cluster.routes(cluster.gpu(0), cluster.gpu(8), 4);
    assert!(routes.iter().all(|r| r.share == 0.25));
}

#[test]
fn an_nvlink_domain_spans_machines() {
    let cluster = Cluster::preset("gb200-nvl72", 36).unwrap();
    assert_eq!(names(&cluster, 0, 71, 4), [["node0/gpu0/nvlink/out", "node17/gpu3/nvlink/in"]]);
    assert_eq!(
        names(&cluster, 0, 72, 1),
        [["node0/gpu0/pcie/out", "node0/nic0/out", "leaf0/up", "leaf4/down", "node18/nic0/in", "node18/gpu0/pcie/in"]]
    );
}

#[test]
fn within_a_machine_there_is_nvlink_or_memory_or_the_bus_or_a_copy() {
    let h100 = Cluster::preset("hgx-h100", 1).unwrap();
    assert_eq!(names(&h100, 0, 5, 8), [["node0/gpu0/nvlink/out", "node0/gpu5/nvlink/in"]]);
    assert_eq!(names(&h100, 5, 5, 8), [["node0/gpu5/copy"]]);
    let copy = &h100.routes(h100.gpu(5), h100.gpu(5), 1)[0];
    let link = h100.link(copy.links[0]).unwrap();
    assert_eq!((link.kind(), link.capacity()), (LinkKind::Host, 3350e9 / 2.0));
    assert!(copy.work.is_empty() && copy.latency.is_zero());
    let tcp = Cluster::preset("tcp-pair-8", 2).unwrap();
    assert_eq!(names(&tcp, 0, 5, 1), [["node0/gpu0/pcie/out", "node0/gpu5/pcie/in"]]);
    let local = Cluster::preset("local", 1).unwrap();
    assert_eq!(names(&local, 0, 63, 1), [["node0/memory"]]);
    // One process copies at its own speed, whatever the memory has left.
    assert_eq!(local.routes(local.gpu(0), local.gpu(1), 1)[0].cap, 10e9);
}

#[test]
fn what_does_not_exist_has_no_routes() {
    let cluster = Cluster::preset("hgx-h100", 2).unwrap();
    let beyond = cluster.gpu(16);
    assert!(cluster.routes(cluster.gpu(0), beyond, 1).is_empty());
    assert!(cluster.routes(beyond, beyond, 1).is_empty());
    assert!(cluster.routes(Gpu { node: 0, index: 8 }, cluster.gpu(0), 1).is_empty());
    assert_eq!(cluster.gpu(15), Gpu { node: 1, index: 7 });
    assert_eq!(cluster.gpu_model(2).hbm_gib, 0.0);
}

#[test]
fn oversubscription_divides_the_uplinks() {
    let capacity = |ratio: u32| {
        let text = format!("preset = \"hgx-h100\"\nnodes = 40\n[fabric]\noversubscription = {ratio}");
        let cluster = Cluster::from_toml("f", &text).unwrap();
        let up: Vec<f64> =
            cluster.links().iter().filter(|l| l.kind() == LinkKind::Uplink).map(Link::capacity).collect();
        let card = cluster.links().iter().find(|l| l.kind() == LinkKind::Nic).unwrap().capacity();
        (up, card)
    };
    let ((full, card), (half, same)) = (capacity(1), capacity(2));
    assert_eq!(card, same);
    assert_eq!(full.len(), 2 * 16);
    // Eight leaves of 32 machines, then eight of the eight that are left.
    assert!(full[..16].iter().all(|c| (c - 32.0 * card).abs() < 1.0));
    assert!(full[16..].iter().all(|c| (c - 8.0 * card).abs() < 1.0));
    assert!(full.iter().zip(&half).all(|(f, h)| (f / h - 2.0).abs() < 1e-9));
}

/// A cluster by chance, and what is known of it.
fn drawn(rng: &mut Rng) -> (String, Known) {
    let (mut text, mut first) = (String::new(), 0);
    let fabric = *rng.pick(&["switch", "rails", "leaves"]).unwrap();
    let nodes_per_leaf = rng.small(1, 5);
    let oversubscription = rng.small(1, 4);
    writeln!(
        text,
        "[fabric]\nkind = {fabric:?}\nnodes_per_leaf = {nodes_per_leaf}\noversubscription = {oversubscription}"
    )
    .unwrap();
    let mut known =
        Known { fabric, nodes_per_leaf, oversubscription, domains: Vec::new(), pcie: Vec::new(), nics: Vec::new() };
    for _ in 0..rng.small(1, 3) {
        let (nodes, gpus, nics) = (rng.small(1, 6), rng.small(1, 9), rng.small(1, 9));
        let (nvlink, pcie, host) = (rng.chance(6000), rng.chance(6000), rng.chance(3000));
        let pcie = pcie || !(nvlink || host);
        let together = rng.small(1, 4);
        let mut line = |l: &str| writeln!(text, "{l}").unwrap();
        line(&format!("[[machine]]\nnodes = {nodes}"));
        line(&format!("gpu = {{ per_node = {gpus}, hbm_gib = 80, hbm_gb_s = 3000, bf16_tflops = 900 }}"));
        line(&format!("nic = {{ per_node = {nics}, gbit_s = 200, latency_us = 2, descriptor_us = {} }}", rng.below(2)));
        let lane = |name: &str| format!("{name} = {{ gb_s = 100, latency_us = 1, descriptor_us = 1 }}");
        if nvlink {
            line(&format!("nvlink = {{ gb_s = 400, latency_us = 1, domain_nodes = {together} }}"));
        }
        for (has, name) in [(pcie, "pcie"), (host, "host")] {
            if has {
                line(&lane(name));
            }
        }
        for i in 0..nodes {
            known.domains.push(nvlink.then_some(first + i / together));
            known.pcie.push(pcie);
            known.nics.push(nics);
        }
        first += 100;
    }
    (text, known)
}

#[test]
fn routes_of_clusters_by_chance_hold_together() {
    for seed in 0..300 {
        let mut rng = Rng::of(&[seed]);
        let (text, known) = drawn(&mut rng);
        let cluster = Cluster::from_toml("drawn", &text).unwrap_or_else(|e| panic!("{text}\n{e}"));
        let all = cluster.gpus();
        let mut counted = 0;
        for (i, node) in cluster.nodes().iter().enumerate() {
            assert_eq!((node.index as usize, node.first_gpu), (i, counted));
            assert_eq!(node.nics, known.nics[i]);
            for index in 0..node.gpus {
                assert_eq!(cluster.gpu(counted), Gpu { node: node.index, index });
                counted += 1;
            }
        }
        assert_eq!(counted, all);
        let mut unique = BTreeSet::new();
        assert!(cluster.links().iter().all(|l| unique.insert(l.name())), "{text}");
        check_uplinks(&cluster, &known);
        let pairs: Vec<_> = (0..60).map(|_| (rng.small(0, all - 1), rng.small(0, all - 1), rng.small(0, 10))).collect();
        check_all(&cluster, &known, pairs);
    }
}

#[test]
fn a_link_says_of_itself_what_routes_say_of_it() {
    // Numbers of links are computed from their owners', the list is built in a row: the first route link is the source's.
    let mut rng = Rng::of(&[77]);
    for _ in 0..200 {
        let (text, _) = drawn(&mut rng);
        let cluster = Cluster::from_toml("drawn", &text).unwrap();
        let (a, b) = (cluster.gpu(rng.small(0, cluster.gpus() - 1)), cluster.gpu(rng.small(0, cluster.gpus() - 1)));
        let route = &cluster.routes(a, b, 1)[0];
        let first = cluster.link(route.links[0]).unwrap();
        assert_eq!(first.node(), Some(a.node));
        let mine = format!("node{}/gpu{}/", a.node, a.index);
        let shared = [format!("node{}/nic", a.node), format!("node{}/memory", a.node)];
        assert!(
            first.name().starts_with(&mine) || shared.iter().any(|s| first.name().starts_with(s)),
            "{}",
            first.name()
        );
    }
}

#[test]
fn a_million_gpus_fit() {
    assert_eq!(size_of::<Link>(), 16);
    let cluster = Cluster::from_toml("f", "preset = \"hgx-h100\"\nnodes = 65536\ngpu = { per_node = 16 }").unwrap();
    assert_eq!(cluster.gpus(), 1 << 20);
    let last = cluster.gpus() - 1;
    assert_eq!(names(&cluster, 0, last, 1)[0].len(), 6);
    assert_eq!(names(&cluster, 0, last, 1)[0][5], "node65535/gpu15/pcie/in");
}

#[test]
fn control_messages_take_what_the_file_says() {
    let text = "preset = \"hgx-h100\"\ncontrol = { same_node_us = 7, other_node_us = 9.5 }";
    let cluster = Cluster::from_toml("f", text).unwrap();
    assert_eq!(cluster.control_latency(0, 0).as_nanos(), 7_000);
    assert_eq!(cluster.control_latency(0, 1).as_nanos(), 9_500);
}
