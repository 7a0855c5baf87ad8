//! Worlds of push in which everything is as it should be.

use kvferry_model::{Chances, LeasePlan, PullPlan, Shape, Start};

use crate::worlds::{LEASE, NONE, PULL, explore, world};

/// At once, in one second, by one attempt.
pub(crate) const PUSH: PullPlan = PullPlan { push: true, deadline: 1, ..PULL };
/// Announced; it ends unless it is bound.
pub(crate) const STREAM: LeasePlan = LeasePlan { stream: true, ..LEASE };

#[test]
fn one_push() {
    let chances = Chances { breaks: 1, fails: 1, aborts: 1, ..NONE };
    let more = Chances { hangs: 1, withdraws: 1, ..chances };
    explore(world("one push", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn a_stream() {
    let chances = Chances { prefills: 1, fails: 1, ..NONE };
    let more = Chances { aborts: 1, prefills: 2, ..chances };
    explore(world("a stream", Shape::Split, &[STREAM], &[PUSH], chances), more);
}

#[test]
fn a_stream_that_ends() {
    let chances = Chances { prefills: 1, ..NONE };
    let more = Chances { breaks: 1, ..chances };
    let lease = LeasePlan { ttl: Some(2), ..STREAM };
    explore(world("a stream that ends", Shape::Split, &[lease], &[PullPlan { deadline: 2, ..PUSH }], chances), more);
}

#[test]
fn a_stream_over_links_that_break() {
    let chances = Chances { prefills: 1, breaks: 1, ..NONE };
    let more = Chances { prefills: 2, hangs: 1, ..chances };
    explore(world("a stream over links that break", Shape::Split, &[STREAM], &[PUSH], chances), more);
}

#[test]
fn taken_back_while_written() {
    let chances = Chances { withdraws: 1, aborts: 1, reuses: 1, ..NONE };
    let more = Chances { breaks: 1, fails: 1, ..chances };
    explore(world("taken back while written", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn two_consumers_push_one_lease() {
    let other = PullPlan { consumer: 1, ..PUSH };
    let more = Chances { aborts: 1, ..NONE };
    explore(world("two consumers push one lease", Shape::Split, &[LEASE], &[PUSH, other], NONE), more);
}

#[test]
fn another_attempt_to_push() {
    let push = PullPlan { attempts: 2, ..PUSH };
    let chances = Chances { fails: 1, aborts: 1, breaks: 1, ..NONE };
    let more = Chances { hangs: 1, ..chances };
    explore(world("another attempt to push", Shape::Replicated, &[LEASE], &[push], chances), more);
}

#[test]
fn writes_that_never_end() {
    let chances = Chances { hangs: 1, breaks: 1, aborts: 1, ..NONE };
    let more = Chances { hangs: 2, ..chances };
    explore(world("writes that never end", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn a_writer_is_lost() {
    let chances = Chances { producer_ranks: 1, breaks: 1, ..NONE };
    let more = Chances { aborts: 1, ..chances };
    explore(world("a writer is lost", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn a_producer_of_writers_restarts() {
    let chances = Chances { producer_restarts: 1, aborts: 1, ..NONE };
    let more = Chances { consumer_restarts: 1, breaks: 1, ..chances };
    explore(world("a producer of writers restarts", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn a_consumer_of_writers_restarts() {
    let again = PullPlan { start: Start::After(0), ..PUSH };
    let chances = Chances { consumer_restarts: 1, ..NONE };
    let more = Chances { aborts: 1, ..chances };
    explore(world("a consumer of writers restarts", Shape::Split, &[LEASE], &[PUSH, again], chances), more);
}

#[test]
fn a_consumers_rank_is_lost_while_written() {
    let chances = Chances { consumer_ranks: 1, breaks: 1, ..NONE };
    let more = Chances { hangs: 1, ..chances };
    explore(world("a consumer's rank is lost while written", Shape::Split, &[LEASE], &[PUSH], chances), more);
}

#[test]
fn one_reference_pushed_twice() {
    let again = PullPlan { start: Start::After(0), block: 1, ..PUSH };
    let chances = Chances { aborts: 1, ..NONE };
    let more = Chances { breaks: 1, ..chances };
    explore(world("one reference pushed twice", Shape::Split, &[LEASE], &[PUSH, again], chances), more);
}

#[test]
fn pushed_then_pulled() {
    let pulled = PullPlan { push: false, lease: 1, start: Start::After(0), ..PUSH };
    let second = LeasePlan { block: 1, ..LEASE };
    let chances = Chances { aborts: 1, ..NONE };
    let more = Chances { breaks: 1, ..chances };
    explore(world("pushed then pulled", Shape::Split, &[LEASE, second], &[PUSH, pulled], chances), more);
}

#[test]
fn old_news_of_a_producer() {
    let chances = Chances { strays: 1, producer_ranks: 1, ..NONE };
    let second = LeasePlan { after: Some(0), ..LEASE };
    let push = PullPlan { lease: 1, start: Start::Anytime, ..PUSH };
    let more = Chances { breaks: 1, ..chances };
    explore(world("old news of a producer", Shape::Split, &[LEASE, second], &[push], chances), more);
}
