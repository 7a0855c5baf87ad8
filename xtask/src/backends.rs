//! Backends by name, as a command line gives them: `shm`, or in order of preference `nixl,ucx`.
//!
//! Those with a native library are features of this program. A command that is asked for one which isn't built in starts
//! itself again through cargo with it, once.

use std::fmt;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, bail};
use kvferry_shm::ShmTransport;
use kvferry_transport::negotiate::Negotiated;
use kvferry_transport::{EndpointId, Transport};

use crate::{cargo, native};

/// This program, also after another build of it has taken its place in the file system.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// Set for the program that was started again, to what it was built with.
const BUILT_WITH: &str = "KVFERRY_XTASK_BUILT_WITH";

/// How bytes move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wire {
    /// Shared memory between the processes of a host.
    Shm,
    /// Memory of one process; ranks are threads.
    Mem,
    /// UCX.
    Ucx,
    /// NIXL.
    Nixl,
}

impl Wire {
    const ALL: [Self; 4] = [Self::Shm, Self::Mem, Self::Ucx, Self::Nixl];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Mem => "mem",
            Self::Ucx => "ucx",
            Self::Nixl => "nixl",
        }
    }

    /// Whether this program has it.
    fn is_built_in(self) -> bool {
        match self {
            Self::Shm | Self::Mem => true,
            Self::Ucx => cfg!(feature = "ucx"),
            Self::Nixl => cfg!(feature = "nixl"),
        }
    }
}

/// Backends in order of preference: at least one, each once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Wires(Vec<Wire>);

impl Wires {
    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Wire> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn has(&self, wire: Wire) -> bool {
        self.0.contains(&wire)
    }
}

impl From<Wire> for Wires {
    fn from(wire: Wire) -> Self {
        Self(vec![wire])
    }
}

impl fmt::Display for Wires {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Wire::name).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Wires {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut out = Vec::new();
        for word in text.split(',') {
            let wire = Wire::ALL.into_iter().find(|w| w.name() == word);
            let wire = wire.ok_or_else(|| format!("{word}: the transports are shm, mem, ucx and nixl"))?;
            if out.contains(&wire) {
                return Err(format!("{word} is named twice"));
            }
            out.push(wire);
        }
        if out.len() > 1 && out.contains(&Wire::Mem) {
            return Err("mem is one process, which nothing can be an alternative to: name it alone".into());
        }
        Ok(Self(out))
    }
}

/// A transport, ready to register memory.
pub(crate) struct Opened {
    pub(crate) transport: Box<dyn Transport>,
    /// What its rails use, in words; nothing where it has none.
    pub(crate) chosen: Vec<String>,
}

impl Opened {
    fn plain(transport: impl Transport + 'static) -> Self {
        Self { transport: Box::new(transport), chosen: Vec::new() }
    }
}

/// How backends are opened.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub(crate) struct BackendArgs {
    /// Rails of the UCX backend: contexts that a large batch is cut over [default: its own choice]
    #[arg(long, value_name = "N", conflicts_with = "devices", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) rails: Option<u16>,
    /// Network devices as UCX names them (mlx5_0:1), a rail for each [default: as UCX chooses]
    #[arg(long, value_name = "DEVICES", value_delimiter = ',')]
    pub(crate) devices: Vec<String>,
}

impl BackendArgs {
    /// The arguments that say the same again.
    pub(crate) fn again(&self) -> Vec<String> {
        let devices = (!self.devices.is_empty()).then(|| format!("--devices={}", self.devices.join(",")));
        self.rails.map(|n| format!("--rails={n}")).into_iter().chain(devices).collect()
    }

    /// Opens all of `wires` as one transport.
    pub(crate) fn open(&self, wires: &Wires) -> anyhow::Result<Opened> {
        let (mut all, mut chosen): (Vec<Box<dyn Transport>>, _) = (Vec::new(), Vec::new());
        for wire in wires.iter() {
            // A rank has one endpoint, whichever way it is reached.
            let id = all.first().map(|first| first.endpoint());
            let one = self.open_one(wire, id).with_context(|| format!("transport {}", wire.name()))?;
            all.push(one.transport);
            chosen.extend(one.chosen);
        }
        // Also one alone, which then can connect to ranks that have several.
        Ok(Opened { transport: Box::new(Negotiated::new(all)?), chosen })
    }

    fn open_one(&self, wire: Wire, id: Option<EndpointId>) -> anyhow::Result<Opened> {
        match wire {
            Wire::Mem => bail!("ranks of one process are threads, and have their memory from the demo"),
            Wire::Shm => {
                let mut config = kvferry_shm::Config::default();
                config.endpoint = id;
                Ok(Opened::plain(ShmTransport::new(config)?))
            }
            Wire::Ucx => self.ucx(id),
            Wire::Nixl => self.nixl(id),
        }
    }

