//! The page that describes the configuration against the code, and what faults look like.

use std::collections::BTreeSet;
use std::time::Duration;

use kvferry_geometry::compat::Unmatched;
use kvferry_geometry::units::Bytes;
use kvferry_proto::names::EngineId;

use super::read::read;
use super::*;

const PAGE: &str = include_str!("../../../../docs/configuration.md");

fn toml(text: &str) -> Result<EngineConfig, String> {
    EngineConfig::from_toml("x.toml", text).map_err(|e| e.to_string())
}

fn faults(text: &str) -> Vec<String> {
    toml(text).err().map(|e| e.lines().map(str::to_owned).collect()).unwrap_or_default()
}

fn usual() -> EngineConfig {
    EngineConfig::new(EngineId::new("e").unwrap())
}

/// The blocks of the page in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let start = format!("```{language}\n");
    PAGE.split(&start).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// The rows of the page's table: key and default.
fn rows() -> Vec<(&'static str, Option<&'static str>)> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        (cells[1].trim_matches('`'), Some(cells[3].trim_matches('`')).filter(|d| *d != "-"))
    })
    .collect()
}

#[test]
fn an_id_is_enough_and_the_rest_is_the_default() {
    assert_eq!(toml("id = \"e\"").unwrap(), usual());
    assert_eq!(usual().check(), Ok(()));
    assert_eq!(faults(""), ["x.toml: id: is missing; it names the engine to its peers, as in id = \"prefill-0\""]);
}

#[test]
fn the_page_lists_every_key_and_no_other() {
    let (_, known) = read("", "");
    let known: BTreeSet<&str> = known.iter().map(String::as_str).collect();
    let listed: BTreeSet<&str> = rows().into_iter().map(|(key, _)| key).collect();
    assert_eq!(known, listed);
}

#[test]
fn the_defaults_on_the_page_are_the_defaults() {
    let mut checked = 0;
    for (key, default) in rows() {
        if let Some(default) = default {
            assert_eq!(toml(&format!("id = \"e\"\n{key} = {default}\n")).as_ref(), Ok(&usual()), "{key}");
            checked += 1;
        }
    }
    assert!(checked > 25, "{checked}");
}

#[test]
fn the_examples_of_the_page_are_read_and_have_every_key() {
    let (_, known) = read("", "");
    let examples = blocks("toml");
    for example in &examples {
        toml(example).unwrap();
    }
    for key in known {
        let (table, name) = key.rsplit_once('.').unwrap_or(("", &key));
        let head = if table.is_empty() { String::new() } else { format!("[{table}]") };
        let has = |example: &&&str| {
            let section = example[example.find(&head).unwrap_or(example.len())..].trim_start_matches(&head);
            let section = section.split("\n[").next().unwrap();
            name == "<name>" || section.lines().any(|l| l.starts_with(&format!("{name} = ")))
        };
        assert!(examples.iter().any(|e| has(&e)), "no example has {key}");
    }
}

#[test]
fn the_faults_on_the_page_are_what_is_said() {
    let text = "id = \"e\"\n[lease]\ntll = \"30s\"\n\n\n\n[control]\ngrace = 2\n";
    let said = toml(text).unwrap_err().replace("x.toml", "engine.toml") + "\n";
    assert_eq!(said, blocks("text")[0]);
}

