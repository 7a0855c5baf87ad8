//! Neither threads nor an end in between change what comes out.

use std::path::Path;

use kvferry_topology::sweep::Results;

use super::state::StateError;
use super::*;

const TEXT: &str = r#"
    seed = 3
    [cluster]
    preset = "hgx-h100"
    nodes = 3
    [prefill]
    model = "llama-3.1-8b"
    engine = "tp=4"
    layers = 4
    kv_gib = 2
    [decode]
    model = "llama-3.1-8b"
    engine = "tp=2"
    layers = 4
    kv_gib = 2
    [load]
    requests = 6
    per_s = 4
    prompt = { uniform = [200, 1000] }
    output = 20
    [sweep]
    gpus = 8
    prefill_tp = [2, 4, 8]
    decode_tp = [1, 2]
    modes = ["pull", "push"]
"#;

fn sweep_of(text: &str) -> Sweep {
    Sweep::new(Scenario::from_toml("test", text, Path::new(".")).unwrap(), "test").unwrap()
}

fn question(top: usize) -> Question {
    Question { objective: Objective::HandoverP99, axes: (Objective::Gpus, Objective::HandoverP99), top }
}

/// Outcomes that come from nowhere but here.
fn plain(sweep: &Sweep) -> Results {
    let mut out = Results::new(sweep.candidates().len());
    for (at, candidate) in sweep.candidates().iter().enumerate() {
        out.set(at, sweep.outcome(candidate));
    }
    out
}

/// All that can be seen of the results.
fn seen(sweep: &Sweep, results: &Results) -> String {
    let report = Report::new(sweep, results, question(5));
    let mut json = Vec::new();
    report.json(&mut json, true).unwrap();
    format!("{}\n{}\n{}", report::sweep::text(&report), report::sweep::page(&report), String::from_utf8(json).unwrap())
}

fn all(sweep: &Sweep, state: Option<&mut State>, threads: usize, events: bool) -> String {
    seen(sweep, &work::all(sweep, state, &question(2), (threads, events)).unwrap())
}

#[test]
fn threads_change_nothing() {
    let sweep = sweep_of(TEXT);
    let wanted = seen(&sweep, &plain(&sweep));
    assert!(wanted.contains("12 candidates for at most 8 GPUs: 8 work, 4 do not"), "{wanted}");
    for threads in [1, 2, 7] {
        assert_eq!(all(&sweep, None, threads, false), wanted, "{threads}");
    }
}

#[test]
fn what_was_ended_anywhere_goes_on_to_the_same() {
    let sweep = sweep_of(TEXT);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.jsonl");
    let wanted = all(&sweep, Some(&mut State::open(&file, &sweep).unwrap()), 2, true);
    assert_eq!(all(&sweep, None, 1, true), wanted);
    let text = std::fs::read(&file).unwrap();
    let ends: Vec<usize> = text.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(at, _)| at + 1).collect();
    // The head, all candidates, and two that were confirmed.
    assert_eq!(ends.len(), 1 + sweep.candidates().len() + 2);
    for end in ends.iter().copied().chain([0]) {
        // Behind a line, within the next one, and just before its end.
        let next = ends.iter().copied().find(|e| *e > end).unwrap_or(end);
        for cut in [end, usize::midpoint(end, next), next.saturating_sub(1).max(end)] {
            std::fs::write(&file, &text[..cut]).unwrap();
            let mut state = State::open(&file, &sweep).unwrap();
            assert_eq!(all(&sweep, Some(&mut state), 2, true), wanted, "cut at {cut}");
            let now = std::fs::read(&file).unwrap();
            let lines = |text: &[u8]| {
                let mut lines: Vec<String> = String::from_utf8_lossy(text).lines().map(str::to_owned).collect();
                lines.sort();
                lines
            };
            assert_eq!(lines(&now), lines(&text), "cut at {cut}");
        }
    }
}

