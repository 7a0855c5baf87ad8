//! Descriptions in TOML: what a file may say, what it says that can't be, and what is meant.

use std::time::Duration;

use serde::Deserialize;

use super::fault::{ClusterErrors, ClusterFault, Faults};
use super::layout::leaves_of_a_group;
use super::machine::{Control, Fabric, GpuModel, Lane, Machine, Nics, Parts, Shape};
use super::{LinkKind, MAX_BYTES, MAX_GPUS, MAX_NODES, preset};

/// The most GPUs or cards of one machine.
const MOST_OF_A_NODE: u64 = 1024;
/// The most kinds of machines.
const MOST_KINDS: u64 = 1024;

/// A table of a file: every key may be missing, and then be in what the file builds upon.
macro_rules! table {
    ($name:ident { $($key:ident: $type:ty),* $(,)? }) => {
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct $name { $($key: Option<$type>),* }

        impl $name {
            fn over(self, base: Self) -> Self {
                Self { $($key: self.$key.or(base.$key)),* }
            }
        }
    };
}

table!(GpuTable { name: String, per_node: u64, hbm_gib: f64, hbm_gb_s: f64, bf16_tflops: f64 });
table!(NvLinkTable {
    gb_s: f64,
    efficiency: f64,
    latency_us: f64,
    message_us: f64,
    descriptor_us: f64,
    flow_gb_s: f64,
    domain_nodes: u64,
});
table!(PcieTable { gb_s: f64, efficiency: f64, latency_us: f64, message_us: f64, descriptor_us: f64, flow_gb_s: f64 });
table!(HostTable {
    gb_s: f64,
    efficiency: f64,
    latency_us: f64,
    message_us: f64,
    descriptor_us: f64,
    flow_gb_s: f64,
    readers: f64,
});
table!(NicTable {
    per_node: u64,
    kind: String,
    gbit_s: f64,
    efficiency: f64,
    latency_us: f64,
    message_us: f64,
    descriptor_us: f64,
    flow_gb_s: f64,
    million_descriptors_s: f64,
});
table!(FabricTable { kind: String, nodes_per_leaf: u64, oversubscription: f64, switch_us: f64 });
table!(ControlTable { same_node_us: f64, other_node_us: f64 });

/// What all lanes' tables have alike, beside the rate.
struct Figures {
    efficiency: Option<f64>,
    latency_us: Option<f64>,
    message_us: Option<f64>,
    descriptor_us: Option<f64>,
    flow_gb_s: Option<f64>,
}

macro_rules! figures {
    ($t:ident) => {
        Figures {
            efficiency: $t.efficiency,
            latency_us: $t.latency_us,
            message_us: $t.message_us,
            descriptor_us: $t.descriptor_us,
            flow_gb_s: $t.flow_gb_s,
        }
    };
}

/// The table of a machine, and that of a whole file, which has the same keys at its top where there is but one kind. (Were they
/// flattened, unknown keys would pass.)
macro_rules! machine_and_file {
    ($($key:ident: $type:ty),* $(,)?) => {
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct MachineTable { $($key: Option<$type>),* }

        impl MachineTable {
            fn is_empty(&self) -> bool {
                $(self.$key.is_none())&&*
            }
        }

        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct FileTable {
            name: Option<String>,
            fabric: Option<FabricTable>,
            control: Option<ControlTable>,
            machine: Vec<MachineTable>,
            $($key: Option<$type>),*
        }

        impl FileTable {
            /// Its machine, where that stands at the top.
            fn at_top(&mut self) -> MachineTable {
                MachineTable { $($key: self.$key.take()),* }
            }
        }
    };
}

machine_and_file!(
    preset: String,
    nodes: u64,
    gpu: GpuTable,
    nvlink: NvLinkTable,
    pcie: PcieTable,
    host: HostTable,
    nic: NicTable,
);

impl MachineTable {
    fn over(self, base: Self) -> Self {
        Self {
            preset: None,
            nodes: self.nodes.or(base.nodes),
            gpu: merged(self.gpu, base.gpu, GpuTable::over),
            nvlink: merged(self.nvlink, base.nvlink, NvLinkTable::over),
            pcie: merged(self.pcie, base.pcie, PcieTable::over),
            host: merged(self.host, base.host, HostTable::over),
            nic: merged(self.nic, base.nic, NicTable::over),
        }
    }
}

