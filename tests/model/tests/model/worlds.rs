//! Worlds in which everything is as it should be.

use kvferry_model::{Chances, LeasePlan, Network, PullPlan, Shape, Start, Terms, World};

use crate::checked::holds;

pub(crate) const NONE: Chances = Chances {
    breaks: 0,
    losses: 0,
    repeats: 0,
    fails: 0,
    hangs: 0,
    echoes: 0,
    aborts: 0,
    withdraws: 0,
    producer_restarts: 0,
    consumer_restarts: 0,
    producer_ranks: 0,
    consumer_ranks: 0,
    reuses: 0,
    prefills: 0,
    strays: 0,
};

/// Without an end, from the beginning.
pub(crate) const LEASE: LeasePlan = LeasePlan { producer: 0, block: 0, ttl: None, after: None, stream: false };
/// At once, in two seconds, by one attempt.
pub(crate) const PULL: PullPlan =
    PullPlan { consumer: 0, lease: 0, block: 0, deadline: 2, attempts: 1, start: Start::First, push: false };

pub(crate) fn world(
    name: &'static str,
    shape: Shape,
    leases: &[LeasePlan],
    pulls: &[PullPlan],
    chances: Chances,
) -> World {
    let mut world = World::new(name, shape, leases, pulls).unwrap();
    world.chances = chances;
    world
}

/// With messages that may come in any order, more than once, or never.
pub(crate) fn anyhow(mut world: World) -> World {
    world.network = Network::Anyhow;
    world
}

/// Explores a world; with `KVFERRY_MODEL_DEPTH=2`, also the one in which more may happen.
pub(crate) fn explore(world: World, more: Chances) {
    let larger = std::env::var("KVFERRY_MODEL_DEPTH").is_ok_and(|depth| depth.parse::<u8>().is_ok_and(|d| d > 1));
    if larger {
        let mut world = world.clone();
        world.chances = more;
        holds(world);
    }
    holds(world);
}

/// The shortest that has all states.
const SHORT: PullPlan = PullPlan { deadline: 1, ..PULL };
/// A lease with an end, and a request that may outlast it.
const ENDING: LeasePlan = LeasePlan { ttl: Some(2), ..LEASE };
const LONG: PullPlan = PullPlan { deadline: 3, ..PULL };

#[test]
fn one_request() {
    let chances = Chances { breaks: 1, fails: 1, aborts: 1, withdraws: 1, reuses: 1, ..NONE };
    let more = Chances { hangs: 1, echoes: 1, consumer_ranks: 1, ..chances };
    explore(world("one request", Shape::Split, &[LEASE], &[PULL], chances), more);
}

#[test]
fn a_lease_that_ends() {
    let chances = Chances { reuses: 1, breaks: 1, ..NONE };
    let more = Chances { aborts: 1, withdraws: 1, ..chances };
    explore(world("a lease that ends", Shape::Split, &[ENDING], &[LONG], chances), more);
}

#[test]
fn another_attempt() {
    let pull = PullPlan { attempts: 2, ..PULL };
    let chances = Chances { fails: 2, aborts: 1, breaks: 1, reuses: 1, withdraws: 1, ..NONE };
    let more = Chances { hangs: 1, producer_ranks: 1, ..chances };
    explore(world("another attempt", Shape::Replicated, &[LEASE], &[pull], chances), more);
}

#[test]
fn restarts() {
    let again = PullPlan { start: Start::Anytime, block: 1, ..PULL };
    let chances = Chances { producer_restarts: 1, consumer_restarts: 1, ..NONE };
    let more = Chances { breaks: 1, reuses: 1, ..chances };
    explore(world("restarts", Shape::Split, &[LEASE], &[PULL, again], chances), more);
}

#[test]
fn a_producers_rank_is_lost() {
    let pull = PullPlan { attempts: 2, ..PULL };
    let chances = Chances { producer_ranks: 1, fails: 1, reuses: 1, ..NONE };
    let more = Chances { producer_ranks: 2, fails: 2, breaks: 1, ..chances };
    explore(world("a producer's rank is lost", Shape::Replicated, &[LEASE], &[pull], chances), more);
}

