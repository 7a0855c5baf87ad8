//! Data transfer objects: what postcard encodes. No invariants live here; see [`convert`](super::convert).
//!
//! The names of a cache's description are borrowed: from the body that is read, or from the manifest that is written. There are thousands.

use serde::{Deserialize, Serialize};

use super::bounded::List;
use crate::manifest::MAX_BLOB;
use crate::peer::{MAX_BEATS, MAX_PIECES, MAX_REQUEST_STATES, MAX_WINDOWS};
use crate::rank::MAX_BAD_BLOCKS;

pub(super) const MAX_ITEMS: usize = kvferry_geometry::spec::MAX_ITEMS;
pub(super) const MAX_COMPONENTS: usize = kvferry_geometry::spec::MAX_COMPONENTS;
pub(super) const MAX_PARTS: usize = kvferry_geometry::spec::MAX_PARTS;
pub(super) const MAX_RANKS: usize = kvferry_geometry::placement::MAX_RANKS as usize;
pub(super) const MAX_REGIONS: usize = 1 << 16;
pub(super) const MAX_RUNS: usize = 1 << 20;
pub(super) const MAX_REASONS: usize = 64;
/// Pairs of ranks of one message.
pub(super) const MAX_WRITES: usize = 1 << 16;

#[derive(Serialize, Deserialize)]
pub(super) struct Component<'a> {
    pub(super) name: &'a str,
    pub(super) width: u64,
    pub(super) encoding: &'a str,
    pub(super) span: u32,
    pub(super) heads: ValueHeads,
}

#[derive(Serialize, Deserialize)]
pub(super) enum ValueHeads {
    Each,
    Shared,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Retention {
    Full,
    Window(u64),
    Chunk(u64),
    Ring(u64),
}

#[derive(Serialize, Deserialize)]
pub(super) struct StatePart<'a> {
    pub(super) name: &'a str,
    pub(super) units: u32,
    pub(super) rows: u32,
    pub(super) width: u64,
    pub(super) encoding: &'a str,
}

#[derive(Serialize, Deserialize)]
pub(super) enum ItemKind<'a> {
    Paged {
        heads: u32,
        tokens_per_entry: u32,
        #[serde(borrow)]
        components: List<Component<'a>, MAX_COMPONENTS>,
        retention: Retention,
    },
    State(#[serde(borrow)] List<StatePart<'a>, MAX_PARTS>),
}