#[test]
fn values_go_where_they_belong() {
    let c = toml(blocks("toml")[0]).unwrap();
    assert_eq!(c.compat.source_only, Unmatched::Ignore);
    assert_eq!(c.control.advertise, Some("tcp:10.0.3.17:7600".parse().unwrap()));
    assert_eq!(c.control.idle, Some(Duration::from_secs(300)));
    assert_eq!(c.security.engines, Some(vec!["prefill-*".into(), "decode-*".into()]));
    assert_eq!(
        c.security.allow.into_iter().collect::<Vec<_>>(),
        [
            ("kvferry.internal".to_owned(), AllowedAs::Fleet),
            ("prefill-*".to_owned(), AllowedAs::Same),
            ("spiffe://cluster.local/ns/kv/sa/decode".to_owned(), AllowedAs::Engines(vec!["decode-*".into()])),
        ]
    );
    let [roots, certificate, key, revoked] =
        ["ca.pem", "tls.pem", "tls.key", "revoked.pem"].map(|f| format!("/etc/kvferry/{f}"));
    let tls = SecurityMode::Tls {
        roots: roots.into(),
        certificate: certificate.into(),
        key: key.into(),
        revocation_lists: Some(revoked.into()),
    };
    assert_eq!(c.security.mode, tls);
    assert_eq!((c.worker.staging.pool, c.worker.staging.threads), (Bytes::new(256 << 20), 2));
    assert_eq!(c.worker.lanes.min_bytes_per_second(), Some(10_000_000_000));
    let c = toml(blocks("toml")[1]).unwrap();
    let also = [("2026-10".to_owned(), "/etc/kvferry/2026-10.key".into())].into();
    let (id, key) = ("2026-11".to_owned(), "/etc/kvferry/2026-11.key".into());
    assert_eq!(c.security.mode, SecurityMode::SharedKey { id, key, also });
    let c = toml("id = \"e\"\nlease.ttl = \"never\"\ncontrol.idle = \"never\"").unwrap();
    assert_eq!((c.lease.ttl, c.control.idle), (None, None));
}

#[test]
fn all_faults_are_told_at_once_by_line() {
    let text = r#"
id = "a b"
stripe = "yes"
lisen = "tcp:127.0.0.1:1"
[control]
listen = "127.0.0.1:1"
handshake_timeout = 10
idle = "forever"
[leases]
ttl = "30s"
[lease]
beat = "1.5s"
[security]
mode = "ssl"
tls = "x"
allow = { "a" = "b", "c" = 3, "d" = ["e", 4] }
[worker.lanes]
require = "rdma"
[worker.admission]
slice = "8M"
ops = 0
peer_ops = -1
[worker.staging]
pool = 0
threads = 99999999999999999999
[emptied]
"#;
    let lines = faults(text);
    let begins = [
        "x.toml:2: id: is \"a b\"; ",
        "x.toml:3: stripe: must be true or false, not \"yes\"",
        "x.toml:4: lisen: is no known key; the nearest one is control.listen",
        "x.toml:6: control.listen: is \"127.0.0.1:1\"; ",
        "x.toml:7: control.handshake_timeout: must be a duration",
        "x.toml:8: control.idle: must be a duration",
        "x.toml:10: leases.ttl: is no known key; the nearest one is lease.ttl",
        "x.toml:12: lease.beat: must be a duration",
        "x.toml:14: security.mode: must be \"plaintext\", \"tls\" or \"shared_key\", not \"ssl\"",
        "x.toml:15: security.tls: is there, but security.mode is another",
        "x.toml:15: security.tls: must be a table, not \"x\"",
        "x.toml:16: security.allow.a: must be \"same\", \"fleet\" or a list",
        "x.toml:16: security.allow.c: must be ",
        "x.toml:16: security.allow.d: must be ",
        "x.toml:18: worker.lanes.require: must be a list of texts",
        "x.toml:20: worker.admission.slice: must be a size with its unit",
        "x.toml:21: worker.admission.ops: is 0; it must be 1 at least",
        "x.toml:22: worker.admission.peer_ops: is -1; it must be 1 at least",
        "x.toml:24: worker.staging.pool: must be a size with its unit",
        "x.toml:25: worker.staging.threads: is 99999999999999999999; it must be 1 at least",
        "x.toml:26: emptied: is no known key; the nearest one is ",
    ];
    for (line, begin) in lines.iter().zip(begins) {
        assert!(line.starts_with(begin), "{line}\n{begin}");
    }
    assert_eq!(lines.len(), begins.len(), "{lines:#?}");
}