#[test]
fn what_was_done_before_is_not_done_again() {
    let sweep = sweep_of(TEXT);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.jsonl");
    all(&sweep, Some(&mut State::open(&file, &sweep).unwrap()), 2, false);
    // A figure that no candidate has: it comes from the file.
    let text = std::fs::read_to_string(&file).unwrap();
    let at = text.find("\"handover_p99\":").unwrap() + "\"handover_p99\":".len();
    let end = at + text[at..].find(',').unwrap();
    std::fs::write(&file, format!("{}0.000000125{}", &text[..at], &text[end..])).unwrap();
    assert!(all(&sweep, Some(&mut State::open(&file, &sweep).unwrap()), 2, false).contains("125 ns"));
    // More candidates of the same scenario go on from there; comments are no difference.
    let more = sweep_of(&TEXT.replace("[2, 4, 8]", "[1, 2, 4, 8] # more"));
    assert!(all(&more, Some(&mut State::open(&file, &more).unwrap()), 2, false).contains("125 ns"));
    // A larger budget makes those anew that it refused before.
    let larger = sweep_of(&TEXT.replace("gpus = 8", "gpus = [8, 16]"));
    let said = all(&larger, Some(&mut State::open(&file, &larger).unwrap()), 2, false);
    assert!(said.contains("125 ns") && !said.contains("the budget is"), "{said}");
}

#[test]
fn the_state_of_something_else_is_refused() {
    let sweep = sweep_of(TEXT);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.jsonl");
    drop(State::open(&file, &sweep).unwrap());
    for (old, new) in [
        ("seed = 3", "seed = 4"),
        ("requests = 6", "requests = 7"),
        ("layers = 4", "layers = 5"),
        ("nodes = 3", "nodes = 4"),
        ("kv_gib = 2", "kv_gib = 3"),
        ("gpus = 8", "gpus = 8\nfixed_times = true"),
    ] {
        let other = sweep_of(&TEXT.replace(old, new));
        let error = State::open(&file, &other).unwrap_err();
        let StateError::Other { found, wanted, .. } = &error else { panic!("{new}: {error}") };
        assert_eq!((found, wanted), (&state::scenario(&sweep), &state::scenario(&other)));
        let text = error.to_string();
        assert!(text.contains(&found[..16]) && text.contains(&wanted[..16]), "{text}");
    }
    let head = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{head}what\n{{}}\n")).unwrap();
    let error = State::open(&file, &sweep).unwrap_err().to_string();
    assert!(error.contains("state.jsonl:2: is no line of a sweep's state"), "{error}");
    std::fs::write(&file, "something else\n").unwrap();
    assert!(State::open(&file, &sweep).unwrap_err().to_string().contains("state.jsonl:1:"));
}

#[test]
fn every_figure_of_a_page_is_one_of_its_json() {
    let sweep = sweep_of(TEXT);
    let results = work::all(&sweep, None, &question(3), (2, true)).unwrap();
    let page = report::sweep::page(&Report::new(&sweep, &results, question(3)));
    let json = page.split("id=\"answer\">").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    let attribute = |text: &str, name: &str| {
        text.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next()).map(str::to_owned)
    };
    let mut figures = 0;
    for element in page.split("<span class=\"n\"").skip(1) {
        let (path, value) = (attribute(element, "data-path").unwrap(), attribute(element, "data-value").unwrap());
        let said = json.pointer(&format!("/{}", path.replace('.', "/"))).map(ToString::to_string);
        assert_eq!(said, Some(value), "{path}");
        figures += 1;
    }
    assert!(figures > 30, "{figures}");
    // The policy lets no style run but those whose hashes it names; one of them is the sweep's own.
    let hash = |text: &str| {
        use sha2::Digest as _;
        base64(&sha2::Sha256::digest(text))
    };
    for style in page.split("<style>").skip(1).map(|rest| rest.split("</style>").next().unwrap()) {
        assert!(page.contains(&format!("'sha256-{}'", hash(style))), "a style's hash is {}", hash(style));
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |g: &[u8]| {
        let word = g.iter().fold(0u32, |w, b| w << 8 | u32::from(*b)) << (8 * (3 - g.len()));
        (0..4)
            .map(|i| if i <= g.len() { LETTERS[(word >> (18 - 6 * i) & 63) as usize] as char } else { '=' })
            .collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[test]
fn objectives_and_axes_are_read_by_their_names() {
    assert_eq!(objective("hot-link"), Ok(Objective::HotLink));
    assert!(objective("speed").unwrap_err().contains("handover-p50, handover-p99, ttft-p99"));
    assert!(axes("gpus,ttft-p99").is_ok_and(|a| (a.0, a.1) == (Objective::Gpus, Objective::FirstTokenP99)));
    assert!(axes("gpus").is_err() && axes("gpus,gpus").is_err() && axes("gpus,nothing").is_err());
}
