//! Which items share a block table, and each group's sizes.

use kvferry_geometry::layout::{ComponentOrder, LayoutStyle, Rows};
use kvferry_geometry::spec::{Item, ModelSpec, Retention};
use kvferry_geometry::units::ItemId;

use crate::describe::{DEFAULT_BLOCKS, EngineDescription, MAX_BLOCK_SIZE, MAX_BLOCKS};
use crate::error::{InputError, InputFault};

/// Which items share a block table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Grouping {
    /// A group for each retention and page shape (heads and components).
    #[default]
    ByShape,
    /// A group for each retention.
    ByRetention,
    /// These groups; the first whose rule fits takes the item.
    Listed(Vec<GroupRule>),
}

/// A group of a description: which items it takes, and where it differs from the engine's own values.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupRule {
    /// Its name, for messages.
    pub name: String,
    /// Item names, in which `*` stands for any text; none means any name.
    pub items: Vec<String>,
    /// Only items of this kind: `full`, `window` or `chunk`.
    pub retention: Option<RetentionKind>,
    /// Tokens of a block.
    pub block_size: Option<u32>,
    /// Tokens of a kernel block.
    pub kernel_block: Option<u32>,
    /// Blocks.
    pub blocks: Option<u32>,
    /// Layout, without its kernel block.
    pub layout: Option<LayoutStyle>,
}

/// A kind of retention, whatever its size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RetentionKind {
    /// All tokens.
    Full,
    /// A sliding window.
    Window,
    /// Chunks.
    Chunk,
}

/// A group with its items and sizes.
pub(crate) struct Group {
    pub(crate) name: String,
    /// Where it is described, e.g. `group.1`; empty where it isn't.
    key: String,
    pub(crate) items: Vec<ItemId>,
    pub(crate) block_size: u32,
    kernel_block: Option<u32>,
    pub(crate) blocks: u32,
    pub(crate) style: LayoutStyle,
    own_block_size: bool,
}

impl EngineDescription {
    /// The groups with their sizes filled in.
    pub(crate) fn groups(&self, spec: &ModelSpec, errors: &mut Vec<InputError>) -> Vec<Group> {
        let mut groups = match &self.grouping {
            Grouping::ByShape => self.auto_groups(spec, true),
            Grouping::ByRetention => self.auto_groups(spec, false),
            Grouping::Listed(rules) => self.listed_groups(spec, rules, errors),
        };
        for group in &mut groups {
            self.check_group(group, errors);
        }
        groups
    }

    fn auto_groups(&self, spec: &ModelSpec, by_shape: bool) -> Vec<Group> {
        let mut groups: Vec<(Group, &Item)> = Vec::new();
        for (id, item) in spec.iter() {
            let (paged, same) = (item.as_paged(), |other: &Item| {
                let other = other.as_paged();
                let paged = item.as_paged();
                other.retention == paged.retention
                    && (!by_shape || (other.heads == paged.heads && other.components == paged.components))
            });
            match groups.iter_mut().find(|(_, first)| same(first)) {
                Some((group, _)) => group.items.push(id),
                None => {
                    let name = format!("{} {}", groups.len(), paged.retention);
                    groups.push((self.group(name, String::new(), &GroupRule::default(), vec![id]), item));
                }
            }
        }
        groups.into_iter().map(|g| g.0).collect()
    }

    fn listed_groups(&self, spec: &ModelSpec, rules: &[GroupRule], errors: &mut Vec<InputError>) -> Vec<Group> {
        let mut groups: Vec<Group> = rules
            .iter()
            .enumerate()
            .map(|(i, rule)| self.group(rule.name.clone(), format!("group.{i}"), rule, Vec::new()))
            .collect();
        for (id, item) in spec.iter() {
            match rules.iter().position(|r| r.takes(item)) {
                Some(i) => groups[i].items.push(id),
                None => {
                    let text = format!("item {} fits no group; add a group that takes it", item.name);
                    errors.push(self.error("group", InputFault::Contradiction(text)));
                }
            }
        }
        for group in &groups {
            let mut kinds = group.items.iter().filter_map(|&id| spec.get(id));
            let Some(first) = kinds.next() else {
                let text = format!("{:?} takes no item; correct or remove it", group.name);
                errors.push(self.error(&group.key, InputFault::Contradiction(text)));
                continue;
            };
            if let Some(other) = kinds.find(|i| i.as_paged().retention != first.as_paged().retention) {
                let (a, b) = (first.as_paged().retention, other.as_paged().retention);
                let text = format!(
                    "items {} ({a}) and {} ({b}) keep different tokens; put them in two groups, for example by retention",
                    first.name, other.name
                );
                errors.push(self.error(&group.key, InputFault::Contradiction(text)));
            }
        }
        groups
    }

