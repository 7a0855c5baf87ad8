//! What the engines of a world do with their caches, and who looks at what they say: the world itself only steps sessions.

use std::fmt::Debug;
use std::time::Duration;

use kvferry_proto::peer::PeerMessage;
use kvferry_session::owner::{Effect, LinkId};

use super::{Who, World};

/// What happens in a [`World`] besides its sessions' own doing.
pub trait Script: Debug + Sized {
    /// Something that happens at a time.
    type Event: Debug;

    /// The process that this happens to: it waits until that one is awake.
    fn whom(world: &World<Self>, event: &Self::Event) -> Option<Who>;

    /// It happens.
    fn happens(world: &mut World<Self>, event: Self::Event);

    /// An owner says something that is for its engine, not for a link.
    fn effect(world: &mut World<Self>, engine: u32, effect: Effect);

    /// An owner says something to another.
    fn said(_world: &mut World<Self>, _engine: u32, _link: LinkId, _message: &PeerMessage) {}

    /// An owner has been stepped, and all that it said is done.
    fn stepped(_world: &mut World<Self>, _engine: u32) {}

    /// An engine is gone, with its open requests: those that it reads and those that it has offered.
    fn engine_lost(world: &mut World<Self>, engine: u32, open: Vec<usize>);

    /// An owner has heard that a rank is gone.
    fn rank_lost(world: &mut World<Self>, engine: u32);

    /// Shortest and longest time of a message from one engine's owner to another's, or, of the same engine, to or from its ranks.
    fn latency(world: &World<Self>, _from: u32, _to: u32) -> (Duration, Duration) {
        world.config.latency
    }
}
