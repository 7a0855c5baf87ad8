//! The outcome as SARIF 2.1.0, which code hosts show beside the lines of a change.
//!
//! The format is OASIS's: <https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>. One run; a result for each fault of
//! a description at its line, and one for all items that differ alike, at the destination's description, with the source's as a
//! related location. The items are its logical locations. There is no result where nothing is wrong.

use std::path::Path;

use serde_json::{Value, json};

use super::differences::{Alike, alike};
use super::rules::{DESCRIPTION, RULES, Rule};
use super::{Fault, Outcome};
use crate::engine::Named;
use crate::show;

const SCHEMA: &str = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json";

/// The whole log.
pub(super) fn log(outcome: &Outcome) -> Value {
    let rules: Vec<&Rule> = std::iter::once(&DESCRIPTION).chain(RULES).collect();
    let faults = outcome.faults.iter().map(fault);
    let differences = alike(&outcome.differences).into_iter().map(|a| difference(outcome, &a, &rules));
    let results: Vec<Value> = faults.chain(differences).collect();
    json!({
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "kvferry check",
                "semanticVersion": env!("CARGO_PKG_VERSION"),
                "informationUri": env!("CARGO_PKG_REPOSITORY"),
                "rules": rules.iter().map(|r| descriptor(r)).collect::<Vec<_>>(),
            }},
            "columnKind": "unicodeCodePoints",
            "results": results,
            "properties": {
                "compatible": outcome.compatible.is_some(),
                "source": outcome.named[0].to_string(),
                "destination": outcome.named[1].to_string(),
            },
        }],
    })
}

fn descriptor(rule: &Rule) -> Value {
    json!({
        "id": rule.id(),
        "name": rule.name,
        "shortDescription": {"text": rule.must},
        "defaultConfiguration": {"level": "error"},
    })
}

fn fault(fault: &Fault) -> Value {
    let key = if fault.key.is_empty() { String::new() } else { format!("{}: ", fault.key) };
    let mut location = json!({"physicalLocation": file(Path::new(&fault.file))});
    if let Some(line) = fault.line.filter(|line| *line > 0) {
        location["physicalLocation"]["region"] = json!({"startLine": line});
    }
    json!({
        "ruleId": DESCRIPTION.id(),
        "ruleIndex": 0,
        "level": "error",
        "message": {"text": format!("The {}'s description: {key}{}", fault.side, fault.message)},
        "locations": [location],
        "properties": {"side": fault.side},
    })
}

fn difference(outcome: &Outcome, alike: &Alike<'_>, rules: &[&Rule]) -> Value {
    let d = alike.first;
    let index = rules.iter().position(|r| r.field == d.field).unwrap_or(rules.len() - 1);
    let heading = alike.heading();
    let text = format!(
        "{}; source: {}; destination: {}. To change: {}.",
        heading.trim_end(),
        d.source,
        d.destination,
        d.change
    );
    let [source, destination] = [0, 1].map(|at| at_file(&outcome.named[at]));
    let logical = |item: &&str| json!({"fullyQualifiedName": item, "kind": "element"});
    let mut location = json!({"logicalLocations": alike.items.iter().map(logical).collect::<Vec<_>>()});
    let mut related = Vec::new();
    match (destination, source) {
        (Some(destination), source) => {
            location["physicalLocation"] = destination;
            related.extend(source.map(|place| {
                json!({"id": 0, "physicalLocation": place, "message": {"text": format!("the source: {}", d.source)}})
            }));
        }
        (None, Some(source)) => location["physicalLocation"] = source,
        (None, None) => {}
    }
    json!({
        "ruleId": rules.get(index).map_or_else(String::new, |r| r.id()),
        "ruleIndex": index,
        "level": "error",
        "message": {"text": text},
        "locations": [location],
        "relatedLocations": related,
        "occurrenceCount": alike.items.len(),
        // The same difference in the next run is the same alert, whatever stands on either side then.
        "partialFingerprints": {"kvferryDifference/v1": fingerprint(alike)},
        "properties": {
            "component": d.component.as_ref().map(|c| c.as_str()),
            "source": d.source,
            "destination": d.destination,
            "change": d.change,
            "reason": d.reason,
        },
    })
}

fn fingerprint(alike: &Alike<'_>) -> String {
    let component = alike.first.component.as_ref().map_or("", |c| c.as_str());
    format!("{}:{component}:{}", alike.first.field, show::names(alike.items.iter().copied()))
}

/// The file of an engine that is described by one.
fn at_file(named: &Named) -> Option<Value> {
    match named {
        Named::File(path) => Some(file(path)),
        Named::Shape(_) => None,
    }
}

/// A relative path stays one: it is looked for from where the command was run, a repository's root, say.
fn file(path: &Path) -> Value {
    let text = path.to_string_lossy();
    let text = text.strip_prefix("./").unwrap_or(&text);
    let scheme = if path.is_absolute() { "file://" } else { "" };
    json!({"artifactLocation": {"uri": format!("{scheme}{}", escaped(text))}})
}

/// A path as a URI reference: everything but what may stand in a path is percent-encoded. A colon may not stand in the first part of
/// a relative one.
fn escaped(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b'@' | b'+' | b'=' | b',' => {
                out.push(char::from(byte));
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_uri_references() {
        let uri = |path: &str| file(Path::new(path))["artifactLocation"]["uri"].as_str().unwrap().to_owned();
        assert_eq!(uri("deploy/p.toml"), "deploy/p.toml");
        assert_eq!(uri("./p.toml"), "p.toml");
        assert_eq!(uri("/etc/a b/é#1%.toml"), "file:///etc/a%20b/%C3%A9%231%25.toml");
        assert_eq!(uri("c:p?.toml"), "c%3Ap%3F.toml");
    }
}
