//! Planted faults. Each is found; where there is a choice, by what it leads to.

use kvferry_model::{Chances, Fault, LeasePlan, PullPlan, Rule, Shape, Start, World};

use crate::checked::breaks;
use crate::pushes::{PUSH, STREAM};
use crate::worlds::{LEASE, NONE, PULL, anyhow, world};

const REUSE: Chances = Chances { reuses: 1, ..NONE };

/// One lease, one request.
fn one(chances: Chances) -> World {
    world("one request", Shape::Split, &[LEASE], &[PULL], chances)
}

/// One lease that every rank can serve alone, one request of two attempts.
fn two_attempts(chances: Chances) -> World {
    let pull = PullPlan { attempts: 2, ..PULL };
    world("two attempts", Shape::Replicated, &[LEASE], &[pull], chances)
}

/// One lease that ends, one request.
fn ending(chances: Chances) -> World {
    let (lease, pull) = (LeasePlan { ttl: Some(1), ..LEASE }, PullPlan { deadline: 3, ..PULL });
    world("a lease that ends", Shape::Split, &[lease], &[pull], chances)
}

#[test]
fn a_withdrawn_lease_stays_for_a_late_release() {
    let world = one(Chances { withdraws: 1, ..REUSE });
    breaks(world.clone().with(Fault::CloseLater), Rule::FreeIsClosed);
    breaks(world.with(Fault::CloseLater), Rule::DeliveredIsRight);
}

#[test]
fn an_expired_lease_is_released_by_an_earlier_clock() {
    breaks(ending(REUSE).with(Fault::LateClock), Rule::DeliveredIsRight);
}

#[test]
fn a_lease_that_is_not_there_is_held() {
    breaks(one(Chances { withdraws: 1, ..REUSE }).with(Fault::HeldIfUnknown), Rule::DeliveredIsRight);
}

#[test]
fn a_lost_link_leaves_its_leases_open() {
    breaks(one(Chances { breaks: 1, ..NONE }).with(Fault::KeepAfterLink), Rule::AllEnds);
}

#[test]
fn leases_outlive_their_epoch() {
    let pull = PullPlan { start: Start::Anytime, ..PULL };
    let chances = Chances { producer_restarts: 1, ..NONE };
    let world = world("a restart", Shape::Split, &[LEASE], &[pull], chances);
    breaks(world.with(Fault::ForgetEpoch), Rule::DeliveredIsRight);
}

#[test]
fn a_lost_rank_spares_what_it_holds() {
    breaks(one(Chances { producer_ranks: 1, ..NONE }).with(Fault::SpareAll), Rule::DeliveredIsRight);
}

#[test]
fn a_lease_id_is_used_again() {
    let second = LeasePlan { after: Some(0), ..LEASE };
    let next = PullPlan { lease: 1, start: Start::After(0), ..PULL };
    let world = || {
        let chances = Chances { repeats: 1, ..REUSE };
        anyhow(world("one id for two leases", Shape::Split, &[LEASE, second], &[PULL, next], chances))
    };
    breaks(world().with(Fault::LeaseIdAgain), Rule::DeliveredIsRight);
}

#[test]
fn anybody_releases() {
    let other = PullPlan { consumer: 1, ..PULL };
    let chances = Chances { aborts: 1, ..NONE };
    let world = world("two consumers of one lease", Shape::Split, &[LEASE], &[PULL, other], chances);
    breaks(world.with(Fault::AnyRelease), Rule::ReleasedByItsReader);
}

#[test]
fn the_verdict_is_not_waited_for() {
    breaks(one(NONE).with(Fault::DeliverUnasked), Rule::DeliveredIsHeld);
    breaks(one(Chances { withdraws: 1, ..REUSE }).with(Fault::DeliverUnasked), Rule::DeliveredIsRight);
}

#[test]
fn the_first_rank_ends_all() {
    breaks(one(NONE).with(Fault::FirstRankEndsAll), Rule::DeliveredIsRight);
    breaks(one(NONE).with(Fault::FirstRankEndsAll), Rule::WrittenIsLent);
}