/// A preset as it is, of so many machines.
pub(super) fn preset(name: &str, nodes: u32) -> Result<Parts, ClusterErrors> {
    let file = FileTable { preset: Some(name.to_owned()), nodes: Some(nodes.into()), ..FileTable::default() };
    whole(Faults::of("preset"), file)
}

/// A user's file.
pub(super) fn file(file: &str, text: &str) -> Result<Parts, ClusterErrors> {
    let mut faults = Faults::of(file);
    if text.len() > MAX_BYTES {
        let (got, limit) = (text.len() as u64, MAX_BYTES as u64);
        faults.add("", ClusterFault::TooMany { what: "its length in bytes", got, limit });
        return faults.or(None);
    }
    match toml::from_str(text) {
        Ok(table) => whole(faults, table),
        Err(error) => {
            faults.add("", ClusterFault::Form(error.to_string().trim_end().to_owned()));
            faults.or(None)
        }
    }
}

fn whole(faults: Faults, mut file: FileTable) -> Result<Parts, ClusterErrors> {
    let mut reader = Reader { faults, at: String::new() };
    let many = !file.machine.is_empty();
    let top = file.at_top();
    if many && !top.is_empty() {
        let why = "machines stand at the top of the file and in [[machine]]; put all of them into [[machine]]";
        reader.fault("machine", ClusterFault::Contradiction(why.into()));
    }
    let tables = if many { std::mem::take(&mut file.machine) } else { vec![top] };
    if tables.len() as u64 > MOST_KINDS {
        let got = tables.len() as u64;
        reader.fault("machine", ClusterFault::TooMany { what: "the number of kinds", got, limit: MOST_KINDS });
        return reader.faults.or(None);
    }
    let (mut fabric, mut control, mut name) = (file.fabric, file.control, file.name);
    let mut machines = Vec::new();
    for (i, table) in tables.into_iter().enumerate() {
        reader.at = if many { format!("machine[{i}].") } else { String::new() };
        let mut base = reader.base(table.preset.as_deref());
        if i == 0 {
            fabric = merged(fabric, base.fabric.take(), FabricTable::over);
            control = merged(control, base.control.take(), ControlTable::over);
            name = name.or_else(|| base.name.take());
        }
        machines.push(reader.machine(table.over(base.at_top())));
    }
    reader.at = String::new();
    let fabric = reader.fabric(fabric.unwrap_or_default());
    let control = reader.control(&control.unwrap_or_default());
    let name = name.unwrap_or_else(|| "cluster".into());
    let parts = Parts { name, machines, fabric, control };
    reader.fits(&parts, many);
    reader.faults.or(Some(parts))
}

fn merged<T>(a: Option<T>, b: Option<T>, over: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(over(a, b)),
        (a, b) => a.or(b),
    }
}

struct Reader {
    faults: Faults,
    /// What keys begin with.
    at: String,
}

/// What a number can be.
#[derive(Clone, Copy)]
struct Span(f64, f64);

const RATE: Span = Span(1e-6, 1e6);
const TIME_US: Span = Span(0.0, 1e7);
const PART: Span = Span(0.001, 1.0);

impl Reader {
    fn fault(&mut self, key: &str, fault: ClusterFault) {
        let key = format!("{}{key}", self.at);
        self.faults.add(key, fault);
    }

    /// What a table builds upon.
    fn base(&mut self, name: Option<&str>) -> FileTable {
        let Some(name) = name else { return FileTable::default() };
        let Some(text) = preset::text(name) else {
            let names: Vec<&str> = preset::PRESETS.iter().map(|p| p.name).collect();
            let got = format!("{:?}", name.chars().take(80).collect::<String>());
            self.fault("preset", ClusterFault::Invalid { got, change: format!("there are {}", names.join(", ")) });
            return FileTable::default();
        };
        toml::from_str(text).unwrap_or_else(|error| {
            self.fault("preset", ClusterFault::Form(error.to_string()));
            FileTable::default()
        })
    }

    /// A number that is within its span; some other one if there is a fault.
    fn number(&mut self, key: &str, value: Option<f64>, span: Span, missing: Result<f64, &'static str>) -> f64 {
        match (value, missing) {
            (Some(x), _) if x >= span.0 && x <= span.1 => x,
            (Some(x), _) => {
                let change = format!("it must be from {} to {}", span.0, span.1);
                self.fault(key, ClusterFault::Invalid { got: x.to_string(), change });
                span.1
            }
            (None, Ok(default)) => default,
            (None, Err(what)) => {
                self.fault(key, ClusterFault::Missing(what));
                span.1
            }
        }
    }

