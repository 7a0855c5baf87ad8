//! The recorded engines as kvferry's manifests.
//!
//! Placements and views come from what each rank registered: the shapes and strides of its layers, the sizes of its
//! states. Only where a head interval or a unit interval *starts* follows from the rank, by the connector's own rule:
//! shards in order of rank, replicated where there are more ranks than heads. Every rank has one region, its allocation.

use std::collections::BTreeMap;

use kvferry_geometry::layout::{
    CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, PartView, Region, StateView, View,
};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, Placement, TokenClass};
use kvferry_geometry::spec::{ModelSpec, SpecErrors};
use kvferry_geometry::units::{Bytes, ItemId, Name, RegionId, Tokens};

use crate::model::{self, Named, PACKED};
use crate::schema::{Group, Kind, LayerView, Model, Rank, Side};

/// A recorded engine that can't be made a manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A size of the model is missing.
    #[error("layer {layer}: the record lacks {what}")]
    Model {
        /// The layer.
        layer: String,
        /// What.
        what: String,
    },
    /// Recorded sizes contradict each other.
    #[error("rank {rank}, layer {layer}: {what} is {got}, not {expected}")]
    Size {
        /// The rank, by its place in the record.
        rank: usize,
        /// The layer.
        layer: String,
        /// Which size.
        what: &'static str,
        /// As recorded.
        got: u64,
        /// As the model's sizes have it.
        expected: u64,
    },
    /// An allocation ends beyond every address.
    #[error("rank {rank}: an allocation of {len} bytes at address {base} ends beyond every address")]
    Address {
        /// The rank, by its place in the record.
        rank: usize,
        /// First address.
        base: u64,
        /// Bytes.
        len: u64,
    },
    /// More ranks than are laid out.
    #[error("the engine has {got} ranks, more than the {limit} that are laid out")]
    TooMany {
        /// Ranks.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// The engine has no rank in the record.
    #[error("no rank of the engine is recorded")]
    NoRanks,
    /// kvferry refuses the spec.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// kvferry refuses the manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestErrors),
}

/// One engine, with what the planner must not know: where its regions lie.
#[derive(Clone, Debug)]
pub struct Engine {
    /// For the planner.
    pub manifest: Manifest,
    /// Address of region 0 of each rank.
    pub bases: Vec<u64>,
    /// Scratch slots at the end of each group's block lists.
    pub scratch_slots: Vec<usize>,
    /// Tokens of a logical block on one rank, by group.
    pub block_size: Vec<u64>,
}

impl Engine {
    /// Rebuilds an engine from its recorded ranks.
    ///
    /// # Errors
    /// What the record lacks or contradicts, and what kvferry refuses.
    pub fn new(model: &Model, side: &Side, ranks: &[Rank]) -> Result<Self, EngineError> {
        if ranks.is_empty() {
            return Err(EngineError::NoRanks);
        }
        let layers = model::layers(model, side);
        let groups = joined_groups(ranks);
        let mut items = Vec::new();
        let mut ids = BTreeMap::new();
        let mut named = Vec::new();
        let mut cache_groups = Vec::new();
        let (mut scratch_slots, mut block_size) = (Vec::new(), Vec::new());
        for (g, group) in groups.iter().enumerate() {
            let mut members = Vec::new();
            let (mut state, mut context, mut scratch) = (false, 1, 0);
            for &name in &group.layer_names {
                let lacks = || EngineError::Model { layer: name.clone(), what: "the layer".to_owned() };
                let layer = *layers.get(name).ok_or_else(lacks)?;
                let view = ranks.iter().find_map(|r| r.layer_views.get(name)).ok_or_else(lacks)?;
                let full = group.first.spec == "FullAttentionSpec";
                state = layer.layer.kind.is_state();
                context = context_of(side, layer.layer.kind);
                scratch = layer.layer.num_speculative_blocks as usize;
                let id = ItemId::new(u32::try_from(items.len()).unwrap_or(u32::MAX));
                items.push(model::item(name, layer, view.shape[3].saturating_mul(view.element_size), full)?);
                ids.insert(name.as_str(), id.index());
                named.push((name.as_str(), layer, group.first));
                members.push(id);
            }
            let tokens = if state { 0 } else { u64::from(group.first.block_size) * u64::from(context) };
            let name = Name::new(&format!("group {g}"));
            cache_groups.push(CacheGroup { name, items: members, block_tokens: Tokens::new(tokens) });
            scratch_slots.push(scratch);
            block_size.push(u64::from(group.first.block_size));
        }
        let spec = ModelSpec::new(items)?;
        let mut manifests = Vec::new();
        for (index, rank) in ranks.iter().enumerate() {
            let read = RankReader { index, rank, side };
            let (mut placement, mut views) = (vec![None; named.len()], vec![None; named.len()]);
            for (name, layer, group) in &named {
                let Some(&id) = ids.get(name) else { continue };
                let shared_pool = group.host_resident && side.hisparse_shared_host_pool;
                if shared_pool && rank.tp_rank != 0 {
                    // All ranks map one pool; its bytes are there when rank 0 has them.
                    continue;
                }
                if let Some(view) = rank.layer_views.get(*name) {
                    let (p, v) = read.layer(name, *layer, group, view)?;
                    (placement[id], views[id]) = (Some(p), Some(v));
                }
            }
            let len = rank.allocation_bytes.saturating_add(side.allocation_tail_bytes);
            if rank.base_addr.checked_add(len).is_none() {
                return Err(EngineError::Address { rank: index, base: rank.base_addr, len });
            }
            let regions = vec![Region { len: Bytes::new(len), kind: MemoryKind::Device(rank.tp_rank) }];
            manifests.push(RankManifest { placement, layout: CacheLayout { regions, views } });
        }
        Ok(Self {
            manifest: Manifest::new(spec, cache_groups, manifests)?,
            bases: ranks.iter().map(|r| r.base_addr).collect(),
            scratch_slots,
            block_size,
        })
    }
}

