//! Engines that the recorded connector could not register, laid out from their configuration.
//!
//! Where registration failed the record has no views. kvferry can still be asked, so the ranks are made here as the
//! configuration describes them: groups as on the other side (or one group for the first kind of layer and equal shares
//! of the rest), pages of equal size where groups share memory, axes in the configured order, kernel blocks as the
//! backend has them, pipeline stages of consecutive layers. What is made is a [`Rank`] like a recorded one and goes the
//! same way from there.

use std::collections::BTreeMap;

use crate::engine::EngineError;
use crate::model::{self, Named};
use crate::schema::{Group, KernelSize, Kind, LayerView, Model, Rank, Side, SideName, Worker};

/// Ranks that are laid out.
const MAX_RANKS: u64 = 1 << 10;
/// Bytes of a rank's cache.
const MAX_BYTES: u64 = 1 << 35;
/// Bytes between two ranks' addresses.
const RANK_SPACING: u64 = 1 << 36;

/// Lays an engine out. `other` is the other engine as recorded, `groups` the number of block lists of a request.
///
/// # Errors
/// Sizes that the model lacks, or an order of axes that can't hold it.
pub fn ranks(
    model: &Model,
    side: &Side,
    name: SideName,
    other: &[Rank],
    groups: Option<usize>,
) -> Result<Vec<Rank>, EngineError> {
    let layers = model::layers(model, side);
    let groups = groups_of(side, &layers, other, groups);
    let mut out = Vec::new();
    let (tp, pp) = (side.tp_size.max(1), side.pp_size.max(1));
    // Without decode context parallelism every context rank holds all that its tensor rank holds.
    let copies = if side.dcp_size <= 1 { side.pcp_size.max(1) } else { 1 };
    let count = u64::from(tp).saturating_mul(u64::from(pp)).saturating_mul(u64::from(copies));
    if count > MAX_RANKS {
        return Err(EngineError::TooMany { got: count, limit: MAX_RANKS });
    }
    for pp_rank in 0..pp {
        let mine = stage(model, &layers, pp, pp_rank);
        for tp_rank in 0..tp {
            for _ in 0..copies {
                let top: u64 = if name == SideName::Prefill { 0x7f00_0000_0000 } else { 0x7e00_0000_0000 };
                let base_addr = top + out.len() as u64 * RANK_SPACING;
                let maker = Maker { side, layers: &layers, mine: &mine, base_addr };
                out.push(maker.rank(&groups, pp_rank, tp_rank)?);
            }
        }
    }
    Ok(out)
}

/// Names of the layers of one stage.
fn stage(model: &Model, layers: &BTreeMap<String, Named<'_>>, pp: u32, rank: u32) -> Vec<String> {
    let highest = layers.values().map(|l| l.id.saturating_add(1)).max().unwrap_or(0);
    let all = u64::from(model.num_hidden_layers.unwrap_or(highest).max(highest));
    let bound = |r: u32| u64::from(r) * all / u64::from(pp);
    let owned = |l: &Named<'_>| (bound(rank)..bound(rank + 1)).contains(&u64::from(l.id));
    layers.iter().filter(|(_, l)| owned(l)).map(|(n, _)| n.clone()).collect()
}

fn groups_of(side: &Side, layers: &BTreeMap<String, Named<'_>>, other: &[Rank], count: Option<usize>) -> Vec<Group> {
    let sized = |layer_names: Vec<String>, spec: &str| {
        let ring = layer_names.iter().filter_map(|n| layers.get(n)).find_map(|l| l.layer.ring_size);
        let block_size = ring.and_then(|r| u32::try_from(r).ok()).unwrap_or(side.block_size);
        Group { layer_names, spec: spec.to_owned(), block_size, enable_kv_transfer: true, host_resident: false }
    };
    let known = crate::engine::joined_groups(other);
    if !known.is_empty() {
        let ours =
            |names: &[&String]| names.iter().filter(|n| layers.contains_key(**n)).map(|n| (*n).clone()).collect();
        return known.iter().map(|g| sized(ours(&g.layer_names), &g.first.spec)).collect();
    }
    let mut by_number: Vec<(&String, &Named<'_>)> = layers.iter().collect();
    by_number.sort_by_key(|(n, l)| (l.id, *n));
    let first_kind = by_number.iter().map(|(_, l)| l.layer.kind).find(|k| !k.is_state()).unwrap_or(Kind::Full);
    let is_full = side.disable_hybrid_kv_cache_manager || first_kind == Kind::Full;
    let spec = if is_full { "FullAttentionSpec" } else { "" };
    if count == Some(1) {
        return vec![sized(by_number.iter().map(|(n, _)| (*n).clone()).collect(), if is_full { spec } else { "" })];
    }
    let of = |first: bool| -> Vec<String> {
        let picked = by_number.iter().filter(|(_, l)| (l.layer.kind == first_kind) == first);
        picked.map(|(n, _)| (*n).clone()).collect()
    };
    let (first, rest) = (of(true), of(false));
    let shares = count.map_or(1, |c| c.saturating_sub(1)).max(1);
    let share = rest.len().div_ceil(shares).max(1);
    let mut out = vec![sized(first, spec)];
    out.extend(rest.chunks(share).map(|names| sized(names.to_vec(), "")));
    out
}

/// A page of one layer on one rank.
struct Page {
    heads: u64,
    /// Entries of a logical block and of a kernel block.
    entries: (u64, u64),
    vector: u64,
    element: u64,
    bytes: u64,
    state: bool,
}

struct Maker<'a> {
    side: &'a Side,
    layers: &'a BTreeMap<String, Named<'a>>,
    mine: &'a [String],
    base_addr: u64,
}