    /// A whole number from 1 on; 1 if there is a fault.
    fn count(&mut self, key: &str, value: Option<u64>, most: u64, missing: Result<u32, &'static str>) -> u32 {
        match (value, missing) {
            (Some(n), _) if (1..=most).contains(&n) => u32::try_from(n).unwrap_or(1),
            (Some(n), _) => {
                let change = format!("it must be from 1 to {most}");
                self.fault(key, ClusterFault::Invalid { got: n.to_string(), change });
                1
            }
            (None, Ok(default)) => default,
            (None, Err(what)) => {
                self.fault(key, ClusterFault::Missing(what));
                1
            }
        }
    }

    fn time(&mut self, key: &str, us: Option<f64>, missing: Result<f64, &'static str>) -> Duration {
        Duration::from_secs_f64(self.number(key, us, TIME_US, missing) / 1e6)
    }

    fn word<T: Copy>(&mut self, key: &str, value: Option<&str>, words: &[(&str, T)], default: T) -> T {
        let Some(value) = value else { return default };
        if let Some((_, meant)) = words.iter().find(|(word, _)| *word == value) {
            return *meant;
        }
        let names: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
        let got = format!("{:?}", value.chars().take(80).collect::<String>());
        self.fault(key, ClusterFault::Invalid { got, change: format!("it must be one of {}", names.join(", ")) });
        default
    }

    fn machine(&mut self, t: MachineTable) -> Machine {
        let nodes = self.count("nodes", t.nodes, MAX_NODES.into(), Err("how many machines there are, as in nodes = 2"));
        let gpu = t.gpu.unwrap_or_default();
        let gpus = self.count("gpu.per_node", gpu.per_node, MOST_OF_A_NODE, Err("GPUs of one machine, as in 8"));
        let nvlink = t.nvlink.map(|t| {
            let domain = self.count("nvlink.domain_nodes", t.domain_nodes, MAX_NODES.into(), Ok(1));
            let gb_s = self.gb_s("nvlink", t.gb_s);
            (self.lane("nvlink", gb_s, &figures!(t)), domain)
        });
        let pcie = t.pcie.map(|t| {
            let gb_s = self.gb_s("pcie", t.gb_s);
            self.lane("pcie", gb_s, &figures!(t))
        });
        let host = t.host.map(|t| {
            let readers = self.number("host.readers", t.readers, Span(1.0, 1024.0), Ok(1.0));
            let gb_s = self.gb_s("host", t.gb_s);
            let mut lane = self.lane("host", gb_s, &figures!(t));
            // One reader is what the rate is of.
            lane.flow = lane.flow.min(lane.rate);
            (lane, readers)
        });
        let nics = t.nic.map(|t| self.nics(t));
        let gpu = self.gpu(gpu);
        if gpus > 1 && nvlink.is_none() && pcie.is_none() && host.is_none() {
            let why = format!("{gpus} GPUs of one machine have no way to each other; give [nvlink], [pcie] or [host]");
            self.fault("gpu.per_node", ClusterFault::Contradiction(why));
        }
        Machine { nodes, gpus, gpu, nvlink, pcie, host, nics }
    }

    fn gpu(&mut self, t: GpuTable) -> GpuModel {
        let any = Span(1e-3, 1e6);
        GpuModel {
            name: t.name.unwrap_or_else(|| "GPU".into()),
            hbm_gib: self.number("gpu.hbm_gib", t.hbm_gib, any, Err("a GPU's memory in GiB")),
            hbm_gb_s: self.number("gpu.hbm_gb_s", t.hbm_gb_s, any, Err("its memory's 10^9 bytes a second")),
            bf16_tflops: self.number("gpu.bf16_tflops", t.bf16_tflops, any, Err("dense BF16 operations, in 10^12/s")),
        }
    }

    fn gb_s(&mut self, table: &str, value: Option<f64>) -> f64 {
        let missing = Err("10^9 bytes a second and direction, as in gb_s = 450.0");
        self.number(&format!("{table}.gb_s"), value, RATE, missing)
    }

