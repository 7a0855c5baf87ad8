//! The three programs of the README's "Two engines and a router", run as it says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test whose program cannot be started has failed")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

/// A program, killed at the end.
struct Program {
    child: Child,
    address: String,
    /// What it prints afterwards.
    lines: std::sync::mpsc::Receiver<String>,
}

impl Program {
    fn start(name: &str, arguments: &[&str]) -> Self {
        // Beside the directory of the tests' programs, where `cargo test` builds them.
        let this = std::env::current_exe().unwrap();
        let path = this.parent().unwrap().parent().unwrap().join("examples").join(name);
        assert!(path.exists(), "{} is not built: `cargo build -p kvferry --examples` does that", path.display());
        let mut child = Command::new(path).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening at ").unwrap_or_else(|| panic!("{name}: {line}")).to_owned();
        let (say, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| say.send(line)));
        Self { child, address, lines }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn ask(address: &str, request: &Value) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    writeln!(stream, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
}

#[test]
fn a_router_can_have_its_requests_pushed() {
    let prefill = Program::start("prefill", &["127.0.0.1:0"]);
    let decode = Program::start("decode", &["127.0.0.1:0"]);
    let router = Program::start("router", &["127.0.0.1:0", &prefill.address, &decode.address, "--push"]);
    for n in [1u32, 33, 64, 500] {
        let prompt: Vec<u32> = (0..n).map(|i| i * 7 + n).collect();
        let answer = ask(&router.address, &json!({"prompt": prompt}));
        let bytes = n * 2 * 4 * 256;
        assert_eq!(answer["cache"], format!("was pushed {bytes} B from 4 rank pairs"), "{answer}");
        assert_eq!(answer["wrong_bytes"], 0);
        let line = prefill.lines.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        assert!(line.starts_with("lease ") && line.ends_with(": read"), "{line}");
    }
}

#[test]
fn a_request_goes_through_the_router_to_both_engines() {
    let prefill = Program::start("prefill", &["127.0.0.1:0"]);
    let decode = Program::start("decode", &["127.0.0.1:0"]);
    let router = Program::start("router", &["127.0.0.1:0", &prefill.address, &decode.address]);

    // Several at once, with ends in the middle of blocks of either engine.
    std::thread::scope(|scope| {
        for n in [1u32, 3, 64, 100, 129, 500] {
            let address = &router.address;
            scope.spawn(move || {
                let prompt: Vec<u32> = (0..n).map(|i| i * 7 + n).collect();
                let answer = ask(address, &json!({"prompt": prompt}));
                // Two layers of four heads of 256 bytes, and each decode rank reads from two prefill ranks.
                let bytes = n * 2 * 4 * 256;
                assert_eq!(answer["cache"], format!("pulled {bytes} B from 4 rank pairs"), "{answer}");
                assert_eq!(answer["wrong_bytes"], 0);
            });
        }
    });
    // Every lease has ended by being read.
    for _ in 0..6 {
        let line = prefill.lines.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        assert!(line.starts_with("lease ") && line.ends_with(": read"), "{line}");
    }

    // Without a prefill engine, or a reference that is any good, the decode engine computes by itself.
    let prompt = [1, 2, 3];
    let offered = ask(
        &prefill.address,
        &json!({"prompt": prompt, "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}}),
    );
    drop(prefill);
    let answer = ask(&router.address, &json!({"prompt": prompt}));
    assert_eq!(answer["cache"], "computed here: no reference came with the request");
    assert_eq!(answer["wrong_bytes"], 0);
    let other = ask(&decode.address, &json!({"prompt": [4], "kv_transfer_params": offered["kv_transfer_params"]}));
    assert!(other["cache"].as_str().unwrap().starts_with("computed here: "), "{other}");
    assert_eq!(other["wrong_bytes"], 0);
}
