//! The two engines and their requests, the same in every process: all of it follows from the arguments.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{BlockTable, DstGroup, Request, SrcGroup, Tail};
use kvferry_geometry::units::{BlockId, GroupId, RankId, TokenRange, Tokens};
use kvferry_models::{EngineDescription, Model, Shape};
use kvferry_transport::conformance::sample::Rng;

use super::args::Args;
use crate::show;

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

/// One group's blocks of one request at one engine.
#[derive(Clone, Debug)]
pub(crate) struct GroupBlocks {
    pub(crate) first_position: u64,
    pub(crate) ids: Vec<BlockId>,
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
    pub(crate) tokens: u64,
    pub(crate) cached: u64,
    pub(crate) requests: Vec<Blocks>,
}

/// The two engines, before any request.
#[derive(Clone, Debug)]
pub(crate) struct Engines {
    model: String,
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
}

impl Engines {
    /// Describes both engines with as many blocks as the requests need and some to spare.
    pub(crate) fn new(args: &Args) -> anyhow::Result<Self> {
        if args.prefix_hit > args.tokens {
            bail!("--prefix-hit {} is more than --tokens {}", args.prefix_hit, args.tokens);
        }
        let model = Model::preset_or_file(&args.model)?;
        let prefill = engine(args, &model, Role::Prefill, args.prefill, args.prefill_block, args.prefill_layout.1)
            .context("the prefill engine")?;
        let decode = engine(args, &model, Role::Decode, args.decode, args.decode_block, args.decode_layout.1)
            .context("the decode engine")?;
        Ok(Self { model: model.name().to_owned(), prefill, decode })
    }

    /// Bytes of memory that both engines need; the yardstick takes as much as the largest prefill rank for every decode
    /// rank.
    pub(crate) fn memory(&self) -> u64 {
        let of_rank = |e: &Engine, rank| e.manifest.region_lens(rank).iter().map(|l| l.get()).sum::<u64>();
        let of_engine = |e: &Engine| e.ranks().map(|r| of_rank(e, r)).fold(0, u64::saturating_add);
        let largest = self.prefill.ranks().map(|r| of_rank(&self.prefill, r)).max().unwrap_or(0);
        let yardstick = largest.saturating_mul(self.decode.ranks().count() as u64);
        of_engine(&self.prefill).saturating_add(of_engine(&self.decode)).saturating_add(yardstick)
    }
}

impl Scenario {
    /// The engines and their requests.
    pub(crate) fn new(args: &Args) -> anyhow::Result<Self> {
        Ok(Self::with(Engines::new(args)?, args))
    }

    /// Adds the requests to engines.
    pub(crate) fn with(engines: Engines, args: &Args) -> Self {
        let Engines { model, prefill, decode } = engines;
        let src = all_blocks(&prefill.manifest, args);
        let dst = all_blocks(&decode.manifest, args);
        let requests = src.into_iter().zip(dst).map(|(src, dst)| Blocks { src, dst }).collect();
        Self { model, prefill, decode, tokens: args.tokens, cached: args.prefix_hit, requests }
    }

    pub(crate) fn engine(&self, role: Role) -> &Engine {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// What the source says of a request.
    pub(crate) fn src_groups(&self, request: usize) -> Vec<SrcGroup> {
        let held = |group| self.prefill.manifest.retention(group).needed(Tokens::new(self.tokens));
        let groups = (0u32..).map(GroupId::new).zip(&self.requests[request].src);
        groups
            .map(|(id, g)| SrcGroup {
                table: BlockTable::new(g.first_position, &g.ids),
                held: held(id),
                tail: Tail::Exact,
            })
            .collect()
    }

    /// What the destination says of it.
    pub(crate) fn dst_groups(&self, request: usize) -> Vec<DstGroup> {
        let cached = Tokens::new(self.cached);
        let groups = self.requests[request].dst.iter();
        groups.map(|g| DstGroup { table: BlockTable::new(g.first_position, &g.ids), cached }).collect()
    }

    /// Both sides of a request, for the planner.
    pub(crate) fn request(&self, request: usize) -> Request {
        Request { tokens: Tokens::new(self.tokens), src: self.src_groups(request), dst: self.dst_groups(request) }
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

fn engine(
    args: &Args,
    model: &Model,
    role: Role,
    shape: Shape,
    block_size: u32,
    layout: LayoutStyle,
) -> anyhow::Result<Engine> {
    let mut description = EngineDescription::new(model.clone(), shape);
    description.name = role.name().to_owned();
    description.options.layers = args.layers;
    description.block_size = block_size;
    description.layout = layout;
    // First a sketch that tells how many tokens a block of each group covers, then the blocks that the requests need.
    description.blocks = Some(1);
    let sketch = description.manifest()?;
    let wanted = |group| {
        let each = blocks_of_request(&sketch, group, args.tokens).1 * u64::from(args.requests);
        each + each / 8 + 2
    };
    let groups = (0..u32::try_from(sketch.groups().len())?).map(GroupId::new);
    let blocks = groups.map(wanted).max().unwrap_or(1);
    description.blocks = Some(u32::try_from(blocks).context("the requests need more than 2^32 blocks")?);
    Ok(Engine { role, manifest: Arc::new(description.manifest()?), description })
}

/// (first table position, entries) that a request of `tokens` needs in a group; a window's earlier blocks are gone.
fn blocks_of_request(manifest: &Manifest, group: GroupId, tokens: u64) -> (u64, u64) {
    let covers = manifest.groups()[group.index()].block_tokens.get();
    let kept: TokenRange = manifest.retention(group).needed(Tokens::new(tokens));
    let first = kept.start().get() / covers;
    (first, tokens.div_ceil(covers).saturating_sub(first))
}

/// The blocks of every request: scattered, as an allocator leaves them after a while.
fn all_blocks(manifest: &Manifest, args: &Args) -> Vec<Vec<GroupBlocks>> {
    let mut requests = vec![Vec::new(); args.requests as usize];
    for id in (0u32..).map(GroupId::new).take(manifest.groups().len()) {
        let mut free = shuffled(manifest.blocks(id).get(), u64::from(id.get()) + manifest.ranks().len() as u64);
        let (first_position, count) = blocks_of_request(manifest, id, args.tokens);
        for request in &mut requests {
            let rest = free.split_off(usize::try_from(count).unwrap_or(usize::MAX).min(free.len()));
            request.push(GroupBlocks { first_position, ids: std::mem::replace(&mut free, rest) });
        }
    }
    requests
}

/// All block ids in a random order, the same in every process.
fn shuffled(blocks: u32, seed: u64) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (0..blocks).map(BlockId::new).collect();
    Rng::new(seed).shuffle(&mut ids);
    ids
}
