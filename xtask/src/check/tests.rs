use std::path::Path;

use super::*;

fn args(source: &str, destination: &str, json: bool) -> CheckArgs {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples");
    let engine = |name: &str| {
        if name.contains('=') { name.parse().unwrap() } else { Named::File(dir.join(name)) }
    };
    let (model, ignore) = (ModelArgs::default(), IgnoreArgs::default());
    let engines = Args { source: engine(source), destination: engine(destination), model, ignore, json };
    CheckArgs { engines, format: None }
}

fn text_of(args: &CheckArgs) -> String {
    report(args).0
}

fn exits(args: &CheckArgs, status: u8) -> bool {
    // An exit code can't be compared otherwise.
    format!("{:?}", run(args).unwrap()) == format!("{:?}", ExitCode::from(status))
}

#[test]
fn engines_of_one_model_are_compatible_whatever_their_shapes() {
    let (text, status) = report(&args("prefill-tp4-pp2.toml", "decode-tp2.toml", false));
    assert_eq!(status, 0, "{text}");
    assert!(text.ends_with("compatible: 32 items, 131,072 B a token\n"), "{text}");
    assert!(text.contains("tp=4,pp=2") && text.contains("64 tokens, nhd"), "{text}");
    assert!(exits(&args("prefill-tp4-pp2.toml", "decode-tp2.toml", true), 0));
}

#[test]
fn every_mismatch_is_listed_with_both_values_and_what_to_change() {
    let (text, status) = report(&args("prefill-tp4-pp2.toml", "decode-wrong.toml", false));
    assert_eq!(status, 1);
    let expected = "\
the width of a value of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       256 B
    destination  128 B
    change       use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides
the encoding of k differs in 30 items: model.layers.{0-29}.self_attn.attn
    source       bf16
    destination  fp8_e4m3
    change       use one type (kv_dtype, indexer, conv_dtype, state_dtype) on both sides; nothing is converted on the way
";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("the item differs in 2 items: model.layers.{30, 31}.self_attn.attn\n"), "{text}");
    assert!(text.ends_with("NOT compatible: 122 mismatches\n"), "{text}");
    assert!(exits(&args("prefill-tp4-pp2.toml", "decode-wrong.toml", true), 1));
}

#[test]
fn the_json_has_every_mismatch_by_itself() {
    let (text, _) = report(&args("prefill-tp4-pp2.toml", "decode-wrong.toml", true));
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["compatible"], false);
    assert_eq!(value["mismatches"].as_array().unwrap().len(), 122);
    let first = json!({
        "item": "model.layers.0.self_attn.attn", "field": "width", "component": "k", "source": "256 B",
        "destination": "128 B",
        "change": "use one type (kv_dtype, indexer, conv_dtype, state_dtype) and one head size on both sides",
        "reason": "item model.layers.0.self_attn.attn: component k is 256 B wide at the source, 128 B at the destination (each value)",
    });
    assert_eq!(value["mismatches"][0], first);
    assert_eq!(value["source"]["groups"][0]["block_tokens"], 16);
    assert_eq!(value["source"]["bytes_per_token"], 131_072);
}

#[test]
fn faults_of_both_descriptions_are_told_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let source = write("p.toml", "model = \"llama-3.1-8b\"\nparallel = \"tp=2,dcp=2\"\n");
    let destination = write("d.toml", "model = \"jamba-v0.1\"\ndraft = \"none\"\n");
    let mut a = args("tp=1", "tp=1", true);
    (a.engines.source, a.engines.destination) = (Named::File(source), Named::File(destination));
    let (text, status) = report(&a);
    assert_eq!(status, 2);
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&value["source"], &value["destination"]), (&Value::Null, &Value::Null));
    let faults = value["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 4, "{text}");
    assert_eq!((&faults[3]["side"], &faults[3]["line"]), (&json!("destination"), &json!(2)), "{text}");
    a.engines.destination = Named::File(write("d.toml", "model = \"llama-3.1-8b\"\n\nblock_size = 0\n"));
    a.engines.json = false;
    let text = text_of(&a);
    assert!(text.contains("destination: ") && text.contains("d.toml:3: block_size: is 0; it must be 1 to"), "{text}");
    assert!(text.contains("lower dcp, or raise tp to (KV heads) x 2"), "{text}");
    assert!(text.ends_with("NOT compatible: 4 faults in the descriptions\n"), "{text}");
}