#[test]
fn a_failed_read_counts_as_one() {
    breaks(one(Chances { fails: 1, ..NONE }).with(Fault::FaultIsFine), Rule::DeliveredIsRight);
}

#[test]
fn the_next_attempt_does_not_wait() {
    breaks(two_attempts(Chances { fails: 1, ..NONE }).with(Fault::RetryBeforeStopped), Rule::StoppedBeforeRetry);
}

#[test]
fn an_aborted_request_does_not_wait() {
    breaks(one(Chances { aborts: 1, ..NONE }).with(Fault::EndBeforeStopped), Rule::WrittenIsLent);
}

#[test]
fn an_aborted_request_tries_again() {
    let chances = Chances { aborts: 1, fails: 1, ..NONE };
    breaks(two_attempts(chances).with(Fault::AbortForgotten), Rule::GivenUpIsOver);
}

#[test]
fn blocks_in_doubt_are_free() {
    breaks(one(Chances { hangs: 1, ..NONE }).with(Fault::NoQuarantine), Rule::WrittenIsLent);
}

#[test]
fn a_rank_that_joins_early_leaves_doubt_for_ever() {
    breaks(one(Chances { consumer_ranks: 1, ..NONE }).with(Fault::DoubtForEver), Rule::AllEnds);
}

#[test]
fn a_rank_that_joins_between_attempts_proves_too_much() {
    let chances = Chances { fails: 1, hangs: 1, consumer_ranks: 1, ..NONE };
    breaks(two_attempts(chances).with(Fault::DoubtForgotten), Rule::WrittenIsLent);
}

#[test]
fn a_request_that_failed_stays() {
    breaks(one(Chances { aborts: 1, ..NONE }).with(Fault::EndTwice), Rule::OneOutcome);
}

#[test]
fn time_is_counted_from_the_answer() {
    breaks(ending(NONE).with(Fault::CountFromAnswer), Rule::EndIsNotLater);
}

#[test]
fn ranks_are_waited_for_without_end() {
    breaks(one(Chances { hangs: 1, ..NONE }).with(Fault::NoGrace), Rule::AllEnds);
}

/// No fault of the owners: what they need of a link between them. Two requests by one reference get answers of one name.
#[test]
fn one_reference_twice_needs_ordered_links() {
    let first = PullPlan { deadline: 1, ..PULL };
    let again = PullPlan { start: Start::After(0), ..first };
    let chances = Chances { repeats: 1, ..REUSE };
    let world = world("one reference twice", Shape::Split, &[LEASE], &[first, again], chances);
    breaks(anyhow(world), Rule::DeliveredIsRight);
}

/// No fault of the owners: what they need of a link to a rank. A report doesn't name its attempt.
#[test]
fn a_report_that_comes_twice_needs_one_attempt() {
    breaks(two_attempts(Chances { fails: 1, echoes: 1, ..NONE }), Rule::WrittenIsLent);
}

/// One push.
fn push(chances: Chances) -> World {
    world("one push", Shape::Split, &[LEASE], &[PUSH], chances)
}

/// One stream that is pushed.
fn stream(chances: Chances) -> World {
    world("a stream", Shape::Split, &[STREAM], &[PUSH], chances)
}

/// One push of two attempts.
fn push_twice(chances: Chances) -> World {
    world("another attempt to push", Shape::Replicated, &[LEASE], &[PullPlan { attempts: 2, ..PUSH }], chances)
}

#[test]
fn writers_are_counted() {
    breaks(push(Chances { echoes: 1, ..NONE }).with(Fault::CountWriters), Rule::DeliveredIsRight);
    breaks(push(Chances { echoes: 1, ..NONE }).with(Fault::CountWriters), Rule::GrantedIsLent);
}

#[test]
fn writers_are_not_waited_for() {
    breaks(push(Chances { aborts: 1, ..NONE }).with(Fault::StoppedTooEarly), Rule::StoppedIsOver);
    breaks(push(Chances { aborts: 1, ..NONE }).with(Fault::StoppedTooEarly), Rule::GrantedIsLent);
}

#[test]
fn a_grant_that_comes_after_its_stop() {
    let chances = Chances { breaks: 1, ..NONE };
    breaks(push(chances).with(Fault::OfferStaysOpen), Rule::StoppedIsOver);
    breaks(push(chances).with(Fault::OfferStaysOpen), Rule::GrantedIsLent);
}

