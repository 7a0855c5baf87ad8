//! From the end of a prefill to *delivered* on a virtual clock: real owners and ranks, with wires of stated rates between them.
//!
//! What sessions do takes no time here, so what comes out is what the protocol and the wire need, the same on every machine.

use std::sync::Arc;
use std::time::Duration;

use kvferry_benches::engines::{BLOCK, listed, shape, wanted};
use kvferry_geometry::units::{Bytes, ItemId, RankId, TokenRange, Tokens};
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_proto::lease::Offer;
use kvferry_proto::names::{Attempt, EngineId, Epoch, Fence, LeaseId};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{Assurance, FromRank, ToRank};
use kvferry_session::owner::{Effect, FailurePolicy, LinkId, Mode, PullWish, RankLinkId, USUAL_PRIORITY};
use kvferry_session::rank::RankIdentity;
use kvferry_session::{LocalCache, OwnerConfig, OwnerSession, RankSession, Ttl};
use kvferry_sim::SimTransport;
use kvferry_sim::fabric::{Fabric, FabricConfig, Owner};
use kvferry_sim::queue::Queue;
use kvferry_transport::EndpointId;
use rustix::event::EventfdFlags;

use crate::requests::{size, told};
use crate::side::{DESTINATION, Order, SOURCE, ids};
use crate::{KEY, model, prompts};

/// Between the owners, and for a reference by way of a router; between an owner and its rank; until the first byte of an operation moves, and
/// again until its end is told.
const PEER: Duration = Duration::from_micros(20);
const RANK: Duration = Duration::from_micros(5);
const OPERATION: Duration = Duration::from_micros(5);
/// Tokens of a chunk of a prefill in chunks.
const CHUNK: u64 = 2048;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    Pull,
    Sealed,
    Streamed,
}

pub(crate) fn run() {
    println!(
        "from a prefill's last layer to delivered on a virtual clock: real sessions, {} us a message between owners, {} between owner and rank,\n\
         {} before an operation's first byte and after its last; what sessions do takes no time. {}\n",
        PEER.as_micros(),
        RANK.as_micros(),
        OPERATION.as_micros(),
        model::told()
    );
    println!(
        "| tokens | cache | wire | chunks of | prefill | alone on the wire | pull | push, sealed | push, streamed | hidden | writes |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for tokens in prompts() {
        for gigabits in [100, 200, 400] {
            let mut chunks = vec![tokens];
            if gigabits == 200 && tokens > CHUNK {
                chunks.push(CHUNK);
            }
            for chunk in chunks {
                row(tokens, gigabits, chunk);
            }
        }
    }
    println!();
}

fn row(tokens: u64, gigabits: u64, chunk: u64) {
    let rate = gigabits * 1_000_000_000 / 8;
    let bytes = tokens * model::BYTES_PER_TOKEN;
    let [pull, sealed, streamed] =
        [How::Pull, How::Sealed, How::Streamed].map(|how| World::new(tokens, rate, how).run(chunk));
    println!(
        "| {tokens} | {} | {gigabits} Gbit/s | {chunk} | {} | {} | {} | {} | {} | {:.1} % | {} |",
        size(bytes),
        told(streamed.prefill.as_secs_f64()),
        told(bytes as f64 / rate as f64),
        told(pull.after.as_secs_f64()),
        told(sealed.after.as_secs_f64()),
        told(streamed.after.as_secs_f64()),
        (1.0 - streamed.after.as_secs_f64() / sealed.after.as_secs_f64()) * 100.0,
        streamed.operations,
    );
}

struct Outcome {
    prefill: Duration,
    /// From its end until delivered.
    after: Duration,
    operations: u64,
}

/// An engine of one rank.
struct Side {
    owner: OwnerSession,
    rank: RankSession,
    link: RankLinkId,
    /// When one of them has something to do by itself.
    wakes: [Option<Duration>; 2],
}

enum Happens {
    Connected(LinkId),
    Peer(usize, PeerMessage),
    ToRank(usize, ToRank),
    FromRank(usize, FromRank),
    /// The consumer has the reference.
    Ask(Fence),
    /// A layer of the tokens is done, and whether it is the last.
    Computed(u32, TokenRange, bool),
}

const P: usize = 0;
const D: usize = 1;

