//! Descriptions and calibrations as files: what is told of bad ones, that figures are told with their sources, and that measured
//! figures take the place of written ones.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation, reason = "a failed test panics")]

use kvferry_sim::rng::Rng;
use kvferry_topology::cluster::{Calibration, Cluster, ClusterErrors, LinkKind, MAX_BYTES};

fn faults(text: &str) -> Vec<String> {
    let errors = Cluster::from_toml("c.toml", text).unwrap_err();
    errors.0.iter().map(ToString::to_string).collect()
}

#[test]
fn all_faults_are_told_at_once_with_what_to_change() {
    let text = "
        preset = \"hgx-h10\"
        nodes = 0
        [gpu]
        per_node = 2000
        hbm_gib = -1
        hbm_gb_s = inf
        [nvlink]
        gb_s = nan
        efficiency = 1.5
        [nic]
        per_node = 8
        kind = \"token-ring\"
        latency_us = -3
        [fabric]
        kind = \"mesh\"
        oversubscription = 0.5
        [control]
        same_node_us = 1e9
    ";
    let expected = [
        "c.toml: preset: is \"hgx-h10\"; there are hgx-h100, ",
        "c.toml: nodes: is 0; it must be from 1 to 65536",
        "c.toml: gpu.per_node: is 2000; it must be from 1 to 1024",
        "c.toml: gpu.hbm_gib: is -1; it must be from ",
        "c.toml: gpu.hbm_gb_s: is inf; it must be from ",
        "c.toml: gpu.bf16_tflops: is missing; ",
        "c.toml: nvlink.gb_s: is NaN; it must be from ",
        "c.toml: nvlink.efficiency: is 1.5; it must be from ",
        "c.toml: nvlink.latency_us: is missing; ",
        "c.toml: nic.kind: is \"token-ring\"; it must be one of \"infiniband\", \"ethernet\"",
        "c.toml: nic.gbit_s: is missing; ",
        "c.toml: nic.latency_us: is -3; it must be from 0 to ",
        "c.toml: fabric.kind: is \"mesh\"; it must be one of \"switch\", \"rails\", \"leaves\"",
        "c.toml: fabric.oversubscription: is 0.5; it must be from 1 to 1000",
        "c.toml: control.same_node_us: is 1000000000; it must be from 0 to ",
    ];
    let found = faults(text);
    for line in expected {
        assert!(found.iter().any(|f| f.starts_with(line)), "{line} is not in\n{}", found.join("\n"));
    }
    assert_eq!(found.len(), expected.len(), "{}", found.join("\n"));
}

#[test]
fn what_cannot_be_together_is_told() {
    let gpu = "gpu = { per_node = 2, hbm_gib = 80, hbm_gb_s = 2000, bf16_tflops = 300 }";
    let nic = |kind: &str| format!("nic = {{ per_node = 1, gbit_s = 100, latency_us = 2, kind = {kind:?} }}");
    let lonely = faults(&format!("nodes = 2\n{gpu}"));
    assert!(lonely[0].contains("gpu.per_node: 2 GPUs of one machine have no way to each other"), "{lonely:?}");
    assert!(lonely[1].contains("nic: is missing"), "{lonely:?}");
    let pcie = "pcie = { gb_s = 30, latency_us = 2 }";
    let [ib, eth] = ["infiniband", "ethernet"].map(|k| format!("[[machine]]\nnodes = 1\n{gpu}\n{pcie}\n{}\n", nic(k)));
    let mixed = faults(&format!("{ib}{eth}"));
    assert!(mixed[0].contains("machine[1].nic.kind: these cards are of another kind"), "{mixed:?}");
    let both = faults(&format!("nodes = 2\n{ib}"));
    assert!(both[0].contains("machine: machines stand at the top"), "{both:?}");
    // Two machines of one NVLink domain need no cards.
    let nvlink = "nvlink = { gb_s = 900, latency_us = 1, domain_nodes = 2 }";
    Cluster::from_toml("f", &format!("nodes = 2\n{gpu}\n{nvlink}")).unwrap();
    assert_eq!(faults(&format!("nodes = 3\n{gpu}\n{nvlink}")).len(), 1);
}

