//! Which items share a block table, and each group's sizes.

use kvferry_geometry::layout::{ComponentOrder, LayoutStyle, Rows};
use kvferry_geometry::placement::HeadRange;
use kvferry_geometry::spec::{Item, ItemKind, MAX_ITEMS, MAX_ROWS, ModelSpec, PagedItem, Retention, ValueHeads};
use kvferry_geometry::units::ItemId;

use crate::describe::{DEFAULT_BLOCKS, EngineDescription, MAX_BLOCK_SIZE, MAX_BLOCKS};
use crate::error::{InputError, InputFault};
use crate::items::ModelItems;

/// Which items share a block table. Paged items and states never do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Grouping {
    /// A group for each retention and page shape (heads and components), and for each shape of a state.
    #[default]
    ByShape,
    /// A group for each retention, and one for all states.
    ByRetention,
    /// One group for all paged items, whatever their retention, and one for all states: windows keep all tokens' blocks, as in
    /// vLLM without its hybrid memory manager.
    ByKind,
    /// One group where all items are paged and keep the same tokens. Else groups by shape, cut into groups of equally many
    /// layers, as vLLM's hybrid memory manager makes them, so that they can share memory: as many as the smallest has, or as
    /// the largest has where that is less than half as many again. Where the layout shares memory, blocks of smaller pages grow
    /// by the whole factor that makes pages equal, if there is one.
    EqualLayers,
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
    /// Only items of this kind.
    pub retention: Option<RetentionKind>,
    /// Deals its items out in turn to so many groups; `None` is one.
    pub split: Option<u32>,
    /// Tokens of a block; not for states.
    pub block_size: Option<u32>,
    /// Tokens of a kernel block; not for states.
    pub kernel_block: Option<u32>,
    /// Blocks; not for states.
    pub blocks: Option<u32>,
    /// Slots, for states.
    pub slots: Option<u32>,
    /// Layout, without its kernel block.
    pub layout: Option<LayoutStyle>,
}

/// What kind of item, whatever its size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RetentionKind {
    /// Paged, all tokens.
    Full,
    /// A sliding window.
    Window,
    /// Chunks.
    Chunk,
    /// A ring.
    Ring,
    /// Not paged: a recurrent state.
    State,
}

impl RetentionKind {
    fn of(item: &Item) -> Option<Self> {
        let Some(paged) = item.as_paged() else { return Some(Self::State) };
        match paged.retention {
            Retention::Full => Some(Self::Full),
            Retention::Window(_) => Some(Self::Window),
            Retention::Chunk(_) => Some(Self::Chunk),
            Retention::Ring(_) => Some(Self::Ring),
            _ => None,
        }
    }
}

/// A group with its items and sizes.
pub(crate) struct Group {
    pub(crate) name: String,
    /// Where it is described, e.g. `group.1`; empty where it isn't.
    key: String,
    pub(crate) items: Vec<ItemId>,
    /// 0 for states.
    pub(crate) block_size: u32,
    kernel_block: Option<u32>,
    /// Blocks, or slots for states.
    pub(crate) blocks: u32,
    pub(crate) style: LayoutStyle,
    own_block_size: bool,
}

impl EngineDescription {
    /// The groups with their sizes filled in.
    pub(crate) fn groups(&self, items: &ModelItems, errors: &mut Vec<InputError>) -> Vec<Group> {
        let spec = &items.spec;
        let groups = match &self.grouping {
            Grouping::ByShape => self.auto_groups(spec, same_shape),
            Grouping::ByRetention => self.auto_groups(spec, same_retention),
            Grouping::ByKind => self.auto_groups(spec, |a, b| a.as_paged().is_some() == b.as_paged().is_some()),
            Grouping::EqualLayers => self.equal_groups(items),
            Grouping::Listed(rules) => self.listed_groups(spec, rules, errors),
        };
        self.check_sharing(&groups, errors);
        for group in &groups {
            self.check_group(spec, group, errors);
        }
        groups
    }

    fn auto_groups(&self, spec: &ModelSpec, same: impl Fn(&Item, &Item) -> bool) -> Vec<Group> {
        let mut buckets: Vec<(Vec<ItemId>, &Item)> = Vec::new();
        for (id, item) in spec.iter() {
            match buckets.iter_mut().find(|(_, first)| same(first, item)) {
                Some((ids, _)) => ids.push(id),
                None => buckets.push((vec![id], item)),
            }
        }
        let group = |(i, (ids, first)): (usize, (Vec<ItemId>, &Item))| {
            // Where windows share a table with others, all tokens' blocks are kept.
            let kinds = ids.iter().filter_map(|&id| spec.get(id)?.as_paged().map(|p| p.retention));
            let name = match first.as_paged() {
                Some(paged) if kinds.clone().all(|r| r == paged.retention) => format!("{i} {}", paged.retention),
                Some(_) => format!("{i} mixed"),
                None => format!("{i} state"),
            };
            self.group(spec, name, String::new(), &GroupRule::default(), ids)
        };
        buckets.into_iter().enumerate().map(group).collect()
    }