#[derive(Serialize, Deserialize)]
pub(super) struct Item<'a> {
    pub(super) name: &'a str,
    #[serde(borrow)]
    pub(super) kind: ItemKind<'a>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Group<'a> {
    pub(super) name: &'a str,
    pub(super) items: List<u32, MAX_ITEMS>,
    pub(super) block_tokens: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum MemoryKind {
    Host,
    Device(u32),
}

#[derive(Serialize, Deserialize)]
pub(super) struct Region {
    pub(super) len: u64,
    pub(super) kind: MemoryKind,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ComponentView<'a> {
    pub(super) name: &'a str,
    pub(super) offset: u64,
    pub(super) head_stride: u64,
    pub(super) entry_stride: u64,
    /// Bytes and stride.
    pub(super) chunks: Option<(u64, u64)>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct PagedView<'a> {
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) block_stride: u64,
    pub(super) blocks: u32,
    pub(super) block_size: u32,
    pub(super) kernel_size: u32,
    pub(super) kernel_stride: u64,
    #[serde(borrow)]
    pub(super) components: List<ComponentView<'a>, MAX_COMPONENTS>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct PartView<'a> {
    pub(super) name: &'a str,
    pub(super) offset: u64,
    pub(super) row_stride: u64,
    pub(super) unit_stride: u64,
    pub(super) scratch_rows: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) struct StateView<'a> {
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) slot_stride: u64,
    pub(super) slots: u32,
    #[serde(borrow)]
    pub(super) parts: List<PartView<'a>, MAX_PARTS>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum View<'a> {
    Paged(#[serde(borrow)] PagedView<'a>),
    State(#[serde(borrow)] StateView<'a>),
}

#[derive(Serialize, Deserialize)]
pub(super) enum Placement {
    Paged {
        heads: (u32, u32),
        /// Count, interleave, index.
        tokens: (u32, u32, u32),
    },
    /// The units of each part.
    State(List<(u32, u32), MAX_PARTS>),
}

/// What a rank says of one item. Boxed, so that a small body can't become a large list of empty ones.
#[derive(Serialize, Deserialize)]
pub(super) struct Held<'a> {
    pub(super) item: u32,
    pub(super) placement: Option<Box<Placement>>,
    #[serde(borrow)]
    pub(super) view: Option<Box<View<'a>>>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Rank<'a> {
    /// Lengths of the two lists that `held` is a sparse form of.
    pub(super) placements: u32,
    pub(super) views: u32,
    pub(super) regions: List<Region, MAX_REGIONS>,
    #[serde(borrow)]
    pub(super) held: List<Held<'a>, MAX_ITEMS>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Contact {
    pub(super) epoch: u128,
    pub(super) blob: List<u8, MAX_BLOB>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Engine<'a> {
    pub(super) engine: &'a str,
    pub(super) epoch: u128,
    #[serde(borrow)]
    pub(super) items: List<Item<'a>, MAX_ITEMS>,
    #[serde(borrow)]
    pub(super) groups: List<Group<'a>, MAX_ITEMS>,
    #[serde(borrow)]
    pub(super) ranks: List<Rank<'a>, MAX_RANKS>,
    pub(super) contacts: List<Contact, MAX_RANKS>,
}

/// A hello after its fixed head.
#[derive(Serialize, Deserialize)]
pub(super) struct Hello<'a> {
    pub(super) abilities: u64,
    pub(super) identity: &'a str,
    pub(super) stripe: bool,
    pub(super) digest: [u8; 32],
    #[serde(borrow)]
    pub(super) manifest: Engine<'a>,
}

/// How a hello begins after its fixed head: the same fields as [`Hello`] has, as far as the first two of its [`Engine`].
#[derive(Deserialize)]
pub(super) struct HelloClaim<'a> {
    pub(super) _abilities: u64,
    pub(super) identity: &'a str,
    pub(super) stripe: bool,
    pub(super) _digest: [u8; 32],
    pub(super) engine: &'a str,
}

/// A hello without a manifest, after the same head.
#[derive(Serialize, Deserialize)]
pub(super) struct Again {
    pub(super) abilities: u64,
    pub(super) identity: String,
    pub(super) stripe: bool,
    pub(super) engine: String,
    pub(super) digest: [u8; 32],
    pub(super) yours: [u8; 32],
}

#[derive(Serialize, Deserialize)]
pub(super) struct Refused(pub(super) List<String, MAX_REASONS>);

