//! The two engines and their requests, the same in every process: all of it follows from the arguments.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use kvferry::{StagingOptions, Way};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::request::{DstGroup, Request, SrcGroup, Tail};
use kvferry_geometry::spec::{Item, ItemKind, ModelSpec, PagedItem, Retention};
use kvferry_geometry::units::{Bytes, ItemId, RankId, Tokens};
use kvferry_models::{EngineDescription, Grouping};
use kvferry_transport::conformance::sample::Rng;

use super::args::{self, Args, Layout};
use crate::backends::Wires;
use crate::engine::Named;
use crate::show;
use kvferry_topology::blocks::{self, Ask, Free, GroupBlocks, Room};

/// A side of the demo.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Role {
    /// The engine that computed the cache.
    Prefill,
    /// The engine that goes on with it.
    Decode,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One engine.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) role: Role,
    pub(crate) manifest: Arc<Manifest>,
    description: EngineDescription,
}

/// One request's blocks at both engines.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) src: Vec<GroupBlocks>,
    pub(crate) dst: Vec<GroupBlocks>,
}

/// Everything that the demo's processes must agree on.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) model: String,
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) ask: Ask,
    pub(crate) cached: u64,
    /// Earlier states that the decode engine takes besides the one after all tokens.
    pub(crate) more: u64,
    pub(crate) requests: Vec<Blocks>,
    args: Args,
}

/// What a prefill computes at a time.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// Its items.
    pub(crate) all: Vec<ItemId>,
    /// Those of them that can be announced when it is computed.
    pub(crate) paged: Vec<ItemId>,
}

/// The two engines, before any request.
#[derive(Clone, Debug)]
pub(crate) struct Engines {
    model: String,
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    /// Bytes of staging memory of each decode rank.
    pool: u64,
}

impl Engines {
    /// Describes both engines with as many blocks as the requests need and some to spare.
    pub(crate) fn new(args: &Args) -> anyhow::Result<Self> {
        if args.prefix_hit > args.tokens {
            bail!("--prefix-hit {} is more than --tokens {}", args.prefix_hit, args.tokens);
        }
        if args.checkpoints >= args.tokens {
            bail!("--checkpoints {} are more than {} tokens have room for", args.checkpoints, args.tokens);
        }
        if args.decode_checkpoints > args.checkpoints {
            let (wanted, kept) = (args.decode_checkpoints, args.checkpoints);
            bail!("--decode-checkpoints {wanted} are more than the --checkpoints {kept} that there are");
        }
        let prefill = describe(args, Role::Prefill, &args.prefill, args.prefill_block, args.prefill_layout.as_ref())
            .context("the prefill engine")?;
        let decode = describe(args, Role::Decode, &args.decode, args.decode_block, args.decode_layout.as_ref())
            .context("the decode engine")?;
        let ring = if args.rings { Some(ring_step([&prefill, &decode])?) } else { None };
        let model = prefill.model.name().to_owned();
        let prefill = engine(args, Role::Prefill, prefill, args.checkpoints, ring).context("the prefill engine")?;
        let decode = engine(args, Role::Decode, decode, args.decode_checkpoints, ring).context("the decode engine")?;
        Ok(Self { model, prefill, decode, pool: args.pool })
    }

    /// Bytes of memory that both engines need, staging included; the yardstick takes as much as the largest prefill rank for
    /// every decode rank.
    pub(crate) fn memory(&self) -> u64 {
        let of_rank = |e: &Engine, rank| e.manifest.region_lens(rank).iter().map(|l| l.get()).sum::<u64>();
        let of_engine = |e: &Engine| e.ranks().map(|r| of_rank(e, r)).fold(0, u64::saturating_add);
        let largest = self.prefill.ranks().map(|r| of_rank(&self.prefill, r)).max().unwrap_or(0);
        let ranks = self.decode.ranks().count() as u64;
        let yardstick = largest.saturating_mul(ranks);
        let staging = self.pool.saturating_mul(ranks.saturating_add(self.prefill.ranks().count() as u64));
        let yardstick = yardstick.saturating_add(staging);
        of_engine(&self.prefill).saturating_add(of_engine(&self.decode)).saturating_add(yardstick)
    }
}

impl Scenario {
    /// The engines and their requests.
    pub(crate) fn new(args: &Args) -> anyhow::Result<Self> {
        Self::with(Engines::new(args)?, args)
    }