#[test]
fn a_grant_of_the_next_attempt_that_comes_after_its_stop() {
    let chances = Chances { breaks: 1, fails: 1, ..NONE };
    breaks(push_twice(chances).with(Fault::NextAttemptMayCome), Rule::StoppedIsOver);
    breaks(push_twice(chances).with(Fault::NextAttemptMayCome), Rule::GrantedIsLent);
}

#[test]
fn a_prefill_begins_anew_by_the_same_attempt() {
    breaks(stream(Chances { prefills: 1, ..NONE }).with(Fault::AttemptAgain), Rule::AttemptOnce);
}

#[test]
fn a_prefill_that_begins_anew_does_not_wait() {
    breaks(stream(Chances { prefills: 1, ..NONE }).with(Fault::SkipDrain), Rule::DrainedBeforeNext);
}

#[test]
fn a_release_ends_what_is_written() {
    breaks(push(Chances { aborts: 1, ..NONE }).with(Fault::ReleaseEndsAll), Rule::SourceIsKept);
}

#[test]
fn beats_end_while_a_prefill_is_drained() {
    let lease = LeasePlan { ttl: Some(2), ..STREAM };
    let push = PullPlan { deadline: 2, ..PUSH };
    let world = world("a stream that ends", Shape::Split, &[lease], &[push], Chances { prefills: 1, ..NONE });
    breaks(world.with(Fault::BeatsEndWhileDraining), Rule::ClosedIsClosed);
}

#[test]
fn a_prefill_is_offered_to_nobody() {
    breaks(stream(Chances { prefills: 1, aborts: 1, ..NONE }).with(Fault::ReopenForNobody), Rule::AllEnds);
}

#[test]
fn a_writer_that_joins_early_leaves_doubt_for_ever() {
    breaks(push(Chances { producer_ranks: 1, ..NONE }).with(Fault::WriterInDoubtForEver), Rule::AllEnds);
}

#[test]
fn what_has_stopped_is_told_on_one_link() {
    breaks(push(Chances { aborts: 1, breaks: 1, ..NONE }).with(Fault::ToldOnOneLink), Rule::AllEnds);
}

#[test]
fn what_is_given_up_is_free_while_it_is_written() {
    breaks(push(Chances { aborts: 1, ..NONE }).with(Fault::StopForgotten), Rule::GrantedIsLent);
}

#[test]
fn a_lost_link_frees_what_is_written() {
    breaks(push(Chances { breaks: 1, ..NONE }).with(Fault::LinkLossIsEvidence), Rule::GrantedIsLent);
}

#[test]
fn time_frees_what_is_written() {
    breaks(push(NONE).with(Fault::TimeIsEvidence), Rule::GrantedIsLent);
}

#[test]
fn writers_in_doubt_are_ignored() {
    breaks(push(Chances { hangs: 1, aborts: 1, ..NONE }).with(Fault::DoubtIgnored), Rule::GrantedIsLent);
}

#[test]
fn evidence_is_taken_for_that_of_another_request() {
    let again = PullPlan { start: Start::After(0), block: 1, ..PUSH };
    let world = world("one reference pushed twice", Shape::Split, &[LEASE], &[PUSH, again], NONE);
    breaks(world.with(Fault::EvidenceForAnother), Rule::AllEnds);
}

#[test]
fn evidence_is_asked_for_on_new_links_only() {
    let chances = Chances { strays: 1, breaks: 1, ..NONE };
    breaks(push(chances).with(Fault::AskedOnNewLinksOnly), Rule::AllEnds);
}

#[test]
fn old_news_counts_as_a_later_life() {
    let second = LeasePlan { after: Some(0), ..LEASE };
    let push = PullPlan { lease: 1, start: Start::Anytime, ..PUSH };
    let chances = Chances { strays: 1, producer_ranks: 1, ..NONE };
    let world = world("old news of a producer", Shape::Split, &[LEASE, second], &[push], chances);
    breaks(world.with(Fault::OldManifest), Rule::GrantedIsLent);
}