struct World {
    tokens: u64,
    how: How,
    now: Duration,
    fabric: Fabric,
    sides: [Side; 2],
    /// The link's name at either owner.
    link: Option<[LinkId; 2]>,
    queue: Queue<Happens>,
    lease: u128,
    blocks: [Vec<u32>; 2],
    /// When the prefill ended, and when requests did.
    computed: Option<Duration>,
    ended: Vec<Duration>,
}

impl World {
    fn new(tokens: u64, rate: u64, how: How) -> Self {
        let config = FabricConfig { bytes: false, latency: (OPERATION, OPERATION), rate, ..FabricConfig::new(1) };
        let fabric = Fabric::new(config);
        let quiet = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let blocks = u32::try_from(tokens / BLOCK).unwrap();
        let side = |engine: u32, id: &str| {
            let (spec, groups, manifests) = shape(model::LAYERS, model::WIDTH, 1, blocks);
            let engine_id = EngineId::new(id).unwrap();
            let config = OwnerConfig::new(engine_id.clone(), Epoch::new(1), spec, groups, 1);
            let mut owner = OwnerSession::new(config).unwrap();
            let at = Owner { engine, rank: 0, life: 0 };
            let name = EndpointId::new([u8::try_from(engine).unwrap() + 1; 16]);
            let mut transport = Box::new(SimTransport::new(&fabric, at, name, quiet.clone()));
            let manifest = manifests.into_iter().next().unwrap();
            let lens: Vec<usize> =
                manifest.layout.regions.iter().map(|r| usize::try_from(r.len.get()).unwrap()).collect();
            // Never touched, so it costs addresses only.
            let all = Bytes::new(lens.iter().sum::<usize>() as u64);
            let all = SharedBuffer::new("kvferry bench", all, BufferOptions::default()).unwrap().region();
            let mut at = 0;
            let part = |len| {
                at += len;
                all.part(at - len, len).unwrap()
            };
            let memory = lens.into_iter().map(part).collect();
            let cache = LocalCache::register(&mut *transport, manifest, memory).unwrap();
            let who = RankIdentity { engine: engine_id, rank: RankId::ZERO, epoch: Epoch::new(2) };
            let rank = RankSession::new(who, transport, cache);
            let link = owner.accept_rank(Duration::ZERO);
            Side { owner, rank, link, wakes: [None; 2] }
        };
        let sides = [side(0, "p"), side(1, "d")];
        let ids = [SOURCE, DESTINATION].map(|seed| ids(Order::Scattered, blocks, blocks, seed));
        let (now, queue) = (Duration::ZERO, Queue::default());
        let mut world = Self {
            tokens,
            how,
            now,
            fabric,
            sides,
            link: None,
            queue,
            lease: 0,
            blocks: ids,
            computed: None,
            ended: Vec::new(),
        };
        world.settle();
        world.until(|world| world.sides.iter().all(|s| s.owner.manifest().is_some()));
        // Engines meet, and lanes are made.
        let fence = world.offer(BLOCK);
        world.ask(fence, BLOCK, if how == How::Pull { Mode::Pull } else { Mode::Push { progress: false } });
        world.until(|world| world.ended.len() == 1);
        world
    }

    fn run(mut self, chunk: u64) -> Outcome {
        let before = self.fabric.stats();
        let began = self.now;
        if self.how != How::Pull {
            let offer = self.all(self.tokens);
            self.lease += 1;
            let lease = LeaseId::new(self.lease);
            let fence = self.sides[P].owner.announce(lease, offer, Ttl::Never, began).unwrap();
            self.queue.put(began + PEER, Happens::Ask(fence));
        }
        let mut at = began;
        let mut from = 0;
        while from < self.tokens {
            let to = (from + chunk).min(self.tokens);
            for layer in 0..model::LAYERS {
                at += model::layer(from, to);
                let last = to == self.tokens && layer + 1 == model::LAYERS;
                let range = TokenRange::new(Tokens::new(from), Tokens::new(to));
                self.queue.put(at, Happens::Computed(layer, range, last));
            }
            from = to;
        }
        self.settle();
        self.until(|world| world.ended.len() == 2);
        let (computed, after) = (self.computed.unwrap(), self.fabric.stats());
        Outcome {
            prefill: computed - began,
            after: self.ended[1] - computed,
            operations: after.reads + after.writes - before.reads - before.writes,
        }
    }

    /// The first so many tokens.
    fn all(&self, tokens: u64) -> Offer {
        let count = usize::try_from(tokens / BLOCK).unwrap();
        Offer { groups: listed(&self.blocks[P][..count]), content_key: KEY }
    }