impl Maker<'_> {
    fn rank(&self, groups: &[Group], pp_rank: u32, tp_rank: u32) -> Result<Rank, EngineError> {
        let groups: Vec<Group> = groups.iter().map(|g| self.owned(g)).collect();
        let mut pages = BTreeMap::new();
        for name in groups.iter().flat_map(|g| &g.layer_names) {
            if let Some(layer) = self.layers.get(name) {
                pages.insert(name.as_str(), self.page(name, *layer)?);
            }
        }
        // Groups share memory: the i-th layer of each has its page in slot i, and all pages have one size.
        let sizes: Vec<Vec<u64>> = groups
            .iter()
            .map(|g| g.layer_names.iter().filter_map(|n| pages.get(n.as_str())).map(|p| p.bytes).collect())
            .collect();
        let largest = sizes.iter().flatten().copied().max().unwrap_or(0);
        let count = sizes.iter().map(Vec::len).max().unwrap_or(0);
        let sum = |sizes: &[u64]| sizes.iter().fold(0u64, |sum, s| sum.saturating_add(*s));
        let slots = if sizes.len() == 1 { sizes[0].clone() } else { vec![largest; count] };
        let row = sum(&slots);
        let allocation_bytes = row.saturating_mul(u64::from(self.side.num_blocks));
        // Past this, no product of sizes below overflows.
        if let Some((name, page)) = pages.iter().find(|(_, p)| p.bytes == 0 || allocation_bytes > MAX_BYTES) {
            let what = format!("sizes with a page of 1 to {MAX_BYTES} bytes, not {}", page.bytes);
            return Err(EngineError::Model { layer: (*name).to_owned(), what });
        }
        let mut layer_views = BTreeMap::new();
        for group in &groups {
            for (slot, name) in group.layer_names.iter().enumerate() {
                if let Some(page) = pages.get(name.as_str()) {
                    layer_views.insert(name.clone(), self.view(name, page, &slots, slot)?);
                }
            }
        }
        let worker = self.worker(&groups, tp_rank)?;
        Ok(Rank {
            pp_rank,
            tp_rank,
            base_addr: self.base_addr,
            allocation_bytes,
            kv_cache_groups: groups,
            layer_views,
            worker,
            dlists_at_register: Vec::new(),
        })
    }

    fn owned(&self, group: &Group) -> Group {
        let layer_names = group.layer_names.iter().filter(|n| self.mine.contains(n)).cloned().collect();
        Group { layer_names, ..group.clone() }
    }

    fn page(&self, name: &str, named: Named<'_>) -> Result<Page, EngineError> {
        let layer = named.layer;
        if layer.kind.is_state() {
            let shares = self.shares(name, named)?;
            let bytes = shares.iter().fold(0u64, |sum, s| sum.saturating_add(s.1));
            return Ok(Page { heads: 1, entries: (1, 1), vector: bytes, element: 1, bytes, state: true });
        }
        let lacks = |what: &str| EngineError::Model { layer: name.to_owned(), what: what.to_owned() };
        let element = model::element_size(named.dtype).ok_or_else(|| lacks("a known data type"))?;
        let size = layer.head_size.ok_or_else(|| lacks("head_size"))?;
        let both = matches!(layer.kind, Kind::Full | Kind::Swa | Kind::Chunked);
        let second = layer.head_size_v.unwrap_or(if both { size } else { 0 });
        let vector = (u64::from(size) + u64::from(second)) * element;
        let heads = u64::from((model::heads(name, layer)? / self.side.tp_size.max(1)).max(1));
        let tokens = layer.ring_size.unwrap_or(u64::from(self.side.block_size));
        let entries = tokens / u64::from(layer.tokens_per_state.unwrap_or(1).max(1));
        let bytes = heads.saturating_mul(entries).saturating_mul(vector);
        Ok(Page { heads, entries: (entries, self.kernel(layer.kind, entries)), vector, element, bytes, state: false })
    }

    /// Entries of a kernel block: the largest that the backend can do.
    fn kernel(&self, kind: Kind, entries: u64) -> u64 {
        let default = match kind {
            Kind::Mla | Kind::SwaMla => KernelSize::Exact(64),
            _ => KernelSize::Multiple { multiple_of: 16 },
        };
        let name = match kind {
            Kind::Full => "full",
            Kind::Swa => "swa",
            Kind::Chunked => "chunked",
            Kind::Mla => "mla",
            Kind::SwaMla => "swa_mla",
            _ => "",
        };
        let sizes = self.side.backends.get(name).map_or(&[][..], |b| &b.kernel_block_sizes);
        let sizes = if sizes.is_empty() { &[default][..] } else { sizes };
        let fits = |size: &KernelSize| match *size {
            KernelSize::Exact(n) => (n > 0 && entries.is_multiple_of(u64::from(n))).then_some(u64::from(n)),
            KernelSize::Multiple { multiple_of } => {
                (multiple_of > 0 && entries.is_multiple_of(u64::from(multiple_of))).then_some(entries)
            }
        };
        sizes.iter().filter_map(fits).max().unwrap_or(entries)
    }

    /// Offset and bytes of each part of a state on one rank.
    fn shares(&self, name: &str, named: Named<'_>) -> Result<Vec<(u64, u64)>, EngineError> {
        let tp = if named.layer.tp_replicated { 1 } else { self.side.tp_size.max(1) };
        let mut at = 0u64;
        let mut out = Vec::new();
        for part in model::parts(name, named.layer)? {
            let rows = u64::from(part.part.rows) + u64::from(part.scratch_rows);
            let units = u64::from((part.part.units / tp).max(1));
            let bytes = units.saturating_mul(rows).saturating_mul(part.part.width.get());
            out.push((at, bytes));
            at = at.saturating_add(bytes);
        }
        Ok(out)
    }

    fn worker(&self, groups: &[Group], tp_rank: u32) -> Result<Worker, EngineError> {
        let mut worker =
            Worker { dcp_rank: tp_rank % self.side.dcp_size.max(1), ssm_sizes: vec![0, 0], conv_offsets: None };
        for name in groups.iter().flat_map(|g| &g.layer_names) {
            let Some(layer) = self.layers.get(name) else { continue };
            if layer.layer.kind.is_state() && !layer.layer.tp_replicated {
                let shares = self.shares(name, *layer)?;
                let temporal = usize::from(layer.layer.kind != Kind::ShortConv);
                let conv = shares[..shares.len().saturating_sub(temporal)].to_vec();
                let size = conv.iter().fold(0u64, |sum, c| sum.saturating_add(c.1));
                let rest = if temporal == 1 { shares.last().map_or(0, |s| s.1) } else { 0 };
                (worker.ssm_sizes, worker.conv_offsets) = (vec![size, rest], Some(conv));
                break;
            }
        }
        Ok(worker)
    }

    /// The view of the page in a slot, with the axes in the configured order.
    fn view(&self, name: &str, page: &Page, slots: &[u64], slot: usize) -> Result<LayerView, EngineError> {
        let blocks = u64::from(self.side.num_blocks);
        let (before, row): (u64, u64) = (slots[..slot].iter().sum(), slots.iter().sum());
        let (entries, kernel) = page.entries;
        let (heads, vector) = (page.heads, page.vector);
        let cannot = |what: &str| EngineError::Model { layer: name.to_owned(), what: what.to_owned() };
        let layout = self.side.layout.as_deref().unwrap_or("LBHNC");
        let inner = |offset: u64, block: u64, tokens_first: bool| {
            let (head, entry) = if tokens_first { (vector, heads * vector) } else { (kernel * vector, vector) };
            (offset, block, heads * kernel * vector, head, entry)
        };
        let (offset, block_stride, kernel_stride, head_stride, entry_stride) = match layout {
            "LBHNC" | "HND" => inner(before * blocks, slots[slot], false),
            "LBNHC" | "NHD" => inner(before * blocks, slots[slot], true),
            "BLHNC" => inner(before, row, false),
            "BLNHC" => inner(before, row, true),
            "LHBNC" | "BHLNC" if page.state || slots.iter().any(|s| *s != page.bytes) => {
                return Err(cannot("pages of one size for an order with heads outside layers or blocks"));
            }
            "LHBNC" => {
                let per_head = entries * vector;
                (before * blocks, per_head, kernel * vector, blocks * per_head, vector)
            }
            "BHLNC" => {
                let per_head = entries * vector;
                let layers = slots.len() as u64;
                (slot as u64 * per_head, row, kernel * vector, layers * per_head, vector)
            }
            _ => return Err(cannot("a known order of axes")),
        };
        let kernels = entries.checked_div(kernel).unwrap_or(1).max(1);
        Ok(LayerView {
            addr: self.base_addr + offset,
            shape: [blocks * kernels, heads, kernel, vector / page.element.max(1)],
            strides_bytes: [
                if page.state { block_stride } else { kernel_stride },
                head_stride,
                entry_stride,
                page.element,
            ],
            element_size: page.element,
            block_stride: Some(block_stride),
        })
    }
}