    fn lane(&mut self, table: &str, gb_s: f64, f: &Figures) -> Lane {
        let key = |key: &str| format!("{table}.{key}");
        let efficiency = self.number(&key("efficiency"), f.efficiency, PART, Ok(1.0));
        let latency =
            self.time(&key("latency_us"), f.latency_us, Err("one way without switches, as in latency_us = 1.5"));
        let per_message = self.time(&key("message_us"), f.message_us, Ok(0.0));
        let descriptor_us = self.number(&key("descriptor_us"), f.descriptor_us, TIME_US, Ok(0.0));
        let flow = self.number(&key("flow_gb_s"), f.flow_gb_s, RATE, Ok(f64::INFINITY)) * 1e9;
        // What posts a thousand million a second costs nothing.
        let posts = if descriptor_us < 1e-3 { f64::INFINITY } else { 1e6 / descriptor_us };
        Lane { rate: gb_s * 1e9 * efficiency, latency, per_message, posts, flow }
    }

    fn nics(&mut self, t: NicTable) -> Nics {
        let count = self.count("nic.per_node", t.per_node, MOST_OF_A_NODE, Err("cards of one machine, as in 8"));
        let kinds = [("infiniband", LinkKind::Nic), ("ethernet", LinkKind::Ethernet)];
        let kind = self.word("nic.kind", t.kind.as_deref(), &kinds, LinkKind::Nic);
        let gbit = self.number("nic.gbit_s", t.gbit_s, RATE, Err("10^9 bits a second of one card, as in gbit_s = 400"));
        let lane = self.lane("nic", gbit / 8.0, &figures!(t));
        let millions =
            self.number("nic.million_descriptors_s", t.million_descriptors_s, Span(1e-6, 1e6), Ok(f64::INFINITY));
        Nics { count, kind, lane, engine: millions * 1e6 }
    }

    fn fabric(&mut self, t: FabricTable) -> Fabric {
        let kinds = [("switch", Shape::Switch), ("rails", Shape::Rails), ("leaves", Shape::Leaves)];
        Fabric {
            shape: self.word("fabric.kind", t.kind.as_deref(), &kinds, Shape::Switch),
            nodes_per_leaf: self.count("fabric.nodes_per_leaf", t.nodes_per_leaf, MAX_NODES.into(), Ok(MAX_NODES)),
            oversubscription: self.number("fabric.oversubscription", t.oversubscription, Span(1.0, 1000.0), Ok(1.0)),
            switch: self.time("fabric.switch_us", t.switch_us, Ok(0.0)),
        }
    }

    fn control(&mut self, t: &ControlTable) -> Control {
        Control {
            same_node: self.time("control.same_node_us", t.same_node_us, Ok(50.0)),
            other_node: self.time("control.other_node_us", t.other_node_us, Ok(60.0)),
        }
    }

    /// What machines must be together.
    fn fits(&mut self, parts: &Parts, many: bool) {
        let sum = |of: fn(&Machine) -> u32| -> u64 {
            parts.machines.iter().map(|m| u64::from(m.nodes) * u64::from(of(m))).sum()
        };
        let (nodes, gpus, nics) = (sum(|_| 1), sum(|m| m.gpus), sum(Machine::nic_count));
        let leaves = nodes.div_ceil(parts.fabric.nodes_per_leaf.max(1).into()) * u64::from(leaves_of_a_group(parts));
        let limits = [
            ("nodes", "the number of machines", nodes, MAX_NODES),
            ("gpu.per_node", "the number of GPUs of all machines", gpus, MAX_GPUS),
            ("nic.per_node", "the number of cards of all machines", nics, MAX_GPUS),
            ("fabric.nodes_per_leaf", "the number of leaf switches", leaves, MAX_GPUS),
        ];
        for (key, what, got, limit) in limits {
            if got > u64::from(limit) {
                self.fault(key, ClusterFault::TooMany { what, got, limit: limit.into() });
            }
        }
        let one_domain = match parts.machines.as_slice() {
            [one] => one.nodes == 1 || one.nvlink.as_ref().is_some_and(|(_, domain)| one.nodes <= *domain),
            _ => false,
        };
        for (i, machine) in parts.machines.iter().enumerate() {
            let key = if many { format!("machine[{i}].nic") } else { "nic".into() };
            let Some(nics) = &machine.nics else {
                if !one_domain {
                    let what = "machines of several NVLink domains reach each other over cards only";
                    self.fault(&key, ClusterFault::Missing(what));
                }
                continue;
            };
            let first = parts.machines.iter().find_map(|m| m.nics.as_ref()).map_or(nics.kind, |n| n.kind);
            if nics.kind != first {
                let why = "these cards are of another kind than those before; machines of one cluster need one kind";
                self.fault(&format!("{key}.kind"), ClusterFault::Contradiction(why.into()));
            }
        }
    }
}
