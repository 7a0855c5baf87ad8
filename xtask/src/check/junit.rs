//! The outcome as JUnit's XML, which build servers show as tests that passed or failed.
//!
//! There is no one standard; this is what Jenkins, GitLab and GitHub's viewers read
//! (<https://github.com/jenkinsci/xunit-plugin/blob/master/src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd/junit-10.xsd>).
//! One suite, for the pair; a test for each description and for each rule. A description that is faulty is an error, and the rules
//! are skipped then; a rule that is broken is a failure, with all that differs.

use super::Outcome;
use super::differences::alike;
use super::rules::{DESCRIPTION, RULES};
use crate::engine::Named;
use crate::show;

/// The whole report.
pub(super) fn report(outcome: &Outcome) -> String {
    let mut cases = Cases::default();
    for (side, named) in ["source", "destination"].into_iter().zip(&outcome.named) {
        let faults: Vec<&str> = outcome.faults.iter().filter(|f| f.side == side).map(|f| f.text.as_str()).collect();
        let ends = match faults.as_slice() {
            [] => Ends::Well,
            [first, ..] => {
                cases.errors += 1;
                let message = format!("{}: {first}", show::number_of(faults.len(), "fault"));
                Ends::Badly { with: "error", rule: DESCRIPTION.id(), message, text: faults.join("\n") }
            }
        };
        cases.add(&format!("{side}: the description is sound"), Some(named), ends);
    }
    let alike = alike(&outcome.differences);
    for rule in RULES {
        let broken: Vec<_> = alike.iter().filter(|a| a.first.field == rule.field).collect();
        let ends = match broken.as_slice() {
            [] if outcome.faults.is_empty() => Ends::Well,
            [] => {
                cases.skipped += 1;
                Ends::Skipped
            }
            [first, ..] => {
                cases.failures += 1;
                let told =
                    broken.iter().map(|a| format!("{}{}    reason       {}\n", a.heading(), a.text(), a.first.reason));
                let message = first.heading().trim_end().to_owned();
                Ends::Badly { with: "failure", rule: rule.id(), message, text: told.collect() }
            }
        };
        cases.add(&format!("{}: {}", rule.field, rule.must), outcome.named.get(1), ends);
    }
    cases.finish(&format!("{} -> {}", outcome.named[0], outcome.named[1]))
}

enum Ends {
    Well,
    Skipped,
    Badly { with: &'static str, rule: String, message: String, text: String },
}

#[derive(Default)]
struct Cases {
    xml: String,
    tests: usize,
    failures: usize,
    errors: usize,
    skipped: usize,
}

impl Cases {
    fn add(&mut self, name: &str, of: Option<&Named>, ends: Ends) {
        self.tests += 1;
        let file = match of {
            Some(named @ Named::File(_)) => format!(" file=\"{}\"", escaped(&named.to_string())),
            _ => String::new(),
        };
        let open = format!("    <testcase classname=\"kvferry.check\" name=\"{}\"{file} time=\"0\"", escaped(name));
        let inside = match ends {
            Ends::Well => {
                self.xml.push_str(&format!("{open}/>\n"));
                return;
            }
            Ends::Skipped => "<skipped message=\"a description is faulty\"/>".to_owned(),
            Ends::Badly { with, rule, message, text } => format!(
                "<{with} type=\"{}\" message=\"{}\">{}</{with}>",
                escaped(&rule),
                escaped(&message),
                // Between tags a line's end stays one.
                escaped(&text).replace("&#10;", "\n")
            ),
        };
        self.xml.push_str(&format!("{open}>\n      {inside}\n    </testcase>\n"));
    }

    fn finish(self, name: &str) -> String {
        let Self { xml, tests, failures, errors, skipped } = self;
        let counts = format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"{errors}\"");
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"kvferry check\" {counts} time=\"0\">\n  \
             <testsuite name=\"{}\" {counts} skipped=\"{skipped}\" time=\"0\">\n{xml}  </testsuite>\n</testsuites>\n",
            escaped(name)
        )
    }
}

/// Text that may stand in XML 1.0, between tags and in attributes. What no document may have becomes a replacement character; a
/// line's end stays one in an attribute, where it would become a space.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' | '\t' | '\r' => out.push_str(&format!("&#{};", u32::from(c))),
            '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'.. => out.push(c),
            _ => out.push('\u{fffd}'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a<b>&\"c'\n\t"), "a&lt;b&gt;&amp;&quot;c&apos;&#10;&#9;");
        assert_eq!(escaped("\0\u{1b}[1m\u{fffe}\u{ffff}é\u{10ffff}"), "\u{fffd}\u{fffd}[1m\u{fffd}\u{fffd}é\u{10ffff}");
    }
}