#[derive(Serialize, Deserialize)]
pub(super) struct Fence {
    pub(super) engine: String,
    pub(super) epoch: u128,
    pub(super) lease: u128,
    pub(super) attempt: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Bind {
    pub(super) fence: Fence,
    pub(super) content_key: [u8; 32],
    pub(super) salt: u64,
    pub(super) peer_map: [u8; 32],
}

#[derive(Serialize, Deserialize)]
pub(super) struct Table {
    pub(super) first: u64,
    /// First id and count.
    pub(super) runs: List<(u32, u32), MAX_RUNS>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Tail {
    Exact,
    Frozen,
}

/// Position and slot.
pub(super) type Checkpoints = List<(u64, u32), MAX_REQUEST_STATES>;

#[derive(Serialize, Deserialize)]
pub(super) enum SrcGroup {
    Paged { table: Table, held: (u64, u64), tail: Tail },
    State(Checkpoints),
}

#[derive(Serialize, Deserialize)]
pub(super) enum DstGroup {
    Paged { table: Table, cached: u64 },
    State { slot: Option<u32>, more: Checkpoints },
}

#[derive(Serialize, Deserialize)]
pub(super) enum BindRefusal {
    WrongEngine,
    StaleEpoch(u128),
    UnknownLease,
    AlreadyBound,
    WrongAttempt { expected: u32, got: u32 },
    WrongContent,
    PeerMapDiffers([u8; 32]),
    Incompatible(String),
    RankLost(u32, String),
    Busy(String),
    NotSealed,
    Unfit(String),
}

#[derive(Serialize, Deserialize)]
pub(super) enum BindAnswer {
    Bound { fence: Fence, groups: List<SrcGroup, MAX_ITEMS>, time_left_ns: Option<u64> },
    Refused { fence: Fence, reason: BindRefusal },
}

/// Lease and attempt.
#[derive(Serialize, Deserialize)]
pub(super) struct Heartbeat {
    pub(super) beat: u64,
    pub(super) leases: List<(u128, u32), MAX_BEATS>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Left {
    Closed,
    ForNs(u64),
    Always,
}

#[derive(Serialize, Deserialize)]
pub(super) struct HeartbeatAnswer {
    pub(super) beat: u64,
    pub(super) left: List<Left, MAX_BEATS>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Closing {
    Read,
    Abandoned,
    Declined,
    ConsumerLost,
    Withdrawn,
    Expired,
    RankLost,
    Restarted,
}

#[derive(Serialize, Deserialize)]
pub(super) struct LeaseClosed {
    pub(super) fence: Fence,
    pub(super) how: Closing,
}

#[derive(Serialize, Deserialize)]
pub(super) enum ReadsEnd {
    Complete,
    Abandoned,
    Declined,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Release {
    pub(super) fence: Fence,
    pub(super) reads: ReadsEnd,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Verdict {
    Held,
    Stale,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ReleaseAnswer {
    pub(super) fence: Fence,
    pub(super) verdict: Verdict,
}

/// Start, length, piece.
pub(super) type Windows = List<(u64, u64, u64), MAX_WINDOWS>;
pub(super) type Pieces = Result<List<[u8; 16], MAX_PIECES>, String>;

#[derive(Serialize, Deserialize)]
pub(super) struct RunDigest {
    pub(super) fence: Fence,
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) tokens: u64,
    pub(super) groups: List<DstGroup, MAX_ITEMS>,
    pub(super) windows: Windows,
}

#[derive(Serialize, Deserialize)]
pub(super) struct RunDigestAnswer {
    pub(super) fence: Fence,
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) pieces: Pieces,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Join<'a> {
    pub(super) engine: &'a str,
    pub(super) rank: u32,
    pub(super) epoch: u128,
    #[serde(borrow)]
    pub(super) manifest: Rank<'a>,
    pub(super) blob: List<u8, MAX_BLOB>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Unmatched {
    Refuse,
    Ignore,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Pairing {
    pub(super) peer: [u8; 32],
    pub(super) salt: u64,
    pub(super) stripe: bool,
    pub(super) source_only: Unmatched,
    pub(super) destination_only: Unmatched,
    pub(super) peer_map: [u8; 32],
}

#[derive(Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) tokens: u64,
    pub(super) src: List<SrcGroup, MAX_ITEMS>,
    pub(super) dst: List<DstGroup, MAX_ITEMS>,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Assurance {
    Fenced,
    Sampled,
    Full,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Pull {
    pub(super) pull: u64,
    pub(super) pairing: Pairing,
    pub(super) request: Request,
    pub(super) assurance: Assurance,
    pub(super) priority: u8,
    pub(super) deadline_ns: Option<u64>,
    pub(super) written: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) struct DigestOrder {
    pub(super) ticket: u64,
    pub(super) pairing: Pairing,
    pub(super) dst: u32,
    pub(super) request: Request,
    pub(super) windows: Windows,
}

#[derive(Serialize, Deserialize)]
pub(super) struct DigestAnswer {
    pub(super) pull: u64,
    pub(super) src: u32,
    pub(super) pieces: Pieces,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Source {
    pub(super) src: u32,
    pub(super) bytes: u64,
    pub(super) rows: u64,
    pub(super) descriptors_before: u64,
    pub(super) descriptors_after: u64,
    pub(super) place: Place,
    pub(super) lane: String,
    pub(super) took_ns: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Place {
    Direct,
    Destination,
    Source,
}

#[derive(Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) sources: List<Source, MAX_RANKS>,
    pub(super) zeroed: u64,
    pub(super) compared: u64,
    pub(super) queued_ns: u64,
    pub(super) slices: u32,
    pub(super) took_ns: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Stage {
    Plan,
    Connect,
    Submit,
    Read,
    Permute,
    Zero,
    Compare,
    Cancelled,
    Write,
}

#[derive(Serialize, Deserialize)]
pub(super) struct BadBlock {
    pub(super) src: u32,
    pub(super) item: String,
    pub(super) block: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) struct RankFault {
    pub(super) stage: Stage,
    pub(super) text: String,
    pub(super) in_doubt: bool,
    pub(super) bad: List<BadBlock, MAX_BAD_BLOCKS>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Pulled {
    pub(super) pull: u64,
    pub(super) result: Result<RankReport, RankFault>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct DigestWanted {
    pub(super) pull: u64,
    pub(super) src: u32,
    pub(super) windows: Windows,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Digested {
    pub(super) ticket: u64,
    pub(super) pieces: Pieces,
}

/// Bytes, and the digest of the batch.
#[derive(Serialize, Deserialize)]
pub(super) struct Batch(pub(super) u64, pub(super) [u8; 32]);

#[derive(Serialize, Deserialize)]
pub(super) enum NotGathered {
    Differs(Batch),
    Unable(String),
}

/// An offset in staging memory, or why there is none.
pub(super) type Gathering = Result<u64, NotGathered>;

#[derive(Serialize, Deserialize)]
pub(super) struct Gather {
    pub(super) fence: Fence,
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) batch: Batch,
    pub(super) tokens: u64,
    pub(super) groups: List<DstGroup, MAX_ITEMS>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct GatherAnswer {
    pub(super) fence: Fence,
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) result: Gathering,
}

#[derive(Serialize, Deserialize)]
pub(super) struct GatherOrder {
    pub(super) ticket: u64,
    pub(super) pairing: Pairing,
    pub(super) dst: u32,
    pub(super) batch: Batch,
    pub(super) request: Request,
}

#[derive(Serialize, Deserialize)]
pub(super) struct GatherWanted {
    pub(super) pull: u64,
    pub(super) src: u32,
    pub(super) batch: Batch,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Gathered {
    pub(super) ticket: u64,
    pub(super) result: Gathering,
}

#[derive(Serialize, Deserialize)]
pub(super) struct GatherPlace {
    pub(super) pull: u64,
    pub(super) src: u32,
    pub(super) result: Gathering,
}

#[derive(Serialize, Deserialize)]
pub(super) struct PushBind {
    pub(super) bind: Bind,
    pub(super) tokens: u64,
    pub(super) groups: List<DstGroup, MAX_ITEMS>,
    pub(super) within_ns: u64,
    pub(super) priority: u8,
    pub(super) progress: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Write {
    /// Index of the writer.
    pub(super) writer: u32,
    pub(super) dst: u32,
    pub(super) bytes: u64,
    pub(super) descriptors: u64,
    pub(super) lane: String,
    pub(super) took_ns: u64,
}

/// Of all writers of a message together, so that few bytes make few of them.
pub(super) type Writes = List<Write, MAX_WRITES>;

#[derive(Serialize, Deserialize)]
pub(super) struct WriterReport {
    pub(super) queued_ns: u64,
    pub(super) slices: u32,
    pub(super) took_ns: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct WriterFault {
    pub(super) stage: Stage,
    pub(super) text: String,
    pub(super) in_doubt: bool,
}

pub(super) type WriterEnd = Result<WriterReport, WriterFault>;

#[derive(Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) fence: Fence,
    pub(super) writers: List<(u32, WriterEnd), MAX_RANKS>,
    pub(super) writes: Writes,
    pub(super) groups: List<SrcGroup, MAX_ITEMS>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) fence: Fence,
    pub(super) tokens: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Stoppage {
    All,
    Except(List<u32, MAX_RANKS>),
    Unknown,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Stopped {
    pub(super) fence: Fence,
    pub(super) writers: Stoppage,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Push {
    pub(super) push: u64,
    pub(super) lease: u128,
    pub(super) attempt: u32,
    pub(super) streamed: bool,
    pub(super) pairing: Pairing,
    pub(super) request: Request,
    pub(super) priority: u8,
    pub(super) within_ns: u64,
    pub(super) progress: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Stream {
    pub(super) lease: u128,
    pub(super) attempt: u32,
    pub(super) groups: List<SrcGroup, MAX_ITEMS>,
    pub(super) sealed: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) lease: u128,
    pub(super) attempt: u32,
    pub(super) items: List<u32, MAX_ITEMS>,
    pub(super) tokens: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Pushed {
    pub(super) push: u64,
    pub(super) result: WriterEnd,
    pub(super) writes: Writes,
}

#[derive(Serialize, Deserialize)]
pub(super) struct PushProgress {
    pub(super) push: u64,
    pub(super) tokens: u64,
}