/// How many ranks share the tokens of a layer: only latents are dealt out.
fn context_of(side: &Side, kind: Kind) -> u32 {
    if matches!(kind, Kind::Mla | Kind::SwaMla) { side.dcp_size.max(1) } else { 1 }
}

/// A group that requests move, with the layers of all stages.
pub(crate) struct JoinedGroup<'r> {
    /// As the first rank has it.
    pub(crate) first: &'r Group,
    pub(crate) layer_names: Vec<&'r String>,
}

pub(crate) fn joined_groups(ranks: &[Rank]) -> Vec<JoinedGroup<'_>> {
    let mut out: Vec<JoinedGroup<'_>> = Vec::new();
    for rank in ranks {
        for (i, group) in rank.kv_cache_groups.iter().filter(|g| g.enable_kv_transfer).enumerate() {
            if i >= out.len() {
                out.push(JoinedGroup { first: group, layer_names: Vec::new() });
            }
            for name in &group.layer_names {
                if !out[i].layer_names.contains(&name) {
                    out[i].layer_names.push(name);
                }
            }
        }
    }
    out
}

/// What one rank says of its layers.
struct RankReader<'a> {
    index: usize,
    rank: &'a Rank,
    side: &'a Side,
}

impl RankReader<'_> {
    fn size(&self, layer: &str, what: &'static str, got: u64, expected: u64) -> EngineError {
        EngineError::Size { rank: self.index, layer: layer.to_owned(), what, got, expected }
    }

    fn narrow(&self, layer: &str, what: &'static str, value: u64) -> Result<u32, EngineError> {
        u32::try_from(value).map_err(|_| self.size(layer, what, value, u64::from(u32::MAX)))
    }

    fn layer(
        &self,
        name: &str,
        named: Named<'_>,
        group: &Group,
        view: &LayerView,
    ) -> Result<(Placement, View), EngineError> {
        let before = || self.size(name, "its address", view.addr, self.rank.base_addr);
        let offset = Bytes::new(view.addr.checked_sub(self.rank.base_addr).ok_or_else(before)?);
        if named.layer.kind.is_state() {
            return self.state(name, named, view, offset);
        }
        self.paged(name, named, group, view, offset)
    }

    fn paged(
        &self,
        name: &str,
        named: Named<'_>,
        group: &Group,
        view: &LayerView,
        offset: Bytes,
    ) -> Result<(Placement, View), EngineError> {
        let [blocks, heads, entries, _] = view.shape;
        let [kernel_stride, head_stride, entry_stride, _] = view.strides_bytes;
        let per_entry = u64::from(named.layer.tokens_per_state.unwrap_or(1).max(1));
        let block = u64::from(group.block_size) / per_entry;
        let kernels = block.checked_div(entries).filter(|k| *k > 0 && k.checked_mul(entries) == Some(block));
        let kernels = kernels.ok_or_else(|| self.size(name, "entries of a block", block, entries))?;
        let block_stride = view.block_stride.or(kernel_stride.checked_mul(kernels));
        let block_stride = block_stride.ok_or_else(|| self.size(name, "block stride", kernel_stride, kernels))?;
        let all = model::heads(name, named.layer)?;
        let range = self.share(name, "heads", all, self.narrow(name, "heads", heads)?)?;
        let class = match context_of(self.side, named.layer.kind) {
            1 => TokenClass::ALL,
            count => TokenClass::new(count, group.block_size, self.rank.worker.dcp_rank)
                .ok_or_else(|| self.size(name, "context rank", self.rank.worker.dcp_rank.into(), count.into()))?,
        };
        let component = ComponentView::new(PACKED.into(), 0, head_stride, entry_stride);
        let view = PagedView {
            region: RegionId::new(0),
            offset,
            block_stride: Bytes::new(block_stride),
            blocks: self.narrow(name, "blocks", blocks / kernels)?,
            block_size: self.narrow(name, "entries", block)?,
            kernel: KernelBlock {
                size: self.narrow(name, "entries", entries)?,
                stride: Bytes::new(if kernels == 1 { block_stride } else { kernel_stride }),
            },
            components: vec![component],
        };
        Ok((Placement::paged(range, class), View::Paged(view)))
    }

    /// The interval of `total` heads or units that a rank with `local` of them holds.
    fn share(&self, layer: &str, what: &'static str, total: u32, local: u32) -> Result<HeadRange, EngineError> {
        let (tp, rank) = (self.side.tp_size.max(1), self.rank.tp_rank);
        let start = if local >= total {
            0
        } else if u64::from(local) * u64::from(tp) == u64::from(total) {
            rank.saturating_mul(local)
        } else if tp > total {
            // Fewer than ranks: each is held by several.
            u32::try_from(u64::from(rank) * u64::from(total) / u64::from(tp)).unwrap_or(u32::MAX)
        } else {
            return Err(self.size(layer, what, local.into(), u64::from(total) / u64::from(tp)));
        };
        let range = HeadRange::new(start, start.saturating_add(local)).filter(|r| r.end() <= total);
        range.ok_or_else(|| self.size(layer, what, local.into(), total.into()))
    }

    fn state(
        &self,
        name: &str,
        named: Named<'_>,
        view: &LayerView,
        offset: Bytes,
    ) -> Result<(Placement, View), EngineError> {
        let worker = &self.rank.worker;
        let parts = model::parts(name, named.layer)?;
        let page = view.shape[3].saturating_mul(view.element_size);
        let conv_parts = parts.iter().filter(|p| p.part.name.as_str() != model::TEMPORAL).count();
        // A replicated state isn't among the sizes that the connector derives; it fills its page.
        let whole = [(0, page)];
        let (conv, conv_bytes) = if named.layer.tp_replicated {
            (&whole[..], page)
        } else {
            let known = worker.conv_offsets.as_deref().unwrap_or(&[]);
            (known, worker.ssm_sizes.first().copied().unwrap_or(0))
        };
        if conv.len() != conv_parts {
            return Err(self.size(name, "parts of the convolution", conv.len() as u64, conv_parts as u64));
        }
        let rows_first = self.side.ssm_conv_state_layout.as_deref() == Some("SD");
        let (mut shares, mut views) = (Vec::new(), Vec::new());
        for (i, part) in parts.iter().enumerate() {
            let rows = u64::from(part.part.rows) + u64::from(part.scratch_rows);
            let (width, total) = (part.part.width.get(), part.part.units);
            let unit = rows * width;
            let (at, bytes) = match conv.get(i) {
                Some(&(at, len)) => (at, len),
                None => (conv_bytes, worker.ssm_sizes.get(1).copied().unwrap_or(0)),
            };
            if unit == 0 || bytes % unit != 0 {
                return Err(self.size(name, "bytes of a part", bytes, unit));
            }
            let local = self.narrow(name, "units", bytes / unit)?;
            shares.push(self.share(name, "units", total, local)?);
            let part_name = part.part.name.clone();
            let mut view = if rows_first && i < conv_parts {
                // All channels of a row, then the next row.
                PartView::new(part_name, at / rows, conv_bytes / rows, width)
            } else {
                PartView::new(part_name, at, width, unit)
            };
            view.scratch_rows = part.scratch_rows;
            views.push(view);
        }
        let slots = self.narrow(name, "slots", view.shape[0])?;
        let slot_stride = Bytes::new(view.strides_bytes[0]);
        let view = StateView { region: RegionId::new(0), offset, slot_stride, slots, parts: views };
        Ok((Placement::state(shares), View::State(view)))
    }
}
