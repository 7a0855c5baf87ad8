//! `demo --all`: every preset between engines of several shapes, each in a demo of its own.

use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use kvferry_models::{Model, preset_names};
use serde_json::Value;

use super::args::Args;
use crate::backends::THIS_PROGRAM;
use crate::engine::Named;
use crate::show;

/// What differs between the engines, prefill, decode.
const SHAPES: [(&str, &str, &str); 5] = [
    ("same shape", "tp=2", "tp=2"),
    ("TP up", "tp=2", "tp=4"),
    ("TP down", "tp=4", "tp=2"),
    ("TP not dividing", "tp=6", "tp=4"),
    ("PP on both sides", "tp=2,pp=2", "tp=2,pp=3"),
];
/// Layers of a model where the user doesn't say; every kind of layer is among them.
const LAYERS: u32 = 6;

/// Runs all demos, also after one has failed.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (mut right, mut wrong, mut left_out) = (0, 0, 0);
    for name in preset_names() {
        let has = u32::try_from(Model::preset(name)?.layers().len())?;
        for (what, prefill, decode) in SHAPES {
            let mut one = args.clone();
            one.all = false;
            one.model.model = Some(name.to_owned());
            one.model.layers = Some(args.model.layers.unwrap_or(LAYERS).min(has));
            (one.prefill, one.decode) = (parse(prefill)?, parse(decode)?);
            let line = format!("{name:<28} {what:<17} {prefill:<10} -> {decode:<10}");
            if has < stages(&one.prefill).max(stages(&one.decode)) {
                left_out += 1;
                println!("{line} left out: it has {} only", show::number_of(has as usize, "layer"));
                continue;
            }
            let (is_right, text) = demo(&one)?;
            *(if is_right { &mut right } else { &mut wrong }) += 1;
            println!("{line} {text}");
        }
    }
    println!("{right} right, {wrong} wrong, {left_out} left out");
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse(shape: &str) -> anyhow::Result<Named> {
    shape.parse().map_err(anyhow::Error::msg)
}

fn stages(engine: &Named) -> u32 {
    match engine {
        Named::Shape(shape) => shape.pp,
        Named::File(_) => 1,
    }
}

/// One demo in a process of its own: whether all is right, and what is to be said.
fn demo(args: &Args) -> anyhow::Result<(bool, String)> {
    let line = std::iter::once("demo".to_owned()).chain(args.again()).chain(["--json".to_owned()]);
    let output =
        Command::new(THIS_PROGRAM).args(line).stderr(Stdio::piped()).output().context("cannot start a demo")?;
    let Ok(value) = serde_json::from_slice::<Value>(&output.stdout) else {
        return Ok((false, String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")));
    };
    let number = |key: &str| value[key].as_u64().unwrap_or(u64::MAX);
    let pairs = value["pairs"].as_array().map_or(0, Vec::len);
    let is_right = output.status.success() && number("wrong") == 0 && number("outside") == 0;
    let text = format!(
        "{:>9} over {pairs:>2} rank pairs, {} wrong, {} touched outside",
        show::size(number("verified")),
        number("wrong"),
        number("outside"),
    );
    Ok((is_right, text))
}
