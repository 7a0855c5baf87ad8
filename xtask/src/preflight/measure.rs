//! The side that reads, and what it says.

use std::time::Instant;

use anyhow::{Context as _, bail};
use kvferry_geometry::units::Bytes;
use kvferry_transport::Transport;
use kvferry_transport::preflight::{self, Policy, ProbeOptions, Rate, Report};
use kvferry_transport::topology::Topology;
use serde_json::{Value, json};

use super::line::{Ask, Line, Reply, VERSION};
use super::{devices, target};
use crate::backends::{BackendArgs, Wire, Wires};
use crate::show;

/// What was found of one transport.
pub(super) struct Found {
    wire: Wire,
    /// What its rails use.
    chosen: Vec<String>,
    report: Option<Report>,
    /// Why it is refused.
    refused: Option<String>,
}

/// What a lane must be.
pub(super) fn policy(require: &[String], min_gbps: Option<f64>) -> anyhow::Result<Policy> {
    // A rate that no machine has is as good as any above it.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number; `as` saturates")]
    let least = min_gbps.map(|gb| (gb * 1e9) as u64);
    Ok(Policy::new(require.iter().cloned(), least)?)
}

/// Measures one transport against the other side.
pub(super) fn one(line: &mut Line, wire: Wire, backends: &BackendArgs, policy: &Policy) -> Found {
    let mut found = Found { wire, chosen: Vec::new(), report: None, refused: None };
    if let Err(error) = read(line, backends, &mut found) {
        found.refused = Some(format!("{error:#}"));
    } else if let Some(report) = &found.report {
        found.refused = policy.check(&report.lane).err().map(|e| e.to_string());
    }
    found
}

fn read(line: &mut Line, backends: &BackendArgs, found: &mut Found) -> anyhow::Result<()> {
    let wires = Wires::from(found.wire);
    let options = ProbeOptions::default();
    // As many of the largest reads as are in flight together.
    let largest = options.sizes.iter().copied().max().unwrap_or(options.small);
    let bytes = largest.saturating_mul(options.window.into()).min(target::MOST);

    let mut opened = backends.open(&wires)?;
    found.chosen.append(&mut opened.chosen);
    line.say(&Ask::Open { version: VERSION, transport: found.wire.name().to_owned(), bytes })?;
    let blob = match line.hear::<Reply>()?.context("the other side is gone")? {
        Reply::Open { blob } => blob,
        Reply::Failed(why) => bail!("the other side: {why}"),
        Reply::Closed => bail!("the other side has closed what wasn't open"),
    };
    let transport: &mut dyn Transport = &mut *opened.transport;
    let peer = transport.connect(&blob)?;
    let scratch = target::memory(&wires, Bytes::new(bytes))?;
    let start = Instant::now();
    // Nobody else uses the transport, so nothing else happens on it.
    let mut others = Vec::new();
    found.report = Some(preflight::run(transport, peer, scratch, &mut || start.elapsed(), &options, &mut others)?);
    line.say(&Ask::Close)?;
    line.hear::<Reply>()?;
    Ok(())
}

/// Prints all that was found; whether all of it was let pass.
pub(super) fn print(found: &[Found], host: &Topology, json: bool) -> anyhow::Result<bool> {
    let accepted = found.iter().all(|f| f.refused.is_none());
    if json {
        let transports: Vec<Value> = found.iter().map(Found::json).collect();
        let all = json!({"command": "preflight", "accepted": accepted, "transports": transports, "devices": devices::json(host)});
        println!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        found.iter().for_each(|f| print!("{}", f.text()));
        print!("\n{}", devices::text(host));
    }
    Ok(accepted)
}

impl Found {
    fn text(&self) -> String {
        let mut out = format!("{}\n", self.wire.name());
        let mut say = |what: &str, text: &str| out.push_str(&format!("  {what:<9} {text}\n"));
        if let Some(report) = &self.report {
            let lane = &report.lane;
            let named =
                if lane.transports.is_empty() { String::new() } else { format!(" ({})", lane.transports.join(", ")) };
            say("lane", &format!("{}{named}: {}", lane.kind, lane.detail));
            let rate = |r: &Rate| format!("{:.2} GB/s at {}", r.bytes_per_second / 1e9, show::size(r.size.get()));
            say("reads", &report.rates.iter().map(rate).collect::<Vec<_>>().join(", "));
            let small = report.per_operation.as_secs_f64() * 1e6;
            say("one read", &format!("{small:.1} us for {}", show::size(report.small.get())));
            if let Some(r) = report.registration {
                let [to, back] = [r.register, r.deregister].map(|d| d.as_secs_f64() * 1e3);
                say("register", &format!("{} in {to:.2} ms, given back in {back:.2} ms", show::size(r.size.get())));
            }
        }
        self.chosen.iter().for_each(|c| say("rail", c));
        say(if self.refused.is_some() { "REFUSED" } else { "accepted" }, self.refused.as_deref().unwrap_or_default());
        out.lines().map(|l| format!("{}\n", l.trim_end())).collect()
    }

    fn json(&self) -> Value {
        let report = self.report.as_ref();
        let lane = report
            .map(|r| json!({"kind": r.lane.kind.name(), "transports": r.lane.transports, "detail": r.lane.detail}));
        let rate = |r: &Rate| json!({"bytes": r.size.get(), "bytes_per_second": r.bytes_per_second});
        let measured = report.map(|r| {
            json!({
                "reads": r.rates.iter().map(rate).collect::<Vec<_>>(),
                "small_read_bytes": r.small.get(),
                "small_read_seconds": r.per_operation.as_secs_f64(),
                "register_bytes": r.registration.map(|g| g.size.get()),
                "register_seconds": r.registration.map(|g| g.register.as_secs_f64()),
            })
        });
        json!({
            "transport": self.wire.name(), "chosen": self.chosen, "refused": self.refused,
            "lane": lane, "measured": measured,
        })
    }
}