#[test]
fn a_missing_file_is_a_fault_of_its_side() {
    let (text, status) = report(&args("prefill-tp4-pp2.toml", "none.toml", false));
    assert!(status == 2 && text.contains("destination: ") && text.contains("none.toml: cannot be read"), "{text}");
}
#[test]
fn groups_states_and_shared_memory_are_shown() {
    let text = text_of(&args("hybrid-prefill.toml", "hybrid-decode.toml", false));
    assert!(text.ends_with("compatible: 29 items, 6,144 B a token and 49,082,368 B a state\n"), "{text}");
    assert!(text.contains("these groups share memory: a block id is in use by one of them at a time"), "{text}");
    assert!(text.contains("states' rows outside, 3 scratch rows"), "{text}");
    let value: Value =
        serde_json::from_str(&text_of(&args("hybrid-prefill.toml", "hybrid-decode.toml", true))).unwrap();
    assert_eq!(
        (&value["source"]["share_memory"], &value["destination"]["share_memory"]),
        (&json!(true), &json!(false))
    );
    let groups = value["source"]["groups"].as_array().unwrap();
    let states = groups.iter().filter(|g| g["kind"] == "state");
    assert!(states.clone().all(|g| g["block_tokens"] == 0 && g["retention"] == json!([])) && states.count() > 1);
    assert_eq!(value["source"]["bytes_per_state"], 49_082_368);
}

#[test]
fn reasons_are_typed() {
    let field = |mut a: CheckArgs, scales: [&str; 2], tokens: u32| {
        let dir = tempfile::tempdir().unwrap();
        let engine = |name: &str, tp: u32, scales: &str| {
            let path = dir.path().join(name);
            let text = format!(
                "model = \"llama-3.1-8b\"\nkv_dtype = \"fp8\"\nscales = \"{scales}\"\nscale_block = {tokens}\nparallel = \"tp={tp}\"\nblock_size = 64\n"
            );
            std::fs::write(&path, text).unwrap();
            Named::File(path)
        };
        (a.engines.source, a.engines.destination) = (engine("p.toml", 2, scales[0]), engine("d.toml", 4, scales[1]));
        let value: Value = serde_json::from_str(&text_of(&a)).unwrap();
        let first = &value["mismatches"][0];
        (first["field"].clone(), first["source"].clone(), first["destination"].clone())
    };
    let args = || args("tp=1", "tp=1", true);
    let shared = field(args(), ["per-block", "per-block"], 16);
    let ranges = json!("ranks hold heads [0, 2), [2, 4), [4, 6), [6, 8)");
    assert_eq!(shared, (json!("shared"), json!("ranks hold heads [0, 4), [4, 8)"), ranges));
    let coverage = field(args(), ["per-block", "per-block-head"], 16);
    assert_eq!(
        coverage,
        (json!("coverage"), json!("16 entries of all heads of a rank"), json!("16 entries of one head"))
    );
    assert_eq!(field(args(), ["per-block-head", "per-block-head"], 16).0, Value::Null);
}

#[test]
fn what_only_one_side_has_is_let_pass_on_demand() {
    let mut a = args("draft.toml", "tp=4", false);
    a.engines.model.model = Some("kimi-k2.5".into());
    a.engines.model.kv_dtype = Some(kvferry_models::KvDtype::Fp8DsMla);
    assert!(text_of(&a).contains("(--ignore-source-only)"), "{}", text_of(&a));
    a.engines.ignore.ignore_source_only = true;
    let text = text_of(&a);
    assert!(text.ends_with("compatible: 61 items, 1 left alone: draft.model.layers.61.self_attn.attn\n"), "{text}");
}

fn in_format(mut args: CheckArgs, format: Format) -> String {
    args.format = Some(format);
    text_of(&args)
}

/// Two descriptions with faults, in a folder of a name that has to be escaped everywhere.
fn faulty() -> (tempfile::TempDir, CheckArgs) {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("a <b> & \"c\" %");
    std::fs::create_dir(&inner).unwrap();
    let write = |name: &str, text: &str| {
        let path = inner.join(name);
        std::fs::write(&path, text).unwrap();
        Named::File(path)
    };
    let mut a = args("tp=1", "tp=1", false);
    a.engines.source = write("p.toml", "model = \"llama-3.1-8b\"\nblock_size = 0\nlayout = \"<&\\u0007>\"\n");
    a.engines.destination = write("d.toml", "model = \"none <of> these\"\n");
    (dir, a)
}

