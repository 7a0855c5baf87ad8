//! What a scenario that can't be answered is told, and the exit status that says whose fault it is.

use std::path::Path;

use kvferry_session::pairing::PairingError;

use super::*;
use crate::check::Outcome;

const LLAMA: &str = "model = \"llama-3.1-70b\"\nengine = \"tp=4\"\nkv_gib = 2";

/// A scenario's file, and the arguments that name it.
fn scenario(dir: &Path, decode: &str, load: &str) -> Args {
    let path = dir.join("scenario.toml");
    let text = format!(
        "[cluster]\npreset = \"hgx-h100\"\nnodes = 2\n[prefill]\n{LLAMA}\n[decode]\n{decode}\n[load]\n{load}\n"
    );
    std::fs::write(&path, text).unwrap();
    Args { scenario: path, analytic: true, compare: false, seed: None, json: false, html: None }
}

const FEW: &str = "requests = 3\nper_s = 1\nprompt = 100\noutput = 5";

#[test]
fn mismatches_are_grouped_as_check_groups_them() {
    let dir = tempfile::tempdir().unwrap();
    let args = scenario(dir.path(), &format!("{LLAMA}\nkv_dtype = \"fp8\""), FEW);
    let Refused(status, text) = told(&args).unwrap_err();
    assert_eq!(status, INCOMPATIBLE);
    // 80 layers, K and V, each with another width and another encoding.
    assert!(text.lines().count() < 20, "{text}");
    assert!(text.contains("model.layers.{0-79}.self_attn.attn"), "{text}");

    let describe = |name: &str, more: &str| {
        let path = dir.path().join(name);
        let text = format!("model = \"llama-3.1-70b\"\nparallel = \"tp=4\"\nblocks = 16\n{more}");
        std::fs::write(&path, text).unwrap();
        check::Args {
            source: crate::engine::Named::File(path.clone()),
            destination: crate::engine::Named::File(path),
            model: crate::engine::ModelArgs::default(),
            ignore: crate::engine::IgnoreArgs::default(),
            json: false,
        }
    };
    let (p, d) = (describe("p.toml", ""), describe("d.toml", "kv_dtype = \"fp8\""));
    let outcome = Outcome::new(&check::Args { destination: d.destination, ..p }, |_| Ok(()));
    let differs = text.strip_prefix("D cannot take over P's cache:\n").unwrap();
    assert!(outcome.text().contains(differs), "{}\nis not what stands in\n{}", differs, outcome.text());
}

#[test]
fn the_exit_status_says_whose_fault_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let answered = told(&scenario(dir.path(), LLAMA, FEW)).unwrap();
    assert!(answered.contains("simulated in"), "{answered}");

    let status_of = |args: &Args| told(args).unwrap_err().0;
    // A trace that isn't there is only looked for when the scenario is known to be sound.
    assert_eq!(status_of(&scenario(dir.path(), LLAMA, "trace = \"none.jsonl\"")), FAULTY);
    assert_eq!(status_of(&scenario(dir.path(), LLAMA, "requests = \"many\"")), FAULTY);
    let both = scenario(dir.path(), &format!("{LLAMA}\nkv_dtype = \"fp8\"\nengines = 0"), FEW);
    assert_eq!(status_of(&both), FAULTY);
    let none = Args { scenario: dir.path().join("none.toml"), ..scenario(dir.path(), LLAMA, FEW) };
    assert_eq!(status_of(&none), FAULTY);

    let never = PairingError::Mismatch(kvferry_geometry::compat::Mismatches(Vec::new()));
    assert_eq!(refused(SimError::Analytic(TrafficError::from(never).into())).0, INCOMPATIBLE);
    assert_eq!(refused(SimError::Events(EventsError::Violation("a".into()))).0, FAILED);
}

/// A page that can't be written is told before anything is simulated: here nothing could be.
#[test]
fn the_page_is_looked_at_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut args = scenario(dir.path(), LLAMA, "trace = \"none.jsonl\"");
    args.html = Some(dir.path().join("no/page.html"));
    let Refused(status, text) = told(&args).unwrap_err();
    assert!(status == FAULTY && text.contains("page.html"), "{text}");
    args = Args { html: Some(dir.path().join("page.html")), ..scenario(dir.path(), LLAMA, FEW) };
    assert!(told(&args).unwrap().contains("page.html holds the report"));
    assert!(std::fs::read_to_string(dir.path().join("page.html")).unwrap().starts_with("<!doctype html>"));
}
