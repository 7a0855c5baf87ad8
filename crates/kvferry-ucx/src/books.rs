//! Who has what open on our memory: the table, the [`Keeper`], and an account for each caller.
//!
//! A caller's operation is asked for at one rail, and its bytes may move over all of them. So what it has open is kept for the
//! caller, not for one rail's guest of it, and is let go when the operation ends, or when the caller can touch nothing any more:
//! its process has ended, or, where that can't be known, none of its lanes to us is left.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::units::RegionId;
use kvferry_transport::access::{Answer, Keeper};
use kvferry_transport::table::RegionTable;
use kvferry_transport::{EndpointId, RevokeError, RevokeScope};

/// A connection, by its caller's word.
pub(crate) type CallerId = (EndpointId, u64);

#[derive(Default)]
pub(crate) struct Books {
    pub(crate) table: RegionTable,
    keeper: Keeper,
    accounts: BTreeMap<CallerId, Account>,
}

#[derive(Default)]
struct Account {
    /// Guests of it, over all rails, whose lane may still carry something.
    lanes: usize,
    open: BTreeSet<u64>,
}

impl Books {
    /// A lane of a caller came up.
    pub(crate) fn enter(&mut self, caller: CallerId) {
        self.accounts.entry(caller).or_default().lanes += 1;
    }

    /// Answers a question.
    pub(crate) fn begin(&mut self, caller: CallerId, op: u64, generation: u64, regions: &[RegionId]) -> Answer {
        let answer = self.keeper.begin(caller.0, op, generation, regions, &self.table);
        if answer == Answer::Granted {
            self.accounts.entry(caller).or_default().open.insert(op);
        }
        answer
    }

    /// An operation has ended; whether it was open.
    pub(crate) fn end(&mut self, caller: CallerId, op: u64) -> bool {
        let opened = self.accounts.get_mut(&caller).is_some_and(|account| account.open.remove(&op));
        let ended = opened && self.keeper.end(caller.0, op);
        self.tidy(caller);
        ended
    }

    /// A lane of a caller carries nothing any more. With the last one, all that it has open ends if `then_all`.
    pub(crate) fn leave(&mut self, caller: CallerId, then_all: bool) {
        let Some(account) = self.accounts.get_mut(&caller) else { return };
        account.lanes = account.lanes.saturating_sub(1);
        if account.lanes == 0 && then_all {
            self.release(caller);
        }
        self.tidy(caller);
    }

    /// A caller touches nothing any more: all that it has open ends.
    pub(crate) fn release(&mut self, caller: CallerId) {
        let Some(account) = self.accounts.get_mut(&caller) else { return };
        for op in std::mem::take(&mut account.open) {
            self.keeper.end(caller.0, op);
        }
        self.tidy(caller);
    }

    /// Whether a caller has nothing open.
    pub(crate) fn is_idle(&self, caller: CallerId) -> bool {
        self.accounts.get(&caller).is_none_or(|account| account.open.is_empty())
    }

    pub(crate) fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.keeper.revoke(scope, &self.table)
    }

    #[cfg(test)]
    pub(crate) fn open(&self) -> usize {
        self.keeper.open()
    }

    fn tidy(&mut self, caller: CallerId) {
        if self.accounts.get(&caller).is_some_and(|account| account.lanes == 0 && account.open.is_empty()) {
            self.accounts.remove(&caller);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_transport::{Capabilities, Region};

    use super::*;

    const A: CallerId = (EndpointId::new([1; 16]), 4);

    #[test]
    fn what_is_open_lasts_until_it_ends_or_the_last_lane_is_gone() {
        let mut books = Books::default();
        let region = Region::zeroed(64).unwrap();
        let id = books.table.register(region, &Capabilities::host("test")).unwrap();
        (0..2).for_each(|_| books.enter(A));
        for op in 0..3 {
            assert_eq!(books.begin(A, op, 0, &[id]), Answer::Granted);
        }
        assert!(books.end(A, 1) && !books.end(A, 1));
        // Another connection of the same endpoint ends nothing of this one.
        assert!(!books.end((A.0, 5), 0));
        books.leave(A, true);
        assert_eq!((books.open(), books.is_idle(A)), (2, false));
        books.leave(A, true);
        assert_eq!((books.open(), books.is_idle(A), books.accounts.len()), (0, true, 0));
        // Where more is needed than that its lanes are gone.
        books.enter(A);
        books.begin(A, 7, 0, &[id]);
        books.leave(A, false);
        assert_eq!(books.open(), 1);
        books.release(A);
        assert_eq!((books.open(), books.accounts.len()), (0, 0));
    }
}
