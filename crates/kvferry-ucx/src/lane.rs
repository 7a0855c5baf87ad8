//! What carries the bytes of transfers, by UCX's own word.
//!
//! UCX chooses lanes for each endpoint, each for certain tasks, and prints them (`ucp_ep_print_info`):
//!
//! ```text
//! lane[0]:  4:sysv/memory.0 md[3]  -> md[3]/sysv/sysdev[255] seg 4294967295 am keepalive
//! lane[1]:  6:cma/memory.0 md[5]   -> md[5]/cma/sysdev[255] seg 4294967295 rma_bw#0
//! ```
//!
//! The lanes for `rma_bw` carry reads and writes. Where there is none, UCX carries them in messages, and the peer's rail
//! copies: then it is the lanes for `am` that do, and whatever they are, this is no direct access by hardware.
//!
//! A connection has one kind only if all that carries its transfers is of that kind. A rail that has fallen back to something else
//! must not hide behind the others, since a policy may go by the kind.

use std::fmt::Write as _;

use kvferry_transport::{Lane, LaneKind};

use crate::sys::Endpoint;

/// A lane of an endpoint.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct RailLane {
    pub(crate) transport: String,
    pub(crate) device: String,
    pub(crate) role: Role,
}

/// What a lane is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Role {
    /// Reads and writes.
    Transfers,
    /// Reads and writes, and messages.
    Both,
    /// Messages, and reads and writes in messages, which the peer's rail copies.
    Emulated,
    /// Messages.
    Messages,
    /// Something else.
    Other,
}

/// The lanes of an endpoint.
pub(crate) fn of(endpoint: &Endpoint) -> Vec<RailLane> {
    parse(&endpoint.info())
}

fn parse(info: &str) -> Vec<RailLane> {
    let mut lanes: Vec<_> = info.lines().filter_map(line).collect();
    if !lanes.iter().any(|lane| matches!(lane.role, Role::Transfers | Role::Both)) {
        for lane in lanes.iter_mut().filter(|lane| lane.role == Role::Messages) {
            lane.role = Role::Emulated;
        }
    }
    lanes
}

fn line(line: &str) -> Option<RailLane> {
    let (_, rest) = line.split_once("lane[")?.1.split_once(':')?;
    let (_, rest) = rest.split_once(':')?;
    let mut words = rest.split_ascii_whitespace();
    let (transport, device) = words.next()?.split_once('/')?;
    // Behind the device stands the number of the path.
    let device = device.rsplit_once('.').map_or(device, |(device, _)| device);
    let tasks: Vec<&str> = words.skip_while(|word| *word != "seg").skip(2).collect();
    let messages = tasks.contains(&"am");
    let role = match tasks.iter().any(|task| task.starts_with("rma_bw")) {
        true if messages => Role::Both,
        true => Role::Transfers,
        false if messages => Role::Messages,
        false => Role::Other,
    };
    Some(RailLane { transport: transport.to_owned(), device: device.to_owned(), role })
}

/// The kind of a lane that carries transfers.
fn kind(lane: &RailLane) -> LaneKind {
    match kind_of(&lane.transport) {
        LaneKind::Rdma | LaneKind::DeviceDirect | LaneKind::CrossProcess if lane.role == Role::Emulated => {
            LaneKind::Unknown
        }
        kind => kind,
    }
}

/// The kind of UCX's transport where it reads and writes by itself.
fn kind_of(transport: &str) -> LaneKind {
    LaneKind::of_transport(transport).unwrap_or(LaneKind::Unknown)
}

/// The lane of a connection that isn't up.
pub(crate) fn intended() -> Lane {
    Lane { kind: LaneKind::Unknown, transports: Vec::new(), detail: "not connected yet".to_owned(), measured: None }
}

/// The lane of a connection whose rails have these lanes.
pub(crate) fn merged<'a>(rails: impl Iterator<Item = &'a [RailLane]>) -> Lane {
    let mut transports: Vec<String> = Vec::new();
    let mut kinds: Vec<LaneKind> = Vec::new();
    let mut detail = String::new();
    for (rail, lanes) in rails.enumerate() {
        let carries = |lane: &&RailLane| matches!(lane.role, Role::Transfers | Role::Both | Role::Emulated);
        for lane in lanes.iter().filter(carries) {
            add(&mut transports, lane.transport.clone());
            add(&mut kinds, kind(lane));
        }
        // Of such a rail nothing is known, and it carries its share.
        if !lanes.iter().any(|lane| carries(&lane)) {
            add(&mut kinds, LaneKind::Unknown);
        }
        let names = |role: &[Role]| {
            let of_role = lanes.iter().filter(|lane| role.contains(&lane.role));
            let names: Vec<_> = of_role.map(|lane| format!("{}/{}", lane.transport, lane.device)).collect();
            if names.is_empty() { "nothing that UCX tells of".to_owned() } else { names.join(", ") }
        };
        let emulated = lanes.iter().any(|lane| lane.role == Role::Emulated);
        let how = if emulated { " (in messages, copied by the peer)" } else { "" };
        let separator = if rail == 0 { "" } else { "; " };
        // Writing to a string can't fail.
        let _: std::fmt::Result = write!(
            detail,
            "{separator}rail {rail}: transfers by {}{how}, messages by {}",
            names(&[Role::Transfers, Role::Both, Role::Emulated]),
            names(&[Role::Messages, Role::Both, Role::Emulated]),
        );
    }
    let kind = match kinds[..] {
        [kind] => kind,
        [] => LaneKind::Unknown,
        _ => {
            let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
            detail = format!("mixed ({}): {detail}", names.join(", "));
            LaneKind::Unknown
        }
    };
    Lane { kind, transports, detail, measured: None }
}

