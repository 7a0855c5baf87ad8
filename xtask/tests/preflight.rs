//! The preflight as operators run it: what it says of a lane, and what it refuses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test whose process cannot be started has failed")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn preflight(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("preflight").args(args.split_whitespace());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn json(args: &str) -> (bool, Value) {
    let output = preflight(&format!("{args} --json")).output().unwrap();
    let value = serde_json::from_slice(&output.stdout);
    (output.status.success(), value.unwrap_or_else(|e| panic!("{args}: {e}:\n{}", text(&output))))
}

/// Whether all that is to be said of a lane is there; the first transport's.
fn measured(value: &Value) -> &Value {
    let first = &value["transports"][0];
    let measured = &first["measured"];
    let reads = measured["reads"].as_array().unwrap();
    assert_eq!(reads.len(), 3, "{value:#}");
    assert!(reads.iter().all(|r| r["bytes_per_second"].as_f64().unwrap() > 1e6), "{value:#}");
    assert!(measured["small_read_seconds"].as_f64().unwrap() > 0.0, "{value:#}");
    assert!(measured["register_seconds"].as_f64().unwrap() >= 0.0, "{value:#}");
    first
}

#[test]
fn a_lane_is_named_and_measured() {
    let (accepted, value) = json("--transport shm");
    assert!(accepted && value["accepted"] == true, "{value:#}");
    let first = measured(&value);
    assert_eq!((&first["lane"]["kind"], &first["refused"]), (&"shm".into(), &Value::Null));
}

#[test]
fn a_lane_that_is_not_what_was_required_is_refused_with_the_reason() {
    for (args, reason) in [
        ("--require rdma,cuda_ipc", "requires rdma or cuda_ipc; the lane is shm"),
        ("--min-gbps 100000", "requires 100000.00 GB/s"),
    ] {
        let (accepted, value) = json(&format!("--transport shm {args}"));
        assert!(!accepted && value["accepted"] == false, "{value:#}");
        // What was found is told all the same.
        assert!(measured(&value)["refused"].as_str().unwrap().contains(reason), "{value:#}");
    }
    let (accepted, value) = json("--transport shm --require shm,rdma --min-gbps 0.001");
    assert!(accepted, "{value:#}");
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_starts() {
    for (args, reason) in [
        ("--transport mem", "memory of one process"),
        ("--transport tcp", "the transports are shm, mem, ucx and nixl"),
        ("--transport shm --min-gbps 0", "a number above 0"),
        ("--transport shm --require UCX!", "UCX!"),
        ("--transport shm --listen 127.0.0.1:0 --require shm", "cannot be used with"),
    ] {
        let output = preflight(args).output().unwrap();
        assert!(!output.status.success() && text(&output).contains(reason), "{args}:\n{}", text(&output));
    }
}

/// A listener, killed at the end.
struct Listener(Child, String);

impl Listener {
    fn start(args: &str) -> Self {
        let mut child = preflight(&format!("{args} --listen 127.0.0.1:0")).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening at ").unwrap().to_owned();
        // Read to the end by a thread, so that the listener can go on speaking.
        std::thread::spawn(move || out.lines().count());
        Self(child, address)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn two_hosts_meet_by_address_and_nonsense_sends_nobody_away() {
    let listener = Listener::start("--transport shm");
    let mut stranger = TcpStream::connect(&listener.1).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(stranger);
    for _ in 0..2 {
        let (accepted, value) = json(&format!("--transport shm --connect {}", listener.1));
        assert!(accepted, "{value:#}");
        measured(&value);
    }
    let output = preflight("--transport shm --connect 127.0.0.1:1").output().unwrap();
    assert!(!output.status.success() && text(&output).contains("127.0.0.1:1 can't be reached"), "{}", text(&output));
}

#[test]
fn ucx_is_measured() {
    if !cfg!(feature = "ucx") {
        return kvferry_tests::skip("ucx", "xtask is built without its feature ucx");
    }
    let (accepted, value) = json("--transport ucx");
    assert!(accepted, "{value:#}");
    let first = measured(&value);
    // What really carries the bytes is named, and what the rails use.
    assert!(!first["lane"]["transports"].as_array().unwrap().is_empty(), "{value:#}");
    assert!(!first["chosen"].as_array().unwrap().is_empty(), "{value:#}");
    let (accepted, value) = json("--transport ucx --require cuda_ipc");
    assert!(!accepted, "this memory is no device's, and yet: {value:#}");
}

#[test]
fn nixl_is_measured() {
    #[cfg(feature = "nixl")]
    let missing = kvferry_nixl::available().err().map(|e| e.to_string());
    #[cfg(not(feature = "nixl"))]
    let missing = Some("xtask is built without its feature nixl".to_owned());
    if let Some(why) = missing {
        return kvferry_tests::skip("nixl", &why);
    }
    let (accepted, value) = json("--transport nixl");
    assert!(accepted, "{value:#}");
    measured(&value);
}
