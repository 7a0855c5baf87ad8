//! A router between the prefill and the decode engine. It knows nothing of kvferry: it copies `kv_transfer_params` from one's answer into
//! the other's request, as it is.
//!
//! ```text
//! cargo run -p kvferry --example router -- 127.0.0.1:8100 127.0.0.1:8101 127.0.0.1:8102    # itself, prefill, decode
//! {"prompt": [1, 2, 3]}
//! ```
//!
//! With `--push` at the end it asks the engines to push instead of pull: the decode engine is asked before the prompt is computed.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};

use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (push, arguments) = match arguments.as_slice() {
        [addresses @ .., last] if last == "--push" => (true, addresses),
        addresses => (false, addresses),
    };
    let [listen, prefill, decode] = arguments else {
        return Err("say where to listen, where the prefill engine is, and where the decode engine".into());
    };
    let listener = TcpListener::bind(listen)?;
    println!("listening at {}", listener.local_addr()?);
    for client in listener.incoming() {
        let (client, prefill, decode) = (client?, prefill.clone(), decode.clone());
        std::thread::spawn(move || {
            if let Err(error) = converse(&client, &prefill, &decode, push) {
                println!("a client was left: {error}");
            }
        });
    }
    Ok(())
}

fn converse(mut client: &TcpStream, prefill: &str, decode: &str, push: bool) -> Result<()> {
    for line in BufReader::new(client).lines() {
        let answered = serde_json::from_str(&line?).map_err(Into::into).and_then(|r| route(r, prefill, decode, push));
        let answered = answered.unwrap_or_else(|error| json!({"error": error.to_string()}));
        writeln!(client, "{answered}")?;
    }
    Ok(())
}

/// First to the prefill engine, then with what it answered to the decode engine.
fn route(mut request: Value, prefill: &str, decode: &str, push: bool) -> Result<Value> {
    request["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    if push {
        request["kv_transfer_params"]["kvferry_mode"] = json!("push");
    }
    request["kv_transfer_params"] = match ask(prefill, &request) {
        Ok(answered) => answered["kv_transfer_params"].clone(),
        // Then the decode engine computes the prompt itself.
        Err(error) => {
            println!("prefill at {prefill}: {error}");
            Value::Null
        }
    };
    ask(decode, &request)
}

fn ask(address: &str, request: &Value) -> Result<Value> {
    let mut server = TcpStream::connect(address)?;
    writeln!(server, "{request}")?;
    let mut line = String::new();
    BufReader::new(server).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