    fn equal_groups(&self, items: &ModelItems) -> Vec<Group> {
        let spec = &items.spec;
        let uniform = self.auto_groups(spec, same_retention);
        if uniform.len() == 1 && uniform.iter().all(|g| !is_state(spec, g)) {
            return uniform;
        }
        let buckets = self.auto_groups(spec, same_shape);
        let counts = || buckets.iter().map(|b| b.items.len());
        let (least, most) = (counts().min().unwrap_or(1).max(1), counts().max().unwrap_or(1));
        let size = if most * 2 < least * 3 { most } else { least };
        let page =
            |g: &Group| spec.get(*g.items.first()?)?.as_paged().map(|_| self.page_bytes(items, g)).filter(|&b| b > 0);
        let largest = buckets.iter().filter_map(page).max().unwrap_or(0);
        let mut out: Vec<Group> = Vec::new();
        for mut bucket in buckets {
            if let (true, Some(bytes)) = (self.layout.share, page(&bucket))
                && largest.is_multiple_of(bytes)
                && let Ok(factor) = u32::try_from(largest / bytes)
            {
                bucket.block_size = bucket.block_size.saturating_mul(factor);
            }
            let n = bucket.items.len().div_ceil(size);
            for i in 0..n {
                let items = bucket.items.iter().copied().skip(i).step_by(n).collect();
                let kind = bucket.name.split_once(' ').map_or("", |k| k.1);
                let name = format!("{} {kind}", out.len());
                out.push(Group { name, key: String::new(), items, ..bucket.copy() });
            }
        }
        out
    }

    /// Bytes of one block of a group's first item, on the rank that holds the most heads of it.
    fn page_bytes(&self, items: &ModelItems, group: &Group) -> u64 {
        let first = group.items.first().and_then(|&id| items.spec.get(id));
        let Some((item, paged)) = first.and_then(|i| Some((i, i.as_paged()?))) else { return 0 };
        let tp = self.shape.tp;
        let rule = self.rule(items, item, 0);
        // The last rank has the most where they are uneven.
        let heads = rule.of(paged.heads, tp, tp.saturating_sub(1)).map_or(1, HeadRange::count);
        let values = |tokens: u64| u64::from(group.block_size).checked_div(tokens).unwrap_or(0);
        let bytes = paged.components.iter().map(|c| {
            let heads = if c.heads == ValueHeads::Shared { 1 } else { u64::from(heads) };
            c.width.get().saturating_mul(heads).saturating_mul(values(paged.tokens_per_value(c)))
        });
        bytes.fold(0, u64::saturating_add)
    }

    fn listed_groups(&self, spec: &ModelSpec, rules: &[GroupRule], errors: &mut Vec<InputError>) -> Vec<Group> {
        let mut taken: Vec<Vec<ItemId>> = rules.iter().map(|_| Vec::new()).collect();
        for (id, item) in spec.iter() {
            match rules.iter().position(|r| r.takes(item)) {
                Some(i) => taken[i].push(id),
                None => {
                    let text = format!("item {} fits no group; add a group that takes it", item.name);
                    errors.push(self.error("group", InputFault::Contradiction(text)));
                }
            }
        }
        let mut groups = Vec::new();
        for (i, (rule, ids)) in rules.iter().zip(taken).enumerate() {
            let key = format!("group.{i}");
            let before = errors.len();
            self.check_rule(spec, rule, &ids, &key, errors);
            if errors.len() > before {
                continue;
            }
            let n = (rule.split.unwrap_or(1) as usize).min(ids.len());
            for part in 0..n {
                let items = ids.iter().copied().skip(part).step_by(n).collect();
                let name = if n > 1 { format!("{} {part}", rule.name) } else { rule.name.clone() };
                groups.push(self.group(spec, name, key.clone(), rule, items));
            }
        }
        groups
    }

