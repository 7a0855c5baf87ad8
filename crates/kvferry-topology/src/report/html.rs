//! Text as HTML: escaped, so that no name can be anything but text.

use super::figures::{clean, clip};

/// The longest name that a page shows.
const LONGEST: usize = 96;

/// Text for an element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A name from an answer: cleaned, cut, escaped.
pub(super) fn name(text: &str) -> String {
    escape(&clean(&clip(text, LONGEST)))
}

/// A name of at most so many characters.
pub(super) fn short(text: &str, most: usize) -> String {
    escape(&clean(&clip(text, most)))
}

/// A sentence from an answer: cleaned and escaped, but not cut where a name would be; what stands between backticks is code.
pub(super) fn sentence(text: &str) -> String {
    let text = escape(&clean(&clip(text, 2000)));
    let parts: Vec<&str> = text.split('`').collect();
    if parts.len().is_multiple_of(2) {
        return text;
    }
    let tags = ["<code>", "</code>"].into_iter().cycle();
    let mut out = String::new();
    for (part, tag) in parts.iter().zip(std::iter::once("").chain(tags)) {
        out.push_str(tag);
        out.push_str(part);
    }
    out
}

/// A number with its unit, which a line's end does not part from it.
pub(super) fn number(text: &str) -> String {
    escape(text).replace(" us", " µs").replace(' ', "\u{a0}")
}

/// JSON as the text of a script element: nothing in it ends the element, begins a comment, or ends a line of script.
pub(super) fn json(text: &str) -> String {
    // Outside of strings JSON has none of these, and inside them an escape says the same.
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            c => out.push(c),
        }
    }
    out
}

/// A part of one as a length of an SVG: `12.5%`.
pub(super) fn percent(part: f64) -> String {
    let part = if part.is_finite() { part } else { 0.0 };
    let text = format!("{:.3}", part * 100.0);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{}%", if text == "-0" { "0" } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_markup() {
        assert_eq!(name("<b a=\"1\" c='2'>&amp;"), "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;");
        assert_eq!(name("a\0b\x1bc"), "a␀b␛c");
        assert_eq!(name(&"x".repeat(5000)).chars().count(), LONGEST);
    }

    #[test]
    fn code_is_between_backticks_where_they_are_even() {
        assert_eq!(sentence("set `a = \"<\"` or `b`"), "set <code>a = &quot;&lt;&quot;</code> or <code>b</code>");
        assert_eq!((sentence("a ` b"), sentence("``")), ("a ` b".into(), "<code></code>".into()));
    }

    #[test]
    fn json_says_the_same_and_ends_no_script() {
        let value = serde_json::json!({"</script><!--": "\u{2028}&\u{2029}-->"});
        let text = json(&value.to_string());
        assert!(!text.contains(['<', '>', '&', '\u{2028}', '\u{2029}']), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).ok(), Some(value));
    }

    #[test]
    fn lengths_are_short() {
        assert_eq!(
            [0.0, -0.0, 1.0, 0.125, 1.0 / 3.0, f64::NAN].map(percent),
            ["0%", "0%", "100%", "12.5%", "33.333%", "0%"]
        );
    }
}
