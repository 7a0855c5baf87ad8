//! An offer whose bytes are still being computed, as the engine holds it.

use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::request::SrcGroup;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::{ItemId, Name, TokenRange};
use kvferry_proto::names::{Attempt, LeaseId};
use kvferry_session::StreamError;
use tokio::sync::oneshot;

use crate::driver::{Command, Said};
use crate::owner::{CallError, Caller};
use crate::reference::Reference;

/// Blocks that are offered while a prefill still writes them; see [`Owner::announce`](crate::Owner::announce).
///
/// The engine says of it what it knows, when it knows it: [more blocks](Self::extend), [bytes that are final](Self::region_ready), and
/// at the end [that this is all](Self::seal). Whoever was granted room is sent final bytes at once; who pulls waits for the
/// seal. Everything that was listed is lent as by an offer, until [`OwnerEvent::Released`](crate::OwnerEvent::Released) names the lease.
///
/// Each call is done when the owner has taken it, and happens all the same where its future is dropped after the first poll. Calls
/// are taken in the order in which they are first polled.
///
/// Dropping it before the seal withdraws the offer: what nobody goes on with will never be final. After the seal
/// dropping it does nothing.
#[derive(Debug)]
pub struct OfferStream {
    reference: Reference,
    attempt: Attempt,
    sealed: bool,
    spec: Arc<ModelSpec>,
    caller: Arc<Caller>,
}

impl OfferStream {
    pub(crate) fn new(reference: Reference, spec: Arc<ModelSpec>, caller: Arc<Caller>) -> Self {
        Self { reference, attempt: Attempt::FIRST, sealed: false, spec, caller }
    }

    /// What the router carries. It may do so at once: a consumer can bind it before a byte is final.
    #[must_use]
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// The lease.
    #[must_use]
    pub fn lease(&self) -> LeaseId {
        self.reference.lease()
    }

    /// Which run of the prefill this is; what ranks say [by themselves](crate::ReadyPort) has to name it.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Whether all is said.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Lists more blocks, appended to those listed before: as the prefill gets them. `groups` are all of them, one entry for each group
    /// of the engine.
    ///
    /// # Errors
    /// If the lease is over, or the blocks can't be offered, or those from before are not there any more; then nothing has changed.
    pub async fn extend(&self, groups: Vec<SrcGroup>) -> Result<(), CallError> {
        self.say(Said::Extend { attempt: self.attempt, groups }).await.map(drop)
    }

    /// Promises that bytes are final: of these items, the tokens of this range, which begins where it ended the last time for each of
    /// them (at first, with token 0). They must not change before the lease is over. All ranks must have written
    /// them; a rank that is further than others may say so [by itself](crate::ReadyPort).
    ///
    /// For prefill in chunks: `region_ready(Items::Paged, chunk)` after each. For layers, as they finish: their items by
    /// [id](Items::Ids), [range](Items::Range) or [name](Items::Named). What is never said to be ready is final with the seal:
    /// states always, and whatever the engine doesn't care to tell of.
    ///
    /// # Errors
    /// If the lease is over, an item is none of the model's or a state, tokens are left out or said twice, or no block is listed for
    /// them; then nothing has changed.
    pub async fn region_ready(&self, items: impl Into<Items>, tokens: TokenRange) -> Result<(), CallError> {
        let items = items.into().of(&self.spec)?;
        self.say(Said::Ready { attempt: self.attempt, items, tokens }).await.map(drop)
    }

    /// The prefill is complete: `groups` is all that is offered, with what is held of it and with its states, and every byte is final.
    ///
    /// # Errors
    /// If the lease is over, or the blocks can't be offered, or those from before are not there any more; then nothing has changed.
    pub async fn seal(&mut self, groups: Vec<SrcGroup>) -> Result<(), CallError> {
        self.say(Said::Seal { attempt: self.attempt, groups }).await?;
        self.sealed = true;
        Ok(())
    }

    /// The prefill begins anew (it was preempted, say), with these blocks: nothing is final any more. Writes of the run before are
    /// stopped, and none of the new one begins before that has ended and the consumer has granted its room anew.
    ///
    /// The same blocks may be listed again, and written anew at once: what is still on its way of the run before is not delivered, whatever
    /// it is by then. Blocks that are listed no more stay lent until the lease's end.
    ///
    /// # Errors
    /// If the lease is over or sealed, or the blocks can't be offered; then nothing has changed.
    pub async fn restart(&mut self, groups: Vec<SrcGroup>) -> Result<Attempt, CallError> {
        self.attempt = self.say(Said::Restart { groups }).await?;
        Ok(self.attempt)
    }

