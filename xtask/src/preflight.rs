//! `cargo xtask preflight`: which lane a transport really takes to a peer, and how good it is, before anything is deployed.
//!
//! Two processes: one has memory, the other reads it, for each of the transports named. They are on one host, or on two with
//! `--listen ADDRESS` there and `--connect ADDRESS` here; the TCP connection between them carries a few words, and whoever
//! can reach it may read the listener's scratch memory, nothing else. `--require` and `--min-gbps` refuse a lane, so that a
//! fall back to a slower one is found here and not in production: the exit status is 1 then, or where a transport doesn't
//! come up.
//!
//! With `--json` it prints one object:
//! - `command` (`"preflight"`), `accepted` (bool: every transport came up, over a lane that was let pass);
//! - `transports`: each with `transport`, `chosen` (what its rails use, in words), `refused` (null, or why), and null where it
//!   didn't come up: `lane` (`kind`, `transports`, `detail`) and `measured` (`reads`: `bytes`, `bytes_per_second`;
//!   `small_read_bytes`, `small_read_seconds`; `register_bytes`, `register_seconds`);
//! - `devices`: the network devices of this host, each with `name`, `kind` (`"rdma"` or `"interface"`), `up`, `pci` and `numa` (null
//!   where it has none), `aliases` (its names as the other kind).

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context as _, bail};
use kvferry_transport::topology::Place;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::backends::{self, BackendArgs, THIS_PROGRAM, Wire, Wires};

mod devices;
mod line;
mod measure;
mod target;

use line::Line;

/// Arguments.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    /// Transports, each tried by itself: shm, ucx, nixl
    #[arg(long, default_value_t = Wire::Ucx.into(), value_name = "LIST")]
    transport: Wires,
    #[command(flatten)]
    backends: BackendArgs,
    /// Have the memory that the other side reads, and wait for it here, an address and a port
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["connect", "require", "min_gbps", "json"])]
    listen: Option<String>,
    /// Read from where --listen runs, instead of from a process on this host
    #[arg(long, value_name = "ADDRESS")]
    connect: Option<String>,
    /// Use the devices nearest to this place, a PCI address (of a GPU) or a NUMA node (numa:1), a rail for each
    #[arg(long, value_name = "PLACE", conflicts_with_all = ["devices", "rails"], value_parser = devices::place)]
    near: Option<Place>,
    /// Never use these devices; names may end in *
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', requires = "near")]
    exclude: Vec<String>,
    /// Refuse lanes that are none of these: kinds (shm, cma, rdma, device, tcp) or transports of the library (rc, cuda_ipc)
    #[arg(long, value_name = "LANES", value_delimiter = ',')]
    require: Vec<String>,
    /// Refuse lanes that read less than so many 10^9 bytes a second
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    min_gbps: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The other side on the same host, in a process of its own
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    backends: BackendArgs,
}

/// Runs either side.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.transport.has(Wire::Mem) {
        bail!("mem is memory of one process, which there is nothing to find out about; name shm, ucx or nixl");
    }
    let policy = measure::policy(&args.require, args.min_gbps)?;
    backends::ensure(&[&args.transport])?;
    let host = devices::read()?;
    let mut backends = args.backends.clone();
    if let Some(place) = &args.near {
        let (names, why) = devices::near(&host, place, &args.exclude)?;
        backends.devices = names;
        eprintln!("{}", why.trim_end());
    }
    let args = &Args { backends, ..args.clone() };
    if let Some(address) = &args.listen {
        return listen(address, &args.backends);
    }
    let (mut line, here) = match &args.connect {
        Some(address) => {
            let stream = TcpStream::connect(address).with_context(|| format!("{address} can't be reached"))?;
            (Line::tcp(stream)?, None)
        }
        None => {
            let (line, child) = spawn(&args.backends)?;
            (line, Some(child))
        }
    };
    let found: Vec<_> =
        args.transport.iter().map(|wire| measure::one(&mut line, wire, &args.backends, &policy)).collect();
    drop(line);
    if let Some(mut child) = here {
        // It ends with the line.
        child.wait()?;
    }
    let accepted = measure::print(&found, &host, args.json)?;
    Ok(if accepted { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The process on the same host; its standard input is the line.
pub(crate) fn run_target(args: &TargetArgs) -> anyhow::Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    target::serve(Line::unix(line)?, &args.backends)?;
    Ok(ExitCode::SUCCESS)
}

fn spawn(backends: &BackendArgs) -> anyhow::Result<(Line, Child)> {
    let (ours, theirs) = UnixStream::pair()?;
    let child = Command::new(THIS_PROGRAM)
        .arg("preflight-target")
        .args(backends.again())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()
        .context("the other side can't be started")?;
    Ok((Line::unix(ours)?, child))
}

/// Serves one after the other until it is interrupted.
fn listen(address: &str, backends: &BackendArgs) -> anyhow::Result<ExitCode> {
    let listener = TcpListener::bind(address).with_context(|| format!("{address} can't be listened at"))?;
    println!("listening at {}", listener.local_addr()?);
    loop {
        let (stream, from) = listener.accept()?;
        println!("{from} measures");
        match Line::tcp(stream).map_err(anyhow::Error::from).and_then(|line| target::serve(line, backends)) {
            Ok(()) => println!("{from} is done"),
            // One that says nonsense is no reason to send the next away.
            Err(error) => println!("{from}: {error:#}"),
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|n: &f64| n.is_finite() && *n > 0.0).ok_or_else(|| "a number above 0".to_owned())
}