#[test]
fn a_consumers_rank_is_lost() {
    let second = LeasePlan { block: 1, ..LEASE };
    let next = PullPlan { lease: 1, start: Start::After(0), ..PULL };
    let chances = Chances { consumer_ranks: 1, ..NONE };
    let more = Chances { consumer_ranks: 2, breaks: 1, fails: 1, ..chances };
    explore(world("a consumer's rank is lost", Shape::Split, &[LEASE, second], &[PULL, next], chances), more);
}

#[test]
fn a_rank_that_joins_between_attempts() {
    let pull = PullPlan { attempts: 2, ..PULL };
    let chances = Chances { fails: 1, hangs: 1, consumer_ranks: 1, ..NONE };
    let more = Chances { fails: 2, consumer_ranks: 2, aborts: 1, ..chances };
    explore(world("a rank joins between attempts", Shape::Replicated, &[LEASE], &[pull], chances), more);
}

#[test]
fn reads_that_never_end() {
    let second = LeasePlan { block: 1, ..LEASE };
    let next = PullPlan { lease: 1, start: Start::After(0), ..PULL };
    let chances = Chances { hangs: 1, aborts: 1, echoes: 1, ..NONE };
    let more = Chances { breaks: 1, ..chances };
    explore(world("reads that never end", Shape::Split, &[LEASE, second], &[PULL, next], chances), more);
}

#[test]
fn two_consumers_of_one_lease() {
    let other = PullPlan { consumer: 1, ..SHORT };
    let chances = Chances { breaks: 1, reuses: 1, ..NONE };
    let more = Chances { aborts: 1, ..chances };
    explore(world("two consumers of one lease", Shape::Split, &[LEASE], &[SHORT, other], chances), more);
}

#[test]
fn one_reference_twice() {
    let again = PullPlan { start: Start::After(0), ..SHORT };
    let chances = Chances { breaks: 1, aborts: 1, reuses: 1, ..NONE };
    let more = Chances { fails: 1, hangs: 1, ..chances };
    explore(world("one reference twice", Shape::Split, &[LEASE], &[SHORT, again], chances), more);
}

#[test]
fn a_block_offered_again() {
    let second = LeasePlan { after: Some(0), ..LEASE };
    let next = PullPlan { lease: 1, start: Start::Anytime, block: 1, ..SHORT };
    let chances = Chances { withdraws: 1, ..NONE };
    let more = Chances { breaks: 1, ..chances };
    explore(world("a block offered again", Shape::Split, &[LEASE, second], &[SHORT, next], chances), more);
}

#[test]
fn two_leases_of_one_heartbeat() {
    let (lease, second) = (LeasePlan { ttl: Some(1), ..LEASE }, LeasePlan { ttl: Some(2), block: 1, ..LEASE });
    let next = PullPlan { lease: 1, block: 1, deadline: 2, ..PULL };
    let more = Chances { reuses: 1, ..NONE };
    explore(world("two leases of one heartbeat", Shape::Split, &[lease, second], &[SHORT, next], NONE), more);
}

#[test]
fn two_engines_a_side() {
    let other = LeasePlan { producer: 1, ..LEASE };
    let next = PullPlan { consumer: 1, lease: 1, ..SHORT };
    let more = Chances { breaks: 1, ..NONE };
    explore(world("two engines a side", Shape::Split, &[LEASE, other], &[SHORT, next], NONE), more);
}

#[test]
fn messages_in_any_order() {
    let pull = PullPlan { deadline: 2, ..PULL };
    let chances = Chances { losses: 1, repeats: 1, reuses: 1, ..NONE };
    let more = Chances { aborts: 1, ..chances };
    explore(anyhow(world("messages in any order", Shape::Split, &[ENDING], &[pull], chances)), more);
}

#[test]
fn attempts_with_messages_in_any_order() {
    let pull = PullPlan { attempts: 2, deadline: 2, ..PULL };
    let chances = Chances { losses: 1, repeats: 1, reuses: 1, fails: 1, ..NONE };
    let more = Chances { fails: 2, aborts: 1, ..chances };
    let mut world = anyhow(world("attempts, messages in any order", Shape::Replicated, &[ENDING], &[pull], chances));
    world.terms = Terms { beat: 2, ..Terms::default() };
    explore(world, more);
}
