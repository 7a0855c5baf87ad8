//! What an engine's prefix cache would hold: block ids, the last used first, up to so many tokens.
//!
//! An id stands for its block *and all before it*, so equal ids at the beginning of two prompts are a shared prefix. A request uses
//! its blocks from the last to the first, so that of a request the tail goes first, as in engines that free a request's
//! blocks in reverse. It doesn't know which blocks a running request holds: those of a real engine can't be evicted meanwhile.

use std::collections::HashMap;

/// No entry.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Entry {
    id: u64,
    tokens: u64,
    /// Towards the last used.
    newer: u32,
    /// Towards the one to be evicted first.
    older: u32,
}

/// A prefix cache over block ids that evicts what was used longest ago. A call costs time in proportion to the ids it is given
/// and, for [`insert`](Self::insert), the blocks that it evicts.
///
/// ```
/// use kvferry_topology::load::PrefixCache;
/// let mut cache = PrefixCache::new(Some(3 * 512));
/// cache.insert(&[1, 2], 512);
/// assert_eq!(cache.lookup(&[1, 2, 3], 512, 1_300), 1_024);
/// cache.insert(&[7, 8], 512); // one block too many: the tail of the first goes
/// assert_eq!(cache.lookup(&[1, 2, 3], 512, 1_300), 512);
/// ```
#[derive(Clone, Debug)]
pub struct PrefixCache {
    capacity: Option<u64>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    places: HashMap<u64, u32>,
    newest: u32,
    oldest: u32,
    tokens: u64,
}

impl PrefixCache {
    /// An empty cache of so many tokens; `None`: nothing is ever evicted.
    #[must_use]
    pub fn new(capacity: Option<u64>) -> Self {
        Self {
            capacity,
            entries: Vec::new(),
            free: Vec::new(),
            places: HashMap::new(),
            newest: NONE,
            oldest: NONE,
            tokens: 0,
        }
    }

    /// Tokens of the blocks that are cached; a block counts as full.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How many tokens of a prompt are cached: those of the blocks up to the first that isn't, at most the prompt. They are used
    /// thereby. (An engine computes at least a prompt's last token: that is the caller's to subtract.)
    pub fn lookup(&mut self, ids: &[u64], block_tokens: u64, prompt: u64) -> u64 {
        let hit = ids.iter().take_while(|id| self.places.contains_key(*id)).count();
        for id in ids.iter().take(hit).rev() {
            if let Some(&place) = self.places.get(id) {
                self.unlink(place);
                self.link(place);
            }
        }
        (hit as u64).saturating_mul(block_tokens).min(prompt)
    }

    /// Caches all blocks of a request, and evicts those that were used longest ago, until no more than the capacity is left.
    pub fn insert(&mut self, ids: &[u64], block_tokens: u64) {
        for &id in ids.iter().rev() {
            if let Some(&place) = self.places.get(&id) {
                self.unlink(place);
                self.resize(place, block_tokens);
                self.link(place);
            } else if let Some(place) = self.take(Entry { id, tokens: block_tokens, newer: NONE, older: NONE }) {
                self.tokens = self.tokens.saturating_add(block_tokens);
                self.places.insert(id, place);
                self.link(place);
            }
        }
        while self.capacity.is_some_and(|most| self.tokens > most) && self.oldest != NONE {
            self.evict(self.oldest);
        }
    }

    fn take(&mut self, entry: Entry) -> Option<u32> {
        if let Some(place) = self.free.pop() {
            *self.entries.get_mut(place as usize)? = entry;
            return Some(place);
        }
        let place = u32::try_from(self.entries.len()).ok().filter(|p| *p != NONE)?;
        self.entries.push(entry);
        Some(place)
    }

    fn resize(&mut self, place: u32, tokens: u64) {
        if let Some(entry) = self.entries.get_mut(place as usize) {
            self.tokens = self.tokens.saturating_sub(entry.tokens).saturating_add(tokens);
            entry.tokens = tokens;
        }
    }

    fn evict(&mut self, place: u32) {
        self.unlink(place);
        if let Some(entry) = self.entries.get(place as usize) {
            self.tokens = self.tokens.saturating_sub(entry.tokens);
            self.places.remove(&entry.id);
            self.free.push(place);
        }
    }

    /// Takes an entry out of the order.
    fn unlink(&mut self, place: u32) {
        let Some(&Entry { newer, older, .. }) = self.entries.get(place as usize) else { return };
        match self.entries.get_mut(newer as usize) {
            Some(e) => e.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(older as usize) {
            Some(e) => e.newer = newer,
            None => self.oldest = newer,
        }
    }

    /// Puts an entry that is in no order at its newest end.
    fn link(&mut self, place: u32) {
        let older = self.newest;
        if let Some(entry) = self.entries.get_mut(place as usize) {
            entry.newer = NONE;
            entry.older = older;
        }
        match self.entries.get_mut(older as usize) {
            Some(e) => e.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }
}
