//! Faults to plant in the glue around the machines. A sound model finds each.

/// What is done wrong. The machines themselves are never changed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Producer: a lease that is taken back gives its blocks back at once, and stays in the table for a late release.
    CloseLater,
    /// Producer: blocks are given back when the lease's time is up; its release is judged by an earlier clock.
    LateClock,
    /// Producer: a lease that isn't in the table any more is said to have been held.
    HeldIfUnknown,
    /// Producer: a lost link leaves open what it had bound.
    KeepAfterLink,
    /// Producer: leases outlive a restart, whatever the epoch.
    ForgetEpoch,
    /// Producer: the loss of a rank spares every lease that is bound.
    SpareAll,
    /// Producer: the id of a closed lease is given to another.
    LeaseIdAgain,
    /// Producer: a release counts whatever attempt and life of a consumer it names.
    AnyRelease,
    /// Producer: a report counts as the end of a writer, whosever it is.
    CountWriters,
    /// Producer: it says that all have stopped as soon as it is asked.
    StoppedTooEarly,
    /// Producer: a lease that nobody has bound yet stays open when it was said that nothing is written for it.
    OfferStaysOpen,
    /// Producer: an attempt that follows the one bound may still be bound when it was said that nothing is written for it.
    NextAttemptMayCome,
    /// Producer and consumer: a prefill that begins anew keeps its attempt.
    AttemptAgain,
    /// Producer: a prefill that begins anew is offered before its writers have stopped.
    SkipDrain,
    /// Consumer: it gives the lease up instead of asking its writers to stop; producer: that closes it at once.
    ReleaseEndsAll,
    /// Producer: beats that come while a prefill that begins anew is drained are told that the lease is over.
    BeatsEndWhileDraining,
    /// Producer and consumer: a prefill that begins anew is offered to whom doesn't want it any more.
    ReopenForNobody,
    /// Producer: a rank that joins anew while others still write proves nothing for them together.
    WriterInDoubtForEver,
    /// Producer: what comes to be known is told on the link that was asked on last, and on no other.
    ToldOnOneLink,
    /// Consumer: it gives a lease up that is being written, and its blocks are free.
    StopForgotten,
    /// Consumer: what is written over a link that is lost counts as stopped.
    LinkLossIsEvidence,
    /// Consumer: writers of which nothing is heard for long count as stopped.
    TimeIsEvidence,
    /// Consumer: writers that the producer doesn't know about count as stopped.
    DoubtIgnored,
    /// Consumer: evidence for a request that has ended is lost where another by the same reference is open.
    EvidenceForAnother,
    /// Consumer: evidence is asked for on links that come up, not on those that are.
    AskedOnNewLinksOnly,
    /// Consumer: any other life of a rank than the one it knows counts as a later one, however old the news is.
    OldManifest,
    /// Consumer: it doesn't wait for the verdict.
    DeliverUnasked,
    /// Consumer: the first rank's end counts as that of all.
    FirstRankEndsAll,
    /// Consumer: a rank that failed counts as one that has read.
    FaultIsFine,
    /// Consumer: the next attempt begins while ranks still read for the one before.
    RetryBeforeStopped,
    /// Consumer: a request that is given up ends at once, while ranks read.
    EndBeforeStopped,
    /// Consumer: a request that is given up while its ranks stop anyway makes another attempt.
    AbortForgotten,
    /// Consumer: blocks of a request in doubt are free at once.
    NoQuarantine,
    /// Consumer: a rank that joins anew proves nothing for requests that have not ended yet.
    DoubtForEver,
    /// Consumer: what a rank's joining proves for one attempt is taken to hold for the next.
    DoubtForgotten,
    /// Consumer: a request that has failed stays in the table.
    EndTwice,
    /// Consumer: time left is counted from when the answer came.
    CountFromAnswer,
    /// Consumer: ranks that don't stop are waited for without end.
    NoGrace,
}