    /// Adds the requests to engines.
    pub(crate) fn with(engines: Engines, args: &Args) -> anyhow::Result<Self> {
        let Engines { model, prefill, decode, .. } = engines;
        let ask = ask(args, args.checkpoints);
        let src = all_blocks(&prefill.manifest, args, ask)?;
        let dst = all_blocks(&decode.manifest, args, self::ask(args, args.decode_checkpoints))?;
        let requests = src.into_iter().zip(dst).map(|(src, dst)| Blocks { src, dst }).collect();
        let (cached, more) = (args.prefix_hit, args.decode_checkpoints);
        Ok(Self { model, prefill, decode, ask, cached, more, requests, args: args.clone() })
    }

    /// What the ranks of an engine move bytes with.
    pub(crate) fn wires(&self, role: Role) -> &Wires {
        self.args.wires(role)
    }

    /// Whether layers are announced as they are computed.
    pub(crate) fn is_streamed(&self) -> bool {
        self.args.stream.is_some()
    }

    /// The prefill engine's layers, in the order in which they are computed: that of its items, by the number in their names.
    pub(crate) fn layers(&self) -> Vec<Layer> {
        let mut layers: Vec<(String, Layer)> = Vec::new();
        for (id, item) in self.prefill.manifest.spec().iter() {
            let name = item.name.as_str();
            let number = name.split('.').position(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit()));
            // Items of a layer have all in common up to its number.
            let words: Vec<&str> = name.split('.').take(number.map_or(usize::MAX, |at| at + 1)).collect();
            let key = words.join(".");
            let at = layers.iter().position(|(of, _)| *of == key).unwrap_or_else(|| {
                let layer = Layer { name: key.clone(), all: Vec::new(), paged: Vec::new() };
                layers.push((key, layer));
                layers.len() - 1
            });
            let layer = &mut layers[at].1;
            layer.all.push(id);
            if item.as_paged().is_some() {
                layer.paged.push(id);
            }
        }
        layers.into_iter().map(|(_, layer)| layer).collect()
    }

    /// How a rank stages: what it reads, or what is read from it.
    pub(crate) fn staging(&self, role: Role) -> StagingOptions {
        let way = match self.args.way {
            args::Way::Auto => Way::Auto,
            args::Way::Direct => Way::Direct,
            args::Way::Destination => Way::Destination,
            args::Way::Source => Way::Source,
        };
        let idle = match role {
            Role::Prefill => matches!(way, Way::Direct | Way::Destination),
            Role::Decode => matches!(way, Way::Direct | Way::Source),
        };
        let pool = Bytes::new(if idle { 0 } else { self.args.pool });
        // Nobody orders a prefill rank to read.
        let way = if role == Role::Prefill { Way::Auto } else { way };
        StagingOptions { pool, way, ..StagingOptions::default() }
    }

    /// Both engines together, and who reads from whom.
    pub(crate) fn plan(&self) -> anyhow::Result<(Compatible, PeerMap)> {
        let (src, dst) = (Arc::clone(&self.prefill.manifest), Arc::clone(&self.decode.manifest));
        let cannot = "the two engines cannot talk";
        let compatible = Compatible::with(src, dst, self.args.ignore.options()).context(cannot)?;
        let options = PeerOptions { salt: 0, stripe: self.args.stripe };
        let peers = PeerMap::with(&compatible, options, |_, _| 0).context(cannot)?;
        Ok((compatible, peers))
    }

    /// The states that a request brings to the decode engine, by position; the first is the one it resumes from.
    pub(crate) fn states_moved(&self) -> impl Iterator<Item = u64> {
        self.ask.positions().take(usize::try_from(self.more).unwrap_or(usize::MAX).saturating_add(1))
    }

    /// What is said of states, where there are any.
    pub(crate) fn states(&self) -> Option<String> {
        let bytes = self.decode.manifest.spec().bytes_per_state().get();
        if bytes == 0 {
            return None;
        }
        let earlier: Vec<String> = self.states_moved().skip(1).map(show::count).collect();
        let earlier = if earlier.is_empty() { String::new() } else { format!(" and {}", earlier.join(", ")) };
        let at = show::count(self.ask.tokens);
        Some(format!("states of {} for each request, read at position {at}{earlier}", show::size(bytes)))
    }

    pub(crate) fn engine(&self, role: Role) -> &Engine {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// What the source says of a request.
    pub(crate) fn src_groups(&self, request: usize) -> Vec<SrcGroup> {
        self.ask.src(&self.prefill.manifest, &self.requests[request].src, Tail::Exact)
    }

    /// What the destination says of it.
    pub(crate) fn dst_groups(&self, request: usize) -> Vec<DstGroup> {
        self.ask.dst(&self.decode.manifest, &self.requests[request].dst, self.cached, self.more)
    }

    /// Both sides of a request, for the planner.
    pub(crate) fn request(&self, request: usize) -> Request {
        Request { tokens: Tokens::new(self.ask.tokens), src: self.src_groups(request), dst: self.dst_groups(request) }
    }
}