/// What every log must be, whatever is in it. Gives its results.
fn results(log: &str) -> Vec<Value> {
    let log: Value = serde_json::from_str(log).unwrap();
    assert_eq!((&log["version"], log["runs"].as_array().unwrap().len()), (&json!("2.1.0"), 1));
    let rules = log["runs"][0]["tool"]["driver"]["rules"].as_array().unwrap();
    let results = log["runs"][0]["results"].as_array().unwrap();
    for result in results {
        let index = usize::try_from(result["ruleIndex"].as_u64().unwrap()).unwrap();
        assert_eq!(rules[index]["id"], result["ruleId"]);
        assert_eq!(result["level"], "error");
        assert!(result["message"]["text"].as_str().is_some_and(|t| !t.is_empty()));
        for place in result["locations"].as_array().unwrap() {
            let uri = &place["physicalLocation"]["artifactLocation"]["uri"];
            assert!(
                uri.as_str().is_none_or(|u| u.bytes().all(|b| b.is_ascii_graphic() && !b"<>\"".contains(&b))),
                "{uri}"
            );
        }
    }
    results.clone()
}

#[test]
fn sarif_has_every_difference_where_it_can_be_changed() {
    let found = results(&in_format(args("prefill-tp4-pp2.toml", "decode-wrong.toml", false), Format::Sarif));
    let items: u64 = found.iter().map(|r| r["occurrenceCount"].as_u64().unwrap()).sum();
    assert_eq!((items, found.len()), (122, 5));
    let encoding = found.iter().find(|r| r["ruleId"] == "kvferry/encoding").unwrap();
    let text = encoding["message"]["text"].as_str().unwrap();
    for part in
        ["the encoding of k differs in 30 items", "source: bf16", "destination: fp8_e4m3", "use one type (kv_dtype"]
    {
        assert!(text.contains(part), "{text}");
    }
    let place = &encoding["locations"][0];
    assert!(place["physicalLocation"]["artifactLocation"]["uri"].as_str().unwrap().ends_with("decode-wrong.toml"));
    assert_eq!(place["logicalLocations"].as_array().unwrap().len(), 30);
    assert_eq!(place["logicalLocations"][0]["fullyQualifiedName"], "model.layers.0.self_attn.attn");
    let related = &encoding["relatedLocations"][0]["physicalLocation"]["artifactLocation"]["uri"];
    assert!(related.as_str().unwrap().ends_with("prefill-tp4-pp2.toml"));
    assert!(encoding["properties"]["reason"].as_str().unwrap().contains("no conversion is done"));
    let alerts: std::collections::BTreeSet<String> =
        found.iter().map(|r| r["partialFingerprints"]["kvferryDifference/v1"].to_string()).collect();
    assert_eq!(alerts.len(), 5, "each is an alert of its own");

    assert!(results(&in_format(args("prefill-tp4-pp2.toml", "decode-tp2.toml", false), Format::Sarif)).is_empty());
    // Sizes on the command line are in no file.
    let mut a = args("draft.toml", "tp=4", false);
    a.engines.model.model = Some("kimi-k2.5".into());
    let found = results(&in_format(a, Format::Sarif));
    assert!(!found.is_empty());
    let place = &found[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"];
    assert!(place.as_str().unwrap().ends_with("draft.toml") && found[0]["relatedLocations"] == json!([]), "{found:?}");
}

#[test]
fn sarif_has_faults_at_their_lines() {
    let (_dir, a) = faulty();
    let found = results(&in_format(a, Format::Sarif));
    assert!(found.iter().all(|r| r["ruleId"] == "kvferry/description"));
    let line = |r: &Value| r["locations"][0]["physicalLocation"]["region"]["startLine"].clone();
    let block_size = found.iter().find(|r| r["message"]["text"].as_str().unwrap().contains("block_size")).unwrap();
    assert_eq!((line(block_size), &block_size["properties"]["side"]), (json!(2), &json!("source")));
    assert!(found.iter().any(|r| r["properties"]["side"] == "destination"));
}

/// A tag that opens: its name, its attributes, and what text follows it.
type Element = (String, Vec<(String, String)>, String);

/// Text with its references resolved. XML has five by name, and all by number.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        out.push_str(before);
        let (name, after) = after.split_once(';').expect("a reference ends");
        out.push(match name {
            "amp" => '&',
            "lt" => '<',
            "gt" => '>',
            "quot" => '"',
            "apos" => '\'',
            number => char::from_u32(number.strip_prefix('#').unwrap().parse().unwrap()).unwrap(),
        });
        rest = after;
    }
    out + rest
}