    #[cfg(feature = "ucx")]
    fn ucx(&self, id: Option<EndpointId>) -> anyhow::Result<Opened> {
        use kvferry_ucx::{Rail, UcxConfig, UcxTransport};
        let mut config = self.rails.map_or_else(UcxConfig::default, |n| UcxConfig::with_rails(n.into()));
        if !self.devices.is_empty() {
            config.rails = self.devices.iter().map(|d| Rail::on([d])).collect();
        }
        config.endpoint = id;
        let transport = UcxTransport::new(config)?;
        let chosen = transport.rails().iter().map(|rail| {
            let lanes: Vec<String> =
                rail.lanes.iter().map(|(transport, device)| format!("{transport}/{device}")).collect();
            format!(
                "{}: {}",
                if rail.devices.is_empty() { "any device".into() } else { rail.devices.join(",") },
                lanes.join(" ")
            )
        });
        Ok(Opened { chosen: chosen.collect(), transport: Box::new(transport) })
    }

    #[cfg(not(feature = "ucx"))]
    fn ucx(&self, _: Option<EndpointId>) -> anyhow::Result<Opened> {
        bail!("it is not built into this program")
    }

    #[cfg(feature = "nixl")]
    fn nixl(&self, id: Option<EndpointId>) -> anyhow::Result<Opened> {
        use kvferry_nixl::{NixlConfig, NixlTransport};
        let mut config = NixlConfig::default();
        config.endpoint = id;
        // Here ports are not named.
        let plain = |d: &String| d.split(':').next().unwrap_or_default().to_owned();
        config.devices = self.devices.iter().map(plain).collect();
        Ok(Opened::plain(NixlTransport::new(config)?))
    }

    #[cfg(not(feature = "nixl"))]
    fn nixl(&self, _: Option<EndpointId>) -> anyhow::Result<Opened> {
        bail!("it is not built into this program")
    }
}

/// What is to be done so that the backends are built in.
#[derive(PartialEq, Eq, Debug)]
enum Build {
    /// They are.
    Nothing,
    /// This program with these features.
    With(String),
}

/// Makes sure that all of `wires` are built in: where one isn't, this program is replaced by one that has it, with the
/// same arguments.
///
/// # Errors
/// Where it can't be built, or the native libraries can't be had.
pub(crate) fn ensure(wires: &[&Wires]) -> anyhow::Result<()> {
    let asked = |wire: Wire| wires.iter().any(|w| w.has(wire));
    let lacks: Vec<Wire> = Wire::ALL.into_iter().filter(|&w| asked(w) && !w.is_built_in()).collect();
    let Build::With(features) = decide(&lacks, asked(Wire::Nixl), std::env::var(BUILT_WITH).ok().as_deref())? else {
        return Ok(());
    };
    eprintln!("building this program again with {features} ...");
    let mut again: Command = cargo::cargo();
    if lacks.contains(&Wire::Nixl) {
        let native = native::prepare().context("transport nixl")?;
        again.envs(native.vars());
    }
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    again
        .args(["run", "--quiet", "--release", "--manifest-path", manifest, "--features", &features, "--"])
        .args(std::env::args_os().skip(1))
        .env(BUILT_WITH, &features);
    Err(again.exec()).context("cargo run could not be started")
}

/// `before` is what this program was built with when it was started again.
fn decide(lacks: &[Wire], nixl: bool, before: Option<&str>) -> anyhow::Result<Build> {
    if lacks.is_empty() {
        return Ok(Build::Nothing);
    }
    let names: Vec<&str> = lacks.iter().map(|w| w.name()).collect();
    if let Some(before) = before {
        bail!("this program was built with {before} and still lacks {}; say so to its authors", names.join(","));
    }
    // With NIXL comes UCX, so that there are two builds of this program and not three. What was asked for stays.
    let features = if nixl { "ucx,nixl" } else { "ucx" };
    Ok(Build::With(if cfg!(feature = "ib") { format!("{features},ib") } else { features.to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wires_are_lists_of_names() {
        let wires: Wires = "nixl,ucx,shm".parse().unwrap();
        assert_eq!(wires.to_string(), "nixl,ucx,shm");
        assert!(wires.has(Wire::Ucx) && !wires.has(Wire::Mem));
        for wrong in ["", "tcp", "ucx,", "ucx,ucx", "mem,shm", "shm,mem"] {
            assert!(wrong.parse::<Wires>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_program_builds_itself_again_once_and_with_what_it_lacks() {
        assert_eq!(decide(&[], true, None).unwrap(), Build::Nothing);
        assert_eq!(decide(&[], false, Some("ucx")).unwrap(), Build::Nothing);
        assert_eq!(decide(&[Wire::Ucx], false, None).unwrap(), Build::With("ucx".into()));
        assert_eq!(decide(&[Wire::Nixl], true, None).unwrap(), Build::With("ucx,nixl".into()));
        let error = decide(&[Wire::Ucx], false, Some("nothing")).unwrap_err().to_string();
        assert!(error.contains("built with nothing") && error.contains("lacks ucx"), "{error}");
    }

    #[test]
    fn what_a_backend_is_opened_with_is_said_again() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            backends: BackendArgs,
        }
        let parse = |line: &[&str]| <Line as clap::Parser>::try_parse_from([&["x"], line].concat());
        for line in [&["--rails=3"][..], &["--devices=mlx5_0:1,mlx5_1:1"], &[]] {
            assert_eq!(parse(line).unwrap().backends.again(), line);
        }
        assert!(parse(&["--rails=17"]).is_err() && parse(&["--rails=1", "--devices=eth0"]).is_err());
    }
}