    fn group(&self, name: String, key: String, rule: &GroupRule, items: Vec<ItemId>) -> Group {
        let kernel_block = match (rule.kernel_block, rule.block_size) {
            (Some(kernel), _) => Some(kernel),
            // A group with a block of its own has a kernel block of its own, or none.
            (None, Some(_)) => None,
            (None, None) => self.kernel_block,
        };
        Group {
            name,
            key,
            items,
            block_size: rule.block_size.unwrap_or(self.block_size),
            kernel_block,
            blocks: rule.blocks.or(self.blocks).unwrap_or(DEFAULT_BLOCKS),
            style: LayoutStyle { kernel_block, ..rule.layout.unwrap_or(self.layout) },
            own_block_size: rule.block_size.is_some(),
        }
    }

    fn check_group(&self, group: &Group, errors: &mut Vec<InputError>) {
        let key = |name: &str, own: bool| if own { format!("{}.{name}", group.key) } else { name.into() };
        let block_key = key("block_size", group.own_block_size);
        let own =
            |name: &str| !group.key.is_empty() && self.origin.lines.contains_key(&format!("{}.{name}", group.key));
        let ranges = [
            (block_key.clone(), group.block_size, MAX_BLOCK_SIZE),
            (key("blocks", own("blocks")), group.blocks, MAX_BLOCKS),
            (key("kernel_block", own("kernel_block")), group.kernel_block.unwrap_or(1), MAX_BLOCK_SIZE),
        ];
        for (key, value, limit) in ranges {
            if value == 0 || value > limit {
                let fault = InputFault::OutOfRange { got: value.to_string(), min: 1, max: limit.into() };
                push_once(errors, self.error(&key, fault));
            }
        }
        let size = group.block_size;
        if let Some(kernel) = group.kernel_block.filter(|&k| k > 0 && !size.is_multiple_of(k)) {
            let text = format!("is {kernel}, which does not divide block_size {size}; choose one that does");
            push_once(errors, self.error(&key("kernel_block", own("kernel_block")), InputFault::Contradiction(text)));
        }
        let interleave = self.shape.interleave;
        if interleave > 0 && self.shape.context() > 1 && !size.is_multiple_of(interleave) {
            let text = format!("is {interleave}, which does not divide block_size {size}; choose one that does");
            push_once(errors, self.error("parallel.interleave", InputFault::Contradiction(text)));
        }
        if group.style.components == ComponentOrder::Planes && group.style.rows == Rows::Packed {
            let text = "planes over all blocks and rows that pack all items of a block exclude each other; choose one";
            push_once(errors, self.error(&key("layout", own("layout")), InputFault::Contradiction(text.into())));
        }
    }
}

impl GroupRule {
    fn takes(&self, item: &Item) -> bool {
        let kind = match item.as_paged().retention {
            Retention::Full => Some(RetentionKind::Full),
            Retention::Window(_) => Some(RetentionKind::Window),
            Retention::Chunk(_) => Some(RetentionKind::Chunk),
            _ => None,
        };
        let named = self.items.is_empty() || self.items.iter().any(|p| fits(p, item.name.as_str()));
        named && (self.retention.is_none() || self.retention == kind)
    }
}

/// Whether a name fits a pattern in which `*` stands for any text. Linear in the name for each part of the pattern.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = rest.get(at + part.len()..).unwrap_or_default();
    }
    rest.ends_with(last)
}

fn push_once(errors: &mut Vec<InputError>, error: InputError) {
    if !errors.contains(&error) {
        errors.push(error);
    }
}