#[test]
fn values_that_cannot_be_together_are_faults_of_the_key_to_change() {
    for (text, key, what) in [
        ("control.listen = \"tcp:0.0.0.0:7600\"", "control.listen", "advertise"),
        ("control.advertise = \"tcp:1.2.3.4:7600\"", "control.advertise", "control.listen isn't"),
        (
            "control = { listen = \"tcp:127.0.0.1:0\", advertise = \"tcp:1.2.3.4:0\" }",
            "control.advertise",
            "can't connect",
        ),
        ("lease = { beat = \"20s\", extension = \"20s\" }", "lease.extension", "every lease would expire"),
        ("lease = { ttl = \"1s\", margin = \"1s\" }", "lease.margin", "no read would ever start"),
        ("lease.ttl = \"0s\"", "lease.ttl", "no time at all"),
        ("retry = { first = \"2s\", most = \"1s\" }", "retry.most", "less than"),
        ("worker.admission.slice = \"0B\"", "worker.admission.slice", "nothing could ever be read"),
        ("connections.waiting = \"1kB\"", "connections.waiting", "too little"),
        ("connections.stranger_bytes = \"1MiB\"", "connections.stranger_bytes", "could never be read"),
        ("worker.lanes.require = [\"RDMA\"]", "worker.lanes.require", "can't be the name of a lane"),
        ("security.mode = \"tls\"", "security.tls.roots", "is missing"),
        ("security.mode = \"shared_key\"", "security.shared_key.key", "is missing"),
        ("security.shared_key.id = \"k\"", "security.shared_key", "security.mode is another"),
        ("security.allow.\"decode-*\" = \"same\"", "security.allow", "everybody would be let in"),
        ("security.readable_by_others = true", "security.readable_by_others", "no file with secrets is read"),
        ("limits.links = 0", "limits.links", "1 at least"),
    ] {
        let lines = faults(&format!("id = \"e\"\n{text}"));
        let found = lines.iter().any(|l| l.contains(&format!(" {key}: ")) && l.contains(what));
        assert!(found, "{text}: {lines:#?}");
    }
    let mut c = usual();
    c.control.listen = Some("tcp:[::]:7600".parse().unwrap());
    let said = c.check().unwrap_err().to_string();
    assert!(said.starts_with("control.listen: is tcp:[::]:7600, which peers can't connect to"), "{said}");
    // Keys may come from code: whether links are protected is known at the start.
    assert_eq!(toml("id = \"e\"\ncontrol.listen = \"tcp:10.0.3.17:7600\"").map(|_| ()), Ok(()));
    let mut c = usual();
    c.security.allow.insert("decode-0".into(), AllowedAs::Same);
    let said = c.check().unwrap_err().to_string();
    assert!(said.starts_with("security.allow: is there, but"), "{said}");
}

#[test]
fn no_text_is_more_than_can_be_borne() {
    let deep = format!("id = \"e\"\n{}x = 1", "a.".repeat(100_000));
    let long = "#".repeat(2 << 20);
    let nested = format!("a = {}{}", "[".repeat(2000), "]".repeat(2000));
    let many: String = (0..1000).map(|i| format!("k{i} = 1\n")).collect();
    for text in [&deep, &long, &nested, &many, "id = ", "\u{0}", "[[id]]", "id.id = 1", "= 1", "id = 1\nid = 2"] {
        let lines = faults(text);
        assert!((1..=64).contains(&lines.len()), "{text:.20}");
        assert!(lines.iter().all(|l| l.len() < 1000), "{text:.20}: {lines:?}");
    }
    let missing = EngineConfig::from_file(Path::new("/nowhere/engine.toml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/engine.toml: cannot be read: "), "{missing}");
    // One without an end.
    let endless = EngineConfig::from_file(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(endless.contains("more than the 1048576 bytes"), "{endless}");
}

#[test]
fn a_file_of_another_program_is_refused_soon() {
    let long = format!("_{}", "b".repeat(180));
    let keys: String = (0..5000).map(|i| format!("k{i}{long} = 1\n")).collect();
    let tables: String = (0..60_000).map(|i| format!("[t{i}]\n")).collect();
    let start = std::time::Instant::now();
    for text in [&keys, &tables] {
        assert!((500_000..1 << 20).contains(&text.len()), "{}", text.len());
        let lines = faults(text);
        // By line, so that what is listed is what comes first.
        assert!(lines[1].starts_with("x.toml:1: ") && lines[63].starts_with("x.toml:63: "), "{lines:?}");
        assert_eq!(lines.len(), 64);
    }
    // Some 20 ms where the nearest key is looked for only where it is told, and many seconds where it isn't.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}