#[test]
fn form_is_told_with_its_line() {
    for (text, word) in [
        ("nodes = 2\nnodez = 3", "unknown field `nodez`"),
        ("nodes = 2\n[nic]\ngbits = 3", "unknown field `gbits`"),
        ("nodes = \"two\"", "invalid type"),
        ("nodes = -1", "invalid value"),
        ("nodes = ", "string"),
    ] {
        let found = faults(text);
        assert_eq!(found.len(), 1);
        let line = format!("line {}", text.lines().count());
        assert!(found[0].contains(word) && found[0].contains(&line), "{text:?}: {}", found[0]);
    }
}

#[test]
fn limits_hold_before_memory_is_taken() {
    let many = |text: &str, what: &str| {
        let found = faults(text);
        assert!(found.iter().any(|f| f.contains(what)), "{found:?}");
    };
    let preset = "preset = \"hgx-h100\"\n";
    many(&format!("{preset}nodes = 65537"), "nodes: is 65537; it must be from 1 to 65536");
    many(
        &format!("{preset}nodes = 65536\ngpu = {{ per_node = 17 }}"),
        "the number of GPUs of all machines is 1114112, more than",
    );
    many(
        &format!("{preset}nodes = 65536\nnic = {{ per_node = 1024 }}"),
        "the number of cards of all machines is 67108864, more",
    );
    // One machine with many cards makes as many leaves of every group.
    let one = "[[machine]]\npreset = \"hgx-h100\"\nnodes = 1\nnic = { per_node = 1024 }\n";
    let rest = "[[machine]]\npreset = \"hgx-h100\"\nnodes = 65535\nnic = { per_node = 1 }\n";
    many(
        &format!("{one}{rest}[fabric]\nnodes_per_leaf = 1"),
        "the number of leaf switches is 67108864, more than the 1048576",
    );
    many(&format!("{one}{rest}{rest}"), "nodes: the number of machines is 131071, more than the 65536");
    let kinds = "[[machine]]\n".repeat(1025);
    many(&kinds, "the number of kinds is 1025, more than the 1024");
    let long = format!("#{}", "x".repeat(MAX_BYTES));
    many(&long, "its length in bytes is 1048577, more than the 1048576");
    assert!(faults(&"[[machine]]\nnodes = 0\n".repeat(1024)).len() <= 64);
}