fn add<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CMA: &str = "#
# UCP endpoint
#               peer: <no debug data>
#                 lane[0]:  4:sysv/memory.0 md[3]           -> md[3]/sysv/sysdev[255] seg 4294967295 am am_bw#0 keepalive
#                 lane[1]: 12:cma/memory.0 md[10]           -> md[10]/cma/sysdev[255] seg 4294967295 rma_bw#0
#                 lane[2]:  5:posix/memory.0 md[4]          -> md[4]/posix/sysdev[255] seg 4294967295
";
    const TCP: &str = "#  lane[0]:  1:tcp/eth0.1.0 md[0]  -> md[0]/tcp/sysdev[255] seg 4294967295 am keepalive wireup";
    const RC: &str =
        "#  lane[0]:  3:rc_mlx5/mlx5_0:1.0 md[2]  -> addr[0].md[2]/ib/sysdev[3] seg 8256 rma_bw#0 am am_bw#0";

    #[test]
    fn lanes_are_read_from_what_ucx_prints() {
        let of = |info: &str| {
            let lanes = parse(info).into_iter();
            lanes.map(|lane| (format!("{}/{}", lane.transport, lane.device), lane.role)).collect::<Vec<_>>()
        };
        let with = |lanes: &[(&str, Role)]| lanes.iter().map(|(name, role)| ((*name).to_owned(), *role)).collect();
        let cma: Vec<_> =
            with(&[("sysv/memory", Role::Messages), ("cma/memory", Role::Transfers), ("posix/memory", Role::Other)]);
        assert_eq!(of(CMA), cma);
        assert_eq!(of(TCP), with(&[("tcp/eth0.1", Role::Emulated)]) as Vec<_>);
        assert_eq!(of(RC), with(&[("rc_mlx5/mlx5_0:1", Role::Both)]) as Vec<_>);
        assert_eq!(of("nothing\n# lane[\n# lane[0]: x"), Vec::new());
    }

    fn lane(infos: &[&str]) -> Lane {
        let rails: Vec<_> = infos.iter().map(|info| parse(info)).collect();
        merged(rails.iter().map(Vec::as_slice))
    }

    #[test]
    fn the_kind_is_that_of_what_carries_transfers() {
        let cma = lane(&[CMA]);
        assert_eq!((cma.kind, cma.transports), (LaneKind::CrossProcess, vec!["cma".to_owned()]));
        assert_eq!(cma.detail, "rail 0: transfers by cma/memory, messages by sysv/memory");
        assert_eq!(lane(&[RC, RC]).kind, LaneKind::Rdma);
        let tcp = lane(&[TCP, TCP]);
        assert_eq!((tcp.kind, tcp.transports), (LaneKind::Stream, vec!["tcp".to_owned()]));
        let how = "rail 1: transfers by tcp/eth0.1 (in messages, copied by the peer), messages by tcp/eth0.1";
        assert!(tcp.detail.ends_with(how), "{}", tcp.detail);
        assert_eq!(lane(&[]).kind, LaneKind::Unknown);
    }

    #[test]
    fn a_rail_that_fell_back_does_not_hide_behind_another() {
        let required = kvferry_transport::preflight::Policy::new(["rdma"], None).unwrap();
        required.check(&lane(&[RC, RC])).unwrap();
        let two_lanes = format!("{RC}\n#  lane[1]:  1:tcp/eth0.0 md[0]  -> md[0]/tcp/sysdev[255] seg 8192 rma_bw#1");
        for mixed in [&[RC, TCP][..], &[TCP, RC], &[&two_lanes], &[RC, ""]] {
            let mixed = lane(mixed);
            assert_eq!(mixed.kind, LaneKind::Unknown);
            assert!(mixed.detail.starts_with("mixed ("), "{}", mixed.detail);
            assert!(required.check(&mixed).is_err(), "{mixed:?}");
        }
        assert!(lane(&[RC, ""]).detail.contains("rail 1: transfers by nothing that UCX tells of"));
        // Cards that only carry messages.
        for emulated in [RC.replace("rma_bw#0 ", ""), RC.replace("rc_mlx5", "ud_mlx5"), RC.replace("rc", "ud")] {
            let emulated = lane(&[&emulated]);
            assert_eq!(emulated.kind, LaneKind::Unknown, "{emulated:?}");
            assert!(required.check(&emulated).is_err(), "{emulated:?}");
        }
    }
}