impl Engine {
    pub(crate) fn ranks(&self) -> impl Iterator<Item = RankId> + use<> {
        (0..u32::try_from(self.manifest.ranks().len()).unwrap_or(u32::MAX)).map(RankId::new)
    }

    /// What a rank is called.
    pub(crate) fn label(&self, rank: RankId) -> String {
        format!("{} {}", if self.role == Role::Prefill { "P" } else { "D" }, show::rank(&self.description, rank))
    }
}

fn ask(args: &Args, earlier: u64) -> Ask {
    Ask { tokens: args.tokens, states: earlier + 1 }
}

fn describe(
    args: &Args,
    role: Role,
    named: &Named,
    block_size: Option<u32>,
    layout: Option<&Layout>,
) -> anyhow::Result<EngineDescription> {
    let mut d = args.model.describe(named, role.name())?;
    if let Some(layout) = layout {
        (d.layout, d.kernel_block) = (layout.style, layout.kernel_block);
        if d.layout.share && d.grouping == Grouping::default() {
            d.grouping = Grouping::EqualLayers;
        }
    }
    match block_size {
        Some(n) => d.block_size = n,
        None if d.layout.share && matches!(named, Named::Shape(_)) => blocks::grow_to_states(&mut d)?,
        None => {}
    }
    Ok(d)
}

/// An engine with the blocks and slots that the requests need.
fn engine(
    args: &Args,
    role: Role,
    mut description: EngineDescription,
    earlier: u64,
    ring: Option<u64>,
) -> anyhow::Result<Engine> {
    let room = Room { ask: ask(args, earlier), requests: args.requests.into(), spare: true };
    let adjust = |m: Manifest| ring.map_or(Ok(m.clone()), |step| with_rings(&m, step));
    blocks::fit_with(&mut description, room, &adjust)?;
    let manifest = adjust(description.manifest()?)?;
    Ok(Engine { role, manifest: Arc::new(manifest), description })
}

/// A number of tokens that the blocks of both engines' groups of windows divide.
fn ring_step(engines: [&EngineDescription; 2]) -> anyhow::Result<u64> {
    let mut step = 1u64;
    for d in engines {
        let mut sketch = (*d).clone();
        sketch.blocks = Some(1);
        let m = sketch.manifest()?;
        for (id, group) in blocks::groups(&m).zip(m.groups()) {
            if blocks::retentions(&m, id).any(|r| matches!(r, Retention::Window(_))) {
                let block = group.block_tokens.get().max(1);
                let (mut a, mut b) = (step, block);
                while b > 0 {
                    (a, b) = (b, a % b);
                }
                step =
                    (step / a).checked_mul(block).filter(|&s| s <= 1 << 32).context("blocks without a common ring")?;
            }
        }
    }
    Ok(step)
}

/// The same engine with its windows kept in rings of a multiple of `step` tokens.
fn with_rings(m: &Manifest, step: u64) -> anyhow::Result<Manifest> {
    let ringed = |item: &Item| match &item.kind {
        ItemKind::Paged(PagedItem { retention: Retention::Window(w), heads, tokens_per_entry, components }) => {
            let (heads, tokens_per_entry, components) = (*heads, *tokens_per_entry, components.clone());
            let retention = Retention::Ring(Tokens::new(w.get().next_multiple_of(step)));
            Item::paged(item.name.as_str(), PagedItem { heads, tokens_per_entry, components, retention })
        }
        _ => item.clone(),
    };
    let spec = ModelSpec::new(m.spec().items().iter().map(ringed).collect())?;
    Ok(Manifest::new(spec, m.groups().to_vec(), m.ranks().to_vec())?)
}

/// The blocks of every request: scattered, as an allocator leaves them after a while, unless they are wanted one after the other.
fn all_blocks(m: &Manifest, args: &Args, ask: Ask) -> anyhow::Result<Vec<Vec<GroupBlocks>>> {
    let mut free = Free::new(m, |list, ids| {
        if !args.contiguous {
            // The same in every process.
            Rng::new(u64::from(list) + m.ranks().len() as u64).shuffle(ids);
        }
    });
    (0..args.requests).map(|_| Ok(free.take(m, ask)?)).collect()
}