#[test]
fn spoiled_files_are_refused_or_read_but_never_more() {
    let mut rng = Rng::of(&[5]);
    let mut refused = 0;
    for _ in 0..3000 {
        let name = *rng.pick(&Cluster::preset_names()).unwrap();
        let mut text: Vec<u8> = Cluster::preset_text(name).unwrap().bytes().collect();
        for _ in 0..rng.small(1, 4) {
            let at = usize::try_from(rng.below(text.len() as u64)).unwrap();
            match rng.below(4) {
                0 => text[at] = b"0123456789-.e\"[]=\n"[usize::try_from(rng.below(18)).unwrap()],
                1 => drop(text.remove(at)),
                2 => text.insert(at, b'9'),
                _ => text.truncate(at.max(1)),
            }
        }
        let text = String::from_utf8_lossy(&text);
        match Cluster::from_toml("spoiled", &text) {
            Ok(cluster) => assert!(!cluster.links().is_empty()),
            Err(ClusterErrors(list)) => {
                refused += 1;
                assert!(
                    !list.is_empty() && list.iter().all(|e| e.file == "spoiled" && !e.fault.to_string().is_empty())
                );
            }
        }
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn a_file_overrules_figures_of_its_preset_and_only_those() {
    let text = "preset = \"hgx-h100\"\nnodes = 3\nname = \"mine\"\n[nic]\ngbit_s = 200\n[pcie]\nefficiency = 1.0";
    let (mine, theirs) = (Cluster::from_toml("f", text).unwrap(), Cluster::preset("hgx-h100", 3).unwrap());
    assert_eq!(mine.name(), "mine");
    for (a, b) in mine.links().iter().zip(theirs.links()) {
        assert_eq!(a.name(), b.name());
        let factor = match a.kind() {
            LinkKind::Nic | LinkKind::Uplink => 0.5,
            LinkKind::Pcie => 1.0 / 0.86,
            _ => 1.0,
        };
        assert!((a.capacity() / b.capacity() / factor - 1.0).abs() < 1e-9, "{}", a.name());
    }
}

#[test]
fn machines_of_several_kinds_stand_in_their_order() {
    let text = "
        [[machine]]
        preset = \"hgx-h100\"
        nodes = 2
        [[machine]]
        preset = \"hgx-h200\"
        nodes = 1
        gpu = { per_node = 4 }
    ";
    let cluster = Cluster::from_toml("f", text).unwrap();
    let gpus: Vec<u32> = cluster.nodes().iter().map(|n| n.gpus).collect();
    assert_eq!(gpus, [8, 8, 4]);
    assert!(cluster.gpu_model(0).name.starts_with("H100") && cluster.gpu_model(2).name.starts_with("H200"));
    // The network is that of the first machine's preset.
    let over = cluster.routes(cluster.gpu(0), cluster.gpu(17), 1);
    let names: Vec<String> = over[0].links.iter().map(|&l| cluster.link_name(l)).collect();
    // Four GPUs with eight cards: the second GPU's own are the third and the fourth.
    assert_eq!(names[1..5], ["node0/nic0/out", "leaf0/up", "leaf2/down", "node2/nic2/in"]);
}

/// Figures of a preset: table, key and value as it is written.
fn figures(text: &str) -> Vec<(String, String, String, bool)> {
    let (mut table, mut sourced, mut list) = (String::new(), false, Vec::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            (table, sourced) = (name.trim_end_matches(']').to_owned(), false);
        } else if let Some(comment) = line.strip_prefix('#') {
            let words = ["https://", "ssumed", "docs/performance.md", "RFC", "data sheet", "Chosen"];
            sourced = words.iter().any(|w| comment.contains(w)) || sourced;
        } else if let Some((key, value)) = line.split_once(" = ").filter(|_| !table.is_empty()) {
            list.push((table.clone(), key.to_owned(), value.to_owned(), sourced));
        }
    }
    list
}

#[test]
fn every_figure_of_a_preset_has_a_source_and_stands_in_the_document() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cluster.md")).unwrap();
    let names = Cluster::preset_names();
    let (_, tables) = document.split_once("## Presets").expect("a part about presets");
    let row = |first: &str| tables.lines().find(|l| l.starts_with(&format!("| {first} |")));
    let head = row("figure").expect("a table of the presets' figures");
    let column = |name: &str| head.split('|').position(|c| c.trim().trim_matches('`') == name);
    for name in names {
        let at = column(name).unwrap_or_else(|| panic!("docs/cluster.md has no column for {name}"));
        for (table, key, value, sourced) in figures(Cluster::preset_text(name).unwrap()) {
            assert!(sourced || value.starts_with('"'), "{name}: [{table}] {key} has no source above it");
            let key = format!("`{table}.{key}`");
            let told = row(&key).and_then(|r| r.split('|').nth(at)).map(str::trim);
            assert_eq!(told, Some(value.trim_matches('"')), "docs/cluster.md: {key} of {name}");
        }
        for word in Cluster::preset_text(name).unwrap().split(['(', ')', ' ', '\n']) {
            let url = word.trim_end_matches(['.', ',', ';', ')']);
            if url.starts_with("https://") {
                assert!(document.contains(url), "docs/cluster.md doesn't name {url} of {name}");
            }
        }
    }
}

const PREFLIGHT: &str = r#"{
    "accepted": true, "command": "preflight", "devices": [], "later": [1],
    "transports": [
        {"transport": "shm", "chosen": [], "refused": null,
         "lane": {"kind": "shm", "transports": [], "detail": "all regions mapped"},
         "measured": {"reads": [{"bytes": 1048576, "bytes_per_second": 4e9, "new": 0},
                                {"bytes": 65536, "bytes_per_second": 2e9},
                                {"bytes": 16777216, "bytes_per_second": 5e9}],
                      "small_read_bytes": 64, "small_read_seconds": 0.00003,
                      "register_bytes": 1, "register_seconds": 0.1}},
        {"transport": "nixl", "chosen": [], "refused": "no such library", "lane": null, "measured": null},
        {"transport": "ucx", "chosen": [], "refused": null, "lane": {"kind": "rdma", "transports": [], "detail": ""},
         "measured": {"reads": [{"bytes": 65536, "bytes_per_second": 30e9}, {"bytes": 16777216, "bytes_per_second": 24e9}],
                      "small_read_bytes": 64, "small_read_seconds": 0.000004}}
    ]}"#;

