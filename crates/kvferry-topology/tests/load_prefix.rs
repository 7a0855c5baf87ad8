//! The prefix cache beside one that keeps a list and searches it.
#![allow(clippy::unwrap_used, reason = "tests")]

use kvferry_sim::rng::Rng;
use kvferry_topology::load::PrefixCache;

/// The last used first.
struct Naive {
    capacity: Option<u64>,
    list: Vec<(u64, u64)>,
}

impl Naive {
    fn place(&self, id: u64) -> Option<usize> {
        self.list.iter().position(|e| e.0 == id)
    }

    fn lookup(&mut self, ids: &[u64], tokens: u64, prompt: u64) -> u64 {
        let hit: Vec<u64> = ids.iter().copied().take_while(|id| self.place(*id).is_some()).collect();
        for id in hit.iter().rev() {
            let entry = self.list.remove(self.place(*id).unwrap());
            self.list.insert(0, entry);
        }
        (hit.len() as u64 * tokens).min(prompt)
    }

    fn insert(&mut self, ids: &[u64], tokens: u64) {
        for id in ids.iter().rev() {
            if let Some(place) = self.place(*id) {
                self.list.remove(place);
            }
            self.list.insert(0, (*id, tokens));
        }
        while self.capacity.is_some_and(|most| self.tokens() > most) {
            self.list.pop();
        }
    }

    fn tokens(&self) -> u64 {
        self.list.iter().map(|e| e.1).sum()
    }
}

#[test]
fn it_is_a_list_in_order_of_use() {
    let mut hits = 0;
    let mut evicted = 0;
    for seed in 0..400 {
        let mut rng = Rng::of(&[seed]);
        let capacity = if rng.chance(1_000) { None } else { Some(rng.below(4_000)) };
        let mixed = rng.chance(3_000);
        let names = rng.between(3, 60);
        let mut naive = Naive { capacity, list: Vec::new() };
        let mut cache = PrefixCache::new(capacity);
        for _ in 0..80 {
            let tokens = if mixed { rng.between(1, 64) } else { 64 };
            // Names come again, also within a request.
            let ids: Vec<u64> = (0..rng.below(12)).map(|_| rng.below(names)).collect();
            let prompt = rng.below(12 * 64);
            let (expected, got) = (naive.lookup(&ids, tokens, prompt), cache.lookup(&ids, tokens, prompt));
            assert_eq!(got, expected, "seed {seed}");
            hits += got;
            if rng.chance(8_000) {
                let before = naive.list.len();
                naive.insert(&ids, tokens);
                cache.insert(&ids, tokens);
                evicted += u64::from(naive.list.len() < before);
            }
            assert_eq!(cache.tokens(), naive.tokens(), "seed {seed}");
        }
    }
    assert!(hits > 10_000 && evicted > 100, "{hits} {evicted}");
}

#[test]
fn of_a_request_the_tail_goes_first() {
    let mut cache = PrefixCache::new(Some(300));
    cache.insert(&[1, 2, 3, 4, 5], 100);
    assert_eq!(cache.tokens(), 300);
    assert_eq!(cache.lookup(&[1, 2, 3, 4, 5], 100, 450), 300);
    // Used again, it outlives what came later.
    cache.insert(&[9], 100);
    assert_eq!(cache.lookup(&[1, 2], 100, 450), 200);
    cache.insert(&[8, 7], 100);
    assert_eq!(cache.lookup(&[9], 100, 100), 0);
    assert_eq!(cache.lookup(&[1, 2], 100, 450), 100);
}

#[test]
fn a_hit_is_no_longer_than_the_prompt() {
    let mut cache = PrefixCache::new(None);
    cache.insert(&[1, 2], 512);
    assert_eq!(cache.lookup(&[1, 2], 512, 700), 700);
    assert_eq!(cache.lookup(&[2, 1], 512, 700), 700, "ids stand for what is before them: the caller's affair");
    assert_eq!(cache.lookup(&[3, 1], 512, 700), 0);
    assert_eq!(cache.lookup(&[], 512, 700), 0);
}

#[test]
fn without_room_nothing_is_kept() {
    let mut cache = PrefixCache::new(Some(511));
    cache.insert(&[1, 2], 512);
    assert_eq!((cache.tokens(), cache.lookup(&[1, 2], 512, 1_024)), (0, 0));
}