/// The elements of a document, in order; panics where it isn't well-formed.
fn elements(xml: &str) -> Vec<Element> {
    let allowed = |c: char| matches!(c, '\t' | '\n' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..);
    assert!(xml.chars().all(allowed));
    let mut rest = xml.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n").unwrap();
    let (mut open, mut out): (Vec<String>, Vec<Element>) = (Vec::new(), Vec::new());
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>'));
        if let Some(last) = out.last_mut() {
            last.2.push_str(&plain(text));
        }
        let (tag, after) = after.split_once('>').unwrap();
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let (tag, closed) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        let mut list: Vec<(String, String)> = Vec::new();
        while !attributes.trim_start().is_empty() {
            let (key, after) = attributes.trim_start().split_once("=\"").unwrap();
            let (value, after) = after.split_once('"').unwrap();
            assert!(list.iter().all(|(k, _)| k != key), "{key} twice");
            list.push((key.into(), plain(value)));
            attributes = after;
        }
        assert!(out.is_empty() || !open.is_empty(), "one root");
        out.push((name.into(), list, String::new()));
        if !closed {
            open.push(name.into());
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty());
    out
}

fn attribute<'a>(element: &'a Element, key: &str) -> &'a str {
    element.1.iter().find(|(k, _)| k == key).map_or("", |(_, v)| v)
}

#[test]
fn junit_has_a_test_for_every_rule() {
    let report = |a| elements(&in_format(a, Format::Junit));
    let named = |list: &[Element], name: &str| list.iter().filter(|e| e.0 == name).cloned().collect::<Vec<_>>();
    let found = report(args("prefill-tp4-pp2.toml", "decode-wrong.toml", false));
    assert_eq!((found[0].0.as_str(), found[1].0.as_str()), ("testsuites", "testsuite"));
    let (cases, failures) = (named(&found, "testcase"), named(&found, "failure"));
    assert_eq!(attribute(&found[1], "tests"), cases.len().to_string());
    assert_eq!((attribute(&found[1], "failures"), attribute(&found[1], "errors")), ("3", "0"));
    assert_eq!((cases.len(), failures.len()), (2 + rules::RULES.len(), 3));
    assert!(attribute(&cases[2], "file").ends_with("decode-wrong.toml"));
    let encoding = failures.iter().find(|f| attribute(f, "type") == "kvferry/encoding").unwrap();
    assert!(attribute(encoding, "message").starts_with("the encoding of k differs in 30 items: "), "{encoding:?}");
    assert!(encoding.2.contains("source       bf16\n") && encoding.2.contains("no conversion is done"), "{encoding:?}");

    let found = report(args("prefill-tp4-pp2.toml", "decode-tp2.toml", false));
    assert!(named(&found, "failure").is_empty() && named(&found, "testcase").len() == cases.len());
    assert_eq!(attribute(&found[1], "failures"), "0");
}

#[test]
fn junit_has_faults_as_errors_and_skips_the_rest() {
    let (_dir, a) = faulty();
    let file = a.engines.source.to_string();
    let found = elements(&in_format(a, Format::Junit));
    let count = |name: &str| found.iter().filter(|e| e.0 == name).count();
    assert_eq!((count("error"), count("failure"), count("skipped")), (2, 0, rules::RULES.len()));
    assert_eq!((attribute(&found[1], "errors"), attribute(&found[1], "skipped")), ("2", "12"));
    assert!(found.iter().any(|e| e.0 == "testcase" && attribute(e, "file") == file), "{file}");
    let error = found.iter().find(|e| e.0 == "error").unwrap();
    assert!(error.2.contains("block_size: is 0"), "{error:?}");
}

#[test]
fn formats_are_chosen_on_the_command_line() {
    #[derive(clap::Parser)]
    enum Line {
        Check(CheckArgs),
    }
    let parse = |more: &[&str]| {
        let line = ["xtask", "check", "tp=2", "tp=4"].iter().chain(more);
        <Line as clap::Parser>::try_parse_from(line).map(|Line::Check(args)| args)
    };
    let text = text_of(&parse(&[]).unwrap());
    assert!(text.ends_with("compatible: 32 items, 131,072 B a token\n"), "{text}");
    assert_eq!(text, text_of(&parse(&["--format", "text"]).unwrap()));
    assert_eq!(text_of(&parse(&["--json"]).unwrap()), text_of(&parse(&["--format=json"]).unwrap()));
    assert!(text_of(&parse(&["--format=sarif"]).unwrap()).contains("\"version\": \"2.1.0\""));
    assert!(parse(&["--json", "--format=text"]).is_err() && parse(&["--format=xml"]).is_err());
    let mut command = <Line as clap::CommandFactory>::command();
    let help = command.find_subcommand_mut("check").unwrap().render_help().to_string();
    assert!(help.contains("Exit status: 0 compatible; 1 not compatible; 2 "), "{help}");
}