#[test]
fn a_preflight_calibrates() {
    let found = Calibration::from_json("p.json", PREFLIGHT).unwrap();
    let [shm, ucx] = &found.measured[..] else { panic!("{found:?}") };
    // By hand: 65,536 bytes take 32.768 us, 16,777,216 take 3,355.4432 us.
    let slope = (3355.4432e-6 - 32.768e-6) / (16_777_216.0 - 65_536.0);
    assert!((shm.rate * slope - 1.0).abs() < 1e-9, "{shm:?}");
    let beside = 32.768e-6 - 65_536.0 * slope;
    assert!((shm.per_message.as_secs_f64() - beside).abs() < 1e-9, "{shm:?}");
    assert!((shm.latency.as_secs_f64() - (30e-6 - beside) / 2.0).abs() < 1e-9, "{shm:?}");
    // Where small reads are the faster ones there is no cost to see.
    assert_eq!((ucx.rate, ucx.per_message.as_nanos(), ucx.latency.as_nanos()), (24e9, 0, 2000));

    let local = Cluster::preset("local", 1).unwrap().calibrated(&found);
    let route = &local.routes(local.gpu(0), local.gpu(1), 1)[0];
    let memory = local.link(route.links[0]).unwrap();
    assert!((memory.capacity() / (2.0 * shm.rate) - 1.0).abs() < 1e-9);
    assert!((route.cap / shm.rate - 1.0).abs() < 1e-9);
    assert_eq!((route.latency, route.per_message), (2 * shm.latency, shm.per_message));

    // A cluster without memory in common takes the second figure, for its cards.
    let before = Cluster::preset("a100-4nic", 2).unwrap();
    let after = before.clone().calibrated(&found);
    for (a, b) in before.links().iter().zip(after.links()) {
        let expected = if a.kind() == LinkKind::Nic { 24e9 } else { a.capacity() };
        assert!((b.capacity() / expected - 1.0).abs() < 1e-9, "{}", a.name());
    }
    assert_eq!(before.clone().calibrated(&found.only("shm")), before);
    let route = &after.routes(after.gpu(0), after.gpu(8), 1)[0];
    assert_eq!(route.latency.as_nanos(), 2 * (2000 + 330));
}

#[test]
fn the_first_lane_of_a_kind_counts_and_descriptors_cost_no_more_than_a_read() {
    let json = PREFLIGHT.replace("\"rdma\"", "\"shm\"").replace("0.00003,", "0.00000002,");
    let found = Calibration::from_json("p.json", &json).unwrap();
    let local = Cluster::preset("local", 1).unwrap().calibrated(&found);
    let route = &local.routes(local.gpu(0), local.gpu(1), 1)[0];
    assert!((route.cap / found.measured[0].rate - 1.0).abs() < 1e-9);
    // A descriptor of 56 ns can't be where a whole read takes 20.
    assert!((local.link(route.work[0]).unwrap().capacity() / 5e7 - 1.0).abs() < 1e-6);
}

#[test]
fn what_is_no_preflight_is_told() {
    let told = |text: &str| Calibration::from_json("p.json", text).unwrap_err().to_string();
    assert!(told("{").starts_with("p.json: not what a preflight prints: "));
    assert!(told("{}").contains("command: is \"\"; it must be \"preflight\""));
    assert!(told("{\"command\": \"demo\"}").contains("command: is \"demo\""));
    assert!(told("{\"command\": \"preflight\"}").contains("transports: is missing; no transport came up"));
    let zero = PREFLIGHT.replace("\"bytes_per_second\": 2e9", "\"bytes_per_second\": 0").replace("0.000004", "-1");
    let errors = told(&zero);
    assert!(errors.contains("transports[0].measured.reads[0]: is 65536 bytes at 0 a second"), "{errors}");
    assert!(errors.contains("transports[2].measured.small_read_seconds: is -1"), "{errors}");
    assert!(told(&" ".repeat(MAX_BYTES + 1)).contains("its length in bytes"));
    let none = PREFLIGHT.replacen("\"reads\": [", "\"reads\": [], \"x\": [", 1);
    assert!(told(&none).contains("transports[0].measured.reads: is missing"));
}