    fn offer(&mut self, tokens: u64) -> Fence {
        let offer = self.all(tokens);
        self.lease += 1;
        self.sides[P].owner.offer(LeaseId::new(self.lease), offer, Ttl::Never, self.now).unwrap()
    }

    fn ask(&mut self, fence: Fence, tokens: u64, mode: Mode) {
        let count = usize::try_from(tokens / BLOCK).unwrap();
        let wish = PullWish {
            mode,
            address: "there".into(),
            fence,
            tokens: Tokens::new(tokens),
            groups: wanted(&self.blocks[D][..count]),
            content_key: KEY,
            assurance: Assurance::Fenced,
            deadline: Duration::from_secs(600),
            priority: USUAL_PRIORITY,
            policy: FailurePolicy::default(),
        };
        self.sides[D].owner.pull(wish, self.now);
        self.settle();
    }

    /// Lets what happens happen until something is so.
    fn until(&mut self, is_so: impl Fn(&Self) -> bool) {
        while !is_so(self) {
            let wakes = self.sides.iter().flat_map(|s| s.wakes).flatten();
            let next = wakes.chain(self.queue.next()).chain(self.fabric.next()).min().unwrap();
            self.now = self.now.max(next);
            self.fabric.advance(self.now);
            while self.queue.next().is_some_and(|at| at <= self.now) {
                if let Some((_, what)) = self.queue.take() {
                    self.happens(what);
                }
            }
            self.settle();
        }
    }

    fn happens(&mut self, what: Happens) {
        let now = self.now;
        match what {
            Happens::Connected(ours) => {
                let theirs = self.sides[P].owner.accept(None, now);
                self.link = Some([theirs, ours]);
                assert!(self.sides[D].owner.link_opened(ours, None, now));
            }
            Happens::Peer(to, message) => {
                if let Some(link) = self.link {
                    self.sides[to].owner.peer_message(link[to], message, now);
                }
            }
            Happens::ToRank(side, message) => self.sides[side].rank.handle(message, now),
            Happens::FromRank(side, message) => {
                let side = &mut self.sides[side];
                side.owner.rank_message(side.link, message, now);
            }
            Happens::Ask(fence) => {
                let mode = if self.how == How::Pull { Mode::Pull } else { Mode::Push { progress: false } };
                self.ask(fence, self.tokens, mode);
            }
            Happens::Computed(layer, tokens, last) => self.computed(layer, tokens, last),
        }
    }

    fn computed(&mut self, layer: u32, tokens: TokenRange, last: bool) {
        let (now, lease) = (self.now, LeaseId::new(self.lease));
        if self.how == How::Streamed {
            let items = [ItemId::new(layer)];
            self.sides[P].owner.region_ready(lease, Attempt::FIRST, &items, tokens, now).unwrap();
        }
        if !last {
            return;
        }
        self.computed = Some(now);
        if self.how == How::Pull {
            let fence = self.offer(self.tokens);
            self.queue.put(now + PEER, Happens::Ask(fence));
        } else {
            let groups = self.all(self.tokens).groups;
            self.sides[P].owner.seal(lease, Attempt::FIRST, groups, now).unwrap();
        }
    }

    /// Both engines do what there is to do now.
    fn settle(&mut self) {
        let now = self.now;
        for at in [P, D] {
            loop {
                let side = &mut self.sides[at];
                let next = side.rank.step(now);
                while let Some(message) = side.rank.next_message() {
                    self.queue.put(now + RANK, Happens::FromRank(at, message));
                }
                if next.is_none_or(|next| next > now) {
                    side.wakes[0] = next;
                    break;
                }
            }
            self.sides[at].wakes[1] = self.sides[at].owner.step(now);
            while let Some(effect) = self.sides[at].owner.next_effect() {
                match effect {
                    Effect::Connect { link, .. } => self.queue.put(now + PEER, Happens::Connected(link)),
                    Effect::SendPeer { message, .. } => self.queue.put(now + PEER, Happens::Peer(1 - at, message)),
                    Effect::SendRank { message, .. } => self.queue.put(now + RANK, Happens::ToRank(at, message)),
                    Effect::PullEnded { result, .. } => {
                        (*result).unwrap();
                        self.ended.push(now);
                    }
                    _ => {}
                }
            }
        }
    }
}