    /// Whether a rule's items can share a table and its sizes are theirs.
    fn check_rule(&self, spec: &ModelSpec, rule: &GroupRule, ids: &[ItemId], key: &str, errors: &mut Vec<InputError>) {
        let mut fault = |name: &str, text: String| {
            let key = if name.is_empty() { key.into() } else { format!("{key}.{name}") };
            errors.push(self.error(&key, InputFault::Contradiction(text)));
        };
        let of_kind = |paged: bool| ids.iter().filter_map(|&id| spec.get(id)).find(|i| i.as_paged().is_some() == paged);
        match (of_kind(true), of_kind(false)) {
            (None, None) => fault("", format!("{:?} takes no item; correct or remove it", rule.name)),
            (Some(paged), Some(state)) => fault(
                "",
                format!(
                    "items {} (paged) and {} (a state) can't share a block table; put them in two groups, for example by retention",
                    paged.name, state.name
                ),
            ),
            (Some(paged), None) if rule.slots.is_some() => {
                fault("slots", format!("is for states, but item {} is paged and has blocks; leave it out", paged.name));
            }
            (None, Some(state)) => {
                let stated =
                    [("block_size", rule.block_size), ("kernel_block", rule.kernel_block), ("blocks", rule.blocks)];
                for (name, _) in stated.iter().filter(|s| s.1.is_some()) {
                    fault(
                        name,
                        format!("is for paged items, but item {} is a state and has slots; leave it out", state.name),
                    );
                }
            }
            (Some(_), None) => {}
        }
        if let Some(split) = rule.split.filter(|&s| s == 0 || s as usize > MAX_ITEMS) {
            let fault = InputFault::OutOfRange { got: split.to_string(), min: 1, max: MAX_ITEMS as u64 };
            errors.push(self.error(&format!("{key}.split"), fault));
        }
    }

    fn group(&self, spec: &ModelSpec, name: String, key: String, rule: &GroupRule, items: Vec<ItemId>) -> Group {
        let state = items.first().and_then(|&id| spec.get(id)).is_some_and(|i| i.as_state().is_some());
        let kernel_block = match (rule.kernel_block, rule.block_size) {
            (Some(kernel), _) => Some(kernel),
            // A group with a block of its own has a kernel block of its own, or none.
            (None, Some(_)) => None,
            (None, None) => self.kernel_block,
        };
        let style = LayoutStyle { kernel_block, ..rule.layout.unwrap_or(self.layout) };
        let blocks = rule.blocks.or(self.blocks).unwrap_or(DEFAULT_BLOCKS);
        let slots = if style.share { blocks } else { rule.slots.unwrap_or(self.slots.all()) };
        let own_block_size = rule.block_size.is_some();
        if state {
            return Group { name, key, items, block_size: 0, kernel_block: None, blocks: slots, style, own_block_size };
        }
        let block_size = rule.block_size.unwrap_or(self.block_size);
        Group { name, key, items, block_size, kernel_block, blocks, style, own_block_size }
    }

    /// Groups that share memory are written out together, so their layout and pool must be one.
    fn check_sharing(&self, groups: &[Group], errors: &mut Vec<InputError>) {
        if !groups.iter().any(|g| g.style.share) {
            return;
        }
        let Some(first) = groups.iter().find(|g| g.block_size > 0).or(groups.first()) else { return };
        let mut fault = |key: &str, text: String| push_once(errors, self.error(key, InputFault::Contradiction(text)));
        if self.slots.count.is_some() {
            let text = "states take their slots from the blocks where groups share memory; leave it out, or unset layout.share";
            fault("slots", text.into());
        }
        for group in groups {
            // A kernel block means nothing to a state.
            let kernel_block = if group.block_size == 0 { first.style.kernel_block } else { group.style.kernel_block };
            let differs = if (LayoutStyle { kernel_block, ..group.style }) != first.style {
                "layout or kernel block"
            } else if group.blocks != first.blocks {
                "number of blocks"
            } else {
                continue;
            };
            let text = format!(
                "group {:?} has another {differs} than group {:?}, but groups that share memory have one; state it once, for the engine",
                group.name, first.name
            );
            let key = if group.key.is_empty() { &first.key } else { &group.key };
            fault(if key.is_empty() { "layout" } else { key }, text);
        }
    }