    async fn say(&self, said: Said) -> Result<Attempt, CallError> {
        let (reply, answer) = oneshot::channel();
        self.caller.tell(Command::Stream { lease: self.lease(), said, reply })?;
        let answered: Result<Attempt, StreamError> = answer.await.map_err(|_| CallError::Shutdown)?;
        Ok(answered?)
    }
}

/// Items of the model, as an engine likes to name them: item ids count from 0 in the order of its [`ModelSpec`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Items {
    /// All that are paged: everything but states.
    Paged,
    /// By id.
    Ids(Vec<ItemId>),
    /// From one id to before another: those of a layer, say.
    Range(Range<u32>),
    /// By name.
    Named(Vec<String>),
}

impl Items {
    /// Their ids, in order.
    ///
    /// # Errors
    /// If the model has no item of a name. Ids that it doesn't have are the session's to refuse.
    fn of(self, spec: &ModelSpec) -> Result<Vec<ItemId>, CallError> {
        Ok(match self {
            Self::Paged => spec.iter().filter(|(_, item)| item.as_paged().is_some()).map(|(id, _)| id).collect(),
            Self::Ids(ids) => ids,
            // One that is too long to be right is cut to one too many.
            Self::Range(range) => range.take(spec.items().len().saturating_add(1)).map(ItemId::new).collect(),
            Self::Named(names) => {
                let found = |name: String| spec.find(&Name::new(&name)).ok_or(CallError::NoSuchItem { name });
                names.into_iter().map(found).collect::<Result<_, _>>()?
            }
        })
    }
}

impl From<ItemId> for Items {
    fn from(id: ItemId) -> Self {
        Self::Ids(vec![id])
    }
}

impl From<Vec<ItemId>> for Items {
    fn from(ids: Vec<ItemId>) -> Self {
        Self::Ids(ids)
    }
}

impl From<&[ItemId]> for Items {
    fn from(ids: &[ItemId]) -> Self {
        Self::Ids(ids.to_vec())
    }
}

impl From<Range<u32>> for Items {
    fn from(range: Range<u32>) -> Self {
        Self::Range(range)
    }
}

impl From<&str> for Items {
    fn from(name: &str) -> Self {
        Self::Named(vec![name.to_owned()])
    }
}

impl From<&[&str]> for Items {
    fn from(names: &[&str]) -> Self {
        Self::Named(names.iter().map(|name| (*name).to_owned()).collect())
    }
}

impl<const N: usize> From<[&str; N]> for Items {
    fn from(names: [&str; N]) -> Self {
        Self::from(&names[..])
    }
}

impl Drop for OfferStream {
    fn drop(&mut self) {
        if !self.sealed {
            let (reply, _) = oneshot::channel();
            // With the owner ends the lease.
            drop(self.caller.tell(Command::Withdraw { lease: self.lease(), reply }));
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::spec::{Component, Item, PagedItem, StateItem};

    use super::*;

    #[test]
    fn items_are_named_in_every_way() {
        let paged = |name| Item::paged(name, PagedItem::new(1, vec![Component::new("kv", 16, "bf16")]));
        let parts = vec![kvferry_geometry::spec::StatePart::new("s", 1, 1, 16, "bf16")];
        let spec = ModelSpec::new(vec![paged("a"), Item::state("m", StateItem { parts }), paged("b")]).unwrap();
        let of = |items: Items| items.of(&spec).map(|ids| ids.iter().map(|id| id.get()).collect::<Vec<_>>());
        assert_eq!(of(Items::Paged).unwrap(), [0, 2]);
        assert_eq!(of((1..3).into()).unwrap(), [1, 2]);
        assert_eq!(of(["b", "a"].into()).unwrap(), [2, 0]);
        assert_eq!(of("m".into()).unwrap(), [1]);
        assert_eq!(of(ItemId::new(2).into()).unwrap(), [2]);
        assert_eq!(of((0..u32::MAX).into()).unwrap().len(), 4, "one too many, and no more");
        assert!(of("c".into()).unwrap_err().to_string().contains("\"c\""));
    }
}
