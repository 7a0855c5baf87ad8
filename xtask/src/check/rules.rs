//! What `check` looks at, under names that stay: a pipeline may count them, or let one pass.

/// One thing that two engines must agree on.
#[derive(Debug)]
pub(super) struct Rule {
    /// As in the JSON; with `kvferry/` before it, the rule's id.
    pub(super) field: &'static str,
    /// Its name in programs that show names.
    pub(super) name: &'static str,
    /// What differs, in the words of the text.
    pub(super) what: &'static str,
    /// What must hold.
    pub(super) must: &'static str,
}

impl Rule {
    /// The id.
    pub(super) fn id(&self) -> String {
        format!("kvferry/{}", self.field)
    }
}

const fn rule(field: &'static str, name: &'static str, what: &'static str, must: &'static str) -> Rule {
    Rule { field, name, what, must }
}

/// Faults of a description itself.
pub(super) const DESCRIPTION: Rule = rule(
    "description",
    "Description",
    "the description",
    "A description can be read, and its ranks make a complete cache.",
);

/// All rules of the comparison. New ones go before the last.
pub(super) const RULES: &[Rule] = &[
    rule("item", "Item", "the item", "Both engines cache the same items, unless those of one side are ignored."),
    rule("kind", "Kind", "the kind of cache", "An item is a paged cache on both sides, or a state on both."),
    rule("count", "Count", "a count", "Both engines count the same heads, units and rows."),
    rule("retention", "Retention", "the tokens kept", "Both engines keep the same tokens: all, a window, or chunks."),
    rule(
        "components",
        "Components",
        "the list of components or parts",
        "An item has the same components on both sides.",
    ),
    rule("width", "Width", "the width of a value", "A value is as wide on both sides: the same head size and type."),
    rule(
        "encoding",
        "Encoding",
        "the encoding",
        "A value is encoded alike on both sides: nothing is converted on the way.",
    ),
    rule("coverage", "Coverage", "what one value covers", "A scale covers the same entries and heads on both sides."),
    rule(
        "shared",
        "SharedValue",
        "the cut of the heads that share one value",
        "Where one scale stands for all heads of a rank, both engines cut the heads alike.",
    ),
    rule("model", "Model", "the model", "The engines serve the same model: some of their items have the same names."),
    rule(
        "tokens",
        "Tokens",
        "the dealing out of tokens",
        "Tokens dealt out over ranks on both sides meet again soon enough.",
    ),
    rule("other", "Other", "something", "Nothing else keeps one engine from taking over the cache of the other."),
];

/// The rule that a difference's field names.
pub(super) fn of(field: &str) -> &'static Rule {
    static OTHER: Rule = rule("other", "Other", "something", "");
    RULES.iter().find(|r| r.field == field).or(RULES.last()).unwrap_or(&OTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They are in other people's pipelines.
    #[test]
    fn the_names_stay() {
        let fields: Vec<&str> = RULES.iter().map(|r| r.field).collect();
        let known = [
            "item",
            "kind",
            "count",
            "retention",
            "components",
            "width",
            "encoding",
            "coverage",
            "shared",
            "model",
            "tokens",
            "other",
        ];
        assert_eq!(fields, known);
        assert_eq!(DESCRIPTION.id(), "kvferry/description");
        assert!(known.iter().all(|field| of(field).field == *field) && of("new").field == "other");
    }
}