    fn check_group(&self, spec: &ModelSpec, group: &Group, errors: &mut Vec<InputError>) {
        let key = |name: &str, own: bool| if own { format!("{}.{name}", group.key) } else { name.into() };
        let own =
            |name: &str| !group.key.is_empty() && self.origin.lines.contains_key(&format!("{}.{name}", group.key));
        let state = group.block_size == 0 && is_state(spec, group);
        let mut ranges = vec![(key("blocks", own("blocks")), group.blocks, MAX_BLOCKS)];
        if state {
            let name = if group.style.share { "blocks" } else { "slots" };
            ranges = vec![(key(name, own(name)), group.blocks, MAX_BLOCKS)];
        } else {
            ranges.push((key("block_size", group.own_block_size), group.block_size, MAX_BLOCK_SIZE));
            ranges.push((key("kernel_block", own("kernel_block")), group.kernel_block.unwrap_or(1), MAX_BLOCK_SIZE));
        }
        for (key, value, limit) in ranges {
            if value == 0 || value > limit {
                let fault = InputFault::OutOfRange { got: value.to_string(), min: 1, max: limit.into() };
                push_once(errors, self.error(&key, fault));
            }
        }
        let contradicts = |key: &str, text: String| self.error(key, InputFault::Contradiction(text));
        let style_key = key("layout", own("layout"));
        if group.style.components == ComponentOrder::Planes && (group.style.rows == Rows::Packed || group.style.share) {
            let text = "planes over all blocks exclude rows that pack all items of a block and memory that groups share; choose one";
            push_once(errors, contradicts(&style_key, text.into()));
        }
        if group.style.scratch_rows > MAX_ROWS {
            let (got, max) = (group.style.scratch_rows.to_string(), u64::from(MAX_ROWS));
            push_once(errors, self.error(&style_key, InputFault::OutOfRange { got, min: 0, max }));
        }
        if state {
            return;
        }
        let size = group.block_size;
        if let Some(kernel) = group.kernel_block.filter(|&k| k > 0 && !size.is_multiple_of(k)) {
            let text = format!("is {kernel}, which does not divide block_size {size}; choose one that does");
            push_once(errors, contradicts(&key("kernel_block", own("kernel_block")), text));
        }
        let dealt = self.shape.context() > 1;
        let interleave = self.shape.interleave;
        if interleave > 0 && dealt && !size.is_multiple_of(interleave) {
            let text = format!("is {interleave}, which does not divide block_size {size}; choose one that does");
            push_once(errors, contradicts("parallel.interleave", text));
        }
        for (id, tokens) in spans(spec, group) {
            let whole = |n: u32| u64::from(n).is_multiple_of(tokens);
            let Some(item) = spec.get(id) else { continue };
            let covered = format!("the {tokens} tokens that one scale or entry of item {} covers", item.name);
            if !whole(size) {
                let text = format!("is {size}, which is not a multiple of {covered}");
                push_once(errors, contradicts(&key("block_size", group.own_block_size), text));
            } else if let Some(kernel) = group.kernel_block.filter(|&k| !whole(k)) {
                let text = format!("is {kernel}, which is not a multiple of {covered}");
                push_once(errors, contradicts(&key("kernel_block", own("kernel_block")), text));
            }
            if dealt && !whole(interleave) {
                let text = format!("is {interleave}, which is not a multiple of {covered}; choose one that is");
                push_once(errors, contradicts("parallel.interleave", text));
            }
        }
    }
}

impl Group {
    /// The same without its items and names.
    fn copy(&self) -> Self {
        Self { name: String::new(), key: String::new(), items: Vec::new(), ..*self }
    }
}

/// Tokens that one value covers, more than 1, each once, with the first item that has such values.
fn spans(spec: &ModelSpec, group: &Group) -> Vec<(ItemId, u64)> {
    let mut out: Vec<(ItemId, u64)> = Vec::new();
    for &id in &group.items {
        let Some(paged) = spec.get(id).and_then(Item::as_paged) else { continue };
        for tokens in paged.components.iter().map(|c| paged.tokens_per_value(c)).filter(|&t| t > 1) {
            if !out.iter().any(|o| o.1 == tokens) {
                out.push((id, tokens));
            }
        }
    }
    out
}

fn is_state(spec: &ModelSpec, group: &Group) -> bool {
    group.items.first().and_then(|&id| spec.get(id)).is_some_and(|i| i.as_state().is_some())
}

/// Whether two items keep the same tokens, or both states.
fn same_retention(a: &Item, b: &Item) -> bool {
    a.as_paged().map(|p| p.retention) == b.as_paged().map(|p| p.retention)
}

/// Whether two items have equal pages or states.
fn same_shape(a: &Item, b: &Item) -> bool {
    let shape = |p: &PagedItem| (p.retention, p.heads, p.tokens_per_entry);
    match (&a.kind, &b.kind) {
        (ItemKind::Paged(a), ItemKind::Paged(b)) => shape(a) == shape(b) && a.components == b.components,
        (ItemKind::State(a), ItemKind::State(b)) => a == b,
        _ => false,
    }
}

impl GroupRule {
    fn takes(&self, item: &Item) -> bool {
        let named = self.items.is_empty() || self.items.iter().any(|p| fits(p, item.name.as_str()));
        named && (self.retention.is_none() || self.retention == RetentionKind::of(item))
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
